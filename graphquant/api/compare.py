"""Comparison of two models on the same data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphquant import formats
from graphquant.analysis import compare_runners, match_sites
from graphquant.analysis.compare import match_inputs, reference_runner, with_sensitivity
from graphquant.api.models import as_model
from graphquant.calibration import is_batch_independent, measure_footprint
from graphquant.calibration.holdout import open_optional_labels
from graphquant.errors import UsageError
from graphquant.utils.options import CompareOptions, resolve_options, takes_options
from graphquant.utils.progress import stage_progress

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.analysis import ComparedSites, Comparison
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Runner
    from graphquant.ir import Model
    from graphquant.optimize import Sensitivity
    from graphquant.utils.progress import Progress


@takes_options(CompareOptions)
def compare(
    model: Model | str | Path,
    quantized_model: Model | str | Path,
    data: str,
    options: CompareOptions | None = None,
    *,
    progress: Progress | None = None,
    **values: Any,
) -> Comparison:
    """Measure the error of a quantized model: of each output, and of each quantized tensor.

    Args:
        model: The float model, or its path.
        quantized_model: The quantized model, or its path; it may be of another framework.
        data: A calibration data spec. Accuracy is measured if the data has `labels`.
        options: The options, in place of keyword arguments.
        progress: Progress callback.
        values: The options as keyword arguments.

    Raises:
        DataError: The data cannot be read, or does not fit the models.
        MissingDependencyError: A framework is not installed.
        ModelError: A model cannot be read or run.
        UsageError: The inputs or outputs differ, a model is a TFLite model, or an option is invalid.
    """
    from graphquant.calibration.data import open_data

    settings = resolve_options(CompareOptions, options, values)
    float_ir, quantized_ir = as_model(model), as_model(quantized_model)
    for model_ir in (float_ir, quantized_ir):
        if not model_ir.traits.rewritable:
            raise UsageError(
                f"{model_ir.path} is a TFLite model, which cannot be run. Compare the models from which it was"
                " converted."
            )
    sites = match_sites(float_ir, quantized_ir) if settings.sites else None
    float_runner = formats.format_module(float_ir.format).create_runner(float_ir)
    batches = open_data(data, float_runner.inputs, samples=settings.samples, require_finite=False)
    batches, labels = open_optional_labels(batches, data, float_runner.inputs, settings.samples)
    quantized_runner = formats.format_module(quantized_ir.format).create_runner(quantized_ir)
    sensitivity = None
    if sites is not None and settings.sensitivity:
        sensitivity = _measure_sensitivity(quantized_ir, sites, float_runner, quantized_runner, batches, progress)
    comparison = compare_runners(
        float_runner,
        quantized_runner,
        batches,
        load=measure_footprint(float_runner, batches),
        sites=sites,
        site_runner=reference_runner(float_ir, sites, float_runner),
        outputs=settings.outputs,
        labels=labels,
        progress=stage_progress(progress, "comparing"),
    )
    return comparison if sensitivity is None else with_sensitivity(comparison, sensitivity.sqnr)


def _measure_sensitivity(
    quantized_model: Model,
    sites: ComparedSites,
    float_runner: Runner,
    quantized_runner: Runner,
    batches: Dataset,
    progress: Progress | None,
) -> Sensitivity:
    """Measure the effect of each quantization alone on the outputs."""
    from graphquant.optimize.sensitivity import BATCH_SIZE, measure_sensitivity

    inputs = match_inputs(float_runner.inputs, quantized_runner.inputs)
    sensitivity = measure_sensitivity(
        quantized_model,
        sites,
        batches,
        inputs=inputs,
        batch_independent=is_batch_independent(float_runner, batches, BATCH_SIZE)
        and is_batch_independent(quantized_runner, batches, BATCH_SIZE, inputs=inputs),
        progress=stage_progress(progress, "measuring sensitivity"),
    )
    if sensitivity.interrupted:
        raise KeyboardInterrupt
    return sensitivity
