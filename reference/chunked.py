"""The chunked cache of llama4: a growing cache that forgets what no later chunk may see.

chunk_size = 4, ten tokens fed, trim_front()         a query at 10 sees its own chunk: 8 9 10

positions   0 1 2 3 4 5 6 7 8 9     ->     6 7 8 9     start_position 6

The model makes its own masks: a query at position q sees the positions p <= q of its own chunk, those with
`p // chunk_size == q // chunk_size`.
"""

from __future__ import annotations

from dataclasses import replace

from reference.state import Cache, solo


def chunked(chunk_size: int) -> Cache:
    """A new `ChunkedKVCache`. Raises ValueError where no token would be left."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}, but it must be 1 or more")
    return replace(solo(), chunk_size=chunk_size)


def trim_front(cache: Cache) -> Cache:
    """The cache without all but its newest `chunk_size` tokens: `maybe_trim_front`.

    >>> import numpy as np
    >>> from reference.update import update
    >>> x = np.zeros((1, 1, 10, 1))
    >>> trim_front(update(chunked(4), x, x)).positions
    array([[6, 7, 8, 9]])
    """
    assert cache.chunk_size is not None
    gone = max(0, cache.slots - cache.chunk_size)
    if cache.keys is None or cache.values is None or not gone:
        return cache
    return replace(
        cache,
        keys=cache.keys[:, :, gone:],
        values=cache.values[:, :, gone:],
        positions=cache.positions[:, gone:],
        head=cache.slots - gone,
    )


def start_position(cache: Cache) -> int:
    """The position of the oldest token held."""
    return max(cache.tokens, default=0) - cache.slots
