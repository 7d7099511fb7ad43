"""The verb `record`: drives upstream over the written situations and files what it did.

A lawful golden holds what upstream returned. The recorder checks every step against the ledger and the reference first:
what breaks a law is refused here and must be written as a deviation, and a deviation that breaks none is refused too.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conformance import operations as ops
from conformance.adapters.base import Adapter, Inputs, Observation
from conformance.adapters.reference import ReferenceAdapter
from conformance.adapters.registry import make_adapter
from conformance.driver import Divergence, Driver, Found
from conformance.golden_form import FETCHED, PARTS
from conformance.goldens import Golden, save_golden
from conformance.observed import checks_of, row_axis
from conformance.operations import OTHER_KINDS
from conformance.payload import Config, Ints, Payload, Storage, Tagged
from conformance.sessions import DEVIATING_SESSIONS, SESSIONS
from conformance.situations import DEVIATIONS, SITUATIONS, Deviation, Situation
from conformance.trace import Step, Trace
from conformance.zoo_sessions import ZOO_SESSIONS

UNRECORDED = ("aliased", "unanswered", "empty", "trimmable")
"""What lawful goldens do not hold: upstream gets these wrong in most traces, and a few deviations show it."""


class RecordError(Exception):
    """A situation that cannot be filed as it is written."""


class Watch:
    """An adapter, and the last thing that it did."""

    def __init__(self, adapter: Adapter) -> None:
        self.name, self.version = adapter.name, adapter.version
        self.adapter = adapter
        self.last = Observation()

    def begin(self, config: Config) -> None:
        self.adapter.begin(config)

    def step(self, operation: ops.Operation, inputs: Inputs) -> Observation:
        self.last = self.adapter.step(operation, inputs)
        return self.last

    def slots(self, cache: str) -> str:
        return self.adapter.slots(cache)


@dataclass
class Kept:
    """A payload, and what it fed."""

    payload: Payload
    arrays_of: dict[str, Storage] = field(default_factory=dict)

    def arrays(self, where: str, tags: Ints, positions: Ints, config: Config) -> tuple[Storage, Storage]:
        keys, values = self.payload.arrays(where, tags, positions, config)
        if tags.shape[1]:
            self.arrays_of |= {f"{where}.input.keys": keys, f"{where}.input.values": values}
        return keys, values

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        return self.payload.decode(x, role, config)

    def state(self, where: str, slot: int, tags: Ints, positions: Ints, config: Config) -> Storage:
        return self.payload.state(where, slot, tags, positions, config)

    def decode_state(self, x: Storage, slot: int, config: Config) -> tuple[Ints, Ints]:
        return self.payload.decode_state(x, slot, config)

    def shown(self, role: str, tag: int, position: int) -> tuple[int, int]:
        return self.payload.shown(role, tag, position)


class Recorder:
    """One trace while it is recorded."""

    def __init__(self, situation: Situation, upstream: Adapter, payload: Payload) -> None:
        self.situation = situation
        self.deviation = situation if isinstance(situation, Deviation) else None
        self.reference, self.upstream, self.kept = Watch(ReferenceAdapter()), Watch(upstream), Kept(payload)
        self.driver = Driver([self.reference, self.upstream], situation.config, self._passes, self.kept)
        self.passed: list[Found] = []
        """What was let go at this step and is recorded."""
        self.found: Found | None = None
        self.steps: list[Step] = []
        self.arrays: dict[str, Storage] = {}

    def _passes(self, found: Found) -> bool:
        if self.deviation is not None and found.observable in self.deviation.before and not self._last:
            self.passed.append(found)
            return True
        about = self.deviation.about if self.deviation else None
        quantized = isinstance(found.operation, ops.ToQuantized)
        of_others = found.observable == "size" and (quantized or found.kind in OTHER_KINDS)
        return (found.observable in UNRECORDED or of_others) and found.observable != about

    @property
    def _last(self) -> bool:
        return self.deviation is not None and len(self.driver.steps) == len(self.deviation.operations)

    def step(self, operation: ops.Operation) -> None:
        """Carry out one operation and keep what was seen. Raises RecordError when it goes where it must not."""
        if self.found is not None:
            raise RecordError(f"deviates before its last step: {self.found.sentence()}")
        self.passed = []
        try:
            self.driver.step(operation)
        except Divergence as divergence:
            self.found = divergence.found
            if self.found.adapter == self.reference.name:
                raise RecordError(f"the reference breaks a law: {self.found.sentence()}") from divergence
            if self.deviation is None:
                raise RecordError(f"breaks a law, so it is a deviation: {self.found.sentence()}") from divergence
        self.arrays |= _input_states(str(len(self.driver.steps)), self.driver.inputs)
        lawful = checks_of(self.driver, operation, self.reference.last)
        recorded = checks_of(self.driver, operation, self.upstream.last)
        number = str(len(self.driver.steps))
        wrong = [*self.passed, *([self.found] if self.found else [])]
        if self.found is None:
            self._keep(number, self.upstream.last)
            checks = recorded
            if wrong:
                lawful |= {"mask": recorded["mask"]} if "mask" in lawful else {}
                checks = self._both(lawful, recorded, wrong)
        else:
            lawful |= {"mask": "array"} if "mask" in lawful else {}
            checks = self._both(lawful, recorded, wrong)
            self._keep(number, self._as_returned(operation))
            self._keep(f"{number}.upstream", self.upstream.last)
        self.steps.append(Step(operation, False if checks.get("refused") else None, checks))

    def _both(self, lawful: dict[str, Any], recorded: dict[str, Any], wrong: Sequence[Found]) -> dict[str, Any]:
        """The lawful checks, with what upstream showed instead; its mask and width wherever its arrays are kept."""
        always = ("mask", "width", "states", "children") if self.found else ()
        upstream = {name: value for name, value in recorded.items() if name in always or lawful.get(name) != value}
        if lawful.get("refused") and "rows" in recorded:
            garbage = self.deviation is not None and self.deviation.garbage
            upstream = {"done": True} if garbage else {"done": True, **upstream}
        for found in wrong:
            if found.observable in UNRECORDED:
                lawful[found.observable] = getattr(self.reference.last, found.observable)
                upstream[found.observable] = getattr(self.upstream.last, found.observable)
        if self.upstream.last.changed is not None:
            upstream |= {"refused": True, "changed": True}  # which field is seen first differs from run to run
        return {**lawful, "upstream": upstream}

    def _as_returned(self, operation: ops.Operation) -> Observation:
        """The reference's observation, its mask shaped as a cache returns one."""
        seen = self.reference.last
        if seen.mask is None:
            return seen
        holding = self.driver.ledger.holdings[operation.cache]
        mask = seen.mask if holding.recurrent else row_axis(seen.mask, holding.batched)
        return replace(seen, mask=mask)

    def _keep(self, prefix: str, seen: Observation) -> None:
        arrays: dict[str, Any] = {"keys": seen.keys, "values": seen.values, "mask": seen.mask}
        if seen.parts is not None:
            of = [(f"{what}.{part}", i, j) for i, what in enumerate(FETCHED) for j, part in enumerate(PARTS)]
            arrays = {"mask": seen.mask, **{name: seen.parts[i][j] for name, i, j in of}}
        arrays |= {f"slot.{i}": x for i, x in enumerate(seen.states or ())}
        self.arrays |= {f"{prefix}.{name}": x for name, x in arrays.items() if x is not None and not isinstance(x, str)}
        for i, child in enumerate(seen.children):
            self._keep(f"{prefix}.{i}", child)

    def golden(self, path: Path, source: dict[str, str]) -> Golden:
        """What was recorded, to be filed."""
        situation = self.situation
        deviation: dict[str, str] = {}
        if isinstance(situation, Deviation):
            if self.found is None:
                raise RecordError("breaks no law at its last step, so it is no deviation")
            if self.found.observable != situation.about:
                raise RecordError(f"is not about {situation.about}: {self.found.sentence()}")
            deviation = {
                "does": situation.does,
                "right": situation.right,
                "signature": self.found.signature,
            }
        trace = Trace(
            config=situation.config,
            steps=tuple(self.steps),
            description=situation.description,
            source=source,
            flags=situation.flags,
            deviation=deviation,
        )
        return Golden(path, trace, {**self.kept.arrays_of, **self.arrays})


