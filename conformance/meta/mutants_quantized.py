"""Mistakes with quantized caches: parts that do not belong together, bits and groups mixed up, trims that leave."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from conformance.meta.mutant import breaks

KIND = "QuantizedKVCache"


# -- the parts ------------------------------------------------------------------------------------


@breaks("QuantizedKVCache.keys_and_values", wrong="keys and values are fetched in each other's place")
def codes_of_the_other(original: Any, self: Any) -> Any:
    return original(self)[::-1]


@breaks("quantization.quantize", kinds=KIND, wrong="scales and biases are stored in each other's place")
def biases_for_scales(original: Any, columns: mx.array, how: Any) -> Any:
    words, scales, biases = original(columns, how)
    return words, biases, scales


@breaks("QuantizedKVCache._cut", wrong="each column is fetched with the scale of the one before")
def scale_of_another_column(original: Any, self: Any, parts: Sequence[mx.array]) -> Any:
    words, scales, biases = original(self, parts)
    return words, mx.roll(scales, 1, 2), biases


@breaks("quantization.quantize", kinds=KIND, wrong="the first group's bias is taken for all groups of a head")
def bias_of_the_first_group(original: Any, columns: mx.array, how: Any) -> Any:
    words, scales, biases = original(columns, how)
    return words, scales, mx.broadcast_to(biases[..., :1], biases.shape)


@breaks("QuantizedKVCache._append", wrong="biases are written when the buffer is made, and not when it is written into")
def later_biases_not_written(original: Any, self: Any, held: Any, columns: mx.array) -> Any:
    words, scales, biases = original(self, held, columns)
    return words, scales, biases if held is None or held[2].shape != biases.shape else held[2]


@breaks(
    "QuantizedKVCache._append", wrong="a buffer that grows keeps the words, and scales and biases of the new columns"
)
def growing_loses_scales(original: Any, self: Any, held: Any, columns: mx.array) -> Any:
    words, scales, biases = original(self, held, columns)
    if held is not None and scales.shape != held[1].shape:
        stop = self.offset
        scales, biases = (
            mx.concatenate([mx.zeros_like(x[..., :stop, :]), x[..., stop:, :]], axis=2) for x in (scales, biases)
        )
    return words, scales, biases


@breaks("QuantizedKVCache._cut", wrong="the spare columns are fetched too")
def spare_parts_fetched(original: Any, self: Any, parts: Sequence[mx.array]) -> Any:
    return tuple(part[...] for part in parts)


@breaks("QuantizedKVCache._cut", wrong="the words are cut, and the scales and biases not")
def spare_scales_fetched(original: Any, self: Any, parts: Sequence[mx.array]) -> Any:
    return original(self, parts)[0], parts[1][...], parts[2][...]


@breaks("quantization.quantize", kinds=KIND, wrong="scales and biases are kept in float32", seen="dtype")
def scales_in_float32(original: Any, columns: mx.array, how: Any) -> Any:
    words, scales, biases = original(columns, how)
    return words, scales.astype(mx.float32), biases.astype(mx.float32)


@breaks("QuantizedKVCache.update_and_fetch", wrong="what is held is quantized again with each update")
def quantized_again(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    if self.offset and keys.shape[:3] == values.shape[:3] and keys.dtype == self.keys[1].dtype:
        how = {"group_size": self.group_size, "bits": self.bits}
        held = [mx.dequantize(*part, **how) for part in self.keys_and_values()]
        if [x.shape[1::2] for x in held] == [x.shape[1::2] for x in (keys, values)] and len(keys) == len(held[0]):
            self.offset, self.keys, self.values = 0, None, None
            keys, values = (mx.concatenate([x, new], axis=2) for x, new in zip(held, (keys, values), strict=True))
    return original(self, keys, values)


@breaks("QuantizedKVCache.update_and_fetch", wrong="all rows get the first one's tokens", seen="visible columns")
def first_row_quantized_for_all(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    return original(self, *(mx.broadcast_to(x[:1], x.shape) for x in (keys, values)))


# -- bits and groups ------------------------------------------------------------------------------


@breaks("quantization.head_size", kinds=KIND, wrong="a word is taken to hold whole codes", seen="refusal")
def whole_codes_a_word(original: Any, parts: Sequence[mx.array], bits: int) -> int:
    return parts[0].shape[3] * (32 // bits)


@breaks("quantization.quantize", kinds=KIND, wrong="the group size is left at MLX's default")
def group_size_left_out(original: Any, columns: mx.array, how: Any) -> Any:
    return tuple(mx.quantize(columns, bits=how.bits))


@breaks("quantization.quantize", kinds=KIND, wrong="the bits are left at MLX's default")
def bits_left_out(original: Any, columns: mx.array, how: Any) -> Any:
    return tuple(mx.quantize(columns, group_size=how.group_size))


@breaks("quantization.check_quantization", kinds=KIND, wrong="bits that MLX does not offer are taken", seen="refusal")
def any_bits_taken(original: Any, group_size: int, bits: int) -> Any:
    return original(group_size, bits if bits in (2, 3, 4, 5, 6, 8) else 8)._replace(bits=bits)


@breaks("quantization.check_quantization", kinds=KIND, wrong="any group size is taken", seen="refusal")
def any_group_size_taken(original: Any, group_size: int, bits: int) -> Any:
    return original(group_size if group_size in (32, 64, 128) else 64, bits)._replace(group_size=group_size)


@breaks("quantization.check_quantization", kinds=KIND, wrong="five bits are refused", seen="refusal")
def five_bits_refused(original: Any, group_size: int, bits: int) -> Any:
    if bits == 5:
        raise ValueError("bits must be 2, 3, 4, 6 or 8")
    return original(group_size, bits)


@breaks("QuantizedKVCache._heads", wrong="values are held to the keys' head size", seen="refusal")
def values_of_the_keys_size(original: Any, self: Any) -> Any:
    heads = original(self)
    return heads and heads._replace(value_size=heads.key_size)


# -- what is held ---------------------------------------------------------------------------------


@breaks("QuantizedKVCache._trim", wrong="trimmed to nothing, it forgets its heads and dtype")
def emptied_forgets_its_heads(original: Any, self: Any, n: int) -> None:
    original(self, n)
    if not self.offset:
        self.keys = self.values = None


@breaks("QuantizedKVCache.update_and_fetch", wrong="after a trim, new columns are written behind the trimmed ones")
def written_behind_what_was_trimmed(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    fed = max(self.__dict__.get("_fed", 0), self.offset)
    if fed == self.offset or self.keys is None:
        fetched = original(self, keys, values)
        self._fed = self.offset
        return fetched
    trimmed, self.offset = self.offset, fed
    try:
        original(self, keys, values)
    except ValueError:
        self.offset = trimmed
        raise
    self.offset = trimmed + keys.shape[2]
    return self.keys_and_values()


@breaks("QuantizedKVCache.update_and_fetch", wrong="the keys are written before the values are checked")
def keys_quantized_before_the_check(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    if self.keys is not None and keys.shape[:2] == self.keys[0].shape[:2] and keys.shape[3] % 32 == 0:
        self.keys = self._append(self.keys, keys)
    return original(self, keys, values)


@breaks("QuantizedKVCache.update_and_fetch", wrong="columns of another dtype are cast", seen="refusal")
def quantized_in_the_first_dtype(original: Any, self: Any, keys: mx.array, values: mx.array) -> Any:
    held = self._heads()
    return original(self, *(x if held is None else x.astype(held.key_dtype) for x in (keys, values)))


@breaks("QuantizedKVCache.size", wrong="its size is nothing, as that of what cannot be merged", seen="size")
def quantized_has_no_size(original: Any, self: Any) -> int:
    return 0


@breaks("QuantizedKVCache.empty", wrong="it is not empty while its buffers are allocated", seen="empty")
def quantized_empty_is_unallocated(original: Any, self: Any) -> bool:
    return self.keys is None


@breaks("QuantizedKVCache.nbytes", wrong="nbytes of a cache that was never fed raises", seen="unanswered crash")
def quantized_nbytes_needs_parts(original: Any, self: Any) -> int:
    return sum(part.nbytes for parts in (self.keys, self.values) for part in parts)


# -- states and copies ----------------------------------------------------------------------------


@breaks("QuantizedKVCache.from_state", wrong="a restored cache has the default group size and bits")
def restored_with_the_defaults(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made.group_size, made.bits = 64, 8
    return made


@breaks("QuantizedKVCache.from_state", wrong="a restored cache begins at position 0", seen="offset")
def restored_at_position_0(original: Any, cls: Any, state: Any) -> Any:
    made = original(cls, state)
    made.offset = 0
    return made


@breaks("QuantizedKVCache.from_state", wrong="the state of a cache that was never fed is refused", seen="refusal")
def unfed_state_refused(original: Any, cls: Any, state: Any) -> Any:
    if state[0] is None:
        raise ValueError("keys are (words, scales, biases)")
    return original(cls, state)


def _written_in_place(original: Any, buffer: mx.array, columns: mx.array, start: int) -> mx.array:
    buffer[..., start : start + columns.shape[2], :] = columns
    return buffer


@breaks(
    "QuantizedKVCache.__deepcopy__",
    wrong="a copy shares its parts, and both write into them",
    also={"append.overwrite": _written_in_place},
)
def copy_shares_the_parts(original: Any, self: Any, memo: Any) -> Any:
    return copy.copy(self)


@breaks(
    "QuantizedKVCache.state",
    wrong="a state holds the parts themselves, and updates write into them",
    seen="aliased",
    also={"append.overwrite": _written_in_place},
)
def parts_are_live(original: Any, self: Any) -> Any:
    return self.keys, self.values, *original(self)[2:]


# -- made of a KVCache ----------------------------------------------------------------------------


@breaks("KVCache.to_quantized", kinds=KIND, wrong="spare columns are quantized as tokens", seen="offset")
def spare_columns_quantized(original: Any, self: Any, **how: Any) -> Any:
    made = original(self, **how)
    if self.keys is not None:
        made._start(self.keys, self.values)
    return made


@breaks("KVCache.to_quantized", kinds=KIND, wrong="the bits asked for are not passed on")
def converted_to_eight_bits(original: Any, self: Any, **how: Any) -> Any:
    return original(self, group_size=how["group_size"])


@breaks("KVCache.to_quantized", kinds=KIND, wrong="the original gives its tokens away")
def original_emptied(original: Any, self: Any, **how: Any) -> Any:
    made = original(self, **how)
    self.keys, self.values, self.offset = None, None, 0
    return made


@breaks("KVCache.to_quantized", kinds=KIND, wrong="the offset is left at 0", seen="offset")
def converted_at_position_0(original: Any, self: Any, **how: Any) -> Any:
    made = original(self, **how)
    made.offset = 0
    return made


@breaks("KVCache.to_quantized", kinds=KIND, wrong="the keys' parts are stored for the values too", seen="values")
def keys_quantized_for_the_values(original: Any, self: Any, **how: Any) -> Any:
    made = original(self, **how)
    if made.keys is not None and made.keys[0].shape == made.values[0].shape:
        made.values = made.keys
    return made


@breaks("KVCache.to_quantized", kinds=KIND, wrong="a cache that was trimmed to nothing becomes one without heads")
def emptied_loses_its_heads_on_conversion(original: Any, self: Any, **how: Any) -> Any:
    made = original(self, **how)
    if not self.offset:
        made.keys = made.values = None
    return made
