"""Goldens: traces with what was recorded, each beside a file of arrays; NumPy and safetensors suffice to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from conformance.adapters.base import Adapter
from conformance.adapters.golden import GoldenAdapter
from conformance.driver import Driver, Found
from conformance.file_goldens import FOLDER
from conformance.golden_form import array_names, arrays_fault, is_recorded, trace_fault
from conformance.observed import checks_of
from conformance.payload import Storage
from conformance.recorded import RecordedPayload, TwoLevelRecorded
from conformance.trace import Trace, TraceError, load, save

EXTRAS = ("upstream", "aliased", "unanswered", "empty", "trimmable")
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
        return is_recorded(self.trace)

    def payload(self) -> RecordedPayload:
        """What feeds the recorded inputs again. One for each run, since it learns as it feeds."""
        return TwoLevelRecorded(self.arrays) if self.trace.config.two_level else RecordedPayload(self.arrays)

    def adapter(self) -> GoldenAdapter:
        """What answers as recorded."""
        return GoldenAdapter(self.trace, self.arrays)


def find_goldens(directory: Path) -> list[Path]:
    """The paths of the traces under a directory, in order; what lies beside recorded files is none."""
    names = ("flags.json", "trace.schema.json")
    paths = (path for path in directory.rglob("*.json") if path.name not in names)
    return sorted(path for path in paths if path.relative_to(directory).parts[0] != FOLDER)


def load_goldens(directory: Path) -> Iterator[Golden]:
    """The goldens under a directory, in order of their paths. Raises TraceError for one that cannot be read."""
    return map(load_golden, find_goldens(directory))


def load_golden(path: Path) -> Golden:
    """Read one golden. Raises TraceError that names the path and the reason."""
    trace = load(path)
    if fault := trace_fault(trace):
        raise TraceError(f"{path}: {fault}")
    sidecar = path.with_suffix(".safetensors")
    needed = array_names(trace)
    arrays: dict[str, Storage] = {}
    if needed and not sidecar.is_file():
        raise TraceError(f"{path}: the arrays beside it, {sidecar.name}, are missing")
    if sidecar.is_file():
        try:
            arrays = safetensors.numpy.load_file(sidecar)
        except (OSError, safetensors.SafetensorError, ValueError, KeyError) as error:
            raise TraceError(f"{path}: {sidecar.name} cannot be read ({error})") from error
    if fault := arrays_fault(trace, needed, arrays):
        raise TraceError(f"{path}: {fault}")
    return Golden(path, trace, arrays)


def save_golden(golden: Golden) -> None:
    """Write a golden's two files; the same golden gives the same bytes."""
    save(golden.trace, golden.path)
    sidecar = golden.path.with_suffix(".safetensors")
    if golden.arrays:
        # safetensors writes memory as it lies, so arrays that are views of others have to be copied first.
        arrays = {name: np.ascontiguousarray(x) for name, x in golden.arrays.items()}
        sidecar.write_bytes(safetensors.numpy.save(arrays))
    else:
        sidecar.unlink(missing_ok=True)


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
        except ValueError as error:
            raise TraceError(
                f"{golden.path}: step {number} names more rows or fewer than there are ({error})"
            ) from error
        if not golden.recorded:
            if step.valid is not None and step.valid == (seen[0].refused is not None):
                raise TraceError(f"{golden.path}: step {number}: valid is {step.valid}, but the laws say otherwise")
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
