"""Two models, or two plans, beside each other; nothing is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.differences import Change
from graphquant.errors import UsageError
from graphquant.pipeline.models import loaded
from graphquant.pipeline.planning import prepared_as
from graphquant.plans import Plan, read_plan

if TYPE_CHECKING:
    from graphquant.differences import Differences
    from graphquant.ir import Model

PREPARED = ("onnx", "tensorflow")
"""The formats whose models say how they were prepared."""

PLAN = '"schema"'
"""What the start of a plan's file has, and that of a model in JSON has not."""


def diff(one: Model | Plan | str | Path, other: Model | Plan | str | Path, *, quantization: bool = True) -> Differences:
    """What differs between two models, or two plans.

    Args:
        one: The first, or its path.
        other: The second, or its path.
        quantization: Tell what differs in quantization too.

    Raises:
        ModelError: A model cannot be read.
        UsageError: One is a model and the other a plan, or they are models of two formats.
    """
    from graphquant.differences import diff_models, diff_plans

    plans = [plan_at(each) for each in (one, other)]
    if plans[0] is not None and plans[1] is not None:
        return diff_plans(plans[0], plans[1])
    if plans != [None, None]:
        raise UsageError("One of the two is a plan and the other a model. Compare models, or plans.")
    before, after, steps = aligned(loaded(one), loaded(other))
    found = diff_models(before, after, quantization=quantization)
    return replace(found, changes=(_prepared(steps), *found.changes)) if steps else found


def aligned(before: Model, after: Model) -> tuple[Model, Model, str]:
    """Two models, the first prepared as the second says if that was made of it, and the steps of that.

    Raises:
        ModelError: The opset cannot be raised.
    """
    steps = _steps(before, after)
    return (prepared_as(before, steps, after.opset) if steps else before), after, steps


def _steps(before: Model, after: Model) -> str:
    """How `after` says that it was prepared, if it says that it was made of `before`; else ""."""
    if after.format != before.format or after.format not in PREPARED:
        return ""
    said = formats.module(after.format).said(after)
    return said.get("steps", "") if said.get("source") == before.digest else ""


def _prepared(steps: str) -> Change:
    """What tells that one model is held beside the other as it was prepared."""
    return Change(kind="model", where="preparation", says=f"{steps}; what follows is beside the prepared model")


def plan_at(given: object) -> Plan | None:
    """The plan that is given, or that is at a path; None for a model."""
    if isinstance(given, str | Path) and Path(given).suffix == ".json" and Path(given).is_file():
        with Path(given).open("rb") as file:
            start = file.read(64).decode(errors="replace")
        return read_plan(Path(given)) if PLAN in start else None
    return given if isinstance(given, Plan) else None


__all__ = ["aligned", "diff", "plan_at"]
