"""A histogram read as a distribution: what lies below a value, and what quantizing costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.sketch import kernel
from graphquant.sketch.types import edges, means

if TYPE_CHECKING:
    from graphquant.numerics import Array, QParams
    from graphquant.sketch.types import Sketch

CHUNK = 1 << 17
"""How many numbers are computed with at once, few enough for the temporary arrays to stay in the cache."""

POINT = 1e-3
"""Of a step: a piece narrower than that stands for one value and a spread, which is exact but at the border of a cell,
and keeps clear of small differences of large numbers."""

NARROW = 1e-9
"""Of its value: a piece narrower than that has no part beyond the border of a cell that would count."""

UNSURE = 1e-9
"""Of sums of squares: more than rounding can make of a difference of such."""


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """One piece per bin, over which the values of the bin are spread evenly.

    A piece lies around the exact mean of its bin and stays within the bin and the tensor's smallest and largest value.
    Where the dropped mantissa bits of a bin add up to a whole multiple of its count, all its values are taken to be the
    same one: so it is for pixels, zeros and single values, and for n different ones by a chance of 1 in n.

    Attributes:
        left: float64 (K,), ascending: where each piece begins.
        width: float64 (K,): how wide it is, 0 for one value.
        pieces: float64 (8, K + 1): its center, half its width, how many values it has, and these by its width; then how
            many values the pieces before it have, what they add up to, what their squares do, and how far they are
            spread. In the first rows the last place is empty.
    """

    left: Array
    width: Array
    pieces: Array

    @property
    def weight(self) -> Array:
        """How many values each piece has, float64 (K,)."""
        return np.asarray(self.pieces[2, :-1])

    @property
    def before(self) -> Array:
        """How many values the pieces before each have, and all, float64 (K + 1,)."""
        return np.asarray(self.pieces[4])

    @property
    def sums(self) -> Array:
        """What these values add up to, float64 (K + 1,)."""
        return np.asarray(self.pieces[5])

    @property
    def squares(self) -> Array:
        """What their squares add up to, float64 (K + 1,)."""
        return np.asarray(self.pieces[6])

    @property
    def count(self) -> float:
        """The number of values."""
        return float(self.before[-1])

    @property
    def power(self) -> float:
        """The mean square of the values, in the tensor's unit squared."""
        return float(self.squares[-1] / self.count)

    def below(self, x: Array) -> Array:
        """How many values are below each of `x`, of the shape of `x`; of the piece around it, the part below."""
        piece = np.searchsorted(self.left, x) - 1
        inside = np.maximum(piece, 0)
        width = self.width[inside]
        share = np.clip((x - self.left[inside]) / np.where(width > 0, width, 1.0), 0.0, 1.0)
        part = np.where(width > 0, share, 1.0) * self.weight[inside]
        return np.asarray(self.before[inside] + np.where(piece < 0, 0.0, part))

    def ranked(self, rank: float) -> float:
        """The value of a rank among all values in ascending order, from 1 to their number, to within its piece."""
        piece = int(np.searchsorted(self.before[1:], rank))
        inside = (rank - self.before[piece] - 0.5) / self.weight[piece]
        return float(self.left[piece] + inside * self.width[piece])

    def magnitudes(self) -> Distribution:
        """The distribution of the absolute values."""
        return _sorted(np.where(self.left < 0, -(self.left + self.width), self.left), self.width, self.weight)

    def squared_error(self, params: QParams) -> Array:
        """The mean squared error of quantizing by each of the candidates, float64 (C,), in the tensor's unit squared.

        Args:
            params: Scale and zero point of each candidate, (C,).
        """
        scale = params.scale.astype(np.float64)[:, None]
        low, high = (limit - params.zero_point[:, None] for limit in params.type.limits(narrow=params.narrow))
        if kernel.squared_errors is not None:
            errors = np.empty(scale.shape[0])
            kernel.squared_errors(self.pieces, np.hstack([scale, low, high]), errors)
            return errors / self.count
        step = max(1, CHUNK // self.left.size)
        parts = [slice(first, first + step) for first in range(0, scale.size, step)]
        return np.concatenate([self._squared(scale[part], low[part], high[part]) for part in parts])

    def clipping_error(self, params: QParams) -> Array:
        """No more than the part of `squared_error` that comes of values beyond the range; found at once.

        Args:
            params: Scale and zero point of each candidate, (C,).
        """
        scale = params.scale.astype(np.float64)
        low, high = ((limit - params.zero_point) * scale for limit in params.type.limits(narrow=params.narrow))
        below, above = np.maximum(np.searchsorted(self.left, low) - 1, 0), np.searchsorted(self.left, high)
        moments = (self.before, self.sums, self.squares)
        beyond = (
            (low, [values[below] for values in moments]),
            (high, [values[-1] - values[above] for values in moments]),
        )
        error = np.zeros(scale.shape)
        for end, (count, sums, squares) in beyond:
            largest = squares + end * end * count
            error += largest - 2 * end * sums - UNSURE * largest
        return np.asarray(error / self.count)

    def _squared(self, scale: Array, low: Array, high: Array) -> Array:
        """The same for scales (C, 1) and the whole numbers of them that there are, from `low` to `high`, (C, 1)."""
        first, last = np.searchsorted(self.left, [-scale.min() / 2, scale.min() / 2])
        last = max(last - 1, first)  # the pieces between become zero with all of the scales
        left, width, weight = (np.delete(part, slice(first, last)) for part in (self.left, self.width, self.weight))
        point = width <= POINT * scale.min()
        away = _distance((left[point] + width[point] / 2) / scale, low, high)
        error = np.einsum("ck,ck,k->c", away, away, weight[point]) * scale[:, 0] ** 2
        error += (weight[point] * np.square(width[point])).sum() / 12 + self.squares[last] - self.squares[first]
        left, width, weight = left[~point], width[~point], weight[~point]
        start, end = left / scale, (left + width) / scale
        evenly = (_area(end, low, high) - _area(start, low, high)) / (end - start)
        return np.asarray((error + np.einsum("ck,k->c", evenly, weight) * scale[:, 0] ** 2) / self.count)


def _distance(x: Array, low: Array, high: Array) -> Array:
    """How far `x`, in steps from zero, is from the nearest whole number in [low, high]."""
    return np.asarray(x - np.minimum(np.maximum(np.rint(x), low), high))


def _area(x: Array, low: Array, high: Array) -> Array:
    """The integral from zero to `x` of the squared distance: each whole step adds 1/12."""
    away = _distance(x, low, high)
    return np.asarray((x - away) / 12 + away * away * away / 3)


def distribution(sketch: Sketch) -> Distribution:
    """The distribution of the finite values of a sketch with a histogram.

    What it says of values is off by no more than a bin is wide, 2**-bits of the value, and mostly by far less, since
    means are exact.
    """
    low, high = (np.clip(end, sketch.low, sketch.high) for end in edges(sketch))
    center = np.clip(means(sketch), low, high)
    same = sketch.sums % sketch.counts.astype(np.uint64) == 0
    half = np.where(same, 0.0, np.minimum(center - low, high - center))
    return _sorted(center - half, 2 * half, sketch.counts.astype(np.float64))


def _sorted(left: Array, width: Array, weight: Array) -> Distribution:
    if (np.diff(left) < 0).any():
        order = np.argsort(left, kind="stable")
        left, width, weight = left[order], width[order], weight[order]
    half = width / 2
    center = left + half
    spread = np.square(half) / 3
    wide = width > NARROW * np.abs(center)
    density = np.divide(weight, width, out=np.zeros(left.size), where=wide)
    pieces = np.zeros((8, left.size + 1))
    pieces[:4, :-1] = center, half, weight, density
    pieces[4, 1:] = weight
    np.multiply(weight, center, out=pieces[5, 1:])
    np.multiply(weight, np.square(center) + spread, out=pieces[6, 1:])
    np.multiply(weight, spread, out=pieces[7, 1:])
    np.cumsum(pieces[4:], axis=1, out=pieces[4:])
    return Distribution(left, width, pieces)
