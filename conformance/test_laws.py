"""The algebra that follows from the laws of `reference/README.md`, each law by itself, on the reference and on mlximpl.

A law is two ways to do the same. Both are played through the harness, and what each query saw must be equal: the two
ways are held against each other, whatever the ledger says of either.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mlximpl
import reference as ref
from conformance import operations as ops
from conformance.adapters.base import Observation
from conformance.adapters.reference import ReferenceAdapter
from conformance.adapters.registry import make_adapter
from conformance.adapters.surface import SurfaceAdapter
from conformance.driver import Driver
from conformance.observed import checks_of
from conformance.payload import DTYPES, Config
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
    ones,
    prepare,
    restore,
    ring,
    situation,
    solo,
    trim,
)
from conformance.situations.build import copy as copied

REFERENCE = make_adapter("reference")
MLXIMPL = make_adapter("mlximpl")

few = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
fewer = settings(few, max_examples=20)

chunks = st.lists(st.integers(1, 5), min_size=1, max_size=4)
maybe_chunks = st.lists(st.integers(1, 4), min_size=0, max_size=3)
ring_sizes = st.integers(1, 6)
growing_or_ring = st.one_of(st.none(), ring_sizes)
paddings = st.lists(st.integers(0, 4), min_size=1, max_size=4)

Sight = list[int | str] | None
"""What one query saw, as positions of its row; words for what is no token of it; None for a pad's query."""


class Play:
    """A trace under way on the reference and on mlximpl, and what each query has seen on each."""

    def __init__(self, *parts: Part, config: Config | None = None) -> None:
        self.driver = Driver([REFERENCE, MLXIMPL], config or Config())
        self.seen: list[Observation] = []
        self.sights: list[dict[tuple[str, int], Sight]] = [{}, {}]
        """Per implementation, by the row's name and the query's position; the last time counts."""
        self.go(*parts)

    def go(self, *parts: Part) -> Play:
        """Carry out some more; nothing may be refused."""
        for operation in situation("", "", "", *parts).operations:
            self.seen = self.driver.step(operation)
            expected = self.driver.expected
            assert expected is not None, f"{ops.call(operation)} was refused"
            if not isinstance(operation, ops.Update):
                continue
            for sights, seen in zip(self.sights, self.seen, strict=True):
                views = checks_of(self.driver, operation, seen)["visible"]
                for name, queries in zip(expected.names, expected.queries, strict=True):
                    for query, view in zip(queries, views[name], strict=True):
                        if query is not None:
                            sights[name, query[1]] = view
        return self

    @property
    def offsets(self) -> list[tuple[int, ...]]:
        """After the last step, per implementation."""
        return [seen.offsets for seen in self.seen]

    @property
    def widths(self) -> list[int]:
        """Of the last fetch, per implementation."""
        return [seen.keys.shape[2] for seen in self.seen if seen.keys is not None]

    def of_row(self, name: str, start: int = 0) -> list[dict[int, Sight]]:
        """What a row's queries from position `start` on saw."""
        return [{p: view for (who, p), view in s.items() if who == name and p >= start} for s in self.sights]


def held(cache: str = "x") -> Any:
    """The cache of this name that mlximpl's adapter holds."""
    assert isinstance(MLXIMPL, SurfaceAdapter)
    return MLXIMPL.caches[cache]


def held_by_reference(cache: str = "x") -> ref.Cache:
    assert isinstance(REFERENCE, ReferenceAdapter)
    return REFERENCE.caches[cache]


def alone(name: str, max_size: int | None, cache: str, keep: int = 0) -> ops.New:
    """A solo cache; a ring where a size is given."""
    return solo(name, cache) if max_size is None else ring(max_size, keep, name, cache)


def padded(max_size: int | None, padding: Sequence[int], rows: str = "abcdef", cache: str = "x") -> ops.New:
    """A batch; of rings where a size is given."""
    if max_size is None:
        return batch(*padding, rows=rows, cache=cache)
    return batch_ring(max_size, *padding, rows=rows, cache=cache)


def rows_alone(rows: Sequence[Sequence[int]], max_size: int | None) -> list[Part]:
    """A solo cache for each row, fed these chunks: the cache i holds row a, j holds b ..."""
    caches = zip("ijkl", "abcd", rows, strict=False)
    return [[alone(name, max_size, cache), feed(*fed, cache=cache)] for cache, name, fed in caches]


# -- merge and extract -----------------------------------------------------------------------------


