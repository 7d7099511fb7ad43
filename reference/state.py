"""What a cache holds.

Beside every stored key stands the position of the token that it belongs to, or `NO_TOKEN` for a pad and for a slot that
a trim emptied. That table is the whole of the bookkeeping: what is visible is asked of it, never computed from
paddings.

    a batch of two rows, four slots                 keys[b, :, s] belongs to position positions[b, s]

    slot           0   1   2   3
    row a          0   1   2   3
    row b          .   .   0   1        two pads on the left
                                ^ head = 4: the next token goes here
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Positions = NDArray[np.int64]

NO_TOKEN = -1


@dataclass(frozen=True)
class Pending:
    """A ragged prefill between `prepare` and `finalize`."""

    columns: int | None
    """Announced columns still to come; None until the next update, when only right padding was announced."""
    lengths: tuple[int | None, ...]
    """Per row, how many of the columns to come are no right pads; None: all of them, nothing was announced for it."""
    promised: tuple[int | None, ...]
    """Per row, right padding announced without a length: the next update is all the row's columns. Else None."""
    right: tuple[int, ...]
    """Per row, the right pads that lie at its end now."""


@dataclass(frozen=True)
class Quantization:
    """How a quantized cache stores its columns."""

    group_size: int
    """Values that share a scale and a bias."""
    bits: int
    """Bits of a code."""
    dtype: str | None = None
    """Of the arrays fed, and of scales and biases; None before the first update."""


@dataclass(frozen=True)
class Cache:
    """The state of a cache of keys and values. B rows, S stored slots; a slot never written is not stored."""

    keys: Array | None
    """(B, H, S, D); None before the first update, from which on the head shapes and dtypes are known."""
    values: Array | None
    """(B, H, S, Dv)."""
    positions: Positions
    """(B, S): the position of the token in each slot, or NO_TOKEN."""
    tokens: tuple[int, ...]
    """Per row, how many tokens it has had: the position of its next token. Empty for a solo cache never updated."""
    due: tuple[int, ...]
    """Per row, the left pads that are announced and not yet fed."""
    batched: bool
    """Whether rows may differ in length."""
    max_size: int | None = None
    """Slots that a ring keeps; None for a growing cache."""
    keep: int = 0
    """Sinks: the first `keep` tokens are never evicted."""
    head: int = 0
    """The slot that the next token goes to."""
    wrapped: bool = False
    """The head has passed the last slot: slot order is not temporal order."""
    pending: Pending | None = None
    quantization: Quantization | None = None
    """Of a quantized cache, whose keys and values are stored columns: see `quantize.to_columns`."""
    chunk_size: int | None = None
    """Of a chunked cache: how many tokens `trim_front` leaves."""
    fed: int = 0
    """Of a solo cache: how many tokens its last update had; 0 once they were trimmed or the cache was restored."""

    @property
    def rows(self) -> int:
        """B."""
        return len(self.tokens)

    @property
    def slots(self) -> int:
        """S."""
        return int(self.positions.shape[1])


def solo(max_size: int | None = None, keep: int = 0) -> Cache:
    """A new `KVCache`, or with `max_size` a new `RotatingKVCache`.

    Raises ValueError where no window would be left.
    """
    if max_size is not None:
        _check_ring(max_size, keep)
    nothing = np.zeros((0, 0), np.int64)
    return Cache(None, None, nothing, (), (), batched=False, max_size=max_size, keep=keep)


def ring(max_size: int, keep: int = 0) -> Cache:
    """A new `RotatingKVCache`."""
    return solo(max_size, keep)


def batch(left_padding: Sequence[int], max_size: int | None = None, keep: int = 0) -> Cache:
    """A new `BatchKVCache`, or with `max_size` a new `BatchRotatingKVCache`.

    Row b's first `left_padding[b]` columns will be pads, so it starts at offset `-left_padding[b]`.
    """
    if max_size is not None:
        _check_ring(max_size, keep)
    if any(pads < 0 for pads in left_padding):
        raise ValueError(f"left_padding {list(left_padding)} has a negative number")
    return Cache(
        keys=None,
        values=None,
        positions=np.zeros((len(left_padding), 0), np.int64),
        tokens=(0,) * len(left_padding),
        due=tuple(left_padding),
        batched=True,
        max_size=max_size,
        keep=keep,
    )


