"""Drawings of what there is to look at: a model, a plan, what `insert` made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.ruleset import load_ruleset, shipped
from graphquant.survey import survey
from graphquant.view.badges import of_plan, of_result, of_survey
from graphquant.view.drawing import Drawing, draw

if TYPE_CHECKING:
    from graphquant.ir import Model
    from graphquant.picked import Picks
    from graphquant.pipeline import Result
    from graphquant.plans import Plan


def model_drawing(model: Model, picks: Picks | None = None) -> Drawing:
    """A model with the quantization that is in it, and statistics of the tensors that are called the same."""
    found = survey(model)
    names = {reading.rule for reading in found.readings if reading.rule}
    return draw(model, of_survey(found, _reasons(model, names), picks))


def plan_drawing(prepared: Model, plan: Plan, picks: Picks | None = None) -> Drawing:
    """The model that a plan names, with what the plan will put there."""
    return draw(prepared, of_plan(plan, picks))


def result_drawing(result: Result) -> Drawing:
    """What `insert` made, with the histograms that the ranges were picked from."""
    return draw(result.model, of_result(result, survey(result.model)))


def _reasons(model: Model, names: set[str]) -> dict[str, str]:
    """The reasons of rules that a model's ops name, from the rule files that come with graphquant."""
    found: dict[str, str] = {}
    if not names or model.format == "tflite":
        return found
    first = formats.module(model.format).DEFAULT_RULES
    for file in (first, *(name for name in shipped() if name != first)):
        if names <= set(found):
            break
        for bound in load_ruleset([file]).rules:
            found.setdefault(bound.rule.name, bound.rule.why)
    return found
