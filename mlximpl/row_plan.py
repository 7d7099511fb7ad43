"""New rows as ranges of columns of other buffers' rows, and how they are cut into rectangles to copy.

sources    [a0 a1 a2]     rows    Range(source=0, row=0, first=0, column=0, length=3)     [a0 a1 a2]
           [b0 b1]                Range(source=1, row=0, first=0, column=1, length=2)  -> [ . b0 b1]
"""

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import mlx.core as mx

Pair = tuple[mx.array, mx.array]
"""Keys (B, H, S, D) and values (B, H, S, Dv)."""


class Range(NamedTuple):
    """`length` columns of a source's row, from its column `first` on, that go to `column` and behind."""

    source: int
    row: int
    first: int
    column: int
    length: int


Row = tuple[Range, ...]
"""What one new row is made of, in the order of its columns; zeros are where no range is."""
Move = tuple[int, int, int]
"""The first column of a range, the column that it goes to, and its length."""


class Block(NamedTuple):
    """Neighbouring new rows, from `to` on, whose ranges are one rectangle of a source.

    `alone` says that the rows have no other range, so that what lies around it in the source may come along.
    """

    to: int
    rows: int
    alone: bool
    source: int
    row: int
    first: int
    column: int
    length: int


class RowPlan:
    """New rows.

    The functions below keep the plans that they make: all layers of a step ask for the same, and get the same object.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = tuple(rows)

    @cached_property
    def blocks(self) -> list[Block]:
        """The rows in as few rectangles as their order allows."""
        return _blocks(self.rows)

    def is_all_of_source(self, rows: int) -> bool:
        """Whether these are so many rows of source 0, in its order, whose columns stay where they are."""
        if len(self.blocks) != 1:
            return False
        to, count, _, source, row, first, column, _ = self.blocks[0]
        return (to, count, source, row, first) == (0, rows, 0, 0, column)


@lru_cache(maxsize=64)
def moved_alike(rows: int, moves: tuple[Move, ...]) -> RowPlan:
    """So many rows of source 0, whose columns all move in the same way."""
    return moved(tuple(range(rows)), (moves,) * rows)


@lru_cache(maxsize=64)
def moved(rows: tuple[int, ...], moves: tuple[tuple[Move, ...], ...]) -> RowPlan:
    """These rows of source 0, each with its own moves."""
    return RowPlan(
        tuple(Range(0, row, *move) for move in each if move[2] > 0) for row, each in zip(rows, moves, strict=True)
    )


@lru_cache(maxsize=64)
def shifted(rows: tuple[int, ...], firsts: tuple[int, ...], stop: int, shift: int) -> RowPlan:
    """These rows of source 0, each from column firsts[row] to `stop`, moved `shift` columns to the right.

    What would come before column 0 is left out.
    """
    starts = [max(firsts[row], -shift) for row in rows]
    return moved(rows, tuple(((start, start + shift, stop - start),) for start in starts))


@lru_cache(maxsize=64)
def moved_sources(moves: tuple[tuple[Move, ...] | None, ...]) -> RowPlan:
    """The first rows of as many sources as there are moves, one behind the other; None is a row without a source."""
    rows: list[Row] = []
    source = 0
    for each in moves:
        rows.append(tuple(Range(source, 0, *move) for move in each or () if move[2] > 0))
        source += each is not None
    return RowPlan(rows)


@lru_cache(maxsize=64)
def one_behind_the_other(first: RowPlan, second: RowPlan, source: int) -> RowPlan:
    """The rows of two plans; the second's are of another source."""
    return RowPlan([*first.rows, *(tuple(r._replace(source=source) for r in row) for row in second.rows)])


def _blocks(rows: Sequence[Row]) -> list[Block]:
    """Rows of one range may take along what lies beside it in their source, so they need only be moved alike."""
    done: list[Block] = []
    growing: dict[int, Block] = {}
    for to, row in enumerate(rows):
        for k, (source, number, first, column, length) in enumerate(row):
            new = Block(to, 1, len(row) == 1, source, number, first, column, length)
            last = growing.get(k)
            if last is not None and _goes_on(last, new):
                start, stop = min(last.first, first), max(last.first + last.length, first + length)
                new = last._replace(rows=last.rows + 1, first=start, column=start + column - first, length=stop - start)
            elif last is not None:
                done.append(last)
            growing[k] = new
    return sorted([*done, *growing.values()])


def _goes_on(last: Block, new: Block) -> bool:
    if (last.to + last.rows, last.row + last.rows, last.source) != (new.to, new.row, new.source):
        return False
    if last.alone and new.alone:
        return last.column - last.first == new.column - new.first
    return last.alone == new.alone and (last.first, last.column, last.length) == (new.first, new.column, new.length)
