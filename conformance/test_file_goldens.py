"""Files that mlx-lm wrote: mlximpl goes on from each as mlx-lm did, and mlx-lm from what mlximpl writes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlximpl
from conformance.file_goldens import FileGolden, file_faults, find_file_goldens, load_file_golden
from conformance.file_layers import FileFault, carry_on, content, resumed, to_numpy
from conformance.file_situations import NEW, FileSituation, situations
from conformance.record_files import all_built, gone_on, record, source

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
PATHS = find_file_goldens(GOLDENS)


def name(path: Path) -> str:
    return str(path.relative_to(GOLDENS / "files").with_suffix(""))


def whole(path: Path) -> bool:
    return not load_file_golden(path).lost


every_file = pytest.mark.parametrize("path", PATHS, ids=name)
every_whole_file = pytest.mark.parametrize("path", [path for path in PATHS if whole(path)], ids=name)
every_lost_file = pytest.mark.parametrize("path", [path for path in PATHS if not whole(path)], ids=name)
every_situation = pytest.mark.parametrize("situation", situations(NEW), ids=lambda situation: situation.name)


@pytest.fixture
def mlx_lm() -> ModuleType:
    """mlx-lm's caches, made able to go on after a load: what D8 is about is no fault of a file."""
    module = pytest.importorskip("mlx_lm.models.cache")
    assert isinstance(module, ModuleType)
    return module


def able(caches: list[Any]) -> list[Any]:
    """mlx-lm's `from_state` leaves these fields out (D8)."""
    for cache in caches:
        able(list(getattr(cache, "caches", ())))
        for field in ("_lengths", "_right_padding"):
            if type(cache).__name__.startswith("Batch") and not hasattr(cache, field):
                setattr(cache, field, None)
    return caches


def goes_on(caches: list[Any], layers: list[dict[str, Any]]) -> None:
    """Raises FileFault where the caches are others, or show something else when they go on."""
    assert len(caches) == len(layers)
    for cache, data in zip(caches, layers, strict=True):
        carry_on(resumed(cache, data), data)


def state_of(cache: Any) -> Any:
    """The state of one of mlx-lm's caches. Past its size, a batch ring's count of columns says nothing more."""
    if hasattr(cache, "caches"):
        return [state_of(each) for each in cache.caches]
    state = list(cache.state)
    if type(cache).__name__ == "BatchRotatingKVCache":
        state[5] = min(state[5], cache.max_size)
    return state


def same_state(ours: Any, theirs: Any) -> None:
    """Equal scalars and equal bits: of buffers with spare columns, in the columns that both have; pads, NaN, are free.

    Of padding that is over, mlx-lm counts on below 0.
    """
    if isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            same_state(mine, other)
    elif isinstance(theirs, mx.array):
        assert ours.dtype == theirs.dtype
        mine, other = to_numpy(ours), to_numpy(theirs)
        if mine.ndim == 4:
            stored = min(mine.shape[2], other.shape[2])
            mine, other = mine[:, :, :stored], other[:, :, :stored]
            mine = np.where(np.isnan(other), other, mine)
        elif mine.ndim == 1:
            other = np.where((mine == 0) & (other < 0), mine, other)
        np.testing.assert_array_equal(mine, other)
    else:
        assert ours == theirs


# -- what is recorded -----------------------------------------------------------------------------


@every_file
def test_a_recorded_file_is_as_it_was_recorded(path: Path) -> None:
    assert list(file_faults(path)) == []


@pytest.mark.parametrize("directory", sorted({path.parent for path in PATHS}), ids=lambda path: path.name)
def test_every_recorded_file_is_written_in_the_list(directory: Path) -> None:
    version = directory.name.removeprefix("mlx-lm-")
    written = {situation.name for situation in situations(version)}
    assert {path.stem for path in directory.glob("*.json")} == written
    assert {path.stem for path in directory.glob("*.safetensors")} == written


def test_both_generations_are_recorded() -> None:
    assert {path.parent.name for path in PATHS} == {"mlx-lm-0.31.3", "mlx-lm-0.32.2"}


@every_situation
def test_the_installed_mlx_lm_records_the_same(situation: FileSituation, mlx_lm: ModuleType, tmp_path: Path) -> None:
    of = source()
    path = record(situation, tmp_path, mlx_lm, of)
    recorded = load_file_golden(GOLDENS / "files" / f"mlx-lm-{of['version']}" / path.name)
    assert load_file_golden(path).layers == recorded.layers


def test_reading_descriptions_needs_no_mlx() -> None:
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlximpl'] = None\n"
        "from pathlib import Path\n"
        "from conformance.file_goldens import file_faults, find_file_goldens\n"
        "paths = find_file_goldens(Path('goldens'))\n"
        "assert paths and not any(fault for path in paths for fault in file_faults(path))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=GOLDENS.parent, check=True)


