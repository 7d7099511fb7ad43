"""Caches to a file: safetensors in mlx-lm 0.32's layout, so that it reads what mlximpl writes.

[KVCache of 17 tokens]   ->   "0.0" keys, "0.1" values, "0.2" the offset; "1.0" names the class
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from .arrays_cache import ArraysCache
from .atomic_file import replacing
from .batch_cache import BatchCache
from .cache import AnyCache
from .cache_list import CacheList
from .file_facts import PLACE, Facts, checksums_text
from .kinds import KINDS
from .mlx_lm_files import mlx_lm_keeps, mlx_lm_reads
from .safetensors_writer import PADDING, PAGE, Item, check_header, header_bytes, item_of, with_padding, write_items
from .scalars import check_scalar, scalar_item
from .state_tree import flatten
from .states import ROWS_MAX

Path = str | os.PathLike[str]


def save_prompt_cache(
    file_name: Path,
    cache: Sequence[Any],
    metadata: Mapping[str, str] | None = None,
    *,
    mappable: bool = False,
    durable: bool = False,
) -> None:
    """Save caches to a file, which takes the place of an old one when it is complete.

    Whenever the process is killed, the old file or the new one is there, whole. After a loss of power that holds only
    if it is durable: otherwise the system may not have put all of it on the disk yet, and the old one is gone. A file
    that is torn for that is refused by `load_prompt_cache`; with `mmap`, if it is told to verify.

    Columns that hold a token are saved, and pads between them as zeros: nothing that was trimmed or evicted, and no
    spare columns. mlx-lm reads the file, unless it is mappable, or a cache is in a state that mlx-lm does not have.

    Args:
        file_name: the file, by its whole name. Of a symbolic link, the file that it points to is replaced.
        cache: caches of mlximpl, one a layer.
        metadata: strings by name, of any characters.
        mappable: every tensor begins at a multiple of 16 KiB, so that MLX can take its pages as they are. Such a file
            is always durable, since pages that are taken as they are are not checked.
        durable: force the file to the disk before it takes its name, and the name after that. It takes as long as the
            disk does.

    Raises:
        ValueError: something else than caches of mlximpl; metadata that are not strings by name.
        OSError: the file cannot be written. The old one is as it was.
    """
    path = os.fspath(file_name)
    if not isinstance(path, str):
        raise ValueError(f"file_name must be a str or a path, not {path!r}")
    user = _checked_metadata(metadata)
    contents = _contents(_checked_caches(cache), mappable)
    items = contents.items
    kept = {key: value for key, value in user.items() if mlx_lm_keeps(key, value)}
    facts = Facts(
        layout="mappable" if mappable else "compact",
        checksums=checksums_text([0] * sum(not item.name.startswith(PADDING) for item in items)),
        mlx_lm=contents.mlx_lm and not mappable,
        empty=contents.empty,
        scalars=contents.scalars,
        metadata={key: value for key, value in user.items() if key not in kept},
    )
    entries = {f"0.{key}": value for key, value in kept.items()} | contents.entries
    header = header_bytes(items, {PLACE: facts.text(), **entries}, PAGE if mappable else 8)
    check_header(header)
    with replacing(path, durable or mappable) as file:
        write_items(file, items, header)


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata must be strings by name, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"metadata must be strings by name, but {key!r:.80} is {value!r:.80}")
    return dict(metadata)


def _checked_caches(caches: Sequence[Any]) -> list[Any]:
    if isinstance(caches, (AnyCache, str, bytes, Mapping)) or not isinstance(caches, Iterable):
        raise ValueError(f"what is saved is a list of caches, one a layer, not a {type(caches).__name__}")
    found = list(caches)
    for i, cache in enumerate(found):
        _check_cache(f"cache {i}", cache)
    return found


def _check_cache(what: str, cache: Any) -> None:
    name = type(cache).__name__
    if KINDS.get(name) is not type(cache):
        raise ValueError(f"{what} is a {name}; what can be saved is mlximpl's {', '.join(sorted(KINDS))}")
    rows = cache._rows() if isinstance(cache, BatchCache) else 0
    rows = cache.batch_size if isinstance(cache, ArraysCache) else rows
    if rows > ROWS_MAX:
        raise ValueError(f"{what} has {rows} rows, and a file holds at most {ROWS_MAX}")
    for i, child in enumerate(cache.caches if isinstance(cache, CacheList) else ()):
        _check_cache(f"child {i} of {what}", child)


class _Contents(NamedTuple):
    """What caches are in a file.

    Leaves of their states that are no arrays are tensors too, named in `entries` with their types, or `scalars`.
    `empty` are the paths of lists without elements. `mlx_lm` is whether mlx-lm reads a compact file right.
    """

    items: list[Item]
    entries: dict[str, str]
    scalars: dict[str, Any]
    empty: list[str]
    mlx_lm: bool


def _contents(caches: Sequence[AnyCache], mappable: bool) -> _Contents:
    names = [type(cache).__name__ for cache in caches]
    states = [_saved_state(cache) for cache in caches]
    tensors, scalars, empty = list[Item](), dict[str, Any](), list[str]()
    entries, listed = {f"1.{i}": name for i, name in enumerate(names)}, 0
    for path, leaf in flatten(states):
        if isinstance(leaf, mx.array):
            tensors.append(item_of(path, leaf))
        elif isinstance(leaf, list):
            empty.append(path)
        elif mappable:
            scalars[path] = check_scalar(path, leaf)
        else:
            kind, item = scalar_item(path, leaf)
            tensors.append(item)
            listed += 1
            entries |= {f"2.{listed}.0": path, f"2.{listed}.1": kind}
    known = all(mlx_lm_reads(*each) for each in zip(names, states, strict=True))
    double = any(item.dtype == "F64" for item in tensors)
    items = with_padding(tensors) if mappable else tensors
    return _Contents(items, entries, scalars, empty, known and not double and empty in ([], [""]))


def _saved_state(cache: AnyCache) -> Any:
    if isinstance(cache, CacheList):
        return [(_saved_state(child), type(child).__name__) for child in cache.caches]
    return cache._saved_state()
