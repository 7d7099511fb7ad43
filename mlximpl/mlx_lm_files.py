"""mlx-lm's two ways to lay out a file, told apart by the metadata entry "2.0".

0.32   "0.<key>" metadata     "1.<i>" class names    "2.0" empty, "2.<i>.0" path and "2.<i>.1" type of each scalar
0.31   "0.<i>..." meta states "1.<key>" metadata     "2.<i>" class names

mlximpl's own files are of the first kind, with facts in "2.0".
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .file_facts import PLACE
from .kinds import KINDS
from .state_tree import unflatten

OLDER_NAMES = {"MambaCache": "ArraysCache"}
TYPES = ("scalar", "string", "none")
ELEMENTS = {
    "ArraysCache": 3,
    "BatchKVCache": 5,
    "BatchRotatingKVCache": 8,
    "ChunkedKVCache": 5,
    "ConcatenateKVCache": 2,
    "KVCache": 3,
    "QuantizedKVCache": 5,
    "RotatingKVCache": 6,
}
"""How many elements a state has in mlx-lm 0.32."""


class Listing(NamedTuple):
    """What the metadata of a file lists.

    `facts` is what stands in "2.0". `scalars` gives the types of the leaves that are no arrays, by path. `older` is the
    meta state of each cache, and None unless the file is of mlx-lm 0.31.
    """

    metadata: dict[str, str]
    classes: list[str]
    scalars: dict[str, str]
    facts: str
    older: list[Any] | None


def read_listing(entries: Mapping[str, str]) -> Listing:
    """Sort the metadata entries of a file.

    Raises:
        ValueError: they are not those of a prompt cache, or name a class that is not known.
    """
    facts = entries.get(PLACE)
    if facts is None:
        raise ValueError('its metadata has no entry "2.0": it is no prompt cache')
    parts: tuple[dict[str, str], ...] = ({}, {}, {})
    for name, value in entries.items():
        number, dot, rest = name.partition(".")
        if number not in ("0", "1", "2") or not dot:
            raise ValueError(f"its metadata has an entry {name[:80]!r}, which prompt caches do not have")
        parts[int(number)][rest] = value
    if facts and not facts.startswith("{"):
        infos, metadata, classes = parts
        return Listing(metadata, _classes(classes), {}, "", unflatten(infos.items()))
    metadata, classes, scalars = parts
    del scalars["0"]
    return Listing(metadata, _classes(classes), _scalars(scalars), facts, None)


def _classes(entries: Mapping[str, str]) -> list[str]:
    names = [entries.get(str(i)) for i in range(len(entries))]
    if None in names:
        raise ValueError(f"its {len(names)} class names are not numbered from 0 on")
    return [_known(f"cache {i}", name) for i, name in enumerate(names)]


def _known(what: str, name: object) -> str:
    known = OLDER_NAMES.get(name, name) if isinstance(name, str) else ""
    if known not in KINDS:
        raise ValueError(f"{what} is a {str(name)[:80]!r}; what can be read is {', '.join(sorted(KINDS))}")
    return known


def _scalars(entries: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for i in range(1, len(entries) // 2 + 1):
        path, kind = entries.get(f"{i}.0"), entries.get(f"{i}.1")
        if path is None or kind not in TYPES or path in found:
            raise ValueError(f"scalar {i} of its {len(entries) // 2} is not listed with a path and a type")
        found[path] = kind
    if 2 * len(found) != len(entries):
        raise ValueError("its scalars are not listed with a path and a type each")
    return found


def mlx_lm_reads(name: str, state: Sequence[Any]) -> bool:
    """Whether mlx-lm 0.32 makes the right cache of a state."""
    if name == "CacheList":
        return bool(state) and all(mlx_lm_reads(kind, child) for child, kind in state)
    if name == "ConcatenateKVCache" and state[0] is None:
        return False  # it asks the keys for their shape
    return len(state) == ELEMENTS.get(name)


def mlx_lm_keeps(key: str, value: str) -> bool:
    """Whether mlx-lm gives an entry of the metadata back as it is.

    It splits keys at dots, and takes those that are numbers for places in a list.
    """
    try:
        (key + value).encode()
    except UnicodeEncodeError:
        return False
    try:
        int(key)
    except ValueError:
        return bool(key) and "." not in key
    return False


def newer_states(classes: Sequence[str], states: Sequence[Any], older: Sequence[Any]) -> list[Any]:
    """The states of mlx-lm 0.31 in the layout of 0.32.

    Raises:
        ValueError: a state or its meta state is not laid out as 0.31 does.
    """
    if not len(classes) == len(states) == len(older):
        raise ValueError(f"it has {len(classes)} classes for {len(states)} states and {len(older)} meta states")
    return [_newer(f"cache {i}", *each) for i, each in enumerate(zip(classes, states, older, strict=True))]


def _newer(what: str, name: str, state: Any, info: Any) -> Any:
    if not isinstance(state, list):
        raise ValueError(f"the state of {what}, a {name}, is not a list")
    if name == "CacheList":
        return _newer_list(what, state, info)
    if name == "ArraysCache":
        _numbers(what, name, info, 0)
        return [state, None, None]
    arrays = 4 if name in ("BatchKVCache", "BatchRotatingKVCache") else 2
    if len(state) != arrays:
        raise ValueError(f"the state of {what}, a {name}, has {len(state)} elements, not {arrays}")
    if name == "QuantizedKVCache":
        return [*state, *_numbers(what, name, info, 3)]
    if not all(isinstance(array, mx.array) for array in state) or state[0].ndim != 4:
        raise ValueError(f"the state of {what}, a {name}, does not begin with keys (B, H, S, D)")
    width = state[0].shape[2]
    if name == "RotatingKVCache":
        keep, max_size, offset, head = _numbers(what, name, info, 4)
        return [*state, offset, keep, max_size, head]
    if name == "BatchRotatingKVCache":
        numbers = [info[3]] if isinstance(info, list) and len(info) == 4 else []
        if numbers not in (["True"], ["False"]):
            raise ValueError(f"the meta state of {what}, a {name}, is not three numbers and True or False")
        return [*state, *_numbers(what, name, info[:3], 3), numbers == ["True"]]
    if name == "ChunkedKVCache":
        chunk_size, start = _numbers(what, name, info, 2)
        if start:
            _check_slid(what, state, width - start)
        return [*state, width, chunk_size, start]
    _numbers(what, name, info, 0)
    if name == "ConcatenateKVCache":
        return state
    return [*state, width]


def _newer_list(what: str, state: list[Any], info: Any) -> list[Any]:
    names, infos = info if isinstance(info, list) and len(info) == 2 else (None, None)
    if not isinstance(names, list) or not isinstance(infos, list) or not len(names) == len(infos) == len(state):
        raise ValueError(f"the meta state of {what}, a CacheList, is not class names and meta states")
    found = []
    for i, (child, name, child_info) in enumerate(zip(state, names, infos, strict=True)):
        child_of = f"child {i} of {what}"
        known = _known(child_of, name)
        found.append([_newer(child_of, known, child, child_info), known])
    return found


def _numbers(what: str, name: str, info: Any, count: int) -> list[int]:
    """The numbers of a meta state; without any it is an empty string."""
    given = [] if info == "" else info
    if not isinstance(given, list) or len(given) != count or not all(_is_number(n) for n in given):
        raise ValueError(f"the meta state of {what}, a {name}, is not {count} whole numbers")
    return [int(n) for n in given]


def _is_number(text: object) -> bool:
    return isinstance(text, str) and text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20


def _check_slid(what: str, state: list[Any], held: int) -> None:
    """Refuse a slid chunk whose offset is not in the file.

    mlx-lm 0.31 saves the first `offset` columns of the buffer, or all if there are fewer. Where columns behind the
    `held` ones are unwritten, it was the first; else the tokens' number is lost.
    """
    unwritten = held > 0 and all(mx.all(array[..., held:, :] == 0).item() for array in state)
    if not unwritten:
        raise ValueError(f"{what} is a ChunkedKVCache that has slid, and mlx-lm 0.31 did not save how far it was fed")
