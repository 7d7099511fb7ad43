"""Plays back what was recorded, as an adapter: so a golden is compared like any implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from conformance import operations as ops
from conformance.adapters.base import AdapterError, Inputs, Observation, Parts
from conformance.golden_form import FETCHED, PARTS, Form, forms
from conformance.payload import Config, Storage
from conformance.trace import Trace
from reference.quantize import Quantized, dequantize


class GoldenAdapter:
    """Answers the steps of one golden, in order. It can answer nothing that was not recorded."""

    name = "golden"

    def __init__(self, trace: Trace, arrays: Mapping[str, Storage]) -> None:
        self.version = " ".join(trace.source.get(key, "") for key in ("name", "version")).strip()
        self.trace = trace
        self.arrays = arrays
        self.forms = forms(trace)
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
        return self._observation(str(number), checks, self.forms[number - 1], inputs)

    def _observation(self, prefix: str, checks: Mapping[str, Any], form: Form, inputs: Inputs) -> Observation:
        mask = checks.get("mask")
        seen = Observation(
            rows=len(checks["rows"]),
            offsets=tuple(checks.get("offsets", ())),
            size=checks.get("size"),
            empty=checks.get("empty"),
            trimmable=checks.get("trimmable"),
            result=checks.get("result"),
            mask=self.arrays[f"{prefix}.mask"] if mask == "array" else mask,
            front=checks.get("front"),
        )
        if isinstance(form, tuple):
            of_each = inputs.children or (inputs,) * len(form)
            each = enumerate(zip(checks["children"], form, of_each, strict=True))
            children = (self._observation(f"{prefix}.{i}", *child) for i, child in each)
            return replace(seen, rows=None, children=tuple(children))
        if "states" in checks:
            slots = enumerate(checks["states"])
            states = tuple(None if state is None else self.arrays[f"{prefix}.slot.{i}"] for i, state in slots)
            return replace(seen, states=states)
        if "width" not in checks:
            return seen
        seen = replace(seen, dtypes=(inputs.dtype, inputs.dtype))
        if form == "quantized":
            fetches = [self._fetch(f"{prefix}.{what}") for what in FETCHED]
            (keys, key_parts), (values, value_parts) = fetches
            return replace(seen, keys=keys, values=values, parts=(key_parts, value_parts))
        return replace(seen, keys=self.arrays[f"{prefix}.keys"], values=self.arrays[f"{prefix}.values"])

    def _fetch(self, name: str) -> tuple[Storage, Parts]:
        """Quantized keys or values, and what they stand for: words and groups say how many bits there are."""
        words, scales, biases = (self.arrays[f"{name}.{part}"] for part in PARTS)
        dim = self.trace.config.key_dim if name.endswith("keys") else self.trace.config.value_dim
        group_size, bits = dim // scales.shape[-1], words.shape[-1] * 32 // dim
        return dequantize(Quantized(words, scales, biases), group_size, bits), (words, scales, biases)

    def slots(self, cache: str) -> str:
        return "(recorded: no slots)"
