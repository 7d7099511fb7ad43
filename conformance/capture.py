"""Writes down every call on mlx-lm's caches, with its arrays, while mlx-lm's own code makes the calls.

The classes' methods are wrapped for as long as a `Capture` is open. Rows are followed by name through the calls: `a` is
the first sequence, `a2` is the same one in its next batch.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance import operations as ops
from conformance.adapters.base import Inputs, Observation
from conformance.adapters.surface import NAMES, to_numpy
from conformance.payload import Config, Storage

CLASSES = ("KVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache")


@dataclass(frozen=True)
class Event:
    """One call, what it was given and what it did."""

    operation: ops.Operation
    seen: Observation
    inputs: tuple[Storage, Storage] | None = None


@dataclass
class Known:
    """A cache that is followed."""

    cache: Any  # kept, so that no other object gets its id
    layer: int
    name: str
    rows: tuple[str, ...]


@dataclass
class Capture:
    """The calls on the caches of some layers."""

    layers: Sequence[int]
    events: dict[int, list[Event]] = field(default_factory=lambda: defaultdict(list))
    known: dict[int, Known] = field(default_factory=dict)
    cache_count: Counter[int] = field(default_factory=Counter)
    row_count: Counter[tuple[int, str]] = field(default_factory=Counter)
    masks: dict[int, tuple[int, int | None, bool, Any]] = field(default_factory=dict)
    """By cache: the mask made for its next update, and the arguments it was made with."""
    asked: dict[type, tuple[int, int | None, bool]] = field(default_factory=dict)
    """By class: the arguments of the last mask, which the model shares among the layers of a kind."""
    depth: int = 0

    # -- following ----------------------------------------------------------------------------

    def follow_new(self, caches: Sequence[Any], sequence: str) -> None:
        """Begin to follow the caches of a new sequence, one a layer."""
        for layer in self.layers:
            cache = caches[layer]
            known = self._know(cache, layer, (self._fresh(layer, sequence),))
            kind = type(cache).__name__
            max_size = getattr(cache, "max_size", None)
            keep = getattr(cache, "keep", 0)
            self._log(known, ops.New(known.name, kind, known.rows, max_size=max_size, keep=keep), known)

    def _know(self, cache: Any, layer: int, rows: tuple[str, ...]) -> Known:
        self.cache_count[layer] += 1
        known = Known(cache, layer, f"c{self.cache_count[layer]}", rows)
        self.known[id(cache)] = known
        return known

    def _fresh(self, layer: int, row: str) -> str:
        base = row.rstrip("0123456789")
        self.row_count[layer, base] += 1
        number = self.row_count[layer, base]
        return base if number == 1 else f"{base}{number}"

    def _log(self, known: Known, operation: ops.Operation, target: Known, **seen: Any) -> None:
        inputs = seen.pop("inputs", None)
        cache = target.cache
        offsets = np.array(cache.offset).reshape(-1).tolist()
        observation = Observation(
            rows=len(target.rows),
            offsets=tuple(offsets),
            size=cache.size(),
            empty=None,
            trimmable=None,
            **seen,
        )
        self.events[known.layer].append(Event(operation, observation, inputs))

    # -- the calls ----------------------------------------------------------------------------

    def make_mask(self, cache: Any, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mask = make(cache, *args, **kwargs)
        asked = (args[0], kwargs.get("window_size"), kwargs.get("return_array", False))
        self.asked[type(cache)] = asked
        self.masks[id(cache)] = (*asked, mask)
        return mask

    def update_and_fetch(
        self, cache: Any, update: Callable[..., Any], make_mask: Callable[..., Any], keys: Any, values: Any
    ) -> Any:
        known = self.known.get(id(cache))
        if known is None:
            return update(cache, keys, values)
        if id(cache) in self.masks:
            count, window, array, mask = self.masks.pop(id(cache))
        else:
            count, window, array = self.asked[type(cache)]
            mask = make_mask(cache, count, window_size=window, return_array=array)
        if count != keys.shape[2]:
            raise RuntimeError(f"a mask for {count} columns before an update of {keys.shape[2]}")
        inputs = (to_numpy(keys), to_numpy(values))
        fetched = update(cache, keys, values)
        self._log(
            known,
            ops.Update(known.name, count, window, array),
            known,
            inputs=inputs,
            mask="none" if mask is None else mask if isinstance(mask, str) else np.array(mask),
            keys=to_numpy(fetched[0]),
            values=to_numpy(fetched[1]),
            dtypes=(NAMES[fetched[0].dtype], NAMES[fetched[1].dtype]),
        )
        return fetched

    def prepare(self, cache: Any, prepare: Callable[..., Any], **kwargs: Any) -> None:
        prepare(cache, **kwargs)
        if known := self.known.get(id(cache)):
            given = {name: tuple(numbers) for name, numbers in kwargs.items() if numbers is not None}
            self._log(known, ops.Prepare(known.name, **given), known)

    def finalize(self, cache: Any, finalize: Callable[..., Any]) -> None:
        finalize(cache)
        if known := self.known.get(id(cache)):
            self._log(known, ops.Finalize(known.name), known)

    def filter(self, cache: Any, keep: Callable[..., Any], indices: list[int]) -> None:
        keep(cache, indices)
        if known := self.known.get(id(cache)):
            rows = tuple(known.rows[i] for i in indices)
            known.rows = rows
            self._log(known, ops.Filter(known.name, rows, rows), known)

    def extend(self, cache: Any, extend: Callable[..., Any], other: Any) -> None:
        extend(cache, other)
        if known := self.known.get(id(cache)):
            joined = self.known[id(other)]
            names = tuple(self._fresh(known.layer, row) for row in joined.rows)
            known.rows += names
            self._log(known, ops.Extend(known.name, joined.name, names), known)

    def extract(self, cache: Any, extract: Callable[..., Any], index: int) -> Any:
        alone = extract(cache, index)
        if known := self.known.get(id(cache)):
            row = known.rows[index]
            into = self._know(alone, known.layer, (self._fresh(known.layer, row),))
            self._log(known, ops.Extract(known.name, row, into.name, into.rows[0]), into)
        return alone

    def merge(self, merge: Callable[..., Any], caches: Sequence[Any]) -> Any:
        batch = merge(caches)
        if all(id(cache) in self.known for cache in caches):
            sources = [self.known[id(cache)] for cache in caches]
            layer = sources[0].layer
            rows = tuple(self._fresh(layer, source.rows[0]) for source in sources)
            into = self._know(batch, layer, rows)
            self._log(into, ops.Merge(into.name, tuple(source.name for source in sources), rows), into)
        return batch

    def deepcopy(self, cache: Any, memo: dict[int, Any]) -> Any:
        made = object.__new__(type(cache))
        memo[id(cache)] = made
        made.__dict__.update(copy.deepcopy(vars(cache), memo))
        if known := self.known.get(id(cache)):
            rows = tuple(self._fresh(known.layer, row) for row in known.rows)
            into = self._know(made, known.layer, rows)
            self._log(known, ops.Copy(known.name, into.name, rows), into)
        return made


@contextmanager
def wrapped(capture: Capture) -> Iterator[None]:
    """The cache classes with every call written down. Calls that a method makes itself are its own affair."""
    from mlx_lm.models import cache as upstream

    undo: list[tuple[type, str, Any]] = []

    def wrap(cls: type, name: str, before: Callable[..., Any]) -> None:
        undo.append((cls, name, vars(cls).get(name)))
        setattr(cls, name, before)

    def outermost(handler: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
        def call(cache: Any, *args: Any, **kwargs: Any) -> Any:
            if capture.depth:
                return method(cache, *args, **kwargs)
            capture.depth += 1
            try:
                return handler(cache, *args, **kwargs)
            finally:
                capture.depth -= 1

        return call

    def handled(name: str, method: Callable[..., Any], *more: Any) -> Callable[..., Any]:
        handler = getattr(capture, name)
        return outermost(lambda cache, *args, **kwargs: handler(cache, method, *more, *args, **kwargs), method)

    def copied(cache: Any, memo: dict[int, Any]) -> Any:
        return capture.deepcopy(cache, memo)

    try:
        for class_name in CLASSES:
            cls = getattr(upstream, class_name)
            for name in ("prepare", "finalize", "filter", "extend", "extract"):
                if name in vars(cls):
                    wrap(cls, name, handled(name, vars(cls)[name]))
            if class_name.startswith("Batch"):
                merge = vars(cls)["merge"].__func__
                by_class = outermost(lambda kind, caches, m=merge: capture.merge(lambda c: m(kind, c), caches), merge)
                wrap(cls, "merge", classmethod(by_class))  # type: ignore[arg-type]
            make_mask = vars(cls)["make_mask"]
            wrap(cls, "update_and_fetch", handled("update_and_fetch", vars(cls)["update_and_fetch"], make_mask))
            wrap(cls, "make_mask", handled("make_mask", make_mask))
            wrap(cls, "__deepcopy__", copied)
        yield
    finally:
        for cls, name, method in reversed(undo):
            if method is None:
                delattr(cls, name)
            else:
                setattr(cls, name, method)


class Playback:
    """Answers with captured events, in order."""

    def __init__(self, events: Sequence[Event], name: str, version: str) -> None:
        self.events, self.name, self.version = events, name, version
        self.next = 0

    def begin(self, config: Config) -> None:
        self.next = 0

    def step(self, operation: ops.Operation, inputs: Inputs) -> Observation:
        self.next += 1
        return self.events[self.next - 1].seen

    def slots(self, cache: str) -> str:
        return "(captured: no slots)"


def head_shapes(events: Sequence[Event]) -> Config:
    """The configuration of the arrays that were captured."""
    first = next(event for event in events if event.inputs is not None)
    assert first.inputs is not None and first.seen.dtypes is not None
    keys, values = first.inputs
    return Config(first.seen.dtypes[0], keys.shape[1], keys.shape[3], values.shape[3])
