"""The sinks of a batch: slots of their own in front of the columns, the same for all rows.

keep = 2, left padding 0 and 1, after four columns; the column that a sink came in is a pad

slot    0  1 | 2  3  4  5
a      a0 a1 | .  . a2 a3      pads 2
b      b0 b1 | .  .  . b2      pads 3
"""

from collections.abc import Sequence

import mlx.core as mx

from .append import concat, overwrite, spare_columns


def with_sinks(
    buffer: mx.array, columns: mx.array, keep: int, firsts: Sequence[int], counts: Sequence[int]
) -> mx.array:
    """Put those of the newest columns that are sinks into their slots.

    Args:
        buffer: (B, H, S, D) or more rows, the slots of the sinks in front.
        columns: (B, H, N, D), the columns written last.
        keep: how many sinks a row has.
        firsts: the position that each row's first new column has, (B,); negative where that is a left pad.
        counts: how many of the new columns are no right pads, (B,).

    Returns:
        An array of the same shape.
    """
    sources = [[s - first for s in range(keep)] for first in firsts]
    new = [[0 <= i < n for i in row] for row, n in zip(sources, counts, strict=True)]
    if not any(any(row) for row in new):
        return buffer
    last = columns.shape[2] - 1
    index = mx.array([[min(max(0, i), last) for i in row] for row in sources])
    found = mx.take_along_axis(columns, index[:, None, :, None], axis=2)
    return overwrite(buffer, mx.where(mx.array(new)[:, None, :, None], found, buffer[: len(firsts), :, :keep]), 0)


def sink_slots(columns: mx.array, keep: int) -> mx.array:
    """Slots for `keep` sinks, unwritten, beside columns (B, H, N, D)."""
    return concat(spare_columns(columns, keep) or [columns[..., :0, :]])
