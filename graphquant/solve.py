"""Schemes, statistics and ties to scales and zero points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphquant.errors import DataError, ModelError
from graphquant.ir import Model, Parameters, TensorRef, Use, readable
from graphquant.numerics import QParams, Range, along, choose, from_scale
from graphquant.plans import Plan, Site, Skip
from graphquant.sketch import EMPTY, OBSERVERS, Sketch, sketch


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What was found.

    Attributes:
        params: For each site of the plan, by its position, its scale and zero point.
        skips: Sites that have none, by position, with the reason.
        notes: Sites whose outcome needs a word, by position: tensors that share one scale, values that were left out.
    """

    params: Mapping[int, QParams]
    skips: Mapping[int, Skip]
    notes: Mapping[int, str]


def solve(model: Model, plan: Plan, sketches: Mapping[TensorRef, Sketch]) -> Solution:
    """Scale and zero point of every site.

    A site with a scale keeps it; one with a range gets that; a parameter's range comes from its value; all else from
    `sketches`. Sites that are tied get the union of their ranges, so that they share one scale and zero point.

    Raises:
        ModelError: A weight holds NaN or infinity, or a site's scale does not fit its tensor.
    """
    parameters = Parameters(model)
    skips: dict[int, Skip] = {}
    notes: dict[int, str] = {}
    ranges: dict[int, Range] = {}
    params: dict[int, QParams] = {}
    feeding = {use: index for index, site in enumerate(plan.sites) for use in site.uses}
    groups = _groups(plan, feeding)
    for index, site in enumerate(plan.sites):
        if site.scale is not None:
            params[index] = _dictated(site)
            continue
        if site.scheme.observe.name == "bias" and site.range is None:
            continue
        try:
            ranges[index] = _range(parameters, site, sketches, notes, index)
        except DataError as error:
            skips[index] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason=str(error))
    for members in groups:
        _settle(plan, members, ranges, params, notes)
    _follow_skips(plan, groups, feeding, skips, params)
    for index, site in enumerate(plan.sites):
        if site.scheme.observe.name == "bias" and index not in params and index not in skips:
            try:
                params[index] = _bias(model, site, feeding, params, parameters)
            except DataError as error:
                skips[index] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason=str(error))
    return Solution(params=params, skips=skips, notes=notes)


def _groups(plan: Plan, feeding: Mapping[Use, int]) -> list[list[int]]:
    """Positions of sites that must share scale and zero point, each site in exactly one group."""
    leader = list(range(len(plan.sites)))

    def find(index: int) -> int:
        while leader[index] != index:
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    for index, site in enumerate(plan.sites):
        for use in site.tie:
            if use in feeding:
                one, other = sorted((find(index), find(feeding[use])))
                leader[other] = one
    members: dict[int, list[int]] = {}
    for index in range(len(plan.sites)):
        members.setdefault(find(index), []).append(index)
    return list(members.values())


def _range(
    parameters: Parameters, site: Site, sketches: Mapping[TensorRef, Sketch], notes: dict[int, str], index: int
) -> Range:
    if site.range is not None:
        return Range(np.float64(site.range[0]), np.float64(site.range[1]))
    observe = site.scheme.observe
    observer = OBSERVERS[observe.name]
    stats = EMPTY
    if observer.needs_values:
        stats = _statistics(parameters, site, sketches)
        if stats.nan or stats.inf:
            notes[index] = f"{stats.nan} NaN and {stats.inf} infinite values were left out of the range"
    arguments = {name: float(getattr(observe, name)) for name in observer.arguments}
    found = observer.pick(stats, site.scheme.type, site.scheme.narrow, arguments)
    if site.axis is not None and found.low.ndim == 0:
        channels = _channels(parameters, site)
        found = Range(np.full(channels, found.low), np.full(channels, found.high))
    return found


def _statistics(parameters: Parameters, site: Site, sketches: Mapping[TensorRef, Sketch]) -> Sketch:
    if site.parameter:
        value = parameters.value(site.tensor)
        if value is None:
            raise DataError("its value is not in the model's files (no checkpoint, or ops that are not evaluated)")
        if value.size == 0:
            raise DataError("it has no elements")
        return sketch(readable(value, site.tensor), site.axis)
    if site.tensor not in sketches:
        raise DataError("no sample of the calibration data reached it")
    return sketches[site.tensor]


def _channels(parameters: Parameters, site: Site) -> int:
    value = parameters.value(site.tensor)
    if value is None or site.axis is None:
        raise DataError("the number of its channels is not known")
    return int(value.shape[site.axis])


