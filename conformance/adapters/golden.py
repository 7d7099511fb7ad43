"""Plays back what was recorded, as an adapter: so a golden is compared like any implementation."""

from __future__ import annotations

from collections.abc import Mapping

from conformance import operations as ops
from conformance.adapters.base import AdapterError, Inputs, Observation
from conformance.payload import Config, Storage
from conformance.trace import Trace


class GoldenAdapter:
    """Answers the steps of one golden, in order. It can answer nothing that was not recorded."""

    name = "golden"

    def __init__(self, trace: Trace, arrays: Mapping[str, Storage]) -> None:
        self.version = " ".join(trace.source.get(key, "") for key in ("name", "version")).strip()
        self.trace = trace
        self.arrays = arrays
        self.next = 0

    def begin(self, config: Config) -> None:
        self.next = 0

    def step(self, operation: ops.Operation, inputs: Inputs) -> Observation:
        if self.next == len(self.trace.steps):
            raise AdapterError(f"the golden ends after step {self.next}, so it cannot answer {ops.call(operation)}")
        recorded = self.trace.steps[self.next]
        self.next += 1
        if operation != recorded.operation:
            raise AdapterError(
                f"step {self.next} of the golden is {ops.call(recorded.operation)}, not {ops.call(operation)}"
            )
        checks, number = recorded.checks, self.next
        if checks.get("refused"):
            return Observation(refused="as recorded")
        mask = checks.get("mask")
        fetched = "width" in checks
        return Observation(
            rows=len(checks["rows"]),
            offsets=tuple(checks["offsets"]),
            size=checks["size"],
            empty=checks.get("empty"),
            trimmable=checks.get("trimmable"),
            result=checks.get("result"),
            mask=self.arrays[f"{number}.mask"] if mask == "array" else mask,
            keys=self.arrays[f"{number}.keys"] if fetched else None,
            values=self.arrays[f"{number}.values"] if fetched else None,
            dtypes=(inputs.dtype, inputs.dtype) if fetched else None,
        )

    def slots(self, cache: str) -> str:
        return "(recorded: no slots)"
