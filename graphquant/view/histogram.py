"""Histograms made ready for drawing: an axis on which heavy tails fit, what lies under each bar, a line of text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.sketch import distribution

if TYPE_CHECKING:
    from graphquant.numerics import Array, QParams
    from graphquant.sketch import Distribution, Sketch

BEND = 0.5 / math.log(10)
"""How soon the axis bends: far beyond the knee each power of ten takes half the length from zero to the knee."""

BULK = 0.999
"""Share of the magnitudes that is drawn on the linear part where no range says how far that goes."""

STEPS = " ▁▂▃▄▅▆▇█"
ASCII_STEPS = " .:-=+*#@"


@dataclass(frozen=True, slots=True)
class Axis:
    """Where real numbers are drawn: evenly up to `knee` on both sides of zero, soon by their logarithm beyond it.

    Attributes:
        low: What stands at the left end.
        high: What stands at the right end; above `low`.
        knee: Where the linear part ends; positive.
    """

    low: float
    high: float
    knee: float

    def place(self, x: Array | float) -> Array:
        """The place of each of `x`: 0 at the left end, 1 at the right one."""
        left, right = _bent(np.array([self.low, self.high]), self.knee)
        return np.asarray((_bent(np.asarray(x, np.float64), self.knee) - left) / (right - left))

    def value(self, place: Array) -> Array:
        """What stands at each place."""
        left, right = _bent(np.array([self.low, self.high]), self.knee)
        bent = left + place * (right - left)
        with np.errstate(over="ignore"):
            far = np.sign(bent) * (1 + BEND * np.expm1(np.maximum(np.abs(bent) - 1, 0) / BEND))
            found = np.where(np.abs(bent) <= 1, bent, far) * self.knee
        return np.asarray(np.clip(found, self.low, self.high))

    def ticks(self, apart: float = 0.08) -> list[float]:
        """Round values to label, `apart` or more: zero, some of the linear part, powers of ten beyond it."""
        step = _round(self.knee / 4)
        found = [0.0] + [sign * step * number for number in range(1, 6) for sign in (1, -1)]
        found = [one for one in found if abs(one) <= self.knee * 1.0001]
        last = math.ceil(math.log10(max(abs(self.low), abs(self.high))) + 1e-9)
        for exponent in range(math.floor(math.log10(self.knee)) + 1, last + 1):
            found += [10.0**exponent, -(10.0**exponent)]
        kept: list[float] = []
        for one in found:
            if self.low <= one <= self.high and all(
                abs(self.place(one) - self.place(other)) >= apart for other in kept
            ):
                kept.append(one)
        return sorted(kept)


def axis_of(sketch: Sketch, params: QParams | None) -> Axis:
    """The axis for a tensor with a histogram: all of its values and the range of `params`, whose end is the knee."""
    low, high = float(sketch.low), float(sketch.high)
    if params is None:
        known = distribution(sketch).magnitudes()
        knee = known.ranked(max(1.0, math.ceil(BULK * known.count)))
    else:
        ends = float(params.range.low.min()), float(params.range.high.max())
        low, high, knee = min(low, ends[0]), max(high, ends[1]), max(-ends[0], ends[1])
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = -1.0, 1.0
    smallest = max(abs(low), abs(high)) * 1e-30
    return Axis(low, high, max(knee, smallest))


def bars(known: Distribution, axis: Axis, number: int) -> Array:
    """How many values lie under each of `number` bars of one width, float64 (number,)."""
    edges = axis.value(np.linspace(0, 1, number + 1))
    below = known.below(edges)
    below[0], below[-1] = 0.0, known.count
    return np.diff(below)


def heights(counts: Array) -> Array:
    """The heights of bars, 0 to 1, on a logarithmic scale, so that one value of a million is still seen."""
    shown = np.where(counts >= 0.5, counts, 0.0)  # noqa: PLR2004  # half a value, from values spread over a bin
    return np.asarray(np.log1p(shown) / math.log1p(max(float(counts.max(initial=0.0)), 1.0)))


def marks(axis: Axis, params: QParams, number: int) -> tuple[int, int]:
    """The first of `number` bars that is inside the range of `params`, and the first behind it."""
    ends = axis.place(np.array([float(params.range.low), float(params.range.high)]))
    first, last = (int(one) for one in np.clip(np.rint(ends * number), 0, number))
    return min(first, number - 1), max(last, min(first, number - 1) + 1)


def line(sketch: Sketch, params: QParams | None, width: int, *, ascii_only: bool = False) -> tuple[str, str, str]:
    """A histogram as text of `width` columns: left of the range, from its "[" to its "]", and right of it.

    Without a range, or with one for each channel, all of it is the middle part.
    """
    if not sketch.bits or not sketch.counts.size:
        return "", "", ""
    params = params if params is not None and params.axis is None else None
    axis = axis_of(sketch, params)
    number = width if params is None else width - 2
    shown = heights(bars(distribution(sketch), axis, number))
    steps = ASCII_STEPS if ascii_only else STEPS
    levels = np.where(shown > 0, np.clip(np.rint(shown * (len(steps) - 1)), 1, len(steps) - 1), 0).astype(int)
    text = "".join(steps[level] for level in levels)
    if params is None:
        return "", text, ""
    first, last = marks(axis, params, number)
    return text[:first], f"[{text[first:last]}]", text[last:]


def _bent(x: Array, knee: float) -> Array:
    """`x` in units of `knee`, and beyond that ever nearer to its logarithm, without a kink."""
    size = np.abs(x) / knee
    beyond = 1 + BEND * np.log1p(np.maximum(size - 1, 0) / BEND)
    return np.asarray(np.where(size <= 1, x / knee, np.sign(x) * beyond))


def _round(step: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((one * power for one in (1, 2, 5) if one * power >= step * 0.9999), 10 * power)
