"""The files that are recorded: which caches they hold, how those came about, and how they go on. Data alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from conformance.payload import Config

Steps = tuple[tuple[str, Any], ...]

OLD, NEW = "0.31", "0.32"
"""The generations of mlx-lm's files, by the beginning of the version."""


@dataclass(frozen=True)
class Plan:
    """One cache: what is done before it is saved, and after."""

    kind: str
    before: Steps = ()
    then: Steps = ()
    rows: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the class."""
    config: Config = field(default_factory=Config)
    dtypes: tuple[str, ...] = ()
    """Of an ArraysCache: one a slot."""
    caches: tuple[Plan, ...] = ()
    """Of a CacheList."""


@dataclass(frozen=True)
class FileSituation:
    """One file."""

    name: str
    description: str
    layers: tuple[Plan, ...]
    metadata: dict[str, str] | None = None
    generations: tuple[str, ...] = (OLD, NEW)
    lost: str = ""
    """What the file lacks, so that nobody can go on from it: it has to be refused."""


def feed(*counts: int) -> Steps:
    """An update of each number of tokens."""
    return tuple(("feed", n) for n in counts)


def kv(before: Steps, then: Steps | None = None, rows: int = 1, config: Config | None = None) -> Plan:
    return Plan("KVCache", before, feed(1, 1, 3) if then is None else then, rows, config=config or Config())


def ring(max_size: int, before: Steps, then: Steps, keep: int = 0, rows: int = 1) -> Plan:
    return Plan("RotatingKVCache", before, then, rows, {"max_size": max_size, "keep": keep})


def quantized(bits: int, dtype: str = "float32") -> Plan:
    config = Config(dtype, 1, 32, 32)
    return Plan("QuantizedKVCache", feed(5, 1), feed(1, 2), 1, {"group_size": 32, "bits": bits}, config)


def arrays(before: Steps, then: Steps, dtypes: tuple[str, ...] = ("float32", "float32"), rows: int = 1) -> Plan:
    return Plan("ArraysCache", before, then, rows, {"size": len(dtypes)}, dtypes=dtypes)


def chunked(before: Steps, then: Steps, chunk_size: int = 8) -> Plan:
    return Plan("ChunkedKVCache", before, then, 1, {"chunk_size": chunk_size})


def batch(left_padding: list[int], before: Steps, then: Steps) -> Plan:
    return Plan("BatchKVCache", before, then, len(left_padding), {"left_padding": left_padding})


def batch_ring(max_size: int, left_padding: list[int], before: Steps, then: Steps) -> Plan:
    options = {"max_size": max_size, "left_padding": left_padding}
    return Plan("BatchRotatingKVCache", before, then, len(left_padding), options)


def caches(*each: Plan) -> Plan:
    return Plan("CacheList", caches=each)


ONES = feed(1, 1, 1)
RECURRENT: Steps = (("mask", 2), ("fill", 1), ("mask", 1))
WHOLE = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
EVERY_DTYPE = ("bool_", *WHOLE, "float16", "bfloat16", "float32", "complex64")
ODD_METADATA = {"model.name": "a/b", "0": "zero", "1": "one", "prompt": 'two\nlines, "quoted", übel 🙂'}

SITUATIONS: tuple[FileSituation, ...] = (
    FileSituation("kv_one_layer", "one growing layer without metadata", (kv(feed(4, 1)),)),
    FileSituation(
        "kv_one_layer_with_metadata",
        "one growing layer with metadata",
        (kv(feed(5)),),
        {"model": "tiny", "tokens": "5"},
    ),
    FileSituation(
        "kv_layers_with_odd_metadata",
        "two growing layers; dots, numbers, quotes and more in the metadata",
        (kv(feed(3)), kv(feed(3))),
        ODD_METADATA,
    ),
    FileSituation("kv_layers", "three growing layers without metadata", tuple(kv(feed(2, 1)) for _ in range(3))),
    FileSituation(
        "kv_trimmed",
        "a growing layer that gave tokens back: the new generation saves those too",
        (kv((*feed(6), ("trim", 2)), feed(1, 1)),),
    ),
    FileSituation("kv_rows", "two rows of equal length in one layer", (kv(feed(3, 1), feed(1, 2), rows=2),)),
    FileSituation(
        "kv_dtypes",
        "layers of float32, float16 and bfloat16, and of other head sizes",
        (
            kv(feed(3)),
            kv(feed(3), config=Config("float16", 2, 4, 6)),
            kv(feed(3), config=Config("bfloat16", 1, 6, 4)),
        ),
    ),
    FileSituation("kv_empty", "a growing layer that was never fed", (kv((), feed(2, 1)),), {"a": "b"}, (NEW,)),
    FileSituation("ring_unwrapped", "a ring that is not full", (ring(8, feed(3, 1), feed(1, 1)),)),
    FileSituation("ring_full", "a ring whose next token wraps it", (ring(8, feed(7, 1), ONES),)),
    FileSituation(
        "ring_wrapped", "a ring whose head stands in the middle", (ring(8, feed(8, 1, 1, 1), feed(1, 1, 2, 1)),)
    ),
    FileSituation(
        "ring_wrapped_with_sinks",
        "a wrapped ring that keeps its first two tokens",
        (ring(8, feed(8, 1, 1, 1), ONES, keep=2),),
        {"keep": "2"},
    ),
    FileSituation("ring_rows", "two rows of equal length in a wrapped ring", (ring(6, feed(6, 1, 1), ONES, rows=2),)),
    FileSituation(
        "ring_after_several_tokens",
        "a ring that holds more than its size after a chunk",
        (ring(8, feed(7, 5), feed(1, 1, 2)),),
    ),
    FileSituation(
        "ring_with_sinks_after_several_tokens",
        "a ring with sinks that was fed more than its size at once",
        (ring(6, feed(11), ONES, keep=2),),
    ),
    FileSituation(
        "ring_trimmed", "a ring that gave a token back before it was full", (ring(8, (*feed(6), ("trim", 1)), ONES),)
    ),
    FileSituation(
        "ring_and_kv_layers",
        "rings and growing layers in turn, as models with sliding windows have them",
        (ring(4, feed(3, 1, 1), ONES), kv(feed(3, 1, 1)), ring(4, feed(3, 1, 1), ONES), kv(feed(3, 1, 1))),
    ),
    FileSituation("ring_empty", "a ring that was never fed", (ring(8, (), feed(3, 1)),), generations=(NEW,)),
    FileSituation("quantized_8_bits", "a quantized layer of 8 bits", (quantized(8),)),
    FileSituation(
        "quantized_4_bits", "a quantized layer of 4 bits, float16 scales", (quantized(4, "float16"),), {"bits": "4"}
    ),
    FileSituation(
        "quantized_2_bits_bfloat16", "a quantized layer of 2 bits, bfloat16 scales", (quantized(2, "bfloat16"),)
    ),
    FileSituation("chunked", "a chunked layer before it slides", (chunked(feed(5), feed(1, 1)),)),
    FileSituation(
        "chunked_slid",
        "a chunked layer that slid and was fed again",
        (chunked((*feed(6, 6), ("slide", 0), *feed(3)), (("slide", 0), *feed(2, 1))),),
        generations=(NEW,),
    ),
    FileSituation(
        "chunked_slid",
        "a chunked layer that slid when its buffer was full, as this version needs it, and was fed again",
        (chunked((*feed(256), ("slide", 0), *feed(1)), feed(1)),),
        generations=(OLD,),
    ),
    FileSituation(
        "chunked_just_slid",
        "a chunked layer that slid and was saved at once",
        (chunked((*feed(6, 6), ("slide", 0)), (*feed(2), ("slide", 0), *feed(1))),),
        generations=(NEW,),
    ),
    FileSituation(
        "chunked_just_slid",
        "a chunked layer that slid and was saved at once",
        (chunked((*feed(256), ("slide", 0)), feed(1)),),
        generations=(OLD,),
        lost="the offset: this version tells it by the number of columns, of which a slid layer has fewer",
    ),
    FileSituation(
        "chunked_fed_past_its_buffer",
        "a chunked layer that slid and was fed until its tokens outnumbered the columns of its buffer",
        (chunked((*feed(256), ("slide", 0), *feed(16)), feed(1)),),
        generations=(OLD,),
        lost="the offset: this version tells it by the number of columns, 264, where 272 tokens were fed",
    ),
    FileSituation(
        "arrays", "a recurrent layer with both slots filled", (arrays((("fill", 0), ("fill", 1)), RECURRENT),)
    ),
    FileSituation(
        "arrays_unfilled",
        "a recurrent layer of which one slot is filled",
        (arrays((("fill", 1),), (("fill", 0),)),),
        None,
        (NEW,),
    ),
    FileSituation("arrays_empty", "a recurrent layer that was never fed", (arrays((), RECURRENT),), None, (NEW,)),
    FileSituation(
        "arrays_with_lengths",
        "a recurrent layer of two rows whose lengths are announced",
        (
            arrays(
                (("lengths", [5, 3]), ("fill", 0), ("fill", 1), ("advance", 2)),
                (("mask", 3), ("advance", 1), ("mask", 2), ("fill", 0)),
                rows=2,
            ),
        ),
        generations=(NEW,),
    ),
    FileSituation(
        "arrays_with_left_padding",
        "a recurrent layer of two rows, one with pads before its first token",
        (
            replace(
                arrays((("fill", 0), ("fill", 1), ("advance", 1)), (("mask", 4), ("advance", 1), ("mask", 3)), rows=2),
                options={"size": 2, "left_padding": [3, 0]},
            ),
        ),
        generations=(NEW,),
    ),
    FileSituation(
        "arrays_of_every_dtype",
        "a recurrent layer with a slot of every dtype",
        (arrays(tuple(("fill", i) for i in range(len(EVERY_DTYPE))), (("fill", 0), ("fill", 10)), EVERY_DTYPE),),
    ),
    FileSituation(
        "hybrid",
        "recurrent, growing and recurrent layers",
        (arrays((("fill", 0), ("fill", 1)), RECURRENT), kv(feed(4)), arrays((("fill", 1), ("fill", 0)), RECURRENT)),
        {"model": "hybrid"},
    ),
    FileSituation(
        "concatenated",
        "a layer that is concatenated at each update",
        (Plan("ConcatenateKVCache", feed(4, 1), feed(1, 2)),),
    ),
    FileSituation(
        "list_of_two",
        "a layer of two growing caches, as sparse attention has them",
        (caches(kv(feed(3)), kv(feed(3))),),
    ),
    FileSituation(
        "lists_of_mixed_kinds",
        "layers of a recurrent cache beside a ring and beside a growing one",
        (
            caches(arrays((("fill", 0), ("fill", 1)), RECURRENT), ring(4, feed(3, 1, 1), ONES)),
            caches(arrays((("fill", 0), ("fill", 1)), RECURRENT), kv(feed(5))),
        ),
        {"kinds": "3"},
    ),
    FileSituation(
        "list_of_batches",
        "a layer of a batch and a batch ring",
        (caches(batch([2, 0], feed(5, 1), ONES), batch_ring(4, [1, 0], feed(4, 1), ONES)),),
    ),
    FileSituation("batch", "a batch of a padded row and a full one", (batch([2, 0], feed(5, 1), feed(1, 1, 2)),)),
    FileSituation("batch_due", "a batch whose left padding is not all fed", (batch([3, 0], feed(2), feed(2, 1)),)),
    FileSituation("batch_empty", "a batch that was never fed", (batch([1, 0], (), feed(3, 1)),), None, (NEW,)),
    FileSituation(
        "batch_ring_unwrapped", "a batch ring that is not full", (batch_ring(8, [2, 0], feed(4, 1), feed(1, 1)),)
    ),
    FileSituation(
        "batch_ring_wrapped",
        "a wrapped batch ring of which one row still has padding",
        (batch_ring(8, [4, 0], feed(8, 1, 1), feed(1, 1, 1, 1)),),
    ),
    FileSituation(
        "batch_ring_after_several_tokens",
        "a batch ring that holds more than its size after a chunk",
        (batch_ring(6, [1, 0], feed(5, 4), ONES),),
        {"rows": "2"},
    ),
    FileSituation(
        "batch_layers",
        "batches, and batch rings, in turn",
        (batch_ring(4, [1, 0], feed(4, 1), ONES), batch([1, 0], feed(4, 1), ONES)),
    ),
)


def situations(version: str) -> list[FileSituation]:
    """Those that this version of mlx-lm can save. Raises ValueError for a version of neither generation."""
    generation = version[: len(OLD)]
    if generation not in (OLD, NEW):
        raise ValueError(f"mlx-lm {version}, but files are recorded from {OLD}.x and {NEW}.x")
    return [situation for situation in SITUATIONS if generation in situation.generations]
