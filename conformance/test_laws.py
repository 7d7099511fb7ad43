"""The algebra that follows from the laws of `reference/README.md`: each law by itself, on the reference and on mlximpl.

A law is two ways to come to the same. Both are played through the harness, and what every query saw must be equal on
each implementation: the two ways are held against each other, whatever the ledger says of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlximpl
import reference as ref
from conformance import operations as ops
from conformance.adapters.base import Observation
from conformance.adapters.reference import ReferenceAdapter
from conformance.adapters.surface import DTYPES, SurfaceAdapter
from conformance.compare import TOLERANCE
from conformance.driver import Driver
from conformance.observed import checks_of
from conformance.payload import Config
from conformance.situations import build
from conformance.situations.build import (
    Part,
    batch,
    batch_ring,
    extend,
    extract,
    feed,
    finalize,
    keep,
    merge,
    prepare,
    ring,
    situation,
    solo,
    trim,
)
from reference.temporal_order import temporal_slots

some = settings(derandomize=True, deadline=None, max_examples=20)
few = settings(some, max_examples=10)

chunks = st.lists(st.integers(1, 5), min_size=1, max_size=4)
chunks_or_none = st.lists(st.integers(1, 4), min_size=0, max_size=4)
paddings = st.lists(st.integers(0, 4), min_size=1, max_size=4)
sizes = st.one_of(st.none(), st.integers(1, 6))
"""None is a growing cache, a number a ring of that many slots."""
sinks = st.integers(0, 3)

Sight = list[int | str] | None
"""The positions of its row that a query saw, and words for what is no token of it; None for a pad's query."""


class Play:
    """A trace under way on the reference and on mlximpl, and what every query saw on each of them."""

    def __init__(self, *parts: Part, config: Config | None = None) -> None:
        self.adapters = ReferenceAdapter(), SurfaceAdapter("mlximpl", mlximpl, mlximpl.__version__)
        self.driver = Driver(self.adapters, config or Config())
        self.seen: list[Observation] = []
        self.sights: list[dict[tuple[str, int], Sight]] = [{}, {}]
        """By the row's name and the query's position. Of two queries at one position, the later."""
        self.go(*parts)

    def go(self, *parts: Part) -> Play:
        """Go on; nothing may be refused."""
        for operation in situation("", "", "", *parts).operations:
            self.seen = self.driver.step(operation)
            assert self.driver.expected is not None, f"{ops.call(operation)} was refused"
            if isinstance(operation, ops.Update):
                self._note(operation)
        return self

    def _note(self, operation: ops.Update) -> None:
        assert self.driver.expected is not None
        for sights, seen in zip(self.sights, self.seen, strict=True):
            visible = checks_of(self.driver, operation, seen)["visible"]
            for name, queries in zip(self.driver.expected.names, self.driver.expected.queries, strict=True):
                for query, sight in zip(queries, visible[name], strict=True):
                    if query is not None:
                        sights[name, query[1]] = sight

    def of_row(self, name: str, start: int = 0) -> list[dict[int, Sight]]:
        """What the row's queries from position `start` on saw, on each implementation."""
        return [{p: sight for (row, p), sight in each.items() if row == name and p >= start} for each in self.sights]

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """After the last step, on each implementation."""
        return [seen.offsets for seen in self.seen]

    @property
    def widths(self) -> list[int]:
        """Of the last fetch, on each implementation."""
        return [seen.keys.shape[2] for seen in self.seen if seen.keys is not None]

    def reference(self, cache: str = "x") -> ref.Cache:
        held = self.adapters[0].caches[cache]
        assert isinstance(held, ref.Cache)
        return held

    def mlximpl(self, cache: str = "x") -> Any:
        return self.adapters[1].caches[cache]

    def trims(self) -> list[int]:
        """How many tokens may be dropped from the cache x, the same on both."""
        counts = range(max([0, *self.reference().tokens]) + 1)
        lawful = [n for n in counts if ref.can_trim(self.reference(), n)]
        assert [n for n in counts if self.mlximpl().can_trim(n)] == lawful
        return lawful


def alone(row: str, size: int | None, cache: str = "x", sinks: int = 0) -> ops.New:
    """A solo cache; sinks leave a ring at least one slot."""
    return solo(row, cache) if size is None else ring(size, sinks % size, row, cache)


