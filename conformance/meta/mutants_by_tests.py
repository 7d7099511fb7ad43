"""Mistakes that tests catch, and no machine: what lies in the bytes of a file, on the disk or in memory; what is rare.

The kind of such a mutant is the test that must go red.
"""

from __future__ import annotations

import io
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks


def _test(name: str, module: str = "test_files") -> str:
    return f"{module}.py::test_{name}"


GONE = _test("tokens_that_are_gone_are_not_in_the_file")
PADS = _test("pads_are_zeros_in_the_file")
GOES_ON = _test("a_loaded_cache_goes_on_as_the_saved_one")
COMES_BACK = _test("every_kind_comes_back")

# -- what is in the file --------------------------------------------------------------------------


@breaks("KVCache._saved_state", kinds=GONE, wrong="trimmed tokens and spare columns are saved")
def saves_what_was_trimmed(original: Any, self: Any) -> Any:
    return self.keys, self.values, self.offset


@breaks("BatchKVCache._saved_state", kinds=GONE, wrong="trimmed tokens and spare columns of a batch are saved")
def saves_what_was_trimmed_in_a_batch(original: Any, self: Any) -> Any:
    return self.keys, self.values, *original(self)[2:]


@breaks("ChunkedKVCache._saved_state", kinds=GONE, wrong="tokens dropped in front and trimmed behind are saved")
def saves_the_whole_chunk_buffer(original: Any, self: Any) -> Any:
    return self.keys, self.values, *original(self)[2:]


@breaks("saved_columns.hide_pads", kinds=PADS, wrong="what pads hold is saved")
def saves_what_pads_hold(original: Any, array: Any, *where: Any) -> Any:
    return array


@breaks("saved_columns.hide_pads", kinds=PADS, wrong="what right pads hold is saved")
def saves_what_right_pads_hold(original: Any, array: Any, ring: Any, pads: Any, tails: Any = ()) -> Any:
    return original(array, ring, pads)


@breaks("saved_columns.hide_pads", kinds=PADS, wrong="right pads are sought in front")
def blanks_the_other_end(original: Any, array: Any, ring: Any, pads: Any, tails: Any = ()) -> Any:
    return original(array, ring, [p + t for p, t in zip(pads, tails, strict=True)] if tails else pads)


@breaks(
    "saved_columns.hide_pads",
    kinds=_test("slots_that_a_trim_left_in_a_ring_are_zeros"),
    wrong="pads of a wrapped ring are sought in slot order",
)
def blanks_in_slot_order(original: Any, array: Any, ring: Any, *pads: Any) -> Any:
    return original(array, ring.in_order(ring.stored), *pads)


@breaks("BatchRotatingKVCache._saved_state", kinds=GOES_ON, wrong="a batch of rings is saved without its head")
def saves_rings_without_head(original: Any, self: Any) -> Any:
    state = list(original(self))
    state[6:8] = self._ring.stored, False
    return tuple(state)


@breaks("RotatingKVCache._saved_state", kinds=GOES_ON, wrong="a ring is saved in temporal order, its head as it was")
def saves_in_order_with_the_head(original: Any, self: Any) -> Any:
    keys, values, *numbers = original(self)
    ring = self._ring
    if ring.wrapped and keys is not None:
        order = mx.array([*range(ring.keep), *range(ring.head, ring.stored), *range(ring.keep, ring.head)])
        keys, values = keys[:, :, order], values[:, :, order]
    return keys, values, *numbers


@breaks(
    "RotatingKVCache._saved_state",
    kinds=_test("after_a_load_as_many_tokens_can_be_trimmed_as_before"),
    wrong="what a trim of the last tokens needs is not saved",
)
def saves_max_size_alone(original: Any, self: Any) -> Any:
    keys, values, *numbers = original(self)
    spare = self._ring.stored - self.max_size
    if spare > 0 and keys is not None:
        keep = self.keep
        keys, values = (mx.concatenate([x[:, :, :keep], x[:, :, keep + spare :]], axis=2) for x in (keys, values))
        numbers[3] = self.max_size
    return keys, values, *numbers


