"""Trials in turn: fresh state for each, timed from a device at rest to a device at rest."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import mlx.core as mx


class TrialError(Exception):
    """A trial raised; says whose and what."""


@dataclass(frozen=True)
class Trial:
    """What is measured once a repetition: `work`, on what `prepare` made for it.

    `prepare` evaluates what it returns. What `work` returns is evaluated within the time. It does its operation
    `repeats` times, and times are told for one.
    """

    prepare: Callable[[], Any]
    work: Callable[[Any], Any]
    repeats: int = 1


@dataclass
class Samples:
    """Milliseconds an operation, and the peak of memory above what was held before, one of each a round."""

    milliseconds: list[float]
    peaks: list[int]
    left: int = 0


@dataclass(frozen=True)
class Figures:
    """Samples in short."""

    milliseconds: float
    """The median."""
    quartiles: tuple[float, float]
    peak: int
    """The median, in bytes above what was held before."""
    left: int
    """Bytes of what the work returned: after a change of rows, the buffers of all layers."""
    rounds: int


def in_turn(trials: Mapping[str, Trial], rounds: int, random: Random) -> dict[str, Samples]:
    """Every trial once a round, in an order drawn anew; what is met in the first round is thrown away.

    Raises:
        TrialError: what a trial raises.
    """
    samples = {name: Samples([], []) for name in trials}
    for turn in range(rounds + 1):
        gc.collect()
        for name in random.sample(list(trials), len(trials)):
            try:
                milliseconds, peak, left = once(trials[name])
            except Exception as error:
                raise TrialError(f"{name}: {type(error).__name__}: {error}") from error
            if turn:
                samples[name].milliseconds.append(milliseconds)
                samples[name].peaks.append(peak)
                samples[name].left = left
    return samples


def once(trial: Trial, clock: Callable[[], float] = time.perf_counter) -> tuple[float, int, int]:
    """One repetition: milliseconds an operation, peak bytes above those held before, bytes of what was returned."""
    state = trial.prepare()
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    collecting = gc.isenabled()
    gc.disable()
    try:
        began = clock()
        result = trial.work(state)
        mx.eval(result)
        mx.synchronize()
        seconds = clock() - began
    finally:
        if collecting:
            gc.enable()
    peak = max(0, mx.get_peak_memory() - before)
    return seconds * 1000 / trial.repeats, peak, _nbytes(result)


def _nbytes(tree: Any) -> int:
    if isinstance(tree, list):
        return sum(_nbytes(each) for each in tree)
    return tree.nbytes if isinstance(tree, mx.array) else 0


def figures(samples: Samples) -> Figures:
    """Medians and quartiles."""
    low, middle, high = spread(samples.milliseconds)
    return Figures(middle, (low, high), int(statistics.median(samples.peaks)), samples.left, len(samples.milliseconds))


def spread(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median, the upper quartile; of one number, that number."""
    if len(numbers) == 1:
        return (numbers[0],) * 3
    low, middle, high = statistics.quantiles(numbers, n=4, method="inclusive")
    return low, middle, high


def quotient(above: Samples, below: Samples) -> tuple[float, tuple[float, float]]:
    """The ratio of the medians, and the quartiles of the ratios of each round."""
    each = [a / b for a, b in zip(above.milliseconds, below.milliseconds, strict=True)]
    low, _, high = spread(each)
    return statistics.median(above.milliseconds) / statistics.median(below.milliseconds), (low, high)
