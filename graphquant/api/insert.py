"""Quantization of a model, from rules to a rewritten and validated graph."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphquant import formats
from graphquant.analysis.compare import with_sensitivity
from graphquant.analysis.validation import (
    DEFAULT_MIN_SQNR,
    Bounds,
    Validation,
    check_runtime_accepts,
    has_few_sites,
    validate_model,
)
from graphquant.api.calibrate import calibrate_command_line, resolve_stats
from graphquant.api.models import as_model, load_source, omission_notes
from graphquant.api.plan import prepare_and_plan
from graphquant.api.result import Result, make_result
from graphquant.backends import judge_ops
from graphquant.backends.onnxruntime import MAX_EXAMINED_BYTES
from graphquant.calibration import (
    CalibrationRun,
    Stats,
    calibrate_folds,
    calibrate_model,
    combine_stats,
    plan_targets,
    select_stats,
    sites_needing_data,
)
from graphquant.calibration.data import as_data_spec, parse_data_sources
from graphquant.calibration.data.function import load_metric
from graphquant.calibration.holdout import (
    CalibrationData,
    complete_model_data,
    open_model_data,
    open_required_labels,
)
from graphquant.calibration.memory import return_freed_memory
from graphquant.errors import DataError, EmptyResultError, FindingsError, ModelError, NeedsDataError, UsageError
from graphquant.optimize import (
    BuiltModel,
    Objective,
    PreCalibrationState,
    RepairRequest,
    RepairTrace,
    SearchBudget,
    SearchFold,
    SearchTrace,
    Workspace,
    build_model,
    predict_costs,
    repair_plan,
    run_precalibration_algorithms,
    search_clock,
    search_plan,
)
from graphquant.optimize.latency import MAX_TIMED_BYTES, time_beside_float
from graphquant.optimize.repair import OutputMeter
from graphquant.optimize.size_budget import model_constant_bytes
from graphquant.quantize import (
    Plan,
    RangeTransfer,
    Site,
    ranges_of_model,
    read_name_map,
    read_range_file,
    transfer_ranges,
)
from graphquant.quantize.integer_io import (
    ATTENTION,
    AttentionCache,
    StateLimits,
    cache_limits,
    find_caches,
    set_pixel_ranges,
    with_int8_cache,
    with_integer_io,
)
from graphquant.rules import NEGATION
from graphquant.utils import Progress, stage_progress
from graphquant.utils.options import NO_TARGET, InsertOptions, resolve_options, takes_options

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.ir import Model, Shape
    from graphquant.optimize.candidates import BuildModel


@takes_options(InsertOptions)
@formats.shared_runners()
def insert(
    model: Model | str | Path,
    options: InsertOptions | None = None,
    /,
    *,
    progress: Progress | None = None,
    **values: Any,
) -> Result:
    """Quantize a model, and validate the result on a hold-out.

    With data, the last fifth of the samples, at least 4 of 8 or more, is held out from calibration, and the quantized
    model is validated on it. `Result.validation` has the outcome; a missed bound raises no error.

    Args:
        model: A model, or its path.
        options: The options, in place of keyword arguments.
        progress: Progress callback.
        values: The options as keyword arguments.

    Raises:
        NeedsDataError: The ranges of some activations need data, and there is none.
        DataError: The data does not fit the model.
        FindingsError: The runtime cannot load the quantized model, or its outputs have new NaN or infinite values.
        ModelError: The model cannot be read, prepared or rewritten.
        RuleError: A rule file has mistakes.
        EmptyResultError: No tensor would be quantized, also because no plan meets the bounds. `allow_empty` accepts it.
        UsageError: An option is invalid, a pattern matches nothing, or the size budget cannot be met.
    """
    settings = resolve_options(InsertOptions, options, values)
    settings = replace(settings, data=None if settings.data is None else as_data_spec(settings.data))
    objective = _check_options(settings)
    source = load_source(model, settings, settings.data)
    settings = replace(settings, data=complete_model_data(source, settings.data))
    open_samples = cache(partial(open_model_data, source, settings.data or ""))
    sample_shapes = partial(_first_sample_shapes, open_samples, settings)
    prepared, plan = prepare_and_plan(source, settings, settings.plan, sample_shapes=sample_shapes)
    plan, transfer = _apply_ranges(source, prepared, plan, settings)
    plan, pictures = _apply_pixel_ranges(prepared, plan, settings, open_samples)
    data = _split_data(prepared, plan, objective, settings, open_samples)
    _require_samples(source, plan, data, transfer)
    with_integer_types = partial(
        _with_integer_types,
        settings=settings,
        pictures=pictures,
        caches=_observe_caches(source, prepared, data, settings),
    )
    check = data.start_check(source) if plan.sites else None
    state = run_precalibration_algorithms(prepared, plan, data.calibration, has_stats=data.stats is not None)
    start = search_clock(settings.search_time)()
    workspace = _make_workspace(source, state, data, settings, progress)
    findings = () if check is None else check.finish(None if workspace.stats is None or data.stats else state.model)
    del check  # and its runner
    if not has_few_sites(len(plan.sites)):
        _release_float_runners()
        return_freed_memory()  # from now on, only outputs are measured
    context = _RepairContext(source, prepared, data, settings, plan, start, progress)
    repair, search_objective = None, objective
    if objective.bounds.min_sqnr is not None and data.search_set is not None and context.allows(objective):
        workspace = _keep_default_build(workspace)  # the search starts with the same plan
        workspace, repair = context.choose_algorithms(workspace, objective.bounds.min_sqnr)
        if repair.stop_reason == "interrupt":
            search_objective = replace(objective, bounds=Bounds())
    state, stats = workspace.state, workspace.stats
    budget = context.budget if data.search_set is not None and search_objective.bounds else None
    built, trace = search_plan(
        source, state, workspace.build, stats, search_objective, data, workspace.folds, progress, budget
    )
    if repair is not None and repair.steps:
        base = trace or SearchTrace(minimize=objective.minimize, plan=state.plan)
        trace = replace(base, repair=repair, interrupted=base.interrupted or repair.stop_reason == "interrupt")
    result = with_integer_types(make_result(source, state, built, trace, stats))
    # Scaled channels would differ from those of the source.
    like_source = None if state.rescaled_tensors else state.model
    validation = _validate(result, data, settings, objective.bounds, progress, like_source)
    # The plans of a repair would take many times as long as the rest for so many quantized tensors.
    is_repairable = validation is not None and has_few_sites(len(result.inserted)) and context.allows(objective)
    if validation is not None and is_repairable and context.misses_target(built, validation):
        result = with_integer_types(context.repair(workspace, built, validation))
        validation = _validate(result, data, settings, objective.bounds, progress)
    stats_path = Path(settings.stats) if result.stats and isinstance(settings.stats, str | Path) else None
    result = replace(
        result,
        stats_path=stats_path,
        tflite_ranges=transfer,
        data_findings=findings,
        validation=validation,
        strict=settings.strict,
        # Samples in memory would stay there as long as the result.
        holdout=data.validation_set if result.model.format == "tensorflow" else None,
    )
    if not (result.is_changed or settings.allow_empty or result.already_quantized):
        raise EmptyResultError(_empty_result_message(result))
    _release_float_runners()
    result = _judge_execution(result)  # uses the sessions of the validation
    formats.release_runner("quantized")  # its sessions would need memory beside those that are timed
    return _measure_time(result, prepared, data)


def _require_samples(source: Model, plan: Plan, data: CalibrationData, transfer: RangeTransfer | None) -> None:
    """Raise NeedsDataError if the plan needs ranges and there is neither data nor statistics."""
    if data.lacks_samples:
        raise NeedsDataError(_needs_data_message(source, sites_needing_data(plan), transfer))


def _release_float_runners() -> None:
    """Free the sessions of the float model. One that observes all activations needs much memory."""
    formats.release_runner("source")
    formats.release_runner("prepared")


def _with_integer_io(result: Result, settings: InsertOptions, pictures: frozenset[str]) -> Result:
    """Return the result with integer inputs and outputs, if the options request them."""
    if settings.io is None or settings.io == "float32" or not result.inserted or result.model.format != "onnx":
        return result
    changed, tensors = with_integer_io(result.model, settings.io, pictures)
    if all(tensor.reason for tensor in tensors):
        listed = "; ".join(map(str, tensors)) or "none is float32"
        raise FindingsError(
            f"No input or output can be {settings.io}: {listed}. Nothing was written. Quantize them with other rules,"
            " such as generic or qnn, or use --io float32."
        )
    return replace(result, model=changed, io=tensors)


def _find_int8_caches(prepared: Model) -> list[AttentionCache]:
    """Return the caches of the model; raise FindingsError if none of them can be int8, or nothing would run it."""
    caches = find_caches(prepared) if prepared.format == "onnx" else []
    if all(cache.reason for cache in caches):
        listed = "; ".join(f"{cache.op}: {cache.reason}" for cache in caches)
        raise FindingsError(
            f"No {ATTENTION} has past states that can be int8: {listed or 'the model has no such op with past states'}."
            " Nothing was written. Export the decoder in the form of ONNX Runtime GenAI, or remove --kv-cache."
        )
    from graphquant.formats.onnx import has_int8_cache

    if not has_int8_cache():
        raise FindingsError(
            "The installed ONNX Runtime does not run caches of int8 on the CPU, and releases from 1.28 on do. Nothing"
            " was written. Update onnxruntime, or remove --kv-cache."
        )
    return caches


def _observe_caches(
    source: Model, prepared: Model, data: CalibrationData, settings: InsertOptions
) -> dict[str, StateLimits]:
    """Return the limits of the states on the calibration samples; none unless the options request int8 caches."""
    if settings.kv_cache is None or data.calibration is None:
        return {}
    feeds = data.calibration.feeds_between(0, data.calibration.count)
    return cache_limits(_find_int8_caches(prepared), formats.shared_runner(source, "source").run_each(feeds))


def _with_integer_types(
    result: Result, *, settings: InsertOptions, pictures: frozenset[str], caches: dict[str, StateLimits]
) -> Result:
    """Return the result with the integer inputs, outputs and caches that the options request."""
    result = _with_integer_io(result, settings, pictures)
    if not caches:
        return result
    per: Literal["tensor", "channel"] = "tensor" if settings.kv_cache == "int8-per-tensor" else "channel"
    changed, tensors = with_int8_cache(result.model, caches, per)
    if not result.inserted:
        changed = replace(changed, original_model=result.source)
    return replace(result, model=changed, io=(*result.io, *tensors))


def _keep_default_build(workspace: Workspace, built: BuiltModel | None = None) -> Workspace:
    """Return the workspace with a function that builds the model of its plan only once, or never if it is `built`."""
    default, build = workspace.state.plan, workspace.build
    kept = [] if built is None else [built]

    def build_or_reuse(plan: Plan) -> BuiltModel:
        if plan is not default:  # plans of TensorFlow models are not hashable
            return build(plan)
        if not kept:
            kept.append(build(plan))
        return kept[0]

    return replace(workspace, build=build_or_reuse)


def _check_options(settings: InsertOptions) -> Objective:
    """Return the objective. Mistakes in options are reported before the model is read."""
    if settings.data is not None:
        parse_data_sources(settings.data)
    if settings.max_metric_drop is not None and settings.metric is None:
        raise UsageError("A bound on the metric needs the metric. Pass metric, a function or module:function.")
    if settings.metric is not None and (settings.data is None or not settings.validate):
        raise UsageError("The metric is measured in the validation. Pass data, and do not disable the validation.")
    if settings.keep_ranges and not settings.requantize:
        raise UsageError("keep_ranges keeps the ranges while the ops of a model are replaced. Add requantize.")
    if settings.keep_ranges and settings.ranges is not None:
        raise UsageError("keep_ranges and ranges are two sources of ranges. Use one of them.")
    if settings.optimize == "latency" and settings.data is None:
        raise UsageError("Optimizing latency runs the model on samples. Pass data.")
    if settings.optimize == "latency" and settings.size_budget is not None:
        raise UsageError(
            "A size budget cannot be combined with optimizing latency: a small model may be slow, and float ops are"
            " often the fastest. Use one of them."
        )
    if settings.kv_cache is not None and settings.data is None:
        raise UsageError("The scales of the cache come from the states of samples. Pass --data, or remove --kv-cache.")
    return Objective(
        minimize=settings.optimize,
        bounds=Bounds(
            min_sqnr=None if isinstance(settings.min_sqnr, str) else settings.min_sqnr,  # "none"
            min_agreement=settings.min_agreement,
            max_accuracy_drop=settings.max_accuracy_drop,
            max_metric_drop=settings.max_metric_drop,
        ),
        size_budget=settings.size_budget,
        as_tflite=settings.runtime == "tflite",
    )


def _apply_ranges(
    source: Model, prepared: Model, plan: Plan, settings: InsertOptions
) -> tuple[Plan, RangeTransfer | None]:
    """Return the plan with the ranges of a file or of another model, or with those that the source has learned."""
    if settings.keep_ranges:
        return transfer_ranges(prepared, plan, ranges_of_model(source), {}, weights=True)
    if settings.ranges is None:
        return plan, None
    names = settings.ranges_map
    name_map = read_name_map(Path(names)) if isinstance(names, str | Path) else names or {}
    return transfer_ranges(prepared, plan, _read_ranges(settings.ranges), name_map)


def _apply_pixel_ranges(
    prepared: Model, plan: Plan, settings: InsertOptions, open_samples: Callable[[int | None], Dataset]
) -> tuple[Plan, frozenset[str]]:
    """Return the plan for integer inputs, with the ranges of normalized pixels, and the inputs that take pixels."""
    if settings.io is not None and prepared.format != "onnx" and settings.runtime != "tflite":
        raise UsageError("--io is for ONNX models and TFLite files. Write to -o NAME.tflite, or remove --io.")
    if settings.io not in {"int8", "uint8"} or prepared.format != "onnx" or settings.data is None:
        return plan, frozenset()
    return set_pixel_ranges(prepared, plan, next(open_samples(settings.samples).feeds_between(0, 1), {}))


def _read_ranges(ranges: Model | str | Path) -> Model:
    """Return stored ranges as a TFLite model has them: of a quantized model, or of a file."""
    path = Path(ranges) if isinstance(ranges, str | Path) else None
    if path is not None and path.suffix not in formats.SUFFIXES.keys() - {".json"} and not path.is_dir():
        return read_range_file(path)
    model = as_model(ranges)
    return ranges_of_model(model) if model.traits.rewritable else model


def _first_sample_shapes(open_samples: Callable[[int | None], Dataset], settings: InsertOptions) -> dict[str, Shape]:
    """Return the shapes of the arrays of the first sample; none without data."""
    if settings.data is None:
        return {}
    feed = next(open_samples(settings.samples).feeds_between(0, 1), {})
    return {name: array.shape for name, array in feed.items()}


def _split_data(
    prepared: Model,
    plan: Plan,
    objective: Objective,
    settings: InsertOptions,
    open_samples: Callable[[int | None], Dataset],
) -> CalibrationData:
    """Return the data with its split. It is opened on first use, or now if a bound needs its labels."""
    data = CalibrationData(
        spec=settings.data,
        max_samples=settings.samples,
        open_samples=open_samples,
        validates=settings.validate,
        stats=None if settings.stats is None else resolve_stats(settings.stats),
        needs_ranges=bool(sites_needing_data(plan)) or settings.kv_cache is not None,
        runs_algorithms=bool(plan.algorithms and plan.sites),
        has_bounds=bool(objective.bounds),
        has_search=objective.uses_search_set,
        metric=load_metric(settings.metric),
    )
    if settings.data is not None and settings.validate and settings.max_accuracy_drop is not None:
        inputs = formats.format_module(prepared.format).input_specs(prepared)
        open_required_labels(data.dataset, settings.data, inputs, settings.samples)
    return data


def _provide_stats(
    source: Model,
    state: PreCalibrationState,
    data: CalibrationData,
    settings: InsertOptions,
    progress: Progress | None,
    *,
    full_histograms: bool = False,
) -> Stats | None:
    """Return the statistics of the plan, selected from given ones or collected from data; None if it needs none."""
    # A search tries other observers, which need histograms even if those of the rules do not.
    targets = plan_targets(
        source,
        state.model,
        state.plan,
        full_histograms=(full_histograms or data.has_bounds) and data.stats is None,
        rescaled=state.rescaled_tensors,
    )
    if data.stats is not None:
        command = calibrate_command_line(source, state.plan, settings.plan)
        selected = select_stats(data.stats, targets, source.digest, command)
        return selected if targets else None
    if data.calibration is None or not targets:
        return None
    run = CalibrationRun(
        model_digest=source.digest, max_memory=settings.max_memory, progress=stage_progress(progress, "calibrating")
    )
    return calibrate_model(state.model, targets, data.calibration, run)


def _make_workspace(
    source: Model,
    state: PreCalibrationState,
    data: CalibrationData,
    settings: InsertOptions,
    progress: Progress | None,
    *,
    full_histograms: bool = False,
) -> Workspace:
    """Return the workspace of a state, with the folds in which a search with bounds measures plans."""
    if data.fold_count:
        stats, folds = _provide_folds(source, state, data, settings, progress)
    else:
        stats = _provide_stats(source, state, data, settings, progress, full_histograms=full_histograms)
        folds = ()
    # Searches show their own progress. Without data, the ranges of the weights are all the work.
    build = _make_build(state, stats, data, settings, progress if stats is None else None)
    return Workspace(state=state, stats=stats, build=build, folds=folds)


def _provide_folds(
    source: Model, state: PreCalibrationState, data: CalibrationData, settings: InsertOptions, progress: Progress | None
) -> tuple[Stats | None, tuple[SearchFold, ...]]:
    """Return the statistics of the plan and the folds of the data."""
    targets = plan_targets(source, state.model, state.plan, full_histograms=True, rescaled=state.rescaled_tensors)
    parts: list[tuple[Stats | None, tuple[int, int]]] = []
    if targets and data.stats is None:
        run = CalibrationRun(
            model_digest=source.digest, max_memory=settings.max_memory, progress=stage_progress(progress, "calibrating")
        )
        parts += calibrate_folds(state.model, targets, data.dataset, run, data.fold_count)
    else:  # only algorithms need samples
        ends = [data.dataset.count * index // data.fold_count for index in range(data.fold_count + 1)]
        parts += [(None, span) for span in pairwise(ends)]

    def combine(selected: Sequence[Stats | None]) -> Stats | None:
        known = [stats for stats in selected if stats is not None]
        return combine_stats(known) if known else None

    folds = []
    for index, (_, (start, stop)) in enumerate(parts):
        held_out, others = data.make_fold(start, stop)
        fold_stats = combine([stats for other, (stats, _) in enumerate(parts) if other != index])
        build = partial(
            build_model, state.model, stats=fold_stats, calibration_data=others, float_weights=settings.float_weights
        )
        folds.append(SearchFold(held_out=held_out, build=build, stats=fold_stats))
    return combine([stats for stats, _ in parts]), tuple(folds)


def _validate(
    result: Result,
    data: CalibrationData,
    settings: InsertOptions,
    bounds: Bounds,
    progress: Progress | None,
    prepared: Model | None = None,
) -> Validation | None:
    """Measure the errors of a result on the hold-out; None without data."""
    if not result.is_changed or data.validation_set is None:
        return None
    target = None if settings.min_sqnr == NO_TARGET else DEFAULT_MIN_SQNR
    validation = validate_model(
        result.source, result.model, data.validation_set, bounds, progress, target_sqnr=target, prepared=prepared
    )
    sensitivity = None if result.search is None else result.search.sensitivity
    if sensitivity is not None and validation.comparison is not None:
        validation = replace(validation, comparison=with_sensitivity(validation.comparison, sensitivity.sqnr))
    by_folds = None if result.search is None else result.search.search_validation
    return validation if by_folds is None else _with_fold_outputs(validation, by_folds)


def _with_fold_outputs(validation: Validation, by_folds: Validation) -> Validation:
    """Return the validation with the outputs that were measured by folds.

    The ranges of the final model come from all samples, so that its own figures on them are too good. They count only
    if the model cannot be measured or is worse than its folds.
    """
    measured = validation.comparison
    if by_folds.folds <= 1 or measured is None or by_folds.comparison is None or validation.failures:
        return validation
    outputs = by_folds.comparison.outputs
    comparison = replace(measured, outputs=outputs, samples=by_folds.comparison.samples)
    return replace(validation, comparison=comparison, reuses_samples=by_folds.reuses_samples, folds=by_folds.folds)


def _judge_execution(result: Result) -> Result:
    """Return the result with the execution of each op in ONNX Runtime. Reject a model that its runtime rejects."""
    unjudged_reason, verdicts = "", result.verdicts
    if result.is_changed:
        unjudged_reason = check_runtime_accepts(
            result.source, result.model, result.validation, other_backend=not result.plan.for_onnxruntime
        )
    if result.model.traits.judgeable and model_constant_bytes(result.model) <= MAX_EXAMINED_BYTES:
        with suppress(ModelError, OSError):  # the report does without it
            verdicts = judge_ops(result.model, "onnxruntime")
    return replace(result, unjudged_reason=unjudged_reason, verdicts=verdicts)


def _measure_time(result: Result, prepared: Model, data: CalibrationData) -> Result:
    """Return the result with its time relative to the prepared float model, as onnxruntime runs both on this machine.

    The source may take longer for reasons that have nothing to do with integers: onnxruntime does not fold a BatchNorm
    whose parameters are inputs of the graph.
    """
    ratio = None if result.search is None else result.search.outcome_ratio
    is_timed = ratio is None and result.validation is not None and result.plan.for_onnxruntime
    if is_timed and result.model.format == "onnx" and model_constant_bytes(result.source) <= MAX_TIMED_BYTES:
        with suppress(ModelError, DataError, OSError):  # the report does without it
            ratio = time_beside_float(prepared, result.model, data.dataset)
    return replace(result, time_ratio=ratio)


def _make_build(
    state: PreCalibrationState,
    stats: Stats | None,
    data: CalibrationData,
    settings: InsertOptions,
    progress: Progress | None,
) -> BuildModel:
    return partial(
        build_model,
        state.model,
        stats=stats,
        calibration_data=data.calibration,
        float_weights=settings.float_weights,
        progress=progress,
    )


CLOSE_DB = 6.0  # dB above the target up to which calibration samples are measured too


@dataclass(frozen=True)
class _RepairContext:
    """The inputs of one `insert` that a repair needs."""

    source: Model
    prepared: Model
    data: CalibrationData
    settings: InsertOptions
    plan: Plan  # the plan of the rules
    start: float  # time of the search clock at which calibration started, in seconds
    progress: Progress | None

    @cached_property
    def budget(self) -> SearchBudget:
        """The work of all searches, which starts after the calibration."""
        search_time, samples = self.settings.search_time, self.data.calibration or self.data.dataset
        elapsed = search_clock(search_time)() - self.start
        costs = predict_costs(self.prepared, self.plan, samples, model_constant_bytes(self.prepared))
        algorithms = len(self.plan.algorithms)
        return SearchBudget(search_time, costs, samples.count, algorithms, elapsed)

    def allows(self, objective: Objective) -> bool:
        """Return True if a repair may change the plan.

        A given plan, a size budget and another objective than multiply-adds are requests that a repair would break.
        Errors on random data mean nothing.
        """
        settings = self.settings
        is_fixed = settings.plan is not None or settings.size_budget is not None or objective.minimize != "macs"
        return not (is_fixed or self.data.dataset.random)

    def misses_target(self, built: BuiltModel, validation: Validation) -> bool:
        """Return True if an output misses the target on the hold-out, or nearly does and misses it in the calibration.

        A small hold-out may have none of the samples with large errors, and ranges fit the calibration samples. An
        output below the target on these is therefore below it on others too.
        """
        target, worst, calibration = validation.target_sqnr, validation.worst_sqnr, self.data.calibration
        if validation.misses_target:
            return True
        if validation.bounds or target is None or worst is None or calibration is None or worst >= target + CLOSE_DB:
            return False
        return OutputMeter(self.source, calibration, target).worst_sqnr(built.model) < target

    def choose_algorithms(self, workspace: Workspace, min_sqnr: float) -> tuple[Workspace, RepairTrace]:
        """Return the workspace with the algorithms that bring its plan closer to a bound, before a search for it."""
        repaired, trace = repair_plan(self._request(workspace, workspace.build(workspace.state.plan), min_sqnr, None))
        if not any(step.kept for step in trace.steps):
            return workspace, trace
        improved = replace(repaired.workspace, state=replace(repaired.workspace.state, plan=repaired.plan))
        return _keep_default_build(improved, repaired.built), trace

    def repair(self, workspace: Workspace, built: BuiltModel, validation: Validation) -> Result:
        """Return the result of the cheapest plan whose outputs reach the default target, or of the best plan."""
        default_sqnr = validation.worst_sqnr if validation.worst_sqnr is not None else -math.inf
        repaired, repair = repair_plan(self._request(workspace, built, DEFAULT_MIN_SQNR, default_sqnr))
        trace = SearchTrace(
            minimize="macs",
            plan=repaired.plan,
            interrupted=repair.stop_reason == "interrupt",
            plans=repair.plans,
            cost=repaired.cost,
            repair=repair,
        ).with_candidates(repaired.changed_tensors)
        return make_result(self.source, repaired.workspace.state, repaired.built, trace, repaired.workspace.stats)

    def _request(
        self, workspace: Workspace, built: BuiltModel, target_sqnr: float, default_sqnr: float | None
    ) -> RepairRequest:
        data, algorithms = self.data, self.settings.algorithms
        samples = data.dataset if data.calibration is None else data.calibration
        return RepairRequest(
            source=self.source,
            prepared=self.prepared,
            workspace=workspace,
            built=built,
            target_sqnr=target_sqnr,
            default_sqnr=default_sqnr,
            calibration=data.calibration,
            search_samples=samples,
            has_stats=data.stats is not None,
            calibrate=self._calibrate,
            validate=self._measure,
            disabled_algorithms=frozenset(
                name.removeprefix(NEGATION) for name in algorithms if name.startswith(NEGATION)
            ),
            budget=self.budget,
            folds=data.fold_count,
            progress=self.progress,
        )

    def _calibrate(self, state: PreCalibrationState) -> Workspace:
        return _make_workspace(self.source, state, self.data, self.settings, self.progress, full_histograms=True)

    def _measure(self, built: BuiltModel) -> float:
        if self.data.validation_set is None:
            raise ValueError("a repair follows a validation")
        validation = validate_model(
            self.source, built.model, self.data.validation_set, Bounds(), None, include_sites=False
        )
        return -math.inf if validation.worst_sqnr is None else validation.worst_sqnr


REASONS_LISTED = 3  # skip reasons in the message about an empty result


def _empty_result_message(result: Result) -> str:
    """Return the reason why no tensor is quantized, and the remedy."""
    name, trace = str(result.source.path or "the model"), result.search
    accept = "--allow-empty (allow_empty=True in Python) accepts the float model."
    if trace is not None and (trace.missed_bounds or trace.float_reason):
        reason = f": {'; '.join(trace.missed_bounds)}" if trace.missed_bounds else f": {trace.float_reason}"
        return f"No plan that quantizes a tensor of {name} reaches the goal{reason}. Change the goal; {accept}"
    reasons = Counter(skip.reason for skip in result.skips).most_common(REASONS_LISTED)
    listed = "; ".join(f"{reason} ({count})" for reason, count in reasons) or "no rule matches a tensor of it"
    notes = omission_notes(result.source)
    if notes:
        listed = f"{listed}. {' '.join(notes)}".rstrip(".")
    return (
        f"No tensor of {name} would be quantized: {listed}. Use other rules, --include or --exclude; `graphquant"
        f" explain MODEL TENSOR` gives the reason for each rule. {accept}"
    )


def _needs_data_message(model: Model, unranged_sites: Sequence[Site], transfer: RangeTransfer | None) -> str:
    """Return the error for activations without a range, with commands that provide one."""
    count, first = len(unranged_sites), unranged_sites[0].tensor
    if transfer is not None:
        return (
            f"{transfer.path or 'The model'} has ranges for {len(transfer.transferred)} tensors of the plan,"
            f" but not for {count} activations; the first is {first}. Pass calibration data for them, or map their"
            " names with --ranges-map."
        )
    suggestions = [("data", "calibration.npz"), ("rules", "fixed_point"), ("rules", "weight_only")]
    if formats.memory_object_name(model):
        lines = [f'  gq.insert(model, {name}="{value}")' for name, value in suggestions]
    else:
        path = shlex.quote(str(model.path or "MODEL"))
        lines = [f"  graphquant insert {path} --{name} {value}" for name, value in suggestions]
    text = "\n".join(lines)
    return (
        f"{count} activations have no range; the first is {first}. Pass calibration data, use fixed-point ranges, or"
        f" quantize only the weights:\n{text}"
    )
