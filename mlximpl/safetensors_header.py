"""Reading a safetensors header, whoever wrote it: nothing that it says is believed before it is checked.

8 bytes   the header's length, little-endian
header    {"__metadata__": {"key": "value"}, "0.1": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
data      the tensors, one behind the other, without holes

A ValueError here is a reason without a file's name; `load_prompt_cache` adds that.
"""

import json
import re
import zlib
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import mlx.core as mx


class Words(NamedTuple):
    """A dtype of safetensors: MLX's, its bytes an element, and words of the same size as MLX and memoryview have them.

    `format` is memoryview's name of elements or, where it has none, of the words.
    """

    dtype: mx.Dtype
    size: int
    words: mx.Dtype
    format: str


DTYPES = {
    "BOOL": Words(mx.bool_, 1, mx.uint8, "?"),
    "U8": Words(mx.uint8, 1, mx.uint8, "B"),
    "I8": Words(mx.int8, 1, mx.uint8, "b"),
    "U16": Words(mx.uint16, 2, mx.uint16, "H"),
    "I16": Words(mx.int16, 2, mx.uint16, "h"),
    "F16": Words(mx.float16, 2, mx.uint16, "H"),
    "BF16": Words(mx.bfloat16, 2, mx.uint16, "H"),
    "U32": Words(mx.uint32, 4, mx.uint32, "I"),
    "I32": Words(mx.int32, 4, mx.uint32, "i"),
    "F32": Words(mx.float32, 4, mx.uint32, "f"),
    "U64": Words(mx.uint64, 8, mx.uint64, "Q"),
    "I64": Words(mx.int64, 8, mx.uint64, "q"),
    "F64": Words(mx.float64, 8, mx.uint64, "Q"),
    "C64": Words(mx.complex64, 8, mx.uint64, "Q"),
}
NAMES = {words.dtype: name for name, words in DTYPES.items()}

LENGTH_MOST = 100_000_000
"""The longest header, as in every safetensors reader."""
STRINGS_MOST = 200_000
"""The most strings in a header: some 30,000 tensors."""
OUTSIDE_MOST = 2 << 20
"""The most bytes of a header outside of its strings. As objects they take 24 times as much."""
WIDE_MOST = 8 << 20
"""The longest header with characters beyond ASCII. One of them may make every other take four bytes."""
DIMENSIONS_MOST = 32
SIZE_MOST = 2**31 - 1
"""The longest axis that MLX has."""

MANY_DIGITS = re.compile("[0-9]{21}")

SEAL_AT = b'{"__metadata__":{"2.0":"{\\"seal\\":\\"'
SEAL_WIDTH = 8
CHECKSUMS = b'\\"checksums\\":\\"'
"""What stands before the checksums. Only the seal, a number and the layout's name stand before that."""


ENTRY = {"dtype", "shape", "data_offsets"}


class Tensor(NamedTuple):
    """A tensor in a file: its dtype as safetensors names it, its shape, and where its bytes lie in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class Header(NamedTuple):
    """A header that was checked. `sealed` is whether its seal is right, and None if it has none."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    sealed: bool | None


def read_header(read: Callable[[int, int], bytes], size: int) -> Header:
    """Read and check the header of a file.

    Args:
        read: gives the bytes at an offset, of a length; both lie within the file.
        size: the file's bytes.

    Raises:
        ValueError: it is no safetensors header, or does not fit the file.
    """
    if size < 8:
        raise ValueError(f"it has {size} bytes, and safetensors begins with 8 that tell the header's length")
    length = int.from_bytes(read(0, 8), "little")
    if not 2 <= length <= min(size - 8, LENGTH_MOST):
        raise ValueError(f"its header is said to be {length} bytes long, in a file of {size}")
    raw = read(8, length)
    check_amount(raw)
    sealed = seal_fits(raw)
    stop = raw.rfind(b"}") + 1
    if raw[stop:] == b" " * (length - stop):
        raw = raw[:stop]  # a mappable file's header ends in a page of spaces
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"its header is not UTF-8: {error.reason} at byte {error.start}") from None
    del raw
    document = parse_json(text, "its header")
    if not isinstance(document, dict):
        raise ValueError("its header is not a JSON object")
    metadata = _metadata(document.pop("__metadata__", None))
    return Header(_tensors(document, 8 + length, size), metadata, sealed)


def seal_of(raw: bytes) -> bytes:
    """The checksum of a header with zeros in its seal's place, as eight hex digits."""
    at = len(SEAL_AT)
    crc = zlib.crc32(raw[at + SEAL_WIDTH :], zlib.crc32(b"0" * SEAL_WIDTH, zlib.crc32(raw[:at])))
    return b"%08x" % crc


