"""Affine quantization: a group of values becomes small codes, one scale and one bias.

bits = 2, a group of four (real groups have 32, 64 or 128)

values    0.0   1.0   2.0   3.1          edge = 3.1, the end farther from zero; scale about -1.03, bias 3.1
codes       3     2     1     0          value = scale * code + bias
word      0b00011011                     codes from the lowest bits up, packed into 32-bit words

The formula is that of `mlx.core.quantize`. Its page in MLX's documentation gives `(max - min) / (2**bits - 1)` as scale
and `min` as bias; MLX 0.32 goes on from there: the end of the range that is farther from zero is the bias, and the
scale is adjusted so that zero is a code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.state import Array, Quantization

Floats = NDArray[np.float32]
Words = NDArray[np.uint32]

LEAST_SCALE = np.float32(1e-7)


class Quantized(NamedTuple):
    """What stands for an array (..., D): codes in words, and a scale and a bias for each group."""

    words: Words
    """(..., D * bits / 32)."""
    scales: Array
    """(..., D / group_size), in the dtype of what was quantized."""
    biases: Array
    """(..., D / group_size)."""


def quantize(x: Array, group_size: int, bits: int) -> Quantized:
    """Quantize the last axis of x (..., D): float32, float16, or bfloat16 as the uint16 of its bits.

    Scale and bias are computed in float32 and rounded to the dtype of x afterwards; the codes come from the unrounded.

    >>> q = quantize(np.array([[0, 1, 2, 3.1]], np.float32), group_size=4, bits=2)
    >>> codes(q.words, 4, 2), q.scales.round(2), q.biases
    (array([[3, 2, 1, 0]], dtype=uint32), array([[-1.03]], dtype=float32), array([[3.1]], dtype=float32))
    """
    groups = as_float32(x).reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    low, high = groups.min(axis=-1), groups.max(axis=-1)
    codes_max = np.float32(2**bits - 1)
    low_is_farther = np.abs(low) > np.abs(high)
    edge = np.where(low_is_farther, low, high)
    scale = np.maximum((high - low) / codes_max, LEAST_SCALE)
    scale = np.where(low_is_farther, scale, -scale)
    edge_code = np.rint(edge / scale)
    zero_only = edge_code == 0
    scale = np.where(zero_only, scale, edge / np.where(zero_only, 1, edge_code)).astype(np.float32)
    bias = np.where(zero_only, np.float32(0), edge)
    steps = np.rint((groups - bias[..., None]) / scale[..., None])
    found = np.clip(steps, 0, codes_max).astype(np.uint32).reshape(x.shape)
    return Quantized(pack(found, bits), as_stored(scale, x.dtype), as_stored(bias, x.dtype))


def dequantize(q: Quantized, group_size: int, bits: int) -> Floats:
    """The float32 values (..., D) that the codes stand for."""
    size = q.scales.shape[-1] * group_size
    grouped = codes(q.words, size, bits).reshape(*q.scales.shape, group_size).astype(np.float32)
    values = as_float32(q.scales)[..., None] * grouped + as_float32(q.biases)[..., None]
    return values.reshape(*q.scales.shape[:-1], size).astype(np.float32)


def pack(found: Words, bits: int) -> Words:
    """Codes (..., D) as words (..., D * bits / 32, rounded up): a stream of bits, lowest first.

    >>> pack(np.array([[1, 2, 3, 0, 0, 0, 0, 4]], np.uint32), bits=4)
    array([[1073742625]], dtype=uint32)
    """
    stream = (found[..., None] >> np.arange(bits, dtype=np.uint32)) & 1
    length = found.shape[-1] * bits
    spare = np.zeros((*found.shape[:-1], -length % 32), np.uint32)
    stream = np.concatenate([stream.reshape(*found.shape[:-1], length), spare], axis=-1)
    stream = stream.reshape(*found.shape[:-1], -(-length // 32), 32)
    words: Words = (stream << np.arange(32, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    return words


def codes(words: Words, size: int, bits: int) -> Words:
    """The codes (..., size) in words.

    >>> codes(np.array([[1073742625]], np.uint32), size=8, bits=4)
    array([[1, 2, 3, 0, 0, 0, 0, 4]], dtype=uint32)
    """
    stream = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    stream = stream.reshape(*words.shape[:-1], words.shape[-1] * 32)[..., : size * bits]
    grouped = stream.reshape(*words.shape[:-1], size, bits)
    found: Words = (grouped << np.arange(bits, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)
    return found


def as_float32(x: Array) -> Floats:
    """The numbers of an array as stored; uint16 is the bits of bfloat16."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)


def as_stored(x: Floats, dtype: np.dtype[np.generic]) -> Array:
    """float32 rounded to a dtype, to the nearest and among equals to the even one.

    >>> hex(as_stored(np.array([1.00390625], np.float32), np.dtype(np.uint16))[0])
    '0x3f80'
    """
    if dtype == np.uint16:
        whole = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):  # a scale beyond float16 is infinite there
        return x.astype(dtype)


# -- a column of a quantized cache ----------------------------------------------------------------


def to_columns(x: Array, how: Quantization) -> Words:
    """What a quantized cache stores of keys or values (B, H, N, D): words, scales and biases end to end."""
    q = quantize(x, how.group_size, how.bits)
    return np.concatenate([q.words, _bits(q.scales), _bits(q.biases)], axis=-1)


def from_columns(columns: Array, how: Quantization) -> Quantized:
    """The three parts of stored columns (B, H, S, words + 2 groups)."""
    assert how.dtype is not None and columns.dtype == np.uint32
    words_per_group = how.group_size * how.bits // 32
    groups = columns.shape[-1] // (words_per_group + 2)
    words: Words = columns[..., : groups * words_per_group].astype(np.uint32)
    scales = columns[..., groups * words_per_group : groups * words_per_group + groups]
    biases = columns[..., groups * words_per_group + groups :]
    return Quantized(words, _from_bits(scales, how.dtype), _from_bits(biases, how.dtype))


def _bits(x: Array) -> Words:
    return np.ascontiguousarray(x).view(np.uint32 if x.dtype.itemsize == 4 else np.uint16).astype(np.uint32)


def _from_bits(bits: Array, dtype: str) -> Array:
    stored = np.dtype(dtype)
    return np.ascontiguousarray(bits.astype(np.uint32 if stored.itemsize == 4 else np.uint16)).view(stored)
