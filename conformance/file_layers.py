"""A layer's cache at work, before it is saved and after it is loaded; of any module with mlx-lm's cache classes.

Steps are plain data, `[what, how much]`, and so is what is seen at each:

    ["feed", 2]         make_mask(2), then an update of 2 tokens a row
    ["trim", 2]         drop the newest 2 tokens
    ["slide", 0]        maybe_trim_front() of a ChunkedKVCache
    ["fill", 1]         put new numbers into slot 1 of an ArraysCache
    ["lengths", [2, 3]] prepare(lengths=[2, 3]) of an ArraysCache
    ["advance", 2]      advance(2) of an ArraysCache
    ["mask", 3]         make_mask(3) of an ArraysCache
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from conformance.compare import written_out
from conformance.payload import PAD, Config, Ints, Storage, decode, encode

Step = Sequence[Any]
Seen = dict[str, Any]

BATCHED = ("BatchKVCache", "BatchRotatingKVCache")


class FileFault(Exception):
    """A cache that does not show what it should, or a situation that is written wrong."""


@dataclass
class Layer:
    """One cache, and the tokens that it was fed."""

    cache: Any
    kind: str
    config: Config
    tags: list[int]
    """The tag of each row."""
    tokens: list[int]
    """How many tokens each row has; below 0, the left pads still to come."""
    fills: int = 0
    """How often a slot was filled."""
    dtypes: tuple[str, ...] = ()
    """Of an ArraysCache, by slot."""
    layers: list[Layer] = field(default_factory=list)
    """Of a CacheList."""

    def step(self, step: Step) -> Seen:
        """Do one step and say what was seen."""
        what, much = step
        if what == "feed":
            return self._feed(much)
        if what == "trim":
            self.cache.trim(much)
            self.tokens = [n - much for n in self.tokens]
            return {"offset": self.offset()}
        if what == "slide":
            self.cache.maybe_trim_front()
            return {"offset": self.offset(), "start_position": self.cache.start_position}
        if what == "fill":
            self.cache[much] = filled(self.tags, much, self.fills, self.dtypes[much])
            self.fills += 1
            return {"slot": slot(self.cache[much])}
        if what == "lengths":
            self.cache.prepare(lengths=much)
        elif what == "advance":
            self.cache.advance(much)
        elif what == "mask":
            mask = self.cache.make_mask(much)
            return {"mask": None if mask is None else np.array(mask).tolist()}
        else:
            raise FileFault(f"no step is called {what!r}")
        return {}

    def offset(self) -> int | list[int]:
        """The offset, of a batch one a row."""
        offset = self.cache.offset
        return np.array(offset).tolist() if isinstance(offset, mx.array) else int(offset)

    def _feed(self, n: int) -> Seen:
        rows = len(self.tags)
        positions: Ints = np.array(self.tokens, np.int64)[:, None] + np.arange(n)
        positions[positions < 0] = PAD
        tags: Ints = np.broadcast_to(np.array(self.tags, np.int64)[:, None], positions.shape)
        keys, values = (to_mlx(encode(tags, positions, role, self.config), self.config) for role in ("key", "value"))
        masked = hasattr(self.cache, "make_mask")
        mask = self.cache.make_mask(n, window_size=None, return_array=False) if masked else None
        fetched = self.cache.update_and_fetch(keys, values)
        self.tokens = [count + n for count in self.tokens]
        columns = [self._columns(x, role) for x, role in zip(fetched, ("key", "value"), strict=True)]
        width = len(columns[0][0])
        seen: Seen = {"offset": self.offset(), "columns": columns[0]}
        visible = np.ones((rows, n, width), bool)
        if masked:
            visible = written_out(_mask(mask), rows, n, width)
            seen["visible"] = [
                [None if positions[b, i] == PAD else np.flatnonzero(visible[b, i]).tolist() for i in range(n)]
                for b in range(rows)
            ]
        for b, (of_keys, of_values) in enumerate(zip(*columns, strict=True)):
            for column in np.flatnonzero(visible[b].any(0)):
                if of_keys[column] != of_values[column]:
                    raise FileFault(f"column {column} has the key of {of_keys[column]}, the value of another token")
        return seen

    def _columns(self, fetched: Any, role: str) -> list[list[int | None]]:
        """Per row and column the position of the row's token that lies there, or None."""
        if isinstance(fetched, tuple | list):
            return self._quantized_columns(fetched, role)
        tags, positions = decode(to_numpy(fetched), role, self.config)
        own = tags == np.array(self.tags)[:, None]
        return [
            [int(p) if mine else None for p, mine in zip(row, yes, strict=True)]
            for row, yes in zip(positions, own, strict=True)
        ]

    def _quantized_columns(self, fetched: Sequence[mx.array], role: str) -> list[list[int | None]]:
        """The same where only the nearest token can be told: within one step of the quantization."""
        packed, scales, biases = fetched
        group, bits = self.cache.group_size, self.cache.bits
        x = np.array(mx.dequantize(packed, scales, biases, group_size=group, bits=bits).astype(mx.float32))
        step = np.repeat(np.abs(np.array(scales.astype(mx.float32))), group, axis=-1)
        count = max(self.tokens)
        found: list[list[int | None]] = []
        for b, tag in enumerate(self.tags):
            config = Config("float32", self.config.heads, self.config.key_dim, self.config.value_dim)
            tokens = encode(np.full((1, count), tag), np.arange(count)[None], role, config)[0]  # (H, count, D)
            away = np.abs(x[b][:, :, None] - tokens[:, None])  # (H, T, count, D)
            nearest = away.max(axis=(0, 3)).argmin(axis=1)
            within = [(away[:, t, p] <= step[b][:, t] * 1.01 + 1e-3).all() for t, p in enumerate(nearest)]
            found.append([int(p) if yes else None for p, yes in zip(nearest, within, strict=True)])
        return found


