"""Caches on disk: what is in a file, and what is read back."""

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors

import mlximpl
from conformance.saved_caches import (
    DECODE,
    LAYOUTS,
    METADATA,
    SITUATIONS,
    WAYS,
    Cache,
    Made,
    arrays,
    decode,
    fed,
    next_columns,
    pending,
    same,
    saved,
    split,
)
from mlximpl import PromptCacheFileError, safetensors_reader
from mlximpl import load_prompt_cache as load
from mlximpl import save_prompt_cache as save
from mlximpl.safetensors_header import Tensor
from mlximpl.scalars import check_scalar, read_scalar, scalar_item
from mlximpl.state_tree import flatten, unflatten


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


PREFILLS: list[Made] = [lambda: mlximpl.BatchKVCache([0, 1]), lambda: mlximpl.BatchRotatingKVCache(4, [0, 1])]


@pytest.mark.parametrize("mappable", LAYOUTS)
@pytest.mark.parametrize("name", SITUATIONS)
def test_every_kind_comes_back(file: Path, name: str, mappable: bool) -> None:
    cache = SITUATIONS[name]()
    before = copy.deepcopy(saved(cache))
    save(file, [cache, mlximpl.KVCache(), cache], {"name": name}, mappable=mappable)
    assert same(saved(cache), before), "saving has changed the cache"
    for way in WAYS:
        caches, metadata = load(file, True, **way)
        assert metadata == {"name": name}
        assert [type(each) for each in caches] == [type(cache), mlximpl.KVCache, type(cache)]
        for each in (caches[0], caches[2]):
            assert same(saved(each), before)


@pytest.mark.parametrize("mappable", LAYOUTS)
@pytest.mark.parametrize("name", DECODE)
def test_a_loaded_cache_goes_on_as_the_saved_one(file: Path, name: str, mappable: bool) -> None:
    cache = SITUATIONS[name]()
    save(file, [cache], mappable=mappable)
    loaded = [load(file, False, **way)[0] for way in WAYS]
    steps = 1 if "pending" in name or "announced" in name else 20
    seen = decode(cache, steps)
    for each in loaded:
        assert same(decode(each, steps), seen)
        assert same(saved(each), saved(cache))


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_a_pending_prefill_is_ended_after_loading(file: Path, mappable: bool) -> None:
    for make in PREFILLS:
        cache = pending(make(), 3)
        save(file, [cache], mappable=mappable)
        (loaded,) = load(file)
        for each in (cache, loaded):
            mx.random.seed(1)
            fed(each, 1, rows=2)
            each.finalize()
        assert same(saved(loaded), saved(cache))
        assert same(decode(loaded, 5), decode(cache, 5))


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_after_a_load_as_many_tokens_can_be_trimmed_as_before(file: Path, mappable: bool) -> None:
    cache = fed(mlximpl.RotatingKVCache(8, keep=2), 10, 5)
    save(file, [cache], mappable=mappable)
    (loaded,) = load(file)
    assert loaded.trim_limit() == cache.trim_limit() >= 5
    assert loaded.trim(5) == cache.trim(5) == 5
    assert same(decode(loaded, 12), decode(cache, 12))


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_no_caches_come_back_as_none(file: Path, mappable: bool) -> None:
    save(file, [], {"a": "b"}, mappable=mappable)
    for way in WAYS:
        assert load(file, True, **way) == ([], {"a": "b"})
        assert load(file, **way) == []


DTYPES = [
    *(mx.bool_, mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64),
    *(mx.float16, mx.bfloat16, mx.float32, mx.complex64),
]


