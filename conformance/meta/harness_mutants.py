"""Mistakes in the harness itself: in the reference, which the ledger must catch, and in the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.meta.mutant import breaks

RINGS = "RotatingKVCache BatchRotatingKVCache"

# -- the reference, before the ledger alone -------------------------------------------------------


@breaks(
    "masks.visible", kinds="KVCache RotatingKVCache", package="reference", wrong="a window shows one token too many"
)
def reference_window_one_wide(original: Any, keys: Any, queries: Any, window: int | None, keep: int = 0) -> Any:
    return original(keys, queries, window and window + 1, keep)


@breaks("masks.visible", kinds=RINGS, package="reference", wrong="the sinks are hidden")
def reference_hides_sinks(original: Any, keys: Any, queries: Any, window: int | None, keep: int = 0) -> Any:
    return original(keys, queries, window)


@breaks(
    "ring_update._place_several",
    kinds="RotatingKVCache BatchRotatingKVCache",
    package="reference",
    wrong="several tokens leave a column too many in the ring",
    seen="storage",
)
def reference_stores_too_much(original: Any, cache: Any, count: int) -> Any:
    return original(replace(cache, max_size=cache.max_size + 1), count)


@breaks("extract.extract", kinds="BatchRotatingKVCache", package="reference", wrong="a row leaves without its sinks")
def reference_extracts_without_sinks(original: Any, cache: Any, row: int) -> Any:
    return replace(original(cache, row), keep=0)


@breaks("filter.filter_rows", kinds="BatchKVCache", package="reference", wrong="rows keep their old order")
def reference_filter_sorts(original: Any, cache: Any, rows: Any) -> Any:
    return original(cache, sorted(rows))


@breaks("extend.extend", kinds="BatchKVCache", package="reference", wrong="another kind of cache is passed over")
def reference_extend_ignores_another_kind(original: Any, cache: Any, other: Any) -> Any:
    return original(cache, other) if other.batched else cache


@breaks("quantize.quantize", kinds="QuantizedKVCache", package="reference", wrong="a head has one scale for all groups")
def reference_scale_of_the_first_group(original: Any, x: Any, group_size: int, bits: int) -> Any:
    q = original(x, group_size, bits)
    return q._replace(scales=np.broadcast_to(q.scales[..., :1], q.scales.shape))


@breaks(
    "quantized.to_quantized",
    kinds="QuantizedKVCache",
    package="reference",
    wrong="keys are taken for values when a cache is quantized",
)
def reference_quantizes_keys_twice(original: Any, cache: Any, *how: int) -> Any:
    made = original(cache, *how)
    return (
        replace(made, values=made.keys) if cache.keys is not None and cache.keys.shape == cache.values.shape else made
    )


@breaks(
    "quantized.quantized",
    kinds="QuantizedKVCache",
    package="reference",
    wrong="seven bits are offered",
    seen="refusal crash",
)
def reference_offers_seven_bits(original: Any, group_size: int, bits: int) -> Any:
    made = original(group_size, 8 if bits == 7 else bits)
    return replace(made, quantization=replace(made.quantization, bits=bits)) if bits == 7 else made


@breaks(
    "chunked.trim_front",
    kinds="ChunkedKVCache",
    package="reference",
    wrong="a token more than the chunk is kept",
    seen="start_position",
)
def reference_keeps_more_than_the_chunk(original: Any, cache: Any) -> Any:
    return replace(original(replace(cache, chunk_size=cache.chunk_size + 1)), chunk_size=cache.chunk_size)


@breaks("arrays.advance", kinds="ArraysCache", package="reference", wrong="lengths are not counted down")
def reference_lengths_stay(original: Any, cache: Any, count: int) -> Any:
    made = original(cache, count)
    return replace(made, columns=replace(made.columns, pending=cache.columns.pending))


@breaks(
    "arrays._joined",
    kinds="ArraysCache",
    package="reference",
    wrong="rows of a slot that was never written are left out",
)
def reference_leaves_unwritten_rows_out(original: Any, parts: Any, rows: Any, call: str) -> Any:
    written = [i for i, part in enumerate(parts) if part is not None]
    return original([parts[i] for i in written], [rows[i] for i in written], call)


@breaks("cache_list.each", kinds="CacheList", package="reference", wrong="the last caches of lists stay as they are")
def reference_leaves_the_last_child(original: Any, operation: Any, *lists: Any) -> Any:
    return *original(operation, *lists)[:-1], lists[0][-1]


@breaks(
    "cache_list.each",
    kinds="CacheList",
    package="reference",
    wrong="of lists that differ the shorter counts",
    seen="refusal",
)
def reference_takes_the_shorter_list(original: Any, operation: Any, *lists: Any) -> Any:
    count = min(map(len, lists))
    return original(operation, *(children[:count] for children in lists))


# -- the reference, before its own invariants -----------------------------------------------------


@breaks(
    "ring_update.newest", kinds="RotatingKVCache", package="reference", wrong="the sinks are dropped with the oldest"
)
def unsound_sinks_dropped(original: Any, slots: list[int], count: int, keep: int) -> Any:
    return original(slots, count, 0)


@breaks("sinks.into_sinks", kinds="BatchRotatingKVCache", package="reference", wrong="sinks stay in their columns")
def unsound_sinks_in_their_columns(original: Any, cache: Any, new: Any, sources: Any) -> Any:
    return sources


@breaks("trim.can_trim", kinds="RotatingKVCache", package="reference", wrong="more is trimmed than is still held")
def unsound_trim(original: Any, cache: Any, count: int) -> Any:
    return 0 <= count <= min(cache.tokens, default=0)


@breaks("trim.can_trim", kinds="ChunkedKVCache", package="reference", wrong="all that a chunk holds may be trimmed")
def unsound_trim_across_the_chunk_start(original: Any, cache: Any, count: int) -> Any:
    return 0 <= count <= cache.slots if cache.chunk_size else original(cache, count)


@breaks("padding.finalize", kinds="BatchKVCache", package="reference", wrong="right pads stay where they are")
def unsound_finalize(original: Any, cache: Any) -> Any:
    return replace(cache, pending=None)


# -- the ledger, before the reference and mlximpl -------------------------------------------------


@breaks("ledger._sees", kinds=RINGS, package="conformance", wrong="sinks are forgotten")
def ledger_forgets_sinks(original: Any, row: Any, query: Any, window: Any, keep: int, front: int) -> Any:
    return original(row, query, window, 0, front)


@breaks("ledger._feed_one", kinds="BatchKVCache", package="conformance", wrong="a left pad due is taken for a token")
def ledger_takes_pads_for_tokens(original: Any, row: Any, pending: bool) -> Any:
    row.due = 0
    return original(row, pending)


@breaks("ledger._trim_reason", kinds="KVCache", package="conformance", wrong="a negative trim is lawful")
def ledger_allows_a_negative_trim(original: Any, holding: Any, tokens: int) -> Any:
    return None if tokens < 0 else original(holding, tokens)


@breaks(
    "ledger._prepare_reason", kinds="BatchRotatingKVCache", package="conformance", wrong="no second prepare is refused"
)
def ledger_allows_a_second_prepare(original: Any, holding: Any, operation: Any) -> Any:
    return original(replace(holding, pending=False), operation)


@breaks(
    "ledger._quantization_reason", kinds="QuantizedKVCache", package="conformance", wrong="five bits are not offered"
)
def ledger_refuses_five_bits(original: Any, group_size: int, bits: int) -> Any:
    return "five bits" if bits == 5 else original(group_size, bits)


@breaks(
    "ledger.Ledger._to_quantized",
    kinds="QuantizedKVCache",
    package="conformance",
    wrong="what is quantized holds nothing",
)
def ledger_loses_what_is_quantized(original: Any, self: Any, operation: Any) -> None:
    original(self, operation)
    for row in self.holdings[operation.into].rows:
        row.history = []


@breaks("ledger._sees", kinds="ChunkedKVCache", package="conformance", wrong="what was dropped in front is seen")
def ledger_sees_the_dropped_front(original: Any, row: Any, query: Any, window: Any, keep: int, front: int) -> Any:
    return original(row, query, window, keep, 0)


@breaks(
    "ledger._trim_reason", kinds="ChunkedKVCache", package="conformance", wrong="a trim may cross the chunk's start"
)
def ledger_allows_a_broken_chunk(original: Any, holding: Any, tokens: int) -> Any:
    return original(replace(holding, chunk_size=None), tokens)


@breaks("ledger._feed_one", kinds="ArraysCache", package="conformance", wrong="a right pad is taken for a token")
def ledger_takes_right_pads_for_tokens(original: Any, row: Any, pending: bool) -> Any:
    return original(row, False)


@breaks(
    "ledger._prepare_reason",
    kinds="ArraysCache",
    package="conformance",
    wrong="right padding alone is lawful for recurrent state",
)
def ledger_allows_right_padding_alone(original: Any, holding: Any, operation: Any) -> Any:
    reason = original(holding, operation)
    return None if reason == "right padding without lengths" else reason


@breaks("ledger.Ledger.judge", kinds="CacheList", package="conformance", wrong="what the first child may, all may")
def ledger_asks_the_first_child(original: Any, self: Any, operation: Any) -> Any:
    verdict = original(self, operation)
    return (
        original(self, self.parts(operation)[0])
        if self.is_list(operation) and verdict.reason != "another kind"
        else verdict
    )


@breaks(
    "ledger._part", kinds="CacheList", package="conformance", wrong="the children of a new list are named in reverse"
)
def ledger_names_children_in_reverse(original: Any, operation: Any, i: int) -> Any:
    children = getattr(operation, "children", ())
    return original(replace(operation, children=children[::-1]) if children else operation, i)
