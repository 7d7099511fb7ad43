"""Rows of different lengths to one left-padded batch.

a  [a0 a1]                a  [ .  .  . a0 a1]     left padding 3
b  [b0 b1 b2 b3 b4]  ->   b  [b0 b1 b2 b3 b4]                  0
c  []                     c  [ .  .  .  .  .]                  5
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .checks import check_columns, check_size, common_heads, heads_of
from .row_copies import copy_rows
from .row_plan import Range, RowPlan


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


def stack_rows(blocks: Sequence[mx.array], width: int) -> mx.array:
    """Rows (b, H, S, D) under each other, all ending in the last of `width` columns, with zeros before them."""
    rows = [
        (Range(source, row, 0, width - block.shape[2], block.shape[2]),) if block.shape[2] else ()
        for source, block in enumerate(blocks)
        for row in range(block.shape[0])
    ]
    return copy_rows(blocks, RowPlan(rows), width)
