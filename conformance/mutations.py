"""Files made wrong: bytes in, bytes out; the same seed gives the same file. Data alone, no MLX.

A mutation takes a `Draw` (random numbers, and the other files there are) and the content of a file, and returns what
has become of it. What no longer parses as a safetensors file is changed as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

Pairs = list[tuple[str, Any]]
"""A JSON object that may name a key twice."""

PAGE = 16384
"""What a mappable file's header is padded to."""
HUGE = (2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30)
WRONG: tuple[Any, ...] = (None, True, -1, 0, 1.5, float("nan"), "", "x", [], {}, [1], {"a": 1}, *HUGE)
DTYPES: tuple[Any, ...] = (
    "F32",
    "F16",
    "BF16",
    "F64",
    "I64",
    "I32",
    "U32",
    "U8",
    "BOOL",
    "C64",
    "F8_E4M3",
    "f32",
    "Q4",
    "",
    7,
    None,
    [],
)
KINDS = ("KVCache", "RotatingKVCache", "QuantizedKVCache", "ChunkedKVCache", "ConcatenateKVCache", "ArraysCache")
BATCHES = ("CacheList", "BatchKVCache", "BatchRotatingKVCache")
STRANGERS = (
    "TokenBuffer",
    "_BaseCache",
    "Cache",
    "dict",
    "os.system",
    "__class__",
    "",
    "kvcache",
    "KVCache ",
    "K" * 300,
)
CLASSES = (*KINDS, *BATCHES, *STRANGERS)
NAMES = (
    "",
    ".",
    "..",
    "0",
    "0.0",
    "0.9",
    "9.0",
    "0.-1",
    "-1.0",
    "0.0.0.0.0.0",
    "00.0",
    "x",
    "0.\u0663",
    "\ud800",
    "0.0\0",
)
NUMBERS = (
    "",
    "-1",
    "0",
    "1",
    "2",
    "255",
    "4294967296",
    "9" * 30,
    "9" * 6000,
    "1e3",
    "0x10",
    "\u0663",
    " 1",
    "1_0",
    "nan",
)
WORDS = (
    *NUMBERS,
    "True",
    "False",
    "scalar",
    "string",
    "none",
    "pickle",
    "0.0",
    "1.0",
    "0.0.0",
    "9.9.9",
    "\ud800",
    "a" * 70_000,
)


@dataclass(frozen=True)
class Draw:
    """What a mutation draws on."""

    random: Random
    others: Sequence[bytes]
    """The contents of other files."""
    reseal: Callable[[bytes], bytes] | None = None
    """Makes the checksum of a header right again, where the file has one."""


# -- the parts of a file --------------------------------------------------------------------------


class Parts(NamedTuple):
    """A safetensors file: the header's entries, the data, and of how many bytes length and header are a multiple."""

    header: Pairs
    data: bytes
    page: int


def split(content: bytes) -> Parts | None:
    """The parts of a file, or None where it is no safetensors file."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > len(content) - 8:
        return None
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        return None
    page = PAGE if (8 + length) % PAGE == 0 else 8
    return Parts(list(header.items()), content[8 + length :], page) if isinstance(header, dict) else None


def join(parts: Parts) -> bytes:
    """The file of these parts."""
    return with_header(text_of(parts.header, parts.page), parts.data)


def with_header(header: bytes, data: bytes) -> bytes:
    """The file of a header as it is written."""
    return len(header).to_bytes(8, "little") + header + data


def text_of(header: Pairs, page: int = 8) -> bytes:
    """The header as JSON text, padded with spaces."""
    text = ",".join(f"{_json(key)}:{_json(value)}" for key, value in header).join("{}").encode()
    return text + b" " * (-(8 + len(text)) % page)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def metadata_of(header: Pairs) -> dict[str, Any] | None:
    """The metadata among a header's entries."""
    return next((value for key, value in header if key == "__metadata__" and isinstance(value, dict)), None)


def _tensors(header: Pairs) -> list[int]:
    return [i for i, (key, value) in enumerate(header) if key != "__metadata__" and isinstance(value, dict)]


# -- bytes ----------------------------------------------------------------------------------------


