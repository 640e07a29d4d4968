"""The optimization algorithms by name, before and after calibration.

Before calibration, cross-layer equalization and SmoothQuant scale channels, and weight clipping narrows weight ranges.
All factors are powers of two, which change only the exponents of floats. The function stays equal to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir import check_invariants, paused_gc
from graphquant.numerics import IntType
from graphquant.optimize import bias_correction, cross_layer_equalization, smoothquant, weight_rounding
from graphquant.optimize.algorithm import (
    MIN_GAIN_STANDARD_ERRORS,
    MIN_TARGETED_GAIN_STANDARD_ERRORS,
    AlgorithmResult,
    PostCalibrationAlgorithm,
    WeightEdits,
    apply_validated,
)
from graphquant.optimize.channel_groups import insert_factor_op, nearest_powers_of_two, rescale_group
from graphquant.optimize.channel_statistics import (
    NOT_OBSERVED,
    collect_static_statistics,
    observe_channels,
    sketch_sample_ranges,
)
from graphquant.quantize import solve_scales
from graphquant.quantize.rewrite import IntegerCache
from graphquant.rules import ObserverConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.ir import Model, TensorRef
    from graphquant.numerics import Array
    from graphquant.optimize.algorithm import AlgorithmData
    from graphquant.quantize import Plan, Site, Solution


# Weight clipping replaces the largest absolute value by the range of least squared error.
#
# Source: Banner et al. 2018, "Post Training 4-bit Quantization of Convolutional Networks for Rapid-Deployment", section
# 3. The observer "mse" searches the range on the weight itself, so no distribution is assumed.

WEIGHT_CLIPPING: Final = "weight-clipping"

UNCLIPPED_OBSERVERS: Final = frozenset({"absmax", "minmax"})
"""Observers that clip nothing."""

MAX_CLIPPED_BITS: Final = 8


def clip_weights_in_plan(plan: Plan) -> tuple[Plan, list[AlgorithmResult]]:
    """Give clipped ranges to low-bit weights that have no explicit range. The float function does not change."""
    sites, results = [], []
    for site in plan.sites:
        should_clip = _should_clip_weight(site)
        sites.append(
            replace(site, scheme=replace(site.scheme, observe=ObserverConfig(name="mse"))) if should_clip else site
        )
        if should_clip:
            results.append(
                AlgorithmResult(
                    algorithm=WEIGHT_CLIPPING, target=str(site.tensor), detail="its range has the least squared error"
                )
            )
    return replace(plan, sites=tuple(sites)), results


def _should_clip_weight(site: Site) -> bool:
    dtype = site.scheme.type
    has_explicit_range = site.range is not None or site.scale is not None or site.clone_of is not None
    has_few_bits = isinstance(dtype, IntType) and dtype.bits <= MAX_CLIPPED_BITS
    return (
        site.parameter and has_few_bits and not has_explicit_range and site.scheme.observe.name in UNCLIPPED_OBSERVERS
    )


INEXACT_SCALING: Final = "its values are so large or small that scaling them would not be exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreCalibrationState:
    """Prepared model and plan before calibration, with the changes so far.

    Attributes:
        model: The model with changed weights.
        plan: Its plan.
        rescaled_tensors: Tensors with scaled channels, and the constants that changed with them.
        factor_products: Inserted products, each with the tensor it multiplies.
        results: Results so far.
    """

    model: Model
    plan: Plan
    rescaled_tensors: frozenset[TensorRef] = frozenset()
    factor_products: Mapping[TensorRef, TensorRef] = field(default_factory=dict)
    results: tuple[AlgorithmResult, ...] = ()

    def with_results(self, results: tuple[AlgorithmResult, ...]) -> PreCalibrationState:
        """Return a copy with further results."""
        return replace(self, results=results)

    def plan_without_factors(self, plan: Plan) -> Plan:
        """Convert `plan` to a plan for the model without inserted products."""
        sites = (replace(site, tensor=self.factor_products.get(site.tensor, site.tensor)) for site in plan.sites)
        return replace(plan, sites=tuple(sites)) if self.factor_products else plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PreCalibrationAlgorithm:
    """Optimization algorithm that runs before calibration.

    Attributes:
        purpose: Benefit, for reports.
        apply: Apply the algorithm to a model and its plan; samples may be None.
    """

    purpose: str
    apply: Callable[[PreCalibrationState, AlgorithmData | None], PreCalibrationState]


@paused_gc()
def apply_cross_layer_equalization(state: PreCalibrationState, _: AlgorithmData | None) -> PreCalibrationState:
    """Scale channels so that adjacent weights have similar ranges per channel."""
    statistics = collect_static_statistics(state.model, state.plan)
    results, chosen = [], []
    for number, group in enumerate(statistics.groups):
        reason = statistics.find_obstacle(group)
        producing_weights = [
            weight
            for weight in statistics.weights[number]
            if not weight.constant.reads_group and weight.integer_steps is not None
        ]
        if not reason and not any(weight.axis is None for weight in producing_weights):
            reason = cross_layer_equalization.HAS_CHANNEL_SCALES
        if reason:
            results.append(_skipped_group(cross_layer_equalization.CROSS_LAYER_EQUALIZATION, group.name, reason))
        else:
            chosen.append(number)
    factors = cross_layer_equalization.equalization_factors(
        [statistics.groups[number] for number in chosen],
        {position: statistics.weights[number] for position, number in enumerate(chosen)},
    )
    edited_model = state.model.copy()
    rescaled = set(state.rescaled_tensors)
    for position, number in enumerate(chosen):
        group, divisors = statistics.groups[number], nearest_powers_of_two(factors[position])
        if np.all(divisors == 1):
            results.append(
                _skipped_group(
                    cross_layer_equalization.CROSS_LAYER_EQUALIZATION,
                    group.name,
                    cross_layer_equalization.ALREADY_EQUALIZED,
                )
            )
        elif not rescale_group(edited_model, group, divisors):
            results.append(
                _skipped_group(cross_layer_equalization.CROSS_LAYER_EQUALIZATION, group.name, INEXACT_SCALING)
            )
        else:
            results.append(_scaled_group(cross_layer_equalization.CROSS_LAYER_EQUALIZATION, group.name, divisors))
            rescaled.update((*group.tensors, *(constant.tensor for constant in group.constants)))
    return replace(state, model=edited_model, rescaled_tensors=frozenset(rescaled), results=(*state.results, *results))


@paused_gc()
def apply_smoothquant(state: PreCalibrationState, samples: AlgorithmData | None) -> PreCalibrationState:
    """Scale channels so that activations use their common range evenly."""
    if samples is None:
        return replace(
            state, results=(*state.results, _skipped_group(smoothquant.SMOOTHQUANT, "model", "left out: it needs data"))
        )
    statistics = collect_static_statistics(state.model, state.plan)
    scalable = {number: smoothquant.scalable_groups(statistics, number) for number in range(len(statistics.groups))}
    observe_channels(statistics, [subgroup for subgroups in scalable.values() for subgroup in subgroups], samples)
    edited_model, plan, rescaled, results = state.model.copy(), state.plan, set(state.rescaled_tensors), []
    factor_products = dict(state.factor_products)
    for number, group in enumerate(statistics.groups):
        reason = statistics.find_obstacle(group)
        if not scalable[number]:
            results.append(_skipped_group(smoothquant.SMOOTHQUANT, group.name, reason))
        for subgroup in scalable[number]:
            min_gain = smoothquant.MIN_GAIN_WITH_FACTOR_OP_DB if reason else smoothquant.MIN_GAIN_DB
            costs = statistics.rounding_costs(number, subgroup)
            scaling = None if costs is None or not costs.step_counts else smoothquant.find_best_scaling(costs)
            if scaling is None:
                results.append(
                    _skipped_group(
                        smoothquant.SMOOTHQUANT,
                        subgroup.name,
                        NOT_OBSERVED if costs is None else smoothquant.NO_TENSOR_SCALE,
                    )
                )
            elif scaling.gain < min_gain:
                results.append(
                    _skipped_group(
                        smoothquant.SMOOTHQUANT, subgroup.name, smoothquant.SMALL_GAIN.format(f"{min_gain:.0f}")
                    )
                )
            elif not rescale_group(edited_model, subgroup, scaling.divisors):
                results.append(_skipped_group(smoothquant.SMOOTHQUANT, subgroup.name, INEXACT_SCALING))
            else:
                detail = f"strength {scaling.strength:.1f}, errors predicted to fall by {scaling.gain:.1f} dB"
                if reason:
                    plan, product = insert_factor_op(edited_model, plan, subgroup, scaling.divisors)
                    factor_products[product] = subgroup.start
                    detail += ", by a product of its own"
                else:
                    rescaled.update(subgroup.tensors)
                rescaled.update(constant.tensor for constant in subgroup.constants)
                results.append(_scaled_group(smoothquant.SMOOTHQUANT, subgroup.name, scaling.divisors, detail))
    return PreCalibrationState(
        model=edited_model,
        plan=plan,
        rescaled_tensors=frozenset(rescaled),
        factor_products=factor_products,
        results=(*state.results, *results),
    )


@paused_gc()
def apply_weight_clipping(state: PreCalibrationState, _: AlgorithmData | None) -> PreCalibrationState:
    """Give low-bit weights the range of least squared error."""
    plan, results = clip_weights_in_plan(state.plan)
    return replace(state, plan=plan, results=(*state.results, *results))


PRE_CALIBRATION_ALGORITHMS: dict[str, PreCalibrationAlgorithm] = {
    cross_layer_equalization.CROSS_LAYER_EQUALIZATION: PreCalibrationAlgorithm(
        purpose="with one scale for all channels of a weight, channels of small weights are lost",
        apply=apply_cross_layer_equalization,
    ),
    smoothquant.SMOOTHQUANT: PreCalibrationAlgorithm(
        purpose="a few large channels take the range from all others, and weights have room for them",
        apply=apply_smoothquant,
    ),
    WEIGHT_CLIPPING: PreCalibrationAlgorithm(
        purpose="with few bits, steps for the largest weights are too wide for all others",
        apply=apply_weight_clipping,
    ),
}
"""Algorithms that run before calibration, in order."""


def run_pre_calibration(
    model: Model, plan: Plan, requested: Sequence[str], samples: AlgorithmData | None
) -> PreCalibrationState:
    """Run the requested algorithms that come before calibration.

    An algorithm that does not bring the outputs closer to the float model on the validation samples is undone.

    Args:
        model: The prepared model. It is not modified.
        plan: Its plan.
        requested: Names of algorithms.
        samples: Samples; None if no site needs data, so that nothing is known of the activations.

    Raises:
        ModelError: The model cannot be run.
    """
    state = PreCalibrationState(model=model, plan=plan)
    ordered_names = [name for name in PRE_CALIBRATION_ALGORITHMS if name in requested]
    if samples is None:
        for name in ordered_names:
            state = PRE_CALIBRATION_ALGORITHMS[name].apply(state, None)
            check_invariants(state.model, name)
        return state

    def solve_state(candidate: PreCalibrationState) -> WeightEdits:
        sketches = sketch_sample_ranges(candidate.model, candidate.plan, samples)
        return WeightEdits(
            prepared_model=candidate.model,
            model=candidate.model,
            solution=solve_scales(candidate.model, candidate.plan, sketches),
        )

    return apply_validated(
        state,
        [(name, PRE_CALIBRATION_ALGORITHMS[name].apply, MIN_GAIN_STANDARD_ERRORS) for name in ordered_names],
        solve_state,
        samples,
    )


def _skipped_group(name: str, target: str, reason: str) -> AlgorithmResult:
    return AlgorithmResult(algorithm=name, target=target, detail=reason, applied=False)


def _scaled_group(name: str, target: str, divisors: Array, detail: str = "") -> AlgorithmResult:
    return AlgorithmResult(
        algorithm=name,
        target=target,
        detail=f"{np.count_nonzero(divisors != 1)} of {len(divisors)} channels scaled by"
        f" 1/{divisors.max():g} to {1 / divisors.min():g}" + (f"; {detail}" if detail else ""),
    )


POST_CALIBRATION_ALGORITHMS: dict[str, PostCalibrationAlgorithm] = {
    weight_rounding.GPTQ: PostCalibrationAlgorithm(
        purpose="with few bits, what rounding one weight does wrong others can make up for",
        apply=weight_rounding.apply_gptq,
        min_standard_errors=MIN_TARGETED_GAIN_STANDARD_ERRORS,
    ),
    weight_rounding.ADAROUND: PostCalibrationAlgorithm(
        purpose="with few bits, the nearest step of each weight is not the best of all together",
        apply=weight_rounding.apply_adaround,
        min_standard_errors=MIN_TARGETED_GAIN_STANDARD_ERRORS,
    ),
    bias_correction.BIAS_CORRECTION: PostCalibrationAlgorithm(
        purpose="rounding moves the mean of what a convolution or product makes, and a bias can move it back",
        apply=bias_correction.apply_bias_correction,
        min_standard_errors=MIN_GAIN_STANDARD_ERRORS,
    ),
}
"""Algorithms that run after calibration, in order."""


def run_post_calibration(
    model: Model, solution: Solution, requested: Sequence[str], samples: AlgorithmData
) -> WeightEdits:
    """Run the requested algorithms that come after calibration; see `apply_validated`.

    Args:
        model: The prepared model. It is not modified.
        solution: Scales and zero points of its plan.
        requested: Names of algorithms.
        samples: Samples to fit to and to validate with.

    Raises:
        ModelError: The model cannot be run.
    """
    algorithms = [
        (name, algorithm.apply, algorithm.min_standard_errors)
        for name, algorithm in POST_CALIBRATION_ALGORITHMS.items()
        if name in requested
    ]
    edits = WeightEdits(prepared_model=model, model=model, solution=solution, integer_cache=IntegerCache())
    return apply_validated(edits, algorithms, lambda unchanged: unchanged, samples)
