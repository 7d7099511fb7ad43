"""Files as memory: views, their bounds, advice, and what is left when the file is closed."""

import gc
import io
import json
import mmap
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from mlximpl import MappedFile

PAGE = mmap.PAGESIZE
CONTENT = bytes(range(256)) * (3 * PAGE // 256) + b"the end"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("mode", ["ro", "cow"])
def test_a_view_is_the_file_s_bytes(file: Path, mode: str) -> None:
    with MappedFile(file, mode) as mapped:
        assert (mapped.path, mapped.size, mapped.mode, mapped.closed) == (str(file), len(CONTENT), mode, False)
        for offset, length in ((0, len(CONTENT)), (5, 300), (len(CONTENT) - 7, 7), (PAGE - 1, 2), (0, 0)):
            view = mapped.view(offset, length)
            assert bytes(view) == CONTENT[offset : offset + length]
            assert view.readonly == (mode == "ro")
            assert (view.format, view.itemsize) == ("B", 1)
        assert len(mapped.view(len(CONTENT), 0)) == 0
        assert repr(mapped) == f"MappedFile({str(file)!r}, mode={mode!r})"


def test_it_is_read_only_if_nothing_else_is_said(file: Path) -> None:
    with MappedFile(str(file)) as mapped:
        assert mapped.mode == "ro"
        with pytest.raises(TypeError):
            mapped.view(0, 1)[0] = 1


def test_what_is_written_to_a_private_view_stays_in_memory(file: Path) -> None:
    with MappedFile(file, "cow") as mapped, MappedFile(file, "cow") as other:
        mapped.view(10, 4)[:] = b"mine"
        assert bytes(mapped.view(9, 6)) == CONTENT[9:10] + b"mine" + CONTENT[14:15]
        assert bytes(other.view(10, 4)) == CONTENT[10:14]
    assert file.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, 1), (0, -1), (0, len(CONTENT) + 1), (len(CONTENT), 1), (2**63, 1), (1, 2**63), (2**64, -(2**64)), (-5, 5)],
)
def test_a_view_lies_within_the_file(file: Path, offset: int, length: int) -> None:
    with MappedFile(file) as mapped:
        with pytest.raises(ValueError, match=f"{length} bytes at {offset} do not lie within the {len(CONTENT)} of"):
            mapped.view(offset, length)
        with pytest.raises(ValueError, match="do not lie within"):
            mapped.advise(offset, length, "DONTNEED")


@pytest.mark.parametrize("wrong", [1.0, "1", None, True, [1]])
def test_offsets_and_lengths_are_whole_numbers(file: Path, wrong: object) -> None:
    with MappedFile(file) as mapped:
        with pytest.raises(ValueError, match="offset must be a whole number"):
            mapped.view(wrong, 1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="length must be a whole number"):
            mapped.view(1, wrong)  # type: ignore[arg-type]
        assert bytes(mapped.view(np.int64(1), np.uint8(2))) == CONTENT[1:3]  # type: ignore[arg-type]


