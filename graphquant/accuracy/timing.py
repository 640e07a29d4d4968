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
"""Seconds that each runs in a round, at least once; the shortest of these runs counts."""

FEWEST, MOST = 9, 41
"""Rounds."""

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


def ratio(one: Run, other: Run, *, seconds: float, clock: Clock = time.perf_counter) -> Ratio:
    """Runs both in turn, in slices of a few runs, each round in the other order; `seconds` in all, if that is enough.

    What else the machine does in a round falls on both, so that ratios of rounds tell more than times do.
    """
    one()
    other()
    end, pairs = clock() + seconds, list[tuple[float, float]]()
    while len(pairs) < FEWEST or (len(pairs) < MOST and clock() < end):
        if len(pairs) % 2:
            second = _least(other, clock)
            pairs.append((_least(one, clock), second))
        else:
            first = _least(one, clock)
            pairs.append((first, _least(other, clock)))
    return _judged(pairs)


def _least(run: Run, clock: Clock) -> float:
    least, end = math.inf, clock() + SLICE
    while True:
        start = clock()
        run()
        now = clock()
        least = min(least, now - start)
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
