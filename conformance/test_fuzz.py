"""The fuzzer: mutations are reproducible, mlximpl passes, and loaders that do wrong are found."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest

import mlximpl
from conformance import fuzz as verb
from conformance.file_seeds import Seed, reseal, seeds
from conformance.fuzz import as_json, finding_text, fuzz, summary
from conformance.fuzz_judge import FOUND, LAWFUL, REFUSED, case
from conformance.fuzz_workers import FuzzError
from conformance.mutations import MUTATIONS, RESEALED, Draw, join, split, swap_words

LOADERS = "conformance.meta.broken_loaders"
FEW = ("compact/kv_layers", "mappable/ring_wrapped", "mlx-lm-0.32.2/kv_trimmed", "mlx-lm-0.31.3/ring_wrapped")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[Seed]:
    return seeds(tmp_path_factory.mktemp("seeds"))


@pytest.fixture(scope="module")
def few(every: list[Seed]) -> list[Seed]:
    return [seed for seed in every if seed.name in FEW]


# -- the files ------------------------------------------------------------------------------------


def test_there_are_files_of_every_kind_and_layout(every: list[Seed]) -> None:
    layouts = Counter(seed.name.split("/")[0] for seed in every)
    assert layouts.keys() == {"compact", "mappable", "mlx-lm-0.32.2", "mlx-lm-0.31.3"}
    assert min(layouts.values()) > 30
    assert any(len(seed.content) > 100_000 for seed in every if seed.name.startswith("compact"))


def test_the_same_numbers_give_the_same_file(every: list[Seed]) -> None:
    files = [case(every, 7, number) for number in range(200)]
    assert files == [case(every, 7, number) for number in range(200)]
    assert len({file.content for file in files}) > 190
    assert files != [case(every, 8, number) for number in range(200)]


def test_every_mutation_is_drawn_and_changes_files(every: list[Seed]) -> None:
    drawn: Counter[str] = Counter()
    changed: Counter[str] = Counter()
    for number in range(1500):
        of = case(every, 0, number)
        drawn.update(of.mutations[:1])
        changed.update(of.mutations[:1] if of.content != of.seed.content else ())
    assert drawn.keys() == MUTATIONS.keys() | RESEALED.keys()
    assert all(changed[name] > drawn[name] * 0.4 for name in drawn), (drawn, changed)


def test_the_seal_is_what_mlximpl_writes(every: list[Seed]) -> None:
    sealed = [seed for seed in every if seed.sealed]
    for seed in sealed:
        assert reseal(seed.content) == seed.content, seed.name
        parts = split(seed.content)
        assert parts is not None
        assert join(parts) == seed.content, seed.name
    assert len(sealed) > 60


def test_a_file_without_a_seal_is_left_alone(every: list[Seed]) -> None:
    for seed in every:
        if not seed.sealed:
            assert reseal(seed.content) == seed.content


# -- what is loaded -------------------------------------------------------------------------------


def test_mutated_files_give_an_equal_cache_or_the_refusal(every: list[Seed], tmp_path: Path) -> None:
    result = fuzz(every, range(300), 1, 2, tmp_path)
    assert not result.failed, "\n".join(finding_text(result, finding) for finding in result.findings.values())
    assert result.files == 300
    assert sum(result.modes.values()) == 3 * 300
    assert result.modes["read", REFUSED] > 200
    assert result.modes["mapped", LAWFUL] > result.modes["read", LAWFUL] > 0
    assert 0 <= result.growth < 64 * 2**20
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("loader", "kind"),
    [
        ("empty", "nothing"),
        ("bare", "KeyError at broken_loaders.py"),
        ("nameless", "refusal"),
        ("trusting", "another cache, read"),
        ("greedy", "memory"),
        ("dying", "crash"),
        ("hanging", "hang"),
        ("changing", "another cache, mapped"),
    ],
)
def test_a_loader_that_does_wrong_is_found(loader: str, kind: str, few: list[Seed], tmp_path: Path) -> None:
    files = {"dying": 4, "hanging": 3, "greedy": 4, "changing": 200}.get(loader, 40)
    result = fuzz(few, range(files), 0, 1, tmp_path, f"{LOADERS}:{loader}", seconds=1)
    found = next((finding for name, finding in result.findings.items() if name.startswith(kind)), None)
    assert found is not None, result.findings
    assert result.failed
    assert result.times[found.kind] >= 1
    assert result.paths[found.kind].read_bytes() == case(few, 0, found.number).content
    assert f"--seed 0 --only {found.number}" in finding_text(result, found)
    assert len(list(tmp_path.iterdir())) <= len(result.findings)


def test_a_long_file_takes_no_more_than_twice_its_size(tmp_path: Path) -> None:
    layer = mlximpl.KVCache()
    x = mx.zeros((1, 8, 2000, 256))
    layer.update_and_fetch(x, x)
    mlximpl.save_prompt_cache(tmp_path / "long.safetensors", [layer])
    long = [Seed("long", (tmp_path / "long.safetensors").read_bytes(), True)]
    result = fuzz(long, range(3), 0, 1, tmp_path)
    assert not result.failed, result.findings
    if sys.platform == "linux":  # elsewhere a process that has loaded it once cannot tell
        assert list(fuzz(long, range(1), 0, 1, tmp_path, f"{LOADERS}:copying").findings) == ["memory"]


def test_words_of_a_long_tensor_that_change_places_are_seen(every: list[Seed], tmp_path: Path) -> None:
    content = next(seed.content for seed in every if seed.name == "compact/long tensors")
    path = tmp_path / "swapped.safetensors"
    for number in range(100):
        swapped = swap_words(Draw(Random(number), ()), content)
        path.write_bytes(swapped)
        if swapped != content:
            with pytest.raises(mlximpl.PromptCacheFileError):
                mlximpl.load_prompt_cache(path)
                pytest.fail(f"swap {number} was not seen")


def test_a_finding_is_told_once(few: list[Seed], tmp_path: Path) -> None:
    result = fuzz(few, range(40), 0, 1, tmp_path, f"{LOADERS}:empty")
    assert list(result.findings) == ["nothing"]
    assert result.times["nothing"] > 40
    assert result.findings["nothing"].number == 0 or result.outcomes[case(few, 0, 0).mutations[0], FOUND] == 0


def test_a_loader_that_refuses_what_is_right_is_no_finding(few: list[Seed], tmp_path: Path) -> None:
    wrong = [Seed("wrong", b"no file", True), *few]
    with pytest.raises(FuzzError, match="cannot be loaded"):
        fuzz(wrong, range(3), 0, 1, tmp_path)


# -- the verb -------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], directory: Path, **options: Any) -> tuple[int, str, str]:
    given = {"files": 6, "seed": 0, "only": None, "jobs": 1, "directory": directory, "json": False, "quiet": True}
    code = verb.main(Namespace(**{**given, **options}))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def few_alone(few: list[Seed], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "seeds", lambda directory: few)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.usefixtures("few_alone")
def test_the_verb_says_that_all_is_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("passed: mlximpl ")
    assert ", 6 files, seed 0: " in out.splitlines()[-1]
    assert " 0 findings, memory at most " in out.splitlines()[-1]


@pytest.mark.usefixtures("few_alone")
def test_the_verb_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, tmp_path, json=True)
    data = json.loads(out)
    assert code == 0
    assert data["passed"] is True
    assert data["files"] == 6
    assert data["findings"] == []
    assert sum(data["loads"].values()) == 18


@pytest.mark.usefixtures("few_alone")
def test_the_verb_says_what_was_found_and_how_to_have_it_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "fuzz", partial(fuzz, loader=f"{LOADERS}:empty"))
    code, out, _ = run(capsys, tmp_path)
    assert code == 1
    assert "FINDING nothing, " in out
    (kept,) = tmp_path.iterdir()
    assert str(kept) in out
    number = kept.stem.split("-")[-1]
    assert f"python -m conformance fuzz --seed 0 --only {number}" in out
    code, out, _ = run(capsys, tmp_path, only=int(number), json=True)
    data = json.loads(out)
    assert (code, data["files"]) == (1, 1)
    assert data["findings"][0]["file"] == str(kept)


@pytest.mark.usefixtures("few_alone")
def test_the_verb_gives_up_on_a_loader_that_refuses_all(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "seeds", lambda directory: [Seed("wrong", b"no file", True)])
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "the files that are right cannot be loaded" in err


def test_the_summary_counts(few: list[Seed], tmp_path: Path) -> None:
    result = fuzz(few, range(5), 3, 1, tmp_path)
    assert summary(result).startswith("passed: mlximpl ")
    assert as_json(result)["seed"] == 3
