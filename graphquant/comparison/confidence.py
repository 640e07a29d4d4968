"""What can be said of all samples there are from those that were measured, with a confidence of 95%."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from graphquant.numerics import Array

QUANTILE = 1.6449
"""What a normal variable stays below with that confidence."""

DECIBEL = 10 / math.log(10)
"""Decibels of a small relative change."""


class Spread:
    """How sure the ratio of two sums over samples is: that of squares of an output and of its errors.

    The ratio of sums is as sure as the mean of each sample's share of the errors less its share of the squares (Cochran
    1977, "Sampling Techniques", section 6.3). Errors have long tails, as behind a softmax, where a few samples make
    most of all and are seldom seen: the worst sample counts twice. Only sums are kept.
    """

    __slots__ = ("_sums", "_worst", "count")

    def __init__(self) -> None:
        self.count = 0
        self._sums = np.zeros(5)
        self._worst = (0.0, 0.0)

    def add(self, power: Array, error: Array) -> None:
        """Adds samples: float64 (N,) each, squares of the output and of its errors."""
        self.count += power.size
        at = int(error.argmax())
        self._worst = max(self._worst, (float(error[at]), float(power[at])))
        self._sums += [power.sum(), error.sum(), power @ power, error @ error, power @ error]

    @property
    def least(self) -> float | None:
        """The SQNR in dB that there is at least; None where there are too few samples to say, or nothing differs."""
        off, one = self._worst
        power, error, powers, errors, both = self._sums + np.array([one, off, one * one, off * off, one * off])
        if self.count < 2 or not (0 < power < math.inf and 0 < error < math.inf):  # noqa: PLR2004  # a spread takes two
            return None
        squares = max(errors / error**2 - 2 * both / (power * error) + powers / power**2, 0.0)
        deviation = DECIBEL * math.sqrt(squares * (self.count + 1) / self.count)
        return DECIBEL * math.log(power / error) - _student(self.count - 1) * deviation


def _student(freedom: int) -> float:
    """What a variable of Student's distribution stays below (Abramowitz and Stegun, 26.7.5; to 2% from 2 on)."""
    x = QUANTILE
    terms = (
        x,
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def most(lost: float, gained: float, rows: int) -> float:
    """The share of rows that are lost at most, less those that are gained, where so many of `rows` were.

    Both are counts of rare events, whose spread is their number (the score interval of Poisson's distribution).
    """
    half = QUANTILE**2 / 2
    return min((lost - gained + half + QUANTILE * math.sqrt(lost + gained + half / 2)) / rows, 1.0)


def rows_for(share: float) -> int:
    """How many rows it takes to show that no more than `share` are lost, where none is seen to be."""
    return math.ceil(QUANTILE**2 / share) if share > 0 else 0


__all__ = ["Spread", "most", "rows_for"]
