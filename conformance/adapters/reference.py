"""The NumPy reference behind the operations of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import reference as ref
from conformance import operations as ops
from conformance.adapters.base import Inputs, Observation
from conformance.payload import Config, Storage, decode

Held = ref.Cache | ref.Arrays | tuple[Any, ...]
"""A cache of keys and values, a recurrent state, or a list of these."""


class ReferenceAdapter:
    """Holds each cache's frozen state by name; a refusal cannot change it, and what was handed out cannot change."""

    name = "reference"
    version = np.__version__

    def __init__(self) -> None:
        self.caches: dict[str, Held] = {}
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
        name = getattr(operation, "into", operation.cache)
        match operation:
            case ops.New():
                made, seen = _new(operation, operation.left_padding), Observation()
            case ops.Merge():
                made, seen = _merge([self.caches[source] for source in operation.caches]), Observation()
            case ops.Extend():
                made = _extend(self.caches[operation.cache], self.caches[operation.other])
                seen = Observation()
            case _:
                made, seen = _on(self.caches[operation.cache], operation, inputs)
        _check(made)
        self.caches[name] = made
        return _with_state(seen, made)

    def slots(self, cache: str) -> str:
        """`[0:2 0:3 0:0 0:1]  head=2`, a line for each row."""
        state = self.caches.get(cache)
        if not isinstance(state, ref.Cache) or state.keys is None:
            return "(no slots)"
        keys = state.keys
        if state.quantization is not None:
            keys = _dequantized(state)[0]
        note = f"head={state.head}{' wrapped' if state.wrapped else ''}"
        return slot_table(keys, self.config, note)


# -- one operation on one cache -------------------------------------------------------------------


def _new(made: ops.New | ops.Child, left_padding: tuple[int, ...] | None) -> Held:
    rows = len(made.rows) if isinstance(made, ops.New) else len(left_padding or (0,))
    match made.kind:
        case "CacheList":
            padding = left_padding or (0,) * rows
            return tuple(_new(child, padding) for child in made.children)
        case "ArraysCache":
            return ref.arrays(made.slots or 0, left_padding if left_padding and _padded(made, left_padding) else None)
        case "QuantizedKVCache":
            return ref.quantized(made.group_size or 0, made.bits or 0)
        case "ChunkedKVCache":
            return ref.chunked(made.chunk_size or 0)
        case "BatchKVCache" | "BatchRotatingKVCache":
            return ref.batch(left_padding or (0,) * rows, made.max_size, made.keep)
        case _:
            return ref.solo(made.max_size, made.keep)


def _padded(made: ops.New | ops.Child, left_padding: tuple[int, ...]) -> bool:
    """Whether a recurrent state is told its rows: in a list, where there are several or one has padding."""
    return isinstance(made, ops.New) or len(left_padding) > 1 or any(left_padding)


def _merge(caches: Sequence[Held]) -> Held:
    if caches and all(isinstance(cache, tuple) for cache in caches):
        lists: list[Any] = list(caches)
        return ref.each(lambda *children: _merge(children), *lists)
    if caches and all(isinstance(cache, ref.Arrays) for cache in caches):
        return ref.merge_arrays([cache for cache in caches if isinstance(cache, ref.Arrays)])
    return ref.merge([_keys_and_values(cache, "merge") for cache in caches])


def _extend(cache: Held, other: Held) -> Held:
    if isinstance(cache, tuple) and isinstance(other, tuple):
        return ref.each(_extend, cache, other)
    if isinstance(cache, ref.Arrays) and isinstance(other, ref.Arrays):
        return ref.extend_arrays(cache, other)
    return ref.extend(_keys_and_values(cache, "extend"), _keys_and_values(other, "extend"))


def _keys_and_values(cache: Held, call: str) -> ref.Cache:
    if not isinstance(cache, ref.Cache):
        raise ValueError(f"{call}: kinds that do not go together")
    if call == "merge" and (cache.quantization or cache.chunk_size):
        raise ValueError("merge: no batch of this kind")
    return cache


def _on(cache: Held, operation: ops.Operation, inputs: Inputs) -> tuple[Held, Observation]:
    if isinstance(cache, tuple):
        of_each = inputs.children or (inputs,) * len(cache)
        done = [_on(child, operation, its) for child, its in zip(cache, of_each, strict=True)]
        result = operation.tokens if isinstance(operation, ops.Trim) else None
        children = tuple(replace(seen, result=None) for _, seen in done)
        return tuple(made for made, _ in done), Observation(result=result, children=children)
    if isinstance(cache, ref.Arrays):
        return _on_arrays(cache, operation, inputs)
    return _on_cache(cache, operation, inputs)


