"""Two batches to one: both are right-aligned, so that the next token of every row goes to one column.

a  [a0 a1 a2]             a  [a0 a1 a2]
b  [b0]            ->     b  [ .  . b0]
"""

import mlx.core as mx

from .checks import Heads
from .merge import stack_rows

Columns = tuple[mx.array, mx.array]


def extend_rows(
    first: Columns | None,
    second: Columns | None,
    first_rows: int,
    second_rows: int,
    heads: Heads,
    stop: int,
    width: int | None = None,
) -> Columns:
    """Put two batches of keys (B, H, S, D) and values (B, H, S, Dv) under each other, both ending before column `stop`.

    A batch that has seen no update is None, and brings rows without columns. One of `width` columns is a whole buffer,
    spare columns included, and stays as it is: that is a copy of one piece.
    """
    sides = first or no_columns(first_rows, heads), second or no_columns(second_rows, heads)
    keys, values = zip(*sides, strict=True)
    return stack_rows(keys, stop, width), stack_rows(values, stop, width)


def no_columns(rows: int, heads: Heads) -> Columns:
    """Keys (rows, H, 0, D) and values (rows, H, 0, Dv)."""
    return (
        mx.zeros((rows, heads.heads, 0, heads.key_size), heads.key_dtype),
        mx.zeros((rows, heads.heads, 0, heads.value_size), heads.value_dtype),
    )
