"""Rows of random lengths that arrive and leave while the others are decoded, as a server has them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from types import ModuleType
from typing import Any

import mlx.core as mx

from conformance.bench import build
from conformance.bench.build import arrays_of
from conformance.bench.floors import copied
from conformance.bench.measure import Trial
from conformance.bench.sizes import Size
from conformance.bench.steps import Answer, answering


@dataclass(frozen=True)
class Turn:
    """Before a step: which rows stay (None for all), how many tokens each new row brings. Then all rows' tokens."""

    kept: tuple[int, ...] | None
    arriving: tuple[int, ...]
    tokens: tuple[int, ...]


def turns(size: Size) -> list[Turn]:
    """The same rows for everyone: half a batch at first, then one more at most steps where there is room.

    A row stays for up to a third of the steps.
    """
    random = Random(11)
    rows: list[list[int]] = []
    made = []
    for step in range(size.churn_steps):
        staying = [i for i, (_, left) in enumerate(rows) if left > 0]
        kept = None if len(staying) == len(rows) else tuple(staying)
        rows = [rows[i] for i in staying]
        new = size.batch // 2 if step == 0 else int(len(rows) < size.batch and (not rows or random.random() < 0.75))
        arriving = tuple(random.randint(max(1, size.churn_tokens // 8), size.churn_tokens) for _ in range(new))
        rows += [[tokens, random.randint(3, max(3, size.churn_steps // 3))] for tokens in arriving]
        made.append(Turn(kept, arriving, tuple(tokens for tokens, _ in rows)))
        rows = [[tokens + 1, left - 1] for tokens, left in rows]
    return made


def churn(module: ModuleType, size: Size, attend: bool, own: bool = False) -> Trial:
    """All turns: filter, prefill and extend, then one step of all layers, evaluated. Times are of one step.

    With `own`, a module that has an `attention` answers with it.
    """
    answer = answering(module, size, own) if attend else None
    plan = turns(size)
    prompt = build.columns(size, size.churn_tokens, 1)

    def admit(batches: list[Any], tokens: int) -> list[Any]:
        rows = []
        for _ in range(size.churn_layers):
            row = module.KVCache()
            row.update_and_fetch(prompt[..., :tokens, :], prompt[..., :tokens, :])
            rows.append(module.BatchKVCache.merge([row]))
        for batch, row in zip(batches, rows, strict=False):
            batch.extend(row)
        return batches or rows

    def work(_: None) -> list[Any]:
        batches: list[Any] = []
        for turn in plan:
            if turn.kept is not None:
                batches = batches if turn.kept else []
                for batch in batches:
                    batch.filter(list(turn.kept))
            for tokens in turn.arriving:
                batches = admit(batches, tokens)
            step(batches, size, len(turn.tokens), answer)
        return []

    return Trial(lambda: None, work, len(plan))


def step(batches: list[Any], size: Size, rows: int, answer: Answer | None) -> None:
    """One token for every row, through all layers, evaluated."""
    new, out = build.columns(size, 1)[:rows], build.queries(size, 1)[:rows]
    mask = batches[0].make_mask(1, return_array=False, window_size=None)
    made: list[Any] = [] if mask is None else [mask]
    for batch in batches:
        made.append(batch.offset)
        if answer is None:
            batch.update_and_fetch(new, new)
        else:
            out = answer(out, batch, new, mask)
    mx.eval(made, out, arrays_of(*batches))


def churn_floor(size: Size, attend: bool) -> Trial:
    """Of the same turns: each row copied once as it comes, the batch's tokens copied once where rows come or go, and
    a column written in place each step; attention with no mask over the longest row's columns."""
    plan = turns(size)
    width = max(max(turn.tokens) for turn in plan) + 1
    column = size.heads * size.head_size

    def prepare() -> list[mx.array]:
        made = [mx.zeros((size.batch * width * column,), size.type) for _ in range(2 * size.churn_layers)]
        mx.eval(made)
        return made

    def work(held: list[mx.array]) -> list[Any]:
        for turn in plan:
            moved = list(turn.arriving)
            if turn.arriving or turn.kept is not None:
                moved.append(sum(turn.tokens))
            made = [copied(buffer[: tokens * column]) for tokens in moved for buffer in held]
            for buffer in held:
                buffer[: len(turn.tokens) * column] = 0
            if attend:
                made.append(_attention_floor(held, size, len(turn.tokens), max(turn.tokens)))
            mx.eval(made, held)
        return []

    return Trial(prepare, work, len(plan))


def _attention_floor(held: list[mx.array], size: Size, rows: int, width: int) -> mx.array:
    out = build.queries(size, 1)[:rows]
    shape = rows, size.heads, width, size.head_size
    elements = rows * size.heads * width * size.head_size
    for keys, values in zip(held[::2], held[1::2], strict=True):
        k, v = keys[:elements].reshape(shape), values[:elements].reshape(shape)
        out = mx.fast.scaled_dot_product_attention(out, k, v, scale=size.head_size**-0.5)
    return out
