"""One sequence, or several of the same length, that grows by concatenation."""

import mlx.core as mx

from .append import join
from .growing_cache import PlainGrowingCache
from .states import state_buffers, state_elements


class ConcatenateKVCache(PlainGrowingCache):
    """A growing cache without spare columns: for large blocks, or one that is read and not decoded into.

    Attributes:
        offset: how many tokens are held: the position that the next one gets.
    """

    def _appended(self, held: mx.array | None, columns: mx.array) -> mx.array:
        return join([columns] if held is None else [held[..., : self.offset, :], columns])

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
