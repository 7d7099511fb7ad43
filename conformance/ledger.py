"""The oracle that knows histories and no slots.

For every row it keeps which tokens were fed, and says from the visibility law alone what each query may see. It knows
neither slots nor heads nor wrapping, so it cannot share a mistake with code that does.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from typing import Any

from conformance import operations as ops

Token = tuple[str, int]
"""The name that the row had when the token was written, and the token's position."""

LAWFUL, REFUSED, EITHER = "lawful", "refused", "either"

MERGEABLE = ("KVCache", "RotatingKVCache", "ArraysCache")


@dataclass(frozen=True)
class Verdict:
    """Whether an operation must be done, must be refused, or depends on how much an implementation stores."""

    ruling: str
    reason: str = ""


@dataclass
class Row:
    """One sequence."""

    name: str
    history: list[Token] = field(default_factory=list)
    due: int = 0
    """Left pads announced and not yet fed."""
    remaining: int | None = None
    """Of a pending prefill's columns to come: how many are no right pads. None: all, nothing was announced for it."""
    promised: int | None = None
    """Right padding announced without a length, which the next update says."""
    right: int = 0
    """Right pads fed since `prepare`."""
    floor: int = 0
    """The oldest position (behind the sinks) that must still be held."""
    states: tuple[Token | None, ...] = ()
    """Of recurrent state: the row's last token when each slot was written; None where it had none, or nothing was."""


@dataclass
class Holding:
    """One cache: its rows and what they have in common."""

    kind: str
    rows: list[Row]
    max_size: int | None = None
    keep: int = 0
    variant: str | None = None
    """How the arrays of its first update differed from the trace's; None before that."""
    columns: int = 0
    """Columns fed, pads included, as long as there was a row."""
    pending: bool = False
    announced: int | None = None
    """Columns that a pending prefill still expects; None until the next update when only padding was announced."""
    by_lengths: bool = False
    """Whether the pending prefill was announced by lengths alone."""
    restored: bool = False
    """Whether it was made of another's state, or another of its state."""
    trimmed: bool = False
    """Whether tokens were ever dropped from it."""
    chunk_size: int | None = None
    front: int = 0
    """The oldest position that a chunked cache holds."""
    quantized: tuple[int, int] | None = None
    """Group size and bits."""
    filled: tuple[bool, ...] = ()
    """Of recurrent state: which slots were ever written."""
    children: int = 0
    """How many caches a list holds: each is a holding of its own, under the list's name and its number."""

    @property
    def recurrent(self) -> bool:
        return self.kind == "ArraysCache"

    @property
    def of_rows(self) -> bool:
        """Whether it has a row's operations: filter, extend, extract, prepare."""
        return self.batched or self.recurrent

    @property
    def wrapped(self) -> bool:
        """Whether a ring was fed more columns than it keeps."""
        return self.max_size is not None and self.columns > self.max_size

    @property
    def batched(self) -> bool:
        return self.kind.startswith("Batch")

    @property
    def ring(self) -> bool:
        return self.max_size is not None

    def window(self, window_size: int | None) -> int | None:
        """W of the visibility law. A chunked cache makes no masks: what it holds is seen."""
        if self.chunk_size is not None:
            return None
        if self.max_size is None:
            return window_size
        return min(window_size or self.max_size, self.max_size - self.keep)


@dataclass(frozen=True)
class Expected:
    """What must be seen after an operation."""

    names: tuple[str, ...]
    offsets: tuple[int | None, ...]
    """None where the offset is a matter of layout: a row that ends in right pads."""
    count: int = 0
    """N of an update or mask."""
    width_max: int | None = None
    """The most columns that a ring may store after it."""
    queries: tuple[tuple[Token | None, ...], ...] = ()
    """Per row and query of an update or mask: its own token, None for a pad."""
    visible: tuple[tuple[frozenset[Token] | None, ...], ...] = ()
    """Per row and query: the tokens that it sees; None for a pad's query, which is free."""
    front: int | None = None
    """The oldest position held, of a chunked cache."""
    states: tuple[tuple[Token | None, ...] | None, ...] | None = None
    """Per slot of a recurrent state, None if unfilled, and row: its last token when written; None for zeros."""
    children: tuple[Expected, ...] = ()


