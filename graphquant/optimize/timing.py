"""Timing of models on this machine, relative to each other."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.ir.types import FORMAT_TRAITS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds
    from graphquant.ir import Model

    TimedRun = Callable[[], object]
    Clock = Callable[[], float]

# Two models are timed in alternation, because the load of the machine then affects both.

SLICE_SECONDS = 0.005
"""Seconds of each slice, at least one run; the shortest block of the slice counts."""

BLOCK_SECONDS = 0.0003
"""Seconds of a block, at least one run. Reading the clock takes a fraction of a microsecond."""

MIN_ROUNDS = 9
"""Minimum number of rounds."""

MAX_RATIO_WIDTH = 0.02
"""Width of the confidence interval at which timing ends."""

CONFIDENCE_DEVIATIONS = 1.96
"""Standard deviations of the number of rounds below the true median, for 95% confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRatio:
    """Median ratio of two run times over all rounds, with a 95% confidence interval.

    Attributes:
        median: The ratio.
        low: Lower end of the interval.
        high: Upper end of the interval.
        first_seconds: Median seconds of one run of the first model.
        second_seconds: Median seconds of one run of the second model.
    """

    median: float
    low: float
    high: float
    first_seconds: float
    second_seconds: float


def measure_time_ratio(
    first_run: TimedRun, second_run: TimedRun, *, seconds: float, clock: Clock = time.process_time
) -> TimeRatio:
    """Time two functions in alternating slices of a few runs; the order alternates too.

    The clock counts processor time, so other programs do not lengthen the runs of one thread. Other load of the machine
    in a round affects both functions, so ratios are more reliable than times.

    Args:
        first_run: Function to time.
        second_run: Function to compare with.
        seconds: Time limit, unless the ratio is known precisely before.
        clock: Clock in seconds.
    """
    block_runs = [_count_block_runs(run, clock) for run in (first_run, second_run)]
    end, pairs = clock() + seconds, list[tuple[float, float]]()
    while True:
        if len(pairs) % 2:
            second_seconds = _shortest_block_seconds(second_run, block_runs[1], clock)
            pairs.append((_shortest_block_seconds(first_run, block_runs[0], clock), second_seconds))
        else:
            first_seconds = _shortest_block_seconds(first_run, block_runs[0], clock)
            pairs.append((first_seconds, _shortest_block_seconds(second_run, block_runs[1], clock)))
        if len(pairs) >= MIN_ROUNDS:
            result = _median_with_bounds(pairs)
            if clock() >= end or result.high - result.low < MAX_RATIO_WIDTH:
                return result


def _count_block_runs(run: TimedRun, clock: Clock) -> int:
    """Number of runs in a block. The first run ever is not timed."""
    run()
    start = clock()
    run()
    return math.ceil(BLOCK_SECONDS / max(clock() - start, BLOCK_SECONDS / 1000))


def _shortest_block_seconds(run: TimedRun, count: int, clock: Clock) -> float:
    """Seconds of a run in the shortest block of a slice."""
    shortest, end = math.inf, clock() + SLICE_SECONDS
    while True:
        start = clock()
        for _ in range(count):
            run()
        now = clock()
        shortest = min(shortest, (now - start) / count)
        if now >= end:
            return shortest


def _median_with_bounds(pairs: Sequence[tuple[float, float]]) -> TimeRatio:
    """Median with its confidence interval from order statistics."""
    ratios = sorted(first / max(second, 1e-12) for first, second in pairs)
    trimmed = max(math.floor((len(ratios) - CONFIDENCE_DEVIATIONS * math.sqrt(len(ratios))) / 2), 0)
    return TimeRatio(
        median=median(ratios),
        low=ratios[trimmed],
        high=ratios[-1 - trimmed],
        first_seconds=median(first for first, _ in pairs),
        second_seconds=median(second for _, second in pairs),
    )


TIMING_SECONDS = 0.6
"""Seconds of one comparison of two models."""

MAX_TIMED_SAMPLES = 8
"""Number of samples per run for models with branches, loops or functions, whose time depends on the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTimer:
    """Timing of the models of one search.

    Attributes:
        source: The float model.
        feeds: Samples of each run.
        as_tflite: True to time TFLite files, which run on zeros.
    """

    source: Model
    feeds: Sequence[Feeds]
    as_tflite: bool

    @property
    def runtime(self) -> str:
        """Name of the runtime, which uses one thread."""
        return FORMAT_TRAITS["tflite"].runtime if self.as_tflite else self.source.traits.runtime

    @property
    def samples(self) -> int:
        """Number of samples per run."""
        return 1 if self.as_tflite else len(self.feeds)

    @classmethod
    def for_data(cls, source: Model, batches: Dataset, *, as_tflite: bool) -> LatencyTimer:
        """Make a timer with one sample, or with several from all over the data if the time depends on the sample.

        Raises:
            DataError: A sample does not fit the model.
        """
        count = min(batches.count, MAX_TIMED_SAMPLES if len(source.reachable_graphs()) > 1 else 1)
        indices = [index * batches.count // count for index in range(count)]
        feeds = [next(batches.feeds_between(index, index + 1)) for index in indices]
        return cls(source=source, feeds=feeds, as_tflite=as_tflite)

    def make_run(self, model: Model) -> TimedRun:
        """Return a function that runs `model` once in a new session."""
        if self.as_tflite:
            from graphquant.formats.tensorflow import prepare_timed_tflite_run

            return prepare_timed_tflite_run(model)
        return formats.format_module(model.format).prepare_timed_run(model, self.feeds)

    def time_ratio(self, run: TimedRun, baseline: TimedRun) -> TimeRatio:
        """Return the time of `run` relative to `baseline`."""
        return measure_time_ratio(run, baseline, seconds=TIMING_SECONDS)

    def median_ratio(self, model: Model, baseline: Model, pairs: int) -> TimeRatio:
        """Return the median ratio of several pairs of new sessions. Memory layout changes times by some percent."""
        ratios = [self.time_ratio(self.make_run(model), self.make_run(baseline)) for _ in range(pairs)]
        return sorted(ratios, key=lambda ratio: ratio.median)[pairs // 2]
