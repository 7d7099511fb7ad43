"""Rows of different lengths in a growing buffer."""

from collections.abc import Sequence

import mlx.core as mx

from .append import append_columns, rounded
from .batch_cache import BatchCache
from .checks import check_heads, check_mask, check_rows, check_solo, check_update
from .extract import extract_row
from .growth import Growth
from .kv_cache import KVCache
from .masks import Mask, batch_mask
from .merge import merge_sources
from .row_numbers import Ints, advanced
from .row_plan import RowPlan, shifted
from .saved_columns import hide_pads
from .states import (
    PENDING,
    pending_elements,
    pending_of,
    state_buffers,
    state_elements,
    state_int,
    state_ints,
)
from .temporal_order import Ring
from .trim import growing_limit


class BatchKVCache(Growth, BatchCache):
    """A growing cache of left-padded rows.

    Args:
        left_padding: how many pads come before each row's first token, one number a row.

    Raises:
        ValueError: left_padding is not a list of whole numbers, none negative.
    """

    def __init__(self, left_padding: Sequence[int] | mx.array) -> None:
        self._begin(left_padding)
        self._stored = 0

    def _columns(self) -> int:
        return self._stored

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append N columns to every row and return all columns.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).

        Returns:
            keys (B, H, T, D) and values (B, H, T, Dv) in temporal order.

        Raises:
            ValueError: the arrays fit neither each other nor the cache; N is 0, or more than prepare()
                announced.
        """
        n = check_update(keys, values, self._keys, self._values, self._rows())
        pending = self._pending
        if pending is not None:
            pending, tails = pending.update(n, self._due())
            fed = tuple(t + more for t, more in zip(pending.tails, tails, strict=True))
            pending = pending._replace(tails=fed)
        spare = self._spare_columns(self._stored)
        new_keys = append_columns(self._keys, keys, self._stored, self.step, spare)
        new_values = append_columns(self._values, values, self._stored, self.step, spare)
        self._keys, self._values = new_keys, new_values
        self._stored += n
        self._offsets = advanced(self._offsets, n)
        self._pending = pending
        return self.keys_and_values()

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """The mask of the next fetch of T columns, made before the update of N tokens.

        Returns:
            None, "causal", or booleans (B, 1, N, T), always booleans with `return_array`.

        Raises:
            ValueError: N or window_size is below 1, or N is more than prepare() announced.
        """
        N, window_size = check_mask(N, window_size)
        self._check_announced(N)
        return batch_mask(self._pads, N, self._stored + N, window_size, return_array)

    def size(self) -> int:
        """How many columns are stored."""
        return self._stored

    def trim_limit(self) -> int:
        return 0 if self._pending is not None else growing_limit(self._offsets)

    def _trim(self, n: int) -> None:
        self._stored -= n
        self._offsets = tuple(o - n for o in self._offsets)

    def _useless_columns(self, pads: Ints) -> int:
        return min(self._stored, *pads)

    def _drop_front(self, n: int) -> None:
        self._stored -= n

    def extend(self, other: "BatchKVCache") -> None:
        """Append the other batch's rows; it stays as it is.

        Raises:
            ValueError: the other is no BatchKVCache, or differs in heads, head size or dtype.
        """
        if not isinstance(other, BatchKVCache):
            raise ValueError(f"extend a BatchKVCache by a {type(other).__name__}")
        check_heads("extend", (self._buffers(), other._buffers()))
        stop = max(self._stored, other._stored)
        self._append_rows(other, self._aligned(stop), other._aligned(stop), stop, stays=self._stored == stop)
        self._stored = stop

    def _aligned(self, stop: int) -> RowPlan:
        """The rows' tokens where they end before column `stop`."""
        return shifted(tuple(range(self._rows())), self._pads, self._stored, stop - self._stored)

    def _width_for(self, columns: int) -> int:
        return rounded(columns, self.step)

    def _first_columns(self) -> Ints:
        return self._pads

    def extract(self, idx: int) -> KVCache:
        """One row as a solo cache in memory of its own; right pads and left pads due stay behind.

        Raises:
            IndexError: the row is not there.
        """
        (row,) = check_rows("extract", [idx], self._rows())
        stop = self._stored - self._tails()[row]
        start = min(self._pads[row], stop)
        cache = KVCache()
        buffers = self._buffers()
        if buffers is not None:
            width = stop - start
            cache.keys, cache.values = extract_row(buffers, row, ((start, 0, width),), width)
            cache.offset = width
        return cache

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> "BatchKVCache":
        """The batch of these solo caches, right-aligned.

        Args:
            caches: at least one; each of one row, of any length, or empty.

        Raises:
            ValueError: no caches, another kind, a cache of several rows, or heads that differ.
        """
        caches = check_solo(caches, KVCache)
        found = [c._buffers() for c in caches]
        check_heads("merge", found)
        stop = max(c.offset for c in caches)
        batch = cls([stop - c.offset for c in caches])
        merged = merge_sources(found, [((0, stop - c.offset, c.offset),) for c in caches], batch._width_for(stop))
        if merged is not None:
            batch.keys, batch.values = merged
            batch._stored = stop
            batch._offsets = tuple(c.offset for c in caches)
        return batch

    @property
    def state(self) -> tuple[object, ...]:
        """(keys, values, offset, left_padding, columns stored): mlx-lm's layout.

        The arrays are cut to the columns stored. While right padding is pending four more elements follow,
        which mlx-lm cannot read: the columns to come (-1 if unknown), and int32 arrays (B,) of the lengths
        to come, the right pads fed, and the right padding that waits for its length (-1 for none).
        """
        state = *self._stored_arrays(), self.offset, self.left_padding, self._stored
        return *state, *pending_elements(self._pending)

    @state.setter
    def state(self, state: object) -> None:
        kind = "BatchKVCache"
        elements = state_elements(kind, state, "keys, values, offset, left_padding, columns stored", PENDING)
        offsets = state_ints(kind, "offset", elements[2])
        rows = len(offsets)
        pads = state_ints(kind, "left_padding", elements[3], rows, 0)
        keys, values, width = state_buffers(kind, elements[0], elements[1], rows)
        stored = state_int(kind, "columns stored", elements[4], 0, width)
        if any(o != stored - p for o, p in zip(offsets, pads, strict=True)):
            raise ValueError(
                f"{kind} state: offset {list(offsets)} is not {stored} columns less left_padding {list(pads)}"
            )
        pending = pending_of(kind, elements[5:], stored, pads)
        self.keys, self.values, self._stored = keys, values, stored
        self._set_rows(pads, offsets, pending)

    def _saved_state(self) -> tuple[object, ...]:
        keys, values, *numbers = self.state
        ring = Ring(self._stored, stored=self._stored, head=self._stored)
        return *(hide_pads(b, ring, self._pads, self._tails()) for b in (keys, values)), *numbers

    def __repr__(self) -> str:
        return f"BatchKVCache(columns={self._stored}, offset={list(self._offsets)})"
