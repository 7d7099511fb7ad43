"""A trace: a configuration, and steps that are operations or checks, as one readable JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from conformance.operations import Operation, from_dict, to_dict
from conformance.payload import Config

FORMAT = 1


class TraceError(ValueError):
    """A trace file that cannot be read: it names the file and what is wrong."""


@dataclass(frozen=True)
class Step:
    """One operation, and what must be seen after it."""

    operation: Operation
    valid: bool | None = None
    """Whether it must be done (True) or refused (False); None: the ledger says."""
    checks: dict[str, Any] = field(default_factory=dict)
    """Observables by name, as `goldens/README.md` lists them."""


@dataclass(frozen=True)
class Trace:
    """What is run: every source of operations yields one of these."""

    config: Config
    steps: tuple[Step, ...]
    description: str = ""
    source: dict[str, str] = field(default_factory=lambda: {"name": "hand"})
    flags: tuple[str, ...] = ()
    deviation: dict[str, str] = field(default_factory=dict)
    """Where upstream breaks a law at the last step: what it `does`, what is `right`, and the finding's `signature`."""

    def to_dict(self) -> dict[str, Any]:
        """The trace as JSON data."""
        steps: list[dict[str, Any]] = []
        for step in self.steps:
            data = to_dict(step.operation)
            if step.valid is not None:
                data["valid"] = step.valid
            steps.append(data)
            if step.checks:
                steps.append({"checks": step.checks})
        data = {
            "format": FORMAT,
            "description": self.description,
            "source": self.source,
            "flags": list(self.flags),
            "config": {name: value for name, value in asdict(self.config).items() if name != "two_level" or value},
        }
        if self.deviation:
            data["deviation"] = self.deviation
        return {**data, "steps": steps}


def save(trace: Trace, path: Path) -> None:
    """Write the trace."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(trace), encoding="utf-8")


def as_text(trace: Trace) -> str:
    """The trace as JSON, one step a line."""
    data = trace.to_dict()
    steps = data.pop("steps")
    head = json.dumps(data, indent=2)[:-2]
    lines = ",\n    ".join(json.dumps(step) for step in steps)
    return f'{head},\n  "steps": [\n    {lines}\n  ]\n}}\n'


def load(path: Path) -> Trace:
    """Read a trace. Raises TraceError that names the path and the reason."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise TraceError(f"{path}: no complete JSON file ({error})") from error
    try:
        return parse(data)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from error


def parse(data: Any) -> Trace:
    """The trace of JSON data. Raises ValueError that says what is wrong."""
    if not isinstance(data, dict):
        raise ValueError("a trace is a JSON object")
    if data.get("format") != FORMAT:
        raise ValueError(f"format is {data.get('format')!r}, but this reader knows format {FORMAT}")
    for name, cls in (("steps", list), ("config", dict), ("source", dict), ("flags", list)):
        if not isinstance(data.get(name), cls):
            raise ValueError(f"{name} is missing or no {'list' if cls is list else 'object'}")
    deviation = data.get("deviation", {})
    if not isinstance(deviation, dict):
        raise ValueError("deviation is no object")
    known = {f.name for f in fields(Config)}
    if unknown := sorted(data["config"].keys() - known):
        raise ValueError(f"config has no field {', '.join(unknown)}")
    try:
        config = Config(**data["config"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"config: {error}") from error
    return Trace(
        config=config,
        steps=_steps(data["steps"]),
        description=str(data.get("description", "")),
        source={str(k): str(v) for k, v in data["source"].items()},
        flags=tuple(str(flag) for flag in data["flags"]),
        deviation={str(k): str(v) for k, v in deviation.items()},
    )


def _steps(data: list[Any]) -> tuple[Step, ...]:
    steps: list[Step] = []
    for item in data:
        number = len(steps) + 1
        if not isinstance(item, dict):
            raise ValueError(f"step {number} is no object")
        if "checks" in item:
            if set(item) != {"checks"}:
                raise ValueError(f"step {number}: checks stand alone, but with them stands {sorted(item)}")
            if not steps or steps[-1].checks or not isinstance(item["checks"], dict):
                raise ValueError(f"step {number}: checks must be an object that follows an operation")
            steps[-1] = Step(steps[-1].operation, steps[-1].valid, item["checks"])
            continue
        valid = item.pop("valid", None)
        if valid is not None and not isinstance(valid, bool):
            raise ValueError(f"step {number}: valid is {valid!r}, but should be true or false")
        try:
            steps.append(Step(from_dict(item), valid))
        except ValueError as error:
            raise ValueError(f"step {number}: {error}") from error
    return tuple(steps)
