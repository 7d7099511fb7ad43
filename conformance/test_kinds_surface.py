"""The surface of the quantized, concatenating, chunked and recurrent caches and of lists of caches, by example."""

import copy
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

import mlximpl
from conformance.adapters.surface import set_device
from conformance.zoo.models import make_model
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
from mlximpl.kinds import KINDS

Cache = Any  # the kinds share no annotated base that says all of what is asked here
Make = Callable[[], Cache]

set_device()  # float32 is compared as such, on a GPU too

D = 32  # head size of keys: one group of the smallest size

QUANTIZED: list[Make] = [partial(QuantizedKVCache, 32, bits) for bits in (2, 3, 4, 5, 6, 8)]
GROWING: list[Make] = [*QUANTIZED, ConcatenateKVCache]
COLUMNS: list[Make] = [*GROWING, partial(ChunkedKVCache, 4)]
ARRAYS: list[Make] = [partial(ArraysCache, 2), partial(ArraysCache, 2, [0, 3])]


def batch_list(*pads: int) -> Cache:
    """A list of every kind that has rows, one of them in a list of its own."""
    rows = list(pads)
    return CacheList(
        ArraysCache(2, rows), CacheList(BatchKVCache(rows)), BatchRotatingKVCache(4, rows), BatchKVCache(rows)
    )


LISTS: list[Make] = [
    CacheList,
    lambda: CacheList(ArraysCache(2), KVCache()),
    lambda: CacheList(CacheList(), RotatingKVCache(4)),
    partial(batch_list, 0, 1),
]
ALL = [*COLUMNS, *ARRAYS, *LISTS]


def row_count(cache: Cache) -> int:
    if isinstance(cache, ArraysCache):
        return cache.batch_size
    return len(cache.left_padding) if isinstance(cache, (BatchKVCache, BatchRotatingKVCache)) else 1


def has_rows(cache: Cache) -> bool:
    """Whether rows may come and go."""
    if isinstance(cache, CacheList):
        return all(has_rows(child) for child in cache.caches)
    return hasattr(cache, "filter")


def columns(n: int, rows: int = 1) -> tuple[mx.array, mx.array]:
    """Keys of 32 and values of 64 for n columns of two heads."""
    return mx.random.normal((rows, 2, n, D)), mx.random.normal((rows, 2, n, 2 * D))


def feed(cache: Cache, *ns: int) -> Cache:
    """Feed a cache of any kind: n columns, a state of n steps, or each child of a list."""
    for n in ns:
        if isinstance(cache, CacheList):
            for child in cache.caches:
                feed(child, n)
        elif isinstance(cache, ArraysCache):
            for i in range(len(cache.cache)):
                cache[i] = state(row_count(cache))
            cache.advance(n)
        else:
            cache.update_and_fetch(*columns(n, row_count(cache)))
    return cache


def state(rows: int, *shape: int) -> mx.array:
    return mx.random.normal((rows, *(shape or (3, 4))))


def arrays(*slots: mx.array | None, left: list[int] | None = None) -> Cache:
    cache = ArraysCache(len(slots), left)
    for i, slot in enumerate(slots):
        cache[i] = slot
    return cache


def ints(array: mx.array | None) -> Any:
    assert array is None or array.dtype == mx.int32
    return None if array is None else array.tolist()


def seen(mask: Any) -> Any:
    assert mask is None or mask.dtype == mx.bool_
    return None if mask is None else mask.astype(mx.int32).tolist()


def values(tree: Any) -> Any:
    """A tree by value: arrays as shape, dtype and numbers."""
    return tree_map(lambda x: (x.shape, str(x.dtype), x.tolist()) if isinstance(x, mx.array) else x, tree)


def equal(a: Any, b: Any) -> bool:
    """Trees of the same arrays, bit for bit."""
    return bool(values(a) == values(b))


def fields(held: Any) -> Any:
    """Every attribute as it is, the arrays made for readers apart: by the very object and by value."""
    if isinstance(held, (list, tuple)):
        return [fields(each) for each in held]
    if isinstance(held, mx.array):
        return id(held), held.shape, str(held.dtype), held.tolist()
    if type(held).__name__ in KINDS:
        return {name: (id(value), fields(value)) for name, value in vars(held).items()}
    return repr(held)


def refused(cache: Cache, call: Callable[[], object], words: str, error: type[Exception] = ValueError) -> None:
    before = fields(cache)
    with pytest.raises(error, match=words):
        call()
    assert fields(cache) == before


def same(a: Cache, b: Cache, rounds: tuple[int, ...] = (1, 3, 1)) -> None:
    """Two caches answer alike from here on."""
    assert type(a) is type(b)
    assert repr(a) == repr(b)
    assert (a.size(), a.empty(), a.trim_limit()) == (b.size(), b.empty(), b.trim_limit())
    assert equal(a.state, b.state)
    if isinstance(a, CacheList):
        for mine, theirs in zip(a.caches, b.caches, strict=True):
            same(mine, theirs, rounds)
        return
    for n in rounds:
        assert equal(*[outcome(cache, n) for cache in (a, b)])
        if not isinstance(a, ArraysCache):
            new = columns(n, row_count(a))
            assert equal(*[cache.update_and_fetch(*new) for cache in (a, b)])


def outcome(cache: Cache, n: int) -> Any:
    """What a cache says of the next n columns, a refusal included."""
    try:
        mask = cache.make_mask(n) if hasattr(cache, "make_mask") else None
        if isinstance(cache, ArraysCache):
            cache.advance(n)
            return mask, cache.lengths, cache.left_padding
    except ValueError as refusal:
        return str(refusal)
    return mask, str(cache.offset)


def dequantized(parts: Any, cache: QuantizedKVCache) -> mx.array:
    words, scales, biases = parts
    return mx.dequantize(words, scales, biases, group_size=cache.group_size, bits=cache.bits)


# --- what every kind has -------------------------------------------------------------------------


@pytest.mark.parametrize("make", ALL)
def test_an_empty_cache_answers_everything(make: Make) -> None:
    cache = make()
    assert bool(cache)
    assert not hasattr(cache, "__len__")
    assert cache.empty() is True
    assert (cache.size(), cache.nbytes, cache.trim_limit(), cache.trim(0)) == (0, 0, 0, 0)
    assert cache.can_trim(0)
    assert not cache.can_trim(1)
    assert not cache.can_trim(-1)
    assert type(cache).__name__ in repr(cache)
    refused(cache, partial(cache.trim, 1), "trim 1")
    refused(cache, partial(cache.trim, -1), "trim -1")
    refused(cache, partial(cache.trim, 0.5), "whole number")
    same(make(), type(cache).from_state(cache.state))
    same(make(), copy.deepcopy(cache))


@pytest.mark.parametrize("make", COLUMNS)
def test_an_empty_cache_of_columns(make: Make) -> None:
    cache = make()
    assert (cache.offset, cache.keys, cache.values) == (0, None, None)
    assert cache.is_trimmable()
    assert cache.step == type(cache).step == 256
    with pytest.raises(ValueError, match="no update"):
        cache.keys_and_values()


@pytest.mark.parametrize("make", COLUMNS)
def test_kinds_without_rows_do_not_offer_batching(make: Make) -> None:
    for name in ("merge", "filter", "extend", "extract", "prepare", "finalize"):
        assert not hasattr(make(), name)


def test_who_is_quantized_and_who_can_be() -> None:
    assert [hasattr(make(), "bits") for make in ALL] == [True] * 6 + [False] * 8
    able = [name for name, kind in KINDS.items() if hasattr(kind, "to_quantized")]
    assert able == ["KVCache"]
    assert not hasattr(ChunkedKVCache(4), "make_mask")


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("ns", [(3,), (5, 1), (2, 9)])
def test_going_on_from_a_state_and_from_a_copy(make: Make, ns: tuple[int, ...]) -> None:
    cache = feed(make(), *ns)
    assert cache.empty() == (not getattr(cache, "caches", True))
    kept, moved = copy.deepcopy(cache), copy.deepcopy(cache)
    feed(moved, 1, 4)
    same(kept, type(cache).from_state(cache.state))
    mine = copy.deepcopy(cache)
    mine.state = mine.state
    same(copy.deepcopy(cache), mine)


@pytest.mark.parametrize("make", ALL)
def test_a_snapshot_is_a_snapshot(make: Make) -> None:
    cache = feed(make(), 3)
    held = [cache.state]
    if hasattr(cache, "keys"):
        held += [cache.keys_and_values(), cache.keys, cache.update_and_fetch(*columns(1))]
    if isinstance(cache, ArraysCache):
        cache.lengths = [9] * cache.batch_size
        held += [cache[0], cache.cache, cache.lengths, cache.left_padding, cache.state, cache.make_mask(2)]
    before = copy.deepcopy(values(held))
    feed(cache, 1, 2)
    if cache.trim_limit():
        cache.trim(1)
    if has_rows(cache):
        cache.finalize()
        cache.filter([0])
        cache.extend(copy.deepcopy(cache))
    feed(cache, 1)
    assert values(held) == before


