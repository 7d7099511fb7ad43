"""Writing into a growing cache: the columns go to the end.

before   slot       0   1   2                 after N = 2      0   1   2   3   4
         position   0   1   2                                  0   1   2   3   4
"""

from __future__ import annotations

from reference.moving import same_for_all
from reference.state import Cache, Positions


def place(cache: Cache, count: int) -> tuple[Positions, int, bool]:
    """Where `count` new columns go: (sources, head, wrapped).

    Sources number the S stored slots first and the new columns after them, from S on:

    >>> from dataclasses import replace
    >>> from reference.state import batch
    >>> import numpy as np
    >>> two = replace(batch([0]), positions=np.array([[0, 1]]))
    >>> place(two, 2)
    (array([[0, 1, 2, 3]]), 4, False)
    """
    slots = list(range(cache.slots + count))
    return same_for_all(slots, cache.rows), len(slots), False
