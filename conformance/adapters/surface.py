"""Any module with mlx-lm's cache classes behind the operations of a trace: `mlximpl` and `mlx_lm.models.cache`."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import numpy as np

from conformance import operations as ops
from conformance.adapters.base import AdapterError, Inputs, Observation
from conformance.adapters.reference import slot_table
from conformance.payload import Config, Floats, Storage
from reference.quantize import Quantized, dequantize

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SPARE_ROWS: dict[str, Any] = {"row_growth": 2.0, "_joined": True}
"""In mlximpl's batches of a trace: they have few rows, which rarely join often enough to get spare ones otherwise."""
EMPTY = {
    mx.float32: "float32",
    mx.float16: "float16",
    mx.bfloat16: "uint16",
    mx.int32: "int32",
    mx.bool_: "bool",
    mx.uint32: "uint32",
}


class SurfaceAdapter:
    """Drives the classes by their public methods, and reads nothing else but for the check that a refusal kept all."""

    def __init__(self, name: str, module: ModuleType, version: str) -> None:
        self.name = name
        self.version = version
        self.module = module
        self.caches: dict[str, Any] = {}
        self.fetches: dict[str, tuple[mx.array, mx.array]] = {}
        self.config = Config()
        set_device()

    def begin(self, config: Config) -> None:
        self.caches, self.fetches = {}, {}
        self.config = config

    def step(self, operation: ops.Operation, inputs: Inputs) -> Observation:
        names = [name for name in _involved(operation) if name in self.caches]
        involved = [self.caches[name] for name in names]
        # What is handed out may be made when it is asked for, so this comes before the fields are noted.
        try:
            held = [leaf for cache in involved for leaf in _snapshot(cache)]
        except Exception as error:
            return Observation(crashed=f"asked for its state, {type(error).__name__}: {error}")
        held += [leaf for name in names for leaf in _leaves(self._fetched(name), "fetch")]
        frozen = [_frozen(value) for _, value in held]
        before = [_fields(cache) for cache in involved]
        try:
            with self._spare_rows():
                name, seen = self._call(operation, inputs)
        except (ValueError, IndexError) as error:
            changed = (_changed(cache, fields) for cache, fields in zip(involved, before, strict=True))
            words = str(error) or type(error).__name__
            return Observation(refused=words, changed=next(filter(None, changed), None))
        except Exception as error:
            return Observation(crashed=f"{type(error).__name__}: {error}")
        try:
            now = ((where, _frozen(value)) for where, value in held)
            aliased = next((where for (where, is_now), was in zip(now, frozen, strict=True) if is_now != was), None)
            return replace(self._state(name, seen), aliased=aliased)
        except Exception as error:
            return Observation(crashed=f"afterwards, {type(error).__name__}: {error}")

    @contextmanager
    def _spare_rows(self) -> Iterator[None]:
        """Let batches that rows join have spare rows, where the module has such."""
        with ExitStack() as stack:
            for name in ("BatchKVCache", "BatchRotatingKVCache"):
                kind = getattr(self.module, name, None)
                if hasattr(kind, "row_growth"):
                    stack.enter_context(patch.multiple(kind, **SPARE_ROWS))
            yield

    def _call(self, operation: ops.Operation, inputs: Inputs) -> tuple[str, dict[str, Any]]:
        name = operation.cache
        cache: Any = self.caches.get(name)
        seen: dict[str, Any] = {}
        match operation:
            case ops.New():
                self.caches[name] = self._new(operation, operation.left_padding, len(operation.rows))
            case ops.Merge():
                sources = [self.caches[source] for source in operation.caches]
                kind = type(sources[0]) if sources else self.module.KVCache
                self.caches[name] = kind.merge(sources)
            case ops.Update():
                seen = self._update(cache, operation, inputs, name)
            case ops.Mask():
                seen = self._mask(cache, operation)
            case ops.Prepare():
                given = {
                    "left_padding": operation.left_padding,
                    "lengths": operation.lengths,
                    "right_padding": operation.right_padding,
                }
                cache.prepare(**{key: list(value) for key, value in given.items() if value is not None})
            case ops.Finalize():
                cache.finalize()
            case ops.Filter():
                cache.filter(list(inputs.indices))
            case ops.Extend():
                cache.extend(self.caches[operation.other])
            case ops.Extract():
                name, self.caches[operation.into] = operation.into, cache.extract(inputs.indices[0])
            case ops.Trim():
                seen = {"result": cache.trim(operation.tokens)}
            case ops.Copy():
                name, self.caches[operation.into] = operation.into, copy.deepcopy(cache)
            case ops.Restore():
                name, self.caches[operation.into] = operation.into, self._restored(cache, operation.via)
            case ops.TrimFront():
                cache.maybe_trim_front()
            case ops.ToQuantized():
                made = cache.to_quantized(group_size=operation.group_size, bits=operation.bits)
                name, self.caches[operation.into] = operation.into, made
            case _:
                raise NotImplementedError(operation.op)
        return name, seen

    def _is(self, cache: Any, kind: str) -> bool:
        """Whether the cache is of this kind, which a module need not have."""
        return isinstance(cache, getattr(self.module, kind, ()))

    def _restored(self, cache: Any, via: str | None) -> Any:
        if via is None:
            return type(cache).from_state(cache.state)
        # Only mlximpl maps files; another module's own file does for both.
        mapped = via == "mapped" and hasattr(self.module, "MappedFile")
        with TemporaryDirectory() as directory:
            path = os.path.join(directory, "cache.safetensors")
            self.module.save_prompt_cache(path, [cache], {}, **({"mappable": True} if mapped else {}))
            (loaded,) = self.module.load_prompt_cache(path, **({"mmap": True} if mapped else {}))
            mx.eval([leaf for _, leaf in _leaves(loaded.state, "state") if isinstance(leaf, mx.array)])
        return loaded

    def _fetched(self, name: str) -> list[Any]:
        """The last fetch of a cache, or of each child of a list."""
        return [fetch for path, fetch in self.fetches.items() if path == name or path.startswith(f"{name}.")]

    def _new(self, made: ops.New | ops.Child, left_padding: tuple[int, ...] | None, rows: int) -> Any:
        cls = getattr(self.module, made.kind)
        padding = list(left_padding or (0,) * rows)
        match made.kind:
            case "RotatingKVCache":
                return cls(max_size=made.max_size, keep=made.keep)
            case "BatchKVCache":
                return cls(padding)
            case "BatchRotatingKVCache":
                return cls(made.max_size, padding, **({"keep": made.keep} if made.keep else {}))
            case "QuantizedKVCache":
                return cls(group_size=made.group_size, bits=made.bits)
            case "ChunkedKVCache":
                return cls(made.chunk_size)
            case "ArraysCache":
                given = left_padding if isinstance(made, ops.New) else padding if rows > 1 or any(padding) else None
                return cls(made.slots, left_padding=None if given is None else list(given))
            case "CacheList":
                return cls(*(self._new(child, tuple(padding), rows) for child in made.children))
        return cls()

    def _update(self, cache: Any, operation: ops.Update, inputs: Inputs, path: str) -> dict[str, Any]:
        if self._is(cache, "CacheList"):
            of_each = enumerate(inputs.children)
            done = [self._update(cache[i], operation, its, f"{path}.{i}") for i, its in of_each]
            return {"children": tuple(Observation(**seen) for seen in done)}
        if self._is(cache, "ArraysCache"):
            mask = cache.make_mask(operation.tokens)
            for slot, x in enumerate(inputs.states):
                if x is not None:
                    cache[slot] = _to_mlx(x, inputs)
            cache.advance(operation.tokens)
            return {"mask": _mask(mask)}
        if self._is(cache, "ChunkedKVCache"):
            mask = None if operation.tokens == 1 else "causal"
        else:
            mask = cache.make_mask(operation.tokens, window_size=operation.window, return_array=operation.return_array)
        keys, values = cache.update_and_fetch(_to_mlx(inputs.keys, inputs), _to_mlx(inputs.values, inputs))
        self.fetches[path] = (keys, values)
        if self._is(cache, "QuantizedKVCache"):
            return {"mask": _mask(mask), **_quantized(keys, values, cache.group_size, cache.bits)}
        seen = {
            "mask": _mask(mask),
            "keys": to_numpy(keys),
            "values": to_numpy(values),
            "dtypes": (NAMES[keys.dtype], NAMES[values.dtype]),
        }
        if inputs.queries is not None and inputs.queries.size:  # of no rows MLX crashes on CUDA
            seen["attention"] = _attention(inputs.queries, keys, values, mask)
        return seen

    def _mask(self, cache: Any, operation: ops.Mask) -> dict[str, Any]:
        if self._is(cache, "CacheList"):
            children = cache.caches
            return {"children": tuple(Observation(**self._mask(child, operation)) for child in children)}
        if self._is(cache, "ArraysCache"):
            return {"mask": _mask(cache.make_mask(operation.tokens))}
        if not hasattr(cache, "make_mask"):
            raise ValueError(f"a {type(cache).__name__} makes no masks")
        mask = cache.make_mask(operation.tokens, window_size=operation.window, return_array=operation.return_array)
        return {"mask": _mask(mask)}

    def _state(self, name: str, seen: dict[str, Any]) -> Observation:
        return self._observed(self.caches[name], Observation(**seen))

    def _observed(self, cache: Any, seen: Observation) -> Observation:
        if not cache:
            raise AdapterError(f"{type(cache).__name__} is falsy")
        seen = replace(seen, unanswered=_unanswered(cache))
        if seen.unanswered is None:
            seen = replace(seen, size=cache.size(), empty=cache.empty(), trimmable=cache.is_trimmable())
        else:
            seen = replace(seen, size=None, empty=None, trimmable=None)
        if self._is(cache, "CacheList"):
            before = seen.children or (Observation(),) * len(cache.caches)
            pairs = zip(cache.caches, before, strict=True)
            return replace(seen, children=tuple(self._observed(child, its) for child, its in pairs))
        if self._is(cache, "ArraysCache"):
            states = tuple(None if x is None else to_numpy(x) for x in cache)
            return replace(seen, rows=cache.batch_size, states=states)
        rows = _rows(cache.keys)
        offsets: tuple[int, ...] = (cache.offset,)
        if isinstance(cache.offset, mx.array):
            offsets = tuple(np.array(cache.offset).tolist())
            rows = len(offsets)
        return replace(seen, rows=rows, offsets=offsets, front=getattr(cache, "start_position", None))

    def slots(self, cache: str) -> str:
        """The slots of the key buffer as `tag:position`."""
        keys = getattr(self.caches.get(cache), "keys", None)
        return slot_table(to_numpy(keys), self.config, "buffer") if isinstance(keys, mx.array) else "(no slots)"


