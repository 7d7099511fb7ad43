"""Adapters by name."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version

from conformance.adapters.base import Adapter, AdapterError
from conformance.operations import KINDS

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
    except Exception as error:  # whatever a module does when it is imported, it cannot be tested
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AdapterError(f"{name} cannot be imported: {reason}") from error
    if missing := [kind for kind in KINDS if not hasattr(module, kind)]:
        raise AdapterError(f"{name} ({IMPLEMENTATIONS[name]}) has no {', '.join(missing)}")
    try:
        found = version(name.replace("_", "-"))
    except PackageNotFoundError:
        found = getattr(module, "__version__", "unknown")
    return SurfaceAdapter(name, module, found)
