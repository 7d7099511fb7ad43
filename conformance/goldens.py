"""Goldens: traces with what was recorded, each beside a file of arrays; NumPy and safetensors suffice to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.numpy

from conformance import operations as ops
from conformance.adapters.base import Adapter
from conformance.adapters.golden import GoldenAdapter
from conformance.driver import Driver, Found
from conformance.observed import checks_of
from conformance.payload import Config, Storage
from conformance.recorded import RecordedPayload
from conformance.trace import Step, Trace, TraceError, load, save

EXTRAS = ("upstream", "aliased", "empty", "trimmable")
"""Checks that only a deviation has, at its last step."""


@dataclass(frozen=True)
class Golden:
    """A trace and its arrays."""

    path: Path
    trace: Trace
    arrays: dict[str, Storage]

    @property
    def recorded(self) -> bool:
        """Whether anything was recorded: a trace without checks is operations alone."""
        return any(step.checks for step in self.trace.steps)

    def payload(self) -> RecordedPayload:
        """What feeds the recorded inputs again. One for each run, since it learns as it feeds."""
        inputs = {
            number: (self.arrays[f"{number}.input.keys"], self.arrays[f"{number}.input.values"])
            for number, step in enumerate(self.trace.steps, 1)
            if f"{number}.input.keys" in array_names(number, step)
        }
        return RecordedPayload(inputs)

    def adapter(self) -> GoldenAdapter:
        """What answers as recorded."""
        return GoldenAdapter(self.trace, self.arrays)


def find_goldens(directory: Path) -> list[Path]:
    """The paths of the goldens under a directory, in order."""
    names = ("flags.json", "trace.schema.json")
    return sorted(path for path in directory.rglob("*.json") if path.name not in names)


def load_goldens(directory: Path) -> Iterator[Golden]:
    """The goldens under a directory, in order of their paths. Raises TraceError for one that cannot be read."""
    return map(load_golden, find_goldens(directory))


def load_golden(path: Path) -> Golden:
    """Read one golden. Raises TraceError that names the path and the reason."""
    trace = load(path)
    sidecar = path.with_suffix(".safetensors")
    arrays: dict[str, Storage] = {}
    plain = not any(step.checks for step in trace.steps)
    needed = [name for number, step in enumerate(trace.steps, 1) for name in array_names(number, step) if not plain]
    if needed and not sidecar.is_file():
        raise TraceError(f"{path}: the arrays beside it, {sidecar.name}, are missing")
    if sidecar.is_file():
        try:
            arrays = safetensors.numpy.load_file(sidecar)
        except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
            raise TraceError(f"{path}: {sidecar.name} cannot be read ({error})") from error
    golden = Golden(path, trace, arrays)
    fault = _fault(golden, needed)
    if fault:
        raise TraceError(f"{path}: {fault}")
    return golden


def save_golden(golden: Golden) -> None:
    """Write a golden's two files; the same golden gives the same bytes."""
    save(golden.trace, golden.path)
    sidecar = golden.path.with_suffix(".safetensors")
    if golden.arrays:
        sidecar.write_bytes(safetensors.numpy.save(golden.arrays))
    else:
        sidecar.unlink(missing_ok=True)


def array_names(number: int, step: Step) -> list[str]:
    """The arrays that a step has, by its operation and checks."""
    names = []
    if isinstance(step.operation, ops.Update) and step.operation.tokens > 0:
        names += [f"{number}.input.keys", f"{number}.input.values"]
    upstream = step.checks.get("upstream")
    for prefix, checks in (
        (str(number), step.checks),
        (f"{number}.upstream", upstream if isinstance(upstream, dict) else {}),
    ):
        if "width" in checks:
            names += [f"{prefix}.keys", f"{prefix}.values"]
        if checks.get("mask") == "array":
            names.append(f"{prefix}.mask")
    return names


