"""What a row answers by itself: the model on mlx-lm's solo caches, greedily, with no batch anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ATOL = 1e-4
"""How far two log-probabilities in float32 may lie apart."""


@dataclass(frozen=True)
class Answer:
    """Tokens, and the log-probabilities that each was chosen by."""

    tokens: list[int]
    logprobs: list[Any]


class Alone:
    """Answers of one model, remembered: both implementations are asked the same rows."""

    def __init__(self, model: Any, max_kv_size: int | None = None) -> None:
        self.model = model
        self.max_kv_size = max_kv_size
        self._answers: dict[tuple[int, ...], Answer] = {}

    def answer(self, context: list[int], count: int) -> Answer:
        """The answer of `count` tokens to a context, or the beginning of a longer one that is known."""
        known = self._answers.get(tuple(context))
        if known is None or len(known.tokens) < count:
            known = self._answers[tuple(context)] = self._generate(context, count)
        return known

    def _generate(self, context: list[int], count: int) -> Answer:
        import mlx.core as mx

        caches = self._caches()
        # mlx-lm's rings with sinks answer by the size of the chunk, so they are fed one token at a time.
        size = len(context) if self.max_kv_size is None else 1
        for start in range(0, len(context), size):
            logits = self.model(mx.array([context[start : start + size]]), cache=caches)
        tokens: list[int] = []
        logprobs = []
        while True:
            last = logits[0, -1]
            logprobs.append(last - mx.logsumexp(last))
            token: Any = mx.argmax(last).item()
            tokens.append(int(token))
            if len(tokens) == count:
                return Answer(tokens, logprobs)
            logits = self.model(mx.array([tokens[-1:]]), cache=caches)

    def _caches(self) -> list[Any]:
        """mlx-lm's solo caches; its make_prompt_cache lets a bound go where the model makes its own caches."""
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.model)
        return caches if self.max_kv_size is None else [_bounded(cache, self.max_kv_size) for cache in caches]


def _bounded(cache: Any, max_kv_size: int) -> Any:
    from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

    if type(cache) is KVCache:
        return RotatingKVCache(max_kv_size, keep=4)
    if type(cache) is CacheList:
        return CacheList(*(_bounded(child, max_kv_size) for child in cache.caches))
    return cache
