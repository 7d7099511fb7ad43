"""Mistakes in padding: a ragged prefill that is rolled, filtered, joined or restored wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

BATCHES = "BatchKVCache BatchRotatingKVCache"


# -- finalize -------------------------------------------------------------------------------------


@breaks("padding.pads_to_the_front", kinds=BATCHES, wrong="right pads are rolled by one column too few")
def rolled_one_short(original: Any, shifts: Sequence[int], keep: int, width: int) -> Any:
    return original([max(0, shift - 1) for shift in shifts], keep, width)


@breaks("padding.pads_to_the_front", kinds=BATCHES, wrong="each row is rolled by another row's right pads")
def rolled_by_another_row(original: Any, shifts: Sequence[int], keep: int, width: int) -> Any:
    return original(list(shifts)[::-1], keep, width)


@breaks("padding.pads_to_the_front", kinds=BATCHES, wrong="all rows are rolled by the most right pads of any")
def rolled_by_the_most(original: Any, shifts: Sequence[int], keep: int, width: int) -> Any:
    return original([max(shifts)] * len(shifts) if shifts else shifts, keep, width)


@breaks(
    "BatchKVCache.finalize", "BatchRotatingKVCache.finalize", wrong="keys are rolled and values are not", seen="values"
)
def values_not_rolled(original: Any, self: Any) -> None:
    before = self.values
    original(self)
    self.values = before


@breaks(
    "BatchKVCache.finalize",
    "BatchRotatingKVCache.finalize",
    wrong="offsets go on counting right pads",
    seen="offset offsets",
)
def offsets_keep_right_pads(original: Any, self: Any) -> None:
    before = self._offsets
    original(self)
    self._offsets = before


@breaks(
    "BatchKVCache.finalize",
    "BatchRotatingKVCache.finalize",
    wrong="right pads are visible once they were rolled to the front",
    seen="visible columns",
)
def rolled_pads_visible(original: Any, self: Any) -> None:
    before = self._pads
    original(self)
    self._pads = before


@breaks(
    "BatchKVCache.finalize",
    "BatchRotatingKVCache.finalize",
    wrong="finalize does nothing before all announced columns came",
    seen="",
)
def early_finalize_ignored(original: Any, self: Any) -> None:
    if self._pending is None or self._pending.columns <= 0:
        original(self)


@breaks(
    "BatchKVCache.finalize", "BatchRotatingKVCache.finalize", wrong="rolled twice: the right pads stay pending", seen=""
)
def still_pending(original: Any, self: Any) -> None:
    before = self._pending
    original(self)
    self._pending = before


# -- the announcement -----------------------------------------------------------------------------


@breaks("padding.Pending.take", kinds=BATCHES, wrong="the pending padding does not follow the rows of a filter")
def pending_not_filtered(original: Any, self: Any, rows: Sequence[int]) -> Any:
    return original(self, range(len(rows)) if len(rows) <= len(self.tails) else rows)


@breaks("BatchKVCache.filter", "BatchRotatingKVCache.filter", wrong="a filter drops the announcement", seen="")
def filter_drops_the_announcement(original: Any, self: Any, rows: Any) -> None:
    original(self, rows)
    self._pending = None


@breaks("padding.join_pending", kinds=BATCHES, wrong="the other batch's announcement is lost")
def others_announcement_lost(original: Any, first: Any, second: Any, *rows: int) -> Any:
    return original(first, None, *rows)


@breaks("padding.join_pending", kinds=BATCHES, wrong="the shorter announcement holds for both")
def shorter_announcement(original: Any, first: Any, second: Any, *rows: int) -> Any:
    joined = original(first, second, *rows)
    if first is None or second is None or min(first.columns, second.columns) < 0:
        return joined
    return joined._replace(columns=min(first.columns, second.columns))


@breaks(
    "padding.nothing_announced", kinds=BATCHES, wrong="rows that join a pending batch take what comes as right pads"
)
def joined_rows_get_pads(original: Any, rows: int) -> Any:
    return original(rows)._replace(lengths=(0,) * rows)


@breaks("BatchKVCache.from_state", "BatchRotatingKVCache.from_state", wrong="a restored batch forgets what is pending")
def restored_without_pending(original: Any, cls: Any, state: Any) -> Any:
    known = 8 if "Rotating" in cls.__name__ else 5
    return original(cls, state[:known] if len(state) == known + 4 else state)


@breaks(
    "BatchKVCache.__deepcopy__", "BatchRotatingKVCache.__deepcopy__", wrong="a copied batch forgets what is pending"
)
def copied_without_pending(original: Any, self: Any, memo: Any) -> Any:
    made = type(self).from_state(self.state)
    made._pending = None
    return made


@breaks("BatchRotatingKVCache.update_and_fetch", wrong="a chunk's right pads stay behind their row in the next chunk")
def chunks_leave_right_pads(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    pending = self._pending
    if pending is not None and any(pending.tails):
        self._pending = pending._replace(tails=(0,) * len(pending.tails))
    try:
        return original(self, keys, values)
    except ValueError:
        self._pending = pending
        raise


@breaks("padding.Pending.update", kinds=BATCHES, wrong="a row's length begins anew with each chunk")
def lengths_not_counted_down(original: Any, self: Any, n: int, due: Sequence[int]) -> Any:
    after, tails = original(self, n, due)
    return (after if any(w >= 0 for w in self.waiting) else after._replace(lengths=self.lengths)), tails


@breaks("padding.Pending.update", kinds=BATCHES, wrong="columns beyond those announced are taken", seen="refusal")
def more_than_announced(original: Any, self: Any, n: int, due: Sequence[int]) -> Any:
    columns = self.columns if self.columns < 0 else max(self.columns, n)
    return original(self._replace(columns=columns), n, due)


@breaks(
    "BatchKVCache.update_and_fetch",
    "BatchRotatingKVCache.update_and_fetch",
    wrong="an update of more than was announced is taken, though its mask is refused",
    seen="refusal crash",
)
def update_beyond_the_announcement(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    n, pending = keys.shape[2], self._pending
    if pending is not None and 0 <= pending.columns < n and keys.shape[:3] == values.shape[:3]:
        self._pending = pending._replace(columns=n)
    return original(self, keys, values)


@breaks(
    "BatchKVCache._check_announced",
    "BatchRotatingKVCache._check_announced",
    wrong="a mask of more than was announced is made",
    seen="refusal crash",
)
def mask_beyond_the_announcement(original: Any, self: Any, n: int) -> None:
    return None


# -- prepare --------------------------------------------------------------------------------------


@breaks("BatchKVCache.prepare", "BatchRotatingKVCache.prepare", wrong="right padding without lengths is ignored")
def right_padding_alone_ignored(original: Any, self: Any, **given: Any) -> None:
    original(self, **given)
    if "lengths" not in given:
        self._pending = None


@breaks("BatchKVCache.prepare", "BatchRotatingKVCache.prepare", wrong="lengths without right padding are ignored")
def lengths_alone_ignored(original: Any, self: Any, **given: Any) -> None:
    original(self, **given)
    if "right_padding" not in given:
        self._pending = None


@breaks("BatchKVCache.prepare", "BatchRotatingKVCache.prepare", wrong="lengths are counted without the left pads due")
def lengths_without_left_pads(original: Any, self: Any, **given: Any) -> None:
    due = self._due()
    original(self, **given)
    if "lengths" in given and self._pending is not None:
        lengths = tuple(length + d for length, d in zip(self._pending.lengths, due, strict=True))
        self._pending = self._pending._replace(lengths=lengths)


@breaks(
    "BatchKVCache.prepare",
    "BatchRotatingKVCache.prepare",
    wrong="left padding announced later takes the place of the first",
    seen="offset offsets",
)
def left_padding_replaced(original: Any, self: Any, **given: Any) -> None:
    before = self._pads, self._offsets
    original(self, **given)
    if "left_padding" in given and self.keys is None:
        self._pads = tuple(p - b for p, b in zip(self._pads, before[0], strict=True))
        self._offsets = tuple(-p for p in self._pads)


@breaks("padding.announce", kinds=BATCHES, wrong="a prefill without right pads is pending")
def pending_without_padding(original: Any, due: Any, stored: int, left: Any, lengths: Any, right: Any) -> Any:
    pads, pending = original(due, stored, left, lengths, right)
    if pending is None and lengths is not None and len(lengths):
        from mlximpl.padding import Pending

        nothing = (0,) * len(lengths)
        pending = Pending(max(lengths), tuple(lengths), nothing, tuple(-1 for _ in nothing))
    return pads, pending


@breaks(
    "append.spare_columns",
    kinds="BatchRotatingKVCache",
    wrong="pads are NaN: attention over them is too",
    seen="attention",
)
def pads_of_nan(original: Any, like: mx.array, n: int) -> Any:
    return [mx.full(spare.shape, mx.nan, spare.dtype) for spare in original(like, n)]


@breaks("row_copies._placed", kinds=BATCHES, wrong="rows that are moved have NaN in front", seen="attention")
def moved_rows_have_nan(original: Any, sources: Any, *rest: Any) -> Any:
    made, written = original(sources, *rest), original([mx.ones_like(source) for source in sources], *rest)
    return made if made.dtype == mx.uint64 else mx.where(written == 1, made, mx.array(mx.nan, made.dtype))


@breaks(
    "BatchKVCache._due",
    "BatchRotatingKVCache._due",
    wrong="left pads due are not counted against the lengths",
    seen="refusal",
)
def nothing_is_due(original: Any, self: Any) -> Any:
    return tuple(0 for _ in original(self))


@breaks(
    "BatchKVCache.__init__",
    "BatchRotatingKVCache.__init__",
    wrong="left pads that are due do not count in the offset",
    seen="offset offsets",
)
def offset_starts_at_zero(original: Any, self: Any, *given: Any) -> None:
    original(self, *given)
    self._offsets = tuple(0 for _ in self._offsets)
