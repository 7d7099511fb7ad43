"""Make a failing trace small: leave out steps and lower numbers as long as the same divergence is found.

Hypothesis shrinks the choices behind a trace; this shrinks the trace itself, which is what a person reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

from conformance import operations as ops
from conformance.adapters.base import Adapter
from conformance.driver import Divergence, Driver, Found
from conformance.payload import Config
from conformance.trace import Step, Trace


def find(trace: Trace, adapters: Sequence[Adapter], expected: Callable[[str], bool] | None = None) -> Found | None:
    """The trace's first divergence whose signature is as expected (any, by default).

    None where there is none, and where a step makes no sense because it names what a dropped step made.
    """
    wanted = expected or (lambda signature: True)
    driver = Driver(adapters, trace.config, passes=lambda found: not wanted(found.signature))
    try:
        for step in trace.steps:
            driver.step(step.operation)
    except Divergence as divergence:
        return divergence.found if wanted(divergence.found.signature) else None
    except (KeyError, StopIteration, ValueError, IndexError):
        return None
    return None


def shrink(trace: Trace, signature: str, adapters: Sequence[Adapter]) -> tuple[Found, Trace]:
    """The smallest trace that this finds with the same divergence, and the divergence."""
    same = signature.__eq__
    found = find(trace, adapters, same)
    if found is None:
        raise ValueError(f"the trace does not show {signature}")
    best = replace(trace, steps=trace.steps[: found.step])
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(best):
            again = find(candidate, adapters, same)
            if again is not None:
                best = replace(candidate, steps=candidate.steps[: again.step])
                found, progress = again, True
                break
    return found, replace(best, description=found.sentence())


def _smaller(trace: Trace) -> Iterator[Trace]:
    """Traces one change smaller, the boldest first."""
    steps = trace.steps
    for size in (8, 4, 2, 1):
        for start in range(len(steps) - size):
            yield replace(trace, steps=steps[:start] + steps[start + size :])
    for i, (first, second) in enumerate(pairwise(steps)):
        a, b = first.operation, second.operation
        if isinstance(a, ops.Update) and isinstance(b, ops.Update) and a.cache == b.cache:
            joined = Step(replace(b, tokens=a.tokens + b.tokens))
            yield replace(trace, steps=(*steps[:i], joined, *steps[i + 2 :]))
    plain = Config(attention=trace.config.attention)
    for config in (Config(), plain, replace(plain, dtype=trace.config.dtype)):
        if config != trace.config and _weight(config) < _weight(trace.config):
            yield replace(trace, config=config)
    for i, step in enumerate(steps):
        for operation in _simpler(step.operation):
            yield replace(trace, steps=(*steps[:i], Step(operation), *steps[i + 1 :]))


def _weight(config: Config) -> int:
    plain = Config()
    return sum(getattr(config, field.name) != getattr(plain, field.name) for field in fields(config))


def _simpler(operation: ops.Operation) -> Iterator[ops.Operation]:
    for field in fields(operation):
        value = getattr(operation, field.name)
        for lower in _lower(field.name, value):
            yield replace(operation, **{field.name: lower})
    if isinstance(operation, ops.New) and len(operation.rows) > 1:
        for b in range(len(operation.rows)):
            padding = operation.left_padding
            fewer = None if padding is None else padding[:b] + padding[b + 1 :]
            rows = operation.rows[:b] + operation.rows[b + 1 :]
            yield replace(operation, rows=rows, left_padding=fewer)


def _lower(name: str, value: Any) -> Iterator[Any]:
    if name in ("window", "return_array") and value:
        yield None if name == "window" else False
    elif name in ("tokens", "max_size", "keep") and isinstance(value, int):
        yield from (smaller for smaller in (value // 2, value - 1) if 0 < smaller < value)
        if value < -1:
            yield -1
    elif name in ("left_padding", "lengths", "right_padding") and value is not None:
        yield from (
            (*value[:b], smaller, *value[b + 1 :])
            for b, number in enumerate(value)
            for smaller in {0, number - 1}
            if 0 <= smaller < number
        )
