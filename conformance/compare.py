"""Two observations to nothing, or to the first and most basic difference.

The stages, in order: refused or done; unchanged after a refusal; rows; offsets; size, empty, trimmable and what was
returned; snapshots; shapes; dtypes; the mask's width; visible tokens; columns; values; attention.

What is free, and compared nowhere: the words of a refusal; the mask of a pad's query; keys and values in columns that
no token's query sees; the offset of a row that ends in right pads (against the ledger only); a solo cache's row count
before its first update.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from conformance.adapters.base import Observation
from conformance.ledger import LAWFUL, REFUSED, Expected, Holding, Token, Verdict
from conformance.payload import PAD, Config, Floats, Ints, Payload, Storage, encode, from_storage, queries
from reference.quantize import codes

Bools = NDArray[np.bool_]


class Tokens(Protocol):
    """Which tag and position the array of a token shows."""

    @property
    def payload(self) -> Payload: ...

    def token(self, role: str, token: Token) -> tuple[int, int]: ...


@dataclass
class Difference:
    """One observable that is not as it should be."""

    observable: str
    got: str
    should: str
    note: str = ""


def written_out(mask: str | Any, rows: int, count: int, width: int) -> Bools:
    """The mask as booleans (B, N, T): what `None` and `"causal"` say, written out.

    Raises ValueError when its last axes are not (N, T).
    """
    if isinstance(mask, str):
        if mask == "causal":
            square = np.tril(np.ones((count, width), bool), k=width - count)
        else:
            square = np.ones((count, width), bool)
        return np.broadcast_to(square, (rows, count, width))
    full = np.asarray(mask)
    if full.dtype != np.bool_:
        raise ValueError(f"a mask of {full.dtype}")
    if full.shape[-1] != width or (full.ndim > 1 and full.shape[-2] != count):
        raise ValueError(f"a mask of shape {full.shape}")
    if full.ndim == 4:
        if full.shape[1] != 1 or full.shape[0] not in (1, rows):
            raise ValueError(f"a mask of shape {full.shape}")
        full = full[:, 0]
    return np.broadcast_to(full, (rows, count, width))


# -- against the ledger ---------------------------------------------------------------------------


def against_verdict(seen: Observation, verdict: Verdict) -> Difference | None:
    """Whether it was done or refused, as it must be, and left unchanged by a refusal."""
    if seen.crashed is not None:
        should = "done" if verdict.ruling == LAWFUL else "refused with a ValueError or IndexError"
        return Difference("crash", seen.crashed, should, verdict.reason)
    if seen.refused is not None and verdict.ruling == LAWFUL:
        return Difference("refusal", f"refused: {seen.refused}", "done")
    if seen.refused is None and verdict.ruling == REFUSED:
        return Difference("refusal", "done", "refused", verdict.reason)
    if seen.changed is not None:
        what = f"{seen.changed} changed by a refused call"
        return Difference("half-applied", what, "unchanged", verdict.reason)
    return None


def against_expected(
    seen: Observation, expected: Expected, holding: Holding, config: Config, tokens: Tokens
) -> Iterator[Difference]:
    """Rows, offsets and visible tokens, as the histories say; keys and values bit for bit as written."""
    names = expected.names
    if seen.rows is not None and seen.rows != len(names):
        yield Difference("rows", str(seen.rows), f"{len(names)} ({', '.join(names)})")
        return
    if expected.offsets or not (holding.recurrent or holding.children):
        yield from _offsets(seen, expected, not holding.batched)
    if seen.aliased is not None:
        yield Difference("aliased", f"{seen.aliased} changed under its holder", "unchanged")
    if seen.unanswered is not None:
        yield Difference("unanswered", seen.unanswered, "answered, whatever is held")
    if expected.front is not None and seen.front != expected.front:
        yield Difference("start position", str(seen.front), str(expected.front))
    if expected.states is not None:
        first = _tokens_mask(seen, expected) or _states(seen, expected, config, tokens)
        if first:
            yield first
        return
    if seen.keys is None or seen.values is None:
        return
    first = (
        _shapes(seen, expected, config)
        or _mask_width(seen, expected)
        or _visible(seen, expected, config, tokens)
        or _values(seen, expected, config, tokens)
        or _half_a_step(seen, holding, config, tokens)
        or _attention(seen, expected, config, tokens)
    )
    if first:
        yield first


def _offsets(seen: Observation, expected: Expected, solo: bool) -> Iterator[Difference]:
    want = (expected.offsets[:1] or (0,)) if solo else expected.offsets
    if len(seen.offsets) != len(want):
        yield Difference("offset", str(list(seen.offsets)), str(list(want)))
        return
    for name, got, should in zip(expected.names, seen.offsets, want, strict=False):
        if should is not None and got != should:
            yield Difference(f"offset[{name}]", str(got), str(should))
            return


def _shapes(seen: Observation, expected: Expected, config: Config) -> Difference | None:
    assert seen.keys is not None and seen.values is not None
    rows, width = len(expected.names), seen.keys.shape[2]
    for what, got, dim in (("keys", seen.keys, config.key_dim), ("values", seen.values, config.value_dim)):
        should = (rows, config.heads, width, dim)
        if got.shape != should:
            return Difference(f"shape of {what}", str(got.shape), str(should))
    if seen.dtypes != (config.dtype, config.dtype):
        return Difference("dtype", str(seen.dtypes), str((config.dtype, config.dtype)))
    if expected.width_max is not None and width > expected.width_max:
        return Difference("storage", f"{width} columns", f"{expected.width_max} at most")
    return None


def _mask_width(seen: Observation, expected: Expected) -> Difference | None:
    assert seen.keys is not None and seen.mask is not None
    count, width = expected.count, seen.keys.shape[2]
    try:
        written_out(seen.mask, len(expected.names), count, width)
    except ValueError as error:
        return Difference("mask width", str(error), f"last axes ({count}, {width}), the width of the fetch")
    return None


def _visible(seen: Observation, expected: Expected, config: Config, tokens: Tokens) -> Difference | None:
    assert seen.keys is not None and seen.mask is not None
    mask = written_out(seen.mask, len(expected.names), expected.count, seen.keys.shape[2])
    tags, positions = tokens.payload.decode(seen.keys, "key", config)
    for b, name in enumerate(expected.names):
        for i, want in enumerate(expected.visible[b]):
            if want is None:
                continue
            columns = np.flatnonzero(mask[b, i])
            got = sorted(zip(tags[b, columns].tolist(), positions[b, columns].tolist(), strict=True))
            should = sorted(tokens.token("key", token) for token in want)
            if got != should:
                query = expected.queries[b][i]
                position = query[1] if query else None
                return Difference(
                    f"visible[{name}]", _tokens(got), _tokens(should), f"the query at position {position}"
                )
    return None


def _tokens(tokens: list[tuple[int, int]]) -> str:
    """Positions alone where all tokens are of one row, else `tag:position`."""
    if len({tag for tag, position in tokens if position >= 0}) <= 1:
        return " ".join(_position(position) for _, position in tokens) or "nothing"
    return " ".join(f"{tag}:{position}" if position >= 0 else _position(position) for tag, position in tokens)


def _position(position: int) -> str:
    return str(position) if position >= 0 else ("pad" if position == PAD else "?")


def _values(seen: Observation, expected: Expected, config: Config, tokens: Tokens) -> Difference | None:
    """The visible columns' values belong to the same tokens as their keys."""
    assert seen.keys is not None and seen.values is not None and seen.mask is not None
    mask = written_out(seen.mask, len(expected.names), expected.count, seen.keys.shape[2])
    tags, positions = tokens.payload.decode(seen.keys, "key", config)
    value_tags, value_positions = tokens.payload.decode(seen.values, "value", config)
    for b, name in enumerate(expected.names):
        rows = [i for i, want in enumerate(expected.visible[b]) if want is not None]
        for column in np.flatnonzero(mask[b, rows].any(axis=0)):
            key = (int(tags[b, column]), int(positions[b, column]))
            value = (int(value_tags[b, column]), int(value_positions[b, column]))
            should = tokens.payload.shown("value", *key)
            if value != should:
                return Difference(f"values[{name}]", _tokens([value]), _tokens([should]), f"column {column}")
    return None


