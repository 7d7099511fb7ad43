"""Traces and their operations: written, read back, refused, and made small."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlximpl
import reference as ref
from conformance import operations as ops
from conformance.adapters.base import Adapter, Inputs, Observation
from conformance.adapters.reference import ReferenceAdapter
from conformance.adapters.surface import SurfaceAdapter
from conformance.driver import Divergence, run
from conformance.payload import Config
from conformance.shrink import find, shrink
from conformance.situations.build import Part, batch, feed, finalize, keep, ones, prepare, ring, situation, solo, trim
from conformance.trace import FORMAT, Step, Trace, TraceError, load, parse, save

OPERATIONS: list[ops.Operation] = [
    ops.New("x", "KVCache", ("a",)),
    ops.New("x", "KVCache", ("a", "b")),
    ops.New("x", "RotatingKVCache", ("a",), max_size=8, keep=2),
    ops.New("x", "BatchKVCache", ("a", "b"), (0, 3)),
    ops.New("x", "BatchKVCache", (), ()),
    ops.New("x", "BatchRotatingKVCache", ("a", "b"), (0, 3), 8),
    ops.Update("x", 1),
    ops.Update("x", 4, 3, True),
    ops.Update("x", 2, variant="heads"),
    ops.Mask("x", 2),
    ops.Mask("x", -1, 0, True),
    ops.Prepare("x"),
    ops.Prepare("x", (1, 0), (3, 2), (0, 1)),
    ops.Prepare("x", right_padding=(0, 2)),
    ops.Finalize("x"),
    ops.Filter("x", ("b", "b"), ("b", "c")),
    ops.Filter("x", (), ()),
    ops.Extend("x", "y", ("c",)),
    ops.Extract("x", "a", "y", "c"),
    ops.Merge("x", ("i", "j"), ("c", "d")),
    ops.Merge("x", (), ()),
    ops.Trim("x", -5),
    ops.Copy("x", "y", ("c", "d")),
    ops.Restore("x", "y", ("c", "d")),
    ops.New("x", "QuantizedKVCache", ("a",), group_size=32, bits=3),
    ops.New("x", "ChunkedKVCache", ("a",), chunk_size=8),
    ops.New("x", "ArraysCache", ("a", "b"), (0, 3), slots=2),
    ops.New("x", "CacheList", ("a",), children=(ops.Child("CacheList", children=(ops.Child("KVCache"),)),)),
    ops.Update("x", 4, slot=1),
    ops.TrimFront("x"),
    ops.Restore("x", "y", ("c",), "mapped"),
    ops.ToQuantized("x", "y", ("c",), 32, 4),
]


# -- operations ------------------------------------------------------------------------------------


def test_every_operation_is_among_the_examples() -> None:
    assert {type(operation) for operation in OPERATIONS} == set(ops.OPERATIONS.values())


@pytest.mark.parametrize("operation", OPERATIONS, ids=ops.call)
def test_an_operation_is_the_same_after_json_and_back(operation: ops.Operation) -> None:
    assert ops.from_dict(json.loads(json.dumps(ops.to_dict(operation)))) == operation


def test_fields_at_their_default_are_left_out() -> None:
    assert ops.to_dict(ops.Update("x", 1)) == {"op": "update", "cache": "x", "tokens": 1}
    assert ops.to_dict(ops.Finalize("x")) == {"op": "finalize", "cache": "x"}
    assert ops.to_dict(ops.New("x", "KVCache", ("a",))) == {
        "op": "new",
        "cache": "x",
        "kind": "KVCache",
        "rows": ["a"],
    }


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (ops.Update("x", 1), "x.update(tokens=1)"),
        (ops.Update("x", 4, 3, True, "heads"), "x.update(tokens=4, window=3, return_array=True, variant='heads')"),
        (ops.New("x", "KVCache", ("a",)), "x.new(kind='KVCache', rows=['a'])"),
        (ops.Filter("x", ("b",), ("b",)), "x.filter(rows=['b'], names=['b'])"),
        (ops.Extract("x", "a", "y", "c"), "x.extract(row='a', into='y', name='c')"),
        (ops.Prepare("x", lengths=(3, 2)), "x.prepare(lengths=[3, 2])"),
        (ops.Finalize("x"), "x.finalize()"),
    ],
)
def test_a_call_reads_as_a_person_would_write_it(operation: ops.Operation, text: str) -> None:
    assert ops.call(operation) == text


NEW = {"op": "new", "cache": "x", "kind": "KVCache", "rows": ["a"]}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"op": "updaet", "cache": "x", "tokens": 1}, "unknown operation 'updaet'; known are new, update, "),
        ({"cache": "x", "tokens": 1}, "unknown operation None"),
        ({"op": ["update"], "cache": "x", "tokens": 1}, r"unknown operation \['update'\]"),
        ({"op": "update", "cache": "x", "tokens": 1, "widnow": 3}, "'update' has no field widnow"),
        ({"op": "update", "cache": "x", "a": 1, "b": 1}, "'update' has no field a, b"),
        ({"op": "update", "cache": "x"}, "'update' needs the field tokens"),
        ({"op": "filter", "cache": "x"}, "'filter' needs the field names, rows"),
        ({"op": "update", "cache": "x", "tokens": "1"}, "tokens is '1', but should be int"),
        ({"op": "update", "cache": "x", "tokens": 1.0}, "tokens is 1.0, but should be int"),
        ({"op": "update", "cache": "x", "tokens": True}, "tokens is True, but should be int"),
        ({"op": "update", "cache": "x", "tokens": None}, "tokens is None, but should be int"),
        ({"op": "update", "cache": 7, "tokens": 1}, "cache is 7, but should be str"),
        ({"op": "update", "cache": "x", "tokens": 1, "return_array": 1}, "return_array is 1, but should be bool"),
        ({"op": "filter", "cache": "x", "rows": "ab", "names": ["a", "b"]}, "rows is 'ab', but should be tuple"),
        ({"op": "filter", "cache": "x", "rows": [0], "names": ["a"]}, r"rows is \[0\], but should be tuple"),
        ({"op": "prepare", "cache": "x", "lengths": [1, "2"]}, r"lengths is \[1, '2'\], but should be tuple"),
        ({"op": "prepare", "cache": "x", "lengths": 3}, "lengths is 3, but should be tuple"),
        (NEW | {"kind": "Cache"}, "'new': kind is 'Cache', but should be one of KVCache, RotatingKVCache, "),
        (NEW | {"kind": "BatchRotatingKVCache"}, "a BatchRotatingKVCache without max_size"),
        (NEW | {"max_size": 4}, "a KVCache with max_size 4"),
        (NEW | {"kind": "QuantizedKVCache", "bits": 4}, "a QuantizedKVCache without group_size"),
        (NEW | {"kind": "ArraysCache"}, "an ArraysCache without slots"),
        (NEW | {"children": [{"kind": "KVCache"}]}, "a KVCache with children"),
        (NEW | {"kind": "CacheList", "children": [{"kind": "Cache"}]}, "kind is 'Cache', but should be one of"),
        (NEW | {"kind": "CacheList", "children": [{"kind": "KVCache", "rows": []}]}, "a child of .* has no field rows"),
        (NEW | {"kind": "CacheList", "children": ["KVCache"]}, "should be a list of objects"),
        (NEW | {"kind": "BatchKVCache", "left_padding": [1, 2]}, r"left_padding \[1, 2\] for the rows \['a'\]"),
        ({"op": "update", "cache": "x", "tokens": 1, "variant": "head"}, "variant is 'head', but should be one of"),
        ({"op": "restore", "cache": "x", "into": "y", "names": [], "via": "air"}, "via is 'air', but should be one of"),
        ({"op": "filter", "cache": "x", "rows": ["a"], "names": []}, r"names \[\] for the rows \['a'\]"),
        ({"op": "merge", "cache": "x", "caches": [], "names": ["a"]}, r"names \['a'\] for the caches \[\]"),
    ],
)
def test_data_that_is_no_operation_is_refused_in_words(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.from_dict(data)


# -- files -----------------------------------------------------------------------------------------

WHOLE = Trace(
    config=Config("bfloat16", heads=2, key_dim=5, value_dim=7, attention=True),
    steps=(
        Step(OPERATIONS[0], True, {"rows": ["a"], "offsets": [0]}),
        Step(ops.Update("x", 3), None, {"visible": {"a": [[0], [0, 1], None]}}),
        Step(ops.Trim("x", -1), False, {"refused": True}),
        Step(ops.Trim("x", 1)),
    ),
    description="a “trace” of everything",
    source={"name": "mlx-lm", "version": "0.32.2"},
    flags=("Rollback", "Refusal"),
    deviation={"does": "this", "right": "that", "signature": "KVCache/trim/refusal/negative"},
)


def test_a_trace_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    path = tmp_path / "made" / "for" / "it.json"
    save(WHOLE, path)
    assert load(path) == WHOLE
    text = path.read_text(encoding="utf-8")
    save(load(path), path)
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("operation", OPERATIONS, ids=ops.call)
def test_a_trace_holds_every_operation(operation: ops.Operation, tmp_path: Path) -> None:
    trace = Trace(Config(), (Step(operation), Step(operation, False)))
    save(trace, tmp_path / "trace.json")
    assert load(tmp_path / "trace.json") == trace


def test_a_file_has_one_step_a_line(tmp_path: Path) -> None:
    save(WHOLE, tmp_path / "trace.json")
    lines = (tmp_path / "trace.json").read_text(encoding="utf-8").splitlines()
    assert sum(line.strip().startswith('{"op"') for line in lines) == len(WHOLE.steps)
    assert sum(line.strip().startswith('{"checks"') for line in lines) == 3


def test_a_trace_without_steps_is_a_trace(tmp_path: Path) -> None:
    save(Trace(Config(), ()), tmp_path / "trace.json")
    assert load(tmp_path / "trace.json") == Trace(Config(), ())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_refused_wherever_it_is_cut(cut: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("cut") / "trace.json"
    save(WHOLE, path)
    # The last bytes are the closing brace and a newline that a reader can do without.
    text = path.read_bytes().rstrip()
    path.write_bytes(text[: int(len(text) * cut)])
    with pytest.raises(TraceError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: no complete JSON file (")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "no complete JSON file"),
        (b"", "no complete JSON file"),
        (b"[]", "a trace is a JSON object"),
        (b"null", "a trace is a JSON object"),
        (b"{}", "format is None, but this reader knows format 1"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.json", tmp_path):
        with pytest.raises(TraceError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}: ")
        assert "directory" in str(caught.value)


def step(number: int, **fields: Any) -> Callable[[dict[str, Any]], object]:
    """Change a step, counted from 0 among the lines of the file."""
    return lambda data: data["steps"][number].update(fields)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a newer format": (lambda data: data.update(format=FORMAT + 1), "format is 2, but this reader knows format 1"),
    "a format in words": (lambda data: data.update(format="1"), "format is '1', but this reader knows format 1"),
    "no format": (lambda data: data.pop("format"), "format is None"),
    "no steps": (lambda data: data.pop("steps"), "steps is missing or no list"),
    "steps that are no list": (lambda data: data.update(steps={}), "steps is missing or no list"),
    "no config": (lambda data: data.pop("config"), "config is missing or no object"),
    "a source that is no object": (lambda data: data.update(source="hand"), "source is missing or no object"),
    "flags that are no list": (lambda data: data.update(flags={}), "flags is missing or no list"),
    "a deviation that is no object": (lambda data: data.update(deviation="D1"), "deviation is no object"),
    "an unknown config field": (lambda data: data["config"].update(head=2), "config has no field head"),
    "an unknown dtype": (lambda data: data["config"].update(dtype="int8"), "dtype is 'int8', but should be one of"),
    "no heads": (lambda data: data["config"].update(heads=0), "heads 0, .* must be at least 1, 4 and 4"),
    "heads in words": (lambda data: data["config"].update(heads="two"), "config: "),
    "a step that is no object": (lambda data: data["steps"].insert(0, "x"), "step 1 is no object"),
    "an unknown operation": (step(2, op="updaet"), "step 2: unknown operation 'updaet'"),
    "an unknown field": (step(2, widnow=3), "step 2: operation 'update' has no field widnow"),
    "a missing field": (lambda data: data["steps"][2].pop("tokens"), "step 2: operation 'update' needs the field tok"),
    "a field of another type": (step(2, tokens="three"), "step 2: operation 'update': tokens is 'three', but should"),
    "checks before an operation": (lambda data: data["steps"].pop(0), "step 1: checks must be an object that follows"),
    "checks twice": (lambda data: data["steps"].insert(1, data["steps"][1]), "step 2: checks must be an object that"),
    "checks that are no object": (step(1, checks=[1]), "step 2: checks must be an object that follows an operation"),
    "valid in words": (step(0, valid="yes"), "step 1: valid is 'yes', but should be true or false"),
    "valid as a number": (step(0, valid=7), "step 1: valid is 7, but should be true or false"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_trace_with_a_fault_is_refused_with_the_path_and_the_reason(fault: str, tmp_path: Path) -> None:
    change, words = REFUSED[fault]
    data = json.loads(json.dumps(WHOLE.to_dict()))
    assert parse(json.loads(json.dumps(data))) == WHOLE
    change(data)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(TraceError, match=words) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


# -- shrinking -------------------------------------------------------------------------------------


class Forgetful(ReferenceAdapter):
    """A reference whose rings report one token too few once they have had more than max_size."""

    name = "forgetful"

    def step(self, operation: ops.Operation, inputs: Inputs) -> Observation:
        seen = super().step(operation, inputs)
        cache = self.caches.get(operation.cache)
        if not isinstance(cache, ref.Cache) or cache.max_size is None or seen.refused or not seen.offsets:
            return seen
        if max(seen.offsets) > cache.max_size:
            return replace(seen, offsets=tuple(offset - 1 for offset in seen.offsets))
        return seen


class NeverTrims(mlximpl.KVCache):
    """Says that it has dropped tokens, and keeps them."""

    def _trim(self, n: int) -> None:
        pass


def never_trims() -> Adapter:
    module = ModuleType("never_trims")
    vars(module)["KVCache"] = NeverTrims
    return SurfaceAdapter("never_trims", module, "0")


def both(broken: Adapter) -> list[Adapter]:
    return [ReferenceAdapter(), broken]


def trace_of(*parts: Part, config: Config | None = None) -> Trace:
    made = situation("", "", "", *parts)
    return Trace(config or Config(), tuple(Step(operation) for operation in made.operations))


LONG = trace_of(
    batch(0, 2, rows="cd", cache="y"),
    feed(2, 3, cache="y"),
    ring(6, keep=1),
    feed(2, window=3),
    prepare(3, 5, cache="y"),
    feed(2, cache="y"),
    trim(1),
    ones(2),
    feed(3, cache="y"),
    finalize("y"),
    keep("d", cache="y"),
    feed(5, window=2, array=True),
    ones(3),
    feed(1, cache="y"),
    config=Config("bfloat16", heads=2, key_dim=5, value_dim=6),
)


def first(trace: Trace, adapters: list[Adapter]) -> str:
    """The signature of the first divergence."""
    with pytest.raises(Divergence) as caught:
        run(trace, adapters)
    return caught.value.found.signature


def test_a_long_failing_trace_becomes_short_and_fails_in_the_same_way() -> None:
    adapters = both(Forgetful())
    signature = first(LONG, adapters)
    found, short = shrink(LONG, signature, adapters)
    assert found.signature == signature == "RotatingKVCache/update/offset/sinks+trimmed+window"
    # Sinks, a trim and a window are part of the finding, so they stay.
    assert [ops.call(each.operation) for each in short.steps] == [
        "x.new(kind='RotatingKVCache', rows=['a'], max_size=2, keep=1)",
        "x.update(tokens=1)",
        "x.trim(tokens=1)",
        "x.update(tokens=3, window=2)",
    ]
    assert found.step == len(short.steps) < len(LONG.steps)
    assert short.config == Config()
    assert short.description == found.sentence()
    assert first(short, adapters) == signature


def test_the_numbers_of_a_failing_trace_become_small() -> None:
    adapters = both(never_trims())
    trace = trace_of(solo("ab"), feed(9, 7, window=3), trim(6), feed(4))
    signature = first(trace, adapters)
    found, short = shrink(trace, signature, adapters)
    assert [ops.call(s.operation) for s in short.steps] == [
        "x.new(kind='KVCache', rows=['b'])",
        "x.update(tokens=1)",
        "x.trim(tokens=1)",
    ]
    assert found.signature == signature == "KVCache/trim/offset/-"
    assert found.sentence() == "step 3: offset[b]=1, but should be 0 [x.trim(tokens=1)]"


def test_shrinking_a_shrunk_trace_changes_nothing() -> None:
    adapters = both(Forgetful())
    signature = first(LONG, adapters)
    _, short = shrink(LONG, signature, adapters)
    assert shrink(short, signature, adapters)[1] == short


def test_a_trace_that_does_not_show_the_finding_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match="does not show KVCache/trim"):
        shrink(LONG, "KVCache/trim/offset/-", both(Forgetful()))


def test_a_trace_whose_steps_make_no_sense_shows_nothing() -> None:
    adapters = both(Forgetful())
    assert find(replace(LONG, steps=LONG.steps[1:]), adapters) is None
    assert find(replace(LONG, steps=LONG.steps[:-9]), adapters) is None
