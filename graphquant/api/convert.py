"""Conversion of TensorFlow models: to objects in memory, and to TFLite with a comparison of the scales."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant.analysis.conversion_report import ConversionReport, compare_conversion, find_wrong_kernel, join_reports
from graphquant.analysis.validation import DEFAULT_MIN_SQNR, OPTIMIZER_LOSS, validate_model
from graphquant.api.models import check_output
from graphquant.api.result import Result
from graphquant.errors import ModelError, UsageError
from graphquant.ir import WEIGHTED_KINDS
from graphquant.optimize.latency import MAX_TIMED_BYTES, time_in_turn
from graphquant.optimize.size_budget import model_constant_bytes
from graphquant.quantize import prepare
from graphquant.quantize.fold_batchnorm import FOLD_BATCHNORM_STEP
from graphquant.utils.atomic_files import lock_output, write_file
from graphquant.utils.text import join_limited

if TYPE_CHECKING:
    from graphquant.ir import Model
    from graphquant.quantize import Site

WEIGHT_BITS = 8
ACTIVATION_BITS = (8, 16)
"""The bit widths that TFLite's kernels support. With 16 bits the zero point is 0, and all activations have 16 bits."""


def freeze(model: Model) -> Model:
    """Return `model` as one graph of ops and constants, the only form that can be converted.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow cannot freeze the model.
        UsageError: It is not a TensorFlow model.
    """
    if model.format != "tensorflow":
        raise UsageError(
            f"{model.path or 'The model'} is in the format {model.format}. Only TensorFlow models can be frozen, and"
            " only they become TFLite files. Start from the TensorFlow model, or write the model in its own format."
        )
    from graphquant.formats.tensorflow import describe_unfrozen_variables
    from graphquant.formats.tensorflow.freeze import freeze_graph

    if problem := describe_unfrozen_variables(model):
        raise ModelError(problem)
    return freeze_graph(model)


def require_convertible(model: Model) -> None:
    """Convert a frozen float model, before calibration, so that an op without a TFLite kernel is known at once.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: The converter refuses the model.
    """
    from graphquant.formats.tensorflow.tflite_converter import convert_signatures

    convert_signatures(model)


