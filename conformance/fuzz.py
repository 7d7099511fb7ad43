"""The verb `fuzz`: loads thousands of mutated files, and asks that each gives an equal cache or the refusal.

What must come of a file is in `fuzz_judge.py`. Everything else is a finding: another exception, a process that dies or
hangs, no caches, or more memory than twice the file and 64 MB.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import mlximpl
from conformance.adapters.surface import set_device
from conformance.file_seeds import Seed, seeds
from conformance.fuzz_judge import EQUAL, FOUND, LAWFUL, REFUSED, Finding, Verdict, case
from conformance.fuzz_workers import SECONDS, FuzzError, verdicts

OUTCOMES = (EQUAL, REFUSED, LAWFUL, FOUND)


@dataclass
class Result:
    """What a run found."""

    seed: int
    files: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By mutation and outcome of the plain load."""
    modes: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    """The first of each kind."""
    times: Counter[str] = field(default_factory=Counter)
    """How often each kind was met."""
    paths: dict[str, Path] = field(default_factory=dict)
    """The file of each finding."""
    growth: int = 0
    seconds: float = 0.0

    def add(self, verdict: Verdict) -> None:
        """Count a file."""
        self.files += 1
        self.growth = max(self.growth, verdict.growth)
        for mode, outcome in verdict.outcomes.items():
            self.modes[mode, outcome] += 1
        for mutation in dict.fromkeys(verdict.mutations):
            self.outcomes[mutation, FOUND if verdict.findings else verdict.outcomes["read"]] += 1
        for finding in verdict.findings:
            self.times[finding.kind] += 1
            self.findings.setdefault(finding.kind, finding)

    @property
    def failed(self) -> bool:
        return bool(self.findings)


def fuzz(
    every: list[Seed],
    numbers: Iterable[int],
    seed: int,
    jobs: int,
    directory: Path,
    loader: str = "mlximpl",
    seconds: float = SECONDS,
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """Judge the files of these numbers, and keep one of each finding under the directory.

    `loader` names what has load_prompt_cache and PromptCacheFileError: `module` or `module:attribute`. Raises
    FuzzError when it refuses a file that is right.
    """
    result = Result(seed)
    began = time.monotonic()
    for verdict in verdicts(every, numbers, seed, jobs, loader, seconds):
        result.add(verdict)
        advance()
    for kind, finding in result.findings.items():
        path = directory / f"fuzz-{seed}-{finding.number}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(case(every, seed, finding.number).content)
        result.paths[kind] = path
    result.seconds = time.monotonic() - began
    return result


def replay_line(seed: int, number: int) -> str:
    """What makes the same file again."""
    return f"python -m conformance fuzz --seed {seed} --only {number}"


# -- what a person reads --------------------------------------------------------------------------


def outcomes_table(result: Result) -> Table:
    """Mutation by outcome."""
    table = Table(title="what came of the files", title_justify="left")
    table.add_column("mutation")
    for outcome in OUTCOMES:
        table.add_column(outcome, justify="right")
    for mutation in sorted({mutation for mutation, _ in result.outcomes}):
        table.add_row(mutation, *(str(result.outcomes[mutation, outcome]) for outcome in OUTCOMES))
    return table


def finding_text(result: Result, finding: Finding) -> str:
    """A finding, its file and how to have it again."""
    return (
        f"FINDING {finding.kind}, {result.times[finding.kind]} times\n  {finding.words}\n"
        f"  file    {result.paths[finding.kind]}\n  replay  {replay_line(result.seed, finding.number)}"
    )


def summary(result: Result) -> str:
    """`passed: mlximpl 0.1.0, 10000 files, seed 0: ..., 0 findings, ...`."""
    counts = ", ".join(f"{result.modes['read', outcome]} {outcome}" for outcome in (EQUAL, REFUSED, LAWFUL))
    return (
        f"{'failed' if result.failed else 'passed'}: mlximpl {mlximpl.__version__}, {result.files} files, "
        f"seed {result.seed}: {counts}, {len(result.findings)} findings, "
        f"memory at most {result.growth / 2**20:.1f} MB more, {result.seconds:.0f} s"
    )


def as_json(result: Result) -> dict[str, Any]:
    """The result as data."""
    return {
        "version": mlximpl.__version__,
        "seed": result.seed,
        "passed": not result.failed,
        "files": result.files,
        "loads": {"/".join(key): number for key, number in sorted(result.modes.items())},
        "mutations": {"/".join(key): number for key, number in sorted(result.outcomes.items())},
        "memory_growth_bytes": result.growth,
        "findings": [
            {
                "kind": finding.kind,
                "words": finding.words,
                "times": result.times[finding.kind],
                "file": str(result.paths[finding.kind]),
                "replay": replay_line(result.seed, finding.number),
            }
            for finding in result.findings.values()
        ],
        "seconds": round(result.seconds, 1),
    }


def main(arguments: Any) -> int:
    """The verb; returns the exit code."""
    set_device()
    console = Console(stderr=arguments.json)
    numbers = range(arguments.files) if arguments.only is None else [arguments.only]
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="seeds-") as directory,
        Progress(*columns, console=console, disable=arguments.quiet) as progress,
    ):
        every = seeds(Path(directory))
        bar = progress.add_task("files", total=len(numbers))
        jobs = min(arguments.jobs, len(numbers))
        try:
            result = fuzz(
                every, numbers, arguments.seed, jobs, arguments.directory, advance=lambda: progress.advance(bar)
            )
        except FuzzError as error:
            print(error, file=sys.stderr)
            return 2
    if arguments.json:
        json.dump(as_json(result), sys.stdout, indent=1)
        print()
    else:
        console.print(outcomes_table(result))
        for finding in result.findings.values():
            console.print(finding_text(result, finding), markup=False, highlight=False, soft_wrap=True)
        style = "red" if result.failed else "green"
        console.print(summary(result), style=style, highlight=False, soft_wrap=True)
    return 1 if result.failed else 0