def padded(size: int | None, padding: Sequence[int], rows: str = "abcdef", cache: str = "x") -> ops.New:
    """A batch."""
    if size is None:
        return batch(*padding, rows=rows, cache=cache)
    return batch_ring(size, *padding, rows=rows, cache=cache)


def merged(rows: Sequence[Sequence[int]], size: int | None) -> Part:
    """Solo caches i, j, k, l of the rows a, b, c, d, and the batch x of them, whose rows are p, q, r, s."""
    made = [
        (alone(row, size, cache), feed(*fed, cache=cache))
        for row, cache, fed in zip("abcd", "ijkl", rows, strict=False)
    ]
    return [*made, merge("ijkl"[: len(rows)], "pqrs"[: len(rows)])]


def cut(data: st.DataObject, total: int) -> list[int]:
    """The number as a sum of chunks."""
    parts = []
    while total:
        parts.append(data.draw(st.integers(1, total)))
        total -= parts[-1]
    return parts


def same(one: Play, other: Play) -> None:
    """Every query saw the same, and the rows end where the other's do."""
    assert one.sights == other.sights
    assert one.offsets == other.offsets


# -- merge and extract -----------------------------------------------------------------------------


@some
@given(rows=st.lists(chunks_or_none, min_size=1, max_size=4), size=sizes, more=chunks)
def test_a_merged_row_goes_on_like_the_cache_it_was(rows: list[list[int]], size: int | None, more: list[int]) -> None:
    play = Play(merged(rows, size), feed(*more))
    for cache, row, inside, fed in zip("ijkl", "abcd", "pqrs", rows, strict=False):
        play.go(feed(*more, cache=cache))
        assert play.of_row(inside) == play.of_row(row, sum(fed))


@some
@given(rows=st.lists(chunks_or_none, min_size=1, max_size=4), size=sizes, more=chunks)
def test_a_row_merged_and_extracted_goes_on_like_the_cache_it_was(
    rows: list[list[int]], size: int | None, more: list[int]
) -> None:
    play = Play(merged(rows, size))
    for cache, row, inside, again, fed in zip("ijkl", "abcd", "pqrs", "tuvw", rows, strict=False):
        offsets = play.go(extract(inside, "y", again), feed(*more, cache="y")).offsets
        assert play.go(feed(*more, cache=cache)).offsets == offsets
        assert play.of_row(again) == play.of_row(row, sum(fed))


@some
@given(rows=st.lists(chunks_or_none, min_size=1, max_size=4), size=sizes)
def test_a_row_merged_and_extracted_holds_the_bits_that_it_had(rows: list[list[int]], size: int | None) -> None:
    play = Play(merged(rows, size))
    for b, (cache, fed) in enumerate(zip("ijkl", rows, strict=False)):
        tokens = sum(fed)
        own, again = play.reference(cache), ref.extract(play.reference(), b)
        mine, back = play.mlximpl(cache), play.mlximpl().extract(b)
        assert back.offset == mine.offset == tokens
        if tokens:
            # What a ring holds beyond max_size after a long update stays behind: no later query sees it.
            kept = min(tokens, size or tokens)
            assert again.positions.tolist() == [list(range(tokens - kept, tokens))]
            assert own.keys is not None and again.keys is not None
            assert np.array_equal(again.keys, own.keys[:, :, temporal_slots(own)[-kept:]])
            for before, after in zip(oldest_first(mine), oldest_first(back), strict=True):
                assert np.array_equal(after, before[:, :, -kept:])


def oldest_first(cache: Any) -> list[Any]:
    """The keys and values of a solo cache of mlximpl without sinks, in temporal order."""
    keys, values, *rest = cache.state
    head = rest[3] if len(rest) > 1 else 0
    return [np.roll(np.array(x), -head, axis=2) for x in (keys, values)]