def convert_to_tflite(
    result: Result, path: str | Path | None, *, force: bool = False, io: str | None = None
) -> ConversionReport:
    """Convert a quantized frozen model, compare it with its plan, and write it.

    Args:
        result: The result of `insert` for a frozen model.
        path: The file, which is written atomically; None writes nothing.
        force: Replace an existing file at `path`.
        io: The type of float inputs and outputs in the file. By default, inputs get the type of the plan's activations
            if the plan has a range for all of them, and so do outputs.

    Returns:
        Each planned tensor's scale and zero point with those of the runtime, and the errors of the file in TensorFlow's
        interpreter on the hold-out of `insert`. The file is written even if they differ.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: The converter or the runtime refuses the model.
        UsageError: The converter cannot preserve the plan, or `path` cannot be written.
    """
    if path is not None:
        check_output(Path(path), result.source.path, force=force)
    if result.model.format != "tensorflow" or len(result.model.graphs) > 1:
        raise UsageError(
            "Only a frozen TensorFlow graph can be converted. Quantize the result of graphquant.freeze(model)."
        )
    from graphquant.formats.tensorflow.tflite_converter import (
        MIN_DYNAMIC_WEIGHT_SIZE,
        convert_signatures,
        has_only_weight_ranges,
        join_tflite_files,
        runtime_tensors,
    )

    inserted, is_dynamic = result.inserted, has_only_weight_ranges(result.model)
    bits = max((site.site.scheme.type.bits for site in inserted if not _is_weight(result.model, site.site)), default=8)
    inconvertible = [
        (insertion.site, reason)
        for insertion in inserted
        if (reason := _inconvertible_reason(result.model, insertion.site, bits, is_dynamic=is_dynamic))
    ]
    if inconvertible:
        (site, reason), rest = inconvertible[0], len(inconvertible) - 1
        rest_hint = f" {rest} more sites cannot be converted either." if rest else ""
        raise UsageError(
            f"TFLite's converter cannot preserve the quantization of {site.tensor}, because {reason}.{rest_hint}"
        )
    from graphquant.formats.tflite import parse_tflite

    if is_dynamic:  # the values of smaller weights are rounded as planned, but stored as floats
        sizes = [math.prod(result.model.output(insertion.site.tensor).shape or ()) for insertion in inserted]
        inserted = tuple(
            insertion for insertion, size in zip(inserted, sizes, strict=True) if size >= MIN_DYNAMIC_WEIGHT_SIZE
        )
    files = convert_signatures(result.model, io)
    converted = [parse_tflite(data) for data in files]
    if any(map(find_wrong_kernel, converted)):
        files = convert_signatures(result.model, io, keep_float=True)
        converted = [parse_tflite(data) for data in files]
    report = join_reports(
        [
            compare_conversion(result.model, inserted, model, runtime_tensors(data))
            for model, data in zip(converted, files, strict=True)
        ]
    )
    if is_dynamic and not report.agrees and (steps := prepare(result.source, (FOLD_BATCHNORM_STEP,))[1]):
        targets = join_limited([step.target for step in steps])
        advice = f'the converter folds {targets} into weights; a rule file with prepare = ["{FOLD_BATCHNORM_STEP}"]'
        report = replace(report, warnings=(f"{advice} before the other rules plans the scales of the folded weights",))
    data = join_tflite_files(files)
    report = _with_time(_with_validation(report, result, data), result, data)
    if path is not None:
        with lock_output(Path(path)):
            check_output(Path(path), result.source.path, force=force)  # another process may have written it since
            write_file(Path(path), data, "Give another output with -o.")
    return report


def _with_validation(report: ConversionReport, result: Result, data: bytes) -> ConversionReport:
    """Return the report with the errors of the TFLite file `data`, judged by those of the plan's pairs."""
    planned, holdout = result.validation, result.holdout
    if planned is None or planned.comparison is None or holdout is None:
        return report
    from graphquant.formats.tensorflow.runner import input_specs, output_fetches, served_signatures
    from graphquant.formats.tensorflow.tflite_converter import TFLiteRunner
    from graphquant.formats.tflite import parse_tflite

    signatures = served_signatures(result.source)
    first, *others = signatures
    names = {tensor: f"{signature.name}/{key}" for signature in others for key, tensor in signature.outputs.items()}
    names |= {tensor: key for key, tensor in first.outputs.items()}
    file = parse_tflite(data, Path("the converted model"))
    runner = TFLiteRunner(
        file, [signature.name for signature in signatures], list(names.values()), input_specs(result.source)
    )
    matches = {name: names[tensor] for name, tensor in output_fetches(result.source).items() if tensor in names}
    validation = validate_model(
        result.source, file, holdout, planned.bounds, None, quantized_runner=runner, outputs=matches
    )
    validation = replace(validation, reuses_samples=planned.reuses_samples)
    figures = () if validation.comparison is None else validation.comparison.outputs
    pairs = {output.name: output for output in planned.comparison.outputs}
    worse = []
    for output in figures:
        before, after, step = pairs[output.name].sqnr, output.sqnr, runner.output_steps[output.quantized_name]
        # The file rounds outputs that are float in the plan, such as probabilities.
        is_rounded = output.max_error <= pairs[output.name].max_error + step
        if before is not None and after is not None and before > after + OPTIMIZER_LOSS and not is_rounded:
            worse.append((output.name, after, before))
    # As for other formats, a default target that the pairs miss too is no failure.
    is_low = any(after < DEFAULT_MIN_SQNR for _, after, _ in worse)
    is_ruined = is_low or not figures or validation.worst_sqnr == -math.inf
    return replace(
        report,
        validation=validation,
        warnings=report.warnings
        + tuple(
            f"output {name!r} of the file has {after:.1f} dB, and {before:.1f} dB with the pairs of its plan"
            for name, after, before in worse
        ),
        failures=validation.failures if planned.bounds or result.strict or is_ruined else (),
    )


