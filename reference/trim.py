"""Drop the newest tokens of every row: a rollback after rejected drafts.

On a wrapped ring the evicted columns are gone, so only as many can be dropped as leave the next query its whole window:

    max_size = 4     slot       0   1   2   3                          after trim(1)
                     position   4   5   2   3     head = 2             4   .   2   3     head = 1

    The next token, 5 again, sees 2 3 4 and itself. A trim(2) would leave token 4 without token 1: refused.
"""

from __future__ import annotations

from dataclasses import replace

from reference.extract import held_tokens
from reference.state import NO_TOKEN, Array, Cache, kind, offsets
from reference.temporal_order import temporal_slots


def trim_limit(cache: Cache) -> int:
    """The most tokens that may be dropped from every row: each must still hold all that its next query may see.

    >>> import numpy as np
    >>> from reference.state import ring
    >>> from reference.update import update
    >>> def tokens(n): return np.zeros((1, 1, n, 1))
    >>> cache = update(ring(4), tokens(9), tokens(9))
    >>> trim_limit(cache)                              # all nine are still stored
    9
    >>> trim_limit(update(cache, tokens(2), tokens(2)))    # 6 7 8 9 10 are stored: 9 would need 6 7 8
    2
    """
    if cache.pending is not None or not cache.rows:
        return 0
    return min(_row_limit(cache, b) for b in range(cache.rows))


def _row_limit(cache: Cache, b: int) -> int:
    tokens, held = cache.tokens[b], set(held_tokens(cache, b))
    oldest = tokens
    while oldest - 1 in held:
        oldest -= 1
    if oldest == 0 or cache.max_size is None:
        return tokens
    before_query = cache.max_size - cache.keep - 1
    return max(0, tokens - oldest - before_query)


def is_trimmable(cache: Cache) -> bool:
    """Whether every n up to the shortest row's offset may be dropped."""
    return trim_limit(cache) >= min(offsets(cache), default=0)


def trim(cache: Cache, count: int) -> Cache:
    """The cache without the newest `count` tokens of every row.

    Raises ValueError for a negative count and for one above `trim_limit`.

    >>> import numpy as np
    >>> from reference.state import ring
    >>> from reference.update import update
    >>> def tokens(n): return np.zeros((1, 1, n, 1))
    >>> cache = ring(4)
    >>> for _ in range(6): cache = update(cache, tokens(1), tokens(1))
    >>> trimmed = trim(cache, 1)
    >>> trimmed.positions, trimmed.head
    (array([[ 4, -1,  2,  3]]), 1)
    """
    limit = trim_limit(cache)
    if count < 0:
        raise ValueError(f"trim({count}): the number of tokens to drop must be 0 or more")
    if count > limit:
        raise ValueError(f"trim({count}), but the {kind(cache)} can drop {limit} at most now")
    if count == 0:
        return cache
    tokens = tuple(t - count for t in cache.tokens)
    if cache.wrapped and cache.head - cache.keep >= count:
        head = cache.head - count
        positions = cache.positions.copy()
        positions[:, head : cache.head] = NO_TOKEN
        return replace(cache, positions=positions, tokens=tokens, head=head)
    left = temporal_slots(cache)[: cache.slots - count]
    return replace(
        cache,
        keys=_take(cache.keys, left),
        values=_take(cache.values, left),
        positions=cache.positions[:, left],
        tokens=tokens,
        head=len(left),
        wrapped=False,
    )


def _take(x: Array | None, slots: list[int]) -> Array:
    assert x is not None
    return x[:, :, slots]
