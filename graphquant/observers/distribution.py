"""The distribution that a histogram approximates: ranks of values, and errors of quantization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.observers import histogram_kernel
from graphquant.observers.sketch import Sketch, bin_edges, bin_means

if TYPE_CHECKING:
    from graphquant.numerics import Array, QParams

DISTRIBUTION_CHUNK = 1 << 17  # numbers that are processed at a time, so that temporary arrays stay in the cache

POINT_PIECE_WIDTH = 1e-3
"""Share of a step. A narrower piece is treated as one value with a variance, which is exact except at rounding borders,
and avoids small differences of large numbers."""

NARROW_PIECE_WIDTH = 1e-9  # Share of its value. The part of a narrower piece beyond a rounding border is negligible.
STEP_SUBDIVISIONS = 8  # number of parts into which `kl_divergence` divides a step
ROUNDING_SLACK = 1e-9  # share of a sum of squares, larger than the rounding error of a difference of such sums


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """One piece per bin, over which the values of the bin are distributed evenly.

    A piece is centered at the exact mean of its bin, and is within the bin and the tensor's limits. If the sum of the
    dropped mantissa bits of a bin is a multiple of its count, all its values are assumed to be equal. That is correct
    for pixels, zeros and single values, and for n different values wrong with a probability of 1 in n.
    """

    starts: Array  # float64 (K,), ascending: the start of each piece
    widths: Array  # float64 (K,): its width, 0 for one value
    # float64 (8, K + 1): center, half width, number of values and density of each piece; then the cumulative number,
    # sum, sum of squares and variance of all pieces before it. The last column of the first four rows is empty. The C
    # extension reads this layout.
    pieces: Array

    @property
    def weights(self) -> Array:
        """Number of values of each piece, float64 (K,)."""
        return np.asarray(self.pieces[2, :-1])

    @property
    def cumulative_counts(self) -> Array:
        """Number of values before each piece, and of all values, float64 (K + 1,)."""
        return np.asarray(self.pieces[4])

    @property
    def cumulative_squares(self) -> Array:
        """Sum of their squares, float64 (K + 1,)."""
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
        """Return the number of values below each of `x`, of the shape of `x`, with a share of the piece around it."""
        piece = np.searchsorted(self.starts, x) - 1
        piece_index = np.maximum(piece, 0)
        width = self.widths[piece_index]
        share = np.clip((x - self.starts[piece_index]) / np.where(width > 0, width, 1.0), 0.0, 1.0)
        partial_count = np.where(width > 0, share, 1.0) * self.weights[piece_index]
        return np.asarray(self.cumulative_counts[piece_index] + np.where(piece < 0, 0.0, partial_count))

    def value_at_rank(self, rank: float) -> float:
        """Return the value with a rank, from 1 to `count` in ascending order, up to the width of its piece."""
        piece = int(np.searchsorted(self.cumulative_counts[1:], rank))
        fraction = (rank - self.cumulative_counts[piece] - 0.5) / self.weights[piece]
        return float(self.starts[piece] + fraction * self.widths[piece])

    def magnitudes(self) -> Distribution:
        """Return the distribution of the absolute values."""
        return _build_distribution(
            np.where(self.starts < 0, -(self.starts + self.widths), self.starts), self.widths, self.weights
        )

    def squared_error(self, params: QParams) -> Array:
        """Return the mean squared error of each candidate, float64 (C,), in the tensor's unit squared.

        The scale and zero point of `params` have the shape (C,), as in the other methods.
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
        """Return a lower bound of the part of `squared_error` that clipped values cause. It is much faster."""
        scale = params.scale.astype(np.float64)
        low, high = ((limit - params.zero_point) * scale for limit in params.type.limits(narrow=params.narrow))
        below, above = np.maximum(np.searchsorted(self.starts, low) - 1, 0), np.searchsorted(self.starts, high)
        moments = self.pieces[4:7]
        beyond = (
            (low, [values[below] for values in moments]),
            (high, [values[-1] - values[above] for values in moments]),
        )
        error = np.zeros(scale.shape)
        for end, (count, sums, squares) in beyond:
            largest = squares + end * end * count
            error += largest - 2 * end * sums - ROUNDING_SLACK * largest
        return np.asarray(error / self.count)

    def kl_divergence(self, params: QParams) -> Array:
        """Return the Kullback-Leibler divergence of the quantized values from the values of each candidate, in nats.

        Each step is divided into `STEP_SUBDIVISIONS` parts. P is the share of values in each part, those beyond the
        range in the outermost ones. Q has only the number of values in each step, distributed evenly over those of its
        parts that have values. TensorRT does the same with a histogram of 2048 bins and 128 quantized levels (S.
        Migacz, "8-bit Inference with TensorRT", GTC 2017). Its bins are fractions of the largest value, so one outlier
        makes them coarse and smaller ranges have fewer bins. Here they are fractions of the candidate's own step.
        """
        low, high = params.type.limits(narrow=params.narrow)
        borders = np.arange((high - low + 1) * STEP_SUBDIVISIONS + 1) / STEP_SUBDIVISIONS + low - 0.5
        scale, zero = params.scale.astype(np.float64)[:, None], params.zero_point[:, None]
        counts_below = self.count_below((borders - zero) * scale)
        step_counts = np.diff(counts_below, axis=1).reshape(scale.size, -1, STEP_SUBDIVISIONS)
        part_counts = step_counts.copy()
        part_counts[:, 0, 0] += counts_below[:, 0]
        part_counts[:, -1, -1] += self.count - counts_below[:, -1]
        occupied_parts = np.count_nonzero(part_counts, axis=2)
        inside_count = np.maximum(step_counts.sum((1, 2)), 1e-300)[:, None]
        spread = step_counts.sum(2) / np.maximum(occupied_parts, 1) / inside_count
        part_counts /= self.count
        # A part with only clipped values has an infinite divergence.
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(part_counts > 0, part_counts / spread[:, :, None], 1.0)
            return np.asarray((part_counts * np.log(ratio)).sum((1, 2)))

    def _squared_error_numpy(self, scale: Array, low: Array, high: Array) -> Array:
        """Compute `squared_error` in numpy, for scales, smallest and largest integers, (C, 1) each."""
        first, last = np.searchsorted(self.starts, [-scale.min() / 2, scale.min() / 2])
        last = max(last - 1, first)  # the pieces between become zero with every scale
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
    """Return the distance of `x`, in steps, from the nearest integer in [low, high]."""
    return np.asarray(x - np.minimum(np.maximum(np.rint(x), low), high))


def _integrated_squared_distance(x: Array, low: Array, high: Array) -> Array:
    """Return the integral of the squared distance from 0 to `x`. Each whole step adds 1/12."""
    distance = _rounding_distance(x, low, high)
    return np.asarray((x - distance) / 12 + distance * distance * distance / 3)


def distribution_of(sketch: Sketch) -> Distribution:
    """Return the distribution of the finite values of a sketch with a histogram.

    Its values differ from the exact ones by at most the width of a bin, 2**-bits of the value, and usually by much
    less, since means are exact.
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
