"""One row of a batch as a solo cache.

row a   0   1   2   3
row b   .   .   0   1          extract(1)          0   1
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from reference.filter import row_index
from reference.moving import NOWHERE, move, move_positions, per_row
from reference.state import NO_TOKEN, Cache, right_pads, solo
from reference.temporal_order import right_pads_first, temporal_slots


def extract(cache: Cache, row: int) -> Cache:
    """The solo cache that goes on where the row is.

    A ring brings at least its newest `min(tokens, max_size)` columns, so that single tokens wrap where the row's would.
    Raises IndexError for a row that is not there; a negative index counts from the end.

    >>> from reference.state import batch
    >>> from reference.update import update
    >>> tokens = np.arange(8).reshape(2, 1, 4, 1)
    >>> alone = extract(update(batch([0, 2]), tokens, tokens), 1)
    >>> alone.positions, alone.keys.ravel()
    (array([[0, 1]]), array([6, 7]))
    """
    b = row_index(cache, row, f"extract row {row}")
    slots = row_columns(cache, b)
    alone = solo(cache.max_size, cache.keep)
    if cache.keys is None or cache.values is None:
        return alone
    sources = per_row([slots], len(slots))
    return replace(
        alone,
        keys=move(cache.keys[b : b + 1], sources),
        values=move(cache.values[b : b + 1], sources),
        positions=move_positions(cache.positions[b : b + 1], sources),
        tokens=(cache.tokens[b],),
        due=(0,),
        head=len(slots),
    )


def row_columns(cache: Cache, b: int) -> list[int]:
    """The row's slots from its first token to its last, oldest first."""
    order = right_pads_first(temporal_slots(cache), right_pads(cache)[b], cache.keep)
    sinks, behind = order[: min(cache.keep, cache.tokens[b])], order[cache.keep :]
    held = int((cache.positions[b, behind] != NO_TOKEN).sum())
    width = held
    if cache.max_size is not None:
        width = max(held, min(cache.tokens[b], cache.max_size) - len(sinks))
    return sinks + [NOWHERE] * (width - len(behind)) + behind[len(behind) - min(width, len(behind)) :]


def held_tokens(cache: Cache, b: int) -> list[int]:
    """The positions of row b that are held, ascending."""
    return sorted(p for p in np.asarray(cache.positions[b]).tolist() if p != NO_TOKEN)
