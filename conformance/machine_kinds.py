"""The machines of the kinds that need rules of their own; each has those of `CacheMachine` that it does not replace.

A rule that makes no sense for a kind is replaced by nothing: Hypothesis knows only what stands in the class.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from conformance import operations as ops
from conformance.driver import Driver
from conformance.ledger import MERGEABLE, Holding
from conformance.machine import ROWS_MAX, CacheMachine, flag, small, window
from conformance.payload import DTYPES, Config

NO_RULE: Any = None
"""In the place of a rule."""

QUANTIZATIONS = tuple((group_size, bits) for bits in (2, 3, 4, 5, 6, 8) for group_size in (32, 64))


MOVES = ("filter", "extend", "join", "merge", "extract", "copy", "state", *ops.VIAS)


class KindMachine(CacheMachine):
    """What several of the kinds' machines have in common."""

    def run(self, operation: ops.Operation) -> None:
        """One step, unless it needs a cache that is not there: a known finding may have kept it from being made."""
        met = [*getattr(operation, "caches", ()), getattr(operation, "other", None)]
        if not isinstance(operation, ops.New | ops.Merge):
            met.append(operation.cache)
        if all(name in self.holdings for name in met if name is not None):
            super().run(operation)


class BatchRingMachine(KindMachine):
    """Batches of rings, without sinks and with them: solo rings that merge have as many as the batches."""

    begin = new_solo = NO_RULE

    @initialize(
        dtype=st.sampled_from(DTYPES),
        heads=st.integers(1, 2),
        wider=st.tuples(st.integers(4, 5), st.integers(4, 5)),
        attention=flag,
        max_size=st.integers(1, 8),
        padding=st.lists(st.integers(0, 5), min_size=1, max_size=3),
        keep=st.sampled_from([0, 0, 1, 2, 3]),
    )
    def begin_rings(
        self,
        dtype: str,
        heads: int,
        wider: tuple[int, int],
        attention: bool,
        max_size: int,
        padding: list[int],
        keep: int,
    ) -> None:
        self.driver = Driver(self.campaign.adapters, Config(dtype, heads, *wider, attention), passes=self._meet)
        self.max_size, self.keep = max_size, min(keep, max_size - 1)
        self.run(self._new_batch(padding))

    @precondition(CacheMachine.room)
    @rule(rows=st.sampled_from([1, 1, 1, 2]), more=st.sampled_from([0, 0, 0, 1, 2]), number=small)
    def new_ring(self, rows: int, more: int, number: int) -> None:
        """One of other sinks is asked to merge with what is there."""
        made = self._new_solo(rows, (self.keep + more) % (self.max_size or 1))
        self.run(made)
        other = self.pick(number, self.is_source)
        if more and other and self.room():
            self.run(ops.Merge(self.cache_name(), (other, made.cache), self.row_names(2)))

    @precondition(CacheMachine.room)
    @rule(padding=st.lists(st.integers(0, 2), min_size=1, max_size=2), keep=st.integers(-1, 9), number=small)
    def new_batch_of_any_keep(self, padding: list[int], keep: int, number: int) -> None:
        """Which another batch may not be extended by."""
        rows = self.row_names(len(padding))
        made = ops.New(self.cache_name(), self.kind, rows, tuple(padding), self.max_size, keep)
        self.run(made)
        name = self.pick_batch(number)
        if name and made.cache in self.holdings and len(self.holdings[name].rows) + len(rows) <= ROWS_MAX:
            self.run(ops.Extend(name, made.cache, self.row_names(len(rows))))

    @precondition(CacheMachine.room)
    @rule(
        number=small,
        lengths=st.lists(st.integers(0, 9), min_size=1, max_size=2),
        announced=flag,
        fed=st.integers(0, 9),
        again=flag,
    )
    def join_late(self, number: int, lengths: list[int], announced: bool, fed: int, again: bool) -> None:
        """Rows of few tokens or many join a batch that decodes, and decode with it; so may those that they are of."""
        name = self.pick_batch(number)
        if name is None or len(self.holdings[name].rows) + len(lengths) > ROWS_MAX:
            return
        self.admit(lengths, False)
        joined = f"c{self.cache_count}"
        if joined not in self.holdings:
            return
        if announced:
            self.run(ops.Prepare(joined, right_padding=tuple(range(len(lengths)))))
        self.run(ops.Extend(name, joined, self.row_names(len(lengths))))
        if again:
            self.run(ops.Update(joined, 3, variant=self.holdings[joined].variant or "plain"))
            self.run(ops.Finalize(joined))
        if not self.holdings[name].pending:
            for _ in range(fed):
                self.run(ops.Update(name, 1, variant=self.holdings[name].variant or "plain"))

    @precondition(CacheMachine.room)
    @rule(numbers=st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=2))
    def announce_on_top(self, numbers: list[tuple[int, int, int, int]]) -> None:
        """Left padding on top of other, then lengths and right padding that may disagree."""
        due, more, lengths, right = (tuple(each) for each in zip(*numbers, strict=True))
        made = self._new_batch(due)
        self.run(made)
        self.run(ops.Prepare(made.cache, left_padding=more))
        self.run(ops.Prepare(made.cache, lengths=lengths, right_padding=right))
        self.run(ops.Mask(made.cache, 7))  # more than was announced, if anything was
        self.run(ops.Update(made.cache, 1))

    @precondition(CacheMachine.room)
    @rule(
        padding=st.lists(st.integers(2, 6), min_size=1, max_size=3),
        over=st.integers(0, 5),
        trimmed=st.integers(1, 4),
        fed=st.integers(1, 3),
    )
    def wrap_over_pads_alone(self, padding: list[int], over: int, trimmed: int, fed: int) -> None:
        """A ring that wraps and loses nothing but pads can go back by more than a token."""
        made = self._new_batch(padding)
        self.run(made)
        for _ in range((self.max_size or 0) + over):
            self.run(ops.Update(made.cache, 1))
        self.run(ops.Trim(made.cache, trimmed))
        self.run(ops.Update(made.cache, fed))

    @precondition(CacheMachine.room)
    @rule(number=small, fed=st.integers(0, 9), rejected=st.integers(0, 4), row=small, more=st.integers(0, 4))
    def leave_after_a_rollback(self, number: int, fed: int, rejected: int, row: int, more: int) -> None:
        """A row leaves with whatever is left to it, and goes on alone."""
        name = self.pick_batch(number)
        if name is None or self.holdings[name].pending:
            return
        for tokens in (fed, rejected):
            if tokens:
                self.run(ops.Update(name, tokens, variant=self.holdings[name].variant or "plain"))
        self.run(ops.Trim(name, rejected))
        self._extract(name, row, more)

    @precondition(CacheMachine.room)
    @rule(number=small, how=st.sampled_from(("copy", "state", *ops.VIAS)), fed=st.integers(1, 4))
    def go_on_with_another(self, number: int, how: str, fed: int) -> None:
        """A copy, or what a state or a file gives, goes on."""
        name = self.pick_batch(number)
        if name is None:
            return
        made, names = self.cache_name(), self.row_names(len(self.holdings[name].rows))
        via = how if how in ops.VIAS else None
        self.run(ops.Copy(name, made, names) if how == "copy" else ops.Restore(name, made, names, via))
        for _ in range(fed if made in self.holdings and self.holdings[made].announced is None else 0):
            self.run(ops.Update(made, 1, variant=self.holdings[made].variant or "plain"))

    @rule(number=small, left=st.integers(0, 4), fed=st.integers(0, 4), one_by_one=flag)
    def trim_to_the_sinks(self, number: int, left: int, fed: int, one_by_one: bool) -> None:
        """So far back that the shortest row has that many tokens left, and on."""
        name = self.pick_to_feed(number)
        if name is None or self.holdings[name].pending:
            return
        shortest = min((len(row.history) for row in self.holdings[name].rows), default=0)
        self.run(ops.Trim(name, max(0, shortest - left)))
        for tokens in [1] * fed if one_by_one else [fed] * (fed > 0):
            self.run(ops.Update(name, tokens, variant=self.holdings[name].variant or "plain"))