@pytest.mark.parametrize("make", ALL)
def test_nbytes_counts_the_arrays(make: Make) -> None:
    cache = feed(make(), 3)
    if not isinstance(cache, CacheList):
        assert cache.nbytes == sum(x.nbytes for x in stored_arrays(cache)) > 0
    else:
        assert cache.nbytes == sum(child.nbytes for child in cache.caches)


def stored_arrays(cache: Cache) -> list[mx.array]:
    """The arrays in a cache's own fields."""
    found: list[Any] = []
    for value in vars(cache).values():
        found += value if isinstance(value, (list, tuple)) else [value]
    return [x for x in found if isinstance(x, mx.array)]


# --- columns: quantized, concatenating, chunked --------------------------------------------------


@pytest.mark.parametrize("make", COLUMNS)
def test_updates_that_do_not_fit(make: Make) -> None:
    cache = feed(make(), 5, 1)
    keys, wide = columns(1)

    def bad(k: Any, v: Any, words: str) -> None:
        refused(cache, lambda: cache.update_and_fetch(k, v), words)

    bad(*columns(1, rows=2), "update of 2 rows, but the cache holds 1 rows")
    bad(mx.ones((1, 3, 1, D)), mx.ones((1, 3, 1, 2 * D)), "update of 3 heads.*holds 2 heads")
    bad(wide, wide, "keys of 64 float32.*keys of 32 float32")
    bad(keys, keys, "values of 32 float32.*values of 64 float32")
    bad(keys.astype(mx.float16), wide.astype(mx.float16), "keys of 32 float16.*holds 2 heads with keys of 32 float32")
    bad(keys, mx.ones((1, 2, 2, 2 * D)), "differ in rows, heads or columns")
    bad(keys[:, :, :0], wide[:, :, :0], "N is 0")
    bad(keys[0], wide[0], "4-D")
    bad([[1.0]], wide, "must be an mx.array, not list")


@pytest.mark.parametrize("make", COLUMNS)
def test_heads_stay_known_when_the_cache_is_emptied(make: Make) -> None:
    cache = feed(make(), 3)
    assert (cache.trim(3), cache.offset, cache.empty(), cache.size()) == (3, 0, True, 0)
    for each in (cache, type(cache).from_state(cache.state)):
        wrong = [mx.ones((1, 2, 1, 2 * D))] * 2
        refused(each, partial(each.update_and_fetch, *wrong), "holds 2 heads with keys of 32")
        feed(each, 2)
        assert each.offset == 2


@pytest.mark.parametrize("make", GROWING)
def test_masks_are_those_of_a_growing_cache(make: Make) -> None:
    cache, plain = make(), KVCache()
    assert (cache.make_mask(1), cache.make_mask(4)) == (None, "causal")
    for n in (4, 1, 3):
        feed(cache, n)
        feed(plain, n)
        given: list[dict[str, Any]] = [{"N": 1}, {"N": 3}, {"N": 1, "window_size": 2}, {"N": 3, "return_array": True}]
        for asked in given:
            assert equal(cache.make_mask(**asked), plain.make_mask(**asked))
    refused(cache, lambda: cache.make_mask(0), "N is 0")
    refused(cache, lambda: cache.make_mask(1, window_size=0), "at least 1, not 0")


@pytest.mark.parametrize("make", GROWING)
def test_trim_gives_everything_back_and_no_token_again(make: Make) -> None:
    cache, straight = make(), make()
    first, gone, last = columns(5), columns(3), columns(2)
    cache.update_and_fetch(*first)
    cache.update_and_fetch(*gone)
    assert (cache.trim(3), cache.offset, cache.size(), cache.trim_limit()) == (3, 5, 5, 5)
    straight.update_and_fetch(*first)
    assert equal(cache.keys_and_values(), straight.keys_and_values())
    assert equal(cache.update_and_fetch(*last), straight.update_and_fetch(*last))
    refused(cache, lambda: cache.trim(8), "trim 8, but at most 7")
    assert cache.trim(7) == 7


@pytest.mark.parametrize("make", COLUMNS)
def test_models_assign_keys_and_values(make: Make) -> None:
    cache, plain = make(), make()
    for each in (cache, plain):
        mx.random.seed(1)
        feed(each, 2)
    cache.keys = mx.depends(cache.keys, mx.ones(1))  # of a tuple, it makes a list
    cache.values = mx.depends(cache.values, mx.ones(1))
    kept = cache.keys
    held = copy.deepcopy(values(kept))
    same(cache, plain)
    assert values(kept) == held


@pytest.mark.parametrize("make", COLUMNS)
@pytest.mark.parametrize("n", [3, 256])  # with spare columns and without
def test_an_update_handed_in_stays_the_callers(make: Make, n: int) -> None:
    cache = make()
    keys, wide = columns(n)
    fetched = cache.update_and_fetch(keys, wide)
    before = copy.deepcopy(values(fetched))
    keys[...] = 7.0
    wide[...] = 7.0
    assert values(cache.keys_and_values()) == before
    for part in fetched[0] if isinstance(fetched[0], tuple) else fetched:
        part[...] = mx.zeros_like(part)
    assert values(cache.keys_and_values()) == before


