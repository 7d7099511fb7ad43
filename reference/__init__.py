"""The executable specification of the KV-cache operations, in NumPy.

Every operation takes a `Cache` and returns a new one; nothing is mutated. Read `README.md` first: it holds the laws
and the order in which to read these files.
"""

from reference.arrays import (
    Arrays,
    advance,
    arrays,
    empty_arrays,
    extend_arrays,
    extract_array_row,
    filter_arrays,
    finalize_arrays,
    merge_arrays,
    prepare_arrays,
    store,
    tokens_mask,
)
from reference.cache_list import CacheList, each
from reference.chunked import chunked, start_position, trim_front
from reference.extend import extend
from reference.extract import extract
from reference.filter import filter_rows
from reference.masks import make_mask
from reference.merge import merge
from reference.padding import finalize, prepare
from reference.quantize import Quantized, dequantize, quantize
from reference.quantized import fetch, quantized, quantized_update, to_quantized
from reference.state import NO_TOKEN, Cache, Pending, batch, check, empty, offsets, restored, ring, size, solo
from reference.trim import can_trim, is_trimmable, trim, trim_limit
from reference.update import update

__all__ = [
    "NO_TOKEN",
    "Arrays",
    "Cache",
    "CacheList",
    "Pending",
    "Quantized",
    "advance",
    "arrays",
    "batch",
    "can_trim",
    "check",
    "chunked",
    "dequantize",
    "each",
    "empty",
    "empty_arrays",
    "extend",
    "extend_arrays",
    "extract",
    "extract_array_row",
    "fetch",
    "filter_arrays",
    "filter_rows",
    "finalize",
    "finalize_arrays",
    "is_trimmable",
    "make_mask",
    "merge",
    "merge_arrays",
    "offsets",
    "prepare",
    "prepare_arrays",
    "quantize",
    "quantized",
    "quantized_update",
    "restored",
    "ring",
    "size",
    "solo",
    "start_position",
    "store",
    "to_quantized",
    "tokens_mask",
    "trim",
    "trim_front",
    "trim_limit",
    "update",
]
