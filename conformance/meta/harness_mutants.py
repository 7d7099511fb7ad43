"""Mistakes in the harness itself: in the reference, which the ledger must catch, and in the ledger."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance.meta.mutant import breaks

# -- the reference, before the ledger alone -------------------------------------------------------


@breaks(
    "masks.visible", kinds="KVCache RotatingKVCache", package="reference", wrong="a window one token wide of the mark"
)
def reference_window_one_wide(original: Any, keys: Any, queries: Any, window: int | None, keep: int = 0) -> Any:
    return original(keys, queries, window and window + 1, keep)


@breaks(
    "ring_update.newest", kinds="RotatingKVCache", package="reference", wrong="the sinks are dropped with the oldest"
)
def reference_drops_sinks(original: Any, slots: list[int], count: int, keep: int) -> Any:
    return original(slots, count, 0)


@breaks(
    "ring_update.newest", kinds="BatchRotatingKVCache", package="reference", wrong="a ring stores a column too many"
)
def reference_stores_too_much(original: Any, slots: list[int], count: int, keep: int) -> Any:
    return original(slots, count + 1, keep)


@breaks("padding.finalize", kinds="BatchKVCache", package="reference", wrong="right pads stay where they are")
def reference_leaves_right_pads(original: Any, cache: Any) -> Any:
    return replace(cache, pending=None)


@breaks("trim.trim_limit", kinds="RotatingKVCache", package="reference", wrong="more may be trimmed than is still held")
def reference_limit_too_high(original: Any, cache: Any) -> Any:
    return max(original(cache), min(cache.tokens, default=0) if cache.pending is None else 0)


@breaks("filter.filter_rows", kinds="BatchKVCache", package="reference", wrong="rows keep their old order")
def reference_filter_sorts(original: Any, cache: Any, rows: Any) -> Any:
    return original(cache, sorted(rows))


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
