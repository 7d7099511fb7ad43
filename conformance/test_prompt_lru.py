"""The server's store of prompts, under `mlximpl.install()`: what it hands out is what the tokens alone would make."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

import mlximpl

theirs = pytest.importorskip("mlx_lm.models.cache")

Layers = Callable[[], list[Any]]
KEY = ("model", None, None)
SLOTS = 2

LAYERS: dict[str, Layers] = {
    "growing": lambda: [mlximpl.KVCache(), mlximpl.KVCache()],
    "ring": lambda: [mlximpl.RotatingKVCache(6)],
    "ring with sinks": lambda: [mlximpl.RotatingKVCache(6, keep=2)],
    "both": lambda: [mlximpl.KVCache(), mlximpl.RotatingKVCache(6), mlximpl.RotatingKVCache(9)],
    "recurrent": lambda: [mlximpl.KVCache(), mlximpl.ArraysCache(1)],
    "list": lambda: [mlximpl.CacheList(mlximpl.KVCache(), mlximpl.RotatingKVCache(6)), mlximpl.KVCache()],
    "chunks": lambda: [mlximpl.ChunkedKVCache(4), mlximpl.KVCache()],
    "mlx-lm's": lambda: [theirs.KVCache(), theirs.RotatingKVCache(6)],
}
ANY = pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS.keys())


@pytest.fixture
def store() -> Iterator[Any]:
    with mlximpl.install():
        yield theirs.LRUPromptCache(max_size=100)


def feed(caches: list[Any], tokens: list[int], start: int = 0, chunk: int = 100) -> list[Any]:
    """Feed tokens from `start` on; the columns are the tokens themselves."""
    for first in range(start, len(tokens), chunk):
        for layer in caches:
            feed_layer(layer, tokens[: first + chunk], first)
    return caches


def feed_layer(layer: Any, tokens: list[int], start: int) -> None:
    if hasattr(layer, "caches"):
        for child in layer.caches:
            feed_layer(child, tokens, start)
    elif hasattr(layer, "cache"):
        layer[0] = mx.array([tokens])  # a state that knows all that was fed
    else:
        columns = mx.array(tokens[start:], dtype=mx.float32)[None, None, :, None]
        layer.update_and_fetch(columns, columns)
        if hasattr(layer, "maybe_trim_front"):
            layer.maybe_trim_front()


def sees(layer: Any) -> Any:
    """What the next token's query sees, apart from where it lies, and the position that it gets."""
    if hasattr(layer, "caches"):
        return [sees(child) for child in layer.caches]
    if hasattr(layer, "cache"):
        return layer[0].tolist() if layer[0] is not None else None
    layer = copy.deepcopy(layer)
    offset = layer.offset
    chunked = hasattr(layer, "maybe_trim_front")
    mask = None if chunked else layer.make_mask(1, return_array=False, window_size=None)
    keys, _ = layer.update_and_fetch(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
    found: Any = keys[0, 0, :, 0].tolist()
    if chunked:
        found = found[offset // layer.chunk_size * layer.chunk_size - layer.start_position :]
    if mask is not None:
        found = [token for token, seen in zip(found, mask.reshape(-1).tolist(), strict=True) if seen]
    return offset, sorted(found)


def check(layers: Layers, found: tuple[Any, list[int]], tokens: list[int]) -> None:
    """What was found is the caches of the tokens but for the rest, of which there is some."""
    caches, rest = found
    assert rest and tokens[len(tokens) - len(rest) :] == rest
    if caches is None:
        assert rest == tokens
    else:
        fed = feed(layers(), tokens[: len(tokens) - len(rest)], chunk=1)
        assert [sees(layer) for layer in caches] == [sees(layer) for layer in fed]


@ANY
@pytest.mark.parametrize("seed", range(4))
def test_what_is_handed_out_is_exact(layers: Layers, seed: int, store: Any) -> None:
    """Conversations that share beginnings go on from what the store has, step by step or in chunks."""
    chance = random.Random(seed)
    known: list[list[int]] = [[1]]
    hits = 0
    for _ in range(60):
        tokens = chance.choice(known)[: chance.randrange(1, 30)] + [chance.randrange(1, 4)] * chance.randrange(3)
        found = store.fetch_nearest_cache(KEY, tokens)
        check(layers, found, tokens)
        caches, rest = found
        hits += caches is not None
        held = len(tokens) - len(rest)
        tokens = tokens + [chance.randrange(1, 4) for _ in range(chance.randrange(1, 5))]
        caches = feed(layers() if caches is None else caches, tokens, held, chance.choice([1, 2, 100]))
        store.insert_cache(KEY, tokens, caches)
        known.append(tokens)
    assert hits


def put(store: Any, layers: Layers, *prompts: list[int]) -> None:
    for prompt in prompts:
        store.insert_cache(KEY, prompt, feed(layers(), prompt, chunk=1))


TEN = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.mark.parametrize(
    ("tokens", "cached"),
    [
        (TEN, 9),  # exactly what is stored: the last token is fed again
        (TEN[:4], 3),
        ([*TEN[:4], 8, 8], 4),
        ([*TEN, 8, 8], 10),
        (TEN[:1], 0),
        ([7, 7], 0),
        ([], 0),
    ],
)
def test_what_can_be_trimmed_serves_every_prefix(tokens: list[int], cached: int, store: Any) -> None:
    put(store, LAYERS["growing"], TEN)
    caches, rest = store.fetch_nearest_cache(KEY, tokens)
    assert rest == tokens[cached:]
    assert (caches is not None) == (cached > 0)
    assert caches is None or [layer.offset for layer in caches] == [cached] * 2


def test_a_ring_that_cannot_go_back_leaves_it_to_a_shorter_entry(store: Any) -> None:
    put(store, LAYERS["ring"], TEN[:5], TEN)
    for tokens, cached in ((TEN, 9), (TEN[:8], 5), ([*TEN[:7], 8], 5), (TEN[:6], 5), (TEN[:3], 2)):
        caches, rest = store.fetch_nearest_cache(KEY, tokens)
        assert (caches[0].offset, rest) == (cached, tokens[cached:])
    store.insert_cache(KEY, [2, *TEN], feed(LAYERS["ring"](), [2, *TEN], chunk=1))
    assert store.fetch_nearest_cache(KEY, [2, *TEN[:6]]) == (None, [2, *TEN[:6]])


def test_prefixes_go_where_the_longer_entry_serves_them_all(store: Any) -> None:
    put(store, LAYERS["growing"], TEN[:3], TEN[:6], TEN)
    assert len(store) == 1
    assert store.nbytes == sum(layer.nbytes for layer in store.fetch_nearest_cache(KEY, TEN)[0])


@pytest.mark.parametrize("layers", ["ring", "both", "recurrent", "list", "chunks"])
def test_prefixes_stay_where_it_does_not(layers: str, store: Any) -> None:
    put(store, LAYERS[layers], TEN[:3], TEN[:6], TEN)
    # The last tokens came together, so that mlx-lm takes the layers for trimmable.
    store.insert_cache(KEY, [*TEN, 7, 7], feed(feed(LAYERS[layers](), TEN, chunk=1), [*TEN, 7, 7], len(TEN)))
    assert len(store) >= 3
    caches, rest = store.fetch_nearest_cache(KEY, [*TEN[:6], 8])
    assert rest == [8]
    check(LAYERS[layers], (caches, rest), [*TEN[:6], 8])


def test_what_is_handed_out_is_independent(store: Any) -> None:
    put(store, LAYERS["both"], TEN)
    for _ in range(2):
        caches, rest = store.fetch_nearest_cache(KEY, [*TEN, 8])
        check(LAYERS["both"], (caches, rest), [*TEN, 8])
        feed(caches, [*TEN, 8, 8, 8], len(TEN))


# --- entries that do not hold what their tokens say -----------------------------------------------


def uneven(*fed: int) -> list[Any]:
    """Growing layers, of which each was fed so many of the ten tokens."""
    return [feed([mlximpl.KVCache()], TEN[:n])[0] for n in fed]


@pytest.mark.parametrize(("fed", "held"), [((9, 9), 9), ((10, 9), 9), ((9, 8), 8), ((10, 10), 10)])
def test_an_entry_is_stored_under_what_all_layers_hold(fed: tuple[int, ...], held: int, store: Any) -> None:
    layers = uneven(*fed)
    store.insert_cache(KEY, TEN, layers)
    caches, rest = store.fetch_nearest_cache(KEY, [*TEN, 8])
    assert [layer.offset for layer in caches] == [held] * 2
    check(LAYERS["growing"], (caches, rest), [*TEN, 8])
    assert [layer.offset for layer in layers] == list(fed)


def ahead() -> list[Any]:
    return feed([mlximpl.KVCache()], [*TEN, 7])


def ring_ahead() -> list[Any]:
    return [*uneven(8), *feed([mlximpl.RotatingKVCache(4)], TEN, chunk=1)]


def state_beside_uneven() -> list[Any]:
    return [*uneven(10, 9), mlximpl.ArraysCache(1)]


def uneven_list() -> list[Any]:
    return [mlximpl.CacheList(*uneven(10, 9))]


@pytest.mark.parametrize("layers", [ahead, ring_ahead, state_beside_uneven, uneven_list, lambda: uneven(0, 0)])
def test_what_cannot_be_brought_to_one_prefix_is_not_stored(layers: Layers, store: Any) -> None:
    store.insert_cache(KEY, TEN, layers())
    assert len(store) == 0 and store.nbytes == 0
    assert store.fetch_nearest_cache(KEY, TEN) == (None, TEN)


def test_with_a_draft_model_only_what_its_decoding_accepts(store: Any) -> None:
    """mlx-lm's speculative decoding wants layers that say that they are trimmable."""
    draft = ("model", None, "draft")
    for prompt in (TEN, TEN[:3]):
        store.insert_cache(draft, prompt, feed(LAYERS["ring"](), prompt, chunk=1))
    assert store.fetch_nearest_cache(draft, [*TEN, 8]) == (None, [*TEN, 8])
    caches, rest = store.fetch_nearest_cache(draft, [*TEN[:3], 8])
    assert caches[0].is_trimmable() and rest == [8]
