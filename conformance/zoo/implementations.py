"""mlximpl's caches and mlx-lm's, for one model and one bound."""

from __future__ import annotations

from typing import Any

from conformance.zoo.served import Caches

NAMES = ("mlx_lm", "mlximpl")


def caches_of(name: str, max_kv_size: int | None = None) -> Caches:
    """The caches of an implementation. Raises ValueError for a name that is not known."""
    if name == "mlx_lm":
        from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

        def make(model: Any) -> list[Any]:
            caches: list[Any] = make_prompt_cache(model, max_kv_size)
            return caches

        return Caches(name, make, save_prompt_cache, load_prompt_cache)
    if name == "mlximpl":
        import mlximpl

        def load(path: str) -> list[Any]:
            return list(mlximpl.load_prompt_cache(path))

        return Caches(
            name, lambda model: mlximpl.make_prompt_cache(model, max_kv_size), mlximpl.save_prompt_cache, load
        )
    raise ValueError(f"caches of {name!r}, but known are {', '.join(NAMES)}")