def _fault(golden: Golden, needed: Sequence[str]) -> str | None:
    """What is wrong with a golden as such, before anything is run."""
    if missing := sorted(set(needed) - golden.arrays.keys()):
        return f"the array {missing[0]} is missing beside it"
    if unknown := sorted(golden.arrays.keys() - set(needed)):
        return f"no step has the array {unknown[0]} that lies beside it"
    if not golden.trace.steps:
        return "it has no steps"
    if not golden.recorded:
        return None
    for number, step in enumerate(golden.trace.steps, 1):
        if not step.checks:
            return f"step {number} has no checks"
        if step.checks.get("step") != number:
            return f"declared step {step.checks.get('step')}, found {number}"
        fault = _checks_fault(step) or _arrays_fault(golden, number, step)
        if fault:
            return f"step {number}: {fault}"
    return None


def _checks_fault(step: Step) -> str | None:
    checks = step.checks
    refused = checks.get("refused", False)
    if refused is not (step.valid is False):
        return f"valid is {step.valid}, but refused is {refused}"
    if refused:
        return None
    update = isinstance(step.operation, ops.Update)
    kinds: dict[str, type] = {"rows": list, "offsets": list, "size": int}
    if update:
        kinds |= {"width": int, "visible": dict}
    if update or isinstance(step.operation, ops.Mask):
        kinds["mask"] = str
    for name, kind in kinds.items():
        if not isinstance(checks.get(name), kind):
            return f"{name} is {checks.get(name)!r}, but should be a {kind.__name__}"
    return None


def _arrays_fault(golden: Golden, number: int, step: Step) -> str | None:
    if not isinstance(step.operation, ops.Update) or step.operation.tokens < 1:
        return None
    config = golden.trace.config.variant(step.operation.variant)
    shapes = [("input.", step.operation.tokens)]
    if "width" in step.checks:
        shapes.append(("", step.checks["width"]))
    for part, width in shapes:
        for what, dim in (("keys", config.key_dim), ("values", config.value_dim)):
            x = golden.arrays[f"{number}.{part}{what}"]
            if x.shape[1:] != (config.heads, width, dim) or x.dtype.name != stored_as(config):
                should = f"(rows, {config.heads}, {width}, {dim}) of {stored_as(config)}"
                return f"the array {number}.{part}{what} is {x.shape} of {x.dtype}, but should be {should}"
    return None


def stored_as(config: Config) -> str:
    """The dtype of the arrays in the file: bfloat16 is stored as the uint16 of its bits."""
    return "uint16" if config.dtype == "bfloat16" else config.dtype


def check_golden(
    golden: Golden | Path,
    adapters: Sequence[Adapter],
    passes: Callable[[Found], bool] = lambda found: False,
) -> None:
    """Run a golden on these adapters, and hold them and the golden itself against the ledger and the first adapter.

    A deviation is run for its lawful values. `passes` says which findings on `size`, `empty`, `trimmable` and aliasing
    are let go. A trace without checks, as a regression is, runs with derived arrays and is compared with no recording.

    Raises the Divergence that is found first, and TraceError when the file cannot be read or when its checks are not
    what its arrays show.
    """
    if isinstance(golden, Path):
        golden = load_golden(golden)
    trace = golden.trace
    if golden.recorded:
        driver = Driver([*adapters, golden.adapter()], trace.config, passes, golden.payload())
    else:
        driver = Driver(adapters, trace.config, passes)
    for number, step in enumerate(trace.steps, 1):
        try:
            seen = driver.step(step.operation)
        except TraceError as error:
            raise TraceError(f"{golden.path}: {error}") from error
        except (KeyError, StopIteration) as error:
            raise TraceError(f"{golden.path}: step {number} names a cache or row that is not there") from error
        if not golden.recorded:
            continue
        shown = checks_of(driver, step.operation, seen[-1])
        declared = {name: value for name, value in step.checks.items() if name not in EXTRAS}
        if fault := _disagreement(declared, shown):
            raise TraceError(f"{golden.path}: step {number}: {fault}")


def _disagreement(declared: dict[str, Any], shown: dict[str, Any]) -> str | None:
    for name in [*shown, *declared]:
        if declared.get(name) != shown.get(name):
            return f"checks say {name} {declared.get(name)!r}, but its arrays and the histories {shown.get(name)!r}"
    return None
