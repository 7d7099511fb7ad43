"""Mistakes in the mask: its width, its window, its pads, the moment for which it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import Broken, Mutant, breaks

Change = Callable[[Any, Any, int, int | None], Any]
"""(mask, cache, N, window_size) to the mask that is returned instead."""


def makes_another_mask(
    *kinds: str, wrong: str, seen: str = "visible columns"
) -> Callable[[Change], tuple[Mutant, ...]]:
    """A mutant of each kind's `make_mask`, which still does what it did before its result is changed."""

    def make(change: Change) -> tuple[Mutant, ...]:
        def make_mask(
            original: Any, self: Any, n: int, window_size: int | None = None, return_array: bool = False
        ) -> Any:
            return change(original(self, n, window_size, return_array), self, n, window_size)

        broken: Broken = make_mask
        broken.__name__ = change.__name__
        return breaks(*(f"{kind}.make_mask" for kind in kinds), wrong=wrong, seen=seen)(broken)

    return make


def _is_array(mask: Any) -> bool:
    return isinstance(mask, mx.array)


# -- None and "causal" where they say something else ----------------------------------------------


@makes_another_mask("KVCache", "RotatingKVCache", wrong="one token gets no mask where the window cuts")
def none_where_the_window_cuts(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return None if n == 1 else mask


@makes_another_mask("KVCache", "BatchRotatingKVCache", wrong="several tokens get a causal mask where the window cuts")
def causal_where_the_window_cuts(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return "causal" if n > 1 and window is not None else mask


@makes_another_mask("BatchKVCache", "BatchRotatingKVCache", wrong="one token gets no mask where pads show")
def none_where_pads_show(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return None if n == 1 and window is None else mask


@makes_another_mask("BatchKVCache", wrong="several tokens get a causal mask where pads show")
def causal_where_pads_show(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return "causal" if n > 1 and window is None else mask


@makes_another_mask("RotatingKVCache", wrong="several tokens get a causal mask, which no ring's window cuts")
def causal_beyond_max_size(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return "causal" if n > 1 and window is None else mask


# -- the window -----------------------------------------------------------------------------------


@breaks(
    "KVCache.make_mask",
    "BatchRotatingKVCache.make_mask",
    wrong="a window shows one token too many",
    seen="visible columns",
)
def window_one_wide(
    original: Any, self: Any, n: int, window_size: int | None = None, return_array: bool = False
) -> Any:
    return original(self, n, window_size and window_size + 1, return_array)


@breaks(
    "RotatingKVCache.make_mask",
    "BatchKVCache.make_mask",
    wrong="a window shows one token too few",
    seen="visible columns",
)
def window_one_narrow(
    original: Any, self: Any, n: int, window_size: int | None = None, return_array: bool = False
) -> Any:
    return original(self, n, max(1, window_size - 1) if window_size and window_size > 0 else window_size, return_array)


@breaks("BatchKVCache.make_mask", wrong="a window is forgotten where there are pads", seen="visible columns")
def window_or_pads(original: Any, self: Any, n: int, window_size: int | None = None, return_array: bool = False) -> Any:
    padded = max(self.left_padding.tolist(), default=0) > 0
    return original(self, n, None if padded and window_size and window_size > 0 else window_size, return_array)


@breaks("masks.solo_mask", kinds="RotatingKVCache", wrong="the sinks widen the window", seen="visible columns")
def sinks_widen_the_window(original: Any, n: int, width: int, window: int | None, *rest: Any, **more: Any) -> Any:
    return original(n, width, window and window + more.get("keep", 0), *rest, **more)


# -- the columns that it speaks of ----------------------------------------------------------------


@breaks("KVCache.make_mask", wrong="the mask is made for the state after the update", seen="mask_width")
def made_for_the_state_after(
    original: Any, self: Any, n: int, window_size: int | None = None, return_array: bool = False
) -> Any:
    self.offset += max(0, n)
    try:
        return original(self, n, window_size, return_array)
    finally:
        self.offset -= max(0, n)


@makes_another_mask(
    "RotatingKVCache", "BatchRotatingKVCache", wrong="a wrapped ring's mask is made for the head after the update"
)
def made_for_the_head_after(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    wrapped = n == 1 and _is_array(mask) and int(mx.array(cache.offset).max()) >= cache.max_size
    return mx.roll(mask, 1, -1) if wrapped else mask


@makes_another_mask(
    "KVCache", "BatchKVCache", wrong="the mask is one column narrower than the fetch", seen="mask_width"
)
def one_column_narrow(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return mask[..., 1:] if _is_array(mask) else mask


@makes_another_mask("RotatingKVCache", wrong="a ring's mask is as wide as all the tokens ever fed", seen="mask_width")
def as_wide_as_the_offset(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    if not _is_array(mask) or mask.ndim != 2:
        return mask
    return mx.pad(mask, [(0, 0), (max(0, cache.offset + n - mask.shape[-1]), 0)])


@makes_another_mask("KVCache", "BatchKVCache", wrong="each of several queries sees what the next one may see")
def a_query_late(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    if not _is_array(mask) or n == 1:
        return mask
    return mx.concatenate([mask[..., 1:, :], mask[..., -1:, :]], axis=-2)


@makes_another_mask("BatchRotatingKVCache", wrong="the newest slot is hidden from the token in it")
def last_slot_hidden(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return mask & (mx.arange(mask.shape[-1]) < mask.shape[-1] - 1) if _is_array(mask) else mask


@makes_another_mask("BatchKVCache", "BatchRotatingKVCache", wrong="each row has another row's mask")
def rows_of_the_mask_reversed(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return mask[::-1] if _is_array(mask) else mask


@makes_another_mask("KVCache", wrong="the mask is of numbers to add, not of booleans", seen="mask_width")
def additive(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return mx.where(mask, 0.0, -mx.inf) if _is_array(mask) else mask


@makes_another_mask(
    "RotatingKVCache", "BatchRotatingKVCache", wrong="a window wider than the ring lifts the ring's own"
)
def wide_window_lifts_the_ring(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    return "causal" if n > 1 and window is not None and window > cache.max_size else mask


@makes_another_mask(
    "BatchRotatingKVCache", wrong="making a mask already counts the pads out that the update will evict", seen=""
)
def mask_moves_the_pads(mask: Any, cache: Any, n: int, window: int | None) -> Any:
    if n == 1 and cache.size() == cache.max_size:
        cache._pads = tuple(max(0, p - 1) for p in cache._pads)
    return mask
