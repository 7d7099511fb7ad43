"""Which device the arrays of an operation go to."""

import mlx.core as mx


def on_cuda() -> bool:
    """Whether that is a GPU under CUDA."""
    return mx.cuda.is_available() and mx.default_device() != mx.cpu
