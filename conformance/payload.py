"""Keys and values that name their token, and back: the only place where tags are encoded.

A token of row `tag` at position `p` has in head h the features

    key     (tag,       p % 64,  p // 64,  h + 1,  ...)     times -1 in every other head
    value   (tag + 100, p % 64,  p // 64,  h + 1,  ...)

Whole numbers up to 256 are exact in bfloat16, so every dtype carries them. A pad has the tag 250, or NaN where no
attention is run; a slot never written is 0, and 0 stands in no token's fourth feature.

What is to be quantized is encoded in `two_level` features instead, which survive two bits: 32 features spell the tag,
the position, the role and the head in binary digits, each with some texture on it, and wider heads repeat them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Storage = NDArray[Any]
"""Arrays as stored: float32 and float16 as such, bfloat16 as the uint16 of its bits."""
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

DTYPES = ("float32", "float16", "bfloat16")
PAD_TAG = 250
TAG_LIMIT = 100
VALUE_TAG = 100
PAD, UNKNOWN = -1, -2
"""What `decode` gives for a pad, and for anything that is no token."""
POSITION_LIMIT = 64 * 100
SLOTS_MAX = 4
"""Slots of a recurrent state that can be told apart."""


@dataclass(frozen=True)
class Config:
    """The arrays of a trace."""

    dtype: str = "float32"
    heads: int = 1
    key_dim: int = 4
    value_dim: int = 4
    attention: bool = False
    """Run attention on every fetch; pads are finite then."""
    two_level: bool = False
    """Encode tokens so that quantization leaves them readable."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, but should be one of {', '.join(DTYPES)}")
        sizes = (self.heads, self.key_dim, self.value_dim)
        flags = (self.attention, self.two_level)
        if any(type(size) is not int for size in sizes) or not all(isinstance(flag, bool) for flag in flags):
            raise ValueError(
                f"heads and dims {sizes} must be whole numbers, attention and two_level {flags} true or false"
            )
        least = 32 if self.two_level else 4
        if self.heads < 1 or self.key_dim < least or self.value_dim < least:
            raise ValueError(
                f"heads {self.heads}, key_dim {self.key_dim} and value_dim {self.value_dim} must be at least 1, "
                f"{least} and {least}"
            )

    def variant(self, name: str) -> Config:
        """The configuration of an update whose arrays differ from the trace's."""
        if name == "dtype":
            return replace(self, dtype="float16" if self.dtype == "float32" else "float32")
        if name == "heads":
            return replace(self, heads=self.heads + 1)
        if name == "head_dim":
            return replace(self, key_dim=self.key_dim + 1)
        return self


class Payload(Protocol):
    """Where a trace's arrays come from, and which token an array shows."""

    def arrays(self, where: str, tags: Ints, positions: Ints, config: Config) -> tuple[Storage, Storage]:
        """The keys and values of the tokens (B, N) of a step: its number, in a list the child's behind it (`7.0`)."""

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        """The tags and positions (B, T) of keys or values (B, H, T, D); PAD or UNKNOWN where it is no token."""
        raise NotImplementedError

    def state(self, where: str, slot: int, tags: Ints, positions: Ints, config: Config) -> Storage:
        """What a recurrent layer writes to a slot at a step, (B, ...); these (B,) are the rows' last tokens."""
        raise NotImplementedError

    def decode_state(self, x: Storage, slot: int, config: Config) -> tuple[Ints, Ints]:
        """The tag and position (B,) of each row of a slot; PAD for zeros, UNKNOWN for what is neither."""
        raise NotImplementedError

    def shown(self, role: str, tag: int, position: int) -> tuple[int, int]:
        """The token that is decoded for this one: another, where two have the same bits. A slot's role is `slot.0`."""
        raise NotImplementedError


class Tagged:
    """Arrays that name their token, as described above."""

    def arrays(self, where: str, tags: Ints, positions: Ints, config: Config) -> tuple[Storage, Storage]:
        return encode(tags, positions, "key", config), encode(tags, positions, "value", config)

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        return decode(x, role, config)

    def state(self, where: str, slot: int, tags: Ints, positions: Ints, config: Config) -> Storage:
        return encode_state(tags, positions, slot, config)

    def decode_state(self, x: Storage, slot: int, config: Config) -> tuple[Ints, Ints]:
        return decode_state(x, slot, config)

    def shown(self, role: str, tag: int, position: int) -> tuple[int, int]:
        return tag, position


def encode(tags: Ints, positions: Ints, role: str, config: Config) -> Storage:
    """The keys or values (B, H, N, D) of tokens with these tags and positions (B, N); position PAD is a pad."""
    return to_storage(_features(tags, positions, role, config), config.dtype)


def encode_state(tags: Ints, positions: Ints, slot: int, config: Config) -> Storage:
    """What a recurrent layer writes to a slot after these tokens (B,), (B, H, 1, D): zeros for a row that had none."""
    x = encode(tags[:, None], (positions * SLOTS_MAX + slot)[:, None], "key", config)
    return np.where((positions == PAD)[:, None, None, None], np.zeros_like(x), x)


