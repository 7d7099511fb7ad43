"""Caches of mlx-lm as mlximpl's and back: going on is going on with the original."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import mlx.core as mx
import pytest

import mlximpl
from mlximpl import from_mlx_lm, to_mlx_lm

upstream = pytest.importorskip("mlx_lm.models.cache")

Namespace = Any  # mlximpl, or mlx-lm's module of caches
Make = Callable[[Namespace], Any]
HEADS, SIZE = 2, 64


def columns(rows: int, n: int, first: int = 0) -> mx.array:
    """Keys (B, H, N, D), no two numbers alike."""
    count = rows * HEADS * n * SIZE
    return (first * 1000 + mx.arange(count, dtype=mx.float32)).reshape(rows, HEADS, n, SIZE) / 64


def feed(cache: Any, *counts: int, rows: int = 1, first: int = 1) -> Any:
    for i, n in enumerate(counts):
        keys = columns(rows, n, first + 10 * i)
        cache.update_and_fetch(keys, -keys)
    return cache


def solo(kind: str, *arguments: int, fed: tuple[int, ...] = (), trimmed: int = 0) -> Make:
    def make(of: Namespace) -> Any:
        cache = feed(getattr(of, kind)(*arguments), *fed)
        if trimmed:
            cache.trim(trimmed)
        return cache

    return make


def merged(kind: str, *arguments: int, fed: tuple[tuple[int, ...], ...], then: tuple[int, ...] = ()) -> Make:
    def make(of: Namespace) -> Any:
        rows = [feed(getattr(of, kind)(*arguments), *counts, first=100 * i) for i, counts in enumerate(fed)]
        return feed(rows[0].merge(rows), *then, rows=len(rows), first=500)

    return make


def padded(kind: str, *arguments: Any, then: tuple[int, ...] = (), trimmed: int = 0) -> Make:
    def make(of: Namespace) -> Any:
        batch = feed(getattr(of, kind)(*arguments), *then, rows=len(arguments[-1]))
        if trimmed:
            batch.trim(trimmed)
        return batch

    return make


def ragged(made: Make, lengths: list[int] | None, right: list[int], chunks: tuple[int, ...] = ()) -> Make:
    def make(of: Namespace) -> Any:
        batch = made(of)
        batch.prepare(lengths=lengths, right_padding=right)
        return feed(batch, *chunks, rows=len(right), first=700)

    return make


SOLO: dict[str, Make] = {
    "growing, empty": solo("KVCache"),
    "growing": solo("KVCache", fed=(3, 1)),
    "growing, at the end of its buffer": solo("KVCache", fed=(256,)),
    "growing, several buffers": solo("KVCache", fed=(300, 1, 1)),
    "growing, trimmed": solo("KVCache", fed=(5,), trimmed=2),
    "growing, trimmed to nothing": solo("KVCache", fed=(5,), trimmed=5),
    "concatenating, empty": solo("ConcatenateKVCache"),
    "concatenating": solo("ConcatenateKVCache", fed=(3, 1)),
    "ring, empty": solo("RotatingKVCache", 8),
    "ring, short": solo("RotatingKVCache", 8, fed=(3, 1)),
    "ring, stepped to the end": solo("RotatingKVCache", 4, fed=(1,) * 4),
    "ring, wrapped": solo("RotatingKVCache", 4, fed=(1,) * 7),
    "ring, wrapped, at its end": solo("RotatingKVCache", 4, fed=(1,) * 8),
    "ring, longer than it is": solo("RotatingKVCache", 4, fed=(3, 9)),
    "ring, cut back": solo("RotatingKVCache", 4, fed=(9, 1)),
    "ring, trimmed": solo("RotatingKVCache", 8, fed=(3, 1, 1), trimmed=2),
    "ring, more than a step": solo("RotatingKVCache", 300, fed=(1, 257, 1)),
    "ring with sinks, wrapped": solo("RotatingKVCache", 6, 2, fed=(1,) * 10),
    "ring with sinks, longer": solo("RotatingKVCache", 6, 2, fed=(3, 12)),
}
QUANTIZED: dict[str, Make] = {
    "quantized, empty": solo("QuantizedKVCache", 32, 4),
    "quantized": solo("QuantizedKVCache", 32, 8, fed=(3, 1)),
    "quantized, several buffers": solo("QuantizedKVCache", 64, 4, fed=(300, 1)),
    "quantized, trimmed": solo("QuantizedKVCache", 64, 2, fed=(5,), trimmed=2),
}
BATCHES: dict[str, Make] = {
    "batch, empty": padded("BatchKVCache", [0, 0]),
    "batch, left pads due": padded("BatchKVCache", [2, 0]),
    "batch, some left pads due": padded("BatchKVCache", [3, 0], then=(2,)),
    "batch, padded": padded("BatchKVCache", [2, 0], then=(5, 1)),
    "batch, trimmed": padded("BatchKVCache", [1, 0], then=(5,), trimmed=2),
    "batch, merged": merged("KVCache", fed=((3,), (5, 1), ()), then=(1, 1)),
    "batch of rings, empty": padded("BatchRotatingKVCache", 4, [0, 0]),
    "batch of rings, left pads due": padded("BatchRotatingKVCache", 8, [2, 0]),
    "batch of rings, short": merged("RotatingKVCache", 8, fed=((2,), (3, 1)), then=(1,)),
    "batch of rings, wrapped with pads": merged("RotatingKVCache", 8, fed=((2,), (7,)), then=(1, 1, 1)),
    "batch of rings, pads evicted long ago": merged("RotatingKVCache", 4, fed=((1,), (3,)), then=(1,) * 9),
    "batch of rings, merged when wrapped": merged("RotatingKVCache", 4, fed=((9,), (1,) * 6, (2,)), then=(1,)),
    "batch of rings, longer than they are": merged("RotatingKVCache", 4, fed=((9,), (2,)), then=(6,)),
    "batch of rings, trimmed": padded("BatchRotatingKVCache", 8, [1, 0], then=(5,), trimmed=2),
}
MERGED, MERGED_RINGS = merged("KVCache", fed=((3,), (5,))), merged("RotatingKVCache", 4, fed=((3,), (7,)))
PENDING: dict[str, tuple[Make, tuple[int, ...]]] = {
    "batch, announced": (ragged(padded("BatchKVCache", [0, 0]), [5, 2], [0, 3]), (5,)),
    "batch, announced, fed in chunks": (ragged(padded("BatchKVCache", [0, 0]), [6, 2], [0, 4]), (2, 3, 1)),
    "batch, held and announced": (ragged(MERGED, [5, 2], [0, 3]), (3, 2)),
    "batch, lengths not announced": (ragged(MERGED, None, [0, 3]), (5,)),
    "batch, one chunk fed": (ragged(MERGED, [9, 3], [0, 6], (4,)), (4, 1)),
    "batch, all fed": (ragged(MERGED, [2, 5], [3, 0], (5,)), ()),
    "batch, left and right": (ragged(padded("BatchKVCache", [2, 0]), [5, 2], [0, 3], (5,)), ()),
    "batch of rings, announced": (ragged(padded("BatchRotatingKVCache", 4, [0, 0]), [5, 2], [0, 3]), (5,)),
    "batch of rings, held and announced": (ragged(MERGED_RINGS, [5, 2], [0, 3]), (3, 2)),
    "batch of rings, one chunk fed": (ragged(MERGED_RINGS, [9, 3], [0, 6], (4,)), (3, 2)),
    "batch of rings, all fed": (ragged(MERGED_RINGS, [2, 5], [3, 0], (5,)), ()),
    "batch of rings, no row without pads": (ragged(MERGED_RINGS, [5, 2], [1, 4]), (3, 3)),
}


def theirs_to_ours(make: Make) -> tuple[Any, Any]:
    original = make(upstream)
    return original, from_mlx_lm(original)


def ours_to_theirs(make: Make) -> tuple[Any, Any]:
    original = make(mlximpl)
    return original, to_mlx_lm(original)


def there_and_back(make: Make) -> tuple[Any, Any]:
    original = make(upstream)
    return original, to_mlx_lm(from_mlx_lm(original))


ALL_WAYS = pytest.mark.parametrize("convert", [theirs_to_ours, ours_to_theirs, there_and_back])
BOTH_WAYS = pytest.mark.parametrize("convert", [theirs_to_ours, ours_to_theirs])


def named(cases: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


def numbers(array: Any) -> Any:
    return array.tolist() if isinstance(array, mx.array) else array


def visible(mask: Any, rows: int, n: int, width: int) -> mx.array:
    """Which columns each query sees, (B, N, T)."""
    if mask is None or isinstance(mask, str):
        assert mask == "causal" or n == 1
        mask = mx.arange(width)[None] <= mx.arange(width - n, width)[:, None]
    if mask.ndim == 4:
        mask = mask[:, 0]
    return mx.broadcast_to(mask, (rows, n, width))


def go_on(original: Any, converted: Any, *counts: int, tokens: list[int] | None = None) -> None:
    """Feed both alike. `tokens` says how many of the columns to come are no right pads in each row; all if None."""
    for i, n in enumerate(counts):
        offsets = numbers(original.offset)
        assert offsets == numbers(converted.offset)
        offsets = offsets if isinstance(offsets, list) else [offsets]
        rows = len(offsets)
        masks = [cache.make_mask(n, return_array=False, window_size=None) for cache in (original, converted)]
        keys = columns(rows, n, 1000 + i)
        fetched = [cache.update_and_fetch(keys, -keys) for cache in (original, converted)]
        left = [n] * rows if tokens is None else tokens
        queries = mx.arange(n)
        asked = (queries + mx.array(offsets)[:, None] >= 0) & (queries < mx.array(left)[:, None])
        check_fetches(masks, fetched, asked)
        tokens = None if tokens is None else [max(0, each - n) for each in tokens]
    assert numbers(original.offset) == numbers(converted.offset)


def check_fetches(masks: list[Any], fetched: list[Any], asked: mx.array) -> None:
    """Each query of a token (`asked`, (B, N)) sees the same columns of the fetch, with the same content."""
    rows, n = asked.shape
    parts = [(keys, values) if isinstance(keys, mx.array) else (*keys, *values) for keys, values in fetched]
    seen = [visible(mask, rows, n, parts[0][0].shape[2]) & asked[:, :, None] for mask in masks]
    assert mx.array_equal(seen[0], seen[1])
    some = seen[0].any(axis=1)[:, None, :, None]
    for mine, other in zip(*parts, strict=True):
        assert mine.shape == other.shape
        assert mx.array_equal(mx.where(some, mine, 0), mx.where(some, other, 0))


def steps_for(cache: Any) -> tuple[int, ...]:
    """mlx-lm's padded rings, and its rings with sinks, keep the laws step by step alone once they have wrapped."""
    padded_ring = "BatchRotating" in type(cache).__name__
    return (1,) * 9 if padded_ring or bool(getattr(cache, "keep", 0)) else (1, 1, 3, 1, 1, 1, 2, 1, 1)