class Ledger:
    """All the caches of a trace by name."""

    def __init__(self) -> None:
        self.holdings: dict[str, Holding] = {}
        self.tags: dict[str, int] = {}
        """Row names in order of first use: what tells their tokens apart."""

    def tag(self, name: str) -> int:
        """The number that marks the tokens of the row of this name."""
        return self.tags.setdefault(name, len(self.tags))

    # -- what an operation must come to -------------------------------------------------------

    def judge(self, operation: ops.Operation) -> Verdict:
        """Whether the operation is lawful now, from its meaning; for a list, whether it is for every child."""
        if self.is_list(operation):
            if reason := self._lists_reason(operation):
                return Verdict(REFUSED, reason)
            verdicts = [self.judge(part) for part in self.parts(operation)]
            worst = (REFUSED, EITHER, LAWFUL)
            return min(verdicts, key=lambda verdict: worst.index(verdict.ruling), default=Verdict(LAWFUL))
        reason = self._reason(operation)
        if reason is not None:
            return Verdict(REFUSED, reason)
        if isinstance(operation, ops.Trim) and not self._surely_held(operation):
            return Verdict(EITHER, "depends on what is stored")
        if isinstance(operation, ops.Prepare) and operation.left_padding is not None:
            holding = self.holdings[operation.cache]
            if holding.columns and holding.rows:
                return Verdict(EITHER, "depends on whether empty columns are stored")
        return Verdict(LAWFUL)

    def is_list(self, operation: ops.Operation) -> bool:
        """Whether the operation is on a CacheList."""
        if isinstance(operation, ops.New):
            return operation.kind == "CacheList"
        name = operation.caches[0] if isinstance(operation, ops.Merge) and operation.caches else operation.cache
        return name in self.holdings and self.holdings[name].kind == "CacheList"

    def _lists_reason(self, operation: ops.Operation) -> str | None:
        """Why lists do not go together."""
        names = {ops.Extend: ("cache", "other"), ops.Merge: ()}.get(type(operation), ("cache",))
        if isinstance(operation, ops.New):
            return None
        met = [*(getattr(operation, name) for name in names), *getattr(operation, "caches", ())]
        held = [self.holdings[name] for name in met]
        if any(holding.kind != "CacheList" for holding in held):
            return "another kind"
        return "another number of caches" if len({holding.children for holding in held}) > 1 else None

    def parts(self, operation: ops.Operation) -> list[ops.Operation]:
        """What an operation on a list is for each of its children, whose names and rows have the child's number."""
        if isinstance(operation, ops.New):
            count = len(operation.children)
        else:
            first = operation.caches[0] if isinstance(operation, ops.Merge) else operation.cache
            count = self.holdings[first].children
        return [_part(operation, i) for i in range(count)]

    def _reason(self, operation: ops.Operation) -> str | None:
        held = self.holdings.get(operation.cache)
        makes = isinstance(operation, ops.New | ops.Merge)
        if held is not None and not makes and operation.op not in ops.applicable(held.kind):
            return "no such operation"
        match operation:
            case ops.New():
                return _new_reason(operation)
            case ops.Update():
                return self._update_reason(operation)
            case ops.Mask():
                return self._mask_reason(self.holdings[operation.cache], operation.tokens, operation.window)
            case ops.Prepare():
                return _prepare_reason(self.holdings[operation.cache], operation)
            case ops.Filter():
                return None if self._names_known(operation.cache, operation.rows) else "row not there"
            case ops.Extract():
                return None if self._names_known(operation.cache, (operation.row,)) else "row not there"
            case ops.Extend():
                return _extend_reason(self.holdings[operation.cache], self.holdings[operation.other])
            case ops.Merge():
                return _merge_reason([self.holdings[name] for name in operation.caches])
            case ops.Trim():
                return _trim_reason(self.holdings[operation.cache], operation.tokens)
            case ops.ToQuantized():
                return self._to_quantized_reason(operation)
            case _:
                return None

    def _to_quantized_reason(self, operation: ops.ToQuantized) -> str | None:
        if reason := _quantization_reason(operation.group_size, operation.bits):
            return reason
        return "a head size of no whole groups" if self.holdings[operation.cache].variant == "head_dim" else None

    def _names_known(self, cache: str, names: tuple[str, ...]) -> bool:
        return set(names) <= {row.name for row in self.holdings[cache].rows}

    def _update_reason(self, operation: ops.Update) -> str | None:
        holding = self.holdings[operation.cache]
        if operation.variant == "uneven":
            return "keys and values of different length"
        if holding.recurrent:
            if operation.variant == "rows":
                if sum(holding.filled) < 2:
                    raise ValueError("other rows are asked of a recurrent state only where two slots are filled")
                return "another row count"
            return self._mask_reason(holding, operation.tokens, None)
        if holding.quantized and operation.variant == "head_dim":
            return "a head size of no whole groups"
        if operation.variant == "rows" and (holding.batched or holding.variant is not None):
            return "another row count"
        if operation.variant != "rows" and holding.variant not in (None, operation.variant):
            return f"another {operation.variant if operation.variant != 'plain' else holding.variant}"
        return self._mask_reason(holding, operation.tokens, operation.window)

    def _mask_reason(self, holding: Holding, tokens: int, window: int | None) -> str | None:
        if tokens < 1:
            return "no tokens"
        if window is not None and window < 1:
            return "no window"
        if holding.pending:
            promised = [(row.promised, row.due) for row in holding.rows if row.promised is not None]
            if any(tokens - padding < due for padding, due in promised):
                return "less than the padding"
            if holding.announced is not None and tokens > holding.announced:
                return "more than announced"
        return None

    def _surely_held(self, operation: ops.Trim) -> bool:
        holding = self.holdings[operation.cache]
        if not holding.ring or operation.tokens == 0:
            return True
        before_query = (holding.window(None) or 0) - 1
        left = [len(row.history) - operation.tokens for row in holding.rows]
        return all(
            row.floor <= holding.keep or count <= holding.keep or count - before_query >= row.floor
            for row, count in zip(holding.rows, left, strict=True)
        )

    # -- carrying it out ----------------------------------------------------------------------

    def apply(self, operation: ops.Operation) -> Expected:
        """Carry out a lawful operation and say what must be seen."""
        if not self.is_list(operation):
            return self._apply(operation)
        children = tuple(self.apply(part) for part in self.parts(operation))
        # The list itself is kept as a growing cache: what its rows are called, what is pending, how long they are.
        whole = self._apply(operation)
        return Expected(names=whole.names, offsets=(), count=whole.count, children=children)

    def _apply(self, operation: ops.Operation) -> Expected:
        match operation:
            case ops.New():
                self._new(operation)
            case ops.Update():
                return self._update(operation)
            case ops.Mask():
                return self._mask(operation)
            case ops.Prepare():
                _prepare(self.holdings[operation.cache], operation)
            case ops.Finalize():
                _finalize(self.holdings[operation.cache])
            case ops.Filter():
                self._filter(operation)
            case ops.Extend():
                self._extend(operation)
            case ops.Extract():
                self._extract(operation)
                return self._expected(operation.into)
            case ops.Merge():
                self._merge(operation)
            case ops.Trim():
                holding = self.holdings[operation.cache]
                holding.trimmed = holding.trimmed or operation.tokens > 0
                for row in holding.rows:
                    del row.history[len(row.history) - operation.tokens :]
            case ops.Copy() | ops.Restore():
                self._copy(operation)
                return self._expected(operation.into)
            case ops.ToQuantized():
                self._to_quantized(operation)
                return self._expected(operation.into)
            case ops.TrimFront():
                holding = self.holdings[operation.cache]
                longest = max((len(row.history) for row in holding.rows), default=0)
                holding.front = max(holding.front, longest - (holding.chunk_size or 0))
        return self._expected(operation.cache)

    def _expected(self, cache: str) -> Expected:
        holding = self.holdings[cache]
        rows = holding.rows
        names = tuple(row.name for row in rows)
        if holding.recurrent:
            slots = enumerate(holding.filled)
            states = tuple(tuple(row.states[i] for row in rows) if filled else None for i, filled in slots)
            return Expected(names=names, offsets=(), states=states)
        return Expected(
            names=names,
            offsets=tuple(None if row.right else len(row.history) - row.due for row in rows),
            front=holding.front if holding.chunk_size else None,
        )

    def _mask(self, operation: ops.Mask) -> Expected:
        later = deepcopy(self.holdings[operation.cache])
        fed = _feed(later, operation.tokens)
        return _with_queries(self._expected(operation.cache), later, fed, operation)

    def _new(self, operation: ops.New) -> None:
        padding = operation.left_padding or (0,) * len(operation.rows)
        nothing = (None,) * (operation.slots or 0)
        rows = [Row(name, due=due, states=nothing) for name, due in zip(operation.rows, padding, strict=True)]
        quantized = (operation.group_size or 0, operation.bits or 0) if operation.kind == "QuantizedKVCache" else None
        self.holdings[operation.cache] = Holding(
            operation.kind,
            rows,
            max_size=operation.max_size,
            keep=operation.keep,
            chunk_size=operation.chunk_size,
            quantized=quantized,
            filled=(False,) * (operation.slots or 0),
            children=len(operation.children),
        )

    def preview(self, operation: ops.Update) -> list[list[Token | None]]:
        """Per row, the tokens that a lawful update feeds; None for a pad."""
        later = deepcopy(self.holdings[operation.cache])
        if operation.variant == "rows":
            later.rows.append(Row(_extra_row(operation)))
        return _feed(later, operation.tokens)

    def states_after(self, operation: ops.Update) -> list[Token | None]:
        """Per row, its last token once a lawful update has been fed; None where it had none."""
        later = deepcopy(self.holdings[operation.cache])
        _feed(later, operation.tokens)
        return [row.history[-1] if row.history else None for row in later.rows]

    def _update(self, operation: ops.Update) -> Expected:
        holding = self.holdings[operation.cache]
        if operation.variant == "rows":
            # A solo cache that was never updated takes any number of rows.
            holding.rows.append(Row(_extra_row(operation)))
        fed = _feed(holding, operation.tokens)
        holding.variant = holding.variant or operation.variant.replace("rows", "plain")
        if holding.rows:
            holding.columns += operation.tokens
        if holding.ring:
            before_query = (holding.window(None) or 0) - 1
            for row, tokens in zip(holding.rows, fed, strict=True):
                before = len(row.history) - sum(token is not None for token in tokens)
                row.floor = max(row.floor, before - before_query)
        if holding.recurrent:
            written = [operation.slot in (None, i) for i in range(len(holding.filled))]
            holding.filled = tuple(filled or now for filled, now in zip(holding.filled, written, strict=True))
            for row in holding.rows:
                last = row.history[-1] if row.history else None
                row.states = tuple(last if now else was for was, now in zip(row.states, written, strict=True))
        return _with_queries(self._expected(operation.cache), holding, fed, operation)

    def _filter(self, operation: ops.Filter) -> None:
        holding = self.holdings[operation.cache]
        by_name = {row.name: row for row in holding.rows}
        holding.rows = [_renamed(by_name[row], name) for row, name in zip(operation.rows, operation.names, strict=True)]
        if not holding.rows:
            holding.pending, holding.announced, holding.columns = False, None, 0

    def _extend(self, operation: ops.Extend) -> None:
        holding, other = self.holdings[operation.cache], self.holdings[operation.other]
        joined = [_renamed(row, name) for row, name in zip(other.rows, operation.names, strict=True)]
        columns = _announced_by_both(holding, other)
        holding.rows = holding.rows + joined
        holding.pending = holding.pending or other.pending
        holding.announced = columns
        holding.columns = max(holding.columns, other.columns)
        holding.variant = holding.variant or other.variant
        holding.trimmed = holding.trimmed or other.trimmed
        holding.restored = holding.restored or other.restored
        holding.by_lengths = holding.by_lengths or other.by_lengths
        holding.filled = tuple(a or b for a, b in zip(holding.filled, other.filled, strict=True))

    def _extract(self, operation: ops.Extract) -> None:
        holding = self.holdings[operation.cache]
        row = next(row for row in holding.rows if row.name == operation.row)
        alone = _renamed(row, operation.name)
        alone.due = alone.right = 0
        alone.remaining = alone.promised = None
        kind = holding.kind.removeprefix("Batch")
        self.holdings[operation.into] = Holding(
            kind,
            [alone],
            max_size=holding.max_size,
            keep=holding.keep,
            variant=holding.variant,
            columns=len(alone.history),
            trimmed=holding.trimmed,
            restored=holding.restored,
            filled=holding.filled,
            children=holding.children,
        )

    def _merge(self, operation: ops.Merge) -> None:
        sources = [self.holdings[name] for name in operation.caches]
        rows = [_renamed(source.rows[0], name) for source, name in zip(sources, operation.names, strict=True)]
        max_size, keep = sources[0].max_size, sources[0].keep
        if max_size is not None:
            for row in rows:
                row.floor = max(row.floor, len(row.history) - (max_size - keep))
        announced = [source.announced for source in sources if source.pending and source.announced is not None]
        self.holdings[operation.cache] = Holding(
            merged_kind(sources[0].kind),
            rows,
            max_size=max_size,
            keep=keep,
            variant=next((source.variant for source in sources if source.variant), None),
            columns=max(len(row.history) for row in rows),
            pending=any(source.pending for source in sources),
            announced=max(announced) if announced else None,
            trimmed=any(source.trimmed for source in sources),
            restored=any(source.restored for source in sources),
            filled=tuple(any(slot) for slot in zip(*(source.filled for source in sources), strict=True)),
            children=sources[0].children,
        )

    def _copy(self, operation: ops.Copy | ops.Restore) -> None:
        if isinstance(operation, ops.Restore):
            self.holdings[operation.cache].restored = True
        holding = deepcopy(self.holdings[operation.cache])
        for row, name in zip(holding.rows, operation.names, strict=True):
            row.name = name
        self.holdings[operation.into] = holding

    def _to_quantized(self, operation: ops.ToQuantized) -> None:
        holding = deepcopy(self.holdings[operation.cache])
        for row, name in zip(holding.rows, operation.names, strict=True):
            row.name = name
        holding.kind, holding.quantized = "QuantizedKVCache", (operation.group_size, operation.bits)
        self.holdings[operation.into] = holding


