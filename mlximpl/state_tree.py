"""States as named leaves, and back: [(k, v, 3)] is {"0.0": k, "0.1": v, "0.2": 3}."""

from collections.abc import Iterable, Iterator
from typing import Any

DEPTH_MOST = 40
"""Enough for lists of caches as deep as `CacheList.from_state` takes them: two lists each, and the layer's own."""


def flatten(tree: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested lists and tuples by path, in order. A list without elements is a leaf, (path, []).

    Raises:
        ValueError: they are nested deeper than `unflatten` takes.
    """
    if path.count(".") >= DEPTH_MOST:
        raise ValueError(f"states are nested deeper than {DEPTH_MOST} lists")
    if not isinstance(tree, (list, tuple)) or not tree:
        yield path, [] if isinstance(tree, (list, tuple)) else tree
        return
    for i, child in enumerate(tree):
        yield from flatten(child, f"{path}.{i}" if path else str(i))


def unflatten(leaves: Iterable[tuple[str, Any]]) -> list[Any]:
    """The nested lists that have these leaves, in any order.

    Raises:
        ValueError: the paths are not those of a tree, with every list's elements numbered from 0 on.
    """
    root: dict[int, Any] = {}
    found = list(leaves)
    if found == [("", [])]:
        return []
    for path, leaf in found:
        *steps, last = _steps(path)
        node = root
        for step in steps:
            node = node.setdefault(step, _Branch())
            if not isinstance(node, _Branch):
                raise ValueError(f"{path!r} lies below a value")
        if last in node:
            raise ValueError(f"there are values at and below {path!r}")
        node[last] = leaf
    return _listed(root, "")


class _Branch(dict[int, Any]):
    """A list that is being put together, by index."""


def _steps(path: str) -> list[int]:
    parts = path.split(".") if len(path) <= 200 else []
    if not 1 <= len(parts) <= DEPTH_MOST or not all(p.isascii() and p.isdigit() and p == str(int(p)) for p in parts):
        raise ValueError(f"{path[:80]!r} is not the path of a value in a state")
    return [int(part) for part in parts]


def _listed(branch: dict[int, Any], path: str) -> list[Any]:
    if not all(i in branch for i in range(len(branch))):
        missing = next(i for i in range(len(branch)) if i not in branch)
        raise ValueError(f"there is no value at {path}{missing}, but there is one behind it")
    children = (branch[i] for i in range(len(branch)))
    return [_listed(c, f"{path}{i}.") if isinstance(c, _Branch) else c for i, c in enumerate(children)]
