"""The situations that are recorded from upstream, an operation a file, and those that it gets wrong."""

from conformance.situations import copies, deviations, masks, merges, padding, rows, trims, updates
from conformance.situations.build import Deviation, Situation

SITUATIONS: tuple[Situation, ...] = (
    *updates.SITUATIONS,
    *masks.SITUATIONS,
    *merges.SITUATIONS,
    *padding.SITUATIONS,
    *rows.SITUATIONS,
    *trims.SITUATIONS,
    *copies.SITUATIONS,
)
DEVIATIONS: tuple[Deviation, ...] = deviations.DEVIATIONS

__all__ = ["DEVIATIONS", "SITUATIONS", "Deviation", "Situation"]
