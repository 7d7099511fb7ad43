"""Reading tensors into arrays."""

import os
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from .checksums import Sums, check_views
from .safetensors_header import DTYPES, Tensor

Arrays = dict[str, mx.array]


def read_tensors(number: int, tensors: Mapping[str, Tensor], sums: Mapping[str, Sums] | None) -> Arrays:
    """Read tensors into memory, evaluated.

    Args:
        number: the descriptor of the file, which has the bytes that the tensors name.
        tensors: what to read, by name.
        sums: the checksums of each, or None to check nothing.

    Raises:
        ValueError: the file has become shorter, or a tensor has other checksums.
    """
    arrays = {}
    for name, tensor in tensors.items():
        view = memoryview(read_bytes(number, tensor.start, tensor.nbytes))
        if sums is not None:
            check_views({name: view}, sums)
        arrays[name] = array_of(view, tensor)
    return arrays


def read_bytes(number: int, offset: int, length: int) -> bytes:
    """The bytes at an offset; ValueError where the file ends before."""
    content = os.pread(number, length, offset)
    while len(content) < length:
        more = os.pread(number, length - len(content), offset + len(content))
        if not more:
            raise ValueError(f"it ends at byte {offset + len(content)}, and has become shorter while it was read")
        content += more
    return content


def array_of(view: memoryview, tensor: Tensor) -> mx.array:
    """A copy of the bytes as an array of the tensor's dtype and shape."""
    dtype, _, form, _ = DTYPES[tensor.dtype]
    if not view.nbytes:
        return mx.zeros(tensor.shape, dtype)
    words: Any = view.cast(form) if not tensor.shape else view.cast("B").cast(form, tensor.shape)  # type: ignore[call-overload]
    array = as_dtype(mx.array(words), dtype)
    return array if tensor.shape else array.reshape(())


def as_dtype(words: mx.array, dtype: mx.Dtype) -> mx.array:
    """Words as elements of the same size."""
    with mx.stream(mx.cpu if dtype == mx.float64 else mx.default_device()):
        return words.view(dtype)
