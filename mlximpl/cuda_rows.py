"""`copy_pairs` in one CUDA kernel, at the speed of a copy.

MLX's concatenation and slice updates copy rows of different lengths piece by piece there, and three to four times
slower. Its compiler takes some seconds for the kernel when a machine first uses it with a dtype.
"""

import warnings
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import mlx.core as mx

from .device import on_cuda
from .row_plan import Pair, RowPlan, moved

SOURCES = (2, 16, 64)
"""How many pairs a kernel takes: one for what changes a batch, the others for merges."""
ROWS_MOST = 65535 // 2
"""New rows that fit into a launch, keys and values apart."""
VECTOR = 16
"""Bytes that a thread moves at once."""
THREADS = 256
UNROLLED = 4
FIELDS = 6
"""Numbers of a range."""
HEAD = 5
"""Numbers before those."""


def kernel_takes(sources: Sequence[Pair], rows: int) -> bool:
    """Whether the kernel can copy so many rows from these pairs, and runs here at all."""
    if not on_cuda() or len(sources) > SOURCES[-1] or rows > ROWS_MOST:
        return False
    whole = all(buffer.shape[3] * buffer.itemsize % VECTOR == 0 for buffer in sources[0])
    alike = (keys.shape[2] == values.shape[2] and keys.size and values.size for keys, values in sources)
    return whole and all(alike) and _runs(*_dtypes(sources))


def _dtypes(sources: Sequence[Pair]) -> tuple[mx.Dtype, mx.Dtype]:
    keys, values = sources[0]
    return keys.dtype, values.dtype


def copy_by_kernel(sources: Sequence[Pair], plan: RowPlan, width: int, allocated: int) -> Pair:
    """`row_copies.copy_pairs`, with zeros where no range is, and whatever is there in rows that are not planned."""
    dtypes = _dtypes(sources)
    heads = sources[0][0].shape[1]
    vectors = [buffer.shape[3] * buffer.itemsize // VECTOR for buffer in sources[0]]
    room = next(n for n in SOURCES if n >= len(sources))
    buffers = [buffer for pair in [*sources, *[sources[0]] * (room - len(sources))] for buffer in pair]
    blocks = -(-width * max(vectors) // (THREADS * UNROLLED))
    keys, values = _kernel(room)(
        inputs=[*buffers, _numbers(plan, tuple(keys.shape[2] for keys, _ in sources), heads, width, *vectors)],
        # MLX compiles a kernel once for its name and template, and forgets that the arrays' dtypes are part of it.
        template=[("K", dtypes[0]), ("V", dtypes[1])],
        grid=(blocks * THREADS, heads, 2 * len(plan.rows)),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(allocated, heads, width, buffer.shape[3]) for buffer in sources[0]],
        output_dtypes=dtypes,
    )
    return keys, values


@lru_cache(maxsize=16)
def _numbers(plan: RowPlan, columns: tuple[int, ...], heads: int, width: int, *vectors: int) -> mx.array:
    """The plan as the kernel reads it; `columns` is how many each source has."""
    ranges = max(len(row) for row in plan.rows)
    numbers = [heads, width, *vectors, ranges]
    for row in plan.rows:
        for source, number, first, column, length in row:
            numbers += [source, number, columns[source], first, column, length]
        numbers += [0] * (FIELDS * (ranges - len(row)))
    return mx.array(numbers, dtype=mx.int32)


@cache
def _kernel(room: int) -> Any:
    names = [f"{part}{i}" for i in range(room) for part in ("keys", "values")]
    cases = "\n".join(
        f"      case {i}: from = part == 0 ? reinterpret_cast<const int4*>(keys{i})"
        f" : reinterpret_cast<const int4*>(values{i}); break;"
        for i in range(room)
    )
    source = f"""
  // plan: heads, width, vectors a column of keys and of values, ranges a row; then of each range its source, row,
  // columns of the source, first column, column it goes to, length.
  const int part = blockIdx.z % 2, row = blockIdx.z / 2, head = blockIdx.y;
  const int heads = plan[0], vectors = plan[2 + part], ranges = plan[4];
  const int total = plan[1] * vectors, start = blockIdx.x * (blockDim.x * {UNROLLED});
  if (start >= total) return;
  int4 moved[{UNROLLED}];
  #pragma unroll
  for (int u = 0; u < {UNROLLED}; u++) moved[u] = make_int4(0, 0, 0, 0);
  for (int k = 0; k < ranges; k++) {{
    const int* range = plan + {HEAD} + (row * ranges + k) * {FIELDS};
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
        const char* bytes = reinterpret_cast<const char*>(from + i);
        char* to = reinterpret_cast<char*>(&moved[u]);
        for (int n = 0; n < {VECTOR}; n++) to[n] = bytes[n];
      }}
    }}
  }}
  int4* to = part == 0 ? reinterpret_cast<int4*>(new_keys) : reinterpret_cast<int4*>(new_values);
  to += (long long)(row * heads + head) * total;
  #pragma unroll
  for (int u = 0; u < {UNROLLED}; u++) {{
    const int i = start + u * blockDim.x + threadIdx.x;
    if (i < total) to[i] = moved[u];
  }}
"""
    make: Any = mx.fast.cuda_kernel
    outputs = ["new_keys", "new_values"]
    return make(name=f"mlximpl_rows_{room}", input_names=[*names, "plan"], output_names=outputs, source=source)


@cache
def _runs(*dtypes: mx.Dtype) -> bool:
    """Try the kernel on small arrays, once for each two dtypes: where it does not run, MLX's operations are used."""
    try:
        numbers = mx.arange(2 * 3 * VECTOR).reshape(2, 1, 3, VECTOR)
        pair = numbers.astype(dtypes[0]), (numbers + 7).astype(dtypes[1])
        made = copy_by_kernel([pair], moved((1,), (((0, 1, 2),),)), 3, 1)
        zeros = mx.zeros((1, 1, 1, VECTOR))
        expected = [mx.concatenate([zeros.astype(each.dtype), each[1:, :, :2]], axis=2) for each in pair]
        if all(bool(mx.array_equal(*each)) for each in zip(made, expected, strict=True)):
            return True
        why = "it copies wrongly"
    except Exception as error:
        why = str(error)
    names = " and ".join(sorted({str(dtype) for dtype in dtypes}))
    warnings.warn(f"mlximpl copies rows by MLX's operations, since its kernel for {names} fails: {why}", stacklevel=2)
    return False
