"""Writing safetensors, one tensor after the other: no copy of all of them is ever made.

The header names a checksum of each tensor, which is known only when it has been written; so the header is written
twice, at first with zeros in their places.

compact    header | 0.0 | 0.1 | 0.2
mappable   header and spaces | 0.0 | padding.0 | 0.1 | padding.1       each tensor at a multiple of 16 KiB
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import BinaryIO, NamedTuple

import mlx.core as mx

from .checksums import PIECE, checksum_of
from .safetensors_header import DIMENSIONS_MOST, DTYPES, LENGTH_MOST, NAMES, check_amount, with_seal

PAGE = 16384
"""Apple's pages are this long; elsewhere they are shorter and divide it."""


PADDING = "padding."
"""How the names of the tensors that fill gaps begin."""


class Item(NamedTuple):
    """What goes into a file: a tensor, or bytes in place of one."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: mx.array | bytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].size


def item_of(name: str, array: mx.array) -> Item:
    """A tensor as it goes into a file. Raises ValueError for more axes than a reader takes."""
    if array.ndim > DIMENSIONS_MOST:
        raise ValueError(f"{name}: an array of {array.ndim} axes, and a file holds at most {DIMENSIONS_MOST}")
    return Item(name, NAMES[array.dtype], array.shape, array)


def with_padding(items: Sequence[Item]) -> list[Item]:
    """The items with bytes between them so that each begins at a page, and the last one's pages are whole."""
    padded, gaps = [], 0
    for item in items:
        padded.append(item)
        rest = -item.nbytes % PAGE
        if rest:
            padded.append(Item(f"{PADDING}{gaps}", "U8", (rest,), bytes(rest)))
            gaps += 1
    return padded


def header_bytes(items: Sequence[Item], metadata: Mapping[str, str], page: int) -> bytes:
    """Length and header; the data behind it starts at a multiple of `page` bytes."""
    document: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for item in items:
        document[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [at, at + item.nbytes]}
        at += item.nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % page)
    return len(text).to_bytes(8, "little") + with_seal(text)


def check_header(header: bytes) -> None:
    """Refuse what no reader would take."""
    if len(header) > LENGTH_MOST:
        raise ValueError(f"the metadata takes {len(header)} bytes, and {LENGTH_MOST} are the most")
    check_amount(header[8:])


def write_items(file: BinaryIO, items: list[Item], header: Callable[[Sequence[int]], bytes]) -> None:
    """Write a file.

    Args:
        file: empty, and seekable.
        items: the tensors in the order of the file. Each lets go of its content once that is written.
        header: gives length and header for the checksum of each item; of the same size whatever those are.
    """
    file.write(header([0] * len(items)))
    checksums = []
    for i, item in enumerate(items):
        checksums.append(_write(file, item.content))
        # An array that had to be computed for the file would stay in memory.
        items[i] = item._replace(content=b"")
    file.seek(0)
    file.write(header(checksums))


def _write(file: BinaryIO, content: mx.array | bytes) -> int:
    if isinstance(content, bytes):
        file.write(content)
        return zlib.crc32(content)
    words = words_of(content)
    view = memoryview(words).cast("B") if words.size else memoryview(b"")  # type: ignore[arg-type]
    for at in range(0, len(view), PIECE):
        file.write(view[at : at + PIECE])
    return checksum_of(words, view)


def words_of(array: mx.array) -> mx.array:
    """The elements of an array as words of the same size, in row-major order and evaluated."""
    # A GPU has no float64, and needs none to look at its bytes.
    with mx.stream(mx.cpu if array.dtype == mx.float64 else mx.default_device()):
        words = mx.contiguous(array if array.ndim else array[None]).view(DTYPES[NAMES[array.dtype]].words)
        mx.eval(words)
    return words
