"""Structural comparison of two models or two plans, without running them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.analysis import ModelChange
from graphquant.api.models import as_model
from graphquant.api.plan import prepare_with_steps
from graphquant.errors import UsageError
from graphquant.quantize import Plan, read_plan

if TYPE_CHECKING:
    from graphquant.analysis import Differences
    from graphquant.ir import Model


PLAN_MARKER = '"schema"'
"""Text near the start of each plan file, which ONNX models in JSON do not have."""


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
    from graphquant.analysis import diff_models, diff_plans

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

    Raises:
        ModelError: The opset cannot be upgraded.
    """
    steps = _recorded_steps(before, after)
    return (prepare_with_steps(before, steps, after.opset) if steps else before), after, steps


def _recorded_steps(before: Model, after: Model) -> str:
    """Return the preparation steps that `after` records, or "" if it was not quantized from `before`."""
    if after.format != before.format or not after.traits.rewritable:
        return ""
    provenance = formats.format_module(after.format).read_metadata(after)
    return provenance.get("steps", "") if provenance.get("source") == before.digest else ""


def plan_or_none(source: object) -> Plan | None:
    """Return the plan, read from its file if `source` is a path, or None for a model."""
    if isinstance(source, str | Path) and Path(source).suffix == ".json" and Path(source).is_file():
        with Path(source).open("rb") as file:
            start = file.read(64).decode(errors="replace")
        return read_plan(Path(source)) if PLAN_MARKER in start else None
    return source if isinstance(source, Plan) else None
