"""Two batches to one: both are right-aligned, so that the next token of every row goes to one column.

a  [a0 a1 a2]             a  [a0 a1 a2]
b  [b0]            ->     b  [ .  . b0]
"""

import mlx.core as mx

from .checks import Heads
from .merge import MergedRows, merge_rows

Columns = tuple[mx.array, mx.array]


def extend_rows(
    first: Columns | None, second: Columns | None, first_rows: int, second_rows: int, heads: Heads
) -> MergedRows:
    """Put two batches of keys (B, H, S, D) and values (B, H, S, Dv) under each other.

    A batch that has seen no update is None, and brings rows without columns.
    """
    return merge_rows(
        [
            first or no_columns(first_rows, heads),
            second or no_columns(second_rows, heads),
        ]
    )


def no_columns(rows: int, heads: Heads) -> Columns:
    """Keys (rows, H, 0, D) and values (rows, H, 0, Dv)."""
    return (
        mx.zeros((rows, heads.heads, 0, heads.key_size), heads.key_dtype),
        mx.zeros((rows, heads.heads, 0, heads.value_size), heads.value_dtype),
    )
