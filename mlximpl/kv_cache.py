"""One sequence, or several of the same length, in a growing buffer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .append import append_columns
from .growing_cache import PlainGrowingCache
from .quantized_kv_cache import QuantizedKVCache
from .states import state_buffers, state_elements, state_int

if TYPE_CHECKING:
    from .batch_kv_cache import BatchKVCache


class KVCache(PlainGrowingCache):
    """A growing cache that keeps every token.

    Attributes:
        offset: how many tokens are held: the position that the next one gets.
    """

    def _appended(self, held: mx.array | None, columns: mx.array) -> mx.array:
        return append_columns(held, columns, self.offset, self.step, self._spare_columns(self.offset))

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
