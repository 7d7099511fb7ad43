"""Moving columns: every operation says where each new slot comes from, and this moves arrays and positions alike."""

from __future__ import annotations

import numpy as np

from reference.state import NO_TOKEN, Array, Positions

NOWHERE = -1


def move(x: Array, sources: Positions) -> Array:
    """New slot t of row b is old slot `sources[b, t]`, or zeros for NOWHERE.

    x        (B, H, S, D)
    sources  (B, T)

    >>> x = np.array([10, 11, 12]).reshape(1, 1, 3, 1)
    >>> move(x, np.array([[NOWHERE, 2, 0]])).ravel()
    array([ 0, 12, 10])
    """
    rows, heads, _, size = x.shape
    moved = np.zeros((rows, heads, sources.shape[1], size), x.dtype)
    for b, t in np.argwhere(sources != NOWHERE):
        moved[b, :, t] = x[b, :, sources[b, t]]
    return moved


def move_positions(positions: Positions, sources: Positions) -> Positions:
    """The same for the table of positions; NOWHERE becomes NO_TOKEN.

    >>> move_positions(np.array([[0, 1, 2]]), np.array([[NOWHERE, 2, 0]]))
    array([[-1,  2,  0]])
    """
    moved = np.full(sources.shape, NO_TOKEN, np.int64)
    for b, t in np.argwhere(sources != NOWHERE):
        moved[b, t] = positions[b, sources[b, t]]
    return moved


def same_for_all(slots: list[int], rows: int) -> Positions:
    """The table (B, T) in which every row takes the same slots."""
    return np.tile(np.array(slots, np.int64), (rows, 1))


def per_row(slots: list[list[int]], width: int) -> Positions:
    """The table (B, width) from one list of slots a row."""
    return np.array(slots, np.int64).reshape(len(slots), width)
