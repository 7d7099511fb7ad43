"""`python -m conformance [run|replay|record|lint|fuzz|kill-saves|files-bench|bench|zoo]`.

Exit codes: 0 all agree; 1 a divergence, a golden or a check that fails; 2 the call, a file or an implementation is
unusable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.adapters.base import AdapterError
from conformance.adapters.registry import IMPLEMENTATIONS
from conformance.trace import TraceError

ROOT = Path(__file__).resolve().parent.parent
VERBS = ("run", "replay", "record", "lint", "fuzz", "kill-saves", "files-bench", "bench", "zoo")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    whole = argparse.ArgumentParser(prog="python -m conformance", description=__doc__.splitlines()[0])
    verbs = whole.add_subparsers(dest="verb", required=True)

    run = verbs.add_parser("run", help="goldens, then random sequences (the default verb)")
    _implementation(run)
    run.add_argument("--sequences", type=_count, default=4320, help="random sequences (default: %(default)s)")
    run.add_argument(
        "--seed",
        type=int,
        default=0,
        help="with the same code and Hypothesis the same seed gives the same run (default: 0)",
    )
    run.add_argument("--jobs", type=_count, default=None, help="processes (default: one a core, 4 at most)")
    run.add_argument("--expected", type=Path, default=None, help="a strict list of expected failures")
    run.add_argument("--directory", type=Path, default=Path(".divergences"), help="where traces are saved")
    run.add_argument("--json", action="store_true", help="print one JSON object, progress on stderr")
    run.add_argument("--quiet", action="store_true", help="no progress")

    replay = verbs.add_parser("replay", help="run one trace file step by step")
    _implementation(replay)
    replay.add_argument("trace", type=Path)
    replay.add_argument("--json", action="store_true")

    record = verbs.add_parser("record", help="record the goldens from the mlx-lm that is installed")
    record.add_argument("only", nargs="*", help="parts of names; all without")
    record.add_argument("--directory", type=Path, default=ROOT / "goldens")

    lint = verbs.add_parser("lint", help="check the files under goldens/ against their format")
    lint.add_argument("--directory", type=Path, default=ROOT / "goldens")

    fuzz = verbs.add_parser("fuzz", help="load mutated files: an equal cache or the refusal, and nothing else")
    fuzz.add_argument("--files", type=_count, default=10_000, help="mutated files (default: %(default)s)")
    fuzz.add_argument("--seed", type=int, default=0, help="the same seed and code give the same files (default: 0)")
    fuzz.add_argument("--only", type=int, default=None, help="the file of this number alone, as a finding names it")
    fuzz.add_argument("--jobs", type=_count, default=None, help="processes (default: one a core, 4 at most)")
    _findings(fuzz)

    kill = verbs.add_parser("kill-saves", help="kill a process at random points of a save: the file stays whole")
    kill.add_argument("--times", type=_count, default=200, help="kills (default: %(default)s)")
    kill.add_argument("--seed", type=int, default=0, help="of the points (default: 0)")
    _findings(kill)

    files = verbs.add_parser("files-bench", help="sizes and reload times of files, beside mlx-lm's")
    files.add_argument("--json", action="store_true", help="print one JSON object")

    bench = verbs.add_parser("bench", help="every operation's time and memory, beside mlx-lm's and a floor")
    bench.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names of cases; all without")
    bench.add_argument("--size", choices=("tiny", "small", "large"), default=None, help="default: as the device is")
    bench.add_argument("--rounds", type=_count, default=None, metavar="N", help="counted rounds (default: the size's)")
    bench.add_argument("--seed", type=int, default=0, help="of the order in each round (default: 0)")
    bench.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw cost against size instead, numbers beside")
    bench.add_argument("--json", action="store_true", help="print one JSON object, progress on stderr")

    zoo = verbs.add_parser("zoo", help="mlx-lm's models and generators on mlx-lm's caches and on mlximpl's")
    zoo.add_argument("families", nargs="*", help="parts of names; all without")
    zoo.add_argument("--schedules", nargs="+", default=[], metavar="NAME", help="parts of names; all without")
    zoo.add_argument("--random", type=_count, default=None, metavar="N", help="N schedules drawn at random instead")
    zoo.add_argument("--seed", type=int, default=0, help="of the first of them (default: 0)")
    zoo.add_argument("--jobs", type=_count, default=None, help="processes (default: one a core, 4 at most)")
    zoo.add_argument("--json", action="store_true", help="print one JSON object, progress on stderr")
    zoo.add_argument("--quiet", action="store_true", help="no progress")
    return whole


def _findings(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--directory", type=Path, default=Path(".divergences"), help="where files of findings are kept")
    verb.add_argument("--json", action="store_true", help="print one JSON object, progress on stderr")
    verb.add_argument("--quiet", action="store_true", help="no progress")


def _implementation(verb: argparse.ArgumentParser) -> None:
    names = ", ".join(["reference", *IMPLEMENTATIONS])
    verb.add_argument("--impl", default="mlximpl", help=f"what is tested: {names} (default: mlximpl)")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return number


def main(argv: Sequence[str]) -> int:
    """Run a verb and return the exit code."""
    words = list(argv)
    if not words or (words[0] not in VERBS and words[0] not in ("-h", "--help")):
        words.insert(0, "run")
    arguments = parser().parse_args(words)
    try:
        if arguments.verb == "run":
            from conformance import run

            arguments.jobs = arguments.jobs or run.default_jobs()
            return run.main(arguments)
        if arguments.verb == "replay":
            from conformance import replay

            return replay.main(arguments)
        if arguments.verb == "record":
            from conformance import record

            return record.main(arguments.directory, arguments.only)
        if arguments.verb == "lint":
            from conformance import lint

            return lint.main(arguments.directory)
        if arguments.verb == "fuzz":
            from conformance import fuzz, run

            arguments.jobs = arguments.jobs or run.default_jobs()
            return fuzz.main(arguments)
        if arguments.verb == "kill-saves":
            from conformance import kill_saves

            return kill_saves.main(arguments)
        if arguments.verb == "files-bench":
            from conformance import files_bench

            return files_bench.main(arguments)
        if arguments.verb == "bench":
            from conformance.bench import run as bench

            return bench.main(arguments)
        from conformance import run
        from conformance.zoo import run as zoo

        arguments.jobs = arguments.jobs or run.default_jobs()
        return zoo.main(arguments)
    except (AdapterError, TraceError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
