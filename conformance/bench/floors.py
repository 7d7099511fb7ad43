"""What an operation cannot do without: a copy of the bytes that must move, or attention with no mask."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from conformance.bench.build import columns, file, numbers, queries
from conformance.bench.measure import Trial
from conformance.bench.sizes import Size


def copy_of(nbytes: int, layers: int, repeats: int = 1) -> Trial:
    """A plain contiguous copy of so many bytes in each layer, half keys and half values."""

    def prepare() -> list[mx.array]:
        made = [mx.ones(_block(max(1, nbytes // 4)), mx.uint16) for _ in range(2 * layers)]
        mx.eval(made)
        return made

    return Trial(prepare, lambda held: [copied(each) for _ in range(repeats) for each in held], repeats)


def _block(numbers: int) -> tuple[int, ...]:
    """The shape of so many numbers; an axis of MLX's holds fewer than 2**31, and beyond that a few come on top."""
    return (numbers,) if numbers < 1 << 31 else (-(-numbers >> 20), 1 << 20)


def copied(array: mx.array) -> mx.array:
    """A copy in memory of its own: a write into an array that something else holds copies it as one block first."""
    copy = array[...]
    copy[:1] = 0
    return copy


def attention_over(width: int, steps: int, n: int, layers: int, size: Size) -> Trial:
    """Steps of n columns, written in place at the end of contiguous buffers of that width, and attention over all."""
    new, asked = columns(size, n), queries(size, n)
    scale = size.head_size**-0.5

    def prepare() -> list[list[mx.array]]:
        whole = columns(size, width)
        made = [[copied(whole), copied(whole)] for _ in range(layers)]
        mx.eval(made)
        return made

    def layer(buffers: list[mx.array], out: mx.array) -> mx.array:
        for buffer in buffers:
            buffer[..., width - n :, :] = new
        mask = None if n == 1 else "causal"
        return mx.fast.scaled_dot_product_attention(out, buffers[0], buffers[1], scale=scale, mask=mask)

    def work(held: list[list[mx.array]]) -> list[Any]:
        for _ in range(steps):
            out = asked
            for buffers in held:
                out = layer(buffers, out)
            mx.eval(out, held)
        return []

    return Trial(prepare, work, steps)


def tiny_writes(size: Size) -> Trial:
    """Steps of one column, in place, into two small buffers of each of many layers, and the slices that are fetched."""
    shape = size.batch, 1, 32, 8
    new = numbers((size.batch, 1, 1, 8), mx.float32)
    steps = 8

    def prepare() -> list[list[mx.array]]:
        made = [[mx.zeros(shape) for _ in range(2)] for _ in range(size.tiny_layers)]
        mx.eval(made)
        return made

    def work(held: list[list[mx.array]]) -> list[Any]:
        for step in range(steps):
            for buffers in held:
                for buffer in buffers:
                    buffer[..., step : step + 1, :] = new
            mx.eval([buffer[..., : step + 1, :] for buffers in held for buffer in buffers], held)
        return []

    return Trial(prepare, work, steps)


def file_write(nbytes: int) -> Trial:
    """Bytes to a file by one call of the operating system's, not forced to the disk."""
    content = bytes(nbytes)
    return Trial(lambda: None, lambda _: file("floor").write_bytes(content) and [])


def file_read(nbytes: int) -> Trial:
    """The bytes of a file that lies in the system's cache."""

    def prepare() -> None:
        path = file("floor")
        if not path.exists() or path.stat().st_size != nbytes:
            path.write_bytes(bytes(nbytes))

    return Trial(prepare, lambda _: file("floor").read_bytes() and [])