def _on_cache(cache: ref.Cache, operation: ops.Operation, inputs: Inputs) -> tuple[ref.Cache, Observation]:
    nothing = Observation()
    if not cache.batched and operation.op in ("filter", "extract", "prepare", "finalize"):
        raise ValueError(f"{operation.op}: no batch")
    match operation:
        case ops.Update():
            return _update(cache, operation, inputs)
        case ops.Mask() if cache.chunk_size:
            raise ValueError("a ChunkedKVCache makes no masks")
        case ops.Mask():
            return cache, Observation(mask=ref.make_mask(cache, operation.tokens, operation.window))
        case ops.Prepare():
            return ref.prepare(cache, operation.left_padding, operation.lengths, operation.right_padding), nothing
        case ops.Finalize():
            return ref.finalize(cache), nothing
        case ops.Filter():
            return ref.filter_rows(cache, inputs.indices), nothing
        case ops.Extract():
            return ref.extract(cache, inputs.indices[0]), nothing
        case ops.Trim():
            return ref.trim(cache, operation.tokens), Observation(result=operation.tokens)
        case ops.TrimFront():
            return ref.trim_front(cache), nothing
        case ops.ToQuantized():
            return ref.to_quantized(cache, operation.group_size, operation.bits), nothing
        case ops.Copy():
            return cache, nothing
        case ops.Restore():
            return ref.restored(cache), nothing
    raise NotImplementedError(operation.op)


def _update(cache: ref.Cache, operation: ops.Update, inputs: Inputs) -> tuple[ref.Cache, Observation]:
    assert inputs.keys is not None and inputs.values is not None
    mask = ref.make_mask(cache, operation.tokens, None if cache.chunk_size else operation.window)
    dtypes = (inputs.dtype, inputs.dtype)
    if cache.quantization is None:
        made = ref.update(cache, inputs.keys, inputs.values)
        return made, Observation(mask=mask, keys=made.keys, values=made.values, dtypes=dtypes)
    made = ref.quantized_update(cache, inputs.keys, inputs.values)
    keys, values = _dequantized(made)
    return made, Observation(mask=mask, keys=keys, values=values, dtypes=dtypes, parts=ref.fetch(made))


def _dequantized(cache: ref.Cache) -> tuple[Storage, Storage]:
    assert cache.quantization is not None
    how = (cache.quantization.group_size, cache.quantization.bits)
    keys, values = ref.fetch(cache)
    return ref.dequantize(keys, *how), ref.dequantize(values, *how)


def _on_arrays(cache: ref.Arrays, operation: ops.Operation, inputs: Inputs) -> tuple[ref.Arrays, Observation]:
    nothing = Observation()
    match operation:
        case ops.Update():
            mask = ref.tokens_mask(cache, operation.tokens)
            for slot, x in enumerate(inputs.states):
                cache = cache if x is None else ref.store(cache, slot, x)
            return ref.advance(cache, operation.tokens), Observation(mask=mask)
        case ops.Mask():
            return cache, Observation(mask=ref.tokens_mask(cache, operation.tokens))
        case ops.Prepare():
            given = (operation.left_padding, operation.lengths, operation.right_padding)
            return ref.prepare_arrays(cache, *given), nothing
        case ops.Finalize():
            return ref.finalize_arrays(cache), nothing
        case ops.Filter():
            return ref.filter_arrays(cache, inputs.indices), nothing
        case ops.Extract():
            return ref.extract_array_row(cache, inputs.indices[0]), nothing
        case ops.Trim() if operation.tokens == 0:
            return cache, Observation(result=0)
        case ops.Trim():
            raise ValueError(f"trim({operation.tokens}) of a recurrent state, which cannot be taken back")
        case ops.Copy() | ops.Restore():
            return cache, nothing
    raise ValueError(f"{operation.op} of a recurrent state")


def _check(made: Held) -> None:
    if isinstance(made, ref.Cache):
        ref.check(made)
    elif isinstance(made, tuple):
        for child in made:
            _check(child)


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


def _with_state(seen: Observation, cache: Held) -> Observation:
    if isinstance(cache, tuple):
        before = seen.children or (Observation(),) * len(cache)
        children = tuple(_with_state(its, child) for its, child in zip(before, cache, strict=True))
        sizes = [child.size or 0 for child in children]
        return replace(
            seen,
            children=children,
            size=max(sizes, default=0),
            empty=all(child.empty for child in children),
            trimmable=all(child.trimmable for child in children),
        )
    if isinstance(cache, ref.Arrays):
        rows, empty = cache.columns.rows, ref.empty_arrays(cache)
        return replace(seen, rows=rows, states=cache.slots, size=0, empty=empty, trimmable=False)
    known = cache.batched or cache.keys is not None
    return replace(
        seen,
        rows=cache.rows if known else None,
        offsets=ref.offsets(cache) if cache.batched else (ref.offsets(cache) or (0,))[:1],
        size=ref.size(cache),
        empty=ref.empty(cache),
        trimmable=ref.is_trimmable(cache),
        front=ref.start_position(cache) if cache.chunk_size else None,
    )
