"""A row that is long enough to be copied as wider elements than it has comes out bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

import mlximpl
from mlximpl.extract import WIDE_LEAST, extract_row

ROWS, HEADS, COLUMNS = 3, 2, 700
DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.complex64]


def bits(dtype: mx.Dtype, size: int, columns: int = COLUMNS) -> mx.array:
    """Any bits at all, NaNs of all kinds among them: (ROWS, HEADS, columns, size)."""
    made = mx.random.randint(0, 256, (ROWS, HEADS, columns, size * dtype.size), mx.int32, key=mx.random.key(size))
    return made.astype(mx.uint8).view(dtype)


def same(a: mx.array | None, b: mx.array) -> bool:
    if a is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (mx.contiguous(each).view(mx.uint8) for each in (a, b))
    return bool(mx.array_equal(x, y).item())


@pytest.mark.parametrize("size", [64, 63])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_row_of_a_batch(dtype: mx.Dtype, size: int) -> None:
    keys, values, pads = bits(dtype, size), bits(dtype, 2 * size), [0, 5, 31]
    assert keys[0].nbytes >= WIDE_LEAST
    cache = mlximpl.BatchKVCache(pads)
    cache.update_and_fetch(keys, values)
    for row, pad in enumerate(pads):
        solo = cache.extract(row)
        assert same(solo.keys, keys[row : row + 1, :, pad:]) and same(solo.values, values[row : row + 1, :, pad:])


LAYOUTS: dict[str, Callable[[mx.array], mx.array]] = {
    "contiguous": mx.contiguous,
    "columns before heads": lambda array: mx.contiguous(array.swapaxes(1, 2)).swapaxes(1, 2),
    "every second number": lambda array: mx.contiguous(mx.repeat(array, 2, axis=3))[..., ::2],
    "behind one number": lambda array: mx.concatenate([array.reshape(-1)[:1], array.reshape(-1)])[1:].reshape(
        array.shape
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_row_in_two_parts_however_it_lies(dtype: mx.Dtype, layout: str) -> None:
    parts = [bits(dtype, 64), bits(dtype, 64, 600)]
    whole = mx.concatenate(parts, axis=2)
    laid = [LAYOUTS[layout](part) for part in parts]
    for start, stop in ((0, 1300), (1, 1299), (0, 700), (700, 1300), (650, 720), (710, 710)):
        assert same(extract_row(laid, 1, start, stop), whole[1:2, :, start:stop])


def test_a_long_row_does_not_keep_the_batch_in_memory() -> None:
    keys = bits(mx.float32, 64)
    mx.eval(keys)
    if mx.get_active_memory() == 0:
        pytest.skip("this build of MLX does not count its memory")
    cache = mlximpl.BatchKVCache([0] * ROWS)
    cache.update_and_fetch(keys + 0, keys + 0)
    mx.eval(cache.state)
    before = mx.get_active_memory()
    solo = cache.extract(1)
    mx.eval(solo.keys, solo.values)
    del cache
    assert before - mx.get_active_memory() >= (ROWS - 1) * 2 * keys[0].nbytes
