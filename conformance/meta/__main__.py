"""`python -m conformance.meta`: hunt every mutant, with machines or a test, and print how each was caught."""

from __future__ import annotations

import sys

from conformance.meta.gaps import GAPS
from conformance.meta.hunt import Hunt, hunt_all
from conformance.meta.registry import MUTANTS
from conformance.meta.tests_red import BY_TESTS, go_red


def line(name: str, hunt: Hunt) -> str:
    """`trim_clipped[KVCache]  refusal  4 steps  13 sequences  trim of more than is there is clipped`."""
    caught = hunt.found.observable if hunt.found else "SURVIVED"
    return f"{name:<58} {caught:<14} {hunt.steps:>5} {hunt.sequences:>9}  {MUTANTS[name].wrong}"


def main(wanted: list[str]) -> int:
    """Hunt the mutants whose names begin with one of the words given, or all; 1 if one survives."""
    names = [name for name in MUTANTS if not wanted or name.startswith(tuple(wanted))]
    hunted = [name for name in names if name not in GAPS]
    print(f"{'mutant':<58} {'caught by':<14} {'steps':>5} {'sequences':>9}  what is wrong")
    survivors = 0
    for name, hunt in hunt_all(hunted, small=True):
        print(line(name, hunt), flush=True)
        survivors += hunt.found is None
    for name in (name for name in names if name in GAPS):
        print(f"{name:<58} gap: {GAPS[name]}")
    tested = [name for name in BY_TESTS if not wanted or name.startswith(tuple(wanted))]
    for name, red in go_red(tested):
        print(f"{name:<58} {'red' if red else 'SURVIVED'}: {BY_TESTS[name].kind}  {BY_TESTS[name].wrong}", flush=True)
        survivors += not red
    count = len(hunted) + len(tested)
    print(f"{count} mutants hunted, {survivors} survived, {len(names) - len(hunted)} known gaps")
    return 1 if survivors or not (names or tested) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
