"""A row of a recorded session by itself: what it was fed, and what its queries saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from conformance import operations as ops
from conformance.adapters.base import Adapter, Inputs, Observation
from conformance.compare import written_out
from conformance.driver import Driver
from conformance.goldens import Golden
from conformance.ledger import Holding, Token
from conformance.payload import Config, Storage

Seen = tuple[tuple[bytes, bytes], ...]
"""The keys and values that one query sees, as bits, in no order."""


@dataclass(frozen=True)
class Share:
    """A row's part of one update."""

    keys: Storage
    """(1, H, n, D): its tokens alone, without pads."""
    values: Storage
    window: int | None
    seen: tuple[Seen, ...]
    """Per token, what its query saw."""


@dataclass(frozen=True)
class Sequence:
    """One row from its first token to its last, through all the caches that it was in."""

    name: str
    max_size: int | None
    shares: tuple[Share, ...]


def sequences(golden: Golden) -> Iterator[Sequence]:
    """The rows of a golden as they stand when they are last seen, those with tokens alone."""
    driver = Driver([golden.adapter()], golden.trace.config, payload=golden.payload())
    updates: list[tuple[ops.Update, list[list[Token | None]], Observation, int]] = []
    last: dict[str, tuple[Holding, list[Token]]] = {}
    for number, step in enumerate(golden.trace.steps, 1):
        operation = step.operation
        fed = driver.ledger.preview(operation) if isinstance(operation, ops.Update) else []
        seen = driver.step(operation)[0]
        if isinstance(operation, ops.Update):
            updates.append((operation, fed, seen, number))
        for holding in driver.ledger.holdings.values():
            last |= {row.name: (holding, list(row.history)) for row in holding.rows}
    for name, (holding, history) in last.items():
        shares = tuple(
            _share(golden, operation, seen, number, b, columns)
            for operation, fed, seen, number in updates
            for b, tokens in enumerate(fed)
            if (columns := [i for i, token in enumerate(tokens) if token in history])
        )
        if shares:
            yield Sequence(name, holding.max_size, shares)


def _share(golden: Golden, operation: ops.Update, seen: Observation, number: int, b: int, columns: list[int]) -> Share:
    keys, values = (golden.arrays[f"{number}.input.{what}"][b : b + 1, :, columns] for what in ("keys", "values"))
    return Share(keys, values, operation.window, tuple(_seen(seen, b, i, operation.tokens) for i in columns))


def _seen(seen: Observation, b: int, i: int, count: int) -> Seen:
    assert seen.mask is not None and seen.keys is not None and seen.values is not None
    mask = written_out(seen.mask, seen.keys.shape[0], count, seen.keys.shape[2])
    pairs = ((seen.keys[b, :, t].tobytes(), seen.values[b, :, t].tobytes()) for t in np.flatnonzero(mask[b, i]))
    return tuple(sorted(pairs))


def alone(sequence: Sequence, adapter: Adapter, config: Config) -> list[tuple[Seen, ...]]:
    """What the row's queries see, update by update, when a solo cache of this implementation is fed the same tokens."""
    kind = "KVCache" if sequence.max_size is None else "RotatingKVCache"
    adapter.begin(config)
    adapter.step(ops.New("x", kind, ("a",), max_size=sequence.max_size), Inputs())
    found = []
    for share in sequence.shares:
        count = share.keys.shape[2]
        inputs = Inputs(keys=share.keys, values=share.values, dtype=config.dtype)
        seen = adapter.step(ops.Update("x", count, share.window), inputs)
        if seen.refused or seen.crashed:
            raise RuntimeError(f"{sequence.name}: {seen.refused or seen.crashed}")
        found.append(tuple(_seen(seen, 0, i, count) for i in range(count)))
    return found
