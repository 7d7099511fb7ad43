"""Numbers on the host, one a row, and the arrays that readers get of them."""

import mlx.core as mx

Ints = tuple[int, ...]

_latest: dict[str, tuple[Ints, mx.array]] = {}
"""The array made last under each name: the layers of a step ask for the same numbers one after the other."""


def int_array(name: str, numbers: Ints) -> mx.array:
    """An int32 array (B,), the same object for the same numbers under a name again: not to be handed out."""
    made = _latest.get(name)
    if made is None or made[0] != numbers:
        made = _latest[name] = numbers, mx.array(numbers, dtype=mx.int32)
    return made[1]


_advanced: list[tuple[Ints, int, Ints]] = []
"""The numbers that were advanced last, by how much, and what they became: the layers of a step share these too."""


def advanced(numbers: Ints, n: int) -> Ints:
    """All numbers plus n; the same tuple for the same numbers again, which are then compared at once."""
    for given, by, made in _advanced:
        if by == n and given == numbers:
            return made
    made = tuple([number + n for number in numbers])
    _advanced[:] = [(numbers, n, made)]
    return made


class RowNumbers:
    """Makes an array of a row's numbers when it is asked for, once for the same numbers."""

    _arrays: dict[str, tuple[Ints, mx.array]]

    def _array(self, name: str, numbers: Ints) -> mx.array:
        """An int32 array (B,), made once for the same numbers, handed out as a new object each time."""
        made = self._arrays.get(name)
        if made is None or made[0] != numbers:
            made = self._arrays[name] = numbers, int_array(name, numbers)
        return made[1][...]
