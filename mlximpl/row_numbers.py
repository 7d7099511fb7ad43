"""Numbers on the host, one a row, and the arrays that readers get of them.

The layers of a step ask for the same, one after the other, so what was made is kept.
"""

from functools import lru_cache

import mlx.core as mx

Ints = tuple[int, ...]


@lru_cache(maxsize=64)
def int_array(numbers: Ints) -> mx.array:
    """An int32 array (B,), the same object for the same numbers: what is handed out is `int_array(...)[...]`."""
    return mx.array(numbers, dtype=mx.int32)


@lru_cache(maxsize=64)
def advanced(numbers: Ints, n: int) -> Ints:
    """All numbers plus n."""
    return tuple([number + n for number in numbers])
