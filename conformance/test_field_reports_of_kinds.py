"""What was reported of the kinds beside the four core ones and of files, in the order of the reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import mlximpl


def tokens(first: int, count: int, size: int = 32) -> mx.array:
    """Keys or values (1, 1, N, D) that show their positions."""
    return mx.broadcast_to(mx.arange(first, first + count)[None, None, :, None], (1, 1, count, size)).astype(mx.float32)


def feed(cache: Any, *counts: int, size: int = 32) -> Any:
    """The last fetch."""
    fetched = None
    for count in counts:
        fetched = cache.update_and_fetch(tokens(cache.offset, count, size), tokens(cache.offset, count, size))
    return fetched


def positions(fetched: Any) -> list[int]:
    seen: Any = fetched[0][0, 0, :, 0].tolist()
    return [int(p) for p in seen]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("size", [32, 64, 96, 128, 192])
def test_d10_every_width_fits_every_head(bits: int, size: int) -> None:
    cache = mlximpl.QuantizedKVCache(group_size=32, bits=bits)
    (words, scales, biases), _ = feed(cache, 3, 1, size=size)
    assert words.shape == (1, 1, 4, size * bits // 32)
    found = mx.dequantize(words, scales, biases, group_size=32, bits=bits)
    assert mx.allclose(found, tokens(0, 4, size), atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("metadata", [{}, {"a": "b"}])
def test_d11_a_file_is_what_it_holds_with_metadata_or_without(
    layers: int, metadata: dict[str, str], tmp_path: Path
) -> None:
    caches = [mlximpl.KVCache() for _ in range(layers)]
    for cache in caches:
        feed(cache, 3)
    mlximpl.save_prompt_cache(tmp_path / "file", caches, metadata)
    loaded, found = mlximpl.load_prompt_cache(tmp_path / "file", return_metadata=True)
    assert [cache.offset for cache in loaded] == [3] * layers
    assert found == metadata


@pytest.mark.parametrize("filled", [0, 1])
def test_d12_an_unfilled_slot_is_merged_and_extracted(filled: int) -> None:
    solos: list[Any] = [mlximpl.ArraysCache(2) for _ in range(2)]
    for i, solo in enumerate(solos):
        solo[filled] = mx.full((1, 3), i + 1)
    batch = solos[0].merge([*solos, mlximpl.ArraysCache(2)])
    assert batch[1 - filled] is None and batch[filled].tolist() == [[1] * 3, [2] * 3, [0] * 3]
    row = batch.extract(1)
    assert row[1 - filled] is None and row[filled].tolist() == [[2] * 3]


def test_r1_a_slid_chunk_does_not_give_back_what_it_has_dropped() -> None:
    layers: list[Any] = [mlximpl.KVCache(), mlximpl.ChunkedKVCache(8)]
    for _ in range(6):
        layers[1].maybe_trim_front()
        for layer in layers:
            feed(layer, 4)
    with pytest.raises(ValueError, match="trim 20 of all layers, but layer 1"):
        mlximpl.trim_prompt_cache(layers, 20)
    assert [layer.offset for layer in layers] == [24, 24]
    assert mlximpl.trim_prompt_cache(layers, 8) == 8
    assert [layer.offset for layer in layers] == [16, 16]


def test_r2_tokens_that_were_trimmed_do_not_come_back() -> None:
    cache = mlximpl.ConcatenateKVCache()
    feed(cache, 4)
    assert cache.trim(2) == 2
    assert positions(feed(cache, 1)) == [0, 1, 2]


@pytest.mark.parametrize("kind", ["QuantizedKVCache", "ConcatenateKVCache", "ChunkedKVCache", "ArraysCache"])
def test_r4_many_steps_leave_no_growing_graph(kind: str, tmp_path: Path) -> None:
    cache: Any = {
        "QuantizedKVCache": mlximpl.QuantizedKVCache(32, 8),
        "ConcatenateKVCache": mlximpl.ConcatenateKVCache(),
        "ChunkedKVCache": mlximpl.ChunkedKVCache(16),
        "ArraysCache": mlximpl.ArraysCache(1, [0, 1]),
    }[kind]

    def decode(steps: int) -> int:
        """How many lines the graph behind the state has then."""
        for step in range(steps):
            if kind == "ArraysCache":
                cache[0] = mx.full((2, 4), step)
                cache.advance(1)
                mx.eval(cache[0])
                continue
            if kind == "ChunkedKVCache":
                cache.maybe_trim_front()
            mx.eval(feed(cache, 1))
        leaves = [leaf for leaf in _leaves(cache.state) if isinstance(leaf, mx.array)]
        path = str(tmp_path / "graph.dot")
        export: Any = mx.export_to_dot
        export(path, *leaves)
        return len(Path(path).read_text(encoding="utf-8").splitlines())

    assert decode(3) + 2 >= decode(300)


def _leaves(state: Any) -> list[Any]:
    return [leaf for each in state for leaf in _leaves(each)] if isinstance(state, (tuple, list)) else [state]


def saved(path: Path) -> bytes:
    caches = [mlximpl.KVCache(), mlximpl.RotatingKVCache(8)]
    for cache in caches:
        feed(cache, 3)
    mlximpl.save_prompt_cache(path, caches, {"model": "m"})
    return path.read_bytes()


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda content: content[:-5],
    "another class name": lambda content: content.replace(b'"RotatingKVCache"', b'"RotatingKVCachf"'),
    "another layer count": lambda content: content.replace(b'"1.1":"RotatingKVCache"', b'"3.1":"RotatingKVCache"'),
    "a wrong shape": lambda content: content.replace(b"[1,1,3,32]", b"[1,1,4,32]"),
    "a header length beyond the file": lambda content: (10**9).to_bytes(8, "little") + content[8:],
    "nothing": lambda content: b"",
    "text": lambda content: b"this is no cache at all",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_r6_a_file_that_is_wrong_is_named_with_what_is_wrong(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.safetensors"
    content = saved(path)
    changed = WRONG[wrong](content)
    assert changed != content
    path.write_bytes(changed)
    for how in ({}, {"mmap": True}):
        with pytest.raises(mlximpl.PromptCacheFileError, match=r"prompt\.safetensors: \S+"):
            mlximpl.load_prompt_cache(path, **how)


def test_r7_a_class_of_another_module_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompt.safetensors"
    state = {"0.0": mx.zeros((1, 1, 1, 4)), "0.1": mx.zeros((1, 1, 1, 4)), "0.2": mx.array(1)}
    names = {"1.0": "PagedKVCache", "2.0": "", "2.1.0": "0.2", "2.1.1": "scalar"}
    mx.save_safetensors(str(path), state, names)
    with pytest.raises(mlximpl.PromptCacheFileError, match=r"PagedKVCache.*RotatingKVCache"):
        mlximpl.load_prompt_cache(path)


def test_r8_a_layer_that_cannot_be_quantized_stays_as_it_is() -> None:
    """A caller finds `to_quantized` by asking for it, so a ring that lacks it goes on."""
    layers: list[Any] = [mlximpl.KVCache(), mlximpl.RotatingKVCache(8)]
    for layer in layers:
        feed(layer, 3)
    layers = [layer.to_quantized(group_size=32) if hasattr(layer, "to_quantized") else layer for layer in layers]
    assert [type(layer).__name__ for layer in layers] == ["QuantizedKVCache", "RotatingKVCache"]
    assert [layer.offset for layer in layers if feed(layer, 1)] == [4, 4]


def test_r11_a_saved_ring_gives_no_prefix_that_it_has_lost(tmp_path: Path) -> None:
    cache = mlximpl.RotatingKVCache(8)
    feed(cache, *[1] * 12)
    mlximpl.save_prompt_cache(tmp_path / "file", [cache])
    (loaded,) = mlximpl.load_prompt_cache(tmp_path / "file")
    assert not mlximpl.can_trim_prompt_cache([loaded])
    with pytest.raises(ValueError, match="trim 8"):
        mlximpl.trim_prompt_cache([loaded], 8)
    assert positions(feed(loaded, 1)) == positions(feed(cache, 1))


def test_r12_a_size_is_honoured_in_lists_or_refused() -> None:
    def model(*caches: Any) -> SimpleNamespace:
        return SimpleNamespace(make_cache=lambda: list(caches))

    (made,) = mlximpl.make_prompt_cache(model(mlximpl.CacheList(mlximpl.ArraysCache(2), mlximpl.KVCache())), 16)
    assert [type(child).__name__ for child in made.caches] == ["ArraysCache", "RotatingKVCache"]
    assert made[1].max_size == 16
    with pytest.raises(ValueError, match="ChunkedKVCache"):
        mlximpl.make_prompt_cache(model(mlximpl.ChunkedKVCache(32)), 16)


def test_p8_a_file_of_few_tokens_is_small(tmp_path: Path) -> None:
    cache = mlximpl.KVCache()
    feed(cache, 17, size=64)
    mlximpl.save_prompt_cache(tmp_path / "compact", [cache])
    mlximpl.save_prompt_cache(tmp_path / "mappable", [cache], mappable=True)
    compact, mappable = ((tmp_path / name).stat().st_size for name in ("compact", "mappable"))
    assert compact < 12_000
    assert mappable <= compact + 3 * 16_384  # keys, values and the offset