def test_recording_needs_nothing_but_mlx_lm_and_numpy(tmp_path: Path, mlx_lm: ModuleType) -> None:
    code = (
        "import sys; sys.modules['mlximpl'] = sys.modules['hypothesis'] = sys.modules['rich'] = None\n"
        "from conformance.record_files import main\n"
        f"sys.exit(main(['--directory', {str(tmp_path)!r}]))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=GOLDENS.parent, check=True, stdout=subprocess.DEVNULL)


# -- changed descriptions and files are found -----------------------------------------------------


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The description of a copy of a golden."""
    golden = load_file_golden(GOLDENS / "files" / "mlx-lm-0.32.2" / "ring_wrapped.json")
    shutil.copy(golden.file, tmp_path)
    return Path(shutil.copy(golden.path, tmp_path))


def edited(path: Path, **fields: Any) -> FileGolden:
    data = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    path.write_text(json.dumps(data), encoding="utf-8")
    return load_file_golden(path)


def test_an_edited_description_is_found(copied: Path) -> None:
    edited(copied, description="something else")
    assert list(file_faults(copied)) == ["was not written by the recorder: record it again"]


def test_another_file_is_found(copied: Path) -> None:
    file = copied.with_suffix(".safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    assert list(file_faults(copied)) == ["the file beside it is not the one that was recorded"]


def test_a_missing_file_is_found(copied: Path) -> None:
    copied.with_suffix(".safetensors").unlink()
    assert "cannot be read" in next(file_faults(copied))


def test_a_description_without_a_field_is_found(copied: Path) -> None:
    copied.write_text("{}", encoding="utf-8")
    assert "should have exactly the fields" in next(file_faults(copied))


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 12},
        {"columns": [[8, 9, 10, 11, 4, 5, 7, 6]]},
        {"columns": [[8, 9, 10, 11, 4, 5, 6]]},
        {"visible": [[[0, 1, 2, 3, 4, 5, 6]]]},
    ],
    ids=str,
)
def test_caches_that_go_on_otherwise_are_found(copied: Path, change: dict[str, Any]) -> None:
    golden = load_file_golden(copied)
    goes_on(mlximpl.load_prompt_cache(str(golden.file)), golden.layers)
    of = golden.layers[0] if "offset" in change else golden.layers[0]["then"][0]
    of |= change
    with pytest.raises(FileFault):
        goes_on(mlximpl.load_prompt_cache(str(golden.file)), golden.layers)


# -- mlximpl reads them ---------------------------------------------------------------------------


@every_whole_file
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_mlximpl_goes_on_as_mlx_lm_did(path: Path, mmap: bool) -> None:
    golden = load_file_golden(path)
    caches, metadata = mlximpl.load_prompt_cache(str(golden.file), return_metadata=True, mmap=mmap)
    assert metadata == golden.data["metadata"]
    goes_on(caches, golden.layers)
    assert list(file_faults(path)) == [], "a file never changes under the caches loaded from it"


@every_lost_file
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_mlximpl_refuses_what_cannot_be_gone_on_from(path: Path, mmap: bool) -> None:
    file = load_file_golden(path).file
    with pytest.raises(mlximpl.PromptCacheFileError, match=file.name):
        mlximpl.load_prompt_cache(str(file), mmap=mmap)


@every_whole_file
@pytest.mark.parametrize("mappable", [False, True], ids=["compact", "mappable"])
def test_mlximpl_goes_on_from_its_own_copy(path: Path, mappable: bool, tmp_path: Path) -> None:
    golden = load_file_golden(path)
    caches, metadata = mlximpl.load_prompt_cache(str(golden.file), return_metadata=True)
    file = str(tmp_path / "copy.safetensors")
    mlximpl.save_prompt_cache(file, caches, metadata, mappable=mappable)
    again, same = mlximpl.load_prompt_cache(file, return_metadata=True, mmap=mappable, verify=True)
    assert same == golden.data["metadata"]
    goes_on(again, golden.layers)


# -- mlx-lm reads what mlximpl writes -------------------------------------------------------------


@every_whole_file
def test_mlx_lm_goes_on_from_what_mlximpl_writes(path: Path, mlx_lm: ModuleType, tmp_path: Path) -> None:
    golden = load_file_golden(path)
    file = str(tmp_path / "copy.safetensors")
    mlximpl.save_prompt_cache(file, mlximpl.load_prompt_cache(str(golden.file)), golden.data["metadata"])
    caches = able(mlx_lm.load_prompt_cache(file))
    if golden.data["source"]["version"].startswith(NEW):
        theirs = mlx_lm.load_prompt_cache(str(golden.file))
        same_state(list(map(state_of, caches)), list(map(state_of, theirs)))
    goes_on(caches, golden.layers)


@every_situation
def test_a_round_trip_through_mlx_lm(situation: FileSituation, mlx_lm: ModuleType, tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours.safetensors"), str(tmp_path / "theirs.safetensors")
    layers = all_built(situation.layers, mlximpl)
    mlximpl.save_prompt_cache(ours, [layer.cache for layer in layers], situation.metadata)
    mlx_lm.save_prompt_cache(theirs, mlx_lm.load_prompt_cache(ours))
    data = [content(layer) for layer in layers]
    for layer, plan, noted in zip(layers, situation.layers, data, strict=True):
        gone_on(layer, plan, noted)
    goes_on(mlximpl.load_prompt_cache(theirs), data)
