"""What a golden must look like before anything is run: its checks, and the arrays that they speak of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conformance import operations as ops
from conformance.payload import Config, Storage
from conformance.trace import Step, Trace


def is_recorded(trace: Trace) -> bool:
    """Whether the trace holds anything that was recorded."""
    return any(step.checks for step in trace.steps)


Form = str | int | tuple["Form", ...]
"""What a cache's arrays are: `"plain"` or `"quantized"` keys and values, a number of slots, or the forms of a list."""

FETCHED = ("keys", "values")
PARTS = ("words", "scales", "biases")


def forms(trace: Trace) -> list[Form]:
    """The form of the cache that each step acts on or makes."""
    found: list[Form] = []
    known: dict[str, Form] = {}
    for step in trace.steps:
        operation = step.operation
        match operation:
            case ops.New():
                form = _form(operation)
            case ops.Merge(caches=caches):
                form = known.get(caches[0], "plain") if caches else "plain"
            case ops.ToQuantized():
                form = "quantized"
            case _:
                form = known.get(operation.cache, "plain")
        known[getattr(operation, "into", operation.cache)] = form
        found.append(form)
    return found


def _form(made: ops.New | ops.Child) -> Form:
    if made.kind == "CacheList":
        return tuple(_form(child) for child in made.children)
    if made.kind == "ArraysCache":
        return made.slots or 0
    return "quantized" if made.kind == "QuantizedKVCache" else "plain"


def array_names(trace: Trace) -> list[str]:
    """The arrays that lie beside a recorded trace, named by the number of their step."""
    if not is_recorded(trace):
        return []
    pairs = enumerate(zip(trace.steps, forms(trace), strict=True), 1)
    return [name for number, (step, form) in pairs for name in _of_step(number, step, form)]


def _of_step(number: int, step: Step, form: Form) -> list[str]:
    names = []
    if isinstance(step.operation, ops.Update) and step.operation.tokens > 0:
        names += _inputs(str(number), step.operation, form)
    upstream = step.checks.get("upstream")
    names += _outputs(str(number), step.checks, form)
    return names + _outputs(f"{number}.upstream", upstream if isinstance(upstream, dict) else {}, form)


def _inputs(prefix: str, operation: ops.Update, form: Form) -> list[str]:
    if isinstance(form, tuple):
        return [name for i, child in enumerate(form) for name in _inputs(f"{prefix}.{i}", operation, child)]
    if isinstance(form, int):
        return [f"{prefix}.input.slot.{i}" for i in range(form) if operation.slot in (None, i)]
    return [f"{prefix}.input.{what}" for what in FETCHED]


def _outputs(prefix: str, checks: Mapping[str, Any], form: Form) -> list[str]:
    names = [f"{prefix}.mask"] if checks.get("mask") == "array" else []
    if "width" in checks:
        parts = [f".{part}" for part in PARTS] if form == "quantized" else [""]
        names += [f"{prefix}.{what}{part}" for what in FETCHED for part in parts]
    names += [f"{prefix}.slot.{i}" for i, state in enumerate(checks.get("states", ())) if state is not None]
    if isinstance(form, tuple):
        for i, (child, its) in enumerate(zip(checks.get("children", ()), form, strict=False)):
            names += _outputs(f"{prefix}.{i}", child, its)
    return names


def trace_fault(trace: Trace) -> str | None:
    """What is wrong with the trace itself."""
    if not trace.steps:
        return "it has no steps"
    if not is_recorded(trace):
        return None
    for number, step in enumerate(trace.steps, 1):
        if not step.checks:
            return f"step {number} has no checks"
        if step.checks.get("step") != number:
            return f"declared step {step.checks.get('step')}, found {number}"
        if fault := _checks_fault(step):
            return f"step {number}: {fault}"
    return None


def _checks_fault(step: Step) -> str | None:
    checks = step.checks
    refused = checks.get("refused", False)
    if refused is not (step.valid is False):
        return f"valid is {step.valid}, but refused is {refused}"
    if refused:
        return None
    return _shown_fault(step.operation, checks)


def _shown_fault(operation: ops.Operation, checks: Mapping[str, Any]) -> str | None:
    if not isinstance(checks.get("rows"), list):
        return f"rows is {checks.get('rows')!r}, but should be a list"
    if isinstance(checks.get("children"), list):
        return next(filter(None, (_shown_fault(operation, child) for child in checks["children"])), None)
    update = isinstance(operation, ops.Update)
    kinds: dict[str, type] = {}
    if "states" not in checks:
        kinds |= {"offsets": list}
        if update:
            kinds |= {"width": int, "visible": dict}
    if update or isinstance(operation, ops.Mask):
        kinds["mask"] = str
    for name, kind in kinds.items():
        if not isinstance(checks.get(name), kind):
            return f"{name} is {checks.get(name)!r}, but should be a {kind.__name__}"
    return None


def arrays_fault(trace: Trace, needed: Sequence[str], arrays: Mapping[str, Storage]) -> str | None:
    """What is wrong with the arrays beside the trace."""
    if missing := sorted(set(needed) - arrays.keys()):
        return f"the array {missing[0]} is missing beside it"
    if unknown := sorted(arrays.keys() - set(needed)):
        return f"no step has the array {unknown[0]} that lies beside it"
    for number, (step, form) in enumerate(zip(trace.steps, forms(trace), strict=True), 1):
        if not isinstance(step.operation, ops.Update) or f"{number}.input.keys" not in arrays:
            continue
        config = trace.config.variant(step.operation.variant)
        shapes = [("input.", step.operation.tokens)]
        if "width" in step.checks and form == "plain":
            shapes.append(("", step.checks["width"]))
        for part, width in shapes:
            for what, dim in (("keys", config.key_dim), ("values", config.value_dim)):
                x = arrays[f"{number}.{part}{what}"]
                if x.ndim != 4 or x.shape[1:] != (config.heads, width, dim) or x.dtype.name != stored_as(config):
                    should = f"(rows, {config.heads}, {width}, {dim}) of {stored_as(config)}"
                    return f"the array {number}.{part}{what} is {x.shape} of {x.dtype}, but should be {should}"
    return None


def stored_as(config: Config) -> str:
    """The dtype of the arrays in the file: bfloat16 is stored as the uint16 of its bits."""
    return "uint16" if config.dtype == "bfloat16" else config.dtype
