"""One row of a batch, in memory of its own.

a  [ .  . a0 a1 a2]       row 0   ->   [a0 a1 a2]
b  [b0 b1 b2 b3 b4]
"""

import mlx.core as mx

from .append import join


def extract_row(columns: list[mx.array], row: int, start: int, stop: int) -> mx.array:
    """Columns start to stop of one row, (1, H, stop - start, D).

    `columns` are parts (B, H, S, D) that lie one behind the other in temporal order. The result is copied:
    a view would keep the batch's whole buffer alive.
    """
    parts = []
    for part in columns:
        width = part.shape[2]
        if start < width and stop > 0:
            parts.append(part[row : row + 1, :, max(start, 0) : min(stop, width), :])
        start, stop = start - width, stop - width
    if not parts:
        return mx.contiguous(columns[0][row : row + 1, :, :0, :])
    return join(parts)
