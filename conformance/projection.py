"""A row of a recorded session by itself: what it was fed, and what its queries saw.

Of a recurrent state, what the model finds in the slots is seen: what it left there, through all that befell the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from conformance import operations as ops
from conformance.adapters.base import Adapter, Inputs, Observation
from conformance.compare import written_out
from conformance.driver import Driver
from conformance.goldens import Golden
from conformance.ledger import Holding, Ledger, Token
from conformance.payload import Config

Seen = tuple[tuple[bytes, ...], ...]
"""The keys and values that one query sees, as bits, in no order; or what the slots held before an update and after."""


@dataclass(frozen=True)
class Share:
    """A row's part of one operation on its cache, which is `x` here."""

    operation: ops.Operation
    inputs: Inputs
    """Its tokens alone, without pads."""
    seen: tuple[Seen, ...]
    """Of an update, per token what its query saw; of a recurrent state's, once what the slots held."""


@dataclass(frozen=True)
class Sequence:
    """One row from its first token to its last, through all the caches that it was in."""

    name: str
    new: ops.New
    """The solo cache that it would be in alone."""
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Leaf:
    """One operation on one cache that is no list: on a list it is several."""

    where: str
    """The number of the step, and behind it the child's."""
    operation: ops.Operation
    names: tuple[str, ...]
    """The rows before it."""
    fed: list[list[Token | None]]
    before: Observation
    """What the cache showed before."""
    seen: Observation


def sequences(golden: Golden) -> Iterator[Sequence]:
    """The rows of a golden as they stand when they are last seen, those with tokens alone."""
    driver = Driver([golden.adapter()], golden.trace.config, payload=golden.payload())
    leaves: list[Leaf] = []
    last: dict[str, tuple[Holding, list[Token]]] = {}
    shown: dict[str, Observation] = {}
    for step in golden.trace.steps:
        leaves += _carry_out(driver, step.operation, shown)
        for holding in driver.ledger.holdings.values():
            if not holding.children:
                last |= {row.name: (holding, list(row.history)) for row in holding.rows}
    for name, (holding, history) in last.items():
        if history:
            shares = (_share(golden, leaf, b, history) for leaf in leaves for b in range(len(leaf.names)))
            yield Sequence(name, _solo(holding), tuple(share for share in shares if share is not None))


def _carry_out(driver: Driver, operation: ops.Operation, shown: dict[str, Observation]) -> list[Leaf]:
    """One step of a golden: the updates and slides of its leaves, and what each cache shows now."""
    ledger = driver.ledger
    parts = list(_parts(ledger, operation, ()))
    fed = [ledger.preview(part) if isinstance(part, ops.Update) else [] for _, part in parts]
    whole = driver.step(operation)[0]
    leaves = []
    for (path, part), tokens in zip(parts, fed, strict=True):
        seen = whole
        for i in path:
            seen = seen.children[i]
        if isinstance(part, ops.Update | ops.TrimFront):
            names = tuple(row.name for row in ledger.holdings[part.cache].rows)
            where = ".".join(map(str, (len(driver.steps), *path)))
            leaves.append(Leaf(where, part, names, tokens, shown[part.cache], seen))
        shown[getattr(part, "into", part.cache)] = seen
    return leaves


def _parts(
    ledger: Ledger, operation: ops.Operation, path: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], ops.Operation]]:
    if not ledger.is_list(operation):
        yield path, operation
        return
    for i, part in enumerate(ledger.parts(operation)):
        yield from _parts(ledger, part, (*path, i))


def _solo(holding: Holding) -> ops.New:
    kind = holding.kind.removeprefix("Batch")
    slots = len(holding.filled) or None
    return ops.New("x", kind, ("a",), max_size=holding.max_size, slots=slots, chunk_size=holding.chunk_size)


def _share(golden: Golden, leaf: Leaf, b: int, history: list[Token]) -> Share | None:
    """The part that row b of an operation has in a row of this history; None where it has none."""
    operation = leaf.operation
    if not isinstance(operation, ops.Update):
        return Share(ops.TrimFront("x"), Inputs(), ()) if (leaf.names[b], 0) in history else None
    columns = [i for i, token in enumerate(leaf.fed[b]) if token in history]
    if not columns:
        return None
    update = ops.Update("x", len(columns), operation.window, slot=operation.slot)
    dtype = golden.trace.config.dtype
    if leaf.seen.states is not None:
        written = (golden.arrays.get(f"{leaf.where}.input.slot.{i}") for i in range(len(leaf.seen.states)))
        states = tuple(None if x is None else x[b : b + 1] for x in written)
        return Share(update, Inputs(states=states, dtype=dtype), (_held(leaf.before, leaf.seen, b),))
    keys, values = (golden.arrays[f"{leaf.where}.input.{what}"][b : b + 1, :, columns] for what in ("keys", "values"))
    seen = tuple(_seen(leaf.seen, b, i, operation.tokens) for i in columns)
    return Share(update, Inputs(keys=keys, values=values, dtype=dtype), seen)


def _seen(seen: Observation, b: int, i: int, count: int) -> Seen:
    assert seen.mask is not None and seen.keys is not None and seen.values is not None
    mask = written_out(seen.mask, seen.keys.shape[0], count, seen.keys.shape[2])
    pairs = ((seen.keys[b, :, t].tobytes(), seen.values[b, :, t].tobytes()) for t in np.flatnonzero(mask[b, i]))
    return tuple(sorted(pairs))


def _held(before: Observation, after: Observation, b: int) -> Seen:
    """A row's state slot by slot, before and after; nothing for zeros, with which a row in a batch begins."""
    slots = ((seen.states or ()) for seen in (before, after))
    return tuple(tuple(b"" if x is None or not x[b].any() else x[b].tobytes() for x in states) for states in slots)


def alone(sequence: Sequence, adapter: Adapter, config: Config) -> list[tuple[Seen, ...]]:
    """What the row's queries see, share by share, when a solo cache of this implementation is fed the same tokens."""
    adapter.begin(config)
    before = adapter.step(sequence.new, Inputs())
    found: list[tuple[Seen, ...]] = []
    for share in sequence.shares:
        seen = adapter.step(share.operation, share.inputs)
        if seen.refused or seen.crashed:
            raise RuntimeError(f"{sequence.name}: {seen.refused or seen.crashed}")
        if not isinstance(share.operation, ops.Update):
            found.append(())
        elif seen.states is not None:
            found.append((_held(before, seen, 0),))
        else:
            count = share.operation.tokens
            found.append(tuple(_seen(seen, 0, i, count) for i in range(count)))
        before = seen
    return found
