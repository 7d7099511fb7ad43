"""One row of a batch, in memory of its own.

a  [ .  . a0 a1 a2]       row 0   ->   [a0 a1 a2]
b  [b0 b1 b2 b3 b4]
"""

import mlx.core as mx

from .row_copies import copy_rows
from .row_plan import Move, moved


def extract_row(buffer: mx.array, row: int, moves: tuple[Move, ...], width: int) -> mx.array:
    """`width` columns of one row of a buffer (B, H, S, D): (1, H, width, D).

    It is copied: a view would keep the batch's whole buffer alive.
    """
    return copy_rows([buffer], moved((row,), (moves,)), width)
