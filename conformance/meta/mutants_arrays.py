"""Mistakes with recurrent state: slots never written, lengths that do not count down, rows that do not follow."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

KIND = "ArraysCache"


# -- masks and lengths ----------------------------------------------------------------------------


@breaks("ArraysCache.advance", wrong="lengths are not counted down")
def advance_forgets_lengths(original: Any, self: Any, n: int) -> None:
    before = self._pending
    original(self, n)
    self._pending = before


@breaks("ArraysCache.advance", wrong="left padding is not counted down")
def advance_forgets_left_padding(original: Any, self: Any, n: int) -> None:
    before = self._due
    original(self, n)
    self._due = before


@breaks("ArraysCache.advance", wrong="lengths are counted down by the tokens, left pads not counted")
def lengths_without_left_pads_fed(original: Any, self: Any, n: int) -> None:
    pending, due = self._pending, self._dues()
    original(self, n)
    if pending is not None and self._pending is not None:
        fed = [max(0, n - d) for d in due]
        lengths = (length if length < 0 else max(0, length - f) for length, f in zip(pending.lengths, fed, strict=True))
        self._pending = self._pending._replace(lengths=tuple(lengths))


@breaks("ArraysCache.advance", wrong="all lengths at 0 end the prefill by themselves")
def prefill_ends_by_itself(original: Any, self: Any, n: int) -> None:
    original(self, n)
    if self._pending is not None and not any(self._pending.lengths):
        self._pending = None


@breaks("ArraysCache.make_mask", wrong="right pads are shown where left pads are hidden", seen="visible")
def left_mask_alone(original: Any, self: Any, n: int) -> Any:
    mask, left = original(self, n), self.left_padding
    return mask if mask is None or left is None else mx.arange(n) >= left[:, None]


@breaks("ArraysCache.make_mask", wrong="no mask is made where the longest row has no pads", seen="visible")
def mask_of_the_longest_row(original: Any, self: Any, n: int) -> Any:
    mask = original(self, n)
    pending = self._pending
    left = self._due is not None and any(self._due)
    return None if pending is not None and not left and max(pending.full_lengths(), default=0) >= n else mask


@breaks("ArraysCache.make_mask", wrong="one right pad is shown", seen="visible")
def one_right_pad_shown(original: Any, self: Any, n: int) -> Any:
    mask, lengths = original(self, n), self.lengths
    return mask if mask is None or lengths is None else mask | (mx.arange(n) == lengths[:, None])


@breaks("ArraysCache.make_mask", wrong="the first token behind left pads is hidden", seen="visible")
def first_token_hidden(original: Any, self: Any, n: int) -> Any:
    mask, left = original(self, n), self.left_padding
    return mask if mask is None or left is None else mask & ((mx.arange(n) > left[:, None]) | (left[:, None] == 0))


@breaks("ArraysCache.make_mask", wrong="the rows of the mask are in reverse order", seen="visible")
def rows_of_the_tokens_reversed(original: Any, self: Any, n: int) -> Any:
    mask = original(self, n)
    return mask if mask is None else mask[::-1]


@breaks("ArraysCache.make_mask", wrong="a mask has an axis for the heads", seen="mask_width")
def mask_has_a_head_axis(original: Any, self: Any, n: int) -> Any:
    mask = original(self, n)
    return mask if mask is None else mask[:, None]


@breaks("ArraysCache.make_mask", wrong="a mask of no columns is made", seen="refusal")
def mask_of_no_columns(original: Any, self: Any, n: int) -> Any:
    return None if n < 1 else original(self, n)


@breaks("padding.nothing_announced", kinds=KIND, wrong="rows for which nothing was announced have the length 0")
def unannounced_length_0(original: Any, rows: int) -> Any:
    return original(rows)._replace(lengths=(0,) * rows)


@breaks("padding.Pending.full_lengths", kinds=KIND, wrong="rows for which nothing was announced are shown as pads")
def unannounced_rows_hidden(original: Any, self: Any) -> Any:
    return tuple(max(0, length) for length in self.lengths)


# -- prepare and finalize -------------------------------------------------------------------------


@breaks("ArraysCache.prepare", wrong="lengths are ignored", seen="visible refusal")
def announced_lengths_ignored(original: Any, self: Any, **given: Any) -> None:
    original(self, **given)
    self._pending = None


@breaks("ArraysCache.prepare", wrong="right padding without lengths is taken, and ignored", seen="refusal")
def right_padding_without_lengths_ignored(original: Any, self: Any, **given: Any) -> None:
    if "lengths" not in given:
        given.pop("right_padding", None)
    original(self, **given)


@breaks("ArraysCache.prepare", wrong="a second prepare takes the place of the first", seen="refusal")
def second_announcement_taken(original: Any, self: Any, **given: Any) -> None:
    pending, self._pending = self._pending, None
    try:
        original(self, **given)
    except ValueError:
        self._pending = pending
        raise


@breaks("ArraysCache.prepare", wrong="left padding is taken where slots are filled", seen="refusal")
def left_padding_before_a_filled_slot(original: Any, self: Any, **given: Any) -> None:
    slots = self._slots
    if "left_padding" in given:
        rows = self.batch_size
        known, self._slots = self._due, [None] * len(slots)
        self._due = (0,) * rows if known is None else known
        try:
            original(self, **given)
        except ValueError:
            self._due = known
            raise
        finally:
            self._slots = slots
    else:
        original(self, **given)


@breaks("ArraysCache.finalize", wrong="finalize does nothing")
def prefill_never_ends(original: Any, self: Any) -> None:
    return None


@breaks("ArraysCache.finalize", wrong="finalize drops the left pads that are due")
def finalize_drops_left_padding(original: Any, self: Any) -> None:
    original(self)
    self._due = None if self._due is None else (0,) * len(self._due)


# -- rows -----------------------------------------------------------------------------------------


@breaks("ArraysCache.batch_size", wrong="rows are counted in slot 0 alone")
def rows_of_slot_0(original: Any, self: Any) -> int:
    if not self._slots or self._slots[0] is not None:
        return int(original(self))
    return 1 if self._due is None else len(self._due)


@breaks("ArraysCache.filter", wrong="slot 0 alone is filtered")
def slot_0_filtered(original: Any, self: Any, rows: Any) -> None:
    before = self._slots
    original(self, rows)
    self._slots = [self._slots[0], *before[1:]]


@breaks("ArraysCache.filter", wrong="states come out in their old order")
def states_sorted(original: Any, self: Any, rows: Any) -> None:
    before = list(self._slots)
    original(self, rows)
    kept = mx.array(sorted(rows), dtype=mx.int32)
    self._slots = [None if slot is None else slot[kept] if len(rows) else slot[:0] for slot in before]


@breaks("ArraysCache.filter", wrong="left padding stays with the places and does not follow the rows")
def dues_do_not_follow(original: Any, self: Any, rows: Any) -> None:
    before = self._dues()
    original(self, rows)
    self._due = tuple(before[i % len(before)] for i in range(len(rows)))


@breaks("ArraysCache.filter", wrong="lengths stay with the places and do not follow the rows")
def lengths_do_not_follow(original: Any, self: Any, rows: Any) -> None:
    before = self._pending
    original(self, rows)
    if self._pending is not None and before is not None:
        lengths = tuple(before.lengths[i % len(before.lengths)] for i in range(len(rows)))
        self._pending = self._pending._replace(lengths=lengths)


@breaks("ArraysCache.filter", wrong="a filter ends the prefill")
def filter_ends_the_prefill(original: Any, self: Any, rows: Any) -> None:
    original(self, rows)
    self._pending = None


@breaks("ArraysCache.filter", wrong="with no rows left the arrays stay", seen="rows slot_0")
def states_stay_without_rows(original: Any, self: Any, rows: Any) -> None:
    if len(rows):
        original(self, rows)


@breaks("ArraysCache.extend", wrong="the other's states come first")
def states_in_front(original: Any, self: Any, other: Any) -> None:
    mine = self.batch_size
    original(self, other)
    self.filter([*range(mine, self.batch_size), *range(mine)])


@breaks("ArraysCache.extend", wrong="the other's states are taken as zeros")
def joined_states_are_zeros(original: Any, self: Any, other: Any) -> None:
    mine = self.batch_size
    original(self, other)
    self._slots = [
        slot if slot is None else mx.concatenate([slot[:mine], mx.zeros_like(slot[mine:])]) for slot in self._slots
    ]


@breaks("ArraysCache.extend", wrong="the other's prefill is forgotten")
def joined_without_lengths(original: Any, self: Any, other: Any) -> None:
    before = self._pending
    mine = self.batch_size
    original(self, other)
    if self._pending is not None and before is not None:
        more = (-1,) * (self.batch_size - mine)
        self._pending = self._pending._replace(lengths=(*before.lengths, *more))
    else:
        self._pending = before


@breaks("slots.join_slots", kinds=KIND, wrong="rows without an array are left out where others have one")
def unfilled_rows_left_out(original: Any, operation: str, name: str, parts: Sequence[Any]) -> Any:
    filled = [(slot, rows) for slot, rows in parts if slot is not None]
    return original(operation, name, filled)


@breaks("slots.join_slots", kinds=KIND, wrong="rows without an array get the first one's state")
def unfilled_rows_get_the_first_state(original: Any, operation: str, name: str, parts: Sequence[Any]) -> Any:
    first = next((slot for slot, _ in parts if slot is not None and slot.shape[0]), None)
    if first is not None:
        parts = [
            (mx.broadcast_to(first[:1], (rows, *first.shape[1:])) if slot is None else slot, rows)
            for slot, rows in parts
        ]
    return original(operation, name, parts)


@breaks("slots.join_slots", kinds=KIND, wrong="a slot that one side never wrote counts as never written")
def unfilled_on_one_side_unfills(original: Any, operation: str, name: str, parts: Sequence[Any]) -> Any:
    return None if any(slot is None for slot, _ in parts) else original(operation, name, parts)


@breaks("slots.join_slots", kinds=KIND, wrong="a slot that no side wrote raises", seen="crash")
def unfilled_everywhere_raises(original: Any, operation: str, name: str, parts: Sequence[Any]) -> Any:
    next(slot for slot, _ in parts if slot is not None)
    return original(operation, name, parts)


@breaks("ArraysCache.merge", wrong="the states are left behind")
def merge_forgets_states(original: Any, cls: Any, caches: Any) -> Any:
    batch = original(cls, caches)
    batch._slots = [None] * len(batch._slots)
    return batch


@breaks("ArraysCache.merge", wrong="what the rows have due and pending is left behind")
def merge_forgets_what_is_due(original: Any, cls: Any, caches: Any) -> Any:
    batch = original(cls, caches)
    batch._due, batch._pending = (0,) * len(caches), None
    return batch


@breaks("ArraysCache.merge", wrong="caches without states get no row", seen="rows")
def merge_forgets_unfilled_rows(original: Any, cls: Any, caches: Any) -> Any:
    return original(cls, [cache for cache in caches if not cache.empty()] or caches)


@breaks("ArraysCache.merge", wrong="of a cache with several rows the first is taken", seen="refusal")
def merge_takes_the_first_state(original: Any, cls: Any, caches: Any) -> Any:
    return original(cls, [cache.extract(0) if cache.batch_size > 1 else cache for cache in caches])


@breaks("ArraysCache.extract", wrong="an unfilled slot is extracted as zeros", seen="slot_0 slot_1 slot_2 slot_3 crash")
def unfilled_slot_extracted_as_zeros(original: Any, self: Any, row: int) -> Any:
    made = original(self, row)
    like = next((slot for slot in made._slots if slot is not None), None)
    made._slots = [slot if slot is not None or like is None else mx.zeros_like(like) for slot in made._slots]
    return made


@breaks("ArraysCache.extract", wrong="an unfilled slot raises", seen="crash")
def unfilled_slot_not_extracted(original: Any, self: Any, row: int) -> Any:
    made = original(self, row)
    made._slots = [mx.contiguous(slot[row : row + 1]) for slot in self._slots]
    return made


@breaks("ArraysCache.extract", wrong="the row before is extracted")
def state_of_the_row_before(original: Any, self: Any, row: int) -> Any:
    return original(self, row - 1 if 0 < row < self.batch_size else row)


@breaks("ArraysCache.extract", wrong="left pads that are due come along", seen="visible mask_width")
def extracted_with_left_padding(original: Any, self: Any, row: int) -> Any:
    made = original(self, row)
    made._due = self._dues()[row : row + 1]
    return made


@breaks("ArraysCache.extract", wrong="the pending lengths come along", seen="visible refusal")
def extracted_with_lengths(original: Any, self: Any, row: int) -> Any:
    made = original(self, row)
    if self._pending is not None:
        made._due, made._pending = (0,), self._pending.take([row])
    return made


# -- slots ----------------------------------------------------------------------------------------


@breaks("ArraysCache.__setitem__", wrong="an array of other rows is taken", seen="refusal")
def other_rows_stored(original: Any, self: Any, idx: int, value: Any) -> None:
    self._slots = [*self._slots[:idx], value, *self._slots[idx + 1 :]]


@breaks(
    "ArraysCache.__setitem__",
    wrong="slots are handed out themselves, and written into in place",
    seen="aliased",
    also={"ArraysCache._fresh": lambda original, self: list(self._slots)},
)
def slot_written_in_place(original: Any, self: Any, idx: int, value: Any) -> None:
    held = self._slots[idx]
    original(self, idx, value)
    if held is not None and held.shape == value.shape:
        held[...] = value
        self._slots[idx] = held


@breaks("ArraysCache.__iter__", wrong="slots are given without those that are unfilled", seen="slots")
def unfilled_slots_skipped(original: Any, self: Any) -> Any:
    return iter([slot for slot in self._slots if slot is not None])


# -- what it says of itself -----------------------------------------------------------------------


@breaks("ArraysCache.empty", wrong="it is empty if slot 0 is", seen="empty")
def empty_looks_at_slot_0(original: Any, self: Any) -> bool:
    return self._slots[0] is None


@breaks("ArraysCache.empty", wrong="it is not empty without rows, where slots are filled", seen="empty")
def empty_without_rows_is_not(original: Any, self: Any) -> bool:
    return all(slot is None for slot in self._slots)


@breaks("ArraysCache.is_trimmable", wrong="a state is trimmable before it was written", seen="trimmable")
def unwritten_is_trimmable(original: Any, self: Any) -> bool:
    return bool(self.empty())


@breaks(
    "ArraysCache.trim_limit",
    wrong="a trim does nothing, and says that it was done",
    seen="refusal",
    also={"ArraysCache._trim": lambda original, self, n: None},
)
def state_trimmed(original: Any, self: Any) -> int:
    return 2**30


@breaks("ArraysCache.nbytes", wrong="nbytes of an unfilled slot raises", seen="unanswered")
def nbytes_needs_every_slot(original: Any, self: Any) -> int:
    return sum(slot.nbytes for slot in self._slots)


@breaks("ArraysCache.size", wrong="its size is that of slot 0", seen="size unanswered")
def size_of_slot_0(original: Any, self: Any) -> int:
    return 0 if self._slots[0] is None else int(self._slots[0].shape[2])


# -- states and copies ----------------------------------------------------------------------------


@breaks("ArraysCache.from_state", wrong="a restored cache has no lengths")
def restored_without_lengths(original: Any, cls: Any, state: Any) -> Any:
    return original(cls, (state[0], state[1], None))


@breaks("ArraysCache.from_state", wrong="a restored cache has no left padding")
def restored_without_left_padding(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made._due = None if made._due is None else (0,) * len(made._due)
    return made


@breaks("ArraysCache.from_state", wrong="a restored cache expects as many columns as its longest length")
def restored_without_columns(original: Any, cls: Any, state: Any) -> Any:
    return original(cls, state if len(state) == 3 or min(state[2].tolist()) < 0 else state[:3])


@breaks("ArraysCache.from_state", wrong="a restored cache without states counts as one row")
def restored_as_one_row(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    if made._due is not None and not any(made._due) and made._pending is None:
        made._due = None
    return made


@breaks(
    "ArraysCache.__setitem__",
    wrong="a slot is written into the list, which copies share",
    seen="state slot_0 slot_1 slot_2 slot_3",
    also={"ArraysCache.__deepcopy__": lambda original, self, memo: copy.copy(self)},
)
def list_of_slots_shared(original: Any, self: Any, idx: int, value: Any) -> None:
    slots = self._slots
    original(self, idx, value)
    slots[idx] = self._slots[idx]
    self._slots = slots
