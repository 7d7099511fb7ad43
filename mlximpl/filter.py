"""Some rows of a batch, in any order.

[a b c d]  rows [0, 2, 3]   ->   [a c d]       the rows beside each other are copied in one piece
"""

from collections.abc import Sequence

import mlx.core as mx

from .checks import check_columns, check_rows
from .row_copies import copy_pairs
from .row_plan import shifted


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
    width = keys.shape[2]
    return copy_pairs([(keys, values)], shifted(kept, (0,) * keys.shape[0], width, 0), width)
