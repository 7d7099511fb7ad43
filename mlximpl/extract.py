"""One row of a batch, in memory of its own.

a  [ .  . a0 a1 a2]       row 0   ->   [a0 a1 a2]
b  [b0 b1 b2 b3 b4]
"""

import mlx.core as mx

from .append import join

WIDE_LEAST = 1 << 16
"""From so many bytes a row on, fewer and wider elements are worth two views."""


def extract_row(columns: list[mx.array], row: int, start: int, stop: int) -> mx.array:
    """Columns start to stop of one row, (1, H, stop - start, D).

    `columns` are parts (B, H, S, D) that lie one behind the other in temporal order. The result is copied:
    a view would keep the batch's whole buffer alive.
    """
    dtype, words = columns[0].dtype, _words(columns[0])
    parts = []
    for part in columns:
        width = part.shape[2]
        if start < width and stop > 0:
            whole = part[row : row + 1].view(words)
            parts.append(whole[:, :, max(start, 0) : min(stop, width), :])
        start, stop = start - width, stop - width
    if not parts:
        return mx.contiguous(columns[0][row : row + 1, :, :0, :])
    return join(parts).view(dtype)


def _words(part: mx.array) -> mx.Dtype:
    """As what to copy a row: a CPU copies what is not contiguous element by element, whatever their size."""
    _, heads, width, size = part.shape
    column = size * part.itemsize
    wide = mx.default_device() == mx.cpu and column % 8 == 0 and heads * width * column >= WIDE_LEAST
    return mx.uint64 if wide else part.dtype
