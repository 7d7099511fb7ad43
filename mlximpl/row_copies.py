"""The rows of a new buffer, put together from ranges of columns of other buffers.

sources    [a0 a1 a2]     rows    Range(source=0, row=0, first=0, column=0, length=3)     [a0 a1 a2]
           [b0 b1]                Range(source=1, row=0, first=0, column=1, length=2)  -> [ . b0 b1]
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .append import join
from .cuda_rows import copy_by_kernel, kernel_takes


class Range(NamedTuple):
    """`length` columns of a source's row, from its column `first` on, that go to `column` and behind."""

    source: int
    row: int
    first: int
    column: int
    length: int


Row = tuple[Range, ...]
"""What one new row is made of; zeros are where no range is."""


class _Block(NamedTuple):
    """Neighbouring new rows, from `to` on, whose ranges are one rectangle of a source."""

    to: int
    rows: int
    alone: bool
    source: int
    row: int
    first: int
    column: int
    length: int


def copy_rows(sources: Sequence[mx.array], rows: Sequence[Row], width: int, allocated: int | None = None) -> mx.array:
    """Make a buffer of these rows.

    What is no token may come along with its neighbours where that is one piece to copy: a pad's place may hold what it
    held in the source, instead of a zero.

    Args:
        sources: (B, H, S, D) each, at least one; all of the same H, D and dtype.
        rows: the ranges of each new row, in the order of their columns, or none.
        width: how many columns the buffer has.
        allocated: how many rows the buffer has, with whatever is in those that are not given; as many as given if None.

    Returns:
        (allocated, H, width, D), in memory of its own.
    """
    _, heads, _, size = sources[0].shape
    allocated = len(rows) if allocated is None else allocated
    shape = allocated, heads, width, size
    if 0 in shape:
        return mx.zeros(shape, sources[0].dtype)
    if kernel_takes(sources):
        return copy_by_kernel(sources, rows, shape)
    blocks = _blocks(rows)
    whole = {block.to: block for block in blocks if _is_whole(block, sources, width)}
    if 2 * sum(block.rows for block in whole.values()) < len(rows):
        return _placed(sources, blocks, 0, allocated, width)
    parts = []
    at = 0
    for block in [*whole.values(), None]:
        start = allocated if block is None else block.to
        if at < start:
            between = [b for b in blocks if at <= b.to < start]
            parts.append(_placed(sources, between, at, start, width))
        if block is not None:
            front = block.first - block.column
            columns = slice(front, front + width)
            parts.append(sources[block.source][block.row : block.row + block.rows, :, columns])
            at = block.to + block.rows
    return join(parts, axis=0)


def _blocks(rows: Sequence[Row]) -> list[_Block]:
    """Cut the new rows into as few rectangles as their order allows.

    A row of one range may take along what lies beside it in its source, so such rows need only be moved alike.
    """
    done: list[_Block] = []
    open_: dict[int, _Block] = {}
    for to, row in enumerate(rows):
        alone = len(row) == 1
        for k, (source, number, first, column, length) in enumerate(row):
            last = open_.get(k)
            new = _Block(to, 1, alone, source, number, first, column, length)
            if last is not None and _goes_on(last, new):
                start, stop = min(last.first, first), max(last.first + last.length, first + length)
                shift = column - first
                new = last._replace(rows=last.rows + 1, first=start, column=start + shift, length=stop - start)
            elif last is not None:
                done.append(last)
            open_[k] = new
    return sorted([*done, *open_.values()])


def _goes_on(last: _Block, new: _Block) -> bool:
    if (last.to + last.rows, last.row + last.rows, last.source) != (new.to, new.row, new.source):
        return False
    if last.alone and new.alone:
        return last.column - last.first == new.column - new.first
    return last.alone == new.alone and (last.first, last.column, last.length) == (new.first, new.column, new.length)


def _is_whole(block: _Block, sources: Sequence[mx.array], width: int) -> bool:
    """Whether the new rows are a slice of their source, with what lies around their range."""
    front = block.first - block.column
    return block.alone and front >= 0 and front + width <= sources[block.source].shape[2]


def _placed(sources: Sequence[mx.array], blocks: Sequence[_Block], start: int, stop: int, width: int) -> mx.array:
    """The new rows from start to stop: zeros, and the blocks written over them."""
    _, heads, _, size = sources[0].shape
    placed = mx.zeros((stop - start, heads, width, size), sources[0].dtype)
    for to, rows, _, source, row, first, column, length in blocks:
        columns = sources[source][row : row + rows, :, first : first + length]
        placed[to - start : to - start + rows, :, column : column + length] = columns
    return placed
