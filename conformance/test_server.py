"""mlx-lm's own server with mlximpl's caches: each answer is the one that its request gets alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from conformance.http_server import Answer, Prompt, Server, most_at_once
from conformance.tiny_models import EOS_TOKEN, MORE, WINDOW, WORDS, save_model, words

pytest.importorskip("mlx_lm")
import mlx.core as mx

COUNT = 40
LENGTHS = [1, 2, 5, 9, 15, 16, 17, 18, 25, 31, 33, 40, 48, 64, 90, 120]


class Expected(NamedTuple):
    """What a prompt gets alone: the tokens before the end, their log-probabilities and the end's, and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str


Alone = Callable[..., Expected]


@pytest.fixture(scope="module", params=sorted(MORE))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def alone(model: Path) -> Alone:
    loaded, known = load(model), dict[tuple[Any, ...], Expected]()

    def answer(prompt: list[int], count: int = COUNT) -> Expected:
        key = (count, *prompt)
        if key not in known:
            known[key] = answer_alone(loaded, prompt, count)
        return known[key]

    return answer


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(model, tmp_path_factory.mktemp("home")) as running:
        yield running
        assert running.healthy()


def load(model: Path) -> Any:
    import mlx_lm

    with pytest.MonkeyPatch.context() as offline:
        offline.setenv("HF_HUB_OFFLINE", "1")
        return mlx_lm.load(str(model))[0]


def answer_alone(model: Any, prompt: list[int], count: int = COUNT) -> Expected:
    """By mlx-lm's generate_step on mlx-lm's caches for one sequence."""
    from mlx_lm.generate import generate_step

    tokens, logprobs = list[int](), list[float]()
    with mx.stream(mx.cpu):
        for token, each in generate_step(mx.array(prompt), model, max_tokens=count):
            logprobs.append(float(each[token].item()))
            if token == EOS_TOKEN:
                return Expected(tokens, logprobs, "stop")
            tokens.append(int(token))
    return Expected(tokens, logprobs, "length")


def prompt_of(number: int, length: int) -> list[int]:
    """Words that no other number begins with."""
    return [1 + (number + 7 * i + i * i * number) % (WORDS - 1) for i in range(length)]


def check(answer: Answer, expected: Expected) -> None:
    assert answer.text.split() == words(expected.tokens).split()
    assert answer.finish_reason == expected.finish_reason


PROMPTS = [prompt_of(number, length) for number, length in enumerate(LENGTHS, 1)]


def test_requests_at_once_and_one_at_a_time_get_what_each_gets_alone(
    model: Path, alone: Alone, server: Server, tmp_path: Path
) -> None:
    together = server.ask_at_once([words(prompt) for prompt in PROMPTS], COUNT)
    assert most_at_once(together) >= len(PROMPTS) // 2
    with Server(model, tmp_path) as fresh:
        apart = [fresh.ask(words(prompt), COUNT) for prompt in PROMPTS]
    for prompt, *answers in zip(PROMPTS, together, apart, strict=True):
        for answer in answers:
            assert answer.cached == 0
            check(answer, alone(prompt))
    assert sum(len(alone(prompt).tokens) > WINDOW for prompt in PROMPTS) >= 8


def test_log_probabilities_are_those_of_the_request_alone(alone: Alone, server: Server) -> None:
    answers = server.ask_at_once([words(prompt) for prompt in PROMPTS], COUNT, stream=False, logprobs=True)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = alone(prompt)
        check(answer, expected)
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_clients_that_leave_change_no_answer(alone: Alone, server: Server) -> None:
    prompts = [prompt_of(90 + i, length) for i, length in enumerate(LENGTHS[2:10])]
    with ThreadPoolExecutor(4) as leaving:
        left = [leaving.submit(server.ask_and_leave, words(prompt_of(84 + i, 20)), 4000) for i in range(4)]
        answers = server.ask_at_once([words(prompt) for prompt in prompts], COUNT)
    assert all(each.result() for each in left)
    for prompt, answer in zip(prompts, answers, strict=True):
        check(answer, alone(prompt))


@pytest.mark.parametrize("length", [WINDOW // 4, WINDOW - 1, 3 * WINDOW])
def test_what_the_store_has_of_a_prompt_does_not_change_its_answer(length: int, alone: Alone, server: Server) -> None:
    prompt = prompt_of(20 + length, length)
    first = alone(prompt, 8)
    fed = prompt + first.tokens
    check(server.ask(words(prompt), 8), first)
    turned = [
        [*fed, 7, 9],  # the conversation goes on
        fed,  # exactly what is stored
        prompt,  # which a longer entry begins with
        [*prompt[:-1], 5, 6],  # another end
        [*prompt[: length // 2], 11],
        fed[:1],  # one token
        [*fed, 7, 9, 11],
        fed[:2],
    ]
    for again in [*turned, *reversed(turned)]:
        check(server.ask(words(again), 8), alone(again, 8))


def test_what_is_stored_is_used(server: Server, model: Path) -> None:
    prompt = prompt_of(70, 3 * WINDOW)
    answer = server.ask(words(prompt), 4)
    fed = prompt + [int(word[1:]) for word in answer.text.split()]
    on = server.ask(words([*fed, 7, 9]), 4)
    assert on.cached >= len(fed)
    assert server.ask(words(prompt), 4).cached == len(prompt) - 1
    # Two of the words answered: a ring that wrapped step by step does not go back by the others.
    kept = len(prompt) + 2
    half = server.ask(words([*fed[:kept], 11]), 4)
    assert half.cached == (len(prompt) - 1 if model.name == "gemma3_text" else kept)


def test_chats_with_one_system_prompt(alone: Alone, server: Server) -> None:
    system = prompt_of(80, WINDOW + 4)
    users = [prompt_of(81 + i, n) for i, n in enumerate([1, 3, 8, 20])]
    chats: list[Prompt] = [
        [{"role": "system", "content": words(system)}, {"role": "user", "content": words(user)}] for user in users
    ]
    for _ in range(2):
        for user, answer in zip(users, server.ask_at_once(chats, 8), strict=True):
            check(answer, alone(system + user, 8))
    assert server.ask([{"role": "system", "content": words(system)}, {"role": "user", "content": "t5 t6"}], 1).cached


@pytest.mark.parametrize(
    ("name", "drafting"), [("gemma3_text", "gemma3_text"), ("gemma3_text", "llama"), ("llama", "llama")]
)
def test_a_draft_model_changes_no_answer(name: str, drafting: str, tmp_path: Path) -> None:
    """Conversations of several turns, whose store holds what speculative decoding leaves at the end of each."""
    model = save_model(name, tmp_path / "model")
    draft = save_model(drafting, tmp_path / "draft", 0.02)
    loaded = load(model)
    cached = 0
    with Server(model, tmp_path, "--draft-model", str(draft)) as server:
        for length in (3, WINDOW - 1, 2 * WINDOW):
            prompt = prompt_of(length, length)
            for turn in range(4):
                expected = answer_alone(loaded, prompt, WINDOW + turn)
                answer = server.ask(words(prompt), WINDOW + turn)
                check(answer, expected)
                cached += answer.cached
                prompt = [*prompt, *expected.tokens, 7, 9]
    assert cached or name == "gemma3_text"
