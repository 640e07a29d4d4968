"""What a scale and zero point cost a tensor, estimated from its sketch: clipped values and squared error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from graphquant.numerics import FloatType, QParams, from_scale
from graphquant.sketch.distribution import distribution
from graphquant.sketch.observers import histogram_bits
from graphquant.sketch.types import Sketch, coarsen


@dataclass(frozen=True, slots=True)
class Cost:
    """What quantizing does to the finite values of a tensor.

    Attributes:
        below: Share of them, 0 to 1, that is cut off at the lower end: more than half a step below it.
        above: The same at the upper end.
        squared_error: The mean squared error, in the tensor's unit squared.
        power: The mean square of the values themselves.
    """

    below: float
    above: float
    squared_error: float
    power: float

    @property
    def clipped(self) -> float:
        """Share of the values, 0 to 1, that is cut off at either end."""
        return self.below + self.above

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise in decibels; infinite where nothing is lost."""
        if not self.squared_error:
            return math.inf
        return 10 * math.log10(self.power / self.squared_error) if self.power else -math.inf


def estimate(sketch: Sketch, params: QParams) -> Cost | None:
    """The cost of `params`; None where it cannot be told.

    So it is where the sketch has no histogram that is fine enough, for ranges per channel and for float types.
    """
    bits = histogram_bits(params.type)
    if params.axis is not None or isinstance(params.type, FloatType) or sketch.bits < bits or not sketch.counts.size:
        return None
    known = distribution(coarsen(sketch, bits))
    half = float(params.scale) / 2
    ends = np.array([float(params.range.low) - half, np.nextafter(float(params.range.high) + half, np.inf)])
    below, within = known.below(ends)
    one = _candidate(params)
    return Cost(
        below=float(below) / known.count,
        above=max(0.0, 1 - float(within) / known.count),
        squared_error=float(known.squared_error(one)[0]),
        power=known.power,
    )


def _candidate(params: QParams) -> QParams:
    """The same as the only one of several candidates."""
    scale, zero = params.scale.reshape(1), params.zero_point.reshape(1)
    return from_scale(scale, zero, params.type, narrow=params.narrow, axis=0)