def test_what_cannot_be_mapped_is_refused(tmp_path: Path, file: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty is empty, and cannot be mapped"):
        MappedFile(tmp_path / "empty")
    with pytest.raises(ValueError, match="is no ordinary file"):
        MappedFile("/dev/zero")
    with pytest.raises(ValueError, match="mode must be one of ro, cow, not 'rw'"):
        MappedFile(file, "rw")
    with pytest.raises(FileNotFoundError):
        MappedFile(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        MappedFile(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is no ordinary file"):
        MappedFile(tmp_path / "pipe")


@pytest.mark.parametrize("mode", ["ro", "cow"])
def test_pages_that_are_not_needed_are_read_again(file: Path, mode: str) -> None:
    with MappedFile(file, mode) as mapped:
        before = bytes(mapped.view(0, len(CONTENT)))
        mapped.advise(0, 2 * PAGE, "DONTNEED")
        mapped.advise(PAGE, len(CONTENT) - PAGE, "DONTNEED")  # up to the end, which is no whole page
        mapped.advise(PAGE, 0, "DONTNEED")
        assert bytes(mapped.view(0, len(CONTENT))) == before == CONTENT


def test_advice_is_for_whole_pages(file: Path) -> None:
    with MappedFile(file) as mapped:
        for offset, length in ((1, PAGE), (0, PAGE - 1), (PAGE, 1), (512, 512)):
            with pytest.raises(ValueError, match=f"{length} bytes at {offset} are not whole pages of {PAGE}"):
                mapped.advise(offset, length, "DONTNEED")
        with pytest.raises(ValueError, match="advice must be one of DONTNEED, FREE, FREE_REUSABLE, not 'WILLNEED'"):
            mapped.advise(0, PAGE, "WILLNEED")


@pytest.mark.parametrize("mode", ["ro", "cow"])
def test_advice_that_the_platform_lacks_is_refused(file: Path, mode: str) -> None:
    with MappedFile(file, mode) as mapped:
        for advice in ("FREE", "FREE_REUSABLE"):
            try:
                mapped.advise(0, PAGE, advice)
            except io.UnsupportedOperation as refusal:
                assert isinstance(refusal, OSError) and isinstance(refusal, ValueError)
                assert str(refusal).startswith(f"{advice}: ")
            else:
                assert sys.platform == "darwin", f"{advice} of a mapped file is not refused"
        assert bytes(mapped.view(0, len(CONTENT))) == CONTENT


def test_a_closed_file_gives_nothing(file: Path) -> None:
    mapped = MappedFile(file)
    view = mapped.view(0, 10)
    mapped.close()
    assert mapped.closed
    for call in (lambda: mapped.view(0, 1), lambda: mapped.advise(0, PAGE, "DONTNEED"), mapped.__enter__):
        with pytest.raises(ValueError, match="is closed"):
            call()
    with pytest.raises(ValueError, match="released memoryview"):
        view[0]
    mapped.close()  # a second time does nothing
    assert (mapped.path, mapped.size, mapped.mode) == (str(file), len(CONTENT), "ro")
    assert repr(mapped).endswith("closed)")


def test_leaving_the_block_closes_it(file: Path) -> None:
    with pytest.raises(KeyError), MappedFile(file) as mapped:
        raise KeyError
    assert mapped.closed


@pytest.mark.parametrize("mode", ["ro", "cow"])
def test_what_something_else_still_uses_stays_valid(file: Path, mode: str) -> None:
    mapped = MappedFile(file, mode)
    view = mapped.view(PAGE, 100)
    part = view[10:20]
    array = np.frombuffer(mapped.view(0, 50), dtype=np.uint8)
    mapped.close()
    with pytest.raises(ValueError, match="is closed"):
        mapped.view(0, 1)
    del mapped
    gc.collect()
    assert bytes(part) == CONTENT[PAGE + 10 : PAGE + 20]
    assert array.tobytes() == CONTENT[:50]
    with pytest.raises(ValueError, match="released memoryview"):
        view[0]


def test_views_outlive_a_file_that_is_not_closed(file: Path) -> None:
    view = MappedFile(file).view(0, len(CONTENT))
    gc.collect()
    assert bytes(view) == CONTENT


def test_views_that_are_gone_are_forgotten(file: Path) -> None:
    with MappedFile(file) as mapped:
        for _ in range(10):
            mapped.view(0, 1)
        gc.collect()
        assert mapped._views == {}


def test_the_pages_live_on_when_the_file_is_replaced_or_deleted(tmp_path: Path, file: Path) -> None:
    with MappedFile(file) as mapped:
        (tmp_path / "new").write_bytes(b"new" * PAGE)
        os.replace(tmp_path / "new", file)
        assert bytes(mapped.view(0, len(CONTENT))) == CONTENT
        file.unlink()
        assert bytes(mapped.view(0, len(CONTENT))) == CONTENT


HOLE = 5 << 30
LAST = 8 << 20


def test_the_last_tensor_of_a_file_beyond_4_gib_takes_its_own_memory(tmp_path: Path) -> None:
    """In a process of its own: the memory of this one goes up and down."""
    path = tmp_path / "sparse.safetensors"
    entries = {
        "hole": {"dtype": "U8", "shape": [5, 1 << 30], "data_offsets": [0, HOLE]},
        "last": {"dtype": "U8", "shape": [LAST], "data_offsets": [HOLE, HOLE + LAST]},
    }
    header = json.dumps(entries).encode()
    with path.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.seek(HOLE, os.SEEK_CUR)
        out.write(b"abcd" * (LAST // 4))
    if path.stat().st_blocks * 512 > HOLE // 2:
        path.unlink()
        pytest.skip("this file system has no sparse files")
    script = f"""
        import json, resource, sys
        from mlximpl import MappedFile
        unit = 1 if sys.platform == "darwin" else 1024
        def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        before = peak()
        for mode in ("ro", "cow"):
            with MappedFile({str(path)!r}, mode) as mapped:
                length = int.from_bytes(mapped.view(0, 8), "little")
                start, stop = json.loads(bytes(mapped.view(8, length)))["last"]["data_offsets"]
                assert 8 + length + stop == mapped.size > 2**32
                last = mapped.view(8 + length + start, stop - start)
                assert bytes(last[:4]) == bytes(last[-4:]) == b"abcd"
                assert sum(last[::4096]) == ord("a") * ({LAST} // 4096)
                assert mapped.view(8 + length + start - 5, 5).tobytes() == bytes(5)
        print(peak() - before)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < LAST + (4 << 20)
