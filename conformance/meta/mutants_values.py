"""Mistakes in what is stored and fetched: dtypes, heads, lost columns; and in what a cache says of itself."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

ALL = ("KVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache")
UPDATES = tuple(f"{kind}.update_and_fetch" for kind in ALL)


# -- dtypes ---------------------------------------------------------------------------------------


@breaks(
    "KVCache.update_and_fetch", "BatchRotatingKVCache.update_and_fetch", wrong="the fetch is in float32", seen="dtype"
)
def fetched_in_float32(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return tuple(x.astype(mx.float32) for x in original(self, keys, values))


@breaks(
    "RotatingKVCache.update_and_fetch",
    "BatchKVCache.update_and_fetch",
    wrong="values are stored in the dtype of half the width",
    seen="dtype",
)
def values_in_float16(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    narrow = mx.float16 if values.dtype == mx.float32 else values.dtype
    fetched_keys, fetched_values = original(self, keys, values)
    return fetched_keys, fetched_values.astype(narrow)


@breaks(
    "KVCache.update_and_fetch",
    "BatchRotatingKVCache.update_and_fetch",
    wrong="values are stored in the keys' dtype",
    seen="dtype",
)
def values_in_the_keys_dtype(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return original(self, keys, values.astype(keys.dtype))


@breaks("row_copies.copy_rows", kinds="BatchKVCache BatchRotatingKVCache", wrong="rows without columns bring float32")
def empty_rows_in_float32(original: Any, sources: Any, plan: Any, *rest: Any) -> Any:
    copied = original(sources, plan, *rest)
    return copied if all(plan.rows) else copied.astype(mx.float32)


@breaks(
    "append.spare_columns",
    kinds="KVCache BatchKVCache",
    wrong="spare columns are of float32, and so is all that they are joined to",
)
def spare_columns_in_float32(original: Any, like: mx.array, n: int) -> Any:
    return [x.astype(mx.float32) for x in original(like, n)]


# -- keys, values, heads --------------------------------------------------------------------------


@breaks(
    "KVCache.update_and_fetch",
    "BatchKVCache.update_and_fetch",
    wrong="keys and values are fetched in each other's place",
)
def keys_for_values(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return original(self, keys, values)[::-1]


@breaks(*UPDATES, wrong="heads are fetched in reverse order")
def heads_reversed(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return tuple(x[:, ::-1] for x in original(self, keys, values))


@breaks(
    "BatchKVCache.merge",
    "BatchRotatingKVCache.merge",
    wrong="the values' heads are merged in reverse order",
    seen="values",
)
def value_heads_reversed(original: Any, cls: Any, caches: Any) -> Any:
    batch = original(cls, caches)
    if batch.values is not None:
        batch.values = batch.values[:, ::-1]
    return batch


@breaks(
    "KVCache.update_and_fetch",
    "RotatingKVCache.update_and_fetch",
    wrong="of several tokens the values are the last one's",
    seen="values",
)
def last_value_repeated(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    if keys.shape[:3] == values.shape[:3]:
        values = mx.broadcast_to(values[:, :, -1:], values.shape)
    return original(self, keys, values)


@breaks(
    "KVCache.update_and_fetch",
    "BatchKVCache.update_and_fetch",
    wrong="the features are a little off",
    seen="visible values",
)
def a_bit_off(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    fetched_keys, fetched_values = original(self, keys, values)
    return fetched_keys, fetched_values * 1.01


@breaks("append.append_columns", kinds="KVCache BatchKVCache", wrong="a buffer that grows loses its last column")
def growing_loses_a_column(original: Any, buffer: Any, columns: mx.array, stored: int, *rest: int) -> Any:
    grown = original(buffer, columns, stored, *rest)
    if buffer is not None and grown.shape[2] > buffer.shape[2] and stored:
        grown[..., stored - 1, :] = 0
    return grown


@breaks("append.append_columns", kinds="KVCache BatchKVCache", wrong="columns are written one slot early")
def written_one_slot_early(original: Any, buffer: Any, columns: mx.array, stored: int, *rest: int) -> Any:
    return original(buffer, columns, max(0, stored - 1), *rest)


@breaks("KVCache.update_and_fetch", "BatchKVCache.update_and_fetch", wrong="the spare columns are fetched too")
def spare_columns_fetched(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    original(self, keys, values)
    return self.keys, self.values


@breaks("KVCache.update_and_fetch", "RotatingKVCache.update_and_fetch", wrong="only the new columns are fetched")
def new_columns_alone(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return tuple(x[:, :, -keys.shape[2] :] for x in original(self, keys, values))


# -- what it says of itself -----------------------------------------------------------------------


@breaks("KVCache.empty", "BatchRotatingKVCache.empty", wrong="nothing is empty", seen="empty")
def never_empty(original: Any, self: Any) -> bool:
    return False


@breaks(
    "BatchKVCache.empty",
    "BatchRotatingKVCache.empty",
    wrong="a batch without rows is not empty while it has columns",
    seen="empty",
)
def empty_counts_columns(original: Any, self: Any) -> bool:
    return self.keys is None


@breaks("BatchKVCache.size", "BatchRotatingKVCache.size", wrong="size is the longest row's offset", seen="size")
def size_of_the_longest_row(original: Any, self: Any) -> Any:
    return max(0, *self.offset.tolist(), 0)


@breaks("KVCache.is_trimmable", "BatchKVCache.is_trimmable", wrong="an empty cache is not trimmable", seen="trimmable")
def empty_is_not_trimmable(original: Any, self: Any) -> bool:
    return bool(original(self)) and not self.empty()


@breaks(*(f"{kind}.__len__" for kind in ALL), wrong="it has a length, so that it is falsy when empty", seen="crash")
def has_a_length(original: Any, self: Any) -> int:
    return int(self.size())


@breaks("KVCache.nbytes", "BatchKVCache.nbytes", wrong="nbytes of an empty cache raises", seen="unanswered")
def nbytes_needs_keys(original: Any, self: Any) -> int:
    return int(self.keys.nbytes + self.values.nbytes)


@breaks(
    "BatchKVCache.offset",
    "BatchRotatingKVCache.offset",
    wrong="the offset is one short while padding is pending",
    seen="offset offsets",
)
def offset_short_while_pending(original: Any, self: Any) -> Any:
    return original(self) - (self._pending is not None)


@breaks("BatchKVCache.offset", "BatchRotatingKVCache.offset", wrong="the offset is an array of floats")
def offset_of_floats(original: Any, self: Any) -> Any:
    return original(self).astype(mx.float32)


@breaks("BatchKVCache.left_padding", "BatchRotatingKVCache.left_padding", wrong="left_padding is one short")
def left_padding_one_short(original: Any, self: Any) -> Any:
    return original(self) - 1
