"""What changes the rows of a batch, and what grows or stores it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from conformance.bench import build
from conformance.bench.build import Make, arrays_of, file
from conformance.bench.measure import Trial
from conformance.bench.sizes import Size


def in_place(module: ModuleType, size: Size, make: Make, change: Callable[[Any], object]) -> Trial:
    """A change of every layer's cache, all layers evaluated together."""

    def work(caches: list[Any]) -> list[mx.array]:
        for cache in caches:
            change(cache)
        return arrays_of(*caches)

    return Trial(lambda: build.layers(make, module, size), work)


def merge(module: ModuleType, size: Size) -> Trial:
    """Solo caches of different lengths to one batch."""

    def prepare() -> list[list[Any]]:
        return [[build.solo(module, size, tokens) for tokens in size.lengths()] for _ in range(size.layers)]

    def work(rows: list[list[Any]]) -> list[mx.array]:
        return arrays_of(*(module.BatchKVCache.merge(each) for each in rows))

    return Trial(prepare, work)


def extend(module: ModuleType, size: Size) -> Trial:
    """A batch by another of one row."""

    def prepare() -> tuple[list[Any], list[Any]]:
        return build.layers(build.ragged, module, size), build.layers(build.one_row, module, size)

    return Trial(prepare, extended)


def extend_again(module: ModuleType, size: Size) -> Trial:
    """A batch by another of one row, in the place of one that has left: rows have joined it and left it before."""

    def prepare() -> tuple[list[Any], list[Any]]:
        caches, rows = build.layers(build.ragged, module, size), build.layers(build.one_row, module, size)
        for cache, row in zip(caches, rows, strict=True):
            cache.extend(row)
            cache.filter(list(range(size.batch)))
            mx.eval(arrays_of(cache))
        return caches, rows

    return Trial(prepare, extended)


def extended(both: tuple[list[Any], list[Any]]) -> list[mx.array]:
    """Each of the first caches, extended by its counterpart."""
    for cache, row in zip(*both, strict=True):
        cache.extend(row)
    return arrays_of(*both[0])


def extract(module: ModuleType, size: Size) -> Trial:
    """One padded row out of a batch."""

    def work(caches: list[Any]) -> list[mx.array]:
        return arrays_of(*(cache.extract(size.batch // 2) for cache in caches))

    return Trial(lambda: build.layers(build.ragged, module, size), work)


def growth(module: ModuleType, size: Size, part: float = 0.0) -> Trial:
    """One layer from nothing to `growth` columns, 64 at a time, each evaluated; `part` is mlximpl's `column_growth`."""
    new = build.columns(size, 64, size.growth_rows)

    def work(cache: Any) -> list[Any]:
        for _ in range(size.growth // 64):
            cache.update_and_fetch(new, new)
            mx.eval(arrays_of(cache))
        return []

    def prepare() -> Any:
        cache = module.BatchKVCache([0] * size.growth_rows)
        if hasattr(cache, "column_growth"):
            cache.column_growth = part
        return cache

    return Trial(prepare, work)


def growth_in_proportion(module: ModuleType, size: Size) -> Trial:
    """The same, by a quarter of what is held at a time."""
    return growth(module, size, 0.25)


def prompt(module: ModuleType, size: Size) -> list[Any]:
    """The prompt cache that is saved: solo caches of one row."""
    return [build.solo(module, size, size.columns) for _ in range(size.layers)]


def save(module: ModuleType, size: Size) -> Trial:
    """A prompt cache to a file."""

    def work(caches: list[Any]) -> list[Any]:
        module.save_prompt_cache(str(file(module.__name__)), caches)
        return []

    return Trial(lambda: prompt(module, size), work)


def reload(module: ModuleType, size: Size) -> Trial:
    """A prompt cache from a file that lies in the system's cache, evaluated."""
    path = file(f"{module.__name__}-{size.name}")

    def prepare() -> None:
        if not path.exists():
            module.save_prompt_cache(str(path), prompt(module, size))

    def work(_: None) -> list[mx.array]:
        return arrays_of(*module.load_prompt_cache(str(path)))

    return Trial(prepare, work)
