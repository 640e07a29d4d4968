"""Statistics of channels before calibration, and the rounding cost of channel groups that follows from them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from graphquant.calibration.targets import sites_needing_data
from graphquant.ir import Model, Parameters, TensorRef, channel_axis
from graphquant.numerics import Array, IntType
from graphquant.observers import Sketch, SketchAccumulator
from graphquant.optimize.channel_groups import ChannelConstant, ChannelGroup, find_channel_groups

if TYPE_CHECKING:
    from graphquant.optimize.algorithm import AlgorithmData
    from graphquant.optimize.channel_groups import ChannelLayout
    from graphquant.quantize import Plan, Site

# The next part predicts the rounding noise at the weighted ops of a group as a function of its channel scales.

STEP_VARIANCE_DIVISOR: Final = 12  # a uniform rounding error has a twelfth of the squared step as its power


class ChannelMoments(NamedTuple):
    """Minimum, maximum and mean square of a tensor's observed values by channel, float64 (C,) each."""

    low: Array
    high: Array
    power: Array

    def scaled(self, divisors: Array) -> ChannelMoments:
        """Return the moments after division by `divisors`, (C,)."""
        return ChannelMoments(self.low / divisors, self.high / divisors, self.power / np.square(divisors))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWeight:
    """Weight of a channel group, reduced along the axes that carry no scale."""

    constant: ChannelConstant  # the constant
    magnitudes: Array  # float64, largest absolute values
    squares: Array  # float64, sums of squares, of the same shape
    elements_per_cell: int  # number of elements that each value summarizes
    integer_steps: float | None  # steps from 0 to the largest integer; None for a float weight
    axis: int | None  # axis of its scales; None for one scale

    def cell_factors(self, divisors: Array) -> Array:
        """Factor of each cell if the group is divided by `divisors`, (C,)."""
        expanded = divisors[self.constant.channel_index]
        return np.asarray(expanded if self.constant.reads_group else 1 / expanded)

    def channel_maxima(self, channels: int) -> Array:
        """Largest absolute value per channel, float64 (C,)."""
        maxima = np.zeros(channels)
        np.maximum.at(maxima, np.broadcast_to(self.constant.channel_index, self.magnitudes.shape), self.magnitudes)
        return maxima

    def rounding_noise(self, divisors: Array) -> Array | None:
        """Power of the rounding errors of each cell at its original scale; None if the weight stays float."""
        if self.integer_steps is None:
            return None
        factors = self.cell_factors(divisors)
        scaled = self.magnitudes * factors
        reduced_axes = tuple(axis for axis in range(scaled.ndim) if axis != self.axis)
        step = scaled.max(axis=reduced_axes, keepdims=True) / self.integer_steps if scaled.size else scaled
        return np.asarray(np.square(step / factors) * (self.elements_per_cell / STEP_VARIANCE_DIVISOR))

    def sum_by_channel(self, cell_values: Array, channels: int) -> Array:
        """Sum the values of cells by channel: float64 (C,)."""
        index = np.broadcast_to(self.constant.channel_index, self.magnitudes.shape).reshape(-1)
        return np.bincount(index, np.broadcast_to(cell_values, self.magnitudes.shape).reshape(-1), channels)


