"""Caches of mlx-lm as ours, with what they hold."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .arrays_cache import ArraysCache
from .batch_cache import BatchCache
from .batch_kv_cache import BatchKVCache
from .batch_rotating_kv_cache import BatchRotatingKVCache
from .cache import AnyCache
from .cache_list import CacheList
from .checks import COLUMNS_MAX
from .concatenate_kv_cache import ConcatenateKVCache
from .kinds import KINDS
from .padding import Pending
from .states import state_ints
from .upstream import CACHE


def from_mlx_lm(cache: Any) -> Any:
    """mlximpl's caches that go on where those of mlx-lm 0.32 stand.

    Nothing is shared that a later write could change, and the originals stay as they are. During a ragged prefill
    mlx-lm's BatchKVCache does not say how many of its right pads have come: until finalize(), ours counts them all as
    come. For updates, masks, filter() and finalize() that is the same, but extract() leaves out as many columns.

    Args:
        cache: one of mlx-lm's caches, or a list of them, one a layer.

    Returns:
        A cache, or a list.

    Raises:
        ValueError: something else than mlx-lm's caches; one whose numbers disagree, as some of mlx-lm's own operations
            leave them (a ring trimmed by more than it holds, or a trimmed ConcatenateKVCache).
    """
    if isinstance(cache, (list, tuple)):
        return [_converted(f"cache {i}", each) for i, each in enumerate(cache)]
    return _converted("the cache", cache)


def _converted(what: str, theirs: Any) -> AnyCache:
    kind = type(theirs)
    if kind.__module__ != CACHE or kind.__name__ not in KINDS:
        raise ValueError(f"{what} is a {kind.__module__}.{kind.__name__}, which is none of mlx-lm's caches")
    if kind.__name__ == "CacheList":
        return CacheList(*(_converted(f"child {i} of {what}", each) for i, each in enumerate(theirs.caches)))
    try:
        return _MAKE.get(kind.__name__, _plain)(theirs)
    except ValueError as error:
        raise ValueError(f"{what}, a {kind.__name__} of mlx-lm, does not hold together: {error}") from error


def _plain(theirs: Any) -> AnyCache:
    return KINDS[type(theirs).__name__].from_state(theirs.state)


def _concatenate(theirs: Any) -> AnyCache:
    if theirs.keys is None:
        return ConcatenateKVCache()
    columns = theirs.keys.shape[2]
    if theirs.offset != columns:
        raise ValueError(f"offset {theirs.offset}, but {columns} columns that its next update would all bring back")
    return _plain(theirs)


def _arrays(theirs: Any) -> AnyCache:
    slots, left_padding, lengths = theirs.state
    if lengths is None:
        return ArraysCache.from_state((slots, left_padding, None))
    # mlx-lm says how many of the columns to come are tokens, not how many come.
    return ArraysCache.from_state((slots, left_padding, mx.maximum(lengths, 0), COLUMNS_MAX))


def _batch(theirs: Any) -> AnyCache:
    batch = BatchKVCache.from_state(theirs.state)
    if theirs._right_padding is not None:
        right = _one_a_row(batch, "right padding", theirs._right_padding)
        none = (-1,) * len(right)
        batch._pending = Pending(COLUMNS_MAX, none, right, none)
    return batch


def _batch_ring(theirs: Any) -> AnyCache:
    ring = BatchRotatingKVCache.from_state(theirs.state)
    if theirs._lengths is not None:
        # The offset at which each row's tokens end.
        ends = _one_a_row(ring, "lengths", theirs._lengths)
        to_come = [end - offset for end, offset in zip(ends, ring._offsets, strict=True)]
        lengths, tails = tuple(max(0, n) for n in to_come), tuple(max(0, -n) for n in to_come)
        ring._pending = Pending(COLUMNS_MAX, lengths, tails, (-1,) * len(tails))
    return ring


def _one_a_row(batch: BatchCache, name: str, numbers: mx.array) -> tuple[int, ...]:
    return state_ints(type(batch).__name__, name, numbers, batch._rows())


_MAKE: dict[str, Callable[[Any], AnyCache]] = {
    "ArraysCache": _arrays,
    "BatchKVCache": _batch,
    "BatchRotatingKVCache": _batch_ring,
    "ConcatenateKVCache": _concatenate,
}
