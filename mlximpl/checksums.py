"""Checksums of tensors: the crc32 of each MiB of one, so that several threads can share a long one.

2.5 MiB   ->   [crc32 of the first MiB, of the second, of the rest]        no bytes   ->   []
"""

import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

BLOCK = 1 << 20

Sums = Sequence[int]


def blocks(nbytes: int) -> int:
    """How many checksums so many bytes have."""
    return -(-nbytes // BLOCK)


def checksums_of(view: memoryview) -> list[int]:
    """The checksums of bytes."""
    return [zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(view), BLOCK)]


def check_sums(name: str, found: Sums, expected: Sums) -> None:
    """Refuse bytes that are not those that were saved."""
    for i, (crc, saved) in enumerate(zip(found, expected, strict=True)):
        if crc != saved:
            raise ValueError(f"tensor {name!r} was changed: MiB {i} of it has the checksum {crc:08x}, not {saved:08x}")


def check_views(views: Mapping[str, memoryview], expected: Mapping[str, Sums]) -> None:
    """Check several at once, on as many threads as there are processors; ValueError for one that was changed."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as threads:
        for name, found in zip(views, threads.map(checksums_of, views.values()), strict=True):
            check_sums(name, found, expected[name])
