"""The operations of a trace: plain data, to and from JSON.

Caches and rows are named by strings. A row's name tags its tokens, so every operation that makes rows (`new`, `merge`,
a fork in `filter`, `extract` ...) gives them fresh names: two rows that go on apart never write the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

KINDS = ("KVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache")

VARIANTS = ("plain", "dtype", "heads", "head_dim", "rows", "uneven")
"""How an update's arrays differ from the trace's configuration (`plain`: they do not)."""


@dataclass(frozen=True)
class Operation:
    """One call on one cache."""

    op: ClassVar[str]
    cache: str


@dataclass(frozen=True)
class New(Operation):
    """Make a cache. `rows` names its rows; a solo cache has one or more of equal length."""

    op = "new"
    kind: str
    rows: tuple[str, ...]
    left_padding: tuple[int, ...] | None = None
    max_size: int | None = None
    keep: int = 0


@dataclass(frozen=True)
class Update(Operation):
    """`make_mask(tokens, window)`, then `update_and_fetch` of that many columns."""

    op = "update"
    tokens: int
    window: int | None = None
    return_array: bool = False
    variant: str = "plain"


@dataclass(frozen=True)
class Mask(Operation):
    """`make_mask` alone: it must change nothing."""

    op = "mask"
    tokens: int
    window: int | None = None
    return_array: bool = False


@dataclass(frozen=True)
class Prepare(Operation):
    op = "prepare"
    left_padding: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    right_padding: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Finalize(Operation):
    op = "finalize"


@dataclass(frozen=True)
class Filter(Operation):
    """Keep `rows`, named `names` from then on."""

    op = "filter"
    rows: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Extend(Operation):
    """Append the rows of `other`, named `names` in this cache."""

    op = "extend"
    other: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Extract(Operation):
    """Row `row` as the new solo cache `into`, whose row is named `name`."""

    op = "extract"
    row: str
    into: str
    name: str


@dataclass(frozen=True)
class Merge(Operation):
    """`cache` is the batch to make of the solo caches `caches`."""

    op = "merge"
    caches: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Trim(Operation):
    op = "trim"
    tokens: int


@dataclass(frozen=True)
class Copy(Operation):
    """`copy.deepcopy` into `into`."""

    op = "copy"
    into: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Restore(Operation):
    """`from_state(state)` into `into`."""

    op = "restore"
    into: str
    names: tuple[str, ...]


OPERATIONS: dict[str, type[Operation]] = {
    cls.op: cls for cls in (New, Update, Mask, Prepare, Finalize, Filter, Extend, Extract, Merge, Trim, Copy, Restore)
}


def to_dict(operation: Operation) -> dict[str, Any]:
    """The operation as JSON data; fields that stand at their default are left out."""
    data: dict[str, Any] = {"op": operation.op}
    for field in fields(operation):
        value = getattr(operation, field.name)
        if field.default is MISSING or value != field.default:
            data[field.name] = list(value) if isinstance(value, tuple) else value
    return data


def from_dict(data: dict[str, Any]) -> Operation:
    """The operation of JSON data. Raises ValueError that says what is wrong with it."""
    name = data.get("op")
    if not isinstance(name, str) or name not in OPERATIONS:
        raise ValueError(f"unknown operation {name!r}; known are {', '.join(OPERATIONS)}")
    cls = OPERATIONS[name]
    known = {field.name: field for field in fields(cls)}
    given = {key: value for key, value in data.items() if key != "op"}
    if unknown := sorted(given.keys() - known.keys()):
        raise ValueError(f"operation {name!r} has no field {', '.join(unknown)}")
    needed = {key for key, field in known.items() if field.default is MISSING}
    if missing := sorted(needed - given.keys()):
        raise ValueError(f"operation {name!r} needs the field {', '.join(missing)}")
    for key, value in given.items():
        given[key] = _field(name, key, str(known[key].type), value)
    operation = cls(**given)
    if fault := _fault(operation):
        raise ValueError(f"operation {name!r}: {fault}")
    return operation


def _fault(operation: Operation) -> str | None:
    """What is wrong with an operation whose fields are of the right types."""
    match operation:
        case New(kind=kind) if kind not in KINDS:
            return f"kind is {kind!r}, but should be one of {', '.join(KINDS)}"
        case New(kind=kind, max_size=size) if ("Rotating" in kind) != (size is not None):
            return f"a {kind} with max_size {size}"
        case New(rows=rows, left_padding=padding) if padding is not None and len(padding) != len(rows):
            return f"left_padding {list(padding)} for the rows {list(rows)}"
        case Update(variant=variant) if variant not in VARIANTS:
            return f"variant is {variant!r}, but should be one of {', '.join(VARIANTS)}"
        case Filter(rows=rows, names=names) if len(rows) != len(names):
            return f"names {list(names)} for the rows {list(rows)}"
        case Merge(caches=caches, names=names) if len(caches) != len(names):
            return f"names {list(names)} for the caches {list(caches)}"
    return None


def _field(operation: str, name: str, declared: str, value: Any) -> Any:
    if value is None and "None" in declared:
        return None
    read: dict[str, Callable[[Any], bool]] = {
        "tuple[str, ...]": lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
        "tuple[int, ...]": lambda v: isinstance(v, list) and all(_is_int(item) for item in v),
        "bool": lambda v: isinstance(v, bool),
        "int": _is_int,
        "str": lambda v: isinstance(v, str),
    }
    kind = declared.removesuffix(" | None")
    if not read[kind](value):
        raise ValueError(f"operation {operation!r}: {name} is {value!r}, but should be {declared}")
    return tuple(value) if kind.startswith("tuple") else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def call(operation: Operation) -> str:
    """The operation as a person would write it: `x.update(tokens=1)`."""
    data = to_dict(operation)
    name, cache = data.pop("op"), data.pop("cache")
    return f"{cache}.{name}({', '.join(f'{key}={value!r}' for key, value in data.items())})"