def decode_state(x: Storage, slot: int, config: Config) -> tuple[Ints, Ints]:
    """The tag and position (B,) of each row of a slot; PAD for zeros, UNKNOWN for what is neither token nor zeros."""
    if x.ndim != 4 or x.shape[2] != 1:
        unknown = np.full(x.shape[0] if x.ndim else 0, UNKNOWN, np.int64)
        return unknown, unknown
    tags, coded = (each[:, 0] for each in decode(x, "key", config))
    fits = (coded >= 0) & (coded % SLOTS_MAX == slot)
    zeros = ~np.any(from_storage(x), axis=(1, 2, 3))
    positions = np.where(zeros, PAD, np.where(fits, coded // SLOTS_MAX, UNKNOWN))
    return np.where(positions >= 0, tags, PAD), positions


def _features(tags: Ints, positions: Ints, role: str, config: Config) -> Floats:
    if config.two_level:
        return _two_level(tags, positions, role, config)
    dim = config.key_dim if role == "key" else config.value_dim
    pad = positions == PAD
    rows, count = positions.shape
    x = np.zeros((rows, config.heads, count, dim), np.float32)
    p = np.where(pad, 63, positions)
    for h in range(config.heads):
        x[:, h, :, 0] = np.where(pad, PAD_TAG, tags + (VALUE_TAG if role == "value" else 0))
        x[:, h, :, 1] = p % 64
        x[:, h, :, 2] = p // 64
        x[:, h, :, 3] = h + 1
        for d in range(4, dim):
            x[:, h, :, d] = (p * 7 + d * 5) % 61
    x[:, 1::2] *= -1
    if not config.attention:
        x[np.broadcast_to(pad[:, None, :, None], x.shape)] = np.nan
    return x


def _two_level(tags: Ints, positions: Ints, role: str, config: Config) -> Floats:
    """Feature d is binary digit d % 32 of the token's number, and up to 12/64 more."""
    pad = positions == PAD
    rows, count = positions.shape
    dim = config.key_dim if role == "key" else config.value_dim
    x = np.zeros((rows, config.heads, count, dim), np.float32)
    p = np.where(pad, 2**13 - 1, positions)
    tag = np.where(pad, 127, tags)
    for h in range(config.heads):
        number = tag | p << 7 | (role == "value") << 20 | (h + 1) << 21
        number |= (~(tag ^ p) & 0xFF) << 24
        d = np.arange(dim)
        x[:, h] = (number[..., None] >> d % 32 & 1) + (p[..., None] * 7 + d * 5) % 13 / 64
    x[:, 1::2] *= -1
    if not config.attention:
        x[np.broadcast_to(pad[:, None, :, None], x.shape)] = np.nan
    return x


TWO_LEVEL_ERROR = 0.25
"""Above half a step of two bits over a range of 1.2, and well below half of what tells 0 from 1."""


def _decode_two_level(floats: Floats, role: str, config: Config) -> tuple[Ints, Ints]:
    first = np.nan_to_num(floats[:, 0, :, :32], nan=-1.0)
    number = ((first > 0.6).astype(np.int64) << np.arange(32)).sum(axis=-1)
    tags, positions = number & 0x7F, number >> 7 & 0x1FFF
    pad = np.isnan(floats[:, 0, :, 0]) | (tags == 127)
    plausible = ~pad & (tags < TAG_LIMIT) & (positions < POSITION_LIMIT)
    again = _features(tags, np.where(plausible, positions, PAD), role, config)
    with np.errstate(invalid="ignore"):
        near = (np.abs(again - floats) <= TWO_LEVEL_ERROR).all(axis=(1, 3))
    token = plausible & near
    return np.where(token, tags, PAD), np.where(token, positions, np.where(pad, PAD, UNKNOWN))


def decode(x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
    """The tags and positions (B, N) of keys or values (B, H, N, D); position PAD or UNKNOWN where it is no token."""
    floats = from_storage(x)
    if config.two_level:
        return _decode_two_level(floats, role, config)
    first = floats[:, 0]  # (B, N, D)
    with np.errstate(invalid="ignore"):
        head = np.nan_to_num(first, nan=-1.0, posinf=-1.0, neginf=-1.0).astype(np.int64)
    tags = head[..., 0] - (VALUE_TAG if role == "value" else 0)
    positions = head[..., 1] + 64 * head[..., 2]
    pad = (first[..., 0] == PAD_TAG) | np.isnan(first[..., 0])
    plausible = ~pad & (tags >= 0) & (tags < TAG_LIMIT) & (positions >= 0) & (positions < POSITION_LIMIT)
    again = _features(tags, np.where(plausible, positions, PAD), role, config)
    exact = (again == floats).all(axis=(1, 3))  # every head and feature, bit for bit
    token = plausible & exact
    return np.where(token, tags, PAD), np.where(token, positions, np.where(pad, PAD, UNKNOWN))


def queries(positions: Ints, config: Config) -> Floats:
    """Queries (B, 2 H, N, D) that weigh tokens by tag and position, small enough that no weight vanishes."""
    rows, count = positions.shape
    x = np.zeros((rows, 2 * config.heads, count, config.key_dim), np.float32)
    for h in range(2 * config.heads):
        x[:, h, :, 0] = 0.01
        x[:, h, :, 1] = 0.05 * (1 + h) / config.heads
        x[:, h, :, 3] = 0.02 * (positions % 5)
    return x


def to_storage(x: Floats, dtype: str) -> Storage:
    """float32 in the dtype's storage. Only values that bfloat16 holds exactly are meant to come here."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(x).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(dtype)


def from_storage(x: Storage) -> Floats:
    """The stored values as float32, exactly; uint16 is the bits of bfloat16."""
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)
