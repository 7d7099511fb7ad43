"""What people who run such caches have reported, as traces on the reference and on mlximpl.

D1 to D12 are deviations of mlx-lm, R3 to R13 come from issue threads. Each stands for its kind, so each is tried with
its kin. The harness holds both implementations against the histories; what a test spells out is what was reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlximpl
from conformance import operations as ops
from conformance.adapters.base import Adapter
from conformance.adapters.reference import ReferenceAdapter
from conformance.adapters.surface import SurfaceAdapter
from conformance.driver import Driver
from conformance.observed import checks_of
from conformance.payload import Config
from conformance.situations.build import (
    Part,
    batch,
    batch_ring,
    copy,
    extend,
    extract,
    feed,
    finalize,
    keep,
    mask,
    merge,
    ones,
    prepare,
    restore,
    ring,
    situation,
    solo,
    trim,
)

Checks = list[dict[str, Any]]
"""What was seen at a step, on the reference and on mlximpl."""


def play(*parts: Part, config: Config | None = None) -> Checks:
    """Run the trace on both; what is seen at the last step."""
    adapters: list[Adapter] = [ReferenceAdapter(), SurfaceAdapter("mlximpl", mlximpl, mlximpl.__version__)]
    driver = Driver(adapters, config or Config())
    checks: Checks = []
    for operation in situation("", "", "", *parts).operations:
        seen = driver.step(operation)
        checks = [checks_of(driver, operation, each) for each in seen]
    return checks


def saw(checks: Checks, row: str) -> list[int | str]:
    """The positions that the row's last query saw, the same on both."""
    reference, ours = (each["visible"][row][-1] for each in checks)
    assert reference == ours
    assert isinstance(ours, list)
    return ours


def refused(*parts: Part) -> bool:
    """Whether both refused the last operation. The harness sees that nothing was changed by it."""
    return all(each.get("refused", False) for each in play(*parts))


def upto(stop: int, size: int | None = None) -> list[int]:
    """The positions before `stop`, or the newest of them."""
    return list(range(0 if size is None else max(0, stop - size), stop))


def offsets(checks: Checks) -> list[int]:
    """Of all rows, the same on both."""
    reference, ours = (each["offsets"] for each in checks)
    assert reference == ours
    assert isinstance(ours, list)
    return ours


SIZES = (None, 4)
"""A growing cache and a ring."""


def one(size: int | None, row: str = "a", cache: str = "x") -> ops.New:
    return solo(row, cache) if size is None else ring(size, 0, row, cache)


def rows(size: int | None, *padding: int, names: str = "abcdef", cache: str = "x") -> ops.New:
    if size is None:
        return batch(*padding, rows=names, cache=cache)
    return batch_ring(size, *padding, rows=names, cache=cache)


# -- D1: padding counted from the head of a wrapped ring -------------------------------------------


def test_d1_several_tokens_after_wrapping_leave_a_padded_row_all_its_tokens() -> None:
    checks = play(batch_ring(8, 7, 0), feed(8, 1), mask(2), feed(2))
    assert saw(checks, "a") == upto(4)
    assert saw(checks, "b") == upto(11, 8)


@pytest.mark.parametrize("single", [1, 3, 6])
@pytest.mark.parametrize("several", [2, 3, 7])
def test_d1_kin_any_number_of_single_tokens_then_several(single: int, several: int) -> None:
    for padding in (1, 3, 9):
        checks = play(batch_ring(4, padding, 0), ones(single), feed(several, 1, several))
        tokens = single + 2 * several + 1
        assert saw(checks, "b") == upto(tokens, 4)
        if tokens > padding:
            assert saw(checks, "a") == upto(tokens - padding, 4)


# -- D2: sinks hidden, depending on the chunk ------------------------------------------------------


def test_d2_every_query_of_a_chunk_sees_the_sinks() -> None:
    checks = play(ring(8, keep=2), feed(8), mask(4), feed(4))
    for each in checks:
        assert [sight[:2] for sight in each["visible"]["a"]] == [[0, 1]] * 4
    assert saw(checks, "a") == [0, 1, *range(6, 12)]


