"""Cross-layer equalization: scale channels so that adjacent weights have similar ranges per channel.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.1 and
appendix A: for two layers whose weights of a channel have ranges r1 and r2, the channel is divided by sqrt(r1 / r2).
The rounds repeat over all channel groups until they converge, because a depthwise convolution belongs to two groups.
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
"""Maximum number of rounds."""

CONVERGED_CHANGE: Final = 0.01
"""Change of a factor, in powers of two, that counts as converged."""

HAS_CHANNEL_SCALES: Final = "the weights that make it have a scale for each channel, which evens them out already"

ALREADY_EQUALIZED: Final = "its weights are even already"


def equalization_factors(
    groups: Sequence[ChannelGroup], weights: Mapping[int, Sequence[GroupWeight]]
) -> dict[int, Array]:
    """Compute the divisors of each channel group, float64 (C,), by index of the group.

    Args:
        groups: The channel groups.
        weights: Weights of each group, without those of norms and biases.
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
    """Range of each channel's weights at the present scale, (C,)."""
    magnitudes = weight.magnitudes
    for neighbor_number, neighbor in neighbors:
        if neighbor.magnitudes.shape == magnitudes.shape:
            magnitudes = magnitudes * neighbor.cell_factors(factors[neighbor_number])
    ranges = np.zeros(len(factors[number]))
    np.maximum.at(ranges, np.broadcast_to(weight.constant.channel_index, magnitudes.shape), magnitudes)
    return ranges


def _balancing_factors(makes: Array, reads: Array) -> Array:
    """sqrt(r1 / r2), and 1 for channels that no weight produces or reads."""
    is_balanced = (makes > 0) & (reads > 0)
    return np.sqrt(np.divide(makes, reads, out=np.ones_like(makes), where=is_balanced))