@ALL_WAYS
@named({**SOLO, **BATCHES})
def test_going_on_is_going_on_with_the_original(convert: Any, case: Make) -> None:
    original, converted = convert(case)
    go_on(original, converted, *steps_for(original))


@ALL_WAYS
@named({**SOLO, **BATCHES})
def test_several_tokens_find_what_was_held(convert: Any, case: Make) -> None:
    """By the fetch alone: what mlx-lm's masks show of a padded or pinned ring here is another matter."""
    original, converted = convert(case)
    rows = 1 if isinstance(original.offset, int) else original.offset.size
    keys = columns(rows, 3, 1000)
    first, second = (cache.update_and_fetch(keys, -keys)[0] for cache in (original, converted))
    assert first.shape == second.shape
    pads = [0] if rows == 1 else [max(0, p) for p in numbers(original.left_padding)]
    for row, pad in enumerate(pads):
        assert mx.array_equal(first[row, :, pad:], second[row, :, pad:])


@ALL_WAYS
@named(QUANTIZED)
def test_quantized_caches(convert: Any, case: Make) -> None:
    original, converted = convert(case)
    assert (original.bits, original.group_size) == (converted.bits, converted.group_size)
    go_on(original, converted, 1, 3, 1)


@ALL_WAYS
@named(PENDING)
def test_a_ragged_prefill_goes_on(convert: Any, case: tuple[Make, tuple[int, ...]]) -> None:
    make, counts = case
    original, converted = convert(make)
    go_on(original, converted, *counts, tokens=tokens_to_come(original, sum(counts)))
    original.finalize()
    converted.finalize()
    go_on(original, converted, 1, 1, 1)


