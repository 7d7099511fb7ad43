"""Several caches of one layer, as one.

filter([1]) of CacheList(ArraysCache, BatchKVCache) filters each of the two; if either refuses, neither changes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from .all_or_none import all_or_none
from .cache import AnyCache
from .checks import check_kind, check_trim, whole, whole_numbers

Numbers = Sequence[int] | mx.array

DEPTH_MAX = 16
"""How deep the lists in a state may be nested."""


class CacheList(AnyCache):
    """What one layer keeps in several caches. What is done to the list is done to each of them, or to none.

    Args:
        caches: the children, of any kind that mlximpl has.

    Attributes:
        caches: the children.

    Raises:
        ValueError: a child is no cache of mlximpl.
    """

    def __init__(self, *caches: AnyCache) -> None:
        for i, cache in enumerate(caches):
            if not isinstance(cache, AnyCache):
                raise ValueError(f"child {i} of a CacheList is a {type(cache).__name__}, which is no cache of mlximpl")
        self.caches = caches

    def __getitem__(self, idx: int) -> Any:
        """A child; IndexError for one that is not there."""
        try:
            return self.caches[idx]
        except IndexError:
            raise IndexError(f"child {idx}, but the list has {len(self.caches)} caches") from None

    def __iter__(self) -> Iterator[Any]:
        """The children in order."""
        return iter(self.caches)

    def _all(self) -> list[AnyCache]:
        """This list and the caches in it, those of nested lists too."""
        found: list[AnyCache] = [self]
        for cache in self.caches:
            found += cache._all() if isinstance(cache, CacheList) else [cache]
        return found

    def _each(self, operation: str, *arguments: Any, **named: Any) -> list[Any]:
        """Call an operation of every child, or leave all as they were."""
        with all_or_none(self._all()):
            return [
                call_child(i, cache, operation, *arguments, **named) for i, cache in enumerate(self._able(operation))
            ]

    def _able(self, operation: str) -> Sequence[AnyCache]:
        """The children, all of which have the operation."""
        for i, cache in enumerate(self.caches):
            if not hasattr(cache, operation):
                raise ValueError(f"{operation}: child {i} is a {type(cache).__name__}, which has none")
        return self.caches

    def filter(self, batch_indices: Numbers) -> None:
        """Keep these rows of every child, in this order.

        Raises:
            IndexError: a row that is not there.
            ValueError: a child that is no batch.
        """
        self._each("filter", whole_numbers("rows", batch_indices))

    def extend(self, other: "CacheList") -> None:
        """Append the rows of the other list's children to this one's; the other stays as it is.

        Raises:
            ValueError: the other is no CacheList, or has another number or other kinds of children; a child that is
                no batch, or refuses.
        """
        if not isinstance(other, CacheList):
            raise ValueError(f"extend a CacheList by a {type(other).__name__}")
        check_same_children("extend", self, other)
        children = self._able("extend")
        with all_or_none(self._all()):
            for i, (cache, more) in enumerate(zip(children, other.caches, strict=True)):
                call_child(i, cache, "extend", more)

    def extract(self, idx: int) -> "CacheList":
        """One row of every child, in memory of its own.

        Raises:
            IndexError: the row is not there.
            ValueError: a child that is no batch.
        """
        return CacheList(*self._each("extract", idx))

    @classmethod
    def merge(cls, caches: Sequence["CacheList"]) -> "CacheList":
        """The list of the batches that the children make, place by place.

        Raises:
            ValueError: no lists, or another kind; another number or other kinds of children; a kind that does not
                merge; children that do not go together.
        """
        lists = check_kind(caches, CacheList)
        for other in lists[1:]:
            check_same_children("merge", lists[0], other)
        children = lists[0]._able("merge")
        return cls(
            *(call_child(i, cache, "merge", [each.caches[i] for each in lists]) for i, cache in enumerate(children))
        )

    def prepare(
        self,
        *,
        left_padding: Numbers | None = None,
        lengths: Numbers | None = None,
        right_padding: Numbers | None = None,
    ) -> None:
        """Announce a ragged prefill to every child; see `BatchKVCache.prepare`.

        Raises:
            ValueError: a child that is no batch, or refuses.
        """
        given = {"left_padding": left_padding, "lengths": lengths, "right_padding": right_padding}
        read = {name: None if each is None else whole_numbers(name, each) for name, each in given.items()}
        self._each("prepare", **read)

    def finalize(self) -> None:
        """End the ragged prefill of every child.

        Raises:
            ValueError: a child that is no batch.
        """
        self._each("finalize")

    def trim_limit(self) -> int:
        return min((cache.trim_limit() for cache in self.caches), default=0)

    def can_trim(self, n: int) -> bool:
        n = whole("the number of tokens to trim", n)
        return all(cache.can_trim(n) for cache in self.caches) if self.caches else n == 0

    def is_trimmable(self) -> bool:
        return all(cache.is_trimmable() for cache in self.caches)

    def _gives_all_back(self) -> bool:
        return all(cache._gives_all_back() for cache in self.caches)

    def trim(self, n: int) -> int:
        """Drop the newest n tokens of every child, and return n.

        Raises:
            ValueError: n is negative, or a child cannot drop that many.
        """
        n = check_trim(n)
        for i, cache in enumerate(self.caches):
            if not cache.can_trim(n):
                raise ValueError(f"trim {n}, but child {i}, {cache!r}, can drop at most {cache.trim_limit()} tokens")
        if n and not self.caches:
            raise ValueError(f"trim {n} of a CacheList without caches")
        self._each("trim", n)
        return n

    def size(self) -> int:
        """How many columns the longest child stores."""
        return max((cache.size() for cache in self.caches), default=0)

    def empty(self) -> bool:
        """Whether every child is empty."""
        return all(cache.empty() for cache in self.caches)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    @property
    def state(self) -> Any:
        """[(state, class name), ...] of the children: mlx-lm's layout."""
        return [(cache.state, type(cache).__name__) for cache in self.caches]

    @state.setter
    def state(self, state: object) -> None:
        from .kinds import kind_named  # it imports this module

        kind = "CacheList"
        if not isinstance(state, (tuple, list)):
            raise ValueError(f"a {kind} state is a list of (state, class name), not {type(state).__name__}")
        check_depth(state)
        caches = []
        for i, child in enumerate(state):
            if not isinstance(child, (tuple, list)) or len(child) != 2:
                raise ValueError(f"{kind} state: child {i} is not (state, class name)")
            with naming_child(i, str(child[1])):
                caches.append(kind_named(child[1]).from_state(child[0]))
        self.caches = tuple(caches)

    def __repr__(self) -> str:
        return f"CacheList({', '.join(map(repr, self.caches))})"


