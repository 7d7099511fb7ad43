"""Real models on mlximpl's caches: every row of every schedule answers as it does alone on mlx-lm's solo caches."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="the models and generators are mlx-lm's")

import mlximpl
from conformance.__main__ import main
from conformance.adapters.surface import set_device
from conformance.zoo.alone import Alone
from conformance.zoo.families import BOUNDED, FAMILIES, WINDOW, Family
from conformance.zoo.families import BY_NAME as FAMILY
from conformance.zoo.implementations import caches_of
from conformance.zoo.judge import Cell, judge, judge_family
from conformance.zoo.models import make_model
from conformance.zoo.schedules import BY_NAME, SCHEDULES, random_schedule, words
from mlximpl import ArraysCache, BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache

set_device()

NAMED = [pytest.param(family, id=family.label) for family in (*FAMILIES, *BOUNDED)]


def judged(family: Family, *schedules: str, caches: str = "mlximpl") -> list[Cell]:
    wanted = [BY_NAME[name] for name in schedules] or list(SCHEDULES)
    return list(judge_family(family, wanted, [caches_of(caches, family.max_kv_size)]))


@pytest.mark.parametrize("family", NAMED)
def test_every_row_answers_as_alone(family: Family) -> None:
    for cell in judged(family):
        assert cell.rows
        assert not cell.faults, (cell.schedule, cell.faults)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gemma3_text", "falcon_h1"])
def test_rows_that_come_and_go_at_random_answer_as_alone(name: str, seed: int) -> None:
    [cell] = judge_family(FAMILY[name], [random_schedule(seed)], [caches_of("mlximpl")])
    assert cell.rows and not cell.faults, cell.faults


def test_mlx_lm_answers_a_short_row_wrong_after_a_segment_of_one_token() -> None:
    for name in ("gemma3_text", "gpt_oss"):
        [cell] = judged(FAMILY[name], "one_token_segments", caches="mlx_lm")
        assert (cell.equal, cell.rows) == (4, 6)
        assert all("from the row alone" in fault.what for fault in cell.faults)


def test_mlx_lm_loses_sinks_and_bounds() -> None:
    for family in BOUNDED:
        [cell] = judged(family, "ragged_admission", caches="mlx_lm")
        assert cell.equal < cell.rows


@pytest.mark.parametrize("family", [pytest.param(family, id=family.label) for family in FAMILIES])
def test_a_bound_holds_whatever_the_model_makes(family: Family) -> None:
    model, bound = make_model(family.name), WINDOW + 4
    caches = mlximpl.make_prompt_cache(model, bound)
    for n in (bound + 5, 1, 1, 7, 1):
        mx.eval(model(mx.array([words(n, 1)]), cache=caches))
    rings: list[Any] = [cache for cache in leaves(caches) if isinstance(cache, RotatingKVCache)]
    stored = [ring.keys.shape[2] for ring in rings]
    assert all(columns in (bound, WINDOW) for columns in stored)
    assert not any(type(cache) is KVCache for cache in leaves(caches))
    with pytest.raises(ValueError, match="max_kv_size must be above 4"):
        mlximpl.make_prompt_cache(model, 4)


def leaves(caches: Any) -> list[Any]:
    return [leaf for cache in caches for leaf in (leaves(cache.caches) if hasattr(cache, "caches") else [cache])]


def test_the_zoo_meets_every_kind_of_cache() -> None:
    met: set[str] = set()
    for family in FAMILIES:
        caches = mlximpl.make_prompt_cache(make_model(family.name))
        met.update(type(cache).__name__ for cache in (*caches, *leaves(caches)))
    assert met == {"ArraysCache", "CacheList", "ChunkedKVCache", "KVCache", "RotatingKVCache"}
    assert len(FAMILIES) >= 14


# -- what a fault looks like ------------------------------------------------------------------------


def hides_one(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """A mask that hides the second column from the newest query."""

    def broken(self: Any, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        mask = make_mask(self, N, window_size, True)
        return mask & (mx.arange(mask.shape[-1]) != 1) if mask.shape[-1] > 3 else mask

    return broken


@pytest.mark.parametrize(("kind", "family"), [(BatchKVCache, "llama"), (BatchRotatingKVCache, "olmo3")])
def test_a_hidden_token_is_found(kind: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "make_mask", hides_one(kind.make_mask))
    [cell] = judged(FAMILY[family], "ragged_admission")
    assert cell.equal < cell.rows
    assert "log-probabilities differ by" in cell.faults[0].what


def test_rows_of_state_that_are_swapped_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = ArraysCache.filter
    monkeypatch.setattr(ArraysCache, "filter", lambda self, rows: keep(self, list(reversed(rows))))
    [cell] = judged(FAMILY["mamba2"], "early_leavers")
    assert cell.equal < cell.rows


def test_rows_that_come_to_no_end_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, rows: list[int]) -> None:
        raise ValueError("no")

    monkeypatch.setattr(BatchKVCache, "filter", refuse)
    [cell] = judged(FAMILY["llama"], "ragged_admission")
    assert cell.faults[0].what == "0 of 12 tokens came: ValueError: no"


def test_the_row_alone_is_what_mlx_lms_generator_says() -> None:
    from mlx_lm.generate import generate_step

    model = make_model("gemma3_text")
    context = list(range(1, 14))
    steps = list(generate_step(mx.array(context), model, max_tokens=6))
    answer = Alone(model).answer(context, 6)
    assert [token for token, _ in steps] == answer.tokens
    assert all(mx.allclose(got, want, atol=1e-5) for (_, got), want in zip(steps, answer.logprobs, strict=True))


# -- the verb ---------------------------------------------------------------------------------------


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["zoo", "gemma3_text", "--schedules", "one_token", "early", "--quiet", "--jobs", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split() for line in out if line.startswith(" gemma3_text ")] == [
        ["gemma3_text", "4", "6", "5", "5", "9", "11", "of", "11"]
    ]
    assert out[-1].startswith("passed: on mlximpl's caches 22 of 22 rows answer as alone, log-probabilities within ")


def test_the_table_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchKVCache, "make_mask", hides_one(BatchKVCache.make_mask))
    words = ["zoo", "minicpm3", "--schedules", "ragged", "--json", "--quiet", "--jobs", "1"]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["mlx_lm"] == {"equal": 5, "rows": 5}
    assert found["mlximpl"]["equal"] < 5
    assert found["cells"][1]["faults"][0].keys() == {"row", "what"}


def test_a_name_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "gpt5"]) == 2
    assert "'gpt5' is in no name of llama, qwen3" in capsys.readouterr().err


def test_alone_the_model_is_asked_once_for_both() -> None:
    alone = Alone(make_model("llama"))
    first = alone.answer([1, 2], 3)
    assert alone.answer([1, 2], 2) is first
    cell = judge(alone, FAMILY["llama"], BY_NAME["a_batch_of_1"], caches_of("mlximpl"))
    assert cell.full and cell.rows == 2
