"""Ragged prefills: rows of different lengths fed at once.

Between `prepare` and `finalize` the pads of the shorter rows lie at their right; `finalize` moves them to the left, so
that every row ends in the same column and can decode:

    prepare(lengths=[4, 2], right_padding=[0, 2]), then 4 columns           finalize

    row a   0   1   2   3                                                   0   1   2   3
    row b   0   1   .   .                                                   .   .   0   1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reference.moving import move, move_positions, per_row
from reference.state import NO_TOKEN, Cache, Pending, Positions, kind
from reference.temporal_order import right_pads_first, temporal_slots


def incoming(cache: Cache, count: int) -> Positions:
    """The positions (B, N) that the next `count` columns get: left pads due, then tokens, then right pads.

    >>> from reference.state import batch
    >>> incoming(batch([0, 2]), 3)
    array([[ 0,  1,  2],
           [-1, -1,  0]])
    """
    table = np.full((cache.rows, count), NO_TOKEN, np.int64)
    for b in range(cache.rows):
        first = min(cache.due[b], count)
        length = cache.pending.lengths[b] if cache.pending else None
        end = count if length is None else min(length, count)
        table[b, first:end] = cache.tokens[b] + np.arange(end - first)
    return table


def announced(cache: Cache, count: int) -> Cache:
    """The cache with an announcement of right padding alone settled: the next `count` columns are the whole prefill.

    Raises ValueError when more columns come than were announced.
    """
    pending = cache.pending
    if pending is None:
        return cache
    if pending.columns is not None and count > pending.columns:
        raise ValueError(f"{count} columns, but prepare announced only {pending.columns} more: finalize first")
    lengths = list(pending.lengths)
    for b, padding in enumerate(pending.promised):
        if padding is None:
            continue
        lengths[b] = count - padding
        if count - padding < cache.due[b]:
            raise ValueError(
                f"{count} columns, but row {b} was announced right_padding {padding} without a length, "
                f"and {cache.due[b]} left pads are due"
            )
    columns = count if pending.columns is None else pending.columns
    return replace(cache, pending=Pending(columns, tuple(lengths), (None,) * cache.rows, pending.right))


def prepare(
    cache: Cache,
    left_padding: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    right_padding: Sequence[int] | None = None,
) -> Cache:
    """Begin a ragged prefill. `lengths[b] + right_padding[b]` columns are announced, the same number for every row.

    Raises ValueError for a second one before `finalize`, for numbers that are negative, too many or too few or
    disagree, and for left padding on a cache with columns or tokens (a ring of one slot may have lost its only column).

    >>> from reference.state import batch
    >>> prepare(batch([0, 0]), lengths=[4, 2]).pending
    Pending(columns=4, lengths=(4, 2), promised=(None, None), right=(0, 0))
    """
    if cache.pending is not None:
        raise ValueError("prepare, but an earlier prepare is still pending: finalize first")
    for name, numbers in (
        ("left_padding", left_padding),
        ("lengths", lengths),
        ("right_padding", right_padding),
    ):
        if numbers is not None and len(numbers) != cache.rows:
            raise ValueError(f"{name} {list(numbers)} for a {kind(cache)} of {cache.rows} rows")
        if numbers is not None and any(number < 0 for number in numbers):
            raise ValueError(f"{name} {list(numbers)} has a negative number")
    due = cache.due
    if left_padding is not None:
        if (cache.slots and cache.rows) or any(cache.tokens):
            raise ValueError(f"left_padding {list(left_padding)}, but the cache holds {cache.slots} columns")
        due = tuple(before + more for before, more in zip(due, left_padding, strict=True))
    return replace(cache, due=due, pending=_announce(due, lengths, right_padding))


def _announce(
    due: tuple[int, ...], lengths: Sequence[int] | None, right_padding: Sequence[int] | None
) -> Pending | None:
    none = (0,) * len(due)
    if lengths is None:
        if right_padding is None or not any(right_padding):
            return None
        return Pending(None, none, tuple(right_padding), none)
    columns = max(lengths, default=0)
    if right_padding is not None:
        totals = {length + pads for length, pads in zip(lengths, right_padding, strict=True)}
        if len(totals) > 1:
            raise ValueError(
                f"lengths {list(lengths)} and right_padding {list(right_padding)} do not add up to one width"
            )
        columns = max(totals, default=0)
    if any(length < left for length, left in zip(lengths, due, strict=True)):
        raise ValueError(f"lengths {list(lengths)} are shorter than the left padding due {list(due)}")
    if all(length == columns for length in lengths):
        return None
    return Pending(columns, tuple(lengths), (None,) * len(due), none)


def finalize(cache: Cache) -> Cache:
    """End the ragged prefill: every row's right pads move to its front.

    >>> from reference.state import batch
    >>> from reference.update import update
    >>> cache = prepare(batch([0, 0]), lengths=[3, 1])
    >>> tokens = np.arange(6).reshape(2, 1, 3, 1)
    >>> finalize(update(cache, tokens, tokens)).positions
    array([[ 0,  1,  2],
           [-1, -1,  0]])
    """
    pending = cache.pending
    if pending is None or not any(pending.right):
        return replace(cache, pending=None)
    assert cache.keys is not None and cache.values is not None
    order = temporal_slots(cache)
    sources = per_row([right_pads_first(order, right, cache.keep) for right in pending.right], cache.slots)
    return replace(
        cache,
        keys=move(cache.keys, sources),
        values=move(cache.values, sources),
        positions=move_positions(cache.positions, sources),
        pending=None,
    )
