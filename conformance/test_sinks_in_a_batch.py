"""Batches of rings with sinks: each row's attention equals that of the row alone, whatever the others are."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlximpl
from conformance.saved_caches import split
from mlximpl import BatchRotatingKVCache, CacheList, KVCache, RotatingKVCache

SIZE, KEEP = 11, 3
WINDOW = SIZE - KEEP
LENGTHS = (0, 1, KEEP - 1, KEEP, WINDOW, SIZE, 3 * SIZE + 1)
TOTAL, HEADS, DIM = 80, 2, 8
Cache = Any
Prefill = Callable[["Rows"], Cache]


class Rows:
    """Rows of random tokens, how many of each were fed, and what the query of each sees by the law."""

    def __init__(self, lengths: Sequence[int] = LENGTHS, size: int = SIZE, keep: int = KEEP) -> None:
        self.lengths, self.size, self.keep = list(lengths), size, keep
        self.fed = [0] * len(lengths)
        numbers = np.random.default_rng(7).standard_normal((3, len(lengths), HEADS, TOTAL, DIM))
        self.queries, self.keys, self.values = (x.astype(np.float32) for x in numbers)
        p, q = np.arange(TOTAL), np.arange(TOTAL)[:, None]
        seen = (p <= q) & ((p > q - (size - keep)) | (p < keep))
        queries, keys, values = (mx.array(x) for x in (self.queries, self.keys, self.values))
        self.lawful = np.array(_attention(queries, keys, values, mx.array(seen)))

    def feed(self, cache: Cache, *columns: Sequence[bool], rows: Sequence[int] | None = None) -> None:
        """Feed one update: for each row which of its columns are tokens; their answers must be the lawful ones."""
        rows = range(len(self.lengths)) if rows is None else rows
        n = len(columns[0])
        q, k, v = (np.full((len(rows), HEADS, n, DIM), 50.0, np.float32) for _ in range(3))
        at = [[*np.cumsum(tokens) + self.fed[row] - 1] for row, tokens in zip(rows, columns, strict=True)]
        for b, (row, tokens) in enumerate(zip(rows, columns, strict=True)):
            where, positions = np.flatnonzero(tokens), self.fed[row] + np.arange(sum(tokens))
            for x, whole in ((q, self.queries), (k, self.keys), (v, self.values)):
                x[b][:, where] = whole[row][:, positions]
            self.fed[row] += int(sum(tokens))
        mask = cache.make_mask(n)
        keys, values = cache.update_and_fetch(mx.array(k), mx.array(v))
        assert keys.shape[2] <= self.size + n - 1
        got = np.array(_attention(mx.array(q), keys, values, mask))
        assert np.isfinite(got).all()
        for b, (row, tokens) in enumerate(zip(rows, columns, strict=True)):
            for i in np.flatnonzero(tokens):
                np.testing.assert_allclose(got[b, :, i], self.lawful[row, :, at[b][i]], atol=2e-5)

    def decode(self, cache: Cache, steps: int, rows: Sequence[int] | None = None) -> None:
        for _ in range(steps):
            self.feed(cache, *[[True]] * len(self.lengths if rows is None else rows), rows=rows)

    def solo(self, row: int, *chunks: int) -> RotatingKVCache:
        """The row alone, fed so many tokens at a time."""
        cache = RotatingKVCache(self.size, self.keep)
        for n in chunks:
            self.feed(cache, [True] * n, rows=[row])
        return cache


def _attention(q: mx.array, k: mx.array, v: mx.array, mask: Any) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=DIM**-0.5, mask=mask)


def merged(rows: Rows) -> Cache:
    """Each prefilled alone, at once."""
    return RotatingKVCache.merge([rows.solo(row, *[n] * (n > 0)) for row, n in enumerate(rows.lengths)])


def merged_one_by_one(rows: Rows) -> Cache:
    """Each prefilled alone, a token at a time."""
    return RotatingKVCache.merge([rows.solo(row, *[1] * n) for row, n in enumerate(rows.lengths)])


def left_padded(chunk: int) -> Prefill:
    def prefill(rows: Rows) -> Cache:
        width = max(rows.lengths)
        cache = BatchRotatingKVCache(rows.size, [width - n for n in rows.lengths], rows.keep)
        for first in range(0, width, chunk):
            columns = range(first, min(first + chunk, width))
            rows.feed(cache, *([i >= width - n for i in columns] for n in rows.lengths))
        return cache

    return prefill


def right_padded(chunk: int) -> Prefill:
    def prefill(rows: Rows) -> Cache:
        cache = BatchRotatingKVCache(rows.size, [0] * len(rows.lengths), rows.keep)
        _ragged(rows, cache, rows.lengths, chunk)
        return cache

    return prefill


def _ragged(rows: Rows, cache: Cache, lengths: Sequence[int], chunk: int) -> None:
    width = max(lengths)
    cache.prepare(lengths=list(lengths), right_padding=[width - n for n in lengths])
    for first in range(0, width, chunk):
        rows.feed(cache, *([i < n for i in range(first, min(first + chunk, width))] for n in lengths))
    cache.finalize()


PREFILLS: dict[str, Prefill] = {
    "merged": merged,
    "merged one by one": merged_one_by_one,
    **{f"left padding, {n} a time": left_padded(n) for n in (1, 2, KEEP, SIZE, 100)},
    **{f"right padding, {n} a time": right_padded(n) for n in (1, 2, KEEP, 5, SIZE, 100)},
}


@pytest.mark.parametrize("how", PREFILLS)
@pytest.mark.parametrize("keep", [1, KEEP, SIZE - 1])
def test_rows_of_any_length_decode_as_each_alone(how: str, keep: int) -> None:
    rows = Rows(keep=keep)
    cache = PREFILLS[how](rows)
    assert (cache.keep, cache.max_size) == (keep, SIZE)
    assert cache.offset.tolist() == list(rows.lengths)
    rows.decode(cache, 2 * SIZE + 3)
    assert cache.keys_and_values()[0].shape[2] == SIZE


def test_rows_alone_see_what_the_law_says() -> None:
    rows = Rows()
    for row, n in enumerate(rows.lengths):
        rows.solo(row, *[1] * n)


@pytest.mark.parametrize("how", PREFILLS)
@pytest.mark.parametrize("chunk", [1, 2, 4, 7])
def test_a_second_ragged_prefill(how: str, chunk: int) -> None:
    rows = Rows()
    cache = PREFILLS[how](rows)
    for steps in (0, 1, 2 * SIZE):
        rows.decode(cache, steps)
        _ragged(rows, cache, (2, 0, 5, 1, 0, 3, 1), chunk)
    rows.decode(cache, 3)


@pytest.mark.parametrize("lengths", [(0, 2, SIZE), (3 * SIZE, 1), (1, 1), (KEEP, KEEP), (0, 0)])
@pytest.mark.parametrize("late", [0, 1, KEEP, SIZE, 2 * SIZE])
def test_rows_that_join_late_and_rows_that_leave(lengths: tuple[int, ...], late: int) -> None:
    rows = Rows((*lengths, 0, 1, KEEP + 1))
    first, last = range(len(lengths)), range(len(lengths), len(lengths) + 3)
    cache = RotatingKVCache.merge([rows.solo(row, *[n] * (n > 0)) for row, n in zip(first, lengths, strict=True)])
    rows.decode(cache, late, first)
    joining = RotatingKVCache.merge([rows.solo(row, *[1] * rows.lengths[row]) for row in last])
    for steps in (0, SIZE, 3):
        rows.decode(joining, steps, last)
        both, order = copy.deepcopy(cache), [*first, *last]
        both.extend(joining)
        before = list(rows.fed)
        rows.decode(both, 2, order)
        left = [order[-1], order[0], order[-2]]
        both.filter([len(order) - 1, 0, len(order) - 2])
        rows.decode(both, 2, left)
        for b, row in enumerate(left):
            alone, fed = both.extract(b), rows.fed[row]
            assert (alone.keep, alone.offset) == (KEEP, fed)
            rows.decode(alone, SIZE, [row])
            rows.fed[row] = fed
        rows.fed = before


@pytest.mark.parametrize("size", [KEEP + 1, SIZE])
@pytest.mark.parametrize("fed", [(), (1,) * 2, (4,), (1,) * 30, (20,), (1,) * 15 + (6,)])
def test_rows_come_back_from_a_merge_as_they_were(fed: tuple[int, ...], size: int) -> None:
    rows = Rows((0, 0, 0), size)
    chunks = (fed, (1,), ())
    batch = RotatingKVCache.merge([rows.solo(row, *each) for row, each in enumerate(chunks)])
    for row, each in enumerate(chunks):
        alone = batch.extract(row)
        rows.fed[row] = 0
        before = rows.solo(row, *each)
        assert alone.offset == before.offset
        if each:
            assert mx.array_equal(alone.keys_and_values()[0][..., :KEEP, :], before.keys_and_values()[0][..., :KEEP, :])
        rows.decode(alone, size + 2, [row])


def test_a_row_leaves_with_less_than_its_window_after_a_rollback() -> None:
    rows = Rows()
    cache = merged(rows)
    before = list(rows.fed)
    rows.feed(cache, *[[True] * 4] * len(LENGTHS))
    cache.trim(4)
    for row, n in enumerate(before):
        alone = cache.extract(row)
        assert alone.offset == n
        rows.fed[row] = n
        rows.decode(alone, SIZE + 1, [row])


@pytest.mark.parametrize("how", ["merged", "left padding, 2 a time", "right padding, 5 a time"])
@pytest.mark.parametrize("lengths", [(9, 2, 5), (1, 2, KEEP)])
def test_tokens_taken_back_into_the_sinks_are_gone_and_come_again(lengths: tuple[int, ...], how: str) -> None:
    counts = range(3)
    for steps in (0, 3, 2 * SIZE):
        for n in (*counts, steps, steps + 1, steps + 2):
            rows = Rows(lengths)
            cache = PREFILLS[how](rows)
            rows.decode(cache, steps)
            if not cache.can_trim(n):
                with pytest.raises(ValueError, match="can be dropped"):
                    cache.trim(n)
                continue
            assert cache.trim(n) == n
            rows.fed = [fed - n for fed in rows.fed]
            assert cache.offset.tolist() == rows.fed
            again = copy.deepcopy(cache)
            before = list(rows.fed)
            rows.decode(cache, SIZE + 4)
            rows.fed = before
            _ragged(rows, again, (1, 5, 0), 2)
            rows.decode(again, 4)


def test_a_batch_trimmed_to_nothing_is_empty_and_begins_anew() -> None:
    for n in (1, KEEP, SIZE - 1):
        rows = Rows((n, n))
        cache = merged(rows)
        assert cache.trim(n) == n
        assert (cache.empty(), cache.size(), cache.offset.tolist()) == (True, 0, [0, 0])
        cache.prepare(left_padding=[0, 2])
        rows.fed = [0, 0]
        rows.feed(cache, [True] * 4, [False] * 2 + [True] * 2)
        rows.decode(cache, 2 * SIZE)


def _by_state(cache: Cache, _: Path) -> Cache:
    return type(cache).from_state(cache.state)


def _by_file(cache: Cache, path: Path) -> Cache:
    mlximpl.save_prompt_cache(path, [cache])
    return mlximpl.load_prompt_cache(path, verify=True)[0]


def _mapped(cache: Cache, path: Path) -> Cache:
    mlximpl.save_prompt_cache(path, [cache], mappable=True)
    return mlximpl.load_prompt_cache(path, mmap=True)[0]


@pytest.mark.parametrize("way", [_by_state, _by_file, _mapped, lambda cache, _: copy.deepcopy(cache)])
def test_a_copy_goes_on_where_the_batch_stood(way: Callable[[Cache, Path], Cache], tmp_path: Path) -> None:
    for steps in (0, 2, 2 * SIZE):
        rows = Rows()
        cache = BatchRotatingKVCache(SIZE, [0] * len(LENGTHS), KEEP)
        assert way(cache, tmp_path / "empty").keep == KEEP
        rows.decode(cache, steps)
        cache.prepare(lengths=[4, 2, 0, 1, 4, 3, 0], right_padding=[0, 2, 4, 3, 0, 1, 4])
        rows.feed(cache, *([i < n for i in range(2)] for n in (2, 2, 0, 1, 2, 2, 0)))
        made = way(cache, tmp_path / "pending")
        for each in (cache, made):
            before = list(rows.fed)
            rows.feed(each, *([i < n for i in range(2)] for n in (2, 0, 0, 0, 2, 1, 0)))
            each.finalize()
            rows.decode(each, 1)
            ended = way(each, tmp_path / "ended")
            rows.decode(ended, SIZE)
            rows.fed = before


def test_elements_of_a_state() -> None:
    assert len(BatchRotatingKVCache(SIZE, [0, 0]).state) == 8
    cache = BatchRotatingKVCache(SIZE, [0, 0], KEEP)
    assert len(cache.state) == 9
    assert cache.state[8] == KEEP
    cache.prepare(lengths=[1, 2])
    assert len(cache.state) == 13


def test_a_file_holds_no_token_that_is_gone_and_says_that_mlx_lm_cannot_read_it(tmp_path: Path) -> None:
    rows = Rows((6, KEEP))
    cache = merged(rows)
    cache.trim(2)
    path = tmp_path / "sinks"
    mlximpl.save_prompt_cache(path, [cache])
    header, _ = split(path)
    assert json.loads(header["__metadata__"]["2.0"])["mlx_lm"] is False
    keys = np.array(mlximpl.load_prompt_cache(path)[0].state[0])
    held = {tuple(column) for row in keys for column in row[0] if column.any()}
    assert held == {tuple(rows.keys[row][0, p]) for row, n in ((0, 4), (1, 1)) for p in range(n)}


def test_no_mask_where_none_is_needed() -> None:
    rows = Rows((SIZE, SIZE + 4))
    cache = merged(rows)
    assert cache.make_mask(1) is None
    assert cache.make_mask(1, return_array=True).shape == (2, 1, 1, SIZE)
    assert isinstance(cache.make_mask(2), mx.array)  # the window cuts
    cache = BatchRotatingKVCache(SIZE, [0], KEEP)
    rows.fed[0] = 0
    rows.decode(cache, 2 * KEEP + 1, [0])
    assert isinstance(cache.make_mask(1), mx.array)  # the sinks' columns are pads
    rows.decode(cache, SIZE, [0])
    assert cache.make_mask(1) is None


def test_sinks_in_a_list_of_caches() -> None:
    rows = Rows((1, 20))
    lists = [CacheList(rows.solo(row, n), KVCache()) for row, n in enumerate(rows.lengths)]
    batch = CacheList.merge(lists)
    rows.decode(batch[0], SIZE)
    other = CacheList(BatchRotatingKVCache(SIZE, [0]), mlximpl.BatchKVCache([0]))
    with pytest.raises(ValueError, match="keep 3 by one with keep 0"):
        batch.extend(other)
    rows.decode(batch.extract(1)[0], SIZE, [1])


# --- mlx-lm's own generator ----------------------------------------------------------------------


def _llama() -> Any:
    models = pytest.importorskip("conformance.zoo.models", reason="needs mlx-lm")
    pytest.importorskip("mlx_lm")
    return models.make_model("llama")


def _alone(model: Any, cache: list[Cache], prompt: Sequence[int], wanted: int) -> tuple[list[int], list[Any]]:
    """The greedy answer of a row that is fed one token at a time, and its log-probabilities."""
    tokens, logprobs, fed = [], [], list(prompt)
    for i in range(len(prompt) + wanted - 1):
        logits = model(mx.array([[fed[i]]]), cache=cache)[0, -1]
        if i >= len(prompt) - 1:
            logprobs.append(np.array(logits - mx.logsumexp(logits)))
            tokens.append(int(logprobs[-1].argmax()))
            fed.append(tokens[-1])
    return tokens, logprobs


@pytest.mark.parametrize("step", [1, 3, 64])
def test_a_batch_of_mlx_lms_generator_answers_as_each_row_alone(step: int) -> None:
    model = _llama()
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.models import cache as theirs

    window, wanted = 12, 17
    rng = np.random.default_rng(3)
    lengths = [1, 2, 3, 4, 5, 9, window, window + 1, 2 * window + 5]
    prompts = [rng.integers(1, 60, n).tolist() for n in lengths]
    generator = BatchGenerator(
        model, max_tokens=wanted, max_kv_size=window, prefill_step_size=step, prefill_batch_size=4
    )
    answers: dict[int, tuple[list[int], list[Any]]] = {}

    def insert(some: Sequence[list[int]]) -> list[int]:
        uids: list[int] = generator.insert(some, caches=[mlximpl.make_prompt_cache(model, window) for _ in some])
        answers.update({uid: ([], []) for uid in uids})
        return uids

    def steps(most: int) -> None:
        for _ in range(most):
            responses = generator.next_generated()
            if not responses:
                return
            for response in responses:
                answers[response.uid][0].append(response.token)
                answers[response.uid][1].append(np.array(response.logprobs))

    uids = insert(prompts[::2])
    steps(9)
    uids += insert(prompts[1::2])
    steps(10_000)
    generator.close()
    for uid, prompt in zip(uids, prompts[::2] + prompts[1::2], strict=True):
        tokens, logprobs = answers[uid]
        # mlx-lm's own make_prompt_cache ignores the bound where a model makes its caches.
        own = [theirs.RotatingKVCache(window, keep=4) for _ in model.layers]
        for made in (mlximpl.make_prompt_cache(model, window), own):
            should, near = _alone(model, made, prompt, wanted)
            assert tokens == should, len(prompt)
            np.testing.assert_allclose(logprobs, near, atol=1e-4)