def check_depth(state: Sequence[object]) -> None:
    """Refuse a state whose lists are nested so deep that reading it would exhaust the stack."""
    levels = [state]
    for _ in range(DEPTH_MAX):
        pairs = [child for level in levels for child in level if isinstance(child, (tuple, list)) and len(child) == 2]
        levels = [
            inner
            for inner, name in pairs
            if isinstance(name, str) and name == "CacheList" and isinstance(inner, (tuple, list))
        ]
        if not levels:
            return
    raise ValueError(f"CacheList state: nested more than {DEPTH_MAX} deep")


def check_same_children(operation: str, first: CacheList, other: CacheList) -> None:
    """Refuse lists with another number or other kinds of children."""
    kinds = [[type(cache).__name__ for cache in each.caches] for each in (first, other)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{operation} a CacheList of {kinds[0]} and one of {kinds[1]}")


def call_child(i: int, cache: AnyCache, operation: str, *arguments: Any, **named: Any) -> Any:
    """Call an operation of child i; its refusal says which child it was."""
    with naming_child(i, type(cache).__name__):
        call: Callable[..., Any] = getattr(cache, operation)
        return call(*arguments, **named)


@contextmanager
def naming_child(i: int, kind: str) -> Iterator[None]:
    """Say of a refusal which child it comes from."""
    try:
        yield
    except (ValueError, IndexError) as refusal:
        error = IndexError if isinstance(refusal, IndexError) else ValueError
        raise error(f"child {i}, {kind}: {refusal}") from refusal
