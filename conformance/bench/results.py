"""What one case came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from conformance.bench.cases import Case
from conformance.bench.measure import Figures, Samples, figures, quotient

OURS, THEIRS, FLOOR = "mlximpl", "mlx-lm", "floor"


@dataclass(frozen=True)
class Ratio:
    """Of medians, with the quartiles of the ratios of each round."""

    of_medians: float
    quartiles: tuple[float, float]


@dataclass(frozen=True)
class Row:
    """A case's figures by name; `ratio` is mlx-lm / mlximpl, `to_floor` mlximpl / floor."""

    case: str
    floor_is: str
    figures: Mapping[str, Figures] = field(default_factory=dict)
    ratio: Ratio | None = None
    to_floor: Ratio | None = None
    error: str | None = None


def row_of(case: Case, samples: Mapping[str, Samples]) -> Row:
    """The figures of a case that ran."""
    return Row(
        case.name,
        case.floor_is,
        {name: figures(each) for name, each in samples.items()},
        _ratio(samples, THEIRS, OURS),
        _ratio(samples, OURS, FLOOR),
    )


def failed(case: Case, error: Exception) -> Row:
    """A case that raised."""
    return Row(case.name, case.floor_is, error=str(error) or type(error).__name__)


def _ratio(samples: Mapping[str, Samples], above: str, below: str) -> Ratio | None:
    if above not in samples or below not in samples:
        return None
    return Ratio(*quotient(samples[above], samples[below]))
