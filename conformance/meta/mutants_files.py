"""Mistakes in saving and loading that a cache shows when it goes on: the machines restore through files too.

What only the bytes of a file show, and what the machines meet too seldom, is in `mutants_by_tests`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

RINGS = ("RotatingKVCache._saved_state", "BatchRotatingKVCache._saved_state")
BATCHES = ("BatchKVCache._saved_state", "BatchRotatingKVCache._saved_state")
SOME = "KVCache BatchRotatingKVCache QuantizedKVCache ChunkedKVCache"


def _on_arrays(state: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """A state with its arrays changed."""
    if isinstance(state, mx.array):
        return change(state)
    return type(state)(_on_arrays(each, change) for each in state) if isinstance(state, (list, tuple)) else state


# -- what is saved --------------------------------------------------------------------------------


@breaks("RotatingKVCache._saved_state", wrong="the head of a ring is not saved: it is taken to be in temporal order")
def saved_without_the_head(original: Any, self: Any) -> Any:
    state = list(original(self))
    state[5] = self._ring.stored
    return tuple(state)


@breaks("RotatingKVCache._saved_state", wrong="a ring is saved without its sinks")
def saved_without_sinks(original: Any, self: Any) -> Any:
    state = list(original(self))
    state[3] = 0
    return tuple(state)


@breaks("RotatingKVCache._saved_state", wrong="a ring's offset is saved as how many columns it holds", seen="offset")
def saved_with_what_it_holds(original: Any, self: Any) -> Any:
    state = list(original(self))
    state[2] = min(state[2], self._ring.stored)
    return tuple(state)


@breaks(*RINGS, wrong="what is beyond max_size is not saved, though a trim needs it")
def saved_up_to_max_size(original: Any, self: Any) -> Any:
    keys, values, *numbers = original(self)
    ring, spare = self._ring, self._ring.stored - self._ring.max_size
    if spare <= 0 or keys is None or (ring.keep == 0 and not hasattr(self, "keep") and any(self._pads)):
        return keys, values, *numbers
    keep = ring.keep
    keys, values = (mx.concatenate([x[:, :, :keep], x[:, :, keep + spare :]], axis=2) for x in (keys, values))
    numbers[3 if hasattr(self, "keep") else 4] = ring.max_size
    return keys, values, *numbers


@breaks(*BATCHES, wrong="what is pending is not saved")
def saved_without_pending(original: Any, self: Any) -> Any:
    return original(self)[: 8 if "Rotating" in type(self).__name__ else 5]


@breaks(*BATCHES, wrong="a pending prefill is ended by saving")
def saving_ends_the_prefill(original: Any, self: Any) -> Any:
    self.finalize()
    return original(self)


@breaks("BatchKVCache._saved_state", wrong="left pads due are not saved", seen="offset offsets")
def saved_without_left_pads_due(original: Any, self: Any) -> Any:
    keys, values, offset, pads, *rest = original(self)
    return (keys, values, offset, pads, *rest) if keys is not None else (None, None, offset * 0, pads * 0, *rest)


@breaks(*BATCHES, wrong="one column too many is taken for a pad")
def blanked_one_too_many(original: Any, self: Any) -> Any:
    pads, self._pads = self._pads, tuple(p + 1 for p in self._pads)
    try:
        keys, values, *_ = original(self)
    finally:
        self._pads = pads
    return keys, values, *original(self)[2:]


@breaks("QuantizedKVCache._saved_state", wrong="group size and bits are saved in each other's place", seen="refusal")
def saved_bits_for_groups(original: Any, self: Any) -> Any:
    keys, values, offset, group_size, bits = original(self)
    return keys, values, offset, bits, group_size


@breaks("QuantizedKVCache._saved_state", wrong="the scales are saved in float16, whatever they were")
def saved_scales_in_float16(original: Any, self: Any) -> Any:
    return _on_arrays(original(self), lambda x: x if x.dtype == mx.uint32 else x.astype(mx.float16))


@breaks(
    "QuantizedKVCache._saved_state",
    wrong="an untouched cache is saved as one of 64 in 8 bits",
    seen="refusal packing_of_keys",
)
def saved_with_the_defaults(original: Any, self: Any) -> Any:
    return original(self) if self.keys is not None else (None, None, 0, 64, 8)


@breaks("ChunkedKVCache._saved_state", wrong="a slid chunk is saved with its tokens' number for its offset")
def saved_from_position_0(original: Any, self: Any) -> Any:
    keys, values, offset, chunk_size, start = original(self)
    return keys, values, offset - start, chunk_size, 0


@breaks("ChunkedKVCache._saved_state", wrong="a slid chunk is saved with the buffer's first slots")
def saved_from_slot_0(original: Any, self: Any) -> Any:
    keys, values, *numbers = original(self)
    if keys is None:
        return keys, values, *numbers
    return self.keys[:, :, : keys.shape[2]], self.values[:, :, : keys.shape[2]], *numbers


@breaks("ConcatenateKVCache._saved_state", wrong="what was trimmed is saved, and comes back")
def saved_with_what_was_trimmed(original: Any, self: Any) -> Any:
    return self.keys, self.values


@breaks("ArraysCache._saved_state", wrong="lengths are not saved")
def saved_without_lengths(original: Any, self: Any) -> Any:
    return *original(self)[:2], None


@breaks("ArraysCache._saved_state", wrong="left padding is not saved")
def saved_without_left_padding(original: Any, self: Any) -> Any:
    slots, left, lengths, *more = original(self)
    return slots, None if left is None else left * 0, lengths, *more


@breaks("ArraysCache._saved_state", wrong="unfilled slots are left out", seen="slots")
def saved_without_unfilled_slots(original: Any, self: Any) -> Any:
    slots, *numbers = original(self)
    return [slot for slot in slots if slot is not None], *numbers


@breaks("save_prompt_file._saved_state", kinds="CacheList", wrong="the last child is not saved", seen="children")
def saved_without_the_last_child(original: Any, cache: Any) -> Any:
    state = original(cache)
    return state[:-1] if hasattr(cache, "caches") else state


@breaks("save_prompt_file._saved_state", kinds="CacheList", wrong="the first child is saved in all places")
def saved_with_the_first_child_alone(original: Any, cache: Any) -> Any:
    state = original(cache)
    return [state[0]] * len(state) if hasattr(cache, "caches") and state else state


# -- how it is written ----------------------------------------------------------------------------


@breaks("safetensors_writer.item_of", kinds="KVCache CacheList", wrong="everything is saved in float32")
def saved_in_float32(original: Any, name: str, array: mx.array) -> Any:
    return original(name, array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array)


@breaks("safetensors_writer.item_of", kinds="BatchKVCache", wrong="bfloat16 is saved as the words it is made of")
def bfloat16_saved_as_words(original: Any, name: str, array: mx.array) -> Any:
    return original(name, array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@breaks("safetensors_writer.item_of", kinds="BatchKVCache BatchRotatingKVCache", wrong="numbers a row are unsigned")
def saved_unsigned(original: Any, name: str, array: mx.array) -> Any:
    return original(name, array.astype(mx.uint32) if array.dtype == mx.int32 else array)


@breaks(
    "safetensors_writer.words_of", kinds="KVCache ArraysCache", wrong="what lies before a slice in memory is written"
)
def written_from_the_buffers_begin(original: Any, array: mx.array) -> Any:
    return original(mx.roll(array.reshape(-1), 1).reshape(array.shape) if array.size and array.ndim else array)


@breaks(
    "safetensors_writer.words_of",
    kinds="KVCache RotatingKVCache",
    wrong="heads and columns are written in each other's order",
)
def written_in_another_order(original: Any, array: mx.array) -> Any:
    return original(mx.contiguous(array.swapaxes(1, 2)) if array.ndim == 4 else array)


@breaks("state_tree.flatten", kinds="ArraysCache", wrong="an unfilled slot is left out", seen="refusal")
def none_left_out(original: Any, tree: object, path: str = "") -> Any:
    return [(where, leaf) for where, leaf in original(tree, path) if leaf is not None]


@breaks(
    "save_prompt_file._contents",
    kinds="KVCache RotatingKVCache",
    wrong="numbers of a mappable file are saved as strings",
    seen="refusal",
)
def numbers_as_strings(original: Any, caches: Any, mappable: bool) -> Any:
    contents = original(caches, mappable)
    return contents._replace(scalars={path: str(value) for path, value in contents.scalars.items()})


# -- how it is read -------------------------------------------------------------------------------


@breaks(
    "state_tree.unflatten",
    kinds="BatchRotatingKVCache",
    wrong="elements are put in the order of their names: 10 before 2",
)
def ten_before_two(original: Any, leaves: Any) -> Any:
    found = original(leaves)
    for cache in found:
        cache[:] = [cache[int(name)] for name in sorted(map(str, range(len(cache))))]
    return found


@breaks("safetensors_reader.array_of", kinds=SOME, wrong="a tensor without elements loses its shape")
def no_elements_no_shape(original: Any, view: memoryview, tensor: Any) -> Any:
    array = original(view, tensor)
    return array if array.size else mx.zeros((0,), array.dtype)


@breaks("safetensors_reader.as_dtype", kinds="KVCache ArraysCache", wrong="words are read as float16 whatever they are")
def words_read_as_float16(original: Any, words: mx.array, dtype: Any) -> Any:
    return original(words, mx.float16 if dtype == mx.bfloat16 else dtype)


@breaks("scalars.read_scalar", kinds="ArraysCache KVCache", wrong="None is read as an array of nothing")
def none_read_as_an_array(original: Any, path: str, kind: str, tensor: Any, content: bytes) -> Any:
    return mx.zeros((0,)) if kind == "none" else original(path, kind, tensor, content)


@breaks(
    "load_prompt_file._caches", kinds="CacheList ConcatenateKVCache", wrong="of all that is loaded the dtype is float32"
)
def loaded_in_float32(original: Any, listing: Any, states: Any) -> Any:
    widen = lambda x: x.astype(mx.float32) if mx.issubdtype(x.dtype, mx.floating) else x  # noqa: E731
    return original(listing, _on_arrays(states, widen))


@breaks(
    "load_prompt_file._caches",
    kinds="BatchKVCache QuantizedKVCache",
    wrong="keys and values are loaded in each other's place",
)
def values_loaded_as_keys(original: Any, listing: Any, states: Any) -> Any:
    return original(listing, [[state[1], state[0], *state[2:]] for state in states])
