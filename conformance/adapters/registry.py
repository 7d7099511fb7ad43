"""Adapters by name."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

from conformance.adapters.base import Adapter, AdapterError

IMPLEMENTATIONS = {"mlximpl": "mlximpl", "mlx_lm": "mlx_lm.models.cache"}


def make_adapter(name: str) -> Adapter:
    """The adapter of this name. Raises AdapterError, in one line, when it cannot be had."""
    if name == "reference":
        from conformance.adapters.reference import ReferenceAdapter

        return ReferenceAdapter()
    if name not in IMPLEMENTATIONS:
        raise AdapterError(f"no adapter {name!r}; known are reference, {', '.join(IMPLEMENTATIONS)}")
    try:
        module = importlib.import_module(IMPLEMENTATIONS[name])
        from conformance.adapters.surface import SurfaceAdapter
    except ImportError as error:
        raise AdapterError(f"{name} cannot be imported: {error}") from error
    try:
        found = version(name.replace("_", "-"))
    except PackageNotFoundError:
        found = "unknown"
    return SurfaceAdapter(name, module, found)