def _flip(draw: Draw, content: bytes, start: int, stop: int) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.random.choice((1, 1, 1, 2, 8))):
        if start < stop:
            changed[draw.random.randrange(start, stop)] ^= 1 << draw.random.randrange(8)
    return bytes(changed)


def _header_end(content: bytes) -> int:
    return min(len(content), 8 + int.from_bytes(content[:8], "little"))


def flip_anywhere(draw: Draw, content: bytes) -> bytes:
    return _flip(draw, content, 0, len(content))


def flip_length(draw: Draw, content: bytes) -> bytes:
    return _flip(draw, content, 0, min(8, len(content)))


def flip_header(draw: Draw, content: bytes) -> bytes:
    return _flip(draw, content, 8, _header_end(content))


def flip_data(draw: Draw, content: bytes) -> bytes:
    return _flip(draw, content, _header_end(content), len(content))


def overwrite(draw: Draw, content: bytes) -> bytes:
    """A run of bytes becomes zeros, ones or noise."""
    if not content:
        return content
    start = draw.random.randrange(len(content))
    stop = min(len(content), start + draw.random.choice((1, 8, 64, 4096)))
    run = draw.random.choice((bytes(stop - start), b"\xff" * (stop - start), draw.random.randbytes(stop - start)))
    return content[:start] + run + content[stop:]


