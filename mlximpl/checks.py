"""The refusals: every check runs before anything is written, and names what was given and what is held."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx


class Heads(NamedTuple):
    """What every column of a cache has in common, known from its first update on."""

    heads: int
    key_size: int
    value_size: int
    key_dtype: mx.Dtype
    value_dtype: mx.Dtype

    def __str__(self) -> str:
        keys, values = (str(d).rpartition(".")[2] for d in (self.key_dtype, self.value_dtype))
        return f"{self.heads} heads with keys of {self.key_size} {keys} and values of {self.value_size} {values}"


class Solo(Protocol):
    """A cache that merge takes."""

    keys: mx.array | None


C = TypeVar("C", bound=Solo)
K = TypeVar("K")

COLUMNS_MAX = 2**30
"""Beyond it positions would not stay within int32."""


def heads_of(keys: mx.array | None, values: mx.array | None) -> Heads | None:
    """Read the heads off two arrays (B, H, S, D) and (B, H, S, Dv); None where nothing was seen."""
    if keys is None or values is None:
        return None
    return Heads(keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, values.dtype)


def check_heads(operation: str, held: Iterable[tuple[mx.array, mx.array] | None]) -> None:
    """Refuse to put together keys and values of heads that differ; None is a cache that has seen none."""
    found: tuple[int | mx.Dtype, ...] | None = None
    for pair in held:
        if pair is not None:
            keys, values = pair
            _, heads, _, size = keys.shape
            given = heads, size, values.shape[3], keys.dtype, values.dtype
            if found is not None and given != found:
                names = Heads(*found), Heads(*given)  # type: ignore[arg-type]
                raise ValueError(f"{operation}: caches of {names[0]} and of {names[1]} do not go together")
            found = given


def check_columns(keys: mx.array, values: mx.array) -> None:
    """Refuse keys and values that are not (B, H, N, D) and (B, H, N, Dv) of the same B, H and N."""
    for name, array in (("keys", keys), ("values", values)):
        if not isinstance(array, mx.array):
            raise ValueError(f"{name} must be an mx.array, not {type(array).__name__}")
        if array.ndim != 4:
            raise ValueError(f"{name} must be 4-D (B, H, N, D), not of shape {array.shape}")
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(f"keys {keys.shape} and values {values.shape} differ in rows, heads or columns")


def check_update(
    keys: mx.array,
    values: mx.array,
    held_keys: mx.array | None,
    held_values: mx.array | None,
    rows: int | None,
) -> int:
    """Return N of an update, or refuse it.

    Args:
        keys, values: the update, (B, H, N, D) and (B, H, N, Dv).
        held_keys, held_values: the cache's buffers, or None before the first update.
        rows: the batch's row count; None for a solo cache that has seen no update.
    """
    check_columns(keys, values)
    given_rows, heads, n, size = keys.shape
    if n == 0:
        raise ValueError("an update must bring at least one column, but N is 0")
    if rows is not None and given_rows != rows:
        raise ValueError(f"update of {given_rows} rows, but the cache holds {rows} rows")
    if held_keys is not None and held_values is not None:
        fits = (
            (heads, size) == held_keys.shape[1::2]
            and values.shape[3] == held_values.shape[3]
            and keys.dtype == held_keys.dtype
            and values.dtype == held_values.dtype
        )
        if not fits:
            given, held = heads_of(keys, values), heads_of(held_keys, held_values)
            raise ValueError(f"update of {given}, but the cache holds {held}")
    return n


def check_mask(n: int, window_size: int | None) -> tuple[int, int | None]:
    """Return N and the window, or refuse a mask for no query or with a window that shows nothing."""
    n = whole("the number of queries", n)
    if n < 1:
        raise ValueError(f"a mask needs at least one query, but N is {n}")
    return n, None if window_size is None else check_size("window_size", window_size, 1)


def check_size(name: str, value: int, least: int) -> int:
    """Return a whole number of at least `least`."""
    number = whole(name, value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number


def check_ring(max_size: int, keep: int) -> tuple[int, int]:
    """Return (max_size, keep) of a ring that leaves at least one slot behind its sinks."""
    max_size, keep = check_size("max_size", max_size, 1), check_size("keep", keep, 0)
    if keep >= max_size:
        raise ValueError(f"keep must be below max_size, but keep is {keep} of {max_size}")
    return max_size, keep


def whole(name: str, value: object) -> int:
    """Return an int, from anything that is one exactly; a bool is not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a whole number, not {value!r}") from None


def whole_numbers(name: str, values: Sequence[int] | mx.array) -> tuple[int, ...]:
    """Return a tuple of ints from a sequence or a 1-D integer array (which is read back)."""
    if type(values) is list and all(type(v) is int for v in values):
        return tuple(values)
    if isinstance(values, mx.array):
        if values.ndim != 1 or not (values.size == 0 or mx.issubdtype(values.dtype, mx.integer)):
            raise ValueError(f"{name} must be a 1-D array of whole numbers")
        read: Any = values.tolist()
        return tuple(int(v) for v in read)
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, Mapping)):
        raise ValueError(f"{name} must be a list of whole numbers, not {values!r}")
    return tuple(whole(name, v) for v in values)


def row_numbers(name: str, values: Sequence[int] | mx.array, rows: int | None = None) -> tuple[int, ...]:
    """Return one number a row, none negative; `rows` is the batch's row count."""
    numbers = whole_numbers(name, values)
    if rows is not None and len(numbers) != rows:
        raise ValueError(f"{name} {list(numbers)} is for {len(numbers)} rows, but the batch holds {rows}")
    if any(n < 0 for n in numbers):
        raise ValueError(f"{name} must not be negative: {list(numbers)}")
    if any(n > COLUMNS_MAX for n in numbers):
        raise ValueError(f"{name} must not be above {COLUMNS_MAX}: {list(numbers)}")
    return numbers


def check_rows(operation: str, rows: Sequence[int] | mx.array, held: int) -> tuple[int, ...]:
    """Return the rows counted from the front; IndexError for one that is not there."""
    numbers = whole_numbers("rows", rows)
    if any(not -held <= row < held for row in numbers):
        raise IndexError(f"{operation} rows {list(numbers)}, but the batch holds {held} rows")
    return tuple(row % held for row in numbers)


def check_trim(n: int, pending: bool = False) -> int:
    """Return n, or refuse a number of tokens to drop that is none, or any while padding is pending."""
    n = whole("the number of tokens to trim", n)
    if n < 0:
        raise ValueError(f"trim {n}: a number of tokens is not negative")
    if n > 0 and pending:
        raise ValueError(f"trim {n} while padding is pending: finalize() comes first")
    return n


def check_kind(caches: object, kind: type[K]) -> list[K]:
    """Return the caches of a merge: at least one, all of one kind."""
    if not isinstance(caches, Iterable):
        raise ValueError(f"merge takes a list of {kind.__name__}, not {type(caches).__name__}")
    found = list(caches)
    if not found:
        raise ValueError("merge of no caches")
    for cache in found:
        if not isinstance(cache, kind):
            raise ValueError(f"merge of {kind.__name__} and {type(cache).__name__}")
    return found


def check_solo(caches: object, kind: type[C]) -> list[C]:
    """Return the solo caches of a merge: at least one, all of one kind, each of one row."""
    found = check_kind(caches, kind)
    for cache in found:
        if cache.keys is not None and cache.keys.shape[0] != 1:
            raise ValueError(f"merge of a cache with {cache.keys.shape[0]} rows, but a row is one")
    return found
