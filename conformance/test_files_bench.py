"""The bench of files runs, and its numbers belong together. Times are not asserted."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from conformance import files_bench
from conformance.files_bench import Size, bench, main, table

TINY = (
    Size("10 tokens", 1, 1, 10, 64, "float32", 2),
    Size("two layers", 2, 1, 3, 8, "bfloat16", 1),
)
LOADS = [f"{layout}, {way}" for layout in ("compact", "mappable") for way in ("read", "mmap", "mmap, verify")]


def test_every_file_and_load_is_measured() -> None:
    pytest.importorskip("mlx_lm")
    rows = bench(TINY)
    assert [row.file for row in rows] == 2 * ["mlx-lm", *LOADS]
    assert [row.rounds for row in rows[:7]] == [2] * 7
    assert rows[0].ratio == rows[0].size_ratio == 1
    assert all(row.milliseconds > 0 and row.quartiles[0] <= row.milliseconds <= row.quartiles[1] for row in rows)
    assert rows[1].bytes < rows[0].bytes, "spare columns are not saved"
    assert rows[1].size_ratio == rows[0].bytes / rows[1].bytes


def test_without_mlx_lm_there_is_nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_bench, "upstream", lambda: None)
    rows = bench(TINY[:1])
    assert [row.file for row in rows] == LOADS
    assert all(row.ratio is None for row in rows)
    assert table(rows).row_count == 1 + len(LOADS)


def test_the_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(Namespace(json=False), TINY[:1]) == 0
    out = capsys.readouterr().out
    assert "device" in out
    assert "mlx-lm" in out
    assert "10 tokens" in out
    assert main(Namespace(json=True), TINY[:1]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {"device", "mlx", "mlx-lm", "mlximpl", "rows"} <= data.keys()
    assert {"case", "file", "bytes", "milliseconds", "quartiles", "ratio"} <= data["rows"][0].keys()
