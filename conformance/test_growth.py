"""How caches grow is a setting that changes memory and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import mlximpl
from conformance.adapters.surface import set_device

MAKES: dict[str, Callable[[], Any]] = {
    "KVCache": mlximpl.KVCache,
    "QuantizedKVCache": lambda: mlximpl.QuantizedKVCache(32, 8),
    "BatchKVCache": lambda: mlximpl.BatchKVCache([0, 2]),
}


@pytest.fixture(autouse=True)
def device() -> None:
    set_device()


def token(cache: Any, number: int, n: int = 1) -> mx.array:
    rows = 2 if isinstance(cache, mlximpl.BatchKVCache) else 1
    return mx.random.normal((rows, 1, n, 32), key=mx.random.key(number))


def leaves(fetch: Any) -> list[mx.array]:
    return [fetch] if isinstance(fetch, mx.array) else [leaf for part in fetch for leaf in leaves(part)]


def width(cache: Any) -> int:
    return int(leaves(cache.keys)[0].shape[2])


@pytest.mark.parametrize("name", MAKES)
def test_growth_in_proportion_changes_no_fetch(name: str) -> None:
    plain, grown = MAKES[name](), MAKES[name]()
    grown.step, grown.column_growth, grown.column_growth_most = 4, 0.5, 6
    widths = []
    for number in range(40):
        new = token(plain, number)
        for a, b in zip(*(leaves(cache.update_and_fetch(new, -new)) for cache in (plain, grown)), strict=True):
            assert mx.array_equal(a, b)
        widths.append(width(grown))
    assert sorted(set(widths)) == [4, 8, 16, 24, 32, 40]
    assert width(plain) == 256


@pytest.mark.parametrize("name", MAKES)
def test_a_step_of_a_class_is_a_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(MAKES[name]()), "step", 16)
    cache = MAKES[name]()
    cache.update_and_fetch(token(cache, 0, 5), token(cache, 1, 5))
    assert width(cache) == 16


@pytest.mark.parametrize("part", [-0.5, float("inf"), float("nan")])
@pytest.mark.parametrize("name", MAKES)
def test_growth_that_is_none_is_refused(name: str, part: float) -> None:
    cache = MAKES[name]()
    cache.step = 4
    cache.update_and_fetch(token(cache, 0, 4), token(cache, 1, 4))
    before = [leaf.tolist() for leaf in leaves(cache.keys_and_values())]
    cache.column_growth = part
    with pytest.raises(ValueError, match=f"column_growth must be a number from 0 on, but is {part}"):
        cache.update_and_fetch(token(cache, 2), token(cache, 3))
    cache.step, cache.column_growth = 0, 0.0
    with pytest.raises(ValueError, match="step must be at least 1, but is 0"):
        cache.update_and_fetch(token(cache, 2), token(cache, 3))
    assert [leaf.tolist() for leaf in leaves(cache.keys_and_values())] == before and cache.size() == 4


@pytest.mark.parametrize("ring", [False, True])
def test_rows_that_join_twice_get_spare_rows_unless_there_are_to_be_none(ring: bool) -> None:
    def batch(rows: int) -> Any:
        pads = list(range(rows))
        cache: Any = mlximpl.BatchRotatingKVCache(16, pads) if ring else mlximpl.BatchKVCache(pads)
        new = mx.random.normal((rows, 1, 8, 32), key=mx.random.key(rows))
        cache.update_and_fetch(new, new)
        return cache

    def allocated(cache: Any) -> int:
        return int(cache._buffers()[0].shape[0])

    cache, none = batch(4), batch(4)
    none.row_growth = 0
    for each in (cache, none):
        each.extend(batch(1))
        assert allocated(each) == 5
        each.extend(batch(1))
    spare = 0 if ring and mx.cuda.is_available() and mx.default_device() != mx.cpu else 1
    assert (allocated(cache), allocated(none)) == (6 + spare, 6)
    assert cache.keys.shape == none.keys.shape == (6, 1, width(cache), 32)
    assert cache.nbytes == (6 + spare) * none.nbytes // 6
    for a, b in zip(cache.state, none.state, strict=True):
        assert mx.array_equal(a, b) if isinstance(a, mx.array) else a == b
    leaving = copy.copy(cache)
    leaving.filter([0, 2, 3, 4, 5])
    assert allocated(leaving) == 5 + spare
    leaving.filter([0, 2, 3, 4])  # rows leave and none comes: there is nothing to keep room for
    assert allocated(leaving) == 4
    leaving.extend(batch(1))
    assert allocated(leaving) == 5 + spare
    cache.row_growth = -1
    changes: list[Callable[[], None]] = [lambda: cache.extend(batch(2)), lambda: cache.filter([0, 1])]
    for change in changes:
        if spare:
            with pytest.raises(ValueError, match="row_growth must be a number from 0 on, but is -1"):
                change()
    if spare:
        assert mx.array_equal(cache.offset, none.offset) and mx.array_equal(cache.keys, none.keys)