@breaks("state_tree.flatten", kinds=COMES_BACK, wrong="lists without elements are left out")
def empty_lists_left_out(original: Any, tree: object, path: str = "") -> Any:
    return [(where, leaf) for where, leaf in original(tree, path) if not isinstance(leaf, list)]


@breaks("mlx_lm_files.mlx_lm_keeps", kinds=_test("metadata_come_back_as_given"), wrong="metadata are never set apart")
def all_metadata_for_mlx_lm(original: Any, key: str, value: str) -> bool:
    return True


@breaks("mlx_lm_files.mlx_lm_keeps", kinds=_test("any_safetensors_reader_reads_it"), wrong="no metadata are for mlx-lm")
def no_metadata_for_mlx_lm(original: Any, key: str, value: str) -> bool:
    return False


@breaks(
    "mlx_lm_files.mlx_lm_reads",
    kinds=_test("the_file_says_whether_mlx_lm_reads_it_and_is_right"),
    wrong="mlx-lm is said to read every state",
)
def mlx_lm_reads_everything(original: Any, name: str, state: Any) -> bool:
    return True


@breaks(
    "safetensors_writer.with_padding",
    kinds=_test("any_safetensors_reader_reads_it"),
    wrong="a mappable file has no padding",
)
def no_padding(original: Any, items: Any) -> Any:
    return list(items)


@breaks("safetensors_writer.item_of", kinds=_test("every_dtype_comes_back"), wrong="complex numbers lose their parts")
def real_parts_saved(original: Any, name: str, array: mx.array) -> Any:
    return original(name, array.astype(mx.float32) if array.dtype == mx.complex64 else array)


@breaks(
    "safetensors_writer.words_of",
    kinds=_test("any_safetensors_reader_reads_it"),
    wrong="heads and columns are written in each other's order",
)
def columns_before_heads(original: Any, array: mx.array) -> mx.array:
    written: mx.array = original(mx.contiguous(array.swapaxes(1, 2)) if array.ndim == 4 else array)
    return written


# -- how it gets to the disk ----------------------------------------------------------------------

SAVING = "test_files_saving"


@breaks(
    "atomic_file.replacing",
    kinds=_test("a_save_that_fails_leaves_the_old_file", SAVING),
    wrong="the old file is written over",
)
def written_over_the_old(original: Any, path: str, durable: bool = False) -> Any:
    return open(path, "wb")


