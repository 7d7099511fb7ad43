"""One sequence, or several of the same length, in a ring with sinks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .append import join
from .cache import Cache
from .checks import check_mask, check_ring, check_update, whole
from .masks import Mask, solo_mask
from .ring_update import ring_update, ring_write
from .saved_columns import hide_pads
from .states import check_ring_rows, state_buffers, state_elements, state_int
from .temporal_order import Ring, temporal_columns
from .trim import ring_can_trim, ring_limit, ring_trim

if TYPE_CHECKING:
    from .batch_rotating_kv_cache import BatchRotatingKVCache


class RotatingKVCache(Cache):
    """A ring that keeps the first `keep` tokens and the newest ones, `max_size` in all.

    A query sees the newest `max_size - keep` tokens, itself included, and the first `keep`.

    Args:
        max_size: how many slots the ring has, at least 1.
        keep: how many tokens at the start stay, below max_size.

    Attributes:
        offset: how many tokens were fed: the position that the next one gets.

    Raises:
        ValueError: max_size or keep is out of range.
    """

    def __init__(self, max_size: int, keep: int = 0) -> None:
        self._ring = Ring(*check_ring(max_size, keep))
        self._pads = 0  # columns behind the sinks that hold no token
        self._fed = 0  # tokens of the last update, as long as they may be the next to go
        self.keys = None
        self.values = None
        self.offset = 0

    @property
    def max_size(self) -> int:
        """How many slots the ring has."""
        return self._ring.max_size

    @property
    def keep(self) -> int:
        """How many sinks stay at the front."""
        return self._ring.keep

    def _columns(self) -> int:
        return self._ring.stored

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write N columns and return those that are live.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).

        Returns:
            keys (B, H, T, D) and values (B, H, T, Dv): in temporal order after several tokens or before
            the ring has wrapped, else in slot order. T is at most max_size + N - 1.

        Raises:
            ValueError: the arrays fit neither each other nor the cache, or N is 0.
        """
        rows = None if self.keys is None else self.keys.shape[0]
        n = check_update(keys, values, self.keys, self.values, rows)
        ring = self._ring
        write = ring_write(ring, n)
        new_keys = ring_update(self.keys, keys, ring, write, self.step)
        new_values = ring_update(self.values, values, ring, write, self.step)
        self.keys, self.values = new_keys, new_values
        self._ring = write.after
        self._pads = max(0, self._pads - write.evicted)
        self.offset += n
        self._fed = n
        return self.keys_and_values()

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """The mask of the next fetch of T columns, made before the update of N tokens.

        Returns:
            None, "causal", or booleans: (N, T), for one query (T,) in slot order; (1, 1, 1, T) where N is
            1, no mask is needed and `return_array` asks for one.

        Raises:
            ValueError: N or window_size is below 1.
        """
        N, window_size = check_mask(N, window_size)
        write = ring_write(self._ring, N)
        window = self.max_size - self.keep
        return solo_mask(
            N,
            write.after.stored,
            window if window_size is None else min(window, window_size),
            return_array,
            pads=max(0, self._pads - write.evicted),
            keep=self.keep,
            slot=write.slot,
        )

    def size(self) -> int:
        """How many tokens are held, at most max_size."""
        return min(self.offset, self.max_size)

    def trim_limit(self) -> int:
        return ring_limit([self.offset], [self._pads], self._ring)

    def can_trim(self, n: int) -> bool:
        n = whole("the number of tokens to trim", n)
        return n == 0 or (n > 0 and ring_can_trim(n, [self.offset], [self._pads], self._ring))

    def is_trimmable(self) -> bool:
        return self._gives_all_back() or 1 < self._fed <= self.trim_limit()

    def _gives_all_back(self) -> bool:
        return self.trim_limit() >= self.offset

    def _trim(self, n: int) -> None:
        self._fed = 0
        left = self.offset - n
        if left <= self.keep:
            # Sinks lie at the front whether the ring has wrapped or not.
            self._ring, self._pads, self.offset = self._ring.in_order(left), 0, left
            return
        after, pads, reorder = ring_trim(self._ring, n)
        buffers = self._buffers()
        if reorder and buffers is not None:
            self.keys, self.values = (join(temporal_columns(b, self._ring)) for b in buffers)
        self._ring = after
        self._pads = min(self._pads + pads, after.stored - self.keep)
        self.offset -= n

    @property
    def state(self) -> tuple[object, ...]:
        """(keys, values, offset, keep, max_size, head): mlx-lm's layout, in slot order.

        The arrays are cut to the columns stored. A ring with pads behind its sinks, as a trim after
        wrapping leaves them, has their number as a seventh element, which mlx-lm cannot read.
        """
        ring = self._ring
        state = *self._stored_arrays(), self.offset, ring.keep, ring.max_size, ring.head
        return (*state, self._pads) if self._pads else state

    @state.setter
    def state(self, state: object) -> None:
        kind = "RotatingKVCache"
        elements = state_elements(kind, state, "keys, values, offset, keep, max_size, head", "pads")
        keys, values, width = state_buffers(kind, elements[0], elements[1])
        offset = state_int(kind, "offset", elements[2], 0)
        keep = state_int(kind, "keep", elements[3], 0)
        max_size, keep = check_ring(state_int(kind, "max_size", elements[4], 1), keep)
        head = state_int(kind, "head", elements[5], 0, width)
        ring = Ring(max_size, keep, head, head, False)
        if head < min(offset, width):
            if width != max_size or head < keep:
                raise ValueError(
                    f"{kind} state: head {head} in {width} columns, but a ring of {max_size} wraps "
                    f"at {max_size} and returns to {keep}"
                )
            ring = Ring(max_size, keep, width, head, True)
        pads = 0
        if len(elements) > 6:
            pads = state_int(kind, "pads", elements[6], 0, max(0, ring.stored - keep))
        check_ring_rows(kind, [offset], [pads], [0], ring.stored, keep, max_size)
        self.keys, self.values, self.offset = keys, values, offset
        self._ring, self._pads, self._fed = ring, pads, 0

    def _saved_state(self) -> tuple[object, ...]:
        ring = self._ring
        keys, values, *numbers = self.state[:6]
        if self._pads:
            keys, values = (hide_pads(b, ring, [self._pads]) for b in (keys, values))
        # mlx-lm grows a ring that holds fewer tokens than it could as if it held them.
        short = ring.stored < min(self.offset, ring.max_size)
        return (keys, values, *numbers, self._pads) if self._pads or short else (keys, values, *numbers)

    @classmethod
    def merge(cls, caches: Sequence["RotatingKVCache"]) -> "BatchRotatingKVCache":
        """The batch of these caches; see `BatchRotatingKVCache.merge`."""
        from .batch_rotating_kv_cache import BatchRotatingKVCache  # it imports this module

        return BatchRotatingKVCache.merge(caches)

    def __repr__(self) -> str:
        keep = f", keep={self.keep}" if self.keep else ""
        return f"RotatingKVCache(max_size={self.max_size}{keep}, offset={self.offset})"
