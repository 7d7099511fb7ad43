"""Record the files that the installed mlx-lm's `save_prompt_cache` writes, and beside each what it holds.

`python -m conformance.record_files --directory goldens/files`, once under each version. It needs that mlx-lm, mlx and
numpy, and neither mlximpl nor the rest of the harness.

What is recorded under `then` is what the caches that were saved did when they went on, so a loader that restores them
wrongly is not believed.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from conformance.file_goldens import FORMAT, as_text
from conformance.file_layers import Layer, content
from conformance.file_situations import FileSituation, Plan, situations

ROOT = Path(__file__).resolve().parent.parent


def source() -> dict[str, str]:
    """Which code wrote the files, and where. Versions are labels: the hashes tell what the code was."""
    import mlx_lm.models.cache as cache

    path = Path(str(cache.__file__))
    return {
        "name": "mlx-lm",
        "version": version("mlx-lm"),
        "mlx": version("mlx"),
        "device": str(mx.default_device().type).rsplit(".", 1)[-1],
        "sha256 of models/cache.py": hashlib.sha256(path.read_bytes()).hexdigest(),
    }


def built(plan: Plan, module: ModuleType, tags: Iterator[int]) -> Layer:
    """The cache of a plan, fed as it says; each row takes the next tag."""
    if plan.kind == "CacheList":
        layers = [built(each, module, tags) for each in plan.caches]
        cache: Any = module.CacheList(*(layer.cache for layer in layers))
        return Layer(cache, plan.kind, plan.config, [], [], layers=layers)
    cache = getattr(module, plan.kind)(**plan.options)
    first = [-n for n in plan.options["left_padding"]] if plan.kind.startswith("Batch") else [0] * plan.rows
    layer = Layer(cache, plan.kind, plan.config, [next(tags) for _ in range(plan.rows)], first, dtypes=plan.dtypes)
    for step in plan.before:
        layer.step(step)
    return layer


def all_built(plans: tuple[Plan, ...], module: ModuleType) -> list[Layer]:
    """The layers of a file, every row with a tag of its own."""
    tags = iter(range(1, 100))
    return [built(plan, module, tags) for plan in plans]


def gone_on(layer: Layer, plan: Plan, data: dict[str, Any]) -> None:
    """Go on as the plan says, and note what is seen in the layer's data."""
    for each, of_each, noted in zip(layer.layers, plan.caches, data.get("caches", ()), strict=True):
        gone_on(each, of_each, noted)
    if plan.kind != "CacheList":
        data["then"] = [{"step": list(step), **layer.step(step)} for step in plan.then]


def record(situation: FileSituation, directory: Path, module: ModuleType, of: dict[str, str]) -> Path:
    """Write a file and what it holds; returns the path of the latter."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{situation.name}.json"
    file = path.with_suffix(".safetensors")
    layers = all_built(situation.layers, module)
    caches = [layer.cache for layer in layers]
    if situation.metadata is None:
        module.save_prompt_cache(str(file), caches)
    else:
        module.save_prompt_cache(str(file), caches, situation.metadata)
    data = [content(layer) for layer in layers]
    for layer, plan, noted in zip(layers, situation.layers, data, strict=True):
        gone_on(layer, plan, noted)
    golden = {
        "format": FORMAT,
        "description": situation.description,
        "source": of,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "metadata": situation.metadata or {},
        "lost": situation.lost,
        "layers": data,
    }
    path.write_text(as_text(golden), encoding="utf-8")
    return path


def main(words: list[str]) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m conformance.record_files", description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "goldens" / "files")
    arguments = parser.parse_args(words)
    try:
        import mlx_lm.models.cache as module
    except ImportError as error:
        print(f"mlx-lm cannot be imported: {error}", file=sys.stderr)
        return 2
    of = source()
    directory = arguments.directory / f"mlx-lm-{of['version']}"
    try:
        every = situations(of["version"])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for situation in every:
        print(f"recorded {record(situation, directory, module, of)}")
    print(f"recorded {len(every)} files of mlx-lm {of['version']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
