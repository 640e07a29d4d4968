"""Drawings of models, plans and results, and the neighborhood of an op."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import qualified_op_name
from graphquant.rules import load_ruleset, shipped_rule_files
from graphquant.visualize.annotations import annotate_model, annotate_plan, annotate_result
from graphquant.visualize.drawing import Drawing, build_drawing

if TYPE_CHECKING:
    from graphquant.analysis.range_report import RangeReport
    from graphquant.api import Result
    from graphquant.ir import Model
    from graphquant.quantize import Plan


def model_drawing(model: Model, range_report: RangeReport | None = None) -> Drawing:
    """Draw a model with its quantization, and with statistics of tensors of the same name."""
    summary = summarize_model(model)
    names = {reading.rule for reading in summary.quantization_ops if reading.rule}
    return build_drawing(model, annotate_model(summary, _rule_reasons(model, names), range_report))


def plan_drawing(prepared: Model, plan: Plan, range_report: RangeReport | None = None) -> Drawing:
    """Draw the prepared model of a plan with the planned quantization."""
    return build_drawing(prepared, annotate_plan(plan, range_report))


def result_drawing(result: Result) -> Drawing:
    """Draw the result of `insert`, with the histograms behind its ranges."""
    return build_drawing(result.model, annotate_result(result, summarize_model(result.model)))


def _rule_reasons(model: Model, names: set[str]) -> dict[str, str]:
    """Return the reasons of the named rules, from the shipped rule files."""
    reasons: dict[str, str] = {}
    if not names or model.format == "tflite":
        return reasons
    default_rules = formats.format_module(model.format).DEFAULT_RULES
    for file in (default_rules, *(name for name in shipped_rule_files() if name != default_rules)):
        if names <= set(reasons):
            break
        for bound in load_ruleset([file]).rules:
            reasons.setdefault(bound.rule.name, bound.rule.why)
    return reasons


def neighborhood(drawing: Drawing, name: str, hops: int) -> tuple[Drawing, list[int]]:
    """Cut out the boxes within `hops` wires of an op, a tensor, or an op that an annotation stands for.

    Returns:
        The cut drawing, and the numbers of the boxes that `name` matches.

    Raises:
        UsageError: Nothing in the drawing has this name.
    """
    matches = _boxes_by_name(drawing, name)
    neighbors: list[list[int]] = [[] for _ in drawing.boxes]
    for wire in drawing.wires:
        neighbors[wire.source].append(wire.target)
        neighbors[wire.target].append(wire.source)
    distance = dict.fromkeys(matches, 0)
    queue = deque(matches)
    while queue:
        box = queue.popleft()
        for neighbor in neighbors[box] if distance[box] < hops else ():
            if neighbor not in distance:
                distance[neighbor] = distance[box] + 1
                queue.append(neighbor)
    included = sorted(distance)
    numbers = {box: number for number, box in enumerate(included)}
    subdrawing = replace(
        drawing,
        boxes=[drawing.boxes[box] for box in included],
        wires=[
            replace(wire, source=numbers[wire.source], target=numbers[wire.target])
            for wire in drawing.wires
            if wire.source in numbers and wire.target in numbers
        ],
        controls=[
            (numbers[source], numbers[target])
            for source, target in drawing.controls
            if source in numbers and target in numbers
        ],
    )
    return subdrawing, [numbers[box] for box in matches]


def _boxes_by_name(drawing: Drawing, name: str) -> list[int]:
    """Return the numbers of the boxes that a name matches."""
    names: dict[str, list[int]] = {}
    for box_number, box in enumerate(drawing.boxes):
        full_name = qualified_op_name(box.graph, box.op.name)
        names.setdefault(full_name, []).append(box_number)
        for port, output in enumerate(box.op.outputs):
            names.setdefault(f"{full_name}:{port}", []).append(box_number)
            names.setdefault(output.name, []).append(box_number)
        for constant in box.constants:
            names.setdefault(constant.name, []).append(box_number)
    for wire in drawing.wires:
        for badge in wire.annotations:
            for _, folded_name in drawing.folded_ops[badge]:
                names.setdefault(folded_name, []).append(wire.target)
    if name not in names:
        hint = did_you_mean(name, names) or " `graphquant inspect --format graph-json` lists the names."
        raise UsageError(f"The drawing has nothing named {name!r}.{hint}")
    return list(dict.fromkeys(names[name]))
