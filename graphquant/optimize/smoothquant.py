"""SmoothQuant: scale the channels of activations to use their common range evenly, at the expense of the weights.

Source: Xiao et al. 2022, "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models",
equation 4: a channel is divided by max|x|^a / max|w|^(1 - a). The paper searches one strength a per model by its
accuracy. Here each channel group gets the strength, of eleven from 0 to 1, with the least predicted rounding noise of
activations and weights. The factors go into the op that produces the channels: a LayerNorm (also decomposed), an
RMSNorm, a convolution or a matrix product. If another op reads these channels too, such as the residual branch of an
encoder, a product with the factors is inserted before the matrix products; the paper leaves these out. Convolutions
gain as well as transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir import MATRIX_PRODUCT_KINDS, paused_gc
from graphquant.optimize.algorithm import AlgorithmData, PreCalibrationState, skipped_algorithm, skipped_target
from graphquant.optimize.channel_groups import (
    INEXACT_SCALING,
    ChannelGroup,
    insert_factor_op,
    nearest_powers_of_two,
    rescale_group,
    scaled_group_result,
)
from graphquant.optimize.channel_statistics import collect_static_statistics, largest_magnitudes, observe_channels
from graphquant.optimize.weighted_ops import NOT_OBSERVED
from graphquant.quantize.rewrite import FRAME_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.ir import TensorRef, Use
    from graphquant.numerics import Array
    from graphquant.optimize.channel_statistics import ChannelStatistics, RoundingCosts


SMOOTHQUANT: Final = "smoothquant"

STRENGTHS: Final = tuple(step / 10 for step in range(11))

MIN_GAIN_DB: Final = 1.0
"""Predicted gain in dB that a channel group needs."""

MIN_GAIN_WITH_FACTOR_OP_DB: Final = 3.0
"""Predicted gain in dB if an op must be inserted."""

SMALL_GAIN: Final = "its errors are predicted to fall by less than {} dB"

NO_TENSOR_SCALE: Final = "none of its tensors is quantized with one scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothQuantScaling:
    """Scaling of a channel group.

    Attributes:
        divisors: float64 (C,), powers of two.
        strength: Share of the scaling that the weights absorb.
        gain: Predicted error reduction in dB.
    """

    divisors: Array
    strength: float
    gain: float


@paused_gc()
def apply_smoothquant(state: PreCalibrationState, samples: AlgorithmData | None) -> PreCalibrationState:
    """Scale channels so that activations use their common range evenly."""
    if samples is None:
        return state.with_results((*state.results, skipped_algorithm(SMOOTHQUANT, "it needs data")))
    statistics = collect_static_statistics(state.model, state.plan)
    scalable = {number: scalable_groups(statistics, number) for number in range(len(statistics.groups))}
    observe_channels(statistics, [subgroup for subgroups in scalable.values() for subgroup in subgroups], samples)
    edited_model, plan, rescaled, results = state.model.copy(), state.plan, set(state.rescaled_tensors), []
    factor_products = dict(state.factor_products)
    for number, group in enumerate(statistics.groups):
        reason = statistics.find_obstacle(group)
        if not scalable[number]:
            results.append(skipped_target(SMOOTHQUANT, group.name, reason))
        for subgroup in scalable[number]:
            min_gain = MIN_GAIN_WITH_FACTOR_OP_DB if reason else MIN_GAIN_DB
            costs = statistics.rounding_costs(number, subgroup)
            scaling = None if costs is None or not costs.step_counts else find_best_scaling(costs)
            if scaling is None:
                results.append(
                    skipped_target(
                        SMOOTHQUANT,
                        subgroup.name,
                        NOT_OBSERVED if costs is None else NO_TENSOR_SCALE,
                    )
                )
            elif scaling.gain < min_gain:
                results.append(skipped_target(SMOOTHQUANT, subgroup.name, SMALL_GAIN.format(f"{min_gain:.0f}")))
            elif not rescale_group(edited_model, subgroup, scaling.divisors):
                results.append(skipped_target(SMOOTHQUANT, subgroup.name, INEXACT_SCALING))
            else:
                detail = f"strength {scaling.strength:.1f}, errors predicted to fall by {scaling.gain:.1f} dB"
                if reason:
                    plan, product = insert_factor_op(edited_model, plan, subgroup, scaling.divisors)
                    factor_products[product] = subgroup.start
                    detail += ", by an inserted product"
                else:
                    rescaled.update(subgroup.tensors)
                rescaled.update(constant.tensor for constant in subgroup.constants)
                results.append(scaled_group_result(SMOOTHQUANT, subgroup.name, scaling.divisors, detail))
    return PreCalibrationState(
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


def scalable_groups(statistics: ChannelStatistics, number: int) -> list[ChannelGroup]:
    """Return the group if it can be scaled, or else the parts that an inserted product can scale."""
    group = statistics.groups[number]
    return list(_separable_branches(statistics, group)) if statistics.find_obstacle(group) else [group]


def _separable_branches(statistics: ChannelStatistics, group: ChannelGroup) -> Iterator[ChannelGroup]:
    for tensor, uses in group.weight_uses.items():
        graph = statistics.model.graphs[tensor.graph]
        ops = [statistics.model.graphs[use.graph].op(use.op) for use in uses]
        constants = [constant for constant in group.constants if constant.use in uses]
        if (
            all(op.kind in MATRIX_PRODUCT_KINDS for op in ops)
            and all(use.graph == tensor.graph for use in uses)
            and len(constants) == len(uses)
            and _has_own_scale(statistics, tensor, uses)
            and not any(op.kind in FRAME_KINDS for op in graph.ops())
        ):
            branch = ChannelGroup(start=tensor, channels=group.channels)
            branch.tensors[tensor], branch.weight_uses[tensor], branch.constants = (
                group.tensors[tensor],
                uses,
                constants,
            )
            yield branch


def _has_own_scale(statistics: ChannelStatistics, tensor: TensorRef, uses: list[Use]) -> bool:
    """Return True if no other site shares the scale of these uses."""
    input_uses = {
        (use.graph, use.op, statistics.model.graphs[use.graph].op(use.op).roles.index("input")) for use in uses
    }
    tied_uses = {
        use for site in statistics.plan.sites for use in (*site.tie, *([site.clone_of] if site.clone_of else []))
    }
    reading_sites = [
        site for site in statistics.sites.get(tensor, ()) if any(tuple(use) in input_uses for use in site.uses)
    ]
    return bool(reading_sites) and not any(
        site.tie or site.clone_of or site.range or site.scale or any(use in tied_uses for use in site.uses)
        for site in reading_sites
    )
