"""What is written down of mlx-lm's calls on its caches, and what cannot be said as one operation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from conformance import operations as ops
from conformance.capture import Capture, head_shapes
from conformance.wrapping import CLASSES, wrapped

theirs: Any = pytest.importorskip("mlx_lm.models.cache")
mx: Any = pytest.importorskip("mlx.core")


@pytest.fixture
def capture() -> Iterator[Capture]:
    found = Capture((0,))
    with wrapped(found):
        yield found


def followed(capture: Capture, cache: Any) -> Any:
    capture.follow_new([cache], "a")
    return cache


def columns(count: int, heads: int = 1) -> Any:
    return mx.random.normal((1, heads, count, 4))


def ask_mask(cache: Any, count: int, window: int | None = None, array: bool = False) -> None:
    cache.make_mask(count, window_size=window, return_array=array)


def operations(capture: Capture) -> list[ops.Operation]:
    return [event.operation for event in capture.events[0][1:]]


def test_a_recurrent_layers_calls_are_one_update(capture: Capture) -> None:
    cache = followed(capture, theirs.ArraysCache(2))
    cache.make_mask(3)
    cache[0], cache[1] = mx.ones((1, 2)), mx.ones((1, 5))
    assert operations(capture) == []
    cache.advance(3)
    assert operations(capture) == [ops.Update("c1", 3)]
    event = capture.events[0][-1]
    assert {name: x.shape for name, x in event.inputs.items()} == {"input.slot.0": (1, 2), "input.slot.1": (1, 5)}
    assert event.seen.states is not None and [x.shape for x in event.seen.states if x is not None] == [(1, 2), (1, 5)]
    assert head_shapes(capture.events[0]).dtype == "float32"


def test_a_write_to_one_slot_is_an_update_of_it(capture: Capture) -> None:
    cache = followed(capture, theirs.ArraysCache(3))
    cache.make_mask(1)
    cache[1] = mx.ones((1, 2))
    cache.advance(1)
    assert operations(capture) == [ops.Update("c1", 1, slot=1)]


def test_an_update_of_some_slots_is_refused(capture: Capture) -> None:
    cache = followed(capture, theirs.ArraysCache(3))
    cache.make_mask(1)
    cache[0], cache[1] = mx.ones((1, 2)), mx.ones((1, 5))
    with pytest.raises(RuntimeError, match=r"an update of the slots \[0, 1\]: a trace has one, or all"):
        cache.advance(1)


def test_an_update_of_a_list_is_that_of_all_its_children(capture: Capture) -> None:
    cache = followed(capture, theirs.CacheList(theirs.ArraysCache(1), theirs.KVCache()))
    ask_mask(cache[1], 2, array=True)
    cache[0].make_mask(2)
    cache[0][0] = mx.ones((1, 2))
    cache[0].advance(2)
    assert operations(capture) == []
    cache[1].update_and_fetch(columns(2), columns(2))
    assert operations(capture) == [ops.Update("c1", 2, return_array=True)]
    event = capture.events[0][-1]
    assert set(event.inputs) == {"0.input.slot.0", "1.input.keys", "1.input.values"}
    assert [child.offsets for child in event.seen.children] == [(), (2,)]


def test_a_child_that_is_updated_twice_is_refused(capture: Capture) -> None:
    cache = followed(capture, theirs.CacheList(theirs.KVCache(), theirs.KVCache()))
    ask_mask(cache[0], 2)
    cache[0].update_and_fetch(columns(2), columns(2))
    with pytest.raises(RuntimeError, match=r"c1\.0 is updated twice"):
        cache[0].update_and_fetch(columns(2), columns(2))


def test_children_with_other_masks_are_refused(capture: Capture) -> None:
    cache = followed(capture, theirs.CacheList(theirs.KVCache(), theirs.KVCache()))
    ask_mask(cache[0], 2)
    ask_mask(cache[1], 2, window=4)
    cache[0].update_and_fetch(columns(2), columns(2))
    with pytest.raises(RuntimeError, match="no one update says what the children of c1 did"):
        cache[1].update_and_fetch(columns(2), columns(2))


def test_a_mask_for_other_columns_is_refused(capture: Capture) -> None:
    cache = followed(capture, theirs.KVCache())
    ask_mask(cache, 1)
    with pytest.raises(RuntimeError, match="a mask for 1 columns before an update of 2"):
        cache.update_and_fetch(columns(2), columns(2))


def test_the_mask_of_a_cache_that_is_not_followed_is_not_taken_for_anothers(capture: Capture) -> None:
    for _ in range(20):  # the id of a cache that is gone is given again
        ask_mask(theirs.KVCache(), 1)
        cache = theirs.KVCache()
        followed(capture, cache)
        ask_mask(theirs.KVCache(), 2)
        cache.update_and_fetch(columns(2), columns(2))
    assert len(capture.events[0]) == 40


def test_a_chunks_slide_is_written_down(capture: Capture) -> None:
    cache = followed(capture, theirs.ChunkedKVCache(2))
    cache.update_and_fetch(columns(3), columns(3))
    cache.maybe_trim_front()
    assert operations(capture) == [ops.Update("c1", 3), ops.TrimFront("c1")]
    assert [event.seen.front for event in capture.events[0]] == [0, 0, 1]
    assert capture.events[0][1].seen.mask == "causal"


def test_calls_on_a_list_are_not_those_of_its_children(capture: Capture) -> None:
    cache = followed(capture, theirs.CacheList(theirs.ArraysCache(1), theirs.KVCache()))
    batch = theirs.CacheList.merge([cache])
    batch.prepare(lengths=[2], right_padding=[1])
    batch.filter([0])
    names = [operation.op for operation in operations(capture)]
    assert names == ["merge", "prepare", "filter"]
    assert capture.known[id(batch[1])].name == "c2.1"


def test_values_that_a_model_puts_into_a_lists_child_are_left_out(capture: Capture) -> None:
    cache = followed(capture, theirs.CacheList(theirs.KVCache(), theirs.KVCache()))
    for child in cache.caches:
        ask_mask(child, 2)
        child.update_and_fetch(columns(2), columns(2))
    cache[1].values = mx.zeros_like(cache[1].values)
    assert mx.any(cache[1].keys_and_values()[1]).item()
    other = theirs.KVCache()
    other.values = mx.zeros((1,))
    assert other.values.shape == (1,)


def wrappers() -> list[str]:
    """The methods of mlx-lm's classes that come from the harness."""
    found = [(cls, *item) for cls in (getattr(theirs, name) for name in CLASSES) for item in vars(cls).items()]
    modules = [(cls, name, getattr(getattr(it, "__func__", it), "__module__", "")) for cls, name, it in found]
    return [f"{cls.__name__}.{name}" for cls, name, module in modules if module == wrapped.__module__]


def test_the_classes_are_as_they_were_afterwards() -> None:
    with wrapped(Capture((0,))):
        assert {"KVCache.__setattr__", "ArraysCache.merge", "ChunkedKVCache.maybe_trim_front"} <= set(wrappers())
    assert wrappers() == []