@pytest.mark.parametrize(("size", "sinks"), [(2, 1), (4, 3), (8, 2)])
def test_d2_kin_sinks_stay_in_sight_whatever_the_chunks(size: int, sinks: int) -> None:
    for fed, window in product([(17,), (8, 8, 1), (1,) * 17, (3, 1, 9, 4)], [None, 3, 30]):
        checks = play(ring(size, keep=sinks), feed(*fed, window=window))
        width = min(window or size, size - sinks)
        assert saw(checks, "a") == [*range(sinks), *upto(17, width)]


# -- D3: sinks lost in a merge ---------------------------------------------------------------------


@pytest.mark.parametrize("fed", [(), (1,), (8,), (8, 1, 1)])
def test_d3_sinks_are_kept_in_a_merge(fed: tuple[int, ...]) -> None:
    checks = play(ring(8, keep=2, row="a", cache="i"), feed(*fed, cache="i"), merge("i", "p"), ones(12))
    tokens = sum(fed) + 12
    assert saw(checks, "p") == [0, 1, *upto(tokens, 6)]


def test_d3_kin_rings_with_and_without_sinks_are_not_merged() -> None:
    for first, second in product([0, 2, 3], repeat=2):
        two = (ring(8, first, "a", "i"), ring(8, second, "b", "j"), feed(3, cache="i"), feed(3, cache="j"))
        assert refused(*two, merge("ij", "pq")) == (first != second)


# -- D4: trims that a wrapped ring cannot give -----------------------------------------------------


def test_d4_a_wrapped_ring_refuses_what_it_has_evicted() -> None:
    assert refused(ring(8), ones(20), trim(6))


@pytest.mark.parametrize(
    ("new", "lawful"),
    [
        (ring(4), {0, 1, 6}),
        (ring(4, keep=1), {0, 1, 5, 6}),
        (ring(4, keep=3), {0, 1, 2, 3, 4, 5, 6}),
        (ring(1), {0, 1, 2, 3, 4, 5, 6}),
        (batch_ring(4, 0, 2), {0, 1}),
        (batch_ring(4, 0, 0), {0, 1, 6}),
        (batch_ring(4, 2, 2), {0, 1, 2, 3, 4}),
    ],
)
def test_d4_kin_a_wrapped_ring_gives_back_a_token_or_all_behind_its_sinks(new: ops.New, lawful: set[int]) -> None:
    assert {n for n in (*range(8), 50) if not refused(new, ones(6), trim(n))} == lawful


def test_d4_kin_a_wrapped_ring_gives_back_the_token_that_it_just_took() -> None:
    for new in (ring(4), batch_ring(4, 0, 3)):
        for count in (5, 7, 8, 9):
            checks = play(new, ones(count), trim(1), feed(1))
            assert saw(checks, "a") == upto(count, 4)


def test_d4_kin_a_slot_that_a_trim_has_emptied_is_not_given_back_again() -> None:
    assert refused(ring(4), ones(6), trim(1), trim(1))
    assert refused(batch_ring(4, 0, 1), ones(6), trim(1), trim(1))
    assert saw(play(batch_ring(4, 3, 3), ones(6), trim(1), trim(1), feed(1)), "a") == [0, 1]


@pytest.mark.parametrize("several", [2, 4, 7])
def test_d4_kin_after_several_tokens_as_many_can_be_dropped_and_no_more(several: int) -> None:
    for n in range(1, several + 1):
        checks = play(ring(4), ones(6), feed(several), trim(n), feed(1))
        assert saw(checks, "a") == upto(6 + several - n + 1, 4)
    assert refused(ring(4), ones(6), feed(several), trim(several + 1))


# -- D5: a rollback of all layers or of none -------------------------------------------------------


