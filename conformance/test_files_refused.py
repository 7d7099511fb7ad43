"""Files that were cut, changed, forged or never ours: one error that names the file and what is wrong."""

import copy
import gc
import json
import os
import random
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlximpl
from conformance.saved_caches import LAYOUTS, SITUATIONS, WAYS, fed, join, same, saved, split
from mlximpl import PromptCacheFileError, checksums, load_prompt_file
from mlximpl import load_prompt_cache as load
from mlximpl import save_prompt_cache as save


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


def refused(path: Path, words: str, **way: bool) -> None:
    for return_metadata in (False, True):
        with pytest.raises(PromptCacheFileError, match=words) as refusal:
            load(path, return_metadata, **way)
        assert isinstance(refusal.value, ValueError)
        assert refusal.value.file == str(path)
        assert str(refusal.value) == f"{path}: {refusal.value.reason}"


def test_every_byte_of_a_compact_file_counts(file: Path) -> None:
    caches = [fed(mlximpl.RotatingKVCache(4), 3, heads=1, size=2), fed(mlximpl.KVCache(), 1, heads=1, size=1)]
    save(file, caches, {"a": "b", "c.d": "e"})
    content = file.read_bytes()
    for i in range(len(content)):
        changed = bytearray(content)
        changed[i] ^= 1 << (i % 8)
        file.write_bytes(changed)
        with pytest.raises(PromptCacheFileError):
            load(file)
            pytest.fail(f"byte {i} of {len(content)} may be changed")


def test_a_changed_mappable_file_is_the_same_or_refused(file: Path) -> None:
    cache = fed(mlximpl.KVCache(), 30, heads=1, size=16)
    save(file, [cache], mappable=True)
    content, (header, data) = file.read_bytes(), split(file)
    start = len(content) - len(data)
    for i in [*range(0, start, 97), *range(start, len(content), 211)]:
        changed = bytearray(content)
        changed[i] ^= 0x10
        file.write_bytes(changed)
        padding = any(
            entry["data_offsets"][0] <= i - start < entry["data_offsets"][1]
            for name, entry in header.items()
            if name.startswith("padding.")
        )
        if padding:
            assert same(load(file)[0].state, cache.state)
        else:
            refused(file, "changed|bytes long|seal|not JSON|UTF-8|2.0|its header")
            refused(file, ".", mmap=True, verify=True)


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_a_mapped_load_checks_the_header_always_and_the_data_if_asked(file: Path, mappable: bool) -> None:
    save(file, [fed(mlximpl.KVCache(), 30)], mappable=mappable)
    content = file.read_bytes()
    changed = bytearray(content)
    at = len(content) - len(split(file)[1]) + 5
    changed[at] ^= 1
    file.write_bytes(changed)
    load(file, mmap=True)
    refused(file, "tensor '0.0' was changed: it has the checksum", mmap=True, verify=True)
    refused(file, "tensor '0.0' was changed: it has the checksum")
    changed = bytearray(content)
    place = content.index(b'"shape":[1,2,30')
    changed[place + 9 : place + 14] = b"2,1,3"
    file.write_bytes(changed)
    refused(file, "its header was changed after it was saved", mmap=True)


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_a_cut_file_is_refused(file: Path, mappable: bool) -> None:
    save(file, [fed(mlximpl.KVCache(), 2, heads=1, size=4)], mappable=mappable)
    content = file.read_bytes()
    for length in range(0, len(content), 1 if len(content) < 2000 else 61):
        file.write_bytes(content[:length])
        for way in WAYS:
            refused(file, "bytes", **way)
    file.write_bytes(content + b"\0")
    refused(file, f"end at byte {len(content)}, but it has {len(content) + 1}")


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content, words in (
        (b"", "it has 0 bytes"),
        (b"1234567", "it has 7 bytes"),
        (b"\0" * 100, "header is said to be 0 bytes long, in a file of 100"),
        (b"\xff" * 100, "header is said to be 18446744073709551615 bytes long, in a file of 100"),
        (bytes([93, 0, 0, 0, 0, 0, 0, 0]) + b"x" * 92, "is said to be 93 bytes long, in a file of 100"),
        (b"PK\x03\x04" + b"\0" * 100, "header is said to be"),
        (b"# Some text\nof several lines\n", "header is said to be"),
    ):
        (tmp_path / "other").write_bytes(content)
        refused(tmp_path / "other", words)
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"layers.0.weight": mx.ones((2, 2))})
    refused(tmp_path / "weights.safetensors", "it is no prompt cache")
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), {"w": mx.ones((2, 2))}, {"format": "mlx"})
    refused(tmp_path / "weights.safetensors", "it is no prompt cache")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "it is no ordinary file")


