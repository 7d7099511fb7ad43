"""What the caches have in common that keep every token."""

import mlx.core as mx

from .cache import AnyCache, Cache
from .checks import check_mask, check_update
from .growth import Growth
from .masks import Mask, solo_mask
from .trim import growing_limit


class GrowingCache(Growth, AnyCache):
    """A cache of one sequence, or of several of the same length, from which nothing is evicted.

    Attributes:
        offset: how many tokens are held: the position that the next one gets.
    """

    offset: int

    def _columns(self) -> int:
        return self.offset

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

    def empty(self) -> bool:
        """Whether no column is stored."""
        return self.offset == 0

    def size(self) -> int:
        return self.offset

    def trim_limit(self) -> int:
        return growing_limit([self.offset])

    def is_trimmable(self) -> bool:
        return True

    def _trim(self, n: int) -> None:
        self.offset -= n


class PlainGrowingCache(GrowingCache, Cache):
    """A growing cache of the arrays as they are fed."""

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
        new_keys, new_values = self._appended(self.keys, keys), self._appended(self.values, values)
        self.keys, self.values = new_keys, new_values
        self.offset += n
        return self.keys_and_values()

    def _appended(self, held: mx.array | None, columns: mx.array) -> mx.array:
        """A buffer (B, H, S, D) that has the columns behind the `offset` ones held."""
        raise NotImplementedError
