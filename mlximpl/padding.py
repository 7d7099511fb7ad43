"""A ragged prefill: right pads are announced, come in, and are moved to the front.

prepare(lengths=[5, 2], right_padding=[0, 3]), an update of five columns, finalize()

a  [a0 a1 a2 a3 a4]            a  [a0 a1 a2 a3 a4]     pads 0
b  [b0 b1  r  r  r]     ->     b  [ r  r  r b0 b1]     pads 3
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .checks import check_size, row_numbers, whole_numbers
from .row_copies import copy_rows
from .row_plan import RowPlan, moved


class Pending(NamedTuple):
    """What a prepare() has announced and finalize() has not ended. One entry a row.

    `columns` are still to come, of which `lengths[b]` are no right pads (-1: all of them, nothing was
    announced for the row); `tails[b]` right pads already lie at the row's end. Where only its right padding
    was announced, `waiting[b]` holds it and the next update says the length; -1 elsewhere. `columns` is -1 if
    no row's length is known.
    """

    columns: int
    lengths: tuple[int, ...]
    tails: tuple[int, ...]
    waiting: tuple[int, ...]

    def update(self, n: int, due: Sequence[int]) -> tuple["Pending", tuple[int, ...]]:
        """Feed n columns: what is pending then, and how many of the n are right pads in each row.

        `due` are the left pads that each row still has to come. The tails are left to the caller.

        Raises:
            ValueError: more columns than announced, or fewer than a row's padding needs.
        """
        lengths = self.lengths
        if any(w >= 0 for w in self.waiting):
            lengths = tuple(n - w if w >= 0 else length for w, length in zip(self.waiting, lengths, strict=True))
            for w, length, pads in zip(self.waiting, lengths, due, strict=True):
                if w >= 0 and length < pads:
                    raise ValueError(
                        f"{n} columns, but prepare() announced right_padding {w} without lengths "
                        f"for a row with {pads} left pads due"
                    )
        if 0 <= self.columns < n:
            raise ValueError(f"{n} columns, but {self.columns} of those that prepare() announced are left")
        after = Pending(
            max(0, self.columns - n),
            tuple(max(0, length - n) if length >= 0 else -1 for length in lengths),
            self.tails,
            (-1,) * len(lengths),
        )
        return after, tuple(max(0, n - length) if length >= 0 else 0 for length in lengths)

    def full_lengths(self) -> tuple[int, ...]:
        """The lengths; all columns to come where nothing was announced for a row."""
        return tuple(self.columns if length < 0 else length for length in self.lengths)

    def take(self, rows: Sequence[int]) -> "Pending | None":
        """The pending padding of some rows; None for no rows."""
        if not rows:
            return None
        lengths, tails, waiting = (
            tuple(each[row] for row in rows) for each in (self.lengths, self.tails, self.waiting)
        )
        return Pending(self.columns, lengths, tails, waiting)


def nothing_announced(rows: int) -> Pending:
    """For rows without right pads: all columns to come are theirs."""
    return Pending(-1, (-1,) * rows, (0,) * rows, (-1,) * rows)


def announce_lengths(lengths: tuple[int, ...], columns: int | None = None) -> Pending:
    """A prefill of as many columns as the longest length, or of more."""
    rows = len(lengths)
    return Pending(max(lengths, default=0) if columns is None else columns, lengths, (0,) * rows, (-1,) * rows)


def check_lengths(lengths: Sequence[int], due: Sequence[int]) -> None:
    """Refuse lengths (-1 where none was announced) that leave no room for the left pads due."""
    if any(0 <= length < d for length, d in zip(lengths, due, strict=True)):
        raise ValueError(f"lengths {list(lengths)} are shorter than the left pads due, {list(due)}")


def join_pending(first: Pending | None, second: Pending | None, first_rows: int, second_rows: int) -> Pending | None:
    """What is pending once the second batch's rows follow the first's."""
    if first is None and second is None:
        return None
    a, b = first or nothing_announced(first_rows), second or nothing_announced(second_rows)
    return Pending(max(a.columns, b.columns), a.lengths + b.lengths, a.tails + b.tails, a.waiting + b.waiting)


def announce(
    due: Sequence[int],
    stored: int,
    left_padding: Sequence[int] | mx.array | None,
    lengths: Sequence[int] | mx.array | None,
    right_padding: Sequence[int] | mx.array | None,
) -> tuple[tuple[int, ...], Pending | None]:
    """Check what prepare() was given against a batch with nothing pending.

    Args:
        due: left pads that each row still has to come, (B,).
        stored: how many columns the batch holds.
        left_padding, lengths, right_padding: as `BatchKVCache.prepare` takes them.

    Returns:
        The left pads to add to each row, and what is pending from here on.
    """
    rows = len(due)
    left = lengths_given = right = None
    if left_padding is not None:
        left = row_numbers("left_padding", left_padding, rows)
        if stored and rows:
            raise ValueError(f"left_padding {list(left)} on a batch that holds {stored} columns already")
        due = tuple(d + p for d, p in zip(due, left, strict=True))
    if lengths is not None:
        lengths_given = row_numbers("lengths", lengths, rows)
        check_lengths(lengths_given, due)
    if right_padding is not None:
        right = row_numbers("right_padding", right_padding, rows)
    left = left or (0,) * rows
    nothing = (0,) * rows
    if lengths_given is None:
        return left, Pending(-1, nothing, nothing, right) if right and any(right) else None
    if right is None:
        width = max(lengths_given, default=0)
        right = tuple(width - length for length in lengths_given)
    totals = [length + r for length, r in zip(lengths_given, right, strict=True)]
    if len(set(totals)) > 1:
        raise ValueError(
            f"lengths {list(lengths_given)} and right_padding {list(right)} add up to {totals}, "
            "but every row gets the same number of columns"
        )
    if not any(right):
        return left, None
    return left, announce_lengths(lengths_given, totals[0])


def pads_to_the_front(shifts: Sequence[int], keep: int, width: int) -> RowPlan:
    """Each row with its columns `keep` to `width` moved to the right by shifts[b], over the last, which are right pads.

    Zeros are left in their place. No shift is above width - keep.
    """
    moves = tuple(((0, 0, keep), (keep, keep + s, width - keep - s)) for s in shifts)
    return moved(tuple(range(len(shifts))), moves)


def roll_rows(array: mx.array, shifts: Sequence[int], width: int | None = None) -> mx.array:
    """Move the last shifts[b] of each row's columns to its front.

    Args:
        array: (B, H, S, D).
        shifts: one number a row, (B,), none above the width.
        width: the columns that move, counted from the front; all S if None.

    Returns:
        An array of the same shape. Rows that do not move are copied in one piece with their neighbours.

    Raises:
        ValueError: shifts of another number of rows, or beyond the width.
    """
    if array.ndim != 4:
        raise ValueError(f"roll_rows of an array of shape {array.shape}, but it must be (B, H, S, D)")
    shifts = whole_numbers("shifts", shifts)
    width = array.shape[2] if width is None else check_size("width", width, 0)
    if width > array.shape[2]:
        raise ValueError(f"width {width}, but the array has {array.shape[2]} columns")
    if len(shifts) != array.shape[0] or any(not 0 <= s <= width for s in shifts):
        raise ValueError(f"shifts {list(shifts)} do not fit {array.shape[0]} rows of {width} columns")
    if not any(shifts):
        return array[...]
    behind = (width, width, array.shape[2] - width)
    moves = tuple(((width - s, 0, s), (0, s, width - s), behind) for s in shifts)
    return copy_rows([array], moved(tuple(range(len(shifts))), moves), array.shape[2])
