"""The kinds of cache by name, as states and files name them."""

from .arrays_cache import ArraysCache
from .batch_kv_cache import BatchKVCache
from .batch_rotating_kv_cache import BatchRotatingKVCache
from .cache import AnyCache
from .cache_list import CacheList
from .chunked_kv_cache import ChunkedKVCache
from .concatenate_kv_cache import ConcatenateKVCache
from .kv_cache import KVCache
from .quantized_kv_cache import QuantizedKVCache
from .rotating_kv_cache import RotatingKVCache

KINDS: dict[str, type[AnyCache]] = {
    kind.__name__: kind
    for kind in (
        ArraysCache,
        BatchKVCache,
        BatchRotatingKVCache,
        CacheList,
        ChunkedKVCache,
        ConcatenateKVCache,
        KVCache,
        QuantizedKVCache,
        RotatingKVCache,
    )
}


def kind_named(name: object) -> type[AnyCache]:
    """The class of that name; ValueError naming it and those that are known."""
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"{name!r} is no kind of cache; known are {', '.join(KINDS)}")
    return KINDS[name]
