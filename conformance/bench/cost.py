"""`bench --plot`: cost against size, in one layer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance.bench.cases import CASES, Case
from conformance.bench.one import measured
from conformance.bench.sizes import Size, device_memory
from conformance.bench.svg import Point, plot

CURVES = {
    "decode": "decode, equal lengths",
    "filter": "filter, one row out",
    "extend": "extend by one row",
    "mask": "mask, ragged",
}
"""Which case stands for an operation."""
NARROW: dict[str, dict[str, Any]] = {"mask": {"heads": 1, "query_heads": 1, "head_size": 8}}
"""A mask knows nothing of heads: the caches that it is made for may be small."""
TOKENS = (1024, 4096, 16384, 65536)
BATCHES = (1, 4, 16, 64)
SECONDS = 60.0
"""For the points of one operation; what would take longer, by its columns and the point before, is skipped."""
HOST_MEMORY = 4 << 30
COPIES = 4
"""How often a point's columns lie in memory at once: what they are made of, held, and made anew."""


@dataclass(frozen=True)
class Skipped:
    """A size that was not measured."""

    operation: str
    batch: int
    tokens: int
    reason: str


def curves(
    size: Size,
    beside: Mapping[str, ModuleType],
    rounds: int,
    seed: int,
    tokens: Sequence[int] = TOKENS,
    batches: Sequence[int] = BATCHES,
    seconds: float = SECONDS,
) -> tuple[list[Point], list[Skipped]]:
    """All sizes of all operations, small ones first; what was skipped, and why."""
    cases = {case.name: case for case in CASES}
    memory = device_memory() // 2 or HOST_MEMORY
    points: list[Point] = []
    skipped: list[Skipped] = []
    for operation, name in CURVES.items():
        taken = for_each = 0.0
        for batch, count in sorted(
            ((b, t) for b in batches for t in tokens), key=lambda each: (each[0] * each[1], each)
        ):
            one = replace(size, layers=1, batch=batch, tokens=count, **NARROW.get(operation, {}))
            reason = _too_much(operation, one, memory, seconds - taken, for_each * batch * count)
            if not reason:
                print(f"{operation}, B = {batch}, S = {count}", file=sys.stderr, flush=True)
                began = time.monotonic()
                point, reason = _point(operation, cases[name], one, beside, rounds, seed)
                last = time.monotonic() - began
                taken, for_each = taken + last, last / (batch * count)
                points += [point] if point else []
            if reason:
                skipped.append(Skipped(operation, batch, count, reason))
    return sorted(points, key=lambda p: (list(CURVES).index(p.operation), p.batch, p.tokens)), skipped


def _too_much(operation: str, size: Size, memory: int, seconds: float, expected: float) -> str:
    if operation == "filter" and size.batch == 1:
        return "no row would be left"
    needed = COPIES * size.batch * size.tokens * size.column_bytes
    if needed > memory:
        return f"would take {needed >> 20} MiB, more than {memory >> 20}"
    return f"would take {expected:.0f} s, but {seconds:.0f} s are left" if expected > seconds else ""


def _point(
    operation: str, case: Case, size: Size, beside: Mapping[str, ModuleType], rounds: int, seed: int
) -> tuple[Point | None, str]:
    row = measured(case, size, beside, rounds, seed)
    if row.error:
        return None, f"failed: {row.error}"
    times = {name: figures.milliseconds for name, figures in row.figures.items()}
    return Point(operation, size.batch, size.tokens, times), ""


def write(path: Path, points: Sequence[Point], skipped: Sequence[Skipped], about: Mapping[str, Any]) -> dict[str, Any]:
    """The drawing, and its numbers beside it with the ending .json; returns the numbers."""
    numbers = {**about, "points": [asdict(each) for each in points], "skipped": [asdict(each) for each in skipped]}
    size = about["size"]
    title = (
        f"One layer, H = {size['heads']}, D = {size['head_size']}, {size['dtype']}; "
        f"{about['device name']}, mlx {about['mlx']}, mlx-lm {about['mlx-lm']}; across: columns held"
    )
    path.write_text(plot(points, title), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return numbers