@some
@given(padding=paddings, fed=chunks_or_none, size=sizes, more=chunks)
def test_merging_what_was_extracted_gives_the_batch_back(
    padding: list[int], fed: list[int], size: int | None, more: list[int]
) -> None:
    rows, again, caches = (letters[: len(padding)] for letters in ("abcd", "pqrs", "ijkl"))
    # Pads still due would be forgotten: a row with no tokens is an empty cache.
    play = Play(padded(size, padding), feed(max(padding) + 1, *fed))
    before = play.offsets
    play.go([extract(row, cache, f"{row}'") for row, cache in zip(rows, caches, strict=True)])
    assert play.go(merge(caches, again, into="y")).offsets == before
    play.go(feed(*more), feed(*more, cache="y"))
    for row, twin, offset in zip(rows, again, before[0], strict=True):
        assert play.of_row(twin) == play.of_row(row, offset)


@some
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_merging_what_was_extracted_from_a_growing_batch_gives_its_layout_back(lengths: list[int]) -> None:
    longest = max(lengths)
    play = Play(batch(*(longest - n for n in lengths)), feed(longest + 1))
    rows = range(len(lengths))
    cache, mine = play.reference(), play.mlximpl()
    assert np.array_equal(ref.merge([ref.extract(cache, b) for b in rows]).positions, cache.positions)
    again = mlximpl.BatchKVCache.merge([mine.extract(b) for b in rows])
    assert again.left_padding.tolist() == mine.left_padding.tolist()
    for before, after in zip(mine.keys_and_values(), again.keys_and_values(), strict=True):
        assert after.shape == before.shape
        for b, pads in enumerate(mine.left_padding.tolist()):
            assert mx.array_equal(after[b, :, pads:], before[b, :, pads:])


# -- chunks ----------------------------------------------------------------------------------------


@some
@given(data=st.data(), total=st.integers(1, 14), size=sizes, sinks=sinks, window=st.sampled_from([None, 1, 2, 5, 9]))
def test_chunks_change_nothing_that_a_query_sees(
    data: st.DataObject, total: int, size: int | None, sinks: int, window: int | None
) -> None:
    one, other = (Play(alone("a", size, sinks=sinks), feed(*cut(data, total), window=window)) for _ in range(2))
    same(one, other)


@some
@given(data=st.data(), total=st.integers(1, 14), padding=paddings, size=sizes)
def test_chunks_change_nothing_that_a_padded_row_sees(
    data: st.DataObject, total: int, padding: list[int], size: int | None
) -> None:
    one, other = (Play(padded(size, padding), feed(*cut(data, total))) for _ in range(2))
    same(one, other)


@some
@given(data=st.data(), lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), before=chunks_or_none, size=sizes)
def test_chunks_of_a_ragged_prefill_change_nothing_that_a_query_sees(
    data: st.DataObject, lengths: list[int], before: list[int], size: int | None
) -> None:
    start = (padded(size, [0] * len(lengths)), feed(*before), prepare(*lengths))
    one, other = (Play(start, feed(*cut(data, max(lengths))), finalize(), feed(1, 2, 1)) for _ in range(2))
    same(one, other)


# -- filter and extend -----------------------------------------------------------------------------


@some
@given(
    data=st.data(), padding=paddings, fed=chunks_or_none, lengths=st.lists(st.integers(0, 4), min_size=4), size=sizes
)
def test_filter_twice_is_the_composed_filter(
    data: st.DataObject, padding: list[int], fed: list[int], lengths: list[int], size: int | None
) -> None:
    first = data.draw(st.lists(st.sampled_from(range(len(padding))), min_size=1, max_size=4))
    second = data.draw(st.lists(st.sampled_from(range(len(first))), min_size=0, max_size=4))
    # Some are filtered in the midst of a ragged prefill.
    own = [length + max(0, pads - sum(fed)) for length, pads in zip(lengths, padding, strict=False)]
    start = (padded(size, padding), feed(*fed), prepare(*own), feed(*[1] * (max(own) > 1)))
    end = (feed(*[max(own) - 1] * (max(own) > 1)), finalize(), feed(1, 3, 1))
    between, names = "mnop"[: len(first)], "uvwx"[: len(second)]
    twice = (keep("".join("abcd"[i] for i in first), between), keep("".join(between[i] for i in second), names))
    one = Play(start, twice, end)
    other = Play(start, keep("".join("abcd"[first[i]] for i in second), names), end)
    same(one, other)
    assert one.widths == other.widths


