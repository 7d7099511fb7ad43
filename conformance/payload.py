"""Keys and values that name their token, and back: the only place where tags are encoded.

A token of row `tag` at position `p` has in head h the features

    key     (tag,       p % 64,  p // 64,  h + 1,  ...)     times -1 in every other head
    value   (tag + 100, p % 64,  p // 64,  h + 1,  ...)

Whole numbers up to 256 are exact in bfloat16, so every dtype carries them. A pad has the tag 250, or NaN where no
attention is run; a slot never written is 0, and 0 stands in no token's fourth feature.
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


@dataclass(frozen=True)
class Config:
    """The arrays of a trace."""

    dtype: str = "float32"
    heads: int = 1
    key_dim: int = 4
    value_dim: int = 4
    attention: bool = False
    """Run attention on every fetch; pads are finite then."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, but should be one of {', '.join(DTYPES)}")
        sizes = (self.heads, self.key_dim, self.value_dim)
        if any(type(size) is not int for size in sizes) or not isinstance(self.attention, bool):
            raise ValueError(
                f"heads and dims {sizes} must be whole numbers, attention {self.attention!r} true or false"
            )
        if self.heads < 1 or self.key_dim < 4 or self.value_dim < 4:
            raise ValueError(
                f"heads {self.heads}, key_dim {self.key_dim} and value_dim {self.value_dim} must be at least 1, 4 and 4"
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

    def arrays(self, step: int, tags: Ints, positions: Ints, config: Config) -> tuple[Storage, Storage]:
        """The keys and values of the tokens (B, N) that step number `step` feeds."""

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        """The tags and positions (B, T) of keys or values (B, H, T, D); PAD or UNKNOWN where it is no token."""
        raise NotImplementedError

    def shown(self, role: str, tag: int, position: int) -> tuple[int, int]:
        """The token that `decode` gives for this one: another, where two tokens have the same bits."""
        raise NotImplementedError


class Tagged:
    """Arrays that name their token, as described above."""

    def arrays(self, step: int, tags: Ints, positions: Ints, config: Config) -> tuple[Storage, Storage]:
        return encode(tags, positions, "key", config), encode(tags, positions, "value", config)

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        return decode(x, role, config)

    def shown(self, role: str, tag: int, position: int) -> tuple[int, int]:
        return tag, position


def encode(tags: Ints, positions: Ints, role: str, config: Config) -> Storage:
    """The keys or values (B, H, N, D) of tokens with these tags and positions (B, N); position PAD is a pad."""
    return to_storage(_features(tags, positions, role, config), config.dtype)


def _features(tags: Ints, positions: Ints, role: str, config: Config) -> Floats:
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


def decode(x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
    """The tags and positions (B, N) of keys or values (B, H, N, D); position PAD or UNKNOWN where it is no token."""
    floats = from_storage(x, config.dtype)
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


def from_storage(x: Storage, dtype: str) -> Floats:
    """The stored values as float32, exactly."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32)
