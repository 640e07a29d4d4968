"""Comparison of two models: on the same data, or of their structure without running them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant import formats
from graphquant.analysis.compare import ComparisonSamples, compare_runners, with_sensitivity
from graphquant.analysis.diff import Differences, ModelChange, diff_models, diff_plans
from graphquant.analysis.measured_outputs import match_inputs, with_selections
from graphquant.analysis.site_errors import ComparedSites, match_sites
from graphquant.api.models import as_model, load_source
from graphquant.api.plan import prepare_with_steps
from graphquant.calibration.batch_independence import is_batch_independent, measure_footprint
from graphquant.calibration.data.function import load_metric
from graphquant.calibration.holdout import complete_model_data, open_labelled_data
from graphquant.errors import UsageError
from graphquant.ir import Model
from graphquant.quantize import Plan, read_plan
from graphquant.utils import Progress, stage_progress
from graphquant.utils.options import CompareOptions, resolve_options, takes_options

if TYPE_CHECKING:
    from graphquant.analysis.comparison import Comparison
    from graphquant.calibration.data import Dataset, MemoryData
    from graphquant.formats import Runner
    from graphquant.optimize.sensitivity import Sensitivity


@takes_options(CompareOptions)
def compare(
    model: Model | str | Path,
    quantized_model: Model | str | Path,
    data: Any,
    options: CompareOptions | None = None,
    *,
    progress: Progress | None = None,
    **values: Any,
) -> Comparison:
    """Measure the error of a quantized model: of each output, and of each quantized tensor.

    Args:
        model: The float model, or its path.
        quantized_model: The quantized model, or its path; it may be of another framework.
        data: A data spec, arrays, or an iterable of samples; see docs/data.md. Accuracy is measured if the data has
            `labels`.
        options: The options, in place of keyword arguments.
        progress: Progress callback.
        values: The options as keyword arguments.

    Raises:
        DataError: The data cannot be read, or does not fit the models.
        MissingDependencyError: A framework is not installed.
        ModelError: A model cannot be read or run.
        UsageError: The inputs or outputs differ, quantized tensors of a TFLite file are requested; an invalid option.
    """
    from graphquant.calibration.data import as_data_spec, open_data, split_by_signature
    from graphquant.calibration.data.check import check_samples

    settings = resolve_options(CompareOptions, options, values)
    data = as_data_spec(data)
    float_ir, quantized_ir = (load_compared(operand, settings, data) for operand in (model, quantized_model))
    has_tflite_file = not (float_ir.traits.rewritable and quantized_ir.traits.rewritable)
    if has_tflite_file and settings.sensitivity:
        raise UsageError(
            "The sensitivity is that of quantized tensors, but TFLite's interpreter returns only the outputs. Compare"
            " the models from which the file was converted."
        )
    sites = match_sites(float_ir, quantized_ir) if settings.sites and not has_tflite_file else None
    signatures = settings.signature or tuple(split_by_signature(data))
    float_runner = _create_runner(float_ir, signatures)
    float_runner = float_runner if settings.outputs else with_selections(float_runner)
    data = complete_model_data(float_ir, data) if float_ir.traits.rewritable else data
    batches = open_data(data, float_runner.inputs, samples=settings.samples, require_finite=False)
    findings = check_samples(batches, float_ir) if float_ir.traits.rewritable else ()
    metric = load_metric(settings.metric)
    batches, labels = open_labelled_data(batches, data, float_runner.inputs, settings.samples, metric)
    quantized_runner = with_selections(_create_runner(quantized_ir, signatures, float_runner), float_runner)
    sensitivity = None
    if sites is not None and settings.sensitivity:
        sensitivity = _measure_sensitivity(quantized_ir, sites, float_runner, quantized_runner, batches, progress)
    comparison = compare_runners(
        float_runner,
        quantized_runner,
        ComparisonSamples(
            dataset=batches, footprint=measure_footprint(float_runner, batches), labels=labels, metric=metric
        ),
        sites,
        settings.outputs,
        stage_progress(progress, "comparing"),
    )
    comparison = replace(comparison, data_findings=findings)
    return comparison if sensitivity is None else with_sensitivity(comparison, sensitivity.sqnr)


def load_compared(model: Model | str | Path, settings: CompareOptions, data: str | MemoryData | None = None) -> Model:
    """Load a model to compare. The signatures of a TFLite file are chosen when it runs.

    Raises a ModelError if the model cannot be read, and a UsageError if the model has no such signature or tags, or the
    data is for other signatures.
    """
    is_tflite = model.format == "tflite" if isinstance(model, Model) else Path(str(model)).suffix == ".tflite"
    return as_model(model) if is_tflite else load_source(model, settings, data)


def _create_runner(model: Model, signatures: Sequence[str], other: Runner | None = None) -> Runner:
    """Return the runner of a model, which may be a TFLite file that is compared with the model of another runner."""
    if model.format != "tflite":
        return formats.format_module(model.format).create_runner(model)
    from graphquant.formats.tensorflow.tflite_converter import TFLiteRunner

    if other is None:
        return TFLiteRunner(model, signatures)
    return TFLiteRunner(model, signatures, other.outputs, other.inputs)


def _measure_sensitivity(
    quantized_model: Model,
    sites: ComparedSites,
    float_runner: Runner,
    quantized_runner: Runner,
    batches: Dataset,
    progress: Progress | None,
) -> Sensitivity:
    """Measure the effect of each quantization alone on the outputs."""
    from graphquant.optimize.sensitivity import (
        BATCH_SIZE,
        chunk_sample_feeds,
        judge_corrected_biases,
        measure_sensitivity,
    )

    inputs = match_inputs(float_runner.inputs, quantized_runner.inputs)
    batch_independent = is_batch_independent(float_runner, batches, BATCH_SIZE) and is_batch_independent(
        quantized_runner, batches, BATCH_SIZE, inputs=inputs
    )
    sensitivity = measure_sensitivity(
        quantized_model,
        sites,
        batches,
        inputs=inputs,
        batch_independent=batch_independent,
        progress=stage_progress(progress, "measuring sensitivity"),
    )
    if sensitivity.interrupted:
        raise KeyboardInterrupt
    feeds = list(chunk_sample_feeds(batches, inputs, batch_independent=batch_independent))
    return judge_corrected_biases(quantized_model, sites, feeds, sensitivity.samples, sensitivity)


PLAN_MARKER = '"schema"'  # text near the start of each plan file, which ONNX models in JSON do not have


def diff(
    first: Model | Plan | str | Path, second: Model | Plan | str | Path, *, quantization: bool = True
) -> Differences:
    """Return the differences between two models, or two plans.

    Args:
        first: The first model or plan, or its path.
        second: The second model or plan, or its path.
        quantization: If True, include differences in quantization.

    Raises:
        ModelError: A model cannot be read.
        UsageError: A model and a plan are mixed, or the models have different formats.
    """
    plans = [plan_or_none(operand) for operand in (first, second)]
    if plans[0] is not None and plans[1] is not None:
        return diff_plans(plans[0], plans[1])
    if plans != [None, None]:
        raise UsageError("A plan cannot be compared with a model. Pass two models, or two plans.")
    before, after, steps = align_preparation(as_model(first), as_model(second))
    differences = diff_models(before, after, quantization=quantization)
    if not steps:
        return differences
    message = f"{steps}; the other changes are relative to the prepared model"
    preparation = ModelChange(kind="model", location="preparation", message=message)
    return replace(differences, changes=(preparation, *differences.changes))


def align_preparation(before: Model, after: Model) -> tuple[Model, Model, str]:
    """Prepare the first model like the second, if the second was quantized from it; return both and the steps.

    Raises a ModelError if the opset cannot be upgraded.
    """
    steps = ""
    if after.format == before.format and after.traits.rewritable:
        provenance = formats.format_module(after.format).read_metadata(after)
        steps = provenance.get("steps", "") if provenance.get("source") == before.digest else ""
    return (prepare_with_steps(before, steps, after.opset) if steps else before), after, steps


def plan_or_none(source: object) -> Plan | None:
    """Return the plan, read from its file if `source` is a path, or None for a model."""
    if isinstance(source, str | Path) and Path(source).suffix == ".json" and Path(source).is_file():
        with Path(source).open("rb") as file:
            start = file.read(64).decode(errors="replace")
        return read_plan(Path(source)) if PLAN_MARKER in start else None
    return source if isinstance(source, Plan) else None
