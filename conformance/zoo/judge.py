"""The law: a row in a batch answers what it answers alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from conformance.zoo.alone import ATOL, Alone
from conformance.zoo.families import Family
from conformance.zoo.models import make_model
from conformance.zoo.schedules import Schedule
from conformance.zoo.served import Caches, Row, serve, serve_alone


@dataclass(frozen=True)
class Fault:
    """A row that did not answer as alone."""

    row: int
    what: str


@dataclass
class Cell:
    """One schedule on one family with one implementation's caches."""

    family: str
    schedule: str
    caches: str
    rows: int = 0
    equal: int = 0
    worst: float = 0.0
    """The largest difference of log-probabilities in the rows that are equal."""
    faults: list[Fault] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether every row is equal."""
        return self.equal == self.rows

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "faults": [vars(fault) for fault in self.faults]}


def judge(alone: Alone, family: Family, schedule: Schedule, caches: Caches, model: Any = None) -> Cell:
    """Run a schedule, and compare each row with the row alone; `model` is what runs it, if not the one asked alone."""
    cell = Cell(family.label, schedule.name, caches.name)
    run = serve_alone if family.alone else serve
    rows, error = run(alone.model if model is None else model, caches, schedule)
    for number, row in enumerate(rows):
        if row.removed and not row.tokens:
            continue
        cell.rows += 1
        fault = _unfinished(row, error) or _difference(row, alone, cell)
        if fault:
            cell.faults.append(Fault(number, fault))
        else:
            cell.equal += 1
    return cell


def _unfinished(row: Row, error: Exception | None) -> str:
    if row.removed or len(row.tokens) == row.wanted:
        return ""
    why = f": {type(error).__name__}: {error}" if error else ""
    return f"{len(row.tokens)} of {row.wanted} tokens came{why}"


def _difference(row: Row, alone: Alone, cell: Cell) -> str:
    import mlx.core as mx

    answer = alone.answer(row.context, row.wanted)
    for i, (token, logprobs) in enumerate(zip(row.tokens, row.logprobs, strict=True)):
        apart: Any = mx.abs(logprobs - answer.logprobs[i]).max().item()
        at = f"token {i} at position {len(row.context) + i}"
        if not apart <= ATOL:
            return f"{at}: log-probabilities differ by {apart:.2g} from the row alone"
        if token != answer.tokens[i]:
            return f"{at} is {token}, but alone {answer.tokens[i]}"
        cell.worst = max(cell.worst, apart)
    return ""


def judge_family(family: Family, schedules: list[Schedule], implementations: list[Caches]) -> Iterator[Cell]:
    """All schedules on one family, implementation by implementation."""
    alone = Alone(make_model(family.name), family.max_kv_size)
    for schedule in schedules:
        for caches in implementations:
            yield judge(alone, family, schedule, caches)
