"""Hypothesis state machines: one for each cache class, with every operation in any order, lawful and not.

A rule draws small numbers and row indices; arrays are derived from them, so that a failing example is a short trace.
An operation is weighted by how many rules draw it. Hypothesis also leaves rules out at random, which reaches long runs
of one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from conformance import operations as ops
from conformance.adapters.base import Adapter
from conformance.driver import Divergence, Driver, Found
from conformance.ledger import Holding
from conformance.payload import DTYPES, Config
from conformance.tally import Tally, is_early
from conformance.trace import Trace

CACHES_MAX = 6
ROWS_MAX = 6
STEPS = 14

small = st.integers(0, 7)
flag = st.booleans()
window = st.one_of(st.none(), st.none(), st.integers(1, 12))


@dataclass
class Campaign:
    """What the machines of one run share."""

    adapters: Sequence[Adapter]
    tally: Tally = field(default_factory=Tally)
    on_example: Callable[[], None] = lambda: None
    findings: dict[str, tuple[Found, Trace]] = field(default_factory=dict)
    """The shortest trace of each divergence, by signature. An example ends where it meets one."""
    known: frozenset[str] = frozenset()
    """Signatures of calls that need not be tried again. Fixed while Hypothesis runs, which must not see it change."""
    stop: bool = False
    """Whether one finding is enough."""

    def meet(self, found: Found, trace: Trace) -> None:
        """Keep the trace if it is the first or the shortest of its signature."""
        before = self.findings.get(found.signature)
        if before is None or len(trace.steps) < len(before[1].steps):
            self.findings[found.signature] = found, trace


class CacheMachine(RuleBasedStateMachine):
    """The rules; subclasses set the kind under test and the campaign."""

    kind: str
    campaign: Campaign
    keep = 0
    """Sinks of the rings that are made without saying."""
    row_limit = 90
    """How many rows may be named: each takes a tag of the payload."""

    def __init__(self) -> None:
        super().__init__()
        self.driver: Driver | None = None
        self.dead = False
        self.cache_count = 0
        self.row_count = 0
        self.max_size: int | None = None

    # -- running one operation ----------------------------------------------------------------

    def run(self, operation: ops.Operation) -> None:
        """One step on every adapter."""
        if self.dead or self.driver is None:
            return
        if self.campaign.known and self.driver.signatures(operation) & self.campaign.known:
            return  # known to part ways here; there is more to find elsewhere
        early = is_early(self.driver.ledger, operation)
        try:
            seen = self.driver.step(operation)
            self.campaign.tally.count(self.driver.ledger, operation, seen[0].refused is not None, early)
            self.campaign.tally.count_quantized(seen)
        except Divergence as divergence:
            self._meet(divergence.found)
            if self.campaign.stop:
                raise
            # Hypothesis must see the same run each time, whatever the implementation does: the first adapter
            # goes on alone. Where that one is wrong nothing can.
            self.dead = divergence.found.adapter == self.campaign.adapters[0].name
            self.driver.adapters = self.campaign.adapters[:1]

    def _meet(self, found: Found) -> bool:
        assert self.driver is not None
        trace = Trace(self.driver.config, tuple(self.driver.steps), source={"name": "random"})
        self.campaign.meet(found, trace)
        return not self.campaign.stop

    def teardown(self) -> None:
        self.campaign.tally.sequences += 1
        self.campaign.on_example()

    # -- choosing -----------------------------------------------------------------------------

    @property
    def holdings(self) -> dict[str, Holding]:
        return self.driver.ledger.holdings if self.driver else {}

    @property
    def batching(self) -> bool:
        """Whether caches of this kind come together."""
        return self.kind.startswith("Batch")

    def pick(self, number: int, of: Callable[[Holding], bool] = lambda _: True) -> str | None:
        """The name of one of the caches for which `of` holds."""
        names = [name for name, holding in self.holdings.items() if of(holding) and "." not in name]
        return names[number % len(names)] if names else None

    def is_batch(self, holding: Holding) -> bool:
        """Whether rows may leave and join."""
        return holding.batched

    def is_source(self, holding: Holding) -> bool:
        """Whether it may be asked to merge."""
        return not holding.batched

    def pick_batch(self, number: int) -> str | None:
        return self.pick(number, self.is_batch)

    def cache_name(self) -> str:
        self.cache_count += 1
        return f"c{self.cache_count}"

    def row_names(self, count: int) -> tuple[str, ...]:
        names = []
        for _ in range(count):
            letters, number = "", self.row_count
            while True:
                letters = chr(ord("a") + number % 26) + letters
                number = number // 26 - 1
                if number < 0:
                    break
            names.append(letters)
            self.row_count += 1
        return tuple(names)

    def room(self) -> bool:
        return sum("." not in name for name in self.holdings) < CACHES_MAX and self.row_count < self.row_limit

    # -- making caches ------------------------------------------------------------------------

    @initialize(
        dtype=st.sampled_from(DTYPES),
        heads=st.integers(1, 2),
        wider=st.tuples(st.integers(4, 5), st.integers(4, 5)),
        attention=flag,
        max_size=st.integers(1, 8),
        padding=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        keep=st.integers(0, 3),
    )
    def begin(
        self,
        dtype: str,
        heads: int,
        wider: tuple[int, int],
        attention: bool,
        max_size: int,
        padding: list[int],
        keep: int,
    ) -> None:
        config = Config(dtype, heads, *wider, attention=attention)
        self.driver = Driver(self.campaign.adapters, config, passes=self._meet)
        if "Rotating" in self.kind:
            self.max_size = max_size
        if self.batching:
            self.run(self._new_batch(padding))
        else:
            self.run(self._new_solo(1, keep % max_size if self.max_size else 0))

    def _new_solo(self, rows: int, keep: int | None = None) -> ops.New:
        kind, keep = self.kind.removeprefix("Batch"), self.keep if keep is None else keep
        return ops.New(self.cache_name(), kind, self.row_names(rows), max_size=self.max_size, keep=keep)

    def _new_batch(self, padding: Sequence[int]) -> ops.New:
        rows = self.row_names(len(padding))
        return ops.New(self.cache_name(), self.kind, rows, tuple(padding), self.max_size, self.keep)

    @precondition(room)
    @rule(rows=st.sampled_from([1, 1, 1, 2]), keep=st.sampled_from([0, 0, 0, 1, 2]))
    def new_solo(self, rows: int, keep: int) -> None:
        self.run(self._new_solo(rows, keep if keep < (self.max_size or 0) else 0))

    @precondition(lambda self: self.room() and self.batching)
    @rule(padding=st.lists(st.integers(0, 5), min_size=0, max_size=3))
    def new_batch(self, padding: list[int]) -> None:
        self.run(self._new_batch(padding))

    @precondition(lambda self: self.room() and self.max_size is not None)
    @rule(max_size=st.integers(-1, 9), keep=st.integers(-1, 9))
    def new_ring_of_any_size(self, max_size: int, keep: int) -> None:
        name = self.cache_name()
        self.run(ops.New(name, "RotatingKVCache", self.row_names(1), max_size=max_size, keep=keep))

    @precondition(lambda self: self.room() and self.batching)
    @rule(padding=st.lists(st.integers(-2, 2), min_size=1, max_size=2))
    def new_batch_of_any_padding(self, padding: list[int]) -> None:
        self.run(self._new_batch(padding))

    @precondition(lambda self: self.room() and self.batching)
    @rule(numbers=st.lists(small, min_size=0, max_size=4))
    def merge(self, numbers: list[int]) -> None:
        sources = [self.pick(number, self.is_source) for number in numbers]
        names = tuple(name for name in sources if name)
        self.run(ops.Merge(self.cache_name(), names, self.row_names(len(names))))

    @precondition(room)
    @rule(number=small)
    def copy(self, number: int) -> None:
        self._copy(ops.Copy, number)

    @precondition(room)
    @rule(number=small, via=st.sampled_from([None, None, *ops.VIAS]))
    def restore(self, number: int, via: str | None) -> None:
        self._copy(ops.Restore, number, via=via)

    def _copy(self, kind: type[ops.Copy] | type[ops.Restore], number: int, **how: str | None) -> None:
        name = self.pick(number)
        if name:
            names = self.row_names(len(self.holdings[name].rows))
            self.run(kind(name, self.cache_name(), names, **how))

    # -- feeding ------------------------------------------------------------------------------

    @rule(number=small, window=window, return_array=flag)
    def update_one(self, number: int, window: int | None, return_array: bool) -> None:
        self._update(number, 1, window, return_array)

    @rule(number=small, times=st.integers(1, 10))
    def update_one_several_times(self, number: int, times: int) -> None:
        for _ in range(times):
            self._update(number, 1, None, False)

    @rule(number=small, tokens=st.integers(2, 12), window=window, return_array=flag)
    def update_many(self, number: int, tokens: int, window: int | None, return_array: bool) -> None:
        self._update(number, tokens, window, return_array)

    @rule(number=small, tokens=st.integers(1, 5))
    def update_some(self, number: int, tokens: int) -> None:
        self._update(number, tokens, None, False)

    def pick_to_feed(self, number: int) -> str | None:
        """A batch three times out of four where batches are under test, else any cache."""
        return (self.pick_batch(number) if number % 4 else None) or self.pick(number)

    def announced_part(self, holding: Holding, tokens: int) -> int:
        """As many tokens, or fewer where a pending prefill has announced fewer."""
        if holding.pending and holding.announced:
            return 1 + (tokens - 1) % holding.announced
        return tokens

    def _update(self, number: int, tokens: int, window: int | None, return_array: bool) -> None:
        name = self.pick_to_feed(number)
        if name is None:
            return
        holding = self.holdings[name]
        tokens = self.announced_part(holding, tokens)
        variant = holding.variant or "plain"
        self.run(ops.Update(name, tokens, window, return_array, variant))

    @rule(number=small, tokens=st.integers(-1, 9), variant=st.sampled_from(ops.VARIANTS))
    def update_of_any_shape(self, number: int, tokens: int, variant: str) -> None:
        name = self.pick(number)
        if name:
            self.run(ops.Update(name, max(0, tokens), variant=variant))

    @rule(number=small, tokens=st.integers(-1, 9), window=st.one_of(window, st.integers(-1, 12)), array=flag)
    def mask(self, number: int, tokens: int, window: int | None, array: bool) -> None:
        name = self.pick(number)
        if name:
            self.run(ops.Mask(name, tokens, window, array))

    @rule(number=small, tokens=st.sampled_from([0, 1, 1, 2, 3, -1, -5, 9, 20]))
    def trim(self, number: int, tokens: int) -> None:
        name = self.pick(number)
        if name:
            self.run(ops.Trim(name, tokens))

    @rule(number=small, fed=st.integers(1, 9), dropped=st.integers(0, 9))
    def feed_and_trim(self, number: int, fed: int, dropped: int) -> None:
        self._update(number, fed, None, False)
        self.trim(number, min(fed, dropped))

    @rule(number=small)
    def trim_everything(self, number: int) -> None:
        name = self.pick(number)
        if name:
            shortest = min((len(row.history) for row in self.holdings[name].rows), default=0)
            self.run(ops.Trim(name, shortest))

    @precondition(lambda self: self.max_size is not None)
    @rule(number=small, over=st.integers(0, 9), trimmed=st.sampled_from([0, 1, 1, 2, 3]), fed=st.integers(0, 3))
    def wrap_and_trim(self, number: int, over: int, trimmed: int, fed: int) -> None:
        """Single tokens until a ring has wrapped, a rollback, and on."""
        name = self.pick_to_feed(number)
        if name is None or self.holdings[name].pending or self.max_size is None:
            return
        variant = self.holdings[name].variant or "plain"
        for _ in range(self.max_size + over - self.holdings[name].columns):
            self.run(ops.Update(name, 1, variant=variant))
        self.run(ops.Trim(name, trimmed))
        if fed:
            self.run(ops.Update(name, fed, variant=variant))

    # -- ragged prefill -----------------------------------------------------------------------

    @precondition(lambda self: self.pick_batch(0) is not None)
    @rule(number=small, lengths=st.lists(st.integers(0, 6), min_size=6, max_size=6), both=flag)
    def prepare(self, number: int, lengths: list[int], both: bool) -> None:
        name = self.pick_batch(number)
        if name is None:
            return
        rows = self.holdings[name].rows
        own = tuple(length + row.due for length, row in zip(lengths, rows, strict=False))
        padding = tuple(max(own, default=0) - length for length in own)
        self.run(ops.Prepare(name, lengths=own, right_padding=padding if both else None))

    @precondition(lambda self: self.pick_batch(0) is not None)
    @rule(number=small, padding=st.lists(st.integers(0, 3), min_size=6, max_size=6))
    def prepare_right_padding_alone(self, number: int, padding: list[int]) -> None:
        name = self.pick_batch(number)
        if name:
            self.run(ops.Prepare(name, right_padding=tuple(padding[: len(self.holdings[name].rows)])))

    @precondition(lambda self: self.pick_batch(0) is not None)
    @rule(
        number=small,
        left=st.one_of(st.none(), st.lists(st.integers(-1, 3), min_size=0, max_size=4)),
        lengths=st.one_of(st.none(), st.lists(st.integers(-1, 4), min_size=0, max_size=4)),
        right=st.one_of(st.none(), st.lists(st.integers(-1, 4), min_size=0, max_size=4)),
    )
    def prepare_anything(
        self, number: int, left: list[int] | None, lengths: list[int] | None, right: list[int] | None
    ) -> None:
        name = self.pick_batch(number)
        if name is None:
            return
        count = len(self.holdings[name].rows)
        given = [tuple(numbers[:count]) if numbers is not None else None for numbers in (left, lengths, right)]
        self.run(ops.Prepare(name, *given))

    @precondition(lambda self: self.pick_batch(0) is not None)
    @rule(number=small)
    def finalize(self, number: int) -> None:
        name = self.pick_batch(number)
        if name:
            self.run(ops.Finalize(name))

    @precondition(lambda self: self.pick(0, lambda h: h.pending) is not None)
    @rule(number=small, chunk=st.integers(1, 6), finish=flag)
    def feed_a_pending_prefill(self, number: int, chunk: int, finish: bool) -> None:
        name = self.pick(number, lambda holding: holding.pending)
        if name is None:
            return
        holding = self.holdings[name]
        if holding.announced is None:
            chunk = max([chunk, *((row.promised or 0) + row.due for row in holding.rows)])
        chunk = self.announced_part(holding, chunk)
        self.run(ops.Update(name, chunk, variant=holding.variant or "plain"))
        if finish:
            self.run(ops.Finalize(name))

    @precondition(lambda self: self.pick_batch(0) is not None)
    @rule(
        number=small,
        lengths=st.lists(st.integers(0, 9), min_size=6, max_size=6),
        chunk=st.integers(1, 6),
        decoded=st.integers(0, 4),
        cancelled=st.one_of(st.none(), small),
    )
    def prefill_and_decode(
        self, number: int, lengths: list[int], chunk: int, decoded: int, cancelled: int | None
    ) -> None:
        """What a server does: a ragged prefill in chunks, during which a row may leave, then single tokens."""
        name = self.pick_batch(number)
        if name is None or self.holdings[name].pending or not self.holdings[name].rows:
            return
        holding = self.holdings[name]
        own = tuple(length + row.due for length, row in zip(lengths, holding.rows, strict=False))
        width = max(own)
        self.run(ops.Prepare(name, lengths=own, right_padding=tuple(width - length for length in own)))
        variant = holding.variant or "plain"
        for start in range(0, width, chunk):
            self.run(ops.Update(name, min(chunk, width - start), variant=variant))
            rows = [row.name for row in holding.rows]
            if start == 0 and cancelled is not None and len(rows) > 1:
                del rows[cancelled % len(rows)]
                self.run(ops.Filter(name, tuple(rows), tuple(rows)))
        self.run(ops.Finalize(name))
        for _ in range(decoded):
            self.run(ops.Update(name, 1, variant=variant))

    @precondition(lambda self: self.room() and self.batching)
    @rule(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3), one_by_one=flag)
    def admit(self, lengths: list[int], one_by_one: bool) -> None:
        """What a server does: requests prefilled alone, then merged."""
        solos = []
        for length in lengths:
            made = self._new_solo(1)
            self.run(made)
            solos.append(made.cache)
            for tokens in [1] * length if one_by_one else [length] * (length > 0):
                self.run(ops.Update(made.cache, tokens))
        self.run(ops.Merge(self.cache_name(), tuple(solos), self.row_names(len(solos))))

    @precondition(lambda self: self.room() and self.batching)
    @rule(number=small, length=st.integers(0, 6), leaving=st.lists(st.one_of(st.none(), small), min_size=2, max_size=4))
    def come_and_go(self, number: int, length: int, leaving: list[int | None]) -> None:
        """What a server does: a row joins again and again, as one leaves or none, with a token for all in between."""
        name = self.pick_batch(number)
        if name is None or self.holdings[name].pending:
            return
        made = self._new_batch([0])
        self.run(made)
        if length:
            self.run(ops.Update(made.cache, length))
        for gone in leaving:
            rows = [row.name for row in self.holdings[name].rows]
            if rows and gone is not None:
                del rows[gone % len(rows)]
                self.run(ops.Filter(name, tuple(rows), tuple(rows)))
            if len(rows) < ROWS_MAX and self.row_count < self.row_limit:
                self.run(ops.Extend(name, made.cache, self.row_names(1)))
                self.run(ops.Update(name, 1, variant=self.holdings[name].variant or "plain"))

    # -- rows ---------------------------------------------------------------------------------

    @precondition(lambda self: self.pick_batch(0) is not None)
    @rule(number=small, rows=st.lists(st.integers(0, 5), min_size=0, max_size=4), fed=st.integers(0, 3))
    def filter(self, number: int, rows: list[int], fed: int) -> None:
        name = self.pick_batch(number)
        if name is None or self.row_count > self.row_limit:
            return
        held = [row.name for row in self.holdings[name].rows]
        chosen = tuple(held[i % len(held)] for i in rows) if held else ()
        fresh = iter(self.row_names(len(chosen)))
        # A row kept once keeps its name; a fork's second copy gets a fresh one.
        names = tuple(next(fresh) if row in chosen[:i] else row for i, row in enumerate(chosen))
        self.run(ops.Filter(name, chosen, names))
        if fed and not self.holdings[name].pending:
            self.run(ops.Update(name, fed, variant=self.holdings[name].variant or "plain"))

    @precondition(lambda self: self.pick_batch(0) is not None)
    @rule(number=small, other=small, fed=st.integers(0, 3))
    def extend(self, number: int, other: int, fed: int) -> None:
        name, joined = self.pick_batch(number), self.pick_batch(other)
        if name is None or joined is None or self.row_count > self.row_limit:
            return
        rows = len(self.holdings[joined].rows)
        if len(self.holdings[name].rows) + rows <= ROWS_MAX:
            self.run(ops.Extend(name, joined, self.row_names(rows)))
            if fed and not self.holdings[name].pending:
                self.run(ops.Update(name, fed, variant=self.holdings[name].variant or "plain"))

    @precondition(lambda self: self.pick(0, lambda h: h.pending) is not None)
    @rule(number=small, other=small, swapped=flag)
    def extend_in_mid_prefill(self, number: int, other: int, swapped: bool) -> None:
        pending, joined = self.pick(number, lambda holding: holding.pending), self.pick_batch(other)
        if pending is None or joined is None or self.row_count > self.row_limit:
            return
        name, other_name = (joined, pending) if swapped else (pending, joined)
        rows = len(self.holdings[other_name].rows)
        if len(self.holdings[name].rows) + rows <= ROWS_MAX:
            self.run(ops.Extend(name, other_name, self.row_names(rows)))

    @precondition(lambda self: self.pick_batch(0) is not None)
    @rule(number=small, other=small)
    def extend_by_another_kind(self, number: int, other: int) -> None:
        name, solo = self.pick_batch(number), self.pick(other, lambda holding: not self.is_batch(holding))
        if name and solo:
            self.run(ops.Extend(name, solo, ("zz",) * len(self.holdings[solo].rows)))

    @precondition(lambda self: self.room() and self.pick(0, lambda h: h.pending) is not None)
    @rule(number=small, row=small, fed=st.integers(0, 3))
    def extract_in_mid_prefill(self, number: int, row: int, fed: int) -> None:
        self._extract(self.pick(number, lambda holding: holding.pending), row, fed)

    @precondition(lambda self: self.room() and self.pick_batch(0) is not None)
    @rule(number=small, row=small, fed=st.integers(0, 3))
    def extract(self, number: int, row: int, fed: int) -> None:
        self._extract(self.pick_batch(number), row, fed)

    def _extract(self, name: str | None, row: int, fed: int) -> None:
        if name is None:
            return
        held = [r.name for r in self.holdings[name].rows] or ["zz"]
        alone = self.cache_name()
        self.run(ops.Extract(name, held[row % len(held)], alone, self.row_names(1)[0]))
        if alone in self.holdings and fed:
            variant = self.holdings[alone].variant or "plain"
            self.run(ops.Update(alone, fed, variant=variant))

    @precondition(lambda self: self.room() and self.pick_batch(0) is not None)
    @rule(number=small, extract=flag)
    def ask_for_a_row_that_is_not_there(self, number: int, extract: bool) -> None:
        name = self.pick_batch(number)
        if name and extract:
            self.run(ops.Extract(name, "zz", self.cache_name(), "zz"))
        elif name:
            self.run(ops.Filter(name, ("zz",), ("zz",)))


def explore(campaign: Campaign, kind: str, sequences: int, number: int) -> None:
    """Run that many random sequences on one kind; what diverges is met by the campaign.

    The same seed `number` gives the same sequences with the same version of Hypothesis and the same modules loaded,
    since Hypothesis draws from the constants of those too.
    """
    from conformance.machine_kinds import MACHINES  # its machines are made of this module's

    base = MACHINES.get(kind, CacheMachine)
    machine: Any = type(f"{kind}Machine", (base,), {"kind": kind, "campaign": campaign})
    campaign.known = frozenset(campaign.findings)
    with suppress(Divergence):
        run_state_machine_as_test(seed(number)(machine), settings=machine_settings(sequences))


def machine_settings(sequences: int) -> settings:
    """Settings of a run: nothing is read from or written to a database, and no time limit makes it flaky."""
    return settings(
        max_examples=sequences,
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
