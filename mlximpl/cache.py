"""What the caches have in common."""

from typing import Any, TypeVar

import mlx.core as mx

from .checks import Heads, check_trim, heads_of, whole

C = TypeVar("C", bound="AnyCache")


class AnyCache:
    """What every kind answers, whatever it stores."""

    def empty(self) -> bool:
        """Whether nothing is stored."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes that the arrays take, spare columns included."""
        raise NotImplementedError

    def size(self) -> int:
        """How many columns are stored."""
        raise NotImplementedError

    def trim_limit(self) -> int:
        """The largest n such that `trim` accepts every number up to it now."""
        raise NotImplementedError

    def can_trim(self, n: int) -> bool:
        """Whether `trim(n)` is accepted now: up to `trim_limit()`, and on a ring also down to its sinks."""
        return 0 <= whole("the number of tokens to trim", n) <= self.trim_limit()

    def is_trimmable(self) -> bool:
        """Whether every n up to the (shortest row's) offset may be trimmed; of a solo cache also whether all of its
        last update may, if that brought several tokens: a decoder's rollback of rejected drafts. mlx-lm's
        `trim_prompt_cache` drops nothing, and says nothing, where a cache is not trimmable."""
        raise NotImplementedError

    def _gives_all_back(self) -> bool:
        """Whether every n up to the (shortest row's) offset may be trimmed, whatever came last."""
        return self.is_trimmable()

    def trim(self, n: int) -> int:
        """Drop the newest n tokens of every row, and return n.

        Raises:
            ValueError: n is negative, or `can_trim(n)` is false, as it is for any n > 0 while padding is pending.
        """
        n = check_trim(n, self._is_pending())
        if not self.can_trim(n):
            raise ValueError(f"trim {n}, but at most {self.trim_limit()} tokens can be dropped")
        if n:
            self._trim(n)
        return n

    def _trim(self, n: int) -> None:
        raise NotImplementedError

    def _is_pending(self) -> bool:
        """Whether a ragged prefill is under way."""
        return False

    @property
    def state(self) -> tuple[object, ...]:
        raise NotImplementedError

    @state.setter
    def state(self, state: object) -> None:
        raise NotImplementedError

    def _saved_state(self) -> Any:
        """The state for a file: no pad holds what lay there before. Where mlx-lm would read it wrong, it has more
        elements than mlx-lm takes."""
        return self.state

    @classmethod
    def from_state(cls: type[C], state: object) -> C:
        """A cache that goes on where the one whose `state` this is stood.

        Raises:
            ValueError: the state is another kind's, or does not hold together.
        """
        cache = cls.__new__(cls)
        cache.state = state
        return cache


class Cache(AnyCache):
    """Keys and values in two buffers, of which the first columns are in use.

    Attributes:
        keys: (B, H, S, D), or None before the first update. S may exceed the columns in use.
        values: (B, H, S, Dv), or None. Both may be assigned, as models do with `mx.depends`.
        step: by how many columns a buffer grows.
    """

    step = 256
    keys: mx.array | None
    values: mx.array | None

    def _columns(self) -> int:
        """How many columns are stored."""
        raise NotImplementedError

    def _heads(self) -> Heads | None:
        buffers = self._buffers()
        return None if buffers is None else heads_of(*buffers)

    def _buffers(self) -> tuple[mx.array, mx.array] | None:
        if self.keys is None or self.values is None:
            return None
        return self.keys, self.values

    def _stored_arrays(self) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values cut to the columns stored; new objects, safe to hand out."""
        buffers = self._buffers()
        if buffers is None:
            return None, None
        stored = self._columns()
        keys, values = buffers
        if stored == keys.shape[2] == values.shape[2]:
            return keys[...], values[...]
        return keys[:, :, :stored], values[:, :, :stored]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The last fetch again, without writing: keys (B, H, T, D) and values (B, H, T, Dv).

        Raises:
            ValueError: no update has been seen.
        """
        keys, values = self._stored_arrays()
        if keys is None or values is None:
            raise ValueError(f"{type(self).__name__} has seen no update, so there is nothing to fetch")
        return keys, values

    def empty(self) -> bool:
        """Whether no column is stored."""
        return self._columns() == 0

    @property
    def nbytes(self) -> int:
        buffers = self._buffers()
        return 0 if buffers is None else buffers[0].nbytes + buffers[1].nbytes