def test_errors_of_the_system_stay_what_they_are(tmp_path: Path, file: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(file)
    with pytest.raises(IsADirectoryError):
        load(tmp_path)
    with pytest.raises(FileNotFoundError):
        save(tmp_path / "no folder" / "file", [])
    for wrong in (b"bytes", 7, None):
        for call in (lambda w=wrong: load(w), lambda w=wrong: save(w, [])):
            with pytest.raises((ValueError, TypeError)):
                call()


KV = {"dtype": "F32", "shape": [1, 1, 1, 1], "data_offsets": [0, 4]}
OFFSET = {"dtype": "I32", "shape": [], "data_offsets": [8, 12]}
UPSTREAM = {"1.0": "KVCache", "2.0": "", "2.1.0": "0.2", "2.1.1": "scalar"}
GOOD: dict[str, Any] = {"__metadata__": UPSTREAM, "0.0": KV, "0.1": {**KV, "data_offsets": [4, 8]}, "0.2": OFFSET}
NOTHING = {**KV, "shape": [0], "data_offsets": [0, 0]}
DATA = struct.pack("<ffi", 1, 2, 1)


def edited(**entries: Any) -> dict[str, Any]:
    """GOOD with other entries; None takes one out, a dict is laid over it."""
    made = copy.deepcopy(GOOD)
    for name, entry in entries.items():
        key = {"metadata": "__metadata__"}.get(name, name.removeprefix("t").replace("_", "."))
        if entry is None:
            del made[key]
        elif isinstance(entry, dict) and key in made:
            made[key] = {k: v for k, v in {**made[key], **entry}.items() if v is not None}
        else:
            made[key] = entry
    return made


def test_the_file_that_is_edited_below_is_good(file: Path) -> None:
    join(file, GOOD, DATA)
    assert load(file)[0].offset == 1
    join(file, edited(), DATA)
    assert load(file)[0].offset == 1


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"[]", "its header is not a JSON object"),
        (b"7 ", "its header is not a JSON object"),
        (b"{}", "it is no prompt cache|end at byte"),
        (b"{ ", "its header is not JSON"),
        (b'{"a":}', "its header is not JSON"),
        (b"{" * 50_000, "its header is not JSON|nested"),
        (b"[" * 50_000, "nested too deep|not JSON"),
        (b'{"a":' * 50_000, "nested too deep|not JSON"),
        (b'{"\xff":{}}', "not UTF-8"),
        (b'{"a":NaN}', "holds 'NaN', which is no whole number"),
        (b'{"a":1.5}', "holds '1.5', which is no whole number"),
        (b'{"a":1e400}', "holds '1e400', which is no whole number"),
        (b'{"a":' + b"9" * 10_000 + b"}", "holds a number of 10000 digits"),
        (b'{"a":-' + b"9" * 5_000_000 + b"}", "beside its strings|5000001 digits"),
        (b'{"a":1,"a":2}', "has 'a' twice"),
        (b'{"__metadata__":{"b":"c","b":"d"}}', "has 'b' twice"),
        (edited(metadata={"1.0": 7}), "its __metadata__ is not strings by name"),
        (edited(metadata={"1.0": ["KVCache"]}), "its __metadata__ is not strings by name"),
        ({**GOOD, "__metadata__": None}, "it is no prompt cache"),
        ({**GOOD, "__metadata__": ["a"]}, "its __metadata__ is not strings by name"),
        (edited(t0_0=None), "leaves a hole of 4 bytes"),
        (edited(t0_0=7), "is not described by dtype, shape and data_offsets"),
        (edited(t0_0={"shape": None}), "is not described by dtype, shape and data_offsets"),
        (edited(t0_0={"more": 1}), "is not described by dtype, shape and data_offsets"),
        (edited(t0_0={"dtype": "F31"}), "tensor '0.0' has the dtype 'F31', which is none of BOOL, U8"),
        (edited(t0_0={"dtype": ["F32"]}), "which is none of BOOL, U8"),
        (edited(t0_0={"dtype": 32}), "which is none of BOOL, U8"),
        (edited(t0_0={"dtype": "F8_E4M3"}), "which is none of BOOL, U8"),
        (edited(t0_0={"shape": 4}), "no shape of at most 32 axes"),
        (edited(t0_0={"shape": [-1, -1]}), "no shape of at most 32 axes"),
        (edited(t0_0={"shape": [True]}), "no shape of at most 32 axes"),
        (edited(t0_0={"shape": [[1]]}), "no shape of at most 32 axes"),
        (edited(t0_0={"shape": ["1"]}), "no shape of at most 32 axes"),
        (edited(t0_0={"shape": [1] * 33}), "no shape of at most 32 axes"),
        (edited(t0_0={"shape": [0, 2**31]}), "no shape of at most 32 axes up to 2147483647"),
        (edited(t0_0={"shape": [2**62, 4]}), "no shape of at most 32 axes up to 2147483647"),
        (edited(t0_0={"shape": [2**31 - 1] * 32}), "takes [0-9]+ bytes, not 4"),
        (edited(t0_0={"shape": [2]}), r"tensor '0.0' of shape \[2\] and dtype F32 takes 8 bytes, not 4"),
        (edited(t0_0={"dtype": "F16"}), "takes 2 bytes, not 4"),
        (edited(t0_0={"data_offsets": [0]}), "has no two data_offsets"),
        (edited(t0_0={"data_offsets": [0, 4, 8]}), "has no two data_offsets"),
        (edited(t0_0={"data_offsets": {"0": 4}}), "has no two data_offsets"),
        (edited(t0_0={"data_offsets": [-4, 0]}), "has no two data_offsets"),
        (edited(t0_0={"data_offsets": [False, 4]}), "has no two data_offsets"),
        (edited(t0_0={"data_offsets": [4, 0]}), "lies at the bytes 4 to 0 of 12"),
        (edited(t0_0={"data_offsets": [0, 16]}), "lies at the bytes 0 to 16 of 12"),
        (edited(t0_0={"data_offsets": [2**63, 2**63 + 4]}), "lies at the bytes 9223372036854775808 to"),
        (edited(t0_0={"data_offsets": [10**30, 10**30 + 4]}), "holds a number of 31 digits"),
        (edited(t0_0={"data_offsets": [4, 8]}), "leaves a hole of 4 bytes|overlaps the one before"),
        (edited(t0_0={"data_offsets": [2, 6]}), "leaves a hole of 2 bytes"),
        (edited(t0_2={"data_offsets": [4, 8]}), "overlaps the one before"),
        (edited(t0_0={"shape": [0], "data_offsets": [2, 2]}), "leaves a hole|overlaps"),
        (edited(t0_2=None), "its tensors end at byte"),
        (edited(t0_2={"shape": [1]}), "none of this: accepted"),
        (edited(metadata={"2.0": None}), 'no entry "2.0": it is no prompt cache'),
        (edited(metadata={"2.0": "{"}), "its header was changed after it was saved"),
        (edited(metadata={"2.0": "{}"}), "its header was changed after it was saved"),
        (edited(metadata={"2.0": "KVCache"}), "class names are not numbered|is a"),
        (edited(metadata={"3": "x"}), "its metadata has an entry '3'"),
        (edited(metadata={"3.1": "x"}), "its metadata has an entry '3.1'"),
        (edited(metadata={"": "x"}), "its metadata has an entry ''"),
        (edited(metadata={"1.0": None}), "it has 0 classes for 1 states"),
        (edited(metadata={"1.1": "KVCache"}), "it has 2 classes for 1 states"),
        (edited(metadata={"1.0": None, "1.1": "KVCache"}), "its 1 class names are not numbered from 0 on"),
        (edited(metadata={"1.00": "KVCache"}), "its 2 class names are not numbered from 0 on"),
        (edited(metadata={"1.0": "Cache"}), "cache 0 is a 'Cache'; what can be read is ArraysCache, BatchKVCache"),
        (edited(metadata={"1.0": "object"}), "cache 0 is a 'object'"),
        (edited(metadata={"1.0": ""}), "cache 0 is a ''"),
        (edited(metadata={"1.0": "RotatingKVCache"}), "cache 0, RotatingKVCache: a RotatingKVCache state is"),
        (edited(metadata={"2.1.0": None}), "not listed with a path and a type"),
        (edited(metadata={"2.1.1": None}), "not listed with a path and a type"),
        (edited(metadata={"2.1.1": "number"}), "scalar 1 of its 1 is not listed with a path and a type"),
        (edited(metadata={"2.2.0": "0.2", "2.2.1": "scalar"}), "scalar 2 of its 2 is not listed"),
        (edited(metadata={"2.x.0": "0.2", "2.x.1": "scalar"}), "scalar 2 of its 2 is not listed"),
        (edited(metadata={"2.2": "x"}), "not listed with a path and a type"),
        (edited(metadata={"2.1.0": "0.3"}), "'0.3' is listed as a scalar, but there is no short tensor"),
        (edited(metadata={"2.1.0": "0.0"}), "cache 0, KVCache: "),
        (edited(metadata={"2.1.1": "string"}), r"tensor '0.2' of dtype I32 and shape \[\] is no string"),
        (edited(metadata={"2.1.1": "none"}), r"tensor '0.2' of dtype I32 and shape \[\] is no none"),
        (edited(metadata={"2.1.0": None, "2.1.1": None}), "accepted: an offset may be an array"),
        (edited(t0_2=None, t0_3=OFFSET), "'0.2' is listed as a scalar, but there is no"),
        (edited(t0_2=None, t0_3=OFFSET, metadata={"2.1.0": "0.3"}), "there is no value at 0.2, but there is one"),
        (edited(t0_0=None, **{"t0_0_0": KV}), "cache 0, KVCache: "),
        (edited(**{"t0": NOTHING}), "there are values at and below|lies below"),
        (
            edited(**{"t0_0_1": NOTHING}),
            "there are values at and below|lies below",
        ),
        (edited(**{"t1_0": NOTHING}), "it has 1 classes for 2 states"),
        (edited(**{"t1000000000_0": NOTHING}), "there is no value at 1, but"),
        (edited(**{"tx": NOTHING}), "'x' is not the path of a value"),
        (edited(**{"t00": NOTHING}), "'00' is not the path of a value"),
        (edited(**{"t-1": NOTHING}), "'-1' is not the path of a value"),
        (edited(**{"t0__0": NOTHING}), "'0..0' is not the path of a value"),
        (edited(**{"t": NOTHING}), "'' is not the path of a value"),
        (
            edited(**{"t" + "_".join("0" * 41): NOTHING}),
            "is not the path of a value",
        ),
        (
            edited(**{"tpadding_0": NOTHING}),
            "'padding.0' is not the path of a value",
        ),
        (edited(t0_0={"shape": [4], "dtype": "U8"}), "cache 0, KVCache: .*4-D"),
        (edited(t0_0={"shape": [1, 1, 1, 2], "dtype": "F16"}), "accepted: keys of another size"),
    ],
)
def test_a_header_that_is_wrong(file: Path, header: object, words: str) -> None:
    join(file, header, DATA)
    if "accepted" in words:
        assert load(file)[0].offset == 1
        return
    for way in WAYS:
        refused(file, words, **way)


