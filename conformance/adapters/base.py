"""What an adapter is: one implementation behind the operations of a trace. `ADAPTER.md` has the contract in prose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from conformance.operations import Operation
from conformance.payload import Config, Floats, Storage


class AdapterError(Exception):
    """An implementation that cannot be driven at all: not installed, or without what the harness needs."""


@dataclass(frozen=True)
class Inputs:
    """What an operation needs beside its own fields."""

    indices: tuple[int, ...] = ()
    """The rows that a `filter` or `extract` names, as indices into the batch."""
    keys: Storage | None = None
    values: Storage | None = None
    dtype: str = "float32"
    queries: Floats | None = None
    """(B, Hq, N, D), where attention is to be run on the fetch."""
    states: tuple[Storage | None, ...] = ()
    """What an update writes to each slot of a recurrent state; None for a slot that it leaves."""
    children: tuple[Inputs, ...] = ()
    """Of an update of a list: what each of its caches gets."""


Parts = tuple[Storage, Storage, Storage]
"""Quantized keys or values: words, scales and biases."""


@dataclass(frozen=True)
class Observation:
    """What an implementation did with one operation, as far as a caller can see it."""

    refused: str | None = None
    """The words of a ValueError or IndexError."""
    crashed: str | None = None
    """Another exception, which no caller expects."""
    changed: str | None = None
    """After a refusal: the field that is not as it was. It should name none."""
    aliased: str | None = None
    """A value handed out before the operation that is not as it was. It should name none."""
    rows: int | None = None
    """None where the implementation has no rows yet."""
    offsets: tuple[int, ...] = ()
    """Per row; a solo cache has one for all its rows."""
    size: int | None = 0
    empty: bool | None = True
    trimmable: bool | None = True
    """None for these three where they were not observed, as in a golden: then they are not compared."""
    unanswered: str | None = None
    """`nbytes`, `size` or another question that raised an exception. It should name none."""
    result: int | None = None
    """What `trim` returned."""
    mask: str | Storage | None = None
    """`"none"`, `"causal"`, or booleans whose last axes are (N, T)."""
    keys: Storage | None = None
    values: Storage | None = None
    dtypes: tuple[str, str] | None = None
    attention: Floats | None = None
    parts: tuple[Parts, Parts] | None = None
    """A quantized fetch as it was returned; `keys` and `values` are then what it stands for, in float32."""
    states: tuple[Storage | None, ...] | None = None
    """The slots of a recurrent state."""
    front: int | None = None
    """`start_position` of a chunked cache."""
    children: tuple[Observation, ...] = ()
    """Of a list: what each of its caches shows."""


class Adapter(Protocol):
    """One implementation."""

    name: str
    version: str

    def begin(self, config: Config) -> None:
        """Forget all caches; the arrays to come are of this configuration."""

    def step(self, operation: Operation, inputs: Inputs) -> Observation:
        """Carry out one operation; a refusal is an observation too."""
        raise NotImplementedError

    def slots(self, cache: str) -> str:
        """The cache's slots as a line to read, or nothing."""
        raise NotImplementedError
