"""A histogram read as a distribution: what lies below a value, and what quantizing costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.observers import histogram_kernel
from graphquant.observers.sketch import bin_edges, bin_means

if TYPE_CHECKING:
    from graphquant.numerics import Array, QParams
    from graphquant.observers.sketch import Sketch


DISTRIBUTION_CHUNK = 1 << 17
"""How many numbers are computed with at once, few enough for the temporary arrays to stay in the cache."""

POINT_PIECE_WIDTH = 1e-3
"""Of a step: a piece narrower than that stands for one value and a spread, which is exact but at the border of a cell,
and keeps clear of small differences of large numbers."""

NARROW_PIECE_WIDTH = 1e-9
"""Of its value: a piece narrower than that has no part beyond the border of a cell that would count."""

ROUNDING_SLACK = 1e-9
"""Of sums of squares: more than rounding can make of a difference of such."""


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """One piece per bin, over which the values of the bin are spread evenly.

    A piece lies around the exact mean of its bin and stays within the bin and the tensor's smallest and largest value.
    Where the dropped mantissa bits of a bin add up to a whole multiple of its count, all its values are taken to be the
    same one: so it is for pixels, zeros and single values, and for n different ones by a chance of 1 in n.

    Attributes:
        starts: float64 (K,), ascending: where each piece begins.
        widths: float64 (K,): how wide it is, 0 for one value.
        pieces: float64 (8, K + 1): its center, half its width, how many values it has, and these by its width; then how
            many values the pieces before it have, what they add up to, what their squares do, and how far they are
            spread. In the first rows the last place is empty.
    """

    starts: Array
    widths: Array
    pieces: Array

    @property
    def weights(self) -> Array:
        """How many values each piece has, float64 (K,)."""
        return np.asarray(self.pieces[2, :-1])

    @property
    def cumulative_counts(self) -> Array:
        """How many values the pieces before each have, and all, float64 (K + 1,)."""
        return np.asarray(self.pieces[4])

    @property
    def cumulative_sums(self) -> Array:
        """What these values add up to, float64 (K + 1,)."""
        return np.asarray(self.pieces[5])

    @property
    def cumulative_squares(self) -> Array:
        """What their squares add up to, float64 (K + 1,)."""
        return np.asarray(self.pieces[6])

    @property
    def count(self) -> float:
        """The number of values."""
        return float(self.cumulative_counts[-1])

    @property
    def power(self) -> float:
        """The mean square of the values, in the tensor's unit squared."""
        return float(self.cumulative_squares[-1] / self.count)

    def count_below(self, x: Array) -> Array:
        """How many values are below each of `x`, of the shape of `x`; of the piece around it, the part below."""
        piece = np.searchsorted(self.starts, x) - 1
        piece_index = np.maximum(piece, 0)
        width = self.widths[piece_index]
        share = np.clip((x - self.starts[piece_index]) / np.where(width > 0, width, 1.0), 0.0, 1.0)
        partial_count = np.where(width > 0, share, 1.0) * self.weights[piece_index]
        return np.asarray(self.cumulative_counts[piece_index] + np.where(piece < 0, 0.0, partial_count))

    def value_at_rank(self, rank: float) -> float:
        """The value of a rank among all values in ascending order, from 1 to their number, to within its piece."""
        piece = int(np.searchsorted(self.cumulative_counts[1:], rank))
        fraction = (rank - self.cumulative_counts[piece] - 0.5) / self.weights[piece]
        return float(self.starts[piece] + fraction * self.widths[piece])

    def magnitudes(self) -> Distribution:
        """The distribution of the absolute values."""
        return _build_distribution(
            np.where(self.starts < 0, -(self.starts + self.widths), self.starts), self.widths, self.weights
        )

    def squared_error(self, params: QParams) -> Array:
        """The mean squared error of quantizing by each of the candidates, float64 (C,), in the tensor's unit squared.

        Args:
            params: Scale and zero point of each candidate, (C,).
        """
        scale = params.scale.astype(np.float64)[:, None]
        low, high = (limit - params.zero_point[:, None] for limit in params.type.limits(narrow=params.narrow))
        if histogram_kernel.squared_errors is not None:
            errors = np.empty(scale.shape[0])
            histogram_kernel.squared_errors(self.pieces, np.hstack([scale, low, high]), errors)
            return errors / self.count
        step = max(1, DISTRIBUTION_CHUNK // self.starts.size)
        slices = [slice(first, first + step) for first in range(0, scale.size, step)]
        return np.concatenate(
            [self._squared_error_numpy(scale[candidates], low[candidates], high[candidates]) for candidates in slices]
        )

    def clipping_error(self, params: QParams) -> Array:
        """No more than the part of `squared_error` that comes of values beyond the range; found at once.

        Args:
            params: Scale and zero point of each candidate, (C,).
        """
        scale = params.scale.astype(np.float64)
        low, high = ((limit - params.zero_point) * scale for limit in params.type.limits(narrow=params.narrow))
        below, above = np.maximum(np.searchsorted(self.starts, low) - 1, 0), np.searchsorted(self.starts, high)
        moments = (self.cumulative_counts, self.cumulative_sums, self.cumulative_squares)
        beyond = (
            (low, [values[below] for values in moments]),
            (high, [values[-1] - values[above] for values in moments]),
        )
        error = np.zeros(scale.shape)
        for end, (count, sums, squares) in beyond:
            largest = squares + end * end * count
            error += largest - 2 * end * sums - ROUNDING_SLACK * largest
        return np.asarray(error / self.count)

    def _squared_error_numpy(self, scale: Array, low: Array, high: Array) -> Array:
        """The same for scales (C, 1) and the whole numbers of them that there are, from `low` to `high`, (C, 1)."""
        first, last = np.searchsorted(self.starts, [-scale.min() / 2, scale.min() / 2])
        last = max(last - 1, first)  # the pieces between become zero with all of the scales
        starts, widths, weights = (
            np.delete(values, slice(first, last)) for values in (self.starts, self.widths, self.weights)
        )
        is_point = widths <= POINT_PIECE_WIDTH * scale.min()
        distance = _rounding_distance((starts[is_point] + widths[is_point] / 2) / scale, low, high)
        error = np.einsum("ck,ck,k->c", distance, distance, weights[is_point]) * scale[:, 0] ** 2
        error += (
            (weights[is_point] * np.square(widths[is_point])).sum() / 12
            + self.cumulative_squares[last]
            - self.cumulative_squares[first]
        )
        starts, widths, weights = starts[~is_point], widths[~is_point], weights[~is_point]
        start, end = starts / scale, (starts + widths) / scale
        spread_error = (
            _integrated_squared_distance(end, low, high) - _integrated_squared_distance(start, low, high)
        ) / (end - start)
        return np.asarray((error + np.einsum("ck,k->c", spread_error, weights) * scale[:, 0] ** 2) / self.count)


def _rounding_distance(x: Array, low: Array, high: Array) -> Array:
    """How far `x`, in steps from zero, is from the nearest whole number in [low, high]."""
    return np.asarray(x - np.minimum(np.maximum(np.rint(x), low), high))


def _integrated_squared_distance(x: Array, low: Array, high: Array) -> Array:
    """The integral from zero to `x` of the squared distance: each whole step adds 1/12."""
    distance = _rounding_distance(x, low, high)
    return np.asarray((x - distance) / 12 + distance * distance * distance / 3)


def distribution_of(sketch: Sketch) -> Distribution:
    """The distribution of the finite values of a sketch with a histogram.

    What it says of values is off by no more than a bin is wide, 2**-bits of the value, and mostly by far less, since
    means are exact.
    """
    low, high = (np.clip(end, sketch.low, sketch.high) for end in bin_edges(sketch))
    center = np.clip(bin_means(sketch), low, high)
    is_single_value = sketch.sums % sketch.counts.astype(np.uint64) == 0
    half_width = np.where(is_single_value, 0.0, np.minimum(center - low, high - center))
    return _build_distribution(center - half_width, 2 * half_width, sketch.counts.astype(np.float64))


def _build_distribution(starts: Array, widths: Array, weights: Array) -> Distribution:
    if (np.diff(starts) < 0).any():
        order = np.argsort(starts, kind="stable")
        starts, widths, weights = starts[order], widths[order], weights[order]
    half_widths = widths / 2
    center = starts + half_widths
    spread = np.square(half_widths) / 3
    has_width = widths > NARROW_PIECE_WIDTH * np.abs(center)
    density = np.divide(weights, widths, out=np.zeros(starts.size), where=has_width)
    pieces = np.zeros((8, starts.size + 1))
    pieces[:4, :-1] = center, half_widths, weights, density
    pieces[4, 1:] = weights
    np.multiply(weights, center, out=pieces[5, 1:])
    np.multiply(weights, np.square(center) + spread, out=pieces[6, 1:])
    np.multiply(weights, spread, out=pieces[7, 1:])
    np.cumsum(pieces[4:], axis=1, out=pieces[4:])
    return Distribution(starts, widths, pieces)
