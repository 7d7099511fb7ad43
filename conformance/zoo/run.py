"""The verb `zoo`: every family through every schedule, on mlx-lm's caches and on mlximpl's, in one table."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conformance.adapters.base import AdapterError
from conformance.adapters.surface import set_device
from conformance.zoo.families import BOUNDED, FAMILIES, Family
from conformance.zoo.implementations import NAMES, caches_of
from conformance.zoo.judge import Cell, judge_family
from conformance.zoo.schedules import SCHEDULES, Schedule, random_schedule

OURS = NAMES[1]
COLUMNS_MAX = 16


def chosen(families: Sequence[str], schedules: Sequence[str]) -> tuple[list[Family], list[Schedule]]:
    """Those whose names contain one of the words; all without words. Raises AdapterError where a word names none."""
    every = [*FAMILIES, *BOUNDED]
    for words, names in ((families, [f.label for f in every]), (schedules, [s.name for s in SCHEDULES])):
        for word in words:
            if not any(word in name for name in names):
                raise AdapterError(f"{word!r} is in no name of {', '.join(names)}")
    return (
        [f for f in every if not families or any(word in f.label for word in families)],
        [s for s in SCHEDULES if not schedules or any(word in s.name for word in schedules)],
    )


def cells(families: Sequence[Family], schedules: Sequence[Schedule], jobs: int) -> Iterator[list[Cell]]:
    """The cells of a family at a time."""
    tasks = [(family, list(schedules)) for family in families]
    if jobs == 1 or len(tasks) == 1:
        yield from map(_family, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(_family, tasks)


def _family(task: tuple[Family, list[Schedule]]) -> list[Cell]:
    set_device()
    family, schedules = task
    return list(judge_family(family, schedules, [caches_of(name, family.max_kv_size) for name in NAMES]))


def table(found: Sequence[Cell]) -> Table:
    """What a person reads: in each place mlx-lm's equal rows and mlximpl's; below, how many there are."""
    families = list(dict.fromkeys(cell.family for cell in found))
    schedules = list(dict.fromkeys(cell.schedule for cell in found))
    if len(schedules) > COLUMNS_MAX:
        schedules = []  # the sums alone
    made = Table(
        title=f"rows that answer as alone, on the caches of mlx-lm {version('mlx-lm')} and of mlximpl",
        caption="\n".join(f"{i:>2} {name}" for i, name in enumerate(schedules, 1)),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    made.add_column("family", no_wrap=True)
    for heading in (*(str(i) for i, _ in enumerate(schedules, 1)), "all"):
        made.add_column(heading, justify="right", no_wrap=True)
    for family in families:
        of_family = [cell for cell in found if cell.family == family]
        places = (_place([cell for cell in of_family if cell.schedule == name]) for name in schedules)
        made.add_row(family, *places, f"{_place(of_family)} of {_sum(of_family, OURS).rows}")
    made.add_section()
    of_schedules = (_place([cell for cell in found if cell.schedule == name]) for name in schedules)
    made.add_row("all", *of_schedules, f"{_place(found)} of {_sum(found, OURS).rows}", style="bold")
    return made


def _place(of: Sequence[Cell]) -> str:
    """`4 6`: the rows that are equal on mlx-lm's caches and on mlximpl's; in red where that is not all."""
    sums = [_sum(of, name) for name in NAMES]
    return " ".join(str(cell.equal) if cell.full else f"[red]{cell.equal}[/red]" for cell in sums)


def _sum(found: Sequence[Cell], caches: str) -> Cell:
    of = [cell for cell in found if cell.caches == caches]
    return Cell("", "", caches, sum(cell.rows for cell in of), sum(cell.equal for cell in of))


def to_json(found: Sequence[Cell]) -> dict[str, Any]:
    """What a program reads."""
    made: dict[str, Any] = {"versions": {name: version(name) for name in ("mlx", "mlx-lm", "mlximpl")}}
    for name in NAMES:
        of = _sum(found, name)
        made[name] = {"equal": of.equal, "rows": of.rows}
    return {**made, "cells": [cell.to_dict() for cell in found]}


def main(arguments: Any) -> int:
    """The verb; returns the exit code: 1 where a row on mlximpl's caches does not answer as alone."""
    if find_spec("mlx_lm") is None:
        raise AdapterError("the zoo is mlx-lm's model code: pip install 'mlx-lm==0.32.2'")
    families, schedules = chosen(arguments.families, arguments.schedules)
    if arguments.random:
        schedules = [random_schedule(arguments.seed + i) for i in range(arguments.random)]
    errors = Console(stderr=True)
    found: list[Cell] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, disable=arguments.quiet) as progress:
        task = progress.add_task("families", total=len(families))
        for of_family in cells(families, schedules, arguments.jobs):
            found += of_family
            progress.update(task, advance=1, description=of_family[0].family)
    if arguments.json:
        json.dump(to_json(found), sys.stdout, indent=1)
        print()
    else:
        Console(width=None if sys.stdout.isatty() else 200).print(table(found))
    return _report(found, quiet=arguments.json)


def _report(found: Sequence[Cell], quiet: bool) -> int:
    """Name the rows that fail on mlximpl's caches; the exit code."""
    ours = [cell for cell in found if cell.caches == OURS]
    sum_of_ours = _sum(found, OURS)
    passed = sum_of_ours.full and sum_of_ours.rows > 0
    if not quiet:
        for cell in ours:
            for fault in cell.faults:
                print(f"FAILED {cell.family}, {cell.schedule}, row {fault.row}: {fault.what}")
        worst = max((cell.worst for cell in ours), default=0.0)
        print(
            f"{'passed' if passed else 'failed'}: on mlximpl's caches {sum_of_ours.equal} of {sum_of_ours.rows} rows "
            f"answer as alone, log-probabilities within {worst:.1e}"
        )
    return 0 if passed else 1
