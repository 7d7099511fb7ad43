"""The situations that are recorded from upstream, an operation a file, and those that it gets wrong."""

from conformance.situations import (
    copies,
    deviations,
    deviations_of_kinds,
    kinds,
    masks,
    merges,
    padding,
    rows,
    trims,
    updates,
)
from conformance.situations.build import Deviation, Situation

SITUATIONS: tuple[Situation, ...] = (
    *updates.SITUATIONS,
    *masks.SITUATIONS,
    *merges.SITUATIONS,
    *padding.SITUATIONS,
    *rows.SITUATIONS,
    *trims.SITUATIONS,
    *copies.SITUATIONS,
    *kinds.SITUATIONS,
)
DEVIATIONS: tuple[Deviation, ...] = (*deviations.DEVIATIONS, *deviations_of_kinds.DEVIATIONS)

__all__ = ["DEVIATIONS", "SITUATIONS", "Deviation", "Situation"]
