"""A payload of recorded arrays: it feeds what was fed then, and knows tokens by their bits.

Arrays of a real model say nothing of row and position, so this payload learns the bits of every token as it feeds it.
Two tokens may have the same bits (the same prompt in two rows): then the first one fed stands for both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from conformance.payload import PAD, UNKNOWN, Config, Ints, Storage, decode
from conformance.trace import TraceError

Token = tuple[int, int]
"""Tag and position."""


class RecordedPayload:
    """Feeds what was recorded for each step: of its arrays those that are named as a golden's inputs are."""

    def __init__(self, recorded: Mapping[str, Storage]) -> None:
        self.recorded = recorded
        self.by_bits: dict[str, dict[bytes, Token]] = {}
        self.first: dict[tuple[str, int, int], Token] = {}

    def arrays(self, where: str, tags: Ints, positions: Ints, config: Config) -> tuple[Storage, Storage]:
        """The arrays recorded for this step. Raises TraceError when they are not those of B rows and N columns."""
        rows, count = tags.shape
        if not count:  # an update of no columns is refused, and nothing of it is worth recording
            shape = (rows, config.heads, 0)
            dtype = np.uint16 if config.dtype == "bfloat16" else np.dtype(config.dtype)
            return np.zeros((*shape, config.key_dim), dtype), np.zeros((*shape, config.value_dim), dtype)
        keys, values = (self._input(where, what, f"{count} columns") for what in ("keys", "values"))
        for role, x in (("key", keys), ("value", values)):
            if x.ndim != 4 or (x.shape[0], x.shape[2]) != (rows, count):
                raise TraceError(
                    f"step {where} feeds {count} columns to {rows} rows, but the recorded {role}s are {x.shape}"
                )
            for b, row in enumerate(_bits(x)):
                self._learn(role, row, zip(tags[b].tolist(), positions[b].tolist(), strict=True))
        return keys, values

    def state(self, where: str, slot: int, tags: Ints, positions: Ints, config: Config) -> Storage:
        """The state recorded for this step and slot. Raises TraceError when it is not that of B rows."""
        x = self._input(where, f"slot.{slot}", f"slot {slot}")
        if x.shape[:1] != tags.shape:
            raise TraceError(f"step {where} writes a state of {len(tags)} rows, but the one recorded is {x.shape}")
        self._learn(f"slot.{slot}", _rows(x), zip(tags.tolist(), positions.tolist(), strict=True))
        return x

    def _input(self, where: str, what: str, fed: str) -> Storage:
        if f"{where}.input.{what}" not in self.recorded:
            raise TraceError(f"step {where} feeds {fed}, but no arrays are recorded for it")
        return self.recorded[f"{where}.input.{what}"]

    def _learn(self, role: str, bits_of: Iterable[bytes], tokens: Iterable[Token]) -> None:
        by_bits = self.by_bits.setdefault(role, {})
        for bits, token in zip(bits_of, tokens, strict=True):
            known = by_bits.get(bits)
            if known is None or (known[1] == PAD and token[1] != PAD):
                by_bits[bits] = token
            if token[1] != PAD:
                self.first.setdefault((role, *token), by_bits[bits])

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        """The tags and positions (B, T) of the tokens with these bits."""
        rows, _, width, _ = x.shape
        tags = np.full((rows, width), PAD, np.int64)
        positions = np.full((rows, width), UNKNOWN, np.int64)
        for b, row in enumerate(_bits(x)):
            for t, bits in enumerate(row):
                tags[b, t], positions[b, t] = self._token(role, bits)
        return tags, positions

    def decode_state(self, x: Storage, slot: int, config: Config) -> tuple[Ints, Ints]:
        """The tag and position (B,) of each row of a slot; PAD for zeros."""
        rows = [(PAD, PAD) if not any(bits) else self._token(f"slot.{slot}", bits) for bits in _rows(x)]
        found = np.array(rows, np.int64).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def _token(self, role: str, bits: bytes) -> Token:
        token = self.by_bits.get(role, {}).get(bits, (PAD, UNKNOWN))
        return (PAD, PAD) if token[1] == PAD else token

    def shown(self, role: str, tag: int, position: int) -> Token:
        """The first token fed with the bits of this one."""
        return self.first.get((role, tag, position), (tag, position))


class TwoLevelRecorded(RecordedPayload):
    """The same where the arrays were quantized since: their bits are gone, and two-level features name the token."""

    def decode(self, x: Storage, role: str, config: Config) -> tuple[Ints, Ints]:
        return decode(x, role, config)

    def shown(self, role: str, tag: int, position: int) -> Token:
        return super().shown(role, tag, position) if role.startswith("slot") else (tag, position)


def _bits(x: Storage) -> list[list[bytes]]:
    """Per row and column, the bits of all heads."""
    columns = np.ascontiguousarray(x.transpose(0, 2, 1, 3))
    return [[column.tobytes() for column in row] for row in columns]


def _rows(x: Storage) -> list[bytes]:
    """Per row of a state, its bits."""
    return [row.tobytes() for row in np.ascontiguousarray(x)]
