"""Rows of different lengths to one left-padded batch.

a  [a0 a1]                a  [ .  .  . a0 a1]     left padding 3
b  [b0 b1 b2 b3 b4]  ->   b  [b0 b1 b2 b3 b4]                  0
c  []                     c  [ .  .  .  .  .]                  5
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .checks import check_columns, check_heads, check_size
from .row_copies import copy_pairs
from .row_plan import Move, Pair, Range, RowPlan, moved_sources


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
    check_heads("merge", rows)
    width = max([width, *(keys.shape[2] for keys, _ in rows)])
    made = copy_pairs(rows, _right_aligned([keys.shape for keys, _ in rows], width), width)
    return MergedRows(*made, [width - keys.shape[2] for keys, _ in rows for _ in range(keys.shape[0])], width)


def _right_aligned(shapes: Sequence[tuple[int, ...]], width: int) -> RowPlan:
    """The rows of sources of these shapes (b, H, S, D) under each other, all ending in the last of `width` columns."""
    return RowPlan(
        (Range(source, row, 0, width - columns, columns),) if columns else ()
        for source, (rows, _, columns, _) in enumerate(shapes)
        for row in range(rows)
    )


def merge_sources(found: Sequence[Pair | None], moves: Sequence[tuple[Move, ...]], width: int) -> Pair | None:
    """The first rows of some buffers under each other, in `width` columns; None if there is no buffer at all.

    Args:
        found: the keys (1, H, S, D) and values (1, H, S, Dv) of each row, or None for a row without columns.
        moves: how the columns of each row move.
    """
    sources = [each for each in found if each is not None]
    if not sources:
        return None
    plan = moved_sources(tuple(each and way for each, way in zip(found, moves, strict=True)))
    return copy_pairs(sources, plan, width)