class QuantizedMachine(KindMachine):
    """Quantized caches, made as such or of a KVCache."""

    begin = NO_RULE

    @initialize(
        dtype=st.sampled_from(DTYPES),
        heads=st.integers(1, 2),
        dims=st.sampled_from([(32, 32), (64, 32), (32, 96), (64, 64), (128, 64)]),
        how=st.sampled_from(QUANTIZATIONS),
    )
    def begin_quantized(self, dtype: str, heads: int, dims: tuple[int, int], how: tuple[int, int]) -> None:
        config = Config(dtype, heads, *dims, two_level=True)
        self.driver = Driver(self.campaign.adapters, config, passes=self._meet)
        self.group_size, self.bits = how if not any(dim % how[0] for dim in dims) else (32, how[1])
        self.run(self._new_solo(1))

    def _new_solo(self, rows: int, keep: int | None = None) -> ops.New:
        name, names = self.cache_name(), self.row_names(rows)
        return ops.New(name, self.kind, names, group_size=self.group_size, bits=self.bits)

    def _plain(self, number: int) -> str | None:
        """The name of a KVCache, old or new."""
        name = self.pick(number, lambda holding: holding.kind == "KVCache")
        if name is None:
            name = self.cache_name()
            self.run(ops.New(name, "KVCache", self.row_names(1)))
            self.run(ops.Update(name, 1 + number))
        return name if name in self.holdings else None

    @precondition(CacheMachine.room)
    @rule()
    def new_plain(self) -> None:
        self.run(ops.New(self.cache_name(), "KVCache", self.row_names(1)))

    @precondition(CacheMachine.room)
    @rule(group_size=st.sampled_from([16, 32, 64, 0, -1]), bits=st.sampled_from([0, 1, 2, 3, 7, 8, 16]))
    def new_of_any_bits(self, group_size: int, bits: int) -> None:
        if group_size != 64 or self.group_size == 64:  # the heads of a trace are whole groups, where they are fed
            made = ops.New(self.cache_name(), self.kind, self.row_names(1), group_size=group_size, bits=bits)
            if bits != 1:
                self.run(made)

    @precondition(CacheMachine.room)
    @rule(number=small, bits=st.sampled_from([2, 3, 4, 5, 6, 8, 7]), fed=st.integers(0, 3), again=st.integers(0, 3))
    def to_quantized(self, number: int, bits: int, fed: int, again: int) -> None:
        """The original goes on, and so does what was made of it."""
        name = self._plain(number)
        if name is None:
            return
        made, rows = self.cache_name(), self.row_names(len(self.holdings[name].rows))
        self.run(ops.ToQuantized(name, made, rows, self.group_size, bits))
        for cache, tokens in ((made, fed), (name, again)):
            if cache in self.holdings and tokens:
                self.run(ops.Update(cache, tokens, variant=self.holdings[cache].variant or "plain"))

    @precondition(CacheMachine.room)
    @rule(number=small, variant=st.sampled_from(ops.VARIANTS), converted=flag)
    def feed_what_was_emptied(self, number: int, variant: str, converted: bool) -> None:
        """Its heads and dtype stay known, also to what is made of it."""
        name = plain = self._plain(number) if converted else None
        name = name or self.pick(number)
        if name is None:
            return
        self.run(ops.Update(name, 1, variant=self.holdings[name].variant or "plain"))
        self.run(ops.Trim(name, len(self.holdings[name].rows[0].history)))
        if plain:
            made, rows = self.cache_name(), self.row_names(len(self.holdings[plain].rows))
            self.run(ops.ToQuantized(plain, made, rows, self.group_size, self.bits))
            name = made if made in self.holdings else plain
        self.run(ops.Update(name, 2, variant=variant))


