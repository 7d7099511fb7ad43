"""Caches from a file: mlximpl's own, or one of mlx-lm 0.31 or 0.32."""

import errno
import os
import stat
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import mlx.core as mx

from .checksums import SHORT, check_sum, checksum_of, sums_if_long
from .dlpack import adopt, can_adopt
from .file_error import PromptCacheFileError
from .file_facts import checksums_of, read_facts
from .kinds import KINDS
from .mapped_file import MappedFile
from .mlx_lm_files import Listing, newer_states, read_listing
from .safetensors_header import Header, Tensor, read_header
from .safetensors_reader import Read, read_tensors, reader_of
from .safetensors_writer import PADDING
from .scalars import read_scalar
from .state_tree import flatten, unflatten

AT_ONCE = 1 << 20
"""A file of up to so many bytes is read at once."""

Arrays = dict[str, mx.array]
Path = str | os.PathLike[str]


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
        mmap: take the pages of a mappable file as they are, where MLX can (on Metal). They are private: what is written
            to them stays in memory. The file may be replaced or deleted, but must not be written to in place as long as
            its caches are in use. Elsewhere, and where the layout is another, the file is read.
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
    except ValueError as error:
        raise PromptCacheFileError(path, f"{error!s:.1000}") from error
    finally:
        os.close(number)
    return (caches, metadata) if return_metadata else caches


def _load(path: str, number: int, mmap: bool, verify: bool) -> tuple[list[Any], dict[str, str]]:
    size, read = _size(path, number), reader_of(number)
    if size <= AT_ONCE:
        read = _within(read(0, size))
    file = _described(read_header(read, size))
    checksums = file.checksums
    if mmap and not verify:
        # Scalars say how the tensors are to be read, like the header, and are always checked.
        checksums = {name: checksum for name, checksum in checksums.items() if name in file.listing.scalars}
    arrays = _mapped(number, file.tensors, checksums) if mmap and file.mappable and can_adopt() else None
    contents: Mapping[str, bytes] = {}
    if arrays is None:
        try:
            arrays, contents = read_tensors(number, read, file.tensors, checksums, file.listing.scalars)
        except RuntimeError as error:  # how MLX says that it could not read
            _check_whole(number, size)
            raise OSError(errno.EIO, str(error), path) from error
    caches = _caches(file.listing, unflatten(_leaves(file, arrays, contents).items()))
    _check_whole(number, size)
    return caches, {**file.listing.metadata, **file.metadata}


def _check_whole(number: int, size: int) -> None:
    if os.fstat(number).st_size < size:
        raise ValueError(f"it had {size} bytes, and has become shorter while it was read")


def _size(path: str, number: int) -> int:
    info = os.fstat(number)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory", path)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("it is no ordinary file")
    return info.st_size


def _within(content: bytes) -> Read:
    return lambda offset, length: content[offset : offset + length]


class _File(NamedTuple):
    """What a header says: the tensors without padding, and what mlximpl's own files say of themselves."""

    listing: Listing
    tensors: dict[str, Tensor]
    checksums: dict[str, int]
    mappable: bool
    values: dict[str, Any]
    """Scalars and empty lists that are no tensors, by path."""
    metadata: dict[str, str]
    """Entries that mlx-lm would not read back."""


def _described(header: Header) -> _File:
    listing, tensors = read_listing(header.metadata), header.tensors
    if not listing.facts:
        file = _File(listing, tensors, {}, False, {}, {})
    elif not header.sealed:
        raise ValueError("its header was changed after it was saved")
    else:
        facts = read_facts(listing.facts)
        mappable = facts.layout == "mappable"
        if mappable:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(PADDING)}
        values = facts.scalars | {path: [] for path in facts.empty}
        file = _File(listing, tensors, checksums_of(facts.checksums, tensors), mappable, values, facts.metadata)
    for name in listing.scalars:
        if name not in tensors or tensors[name].nbytes > SHORT:
            raise ValueError(f"{name[:80]!r} is listed as a scalar, but there is no short tensor of that name")
    return file


def _mapped(number: int, tensors: Mapping[str, Tensor], checksums: Mapping[str, int]) -> Arrays | None:
    """The tensors as arrays over the file's own pages; None where MLX cannot have them."""
    mapped = MappedFile(f"/dev/fd/{number}", "cow")
    arrays: Arrays = {}
    for name, tensor in tensors.items():
        array = adopt(mapped, tensor)
        if array is None:
            return None
        arrays[name] = array
    for name, checksum in checksums.items():
        view = mapped.view(tensors[name].start, tensors[name].nbytes)
        check_sum(name, checksum_of(view, sums_if_long(arrays[name])), checksum)
    return arrays


def _leaves(file: _File, arrays: Arrays, contents: Mapping[str, bytes]) -> dict[str, Any]:
    """What the states hold, by path."""
    leaves: dict[str, Any] = dict(arrays)
    for path, kind in file.listing.scalars.items():
        leaves[path] = read_scalar(path, kind, file.tensors[path], contents[path])
    twice = leaves.keys() & file.values.keys()
    if twice:
        raise ValueError(f"there are two values at {min(twice)}")
    return leaves | file.values


def _caches(listing: Listing, states: list[Any]) -> list[Any]:
    if len(listing.classes) != len(states):
        raise ValueError(f"it has {len(listing.classes)} classes for {len(states)} states")
    if listing.older is not None:
        states = newer_states(listing.classes, states, listing.older)
    caches, held = [], []
    for i, (name, state) in enumerate(zip(listing.classes, states, strict=True)):
        try:
            caches.append(KINDS[name].from_state(state))
            held += [leaf for _, leaf in flatten(caches[-1].state) if isinstance(leaf, mx.array)]
        except Exception as error:
            # A state that a file holds may be anything: whatever it leads to is the file's fault.
            what = str(error) if isinstance(error, ValueError) else repr(error)
            raise ValueError(f"cache {i}, {name}: {what}") from error
    mx.eval(held)
    return caches
