"""The verb `files-bench`: sizes and reload times of prompt-cache files, mlximpl's beside mlx-lm's.

The same numbers are saved by both, in one run. In each turn every file is reloaded once, in an order drawn anew, since
a load profits from what the one before has left in memory. A reload is done when the arrays are evaluated. Files lie
in the system's cache after the first turn, which is not counted.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
from rich import box
from rich.console import Console
from rich.table import Table

import mlximpl
from conformance.adapters.surface import set_device
from conformance.bench.measure import spread


@dataclass(frozen=True)
class Size:
    """A prompt cache of growing layers."""

    name: str
    layers: int
    heads: int
    tokens: int
    size: int
    dtype: str
    rounds: int


SIZES = (
    Size("10 tokens, 1 layer", 1, 1, 10, 64, "float32", 200),
    Size("17 tokens, 1 layer", 1, 1, 17, 64, "float32", 200),
    Size("64 MB, 16 layers", 16, 8, 1024, 128, "float16", 25),
)
UPSTREAM = "mlx-lm"


@dataclass
class Row:
    """One file, and what it takes to have its caches again."""

    case: str
    file: str
    bytes: int
    milliseconds: float
    """The median."""
    quartiles: tuple[float, float]
    rounds: int
    ratio: float | None = None
    """The median of mlx-lm by this one; above 1 is faster than mlx-lm."""
    size_ratio: float | None = None


def caches(module: Any, size: Size) -> list[Any]:
    """The prompt cache, of a module's classes."""
    made = []
    for layer in range(size.layers):
        shape = (1, size.heads, size.tokens, size.size)
        x = (mx.arange(size.heads * size.tokens * size.size) % 251 + layer).reshape(shape)
        cache = module.KVCache()
        cache.update_and_fetch(x.astype(getattr(mx, size.dtype)), (x + 1).astype(getattr(mx, size.dtype)))
        made.append(cache)
    mx.eval([cache.state for cache in made])
    return made


def measured(size: Size, directory: Path) -> list[Row]:
    """A row for each kind of file."""
    loads: dict[str, Callable[[], list[Any]]] = {}
    files: dict[str, Path] = {}
    theirs = upstream()
    if theirs is not None:
        files[UPSTREAM] = directory / "upstream.safetensors"
        theirs.save_prompt_cache(str(files[UPSTREAM]), caches(theirs, size))
        loads[UPSTREAM] = lambda: theirs.load_prompt_cache(str(files[UPSTREAM]))
    for name, mappable in (("compact", False), ("mappable", True)):
        path = directory / f"{name}.safetensors"
        mlximpl.save_prompt_cache(str(path), caches(mlximpl, size), mappable=mappable)
        for way, options in (("read", {}), ("mmap", {"mmap": True}), ("mmap, verify", {"mmap": True, "verify": True})):
            files[f"{name}, {way}"] = path
            loads[f"{name}, {way}"] = _load(path, options)
    times: dict[str, list[float]] = {name: [] for name in loads}
    random = Random(0)
    for turn in range(size.rounds + 1):
        for name in random.sample(list(loads), len(loads)):
            began = time.perf_counter()
            mx.eval([cache.state for cache in loads[name]()])
            if turn:
                times[name].append((time.perf_counter() - began) * 1000)
    rows = [_row(size, name, files[name], times[name]) for name in loads]
    for row in rows:
        if theirs is not None:
            row.ratio = rows[0].milliseconds / row.milliseconds
            row.size_ratio = rows[0].bytes / row.bytes
    return rows


def _load(path: Path, options: dict[str, bool]) -> Callable[[], list[Any]]:
    return lambda: list(mlximpl.load_prompt_cache(str(path), **options))


def _row(size: Size, name: str, path: Path, times: Sequence[float]) -> Row:
    low, middle, high = spread(times)
    return Row(size.name, name, path.stat().st_size, middle, (low, high), len(times))


def upstream() -> Any:
    try:
        return import_module("mlx_lm.models.cache")
    except ImportError:
        return None


def where() -> dict[str, str]:
    """What was measured, and on what."""
    found = {"device": str(mx.default_device()), "python": sys.version.split()[0], "platform": sys.platform}
    for package in ("mlx", "mlx-lm"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"mlximpl": mlximpl.__version__}


def bench(sizes: Sequence[Size] = SIZES) -> list[Row]:
    """Every size, in a directory for temporary files."""
    with tempfile.TemporaryDirectory(prefix="files-bench-") as directory:
        return [row for size in sizes for row in measured(size, Path(directory))]


def table(rows: Sequence[Row]) -> Table:
    """What a person reads."""
    made = Table(
        title=", ".join(f"{name} {value}" for name, value in where().items()),
        caption="x: mlx-lm's by this one's; above 1 is smaller, or faster, than mlx-lm",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    made.add_column("file, load", no_wrap=True)
    for column in ("bytes", "x", "ms", "quartiles", "x"):
        made.add_column(column, justify="right", no_wrap=True)
    for case, of_case in groupby(rows, lambda row: row.case):
        made.add_row(case, style="bold")
        for row in of_case:
            low, high = row.quartiles
            sizes, times = ("" if x is None else f"{x:.2f}" for x in (row.size_ratio, row.ratio))
            made.add_row(
                f"  {row.file}", f"{row.bytes:,}", sizes, f"{row.milliseconds:.3g}", f"{low:.3g}-{high:.3g}", times
            )
        made.add_section()
    return made


def main(arguments: Any, sizes: Sequence[Size] = SIZES) -> int:
    """The verb; returns the exit code."""
    set_device()
    rows = bench(sizes)
    if arguments.json:
        json.dump({**where(), "rows": [asdict(row) for row in rows]}, sys.stdout, indent=1)
        print()
    else:
        Console().print(table(rows))
    return 0
