"""The observers: each turns the sketch of a tensor into a range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from graphquant.errors import DataError
from graphquant.numerics import LARGEST_VALUE, FloatType, QParams, QType, QuantizationGrid, Range, qparams_from_scale
from graphquant.observers.distribution import Distribution, distribution_of
from graphquant.observers.range_search import cheapest_range, kl_divergence
from graphquant.observers.sketch import SUBNORMAL_EXPONENT, Sketch, coarsen_histogram

ArgumentValues = Mapping[str, float]
RangePicker = Callable[[Sketch, QuantizationGrid, ArgumentValues], Range]

NARROW_BITS = 8
"""Types of up to that many bits are served by a histogram of 7 mantissa bits, wider ones by one of 10."""


@dataclass(frozen=True, slots=True)
class ObserverArgument:
    """A number that a rule file can give an observer.

    Attributes:
        description: A phrase for people.
        is_integer: Whether it is a whole number.
        default: What it is where the rule file says nothing; None: it must be given.
        minimum: The smallest it can be.
        maximum: The largest.
    """

    description: str
    is_integer: bool = False
    default: float | None = None
    minimum: float | None = None
    maximum: float | None = None


@dataclass(frozen=True, slots=True)
class Observer:
    """One way to pick a range.

    Attributes:
        description: One sentence for people.
        choose_range: (sketch, grid of the scheme, arguments) to the range; raises a DataError that says why there is none.
        arguments: What a scheme can tell it.
        needs_values: Whether it looks at values at all; one that does not needs no data.
        needs_histogram: Whether the smallest and largest value are not enough.
    """

    description: str
    choose_range: RangePicker
    arguments: Mapping[str, ObserverArgument] = field(default_factory=dict)
    needs_values: bool = True
    needs_histogram: bool = False

    @property
    def required_arguments(self) -> tuple[str, ...]:
        """The arguments that must be given."""
        return tuple(name for name, argument in self.arguments.items() if argument.default is None)

    def required_bits(self, dtype: QType) -> int:
        """How many mantissa bits the histogram needs for a type: 0 (none is needed), 7 or 10."""
        return histogram_bits(dtype) if self.needs_histogram else 0


def histogram_bits(dtype: QType) -> int:
    """How many mantissa bits a histogram needs for a type: with 7, errors of 16 bits may be estimated 760 times off."""
    return 7 if dtype.bits <= NARROW_BITS else 10


# -- from the ends alone ---------------------------------------------------------------------------


def _observed_range(stats: Sketch) -> Range:
    if stats.empty:
        raise DataError("no finite value was ever seen")
    return Range(stats.low, stats.high)


def _minmax(stats: Sketch, _grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """The smallest and the largest value: nothing is clipped (Jacob et al. 2018, section 3.1)."""
    return _observed_range(stats)


def _absmax(stats: Sketch, _grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """The same on both sides of zero (Krishnamoorthi 2018, "Quantizing deep convolutional networks", section 2.2)."""
    limits = _observed_range(stats)
    largest = np.maximum(np.abs(limits.low), np.abs(limits.high))
    return Range(-largest, largest)


def _mean_minmax(stats: Sketch, _grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """The mean over blocks of samples of each block's smallest and of its largest value, correctly rounded.

    So NNCF's "mean_min_max" and onnxruntime's MinMax with a moving average do, with single samples for blocks.
    """
    limits = _observed_range(stats)
    if limits.low.ndim:
        raise DataError("means over blocks of samples are not kept per channel; observe it with minmax")
    if not stats.blocks:
        raise DataError("its statistics have no closed block of samples; calibrate it anew")
    low, high = (total / (stats.blocks << SUBNORMAL_EXPONENT) for total in (stats.low_sum, stats.high_sum))
    return Range(np.array(low), np.array(high))


# -- from the histogram ----------------------------------------------------------------------------


def _value_distribution(stats: Sketch, dtype: QType) -> Distribution:
    """The distribution of the values, from a histogram that is fine enough for the type, and no finer."""
    _observed_range(stats)
    required_bits = histogram_bits(dtype)
    if stats.low.ndim:
        raise DataError(
            "only smallest and largest values are kept per channel, and this observer needs a histogram;"
            ' observe it with minmax or absmax, or give it one range in all, with per = "tensor"'
        )
    if not stats.bits:
        raise DataError(
            "its statistics have only the smallest and the largest value, and this observer needs a histogram;"
            " calibrate it anew, or observe it with minmax or absmax"
        )
    if stats.bits < required_bits:
        raise DataError(
            f"its histogram has {stats.bits} mantissa bits, from which errors of {dtype.name} cannot be estimated;"
            f" calibrate it anew with such a scheme, which keeps {required_bits}, or observe it with minmax or absmax"
        )
    return distribution_of(coarsen_histogram(stats, required_bits))


def _require_uniform_steps(grid: QuantizationGrid) -> None:
    """Refuses types whose steps differ in size, for observers that count in steps."""
    if isinstance(grid.type, FloatType):
        raise DataError(
            f"the steps of {grid.type.name} differ in size, and this observer looks for the best one;"
            " observe it with minmax, absmax or percentile"
        )


def _percentile(stats: Sketch, grid: QuantizationGrid, arguments: ArgumentValues) -> Range:
    """The ends that leave out 100 - `percentile` percent of the values, half of them at each end.

    A symmetric scheme leaves out the largest magnitudes. The default is onnxruntime's, of whose Percentile method this
    is the exact form: each end is within 2**-7 of the value that has this rank (2**-10 above 8 bits) and mostly far
    closer, however large the outliers are.
    """
    return _range_with_share_outside(
        _value_distribution(stats, grid.type), 1 - arguments["percentile"] / 100, symmetric=grid.symmetric
    )


def _range_with_share_outside(values: Distribution, share_outside: float, *, symmetric: bool) -> Range:
    """The ends that leave out a share of the values at most, half of it at each; of a symmetric scheme the farthest."""
    outside_count = values.count * share_outside * (1 + 1e-9)  # so that a share of 0.1 is one of ten
    if symmetric:
        farthest = values.magnitudes().value_at_rank(values.count - math.floor(outside_count))
        return Range(np.array(-farthest), np.array(farthest))
    outside_per_end = math.floor(outside_count / 2)
    return Range(
        np.array(values.value_at_rank(1 + outside_per_end)),
        np.array(values.value_at_rank(values.count - outside_per_end)),
    )


def _entropy(stats: Sketch, grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """The magnitude beyond which to clip that loses the least information, as in TensorRT; see `information_lost`.

    Divergence does not see how far clipped values are moved, so both ends are cut at the same magnitude, as TensorRT
    and onnxruntime do: one end alone could be drawn in until its values become zeros.
    """
    values = _value_distribution(stats, grid.type)
    if grid.type.bits > NARROW_BITS:
        raise DataError(
            f"entropy is for types of up to {NARROW_BITS} bits, as {grid.type.name} loses next to no information"
            " on any range; observe it with minmax"
        )
    _require_uniform_steps(grid)
    divergence = partial(kl_divergence, values)
    return cheapest_range(_observed_range(stats), divergence, grid, same_magnitude=True)


def _mse(stats: Sketch, grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """The range whose scale and zero point give the least squared error, clipped values included.

    Both ends of an asymmetric scheme are searched (as in Nagel et al. 2021, "A White Paper on Neural Network
    Quantization", section 3.1). On the values themselves the error is at most 1.05 times the least there is.
    """
    values = _value_distribution(stats, grid.type)
    _require_uniform_steps(grid)
    return _least_error_range(stats, values, grid)


def _least_error_range(stats: Sketch, values: Distribution, grid: QuantizationGrid) -> Range:
    return cheapest_range(_observed_range(stats), values.squared_error, grid, floor=values.clipping_error)


def _auto(stats: Sketch, grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """The range of least squared error, but wide enough to leave out no more than 1 of 4**(bits - 1) values.

    Squared error takes each value for itself. Rounding errors come near to that: they differ from value to value, and
    mostly cancel in the sums that follow. Clipping moves all large values of a channel or a sample the same way, which
    does not cancel, so it must stay rare. How rare follows the squared error of rounding, which falls by 4 with each
    bit: 1 of 16,384 with 8 bits, 1 of 64 with 4 and none in practice with 16, where this is minmax.
    docs/decisions/0012-auto.md has the figures.
    """
    if isinstance(grid.type, FloatType):  # whose steps are fine where most values are, whatever the largest one is
        return _observed_range(stats)
    values, max_clipped_share = _value_distribution(stats, grid.type), 4.0 ** (1 - grid.type.bits)
    if values.count * max_clipped_share < 1:
        return _observed_range(stats)
    return _least_error_range(stats, values, grid).union(
        _range_with_share_outside(values, max_clipped_share, symmetric=grid.symmetric)
    )


# -- without values --------------------------------------------------------------------------------


def _fixed(_stats: Sketch, _grid: QuantizationGrid, arguments: ArgumentValues) -> Range:
    """What the rule file says."""
    return Range(np.array(arguments["low"]), np.array(arguments["high"]))


def _fixed_point(_stats: Sketch, grid: QuantizationGrid, arguments: ArgumentValues) -> Range:
    """All that the type holds with a scale of 2**exponent: the Q format of fixed-point arithmetic."""
    qmin, qmax = grid.type.limits(narrow=grid.narrow)
    exponent = int(arguments["exponent"])
    low, high = (math.ldexp(limit - grid.type.symmetric_zero_point, exponent) for limit in (qmin, qmax))
    if max(-low, high) > LARGEST_VALUE:
        raise DataError(f"{grid.type.name} with a scale of 2**{exponent} goes beyond float32")
    return Range(np.array(low), np.array(high))


def _reject_bias(_stats: Sketch, _grid: QuantizationGrid, _arguments: ArgumentValues) -> Range:
    """Never asked: the solver takes the scales of input and weight."""
    raise DataError("a bias has the scales of its consumer's input and weight, and those are not quantized")


OBSERVERS: dict[str, Observer] = {
    "auto": Observer(
        "the least squared error for the scheme's bits, clipping no more than 1 of 4**(bits - 1) values",
        _auto,
        needs_histogram=True,
    ),
    "minmax": Observer("from the smallest to the largest value seen", _minmax),
    "absmax": Observer("plus and minus the largest magnitude seen", _absmax),
    "mean-minmax": Observer("the mean over blocks of samples of their smallest and largest values", _mean_minmax),
    "percentile": Observer(
        "what holds `percentile` percent of the values, leaving out as many at each end",
        _percentile,
        {
            "percentile": ObserverArgument(
                "how many percent of the values are inside", default=99.999, minimum=50, maximum=100
            )
        },
        needs_histogram=True,
    ),
    "mse": Observer("the least squared error for the scheme's bits", _mse, needs_histogram=True),
    "entropy": Observer(
        "the least Kullback-Leibler divergence between the values and their quantized form, as in TensorRT",
        _entropy,
        needs_histogram=True,
    ),
    "fixed": Observer(
        "from `low` to `high`, as the rule says",
        _fixed,
        {"low": ObserverArgument("lower end, real units"), "high": ObserverArgument("upper end, real units")},
        needs_values=False,
    ),
    "fixed-point": Observer(
        "all that the type can represent with a scale of exactly 2**exponent",
        _fixed_point,
        {"exponent": ObserverArgument("the scale is exactly 2**exponent", is_integer=True, minimum=-126, maximum=126)},
        needs_values=False,
    ),
    "bias": Observer("scale of the consumer's input times scale of its weight", _reject_bias, needs_values=False),
}


# What a scale and zero point cost a tensor, estimated from its sketch: clipped values and squared error.


@dataclass(frozen=True, slots=True)
class QuantizationCost:
    """What quantizing does to the finite values of a tensor.

    Attributes:
        clipped_below: Share of them, 0 to 1, that is cut off at the lower end: more than half a step below it.
        clipped_above: The same at the upper end.
        squared_error: The mean squared error, in the tensor's unit squared.
        power: The mean square of the values themselves.
    """

    clipped_below: float
    clipped_above: float
    squared_error: float
    power: float

    @property
    def clipped(self) -> float:
        """Share of the values, 0 to 1, that is cut off at either end."""
        return self.clipped_below + self.clipped_above

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in decibels; infinite where nothing is lost."""
        if not self.squared_error:
            return math.inf
        return 10 * math.log10(self.power / self.squared_error) if self.power else -math.inf


def estimate_cost(sketch: Sketch, params: QParams) -> QuantizationCost | None:
    """The cost of `params`; None where it cannot be told.

    So it is where the sketch has no histogram that is fine enough, for ranges per channel and for float types.
    """
    bits = histogram_bits(params.type)
    if params.axis is not None or isinstance(params.type, FloatType) or sketch.bits < bits or not sketch.counts.size:
        return None
    values = distribution_of(coarsen_histogram(sketch, bits))
    half = float(params.scale) / 2
    ends = np.array([float(params.range.low) - half, np.nextafter(float(params.range.high) + half, np.inf)])
    below, within = values.count_below(ends)
    candidate = _as_single_candidate(params)
    return QuantizationCost(
        clipped_below=float(below) / values.count,
        clipped_above=max(0.0, 1 - float(within) / values.count),
        squared_error=float(values.squared_error(candidate)[0]),
        power=values.power,
    )


def _as_single_candidate(params: QParams) -> QParams:
    """The same as the only one of several candidates."""
    scale, zero_point = params.scale.reshape(1), params.zero_point.reshape(1)
    return qparams_from_scale(scale, zero_point, params.type, narrow=params.narrow, axis=0)
