"""Saves and loads at their limits: what cannot be loaded is not saved, and an error says what became of the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlximpl
from mlximpl import safetensors_reader
from mlximpl.cache_list import DEPTH_MAX


def fed(tokens: int) -> mlximpl.KVCache:
    cache = mlximpl.KVCache()
    cache.update_and_fetch(mx.ones((1, 2, tokens, 64)), mx.ones((1, 2, tokens, 64)))
    return cache


def refused_before_a_byte(path: Path, cache: Any, words: str) -> None:
    mlximpl.save_prompt_cache(path, [fed(1)])
    before = path.read_bytes()
    with pytest.raises(ValueError, match=words):
        mlximpl.save_prompt_cache(path, [cache])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_may_not_be_read_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opened = tmp_path / "cache.safetensors", os.open

    def no_folders(name: Any, *arguments: Any, **named: Any) -> int:
        if os.path.isdir(name):
            raise PermissionError(13, "Permission denied", name)
        return opened(name, *arguments, **named)

    mlximpl.save_prompt_cache(path, [fed(1)], {"v": "1"})
    monkeypatch.setattr(os, "open", no_folders)
    mlximpl.save_prompt_cache(path, [fed(1)], {"v": "2"})
    assert mlximpl.load_prompt_cache(path, return_metadata=True)[1] == {"v": "2"}


@pytest.mark.parametrize("mappable", [False, True])
def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mappable: bool) -> None:
    """After MLX has looked at the header, and before it reads the tensors: then it raises an error of its own."""
    path, loaded = tmp_path / "cache.safetensors", safetensors_reader._loaded

    def cut_then(*arguments: Any) -> Any:
        found = loaded(*arguments)
        assert found
        os.truncate(path, 200_000)
        return found

    mlximpl.save_prompt_cache(path, [fed(3000)], mappable=mappable)
    monkeypatch.setattr(safetensors_reader, "_loaded", cut_then)
    with pytest.raises(mlximpl.PromptCacheFileError, match="has become shorter"):
        mlximpl.load_prompt_cache(path)


def test_what_mlx_cannot_read_is_an_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("[read] Unable to read from file.")

    path = tmp_path / "cache.safetensors"
    mlximpl.save_prompt_cache(path, [fed(3)])
    monkeypatch.setattr("mlximpl.load_prompt_file.read_tensors", broken)
    with pytest.raises(OSError, match="Unable to read") as caught:
        mlximpl.load_prompt_cache(path)
    assert caught.value.filename == str(path)


def test_a_folder_that_is_not_there_is_named_as_given(tmp_path: Path) -> None:
    path = tmp_path / "none" / "cache.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        mlximpl.save_prompt_cache(path, [fed(1)])
    assert caught.value.filename == os.path.realpath(path)


def test_more_rows_than_are_loaded_are_not_saved(tmp_path: Path) -> None:
    rows = [1] * (2**16 + 1)
    for cache in (mlximpl.BatchKVCache(rows), mlximpl.BatchRotatingKVCache(4, rows), mlximpl.ArraysCache(1, rows)):
        refused_before_a_byte(tmp_path / "cache.safetensors", cache, "65537 rows, and a file holds at most 65536")


def test_more_axes_than_are_loaded_are_not_saved(tmp_path: Path) -> None:
    cache = mlximpl.ArraysCache(1)
    cache[0] = mx.zeros([1] * 33)
    refused_before_a_byte(tmp_path / "cache.safetensors", cache, "33 axes, and a file holds at most 32")


@pytest.mark.parametrize("mappable", [False, True])
def test_lists_are_saved_as_deep_as_a_state_holds_them(tmp_path: Path, mappable: bool) -> None:
    cache: Any = fed(2)
    for _ in range(DEPTH_MAX):
        cache = mlximpl.CacheList(cache)
    assert mlximpl.CacheList.from_state(cache.state).size() == 2
    mlximpl.save_prompt_cache(tmp_path / "cache.safetensors", [cache], mappable=mappable)
    (loaded,) = mlximpl.load_prompt_cache(tmp_path / "cache.safetensors")
    assert repr(loaded) == repr(cache)


def test_a_child_that_is_not_there_is_named() -> None:
    with pytest.raises(IndexError, match="child 7, but the list has 1 caches"):
        mlximpl.CacheList(mlximpl.KVCache())[7]


def test_words_that_are_no_words_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8))
    wrong: Any
    for wrong in (["ro"], None, b"ro"):
        with pytest.raises(ValueError, match="mode must be one of"):
            mlximpl.MappedFile(path, wrong)
    with pytest.raises(ValueError, match="a str or a path"):
        mlximpl.MappedFile(os.fsencode(path))  # type: ignore[arg-type]
    with mlximpl.MappedFile(path) as mapped:
        for wrong in (["FREE"], None):
            with pytest.raises(ValueError, match="advice must be one of"):
                mapped.advise(0, 8, wrong)
