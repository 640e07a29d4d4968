"""What can be said of all samples there are from those that were measured, with a confidence of 95%.

A search measures up to 24 plans and keeps one for what was measured of it. So each is held to one in 480: then no claim
among them all is wrong more often than one in 20 times (Bonferroni; Angelopoulos et al. 2021, "Learn then Test").
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from graphquant.numerics import Array

PLANS = 24
"""How many plans a search measures at most."""

QUANTILE = NormalDist().inv_cdf(1 - 0.05 / PLANS)
"""What a normal variable stays below with that confidence."""

DECIBEL = 10 / math.log(10)
"""Decibels of a small relative change."""

FEW = 4
"""Samples that it takes to say anything of others."""

TAIL = 5
"""One in so many samples, those with the largest errors, tells how long the tail is; at least three do."""

LONGEST = 3.0
"""The index of a tail is taken to be no larger, since behind a softmax each tail has an end."""


class Spread:
    """How sure the ratio of two sums over samples is: that of squares of an output and of its errors.

    The ratio of sums is as sure as the mean of each sample's share of the errors less its share of the squares (Cochran
    1977, "Sampling Techniques", section 6.3). Errors have long tails, as behind a softmax, where a few samples make
    most of all and are seldom seen. So one sample more is counted that is worse than the worst, by as much as the
    tail is long: by 1 + its index (Hill 1975). Where all samples are alike that changes nothing.
    """

    __slots__ = ("_error", "_power")

    def __init__(self) -> None:
        self._power: list[Array] = []
        self._error: list[Array] = []

    def add(self, power: Array, error: Array) -> None:
        """Adds samples: float64 (N,) each, squares of the output and of its errors."""
        self._power.append(power)
        self._error.append(error)

    @property
    def least(self) -> float:
        """The SQNR in dB that there is at least: infinite where nothing differs, minus that where nobody can say."""
        power, error = self._sorted()
        if error.size < FEW or not math.isfinite(power.sum() + error.sum()):
            return -math.inf
        if not error[0] > 0:
            return math.inf
        power, error = np.append(power, power[0]), np.append(error, (1 + _tail(error)) * error[0])
        power_sum, error_sum = float(power.sum()), float(error.sum())
        if not power_sum > 0:
            return -math.inf
        shares = error / error_sum - power / power_sum
        deviation = DECIBEL * math.sqrt(shares @ shares * error.size / (error.size - 1))
        return DECIBEL * math.log(power_sum / error_sum) - _student(error.size - 2) * deviation

    @property
    def half(self) -> int:
        """How many samples, the worst first, make half of the error."""
        error = self._sorted()[1]
        return int(np.searchsorted(error.cumsum(), error.sum() / 2)) + 1 if error.size else 0

    def _sorted(self) -> tuple[Array, Array]:
        """Squares and errors, the largest error first."""
        power, error = (np.concatenate([*parts, np.zeros(0)]) for parts in (self._power, self._error))
        order = np.argsort(-error, kind="stable")
        return power[order], error[order]


def _tail(error: Array) -> float:
    """The index of the tail of errors, the largest first: how much larger the largest are, as a mean of logarithms."""
    count = max(error.size // TAIL, 3)
    top = error[: count + 1] / error[0]
    return min(float(np.log(top[:-1] / top[-1]).mean()), LONGEST) if top[-1] > 0 else LONGEST


def _student(freedom: int) -> float:
    """What a variable of Student's distribution stays below (Gaver and Kafadar 1984; to 1% from 3 on)."""
    return math.sqrt(freedom * math.expm1(QUANTILE**2 * (freedom - 1.5) / (freedom - 1) ** 2))


def most(lost: int, gained: int, rows: int) -> float:
    """The share of rows that are lost at most, less those that are gained, where so many of `rows` were.

    Both are counts of rare events, Poisson's distribution (Garwood 1936, by Wilson and Hilferty 1931); how unsure
    they are adds up as squares (Zou and Donner 2008).
    """
    more, fewer = _rare(lost + 1, QUANTILE) - lost, gained - _rare(gained, -QUANTILE)
    return min((lost - gained + math.hypot(more, fewer)) / rows, 1.0)


def rows_for(share: float) -> int:
    """How many rows it takes to show that no more than `share` are lost, where none is seen to be."""
    return math.ceil(_rare(1, QUANTILE) / share) if share > 0 else 0


def _rare(count: int, quantile: float) -> float:
    """A bound on the mean of events of which about `count` were seen."""
    return count * max(1 - 1 / (9 * count) + quantile / (3 * math.sqrt(count)), 0.0) ** 3 if count else 0.0


__all__ = ["PLANS", "QUANTILE", "Spread", "most", "rows_for"]
