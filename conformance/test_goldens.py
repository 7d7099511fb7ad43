"""Goldens: what they hold is lawful and every implementation gives it; they can be recorded again; broken ones fall."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from conformance import operations as ops
from conformance.adapters.base import Adapter, Inputs, Observation
from conformance.adapters.reference import ReferenceAdapter
from conformance.adapters.registry import make_adapter
from conformance.driver import Divergence, Driver
from conformance.goldens import Golden, check_golden, find_goldens, load_golden, save_golden
from conformance.lint import lint
from conformance.payload import Config, from_storage
from conformance.projection import alone, sequences
from conformance.sessions import DEVIATING_SESSIONS, SESSIONS
from conformance.situations import DEVIATIONS, SITUATIONS
from conformance.situations.build import feed, ring, situation
from conformance.trace import TraceError
from conformance.zoo.families import FAMILIES
from conformance.zoo_sessions import ZOO_SESSIONS

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
UPSTREAM = GOLDENS / "mlx-lm-0.32.2"
PATHS = find_goldens(GOLDENS)
DEVIATION_PATHS = find_goldens(GOLDENS / "deviations")
SESSION_PATHS = find_goldens(UPSTREAM / "sessions")
STATES = UPSTREAM / "sessions" / "mamba2" / "a_tail_and_a_state_layer1.json"
LIST = UPSTREAM / "sessions" / "falcon_h1" / "states_beside_keys_and_values_layer1.json"
LAWFUL_SESSIONS = (*SESSIONS, *ZOO_SESSIONS)
SMALL = UPSTREAM / "filter" / "ring_wrapped.json"


def name(path: Path) -> str:
    return str(path.relative_to(GOLDENS).with_suffix(""))


every_golden = pytest.mark.parametrize("path", PATHS, ids=name)
every_deviation = pytest.mark.parametrize("path", DEVIATION_PATHS, ids=name)
every_session = pytest.mark.parametrize("path", SESSION_PATHS, ids=name)


@pytest.fixture
def reference() -> Adapter:
    return make_adapter("reference")


@pytest.fixture
def mlximpl() -> Adapter:
    pytest.importorskip("mlximpl")
    return make_adapter("mlximpl")


@pytest.fixture
def mlx_lm() -> Adapter:
    pytest.importorskip("mlx_lm")
    return make_adapter("mlx_lm")


# -- what goldens hold ----------------------------------------------------------------------------


@every_golden
def test_the_reference_gives_what_a_golden_holds(path: Path, reference: Adapter) -> None:
    check_golden(path, [reference])


@every_golden
def test_mlximpl_gives_what_a_golden_holds(path: Path, reference: Adapter, mlximpl: Adapter) -> None:
    check_golden(path, [reference, mlximpl])


@every_session
def test_upstream_by_itself_gives_what_a_session_holds(path: Path, reference: Adapter, mlx_lm: Adapter) -> None:
    """What was captured of models at work, mlx-lm's caches do when the operations alone are called on them."""
    passed = ("aliased", "unanswered", "empty", "trimmable", "size")
    check_golden(path, [reference, mlx_lm], lambda found: found.adapter == mlx_lm.name and found.observable in passed)


@every_deviation
def test_upstream_still_deviates(path: Path, reference: Adapter, mlx_lm: Adapter) -> None:
    golden = load_golden(path)
    passed = ("aliased", "unanswered", "empty", "trimmable", "size")
    wanted = golden.trace.deviation["signature"]
    driver = Driver(
        [reference, mlx_lm],
        golden.trace.config,
        lambda found: found.observable in passed and found.signature != wanted,
        golden.payload(),
    )
    with pytest.raises(Divergence) as caught:
        for step in golden.trace.steps:
            driver.step(step.operation)
    assert caught.value.found.signature == wanted
    assert caught.value.found.step == len(golden.trace.steps)


def test_reading_and_checking_need_no_mlx() -> None:
    """Ports read goldens where there is no MLX."""
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx_lm'] = None\n"
        "from pathlib import Path\n"
        "from conformance.adapters.registry import make_adapter\n"
        "from conformance.goldens import check_golden, load_goldens\n"
        "from conformance.lint import Linter\n"
        f"upstream = Path({str(UPSTREAM)!r})\n"
        "for golden in load_goldens(upstream / 'merge'):\n"
        "    check_golden(golden, [make_adapter('reference')])\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=GOLDENS.parent, check=True)


