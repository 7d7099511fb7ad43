"""Reading a state back: the tuples of `state`, mlx-lm's of the same layout, and nothing else."""

from collections.abc import Sequence

import mlx.core as mx

from .checks import COLUMNS_MAX, check_columns, whole, whole_numbers
from .padding import Pending

ROWS_MAX = 2**16
"""The most rows of a batch that is read: as Python numbers they take many times their size."""


def state_elements(kind: str, state: object, layout: str, extra: str = "") -> list[object]:
    """The elements of a state, or a refusal that names the layout.

    `layout` and `extra` are comma-separated names; a state has all of the first, and all or none of the
    second.
    """
    names, extras = layout.split(", "), extra.split(", ") if extra else []
    if not isinstance(state, (tuple, list)):
        raise ValueError(f"a {kind} state is a tuple ({layout}), not {type(state).__name__}")
    if len(state) not in (len(names), len(names) + len(extras)):
        more = f" and perhaps ({extra})" if extras else ""
        raise ValueError(f"a {kind} state is ({layout}){more}, not {len(state)} elements")
    return list(state)


def state_buffers(
    kind: str, keys: object, values: object, rows: int | None = None
) -> tuple[mx.array | None, mx.array | None, int]:
    """Keys and values as fresh handles, and how many columns they have; both may be None."""
    if keys is None and values is None:
        return None, None, 0
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        raise ValueError(f"{kind} state: keys and values are arrays, or both None")
    check_columns(keys, values)
    if rows is not None and keys.shape[0] != rows:
        raise ValueError(f"{kind} state: keys of {keys.shape[0]} rows, but {rows} offsets")
    # A state is often a view of a longer buffer, which a restored cache must not keep alive.
    return mx.contiguous(keys), mx.contiguous(values), keys.shape[2]


def state_int(kind: str, name: str, value: object, least: int, most: int | None = None) -> int:
    """An int, also from an array of one number."""
    if isinstance(value, mx.array) and value.size == 1:
        value = value.item()
    number = whole(f"{kind} state: {name}", value)
    if number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{kind} state: {name} must be {bounds}, not {number}")
    return number


def state_ints(
    kind: str, name: str, value: object, rows: int | None = None, least: int | None = None
) -> tuple[int, ...]:
    """One int a row."""
    if not isinstance(value, (mx.array, tuple, list)):
        raise ValueError(f"{kind} state: {name} is one number a row, not {type(value).__name__}")
    if isinstance(value, mx.array) and value.size > ROWS_MAX:
        raise ValueError(f"{kind} state: {name} is for {value.size} rows, and {ROWS_MAX} are the most")
    numbers = whole_numbers(f"{kind} state: {name}", value)
    if rows is not None and len(numbers) != rows:
        raise ValueError(f"{kind} state: {name} is for {len(numbers)} rows, not {rows}")
    if least is not None and any(n < least for n in numbers):
        raise ValueError(f"{kind} state: {name} must be at least {least}: {list(numbers)}")
    if any(abs(n) > COLUMNS_MAX for n in numbers):
        raise ValueError(f"{kind} state: {name} must be within {COLUMNS_MAX}: {list(numbers)}")
    return numbers


def state_flag(kind: str, name: str, value: object) -> bool:
    """A bool, also from 0, 1 or an array of one."""
    if isinstance(value, mx.array) and value.size == 1:
        value = value.item()
    if value not in (False, True):
        raise ValueError(f"{kind} state: {name} must be true or false, not {value!r}")
    return bool(value)


def pending_elements(pending: Pending | None) -> tuple[object, ...]:
    """The extra elements of a batch's state: none, or what a ragged prefill still needs."""
    if pending is None:
        return ()
    return (pending.columns, *(mx.array(each, dtype=mx.int32) for each in pending[1:]))


PENDING = "columns to come, lengths, right pads fed, right padding waiting"


def pending_of(kind: str, elements: Sequence[object], stored: int, pads: Sequence[int]) -> Pending | None:
    """Read `pending_elements` back."""
    if not elements:
        return None
    rows = len(pads)
    pending = Pending(
        state_int(kind, "columns to come", elements[0], -1),
        state_ints(kind, "lengths", elements[1], rows, -1),
        state_ints(kind, "right pads fed", elements[2], rows, 0),
        state_ints(kind, "right padding waiting", elements[3], rows, -1),
    )
    if any(tail > stored for tail in pending.tails):
        raise ValueError(f"{kind} state: more right pads than columns: {list(pending.tails)}")
    if pending.columns < 0 and any(
        length >= 0 for length, w in zip(pending.lengths, pending.waiting, strict=True) if w < 0
    ):
        raise ValueError(f"{kind} state: lengths without the number of columns to come")
    return pending


def check_ring_rows(
    kind: str,
    offsets: Sequence[int],
    pads: Sequence[int],
    tails: Sequence[int],
    stored: int,
    keep: int,
    max_size: int,
) -> None:
    """Refuse rings whose numbers disagree, or that lack tokens which the next query may see."""
    for offset, pad, tail in zip(offsets, pads, tails, strict=True):
        held = stored - pad
        if offset < held or (pad > max(0, stored - keep) and offset != held):
            raise ValueError(f"{kind} state: offset {offset} does not fit {stored} columns with {pad} pads")
        if offset > held and held - tail < max_size - 1:
            raise ValueError(
                f"{kind} state: of {offset} tokens {max(0, held - tail)} are held, but the next query "
                f"may see {max_size - 1} of them"
            )
        if offset > held and stored < keep:
            raise ValueError(f"{kind} state: {stored} columns do not hold the {keep} sinks")
