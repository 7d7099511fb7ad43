"""Mistakes with chunked caches: what goes from the front, where the rest begins, and what a trim may give back."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

KIND = "ChunkedKVCache"


# -- the front ------------------------------------------------------------------------------------


def _drop_front(self: Any, dropped: int) -> None:
    dropped = min(dropped, self._columns())
    if dropped > 0:
        self.start_position += dropped
        self._front += dropped


@breaks("ChunkedKVCache.maybe_trim_front", wrong="the front goes, and start_position stays", seen="start_position")
def start_position_not_moved(original: Any, self: Any) -> None:
    before, front = self.start_position, self._front
    original(self)
    self.start_position, self._front = before, front
    dropped = max(0, self._columns() - self.chunk_size)
    if dropped:
        self.keys, self.values = (x[..., front + dropped :, :] for x in (self.keys, self.values))
        self._front = 0


@breaks("ChunkedKVCache.maybe_trim_front", wrong="one token too many goes from the front", seen="start_position")
def front_one_too_many(original: Any, self: Any) -> None:
    _drop_front(self, self._columns() - self.chunk_size + 1 if self._columns() > self.chunk_size else 0)


@breaks("ChunkedKVCache.maybe_trim_front", wrong="one token too few goes from the front", seen="start_position")
def front_one_too_few(original: Any, self: Any) -> None:
    _drop_front(self, self._columns() - self.chunk_size - 1)


@breaks("ChunkedKVCache.maybe_trim_front", wrong="only whole chunks go from the front", seen="start_position")
def front_goes_by_chunks(original: Any, self: Any) -> None:
    dropped = max(0, self._columns() - self.chunk_size)
    _drop_front(self, dropped - (self.start_position + dropped) % self.chunk_size)


@breaks("ChunkedKVCache.maybe_trim_front", wrong="what went before is dropped again", seen="start_position")
def front_dropped_again(original: Any, self: Any) -> None:
    _drop_front(self, self.offset - self.chunk_size)


@breaks("ChunkedKVCache.maybe_trim_front", wrong="all goes when the chunk is full", seen="start_position")
def full_chunk_dropped(original: Any, self: Any) -> None:
    _drop_front(self, self._columns() if self._columns() >= self.chunk_size else 0)


@breaks("ChunkedKVCache.maybe_trim_front", wrong="the offset counts what is held", seen="offset start_position")
def offset_counts_what_is_held(original: Any, self: Any) -> None:
    before = self.start_position
    original(self)
    self.offset -= self.start_position - before
    self.start_position = before


@breaks("ChunkedKVCache.maybe_trim_front", wrong="the newest tokens go in place of the oldest")
def newest_dropped(original: Any, self: Any) -> None:
    front = self._front
    original(self)
    self._front = front


@breaks("ChunkedKVCache.update_and_fetch", wrong="each update drops the front by itself", seen="visible start_position")
def update_drops_the_front(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    before = dict(vars(self))
    self.maybe_trim_front()
    try:
        return original(self, keys, values)
    except ValueError:
        vars(self).update(before)
        raise


@breaks("ChunkedKVCache.update_and_fetch", wrong="an update keeps no more than the chunk", seen="visible offset")
def long_update_cut(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return tuple(x[..., -self.chunk_size :, :] for x in original(self, keys, values))


# -- the buffer -----------------------------------------------------------------------------------


@breaks("ChunkedKVCache._stored_arrays", wrong="what is fetched begins at the buffer's first slot")
def fetched_from_slot_0(original: Any, self: Any) -> Any:
    if self.keys is None:
        return None, None
    return self.keys[..., : self._columns(), :], self.values[..., : self._columns(), :]


@breaks("ChunkedKVCache._stored_arrays", wrong="what was dropped in front is fetched too")
def dropped_front_fetched(original: Any, self: Any) -> Any:
    if self.keys is None:
        return None, None
    stop = self._front + self._columns()
    return self.keys[..., :stop, :], self.values[..., :stop, :]


@breaks("ChunkedKVCache._from", wrong="a buffer is taken to begin with the oldest token, and was not copied")
def not_copied_to_the_front(original: Any, self: Any, front: int) -> Any:
    return self.keys, self.values


@breaks("ChunkedKVCache.update_and_fetch", wrong="new columns are written as if nothing had been dropped in front")
def written_over_the_newest(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    front = self._front
    if not front or self.keys is None:
        return original(self, keys, values)
    self._front = 0
    try:
        return original(self, keys, values)
    except ValueError:
        self._front = front
        raise


@breaks("ChunkedKVCache.update_and_fetch", wrong="the values lie one slot behind the keys once the front was dropped")
def values_one_slot_late(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    fetched = original(self, keys, values)
    if not self._front:
        return fetched
    self.values = mx.roll(self.values, 1, 2)
    return self.keys_and_values()


# -- trim -----------------------------------------------------------------------------------------


@breaks("ChunkedKVCache.trim_limit", wrong="all that is held may go, across the start of the chunk", seen="refusal")
def trim_across_the_chunk_start(original: Any, self: Any) -> int:
    return int(self._columns())


@breaks("ChunkedKVCache.trim_limit", wrong="a chunk of which the beginning was dropped is taken for whole")
def broken_chunk_taken_for_whole(original: Any, self: Any) -> int:
    begun = self.start_position // self.chunk_size * self.chunk_size
    return int(min(self._columns(), self.offset - begun))


@breaks("ChunkedKVCache.trim_limit", wrong="the tokens of whole chunks cannot go", seen="refusal trimmable")
def only_the_last_chunk_goes(original: Any, self: Any) -> int:
    return min(int(original(self)), int(self.offset % self.chunk_size) or int(self.chunk_size))


@breaks("ChunkedKVCache.trim", wrong="a trim of more than is held is clipped", seen="refusal offset")
def chunk_trim_clipped(original: Any, self: Any, n: int) -> Any:
    return original(self, min(n, self.trim_limit()))


@breaks("ChunkedKVCache.is_trimmable", wrong="it is trimmable whatever was dropped in front", seen="trimmable")
def slid_is_trimmable(original: Any, self: Any) -> bool:
    return True


@breaks("ChunkedKVCache.is_trimmable", wrong="it is never trimmable", seen="trimmable")
def chunk_not_trimmable(original: Any, self: Any) -> bool:
    return False


@breaks("ChunkedKVCache._trim", wrong="what was fed together before a trim is still offered", seen="trimmable")
def offered_after_a_trim(original: Any, self: Any, n: int) -> None:
    fed = self._fed
    original(self, n)
    self._fed = fed


@breaks("ChunkedKVCache._trim", wrong="the start goes back with the tokens", seen="start_position")
def start_goes_back(original: Any, self: Any, n: int) -> None:
    original(self, n)
    self.start_position = max(0, self.start_position - n)


# -- what it says of itself -----------------------------------------------------------------------


@breaks("ChunkedKVCache.size", wrong="size counts what was dropped in front", seen="size")
def size_is_the_offset(original: Any, self: Any) -> int:
    return int(self.offset)


@breaks("ChunkedKVCache.empty", wrong="what was fed and holds nothing is not empty", seen="empty")
def empty_before_position_1(original: Any, self: Any) -> bool:
    return bool(self.offset == 0)


@breaks("ChunkedKVCache.empty", wrong="it is not empty while its buffers are allocated", seen="empty")
def chunk_empty_is_unallocated(original: Any, self: Any) -> bool:
    return self.keys is None


@breaks("ChunkedKVCache.__init__", wrong="a chunk of no tokens is taken", seen="refusal")
def chunk_of_nothing(original: Any, self: Any, chunk_size: int) -> None:
    original(self, max(1, chunk_size))
    self.chunk_size = chunk_size


# -- states and copies ----------------------------------------------------------------------------


@breaks("ChunkedKVCache.from_state", wrong="a restored cache begins with the oldest token that it holds")
def restored_at_the_start(original: Any, cls: Any, state: Any) -> Any:
    keys, values, offset, chunk_size, start = state
    return original(cls, (keys, values, offset - start, chunk_size, 0))


@breaks("ChunkedKVCache.from_state", wrong="start_position is not restored", seen="refusal")
def restored_without_start(original: Any, cls: Any, state: Any) -> Any:
    return original(cls, (*state[:4], 0))


@breaks("ChunkedKVCache.from_state", wrong="a restored cache takes the columns that it holds for its chunk")
def restored_chunk_of_its_columns(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made.chunk_size = max(1, made._columns())
    return made


@breaks("ChunkedKVCache.state", wrong="a state has the front slots, which a restored cache takes for tokens")
def state_with_the_front(original: Any, self: Any) -> Any:
    if self.keys is None:
        return original(self)
    return self.keys[...], self.values[...], *original(self)[2:]


@breaks("ChunkedKVCache.__deepcopy__", wrong="a copy takes the buffers from their first slot on")
def copied_without_front(original: Any, self: Any, memo: Any) -> Any:
    made = copy.copy(self)
    made._front = 0
    return made