def test_every_golden_is_written_in_the_lists() -> None:
    """A golden that no list writes would not be recorded again; one that is written was recorded."""
    written = {f"mlx-lm-0.32.2/{s.path}" for s in SITUATIONS} | {f"deviations/{d.path}" for d in DEVIATIONS}
    written |= {f"mlx-lm-0.32.2/sessions/{s.path}_layer{layer}" for s in LAWFUL_SESSIONS for layer in s.layers}
    written |= {f"deviations/{s.filed_as}" for s in DEVIATING_SESSIONS}
    assert {name(path) for path in PATHS if "regressions" not in path.parts} == written
    assert len(SITUATIONS) == len({s.path for s in SITUATIONS})
    assert len(SITUATIONS) == len({s.description for s in SITUATIONS}), "a description tells situations apart"


def test_every_family_of_the_zoo_has_a_session() -> None:
    assert {family.name for family in FAMILIES} == {session.model for session in LAWFUL_SESSIONS}


def test_every_other_kind_has_eight_lawful_traces_or_more() -> None:
    places = [path.parent.name for path in PATHS if "deviations" not in path.parts]
    assert all(places.count(kind) >= 8 for kind in ("quantized", "concatenating", "chunked", "arrays", "list"))


# -- a row is what it would be alone --------------------------------------------------------------


def rows_alone(path: Path, adapter: Adapter) -> int:
    golden = load_golden(path)
    count = 0
    for sequence in sequences(golden):
        seen = alone(sequence, adapter, golden.trace.config)
        assert seen == [share.seen for share in sequence.shares], f"row {sequence.name}"
        count += 1
    return count


@every_session
def test_a_row_of_a_session_replayed_alone_sees_the_same(path: Path, reference: Adapter) -> None:
    assert rows_alone(path, reference) > 2


@every_session
def test_a_row_of_a_session_replayed_alone_on_mlximpl_sees_the_same(path: Path, mlximpl: Adapter) -> None:
    assert rows_alone(path, mlximpl) > 2


def test_a_row_that_saw_something_else_is_found(tmp_path: Path, reference: Adapter) -> None:
    path = copied(SESSION_PATHS[0], tmp_path)
    golden = load_golden(path)
    number = next(n for n, step in enumerate(golden.trace.steps, 1) if "width" in step.checks)
    keys = golden.arrays[f"{number}.keys"].copy()
    keys[0, 0, -1, 0] += 1
    broken = replace(golden, arrays={**golden.arrays, f"{number}.keys": keys})
    with pytest.raises(Divergence):
        list(sequences(broken))


# -- recording ------------------------------------------------------------------------------------


def recorded(directory: Path, *only: str) -> list[Path]:
    from conformance.record import record

    return record(directory, only)


def unsourced(golden: Golden) -> dict[str, Any]:
    return {**golden.trace.to_dict(), "source": None}


def skip_with_another_mlx_lm() -> None:
    from conformance.record import upstream_source

    there = load_golden(SMALL).trace.source
    if any(there[key] != value for key, value in upstream_source().items() if key.startswith("sha256")):
        pytest.skip("another mlx-lm is installed")


def test_recording_again_gives_the_goldens(tmp_path: Path) -> None:
    """All situations and deviations, as long as mlx-lm's caches are the recorded ones."""
    pytest.importorskip("mlx_lm")
    skip_with_another_mlx_lm()
    paths = recorded(tmp_path, *(f"/{s.path}" for s in SITUATIONS), *(f"/{d.path}" for d in DEVIATIONS))
    assert len(paths) == len(SITUATIONS) + len(DEVIATIONS)
    for path in paths:
        again, before = load_golden(path), load_golden(GOLDENS / path.relative_to(tmp_path))
        assert unsourced(again) == unsourced(before)
        assert again.arrays.keys() == before.arrays.keys()
        for which, x in again.arrays.items():
            assert x.tobytes() == before.arrays[which].tobytes(), f"{path.name}: {which}"


