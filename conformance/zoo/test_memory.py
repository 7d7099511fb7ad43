"""Bytes of a batch that shrinks: none are held for rows that have left."""

import json

import pytest

pytest.importorskip("mlx_lm", reason="the models and generators are mlx-lm's")

from conformance.zoo import memory
from conformance.zoo.implementations import caches_of


@pytest.mark.parametrize("name", memory.FAMILIES)
def test_a_batch_that_shrinks_takes_no_more_than_on_mlx_lms_caches(name: str) -> None:
    theirs, ours = (memory.measure(caches_of(caches), name, 128) for caches in ("mlx_lm", "mlximpl"))
    assert [each.rows for each in ours.readings] == list(memory.SHOWN)
    for mine, its in zip(ours.readings, theirs.readings, strict=True):
        assert 0 < mine.nbytes <= its.nbytes
        # Beside the caches MLX holds a step's logits and tokens: some rows of 64 numbers.
        assert mine.nbytes <= mine.active <= mine.nbytes + 300_000


def test_what_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "FAMILIES", ("llama",))
    assert memory.main(["--longest", "32"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines if line[:1] == ["llama"]] == [
        ["llama", "mlx_lm", "nbytes"],
        ["llama", "mlximpl", "nbytes"],
    ]
    assert memory.main(["--longest", "32", "--json"]) == 0
    run = json.loads(capsys.readouterr().out)[1]
    assert (run["family"], run["caches"]) == ("llama", "mlximpl")
    assert run["prefill_peak"] > run["readings"][-1]["nbytes"] > 0
