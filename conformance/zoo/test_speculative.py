"""mlx-lm's speculative decoding, unpatched, on mlximpl's caches: what greedy decoding says, past the window too."""

from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="the decoder is mlx-lm's")

from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache as upstream_caches

import mlximpl
from conformance.adapters.surface import set_device
from conformance.zoo.alone import ATOL, Alone, Answer
from conformance.zoo.models import make_model
from conformance.zoo.schedules import words
from mlximpl import ChunkedKVCache, RotatingKVCache

set_device()

TOKENS = 40
TARGETS = ["llama", "gemma3_text", "gpt_oss", "olmo3", "cohere2", "exaone4", "llama4", "deepseek_v3", "longcat_flash"]
PROMPT = list(words(5, 7))


def speculate(model: Any, draft: Any, caches: list[Any], prompt: list[int] = PROMPT, **options: Any) -> list[Any]:
    """Tokens and log-probabilities as the decoder yields them; what it raises comes last."""
    seen: list[Any] = []
    steps = speculative_generate_step(
        mx.array(prompt), model, draft, max_tokens=TOKENS, prompt_cache=caches, **{"num_draft_tokens": 3, **options}
    )
    try:
        for token, logprobs, _ in steps:
            seen.append((token, logprobs))
    except ValueError as error:
        seen.append(error)
    return seen


def same(seen: list[Any], answer: Answer) -> bool:
    if [token for token, _ in seen] != answer.tokens:
        return False
    pairs = zip(seen, answer.logprobs, strict=True)
    return all(mx.allclose(logprobs, expected, rtol=0, atol=ATOL) for (_, logprobs), expected in pairs)


@pytest.mark.parametrize("num_draft_tokens", [1, 2, 5])
@pytest.mark.parametrize("drafted_by", ["itself", "another"])
@pytest.mark.parametrize("name", TARGETS)
def test_speculation_says_what_greedy_decoding_says(name: str, drafted_by: str, num_draft_tokens: int) -> None:
    model = make_model(name)
    draft = model if drafted_by == "itself" else make_model("qwen3")
    caches = [*mlximpl.make_prompt_cache(model), *mlximpl.make_prompt_cache(draft)]
    seen = speculate(model, draft, caches, num_draft_tokens=num_draft_tokens)
    assert same(seen, Alone(model).answer(PROMPT, TOKENS))


@pytest.mark.parametrize("length", [1, 8, 9, 21])
@pytest.mark.parametrize("prefill_step_size", [2, 512])
def test_after_prompts_around_the_window(length: int, prefill_step_size: int) -> None:
    model, draft, prompt = make_model("gemma3_text"), make_model("olmo3"), list(words(length, 3))
    caches = [*mlximpl.make_prompt_cache(model), *mlximpl.make_prompt_cache(draft)]
    seen = speculate(model, draft, caches, prompt, prefill_step_size=prefill_step_size)
    assert same(seen, Alone(model).answer(prompt, TOKENS))


def test_with_a_bound_and_sinks() -> None:
    model, draft = make_model("llama"), make_model("qwen3")
    caches = [*mlximpl.make_prompt_cache(model, 12), *mlximpl.make_prompt_cache(draft)]
    assert same(speculate(model, draft, caches), Alone(model, 12).answer(PROMPT, TOKENS))


def test_a_window_of_16_where_mlx_lm_leaves_rejected_drafts() -> None:
    model, draft = make_model("gemma3_text", sliding_window=16), make_model("llama")
    answer = Alone(model).answer(PROMPT, TOKENS)
    theirs = speculate(model, draft, [*upstream_caches(model), *upstream_caches(draft)])
    assert [token for token, _ in theirs] != answer.tokens
    ours = speculate(model, draft, [*mlximpl.make_prompt_cache(model), *mlximpl.make_prompt_cache(draft)])
    assert same(ours, answer)


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next", "falcon_h1", "lfm2"])
def test_a_recurrent_state_is_refused_before_the_first_token(name: str) -> None:
    model, draft = make_model(name), make_model("llama")
    caches = [*mlximpl.make_prompt_cache(model), *mlximpl.make_prompt_cache(draft)]
    [error] = speculate(model, draft, caches)
    assert "requires a trimmable prompt cache" in str(error)


def test_caches_that_mlx_lm_divides_wrong_are_refused_before_a_wrong_token() -> None:
    # The decoder takes one cache a layer; gemma3n has fewer, so the draft's first ones go to it.
    model, draft = make_model("gemma3n"), make_model("llama")
    caches = [*mlximpl.make_prompt_cache(model), *mlximpl.make_prompt_cache(draft)]
    *right, error = speculate(model, draft, caches)
    assert [token for token, _ in right] == Alone(model).answer(PROMPT, TOKENS).tokens[: len(right)]
    assert "at most 0 tokens can be dropped" in str(error)


@pytest.mark.parametrize("kind", [RotatingKVCache, ChunkedKVCache])
def test_a_ring_that_says_it_gives_nothing_back_keeps_rejected_drafts(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "is_trimmable", lambda self: self.trim_limit() >= self.offset)
    model, draft = make_model("gemma3_text" if kind is RotatingKVCache else "llama4"), make_model("qwen3")
    seen = speculate(model, draft, [*mlximpl.make_prompt_cache(model), *mlximpl.make_prompt_cache(draft)])
    assert not same(seen, Alone(model).answer(PROMPT, TOKENS))