def _with_time(report: ConversionReport, result: Result, data: bytes) -> ConversionReport:
    """Return the report with the time of a run of the TFLite file `data` on zeros, relative to the float model's."""
    if report.validation is None or model_constant_bytes(result.source) > MAX_TIMED_BYTES:
        return report
    from graphquant.formats.tensorflow.runner import input_specs
    from graphquant.formats.tensorflow.tflite_converter import (
        convert_signatures,
        join_tflite_files,
        prepare_interpreter,
    )

    if any(None in (spec.shape or (None, None))[1:] for spec in input_specs(result.source)):
        return report  # the interpreter would run with a size of 1
    ratio = None
    with suppress(ModelError):  # the report does without it, for example if the model fails on zeros
        float_data = join_tflite_files(convert_signatures(result.source))
        ratio = time_in_turn(partial(prepare_interpreter, data), partial(prepare_interpreter, float_data)).median
    return replace(report, time_ratio=ratio)


def _is_weight(model: Model, site: Site) -> bool:
    """Return True for a constant that is the weight of a convolution or matrix product."""
    readers = [(model.graphs[use.graph].op(use.op), use.slot) for use in site.uses]
    return site.parameter and any(op.kind in WEIGHTED_KINDS and op.role(slot) == "weight" for op, slot in readers)


def _inconvertible_reason(model: Model, site: Site, activation_bits: int, *, is_dynamic: bool) -> str:
    """Return the reason why the converter would alter a site, "" if it would not."""
    scheme = site.scheme
    bits = scheme.type.bits
    if scheme.family != "fake-quant":
        return f"it supports only FakeQuant and not {scheme.family}; give --family fake-quant"
    if bits not in ACTIVATION_BITS or bits != (WEIGHT_BITS if _is_weight(model, site) else activation_bits):
        return (
            f"its kernels have no {bits} bits here; use 8 bits for weights and either 8 or 16 for all activations, as"
            " the rules tflite and tflite16 do"
        )
    if bits != WEIGHT_BITS and (scheme.zero != "symmetric" or not scheme.type.signed):
        return "its kernels take 16 bits only as int16 with the zero point 0, as the rules tflite16 have"
    if scheme.range == "learned":
        return 'its range is stored in variables, which TFLite does not support; use range = "observed"'
    kinds = {model.graphs[use.graph].op(use.op).kind for use in site.uses}
    if site.axis is not None and "matmul" in kinds and not is_dynamic and activation_bits == WEIGHT_BITS:
        return "it fails on per-channel weights of MatMul; quantize that weight per tensor, as the rules tflite do"
    return ""


def to_tf(model: Model | Result) -> Any:
    """Convert a TensorFlow model to an object in memory, of the kind from which it was loaded.

    Returns:
        A tf.Graph with its collections, if the model is a tf.Graph or a graph file. A new session with the same
        variable values, if it is a session. A ConcreteFunction with the same signature and the same variables, if it is
        a ConcreteFunction, a tf.function or a Keras model.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow rejects the model.
        UsageError: It is not a TensorFlow model, it is a SavedModel, or such an object cannot hold the inserted ops.
    """
    tensorflow_model = model.model if isinstance(model, Result) else model
    if tensorflow_model.format != "tensorflow":
        raise UsageError(
            f"{tensorflow_model.path or 'The model'} has the format {tensorflow_model.format}. Only TensorFlow models"
            " can be converted to objects."
        )
    from graphquant.formats.tensorflow import to_tensorflow

    return to_tensorflow(tensorflow_model)
