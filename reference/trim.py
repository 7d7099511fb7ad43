"""Drop the newest tokens of every row: a rollback after rejected drafts.

On a wrapped ring the evicted columns are gone, so only as many can be dropped as leave the next query its whole window:

    max_size = 4     slot       0   1   2   3                          after trim(1)
                     position   4   5   2   3     head = 2             4   .   2   3     head = 1

    The next token, 5 again, sees 2 3 4 and itself. A trim(2) would leave token 4 without token 1: refused.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.extract import held_tokens
from reference.masks import window_of
from reference.state import NO_TOKEN, Array, Cache, Positions, kind, needed, offsets
from reference.temporal_order import temporal_slots


def can_trim(cache: Cache, count: int) -> bool:
    """Whether `count` tokens may be dropped from every row: each must still hold all that its next query may see.

    >>> import numpy as np
    >>> from reference.state import ring
    >>> from reference.update import update
    >>> def tokens(n): return np.zeros((1, 1, n, 1))
    >>> cache = update(update(ring(4), tokens(9), tokens(9)), tokens(2), tokens(2))
    >>> [n for n in range(12) if can_trim(cache, n)]     # 6 7 8 9 10 are stored, and nothing is needed by position 0
    [0, 1, 2, 11]
    """
    if count <= 0:
        return count == 0
    if cache.pending is not None or not cache.rows:
        return False
    if cache.chunk_size is not None and count > cache.slots:
        return False  # even where nothing older is needed: a chunked cache drops what it holds
    return all(
        left >= 0 and needed(cache, left, window_of(cache, None)) <= set(held_tokens(cache, b))
        for b, left in enumerate(t - count for t in cache.tokens)
    )


def trim_limit(cache: Cache) -> int:
    """The largest n for which every number of tokens up to n may be dropped."""
    limit = 0
    while can_trim(cache, limit + 1):
        limit += 1
    return limit


def is_trimmable(cache: Cache) -> bool:
    """Whether every n up to the shortest row's offset may be dropped, or several tokens that came last and together.

    A speculative decoder feeds its drafts together, asks this, and drops what was rejected; what it hears as a "no"
    leaves rejected tokens in the cache.

    >>> import numpy as np
    >>> from reference.state import ring
    >>> from reference.update import update
    >>> def tokens(n): return np.zeros((1, 1, n, 1))
    >>> full = update(ring(4), tokens(4), tokens(4))
    >>> [is_trimmable(update(full, tokens(n), tokens(n))) for n in (1, 3)]
    [False, True]
    """
    limit = trim_limit(cache)
    return limit >= min(offsets(cache), default=0) or 1 < cache.fed <= limit


def trim(cache: Cache, count: int) -> Cache:
    """The cache without the newest `count` tokens of every row.

    Raises ValueError for a negative count and for one that `can_trim` denies.

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
    if count < 0:
        raise ValueError(f"trim({count}): the number of tokens to drop must be 0 or more")
    if not can_trim(cache, count):
        raise ValueError(f"trim({count}), but the {kind(cache)} can drop {trim_limit(cache)} at most now")
    if count == 0:
        return cache
    tokens = tuple(t - count for t in cache.tokens)
    if cache.wrapped and cache.head - cache.keep >= count:
        head = cache.head - count
        positions = _without(cache.positions, tokens)
        positions[:, head : cache.head] = NO_TOKEN
        return replace(cache, positions=positions, tokens=tokens, head=head, fed=0)
    left = temporal_slots(cache)[: _slots_left(cache, cache.slots - count, tokens)]
    return replace(
        cache,
        keys=_take(cache.keys, left),
        values=_take(cache.values, left),
        positions=_without(cache.positions, tokens)[:, left],
        tokens=tokens,
        head=len(left),
        wrapped=False,
        fed=0,
    )


def _slots_left(cache: Cache, count: int, tokens: tuple[int, ...]) -> int:
    """How many slots stay of a ring that loses all but `count`: its sinks do, as long as they are tokens.

    The sinks' slots of a batch stay while any row has a token, or any column is left behind them.
    """
    if cache.batched:
        return max(count, cache.keep) if any(tokens) or count > cache.keep else 0
    return max(count, min(cache.keep, *tokens))


def _without(positions: Positions, tokens: tuple[int, ...]) -> Positions:
    """The table (B, S) without what a row has no longer: `tokens[b]` are left to row b."""
    left = np.array(tokens, np.int64)[:, None]
    return np.where(positions < left, positions, NO_TOKEN)


def _take(x: Array | None, slots: list[int]) -> Array:
    assert x is not None
    return x[:, :, slots]
