"""Caches to measure on: numbers once for each shape, and caches that own their buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import mlx.core as mx

from conformance.bench.sizes import Size, pads_of

Make = Callable[[ModuleType, Size], Any]
"""A cache of one layer, of a module's classes, evaluated."""


@lru_cache(maxsize=8)
def numbers(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Numbers about zero, evaluated; the same object for the same shape."""
    made = mx.random.normal(shape, key=mx.random.key(len(shape) + sum(shape))).astype(dtype)
    mx.eval(made)
    return made


def forget_numbers() -> None:
    """Free what `numbers` keeps."""
    numbers.cache_clear()


def columns(size: Size, n: int, rows: int | None = None) -> mx.array:
    """Keys, or values, of n columns: (rows, heads, n, head_size)."""
    return numbers((size.batch if rows is None else rows, size.heads, n, size.head_size), size.type)


def queries(size: Size, n: int) -> mx.array:
    """(batch, query_heads, n, head_size)."""
    return numbers((size.batch, size.query_heads, n, size.head_size), size.type)


def fed(cache: Any, new: mx.array, steps: int = 0) -> Any:
    """The cache after one update and `steps` more of its last column, evaluated.

    It is fed what nothing else holds, as by a model: it may keep the arrays, and write into them later.
    """
    cache.update_and_fetch(new + 0, new + 0)
    mx.eval(arrays_of(cache))
    for _ in range(steps):
        cache.update_and_fetch(new[..., -1:, :], new[..., -1:, :])
        mx.eval(arrays_of(cache))
    return cache


def arrays_of(*caches: Any) -> list[mx.array]:
    """What a step leaves behind: buffers, and the arrays of the bookkeeping that the next step reads."""
    found = (getattr(cache, name, None) for cache in caches for name in ("keys", "values", "offset", "left_padding"))
    return [each for each in found if isinstance(each, mx.array)]


def solo(module: ModuleType, size: Size, tokens: int) -> Any:
    """A solo cache of one row."""
    return fed(module.KVCache(), columns(size, tokens, 1))


def equal(module: ModuleType, size: Size) -> Any:
    """A batch of rows of the same length."""
    return fed(module.BatchKVCache([0] * size.batch), columns(size, size.columns))


def ragged(module: ModuleType, size: Size) -> Any:
    """A batch of rows of different lengths, left-padded."""
    return fed(module.BatchKVCache(pads_of(size.lengths())), columns(size, size.columns))


def wrapped(module: ModuleType, size: Size) -> Any:
    """A batch of rings of rows of the same length, all of `tokens` slots, which have wrapped."""
    return fed(module.BatchRotatingKVCache(size.tokens, [0] * size.batch), columns(size, size.tokens), 2)


def wrapped_ragged(module: ModuleType, size: Size) -> Any:
    """A batch of rings that have wrapped, whose shorter rows still have pads."""
    pads = pads_of(size.lengths())
    return fed(module.BatchRotatingKVCache(size.tokens, pads), columns(size, size.tokens), 2)


def one_row(module: ModuleType, size: Size) -> Any:
    """A batch of one row, a quarter as long, as it is admitted."""
    merged = module.BatchKVCache.merge([solo(module, size, max(1, size.columns // 4))])
    mx.eval(arrays_of(merged))
    return merged


def unfinished(module: ModuleType, size: Size) -> Any:
    """A batch whose rows are right-padded, before finalize()."""
    lengths = size.lengths()
    cache = module.BatchKVCache([0] * size.batch)
    cache.prepare(lengths=lengths, right_padding=pads_of(lengths))
    return fed(cache, columns(size, size.columns))


def layers(make: Make, module: ModuleType, size: Size, count: int | None = None) -> list[Any]:
    """That cache for every layer."""
    return [make(module, size) for _ in range(size.layers if count is None else count)]


@lru_cache(maxsize=1)
def folder() -> TemporaryDirectory[str]:
    """Where files go; it is removed with the process at the latest."""
    return TemporaryDirectory(prefix="bench-")


def file(name: str) -> Path:
    """A path in that folder."""
    return Path(folder().name) / f"{name}.safetensors"


def total(lengths: Sequence[int], size: Size) -> int:
    """Bytes of so many tokens in one layer."""
    return sum(lengths) * size.column_bytes
