"""Two models, or two plans, beside each other; nothing is run."""

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


PREPARED_FORMATS = ("onnx", "tensorflow")
"""The formats whose models say how they were prepared."""

PLAN_MARKER = '"schema"'
"""What the start of a plan's file has, and that of a model in JSON has not."""


def diff(
    first: Model | Plan | str | Path, second: Model | Plan | str | Path, *, quantization: bool = True
) -> Differences:
    """What differs between two models, or two plans.

    Args:
        first: The first, or its path.
        second: The second, or its path.
        quantization: Tell what differs in quantization too.

    Raises:
        ModelError: A model cannot be read.
        UsageError: One is a model and the other a plan, or they are models of two formats.
    """
    from graphquant.analysis import diff_models, diff_plans

    plans = [plan_or_none(operand) for operand in (first, second)]
    if plans[0] is not None and plans[1] is not None:
        return diff_plans(plans[0], plans[1])
    if plans != [None, None]:
        raise UsageError("One of the two is a plan and the other a model. Compare models, or plans.")
    before, after, steps = align_preparation(as_model(first), as_model(second))
    differences = diff_models(before, after, quantization=quantization)
    return replace(differences, changes=(_preparation_change(steps), *differences.changes)) if steps else differences


def align_preparation(before: Model, after: Model) -> tuple[Model, Model, str]:
    """Two models, the first prepared as the second says if that was made of it, and the steps of that.

    Raises:
        ModelError: The opset cannot be raised.
    """
    steps = _recorded_steps(before, after)
    return (prepare_with_steps(before, steps, after.opset) if steps else before), after, steps


def _recorded_steps(before: Model, after: Model) -> str:
    """How `after` says that it was prepared, if it says that it was made of `before`; else ""."""
    if after.format != before.format or after.format not in PREPARED_FORMATS:
        return ""
    provenance = formats.format_module(after.format).read_metadata(after)
    return provenance.get("steps", "") if provenance.get("source") == before.digest else ""


def _preparation_change(steps: str) -> ModelChange:
    """What tells that one model is held beside the other as it was prepared."""
    return ModelChange(
        kind="model", location="preparation", message=f"{steps}; what follows is beside the prepared model"
    )


def plan_or_none(source: object) -> Plan | None:
    """The plan that is given, or that is at a path; None for a model."""
    if isinstance(source, str | Path) and Path(source).suffix == ".json" and Path(source).is_file():
        with Path(source).open("rb") as file:
            start = file.read(64).decode(errors="replace")
        return read_plan(Path(source)) if PLAN_MARKER in start else None
    return source if isinstance(source, Plan) else None