def _half_a_step(seen: Observation, holding: Holding, config: Config, tokens: Tokens) -> Difference | None:
    """What a quantized fetch stands for lies within half a step of what was written, scale and bias rounded too.

    The last code of a group may be a whole step off: the adjusted scale does not quite reach the far end of its range.
    """
    if seen.parts is None or holding.quantized is None or seen.keys is None or seen.values is None:
        return None
    group_size, bits = holding.quantized
    for role, x, (words, scales, biases) in zip(("key", "value"), (seen.keys, seen.values), seen.parts, strict=True):
        packed, whole = (words.shape[-1], scales.shape[-1]), (x.shape[-1] * bits // 32, x.shape[-1] // group_size)
        if packed != whole or biases.shape != scales.shape:
            return Difference(f"packing of {role}s", _packing(*packed), _packing(*whole))
        tags, positions = tokens.payload.decode(x, role, config)
        written = from_storage(encode(tags, positions, role, config))
        step, rounding = _step(scales, biases, group_size, bits, config.dtype)
        last = codes(words.astype(np.uint32), x.shape[-1], bits) == 2**bits - 1
        bound = np.where(last, 1.0, 0.5) * step + rounding
        beyond = np.argwhere(np.abs(x - written) > bound)
        if beyond.size:
            b, h, t, d = beyond[0].tolist()
            off = abs(float(x[b, h, t, d] - written[b, h, t, d]))
            what = f"{role}s[{holding.rows[b].name}]"
            return Difference(what, f"off by {off:.3g}", f"within {bound[b, h, t, d]:.3g}", f"column {t}")
    return None


def _packing(words: int, scales: int) -> str:
    return f"{words} words and {scales} scales a column"


def _step(scales: Storage, biases: Storage, group_size: int, bits: int, dtype: str) -> tuple[Floats, Floats]:
    """Per value of a quantized array (..., D): what one code more is worth, and how far scale and bias are rounded."""
    step = np.abs(np.repeat(from_storage(scales), group_size, axis=-1))
    far = np.abs(np.repeat(from_storage(biases), group_size, axis=-1)) + step * 2**bits
    return step, (far * ROUNDING[dtype]).astype(np.float32)


ROUNDING = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
"""Of a scale and a bias, relative."""


def _tokens_mask(seen: Observation, expected: Expected) -> Difference | None:
    """The mask of a recurrent layer shows exactly the columns that are tokens."""
    if not expected.queries:
        return None
    want = np.array([[query is not None for query in row] for row in expected.queries], bool)
    want = want.reshape(len(expected.queries), expected.count)
    if isinstance(seen.mask, str):
        got = np.ones_like(want) if seen.mask == "none" else None
    else:
        got = None if seen.mask is None or seen.mask.dtype != np.bool_ else seen.mask
    if got is None or got.shape != want.shape:
        found = seen.mask if isinstance(seen.mask, str) or seen.mask is None else f"{seen.mask.dtype} {seen.mask.shape}"
        return Difference("mask width", str(found), f"None or booleans {want.shape}")
    for b, name in enumerate(expected.names):
        if (got[b] != want[b]).any():
            return Difference(f"visible[{name}]", _bits(got[b]), _bits(want[b]), "which of the columns are tokens")
    return None


def _states(seen: Observation, expected: Expected, config: Config, tokens: Tokens) -> Difference | None:
    """Every slot shows each row's last token when it was written, zeros where it had none, nothing where unfilled."""
    assert expected.states is not None
    if seen.states is None or len(seen.states) != len(expected.states):
        found = None if seen.states is None else len(seen.states)
        return Difference("slots", str(found), str(len(expected.states)))
    for i, (x, want) in enumerate(zip(seen.states, expected.states, strict=True)):
        if (x is None) != (want is None):
            return Difference(
                f"slot {i}", "unfilled" if x is None else "filled", "unfilled" if want is None else "filled"
            )
        if x is None or want is None:
            continue
        if x.shape[:1] != (len(want),):
            return Difference(f"slot {i}", f"shape {x.shape}", f"{len(want)} rows")
        tags, positions = tokens.payload.decode_state(x, i, config)
        got = list(zip(tags.tolist(), positions.tolist(), strict=True))
        should = [tokens.token(f"slot.{i}", token) if token else (PAD, PAD) for token in want]
        for name, one, other in zip(expected.names, got, should, strict=True):
            if one != other:
                return Difference(f"state[{name}]", _state(one), _state(other), f"slot {i}")
    return None


def _state(token: tuple[int, int]) -> str:
    tag, position = token
    return f"{tag}:{position}" if position >= 0 else ("zeros" if position == PAD else "?")


TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
"""Relative to the largest value: sums of some twenty terms of the dtype's precision."""


def _attention(seen: Observation, expected: Expected, config: Config, tokens: Tokens) -> Difference | None:
    """Attention over the fetch equals attention of each row alone, computed here from its history."""
    if seen.attention is None:
        return None
    if not np.isfinite(seen.attention).all():
        return Difference("attention", "a value that is not finite", "finite, for pads too")
    for b, name in enumerate(expected.names):
        for i, want in enumerate(expected.visible[b]):
            query = expected.queries[b][i]
            if want is None or query is None:
                continue
            should = alone(sorted(tokens.token("key", token) for token in want), query[1], config)
            got = seen.attention[b, :, i]
            error = float(np.abs(got - should).max() / np.abs(should).max())
            if error > TOLERANCE[config.dtype]:
                return Difference(
                    f"attention[{name}]",
                    f"off by {error:.1e}",
                    f"within {TOLERANCE[config.dtype]:.0e}",
                    f"the query at position {query[1]}",
                )
    return None


def alone(tokens: list[tuple[int, int]], position: int, config: Config) -> NDArray[np.float64]:
    """Attention (Hq, Dv) of the query at this position over these tokens, in float64."""
    tags: Ints = np.array([[who for who, _ in tokens]], np.int64)
    positions: Ints = np.array([[p for _, p in tokens]], np.int64)
    q = queries(np.array([[position]]), config)[0, :, 0].astype(np.float64)  # (Hq, D)
    k = from_storage(encode(tags, positions, "key", config))[0].astype(np.float64)  # (H, T, D)
    v = from_storage(encode(tags, positions, "value", config))[0].astype(np.float64)
    groups = q.shape[0] // k.shape[0]
    k, v = np.repeat(k, groups, axis=0), np.repeat(v, groups, axis=0)
    scores = np.einsum("hd,htd->ht", q, k)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: NDArray[np.float64] = np.einsum("ht,htd->hd", weights, v)
    return out


# -- one implementation against another -----------------------------------------------------------


def against_reference(seen: Observation, ref: Observation, expected: Expected) -> Iterator[Difference]:
    """Layout parity: what the histories leave open and the specification fixes."""
    for observable in ("offsets", "result", "size", "empty", "trimmable"):
        got, should = getattr(seen, observable), getattr(ref, observable)
        unseen = observable in ("size", "empty", "trimmable") and None in (got, should)
        if got != should and not unseen:
            yield Difference(observable, str(got), str(should))
    for i, (child, its) in enumerate(zip(seen.children, ref.children, strict=True)):
        yield from against_reference(child, its, expected.children[i])
    if expected.states is not None or expected.children:
        yield from _same_states(seen, ref)
        return
    if ref.keys is not None and seen.keys is not None and seen.keys.shape != ref.keys.shape:
        yield Difference("shape of keys", str(seen.keys.shape), str(ref.keys.shape))
        return
    if ref.mask is None or seen.mask is None:
        return
    width = np.asarray(ref.mask).shape[-1]
    try:
        got_mask = written_out(seen.mask, len(expected.names), expected.count, width)
    except ValueError as error:
        yield Difference("mask width", str(error), f"last axes ({expected.count}, {width})")
        return
    ref_mask = written_out(ref.mask, len(expected.names), expected.count, width)
    for b, name in enumerate(expected.names):
        for i, query in enumerate(expected.queries[b]):
            if query is not None and (got_mask[b, i] != ref_mask[b, i]).any():
                note = f"the query at position {query[1]}"
                yield Difference(f"columns[{name}]", _bits(got_mask[b, i]), _bits(ref_mask[b, i]), note)
                return
    first = _same_columns(seen, ref, expected, ref_mask) if seen.parts is None else _same_parts(seen, ref)
    if first:
        yield first


def _same_states(seen: Observation, ref: Observation) -> Iterator[Difference]:
    for i, (got, should) in enumerate(zip(seen.states or (), ref.states or (), strict=True)):
        if got is not None and should is not None and not _same_bits(got, should):
            yield Difference(f"slot {i}", f"{got.dtype} {got.shape} of other bits", "the reference's")


def _same_bits(a: Storage, b: Storage) -> bool:
    return (a.shape, a.dtype) == (b.shape, b.dtype) and a.tobytes() == b.tobytes()


def _same_columns(seen: Observation, ref: Observation, expected: Expected, mask: Bools) -> Difference | None:
    if ref.keys is None or seen.keys is None or ref.values is None or seen.values is None:
        return None
    for b, name in enumerate(expected.names):
        rows = [i for i, query in enumerate(expected.queries[b]) if query is not None]
        for column in np.flatnonzero(mask[b, rows].any(axis=0)):
            for what, got, should in (("keys", seen.keys, ref.keys), ("values", seen.values, ref.values)):
                if (got[b, :, column] != should[b, :, column]).any():
                    return Difference(
                        f"columns[{name}]", f"another token's {what}", "the reference's", f"column {column}"
                    )
    return None


def _same_parts(seen: Observation, ref: Observation) -> Difference | None:
    """Quantized alike, or both near the same numbers: within a step of each other, scales and biases rounded apart."""
    if ref.parts is None or seen.parts is None or seen.dtypes is None or exactly(seen, ref):
        return None
    for role, got, should, mine, theirs in (
        ("keys", seen.keys, ref.keys, seen.parts[0], ref.parts[0]),
        ("values", seen.values, ref.values, seen.parts[1], ref.parts[1]),
    ):
        assert got is not None and should is not None
        shapes = [tuple(part.shape for part in parts) for parts in (mine, theirs)]
        if shapes[0] != shapes[1]:
            return Difference(f"shape of {role}", str(shapes[0]), str(shapes[1]))
        group_size, bits = got.shape[-1] // mine[1].shape[-1], mine[0].shape[-1] * 32 // got.shape[-1]
        step, rounding = _step(*theirs[1:], group_size, bits, seen.dtypes[0])
        if (np.abs(got - should) > step * 1.01 + 2 * rounding).any():
            return Difference(f"{role} quantized", "more than a step away", "the reference's, or within one step")
    return None


def exactly(seen: Observation, ref: Observation) -> bool:
    """Whether two quantized fetches are the same words, scales and biases."""
    if seen.parts is None or ref.parts is None:
        return False
    pairs = zip((*seen.parts[0], *seen.parts[1]), (*ref.parts[0], *ref.parts[1]), strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype and bool((a == b).all()) for a, b in pairs)


def _bits(mask: Bools) -> str:
    return "".join("x" if bit else "." for bit in mask)
