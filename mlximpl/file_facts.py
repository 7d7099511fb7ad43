"""What mlximpl's own files say of themselves: JSON in the metadata entry "2.0", which mlx-lm does not look at.

seal      checksums of the header with zeros in this place, the first thing in it
format    1
layout    "compact" or "mappable"
checksums of every tensor but padding in the header's order, eight hex digits each
mlx_lm    whether mlx-lm 0.32 reads the file right
empty     paths of lists without elements
scalars   in mappable files: ints, flags, strings and None by path; compact files have tensors for them
metadata  [[key, value], ...]: those that mlx-lm would not read back as they are; a string with halves of characters
          (surrogates) is a list of its code points, since JSON would join them
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .safetensors_header import SEAL_WIDTH, Tensor, parse_json

FORMAT = 1
LAYOUTS = ("compact", "mappable")
PLACE = "2.0"
HALF = re.compile("[\ud800-\udfff]")


class Facts(NamedTuple):
    layout: str
    checksums: str
    mlx_lm: bool
    empty: list[str]
    scalars: dict[str, Any]
    metadata: dict[str, str]

    def text(self) -> str:
        """As it stands in the file, with zeros for the seal."""
        metadata = [[_text(key), _text(value)] for key, value in self.metadata.items()]
        facts = {"seal": "0" * SEAL_WIDTH, "format": FORMAT, **self._asdict(), "metadata": metadata}
        return json.dumps(facts, separators=(",", ":"))


def _text(string: str) -> str | list[int]:
    return [ord(character) for character in string] if HALF.search(string) else string


def _string(text: object) -> str:
    if isinstance(text, str):
        return text
    if not isinstance(text, list) or not all(type(n) is int and 0 <= n <= sys.maxunicode for n in text):
        raise ValueError("its metadata are not strings")
    return "".join(map(chr, text))


def read_facts(text: str) -> Facts:
    """Read and check `Facts.text`.

    Raises:
        ValueError: it is none, or of a format that is not known here.
    """
    facts = parse_json(text, "what it says of itself")
    version = facts.get("format") if isinstance(facts, dict) else None
    if version != FORMAT or isinstance(version, bool):
        raise ValueError(f"it has the format {version!r} of mlximpl, but {FORMAT} is the one known here")
    kinds = {"layout": str, "checksums": str, "mlx_lm": bool, "empty": list, "scalars": dict, "metadata": list}
    if facts.keys() != {"seal", "format", *kinds} or any(not isinstance(facts[n], kind) for n, kind in kinds.items()):
        raise ValueError(f"what it says of itself is not {', '.join(kinds)}")
    found = Facts(**{name: facts[name] for name in kinds})
    if found.layout not in LAYOUTS:
        raise ValueError(f"it has the layout {found.layout!r}, which is none of {', '.join(LAYOUTS)}")
    if not all(isinstance(path, str) for path in found.empty):
        raise ValueError("its lists without elements have no paths")
    if not all(value is None or isinstance(value, (int, str)) for value in found.scalars.values()):
        raise ValueError("its scalars are not ints, flags, strings and None")
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in facts["metadata"]):
        raise ValueError("its metadata are not pairs of strings")
    return found._replace(metadata={_string(key): _string(value) for key, value in facts["metadata"]})


def checksums_text(checksums: Sequence[int]) -> str:
    return "".join(f"{checksum:08x}" for checksum in checksums)


def checksums_of(text: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksum of each tensor; ValueError where their number is another."""
    if len(text) != 8 * len(tensors) or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"it has no {len(tensors)} checksums for its tensors")
    return {name: int(text[8 * i : 8 * i + 8], 16) for i, name in enumerate(tensors)}
