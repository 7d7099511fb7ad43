"""`copy_rows` in one CUDA kernel, at the speed of a copy.

MLX's concatenation and slice updates copy rows of different lengths piece by piece there, and three to four times
slower. Its compiler takes some seconds for the kernel when a process first uses it with a dtype.
"""

import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

from .device import on_cuda
from .row_plan import RowPlan, moved

SOURCES = 32
"""The most that one call takes: it is compiled once for all numbers of them."""
VECTOR = 16
"""Bytes that a thread moves at once."""
THREADS = 256
UNROLLED = 4
FIELDS = 6


def kernel_takes(sources: Sequence[mx.array]) -> bool:
    """Whether the kernel can copy from these arrays (B, H, S, D), and runs here at all."""
    if not on_cuda() or len(sources) > SOURCES:
        return False
    dtype, size = sources[0].dtype, sources[0].shape[3]
    return size * dtype.size % VECTOR == 0 and all(s.size for s in sources) and _runs(dtype)


def copy_by_kernel(sources: Sequence[mx.array], plan: RowPlan, shape: tuple[int, int, int, int]) -> mx.array:
    """`row_copies.copy_rows` to an array of this shape."""
    _, heads, width, size = shape
    dtype = sources[0].dtype
    vectors = size * dtype.size // VECTOR
    blocks = -(-width * vectors // (THREADS * UNROLLED))
    numbers = _numbers(plan, tuple(source.shape[2] for source in sources), heads, width, vectors)
    made: list[mx.array] = _kernel()(
        inputs=[*sources, *[sources[0]] * (SOURCES - len(sources)), numbers],
        template=[("T", dtype)],
        grid=(blocks * THREADS, heads, len(plan.rows)),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    return made[0]


@lru_cache(maxsize=16)
def _numbers(plan: RowPlan, columns: tuple[int, ...], heads: int, width: int, vectors: int) -> mx.array:
    """The plan as the kernel reads it; `columns` is how many each source has."""
    ranges = max(len(row) for row in plan.rows)
    numbers = [heads, width, vectors, ranges]
    for row in plan.rows:
        for source, number, first, column, length in row:
            numbers += [source, number, columns[source], first, column, length]
        numbers += [0] * (FIELDS * (ranges - len(row)))
    return mx.array(numbers, dtype=mx.int32)


@lru_cache(maxsize=1)
def _kernel() -> Any:
    names = [f"source{i}" for i in range(SOURCES)]
    cases = "\n".join(
        f"      case {i}: from = reinterpret_cast<const int4*>({name}); break;" for i, name in enumerate(names)
    )
    source = f"""
  // plan: heads, width, vectors a column, ranges a row; then of each range its source, row, columns of the source,
  // first column, column it goes to, count.
  const int heads = plan[0], vectors = plan[2], ranges = plan[3];
  const int total = plan[1] * vectors, head = blockIdx.y, row = blockIdx.z;
  const int start = blockIdx.x * (blockDim.x * {UNROLLED});
  int4 moved[{UNROLLED}];
  #pragma unroll
  for (int u = 0; u < {UNROLLED}; u++) moved[u] = make_int4(0, 0, 0, 0);
  for (int k = 0; k < ranges; k++) {{
    const int* range = plan + 4 + (row * ranges + k) * {FIELDS};
    const int begin = range[4] * vectors, end = begin + range[5] * vectors;
    if (end <= start || begin >= start + (int)blockDim.x * {UNROLLED}) continue;
    const int4* from;
    switch (range[0]) {{
{cases}
      default: from = nullptr;
    }}
    from += ((long long)(range[1] * heads + head) * range[2] + range[3]) * vectors - begin;
    const bool aligned = reinterpret_cast<unsigned long long>(from) % {VECTOR} == 0;
    #pragma unroll
    for (int u = 0; u < {UNROLLED}; u++) {{
      const int i = start + u * blockDim.x + threadIdx.x;
      if (i < begin || i >= end) continue;
      if (aligned) {{
        moved[u] = from[i];
      }} else {{
        const T* numbers = reinterpret_cast<const T*>(from + i);
        T* to = reinterpret_cast<T*>(&moved[u]);
        for (int n = 0; n < {VECTOR} / (int)sizeof(T); n++) to[n] = numbers[n];
      }}
    }}
  }}
  int4* to = reinterpret_cast<int4*>(out) + (long long)(row * heads + head) * total;
  #pragma unroll
  for (int u = 0; u < {UNROLLED}; u++) {{
    const int i = start + u * blockDim.x + threadIdx.x;
    if (i < total) to[i] = moved[u];
  }}
"""
    make: Any = mx.fast.cuda_kernel
    return make(name="mlximpl_rows", input_names=[*names, "plan"], output_names=["out"], source=source)


@cache
def _runs(dtype: mx.Dtype) -> bool:
    """Try the kernel on a small array, once for each dtype: where it does not run, MLX's operations are used."""
    try:
        array = mx.arange(2 * 3 * VECTOR).reshape(2, 1, 3, VECTOR).astype(dtype)
        made = copy_by_kernel([array], moved((1,), (((0, 1, 2),),)), (1, 1, 3, VECTOR))
        expected = mx.concatenate([mx.zeros((1, 1, 1, VECTOR), dtype), array[1:, :, :2]], axis=2)
        if bool(mx.array_equal(made, expected)):
            return True
        why = "it copies wrongly"
    except Exception as error:
        why = str(error)
    warnings.warn(f"mlximpl copies rows by MLX's operations, since its kernel for {dtype} fails: {why}", stacklevel=2)
    return False
