"""The command line: exit codes, what goes to stdout and stderr, and what is left on disk.

Exit 0 says that all agree, 1 that something diverges, 2 that the call, a file or an implementation is unusable.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mlximpl
from conformance import run
from conformance.__main__ import main
from conformance.adapters.registry import IMPLEMENTATIONS
from conformance.driver import Divergence, Driver
from conformance.machine import Campaign
from conformance.operations import Operation
from conformance.payload import Config
from conformance.situations.build import Part, feed, ring, situation, solo, trim
from conformance.trace import Step, Trace, load, save

SUMMARY = re.compile(
    r"(passed|failed): (\S+) (\S+), \d+ goldens \((\d+) failed\), (\d+) sequences "
    r"\((\d+) operations, \d+\.\d each\), seed (\d+), (\d+) divergences"
    r"(, (\d+) unexpected, (\d+) no longer failing)?, \d+ s"
)


class Obliging(mlximpl.KVCache):
    """Takes a negative trim for none, and never says so: the kind of D7."""

    def trim(self, n: int) -> int:
        return super().trim(max(0, n))


class Inline:
    """Stands for a pool of processes, which could not see an implementation that a test registers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(task(*arguments))
        return future


def drop_a_negative_number(campaign: Campaign, kind: str, sequences: int, number: int) -> None:
    """Stands for random sequences, not all of which would."""
    driver = Driver(campaign.adapters, Config())
    try:
        for operation in operations(solo("ab"), feed(3, 2, 1), trim(2), feed(2), trim(-5), feed(1)):
            driver.step(operation)
    except Divergence as divergence:
        campaign.meet(divergence.found, Trace(driver.config, tuple(driver.steps)))
    campaign.tally.sequences += sequences


def operations(*parts: Part) -> tuple[Operation, ...]:
    return situation("", "", "", *parts).operations


