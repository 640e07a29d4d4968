"""Relu and Clip: ranges that end where they end, and pairs before those that no backend can absorb.

A backend that runs a Relu as one with the op before it does so by the saturation of integers: the smallest one stands
for 0. A tie can take that away, as behind a Concat of one branch with a Relu and one without. The Relu then runs by
itself, and the op before it needs a quantized output of its own. It gets the pair that is behind the Relu: quantizing
before a Relu or Clip and behind it gives the same values as quantizing behind it alone, since both are monotone and
rounding to the same steps a second time changes nothing. So this needs no statistics and alters no output.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import TensorRef, Use
from graphquant.numerics import QParams, from_scale

if TYPE_CHECKING:
    from graphquant.ir import Model, Parameters
    from graphquant.plans import Site, Skip
    from graphquant.solve.draft import Draft

CLIPS = frozenset({"relu", "relu6", "clip"})

RELU6_TOP = 6.0

EPSILON = float(np.finfo(np.float32).eps)
"""How far onnxruntime lets the integers reach beyond a Clip that it absorbs."""

NEAR = 1e-6
"""Share of a range by which rounding a scale to float32 may widen it."""


def clip_ends(model: Model, parameters: Parameters, tensor: TensorRef) -> tuple[float, float] | None:
    """Between what the Relu or Clip that makes a tensor keeps it; None where it is made otherwise, or nobody knows."""
    op = model.op(tensor)
    if op.kind not in CLIPS:
        return None
    if op.kind == "relu":
        return 0.0, np.inf
    if op.kind == "relu6":
        return 0.0, RELU6_TOP
    low, high = (
        _limit(model, parameters, Use(tensor.graph, op.name, slot), attr, default)
        for slot, attr, default in ((1, "min", -np.inf), (2, "max", np.inf))
    )
    return None if low is None or high is None or not low <= high else (low, high)


def _limit(model: Model, parameters: Parameters, use: Use, attr: str, default: float) -> float | None:
    """One end of a Clip: an attribute, or what it reads at `use`."""
    graph = model.graphs[use.graph]
    op, read = graph.op(use.op), graph.producer(use)
    if attr in op.attrs:
        return op.number(attr, default)
    if read is None:
        return default
    value = parameters.value(read) if parameters.is_parameter(read) else None
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 and value.dtype.kind == "f" else None


def inside(draft: Draft, members: list[int], chosen: QParams) -> QParams:
    """`chosen`, its scale a float32 smaller where only rounding takes its integers beyond the limit of a Clip."""
    if chosen.scale.ndim:
        return chosen
    qmax = chosen.type.limits(narrow=chosen.narrow)[1]
    for index in members:
        found = clip_ends(draft.model, draft.parameters, draft.sites[index].tensor)
        steps = qmax - float(chosen.zero_point)
        top = steps * float(chosen.scale)
        if found is not None and steps and found[1] < top <= found[1] * (1 + NEAR):
            smaller = np.nextafter(chosen.scale, np.float32(0))
            return from_scale(smaller, chosen.zero_point, chosen.type, narrow=chosen.narrow)
    return chosen


def absorbs(params: QParams, ends: tuple[float, float]) -> bool:
    """Whether integers saturate where a Relu or Clip does, or before."""
    qmin, qmax = params.type.limits(narrow=params.narrow)
    scale, zero = float(params.scale), float(params.zero_point)
    if ends == (0.0, np.inf):
        return zero == qmin
    return ends[0] - (qmin - zero) * scale <= EPSILON and (qmax - zero) * scale - ends[1] <= EPSILON


def make_explicit(draft: Draft) -> None:
    """Gives what is before a Relu or Clip that its op cannot absorb the pair that is behind it."""
    made: dict[TensorRef, list[int]] = {}
    for index, site in enumerate(draft.sites):
        made.setdefault(site.tensor, []).append(index)
    for skip in draft.plan.skips:
        for use in skip.uses if skip.absorbed else ():
            behind = TensorRef(use.graph, use.op)
            found = [index for index in made.get(behind, ()) if index in draft.params]
            ends = clip_ends(draft.model, draft.parameters, behind)
            if found and ends is not None and use not in draft.feeding:
                _explicit(draft, skip, use, found, ends)


def _explicit(draft: Draft, skip: Skip, use: Use, found: list[int], ends: tuple[float, float]) -> None:
    """Adds the pair before the Relu or Clip that reads at `use`, whose output's sites are `found`."""
    site, params = draft.sites[found[0]], draft.params[found[0]]
    covered = sum(len(draft.sites[index].uses) for index in found)
    alone = params.scale.ndim == 0 and all(draft.params[index] is params for index in found)
    if not alone or site.scheme.range != "observed" or absorbs(params, ends):
        return
    because = f"scale {float(params.scale):.6g} and zero point {int(params.zero_point)} do not end where it does"
    if covered != len(draft.model.graphs[use.graph].consumers(site.tensor)):
        draft.note(found[0], f"{use.op} runs by itself: {because}")
        return
    index = len(draft.sites)
    draft.sites.append(_before(site, skip, use))
    draft.feeding[use] = index
    draft.params[index] = params
    draft.explicit.add(use)
    draft.note(found[0], f"{use.op} runs by itself, with the same pair before it: {because}")
    why = f"has the pair of {site.tensor}, as {use.op} cannot be absorbed: {because}; no value changes"
    draft.note(index, why)
    draft.change(index, why)


def _before(site: Site, skip: Skip, use: Use) -> Site:
    """The site before a Relu whose output is that of `site`."""
    return replace(
        site,
        tensor=skip.tensor,
        uses=(use,),
        graph=skip.tensor.graph,
        rule=skip.rule,
        why=skip.reason,
        tie=(site.uses[0],),
        twin=None,
        range=None,
        scale=None,
        zero_point=None,
    )