def layers(*fed: int) -> list[Any]:
    """A growing layer and a ring of 8."""
    made: list[Any] = [mlximpl.KVCache(), mlximpl.RotatingKVCache(8)]
    for cache in made:
        start = 0
        for count in fed:
            keys = mx.arange(start, start + count, dtype=mx.float32).reshape(1, 1, count, 1)
            cache.update_and_fetch(keys, keys)
            start += count
    return made


def test_d5_rejected_tokens_leave_every_layer() -> None:
    made = layers(7, 4)
    assert mlximpl.trim_prompt_cache(made, 3) == 3
    for cache in made:
        assert cache.offset == 8
        assert cache.keys_and_values()[0].flatten().tolist() == upto(8)


def test_d5_layers_trimmed_one_by_one_go_on_without_the_rejected_tokens() -> None:
    start = (solo(), ring(8, row="b", cache="y"), feed(7, 4), feed(7, 4, cache="y"), trim(3), trim(3, "y"))
    assert saw(play(start, feed(1)), "a") == upto(9)
    assert saw(play(start, feed(1, cache="y")), "b") == upto(9, 8)


@pytest.mark.parametrize("fed", [(7,), (8,), (11,), (7, 4), (4, 4, 4), (8, 1, 1), (1,) * 12])
def test_d5_kin_a_rollback_is_exact_on_all_layers_or_touches_none(fed: tuple[int, ...]) -> None:
    total = sum(fed)
    for n in range(total + 2):
        made = layers(*fed)
        try:
            dropped = mlximpl.trim_prompt_cache(made, n)
        except ValueError:
            assert n > fed[-1]
            assert [cache.offset for cache in made] == [total, total]
        else:
            assert dropped == n
            assert [cache.offset for cache in made] == [total - n, total - n]


@pytest.mark.parametrize("fed", [(3,), (8,), (11,), (4, 4), (7, 4)])
def test_d5_kin_a_ring_that_still_holds_all_can_be_trimmed(fed: tuple[int, ...]) -> None:
    assert mlximpl.can_trim_prompt_cache(layers(*fed))


@pytest.mark.parametrize("fed", [(8, 1), (8, 4), (4, 4, 4), (11, 1)])
def test_d5_kin_a_ring_that_has_lost_a_token_cannot(fed: tuple[int, ...]) -> None:
    assert not mlximpl.can_trim_prompt_cache(layers(*fed))


# -- D6: rows that leave or come in the midst of a ragged prefill ----------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_d6_a_row_that_stays_in_a_ragged_prefill_is_one_row(size: int | None) -> None:
    start = (rows(size, 0, 0), ops.Prepare("x", lengths=(4, 2), right_padding=(0, 2)), feed(4), keep("b"))
    assert offsets(play(*start, finalize())) == [2]
    assert saw(play(*start, finalize(), feed(1)), "b") == [0, 1, 2]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kept", ["a", "b", "c", "ba", "cab", "bb", ""])
@pytest.mark.parametrize("fed", [(), (1,), (2, 2), (5,)])
def test_d6_kin_any_rows_may_stay_whenever_they_are_asked(size: int | None, kept: str, fed: tuple[int, ...]) -> None:
    lengths = {"a": 5, "b": 2, "c": 0}
    rest = 5 - sum(fed)
    names = "pqr"[: len(kept)]
    start = (rows(size, 0, 0, 0), feed(1), prepare(*lengths.values()), feed(*fed), keep(kept, names))
    checks = play(start, feed(*[rest] * (rest > 0 and bool(kept))), finalize(), feed(1))
    assert offsets(checks) == [1 + lengths[row] + 1 for row in kept]
    for row, name in zip(kept, names, strict=True):
        assert saw(checks, name) == upto(lengths[row] + 2, size)


