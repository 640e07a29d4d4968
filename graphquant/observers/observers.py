"""Observers, each of which chooses a range from the sketch of a tensor; the search of a range with the least cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from graphquant.errors import DataError
from graphquant.numerics import (
    LARGEST_VALUE,
    Array,
    FloatType,
    QParams,
    QType,
    QuantizationGrid,
    Range,
    qparams_from_scale,
)
from graphquant.observers.distribution import Distribution, distribution_of
from graphquant.observers.sketch import SUBNORMAL_EXPONENT, Sketch, coarsen_histogram, inner_bin_ends

ArgumentValues = Mapping[str, float]
RangePicker = Callable[[Sketch, QuantizationGrid, ArgumentValues], Range]
CandidateCost = Callable[[QParams], Array]

NARROW_BITS = 8  # types of up to 8 bits need a histogram of 7 mantissa bits, wider types one of 10

COARSE_SHARES = 2.0 ** -np.concatenate([np.arange(0, 4, 0.5), np.arange(4, 17)])
"""Shares of an end that are tried first: half octaves, then octaves down to 1/65,536."""

REFINEMENTS = tuple(2.0 ** (reach * np.linspace(-1, 1, 17)) for reach in (2**-1, 2**-4, 2**-7, 2**-10))
"""Factors by which the best shares are then multiplied, one row after the other. The last factors differ by 1/10,000.
Errors are flat there, except for tensors whose values are nearly equal."""

FLAT_COST_SHARE = 1e-2  # if the costs of a row differ by less than this share, finer rows are not tried
SMALLEST_DIVISOR = 1e-300  # divisor in place of zero

WINDOW_OCTAVES, WINDOW_POSITIONS = 12, 33
"""Number of power-of-two scales that are tried, from the one that covers all values down, and of positions for each."""

WINDOW_MARGIN = 1 - 2.0**-20
"""Factor that makes a window narrower than its scale allows, so that rounding does not select the next scale."""


class ObserverArgument(NamedTuple):
    """A numeric argument of an observer in rule files. A `default` of None requires a value."""

    description: str
    is_integer: bool = False
    default: float | None = None
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class Observer:
    """A method to choose a range.

    `choose_range` returns the range for a sketch, the grid of the scheme and arguments, or raises a DataError with the
    reason if there is none. An observer that does not need values needs no calibration data; one that does not need a
    histogram uses only the smallest and largest value.
    """

    description: str
    choose_range: RangePicker
    arguments: Mapping[str, ObserverArgument] = field(default_factory=dict)
    needs_values: bool = True
    needs_histogram: bool = False

    @property
    def required_arguments(self) -> tuple[str, ...]:
        """The arguments without a default."""
        return tuple(name for name, argument in self.arguments.items() if argument.default is None)

    def required_bits(self, dtype: QType) -> int:
        """Return the mantissa bits of the histogram that it needs for a type: 0 (no histogram), 7 or 10."""
        return histogram_bits(dtype) if self.needs_histogram else 0


def histogram_bits(dtype: QType) -> int:
    """Return the mantissa bits that a histogram needs for a type. With 7, errors of 16 bits can be 760 times off."""
    return 7 if dtype.bits <= NARROW_BITS else 10


def _observed_range(stats: Sketch) -> Range:
    if stats.empty:
        raise DataError("calibration saw no finite value")
    return Range(stats.low, stats.high)


def _absmax(stats: Sketch, _grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """Return plus and minus the largest magnitude (Krishnamoorthi 2018, "Quantizing deep convolutional networks")."""
    limits = _observed_range(stats)
    largest = np.maximum(np.abs(limits.low), np.abs(limits.high))
    return Range(-largest, largest)


def _mean_minmax(stats: Sketch, _grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """Return the means, over blocks of samples, of the smallest and largest value of each block, correctly rounded.

    NNCF's "mean_min_max" and onnxruntime's MinMax with a moving average do the same with blocks of one sample.
    """
    limits = _observed_range(stats)
    if limits.low.ndim:
        raise DataError("calibration does not collect means over blocks of samples per channel; use minmax")
    if not stats.blocks:
        raise DataError("its statistics have no complete block of samples; calibrate the model again")
    low, high = (total / (stats.blocks << SUBNORMAL_EXPONENT) for total in (stats.low_sum, stats.high_sum))
    return Range(np.array(low), np.array(high))


def _value_distribution(stats: Sketch, dtype: QType, *, uniform_steps: bool = False) -> Distribution:
    """Return the distribution of the values, from a histogram with exactly the bits that the type needs.

    `uniform_steps` raises a DataError for types whose steps differ in size.
    """
    required_bits = _require_histogram(stats, dtype)
    if uniform_steps and isinstance(dtype, FloatType):
        raise DataError(
            f"this observer needs uniform steps, and those of {dtype.name} differ in size;"
            " use minmax, absmax or percentile"
        )
    return distribution_of(coarsen_histogram(stats, required_bits))


def _require_histogram(stats: Sketch, dtype: QType) -> int:
    """Return the mantissa bits of the histogram that the type needs. Raises a DataError if the statistics lack it."""
    _observed_range(stats)
    required_bits = histogram_bits(dtype)
    if stats.low.ndim:
        raise DataError(
            "this observer needs a histogram, and calibration collects only limits per channel;"
            ' use minmax or absmax, or per = "tensor"'
        )
    if not stats.bits:
        raise DataError(
            "this observer needs a histogram, and the statistics have only the smallest and the largest value;"
            " calibrate the model again, or use minmax or absmax"
        )
    if stats.bits < required_bits:
        raise DataError(
            f"its histogram has {stats.bits} mantissa bits, and {dtype.name} needs {required_bits};"
            " calibrate the model again with this scheme, or use minmax or absmax"
        )
    return required_bits


def _percentile(stats: Sketch, grid: QuantizationGrid, arguments: ArgumentValues) -> Range:
    """Return the range that clips 100 - `percentile` percent of the values, half of them at each end.

    A symmetric scheme clips the largest magnitudes. The default is that of onnxruntime's Percentile method, of which
    this is the exact form: each end differs from the value with this rank by at most 2**-7 (2**-10 above 8 bits) of
    the value, and usually by much less, even with large outliers.
    """
    return _range_with_share_outside(
        _value_distribution(stats, grid.type), 1 - arguments["percentile"] / 100, symmetric=grid.symmetric
    )


def _range_with_share_outside(values: Distribution, share_outside: float, *, symmetric: bool) -> Range:
    """Return the range that clips at most a share of the values: half at each end, or the largest magnitudes."""
    outside_count = values.count * share_outside * (1 + 1e-9)  # so that a share of 0.1 clips 1 of 10 values
    if symmetric:
        farthest = values.magnitudes().value_at_rank(values.count - math.floor(outside_count))
        return Range(np.array(-farthest), np.array(farthest))
    outside_per_end = math.floor(outside_count / 2)
    return Range(
        np.array(values.value_at_rank(1 + outside_per_end)),
        np.array(values.value_at_rank(values.count - outside_per_end)),
    )


def _entropy(stats: Sketch, grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """Return the range, of equal magnitudes, with the least information loss, as in TensorRT; see `kl_divergence`.

    The divergence does not depend on how far clipped values are moved. If each end were clipped separately, one could
    move until all its values become zero. TensorRT and onnxruntime clip both ends at one magnitude too.
    """
    values = _value_distribution(stats, grid.type, uniform_steps=True)
    if grid.type.bits > NARROW_BITS:
        raise DataError(
            f"the observer entropy supports types of up to {NARROW_BITS} bits, since {grid.type.name} loses almost no"
            " information with any range; use minmax"
        )
    return _cheapest_range(_observed_range(stats), values.kl_divergence, grid, same_magnitude=True)


def _mse(stats: Sketch, grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """Return the range with the least squared error, including that of clipped values.

    Both ends of an asymmetric scheme are searched (as in Nagel et al. 2021, "A White Paper on Neural Network
    Quantization", section 3.1). On the values themselves, the error is at most 1.05 times the minimum.
    """
    values = _value_distribution(stats, grid.type, uniform_steps=True)
    return _cheapest_range(_observed_range(stats), values.squared_error, grid, floor=values.clipping_error)


def _auto(stats: Sketch, grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """Return the range of least squared error, widened so that at most 1 of 4**(bits - 1) values is clipped.

    Squared error treats values as independent. Rounding errors nearly are: they differ from value to value, and mostly
    cancel in the sums of the next op. Clipping moves all large values of a channel or sample in the same direction,
    which does not cancel, so it must be rare. The bound follows the squared error of rounding, which falls by 4 with
    each bit: 1 of 16,384 with 8 bits, 1 of 64 with 4 bits, and in practice none with 16 bits, where this is minmax.
    docs/decisions/0012-auto.md has the figures.
    """
    if isinstance(grid.type, FloatType):  # steps are small near 0, where most values are
        return _observed_range(stats)
    max_clipped_share = 4.0 ** (1 - grid.type.bits)
    _require_histogram(stats, grid.type)
    if stats.counts.sum() * max_clipped_share < 1:
        return _observed_range(stats)
    values = _value_distribution(stats, grid.type)
    least_error = _cheapest_range(_observed_range(stats), values.squared_error, grid, floor=values.clipping_error)
    return least_error.union(_range_with_share_outside(values, max_clipped_share, symmetric=grid.symmetric))


def _cheapest_range(
    observed: Range,
    cost: CandidateCost,
    grid: QuantizationGrid,
    *,
    same_magnitude: bool = False,
    floor: CandidateCost | None = None,
) -> Range:
    """Return the range within `observed` and around 0 with the least `cost`; of equal ones the widest.

    Both ends move together first, then each one separately, in coarse to fine steps; `same_magnitude` keeps them at one
    magnitude. If scales are powers of two, so are those of all candidates, and windows of such a scale are tried at
    many positions. `floor` is a lower bound of `cost` that is faster to compute. Candidates whose bound is not below
    the least cost are skipped.
    """
    limits = np.array([min(float(observed.low), 0.0), max(float(observed.high), 0.0)])
    same_magnitude = same_magnitude or grid.symmetric or not limits.all()
    scaled_limits = np.abs(limits).max() * np.array([-1.0, 1.0]) if same_magnitude else limits
    best_shares, least_cost = np.ones(2), np.inf

    def candidates(shares: Array) -> QParams:
        low, high = np.clip(shares * scaled_limits, *limits).T
        return grid.qparams(Range(low, high), axis=0)

    def improve(shares: Array, *, floor: CandidateCost | None = None) -> float:
        """Update the best candidate. Returns the share of the least cost by which costs differ."""
        nonlocal best_shares, least_cost
        shares = np.minimum(shares, 1.0)
        candidate_params = candidates(shares)
        if floor is not None:
            promising = floor(candidate_params) < least_cost
            if not promising.any():
                return 0.0
            shares = shares[promising]
            candidate_params = candidates(shares)
        costs = cost(candidate_params)
        best_index, highest = int(costs.argmin()), costs.max()
        if costs[best_index] < least_cost:
            best_shares, least_cost = shares[best_index], costs[best_index]
        with np.errstate(over="ignore"):  # the least cost can be nearly zero
            return float((highest - least_cost) / max(least_cost, SMALLEST_DIVISOR))

    movable_ends = [np.array([True, True])] if same_magnitude else [np.array([True, False]), np.array([False, True])]
    improve(np.ones((1, 2)))
    improve(np.stack([COARSE_SHARES, COARSE_SHARES], axis=1)[1:], floor=floor)
    for movable in movable_ends if len(movable_ends) > 1 else ():
        improve(np.where(movable, COARSE_SHARES[:, None], best_shares), floor=floor)
    if grid.power_of_two and not same_magnitude:
        improve(_power_of_two_windows(limits, grid) / limits)
    for steps in REFINEMENTS:
        differences = [
            improve(np.where(movable, best_shares * steps[:, None], best_shares)) for movable in movable_ends
        ]
        if max(differences) < FLAT_COST_SHARE:
            break
    return Range(*np.clip(best_shares * scaled_limits, *limits))


def _power_of_two_windows(limits: Array, grid: QuantizationGrid) -> Array:
    """Return ranges around 0 and within `limits`, (C, 2), as wide as a power-of-two scale can represent."""
    low, high = grid.type.limits(narrow=grid.narrow)
    steps = high - low
    top = np.ceil(np.log2(limits[1] / steps - limits[0] / steps))
    bottoms, scales = np.meshgrid(
        limits[0] * np.linspace(0, 1, WINDOW_POSITIONS), 2.0 ** (top - np.arange(WINDOW_OCTAVES))
    )
    tops = np.clip(bottoms + scales * steps * WINDOW_MARGIN, 0, limits[1])
    return np.stack([bottoms.ravel(), tops.ravel()], axis=1)


def _fixed_point(_stats: Sketch, grid: QuantizationGrid, arguments: ArgumentValues) -> Range:
    """Return the range of the type for a scale of 2**exponent: the Q format of fixed-point arithmetic."""
    qmin, qmax = grid.type.limits(narrow=grid.narrow)
    exponent = int(arguments["exponent"])
    low, high = (math.ldexp(limit - grid.type.symmetric_zero_point, exponent) for limit in (qmin, qmax))
    if max(-low, high) > LARGEST_VALUE:
        raise DataError(f"{grid.type.name} with a scale of 2**{exponent} exceeds the range of float32")
    return Range(np.array(low), np.array(high))


def _reject_bias(_stats: Sketch, _grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """Raise a DataError. The solver sets the scale of a bias if its consumer's input and weight have scales."""
    raise DataError(
        "the scale of a bias is the product of the scales of its consumer's input and weight, which are not quantized"
    )


OBSERVERS: dict[str, Observer] = {
    "auto": Observer(
        "least squared error for the scheme's bits, clipping at most 1 of 4**(bits - 1) values",
        _auto,
        needs_histogram=True,
    ),
    "minmax": Observer("smallest and largest value", lambda stats, _grid, _arguments: _observed_range(stats)),
    "absmax": Observer("plus and minus the largest magnitude", _absmax),
    "mean-minmax": Observer("means of the smallest and largest values of blocks of samples", _mean_minmax),
    "percentile": Observer(
        "range of `percentile` percent of the values, clipping as many at each end",
        _percentile,
        {
            "percentile": ObserverArgument(
                "percentage of values inside the range", default=99.999, minimum=50, maximum=100
            )
        },
        needs_histogram=True,
    ),
    "mse": Observer("least squared error for the scheme's bits", _mse, needs_histogram=True),
    "entropy": Observer(
        "least Kullback-Leibler divergence of the quantized values from the values, as in TensorRT",
        _entropy,
        needs_histogram=True,
    ),
    "fixed": Observer(
        "`low` to `high`, which the rule file sets",
        lambda _stats, _grid, arguments: Range(np.array(arguments["low"]), np.array(arguments["high"])),
        {"low": ObserverArgument("lower end, real units"), "high": ObserverArgument("upper end, real units")},
        needs_values=False,
    ),
    "fixed-point": Observer(
        "range of the type for a scale of exactly 2**exponent",
        _fixed_point,
        {"exponent": ObserverArgument("the scale is exactly 2**exponent", is_integer=True, minimum=-126, maximum=126)},
        needs_values=False,
    ),
    "bias": Observer("scale of the consumer's input times scale of its weight", _reject_bias, needs_values=False),
}


class QuantizationCost(NamedTuple):
    """The estimated effect of quantization on the finite values of a tensor."""

    clipped_below: float  # share of values, 0 to 1, that are more than half a step below the lower end
    clipped_above: float  # share of values that are more than half a step above the upper end
    # The mean squared error, in the tensor's unit squared; `power` is the mean square of the values.
    squared_error: float
    power: float

    @property
    def clipped(self) -> float:
        """Share of clipped values, 0 to 1."""
        return self.clipped_below + self.clipped_above

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise ratio in decibels; infinite without an error."""
        if not self.squared_error:
            return math.inf
        return 10 * math.log10(self.power / self.squared_error) if self.power else -math.inf


def least_sqnr(sketch: Sketch, params: QParams) -> float:
    """Return a lower bound in dB of the SQNR that `estimate_cost` estimates; -inf if there is none.

    No value is off by more than half a step or the part of the range that is clipped, and none is smaller than the
    inner end of its bin.
    """
    if params.axis is not None or isinstance(params.type, FloatType) or not sketch.counts.size:
        return -math.inf
    scale, zero = float(params.scale), int(params.zero_point)
    low, high = ((limit - zero) * scale for limit in params.type.limits(narrow=params.narrow))
    largest_error = max(scale / 2, low - float(sketch.low), float(sketch.high) - high)
    inner_ends = inner_bin_ends(sketch).astype(np.float64)
    power = float(np.square(inner_ends) @ sketch.counts) / int(sketch.counts.sum())
    return 10 * math.log10(power) - 20 * math.log10(largest_error) if power else -math.inf


def estimate_cost(sketch: Sketch, params: QParams) -> QuantizationCost | None:
    """Return the cost of `params`, or None if it cannot be estimated.

    It cannot be for ranges per channel, for float types, and from a sketch without a histogram of enough bits.
    """
    bits = histogram_bits(params.type)
    if params.axis is not None or isinstance(params.type, FloatType) or sketch.bits < bits or not sketch.counts.size:
        return None
    values = distribution_of(coarsen_histogram(sketch, bits))
    half = float(params.scale) / 2
    ends = np.array([float(params.range.low) - half, np.nextafter(float(params.range.high) + half, np.inf)])
    below, within = values.count_below(ends)
    candidate = qparams_from_scale(
        params.scale.reshape(1), params.zero_point.reshape(1), params.type, narrow=params.narrow, axis=0
    )
    return QuantizationCost(
        clipped_below=float(below) / values.count,
        clipped_above=max(0.0, 1 - float(within) / values.count),
        squared_error=float(values.squared_error(candidate)[0]),
        power=values.power,
    )
