"""The files that are right, from which the fuzzer makes wrong ones; and the seal of a header, made anew.

The seal is computed here by itself, from what a file says: a fault in mlximpl's own would not show otherwise.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlximpl
from conformance.file_goldens import find_file_goldens, load_file_golden
from conformance.file_situations import NEW, situations
from conformance.mutations import metadata_of, split, text_of, with_header
from conformance.record_files import all_built

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
METADATA = {"model": "tiny", "a.b": "c", "0": "übel\n🙂"}
FACTS = "2.0"
"""The entry of the metadata that holds the seal."""
BEGIN = b'{"__metadata__":{"2.0":"{\\"seal\\":\\"'
"""How a header with a seal begins; eight hexadecimal digits follow."""


@dataclass(frozen=True)
class Seed:
    """A file that is right."""

    name: str
    content: bytes
    sealed: bool
    """Whether it has checksums."""


def seeds(directory: Path) -> list[Seed]:
    """What mlximpl writes, below the directory, and what was recorded from mlx-lm."""
    made = list(_written(directory))
    for path in find_file_goldens(GOLDENS):
        golden = load_file_golden(path)
        if not golden.lost:
            made.append(Seed(f"{path.parent.name}/{path.stem}", golden.file.read_bytes(), False))
    return made


def _written(directory: Path) -> Iterator[Seed]:
    for name, caches in _caches():
        for mappable in (False, True):
            path = directory / "seed.safetensors"
            metadata = METADATA if len(name) % 2 else None
            mlximpl.save_prompt_cache(str(path), caches, metadata, mappable=mappable)
            yield Seed(f"{'mappable' if mappable else 'compact'}/{name}", path.read_bytes(), True)


def _caches() -> Iterator[tuple[str, list[Any]]]:
    for situation in situations(NEW):
        yield situation.name, [layer.cache for layer in all_built(situation.layers, mlximpl)]
    long = mx.arange(300 * 64, dtype=mx.float32).reshape(1, 1, 300, 64)  # read otherwise than short tensors
    layer = mlximpl.KVCache()
    layer.update_and_fetch(long, long + 1)
    yield "long tensors", [layer]
    x = mx.arange(2 * 4 * 4, dtype=mx.float32).reshape(2, 1, 4, 4) + 1
    for kind in (mlximpl.BatchKVCache([0, 0]), mlximpl.BatchRotatingKVCache(4, [0, 0])):
        kind.prepare(lengths=[6, 3], right_padding=[0, 3])
        kind.update_and_fetch(x, x)
        yield f"pending {type(kind).__name__}", [kind]
    sinks = mlximpl.BatchRotatingKVCache(5, [0, 3], keep=2)
    sinks.update_and_fetch(x, x)
    yield "batch with sinks", [sinks]
    sinks.prepare(lengths=[1, 0], right_padding=[0, 1])
    sinks.update_and_fetch(x[:, :, :1], x[:, :, :1])
    yield "pending batch with sinks", [sinks]
    ring = mlximpl.RotatingKVCache(4)
    for n in (4, 1, 4):
        ring.update_and_fetch(x[:1, :, :n], x[:1, :, :n])
    ring.trim(2)
    yield "ring with pads", [ring]


def has_seal(content: bytes) -> bool:
    """Whether a file says that it is mlximpl's. One that does not is taken for mlx-lm's, whatever it was before."""
    parts = split(content)
    metadata = (parts and metadata_of(parts.header)) or {}
    return parts is None or str(metadata.get(FACTS, "{")).startswith("{")


def reseal(content: bytes) -> bytes:
    """The file with the seal that its header should have; as it is where it has no place for one."""
    parts = split(content)
    metadata = parts and metadata_of(parts.header)
    if parts is None or not metadata or not isinstance(metadata.get(FACTS), str):
        return content
    try:
        facts = json.loads(metadata[FACTS])
    except (ValueError, RecursionError):
        return content
    if not isinstance(facts, dict):
        return content
    text = json.dumps({"seal": "00000000", **{k: v for k, v in facts.items() if k != "seal"}}, separators=(",", ":"))
    others = {key: value for key, value in metadata.items() if key != FACTS}
    entries = [pair for pair in parts.header if pair[0] != "__metadata__"]
    raw = text_of([("__metadata__", {FACTS: text, **others}), *entries], parts.page)
    if not raw.startswith(BEGIN):
        return content
    start = len(BEGIN)
    return with_header(raw[:start] + b"%08x" % zlib.crc32(raw) + raw[start + 8 :], parts.data)