@contextmanager
def _beside(path: str, sync: bool, remove: bool) -> Iterator[io.BufferedWriter]:
    beside = f"{path}.tmp"
    try:
        with open(beside, "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        if remove:
            os.unlink(beside)
        raise


@breaks(
    "atomic_file.replacing",
    kinds=_test("it_is_on_the_disk_before_it_has_its_name", SAVING),
    wrong="the file is renamed before it is on the disk",
)
def not_synced(original: Any, path: str, durable: bool = False) -> Any:
    return _beside(path, sync=False, remove=True)


@breaks(
    "atomic_file.replacing",
    kinds=_test("an_interrupt_leaves_the_old_file", SAVING),
    wrong="what was written of a file stays when the save fails",
)
def half_a_file_stays(original: Any, path: str, durable: bool = False) -> Any:
    return _beside(path, sync=True, remove=False)


@breaks(
    "atomic_file.replacing",
    kinds=_test("a_link_stays_and_what_it_points_to_is_replaced", SAVING),
    wrong="a symbolic link is replaced by the file",
)
def link_replaced(original: Any, path: str, durable: bool = False) -> Any:
    return _beside(path, sync=True, remove=True)


@breaks(
    "atomic_file.replacing",
    kinds=_test("permissions", SAVING),
    wrong="a file that is replaced loses its permissions",
)
def permissions_lost(original: Any, path: str, durable: bool = False) -> Any:
    return _beside(path, sync=True, remove=True)


@breaks(
    "atomic_file.replacing",
    kinds=_test("it_is_on_the_disk_before_it_has_its_name", SAVING),
    wrong="every save waits for the disk",
)
def always_synced(original: Any, path: str, durable: bool = False) -> Any:
    return original(path, True)


@breaks(
    "atomic_file.replacing",
    kinds=_test("it_is_on_the_disk_before_it_has_its_name", SAVING),
    wrong="a durable file may not be on the disk",
)
def never_synced(original: Any, path: str, durable: bool = False) -> Any:
    return original(path)


@breaks(
    "atomic_file._sync_folder",
    kinds=_test("it_is_on_the_disk_before_it_has_its_name", SAVING),
    wrong="the new name may not be on the disk",
)
def folder_not_synced(original: Any, folder: str) -> None:
    return None


# -- what is refused ------------------------------------------------------------------------------

REFUSED = "test_files_refused"


@breaks(
    "checksums.check_sum", kinds=_test("every_byte_of_a_compact_file_counts", REFUSED), wrong="no checksum is looked at"
)
def checksums_not_checked(original: Any, name: str, found: int, expected: int) -> None:
    return None


@breaks(
    "checksums.check_sum", kinds=_test("every_byte_of_a_compact_file_counts", REFUSED), wrong="scalars are not checked"
)
def scalars_not_checked(original: Any, name: str, found: int, expected: int) -> None:
    if name.endswith((".0", ".1")):
        original(name, found, expected)


@breaks(
    "safetensors_header.seal_fits",
    kinds=_test("every_byte_of_a_compact_file_counts", REFUSED),
    wrong="a header that was changed is taken",
)
def seal_not_checked(original: Any, raw: bytes) -> bool | None:
    return None if original(raw) is None else True


@breaks(
    "checksums.sums_of",
    kinds=_test("the_checksum_of_a_long_tensor", REFUSED),
    wrong="what is left behind the rows of a long tensor is not added",
)
def rest_not_added(original: Any, array: mx.array) -> Any:
    sums = original(array)
    return sums._replace(words=sums.words[:0])


@breaks(
    "safetensors_header._tensors",
    kinds=_test("a_header_that_is_wrong", REFUSED),
    wrong="tensors may overlap and leave holes",
)
def overlapping_tensors_taken(original: Any, entries: Any, data: int, size: int) -> Any:
    from mlximpl.safetensors_header import _tensor

    return {name: _tensor(name, entry, data, size) for name, entry in entries.items()}


@breaks("safetensors_header.check_amount", kinds=_test("a_header_is_not_blown_up", REFUSED), wrong="any header is read")
def any_header_read(original: Any, raw: bytes) -> None:
    return None


# -- memory ---------------------------------------------------------------------------------------


def _shared(original: Any, self: Any, path: Any, mode: str = "ro") -> None:
    original(self, path, mode)
    if mode == "cow" and not str(path).startswith("/dev"):
        number = os.open(path, os.O_RDWR)
        self._map = mmap.mmap(number, self.size, access=mmap.ACCESS_WRITE)
        os.close(number)


@breaks(
    "MappedFile.__init__",
    kinds=_test("what_is_written_to_a_private_view_stays_in_memory", "test_mapped_file"),
    wrong="what is written to a private view reaches the file",
)
def written_through(original: Any, self: Any, *given: Any, **named: Any) -> None:
    _shared(original, self, *given, **named)


@breaks(
    "MappedFile._range",
    kinds=_test("a_view_lies_within_the_file", "test_mapped_file"),
    wrong="a view is cut to the file",
)
def view_cut_to_the_file(original: Any, self: Any, offset: int, length: int) -> Any:
    offset = min(max(0, offset), self.size)
    return original(self, offset, min(max(0, length), self.size - offset))


@breaks(
    "MappedFile.close",
    kinds=_test("a_closed_file_gives_nothing", "test_mapped_file"),
    wrong="views outlive the file that they are of",
)
def views_stay_open(original: Any, self: Any) -> None:
    self._map = None


@breaks(
    "dlpack.adopt",
    kinds=_test("whole_pages_are_cut_to_the_tensors", "test_files_mapped"),
    wrong="a tensor that ends within a page gets the page's rest",
)
def padding_adopted(original: Any, mapped: Any, tensor: Any) -> Any:
    array = original(mapped, tensor)
    return array if array is None or not array.size else mx.concatenate([array.reshape(-1), array.reshape(-1)[:1]])


@breaks(
    "load_prompt_file._mapped",
    kinds=_test("pages_are_checked_if_asked", "test_files_mapped"),
    wrong="a mapped file is not checked where it was asked for",
)
def pages_not_checked(original: Any, number: int, tensors: Any, checksums: Any) -> Any:
    return original(number, tensors, {})


@breaks(
    "safetensors_writer._begin",
    kinds=_test("a_save_keeps_one_tensor_at_a_time", SAVING),
    wrong="what was written of a file stays in memory until all is",
)
def written_at_once(original: Any, items: Any, i: int) -> Any:
    return original([*items], i)


# -- other files, and many caches -----------------------------------------------------------------

OLDER, ORDER = "test_files_older", "test_files_order"


@breaks(
    "mlx_lm_files._check_slid",
    kinds=_test("a_slid_chunk_of_an_older_file_is_read_where_its_offset_is_in_it", OLDER),
    wrong="of a slid chunk all columns are taken for tokens",
)
def slid_chunk_guessed(original: Any, *given: Any) -> None:
    return None


@breaks(
    "mlx_lm_files._newer",
    kinds=_test("older_layouts", OLDER),
    wrong="of an older ring head and offset are read in each other's place",
)
def older_rings_confused(original: Any, what: str, name: str, state: Any, info: Any) -> Any:
    found = original(what, name, state, info)
    return [*found[:2], found[5], *found[3:5], found[2]] if name == "RotatingKVCache" else found


@breaks(
    "mlx_lm_files._classes",
    kinds=_test("more_than_ten_caches_come_back_in_their_order", ORDER),
    wrong="classes are read in the order of their names: 10 before 2",
)
def classes_in_the_order_of_names(original: Any, entries: Any) -> Any:
    found = original(entries)
    return [found[int(i)] for i in sorted(map(str, range(len(found))))]


@breaks(
    "state_tree.unflatten",
    kinds=_test("more_than_ten_caches_come_back_in_their_order", ORDER),
    wrong="states are read in the order of their names: 10 before 2",
)
def states_in_the_order_of_names(original: Any, leaves: Any) -> Any:
    found = original(leaves)
    return [found[int(i)] for i in sorted(map(str, range(len(found))))]


@breaks(
    "scalars.read_scalar", kinds=_test("numbers_below_0_come_back", ORDER), wrong="numbers are read without their sign"
)
def numbers_without_sign(original: Any, path: str, kind: str, tensor: Any, content: bytes) -> Any:
    if tensor.dtype == "I32" and kind == "scalar":
        tensor = tensor._replace(dtype="U32")
    return original(path, kind, tensor, content)


# -- what no machine asks -------------------------------------------------------------------------

KINDS = "test_kinds_surface"


@breaks(
    "ArraysCache.advance",
    kinds=_test("lengths_and_left_padding_are_arrays_of_host_numbers", KINDS),
    wrong="left padding counts on below 0",
)
def left_padding_below_0(original: Any, self: Any, n: int) -> None:
    before = self._due
    original(self, n)
    self._due = before if before is None else tuple(due - n for due in before)


@breaks(
    "CacheList.can_trim",
    kinds=_test("what_a_list_can_give_back_is_what_all_can", KINDS),
    wrong="whether tokens may go is asked of the first child alone",
)
def trim_asked_of_the_first(original: Any, self: Any, n: int) -> bool:
    return bool(self.caches[0].can_trim(n))
