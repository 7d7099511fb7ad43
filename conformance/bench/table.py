"""What a person reads of a bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from conformance.bench.measure import Figures
from conformance.bench.results import FLOOR, OURS, THEIRS, Ratio, Row

CAPTION = """\
ms of one operation: median (quartiles). x: mlx-lm by mlximpl, of medians (quartiles of each round's); above 1 mlximpl
is faster. MB: peak memory above what was held before, of mlx-lm, mlximpl and the floor."""


def heading(about: Mapping[str, Any]) -> list[str]:
    """On what, with what, how large, and the command."""
    sizes = ", ".join(f"{name} {value}" for name, value in about["size"].items())
    return [
        ", ".join(f"{name} {about[name]}" for name in about if name not in ("size", "command")),
        sizes,
        about["command"],
    ]


def table(rows: Sequence[Row]) -> Table:
    """A line for each case."""
    made = Table(caption=CAPTION, caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("case", no_wrap=True)
    for column in (THEIRS, OURS, FLOOR, "x", f"/ {FLOOR}"):
        made.add_column(column, justify="right", no_wrap=True)
    made.add_column("MB", justify="right", no_wrap=True)
    for row in rows:
        if row.error:
            made.add_row(row.case, "failed", style="red")
            continue
        each = [row.figures.get(name) for name in (THEIRS, OURS, FLOOR)]
        made.add_row(
            row.case,
            _times(each[0]),
            _times(each[1]),
            "" if each[2] is None else f"{each[2].milliseconds:.3g}",
            _ratio(row.ratio),
            "" if row.to_floor is None else f"{row.to_floor.of_medians:.2f}",
            " ".join("-" if figures is None else f"{figures.peak / 1e6:.3g}" for figures in each),
        )
    return made


def _times(figures: Figures | None) -> str:
    if figures is None:
        return ""
    low, high = figures.quartiles
    return f"{figures.milliseconds:.3g} ({low:.3g}-{high:.3g})"


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    low, high = ratio.quartiles
    return f"{ratio.of_medians:.2f} ({low:.2f}-{high:.2f})"
