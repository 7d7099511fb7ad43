"""A divergence for someone who has never seen the test: what was done, got and should be, the slots, how to replay."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from conformance import operations as ops
from conformance.adapters.base import Adapter
from conformance.driver import Divergence, Driver, Found
from conformance.trace import Trace, save


def file_name(found: Found) -> str:
    """A name for the trace of this finding, the same each time it is found."""
    digest = hashlib.sha256(found.signature.encode()).hexdigest()[:6]
    observable = found.observable.replace(" ", "-")
    return f"{found.adapter}-{found.kind}-{found.operation.op}-{observable}-{digest}.json"


def write_trace(found: Found, trace: Trace, directory: Path) -> Path:
    """Save the trace where a replay finds it."""
    path = directory / file_name(found)
    save(trace, path)
    return path


def replay_line(path: Path, implementation: str) -> str:
    """The command that shows the divergence again."""
    option = "" if implementation == "mlximpl" else f" --impl {implementation}"
    return f"python -m conformance replay{option} {_short(path)}"


def _short(path: Path) -> str:
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def headline(found: Found, steps: int) -> str:
    """`DIVERGENCE visible[b] at step 6 of 8   mlximpl vs reference`."""
    what = f"DIVERGENCE {found.difference.observable} at step {found.step} of {steps}"
    return f"{what:<58} {found.adapter}  vs  {found.against}"


def report(found: Found, trace: Trace, path: Path, adapters: Sequence[Adapter]) -> str:
    """The whole report. The trace is run again to see the slots before and after its last step."""
    difference = found.difference
    lines = [
        headline(found, len(trace.steps)),
        f"  cache   {found.kind}" + (f" ({', '.join(found.situation)})" if found.situation else ""),
        f"  after   {ops.call(found.operation)}",
        f"  got     {difference.got}",
        f"  should  {difference.should}" + (f"    ({difference.note})" if difference.note else ""),
    ]
    for adapter, before, after in _slots(found, trace, adapters):
        lines += _aligned(f"  before  {adapter:<10}", before) + _aligned(f"  after   {adapter:<10}", after)
    lines += ["  steps"] + [f"    {i}  {ops.call(s.operation)}" for i, s in enumerate(trace.steps, 1)]
    lines += [f"  trace   {_short(path)}", f"  replay  {replay_line(path, found.adapter)}"]
    return "\n".join(lines)


def _aligned(label: str, table: str) -> list[str]:
    rows = table.splitlines()
    return [f"{label} {rows[0]}", *(f"{' ' * len(label)} {row}" for row in rows[1:])]


def _slots(found: Found, trace: Trace, adapters: Sequence[Adapter]) -> list[tuple[str, str, str]]:
    driver = Driver(adapters, trace.config, passes=lambda _: True)
    cache = found.operation.cache
    for step in trace.steps[: found.step - 1]:
        driver.step(step.operation)
    before = [adapter.slots(cache) for adapter in adapters]
    with suppress(Divergence):
        driver.step(found.operation)
    after = [adapter.slots(cache) for adapter in adapters]
    return [(adapter.name, *pair) for adapter, *pair in zip(adapters, before, after, strict=True)]  # type: ignore[misc]


def to_json(found: Found, trace: Trace, path: Path) -> dict[str, Any]:
    """The finding as data."""
    return {
        "signature": found.signature,
        "adapter": found.adapter,
        "against": found.against,
        "step": found.step,
        "steps": len(trace.steps),
        "call": ops.call(found.operation),
        "observable": found.difference.observable,
        "got": found.difference.got,
        "should": found.difference.should,
        "trace": _short(path),
        "replay": replay_line(path, found.adapter),
    }
