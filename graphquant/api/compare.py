"""Two models on the same data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.api.models import as_model
from graphquant.api.options import stage_progress
from graphquant.calibration import estimate_footprint
from graphquant.errors import DataError, UsageError
from graphquant.formats import InputSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphquant.analysis import ComparedSites, Comparison
    from graphquant.api.options import Progress
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Runner
    from graphquant.ir import Model
    from graphquant.optimize import Sensitivity


LABEL_KEYS = ("labels", "label")
"""Keys under which data may hold the class of each sample."""


def compare(
    model: Model | str | Path,
    quantized_model: Model | str | Path,
    data: str,
    *,
    samples: int | None = None,
    outputs: Mapping[str, str] | None = None,
    sites: bool = True,
    sensitivity: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """How far a quantized model is from its float model: each output, and each quantized tensor.

    Args:
        model: The float model, or its path.
        quantized_model: The quantized one, or its path; it may be of another framework.
        data: A calibration data spec; what it holds as `labels` gives accuracy.
        samples: Use only that many samples.
        outputs: Names of the float model's outputs and what they are called in the other; the rest is matched by
            name, and what is left in order.
        sites: Measure quantized tensors too.
        sensitivity: Measure for each of them the error that it adds alone at the outputs, in at most 16 runs.
        progress: Is told how far the work is.

    Raises:
        DataError: The data cannot be read, or does not fit the models.
        MissingDependencyError: A framework is not installed.
        ModelError: A model cannot be read or run.
        UsageError: The models have different inputs or outputs, or one is a TFLite model.
    """
    from graphquant.analysis import compare_runners as _compare
    from graphquant.analysis import match_sites

    float_ir, quantized_ir = as_model(model), as_model(quantized_model)
    for model_ir in (float_ir, quantized_ir):
        if model_ir.format == "tflite":
            raise UsageError(
                f"{model_ir.path} is a TFLite model, which is not run. Compare the models that it was made of."
            )
    compared_sites = match_sites(float_ir, quantized_ir) if sites else None
    float_runner = formats.format_module(float_ir.format).create_runner(float_ir)
    from graphquant.calibration.data import open_data

    batches = open_data(data, float_runner.inputs, samples=samples, require_finite=False)
    batches, labels = open_optional_labels(batches, data, float_runner.inputs, samples)
    quantized_runner = formats.format_module(quantized_ir.format).create_runner(quantized_ir)
    measured_sensitivity = (
        None
        if compared_sites is None or not sensitivity
        else _measure_sensitivity(quantized_ir, compared_sites, float_runner, quantized_runner, batches, progress)
    )
    comparison = _compare(
        float_runner,
        quantized_runner,
        batches,
        load=estimate_footprint(float_ir, batch_independent=float_runner.batch_independent),
        sites=compared_sites,
        site_runner=reference_runner(float_ir, compared_sites, float_runner),
        outputs=outputs or {},
        labels=labels,
        progress=stage_progress(progress, "comparing"),
    )
    return comparison if measured_sensitivity is None else with_sensitivity(comparison, measured_sensitivity)


def reference_runner(float_model: Model, sites: ComparedSites | None, runner: Runner) -> Runner | None:
    """What runs the float model as `sites` has it: its `runner`, unless they have it prepared; None without sites."""
    if sites is None:
        return None
    return (
        runner
        if sites.float_model is float_model
        else formats.format_module(float_model.format).create_runner(sites.float_model)
    )


def with_sensitivity(comparison: Comparison, sensitivity: Sensitivity) -> Comparison:
    """The comparison with the blame of each quantized tensor, those with the most of it first."""
    sites = [replace(site, sensitivity=sensitivity.sqnr(site.graph, site.op)) for site in comparison.sites]
    sites.sort(key=lambda site: math.inf if site.sensitivity is None else site.sensitivity)
    return replace(comparison, sites=tuple(sites))


def _measure_sensitivity(
    quantized_model: Model,
    sites: ComparedSites,
    float_runner: Runner,
    quantized_runner: Runner,
    batches: Dataset,
    progress: Progress | None,
) -> Sensitivity:
    """What each quantization adds alone."""
    from graphquant.analysis.compare import match_inputs
    from graphquant.optimize import measure_sensitivity

    sensitivity = measure_sensitivity(
        quantized_model,
        sites,
        batches,
        inputs=match_inputs(float_runner.inputs, quantized_runner.inputs),
        batch_independent=float_runner.batch_independent and quantized_runner.batch_independent,
        progress=stage_progress(progress, "blaming"),
    )
    if sensitivity.interrupted:
        raise KeyboardInterrupt
    return sensitivity


def open_optional_labels(
    batches: Dataset, data: str, inputs: Sequence[InputSpec], samples: int | None
) -> tuple[Dataset, str]:
    """The data that was opened as `batches` with its labels where it has some that are classes, and their key."""
    if not set(LABEL_KEYS) & set(batches.ignored):
        return batches, ""
    try:
        return open_required_labels(batches, data, inputs, samples)
    except DataError:  # they are no classes
        return batches, ""


def open_required_labels(
    batches: Dataset, data: str, inputs: Sequence[InputSpec], samples: int | None
) -> tuple[Dataset, str]:
    """The data that was opened as `batches` with its labels, and their key.

    Raises:
        DataError: It has none, or they are no classes.
    """
    from graphquant.calibration.data import open_data

    name = next((name for name in LABEL_KEYS if name in batches.ignored), None)
    if name is None:
        raise DataError(
            f"{data} has no 'labels', which accuracy needs. Add them: an array of integers, the number of the class of"
            " each sample."
        )
    input_specs = [*inputs, InputSpec(name=name, dtype="int64", shape=(None,))]
    try:
        return open_data(data, input_specs, samples=samples, require_finite=False), name
    except DataError as error:
        raise DataError(f"{error} Labels are integers, the number of the class of each sample.") from error
