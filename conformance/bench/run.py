"""The verb `bench`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import ModuleType
from typing import Any

import mlx.core as mx
from rich.console import Console

import mlximpl
from conformance.adapters.base import AdapterError
from conformance.adapters.surface import set_device
from conformance.bench.cases import CASES, Case
from conformance.bench.cost import curves, write
from conformance.bench.one import measured
from conformance.bench.results import OURS, THEIRS
from conformance.bench.sizes import SIZES, Size, size_for_device
from conformance.bench.table import heading, table
from conformance.files_bench import upstream, where

WIDTH = 160
"""Of a table that goes to a file."""


def modules() -> dict[str, ModuleType]:
    """The modules that are measured, by name: mlx-lm's where it is installed."""
    theirs = upstream()
    if theirs is None:
        print("mlx-lm is not installed: there is nothing to compare with", file=sys.stderr)
    return ({} if theirs is None else {THEIRS: theirs}) | {OURS: mlximpl}


def chosen(parts: Sequence[str], cases: Sequence[Case]) -> list[Case]:
    """The cases whose name holds one of the parts; all without parts. Raises AdapterError where a part is in none."""
    for part in parts:
        if not any(part in case.name for case in cases):
            raise AdapterError(f"no case has {part!r} in its name; there are: {'; '.join(c.name for c in cases)}")
    return [case for case in cases if not parts or any(part in case.name for part in parts)]


def facts(size: Size, rounds: int, seed: int) -> dict[str, Any]:
    """On what was measured, and how it is done again."""
    told = mx.device_info() if hasattr(mx, "device_info") else {}
    command = shlex.join(["python", "-m", "conformance", *sys.argv[1:]])
    found: dict[str, Any] = where() | {"device name": str(told.get("device_name", "unknown")), "command": command}
    return found | {"rounds": rounds, "seed": seed, "size": asdict(size)}


def main(arguments: Any, cases: Sequence[Case] = CASES) -> int:
    """The verb; returns the exit code."""
    set_device()
    size = SIZES[arguments.size or size_for_device()]
    rounds = arguments.rounds or size.rounds
    wanted = chosen(arguments.only, cases)
    beside = modules()
    about = facts(size, rounds, arguments.seed)
    if arguments.plot and arguments.only:
        raise AdapterError("--plot draws its own cases: --only does not go with it")
    if arguments.plot:
        return plotted(arguments, size, beside, rounds, about)
    rows = []
    for number, case in enumerate(wanted, 1):
        print(f"{number}/{len(wanted)} {case.name}", file=sys.stderr, flush=True)
        rows.append(measured(case, size, beside, rounds, arguments.seed))
    if arguments.json:
        json.dump(about | {"rows": [asdict(row) for row in rows]}, sys.stdout, indent=1)
        print()
    else:
        Console(width=None if sys.stdout.isatty() else WIDTH).print(*heading(about), table(rows), sep="\n")
    for row in rows:
        if row.error:
            print(f"{row.case}: {row.error}", file=sys.stderr)
    return 2 if any(row.error for row in rows) else 0


def plotted(arguments: Any, size: Size, beside: Mapping[str, ModuleType], rounds: int, about: Mapping[str, Any]) -> int:
    """Cost against size to a drawing and the numbers beside it; returns the exit code."""
    points, skipped = curves(size, beside, rounds, arguments.seed)
    numbers = write(arguments.plot, points, skipped, about)
    for each in skipped:
        print(f"skipped: {each.operation}, B = {each.batch}, S = {each.tokens}: {each.reason}", file=sys.stderr)
    if arguments.json:
        json.dump(numbers, sys.stdout, indent=1)
        print()
    return 2 if any(each.reason.startswith("failed") for each in skipped) else 0
