"""What rounding costs a stream, of the power of what its weights make of it, as its channels are scaled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from graphquant.ir import channel_axis
from graphquant.numerics import IntType

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from graphquant.corrections.streams import Held, Stream
    from graphquant.ir import Model, TensorRef, Use
    from graphquant.numerics import Array
    from graphquant.plans import Plan, Site

UNIFORM: Final = 12
"""A step's square, over the power of its rounding errors."""


class Seen(NamedTuple):
    """What the channels of a tensor were seen to hold.

    Attributes:
        low: float64 (C,), their smallest values.
        high: Likewise, the largest.
        power: Likewise, the mean squares.
    """

    low: Array
    high: Array
    power: Array

    def scaled(self, by: Array) -> Seen:
        """The same of channels that are divided by `by`, (C,)."""
        return Seen(self.low / by, self.high / by, self.power / np.square(by))


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight beside a stream, as far as its rounding needs it: reduced along axes that no scale lies along.

    Attributes:
        held: Where it is.
        most: float64, largest magnitudes.
        squares: float64, sums of squares, of the same shape.
        count: How many elements each of these is of.
        steps: From 0 to the largest integer; None where it stays float.
        axis: The axis that its scales lie along; None where it has one.
    """

    held: Held
    most: Array
    squares: Array
    count: int
    steps: float | None
    axis: int | None

    def factor(self, by: Array) -> Array:
        """What each part is multiplied by as the stream is divided by `by`, (C,)."""
        wide = by[self.held.places]
        return np.asarray(wide if self.held.reads else 1 / wide)

    def largest(self, channels: int) -> Array:
        """The largest magnitude that belongs to each channel, float64 (C,)."""
        found = np.zeros(channels)
        np.maximum.at(found, np.broadcast_to(self.held.places, self.most.shape), self.most)
        return found

    def noise(self, by: Array) -> Array | None:
        """The power of each part's rounding errors, before anything is scaled; None if it is not rounded.

        Args:
            by: float64 (C,), what the stream is divided by.
        """
        if self.steps is None:
            return None
        factor = self.factor(by)
        scaled = self.most * factor
        others = tuple(axis for axis in range(scaled.ndim) if axis != self.axis)
        step = scaled.max(axis=others, keepdims=True) / self.steps if scaled.size else scaled
        return np.asarray(np.square(step / factor) * (self.count / UNIFORM))

    def sums(self, parts: Array, channels: int) -> Array:
        """What belongs to each channel, of what belongs to each part: float64 (C,)."""
        index = np.broadcast_to(self.held.places, self.most.shape).reshape(-1)
        return np.bincount(index, np.broadcast_to(parts, self.most.shape).reshape(-1), channels)


def weight_of(model: Model, held: Held, value: Array, site: Site | None, kept: Collection[int]) -> Weight:
    """A weight beside a stream; the axes `kept` are not reduced, since channels of some stream lie along them."""
    axis = None
    if site is not None and site.axis is not None:
        own = channel_axis(model.graphs[held.use.graph].op(held.use.op), value.shape)
        axis = own if site.view is not None else site.axis % value.ndim
    gone = tuple(one for one in range(value.ndim) if one not in kept and one != axis)
    size = np.abs(value.astype(np.float64))
    most, squares = size.max(axis=gone, keepdims=True), np.square(size).sum(axis=gone, keepdims=True)
    return Weight(
        held=held,
        most=most,
        squares=squares,
        count=math.prod(value.shape[one] for one in gone),
        steps=_steps(site),
        axis=axis,
    )


def _steps(site: Site | None) -> float | None:
    if site is None or not isinstance(site.scheme.type, IntType):
        return None
    low, high = site.scheme.type.limits(narrow=site.scheme.narrow)
    return float(high) if low < 0 else (high - low) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What rounding costs a stream.

    Attributes:
        stream: The stream.
        seen: What its quantized tensors, and those that are multiplied, were seen to hold.
        levels: The steps of each of its tensors that is quantized.
        reads: The weights that multiply it.
        makes: The weights that make it.
    """

    stream: Stream
    seen: Mapping[TensorRef, Seen]
    levels: Mapping[TensorRef, float]
    reads: Sequence[Weight]
    makes: Sequence[Weight]

    def of(self, by: Array) -> float:
        """The power of errors at what the stream's weights make, of the power of that itself, summed over them.

        Args:
            by: float64 (C,), what each channel is divided by.
        """
        channels, whole = self.stream.channels, 0.0
        read = {use: tensor for tensor, uses in self.stream.multiplied.items() for use in uses}
        steps = {tensor: self._step(tensor, by) for tensor in self.levels}
        shares = np.zeros(channels)
        for weight in self.reads:
            tensor = read[weight.held.use]
            power = self.seen[tensor].power
            squares = weight.sums(weight.squares, channels)
            made = float(squares @ power) or 1.0
            shares += squares / made
            noise = weight.noise(by)
            if noise is not None:
                whole += float(weight.sums(noise, channels) @ power) / made
            if tensor in steps:
                whole += steps[tensor] * float(squares @ np.square(by)) / made
        for tensor, step in steps.items():
            if tensor not in self.stream.multiplied:
                whole += step * float(shares @ np.square(by))
        mean = np.mean([one.power for one in self.seen.values()], axis=0)
        for weight in self.makes:
            noise = weight.noise(by)
            if noise is not None:
                own = weight.sums(weight.squares, channels)
                lost = weight.sums(noise, channels) / np.where(own > 0, own, 1)
                whole += float(shares @ (mean * np.minimum(lost, 1)))
        return whole

    def _step(self, tensor: TensorRef, by: Array) -> float:
        """The power of a tensor's rounding errors, before anything is scaled back."""
        seen = self.seen[tensor].scaled(by)
        step = (max(seen.high.max(), 0) - min(seen.low.min(), 0)) / self.levels[tensor]
        return float(step * step / UNIFORM)


def sites_by_use(plan: Plan) -> dict[Use, Site]:
    """The site of each use."""
    return {use: site for site in plan.sites for use in site.uses}


def levels_of(site: Site) -> float | None:
    """How many steps a tensor's range is cut into; None where that is not known."""
    if not isinstance(site.scheme.type, IntType):
        return None
    low, high = site.scheme.type.limits(narrow=site.scheme.narrow)
    return float(high - low)


__all__ = ["Costs", "Seen", "Weight", "levels_of", "sites_by_use", "weight_of"]
