"""Mistakes with lists of caches: a child left out, two of them swapped, some done when another refuses."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from conformance.meta.mutant import breaks

KIND = "CacheList"


# -- some children, not all -----------------------------------------------------------------------


@breaks("CacheList.filter", wrong="the first child alone is filtered")
def first_child_filtered(original: Any, self: Any, rows: Any) -> None:
    self.caches[0].filter(rows)


@breaks("CacheList.filter", wrong="the last child is not filtered")
def last_child_not_filtered(original: Any, self: Any, rows: Any) -> None:
    whole = self.caches
    self.caches = whole[:-1] or whole
    try:
        original(self, rows)
    finally:
        self.caches = whole


@breaks("CacheList.filter", wrong="the first child uses the rows up", seen="rows half-applied refusal")
def rows_used_up(original: Any, self: Any, rows: Any) -> None:
    once = iter(rows)
    for cache in self.caches:
        cache.filter(list(once))


@breaks("CacheList.extend", wrong="the last child is not extended")
def last_child_not_extended(original: Any, self: Any, other: Any) -> None:
    last = self.caches[-1]
    before = dict(vars(last))
    original(self, other)
    if len(self.caches) > 1 and not hasattr(last, "caches"):
        vars(last).clear()
        vars(last).update(before)


@breaks("CacheList.extend", wrong="each child is extended by the other's last")
def extended_by_the_last(original: Any, self: Any, other: Any) -> None:
    for cache in self.caches:
        cache.extend(other.caches[-1])


@breaks("CacheList.prepare", wrong="the first child alone is prepared")
def first_child_prepared(original: Any, self: Any, **given: Any) -> None:
    self.caches[0].prepare(**given)


@breaks("CacheList.prepare", wrong="lengths are passed on, and left padding is not")
def left_padding_not_passed_on(original: Any, self: Any, **given: Any) -> None:
    given.pop("left_padding", None)
    original(self, **given)


@breaks("CacheList.finalize", wrong="the last child stays pending")
def last_child_not_finalized(original: Any, self: Any) -> None:
    for cache in self.caches[:-1]:
        cache.finalize()


@breaks("CacheList.trim", wrong="the first child alone is trimmed")
def first_child_trimmed(original: Any, self: Any, n: int) -> Any:
    return self.caches[0].trim(n)


@breaks("CacheList.trim", wrong="children that cannot give back are passed over", seen="refusal")
def untrimmable_children_passed_over(original: Any, self: Any, n: int) -> Any:
    for cache in self.caches:
        if cache.can_trim(n):
            cache.trim(n)
    return n


@breaks("CacheList.trim", wrong="the last child is trimmed once for each child", seen="offset refusal half-applied")
def last_child_trimmed_again(original: Any, self: Any, n: int) -> Any:
    original(self, n)
    if n > 0 and len(self.caches) > 1 and self.caches[-1].can_trim(n):
        self.caches[-1].trim(n)
    return n


@breaks("CacheList.trim", wrong="it returns what each child did", seen="result")
def trim_returns_a_list(original: Any, self: Any, n: int) -> Any:
    original(self, n)
    return [n for _ in self.caches]


# -- the wrong child ------------------------------------------------------------------------------


@breaks("CacheList.extract", wrong="children are extracted in reverse order")
def extracted_in_reverse(original: Any, self: Any, row: int) -> Any:
    made = original(self, row)
    made.caches = made.caches[::-1]
    return made


@breaks("CacheList.extract", wrong="the last child gives its first row")
def first_row_of_the_last_child(original: Any, self: Any, row: int) -> Any:
    made = original(self, row)
    made.caches = (*made.caches[:-1], self.caches[-1].extract(0))
    return made


@breaks("CacheList.merge", wrong="the last children are left as they were in the first list")
def last_children_not_merged(original: Any, cls: Any, caches: Any) -> Any:
    made = original(cls, caches)
    if len(made.caches) > 1:
        made.caches = (*made.caches[:-1], copy.deepcopy(caches[0].caches[-1]))
    return made


@breaks("CacheList.merge", wrong="children are found by their class: two of one kind are the same")
def merged_by_class(original: Any, cls: Any, caches: Any) -> Any:
    made = original(cls, caches)
    by_class = {type(cache): cache for cache in made.caches}
    made.caches = tuple(copy.deepcopy(by_class[type(cache)]) for cache in made.caches)
    return made


@breaks("CacheList.merge", wrong="the lists come in reverse order")
def lists_merged_in_reverse(original: Any, cls: Any, caches: Any) -> Any:
    return original(cls, list(caches)[::-1])


@breaks("CacheList.merge", wrong="lists of one row are returned as they are, not merged")
def single_list_not_merged(original: Any, cls: Any, caches: Any) -> Any:
    made = original(cls, caches)
    return copy.deepcopy(caches[0]) if len(caches) == 1 else made


@breaks("CacheList.merge", wrong="the merged list takes its children from the lists", seen="")
def merge_empties_the_lists(original: Any, cls: Any, caches: Any) -> Any:
    made = original(cls, caches)
    if len(caches) > 1:
        caches[0].caches = made.caches
    return made


@breaks("CacheList.__getitem__", wrong="children are counted from the end")
def children_from_the_end(original: Any, self: Any, idx: int) -> Any:
    return self.caches[-1 - idx]


# -- half done ------------------------------------------------------------------------------------


@contextmanager
def _some(original: Any, caches: Sequence[Any]) -> Iterator[None]:
    yield


@breaks("all_or_none.all_or_none", kinds=KIND, wrong="what is done to the first children stays", seen="half-applied")
def some_children_changed(original: Any, caches: Sequence[Any]) -> Any:
    return _some(original, caches)


@breaks("CacheList._all", wrong="of lists within lists the children are not put back", seen="half-applied")
def nested_children_not_put_back(original: Any, self: Any) -> Any:
    return [self, *self.caches]


@breaks(
    "cache_list.check_same_children",
    kinds=KIND,
    wrong="lists are not compared before they go together",
    seen="refusal crash",
)
def lists_not_compared(original: Any, operation: str, first: Any, other: Any) -> None:
    return None


@breaks("CacheList.extend", wrong="a list of fewer children extends the first ones", seen="refusal half-applied")
def extended_by_fewer(original: Any, self: Any, other: Any) -> None:
    if not hasattr(other, "caches") or len(other.caches) == len(self.caches):
        original(self, other)
    else:
        for cache, more in zip(self.caches, other.caches, strict=False):
            cache.extend(more)


@breaks("CacheList._able", wrong="a child that lacks an operation raises another error", seen="crash")
def lacking_children_raise(original: Any, self: Any, operation: str) -> Any:
    return self.caches


@breaks("CacheList._able", wrong="a child that lacks an operation is left out", seen="refusal crash")
def lacking_children_left_out(original: Any, self: Any, operation: str) -> Any:
    return [cache for cache in self.caches if hasattr(cache, operation)]


# -- what it says of itself -----------------------------------------------------------------------


@breaks("CacheList.is_trimmable", wrong="one trimmable child is enough", seen="trimmable")
def one_trimmable_child_is_enough(original: Any, self: Any) -> bool:
    return any(cache.is_trimmable() for cache in self.caches)


@breaks("CacheList.size", wrong="size is that of the first child", seen="size")
def size_of_the_first_child(original: Any, self: Any) -> int:
    return int(self.caches[0].size())


@breaks("CacheList.size", wrong="size is the sum of the children's", seen="size")
def size_of_all_children(original: Any, self: Any) -> int:
    return sum(cache.size() for cache in self.caches)


@breaks("CacheList.empty", wrong="it is empty if the first child is", seen="empty")
def empty_as_the_first_child(original: Any, self: Any) -> bool:
    return bool(self.caches[0].empty())


@breaks("CacheList.empty", wrong="one empty child makes it empty", seen="empty")
def one_empty_child_is_enough(original: Any, self: Any) -> bool:
    return any(cache.empty() for cache in self.caches)


@breaks("CacheList.nbytes", wrong="nbytes asks each child for keys", seen="unanswered")
def nbytes_of_keys(original: Any, self: Any) -> int:
    return sum(cache.keys.nbytes for cache in self.caches)


@breaks("CacheList.__len__", wrong="its length is its size, so that it is falsy when empty", seen="crash")
def list_has_its_size_for_length(original: Any, self: Any) -> int:
    return int(self.size())


# -- states and copies ----------------------------------------------------------------------------


@breaks("CacheList.from_state", wrong="children are restored in reverse order")
def restored_in_reverse(original: Any, cls: Any, state: Any) -> Any:
    return original(cls, state[::-1])


@breaks("CacheList.from_state", wrong="the last child is not restored", seen="children")
def restored_without_the_last(original: Any, cls: Any, state: Any) -> Any:
    return original(cls, state[:-1])


@breaks("CacheList.from_state", wrong="children are found by their class: two of one kind are the same")
def restored_by_class(original: Any, cls: Any, state: Any) -> Any:
    by_class = {name: child for child, name in state}
    return original(cls, [(by_class[name], name) for _, name in state])


@breaks("CacheList.state", wrong="all children are said to be of the first one's class")
def all_of_the_first_class(original: Any, self: Any) -> Any:
    return [(child, type(self.caches[0]).__name__) for child, _ in original(self)]


@breaks("CacheList.state", wrong="a list within the list is taken for its children")
def nested_lists_flattened(original: Any, self: Any) -> Any:
    flat: list[Any] = []
    for child, name in original(self):
        flat += child if name == "CacheList" else [(child, name)]
    return flat


@breaks("CacheList.__deepcopy__", wrong="a copy shares the children")
def copy_shares_the_children(original: Any, self: Any, memo: Any) -> Any:
    return copy.copy(self)


@breaks("CacheList.__deepcopy__", wrong="a list within the list is shared by copies")
def copy_shares_nested_lists(original: Any, self: Any, memo: Any) -> Any:
    made = copy.copy(self)
    made.caches = tuple(each if hasattr(each, "caches") else copy.deepcopy(each) for each in self.caches)
    return made
