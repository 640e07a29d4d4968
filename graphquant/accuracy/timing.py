"""How long one thing takes beside another, by running them in turn."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Run = Callable[[], object]
    Clock = Callable[[], float]

SLICE = 0.005
"""Seconds that each runs in a round, at least once; the shortest of some blocks of runs counts."""

BLOCK = 0.0003
"""Seconds of a block, at least one run: reading the clock takes a part of a microsecond."""

FEWEST = 9
"""Rounds at least."""

NARROW = 0.02
"""Where the true ratio is known as closely, no more rounds are needed."""

SURE = 1.96
"""Standard deviations of how many of the rounds' ratios lie below the true median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as long one takes as the other: the median over rounds, and where the true one is, 19 in 20 times.

    Attributes:
        median: The ratio.
        low: It is hardly less.
        high: It is hardly more.
        one: Seconds of one run of the first, median.
        other: Of the second.
    """

    median: float
    low: float
    high: float
    one: float
    other: float


def ratio(one: Run, other: Run, *, seconds: float, clock: Clock = time.process_time) -> Ratio:
    """Runs both in turn, in slices of a few runs, each round in the other order.

    The clock is the processor's, so that what runs on one thread takes as long where other programs want the processor.
    What else the machine does in a round falls on both, so that ratios of rounds tell more than times do.

    Args:
        one: What is timed.
        other: What it is held against.
        seconds: When to end, if the ratio is not known closely before.
        clock: Tells seconds.
    """
    count = [_block(run, clock) for run in (one, other)]
    end, pairs = clock() + seconds, list[tuple[float, float]]()
    while True:
        if len(pairs) % 2:
            second = _least(other, count[1], clock)
            pairs.append((_least(one, count[0], clock), second))
        else:
            first = _least(one, count[0], clock)
            pairs.append((first, _least(other, count[1], clock)))
        if len(pairs) >= FEWEST:
            found = _judged(pairs)
            if clock() >= end or found.high - found.low < NARROW:
                return found


def _block(run: Run, clock: Clock) -> int:
    """How many runs a block has; the first run of all is left out of it."""
    run()
    start = clock()
    run()
    return math.ceil(BLOCK / max(clock() - start, BLOCK / 1000))


def _least(run: Run, count: int, clock: Clock) -> float:
    """Seconds of a run in the shortest block of a slice."""
    least, end = math.inf, clock() + SLICE
    while True:
        start = clock()
        for _ in range(count):
            run()
        now = clock()
        least = min(least, (now - start) / count)
        if now >= end:
            return least


def _judged(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The median with the order statistics between which it lies."""
    ratios = sorted(first / max(second, 1e-12) for first, second in pairs)
    aside = max(math.floor((len(ratios) - SURE * math.sqrt(len(ratios))) / 2), 0)
    return Ratio(
        median=median(ratios),
        low=ratios[aside],
        high=ratios[-1 - aside],
        one=median(first for first, _ in pairs),
        other=median(second for _, second in pairs),
    )


__all__ = ["Ratio", "ratio"]
