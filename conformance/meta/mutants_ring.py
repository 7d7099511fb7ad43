"""Mistakes in the ring: where the head goes, what is evicted, the sinks, trimming after wrapping."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

RINGS = "RotatingKVCache BatchRotatingKVCache"


# -- the head and eviction ------------------------------------------------------------------------


@breaks("ring_update.ring_write", kinds=RINGS, wrong="several tokens evict one token too many")
def evicts_one_early(original: Any, ring: Any, n: int, in_order: bool = False) -> Any:
    write = original(ring, n, in_order)
    if write.slot is not None or not write.dropped or ring.stored - write.dropped <= ring.keep:
        return write
    after = write.after.in_order(write.after.stored - 1)
    return write._replace(dropped=write.dropped + 1, evicted=write.evicted + 1, after=after)


@breaks("ring_update.ring_write", kinds=RINGS, wrong="several tokens leave one token too many in the ring")
def evicts_one_late(original: Any, ring: Any, n: int, in_order: bool = False) -> Any:
    write = original(ring, n, in_order)
    if write.slot is not None or not write.dropped:
        return write
    after = write.after.in_order(write.after.stored + 1)
    return write._replace(dropped=write.dropped - 1, evicted=write.evicted - 1, after=after)


@breaks(
    "ring_update.ring_write",
    kinds=RINGS,
    wrong="single tokens are appended as several are, never overwritten",
    seen="columns",
)
def never_wraps(original: Any, ring: Any, n: int, in_order: bool = False) -> Any:
    return original(ring, n, True)


@breaks(
    "ring_update.ring_write", kinds="RotatingKVCache", wrong="the wrapped head goes to slot 0: the sinks are evicted"
)
def wraps_onto_the_sinks(original: Any, ring: Any, n: int, in_order: bool = False) -> Any:
    write = original(ring, n, in_order)
    if write.slot is None or not write.after.wrapped or ring.wrapped:
        return write
    return write._replace(slot=0, after=write.after._replace(head=1))


@breaks("ring_update.ring_write", kinds=RINGS, wrong="the wrapped head skips the first slot behind the sinks")
def wraps_one_too_far(original: Any, ring: Any, n: int, in_order: bool = False) -> Any:
    write = original(ring, n, in_order)
    if write.slot is None or write.slot + 1 >= ring.max_size or not write.after.wrapped or ring.wrapped:
        return write
    return write._replace(slot=write.slot + 1, after=write.after._replace(head=write.slot + 2))


@breaks("ring_update.ring_write", kinds=RINGS, wrong="pads are not counted down as they are evicted")
def pads_stay_when_evicted(original: Any, ring: Any, n: int, in_order: bool = False) -> Any:
    return original(ring, n, in_order)._replace(evicted=0)


@breaks("ring_update.ring_write", kinds="BatchRotatingKVCache", wrong="one token of a pending prefill goes to the head")
def pending_token_goes_to_the_head(original: Any, ring: Any, n: int, in_order: bool = False) -> Any:
    return original(ring, n, False)


@breaks("temporal_order.slot_ranges", kinds=RINGS, wrong="temporal order begins one slot before the head")
def order_one_slot_early(original: Any, ring: Any, dropped: int = 0) -> Any:
    early = ring.wrapped and ring.head > ring.keep
    return original(ring._replace(head=ring.head - 1) if early else ring, dropped)


@breaks("temporal_order.temporal_columns", kinds=RINGS, wrong="slot order is taken for temporal order")
def slot_order_for_temporal(original: Any, buffer: mx.array, ring: Any, dropped: int = 0) -> Any:
    return [buffer[..., dropped : ring.stored, :]]


def _clipped_mask(original: Any, self: Any, n: int, *rest: Any, **more: Any) -> Any:
    mask = original(self, n, *rest, **more)
    clipped = isinstance(mask, mx.array) and n > self.max_size
    return mask[..., -self.max_size :] if clipped else mask


@breaks(
    "RotatingKVCache.update_and_fetch",
    wrong="of an update longer than the ring only the newest max_size columns are fetched",
    seen="visible columns mask_width",
    also={"RotatingKVCache.make_mask": _clipped_mask},
)
def long_fetch_clipped(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    fetched = original(self, keys, values)
    return tuple(x[..., -self.max_size :, :] for x in fetched) if keys.shape[2] > self.max_size else fetched


@breaks("RotatingKVCache.update_and_fetch", wrong="the offset stops at max_size", seen="offset offsets")
def offset_stops_at_max_size(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    fetched = original(self, keys, values)
    self.offset = min(self.offset, self.max_size)
    return fetched


# -- the sinks ------------------------------------------------------------------------------------


@breaks("RotatingKVCache.make_mask", wrong="the sinks are hidden once the window has left them", seen="visible columns")
def sinks_hidden(original: Any, self: Any, n: int, *rest: Any, **more: Any) -> Any:
    mask = original(self, n, *rest, **more)
    hide = isinstance(mask, mx.array) and self.offset >= self.max_size
    return mask & (mx.arange(mask.shape[-1]) >= self.keep) if hide else mask


@breaks("RotatingKVCache.make_mask", wrong="the sinks are shown to queries before them", seen="visible columns")
def sinks_shown_early(original: Any, self: Any, n: int, *rest: Any, **more: Any) -> Any:
    mask = original(self, n, *rest, **more)
    return mask | (mx.arange(mask.shape[-1]) < self.keep) if isinstance(mask, mx.array) else mask


# -- trimming -------------------------------------------------------------------------------------


@breaks("trim.ring_trim", kinds=RINGS, wrong="a trim of a wrapped ring moves the offset and not the head")
def head_not_taken_back(original: Any, ring: Any, n: int) -> Any:
    return (ring, 0, False) if ring.wrapped else original(ring, n)


@breaks("trim.ring_trim", kinds=RINGS, wrong="the slots that a trim leaves are not counted as pads")
def trimmed_slots_stay_visible(original: Any, ring: Any, n: int) -> Any:
    after, _, reorder = original(ring, n)
    return after, 0, reorder


@breaks("trim.ring_trim", kinds=RINGS, wrong="a trim of a wrapped ring counts one pad too many")
def one_pad_too_many(original: Any, ring: Any, n: int) -> Any:
    after, pads, reorder = original(ring, n)
    return after, pads + 1 if pads else 0, reorder


@breaks(
    "trim.ring_trim", kinds="BatchRotatingKVCache", wrong="a trim that crosses the head leaves the ring out of order"
)
def not_put_in_order(original: Any, ring: Any, n: int) -> Any:
    after, pads, _ = original(ring, n)
    return after, pads, False


@breaks("RotatingKVCache.can_trim", "BatchRotatingKVCache.can_trim", wrong="one token too many may go", seen="refusal")
def limit_one_high(original: Any, self: Any, n: int) -> Any:
    return original(self, n) or (n > 1 and original(self, n - 1))


@breaks("RotatingKVCache.can_trim", "BatchRotatingKVCache.can_trim", wrong="one token too few may go", seen="refusal")
def limit_one_low(original: Any, self: Any, n: int) -> Any:
    return original(self, n) and (n == 0 or original(self, n + 1))


@breaks(
    "BatchKVCache.can_trim",
    "BatchRotatingKVCache.can_trim",
    wrong="the longest row says how many may go",
    seen="refusal",
)
def limit_of_the_longest_row(original: Any, self: Any, n: int) -> Any:
    return 0 <= n <= max(self.offset.tolist(), default=0)


@breaks("RotatingKVCache.can_trim", wrong="a ring that has evicted does not go back to its sinks", seen="refusal")
def not_back_to_the_sinks(original: Any, self: Any, n: int) -> Any:
    return original(self, n) and n <= self.trim_limit()


@breaks(
    "RotatingKVCache.is_trimmable",
    "BatchRotatingKVCache.is_trimmable",
    wrong="a wrapped ring says that everything may be trimmed",
    seen="trimmable",
)
def always_trimmable(original: Any, self: Any) -> bool:
    return True


@breaks(
    "RotatingKVCache.is_trimmable",
    "ChunkedKVCache.is_trimmable",
    wrong="drafts that came together count as single tokens",
    seen="trimmable",
)
def drafts_not_trimmable(original: Any, self: Any) -> bool:
    return bool(self.trim_limit() >= self.offset)


# -- what it says of itself -----------------------------------------------------------------------


@breaks("RotatingKVCache.size", wrong="size counts evicted tokens", seen="size")
def size_counts_evicted(original: Any, self: Any) -> int:
    return int(self.offset)


@breaks("BatchRotatingKVCache.size", wrong="size counts what a long update leaves beyond max_size", seen="size")
def size_beyond_max_size(original: Any, self: Any) -> int:
    keys = self.state[0]
    return 0 if keys is None else int(keys.shape[2])
