"""The verb `kill-saves`: kills a process at random points of a save, and asks that the file is whole each time.

A process saves two caches over one file, in turn. Every second one is killed after a random time; the others die
just before or after one of the calls that a save makes to the operating system, so that each gap is met. After each
kill the file must load, and be one of the two caches.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import mlximpl
from conformance.adapters.surface import set_device
from conformance.file_layers import leaves
from conformance.saver import NOTE, named, rehearsal, two_caches

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 60.0
"""Seconds that a process may take to be ready, or to come to the call where it dies."""


class KillError(Exception):
    """The process that saves cannot be run."""


@dataclass
class Result:
    """What the kills left."""

    seed: int
    kills: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    """What a save was doing when it was killed."""
    held: Counter[str] = field(default_factory=Counter)
    """Which cache the file held."""
    leftovers: Counter[str] = field(default_factory=Counter)
    """Temporary files that were left, by the stage that left them."""
    failures: list[str] = field(default_factory=list)
    save_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return bool(self.failures)


class Saver:
    """A process that saves, started and waiting."""

    def __init__(self, file: Path, note: Path, saver: str) -> None:
        self.note = note
        note.write_bytes(b"nothing".ljust(NOTE))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "conformance.saver", str(file), str(note), "--saver", saver],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self, turn: int, die_at: int, seconds: float) -> str:
        """Let it save, this cache first; kill it after these seconds, unless it dies at a call; what it was doing."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        if stdout.readline() != "ready\n":
            raise KillError(f"the process that saves ended with exit code {self.process.wait()}")
        stdin.write(f"{turn} {die_at}\n")
        stdin.flush()
        try:
            self.process.wait(PATIENCE if die_at else seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
        code = self.process.wait()
        if code != -9:
            raise KillError(f"the process that saves ended by itself, with exit code {code}")
        return self.note.read_bytes().decode(errors="replace").strip()

    def end(self) -> None:
        """Whatever it is doing."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def kill_saves(
    times: int,
    seed: int,
    directory: Path,
    saver: str = "mlximpl",
    advance: Callable[[], None] = lambda: None,
) -> Result:
    """Kill that many saves; files that are not whole are kept under the directory.

    `saver` names what has save_prompt_cache: `module` or `module:attribute`. Raises KillError when the process that
    saves ends by itself.
    """
    result = Result(seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-") as name:
        place = Path(name)
        calls, result.save_seconds = rehearsal(saver, place)
        kinds = sorted({call for each in calls for call in each})
        right = [leaves(caches) for caches in two_caches()]
        (place / "saved").mkdir()
        file = place / "saved" / "cache.safetensors"
        named(saver).save_prompt_cache(str(file), two_caches()[1])
        held = 1
        process = Saver(file, place / "note-0", saver)
        for number in range(times):
            random = Random(f"{seed}/{number}")
            turn = 1 - held
            die_at = 0
            if number % 2:
                order = [*calls[turn], *calls[held]]
                kind = kinds[number // 2 % len(kinds)]
                die_at = random.choice([i for i, call in enumerate(order, 1) if call == kind])
            ahead = Saver(file, place / f"note-{(number + 1) % 2}", saver)
            try:
                stage = process.go(turn, die_at, random.uniform(0, 2 * result.save_seconds))
            except BaseException:
                ahead.end()
                raise
            finally:
                process.end()
            process = ahead
            held = _look(result, number, stage, file, right, directory)
            advance()
        process.end()
    result.seconds = time.monotonic() - began
    return result


def _look(result: Result, number: int, stage: str, file: Path, right: list[list[Any]], directory: Path) -> int:
    """What a kill left: the file, and what lies beside it. Returns which cache the file holds, 0 or 1."""
    result.kills += 1
    result.stages[stage] += 1
    for path in file.parent.iterdir():
        if path != file:
            result.leftovers[stage] += 1
            path.unlink()
    try:
        held = leaves(mlximpl.load_prompt_cache(str(file)))
        if held in right:
            result.held["AB"[right.index(held)]] += 1
            return right.index(held)
        words = "holds neither of the two caches"
    except (mlximpl.PromptCacheFileError, OSError) as error:
        words = f"does not load: {error}"
    kept = directory / f"kill-{result.seed}-{number}.safetensors"
    kept.parent.mkdir(parents=True, exist_ok=True)
    if file.is_file():
        shutil.copy(file, kept)
    result.failures.append(f"kill {number}, {stage}: the file {words} ({kept})")
    return 0


# -- what a person reads --------------------------------------------------------------------------


def stages_table(result: Result) -> Table:
    """What was being done, how often it was killed there, and what was left beside the file."""
    table = Table(title="killed", title_justify="left")
    for name in ("while", "times", "files left beside"):
        table.add_column(name, justify="left" if name == "while" else "right")
    for stage, times in sorted(result.stages.items(), key=lambda item: item[0].split()[::-1]):
        table.add_row(stage, str(times), str(result.leftovers[stage]))
    return table


def summary(result: Result) -> str:
    """`passed: mlximpl 0.1.0, 200 kills, seed 0: ...`."""
    held = ", ".join(f"{times} times {word}" for word, times in sorted(result.held.items()))
    return (
        f"{'failed' if result.failed else 'passed'}: mlximpl {mlximpl.__version__}, {result.kills} kills, "
        f"seed {result.seed}: the file was whole {sum(result.held.values())} times ({held}), "
        f"{sum(result.leftovers.values())} temporary files left, {result.seconds:.0f} s"
    )


def as_json(result: Result) -> dict[str, Any]:
    """The result as data."""
    return {
        "version": mlximpl.__version__,
        "seed": result.seed,
        "passed": not result.failed,
        "kills": result.kills,
        "stages": dict(sorted(result.stages.items())),
        "held": dict(sorted(result.held.items())),
        "left_beside": dict(sorted(result.leftovers.items())),
        "failures": result.failures,
        "seconds_of_two_saves": round(result.save_seconds, 4),
        "seconds": round(result.seconds, 1),
    }


def main(arguments: Any) -> int:
    """The verb; returns the exit code."""
    set_device()
    console = Console(stderr=arguments.json)
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=arguments.quiet) as progress:
        bar = progress.add_task("kills", total=arguments.times)
        try:
            result = kill_saves(
                arguments.times, arguments.seed, arguments.directory, advance=lambda: progress.advance(bar)
            )
        except KillError as error:
            print(error, file=sys.stderr)
            return 2
    if arguments.json:
        json.dump(as_json(result), sys.stdout, indent=1)
        print()
    else:
        console.print(stages_table(result))
        for failure in result.failures:
            console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)
        style = "red" if result.failed else "green"
        console.print(summary(result), style=style, highlight=False, soft_wrap=True)
    return 1 if result.failed else 0