def merged_kind(kind: str) -> str:
    """The kind that caches of this one merge to."""
    return kind if kind in ("ArraysCache", "CacheList") else f"Batch{kind}"


def _part(operation: ops.Operation, i: int) -> ops.Operation:
    """The operation on child number i: of each name of a cache or a row, the child's."""
    named: dict[str, Any] = {"cache": f"{operation.cache}.{i}"}
    for name in ("into", "other", "row", "name"):
        if hasattr(operation, name):
            named[name] = f"{getattr(operation, name)}.{i}"
    for name in ("rows", "names", "caches"):
        if hasattr(operation, name):
            named[name] = tuple(f"{each}.{i}" for each in getattr(operation, name))
    if not isinstance(operation, ops.New):
        return replace(operation, **named)
    child = operation.children[i]
    made = {field.name: getattr(child, field.name) for field in fields(child)}
    padding = operation.left_padding if "left_padding" in ops.FIELDS[child.kind] else None
    return ops.New(**named, **made, left_padding=padding)


def _extra_row(operation: ops.Update) -> str:
    return f"{operation.cache}+"


def _renamed(row: Row, name: str) -> Row:
    copy = deepcopy(row)
    copy.name = name
    return copy


def _feed(holding: Holding, count: int) -> list[list[Token | None]]:
    """Feed `count` columns: per row, the token in each, None for a pad."""
    for row in holding.rows:
        if row.promised is not None:
            row.remaining, row.promised = count - row.promised, None
    if holding.pending and holding.announced is None:
        holding.announced = count
    fed: list[list[Token | None]] = [[] for _ in holding.rows]
    for row, tokens in zip(holding.rows, fed, strict=True):
        if holding.ring:
            row.right = 0  # earlier right pads have left the row's end
        for _ in range(count):
            tokens.append(_feed_one(row, holding.pending))
    if holding.announced is not None:
        holding.announced -= count
    return fed


