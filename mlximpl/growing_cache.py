"""What the caches have in common that keep every token."""

import mlx.core as mx

from .cache import AnyCache
from .checks import check_mask
from .masks import Mask, solo_mask
from .trim import growing_limit


class GrowingCache(AnyCache):
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
