"""The bench measures what it says: in turn, on fresh state, what is evaluated. Times are not asserted."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest

from conformance.__main__ import main
from conformance.bench import run
from conformance.bench.build import columns, file
from conformance.bench.cases import CASES, Case
from conformance.bench.churn import turns
from conformance.bench.floors import _block, attention_over, copied, copy_of
from conformance.bench.measure import Samples, Trial, TrialError, figures, in_turn, once, quotient, spread
from conformance.bench.one import measured
from conformance.bench.results import FLOOR, OURS, THEIRS, row_of
from conformance.bench.sizes import SIZES, size_for_device

TINY = SIZES["tiny"]
BY_NAME = {case.name: case for case in CASES}


# --- figures --------------------------------------------------------------------------------------


def test_ratios_of_given_times() -> None:
    assert quotient(Samples([2, 4, 9], []), Samples([1, 4, 3], [])) == (4 / 3, (1.5, 2.5))
    assert spread([5.0]) == (5.0, 5.0, 5.0)
    assert spread([4.0, 1.0, 2.0, 3.0]) == (1.75, 2.5, 3.25)
    found = figures(Samples([4.0, 1.0, 2.0], [30, 10, 20], 7))
    assert (found.milliseconds, found.quartiles, found.peak, found.left, found.rounds) == (2.0, (1.5, 3.0), 20, 7, 3)


def test_above_one_is_faster_than_mlx_lm() -> None:
    samples = {THEIRS: Samples([6.0], [0]), OURS: Samples([2.0], [0]), FLOOR: Samples([1.0], [0])}
    row = row_of(CASES[0], samples)
    assert row.ratio is not None and row.to_floor is not None
    assert (row.ratio.of_medians, row.to_floor.of_medians) == (3.0, 2.0)
    alone = row_of(CASES[0], {OURS: samples[OURS]})
    assert (alone.ratio, alone.to_floor) == (None, None)


# --- one repetition -------------------------------------------------------------------------------


def ticking() -> Callable[[], float]:
    """A clock on which a second goes by between two looks."""
    looks = iter(range(100))
    return lambda: float(next(looks))


def test_times_are_of_one_operation() -> None:
    assert once(Trial(lambda: None, lambda _: [], repeats=4), ticking())[0] == 250.0


def test_what_the_work_returns_is_evaluated_within_the_time(tmp_path: Path) -> None:
    pending: list[mx.array] = []
    seen: list[int] = []

    def nodes() -> int:
        dot = tmp_path / "graph.dot"
        export: Any = mx.export_to_dot
        export(str(dot), *pending)
        return dot.read_text(encoding="utf-8").count("shape=rectangle")

    def clock() -> float:
        seen.append(nodes() if pending else -1)
        return 0.0

    def work(_: None) -> list[mx.array]:
        pending.append(mx.ones(3) + 1)
        assert not gc.isenabled()
        return list(pending)

    once(Trial(lambda: None, work), clock)
    assert seen == [-1, 0]
    assert gc.isenabled()


def test_the_peak_is_what_comes_on_top() -> None:
    if mx.get_active_memory() == 0 and not mx.ones(8).nbytes:
        pytest.skip("this build of MLX does not count its memory")
    mebibyte = 1 << 20

    def prepare() -> mx.array:
        held = mx.zeros(8 * mebibyte, mx.uint8)
        mx.eval(held)
        return held

    _, peak, left = once(Trial(prepare, lambda held: [held[:mebibyte] + 1, [held[:mebibyte] + 2]]))
    assert 2 * mebibyte <= peak < 3 * mebibyte
    assert left == 2 * mebibyte
    assert once(Trial(prepare, lambda held: held))[1] < mebibyte


def test_a_trial_that_raises_leaves_the_collector_on() -> None:
    with pytest.raises(ZeroDivisionError):
        once(Trial(lambda: None, lambda _: 1 / 0))
    assert gc.isenabled()


# --- rounds ---------------------------------------------------------------------------------------


def in_rounds(rounds: int, seed: int) -> tuple[list[tuple[str, int]], dict[str, Samples]]:
    """Which trial worked on which state, in order."""
    met: list[tuple[str, int]] = []
    states = iter(range(1, 1000))

    def trial(name: str) -> Trial:
        return Trial(lambda: next(states), lambda state: met.append((name, state)))

    samples = in_turn({name: trial(name) for name in "abc"}, rounds, Random(seed))
    return met, samples


def test_all_in_turn_on_fresh_state_and_the_first_round_is_not_counted() -> None:
    met, samples = in_rounds(5, 0)
    assert [state for _, state in met] == list(range(1, 19))
    orders = ["".join(name for name, _ in met[i : i + 3]) for i in range(0, 18, 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 1
    assert {name: (len(each.milliseconds), len(each.peaks)) for name, each in samples.items()} == dict.fromkeys(
        "abc", (5, 5)
    )


def test_the_seed_draws_the_order() -> None:
    assert in_rounds(5, 3)[0] == in_rounds(5, 3)[0] != in_rounds(5, 4)[0]


def test_who_raises_is_named() -> None:
    trials = {"good": Trial(lambda: None, lambda _: []), "bad": Trial(lambda: None, lambda _: 1 / 0)}
    with pytest.raises(TrialError, match=r"^bad: ZeroDivisionError: "):
        in_turn(trials, 1, Random(0))


# --- cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_runs(case: Case) -> None:
    pytest.importorskip("mlx_lm")
    row = measured(case, TINY, run.modules(), 1, 0)
    assert row.error is None
    assert list(row.figures) == [THEIRS, OURS, FLOOR]
    assert all(each.milliseconds > 0 and each.peak >= 0 and each.rounds == 1 for each in row.figures.values())
    assert row.ratio is not None
    assert row.ratio.of_medians == row.figures[THEIRS].milliseconds / row.figures[OURS].milliseconds


DONE = {
    "decode, equal lengths": [32, 32, 32, 32],
    "decode, ragged": [32, 27, 21, 29],
    "decode, ragged, attention()": [32, 27, 21, 29],
    "decode, wrapped ring": [36, 36, 36, 36],
    "prefill of 512": [16, 16],
    "prefill of 512, padded": [16, 14],
    "prefill of 512, padded, attention()": [16, 14],
    "filter, one row out": [30, 25, 27],
    "filter, one row left": [19],
    "finalize of a ragged prefill": [30, 25, 19, 27],
    "bookkeeping of 64 layers": [18, 18, 18, 18],
    "bookkeeping of 64 rotating layers": [19, 19, 19, 19],
}
"""What `offset` is of each row afterwards."""


@pytest.mark.parametrize("name", DONE)
def test_both_do_the_same_work(name: str) -> None:
    pytest.importorskip("mlx_lm")
    for module in run.modules().values():
        trial = BY_NAME[name].on(module, TINY)
        caches = trial.prepare()
        mx.eval(trial.work(caches))
        assert [cache.offset.tolist() for cache in caches] == [DONE[name]] * len(caches)


TOKEN = 2 * TINY.heads * TINY.head_size * 4
FIRST, *OTHERS = TINY.lengths()
MOVED = {
    "merge": FIRST + sum(OTHERS),
    "filter, one row out": FIRST + OTHERS[0] + OTHERS[2],
    "filter, one row left": OTHERS[1],
    "extend by one row": FIRST + sum(OTHERS) + 7,
    "extract": OTHERS[1],
    "finalize of a ragged prefill": sum(OTHERS),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_floor_copies_the_tokens_that_must_move(name: str) -> None:
    assert all(FIRST > length >= FIRST // 2 for length in OTHERS)
    assert TINY.columns // 4 == 7
    trial = BY_NAME[name].floor(TINY)
    made = trial.work(trial.prepare())
    mx.eval(made)
    assert len(made) == 2 * TINY.layers
    assert sum(each.nbytes for each in made) == TINY.layers * TOKEN * MOVED[name]


def test_a_copy_has_memory_of_its_own() -> None:
    source = mx.ones(1 << 20, mx.uint8)
    mx.eval(source)
    _, peak, _ = once(Trial(lambda: source, lambda held: [copied(held)]))
    assert peak >= source.nbytes
    assert source.min().item() == 1
    assert once(copy_of(1 << 20, 3))[1] >= 3 << 20


def test_more_numbers_than_an_axis_holds() -> None:
    assert [_block(n) for n in (1, (1 << 31) - 1)] == [(1,), ((1 << 31) - 1,)]
    for numbers in (1 << 31, 3002247168):
        rows, columns = _block(numbers)
        assert numbers <= rows * columns < numbers + columns
        mx.zeros((rows, columns), mx.uint16)
    with pytest.raises(OverflowError):
        mx.zeros((1 << 31,), mx.uint16)


@pytest.mark.parametrize("n", [1, 8])
def test_the_floor_of_a_decode_writes_in_place(n: int) -> None:
    wide = replace(TINY, tokens=1024)
    trial = attention_over(wide.tokens, 3, n, 2, wide)
    held = trial.prepare()
    before = [buffer[..., :-n, :] + 0 for buffers in held for buffer in buffers]
    mx.eval(before)
    _, peak, _ = once(Trial(lambda: None, lambda _: trial.work(held)))
    assert n > 1 or peak < held[0][0].nbytes, "but for the scores of many queries nothing as large is made"
    for buffer, kept in zip((buffer for buffers in held for buffer in buffers), before, strict=True):
        assert mx.array_equal(buffer[..., -n:, :], columns(wide, n))
        assert mx.array_equal(buffer[..., :-n, :], kept)


def test_the_files_of_the_floors_hold_the_bytes_of_the_prompt() -> None:
    for name in ("save", "reload"):
        once(BY_NAME[name].floor(TINY))
        assert file("floor").stat().st_size == TINY.layers * TINY.columns * TOKEN


def test_the_turns_of_churn_hold_together() -> None:
    plan = turns(TINY)
    assert plan == turns(TINY)
    assert len(plan) == TINY.churn_steps
    rows: list[int] = []
    for turn in plan:
        rows = rows if turn.kept is None else [rows[i] for i in turn.kept]
        rows += turn.arriving
        assert tuple(rows) == turn.tokens
        assert 0 < len(rows) <= TINY.batch
        rows = [tokens + 1 for tokens in rows]
    assert any(turn.kept for turn in plan) and any(turn.kept is not None and turn.arriving for turn in plan)


@pytest.mark.parametrize("name", ["small", "large"])
def test_the_turns_of_a_size_fill_the_batch(name: str) -> None:
    plan = turns(SIZES[name])
    assert max(len(turn.tokens) for turn in plan) == SIZES[name].batch
    assert sum(turn.kept is not None for turn in plan) > len(plan) // 10


def test_the_size_is_chosen_by_the_device() -> None:
    expected = "small" if mx.default_device() == mx.Device(mx.cpu, 0) else size_for_device()
    assert size_for_device() == expected
    assert {case.name for case in CASES} == set(BY_NAME) and len(BY_NAME) == len(CASES)


# --- the verb -------------------------------------------------------------------------------------


def bench(*words: str) -> int:
    return main(["bench", "--size", "tiny", "--rounds", "1", *words])


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--only", "extract", "mask") == 0
    out, err = capsys.readouterr()
    assert all(part in out for part in ("device", "mlx-lm", "mlximpl", "floor", "rounds 1", "seed 0", "tokens 32"))
    assert [line.split("  ")[0].strip() for line in out.splitlines() if line.startswith((" extract", " mask"))] == [
        "extract",
        "mask, ragged",
        "mask, ragged wrapped ring",
    ]
    assert "3/3 mask, ragged wrapped ring" in err


def test_json_is_one_object_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_lm")
    assert bench("--json", "--seed", "5", "--only", "extract") == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert {"device", "device name", "python", "platform", "mlx", "mlx-lm", "mlximpl", "command"} <= data.keys()
    assert (data["rounds"], data["seed"], data["size"]["name"]) == (1, 5, "tiny")
    (row,) = data["rows"]
    assert (row["case"], row["floor_is"], row["error"]) == ("extract", "the row's tokens copied once", None)
    assert row["figures"].keys() == {THEIRS, OURS, FLOOR}
    assert row["figures"][OURS].keys() == {"milliseconds", "quartiles", "peak", "left", "rounds"}
    assert row["figures"][FLOOR]["left"] == TINY.layers * TOKEN * OTHERS[1]
    assert row["ratio"].keys() == row["to_floor"].keys() == {"of_medians", "quartiles"}
    assert "extract" in err


def test_an_operation_that_raises_is_named_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlximpl

    class Broken(mlximpl.BatchKVCache):
        def extract(self, idx: int) -> Any:
            raise RuntimeError("no such luck")

    monkeypatch.setattr(mlximpl, "BatchKVCache", Broken)
    assert bench("--only", "extract", "mask, ragged") == 2
    out, err = capsys.readouterr()
    assert any(line.split() == ["extract", "failed"] for line in out.splitlines())
    assert err.splitlines()[-1] == "extract: mlximpl: RuntimeError: no such luck"
    assert any(line.startswith(" mask, ragged  ") and "failed" not in line for line in out.splitlines())
    assert bench("--json", "--only", "extract") == 2
    assert json.loads(capsys.readouterr().out)["rows"][0]["error"] == "mlximpl: RuntimeError: no such luck"


def test_a_case_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--only", "extract", "exctrat") == 2
    err = capsys.readouterr().err
    assert "'exctrat'" in err and "finalize of a ragged prefill" in err


def test_without_mlx_lm_there_is_nothing_beside(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "upstream", lambda: None)
    assert bench("--json", "--only", "extract") == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["rows"]
    assert row["figures"].keys() == {OURS, FLOOR}
    assert row["ratio"] is None and row["to_floor"] is not None
    assert "mlx-lm is not installed" in err
    assert bench("--only", "extract") == 0
