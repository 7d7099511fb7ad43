"""The state of a recurrent layer: a few arrays that the model overwrites at each step.

prepare(lengths=[3, 1])       make_mask(3)        advance(3)

a  [a0 a1 a2]                 [1 1 1]             lengths 0
b  [b0  r  r]                 [1 0 0]             lengths 0
"""

from collections.abc import Iterator, Sequence
from operator import index
from typing import overload

import mlx.core as mx

from .cache import AnyCache
from .checks import check_kind, check_rows, check_size, row_numbers, whole
from .padding import Pending, announce, announce_lengths, check_lengths, join_pending
from .row_numbers import Ints, int_array
from .slots import Slot, check_slot, check_slots, join_slots, take_slot_rows
from .states import state_int, state_ints

Numbers = Sequence[int] | mx.array


class ArraysCache(AnyCache):
    """Slots for arrays with the rows of a batch on axis 0.

    How many rows there are is known from the slots that are filled, or from padding, prepare(), merge, filter and
    extend. A cache that knows nothing counts as one row.

    Args:
        size: how many slots there are.
        left_padding: how many pads come before each row's first token, one number a row; None or [] says nothing.

    Raises:
        ValueError: size is negative, or left_padding is not a list of whole numbers, none negative.
    """

    _slots: list[Slot]
    _due: Ints | None  # left pads to come, a row; None where nothing but the slots says how many rows there are
    _pending: Pending | None

    def __init__(self, size: int, left_padding: Numbers | None = None) -> None:
        self._slots = [None] * check_size("size", size, 0)
        self._due = None if left_padding is None else row_numbers("left_padding", left_padding) or None
        self._pending = None

    @overload
    def __getitem__(self, idx: int) -> Slot: ...
    @overload
    def __getitem__(self, idx: slice) -> list[Slot]: ...
    def __getitem__(self, idx: int | slice) -> Slot | list[Slot]:
        """The array in a slot, or None; IndexError for a slot that is not there."""
        if isinstance(idx, slice):
            return self._fresh()[idx]
        slot = self._slots[self._slot_number(idx)]
        return None if slot is None else slot[...]

    def __setitem__(self, idx: int, value: Slot) -> None:
        """Fill a slot with an array (B, ...), or empty it with None.

        Raises:
            IndexError: the slot is not there.
            ValueError: no array, or one of another number of rows than the cache has. A slot that alone says how
                many there are may change it.
        """
        i = self._slot_number(idx)
        slots = list(self._slots)
        if value is None:
            slots[i] = None
        else:
            rows = check_slot(f"slot {i}", value).shape[0]
            others = self._known_rows(apart_from=i)
            if others is not None and rows != others:
                raise ValueError(f"slot {i} of {rows} rows, but the cache holds {others} rows")
            slots[i] = value[...]
            if self._due is not None and len(self._due) != rows:
                self._due = (0,) * rows
        self._slots = slots

    def __iter__(self) -> Iterator[Slot]:
        """The slots in order, as new objects."""
        return iter(self._fresh())

    def _slot_number(self, idx: int) -> int:
        i, held = index(idx), len(self._slots)
        if not -held <= i < held:
            raise IndexError(f"slot {i}, but the cache has {held} slots")
        return i % held

    @property
    def cache(self) -> list[Slot]:
        """The slots themselves, arrays (B, ...) or None. A list of as many may be assigned.

        What is written into the list is written into the cache, unchecked, until the cache next changes a slot.
        """
        return self._slots

    @cache.setter
    def cache(self, slots: Sequence[Slot]) -> None:
        found = check_slots("cache", slots)
        if len(found) != len(self._slots):
            raise ValueError(f"cache: {len(found)} slots, but the cache has {len(self._slots)}")
        rows = next((slot.shape[0] for slot in found if slot is not None), None)
        told = self._told_rows()
        if told is None and self._due is not None and all(slot is None for slot in self._slots):
            told = len(self._due)
        if rows is not None and told is not None and rows != told:
            raise ValueError(f"cache: slots of {rows} rows, but the cache holds {told} rows")
        if rows is not None and self._due is not None and len(self._due) != rows:
            self._due = (0,) * rows
        self._slots = found

    def _fresh(self) -> list[Slot]:
        """The slots as new objects, safe to hand out."""
        return [None if slot is None else slot[...] for slot in self._slots]

    def _told_rows(self) -> int | None:
        """How many rows there are by what is due and pending; None where it says nothing."""
        if self._due is not None and (any(self._due) or self._pending is not None):
            return len(self._due)
        return None

    def _known_rows(self, apart_from: int | None = None) -> int | None:
        """How many rows there are, as far as this is known apart from the array in one slot."""
        told = self._told_rows()
        if told is not None:
            return told
        for i, slot in enumerate(self._slots):
            if slot is not None and i != apart_from:
                return slot.shape[0]
        if self._due is not None and (apart_from is None or self._slots[apart_from] is None):
            return len(self._due)
        return None

    @property
    def batch_size(self) -> int:
        """How many rows there are; 1 where nothing says so."""
        rows = self._known_rows()
        return 1 if rows is None else rows

    def _dues(self) -> Ints:
        return (0,) * self.batch_size if self._due is None else self._due

    @property
    def left_padding(self) -> mx.array | None:
        """How many left pads each row still has to come, int32 (B,); None where no row has any. May be assigned."""
        return int_array(self._due)[...] if self._due is not None and any(self._due) else None

    @left_padding.setter
    def left_padding(self, numbers: Numbers | None) -> None:
        if numbers is None:
            self._due = None if self._due is None else (0,) * len(self._due)
            return
        due = row_numbers("left_padding", numbers, self._known_rows())
        if self._pending is not None:
            check_lengths(self._pending.lengths, due)
        self._due = due

    @property
    def lengths(self) -> mx.array | None:
        """How many of the columns to come are no right pads in each row, int32 (B,); None where all are.

        Left pads due count. May be assigned: a list announces a ragged prefill, None ends it.
        """
        return None if self._pending is None else int_array(self._pending.full_lengths())[...]

    @lengths.setter
    def lengths(self, numbers: Numbers | None) -> None:
        if numbers is None:
            self._pending = None
            return
        lengths = row_numbers("lengths", numbers, self._known_rows())
        due = (0,) * len(lengths) if self._due is None else self._due
        check_lengths(lengths, due)
        self._due, self._pending = due, announce_lengths(lengths) if lengths else None

    def make_mask(self, N: int) -> mx.array | None:
        """Which of the next N columns are tokens.

        Returns:
            Booleans (B, N); None where all columns of all rows are.

        Raises:
            ValueError: N is below 1, or more than prepare() announced.
        """
        n = whole("the number of columns", N)
        if n < 1:
            raise ValueError(f"a mask needs at least one column, but N is {n}")
        self._after(n)
        left, lengths = self.left_padding, self.lengths
        if self._pending is None or all(length >= n for length in self._pending.full_lengths()):
            lengths = None
        if left is None and lengths is None:
            return None
        columns = mx.arange(n)
        begun = None if left is None else columns >= left[:, None]
        within = None if lengths is None else columns < lengths[:, None]
        if begun is None or within is None:
            return within if begun is None else begun
        return begun & within

    def advance(self, N: int) -> None:
        """Note that N columns were fed: `left_padding` and `lengths` count down to 0.

        Raises:
            ValueError: N is negative, or more than prepare() announced.
        """
        n = whole("the number of columns", N)
        if n < 0:
            raise ValueError(f"advance by {n}: a number of columns is not negative")
        self._pending = self._after(n)
        if self._due is not None:
            self._due = tuple(max(0, d - n) for d in self._due)

    def _after(self, n: int) -> Pending | None:
        """What is pending after n columns, or a refusal of more than were announced."""
        return None if self._pending is None else self._pending.update(n, self._dues())[0]

    def prepare(
        self,
        *,
        left_padding: Numbers | None = None,
        lengths: Numbers | None = None,
        right_padding: Numbers | None = None,
    ) -> None:
        """Announce a ragged prefill. One number a row in each list.

        Args:
            left_padding: pads to come before each row's first token.
            lengths: how many of the columns to come are no right pads, left pads due included.
            right_padding: how many right pads come after those. It needs lengths: a model reads those before its
                layers say how many columns come.

        Raises:
            ValueError: padding is pending already; a list of another length than the batch, or with a negative
                number; lengths[b] + right_padding[b] differ between rows; lengths shorter than the left pads due;
                right padding above 0 without lengths; left padding where a slot is filled.
        """
        if self._pending is not None:
            raise ValueError("prepare while padding is pending: finalize() comes first")
        rows = self._known_rows()
        given: list[Ints | None] = []
        for name, numbers in (("left_padding", left_padding), ("lengths", lengths), ("right_padding", right_padding)):
            given.append(None if numbers is None else row_numbers(name, numbers, rows))
            # A fresh cache takes any number of rows, and the next list must be for as many.
            rows = rows if numbers is None else len(given[-1] or ()) or self.batch_size
        lefts, _, rights = given
        if lefts and any(slot is not None for slot in self._slots):
            raise ValueError(f"left_padding {list(lefts)} on a cache whose slots are filled already")
        if lengths is None and rights and any(rights):
            raise ValueError(f"right_padding {list(rights)} without lengths, which recurrent layers read")
        due = (0,) * (rows or 0) if self._due is None else self._due
        left, pending = announce(due, 0, *given)
        if rows is not None:
            self._due = tuple(d + more for d, more in zip(due, left, strict=True))
        self._pending = pending

    def finalize(self) -> None:
        """End a ragged prefill: no right pads come any more. Left pads still due stay due."""
        self._pending = None

    def filter(self, batch_indices: Numbers) -> None:
        """Keep these rows, in this order; one named twice is forked.

        Args:
            batch_indices: row numbers, negative ones from the end. An array is read back to the host.

        Raises:
            IndexError: a row that is not there.
        """
        rows = check_rows("filter", batch_indices, self.batch_size)
        slots = [None if slot is None else take_slot_rows(slot, rows) for slot in self._slots]
        dues = self._dues()
        self._slots, self._due = slots, tuple(dues[row] for row in rows)
        self._pending = None if self._pending is None else self._pending.take(rows)

    def extend(self, other: "ArraysCache") -> None:
        """Append the other cache's rows; it stays as it is. Where one side has no array, its rows become zeros.

        Raises:
            ValueError: the other is no ArraysCache, has another number of slots, or arrays of another shape or dtype.
        """
        if not isinstance(other, ArraysCache):
            raise ValueError(f"extend an ArraysCache by a {type(other).__name__}")
        self._set(*joined("extend", [self, other]))

    def _set(self, slots: list[Slot], due: Ints | None, pending: Pending | None) -> None:
        self._slots, self._due, self._pending = slots, due, pending

    def extract(self, idx: int) -> "ArraysCache":
        """One row as a cache in memory of its own; padding stays behind.

        Raises:
            IndexError: the row is not there.
        """
        (row,) = check_rows("extract", [idx], self.batch_size)
        cache = ArraysCache(len(self._slots))
        cache._slots = [None if slot is None else mx.contiguous(slot[row : row + 1]) for slot in self._slots]
        return cache

    @classmethod
    def merge(cls, caches: Sequence["ArraysCache"]) -> "ArraysCache":
        """The batch of these caches. Where some have no array in a slot, their rows become zeros.

        Args:
            caches: at least one; each of one row, or fresh.

        Raises:
            ValueError: no caches, another kind, a cache of several rows; another number of slots; arrays of another
                shape or dtype.
        """
        found = check_kind(caches, ArraysCache)
        for cache in found:
            if cache.batch_size != 1:
                raise ValueError(f"merge of a cache with {cache.batch_size} rows, but a row is one")
        batch = cls(len(found[0]._slots))
        batch._set(*joined("merge", found))
        return batch

    def empty(self) -> bool:
        """Whether there is no row, or no slot is filled."""
        return self.batch_size == 0 or all(slot is None for slot in self._slots)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots if slot is not None)

    def size(self) -> int:
        """0: no columns are stored."""
        return 0

    def trim_limit(self) -> int:
        """0: a recurrent state cannot go back."""
        return 0

    def is_trimmable(self) -> bool:
        return False

    def _is_pending(self) -> bool:
        return self._pending is not None

    @property
    def state(self) -> tuple[object, ...]:
        """(slots, left_padding, lengths): mlx-lm's layout.

        left_padding also stands, as zeros, where the number of rows is known and no slot is filled. While a ragged
        prefill is pending whose columns to come are not the longest of the lengths, or with rows for which nothing
        was announced, they follow as a fourth element, which mlx-lm cannot read; the length of such a row is -1.
        """
        filled = any(slot is not None for slot in self._slots)
        left = None
        if self._due is not None and (any(self._due) or not filled):
            left = int_array(self._due)[...]
        pending = self._pending
        if pending is None:
            return self._fresh(), left, None
        lengths = int_array(pending.lengths)[...]
        if pending.columns == max(pending.lengths, default=0) and min(pending.lengths, default=0) >= 0:
            return self._fresh(), left, lengths
        return self._fresh(), left, lengths, pending.columns

    @state.setter
    def state(self, state: object) -> None:
        kind = "ArraysCache"
        if not isinstance(state, (tuple, list)) or len(state) not in (3, 4):
            what = f"{len(state)} elements" if isinstance(state, (tuple, list)) else type(state).__name__
            raise ValueError(
                f"an {kind} state is (slots, left_padding, lengths) and perhaps (columns to come), not {what}"
            )
        slots = [None if slot is None else mx.contiguous(slot) for slot in check_slots(f"{kind} state", state[0])]
        rows = next((slot.shape[0] for slot in slots if slot is not None), None)
        due = lengths = pending = None
        if state[1] is not None:
            # mlx-lm goes on counting below 0.
            due = tuple(max(0, n) for n in state_ints(kind, "left_padding", state[1], rows))
            rows = len(due)
        if state[2] is not None:
            lengths = state_ints(kind, "lengths", state[2], rows)
            due = due or (0,) * len(lengths)
        elif len(state) == 4:
            raise ValueError(f"{kind} state: columns to come without lengths")
        if lengths is not None and due is not None:
            if len(state) == 4:
                columns = state_int(kind, "columns to come", state[3], max((0, *lengths)))
                lengths = state_ints(kind, "lengths", state[2], rows, -1)
                pending = announce_lengths(lengths, columns)
            else:
                pending = announce_lengths(tuple(max(0, n) for n in lengths))
            check_lengths(pending.lengths, due)
        self._set(slots, due, pending if due else None)

    def __repr__(self) -> str:
        filled = sum(slot is not None for slot in self._slots)
        return f"ArraysCache({filled} of {len(self._slots)} slots filled, batch_size={self.batch_size})"


def joined(operation: str, caches: Sequence[ArraysCache]) -> tuple[list[Slot], Ints, Pending | None]:
    """The rows of several caches under each other: slots, left pads due, and what is pending."""
    sizes = sorted({len(cache._slots) for cache in caches})
    if len(sizes) > 1:
        raise ValueError(f"{operation} caches of {' and '.join(map(str, sizes))} slots")
    slots = [
        join_slots(operation, f"slot {i}", [(cache._slots[i], cache.batch_size) for cache in caches])
        for i in range(sizes[0])
    ]
    due: Ints = ()
    pending: Pending | None = None
    for cache in caches:
        pending = join_pending(pending, cache._pending, len(due), cache.batch_size)
        due += cache._dues()
    return slots, due, pending
