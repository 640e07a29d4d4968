"""Cross-layer equalization: scale channels so that adjacent weights have similar ranges per channel.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.1 and
appendix A: for two layers whose weights of a channel have ranges r1 and r2, the channel is divided by sqrt(r1 / r2).
The rounds repeat over all channel groups until they converge, because a depthwise convolution belongs to two groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir import TensorRef, paused_gc
from graphquant.optimize.algorithm import AlgorithmData, PreCalibrationState, skipped_target
from graphquant.optimize.channel_groups import (
    INEXACT_SCALING,
    nearest_powers_of_two,
    rescale_group,
    scaled_group_result,
)
from graphquant.optimize.channel_statistics import ChannelStatistics, GroupWeight, collect_static_statistics

if TYPE_CHECKING:
    from graphquant.numerics import Array

CROSS_LAYER_EQUALIZATION: Final = "cross-layer-equalization"

MAX_ROUNDS: Final = 20  # maximum number of rounds
CONVERGED_CHANGE: Final = 0.01  # change of a factor, in powers of two, that counts as converged
HAS_CHANNEL_SCALES: Final = "the weights that produce it have per-channel scales, so equalization has no effect"

ALREADY_EQUALIZED: Final = "its weights are even already"


@paused_gc()
def apply_cross_layer_equalization(state: PreCalibrationState, _: AlgorithmData | None) -> PreCalibrationState:
    """Scale channels so that adjacent weights have similar ranges per channel."""
    statistics = collect_static_statistics(state.model, state.plan)
    results, chosen = [], []
    for number, group in enumerate(statistics.groups):
        reason = statistics.find_obstacle(group)
        if not reason and not any(
            weight.axis is None and weight.integer_steps is not None and not weight.constant.reads_group
            for weight in statistics.weights[number]
        ):
            reason = HAS_CHANNEL_SCALES
        if reason:
            results.append(skipped_target(CROSS_LAYER_EQUALIZATION, group.name, reason))
        else:
            chosen.append(number)
    factors = _equalization_factors(statistics, chosen)
    edited_model, rescaled = state.model.copy(), set(state.rescaled_tensors)
    for number in chosen:
        group, divisors = statistics.groups[number], nearest_powers_of_two(factors[number])
        if np.all(divisors == 1):
            results.append(skipped_target(CROSS_LAYER_EQUALIZATION, group.name, ALREADY_EQUALIZED))
        elif not rescale_group(edited_model, group, divisors):
            results.append(skipped_target(CROSS_LAYER_EQUALIZATION, group.name, INEXACT_SCALING))
        else:
            results.append(scaled_group_result(CROSS_LAYER_EQUALIZATION, group.name, divisors))
            rescaled.update((*group.tensors, *(constant.tensor for constant in group.constants)))
    return replace(state, model=edited_model, rescaled_tensors=frozenset(rescaled), results=(*state.results, *results))


def _equalization_factors(statistics: ChannelStatistics, chosen: Sequence[int]) -> dict[int, Array]:
    """Compute the divisors, float64 (C,), of the groups with the indices `chosen`."""
    factors = {number: np.ones(statistics.groups[number].channels) for number in chosen}
    weights_by_constant: dict[TensorRef, list[tuple[int, GroupWeight]]] = {}
    for number in chosen:
        for weight in statistics.weights[number]:
            weights_by_constant.setdefault(weight.constant.tensor, []).append((number, weight))
    for _ in range(MAX_ROUNDS):
        largest_change = 0.0
        for number in chosen:
            side_ranges = np.zeros((2, len(factors[number])))
            for weight in statistics.weights[number]:
                magnitudes = weight.magnitudes
                for neighbor_number, neighbor in weights_by_constant[weight.constant.tensor]:
                    if neighbor.magnitudes.shape == magnitudes.shape:
                        magnitudes = magnitudes * neighbor.cell_factors(factors[neighbor_number])
                index = np.broadcast_to(weight.constant.channel_index, magnitudes.shape)
                np.maximum.at(side_ranges[int(weight.constant.reads_group)], index, magnitudes)
            divisors = _balancing_factors(*side_ranges)
            largest_change = max(largest_change, float(np.abs(np.log2(divisors)).max(initial=0)))
            factors[number] = factors[number] * divisors
        if largest_change < CONVERGED_CHANGE:
            break
    return factors


def _balancing_factors(makes: Array, reads: Array) -> Array:
    """sqrt(r1 / r2), and 1 for channels that no weight produces or reads."""
    is_balanced = (makes > 0) & (reads > 0)
    return np.sqrt(np.divide(makes, reads, out=np.ones_like(makes), where=is_balanced))
