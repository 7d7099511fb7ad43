"""All mutants by name."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType

from conformance.meta import (
    mutants_aliasing,
    mutants_arrays,
    mutants_chunked,
    mutants_concatenate,
    mutants_files,
    mutants_list,
    mutants_mask,
    mutants_padding,
    mutants_quantized,
    mutants_refusal,
    mutants_ring,
    mutants_rows,
    mutants_sinks,
    mutants_values,
)
from conformance.meta.mutant import Mutant, MutantError

THEMES = (
    mutants_mask,
    mutants_ring,
    mutants_rows,
    mutants_padding,
    mutants_refusal,
    mutants_aliasing,
    mutants_values,
    mutants_quantized,
    mutants_concatenate,
    mutants_chunked,
    mutants_arrays,
    mutants_list,
    mutants_files,
    mutants_sinks,
)


def mutants_of(module: ModuleType) -> list[Mutant]:
    """The mutants that a module makes, in its order."""
    made = [value for value in vars(module).values() if isinstance(value, tuple)]
    return [mutant for each in made for mutant in each if isinstance(mutant, Mutant)]


def by_name(modules: Iterable[ModuleType]) -> dict[str, Mutant]:
    """The mutants of these modules. Raises MutantError for a name that comes twice."""
    found: dict[str, Mutant] = {}
    for module in modules:
        for mutant in mutants_of(module):
            if mutant.name in found:
                raise MutantError(f"two mutants are called {mutant.name}")
            found[mutant.name] = mutant
    return found


MUTANTS = by_name(THEMES)