@some
@given(mine=st.tuples(paddings, chunks_or_none), theirs=st.tuples(paddings, chunks_or_none), size=sizes, extra=sinks)
def test_extend_and_filter_back_is_the_identity(
    mine: tuple[list[int], list[int]], theirs: tuple[list[int], list[int]], size: int | None, extra: int
) -> None:
    (padding, fed), (their_padding, their_fed) = mine, theirs
    rows = "abcd"[: len(padding)]
    # Where the lengths differ, padding is pending on one side.
    own = [max(0, pads - sum(fed)) + (extra + b) % 4 for b, pads in enumerate(padding)]
    start = (padded(size, padding), feed(*fed), prepare(*own))
    end = (feed(*[max(own)] * (max(own) > 0)), finalize(), feed(1, 2, 1))
    there = (padded(size, their_padding, "efgh", "y"), feed(*their_fed, cache="y"))
    one = Play(start, there, extend("y", "pqrs"[: len(their_padding)]), keep(rows), end)
    other = Play(start, end)
    assert [one.of_row(row) for row in rows] == [other.of_row(row) for row in rows]
    assert one.offsets == other.offsets


@some
@given(padding=paddings, fed=chunks_or_none, their_fed=chunks_or_none, size=sizes)
def test_extend_leaves_the_other_batch_as_it_was(
    padding: list[int], fed: list[int], their_fed: list[int], size: int | None
) -> None:
    there = (padded(size, [0, 1], "ef", "y"), feed(*their_fed, cache="y"))
    one = Play(padded(size, padding), feed(*fed), there, extend("y", "pq"), feed(1, 2), feed(1, 3, 1, cache="y"))
    other = Play(there, feed(1, 3, 1, cache="y"))
    assert [one.of_row(row) for row in "ef"] == [other.of_row(row) for row in "ef"]
    assert one.offsets == other.offsets


# -- trim ------------------------------------------------------------------------------------------


@some
@given(data=st.data(), fed=chunks, size=sizes, sinks=sinks)
def test_trim_and_the_same_tokens_again_is_the_identity(
    data: st.DataObject, fed: list[int], size: int | None, sinks: int
) -> None:
    start = (alone("a", size, sinks=sinks), feed(*fed))
    one = Play(start)
    n = data.draw(st.sampled_from(one.trims()))
    same(one.go(trim(n), feed(*cut(data, n)), feed(1, 2, 1)), Play(start, feed(1, 2, 1)))


@some
@given(data=st.data(), padding=paddings, fed=chunks, size=sizes)
def test_trim_of_a_batch_and_the_same_tokens_again_is_the_identity(
    data: st.DataObject, padding: list[int], fed: list[int], size: int | None
) -> None:
    start = (padded(size, padding), feed(*fed))
    one = Play(start)
    n = data.draw(st.sampled_from(one.trims()))
    same(one.go(trim(n), feed(*cut(data, n)), feed(1, 2, 1)), Play(start, feed(1, 2, 1)))


@some
@given(data=st.data(), before=chunks_or_none, fed=st.integers(1, 9), size=sizes, sinks=sinks)
def test_feeding_many_and_trimming_some_is_feeding_fewer(
    data: st.DataObject, before: list[int], fed: int, size: int | None, sinks: int
) -> None:
    n = data.draw(st.integers(1, fed))
    start = (alone("a", size, sinks=sinks), feed(*before))
    one = Play(start, feed(fed), trim(n))
    other = Play(start, feed(*[fed - n] * (fed > n)))
    for play in (one, other):
        play.sights = [{}, {}]  # what the trimmed tokens saw is history
        play.go(feed(1, 2, 1))
    same(one, other)


# -- what a row does not see -----------------------------------------------------------------------


@few
@given(padding=paddings, fed=chunks, size=sizes)
def test_a_row_of_a_batch_sees_what_it_would_see_alone(padding: list[int], fed: list[int], size: int | None) -> None:
    together = Play(padded(size, padding), feed(*fed, 1))
    for row, pads in zip("abcd", padding, strict=False):
        stops = [max(0, columns - pads) for columns in accumulate((0, *fed, 1))]
        tokens = [stop - start for start, stop in pairwise(stops)]
        by_itself = Play(alone(row, size), feed(*filter(None, tokens)))
        assert by_itself.of_row(row) == together.of_row(row)


