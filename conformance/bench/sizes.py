"""How large the measured caches are: a choice for each kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

import mlx.core as mx


@dataclass(frozen=True)
class Size:
    """Shapes and counts. Caches hold `tokens` columns, of which a ragged batch's rows use half or more."""

    name: str
    rounds: int
    layers: int
    batch: int
    heads: int
    query_heads: int
    head_size: int
    tokens: int
    dtype: str
    steps: int
    """Decode steps in one repetition."""
    prefill: int = 512
    prefill_rows: int = 2
    prefill_held: int = 256
    """Columns that a prefill finds."""
    prefill_layers: int = 1
    growth: int = 8192
    growth_rows: int = 1
    tiny_layers: int = 64
    churn_steps: int = 500
    churn_layers: int = 2
    churn_tokens: int = 256
    """The most that a row brings."""
    masks: int = 32

    @property
    def columns(self) -> int:
        """How many columns a cache holds: room for the steps is left in its last block of 256."""
        return max(1, self.tokens - self.steps)

    @property
    def for_prefill(self) -> Size:
        """The same with the rows, columns and layers of a prefill."""
        return replace(self, batch=self.prefill_rows, tokens=self.prefill_held + self.steps, layers=self.prefill_layers)

    @property
    def type(self) -> mx.Dtype:
        """What keys and values are made of."""
        found: mx.Dtype = getattr(mx, self.dtype)
        return found

    @property
    def column_bytes(self) -> int:
        """What one column of one row takes in one layer, key and value."""
        return 2 * self.heads * self.head_size * self.type.size

    def lengths(self, rows: int | None = None) -> list[int]:
        """Tokens of each row of a ragged batch: the first row's are all columns, the others' at least half of them."""
        random = Random(7)
        count = self.batch if rows is None else rows
        shorter = [random.randint((self.columns + 1) // 2, self.columns) for _ in range(count - 1)]
        return [self.columns, *shorter]


SIZES = {
    size.name: size
    for size in (
        Size(
            "tiny",
            rounds=1,
            layers=2,
            batch=4,
            heads=2,
            query_heads=4,
            head_size=8,
            tokens=32,
            dtype="float32",
            steps=2,
            prefill=8,
            prefill_held=8,
            growth=64,
            tiny_layers=4,
            churn_steps=12,
            churn_tokens=8,
            masks=2,
        ),
        Size(
            "small",
            rounds=9,
            layers=2,
            batch=16,
            heads=4,
            query_heads=8,
            head_size=64,
            tokens=1024,
            dtype="float32",
            steps=4,
            churn_steps=120,
        ),
        Size(
            "large",
            rounds=11,
            layers=32,
            batch=16,
            heads=8,
            query_heads=32,
            head_size=128,
            tokens=4096,
            dtype="bfloat16",
            steps=8,
            prefill_rows=16,
            prefill_held=4096,
            prefill_layers=32,
            growth=32768,
            growth_rows=4,
            churn_layers=4,
            churn_tokens=2048,
            masks=256,
        ),
    )
}
LARGE_MEMORY = 96 << 30


def size_for_device() -> str:
    """The size that fits MLX's default device."""
    if mx.default_device() == mx.Device(mx.cpu, 0):
        return "small"
    return "large" if device_memory() >= LARGE_MEMORY else "small"


def device_memory() -> int:
    """Bytes of the device's memory, 0 where MLX does not say."""
    told = mx.device_info()
    return next((int(told[key]) for key in ("memory_size", "total_memory") if key in told), 0)


def pads_of(lengths: Sequence[int]) -> list[int]:
    """The left padding that ends these rows in the same column."""
    return [max(lengths) - length for length in lengths]
