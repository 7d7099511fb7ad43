"""The operations of a trace: plain data, to and from JSON.

Caches and rows are named by strings. A row's name tags its tokens, so every operation that makes rows (`new`, `merge`,
a fork in `filter`, `extract` ...) gives them fresh names: two rows that go on apart never write the same token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

CORE_KINDS = ("KVCache", "RotatingKVCache", "BatchKVCache", "BatchRotatingKVCache")
OTHER_KINDS = ("QuantizedKVCache", "ConcatenateKVCache", "ChunkedKVCache", "ArraysCache", "CacheList")
KINDS = CORE_KINDS + OTHER_KINDS

FIELDS: dict[str, tuple[str, ...]] = {
    "KVCache": (),
    "RotatingKVCache": ("max_size", "keep"),
    "BatchKVCache": ("left_padding",),
    "BatchRotatingKVCache": ("max_size", "left_padding", "keep"),
    "QuantizedKVCache": ("group_size", "bits"),
    "ConcatenateKVCache": (),
    "ChunkedKVCache": ("chunk_size",),
    "ArraysCache": ("slots", "left_padding"),
    "CacheList": ("children", "left_padding"),
}
"""What a cache of each kind is made of."""

OPTIONAL = ("keep", "left_padding", "children")
"""Of these, the ones that may be left out."""

VIAS = ("file", "mapped")

VARIANTS = ("plain", "dtype", "heads", "head_dim", "rows", "uneven")
"""How an update's arrays differ from the trace's configuration (`plain`: they do not)."""


@dataclass(frozen=True)
class Operation:
    """One call on one cache."""

    op: ClassVar[str]
    cache: str


@dataclass(frozen=True)
class Child:
    """One cache in a CacheList; its left padding is the list's."""

    kind: str
    max_size: int | None = None
    keep: int = 0
    slots: int | None = None
    chunk_size: int | None = None
    group_size: int | None = None
    bits: int | None = None
    children: tuple[Child, ...] = ()


@dataclass(frozen=True)
class New(Operation):
    """Make a cache. `rows` names its rows; a solo cache has one or more of equal length."""

    op = "new"
    kind: str
    rows: tuple[str, ...]
    left_padding: tuple[int, ...] | None = None
    max_size: int | None = None
    keep: int = 0
    slots: int | None = None
    chunk_size: int | None = None
    group_size: int | None = None
    bits: int | None = None
    children: tuple[Child, ...] = ()


@dataclass(frozen=True)
class Update(Operation):
    """What a layer does with the next columns.

    Keys and values: `make_mask(tokens, window)`, then `update_and_fetch` (a ChunkedKVCache has no masks). An
    ArraysCache: `make_mask(tokens)`, each slot read and written, then `advance(tokens)`. A CacheList: this for each
    child.
    """

    op = "update"
    tokens: int
    window: int | None = None
    return_array: bool = False
    variant: str = "plain"
    slot: int | None = None
    """Of an ArraysCache: the only slot written."""


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
    """`from_state(state)` into `into`, or what a file of the cache is loaded as."""

    op = "restore"
    into: str
    names: tuple[str, ...]
    via: str | None = None
    """`"file"`: saved and loaded. `"mapped"`: saved mappable, and loaded through a mapping."""


@dataclass(frozen=True)
class TrimFront(Operation):
    """`maybe_trim_front` of a ChunkedKVCache."""

    op = "trim_front"


@dataclass(frozen=True)
class ToQuantized(Operation):
    """A KVCache's tokens as the QuantizedKVCache `into`."""

    op = "to_quantized"
    into: str
    names: tuple[str, ...]
    group_size: int
    bits: int


OPERATIONS: dict[str, type[Operation]] = {
    cls.op: cls
    for cls in (
        New,
        Update,
        Mask,
        Prepare,
        Finalize,
        Filter,
        Extend,
        Extract,
        Merge,
        Trim,
        Copy,
        Restore,
        TrimFront,
        ToQuantized,
    )
}

SOLO = ("new", "update", "mask", "trim", "copy", "restore")
BATCH = (*SOLO, "merge", "prepare", "finalize", "filter", "extend", "extract")


def applicable(kind: str) -> tuple[str, ...]:
    """The operations that a kind has. A CacheList has those that all of its children have."""
    if kind == "KVCache":
        return (*SOLO, "to_quantized")
    if kind == "ChunkedKVCache":
        return (*(op for op in SOLO if op != "mask"), "trim_front")
    return BATCH if kind.startswith("Batch") or kind in ("ArraysCache", "CacheList") else SOLO