def _feed_one(row: Row, pending: bool) -> Token | None:
    if pending and row.remaining == 0:
        row.right += 1
        return None
    if row.remaining:
        row.remaining -= 1
    if row.due:
        row.due -= 1
        return None
    token = (row.name, len(row.history))
    row.history.append(token)
    return token


def _with_queries(
    expected: Expected,
    holding: Holding,
    fed: list[list[Token | None]],
    operation: ops.Update | ops.Mask,
) -> Expected:
    window = holding.window(operation.window)
    visible = tuple(
        tuple(_sees(row, token, window, holding.keep, holding.front) for token in tokens)
        for row, tokens in zip(holding.rows, fed, strict=True)
    )
    width_max = holding.max_size + operation.tokens - 1 if holding.max_size is not None else None
    return replace(
        expected, count=operation.tokens, width_max=width_max, queries=tuple(map(tuple, fed)), visible=visible
    )


def _sees(row: Row, query: Token | None, window: int | None, keep: int, front: int) -> frozenset[Token] | None:
    if query is None:
        return None
    q = query[1]
    held = enumerate(row.history[front : q + 1], front)
    return frozenset(token for p, token in held if p < keep or window is None or p > q - window)


def _new_reason(operation: ops.New) -> str | None:
    if operation.max_size is not None and operation.max_size < 1:
        return "no slots"
    if operation.max_size is not None and not 0 <= operation.keep < operation.max_size:
        return "no window beside the sinks"
    if operation.chunk_size is not None and operation.chunk_size < 1:
        return "no chunk"
    if operation.kind == "QuantizedKVCache":
        return _quantization_reason(operation.group_size or 0, operation.bits or 0)
    if any(pads < 0 for pads in operation.left_padding or ()):
        return "negative"
    return None


