"""Rows of different lengths to one left-padded batch.

a  [a0 a1]                a  [ .  .  . a0 a1]     left padding 3
b  [b0 b1 b2 b3 b4]  ->   b  [b0 b1 b2 b3 b4]                  0
c  []                     c  [ .  .  .  .  .]                  5
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .append import concat, join, spare_columns
from .checks import check_columns, check_size, common_heads, heads_of


class MergedRows(NamedTuple):
    """A left-padded batch: keys (B, H, width, D), values (B, H, width, Dv), pads a row, width."""

    keys: mx.array
    values: mx.array
    left_padding: list[int]
    width: int


def merge_rows(rows: Sequence[tuple[mx.array, mx.array]], width: int = 0) -> MergedRows:
    """Stack blocks of rows so that all end in the same column.

    Args:
        rows: pairs of keys (b, H, S, D) and values (b, H, S, Dv) in temporal order; S may differ from pair
            to pair and may be 0, b is 1 for a single sequence.
        width: the least width of the batch; the longest S where that is more.

    Returns:
        The batch; its left padding counts the columns added in front of each row.

    Raises:
        ValueError: no rows, or rows that differ in H, D, Dv or dtype.
    """
    if not rows:
        raise ValueError("merge of no rows")
    width = check_size("width", width, 0)
    for keys, values in rows:
        check_columns(keys, values)
    common_heads("merge", (heads_of(keys, values) for keys, values in rows))
    width = max([width, *(keys.shape[2] for keys, _ in rows)])
    return MergedRows(
        stack_rows([keys for keys, _ in rows], width),
        stack_rows([values for _, values in rows], width),
        [width - keys.shape[2] for keys, _ in rows for _ in range(keys.shape[0])],
        width,
    )


def stack_rows(blocks: Sequence[mx.array], stop: int, width: int | None = None) -> mx.array:
    """Rows under each other, all ending before column `stop`, with zeros around those that are shorter.

    Args:
        blocks: (b, H, S, D) each, S at most `stop`; or S is `width` in a block that is in place already.
        stop: where the rows end.
        width: how many columns the result has; `stop` if None.
    """
    width = stop if width is None else width
    if sum(b.shape[0] for b in blocks if b.shape[2] == width) * 2 >= sum(b.shape[0] for b in blocks):
        return join([b if b.shape[2] == width else _placed([b], stop, width) for b in blocks], axis=0)
    return _placed(blocks, stop, width)


def _placed(blocks: Sequence[mx.array], stop: int, width: int) -> mx.array:
    """Zeros, and the blocks written over them: fewer and larger copies than rows padded one by one."""
    _, heads, _, size = blocks[0].shape
    stacked = mx.zeros((sum(b.shape[0] for b in blocks), heads, width, size), blocks[0].dtype)
    row = 0
    for block in blocks:
        if block.size:
            start = 0 if block.shape[2] == width else stop - block.shape[2]
            stacked[row : row + block.shape[0], :, start : start + block.shape[2], :] = block
        row += block.shape[0]
    return stacked


def pad_front(array: mx.array, n: int) -> mx.array:
    """Put n zero columns in front of an array (B, H, S, D)."""
    return concat([*spare_columns(array, n), array]) if n > 0 else array
