"""Attention over a cache, by whichever way is fastest for its padding on this device.

An array mask leaves the fused kernels of CUDA. One query a row is then answered by two matrix products, and the queries
of a prefill row by row, each with the tokens that are its own and a causal mask:

    a  [ .  . a0 a1 a2]    queries a1 a2  ->  over [a0 a1 a2], causal
    b  [b0 b1 b2 b3 b4]    queries b3 b4  ->  over [b0 b1 b2 b3 b4], causal
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .batch_kv_cache import BatchKVCache
from .cache import Cache
from .device import on_cuda
from .kv_cache import KVCache
from .masks import Mask
from .quantized_kv_cache import QuantizedKVCache

MAKE = "make"


def attention(
    queries: mx.array,
    cache: Any,
    keys: mx.array,
    values: mx.array,
    *,
    scale: float,
    mask: Mask = MAKE,
    window_size: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Update a cache with N columns, and let their queries attend to what they may see.

    It equals masked attention over `cache.update_and_fetch(keys, values)` within the dtype's precision; what a pad's
    query gets is of no meaning.

    Args:
        queries: (B, Hq, N, D), Hq a multiple of the cache's heads.
        cache: KVCache, RotatingKVCache, ConcatenateKVCache, a batch of these, or QuantizedKVCache.
        keys: (B, H, N, D), rotated already.
        values: (B, H, N, Dv).
        scale: what scores are multiplied by.
        mask: what `cache.make_mask(N, window_size=window_size)` gave for this step, on this cache or on another layer's
            that stands alike, and no other mask; made here if it is not given.
        window_size: how many newest tokens a query may see, itself included; None for all that the cache shows.
        sinks: (Hq,), scores of a key without a value that every query sees, as gpt_oss has them.

    Returns:
        (B, Hq, N, Dv).

    Raises:
        ValueError: queries, sinks or a mask that do not fit; a cache of another kind; what `make_mask` and
            `update_and_fetch` refuse. The cache is as it was then.
    """
    _check(queries, cache, keys, mask, sinks)
    n = queries.shape[2]
    if isinstance(mask, str) and mask == MAKE:
        mask = cache.make_mask(n, window_size=window_size)
    pads = _left_pads(cache, n, window_size) if n > 1 else None
    cuda = on_cuda()
    keys, values = cache.update_and_fetch(keys, values)
    if isinstance(cache, QuantizedKVCache):
        quantization = cache.group_size, cache.bits
        if not cuda:
            return _by_products(queries, keys, values, mask, sinks, scale=scale, quantization=quantization)
        # MLX has no quantized product of a few rows there.
        keys, values = _dequantized(keys, quantization), _dequantized(values, quantization)
    if cuda and isinstance(mask, mx.array):
        if n == 1:
            return _by_products(queries, *_whole(cache, keys, values, mask), sinks, scale=scale)
        if pads is not None:
            return _by_rows(queries, keys, values, scale, sinks, pads)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _check(queries: mx.array, cache: Any, keys: mx.array, mask: Mask, sinks: mx.array | None) -> None:
    """Refuse before the update what could only fail after it."""
    if not isinstance(cache, (Cache, QuantizedKVCache)) or not hasattr(cache, "make_mask"):
        raise ValueError(f"attention over a {type(cache).__name__}, which makes no mask of keys and values")
    if queries.ndim != 4 or keys.ndim != 4:
        raise ValueError(f"queries {queries.shape} and keys {keys.shape} must be (B, heads, N, D)")
    rows, heads, n, size = queries.shape
    if (rows, n, size) != (keys.shape[0], keys.shape[2], keys.shape[3]) or heads % max(1, keys.shape[1]):
        raise ValueError(f"queries {queries.shape} do not go with keys {keys.shape}")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks {sinks.shape} for {heads} query heads")
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        raise ValueError(f"a mask of {mask.dtype}, but make_mask gives booleans")
    if isinstance(mask, str) and mask not in (MAKE, "causal"):
        raise ValueError(f'mask {mask!r}, but it is "causal" or an array')


def _left_pads(cache: Any, n: int, window_size: int | None) -> tuple[int, ...] | None:
    """Each row's left pads where those are all that a causal mask of n queries lacks, else None."""
    if not isinstance(cache, BatchKVCache) or window_size is not None:
        return None
    pads = cache._pads
    return pads if all(p < cache._columns() + n for p in pads) else None


