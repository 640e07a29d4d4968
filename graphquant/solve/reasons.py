"""Why a site has the scale that it has, in sentences: where its range comes from, and what was done to it then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.numerics import QParams
from graphquant.solve.words import shown, spelled

if TYPE_CHECKING:
    from graphquant.ir import Model
    from graphquant.plans import Plan, Site
    from graphquant.solve.types import Solution

SHOWN_BITS = 16
"""Widest type whose range says something; what an int32 bias could hold does not."""

KNOWN = {"sigmoid": "[0, 1]", "softmax": "[0, 1]", "hard_sigmoid": "[0, 1]", "tanh": "[-1, 1]"}
"""What values of some kinds never leave."""


def because(model: Model, plan: Plan, index: int, solution: Solution | None = None) -> tuple[str, ...]:
    """The sentences on one site of a plan, or of a solution's own.

    Args:
        model: The prepared model.
        plan: The plan.
        index: The site's position.
        solution: What was found for it; without it only what the plan tells by itself is said.
    """
    site = plan.sites[index]
    told = [_origin(model, site, solution, index)]
    if solution is None:
        by = f"rule {site.rule!r} ties it to" if site.rule else "it is tied to"
        told += [f"{by} what {', '.join(map(str, site.tie))} reads: one scale for both"] if site.tie else []
    elif index in solution.skips:
        told = [f"left float: {solution.skips[index].reason}"]
    else:
        params = solution.params.get(index)
        told += solution.notes.get(index, ())
        if isinstance(params, QParams):
            span = f", range {spelled(params.range)}" if params.type.bits <= SHOWN_BITS else ""
            told.append(f"scale {shown(params.scale)}{span}")
    return tuple(one for one in told if one)


def _origin(model: Model, site: Site, solution: Solution | None, index: int) -> str:
    """Where its range or its scale comes from, before ties and limits."""
    own = solution.ranges.get(index) if solution is not None else None
    if site.scale is not None:
        return "its scale is given by the plan"
    if site.range is not None:
        return f"its range [{site.range[0]:.6g}, {site.range[1]:.6g}] is given by the plan"
    if site.twin is not None:
        return f"it has the scale of {site.twin}, of which it is a copy"
    if site.scheme.range == "dynamic":
        return "its range is that of the values of each run"
    return _by_scheme(model, site, "" if own is None else spelled(own), solved=solution is not None)


def _by_scheme(model: Model, site: Site, own: str, *, solved: bool) -> str:
    """What its scheme's observer says; nothing of one that was not asked."""
    name, rule = site.scheme.observe.name, f"rule {site.rule!r}" if site.rule else "its scheme"
    if name == "fixed":
        arguments = site.scheme.observe.arguments
        op = model.op(site.tensor)
        never = f", and {op.type} never leaves {KNOWN[op.kind]}" if op.kind in KNOWN else ""
        return f"its range is fixed: {rule} says [{arguments['low']:.6g}, {arguments['high']:.6g}]{never}"
    if name == "fixed-point":
        return f"its scale is fixed: {rule} says 2**{int(site.scheme.observe.arguments['exponent'])}"
    if name == "bias":
        return f"{rule} gives it the scale of its consumer's input times that of its weight"
    if solved and not own:
        return ""
    where = "of its values" if site.parameter else f"of what the calibration data {'showed' if own else 'shows'}"
    return f"its range {own} is {name} {where}" if own else f"its range will be {name} {where}"
