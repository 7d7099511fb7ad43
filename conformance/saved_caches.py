"""Caches of every kind to be saved, and what a saved one is held to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlximpl
from mlximpl.safetensors_header import with_seal
from mlximpl.state_tree import flatten

Cache = Any
Made = Callable[[], Cache]
WAYS: list[dict[str, bool]] = [{}, {"mmap": True}, {"mmap": True, "verify": True}]
LAYOUTS = [False, True]


def columns(n: int, rows: int = 1, heads: int = 2, size: int = 32, dtype: mx.Dtype = mx.float32) -> Any:
    """Keys and values (rows, heads, n, size) of random numbers."""
    return [mx.random.normal((rows, heads, n, size)).astype(dtype) for _ in range(2)]


def fed(cache: Cache, *steps: int, rows: int = 1, **how: Any) -> Cache:
    """Feed so many columns at a time; a negative number trims."""
    for n in steps:
        if n < 0:
            cache.trim(-n)
        else:
            cache.update_and_fetch(*columns(n, rows, **how))
    return cache


def pending(cache: Cache, *steps: int) -> Cache:
    """A batch of two in a ragged prefill of four and two columns."""
    cache.prepare(lengths=[4, 2], right_padding=[0, 2])
    return fed(cache, *steps, rows=2)


def slid() -> Cache:
    cache = mlximpl.ChunkedKVCache(8)
    for _ in range(4):
        cache.maybe_trim_front()
        fed(cache, 5)
    return cache


def arrays(*slots: mx.array | None, **how: Any) -> Cache:
    cache = mlximpl.ArraysCache(len(slots), **how)
    for i, slot in enumerate(slots):
        cache[i] = slot
    return cache


SITUATIONS: dict[str, Made] = {
    "empty": mlximpl.KVCache,
    "growing": lambda: fed(mlximpl.KVCache(), 5, 1),
    "growing bfloat16": lambda: fed(mlximpl.KVCache(), 5, dtype=mx.bfloat16),
    "growing, two rows": lambda: fed(mlximpl.KVCache(), 5, rows=2),
    "growing, long": lambda: fed(mlximpl.KVCache(), 700, dtype=mx.float16, size=129),
    "trimmed": lambda: fed(mlximpl.KVCache(), 9, -4),
    "trimmed to nothing": lambda: fed(mlximpl.KVCache(), 9, -9),
    "ring, empty": lambda: mlximpl.RotatingKVCache(8, keep=2),
    "ring": lambda: fed(mlximpl.RotatingKVCache(8, keep=2), 5),
    "ring, after several tokens": lambda: fed(mlximpl.RotatingKVCache(8, keep=2), 6, 7),
    "ring, wrapped": lambda: fed(mlximpl.RotatingKVCache(8, keep=2), 6, *[1] * 7),
    "ring, wrapped and trimmed": lambda: fed(mlximpl.RotatingKVCache(8), 10, 1, 1, -1),
    "ring, a chunk taken back": lambda: fed(mlximpl.RotatingKVCache(8, keep=2), 10, 5, -5),
    "ring, trimmed behind its sinks": lambda: fed(mlximpl.RotatingKVCache(8, keep=2), 12, 1, -11),
    "batch, empty": lambda: mlximpl.BatchKVCache([0, 3]),
    "batch, pads due": lambda: fed(mlximpl.BatchKVCache([0, 3]), 2, rows=2),
    "batch": lambda: fed(mlximpl.BatchKVCache([0, 3]), 5, 1, rows=2),
    "batch, pending": lambda: pending(mlximpl.BatchKVCache([0, 1]), 3),
    "batch, announced": lambda: pending(mlximpl.BatchKVCache([0, 0])),
    "batch of rings, empty": lambda: mlximpl.BatchRotatingKVCache(4, [0, 2]),
    "batch of rings": lambda: fed(mlximpl.BatchRotatingKVCache(4, [0, 2]), 3, rows=2),
    "batch of rings, wrapped": lambda: fed(mlximpl.BatchRotatingKVCache(4, [0, 2]), 3, 1, 1, 1, rows=2),
    "batch of rings, pending": lambda: pending(fed(mlximpl.BatchRotatingKVCache(4, [0, 1]), 6, rows=2), 3),
    "batch with sinks, empty": lambda: mlximpl.BatchRotatingKVCache(6, [0, 3], keep=2),
    "batch with sinks": lambda: fed(mlximpl.BatchRotatingKVCache(6, [0, 3], keep=2), 4, rows=2),
    "batch with sinks, wrapped": lambda: fed(mlximpl.BatchRotatingKVCache(6, [0, 3], keep=2), 4, *[1] * 7, rows=2),
    "batch with sinks, trimmed": lambda: fed(mlximpl.BatchRotatingKVCache(6, [0, 3], keep=2), 6, -2, rows=2),
    "batch with sinks, pending": lambda: pending(fed(mlximpl.BatchRotatingKVCache(6, [0, 1], keep=2), 3, rows=2), 3),
    "quantized, empty": lambda: mlximpl.QuantizedKVCache(32, 4),
    "quantized": lambda: fed(mlximpl.QuantizedKVCache(32, 4), 7, -2),
    "chunked, empty": lambda: mlximpl.ChunkedKVCache(8),
    "chunked": lambda: fed(mlximpl.ChunkedKVCache(8), 5),
    "chunked, slid": slid,
    "concatenated, empty": mlximpl.ConcatenateKVCache,
    "concatenated": lambda: fed(mlximpl.ConcatenateKVCache(), 5, 2, -1),
    "arrays, unfilled": lambda: arrays(None, mx.ones((1, 3))),
    "arrays, no slots": arrays,
    "arrays, pads due": lambda: arrays(mx.ones((2, 3), mx.float16), None, left_padding=[1, 0]),
    "list": lambda: mlximpl.CacheList(arrays(mx.ones((1, 2))), fed(mlximpl.KVCache(), 3)),
    "list of nothing": mlximpl.CacheList,
    "list of lists": lambda: mlximpl.CacheList(mlximpl.CacheList(fed(mlximpl.KVCache(), 2)), mlximpl.KVCache()),
}
DECODE = [name for name in SITUATIONS if "arrays" not in name and "list" not in name]


def same(a: object, b: object) -> bool:
    """Whether two trees have the same leaves, of the same types and dtypes, bit for bit."""
    ours, theirs = dict(flatten(a)), dict(flatten(b))
    return ours.keys() == theirs.keys() and all(_same_leaf(ours[path], theirs[path]) for path in ours)


def _same_leaf(a: object, b: object) -> bool:
    if isinstance(a, mx.array) and isinstance(b, mx.array):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return a.size == 0 or bool(mx.array_equal(a.reshape(-1).view(mx.uint8), b.reshape(-1).view(mx.uint8)).item())
    return type(a) is type(b) and a == b


def saved(cache: Cache) -> Any:
    """The state that a file has."""
    if isinstance(cache, mlximpl.CacheList):
        return [(saved(child), type(child).__name__) for child in cache.caches]
    return cache._saved_state()


BATCHES = (mlximpl.BatchKVCache, mlximpl.BatchRotatingKVCache)


def rows_of(cache: Cache) -> int:
    if isinstance(cache, BATCHES):
        return len(cache.left_padding)
    keys = cache.keys[0] if isinstance(cache, mlximpl.QuantizedKVCache) and cache.keys is not None else cache.keys
    return 1 if keys is None else keys.shape[0]


def next_columns(cache: Cache) -> Any:
    """A token a row that the cache takes."""
    if cache.keys is None or not isinstance(cache.keys, mx.array):
        return columns(1, rows_of(cache))
    return columns(1, rows_of(cache), cache.keys.shape[1], cache.keys.shape[3], cache.keys.dtype)


def decode(cache: Cache, steps: int, seed: int = 0) -> list[Any]:
    """Feed single tokens, and give what each step's query sees: the mask and the fetch, pads as zeros."""
    mx.random.seed(seed)
    seen = []
    for _ in range(steps):
        mask = cache.make_mask(1) if hasattr(cache, "make_mask") else None
        fetch = cache.update_and_fetch(*next_columns(cache))
        if isinstance(cache, BATCHES) and (mask is None or cache._pending is not None):
            fetch = saved(cache)[:2]  # whatever is hidden then is a pad
        elif isinstance(mask, mx.array) and mask.ndim == 4:
            fetch = [mx.where(mask.reshape(mask.shape[0], 1, -1, 1), part, 0) for part in fetch]
        seen.append([mask, list(fetch)])
    mx.eval([leaf for _, leaf in flatten(seen) if isinstance(leaf, mx.array)])
    return seen


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """A file's header and data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def join(path: Path, header: object, data: bytes) -> None:
    """Write a file of this header, which is JSON or bytes, sealed where it has a place for that."""
    raw = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    if raw.startswith(b'{"__metadata__":{"2.0":"{\\"seal\\":'):
        raw = with_seal(raw)
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


METADATA = {
    "plain": "value",
    "": "no key",
    ".": "dots",
    "a.b": "more dots",
    "0": "a number",
    "-1": "another",
    " 7 ": "a number to Python",
    "1_0": "this too",
    "\u0663": "and this",
    "01": "and this",
    "2.0": "facts?",
    "padding.0": "padding?",
    "__metadata__": "metadata?",
    "\0": "\0\0",
    'quotes " and \\ strokes': '\\"\\\\" \\u0041',
    "line\nfeed\t": "\r\n\x1f\x7f",
    "\u00fc\u4e2d\U0001f600": "\U0001f600\u0301\ufeff\uffff",
    "half \ud800": "half \udfff\ud800",
    "\udc00\ud83d": "\ud83d\ude00 the wrong way round",
    "empty": "",
    "long": "x" * 100_000,
    "json": json.dumps({"a": [1, {"b": None}]}),
}
"""Strings by name that are hard on JSON, on safetensors or on mlx-lm's loader."""