def _whole(cache: Any, keys: mx.array, values: mx.array, mask: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """The buffers with their spare columns, which the mask then hides: a product of slices would copy them first."""
    if not isinstance(cache, (KVCache, BatchKVCache)) or cache.keys is None or cache.values is None:
        return keys, values, mask
    spare = cache.keys.shape[2] - keys.shape[2]
    if not 0 < spare <= max(cache.step, keys.shape[2] // 4):
        return keys, values, mask
    return cache.keys, cache.values, _widened(mask, spare)


_latest: list[tuple[mx.array, mx.array]] = []
"""The mask that was widened last, and what came of it: the layers of a step share their mask."""


def _widened(mask: mx.array, spare: int) -> mx.array:
    """The mask with `spare` columns more, which it hides."""
    for known, widened in _latest:
        if known is mask and widened.shape[-1] == mask.shape[-1] + spare:
            return widened
    hidden = mx.zeros((*mask.shape[:-1], spare), mx.bool_)
    widened = mx.concatenate([mask, hidden], axis=-1)
    _latest[:] = [(mask, widened)]
    return widened


def _dequantized(parts: Any, quantization: tuple[int, int]) -> mx.array:
    words, scales, biases = parts
    group_size, bits = quantization
    return mx.dequantize(words, scales, biases, group_size=group_size, bits=bits)


def _by_rows(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None,
    pads: tuple[int, ...],
) -> mx.array:
    """Causal attention of each run of rows with the same left pads, without them."""
    n, width = queries.shape[2], keys.shape[2]
    parts = []
    for start, stop in runs_of_equals(pads):
        # Where queries are pads themselves, their own columns stay: no kernel takes more queries than keys.
        first = min(pads[start], width - n)
        mask: Mask = "causal"
        if first < pads[start]:
            columns = mx.arange(first, width)
            mask = (columns >= pads[start]) & (columns <= mx.arange(width - n, width)[:, None])
        parts.append(
            mx.fast.scaled_dot_product_attention(
                queries[start:stop],
                keys[start:stop, :, first:, :],
                values[start:stop, :, first:, :],
                scale=scale,
                mask=mask,
                sinks=sinks,
            )
        )
    return mx.concatenate(parts) if len(parts) > 1 else parts[0]


def runs_of_equals(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a list into runs (start, stop) of one number.

    >>> runs_of_equals([3, 3, 0, 3])
    [(0, 2), (2, 3), (3, 4)]
    """
    starts = [i for i, number in enumerate(numbers) if i == 0 or numbers[i - 1] != number]
    return list(zip(starts, [*starts[1:], len(numbers)], strict=True))


def _by_products(
    queries: mx.array,
    keys: Any,
    values: Any,
    mask: Mask,
    sinks: mx.array | None,
    *,
    scale: float,
    quantization: tuple[int, int] | None = None,
) -> mx.array:
    """Two matrix products with a softmax between, heads in groups: softmax(scale * q k^T) v."""
    rows, query_heads, n, size = queries.shape
    heads = (keys if quantization is None else keys[0]).shape[1]
    share = query_heads // heads
    grouped = (queries * scale).reshape(rows, heads, share * n, size)
    scores = _product(grouped, keys, True, quantization)
    if n > 1:
        scores = scores.reshape(rows, heads, share, n, -1)
        if isinstance(mask, mx.array) and mask.ndim == 4:
            mask = mask[:, :, None]
    if isinstance(mask, str):
        width = scores.shape[-1]
        mask = mx.arange(width) <= mx.arange(width - n, width)[:, None]
    if mask is not None:
        scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    if sinks is not None:
        shape = (1, heads, share) if n == 1 else (1, heads, share, 1)
        first = mx.broadcast_to(sinks.astype(scores.dtype).reshape(*shape, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([first, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    if sinks is not None:
        weights = weights[..., 1:]
    if n > 1:
        weights = weights.reshape(rows, heads, share * n, -1)
    return _product(weights, values, False, quantization).reshape(rows, query_heads, n, -1)


def _product(x: mx.array, held: Any, transpose: bool, quantization: tuple[int, int] | None) -> mx.array:
    """x (B, H, M, K) by keys (transposed) or values of the same heads."""
    if quantization is None:
        other: mx.array = held.swapaxes(-1, -2) if transpose else held
        return x @ other
    group_size, bits = quantization
    words, scales, biases = held
    return mx.quantized_matmul(x, words, scales, biases, transpose=transpose, group_size=group_size, bits=bits)
