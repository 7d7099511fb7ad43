"""The surface that mlx-lm's models and generators hold mlximpl's caches to, by example."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlximpl
from mlximpl import BatchKVCache, BatchRotatingKVCache, ChunkedKVCache, KVCache, RotatingKVCache

Cache = Any  # the four share no annotated base that says all of what is asked here
Make = Callable[[], Cache]

SOLO: list[Make] = [KVCache, lambda: RotatingKVCache(4), lambda: RotatingKVCache(8, keep=2)]
WITHOUT_SINKS: list[Make] = [lambda: BatchKVCache([0, 1]), lambda: BatchRotatingKVCache(4, [0, 1])]
BATCH: list[Make] = [*WITHOUT_SINKS, lambda: BatchRotatingKVCache(6, [0, 1], keep=2)]
ALL = SOLO + BATCH
FOUR = (mx.ones((1, 1, 4, 3)),) * 2

_token = itertools.count(1)


def row_count(cache: Cache) -> int:
    return len(cache.left_padding) if isinstance(cache, (BatchKVCache, BatchRotatingKVCache)) else 1


def update(cache: Cache, n: int, rows: int | None = None) -> Any:
    """Feed n columns of two heads, sizes 3 and 2, that all differ."""
    b = row_count(cache) if rows is None else rows
    first = next(_token) * 1000
    keys = first + mx.arange(b * 2 * n * 3, dtype=mx.float32).reshape(b, 2, n, 3)
    return cache.update_and_fetch(keys, -keys[..., :2])


def feed(cache: Cache, *ns: int) -> Cache:
    for n in ns:
        update(cache, n)
    return cache


def ints(array: mx.array) -> Any:
    return array.tolist()


def fields(cache: Cache) -> dict[str, object]:
    """Every attribute as it is: by the very object and by value."""
    return {
        name: (id(value), value.tolist() if isinstance(value, mx.array) else repr(value))
        for name, value in vars(cache).items()
    }


def refused(cache: Cache, call: Callable[[], object], error: type[Exception], words: str) -> None:
    before = fields(cache)
    with pytest.raises(error, match=words):
        call()
    assert fields(cache) == before


def same(a: Cache, b: Cache, rounds: tuple[int, ...] = (1, 3, 1, 1, 1, 2)) -> None:
    """Two caches answer alike from here on."""
    for n in rounds:
        assert str(a.offset) == str(b.offset)
        assert (a.size(), a.empty(), a.trim_limit()) == (b.size(), b.empty(), b.trim_limit())
        masks = [c.make_mask(n, return_array=True) for c in (a, b)]
        assert mx.array_equal(masks[0], masks[1])
        keys = mx.random.normal((row_count(a), 2, n, 3))
        fetched = [c.update_and_fetch(keys, keys[..., :2]) for c in (a, b)]
        assert mx.array_equal(fetched[0][0], fetched[1][0])
        assert mx.array_equal(fetched[0][1], fetched[1][1])


# --- what every cache has ------------------------------------------------------------------------


@pytest.mark.parametrize("make", ALL)
def test_an_empty_cache_answers_everything(make: Make) -> None:
    cache = make()
    assert bool(cache)
    assert not hasattr(cache, "__len__")
    assert cache.empty()
    assert (cache.size(), cache.nbytes, cache.trim_limit(), cache.trim(0)) == (0, 0, 0, 0)
    assert cache.is_trimmable()
    assert cache.step == type(cache).step == 256
    assert cache.keys is None
    assert cache.values is None
    assert type(cache).__name__ in repr(cache)
    assert len(repr(cache)) < 80
    assert not hasattr(cache, "bits")
    with pytest.raises(ValueError, match="no update"):
        cache.keys_and_values()
    same(make(), type(cache).from_state(cache.state))


@pytest.mark.parametrize("make", ALL)
def test_the_fetch_and_the_fetch_again(make: Make) -> None:
    cache = make()
    for n in (3, 1, 1, 1, 6, 1, 1):
        keys, values = update(cache, n)
        assert keys.shape[3] == 3
        assert values.shape == (*keys.shape[:3], 2)
        again = cache.keys_and_values()
        assert mx.array_equal(keys, again[0])
        assert mx.array_equal(values, again[1])
    assert not cache.empty()
    assert cache.nbytes > 0


def test_offsets_have_mlx_lms_types() -> None:
    assert feed(KVCache(), 3).offset == 3
    assert feed(RotatingKVCache(2), 3, 1).offset == 4
    for cache in (BatchKVCache([0, 2]), BatchRotatingKVCache(2, [0, 2])):
        assert ints(cache.offset) == [0, -2]
        feed(cache, 3, 1)
        assert ints(cache.offset) == [4, 2]
        assert cache.offset.dtype == cache.left_padding.dtype == mx.int32
        assert cache.offset.shape == (2,)


def test_max_size_and_keep() -> None:
    ring = RotatingKVCache(max_size=8, keep=2)
    assert (ring.max_size, ring.keep) == (8, 2)
    assert BatchRotatingKVCache(8, [0]).max_size == 8


@pytest.mark.parametrize("make", SOLO + WITHOUT_SINKS)
def test_models_assign_keys_and_values(make: Make) -> None:
    cache = feed(make(), 2)
    cache.keys = mx.depends(cache.keys, mx.ones(1))
    cache.values = mx.zeros_like(cache.values)
    keys, values = update(cache, 1)
    assert not values[..., :2, :].any().item()
    assert keys.shape[2] == 3


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("name", ["keys", "values"])
def test_one_buffer_that_is_assigned_without_its_spare_columns(name: str, make: Make) -> None:
    cache = feed(make(), 3, 1)
    setattr(cache, name, getattr(cache, name)[:, :, : cache._columns()])
    keys, values = cache.keys_and_values()
    assert mx.array_equal(values, -keys[..., :2])
    assert mx.array_equal(cache.state[1], -cache.state[0][..., :2])


def test_a_value_read_earlier_never_changes() -> None:
    for cache in (BatchKVCache([0, 2]), BatchRotatingKVCache(3, [0, 2])):
        seen = [(cache.offset, cache.left_padding)]
        read = [(ints(cache.offset), ints(cache.left_padding))]
        for n in (2, 1, 4, 1, 1):
            update(cache, n)
            seen.append((cache.offset, cache.left_padding))
            read.append((ints(cache.offset), ints(cache.left_padding)))
        assert [(ints(o), ints(p)) for o, p in seen] == read
        # And what a model does to the array it was given is its own affair.
        offset = cache.offset
        offset += 100
        assert ints(cache.offset) == read[-1][0]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_dtypes_are_carried_through(make: Make, dtype: mx.Dtype) -> None:
    cache = make()
    b = row_count(cache)
    for n in (2, 1, 5, 1):
        keys, values = cache.update_and_fetch(mx.ones((b, 2, n, 4), dtype), mx.ones((b, 2, n, 0), mx.float32))
        assert (keys.dtype, values.dtype) == (dtype, mx.float32)
        assert values.shape[3] == 0


# --- masks ---------------------------------------------------------------------------------------


def test_masks_are_left_out_where_nothing_is_hidden() -> None:
    for cache in (KVCache(), RotatingKVCache(8), BatchKVCache([0]), BatchRotatingKVCache(8, [0])):
        assert cache.make_mask(1) is None
        assert cache.make_mask(4) == "causal"
        feed(cache, 4, 1)
        assert cache.make_mask(1, window_size=6) is None
        assert cache.make_mask(3) == "causal"
        assert isinstance(cache.make_mask(1, window_size=5), mx.array)
        assert isinstance(cache.make_mask(3, window_size=5), mx.array)


def test_mask_shapes() -> None:
    def shape(cache: Cache, n: int, window: int | None = None) -> tuple[int, ...]:
        mask = cache.make_mask(n, window_size=window, return_array=True)
        assert isinstance(mask, mx.array)
        assert mask.dtype == mx.bool_
        return mask.shape

    growing, ring = feed(KVCache(), 5), feed(RotatingKVCache(4), 5)
    assert (shape(growing, 1), shape(growing, 3)) == ((1, 1, 1, 6), (3, 8))
    assert shape(growing, 1, 2) == (1, 6)
    assert (shape(ring, 1), shape(ring, 3)) == ((1, 1, 1, 4), (3, 6))
    assert shape(ring, 1, 2) == (4,)
    for batch, width in ((BatchKVCache([0, 1]), 6), (BatchRotatingKVCache(4, [0, 1]), 4)):
        feed(batch, 5)
        assert shape(batch, 1) == shape(batch, 1, 2) == (2, 1, 1, width)
        assert shape(batch, 3) == (2, 1, 3, width + 2)


def test_a_row_of_pads_alone_forces_no_mask_on_the_others() -> None:
    assert BatchKVCache([0, 9]).make_mask(4) == "causal"
    assert isinstance(BatchKVCache([0, 3]).make_mask(4), mx.array)


def test_pads_that_the_ring_has_evicted_need_no_mask() -> None:
    cache = BatchRotatingKVCache(4, [0, 3])
    feed(cache, 4, 1, 1)
    assert cache.make_mask(1) is None
    assert ints(cache.left_padding) == [0, 1]


def test_sinks_stay_in_sight_d2() -> None:
    cache = RotatingKVCache(8, keep=2)
    feed(cache, 8)
    mask = cache.make_mask(4)
    assert isinstance(mask, mx.array)
    assert mask[:, :2].all().item()
    assert update(cache, 4)[0].shape[2] == mask.shape[1] == 11


def test_padding_is_counted_in_temporal_order_d1() -> None:
    cache = BatchRotatingKVCache(8, [7, 0])
    feed(cache, 8, 1)
    mask = cache.make_mask(2)
    assert isinstance(mask, mx.array)
    assert ints(mask[0, 0, 1].astype(mx.int32)) == [0, 0, 0, 0, 0, 1, 1, 1, 1]


# --- snapshots (R3), copies, graphs (R4) ---------------------------------------------------------


@pytest.mark.parametrize("make", ALL)
def test_a_snapshot_is_a_snapshot_r3(make: Make) -> None:
    cache = feed(make(), 3)
    fetched = [x for _ in range(9) for x in update(cache, 1)]
    held = [*fetched, *(x for x in cache.state if isinstance(x, mx.array)), cache.keys]
    before = [copy.deepcopy(x) for x in held if x is not None]
    values = [x.tolist() for x in before]
    cache.trim(1)
    feed(cache, 1, 1, 4, 1)
    assert [x.tolist() for x in held if x is not None] == values


@pytest.mark.parametrize("make", ALL)
def test_an_update_handed_in_stays_the_callers(make: Make) -> None:
    cache = make()
    b = row_count(cache)
    keys, values = mx.ones((b, 1, 3, 4)), mx.ones((b, 1, 3, 4))
    cache.update_and_fetch(keys, values)
    keys[...] = 7.0
    assert cache.keys_and_values()[0].max().item() == 1.0
    fetched, _ = cache.keys_and_values()
    fetched[...] = 9.0
    assert cache.keys_and_values()[0].max().item() == 1.0


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("ns", [(), (3,), (4, 1, 1), (9,), (9, 1, 2)])
def test_a_deep_copy_goes_its_own_way(make: Make, ns: tuple[int, ...]) -> None:
    cache = feed(make(), *ns)
    kept, moved = copy.deepcopy(cache), copy.deepcopy(cache)
    feed(moved, 1, 5, 1)
    moved.trim(1)
    same(cache, kept)


@pytest.mark.parametrize("make", ALL)
def test_no_graph_grows_behind_the_bookkeeping_r4(make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> int:
        arrays = [x for x in (cache.keys, cache.values, *cache.state) if isinstance(x, mx.array)]
        dot = tmp_path / "graph.dot"
        mx.export_to_dot(str(dot), *arrays)
        return len(dot.read_text().splitlines())

    monkeypatch.setattr(type(make()), "step", 16)
    cache = feed(make(), 1)
    mx.eval(*update(cache, 1))
    first = nodes()
    for _ in range(500):
        cache.make_mask(1)
        mx.eval(*update(cache, 1))
    assert nodes() <= first + 4


# --- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("ns", [(1,), (3,), (4,), (4, 1), (2, 1, 1, 1, 1), (9,), (9, 1), (9, 2)])
@pytest.mark.parametrize("trimmed", [0, 1])
def test_going_on_from_a_state_is_going_on(make: Make, ns: tuple[int, ...], trimmed: int) -> None:
    cache = feed(make(), *ns)
    cache.trim(min(trimmed, cache.trim_limit()))
    loaded = type(cache).from_state(list(cache.state))
    mine = copy.deepcopy(cache)
    mine.state = mine.state
    same(copy.deepcopy(cache), loaded)
    same(cache, mine)


def test_state_layouts() -> None:
    assert KVCache().state == (None, None, 0)
    assert feed(KVCache(), 3).state[2:] == (3,)
    assert feed(RotatingKVCache(4, keep=1), 4, 1).state[2:] == (5, 1, 4, 2)
    batch = feed(BatchKVCache([0, 1]), 3)
    assert len(batch.state) == 5
    assert batch.state[4] == 3
    ring = feed(BatchRotatingKVCache(4, [0, 1]), 4, 1)
    assert ring.state[4:] == (4, 4, 1, True)
    for cache in (feed(KVCache(), 3), feed(RotatingKVCache(4), 3), batch):
        keys = cache.state[0]
        assert isinstance(keys, mx.array)
        assert keys.shape[2] == 3


def test_a_trimmed_slot_in_a_wrapped_ring_is_told() -> None:
    cache = feed(RotatingKVCache(4), 4, 1)
    cache.trim(1)
    assert len(cache.state) == 7
    assert cache.state[6] == 1
    same(RotatingKVCache.from_state(cache.state), cache)


@pytest.mark.parametrize("make", BATCH)
@pytest.mark.parametrize("fed", [0, 1, 3, 5])
def test_pending_padding_is_part_of_the_state(make: Make, fed: int) -> None:
    cache = make()
    feed(cache, 2)
    cache.prepare(lengths=[5, 2], right_padding=[0, 3])
    if fed:
        update(cache, fed)
    loaded = type(cache).from_state(cache.state)
    assert len(cache.state) == len(make().state) + 4
    for each in (cache, loaded):
        if fed < 5:
            each.update_and_fetch(mx.ones((2, 2, 5 - fed, 3)), mx.ones((2, 2, 5 - fed, 2)))
        with pytest.raises(ValueError, match="0 of those that prepare"):
            update(each, 1)
        each.finalize()
        assert ints(each.offset) == [7, 3]
    same(cache, loaded)


@pytest.mark.parametrize(
    ("kind", "state", "words"),
    [
        (KVCache, [], r"\(keys, values, offset\), not 0 elements"),
        (KVCache, (None, None, 0, 1), "not 4 elements"),
        (KVCache, (None, None, 2), "offset must be from 0 to 0, not 2"),
        (KVCache, (mx.ones((1, 1, 2, 3)), None, 2), "keys and values are arrays, or both None"),
        (KVCache, (mx.ones((1, 2, 3)), mx.ones((1, 2, 3)), 2), "4-D"),
        (KVCache, "abc", "not str"),
        (KVCache, (None, None, "x"), "whole number"),
        (RotatingKVCache, (None, None, 0), "perhaps"),
        (RotatingKVCache, (None, None, 0, 4, 4, 0), "keep must be below max_size"),
        (RotatingKVCache, (None, None, 9, 0, 4, 0), "of 9 tokens 0 are held"),
        (RotatingKVCache, (mx.ones((1, 1, 4, 3)),) * 2 + (9, 0, 8, 2), "wraps at 8"),
        (RotatingKVCache, (mx.ones((1, 1, 4, 3)),) * 2 + (9, 0, 4, -2), "head must be from 0 to 4"),
        (RotatingKVCache, (mx.ones((1, 1, 4, 3)),) * 2 + (3, 0, 4, 4), "does not fit"),
        (BatchKVCache, (None, None, mx.array([0]), mx.array([0, 0]), 0), "2 rows, not 1"),
        (BatchKVCache, (None, None, mx.array([0.5]), mx.array([0]), 0), "whole numbers"),
        (BatchKVCache, (None, None, mx.array([3]), mx.array([0]), 0), "less left_padding"),
        (
            BatchKVCache,
            (mx.ones((2, 1, 4, 3)),) * 2 + (mx.array([4]), mx.array([0]), 4),
            "keys of 2 rows, but 1 offsets",
        ),
        (BatchRotatingKVCache, (None, None, [0], [0], 4, 0, 0, 7), "true or false"),
        (BatchRotatingKVCache, (None, None, [0], [0], 4, 0, 0, True), "a wrapped ring has 4 columns"),
        (BatchRotatingKVCache, (None, None, [0], [0], 4, 0, 0, False, 4), "keep must be below max_size"),
        (BatchRotatingKVCache, (None, None, [0], [0], 4, 0, 0, False, 0), "keep must be at least 1"),
        (BatchRotatingKVCache, (*FOUR, [1], [0], 4, 1, 1, False, 2), "head 1 lies among the 2 sinks"),
        (BatchRotatingKVCache, (*FOUR, [9], [0], 4, 4, 1, True, 2), "head 1 lies among the 2 sinks"),
        (BatchRotatingKVCache, (*FOUR, [1], [2], 4, 4, 4, False, 2), "offset 1 does not fit 4 columns with 2 pads"),
        (BatchRotatingKVCache, (*FOUR, [2], [3], 4, 4, 4, False, 2), "offset 2 does not fit 4 columns with 3 pads"),
        (BatchRotatingKVCache, (*FOUR, [9], [2], 4, 4, 4, False, 2), "of 9 tokens 2 are held"),
        (
            BatchRotatingKVCache,
            (*FOUR, [4], [0], 4, 4, 4, False, 2, 0, mx.array([0]), mx.array([3]), mx.array([-1])),
            "more right pads than columns",
        ),
    ],
)
def test_another_state_is_refused_in_words(kind: Cache, state: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind.from_state(state)
    held: dict[Cache, Cache] = {
        KVCache: KVCache(),
        RotatingKVCache: RotatingKVCache(4),
        BatchKVCache: BatchKVCache([0]),
        BatchRotatingKVCache: BatchRotatingKVCache(4, [0]),
    }
    cache = held[kind]
    feed(cache, 2, 1)

    def assign() -> None:
        cache.state = state

    refused(cache, assign, ValueError, words)


# --- refusals leave every field as it was --------------------------------------------------------


@pytest.mark.parametrize("make", ALL)
def test_updates_that_do_not_fit(make: Make) -> None:
    cache = feed(make(), 5, 1)
    b = row_count(cache)
    good = mx.ones((b, 2, 1, 3))

    def bad(keys: Any, values: mx.array, words: str) -> None:
        refused(cache, lambda: cache.update_and_fetch(keys, values), ValueError, words)

    bad(mx.ones((b + 1, 2, 1, 3)), mx.ones((b + 1, 2, 1, 2)), f"holds {b} rows")
    bad(mx.ones((b, 3, 1, 3)), mx.ones((b, 3, 1, 2)), "update of 3 heads.*holds 2 heads")
    bad(mx.ones((b, 2, 1, 4)), good[..., :2], "keys of 4 float32.*keys of 3 float32")
    bad(good, good, "values of 3 float32.*values of 2 float32")
    bad(good.astype(mx.float16), good[..., :2], "keys of 3 float16")
    bad(good, mx.ones((b, 2, 2, 2)), "differ in rows, heads or columns")
    bad(good[:, :, :0], good[:, :, :0, :2], "N is 0")
    bad(good[0], good[0], "4-D")
    bad([[1.0]], good, "must be an mx.array, not list")


@pytest.mark.parametrize("make", ALL)
def test_heads_stay_known_when_the_cache_is_emptied(make: Make) -> None:
    cache = feed(make(), 3)
    cache.trim(cache.trim_limit())
    assert cache.trim_limit() == 0
    b = row_count(cache)
    refused(
        cache,
        lambda: cache.update_and_fetch(mx.ones((b, 2, 1, 4)), mx.ones((b, 2, 1, 2))),
        ValueError,
        "holds 2 heads with keys of 3",
    )
    loaded = type(cache).from_state(cache.state)
    with pytest.raises(ValueError, match="holds 2 heads with keys of 3"):
        loaded.update_and_fetch(mx.ones((b, 2, 1, 4)), mx.ones((b, 2, 1, 2)))


@pytest.mark.parametrize("make", ALL)
def test_masks_and_trims_that_are_refused(make: Make) -> None:
    cache = feed(make(), 9, 1, 1)
    limit = cache.trim_limit()
    refused(cache, lambda: cache.make_mask(0), ValueError, "N is 0")
    refused(cache, lambda: cache.make_mask(1, window_size=0), ValueError, "at least 1, not 0")
    refused(cache, lambda: cache.trim(-5), ValueError, "trim -5")
    refused(cache, lambda: cache.trim(limit + 1), ValueError, f"at most {limit} tokens")
    refused(cache, lambda: cache.trim(1.5), ValueError, "whole number")


@pytest.mark.parametrize("make", BATCH)
def test_rows_that_are_not_there(make: Make) -> None:
    cache = feed(make(), 3)
    refused(cache, lambda: cache.filter([5]), IndexError, r"filter rows \[5\], .* holds 2 rows")
    refused(cache, lambda: cache.filter([0, -3]), IndexError, r"filter rows \[0, -3\]")
    refused(cache, lambda: cache.extract(2), IndexError, r"extract rows \[2\]")
    refused(cache, lambda: cache.filter(mx.array([True])), ValueError, "whole numbers")


@pytest.mark.parametrize("make", BATCH)
def test_preparations_that_are_refused(make: Make) -> None:
    cache = make()

    def bad(words: str, **given: list[int]) -> None:
        refused(cache, lambda: cache.prepare(**given), ValueError, words)

    bad("for 1 rows, but the batch holds 2", lengths=[3])
    bad("must not be negative", right_padding=[0, -1])
    bad("every row gets the same number", lengths=[3, 3], right_padding=[0, 1])
    bad(r"shorter than the left pads due, \[0, 1\]", lengths=[3, 0], right_padding=[0, 3])
    feed(cache, 2)
    bad(f"holds {cache.size()} columns already", left_padding=[1, 0])
    cache.prepare(lengths=[3, 1], right_padding=[0, 2])
    bad("padding is pending", lengths=[3, 1], right_padding=[0, 2])
    refused(cache, lambda: cache.trim(1), ValueError, "padding is pending")
    refused(cache, lambda: update(cache, 4), ValueError, "4 columns, but 3 of those")
    assert (cache.trim(0), cache.trim_limit(), cache.is_trimmable()) == (0, 0, False)


def test_batches_that_do_not_go_together() -> None:
    growing, ring = feed(BatchKVCache([0]), 2), feed(BatchRotatingKVCache(4, [0]), 2)
    wide = BatchKVCache([0])
    wide.update_and_fetch(mx.ones((1, 2, 1, 8)), mx.ones((1, 2, 1, 8)))
    for cache, other, words in (
        (growing, ring, "extend a BatchKVCache by a BatchRotatingKVCache"),
        (ring, growing, "extend a BatchRotatingKVCache by a BatchKVCache"),
        (growing, KVCache(), "by a KVCache"),
        (growing, wide, "do not go together"),
        (ring, BatchRotatingKVCache(5, [0]), "max_size 4 by one of 5"),
        (ring, BatchRotatingKVCache(4, [0], keep=2), "keep 0 by one with keep 2"),
    ):
        refused(cache, partial(cache.extend, other), ValueError, words)


def test_caches_that_do_not_merge() -> None:
    several = KVCache()
    several.update_and_fetch(mx.ones((2, 1, 1, 1)), mx.ones((2, 1, 1, 1)))
    cases: list[tuple[Any, Any, str]] = [
        (KVCache, [], "merge of no caches"),
        (KVCache, [KVCache(), RotatingKVCache(4)], "merge of KVCache and RotatingKVCache"),
        (KVCache, [several], "a cache with 2 rows"),
        (RotatingKVCache, [RotatingKVCache(4), RotatingKVCache(5)], r"max_size \[4, 5\]"),
        (RotatingKVCache, [RotatingKVCache(8, keep=2), RotatingKVCache(8)], r"rings with keep \[0, 2\]"),
        (KVCache, [BatchKVCache([0])], "merge of KVCache and BatchKVCache"),
        (KVCache, 3, "takes a list"),
    ]
    for kind, caches, words in cases:
        with pytest.raises(ValueError, match=words):
            kind.merge(caches)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RotatingKVCache(0), "max_size must be at least 1, not 0"),
        (lambda: RotatingKVCache(4, keep=4), "keep is 4 of 4"),
        (lambda: RotatingKVCache(4, keep=-1), "keep must be at least 0"),
        (partial(RotatingKVCache, 4.5), "whole number"),  # type: ignore[arg-type]
        (lambda: BatchKVCache([0, -1]), "must not be negative"),
        (partial(BatchKVCache, 3), "must be a list"),  # type: ignore[arg-type]
        (lambda: BatchRotatingKVCache(0, [0]), "max_size must be at least 1"),
        (lambda: BatchRotatingKVCache(4, [0], keep=4), "keep is 4 of 4"),
    ],
)
def test_constructors_refuse(make: Make, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# --- the batch operations as mlx-lm uses them ----------------------------------------------------


@pytest.mark.parametrize("make", [KVCache, lambda: RotatingKVCache(4)])
def test_merge_through_an_instance_and_back(make: Callable[[], Any]) -> None:
    caches = [feed(make(), *ns) for ns in ((5, 1), (), (2,), (9,))]
    batch = caches[0].merge(tuple(caches))
    assert type(batch).__name__ == f"Batch{type(caches[0]).__name__}"
    assert ints(batch.offset) == [6, 0, 2, 9]
    for i, cache in enumerate(caches):
        row = batch.extract(i)
        assert row.offset == cache.offset
        for n in (1, 2, 1):
            keys = mx.random.normal((1, 2, n, 3))
            masks = [c.make_mask(n, return_array=True) for c in (row, cache)]
            fetched = [c.update_and_fetch(keys, keys[..., :2])[0] for c in (row, cache)]
            assert masks[0].shape[-1] == fetched[0].shape[2]
            if not isinstance(cache, RotatingKVCache):
                assert mx.array_equal(*fetched)
    again = caches[0].merge([batch.extract(i) for i in range(4)])
    same(again, batch)


def test_merge_of_empty_caches() -> None:
    batch = KVCache.merge([KVCache(), KVCache()])
    assert batch.empty()
    assert ints(batch.offset) == [0, 0]
    feed(batch, 2)
    emptied = feed(RotatingKVCache(4), 2)
    emptied.trim(2)
    ring = RotatingKVCache.merge([emptied, RotatingKVCache(4)])
    with pytest.raises(ValueError, match="holds 2 heads"):
        ring.update_and_fetch(mx.ones((2, 1, 1, 3)), mx.ones((2, 1, 1, 2)))


@pytest.mark.parametrize("make", BATCH)
def test_filter_as_upstream_calls_it(make: Make) -> None:
    for rows in (mx.array([1]), [1], (1,), [-1]):
        cache = feed(make(), 3, 1)
        cache.filter(rows)
        assert ints(cache.offset) == [3]
        assert update(cache, 1)[0].shape[0] == 1


def test_filter_drops_the_columns_that_nobody_needs() -> None:
    cache = feed(BatchKVCache([2, 3, 0]), 5)
    cache.filter([0, 1])
    assert (cache.size(), ints(cache.left_padding)) == (3, [0, 1])


def test_filter_on_pads_that_are_due_d9() -> None:
    cache = BatchKVCache([3, 5])
    cache.filter([0, 1])
    assert isinstance(cache.make_mask(4), mx.array)
    assert update(cache, 4)[0].shape[2] == 4
    assert ints(cache.offset) == [1, -1]


@pytest.mark.parametrize("make", BATCH)
def test_no_rows_and_back(make: Make) -> None:
    cache, other = feed(make(), 3, 2), feed(make(), 4)
    cache.prepare(lengths=[2, 1], right_padding=[0, 1])
    cache.filter([])
    assert (cache.size(), cache.empty(), cache.nbytes) == (0, True, 0)
    assert ints(cache.offset) == []
    cache.prepare()
    cache.finalize()
    wide = copy.deepcopy(cache)
    cache.extend(other)
    same(cache, other)
    wrong = make()
    wrong.update_and_fetch(mx.ones((2, 5, 1, 3)), mx.ones((2, 5, 1, 2)))
    with pytest.raises(ValueError, match="do not go together"):
        wide.extend(wrong)


@pytest.mark.parametrize("make", BATCH)
def test_extend_leaves_the_other_as_it_was(make: Make) -> None:
    cache, other = feed(make(), 2), feed(make(), 4, 1, 1)
    before, kept = fields(other), copy.deepcopy(other)
    cache.extend(other)
    assert fields(other) == before
    assert ints(cache.offset) == [2, 1, 6, 5]
    cache.filter([2, 3])
    for n in (1, 2):
        masks = [c.make_mask(n, return_array=True) for c in (cache, kept)]
        assert masks[0].shape[-1] >= masks[1].shape[-1]
        update(cache, n)
        update(kept, n)
    assert str(cache.offset) == str(kept.offset)


def test_two_wrapped_rings_at_the_same_head_keep_their_slots() -> None:
    a, b = (feed(BatchRotatingKVCache(4, [0, 1]), 4, 1, 1) for _ in range(2))
    slots = [c.keys_and_values()[0] for c in (a, b)]
    a.extend(b)
    assert mx.array_equal(a.keys_and_values()[0], mx.concatenate(slots))
    assert a.state[6:] == (2, True)


@pytest.mark.parametrize("make", BATCH)
def test_a_row_leaves_during_a_ragged_prefill_d6(make: Make) -> None:
    cache = make()
    cache.filter([0])
    cache.extend(copy.deepcopy(cache))
    cache.prepare(lengths=[4, 2], right_padding=[0, 2])
    feed(cache, 4)
    assert cache.extract(1).offset == 2
    cache.filter([1])
    cache.finalize()
    assert ints(cache.offset) == [2]
    feed(cache, 1, 2)
    assert ints(cache.offset) == [5]


@pytest.mark.parametrize("make", BATCH)
def test_right_padding_alone_waits_for_the_next_update(make: Make) -> None:
    cache = make()
    cache.prepare(right_padding=[0, 2])
    refused(cache, lambda: update(cache, 2), ValueError, "right_padding 2 without lengths for a row with 1 left")
    loaded = type(cache).from_state(cache.state)
    for each in (cache, loaded):
        each.update_and_fetch(mx.ones((2, 2, 5, 3)), mx.ones((2, 2, 5, 2)))
        each.finalize()
        assert ints(each.offset) == [5, 2]
        each.finalize()
    same(cache, loaded)


@pytest.mark.parametrize("make", BATCH)
def test_a_pending_batch_extended(make: Make) -> None:
    cache, other = make(), make()
    cache.prepare(lengths=[3, 1], right_padding=[0, 2])
    cache.extend(other)
    feed(cache, 2, 1)
    cache.finalize()
    assert ints(cache.offset) == [3, 0, 3, 2]


@pytest.mark.parametrize("make", BATCH)
def test_preparing_nothing(make: Make) -> None:
    cache = make()
    cache.prepare(lengths=[3, 3], right_padding=[0, 0])
    cache.prepare(lengths=[3, 3])
    cache.prepare(left_padding=[1, 0])
    assert ints(cache.left_padding) == [1, 1]
    feed(cache, 3)
    words = f"holds {cache.size()} columns already"
    refused(cache, lambda: cache.prepare(left_padding=[0, 0]), ValueError, words)


@pytest.mark.parametrize("make", BATCH)
def test_lengths_alone_announce_a_ragged_prefill(make: Make) -> None:
    cache = make()
    cache.prepare(lengths=[4, 2])
    refused(cache, lambda: cache.make_mask(5), ValueError, "5 columns, but 4 of those")
    feed(cache, 4)
    cache.finalize()
    assert ints(cache.offset) == [4, 1]


def test_a_batch_that_lost_all_rows_is_empty() -> None:
    cache = feed(BatchKVCache([0, 1]), 2)
    cache.filter([])
    cache.update_and_fetch(mx.ones((0, 2, 1, 3)), mx.ones((0, 2, 1, 2)))
    assert cache.empty()


# --- trimming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*SOLO[:1], *BATCH[:1]])
def test_a_growing_cache_gives_everything_back(make: Make) -> None:
    cache = feed(make(), 3, 2)
    n = cache.trim_limit()
    assert cache.is_trimmable()
    assert cache.trim(n) == n
    feed(cache, 1)


def test_what_a_ring_can_give_back() -> None:
    ring = feed(RotatingKVCache(4), 3)
    assert (ring.trim_limit(), ring.is_trimmable()) == (3, True)
    feed(ring, 3)
    assert (ring.trim_limit(), ring.is_trimmable()) == (6, True)
    feed(ring, 3)
    assert (ring.trim_limit(), ring.is_trimmable()) == (3, True)
    assert not RotatingKVCache.from_state(ring.state).is_trimmable()
    assert ring.trim(1) == 1
    assert (ring.trim_limit(), ring.is_trimmable()) == (2, False)
    feed(ring, 1)
    assert (ring.trim_limit(), ring.is_trimmable()) == (1, False)
    assert ring.trim(1) == 1
    assert ring.trim_limit() == 0
    assert ring.trim(0) == 0


def test_a_slid_chunk_gives_back_what_came_together() -> None:
    chunk = feed(ChunkedKVCache(4), 9)
    chunk.maybe_trim_front()
    feed(chunk, 3)
    assert (chunk.trim_limit(), chunk.is_trimmable()) == (4, True)
    assert not ChunkedKVCache.from_state(chunk.state).is_trimmable()
    assert chunk.trim(2) == 2
    assert not chunk.is_trimmable()
    feed(chunk, 1)
    assert not chunk.is_trimmable()


def attend(cache: Cache, x: mx.array) -> mx.array:
    """What queries, keys and values x (B, H, N, D) make of a cache."""
    mask = cache.make_mask(x.shape[2])
    keys, values = cache.update_and_fetch(x, -x)
    return mx.fast.scaled_dot_product_attention(x, keys, values, scale=1.0, mask=mask)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("start", [(4,), (7, 1), (9, 1, 1, 1), (3, *[1] * 9), (4, 1, 1)])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_trim_then_feed_is_the_identity(keep: int, start: tuple[int, ...], n: int) -> None:
    cache = RotatingKVCache(6, keep)
    for m in start:
        attend(cache, mx.random.normal((1, 2, m, 8)))
    x, more = mx.random.normal((1, 2, n, 8)), mx.random.normal((1, 2, 2, 8))
    first = attend(cache, x)
    assert cache.trim(n) == n
    assert mx.allclose(attend(cache, x), first, atol=1e-5)
    straight = copy.deepcopy(cache)
    assert mx.allclose(
        attend(cache, more),
        mx.concatenate([attend(straight, more[:, :, i : i + 1]) for i in (0, 1)], 2),
        atol=1e-5,
    )


def test_trim_prompt_cache_rolls_back_all_layers_d5() -> None:
    def fill(k: mx.array) -> list[Any]:
        caches: list[Any] = [KVCache(), RotatingKVCache(8)]
        for cache in caches:
            cache.update_and_fetch(k[:, :, :7], k[:, :, :7])
        return caches

    k = mx.random.normal((1, 1, 12, 2))
    rolled, straight = fill(k), fill(k)
    for cache in rolled:
        cache.update_and_fetch(k[:, :, 7:11], k[:, :, 7:11])
    for cache in straight:
        cache.update_and_fetch(k[:, :, 7:8], k[:, :, 7:8])
    assert mlximpl.can_trim_prompt_cache(rolled)
    assert mlximpl.trim_prompt_cache(rolled, 3) == 3
    assert [c.offset for c in rolled] == [8, 8]
    for a, b in zip(rolled, straight, strict=True):
        fetched = [c.update_and_fetch(k[:, :, 11:], k[:, :, 11:])[0] for c in (a, b)]
        assert mx.array_equal(*fetched)


def test_trim_prompt_cache_touches_all_or_none() -> None:
    caches: list[Any] = [feed(KVCache(), 9, 1), feed(RotatingKVCache(4), 9, 1)]
    before = [fields(c) for c in caches]
    with pytest.raises(ValueError, match=r"trim 3 .* layer 1, RotatingKVCache.* at most 1"):
        mlximpl.trim_prompt_cache(caches, 3)
    with pytest.raises(ValueError, match="trim -1"):
        mlximpl.trim_prompt_cache(caches, -1)
    assert [fields(c) for c in caches] == before
    assert not mlximpl.can_trim_prompt_cache(caches)
    assert mlximpl.trim_prompt_cache(caches, 1) == 1
    assert mlximpl.trim_prompt_cache(caches, 0) == 0
    assert mlximpl.trim_prompt_cache([], 3) == 0


# --- prompt caches -------------------------------------------------------------------------------


class Model:
    """Six layers and, with caches, a `make_cache`."""

    def __init__(self, caches: list[Any] | None = None) -> None:
        self.layers = [None] * 6
        if caches is not None:
            self.make_cache = lambda: caches


def foreign(name: str, **attributes: int) -> Any:
    """A cache of another library with this class name."""
    return type(name, (), attributes)()


def test_make_prompt_cache_of_a_plain_model() -> None:
    assert [type(c) for c in mlximpl.make_prompt_cache(Model())] == [KVCache] * 6
    rings = mlximpl.make_prompt_cache(Model(), max_kv_size=16)
    assert [(c.max_size, c.keep) for c in rings] == [(16, 4)] * 6
    assert len({id(c) for c in rings}) == 6


def test_make_prompt_cache_honours_the_models_own_and_the_limit_r12() -> None:
    own = [foreign("KVCache"), foreign("RotatingKVCache", max_size=8, keep=2)]
    twins = mlximpl.make_prompt_cache(Model(own))
    assert [type(c) for c in twins] == [KVCache, RotatingKVCache]
    assert (twins[1].max_size, twins[1].keep) == (8, 2)
    bounded = mlximpl.make_prompt_cache(Model(own), max_kv_size=8)
    assert [(c.max_size, c.keep) for c in bounded] == [(8, 4), (8, 2)]


@pytest.mark.parametrize(
    ("caches", "size", "words"),
    [
        (None, 4, "max_kv_size must be above 4"),
        ([foreign("KVCache")], 0, "max_kv_size must be above 4"),
        ([foreign("RotatingKVCache", max_size=9, keep=0)], 8, "a ring of 9, above max_kv_size 8"),
        ([foreign("KVCache"), foreign("PagedKVCache")], None, "cache 1 of the model is a PagedKVCache"),
    ],
)
def test_make_prompt_cache_refuses(caches: list[Any] | None, size: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mlximpl.make_prompt_cache(Model(caches), size)


# --- beside mlx-lm -------------------------------------------------------------------------------


def test_states_come_from_mlx_lm_and_go_there() -> None:
    upstream = pytest.importorskip("mlx_lm.models.cache")
    for make in SOLO + WITHOUT_SINKS:
        ours = make()
        kind = getattr(upstream, type(ours).__name__)
        for ns in ((3,), (3, 1, 1, 1), (9, 1, 1), (4, 1)):
            ours = feed(make(), *ns)
            theirs = kind.from_state(ours.state)
            theirs._lengths = None  # which its own from_state forgets (D8)
            back = type(ours).from_state(theirs.state)
            keys = mx.random.normal((row_count(ours), 2, 1, 3))
            fetched = [c.update_and_fetch(keys, keys[..., :2])[0] for c in (ours, theirs, back)]
            assert mx.array_equal(fetched[0], fetched[1])
            assert mx.array_equal(fetched[0], fetched[2])
            assert str(ours.offset) == str(theirs.offset)


def test_pads_that_mlx_lm_counts_below_zero() -> None:
    upstream = pytest.importorskip("mlx_lm.models.cache")
    theirs = upstream.BatchRotatingKVCache(2, [0, 1])
    for _ in range(5):
        theirs.update_and_fetch(mx.ones((2, 1, 1, 2)), mx.ones((2, 1, 1, 2)))
    assert min(theirs.left_padding.tolist()) < 0
    ours = BatchRotatingKVCache.from_state(theirs.state)
    assert ints(ours.left_padding) == [0, 0]
    assert ours.make_mask(1) is None


def test_mlx_lms_caches_in_trim_prompt_cache() -> None:
    upstream = pytest.importorskip("mlx_lm.models.cache")
    k = mx.ones((1, 1, 4, 2))
    chunked, ring = upstream.ChunkedKVCache(8), upstream.RotatingKVCache(8)
    for _ in range(3):
        chunked.maybe_trim_front()
        chunked.update_and_fetch(k, k)
        ring.update_and_fetch(k, k)
    growing = upstream.KVCache()
    growing.update_and_fetch(k, k)
    slid = chunked.offset - chunked.start_position
    for layers, n in (([chunked], slid + 1), ([growing, ring], 1), ([growing], 5)):
        with pytest.raises(ValueError, match="can drop at most"):
            mlximpl.trim_prompt_cache(layers, n)
    assert mlximpl.trim_prompt_cache([growing, chunked], 2) == 2
    assert (growing.offset, chunked.offset) == (2, 10)
    assert mlximpl.trim_prompt_cache([upstream.ArraysCache(2)], 0) == 0


# --- what a first round of attempts to break it found ---------------------------------------------


def test_rows_that_join_a_prefill_keep_all_columns_until_it_ends() -> None:
    batch = BatchKVCache([0, 0])
    batch.prepare(lengths=[1, 0])
    batch.extend(BatchKVCache([3]))
    longer = BatchKVCache([0, 0])
    longer.prepare(lengths=[6, 5])
    batch.extend(longer)
    feed(batch, 3)
    assert ints(batch.offset) == [3, 3, 0, 3, 3]
    batch.filter([2])
    type(batch).from_state(batch.state)
    batch.finalize()
    assert (ints(batch.offset), batch.size()) == ([0], 0)


@pytest.mark.parametrize("make", [*SOLO, *BATCH])
@pytest.mark.parametrize("n", [2.5, None, "2", True, mx.array([1])])
def test_a_mask_for_what_is_no_number_is_refused(make: Make, n: Any) -> None:
    cache = make()
    refused(cache, lambda: cache.make_mask(n), ValueError, "whole number")
    if n is not None:
        refused(cache, lambda: cache.make_mask(2, window_size=n), ValueError, "whole number")


@pytest.mark.parametrize("make", [*SOLO, *BATCH])
def test_numbers_of_numpy_are_numbers(make: Make) -> None:
    cache = feed(make(), 3)
    for n in (1, 2):
        mask = cache.make_mask(np.int64(n), window_size=np.int32(2), return_array=True)
        assert mx.array_equal(mask, cache.make_mask(n, window_size=2, return_array=True))


@pytest.mark.parametrize("keep", [0, 2])
def test_a_wrapped_ring_gives_back_everything_or_all_but_its_sinks(keep: int) -> None:
    for left in range(keep + 1):
        ring = feed(RotatingKVCache(8, keep), *[1] * 20)
        assert ring.trim_limit() == 1
        refused(ring, partial(ring.trim, 6), ValueError, "trim 6, but at most 1")
        assert (ring.trim(20 - left), ring.offset, ring.empty()) == (20 - left, left, left == 0)
        keys, _ = ring.update_and_fetch(
            *[mx.zeros((1, *x.shape[1:2], 2, x.shape[3])) for x in (ring.keys, ring.values)]
        )
        assert keys.shape[2] == left + 2


def test_a_batch_of_wrapped_rings_gives_back_everything() -> None:
    batch = feed(BatchRotatingKVCache(4, [0, 0]), 3, 1, 1, 1)
    assert (batch.trim(6), ints(batch.offset), ints(batch.left_padding), batch.empty()) == (6, [0, 0], [0, 0], True)
    feed(batch, 2)


def test_trim_prompt_cache_takes_everything_back() -> None:
    layers = [feed(KVCache(), 7, 4), feed(RotatingKVCache(8), 7, 4)]
    assert mlximpl.trim_prompt_cache(layers, 11) == 11
    assert [layer.offset for layer in layers] == [0, 0]


def test_a_restored_cache_does_not_keep_the_old_buffer_alive() -> None:
    others = mx.get_active_memory()
    cache, wide = KVCache(), mx.ones((1, 8, 1024, 64))
    cache.update_and_fetch(wide, wide)
    mx.eval(cache.keys, cache.values)
    cache.trim(1020)
    before = mx.get_active_memory() - others
    restored = KVCache.from_state(cache.state)
    mx.eval(restored.keys, restored.values)
    del cache, wide
    mx.synchronize()
    assert restored.nbytes == 2 * 8 * 4 * 64 * 4
    assert mx.get_active_memory() - others < before / 2


@pytest.mark.parametrize("rows", ["", b"\x01", {1: 2}, 1])
def test_rows_that_are_no_list_are_refused(rows: Any) -> None:
    batch = feed(BatchKVCache([0, 0, 0]), 2)
    refused(batch, lambda: batch.filter(rows), ValueError, "must be a list of whole numbers")


def test_padding_beyond_what_positions_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be above"):
        BatchKVCache([2**40])


def test_a_wrapped_ring_with_right_pads_fed_is_no_state() -> None:
    """An update while padding is pending leaves a ring in temporal order, so no cache has ever been like that."""
    k = mx.arange(4.0).reshape(1, 1, 4, 1)
    announced = 3, mx.array([2]), mx.array([1]), mx.array([-1])
    state = k, k, mx.array([9]), mx.array([0]), 4, 4, 1, True, *announced
    with pytest.raises(ValueError, match=r"\[1\] right pads were fed, which no wrapped ring has"):
        mlximpl.BatchRotatingKVCache.from_state(state)
    in_order = k, k, mx.array([9]), mx.array([0]), 4, 4, 4, False, *announced
    assert mlximpl.BatchRotatingKVCache.from_state(in_order).size() == 4
