"""Which columns of the next fetch each query may see.

A query in column q of a row sees the columns c with c <= q (causal), c > q - window, and c past the row's
pads; or c <= q among the sinks. On a wrapped ring the same question is put to the column that each slot
holds, so that no mask is ever rolled.

    six slots, the newest token in slot 2, one pad, one query

    column    3 4 5 0 1 2
    seen      1 1 1 0 1 1
"""

from collections.abc import Sequence

import mlx.core as mx

from .checks import check_mask, row_numbers, whole
from .row_numbers import int_array
from .temporal_order import slot_columns

Mask = mx.array | str | None


def decode_mask(left_padding: Sequence[int] | mx.array, n: int, width: int, window: int | None = None) -> mx.array:
    """The mask of n queries in the last columns of a left-padded batch.

    Args:
        left_padding: pads before each row's first token, (B,).
        n: how many queries there are; query i stands in column width - n + i.
        width: how many columns the fetch has, the queries' own included.
        window: how many newest columns a query may see, itself included; None for all.

    Returns:
        Booleans (B, 1, n, width). A query that is itself a pad may see nothing.

    Raises:
        ValueError: n or window is below 1, or the queries do not fit into the width.
    """
    n, window = check_mask(n, window)
    if width < n:
        raise ValueError(f"{n} queries do not fit into {width} columns")
    seen = _seen(n, width, first=_first(left_padding), window=window)
    return mx.broadcast_to(seen, (len(left_padding), 1, n, width))


def ring_mask(left_padding: Sequence[int] | mx.array, width: int, slot: int, window: int | None = None) -> mx.array:
    """The mask of one query over a wrapped ring, in slot order.

    Args:
        left_padding: pads at the front of each row's temporal order once the token is written, (B,): where
            the token overwrites the oldest column, one less than before, and never below 0.
        width: how many slots the ring has.
        slot: the slot that the token goes to.
        window: how many newest columns it may see, itself included; None for all.

    Returns:
        Booleans (B, 1, 1, width).

    Raises:
        ValueError: window is below 1, or the slot is not one of the ring's.
    """
    _, window = check_mask(1, window)
    slot = whole("slot", slot)
    if not 0 <= slot < width:
        raise ValueError(f"slot {slot} does not lie in a ring of {width} slots")
    seen = _seen(1, width, first=_first(left_padding), window=window, slot=slot)
    return mx.broadcast_to(seen, (len(left_padding), 1, 1, width))


def batch_mask(
    pads: Sequence[int],
    n: int,
    width: int,
    window: int | None,
    return_array: bool,
    *,
    slot: int | None = None,
) -> Mask:
    """A batch's mask: None or "causal" where no token's query needs more, else (B, 1, n, width)."""
    padded = any(0 < p < width for p in pads)
    if not _window_bites(width, window, min(pads, default=0)):
        window = None
    if not (padded or window or return_array):
        return None if n == 1 else "causal"
    first = int_array(tuple(pads))[:, None, None, None]
    seen = _seen(n, width, first=first, window=window, slot=slot)
    return mx.broadcast_to(seen, (len(pads), 1, n, width))


def sinks_mask(
    pads: Sequence[int],
    firsts: Sequence[int],
    n: int,
    width: int,
    window: int,
    return_array: bool,
    *,
    keep: int,
    slot: int | None,
) -> Mask:
    """A batch's mask where the first `keep` of the `width` slots hold its sinks; the pads lie behind them.

    `firsts` are the positions of the rows' first queries, since a query sees the sinks up to its own position.
    """
    bites = _window_bites(width - keep, window, min(pads, default=0))
    if not (any(pads) or bites or return_array):
        # A row without pads has all its sinks.
        return None if n == 1 else "causal"
    sinks: mx.array | int = keep
    if any(first < keep - 1 for first in firsts):
        queries = mx.array(list(firsts), dtype=mx.int32)[:, None, None, None] + mx.arange(n)[:, None]
        sinks = mx.minimum(queries + 1, keep)
    first = _first([keep + p for p in pads])
    seen = _seen(n, width, first=first, window=window if bites else None, keep=keep, slot=slot, sinks=sinks)
    return mx.broadcast_to(seen, (len(pads), 1, n, width))


def solo_mask(
    n: int,
    width: int,
    window: int | None,
    return_array: bool,
    *,
    pads: int = 0,
    keep: int = 0,
    slot: int | None = None,
) -> Mask:
    """A solo cache's mask: None, "causal", or booleans (n, width), for one query (width,).

    Where one query needs no mask, `return_array` gives (1, 1, 1, width). The `pads` lie behind the sinks.
    """
    if not _window_bites(width - keep, window, pads):
        window = None
    if not (pads or window):
        if not return_array:
            return None if n == 1 else "causal"
        if n == 1:
            return mx.ones((1, 1, 1, width), mx.bool_)
    first = keep + pads if pads else None
    return _seen(n, width, first=first, window=window, keep=keep, slot=slot)


def _window_bites(width: int, window: int | None, pads: int) -> bool:
    """Whether the newest query has tokens out of its window, in a row with so many pads."""
    return window is not None and width - pads > window


def _first(left_padding: Sequence[int] | mx.array) -> mx.array:
    """The first column of each row that holds a token, (B, 1, 1, 1)."""
    if not isinstance(left_padding, mx.array):
        left_padding = mx.array(row_numbers("left_padding", left_padding), dtype=mx.int32)
    return left_padding[:, None, None, None]


def _seen(
    n: int,
    width: int,
    *,
    first: mx.array | int | None,
    window: int | None,
    keep: int = 0,
    slot: int | None = None,
    sinks: mx.array | int | None = None,
) -> mx.array:
    """The booleans, (width,) for one query or (n, width); with an array `first` (B, 1, n, width).

    `sinks` says how many of the `keep` each query sees, (B, 1, n, 1) or one number; all if None.
    """
    columns = slot_columns(width, slot, keep)
    queries = width - 1 if n == 1 else mx.arange(width - n, width)[:, None]
    conditions = []
    if window is not None:
        conditions.append(columns > queries - window)
    if first is not None:
        conditions.append(columns >= first)
    if conditions and keep:
        conditions = [_all(conditions) | (columns < (keep if sinks is None else sinks))]
    if n > 1:
        conditions.append(columns <= queries)
    return _all(conditions)


def _all(conditions: list[mx.array]) -> mx.array:
    seen = conditions[0]
    for condition in conditions[1:]:
        seen = seen & condition
    return seen