def _check_ring(max_size: int, keep: int) -> None:
    if max_size < 1:
        raise ValueError(f"max_size is {max_size}, but a ring needs at least 1 slot")
    if not 0 <= keep < max_size:
        raise ValueError(f"keep is {keep}, but it must be in 0..{max_size - 1} (max_size is {max_size})")


def restored(cache: Cache) -> Cache:
    """The cache made of a state: what was fed last is not known, and a solo ring with its head at its end is in order.

    >>> from dataclasses import replace
    >>> full = replace(ring(4), positions=np.array([[4, 5, 6, 7]]), tokens=(8,), head=4, wrapped=True, fed=1)
    >>> restored(full).wrapped, restored(replace(full, head=2)).wrapped
    (False, True)
    """
    wrapped = cache.wrapped and (cache.batched or cache.head < cache.slots)
    return replace(cache, fed=0, wrapped=wrapped)


def right_pads(cache: Cache) -> tuple[int, ...]:
    """Per row, the right pads that lie at its end now."""
    return cache.pending.right if cache.pending else (0,) * cache.rows


def offsets(cache: Cache) -> tuple[int, ...]:
    """Per row, the position that its next column will get: what RoPE reads before an update."""
    right = right_pads(cache)
    return tuple(t + r - d for t, r, d in zip(cache.tokens, right, cache.due, strict=True))


def size(cache: Cache) -> int:
    """How many columns are held: what `size()` answers."""
    if cache.batched or cache.max_size is None:
        return cache.slots if cache.max_size is None else min(cache.slots, cache.max_size)
    return min(max(cache.tokens, default=0), cache.max_size)


def empty(cache: Cache) -> bool:
    """Whether no column is stored: what `empty()` answers."""
    return cache.slots == 0 or cache.rows == 0


def head_shapes(cache: Cache) -> tuple[int, int, int, str, str] | None:
    """(H, D, Dv, dtype of keys, dtype of values), or None before the first update."""
    if cache.keys is None or cache.values is None:
        return None
    _, heads, _, head_dim = cache.keys.shape
    return heads, head_dim, cache.values.shape[3], str(cache.keys.dtype), str(cache.values.dtype)


def kind(cache: Cache) -> str:
    """The name of the class whose state this is."""
    if cache.quantization is not None:
        return "QuantizedKVCache"
    if cache.chunk_size is not None:
        return "ChunkedKVCache"
    return ("Batch" if cache.batched else "") + ("KVCache" if cache.max_size is None else "RotatingKVCache")


def needed(cache: Cache, position: int, window: int | None) -> set[int]:
    """The earlier positions that a query at this one may see, with W = window."""
    if cache.chunk_size is not None:
        return set(range(position // cache.chunk_size * cache.chunk_size, position))
    first = 0 if window is None else max(0, position - window + 1)
    return {*range(first, position), *range(min(cache.keep, position))}


def check(cache: Cache) -> None:
    """Assert the invariants, one a line."""
    rows, slots = cache.positions.shape
    assert len(cache.tokens) == len(cache.due) == rows
    assert (cache.keys is None) == (cache.values is None)
    assert cache.keys is not None or slots == 0
    if cache.keys is not None and cache.values is not None:
        assert cache.keys.shape[0] == cache.values.shape[0] == rows
        assert cache.keys.shape[2] == cache.values.shape[2] == slots
    assert all(due >= 0 for due in cache.due)
    assert cache.batched or not any(cache.due), "a solo cache has no padding"
    assert cache.batched or cache.pending is None
    assert cache.head == slots or cache.wrapped
    if cache.wrapped:
        assert slots == cache.max_size and cache.keep <= cache.head <= slots
    for table, tokens in zip(cache.positions, cache.tokens, strict=True):
        held = [p for p in table.tolist() if p != NO_TOKEN]
        if cache.batched and slots:
            assert [p for p in table.tolist() if 0 <= p < cache.keep] == list(range(min(cache.keep, tokens)))
            assert all(p in (NO_TOKEN, s) for s, p in enumerate(table[: cache.keep])), "sinks lie in their own slots"
        assert len(held) == len(set(held)), "a token lies in one slot"
        assert all(0 <= p < tokens for p in held)
        window = None if cache.max_size is None else cache.max_size - cache.keep
        assert needed(cache, tokens, window) <= set(held), "all that the next query may see is held"
