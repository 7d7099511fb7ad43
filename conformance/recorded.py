"""A payload of recorded arrays: it feeds what was fed then, and knows tokens by their bits.

Arrays of a real model say nothing of row and position, so this payload learns the bits of every token as it feeds it.
Two tokens may have the same bits (the same prompt in two rows): then the first one fed stands for both.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from conformance.payload import PAD, UNKNOWN, Config, Ints, Storage, decode
from conformance.trace import TraceError

Token = tuple[int, int]
"""Tag and position."""


class RecordedPayload:
    """Feeds the keys and values that were recorded for each step."""

    def __init__(self, inputs: Mapping[str, tuple[Storage, Storage]]) -> None:
        self.inputs = inputs
        self.by_bits: dict[str, dict[bytes, Token]] = {"key": {}, "value": {}}
        self.first: dict[tuple[str, int, int], Token] = {}

    def arrays(self, where: str, tags: Ints, positions: Ints, config: Config) -> tuple[Storage, Storage]:
        """The arrays recorded for this step. Raises TraceError when they are not those of B rows and N columns."""
        rows, count = tags.shape
        if not count:  # an update of no columns is refused, and nothing of it is worth recording
            shape = (rows, config.heads, 0)
            dtype = np.uint16 if config.dtype == "bfloat16" else np.dtype(config.dtype)
            return np.zeros((*shape, config.key_dim), dtype), np.zeros((*shape, config.value_dim), dtype)
        if where not in self.inputs:
            raise TraceError(f"step {where} feeds {count} columns, but no arrays are recorded for it")
        keys, values = self.inputs[where]
        for role, x in (("key", keys), ("value", values)):
            if x.ndim != 4 or (x.shape[0], x.shape[2]) != (rows, count):
                raise TraceError(
                    f"step {where} feeds {count} columns to {rows} rows, but the recorded {role}s are {x.shape}"
                )
            self._learn(role, x, tags, positions)
        return keys, values

    def _learn(self, role: str, x: Storage, tags: Ints, positions: Ints) -> None:
        for b, row in enumerate(_bits(x)):
            for i, bits in enumerate(row):
                token = (int(tags[b, i]), int(positions[b, i]))
                known = self.by_bits[role].get(bits)
                if known is None or (known[1] == PAD and token[1] != PAD):
                    self.by_bits[role][bits] = token
                if token[1] != PAD:
                    self.first.setdefault((role, *token), self.by_bits[role][bits])

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        """The tags and positions (B, T) of the tokens with these bits."""
        rows, _, width, _ = x.shape
        tags = np.full((rows, width), PAD, np.int64)
        positions = np.full((rows, width), UNKNOWN, np.int64)
        for b, row in enumerate(_bits(x)):
            for t, bits in enumerate(row):
                tag, position = self.by_bits[role].get(bits, (PAD, UNKNOWN))
                tags[b, t], positions[b, t] = (PAD, PAD) if position == PAD else (tag, position)
        return tags, positions

    def shown(self, role: str, tag: int, position: int) -> Token:
        """The first token fed with the bits of this one."""
        return self.first.get((role, tag, position), (tag, position))


class TwoLevelRecorded(RecordedPayload):
    """The same where the arrays were quantized since: their bits are gone, and two-level features name the token."""

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        return decode(x, role, config)

    def shown(self, role: str, tag: int, position: int) -> Token:
        return tag, position


def _bits(x: Storage) -> list[list[bytes]]:
    """Per row and column, the bits of all heads."""
    columns = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    return [[column.tobytes() for column in row] for row in columns]
