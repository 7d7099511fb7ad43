"""mlx-lm where it is wanted: which versions go with mlximpl, and its own classes, also while `install` is in force."""

import importlib
from types import ModuleType
from typing import Any

TESTED = ("0.32.0", "0.32.1", "0.32.2")
"""The versions of mlx-lm that `install` and `to_mlx_lm` are tested with."""

CACHE = "mlx_lm.models.cache"


class MlxLmVersionError(ImportError):
    """An mlx-lm of a version that mlximpl was not tested with.

    Attributes:
        version: what is installed.
    """

    def __init__(self, version: str) -> None:
        super().__init__(f"mlx-lm {version} is installed, but mlximpl is tested with {', '.join(TESTED)} alone")
        self.version = version


def mlx_lm_cache() -> ModuleType:
    """mlx-lm's module of caches.

    Raises:
        ImportError: mlx-lm is missing, or fails to import.
        MlxLmVersionError: it is of another version than those tested.
    """
    try:
        version = importlib.import_module("mlx_lm._version").__version__
        module = importlib.import_module(CACHE)
    except ImportError as error:
        raise ImportError(f"this needs mlx-lm, which cannot be imported: {error}") from error
    if version not in TESTED:
        raise MlxLmVersionError(version)
    return module


def own_names(module: ModuleType) -> dict[str, Any]:
    """The names of mlx-lm's module as mlx-lm defined them, whatever `install` shows in their place."""
    return vars(module)
