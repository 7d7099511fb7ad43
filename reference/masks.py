"""Masks: causal, windowed, padded and rolled are one question put to the table of positions.

a wrapped ring of 4 slots, about to fetch for the query at position 6 with a window of 3

slot        0   1   2   3
position    4   5   6   3
visible     x   x   x   .        6 - 3 < p <= 6
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.state import NO_TOKEN, Cache, Positions
from reference.update import fetch_positions


def visible(keys: Positions, queries: Positions, window: int | None, keep: int = 0) -> NDArray[np.bool_]:
    """Whether the query at position q sees the key at position p: the visibility law, (B, N, T).

    keys     (B, T)   positions, NO_TOKEN for pads and empty slots
    queries  (B, N)   positions; a pad sees nothing

    >>> visible(np.array([[4, 5, 6, 3]]), np.array([[6]]), window=3).astype(int)
    array([[[1, 1, 1, 0]]])
    """
    p = keys[:, None, :]  # (B, 1, T)
    q = queries[:, :, None]  # (B, N, 1)
    seen: NDArray[np.bool_] = (p != NO_TOKEN) & (p <= q)
    if window is not None:
        seen = seen & ((p > q - window) | (p < keep))
    return seen


def window_of(cache: Cache, window_size: int | None) -> int | None:
    """W: the newest tokens that a query may see; None means all of them."""
    if cache.max_size is None:
        return window_size
    widest = cache.max_size - cache.keep
    return widest if window_size is None else min(window_size, widest)


def make_mask(cache: Cache, count: int, window_size: int | None = None) -> NDArray[np.bool_]:
    """The mask (B, N, T) of the fetch that follows the next `count` columns.

    Raises ValueError for a count or a window below 1, and for more columns than `prepare` announced.

    >>> from reference.state import batch
    >>> make_mask(batch([0, 1]), 2).astype(int)
    array([[[1, 0],
            [1, 1]],
    <BLANKLINE>
           [[0, 0],
            [0, 1]]])
    """
    if count < 1:
        raise ValueError(f"a mask for {count} tokens: it needs at least 1")
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size is {window_size}, but a query sees at least itself: it must be 1 or more")
    keys, queries = fetch_positions(cache, count)
    return visible(keys, queries, window_of(cache, window_size), cache.keep)
