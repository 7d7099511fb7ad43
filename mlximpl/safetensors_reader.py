"""Reading tensors into arrays: long ones by MLX, on its own threads."""

import os
import zlib
from collections.abc import Callable, Container, Mapping
from typing import Any

import mlx.core as mx

from .checksums import SHORT, Sums, check_sum, sums_of
from .safetensors_header import DTYPES, Tensor

TOGETHER = 4
"""How many tensors MLX loads at a time."""
HEADER_MOST = 4 << 20
"""The longest header that MLX is given to read too."""

Read = Callable[[int, int], bytes]
"""Gives the bytes of a file at an offset, of a length."""


def read_tensors(
    number: int,
    read: Read,
    tensors: Mapping[str, Tensor],
    checksums: Mapping[str, int],
    scalars: Container[str] = (),
) -> tuple[dict[str, mx.array], dict[str, bytes]]:
    """Read tensors into memory and check them.

    Args:
        number: the descriptor of the file.
        read: gives its bytes.
        tensors: what to read, by name; all lie within the file.
        checksums: those to check, by name.
        scalars: the names of those that are no arrays, but stand for a value; none is longer than 64 KiB.

    Returns:
        The arrays, and the bytes of the scalars.

    Raises:
        ValueError: the file has become shorter, or a tensor has another checksum.
    """
    long = _loaded(number, tensors)
    arrays, contents = {}, {}
    for name, tensor in tensors.items():
        if name in long:
            arrays[name] = long[name]
            continue
        content = read(tensor.start, tensor.nbytes)
        if tensor.nbytes <= SHORT and name in checksums:
            check_sum(name, zlib.crc32(content), checksums[name])
        if name in scalars:
            contents[name] = content
        else:
            arrays[name] = array_of(memoryview(content), tensor)
            if tensor.nbytes > SHORT:
                long[name] = arrays[name]
    _check_long({name: array for name, array in long.items() if name in checksums}, checksums)
    mx.eval(arrays)
    return arrays, contents


def _check_long(arrays: Mapping[str, mx.array], checksums: Mapping[str, int]) -> None:
    """Load and check tensors a few at a time, so that they are added up while they are in the processor's cache."""
    names, before = list(arrays), list[tuple[str, Sums]]()
    for at in range(0, len(names) + TOGETHER, TOGETHER):
        sums = [(name, sums_of(arrays[name])) for name in names[at : at + TOGETHER]]
        mx.async_eval([each for _, each in sums])  # type: ignore[no-untyped-call]
        for name, each in before:
            check_sum(name, each.checksum(), checksums[name])
        before = sums


def _loaded(number: int, tensors: Mapping[str, Tensor]) -> dict[str, mx.array]:
    """The long tensors, to be loaded when they are evaluated; none where MLX cannot do it."""
    if all(t.nbytes <= SHORT for t in tensors.values()) or min(t.start for t in tensors.values()) > HEADER_MOST:
        return {}
    try:
        # By its descriptor: under its name there may be another file by now.
        loaded: Any = mx.load(f"/dev/fd/{number}", format="safetensors")
    except RuntimeError:
        return {}  # MLX has no name for float64, and does not read what is half a character
    return {name: loaded[name] for name, tensor in tensors.items() if tensor.nbytes > SHORT}


def reader_of(number: int) -> Read:
    """Read from a descriptor; ValueError where the file ends before."""

    def read(offset: int, length: int) -> bytes:
        content = os.pread(number, length, offset)
        while len(content) < length:
            more = os.pread(number, length - len(content), offset + len(content))
            if not more:
                raise ValueError(f"it ends at byte {offset + len(content)}, and has become shorter while it was read")
            content += more
        return content

    return read


def array_of(view: memoryview, tensor: Tensor) -> mx.array:
    """A copy of the bytes as an array of the tensor's dtype and shape."""
    dtype, _, _, form = DTYPES[tensor.dtype]
    if not view.nbytes:
        return mx.zeros(tensor.shape, dtype)
    given: Any = view.cast(form, tensor.shape or (1,))  # type: ignore[call-overload]
    array = mx.array(given)
    if array.dtype != dtype:
        array = as_dtype(array, dtype)
    return array if tensor.shape else array.reshape(())


def as_dtype(words: mx.array, dtype: mx.Dtype) -> mx.array:
    """Words as elements of the same size."""
    if dtype != mx.float64:
        return words.view(dtype)
    with mx.stream(mx.cpu):  # a GPU has none
        return words.view(dtype)
