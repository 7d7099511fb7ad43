"""Recurrent state: a few arrays a layer, which the model overwrites at each step.

To the cache a slot is an array with rows on its first axis, and nothing more. What it adds are the rows (they merge,
leave and fork as those of any batch) and a mask that says which of the next columns are tokens:

    prepare(lengths=[3, 1])           make_mask(3)        advance(3)

    row a   t   t   t                 x   x   x           all lengths are 0 now: until finalize
    row b   t   .   .                 x   .   .           further columns would be pads

`columns` is a batch that stores nothing: the left padding due and the announcements of the rows, under the same rules
as every other batch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from reference.extend import extend
from reference.filter import filter_rows, row_index
from reference.padding import announced, incoming, prepare
from reference.state import NO_TOKEN, Array, Cache, Pending, batch


@dataclass(frozen=True)
class Arrays:
    """The state of an `ArraysCache`."""

    slots: tuple[Array | None, ...]
    """Each (B, ...), or None while it was never written."""
    columns: Cache
    """What is due and pending in each row."""
    known: bool
    """Whether the number of rows is: a new cache takes any, and counts as one row until then."""


def arrays(size: int, left_padding: Sequence[int] | None = None) -> Arrays:
    """A new `ArraysCache(size, left_padding)`. Raises ValueError for less than no slots and for negative padding."""
    if size < 0:
        raise ValueError(f"size is {size}, but a number of slots is not negative")
    return Arrays((None,) * size, batch(left_padding or [0]), known=bool(left_padding))


def empty_arrays(cache: Arrays) -> bool:
    """Whether there is no row, or no slot was written."""
    return cache.columns.rows == 0 or all(slot is None for slot in cache.slots)


def store(cache: Arrays, slot: int, x: Array) -> Arrays:
    """The cache with x (B, ...) in a slot. Raises ValueError when another slot or the padding is for other rows."""
    others = [s for i, s in enumerate(cache.slots) if i != slot and s is not None]
    only_this = not others and not any(cache.columns.due) and cache.columns.pending is None
    free = not cache.known or (only_this and cache.slots[slot] is not None)
    if not free and x.shape[0] != cache.columns.rows:
        raise ValueError(f"slot {slot} of {x.shape[0]} rows, but the cache holds {cache.columns.rows}")
    columns = cache.columns if x.shape[0] == cache.columns.rows else batch([0] * x.shape[0])
    return Arrays((*cache.slots[:slot], x, *cache.slots[slot + 1 :]), columns, known=True)


def tokens_mask(cache: Arrays, count: int) -> NDArray[np.bool_]:
    """Which of the next `count` columns are tokens, (B, N). Raises ValueError for none, and for more than announced.

    >>> tokens_mask(arrays(1, left_padding=[0, 2]), 3).astype(int)
    array([[1, 1, 1],
           [0, 0, 1]])
    """
    if count < 1:
        raise ValueError(f"a mask for {count} tokens: it needs at least 1")
    mask: NDArray[np.bool_] = incoming(announced(cache.columns, count), count) != NO_TOKEN
    return mask


def advance(cache: Arrays, count: int) -> Arrays:
    """The cache after `count` columns. Raises ValueError for a negative count, and for more than announced."""
    if count < 0:
        raise ValueError(f"advance by {count} columns")
    columns = announced(cache.columns, count)
    pending = columns.pending
    if pending is not None and pending.columns is not None:
        lengths = tuple(None if length is None else max(0, length - count) for length in pending.lengths)
        pending = Pending(pending.columns - count, lengths, pending.promised, pending.right)
    return replace(
        cache,
        columns=replace(columns, due=tuple(max(0, due - count) for due in columns.due), pending=pending),
    )


def prepare_arrays(
    cache: Arrays,
    left_padding: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    right_padding: Sequence[int] | None = None,
) -> Arrays:
    """Announce a ragged prefill, as `padding.prepare` does.

    Raises ValueError as that does; for left padding where a slot is filled; and for right padding without lengths,
    since a recurrent layer reads the lengths before it knows how many columns come.

    >>> prepare_arrays(arrays(2), lengths=[3, 1]).columns.rows         # a new cache takes any number of rows
    2
    """
    told = next((len(numbers) for numbers in (left_padding, lengths, right_padding) if numbers), None)
    if not cache.known and told is not None:
        cache = replace(cache, columns=batch([0] * told))
    if left_padding is not None and any(slot is not None for slot in cache.slots) and cache.columns.rows:
        raise ValueError(f"left_padding {list(left_padding)} on a cache whose state was written already")
    if lengths is None and any(right_padding or ()):
        raise ValueError(f"right_padding {list(right_padding or ())} without lengths")
    return replace(cache, columns=prepare(cache.columns, left_padding, lengths, right_padding), known=True)


def finalize_arrays(cache: Arrays) -> Arrays:
    """End the ragged prefill."""
    return replace(cache, columns=replace(cache.columns, pending=None))


def filter_arrays(cache: Arrays, rows: Sequence[int]) -> Arrays:
    """The batch of these rows. Raises IndexError for a row that is not there.

    >>> cache = store(arrays(2), 0, np.array([[7], [8], [9]]))
    >>> filter_arrays(cache, [2, 0]).slots
    (array([[9],
           [7]]), None)
    """
    chosen = [row_index(cache.columns, row, f"filter rows {list(rows)}") for row in rows]
    slots = tuple(None if slot is None else slot[chosen] for slot in cache.slots)
    return Arrays(slots, filter_rows(cache.columns, rows), known=True)


def extend_arrays(cache: Arrays, other: Arrays) -> Arrays:
    """The batch of the rows of both; where one side's slot was never written, its rows are zeros.

    Raises ValueError for another number of slots, and for slots of another shape or dtype.

    >>> extend_arrays(store(arrays(1), 0, np.array([[7], [8]])), arrays(1)).slots
    (array([[7],
           [8],
           [0]]),)
    """
    if len(cache.slots) != len(other.slots):
        raise ValueError(f"extend a cache of {len(cache.slots)} slots by one of {len(other.slots)}")
    pairs = zip(cache.slots, other.slots, strict=True)
    slots = tuple(_joined([a, b], [cache.columns.rows, other.columns.rows], "extend") for a, b in pairs)
    return Arrays(slots, extend(cache.columns, other.columns), known=True)


def extract_array_row(cache: Arrays, row: int) -> Arrays:
    """The row as a cache of its own, with nothing due or pending. Raises IndexError for a row that is not there."""
    b = row_index(cache.columns, row, f"extract row {row}")
    slots = tuple(None if slot is None else slot[b : b + 1] for slot in cache.slots)
    return Arrays(slots, batch([0]), known=any(slot is not None for slot in slots))


def merge_arrays(caches: Sequence[Arrays]) -> Arrays:
    """The batch whose row b is `caches[b]`.

    Raises ValueError for no caches, for one of several rows, and as `extend_arrays` does.
    """
    if not caches:
        raise ValueError("merge needs at least one cache, but got none")
    for i, cache in enumerate(caches):
        if cache.columns.rows != 1:
            raise ValueError(f"merge: cache {i} holds {cache.columns.rows} rows, but a row is one sequence")
        if len(cache.slots) != len(caches[0].slots):
            raise ValueError(f"merge: cache {i} has {len(cache.slots)} slots, but cache 0 has {len(caches[0].slots)}")
    rows = [1] * len(caches)
    slots = [_joined([c.slots[i] for c in caches], rows, "merge") for i in range(len(caches[0].slots))]
    columns = caches[0].columns
    for cache in caches[1:]:
        columns = extend(columns, cache.columns)
    return Arrays(tuple(slots), columns, known=True)


def _joined(parts: Sequence[Array | None], rows: Sequence[int], call: str) -> Array | None:
    filled = [part for part in parts if part is not None]
    if not filled:
        return None
    shapes = {(part.shape[1:], str(part.dtype)) for part in filled}
    if len(shapes) > 1:
        raise ValueError(f"{call}: slots of {sorted(map(str, shapes))} do not go together")
    like = filled[0]
    blocks = [
        part if part is not None else np.zeros((n, *like.shape[1:]), like.dtype)
        for part, n in zip(parts, rows, strict=True)
    ]
    return np.concatenate(blocks)
