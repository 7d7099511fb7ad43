"""Has mlx-lm's cache classes tell a `Capture` of every call, for as long as it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from conformance.capture import LIST, RECURRENT, Capture

BATCHES = ("BatchKVCache", "BatchRotatingKVCache")
CLASSES = ("KVCache", "RotatingKVCache", *BATCHES, "ChunkedKVCache", RECURRENT, LIST)
METHODS = (
    "update_and_fetch",
    "make_mask",
    "prepare",
    "finalize",
    "filter",
    "extend",
    "extract",
    "maybe_trim_front",
    "__setitem__",
    "advance",
)


@contextmanager
def wrapped(capture: Capture) -> Iterator[None]:
    """The cache classes with every call written down. Calls that a method makes itself are its own affair."""
    from mlx_lm.models import cache as upstream

    undo: list[tuple[type, str, Any]] = []

    def wrap(cls: type, name: str, before: Callable[..., Any]) -> None:
        undo.append((cls, name, vars(cls).get(name)))
        setattr(cls, name, before)

    def outermost(handler: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
        def call(cache: Any, *args: Any, **kwargs: Any) -> Any:
            if capture.depth:
                return method(cache, *args, **kwargs)
            capture.depth += 1
            try:
                return handler(cache, *args, **kwargs)
            finally:
                capture.depth -= 1

        return call

    def handled(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        handler = getattr(capture, name.strip("_"))
        return outermost(lambda cache, *args, **kwargs: handler(cache, method, *args, **kwargs), method)

    def copied(cache: Any, memo: dict[int, Any]) -> Any:
        return capture.deepcopy(cache, memo)

    def assigned(cache: Any, name: str, value: Any) -> None:
        # deepseek_v32 puts zeros for the values of its second child, which it never reads. No operation on a cache says
        # that, so it is left out: the recording goes on with the values that were fed.
        known = capture.known.get(id(cache)) if name == "values" and not capture.depth else None
        if known is None or known.within is None:
            object.__setattr__(cache, name, value)

    try:
        for class_name in CLASSES:
            cls = getattr(upstream, class_name)
            for name in METHODS:
                if name in vars(cls):
                    wrap(cls, name, handled(name, vars(cls)[name]))
            if class_name in (*BATCHES, RECURRENT, LIST):
                merge = vars(cls)["merge"].__func__
                by_class = outermost(lambda kind, caches, m=merge: capture.merge(lambda c: m(kind, c), caches), merge)
                wrap(cls, "merge", classmethod(by_class))  # type: ignore[arg-type]
            wrap(cls, "__deepcopy__", copied)
            wrap(cls, "__setattr__", assigned)
        yield
    finally:
        for cls, name, method in reversed(undo):
            if method is None:
                delattr(cls, name)
            else:
                setattr(cls, name, method)
