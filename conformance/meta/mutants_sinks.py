"""Mistakes in the sinks of a batch: forgotten, evicted, seen too early, twice or not at all, moved with the columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

RING = "BatchRotatingKVCache"


# -- writing --------------------------------------------------------------------------------------


@breaks(
    "batch_sinks.with_sinks", kinds=RING, wrong="sinks stay in the columns that they came in", seen="visible columns"
)
def sinks_stay_in_their_columns(original: Any, buffer: mx.array, *rest: Any) -> Any:
    return buffer


@breaks("batch_sinks.with_sinks", kinds=RING, wrong="the first row says for all which columns are sinks")
def sinks_of_the_first_row(original: Any, buffer: Any, columns: Any, keep: int, firsts: Any, counts: Any) -> Any:
    return original(buffer, columns, keep, [firsts[0]] * len(firsts), counts)


@breaks("batch_sinks.with_sinks", kinds=RING, wrong="a row keeps only the sinks of its first update")
def sinks_of_one_update(original: Any, buffer: Any, columns: Any, keep: int, firsts: Any, counts: Any) -> Any:
    return original(buffer, columns, keep, [keep if first > 0 else first for first in firsts], counts)


@breaks("batch_sinks.with_sinks", kinds=RING, wrong="left pads count as sinks")
def left_pads_are_sinks(original: Any, buffer: Any, columns: Any, keep: int, firsts: Any, counts: Any) -> Any:
    return original(buffer, columns, keep, [max(0, first) for first in firsts], counts)


@breaks("ring_update.ring_write", kinds=RING, wrong="a wrapped ring goes to slot 0 and overwrites sinks")
def batch_wraps_onto_the_sinks(original: Any, ring: Any, n: int, in_order: bool = False) -> Any:
    write = original(ring, n, in_order)
    if write.slot is None or not write.after.wrapped or ring.wrapped:
        return write
    return write._replace(slot=0, after=write.after._replace(head=1))


@breaks("temporal_order.slot_ranges", kinds=RING, wrong="several tokens push the sinks out")
def sinks_evicted_by_several(original: Any, ring: Any, dropped: int = 0) -> Any:
    return original(ring, dropped) if ring.wrapped or not dropped else [(dropped, ring.stored)]


# -- the mask -------------------------------------------------------------------------------------


@breaks("masks.sinks_mask", kinds=RING, wrong="slots of sinks are seen before they are written", seen="visible columns")
def sinks_seen_before_they_are_written(original: Any, pads: Any, firsts: Sequence[int], *rest: Any, **more: Any) -> Any:
    return original(pads, [more["keep"]] * len(firsts), *rest, **more)


@breaks("masks.sinks_mask", kinds=RING, wrong="a query sees the sinks before its own alone", seen="visible columns")
def own_sink_hidden(original: Any, pads: Any, firsts: Sequence[int], *rest: Any, **more: Any) -> Any:
    return original(pads, [first - 1 for first in firsts], *rest, **more)


@breaks("masks.sinks_mask", kinds=RING, wrong="a sink is seen in its slot and in its column", seen="visible columns")
def sinks_seen_twice(original: Any, pads: Any, *rest: Any, **more: Any) -> Any:
    return original([max(0, p - more["keep"]) for p in pads], *rest, **more)


@breaks("masks.sinks_mask", kinds=RING, wrong="a window hides the sinks", seen="visible columns")
def window_hides_the_sinks(
    original: Any, pads: Any, firsts: Any, n: int, width: int, window: int, *rest: Any, **more: Any
) -> Any:
    mask = original(pads, firsts, n, width, window, *rest, **more)
    hide = isinstance(mask, mx.array) and min(firsts, default=0) >= width
    return mask & (mx.arange(width) >= more["keep"]) if hide else mask


@breaks(
    "masks.sinks_mask", kinds=RING, wrong="the window is as wide as the ring with its sinks", seen="visible columns"
)
def sinks_widen_a_batchs_window(
    original: Any, pads: Any, firsts: Any, n: int, width: int, window: int, *rest: Any, **more: Any
) -> Any:
    return original(pads, firsts, n, width, window + more["keep"], *rest, **more)


@breaks(
    "masks.sinks_mask", kinds=RING, wrong="the longest row says for all which sinks are there", seen="visible columns"
)
def sinks_of_the_longest_row(original: Any, pads: Any, firsts: Sequence[int], *rest: Any, **more: Any) -> Any:
    return original(pads, [max(firsts)] * len(firsts) if firsts else firsts, *rest, **more)


@breaks("masks.sinks_mask", kinds=RING, wrong="of a wrapped ring the mask is in temporal order", seen="visible columns")
def mask_with_sinks_in_temporal_order(original: Any, *rest: Any, **more: Any) -> Any:
    return original(*rest, **{**more, "slot": None})


# -- rows -----------------------------------------------------------------------------------------


@breaks("BatchRotatingKVCache.merge", wrong="a merge forgets the sinks")
def merge_forgets_the_sinks(original: Any, cls: Any, caches: Any) -> Any:
    made = original(cls, caches)
    made._ring = made._ring._replace(keep=0)
    return made


@breaks("BatchRotatingKVCache.merge", wrong="rings of different sinks merge", seen="refusal")
def merge_takes_any_sinks(original: Any, cls: Any, caches: Any) -> Any:
    held = [cache._ring for cache in caches]
    try:
        for cache in caches:
            cache._ring = cache._ring._replace(keep=caches[0]._ring.keep)
        return original(cls, caches)
    finally:
        for cache, ring in zip(caches, held, strict=True):
            cache._ring = ring


@breaks(
    "temporal_order.ordered_moves",
    kinds=RING,
    wrong="a shorter row is padded before its sinks",
    seen="visible columns values",
)
def padded_before_the_sinks(original: Any, ring: Any, newest: int, stop: int) -> Any:
    first = stop - min(newest, ring.stored)
    return tuple((slot, first + to if slot == 0 else to, n) for slot, to, n in original(ring, newest, stop))


@breaks("padding.pads_to_the_front", kinds=RING, wrong="the sinks are moved with the columns behind them")
def rolled_before_the_sinks(original: Any, shifts: Any, keep: int, width: int) -> Any:
    return original(shifts, 0, width)


@breaks("BatchRotatingKVCache.extend", wrong="batches of different sinks go together", seen="refusal")
def extend_takes_any_sinks(original: Any, self: Any, other: Any) -> Any:
    ring = getattr(other, "_ring", None)
    if ring is None or type(other) is not type(self):
        return original(self, other)
    other._ring = ring._replace(keep=self._ring.keep)
    try:
        return original(self, other)
    finally:
        if other is not self:
            other._ring = ring


@breaks("BatchRotatingKVCache.extract", wrong="an extracted row has no sinks", seen="visible columns")
def extracted_without_sinks(original: Any, self: Any, idx: int) -> Any:
    made = original(self, idx)
    made._ring = made._ring._replace(keep=0)
    return made


@breaks("BatchRotatingKVCache.extract", wrong="a row is extracted with all slots of its sinks, written or not")
def extracted_with_unwritten_sinks(original: Any, self: Any, idx: int) -> Any:
    made = original(self, idx)
    missing = made.keep - made.offset
    if made.keys is not None and made.offset and missing > 0:
        spare = [mx.zeros((*x.shape[:2], missing, x.shape[3]), x.dtype) for x in (made.keys, made.values)]
        made.keys, made.values = (
            mx.concatenate(list(pair), 2) for pair in zip((made.keys, made.values), spare, strict=True)
        )
        made._ring = made._ring.in_order(made.keep)
    return made


@breaks("temporal_order.row_moves", kinds=RING, wrong="pads are put in front of an extracted row's sinks")
def extracted_pads_before_the_sinks(original: Any, ring: Any, sinks: int, start: int, stop: int) -> Any:
    missing = max(0, ring.keep - start)
    moves = original(ring, sinks, start, stop)
    return tuple((slot, to + missing if to < sinks else to, n) for slot, to, n in moves)


@breaks(
    "BatchRotatingKVCache.filter",
    wrong="the sinks stay where they were when rows are filtered",
    seen="visible columns values",
)
def filter_mixes_sinks(original: Any, self: Any, rows: Any) -> Any:
    before = self._buffers()
    original(self, rows)
    kept = self._rows()
    if before is not None and self.keep and 0 < kept <= before[0].shape[0] and self._ring.stored:
        k = self.keep
        self.keys, self.values = (
            mx.concatenate([old[:kept, :, :k], new[:, :, k:]], 2)
            for old, new in zip(before, self._buffers(), strict=True)
        )


# -- trim, state ----------------------------------------------------------------------------------


@breaks("BatchRotatingKVCache._trim", wrong="pads do not know of sinks that were trimmed", seen="visible columns")
def trimmed_sinks_leave_no_pads(original: Any, self: Any, n: int) -> Any:
    original(self, n)
    behind = self._ring.stored - self._ring.keep
    self._pads = tuple(min(p, max(0, behind)) for p in self._pads)


@breaks("BatchRotatingKVCache._trim", wrong="a trim past the columns takes the slots of the sinks along", seen="")
def trim_takes_the_slots_along(original: Any, self: Any, n: int) -> Any:
    original(self, n)
    if self.keep and self._ring.stored == self.keep and not self._ring.wrapped and min(self._offsets) == 0:
        self._ring = self._ring.in_order(0)


@breaks("BatchRotatingKVCache.from_state", wrong="a restored batch has no sinks")
def batch_restored_without_sinks(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made._ring = made._ring._replace(keep=0)
    return made


@breaks(
    "BatchRotatingKVCache._saved_state", wrong="a saved batch shows its unwritten sinks as tokens of the row before"
)
def saved_sinks_of_another_row(original: Any, self: Any) -> Any:
    keys, values, *numbers = original(self)
    if not self.keep or keys is None or keys.shape[0] < 2 or not self._ring.stored:
        return keys, values, *numbers
    k = self.keep
    return *(mx.concatenate([x[::-1][:, :, :k], x[:, :, k:]], 2) for x in (keys, values)), *numbers
