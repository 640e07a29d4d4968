"""Biases moved by what rounding moves the mean of each output channel by.

Sources: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", section 4.2 and
appendix D (the empirical form); Banner et al. 2018, "Post Training 4-bit Quantization of Convolutional Networks for
Rapid-Deployment", section 4. The paper corrects op by op, each on what all before it were corrected to, which takes a
run of the data for each op. Here each op is first corrected for what rounding its weights and its input alone moves its
output by, all in one go; what noise adds behind a Relu is seen in the whole quantized model only, and for it a level of
ops halfway through and the last ones are corrected once more. Means of few samples are noisy: each channel's is drawn
towards 0 by the share of it that chance explains (James and Stein 1961, the positive part).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.corrections.held import LIVES_ON, Biases
from graphquant.corrections.means import RULE, Mean, measure, show_mean
from graphquant.corrections.places import ends, levels, places
from graphquant.corrections.types import Corrected, Draft, Samples
from graphquant.ir import TensorRef, Use, bulk
from graphquant.qdq.base import constant
from graphquant.rewrite import rewrite

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphquant.corrections.places import Place
    from graphquant.ir import Model
    from graphquant.numerics import Array, Dynamic, QParams
    from graphquant.plans import Plan, Site
    from graphquant.solve import Solution

NAME: Final = "bias-correction"

UNREACHED: Final = "no sample reaches it, or it cannot be observed"

FEWEST: Final = 2
"""Samples that tell how far chance alone moves a mean."""


@bulk()
def correct_biases(draft: Draft, samples: Samples) -> Draft:
    """Gives ops with quantized weights the bias with which the mean of each output channel is that of the float model.

    Without rounding nothing moves: the float function is another one by as much as the rounding is made up for.
    """
    found = list(places(draft.model, draft.solution))
    held = Biases(draft)
    reasons = {place.weight: place.why_not for place in found if place.bias is None}
    reasons |= {place.weight: LIVES_ON for place in found if held.lives_on(place)}
    usable = [place for place in found if place.weight not in reasons]
    floats, rounded = _alone(draft, usable, samples)
    corrected = []
    for place in usable:
        reason = _move(held, place, floats, rounded)
        if reason:
            reasons[place.weight] = reason
        else:
            corrected.append(place)
    for stage in _stages(draft.model, corrected):
        seen = _whole(replace(draft, model=held.model, solution=held.solution), stage, samples)
        for place in stage:
            _move(held, place, floats, seen)
    told = [
        Corrected(correction=NAME, target=place.name, detail=reasons[place.weight], done=False)
        if place.weight in reasons
        else Corrected(correction=NAME, target=place.name, detail=held.said(place))
        for place in found
    ]
    return replace(draft, model=held.model, solution=held.solution, told=(*draft.told, *told))


Rows = dict[TensorRef, "Array"]
"""Means of the channels of tensors, (samples, C)."""


def _move(held: Biases, place: Place, floats: Rows, rounded: Rows) -> str:
    """Moves a bias by what is missing in the mean; why not, "" if it was done."""
    expected, found = floats.get(place.output), rounded.get(place.output)
    if expected is None or found is None or len(expected) < FEWEST:
        return UNREACHED
    return held.move(place, shrunk(expected - found))


def shrunk(rows: Array) -> Array:
    """The mean of `rows`, less what chance explains of it.

    Args:
        rows: float64 (samples, C).

    Returns:
        float64 (C,).
    """
    mean = rows.mean(0)
    chance = rows.var(0, ddof=1) / len(rows)
    power = np.square(mean)
    kept = np.clip(1 - np.divide(chance, power, out=np.ones_like(power), where=power > 0), 0, 1)
    return np.asarray(mean * kept)


def _alone(draft: Draft, found: Sequence[Place], samples: Samples) -> tuple[Rows, Rows]:
    """Means of what ops make of the float model's values: as they are, and with weights and input rounded."""
    model = draft.before.copy()
    twins: dict[tuple[str, str], str] = {}
    means: list[tuple[Place, Mean, Mean]] = []
    rounded: dict[Use, TensorRef] = {}
    for place in found:
        graph, op = model.graphs[place.graph], place.op
        if place.axes is None:
            continue
        name = graph.fresh(f"{op.name}/rounded")
        twin = replace(op, name=name, outputs=(replace(op.outputs[0], name=name),), source=None)
        first = show_mean(model, graph, place.output, place.axes)
        second = show_mean(model, graph, graph.add(twin, graph.slots(op.name)), place.axes)
        twins[place.graph, op.name] = name
        if place.weight in draft.weights:
            other = draft.weights[place.weight]
            rounded[place.weight] = constant(graph, f"{name}/weight", other, type_="Const", rule=RULE)
            graph.connect(place.weight._replace(op=name), rounded[place.weight])
        means.append((place, first, second))
    plan, params = _for_twins(draft.solution, twins, rounded)
    instrumented, _ = rewrite(model, plan, params, folds=draft.folds)
    rows = measure(instrumented, [mean for _, *pair in means for mean in pair], samples)
    floats = {place.output: rows[one.tensor] for place, one, _ in means if one.tensor in rows}
    others = {place.output: rows[other.tensor] for place, _, other in means if other.tensor in rows}
    return floats, others


def _for_twins(
    solution: Solution, twins: Mapping[tuple[str, str], str], rounded: Mapping[Use, TensorRef]
) -> tuple[Plan, dict[int, QParams | Dynamic]]:
    """The part of a solution that concerns ops with a twin, for these twins and the weights that they read."""
    sites: list[Site] = []
    params: dict[int, QParams | Dynamic] = {}
    for index, site in enumerate(solution.plan.sites):
        read: dict[TensorRef, list[Use]] = {}
        for use in site.uses if index in solution.params else ():
            if (use.graph, use.op) in twins:
                twin = Use(use.graph, twins[use.graph, use.op], use.slot)
                read.setdefault(rounded.get(use, site.tensor), []).append(twin)
        for tensor, uses in read.items():
            params[len(sites)] = solution.params[index]
            sites.append(replace(site, tensor=tensor, uses=tuple(uses), tie=(), twin=None))
    return replace(solution.plan, sites=tuple(sites), skips=()), params


def _stages(model: Model, corrected: Sequence[Place]) -> Iterator[list[Place]]:
    """Ops of which none leads to another, in the graph that has most: a level halfway through, then the last ones."""
    by_graph: dict[str, list[Place]] = {}
    for place in corrected:
        by_graph.setdefault(place.graph, []).append(place)
    if not by_graph:
        return
    most = max(by_graph.values(), key=len)
    graph, names = model.graphs[most[0].graph], [place.op.name for place in most]
    level, last = levels(graph, names), set(ends(graph, names))
    half = (max(level.values(), default=0) + 1) // 2
    middle = {name for name, here in level.items() if here == half}
    for stage in (middle - last, last):
        chosen = [place for place in most if place.op.name in stage]
        if chosen:
            yield chosen


def _whole(draft: Draft, stage: Sequence[Place], samples: Samples) -> Rows:
    """Means of what ops make in the whole quantized model, as far as it is corrected."""
    model = draft.model.copy()
    shown = [
        show_mean(model, model.graphs[place.graph], place.output, place.axes)
        for place in stage
        if place.axes is not None
    ]
    return measure(replace(draft, model=model).quantized(), shown, samples)


__all__ = ["NAME", "correct_biases", "shrunk"]
