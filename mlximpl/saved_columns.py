"""What of the columns stored goes into a file: pads are written as zeros, whatever lay there before.

a  [ x  x a0 a1]      left padding 2      [ 0  0 a0 a1]
b  [b0 b1 b2  x]      1 right pad    ->   [b0 b1 b2  0]
"""

from collections.abc import Sequence
from typing import TypeVar

import mlx.core as mx

from .temporal_order import Ring, slot_columns

A = TypeVar("A")


def hide_pads(
    array: A, ring: Ring, pads: Sequence[int], tails: Sequence[int] = (), tokens: Sequence[int] = ()
) -> A | mx.array:
    """Put zeros where a row has pads.

    Args:
        array: (B, H, S, D), the S slots of the ring; anything else is returned as it is.
        ring: where the columns lie.
        pads: how many of each row's oldest columns behind the sinks are pads, (B,), or one number for all rows.
        tails: how many of its newest columns are, likewise; none if empty.
        tokens: how many tokens each row has had, where a row may have fewer than the ring has sinks.
    """
    if not isinstance(array, mx.array) or not array.size or not (any(pads) or any(tails)):
        return array
    columns = slot_columns(array.shape[2], ring.head - 1 if ring.wrapped else None, ring.keep)[:, None]
    held = columns >= _rows([ring.keep + p for p in pads])
    if ring.keep:
        held = held | (columns < (_rows([min(ring.keep, t) for t in tokens]) if tokens else ring.keep))
    if any(tails):
        held = held & (columns < _rows([array.shape[2] - t for t in tails]))
    return mx.where(held, array, mx.zeros((), array.dtype))


def _rows(numbers: Sequence[int]) -> mx.array:
    return mx.array(list(numbers), dtype=mx.int32)[:, None, None, None]
