"""Writing into a ring: what one update does to the slots, and then to the arrays.

Several tokens go behind the others, in temporal order, and at most max_size - 1 older columns stay:

    max_size = 4    [4 1 2 3]  +  5 6   ->   [2 3 4 5 6]

One token goes to the head:

    max_size = 4    [2 3 4 5 6]  +  7   ->   [7 4 5 6]      cut to four, then the oldest overwritten
"""

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .append import concat, join, overwrite, spare_columns
from .padding import pads_to_the_front
from .row_copies import copy_rows
from .temporal_order import Ring, temporal_columns


class RingWrite(NamedTuple):
    """What an update does to a ring.

    `dropped` columns behind the sinks are cut first. `slot` is where a single token then goes, and None
    says that the new columns follow in temporal order. `evicted` counts the columns lost, overwritten ones
    included. `after` is the ring once it is done.
    """

    dropped: int
    slot: int | None
    evicted: int
    after: Ring


@lru_cache(maxsize=64)
def ring_write(ring: Ring, n: int, in_order: bool = False) -> RingWrite:
    """Plan an update of n tokens; `in_order` treats one token as several are. The layers of a step ask alike.

    >>> ring_write(Ring(4, stored=5, head=5), 1)  # doctest: +NORMALIZE_WHITESPACE
    RingWrite(dropped=1, slot=0, evicted=2,
              after=Ring(max_size=4, keep=0, stored=4, head=1, wrapped=True))
    """
    max_size, keep, stored, head, wrapped = ring
    if n > 1 or in_order:
        dropped = max(0, stored - (max_size - 1))
        return RingWrite(dropped, None, dropped, ring.in_order(stored - dropped + n))
    dropped = max(0, stored - max_size)
    stored -= dropped
    if not wrapped:
        head = stored
    if head == max_size:
        head, wrapped = keep, True
    if wrapped:
        return RingWrite(dropped, head, dropped + 1, Ring(max_size, keep, stored, head + 1, True))
    return RingWrite(dropped, head, dropped, ring.in_order(stored + 1))


def ring_update(
    buffer: mx.array | None,
    columns: mx.array,
    ring: Ring,
    write: RingWrite,
    step: int,
    tails: tuple[int, ...] = (),
) -> mx.array:
    """Carry out a planned update and return the new buffer.

    Args:
        buffer: (B, H, S, D) with S >= ring.stored, or more rows; or None.
        columns: (B, H, N, D).
        ring: the ring before the update.
        write: `ring_write` of that ring.
        step: how many columns a ring that is not full yet grows by.
        tails: how many right pads of each row go to its front first; none if empty.
    """
    if buffer is None or ring.stored == 0:
        return _first_columns(columns, write, step)
    if write.slot is not None and write.slot < buffer.shape[2] <= ring.max_size:
        return overwrite(buffer, columns, write.slot)
    buffer = buffer[: columns.shape[0]]
    if write.slot is None:
        if any(tails):
            plan = pads_to_the_front(tails, ring.keep, ring.stored)
            ordered = copy_rows([concat(temporal_columns(buffer, ring))], plan, ring.stored)
            before = temporal_columns(ordered, ring.in_order(ring.stored), write.dropped)
        else:
            before = temporal_columns(buffer, ring, write.dropped)
        return join([*before, columns])
    if buffer.shape[2] > ring.max_size:
        # Single tokens never need more than max_size slots: give the rest back.
        buffer = join(temporal_columns(buffer, ring, write.dropped))
    if write.slot < buffer.shape[2]:
        return overwrite(buffer, columns, write.slot)
    spare = min(step, ring.max_size - write.slot) - 1
    return join([buffer[..., : write.slot, :], columns, *spare_columns(columns, spare)])


def _first_columns(columns: mx.array, write: RingWrite, step: int) -> mx.array:
    spare = 0 if write.slot is None else min(step, write.after.max_size) - 1
    return join([columns, *spare_columns(columns, spare)])