@dataclass
class Command:
    """`python -m conformance` in this process."""

    directory: Path
    capture: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""

    def __call__(self, *words: str | Path) -> int:
        code = main([str(word) for word in words])
        self.out, self.err = self.capture.readouterr()
        return code

    def run(self, *words: str | Path, sequences: int = 12) -> int:
        """The verb `run` on few sequences, with traces below the test's directory."""
        few = ("--sequences", str(sequences), "--jobs", "1", "--directory", self.directory / "found")
        return self("run", *few, *words)

    @property
    def summary(self) -> re.Match[str]:
        found = SUMMARY.fullmatch(self.out.splitlines()[-1])
        assert found, self.out
        return found

    @property
    def traces(self) -> list[Path]:
        """What was saved."""
        return sorted((self.directory / "found").glob("*"))


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, in a directory of its own, with no goldens."""
    (tmp_path / "goldens" / "deviations").mkdir(parents=True)
    monkeypatch.setattr(run, "GOLDENS", tmp_path / "goldens")
    monkeypatch.setattr(run, "goldens_for", lambda implementation: [])
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    return Command(tmp_path, capsys)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences in this process, a few of each kind."""
    monkeypatch.setattr(run, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(run, "SEQUENCES_PER_TASK", 3)


@pytest.fixture
def obliging(inline: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """An implementation that breaks a law, and a sequence that meets it for certain."""
    monkeypatch.setattr(run, "explore", drop_a_negative_number)
    module = ModuleType("obliging")
    vars(module).update(vars(mlximpl), KVCache=Obliging)
    monkeypatch.setitem(sys.modules, "obliging", module)
    monkeypatch.setitem(IMPLEMENTATIONS, "obliging", "obliging")
    return "obliging"


def trace_file(path: Path, *parts: Part) -> Path:
    save(Trace(Config(), tuple(map(Step, operations(*parts)))), path)
    return path


def one_line(text: str) -> str:
    """The only line of a text."""
    (line,) = text.splitlines()
    return line


# -- run -------------------------------------------------------------------------------------------


def test_a_run_in_which_all_agree_exits_0_and_sums_up_in_its_last_line(command: Command) -> None:
    assert command.run("--seed", "3", sequences=1) == 0
    word, name, _, failed, sequences, operations, seed, divergences, *_ = command.summary.groups()
    assert (word, name, failed, seed, divergences) == ("passed", "mlximpl", "0", "3", "0")
    assert int(operations) > int(sequences) >= 1
    assert "reached: done/wrapped/refused" in command.out
    assert command.traces == []


@pytest.mark.usefixtures("inline")
def test_run_is_the_verb_where_none_is_given(command: Command) -> None:
    assert command("--sequences", "1", "--jobs", "1") == 0
    assert command.summary[1] == "passed"


@pytest.mark.usefixtures("inline")
def test_json_is_one_object_with_the_counts(command: Command) -> None:
    assert command.run("--json", "--seed", "5") == 0
    data = json.loads(command.out)
    assert data["passed"] is True
    assert (data["implementation"], data["seed"]) == ("mlximpl", 5)
    assert data["sequences"] >= 12  # those that Hypothesis gives up half-way come on top
    counted = sum(data["done"].values()) + sum(data["refused"].values())
    assert data["operations"] == counted > 12
    for kind in ("KVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache"):
        assert data["done"][f"{kind}/new"] > 0
    assert data["divergences"] == data["no_longer_failing"] == data["goldens"]["failed"] == []


@pytest.mark.usefixtures("inline")
def test_the_same_seed_gives_the_same_counts(command: Command) -> None:
    counts = []
    for _ in range(2):
        assert command.run("--json", "--seed", "7") == 0
        data = json.loads(command.out)
        data.pop("seconds")
        counts.append(data)
    assert counts[0] == counts[1]


@pytest.mark.usefixtures("inline")
def test_quiet_shows_no_progress_and_the_result(command: Command) -> None:
    assert command.run("--json", sequences=1) == 0
    assert "shrinking" in command.err
    assert command.run("--json", "--quiet", sequences=1) == 0
    assert command.err == ""
    assert command.run("--quiet", sequences=1) == 0
    assert command.summary[1] == "passed"
    assert "shrinking" not in command.out


@pytest.mark.parametrize("verb", ["run", "replay"])
def test_an_unknown_implementation_exits_2_and_says_so_in_one_line(command: Command, verb: str) -> None:
    words = [] if verb == "run" else [trace_file(command.directory / "trace.json", solo(), feed(1))]
    assert command(verb, "--impl", "nope", *words) == 2
    assert one_line(command.err) == f"no adapter 'nope'; known are reference, {', '.join(IMPLEMENTATIONS)}"
    assert command.out == ""


@pytest.mark.parametrize("verb", ["run", "replay"])
def test_an_implementation_that_cannot_be_imported_exits_2_and_says_so_in_one_line(
    command: Command, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS, "gone", "a_module_that_is_not_there")
    words = [] if verb == "run" else [trace_file(command.directory / "trace.json", solo(), feed(1))]
    assert command(verb, "--impl", "gone", *words) == 2
    assert one_line(command.err) == "gone cannot be imported: No module named 'a_module_that_is_not_there'"
    assert command.out == ""


def test_an_unknown_device_exits_2_and_says_so_in_one_line(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXIMPL_DEVICE", "abacus")
    assert command.run() == 2
    assert one_line(command.err) == "MLXIMPL_DEVICE is 'abacus', but should be cpu or gpu"


@pytest.mark.parametrize(
    "words",
    [
        ["rnu"],
        ["run", "--sequences", "0"],
        ["run", "--sequences", "many"],
        ["run", "--jobs", "-1"],
        ["run", "--seed", "x"],
        ["run", "--nope"],
        ["replay"],
    ],
)
def test_a_call_that_makes_no_sense_exits_2(command: Command, words: Sequence[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert command.capture.readouterr().err.startswith("usage: python -m conformance")


def test_a_run_that_finds_a_divergence_exits_1_and_saves_a_short_trace(command: Command, obliging: str) -> None:
    assert command.run("--impl", obliging) == 1
    assert command.summary.group(1, 2, 8) == ("failed", "obliging", "1")
    path = command.traces[0]
    assert command.traces == [path]
    assert path.name.startswith("obliging-KVCache-trim-refusal-")
    assert len(load(path).steps) == 2
    for line in (
        r"DIVERGENCE refusal at step 2 of 2 .*obliging  vs  ledger",
        r"  after   \w+\.trim\(tokens=-1\)",
        r"  got     done",
        r"  should  refused    \(negative\)",
        rf"  trace   found/{path.name}",
        rf"  replay  python -m conformance replay --impl obliging found/{path.name}",
    ):
        assert re.search(f"^{line}$", command.out, re.MULTILINE), line
    assert command("replay", "--impl", obliging, path) == 1
    assert command("replay", path) == 0


def test_the_json_of_a_divergence_says_what_the_report_says(command: Command, obliging: str) -> None:
    assert command.run("--impl", obliging, "--json") == 1
    data = json.loads(command.out)
    assert data["passed"] is False
    (found,) = data["divergences"]
    assert found["signature"] == "KVCache/trim/refusal/negative"
    assert (found["got"], found["should"], found["step"], found["steps"]) == ("done", "refused", 2, 2)
    assert found["expected"] is None
    assert found["trace"] == f"found/{command.traces[0].name}"
    assert found["replay"] == f"python -m conformance replay --impl obliging {found['trace']}"


# -- expected failures -----------------------------------------------------------------------------

EXPECTED = "D7-negative  KVCache/trim/refusal/negative  # the kind of D7\n"


def expected_list(command: Command, text: str, *parts: Part) -> Path:
    """A list of expected failures, and the deviation D7-negative with these steps."""
    if parts:
        trace_file(command.directory / "goldens" / "deviations" / "D7-negative-trim.json", *parts)
    path = command.directory / "expected.txt"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_failure_that_is_expected_exits_0_and_is_named(command: Command, obliging: str) -> None:
    expected = expected_list(command, f"# known\n\n{EXPECTED}", solo(), feed(2), trim(-1))
    assert command.run("--impl", obliging, "--expected", expected) == 0
    assert command.summary.group(1, 8, 10, 11) == ("passed", "1", "0", "0")
    assert re.search(r"^expected  D7-negative +1  the kind of D7$", command.out, re.MULTILINE)
    assert "DIVERGENCE" not in command.out
    assert command.run("--impl", obliging, "--expected", expected, "--json") == 0
    assert [found["expected"] for found in json.loads(command.out)["divergences"]] == ["D7-negative"]


def test_a_failure_that_no_line_expects_exits_1(command: Command, obliging: str) -> None:
    text = EXPECTED.replace("KVCache/trim/refusal/negative", "BatchKVCache/*")
    expected = expected_list(command, text)
    assert command.run("--impl", obliging, "--expected", expected) == 1
    assert command.summary.group(1, 8, 10) == ("failed", "1", "1")


@pytest.mark.usefixtures("inline")
def test_an_expected_failure_that_no_longer_fails_exits_1(command: Command) -> None:
    expected = expected_list(command, EXPECTED, solo(), feed(2), trim(-1))
    assert command.run("--expected", expected, sequences=1) == 1
    assert command.summary.group(1, 8, 10, 11) == ("failed", "0", "0", "1")
    assert (
        "expected failure D7-negative: D7-negative-trim.json no longer fails; take its lines off the list"
        in command.out.splitlines()
    )


def test_an_expected_failure_without_a_recorded_deviation_exits_1(command: Command, obliging: str) -> None:
    assert command.run("--impl", obliging, "--expected", expected_list(command, EXPECTED)) == 1
    assert command.summary.group(1, 10, 11) == ("failed", "0", "1")
    assert "expected failure D7-negative: no trace D7-negative-*.json under " in command.out


@pytest.mark.parametrize(
    "line",
    [
        "D7-negative",
        "D7-negative  # no pattern",
        "D7-negative  KVCache/trim/*",
        "D7-negative  KVCache/trim/*  #",
        "D7-negative  KVCache/trim/*  //  no reason",
    ],
)
def test_an_expected_list_with_a_line_of_another_form_exits_2(command: Command, line: str) -> None:
    expected = expected_list(command, f"# known\n{line}\n")
    assert command.run("--expected", expected) == 2
    should = f"{expected}: line 2 should read NAME PATTERN # reason, but is {line!r}"
    assert one_line(command.err) == should


def test_an_expected_list_that_is_not_there_exits_2(command: Command) -> None:
    path = command.directory / "nothing.txt"
    assert command.run("--expected", path) == 2
    assert one_line(command.err) == f"{path}: No such file or directory"


# -- replay ----------------------------------------------------------------------------------------


def test_a_replay_in_which_all_agree_exits_0_and_shows_every_step(command: Command) -> None:
    path = trace_file(command.directory / "trace.json", ring(4), feed(6, 1), trim(2), trim(1))
    assert command("replay", path) == 0
    *steps, last = command.out.splitlines()
    assert steps[0].split() == ["1", "x.new(kind='RotatingKVCache',", "rows=['a'],", "max_size=4)"]
    assert steps[1::2][:3] == ["     offsets [0]", "     offsets [6]", "     offsets [7]"]
    assert steps[7].startswith("     refused: ")
    assert last == "passed: 5 steps, mlximpl agrees with the reference and the ledger"
    assert command("replay", "--json", path) == 0
    data = json.loads(command.out)
    assert data["passed"] is True
    assert [each["step"] for each in data["steps"]] == [1, 2, 3, 4, 5]
    assert data["steps"][1] == {"step": 2, "call": "x.update(tokens=6)", "outcome": "offsets [6]"}


def test_a_replay_that_diverges_exits_1_and_reports_what_was_got_and_what_should_be(
    command: Command, obliging: str
) -> None:
    path = trace_file(command.directory / "trace.json", solo(), feed(3), trim(-5), feed(1))
    assert command("replay", "--impl", obliging, path) == 1
    report = command.out[command.out.index("DIVERGENCE") :].splitlines()
    assert re.fullmatch(r"DIVERGENCE refusal at step 3 of 4 +obliging  vs  ledger", report[0])
    assert report[1:] == [
        "  cache   KVCache",
        "  after   x.trim(tokens=-5)",
        "  got     done",
        "  should  refused    (negative)",
        "  before  reference  [0:0 0:1 0:2]  head=3",
        "  after   reference  [0:0 0:1 0:2]  head=3",
        *(line for line in report if re.match("  (before|after)   ?obliging", line)),
        "  steps",
        "    1  x.new(kind='KVCache', rows=['a'])",
        "    2  x.update(tokens=3)",
        "    3  x.trim(tokens=-5)",
        "    4  x.update(tokens=1)",
        "  trace   trace.json",
        "  replay  python -m conformance replay --impl obliging trace.json",
    ]
    assert sum("obliging   [0:0 0:1 0:2" in line for line in report) == 2
    assert command("replay", "--impl", obliging, "--json", path) == 1
    found = json.loads(command.out)
    assert found["passed"] is False
    assert found["divergence"]["call"] == "x.trim(tokens=-5)"
    assert command("replay", path) == 0


def whole(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(trace_file(path, solo(), feed(3), trim(1)).read_text(encoding="utf-8"))
    return data


def test_a_replay_of_a_file_cut_short_exits_2_with_the_path_and_the_reason(command: Command) -> None:
    path = trace_file(command.directory / "trace.json", solo(), feed(3))
    path.write_bytes(path.read_bytes()[:-20])
    assert command("replay", path) == 2
    assert one_line(command.err).startswith(f"{path}: no complete JSON file (")
    assert command.out == ""


UNREADABLE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another format": (lambda data: data.update(format=2), "format is 2, but this reader knows format 1"),
    "an unknown operation": (lambda data: data["steps"][1].update(op="updaet"), "step 2: unknown operation 'updaet'; "),
    "an unknown field": (lambda data: data["steps"][1].update(n=1), "step 2: operation 'update' has no field n"),
    "a cache that was never made": (lambda data: data["steps"][2].update(cache="y"), "step 3 does not fit the caches "),
}


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_replay_of_a_file_that_makes_no_sense_exits_2_with_the_path_and_the_reason(
    command: Command, fault: str
) -> None:
    change, reason = UNREADABLE[fault]
    path = command.directory / "trace.json"
    data = whole(path)
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    assert command("replay", path) == 2
    assert one_line(command.err).startswith(f"{path}: {reason}")


def test_a_replay_of_no_file_exits_2(command: Command) -> None:
    assert command("replay", command.directory / "nothing.json") == 2
    assert one_line(command.err) == f"{command.directory / 'nothing.json'}: No such file or directory"


# -- a replay holds a file to what it says ---------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "words"),
    [
        ([{"op": "update", "cache": "x", "tokens": 1, "valid": False}], "valid is False, but the call was done"),
        ([{"op": "update", "cache": "x", "tokens": 0, "valid": True}], "valid is True, but the call was refused"),
        ([{"op": "update", "cache": "x", "tokens": 1}, {"checks": {"offsets": [7]}}], r"checks say offsets \[7\]"),
        ([{"op": "update", "cache": "x", "tokens": 1}, {"checks": {"visible": {"a": [[1]]}}}], "checks say visible"),
    ],
)
def test_a_replay_that_is_not_as_the_file_says_fails(
    last: list[dict[str, Any]], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Trace(Config(), (Step(solo(cache="x")),)).to_dict()
    data["steps"] += last
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert main(["replay", str(path)]) == 1
    assert re.search(words, capsys.readouterr().err)


def test_every_regression_is_replayed_as_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((run.GOLDENS / "regressions").glob("*.json")):
        assert main(["replay", str(path)]) == 0, path
