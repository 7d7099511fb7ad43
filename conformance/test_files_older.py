"""Files laid out as mlx-lm 0.31 does, put together here; those that it wrote itself are goldens."""

from pathlib import Path

import mlx.core as mx
import pytest

import mlximpl
from conformance.saved_caches import same
from mlximpl import PromptCacheFileError
from mlximpl import load_prompt_cache as load
from mlximpl.state_tree import flatten


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


def older(
    path: Path, classes: list[str], states: object, infos: object, metadata: dict[str, str] | None = None
) -> None:
    named_infos = {f"0.{name}": info for name, info in flatten(infos)}
    names = {f"2.{i}": name for i, name in enumerate(classes)}
    user = {f"1.{key}": value for key, value in (metadata or {}).items()}
    mx.save_safetensors(str(path), dict(flatten(states)), named_infos | names | user)


def zeros(*widths: int) -> list[mx.array]:
    return [mx.ones((1, 2, n, 4)) for n in widths]


def test_older_layouts(file: Path) -> None:
    older(file, ["KVCache"], [zeros(3, 3)], [""])
    assert load(file, True)[0][0].offset == 3
    older(file, ["KVCache"], [zeros(3, 3)], [""], {"a.b": "c", "0": "d"})
    assert load(file, True)[1] == {"a.b": "c", "0": "d"}
    older(file, ["RotatingKVCache"], [zeros(4, 4)], [["1", "4", "9", "2"]])
    (ring,) = load(file)
    assert (ring.keep, ring.max_size, ring.offset, ring._ring.head, ring._ring.wrapped) == (1, 4, 9, 2, True)
    older(file, ["MambaCache"], [zeros(3, 2)], [""])
    assert isinstance(load(file)[0], mlximpl.ArraysCache)
    state = [*(mx.ones((2, 1, 3, 4)) for _ in "kv"), mx.array([3, 1]), mx.array([0, 2])]
    for word, wrapped in (("True", True), ("False", False)):
        older(file, ["BatchRotatingKVCache"], [state], [["3", "3", "3", word]])
        assert load(file)[0]._ring.wrapped is wrapped
    older(file, ["CacheList"], [[zeros(3, 3), zeros(2)]], [[["KVCache", "ArraysCache"], ["", ""]]])
    assert [type(each).__name__ for each in load(file)[0].caches] == ["KVCache", "ArraysCache"]


def test_a_slid_chunk_of_an_older_file_is_read_where_its_offset_is_in_it(file: Path) -> None:
    keys = mx.concatenate([mx.ones((1, 2, 3, 4)), mx.zeros((1, 2, 5, 4))], axis=2)
    older(file, ["ChunkedKVCache"], [[keys, keys]], [["4", "5"]])
    (cache,) = load(file)
    assert (cache.offset, cache.start_position) == (8, 5) and same(list(cache.keys_and_values()), zeros(3, 3))
    unwritten = mx.zeros((1, 2, 5, 4))
    for state in (zeros(8, 8), zeros(5, 5), zeros(3, 3), [unwritten, unwritten], [keys, mx.ones(keys.shape)]):
        older(file, ["ChunkedKVCache"], [state], [["4", "5"]])
        with pytest.raises(PromptCacheFileError, match=r"cache 0 is a ChunkedKVCache that has slid, .* did not save"):
            load(file)


@pytest.mark.parametrize(
    ("classes", "states", "infos", "words"),
    [
        (["KVCache", "KVCache"], [zeros(3, 3)], [""], "2 classes for 1 states"),
        (["KVCache"], [zeros(3, 3)], ["", ""], "1 classes for 1 states and 2 meta states"),
        (["KVCache"], [zeros(3)], [""], "a KVCache, has 1 elements, not 2"),
        (["KVCache"], [zeros(3, 3)], [["1"]], "is not 0 whole numbers"),
        (["RotatingKVCache"], [zeros(3, 3)], [["1", "2", "x", "4"]], "is not 4 whole numbers"),
        (["RotatingKVCache"], [zeros(3, 3)], [["1", "2", "3", "1_0"]], "is not 4 whole numbers"),
        (["RotatingKVCache"], [zeros(3, 3)], [["1", "2", "3", "9" * 30]], "is not 4 whole numbers"),
        (["RotatingKVCache"], [zeros(3, 3)], [["1", "2", "3", "\u0663"]], "is not 4 whole numbers"),
        (["RotatingKVCache"], [zeros(3, 3)], [""], "is not 4 whole numbers"),
        (["BatchRotatingKVCache"], [zeros(3, 3, 3, 3)], [["3", "3", "3", "Perhaps"]], "True or False"),
        (["CacheList"], [[zeros(3, 3)]], [[["KVCache"], ["", ""]]], "is not class names and meta states"),
        (["CacheList"], [[zeros(3, 3)]], [[["Kv"], [""]]], "child 0 of cache 0 is a 'Kv'; what can be read is"),
        (["CacheList"], [[zeros(3, 3)]], [""], "is not class names and meta states"),
        (
            ["RotatingCache"],
            [zeros(3, 3)],
            [""],
            "cache 0 is a 'RotatingCache'; what can be read is Arr",
        ),
        (["ConcatenateKVCache"], [[mx.ones((2,)), mx.ones((2,))]], [""], "does not begin with keys"),
    ],
)
def test_older_files_that_do_not_hold_together(
    file: Path, classes: list[str], states: object, infos: object, words: str
) -> None:
    older(file, classes, states, infos)
    with pytest.raises(PromptCacheFileError, match=words):
        load(file)
