"""Two batches to one: both are right-aligned, so that the next token of every row goes to one column.

a  [a0 a1 a2]             a  [a0 a1 a2]
b  [b0]            ->     b  [ .  . b0]

Where a batch has spare rows and its columns stay where they are, the other's rows are written behind its own:
nothing is copied but those.
"""

from collections.abc import Sequence

import mlx.core as mx

from .row_copies import Row, copy_rows


def extend_rows(
    first: mx.array | None,
    second: mx.array | None,
    first_rows: Sequence[Row],
    second_rows: Sequence[Row],
    width: int,
    allocated: int,
) -> mx.array:
    """Copy the rows of two buffers, of which one may be missing, to a new one.

    Args:
        first, second: (B, H, S, D), or None for a batch that has seen no update, whose rows are without columns.
        first_rows, second_rows: the ranges of each row, of that buffer as source 0.
        width, allocated: how many columns and rows the new buffer has.
    """
    sources = [each for each in (first, second) if each is not None]
    rows = [*first_rows, *_of_source(len(sources) - 1, second_rows)]
    return copy_rows(sources, rows, width, allocated)


def write_rows(buffer: mx.array, held: int, second: mx.array | None, rows: Sequence[Row]) -> mx.array:
    """Return `buffer` with those rows of the second behind the `held` ones, in spare rows of its own."""
    new = (
        mx.zeros((len(rows), *buffer.shape[1:]), buffer.dtype)
        if second is None
        else copy_rows([second], rows, buffer.shape[2])
    )
    fresh = buffer[...]
    fresh[held : held + len(rows)] = new
    return fresh


def _of_source(source: int, rows: Sequence[Row]) -> list[Row]:
    return [tuple(each._replace(source=source) for each in row) for row in rows] if source else list(rows)
