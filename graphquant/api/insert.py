"""Quantization of a model, from rules to a rewritten and validated graph."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from graphquant import formats
from graphquant.analysis.validation import Bounds, check_runtime_accepts, recorded_runs
from graphquant.api.calibrate import resolve_stats
from graphquant.api.models import as_model, load_source, omission_notes
from graphquant.api.plan import prepare_and_plan
from graphquant.api.plan_search import InsertInputs, calibrate_plan
from graphquant.backends import judge_ops
from graphquant.calibration.data import as_data_spec, parse_data_sources
from graphquant.calibration.data.function import load_metric
from graphquant.calibration.holdout import CalibrationData, complete_model_data, open_model_data, open_required_labels
from graphquant.calibration.targets import sites_needing_data
from graphquant.errors import DataError, EmptyResultError, FindingsError, ModelError, NeedsDataError, UsageError
from graphquant.optimize.latency import MAX_TIMED_BYTES, time_beside_float
from graphquant.optimize.search import Objective
from graphquant.optimize.size_budget import can_examine, model_constant_bytes
from graphquant.quantize import (
    Plan,
    RangeTransfer,
    Site,
    SkipCode,
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
from graphquant.quantize.requantize import REQUANTIZE_STEP
from graphquant.utils.options import InsertOptions, resolve_options, takes_options

if TYPE_CHECKING:
    from graphquant.api.result import Result
    from graphquant.calibration.data import Dataset
    from graphquant.calibration.data.check import DataFinding
    from graphquant.calibration.data.dataset import Feed
    from graphquant.ir import Model, Shape
    from graphquant.utils import Progress


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
    inputs = _make_plan(source, settings, objective, progress)
    search, workspace, find_mistakes = calibrate_plan(inputs)
    result = search.validate(search.choose_plan(workspace))
    findings = find_mistakes(recorded_runs(source, result.validation))
    is_finished = result.already_quantized and not settings.requantize
    if not (result.is_changed or settings.allow_empty or is_finished):
        raise EmptyResultError(_empty_result_message(result))
    formats.release_runners("source", "prepared")
    result = _judge_execution(_with_origin(result, inputs, findings))  # uses the sessions of the validation
    emission = getattr(formats.find_shared_runner(result.model), "serialized", None)
    result = replace(result, serialized_emission=emission)
    formats.release_runners("quantized")  # its sessions would need memory beside those that are timed
    return _measure_time(result, inputs)


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


def _make_plan(source: Model, settings: InsertOptions, objective: Objective, progress: Progress | None) -> InsertInputs:
    """Return the prepared model and its plan, with the given ranges, and the split data, which opens on first use."""
    settings = replace(settings, data=complete_model_data(source, settings.data))
    open_samples = cache(partial(open_model_data, source, settings.data or ""))

    def read_first_sample() -> Feed:
        """Return the arrays of the first sample; none without data."""
        return {} if settings.data is None else next(open_samples(settings.samples).feeds_between(0, 1), {})

    def sample_shapes() -> dict[str, Shape]:
        return {name: array.shape for name, array in read_first_sample().items()}

    prepared, plan = prepare_and_plan(source, settings, settings.plan, sample_shapes=sample_shapes)
    plan, transfer = _apply_ranges(source, prepared, plan, settings)
    plan, pictures = _apply_pixel_ranges(prepared, plan, settings, read_first_sample)
    unranged_sites = sites_needing_data(plan)
    if transfer is not None and settings.data is None:
        # A branch that no sample of the file's model reached stays float, as it does after a calibration.
        branch_ops = prepared.branch_ops()
        unranged_sites = tuple(site for site in unranged_sites if site.tensor.op not in branch_ops[site.tensor.graph])
    data = _split_data(prepared, unranged_sites, plan, objective, settings, open_samples)
    if data.lacks_samples:
        raise NeedsDataError(_needs_data_message(source, unranged_sites, transfer))
    caches = _observe_caches(source, prepared, data, settings)
    return InsertInputs(
        source=source,
        prepared=prepared,
        plan=plan,
        data=data,
        settings=settings,
        objective=objective,
        transfer=transfer,
        with_integer_types=partial(_with_integer_types, settings=settings, pictures=pictures, caches=caches),
        progress=progress,
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


def _read_ranges(ranges: Model | str | Path) -> Model:
    """Return stored ranges as a TFLite model has them: of a quantized model, or of a file."""
    path = Path(ranges) if isinstance(ranges, str | Path) else None
    if path is not None and path.suffix not in formats.SUFFIXES.keys() - {".json"} and not path.is_dir():
        return read_range_file(path)
    model = as_model(ranges)
    return ranges_of_model(model) if model.traits.rewritable else model


def _apply_pixel_ranges(
    prepared: Model, plan: Plan, settings: InsertOptions, read_first_sample: Callable[[], Feed]
) -> tuple[Plan, frozenset[str]]:
    """Return the plan for integer inputs, with the ranges of normalized pixels, and the inputs that take pixels."""
    if settings.io is not None and prepared.format != "onnx" and settings.runtime != "tflite":
        raise UsageError("--io is for ONNX models and TFLite files. Write to -o NAME.tflite, or remove --io.")
    if settings.io not in {"int8", "uint8"} or prepared.format != "onnx" or settings.data is None:
        return plan, frozenset()
    return set_pixel_ranges(prepared, plan, read_first_sample())


def _split_data(
    prepared: Model,
    unranged_sites: Sequence[Site],
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
        needs_ranges=bool(unranged_sites) or settings.kv_cache is not None,
        runs_algorithms=bool(plan.algorithms and plan.sites),
        has_bounds=bool(objective.bounds),
        has_search=objective.uses_search_set,
        metric=load_metric(settings.metric),
    )
    if settings.data is not None and settings.validate and settings.max_accuracy_drop is not None:
        inputs = formats.format_module(prepared.format).input_specs(prepared)
        open_required_labels(data.dataset, settings.data, inputs, settings.samples)
    return data


def _observe_caches(
    source: Model, prepared: Model, data: CalibrationData, settings: InsertOptions
) -> dict[str, StateLimits]:
    """Return the limits of the states on the calibration samples; none unless the options request int8 caches."""
    if settings.kv_cache is None or data.calibration is None:
        return {}
    feeds = data.calibration.feeds_between(0, data.calibration.count)
    return cache_limits(_find_int8_caches(prepared), formats.shared_runner(source, "source").run_each(feeds))


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


def _with_origin(result: Result, inputs: InsertInputs, findings: tuple[DataFinding, ...]) -> Result:
    """Return the result with the files and the samples that it comes from."""
    settings = inputs.settings
    return replace(
        result,
        stats_path=Path(settings.stats) if result.stats and isinstance(settings.stats, str | Path) else None,
        tflite_ranges=inputs.transfer,
        data_findings=findings,
        strict=settings.strict,
        # Samples in memory would stay there as long as the result.
        holdout=inputs.data.validation_set if result.model.format == "tensorflow" else None,
    )


def _judge_execution(result: Result) -> Result:
    """Return the result with the execution of each op in ONNX Runtime. Reject a model that its runtime rejects."""
    unjudged_reason, verdicts = "", result.verdicts
    if result.is_changed:
        unjudged_reason = check_runtime_accepts(
            result.source, result.model, result.validation, other_backend=not result.plan.for_onnxruntime
        )
    if can_examine(result.model):
        with suppress(ModelError, OSError):  # the report does without it
            verdicts = judge_ops(result.model, "onnxruntime")
    return replace(result, unjudged_reason=unjudged_reason, verdicts=verdicts)


def _measure_time(result: Result, inputs: InsertInputs) -> Result:
    """Return the result with its time relative to the user's float model, as onnxruntime runs both on this machine."""
    is_requantized = REQUANTIZE_STEP in {step.step for step in result.plan.steps}  # then the source is no float model
    ratio = None if result.search is None else result.search.outcome_ratio
    is_timed = ratio is None and result.validation is not None and result.plan.for_onnxruntime
    if is_timed and result.model.format == "onnx" and model_constant_bytes(result.source) <= MAX_TIMED_BYTES:
        with suppress(ModelError, DataError, OSError):  # the report does without it
            float_model = inputs.prepared if is_requantized else result.source
            ratio = time_beside_float(float_model, result.model, inputs.data.dataset)
    return replace(result, time_ratio=ratio)


REASONS_LISTED = 3  # skip reasons in the message about an empty result


def _empty_result_message(result: Result) -> str:
    """Return the reason why no tensor is quantized, and the remedy."""
    name, trace = str(result.source.path or "the model"), result.search
    accept = "--allow-empty (allow_empty=True in Python) accepts the float model."
    if trace is not None and (trace.missed_bounds or trace.float_reason):
        reason = f": {'; '.join(trace.missed_bounds)}" if trace.missed_bounds else f": {trace.float_reason}"
        return f"No plan that quantizes a tensor of {name} reaches the goal{reason}. Change the goal; {accept}"
    skips = [skip for skip in result.skips if skip.code != SkipCode.PREPARATION or skip.rule == REQUANTIZE_STEP]
    reasons = Counter(skip.reason for skip in skips)
    common = [f"{reason} ({count})" for reason, count in reasons.most_common(REASONS_LISTED)]
    listed = "; ".join(common) or "no rule matches a tensor of it"
    listed = f"{listed}. {' '.join(omission_notes(result.source))}".rstrip(". ")
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
            f" but activations of the plan lack one: {first}, {count} in all. Pass calibration data too, or map names"
            " with --ranges-map."
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