@pytest.mark.parametrize("make", COLUMNS)
def test_no_graph_grows_behind_the_bookkeeping(make: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> int:
        dot = tmp_path / "graph.dot"
        mx.export_to_dot(str(dot), *stored_arrays(cache))
        return len(dot.read_text().splitlines())

    monkeypatch.setattr(type(make()), "step", 16)
    cache = feed(make(), 1)
    mx.eval(stored_arrays(cache))
    first = nodes()
    for _ in range(60):
        if isinstance(cache, ChunkedKVCache):
            cache.maybe_trim_front()
        mx.eval(cache.update_and_fetch(*columns(1)))
    assert nodes() <= first + 4


@pytest.mark.parametrize("make", QUANTIZED)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_quantized_fetch_is_what_mlx_makes_of_the_tokens_d10(make: Make, dtype: mx.Dtype) -> None:
    cache = make()
    keys, wide = (x.astype(dtype) for x in columns(260))
    at = 0
    for n in (3, 1, 250, 1, 5):
        fetched = cache.update_and_fetch(keys[:, :, at : at + n], wide[:, :, at : at + n])
        at += n
        for parts, x in zip(fetched, (keys, wide), strict=True):
            expected = mx.quantize(x[:, :, :at], group_size=32, bits=cache.bits)
            assert isinstance(parts, tuple)
            assert equal(list(parts), list(expected))
    assert cache.offset == cache.size() == 260
    assert equal(cache.keys_and_values(), fetched)
    assert cache.keys[0].shape[2] == 512


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_what_is_quantized_is_near_what_was_given(bits: int, group_size: int) -> None:
    cache = QuantizedKVCache(group_size=group_size, bits=bits)
    assert (cache.group_size, cache.bits) == (group_size, bits)
    keys = mx.random.uniform(-1, 1, (2, 1, 4, 128))
    fetched, _ = cache.update_and_fetch(keys, keys)
    # Half a step, but a whole one at the far end of a group: MLX rounds the scale so that the near end is exact.
    assert mx.all((dequantized(fetched, cache) - keys).abs() <= fetched[1].abs().max() + 1e-5)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"bits": 7}, r"bits must be one of \(2, 3, 4, 5, 6, 8\), not 7"),
        ({"bits": 1}, "not 1"),
        ({"group_size": 16}, r"group_size must be one of \(32, 64, 128\), not 16"),
        ({"group_size": 64.0}, "group_size must be a whole number, not 64.0"),
        ({"bits": True}, "bits must be a whole number"),
    ],
)
def test_quantizations_that_mlx_does_not_offer(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        QuantizedKVCache(**asked)
    cache = feed(KVCache(), 2)
    refused(cache, lambda: cache.to_quantized(**asked), words)


def test_columns_that_cannot_be_quantized() -> None:
    cache = QuantizedKVCache()
    good, ragged = mx.ones((1, 2, 3, 64)), mx.ones((1, 2, 3, 96))
    for keys, wide, words in (
        (ragged, good, "keys of head size 96 cannot be quantized in groups of 64"),
        (good, ragged, "values of head size 96 cannot be quantized in groups of 64"),
        (good, good[..., :0], "values of head size 0 cannot"),
        (good.astype(mx.int32), good.astype(mx.int32), "must be of one dtype, which is float16, bfloat16 or float32"),
        (good.astype(mx.float16), good, "64 float16 and values of 64 float32 cannot be quantized"),
    ):
        refused(cache, partial(cache.update_and_fetch, keys, wide), words)
        plain = KVCache()
        plain.update_and_fetch(keys, wide)
        refused(plain, plain.to_quantized, words)


def test_to_quantized() -> None:
    assert (KVCache().to_quantized().bits, KVCache().to_quantized().group_size) == (4, 64)
    cache = KVCache()
    keys, wide = columns(7)
    cache.update_and_fetch(keys, wide)
    cache.trim(2)
    before = fields(cache)
    quantized = cache.to_quantized(group_size=32, bits=6)
    assert fields(cache) == before
    assert (quantized.offset, quantized.group_size, quantized.bits) == (5, 32, 6)
    assert quantized.keys is not None
    assert quantized.keys[0].shape[2] % 256 == 0  # the spare columns of the original are not quantized along
    straight = QuantizedKVCache(32, 6)
    straight.update_and_fetch(keys[:, :, :5], wide[:, :, :5])
    same(quantized, straight)
    same(KVCache().to_quantized(32, 8), QuantizedKVCache(32, 8))
    cache.trim(5)
    refused(
        cache.to_quantized(32, 4),
        lambda: cache.to_quantized(32, 4).update_and_fetch(wide, wide),
        "holds 2 heads with keys of 32",
    )


def test_what_no_step_holds_is_grown_to() -> None:
    for cache, width in ((QuantizedKVCache(32, 4), 512), (ChunkedKVCache(4), 512)):
        feed(cache, 255, 1, 1)
        keys: Any = cache.keys
        assert (keys[0] if isinstance(keys, tuple) else keys).shape[2] == width
    joined = feed(ConcatenateKVCache(), 255, 1, 1)
    assert joined.keys.shape[2] == joined.offset == 257


def test_the_states_of_columns() -> None:
    assert QuantizedKVCache(32, 4).state == (None, None, 0, 32, 4)
    quantized = feed(QuantizedKVCache(32, 5), 3)
    keys, wide, *rest = quantized.state
    assert rest == [3, 32, 5]
    assert [x.shape for x in (*keys, *wide)] == [
        (1, 2, 3, 5), (1, 2, 3, 1), (1, 2, 3, 1), (1, 2, 3, 10), (1, 2, 3, 2), (1, 2, 3, 2)
    ]  # fmt: skip
    assert ConcatenateKVCache().state == (None, None)
    joined = feed(ConcatenateKVCache(), 4)
    joined.trim(1)
    assert [x.shape[2] for x in joined.state] == [3, 3]
    assert ChunkedKVCache(4).state == (None, None, 0, 4, 0)
    chunked = feed(ChunkedKVCache(4), 7)
    chunked.maybe_trim_front()
    assert chunked.state[2:] == (7, 4, 3)
    assert chunked.state[0].shape[2] == 4


W, S = mx.zeros((1, 2, 3, 4), mx.uint32), mx.zeros((1, 2, 3, 1))


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (QuantizedKVCache, [], "keys, values, offset, group_size, bits"),
        (QuantizedKVCache, "abcde", "not str"),
        (QuantizedKVCache, (None, None, 1, 32, 4), "offset must be from 0 to 0, not 1"),
        (QuantizedKVCache, (None, None, 0, 33, 4), "group_size must be one of"),
        (QuantizedKVCache, (None, None, 0, 32, 9), "bits must be one of"),
        (QuantizedKVCache, ((W, S, S), None, 3, 32, 4), "values are"),
        (QuantizedKVCache, ((W, S), (W, S, S), 3, 32, 4), "keys are"),
        (QuantizedKVCache, (W, (W, S, S), 3, 32, 4), "keys are"),
        (QuantizedKVCache, ((S, S, S), (W, S, S), 3, 32, 4), "uint32 words"),
        (QuantizedKVCache, ((W, S, S.astype(mx.float16)), (W, S, S), 3, 32, 4), "one float dtype"),
        (QuantizedKVCache, ((W, S, S), (W, S, S), 3, 32, 8), "not 8 bits in groups of 32"),
        (QuantizedKVCache, ((W, S, S[:, :, :2]), (W, S, S), 3, 32, 4), "not 4 bits in groups of 32"),
        (QuantizedKVCache, ((W, S[:, :, :2], S), (W, S, S), 3, 32, 4), "not 4 bits in groups of 32"),
        (QuantizedKVCache, ((W, S, S[0]), (W, S, S), 3, 32, 4), "three 4-D arrays"),
        (QuantizedKVCache, ((W, S, S), tuple(x[:, :, :2] for x in (W, S, S)), 2, 32, 4), "differ in rows, heads"),
        (QuantizedKVCache, ((W, S, S), (W, S, S), 4, 32, 4), "offset must be from 0 to 3, not 4"),
        (ConcatenateKVCache, (S, None), "keys and values are arrays, or both None"),
        (ConcatenateKVCache, (S, S, 3), r"\(keys, values\), not 3 elements"),
        (ChunkedKVCache, (S, S, 3, 4), "not 4 elements"),
        (ChunkedKVCache, (S, S, 3, 0, 0), "chunk_size must be at least 1"),
        (ChunkedKVCache, (S, S, 7, 4, 2), "positions 2 to 7 do not lie in 3 columns"),
        (ChunkedKVCache, (S, S, 7, 4, 5), "start_position must be from 0 to 4, not 5"),
    ],
)
def test_states_of_columns_that_are_refused(kind: Cache, given: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kind.from_state(given)
    cache = feed(kind(4) if kind is ChunkedKVCache else kind(), 2) if kind is not QuantizedKVCache else kind()
    refused(cache, partial(setattr, cache, "state", given), words)


def test_restored_quantized_caches_take_lists_and_arrays_of_one() -> None:
    cache = feed(QuantizedKVCache(32, 4), 3)
    keys, wide, offset, group_size, bits = cache.state
    loaded = [list(keys), list(wide), mx.array(offset), mx.array(group_size), mx.array(bits)]
    same(QuantizedKVCache.from_state(loaded), cache)


@pytest.mark.parametrize("make", COLUMNS)
def test_a_restored_cache_does_not_keep_the_old_buffer_alive(make: Make) -> None:
    cache = make()
    cache.update_and_fetch(mx.random.normal((1, 8, 1024, 64)), mx.random.normal((1, 8, 1024, 64)))
    kind, held = type(cache), sum(x.nbytes for x in stored_arrays(cache))
    if kind is ChunkedKVCache:
        mx.eval(cache.keys_and_values())
        cache.maybe_trim_front()
    else:
        cache.trim(1020)
    kept = cache.state
    mx.eval(stored_arrays(cache))
    before = mx.get_active_memory()
    restored = kind.from_state(kept)
    mx.eval(stored_arrays(restored))
    del cache, kept
    mx.synchronize()
    assert before - mx.get_active_memory() > 0.9 * held


# --- chunks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, -1, 2.5, None])
def test_chunks_that_hold_nothing(size: Any) -> None:
    with pytest.raises(ValueError, match="chunk_size must be"):
        ChunkedKVCache(size)


@pytest.mark.parametrize("size", [1, 3, 4])
def test_a_chunked_cache_holds_what_lies_from_its_start_on(size: int) -> None:
    cache = ChunkedKVCache(size)
    keys, wide = columns(1700)
    at = 0
    for n in (1, 2, 300, 1, 1, 5, *[1] * 300, 9, 900, 1, 1):
        cache.maybe_trim_front()
        assert cache.start_position == max(0, at - size)
        fetched = cache.update_and_fetch(keys[:, :, at : at + n], wide[:, :, at : at + n])
        at += n
        start = cache.start_position
        assert equal(fetched, (keys[:, :, start:at], wide[:, :, start:at]))
        assert (cache.offset, cache.size(), cache.chunk_size) == (at, at - start, size)
        assert cache.keys is not None
        assert cache.keys.shape[2] <= 512 + at - start  # neither spare nor dropped columns pile up


def test_a_chunked_cache_is_copied_once_in_a_step_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlximpl import append

    def counted(parts: list[mx.array], axis: int = 2) -> mx.array:
        copies.append(parts)
        return join(parts, axis)

    copies: list[Any] = []
    join = append.join
    monkeypatch.setattr(append, "join", counted)
    cache = feed(ChunkedKVCache(4), 4)
    widths = set()
    for _ in range(300):
        cache.maybe_trim_front()
        feed(cache, 1)
        widths.add(cache.keys.shape[2])
    assert widths == {256}
    assert len(copies) == 2 * 2


def lawful(cache: ChunkedKVCache, n: int) -> bool:
    """Whether the query at offset - n would find all tokens of its own chunk before it."""
    at = cache.offset - n
    return at >= 0 and cache.start_position <= at // cache.chunk_size * cache.chunk_size


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_chunk_gives_back_what_leaves_the_next_query_its_chunk(size: int) -> None:
    for ns in [(1,), (7,), (4, 4), (9, 1, 1), (2, 2, 2, 2), (1,) * 11]:
        cache = ChunkedKVCache(size)
        for n in ns:
            cache.maybe_trim_front()
            feed(cache, n)
        for front in (False, True):
            if front:
                cache.maybe_trim_front()
            for n in range(cache.offset + 2):
                each = copy.deepcopy(cache)
                if n == 0 or (n <= each.size() and lawful(each, n)):
                    assert each.can_trim(n)
                    assert n <= each.trim_limit()
                    assert (each.trim(n), each.offset) == (n, cache.offset - n)
                else:
                    assert n > each.trim_limit()
                    refused(each, partial(each.trim, n), f"trim {n}, but at most {each.trim_limit()}")
            limit = cache.trim_limit()
            assert cache.is_trimmable() == (limit >= cache.offset or 1 < ns[-1] <= limit)


def test_tokens_taken_back_from_a_chunk_are_gone() -> None:
    cache = ChunkedKVCache(4)
    keys, wide = columns(20)
    cache.update_and_fetch(keys[:, :, :9], wide[:, :, :9])
    cache.maybe_trim_front()
    cache.update_and_fetch(keys[:, :, 9:12], wide[:, :, 9:12])
    assert (cache.start_position, cache.trim_limit()) == (5, 4)
    cache.trim(3)
    fetched = cache.update_and_fetch(keys[:, :, 15:17], wide[:, :, 15:17])
    expected = [mx.concatenate([x[:, :, 5:9], x[:, :, 15:17]], axis=2) for x in (keys, wide)]
    assert equal(list(fetched), expected)


# --- recurrent state -----------------------------------------------------------------------------


def test_slots_are_read_and_written_as_a_lists() -> None:
    cache = ArraysCache(size=4)
    a, b, c, d = cache
    assert (a, b, c, d) == (None,) * 4
    x = state(2)
    cache[1] = x
    cache[-1] = -x
    assert [slot is None for slot in cache] == [True, False, True, False]
    assert equal((cache[1], cache[3], cache[-3]), (x, -x, x))
    assert [slot is None for slot in cache[:2]] == [True, False]
    for i in (4, -5):
        refused(cache, partial(cache.__getitem__, i), f"slot {i}, but the cache has 4 slots", IndexError)
        refused(cache, partial(cache.__setitem__, i, x), f"slot {i}, but the cache has 4 slots", IndexError)
    cache[1] = None
    assert cache[1] is None
    assert cache.batch_size == 2
    assert cache.nbytes == x.nbytes
    assert (cache.size(), cache.empty(), cache.is_trimmable()) == (0, False, False)
    assert "1 of 4 slots filled, batch_size=2" in repr(cache)


def test_the_list_of_slots() -> None:
    cache = ArraysCache(2)
    assert cache.cache == [None, None]
    x = state(3)
    cache.cache = [x, None]
    assert equal(cache.cache, [x, None])
    cache.cache[1] = x
    assert cache.batch_size == 3
    assert equal(cache[1], x)
    for slots, words in (
        ([x], "1 slots, but the cache has 2"),
        ([x, x[:1]], r"slots of \[1, 3\] rows do not go together"),
        ("ab", "slots are a list"),
        ([x, 3], "slot 1 must be an mx.array or None, not int"),
    ):
        refused(cache, partial(setattr, cache, "cache", slots), words)
    cache.cache = [None, x[:1]]
    assert cache.batch_size == 1
    cache.left_padding = [4]
    refused(cache, partial(setattr, cache, "cache", [x, None]), "slots of 3 rows, but the cache holds 1")
    replaced = ArraysCache.merge([arrays(x[:1]), arrays(x[1:2])])
    replaced.cache = [x]
    replaced.filter([2])
    assert (replaced.batch_size, equal(replaced[0], x[2:])) == (1, True)
    merged = ArraysCache(1).merge([ArraysCache(1), ArraysCache(1)])
    refused(merged, partial(setattr, merged, "cache", [x]), "slots of 3 rows, but the cache holds 2")


def test_an_array_handed_in_or_out_is_not_the_caches() -> None:
    cache, x = ArraysCache(1), mx.ones((2, 3))
    cache[0] = x
    x[...] = 7.0
    out = cache[0]
    assert out is not None
    out += 100
    slots: Any = cache.state[0]
    slots[0] += 100
    slots.append(None)
    assert equal(cache[0], mx.ones((2, 3)))
    assert equal(cache.state, ([mx.ones((2, 3))], None, None))


@pytest.mark.parametrize("slot", [3, "x", [1.0], mx.array(1.0)])
def test_what_is_no_array_with_rows_is_refused(slot: Any) -> None:
    cache = arrays(state(2), None)
    refused(cache, partial(cache.__setitem__, 1, slot), "slot 1 must")


def test_rows_that_are_known_bind_every_slot() -> None:
    fresh = ArraysCache(2)
    assert fresh.batch_size == 1
    prepared = ArraysCache(2)
    prepared.prepare(lengths=[3, 3])
    announced = ArraysCache(2)
    announced.lengths = [2, 1]
    extended = ArraysCache(2)
    extended.extend(ArraysCache(2))
    forked = ArraysCache(2)
    forked.filter([0, 0])
    for cache in (
        arrays(state(2), None),
        ArraysCache(2, [0, 0]),
        ArraysCache(2, mx.array([0, 1])),
        ArraysCache.merge([ArraysCache(2), ArraysCache(2)]),
        prepared,
        announced,
        extended,
        forked,
    ):
        assert cache.batch_size == 2
        refused(cache, partial(cache.__setitem__, 1, state(3)), "slot 1 of 3 rows, but the cache holds 2 rows")
        cache[1] = state(2)
    # The only thing known may be replaced, and what was remembered with it goes too.
    cache = ArraysCache.merge([arrays(state(1)), arrays(state(1))])
    cache[0] = state(5)
    assert cache.batch_size == 5
    cache[0] = None
    assert cache.batch_size == 5
    cache.filter([4, 0])
    assert cache.batch_size == 2
    pending = arrays(state(2))
    pending.prepare(lengths=[3, 1])
    refused(pending, partial(pending.__setitem__, 0, state(3)), "slot 0 of 3 rows, but the cache holds 2 rows")
    both = arrays(state(2), None, left=[1, 0])
    refused(both, partial(both.__setitem__, 0, state(3)), "slot 0 of 3 rows, but the cache holds 2 rows")


def test_lengths_and_left_padding_are_arrays_of_host_numbers() -> None:
    cache = ArraysCache(1, left_padding=[0, 2])
    assert (ints(cache.left_padding), cache.lengths) == ([0, 2], None)
    cache.lengths = mx.array([5, 3])
    assert ints(cache.lengths) == [5, 3]
    held = cache.lengths
    held -= 1
    assert ints(cache.lengths) == [5, 3]
    cache.advance(1)
    assert (ints(cache.left_padding), ints(cache.lengths)) == ([0, 1], [4, 2])
    cache.left_padding = None
    cache.lengths = None
    assert (cache.left_padding, cache.lengths, cache.batch_size) == (None, None, 2)
    cache.left_padding = [3, 0]
    for name, numbers, words in (
        ("lengths", [2, 9], r"lengths \[2, 9\] are shorter than the left pads due, \[3, 0\]"),
        ("lengths", [4], "for 1 rows, but the batch holds 2"),
        ("lengths", [4, -1], "must not be negative"),
        ("left_padding", [1, 2, 3], "for 3 rows, but the batch holds 2"),
        ("left_padding", [1, -2], "must not be negative"),
        ("left_padding", 3, "must be a list"),
    ):
        refused(cache, partial(setattr, cache, name, numbers), words)
    cache.lengths = [4, 1]
    refused(cache, partial(setattr, cache, "left_padding", [0, 2]), r"shorter than the left pads due, \[0, 2\]")
    assert ArraysCache(1, []).batch_size == ArraysCache(1, None).batch_size == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [((-1,), "size must be at least 0"), ((1.5,), "whole number"), ((1, [0, -1]), "negative"), ((1, 3), "a list")],
)
def test_arrays_that_cannot_be(asked: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ArraysCache(*asked)


def test_a_mask_says_which_columns_are_tokens() -> None:
    cache = ArraysCache(1)
    assert cache.make_mask(3) is None
    cache = ArraysCache(1, [0, 2])
    assert seen(cache.make_mask(3)) == [[1, 1, 1], [0, 0, 1]]
    cache.prepare(lengths=[4, 3], right_padding=[0, 1])
    assert seen(cache.make_mask(2)) == [[1, 1], [0, 0]]
    assert seen(cache.make_mask(4)) == [[1, 1, 1, 1], [0, 0, 1, 0]]
    refused(cache, lambda: cache.make_mask(5), "5 columns, but 4 of those that prepare")
    refused(cache, lambda: cache.advance(5), "5 columns, but 4 of those that prepare")
    refused(cache, lambda: cache.make_mask(0), "N is 0")
    refused(cache, lambda: cache.advance(-1), "advance by -1")
    halves: Any = 1.5
    refused(cache, partial(cache.make_mask, halves), "whole number")
    cache.advance(0)
    cache.advance(3)
    assert (ints(cache.lengths), cache.left_padding) == ([1, 0], None)
    assert seen(cache.make_mask(1)) == [[1], [0]]
    cache.advance(1)
    assert ints(cache.lengths) == [0, 0]
    refused(cache, lambda: cache.make_mask(1), "1 columns, but 0 of those")
    cache.finalize()
    assert (cache.lengths, cache.make_mask(2)) == (None, None)
    cache.finalize()


def test_no_mask_where_a_chunk_has_no_pads() -> None:
    cache = ArraysCache(1)
    cache.prepare(lengths=[5, 3])
    assert cache.make_mask(3) is None
    assert seen(cache.make_mask(4)) == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_left_pads_outlast_the_end_of_a_prefill() -> None:
    cache = ArraysCache(1, [5, 0])
    cache.prepare(lengths=[7, 6])
    cache.advance(2)
    cache.finalize()
    assert (ints(cache.left_padding), cache.lengths) == ([3, 0], None)


def test_preparations() -> None:
    cache = ArraysCache(2, [0, 1])
    for given, words in (
        ({"lengths": [3]}, "for 1 rows, but the batch holds 2"),
        ({"right_padding": [0, -1]}, "must not be negative"),
        ({"right_padding": [0, 2]}, r"right_padding \[0, 2\] without lengths"),
        ({"lengths": [3, 3], "right_padding": [0, 1]}, "every row gets the same number"),
        ({"lengths": [3, 0]}, r"shorter than the left pads due, \[0, 1\]"),
        ({"lengths": [3, 2], "left_padding": [0, 2]}, r"shorter than the left pads due, \[0, 3\]"),
    ):
        refused(cache, partial(cache.prepare, **given), words)
    # Nothing is pending where no row has right pads.
    cache.prepare()
    cache.prepare(lengths=[3, 3], right_padding=mx.array([0, 0]))
    cache.prepare(right_padding=[0, 0])
    cache.prepare(left_padding=[1, 0])
    assert (cache.lengths, ints(cache.left_padding)) == (None, [1, 1])
    cache[0] = state(2)
    refused(cache, partial(cache.prepare, left_padding=[0, 0]), "slots are filled already")
    cache.prepare(lengths=[3, 2])
    refused(cache, cache.prepare, "padding is pending")
    refused(cache, partial(cache.trim, 1), "padding is pending")
    assert cache.trim(0) == 0


def test_a_fresh_cache_takes_any_number_of_rows() -> None:
    cache = ArraysCache(1)
    cache.prepare()
    refused(cache, partial(cache.prepare, lengths=[3, 1], right_padding=[0]), "for 1 rows, but the batch holds 2")
    refused(cache, partial(cache.prepare, lengths=[]), "for 0 rows, but the batch holds 1")
    cache.prepare(lengths=[3, 1])
    assert ints(cache.lengths) == [3, 1]


def test_merge_fills_what_some_rows_lack_with_zeros_d12() -> None:
    x, y = state(1), state(1, 5)
    batch = arrays(x, None).merge([arrays(x, None), ArraysCache(2), arrays(None, y)])
    assert batch.batch_size == 3
    assert equal(batch[0], mx.concatenate([x, mx.zeros((2, 3, 4))]))
    assert equal(batch[1], mx.concatenate([mx.zeros((2, 5)), y]))
    empty = ArraysCache.merge([ArraysCache(2)] * 3)
    assert (empty.batch_size, empty.cache, empty.empty()) == (3, [None, None], True)
    one = ArraysCache.merge((arrays(x, None),))
    assert one[1] is None
    assert equal(one[0], x)


def test_extract_of_slots_that_were_never_filled_d12() -> None:
    x = state(3)
    batch = arrays(x, None)
    batch.prepare(lengths=[3, 2, 1])
    for i in (1, -1, 0):
        row = batch.extract(i)
        assert equal(row.cache, [x[i : i + 1] if i >= 0 else x[2:], None])
        assert (row.lengths, row.left_padding, row.batch_size) == (None, None, 1)
    assert ArraysCache(2, [1, 2]).extract(1).left_padding is None
    refused(batch, partial(batch.extract, 3), r"extract rows \[3\], but the batch holds 3", IndexError)


def test_an_extracted_row_has_memory_of_its_own() -> None:
    others = mx.get_active_memory()
    batch = arrays(mx.ones((64, 1000, 100)))
    mx.eval(batch[0])
    before = mx.get_active_memory() - others
    row = batch.extract(3)
    mx.eval(row[0])
    del batch
    mx.synchronize()
    assert mx.get_active_memory() - others < before / 2
    restored = arrays(mx.ones((64, 1000, 100)))
    loaded = ArraysCache.from_state(([restored[0][5:6]], None, None))
    mx.eval(loaded[0])
    del restored
    mx.synchronize()
    assert mx.get_active_memory() - others < before / 2


def test_filter_keeps_forks_and_drops_rows_of_everything() -> None:
    x = state(3)
    cache = arrays(x, None, left=[0, 0, 4])
    cache.prepare(lengths=[6, 1, 5])
    cache.filter([2, 0, -1])
    assert equal(cache.cache, [x[mx.array([2, 0, 2])], None])
    assert (ints(cache.left_padding), ints(cache.lengths)) == ([4, 0, 4], [5, 6, 5])
    cache.filter(mx.array([0]))
    assert ints(cache.lengths) == [5]
    assert seen(cache.make_mask(6)) == [[0, 0, 0, 0, 1, 0]]
    refused(cache, lambda: cache.make_mask(7), "7 columns, but 6")
    refused(cache, partial(cache.filter, [1]), r"filter rows \[1\], but the batch holds 1 rows", IndexError)
    refused(cache, partial(cache.filter, [0.5]), "whole number")


def test_no_rows_and_back() -> None:
    x = state(2)
    for cache in (arrays(x, None), ArraysCache(2, [0, 1])):
        filled = cache[0] is not None
        cache.prepare(lengths=[3, 1])
        cache.filter([])
        assert (cache.batch_size, cache.empty(), cache.nbytes, cache.lengths) == (0, True, 0, None)
        assert cache.make_mask(3) is None
        cache.prepare(lengths=[], right_padding=[])
        cache.finalize()
        same(ArraysCache.from_state(cache.state), copy.deepcopy(cache))
        cache.extend(arrays(x, x))
        assert equal(cache.cache, [x, x])
        cache.filter([])
        other = arrays(state(1, 9), None)
        if filled:
            refused(cache, partial(cache.extend, other), r"slot 0 has rows of \(3, 4\) .* and of \(9,\)")


def test_extend_keeps_what_each_row_has_due_and_pending() -> None:
    x, y = state(1), state(2)
    cache, other = arrays(x, None), arrays(None, y, left=[0, 2])
    cache.prepare(lengths=[3], right_padding=[1])
    kept = fields(other)
    cache.extend(other)
    assert fields(other) == kept
    assert equal(cache[0], mx.concatenate([x, mx.zeros((2, 3, 4))]))
    assert equal(cache[1], mx.concatenate([mx.zeros((1, 3, 4)), y]))
    # mlx-lm would hide every column of the rows for which nothing was announced.
    assert (ints(cache.lengths), ints(cache.left_padding)) == ([3, 4, 4], [0, 0, 2])
    assert seen(cache.make_mask(4)) == [[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]]
    longer = ArraysCache(2)
    longer.prepare(lengths=[5, 2])
    cache.advance(1)
    loaded = ArraysCache.from_state(cache.state)
    assert (len(cache.state), ints(cache.state[2]), cache.state[3]) == (4, [2, -1, -1], 3)
    for each in (cache, loaded):
        each.extend(longer)
        assert ints(each.lengths) == [2, 5, 5, 5, 2]
    same(cache, loaded, (4, 1, 1))


def test_a_fresh_cache_extends_as_one_row() -> None:
    x = state(2)
    cache = ArraysCache(1)
    cache.extend(arrays(x))
    assert equal(cache[0], mx.concatenate([mx.zeros((1, 3, 4)), x]))
    cache.extend(ArraysCache(1))
    assert cache.batch_size == 4
    cache.extend(cache)
    assert cache.batch_size == 8


def test_merge_keeps_what_each_row_has_due_and_pending() -> None:
    a, b = ArraysCache(1, [2]), ArraysCache(1)
    b.prepare(lengths=[1], right_padding=[4])
    batch = ArraysCache.merge([a, b])
    assert (ints(batch.left_padding), ints(batch.lengths)) == ([2, 0], [5, 1])


def test_arrays_that_do_not_go_together() -> None:
    cache = arrays(state(1), None)
    for other, words in (
        (ArraysCache(3), "caches of 2 and 3 slots"),
        (arrays(state(1, 5), None), r"slot 0 has rows of \(3, 4\) .*float32 and of \(5,\)"),
        (arrays(state(1).astype(mx.float16), None), "float32 and of .*float16"),
    ):
        refused(cache, partial(cache.extend, other), f"extend.*{words}")
        with pytest.raises(ValueError, match=f"merge.*{words}"):
            ArraysCache.merge([cache, other])
    refused(cache, partial(cache.extend, KVCache()), "extend an ArraysCache by a KVCache")
    for caches, words in (
        ([], "merge of no caches"),
        ([cache, KVCache()], "merge of ArraysCache and KVCache"),
        ([cache, arrays(state(2), None)], "a cache with 2 rows"),
        ([ArraysCache(2, [0, 0])], "a cache with 2 rows"),
        (3, "takes a list"),
    ):
        with pytest.raises(ValueError, match=words):
            ArraysCache.merge(caches)  # type: ignore[arg-type]


def test_states_of_arrays() -> None:
    x = state(2)
    assert ArraysCache(2).state == ([None, None], None, None)
    assert equal(arrays(x, None).state, ([x, None], None, None))
    assert equal(ArraysCache(1, [3, 1]).state, ([None], mx.array([3, 1]), None))
    # Rows without a slot that is filled would be forgotten without their padding.
    assert equal(ArraysCache.merge([ArraysCache(1)] * 2).state, ([None], mx.array([0, 0]), None))
    cache = arrays(x)
    cache.prepare(lengths=[3, 1])
    assert equal(cache.state, ([x], None, mx.array([3, 1])))
    cache.filter([1])
    assert equal(cache.state, ([x[1:]], None, mx.array([1]), 3))


ANNOUNCED = ("prepare", {"lengths": [5, 2]})
PENDING: list[list[tuple[str, dict[str, Any]]]] = [
    [],
    [ANNOUNCED],
    [ANNOUNCED, ("advance", {"N": 3})],
    [ANNOUNCED, ("advance", {"N": 5})],
    [ANNOUNCED, ("filter", {"batch_indices": [1]})],
    [ANNOUNCED, ("extend", {"other": ArraysCache(2)})],
    [("filter", {"batch_indices": []})],
    [("filter", {"batch_indices": [1, 1, 0]})],
    [("advance", {"N": 1})],
]


@pytest.mark.parametrize("calls", PENDING)
@pytest.mark.parametrize("filled", ["none", "one", "both"])
@pytest.mark.parametrize("left", [None, [0, 2]])
def test_everything_pending_is_part_of_the_state(calls: list[Any], filled: str, left: list[int] | None) -> None:
    cache = ArraysCache.merge([ArraysCache(2), ArraysCache(2)]) if left is None else ArraysCache(2, left)
    if filled != "none":
        cache[1] = state(2)
    if filled == "both":
        cache[0] = state(2, 7)
    for name, given in calls:
        getattr(cache, name)(**given)
    loaded = ArraysCache.from_state(list(cache.state))
    mine = copy.deepcopy(cache)
    mine.state = mine.state
    same(copy.deepcopy(cache), mine, (1, 1, 1, 1, 1, 1))
    for each in (cache, loaded):
        each.extend(ArraysCache(2, [1]))
        if each.batch_size > 1:
            each.filter([1, 0])
    same(cache, loaded, (2, 1, 1, 1, 1))
    cache.finalize()
    loaded.finalize()
    same(cache, loaded)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], r"\(slots, left_padding, lengths\) and perhaps \(columns to come\), not 0 elements"),
        ("abc", "not str"),
        ((None, None, None), "slots are a list of arrays or None, not NoneType"),
        (([3], None, None), "slot 0 must be an mx.array or None, not int"),
        (([mx.array(1.0)], None, None), "rows on axis 0"),
        (([mx.ones((2, 3)), mx.ones((1, 3))], None, None), r"slots of \[1, 2\] rows"),
        (([mx.ones((2, 3))], [0], None), "left_padding is for 1 rows, not 2"),
        (([mx.ones((2, 3))], None, [1, 2, 3]), "lengths is for 3 rows, not 2"),
        (([None], [0, 0], [1]), "lengths is for 1 rows, not 2"),
        (([None], 3, None), "left_padding is one number a row"),
        (([None], mx.array([0.5]), None), "whole numbers"),
        (([None], [3, 0], [2, 5]), r"lengths \[2, 5\] are shorter than the left pads due, \[3, 0\]"),
        (([None], None, [2, 5], 4), "columns to come must be at least 5, not 4"),
        (([None], None, [2, -2], 4), "lengths must be at least -1"),
        (([None], None, None, 4), "columns to come without lengths"),
    ],
)
def test_states_of_arrays_that_are_refused(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ArraysCache.from_state(given)
    cache = arrays(state(2), left=[0, 1])
    refused(cache, partial(setattr, cache, "state", given), words)


def test_nothing_is_read_back_from_the_device() -> None:
    """Inside a transformation an array has no value to read: whoever reads one is found out."""

    def steps(x: mx.array) -> list[mx.array]:
        kept: list[Any] = []
        cache = arrays(x, None).merge([arrays(x[:1], None), ArraysCache(2)])
        cache.prepare(lengths=[3, 1])
        kept.append(cache.make_mask(2))
        cache[1] = x
        cache.advance(2)
        cache.extend(arrays(x, x))
        cache.filter([0, 0, 3])
        kept += [*cache.state[0], cache.extract(1)[0], cache.lengths, cache.make_mask(1)]
        cache.finalize()
        for make in COLUMNS:
            each = make()
            keys = mx.broadcast_to(x[:, None, None, :1], (2, 1, 3, D)) + 0
            kept += [*each.update_and_fetch(keys, -keys)]
            if isinstance(each, ChunkedKVCache):
                each.maybe_trim_front()
            elif not isinstance(each, QuantizedKVCache):
                kept.append(each.make_mask(2, return_array=True))
            each.trim(1)
            # Other values: mx.compile of MLX 0.32 fails on two quantizations of the same array.
            kept += [*each.update_and_fetch(keys * 2, keys * 3)]
            assert each.nbytes
        lists = CacheList(arrays(x), BatchKVCache([0, 1]))
        lists[1].update_and_fetch(keys, keys)
        lists.extend(lists)
        lists.filter([1, 2])
        kept += [lists.extract(0)[0][0], *lists[1].keys_and_values()]
        growing = KVCache()
        growing.update_and_fetch(keys, -keys)
        kept += growing.to_quantized(32, 4).keys_and_values()
        return flat(kept)

    outputs = mx.compile(steps)(mx.random.normal((2, 4)))
    mx.eval(outputs)
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda x: x * x[0].item())(mx.ones(2))


