"""How many of the newest tokens may go, and what is left of a ring when they do.

max_size = 4, head at slot 2, trim 1

before  [4 5 2 3]    head 2
after   [4 . 2 3]    head 1, the slot it leaves is a pad: the oldest column
"""

from collections.abc import Sequence

from .temporal_order import Ring


def growing_limit(offsets: Sequence[int]) -> int:
    """The trim limit of a cache that evicts nothing: its shortest row."""
    return max(0, min(offsets, default=0))


def ring_limit(offsets: Sequence[int], pads: Sequence[int], ring: Ring) -> int:
    """The trim limit of a ring.

    A row that has lost tokens must still hold the `max_size - keep - 1` behind its sinks that its next
    query sees. `pads` are the columns of each row that hold none of its tokens.
    """
    seen_next = ring.max_size - ring.keep - 1
    limits = []
    for offset, pad in zip(offsets, pads, strict=True):
        held = ring.stored - pad
        limits.append(offset if held >= offset else held - ring.keep - seen_next)
    return max(0, min(limits, default=0))


def ring_trim(ring: Ring, n: int) -> tuple[Ring, int, bool]:
    """Take back n tokens.

    Returns:
        The ring after it; how many pads each row gains at the front of temporal order; and whether the
        buffer has to be put in temporal order for it.

    >>> ring_trim(Ring(4, stored=4, head=2, wrapped=True), 1)
    (Ring(max_size=4, keep=0, stored=4, head=1, wrapped=True), 1, False)
    """
    if n == 0:
        return ring, 0, False
    if ring.wrapped and ring.head - ring.keep >= n:
        return ring._replace(head=ring.head - n), n, False
    return ring.in_order(ring.stored - n), 0, ring.wrapped
