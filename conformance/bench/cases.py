"""What is measured, by name: on a module's caches, and its floor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from conformance.bench import build, floors, steps, structure
from conformance.bench.build import Make
from conformance.bench.churn import churn, churn_floor
from conformance.bench.measure import Trial
from conformance.bench.sizes import Size, pads_of


@dataclass(frozen=True)
class Case:
    """One operation.

    `on` takes mlximpl, or mlx-lm's module of caches. `floor_is` says what `floor` does. A long case has at most
    so many `rounds`.
    """

    name: str
    on: Callable[[ModuleType, Size], Trial]
    floor: Callable[[Size], Trial]
    floor_is: str
    rounds: int = 100


def decode(name: str, make: Make, ring: bool = False, own: bool = False) -> Case:
    """Some steps of one token; with `own`, mlximpl's through its `attention`."""
    return Case(
        name,
        lambda module, size: steps.attention(
            module, size, make, 1, size.steps, size.layers, size.tokens if ring else None, own
        ),
        lambda size: floors.attention_over(size.tokens, size.steps, 1, size.layers, size),
        "attention with no mask over contiguous columns, one of them written in place",
    )


def prefill(name: str, make: Make, own: bool = False) -> Case:
    """One step of many tokens, behind what is held; with `own`, mlximpl's through its `attention`."""

    def on(module: ModuleType, size: Size) -> Trial:
        few = size.for_prefill
        return steps.attention(module, few, make, few.prefill, 1, few.layers, None, own)

    def floor(size: Size) -> Trial:
        few = size.for_prefill
        return floors.attention_over(few.columns + few.prefill, 1, few.prefill, few.layers, few)

    return Case(name, on, floor, '"causal" attention over contiguous columns, the new ones written in place', rounds=5)


def mask(name: str, make: Make, ring: bool = False) -> Case:
    """A decode's mask."""
    return Case(
        name,
        lambda module, size: steps.mask_alone(module, size, make, size.tokens if ring else None),
        lambda size: floors.copy_of(size.batch * (size.columns + 1), 1),
        "a copy of the mask's bytes",
    )


def change(
    name: str, make: Make, apply: Callable[[Any, Size], object], moved: Callable[[Size], int], says: str
) -> Case:
    """A change of each layer's cache in its place; `moved` counts the tokens that must move, in a layer."""
    return Case(
        name,
        lambda module, size: structure.in_place(module, size, make, lambda cache: apply(cache, size)),
        lambda size: floors.copy_of(moved(size) * size.column_bytes, size.layers),
        says,
    )


def one_out(size: Size) -> list[int]:
    """All rows but one in the middle."""
    return [row for row in range(size.batch) if row != size.batch // 2]


def moved_by_finalize(size: Size) -> int:
    """Tokens of the rows that have right padding."""
    lengths = size.lengths()
    return sum(length for length, pads in zip(lengths, pads_of(lengths), strict=True) if pads)


def held_by(size: Size, rows: list[int]) -> int:
    """Tokens of these rows of a ragged batch."""
    lengths = size.lengths()
    return sum(lengths[row] for row in rows)


def copy_floor(tokens: Callable[[Size], int]) -> Callable[[Size], Trial]:
    """Each layer's tokens read and written once."""
    return lambda size: floors.copy_of(tokens(size) * size.column_bytes, size.layers)


def bookkeeping(name: str, rotating: bool) -> Case:
    """64 layers of tiny arrays."""
    return Case(
        name,
        lambda module, size: steps.bookkeeping(module, size, rotating),
        floors.tiny_writes,
        "one column written in place into each buffer, and the slice that is fetched",
    )


def prompt_bytes(size: Size) -> int:
    """What the saved prompt cache holds."""
    return size.columns * size.column_bytes * size.layers


CASES = (
    decode("decode, equal lengths", build.equal),
    decode("decode, ragged", build.ragged),
    decode("decode, ragged, attention()", build.ragged, own=True),
    decode("decode, wrapped ring", build.wrapped, ring=True),
    prefill("prefill of 512", build.equal),
    prefill("prefill of 512, padded", build.ragged),
    prefill("prefill of 512, padded, attention()", build.ragged, own=True),
    Case(
        "merge",
        structure.merge,
        copy_floor(lambda size: sum(size.lengths())),
        "all tokens copied once",
    ),
    change(
        "filter, one row out",
        build.ragged,
        lambda cache, size: cache.filter(one_out(size)),
        lambda size: held_by(size, one_out(size)),
        "the tokens of the rows left copied once",
    ),
    change(
        "filter, one row left",
        build.ragged,
        lambda cache, size: cache.filter([size.batch // 2]),
        lambda size: held_by(size, [size.batch // 2]),
        "the tokens of the row left copied once",
    ),
    Case(
        "extend by one row",
        structure.extend,
        copy_floor(lambda size: sum(size.lengths()) + max(1, size.columns // 4)),
        "the tokens of the batch and of the row copied once",
    ),
    Case(
        "extend by one row, again",
        structure.extend_again,
        copy_floor(lambda size: max(1, size.columns // 4)),
        "the tokens of the row copied once",
    ),
    Case(
        "extract",
        structure.extract,
        copy_floor(lambda size: held_by(size, [size.batch // 2])),
        "the row's tokens copied once",
    ),
    change(
        "finalize of a ragged prefill",
        build.unfinished,
        lambda cache, _: cache.finalize(),
        moved_by_finalize,
        "the tokens of the rows that move copied once",
    ),
    Case(
        "growth",
        structure.growth,
        lambda size: floors.copy_of(size.growth * size.growth_rows * size.column_bytes, 1),
        "what is held at the end copied once",
    ),
    Case(
        "growth, in proportion",
        structure.growth_in_proportion,
        lambda size: floors.copy_of(size.growth * size.growth_rows * size.column_bytes, 1),
        "what is held at the end copied once",
    ),
    Case("save", structure.save, lambda size: floors.file_write(prompt_bytes(size)), "the tokens' bytes to a file"),
    Case(
        "reload", structure.reload, lambda size: floors.file_read(prompt_bytes(size)), "the tokens' bytes from a file"
    ),
    mask("mask, ragged", build.ragged),
    mask("mask, ragged wrapped ring", build.wrapped_ragged, ring=True),
    bookkeeping("bookkeeping of 64 layers", rotating=False),
    bookkeeping("bookkeeping of 64 rotating layers", rotating=True),
    Case(
        "churn",
        lambda module, size: churn(module, size, attend=False),
        lambda size: churn_floor(size, attend=False),
        "each row copied as it comes, the batch's tokens where rows come or go, a column written each step",
        rounds=5,
    ),
    Case(
        "churn with attention",
        lambda module, size: churn(module, size, attend=True),
        lambda size: churn_floor(size, attend=True),
        "the same, and attention with no mask over the longest row's columns",
        rounds=5,
    ),
    Case(
        "churn with attention()",
        lambda module, size: churn(module, size, attend=True, own=True),
        lambda size: churn_floor(size, attend=True),
        "the same, and attention with no mask over the longest row's columns",
        rounds=5,
    ),
)
