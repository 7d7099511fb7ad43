"""One case, from its trials to its row."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import ModuleType

import mlx.core as mx

from conformance.bench import build
from conformance.bench.cases import Case
from conformance.bench.measure import in_turn
from conformance.bench.results import FLOOR, Row, failed, row_of
from conformance.bench.sizes import Size


def measured(case: Case, size: Size, beside: Mapping[str, ModuleType], rounds: int, seed: int) -> Row:
    """One case on every module and its floor; where one raises, a row that says which and how."""
    try:
        trials = {name: case.on(module, size) for name, module in beside.items()} | {FLOOR: case.floor(size)}
        return row_of(case, in_turn(trials, min(rounds, case.rounds), Random(f"{seed} {case.name}")))
    except Exception as error:
        return failed(case, error)
    finally:
        build.forget_numbers()
        mx.clear_cache()
