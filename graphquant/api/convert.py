"""A quantized TensorFlow model as a TFLite file, with the proof that the runtime has the scales that were planned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graphquant.analysis.conversion_report import ConversionReport, compare_conversion
from graphquant.api.models import check_output
from graphquant.errors import UsageError
from graphquant.utils.atomic_files import atomic_file

if TYPE_CHECKING:
    from graphquant.api.result import Result
    from graphquant.ir import Model
    from graphquant.quantize import Site


TFLITE_SUFFIX = ".tflite"

CONVERTIBLE_BITS = 8
"""The converter gives other widths wrong int16 convolutions without a word, or fails."""


def freeze(model: Model) -> Model:
    """`model` as one graph of ops and constants, which is what can be converted.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: TensorFlow cannot freeze the model.
        UsageError: It is no TensorFlow model.
    """
    if model.format != "tensorflow":
        raise UsageError(
            f"{model.path or 'The model'} is in the format {model.format}, and TensorFlow's converter makes TFLite"
            " files of TensorFlow models alone. Start from the TensorFlow model, or write the model in its own format."
        )
    from graphquant.formats.tensorflow.tflite_converter import freeze_graph as made

    return made(model)


def convert_to_tflite(result: Result, path: str | Path | None, *, force: bool = False) -> ConversionReport:
    """Converts a quantized frozen model, compares it with its plan, and writes it.

    Args:
        result: What `insert` made of a frozen model.
        path: The file, which is written whole or not at all; None writes nothing.
        force: Replace what is at `path`.

    Returns:
        Each planned tensor's scale and zero point beside the runtime's; the file is written also where they differ.

    Raises:
        MissingDependencyError: tensorflow is not installed.
        ModelError: The converter or the runtime refuses the model.
        UsageError: The plan has what the converter cannot carry over, or `path` cannot be written.
    """
    if path is not None:
        check_output(Path(path), result.source.path, force=force)
    if result.model.format != "tensorflow" or len(result.model.graphs) > 1:
        raise UsageError(
            "Only a frozen TensorFlow graph can be converted. Quantize what graphquant.freeze(model) gives."
        )
    inconvertible = [
        (insertion.site, reason)
        for insertion in result.inserted
        if (reason := _inconvertible_reason(result.model, insertion.site))
    ]
    if inconvertible:
        (site, reason), count = inconvertible[0], len(inconvertible)
        rest_hint = f" {count - 1} more sites are like that." if count > 1 else ""
        raise UsageError(f"TFLite's converter cannot carry over {site.tensor}, because {reason}.{rest_hint}")
    from graphquant.formats.tensorflow.tflite_converter import run_tflite_converter as run
    from graphquant.formats.tensorflow.tflite_converter import runtime_tensors
    from graphquant.formats.tflite import parse_tflite

    data = run(result.model)
    report = compare_conversion(result.model, result.inserted, parse_tflite(data), runtime_tensors(data))
    if path is not None:
        _write_tflite(Path(path), data)
    return report


def _inconvertible_reason(model: Model, site: Site) -> str:
    """Why the converter would make something else of a site, "" if it would not."""
    scheme = site.scheme
    if scheme.family != "fake-quant":
        return f"it understands FakeQuant alone and not {scheme.family}; give --family fake-quant"
    if scheme.type.bits != CONVERTIBLE_BITS:
        return f"FakeQuants of {scheme.type.bits} bits become other numbers or none; use {CONVERTIBLE_BITS} bits"
    if scheme.range == "learned":
        return 'its range is in variables, which TFLite has not; take range = "observed"'
    kinds = {model.graphs[use.graph].op(use.op).kind for use in site.uses}
    if site.axis is not None and "matmul" in kinds:
        return "a MatMul's weight per channel breaks it; quantize that weight per tensor, as the rules tflite do"
    return ""


def _write_tflite(path: Path, data: bytes) -> None:
    try:
        with atomic_file(path) as file:
            file.write(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}. Give another output with -o.") from error
