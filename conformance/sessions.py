"""Serving sessions to record: what is asked of mlx-lm's `BatchGenerator`, as plain data.

The windows of gemma3 and gpt_oss are so small that their rings wrap. gpt_oss stays with float32: its experts' matrix
product has no other dtype on a CPU. `zoo_sessions.py` has the sessions of the other models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Insert:
    """New sequences: their prompts, or lists of segments where the generator must stop."""

    segments: tuple[tuple[tuple[int, ...], ...], ...]
    max_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Next:
    """Calls of `next()`."""

    times: int


@dataclass(frozen=True)
class Remove:
    """Sequences taken out, by number in order of insertion."""

    sequences: tuple[int, ...]


@dataclass(frozen=True)
class PutBack:
    """The caches of a sequence that has finished, inserted again with a further prompt."""

    sequence: int
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Finish:
    """`next()` until nothing is left."""


Action = Insert | Next | Remove | PutBack | Finish


@dataclass(frozen=True)
class Session:
    """One session: `path` is `<model>/<what happens>`."""

    path: str
    description: str
    flags: tuple[str, ...]
    dtype: str
    actions: tuple[Action, ...]
    prefill_step_size: int = 8
    prefill_batch_size: int = 4
    completion_batch_size: int = 4
    layers: tuple[int, ...] = (0, 1)
    """Which caches are recorded, by their place in what `make_prompt_cache` gives."""
    max_kv_size: int | None = None
    """What `make_prompt_cache` is given: rings with four sinks where the model takes a KVCache."""
    sizes: dict[str, Any] = field(default_factory=dict)
    """Of a model of the zoo: other than its family's."""
    filed_as: str = ""
    does: str = ""
    """Where mlx-lm breaks a law on the way: what it does. The session is recorded up to that step."""
    right: str = ""
    about: str = ""

    @property
    def model(self) -> str:
        return self.path.split("/")[0]


def session(path: str, description: str, flags: str, dtype: str, *actions: Action, **more: Any) -> Session:
    return Session(path, description, ("Session", *flags.split()), dtype, actions, **more)


def prompts(*of: Sequence[int], max_tokens: Sequence[int]) -> Insert:
    return Insert(tuple((tuple(prompt),) for prompt in of), tuple(max_tokens))


def segments(*of: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> Insert:
    return Insert(tuple(tuple(map(tuple, sequence)) for sequence in of), tuple(max_tokens))


SESSIONS: tuple[Session, ...] = (
    session(
        "llama/ragged_prompts",
        "three prompts of different length are fed at once; each row leaves when its tokens are spent",
        "PendingPadding",
        "float32",
        prompts((5, 9, 2, 7, 11, 3), (8, 4), (5, 9, 6, 1), max_tokens=(5, 2, 4)),
        Finish(),
    ),
    session(
        "llama/chunks_and_a_late_row",
        "long prompts come in chunks, and a third sequence joins while the first two decode",
        "PendingPadding",
        "bfloat16",
        prompts((5, 9, 2, 7, 11, 3, 14, 6), (8, 4, 13, 10, 3), max_tokens=(6, 6)),
        Next(5),
        prompts((20, 21, 22), max_tokens=(3,)),
        Finish(),
        prefill_step_size=3,
    ),
    session(
        "qwen3/segments",
        "prompts stop at the ends of their segments, of which one is a single token",
        "PendingPadding OneToken",
        "float16",
        segments(((4, 8, 15), (16, 23), (42,)), ((7, 7), (1, 2, 3, 4), (9, 5)), max_tokens=(3, 4)),
        Finish(),
        prefill_step_size=4,
    ),
    session(
        "qwen3/extracted_and_put_back",
        "a row that has finished is put back with a further prompt and merged with a new sequence",
        "AfterExtract AfterMerge PendingPadding",
        "float32",
        prompts((3, 1, 4, 1), (5, 9), max_tokens=(2, 4)),
        Finish(),
        prompts((2, 6, 5), max_tokens=(3,)),
        PutBack(0, (35, 8), 3),
        Finish(),
    ),
    session(
        "gemma3_text/rings_wrap",
        "prompts longer and shorter than the window, and rings that wrap while they decode",
        "PendingPadding LongerThanRing Wrapped",
        "float32",
        prompts((5, 9, 2, 7, 11, 3, 12), (8, 4, 6), max_tokens=(13, 8)),
        Finish(),
    ),
    session(
        "gemma3_text/segments_longer_than_the_window",
        "segments that overflow the window, and a sequence that waits for room",
        "PendingPadding LongerThanRing Wrapped",
        "float16",
        segments(
            ((4, 8, 15, 16, 23, 42, 7), (9, 10, 11)),
            ((1, 2), (3, 5, 6, 7, 8, 9)),
            ((30, 31, 32, 33), (34, 35)),
            max_tokens=(4, 6, 5),
        ),
        Finish(),
        prefill_batch_size=2,
        completion_batch_size=2,
    ),
    session(
        "gemma3_text/removed_in_mid_prefill",
        "a sequence is taken out while its prompt is being fed in chunks, and the others go on",
        "PendingPadding Wrapped",
        "bfloat16",
        prompts((5, 9, 2, 7, 11, 3, 14), (8, 4, 13, 10, 3, 17, 18, 19, 21), (30, 31, 32), max_tokens=(5, 5, 4)),
        Next(2),
        Remove((1,)),
        Finish(),
        prefill_step_size=3,
    ),
    session(
        "gpt_oss/late_row_in_a_wrapped_ring",
        "a sequence joins when the rings of the others have wrapped",
        "PendingPadding Wrapped",
        "float32",
        prompts((5, 9, 2, 7), (8, 4), max_tokens=(9, 8)),
        Next(7),
        prompts((20, 21, 22, 23, 24, 25), max_tokens=(4,)),
        Finish(),
    ),
    session(
        "gpt_oss/wrapped_and_put_back",
        "rows whose rings have wrapped are put back with further prompts, ragged again",
        "AfterExtract AfterMerge PendingPadding Wrapped",
        "float32",
        prompts((5, 9, 2), (8, 4, 6, 1), max_tokens=(6, 4)),
        Finish(),
        PutBack(0, (35, 8, 33), 5),
        PutBack(1, (12,), 4),
        Finish(),
    ),
)

DEVIATING_SESSIONS: tuple[Session, ...] = (
    session(
        "gemma3_text/one_token_segments",
        "segments of one token between longer ones leave a shorter row all its tokens",
        "Deviation PendingPadding Wrapped LeftPadding SeveralTokens",
        "float32",
        segments(((4, 8, 15, 16, 23, 42, 7), (9,), (10, 11, 13)), ((1, 2, 3), (5,), (6, 12, 14)), max_tokens=(2, 2)),
        Finish(),
        layers=(0,),
        filed_as="D1-in-a-serving-session",
        about="visible",
        does="the model's attention misses the oldest token of the shorter row, as in the first trace of D1",
        right="the shorter row sees all its tokens",
    ),
    session(
        "qwen3/bounded",
        "with a bound of eight tokens a batch keeps the first four of each row",
        "Deviation PendingPadding Sinks LongerThanRing AfterMerge",
        "float32",
        prompts((5, 9, 2, 7, 11, 3, 14, 6, 12, 1, 13), (8, 4, 6), max_tokens=(2, 2)),
        Finish(),
        prefill_step_size=16,
        layers=(0,),
        max_kv_size=8,
        filed_as="D3-in-a-serving-session",
        about="visible",
        does="the batch has forgotten the sinks of the merged rings, and hides them from queries past the bound",
        right="each query sees the row's first four tokens and the newest four",
    ),
)
