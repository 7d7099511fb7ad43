"""`python -m conformance.meta`: hunt every mutant and print how each was caught; exit 1 if one survives."""

from __future__ import annotations

import sys

from conformance.meta.gaps import GAPS
from conformance.meta.hunt import Hunt, hunt_all
from conformance.meta.registry import MUTANTS


def line(name: str, hunt: Hunt) -> str:
    """`trim_clipped[KVCache]  refusal  4 steps  13 sequences  trim of more than is there is clipped`."""
    caught = hunt.found.observable if hunt.found else "SURVIVED"
    return f"{name:<58} {caught:<14} {hunt.steps:>5} {hunt.sequences:>9}  {MUTANTS[name].wrong}"


def main(wanted: list[str]) -> int:
    """Hunt the mutants whose names begin with one of the words given, or all; the exit code."""
    names = [name for name in MUTANTS if not wanted or name.startswith(tuple(wanted))]
    hunted = [name for name in names if name not in GAPS]
    print(f"{'mutant':<58} {'caught by':<14} {'steps':>5} {'sequences':>9}  what is wrong")
    survivors = 0
    for name, hunt in hunt_all(hunted, small=True):
        print(line(name, hunt), flush=True)
        survivors += hunt.found is None
    for name in (name for name in names if name in GAPS):
        print(f"{name:<58} gap: {GAPS[name]}")
    print(f"{len(hunted)} mutants hunted, {survivors} survived, {len(names) - len(hunted)} known gaps")
    return 1 if survivors or not names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
