"""The verb `lint`: checks every file under `goldens/` against the format, without any implementation.

A golden must conform to `trace.schema.json` and read; its checks must be what its arrays show, and lawful by the
ledger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.adapters.base import AdapterError
from conformance.driver import Divergence
from conformance.file_goldens import file_faults, find_file_goldens
from conformance.goldens import Golden, check_golden, find_goldens, load_golden
from conformance.schema import faults as schema_faults
from conformance.trace import TraceError, as_text

SIZE_LIMIT = 8_000_000
FLAG_KINDS = ("BASIC", "EDGE_CASE", "REFUSAL", "DEVIATION")
RECORDED_SOURCE = ("version", "mlx", "device", "sha256 of models/cache.py", "sha256 of models/base.py")
"""What the source of a recording names, beside its name."""
BESIDE = ("README.md", "flags.json", "trace.schema.json")


@dataclass
class Linter:
    """One look at a directory of goldens."""

    directory: Path
    flags: dict[str, Any] = field(default_factory=dict)
    schema: dict[str, Any] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def faults(self) -> Iterator[str]:
        """Every fault as one line that begins with the path."""
        for name in ("flags.json", "trace.schema.json"):
            try:
                data = json.loads((self.directory / name).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                yield f"{name}: cannot be read ({error})"
                return
            self.flags, self.schema = (data, self.schema) if name == "flags.json" else (self.flags, data)
        yield from self._flag_faults()
        for path in find_goldens(self.directory):
            for fault in self._golden_faults(path):
                # A TraceError names the path already.
                yield f"{path.relative_to(self.directory)}: {fault.removeprefix(f'{path}: ')}"
        for path in find_file_goldens(self.directory):
            for fault in file_faults(path):
                yield f"{path.relative_to(self.directory)}: {fault.removeprefix(f'{path}: ')}"
        for name in sorted(self.flags.keys() - self.used):
            yield f"flags.json: no golden has the flag {name}"
        yield from self._file_faults()

    def _flag_faults(self) -> Iterator[str]:
        for name, flag in self.flags.items():
            if not isinstance(flag, dict) or flag.keys() != {"kind", "description"}:
                yield f"flags.json: {name} should have a kind and a description"
            elif flag["kind"] not in FLAG_KINDS:
                yield f"flags.json: {name} is of kind {flag['kind']!r}, but should be of {', '.join(FLAG_KINDS)}"

    def _golden_faults(self, path: Path) -> Iterator[str]:
        try:
            golden = load_golden(path)
            data = json.loads(path.read_text(encoding="utf-8"))
        except TraceError as error:
            yield str(error)
            return
        yield from schema_faults(data, self.schema)
        trace = golden.trace
        self.used |= set(trace.flags)
        for flag in trace.flags:
            if flag not in self.flags:
                yield f"the flag {flag} is not declared in flags.json"
        if len(set(trace.flags)) < len(trace.flags):
            yield "a flag is named twice"
        if golden.recorded:
            yield from self._recording_faults(golden)
        try:
            check_golden(golden, [] if golden.recorded else _reference())
        except Divergence as divergence:
            yield f"breaks a law: {divergence}"
        except (TraceError, AdapterError) as error:
            yield str(error)

    def _recording_faults(self, golden: Golden) -> Iterator[str]:
        trace = golden.trace
        for name in RECORDED_SOURCE:
            if not trace.source.get(name):
                yield f"source does not say {name}"
        if golden.path.read_text(encoding="utf-8") != as_text(trace):
            yield "was not written by the recorder: record it again"
        of_deviations = "deviations" in golden.path.relative_to(self.directory).parts
        signs = (bool(trace.deviation), "Deviation" in trace.flags, "upstream" in trace.steps[-1].checks)
        if set(signs) != {of_deviations}:
            yield "`deviation`, the flag Deviation, `upstream` at the last step and the directory do not go together"

    def _file_faults(self) -> Iterator[str]:
        files = sorted(path for path in self.directory.rglob("*") if path.is_file())
        for path in files:
            name = path.relative_to(self.directory)
            if path.suffix == ".safetensors" and not path.with_suffix(".json").is_file():
                yield f"{name}: no trace lies beside it"
            elif path.suffix not in (".json", ".safetensors") and str(name) not in BESIDE:
                yield f"{name}: is no file of a golden"
        size = sum(path.stat().st_size for path in files)
        if size > SIZE_LIMIT:
            yield f"{self.directory.name}: {size} bytes, but should be {SIZE_LIMIT} at most"


def _reference() -> list[Any]:
    from conformance.adapters.reference import ReferenceAdapter

    return [ReferenceAdapter()]


def lint(directory: Path, say: Callable[[str], None] = print) -> int:
    """Say every fault, and return how many there are."""
    number = 0
    for fault in Linter(directory).faults():
        say(fault)
        number += 1
    return number


def main(directory: Path) -> int:
    """The verb; returns the exit code."""
    number = lint(directory)
    count = len(find_goldens(directory))
    print(f"{'failed' if number else 'passed'}: {count} goldens, {number} faults")
    return 1 if number else 0