def with_seal(raw: bytes) -> bytes:
    """The header with its seal, which must begin with SEAL_AT and eight characters to be replaced."""
    at = len(SEAL_AT)
    return raw[:at] + seal_of(raw) + raw[at + SEAL_WIDTH :]


def with_checksums(header: bytes, checksums: str) -> bytes:
    """Length and header of one of our files, with checksums in place of the zeros, and sealed."""
    at = header.index(CHECKSUMS) + len(CHECKSUMS)
    return header[:8] + with_seal(header[8:at] + checksums.encode() + header[at + len(checksums) :])


def seal_fits(raw: bytes) -> bool | None:
    """Whether the seal of a header is right; None if it has none."""
    at = len(SEAL_AT)
    return raw[at : at + SEAL_WIDTH] == seal_of(raw) if raw.startswith(SEAL_AT) else None


def check_amount(raw: bytes) -> None:
    """Refuse a header that would take many times its own size as Python objects."""
    if len(raw) > WIDE_MOST and not raw.isascii():
        raise ValueError(f"its header has {len(raw)} bytes; with characters beyond ASCII {WIDE_MOST} are the most")
    if len(raw) <= OUTSIDE_MOST:
        return
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings > STRINGS_MOST:
        raise ValueError(f"its header holds {strings} strings, and {STRINGS_MOST} are the most")
    outside = sum(len(part) for part in plain.split(b'"')[::2])
    # A string that does not end may leave any part outside, and is no JSON in any case.
    if outside > OUTSIDE_MOST + len(raw) - len(raw.rstrip(b" ")):
        raise ValueError(f"its header holds {outside} bytes beside its strings, and {OUTSIDE_MOST} are the most")


def parse_json(text: str, what: str) -> Any:
    """JSON without floats, repeated keys or deep nesting.

    Raises:
        ValueError: it is none; `what` names it in the message.
    """
    # A number of thousands of digits takes long to read; they may well stand in a string.
    whole = _int if MANY_DIGITS.search(text) else None
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_int=whole, parse_float=_no_number, parse_constant=_no_number
        )
    except RecursionError:
        raise ValueError(f"{what} is nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{what} {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"has {_short(twice)} twice")
    return found


def _int(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError(f"holds a number of {len(digits)} digits")
    return int(digits)


def _no_number(digits: str) -> Any:
    raise ValueError(f"holds {_short(digits)}, which is no whole number")


def _metadata(found: object) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("its __metadata__ is not strings by name")
    return found


def _tensors(entries: dict[str, Any], data: int, size: int) -> dict[str, Tensor]:
    tensors = {name: _tensor(name, entry, data, size) for name, entry in entries.items()}
    at = data
    for tensor, name in sorted((tensor[2:], name) for name, tensor in tensors.items()):
        start, stop = tensor
        if start != at:
            what = "overlaps the one before" if start < at else f"leaves a hole of {start - at} bytes"
            raise ValueError(f"tensor {_short(name)} {what}")
        at = stop
    if at != size:
        raise ValueError(f"its tensors end at byte {at}, but it has {size}")
    return tensors


def _tensor(name: str, entry: object, data: int, size: int) -> Tensor:
    if not isinstance(entry, dict) or entry.keys() != ENTRY:
        raise ValueError(f"tensor {_short(name)} is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        known = ", ".join(DTYPES)
        raise ValueError(f"tensor {_short(name)} has the dtype {_short(dtype)}, which is none of {known}")
    if not _are_whole(shape) or len(shape) > DIMENSIONS_MOST or max(shape, default=0) > SIZE_MOST:
        limits = f"at most {DIMENSIONS_MOST} axes up to {SIZE_MOST}"
        raise ValueError(f"tensor {_short(name)} has no shape of {limits}: {_short(shape)}")
    if not _are_whole(offsets) or len(offsets) != 2:
        raise ValueError(f"tensor {_short(name)} has no two data_offsets: {_short(offsets)}")
    start, stop = offsets
    if not start <= stop <= size - data:
        raise ValueError(f"tensor {_short(name)} lies at the bytes {start} to {stop} of {size - data}")
    needed = prod(shape) * DTYPES[dtype].size
    if needed != stop - start:
        raise ValueError(
            f"tensor {_short(name)} of shape {shape} and dtype {dtype} takes {needed} bytes, not {stop - start}"
        )
    return Tensor(dtype, tuple(shape), data + start, data + stop)


def _are_whole(numbers: object) -> bool:
    """Whether it is a list of ints, none negative; JSON's true is none."""
    return isinstance(numbers, list) and all(type(n) is int and n >= 0 for n in numbers)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
