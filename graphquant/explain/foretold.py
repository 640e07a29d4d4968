"""What a backend will do with ops that are asked for, in a model that is quantized or as a plan would quantize it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant.backends import BACKENDS, Verdict, check
from graphquant.calibration import needs_data
from graphquant.ir import Parameters
from graphquant.rewrite import rewrite
from graphquant.solve import clip_ends, solve

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphquant.explain.types import Explanation
    from graphquant.ir import Model, TensorRef
    from graphquant.plans import Plan
    from graphquant.solve import Solution

NEVER_NEGATIVE = frozenset({"sigmoid", "hard_sigmoid", "softmax", "exp", "abs", "sqrt"})
"""Kinds whose values start at 0, where that decides what can be absorbed."""

EMULATING = "tensorflow"
"""What runs TensorFlow's models; no `check` is for it, as it does the same with every op."""

EMULATED = "its quantization ops round floats. insert -o MODEL.tflite writes a model whose ops run on integers"

SILENT = frozenset({"input", "output", "constant", "variable"})
"""Kinds that compute nothing."""

FAR = 8
"""Ties that are followed to what the scale comes from."""


def meant_for(model: Model, rules: Iterable[str]) -> str:
    """The backend that one of the rule files is for, by its name; "" if none is. TensorFlow runs its own models."""
    if model.format != "onnx":
        return EMULATING if model.format == EMULATING else ""
    return next((name for rule in rules for name in sorted(BACKENDS, key=len, reverse=True) if _is_for(rule, name)), "")


def _is_for(rules: str, backend: str) -> bool:
    """Whether a rule file is for a backend: `qnn16` is for qnn."""
    return rules.rstrip("0123456789") == backend


def foretold(
    model: Model, backend: str, asked: Sequence[Explanation], plan: Plan | None = None, solution: Solution | None = None
) -> tuple[Verdict, ...]:
    """How `backend` runs the ops that were asked for.

    Args:
        model: A quantized model, or the prepared one that `plan` is for.
        backend: A key of `BACKENDS`, or "tensorflow" for its models.
        asked: What was asked for.
        plan: What is to be done to the model.
        solution: The scales that were found for it; else made-up ones take their place.

    Raises:
        UsageError: There is no such backend, or it does not run models of this format.
    """
    places = dict.fromkeys(one.asked for one in asked)
    if backend == model.format == EMULATING:
        return tuple(
            Verdict(graph=graph, op=name, type=op.type, status="float", runs_as=op.type, note=EMULATED)
            for graph, name in places
            if (op := model.graphs[graph].op(name)).kind not in SILENT
        )
    if plan is not None:
        solution = solution or solve(model, _with_ranges(model, plan), {})
        model = rewrite(model, solution.plan, solution.params)[0]
    return tuple(verdict for verdict in check(model, backend).verdicts if (verdict.graph, verdict.op) in places)


def _with_ranges(model: Model, plan: Plan) -> Plan:
    """The plan with a range where only data tells one."""
    wanting, held = set(map(id, needs_data(plan))), Parameters(model)
    readers = {use: site for site in plan.sites for use in site.uses}
    sites = []
    for site in plan.sites:
        first = site
        for _ in range(FAR):
            first = readers.get(first.tie[0], first) if first.tie else first
        wants = id(site) in wanting
        sites.append(replace(site, range=_range(model, held, first.tensor)) if wants else site)
    return replace(plan, sites=tuple(sites))


def _range(model: Model, held: Parameters, tensor: TensorRef) -> tuple[float, float]:
    """From where a Relu or Clip cuts off, and not quite up to where it does; else around 0 or from it on."""
    ends = clip_ends(model, held, tensor)
    if ends is None:
        return (0.0, 1.0) if model.op(tensor).kind in NEVER_NEGATIVE else (-1.0, 1.0)
    low = ends[0] if math.isfinite(ends[0]) else min(ends[1], 0.0) - 1
    return low, (low + ends[1]) / 2 if math.isfinite(ends[1]) else max(low, 0.0) + 1


__all__ = ["foretold", "meant_for"]
