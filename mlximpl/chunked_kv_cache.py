"""One sequence, or several of the same length, whose queries see their own chunk alone.

chunk_size = 4, six tokens, then maybe_trim_front()

positions        0  1  2  3 | 4  5        start_position 0
kept                   2  3 | 4  5        start_position 2, offset 6
"""

import mlx.core as mx

from .append import append_columns
from .cache import Cache
from .checks import check_size, check_update
from .states import state_buffers, state_elements, state_int


class ChunkedKVCache(Cache):
    """A growing cache that can drop what lies before its newest chunk.

    A query at position q sees the positions p <= q with p // chunk_size == q // chunk_size. The model makes that
    mask, from `start_position` and `offset`.

    Args:
        chunk_size: how many positions a chunk has, at least 1.

    Attributes:
        offset: how many tokens were fed: the position that the next one gets.
        start_position: the position of the oldest token held.

    Raises:
        ValueError: chunk_size is below 1.
    """

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = check_size("chunk_size", chunk_size, 1)
        self.keys = None
        self.values = None
        self.offset = 0
        self.start_position = 0
        self._front = 0  # slots before the oldest token: dropped, and not yet copied away
        self._fed = 0  # tokens of the last update, as long as they may be the next to go

    def _columns(self) -> int:
        return self.offset - self.start_position

    def maybe_trim_front(self) -> None:
        """Drop all but the newest `chunk_size` tokens."""
        dropped = self._columns() - self.chunk_size
        if dropped > 0:
            self.start_position += dropped
            self._front += dropped

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append N columns and return those from `start_position` on.

        Args:
            keys: (B, H, N, D).
            values: (B, H, N, Dv).

        Returns:
            keys (B, H, T, D) and values (B, H, T, Dv), where T is offset - start_position.

        Raises:
            ValueError: the arrays fit neither each other nor the cache, or N is 0.
        """
        rows = None if self.keys is None else self.keys.shape[0]
        n = check_update(keys, values, self.keys, self.values, rows)
        front = self._front
        full = self.keys is not None and front + self._columns() + n > self.keys.shape[2]
        if full or front >= self.step:
            front = 0  # what is live is copied to the front of a new buffer
        new_keys, new_values = (
            append_columns(held, new, front + self._columns(), self.step)
            for held, new in zip(self._from(front), (keys, values), strict=True)
        )
        self.keys, self.values, self._front = new_keys, new_values, front
        self.offset += n
        self._fed = n
        return self.keys_and_values()

    def _from(self, front: int) -> tuple[mx.array | None, mx.array | None]:
        """The buffers as they are, or for another front than theirs without what was dropped."""
        if front == self._front:
            return self.keys, self.values
        return self._stored_arrays()

    def _stored_arrays(self) -> tuple[mx.array | None, mx.array | None]:
        buffers = self._buffers()
        if buffers is None:
            return None, None
        start, stop = self._front, self._front + self._columns()
        if (start, stop) == (0, buffers[0].shape[2]):
            return buffers[0][...], buffers[1][...]
        return buffers[0][..., start:stop, :], buffers[1][..., start:stop, :]

    def size(self) -> int:
        return self._columns()

    def trim_limit(self) -> int:
        # The next query needs its own chunk from the beginning.
        first_whole_chunk = -(-self.start_position // self.chunk_size) * self.chunk_size
        return max(0, self.offset - first_whole_chunk)

    def is_trimmable(self) -> bool:
        return self._gives_all_back() or 1 < self._fed <= self.trim_limit()

    def _gives_all_back(self) -> bool:
        return self.trim_limit() >= self.offset

    def _trim(self, n: int) -> None:
        self._fed = 0
        self.offset -= n

    @property
    def state(self) -> tuple[object, ...]:
        """(keys, values, offset, chunk_size, start_position): mlx-lm's layout, the arrays cut to the columns stored."""
        return *self._stored_arrays(), self.offset, self.chunk_size, self.start_position

    @state.setter
    def state(self, state: object) -> None:
        kind = "ChunkedKVCache"
        elements = state_elements(kind, state, "keys, values, offset, chunk_size, start_position")
        keys, values, width = state_buffers(kind, elements[0], elements[1])
        offset = state_int(kind, "offset", elements[2], 0)
        chunk_size = state_int(kind, "chunk_size", elements[3], 1)
        # A later start would leave the next query without a part of its chunk.
        start = state_int(kind, "start_position", elements[4], 0, offset // chunk_size * chunk_size)
        if offset - start > width:
            raise ValueError(f"{kind} state: positions {start} to {offset} do not lie in {width} columns")
        self.keys, self.values, self._front, self._fed = keys, values, 0, 0
        self.offset, self.chunk_size, self.start_position = offset, chunk_size, start

    def __repr__(self) -> str:
        return (
            f"ChunkedKVCache(chunk_size={self.chunk_size}, start_position={self.start_position}, offset={self.offset})"
        )