class ChunkedMachine(KindMachine):
    """A cache that forgets what no later chunk may see; it makes no masks."""

    begin = mask = NO_RULE

    @initialize(
        dtype=st.sampled_from(DTYPES),
        heads=st.integers(1, 2),
        wider=st.tuples(st.integers(4, 5), st.integers(4, 5)),
        attention=flag,
        chunk_size=st.integers(1, 8),
    )
    def begin_chunked(self, dtype: str, heads: int, wider: tuple[int, int], attention: bool, chunk_size: int) -> None:
        self.driver = Driver(self.campaign.adapters, Config(dtype, heads, *wider, attention), passes=self._meet)
        self.chunk_size = chunk_size
        self.run(self._new_solo(1))

    def _new_solo(self, rows: int, keep: int | None = None) -> ops.New:
        return ops.New(self.cache_name(), self.kind, self.row_names(rows), chunk_size=self.chunk_size)

    @precondition(CacheMachine.room)
    @rule(chunk_size=st.integers(-1, 9))
    def new_of_any_chunk(self, chunk_size: int) -> None:
        self.run(ops.New(self.cache_name(), self.kind, self.row_names(1), chunk_size=chunk_size))

    @rule(number=small)
    def trim_front(self, number: int) -> None:
        name = self.pick(number)
        if name:
            self.run(ops.TrimFront(name))

    @rule(number=small, chunks=st.lists(st.integers(1, 6), min_size=1, max_size=6), dropped=st.integers(0, 9))
    def prefill_in_chunks(self, number: int, chunks: list[int], dropped: int) -> None:
        """What the model does: the front goes, then the next columns come; and a rollback at the end."""
        name = self.pick(number)
        if name is None:
            return
        for tokens in chunks:
            self.run(ops.TrimFront(name))
            self.run(ops.Update(name, tokens, variant=self.holdings[name].variant or "plain"))
        self.run(ops.Trim(name, dropped))

    @rule(number=small, fed=st.integers(0, 3))
    def trim_to_a_chunk_start(self, number: int, fed: int) -> None:
        """As far back as there is a whole chunk, which may leave nothing."""
        name = self.pick(number)
        if name is None:
            return
        holding = self.holdings[name]
        size = holding.chunk_size or 1
        start = -(-holding.front // size) * size
        self.run(ops.Trim(name, max(0, len(holding.rows[0].history) - start)))
        if fed:
            self.run(ops.Update(name, fed, variant=holding.variant or "plain"))

    @precondition(CacheMachine.room)
    @rule(
        number=small,
        how=st.sampled_from(["copy", "state", *ops.VIAS]),
        chunks=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    )
    def go_on_with_another(self, number: int, how: str, chunks: list[int]) -> None:
        """A copy, or what a state or a file gives, slides on."""
        if how == "copy":
            self._copy(ops.Copy, number)
        else:
            self._copy(ops.Restore, number, via=None if how == "state" else how)
        made = f"c{self.cache_count}"
        for tokens in chunks:
            if made in self.holdings:
                self.run(ops.TrimFront(made))
                self.run(ops.Update(made, tokens, variant=self.holdings[made].variant or "plain"))


class ArraysMachine(KindMachine):
    """Recurrent state, alone and in batches."""

    begin = mask = update_of_any_shape = extend_by_another_kind = NO_RULE
    trim_everything = feed_and_trim = wrap_and_trim = NO_RULE

    @property
    def batching(self) -> bool:
        return True

    def is_batch(self, holding: Holding) -> bool:
        return True

    def is_source(self, holding: Holding) -> bool:
        return True

    @initialize(
        dtype=st.sampled_from(DTYPES),
        heads=st.integers(1, 2),
        slots=st.sampled_from([2, 1, 3, 4]),
        padding=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    )
    def begin_arrays(self, dtype: str, heads: int, slots: int, padding: list[int]) -> None:
        self.driver = Driver(self.campaign.adapters, Config(dtype, heads), passes=self._meet)
        self.slots = slots
        self.run(self._new_batch(padding) if padding else self._new_solo(1))

    def _new_solo(self, rows: int, keep: int | None = None) -> ops.New:
        """Several rows are a batch."""
        return self._new_batch([0] * rows) if rows > 1 else self._new(self.row_names(1), None)

    def _new_batch(self, padding: Any) -> ops.New:
        return self._new(self.row_names(len(padding)), tuple(padding)) if padding else self._new_solo(1)

    def _new(self, rows: tuple[str, ...], padding: tuple[int, ...] | None) -> ops.New:
        return ops.New(self.cache_name(), self.kind, rows, left_padding=padding, slots=self.slots)

    @precondition(CacheMachine.room)
    @rule(slots=st.integers(1, 4))
    def new_of_other_slots(self, slots: int) -> None:
        self.run(ops.New(self.cache_name(), self.kind, self.row_names(1), slots=slots))

    @rule(number=small, tokens=st.integers(1, 4), slot=small)
    def update_one_slot(self, number: int, tokens: int, slot: int) -> None:
        name = self.pick(number)
        if name is None:
            return
        holding = self.holdings[name]
        tokens = self.announced_part(holding, tokens)
        self.run(ops.Update(name, tokens, slot=slot % len(holding.filled)))

    @rule(number=small, tokens=st.integers(-1, 9), more=flag)
    def update_of_any_length(self, number: int, tokens: int, more: bool) -> None:
        name = self.pick(number)
        if name:
            other_rows = more and sum(self.holdings[name].filled) > 1
            self.run(ops.Update(name, max(0, tokens), variant="rows" if other_rows else "plain"))

    @precondition(lambda self: self.row_count < self.row_limit)
    @rule(
        padding=st.lists(st.sampled_from([0, 0, 1, 3]), min_size=2, max_size=3),
        slot=st.integers(0, 4),
        how=st.sampled_from(("state", *ops.VIAS)),
        other=small,
    )
    def move_with_unfilled_slots(self, padding: list[int], slot: int, how: str, other: int) -> None:
        """Rows of which one slot was written, or none, go elsewhere and on."""
        made = self._new_batch(padding)
        self.run(made)
        if slot < self.slots:
            self.run(ops.Update(made.cache, 1, slot=slot))
        for move in ("extract", how, "filter", "join"):
            if self.row_count < self.row_limit:
                self._move(made.cache, move, other)

    @precondition(lambda self: self.row_count < self.row_limit)
    @rule(
        number=small,
        lengths=st.tuples(st.integers(0, 3), st.integers(0, 3)),
        more=st.integers(1, 3),
        chunk=st.integers(0, 2),
        filtered=flag,
        then=st.sampled_from(MOVES),
        other=small,
    )
    def move_in_mid_prefill(
        self, number: int, lengths: tuple[int, int], more: int, chunk: int, filtered: bool, then: str, other: int
    ) -> None:
        """Rows of a ragged prefill go elsewhere and on."""
        name = self.pick(number, lambda holding: not holding.pending and bool(holding.rows))
        if name is None:
            return
        rows = self.holdings[name].rows
        own = tuple(lengths[i % 2] + row.due for i, row in enumerate(rows))
        width = max(own) + more
        self.run(ops.Prepare(name, lengths=own, right_padding=tuple(width - length for length in own)))
        if chunk:
            self.run(ops.Update(name, min(chunk, width)))
        if filtered:
            name = self._move(name, "filter", other)
        self._move(name, then, other)

    @precondition(lambda self: self.row_count < self.row_limit)
    @rule(padding=st.lists(small, min_size=1, max_size=3), more=st.integers(0, 2), written=flag)
    def merge_what_is_due(self, padding: list[int], more: int, written: bool) -> None:
        """Single rows with left padding and lengths come together, some of them before anything was written."""
        alone = [self._new_batch([pads]) for pads in padding]
        for i, made in enumerate(alone):
            self.run(made)
            if more:
                self.run(ops.Prepare(made.cache, lengths=(padding[i] + i,), right_padding=(more,)))
            if written and i:
                self.run(ops.Update(made.cache, 1))
        merged = ops.Merge(self.cache_name(), tuple(made.cache for made in alone), self.row_names(len(alone)))
        self.run(merged)
        announced = self.holdings[merged.cache].announced if merged.cache in self.holdings else 0
        if announced != 0:
            self.run(ops.Update(merged.cache, min(announced or 2, 2)))

    def _move(self, name: str, how: str, other: int) -> str:
        """Rows go where `how` says; what they are in then is fed and returned."""
        if name not in self.holdings:
            return name
        held = [row.name for row in self.holdings[name].rows]
        into, joined = name, self.pick(other)
        match how:
            case "filter" if held:
                kept = held[other % len(held) :]
                self.run(ops.Filter(name, tuple(kept), tuple(kept)))
            case "extend" | "join" if joined and joined != name and self.row_count <= self.row_limit:
                into, source = (name, joined) if how == "extend" else (joined, name)
                rows = len(self.holdings[source].rows)
                if len(self.holdings[into].rows) + rows <= ROWS_MAX:
                    self.run(ops.Extend(into, source, self.row_names(rows)))
            case "merge" if joined:
                into = self.cache_name()
                self.run(ops.Merge(into, (joined, name), self.row_names(2)))
            case "extract" if held:
                into = self.cache_name()
                self.run(ops.Extract(name, held[other % len(held)], into, self.row_names(1)[0]))
            case "copy" | "state" | "file" | "mapped":
                into, names = self.cache_name(), self.row_names(len(held))
                via = how if how in ops.VIAS else None
                self.run(ops.Copy(name, into, names) if how == "copy" else ops.Restore(name, into, names, via))
        if into not in self.holdings:
            return name
        holding = self.holdings[into]
        announced = holding.announced if holding.pending else None
        if announced != 0 and (how != "filter" or announced is None):
            self.run(ops.Update(into, min(announced or 2, 3)))
        return into

    @rule(number=small, tokens=st.integers(-1, 9))
    def mask_of_tokens(self, number: int, tokens: int) -> None:
        name = self.pick(number)
        if name:
            self.run(ops.Mask(name, tokens))


def _kinds(*children: ops.Child) -> tuple[ops.Child, ...]:
    return children


class ListMachine(KindMachine):
    """Lists of mixed kinds: what each child shows, and that all of them change or none."""

    begin = update_of_any_shape = NO_RULE
    row_limit = 24

    @property
    def batching(self) -> bool:
        return True

    def _leaves(self, name: str) -> list[Holding]:
        holding = self.holdings[name]
        if holding.kind != "CacheList":
            return [holding]
        return [leaf for i in range(holding.children) for leaf in self._leaves(f"{name}.{i}")]

    def _name(self, holding: Holding) -> str:
        return next(name for name, held in self.holdings.items() if held is holding)

    def is_batch(self, holding: Holding) -> bool:
        return all(leaf.of_rows for leaf in self._leaves(self._name(holding)))

    def is_source(self, holding: Holding) -> bool:
        return all(leaf.kind in MERGEABLE for leaf in self._leaves(self._name(holding)))

    @initialize(
        dtype=st.sampled_from(DTYPES),
        heads=st.integers(1, 2),
        wider=st.tuples(st.integers(4, 5), st.integers(4, 5)),
        max_size=st.integers(1, 8),
        which=st.integers(0, 7),
        padding=st.lists(st.integers(0, 5), min_size=0, max_size=3),
    )
    def begin_list(
        self, dtype: str, heads: int, wider: tuple[int, int], max_size: int, which: int, padding: list[int]
    ) -> None:
        self.driver = Driver(self.campaign.adapters, Config(dtype, heads, *wider), passes=self._meet)
        growing, ring = ops.Child("KVCache"), ops.Child("RotatingKVCache", max_size=max_size)
        states, state = ops.Child("ArraysCache", slots=2), ops.Child("ArraysCache", slots=1)
        self.children: tuple[ops.Child, ...] = (
            (growing, growing),
            (states, growing),
            (state, ring),
            (ring, growing, states),
            (ops.Child("CacheList", children=(growing, state)), growing),
            (ring, ops.Child("RotatingKVCache", max_size=max_size + 1)),
            (ops.Child("ChunkedKVCache", chunk_size=max_size), ops.Child("ConcatenateKVCache")),
            (ops.Child("CacheList", children=(growing,)), state),
        )[which]
        self.batched = all(child.kind not in ("ChunkedKVCache", "ConcatenateKVCache") for child in self.children)
        self.run(self._new_batch(padding) if padding and self.batched else self._new_solo(1))

    def _new_solo(self, rows: int, keep: int | None = None) -> ops.New:
        return ops.New(self.cache_name(), self.kind, self.row_names(1), children=self.children)

    def _new_batch(self, padding: Any) -> ops.New:
        if not padding or not self.batched:
            return self._new_solo(1)
        children = tuple(_batched(child) for child in self.children)
        rows = self.row_names(len(padding))
        return ops.New(self.cache_name(), self.kind, rows, left_padding=tuple(padding), children=children)

    @precondition(CacheMachine.room)
    @rule(number=small, batch=flag, swapped=flag)
    def new_of_fewer(self, number: int, batch: bool, swapped: bool) -> None:
        """A list that does not go together with the others, and another that is asked to."""
        whole = self.children
        self.children = whole[:1]
        made = self._new_batch([0]) if batch else self._new_solo(1)
        self.children = whole
        self.run(made)
        other = self.pick(number, self.is_batch if batch else self.is_source)
        if other in (None, made.cache) or made.cache not in self.holdings:
            return
        into, joined = (made.cache, other) if swapped else (other, made.cache)
        rows = self.row_names(len(self.holdings[joined].rows))
        if batch:
            self.run(ops.Extend(into, joined, rows))
        else:
            self.run(ops.Merge(self.cache_name(), (into, joined), (*rows[:1], *self.row_names(1))))

    @precondition(CacheMachine.room)
    @rule(number=small, how=st.sampled_from(("copy", "state", *ops.VIAS)))
    def go_on_with_another(self, number: int, how: str) -> None:
        """A copy, or what a state or a file gives, goes on, and then the original."""
        name = self.pick(number)
        if name is None:
            return
        if how == "copy":
            self._copy(ops.Copy, number)
        else:
            self._copy(ops.Restore, number, via=None if how == "state" else how)
        for cache in (f"c{self.cache_count}", name):
            if cache in self.holdings and self.holdings[cache].announced != 0:
                self.run(ops.Update(cache, 1, variant=self.holdings[cache].variant or "plain"))

    @precondition(CacheMachine.room)
    @rule(
        lengths=st.lists(st.integers(0, 4), min_size=2, max_size=3),
        announced=flag,
        trimmed=st.integers(0, 2),
    )
    def rows_come_and_go(self, lengths: list[int], announced: bool, trimmed: int) -> None:
        """Single rows merge, the last one is extracted and joined again, and the batch is filtered to the others."""
        alone = []
        for length in lengths:
            made = self._new_solo(1)
            self.run(made)
            alone.append(made.cache)
            if length:
                self.run(ops.Update(made.cache, length))
        merged = ops.Merge(self.cache_name(), tuple(alone), self.row_names(len(alone)))
        self.run(merged)
        if merged.cache not in self.holdings:
            return
        name, rows, more = merged.cache, merged.names, self.row_names(2)
        if announced:
            self.run(ops.Prepare(name, right_padding=(1,) * len(rows)))
        self.run(ops.Extract(name, rows[-1], last := self.cache_name(), more[0]))
        self.run(ops.Merge(again := self.cache_name(), (last,), more[1:]))
        self.run(ops.Update(name, 2))
        self.run(ops.Filter(name, rows[:-1][::-1], rows[:-1][::-1]))
        self.run(ops.Finalize(name))
        self.run(ops.Extend(name, again, self.row_names(1)))
        self.run(ops.Trim(name, trimmed))
        self.run(ops.Update(name, 1))

    @rule(number=small, tokens=st.integers(1, 9), window=window, return_array=flag)
    def update_any(self, number: int, tokens: int, window: int | None, return_array: bool) -> None:
        self._update(number, tokens, window, return_array)


def _batched(child: ops.Child) -> ops.Child:
    if child.kind == "CacheList":
        return ops.Child("CacheList", children=tuple(_batched(each) for each in child.children))
    if child.kind == "ArraysCache":
        return child
    return ops.Child(f"Batch{child.kind}", max_size=child.max_size, keep=child.keep)


MACHINES: dict[str, type[CacheMachine]] = {
    "BatchRotatingKVCache": BatchRingMachine,
    "QuantizedKVCache": QuantizedMachine,
    "ChunkedKVCache": ChunkedMachine,
    "ArraysCache": ArraysMachine,
    "CacheList": ListMachine,
}
