"""Loaders that do wrong where mlximpl refuses: the fuzzer must find each of them."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import mlximpl


class Loader:
    """mlximpl's, until it refuses."""

    PromptCacheFileError = mlximpl.PromptCacheFileError

    def __init__(self) -> None:
        self.first: Any = None

    def load_prompt_cache(self, file: str, **options: Any) -> Any:
        """The caches and the metadata."""
        try:
            found = mlximpl.load_prompt_cache(file, **options)
        except mlximpl.PromptCacheFileError as refusal:
            return self.instead(refusal)
        self.first = self.first or found
        return found

    def instead(self, refusal: Exception) -> Any:
        """What it does in place of the refusal."""
        raise refusal


class Empty(Loader):
    """No caches."""

    def instead(self, refusal: Exception) -> Any:
        return [], {}


class Bare(Loader):
    """An exception of its own."""

    def instead(self, refusal: Exception) -> Any:
        raise KeyError("0.0")


class Nameless(Loader):
    """A refusal that does not say of what."""

    def instead(self, refusal: Exception) -> Any:
        raise mlximpl.PromptCacheFileError("", "it is broken")


class Trusting(Loader):
    """Some caches or other."""

    def instead(self, refusal: Exception) -> Any:
        return self.first


class Greedy(Loader):
    """More memory than the file is worth."""

    def instead(self, refusal: Exception) -> Any:
        bytes(range(256)) * 2**19
        raise refusal


class Copying(Loader):
    """The right thing, from five copies of the file."""

    def load_prompt_cache(self, file: str, **options: Any) -> Any:
        """The caches and the metadata."""
        copies = [Path(file).read_bytes() for _ in range(5)]
        found = super().load_prompt_cache(file, **options)
        del copies
        return found


class Dying(Loader):
    """Nothing, ever again."""

    def instead(self, refusal: Exception) -> Any:
        ctypes.string_at(0)


class Hanging(Loader):
    """Nothing for a long time."""

    def instead(self, refusal: Exception) -> Any:
        time.sleep(1000)


class Changing(Loader):
    """Caches with one token less, where the file is mapped and nothing looks at its checksums."""

    def load_prompt_cache(self, file: str, **options: Any) -> Any:
        caches, metadata = super().load_prompt_cache(file, **options)
        if options == {"mmap": True, "return_metadata": True} and self.again(file):
            caches[0].trim(1)
        return caches, metadata

    def again(self, file: str) -> bool:
        """Whether it is no file that is right."""
        return "case" in file


empty, bare, nameless, trusting = Empty(), Bare(), Nameless(), Trusting()
greedy, copying, dying, hanging, changing = Greedy(), Copying(), Dying(), Hanging(), Changing()