def _quantization_reason(group_size: int, bits: int) -> str | None:
    offered = group_size in (32, 64, 128) and bits in (2, 3, 4, 5, 6, 8)
    return None if offered else "no such quantization"


def _prepare_reason(holding: Holding, operation: ops.Prepare) -> str | None:
    if holding.pending:
        return "pending already"
    if holding.recurrent and operation.lengths is None and any(operation.right_padding or ()):
        return "right padding without lengths"
    given = (operation.left_padding, operation.lengths, operation.right_padding)
    if any(numbers is not None and len(numbers) != len(holding.rows) for numbers in given):
        return "another row count"
    if any(number < 0 for numbers in given for number in numbers or ()):
        return "negative"
    if operation.left_padding is not None and any(row.history or row.right for row in holding.rows):
        return "content already"
    if operation.left_padding is not None and any(holding.filled) and holding.rows:
        return "content already"
    if operation.lengths is not None:
        padding = operation.right_padding or (0,) * len(operation.lengths)
        totals = {length + pads for length, pads in zip(operation.lengths, padding, strict=True)}
        if operation.right_padding is not None and len(totals) > 1:
            return "lengths and padding disagree"
        more = operation.left_padding or (0,) * len(holding.rows)
        due = [row.due + extra for row, extra in zip(holding.rows, more, strict=True)]
        if any(length < left for length, left in zip(operation.lengths, due, strict=True)):
            return "shorter than the left padding"
    return None


