"""The verb `run`: all goldens, then random sequences, on one implementation beside the reference and the ledger."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conformance import expected as expected_failures
from conformance.adapters.registry import make_adapter
from conformance.driver import Divergence, Found
from conformance.goldens import check_golden, find_goldens
from conformance.machine import Campaign, explore
from conformance.operations import BATCH, CORE_KINDS, KINDS, OTHER_KINDS, applicable
from conformance.report import replay_line, report, to_json, write_trace
from conformance.shrink import shrink
from conformance.tally import Tally, can_refuse, can_wrap, reachable
from conformance.trace import Trace

UPSTREAM = "mlx_lm"
GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
SEQUENCES_PER_TASK = 120
REPORTS_IN_FULL = 5


@dataclass
class Result:
    """What a run found."""

    implementation: str
    version: str
    seed: int
    goldens: int = 0
    golden_failures: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    findings: dict[str, tuple[Found, Trace]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    expectations: list[expected_failures.Expectation] = field(default_factory=list)
    no_longer: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def unexpected(self) -> list[str]:
        """Signatures that no line of the list expects."""
        return [s for s in self.findings if not expected_failures.match(s, self.expectations)]

    @property
    def unreached(self) -> list[str]:
        """What the sequences never tried; means something for a run without findings alone."""
        return self.tally.zeros(KINDS) if not self.findings else []

    @property
    def failed(self) -> bool:
        return bool(self.unexpected or self.no_longer or self.golden_failures)


def run(
    implementation: str,
    sequences: int,
    seed: int,
    jobs: int,
    directory: Path,
    expected: Path | None,
    console: Console | None,
) -> Result:
    """Run everything. Raises AdapterError when the implementation cannot be driven."""
    start = time.monotonic()
    adapters = [make_adapter("reference"), make_adapter(implementation)]
    result = Result(implementation, adapters[1].version, seed)
    if expected is not None:
        result.expectations = expected_failures.read(expected)
        deviations = GOLDENS / "deviations"
        result.no_longer = expected_failures.no_longer_failing(result.expectations, deviations, adapters)
    with _progress(console) as progress:
        paths = goldens_for(implementation)
        bar = progress.add_task("goldens", total=len(paths))
        for path in paths:
            try:
                # What upstream does to snapshots, `empty` and the like is left to the random sequences.
                check_golden(path, adapters, passes=lambda found: found.adapter == UPSTREAM)
            except Divergence as divergence:
                result.golden_failures.append(f"golden {path.relative_to(GOLDENS)}: {divergence}")
            result.goldens += 1
            progress.advance(bar)
        bar = progress.add_task("sequences", total=sequences)
        for tally, findings in _waves(implementation, sequences, seed, jobs, result.findings):
            result.tally.add(tally)
            for signature, (found, trace) in findings.items():
                before = result.findings.get(signature)
                if before is None or len(trace.steps) < len(before[1].steps):
                    result.findings[signature] = found, trace
            progress.update(bar, completed=min(sequences, result.tally.sequences))
        bar = progress.add_task("shrinking", total=len(result.findings))
        unexpected = set(result.unexpected)
        for signature, (found, random) in sorted(result.findings.items()):
            # What is expected has a recorded trace already, as short as can be.
            shown = shrink(random, signature, adapters) if signature in unexpected else (found, random)
            result.findings[signature] = shown
            result.paths[signature] = write_trace(*shown, directory)
            progress.advance(bar)
    result.seconds = time.monotonic() - start
    return result


def goldens_for(implementation: str) -> list[Path]:
    """All goldens, or for mlx-lm itself those where it keeps the laws."""
    paths = find_goldens(GOLDENS)
    if implementation != UPSTREAM:
        return paths
    not_lawful_there = (GOLDENS / "deviations", GOLDENS / "regressions")
    return [path for path in paths if not any(place in path.parents for place in not_lawful_there)]


def _waves(
    implementation: str, sequences: int, seed: int, jobs: int, known: dict[str, tuple[Found, Trace]]
) -> Iterator[tuple[Tally, dict[str, tuple[Found, Trace]]]]:
    """Tasks of a fixed number of sequences, a kind each; the same ones whatever the number of jobs.

    What a wave found is known to the next, which then looks elsewhere.
    """
    tasks = -(-sequences // SEQUENCES_PER_TASK)
    wave = len(KINDS) * max(1, tasks // (4 * len(KINDS)))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for first in range(0, tasks, wave):
            signatures = dict(known)
            futures = [
                pool.submit(_task, implementation, KINDS[i % len(KINDS)], seed * 100_003 + i, signatures)
                for i in range(first, min(first + wave, tasks))
            ]
            for future in futures:
                yield future.result()


def _task(
    implementation: str, kind: str, number: int, known: dict[str, tuple[Found, Trace]]
) -> tuple[Tally, dict[str, tuple[Found, Trace]]]:
    campaign = Campaign([make_adapter("reference"), make_adapter(implementation)], findings=dict(known))
    explore(campaign, kind, SEQUENCES_PER_TASK, number)
    return campaign.tally, campaign.findings


@contextmanager
def _progress(console: Console | None) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=console is None) as progress:
        yield progress


def default_jobs() -> int:
    """As many processes as there are cores, four at most."""
    return min(4, os.cpu_count() or 1)


# -- what a person reads --------------------------------------------------------------------------


def print_result(result: Result, console: Console) -> None:
    """Tables of what was reached, the findings, and one line that sums up."""
    for kinds in (CORE_KINDS, OTHER_KINDS):
        console.print(reached_table(result.tally, kinds))
        console.print(situations_table(result.tally, kinds))
    if result.unreached:
        console.print(f"never reached: {', '.join(result.unreached)}", style="yellow", highlight=False)
    for failure in result.golden_failures:
        console.print(failure, style="red", markup=False, highlight=False)
    _print_findings(result, console)
    for fault in result.no_longer:
        console.print(f"expected failure {fault}", style="red", markup=False, highlight=False)
    console.print(summary(result), style="red" if result.failed else "green", highlight=False, soft_wrap=True)


def _print_findings(result: Result, console: Console) -> None:
    adapters = [make_adapter("reference"), make_adapter(result.implementation)]
    unexpected = sorted(result.unexpected)
    for signature in unexpected:
        found, trace = result.findings[signature]
        path = result.paths[signature]
        if len(unexpected) <= REPORTS_IN_FULL:
            text = report(found, trace, path, adapters)
        else:
            text = f"{signature}\n  {found.sentence()}\n  replay  {replay_line(path, result.implementation)}"
        console.print(f"{text}\n", markup=False, highlight=False, soft_wrap=True)
    matched = [expected_failures.match(signature, result.expectations) for signature in result.findings]
    for expectation, times in sorted(Counter(m for m in matched if m).items(), key=lambda item: item[0].name):
        console.print(
            f"expected  {expectation.name:<5} {times:>3}  {expectation.reason}", markup=False, highlight=False
        )


def reached_table(tally: Tally, kinds: Sequence[str]) -> Table:
    """Cache by operation: done, of them wrapped, refused."""
    table = Table(title="reached: done/wrapped/refused", title_justify="left")
    table.add_column("operation")
    for kind in kinds:
        table.add_column(_heading(kind), justify="right", no_wrap=True)
    for operation in (*BATCH, "to_quantized", "trim_front"):
        cells = []
        for kind in kinds:
            if operation not in applicable(kind):
                cells.append("")
                continue
            key = (kind, operation)
            wrapped = str(tally.wrapped[key]) if can_wrap(*key) else "-"
            refused = str(tally.refused[key]) if can_refuse(*key) else "-"
            cells.append(f"{tally.done[key]}/{wrapped}/{refused}")
        if any(cells):
            table.add_row(operation, *cells)
    return table


def situations_table(tally: Tally, kinds: Sequence[str]) -> Table:
    """Cache by situation."""
    table = Table(title="situations", title_justify="left")
    table.add_column("situation")
    for kind in kinds:
        table.add_column(_heading(kind), justify="right", no_wrap=True)
    for situation in dict.fromkeys(s for kind in kinds for s in reachable(kind)):
        cells = [str(tally.situations[kind, situation]) if situation in reachable(kind) else "" for kind in kinds]
        table.add_row(situation, *cells)
    return table


def _heading(kind: str) -> str:
    """A class name in two lines."""
    stem = "KVCache" if kind.endswith("KVCache") else "Cache"
    return kind.replace(stem, f"\n{stem}")


def summary(result: Result) -> str:
    """`passed: mlximpl 0.1.0, 70 goldens, 1200 sequences (16210 operations, 13.5 each), 0 divergences`."""
    tally = result.tally
    each = tally.operations / max(1, tally.sequences)
    word = "failed" if result.failed else "passed"
    text = (
        f"{word}: {result.implementation} {result.version}, {result.goldens} goldens "
        f"({len(result.golden_failures)} failed), {tally.sequences} sequences "
        f"({tally.operations} operations, {each:.1f} each), seed {result.seed}, "
        f"{len(result.findings)} divergences"
    )
    if tally.quantized:
        text += f", quantized fetches: {_quantized(tally)}"
    if result.expectations:
        text += f", {len(result.unexpected)} unexpected, {len(result.no_longer)} no longer failing"
    return f"{text}, {result.seconds:.0f} s"


def _quantized(tally: Tally) -> str:
    """How quantized fetches were compared: `812 exact, 0 within a step`."""
    return ", ".join(f"{tally.quantized[how]} {how}" for how in ("exact", "within a step"))


def as_json(result: Result) -> dict[str, Any]:
    """The result as data."""

    def counts(counter: Any) -> dict[str, int]:
        return {"/".join(key): number for key, number in sorted(counter.items())}

    tally = result.tally
    return {
        "implementation": result.implementation,
        "version": result.version,
        "seed": result.seed,
        "passed": not result.failed,
        "goldens": {"run": result.goldens, "failed": result.golden_failures},
        "sequences": tally.sequences,
        "operations": tally.operations,
        "done": counts(tally.done),
        "wrapped": counts(tally.wrapped),
        "refused": counts(tally.refused),
        "situations": counts(tally.situations),
        "quantized": dict(tally.quantized),
        "never_reached": result.unreached,
        "divergences": [
            to_json(found, trace, result.paths[signature])
            | {"expected": getattr(expected_failures.match(signature, result.expectations), "name", None)}
            for signature, (found, trace) in sorted(result.findings.items())
        ],
        "no_longer_failing": result.no_longer,
        "seconds": round(result.seconds, 1),
    }


def main(arguments: Any) -> int:
    """The verb; returns the exit code."""
    console = Console(stderr=arguments.json)
    result = run(
        arguments.impl,
        arguments.sequences,
        arguments.seed,
        arguments.jobs,
        arguments.directory,
        arguments.expected,
        None if arguments.quiet else console,
    )
    if arguments.json:
        json.dump(as_json(result), sys.stdout, indent=1)
        print()
    else:
        print_result(result, console)
    return 1 if result.failed else 0


__all__: Sequence[str] = ["Result", "as_json", "default_jobs", "main", "print_result", "run"]
