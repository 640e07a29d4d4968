"""The optimization algorithms by name, their samples, and the quantized model of a plan with its algorithms.

Before calibration, cross-layer equalization and SmoothQuant scale channels by powers of two, which change only the
exponents of floats, so that the function stays equal to the bit. Weight clipping narrows weight ranges. After
calibration, GPTQ and AdaRound choose how weights are rounded, and bias correction shifts biases. Half of the samples
fit the algorithms, and the other half accepts or rejects each of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.calibration import estimate_footprint
from graphquant.errors import ModelError, UsageError, did_you_mean
from graphquant.ir import check_invariants
from graphquant.optimize.adaround import ADAROUND, apply_adaround
from graphquant.optimize.algorithm import (
    MIN_GAIN_STANDARD_ERRORS,
    MIN_TARGETED_GAIN_STANDARD_ERRORS,
    AlgorithmData,
    PostCalibrationAlgorithm,
    PreCalibrationAlgorithm,
    PreCalibrationState,
    WeightEdits,
    apply_validated,
    skipped_algorithm,
)
from graphquant.optimize.bias_correction import BIAS_CORRECTION, apply_bias_correction
from graphquant.optimize.channel_statistics import sketch_sample_ranges
from graphquant.optimize.cross_layer_equalization import CROSS_LAYER_EQUALIZATION, apply_cross_layer_equalization
from graphquant.optimize.gptq import GPTQ, apply_gptq
from graphquant.optimize.smoothquant import SMOOTHQUANT, apply_smoothquant
from graphquant.optimize.weight_clipping import WEIGHT_CLIPPING, apply_weight_clipping
from graphquant.quantize import Skip, SkipCode, solve_scales
from graphquant.quantize.rewrite import IntegerCache, rewrite
from graphquant.rules import ALGORITHM_NAMES, NEGATION

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.calibration import Stats
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds, Runner
    from graphquant.ir import Model
    from graphquant.numerics import DynamicQParams, QParams
    from graphquant.quantize import Plan, Solution
    from graphquant.quantize.rewrite import InsertedPair

PRE_CALIBRATION_ALGORITHMS: dict[str, PreCalibrationAlgorithm] = {
    CROSS_LAYER_EQUALIZATION: PreCalibrationAlgorithm(
        purpose="with one scale for all channels of a weight, channels with small weights lose precision",
        apply=apply_cross_layer_equalization,
    ),
    SMOOTHQUANT: PreCalibrationAlgorithm(
        purpose="a few large channels of an activation widen the range of all others, and the weights can absorb them",
        apply=apply_smoothquant,
    ),
    WEIGHT_CLIPPING: PreCalibrationAlgorithm(
        purpose="with few bits, a range up to the largest weight makes the steps of all others too wide",
        apply=apply_weight_clipping,
    ),
}
"""Algorithms that run before calibration, in order."""

POST_CALIBRATION_ALGORITHMS: dict[str, PostCalibrationAlgorithm] = {
    GPTQ: PostCalibrationAlgorithm(
        purpose="with few bits, other weights can compensate the rounding error of one weight",
        apply=apply_gptq,
        min_standard_errors=MIN_TARGETED_GAIN_STANDARD_ERRORS,
    ),
    ADAROUND: PostCalibrationAlgorithm(
        purpose="with few bits, rounding each weight to nearest is not the best choice for all weights together",
        apply=apply_adaround,
        min_standard_errors=MIN_TARGETED_GAIN_STANDARD_ERRORS,
    ),
    BIAS_CORRECTION: PostCalibrationAlgorithm(
        purpose="rounding shifts the mean of each output channel, and the bias can shift it back",
        apply=apply_bias_correction,
        min_standard_errors=MIN_GAIN_STANDARD_ERRORS,
    ),
}
"""Algorithms that run after calibration, in order."""

ALGORITHM_SAMPLES, MAX_ALGORITHM_SAMPLES = 32, 128
"""Number of samples, and its maximum for small models, where more samples cost little."""

MAX_WEIGHT_ELEMENTS = 1 << 28
"""Maximum number of quantized weight elements. The algorithms hold a second copy of them: 1 GB."""

MAX_ACTIVATION_ELEMENTS = 1 << 24
"""Maximum number of activation elements over all samples if there are more than `ALGORITHM_SAMPLES`."""

WEIGHTS_TOO_LARGE = "a second copy of the weights would need too much memory"

SAMPLE_SPANS = 8
"""Number of ranges of the data from which samples are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """The quantized model of one plan.

    Attributes:
        edits: The prepared model, its solved plan and the weight edits of optimization algorithms.
        model: The quantized model.
        insertions: The inserted Q/DQ pairs.
        params: Scale and zero point by index of the site.
        skips: Sites that the solver skipped, by index.
    """

    edits: WeightEdits
    model: Model
    insertions: list[InsertedPair]
    params: dict[int, QParams | DynamicQParams]
    skips: dict[int, Skip]


