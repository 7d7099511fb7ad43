"""Columns in few bits: each group of a head's numbers as words, with a scale and a bias of its own.

head size 64, group_size 32, 4 bits

numbers   x0 ... x31 | x32 ... x63       words 8 uint32, scales 2, biases 2
"""

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from .checks import Heads, whole

GROUP_SIZES = (32, 64, 128)
BITS = (2, 3, 4, 5, 6, 8)
DTYPES = (mx.float16, mx.bfloat16, mx.float32)

Parts = tuple[mx.array, mx.array, mx.array]
"""Words (B, H, S, D * bits / 32) uint32, scales and biases (B, H, S, D / group_size)."""


class Quantization(NamedTuple):
    """How numbers are quantized: `bits` each, `group_size` of them with a scale and a bias."""

    group_size: int
    bits: int


def check_quantization(group_size: int, bits: int) -> Quantization:
    """Return (group_size, bits), or refuse what MLX does not offer."""
    made = Quantization(whole("group_size", group_size), whole("bits", bits))
    if made.group_size not in GROUP_SIZES:
        raise ValueError(f"group_size must be one of {GROUP_SIZES}, not {made.group_size}")
    if made.bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}, not {made.bits}")
    return made


def check_quantizable(heads: Heads, how: Quantization) -> None:
    """Refuse columns that cannot be quantized so: head sizes of no whole groups, and other than one float dtype."""
    for name, size in (("keys", heads.key_size), ("values", heads.value_size)):
        if size == 0 or size % how.group_size:
            raise ValueError(f"{name} of head size {size} cannot be quantized in groups of {how.group_size}")
    if heads.key_dtype != heads.value_dtype or heads.key_dtype not in DTYPES:
        raise ValueError(
            f"{heads} cannot be quantized: both must be of one dtype, which is float16, bfloat16 or float32"
        )


def quantize(columns: mx.array, how: Quantization) -> Parts:
    """The parts of columns (B, H, N, D)."""
    words, scales, biases = mx.quantize(columns, group_size=how.group_size, bits=how.bits)
    return words, scales, biases


def head_size(parts: Sequence[mx.array], bits: int) -> int:
    """D, read off the words."""
    return parts[0].shape[3] * 32 // bits


def state_parts(kind: str, name: str, parts: object, how: Quantization) -> Parts:
    """The parts in a state as fresh handles, or a refusal in words."""
    if not isinstance(parts, (tuple, list)) or len(parts) != 3:
        raise ValueError(f"{kind} state: {name} are (words, scales, biases), or None with the values None too")
    for part in parts:
        if not isinstance(part, mx.array) or part.ndim != 4:
            raise ValueError(f"{kind} state: {name} are three 4-D arrays (B, H, S, ...)")
    words, scales, biases = (mx.contiguous(part) for part in parts)
    if words.dtype != mx.uint32 or scales.dtype not in DTYPES or biases.dtype != scales.dtype:
        raise ValueError(
            f"{kind} state: {name} are uint32 words with scales and biases of one float dtype, "
            f"not {words.dtype}, {scales.dtype} and {biases.dtype}"
        )
    groups = scales.shape[3]
    fitting = (*words.shape[:3], groups)
    if scales.shape != fitting or biases.shape != fitting or words.shape[3] * 32 != groups * how.group_size * how.bits:
        raise ValueError(
            f"{kind} state: {name} of {words.shape}, {scales.shape} and {biases.shape} are not "
            f"{how.bits} bits in groups of {how.group_size}"
        )
    return words, scales, biases
