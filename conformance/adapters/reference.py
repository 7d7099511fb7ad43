"""The NumPy reference behind the operations of a trace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

import reference as ref
from conformance import operations as ops
from conformance.adapters.base import Inputs, Observation
from conformance.payload import Config, Storage, decode


class ReferenceAdapter:
    """Holds each cache's frozen state by name; a refusal cannot change it, and what was handed out cannot change."""

    name = "reference"
    version = np.__version__

    def __init__(self) -> None:
        self.caches: dict[str, ref.Cache] = {}
        self.config = Config()

    def begin(self, config: Config) -> None:
        self.caches = {}
        self.config = config

    def step(self, operation: ops.Operation, inputs: Inputs) -> Observation:
        try:
            return self._step(operation, inputs)
        except (ValueError, IndexError) as error:
            return Observation(refused=str(error))

    def _step(self, operation: ops.Operation, inputs: Inputs) -> Observation:
        seen = Observation()
        name = operation.cache
        cache = self.caches.get(name)
        match operation:
            case ops.New():
                made = self._new(operation)
            case ops.Merge():
                made = ref.merge([self.caches[source] for source in operation.caches])
            case _ if cache is None:
                raise KeyError(name)
            case ops.Update():
                keys, values = _arrays(inputs)
                mask = ref.make_mask(cache, operation.tokens, operation.window)
                made = ref.update(cache, keys, values)
                seen = Observation(mask=mask, keys=made.keys, values=made.values, dtypes=(inputs.dtype, inputs.dtype))
            case ops.Mask():
                made = cache
                seen = Observation(mask=ref.make_mask(cache, operation.tokens, operation.window))
            case ops.Prepare():
                made = ref.prepare(cache, operation.left_padding, operation.lengths, operation.right_padding)
            case ops.Finalize():
                made = ref.finalize(cache)
            case ops.Filter():
                made = ref.filter_rows(cache, inputs.indices)
            case ops.Extend():
                made = ref.extend(cache, self.caches[operation.other])
            case ops.Extract():
                name, made = operation.into, ref.extract(cache, inputs.indices[0])
            case ops.Trim():
                made = ref.trim(cache, operation.tokens)
                seen = Observation(result=operation.tokens)
            case ops.Copy() | ops.Restore():
                name, made = operation.into, cache
            case _:
                raise NotImplementedError(operation.op)
        ref.check(made)
        self.caches[name] = made
        return _with_state(seen, made)

    def _new(self, operation: ops.New) -> ref.Cache:
        if operation.kind.startswith("Batch"):
            padding = operation.left_padding or (0,) * len(operation.rows)
            return ref.batch(padding, operation.max_size)
        return ref.solo(operation.max_size, operation.keep)

    def slots(self, cache: str) -> str:
        """`[0:2 0:3 0:0 0:1]  head=2`, a line for each row."""
        state = self.caches.get(cache)
        if state is None or state.keys is None:
            return "(no slots)"
        note = f"head={state.head}{' wrapped' if state.wrapped else ''}"
        return slot_table(state.keys, self.config, note)


def slot_table(keys: Storage, config: Config, note: str) -> str:
    """Rows of slots, each as `tag:position`; `.` for a pad or an empty slot."""
    shaped = replace(config, heads=max(1, keys.shape[1]), key_dim=keys.shape[3])
    tags, positions = decode(keys, "key", shaped)
    return _table(tags, positions, note)


def _table(tags: Storage, positions: Storage, note: str) -> str:
    lines = []
    for row_tags, row_positions in zip(tags, positions, strict=True):
        cells = [f"{t}:{p}" if p >= 0 else "." for t, p in zip(row_tags, row_positions, strict=True)]
        lines.append("[" + " ".join(cells) + "]")
    return "\n".join(lines or ["(no rows)"]) + f"  {note}"


def _arrays(inputs: Inputs) -> tuple[Storage, Storage]:
    assert inputs.keys is not None and inputs.values is not None
    return inputs.keys, inputs.values


def _with_state(seen: Observation, cache: ref.Cache) -> Observation:
    known = cache.batched or cache.keys is not None
    return replace(
        seen,
        rows=cache.rows if known else None,
        offsets=ref.offsets(cache) if cache.batched else (ref.offsets(cache) or (0,))[:1],
        size=ref.size(cache),
        empty=ref.empty(cache),
        trimmable=ref.is_trimmable(cache),
    )