def set_device() -> None:
    """Run on the device that MLXIMPL_DEVICE names, or on MLX's default."""
    wanted = os.environ.get("MLXIMPL_DEVICE", "")
    os.environ.setdefault("MLX_ENABLE_TF32", "0")  # float32 is compared as such, not with ten bits
    if wanted not in ("", "cpu", "gpu"):
        raise AdapterError(f"MLXIMPL_DEVICE is {wanted!r}, but should be cpu or gpu")
    if wanted:
        try:
            mx.set_default_device(mx.cpu if wanted == "cpu" else mx.gpu)
        except ValueError as error:
            raise AdapterError(f"MLXIMPL_DEVICE is {wanted}, but MLX has none here: {error}") from error


def to_numpy(x: mx.array) -> Storage:
    """The array's bits; bfloat16 as uint16."""
    if not x.size:
        return np.zeros(x.shape, np.dtype(EMPTY[x.dtype]))
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def _to_mlx(x: Storage | None, inputs: Inputs) -> mx.array:
    assert x is not None
    made = mx.array(x)
    return made.view(mx.bfloat16) if inputs.dtype == "bfloat16" else made


def _unanswered(cache: Any) -> str | None:
    """The question that raised: each must be answered, whatever the cache holds."""
    for name in ("nbytes", "size", "empty", "is_trimmable"):
        try:
            answer = getattr(cache, name)
            answer = answer() if callable(answer) else answer
        except Exception as error:
            return f"{name} raised {type(error).__name__}"
        if not isinstance(answer, int):
            return f"{name} is {answer!r}"
    return None