def _dictated(site: Site) -> QParams:
    scale = np.asarray(site.scale, np.float32)
    zero = np.asarray(site.zero_point if site.zero_point is not None else np.zeros(scale.shape), np.int32)
    qmin, qmax = site.scheme.type.limits(narrow=site.scheme.narrow)
    if scale.shape != zero.shape or (site.axis is None and scale.size != 1):
        raise ModelError(f"{site.tensor}: the plan gives {scale.size} scales and {zero.size} zero points. Give one each, or one per channel.")
    if not (np.isfinite(scale).all() and (scale > 0).all()) or (zero < qmin).any() or (zero > qmax).any():
        raise ModelError(f"{site.tensor}: the plan's scale is not positive, or its zero point is not in [{qmin}, {qmax}]. Mend it in the plan.")
    if site.axis is None:
        scale, zero = scale.reshape(()), zero.reshape(())
    return from_scale(scale, zero, site.scheme.type, narrow=site.scheme.narrow, axis=site.axis)


def _settle(
    plan: Plan, members: list[int], ranges: Mapping[int, Range], params: dict[int, QParams], notes: dict[int, str]
) -> None:
    """Gives one group its scales: one member's dictated one, or that of all ranges together."""
    dictated = [index for index in members if index in params]
    if dictated:
        for index in members:
            if index not in params and (index in ranges or plan.sites[index].tie):
                params[index] = params[dictated[0]]
                notes[index] = f"shares the scale that the plan gives {plan.sites[dictated[0]].tensor}"
        return
    known = [index for index in members if index in ranges]
    if not known:
        return
    shared = ranges[known[0]]
    for index in known[1:]:
        shared = shared.union(ranges[index])
    first = plan.sites[members[0]]
    for index in members:
        if index in ranges:
            scheme = plan.sites[index].scheme if len(members) == 1 else first.scheme
            params[index] = choose(
                shared,
                scheme.type,
                symmetric=scheme.zero == "symmetric",
                narrow=scheme.narrow,
                power_of_two=scheme.scale == "power-of-two",
                axis=plan.sites[index].axis,
            )
            if len(members) > 1 and index != members[0]:
                notes[index] = f"shares scale and zero point with {first.tensor}"


def _bias(
    model: Model, site: Site, feeding: Mapping[Use, int], params: Mapping[int, QParams], parameters: Parameters
) -> QParams:
    """int32 with input scale times weight scale, per channel where the weight is.

    Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html and TFLite's 8-bit specification.
    """
    use = site.uses[0]
    graph = model.graphs[use.graph]
    reader = graph.op(use.op)
    scales = []
    for slot in range(len(graph.slots(use.op))):
        index = feeding.get(Use(use.graph, use.op, slot))
        if reader.role(slot) in {"input", "weight"} and index in params:
            scales.append(params[index].scale.astype(np.float64))
    value = parameters.value(site.tensor)
    if len(scales) != 2 or value is None:  # noqa: PLR2004  # one input and one weight
        raise DataError("a bias has the scales of its consumer's input and weight, and those are not both quantized")
    scale = np.asarray(scales[0] * scales[1])
    axis = site.axis if scale.ndim else None
    if scale.ndim and (site.axis is None or value.shape[site.axis] != scale.size):
        raise DataError(f"a bias of shape {value.shape} does not go with {scale.size} weight scales")
    largest = float(np.max(np.abs(value) / along(scale, axis, value.ndim), initial=0.0))
    if largest > np.iinfo(np.int32).max:
        raise DataError(f"its values are up to {largest:.3g} steps of input scale times weight scale, more than int32 holds")
    return from_scale(scale.astype(np.float32), np.zeros(scale.shape, np.int32), site.scheme.type, axis=axis)


def _follow_skips(
    plan: Plan, groups: list[list[int]], feeding: Mapping[Use, int], skips: dict[int, Skip], params: dict[int, QParams]
) -> None:
    """A tied site whose whole source side was skipped is skipped too, however long the chain."""
    for members in groups:
        alive = [index for index in members if index in params]
        waiting: dict[int, list[int]] = {}
        left: dict[int, int] = {}
        for index in alive:
            sources = {feeding[use] for use in plan.sites[index].tie if use in feeding}
            left[index] = len(sources)
            for source in sources:
                waiting.setdefault(source, []).append(index)
        queue = [index for index in members if index in skips]
        queue += [index for index in alive if plan.sites[index].tie and not left[index]]
        for lost in queue:
            if lost in params:
                site = plan.sites[lost]
                reason = "what it is tied to is not quantized"
                skips[lost] = Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason=reason)
                del params[lost]
            for index in waiting.get(lost, ()):
                left[index] -= 1
                if not left[index]:
                    queue.append(index)


def as_dict(params: QParams) -> dict[str, Any]:
    """`params` as JSON data."""
    return {
        "dtype": params.type.name,
        "scale": params.scale.astype(float).tolist(),
        "zero_point": params.zero_point.tolist(),
        "axis": params.axis,
        "low": params.range.low.tolist(),
        "high": params.range.high.tolist(),
    }