def test_sessions_recorded_again_take_the_same_steps(tmp_path: Path) -> None:
    """Their arrays are a model's, and differ from device to device in the last bits; what is done and seen does not."""
    pytest.importorskip("mlx_lm")
    skip_with_another_mlx_lm()
    paths = recorded(tmp_path, *(f"/sessions/{s.path}" for s in LAWFUL_SESSIONS))
    assert len(paths) == len(SESSION_PATHS)
    for path in paths:
        again, before = load_golden(path), load_golden(GOLDENS / path.relative_to(tmp_path))
        assert unsourced(again) == unsourced(before), path.name
        shapes = ({which: x.shape for which, x in golden.arrays.items()} for golden in (again, before))
        assert next(shapes) == next(shapes), path.name


def test_recording_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    only = ("filter/ring_wrapped", "D6-", "qwen3/extracted_and_put_back", "falcon_h1/", "llama4/")
    first, second = recorded(tmp_path / "a", *only), recorded(tmp_path / "b", *only)
    assert len(first) == len(second) == 8  # two situations, a deviation, two sessions of two layers and one of one
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
        assert a.with_suffix(".safetensors").read_bytes() == b.with_suffix(".safetensors").read_bytes()


def test_the_recorder_refuses_a_lawful_golden_that_breaks_a_law(tmp_path: Path, mlx_lm: Adapter) -> None:
    from conformance.record import RecordError, record_situation

    lawless = situation("mask/wide", "a window above max_size", "Window", ring(4), feed(6, window=8))
    with pytest.raises(RecordError, match=r"mask/wide breaks a law.*step 2: visible\[a\]"):
        record_situation(lawless, tmp_path / "x.json", mlx_lm, {})


def test_the_recorder_refuses_a_deviation_that_breaks_no_law(tmp_path: Path, mlx_lm: Adapter) -> None:
    from conformance.record import RecordError, record_situation

    lawful = replace(DEVIATIONS[0], operations=DEVIATIONS[0].operations[:-1])
    with pytest.raises(RecordError, match="breaks no law at its last step"):
        record_situation(lawful, tmp_path / "x.json", mlx_lm, {})
    longer = replace(DEVIATIONS[0], operations=(*DEVIATIONS[0].operations, ops.Update("x", 1)))
    with pytest.raises(RecordError, match="deviates before its last step"):
        record_situation(longer, tmp_path / "x.json", mlx_lm, {})
    other = replace(DEVIATIONS[0], about="offset")
    with pytest.raises(RecordError, match="is not about offset"):
        record_situation(other, tmp_path / "x.json", mlx_lm, {})


# -- broken files ---------------------------------------------------------------------------------


def copied(path: Path, directory: Path) -> Path:
    """A golden's two files in a directory of their own."""
    directory.mkdir(parents=True, exist_ok=True)
    for suffix in (".json", ".safetensors"):
        shutil.copy(path.with_suffix(suffix), directory)
    return directory / path.name


def edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def arrays_edited(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    sidecar = path.with_suffix(".safetensors")
    arrays = safetensors.numpy.load_file(sidecar)
    edit(arrays)
    sidecar.write_bytes(safetensors.numpy.save({which: np.ascontiguousarray(x) for which, x in arrays.items()}))


def flipped(arrays: dict[str, Any], which: str) -> None:
    x = arrays[which].copy()
    x.reshape(-1).view(np.uint8)[-4] ^= 1
    arrays[which] = x


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (cut, "no complete JSON file"),
    "not JSON": (lambda p: p.write_text("traces"), "no complete JSON file"),
    "a list": (lambda p: p.write_text("[]"), "a trace is a JSON object"),
    "another format": (
        lambda p: edited(p, lambda d: d.update(format=2)),
        "format is 2, but this reader knows format 1",
    ),
    "no steps": (lambda p: edited(p, lambda d: d.update(steps=[])), "it has no steps"),
    "an unknown operation": (
        lambda p: edited(p, lambda d: d["steps"][0].update(op="grow")),
        "unknown operation 'grow'",
    ),
    "an unknown field": (lambda p: edited(p, lambda d: d["steps"][2].update(toks=1)), "has no field toks"),
    "no sidecar": (
        lambda p: p.with_suffix(".safetensors").unlink(),
        r"beside it, ring_wrapped\.safetensors, are missing",
    ),
    "sidecar cut short": (lambda p: cut(p.with_suffix(".safetensors")), r"ring_wrapped\.safetensors cannot be read"),
    "sidecar empty": (lambda p: p.with_suffix(".safetensors").write_bytes(b""), "cannot be read"),
    "an array missing": (lambda p: arrays_edited(p, lambda a: a.pop("9.values")), r"the array 9\.values is missing"),
    "an array too many": (lambda p: arrays_edited(p, lambda a: a.update(x=a["9.keys"])), "no step has the array x"),
    "an array of another shape": (
        lambda p: arrays_edited(p, lambda a: a.update({"9.keys": a["9.keys"][:, :, 1:]})),
        r"the array 9\.keys is \(1, 1, 3, 4\)",
    ),
    "an array of another dtype": (
        lambda p: arrays_edited(p, lambda a: a.update({"9.keys": a["9.keys"].astype(np.float16)})),
        "of float16, but should be",
    ),
    "inputs of another row count": (
        lambda p: arrays_edited(
            p, lambda a: a.update({f"9.input.{w}": a[f"10.input.{w}"] for w in ("keys", "values")})
        ),
        r"the array 9\.input\.keys",
    ),
    "a step left out": (lambda p: edited(p, lambda d: d["steps"].__delitem__(slice(2, 4))), "declared step 3, found 2"),
    "checks left out": (lambda p: edited(p, lambda d: d["steps"].__delitem__(3)), "step 2 has no checks"),
    "an observable left out": (
        lambda p: edited(p, lambda d: d["steps"][3]["checks"].pop("offsets")),
        "step 2: offsets is None, but should be a list",
    ),
    "a refusal that was none": (
        lambda p: edited(p, lambda d: d["steps"][2].update(valid=False)),
        "valid is False, but refused is False",
    ),
}


@pytest.mark.parametrize(("break_it", "reason"), BROKEN.values(), ids=list(BROKEN))
def test_a_broken_golden_is_refused_by_name(break_it: Callable[[Path], Any], reason: str, tmp_path: Path) -> None:
    path = copied(SMALL, tmp_path)
    break_it(path)
    with pytest.raises(TraceError, match=reason) as caught:
        load_golden(path)
    assert str(path) in str(caught.value)


def test_checks_that_the_arrays_do_not_show_are_refused(tmp_path: Path, reference: Adapter) -> None:
    path = copied(SMALL, tmp_path)
    edited(path, lambda d: d["steps"][17]["checks"]["visible"].update(b=[[0, 2, 3, 4]]))
    with pytest.raises(TraceError, match=r"step 9: checks say visible .*\[0, 2, 3, 4\]"):
        check_golden(path, [reference])


@pytest.mark.parametrize("which", ["9.keys", "9.values", "9.mask", "9.input.keys"])
def test_one_bit_of_the_arrays_is_seen(which: str, tmp_path: Path, reference: Adapter) -> None:
    path = copied(SMALL, tmp_path)
    arrays_edited(path, lambda a: flipped(a, which))
    with pytest.raises((Divergence, TraceError)):
        check_golden(path, [reference])


@pytest.mark.parametrize("which", ["22.slot.0", "22.input.slot.1", "24.slot.1", "36.slot.0"])
def test_one_bit_of_a_state_is_seen(which: str, tmp_path: Path, reference: Adapter) -> None:
    path = copied(STATES, tmp_path)
    arrays_edited(path, lambda a: flipped(a, which))
    with pytest.raises(Divergence):
        check_golden(path, [reference])


@pytest.mark.parametrize("which", ["23.0.slot.0", "22.0.input.slot.1", "22.1.keys", "22.1.input.values"])
def test_one_bit_of_a_child_is_seen(which: str, tmp_path: Path, reference: Adapter) -> None:
    path = copied(LIST, tmp_path)
    arrays_edited(path, lambda a: flipped(a, which))
    with pytest.raises((Divergence, TraceError)):
        check_golden(path, [reference])


def test_a_written_state_of_other_rows_is_refused(tmp_path: Path, reference: Adapter) -> None:
    path = copied(STATES, tmp_path)
    arrays_edited(path, lambda a: a.update({"22.input.slot.0": a["22.input.slot.0"][:1]}))
    with pytest.raises(TraceError, match=r"step 22 writes a state of 2 rows, but the one recorded is \(1, 3, 24\)"):
        check_golden(path, [reference])


