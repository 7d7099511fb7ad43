"""Several caches of one layer, as one: what is done is done to each of them, or to none.

    CacheList(KVCache, ArraysCache)      filter([1])   ->   each child filtered

Since nothing here is mutated, a child that refuses leaves every other as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CacheList = tuple[Any, ...]
"""Children: a `Cache`, an `Arrays` or a `CacheList` each."""


def each(operation: Callable[..., Any], *lists: CacheList) -> CacheList:
    """What the operation makes of each child, or of the children at one place in several lists.

    Raises what a child's operation raises, and ValueError for lists of other lengths.

    >>> each(lambda mine, theirs: mine + theirs, (1, 2), (10, 20))
    (11, 22)
    """
    if len({len(children) for children in lists}) > 1:
        raise ValueError(f"lists of {[len(children) for children in lists]} caches do not go together")
    return tuple(operation(*children) for children in zip(*lists, strict=True))