def tokens_to_come(batch: Any, n: int) -> list[int]:
    """Of n columns to come, how many are no right pads in each row."""
    mine = batch if isinstance(batch, mlximpl.BatchKVCache | mlximpl.BatchRotatingKVCache) else from_mlx_lm(batch)
    pending = mine._pending
    if pending is None:
        return [n, n]
    right = [max(tail, waits) for tail, waits in zip(pending.tails, pending.waiting, strict=True)]
    return [n - r if length < 0 else length for length, r in zip(pending.lengths, right, strict=True)]


@ALL_WAYS
@pytest.mark.parametrize("fed", [(), (3,), (3, 4), (3, 4, 0), (9, 0, 1), (300, 0, 2)])
def test_a_chunk_goes_on(convert: Any, fed: tuple[int, ...]) -> None:
    def make(of: Namespace) -> Any:
        cache = of.ChunkedKVCache(4)
        for n in fed:
            feed(cache, n) if n else cache.maybe_trim_front()
        return cache

    original, converted = convert(make)
    for n in (1, 3, 1):
        assert (original.offset, original.start_position) == (converted.offset, converted.start_position)
        assert original.chunk_size == converted.chunk_size
        for mine, other in zip(*(feed(c, n, first=90).keys_and_values() for c in (original, converted)), strict=True):
            assert mx.array_equal(mine, other)
        original.maybe_trim_front()
        converted.maybe_trim_front()