@pytest.mark.parametrize("size", SIZES)
def test_d6_kin_a_row_stands_alone_in_the_midst_of_a_ragged_prefill(size: int | None) -> None:
    start = (rows(size, 0, 0), prepare(5, 2), feed(3))
    assert saw(play(start, extract("a", "y", "p"), feed(1, cache="y")), "p") == upto(4, size)
    assert saw(play(start, extract("b", "y", "p"), feed(1, cache="y")), "p") == upto(3, size)
    assert saw(play(start, extract("b", "y", "p"), feed(2), finalize(), feed(1)), "b") == upto(3, size)


@pytest.mark.parametrize("size", SIZES)
def test_d6_kin_a_batch_joins_in_the_midst_of_a_ragged_prefill(size: int | None) -> None:
    other = (rows(size, 0, names="c", cache="y"), feed(3, cache="y"))
    checks = play(rows(size, 0, 0), prepare(5, 2), feed(3), other, extend("y", "c"), feed(2), finalize(), feed(1))
    assert offsets(checks) == [6, 3, 6]
    assert [saw(checks, row) for row in "abc"] == [upto(6, size), upto(3, size), upto(6, size)]


# -- D7: negative trims ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [-1, -5, -1000])
@pytest.mark.parametrize("new", [solo(), ring(8), ring(8, keep=2), batch(0, 2), batch_ring(8, 0, 2), batch()])
def test_d7_a_negative_trim_is_refused(new: ops.New, n: int) -> None:
    assert refused(new, trim(n))
    assert refused(new, feed(3), trim(n))
    assert refused(new, ones(9), trim(n))


# -- D8: a state that does not carry everything ----------------------------------------------------


def test_d8_a_batch_ring_goes_on_from_its_state() -> None:
    checks = play(batch_ring(4, 0, 1), feed(2), restore("pq"), feed(1, cache="y"))
    assert [saw(checks, row) for row in "pq"] == [upto(3), upto(2)]


def test_d8_a_batch_made_of_a_state_is_prepared_and_finalized() -> None:
    checks = play(batch(0, 1), restore("pq"), prepare(3, 2, cache="y"), feed(3, cache="y"), finalize("y"))
    assert offsets(checks) == [3, 1]


