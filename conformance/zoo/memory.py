"""What a batch of 16 takes while its rows leave one by one, on mlx-lm's caches and on mlximpl's.

    python -m conformance.zoo.memory [--longest TOKENS] [--json]

A llama, and an olmo3 with a window of 256, whose caches outweigh their weights, are served by mlx-lm's
`BatchGenerator`; the longest rows leave first. Bytes are those that the caches say (`nbytes`) and those that MLX counts
as in use and at its peak, less what the weights take.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from conformance.adapters.surface import set_device
from conformance.zoo.implementations import NAMES, caches_of
from conformance.zoo.models import make_model
from conformance.zoo.schedules import words
from conformance.zoo.served import Caches

ROWS = 16
FAMILIES = ("llama", "olmo3")
SIZES: dict[str, Any] = {
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "layer_types": None,
    "sliding_window": 256,
    "max_position_embeddings": 4096,
}
SHOWN = (16, 12, 8, 4, 2, 1)


@dataclass(frozen=True)
class Reading:
    """While so many rows are there: what the caches say at the end, what MLX counts then, and its peak until then."""

    rows: int
    nbytes: int
    active: int
    peak: int


@dataclass(frozen=True)
class Bytes:
    """One run: the peak until the first token, and a reading for each number of rows."""

    family: str
    caches: str
    prefill_peak: int
    readings: list[Reading]


def measure(caches: Caches, name: str, longest: int) -> Bytes:
    """Serve rows of `longest` tokens and less, down to a sixteenth; one leaves every four steps."""
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator

    model = make_model(name, **SIZES)
    prompts = [list(words(longest * (ROWS - i) // ROWS, i)) for i in range(ROWS)]
    gc.collect()
    mx.clear_cache()
    weights = mx.get_active_memory()
    generator = BatchGenerator(model, prefill_batch_size=ROWS, completion_batch_size=ROWS, prefill_step_size=256)
    generator.insert(prompts, [4 * (i + 1) for i in range(ROWS)], [caches.make(model) for _ in prompts])
    mx.reset_peak_memory()
    while not (left := _rows_left(generator)):
        pass
    prefill_peak = mx.get_peak_memory() - weights
    readings: dict[int, Reading] = {}
    peak = 0
    while left:
        now = mx.get_peak_memory() - weights
        peak = max(peak, now) if left in readings else now
        readings[left] = Reading(left, generator.prompt_cache_nbytes, mx.get_active_memory() - weights, peak)
        mx.reset_peak_memory()
        left = _rows_left(generator)
    generator.close()
    return Bytes(name, caches.name, prefill_peak, [readings[rows] for rows in SHOWN])


def _rows_left(generator: Any) -> int:
    """Go on by one step; how many rows have an answer and are not at its end."""
    return sum(response.finish_reason is None for response in generator.next()[1])


def table(runs: Sequence[Bytes]) -> Table:
    """What a person reads, in MB."""
    made = Table(
        title=f"MB, {ROWS} rows that leave one by one, float32",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("family", "caches", "", "prefill", *(f"{rows} rows" for rows in SHOWN)):
        made.add_column(column, justify="left" if column in ("family", "caches", "") else "right", no_wrap=True)
    for run in runs:
        for what in ("nbytes", "active", "peak"):
            first = (run.family, run.caches) if what == "nbytes" else ("", "")
            prefill = f"{run.prefill_peak / 1e6:.1f}" if what == "peak" else ""
            made.add_row(*first, what, prefill, *(f"{getattr(each, what) / 1e6:.1f}" for each in run.readings))
    return made


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m conformance.zoo.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest prompt (default: 1024)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    set_device()
    runs = [measure(caches_of(caches), name, arguments.longest) for name in FAMILIES for caches in NAMES]
    if arguments.json:
        json.dump([asdict(run) for run in runs], sys.stdout, indent=1)
        print()
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
