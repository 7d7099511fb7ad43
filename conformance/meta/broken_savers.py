"""Savers that leave broken files when they are killed: the kill test must find each of them."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import mlximpl


class InPlace:
    """Writes over the file that is there."""

    @staticmethod
    def save_prompt_cache(file: str, cache: list[Any]) -> None:
        """Save, not safely."""
        mlximpl.save_prompt_cache(file + ".new", cache)
        with open(file + ".new", "rb") as new, open(file, "wb") as old:
            while piece := new.read(1 << 14):
                old.write(piece)


class AwayFirst:
    """Takes the old file away before the new one is there."""

    @staticmethod
    def save_prompt_cache(file: str, cache: list[Any]) -> None:
        """Save, not safely."""
        if os.path.exists(file):
            os.unlink(file)
        mlximpl.save_prompt_cache(file + ".new", cache)
        shutil.move(file + ".new", file)


class Failing:
    """Cannot save in the process that is to be killed."""

    @staticmethod
    def save_prompt_cache(file: str, cache: list[Any]) -> None:
        """Save, or not."""
        if "note" in " ".join(sys.argv):
            raise OSError("the disk is full")
        mlximpl.save_prompt_cache(file, cache)
