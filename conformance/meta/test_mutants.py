"""The harness catches mutants, finds nothing in what is whole, and notices when it is itself broken.

Hunted here are the mutants that are caught soon; `python -m conformance.meta` hunts all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

import mlximpl
from conformance.adapters.base import Adapter
from conformance.meta import harness_mutants
from conformance.meta.gaps import GAPS
from conformance.meta.hunt import BATCH, Hunt, against_the_reference, hunt, hunt_all, reference_alone
from conformance.meta.mutant import Mutant, MutantError, breaks
from conformance.meta.quick import QUICK
from conformance.meta.registry import MUTANTS, by_name
from conformance.meta.tests_red import BY_TESTS, go_red
from conformance.operations import KINDS

HARNESS = by_name([harness_mutants])


def _marked(name: str) -> Any:
    gap = GAPS.get(name)
    return pytest.param(name, marks=pytest.mark.xfail(reason=gap, run=False)) if gap else name


def _selected(request: pytest.FixtureRequest) -> list[str]:
    """The names that the tests selected are asked about."""
    here = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.module is request.module
    ]
    names = [item.callspec.params.get("name") for item in here if hasattr(item, "callspec")]
    return [name for name in names if isinstance(name, str)]


@pytest.fixture(scope="module")
def hunts(request: pytest.FixtureRequest) -> dict[str, Hunt]:
    """The hunts of all mutants that were selected, run side by side."""
    return dict(hunt_all(name for name in _selected(request) if name in (*KINDS, *MUTANTS) and name not in GAPS))


@pytest.mark.parametrize("name", QUICK)
def test_a_mutant_is_caught(name: str, hunts: dict[str, Hunt]) -> None:
    mutant, caught = MUTANTS[name], hunts[name]
    assert caught.found is not None, f"survived {caught.sequences} sequences: {mutant.wrong}"
    assert not mutant.seen or caught.found.observable in mutant.seen, caught.found.sentence()


@pytest.fixture(scope="module")
def red(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Whether the tests of all mutants that were selected go red."""
    return dict(go_red(name for name in _selected(request) if name in BY_TESTS))


@pytest.mark.parametrize("name", BY_TESTS)
def test_a_test_catches_a_mutant(name: str, red: dict[str, bool]) -> None:
    assert red[name], f"{BY_TESTS[name].kind} passes, although {BY_TESTS[name].wrong}"


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_found_in_what_is_whole(name: str, hunts: dict[str, Hunt]) -> None:
    assert hunts[name].found is None
    assert hunts[name].sequences >= BATCH


def _of(prefix: str) -> list[Any]:
    return [_marked(name) for name in HARNESS if name.startswith(prefix)]


def _hunt_harness(name: str, adapters: Callable[[], Sequence[Adapter]]) -> None:
    mutant = HARNESS[name]
    found = hunt(mutant, mutant.kind, adapters=adapters).found
    assert found is not None, mutant.wrong
    assert (found.adapter, found.against) == ("reference", "ledger")
    assert not mutant.seen or found.observable in mutant.seen, found.sentence()


@pytest.mark.parametrize("name", _of("reference"))
def test_the_ledger_catches_a_broken_reference(name: str) -> None:
    _hunt_harness(name, reference_alone)


@pytest.mark.parametrize("name", _of("unsound"))
def test_the_reference_catches_itself(name: str) -> None:
    with pytest.raises(AssertionError):
        hunt(HARNESS[name], HARNESS[name].kind, adapters=reference_alone)


@pytest.mark.parametrize("name", _of("ledger"))
def test_a_broken_ledger_is_noticed(name: str) -> None:
    _hunt_harness(name, against_the_reference)


# -- the mutants themselves -----------------------------------------------------------------------


def _held(module: ModuleType) -> dict[str, Any]:
    classes = {kind: dict(vars(getattr(module, kind))) for kind in KINDS}
    return {**vars(module), **classes}


def test_a_mutant_leaves_nothing_behind() -> None:
    before = _held(mlximpl)
    for mutant in (*MUTANTS.values(), *BY_TESTS.values()):
        with mutant.applied():
            pass
    assert _held(mlximpl) == before


def test_a_mutant_is_met_by_merged_and_extracted_caches() -> None:
    (mutant,) = breaks("KVCache.size", wrong="everything has seven columns")(lambda original, self: 7)
    with mutant.applied():
        batch = mlximpl.KVCache.merge([mlximpl.KVCache()])
        assert batch.extract(0).size() == 7
    assert batch.extract(0).size() == 0


@pytest.mark.parametrize("target", ["KVCache.no_such_method", "padding.no_such_function", "NoSuchClass.size"])
def test_a_target_that_is_gone_is_named(target: str) -> None:
    (mutant,) = breaks(target, wrong="nothing")(_nothing)
    with pytest.raises(MutantError, match=f"mlximpl has no {target}"), mutant.applied():
        pass


def _nothing(original: Any, *rest: Any) -> None: ...


def test_gaps_are_mutants() -> None:
    assert GAPS.keys() <= MUTANTS.keys() | HARNESS.keys()


def test_there_are_mutants_of_every_kind() -> None:
    kinds = [MUTANTS[name].kind for name in QUICK]
    assert all(kinds.count(kind) >= 10 for kind in KINDS)
    assert all(isinstance(mutant, Mutant) for mutant in MUTANTS.values())
