"""Writing into a buffer that grows.

    step = 4, five columns stored, two more come

    before  [0 1 2 3 4 . . .]          "." is allocated and unwritten
    after   [0 1 2 3 4 5 6 .]

What writes returns a new array object. An `a[...] = b` of mlx rebinds the Python object `a`, and
with it whatever holds that object, such as an earlier fetch; a fresh handle on the same buffer keeps those
as they were, and still lets mlx write in place once nothing else holds the buffer.
"""

import mlx.core as mx


def overwrite(buffer: mx.array, columns: mx.array, start: int) -> mx.array:
    """Return `buffer` (B, H, S, D) with `columns` (B, H, N, D) in the slots from `start` on.

    A buffer of more rows keeps those behind the B as they are.
    """
    if not columns.size:
        return buffer[...]
    fresh = buffer[...]
    # An Ellipsis would cost the host half as much again.
    if columns.shape[0] == buffer.shape[0]:
        fresh[:, :, start : start + columns.shape[2]] = columns
    else:
        fresh[: columns.shape[0], :, start : start + columns.shape[2]] = columns
    return fresh


def rounded(columns: int, step: int) -> int:
    """The next multiple of `step`: how many columns a buffer has that holds so many."""
    if step < 1:
        raise ValueError(f"step must be at least 1, but is {step}")
    return columns + -columns % step


def append_columns(buffer: mx.array | None, columns: mx.array, stored: int, step: int, spare: int = 0) -> mx.array:
    """Return a buffer that holds `columns` behind its `stored` columns.

    Args:
        buffer: (B, H, S, D) with S >= stored, or more rows; or None.
        columns: (B, H, N, D).
        stored: how many columns of the buffer are in use.
        step: where the buffer is too short, the new one is a multiple of `step` columns long.
        spare: how many more columns than needed a longer buffer has at least.
    """
    stop = stored + columns.shape[2]
    if buffer is not None and stop <= buffer.shape[2]:
        return overwrite(buffer, columns, stored)
    before = [] if buffer is None or stored == 0 else [buffer[: columns.shape[0], :, :stored]]
    width = rounded(stop + spare if before else stop, step)
    return join([*before, columns, *spare_columns(columns, width - stop)])


def spare_columns(like: mx.array, n: int) -> list[mx.array]:
    """n zero columns in the shape and dtype of `like` (B, H, S, D), as a list of one array or none."""
    rows, heads, _, size = like.shape
    return [mx.zeros((rows, heads, n, size), like.dtype)] if n > 0 else []


def concat(parts: list[mx.array], axis: int = 2) -> mx.array:
    """Concatenate; of one part, that part.

    Parts without elements are left out: MLX 0.32 on CUDA can crash on arrays made of such.
    """
    filled = [part for part in parts if part.size]
    if len(filled) > 1:
        return mx.concatenate(filled, axis=axis)
    if filled:
        return filled[0]
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return mx.zeros(shape, parts[0].dtype)


def join(parts: list[mx.array], axis: int = 2) -> mx.array:
    """Concatenate into memory of its own: a view would keep the whole of its source alive."""
    whole = concat(parts, axis)
    return mx.contiguous(whole) if any(whole is part for part in parts) else whole
