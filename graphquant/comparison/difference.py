"""How far two tensors are apart, over as many runs as there are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from graphquant.sketch import kernel

if TYPE_CHECKING:
    from graphquant.numerics import Array

SMALLEST_SUM = 1e-30
"""Sums of squares below that may have lost values that are too small for float32."""


def quiet() -> np.errstate:
    """How numpy takes what is too large for float32 in silence; it takes too long to be had for each tensor."""
    return np.errstate(over="ignore", invalid="ignore")


class Difference:
    """Sums over all pairs of values that were added; float64, in units of the values squared.

    Attributes:
        power: Of the expected values.
        found_power: Of the found values.
        error: Of their differences.
        dot: Of the products of both.
        largest: The largest difference.
        count: How many values.
        bad: How many values are NaN or infinite in one of the two alone.
        problem: Why the two cannot be compared, "" if they can.
    """

    __slots__ = ("bad", "count", "dot", "error", "found_power", "largest", "power", "problem")

    def __init__(self) -> None:
        self.power = self.found_power = self.error = self.dot = self.largest = 0.0
        self.count = self.bad = 0
        self.problem = ""

    def add(self, expected: Array, found: Array, *, full: bool = False) -> None:
        """Adds a pair of arrays of one shape; `full` adds what cosine and largest difference need.

        To be called under `quiet`: sums that float32 cannot hold are made again.
        """
        if expected.shape != found.shape:
            self.problem = self.problem or f"shapes differ: {_written(expected)} and {_written(found)}"
            return
        one, other = expected.reshape(-1), found.reshape(-1)
        self.count += one.size
        if not full and one.dtype == other.dtype == np.float32 and self._quick(one, other):
            return
        for start in range(0, one.size, kernel.SQUARED):
            self._chunk(one[start : start + kernel.SQUARED], other[start : start + kernel.SQUARED], full=full)

    def _quick(self, a: Array, b: Array) -> bool:
        """Adds power and error as float32 gives them, if it holds them."""
        if not (_plain(a) and _plain(b)):
            return False
        power, error = kernel.squares(a, b)
        fits = SMALLEST_SUM < power < math.inf and SMALLEST_SUM < error < math.inf
        if fits:
            self.power += power
            self.error += error
        return fits

    def _chunk(self, a: Array, b: Array, *, full: bool) -> None:
        """Adds the sums of a few values, in float32 where that holds them."""
        narrow = a.dtype == np.float32 and b.dtype == np.float32
        off = b - a if narrow else a
        power, error = float(np.dot(a, a)), float(np.dot(off, off))
        if not (narrow and _held(power, a) and _held(error, off)):
            a, b = self._finite(a.astype(np.float64), b.astype(np.float64))
            off = b - a
            power, error = float(np.dot(a, a)), float(np.dot(off, off))
        self.power += power
        self.error += error
        if full:
            self.found_power += float(np.dot(b, b))
            self.dot += float(np.dot(a, b))
            self.largest = max(self.largest, float(np.abs(off).max(initial=0)))

    def _finite(self, a: Array, b: Array) -> tuple[Array, Array]:
        """The pairs of values that are finite; others are counted unless they are the same."""
        fine = np.isfinite(a) & np.isfinite(b)
        if fine.all():
            return a, b
        self.bad += int((~fine & ~((a == b) | (np.isnan(a) & np.isnan(b)))).sum())
        return a[fine], b[fine]

    @property
    def sqnr(self) -> float:
        """Signal to noise, dB; infinite where nothing differs."""
        if self.bad:
            return -math.inf
        if not self.error:
            return math.inf
        return 10 * math.log10(self.power / self.error) if self.power else -math.inf

    @property
    def cosine(self) -> float:
        """Of the angle between the two, as vectors."""
        if not self.power or not self.found_power:
            return 1.0 if self.power == self.found_power else 0.0
        return min(max(self.dot / math.sqrt(self.power) / math.sqrt(self.found_power), -1.0), 1.0)


def _plain(values: Array) -> bool:
    """Whether a row of values is as it is wanted in C."""
    return values.flags.c_contiguous and values.flags.aligned


def _held(total: float, values: Array) -> bool:
    """Whether a sum of squares in float32 is that of `values`."""
    return SMALLEST_SUM < total < math.inf or (not total and not values.any())


def _written(values: Array) -> str:
    return "[" + ", ".join(map(str, values.shape)) + "]"


__all__ = ["Difference", "quiet"]
