"""Mistakes with caches that grow by concatenation: the wrong axis or end, and what a trim leaves behind."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks


def _both(self: Any, keys: mx.array, values: mx.array) -> list[list[mx.array]]:
    """What is held and what comes, of the keys and of the values."""
    held = self._stored_arrays()
    return [[new] if old is None else [old, new] for old, new in zip(held, (keys, values), strict=True)]


# -- joining --------------------------------------------------------------------------------------


@breaks("ConcatenateKVCache.update_and_fetch", wrong="new columns are put in front of what is held")
def joined_in_front(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    before = self._stored_arrays()
    original(self, keys, values)
    if before[0] is not None:
        self.keys, self.values = (
            mx.concatenate([new, old], axis=2) for new, old in zip((keys, values), before, strict=True)
        )
    return self.keys_and_values()


@breaks("ConcatenateKVCache.update_and_fetch", wrong="new columns are put behind those that were trimmed")
def joined_to_what_was_trimmed(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    before = self.keys, self.values
    original(self, keys, values)
    if before[0] is not None:
        self.keys, self.values = (
            mx.concatenate([old, new], axis=2) for old, new in zip(before, (keys, values), strict=True)
        )
    return self.keys_and_values()


@breaks("ConcatenateKVCache.update_and_fetch", wrong="columns are joined as heads")
def joined_as_heads(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    parts = _both(self, keys, values)
    original(self, keys, values)
    if parts[0][0].shape == keys.shape:
        self.keys, self.values = (mx.concatenate(each, axis=1) for each in parts)
    return self.keys, self.values


@breaks("ConcatenateKVCache.update_and_fetch", wrong="values are joined to the keys")
def values_joined_to_the_keys(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    held = self._stored_arrays()[0]
    original(self, keys, values)
    if held is not None and held.shape[3] == values.shape[3]:
        self.values = mx.concatenate([held, values], axis=2)
    return self.keys_and_values()


@breaks("ConcatenateKVCache.update_and_fetch", wrong="only the new columns are fetched")
def fetched_alone(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return tuple(x[:, :, -keys.shape[2] :] for x in original(self, keys, values))


@breaks("ConcatenateKVCache.update_and_fetch", wrong="an update of many columns takes the place of what is held")
def long_update_replaces(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    offset = self.offset
    original(self, keys, values)
    if keys.shape[2] > offset:
        self.keys, self.values = keys, values
    return self.keys, self.values


@breaks("append.join", kinds="ConcatenateKVCache", wrong="what is joined becomes float32", seen="dtype")
def joined_in_float32(original: Any, parts: list[mx.array], axis: int = 2) -> mx.array:
    whole: mx.array = original(parts, axis)
    return whole.astype(mx.float32) if len(parts) > 1 else whole


# -- how much is held -----------------------------------------------------------------------------


@breaks("ConcatenateKVCache.update_and_fetch", wrong="the offset is how many columns came last", seen="offset")
def offset_of_the_last_update(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    fetched = original(self, keys, values)
    self.offset = keys.shape[2]
    return fetched


@breaks("ConcatenateKVCache._trim", wrong="a trim drops the oldest tokens")
def oldest_trimmed(original: Any, self: Any, n: int) -> None:
    if self.keys is not None:
        self.keys, self.values = (x[:, :, n:] for x in self._stored_arrays())
    original(self, n)


@breaks("ConcatenateKVCache._trim", wrong="a trim cuts the keys and leaves the values")
def values_not_trimmed(original: Any, self: Any, n: int) -> None:
    original(self, n)
    values = self.values
    if self.keys is not None:
        self.keys = self.keys[:, :, : self.offset]
        self.values = values[:, :, -self.offset :] if self.offset else values[:, :, :0]


@breaks("ConcatenateKVCache._trim", wrong="trimmed to nothing, it forgets its heads and dtype", seen="refusal")
def joined_anew_when_emptied(original: Any, self: Any, n: int) -> None:
    original(self, n)
    if not self.offset:
        self.keys = self.values = None


@breaks("ConcatenateKVCache.is_trimmable", wrong="it is not trimmable, having no spare columns", seen="trimmable")
def concatenated_not_trimmable(original: Any, self: Any) -> bool:
    return False


@breaks("ConcatenateKVCache.trim_limit", wrong="what came before the last update cannot be trimmed", seen="refusal")
def last_token_cannot_go(original: Any, self: Any) -> int:
    return max(0, int(original(self)) - 1)


@breaks("ConcatenateKVCache.size", wrong="size counts what was trimmed", seen="size")
def size_counts_what_was_trimmed(original: Any, self: Any) -> int:
    return 0 if self.keys is None else int(self.keys.shape[2])


@breaks("ConcatenateKVCache.empty", wrong="it is not empty once it was fed", seen="empty")
def fed_is_not_empty(original: Any, self: Any) -> bool:
    return self.keys is None


@breaks("ConcatenateKVCache.nbytes", wrong="nbytes of a cache that was never fed raises", seen="unanswered")
def concatenated_nbytes_needs_keys(original: Any, self: Any) -> int:
    return int(self.keys.nbytes + self.values.nbytes)


@breaks("ConcatenateKVCache.make_mask", wrong="a mask is made for the new columns alone", seen="mask_width visible")
def mask_of_the_new_alone(original: Any, self: Any, n: int, **how: Any) -> Any:
    offset, self.offset = self.offset, 0
    try:
        return original(self, n, **how)
    finally:
        self.offset = offset


# -- refusals -------------------------------------------------------------------------------------


@breaks("ConcatenateKVCache.update_and_fetch", wrong="the keys are joined before the values are checked")
def keys_joined_before_the_check(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    try:
        return original(self, keys, values)
    except ValueError:
        if self.keys is not None and self.keys.shape[::3] == keys.shape[::3] and self.keys.dtype == keys.dtype:
            self.keys = mx.concatenate([self.keys, keys], axis=2) if self.keys.shape[1] == keys.shape[1] else keys
        raise


@breaks("ConcatenateKVCache.update_and_fetch", wrong="another dtype is joined, and the wider of the two kept")
def dtypes_joined(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    if self.keys is not None and keys.dtype != self.keys.dtype and keys.shape[::3] == self.keys.shape[::3]:
        keys, values = (x.astype(self.keys.dtype) for x in (keys, values))
    return original(self, keys, values)


@breaks("ConcatenateKVCache.update_and_fetch", wrong="more rows than are held are cut off", seen="refusal")
def rows_cut_to_fit(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    rows = keys.shape[0] if self.keys is None else self.keys.shape[0]
    return original(self, keys[:rows], values[:rows])


# -- states and copies ----------------------------------------------------------------------------


@breaks("ConcatenateKVCache.state", wrong="a state holds what was trimmed too")
def state_holds_what_was_trimmed(original: Any, self: Any) -> Any:
    return self.keys, self.values


@breaks("ConcatenateKVCache.state", wrong="the state of a cache that was never fed raises", seen="crash")
def state_of_nothing_raises(original: Any, self: Any) -> Any:
    if self.keys.shape[2] == self.offset:
        return self.keys, self.values
    return original(self)


@breaks("ConcatenateKVCache.from_state", wrong="a restored cache begins at position 0", seen="offset")
def concatenated_from_position_0(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made.offset = 0
    return made


@breaks("ConcatenateKVCache.__deepcopy__", wrong="a copy is the cache itself")
def concatenated_copy_is_the_cache(original: Any, self: Any, memo: Any) -> Any:
    return self


@breaks("ConcatenateKVCache.__deepcopy__", wrong="a copy that was trimmed has its trimmed tokens back")
def copy_undoes_a_trim(original: Any, self: Any, memo: Any) -> Any:
    made = copy.copy(self)
    made.offset = self.offset if self.keys is None else self.keys.shape[2]
    return made
