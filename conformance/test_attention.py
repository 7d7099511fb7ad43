"""`mlximpl.attention`: every way to it equals a softmax over what the mask shows."""

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from conformance.adapters.surface import set_device
from mlximpl import (
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
from mlximpl import attention as exported
from mlximpl.attention import _by_products, _by_rows, _dequantized, _whole

set_device()

HEADS, QUERY_HEADS, SIZE, SCALE = 2, 6, 32, 0.3

MAKES: dict[str, Callable[[], Any]] = {
    "KVCache": KVCache,
    "ConcatenateKVCache": ConcatenateKVCache,
    "RotatingKVCache": lambda: RotatingKVCache(6, keep=2),
    "BatchKVCache": lambda: BatchKVCache([0, 3, 3, 1]),
    "BatchKVCache, equal rows": lambda: BatchKVCache([0, 0]),
    "BatchRotatingKVCache": lambda: BatchRotatingKVCache(6, [0, 3, 1]),
    "BatchRotatingKVCache, sinks": lambda: BatchRotatingKVCache(6, [0, 3, 1], keep=2),
    "QuantizedKVCache": lambda: QuantizedKVCache(32, 8),
}
SINKS = mx.array([-1.0, 0.5, 2.0, 0.0, 1.0, -0.5])


def rows_of(cache: Any) -> int:
    return len(cache.left_padding) if hasattr(cache, "left_padding") else 2


def drawn(cache: Any, n: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys, values of n columns."""
    rows = rows_of(cache)
    return (
        mx.random.normal((rows, QUERY_HEADS, n, SIZE)),
        mx.random.normal((rows, HEADS, n, SIZE)),
        mx.random.normal((rows, HEADS, n, SIZE)),
    )


def softmax_over_what_is_seen(cache: Any, new: Any, sinks: mx.array | None, window: int | None) -> mx.array:
    """The plain formula, on a copy of the cache."""
    queries, keys, values = new
    cache = copy.deepcopy(cache)
    n = queries.shape[2]
    mask = cache.make_mask(n, window_size=window, return_array=True)
    held = cache.update_and_fetch(keys, values)
    if isinstance(cache, QuantizedKVCache):
        dequantize: Any = mx.dequantize
        held = tuple(dequantize(*parts, group_size=cache.group_size, bits=cache.bits) for parts in held)
    keys, values = (mx.repeat(each, QUERY_HEADS // HEADS, axis=1) for each in held)
    scores = mx.where(mask, SCALE * queries @ keys.swapaxes(-1, -2), -mx.inf)
    weights = mx.exp(scores)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sinks)[:, None, None]
    return (weights / total) @ values


def tokens(cache: Any, n: int) -> Any:
    """Which of the next n columns are tokens, (B, n)."""
    offset: Any = cache.offset
    starts: Any = offset.tolist() if isinstance(offset, mx.array) else [offset] * rows_of(cache)
    return [[start + i >= 0 for i in range(n)] for start in starts]


def close(got: mx.array, expected: mx.array, real: Any) -> bool:
    shown = mx.array(real)[:, None, :, None]
    return bool(mx.allclose(mx.where(shown, got, 0), mx.where(shown, expected, 0), atol=1e-5).item())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("name", MAKES)
def test_it_equals_the_plain_formula(name: str, sinks: mx.array | None, window: int | None) -> None:
    cache = MAKES[name]()
    for n in (5, 1, 1, 2, 1, 7, 1):
        new = drawn(cache, n)
        expected, real = softmax_over_what_is_seen(cache, new, sinks, window), tokens(cache, n)
        got = exported(new[0], cache, *new[1:], scale=SCALE, window_size=window, sinks=sinks)
        assert close(got, expected, real)
        assert not mx.isnan(got).any()


def test_a_mask_that_was_made_before_is_taken() -> None:
    layers = [BatchKVCache([0, 2]) for _ in range(2)]
    new = drawn(layers[0], 3)
    mask = layers[0].make_mask(3)
    for cache in layers:
        expected, real = softmax_over_what_is_seen(cache, new, None, None), tokens(cache, 3)
        assert close(exported(new[0], cache, *new[1:], scale=SCALE, mask=mask), expected, real)
    hidden = mx.zeros((2, 1, 1, 4), mx.bool_) | (mx.arange(4) == 2)
    queries, keys, values = (x[..., :1, :] for x in new)
    only = exported(queries, layers[0], keys, values, scale=SCALE, mask=hidden)
    assert mx.allclose(only[0, 0, 0], layers[0].keys_and_values()[1][0, 0, 2], atol=1e-6)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("name", ["BatchKVCache", "BatchRotatingKVCache", "RotatingKVCache"])
def test_by_products(name: str, sinks: mx.array | None, n: int) -> None:
    cache = MAKES[name]()
    cache.update_and_fetch(*drawn(cache, 7)[1:])
    new = drawn(cache, n)
    expected, real = softmax_over_what_is_seen(cache, new, sinks, None), tokens(cache, n)
    mask = cache.make_mask(n)
    keys, values = cache.update_and_fetch(*new[1:])
    assert close(_by_products(new[0], keys, values, mask, sinks, scale=SCALE), expected, real)


@pytest.mark.parametrize("name", ["BatchKVCache", "KVCache", "BatchRotatingKVCache"])
def test_whole_buffers_with_their_spare_columns_hidden(name: str) -> None:
    cache = MAKES[name]()
    cache.update_and_fetch(*drawn(cache, 7)[1:])
    new = drawn(cache, 1)
    expected, real = softmax_over_what_is_seen(cache, new, None, None), tokens(cache, 1)
    mask = cache.make_mask(1, return_array=True)
    fetched_keys, fetched_values = cache.update_and_fetch(*new[1:])
    keys, values, shown = _whole(cache, fetched_keys, fetched_values, mask)
    assert keys.shape[2] == shown.shape[-1] == (256 if "Rotating" not in name else fetched_keys.shape[2])
    assert close(_by_products(new[0], keys, values, shown, None, scale=SCALE), expected, real)


def test_quantized_parts_back_to_numbers() -> None:
    x = mx.random.normal((1, 2, 3, 64))
    assert mx.allclose(_dequantized(mx.quantize(x, group_size=32, bits=8), (32, 8)), x, atol=0.02)


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("fed", [0, 2, 6])
@pytest.mark.parametrize("n", [4, 5])
def test_by_rows(n: int, fed: int, sinks: mx.array | None) -> None:
    cache = BatchKVCache([0, 3, 3, 1])
    if fed:
        cache.update_and_fetch(*drawn(cache, fed)[1:])
    new = drawn(cache, n)
    expected, real = softmax_over_what_is_seen(cache, new, sinks, None), tokens(cache, n)
    pads = cache._pads
    keys, values = cache.update_and_fetch(*new[1:])
    assert close(_by_rows(new[0], keys, values, SCALE, sinks, pads), expected, real)


@pytest.mark.parametrize("name", MAKES)
def test_what_does_not_fit_leaves_the_cache_as_it_was(name: str) -> None:
    cache = MAKES[name]()
    queries, keys, values = drawn(cache, 2)
    exported(queries, cache, keys, values, scale=SCALE)
    size = cache.size()
    for asked, fed, options, words in (
        (queries[:, :5], keys, {}, r"queries .* do not go with keys"),
        (queries[:1], keys, {}, r"queries .* do not go with keys"),
        (queries[..., :1, :], keys, {}, r"queries .* do not go with keys"),
        (queries[0], keys, {}, r"must be \(B, heads, N, D\)"),
        (queries, keys[:, :1], {}, r"heads|keys"),
        (queries, keys, {"sinks": SINKS[:3]}, r"sinks \(3,\) for 6 query heads"),
        (queries, keys, {"mask": "causl"}, r"mask 'causl'"),
        (queries, keys, {"mask": mx.zeros((2, 4))}, r"a mask of .*float32"),
        (queries, keys, {"window_size": 0}, r"window_size"),
    ):
        with pytest.raises(ValueError, match=words):
            exported(asked, cache, fed, values, scale=SCALE, **options)
        assert cache.size() == size


@pytest.mark.parametrize("cache", [ChunkedKVCache(4), ArraysCache(1), CacheList(KVCache())])
def test_kinds_that_it_does_not_serve(cache: Any) -> None:
    x = mx.zeros((1, 2, 1, 8))
    with pytest.raises(ValueError, match=f"attention over a {type(cache).__name__}"):
        exported(x, cache, x, x, scale=1.0)
