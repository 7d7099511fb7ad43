"""Arrays as wider elements for a copy: a CPU copies element by element what is not contiguous, whatever their size."""

from collections.abc import Sequence

import mlx.core as mx

WIDE_LEAST = 1 << 16
"""From so many bytes a row on, fewer and wider elements are worth two views."""


def as_words(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
    """Arrays (B, H, S, D) of one D and dtype, on a CPU in words of 8 bytes where they are large and it goes into them.

    Views of whole arrays cost nothing; those of slices are copied first.
    """
    _, heads, _, size = arrays[0].shape
    column = size * arrays[0].itemsize
    if column % 8 or mx.default_device() != mx.cpu:
        return arrays
    if heads * max([array.shape[2] for array in arrays]) * column < WIDE_LEAST:
        return arrays
    return [array.view(mx.uint64) for array in arrays]


def as_numbers(words: mx.array, dtype: mx.Dtype) -> mx.array:
    """The numbers again of what was copied as words."""
    return words if words.dtype == dtype else words.view(dtype)