def flat(tree: Any) -> list[mx.array]:
    if isinstance(tree, (list, tuple)):
        return [x for each in tree for x in flat(each)]
    return [] if tree is None else [tree]


# --- lists of caches -----------------------------------------------------------------------------


def test_children_are_reached_by_number() -> None:
    a, b = ArraysCache(1), KVCache()
    cache = CacheList(a, b)
    assert cache.caches == (a, b)
    assert (cache[0], cache[1], cache[-1]) == (a, b, b)
    first, second = cache
    assert (first, second) == (a, b)
    with pytest.raises(IndexError):
        cache[2]
    feed(b, 3)
    assert (cache.size(), cache.empty(), cache.nbytes) == (3, False, b.nbytes)
    assert repr(cache) == f"CacheList({a!r}, {b!r})"
    with pytest.raises(ValueError, match="child 1 of a CacheList is a int"):
        CacheList(a, 3)  # type: ignore[arg-type]


def test_a_list_of_no_caches_works_everywhere() -> None:
    cache = CacheList()
    cache.filter([0])
    cache.extend(CacheList())
    cache.prepare(lengths=[1, 2])
    cache.finalize()
    assert cache.is_trimmable()
    assert cache.extract(0).caches == cache.merge([cache, cache]).caches == ()
    assert CacheList.from_state([]).caches == ()
    assert cache.state == []


