"""Expected failures of an implementation: a strict list, with a reason for each.

A line reads

    NAME  PATTERN  # reason

The pattern (as of a shell) is matched with a finding's signature, `kind/operation/observable/situation`. The name is
that of a deviation: `goldens/deviations/NAME-*.json` must still diverge, or the line has to go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from conformance.adapters.base import Adapter
from conformance.shrink import find
from conformance.trace import TraceError, load


@dataclass(frozen=True)
class Expectation:
    """One line of the list."""

    name: str
    pattern: str
    reason: str


def read(path: Path) -> list[Expectation]:
    """The list. Raises TraceError that names the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: no text in UTF-8 ({error.reason})") from error
    expectations = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        entry, _, reason = line.partition("#")
        name, _, pattern = entry.strip().partition(" ")
        if not pattern.strip() or not reason.strip():
            raise TraceError(f"{path}: line {number} should read NAME PATTERN # reason, but is {line!r}")
        expectations.append(Expectation(name, pattern.strip(), reason.strip()))
    return expectations


def match(signature: str, expectations: Sequence[Expectation]) -> Expectation | None:
    """The line that a finding is expected by."""
    return next((e for e in expectations if fnmatchcase(signature, e.pattern)), None)


def _among(lines: Sequence[Expectation]) -> Callable[[str], bool]:
    return lambda signature: match(signature, lines) is not None


def no_longer_failing(expectations: Sequence[Expectation], deviations: Path, adapters: Sequence[Adapter]) -> list[str]:
    """What is wrong with the list: names whose recorded deviation no longer shows, or that have none."""
    faults = []
    for name in dict.fromkeys(e.name for e in expectations):
        paths = sorted(deviations.glob(f"{name}-*.json"))
        if not paths:
            faults.append(f"{name}: no trace {name}-*.json under {deviations}")
        among = _among([e for e in expectations if e.name == name])
        for path in paths:
            found = find(load(path), adapters, among)
            if found is None:
                faults.append(f"{name}: {path.name} no longer fails; take its lines off the list")
    return faults
