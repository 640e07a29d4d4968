"""Two models on the same data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.calibration import load_of
from graphquant.errors import DataError, UsageError
from graphquant.formats import InputSpec
from graphquant.pipeline.common import stage
from graphquant.pipeline.models import loaded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from graphquant.accuracy import Blame
    from graphquant.comparison import Comparison, Sites
    from graphquant.data import Batches
    from graphquant.formats import Runner
    from graphquant.ir import Model
    from graphquant.pipeline.common import Progress

LABELS = ("labels", "label")
"""Keys under which data may hold the class of each sample."""


def compare(
    model: Model | str | Path,
    other: Model | str | Path,
    data: str,
    *,
    samples: int | None = None,
    outputs: Mapping[str, str] | None = None,
    sites: bool = True,
    blame: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """How far a quantized model is from its float model: each output, and each quantized tensor.

    Args:
        model: The float model, or its path.
        other: The quantized one, or its path; it may be of another framework.
        data: A calibration data spec; what it holds as `labels` gives accuracy.
        samples: Use only that many samples.
        outputs: Names of the float model's outputs and what they are called in the other; the rest is matched by
            name, and what is left in order.
        sites: Measure quantized tensors too.
        blame: Measure for each of them the error that it adds alone at the outputs, in at most 16 runs.
        progress: Is told how far the work is.

    Raises:
        DataError: The data cannot be read, or does not fit the models.
        MissingDependencyError: A framework is not installed.
        ModelError: A model cannot be read or run.
        UsageError: The models have different inputs or outputs, or one is a TFLite model.
    """
    from graphquant.comparison import compare as _compare
    from graphquant.comparison import sites_of

    plain, quant = loaded(model), loaded(other)
    for one in (plain, quant):
        if one.format == "tflite":
            raise UsageError(f"{one.path} is a TFLite model, which is not run. Compare the models that it was made of.")
    found = sites_of(plain, quant) if sites else None
    runner = formats.module(plain.format).runner(plain)
    from graphquant.data import open_data

    batches = open_data(data, runner.inputs, samples=samples, finite=False)
    batches, labels = with_labels(batches, data, runner.inputs, samples)
    quantized = formats.module(quant.format).runner(quant)
    blamed = None if found is None or not blame else _blamed(quant, found, runner, quantized, batches, progress)
    made = _compare(
        runner,
        quantized,
        batches,
        load=load_of(plain, batchable=runner.batchable),
        sites=found,
        watched=watching(plain, found, runner),
        outputs=outputs or {},
        labels=labels,
        progress=stage(progress, "comparing"),
    )
    return made if blamed is None else with_blame(made, blamed)


def watching(plain: Model, sites: Sites | None, runner: Runner) -> Runner | None:
    """What runs the float model as `sites` has it: its `runner`, unless they have it prepared; None without sites."""
    if sites is None:
        return None
    return runner if sites.plain is plain else formats.module(plain.format).runner(sites.plain)


def with_blame(found: Comparison, blamed: Blame) -> Comparison:
    """The comparison with the blame of each quantized tensor, those with the most of it first."""
    sites = [replace(one, blame=blamed.sqnr(one.graph, one.op)) for one in found.sites]
    sites.sort(key=lambda one: math.inf if one.blame is None else one.blame)
    return replace(found, sites=tuple(sites))


def _blamed(
    quant: Model, sites: Sites, plain: Runner, quantized: Runner, batches: Batches, progress: Progress | None
) -> Blame:
    """What each quantization adds alone."""
    from graphquant.accuracy import blame
    from graphquant.comparison.outputs import match_inputs

    blamed = blame(
        quant,
        sites,
        batches,
        inputs=match_inputs(plain.inputs, quantized.inputs),
        batchable=plain.batchable and quantized.batchable,
        progress=stage(progress, "blaming"),
    )
    if blamed.interrupted:
        raise KeyboardInterrupt
    return blamed


def with_labels(batches: Batches, data: str, inputs: Sequence[InputSpec], samples: int | None) -> tuple[Batches, str]:
    """The data that was opened as `batches` with its labels where it has some that are classes, and their key."""
    if not set(LABELS) & set(batches.ignored):
        return batches, ""
    try:
        return labelled(batches, data, inputs, samples)
    except DataError:  # they are no classes
        return batches, ""


def labelled(batches: Batches, data: str, inputs: Sequence[InputSpec], samples: int | None) -> tuple[Batches, str]:
    """The data that was opened as `batches` with its labels, and their key.

    Raises:
        DataError: It has none, or they are no classes.
    """
    from graphquant.data import open_data

    name = next((name for name in LABELS if name in batches.ignored), None)
    if name is None:
        raise DataError(
            f"{data} has no 'labels', which accuracy needs. Add them: an array of integers, the number of the class of"
            " each sample."
        )
    taken = [*inputs, InputSpec(name=name, dtype="int64", shape=(None,))]
    try:
        return open_data(data, taken, samples=samples, finite=False), name
    except DataError as error:
        raise DataError(f"{error} Labels are integers, the number of the class of each sample.") from error


__all__ = ["compare", "labelled", "watching", "with_blame", "with_labels"]
