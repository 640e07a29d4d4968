"""Algorithms that scale channels before calibration: cross-layer equalization and SmoothQuant.

Cross-layer equalization gives adjacent weights similar ranges per channel. Source: Nagel et al. 2019, "Data-Free
Quantization Through Weight Equalization and Bias Correction", section 4.1 and appendix A: for two layers whose weights
of a channel have ranges r1 and r2, the channel is divided by sqrt(r1 / r2). The rounds repeat over all channel groups
until they converge, because a depthwise convolution belongs to two groups.

SmoothQuant uses the common range of an activation's channels evenly, at the expense of the weights. Source: Xiao et al.
2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models", equation 4: a channel
is divided by max|x|^a / max|w|^(1 - a). The paper searches one strength a per model by its accuracy. Here each channel
group gets the strength, of eleven from 0 to 1, with the least predicted rounding noise of activations and weights. The
factors go into the op that produces the channels: a LayerNorm (also decomposed), an RMSNorm, a convolution or a matrix
product. If another op reads these channels too, such as the residual branch of an encoder, a product with the factors
is inserted before the matrix products; the paper leaves these out. Convolutions gain as well as transformers.

If only weights are quantized, in blocks, SmoothQuant divides a channel by the power a of its root mean square, so that
rounding changes the weights of large channels less. Source: Lin et al. 2023, "AWQ: Activation-aware Weight
Quantization for LLM Compression and Acceleration", equation 5, with the mean square in place of the mean magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from graphquant.ir import MATRIX_PRODUCT_KINDS, Parameters, TensorRef, Use, paused_gc
from graphquant.numerics import IntType, dequantize, quantize
from graphquant.observers import search_block_params
from graphquant.optimize.algorithm import AlgorithmData, PreCalibrationState, skipped_algorithm, skipped_target
from graphquant.optimize.channel_groups import (
    INEXACT_SCALING,
    ChannelGroup,
    insert_factor_op,
    nearest_powers_of_two,
    rescale_group,
    scaled_group_result,
)
from graphquant.optimize.channel_statistics import (
    ChannelStatistics,
    GroupWeight,
    RoundingCosts,
    collect_static_statistics,
    largest_magnitudes,
    observe_channels,
)
from graphquant.optimize.weighted_ops import NOT_OBSERVED
from graphquant.quantize.rewrite import FRAME_KINDS

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


SMOOTHQUANT: Final = "smoothquant"

STRENGTHS: Final = tuple(step / 10 for step in range(11))

MIN_GAIN_DB: Final = 1.0  # predicted gain in dB that a channel group needs
MIN_GAIN_WITH_FACTOR_OP_DB: Final = 3.0  # predicted gain in dB if an op must be inserted
MIN_BLOCK_GAIN_DB: Final = 0.05  # predicted gain in dB that weights in blocks need
SMALL_GAIN: Final = "its errors are predicted to fall by less than {} dB"

NO_TENSOR_SCALE: Final = "none of its tensors is quantized with one scale"


class SmoothQuantScaling(NamedTuple):
    """Divisors of a channel group, float64 (C,) powers of two, their strength, and the predicted gain in dB."""

    divisors: Array
    strength: float
    gain: float


@paused_gc()
def apply_smoothquant(state: PreCalibrationState, samples: AlgorithmData | None) -> PreCalibrationState:
    """Scale channels so that activations use their common range evenly."""
    if samples is None:
        return replace(state, results=(*state.results, skipped_algorithm(SMOOTHQUANT, "it needs data")))
    statistics = collect_static_statistics(state.model, state.plan)
    scalable = [_scalable_groups(statistics, group) for group in statistics.groups]
    observe_channels(statistics, [subgroup for subgroups in scalable for subgroup in subgroups], samples)
    edited_model, plan, rescaled, results = state.model.copy(), state.plan, set(state.rescaled_tensors), []
    factor_products = dict(state.factor_products)
    for number, (group, subgroups) in enumerate(zip(statistics.groups, scalable, strict=True)):
        obstacle = statistics.find_obstacle(group)
        min_gain = MIN_GAIN_WITH_FACTOR_OP_DB if obstacle else MIN_GAIN_DB
        if not subgroups:
            results.append(skipped_target(SMOOTHQUANT, group.name, obstacle))
        for subgroup in subgroups:
            costs = statistics.rounding_costs(number, subgroup)
            is_blockwise = costs is not None and not costs.step_counts
            find_scaling = partial(find_block_scaling, statistics) if is_blockwise else find_best_scaling
            scaling = None if costs is None else find_scaling(costs)
            least_gain = MIN_BLOCK_GAIN_DB if is_blockwise else min_gain
            reason = ""
            if scaling is None:
                reason = NOT_OBSERVED if costs is None else NO_TENSOR_SCALE
            elif scaling.gain < least_gain:
                reason = SMALL_GAIN.format(f"{least_gain:g}")
            elif not rescale_group(edited_model, subgroup, scaling.divisors):
                reason = INEXACT_SCALING
            if scaling is None or reason:
                results.append(skipped_target(SMOOTHQUANT, subgroup.name, reason))
                continue
            detail = f"strength {scaling.strength:.1f}, errors predicted to fall by {scaling.gain:.1f} dB"
            if obstacle:
                plan, product = insert_factor_op(edited_model, plan, subgroup, scaling.divisors)
                factor_products[product] = subgroup.start
                detail += ", by an inserted product"
            else:
                rescaled.update(subgroup.tensors)
            rescaled.update(constant.tensor for constant in subgroup.constants)
            results.append(scaled_group_result(SMOOTHQUANT, subgroup.name, scaling.divisors, detail))
    return replace(
        state,
        model=edited_model,
        plan=plan,
        rescaled_tensors=frozenset(rescaled),
        factor_products=factor_products,
        results=(*state.results, *results),
    )


def find_best_scaling(costs: RoundingCosts) -> SmoothQuantScaling | None:
    """Find the best strength for a channel group; None if nothing in it is rounded."""
    channels = costs.group.channels
    activation_maxima = largest_magnitudes([costs.moments[tensor] for tensor in costs.group.weight_uses])
    weight_maxima = np.maximum.reduce([weight.channel_maxima(channels) for weight in costs.reading_weights])
    unscaled_error = costs.total_error(np.ones(channels))
    is_scalable = (activation_maxima > 0) & (weight_maxima > 0)
    if unscaled_error <= 0 or not is_scalable.any():
        return None
    best = SmoothQuantScaling(divisors=np.ones(channels), strength=0.0, gain=0.0)
    for strength in STRENGTHS:
        factors = np.ones(channels)
        factors[is_scalable] = nearest_powers_of_two(
            activation_maxima[is_scalable] ** strength / weight_maxima[is_scalable] ** (1 - strength)
        )
        gain = 10 * np.log10(unscaled_error / costs.total_error(factors))
        if gain > best.gain:
            best = SmoothQuantScaling(divisors=factors, strength=strength, gain=float(gain))
    return best


def find_block_scaling(statistics: ChannelStatistics, costs: RoundingCosts) -> SmoothQuantScaling | None:
    """Find the best strength for weights in blocks that read a channel group; None if there are none.

    The error of the products is predicted from the rounded weights and the mean squares of the channels.
    """
    parameters, weights = Parameters(statistics.model), []
    sites = {use: site for site in statistics.plan.sites for use in site.uses}
    for weight in costs.reading_weights:
        constant, site = weight.constant, sites.get(weight.constant.use)
        value = parameters.value(constant.tensor)
        is_searched = site is not None and site.scheme.observe.name == "mse" and isinstance(site.scheme.type, IntType)
        if site is not None and is_searched and site.axis is not None and site.scheme.block_size and value is not None:
            weights.append((value, constant.channel_index, site.scheme.grid, site.axis, site.scheme.block_size))
    power = np.sum([costs.moments[tensor].power for tensor in costs.group.weight_uses], axis=0)
    if not weights or not (power > 0).any():
        return None

    def error(divisors: Array) -> float:
        total = 0.0
        for value, index, grid, axis, block in weights:
            scaled = value * divisors[index].astype(np.float32)
            params = search_block_params(scaled, grid, axis, block)
            difference = (dequantize(quantize(scaled, params), params) - scaled).astype(np.float64)
            total += float((np.square(difference) * (power / np.square(divisors))[index]).sum())
        return total

    magnitudes = np.sqrt(np.maximum(power, power.max() * 1e-8))
    unscaled_error, best = error(np.ones_like(power)), SmoothQuantScaling(np.ones_like(power), 0.0, 0.0)
    for strength in STRENGTHS[1::2]:
        divisors = nearest_powers_of_two(magnitudes**strength)
        gain = 10 * np.log10(unscaled_error / max(error(divisors), np.finfo(float).tiny)) if unscaled_error else 0.0
        if gain > best.gain:
            best = SmoothQuantScaling(divisors=divisors, strength=strength, gain=float(gain))
    return best


def _scalable_groups(statistics: ChannelStatistics, group: ChannelGroup) -> list[ChannelGroup]:
    """Return the group if it can be scaled, or else the parts that an inserted product can scale."""
    if not statistics.find_obstacle(group):
        return [group]
    branches = []
    for tensor, uses in group.weight_uses.items():
        graph = statistics.model.graphs[tensor.graph]
        constants = [constant for constant in group.constants if constant.use in uses]
        if (
            all(use.graph == tensor.graph and graph.op(use.op).kind in MATRIX_PRODUCT_KINDS for use in uses)
            and len(constants) == len(uses)
            and _has_own_scale(statistics, tensor, uses)
            and not any(op.kind in FRAME_KINDS for op in graph.ops())
        ):
            branch = ChannelGroup(start=tensor, channels=group.channels)
            branch.tensors[tensor], branch.weight_uses[tensor] = group.tensors[tensor], uses
            branch.constants = constants
            branches.append(branch)
    return branches


def _has_own_scale(statistics: ChannelStatistics, tensor: TensorRef, uses: list[Use]) -> bool:
    """Return True if no other site shares the scale of these uses."""
    graphs, plan = statistics.model.graphs, statistics.plan
    input_uses = {use._replace(slot=graphs[use.graph].op(use.op).main_slot) for use in uses}
    tied_uses = {use for site in plan.sites for use in (*site.tie, *filter(None, (site.clone_of,)))}
    reading_sites = [site for site in statistics.sites.get(tensor, ()) if input_uses.intersection(site.uses)]
    return bool(reading_sites) and not any(
        site.tie or site.clone_of or site.has_given_range or tied_uses.intersection(site.uses) for site in reading_sites
    )
