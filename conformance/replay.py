"""The verb `replay`: run one trace file step by step and show what is seen, up to the first divergence."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from conformance import operations as ops
from conformance.adapters.registry import make_adapter
from conformance.driver import Divergence, Driver
from conformance.goldens import load_golden
from conformance.observed import checks_of
from conformance.payload import Tagged
from conformance.report import report, to_json
from conformance.trace import Step, load

SAID = ("rows", "offsets", "size", "result", "visible")
"""Checks that hold for any implementation. A mask's form and a width are layout, which a run of goldens compares."""


def unmet(step: Step, shown: dict[str, Any]) -> str | None:
    """What the file says of a step that is not what was seen."""
    refused = bool(shown.get("refused"))
    if step.valid is not None and step.valid == refused:
        return f"valid is {step.valid}, but the call was {'refused' if refused else 'done'}"
    for name in SAID:
        if name in step.checks and not refused and step.checks[name] != shown.get(name):
            return f"checks say {name} {step.checks[name]!r}, but it was {shown.get(name)!r}"
    return None


def main(arguments: Any) -> int:
    """The verb; 0 when all agree, 1 at a divergence."""
    path: Path = arguments.trace
    trace = load(path)
    adapters = [make_adapter("reference"), make_adapter(arguments.impl)]
    recorded = path.with_suffix(".safetensors").exists()
    payload = load_golden(path).payload() if recorded else Tagged()
    driver = Driver(adapters, trace.config, payload=payload)
    steps = []
    try:
        for number, step in enumerate(trace.steps, 1):
            seen = driver.step(step.operation)[1]
            if fault := unmet(step, checks_of(driver, step.operation, seen)):
                print(f"{path}: step {number} [{ops.call(step.operation)}]: {fault}", file=sys.stderr)
                return 1
            outcome = f"refused: {seen.refused}" if seen.refused else f"offsets {list(seen.offsets)}"
            steps.append({"step": number, "call": ops.call(step.operation), "outcome": outcome})
            if not arguments.json:
                print(f"{number:>3}  {ops.call(step.operation)}\n     {outcome}")
    except Divergence as divergence:
        found = divergence.found
        if arguments.json:
            print(json.dumps({"passed": False, "divergence": to_json(found, trace, path)}, indent=1))
        else:
            print(report(found, trace, path, adapters))
        return 1
    except (KeyError, StopIteration, ValueError) as error:
        print(f"{path}: step {len(steps) + 1} does not fit the caches and rows there are: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"passed": True, "steps": steps}, indent=1))
    else:
        print(f"passed: {len(steps)} steps, {arguments.impl} agrees with the reference and the ledger")
    return 0