@few
@given(rows=st.lists(maybe_chunks, min_size=1, max_size=4), max_size=growing_or_ring, more=chunks)
def test_a_row_merged_and_extracted_goes_on_like_the_cache_it_was(
    rows: list[list[int]], max_size: int | None, more: list[int]
) -> None:
    play = Play(*rows_alone(rows, max_size), merge("ijkl"[: len(rows)], "pqrs"[: len(rows)]))
    for cache, before, inside, apart, fed in zip("ijkl", "abcd", "pqrs", "tuvw", rows, strict=False):
        play.go(extract(inside, "y", apart), feed(*more, cache="y"))
        offsets = play.offsets
        play.go(feed(*more, cache=cache))
        assert play.offsets == offsets
        assert play.of_row(apart) == play.of_row(before, sum(fed))
    play.go(feed(*more))
    for before, inside, fed in zip("abcd", "pqrs", rows, strict=False):
        assert play.of_row(inside) == play.of_row(before, sum(fed))


@few
@given(rows=st.lists(maybe_chunks, min_size=1, max_size=4), max_size=growing_or_ring)
def test_a_row_merged_and_extracted_is_the_cache_it_was_bit_for_bit(
    rows: list[list[int]], max_size: int | None
) -> None:
    Play(*rows_alone(rows, max_size), merge("ijkl"[: len(rows)], "pqrs"[: len(rows)]))
    if not any(rows):
        return
    for b, (cache, fed) in enumerate(zip("ijkl", rows, strict=False)):
        # What lies beyond max_size after a long update stays behind: no query sees it any more.
        before = held_by_reference(cache)
        newest = ref.merge([before])
        after = ref.extract(held_by_reference("x"), b)
        assert after.tokens == newest.tokens if fed else after.tokens == (0,)
        assert np.array_equal(after.positions, newest.positions)
        own, back = held(cache), held("x").extract(b)
        assert back.offset == own.offset
        if fed:
            kept = min(back.offset, max_size or back.offset)
            for mine, theirs in zip(oldest_first(own), oldest_first(back), strict=True):
                assert np.array_equal(mine[:, :, -kept:], theirs)


def oldest_first(cache: Any) -> list[Any]:
    """The stored keys and values of a solo cache of mlximpl in temporal order, by its `state` alone."""
    keys, values, *rest = (np.array(x) if isinstance(x, mx.array) else x for x in cache.state)
    head = rest[3] if len(rest) > 1 else keys.shape[2]
    return [np.roll(x, -head, axis=2) for x in (keys, values)]


@few
@given(padding=paddings, fed=chunks, max_size=growing_or_ring, more=chunks)
def test_merging_what_was_extracted_gives_the_batch_back(
    padding: list[int], fed: list[int], max_size: int | None, more: list[int]
) -> None:
    names, fresh, caches = "abcd"[: len(padding)], "pqrs"[: len(padding)], "ijkl"[: len(padding)]
    # Pads that are due are forgotten when a row stands alone, so all of them come first.
    play = Play(padded(max_size, padding), feed(max(padding) + 1), feed(*fed))
    parts = [extract(row, cache, f"{row}'") for row, cache in zip(names, caches, strict=True)]
    play.go(parts, merge(caches, fresh, into="y"))
    start = [offset - 1 for offset in play.offsets[0]]
    play.go(feed(*more))
    offsets = play.offsets
    play.go(feed(*more, cache="y"))
    assert play.offsets == offsets
    for row, again, position in zip(names, fresh, start, strict=True):
        assert play.of_row(again, position + 1) == play.of_row(row, position + 1)


@few
@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_merging_what_was_extracted_from_a_growing_batch_gives_its_layout_back(lengths: list[int]) -> None:
    longest = max(lengths)
    Play(batch(*(longest - n for n in lengths)), feed(longest + 1))
    rows = range(len(lengths))
    cache = held_by_reference()
    again = ref.merge([ref.extract(cache, b) for b in rows])
    assert np.array_equal(again.positions, cache.positions)
    made = mlximpl.BatchKVCache.merge([held().extract(b) for b in rows])
    assert made.left_padding.tolist() == held().left_padding.tolist()
    assert made.offset.tolist() == held().offset.tolist()
    assert made.keys_and_values()[0].shape == held().keys_and_values()[0].shape


# -- chunks ----------------------------------------------------------------------------------------


@st.composite
def cut(draw: st.DrawFn, total: int) -> list[int]:
    """A number as a sum of chunks."""
    left, parts = total, []
    while left:
        parts.append(draw(st.integers(1, left)))
        left -= parts[-1]
    return parts


@st.composite
def two_cuts(draw: st.DrawFn, most: int = 14) -> tuple[list[int], list[int]]:
    """The same number cut in two ways."""
    total = draw(st.integers(1, most))
    return draw(cut(total)), draw(cut(total))