class Widens(ReferenceAdapter):
    """Gives states back in float32, whatever they were written in."""

    def step(self, operation: ops.Operation, inputs: Inputs) -> Observation:
        seen = super().step(operation, inputs)
        return replace(seen, states=seen.states and tuple(None if x is None else from_storage(x) for x in seen.states))


def test_a_state_of_another_dtype_is_seen(reference: Adapter) -> None:
    driver = Driver([reference, Widens()], Config("bfloat16"))
    driver.step(ops.New("x", "ArraysCache", ("a",), slots=1))
    with pytest.raises(Divergence, match=r"slot 0=float32 \(1, 1, 1, 4\) of other bits"):
        driver.step(ops.Update("x", 2))


@pytest.mark.parametrize("slot", [0, 1])
def test_states_of_exchanged_rows_are_seen(slot: int, tmp_path: Path, reference: Adapter) -> None:
    path = copied(STATES, tmp_path)
    arrays_edited(path, lambda a: a.update({f"28.slot.{slot}": a[f"28.slot.{slot}"][::-1]}))
    with pytest.raises(Divergence, match=r"step 28: state\[b3\]"):
        check_golden(path, [reference])


@pytest.mark.parametrize(("key", "value"), [("offsets", [6]), ("size", 3), ("rows", ["a"]), ("width", 3)])
def test_one_check_is_seen(key: str, value: Any, tmp_path: Path, reference: Adapter) -> None:
    path = copied(SMALL, tmp_path)
    edited(path, lambda d: d["steps"][17]["checks"].update({key: value}))
    with pytest.raises((Divergence, TraceError)):
        check_golden(path, [reference])


def test_a_step_on_a_cache_that_is_not_there_is_refused(tmp_path: Path, reference: Adapter) -> None:
    path = copied(SMALL, tmp_path)
    edited(path, lambda d: d["steps"][2].update(cache="z"))
    with pytest.raises(TraceError, match="step 2 names a cache or row that is not there"):
        check_golden(path, [reference])


def test_names_that_are_too_few_are_refused(tmp_path: Path, reference: Adapter) -> None:
    path = copied(SMALL, tmp_path)
    edited(path, lambda d: d["steps"][14].update(names=[]))
    with pytest.raises(TraceError, match=r"step 8: operation 'filter': names \[\] for the rows"):
        check_golden(path, [reference])


def test_saving_does_not_depend_on_how_arrays_lie_in_memory(tmp_path: Path) -> None:
    golden = load_golden(copied(SMALL, tmp_path))
    turned = {which: np.asfortranarray(x) for which, x in golden.arrays.items()}
    before = golden.path.with_suffix(".safetensors").read_bytes()
    save_golden(replace(golden, arrays=turned))
    assert golden.path.with_suffix(".safetensors").read_bytes() == before


# -- lint -----------------------------------------------------------------------------------------


def faults(directory: Path) -> list[str]:
    said: list[str] = []
    assert lint(directory, said.append) == len(said)
    return said


def test_every_golden_conforms() -> None:
    assert faults(GOLDENS) == []


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """A directory with one golden and the flags that it has."""
    directory = tmp_path / "goldens"
    path = copied(SMALL, directory / "filter")
    shutil.copy(GOLDENS / "trace.schema.json", directory)
    flags = json.loads((GOLDENS / "flags.json").read_text())
    used = load_golden(path).trace.flags
    (directory / "flags.json").write_text(json.dumps({flag: flags[flag] for flag in used}))
    assert faults(directory) == []
    return directory


