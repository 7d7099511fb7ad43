"""Mistakes of sharing: a value that changes under its holder, a copy that is none, an array that is stale."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

ALL = ("KVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache")


# -- stale, or changed in place -------------------------------------------------------------------


@breaks("BatchKVCache.offset", "BatchRotatingKVCache.offset", wrong="the offset is an array made once and not refreshed", seen="offset")
def offset_stale(original: Any, self: Any) -> Any:
    now = original(self)
    made = self.__dict__.setdefault("_made", now)
    return made if made.size == now.size else now


@breaks("BatchKVCache.offset", "BatchRotatingKVCache.offset", wrong="the offset is one array, refreshed in place when asked for", seen="aliased")
def offset_refreshed_in_place(original: Any, self: Any) -> Any:
    now = original(self)
    made = self.__dict__.get("_made")
    if made is None or made.size != now.size:
        self._made = now
        return now
    made[...] = now
    return made


def _one_array(original: Any, self: Any) -> Any:
    return self.__dict__.setdefault("_made", original(self))


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
    if self.left_padding.size == len(self._pads):
        self.left_padding[...] = mx.array(self._pads, dtype=mx.int32)


# -- the buffers ----------------------------------------------------------------------------------


@breaks(*(f"{kind}.update_and_fetch" for kind in ALL), wrong="the last fetch is a view that the next update writes into", seen="aliased")
def fetch_is_live(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    fetched = original(self, keys, values)
    for held, now in zip(self.__dict__.get("_fetched", ()), fetched, strict=False):
        if held.shape[0] == now.shape[0] and held.shape[2] <= now.shape[2] and held.dtype == now.dtype:
            held[...] = now[..., -held.shape[2] :, :]
    self._fetched = fetched
    return fetched


def _live_buffers(original: Any, self: Any) -> Any:
    return (self.keys, self.values, *original(self)[2:])


def _takes_the_buffers(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made.keys, made.values = state[:2]
    if cls.__name__ == "KVCache":
        made.offset = state[2]
    return made


@breaks(
    "append.overwrite",
    kinds="RotatingKVCache",
    wrong="a state holds the buffers, which updates write into",
    seen="aliased",
    also={"RotatingKVCache.state": _live_buffers},
)
def state_is_live(original: Any, buffer: mx.array, columns: mx.array, start: int) -> mx.array:
    buffer[..., start : start + columns.shape[2], :] = columns
    return buffer


@breaks("BatchKVCache.filter", "BatchRotatingKVCache.filter", wrong="rows are filtered inside of arrays that were handed out", seen="aliased")
def filtered_in_place(original: Any, self: Any, rows: Any) -> None:
    fetched = self.__dict__.get("_fetched")
    original(self, rows)
    if fetched is not None and rows:
        fetched[...] = fetched[mx.array([rows[0]] * fetched.shape[0])]


# -- copies ---------------------------------------------------------------------------------------


@breaks(*(f"{kind}.__deepcopy__" for kind in ALL), wrong="a copy is the cache itself")
def copy_is_the_cache(original: Any, self: Any, memo: Any) -> Any:
    return self


@breaks("RotatingKVCache.__deepcopy__", "BatchRotatingKVCache.__deepcopy__", wrong="a copied ring shares its buffers and writes into them")
def copy_shares_the_buffers(original: Any, self: Any, memo: Any) -> Any:
    made = type(self).__new__(type(self))
    made.__dict__.update(self.__dict__)
    return made
