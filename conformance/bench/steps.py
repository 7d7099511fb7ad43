"""Decodes, prefills, masks and bookkeeping, as mlx-lm's models do them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from conformance.bench import build
from conformance.bench.build import Make, arrays_of, columns, queries
from conformance.bench.measure import Trial
from conformance.bench.sizes import Size

Answer = Callable[[mx.array, Any, mx.array, Any], mx.array]
"""Queries, a cache, the keys (and values) that it is to be fed, and the mask: what the queries get."""


def answering(module: ModuleType, size: Size, own: bool) -> Answer:
    """MLX's attention over a fetch; with `own`, that of a module which has one."""
    scale = size.head_size**-0.5
    own_way = getattr(module, "attention", None) if own else None

    def answer(out: mx.array, cache: Any, new: mx.array, mask: Any) -> mx.array:
        if own_way is not None:
            answered: mx.array = own_way(out, cache, new, new, scale=scale, mask=mask)
            return answered
        keys, values = cache.update_and_fetch(new, new)
        return mx.fast.scaled_dot_product_attention(out, keys, values, scale=scale, mask=mask)

    return answer


def attention(
    module: ModuleType,
    size: Size,
    make: Make,
    n: int,
    steps: int,
    layers: int,
    window: int | None,
    own: bool = False,
) -> Trial:
    """Steps of n tokens through all layers: the first layer's mask for all, each layer's offset read before its update.

    What a layer gives is the next one's queries. With `own`, a module that has an `attention` answers with it.
    """
    new, asked = columns(size, n), queries(size, n)
    answer = answering(module, size, own)

    def work(caches: list[Any]) -> list[Any]:
        for _ in range(steps):
            mask = caches[0].make_mask(n, return_array=False, window_size=window)
            out = asked
            offsets: list[Any] = []
            for cache in caches:
                offsets.append(cache.offset)
                out = answer(out, cache, new, mask)
            mx.eval(out, offsets, arrays_of(*caches))
        return []

    return Trial(lambda: build.layers(make, module, size, layers), work, steps)


def mask_alone(module: ModuleType, size: Size, make: Make, window: int | None) -> Trial:
    """A decode's mask, made and evaluated again and again; None counts as made."""

    def work(caches: list[Any]) -> list[Any]:
        for _ in range(size.masks):
            mask = caches[0].make_mask(1, return_array=False, window_size=window)
            mx.eval([mask] if isinstance(mask, mx.array) else [])
        return []

    return Trial(lambda: build.layers(make, module, size, 1), work, size.masks)


def bookkeeping(module: ModuleType, size: Size, rotating: bool) -> Trial:
    """Decode steps of many layers of tiny arrays without attention: what the host does."""
    shape = (size.batch, 1, 1, 8)
    new = build.numbers(shape, mx.float32)
    steps = 8

    def make(module: ModuleType, size: Size) -> Any:
        pads = [0] * size.batch
        cache = module.BatchRotatingKVCache(8, pads) if rotating else module.BatchKVCache(pads)
        return build.fed(cache, build.numbers((size.batch, 1, 9 if rotating else 8, 8), mx.float32), 2)

    def work(caches: list[Any]) -> list[Any]:
        for _ in range(steps):
            mask = caches[0].make_mask(1, return_array=False, window_size=8 if rotating else None)
            made: list[Any] = [] if mask is None else [mask]
            for cache in caches:
                made += [cache.offset, *cache.update_and_fetch(new, new)]
            mx.eval(made, arrays_of(*caches))
            del made
        return []

    return Trial(lambda: build.layers(make, module, size, size.tiny_layers), work, steps)
