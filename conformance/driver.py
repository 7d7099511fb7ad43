"""One step on every adapter, then one observation from each, and the first divergence among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from conformance import operations as ops
from conformance.adapters.base import Adapter, Inputs, Observation
from conformance.compare import Difference, against_expected, against_reference, against_verdict
from conformance.ledger import REFUSED, Expected, Ledger, Token, merged_kind
from conformance.payload import PAD, Config, Payload, Tagged, queries
from conformance.trace import Step, Trace

VERDICTS = ("refusal", "crash", "half-applied")
"""Observables of whether a call was done or refused; a finding is named by why it should have been refused."""

SOFT = ("aliased", "unanswered", "size", "empty", "trimmable")
"""Observables after which the caches are still in step."""


class Divergence(AssertionError):
    """An implementation did other than it must. A subclass for each observable tells failures apart."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.sentence())
        self.found = found


@dataclass(frozen=True)
class Found:
    """Where a divergence was found and what it is."""

    step: int
    """From 1."""
    operation: ops.Operation
    kind: str
    """The cache's class."""
    adapter: str
    against: str
    difference: Difference
    situation: tuple[str, ...]

    def sentence(self) -> str:
        """`step 6: visible[b]=0 1 2 3, but should be 1 2 3 4 [x.update(tokens=1)]`."""
        d = self.difference
        note = f" ({d.note})" if d.note else ""
        return f"step {self.step}: {d.observable}={d.got}, but should be {d.should}{note} [{ops.call(self.operation)}]"

    @property
    def observable(self) -> str:
        """The observable without the row's name."""
        return self.difference.observable.split("[")[0]

    @property
    def signature(self) -> str:
        """What makes two divergences the same finding."""
        situation = "+".join(self.situation)
        if self.observable in VERDICTS:
            detail = self.difference.note or f"lawful {situation}".strip()
        else:
            detail = "" if self.observable in SOFT else situation
        return "/".join([self.kind, self.operation.op, self.observable, detail or "-"])


def divergence_class(observable: str) -> type[Divergence]:
    """The subclass for this observable, the same one each time."""
    name = "".join(word.capitalize() for word in observable.replace("-", " ").split()) + "Divergence"
    return _CLASSES.setdefault(name, type(name, (Divergence,), {}))


_CLASSES: dict[str, type[Divergence]] = {}


