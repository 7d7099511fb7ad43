"""Arrays over a file's own pages, where MLX takes a host buffer as it is.

On Metal `mx.from_dlpack` adopts whole pages. It is given them as words, which are then cut to what the tensor has; a
build for the CPU refuses, and the caller reads the file.
"""

import mmap
from functools import cache
from typing import Any

import mlx.core as mx

from .mapped_file import MappedFile
from .safetensors_header import DTYPES, SIZE_MOST, Tensor
from .safetensors_reader import as_dtype
from .safetensors_writer import PAGE

FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


@cache
def can_adopt() -> bool:
    """Whether MLX takes whole pages of the host as they are."""
    return _adopted(memoryview(mmap.mmap(-1, PAGE))) is not None


def adopt(mapped: MappedFile, tensor: Tensor) -> mx.array | None:
    """The tensor as an array over the mapping's pages, which it keeps mapped; None where MLX would have to copy.

    The tensor must begin at a page, and its last page must lie within the file whole.
    """
    dtype, size, _, _ = DTYPES[tensor.dtype]
    if not tensor.nbytes:
        return mx.zeros(tensor.shape, dtype)
    length = -(-tensor.nbytes // PAGE) * PAGE
    if tensor.start % PAGE or tensor.start + length > mapped.size or length // size > SIZE_MOST:
        return None
    words = _adopted(mapped.view(tensor.start, length).cast(FORMATS[size]))  # type: ignore[call-overload]
    return None if words is None else as_dtype(words[: tensor.nbytes // size], dtype).reshape(tensor.shape)


def _adopted(pages: Any) -> mx.array | None:
    """A memoryview of whole pages as an array that holds on to it; None where MLX refuses."""
    try:
        return mx.from_dlpack(pages, copy=False)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
