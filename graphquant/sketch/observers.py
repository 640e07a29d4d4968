"""The observers: each turns the sketch of a tensor into a range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from graphquant.errors import DataError
from graphquant.numerics import LARGEST_VALUE, FloatType, Grid, QType, Range
from graphquant.sketch.accumulator import UNIT
from graphquant.sketch.distribution import Distribution, distribution
from graphquant.sketch.search import cheapest, information_lost
from graphquant.sketch.types import Sketch, coarsen

Arguments = Mapping[str, float]
Pick = Callable[[Sketch, Grid, Arguments], Range]

NARROW_BITS = 8
"""Types of up to that many bits are served by a histogram of 7 mantissa bits, wider ones by one of 10."""


@dataclass(frozen=True, slots=True)
class Argument:
    """A number that a rule file can give an observer.

    Attributes:
        explains: A phrase for people.
        whole: Whether it is a whole number.
        default: What it is where the rule file says nothing; None: it must be given.
        least: The smallest it can be.
        most: The largest.
    """

    explains: str
    whole: bool = False
    default: float | None = None
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Observer:
    """One way to pick a range.

    Attributes:
        explains: One sentence for people.
        pick: (sketch, grid of the scheme, arguments) to the range; raises a DataError that says why there is none.
        arguments: What a scheme can tell it.
        needs_values: Whether it looks at values at all; one that does not needs no data.
        needs_histogram: Whether the smallest and largest value are not enough.
    """

    explains: str
    pick: Pick
    arguments: Mapping[str, Argument] = field(default_factory=dict)
    needs_values: bool = True
    needs_histogram: bool = False

    @property
    def required(self) -> tuple[str, ...]:
        """The arguments that must be given."""
        return tuple(name for name, argument in self.arguments.items() if argument.default is None)

    def bits(self, dtype: QType) -> int:
        """How many mantissa bits the histogram needs for a type: 0 (none is needed), 7 or 10."""
        return histogram_bits(dtype) if self.needs_histogram else 0


def histogram_bits(dtype: QType) -> int:
    """How many mantissa bits a histogram needs for a type: with 7, errors of 16 bits may be estimated 760 times off."""
    return 7 if dtype.bits <= NARROW_BITS else 10


# -- from the ends alone ---------------------------------------------------------------------------


def _seen(stats: Sketch) -> Range:
    if stats.empty:
        raise DataError("no finite value was ever seen")
    return Range(stats.low, stats.high)


def _minmax(stats: Sketch, _grid: Grid, _arguments: Arguments) -> Range:
    """The smallest and the largest value: nothing is clipped (Jacob et al. 2018, section 3.1)."""
    return _seen(stats)


def _absmax(stats: Sketch, _grid: Grid, _arguments: Arguments) -> Range:
    """The same on both sides of zero (Krishnamoorthi 2018, "Quantizing deep convolutional networks", section 2.2)."""
    seen = _seen(stats)
    largest = np.maximum(np.abs(seen.low), np.abs(seen.high))
    return Range(-largest, largest)


def _mean_minmax(stats: Sketch, _grid: Grid, _arguments: Arguments) -> Range:
    """The mean over blocks of samples of each block's smallest and of its largest value, correctly rounded.

    So NNCF's "mean_min_max" and onnxruntime's MinMax with a moving average do, with single samples for blocks.
    """
    seen = _seen(stats)
    if seen.low.ndim:
        raise DataError("means over blocks of samples are not kept per channel; observe it with minmax")
    if not stats.blocks:
        raise DataError("its statistics have no closed block of samples; calibrate it anew")
    low, high = (total / (stats.blocks << UNIT) for total in (stats.low_sum, stats.high_sum))
    return Range(np.array(low), np.array(high))


# -- from the histogram ----------------------------------------------------------------------------


def _values(stats: Sketch, dtype: QType) -> Distribution:
    """The distribution of the values, from a histogram that is fine enough for the type, and no finer."""
    _seen(stats)
    wanted = histogram_bits(dtype)
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
    if stats.bits < wanted:
        raise DataError(
            f"its histogram has {stats.bits} mantissa bits, from which errors of {dtype.name} cannot be estimated;"
            f" calibrate it anew with such a scheme, which keeps {wanted}, or observe it with minmax or absmax"
        )
    return distribution(coarsen(stats, wanted))


def _check_steps(grid: Grid) -> None:
    """Refuses types whose steps differ in size, for observers that count in steps."""
    if isinstance(grid.type, FloatType):
        raise DataError(
            f"the steps of {grid.type.name} differ in size, and this observer looks for the best one;"
            " observe it with minmax, absmax or percentile"
        )


def _percentile(stats: Sketch, grid: Grid, arguments: Arguments) -> Range:
    """The ends that leave out 100 - `percentile` percent of the values, half of them at each end.

    A symmetric scheme leaves out the largest magnitudes. The default is onnxruntime's, of whose Percentile method this
    is the exact form: each end is within 2**-7 of the value that has this rank (2**-10 above 8 bits) and mostly far
    closer, however large the outliers are.
    """
    return _holding(_values(stats, grid.type), 1 - arguments["percentile"] / 100, symmetric=grid.symmetric)


def _holding(known: Distribution, left_out: float, *, symmetric: bool) -> Range:
    """The ends that leave out a share of the values at most, half of it at each; of a symmetric scheme the farthest."""
    outside = known.count * left_out * (1 + 1e-9)  # so that a share of 0.1 is one of ten
    if symmetric:
        farthest = known.magnitudes().ranked(known.count - math.floor(outside))
        return Range(np.array(-farthest), np.array(farthest))
    each = math.floor(outside / 2)
    return Range(np.array(known.ranked(1 + each)), np.array(known.ranked(known.count - each)))


def _entropy(stats: Sketch, grid: Grid, _arguments: Arguments) -> Range:
    """The magnitude beyond which to clip that loses the least information, as in TensorRT; see `information_lost`.

    Divergence does not see how far clipped values are moved, so both ends are cut at the same magnitude, as TensorRT
    and onnxruntime do: one end alone could be drawn in until its values become zeros.
    """
    known = _values(stats, grid.type)
    if grid.type.bits > NARROW_BITS:
        raise DataError(
            f"entropy is for types of up to {NARROW_BITS} bits, as {grid.type.name} loses next to no information"
            " on any range; observe it with minmax"
        )
    _check_steps(grid)
    lost = partial(information_lost, known)
    return cheapest(_seen(stats), lost, grid, together=True)


def _mse(stats: Sketch, grid: Grid, _arguments: Arguments) -> Range:
    """The range whose scale and zero point give the least squared error, clipped values included.

    Both ends of an asymmetric scheme are searched (as in Nagel et al. 2021, "A White Paper on Neural Network
    Quantization", section 3.1). On the values themselves the error is at most 1.05 times the least there is.
    """
    known = _values(stats, grid.type)
    _check_steps(grid)
    return _least_error(stats, known, grid)


def _least_error(stats: Sketch, known: Distribution, grid: Grid) -> Range:
    return cheapest(_seen(stats), known.squared_error, grid, floor=known.clipping_error)


def _auto(stats: Sketch, grid: Grid, _arguments: Arguments) -> Range:
    """The range of least squared error, but wide enough to leave out no more than 1 of 4**(bits - 1) values.

    Squared error takes each value for itself. Rounding errors come near to that: they differ from value to value, and
    mostly cancel in the sums that follow. Clipping moves all large values of a channel or a sample the same way, which
    does not cancel, so it must stay rare. How rare follows the squared error of rounding, which falls by 4 with each
    bit: 1 of 16,384 with 8 bits, 1 of 64 with 4 and none in practice with 16, where this is minmax.
    docs/decisions/0012-auto.md has the figures.
    """
    if isinstance(grid.type, FloatType):  # whose steps are fine where most values are, whatever the largest one is
        return _seen(stats)
    known, rarest = _values(stats, grid.type), 4.0 ** (1 - grid.type.bits)
    if known.count * rarest < 1:
        return _seen(stats)
    return _least_error(stats, known, grid).union(_holding(known, rarest, symmetric=grid.symmetric))


# -- without values --------------------------------------------------------------------------------


def _fixed(_stats: Sketch, _grid: Grid, arguments: Arguments) -> Range:
    """What the rule file says."""
    return Range(np.array(arguments["low"]), np.array(arguments["high"]))


def _fixed_point(_stats: Sketch, grid: Grid, arguments: Arguments) -> Range:
    """All that the type holds with a scale of 2**exponent: the Q format of fixed-point arithmetic."""
    qmin, qmax = grid.type.limits(narrow=grid.narrow)
    exponent = int(arguments["exponent"])
    low, high = (math.ldexp(limit - grid.type.middle, exponent) for limit in (qmin, qmax))
    if max(-low, high) > LARGEST_VALUE:
        raise DataError(f"{grid.type.name} with a scale of 2**{exponent} goes beyond float32")
    return Range(np.array(low), np.array(high))


def _bias(_stats: Sketch, _grid: Grid, _arguments: Arguments) -> Range:
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
        {"percentile": Argument("how many percent of the values are inside", default=99.999, least=50, most=100)},
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
        {"low": Argument("lower end, real units"), "high": Argument("upper end, real units")},
        needs_values=False,
    ),
    "fixed-point": Observer(
        "all that the type can represent with a scale of exactly 2**exponent",
        _fixed_point,
        {"exponent": Argument("the scale is exactly 2**exponent", whole=True, least=-126, most=126)},
        needs_values=False,
    ),
    "bias": Observer("scale of the consumer's input times scale of its weight", _bias, needs_values=False),
}
