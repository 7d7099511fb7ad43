"""The rows of a new buffer, copied in few pieces: by a CUDA kernel, slices in a row, or slices into zeros."""

from collections.abc import Sequence

import mlx.core as mx

from .append import join
from .cuda_rows import copy_by_kernel, kernel_takes
from .row_plan import Block, Pair, RowPlan
from .words import as_numbers, as_words

WHOLE_LEAST = 7 / 8
"""Of the rows, so that those that are made before take little memory."""


def copy_pairs(sources: Sequence[Pair], plan: RowPlan, width: int, allocated: int | None = None) -> Pair:
    """`copy_rows` of keys (B, H, S, D) and values (B, H, S, Dv), which are planned alike."""
    rows = len(plan.rows) if allocated is None else allocated
    keys, values = zip(*sources, strict=True)
    if rows and width and not _is_one_slice(keys, plan, width, rows) and kernel_takes(sources, len(plan.rows)):
        return copy_by_kernel(sources, plan, width, rows)
    return copy_rows(keys, plan, width, rows), copy_rows(values, plan, width, rows)


def _is_one_slice(sources: Sequence[mx.array], plan: RowPlan, width: int, rows: int) -> bool:
    """Whether the buffer is one slice of a source, which MLX copies as fast."""
    blocks = plan.blocks
    return len(blocks) == 1 and blocks[0].rows == rows and _is_whole(blocks[0], sources, width)


def copy_rows(sources: Sequence[mx.array], plan: RowPlan, width: int, allocated: int | None = None) -> mx.array:
    """Make a buffer of a plan's rows.

    What is no token may come along with its neighbours where that is one piece to copy: a pad's place may hold what it
    held in the source, instead of a zero.

    Args:
        sources: (B, H, S, D) each, at least one; all of the same H, D and dtype.
        plan: the new rows.
        width: how many columns the buffer has.
        allocated: how many rows the buffer has, with whatever is in those that are not planned; as many if None.

    Returns:
        (allocated, H, width, D), in memory of its own; or the source's, where the buffer is all of that.
    """
    _, heads, _, size = sources[0].shape
    dtype = sources[0].dtype
    shape = len(plan.rows) if allocated is None else allocated, heads, width, size
    if 0 in shape:
        return mx.zeros(shape, dtype)
    if shape == sources[0].shape and plan.is_all_of_source(shape[0]):
        return sources[0][...]
    if _is_one_slice(sources, plan, width, shape[0]):
        _, rows, _, source, row, *_ = block = plan.blocks[0]
        return copy_slice(sources[source], row, rows, _front(block), width)
    return as_numbers(_copied(as_words(sources), plan, width, shape[0]), dtype)


def _copied(sources: Sequence[mx.array], plan: RowPlan, width: int, allocated: int) -> mx.array:
    """Slices joined where nearly all rows are whole slices; else zeros, with the blocks written over them.

    What is joined is copied once, but a row that has to be padded for that is made before, beside what is there.
    """
    whole = [block for block in plan.blocks if _is_whole(block, sources, width)]
    if sum(block.rows for block in whole) < WHOLE_LEAST * len(plan.rows):
        return _placed(sources, plan.blocks, 0, allocated, width)
    parts = []
    at = 0
    for block in whole:
        if at < block.to:
            parts.append(_placed(sources, plan.blocks, at, block.to, width))
        front = _front(block)
        parts.append(sources[block.source][block.row : block.row + block.rows, :, front : front + width])
        at = block.to + block.rows
    if at < allocated:
        parts.append(_placed(sources, plan.blocks, at, allocated, width))
    return join(parts, axis=0)


def copy_slice(source: mx.array, row: int, rows: int, first: int, width: int) -> mx.array:
    """Neighbouring rows of a source (B, H, S, D), `width` columns from `first` on: (rows, H, width, D)."""
    (words,) = as_words([source])
    return as_numbers(mx.contiguous(words[row : row + rows, :, first : first + width]), source.dtype)


def _front(block: Block) -> int:
    """Which column of its source goes to column 0."""
    return block.first - block.column


def _placed(sources: Sequence[mx.array], blocks: Sequence[Block], start: int, stop: int, width: int) -> mx.array:
    """The new rows from start to stop: zeros, and their blocks written over them."""
    _, heads, _, size = sources[0].shape
    placed = mx.zeros((stop - start, heads, width, size), sources[0].dtype)
    for to, rows, _, source, row, first, column, length in blocks:
        if start <= to < stop:
            columns = sources[source][row : row + rows, :, first : first + length]
            placed[to - start : to - start + rows, :, column : column + length] = columns
    return placed


def _is_whole(block: Block, sources: Sequence[mx.array], width: int) -> bool:
    """Whether the new rows are a slice of their source, with what lies around their range."""
    front = _front(block)
    return block.alone and front >= 0 and front + width <= sources[block.source].shape[2]
