"""A schedule run on a model: through mlx-lm's own generators, unpatched, with the caches of one implementation."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.sessions import Finish, Insert, Next, PutBack, Remove
from conformance.zoo.schedules import Action, Reload, Schedule, TakeOut


@dataclass(frozen=True)
class Caches:
    """Where the caches come from."""

    name: str
    make: Callable[[Any], list[Any]]
    """The caches of a model, for one row."""
    save: Callable[[str, list[Any]], None]
    load: Callable[[str], list[Any]]


@dataclass
class Row:
    """One sequence: what was fed before its answer, and the answer with the log-probabilities it was chosen by."""

    context: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    removed: bool = False


class Server:
    """mlx-lm's `BatchGenerator`, and the sequences that were given to it."""

    def __init__(self, model: Any, caches: Caches, schedule: Schedule) -> None:
        from mlx_lm.generate import BatchGenerator

        self.model, self.caches = model, caches
        self.rows: list[Row] = []
        self._uids: list[int] = []
        self._left: dict[int, tuple[list[Any], list[int]]] = {}
        """By sequence that has left and not returned: its caches, and the tokens that they have been fed."""
        self._gone: set[int] = set()
        self._generator = BatchGenerator(
            model,
            prefill_step_size=schedule.prefill_step_size,
            prefill_batch_size=schedule.prefill_batch_size,
            completion_batch_size=schedule.completion_batch_size,
        )

    def close(self) -> None:
        self._generator.close()

    def act(self, action: Action) -> None:
        """Do what the action says."""
        match action:
            case Insert():
                for parts, wanted in zip(action.segments, action.max_tokens, strict=True):
                    self._admit(parts, wanted, self.caches.make(self.model), [])
            case PutBack():
                caches, fed = self._left.pop(action.sequence)
                self._admit([action.prompt], action.max_tokens, caches, fed)
            case Reload():
                caches, fed = self._left.pop(action.sequence)
                self._admit([action.prompt], action.max_tokens, self._reloaded(caches), fed)
            case Remove():
                self._generator.remove([self._uids[i] for i in action.sequences])
                for i in action.sequences:
                    self._gone.add(i)
                    self.rows[i].removed = True
            case TakeOut() if action.sequence not in self._gone:
                self._gone.add(action.sequence)
                uid = self._uids[action.sequence]
                caches, fed = self._generator.remove([uid], return_prompt_caches=True)[uid]
                self._left[action.sequence] = caches, list(fed)
                self.rows[action.sequence].removed = True
            case Next():
                for _ in range(action.times):
                    self._next()
            case Finish():
                while self._next():
                    pass

    def _admit(self, parts: Any, wanted: int, caches: list[Any], before: list[int]) -> None:
        # Lists of our own: mlx-lm shortens what it is given.
        of = [list(part) for part in parts]
        self.rows.append(Row([*before, *(token for part in parts for token in part)], wanted))
        self._uids += self._generator.insert_segments([of], [wanted], [caches])

    def _reloaded(self, caches: list[Any]) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "row.safetensors")
            self.caches.save(path, caches)
            return self.caches.load(path)

    def _next(self) -> bool:
        fed, generated = self._generator.next()
        for response in generated:
            number = self._uids.index(response.uid)
            row = self.rows[number]
            row.tokens.append(response.token)
            row.logprobs.append(response.logprobs)
            if response.finish_reason is not None:
                self._gone.add(number)
                self._left[number] = response.prompt_cache, row.context + row.tokens
        return bool(fed or generated)


def serve(model: Any, caches: Caches, schedule: Schedule) -> tuple[list[Row], Exception | None]:
    """The rows of a schedule in a batch, and what ended it early, if anything did."""
    server = Server(model, caches, schedule)
    try:
        for action in schedule.actions:
            server.act(action)
    except Exception as error:  # what a cache or model code fails with is a result: it goes into the table
        return server.rows, error
    finally:
        server.close()
    return server.rows, None


def serve_alone(model: Any, caches: Caches, schedule: Schedule) -> tuple[list[Row], Exception | None]:
    """The rows of a schedule one after the other, through `generate_step`: for models that mlx-lm does not batch."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    rows: list[Row] = []
    try:
        for action in schedule.actions:
            if not isinstance(action, Insert):
                continue
            for parts, wanted in zip(action.segments, action.max_tokens, strict=True):
                row = Row([token for part in parts for token in part], wanted)
                rows.append(row)
                steps = generate_step(
                    mx.array(row.context),
                    model,
                    max_tokens=wanted,
                    prompt_cache=caches.make(model),
                    prefill_step_size=schedule.prefill_step_size,
                )
                for token, logprobs in steps:
                    row.tokens.append(token)
                    row.logprobs.append(logprobs)
    except Exception as error:  # as above
        return rows, error
    return rows, None
