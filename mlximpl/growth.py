"""By how much a buffer grows that has become too short."""

from math import inf


class Growth:
    """Growth in steps, or in proportion to what is held.

    Attributes:
        step: by how many columns a buffer grows, at least.
        column_growth: by how large a part of its columns a buffer grows where that is more: 0.25 copies a cache of 32k
            tokens 5 times over while it grows, and 0 some 63 times. As much more memory may be taken.
        column_growth_most: how many columns that is at most.

    All three may be set, on a class or on one cache.
    """

    step = 256
    column_growth: float = 0.0
    column_growth_most = 4096

    def _spare_columns(self, stored: int) -> int:
        """How many columns more than needed a buffer gets that holds so many and has become too short.

        Raises:
            ValueError: column_growth is negative or infinite.
        """
        if not self.column_growth:
            return 0
        if not 0 <= self.column_growth < inf:
            raise ValueError(f"column_growth must be a number from 0 on, but is {self.column_growth}")
        return min(int(stored * self.column_growth), self.column_growth_most)
