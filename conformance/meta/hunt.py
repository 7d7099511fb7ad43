"""Hunting one mutant with the state machines: in batches with fixed seeds, until it is found."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import get_context

import mlximpl
from conformance.adapters.base import Adapter
from conformance.adapters.reference import ReferenceAdapter
from conformance.adapters.surface import SurfaceAdapter
from conformance.driver import Found
from conformance.machine import Campaign, explore
from conformance.meta.mutant import Mutant
from conformance.meta.registry import MUTANTS
from conformance.operations import KINDS
from conformance.shrink import shrink
from conformance.trace import Trace

BATCH = 120
SEQUENCES_MAX = 600


@dataclass(frozen=True)
class Hunt:
    """What came of it: `found` and `trace` are None where all the sequences passed."""

    found: Found | None
    trace: Trace | None
    sequences: int
    """How many were run, the one that found it included."""

    @property
    def steps(self) -> int:
        return len(self.trace.steps) if self.trace else 0


def against_the_reference() -> list[Adapter]:
    """mlximpl, mutated or not, beside the reference."""
    return [ReferenceAdapter(), SurfaceAdapter("mlximpl", mlximpl, mlximpl.__version__)]


def reference_alone() -> list[Adapter]:
    """The reference before the ledger, and nothing else."""
    return [ReferenceAdapter()]


def hunt(
    mutant: Mutant | None,
    kind: str,
    *,
    sequences_max: int = SEQUENCES_MAX,
    small: bool = False,
    adapters: Callable[[], Sequence[Adapter]] = against_the_reference,
) -> Hunt:
    """Run the kind's machine until something diverges, with the mutant applied (None: unmutated).

    `small` shrinks what was found. With the same version of Hypothesis the same mutant gives the same hunt.
    """
    passed = 0
    with mutant.applied() if mutant else nullcontext():
        for number, first in enumerate(range(0, sequences_max, BATCH)):
            campaign = Campaign(adapters(), stop=True)

            def count(campaign: Campaign = campaign) -> None:
                nonlocal passed
                passed += not campaign.findings

            campaign.on_example = count
            explore(campaign, kind, min(BATCH, sequences_max - first), number)
            for signature, (found, trace) in campaign.findings.items():
                shown = shrink(trace, signature, adapters()) if small else (found, trace)
                return Hunt(*shown, passed + 1)
    return Hunt(None, None, passed)


def hunt_all(names: Iterable[str], small: bool = False) -> Iterator[tuple[str, Hunt]]:
    """Hunt mutants of mlximpl by name, as many at a time as there are cores, four at most.

    A kind for a name hunts in what is whole, and should find nothing.
    """
    wanted = list(names)
    jobs = min(4, os.cpu_count() or 1)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from zip(wanted, pool.map(_hunt_one, wanted, [small] * len(wanted)), strict=True)


def _hunt_one(name: str, small: bool) -> Hunt:
    if name in KINDS:
        return hunt(None, name, sequences_max=BATCH)
    mutant = MUTANTS[name]
    return hunt(mutant, mutant.kind, small=small)
