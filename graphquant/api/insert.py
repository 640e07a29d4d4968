"""Quantization of a model, from rules to a rewritten and validated graph."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import formats
from graphquant.analysis.compare import with_sensitivity
from graphquant.analysis.validation import Bounds, check_runtime_accepts, has_few_sites, validate_model
from graphquant.api.calibrate import calibrate_command_line, resolve_stats
from graphquant.api.models import as_model, load_source
from graphquant.api.plan import prepare_and_plan
from graphquant.api.result import Result, make_result
from graphquant.backends import judge_ops
from graphquant.calibration import (
    CalibrationRun,
    Stats,
    calibrate_model,
    plan_targets,
    select_stats,
    sites_needing_data,
)
from graphquant.calibration.holdout import CalibrationData, open_model_data, open_required_labels
from graphquant.calibration.memory import release_free_memory
from graphquant.errors import EmptyResultError, ModelError, NeedsDataError, UsageError
from graphquant.optimize import Objective, PreCalibrationState, build_model, run_precalibration_algorithms, search_plan
from graphquant.quantize import Plan, RangeTransfer, Site, read_name_map, transfer_ranges
from graphquant.utils import Progress, stage_progress
from graphquant.utils.options import InsertOptions, resolve_options, takes_options

if TYPE_CHECKING:
    from graphquant.ir import Model


@takes_options(InsertOptions)
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
    objective = _check_options(settings)
    source = load_source(model, settings)
    prepared, plan = prepare_and_plan(source, settings, settings.plan)
    plan, transfer = _apply_tflite_ranges(prepared, plan, settings)
    data = _split_data(prepared, plan, objective, settings)
    if data.lacks_samples:
        raise NeedsDataError(_needs_data_message(source, sites_needing_data(plan), transfer))
    findings = data.find_mistakes(source) if plan.sites else ()
    release_free_memory()
    state = run_precalibration_algorithms(prepared, plan, data.calibration, has_stats=data.stats is not None)
    stats = _provide_stats(source, state, data, settings, progress)
    release_free_memory()
    build = partial(
        build_model, state.model, stats=stats, calibration_data=data.calibration, float_weights=settings.float_weights
    )
    built, trace = search_plan(source, state, build, objective, data, progress)
    result = make_result(source, state, built, trace, stats)
    del prepared, state, built, build  # their graphs take as much memory as the validation
    stats_path = Path(settings.stats) if stats and isinstance(settings.stats, str | Path) else None
    result = replace(result, stats_path=stats_path, tflite_ranges=transfer, data_findings=findings)
    if not (result.inserted or settings.allow_empty or result.already_quantized):
        raise EmptyResultError(_empty_result_message(result))
    return _validate(result, data, objective.bounds, progress)


def _check_options(settings: InsertOptions) -> Objective:
    """Return the objective. Mistakes in options are reported before the model is read."""
    if settings.data is not None:
        from graphquant.calibration.data import parse_data_spec

        parse_data_spec(settings.data)
    if settings.optimize == "latency" and settings.data is None:
        raise UsageError("Optimizing latency runs the model on samples. Pass data.")
    if settings.optimize == "latency" and settings.size_budget is not None:
        raise UsageError(
            "A size budget cannot be combined with optimizing latency: a small model may be slow, and float ops are"
            " often the fastest. Use one of them."
        )
    return Objective(
        minimize=settings.optimize,
        bounds=Bounds(
            min_sqnr=settings.min_sqnr,
            min_agreement=settings.min_agreement,
            max_accuracy_drop=settings.max_accuracy_drop,
        ),
        size_budget=settings.size_budget,
        as_tflite=settings.runtime == "tflite",
    )


def _apply_tflite_ranges(prepared: Model, plan: Plan, settings: InsertOptions) -> tuple[Plan, RangeTransfer | None]:
    """Return the plan with the scales of a TFLite file, if there is one."""
    if settings.ranges is None:
        return plan, None
    tflite_model = as_model(settings.ranges)
    if tflite_model.traits.rewritable:
        raise UsageError(
            f"{tflite_model.path or 'The model'} is not a TFLite file. Pass the TFLite file whose scales to use."
        )
    names = settings.ranges_map
    name_map = read_name_map(Path(names)) if isinstance(names, str | Path) else names or {}
    return transfer_ranges(prepared, plan, tflite_model, name_map)


def _split_data(prepared: Model, plan: Plan, objective: Objective, settings: InsertOptions) -> CalibrationData:
    """Return the data with its split. It is opened on first use, or now if a bound needs its labels."""
    data = CalibrationData(
        spec=settings.data,
        max_samples=settings.samples,
        open_samples=partial(open_model_data, prepared, settings.data or ""),
        validates=settings.validate,
        stats=None if settings.stats is None else resolve_stats(settings.stats),
        needs_ranges=bool(sites_needing_data(plan)),
        runs_algorithms=bool(plan.algorithms and plan.sites),
        has_bounds=bool(objective.bounds),
        has_search=objective.uses_search_set,
    )
    if settings.data is not None and settings.validate and settings.max_accuracy_drop is not None:
        inputs = formats.format_module(prepared.format).input_specs(prepared)
        open_required_labels(data.dataset, settings.data, inputs, settings.samples)
    return data


def _provide_stats(
    source: Model, state: PreCalibrationState, data: CalibrationData, settings: InsertOptions, progress: Progress | None
) -> Stats | None:
    """Return the statistics of the plan, selected from given ones or collected from data; None if it needs none."""
    # A search tries other observers, which need histograms even if those of the rules do not.
    targets = plan_targets(
        source,
        state.model,
        state.plan,
        full_histograms=data.has_bounds and data.stats is None,
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


def _validate(result: Result, data: CalibrationData, bounds: Bounds, progress: Progress | None) -> Result:
    """Return the result with its errors on the hold-out, and with the execution of each op in ONNX Runtime."""
    validation, unjudged_reason = None, ""
    if result.inserted:
        if data.validation_set is not None:
            validation = validate_model(result.source, result.model, data.validation_set, bounds, progress)
            sensitivity = None if result.search is None else result.search.sensitivity
            if sensitivity is not None and validation.comparison is not None:
                comparison = with_sensitivity(validation.comparison, sensitivity.sqnr)
                validation = replace(validation, comparison=comparison)
        unjudged_reason = check_runtime_accepts(
            result.source, result.model, validation, other_backend=not result.plan.for_onnxruntime
        )
    verdicts = result.verdicts
    if result.model.traits.judgeable and has_few_sites(len(result.inserted)):
        with suppress(ModelError, OSError):  # the report does without it
            verdicts = judge_ops(result.model, "onnxruntime")
    release_free_memory()
    return replace(result, validation=validation, unjudged_reason=unjudged_reason, verdicts=verdicts)


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
    return (
        f"No tensor of {name} would be quantized: {listed}. Use other rules, --include or --exclude; `graphquant"
        f" explain MODEL TENSOR` gives the reason for each rule. {accept}"
    )


def _needs_data_message(model: Model, unranged_sites: Sequence[Site], transfer: RangeTransfer | None) -> str:
    """Return the error for activations without a range, with commands that provide one."""
    count, first = len(unranged_sites), unranged_sites[0].tensor
    if transfer is not None:
        return (
            f"{transfer.path or 'The TFLite model'} has ranges for {len(transfer.transferred)} tensors of the plan,"
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