STATES: dict[str, tuple[Part, ...]] = {
    "never fed": (),
    "padding due": (feed(1),),
    "short": (feed(3),),
    "longer than max_size": (feed(9),),
    "wrapped": (ones(7),),
    "trimmed after wrapping": (ones(7), trim(1)),
    "emptied": (feed(3), keep("")),
    "pending, nothing fed": (prepare(5, 3),),
    "pending": (prepare(5, 3), feed(3)),
    "pending, all fed": (feed(4), prepare(4, 1), feed(4)),
    "right padding alone": (feed(2), ops.Prepare("x", right_padding=(0, 2))),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", STATES)
def test_d8_kin_a_state_carries_all_that_going_on_needs(size: int | None, where: str) -> None:
    names = "" if where == "emptied" else "pq"
    rest = {"pending, nothing fed": 5, "pending": 2, "right padding alone": 3}.get(where, 0)
    end = (feed(*[rest] * (rest > 0), cache="y"), finalize("y"), feed(1, 3, 1, cache="y"))
    checks = play(rows(size, 0, 2), STATES[where], restore(names), end)
    assert offsets(checks) == offsets(play(rows(size, 0, 2), STATES[where], copy(names), end))


# -- D9: padding that was not fed yet --------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 4, 16])
def test_d9_rows_whose_padding_is_due_may_be_filtered(size: int | None) -> None:
    checks = play(rows(size, 3, 5), keep("ab"), mask(4), feed(4))
    assert offsets(checks) == [1, -1]
    assert saw(checks, "a") == [0]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kept", ["a", "b", "ba", "aab"])
@pytest.mark.parametrize("fed", [0, 1, 3, 4, 6])
def test_d9_kin_filtered_padding_counts_once_whenever_it_is_filtered(size: int | None, kept: str, fed: int) -> None:
    names = "pqr"[: len(kept)]
    checks = play(rows(size, 3, 5), feed(*[fed] * (fed > 0)), keep(kept, names), feed(6, 1))
    padding = [{"a": 3, "b": 5}[row] for row in kept]
    assert offsets(checks) == [fed + 7 - pads for pads in padding]
    for name, pads in zip(names, padding, strict=True):
        assert saw(checks, name) == upto(fed + 7 - pads, size)


# -- D12's kind: caches that hold nothing yet ------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_d12_kin_a_row_of_a_batch_never_fed_is_an_empty_cache(size: int | None) -> None:
    for start in ((), prepare(3, 1), keep("ba"), ops.Prepare("x", left_padding=(1, 0))):
        checks = play(rows(size, 2, 0), start, extract("a", "y", "p"))
        assert offsets(checks) == [0]
        assert saw(play(rows(size, 2, 0), start, extract("a", "y", "p"), feed(1, cache="y")), "p") == [0]


@pytest.mark.parametrize("size", SIZES)
def test_d12_kin_a_row_whose_tokens_were_all_trimmed_is_an_empty_cache(size: int | None) -> None:
    start = (rows(size, 0, 0), feed(3), trim(3))
    assert saw(play(start, extract("b", "y", "p"), feed(1, cache="y")), "p") == [0]
    assert saw(play(start, extract("b", "y", "p"), merge("y", "q", "z"), feed(2, cache="z")), "q") == [0, 1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fed", [(0, 0, 0), (0, 3, 0), (6, 0, 1), (0, 0, 9)])
def test_d12_kin_empty_caches_merge_with_any_others(size: int | None, fed: tuple[int, ...]) -> None:
    start = [(one(size, row, cache), ones(n, cache)) for row, cache, n in zip("abc", "ijk", fed, strict=True)]
    checks = play(*start, merge("ijk", "pqr"), feed(2))
    assert offsets(checks) == [n + 2 for n in fed]
    assert [saw(checks, row) for row in "pqr"] == [upto(n + 2, size) for n in fed]
    checks = play(*start, merge("ijk", "pqr"), extract("p", "y", "s"), feed(1, cache="y"))
    assert saw(checks, "s") == upto(fed[0] + 1, size)


# -- R3: snapshots ---------------------------------------------------------------------------------

SURFACE: dict[str, Callable[[], Any]] = {
    "KVCache": mlximpl.KVCache,
    "RotatingKVCache": lambda: mlximpl.RotatingKVCache(4),
    "RotatingKVCache with sinks": lambda: mlximpl.RotatingKVCache(4, keep=1),
    "BatchKVCache": lambda: mlximpl.BatchKVCache([0, 1]),
    "BatchRotatingKVCache": lambda: mlximpl.BatchRotatingKVCache(4, [0, 1]),
}


def step(cache: Any, tokens: int, value: float = 1.0) -> tuple[mx.array, mx.array]:
    """Feed tokens of one value."""
    batched = isinstance(cache.offset, mx.array)
    x = mx.full((cache.offset.size if batched else 1, 1, tokens, 4), value)
    keys, values = cache.update_and_fetch(x, -x)
    return keys, values


def read(handed_out: Sequence[Any]) -> list[Any]:
    """Numbers instead of arrays."""
    return [x.tolist() if isinstance(x, mx.array) else x for x in handed_out]


def test_r3_a_state_is_as_it_was_after_a_trim_and_an_update() -> None:
    for make in SURFACE.values():
        cache = make()
        step(cache, 3)
        state = cache.state
        before = read(state)
        cache.trim(2)
        step(cache, 2, 9.0)
        assert read(state) == before


AFTERWARDS: dict[str, Callable[[Any], Any]] = {
    "one token": lambda cache: step(cache, 1, 9.0),
    "single tokens round the ring": lambda cache: [step(cache, 1, 9.0) for _ in range(6)],
    "several tokens": lambda cache: step(cache, 5, 9.0),
    "trimmed and fed": lambda cache: (cache.trim(min(1, cache.trim_limit())), step(cache, 1, 9.0)),
    "a copy of the state fed": lambda cache: step(type(cache).from_state(cache.state), 1, 9.0),
    "rows taken": lambda cache: hasattr(cache, "filter") and (cache.filter([1]), step(cache, 1, 9.0)),
    "extended by itself": lambda cache: hasattr(cache, "extend") and (cache.extend(cache), step(cache, 1, 9.0)),
    "a row extracted": lambda cache: hasattr(cache, "extract") and step(cache.extract(0), 1, 9.0),
    "a ragged prefill": lambda cache: (
        hasattr(cache, "prepare")
        and (cache.prepare(lengths=[3, 1], right_padding=[0, 2]), step(cache, 3, 9.0), cache.finalize())
    ),
}


@pytest.mark.parametrize("kind", SURFACE)
@pytest.mark.parametrize("afterwards", AFTERWARDS)
def test_r3_kin_nothing_handed_out_changes_whatever_comes_after(kind: str, afterwards: str) -> None:
    for fed in ((1,), (3,), (4,), (1, 1, 1, 1, 1, 1), (6,), (6, 1)):
        cache = SURFACE[kind]()
        fetches = [array for tokens in fed for array in step(cache, tokens)]
        held = [*cache.state, *cache.keys_and_values(), *fetches[-2:], cache.keys, cache.values, cache.offset]
        held.append(getattr(cache, "left_padding", None))
        before = read(held)
        AFTERWARDS[afterwards](cache)
        assert read(held) == before


# -- R4: bookkeeping that grows a graph ------------------------------------------------------------


@pytest.mark.parametrize("kind", SURFACE)
def test_r4_five_hundred_steps_leave_no_growing_graph(kind: str, tmp_path: Path) -> None:
    cache = SURFACE[kind]()

    def nodes() -> int:
        offsets = [x for x in (cache.offset, getattr(cache, "left_padding", None)) if isinstance(x, mx.array)]
        dot = tmp_path / "graph.dot"
        mx.export_to_dot(str(dot), *offsets, *cache.keys_and_values())
        return len(dot.read_text(encoding="utf-8").splitlines())

    def decode(steps: int) -> None:
        for _ in range(steps):
            cache.make_mask(1)
            # What a server evaluates: the step's output, and nothing of the bookkeeping.
            mx.eval(*step(cache, 1))

    decode(3)
    few = nodes()
    decode(500)
    assert nodes() <= few + 2


@pytest.mark.parametrize("kind", ["BatchKVCache", "BatchRotatingKVCache"])
def test_r4_kin_offsets_that_are_read_late_are_those_of_their_step(kind: str) -> None:
    cache = SURFACE[kind]()
    kept, computed = [], []
    for _ in range(100):
        kept.append(cache.offset)
        computed.append(cache.offset + 1)
        mx.eval(*step(cache, 1))
    assert read(kept) == [[count, count - 1] for count in range(100)]
    assert read(computed) == [[count + 1, count] for count in range(100)]


# -- R5: rings of every condition merged -----------------------------------------------------------

CONDITIONS: dict[str, tuple[Callable[[str], Part], int]] = {
    "empty": (lambda cache: (), 0),
    "one token": (lambda cache: feed(1, cache=cache), 1),
    "short": (lambda cache: feed(3, cache=cache), 3),
    "full": (lambda cache: feed(4, cache=cache), 4),
    "longer than max_size": (lambda cache: feed(9, cache=cache), 9),
    "wrapped": (lambda cache: ones(6, cache), 6),
    "wrapped twice": (lambda cache: ones(9, cache), 9),
    "unrolled again": (lambda cache: (ones(6, cache), feed(2, cache=cache)), 8),
    "trimmed short": (lambda cache: (feed(3, cache=cache), trim(2, cache)), 1),
    "trimmed empty": (lambda cache: (feed(3, cache=cache), trim(3, cache)), 0),
    "trimmed after wrapping": (lambda cache: (ones(6, cache), trim(1, cache)), 5),
    "trimmed after several": (lambda cache: (ones(6, cache), feed(3, cache=cache), trim(3, cache)), 6),
}
"""What is done to a ring of 4 slots, and how many tokens it has then."""


def condition(name: str, row: str, cache: str) -> Part:
    """The ring of that condition."""
    return ring(4, row=row, cache=cache), CONDITIONS[name][0](cache)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 9])
