"""Append another batch's rows. Both end in the same column; the narrower one gets pads at its front, behind the sinks.

row a   0   1   2   3                          row a   0   1   2   3
                          extend               row b   .   .   0   1
row b   0   1
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.moving import NOWHERE, move, move_positions, same_for_all
from reference.state import Array, Cache, Pending, head_shapes, kind
from reference.temporal_order import temporal_slots


def extend(cache: Cache, other: Cache) -> Cache:
    """The batch of the rows of both.

    Two rings are put in temporal order first, unless both are wrapped with their heads at the same slot.
    Raises ValueError when kind, `max_size`, `keep`, head shapes or dtypes differ.

    >>> from reference.state import batch
    >>> from reference.update import update
    >>> def tokens(n): return np.zeros((1, 1, n, 1))
    >>> a, b = update(batch([0]), tokens(4), tokens(4)), update(batch([0]), tokens(2), tokens(2))
    >>> extend(a, b).positions
    array([[ 0,  1,  2,  3],
           [-1, -1,  0,  1]])
    """
    _check(cache, other)
    in_step = cache.wrapped and other.wrapped and cache.head == other.head
    width = max(cache.slots, other.slots)
    sources = []
    for side in (cache, other):
        order = list(range(side.slots)) if in_step else temporal_slots(side)
        padded = order[: side.keep] + [NOWHERE] * (width - side.slots) + order[side.keep :]
        sources.append(same_for_all(padded, side.rows))
    positions = [move_positions(c.positions, s) for c, s in zip((cache, other), sources, strict=True)]

    keys = values = None
    if head_shapes(cache) or head_shapes(other):
        keys, values = (
            np.concatenate([move(x, s) for x, s in zip(pair, sources, strict=True)])
            for pair in (
                _same_heads(cache, other, cache.keys, other.keys),
                _same_heads(cache, other, cache.values, other.values),
            )
        )
    return replace(
        cache,
        keys=keys,
        values=values,
        positions=np.concatenate(positions),
        tokens=cache.tokens + other.tokens,
        due=cache.due + other.due,
        head=cache.head if in_step else width,
        wrapped=in_step,
        pending=_join_pending(cache, other),
    )


def _same_heads(cache: Cache, other: Cache, mine: Array | None, theirs: Array | None) -> tuple[Array, Array]:
    """Both arrays; a side never updated gets an empty one with the other's heads."""
    known = mine if mine is not None else theirs
    assert known is not None
    _, heads, _, size = known.shape
    mine = mine if mine is not None else np.zeros((cache.rows, heads, 0, size), known.dtype)
    theirs = theirs if theirs is not None else np.zeros((other.rows, heads, 0, size), known.dtype)
    return mine, theirs


def _join_pending(cache: Cache, other: Cache) -> Pending | None:
    """Each row keeps what was announced for it; the longer announcement holds for the batch.

    Rows for which nothing was announced have no right pads: all columns are theirs.
    """
    if cache.pending is None and other.pending is None:
        return None
    a, b = cache.pending or _nothing_announced(cache.rows), other.pending or _nothing_announced(other.rows)
    columns = [pending.columns for pending in (a, b) if pending.columns is not None]
    return Pending(max(columns, default=None), a.lengths + b.lengths, a.promised + b.promised, a.right + b.right)


def _nothing_announced(rows: int) -> Pending:
    return Pending(None, (None,) * rows, (None,) * rows, (0,) * rows)


def _check(cache: Cache, other: Cache) -> None:
    if kind(cache) != kind(other) or (cache.max_size, cache.keep) != (other.max_size, other.keep):
        raise ValueError(
            f"extend a {kind(cache)} (max_size {cache.max_size}, keep {cache.keep}) by a {kind(other)} "
            f"(max_size {other.max_size}, keep {other.keep})"
        )
    mine, theirs = head_shapes(cache), head_shapes(other)
    if mine and theirs and mine != theirs:
        raise ValueError(f"extend: the cache holds heads and dtypes {mine}, but the other {theirs}")
