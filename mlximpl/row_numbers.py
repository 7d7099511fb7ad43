"""Numbers on the host, one a row, and the arrays that readers get of them."""

import mlx.core as mx

Ints = tuple[int, ...]


class RowNumbers:
    """Makes an array of a row's numbers when it is asked for, once for the same numbers."""

    _arrays: dict[str, tuple[Ints, mx.array]]

    def _array(self, name: str, numbers: Ints) -> mx.array:
        """An int32 array (B,), made once for the same numbers, handed out as a new object each time."""
        made = self._arrays.get(name)
        if made is None or made[0] != numbers:
            made = numbers, mx.array(numbers, dtype=mx.int32)
            self._arrays[name] = made
        return made[1][...]
