"""The sinks of a batch have slots of their own, since rows reach the end of their sinks at different columns.

The first `keep` slots are theirs as soon as anything is stored. A token at a position p < keep lies in slot p, and the
column that it came in is a pad. Two rows, keep = 2, left padding 0 and 2, after four columns:

    slot     0   1   2   3   4   5
    row a    0   1   .   .   2   3
    row b    0   1   .   .   .   .
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.moving import NOWHERE, move, same_for_all
from reference.state import NO_TOKEN, Cache, Positions


def reserved(cache: Cache) -> Cache:
    """The cache with the slots of its sinks, which a batch without columns does not have yet.

    >>> from reference.state import batch
    >>> reserved(batch([0, 3], max_size=4, keep=2)).positions
    array([[-1, -1],
           [-1, -1]])
    """
    if not cache.batched or not cache.keep or cache.slots:
        return cache
    nowhere = same_for_all([NOWHERE] * cache.keep, cache.rows)
    return replace(
        cache,
        keys=None if cache.keys is None else move(cache.keys, nowhere),
        values=None if cache.values is None else move(cache.values, nowhere),
        positions=np.full((cache.rows, cache.keep), NO_TOKEN, np.int64),
        head=cache.keep,
    )


def into_sinks(cache: Cache, new: Positions, sources: Positions) -> Positions:
    """The table `sources` (B, T) of an update with each new sink of a batch in its slot instead of its column.

    new  (B, N)  the positions of the new columns, which are the sources from `cache.slots` on

    >>> from reference.state import batch
    >>> one = reserved(batch([0], max_size=4, keep=1))
    >>> into_sinks(one, np.array([[0, 1]]), np.array([[0, 1, 2]]))
    array([[ 1, -1,  2]])
    """
    if not cache.batched:
        return sources
    moved = sources.copy()
    for b, i in np.argwhere((new != NO_TOKEN) & (new < cache.keep)):
        source = cache.slots + i
        moved[b, moved[b] == source] = NOWHERE
        moved[b, new[b, i]] = source
    return moved
