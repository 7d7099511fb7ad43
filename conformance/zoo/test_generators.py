"""mlx-lm's other ways to generate, unpatched, with mlximpl's caches as arguments."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="the generators are mlx-lm's")

import mlx_lm
from mlx_lm.generate import batch_generate, generate_step, stream_generate

import mlximpl
from conformance.adapters.surface import set_device
from conformance.tiny_models import EOS_TOKEN, save_model, words
from conformance.zoo.alone import ATOL, Alone
from conformance.zoo.families import BY_NAME
from conformance.zoo.models import make_model
from conformance.zoo.schedules import words as prompt_of

set_device()

COUNT = 12


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    path: Path = save_model(request.param, tmp_path_factory.mktemp("models") / request.param)
    with pytest.MonkeyPatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        model, tokenizer = mlx_lm.load(str(path))[:2]
    return model, tokenizer


def until_the_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS_TOKEN)] if EOS_TOKEN in tokens else tokens


def test_batch_generate_with_caches_that_go_on(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    alone = Alone(model)
    prompts = [list(prompt_of(n, 40 + n)) for n in (3, 19, 1, 30)]
    contexts = [list(prompt) for prompt in prompts]
    caches = [mlximpl.make_prompt_cache(model) for _ in prompts]
    options = {"return_prompt_caches": True, "return_token_ids": True, "return_logprobs": True}
    for further in (prompts, [list(prompt_of(n, 70 + n)) for n in (2, 1, 6, 18)]):
        done = batch_generate(model, tokenizer, further, caches, max_tokens=COUNT, prefill_step_size=7, **options)
        for i, context in enumerate(contexts):
            context[:] = context if further is prompts else context + further[i]
            answer = alone.answer(context, COUNT)
            assert done.token_ids[i] == until_the_end(answer.tokens)
            chosen = [float(answer.logprobs[j][token].item()) for j, token in enumerate(done.token_ids[i])]
            assert done.logprobs[i] == pytest.approx(chosen, abs=ATOL)
            # A token that ends an answer has been fed.
            context.extend(answer.tokens[: len(done.token_ids[i]) + 1])
        caches = done.caches
        assert all(type(layer).__module__.startswith("mlximpl.") for row in caches for layer in row)


def test_stream_generate_turn_after_turn(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    caches, context = mlximpl.make_prompt_cache(model), []
    for turn in (list(prompt_of(21, 5)), list(prompt_of(3, 6)), list(prompt_of(1, 7))):
        context += turn
        tokens = [r.token for r in stream_generate(model, tokenizer, words(turn), COUNT, prompt_cache=caches)]
        answer = until_the_end(Alone(model).answer(context, COUNT).tokens)
        assert until_the_end(tokens) == answer
        # The generator runs one token ahead of what it yields.
        context += Alone(model).answer(context, COUNT + 1).tokens[: _fed(caches) - len(context)]


def _fed(caches: list[Any]) -> int:
    return int(caches[0].offset)


@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("prefill_step_size", [1, 5, 8, 64])
def test_generate_step_in_every_family(name: str, prefill_step_size: int) -> None:
    model, prompt = make_model(name), list(prompt_of(19, 2))
    answer = Alone(model).answer(prompt, COUNT)
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=COUNT,
        prompt_cache=mlximpl.make_prompt_cache(model),
        prefill_step_size=prefill_step_size,
    )
    for (token, logprobs), expected, its in zip(steps, answer.tokens, answer.logprobs, strict=True):
        assert token == expected
        assert mx.allclose(logprobs, its, rtol=0, atol=ATOL)