def test_what_a_list_can_give_back_is_what_all_can() -> None:
    cache = feed(CacheList(KVCache(), CacheList(RotatingKVCache(4))), 6, 1)
    assert (cache.trim_limit(), cache.can_trim(7), cache.is_trimmable()) == (1, True, False)
    assert not cache.can_trim(3)  # the first child could
    refused(cache, partial(cache.trim, 3), r"trim 3, but child 1, CacheList\(Rotating.*can drop at most 1 tokens")
    assert (cache.trim(1), cache[0].offset, cache[1][0].offset) == (1, 6, 6)
    hybrid = feed(CacheList(KVCache(), ArraysCache(1)), 3)
    refused(hybrid, partial(hybrid.trim, 1), "trim 1, but child 1, ArraysCache.*at most 0")
    assert (hybrid.trim(0), hybrid.is_trimmable()) == (0, False)


def test_rows_come_and_go_in_every_child() -> None:
    solo = [CacheList(ArraysCache(2), CacheList(KVCache()), RotatingKVCache(4), KVCache()) for _ in range(3)]
    feed(solo[0], 5)
    feed(solo[2], 2)
    batch = solo[0].merge(solo)
    assert [type(c).__name__ for c in batch.caches] == [
        "ArraysCache", "CacheList", "BatchRotatingKVCache", "BatchKVCache"
    ]  # fmt: skip
    assert ints(batch[3].offset) == ints(batch[1][0].offset) == [5, 0, 2]
    assert equal(batch[0][1][2:], solo[2][0][1])
    batch.prepare(lengths=[1, 3, 2], right_padding=[2, 0, 1])
    feed(batch, 3)
    batch.finalize()
    batch.filter(iter([1, 2]))  # type: ignore[arg-type]
    other = feed(batch_list(0), 4)
    kept = fields(other)
    batch.extend(other)
    assert fields(other) == kept
    assert ints(batch[3].offset) == ints(batch[2].offset) == [3, 4, 4]
    assert batch[0].batch_size == 3
    row = batch.extract(1)
    assert [type(c).__name__ for c in row.caches] == ["ArraysCache", "CacheList", "RotatingKVCache", "KVCache"]
    assert row[3].offset == row[1][0].offset == 4
    same(batch, CacheList.from_state(batch.state))
    batch.filter([])
    assert batch.empty()
    batch.extend(other)


