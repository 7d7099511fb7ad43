"""Caches over a file's own pages: the file stays as it was, and so do they."""

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlximpl
from conformance.saved_caches import DECODE, LAYOUTS, SITUATIONS, WAYS, decode, fed, same, saved
from mlximpl import PromptCacheFileError, dlpack, load_prompt_file
from mlximpl import load_prompt_cache as load
from mlximpl import save_prompt_cache as save
from mlximpl.state_tree import flatten


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


@contextmanager
def adopting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """As if MLX took whole pages as they are, which it does on Metal alone; here it copies them."""
    taken: list[int] = []

    def adopted(pages: memoryview) -> mx.array:
        address = np.frombuffer(pages, np.uint8).ctypes.data
        assert address % 4096 == 0 and pages.nbytes % 16384 == 0 and not pages.readonly
        taken.append(pages.nbytes)
        given: Any = pages
        return mx.array(given)

    with monkeypatch.context() as patched:
        patched.setattr(load_prompt_file, "can_adopt", lambda: True)
        patched.setattr(dlpack, "_adopted", adopted)
        yield taken


@pytest.mark.parametrize("name", SITUATIONS)
def test_whole_pages_are_cut_to_the_tensors(file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SITUATIONS[name]()
    save(file, [cache], {"a": "b"}, mappable=True)
    arrays_held = [leaf for _, leaf in flatten(saved(cache)) if isinstance(leaf, mx.array) and leaf.size]
    with adopting(monkeypatch) as taken:
        for verify in (False, True):
            caches, metadata = load(file, True, mmap=True, verify=verify)
            assert metadata == {"a": "b"} and same(saved(caches[0]), saved(cache))
    assert taken == 2 * [-(-leaf.nbytes // 16384) * 16384 for leaf in arrays_held]


def test_pages_are_checked_if_asked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(file, [fed(mlximpl.KVCache(), 300, size=64)], mappable=True)
    content = bytearray(file.read_bytes())
    content[16384 + 100] ^= 1
    file.write_bytes(content)
    with adopting(monkeypatch):
        load(file, mmap=True)
        with pytest.raises(PromptCacheFileError, match=r"tensor '0\.0' was changed"):
            load(file, mmap=True, verify=True)


def test_pages_that_mlx_does_not_take_are_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = fed(mlximpl.KVCache(), 30)
    save(file, [cache], mappable=True)
    monkeypatch.setattr(load_prompt_file, "can_adopt", lambda: True)
    monkeypatch.setattr(dlpack, "_adopted", lambda pages: None)
    assert same(saved(load(file, mmap=True)[0]), saved(cache))


def test_what_mlx_does_with_whole_pages_here() -> None:
    """On Metal it takes them; a build for the CPU alone does not, and says so by a ValueError."""
    assert dlpack.can_adopt() is mx.metal.is_available()


@pytest.mark.parametrize("mappable", LAYOUTS)
@pytest.mark.parametrize("name", DECODE)
def test_decoding_leaves_the_file_as_it_was(file: Path, name: str, mappable: bool) -> None:
    if "pending" in name or "announced" in name:
        pytest.skip("a prefill takes no more than was announced")
    save(file, [SITUATIONS[name]()], mappable=mappable)
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    (cache,) = load(file, mmap=True)
    decode(cache, 300)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == before
    assert same(saved(load(file)[0]), saved(load(file, mmap=True)[0]))


@pytest.mark.parametrize("mappable", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_cache_does_not_change_with_its_file(file: Path, mappable: bool, way: dict[str, bool]) -> None:
    cache, other = fed(mlximpl.KVCache(), 300, size=64), fed(mlximpl.KVCache(), 300, size=64)
    save(file, [cache], mappable=mappable)
    loaded = load(file, False, **way)[0]
    save(file, [other], mappable=mappable)
    assert same(saved(loaded), saved(cache)) and same(saved(load(file)[0]), saved(other))
    file.unlink()
    gc.collect()
    assert same(decode(loaded, 5), decode(cache, 5))
