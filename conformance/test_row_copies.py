"""Rows put together from ranges: by MLX's operations, by the plan that the CUDA kernel gets, and by the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from conformance.adapters.surface import set_device
from mlximpl import cuda_rows, row_copies
from mlximpl.cuda_rows import copy_by_kernel, kernel_takes
from mlximpl.row_copies import copy_pairs, copy_rows
from mlximpl.row_plan import Range, Row, RowPlan, moved, shifted

HEADS, SIZE = 2, 8
WIDTHS = (5, 9, 12)


@pytest.fixture(autouse=True)
def device() -> None:
    set_device()


def drawn(random: Random) -> tuple[list[mx.array], list[Row], int]:
    """Sources of other widths, rows of up to three ranges in the order of their columns, and a width."""
    sources = [
        mx.random.normal((random.randint(1, 4), HEADS, width, SIZE), key=mx.random.key(width)) for width in WIDTHS
    ]
    width = random.randint(3, 14)
    rows: list[Row] = []
    for _ in range(random.randint(1, 7)):
        if rows and rows[-1] and random.random() < 0.5:
            last = rows[-1]
            follows = tuple(each._replace(row=(each.row + 1) % sources[each.source].shape[0]) for each in last)
            rows.append(follows)
            continue
        column, row = 0, []
        for _ in range(random.choice([0, 1, 1, 1, 2, 3])):
            source = random.randrange(len(sources))
            first = random.randrange(WIDTHS[source])
            column += random.randint(0, 3)
            length = min(random.randint(1, WIDTHS[source] - first), width - column)
            if length > 0:
                row.append(Range(source, random.randrange(sources[source].shape[0]), first, column, length))
                column += length
        rows.append(tuple(row))
    return sources, rows, width


def expected(sources: Sequence[mx.array], rows: Sequence[Row], width: int) -> tuple[np.ndarray, np.ndarray]:
    """What each range brings, and where ranges are."""
    made = np.zeros((len(rows), HEADS, width, sources[0].shape[3]), np.float32)
    given = np.zeros((len(rows), width), bool)
    for to, row in enumerate(rows):
        for source, number, first, column, length in row:
            made[to, :, column : column + length] = np.array(sources[source])[number, :, first : first + length]
            given[to, column : column + length] = True
    return made, given


@pytest.mark.parametrize("seed", range(60))
def test_every_range_arrives_and_nothing_foreign(seed: int) -> None:
    random = Random(seed)
    sources, rows, width = drawn(random)
    spare = random.choice([0, 0, 2])
    copied = np.array(copy_rows(sources, RowPlan(rows), width, len(rows) + spare))
    made, given = expected(sources, rows, width)
    assert copied.shape == (len(rows) + spare, HEADS, width, SIZE)
    for to, row in enumerate(rows):
        assert np.array_equal(copied[to][:, given[to]], made[to][:, given[to]])
        beside = copied[to][:, ~given[to]]
        own = {(each.source, each.row) for each in row}
        kept = [np.array(sources[source])[number] for source, number in own]
        assert all(
            not column.any() or any((column == old).all() for held in kept for old in held.swapaxes(0, 1))
            for column in beside.swapaxes(0, 1)
        ), "a column beside a row's ranges is neither zero nor that row's own"


def test_a_whole_source_is_shared_and_both_go_their_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_copies, "_copied", None)
    monkeypatch.setattr(row_copies, "copy_slice", None)
    source = mx.ones((2, HEADS, 4, SIZE))
    copied = copy_rows([source], shifted((0, 1), (1, 0), 4, 0), 4)
    copied[0, 0, 0, 0] = 7
    assert source[0, 0, 0, 0].item() == 1


@pytest.mark.parametrize(
    ("plan", "width", "allocated"),
    [
        (shifted((1, 0), (0, 0), 4, 0), 4, 2),
        (shifted((0,), (0, 0), 4, 0), 4, 2),
        (shifted((0, 1), (0, 0), 3, 0), 3, 2),
        (shifted((0, 1), (0, 0), 4, 0), 4, 3),
        (shifted((0, 1), (1, 1), 3, 1), 4, 2),
        (moved((0, 1), (((0, 0, 2), (3, 3, 1)),) * 2), 4, 2),
    ],
)
def test_all_else_is_copied(plan: RowPlan, width: int, allocated: int) -> None:
    source = mx.arange(2 * HEADS * 4 * SIZE).reshape(2, HEADS, 4, SIZE)
    mx.eval(source)
    before = mx.get_active_memory()
    copied = copy_rows([source], plan, width, allocated)
    mx.eval(copied)
    assert mx.get_active_memory() > before
    for to, row in enumerate(plan.rows):
        for _, number, first, column, length in row:
            assert mx.array_equal(copied[to, :, column : column + length], source[number, :, first : first + length])


def interpreted(arguments: dict[str, Any]) -> list[mx.array]:
    """What the kernel's plan says, followed number by number."""
    *sources, plan = (np.array(each) for each in arguments["inputs"])
    heads, width, *vectors = plan[:4].tolist()
    ranges = plan[4]
    made = [np.zeros(shape, np.float32) for shape in arguments["output_shapes"]]
    for part, new in enumerate(made):
        assert new.shape[1:] == (heads, width, vectors[part] * cuda_rows.VECTOR // new.itemsize)
    ranged = plan[cuda_rows.HEAD :].reshape(-1, cuda_rows.FIELDS)
    assert arguments["grid"][1:] == (heads, 2 * len(ranged) // max(1, ranges))
    assert arguments["grid"][0] * cuda_rows.UNROLLED >= width * max(vectors)
    for number, (source, row, columns, first, column, length) in enumerate(ranged):
        for part, new in enumerate(made):
            held = sources[2 * source + part]
            assert columns == held.shape[2] or length == 0
            new[number // ranges, :, column : column + length] = held[row, :, first : first + length]
    return [mx.array(new) for new in made]


def pairs(sources: Sequence[mx.array]) -> list[tuple[mx.array, mx.array]]:
    """Values of half the keys' size."""
    return [(keys, keys[..., : SIZE // 2] + 1) for keys in sources]


@pytest.mark.parametrize("seed", range(30))
def test_the_plan_of_the_kernel(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, rows, width = drawn(Random(seed))
    if not any(rows):
        rows[0] = (Range(0, 0, 0, 0, 1),)
    rooms = []

    def kernel(room: int) -> Any:
        rooms.append(room)
        return lambda **arguments: interpreted(arguments)

    monkeypatch.setattr(cuda_rows, "_kernel", kernel)
    of_pairs = pairs(sources)
    for part, made in enumerate(copy_by_kernel(of_pairs, RowPlan(rows), width, len(rows))):
        assert np.array_equal(np.array(made), expected([pair[part] for pair in of_pairs], rows, width)[0])
    assert rooms == [16]


def test_where_the_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    small, odd, empty = ((mx.ones((1, 1, n, size)),) * 2 for n, size in ((3, 8), (3, 6), (0, 8)))
    monkeypatch.setattr(cuda_rows, "_runs", lambda *dtypes: True)
    monkeypatch.setattr(cuda_rows, "on_cuda", lambda: False)
    assert not kernel_takes([small], 1)
    monkeypatch.setattr(cuda_rows, "on_cuda", lambda: True)
    assert kernel_takes([small], 32767) and kernel_takes([small] * 64, 64)
    others = ([odd], [(small[0], odd[0])], [small, empty], [small, (small[0], small[1][:, :, :2])], [small] * 65)
    assert not any(kernel_takes(each, 1) for each in others)
    assert not kernel_takes([small], 32768)
    monkeypatch.setattr(cuda_rows, "_runs", lambda *dtypes: False)
    assert not kernel_takes([small], 1)


def test_what_is_left_to_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one slice, and nothing to copy."""
    asked: list[Any] = []
    monkeypatch.setattr(row_copies, "kernel_takes", lambda *of: asked.append(of))
    pair = mx.ones((3, 1, 4, 8)), mx.ones((3, 1, 4, 4))
    for rows, stop, shift, width, allocated in (((1,), 4, -1, 3, 1), ((1, 2), 4, 0, 4, 2), ((), 4, 0, 4, 0)):
        copy_pairs([pair], shifted(rows, (0, 0, 0), stop, shift), width, allocated)
    assert asked == []
    for rows, stop, shift, width, allocated in (((1,), 4, 1, 5, 1), ((1, 2), 4, 0, 4, 3), ((0, 2), 4, 0, 4, 2)):
        copy_pairs([pair], shifted(rows, (0, 0, 0), stop, shift), width, allocated)
    assert len(asked) == 3


def test_a_kernel_that_fails_is_told_once_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(room: int) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(cuda_rows, "_kernel", fails)
    cuda_rows._runs.cache_clear()
    try:
        with pytest.warns(UserWarning, match="float32 fails: no compiler here") as told:
            assert not cuda_rows._runs(mx.float32, mx.float32) and not cuda_rows._runs(mx.float32, mx.float32)
        assert len(told) == 1
        monkeypatch.setattr(cuda_rows, "_kernel", lambda room: lambda **how: map(mx.zeros, how["output_shapes"]))
        with pytest.warns(UserWarning, match="float16 and .*float32 fails: it copies wrongly"):
            assert not cuda_rows._runs(mx.float16, mx.float32)
    finally:
        cuda_rows._runs.cache_clear()


@pytest.mark.skipif(not mx.cuda.is_available(), reason="the kernel runs under CUDA alone")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_the_kernel(dtype: mx.Dtype) -> None:
    for seed in range(40):
        sources, rows, width = drawn(Random(seed))
        of_pairs = [(keys.astype(dtype), mx.concatenate([keys, keys], axis=3)) for keys in sources]
        if seed % 3 == 0:  # one whose memory does not begin at a whole vector
            keys, values = of_pairs[0]
            flat = mx.concatenate([mx.zeros((1,), dtype), keys.reshape(-1)])
            of_pairs[0] = flat[1:].reshape(keys.shape), values
        assert kernel_takes(of_pairs, len(rows))
        for number in (2, 3):
            some = [row if all(each.source < number for each in row) else () for row in rows]
            for part, made in enumerate(copy_by_kernel(of_pairs[:number], RowPlan(some), width, len(rows) + 1)):
                wide = [pair[part].astype(mx.float32) for pair in of_pairs]
                copied = np.array(made.astype(mx.float32))[: len(rows)]
                assert np.array_equal(copied, expected(wide, some, width)[0])
