"""An observation as the `checks` of a step: plain data that a person reads and a port compares.

The positions that a query sees are read off the fetch and the mask by decoding the payload; the ledger only says which
rows there are, which queries are pads, and which tokens are a row's own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from conformance import operations as ops
from conformance.adapters.base import Observation
from conformance.compare import written_out
from conformance.driver import Driver
from conformance.ledger import Expected, Holding, Token
from conformance.payload import PAD, Ints

Seen = list[list[int | str] | None]
"""Per query, what it sees: positions of its row, or words for what is no token of the row. None for a pad's query."""


def checks_of(driver: Driver, operation: ops.Operation, seen: Observation) -> dict[str, Any]:
    """What was seen at the driver's last step, by the names that `goldens/README.md` lists."""
    checks: dict[str, Any] = {"step": len(driver.steps)}
    if seen.crashed is not None:
        return {**checks, "crash": seen.crashed.split(":")[0]}
    if seen.refused is not None:
        return {**checks, "refused": True}
    target = getattr(operation, "into", operation.cache)
    return {**checks, **_shown(driver, target, driver.expected, seen)}


NO_SIZE = ("QuantizedKVCache", "ConcatenateKVCache", "ChunkedKVCache", "ArraysCache", "CacheList")
"""Kinds of which upstream's `size()` is 0 whatever they hold, so that it is not recorded."""


def _shown(driver: Driver, cache: str, expected: Expected | None, seen: Observation) -> dict[str, Any]:
    holding = driver.ledger.holdings.get(cache)
    checks: dict[str, Any] = {}
    names = [row.name for row in holding.rows] if holding else []
    checks["rows"] = names if seen.rows in (None, len(names)) else seen.rows
    if holding is None or holding.kind not in NO_SIZE:
        checks |= {"offsets": list(seen.offsets), "size": seen.size}
    elif seen.states is None and not holding.children:
        checks["offsets"] = list(seen.offsets)
    if seen.front is not None:
        checks["front"] = seen.front
    if seen.result is not None:
        checks["result"] = seen.result
    if seen.mask is not None:
        checks["mask"] = seen.mask if isinstance(seen.mask, str) else "array"
    if seen.keys is not None:
        checks["width"] = int(seen.keys.shape[2])
        if expected is not None and holding is not None:
            checks["visible"] = visible(driver, expected, holding, seen)
    if seen.states is not None and holding is not None:
        checks["states"] = [None if x is None else _state(driver, holding, i, x) for i, x in enumerate(seen.states)]
    if holding is not None and holding.children:
        each = enumerate(seen.children or (Observation(),) * holding.children)
        of = expected.children if expected is not None else (None,) * holding.children
        checks["children"] = [_shown(driver, f"{cache}.{i}", of[i], child) for i, child in each]
    return checks


def _state(driver: Driver, holding: Holding, slot: int, x: Any) -> list[str | None]:
    """Per row, the token that a slot shows as `row:position`; null for zeros."""
    tags, positions = driver.payload.decode_state(x, slot, driver.config)
    written = [row.states[slot] for row in holding.rows] + [None] * len(tags)
    shown = zip(tags.tolist(), positions.tolist(), written, strict=False)
    return [_shown_state(driver, slot, tag, position, its) for tag, position, its in shown]


def _shown_state(driver: Driver, slot: int, tag: int, position: int, written: Token | None) -> str | None:
    if written is not None and driver.token(f"slot.{slot}", written) == (tag, position):
        return f"{written[0]}:{written[1]}"  # another token may have the same bits
    names = {tag: name for name, tag in driver.ledger.tags.items()}
    return None if position == PAD else f"{names[tag]}:{position}" if position >= 0 else "unwritten"


def visible(driver: Driver, expected: Expected, holding: Holding, seen: Observation) -> dict[str, Seen] | str:
    """Per row and query, what the fetch shows where the mask lets it through."""
    assert seen.keys is not None and seen.mask is not None
    try:
        mask = written_out(seen.mask, len(expected.names), expected.count, seen.keys.shape[2])
    except ValueError as error:
        return str(error)
    config = driver.config.variant(holding.variant or "plain")
    tags, positions = driver.payload.decode(seen.keys, "key", config)
    found: dict[str, Seen] = {}
    for b, row in enumerate(holding.rows):
        own: dict[tuple[int, int], list[int]] = defaultdict(list)
        for position, token in enumerate(row.history):
            own[driver.token("key", token)].append(position)
        found[row.name] = [
            None if query is None else _query(driver, own, tags[b, mask[b, i]], positions[b, mask[b, i]])
            for i, query in enumerate(expected.queries[b])
        ]
    return found


def _query(driver: Driver, own: dict[tuple[int, int], list[int]], tags: Ints, positions: Ints) -> list[int | str]:
    names = {tag: name for name, tag in driver.ledger.tags.items()}
    tokens = Counter(zip(tags.tolist(), positions.tolist(), strict=True))
    mine: list[int] = []
    foreign: list[str] = []
    for token, times in sorted(tokens.items()):
        tag, position = token
        if token in own:
            # Two tokens of a row may have the same bits; which is which cannot be seen and does not matter.
            mine += [own[token][min(i, len(own[token]) - 1)] for i in range(times)]
        else:
            what = "pad" if position == PAD else "unwritten" if position < 0 else f"{names[tag]}:{position}"
            foreign += [what] * times
    return [*sorted(mine), *foreign]


def row_axis(mask: Any, batched: bool) -> Any:
    """The specification's mask (B, N, T) as a cache returns it: (B, 1, N, T) of a batch, (N, T) of a solo cache."""
    full = np.asarray(mask)
    return full[:, None] if batched else full[0]