def own_header(**facts: Any) -> tuple[dict[str, Any], bytes]:
    """GOOD as mlximpl would write it, with other facts."""
    sums = "".join(f"{zlib.crc32(DATA[i : i + 4]):08x}" for i in (0, 4, 8))
    good = {"seal": "0" * 8, "format": 1, "layout": "compact", "checksums": sums}
    good |= {"mlx_lm": True, "empty": [], "scalars": {}, "metadata": []}
    text = json.dumps({k: v for k, v in (good | facts).items() if v is not ...}, separators=(",", ":"))
    tensors = {name: entry for name, entry in GOOD.items() if name != "__metadata__"}
    return {"__metadata__": {"2.0": text} | {k: v for k, v in UPSTREAM.items() if k != "2.0"}} | tensors, DATA


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"format": 2}, "it has the format 2 of mlximpl, but 1 is the one known here"),
        ({"format": True}, "it has the format True of mlximpl"),
        ({"format": "1"}, "it has the format '1' of mlximpl"),
        ({"format": ...}, "it has the format None of mlximpl"),
        ({"layout": "loose"}, "it has the layout 'loose', which is none of compact, mappable"),
        ({"layout": 1}, "what it says of itself is not layout, checksums"),
        ({"checksums": ...}, "what it says of itself is not layout, checksums"),
        ({"more": 1}, "what it says of itself is not layout, checksums"),
        ({"checksums": ""}, "it has no 3 checksums for its tensors"),
        ({"checksums": "0" * 32}, "it has no 3 checksums for its tensors"),
        ({"checksums": "x" * 24}, "it has no 3 checksums for its tensors"),
        ({"checksums": "0" * 24}, "tensor '0.0' was changed: it has the checksum [0-9a-f]{8}, not 00000000"),
        ({"empty": [1]}, "its lists without elements have no paths"),
        ({"empty": ["0.0"]}, "there are two values at 0.0"),
        ({"empty": [""]}, "is not the path of a value"),
        ({"empty": ["1"]}, "it has 1 classes for 2 states"),
        ({"scalars": {"0.2": 3}}, "there are two values at 0.2"),
        ({"scalars": {"0.3": 3}}, "cache 0, KVCache: a KVCache state is"),
        ({"scalars": {"0.3": [3]}}, "its scalars are not ints, flags, strings and None"),
        ({"scalars": {"0.3": 1.5}}, "holds '1.5', which is no whole number"),
        ({"metadata": {"a": "b"}}, "what it says of itself is not layout, checksums"),
        ({"metadata": [["a", 1]]}, "its metadata are not strings"),
        ({"metadata": [["a", [1.5]]]}, "holds '1.5', which is no whole number"),
        ({"metadata": [["a", [True]]]}, "its metadata are not strings"),
        ({"metadata": [["a", [0x110000]]]}, "its metadata are not strings"),
        ({"metadata": [[[-1], "a"]]}, "its metadata are not strings"),
        ({"metadata": [["a", "b", "c"]]}, "its metadata are not pairs of strings"),
        ({"metadata": ["ab"]}, "its metadata are not pairs of strings"),
        ({"mlx_lm": 1}, "what it says of itself is not layout, checksums"),
    ],
)
def test_facts_that_are_wrong(file: Path, facts: dict[str, Any], words: str) -> None:
    join(file, *own_header())
    assert load(file)[0].offset == 1
    join(file, *own_header(**facts))
    refused(file, words)


