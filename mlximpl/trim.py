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
    """The largest n such that every row of a ring can drop any number of tokens up to it."""
    limits = []
    for offset, pad in zip(offsets, pads, strict=True):
        limit = _evicted_limit(offset, pad, ring)
        # Down to the sinks is always lawful, so a limit that reaches as far is none.
        limits.append(offset if limit + 1 >= offset - ring.keep else limit)
    return max(0, min(limits, default=0))


def ring_can_trim(n: int, offsets: Sequence[int], pads: Sequence[int], ring: Ring) -> bool:
    """Whether every row of a ring can drop n tokens: up to the limit, or down to its sinks, which are always held."""
    return all(
        n <= _evicted_limit(offset, pad, ring) or 0 <= offset - n <= ring.keep
        for offset, pad in zip(offsets, pads, strict=True)
    )


def _evicted_limit(offset: int, pad: int, ring: Ring) -> int:
    """How far a row can go back and still hold the `max_size - keep - 1` behind its sinks that its next query sees.

    `pad` is how many columns hold none of its tokens.
    """
    held, seen_next = ring.stored - pad, ring.max_size - ring.keep - 1
    if held >= offset or not seen_next:
        return offset
    return held - ring.keep - seen_next


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
    return ring.in_order(max(ring.keep, ring.stored - n)), 0, ring.wrapped
