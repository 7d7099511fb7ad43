"""Keep some rows, in the order given.

rows a, b, c; filter([2, 1])             the columns that are padding in both go (a growing batch only)

row a   0   1   2   3   4
row b   .   .   .   0   1                row c   .   0   1   2          row c   0   1   2
row c   .   .   0   1   2                row b   .   .   0   1          row b   .   0   1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from reference.state import Cache, Pending, kind, right_pads


def filter_rows(cache: Cache, rows: Sequence[int]) -> Cache:
    """The batch of these rows; a row named twice goes on as two rows.

    Raises IndexError for a row that is not there; a negative index counts from the end.

    >>> from reference.state import batch
    >>> filter_rows(batch([0, 3, 5]), [2, 1]).due
    (5, 3)
    """
    chosen = [row_index(cache, row, f"filter rows {list(rows)}") for row in rows]
    pending = cache.pending
    if pending is not None:
        pending = Pending(
            pending.columns,
            tuple(pending.lengths[b] for b in chosen),
            tuple(pending.promised[b] for b in chosen),
            tuple(pending.right[b] for b in chosen),
        )
    kept = replace(
        cache,
        keys=None if cache.keys is None else cache.keys[chosen],
        values=None if cache.values is None else cache.values[chosen],
        positions=cache.positions[chosen],
        tokens=tuple(cache.tokens[b] for b in chosen),
        due=tuple(cache.due[b] for b in chosen),
        pending=pending,
    )
    if not chosen:
        return replace(_without_oldest(kept, kept.slots), wrapped=False, pending=None)
    if kept.max_size is None:
        return _without_oldest(kept, common_padding(kept))
    return kept


def row_index(cache: Cache, row: int, call: str) -> int:
    """The row's index from 0; IndexError when it is not there."""
    if not -cache.rows <= row < cache.rows:
        raise IndexError(f"{call}, but the {kind(cache)} holds {cache.rows} rows")
    return row % cache.rows


def common_padding(cache: Cache) -> int:
    """The columns at the front of a growing batch that are padding in every row.

    A growing cache holds all of a row's tokens, then its right pads; the rest of its columns is left padding.
    """
    return min(cache.slots - t - r for t, r in zip(cache.tokens, right_pads(cache), strict=True))


def _without_oldest(cache: Cache, count: int) -> Cache:
    return replace(
        cache,
        keys=None if cache.keys is None else cache.keys[:, :, count:],
        values=None if cache.values is None else cache.values[:, :, count:],
        positions=cache.positions[:, count:],
        head=cache.slots - count,
    )
