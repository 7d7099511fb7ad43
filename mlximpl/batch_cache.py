"""What the two batches have in common: rows, their padding, and the ragged prefill."""

from collections.abc import Sequence

import mlx.core as mx

from .cache import Cache
from .checks import check_rows, row_numbers
from .extend import Columns, extend_rows
from .filter import take_rows
from .padding import Pending, announce, join_pending, shift_rows
from .row_numbers import Ints, RowNumbers


class BatchCache(Cache, RowNumbers):
    """Rows of different lengths, right-aligned behind left padding.

    Everything that decides anything is a number on the host; `offset` and `left_padding` are arrays made
    from those when asked for.
    """

    _pads: Ints
    _offsets: Ints
    _pending: Pending | None

    def _begin(self, left_padding: Sequence[int] | mx.array) -> None:
        self._set_rows(row_numbers("left_padding", left_padding))
        self.keys = None
        self.values = None

    def _set_rows(self, pads: Ints, offsets: Ints | None = None, pending: Pending | None = None) -> None:
        self._pads = pads
        self._offsets = tuple(-p for p in pads) if offsets is None else offsets
        self._pending = pending
        self._arrays = {}

    def _rows(self) -> int:
        return len(self._pads)

    def _tails(self) -> Ints:
        return (0,) * self._rows() if self._pending is None else self._pending.tails

    def empty(self) -> bool:
        """Whether there is no row, or no column stored."""
        return self._columns() == 0 or self._rows() == 0

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
        return self._array("offset", self._offsets)

    @property
    def left_padding(self) -> mx.array:
        """How many columns at the front hold none of the row's tokens, left pads due included; int32 (B,)."""
        return self._array("left_padding", self._pads)

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
            stored = self._columns()
            self.keys, self.values = (shift_rows(b, tails, self._sinks(), stored) for b in buffers)
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
        if buffers is not None:
            self.keys, self.values = (take_rows(b, rows, first) for b in buffers)
        self._drop_front(first)
        self._set_rows(tuple(p - first for p in pads), offsets, pending)

    def _useless_columns(self, pads: Ints) -> int:
        """How many front columns a filter drops when rows with these pads are left."""
        raise NotImplementedError

    def _drop_front(self, n: int) -> None:
        """Note that the first n columns are gone: all of them if no row is left."""
        raise NotImplementedError

    def _append_rows(
        self, other: "BatchCache", mine: Columns | None, theirs: Columns | None, allocated: int | None = None
    ) -> None:
        """Put the other batch's rows behind these, both right-aligned.

        `mine` and `theirs` are the columns stored, or None where no update was seen; one of them may be a whole buffer
        of `allocated` columns. The heads have been compared, and the caller notes the new width.
        """
        heads = self._heads() or other._heads()
        width = max(self._columns(), other._columns())
        pending = join_pending(self._pending, other._pending, self._rows(), other._rows())
        if heads is not None:
            rows = self._rows(), other._rows()
            self.keys, self.values = extend_rows(mine, theirs, *rows, heads, width, allocated)
        pads = [p + width - side._columns() for side in (self, other) for p in side._pads]
        self._set_rows(tuple(pads), self._offsets + other._offsets, pending)
