"""Two batches to one: both are right-aligned, so that the next token of every row goes to one column.

a  [a0 a1 a2]             a  [a0 a1 a2]
b  [b0]            ->     b  [ .  . b0]

Where a batch has spare rows and its columns stay where they are, the other's rows are written behind its own:
nothing is copied but those.
"""

import mlx.core as mx

from .row_copies import copy_pairs
from .row_plan import Pair, RowPlan, one_behind_the_other


def extend_rows(
    first: Pair | None, second: Pair | None, mine: RowPlan, theirs: RowPlan, width: int, allocated: int
) -> Pair:
    """Copy the rows of two batches' keys and values to new buffers. One may be missing.

    Args:
        first, second: keys (B, H, S, D) and values (B, H, S, Dv), or None for a batch that has seen no update, whose
            rows are without columns.
        mine, theirs: the rows of each, of those buffers as source 0.
        width, allocated: how many columns and rows the new buffers have.
    """
    sources = [each for each in (first, second) if each is not None]
    return copy_pairs(sources, one_behind_the_other(mine, theirs, len(sources) - 1), width, allocated)


def write_rows(buffers: Pair, held: int, second: Pair | None, theirs: RowPlan) -> Pair:
    """Return the buffers with the rows of the second behind the `held` ones, in spare rows of their own."""
    rows = len(theirs.rows)
    if second is None:
        new = [mx.zeros((rows, *buffer.shape[1:]), buffer.dtype) for buffer in buffers]
    else:
        new = list(copy_pairs([second], theirs, buffers[0].shape[2]))
    keys, values = (buffer[...] for buffer in buffers)
    keys[held : held + rows], values[held : held + rows] = new
    return keys, values
