"""How a file is written: the old one or the new one, whole, and in its place."""

import gc
import os
import stat
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import mlximpl
from conformance.saved_caches import Cache, fed, same, saved
from mlximpl import atomic_file, safetensors_writer
from mlximpl import load_prompt_cache as load
from mlximpl import save_prompt_cache as save


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


@pytest.mark.parametrize("wrong", [None, 7, "text", {"a": 1}, mlximpl.KVCache(), mlximpl.CacheList(mlximpl.KVCache())])
def test_what_is_saved_is_a_list_of_caches(file: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="what is saved is a list of caches"):
        save(file, wrong)
    assert not file.exists()


class OwnCache(mlximpl.KVCache):
    pass


OTHER = type("KVCache", (), {})()


@pytest.mark.parametrize(
    ("wrong", "name"), [(None, "NoneType"), (OwnCache(), "OwnCache"), (mx.array(1), "array"), (OTHER, "KVCache")]
)
def test_other_caches_are_refused(file: Path, wrong: Any, name: str) -> None:
    save(file, [])
    before = file.read_bytes()
    for caches, what in (([mlximpl.KVCache(), wrong], "cache 1"),):
        with pytest.raises(ValueError, match=f"{what} is a {name}; what can be saved is mlximpl's ArraysCache, Batch"):
            save(file, caches)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_what_could_not_be_loaded_is_not_saved(file: Path) -> None:
    deep: Cache = mlximpl.KVCache()
    for _ in range(20):
        deep = mlximpl.CacheList(deep)
    with pytest.raises(ValueError, match="nested deeper than"):
        save(file, [deep])
    with pytest.raises(ValueError, match=r"metadata takes [0-9]+ bytes, and 100000000 are the most"):
        save(file, [], {"a": "x" * 100_000_001})
    with pytest.raises(ValueError, match=r"its header holds [0-9]+ strings, and 200000 are the most"):
        save(file, [], {f"{i:x}": "v" * 10 for i in range(200_000)})
    assert list(file.parent.iterdir()) == []


def test_depth_that_is_saved_is_loaded(file: Path) -> None:
    deep: Cache = mlximpl.KVCache()
    for _ in range(7):
        deep = mlximpl.CacheList(deep)
        save(file, [deep])
        assert same(saved(load(file)[0]), saved(deep))


def test_the_name_is_taken_as_it_is(tmp_path: Path) -> None:
    for name in ("plain", "\u00fc \U0001f600", "x" * 255, "-", ".hidden"):
        save(str(tmp_path / name), [mlximpl.KVCache()])
        assert len(load(str(tmp_path / name))) == 1
        assert len(load(tmp_path / name)) == 1
    with pytest.raises(OSError):
        save(tmp_path / ("x" * 256), [])
    assert len(list(tmp_path.iterdir())) == 5


def test_a_relative_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save("here", [])
    assert load("here") == [] and [path.name for path in tmp_path.iterdir()] == ["here"]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_permissions(file: Path) -> None:
    old = os.umask(0o027)
    try:
        save(file, [])
        assert mode_of(file) == 0o640
        for mode in (0o600, 0o666, 0o444):
            file.chmod(mode)
            save(file, [mlximpl.KVCache()])
            assert mode_of(file) == mode and len(load(file)) == 1
    finally:
        os.umask(old)


def test_a_link_stays_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "target", tmp_path / "link"
    link.symlink_to(target)
    for caches in ([], [mlximpl.KVCache()]):
        save(link, caches)
        assert link.is_symlink() and not target.is_symlink()
        assert len(load(link)) == len(load(target)) == len(caches)
    assert [path.name for path in target.parent.iterdir()] == ["target"]


def test_only_ordinary_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "folder", "null", "new/"):
        with pytest.raises(IsADirectoryError if name in ("folder", "new/") else OSError):
            save(f"{tmp_path}/{name}", [])
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "null", "pipe"]