@dataclass
class Driver:
    """Runs a trace step by step. The first adapter is the one that the others are compared with."""

    adapters: Sequence[Adapter]
    config: Config
    passes: Callable[[Found], bool] = lambda found: False
    """Whether a finding is known and leaves the caches in step, so that the trace may go on."""
    payload: Payload = field(default_factory=Tagged)
    ledger: Ledger = field(default_factory=Ledger)
    steps: list[Step] = field(default_factory=list)
    expected: Expected | None = None
    """What the ledger says of the last step; None when it was refused."""
    inputs: Inputs = field(default_factory=Inputs)
    """What the adapters were given at the last step."""

    def __post_init__(self) -> None:
        for adapter in self.adapters:
            adapter.begin(self.config)

    def signatures(self, operation: ops.Operation) -> set[str]:
        """The signatures that a finding would have here, but for soft ones and those of nothing special."""
        reason = self.ledger.judge(operation).reason
        situation = "+".join(situation_of(self.ledger, operation))
        call = f"{self._kind(operation)}/{operation.op}"
        found = {f"{call}/{what}/{reason or f'lawful {situation}'.strip()}" for what in VERDICTS}
        if situation:
            found |= {f"{call}/{what}/{situation}" for what in ("rows", "offset", "offsets", "visible", "columns")}
        return found

    def step(self, operation: ops.Operation) -> list[Observation]:
        """Carry out one operation everywhere; raises the Divergence that is found first."""
        self.steps.append(Step(operation))
        verdict = self.ledger.judge(operation)
        situation = situation_of(self.ledger, operation)
        kind = self._kind(operation)
        self.inputs = inputs = self._inputs(operation, str(len(self.steps)))
        seen = [adapter.step(operation, inputs) for adapter in self.adapters]

        def check(difference: Difference | None, who: int, against: str) -> None:
            if difference is not None:
                found = Found(
                    step=len(self.steps),
                    operation=operation,
                    kind=kind,
                    adapter=self.adapters[who].name,
                    against=against,
                    difference=difference,
                    situation=situation,
                )
                if not (found.observable in SOFT and self.passes(found)):
                    raise divergence_class(found.observable)(found)

        # The ledger goes on whatever the others did, so that a caller may drop them and go on too.
        refused = seen[0].refused is not None
        lawful = verdict.ruling != REFUSED
        self.expected = expected = self.ledger.apply(operation) if lawful and not refused else None
        for who, observation in enumerate(seen):
            check(against_verdict(observation, verdict), who, "ledger")
        for who, observation in enumerate(seen):
            if (observation.refused is not None) != refused:
                got, should = ("done", "refused") if refused else (f"refused: {observation.refused}", "done")
                check(Difference("refusal", got, should, verdict.reason), who, self.adapters[0].name)
        if expected is not None:
            self._check_done(operation, seen, expected, check)
        return seen

    def _check_done(
        self,
        operation: ops.Operation,
        seen: Sequence[Observation],
        expected: Expected,
        check: Callable[[Difference | None, int, str], None],
    ) -> None:
        target = getattr(operation, "into", operation.cache)
        for who, observation in enumerate(seen):
            for difference in self._against_ledger(observation, expected, target):
                check(difference, who, "ledger")
        for who, observation in enumerate(seen[1:], 1):
            for difference in against_reference(observation, seen[0], expected):
                check(difference, who, self.adapters[0].name)

    def _against_ledger(self, seen: Observation, expected: Expected, cache: str) -> Iterator[Difference]:
        holding = self.ledger.holdings[cache]
        config = self.config.variant(holding.variant or "plain")
        yield from against_expected(seen, expected, holding, config, self)
        if len(seen.children) != len(expected.children):
            yield Difference("children", str(len(seen.children)), str(len(expected.children)))
            return
        for i, (child, its) in enumerate(zip(seen.children, expected.children, strict=True)):
            yield from self._against_ledger(child, its, f"{cache}.{i}")

    def _kind(self, operation: ops.Operation) -> str:
        if isinstance(operation, ops.New):
            return operation.kind
        if isinstance(operation, ops.Merge):
            kinds = [self.ledger.holdings[name].kind for name in operation.caches]
            return merged_kind(kinds[0]) if kinds else "BatchKVCache"
        return self.ledger.holdings[operation.cache].kind

    def _inputs(self, operation: ops.Operation, where: str) -> Inputs:
        if isinstance(operation, ops.Filter | ops.Extract):
            rows = operation.rows if isinstance(operation, ops.Filter) else (operation.row,)
            names = [row.name for row in self.ledger.holdings[operation.cache].rows]
            # A name that is not there stands for the index one past the last row.
            return Inputs(indices=tuple(names.index(row) if row in names else len(names) for row in rows))
        if not isinstance(operation, ops.Update):
            return Inputs()
        if self.ledger.is_list(operation):
            parts = enumerate(self.ledger.parts(operation))
            return Inputs(children=tuple(self._inputs(part, f"{where}.{i}") for i, part in parts))
        if self.ledger.holdings[operation.cache].recurrent:
            return self._states(operation, where)
        return self._arrays(operation, where)

    def _states(self, operation: ops.Update, where: str) -> Inputs:
        """What each slot gets: the row's last token, or a foreign one in an update that is to be refused."""
        config = self.config
        holding = self.ledger.holdings[operation.cache]
        if self.ledger.judge(operation).reason:
            last: list[Token | None] = [("poison", 0)] * len(holding.rows)
        else:
            last = self.ledger.states_after(operation)
        last += [("poison", 0)] * (operation.variant == "rows")
        tags = np.array([self.ledger.tag(token[0]) if token else 0 for token in last], np.int64)
        positions = np.array([token[1] if token else PAD for token in last], np.int64)
        written = [operation.slot in (None, i) for i in range(len(holding.filled))]
        state = self.payload.state
        states = (state(where, i, tags, positions, config) if now else None for i, now in enumerate(written))
        return Inputs(dtype=config.dtype, states=tuple(states))

    def _arrays(self, operation: ops.Update, where: str) -> Inputs:
        config = self.config.variant(operation.variant)
        tokens = self._fed(operation)
        rows, count = len(tokens), max(0, operation.tokens)
        tags = np.zeros((rows, count), np.int64)
        positions = np.full((rows, count), PAD, np.int64)
        for b, row in enumerate(tokens):
            for i, token in enumerate(row):
                if token is not None:
                    tags[b, i], positions[b, i] = self.ledger.tag(token[0]), token[1]
        keys, values = self.payload.arrays(where, tags, positions, config)
        if operation.variant == "uneven":
            values = np.concatenate([values, values[:, :, :1]], axis=2)
        return Inputs(
            keys=keys,
            values=values,
            dtype=config.dtype,
            queries=queries(np.maximum(positions, 0), config) if self._attends(operation) else None,
        )

    def _attends(self, operation: ops.Update) -> bool:
        return self.config.attention and self.ledger.holdings[operation.cache].quantized is None

    def token(self, role: str, token: Token) -> tuple[int, int]:
        """The tag and position that the array of this token shows."""
        return self.payload.shown(role, self.ledger.tag(token[0]), token[1])

    def _fed(self, operation: ops.Update) -> list[list[Token | None]]:
        """The tokens to feed, also where the call is not lawful."""
        holding = self.ledger.holdings[operation.cache]
        count = max(0, operation.tokens)
        if self.ledger.judge(operation).reason:
            fed: list[list[Token | None]] = [[("poison", 0)] * count for _ in holding.rows]
        else:
            fed = self.ledger.preview(operation)
        if operation.variant == "rows" and len(fed) == len(holding.rows):
            fed.append([("poison", 0)] * count)
        return fed


def situation_of(ledger: Ledger, operation: ops.Operation) -> tuple[str, ...]:
    """What is special about the call and the caches that it meets, from their history alone."""
    names = [operation.cache, *getattr(operation, "caches", ()), getattr(operation, "other", None)]
    met = [ledger.holdings[name] for name in names if name in ledger.holdings]
    tags = {
        "sinks": any(holding.keep for holding in met),
        "pending": any(holding.pending for holding in met),
        "lengths alone": any(holding.pending and holding.by_lengths for holding in met),
        "due": any(row.due for holding in met for row in holding.rows),
        "no rows": any(holding.batched and not holding.rows for holding in met),
        "wrapped": any(holding.wrapped for holding in met),
        "trimmed": any(holding.trimmed for holding in met),
        "restored": any(holding.restored for holding in met),
    }
    window = getattr(operation, "window", None)
    if window is not None and met:
        tags["wide window"] = window > (met[0].max_size or window)
        tags["window"] = not tags["wide window"]
    return tuple(sorted(tag for tag, holds in tags.items() if holds))


def run(trace: Trace, adapters: Sequence[Adapter], payload: Payload | None = None) -> Driver:
    """Run a whole trace; raises the Divergence that is found first."""
    driver = Driver(adapters, trace.config, payload=payload or Tagged())
    for step in trace.steps:
        driver.step(step.operation)
    return driver