def test_r5_rings_of_every_condition_merged_see_their_windows(chunk: int) -> None:
    for group in (list(CONDITIONS)[start::2] for start in (0, 1)):
        made = [condition(*each) for each in zip(group, "abcdef", "ijklmn", strict=True)]
        checks = play(made, merge("ijklmn", "pqrstu"), feed(chunk, chunk, chunk))
        for name, row in zip(group, "pqrstu", strict=True):
            assert saw(checks, row) == upto(CONDITIONS[name][1] + 3 * chunk, 4)


@pytest.mark.parametrize("first", CONDITIONS)
@pytest.mark.parametrize("second", ["empty", "wrapped"])
def test_r5_kin_two_rings_merged_fed_and_extracted(first: str, second: str) -> None:
    two = (condition(first, "a", "i"), condition(second, "b", "j"), merge("ij", "pq"), feed(1, 3))
    checks = play(two, extract("p", "y", "r"), ones(2, cache="y"))
    assert saw(checks, "r") == upto(CONDITIONS[first][1] + 6, 4)


# -- R9: masks from a negative offset --------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 4, 16])
@pytest.mark.parametrize("fed", [(1,), (3, 1), (4, 2)])
def test_r9_a_row_whose_padding_is_due_hides_nothing_and_shows_nothing(size: int | None, fed: tuple[int, ...]) -> None:
    total = sum(fed)
    for padding in (1, 5, 9):
        checks = play(rows(size, padding, 0), feed(*fed))
        assert offsets(checks) == [total - padding, total]
        assert saw(checks, "b") == upto(total, size)
        if total > padding:
            assert saw(checks, "a") == upto(total - padding, size)
        else:
            assert all(each["visible"]["a"][-1] is None for each in checks)
        checks = play(rows(size, padding, 0), feed(*fed, 9, 1))
        assert saw(checks, "a") == upto(total + 10 - padding, size)


