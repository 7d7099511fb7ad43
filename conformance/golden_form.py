"""What a golden must look like before anything is run: its checks, and the arrays that they speak of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conformance import operations as ops
from conformance.payload import Config, Storage
from conformance.trace import Step, Trace


def is_recorded(trace: Trace) -> bool:
    """Whether the trace holds anything that was recorded."""
    return any(step.checks for step in trace.steps)


def array_names(trace: Trace) -> list[str]:
    """The arrays that lie beside a recorded trace, named by the number of their step."""
    if not is_recorded(trace):
        return []
    return [name for number, step in enumerate(trace.steps, 1) for name in _of_step(number, step)]


def _of_step(number: int, step: Step) -> list[str]:
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


def arrays_fault(trace: Trace, needed: Sequence[str], arrays: Mapping[str, Storage]) -> str | None:
    """What is wrong with the arrays beside the trace."""
    if missing := sorted(set(needed) - arrays.keys()):
        return f"the array {missing[0]} is missing beside it"
    if unknown := sorted(arrays.keys() - set(needed)):
        return f"no step has the array {unknown[0]} that lies beside it"
    for number, step in enumerate(trace.steps, 1):
        if not isinstance(step.operation, ops.Update) or f"{number}.input.keys" not in arrays:
            continue
        config = trace.config.variant(step.operation.variant)
        shapes = [("input.", step.operation.tokens)]
        if "width" in step.checks:
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