def arrays(
    left_padding: list[int] | None,
    lengths: list[int] | None,
    advanced: int = 0,
    filled: int = 2,
    right: list[int] | None = None,
) -> Make:
    def make(of: Namespace) -> Any:
        cache = of.ArraysCache(3, left_padding=left_padding)
        rows = len(left_padding or lengths or [0])
        for i in range(filled):
            cache[i] = columns(rows, 2, i)
        if lengths is not None:
            cache.prepare(lengths=lengths, right_padding=right)
        cache.advance(advanced)
        return cache

    return make


STATES: dict[str, Make] = {
    "fresh": arrays(None, None, filled=0),
    "filled": arrays(None, None),
    "left pads due": arrays([2, 0], None, filled=0),
    "left pads due and filled": arrays([2, 0], None, 1),
    "left pads long past": arrays([2, 0], None, 5),
    "right pads to come": arrays(None, [5, 2]),
    "right pads coming": arrays(None, [5, 2], 3),
    "right pads in every row": arrays(None, [1, 0], right=[1, 2]),
    "both": arrays([2, 0], [5, 3], 1),
}


@ALL_WAYS
@named(STATES)
def test_a_recurrent_state_goes_on(convert: Any, case: Make) -> None:
    original, converted = convert(case)
    for n in (1, 1):
        for mine, other in zip(original.cache, converted.cache, strict=True):
            assert (mine is None and other is None) or mx.array_equal(mine, other)
        masks = [cache.make_mask(n) for cache in (original, converted)]
        rows = original.batch_size
        assert rows == converted.batch_size
        every = mx.ones((rows, n), dtype=mx.bool_)
        first, second = (every if mask is None else mask for mask in masks)
        assert mx.array_equal(first, second)
        for cache in (original, converted):
            cache[0] = columns(rows, 2, 40 + n)
            cache.advance(n)
    original.finalize()
    converted.finalize()
    assert original.make_mask(2) is None and converted.make_mask(2) is None


@BOTH_WAYS
@named(STATES)
def test_a_recurrent_state_shares_nothing(convert: Any, case: Make) -> None:
    def moved(cache: Any) -> None:
        for slot in cache.cache:
            if slot is not None:
                slot[...] = 77
        cache[2] = columns(cache.batch_size, 1, 5)
        cache.advance(1)

    for mover in (0, 1):
        pair = convert(case)
        before = held(pair[1 - mover].state)
        moved(pair[mover])
        assert held(pair[1 - mover].state) == before