@few
@given(cuts=two_cuts(), max_size=growing_or_ring, sinks=st.integers(0, 3), window=st.sampled_from([None, 1, 2, 5, 9]))
def test_chunks_change_nothing_that_a_query_sees(
    cuts: tuple[list[int], list[int]], max_size: int | None, sinks: int, window: int | None
) -> None:
    new = alone("a", max_size, "x", 0 if max_size is None else sinks % max_size)
    one, other = (Play(new, feed(*fed, window=window)) for fed in cuts)
    assert one.sights == other.sights
    assert one.offsets == other.offsets


@few
@given(cuts=two_cuts(), padding=paddings, max_size=growing_or_ring)
def test_chunks_change_nothing_that_a_padded_row_sees(
    cuts: tuple[list[int], list[int]], padding: list[int], max_size: int | None
) -> None:
    one, other = (Play(padded(max_size, padding), feed(*fed)) for fed in cuts)
    assert one.sights == other.sights
    assert one.offsets == other.offsets


@few
@given(
    data=st.data(),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    before=maybe_chunks,
    max_size=growing_or_ring,
)
def test_chunks_of_a_ragged_prefill_change_nothing_that_a_query_sees(
    data: st.DataObject, lengths: list[int], before: list[int], max_size: int | None
) -> None:
    total = max(lengths)
    plays = []
    for _ in range(2):
        fed = data.draw(cut(total))
        start = (padded(max_size, [0] * len(lengths)), feed(*before), prepare(*lengths))
        plays.append(Play(*start, feed(*fed), finalize(), feed(1, 2, 1)))
    one, other = plays
    assert one.sights == other.sights
    assert one.offsets == other.offsets


# -- filter and extend -----------------------------------------------------------------------------


@few
@given(data=st.data(), padding=paddings, fed=chunks, max_size=growing_or_ring)
def test_filter_twice_is_the_composed_filter(
    data: st.DataObject, padding: list[int], fed: list[int], max_size: int | None
) -> None:
    first = data.draw(st.lists(st.sampled_from(range(len(padding))), min_size=1, max_size=4))
    second = data.draw(st.lists(st.sampled_from(range(len(first))), min_size=0, max_size=4))
    rows, between, names = "abcd", "mnop"[: len(first)], "uvwx"[: len(second)]
    start = (padded(max_size, padding), feed(*fed))
    one = Play(*start, keep("".join(rows[i] for i in first), between))
    one.go(keep("".join(between[i] for i in second), names), feed(1, 3, 1))
    other = Play(*start, keep("".join(rows[first[i]] for i in second), names), feed(1, 3, 1))
    assert one.sights == other.sights
    assert one.offsets == other.offsets
    assert one.widths == other.widths


@few
@given(
    mine=st.tuples(paddings, maybe_chunks),
    theirs=st.tuples(paddings, maybe_chunks),
    max_size=growing_or_ring,
    pending=st.booleans(),
)
def test_extend_and_filter_back_is_the_identity(
    mine: tuple[list[int], list[int]],
    theirs: tuple[list[int], list[int]],
    max_size: int | None,
    pending: bool,
) -> None:
    (padding, fed), (other_padding, other_fed) = mine, theirs
    names = "abcd"[: len(padding)]
    start: list[Part] = [padded(max_size, padding), feed(*fed)]
    if pending:
        due = [max(0, pads - sum(fed)) for pads in padding]
        start.append(prepare(*(pads + b for b, pads in enumerate(due))))
    one = Play(*start, padded(max_size, other_padding, "efgh", "y"), feed(*other_fed, cache="y"))
    one.go(extend("y", "pqrs"[: len(other_padding)]), keep(names))
    other = Play(*start)
    end = (finalize(), feed(1, 2, 1))
    assert one.go(*end).sights[0].items() >= other.go(*end).sights[0].items()
    assert one.sights[1].items() >= other.sights[1].items()
    assert one.offsets == other.offsets


@few
@given(padding=paddings, fed=chunks, other_fed=maybe_chunks, max_size=growing_or_ring)
def test_extend_leaves_the_other_batch_as_it_was(
    padding: list[int], fed: list[int], other_fed: list[int], max_size: int | None
) -> None:
    other: list[Part] = [padded(max_size, [0, 1], "ef", "y"), feed(*other_fed, cache="y")]
    one = Play(padded(max_size, padding), feed(*fed), *other, extend("y", "pq"), feed(1, 2))
    two = Play(*other)
    end = feed(1, 3, 1, cache="y")
    one.go(*end)
    two.go(*end)
    assert [one.of_row(row) for row in "ef"] == [two.of_row(row) for row in "ef"]
    assert one.offsets == two.offsets


# -- trim ------------------------------------------------------------------------------------------


