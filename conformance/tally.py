"""What a run has reached: cache by operation, and situations. A zero means that something was never tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from conformance import operations as ops
from conformance.adapters.base import Observation
from conformance.compare import exactly
from conformance.ledger import Holding, Ledger, merged_kind
from conformance.operations import applicable


@dataclass
class Tally:
    """Counts by (kind, operation), and by (kind, situation)."""

    sequences: int = 0
    operations: int = 0
    done: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrapped: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    situations: Counter[tuple[str, str]] = field(default_factory=Counter)
    quantized: Counter[str] = field(default_factory=Counter)
    """How quantized fetches compared with the reference's: `exact`, or `within a step`."""

    def count_quantized(self, seen: Sequence[Observation]) -> None:
        """Count a quantized fetch that passed."""
        for observation in seen[1:]:
            if observation.parts is not None:
                self.quantized["exact" if exactly(observation, seen[0]) else "within a step"] += 1

    def count(self, ledger: Ledger, operation: ops.Operation, refused: bool, early: bool = False) -> None:
        """Count an operation that was carried out or refused; `early` is what `is_early` said before it."""
        self.operations += 1
        if isinstance(operation, ops.New):
            key = (operation.kind, operation.op)
            holding = None if refused else ledger.holdings[operation.cache]
        elif isinstance(operation, ops.Merge):
            first = ledger.holdings.get(operation.caches[0]) if operation.caches else None
            kind = first.kind.removeprefix("Batch") if first else "KVCache"
            key = (merged_kind(kind), operation.op)
            holding = None if refused else ledger.holdings[operation.cache]
        else:
            holding = ledger.holdings[operation.cache]
            key = (holding.kind, operation.op)
        if refused:
            self.refused[key] += 1
            return
        self.done[key] += 1
        if holding is None:
            return
        if holding.wrapped:
            self.wrapped[key] += 1
        for situation in _situations(holding, operation):
            self.situations[holding.kind, situation] += 1
        self.situations[holding.kind, "early finalize"] += early

    def add(self, other: Tally) -> None:
        """Count what another process reached."""
        self.sequences += other.sequences
        self.operations += other.operations
        self.done += other.done
        self.wrapped += other.wrapped
        self.refused += other.refused
        self.situations += other.situations
        self.quantized += other.quantized

    def zeros(self, kinds: tuple[str, ...]) -> list[str]:
        """What was never reached, in words."""
        missing = []
        for kind in kinds:
            for operation in applicable(kind):
                if not self.done[kind, operation]:
                    missing.append(f"{kind} {operation}")
                if can_wrap(kind, operation) and not self.wrapped[kind, operation]:
                    missing.append(f"{kind} {operation} wrapped")
                if can_refuse(kind, operation) and not self.refused[kind, operation]:
                    missing.append(f"{kind} {operation} refused")
            missing += [f"{kind}: {s}" for s in reachable(kind) if not self.situations[kind, s]]
        return missing


def can_wrap(kind: str, operation: str) -> bool:
    """Whether the operation can meet a ring that has lost tokens."""
    return "Rotating" in kind and operation != "new"


def can_refuse(kind: str, operation: str) -> bool:
    """Whether the operation has any refusal."""
    if operation == "new":
        return kind not in ("KVCache", "ConcatenateKVCache", "CacheList", "ArraysCache")
    return operation not in ("copy", "restore", "finalize", "trim_front") and (kind, operation) != (
        "CacheList",
        "update",
    )


def is_early(ledger: Ledger, operation: ops.Operation) -> bool:
    """Whether a finalize comes before all the announced columns. Asked before it is carried out."""
    if not isinstance(operation, ops.Finalize):
        return False
    holding = ledger.holdings[operation.cache]
    return holding.pending and holding.announced != 0


FILES = ("saved", "mapped")
CACHE_SITUATIONS = ("first update", "one token", "several tokens", "window", "array asked for", "several rows", *FILES)
RING_SITUATIONS = ("more than max_size", "wrapped one token", "wrapped several tokens", "max_size of 1")
BATCH_SITUATIONS = (
    "left padding due",
    "pending one token",
    "pending several tokens",
    "pending filter",
    "pending extract",
    "pending extend",
    "early finalize",
    "a fork",
    "no rows left",
    "a row with no tokens",
)


ARRAYS_SITUATIONS = (
    "one token",
    "several tokens",
    "several rows",
    *BATCH_SITUATIONS,
    "an unfilled slot",
    "zeros",
    *FILES,
)
LIST_SITUATIONS = ("one token", "several tokens", "several rows", *BATCH_SITUATIONS, *FILES)


def reachable(kind: str) -> tuple[str, ...]:
    """The situations that a kind can be in."""
    if kind == "ArraysCache":
        return ARRAYS_SITUATIONS
    if kind == "CacheList":
        return LIST_SITUATIONS
    found: tuple[str, ...] = CACHE_SITUATIONS
    if kind == "ChunkedKVCache":
        found = (*(s for s in found if s not in ("window", "array asked for")), "slid")
    if "Rotating" in kind:
        found += RING_SITUATIONS
    if "Rotating" in kind:
        found += ("sinks", "wrapped sinks")
    if kind == "BatchRotatingKVCache":
        found += ("fewer tokens than sinks",)
    if kind.startswith("Batch"):
        found += BATCH_SITUATIONS
    return found


def _situations(holding: Holding, operation: ops.Operation) -> list[str]:
    """Asked after the operation was carried out."""
    found = {
        "several rows": len(holding.rows) > 1,
        "max_size of 1": holding.max_size == 1,
        "sinks": holding.keep > 0,
        "slid": holding.front > 0,
        "an unfilled slot": any(holding.filled) and not all(holding.filled),
        "zeros": any(None in row.states for row in holding.rows) and all(holding.filled),
        "wrapped sinks": holding.keep > 0 and holding.wrapped,
        "fewer tokens than sinks": any(len(row.history) < holding.keep for row in holding.rows),
        "left padding due": any(row.due for row in holding.rows),
        "a row with no tokens": any(not row.history for row in holding.rows),
    }
    if isinstance(operation, ops.Update):
        one = operation.tokens == 1
        found |= {
            "first update": holding.columns == operation.tokens,
            "one token": one,
            "several tokens": not one,
            "window": operation.window is not None,
            "array asked for": operation.return_array,
            "more than max_size": operation.tokens > (holding.max_size or operation.tokens),
            "wrapped one token": one and holding.wrapped,
            "wrapped several tokens": not one and holding.wrapped,
            "pending one token": one and holding.pending,
            "pending several tokens": not one and holding.pending,
        }
    if isinstance(operation, ops.Filter):
        found |= {
            "a fork": len(set(operation.rows)) < len(operation.rows),
            "no rows left": not operation.rows,
            "pending filter": holding.pending,
        }
    if isinstance(operation, ops.Restore):
        found |= {"saved": operation.via == "file", "mapped": operation.via == "mapped"}
    if isinstance(operation, ops.Extract):
        found["pending extract"] = holding.pending
    if isinstance(operation, ops.Extend):
        found["pending extend"] = holding.pending
    return [situation for situation, holds in found.items() if holds]