def _reduce_group_weight(
    model: Model, constant: ChannelConstant, value: Array, site: Site | None, preserved_axes: Collection[int]
) -> GroupWeight:
    """Reduce a weight along all axes but `preserved_axes`, which carry channels of some group."""
    axis, integer_steps = None, None
    if site is not None and site.axis is not None:
        channel_axis_of_op = channel_axis(model.graphs[constant.use.graph].op(constant.use.op), value.shape)
        axis = channel_axis_of_op if site.view is not None else site.axis % value.ndim
    if site is not None and isinstance(site.scheme.type, IntType):
        low, high = site.scheme.type.limits(narrow=site.scheme.narrow)
        integer_steps = float(high) if low < 0 else (high - low) / 2
    reduced_axes = tuple(index for index in range(value.ndim) if index not in preserved_axes and index != axis)
    absolute = np.abs(value.astype(np.float64))
    return GroupWeight(
        constant=constant,
        magnitudes=absolute.max(axis=reduced_axes, keepdims=True),
        squares=np.square(absolute).sum(axis=reduced_axes, keepdims=True),
        elements_per_cell=math.prod(value.shape[index] for index in reduced_axes),
        integer_steps=integer_steps,
        axis=axis,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingCosts:
    """Inputs of the rounding-cost model of one channel group."""

    group: ChannelGroup  # the channel group
    moments: Mapping[TensorRef, ChannelMoments]  # moments of its quantized tensors and of the inputs of weighted ops
    step_counts: Mapping[TensorRef, float]  # number of quantization steps of each quantized tensor
    reading_weights: Sequence[GroupWeight]  # weights that multiply the group
    producing_weights: Sequence[GroupWeight]  # weights that produce the group

    def total_error(self, divisors: Array) -> float:
        """Predict the error power at the outputs of the group's weighted ops, relative to their signal power, summed.

        `divisors`, float64 (C,), divide the channels.
        """
        channels, total = self.group.channels, 0.0
        tensor_by_use = {use: tensor for tensor, uses in self.group.weight_uses.items() for use in uses}
        tensor_noise = {tensor: self._tensor_noise(tensor, divisors) for tensor in self.step_counts}
        shares = np.zeros(channels)
        for weight in self.reading_weights:
            tensor = tensor_by_use[weight.constant.use]
            power = self.moments[tensor].power
            squares = weight.sum_by_channel(weight.squares, channels)
            output_power = float(squares @ power) or 1.0
            shares += squares / output_power
            noise = weight.rounding_noise(divisors)
            if noise is not None:
                total += float(weight.sum_by_channel(noise, channels) @ power) / output_power
            if tensor in tensor_noise:
                total += tensor_noise[tensor] * float(squares @ np.square(divisors)) / output_power
        for tensor, noise_power in tensor_noise.items():
            if tensor not in self.group.weight_uses:
                total += noise_power * float(shares @ np.square(divisors))
        mean = np.mean([moments.power for moments in self.moments.values()], axis=0)
        for weight in self.producing_weights:
            noise = weight.rounding_noise(divisors)
            if noise is not None:
                weight_power = weight.sum_by_channel(weight.squares, channels)
                lost_share = weight.sum_by_channel(noise, channels) / np.where(weight_power > 0, weight_power, 1)
                total += float(shares @ (mean * np.minimum(lost_share, 1)))
        return total

    def _tensor_noise(self, tensor: TensorRef, divisors: Array) -> float:
        """Power of a tensor's rounding errors at the original scale."""
        scaled = self.moments[tensor].scaled(divisors)
        step = (max(scaled.high.max(), 0) - min(scaled.low.min(), 0)) / self.step_counts[tensor]
        return float(step * step / STEP_VARIANCE_DIVISOR)


HAS_FIXED_RANGE: Final = "one of its tensors has a given range instead of an observed one"

MIN_FINE_BITS, FINE_MANTISSA_BITS, COARSE_MANTISSA_BITS = 8, 10, 7
"""Bit width above which histograms are fine, and mantissa bits of fine and coarse histograms."""


@dataclass(slots=True, kw_only=True)
class ChannelStatistics:
    """Model and plan with statistics of the channel groups."""

    model: Model  # the prepared model
    plan: Plan  # its plan
    groups: list[ChannelGroup]  # channel groups of the model
    weights: dict[int, list[GroupWeight]] = field(default_factory=dict)  # weights of each group, by index of the group
    moments: dict[TensorRef, ChannelMoments] = field(default_factory=dict)  # moments of the groups' tensors
    sites: dict[TensorRef, list[Site]] = field(default_factory=dict)  # sites that quantize each tensor

    def find_obstacle(self, group: ChannelGroup) -> str:
        """Return the reason why a group cannot be scaled, or ""."""
        if group.obstacle:
            return group.obstacle
        observed_sites = {id(site) for site in sites_needing_data(self.plan)}
        fixed_sites = (
            site
            for tensor in group.tensors
            for site in self.sites.get(tensor, ())
            if id(site) not in observed_sites and site.scheme.range != "dynamic" and site.clone_of is None
        )
        return HAS_FIXED_RANGE if any(fixed_sites) else ""

    def rounding_costs(self, number: int, group: ChannelGroup) -> RoundingCosts | None:
        """Make the rounding-cost model of group `number`, or a part of it; None without samples."""
        step_counts: dict[TensorRef, float] = {}
        for tensor in group.tensors:
            for site in self.sites.get(tensor, ()):
                dtype = site.scheme.type
                if isinstance(dtype, IntType) and site.axis is None:
                    low, high = dtype.limits(narrow=site.scheme.narrow)
                    step_counts[tensor] = min(step_counts.get(tensor, math.inf), float(high - low))
        needed_tensors = dict.fromkeys((*step_counts, *group.weight_uses))
        if not group.weight_uses or any(tensor not in self.moments for tensor in needed_tensors):
            return None
        group_uses = {constant.use for constant in group.constants}
        weights = [weight for weight in self.weights[number] if weight.constant.use in group_uses]
        return RoundingCosts(
            group=group,
            moments={tensor: self.moments[tensor] for tensor in needed_tensors},
            step_counts=step_counts,
            reading_weights=[weight for weight in weights if weight.constant.reads_group and weight.constant.is_weight],
            producing_weights=[weight for weight in weights if not weight.constant.reads_group],
        )


def collect_static_statistics(model: Model, plan: Plan) -> ChannelStatistics:
    """Collect the statistics that need no run of the model: channel groups, and their weights reduced to cells.

    Raises a ModelError if a weight cannot be read.
    """
    statistics = ChannelStatistics(model=model, plan=plan, groups=find_channel_groups(model))
    for site in plan.sites:
        if not site.parameter:
            statistics.sites.setdefault(site.tensor, []).append(site)
    site_by_use = {use: site for site in plan.sites for use in site.uses}
    parameters, preserved_axes = Parameters(model), defaultdict[TensorRef, set[int]](set)
    for group in statistics.groups:
        for constant in group.constants:
            axes = (axis for axis, size in enumerate(constant.channel_index.shape) if size > 1)
            preserved_axes[constant.tensor].update(axes)
    for number, group in enumerate(statistics.groups):
        statistics.weights[number] = []
        for constant in group.constants:
            tensor = model.graphs[constant.use.graph].source_of(constant.use)
            value = None if tensor is None else parameters.value(tensor)
            if value is not None and (constant.is_weight or constant.is_scale):
                weight_site, axes_to_keep = site_by_use.get(constant.use), preserved_axes[constant.tensor]
                weight = _reduce_group_weight(model, constant, value, weight_site, axes_to_keep)
                statistics.weights[number].append(weight)
    return statistics


def observe_channels(statistics: ChannelStatistics, groups: Sequence[ChannelGroup], samples: AlgorithmData) -> None:
    """Add the moments of some groups, measured on the samples of the optimization algorithms.

    Raises a ModelError if the model cannot be run.
    """
    layouts = {
        tensor: (layout, group.channels)
        for group in groups
        for tensor, layout in group.tensors.items()
        if tensor in group.weight_uses or tensor in statistics.sites
    }
    moments_by_tensor = defaultdict[TensorRef, list[ChannelMoments]](list)
    for values_by_tensor in samples.observe(statistics.model, layouts):
        for tensor, values in values_by_tensor.items():
            run_moments = (measure_channel_moments(value, *layouts[tensor]) for value in values)
            moments_by_tensor[tensor].extend(moments for moments in run_moments if moments is not None)
    for tensor, tensor_moments in moments_by_tensor.items():
        if tensor_moments:
            low, high, power = (np.stack(column) for column in zip(*tensor_moments, strict=True))
            statistics.moments[tensor] = ChannelMoments(low.min(0), high.max(0), power.mean(0))


def sketch_sample_ranges(model: Model, plan: Plan, samples: AlgorithmData) -> dict[TensorRef, Sketch]:
    """Sketch the values that calibration would observe on the samples of the optimization algorithms.

    Raises a ModelError if the model cannot be run.
    """
    accumulators: dict[TensorRef, SketchAccumulator] = {}
    for site in sites_needing_data(plan):
        bits = FINE_MANTISSA_BITS if site.scheme.type.bits > MIN_FINE_BITS else COARSE_MANTISSA_BITS
        accumulators[site.tensor] = SketchAccumulator(site.axis, 0 if site.axis is not None else bits)
    observed: dict[TensorRef, None] = {}
    for values_by_tensor in samples.observe(model, accumulators):
        observed |= dict.fromkeys(values_by_tensor)
        for tensor, values in values_by_tensor.items():
            for value in values:
                if value.size:
                    accumulators[tensor].add(value)
                    accumulators[tensor].close_block()
    return {tensor: accumulators[tensor].to_sketch() for tensor in observed}


def measure_channel_moments(value: Array, layout: ChannelLayout, channels: int) -> ChannelMoments | None:
    """Moments of one run; None if the number of channels differs or values are not finite."""
    if value.ndim < -layout.axis or not value.size or value.shape[layout.axis] % (channels * layout.block):
        return None
    channels_last = np.moveaxis(value, layout.axis, -1)
    split = channels_last.reshape(-1, value.shape[layout.axis] // (channels * layout.block), channels, layout.block)
    rows = np.moveaxis(split, 2, -1).reshape(-1, channels)
    if not np.isfinite(rows).all():
        return None
    return ChannelMoments(
        rows.min(0).astype(np.float64),
        rows.max(0).astype(np.float64),
        np.einsum("rc,rc->c", rows, rows, dtype=np.float64) / len(rows),
    )


def largest_magnitudes(moments: Sequence[ChannelMoments]) -> Array:
    """Largest absolute values of the channels over several tensors, (C,)."""
    return np.asarray(
        np.maximum.reduce([np.maximum(-tensor_moments.low, tensor_moments.high) for tensor_moments in moments])
    )
