"""The quantized cache: a growing cache whose columns are codes, scales and biases.

Nothing but what a column holds is new, so every operation on columns is the one of the growing cache.
"""

from __future__ import annotations

from dataclasses import replace

from reference.quantize import Quantized, from_columns, to_columns
from reference.state import Array, Cache, Quantization, kind, solo
from reference.temporal_order import temporal_slots
from reference.update import update

GROUP_SIZES = (32, 64, 128)
BITS = (2, 3, 4, 5, 6, 8)


def quantized(group_size: int = 64, bits: int = 8) -> Cache:
    """A new `QuantizedKVCache`. Raises ValueError for groups and bits that MLX does not offer."""
    if group_size not in GROUP_SIZES:
        raise ValueError(f"group_size is {group_size}, but should be one of {GROUP_SIZES}")
    if bits not in BITS:
        raise ValueError(f"bits is {bits}, but should be one of {BITS}")
    return replace(solo(), quantization=Quantization(group_size, bits))


def quantized_update(cache: Cache, keys: Array, values: Array) -> Cache:
    """The quantized cache after N more columns: `update`, of what is stored of each.

    Raises ValueError as `update` does, and for a head size that is not whole groups.

    >>> import numpy as np
    >>> x = np.arange(64, dtype=np.float32).reshape(1, 1, 2, 32)
    >>> cache = quantized_update(quantized(group_size=32, bits=8), x, x)
    >>> cache.keys.shape, fetch(cache)[0].words.shape          # 8 words, a scale and a bias for each of two columns
    ((1, 1, 2, 10), (1, 1, 2, 8))
    """
    how = _fitting(cache, keys, values)
    return update(replace(cache, quantization=how), to_columns(keys, how), to_columns(values, how))


def fetch(cache: Cache) -> tuple[Quantized, Quantized]:
    """What the update of a quantized cache returns: the parts of its keys and of its values."""
    assert cache.quantization is not None and cache.keys is not None and cache.values is not None
    return from_columns(cache.keys, cache.quantization), from_columns(cache.values, cache.quantization)


def to_quantized(cache: Cache, group_size: int = 64, bits: int = 4) -> Cache:
    """A quantized cache of the tokens of a growing solo cache, which stays as it is.

    Raises ValueError for another kind, for groups and bits that MLX does not offer and for head sizes that do not fit.
    """
    made = quantized(group_size, bits)
    if cache.batched or cache.max_size is not None or cache.quantization or cache.chunk_size:
        raise ValueError(f"to_quantized of a {kind(cache)}, but it must be a KVCache")
    if cache.keys is None or cache.values is None:
        return made
    how = _fitting(made, cache.keys, cache.values)
    order = temporal_slots(cache)
    return replace(
        made,
        keys=to_columns(cache.keys[:, :, order], how),
        values=to_columns(cache.values[:, :, order], how),
        positions=cache.positions[:, order],
        tokens=cache.tokens,
        due=cache.due,
        head=len(order),
        quantization=how,
    )


def _fitting(cache: Cache, keys: Array, values: Array) -> Quantization:
    """How the cache stores these from now on. Raises ValueError where it cannot."""
    how = cache.quantization
    assert how is not None
    for name, x in (("keys", keys), ("values", values)):
        if x.ndim != 4 or x.shape[3] == 0 or x.shape[3] % how.group_size:
            raise ValueError(f"{name} {x.shape} must be (B, H, N, D) with D in whole groups of {how.group_size}")
    given = str(keys.dtype)
    if keys.dtype != values.dtype or how.dtype not in (None, given):
        held = how.dtype or "keys and values of one dtype"
        raise ValueError(f"keys of {given} and values of {values.dtype}, but the cache holds {held}")
    return replace(how, dtype=given)