@BOTH_WAYS
def test_lists_of_caches_and_lists_in_lists(convert: Any) -> None:
    def make(of: Namespace) -> Any:
        inner = of.CacheList(solo("KVCache", fed=(3,))(of), of.ArraysCache(2))
        return [of.CacheList(inner, solo("RotatingKVCache", 4, fed=(6,))(of)), solo("KVCache", fed=(2,))(of)]

    original, converted = convert(make)
    assert isinstance(converted, list)
    assert [type(c).__name__ for c in converted] == ["CacheList", "KVCache"]
    assert type(converted[0][0]).__name__ == "CacheList"
    packages = [type(c).__module__.partition(".")[0] for c in (original[0], converted[0], converted[0][0][1])]
    assert packages[0] != packages[1] == packages[2]
    go_on(original[0][0][0], converted[0][0][0], 1, 2)
    go_on(original[0][1], converted[0][1], 1, 2)
    go_on(original[1], converted[1], 1, 2)


def held(cache: Any) -> Any:
    """All that a cache holds, as numbers."""
    if isinstance(cache, list | tuple):
        return [held(each) for each in cache]
    if isinstance(cache, mx.array):
        return cache.tolist()
    named = vars(cache) if hasattr(cache, "state") else {}
    return {name: held(value) for name, value in named.items()} if named else repr(cache)


EVERY = {**SOLO, **QUANTIZED, **BATCHES, **{name: make for name, (make, _) in PENDING.items()}}


def move(cache: Any) -> None:
    """Change all that can change: by going on as far as that is allowed, and by writing into its arrays."""
    rows = 1 if isinstance(cache.offset, int) else cache.offset.size
    with suppress(ValueError):
        feed(cache, 2, rows=rows, first=2000)
    with suppress(ValueError):
        if hasattr(cache, "finalize") and cache.keys is not None:
            cache.finalize()
        cache.trim(1)
    for name in ("keys", "values", "left_padding", "offset"):
        part = getattr(cache, name, None)
        for array in part if isinstance(part, tuple | list) else [part]:
            if isinstance(array, mx.array):
                array[...] = 77


@BOTH_WAYS
@named(EVERY)
def test_nothing_is_shared(convert: Any, case: Make) -> None:
    original, converted = convert(case)
    before = held(original)
    assert held(convert(lambda of: original)[0]) == before
    move(converted)
    assert held(original) == before
    original, converted = convert(case)
    before = held(converted)
    move(original)
    assert held(converted) == before


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (solo("RotatingKVCache", 4, fed=(1,) * 10, trimmed=5), "head must be from 0 to 4, not -3"),
        (padded("BatchRotatingKVCache", 4, [1, 0], then=(1,) * 6, trimmed=4), "not -2"),
        (solo("ConcatenateKVCache", fed=(5,), trimmed=2), "offset 3, but 5 columns"),
        (solo("KVCache", fed=(256,), trimmed=-3), "offset must be from 0 to 256, not 259"),
    ],
)
def test_what_mlx_lm_broke_is_refused_by_name(spoil: Make, words: str) -> None:
    broken = spoil(upstream)
    name = type(broken).__name__
    with pytest.raises(ValueError, match=f"^the cache, a {name} of mlx-lm, does not hold together: .*{words}"):
        from_mlx_lm(broken)
    with pytest.raises(ValueError, match=f"^cache 1, a {name} of mlx-lm"):
        from_mlx_lm([upstream.KVCache(), broken])
    with pytest.raises(ValueError, match=f"^child 0 of cache 0, a {name} of mlx-lm"):
        from_mlx_lm([upstream.CacheList(broken)])


class Other(upstream.KVCache):  # type: ignore[name-defined, misc]
    """A class that neither side has."""


@pytest.mark.parametrize("other", [Other(), mlximpl.KVCache(), None, upstream.TokenBuffer(), 3])
def test_what_is_no_cache_of_mlx_lm_is_named(other: Any) -> None:
    with pytest.raises(ValueError, match=f"^cache 1 is a .*{type(other).__name__}, which is none of mlx-lm's"):
        from_mlx_lm([upstream.KVCache(), other])
    with pytest.raises(ValueError, match=f"^child 1 of the cache is a .*{type(other).__name__}"):
        from_mlx_lm(upstream.CacheList(upstream.KVCache(), other))


