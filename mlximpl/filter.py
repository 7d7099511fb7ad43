"""Some rows of a batch, in any order.

[a b c d]  rows [0, 2, 3]   ->   [a c d]       copied as the runs [0:1] and [2:4]
"""

from collections.abc import Sequence

import mlx.core as mx

from .append import join
from .checks import check_columns, check_rows


def filter_rows(keys: mx.array, values: mx.array, rows: Sequence[int] | mx.array) -> tuple[mx.array, mx.array]:
    """Keep some rows of a batch.

    Args:
        keys: (B, H, S, D).
        values: (B, H, S, Dv).
        rows: which rows to keep, in this order; negative ones count from the end, one named twice comes
            twice.

    Returns:
        keys (len(rows), H, S, D) and values (len(rows), H, S, Dv).

    Raises:
        IndexError: a row that is not there.
    """
    check_columns(keys, values)
    kept = check_rows("filter", rows, keys.shape[0])
    return take_rows(keys, kept), take_rows(values, kept)


def take_rows(array: mx.array, rows: Sequence[int], first: int = 0) -> mx.array:
    """Gather rows of an array (B, H, S, D), without its first columns."""
    held, heads, width, size = array.shape
    runs = consecutive(rows)
    if not runs:
        return mx.zeros((0, heads, width - first, size), array.dtype)
    if runs == [(0, held)] and first == 0:
        return array[...]
    return join([array[start:stop, :, first:, :] for start, stop in runs], axis=0)


def consecutive(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a list of rows into runs (start, stop) of neighbours.

    >>> consecutive([0, 2, 3, 3, 1])
    [(0, 1), (2, 4), (3, 4), (1, 2)]
    """
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