def test_what_a_late_child_refuses_leaves_every_child_as_it_was() -> None:
    """The last child is a step behind: it refuses what the others accept."""
    cache = feed(batch_list(0, 1), 3)
    last = cache.caches[-1]
    longer = feed(batch_list(0, 1), 2)
    alien = feed(batch_list(0), 2)
    alien.caches[-1].filter([])
    alien.caches[-1].extend(BatchKVCache([0]))
    wide = BatchKVCache([0])
    wide.update_and_fetch(mx.ones((1, 7, 1, 4)), mx.ones((1, 7, 1, 4)))
    alien.caches = (*alien.caches[:-1], wide)
    refused(cache, partial(cache.extend, alien), "child 3, BatchKVCache: extend: caches of")
    last.prepare(lengths=[2, 1])
    refused(cache, partial(cache.prepare, lengths=[2, 1]), "child 3, BatchKVCache: prepare while padding is pending")
    refused(cache, partial(cache.trim, 1), "child 0, ArraysCache")
    cache.finalize()
    last.extend(longer.caches[-1])
    refused(cache, partial(cache.prepare, lengths=[2, 1]), r"child 3, BatchKVCache: lengths \[2, 1\] is for 2 rows")
    last.filter([0])
    refused(cache, partial(cache.filter, [0, 1]), r"child 3, BatchKVCache: filter rows \[0, 1\]", IndexError)
    refused(cache, partial(cache.extract, 1), "child 3, BatchKVCache: extract rows", IndexError)
    inner = CacheList(batch_list(0, 1), last)
    feed(inner.caches[0], 2)
    refused(inner, partial(inner.filter, [1]), "child 1, BatchKVCache", IndexError)


