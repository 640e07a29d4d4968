"""Quantization taken out again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant import formats
from graphquant.analysis import Differences, diff_models
from graphquant.api.models import as_model
from graphquant.api.plan import prepare_with_steps
from graphquant.errors import ModelError, UsageError
from graphquant.ir import Parameters, TensorRef, qualified_op_name
from graphquant.numerics import IntType, dequantize, quantize
from graphquant.quantize import prepare, requantize
from graphquant.quantize.strip import strip_quantization

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphquant.ir import Model
    from graphquant.numerics import QParams


@dataclass(frozen=True, slots=True, kw_only=True)
class StripResult:
    """What `strip` gave back.

    Attributes:
        model: The float model.
        exact: Whether it is the very model that was quantized, from the record in the quantized one.
        ops: The quantization ops that were taken out, empty with `exact`.
        weights: Constants that were stored as integers and are floats again, and how they are rounded.
        remaining: Quantization ops that are still there, with the reason.
        steps: How it stays prepared for quantization, "" if it was not.
        notes: What else there is to say of it.
    """

    model: Model
    exact: bool
    ops: tuple[TensorRef, ...] = ()
    weights: tuple[tuple[TensorRef, QParams], ...] = ()
    remaining: tuple[tuple[TensorRef, str], ...] = ()
    steps: str = ""
    notes: tuple[str, ...] = ()


def strip(model: Model | str | Path, *, everything: bool = False) -> StripResult:
    """The float model that a quantized one was made of.

    Where graphquant kept the weights float, the model has a record that gives the source back bit for bit. Where it
    stored them as integers, the graph is given back as it was prepared, and weights keep their rounding.

    Args:
        model: The quantized model, or its path.
        everything: Take out quantization ops of other tools too, op by op.

    Raises:
        ModelError: The model cannot be read.
        UsageError: There is nothing to take out, or it is a TFLite model.
    """
    source = as_model(model)
    if source.format == "tflite":
        raise UsageError(
            f"{source.path} is a TFLite model, which can be read, not rewritten. Strip the TensorFlow model that it was"
            " made from."
        )
    module, notes = formats.format_module(source.format), []
    if not everything:
        try:
            origin = module.restore_original(source)
        except ModelError as error:
            notes.append(f"{error} What was inserted is taken out op by op.")
        else:
            if origin is not None and origin[1]:
                return StripResult(model=_with_saver(origin[0], source), exact=True)
            if origin is not None:
                notes.append(
                    "The graph was changed since graphquant wrote it. What was inserted is taken out op by op."
                )
    removed = strip_quantization(source)
    model, ops, remaining = removed.model, removed.ops, removed.remaining
    if everything:
        model, steps_made = prepare(model, [requantize.REQUANTIZE_STEP])
        ops += tuple(TensorRef("", step.target) for step in steps_made)
        remaining += tuple(
            (leftover.tensor, leftover.reason) for leftover in requantize.skipped_quantization_ops(model)
        )
        model.provenance = {}
    if not ops:
        missing = (
            "no pairs of quantization and dequantization to take out. Take the float model that it was made of."
            if everything
            else "no quantization ops that graphquant inserted. --all takes out quantization ops of other tools too."
        )
        raise UsageError(f"{source.path or 'The model'} has {missing}")
    provenance = module.read_metadata(source)
    notes += _lasting_changes(provenance)
    if removed.replaced_arguments:
        weight_names = ", ".join(map(str, removed.replaced_arguments))
        notes.append(
            f"Weights that calls passed to their function are constants in it now, as they were stored: {weight_names}."
        )
    return StripResult(
        model=model,
        exact=False,
        ops=ops,
        weights=removed.weights,
        remaining=remaining,
        steps=provenance.get("steps", ""),
        notes=tuple(notes),
    )


def _lasting_changes(provenance: Mapping[str, str]) -> list[str]:
    """What of the work stays in a model whose quantization is gone, as the model said it."""
    notes = []
    if provenance.get("steps"):
        notes.append(f"It stays prepared as it was for quantization: {provenance['steps']}.")
    if provenance.get("corrections"):
        notes.append(f"Its weights and biases stay corrected for rounding that is gone: {provenance['corrections']}.")
    return notes


def _with_saver(model: Model, source: Model) -> Model:
    """The model with what its loader would have set."""
    model.save_model = source.save_model
    return model


# The proof that a stripped model is the float model it was made of.


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What holds a stripped model beside its original.

    Attributes:
        equal: The two are one message.
        rounded_weights: How many weights differ by their rounding alone.
        other_differences: What else differs.
        steps: How the original was prepared to be held beside it, "" if it was not.
    """

    equal: bool
    rounded_weights: int = 0
    other_differences: Differences
    steps: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is the original, but for rounded weights."""
        return self.equal or not self.other_differences


def prove_stripped(stripped: StripResult, original: Model | str | Path) -> Proof:
    """Holds what `strip` gave back beside the float model.

    Raises:
        ModelError: The float model cannot be read or prepared.
        UsageError: It is of another format.
    """
    expected, stripped_model = as_model(original), stripped.model
    if stripped_model.format == expected.format:
        message = formats.format_module(stripped_model.format).emit(stripped_model)
        if message == formats.format_module(expected.format).emit(expected):
            return Proof(equal=True, other_differences=Differences(changes=()))
    prepared = prepare_with_steps(expected, stripped.steps, stripped.model.opset)
    differences = diff_models(prepared, stripped_model)
    rounded_names = _rounded_weight_names(prepared, stripped)
    unexplained = tuple(
        difference
        for difference in differences.changes
        if difference.kind != "weight" or difference.location not in rounded_names
    )
    rounded_count = sum(change.kind == "weight" and change.location in rounded_names for change in differences.changes)
    return Proof(
        equal=False,
        rounded_weights=rounded_count,
        other_differences=replace(differences, changes=unexplained),
        steps=stripped.steps,
    )


def _rounded_weight_names(original: Model, stripped: StripResult) -> set[str]:
    """The weights that are those of the original, quantized with the scales they had, and dequantized."""
    stripped_parameters, original_parameters = Parameters(stripped.model), Parameters(original)
    rounded_names = set()
    for tensor, params in stripped.weights:
        graph = original.graphs.get(tensor.graph)
        original_value = original_parameters.value(tensor) if graph is not None and tensor.op in graph else None
        stripped_value = stripped_parameters.value(tensor)
        if original_value is None or stripped_value is None or original_value.shape != stripped_value.shape:
            continue
        # An op of integers does not say that the lowest one was left out.
        rounding_params = (params, replace(params, narrow=True)) if isinstance(params.type, IntType) else (params,)
        if any(
            np.array_equal(
                dequantize(quantize(original_value, qparams), qparams).astype(stripped_value.dtype), stripped_value
            )
            for qparams in rounding_params
        ):
            rounded_names.add(qualified_op_name(tensor.graph, tensor.op))
    return rounded_names
