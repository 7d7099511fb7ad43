"""Rows of different lengths in a ring."""

from collections.abc import Sequence

import mlx.core as mx

from .append import join, rounded
from .batch_cache import BatchCache
from .batch_sinks import sink_slots, with_sinks
from .checks import check_heads, check_mask, check_ring, check_rows, check_solo, check_update, whole
from .device import on_cuda
from .extract import extract_row
from .masks import Mask, batch_mask, sinks_mask
from .merge import merge_sources
from .ring_update import ring_update, ring_write
from .rotating_kv_cache import RotatingKVCache
from .row_numbers import Ints, advanced
from .row_plan import Move, moved_alike
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
from .temporal_order import Ring, ordered_moves, row_moves, temporal_columns
from .trim import ring_can_trim, ring_limit, ring_trim


class BatchRotatingKVCache(BatchCache):
    """A ring of left-padded rows: each query sees the newest `max_size - keep` tokens of its row, and its first `keep`.

    Sinks have slots of their own, the first `keep`; the columns that they came in are pads.

    Args:
        max_size: how many slots the ring has, at least 1.
        left_padding: how many pads come before each row's first token, one number a row.
        keep: how many tokens at the start of each row stay, below max_size.

    Raises:
        ValueError: max_size or keep is out of range, or left_padding is not a list of whole numbers, none negative.
    """

    def __init__(self, max_size: int, left_padding: Sequence[int] | mx.array, keep: int = 0) -> None:
        ring = Ring(*check_ring(max_size, keep))
        self._begin(left_padding)
        self._ring = ring

    @property
    def max_size(self) -> int:
        """How many slots the ring has."""
        return self._ring.max_size

    @property
    def keep(self) -> int:
        """How many sinks of each row stay at the front."""
        return self._ring.keep

    def _columns(self) -> int:
        return self._ring.stored

    def _sinks(self) -> int:
        return self._ring.keep

    def _with_sink_slots(self) -> tuple[Ring, Ints]:
        """The ring and the pads of a batch that holds no column yet, with slots for its sinks."""
        keep = self._ring.keep
        return self._ring.in_order(keep), tuple(p + keep for p in self._pads)

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
        n = check_update(keys, values, self._keys, self._values, self._rows())
        ring, pads, offsets, pending = self._ring, self._pads, self._offsets, self._pending
        held = self._keys, self._values
        if ring.keep and not ring.stored:
            ring, pads = self._with_sink_slots()
            held = sink_slots(keys, ring.keep), sink_slots(values, ring.keep)
        tails: Ints = ()
        fed: Ints = ()
        write = ring_write(ring, n, pending is not None)
        if pending is not None:
            # A right pad that stayed behind its row would let the next chunk evict a token in its place.
            tails = pending.tails
            pending, fed = pending.update(n, self._due())
            pending = pending._replace(tails=fed)
            pads = tuple(p + t for p, t in zip(pads, tails, strict=True))
            offsets = tuple(o - t for o, t in zip(offsets, tails, strict=True))
        new_keys = ring_update(held[0], keys, ring, write, self.step, tails)
        new_values = ring_update(held[1], values, ring, write, self.step, tails)
        if ring.keep and any(o < ring.keep for o in offsets):
            counts = [n - f for f in fed] or [n] * len(offsets)
            new_keys = with_sinks(new_keys, keys, ring.keep, offsets, counts)
            new_values = with_sinks(new_values, values, ring.keep, offsets, counts)
        self._keys, self._values = new_keys, new_values
        self._ring = write.after
        if write.evicted and any(pads):
            pads = tuple(max(0, p - write.evicted) for p in pads)
        self._pads = pads
        self._offsets = advanced(offsets, n)
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
        ring, before, tails = self._ring, self._pads, self._tails()
        if ring.keep and not ring.stored:
            ring, before = self._with_sink_slots()
        write = ring_write(ring, N, self._pending is not None)
        pads = [max(0, p + t - write.evicted) for p, t in zip(before, tails, strict=True)]
        widest = ring.max_size - ring.keep
        window = widest if window_size is None else min(widest, window_size)
        if not ring.keep:
            return batch_mask(pads, N, write.after.stored, window, return_array, slot=write.slot)
        firsts = [o - t for o, t in zip(self._offsets, tails, strict=True)]
        width = write.after.stored
        return sinks_mask(pads, firsts, N, width, window, return_array, keep=ring.keep, slot=write.slot)

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
        self._offsets = tuple(o - n for o in self._offsets)
        keep = after.keep
        if after.stored == keep and not any(self._offsets):
            after = after.in_order(0)
        self._ring = after
        # A row with sinks alone has nothing but pads behind them, and as many more as there are sinks to come.
        self._pads = tuple(
            after.stored - o if o <= keep else min(p + pads, after.stored - keep)
            for p, o in zip(self._pads, self._offsets, strict=True)
        )

    def _useless_columns(self, pads: Ints) -> int:
        return 0

    def _width_for(self, columns: int) -> int:
        return max(columns, min(rounded(columns, self.step), self.max_size))

    def _first_columns(self) -> Ints:
        return (0,) * self._rows()

    def _may_have_spare_rows(self, pads: Sequence[int]) -> bool:
        # A ring's pads are evicted in time, and no mask is needed any more.
        return not on_cuda()

    def _drop_front(self, n: int) -> None:
        if n:
            self._ring = self._ring.in_order(0)

    def extend(self, other: "BatchRotatingKVCache") -> None:
        """Append the other batch's rows; it stays as it is.

        Raises:
            ValueError: the other is no BatchRotatingKVCache, or differs in max_size, keep, heads, head size
                or dtype.
        """
        if not isinstance(other, BatchRotatingKVCache):
            raise ValueError(f"extend a BatchRotatingKVCache by a {type(other).__name__}")
        if other.max_size != self.max_size:
            raise ValueError(f"extend a ring of max_size {self.max_size} by one of {other.max_size}")
        if other.keep != self.keep:
            raise ValueError(f"extend a ring with keep {self.keep} by one with keep {other.keep}")
        check_heads("extend", (self._buffers(), other._buffers()))
        mine, theirs = self._ring, other._ring
        after = mine
        moves: tuple[Move, ...] = ((0, 0, mine.stored),)
        others = moves
        if not (mine.wrapped and theirs.wrapped and mine.head == theirs.head):
            after = mine.in_order(max(mine.stored, theirs.stored))
            moves, others = (ordered_moves(ring, ring.stored, after.stored) for ring in (mine, theirs))
        plan, joined = moved_alike(self._rows(), moves), moved_alike(other._rows(), others)
        self._append_rows(other, plan, joined, after.stored, stays=after == mine)
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
        cache = RotatingKVCache(self.max_size, self.keep)
        buffers = self._buffers()
        if buffers is not None:
            sinks = min(self.keep, offset)
            moves = row_moves(self._ring, sinks, stop - (width - sinks), stop)
            cache.keys, cache.values = extract_row(buffers, row, moves, width)
            cache.offset = offset
            cache._ring = self._ring.in_order(width)
            cache._pads = width - held
        return cache

    @classmethod
    def merge(cls, caches: Sequence[RotatingKVCache]) -> "BatchRotatingKVCache":
        """The batch of these solo rings: the sinks and the newest columns of each, max_size in all, right-aligned.

        Args:
            caches: at least one; each of one row, of any length, or empty.

        Raises:
            ValueError: no caches, another kind, a cache of several rows; max_size, keep or heads that differ.
        """
        caches = check_solo(caches, RotatingKVCache)
        sizes = sorted({c.max_size for c in caches})
        if len(sizes) > 1:
            raise ValueError(f"merge of rings of max_size {sizes}, but a batch has one")
        kept = sorted({c.keep for c in caches})
        if len(kept) > 1:
            raise ValueError(f"merge of rings with keep {kept}, but a batch has one")
        found = [c._buffers() for c in caches]
        check_heads("merge", found)
        width = max(c.size() for c in caches)
        width = max(width, kept[0]) if width else 0
        batch = cls(sizes[0], [width - min(c._ring.stored - c._pads, c.size()) for c in caches], kept[0])
        moves = [ordered_moves(c._ring, c.size(), width) for c in caches]
        merged = merge_sources(found, moves, batch._width_for(width))
        if merged is not None:
            batch.keys, batch.values = merged
            batch._ring = batch._ring.in_order(width)
            batch._offsets = tuple(c.offset for c in caches)
        return batch

    @property
    def state(self) -> tuple[object, ...]:
        """(keys, values, offset, left_padding, max_size, columns stored, head, wrapped): mlx-lm's layout.

        The arrays are cut to the columns stored, in slot order. A batch with sinks has `keep` as a ninth
        element. While right padding is pending four more follow, as in `BatchKVCache.state`. mlx-lm reads
        neither. So 8 or 12 elements are without sinks, 9 or 13 with them.
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
        sinks = (ring.keep,) if ring.keep else ()
        return *state, *sinks, *pending_elements(self._pending)

    @state.setter
    def state(self, state: object) -> None:
        kind = "BatchRotatingKVCache"
        layout = "keys, values, offset, left_padding, max_size, columns stored, head, wrapped"
        sinks = isinstance(state, (tuple, list)) and len(state) in (9, 13)
        elements = state_elements(kind, state, f"{layout}, keep" if sinks else layout, PENDING)
        offsets = state_ints(kind, "offset", elements[2])
        rows = len(offsets)
        # mlx-lm goes on counting pads down once they are evicted.
        pads = tuple(max(0, p) for p in state_ints(kind, "left_padding", elements[3], rows))
        keys, values, width = state_buffers(kind, elements[0], elements[1], rows)
        max_size = state_int(kind, "max_size", elements[4], 1)
        state_int(kind, "columns stored", elements[5], 0)  # mlx-lm counts evicted ones too
        max_size, keep = check_ring(max_size, state_int(kind, "keep", elements.pop(8), 1) if sinks else 0)
        head = state_int(kind, "head", elements[6], 0, width)
        wrapped = state_flag(kind, "wrapped", elements[7])
        if wrapped and width != max_size:
            raise ValueError(f"{kind} state: a wrapped ring has {max_size} columns, not {width}")
        if 0 < head < keep or (wrapped and head < keep):
            raise ValueError(f"{kind} state: head {head} lies among the {keep} sinks")
        ring = Ring(max_size, keep, width if wrapped else head, head, wrapped)
        pending = pending_of(kind, elements[8:], max(0, ring.stored - keep), pads)
        tails = (0,) * rows if pending is None else pending.tails
        if wrapped and any(tails):
            raise ValueError(f"{kind} state: {list(tails)} right pads were fed, which no wrapped ring has")
        check_ring_rows(kind, offsets, pads, tails, ring.stored, keep, max_size)
        self.keys, self.values, self._ring = keys, values, ring
        self._set_rows(pads, offsets, pending)

    def _saved_state(self) -> tuple[object, ...]:
        keys, values, *numbers = self.state
        tails = self._tails()
        tokens = [max(0, o - t) for o, t in zip(self._offsets, tails, strict=True)]
        return *(hide_pads(b, self._ring, self._pads, tails, tokens) for b in (keys, values)), *numbers

    def __repr__(self) -> str:
        keep = f", keep={self.keep}" if self.keep else ""
        columns = f"columns={self._ring.stored}, offset={list(self._offsets)}"
        return f"BatchRotatingKVCache(max_size={self.max_size}{keep}, {columns})"
