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
ELEMENTS_MOST = 2**31 - 1
"""The longest axis that MLX has, and so the longest tensor that it can look at as one row of words."""


class Sums(NamedTuple):
    """The sums of the columns, (1028,), and what lies behind the last row: arrays, perhaps not evaluated yet."""

    columns: mx.array
    rest: mx.array

    def checksum(self) -> int:
        """The checksum; evaluates the arrays."""
        mx.eval(self)
        return zlib.crc32(_view(self.rest), zlib.crc32(_view(self.columns)))


def sums_of(array: mx.array) -> Sums:
    """What the checksum of more than 64 KiB is made of; the array is contiguous in row-major order.

    It is made on the CPU, where a file is read and written, so that nothing moves to a GPU for it.
    """
    if array.size > ELEMENTS_MOST:
        return _sums_of_bytes(memoryview(array).cast("B"))  # type: ignore[arg-type]
    with mx.stream(mx.cpu):
        if array.dtype == mx.float64:
            array = array.view(mx.uint64)
        flat = (array.view(mx.uint32) if array.itemsize >= 4 else array).reshape(-1)
        at = flat.nbytes // ROW * ROW // flat.itemsize
        return Sums(_column_sums(flat[:at].view(mx.uint32)), flat[at:])


def _sums_of_bytes(view: memoryview) -> Sums:
    columns, whole = mx.zeros((WIDTH,), mx.uint32), len(view) // ROW * ROW
    with mx.stream(mx.cpu):
        for at in range(0, whole, PIECE):
            columns = columns + _column_sums(_words(view[at : min(at + PIECE, whole)]).view(mx.uint32))
            mx.eval(columns)
    return Sums(columns, _words(view[whole:]))


def _column_sums(words: mx.array) -> mx.array:
    return words.reshape(-1, WIDTH).sum(axis=0)


def _words(view: memoryview) -> mx.array:
    given: Any = view
    return mx.array(given) if len(view) else mx.zeros((0,), mx.uint8)


def _view(array: mx.array) -> memoryview:
    return memoryview(array) if array.size else memoryview(b"")  # type: ignore[arg-type]


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
