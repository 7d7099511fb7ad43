"""Writes down every call on mlx-lm's caches, with its arrays, while mlx-lm's own code makes the calls.

`wrapping.py` has the classes call the methods here. Rows are followed by name through the calls: `a` is
the first sequence, `a2` is the same one in its next batch.

A model makes several calls where a trace has one update. A recurrent layer's is at an end with its `advance`; that of a
list, with the update of its last child. What a model reads beside (`keys_and_values`, `cache[i]`) is no operation.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from conformance import operations as ops
from conformance.adapters.base import Inputs, Observation
from conformance.adapters.surface import NAMES, to_numpy
from conformance.payload import Config, Storage

RECURRENT, LIST = "ArraysCache", "CacheList"


@dataclass(frozen=True)
class Event:
    """One call, what it was given and what it did."""

    operation: ops.Operation
    seen: Observation
    inputs: dict[str, Storage] = field(default_factory=dict)
    """Named as a golden names them, without the number of the step."""


@dataclass
class Known:
    """A cache that is followed."""

    cache: Any  # kept, so that no other object gets its id
    layer: int
    name: str
    rows: tuple[str, ...]
    within: Known | None = None
    """The list that it is a child of."""
    number: int = 0
    """Which child of it."""
    done: dict[int, Event] = field(default_factory=dict)
    """Of a list: what its children did in the update that goes on."""
    written: dict[int, Storage] = field(default_factory=dict)
    """Of a recurrent state: what was written to its slots since the last `advance`."""


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
            self._log(known, ops.New(known.name, rows=known.rows, **_made_of(cache)), known)

    def _know(self, cache: Any, layer: int, rows: tuple[str, ...]) -> Known:
        self.cache_count[layer] += 1
        known = Known(cache, layer, f"c{self.cache_count[layer]}", rows)
        self.known[id(cache)] = known
        for i, child in enumerate(_children(cache)):
            self.known[id(child)] = Known(child, layer, f"{known.name}.{i}", rows, known, i)
        return known

    def _fresh(self, layer: int, row: str) -> str:
        base = row.rstrip("0123456789")
        self.row_count[layer, base] += 1
        number = self.row_count[layer, base]
        return base if number == 1 else f"{base}{number}"

    def _log(self, known: Known, operation: ops.Operation, target: Known) -> None:
        self.events[known.layer].append(Event(operation, _observed(target.cache)))

    def _updated(self, known: Known, update: ops.Update, inputs: dict[str, Storage], **seen: Any) -> None:
        """Log an update, or keep it until all children of the list are updated."""
        event = Event(update, replace(_observed(known.cache), **seen), inputs)
        whole = known.within
        if whole is None:
            self.events[known.layer].append(event)
            return
        if known.number in whole.done:
            raise RuntimeError(f"{known.name} is updated twice, and another child of the list not once")
        whole.done[known.number] = event
        if len(whole.done) == len(_children(whole.cache)):
            self.events[whole.layer].append(_of_all(whole, [whole.done[i] for i in sorted(whole.done)]))
            whole.done = {}

    # -- the calls ----------------------------------------------------------------------------

    def make_mask(self, cache: Any, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mask = make(cache, *args, **kwargs)
        asked = (args[0], kwargs.get("window_size"), kwargs.get("return_array", False))
        self.asked[type(cache)] = asked
        if id(cache) in self.known:  # another's id may be given again
            self.masks[id(cache)] = (*asked, mask)
        return mask

    def _mask(self, cache: Any, columns: int) -> tuple[int | None, bool, str | Storage]:
        """Window, return_array and mask of the update that comes now."""
        cls = type(cache)
        if not hasattr(cls, "make_mask"):  # the model makes the mask of a chunk, which shows what is held
            return None, False, "none" if columns == 1 else "causal"
        count, window, array, mask = self.masks.pop(id(cache), (*self.asked[cls], self))
        if count != columns:
            raise RuntimeError(f"a mask for {count} columns before an update of {columns}")
        if mask is self:
            how = {} if cls.__name__ == RECURRENT else {"window_size": window, "return_array": array}
            mask = cache.make_mask(count, **how)
        return window, array, "none" if mask is None else mask if isinstance(mask, str) else np.array(mask)

    def update_and_fetch(self, cache: Any, update: Callable[..., Any], keys: Any, values: Any) -> Any:
        known = self.known.get(id(cache))
        if known is None:
            return update(cache, keys, values)
        count = keys.shape[2]
        window, array, mask = self._mask(cache, count)
        inputs = {"input.keys": to_numpy(keys), "input.values": to_numpy(values)}
        fetched = update(cache, keys, values)
        self._updated(
            known,
            ops.Update(known.name, count, window, array),
            inputs,
            mask=mask,
            keys=to_numpy(fetched[0]),
            values=to_numpy(fetched[1]),
            dtypes=(NAMES[fetched[0].dtype], NAMES[fetched[1].dtype]),
        )
        return fetched

    def setitem(self, cache: Any, write: Callable[..., Any], slot: int, x: Any) -> None:
        write(cache, slot, x)
        if known := self.known.get(id(cache)):
            known.written[slot] = to_numpy(x)

    def advance(self, cache: Any, advance: Callable[..., Any], columns: int) -> None:
        known = self.known.get(id(cache))
        if known is None:
            advance(cache, columns)
            return
        _, _, mask = self._mask(cache, columns)
        advance(cache, columns)
        slots = sorted(known.written)
        if len(slots) not in (1, len(cache.cache)):
            raise RuntimeError(f"an update of the slots {slots}: a trace has one, or all")
        inputs = {f"input.slot.{i}": known.written[i] for i in slots}
        known.written = {}
        only = slots[0] if len(slots) < len(cache.cache) else None
        self._updated(known, ops.Update(known.name, columns, slot=only), inputs, mask=mask)

    def maybe_trim_front(self, cache: Any, trim: Callable[..., Any]) -> None:
        trim(cache)
        if known := self.known.get(id(cache)):
            self._log(known, ops.TrimFront(known.name), known)

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
        known = self.known.get(id(cache))
        if known is not None and known.within is None:
            rows = tuple(self._fresh(known.layer, row) for row in known.rows)
            into = self._know(made, known.layer, rows)
            self._log(known, ops.Copy(known.name, into.name, rows), into)
        return made


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
    """The configuration of the arrays that were captured; of states alone, their dtype."""
    inputs = next(event.inputs for event in events if event.inputs)
    fed = {name.split(".")[-1]: x for name, x in inputs.items() if name.endswith(("keys", "values"))}
    stored = next(iter(inputs.values())).dtype.name
    dtype = "bfloat16" if stored == "uint16" else stored
    if not fed:
        return Config(dtype)
    return Config(dtype, fed["keys"].shape[1], fed["keys"].shape[3], fed["values"].shape[3])


# -- one cache ------------------------------------------------------------------------------------


def _children(cache: Any) -> Sequence[Any]:
    return cache.caches if type(cache).__name__ == LIST else ()


def _made_of(cache: Any) -> dict[str, Any]:
    """What `new` says of a cache."""
    made: dict[str, Any] = {"kind": type(cache).__name__}
    made |= {name: getattr(cache, name) for name in ("max_size", "keep", "chunk_size") if hasattr(cache, name)}
    if made["kind"] == RECURRENT:
        made["slots"] = len(cache.cache)
    if children := _children(cache):
        made["children"] = tuple(ops.Child(**_made_of(child)) for child in children)
    return made


def _observed(cache: Any) -> Observation:
    """What a cache shows between two calls."""
    seen = Observation(size=cache.size(), empty=None, trimmable=None)
    if children := _children(cache):
        return replace(seen, children=tuple(map(_observed, children)))
    if type(cache).__name__ == RECURRENT:
        states = tuple(None if x is None else to_numpy(x) for x in cache.cache)
        return replace(seen, rows=cache.batch_size, states=states)
    rows = None if cache.keys is None else int(cache.keys.shape[0])
    offsets = tuple(np.array(cache.offset).reshape(-1).tolist())
    return replace(seen, rows=rows, offsets=offsets, front=getattr(cache, "start_position", None))


def _of_all(whole: Known, parts: Sequence[Event]) -> Event:
    """The update of a list, of its children's."""
    updates = [part.operation for part in parts if isinstance(part.operation, ops.Update)]
    masked = [update for update, part in zip(updates, parts, strict=True) if part.seen.states is None]
    asked = {(update.tokens, update.window, update.return_array) for update in masked}
    if len({(update.tokens, update.slot) for update in updates}) > 1 or len(asked) > 1:
        raise RuntimeError(f"no one update says what the children of {whole.name} did: {updates}")
    update = replace(masked[0] if masked else updates[0], cache=whole.name)
    inputs = {f"{i}.{name}": x for i, part in enumerate(parts) for name, x in part.inputs.items()}
    seen = replace(_observed(whole.cache), children=tuple(part.seen for part in parts))
    return Event(update, seen, inputs)
