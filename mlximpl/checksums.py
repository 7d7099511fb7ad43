"""A checksum of a tensor, from its bytes in row-major order.

up to 64 KiB    their crc32
above           they are words of 4 bytes, little-endian, in rows of 1028: the crc32 of the sums of the columns, modulo
                2**32, followed by the bytes that do not fill a row

MLX adds words at the speed of memory, on its own threads, where a crc32 of a long tensor takes longer than reading it.
1028 is 4 times the prime 257, so that what lies less than 257 blocks of any power of two apart is never in the same
column: blocks that change places are seen, as is every fault shorter than a row.
"""

import zlib
from typing import Any, NamedTuple

import mlx.core as mx

SHORT = 64 << 10
WIDTH = 1028
ROW = 4 * WIDTH
PIECE = 1024 * ROW
WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
ELEMENTS_MOST = 2**31 - 1
"""The longest axis that MLX has, and so the longest tensor that it can look at as one row of words."""


class Sums(NamedTuple):
    """The sums of the columns, (1028,), and all of the words: perhaps not evaluated yet."""

    columns: mx.array
    words: Any

    def checksum(self) -> int:
        """The checksum; evaluates the arrays."""
        mx.eval(self)
        content = bytes_of(self.words)
        return zlib.crc32(content[len(content) // ROW * ROW :], zlib.crc32(bytes_of(self.columns)))


def sums_of(array: mx.array) -> Sums:
    """What the checksum of more than 64 KiB is made of; the array is contiguous in row-major order.

    It is made on the CPU, where a file is read and written, so that nothing moves to a GPU for it.
    """
    with mx.stream(mx.cpu):
        words = array.view(WORDS[min(array.itemsize, 4)])
        if words.size > ELEMENTS_MOST:
            return _sums_of_bytes(bytes_of(words))
        return Sums(_column_sums(words, words.nbytes // ROW), words)


def _sums_of_bytes(content: memoryview) -> Sums:
    columns, whole = mx.zeros((WIDTH,), mx.uint32), len(content) // ROW * ROW
    for at in range(0, whole, PIECE):
        given: Any = content[at : min(at + PIECE, whole)]
        columns = columns + _column_sums(mx.array(given), given.nbytes // ROW)
        mx.eval(columns)
    return Sums(columns, content)


def _column_sums(words: mx.array, rows: int) -> mx.array:
    """Of so many rows; made of few operations, since they take longer than to add up a tensor of 1 MB."""
    width = ROW // words.itemsize
    return mx.as_strided(words, (rows, width), (width, 1)).view(mx.uint32).sum(axis=0)


def bytes_of(words: Any) -> memoryview:
    """The bytes of an array or of a view, without a copy; evaluates the array."""
    view = memoryview(words)
    return view.cast("B") if view.nbytes else memoryview(b"")


def sums_if_long(array: mx.array) -> Sums | None:
    """`sums_of` an array of more than 64 KiB; a shorter one has none."""
    return sums_of(array) if array.nbytes > SHORT else None


def checksum_of(view: memoryview, sums: Sums | None) -> int:
    """The checksum of an array, of which these are the bytes and `sums_if_long`."""
    return zlib.crc32(view) if sums is None else sums.checksum()


def check_sum(name: str, found: int, expected: int) -> None:
    """Refuse bytes that are not those that were saved."""
    if found != expected:
        raise ValueError(f"tensor {name!r} was changed: it has the checksum {found:08x}, not {expected:08x}")
