"""Our caches as mlx-lm's, with what they hold."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .arrays_cache import ArraysCache
from .batch_cache import BatchCache
from .batch_kv_cache import BatchKVCache
from .batch_rotating_kv_cache import BatchRotatingKVCache
from .cache import Cache
from .cache_list import CacheList
from .checks import COLUMNS_MAX
from .chunked_kv_cache import ChunkedKVCache
from .kinds import KINDS
from .padding import Pending
from .quantized_kv_cache import QuantizedKVCache
from .rotating_kv_cache import RotatingKVCache
from .row_numbers import Ints
from .upstream import mlx_lm_cache, own_names


def to_mlx_lm(cache: Any) -> Any:
    """mlx-lm's caches that go on where mlximpl's stand: its own classes, also while `install` is in force.

    Nothing is shared that a later write could change, and the originals stay as they are.

    Args:
        cache: one of mlximpl's caches, or a list of them, one a layer.

    Returns:
        A cache, or a list.

    Raises:
        ValueError: something else than mlximpl's caches; one in a state that mlx-lm's cannot be in: sinks in a batch, a
            ring that holds fewer tokens than it has room for after a trim, right padding of unknown length.
        ImportError: there is no mlx-lm.
        MlxLmVersionError: it is of a version that mlximpl was not tested with.
    """
    theirs = own_names(mlx_lm_cache())
    if isinstance(cache, (list, tuple)):
        return [_converted(f"cache {i}", each, theirs) for i, each in enumerate(cache)]
    return _converted("the cache", cache, theirs)


def _converted(what: str, ours: Any, theirs: dict[str, Any]) -> Any:
    kind = type(ours)
    if KINDS.get(kind.__name__) is not kind:
        raise ValueError(f"{what} is a {kind.__module__}.{kind.__name__}, which is none of mlximpl's caches")
    if isinstance(ours, CacheList):
        children = (_converted(f"child {i} of {what}", each, theirs) for i, each in enumerate(ours.caches))
        return theirs["CacheList"](*children)
    try:
        attributes = _ATTRIBUTES.get(kind.__name__, _growing)(ours)
    except ValueError as error:
        raise ValueError(f"{what}, {ours!r}, cannot be held by mlx-lm: {error}") from error
    made = theirs[kind.__name__].__new__(theirs[kind.__name__])
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


Attributes = dict[str, Any]


def _buffers(ours: Cache) -> Attributes:
    """Keys and values cut to the columns stored, or None for none."""
    keys, values = ours._stored_arrays() if ours._columns() else (None, None)
    return {"keys": keys, "values": values}


def _growing(ours: Any) -> Attributes:
    return {**_buffers(ours), "offset": ours.offset}


def _quantized(ours: QuantizedKVCache) -> Attributes:
    keys, values = ours._stored_parts() if ours.offset else (None, None)
    return {"keys": keys, "values": values, "offset": ours.offset, "group_size": ours.group_size, "bits": ours.bits}


def _chunked(ours: ChunkedKVCache) -> Attributes:
    return {**_growing(ours), "chunk_size": ours.chunk_size, "start_position": ours.start_position}


def _ring(ours: RotatingKVCache) -> Attributes:
    held = ours._columns() - ours._pads
    if held < ours.size():
        raise ValueError(f"after a trim it holds {held} tokens, and a ring of mlx-lm {ours.size()}")
    if ours._pads:
        raise ValueError(f"{ours._pads} of its columns hold no token, and mlx-lm would show them")
    return {**_growing(ours), "keep": ours.keep, "max_size": ours.max_size, "_idx": ours._ring.head}


def _arrays(ours: ArraysCache) -> Attributes:
    _, left_padding, _, *_ = ours.state
    return {"cache": ours._fresh(), "left_padding": left_padding, "lengths": ours.lengths}


def _rows(ours: BatchCache) -> Attributes:
    return {
        **_buffers(ours),
        "offset": _array(ours._offsets),
        "left_padding": _array(ours._pads),
        "_idx": ours._columns(),
    }


def _array(numbers: Ints) -> mx.array:
    return mx.array(numbers, dtype=mx.int32)


def _batch(ours: BatchKVCache) -> Attributes:
    right, pending = None, ours._pending
    if pending is not None:
        right = _array(tuple(t + n for t, n in zip(pending.tails, _right_pads_to_come(pending), strict=True)))
    return {**_rows(ours), "_right_padding": right}


def _right_pads_to_come(pending: Pending) -> list[int]:
    found = []
    for length, waiting in zip(pending.lengths, pending.waiting, strict=True):
        if waiting < 0 <= length and pending.columns > COLUMNS_MAX // 2:  # as `from_mlx_lm` has it
            raise ValueError("nothing says how many columns come, and so how much right padding")
        told = 0 if length < 0 else pending.columns - length
        found.append(waiting if waiting >= 0 else told)
    return found


def _batch_ring(ours: BatchRotatingKVCache) -> Attributes:
    if ours.keep:
        raise ValueError(f"it keeps {ours.keep} sinks, and a batch of mlx-lm has none")
    ring = ours._ring
    if any(min(offset, ring.max_size) > ring.stored for offset in ours._offsets):
        raise ValueError(f"after a trim it holds {ring.stored} columns, and a ring of mlx-lm {ring.max_size}")
    ends, pending = None, ours._pending
    if pending is not None:
        if any(waiting >= 0 for waiting in pending.waiting):
            raise ValueError("right padding was announced without lengths")
        lengths = pending.full_lengths()
        ends = _array(tuple(o - t + n for o, t, n in zip(ours._offsets, pending.tails, lengths, strict=True)))
    places = {"max_size": ring.max_size, "_offset": ring.stored, "_idx": ring.head, "rotated": ring.wrapped}
    return {**_rows(ours), **places, "_lengths": ends}


_ATTRIBUTES: dict[str, Callable[[Any], Attributes]] = {
    "ArraysCache": _arrays,
    "BatchKVCache": _batch,
    "BatchRotatingKVCache": _batch_ring,
    "ChunkedKVCache": _chunked,
    "QuantizedKVCache": _quantized,
    "RotatingKVCache": _ring,
}
