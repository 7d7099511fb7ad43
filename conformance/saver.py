"""A process that saves two caches over one file, in turn, until it is killed: `python -m conformance.saver`.

It notes what it is doing in a file of 64 bytes that is mapped into memory, which outlives it, and can kill itself just
before or after a given call of the operating system. It imports little, since it is started for each kill.
"""

from __future__ import annotations

import argparse
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import mlx.core as mx

import mlximpl

WRITING = ("open", "write", "writelines", "pwrite", "writev", "flush", "close", "truncate", "save_safetensors")
MOVING = ("fsync", "fdatasync", "fcntl", "replace", "rename", "link", "unlink", "remove")
CALLS = (*WRITING, *MOVING)
"""What a save does to files, by the names that Python gives it."""
NOTE = 64


def two_caches() -> tuple[list[Any], list[Any]]:
    """Two prompt caches of other sizes, layer counts and numbers."""
    return _caches(2, 500, 1.0), _caches(3, 200, 2.0)


def _caches(layers: int, tokens: int, number: float) -> list[Any]:
    made: list[Any] = []
    for layer in range(layers):
        ring = mlximpl.RotatingKVCache(64)
        growing = mlximpl.KVCache()
        for cache in (ring, growing):
            x = mx.arange(4 * tokens * 64, dtype=mx.float32).reshape(1, 4, tokens, 64) % 97 + number + layer
            cache.update_and_fetch(x, x + 0.5)
        made += [ring, growing]
    mx.eval([cache.state for cache in made])
    return made


def named(name: str) -> Any:
    """What `module` or `module:attribute` names."""
    module, _, attribute = name.partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


@contextmanager
def watched(see: Callable[[str], None]) -> Iterator[None]:
    """Say what is done to files in here: `in write`, `after write`."""
    words = {"c_call": "in", "c_return": "after", "c_exception": "after"}

    def profile(frame: Any, event: str, of: Any) -> None:
        if event in words and getattr(of, "__name__", "") in CALLS:
            see(f"{words[event]} {of.__name__}")

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def saving(saver: str) -> Callable[[str, list[Any], int], None]:
    """A function that saves the first of two caches durably, where the saver can, and the second not."""
    save = named(saver).save_prompt_cache
    can = "durable" in signature(save).parameters

    def turns(file: str, cache: list[Any], turn: int) -> None:
        save(file, cache, **({"durable": True} if can and turn % 2 == 0 else {}))

    return turns


def rehearsal(saver: str, directory: Path) -> tuple[list[list[str]], float]:
    """What the saves of both caches do to files, by cache, and how many seconds the two take."""
    seen: list[list[str]] = []
    save = saving(saver)
    caches, file = two_caches(), str(directory / "rehearsal.safetensors")
    save(file, caches[1], 1)  # there is a file to be replaced, as later
    began = time.monotonic()
    for turn, each in enumerate(caches):
        seen.append([])
        with watched(seen[-1].append):
            save(file, each, turn)
    return seen, time.monotonic() - began


def main(words: list[str]) -> None:
    """Save for ever. A line of input says with which cache, 0 or 1, and at which call to die, or at none: 0."""
    parser = argparse.ArgumentParser(prog="python -m conformance.saver", description=__doc__.splitlines()[0])
    parser.add_argument("file")
    parser.add_argument("note", help="where to say what is being done")
    parser.add_argument("--saver", default="mlximpl", help="what has save_prompt_cache: `module` or `module:attribute`")
    arguments = parser.parse_args(words)
    if device := os.environ.get("MLXIMPL_DEVICE"):
        mx.set_default_device(mx.cpu if device == "cpu" else mx.gpu)
    save = saving(arguments.saver)
    caches = two_caches()
    with open(arguments.note, "r+b") as note:
        shown = mmap.mmap(note.fileno(), NOTE)
    count = die_at = 0

    def see(what: str) -> None:
        nonlocal count
        count += 1
        shown[:] = what.encode().ljust(NOTE)[:NOTE]
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    print("ready", flush=True)
    turn, die_at = map(int, sys.stdin.readline().split())
    with watched(see):
        while True:
            save(arguments.file, caches[turn % 2], turn)
            turn += 1


if __name__ == "__main__":
    main(sys.argv[1:])
