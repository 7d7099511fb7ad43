"""Caches on disk: safetensors in mlx-lm 0.32's layout, so that it reads what mlximpl writes.

[KVCache of 17 tokens]   ->   "0.0" keys, "0.1" values, "0.2" the offset; "1.0" names the class
"""

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

import mlx.core as mx

from .atomic_file import replacing
from .cache import AnyCache
from .cache_list import CacheList
from .checksums import SHORT, check_sum, checksum_of
from .dlpack import adopt
from .file_error import PromptCacheFileError
from .file_facts import PLACE, Facts, checksums_of, checksums_text, read_facts
from .kinds import KINDS
from .mapped_file import MappedFile
from .mlx_lm_files import Listing, mlx_lm_keeps, mlx_lm_reads, newer_states, read_listing
from .safetensors_header import Tensor, read_header
from .safetensors_reader import Read, read_tensors, reader_of
from .safetensors_writer import PADDING, PAGE, Item, check_header, header_bytes, item_of, with_padding, write_items
from .scalars import check_scalar, read_scalar, scalar_item
from .state_tree import flatten, unflatten

AT_ONCE = 1 << 20
"""A file of up to so many bytes is read at once."""

Arrays = dict[str, mx.array]
Path = str | os.PathLike[str]


def save_prompt_cache(
    file_name: Path, cache: Sequence[Any], metadata: Mapping[str, str] | None = None, *, mappable: bool = False
) -> None:
    """Save caches to a file, which takes the place of an old one when it is complete and on the disk.

    Columns that hold a token are saved, and pads between them as zeros: nothing that was trimmed or evicted, and no
    spare columns.
    mlx-lm reads the file, unless it is mappable, or a cache is in a state that mlx-lm does not have.

    Args:
        file_name: the file, by its whole name. Of a symbolic link, the file that it points to is replaced.
        cache: caches of mlximpl, one a layer.
        metadata: strings by name, of any characters.
        mappable: every tensor begins at a multiple of 16 KiB, so that MLX can take its pages as they are.

    Raises:
        ValueError: something else than caches of mlximpl; metadata that are not strings by name.
        OSError: the file cannot be written. The old one is as it was.
    """
    path = os.fspath(file_name)
    if not isinstance(path, str):
        raise ValueError(f"file_name must be a str or a path, not {path!r}")
    user = _checked_metadata(metadata)
    states = [_saved_state(f"cache {i}", layer) for i, layer in enumerate(cache)]
    classes = [type(layer).__name__ for layer in cache]
    tensors, listed, scalars, empty = _contents(states, mappable)
    items = with_padding(tensors) if mappable else tensors
    kept = {key: value for key, value in user.items() if mlx_lm_keeps(key, value)}
    facts = Facts(
        layout="mappable" if mappable else "compact",
        checksums="",
        mlx_lm=not mappable and not empty and _mlx_lm_reads(classes, states, items),
        empty=empty,
        scalars=scalars,
        metadata={key: value for key, value in user.items() if key not in kept},
    )
    entries = {
        **{f"0.{key}": value for key, value in kept.items()},
        **{f"1.{i}": name for i, name in enumerate(classes)},
        **{f"2.{i}.{n}": word for i, words in enumerate(listed, 1) for n, word in enumerate(words)},
    }

    def header(checksums: Sequence[int]) -> bytes:
        own = [each for item, each in zip(items, checksums, strict=True) if not item.name.startswith(PADDING)]
        text = facts._replace(checksums=checksums_text(own)).text()
        return header_bytes(items, {PLACE: text, **entries}, PAGE if mappable else 8)

    check_header(header([0] * len(items)))
    with replacing(path) as file:
        write_items(file, items, header)


def _checked_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata must be strings by name, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise ValueError(f"metadata must be strings by name, but {key!r} is {value!r}")
    return dict(metadata)


def _saved_state(what: str, cache: Any) -> Any:
    name = type(cache).__name__
    if not isinstance(cache, AnyCache) or KINDS.get(name) is not type(cache):
        raise ValueError(f"{what} is a {name}; what can be saved is mlximpl's {', '.join(sorted(KINDS))}")
    if isinstance(cache, CacheList):
        children = enumerate(cache.caches)
        return [(_saved_state(f"child {i} of {what}", child), type(child).__name__) for i, child in children]
    return cache._saved_state()


def _mlx_lm_reads(classes: Sequence[str], states: Sequence[Any], items: Sequence[Item]) -> bool:
    return all(mlx_lm_reads(*each) for each in zip(classes, states, strict=True)) and all(
        item.dtype != "F64" for item in items
    )


def _contents(states: list[Any], mappable: bool) -> tuple[list[Item], list[tuple[str, str]], dict[str, Any], list[str]]:
    """What goes into a file: tensors; path and type of those that stand for scalars; scalars; paths of empty lists."""
    items, listed, scalars, empty = [], [], {}, []
    for path, leaf in flatten(states):
        if isinstance(leaf, mx.array):
            items.append(item_of(path, leaf))
        elif isinstance(leaf, list):
            empty.append(path)
        elif mappable:
            scalars[path] = check_scalar(path, leaf)
        else:
            kind, item = scalar_item(path, leaf)
            items.append(item)
            listed.append((path, kind))
    return items, listed, scalars, empty


