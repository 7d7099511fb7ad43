"""`update_and_fetch`: one way in for all four caches.

What moves is decided by `append.place` or `ring_update.place`; keys, values and positions then move alike. The fetch is
what the new cache stores: `update(cache, k, v).keys`, in slot order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference import append, ring_update
from reference.moving import move, move_positions
from reference.padding import announced, incoming
from reference.sinks import into_sinks, reserved
from reference.state import Array, Cache, Pending, Positions, head_shapes, kind


def update(cache: Cache, keys: Array, values: Array) -> Cache:
    """The cache after N more columns in every row.

    keys    (B, H, N, D)
    values  (B, H, N, Dv)

    Raises ValueError when rows, heads, head sizes or dtypes are not the cache's, when N is 0 or differs between the
    two, and when more columns come than `prepare` announced.

    >>> from reference.state import ring
    >>> def tokens(*names): return np.array(names).reshape(1, 1, -1, 1)
    >>> cache = update(ring(4), tokens(0, 1, 2, 3, 4, 5), tokens(0, 1, 2, 3, 4, 5))
    >>> cache.positions                   # more than max_size came at once: all of them are seen, and stored
    array([[0, 1, 2, 3, 4, 5]])
    >>> cache = update(cache, tokens(6), tokens(6))
    >>> cache.keys.ravel(), cache.head    # cut to the newest four, then the head wrapped and overwrote the oldest
    (array([6, 3, 4, 5]), 1)
    """
    _check(cache, keys, values)
    count = keys.shape[2]
    if not cache.rows and not cache.batched:
        rows = keys.shape[0]
        nothing = np.zeros((rows, 0), np.int64)
        cache = replace(cache, positions=nothing, tokens=(0,) * rows, due=(0,) * rows)
    cache = reserved(announced(cache, count))

    new = incoming(cache, count)
    sources, head, wrapped = _place(cache, count, new)
    old_keys = cache.keys if cache.keys is not None else _no_tokens(keys, cache.slots)
    old_values = cache.values if cache.values is not None else _no_tokens(values, cache.slots)
    return replace(
        cache,
        keys=move(np.concatenate([old_keys, keys], axis=2), sources),
        values=move(np.concatenate([old_values, values], axis=2), sources),
        positions=_positions_after(cache, new, sources),
        tokens=tuple(t + int((row >= 0).sum()) for t, row in zip(cache.tokens, new, strict=True)),
        due=tuple(max(0, due - count) for due in cache.due),
        head=head,
        wrapped=wrapped,
        pending=_pending_after(cache, count),
        fed=0 if cache.batched else count,
    )


def fetch_positions(cache: Cache, count: int) -> tuple[Positions, Positions]:
    """The table (B, T) that the fetch of the next `count` columns will have, and their own positions (B, N)."""
    if not cache.rows and not cache.batched:
        nothing = np.zeros((1, 0), np.int64)
        cache = replace(cache, positions=nothing, tokens=(0,), due=(0,))
    cache = reserved(announced(cache, count))
    new = incoming(cache, count)
    sources, _, _ = _place(cache, count, new)
    return _positions_after(cache, new, sources), new


def _place(cache: Cache, count: int, new: Positions) -> tuple[Positions, int, bool]:
    place = append.place if cache.max_size is None else ring_update.place
    sources, head, wrapped = place(cache, count)
    return into_sinks(cache, new, sources), head, wrapped


def _no_tokens(x: Array, slots: int) -> Array:
    rows, heads, _, size = x.shape
    return np.zeros((rows, heads, slots, size), x.dtype)


def _positions_after(cache: Cache, new: Positions, sources: Positions) -> Positions:
    return move_positions(np.concatenate([cache.positions, new], axis=1), sources)


def _pending_after(cache: Cache, count: int) -> Pending | None:
    pending = cache.pending
    if pending is None:
        return None
    assert pending.columns is not None
    came = tuple(0 if length is None else max(0, count - length) for length in pending.lengths)
    if cache.max_size is None:
        right = tuple(before + more for before, more in zip(pending.right, came, strict=True))
    else:
        right = came  # the earlier ones have been moved to the front
    left = tuple(None if length is None else max(0, length - count) for length in pending.lengths)
    return Pending(pending.columns - count, left, pending.promised, right)


def _check(cache: Cache, keys: Array, values: Array) -> None:
    if keys.ndim != 4 or values.ndim != 4:
        raise ValueError(f"keys {keys.shape} and values {values.shape} must be (B, H, N, D)")
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"keys {keys.shape} and values {values.shape} differ in rows, heads or tokens")
    rows, heads, count, head_dim = keys.shape
    if count == 0:
        raise ValueError("an update needs at least 1 token, but keys and values have 0")
    if (cache.batched or cache.rows) and rows != cache.rows:
        raise ValueError(f"keys have {rows} rows, but the {kind(cache)} holds {cache.rows}")
    known = head_shapes(cache)
    given = (heads, head_dim, values.shape[3], str(keys.dtype), str(values.dtype))
    if known is not None and given != known:
        raise ValueError(f"the update has heads, head sizes and dtypes {given}, but the cache holds {known}")
