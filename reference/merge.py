"""Solo caches to one batch, right-aligned.

solo a   0   1   2   3                         row a   0   1   2   3
                            merge              row b   .   .   0   1
solo b   0   1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reference.moving import NOWHERE, move, move_positions, per_row
from reference.state import Array, Cache, batch, head_shapes, kind
from reference.temporal_order import temporal_slots


def merge(caches: Sequence[Cache]) -> Cache:
    """The batch whose row b is `caches[b]`; a wrapped ring is unrolled and brings its sinks and newest columns.

    Raises ValueError for no caches, for a kind, `max_size`, `keep`, head shape or dtype that differs, and for a cache
    of several rows.

    >>> from reference.state import solo
    >>> from reference.update import update
    >>> def tokens(n): return np.zeros((1, 1, n, 1))
    >>> a, b = update(solo(), tokens(3), tokens(3)), update(solo(), tokens(1), tokens(1))
    >>> merge([a, b, solo()]).positions
    array([[ 0,  1,  2],
           [-1, -1,  0],
           [-1, -1, -1]])
    """
    _check(caches)
    brought = _right_aligned([columns_brought(cache) for cache in caches], caches[0].keep)
    width = len(brought[0])
    merged = batch([0] * len(caches), caches[0].max_size, caches[0].keep)
    known = next((c for c in caches if c.keys is not None), None)
    keys = values = None
    if known is not None:
        keys = np.concatenate([_column(c.keys, known.keys, s) for c, s in zip(caches, brought, strict=True)])
        values = np.concatenate([_column(c.values, known.values, s) for c, s in zip(caches, brought, strict=True)])
    return replace(
        merged,
        keys=keys,
        values=values,
        positions=np.concatenate([_positions(c, s) for c, s in zip(caches, brought, strict=True)]),
        tokens=tuple(c.tokens[0] if c.rows else 0 for c in caches),
        head=width,
    )


def columns_brought(cache: Cache) -> tuple[list[int], list[int]]:
    """The slots of a solo cache that come along: sinks, and behind them the others, oldest first.

    Of the others the first are NOWHERE where a trim left fewer.
    """
    tokens = cache.tokens[0] if cache.rows else 0
    width = max(0, (tokens if cache.max_size is None else min(tokens, cache.max_size)) - cache.keep)
    order = temporal_slots(cache)
    sinks, behind = order[: cache.keep], order[cache.keep :]
    return sinks, [NOWHERE] * (width - len(behind)) + behind[len(behind) - min(width, len(behind)) :]


def _right_aligned(brought: Sequence[tuple[list[int], list[int]]], keep: int) -> list[list[int]]:
    """As many slots for every row: `keep` for the sinks if any row has a token, then pads, then the others."""
    width = max(len(behind) for _, behind in brought) + (keep if any(sinks for sinks, _ in brought) else 0)
    return [sinks + [NOWHERE] * (width - len(sinks) - len(behind)) + behind for sinks, behind in brought]


def _column(x: Array | None, known: Array | None, slots: list[int]) -> Array:
    assert known is not None
    if x is None:
        x = np.zeros((1, known.shape[1], 0, known.shape[3]), known.dtype)
    return move(x, per_row([slots], len(slots)))


def _positions(cache: Cache, slots: list[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    table = cache.positions if cache.rows else np.zeros((1, 0), np.int64)
    return move_positions(table, per_row([slots], len(slots)))


def _check(caches: Sequence[Cache]) -> None:
    if not caches:
        raise ValueError("merge needs at least one cache, but got none")
    first = caches[0]
    known = next((head_shapes(c) for c in caches if head_shapes(c)), None)
    for i, cache in enumerate(caches):
        if cache.batched or kind(cache) != kind(first):
            raise ValueError(f"merge takes solo caches of one kind, but cache {i} is a {kind(cache)}")
        if (cache.max_size, cache.keep) != (first.max_size, first.keep):
            raise ValueError(
                f"merge: cache {i} has max_size {cache.max_size} and keep {cache.keep}, "
                f"but cache 0 has {first.max_size} and {first.keep}"
            )
        if cache.rows > 1:
            raise ValueError(f"merge: cache {i} holds {cache.rows} rows, but a row is one sequence")
        if head_shapes(cache) and head_shapes(cache) != known:
            raise ValueError(f"merge: cache {i} holds heads and dtypes {head_shapes(cache)}, but another {known}")
