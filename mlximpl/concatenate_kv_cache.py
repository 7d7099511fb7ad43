"""One sequence, or several of the same length, that grows by concatenation."""

import mlx.core as mx

from .append import join
from .cache import Cache
from .checks import check_update
from .growing_cache import GrowingCache
from .states import state_buffers, state_elements


class ConcatenateKVCache(GrowingCache, Cache):
    """A growing cache without spare columns: for large blocks, or one that is read and not decoded into.

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
        held_keys, held_values = self._stored_arrays()
        new_keys = join([keys] if held_keys is None else [held_keys, keys])
        new_values = join([values] if held_values is None else [held_values, values])
        self.keys, self.values = new_keys, new_values
        self.offset += n
        return self.keys_and_values()

    @property
    def state(self) -> tuple[object, ...]:
        """(keys, values): mlx-lm's layout; the offset is how many columns they have."""
        return self._stored_arrays()

    @state.setter
    def state(self, state: object) -> None:
        kind = "ConcatenateKVCache"
        keys, values = state_elements(kind, state, "keys, values")
        self.keys, self.values, self.offset = state_buffers(kind, keys, values)

    def __repr__(self) -> str:
        return f"ConcatenateKVCache(offset={self.offset})"