def filled(tags: Sequence[int], index: int, fills: int, dtype: str) -> mx.array:
    """The numbers of a slot, (rows, 2, 2): the row's tag, the slot, how many slots were filled before, and 1."""
    rows = [[[tag, index], [fills, 1]] for tag in tags]
    return mx.array(rows).astype(getattr(mx, dtype))


def slot(array: mx.array | None) -> Any:
    """A slot as plain data: its dtype and numbers, whole ones."""
    if array is None:
        return None
    name = str(array.dtype).removeprefix("mlx.core.")
    whole = array.astype(mx.complex64 if array.dtype == mx.complex64 else mx.float32)
    return {"dtype": name, "numbers": np.array(whole).real.astype(int).tolist()}


def content(layer: Layer) -> dict[str, Any]:
    """What a layer holds, as plain data: what `then` starts from."""
    if layer.kind == "CacheList":
        return {"class": layer.kind, "caches": [content(each) for each in layer.layers]}
    data: dict[str, Any] = {"class": layer.kind, "tags": list(layer.tags)}
    cache = layer.cache
    if layer.kind == "ArraysCache":
        data["slots"] = [slot(array) for array in cache.cache]
        for name in ("lengths", "left_padding"):
            numbers = getattr(cache, name)
            # Counts of columns to come, which mlx-lm takes below 0.
            data[name] = None if numbers is None else np.maximum(0, np.array(numbers)).tolist()
        return {**data, "dtypes": list(layer.dtypes), "fills": layer.fills}
    config = layer.config
    data["arrays"] = {"dtype": config.dtype, "heads": config.heads, "sizes": [config.key_dim, config.value_dim]}
    data["tokens"] = list(layer.tokens)
    for name in ("max_size", "keep", "chunk_size", "start_position", "group_size", "bits"):
        if hasattr(cache, name):
            data[name] = int(getattr(cache, name))
    return {**data, "offset": layer.offset()}


def resumed(cache: Any, data: dict[str, Any]) -> Layer:
    """The layer that `content` said, on a cache that was loaded. Raises FileFault where it is another kind."""
    if type(cache).__name__ != data["class"]:
        raise FileFault(f"a {type(cache).__name__}, but {data['class']} was saved")
    config = Config()
    if "arrays" in data:
        arrays = data["arrays"]
        config = Config(arrays["dtype"], arrays["heads"], *arrays["sizes"])
    layers = []
    if data["class"] == "CacheList":
        if len(cache.caches) != len(data["caches"]):
            raise FileFault(f"a list of {len(cache.caches)} caches, but {len(data['caches'])} were saved")
        layers = [resumed(cache[i], each) for i, each in enumerate(data["caches"])]
    return Layer(
        cache,
        data["class"],
        config,
        list(data.get("tags", [])),
        list(data.get("tokens", [])),
        data.get("fills", 0),
        tuple(data.get("dtypes", ())),
        layers,
    )


def carry_on(layer: Layer, data: dict[str, Any]) -> None:
    """Hold a loaded layer against what was recorded, then do the recorded steps and compare each.

    Columns that no token's query sees are free; all others hold the same token, in the same column.

    Raises FileFault for the first difference.
    """
    if layer.kind == "CacheList":
        for each, of_each in zip(layer.layers, data["caches"], strict=True):
            carry_on(each, of_each)
        return
    held = content(layer)
    for name, should in data.items():
        if name != "then" and held[name] != should:
            raise FileFault(f"{layer.kind}: {name} is {held[name]}, but should be {should}")
    for number, expected in enumerate(data["then"], 1):
        seen = layer.step(expected["step"])
        for name, value in seen.items():
            _compare(f"{layer.kind}, step {number}, {expected['step']}: {name}", name, value, expected)


def _compare(where: str, name: str, value: Any, expected: Seen) -> None:
    should = expected[name]
    if name == "columns" and "visible" in expected:
        if [len(row) for row in value] != [len(row) for row in should]:
            raise FileFault(f"{where}: {len(value[0])} of them, but should be {len(should[0])}")
        value, should = (_seen_only(rows, expected["visible"]) for rows in (value, should))
    if value != should:
        raise FileFault(f"{where} {value}, but should be {should}")


def _seen_only(rows: list[list[Any]], visible: list[list[list[int] | None]]) -> list[list[Any]]:
    """The columns that some token's query sees; others None."""
    seen = [{column for query in row if query is not None for column in query} for row in visible]
    return [[x if i in cols else None for i, x in enumerate(row)] for row, cols in zip(rows, seen, strict=True)]


def leaves(caches: list[Any]) -> list[Any]:
    """Classes, scalars, and arrays as (dtype, shape, bits)."""
    found: list[Any] = []
    for cache in caches:
        found += [type(cache).__name__, *_leaves(cache.state)]
    return found


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, list | tuple):
        yield "("
        for item in state:
            yield from _leaves(item)
        yield ")"
    elif isinstance(state, mx.array):
        yield str(state.dtype), state.shape, to_numpy(state).tobytes()
    else:
        yield state


def to_numpy(x: mx.array) -> Storage:
    """The array's bits; bfloat16 as uint16."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def to_mlx(x: Storage, config: Config) -> mx.array:
    """Stored bits as an array of the configuration's dtype."""
    made = mx.array(x)
    return made.view(mx.bfloat16) if config.dtype == "bfloat16" else made


def _mask(mask: Any) -> str | NDArray[Any]:
    if mask is None:
        return "none"
    return mask if isinstance(mask, str) else np.array(mask)
