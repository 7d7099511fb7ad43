"""Two batches to one: both are right-aligned, so that the next token of every row goes to one column.

a  [a0 a1 a2]             a  [a0 a1 a2]
b  [b0]            ->     b  [ .  . b0]

Where a batch has spare rows and its columns stay where they are, the other's rows are written behind its own:
nothing is copied but those.
"""

import mlx.core as mx

from .row_copies import copy_rows
from .row_plan import RowPlan, one_behind_the_other


def extend_rows(
    first: mx.array | None, second: mx.array | None, mine: RowPlan, theirs: RowPlan, width: int, allocated: int
) -> mx.array:
    """Copy the rows of two buffers, of which one may be missing, to a new one.

    Args:
        first, second: (B, H, S, D), or None for a batch that has seen no update, whose rows are without columns.
        mine, theirs: the rows of each, of that buffer as source 0.
        width, allocated: how many columns and rows the new buffer has.
    """
    sources = [each for each in (first, second) if each is not None]
    return copy_rows(sources, one_behind_the_other(mine, theirs, len(sources) - 1), width, allocated)


def write_rows(buffer: mx.array, held: int, second: mx.array | None, theirs: RowPlan) -> mx.array:
    """Return `buffer` with the rows of the second behind the `held` ones, in spare rows of its own."""
    rows = len(theirs.rows)
    if second is None:
        new = mx.zeros((rows, *buffer.shape[1:]), buffer.dtype)
    else:
        new = copy_rows([second], theirs, buffer.shape[2])
    fresh = buffer[...]
    fresh[held : held + rows] = new
    return fresh
