"""What a file numbers comes back in its order, and what is below 0 stays there."""

from pathlib import Path

import pytest

import mlximpl
from conformance.saved_caches import LAYOUTS, SITUATIONS, WAYS, same, saved
from mlximpl import load_prompt_cache as load
from mlximpl import save_prompt_cache as save


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_more_than_ten_caches_come_back_in_their_order(file: Path, mappable: bool) -> None:
    caches = [make() for make in SITUATIONS.values()]
    assert len(caches) > 20
    save(file, [*caches, mlximpl.CacheList(*caches[:12])], mappable=mappable)
    for way in WAYS:
        *loaded, together = load(file, False, **way)
        for cache, each in zip(caches, loaded, strict=True):
            assert type(each) is type(cache) and same(saved(each), saved(cache))
        assert same(saved(together), [(saved(cache), type(cache).__name__) for cache in caches[:12]])


@pytest.mark.parametrize("mappable", LAYOUTS)
def test_numbers_below_0_come_back(file: Path, mappable: bool) -> None:
    """Offsets of pads due; and columns and lengths that are not known yet."""
    due = mlximpl.BatchKVCache([3, 0])
    waiting = mlximpl.BatchRotatingKVCache(4, [1, 0])
    waiting.prepare(right_padding=[0, 2])
    unknown = mlximpl.ArraysCache(1, left_padding=[0])
    unknown.prepare(lengths=[2], right_padding=[1])
    unknown.extend(mlximpl.ArraysCache(1))
    for cache in (due, waiting, unknown):
        save(file, [cache], mappable=mappable)
        for way in WAYS:
            loaded = load(file, False, **way)[0]
            assert same(loaded.state, cache.state)
            assert any("-" in repr(leaf) for leaf in cache.state)
