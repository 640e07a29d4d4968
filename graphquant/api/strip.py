"""Removal of quantization, and the comparison of the result with the original model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from graphquant import formats
from graphquant.analysis.diff import Differences, diff_models
from graphquant.api.models import as_model
from graphquant.api.plan import prepare_with_steps
from graphquant.errors import ModelError, UsageError
from graphquant.ir import STORED_KINDS, Model, Parameters, TensorRef, qualified_op_name
from graphquant.numerics import Array, IntType, QParams, dequantize, quantize
from graphquant.quantize import prepare, requantize
from graphquant.quantize.preparation_undo import remove_unread_ops
from graphquant.quantize.strip import strip_quantization
from graphquant.utils import HtmlRepresentation


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StripResult(HtmlRepresentation):
    """Result of `strip`."""

    model: Model  # the float model
    exact: bool  # True if it is the source model bit for bit, from the record in the quantized model
    ops: tuple[TensorRef, ...] = ()  # the removed quantization ops; empty with `exact`
    # Constants that were stored as integers, with the parameters of their rounding.
    weights: tuple[tuple[TensorRef, QParams], ...] = ()
    # Exponents of the powers of two by which constants were divided, which broadcast to them.
    exponents: Mapping[TensorRef, Array] = field(default_factory=dict)
    remaining: tuple[tuple[TensorRef, str], ...] = ()  # quantization ops that were not removed, with the reason
    steps: str = ""  # preparation steps that the model keeps, or ""
    notes: tuple[str, ...] = ()  # other messages about the result


def strip(model: Model | str | Path, *, everything: bool = False) -> StripResult:
    """Restore the float model of a quantized model.

    A model with float weights contains a record that restores the source bit for bit. A model with integer weights
    is restored to the prepared graph, and its weights keep their rounding error.

    Args:
        model: The quantized model, or its path.
        everything: If True, also remove quantization ops of other tools, op by op.

    Raises:
        ModelError: The model cannot be read.
        UsageError: There is nothing to remove, or the model is a TFLite model.
    """
    source = as_model(model)
    if not source.traits.rewritable:
        raise UsageError(
            f"{source.path} is a TFLite model, which graphquant reads but cannot rewrite. Strip the TensorFlow model"
            " from which it was converted."
        )
    module, notes = formats.format_module(source.format), []
    if not everything:
        try:
            origin = module.restore_original(source)
        except ModelError as error:
            notes.append(f"{error} Inserted ops are removed one by one.")
        else:
            if origin is not None and origin[1]:
                return StripResult(model=origin[0], exact=True)
            if origin is not None:
                notes.append("The graph was changed after graphquant wrote it. Inserted ops are removed one by one.")
    provenance = formats.provenance_of(source)
    removed = strip_quantization(source, provenance)
    model, ops, remaining = removed.model, removed.ops, removed.remaining
    if everything:
        model, steps_made = prepare(model, [requantize.REQUANTIZE_STEP])
        ops += tuple(TensorRef("", step.target) for step in steps_made)
        remaining += tuple(
            (TensorRef(graph.name, op.name), reason)
            for graph, op, reason in requantize.remaining_quantization_ops(model)
        )
        model.provenance = {}
    if not ops:
        missing = (
            "no Q/DQ pairs to remove. Use the float model from which it was quantized."
            if everything
            else "no quantization ops from graphquant. --all also removes quantization ops of other tools."
        )
        raise UsageError(f"{source.path or 'The model'} has {missing}")
    counts = {"biases": removed.restored_biases, "scaled constants": len(removed.exponents)}  # earlier versions: none
    restored = " and ".join(f"{count} {name}" for name, count in counts.items() if count)
    texts = {
        "steps": "The model keeps its preparation for quantization",
        "algorithms": "Weights and biases keep the changes of optimization algorithms"
        + (f", except for {restored}, which are restored" if restored else ""),
    }
    notes += [f"{text}: {provenance[key]}." for key, text in texts.items() if provenance.get(key)]
    if removed.replaced_arguments:
        weight_names = ", ".join(map(str, removed.replaced_arguments))
        notes.append(
            f"These weights were arguments of function calls, and are constants of the function now: {weight_names}."
        )
    return StripResult(
        model=model,
        exact=False,
        ops=ops,
        weights=removed.weights,
        exponents=removed.exponents,
        remaining=remaining,
        steps=provenance.get("steps", ""),
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Comparison of a stripped model with its original."""

    equal: bool  # True if both models are identical
    rounded_weights: int = 0  # number of weights that differ only by their rounding error
    other_differences: Differences  # all other differences
    steps: str = ""  # preparation steps that were applied to the original before the comparison, or ""

    @property
    def holds(self) -> bool:
        """True if the model equals the original except for rounded weights."""
        return self.equal or not self.other_differences