LINT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flag that is not declared": (
        lambda p: edited(p.parent / "flags.json", lambda d: d.pop("Wrapped")),
        "the flag Wrapped is not declared in flags.json",
    ),
    "a flag that no golden has": (
        lambda p: edited(p.parent / "flags.json", lambda d: d.update(Odd={"kind": "BASIC", "description": "x"})),
        "flags.json: no golden has the flag Odd",
    ),
    "a flag without a kind": (
        lambda p: edited(p.parent / "flags.json", lambda d: d["Wrapped"].pop("kind")),
        "Wrapped should have a kind and a description",
    ),
    "a flag of another kind": (
        lambda p: edited(p.parent / "flags.json", lambda d: d["Wrapped"].update(kind="ODD")),
        "Wrapped is of kind 'ODD'",
    ),
    "flags that cannot be read": (lambda p: (p.parent / "flags.json").write_text("{"), "flags.json: cannot be read"),
    "a source without its version": (
        lambda p: edited(p / "ring_wrapped.json", lambda d: d["source"].pop("mlx")),
        "source does not say mlx",
    ),
    "no description": (
        lambda p: edited(p / "ring_wrapped.json", lambda d: d.update(description="")),
        "description is '', but should be some text",
    ),
    "a field that is not known": (
        lambda p: edited(p / "ring_wrapped.json", lambda d: d.update(comment="x")),
        "comment is no field that is known",
    ),
    "a check that is not known": (
        lambda p: edited(p / "ring_wrapped.json", lambda d: d["steps"][3]["checks"].update(colour=1)),
        "which is none of 15 things",
    ),
    "edited by hand": (
        lambda p: edited(p / "ring_wrapped.json", lambda d: None),
        "was not written by the recorder",
    ),
    "cut short": (lambda p: cut(p / "ring_wrapped.json"), "filter/ring_wrapped.json: no complete JSON file"),
    "checks that disagree": (
        lambda p: edited(p / "ring_wrapped.json", lambda d: d["steps"][17]["checks"]["visible"].update(b=[[0]])),
        "step 9: checks say visible",
    ),
    "arrays that break a law": (
        lambda p: arrays_edited(p / "ring_wrapped.json", lambda a: flipped(a, "9.keys")),
        "breaks a law: step 9: ",
    ),
    "a deviation outside of its place": (
        lambda p: edited(p / "ring_wrapped.json", lambda d: d.update(deviation=dict.fromkeys(("does", "right"), "x"))),
        "do not go together",
    ),
    "arrays without a trace": (
        lambda p: (p / "odd.safetensors").write_bytes(b""),
        "filter/odd.safetensors: no trace lies beside it",
    ),
    "a file of another kind": (lambda p: (p / "notes.txt").write_text(""), "filter/notes.txt: is no file of a golden"),
    "too many bytes": (
        lambda p: (p / "odd.safetensors").write_bytes(bytes(8_000_001)),
        "but should be 8000000 at most",
    ),
}


@pytest.mark.parametrize(("break_it", "fault"), LINT.values(), ids=list(LINT))
def test_lint_finds(break_it: Callable[[Path], Any], fault: str, few: Path) -> None:
    break_it(few / "filter")
    assert any(fault in line for line in faults(few)), faults(few)


def test_the_schema_is_in_step_with_the_operations() -> None:
    schema = json.loads((GOLDENS / "trace.schema.json").read_text())
    definitions = schema["$defs"]
    assert {f"op_{op}" for op in ops.OPERATIONS} == {which for which in definitions if which.startswith("op_")}
    referred = [option["$ref"].split("/")[-1] for option in definitions["step"]["anyOf"]]
    assert referred == [*(f"op_{op}" for op in ops.OPERATIONS), "checks_step"]
    kinds = {"int": "integer", "bool": "boolean", "str": "string"}
    for op, cls in ops.OPERATIONS.items():
        definition = definitions[f"op_{op}"]
        assert definition["properties"]["op"] == {"const": op}
        assert set(definition["properties"]) == {"op", "valid", *(f.name for f in fields(cls))}
        assert set(definition["required"]) == {"op", *(f.name for f in fields(cls) if f.default is MISSING)}
        for field in fields(cls):
            declared = str(field.type).removesuffix(" | None")
            found = definition["properties"][field.name]
            if field.name in ("kind", "children"):
                assert "#/$defs/" in str(found)
            elif declared.startswith("tuple"):
                inner = {"str": "string", "int": "integer"}[declared[6:9]]
                assert (found["type"], found["items"]["type"]) == ("array", inner)
            elif "enum" in found:
                assert found["enum"] == list({"variant": ops.VARIANTS, "via": ops.VIAS}[field.name])
            else:
                assert found["type"] == kinds[declared]
    assert definitions["kind"]["enum"] == list(ops.KINDS)
    assert set(definitions["child"]["properties"]) == {f.name for f in fields(ops.Child)}
    config = schema["properties"]["config"]
    assert set(config["properties"]) == {*config["required"], "two_level"} == {f.name for f in fields(Config)}