@pytest.mark.parametrize("elements", [6, 50_000])
@pytest.mark.parametrize("mappable", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(file: Path, dtype: mx.Dtype, mappable: bool, elements: int) -> None:
    numbers = mx.random.randint(0, 2**31 - 1, (elements * 2,))
    words = numbers % 2 == 0 if dtype == mx.bool_ else numbers.view(dtype)
    one, part = mx.array([[1]]).astype(dtype), words.reshape(2, -1)[:1, 1:-1]
    slots = [words.reshape(1, -1), one, part, words[:0].reshape(1, 0)]
    save(file, [arrays(*slots)], mappable=mappable)
    for way in WAYS:
        loaded = load(file, False, **way)[0]
        assert same(loaded.state, [slots, None, None])


@pytest.mark.parametrize("elements", [6, 50_000])
@pytest.mark.parametrize("mappable", LAYOUTS)
def test_float64_comes_back(file: Path, mappable: bool, elements: int) -> None:
    with mx.stream(mx.cpu):  # no GPU has it
        numbers = mx.arange(elements, dtype=mx.float64) / 3
        mx.eval(numbers)
    try:
        cache = arrays(numbers[None])
        save(file, [cache], mappable=mappable)
    except ValueError as error:
        pytest.skip(f"this device has no float64: {error}")
    assert json.loads(split(file)[0]["__metadata__"]["2.0"])["mlx_lm"] is False
    for way in WAYS:
        loaded = load(file, False, **way)[0]
        assert loaded[0].dtype == mx.float64
        assert loaded[0].tolist() == [[i / 3 for i in range(elements)]]


def test_an_array_of_no_axes_comes_back(file: Path) -> None:
    # No kind of cache has one: the reader is asked.
    tensor = Tensor("F16", (), 0, 2)
    array = safetensors_reader.array_of(memoryview(np.float16(1.5).tobytes()), tensor)
    assert (array.shape, array.dtype, array.item()) == ((), mx.float16, 1.5)


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_metadata_come_back_as_given(file: Path, mappable: bool) -> None:
    for metadata in (METADATA, {}, None, *({key: value} for key, value in METADATA.items())):
        save(file, [mlximpl.KVCache()], metadata, mappable=mappable)
        caches, read = load(file, True)
        assert read == (metadata or {})
        assert len(caches) == 1


OTHER_METADATA = (
    *({"a": 1}, {1: "a"}, {"a": None}, {"a": b"b"}, {"a": ["b"]}, {None: "a"}, {"a": "b", "c": {}}),
    *([("a", "b")], "ab", 7),
)


@pytest.mark.parametrize("metadata", OTHER_METADATA)
def test_other_metadata_are_refused_before_a_byte_is_written(file: Path, metadata: Any) -> None:
    with pytest.raises(ValueError, match="metadata must be strings by name") as refusal:
        save(file, [mlximpl.KVCache()], metadata)
    assert not isinstance(refusal.value, PromptCacheFileError)
    assert list(file.parent.iterdir()) == []


def test_a_short_cache_is_a_short_file(file: Path) -> None:
    cache = fed(mlximpl.KVCache(), 17, heads=1, size=64)
    save(file, [cache])
    compact = file.stat().st_size
    assert compact < 12_000
    tensors = len(split(file)[0]) - 1
    save(file, [cache], mappable=True)
    assert file.stat().st_size <= compact + tensors * 16384


@pytest.mark.parametrize("mappable", LAYOUTS)
@pytest.mark.parametrize("name", SITUATIONS)
def test_any_safetensors_reader_reads_it(file: Path, name: str, mappable: bool) -> None:
    cache = SITUATIONS[name]()
    save(file, [cache], {"a": "b"}, mappable=mappable)
    header, data = split(file)
    assert header["__metadata__"]["0.a"] == "b"
    deserialize: Any = safetensors.deserialize
    read = dict(deserialize(file.read_bytes()))
    assert read.keys() == header.keys() - {"__metadata__"}
    leaves = dict(flatten([saved(cache)]))
    for path, leaf in leaves.items():
        if isinstance(leaf, mx.array):
            assert tuple(read[path]["shape"]) == leaf.shape
            expected = b"" if not leaf.size else bytes(memoryview(mx.contiguous(leaf).reshape(-1).view(mx.uint8)))  # type: ignore[arg-type]
            assert bytes(read[path]["data"]) == expected
    if mappable:
        start = file.stat().st_size - len(data)
        assert start % 16384 == 0 and len(data) % 16384 == 0
        for path, entry in header.items():
            if path.startswith("padding."):
                assert entry["dtype"] == "U8" and not any(read[path]["data"])
            elif path != "__metadata__":
                assert entry["data_offsets"][0] % 16384 == 0
        assert all(path in leaves or path.startswith("padding.") for path in read)
    else:
        assert read.keys() == {path for path, leaf in leaves.items() if not isinstance(leaf, list)}


def marked(*tokens: int, rows: int = 1) -> Any:
    """Columns whose every number names its token."""
    numbers = mx.array([1e6 + token for token in tokens], mx.float32)
    return [mx.broadcast_to(numbers[None, None, :, None] + off, (rows, 1, len(tokens), 8)) for off in (0, 0.5)]


def tokens_in(path: Path) -> set[int]:
    """The tokens whose columns are in a file, keys and values."""
    _, data = split(path)
    found = {float(number) for number in np.frombuffer(data[: len(data) // 4 * 4], "<f4") if 1e6 <= number < 2e6}
    tokens = {int(number - 1e6) for number in found}
    assert found == {1e6 + token + off for token in tokens for off in (0, 0.5)}
    return tokens


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_tokens_that_are_gone_are_not_in_the_file(file: Path, mappable: bool) -> None:
    def written(cache: Cache) -> list[int]:
        save(file, [cache], mappable=mappable)
        return sorted(tokens_in(file))

    growing = mlximpl.KVCache()
    growing.update_and_fetch(*marked(*range(20)))
    growing.trim(8)
    assert written(growing) == [*range(12)]

    ring = mlximpl.RotatingKVCache(8, keep=1)
    for token in range(12):
        ring.update_and_fetch(*marked(token))
    assert written(ring) == [0, *range(5, 12)]
    # After several tokens the ring holds what a trim of them needs.
    ring.update_and_fetch(*marked(12, 13, 14))
    assert written(ring) == [0, *range(6, 15)]
    ring.trim(3)
    assert written(ring) == [0, *range(6, 12)]

    batch = mlximpl.BatchKVCache([0, 3])
    batch.update_and_fetch(*marked(*range(5), rows=2))
    batch.filter([1])  # its first three columns were pads
    batch.trim(1)
    assert written(batch) == [3]
    batch = mlximpl.BatchKVCache([2, 0])
    batch.update_and_fetch(*marked(*range(3), rows=2))
    batch.filter([0, 0])
    assert written(batch) == [2]

    chunked = mlximpl.ChunkedKVCache(4)
    for token in range(9):
        chunked.maybe_trim_front()
        chunked.update_and_fetch(*marked(token))
    chunked.trim(1)
    assert written(chunked) == [4, 5, 6, 7]

    concatenated = mlximpl.ConcatenateKVCache()
    concatenated.update_and_fetch(*marked(0, 1, 2, 3))
    concatenated.trim(2)
    assert written(concatenated) == [0, 1]


@pytest.mark.parametrize("mappable", LAYOUTS)
@pytest.mark.parametrize(
    "make", [lambda: mlximpl.BatchKVCache([0, 1]), lambda: mlximpl.BatchRotatingKVCache(4, [0, 1])]
)
def test_pads_are_zeros_in_the_file(file: Path, make: Made, mappable: bool) -> None:
    cache = make()
    cache.prepare(lengths=[4, 2], right_padding=[0, 2])
    cache.update_and_fetch(*marked(10, 11, 12, 13, rows=2))
    cache.filter([1])  # a left pad, a token, two right pads
    save(file, [cache], mappable=mappable)
    assert tokens_in(file) == {11}
    cache.finalize()
    for each in (cache, mlximpl.CacheList(mlximpl.CacheList(cache))):
        save(file, [each], mappable=mappable)
        assert tokens_in(file) == {11}


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_slots_that_a_trim_left_in_a_ring_are_zeros(file: Path, mappable: bool) -> None:
    ring = mlximpl.RotatingKVCache(8, keep=2)
    for token in range(12):
        ring.update_and_fetch(*marked(token))
    ring.trim(1)
    batch = mlximpl.BatchRotatingKVCache(4, [3])
    for token in range(5):
        batch.update_and_fetch(*marked(token))  # the first three are pads
    batch.trim(1)
    for cache, held in ((ring, {0, 1, *range(6, 11)}), (batch, {3})):
        assert cache._ring.wrapped
        save(file, [cache], mappable=mappable)
        assert tokens_in(file) == held
        (loaded,) = load(file)
        assert same(decode(loaded, 9), decode(cache, 9))


def upstream() -> Any:
    return pytest.importorskip("mlx_lm.models.cache", reason="mlx-lm is not installed", exc_type=ImportError)


NOT_READ = (
    *(
        "ring, wrapped and trimmed",
        "ring, a chunk taken back",
        "batch, pending",
        "batch, announced",
        "batch of rings, pending",
    ),
    *(name for name in SITUATIONS if name.startswith("batch with sinks")),
    *("concatenated, empty", "arrays, no slots", "list of nothing"),
)
"""The situations that mlx-lm's states cannot express, or that it does not read back itself."""
DROPPED = {"", ".", "a.b", "0", "-1", " 7 ", "1_0", "\u0663", "01", "2.0", "padding.0", "half \ud800", "\udc00\ud83d"}
"""The metadata that mlx-lm would not give back as they are."""


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_file_says_whether_mlx_lm_reads_it_and_is_right(file: Path, name: str) -> None:
    cache = SITUATIONS[name]()
    save(file, [cache, cache], METADATA)
    facts = json.loads(split(file)[0]["__metadata__"]["2.0"])
    assert facts["mlx_lm"] is (name not in NOT_READ)
    assert len(facts["metadata"]) == len(DROPPED)
    module = upstream()
    if name in NOT_READ:
        with pytest.raises(Exception):  # noqa: B017 - whatever it is, it is not a wrong cache
            decode(module.load_prompt_cache(str(file))[0], 1)
        return
    caches, metadata = module.load_prompt_cache(str(file), return_metadata=True)
    assert [type(each).__name__ for each in caches] == [type(cache).__name__] * 2
    assert same(caches[0].state, saved(cache)) and same(caches[1].state, saved(cache))
    assert metadata == {key: value for key, value in METADATA.items() if key not in DROPPED}


def test_a_mappable_file_says_that_mlx_lm_does_not_read_it(file: Path) -> None:
    save(file, [mlximpl.KVCache()], mappable=True)
    assert json.loads(split(file)[0]["__metadata__"]["2.0"])["mlx_lm"] is False


def test_mlx_lm_never_breaks_on_metadata(file: Path) -> None:
    module = upstream()
    for metadata in ({key: value} for key, value in METADATA.items()):
        save(file, [fed(mlximpl.KVCache(), 3)], metadata)
        caches, read = module.load_prompt_cache(str(file), return_metadata=True)
        assert caches[0].offset == 3
        assert not read or read == metadata


@pytest.mark.parametrize(
    "name", ["empty", "growing", "growing bfloat16", "trimmed", "ring", "ring, wrapped", "quantized"]
)
def test_mlx_lm_goes_on_from_it(file: Path, name: str) -> None:
    cache = SITUATIONS[name]()
    save(file, [cache])
    (theirs,) = upstream().load_prompt_cache(str(file))
    for _ in range(20):
        new = next_columns(cache)
        assert same(list(cache.update_and_fetch(*new)), list(theirs.update_and_fetch(*new)))


def test_no_caches_are_no_caches_to_mlx_lm(file: Path) -> None:
    save(file, [], {"a": "b"})
    assert upstream().load_prompt_cache(str(file), return_metadata=True) == ([], {"a": "b"})


def test_what_mlx_lm_saved_comes_back(file: Path) -> None:
    module = upstream()
    cache = module.RotatingKVCache(8, 2)
    fed(cache, 5, *[1] * 9)
    module.save_prompt_cache(str(file), [cache, module.KVCache()], METADATA_FOR_MLX_LM)
    (ring, empty), metadata = load(file, True)
    assert metadata == METADATA_FOR_MLX_LM
    assert same(ring.state, cache.state) and empty.empty()


METADATA_FOR_MLX_LM = {key: value for key, value in METADATA.items() if not key.startswith(("half", "\udc00"))}
"""Those that MLX writes: it has no halves of characters."""


def test_trees() -> None:
    tree = [("k", "v", 3), [], [[], [None]]]
    leaves = list(flatten(tree))
    assert leaves == [("0.0", "k"), ("0.1", "v"), ("0.2", 3), ("1", []), ("2.0", []), ("2.1.0", None)]
    assert unflatten(reversed(leaves)) == [["k", "v", 3], [], [[], [None]]]
    assert list(flatten([])) == [("", [])] and unflatten([("", [])]) == []
    with pytest.raises(ValueError, match=r"'0\.0' lies below a value"):
        unflatten([("0", 1), ("0.0", 2)])
    with pytest.raises(ValueError, match="there are values at and below '0'"):
        unflatten([("0.0", 2), ("0", 1)])


@pytest.mark.parametrize(
    ("value", "kind", "dtype", "content"),
    [
        (17, "scalar", "I32", "11000000"),
        (-(2**31), "scalar", "I32", "00000080"),
        (2**31, "scalar", "I64", "0000008000000000"),
        (-(2**63), "scalar", "I64", "0000000000000080"),
        (True, "scalar", "BOOL", "01"),
        ("", "string", "F32", ""),
        ("a\U0001f600", "string", "I32", "6100000000f60100"),
        (None, "none", "F32", ""),
    ],
)
def test_values_that_are_no_arrays(value: Any, kind: str, dtype: str, content: str) -> None:
    found, item = scalar_item("0.2", value)
    assert (found, item.dtype, item.content) == (kind, dtype, bytes.fromhex(content))
    read = read_scalar("0.2", kind, Tensor(item.dtype, item.shape, 0, item.nbytes), bytes.fromhex(content))
    assert type(read) is type(value) and read == value


@pytest.mark.parametrize("value", [1.5, 2**63, -(2**63) - 1, "half \ud800", "x" * 16385, b"bytes", object()])
def test_values_that_no_state_has(value: Any) -> None:
    with pytest.raises(ValueError, match=r"the state's value at 0\.2 cannot be saved"):
        check_scalar("0.2", value)
    with pytest.raises(ValueError, match=r"the state's value at 0\.2 cannot be saved"):
        scalar_item("0.2", value)
