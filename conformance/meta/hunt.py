"""Hunting one mutant with the state machines: in small batches with fixed seeds, until it is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import mlximpl
from conformance.adapters.base import Adapter
from conformance.adapters.reference import ReferenceAdapter
from conformance.adapters.surface import SurfaceAdapter
from conformance.driver import Found
from conformance.machine import Campaign, explore
from conformance.meta.mutant import Mutant
from conformance.shrink import shrink
from conformance.trace import Trace

BATCH = 100
SEQUENCES_MAX = 400


@dataclass(frozen=True)
class Hunt:
    """What came of it: `found` and `trace` are None where all the sequences passed."""

    found: Found | None
    trace: Trace | None
    sequences: int

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

    `small` shrinks what was found. The same mutant gives the same hunt with the same version of Hypothesis.
    """
    sequences = 0
    with mutant.applied() if mutant else nullcontext():
        for number, first in enumerate(range(0, sequences_max, BATCH)):
            campaign = Campaign(adapters(), stop=True)
            explore(campaign, kind, min(BATCH, sequences_max - first), number)
            if not campaign.findings:
                sequences += campaign.tally.sequences
                continue
            ((signature, (found, trace)),) = campaign.findings.items()
            sequences += campaign.tally.sequences - 1  # Hypothesis ran the last one again
            if small:
                found, trace = shrink(trace, signature, adapters())
            return Hunt(found, trace, sequences)
    return Hunt(None, None, sequences)
