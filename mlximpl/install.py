"""One switch that gives mlx-lm mlximpl's caches wherever it makes its own.

mlx-lm's modules that have imported a name get ours under it. In mlx-lm's module of caches itself the names stay what
they are for the code in it, so that mlx-lm's own caches go on working with each other; who looks a name up there from
outside, as an import does, finds ours.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from threading import Lock
from types import ModuleType, TracebackType
from typing import Any

from .arrays_cache import ArraysCache
from .cache import AnyCache
from .checks import check_trim
from .kinds import KINDS
from .load_prompt_file import load_prompt_cache
from .prompt_cache import MAMBA, _can_trim, make_prompt_cache, trim_prompt_cache
from .prompt_lru import exact_lru
from .save_prompt_file import save_prompt_cache
from .upstream import mlx_lm_cache, own_names

_lock = Lock()
_in_force: list["_Names"] = []  # one at most
_wanted: list["Installation"] = []  # by whom


class Installation(AbstractContextManager["Installation"]):
    """What `install` returns: the end of a `with` undoes this call, and the switch with the last that holds it."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            if self in _wanted:
                _wanted.remove(self)
                if not _wanted:
                    _take_back()


def install() -> Installation:
    """Have mlx-lm make mlximpl's caches: in its models, its generators, its server and its commands.

    It holds for the whole process, for every thread, and for modules of mlx-lm that are imported later, until
    `uninstall`. Call it before a server, a generator or a prompt cache is made: caches that were made before stay
    mlx-lm's and work with each other, but not in one batch with ours. Code outside of mlx-lm that has imported a name
    before keeps what it has.

    The nine cache classes are replaced, `make_prompt_cache` (which honours or refuses max_kv_size),
    `save_prompt_cache`, `load_prompt_cache`, `trim_prompt_cache` (which trims every layer, or none and returns 0), and
    the server's `LRUPromptCache`.

    Raises:
        ImportError: there is no mlx-lm.
        MlxLmVersionError: it is of a version that mlximpl was not tested with. Nothing has been changed then.
    """
    with _lock:
        if not _in_force:
            names = _Names(mlx_lm_cache())
            names.put()
            _in_force.append(names)
        _wanted.append(Installation())
        return _wanted[-1]


def uninstall() -> None:
    """Give mlx-lm its own caches back, however often `install` was called; nothing happens where it is not in force.

    Caches made in between stay mlximpl's.
    """
    with _lock:
        _wanted.clear()
        _take_back()


def _take_back() -> None:
    while _in_force:
        _in_force.pop().take_back()


class _Names:
    """mlx-lm's objects and what stands in their place."""

    def __init__(self, cache_module: ModuleType) -> None:
        own = own_names(cache_module)
        self.cache_module = cache_module
        self.ours = _replacements(own)
        self.pairs = [(own[name], ours) for name, ours in self.ours.items()]
        self.either = (own["ArraysCache"], _either(ArraysCache, own["ArraysCache"]))
        self.kept = {(id(module), name) for module, name in self._held([ours for _, ours in self.pairs], _modules())}
        self.plain = type(cache_module)

    def put(self) -> None:
        self._swap([self.either], [module for module in _modules() if module.__name__ == MAMBA])
        self._swap(self.pairs, _modules())
        self.cache_module.__class__ = _showing(self.plain, self.ours)

    def take_back(self) -> None:
        self.cache_module.__class__ = self.plain
        self._swap([(ours, theirs) for theirs, ours in (*self.pairs, self.either)], _modules())

    def _swap(self, pairs: list[tuple[Any, Any]], modules: list[ModuleType]) -> None:
        new = {id(old): new for old, new in pairs}
        for module, name in self._held([old for old, _ in pairs], modules):
            if (id(module), name) not in self.kept:
                setattr(module, name, new[id(vars(module)[name])])

    def _held(self, wanted: list[Any], modules: list[ModuleType]) -> list[tuple[ModuleType, str]]:
        """The names in modules other than mlx-lm's caches' under which one of these objects stands."""
        ids = {id(each) for each in wanted}
        return [
            (module, name)
            for module in modules
            if module is not self.cache_module
            for name, value in list(vars(module).items())
            if id(value) in ids
        ]


def _modules() -> list[ModuleType]:
    """All of mlx-lm's modules that are loaded."""
    return [
        module
        for name, module in list(sys.modules.items())
        if (name == "mlx_lm" or name.startswith("mlx_lm.")) and isinstance(module, ModuleType)
    ]


def _showing(plain: type, names: Mapping[str, Any]) -> type:
    """A class of modules that answers these names with these objects, whatever the module itself has."""
    return type("ModuleWithMlximpl", (plain,), {name: property(_answer(ours)) for name, ours in names.items()})


def _answer(value: Any) -> Any:
    return lambda module: value


def _replacements(own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **KINDS,
        "make_prompt_cache": make_prompt_cache,
        "save_prompt_cache": _saver(own["save_prompt_cache"]),
        "load_prompt_cache": load_prompt_cache,
        "LRUPromptCache": exact_lru(own),
        "trim_prompt_cache": _all_or_nothing,
    }


def _either(ours: type, theirs: type) -> type:
    """A class that makes ours, and of which theirs are instances too: mamba would leave one made before unwritten."""

    class Either(type):
        def __call__(cls, *args: Any, **named: Any) -> Any:
            return ours(*args, **named)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (ours, theirs))

        def __getattr__(cls, name: str) -> Any:
            return getattr(ours, name)

    return Either(ours.__name__, (), {"__doc__": ours.__doc__})


def _all_or_nothing(cache: Any, num_tokens: int) -> int:
    """`mlximpl.trim_prompt_cache`, but 0 where a layer cannot drop as many, as mlx-lm's callers expect."""
    num_tokens = check_trim(num_tokens)
    return trim_prompt_cache(cache, num_tokens) if all(_can_trim(layer, num_tokens) for layer in cache) else 0


def _saver(theirs: Any) -> Any:
    def save(file_name: str, cache: Any, metadata: Any = None) -> None:
        """`mlximpl.save_prompt_cache`; mlx-lm's own caches are saved by mlx-lm. A name gets mlx-lm's ending."""
        if not any(isinstance(each, AnyCache) for each in cache):
            theirs(file_name, cache, metadata)
            return
        name = os.fspath(file_name)
        save_prompt_cache(name if name.endswith(".safetensors") else f"{name}.safetensors", cache, metadata)

    save.__name__ = "save_prompt_cache"
    return save
