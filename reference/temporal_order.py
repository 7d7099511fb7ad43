"""Temporal order: slots, oldest to newest.

max_size = 6, keep = 2, wrapped              0 and 1 are sinks, the head points at the oldest of the others

slot        0   1   2   3   4   5
position    0   1   8   9   6   7
                            ^ head = 4
oldest to newest: slots 0 1 | 4 5 | 2 3
"""

from __future__ import annotations

from reference.state import Cache


def temporal_slots(cache: Cache) -> list[int]:
    """The stored slots, sinks first, then oldest to newest.

    >>> from dataclasses import replace
    >>> from reference.state import ring
    >>> import numpy as np
    >>> full = replace(ring(6, keep=2), positions=np.zeros((1, 6)), head=4, wrapped=True)
    >>> temporal_slots(full)
    [0, 1, 4, 5, 2, 3]
    """
    if not cache.wrapped:
        return list(range(cache.slots))
    sinks = range(cache.keep)
    older = range(cache.head, cache.slots)
    newer = range(cache.keep, cache.head)
    return [*sinks, *older, *newer]


def right_pads_first(slots: list[int], right: int, keep: int = 0) -> list[int]:
    """A row's slots with its last `right` ones, which are right pads, moved to the front, behind the sinks.

    >>> right_pads_first([0, 1, 2, 3, 4], right=2)
    [3, 4, 0, 1, 2]
    >>> right_pads_first([0, 1, 2, 3, 4], right=2, keep=1)
    [0, 3, 4, 1, 2]
    """
    end = len(slots) - right
    return slots[:keep] + slots[end:] + slots[keep:end]