class Mine(mlximpl.KVCache):
    """A class that neither side has."""


@pytest.mark.parametrize("other", [Mine(), upstream.KVCache(), None, 3])
def test_what_is_no_cache_of_mlximpl_is_named(other: Any) -> None:
    with pytest.raises(ValueError, match=f"^cache 1 is a .*{type(other).__name__}, which is none of mlximpl's"):
        to_mlx_lm([mlximpl.KVCache(), other])


def trimmed_ring(*fed: int, n: int) -> Any:
    return solo("RotatingKVCache", 8, fed=fed, trimmed=n)(mlximpl)


def ring_longer_with_a_pad() -> Any:
    keys = columns(1, 11)
    return mlximpl.RotatingKVCache.from_state((keys, keys, 20, 2, 8, 11, 1))


def right_padding_alone() -> Any:
    ring = merged("RotatingKVCache", 4, fed=((1,), (2,)))(mlximpl)
    ring.prepare(right_padding=[0, 2])
    return ring


def ring_batch_short() -> Any:
    batch = merged("RotatingKVCache", 4, fed=((9,), (7,)), then=(4,))(mlximpl)
    batch.trim(4)
    return batch


def columns_of_unknown_number() -> Any:
    batch = from_mlx_lm(ragged(MERGED, [5, 2], [0, 3])(upstream))
    more = mlximpl.BatchKVCache([0, 0])
    more.prepare(lengths=[1, 2])
    batch.extend(more)
    return batch


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sinks in a batch": (lambda: mlximpl.BatchRotatingKVCache(8, [1, 0], keep=2), "keeps 2 sinks"),
    "a pad behind the sinks": (lambda: trimmed_ring(*(1,) * 11, n=1), "holds 7 tokens, and a ring of mlx-lm 8"),
    "a pad in a longer ring": (ring_longer_with_a_pad, "1 of its columns hold no token"),
    "a ring cut short": (lambda: trimmed_ring(20, 3, n=3), "holds 7 tokens, and a ring of mlx-lm 8"),
    "a batch cut short": (ring_batch_short, "holds 3 columns, and a ring of mlx-lm 4"),
    "right padding alone": (right_padding_alone, "announced without lengths"),
    "columns of unknown number": (columns_of_unknown_number, "how many columns come"),
}


@named(REFUSED)
def test_what_mlx_lm_cannot_hold_is_refused(case: tuple[Callable[[], Any], str]) -> None:
    make, words = case
    cache = make()
    before = held(cache)
    with pytest.raises(ValueError, match=f"^cache 0, {type(cache).__name__}.*cannot be held by mlx-lm: .*{words}"):
        to_mlx_lm([cache])
    with pytest.raises(ValueError, match=r"^child 0 of the cache, "):
        to_mlx_lm(mlximpl.CacheList(cache))
    assert held(cache) == before


def test_from_mlx_lm_imports_none_of_it() -> None:
    probe = (
        "import sys, mlximpl\n"
        "sys.modules['mlx_lm'] = None\n"
        "theirs = type('KVCache', (), {'__module__': 'mlx_lm.models.cache', 'state': (None, None, 0)})()\n"
        "assert isinstance(mlximpl.from_mlx_lm(theirs), mlximpl.KVCache)\n"
        "assert not [name for name in sys.modules if name.startswith('mlx_lm.')]\n"
        "try: mlximpl.to_mlx_lm(mlximpl.KVCache())\n"
        "except ImportError as error: assert 'needs mlx-lm' in str(error), error\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", probe], check=True, timeout=60)


def test_mlx_lms_own_classes_come_while_ours_are_installed() -> None:
    with mlximpl.install():
        made = to_mlx_lm([mlximpl.KVCache(), mlximpl.ArraysCache(2), mlximpl.CacheList(mlximpl.RotatingKVCache(4))])
    assert [type(c) for c in (*made, made[2][0])] == [
        upstream.KVCache,
        upstream.ArraysCache,
        upstream.CacheList,
        upstream.RotatingKVCache,
    ]
