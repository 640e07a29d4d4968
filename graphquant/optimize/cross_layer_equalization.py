"""Channels scaled so that the weights before and behind them have like ranges: cross-layer equalization.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.1 and
appendix A: of two layers with ranges r1 and r2 of a channel's weights, the channel is divided by sqrt(r1 / r2). Rounds
are made over all streams until nothing moves, since a depthwise convolution belongs to two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphquant.ir import TensorRef
    from graphquant.numerics import Array
    from graphquant.optimize.channel_groups import ChannelGroup
    from graphquant.optimize.channel_statistics import GroupWeight


CROSS_LAYER_EQUALIZATION: Final = "cross-layer-equalization"

MAX_ROUNDS: Final = 20
"""Rounds over all streams, at most."""

CONVERGED_CHANGE: Final = 0.01
"""Of a factor, in powers of two, what is no movement."""

HAS_CHANNEL_SCALES: Final = "the weights that make it have a scale for each channel, which evens them out already"

ALREADY_EQUALIZED: Final = "its weights are even already"


def equalization_factors(
    groups: Sequence[ChannelGroup], weights: Mapping[int, Sequence[GroupWeight]]
) -> dict[int, Array]:
    """What to divide the channels of each stream by, float64 (C,), by the stream's number.

    Args:
        groups: The streams to look at.
        weights: The weights beside each, those of norms and biases left out.
    """
    factors = {number: np.ones(group.channels) for number, group in enumerate(groups)}
    weights_by_constant: dict[TensorRef, list[tuple[int, GroupWeight]]] = {}
    for number, group_weights in weights.items():
        for weight in group_weights:
            weights_by_constant.setdefault(weight.constant.tensor, []).append((number, weight))
    for _ in range(MAX_ROUNDS):
        largest_change = 0.0
        for number, group in enumerate(groups):
            side_ranges = [np.zeros(group.channels), np.zeros(group.channels)]
            for weight in weights[number]:
                side = int(weight.constant.reads_group)
                weight_ranges = _channel_ranges(weight, weights_by_constant[weight.constant.tensor], factors, number)
                side_ranges[side] = np.maximum(side_ranges[side], weight_ranges)
            divisors = _balancing_factors(*side_ranges)
            largest_change = max(largest_change, float(np.abs(np.log2(divisors)).max(initial=0)))
            factors[number] = factors[number] * divisors
        if largest_change < CONVERGED_CHANGE:
            break
    return factors


def _channel_ranges(
    weight: GroupWeight, neighbors: Sequence[tuple[int, GroupWeight]], factors: Mapping[int, Array], number: int
) -> Array:
    """The range of each channel's weights as they are scaled so far, (C,)."""
    magnitudes = weight.magnitudes
    for neighbor_number, neighbor in neighbors:
        if neighbor.magnitudes.shape == magnitudes.shape:
            magnitudes = magnitudes * neighbor.cell_factors(factors[neighbor_number])
    ranges = np.zeros(len(factors[number]))
    np.maximum.at(ranges, np.broadcast_to(weight.constant.channel_index, magnitudes.shape), magnitudes)
    return ranges


def _balancing_factors(makes: Array, reads: Array) -> Array:
    """sqrt(r1 / r2), and 1 for channels that are not made or not read."""
    is_balanced = (makes > 0) & (reads > 0)
    return np.sqrt(np.divide(makes, reads, out=np.ones_like(makes), where=is_balanced))
