"""The proof that a stripped model is the float model it was made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant import formats
from graphquant.differences import Differences, diff_models
from graphquant.ir import Parameters, named
from graphquant.numerics import IntType, dequantize, quantize
from graphquant.pipeline.models import loaded
from graphquant.pipeline.planning import prepared_as

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.ir import Model
    from graphquant.pipeline.stripping import Stripped


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What holds a stripped model beside its original.

    Attributes:
        equal: The two are one message.
        rounded: How many weights differ by their rounding alone.
        other: What else differs.
        steps: How the original was prepared to be held beside it, "" if it was not.
    """

    equal: bool
    rounded: int = 0
    other: Differences
    steps: str = ""

    @property
    def holds(self) -> bool:
        """Whether it is the original, but for rounded weights."""
        return self.equal or not self.other


def prove_stripped(stripped: Stripped, original: Model | str | Path) -> Proof:
    """Holds what `strip` gave back beside the float model.

    Raises:
        ModelError: The float model cannot be read or prepared.
        UsageError: It is of another format.
    """
    expected, found = loaded(original), stripped.model
    if found.format == expected.format:
        message = formats.module(found.format).emit(found)
        if message == formats.module(expected.format).emit(expected):
            return Proof(equal=True, other=Differences(changes=()))
    prepared = prepared_as(expected, stripped.steps, stripped.model.opset)
    differences = diff_models(prepared, found)
    fine = _rounded(prepared, stripped)
    other = tuple(one for one in differences.changes if one.kind != "weight" or one.where not in fine)
    changed = sum(change.kind == "weight" and change.where in fine for change in differences.changes)
    return Proof(equal=False, rounded=changed, other=replace(differences, changes=other), steps=stripped.steps)


def _rounded(original: Model, stripped: Stripped) -> set[str]:
    """The weights that are those of the original, quantized with the scales they had, and dequantized."""
    found, expected = Parameters(stripped.model), Parameters(original)
    fine = set()
    for tensor, params in stripped.weights:
        home = original.graphs.get(tensor.graph)
        before = expected.value(tensor) if home is not None and tensor.op in home else None
        after = found.value(tensor)
        if before is None or after is None or before.shape != after.shape:
            continue
        # An op of integers does not say that the lowest one was left out.
        ways = (params, replace(params, narrow=True)) if isinstance(params.type, IntType) else (params,)
        if any(np.array_equal(dequantize(quantize(before, way), way).astype(after.dtype), after) for way in ways):
            fine.add(named(tensor.graph, tensor.op))
    return fine


__all__ = ["Proof", "prove_stripped"]