def test_a_seal_that_does_not_fit_is_refused(file: Path) -> None:
    join(file, *own_header())
    content = file.read_bytes()
    at = content.index(b"seal") + 9
    file.write_bytes(content[:at] + b"00000000" + content[at + 8 :])
    refused(file, "its header was changed after it was saved")


def test_a_state_that_makes_a_class_fail_is_the_file_s_fault(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(file, [fed(mlximpl.KVCache(), 3)])

    def fail(state: object) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(mlximpl.KVCache, "from_state", fail)
    refused(file, r"cache 0, KVCache: IndexError\('out of range'\)")


INTS = [0, 1, -1, 3, 5, 9, 256, 2**30, 2**31 - 1, -(2**31), 2**31, 2**40, 2**63 - 1, -(2**63)]


@pytest.mark.parametrize("name", [name for name in SITUATIONS if "list" not in name or name == "list"])
def test_whatever_numbers_a_foreign_file_holds_it_is_read_or_refused(file: Path, name: str) -> None:
    save(file, [SITUATIONS[name]()])
    header, data = split(file)
    header["__metadata__"]["2.0"] = ""  # as mlx-lm's
    numbers = [key for key, entry in header.items() if key != "__metadata__" and entry["dtype"] in ("I32", "BOOL")]
    for key in numbers:
        start, stop = header[key]["data_offsets"]
        count = (stop - start) // (4 if header[key]["dtype"] == "I32" else 1)
        for number in INTS:
            changed = copy.deepcopy(header)
            changed[key] |= {"dtype": "I64", "data_offsets": [start, start + 8 * count]}
            for other, entry in changed.items():
                if other not in (key, "__metadata__") and entry["data_offsets"][0] >= stop and stop > start:
                    entry["data_offsets"] = [at + start + 8 * count - stop for at in entry["data_offsets"]]
            join(file, changed, data[:start] + struct.pack("<q", number) * count + data[stop:])
            try:
                (cache,) = load(file)
            except PromptCacheFileError as refusal:
                assert caused_by_a_refusal(refusal), repr(refusal.__cause__)
            else:
                assert repr(cache) and cache.nbytes >= 0 and cache.size() >= 0 and cache.empty() in (False, True)
                save(file, [cache])
                assert same(saved(load(file)[0]), saved(cache))


def caused_by_a_refusal(refusal: BaseException | None) -> bool:
    while refusal is not None:
        if not isinstance(refusal, ValueError):
            return False
        refusal = refusal.__cause__
    return True


@pytest.mark.parametrize(
    "header",
    [
        b"[" + b"[]," * 3_000_000 + b"[]]",
        b'{"a":[' + b"0," * 5_000_000 + b"0]}",
        b"{" + b",".join(b'"%x":{}' % i for i in range(400_000)) + b"}",
        b'{"__metadata__":{' + b",".join(b'"%x":""' % i for i in range(400_000)) + b"}}",
        b'{"a":"' + b"\\u4e2d" * 1_500_000 + b'"}',
        b'{"a":"' + "\U0001f600".encode() * 2_500_000 + b'"}',
        b'{"a":"' + b"x" * 20_000_000 + "\U0001f600".encode() + b'"}',
        b'"' * 5_000_000,
        b"\\" * 5_000_000,
    ],
)
def test_a_header_is_not_blown_up(file: Path, header: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    gc.collect()
    tracemalloc.start()
    try:
        refused(file, "header")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(header) + (64 << 20)


def test_rows_beyond_what_a_batch_has_are_not_read(file: Path) -> None:
    mx.save_safetensors(
        str(file),
        {"0.0": mx.zeros((1, 1, 1, 1)), "0.1": mx.zeros((1, 1, 1, 1)), "0.2": mx.zeros((2**16 + 1,), mx.int32)}
        | {"0.3": mx.zeros((1,), mx.int32), "0.4": mx.array(1)},
        {"1.0": "BatchKVCache", "2.0": "", "2.1.0": "0.4", "2.1.1": "scalar"},
    )
    refused(file, "offset is for 65537 rows, and 65536 are the most")


def test_a_file_that_becomes_shorter_while_it_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(file, [fed(mlximpl.KVCache(), 400, size=256)])
    content = file.read_bytes()
    described = load_prompt_file._described

    def cut(header: Any) -> Any:
        os.truncate(file, len(content) // 2)
        return described(header)

    monkeypatch.setattr(load_prompt_file, "_described", cut)
    for at_once in (0, len(content) - 1):
        monkeypatch.setattr(load_prompt_file, "AT_ONCE", at_once)
        for mmap, words in ((False, "was changed|has become shorter"), (True, "has become shorter")):
            file.write_bytes(content)
            with pytest.raises(PromptCacheFileError, match=words):
                load(file, mmap=mmap)


def test_a_file_that_becomes_shorter_while_mlx_loads_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(file, [fed(mlximpl.KVCache(), 400, size=256)])
    caches = load_prompt_file._caches

    def cut(*given: Any) -> Any:
        os.truncate(file, 8)
        return caches(*given)

    monkeypatch.setattr(load_prompt_file, "_caches", cut)
    with pytest.raises(PromptCacheFileError, match="has become shorter while it was read"):
        load(file)


def test_a_long_tensor_is_no_scalar(file: Path) -> None:
    state = {"0.0": mx.ones((1, 1, 1, 1)), "0.1": mx.ones((1, 1, 1, 1)), "0.2": mx.zeros((20_000,), mx.int32)}
    mx.save_safetensors(str(file), state, UPSTREAM)
    refused(file, "'0.2' is listed as a scalar, but there is no short tensor of that name")


def test_a_reason_is_short(file: Path) -> None:
    state = {"0.0": mx.ones((1, 1, 1, 1)), "0.1": mx.ones((1, 1, 1, 1)), "0.2": mx.zeros((5000,), mx.int32)}
    entries = {"1.0": "BatchKVCache", "2.0": "", "2.1.0": "0.4", "2.1.1": "scalar"}
    mx.save_safetensors(str(file), state | {"0.3": mx.full((5000,), -1), "0.4": mx.array(1)}, entries)
    with pytest.raises(PromptCacheFileError, match="left_padding must be at least 0") as refusal:
        load(file)
    assert len(refusal.value.reason) == 1000


def by_numpy(content: bytes) -> int:
    whole = len(content) // 4112 * 4112
    sums = np.frombuffer(content[:whole], "<u4").reshape(-1, 1028).sum(axis=0, dtype=np.uint32)
    return zlib.crc32(content[whole:], zlib.crc32(sums.tobytes()))


@pytest.mark.parametrize("dtype", [mx.uint8, mx.float16, mx.bfloat16, mx.float32, mx.int64, mx.complex64])
@pytest.mark.parametrize("nbytes", [4112 * 16, 4112 * 20 + 8, 4112 * 21 - 8, 100_000])
def test_the_checksum_of_a_long_tensor(dtype: mx.Dtype, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    words = mx.array(np.frombuffer(content, np.uint8)).view(dtype)
    assert checksums.sums_of(words).checksum() == by_numpy(content)
    assert checksums.sums_of(words.reshape(1, -1, 1)).checksum() == by_numpy(content)
    # What is too long to be one row of MLX's is added up in pieces.
    monkeypatch.setattr(checksums, "ELEMENTS_MOST", 10)
    monkeypatch.setattr(checksums, "PIECE", 3 * 4112)
    assert checksums.sums_of(words).checksum() == by_numpy(content)


def test_a_long_tensor_that_was_changed_is_refused(file: Path) -> None:
    save(file, [fed(mlximpl.KVCache(), 200, size=96), fed(mlximpl.KVCache(), 1)])
    header, data = split(file)
    content = file.read_bytes()
    start = len(content) - len(data)
    draw = random.Random(0)
    assert min(header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in ("0.0", "0.1")) > 65536
    for _ in range(200):
        changed = bytearray(content)
        a, b = (start + draw.randrange(2 * 200 * 96 * 2 * 4) for _ in range(2))
        what = draw.choice(("flip", "swap", "zeros", "two"))
        if what == "flip":
            changed[a] ^= 1 << draw.randrange(8)
        elif what == "two":
            changed[a] ^= 0x40
            changed[b] ^= 0x40
        elif what == "swap":
            size = draw.choice((4, 16, 256))
            b = a + size * draw.randint(1, 30)
            changed[a : a + size], changed[b : b + size] = changed[b : b + size], changed[a : a + size]
        else:
            changed[a : a + 512] = bytes(512)
        if changed != content and len(changed) == len(content):
            file.write_bytes(changed)
            refused(file, "was changed")


def test_what_mlx_cannot_load_by_itself_is_read_all_the_same(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = fed(mlximpl.KVCache(), 300, size=128, dtype=mx.bfloat16)
    save(file, [cache])

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(mx, "load", fail)
    assert same(saved(load(file)[0]), saved(cache))
    content = bytearray(file.read_bytes())
    content[-100_000] ^= 1
    file.write_bytes(content)
    refused(file, "was changed")
