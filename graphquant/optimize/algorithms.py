"""The optimization algorithms by name, their samples, and the quantized model of a plan with its algorithms.

Before calibration, cross-layer equalization and SmoothQuant scale channels by powers of two, which change only the
exponents of floats, so that the function stays equal to the bit. Weight clipping narrows weight ranges. After
calibration, GPTQ and AdaRound choose how weights are rounded, and bias correction shifts biases. Half of the samples
fit the algorithms, and the other half accepts or rejects each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from graphquant import formats
from graphquant.calibration.memory import estimate_footprint
from graphquant.errors import ModelError
from graphquant.ir import Model, TensorRef, Use, check_invariants, paused_gc
from graphquant.numerics import DynamicQParams, IntType, QParams
from graphquant.optimize.algorithm import (
    MIN_GAIN_STANDARD_ERRORS,
    MIN_TARGETED_GAIN_STANDARD_ERRORS,
    AlgorithmData,
    AlgorithmResult,
    PreCalibrationState,
    WeightEdits,
    apply_validated,
    skipped_algorithm,
)
from graphquant.optimize.bias_correction import BIAS_CORRECTION, apply_bias_correction
from graphquant.optimize.channel_scaling import (
    CROSS_LAYER_EQUALIZATION,
    SMOOTHQUANT,
    apply_cross_layer_equalization,
    apply_smoothquant,
)
from graphquant.optimize.channel_statistics import sketch_sample_ranges
from graphquant.optimize.weight_rounding import ADAROUND, GPTQ, apply_adaround, apply_gptq
from graphquant.optimize.weighted_ops import find_weighted_ops
from graphquant.quantize import Plan, Site, Skip, SkipCode, Solution, solve_scales
from graphquant.quantize.rewrite import InsertedPair, IntegerCache, rewrite
from graphquant.rules import ObserverConfig
from graphquant.utils import Progress, stage_progress

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.calibration.stats import Stats
    from graphquant.formats import Runner

WEIGHT_CLIPPING: Final = "weight-clipping"

UNCLIPPED_OBSERVERS: Final = frozenset({"absmax", "minmax"})  # observers that clip nothing
MAX_CLIPPED_BITS: Final = 8


@paused_gc()
def apply_weight_clipping(state: PreCalibrationState, _: AlgorithmData | None) -> PreCalibrationState:
    """Give low-bit weights without an explicit range the range of least squared error. The function does not change.

    Source: Banner et al. 2018, "Post Training 4-bit Quantization of Convolutional Networks for Rapid-Deployment",
        section 3. The observer "mse" searches the range on the weight itself, so no distribution is assumed.
    """

    def is_clipped(site: Site) -> bool:
        dtype = site.scheme.type
        has_few_bits = isinstance(dtype, IntType) and dtype.bits <= MAX_CLIPPED_BITS
        can_change = site.parameter and has_few_bits and not (site.has_given_range or site.clone_of)
        return can_change and site.scheme.observe.name in UNCLIPPED_OBSERVERS

    mse = ObserverConfig(name="mse")
    sites = tuple(
        replace(site, scheme=replace(site.scheme, observe=mse)) if is_clipped(site) else site
        for site in state.plan.sites
    )
    detail = "its range has the least squared error"
    results = (
        AlgorithmResult(algorithm=WEIGHT_CLIPPING, target=str(site.tensor), detail=detail)
        for site in state.plan.sites
        if is_clipped(site)
    )
    return replace(state, plan=replace(state.plan, sites=sites), results=(*state.results, *results))


PRE_CALIBRATION_ALGORITHMS = {
    CROSS_LAYER_EQUALIZATION: apply_cross_layer_equalization,
    SMOOTHQUANT: apply_smoothquant,
    WEIGHT_CLIPPING: apply_weight_clipping,
}
"""Algorithms that run before calibration, in order. `docs/algorithms.md` states the purpose of each."""

POST_CALIBRATION_ALGORITHMS = {
    GPTQ: (apply_gptq, MIN_TARGETED_GAIN_STANDARD_ERRORS),
    ADAROUND: (apply_adaround, MIN_TARGETED_GAIN_STANDARD_ERRORS),
    BIAS_CORRECTION: (apply_bias_correction, MIN_GAIN_STANDARD_ERRORS),
}
"""Algorithms that run after calibration, in order, each with the standard errors by which its gain must exceed 0."""

ALGORITHM_SAMPLES, MAX_ALGORITHM_SAMPLES = 32, 128
"""Number of samples, and its maximum for small models, where more samples cost little."""

MAX_WEIGHT_ELEMENTS = 1 << 28
"""Maximum number of quantized weight elements. The algorithms hold a second copy of them: 1 GB."""

MAX_ACTIVATION_ELEMENTS = 1 << 24
"""Maximum number of activation elements over all samples if there are more than `ALGORITHM_SAMPLES`."""

WEIGHTS_TOO_LARGE = "a second copy of the weights would need too much memory"


class BuiltModel(NamedTuple):
    """The quantized model of one plan."""

    edits: WeightEdits  # the prepared model, its solved plan and the weight edits of optimization algorithms
    model: Model  # the quantized model
    insertions: list[InsertedPair]  # the inserted Q/DQ pairs
    params: dict[int, QParams | DynamicQParams]  # scale and zero point by index of the site
    skips: dict[int, Skip]  # sites that the solver skipped, by index
    float_weights: bool = False  # True if weights are stored as floats


def build_model(
    prepared: Model,
    plan: Plan,
    *,
    stats: Stats | None,
    calibration_data: Dataset | None,
    float_weights: bool,
    progress: Progress | None = None,
) -> BuiltModel:
    """Solve the scales of a plan, run its optimization algorithms, and rewrite the graph.

    `progress` receives the megabytes of the weights whose scales are known. Raises a DataError if a sample
    cannot be read.
    """
    sketches, unobservable = (stats.sketches, stats.unobservable) if stats else ({}, {})
    solution = solve_scales(prepared, plan, sketches, unobservable, stage_progress(progress, "ranges of weights, MB"))
    edits = run_postcalibration_algorithms(prepared, solution, plan, calibration_data)
    return _rewrite_edited(edits, float_weights=float_weights)


def rebuild_model(base: BuiltModel, plan: Plan, stats: Stats | None) -> BuiltModel:
    """Build the model of another plan with the weight edits of `base`, without running the algorithms again.

    `plan` may keep more sites in float and give activations other ranges, and `stats` may be others. Ops whose weight
    stays float get their original weight and bias. The weights of both plans must have the same types.
    """
    sketches, unobservable = (stats.sketches, stats.unobservable) if stats else ({}, {})
    prepared, edited = base.edits.prepared_model, base.edits.model
    if edited is prepared:
        edits = replace(base.edits, solution=solve_scales(prepared, plan, sketches, unobservable))
        return _rewrite_edited(edits, float_weights=base.float_weights)
    model = edited.copy()
    weights = {use for site in plan.sites if site.parameter for use in site.uses}
    for weighted in find_weighted_ops(prepared, base.edits.solution):
        if weighted.weight not in weights:
            for use in filter(None, (weighted.weight, weighted.bias)):
                _restore_constant(prepared, model, use)
    moved_plan = _follow_moved_constants(plan, prepared, model, base.edits.solution.plan)
    ranged_model = model
    if base.edits.edited_weights:
        # The scales of rounded weights are those of the weights before.
        ranged_model = model.copy()
        for use in base.edits.edited_weights:
            _restore_constant(prepared, ranged_model, use)
    solution = solve_scales(ranged_model, moved_plan, sketches, unobservable)
    edits = replace(base.edits, model=model, solution=solution, integer_cache=None)
    return _rewrite_edited(edits, float_weights=base.float_weights)


def _restore_constant(prepared: Model, model: Model, use: Use) -> None:
    """Let `use` read the constant of the prepared model again."""
    tensor = prepared.graphs[use.graph].source_of(use)
    graph = model.graphs[use.graph]
    added = graph.source_of(use)
    if added != tensor:
        graph.set_source(use, tensor)
        if added is not None and not graph.consumers(added):
            model.graphs[added.graph].remove_op(added.op)
    while tensor is not None:
        op = prepared.op(tensor)
        if model.op(tensor) is not op:
            model.graphs[tensor.graph].replace_op(op)
        tensor = next(iter(prepared.graphs[tensor.graph].slots(tensor.op)), None)


def _follow_moved_constants(plan: Plan, prepared: Model, model: Model, edited_plan: Plan) -> Plan:
    """Return the plan with the sites of constants that an algorithm added to the model."""
    edited_sites = {use: site for site in edited_plan.sites for use in site.uses}

    def new_source(use: Use) -> TensorRef | None:
        source = model.graphs[use.graph].source_of(use)
        return None if source == prepared.graphs[use.graph].source_of(use) else source

    sites: list[Site] = []
    for site in plan.sites:
        moved_uses = [use for use in site.uses if site.parameter and new_source(use) is not None]
        kept_uses = tuple(use for use in site.uses if use not in moved_uses)
        sites += [replace(site, uses=kept_uses)] if kept_uses or not moved_uses else []
        for use in moved_uses:
            tensor = new_source(use) or site.tensor
            sites.append(replace(site, tensor=tensor, uses=(use,), graph=use.graph, tie=(), clone_of=None))
    planned_uses = {use for site in sites for use in site.uses}
    quantized_ops = {(use.graph, use.op) for site in plan.sites if site.parameter for use in site.uses}
    for use, site in edited_sites.items():
        # A bias that an algorithm gave to an op without any.
        is_added = use not in planned_uses and prepared.graphs[use.graph].source_of(use) is None
        if is_added and (use.graph, use.op) in quantized_ops and model.graphs[use.graph].source_of(use) == site.tensor:
            sites.append(site)
    return replace(plan, sites=tuple(sites))


def _rewrite_edited(edits: WeightEdits, *, float_weights: bool) -> BuiltModel:
    """Rewrite the graph with the scales of the solution."""
    solved_plan, params, skips = edits.solution.plan, dict(edits.solution.params), dict(edits.solution.skips)
    for index, site in enumerate(solved_plan.sites if float_weights else ()):
        # A float weight is quantized at run time, and no op quantizes to int32.
        if index in params and site.scheme.type.bits == 32:  # noqa: PLR2004  # int32
            del params[index]
            reason, code = "weights are kept float", SkipCode.OPTIMIZATION
            skips[index] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason=reason, code=code)
    if float_weights:
        model, insertions = rewrite(
            edits.model, solved_plan, params, float_weights=True, integer_cache=edits.integer_cache
        )
    else:
        model, insertions = edits.rewritten()
    return BuiltModel(
        edits=edits, model=model, insertions=insertions, params=params, skips=skips, float_weights=float_weights
    )


def run_precalibration_algorithms(
    prepared: Model, plan: Plan, calibration_data: Dataset | None, *, has_stats: bool, validates: bool = True
) -> PreCalibrationState:
    """Run the algorithms of a plan that change the model before calibration.

    The model is not modified. `has_stats` is true if statistics, which describe the unchanged model, provide the
    ranges, and `validates` is false if the caller measures the result. Raises a DataError if a sample cannot be read.
    """
    algorithms = [name for name in plan.algorithms if name in PRE_CALIBRATION_ALGORITHMS]
    unchanged = PreCalibrationState(model=prepared, plan=plan)
    if not algorithms or not plan.sites:
        return unchanged
    reason = "random data has no realistic ranges" if calibration_data is not None and calibration_data.random else ""
    if has_stats:
        reason = "the statistics describe the unchanged model"
    if _quantized_weight_elements(prepared, plan) > MAX_WEIGHT_ELEMENTS:
        reason = WEIGHTS_TOO_LARGE
    if reason:
        # Weight clipping reads only weights, so it runs nevertheless.
        skipped = tuple(skipped_algorithm(name, reason) for name in algorithms if name != WEIGHT_CLIPPING)
        clipped = apply_weight_clipping(unchanged, None) if WEIGHT_CLIPPING in algorithms else unchanged
        return replace(clipped, results=(*skipped, *clipped.results))
    samples = None if calibration_data is None else _algorithm_samples(prepared, plan, calibration_data)
    try:
        return apply_precalibration(prepared, plan, algorithms, samples, validates=validates)
    except ModelError as error:
        return replace(unchanged, results=tuple(skipped_algorithm(name, str(error)) for name in algorithms))


def apply_precalibration(
    model: Model, plan: Plan, requested: Sequence[str], samples: AlgorithmData | None, *, validates: bool = True
) -> PreCalibrationState:
    """Apply the requested algorithms and, if `validates`, undo each that brings no gain on the validation samples.

    Without samples, because no site needs data, nothing is known of the activations, and nothing is undone. Raises a
    ModelError if the model cannot be run.
    """
    state = PreCalibrationState(model=model, plan=plan)
    ordered = [(name, apply) for name, apply in PRE_CALIBRATION_ALGORITHMS.items() if name in requested]
    if samples is None or not validates:
        for name, apply in ordered:
            state = apply(state, samples)
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

    Without data, `calibration_data` is None, and no algorithm runs. Raises a DataError if a sample cannot be read.
    """
    edits = WeightEdits(prepared_model=prepared, model=prepared, solution=solution)
    algorithms = [
        (name, apply, min_standard_errors)
        for name, (apply, min_standard_errors) in POST_CALIBRATION_ALGORITHMS.items()
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
    count = ALGORITHM_SAMPLES
    if calibration_data.count > ALGORITHM_SAMPLES:
        elements = activation_elements(formats.create_runner(prepared), plan, calibration_data)
        count = min(max(MAX_ACTIVATION_ELEMENTS // max(elements, 1), ALGORITHM_SAMPLES), MAX_ALGORITHM_SAMPLES)
    feeds = list(calibration_data.spread_feeds(count))
    return AlgorithmData(feeds=feeds[::2], validation_feeds=feeds[1::2], create_runner=formats.create_runner)


def activation_elements(runner: Runner, plan: Plan, samples: Dataset) -> int:
    """Return the number of elements of all activations, or if shapes are unknown of the quantized ones in one run."""
    elements = estimate_footprint(runner.model, batch_independent=False).elements_per_sample
    if elements is not None:
        return elements
    tensors = list(dict.fromkeys(site.tensor for site in plan.sites if not site.parameter))
    hidden = runner.unobservable(tensors)
    feed = next(iter(samples.feeds_between(0, 1)))
    return sum(runner.element_counts([tensor for tensor in tensors if tensor not in hidden], feed).values())


def _quantized_weight_elements(prepared: Model, plan: Plan) -> int:
    """Count the elements of the quantized weights with known shapes."""
    shapes = (prepared.output(site.tensor).shape for site in plan.sites if site.parameter)
    return sum(math.prod(dim or 1 for dim in shape) for shape in shapes if shape is not None)
