"""Mistakes in refusing: what must be refused is done, clipped or half done, and what is lawful is refused."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

SOLO_UPDATES = ("KVCache.update_and_fetch", "RotatingKVCache.update_and_fetch")
BATCH_UPDATES = ("BatchKVCache.update_and_fetch", "BatchRotatingKVCache.update_and_fetch")


# -- trim -----------------------------------------------------------------------------------------


@breaks(
    "KVCache.trim",
    "RotatingKVCache.trim",
    "BatchKVCache.trim",
    "BatchRotatingKVCache.trim",
    wrong="a trim of more than is there is clipped",
    seen="refusal offset",
)
def trim_clipped(original: Any, self: Any, n: int) -> Any:
    return original(self, min(n, self.trim_limit()))


@breaks(
    "KVCache.trim", "BatchRotatingKVCache.trim", wrong="a trim of fewer than no tokens does nothing", seen="refusal"
)
def negative_trim_ignored(original: Any, self: Any, n: int) -> Any:
    return original(self, max(0, n))


@breaks("RotatingKVCache.trim", wrong="more is trimmed than a wrapped ring still holds")
def trim_beyond_the_ring(original: Any, self: Any, n: int) -> Any:
    if not 0 < n <= self.offset or n <= self.trim_limit():
        return original(self, n)
    self.offset -= n
    return n


@breaks("KVCache.trim", "BatchKVCache.trim", wrong="one token fewer goes than was asked", seen="offset offsets")
def trim_one_less(original: Any, self: Any, n: int) -> Any:
    original(self, n)
    if n > 0:
        original(self, 0)
        self._trim(-1)
    return n


@breaks("KVCache.trim", "RotatingKVCache.trim", wrong="trim returns what is left", seen="result")
def trim_returns_what_is_left(original: Any, self: Any, n: int) -> Any:
    original(self, n)
    return self.offset


@breaks(
    "BatchKVCache.trim",
    "BatchRotatingKVCache.trim",
    wrong="a trim ends a pending prefill, then is refused",
    seen="half-applied",
)
def trim_finalizes_first(original: Any, self: Any, n: int) -> Any:
    try:
        return original(self, n)
    except ValueError:
        self.finalize()
        raise


@breaks("KVCache.trim", "BatchKVCache.trim", wrong="a trim of everything is refused", seen="refusal")
def trim_of_everything_refused(original: Any, self: Any, n: int) -> Any:
    if n > 0 and n == self.size():
        raise ValueError("something must be left")
    return original(self, n)


@breaks(
    "BatchKVCache.trim",
    "BatchRotatingKVCache.trim",
    wrong="tokens are trimmed while padding is pending",
    seen="refusal",
)
def trim_while_pending(original: Any, self: Any, n: int) -> Any:
    pending, self._pending = self._pending, None
    try:
        return original(self, n)
    finally:
        self._pending = pending


@breaks(
    "BatchKVCache.trim",
    "BatchRotatingKVCache.trim",
    wrong="a trim of nothing is refused while padding is pending",
    seen="refusal",
)
def trim_of_nothing_refused(original: Any, self: Any, n: int) -> Any:
    if self._pending is not None:
        raise ValueError("padding is pending")
    return original(self, n)


# -- update ---------------------------------------------------------------------------------------


@breaks(*SOLO_UPDATES, wrong="an update of no columns does nothing", seen="refusal crash")
def no_columns_ignored(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    if keys.shape[2] == 0 and self.keys is not None:
        return self.keys_and_values()
    return original(self, keys, values)


@breaks(
    "KVCache.make_mask", "BatchKVCache.make_mask", wrong="a window of nothing is taken for no window", seen="refusal"
)
def no_window_ignored(
    original: Any, self: Any, n: int, window_size: int | None = None, return_array: bool = False
) -> Any:
    return original(self, n, None if window_size is not None and window_size < 1 else window_size, return_array)


@breaks(
    "RotatingKVCache.make_mask", "BatchRotatingKVCache.make_mask", wrong="a mask of no query is made", seen="refusal"
)
def mask_of_no_query(
    original: Any, self: Any, n: int, window_size: int | None = None, return_array: bool = False
) -> Any:
    return None if n < 1 else original(self, n, window_size, return_array)


@breaks(
    "KVCache.update_and_fetch",
    "BatchKVCache.update_and_fetch",
    wrong="values of another length than the keys are cut",
    seen="refusal",
)
def uneven_cut(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return original(self, keys, values[:, :, : keys.shape[2]])


@breaks(
    "KVCache.update_and_fetch", "BatchRotatingKVCache.update_and_fetch", wrong="another dtype is cast", seen="refusal"
)
def other_dtype_cast(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    if self.keys is not None:
        keys, values = keys.astype(self.keys.dtype), values.astype(self.values.dtype)
    return original(self, keys, values)


@breaks(
    "RotatingKVCache.update_and_fetch",
    "BatchKVCache.update_and_fetch",
    wrong="heads beyond those known are left out",
    seen="refusal",
)
def more_heads_cut(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    if self.keys is not None:
        keys, values = keys[:, : self.keys.shape[1]], values[:, : self.keys.shape[1]]
    return original(self, keys, values)


@breaks(
    "KVCache.update_and_fetch",
    "BatchRotatingKVCache.update_and_fetch",
    wrong="values of another dtype than those known are cast",
    seen="refusal",
)
def other_value_dtype_cast(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return original(self, keys, values if self.values is None else values.astype(self.values.dtype))


@breaks(
    "KVCache.update_and_fetch",
    "BatchKVCache.update_and_fetch",
    wrong="arrays without a head axis are given one",
    seen="refusal",
)
def head_axis_added(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return original(self, *(x[:, None] if x.ndim == 3 else x for x in (keys, values)))


@breaks(
    "KVCache.trim",
    "BatchKVCache.trim",
    wrong="a cache trimmed empty forgets its heads, and takes others",
    seen="refusal",
)
def forgets_heads_when_emptied(original: Any, self: Any, n: int) -> Any:
    result = original(self, n)
    if self.size() == 0:
        self.keys = self.values = None
    return result


@breaks(*BATCH_UPDATES, wrong="rows beyond those known are left out", seen="refusal")
def more_rows_cut(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    rows = self.offset.size
    return original(self, keys[:rows], values[:rows])


@breaks(*BATCH_UPDATES, wrong="what does not fit is refused by a TypeError", seen="crash")
def refused_by_a_type_error(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    try:
        return original(self, keys, values)
    except ValueError as error:
        raise TypeError(str(error)) from error


@breaks(*SOLO_UPDATES, wrong="the offset moves before the update is checked", seen="half-applied")
def offset_moves_before_the_check(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    try:
        return original(self, keys, values)
    except ValueError:
        self.offset += keys.shape[2]
        raise


@breaks(*BATCH_UPDATES, wrong="the keys are written before the values are checked", seen="half-applied")
def keys_written_before_the_check(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    try:
        return original(self, keys, values)
    except ValueError:
        if self.keys is not None:
            self.keys = mx.concatenate([self.keys, self.keys[..., :1, :]], axis=2)
        raise


@breaks(
    "RotatingKVCache.update_and_fetch",
    "BatchRotatingKVCache.update_and_fetch",
    wrong="an update longer than the ring is refused",
    seen="refusal",
)
def long_update_refused(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    if keys.shape[2] > self.max_size:
        raise ValueError("longer than the ring")
    return original(self, keys, values)


# -- rows -----------------------------------------------------------------------------------------


@breaks(
    "BatchKVCache.filter", "BatchRotatingKVCache.filter", wrong="rows that are not there are left out", seen="refusal"
)
def filter_ignores_unknown_rows(original: Any, self: Any, rows: Any) -> None:
    original(self, [row for row in rows if row < self.offset.size])


@breaks(
    "BatchKVCache.filter",
    "BatchRotatingKVCache.filter",
    wrong="the rows that are there are filtered before the IndexError",
    seen="half-applied",
)
def filtered_before_the_error(original: Any, self: Any, rows: Any) -> None:
    there = [row for row in rows if row < self.offset.size]
    original(self, there)
    if len(there) < len(rows):
        raise IndexError("no such row")


@breaks("BatchKVCache.filter", "BatchRotatingKVCache.filter", wrong="negative rows are counted from the front")
def negative_rows_from_the_front(original: Any, self: Any, rows: Any) -> None:
    original(self, [abs(row) for row in rows])


@breaks("KVCache.from_state", "BatchKVCache.from_state", wrong="a state of any length is taken")
def any_state_taken(original: Any, cls: Any, state: Any) -> Any:
    known = 3 if cls.__name__ == "KVCache" else 5
    return original(cls, state if len(state) in (known, known + 4) else state[:known])


@breaks(
    "BatchKVCache.extract",
    "BatchRotatingKVCache.extract",
    wrong="the last row stands in for one that is not there",
    seen="refusal",
)
def extract_the_last_instead(original: Any, self: Any, row: int) -> Any:
    return original(self, min(row, self.offset.size - 1))


@breaks(
    "BatchKVCache.extend",
    "BatchRotatingKVCache.extend",
    wrong="a pending prefill is ended before the other is checked",
    seen="half-applied",
)
def extend_finalizes_before_the_check(original: Any, self: Any, other: Any) -> None:
    try:
        original(self, other)
    except ValueError:
        self.finalize()
        raise


@breaks(
    "BatchKVCache.extend", "BatchRotatingKVCache.extend", wrong="another kind of cache is passed over", seen="refusal"
)
def extend_ignores_another_kind(original: Any, self: Any, other: Any) -> None:
    if isinstance(other, type(self)):
        original(self, other)


@breaks("BatchRotatingKVCache.extend", wrong="a ring of another max_size is passed over", seen="refusal")
def extend_ignores_another_max_size(original: Any, self: Any, other: Any) -> None:
    if getattr(other, "max_size", self.max_size) == self.max_size:
        original(self, other)


@breaks(
    "BatchKVCache.merge",
    "BatchRotatingKVCache.merge",
    wrong="of a cache of several rows the first is merged",
    seen="refusal",
)
def merge_takes_the_first_row(original: Any, cls: Any, caches: Any) -> Any:
    first = [copy.deepcopy(cache) for cache in caches]
    for cache in first:
        if cache.keys is not None:
            cache.keys, cache.values = cache.keys[:1], cache.values[:1]
    return original(cls, first)


@breaks("checks.check_heads", kinds="BatchKVCache", wrong="caches of other dtypes are put together", seen="refusal")
def heads_that_differ_joined(original: Any, operation: str, known: Any) -> Any:
    list(known)


@breaks("RotatingKVCache.__init__", wrong="sinks that fill the whole ring are taken", seen="refusal")
def sinks_fill_the_ring(original: Any, self: Any, max_size: int, keep: int = 0) -> None:
    original(self, max_size, min(keep, max_size - 1))


@breaks("BatchKVCache.__init__", wrong="negative left padding is taken for none", seen="refusal")
def negative_padding_taken(original: Any, self: Any, left_padding: Any) -> None:
    original(self, [max(0, pads) for pads in left_padding])


# -- prepare --------------------------------------------------------------------------------------


@breaks(
    "BatchKVCache.prepare",
    "BatchRotatingKVCache.prepare",
    wrong="a second announcement takes the first one's place",
    seen="refusal",
)
def second_prepare_taken(original: Any, self: Any, **given: Any) -> None:
    before, self._pending = self._pending, None
    try:
        original(self, **given)
    except ValueError:
        self._pending = before
        raise


@breaks(
    "BatchKVCache.prepare",
    "BatchRotatingKVCache.prepare",
    wrong="lengths hold where they disagree with the right padding",
    seen="refusal trimmable",
)
def disagreement_taken(original: Any, self: Any, **given: Any) -> None:
    if "lengths" in given:
        given.pop("right_padding", None)
    original(self, **given)


@breaks(
    "BatchKVCache.prepare", "BatchRotatingKVCache.prepare", wrong="negative numbers are taken for none", seen="refusal"
)
def negative_numbers_taken(original: Any, self: Any, **given: Any) -> None:
    original(self, **{name: [max(0, number) for number in numbers] for name, numbers in given.items()})


@breaks(
    "BatchKVCache.prepare",
    "BatchRotatingKVCache.prepare",
    wrong="numbers for rows that are not there are left out",
    seen="refusal",
)
def other_row_counts_taken(original: Any, self: Any, **given: Any) -> None:
    rows = self.offset.size
    original(self, **{name: (numbers + [0] * rows)[:rows] for name, numbers in given.items()})


@breaks(
    "BatchKVCache.prepare",
    "BatchRotatingKVCache.prepare",
    wrong="the left padding stays when lengths are refused",
    seen="half-applied",
)
def left_padding_stays(original: Any, self: Any, **given: Any) -> None:
    left = given.get("left_padding")
    if left and self._pending is None and not self._columns() and len(left) == len(self._pads) and min(left) >= 0:
        original(self, left_padding=left)
        given = {name: numbers for name, numbers in given.items() if name != "left_padding"}
    original(self, **given)