def build_model(
    prepared: Model, plan: Plan, *, stats: Stats | None, calibration_data: Dataset | None, float_weights: bool
) -> BuiltModel:
    """Solve the scales of a plan, run its optimization algorithms, and rewrite the graph.

    Raises:
        DataError: A sample cannot be read.
    """
    sketches, unobservable = (stats.sketches, stats.unobservable) if stats else ({}, {})
    solution = solve_scales(prepared, plan, sketches, unobservable)
    edits = run_postcalibration_algorithms(prepared, solution, plan, calibration_data)
    solved_plan, params, skips = edits.solution.plan, dict(edits.solution.params), dict(edits.solution.skips)
    for index, site in enumerate(solved_plan.sites if float_weights else ()):
        # A float weight is quantized at run time, and no op quantizes to int32.
        if index in params and site.scheme.type.bits == 32:  # noqa: PLR2004  # int32
            del params[index]
            skips[index] = Skip(
                tensor=site.tensor,
                uses=site.uses,
                rule=site.rule,
                reason="weights are kept float",
                code=SkipCode.OPTIMIZATION,
            )
    model, insertions = rewrite(
        edits.model, solved_plan, params, float_weights=float_weights, integer_cache=edits.integer_cache
    )
    return BuiltModel(edits=edits, model=model, insertions=insertions, params=params, skips=skips)


def run_precalibration_algorithms(
    prepared: Model, plan: Plan, calibration_data: Dataset | None, *, has_stats: bool
) -> PreCalibrationState:
    """Run the algorithms of a plan that change the model before calibration.

    Args:
        prepared: The prepared model. It is not modified.
        plan: The plan.
        calibration_data: The calibration samples, or None without data.
        has_stats: True if statistics provide the ranges. They describe the unchanged model.

    Raises:
        DataError: A sample cannot be read.
    """
    algorithms = [name for name in plan.algorithms if name in PRE_CALIBRATION_ALGORITHMS]
    unchanged = PreCalibrationState(model=prepared, plan=plan)
    if not algorithms or not plan.sites:
        return unchanged
    reason = "the statistics describe the unchanged model" if has_stats else ""
    if calibration_data is not None and calibration_data.random:
        reason = "random data has no realistic ranges"
    if _quantized_weight_elements(prepared, plan) > MAX_WEIGHT_ELEMENTS:
        reason = WEIGHTS_TOO_LARGE
    if reason:
        # Weight clipping reads only weights, so it runs nevertheless.
        skipped = tuple(skipped_algorithm(name, reason) for name in algorithms if name != WEIGHT_CLIPPING)
        clipping = [name for name in algorithms if name == WEIGHT_CLIPPING]
        state = apply_precalibration(prepared, plan, clipping, None)
        return state.with_results((*skipped, *state.results))
    samples = None if calibration_data is None else _algorithm_samples(prepared, plan, calibration_data)
    try:
        return apply_precalibration(prepared, plan, algorithms, samples)
    except ModelError as error:
        return unchanged.with_results(tuple(skipped_algorithm(name, str(error)) for name in algorithms))


def apply_precalibration(
    model: Model, plan: Plan, requested: Sequence[str], samples: AlgorithmData | None
) -> PreCalibrationState:
    """Apply the requested algorithms, and undo each that brings no gain on the validation samples.

    Args:
        model: The prepared model. It is not modified.
        plan: Its plan.
        requested: Names of algorithms.
        samples: Samples; None if no site needs data, so that nothing is known of the activations.

    Raises:
        ModelError: The model cannot be run.
    """
    state = PreCalibrationState(model=model, plan=plan)
    ordered = [(name, entry.apply) for name, entry in PRE_CALIBRATION_ALGORITHMS.items() if name in requested]
    if samples is None:
        for name, apply in ordered:
            state = apply(state, None)
            check_invariants(state.model, name)
        return state

    def solve_state(candidate: PreCalibrationState) -> WeightEdits:
        sketches = sketch_sample_ranges(candidate.model, candidate.plan, samples)
        solution = solve_scales(candidate.model, candidate.plan, sketches)
        return WeightEdits(prepared_model=candidate.model, model=candidate.model, solution=solution)

    algorithms = [(name, apply, MIN_GAIN_STANDARD_ERRORS) for name, apply in ordered]
    return apply_validated(state, algorithms, solve_state, samples)


