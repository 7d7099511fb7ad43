"""One row of a batch, in memory of its own.

a  [ .  . a0 a1 a2]       row 0   ->   [a0 a1 a2]
b  [b0 b1 b2 b3 b4]
"""

from .row_copies import copy_pairs, copy_slice
from .row_plan import Move, Pair, moved


def extract_row(buffers: Pair, row: int, moves: tuple[Move, ...], width: int) -> Pair:
    """`width` columns of one row of keys (B, H, S, D) and values (B, H, S, Dv): (1, H, width, D) and (1, H, width, Dv).

    They are copied: a view would keep the batch's whole buffer alive.
    """
    if len(moves) == 1 and moves[0][1:] == (0, width):
        keys, values = (copy_slice(buffer, row, 1, moves[0][0], width) for buffer in buffers)
        return keys, values
    return copy_pairs([buffers], moved((row,), (moves,)), width)