@few
@given(padding=paddings, more=st.integers(1, 4), fed=chunks, size=sizes)
def test_more_left_padding_changes_nothing_that_a_row_sees(
    padding: list[int], more: int, fed: list[int], size: int | None
) -> None:
    one = Play(padded(size, padding), feed(*fed, 1))
    same(one, Play(padded(size, [pads + more for pads in padding]), feed(more, *fed, 1)))


@few
@given(padding=paddings, others=st.lists(st.integers(0, 6), min_size=1, max_size=2), fed=chunks, size=sizes)
def test_more_rows_change_nothing_that_a_row_sees(
    padding: list[int], others: list[int], fed: list[int], size: int | None
) -> None:
    one = Play(padded(size, padding), feed(*fed, 1))
    other = Play(padded(size, [*padding, *others]), feed(*fed, 1))
    for row in "abcd"[: len(padding)]:
        assert one.of_row(row) == other.of_row(row)
    assert [offsets[: len(padding)] for offsets in other.offsets] == one.offsets


CONFIGS = (
    Config("float32", heads=3, key_dim=4, value_dim=7),
    Config("float16", heads=2, key_dim=6, value_dim=4),
    Config("bfloat16", heads=1, key_dim=5, value_dim=5),
)


@few
@given(padding=paddings, fed=chunks, size=sizes)
def test_dtype_and_heads_change_nothing_that_a_row_sees(padding: list[int], fed: list[int], size: int | None) -> None:
    whole = (
        (padded(size, padding), feed(*fed, 1)),
        (padded(size, [0, 1], "ef", "y"), feed(2, 1, cache="y"), extend("y", "pq")),
        (prepare(*(1 + b for b in range(len(padding) + 2))), feed(len(padding) + 2), finalize()),
        (extract("a", "i", "r"), extract("q", "j", "s"), feed(1, 2, cache="i"), merge("ji", "tu", into="z")),
        (feed(1, 2), feed(1, 2, cache="z")),
    )
    one = Play(whole)
    for config in CONFIGS:
        same(one, Play(whole, config=config))


# -- storage ---------------------------------------------------------------------------------------


@some
@given(fed=st.lists(st.integers(1, 9), min_size=1, max_size=6), size=st.integers(1, 6), padding=paddings, sinks=sinks)
def test_a_ring_stores_no_more_than_the_window_of_the_last_update(
    fed: list[int], size: int, padding: list[int], sinks: int
) -> None:
    for new in (alone("a", size, sinks=sinks), padded(size, padding)):
        play = Play(new)
        for count in (*fed, 1):
            play.go(feed(count))
            assert all(width <= size + count - 1 for width in play.widths)
            assert play.reference().slots <= size + count - 1


RINGS: dict[str, Callable[[], Any]] = {
    "solo": lambda: mlximpl.RotatingKVCache(8),
    "solo with sinks": lambda: mlximpl.RotatingKVCache(8, keep=3),
    "batch": lambda: mlximpl.BatchRotatingKVCache(8, [0]),
}


@pytest.mark.parametrize("kind", RINGS)
@pytest.mark.parametrize("prompt", [1, 8, 40, 700])
def test_single_tokens_take_no_more_memory_however_many_come(kind: str, prompt: int) -> None:
    cache = RINGS[kind]()
    column = 2 * (16 + 4) * 4  # two heads, head sizes of 16 and 4, four bytes

    def feed_columns(count: int) -> None:
        x = mx.ones((1, 2, count, 16))
        mx.eval(*cache.update_and_fetch(x, x[..., :4]))

    feed_columns(prompt)
    assert cache.nbytes <= (prompt + 7) * column
    for _ in range(10):
        feed_columns(1)
    taken = mx.get_active_memory()
    for _ in range(300):
        feed_columns(1)
    assert cache.nbytes == 8 * column
    assert mx.get_active_memory() <= taken + column


# -- copies ----------------------------------------------------------------------------------------


def snapshot(cache: Any) -> list[Any]:
    """The state, as numbers."""
    return [x.tolist() if isinstance(x, mx.array) else x for x in cache.state]


