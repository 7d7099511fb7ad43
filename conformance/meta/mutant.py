"""A mutant: one mistake, put into an implementation for as long as a context lasts.

A mutant is a function that stands in for another and is given that one first:

    @breaks("KVCache.trim", wrong="a trim of more than is there is clipped")
    def trim_clipped(original, self, n):
        return original(self, min(n, self.offset))

The class itself is altered, so the mistake is met however a cache came about: made, merged, extracted or restored.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Broken = Callable[..., Any]
"""Takes what it stands in for (None where there was nothing), then that one's arguments."""


class MutantError(Exception):
    """A mutant whose target is not there: the code it breaks was renamed or removed."""


@dataclass(frozen=True)
class Mutant:
    """One mistake in one kind of cache."""

    name: str
    kind: str
    """The machine that hunts it, or the test."""
    wrong: str
    """What is wrong, in a sentence."""
    seen: tuple[str, ...]
    """The observables by which it may be found; any, if empty."""
    patches: tuple[tuple[str, Broken], ...]
    package: str

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The package with the mistake in it."""
        with ExitStack() as stack:
            for target, broken in self.patches:
                try:
                    stack.enter_context(_patched(self.package, target, broken))
                except AttributeError as error:
                    raise MutantError(f"{self.name}: {self.package} has no {target}: {error}") from error
            yield


def breaks(
    *targets: str,
    wrong: str,
    seen: str = "",
    kinds: str = "",
    also: Mapping[str, Broken] | None = None,
    package: str = "mlximpl",
) -> Callable[[Broken], tuple[Mutant, ...]]:
    """Make mutants of a function, one for each target, and one for each kind where the target is no method of a kind.

    Targets are names below the package: `KVCache.trim` or `padding.roll_rows`. `seen` and `kinds` are separated by
    spaces; in `seen`, `_` is written for a space. `also` are patches that belong to the same mistake.
    """

    def make(broken: Broken) -> tuple[Mutant, ...]:
        pairs = [(target, kind) for target in targets for kind in (kinds.split() or [target.partition(".")[0]])]
        name = broken.__name__
        return tuple(
            Mutant(
                name=f"{name}[{kind}]" if len(pairs) > 1 else name,
                kind=kind,
                wrong=wrong,
                seen=tuple(word.replace("_", " ") for word in seen.split()),
                patches=((target, broken), *(also or {}).items()),
                package=package,
            )
            for target, kind in pairs
        )

    return make


@contextmanager
def _patched(package: str, target: str, broken: Broken) -> Iterator[None]:
    *path, name = target.split(".")
    owner: Any = importlib.import_module(package)
    for part in path:
        # A package may export a function by the name of the module that holds it.
        module = sys.modules.get(f"{owner.__name__}.{part}") if isinstance(owner, ModuleType) else None
        owner = module or getattr(owner, part)
    with ExitStack() as stack:
        if isinstance(owner, ModuleType):
            original = getattr(owner, name)
            for module, bound in _bindings(package, original):
                stack.callback(setattr, module, bound, original)
                setattr(module, bound, _function(original, broken))
        else:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, _attribute(owner, name, broken))
        yield


def _bindings(package: str, original: object) -> list[tuple[ModuleType, str]]:
    """Every module of the package that holds the object, and by what name."""
    modules = [m for n, m in sys.modules.items() if n == package or n.startswith(f"{package}.")]
    return [(m, name) for m in modules for name, value in vars(m).items() if value is original]


def _attribute(owner: type, name: str, broken: Broken) -> Any:
    """What to set on the class: a method, class method or property, as the original is."""
    if not hasattr(owner, name) and name.startswith("__"):
        return _function(None, broken)
    static = inspect.getattr_static(owner, name)
    if isinstance(static, property):
        return property(_function(static.fget, broken), static.fset)
    if isinstance(static, classmethod):
        return classmethod(_function(static.__func__, broken))
    if isinstance(static, staticmethod):
        return staticmethod(_function(static.__func__, broken))
    return _function(static, broken)


def _function(original: Broken | None, broken: Broken) -> Broken:
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return broken(original, *args, **kwargs)

    return stand_in
