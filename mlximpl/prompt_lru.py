"""The server's store of prompts already fed, such that what it gives back is what the tokens would have made.

stored  [1 2 3 4 5 6]     asked for  [1 2 3 9]     given  the entry less 3 tokens, and [9] to be fed

A ring that has wrapped goes back by few tokens or none: where an entry cannot, a shorter one serves.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from .prompt_cache import _can_trim, _trim_limit, trim_prompt_cache


def exact_lru(own: Mapping[str, Any]) -> Any:
    """A subclass of mlx-lm's `LRUPromptCache`; `own` are the names of its module."""
    theirs, their_trie = own["LRUPromptCache"], own["PromptTrie"]

    class Trie(their_trie):  # type: ignore[valid-type, misc]
        def pop_prefixes(self, model: Any, tokens: list[int]) -> Any:
            """Drop the entries that the one of these tokens can stand for: all prefixes or none."""
            caches = self.get(model, tokens).prompt_cache
            if any(_trim_limit(layer) < len(tokens) for layer in caches):
                return []
            return super().pop_prefixes(model, tokens)

    class LRUPromptCache(theirs):  # type: ignore[valid-type, misc]
        """mlx-lm's, with exact entries.

        What is handed out leaves at least one token to feed, which a generator needs. An entry is stored under the
        tokens that it holds, which may be fewer than were generated, and takes the place of its prefixes only if it
        can be trimmed back to any.
        """

        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            self._trie = Trie()

        def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
            """Caches of the longest prefix that an entry serves, and the tokens behind it.

            Returns:
                Independent caches, or None where no entry serves; the tokens left to feed.
            """
            caches, rest = self._nearest(model, tokens)
            if caches is not None and _has_draft(model) and not all(layer.is_trimmable() for layer in caches):
                return None, tokens  # mlx-lm's speculative decoding would refuse them
            return caches, rest

        def _nearest(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
            found = self._trie.search(model, tokens[:-1])
            if found.exact is not None:
                return self._copy(model, found.exact), tokens[len(found.exact) :]
            shorter = found.shorter or []
            if found.longer is not None and found.common_prefix > len(shorter):
                surplus = len(found.longer) - found.common_prefix
                held = self._trie.get(model, found.longer).prompt_cache
                if all(_can_trim(layer, surplus) for layer in held):
                    cache = self._copy(model, found.longer)
                    trim_prompt_cache(cache, surplus)
                    return cache, tokens[found.common_prefix :]
            if shorter:
                return self._copy(model, shorter), tokens[len(shorter) :]
            return None, tokens

        def _copy(self, model: Any, tokens: list[int]) -> list[Any]:
            caches: list[Any] = copy.deepcopy(self._trie.get(model, tokens).prompt_cache)
            return caches

        def insert_cache(
            self, model: Any, tokens: list[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
        ) -> None:
            """Store caches under the tokens that they hold.

            Layers that hold fewer than `tokens`, as speculative decoding leaves them, are brought to the fewest.
            Nothing is stored where one cannot, or where one holds more than `tokens`.
            """
            held, caches = levelled(prompt_cache, len(tokens))
            if held:
                super().insert_cache(model, tokens[:held], caches, cache_type=cache_type)

    return LRUPromptCache


def _has_draft(model: Any) -> bool:
    """Whether the server's key of a model, (model, adapter, draft model), names a draft model."""
    return isinstance(model, tuple) and len(model) == 3 and model[2] is not None


def levelled(caches: list[Any], fed: int) -> tuple[int, list[Any]]:
    """Bring caches that were fed at most `fed` tokens to the number that all of them hold.

    Returns:
        That number, and the caches, copies if they had to be trimmed; (0, []) where they cannot be, or one holds more.
    """
    offsets = [_offsets(layer) for layer in caches]
    known = set().union(*offsets)
    held = min(known, default=fed)
    if len(known) <= 1 and held <= fed:
        return held, caches
    if max(known) > fed or any(len(each) != 1 for each in offsets):
        return 0, []
    surplus = [offset - held for each in offsets for offset in each]
    if not all(_can_trim(layer, n) for layer, n in zip(caches, surplus, strict=True)):
        return 0, []
    caches = copy.deepcopy(caches)
    for layer, n in zip(caches, surplus, strict=True):
        layer.trim(n)
    return held, caches


def _offsets(layer: Any) -> set[int]:
    """How many tokens a layer has been fed, by each of its caches that counts them."""
    if hasattr(layer, "caches"):
        return set().union(*(_offsets(each) for each in _children(layer)))
    offset = getattr(layer, "offset", None)
    return {offset} if isinstance(offset, int) else set()


def _children(layer: Any) -> Sequence[Any]:
    children: Sequence[Any] = layer.caches
    return children