@overload
def load_prompt_cache(
    file_name: Path, return_metadata: Literal[False] = False, *, mmap: bool = False, verify: bool = False
) -> list[Any]: ...
@overload
def load_prompt_cache(
    file_name: Path, return_metadata: Literal[True], *, mmap: bool = False, verify: bool = False
) -> tuple[list[Any], dict[str, str]]: ...
@overload
def load_prompt_cache(
    file_name: Path, return_metadata: bool, *, mmap: bool = False, verify: bool = False
) -> list[Any] | tuple[list[Any], dict[str, str]]: ...
def load_prompt_cache(
    file_name: Path, return_metadata: bool = False, *, mmap: bool = False, verify: bool = False
) -> list[Any] | tuple[list[Any], dict[str, str]]:
    """Load the caches of a file, of mlximpl or of mlx-lm 0.31 or 0.32.

    The caches are complete when it returns: what becomes of the file does not change them, nor do they change it.

    Args:
        file_name: the file.
        return_metadata: whether to return its metadata too.
        mmap: take the pages of a mappable file as they are, where MLX can (on Metal). Private ones: what is written to
            them stays in memory. Elsewhere the file is read.
        verify: with `mmap`, check the data against their checksums, as is always done without it. mlx-lm's files have
            none.

    Returns:
        The caches; or the caches and the metadata.

    Raises:
        PromptCacheFileError: the file holds no caches, or was cut or changed.
        OSError: it cannot be read.
    """
    path = os.fspath(file_name)
    if not isinstance(path, str):
        raise ValueError(f"file_name must be a str or a path, not {path!r}")
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        caches, metadata = _load(path, number, mmap, verify)
    except PromptCacheFileError:
        raise
    except ValueError as error:
        raise PromptCacheFileError(path, str(error)) from error
    finally:
        os.close(number)
    return (caches, metadata) if return_metadata else caches


def _load(path: str, number: int, mmap: bool, verify: bool) -> tuple[list[Any], dict[str, str]]:
    info = os.fstat(number)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(21, "is a directory", path)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("it is no ordinary file")
    size, read = info.st_size, reader_of(number)
    if size <= AT_ONCE:
        read = _within(read(0, size))
    header = read_header(read, size)
    listing = read_listing(header.metadata)
    tensors, facts, checksums = header.tensors, None, {}
    if listing.facts:
        if not header.sealed:
            raise ValueError("its header was changed after it was saved")
        facts = read_facts(listing.facts)
        if facts.layout == "mappable":
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(PADDING)}
        checksums = checksums_of(facts.checksums, tensors)
    if mmap and not verify:
        # Scalars say how the tensors are to be read, like the header, and are always checked.
        checksums = {name: checksum for name, checksum in checksums.items() if name in listing.scalars}
    for name in listing.scalars:
        if name not in tensors or tensors[name].nbytes > SHORT:
            raise ValueError(f"{name[:80]!r} is listed as a scalar, but there is no short tensor of that name")
    arrays = None
    if mmap and facts is not None and facts.layout == "mappable" and not listing.scalars:
        arrays = _mapped(path, tensors, checksums)
    contents: Mapping[str, bytes] = {}
    if arrays is None:
        arrays, contents = read_tensors(number, read, tensors, checksums, listing.scalars)
    leaves = _leaves(listing, facts, tensors, arrays, contents)
    caches = _caches(listing, unflatten(leaves.items()))
    held = (leaf for cache in caches for _, leaf in flatten(cache.state))
    mx.eval([leaf for leaf in held if isinstance(leaf, mx.array)])
    if os.fstat(number).st_size < size:
        raise ValueError(f"it had {size} bytes, and has become shorter while it was read")
    return caches, {**listing.metadata, **(facts.metadata if facts else {})}


def _within(content: bytes) -> Read:
    return lambda offset, length: content[offset : offset + length]


def _mapped(path: str, tensors: Mapping[str, Tensor], checksums: Mapping[str, int]) -> Arrays | None:
    """The tensors as arrays over the file's own pages; None where MLX cannot have them."""
    mapped = MappedFile(path, "cow")
    arrays: Arrays = {}
    for name, tensor in tensors.items():
        array = adopt(mapped, tensor)
        if array is None:
            return None
        arrays[name] = array
    for name, checksum in checksums.items():
        check_sum(name, checksum_of(arrays[name], mapped.view(tensors[name].start, tensors[name].nbytes)), checksum)
    return arrays


def _leaves(
    listing: Listing, facts: Facts | None, tensors: Mapping[str, Tensor], arrays: Arrays, contents: Mapping[str, bytes]
) -> dict[str, Any]:
    """What the states hold, by path."""
    leaves: dict[str, Any] = dict(arrays)
    for path, kind in listing.scalars.items():
        leaves[path] = read_scalar(path, kind, tensors[path], contents[path])
    extra: dict[str, Any] = {} if facts is None else {**facts.scalars, **{path: [] for path in facts.empty}}
    twice = leaves.keys() & extra.keys()
    if twice:
        raise ValueError(f"there are two values at {min(twice)}")
    return leaves | extra


def _caches(listing: Listing, states: list[Any]) -> list[Any]:
    if len(listing.classes) != len(states):
        raise ValueError(f"it has {len(listing.classes)} classes for {len(states)} states")
    if listing.older is not None:
        states = newer_states(listing.classes, states, listing.older)
    caches = []
    for i, (name, state) in enumerate(zip(listing.classes, states, strict=True)):
        try:
            caches.append(KINDS[name].from_state(state))
        except ValueError as error:
            raise ValueError(f"cache {i}, {name}: {error}") from error
    return caches
