"""What the two batches have in common: rows, their padding, and the ragged prefill."""

from collections.abc import Sequence
from math import inf

import mlx.core as mx

from .cache import Cache
from .checks import check_rows, row_numbers
from .cuda_rows import kernel_takes
from .device import on_cuda
from .extend import extend_rows, write_rows
from .padding import Pending, announce, join_pending, pads_to_the_front
from .row_copies import copy_pairs
from .row_numbers import Ints, int_array
from .row_plan import Pair, RowPlan, shifted


class BatchCache(Cache):
    """Rows of different lengths, right-aligned behind left padding.

    Everything that decides anything is a number on the host; `offset` and `left_padding` are arrays made
    from those when asked for.

    Attributes:
        row_growth: how large a part of a batch's rows its buffers have room for besides, once rows have joined it
            twice. The next rows to join are then written there, and nothing is copied. 0 for no spare rows. Copies of
            the whole batch for another reason, such as more columns or a second row that leaves, leave none until rows
            join again.
    """

    row_growth = 0.125
    _keys: mx.array | None
    _values: mx.array | None
    _pads: Ints
    _offsets: Ints
    _pending: Pending | None
    _joined = False
    _joined_since_filter = False

    @property
    def keys(self) -> mx.array | None:
        """(B, H, S, D), or None before the first update; without the buffer's spare rows, so not to be written into."""
        return self._without_spare_rows(self._keys)

    @keys.setter
    def keys(self, keys: mx.array | None) -> None:
        self._keys = keys

    @property
    def values(self) -> mx.array | None:
        """(B, H, S, Dv), or None."""
        return self._without_spare_rows(self._values)

    @values.setter
    def values(self, values: mx.array | None) -> None:
        self._values = values

    def _without_spare_rows(self, buffer: mx.array | None) -> mx.array | None:
        return buffer if buffer is None or buffer.shape[0] == self._rows() else buffer[: self._rows()]

    def _buffers(self) -> Pair | None:
        return None if self._keys is None or self._values is None else (self._keys, self._values)

    def _begin(self, left_padding: Sequence[int] | mx.array) -> None:
        self._set_rows(row_numbers("left_padding", left_padding))
        self.keys = None
        self.values = None

    def _set_rows(self, pads: Ints, offsets: Ints | None = None, pending: Pending | None = None) -> None:
        self._pads = pads
        self._offsets = tuple(-p for p in pads) if offsets is None else offsets
        self._pending = pending

    def _rows(self) -> int:
        return len(self._pads)

    def _tails(self) -> Ints:
        return (0,) * self._rows() if self._pending is None else self._pending.tails

    def empty(self) -> bool:
        """Whether there is no row, or no column stored."""
        return self._columns() == 0 or self._rows() == 0

    def _stored_arrays(self) -> tuple[mx.array | None, mx.array | None]:
        keys, values = self._keys, self._values
        rows = len(self._pads)
        if keys is None or values is None or keys.shape[0] == rows == values.shape[0]:
            return super()._stored_arrays()
        stored = self._columns()
        return keys[:rows, :, :stored], values[:rows, :, :stored]

    def _check_announced(self, n: int) -> None:
        """Refuse n columns that cannot follow what prepare() announced."""
        if self._pending is not None:
            self._pending.update(n, self._due())

    def _due(self) -> Ints:
        return tuple(max(0, -o) for o in self._offsets)

    def _sinks(self) -> int:
        """How many slots at the front hold sinks, once anything is stored."""
        return 0

    @property
    def offset(self) -> mx.array:
        """The position that each row's next column gets, int32 (B,).

        It counts the row's tokens and the right pads at its end; left pads still due count down from
        `-left_padding`.
        """
        return int_array(self._offsets)[...]

    @property
    def left_padding(self) -> mx.array:
        """How many columns at the front hold none of the row's tokens, left pads due included; int32 (B,)."""
        return int_array(self._pads)[...]

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | mx.array | None = None,
        lengths: Sequence[int] | mx.array | None = None,
        right_padding: Sequence[int] | mx.array | None = None,
    ) -> None:
        """Announce a ragged prefill. One number a row in each list.

        Args:
            left_padding: pads to come before each row's first token.
            lengths: how many of the columns to come are no right pads, left pads due included.
            right_padding: how many right pads come after those. Without lengths, the next update is the
                whole prefill.

        Raises:
            ValueError: padding is pending already; a list of another length than the batch, or with a
                negative number; lengths[b] + right_padding[b] differ between rows; lengths shorter than
                the left pads due; left padding on a batch that holds columns or tokens.
        """
        if self._pending is not None:
            raise ValueError("prepare while padding is pending: finalize() comes first")
        held = self._columns() or max((0, *self._offsets))  # a ring of one slot may hold a row without its tokens
        left, pending = announce(self._due(), held, left_padding, lengths, right_padding)
        self._pads = tuple(p + more for p, more in zip(self._pads, left, strict=True))
        self._offsets = tuple(o - more for o, more in zip(self._offsets, left, strict=True))
        self._pending = pending

    def finalize(self) -> None:
        """End a ragged prefill: each row's right pads go to its front. Nothing pending is fine."""
        tails, buffers = self._tails(), self._buffers()
        if any(tails) and buffers is not None:
            plan = pads_to_the_front(tails, self._sinks(), self._columns())
            self.keys, self.values = copy_pairs([buffers], plan, buffers[0].shape[2])
            self._pads = tuple(p + t for p, t in zip(self._pads, tails, strict=True))
            self._offsets = tuple(o - t for o, t in zip(self._offsets, tails, strict=True))
        self._pending = None

    def _is_pending(self) -> bool:
        return self._pending is not None

    def is_trimmable(self) -> bool:
        return self.trim_limit() >= min(self._offsets, default=0)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these rows, in this order; one named twice is forked.

        Args:
            batch_indices: row numbers, negative ones from the end. An array is read back to the host.

        Raises:
            IndexError: a row that is not there.
        """
        rows = check_rows("filter", batch_indices, self._rows())
        pads, offsets = (tuple(each[r] for r in rows) for each in (self._pads, self._offsets))
        pending = None if self._pending is None else self._pending.take(rows)
        first = self._columns() if not rows else self._useless_columns(pads)
        buffers = self._buffers()
        if buffers is not None and (first or rows != tuple(range(self._rows()))):
            allocated = len(rows)
            if self._joined_since_filter:
                room = self._rows_to_allocate([p - first for p in pads])
                allocated = max(allocated, min(room, *(b.shape[0] for b in buffers)))
            self.keys, self.values = self._taken(buffers, rows, first, allocated)
        self._joined_since_filter = False
        self._drop_front(first)
        self._set_rows(tuple(p - first for p in pads), offsets, pending)

    def _taken(self, buffers: Pair, rows: Ints, first: int, allocated: int) -> Pair:
        """Some rows of the buffers without their first columns."""
        stored, width = self._columns(), buffers[0].shape[2] - first
        if first and kernel_takes([buffers], len(rows)):
            # Attention of one query is fastest there over whole steps of columns.
            width = self._width_for(stored - first)
        return copy_pairs([buffers], shifted(rows, self._first_columns(), stored, -first), width, allocated)

    def _width_for(self, columns: int) -> int:
        """How many columns a new buffer has that holds so many."""
        raise NotImplementedError

    def _first_columns(self) -> Ints:
        """Before which column nothing of each row needs to be kept."""
        raise NotImplementedError

    def _useless_columns(self, pads: Ints) -> int:
        """How many front columns a filter drops when rows with these pads are left."""
        raise NotImplementedError

    def _drop_front(self, n: int) -> None:
        """Note that the first n columns are gone: all of them if no row is left."""
        raise NotImplementedError

    def _append_rows(self, other: "BatchCache", mine: RowPlan, theirs: RowPlan, stop: int, stays: bool) -> None:
        """Put the other batch's rows behind these, both ending before column `stop`.

        `mine` and `theirs` are the rows of each; `stays` says that these rows' columns lie there already. The heads
        have been compared, and the caller notes the new number of columns.
        """
        pads = [p + stop - side._columns() for side in (self, other) for p in side._pads]
        pending = join_pending(self._pending, other._pending, self._rows(), other._rows())
        held, second = self._buffers(), other._buffers()
        if held is not None and stays and min(b.shape[0] for b in held) >= len(pads):
            self.keys, self.values = write_rows(held, self._rows(), second, theirs)
        elif held is not None or second is not None:
            rows = self._rows_to_allocate(pads)
            self.keys, self.values = extend_rows(held, second, mine, theirs, self._width_for(stop), rows)
        self._joined = self._joined_since_filter = self._rows() > 0 or self._joined
        self._set_rows(tuple(pads), self._offsets + other._offsets, pending)

    def _rows_to_allocate(self, pads: Sequence[int]) -> int:
        """How many rows a buffer gets for those with these pads: more once rows have joined, as more will."""
        rows = len(pads)
        if not self._joined or not self._may_have_spare_rows(pads):
            return rows
        if not 0 <= self.row_growth < inf:
            raise ValueError(f"row_growth must be a number from 0 on, but is {self.row_growth}")
        return rows + int(rows * self.row_growth + 0.5)

    def _may_have_spare_rows(self, pads: Sequence[int]) -> bool:
        """Under CUDA attention without a mask is up to three times slower on a buffer with spare rows, so that only
        those batches have some that need a mask for their pads, and go on to need it."""
        return not on_cuda() or any(pads)
