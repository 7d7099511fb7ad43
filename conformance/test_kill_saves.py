"""The kill test: mlximpl's files stay whole, and savers that are not safe are found."""

from __future__ import annotations

import json
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conformance import kill_saves as verb
from conformance.kill_saves import KillError, kill_saves
from conformance.saver import rehearsal, watched

SAVERS = "conformance.meta.broken_savers"


def test_killed_saves_leave_a_whole_file(tmp_path: Path) -> None:
    result = kill_saves(28, 0, tmp_path)  # fourteen of them at a call, of which there are fewer
    assert result.failures == []
    assert result.kills == sum(result.held.values()) == 28
    assert {"in fsync", "after fsync", "in replace", "after replace"} <= set(result.stages)
    assert result.held.keys() == {"A", "B"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("saver", ["InPlace", "AwayFirst"])
def test_a_saver_that_is_not_safe_is_found(saver: str, tmp_path: Path) -> None:
    result = kill_saves(14, 0, tmp_path, f"{SAVERS}:{saver}")
    assert result.failed
    assert all("the file does not load" in failure for failure in result.failures)
    assert str(tmp_path) in result.failures[0]


def test_a_saver_that_fails_is_no_failure_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(KillError, match="ended by itself, with exit code 1"):
        kill_saves(2, 0, tmp_path, f"{SAVERS}:Failing")


def test_what_is_done_to_files_is_seen(tmp_path: Path) -> None:
    seen: list[str] = []
    with watched(seen.append):
        (tmp_path / "a").write_bytes(b"x")
        (tmp_path / "a").replace(tmp_path / "b")
    assert seen[0] == "in open"
    assert {"after open", "in write", "after write", "in replace", "after replace"} <= set(seen)


def test_a_rehearsal_counts_calls(tmp_path: Path) -> None:
    calls, seconds = rehearsal("mlximpl", tmp_path)
    assert all({"in write", "in replace", "after replace"} <= set(each) for each in calls)
    assert ["in fsync" in each for each in calls] == [True, False]
    assert seconds > 0


def run(capsys: pytest.CaptureFixture[str], directory: Path, **options: Any) -> tuple[int, str, str]:
    given = {"times": 2, "seed": 0, "directory": directory, "json": False, "quiet": True}
    code = verb.main(Namespace(**{**given, **options}))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_verb_says_that_all_is_well(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = run(capsys, tmp_path)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("passed: mlximpl ")
    assert "2 kills, seed 0: the file was whole 2 times" in out.splitlines()[-1]
    assert "temporary files left" in out


def test_the_verb_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, tmp_path, json=True)
    data = json.loads(out)
    assert (code, data["passed"], data["kills"], data["failures"]) == (0, True, 2, [])
    assert sum(data["stages"].values()) == 2


def test_the_verb_says_what_was_found(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "kill_saves", partial(kill_saves, saver=f"{SAVERS}:InPlace"))
    code, out, _ = run(capsys, tmp_path, times=12)
    assert code == 1
    assert "the file does not load" in out
    assert out.splitlines()[-1].startswith("failed: ")
    assert list(tmp_path.glob("kill-0-*.safetensors"))


def test_the_verb_gives_up_on_a_saver_that_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "kill_saves", partial(kill_saves, saver=f"{SAVERS}:Failing"))
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "ended by itself" in err
