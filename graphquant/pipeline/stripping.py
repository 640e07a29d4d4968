"""Quantization taken out again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.errors import ModelError, UsageError
from graphquant.ir import TensorRef
from graphquant.pipeline.models import loaded
from graphquant.prepare import prepare, requantize
from graphquant.stripping import take_out

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from graphquant.ir import Model
    from graphquant.numerics import QParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripped:
    """What `strip` gave back.

    Attributes:
        model: The float model.
        exact: Whether it is the very model that was quantized, from the record in the quantized one.
        ops: The quantization ops that were taken out, empty with `exact`.
        weights: Constants that were stored as integers and are floats again, and how they are rounded.
        left: Quantization ops that are still there, with the reason.
        steps: How it stays prepared for quantization, "" if it was not.
        notes: What else there is to say of it.
    """

    model: Model
    exact: bool
    ops: tuple[TensorRef, ...] = ()
    weights: tuple[tuple[TensorRef, QParams], ...] = ()
    left: tuple[tuple[TensorRef, str], ...] = ()
    steps: str = ""
    notes: tuple[str, ...] = ()


def strip(model: Model | str | Path, *, everything: bool = False) -> Stripped:
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
    source = loaded(model)
    if source.format == "tflite":
        raise UsageError(
            f"{source.path} is a TFLite model, which can be read, not rewritten. Strip the TensorFlow model that it was"
            " made from."
        )
    module, notes = formats.module(source.format), []
    if not everything:
        try:
            found = module.origin(source)
        except ModelError as error:
            notes.append(f"{error} What was inserted is taken out op by op.")
        else:
            if found is not None and found[1]:
                return Stripped(model=_writable(found[0], source), exact=True)
            if found is not None:
                notes.append(
                    "The graph was changed since graphquant wrote it. What was inserted is taken out op by op."
                )
    removed = take_out(source)
    model, ops, left = removed.model, removed.ops, removed.left
    if everything:
        model, steps_made = prepare(model, [requantize.NAME])
        ops += tuple(TensorRef("", step.target) for step in steps_made)
        left += tuple((one.tensor, one.reason) for one in requantize.left(model))
        model.provenance = {}
    if not ops:
        missing = (
            "no pairs of quantization and dequantization to take out. Take the float model that it was made of."
            if everything
            else "no quantization ops that graphquant inserted. --all takes out quantization ops of other tools too."
        )
        raise UsageError(f"{source.path or 'The model'} has {missing}")
    words = module.said(source)
    notes += _stays(words)
    if removed.passed:
        named = ", ".join(map(str, removed.passed))
        notes.append(
            f"Weights that calls passed to their function are constants in it now, as they were stored: {named}."
        )
    return Stripped(
        model=model,
        exact=False,
        ops=ops,
        weights=removed.weights,
        left=left,
        steps=words.get("steps", ""),
        notes=tuple(notes),
    )


def _stays(said: Mapping[str, str]) -> list[str]:
    """What of the work stays in a model whose quantization is gone, as the model said it."""
    notes = []
    if said.get("steps"):
        notes.append(f"It stays prepared as it was for quantization: {said['steps']}.")
    if said.get("corrections"):
        notes.append(f"Its weights and biases stay corrected for rounding that is gone: {said['corrections']}.")
    return notes


def _writable(model: Model, source: Model) -> Model:
    """The model with what its loader would have set."""
    model.saver = source.saver
    return model


__all__ = ["Stripped", "strip"]
