"""One sequence, or several of the same length, in a growing buffer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .append import append_columns
from .cache import Cache
from .checks import check_update
from .growing_cache import GrowingCache
from .quantized_kv_cache import QuantizedKVCache
from .states import state_buffers, state_elements, state_int

if TYPE_CHECKING:
    from .batch_kv_cache import BatchKVCache


class KVCache(GrowingCache, Cache):
    """A growing cache that keeps every token.

    Attributes:
        offset: how many tokens are held: the position that the next one gets.
    """

    def __init__(self) -> None:
        self.keys = None
        self.values = None
        self.offset = 0

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

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> QuantizedKVCache:
        """A quantized cache of the same tokens; this one stays as it is.

        Args:
            group_size: how many neighbours of a head share a scale and a bias: 32, 64 or 128.
            bits: bits a number: 2, 3, 4, 5, 6 or 8.

        Raises:
            ValueError: another group_size or bits; head sizes that are not whole groups; keys and values of two
                dtypes, or of one that is not float16, bfloat16 or float32.
        """
        quantized = QuantizedKVCache(group_size, bits)
        keys, values = self._stored_arrays()
        if keys is not None and values is not None:
            quantized._start(keys, values)
        return quantized

    def __repr__(self) -> str:
        return f"KVCache(offset={self.offset})"