def prove_stripped(stripped: StripResult, original: Model | str | Path) -> Proof:
    """Compare the result of `strip` with the original float model.

    Raises a ModelError if the float model cannot be read or prepared, and a UsageError if the float model has another
    format.
    """
    expected, stripped_model = as_model(original), stripped.model
    if stripped_model.format == expected.format:
        message = formats.format_module(stripped_model.format).emit(stripped_model)
        if message == formats.format_module(expected.format).emit(expected):
            return Proof(equal=True, other_differences=Differences(changes=()))
    prepared = _store_computed_weights(prepare_with_steps(expected, stripped.steps, stripped.model.opset), stripped)
    differences = diff_models(prepared, stripped_model)
    rounded_names = _rounded_weight_names(prepared, stripped)
    unexplained = tuple(
        change for change in differences.changes if change.kind != "weight" or change.location not in rounded_names
    )
    return Proof(
        equal=False,
        rounded_weights=len(differences.changes) - len(unexplained),
        other_differences=replace(differences, changes=unexplained),
        steps=stripped.steps,
    )


def _store_computed_weights(original: Model, stripped: StripResult) -> Model:
    """Return the original with a constant in place of each op that computes a rounded weight, such as a Transpose."""
    result, parameters = original.copy(), Parameters(original)
    for tensor, _ in stripped.weights:
        graph = result.graphs.get(tensor.graph)
        op = graph.op(tensor.op) if graph is not None and tensor.op in graph else None
        value = None if op is None or op.kind in STORED_KINDS else parameters.value(tensor)
        if graph is not None and op is not None and value is not None and len(op.outputs) == 1:
            slots = [slot for slot in graph.slots(op.name) if slot is not None]
            graph.replace_op(replace(op, kind="constant", type="Constant", roles=(), read_value=value.view), ())
            remove_unread_ops(result, slots)
    return result


def _rounded_weight_names(original: Model, stripped: StripResult) -> set[str]:
    """Return the names of weights that equal the original weights after quantization and dequantization."""
    stripped_parameters, original_parameters = Parameters(stripped.model), Parameters(original)
    rounded_names = set()
    for tensor, params in stripped.weights:
        if not all(tensor.op in model.graphs.get(tensor.graph, ()) for model in (original, stripped.model)):
            continue
        original_value, stripped_value = original_parameters.value(tensor), stripped_parameters.value(tensor)
        if original_value is None or stripped_value is None or original_value.shape != stripped_value.shape:
            continue
        if (exponents := stripped.exponents.get(tensor)) is not None:  # integers are those of scaled values
            original_value, stripped_value = (np.ldexp(value, exponents) for value in (original_value, stripped_value))
        # The stored integers do not show that the range was narrow, so both variants are tried.
        rounding_params = (params, replace(params, narrow=True)) if isinstance(params.type, IntType) else (params,)
        if any(
            np.array_equal(
                dequantize(quantize(original_value, qparams), qparams).astype(stripped_value.dtype), stripped_value
            )
            for qparams in rounding_params
        ):
            rounded_names.add(qualified_op_name(tensor.graph, tensor.op))
    return rounded_names
