"""One sequence, or several of the same length, in a growing buffer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .append import append_columns
from .cache import Cache
from .checks import check_mask, check_update
from .masks import Mask, solo_mask
from .states import state_buffers, state_elements, state_int
from .trim import growing_limit

if TYPE_CHECKING:
    from .batch_kv_cache import BatchKVCache


class KVCache(Cache):
    """A growing cache that keeps every token.

    Attributes:
        offset: how many tokens are held: the position that the next one gets.
    """

    def __init__(self) -> None:
        self.keys = None
        self.values = None
        self.offset = 0

    def _columns(self) -> int:
        return self.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append N columns and return all of them.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).

        Returns:
            keys (B, H, offset, D) and values (B, H, offset, Dv).

        Raises:
            ValueError: the arrays fit neither each other nor the cache, or N is 0.
        """
        rows = None if self.keys is None else self.keys.shape[0]
        n = check_update(keys, values, self.keys, self.values, rows)
        new_keys = append_columns(self.keys, keys, self.offset, self.step)
        new_values = append_columns(self.values, values, self.offset, self.step)
        self.keys, self.values = new_keys, new_values
        self.offset += n
        return self.keys_and_values()

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> Mask:
        """The mask of the next fetch, made before the update of N tokens.

        Returns:
            None, "causal", or booleans (N, offset + N); (1, 1, 1, offset + 1) where N is 1, no mask is
            needed and `return_array` asks for one.

        Raises:
            ValueError: N or window_size is below 1.
        """
        N, window_size = check_mask(N, window_size)
        mask = solo_mask(N, self.offset + N, window_size, return_array)
        return mask[None] if isinstance(mask, mx.array) and mask.ndim == 1 else mask

    def size(self) -> int:
        """How many columns are stored."""
        return self.offset

    def trim_limit(self) -> int:
        return growing_limit([self.offset])

    def is_trimmable(self) -> bool:
        return True

    def _trim(self, n: int) -> None:
        self.offset -= n

    @property
    def state(self) -> tuple[object, ...]:
        """(keys, values, offset): mlx-lm's layout, the arrays cut to the columns stored."""
        return *self._stored_arrays(), self.offset

    @state.setter
    def state(self, state: object) -> None:
        kind = "KVCache"
        keys, values, offset = state_elements(kind, state, "keys, values, offset")
        new_keys, new_values, width = state_buffers(kind, keys, values)
        stored = state_int(kind, "offset", offset, 0, width)
        self.keys, self.values, self.offset = new_keys, new_values, stored

    @classmethod
    def merge(cls, caches: Sequence["KVCache"]) -> "BatchKVCache":
        """The batch of these caches; see `BatchKVCache.merge`."""
        from .batch_kv_cache import BatchKVCache  # it imports this module for extract

        return BatchKVCache.merge(caches)

    def __repr__(self) -> str:
        return f"KVCache(offset={self.offset})"
