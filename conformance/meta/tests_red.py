"""Hunting mutants with tests: does the one that is named go red?"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from conformance.meta import mutants_by_tests
from conformance.meta.registry import by_name

BY_TESTS = by_name([mutants_by_tests])
TESTS = Path(__file__).parent.parent


def go_red(names: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Whether each mutant's test fails with it, as many at a time as there are cores, two at most."""
    wanted = list(names)
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        yield from zip(wanted, pool.map(_goes_red, wanted), strict=True)


def _goes_red(name: str) -> bool:
    import pytest

    mutant = BY_TESTS[name]
    with mutant.applied(), contextlib.redirect_stdout(io.StringIO()):
        code = pytest.main([f"{TESTS}/{mutant.kind}", "-q", "-x", "-p", "no:cacheprovider"])
    return code == pytest.ExitCode.TESTS_FAILED
