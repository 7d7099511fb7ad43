"""The executable specification of the KV-cache operations, in NumPy.

Every operation takes a `Cache` and returns a new one; nothing is mutated. Read `README.md` first: it holds the laws
and the order in which to read these files.
"""

from reference.extend import extend
from reference.extract import extract
from reference.filter import filter_rows
from reference.masks import make_mask
from reference.merge import merge
from reference.padding import finalize, prepare
from reference.state import NO_TOKEN, Cache, Pending, batch, check, empty, offsets, ring, size, solo
from reference.trim import can_trim, is_trimmable, trim, trim_limit
from reference.update import update

__all__ = [
    "NO_TOKEN",
    "Cache",
    "Pending",
    "batch",
    "can_trim",
    "check",
    "empty",
    "extend",
    "extract",
    "filter_rows",
    "finalize",
    "is_trimmable",
    "make_mask",
    "merge",
    "offsets",
    "prepare",
    "ring",
    "size",
    "solo",
    "trim",
    "trim_limit",
    "update",
]
