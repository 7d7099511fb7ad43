"""Slots to columns, and back.

max_size = 6, keep = 1, the head at slot 3: the token written last lies in slot 2

slot      0  1  2  3  4  5
column    0  4  5  1  2  3         temporal order: the sinks, then oldest to newest
"""

from typing import NamedTuple

import mlx.core as mx

from .append import join


class Ring(NamedTuple):
    """Where the columns of a ring lie. All are numbers of slots.

    `head` is the slot that the next token goes to; it is `stored` as long as the ring is not wrapped. A
    wrapped ring has `stored == max_size`.
    """

    max_size: int
    keep: int = 0
    stored: int = 0
    head: int = 0
    wrapped: bool = False

    def in_order(self, stored: int) -> "Ring":
        """The ring with `stored` columns in temporal order from slot 0 on."""
        return Ring(self.max_size, self.keep, stored, stored, False)


def slot_ranges(ring: Ring, dropped: int = 0) -> list[tuple[int, int]]:
    """The slots (start, stop) to read, one range after the other, for temporal order.

    `dropped` leaves out that many of the oldest columns behind the sinks.

    >>> slot_ranges(Ring(max_size=6, keep=1, stored=6, head=3, wrapped=True))
    [(0, 1), (3, 6), (1, 3)]
    >>> slot_ranges(Ring(max_size=6, keep=1, stored=6, head=3, wrapped=True), dropped=4)
    [(0, 1), (2, 3)]
    """
    sinks = min(ring.keep, ring.stored)
    if ring.wrapped:
        behind = [(ring.head, ring.stored), (sinks, ring.head)]
    elif dropped:
        behind = [(sinks, ring.stored)]
    else:
        return [(0, ring.stored)]
    ranges = [(0, sinks)]
    for start, stop in behind:
        skipped = min(dropped, stop - start)
        ranges.append((start + skipped, stop))
        dropped -= skipped
    return [(start, stop) for start, stop in ranges if start < stop]


def ordered_moves(ring: Ring, newest: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """How the sinks and the newest columns, `newest` in all, go into temporal order and end before column `stop`.

    Returns:
        (first slot, the column that it goes to, how many) of each range. Sinks stay at the front.

    >>> ordered_moves(Ring(max_size=6, keep=1, stored=6, head=3, wrapped=True), newest=6, stop=8)
    ((0, 0, 1), (3, 3, 3), (1, 6, 2))
    """
    sinks = min(ring.keep, ring.stored)
    moves = [(0, 0, sinks)] if sinks else []
    dropped = max(0, ring.stored - newest)
    column = stop - (ring.stored - dropped) + sinks
    for start, end in slot_ranges(ring, dropped):
        length = end - max(start, sinks)
        if length > 0:
            moves.append((end - length, column, length))
            column += length
    return tuple(moves)


def row_moves(ring: Ring, sinks: int, start: int, stop: int) -> tuple[tuple[int, int, int], ...]:
    """How `sinks` sinks and the columns from start to stop become a row in temporal order, as `ordered_moves` tells it.

    Pads are left for what lies before the ring's column `keep`, where its own sinks are.
    """
    parts = ((0, sinks, 0), (max(start, ring.keep), stop, sinks - start))
    return tuple(
        (slot + low - column, low + shift, high - low)
        for first, last, shift in parts
        for slot, column, length in ordered_moves(ring, ring.stored, ring.stored)
        if (low := max(column, first)) < (high := min(column + length, last))
    )


def temporal_columns(buffer: mx.array, ring: Ring, dropped: int = 0) -> list[mx.array]:
    """The ring's columns in temporal order, as slices of `buffer` (B, H, S, D) to be joined."""
    return [buffer[..., start:stop, :] for start, stop in slot_ranges(ring, dropped)]


def temporal_view(array: mx.array, head: int, keep: int = 0) -> mx.array:
    """Put a wrapped ring's columns into temporal order.

    Args:
        array: (B, H, S, D), every slot written.
        head: the slot that the next token goes to, `keep <= head <= S`.
        keep: how many slots at the front hold sinks and stay there.

    Returns:
        An array (B, H, S, D): sinks first, then oldest to newest.

    Raises:
        ValueError: the head lies outside of the ring.
    """
    if array.ndim != 4:
        raise ValueError(f"temporal_view of an array of shape {array.shape}, but it must be (B, H, S, D)")
    size = array.shape[2]
    if not 0 <= keep <= head <= size:
        raise ValueError(f"head {head} with {keep} sinks does not lie in a ring of {size} slots")
    return join(temporal_columns(array, Ring(size, keep, size, head, True)) or [array])


def slot_columns(width: int, slot: int | None, keep: int = 0) -> mx.array:
    """The column that each slot of a fetch holds, (width,).

    `slot` is where a wrapped ring has just written its newest token; None says temporal order.

    >>> slot_columns(6, slot=2, keep=1).tolist()
    [0, 4, 5, 1, 2, 3]
    """
    if slot is None or slot == width - 1:
        return mx.arange(width)
    newest = width - (slot - keep + 1)
    ranges = [mx.arange(newest, width), mx.arange(keep, newest)]
    return mx.concatenate([mx.arange(keep), *ranges] if keep else ranges)