def _input_states(where: str, inputs: Inputs) -> dict[str, Storage]:
    found = {f"{where}.input.slot.{i}": x for i, x in enumerate(inputs.states) if x is not None}
    for i, child in enumerate(inputs.children):
        found |= _input_states(f"{where}.{i}", child)
    return found


def record_situation(situation: Situation, path: Path, upstream: Adapter, source: dict[str, str]) -> Golden:
    """What upstream does in a situation. Raises RecordError when it is not what the situation says."""
    return record_steps(situation, path, upstream, Tagged(), source)


def record_steps(
    situation: Situation, path: Path, upstream: Adapter, payload: Payload, source: dict[str, str], cut: bool = False
) -> Golden:
    """The same with any payload; `cut` leaves out what comes after a deviation."""
    recorder = Recorder(situation, upstream, payload)
    try:
        for operation in situation.operations:
            recorder.step(operation)
            if cut and recorder.found:
                break
        return recorder.golden(path, source)
    except RecordError as error:
        raise RecordError(f"{situation.path} {error}") from error


def upstream_source() -> dict[str, str]:
    """Which code is recorded, and where it ran. Versions are labels: the hashes tell what the code was."""
    from importlib.metadata import version

    import mlx.core as mx
    from mlx_lm.models import base, cache

    found = {
        "name": "mlx-lm",
        "version": version("mlx-lm"),
        "mlx": version("mlx"),
        "device": str(mx.default_device().type).rsplit(".", 1)[-1],
    }
    for module in (cache, base):
        path = Path(inspect.getfile(module))
        found[f"sha256 of models/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def label(source: dict[str, str]) -> str:
    """The directory of the goldens of a source: `mlx-lm-0.32.2`."""
    return f"{source['name']}-{source['version']}"


def record(directory: Path, only: Sequence[str] = (), say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Record situations, deviations and serving sessions under a directory; with `only`, those whose path holds a part.

    Returns the paths written. Raises RecordError for the first that cannot be filed, and AdapterError without mlx-lm.
    """
    written = []
    for golden in record_all(directory, lambda path: not only or any(part in path for part in only)):
        golden.path.parent.mkdir(parents=True, exist_ok=True)
        save_golden(golden)
        written.append(golden.path)
        say(f"recorded {golden.path}")
    return written


def record_all(directory: Path, wanted: Callable[[str], bool]) -> Iterator[Golden]:
    """The goldens whose path below the directory, without its ending, is wanted."""
    from conformance.serving import record_session

    upstream = make_adapter("mlx_lm")
    source = upstream_source()
    for place, situations in ((label(source), SITUATIONS), ("deviations", DEVIATIONS)):
        for situation in situations:
            path = f"{place}/{situation.path}"
            if wanted(path):
                yield record_situation(situation, directory / f"{path}.json", upstream, source)
    lawful = (*SESSIONS, *ZOO_SESSIONS)
    for place, sessions in ((f"{label(source)}/sessions", lawful), ("deviations", DEVIATING_SESSIONS)):
        for session in sessions:
            path = f"{place}/{session.filed_as or session.path}"
            if wanted(path):
                yield from record_session(session, directory / path, source)


def main(directory: Path, only: Sequence[str]) -> int:
    """The verb; returns the exit code."""
    try:
        written = record(directory, only, print)
    except RecordError as error:
        print(f"not recorded: {error}", file=sys.stderr)
        return 1
    print(f"recorded {len(written)} goldens")
    return 0 if written else 2
