"""The verb `record`: drives upstream over the written situations and files what it did.

A lawful golden holds what upstream returned. The recorder checks every step against the ledger and the reference first:
what breaks a law is refused here and must be written as a deviation, and a deviation that breaks none is refused too.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from conformance import operations as ops
from conformance.adapters.base import Adapter, Inputs, Observation
from conformance.adapters.reference import ReferenceAdapter
from conformance.adapters.registry import make_adapter
from conformance.driver import Divergence, Driver, Found
from conformance.goldens import Golden, save_golden
from conformance.observed import checks_of, row_axis
from conformance.payload import Config, Ints, Payload, Storage, Tagged
from conformance.situations import DEVIATIONS, SITUATIONS, Deviation, Situation
from conformance.trace import Step, Trace

UNRECORDED = ("aliased", "empty", "trimmable")
"""What lawful goldens do not hold: upstream gets these wrong in most traces, and a few deviations show it."""


class RecordError(Exception):
    """A situation that cannot be filed as it is written."""


@dataclass
class Watch:
    """An adapter, and the last thing that it did."""

    adapter: Adapter
    last: Observation = field(default_factory=Observation)

    @property
    def name(self) -> str:
        return self.adapter.name

    @property
    def version(self) -> str:
        return self.adapter.version

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

    def arrays(self, step: int, tags: Ints, positions: Ints, config: Config) -> tuple[Storage, Storage]:
        keys, values = self.payload.arrays(step, tags, positions, config)
        if tags.shape[1]:
            self.arrays_of |= {f"{step}.input.keys": keys, f"{step}.input.values": values}
        return keys, values

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        return self.payload.decode(x, role, config)

    def shown(self, role: str, tag: int, position: int) -> tuple[int, int]:
        return self.payload.shown(role, tag, position)


class Recorder:
    """One trace while it is recorded."""

    def __init__(self, config: Config, upstream: Adapter, payload: Payload, about: str | None = None) -> None:
        self.reference, self.upstream, self.kept = Watch(ReferenceAdapter()), Watch(upstream), Kept(payload)
        soft = [observable for observable in UNRECORDED if observable != about]
        self.driver = Driver([self.reference, self.upstream], config, lambda found: found.observable in soft, self.kept)
        self.about = about
        self.steps: list[Step] = []
        self.arrays: dict[str, Storage] = {}
        self.found: Found | None = None

    def step(self, operation: ops.Operation) -> None:
        """Carry out one operation and keep what was seen. Raises RecordError when it goes where it must not."""
        if self.found is not None:
            raise RecordError(f"deviates before its last step: {self.found.sentence()}")
        try:
            self.driver.step(operation)
        except Divergence as divergence:
            self.found = divergence.found
            if self.found.adapter == self.reference.name:
                raise RecordError(f"the reference breaks a law: {self.found.sentence()}") from divergence
            if self.about is None:
                raise RecordError(f"breaks a law, so it is a deviation: {self.found.sentence()}") from divergence
        lawful = checks_of(self.driver, operation, self.reference.last)
        recorded = checks_of(self.driver, operation, self.upstream.last)
        number = str(len(self.driver.steps))
        if self.found is None:
            checks = recorded
            self._keep(number, self.upstream.last)
        else:
            checks = self._both(operation, lawful, recorded)
            self._keep(number, self._as_returned(operation))
            self._keep(f"{number}.upstream", self.upstream.last)
        valid = False if checks.get("refused") else None
        self.steps.append(Step(operation, valid, checks))

    def _both(self, operation: ops.Operation, lawful: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
        """The lawful checks, with what upstream showed instead."""
        assert self.found is not None
        mask = self.reference.last.mask
        if mask is not None:
            lawful["mask"] = "array"
        always = ("mask", "width")
        upstream = {k: v for k, v in recorded.items() if k in always or lawful.get(k) != v}
        if lawful.get("refused") and "rows" in recorded:
            upstream = {"done": True, **upstream}
        for name in UNRECORDED:
            if name == self.found.observable:
                lawful[name] = getattr(self.reference.last, name)
                upstream[name] = getattr(self.upstream.last, name)
        if self.upstream.last.changed is not None:
            upstream |= {"refused": True, "changed": self.upstream.last.changed}
        return {**lawful, "upstream": upstream}

    def _as_returned(self, operation: ops.Operation) -> Observation:
        """The reference's observation, its mask shaped as a cache returns one."""
        seen = self.reference.last
        if seen.mask is None:
            return seen
        holding = self.driver.ledger.holdings[operation.cache]
        return Observation(mask=row_axis(seen.mask, holding.batched), keys=seen.keys, values=seen.values)

    def _keep(self, prefix: str, seen: Observation) -> None:
        arrays = {"keys": seen.keys, "values": seen.values, "mask": seen.mask}
        self.arrays |= {
            f"{prefix}.{name}": np.ascontiguousarray(x)
            for name, x in arrays.items()
            if x is not None and not isinstance(x, str)
        }

    def golden(self, path: Path, situation: Situation, source: dict[str, str]) -> Golden:
        """What was recorded, to be filed."""
        deviation: dict[str, str] = {}
        if isinstance(situation, Deviation):
            if self.found is None:
                raise RecordError("breaks no law, so it is no deviation")
            if self.found.observable != self.about:
                raise RecordError(f"is not about {self.about}: {self.found.sentence()}")
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


def record_situation(situation: Situation, path: Path, upstream: Adapter, source: dict[str, str]) -> Golden:
    """What upstream does in a situation. Raises RecordError when it is not what the situation says."""
    about = situation.about if isinstance(situation, Deviation) else None
    recorder = Recorder(situation.config, upstream, Tagged(), about)
    try:
        for operation in situation.operations:
            recorder.step(operation)
        return recorder.golden(path, situation, source)
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


def record(directory: Path, only: str | None = None, say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Record the situations, deviations and serving sessions under a directory; `only` those whose path holds this text.

    Returns the paths written. Raises RecordError for the first that cannot be filed, and AdapterError without mlx-lm.
    """
    written = []
    for golden in record_all(directory, lambda path: only is None or only in path):
        golden.path.parent.mkdir(parents=True, exist_ok=True)
        save_golden(golden)
        written.append(golden.path)
        say(f"recorded {golden.path}")
    return written


def record_all(directory: Path, wanted: Callable[[str], bool]) -> Iterator[Golden]:
    """The goldens whose path below the directory, without its ending, is wanted."""
    from conformance.sessions import SESSIONS, record_session

    upstream = make_adapter("mlx_lm")
    source = upstream_source()
    for place, situations in (
        (label(source), SITUATIONS),
        ("deviations", DEVIATIONS),
    ):
        yield from _record_situations(directory, place, situations, wanted, upstream, source)
    for session in SESSIONS:
        place = f"{label(source)}/sessions/{session.path}"
        if wanted(place):
            yield from record_session(session, directory / place, source)


def _record_situations(
    directory: Path,
    place: str,
    situations: Sequence[Situation],
    wanted: Callable[[str], bool],
    upstream: Adapter,
    source: dict[str, str],
) -> Iterator[Golden]:
    for situation in situations:
        path = f"{place}/{situation.path}"
        if wanted(path):
            yield record_situation(situation, directory / f"{path}.json", upstream, source)