def run_postcalibration_algorithms(
    prepared: Model, solution: Solution, plan: Plan, calibration_data: Dataset | None
) -> WeightEdits:
    """Run the algorithms of a plan that change weights and biases once scales are known; see `apply_validated`.

    Args:
        prepared: The prepared model. It is not modified.
        solution: Scales and zero points of its plan.
        plan: The plan.
        calibration_data: The calibration samples, or None without data.

    Raises:
        DataError: A sample cannot be read.
    """
    edits = WeightEdits(prepared_model=prepared, model=prepared, solution=solution)
    algorithms = [
        (name, entry.apply, entry.min_standard_errors)
        for name, entry in POST_CALIBRATION_ALGORITHMS.items()
        if name in plan.algorithms
    ]
    if not algorithms or not solution.params:
        return edits
    reason = ""
    if calibration_data is None:
        reason = "it needs samples, and statistics contain none"
    elif calibration_data.random:
        reason = "random data has no realistic means"
    elif _quantized_weight_elements(prepared, plan) > MAX_WEIGHT_ELEMENTS:
        reason = WEIGHTS_TOO_LARGE
    else:
        samples = _algorithm_samples(prepared, plan, calibration_data)
        try:
            cached_edits = replace(edits, integer_cache=IntegerCache())
            return apply_validated(cached_edits, algorithms, lambda unchanged: unchanged, samples)
        except ModelError as error:  # The validation of the result reports it too, unless only the algorithms cause it.
            reason = str(error)
    # The order of the plan, as the rules and the report list them.
    names = [name for name in plan.algorithms if name not in PRE_CALIBRATION_ALGORITHMS]
    return replace(edits, results=tuple(skipped_algorithm(name, reason) for name in names))


def _algorithm_samples(prepared: Model, plan: Plan, calibration_data: Dataset) -> AlgorithmData:
    """Choose samples, every second one to fit the algorithms and the others to validate them."""
    create_runner = formats.format_module(prepared.format).create_runner
    elements = estimate_footprint(prepared, batch_independent=False).elements_per_sample
    if elements is None and calibration_data.count > ALGORITHM_SAMPLES:
        first_feed = next(iter(calibration_data.feeds_between(0, 1)))
        elements = _measure_activation_elements(create_runner(prepared), plan, first_feed)
    count = ALGORITHM_SAMPLES
    if elements is not None:
        count = min(max(MAX_ACTIVATION_ELEMENTS // max(elements, 1), ALGORITHM_SAMPLES), MAX_ALGORITHM_SAMPLES)
    feeds = list(_spread_samples(calibration_data, count))
    return AlgorithmData(feeds=feeds[::2], validation_feeds=feeds[1::2], create_runner=create_runner)


def _measure_activation_elements(runner: Runner, plan: Plan, feed: Feeds) -> int:
    """Count the elements of the quantized activations in one run, for shapes that are unknown before it."""
    tensors = list(dict.fromkeys(site.tensor for site in plan.sites if not site.parameter))
    hidden = runner.unobservable(tensors)
    return sum(runner.element_counts([tensor for tensor in tensors if tensor not in hidden], feed).values())


def _quantized_weight_elements(prepared: Model, plan: Plan) -> int:
    """Count the elements of the quantized weights with known shapes."""
    shapes = (prepared.output(site.tensor).shape for site in plan.sites if site.parameter)
    return sum(math.prod(dim or 1 for dim in shape) for shape in shapes if shape is not None)


def _spread_samples(batches: Dataset, count: int) -> Iterator[Feeds]:
    """Yield `count` samples from all over the data."""
    if batches.count <= count:
        yield from batches
        return
    span_count = count // SAMPLE_SPANS
    for span in range(SAMPLE_SPANS):
        start = span * (batches.count - span_count) // (SAMPLE_SPANS - 1)
        yield from batches.feeds_between(start, start + span_count)


def choose_algorithms(rule_algorithms: Sequence[str], requested: Sequence[str]) -> tuple[str, ...]:
    """Return the algorithms of the rules with the changes that a caller requests, in the order in which they run.

    Args:
        rule_algorithms: Names in the rules.
        requested: Names to add, or with a leading "not " to remove.

    Raises:
        UsageError: An algorithm does not exist.
    """
    for name in requested:
        algorithm = name.removeprefix(NEGATION)
        if algorithm not in ALGORITHM_NAMES:
            hint = did_you_mean(algorithm, ALGORITHM_NAMES) or f" Use one of {', '.join(ALGORITHM_NAMES)}."
            raise UsageError(f"The optimization algorithm {algorithm[:60]!r} does not exist.{hint}")
    enabled = {*rule_algorithms, *(name for name in requested if not name.startswith(NEGATION))}
    return tuple(name for name in ALGORITHM_NAMES if name in enabled and NEGATION + name not in requested)