@few
@given(fed=chunks, max_size=growing_or_ring, sinks=st.integers(0, 3), wanted=st.integers(0, 9), data=st.data())
def test_trim_and_feeding_the_same_again_is_the_identity(
    fed: list[int], max_size: int | None, sinks: int, wanted: int, data: st.DataObject
) -> None:
    start = (alone("a", max_size, "x", 0 if max_size is None else sinks % max_size), feed(*fed))
    one = Play(*start)
    n = min(wanted, ref.trim_limit(held_by_reference()))
    assert held().trim_limit() == ref.trim_limit(held_by_reference())
    one.go(trim(n), feed(*data.draw(cut(n))), feed(1, 2, 1))
    other = Play(*start, feed(1, 2, 1))
    assert one.sights == other.sights
    assert one.offsets == other.offsets


@few
@given(padding=paddings, fed=chunks, max_size=growing_or_ring, wanted=st.integers(0, 9), data=st.data())
def test_trim_of_a_batch_and_feeding_the_same_again_is_the_identity(
    padding: list[int], fed: list[int], max_size: int | None, wanted: int, data: st.DataObject
) -> None:
    start = (padded(max_size, padding), feed(*fed))
    one = Play(*start)
    n = min(wanted, ref.trim_limit(held_by_reference()))
    assert held().trim_limit() == ref.trim_limit(held_by_reference())
    one.go(trim(n), feed(*data.draw(cut(n))), feed(1, 2, 1))
    other = Play(*start, feed(1, 2, 1))
    assert one.sights == other.sights
    assert one.offsets == other.offsets


@few
@given(before=maybe_chunks, total=st.integers(1, 9), max_size=growing_or_ring, sinks=st.integers(0, 3), data=st.data())
def test_feeding_many_and_trimming_some_is_feeding_fewer(
    before: list[int], total: int, max_size: int | None, sinks: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(0, total))
    start = (alone("a", max_size, "x", 0 if max_size is None else sinks % max_size), feed(*before))
    # An update of one token keeps no more than a ring needs, so its trim is the trim limit's matter.
    if total == 1 and max_size is not None and sum(before) >= max_size:
        n = 0
    one = Play(*start, feed(total), trim(n), feed(1, 2, 1))
    other = Play(*start, feed(*([total - n] if n < total else [])), feed(1, 2, 1))
    kept = sum(before) + total - n
    assert one.of_row("a", kept) == other.of_row("a", kept)
    assert one.offsets == other.offsets


# -- what a row does not see -----------------------------------------------------------------------


@few
@given(padding=paddings, more=st.integers(1, 4), fed=chunks, max_size=growing_or_ring)
def test_more_left_padding_changes_nothing_that_a_row_sees(
    padding: list[int], more: int, fed: list[int], max_size: int | None
) -> None:
    one = Play(padded(max_size, padding), feed(*fed, 1))
    other = Play(padded(max_size, [pads + more for pads in padding]), feed(more), feed(*fed, 1))
    assert one.sights == other.sights
    assert one.offsets == other.offsets


@few
@given(padding=paddings, others=st.lists(st.integers(0, 6), min_size=1, max_size=2), fed=chunks, size=growing_or_ring)
def test_more_rows_change_nothing_that_a_row_sees(
    padding: list[int], others: list[int], fed: list[int], size: int | None
) -> None:
    one = Play(padded(size, padding), feed(*fed, 1))
    other = Play(padded(size, [*padding, *others]), feed(*fed, 1))
    for row in "abcd"[: len(padding)]:
        assert one.of_row(row) == other.of_row(row)
    assert [o[: len(padding)] for o in other.offsets] == one.offsets


@fewer
@given(padding=paddings, fed=chunks, max_size=growing_or_ring)
def test_a_row_of_a_batch_sees_what_it_would_see_alone(
    padding: list[int], fed: list[int], max_size: int | None
) -> None:
    together = Play(padded(max_size, padding), feed(*fed, 1))
    for row, pads in zip("abcd", padding, strict=False):
        by_itself = Play(alone(row, max_size, "x"), [])
        for count in (*fed, 1):
            pads, tokens = max(0, pads - count), max(0, count - pads)
            by_itself.go(feed(*[tokens] if tokens else []))
        assert by_itself.sights == together.of_row_by_name(row)


CONFIGS = [
    Config(dtype=dtype, heads=heads, key_dim=key_dim, value_dim=value_dim)
    for dtype, (heads, key_dim, value_dim) in zip((*DTYPES, "float32"), ((1, 4, 4), (2, 5, 4), (3, 4, 7), (2, 6, 6)), strict=True)
]


@fewer
@given(padding=paddings, fed=chunks, max_size=growing_or_ring)
def test_dtype_and_head_split_change_nothing_that_a_row_sees(
    padding: list[int], fed: list[int], max_size: int | None
) -> None:
    plays = [Play(padded(max_size, padding), feed(*fed, 1, 2), config=config) for config in CONFIGS]
    assert all(play.sights == plays[0].sights for play in plays)
    assert all(play.offsets == plays[0].offsets for play in plays)