def test_what_is_interrupted_leaves_every_child_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: BatchKVCache) -> None:
        self._pending = None
        raise KeyboardInterrupt

    cache = batch_list(0, 0)
    cache.prepare(lengths=[3, 1])
    before = fields(cache)
    monkeypatch.setattr(BatchKVCache, "finalize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.finalize()
    assert fields(cache) == before


def test_children_that_lack_an_operation() -> None:
    cache = feed(CacheList(ArraysCache(1), KVCache()), 2)
    for call, name in (
        (partial(cache.filter, [0]), "filter"),
        (partial(cache.extract, 0), "extract"),
        (partial(cache.extend, copy.deepcopy(cache)), "extend"),
        (partial(cache.prepare, lengths=[1]), "prepare"),
        (cache.finalize, "finalize"),
    ):
        refused(cache, call, f"{name}: child 1 is a KVCache, which has none")
    chunked = CacheList(KVCache(), ChunkedKVCache(4))
    with pytest.raises(ValueError, match="merge: child 1 is a ChunkedKVCache, which has none"):
        chunked.merge([chunked, chunked])


def test_lists_that_do_not_go_together() -> None:
    cache = batch_list(0)
    swapped = CacheList(*reversed(cache.caches))
    for other, words in (
        (CacheList(), r"and one of \[\]"),
        (swapped, "extend a CacheList of .* and one of"),
        (ArraysCache(2), "extend a CacheList by a ArraysCache"),
    ):
        refused(cache, partial(cache.extend, other), words)
    one, two = CacheList(KVCache()), CacheList(RotatingKVCache(4))
    for caches, words in (
        ([], "merge of no caches"),
        ([one, KVCache()], "merge of CacheList and KVCache"),
        ([one, two], r"merge a CacheList of \['KVCache'\] and one of \['RotatingKVCache'\]"),
        ([one, CacheList(KVCache(), KVCache())], "merge a CacheList of"),
        ([two, CacheList(RotatingKVCache(5))], r"child 0, RotatingKVCache: merge of rings of max_size \[4, 5\]"),
    ):
        with pytest.raises(ValueError, match=words):
            CacheList.merge(caches)  # type: ignore[arg-type]
    refused(cache, partial(cache.filter, "0"), "list of whole numbers")


def test_states_of_lists() -> None:
    cache = feed(CacheList(ArraysCache(1), CacheList(KVCache())), 2)
    (arrays_state, arrays_name), (list_state, list_name) = cache.state
    assert (arrays_name, list_name) == ("ArraysCache", "CacheList")
    assert equal(arrays_state, cache[0].state)
    assert equal(list_state, [(cache[1][0].state, "KVCache")])
    same(CacheList.from_state(tuple(map(list, cache.state))), cache)


def nested(depth: int) -> Any:
    made: Any = []
    for _ in range(depth):
        made = [(made, "CacheList")]
    return made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ab", r"a list of \(state, class name\), not str"),
        (None, "not NoneType"),
        ([3], r"child 0 is not \(state, class name\)"),
        ([((None, None, 0),)], r"child 0 is not \(state, class name\)"),
        (
            [((None, None, 0), "KVCache"), ((), "Cache")],
            "child 1, Cache: 'Cache' is no kind of cache; known are ArraysCache, BatchKVCache, .* RotatingKVCache$",
        ),
        ([([], 3)], "3 is no kind of cache"),
        ([([], ["KVCache"])], "is no kind of cache"),
        ([([], "os")], "'os' is no kind"),
        ([((None, None, 1), "KVCache")], "child 0, KVCache: KVCache state: offset must be from 0 to 0, not 1"),
        (nested(2000), "nested more than 16 deep"),
        ([([], mx.array([1, 2]))], "is no kind of cache"),
    ],
)
def test_states_of_lists_that_are_refused(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CacheList.from_state(given)
    cache = feed(CacheList(KVCache()), 2)
    refused(cache, partial(setattr, cache, "state", given), words)


def test_lists_within_lists() -> None:
    cache = CacheList.from_state(nested(15))
    for _ in range(15):
        cache = cache[0]
    assert cache.caches == ()


# --- prompt caches -------------------------------------------------------------------------------


class Model:
    """A model of one layer a cache."""

    def __init__(self, *caches: Any) -> None:
        self.make_cache = lambda: caches


def foreign(name: str, **attributes: Any) -> Any:
    """A cache of another library with this class name."""
    return type(name, (), attributes)()


def twins(size: int | None, *caches: Any) -> str:
    return repr(mlximpl.make_prompt_cache(Model(*caches), size))


OWN = [
    foreign("ArraysCache", cache=[None] * 3, left_padding=None),
    foreign("ArraysCache", cache=[None], left_padding=mx.array([0, 2])),
    foreign("ChunkedKVCache", chunk_size=8),
    foreign("CacheList", caches=[foreign("KVCache"), foreign("CacheList", caches=())]),
]


def test_a_models_caches_become_ours() -> None:
    made = mlximpl.make_prompt_cache(
        Model(
            *OWN,
            foreign("ConcatenateKVCache"),
            foreign("QuantizedKVCache", group_size=32, bits=3),
            foreign("BatchKVCache", left_padding=mx.array([1, 0])),
            foreign("BatchRotatingKVCache", max_size=8, left_padding=mx.array([1, 0])),
        )
    )
    assert [type(c) is KINDS[type(c).__name__] for c in made] == [True] * 8
    assert repr(made) == (
        "[ArraysCache(0 of 3 slots filled, batch_size=1), ArraysCache(0 of 1 slots filled, batch_size=2), "
        "ChunkedKVCache(chunk_size=8, start_position=0, offset=0), CacheList(KVCache(offset=0), CacheList()), "
        "ConcatenateKVCache(offset=0), QuantizedKVCache(offset=0, group_size=32, bits=3), "
        "BatchKVCache(columns=0, offset=[-1, 0]), "
        "BatchRotatingKVCache(max_size=8, columns=0, offset=[-1, 0])]"
    )


def test_a_bound_is_honoured_in_every_kind_or_refused() -> None:
    assert "CacheList(RotatingKVCache(max_size=8, keep=4, offset=0), CacheList())" in twins(8, *OWN)
    for cache, words in (
        (foreign("ChunkedKVCache", chunk_size=9), "cache 0 of the model is a ChunkedKVCache of 9, above max_kv_size 8"),
        (foreign("ConcatenateKVCache"), "cache 0 of the model is a ConcatenateKVCache, which keeps every token"),
        (foreign("QuantizedKVCache", group_size=32, bits=3), "QuantizedKVCache, which keeps every token"),
        (foreign("BatchKVCache", left_padding=[0]), "BatchKVCache, which keeps every token"),
        (foreign("BatchRotatingKVCache", max_size=9, left_padding=[0]), "a ring of 9, above max_kv_size 8"),
        (
            foreign("CacheList", caches=[foreign("KVCache"), foreign("RotatingKVCache", max_size=9, keep=0)]),
            "cache 0.1 of the model is a ring of 9, above max_kv_size 8",
        ),
        (foreign("CacheList", caches=[foreign("TokenBuffer")]), "cache 0.0 of the model is a TokenBuffer"),
    ):
        with pytest.raises(ValueError, match=words):
            twins(8, cache)


def test_prompt_caches_are_trimmed_all_or_none() -> None:
    layers = [feed(KVCache(), 5), feed(CacheList(KVCache(), ChunkedKVCache(4)), 5)]
    assert mlximpl.can_trim_prompt_cache(layers)
    assert mlximpl.trim_prompt_cache(layers, 2) == 2
    layers.append(feed(ArraysCache(1), 3))
    before = fields(layers)
    assert not mlximpl.can_trim_prompt_cache(layers)
    with pytest.raises(ValueError, match="layer 2, ArraysCache"):
        mlximpl.trim_prompt_cache(layers, 1)
    assert fields(layers) == before


# --- beside mlx-lm -------------------------------------------------------------------------------


def test_columns_as_mlx_lm_has_them() -> None:
    upstream = pytest.importorskip("mlx_lm.models.cache")
    makes: list[Make] = [partial(QuantizedKVCache, 32, 8), partial(QuantizedKVCache, 32, 4), *COLUMNS[-2:]]
    for make in makes:
        ours = make()
        kind = getattr(upstream, type(ours).__name__)
        theirs = kind(*make.args) if isinstance(make, partial) else kind()
        for n in (3, 1, 1, 255, 4, 1):
            if isinstance(ours, ChunkedKVCache):
                ours.maybe_trim_front()
                theirs.maybe_trim_front()
                assert ours.start_position == theirs.start_position
            else:
                assert equal(ours.make_mask(n), theirs.make_mask(n, return_array=False, window_size=None))
            new = columns(n)
            assert equal(ours.update_and_fetch(*new), tree_map(lambda x: x, theirs.update_and_fetch(*new)))
            assert (ours.offset, ours.is_trimmable()) == (theirs.offset, ours.is_trimmable())


def test_quantizing_what_is_there_as_mlx_lm_does() -> None:
    upstream = pytest.importorskip("mlx_lm.models.cache")
    new, more = columns(5), columns(2)
    for bits in (4, 8):
        quantized = []
        for cache in (KVCache(), upstream.KVCache()):
            cache.update_and_fetch(*new)
            quantized.append(cache.to_quantized(group_size=32, bits=bits))
        fetched = [cache.update_and_fetch(*more) for cache in quantized]
        assert equal([list(parts) for parts in fetched[0]], [list(parts) for parts in fetched[1]])
        assert mx.allclose(dequantized(fetched[0][0], quantized[0])[:, :, :5], new[0], atol=0.5)


def test_states_come_from_mlx_lm_and_go_there() -> None:
    upstream = pytest.importorskip("mlx_lm.models.cache")
    makes: list[Make] = [partial(QuantizedKVCache, 32, 8), *COLUMNS[-2:]]
    for make in makes:
        ours = feed(make(), 3, 2)
        if isinstance(ours, ChunkedKVCache):
            ours.maybe_trim_front()
        theirs = getattr(upstream, type(ours).__name__).from_state(ours.state)
        back = type(ours).from_state(theirs.state)
        new = columns(1)
        fetched = [cache.update_and_fetch(*new) for cache in (ours, back, theirs)]
        assert equal(tree_map(lambda x: x, fetched[0]), fetched[1])
        assert equal(fetched[0], tree_map(lambda x: x, fetched[2]))


def test_recurrent_states_come_from_mlx_lm_and_go_there() -> None:
    upstream = pytest.importorskip("mlx_lm.models.cache")
    x = state(2)
    theirs = upstream.ArraysCache(2, [0, 1])
    theirs[0] = x
    theirs.prepare(lengths=[5, 1])
    theirs.advance(2)
    assert (theirs.left_padding.tolist(), theirs.lengths.tolist()) == ([-2, -1], [3, -1])
    ours = ArraysCache.from_state(theirs.state)
    assert (ints(ours.lengths), ours.left_padding) == ([3, 0], None)
    assert equal(ours.make_mask(3), theirs.make_mask(3))
    theirs.advance(3)
    assert ints(ArraysCache.from_state(theirs.state).lengths) == [0, 0]
    assert equal(upstream.ArraysCache.from_state(ours.state).make_mask(3), ours.make_mask(3))
    merged = upstream.ArraysCache.merge([upstream.ArraysCache(2)] * 3)
    assert ArraysCache.from_state(merged.state).batch_size == 3
    lists = upstream.CacheList(upstream.ArraysCache(2), upstream.KVCache())
    lists[1].update_and_fetch(*columns(3))
    same(CacheList.from_state(lists.state), CacheList.from_state(CacheList.from_state(lists.state).state))
    back = upstream.CacheList.from_state(CacheList.from_state(lists.state).state)
    assert equal(back.caches[1].state, CacheList.from_state(lists.state)[1].state)


def test_recurrent_rows_as_mlx_lm_moves_them() -> None:
    upstream = pytest.importorskip("mlx_lm.models.cache")

    def session(kind: Any) -> Any:
        mx.random.seed(5)
        rows = []
        for _ in range(3):
            cache = kind(2)
            cache[0], cache[1] = state(1), state(1, 6)
            rows.append(cache)
        batch = rows[0].merge(rows)
        shown = [batch[0], batch[1], batch.batch_size]
        batch.prepare(lengths=[4, 2, 1])
        for n in (1, 2, 1):
            shown.append(batch.make_mask(n))
            shown.append(mx.maximum(batch.lengths, 0))
            batch.advance(n)
        batch.finalize()
        batch.filter([2, 0])
        batch.extend(rows[1])
        return [*shown, batch[0], batch[1], batch.extract(1)[0], batch.nbytes, batch.make_mask(2)]

    ours, theirs = session(ArraysCache), session(upstream.ArraysCache)
    masks = (3, 5)  # where no row has a pad, ours is None and mlx-lm's is all true
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert equal(a, b) or (i in masks and a is None and b.all().item())


MODELS: dict[str, dict[str, Any]] = {
    "mamba2": {},
    "lfm2": {},
    "qwen3_next": {},
    "kimi_linear": {},
    "falcon_h1": {},
    "llama4": {"attention_chunk_size": 4},
}
"""Of the zoo: by name, what is asked beside its sizes."""


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """Models run there: MLX's GPU kernels differ with the shape of a batch, and CUDA lacks some quantized products."""
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def run(model: Any, caches: list[Any], tokens: mx.array, *ns: int) -> mx.array:
    """The logits of tokens (B, N) fed n at a time."""
    parts, at = [], 0
    for n in ns:
        parts.append(model(tokens[:, at : at + n], cache=caches))
        mx.eval(parts[-1], [cache.state for cache in caches])
        at += n
    return mx.concatenate(parts, axis=1)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunks", [(9,), (4, 5), (1, 4, 4)])
def test_a_row_in_a_ragged_batch_of_a_real_model_answers_as_alone(name: str, chunks: tuple[int, ...]) -> None:
    pytest.importorskip("mlx_lm")
    model = make_model(name, **MODELS[name])
    tokens = mx.random.randint(0, 50, (3, 14))
    lengths = [9, 4, 7]
    alone = [run(model, model.make_cache(), tokens[r : r + 1], n, 1, 1, 1) for r, n in enumerate(lengths)]
    solo = [mlximpl.make_prompt_cache(model) for _ in lengths]
    for r, n in enumerate(lengths):
        caches = copy.deepcopy(solo[r])
        assert mx.allclose(run(model, caches, tokens[r : r + 1], n, 1, 1, 1), alone[r], atol=1e-4)
    if name == "llama4" or (name in ("mamba2", "falcon_h1") and len(chunks) > 1):
        # mlx-lm does not batch llama4; its recurrence reads beyond a chunk that is shorter than a length and than 256.
        return
    batch = [cache.merge([row[i] for row in solo]) for i, cache in enumerate(solo[0])]
    for cache in batch:
        cache.prepare(lengths=lengths, right_padding=[9 - n for n in lengths])
    prefill = run(model, batch, tokens[:, :9], *chunks)
    for cache in batch:
        cache.finalize()
    steps = mx.stack([tokens[r, n : n + 3] for r, n in enumerate(lengths)])
    decoded = run(model, batch, steps, 1, 1, 1)
    for r, n in enumerate(lengths):
        got = mx.concatenate([prefill[r, :n], decoded[r]])
        assert mx.allclose(got, alone[r][0], atol=1e-4)
    for cache in batch:
        cache.filter([2])
    more = [cache.extract(0) for cache in batch]
    new = mx.random.randint(0, 50, (1, 2))
    assert mx.allclose(run(model, batch, new, 1, 1), run(model, more, new, 1, 1), atol=1e-4)


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX has no quantized product of a few rows on CUDA")
@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_generating_with_a_quantized_cache(bits: int) -> None:
    generate = pytest.importorskip("mlx_lm.generate")
    model = make_model("llama", hidden_size=128, num_hidden_layers=2, num_key_value_heads=4, head_dim=32)

    def answer(caches: list[Any]) -> list[Any]:
        prompt = mx.array([1, 2, 3, 4, 5])
        steps = generate.generate_step(
            prompt, model, max_tokens=6, prompt_cache=caches, quantized_kv_start=0, kv_bits=bits, kv_group_size=32
        )
        return [list(map(mx.array, step)) for step in steps]

    ours = mlximpl.make_prompt_cache(model)
    told = answer(ours)
    assert [type(cache) for cache in ours] == [QuantizedKVCache] * 2
    if bits in (4, 8):
        assert equal(told, answer(importlib.import_module("mlx_lm.models.cache").make_prompt_cache(model)))
