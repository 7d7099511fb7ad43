"""Mistakes in the harness itself: in the reference, which the ledger must catch, and in the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance.meta.mutant import breaks

# -- the reference, before the ledger alone -------------------------------------------------------


@breaks(
    "masks.visible", kinds="KVCache RotatingKVCache", package="reference", wrong="a window shows one token too many"
)
def reference_window_one_wide(original: Any, keys: Any, queries: Any, window: int | None, keep: int = 0) -> Any:
    return original(keys, queries, window and window + 1, keep)


@breaks("masks.visible", kinds="RotatingKVCache", package="reference", wrong="the sinks are hidden")
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


@breaks("filter.filter_rows", kinds="BatchKVCache", package="reference", wrong="rows keep their old order")
def reference_filter_sorts(original: Any, cache: Any, rows: Any) -> Any:
    return original(cache, sorted(rows))


@breaks("extend.extend", kinds="BatchKVCache", package="reference", wrong="another kind of cache is passed over")
def reference_extend_ignores_another_kind(original: Any, cache: Any, other: Any) -> Any:
    return original(cache, other) if other.batched else cache


# -- the reference, before its own invariants -----------------------------------------------------


@breaks(
    "ring_update.newest", kinds="RotatingKVCache", package="reference", wrong="the sinks are dropped with the oldest"
)
def unsound_sinks_dropped(original: Any, slots: list[int], count: int, keep: int) -> Any:
    return original(slots, count, 0)


@breaks("trim.can_trim", kinds="RotatingKVCache", package="reference", wrong="more is trimmed than is still held")
def unsound_trim(original: Any, cache: Any, count: int) -> Any:
    return 0 <= count <= min(cache.tokens, default=0)


@breaks("padding.finalize", kinds="BatchKVCache", package="reference", wrong="right pads stay where they are")
def unsound_finalize(original: Any, cache: Any) -> Any:
    return replace(cache, pending=None)


# -- the ledger, before the reference and mlximpl -------------------------------------------------


@breaks("ledger._sees", kinds="RotatingKVCache", package="conformance", wrong="sinks are forgotten")
def ledger_forgets_sinks(original: Any, row: Any, query: Any, window: Any, keep: int) -> Any:
    return original(row, query, window, 0)


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
