"""Cost against size: which sizes are measured, which are skipped and why, and the drawing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.bench import cost, run
from conformance.bench.cost import CURVES, Skipped, curves
from conformance.bench.sizes import SIZES, Size
from conformance.bench.svg import Axis, Point, plot

TINY = SIZES["tiny"]
SVG = "{http://www.w3.org/2000/svg}"


def few_curves(size: Size, beside: Mapping[str, ModuleType], rounds: int, seed: int) -> Any:
    return curves(size, beside, rounds, seed, tokens=(32, 64), batches=(1, 2))


def test_sizes_are_measured_or_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "HOST_MEMORY", 4 * 2 * 64 * TINY.column_bytes)
    monkeypatch.setattr(cost, "device_memory", lambda: 0)
    points, skipped = curves(TINY, run.modules(), 1, 0, tokens=(32, 64, 128), batches=(1, 2))
    told = {(each.operation, each.batch, each.tokens): each.reason for each in skipped}
    found = [(point.operation, point.batch, point.tokens) for point in points]
    assert found == [
        (operation, batch, tokens)
        for operation in CURVES
        for batch in (1, 2)
        for tokens in (32, 64, 128)
        if (operation, batch, tokens) not in told
    ]
    assert {key for key, reason in told.items() if reason == "no row would be left"} == {
        ("filter", 1, tokens) for tokens in (32, 64, 128)
    }
    assert {key for key, reason in told.items() if reason.startswith("would take 0 MiB")} == {
        (operation, 2, 128) for operation in CURVES if operation != "mask"
    }, "a mask needs no memory for keys"
    assert len(found) + len(told) == 24


def test_what_would_take_too_long_is_skipped() -> None:
    points, skipped = curves(TINY, run.modules(), 1, 0, tokens=(32, 64), batches=(2,), seconds=0.0)
    assert [(point.operation, point.tokens) for point in points] == [(operation, 32) for operation in CURVES]
    assert [(each.operation, each.tokens) for each in skipped] == [(operation, 64) for operation in CURVES]
    assert all("s are left" in each.reason for each in skipped)


def test_an_axis_is_logarithmic() -> None:
    axis = Axis(1.0, 100.0, 200.0, 0.0)
    assert [round(axis.at(value), 6) for value in (1, 10, 100)] == [200.0, 100.0, 0.0]


def test_a_drawing_has_a_panel_for_each_operation_and_batch_and_a_line_for_each_name() -> None:
    times = {"mlx-lm": 2.0, "mlximpl": 1.0, "floor": 0.5}
    points = [
        Point(operation, batch, tokens, {name: ms * tokens for name, ms in times.items()})
        for operation in ("decode", "mask")
        for batch in (1, 4, 16)
        for tokens in (1024, 4096)
    ]
    drawn = plot(points, "H < D & more")
    root = xml.fromstring(drawn)
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert texts[0] == "H < D & more"
    assert [text for text in texts if text in times] == list(times)
    assert texts.count("B = 4") == 2
    assert {"decode, ms", "mask, ms", "1k", "4k", "1000", "10000"} <= set(texts)
    assert len(list(root.iter(f"{SVG}circle"))) == 2 * 3 * 2 * 3
    lines = [each for each in root.iter(f"{SVG}path") if " L" in each.attrib["d"]]
    assert len(lines) == 2 * 3 * 3
    width, height = (float(each) for each in root.attrib["viewBox"].split()[2:])
    for circle in root.iter(f"{SVG}circle"):
        assert 0 < float(circle.attrib["cx"]) < width and 0 < float(circle.attrib["cy"]) < height
    faster, slower = (next(float(c.attrib["cy"]) for c in root.iter(f"{SVG}circle") if c.attrib["fill"] == colour)
                      for colour in ("#1f5fbf", "#d95f02"))  # fmt: skip
    assert faster > slower, "what takes less lies lower"


def test_a_panel_without_points_says_so() -> None:
    points = [Point("decode", batch, 32, {"floor": 1.0}) for batch in (1, 4)]
    assert plot(points, "").count("not measured") == 0
    assert plot([*points, Point("mask", 4, 32, {"floor": 1.0})], "").count("not measured") == 1


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "curves", few_curves)
    file = tmp_path / "cost.svg"
    words = ["bench", "--size", "tiny", "--rounds", "1", "--plot", str(file)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "skipped: filter, B = 1, S = 32: no row would be left" in err
    assert xml.fromstring(file.read_text()).tag == f"{SVG}svg"
    beside = json.loads((tmp_path / "cost.json").read_text())
    assert len(beside["points"]) + len(beside["skipped"]) == 16
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == beside.keys()
    assert main([*words, "--only", "mask"]) == 2


def test_a_size_that_raises_is_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    point = Point("mask", 1, 1024, {"mlximpl": 1.0})
    monkeypatch.setattr(run, "curves", lambda *a: ([point], [Skipped("decode", 1, 1024, "failed: floor: dull")]))
    assert main(["bench", "--size", "tiny", "--plot", str(tmp_path / "cost.svg")]) == 2
    assert "skipped: decode, B = 1, S = 1024: failed: floor: dull" in capsys.readouterr().err
