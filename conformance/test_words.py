"""Rows that are long enough to be copied as wider elements than they have come out bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import pytest

import mlximpl
from mlximpl.row_copies import copy_rows
from mlximpl.row_plan import Range, RowPlan
from mlximpl.words import WIDE_LEAST

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
def test_rows_of_two_long_buffers_however_they_lie(dtype: mx.Dtype, layout: str) -> None:
    parts = [bits(dtype, 64), bits(dtype, 64, 600)]
    laid = [LAYOUTS[layout](part) for part in parts]
    for first, length in ((0, 600), (1, 599), (5, 1), (300, 300)):
        plan = RowPlan([(Range(1, 2, first, 10, length),), (Range(0, 1, 650, 0, 50), Range(1, 0, first, 50, length))])
        made = copy_rows(laid, plan, 700)
        assert same(made[:1, :, 10 : 10 + length], parts[1][2:, :, first : first + length])
        assert same(made[1:, :, :50], parts[0][1:2, :, 650:])
        assert same(made[1:, :, 50 : 50 + length], parts[1][:1, :, first : first + length])


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