def truncate(draw: Draw, content: bytes) -> bytes:
    end = _header_end(content)
    marks = (0, 1, 7, 8, 9, end - 1, end, end + 1, len(content) - 1, len(content) - 8, len(content) // 2)
    return content[: max(0, draw.random.choice((*marks, draw.random.randrange(len(content) + 1))))]


def extend(draw: Draw, content: bytes) -> bytes:
    count = draw.random.choice((1, 7, 8, 4096, 16384))
    return content + draw.random.choice((bytes(count), draw.random.randbytes(count), content))


def drop_bytes(draw: Draw, content: bytes) -> bytes:
    """A run of bytes in the middle goes."""
    start = draw.random.randrange(len(content) + 1)
    return content[:start] + content[start + draw.random.choice((1, 8, 100)) :]


def edit_length(draw: Draw, content: bytes) -> bytes:
    """Another header length."""
    length = int.from_bytes(content[:8], "little")
    near = (
        length - 8,
        length - 1,
        length + 1,
        length + 8,
        length * 2,
        len(content) - 8,
        len(content) - 7,
        len(content),
    )
    number = draw.random.choice((0, 1, 2, *near, *HUGE, draw.random.randrange(2**64)))
    return (number % 2**64).to_bytes(8, "little") + content[8:]


# -- the header -----------------------------------------------------------------------------------


def edit_entry(draw: Draw, content: bytes) -> bytes:
    """A tensor gets another dtype, shape or place."""
    parts = split(content)
    if parts is None or not _tensors(parts.header):
        return flip_anywhere(draw, content)
    header, data, page = parts
    random = draw.random
    name, entry = header[i := random.choice(_tensors(header))]
    entry = _copy(entry)
    field = random.choice(("dtype", "shape", "data_offsets", "another", "gone", "all"))
    if field == "dtype":
        entry["dtype"] = random.choice(DTYPES)
    elif field == "shape":
        entry["shape"] = _other_shape(random, entry.get("shape"))
    elif field == "data_offsets":
        entry["data_offsets"] = _other_offsets(random, entry.get("data_offsets"), len(data))
    elif field == "another":
        entry[random.choice(("dtypes", "x", ""))] = random.choice(WRONG)
    elif field == "gone":
        entry.pop(random.choice(list(entry) or [""]), None)
    else:
        entry = random.choice(WRONG)
    header[i] = name, entry
    return join(Parts(header, data, page))


def _are_ints(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _other_shape(random: Random, shape: Any) -> Any:
    if not _are_ints(shape) or random.random() < 0.2:
        return random.choice(WRONG)
    shape = list(shape)
    match random.randrange(8):
        case 0:
            shape.insert(random.randrange(len(shape) + 1), random.choice((0, 1, 2, -1, *HUGE)))
        case 1 if shape:
            shape.pop(random.randrange(len(shape)))
        case 2 if shape:
            shape[random.randrange(len(shape))] = random.choice(WRONG)
        case 3:
            random.shuffle(shape)
        case 4 if shape:
            shape[random.randrange(len(shape))] += random.choice((-1, 1))
        case 5:
            shape = [2**32, 2**32, *shape]
        case 6:
            shape = [0, 2**62, 2**62]
        case _:
            shape = [1] * random.choice((33, 1000, 20_000)) + shape
    return shape


def _other_offsets(random: Random, offsets: Any, size: int) -> Any:
    if not _are_ints(offsets) or len(offsets) != 2 or random.random() < 0.2:
        return random.choice((*WRONG, [0], [0, 4, 8], [0, size], [size, 0], ["0", "4"], [0.0, 4.0], [None, None]))
    start, stop = offsets
    by = random.choice((-4096, -8, -4, -1, 1, 4, 8, 4096, size, *HUGE))
    return random.choice(([start + by, stop], [start, stop + by], [start + by, stop + by], [stop, start], [-by, by]))


def edit_names(draw: Draw, content: bytes) -> bytes:
    """A tensor is renamed, named twice, dropped or added; or two change their names."""
    parts = split(content)
    if parts is None or not _tensors(parts.header):
        return flip_anywhere(draw, content)
    header, data, page = parts
    random = draw.random
    tensors = _tensors(header)
    i, j = random.choice(tensors), random.choice(tensors)
    (name, entry), (other, of_other) = header[i], header[j]
    match random.randrange(7):
        case 0:
            header[i] = random.choice((*NAMES, name + ".0", name[:-1], name + "0", other)), entry
        case 1:
            del header[i]
        case 2:
            header.append((random.choice((*NAMES, name, name + ".0")), entry))
        case 3:
            header[i], header[j] = (name, of_other), (other, entry)
        case 4:
            header.append(("__metadata__", random.choice(({}, None, [], {"0": "x"}, metadata_of(header)))))
        case 5:
            random.shuffle(header)
        case _:
            header = [pair for pair in header if pair[0] == "__metadata__"]
    return join(Parts(header, data, page))


def edit_metadata(draw: Draw, content: bytes) -> bytes:
    """The metadata says something else: classes, scalars, checksums, the user's own."""
    parts = split(content)
    found = parts and metadata_of(parts.header)
    if parts is None or not found:
        return edit_names(draw, content)
    header, data, page = parts
    random = draw.random
    metadata: Any = _copy(found)
    key = random.choice(list(metadata))
    match random.randrange(9):
        case 0:
            metadata[key] = random.choice(WORDS)
        case 1:
            metadata[key] = random.choice(CLASSES)
        case 2:
            metadata[key] = random.choice(WRONG)
        case 3:
            del metadata[key]
        case 4:
            metadata[random.choice((key + ".0", key[:-1], key + "0", *NAMES))] = random.choice((metadata[key], *WORDS))
        case 5:
            other = random.choice(list(metadata))
            metadata[key], metadata[other] = metadata[other], metadata[key]
        case 6:
            metadata[random.choice(NAMES)] = metadata.pop(key)
        case 7:
            metadata = random.choice((*WRONG, {key: metadata[key]}, {}))
        case _:
            metadata[key] = _other_text(random, metadata[key])
    header = [(name, metadata if name == "__metadata__" else value) for name, value in header]
    return join(Parts(header, data, page))


def _other_text(random: Random, text: Any) -> Any:
    """One character, or one number in it, is another."""
    if not isinstance(text, str) or not text:
        return "x"
    i = random.randrange(len(text))
    return (
        text[:i]
        + random.choice(("", "0", "1", "9", "f", '"', "\0", "}", "[" * 2000, chr(ord(text[i]) ^ 1)))
        + text[i + 1 :]
    )


def edit_json(draw: Draw, content: bytes) -> bytes:
    """A header that is other JSON, or none."""
    parts = split(content)
    header, data, page = parts or Parts([], content, 8)
    random = draw.random
    text = text_of(header, page)
    deep = random.choice((100, 5_000, 200_000))
    match random.randrange(10):
        case 0:
            text = random.choice((b"", b"null", b"[]", b"{}", b"1", b'"x"', b"{", b"{}{}", b"\xff\xfe", b"nan"))
        case 1:
            text = b"[" * deep
        case 2:
            text = b'{"a":' * deep
        case 3:
            text = text[:-1].rstrip()[:-1] + b',"x":' + b"[" * deep + b"]" * deep + b"}"
        case 4:
            text = b"\xef\xbb\xbf" + text
        case 5:
            text += random.choice((b"\0\0", b"x", b"{}", b" " * 100_000))
        case 6:
            text = text.replace(b'"', b"'", random.choice((1, 2, -1)))
        case 7:
            text = text[:-1].rstrip()[:-1] + b',"x":' + b"9" * random.choice((30, 5_000)) + b"}"
        case 8:
            text = text.replace(b":", random.choice((b": ", b":-", b":\xc3\x28", b"::")), random.choice((1, 5, -1)))
        case _:
            text = text[:1] + b'"\\ud800":"\\ud800",' + text[1:]
    return with_header(text, data)


# -- several files --------------------------------------------------------------------------------


def splice(draw: Draw, content: bytes) -> bytes:
    """Parts of two files."""
    other = draw.random.choice(draw.others)
    mine, theirs = split(content), split(other)
    cut = draw.random.randrange(len(content) + 1)
    if mine is None or theirs is None:
        return content[:cut] + other[cut:]
    match draw.random.randrange(4):
        case 0:
            return join(mine._replace(data=theirs.data))
        case 1:
            return content[:cut] + other[cut:]
        case 2:
            metadata = metadata_of(theirs.header)
            header = [(key, metadata if key == "__metadata__" else value) for key, value in mine.header]
            return join(mine._replace(header=header))
        case _:
            entries = dict(theirs.header)
            return join(mine._replace(header=[(key, entries.get(key, value)) for key, value in mine.header]))


def swap_tensors(draw: Draw, content: bytes) -> bytes:
    """Two tensors of the same size change places in the data."""
    parts = split(content)
    if parts is None:
        return flip_anywhere(draw, content)
    header, data, _ = parts
    offsets = [header[i][1].get("data_offsets") for i in _tensors(header)]
    places = [(each[0], each[1]) for each in offsets if _are_ints(each) and len(each) == 2]
    pairs = [(a, b) for a in places for b in places if a < b and a[1] - a[0] == b[1] - b[0] > 0 and a[1] <= b[0]]
    if not pairs:
        return flip_data(draw, content)
    (a, b), (c, d) = draw.random.choice(pairs)
    return join(parts._replace(data=data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]))


def swap_words(draw: Draw, content: bytes) -> bytes:
    """Two words or blocks near each other in the data change places: what a plain sum does not see."""
    start = _header_end(content)
    size = draw.random.choice((1, 4, 8, 64, 256, 4096))
    count = (len(content) - start) // size
    if count < 2:
        return flip_data(draw, content)
    i = draw.random.randrange(count)
    j = min(count - 1, i + draw.random.randint(1, 64))
    (a, b), (c, d) = ((start + k * size, start + (k + 1) * size) for k in (i, j))
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:] if i < j else content


def resealed(mutation: Mutation) -> Mutation:
    """A mutation whose file has the right checksum again, so that what lies behind it is reached."""

    def mutate(draw: Draw, content: bytes) -> bytes:
        assert draw.reseal is not None
        return draw.reseal(mutation(draw, content))

    return mutate


Mutation = Callable[[Draw, bytes], bytes]

MUTATIONS: dict[str, Mutation] = {
    mutation.__name__.replace("_", "-"): mutation
    for mutation in (
        flip_anywhere,
        flip_length,
        flip_header,
        flip_data,
        overwrite,
        truncate,
        extend,
        drop_bytes,
        edit_length,
        edit_entry,
        edit_names,
        edit_metadata,
        edit_json,
        splice,
        swap_tensors,
        swap_words,
    )
}
WEIGHTS = {"edit-entry": 3, "edit-names": 2, "edit-metadata": 5, "edit-json": 2}
"""How often a mutation is drawn, where that is not once."""

RESEALED: dict[str, Mutation] = {
    f"{name}-resealed": resealed(MUTATIONS[name])
    for name in ("flip-header", "edit-entry", "edit-names", "edit-metadata")
}
"""For files with a checksum of the header."""