def _rows(keys: Any) -> int | None:
    """Rows of a buffer, or of the parts of a quantized one; None without."""
    if isinstance(keys, list | tuple):
        keys = keys[0]
    return None if keys is None else int(keys.shape[0])


def _quantized(keys: Any, values: Any, group_size: int, bits: int) -> dict[str, Any]:
    """A quantized fetch as returned, and what it stands for by the reference's arithmetic."""
    dtypes = (NAMES[keys[1].dtype], NAMES[values[1].dtype])
    parts = [tuple(to_numpy(part) for part in fetched) for fetched in (keys, values)]
    floats = [dequantize(Quantized(*part), group_size, bits) for part in parts]
    return {"keys": floats[0], "values": floats[1], "dtypes": dtypes, "parts": tuple(parts)}


def _mask(mask: Any) -> str | Storage:
    if mask is None:
        return "none"
    return mask if isinstance(mask, str) else np.array(mask)


def _attention(queries: Floats, keys: mx.array, values: mx.array, mask: Any) -> Floats:
    q = mx.array(queries).astype(keys.dtype)
    try:
        out = mx.fast.scaled_dot_product_attention(q, keys, values, scale=1.0, mask=mask)
    except ValueError:  # no refusal of the cache's: a mask or a fetch that does not fit, which its shape shows
        return np.full(queries.shape, np.nan, np.float32)
    return np.array(out.astype(mx.float32))


def _involved(operation: ops.Operation) -> list[str]:
    others = getattr(operation, "caches", ()) or (getattr(operation, "other", None),)
    return [operation.cache, *(name for name in others if name)]


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{where}[{i}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{where}.{key}")
    elif isinstance(value, mx.array) or not hasattr(value, "__dict__"):
        yield where, value
    else:
        yield from _leaves(vars(value), where)


def _frozen(value: Any) -> Any:
    if isinstance(value, mx.array):
        return (value.shape, str(value.dtype), to_numpy(value).tobytes() if value.size else b"")
    return value


def _snapshot(cache: Any) -> Iterator[tuple[str, Any]]:
    """What a caller may hold on to: the state and the offsets."""
    yield from _leaves(cache.state, "state")
    for name in ("offset", "left_padding", "lengths"):
        yield from _leaves(getattr(cache, name, None), name)


def _fields(cache: Any) -> dict[str, Any]:
    return {where: _frozen(value) for where, value in _leaves(vars(cache), type(cache).__name__)}


def _changed(cache: Any, before: dict[str, Any]) -> str | None:
    after = _fields(cache)
    return next((where for where in before.keys() | after.keys() if before.get(where) != after.get(where)), None)