@pytest.mark.parametrize("point", ["write", "fsync", "replace"])
def test_a_save_that_fails_leaves_the_old_file(file: Path, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(file, [fed(mlximpl.KVCache(), 3)])
    before = file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if point == "write":
            patched.setattr("mlximpl.safetensors_writer.checksum_of", fail)
        else:
            patched.setattr(os, point, fail)
        with pytest.raises(OSError, match="No space left"):
            save(file, [fed(mlximpl.KVCache(), 9)], durable=True)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_an_interrupt_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(file, [])
    before = file.read_bytes()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mlximpl.safetensors_writer.checksum_of", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(file, [fed(mlximpl.KVCache(), 9)])
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize(("durable", "mappable"), [(True, False), (False, True), (False, False)])
def test_it_is_on_the_disk_before_it_has_its_name(
    file: Path, durable: bool, mappable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If that is asked for, or if nothing would see that pages are missing."""
    done: list[str] = []
    replace = os.replace

    def sync(number: int) -> None:
        folder = stat.S_ISDIR(os.fstat(number).st_mode)
        whole = folder or b"\0" * 8 not in os.pread(number, 8, 0)
        done.append("folder" if folder else f"file, {'with' if whole else 'without'} its header")

    def rename(old: str, new: str) -> None:
        assert os.path.dirname(old) == os.path.dirname(new)
        assert len(load(old)) == 1
        done.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    if hasattr(atomic_file, "fcntl"):
        monkeypatch.setattr(atomic_file.fcntl, "fcntl", lambda number, _: sync(number))
    save(file, [fed(mlximpl.KVCache(), 3)], mappable=mappable, durable=durable)
    assert done == (["file, with its header", "rename", "folder"] if durable or mappable else ["rename"])
    done.clear()
    save(file, [fed(mlximpl.KVCache(), 3)])
    assert done == ["rename"]


@pytest.mark.parametrize("written", ["header", "start", "end", "piece"])
def test_a_file_that_lost_power_before_it_was_on_the_disk_is_refused(file: Path, written: str) -> None:
    """What was not written by then is zeros, or not in the file."""
    save(file, [fed(mlximpl.KVCache(), 3000)])
    content = file.read_bytes()
    page = 4096
    torn = {
        "header": content[:page].ljust(len(content), b"\0"),
        "start": content[: 9 * page],
        "end": content[9 * page :].rjust(len(content), b"\0"),
        "piece": content[:page] + bytes(page) + content[2 * page :],
    }
    file.write_bytes(torn[written])
    with pytest.raises(mlximpl.PromptCacheFileError):
        load(file)


def test_a_file_has_no_header_until_its_last_tensor_is_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begins: list[bytes] = []
    write = safetensors_writer._write

    def watch(stream: Any, begun: Any) -> int:
        checksum = write(stream, begun)
        stream.flush()
        begins.append(os.pread(stream.fileno(), 8, 0))
        return checksum

    monkeypatch.setattr(safetensors_writer, "_write", watch)
    save(file, [fed(mlximpl.KVCache(), 3)])
    assert begins == [bytes(8)] * 3
    assert len(load(file)) == 1


@pytest.mark.parametrize("threads", [True, False])
def test_a_file_that_is_replaced_is_let_go(file: Path, threads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its space would be taken as long as the process lives."""

    def refuse(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    def next_number() -> int:
        number = os.open(file, os.O_RDONLY)
        os.close(number)
        return number

    save(file, [])
    before = next_number()
    if not threads:
        monkeypatch.setattr(atomic_file, "start_new_thread", refuse)
    for _ in range(3):
        save(file, [mlximpl.KVCache()])
        give_up = time.monotonic() + 30
        while next_number() != before and threads and time.monotonic() < give_up:
            time.sleep(0.001)
        assert next_number() == before


def test_a_save_keeps_one_tensor_at_a_time(file: Path) -> None:
    """Pads make every tensor of this batch a copy."""
    cache = fed(mlximpl.BatchKVCache([0, 3]), 2000, rows=2, size=64)
    caches = [cache.__class__.from_state(cache.state) for _ in range(16)]
    mx.eval([each.state for each in caches])
    gc.collect()
    mx.clear_cache()
    if not hasattr(mx, "reset_peak_memory") or mx.get_active_memory() == 0:
        pytest.skip("this build of MLX does not count its memory")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    save(file, caches)
    tensor = 2 * 2 * 2000 * 64 * 4
    assert mx.get_peak_memory() - before < 4 * tensor
