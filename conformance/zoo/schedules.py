"""What a server asks of a batch, as plain data: who comes when, in what pieces, and who leaves.

The actions are those of the recorded sessions, and two more. Numbers of tokens are chosen around the window of 8: rows
shorter than it, as long, and longer, and answers that carry short rows past it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from conformance.sessions import Finish, Insert, Next, PutBack, Remove, prompts, segments
from conformance.zoo.families import VOCABULARY, WINDOW


@dataclass(frozen=True)
class TakeOut:
    """A sequence taken out, if it is still there, whether it waits, is fed or answers; its caches are kept."""

    sequence: int


@dataclass(frozen=True)
class Reload:
    """The caches of a sequence that left: saved to a file, loaded, and admitted with a further prompt."""

    sequence: int
    prompt: tuple[int, ...]
    max_tokens: int


Action = Insert | Next | Remove | PutBack | Finish | TakeOut | Reload


@dataclass(frozen=True)
class Schedule:
    """One way through a server."""

    name: str
    description: str
    actions: tuple[Action, ...]
    prefill_step_size: int = 64
    prefill_batch_size: int = 8
    completion_batch_size: int = 8


def words(n: int, seed: int) -> tuple[int, ...]:
    """A prompt of n tokens, the same one each time."""
    draw = random.Random(1000 * n + seed)
    return tuple(draw.randrange(1, VOCABULARY) for _ in range(n))


def ragged(*lengths: int, max_tokens: tuple[int, ...], seed: int = 0) -> Insert:
    return prompts(*(words(n, seed + i) for i, n in enumerate(lengths)), max_tokens=max_tokens)


def cut(*lengths: tuple[int, ...], max_tokens: tuple[int, ...], seed: int = 0) -> Insert:
    """Sequences that come in segments of these lengths."""
    return segments(
        *([words(n, seed + 10 * i + j) for j, n in enumerate(row)] for i, row in enumerate(lengths)),
        max_tokens=max_tokens,
    )


def _chunks(name: str, size: int) -> Schedule:
    return Schedule(
        f"chunks_of_{name}",
        f"prompts come in pieces of {size} columns, and a row joins while others are fed",
        (ragged(11, 3, 17, 8, max_tokens=(6, 12, 3, 4)), Next(3), ragged(9, 2, max_tokens=(4, 9), seed=7), Finish()),
        prefill_step_size=size,
    )


SCHEDULES: tuple[Schedule, ...] = (
    Schedule(
        "ragged_admission",
        "prompts shorter than the window, as long, and longer, at once",
        (ragged(1, 3, WINDOW, 13, 21, max_tokens=(12, 9, 3, 2, 6)), Finish()),
    ),
    Schedule(
        "one_token_segments",
        "segments of one token between longer ones, before and after the rings have wrapped",
        (
            cut((7, 1, 3), (3, 1, 3), (1, 1, 12), (9, 1, 1, 2), max_tokens=(4, 10, 3, 5)),
            Next(6),
            cut((2, 1, 5), (1,), max_tokens=(3, 8), seed=50),
            Finish(),
        ),
    ),
    _chunks("1", 1),
    _chunks("2", 2),
    _chunks("a_prime", 5),
    _chunks("the_window", WINDOW),
    Schedule(
        "late_rows",
        "rows join when the others' rings have wrapped: one longer than the window, one of a single token",
        (
            ragged(4, 2, 6, max_tokens=(20, 16, 18)),
            Next(10),
            ragged(15, 1, max_tokens=(5, 12), seed=3),
            Next(4),
            ragged(8, max_tokens=(6,), seed=9),
            Finish(),
        ),
        prefill_step_size=4,
    ),
    Schedule(
        "early_leavers",
        "rows leave after one token and after a few, first, last and in the middle",
        (ragged(12, 5, 2, 9, 7, max_tokens=(1, 13, 4, 11, 1)), Finish()),
    ),
    Schedule(
        "cancelled_in_mid_prefill",
        "a row is taken out while its prompt is being fed, another while it waits",
        (
            ragged(13, 18, 4, 16, max_tokens=(6, 5, 8, 4)),
            Next(2),
            Remove((1,)),
            Next(1),
            ragged(6, 10, max_tokens=(7, 3), seed=4),
            Remove((5,)),
            Finish(),
        ),
        prefill_step_size=3,
    ),
    Schedule(
        "taken_out_in_mid_prefill",
        "rows are taken out while they are fed and while they wait, and return with the rest of another prompt",
        (
            ragged(14, 9, 20, max_tokens=(5, 11, 4)),
            Next(2),
            TakeOut(2),
            TakeOut(0),
            ragged(3, 17, max_tokens=(8, 5), seed=5),
            TakeOut(4),
            Next(3),
            Reload(2, words(7, 4), 6),
            PutBack(0, words(1, 5), 10),
            PutBack(4, words(10, 6), 3),
            Finish(),
        ),
        prefill_step_size=4,
    ),
    Schedule(
        "reloaded_from_a_file",
        "a row that has finished and one that was taken out are saved, loaded, and go on among new rows",
        (
            ragged(10, 3, 6, max_tokens=(3, 12, 9)),
            Next(7),
            TakeOut(2),
            Finish(),
            ragged(5, 14, max_tokens=(10, 4), seed=6),
            Reload(0, words(4, 1), 7),
            Reload(2, words(1, 2), 9),
            PutBack(1, words(9, 3), 3),
            Finish(),
        ),
        prefill_step_size=6,
    ),
    Schedule(
        "waiting_for_room",
        "more rows than places: each that leaves makes room for one that waits",
        (ragged(6, 11, 2, 9, 1, 14, max_tokens=(5, 2, 9, 3, 10, 4)), Finish()),
        prefill_batch_size=2,
        completion_batch_size=3,
    ),
    Schedule(
        "a_batch_of_1",
        "one row, past the window",
        (ragged(5, max_tokens=(14,)), Finish(), ragged(17, max_tokens=(4,)), Finish()),
        prefill_step_size=7,
    ),
    Schedule(
        "a_batch_of_16",
        "sixteen rows of 1 to 22 tokens, which leave one after the other",
        (
            ragged(*(1 + 7 * i % 22 for i in range(16)), max_tokens=tuple(2 + 5 * i % 13 for i in range(16))),
            Finish(),
        ),
        prefill_batch_size=16,
        completion_batch_size=16,
    ),
)

BY_NAME: dict[str, Schedule] = {schedule.name: schedule for schedule in SCHEDULES}


def random_schedule(seed: int) -> Schedule:
    """Something that a server might see: rows come, go, return and are cancelled at times of no plan."""
    draw = random.Random(seed)
    actions: list[Action] = []
    rows = 0
    left: set[int] = set()
    """Rows that may return, once."""
    returned: set[int] = set()
    for _ in range(draw.randint(4, 10)):
        what = draw.choice(("insert", "insert", "next", "next", "take out", "return", "finish"))
        if what == "insert" or not rows:
            parts = [_pieces(draw, rows + i) for i in range(draw.randint(1, 4))]
            actions.append(segments(*parts, max_tokens=tuple(draw.randint(1, 14) for _ in parts)))
            rows += len(parts)
        elif what == "next":
            actions.append(Next(draw.randint(1, 9)))
        elif what == "take out":
            row = draw.randrange(rows)
            actions.append(TakeOut(row))
            left |= {row} - returned
        elif what == "return" and left:
            row = draw.choice(sorted(left))
            left.remove(row)
            returned.add(row)
            returning = draw.choice((Reload, PutBack))
            actions.append(returning(row, words(draw.randint(1, 9), seed), draw.randint(1, 9)))
            rows += 1
        elif what == "finish":
            actions.append(Finish())
            left = set(range(rows)) - returned
    places = draw.choice((1, 2, 3, 5, 8))
    return Schedule(
        f"random_{seed}",
        "drawn at random",
        (*actions, Finish()),
        prefill_step_size=draw.choice((1, 2, 3, 5, WINDOW, 64)),
        prefill_batch_size=places,
        completion_batch_size=max(places, draw.choice((2, 4, 8))),
    )


def _pieces(draw: random.Random, seed: int) -> list[tuple[int, ...]]:
    """A prompt in one to three segments."""
    sizes = [draw.choice((1, 1, 2, 3, 5, 7, WINDOW, 9, 13)) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
    return [words(n, 100 * seed + i) for i, n in enumerate(sizes)]
