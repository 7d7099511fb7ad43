"""Writing into a ring.

One token overwrites the oldest column behind the sinks, in place:

    max_size = 4                slot       0   1   2   3
    before                      position   4   5   2   3      head = 2, wrapped
    after one token             position   4   5   6   3      head = 3, the fetch is in slot order

Several tokens need the window of the first of them, so the ring is unrolled to temporal order and grows past max_size:

    after two tokens            position   3   4   5   6   7  the oldest max_size - 1 = 3 columns stay, not wrapped

The next single token cuts it back to its newest max_size columns and begins to wrap.
"""

from __future__ import annotations

from reference.moving import per_row, same_for_all
from reference.state import Cache, Positions, right_pads
from reference.temporal_order import right_pads_first, temporal_slots


def place(cache: Cache, count: int) -> tuple[Positions, int, bool]:
    """Where `count` new columns go: (sources, head, wrapped).

    Sources number the S stored slots first and the new columns after them, from S on.
    """
    if count == 1 and cache.pending is None:
        return _place_one(cache)
    return _place_several(cache, count)


def _place_one(cache: Cache) -> tuple[Positions, int, bool]:
    """The example of the picture above (the new column is source 4):

    >>> from dataclasses import replace
    >>> from reference.state import ring
    >>> import numpy as np
    >>> full = replace(ring(4), positions=np.array([[4, 5, 2, 3]]), tokens=(6,), head=2, wrapped=True)
    >>> place(full, 1)
    (array([[0, 1, 4, 3]]), 3, True)
    """
    size = _max_size(cache)
    slots, head, wrapped = list(range(cache.slots)), cache.head, cache.wrapped
    if not wrapped and len(slots) > size:
        slots = newest(slots, size, cache.keep)
        head = size
    if head == size:
        head, wrapped = cache.keep, True
    # Before wrapping the head stands behind the last slot, and this appends.
    slots[head : head + 1] = [cache.slots]
    return same_for_all(slots, cache.rows), head + 1, wrapped


def _place_several(cache: Cache, count: int) -> tuple[Positions, int, bool]:
    """The same ring, two tokens (sources 4 and 5):

    >>> from dataclasses import replace
    >>> from reference.state import ring
    >>> import numpy as np
    >>> full = replace(ring(4), positions=np.array([[4, 5, 2, 3]]), tokens=(6,), due=(0,), head=2, wrapped=True)
    >>> place(full, 2)
    (array([[3, 0, 1, 4, 5]]), 5, False)
    """
    order = temporal_slots(cache)
    new = list(range(cache.slots, cache.slots + count))
    kept = min(cache.slots, _max_size(cache) - 1)
    table = []
    for right in right_pads(cache):
        old = newest(right_pads_first(order, right, cache.keep), kept, cache.keep)
        table.append(old + new)
    return per_row(table, kept + count), kept + count, False


def newest(slots: list[int], count: int, keep: int) -> list[int]:
    """At most `count` of the slots: the sinks in front, and the newest behind them.

    >>> newest([0, 1, 2, 3, 4, 5], 4, keep=1)
    [0, 3, 4, 5]
    >>> newest([0, 1], 4, keep=1)
    [0, 1]
    """
    excess = max(0, len(slots) - count)
    return slots[:keep] + slots[keep + excess :]


def _max_size(cache: Cache) -> int:
    assert cache.max_size is not None
    return cache.max_size
