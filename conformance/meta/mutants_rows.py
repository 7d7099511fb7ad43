"""Mistakes with rows: filter, extend, merge and extract take another row, another order, or too much."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

# -- filter ---------------------------------------------------------------------------------------


@breaks("BatchKVCache.filter", "BatchRotatingKVCache.filter", wrong="rows come out in their old order")
def filter_sorts(original: Any, self: Any, rows: Any) -> None:
    original(self, sorted(rows))


@breaks("BatchKVCache.filter", wrong="a fork's second copy is left out", seen="rows")
def filter_leaves_forks_out(original: Any, self: Any, rows: Any) -> None:
    original(self, list(dict.fromkeys(rows)))


@breaks("BatchRotatingKVCache.filter", wrong="a row named twice holds its neighbour's tokens the second time")
def fork_takes_the_neighbour(original: Any, self: Any, rows: Any) -> None:
    held = self.offset.size
    again = [row in rows[:i] and row < held for i, row in enumerate(rows)]
    original(self, [(row + 1) % held if twice else row for row, twice in zip(rows, again, strict=True)])


@breaks("BatchKVCache.filter", wrong="the values come out in reverse order", seen="values")
def values_in_reverse(original: Any, self: Any, rows: Any) -> None:
    original(self, rows)
    if self.values is not None:
        self.values = self.values[::-1]


@breaks(
    "BatchKVCache.filter",
    "BatchRotatingKVCache.filter",
    wrong="offsets stay with the places and do not follow the rows",
)
def offsets_do_not_follow(original: Any, self: Any, rows: Any) -> None:
    before = self._offsets
    original(self, rows)
    self._offsets = before[: len(self._offsets)]


@breaks(
    "BatchKVCache.filter",
    "BatchRotatingKVCache.filter",
    wrong="left padding stays with the places and does not follow the rows",
)
def pads_do_not_follow(original: Any, self: Any, rows: Any) -> None:
    before = dict(enumerate(self._pads))
    original(self, rows)
    dropped = [before[row] - pad for row, pad in zip(rows, self._pads, strict=True)][:1] or [0]
    self._pads = tuple(max(0, before[i] - dropped[0]) for i in range(len(self._pads)))


@breaks(
    "BatchKVCache._useless_columns",
    wrong="columns that are padding in every row left are kept",
    seen="size shape_of_keys",
)
def useless_columns_kept(original: Any, self: Any, pads: Any) -> int:
    return 0


@breaks("BatchKVCache._useless_columns", wrong="one column too many is dropped with the padding")
def one_column_too_many(original: Any, self: Any, pads: Any) -> Any:
    useless = original(self, pads)
    return useless + 1 if 0 < useless < self.size() else useless


@breaks("BatchKVCache.filter", "BatchRotatingKVCache.filter", wrong="with no rows left, the columns stay")
def columns_stay_without_rows(original: Any, self: Any, rows: Any) -> None:
    if len(rows) or not self.offset.size:
        original(self, rows)
    else:
        self._pads, self._offsets, self._pending = (), (), None
        if self.keys is not None:
            self.keys, self.values = self.keys[:0], self.values[:0]


# -- extend ---------------------------------------------------------------------------------------


@breaks("BatchKVCache.extend", "BatchRotatingKVCache.extend", wrong="the other batch's rows come first")
def extend_in_front(original: Any, self: Any, other: Any) -> None:
    mine = self.offset.size
    original(self, other)
    self.filter([*range(mine, self.offset.size), *range(mine)])


@breaks("BatchKVCache.extend", "BatchRotatingKVCache.extend", wrong="the other batch is emptied")
def extend_empties_the_other(original: Any, self: Any, other: Any) -> None:
    original(self, other)
    if other is not self:
        other.filter([])


@breaks("BatchKVCache.extend", "BatchRotatingKVCache.extend", wrong="the other batch's prefill is ended")
def extend_finalizes_the_other(original: Any, self: Any, other: Any) -> None:
    original(self, other)
    if other is not self:
        other.finalize()


@breaks(
    "BatchRotatingKVCache.extend",
    wrong="the other batch is put in temporal order, where its head is lost",
)
def extend_reorders_the_other(original: Any, self: Any, other: Any) -> None:
    original(self, other)
    if other is not self and other.offset.size:
        k, v, offset, pads, size, columns, head, wrapped, *pending = other.state
        if wrapped:
            order = mx.array([*range(other.keep), *range(head, size), *range(other.keep, head)])
            state = (k[:, :, order], v[:, :, order], offset, pads, size, columns, size, False, *pending)
            other.state = state


@breaks(
    "BatchKVCache.extend",
    "BatchRotatingKVCache.extend",
    wrong="rows of a batch without columns are lost when it is extended",
    seen="rows",
)
def extend_replaces_an_empty_batch(original: Any, self: Any, other: Any) -> None:
    rows = self.offset.size
    empty = self.keys is None
    original(self, other)
    if empty:
        self.filter(list(range(rows, self.offset.size)))


@breaks(
    "BatchKVCache.extend",
    "BatchRotatingKVCache.extend",
    wrong="an other batch without columns brings no rows",
    seen="rows refusal",
)
def extend_by_an_empty_batch_ignored(original: Any, self: Any, other: Any) -> None:
    if getattr(other, "keys", True) is not None or not isinstance(other, type(self)):
        original(self, other)


@breaks("BatchRotatingKVCache.extend", wrong="the offsets of joined rows count the columns held", seen="offset offsets")
def extend_counts_columns(original: Any, self: Any, other: Any) -> None:
    mine = self.offset.size
    original(self, other)
    held = tuple(min(o, self.max_size) for o in self._offsets[mine:])
    self._offsets = self._offsets[:mine] + held


BATCHES = "BatchKVCache BatchRotatingKVCache"


@breaks("row_copies.copy_rows", kinds=BATCHES, wrong="shorter rows are padded behind their tokens")
def padded_behind(original: Any, sources: Any, plan: Any, *rest: Any) -> Any:
    rows = [tuple(r._replace(column=r.first) if len(row) == 1 else r for r in row) for row in plan.rows]
    return original(sources, type(plan)(rows), *rest)


@breaks("extend.write_rows", kinds=BATCHES, wrong="a row that joins overwrites the last one", seen="visible values")
def written_over_the_last(original: Any, buffer: Any, held: int, *rest: Any) -> Any:
    return original(buffer, held - 1, *rest)


@breaks("BatchKVCache._stored_arrays", "BatchRotatingKVCache._stored_arrays", wrong="spare rows are fetched too")
def spare_rows_fetched(original: Any, self: Any) -> Any:
    return tuple(buffer[:, :, : self._columns()] for buffer in self._buffers() or ()) or (None, None)


# -- merge ----------------------------------------------------------------------------------------


@breaks("BatchKVCache.merge", "BatchRotatingKVCache.merge", wrong="rows come in reverse order")
def merge_in_reverse(original: Any, cls: Any, caches: Any) -> Any:
    return original(cls, caches[::-1])


@breaks("BatchKVCache.merge", "BatchRotatingKVCache.merge", wrong="caches without tokens get no row", seen="rows")
def merge_forgets_empty_rows(original: Any, cls: Any, caches: Any) -> Any:
    return original(cls, [cache for cache in caches if not cache.empty()] or caches)


@breaks("BatchRotatingKVCache.merge", wrong="the offset of a merged row counts the columns held", seen="offset offsets")
def merge_counts_columns(original: Any, cls: Any, caches: Any) -> Any:
    batch = original(cls, caches)
    batch._offsets = tuple(cache.size() for cache in caches)
    return batch


@breaks("BatchKVCache.merge", "BatchRotatingKVCache.merge", wrong="the shortest row's left padding is one short")
def merge_pads_one_short(original: Any, cls: Any, caches: Any) -> Any:
    batch = original(cls, caches)
    most = max(batch._pads)
    batch._pads = tuple(p - 1 if p == most > 0 else p for p in batch._pads)
    return batch


@breaks("BatchKVCache.merge", "BatchRotatingKVCache.merge", wrong="the merged caches are emptied")
def merge_empties_its_sources(original: Any, cls: Any, caches: Any) -> Any:
    batch = original(cls, caches)
    for cache in caches:
        cache.keys = cache.values = None
        cache.__dict__.update(vars(type(cache)(cache.max_size) if "Rotating" in cls.__name__ else type(cache)()))
    return batch


# -- extract --------------------------------------------------------------------------------------


@breaks("BatchKVCache.extract", "BatchRotatingKVCache.extract", wrong="the row before is extracted")
def extract_the_row_before(original: Any, self: Any, row: int) -> Any:
    return original(self, row - 1 if 0 < row < self.offset.size else row)


@breaks("BatchKVCache.extract", wrong="an extracted cache keeps left pads as tokens")
def extract_keeps_pads(original: Any, self: Any, row: int) -> Any:
    made = original(self, row)
    keys, values = self.state[:2]
    if keys is None or not made.offset:
        return made
    return type(made).from_state((keys[row : row + 1], values[row : row + 1], keys.shape[2]))


@breaks(
    "BatchKVCache.extract",
    "BatchRotatingKVCache.extract",
    wrong="an extracted cache keeps pending right pads as tokens",
)
def extract_keeps_right_pads(original: Any, self: Any, row: int) -> Any:
    there = copy.deepcopy(self)
    there._pending = None
    return original(there, row)


@breaks(
    "BatchRotatingKVCache.extract",
    wrong="the offset of an extracted ring counts the columns held",
    seen="offset offsets",
)
def extract_counts_columns(original: Any, self: Any, row: int) -> Any:
    made = original(self, row)
    made.offset = made.size()
    return made


@breaks("BatchKVCache.extract", "BatchRotatingKVCache.extract", wrong="the row leaves the batch", seen="")
def extract_removes_the_row(original: Any, self: Any, row: int) -> Any:
    made = original(self, row)
    rows = list(range(self.offset.size))
    del rows[row]
    self.filter(rows)
    return made


# -- solo caches of several rows ------------------------------------------------------------------


@breaks(
    "KVCache.update_and_fetch",
    "RotatingKVCache.update_and_fetch",
    wrong="all rows of a solo cache get the first one's tokens",
    seen="visible columns",
)
def first_row_for_all(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    first = (mx.broadcast_to(x[:1], x.shape) for x in (keys, values))
    return original(self, *first)