def to_dict(operation: Operation) -> dict[str, Any]:
    """The operation as JSON data; fields that stand at their default are left out."""
    return {"op": operation.op, **_plain(operation)}


def _plain(whole: Operation | Child) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for field in fields(whole):
        value = getattr(whole, field.name)
        if field.default is MISSING or value != field.default:
            data[field.name] = _plain_value(value)
    return data


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return _plain(value) if isinstance(value, Child) else value


def from_dict(data: dict[str, Any]) -> Operation:
    """The operation of JSON data. Raises ValueError that says what is wrong with it."""
    name = data.get("op")
    if not isinstance(name, str) or name not in OPERATIONS:
        raise ValueError(f"unknown operation {name!r}; known are {', '.join(OPERATIONS)}")
    given = {key: value for key, value in data.items() if key != "op"}
    operation: Operation = _read(OPERATIONS[name], f"operation {name!r}", given)
    if fault := _fault(operation):
        raise ValueError(f"operation {name!r}: {fault}")
    return operation


def _read(cls: type[Any], what: str, given: dict[str, Any]) -> Any:
    known = {field.name: field for field in fields(cls)}
    if unknown := sorted(given.keys() - known.keys()):
        raise ValueError(f"{what} has no field {', '.join(unknown)}")
    needed = {key for key, field in known.items() if field.default is MISSING}
    if missing := sorted(needed - given.keys()):
        raise ValueError(f"{what} needs the field {', '.join(missing)}")
    return cls(**{key: _field(what, key, str(known[key].type), value) for key, value in given.items()})


def _kind_fault(made: New | Child) -> str | None:
    """What is wrong with the fields that a cache is made of."""
    if made.kind not in KINDS:
        return f"kind is {made.kind!r}, but should be one of {', '.join(KINDS)}"
    taken = FIELDS[made.kind]
    for name in dict.fromkeys(field for fields_of_kind in FIELDS.values() for field in fields_of_kind):
        value = getattr(made, name, None)
        if value and name not in taken:
            return f"{_a(made.kind)} with {name} {value if name != 'children' else ''}".rstrip()
        if value is None and name in taken and name not in OPTIONAL:
            return f"{_a(made.kind)} without {name}"
    return next(filter(None, map(_kind_fault, made.children)), None)


def _a(kind: str) -> str:
    return f"an {kind}" if kind.startswith("A") else f"a {kind}"


def _fault(operation: Operation) -> str | None:
    """What is wrong with an operation whose fields are of the right types."""
    match operation:
        case New() if fault := _kind_fault(operation):
            return fault
        case New(rows=rows, left_padding=padding) if padding is not None and len(padding) != len(rows):
            return f"left_padding {list(padding)} for the rows {list(rows)}"
        case Update(variant=variant) if variant not in VARIANTS:
            return f"variant is {variant!r}, but should be one of {', '.join(VARIANTS)}"
        case Restore(via=via) if via not in (None, *VIAS):
            return f"via is {via!r}, but should be one of {', '.join(VIAS)}"
        case Filter(rows=rows, names=names) if len(rows) != len(names):
            return f"names {list(names)} for the rows {list(rows)}"
        case Merge(caches=caches, names=names) if len(caches) != len(names):
            return f"names {list(names)} for the caches {list(caches)}"
    return None


def _field(what: str, name: str, declared: str, value: Any) -> Any:
    if value is None and "None" in declared:
        return None
    if declared.startswith("tuple[Child"):
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise ValueError(f"{what}: {name} is {value!r}, but should be a list of objects")
        return tuple(_read(Child, f"a child of {what}", item) for item in value)
    read: dict[str, Callable[[Any], bool]] = {
        "tuple[str, ...]": lambda v: isinstance(v, list) and all(isinstance(item, str) for item in v),
        "tuple[int, ...]": lambda v: isinstance(v, list) and all(_is_int(item) for item in v),
        "bool": lambda v: isinstance(v, bool),
        "int": _is_int,
        "str": lambda v: isinstance(v, str),
    }
    kind = declared.removesuffix(" | None")
    if not read[kind](value):
        raise ValueError(f"{what}: {name} is {value!r}, but should be {declared}")
    return tuple(value) if kind.startswith("tuple") else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def call(operation: Operation) -> str:
    """The operation as a person would write it: `x.update(tokens=1)`."""
    data = to_dict(operation)
    name, cache = data.pop("op"), data.pop("cache")
    return f"{cache}.{name}({', '.join(f'{key}={value!r}' for key, value in data.items())})"
