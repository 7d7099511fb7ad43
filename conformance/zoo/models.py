"""A family's model: mlx-lm's own code, weights drawn at random, the same ones each time."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from conformance.zoo.families import BY_NAME, SIZES, Family

SEED = 3
SPREAD = 0.2
"""Of the noise on each weight: enough that every key counts in the answer."""


def make_model(name: str, dtype: str = "float32", **changed: Any) -> Any:
    """The model of a family.

    Args:
        name: of the family.
        dtype: of the weights, as MLX names it.
        changed: sizes other than the family's.
    """
    import mlx.core as mx
    from mlx.utils import tree_map

    family = BY_NAME[name]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(SEED)
    model = module.Model(_arguments(family, module, changed))

    def moved(weight: Any) -> Any:
        return weight + SPREAD * mx.random.normal(weight.shape) if mx.issubdtype(weight.dtype, mx.floating) else weight

    model.update(tree_map(moved, model.parameters()))
    model.set_dtype(getattr(mx, dtype))
    model.eval()
    mx.eval(model.parameters())
    return model


def _arguments(family: Family, module: Any, changed: dict[str, Any]) -> Any:
    given = {"model_type": family.name, **SIZES, **family.sizes, **changed}
    if family.nested:
        return module.ModelArgs(model_type=family.name, text_config=given)
    known = inspect.signature(module.ModelArgs).parameters
    return module.ModelArgs(**{key: value for key, value in given.items() if key in known})