# -- R10: zeroed keys still take weight ------------------------------------------------------------

ATTEND = Config(heads=2, key_dim=5, value_dim=6, attention=True)
"""The harness compares attention over each fetch with attention over the row's tokens alone, in float64."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fed", [(6,), (2, 4), (1,) * 6])
def test_r10_pads_take_no_weight_wherever_they_come_from(size: int | None, fed: tuple[int, ...]) -> None:
    for lengths, padding in product([(6, 2), (0, 6)], [(0, 0), (2, 0)]):
        own = [min(6, length + pads) for length, pads in zip(lengths, padding, strict=True)]
        checks = play(rows(size, *padding), prepare(*own), feed(*fed), finalize(), feed(1, 2, 1), config=ATTEND)
        assert offsets(checks) == [length - pads + 4 for length, pads in zip(own, padding, strict=True)]


@pytest.mark.parametrize(
    ("new", "before", "fed", "n", "tokens"),
    [
        (ring(4), 6, 1, 1, 6),
        (ring(4), 0, 6, 2, 4),
        (ring(4), 6, 3, 3, 6),
        (batch_ring(4, 0, 1), 6, 1, 1, 6),
        (batch_ring(4, 0, 1), 6, 3, 2, 7),
        (batch_ring(4, 4, 4), 6, 1, 3, 0),  # wrapped, and only pads were evicted
        (batch_ring(4, 2, 2), 4, 1, 2, 1),  # back behind the slot where it wrapped
        (batch(0, 1), 0, 4, 3, 1),
    ],
)
def test_r10_kin_tokens_that_were_dropped_take_no_weight(
    new: ops.New, before: int, fed: int, n: int, tokens: int
) -> None:
    for more in (1, 2, 3):
        checks = play(new, ones(before), feed(fed), trim(n), feed(more, 1), config=ATTEND)
        assert saw(checks, "a") == upto(tokens + more + 1, new.max_size)


@pytest.mark.parametrize("size", SIZES)
def test_r10_kin_pads_that_a_merge_or_another_batch_brings_take_no_weight(size: int | None) -> None:
    two = (one(size, "a", "i"), one(size, "b", "j"), feed(3, cache="i"), feed(1, cache="j"), merge("ij", "pq"))
    longer = (rows(size, 0, 4, names="cd", cache="y"), feed(6, cache="y"))
    checks = play(two, feed(1), longer, extend("y", "rs"), feed(1, 2, 1), config=ATTEND)
    assert [saw(checks, row) for row in "pqrs"] == [upto(tokens, size) for tokens in (8, 6, 10, 6)]


# -- R13: batches of one row, of empty rows, and of rows that leave at once ------------------------


@pytest.mark.parametrize("size", SIZES)
def test_r13_a_batch_of_one_row_goes_through_everything(size: int | None) -> None:
    start = (rows(size, 2), feed(3, 1), prepare(2), feed(2), finalize(), keep("a"))
    checks = play(start, extract("a", "y", "p"), merge("y", "q", "z"), extend("z", "r"), feed(1, 2))
    assert [saw(checks, row) for row in "ar"] == [upto(7, size)] * 2
    assert saw(play(rows(size, 0), ops.Prepare("x", right_padding=(2,)), feed(3), finalize(), feed(1)), "a") == [0, 1]


@pytest.mark.parametrize("size", SIZES)
def test_r13_a_batch_of_empty_rows_goes_through_everything(size: int | None) -> None:
    empty = [one(size, row, cache) for row, cache in zip("abc", "ijk", strict=True)]
    start = (*empty, merge("ijk", "pqr"))
    assert offsets(play(start, mask(2))) == [0, 0, 0]
    for midst in (
        keep("pr", "pq"),
        finalize(),
        trim(0),
        copy("stu"),
        restore("stu"),
        (rows(size, 0, names="v", cache="y"), extend("y", "w")),
        (prepare(3, 1, 0), feed(3), finalize()),
        (prepare(3, 1, 0), finalize()),
        (feed(2), trim(2)),
    ):
        checks = play(start, midst, feed(1, 2))
        for row, offset in zip(checks[0]["rows"], offsets(checks), strict=True):
            assert saw(checks, row) == upto(offset, size)


MANY = tuple(f"r{number}" for number in range(64))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stays", [0, 63])
def test_r13_sixty_three_of_sixty_four_rows_leave_at_once(size: int | None, stays: int) -> None:
    padding = tuple(number % 5 for number in range(64))
    kind = "BatchKVCache" if size is None else "BatchRotatingKVCache"
    new = ops.New("x", kind, MANY, padding, size)
    leave = ops.Filter("x", (MANY[stays],), ("p",))
    ragged = ops.Prepare("x", lengths=tuple(5 + number % 3 for number in range(64)))
    for start, fed in (((), 0), ((ones(5),), 5), ((ragged, feed(4)), 4)):
        checks = play(new, start, leave, finalize(), feed(1, 2, 1))
        assert saw(checks, "p") == upto(fed + 4 - padding[stays], size)


def test_r13_kin_the_rows_that_left_hold_no_memory() -> None:
    for make in (lambda: mlximpl.BatchKVCache([0] * 64), lambda: mlximpl.BatchRotatingKVCache(64, [0] * 64)):
        cache: Any = make()
        before = mx.get_active_memory()
        cache.update_and_fetch(mx.zeros((64, 4, 200, 16)), mx.ones((64, 4, 200, 16)))
        mx.eval(cache.keys, cache.values)
        whole = mx.get_active_memory() - before
        cache.filter([17])
        mx.eval(cache.keys, cache.values)
        assert cache.offset.tolist() == [200]
        assert mx.get_active_memory() - before <= whole / 32
