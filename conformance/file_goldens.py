"""Recorded prompt-cache files: found, read, and held against their form. Needs neither MLX nor an implementation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1
FOLDER = "files"
"""Where they lie below the goldens."""

FIELDS = {
    "format": int,
    "description": str,
    "source": dict,
    "sha256": str,
    "metadata": dict,
    "lost": str,
    "layers": list,
}
SOURCE = ("name", "version", "mlx", "device", "sha256 of models/cache.py")


class FileGoldenError(Exception):
    """A description that cannot be read; the message names the path and the reason."""


@dataclass(frozen=True)
class FileGolden:
    """A file that mlx-lm wrote, and what it holds."""

    path: Path
    data: dict[str, Any]

    @property
    def file(self) -> Path:
        """The file itself."""
        return self.path.with_suffix(".safetensors")

    @property
    def layers(self) -> list[dict[str, Any]]:
        """What each layer holds and how it goes on."""
        layers: list[dict[str, Any]] = self.data["layers"]
        return layers

    @property
    def lost(self) -> str:
        """What the file lacks to be gone on from; mostly nothing."""
        return str(self.data["lost"])


def find_file_goldens(goldens: Path) -> list[Path]:
    """The descriptions below a directory of goldens, in order."""
    return sorted((goldens / FOLDER).rglob("*.json"))


def load_file_golden(path: Path) -> FileGolden:
    """Read one. Raises FileGoldenError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileGoldenError(f"{path}: cannot be read ({error})") from error
    if not isinstance(data, dict) or data.keys() != FIELDS.keys():
        raise FileGoldenError(f"{path}: should have exactly the fields {', '.join(FIELDS)}")
    for name, kind in FIELDS.items():
        if not isinstance(data[name], kind):
            raise FileGoldenError(f"{path}: {name} should be a {kind.__name__}, not {data[name]!r}")
    if data["format"] != FORMAT:
        raise FileGoldenError(f"{path}: format is {data['format']}, but this reader knows format {FORMAT}")
    return FileGolden(path, data)


def file_faults(path: Path) -> Iterator[str]:
    """What is wrong with a recorded file and its description, one line each."""
    try:
        golden = load_file_golden(path)
        content = golden.file.read_bytes()
    except FileGoldenError as error:
        yield str(error)
        return
    except OSError as error:
        yield f"the file beside it cannot be read ({error.strerror})"
        return
    for name in SOURCE:
        if not golden.data["source"].get(name):
            yield f"source does not say {name}"
    if path.read_text(encoding="utf-8") != as_text(golden.data):
        yield "was not written by the recorder: record it again"
    if hashlib.sha256(content).hexdigest() != golden.data["sha256"]:
        yield "the file beside it is not the one that was recorded"


def as_text(golden: dict[str, Any]) -> str:
    """The data as JSON, one step a line."""
    head = json.dumps({name: value for name, value in golden.items() if name != "layers"}, indent=2)[:-2]
    layers = ",".join(_layer_text(layer, "    ") for layer in golden["layers"])
    return f'{head},\n  "layers": [{layers}\n  ]\n}}\n'


def _layer_text(layer: dict[str, Any], indent: str) -> str:
    of_list = "caches" in layer
    name = "caches" if of_list else "then"
    facts = json.dumps({key: value for key, value in layer.items() if key != name})[:-1]
    inner = indent + "  "
    each = (_layer_text(x, inner) if of_list else f"\n{inner}{json.dumps(x)}" for x in layer.get(name, ()))
    return f'\n{indent}{facts},\n{indent} "{name}": [{",".join(each)}\n{indent}]}}'
