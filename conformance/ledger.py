"""The oracle that knows histories and no slots.

For every row it keeps which tokens were fed, and says from the visibility law alone what each query may see. It knows
neither slots nor heads nor wrapping, so it cannot share a mistake with code that does.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

from conformance import operations as ops

Token = tuple[str, int]
"""The name that the row had when the token was written, and the token's position."""

LAWFUL, REFUSED, EITHER = "lawful", "refused", "either"


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
        """W of the visibility law."""
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
        """Whether the operation is lawful now, from its meaning."""
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

    def _reason(self, operation: ops.Operation) -> str | None:
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
            case _:
                return None

    def _names_known(self, cache: str, names: tuple[str, ...]) -> bool:
        return set(names) <= {row.name for row in self.holdings[cache].rows}

    def _update_reason(self, operation: ops.Update) -> str | None:
        holding = self.holdings[operation.cache]
        if operation.variant == "uneven":
            return "keys and values of different length"
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
        return self._expected(operation.cache)

    def _expected(self, cache: str) -> Expected:
        rows = self.holdings[cache].rows
        return Expected(
            names=tuple(row.name for row in rows),
            offsets=tuple(None if row.right else len(row.history) - row.due for row in rows),
        )

    def _mask(self, operation: ops.Mask) -> Expected:
        later = deepcopy(self.holdings[operation.cache])
        fed = _feed(later, operation.tokens)
        return _with_queries(self._expected(operation.cache), later, fed, operation)

    def _new(self, operation: ops.New) -> None:
        padding = operation.left_padding or (0,) * len(operation.rows)
        rows = [Row(name, due=due) for name, due in zip(operation.rows, padding, strict=True)]
        self.holdings[operation.cache] = Holding(operation.kind, rows, max_size=operation.max_size, keep=operation.keep)

    def preview(self, operation: ops.Update) -> list[list[Token | None]]:
        """Per row, the tokens that a lawful update feeds; None for a pad."""
        later = deepcopy(self.holdings[operation.cache])
        if operation.variant == "rows":
            later.rows.append(Row(_extra_row(operation)))
        return _feed(later, operation.tokens)

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
            variant=holding.variant,
            columns=len(alone.history),
            trimmed=holding.trimmed,
            restored=holding.restored,
        )

    def _merge(self, operation: ops.Merge) -> None:
        sources = [self.holdings[name] for name in operation.caches]
        rows = [_renamed(source.rows[0], name) for source, name in zip(sources, operation.names, strict=True)]
        max_size = sources[0].max_size
        if max_size is not None:
            for row in rows:
                row.floor = max(row.floor, len(row.history) - max_size)
        self.holdings[operation.cache] = Holding(
            "Batch" + sources[0].kind,
            rows,
            max_size=max_size,
            variant=next((source.variant for source in sources if source.variant), None),
            columns=max(len(row.history) for row in rows),
            trimmed=any(source.trimmed for source in sources),
            restored=any(source.restored for source in sources),
        )

    def _copy(self, operation: ops.Copy | ops.Restore) -> None:
        if isinstance(operation, ops.Restore):
            self.holdings[operation.cache].restored = True
        holding = deepcopy(self.holdings[operation.cache])
        for row, name in zip(holding.rows, operation.names, strict=True):
            row.name = name
        self.holdings[operation.into] = holding


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
        tuple(_sees(row, token, window, holding.keep) for token in tokens)
        for row, tokens in zip(holding.rows, fed, strict=True)
    )
    width_max = holding.max_size + operation.tokens - 1 if holding.max_size is not None else None
    return replace(
        expected, count=operation.tokens, width_max=width_max, queries=tuple(map(tuple, fed)), visible=visible
    )


def _sees(row: Row, query: Token | None, window: int | None, keep: int) -> frozenset[Token] | None:
    if query is None:
        return None
    q = query[1]
    return frozenset(
        token for p, token in enumerate(row.history[: q + 1]) if p < keep or window is None or p > q - window
    )


def _new_reason(operation: ops.New) -> str | None:
    if operation.max_size is not None and operation.max_size < 1:
        return "no slots"
    if operation.max_size is not None and not 0 <= operation.keep < operation.max_size:
        return "no window beside the sinks"
    if any(pads < 0 for pads in operation.left_padding or ()):
        return "negative"
    return None


def _prepare_reason(holding: Holding, operation: ops.Prepare) -> str | None:
    if holding.pending:
        return "pending already"
    given = (operation.left_padding, operation.lengths, operation.right_padding)
    if any(numbers is not None and len(numbers) != len(holding.rows) for numbers in given):
        return "another row count"
    if any(number < 0 for numbers in given for number in numbers or ()):
        return "negative"
    if operation.left_padding is not None and any(row.history or row.right for row in holding.rows):
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
    if None not in (holding.variant, other.variant) and holding.variant != other.variant:
        return "other heads or dtype"
    return None


def _merge_reason(sources: list[Holding]) -> str | None:
    if not sources:
        return "no caches"
    if any(source.batched for source in sources):
        return "a batch"
    if len({(source.kind, source.max_size, source.keep) for source in sources}) > 1:
        return "another kind, max_size or keep"
    if sources[0].keep:
        return "sinks"
    if any(len(source.rows) > 1 and source.variant for source in sources):
        return "several rows"
    if len({source.variant for source in sources if source.variant}) > 1:
        return "other heads or dtype"
    return None


def _trim_reason(holding: Holding, tokens: int) -> str | None:
    if tokens < 0:
        return "negative"
    if tokens == 0:
        return None
    if holding.pending:
        return "pending"
    if tokens > min((len(row.history) for row in holding.rows), default=0):
        return "more than a row has"
    return None
