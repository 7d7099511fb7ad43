"""Mistakes of sharing: a value that changes under its holder, a copy that is none, an array that is stale."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

ALL = ("KVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache")


# -- stale, or changed in place -------------------------------------------------------------------


@breaks(
    "BatchKVCache.offset",
    "BatchRotatingKVCache.offset",
    wrong="the offset is an array made once and not refreshed",
    seen="offset offsets",
)
def offset_stale(original: Any, self: Any) -> Any:
    now = original(self)
    made = self.__dict__.setdefault("_made", now)
    return made if made.size == now.size else now


@breaks(
    "BatchKVCache.offset",
    "BatchRotatingKVCache.offset",
    wrong="the offset is one array, refreshed in place when asked for",
    seen="aliased",
)
def offset_refreshed_in_place(original: Any, self: Any) -> Any:
    now = original(self)
    made = self.__dict__.get("_made")
    if made is None or made.size != now.size:
        self._made = now
        return now
    made[...] = now
    return made


def _one_array(original: Any, self: Any) -> Any:
    now = original(self)
    made = self.__dict__.setdefault("_made", now)
    if made.size != now.size:
        made = self._made = now
    return made


@breaks(
    "BatchKVCache.update_and_fetch",
    wrong="the offset that was handed out is moved in place",
    seen="aliased",
    also={"BatchKVCache.offset": _one_array},
)
def offset_moved_in_place(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    fetched = original(self, keys, values)
    self.offset[...] = mx.array(self._offsets, dtype=mx.int32)
    return fetched


@breaks(
    "BatchRotatingKVCache.finalize",
    wrong="the left padding that was handed out is moved in place",
    seen="aliased",
    also={"BatchRotatingKVCache.left_padding": _one_array},
)
def left_padding_moved_in_place(original: Any, self: Any) -> None:
    original(self)
    self.left_padding[...] = mx.array(self._pads, dtype=mx.int32)


# -- the buffers ----------------------------------------------------------------------------------


@breaks(
    *(f"{kind}.update_and_fetch" for kind in ALL),
    wrong="the last fetch is a view that the next update writes into",
    seen="aliased",
)
def fetch_is_live(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    fetched = original(self, keys, values)
    for held, now in zip(self.__dict__.get("_fetched", ()), fetched, strict=False):
        if held.shape[0] == now.shape[0] and held.shape[2] <= now.shape[2] and held.dtype == now.dtype:
            held[...] = now[..., -held.shape[2] :, :]
    self._fetched = fetched
    return fetched


def _written_in_place(original: Any, buffer: mx.array, columns: mx.array, start: int) -> mx.array:
    buffer[..., start : start + columns.shape[2], :] = columns
    return buffer


@breaks(
    "KVCache.state",
    "RotatingKVCache.state",
    wrong="a state holds the buffers, and updates write into them",
    seen="aliased",
    also={"append.overwrite": _written_in_place},
)
def state_is_live(original: Any, self: Any) -> Any:
    state = original(self)
    full = self.keys is not None and (type(self).__name__ == "KVCache" or self.keys.shape[2] == state[0].shape[2])
    return (self.keys, self.values, *state[2:]) if full else state


# -- copies ---------------------------------------------------------------------------------------


@breaks(*(f"{kind}.__deepcopy__" for kind in ALL), wrong="a copy is the cache itself")
def copy_is_the_cache(original: Any, self: Any, memo: Any) -> Any:
    return self


@breaks(
    *(f"{kind}.__deepcopy__" for kind in ALL),
    wrong="a copy shares its buffers, and both write into them",
    also={"append.overwrite": _written_in_place},
)
def copy_shares_the_buffers(original: Any, self: Any, memo: Any) -> Any:
    made = object.__new__(type(self))
    made.__dict__.update(self.__dict__)
    return made


@breaks(
    "RotatingKVCache.from_state",
    "BatchRotatingKVCache.from_state",
    wrong="a restored ring is taken to be in temporal order",
)
def restored_in_slot_order(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made._ring = made._ring.in_order(made._ring.stored)
    return made


@breaks("RotatingKVCache.from_state", wrong="a restored ring forgets the pads that a trim left")
def restored_without_pads(original: Any, cls: Any, state: Any) -> Any:
    return original(cls, state[:6] if len(state) == 7 else state)


@breaks(
    "RotatingKVCache.from_state",
    wrong="a restored ring forgets its sinks",
    seen="visible columns values refusal trimmable",
)
def restored_without_sinks(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made._ring = made._ring._replace(keep=0)
    return made


@breaks(
    "BatchRotatingKVCache.from_state", wrong="a restored ring's offsets count the columns held", seen="offset offsets"
)
def restored_counting_columns(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made._offsets = tuple(min(o, made._ring.stored - p) for o, p in zip(made._offsets, made._pads, strict=True))
    return made


@breaks("BatchKVCache.from_state", wrong="a restored batch forgets the left pads due", seen="offset offsets")
def restored_without_left_pads_due(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    if made.keys is None:
        made._pads = made._offsets = tuple(0 for _ in made._pads)
    return made