@some
@given(fed=chunks_or_none, size=sizes, sinks=sinks, more=chunks, how=st.sampled_from([build.copy, build.restore]))
def test_a_copy_goes_on_and_leaves_the_original_as_it_was(
    fed: list[int], size: int | None, sinks: int, more: list[int], how: Callable[..., Part]
) -> None:
    start = (alone("a", size, sinks=sinks), feed(*fed))
    one = Play(start)
    state, reference = snapshot(one.mlximpl()), one.reference()
    one.go(how("p"), feed(*more, cache="y"), trim(1, "y"), feed(1, cache="y"))
    assert snapshot(one.mlximpl()) == state
    assert one.reference() is reference
    one.go(feed(*more))
    other = Play(start, feed(*more))
    assert one.of_row("a") == other.of_row("a")
    assert one.of_row("p") == other.of_row("a", sum(fed))
    assert one.offsets == other.offsets


@some
@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    fed=chunks_or_none,
    size=sizes,
    how=st.sampled_from([build.copy, build.restore]),
)
def test_a_copy_of_a_ragged_prefill_goes_on_and_leaves_the_original_as_it_was(
    lengths: list[int], fed: list[int], size: int | None, how: Callable[..., Part]
) -> None:
    left = [max(lengths) - 1] * (max(lengths) > 1)
    start = (padded(size, [0] * len(lengths)), feed(*fed), prepare(*lengths), feed(1))
    one = Play(start)
    state = snapshot(one.mlximpl())
    one.go(how("pqr"[: len(lengths)]), feed(*left, cache="y"), finalize("y"), feed(1, 2, cache="y"))
    assert snapshot(one.mlximpl()) == state
    one.go(feed(*left), finalize(), feed(1, 2))
    other = Play(start, feed(*left), finalize(), feed(1, 2))
    for row, twin in zip("abc"[: len(lengths)], "pqr", strict=False):
        assert one.of_row(row) == other.of_row(row)
        assert one.of_row(twin) == other.of_row(row, sum(fed) + 1)
    assert one.offsets == other.offsets


# -- attention -------------------------------------------------------------------------------------


@few
@given(padding=paddings, fed=chunks, size=sizes, dtype=st.sampled_from(list(DTYPES)))
def test_attention_over_a_fetch_is_that_over_the_tokens_that_are_visible(
    padding: list[int], fed: list[int], size: int | None, dtype: str
) -> None:
    # The harness compares it with a computation in float64 from the histories, and asks that pads stay finite.
    config = Config(dtype, heads=2, key_dim=6, value_dim=4, attention=True)
    play = Play(padded(size, padding), feed(*fed, 1, 2, 1), config=config)
    assert all(np.isfinite(seen.attention).all() for seen in play.seen[1:] if seen.attention is not None)
    assert play.seen[1].attention is not None


@pytest.mark.parametrize("size", [None, 6, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_a_batch_is_that_over_each_row_alone(dtype: str, size: int | None) -> None:
    padding, groups, heads, key_dim, value_dim = [0, 3, 7], 3, 2, 8, 12
    together: Any = mlximpl.BatchKVCache(padding) if size is None else mlximpl.BatchRotatingKVCache(size, padding)
    apart: list[Any] = [mlximpl.KVCache() if size is None else mlximpl.RotatingKVCache(size) for _ in padding]
    due = list(padding)
    mx.random.seed(0)

    def attend(cache: Any, q: mx.array, k: mx.array, v: mx.array) -> Any:
        mask = cache.make_mask(q.shape[2])
        keys, values = cache.update_and_fetch(k, v)
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=key_dim**-0.5, mask=mask)
        return np.array(out.astype(mx.float32))

    for count in (5, 1, 4, 1, 1, 3, 1):
        q, k, v = (
            mx.random.normal((len(padding), h, count, d)).astype(DTYPES[dtype])
            for h, d in ((groups * heads, key_dim), (heads, key_dim), (heads, value_dim))
        )
        out = attend(together, q, k, v)
        assert np.isfinite(out).all()
        for b, cache in enumerate(apart):
            pads = min(due[b], count)
            due[b] -= pads
            if pads < count:
                should = attend(cache, *(x[b : b + 1, :, pads:] for x in (q, k, v)))
                error = np.abs(out[b, :, pads:] - should[0]).max() / np.abs(should).max()
                assert error <= TOLERANCE[dtype]
