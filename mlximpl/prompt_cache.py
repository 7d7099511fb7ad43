"""The list of caches that a model takes, one a layer."""

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .arrays_cache import ArraysCache
from .batch_kv_cache import BatchKVCache
from .batch_rotating_kv_cache import BatchRotatingKVCache
from .cache import AnyCache
from .cache_list import CacheList
from .checks import check_trim, whole
from .chunked_kv_cache import ChunkedKVCache
from .concatenate_kv_cache import ConcatenateKVCache
from .kv_cache import KVCache
from .quantized_kv_cache import QuantizedKVCache
from .rotating_kv_cache import RotatingKVCache

SINKS = 4

KEEPS_ALL = ("BatchKVCache", "ConcatenateKVCache", "QuantizedKVCache")

MODELS = "mlx_lm.models."
MAMBA = "mlx_lm.models.mamba"
"""The module of mlx-lm whose model keeps its state in caches of one class alone."""


def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]:
    """The caches of a model.

    A model with `make_cache` says which; each cache that it makes is replaced by ours of that kind, in a CacheList
    too. A kind that a model of mlx-lm's defines for itself stays. Other models get a KVCache for each of
    `model.layers`.

    Args:
        model: an mlx-lm model.
        max_kv_size: the most tokens that a layer may keep, above 4: a KVCache becomes a ring of that size which
            keeps the first 4 tokens. The state in an ArraysCache is of one size whatever was fed.

    Raises:
        ValueError: max_kv_size leaves no window behind the 4 sinks; the model wants a kind of cache that is not
            here, a ring or a chunk above max_kv_size, or with max_kv_size another kind that keeps every token; mlx-lm's
            mamba, which writes into mlx-lm's own class alone as long as `install` is not in force.
    """
    if max_kv_size is not None:
        max_kv_size = whole("max_kv_size", max_kv_size)
        if max_kv_size <= SINKS:
            raise ValueError(f"max_kv_size must be above {SINKS}, the tokens always kept, not {max_kv_size}")
    if not hasattr(model, "make_cache"):
        return [_growing(max_kv_size) for _ in model.layers]
    _check_mamba(model)
    return [_twin(str(i), cache, max_kv_size) for i, cache in enumerate(model.make_cache())]


def _check_mamba(model: Any) -> None:
    """Refuse mlx-lm's mamba where it would leave our caches unwritten, and answer as if each token were the first."""
    module = sys.modules.get(type(model).__module__)
    if module is None or module.__name__ != MAMBA or isinstance(ArraysCache(1), module.ArraysCache):
        return
    raise ValueError(f"{MAMBA} keeps its state in mlx-lm's own ArraysCache alone: call mlximpl.install() first")


def _growing(max_kv_size: int | None) -> KVCache | RotatingKVCache:
    return KVCache() if max_kv_size is None else RotatingKVCache(max_kv_size, keep=SINKS)


def _twin(name: str, cache: Any, max_kv_size: int | None) -> Any:
    """Our cache of the same kind and settings; `name` says where the model has it."""
    kind = type(cache).__name__
    if kind == "KVCache":
        return _growing(max_kv_size)
    if kind == "RotatingKVCache":
        _check_bound(name, f"a ring of {cache.max_size}", cache.max_size, max_kv_size)
        return RotatingKVCache(cache.max_size, cache.keep)
    if kind == "ChunkedKVCache":
        _check_bound(name, f"a ChunkedKVCache of {cache.chunk_size}", cache.chunk_size, max_kv_size)
        return ChunkedKVCache(cache.chunk_size)
    if kind == "ArraysCache":
        return ArraysCache(len(cache.cache), cache.left_padding)
    if kind == "CacheList":
        return CacheList(*(_twin(f"{name}.{i}", each, max_kv_size) for i, each in enumerate(cache.caches)))
    if kind == "BatchRotatingKVCache":
        _check_bound(name, f"a ring of {cache.max_size}", cache.max_size, max_kv_size)
        return BatchRotatingKVCache(cache.max_size, cache.left_padding)
    if kind not in KEEPS_ALL and max_kv_size is None and type(cache).__module__.startswith(MODELS):
        return cache  # a kind of the model's own, which only its code knows
    if kind not in KEEPS_ALL:
        raise ValueError(f"cache {name} of the model is a {kind}, which is not available here")
    if max_kv_size is not None:
        raise ValueError(
            f"cache {name} of the model is a {kind}, which keeps every token: max_kv_size {max_kv_size} cannot bound it"
        )
    if kind == "BatchKVCache":
        return BatchKVCache(cache.left_padding)
    return ConcatenateKVCache() if kind == "ConcatenateKVCache" else QuantizedKVCache(cache.group_size, cache.bits)


def _check_bound(name: str, what: str, size: int, max_kv_size: int | None) -> None:
    if max_kv_size is not None and size > max_kv_size:
        raise ValueError(f"cache {name} of the model is {what}, above max_kv_size {max_kv_size}")


def can_trim_prompt_cache(cache: Sequence[Any]) -> bool:
    """Whether every layer can drop any number of tokens up to all it has been fed."""
    return all(layer._gives_all_back() if isinstance(layer, AnyCache) else layer.is_trimmable() for layer in cache)


def trim_prompt_cache(cache: Sequence[Any], num_tokens: int) -> int:
    """Drop the newest tokens of every layer, or of none.

    Args:
        cache: one cache a layer, ours or mlx-lm's.
        num_tokens: how many tokens to drop.

    Returns:
        num_tokens; 0 if there are no layers.

    Raises:
        ValueError: a layer cannot drop that many. No layer has been touched then.
    """
    num_tokens = check_trim(num_tokens)
    for i, layer in enumerate(cache):
        if not _can_trim(layer, num_tokens):
            limit = _trim_limit(layer)
            raise ValueError(f"trim {num_tokens} of all layers, but layer {i}, {layer!r}, can drop at most {limit}")
    if num_tokens:
        for layer in cache:
            layer.trim(num_tokens)
    return num_tokens if cache else 0


def _can_trim(layer: Any, n: int) -> bool:
    if hasattr(layer, "can_trim"):
        return bool(layer.can_trim(n))
    return n <= _trim_limit(layer)


def _trim_limit(layer: Any) -> int:
    """The most tokens that a cache can drop; for mlx-lm's kinds, what their own `trim` would not clip."""
    if hasattr(layer, "trim_limit"):
        return int(layer.trim_limit())
    if not layer.is_trimmable():
        return 0
    if hasattr(layer, "caches"):
        return min((_trim_limit(each) for each in layer.caches), default=0)
    offset: Any = getattr(layer, "offset", None)
    if offset is None:
        return int(layer.size())
    if isinstance(offset, mx.array):
        rows: Any = offset.tolist()
        offset = min(rows, default=0)
    return max(0, int(offset) - getattr(layer, "start_position", 0))
