"""Rows of different lengths in a ring."""

from collections.abc import Sequence

import mlx.core as mx

from .append import concat, join
from .batch_cache import BatchCache
from .checks import check_mask, check_ring, check_rows, check_solo, check_update, common_heads, whole
from .extend import no_columns
from .extract import extract_row
from .masks import Mask, batch_mask
from .merge import merge_rows, pad_front
from .ring_update import ring_update, ring_write
from .rotating_kv_cache import RotatingKVCache
from .row_numbers import Ints
from .saved_columns import hide_pads
from .states import (
    PENDING,
    check_ring_rows,
    pending_elements,
    pending_of,
    state_buffers,
    state_elements,
    state_flag,
    state_int,
    state_ints,
)
from .temporal_order import Ring, temporal_columns
from .trim import ring_can_trim, ring_limit, ring_trim


class BatchRotatingKVCache(BatchCache):
    """A ring of left-padded rows, without sinks: each query sees the newest `max_size` tokens of its row.

    Args:
        max_size: how many slots the ring has, at least 1.
        left_padding: how many pads come before each row's first token, one number a row.

    Raises:
        ValueError: max_size is below 1, or left_padding is not a list of whole numbers, none negative.
    """

    def __init__(self, max_size: int, left_padding: Sequence[int] | mx.array) -> None:
        max_size, _ = check_ring(max_size, 0)
        self._begin(left_padding)
        self._ring = Ring(max_size)

    @property
    def max_size(self) -> int:
        """How many slots the ring has."""
        return self._ring.max_size

    @property
    def keep(self) -> int:
        """How many sinks stay at the front: batches have none."""
        return 0

    def _columns(self) -> int:
        return self._ring.stored

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write N columns to every row and return those that are live.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).

        Returns:
            keys (B, H, T, D) and values (B, H, T, Dv): in temporal order after several tokens, while
            padding is pending and before the ring has wrapped, else in slot order. T is at most
            max_size + N - 1.

        Raises:
            ValueError: the arrays fit neither each other nor the cache; N is 0, or more than prepare()
                announced.
        """
        n = check_update(keys, values, self.keys, self.values, self._rows())
        ring, pads, offsets, pending = self._ring, self._pads, self._offsets, self._pending
        tails: Ints = ()
        write = ring_write(ring, n, pending is not None)
        if pending is not None:
            # A right pad that stayed behind its row would let the next chunk evict a token in its place.
            tails = pending.tails
            pending, fed = pending.update(n, self._due())
            pending = pending._replace(tails=fed)
            pads = tuple(p + t for p, t in zip(pads, tails, strict=True))
            offsets = tuple(o - t for o, t in zip(offsets, tails, strict=True))
        new_keys = ring_update(self.keys, keys, ring, write, self.step, tails)
        new_values = ring_update(self.values, values, ring, write, self.step, tails)
        self.keys, self.values = new_keys, new_values
        self._ring = write.after
        self._pads = tuple(max(0, p - write.evicted) for p in pads)
        self._offsets = tuple(o + n for o in offsets)
        self._pending = pending
        return self.keys_and_values()

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """The mask of the next fetch of T columns, made before the update of N tokens.

        Returns:
            None, "causal", or booleans (B, 1, N, T), always booleans with `return_array`; in slot order
            where the fetch is.

        Raises:
            ValueError: N or window_size is below 1, or N is more than prepare() announced.
        """
        N, window_size = check_mask(N, window_size)
        self._check_announced(N)
        write = ring_write(self._ring, N, self._pending is not None)
        pads = [max(0, p + t - write.evicted) for p, t in zip(self._pads, self._tails(), strict=True)]
        window = self.max_size if window_size is None else min(self.max_size, window_size)
        return batch_mask(pads, N, write.after.stored, window, return_array, slot=write.slot)

    def size(self) -> int:
        """How many columns are stored, at most max_size."""
        return min(self._ring.stored, self.max_size)

    def trim_limit(self) -> int:
        if self._pending is not None:
            return 0
        return ring_limit(self._offsets, self._pads, self._ring)

    def can_trim(self, n: int) -> bool:
        n = whole("the number of tokens to trim", n)
        if n == 0 or self._pending is not None or not self._rows():
            return n == 0
        return n > 0 and ring_can_trim(n, self._offsets, self._pads, self._ring)

    def _trim(self, n: int) -> None:
        after, pads, reorder = ring_trim(self._ring, n)
        buffers = self._buffers()
        if reorder and buffers is not None:
            self.keys, self.values = (join(temporal_columns(b, self._ring)) for b in buffers)
        self._ring = after
        # A row that lost all its tokens has nothing but pads in front of what is left, and none due.
        self._pads = tuple(min(p + pads, after.stored) for p in self._pads)
        self._offsets = tuple(o - n for o in self._offsets)

    def _useless_columns(self, pads: Ints) -> int:
        return 0

    def _drop_front(self, n: int) -> None:
        if n:
            self._ring = Ring(self.max_size)

    def extend(self, other: "BatchRotatingKVCache") -> None:
        """Append the other batch's rows; it stays as it is.

        Raises:
            ValueError: the other is no BatchRotatingKVCache, or differs in max_size, heads, head size or
                dtype.
        """
        if not isinstance(other, BatchRotatingKVCache):
            raise ValueError(f"extend a BatchRotatingKVCache by a {type(other).__name__}")
        if other.max_size != self.max_size:
            raise ValueError(f"extend a ring of max_size {self.max_size} by one of {other.max_size}")
        common_heads("extend", (self._heads(), other._heads()))
        mine, theirs = self._ring, other._ring
        if mine.wrapped and theirs.wrapped and mine.head == theirs.head:
            after = mine
            columns = [None if c.keys is None else c.keys_and_values() for c in (self, other)]
        else:
            after = mine.in_order(max(mine.stored, theirs.stored))
            columns = [_ordered(c) for c in (self, other)]
        self._append_rows(other, *columns)
        self._ring = after

    def extract(self, idx: int) -> RotatingKVCache:
        """One row as a solo ring in memory of its own; right pads and left pads due stay behind.

        Raises:
            IndexError: the row is not there.
        """
        (row,) = check_rows("extract", [idx], self._rows())
        tail = self._tails()[row]
        stop = self._ring.stored - tail
        offset = max(0, self._offsets[row] - tail)
        held = max(0, stop - self._pads[row])
        width = max(held, min(offset, self.max_size))
        cache = RotatingKVCache(self.max_size)
        buffers = self._buffers()
        if buffers is not None:
            missing = max(0, width - stop)
            cache.keys, cache.values = (
                pad_front(
                    extract_row(temporal_columns(b, self._ring), row, stop - width + missing, stop),
                    missing,
                )
                for b in buffers
            )
            cache.offset = offset
            cache._ring = self._ring.in_order(width)
            cache._pads = width - held
        return cache

    @classmethod
    def merge(cls, caches: Sequence[RotatingKVCache]) -> "BatchRotatingKVCache":
        """The batch of these solo rings: the newest max_size columns of each, right-aligned.

        Args:
            caches: at least one; each of one row, of any length, or empty.

        Raises:
            ValueError: no caches, another kind, a cache of several rows; max_size or heads that differ;
                a cache with sinks, which a batch cannot keep.
        """
        caches = check_solo(caches, RotatingKVCache)
        sizes = sorted({c.max_size for c in caches})
        if len(sizes) > 1:
            raise ValueError(f"merge of rings of max_size {sizes}, but a batch has one")
        kept = [c.keep for c in caches if c.keep]
        if kept:
            raise ValueError(f"merge of a ring with keep {kept[0]}, but batches have no sinks")
        heads = common_heads("merge", (c._heads() for c in caches))
        width = max(c.size() for c in caches)
        batch = cls(sizes[0], [width - min(c._ring.stored - c._pads, c.size()) for c in caches])
        if heads is not None:
            merged = merge_rows([_ordered(c, c.size()) or no_columns(1, heads) for c in caches], width)
            batch.keys, batch.values = merged.keys, merged.values
            batch._ring = batch._ring.in_order(width)
            batch._offsets = tuple(c.offset for c in caches)
        return batch

    @property
    def state(self) -> tuple[object, ...]:
        """(keys, values, offset, left_padding, max_size, columns stored, head, wrapped): mlx-lm's layout.

        The arrays are cut to the columns stored, in slot order. While right padding is pending four more
        elements follow, as in `BatchKVCache.state`.
        """
        ring = self._ring
        state = (
            *self._stored_arrays(),
            self.offset,
            self.left_padding,
            ring.max_size,
            ring.stored,
            ring.head,
            ring.wrapped,
        )
        return *state, *pending_elements(self._pending)

    @state.setter
    def state(self, state: object) -> None:
        kind = "BatchRotatingKVCache"
        layout = "keys, values, offset, left_padding, max_size, columns stored, head, wrapped"
        elements = state_elements(kind, state, layout, PENDING)
        offsets = state_ints(kind, "offset", elements[2])
        rows = len(offsets)
        # mlx-lm goes on counting pads down once they are evicted.
        pads = tuple(max(0, p) for p in state_ints(kind, "left_padding", elements[3], rows))
        keys, values, width = state_buffers(kind, elements[0], elements[1], rows)
        max_size = state_int(kind, "max_size", elements[4], 1)
        state_int(kind, "columns stored", elements[5], 0)  # mlx-lm counts evicted ones too
        head = state_int(kind, "head", elements[6], 0, width)
        wrapped = state_flag(kind, "wrapped", elements[7])
        if wrapped and width != max_size:
            raise ValueError(f"{kind} state: a wrapped ring has {max_size} columns, not {width}")
        ring = Ring(max_size, 0, width if wrapped else head, head, wrapped)
        pending = pending_of(kind, elements[8:], ring.stored, pads)
        tails = (0,) * rows if pending is None else pending.tails
        check_ring_rows(kind, offsets, pads, tails, ring.stored, 0, max_size)
        self.keys, self.values, self._ring = keys, values, ring
        self._set_rows(pads, offsets, pending)

    def _saved_state(self) -> tuple[object, ...]:
        keys, values, *numbers = self.state
        return *(hide_pads(b, self._ring, self._pads, self._tails()) for b in (keys, values)), *numbers

    def __repr__(self) -> str:
        return (
            f"BatchRotatingKVCache(max_size={self.max_size}, columns={self._ring.stored}, offset={list(self._offsets)})"
        )


def _ordered(
    cache: RotatingKVCache | BatchRotatingKVCache, newest: int | None = None
) -> tuple[mx.array, mx.array] | None:
    """The newest columns of a ring, or all, in temporal order; None if it has seen no update."""
    buffers = cache._buffers()
    if buffers is None:
        return None
    ring = cache._ring
    dropped = 0 if newest is None else max(0, ring.stored - newest)
    keys, values = (concat(temporal_columns(b, ring, dropped) or [b[..., :0, :]]) for b in buffers)
    return keys, values
