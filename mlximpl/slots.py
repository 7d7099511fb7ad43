"""Arrays with rows on their first axis: what a recurrent layer keeps. The rest of a shape is the model's affair."""

from collections.abc import Sequence

import mlx.core as mx

from .append import join

Slot = mx.array | None


def check_slot(name: str, slot: object) -> mx.array:
    """Return an array that has rows."""
    if not isinstance(slot, mx.array):
        raise ValueError(f"{name} must be an mx.array or None, not {type(slot).__name__}")
    if slot.ndim < 1:
        raise ValueError(f"{name} must have its rows on axis 0, but its shape is {slot.shape}")
    return slot


def check_slots(name: str, slots: object) -> list[Slot]:
    """Return slots as fresh handles; ValueError where they are no arrays, or of different numbers of rows."""
    if not isinstance(slots, (tuple, list)):
        raise ValueError(f"{name}: slots are a list of arrays or None, not {type(slots).__name__}")
    found = [None if slot is None else check_slot(f"{name}: slot {i}", slot)[...] for i, slot in enumerate(slots)]
    rows = sorted({slot.shape[0] for slot in found if slot is not None})
    if len(rows) > 1:
        raise ValueError(f"{name}: slots of {rows} rows do not go together")
    return found


def take_slot_rows(slot: mx.array, rows: Sequence[int]) -> mx.array:
    """Gather rows of an array (B, ...), in memory of their own."""
    runs = consecutive(rows)
    if not runs:
        return mx.zeros((0, *slot.shape[1:]), slot.dtype)
    if runs == [(0, slot.shape[0])]:
        return slot[...]
    return join([slot[start:stop] for start, stop in runs], axis=0)


def join_slots(operation: str, name: str, parts: Sequence[tuple[Slot, int]]) -> Slot:
    """Put the rows of one slot of several caches under each other.

    Args:
        operation, name: for the refusal.
        parts: each cache's array (b, ...), or None where it was never written, and how many rows b the cache has.

    Returns:
        (B, ...), the rows that were never written all zeros; None where none was.

    Raises:
        ValueError: arrays of other shapes or dtypes.
    """
    filled = [slot for slot, _ in parts if slot is not None]
    if not filled:
        return None
    first = filled[0]
    for slot in filled:
        if slot.shape[1:] != first.shape[1:] or slot.dtype != first.dtype:
            raise ValueError(
                f"{operation}: {name} has rows of {first.shape[1:]} {first.dtype} and of {slot.shape[1:]} {slot.dtype}"
            )
    return join(
        [mx.zeros((rows, *first.shape[1:]), first.dtype) if slot is None else slot for slot, rows in parts], axis=0
    )


def consecutive(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Cut a list of rows into runs (start, stop) of neighbours.

    >>> consecutive([0, 2, 3, 3, 1])
    [(0, 1), (2, 4), (3, 4), (1, 2)]
    """
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
