"""Short words to write situations with. The cache is `x` unless said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from conformance import operations as ops
from conformance.payload import Config

Part: TypeAlias = "ops.Operation | Sequence[Part]"
"""An operation, or several."""


@dataclass(frozen=True)
class Situation:
    """A trace to record: its path below the directory of its source, what it shows, and its operations."""

    path: str
    description: str
    flags: tuple[str, ...]
    operations: tuple[ops.Operation, ...]
    config: Config


@dataclass(frozen=True)
class Deviation(Situation):
    """A situation whose last operation upstream gets wrong."""

    does: str
    right: str
    about: str
    """The observable that is wrong."""
    before: tuple[str, ...] = ()
    """Observables that are wrong at earlier steps and leave the caches in step."""
    garbage: bool = False
    """Upstream reads beyond an array, which differs from run to run: only that it was done is recorded."""


def situation(path: str, description: str, flags: str, *parts: Part, config: Config | None = None) -> Situation:
    """`flags` are separated by spaces."""
    return Situation(path, description, tuple(flags.split()), tuple(_flat(parts)), config or Config())


def deviation(
    path: str,
    description: str,
    flags: str,
    *parts: Part,
    about: str,
    does: str,
    right: str,
    before: tuple[str, ...] = (),
    garbage: bool = False,
    config: Config | None = None,
) -> Deviation:
    """A deviation, whose flags always hold `Deviation`."""
    operations = tuple(_flat(parts))
    words = ("Deviation", *flags.split())
    return Deviation(path, description, words, operations, config or Config(), does, right, about, before, garbage)


def _flat(parts: Sequence[Part]) -> Iterator[ops.Operation]:
    for part in parts:
        if isinstance(part, ops.Operation):
            yield part
        else:
            yield from _flat(part)


def solo(rows: str = "a", cache: str = "x") -> ops.New:
    """`KVCache()`; each letter is a row."""
    return ops.New(cache, "KVCache", tuple(rows))


def ring(max_size: int, keep: int = 0, row: str = "a", cache: str = "x") -> ops.New:
    """`RotatingKVCache(max_size, keep)`."""
    return ops.New(cache, "RotatingKVCache", (row,), max_size=max_size, keep=keep)


def batch(*padding: int, rows: str = "abcdef", cache: str = "x") -> ops.New:
    """`BatchKVCache(padding)`."""
    return ops.New(cache, "BatchKVCache", tuple(rows[: len(padding)]), padding)


def batch_ring(max_size: int, *padding: int, rows: str = "abcdef", cache: str = "x", keep: int = 0) -> ops.New:
    """`BatchRotatingKVCache(max_size, padding, keep)`."""
    return ops.New(cache, "BatchRotatingKVCache", tuple(rows[: len(padding)]), padding, max_size, keep)


def quantized(bits: int = 8, group_size: int = 32, rows: str = "a", cache: str = "x") -> ops.New:
    """`QuantizedKVCache(group_size, bits)`."""
    return ops.New(cache, "QuantizedKVCache", tuple(rows), group_size=group_size, bits=bits)


def concatenating(rows: str = "a", cache: str = "x") -> ops.New:
    """`ConcatenateKVCache()`."""
    return ops.New(cache, "ConcatenateKVCache", tuple(rows))


def chunked(chunk_size: int, rows: str = "a", cache: str = "x") -> ops.New:
    """`ChunkedKVCache(chunk_size)`."""
    return ops.New(cache, "ChunkedKVCache", tuple(rows), chunk_size=chunk_size)


def arrays(slots: int, rows: str = "a", padding: Sequence[int] | None = None, cache: str = "x") -> ops.New:
    """`ArraysCache(slots, left_padding)`."""
    given = None if padding is None else tuple(padding)
    return ops.New(cache, "ArraysCache", tuple(rows), left_padding=given, slots=slots)


def several(*children: ops.Child, rows: str = "a", padding: Sequence[int] | None = None, cache: str = "x") -> ops.New:
    """`CacheList(*children)`."""
    given = None if padding is None else tuple(padding)
    return ops.New(cache, "CacheList", tuple(rows), left_padding=given, children=children)


def slide(cache: str = "x") -> ops.TrimFront:
    """`maybe_trim_front`."""
    return ops.TrimFront(cache)


def quantize(names: str, bits: int = 4, into: str = "y", cache: str = "x") -> ops.ToQuantized:
    """`to_quantized(group_size=32, bits=bits)`."""
    return ops.ToQuantized(cache, into, tuple(names), 32, bits)


def feed(*tokens: int, cache: str = "x", window: int | None = None, array: bool = False) -> tuple[Part, ...]:
    """An update for each number."""
    return tuple(ops.Update(cache, count, window, array) for count in tokens)


def ones(times: int, cache: str = "x", window: int | None = None) -> tuple[Part, ...]:
    """That many updates of one token."""
    return feed(*[1] * times, cache=cache, window=window)


def mask(tokens: int, window: int | None = None, array: bool = False, cache: str = "x") -> ops.Mask:
    return ops.Mask(cache, tokens, window, array)


def merge(caches: str, names: str, into: str = "x") -> ops.Merge:
    """Each letter is a cache, and a name for its row."""
    return ops.Merge(into, tuple(caches), tuple(names))


def prepare(*lengths: int, padding: Sequence[int] = (), cache: str = "x") -> ops.Prepare:
    """Columns of each row that are no right pads; the padding fills them up to the longest unless it is given."""
    longest = max(lengths)
    right = tuple(padding) or tuple(longest - length for length in lengths)
    return ops.Prepare(cache, lengths=lengths, right_padding=right)


def finalize(cache: str = "x") -> ops.Finalize:
    return ops.Finalize(cache)


def keep(rows: str, names: str | None = None, cache: str = "x") -> ops.Filter:
    """`filter` to these rows."""
    return ops.Filter(cache, tuple(rows), tuple(rows if names is None else names))


def extend(other: str, names: str, cache: str = "x") -> ops.Extend:
    return ops.Extend(cache, other, tuple(names))


def extract(row: str, into: str, name: str, cache: str = "x") -> ops.Extract:
    return ops.Extract(cache, row, into, name)


def trim(tokens: int, cache: str = "x") -> ops.Trim:
    return ops.Trim(cache, tokens)


def copy(names: str, into: str = "y", cache: str = "x") -> ops.Copy:
    return ops.Copy(cache, into, tuple(names))


def restore(names: str, into: str = "y", cache: str = "x") -> ops.Restore:
    return ops.Restore(cache, into, tuple(names))
