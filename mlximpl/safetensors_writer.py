"""Writing safetensors, one tensor after the other: no copy of more than two of them is ever made.

The header names a checksum of each tensor, which is known only when it has been written; so the header is written
last.

compact    header | 0.0 | 0.1 | 0.2
mappable   header and spaces | 0.0 | padding.0 | 0.1 | padding.1       each tensor at a multiple of 16 KiB
"""

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any, BinaryIO, NamedTuple

import mlx.core as mx

from .checksums import PIECE, Sums, bytes_of, checksum_of, sums_if_long
from .file_facts import checksums_text
from .safetensors_header import DIMENSIONS_MOST, DTYPES, LENGTH_MOST, NAMES, check_amount, with_checksums

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
    """Length and header, with zeros for the checksums; the data behind it starts at a multiple of `page` bytes."""
    document: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for item in items:
        document[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [at, at + item.nbytes]}
        at += item.nbytes
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % page)
    return len(text).to_bytes(8, "little") + text


def check_header(header: bytes) -> None:
    """Refuse what no reader would take."""
    if len(header) > LENGTH_MOST:
        raise ValueError(f"the metadata takes {len(header)} bytes, and {LENGTH_MOST} are the most")
    check_amount(header[8:])


def write_items(file: BinaryIO, items: list[Item], header: bytes) -> None:
    """Write a file.

    Args:
        file: empty, and seekable.
        items: the tensors in the order of the file. Each lets go of its content once that is written.
        header: length and header, with zeros for the checksums.
    """
    file.seek(len(header))  # zeros stand there until the end: a file that is not complete has no header
    arrays = (i for i, item in enumerate(items) if isinstance(item.content, mx.array))
    begun = {i: _begin(items, i) for i in islice(arrays, 1)}
    checksums = []
    for i, item in enumerate(items):
        begun |= {after: _begin(items, after) for after in islice(arrays, 1 if i in begun else 0)}
        checksum = _write(file, begun.pop(i) if i in begun else _Begun(item.content, None))
        if not item.name.startswith(PADDING):
            checksums.append(checksum)
    file.seek(0)
    file.write(with_checksums(header, checksums_text(checksums)))


class _Begun(NamedTuple):
    """A tensor on its way: its words, or bytes in place of one; and what the checksum of a long one is made of."""

    words: Any
    sums: Sums | None


def _begin(items: list[Item], i: int) -> _Begun:
    """Have MLX's threads copy a tensor and add it up, while the one before is written."""
    content: Any = items[i].content
    words = words_of(content)
    # An array that had to be computed for the file would stay in memory.
    items[i] = items[i]._replace(content=b"")
    begun = _Begun(words, sums_if_long(words))
    mx.async_eval(begun)  # type: ignore[no-untyped-call]
    return begun


def _write(file: BinaryIO, begun: _Begun) -> int:
    view = bytes_of(begun.words)
    for at in range(0, len(view), PIECE):
        file.write(view[at : at + PIECE])
    return checksum_of(view, begun.sums)


def words_of(array: mx.array) -> mx.array:
    """The elements of an array as words of the same size, in row-major order; not evaluated yet."""
    # A GPU has no float64, and needs none to look at its bytes.
    with mx.stream(mx.cpu if array.dtype == mx.float64 else mx.default_device()):
        return mx.contiguous(array if array.ndim else array[None]).view(DTYPES[NAMES[array.dtype]].words)
