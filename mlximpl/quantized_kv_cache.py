"""One sequence, or several of the same length, in a growing buffer of few bits a number."""

from collections.abc import Sequence

import mlx.core as mx

from .append import append_columns
from .checks import Heads, check_update, heads_of
from .growing_cache import GrowingCache
from .quantization import (
    Parts,
    Quantization,
    check_quantizable,
    check_quantization,
    head_size,
    quantize,
    state_parts,
)
from .states import state_elements, state_int


class QuantizedKVCache(GrowingCache):
    """A growing cache that keeps every token, quantized.

    Args:
        group_size: how many neighbours of a head share a scale and a bias: 32, 64 or 128.
        bits: bits a number: 2, 3, 4, 5, 6 or 8.

    Attributes:
        offset: how many tokens are held: the position that the next one gets.
        keys: (words, scales, biases), each (B, H, S, ...), or None before the first update. S may exceed the
            columns in use.
        values: the same of the values. Both may be assigned.

    Raises:
        ValueError: another group_size or bits.
    """

    keys: Sequence[mx.array] | None
    values: Sequence[mx.array] | None

    def __init__(self, group_size: int = 64, bits: int = 8) -> None:
        self.group_size, self.bits = check_quantization(group_size, bits)
        self.keys = None
        self.values = None
        self.offset = 0

    def _how(self) -> Quantization:
        return Quantization(self.group_size, self.bits)

    def _heads(self) -> Heads | None:
        if self.keys is None or self.values is None:
            return None
        return Heads(
            self.keys[0].shape[1],
            head_size(self.keys, self.bits),
            head_size(self.values, self.bits),
            self.keys[1].dtype,
            self.values[1].dtype,
        )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Parts, Parts]:
        """Quantize and append N columns, and return all of them.

        Args:
            keys: (B, H, N, D), float16, bfloat16 or float32.
            values: (B, H, N, Dv), of the same dtype.

        Returns:
            Of the keys and of the values (words, scales, biases): uint32 (B, H, offset, D * bits / 32) and twice
            (B, H, offset, D / group_size), as `mx.quantize` packs them.

        Raises:
            ValueError: the arrays fit neither each other nor the cache; N is 0; D or Dv is not whole groups.
        """
        held = self._heads()
        rows = None if self.keys is None else self.keys[0].shape[0]
        n = check_update(keys, values, None, None, rows)
        given = heads_of(keys, values)
        if held is not None and given != held:
            raise ValueError(f"update of {given}, but the cache holds {held}")
        if self.keys is None or self.values is None:
            self._start(keys, values)
        else:
            new_keys, new_values = self._append(self.keys, keys), self._append(self.values, values)
            self.keys, self.values = new_keys, new_values
            self.offset += n
        return self.keys_and_values()

    def _start(self, keys: mx.array, values: mx.array) -> None:
        """Store the first columns: (B, H, N, D) and (B, H, N, Dv), where N may be 0."""
        heads = heads_of(keys, values)
        assert heads is not None
        check_quantizable(heads, self._how())
        self.keys, self.values = self._append(None, keys), self._append(None, values)
        self.offset = keys.shape[2]

    def _append(self, held: Sequence[mx.array] | None, columns: mx.array) -> Parts:
        new = quantize(columns, self._how())
        spare = self._spare_columns(self.offset)
        words, scales, biases = (
            append_columns(None if held is None else held[i], part, self.offset, self.step, spare)
            for i, part in enumerate(new)
        )
        return words, scales, biases

    def keys_and_values(self) -> tuple[Parts, Parts]:
        """The last fetch again, without writing.

        Raises:
            ValueError: no update has been seen.
        """
        keys, values = self._stored_parts()
        if keys is None or values is None:
            raise ValueError("QuantizedKVCache has seen no update, so there is nothing to fetch")
        return keys, values

    def _stored_parts(self) -> tuple[Parts | None, Parts | None]:
        """Keys and values cut to the columns stored; new objects, safe to hand out."""
        if self.keys is None or self.values is None:
            return None, None
        return self._cut(self.keys), self._cut(self.values)

    def _cut(self, parts: Sequence[mx.array]) -> Parts:
        words, scales, biases = (
            part[...] if part.shape[2] == self.offset else part[..., : self.offset, :] for part in parts
        )
        return words, scales, biases

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for parts in (self.keys, self.values) if parts is not None for part in parts)

    @property
    def state(self) -> tuple[object, ...]:
        """(keys, values, offset, group_size, bits): mlx-lm's layout, the parts cut to the columns stored."""
        return *self._stored_parts(), self.offset, self.group_size, self.bits

    @state.setter
    def state(self, state: object) -> None:
        kind = "QuantizedKVCache"
        elements = state_elements(kind, state, "keys, values, offset, group_size, bits")
        how = check_quantization(state_int(kind, "group_size", elements[3], 0), state_int(kind, "bits", elements[4], 0))
        keys = values = None
        width = 0
        if elements[0] is not None or elements[1] is not None:
            keys, values = (
                state_parts(kind, name, parts, how)
                for name, parts in zip(("keys", "values"), elements[:2], strict=True)
            )
            if keys[0].shape[:3] != values[0].shape[:3] or keys[1].dtype != values[1].dtype:
                raise ValueError(
                    f"{kind} state: keys {keys[0].shape} with {keys[1].dtype} and values {values[0].shape} with "
                    f"{values[1].dtype} differ in rows, heads, columns or dtype"
                )
            width = keys[0].shape[2]
        offset = state_int(kind, "offset", elements[2], 0, width)
        self.keys, self.values, self.offset = keys, values, offset
        self.group_size, self.bits = how

    def __repr__(self) -> str:
        return f"QuantizedKVCache(offset={self.offset}, group_size={self.group_size}, bits={self.bits})"