def _prepare(holding: Holding, operation: ops.Prepare) -> None:
    for row, pads in zip(holding.rows, operation.left_padding or (), strict=False):
        row.due += pads
    if operation.lengths is None:
        if any(operation.right_padding or ()):
            holding.pending = True
            for row, pads in zip(holding.rows, operation.right_padding or (), strict=True):
                row.promised = pads
        return
    padding = operation.right_padding or (0,) * len(operation.lengths)
    columns = max((length + pads for length, pads in zip(operation.lengths, padding, strict=True)), default=0)
    if any(length < columns for length in operation.lengths):
        holding.pending, holding.announced = True, columns
        holding.by_lengths = operation.right_padding is None
        for row, length in zip(holding.rows, operation.lengths, strict=True):
            row.remaining = length


def _finalize(holding: Holding) -> None:
    holding.pending, holding.announced, holding.by_lengths = False, None, False
    for row in holding.rows:
        row.right = 0
        row.remaining = row.promised = None


def _announced_by_both(holding: Holding, other: Holding) -> int | None:
    announced = [side.announced for side in (holding, other) if side.pending and side.announced is not None]
    return max(announced) if announced else None


def _extend_reason(holding: Holding, other: Holding) -> str | None:
    if (holding.kind, holding.max_size) != (other.kind, other.max_size):
        return "another kind or max_size"
    if holding.keep != other.keep:
        return "another keep"
    if len(holding.filled) != len(other.filled):
        return "another number of slots"
    if None not in (holding.variant, other.variant) and holding.variant != other.variant:
        return "other heads or dtype"
    return None


def _merge_reason(sources: list[Holding]) -> str | None:
    if not sources:
        return "no caches"
    if any(source.kind not in MERGEABLE for source in sources):
        return "a batch" if all(source.batched for source in sources) else "no such operation"
    if len({(source.kind, source.max_size, source.keep) for source in sources}) > 1:
        return "another kind, max_size or keep"
    if len({len(source.filled) for source in sources}) > 1:
        return "another number of slots"
    if any(len(source.rows) != 1 and (source.variant or source.recurrent) for source in sources):
        return "several rows"
    if len({source.variant for source in sources if source.variant}) > 1:
        return "other heads or dtype"
    return None


def _trim_reason(holding: Holding, tokens: int) -> str | None:
    if tokens < 0:
        return "negative"
    if tokens == 0:
        return None
    if holding.recurrent:
        return "recurrent"
    if holding.pending:
        return "pending"
    if tokens > min((len(row.history) for row in holding.rows), default=0):
        return "more than a row has"
    if holding.chunk_size is not None:
        left = min(len(row.history) for row in holding.rows) - tokens
        if holding.front > left - left % holding.chunk_size:
            return "without the start of its chunk"
    return None
