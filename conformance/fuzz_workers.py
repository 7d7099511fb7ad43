"""Processes that judge mutated files: one that dies or hangs is a finding, and another takes its place."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from signal import Signals

from conformance.adapters.surface import set_device
from conformance.file_seeds import Seed
from conformance.fuzz_judge import FOUND, MODES, Finding, Judge, Verdict, case
from conformance.saver import named

SECONDS = 20.0
"""How long a file may take."""
START = 120.0
"""How long a process may take to load the files that are right."""
USELESS = ("crash", "hang", "memory")
"""Findings after which a process is of no more use."""


class FuzzError(Exception):
    """The files that are right cannot be loaded, so nothing can be said of those that are wrong."""


def serve(channel: Connection, loader: str, every: list[Seed], seed: int, directory: str) -> None:
    """Judge the files whose numbers are sent, until None is."""
    try:
        set_device()
        judge = Judge(every, named(loader), Path(directory))
    except Exception as error:
        channel.send(f"{type(error).__name__}: {error}")
        return
    channel.send("")
    while (number := channel.recv()) is not None:
        channel.send(judge.judge(case(every, seed, number)))


class Worker:
    """A process that judges one file at a time, and is started again when it has to be."""

    def __init__(self, loader: str, every: list[Seed], seed: int, seconds: float) -> None:
        self.loader, self.every, self.seed, self.seconds = loader, every, seed, seconds
        self.directory = tempfile.mkdtemp(prefix="fuzz-")
        self.running = False

    def judge(self, number: int) -> Verdict:
        """What the process says of a file, or what became of the process. Raises FuzzError when none can be had."""
        if not self.running:
            self._start()
        try:
            self.channel.send(number)
            if self.channel.poll(self.seconds):
                verdict: Verdict = self.channel.recv()
            else:
                verdict = self._lost(number, "hang", f"not done after {self.seconds:g} s")
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode or 0
            verdict = self._lost(
                number, "crash", f"killed by {Signals(-code).name}" if code < 0 else f"exit code {code}"
            )
        if any(finding.kind in USELESS for finding in verdict.findings):
            self._stop()
        return verdict

    def _lost(self, number: int, kind: str, words: str) -> Verdict:
        mutations = case(self.every, self.seed, number).mutations
        return Verdict(number, mutations, dict.fromkeys(MODES, FOUND), [Finding(kind, words, number)])

    def _start(self) -> None:
        spawn = get_context("spawn")
        self.channel, theirs = spawn.Pipe()
        arguments = (theirs, self.loader, self.every, self.seed, self.directory)
        self.process = spawn.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.running = True
        try:
            failed: str = self.channel.recv() if self.channel.poll(START) else "nothing is heard of the process"
        except (EOFError, ConnectionError):
            failed = "the process has died"
        if failed:
            raise FuzzError(f"the files that are right cannot be loaded: {failed}")

    def _stop(self) -> None:
        if self.running:
            self.process.kill()
            self.process.join()
            self.channel.close()
            self.running = False

    def end(self) -> None:
        """Stop the process and take its files away."""
        self._stop()
        shutil.rmtree(self.directory, ignore_errors=True)


def verdicts(
    every: list[Seed], numbers: Iterable[int], seed: int, jobs: int, loader: str, seconds: float
) -> Iterator[Verdict]:
    """The verdict of each number, in order."""
    idle: SimpleQueue[Worker] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(jobs):
            worker = Worker(loader, every, seed, seconds)
            stack.callback(worker.end)
            idle.put(worker)

        def judged(number: int) -> Verdict:
            worker = idle.get()
            try:
                return worker.judge(number)
            finally:
                idle.put(worker)

        pool = ThreadPoolExecutor(jobs)
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(judged, numbers)
