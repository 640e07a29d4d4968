"""Schemes, statistics and ties to scales and zero points."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import DataError, UsageError
from graphquant.ir import FLOAT_TYPES, Model, Parameters, TensorRef, Use, bulk, readable
from graphquant.numerics import (
    SMALLEST_SCALE,
    Array,
    Dynamic,
    FloatType,
    QParams,
    Range,
    along,
    blocks_of,
    choose,
    from_scale,
    in_blocks,
)
from graphquant.plans import Plan, Site, Skip, check_plan
from graphquant.qdq import FAMILIES
from graphquant.sketch import EMPTY, OBSERVERS, Sketch, sketch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


FLOAT8_BETWEEN = (
    "onnxruntime's optimizer makes integer ops of float8 between quantized tensors, which it then refuses; load the"
    " model with its optimizations off, or quantize weights alone"
)

INFINITE = "it takes infinite values, as masks do, and integers stand for none"

UNTAUGHT = "its range is in variables that no gradient reaches; FakeQuant alone has one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """What was found.

    Attributes:
        params: For each site of the plan, by its position, its scale and zero point.
        skips: Sites that have none, by position, with the reason.
        notes: Sites whose outcome needs a word, by position: tensors that share one scale, values that were left out.
    """

    params: Mapping[int, QParams | Dynamic]
    skips: Mapping[int, Skip]
    notes: Mapping[int, str]


@bulk()
def solve(  # the story, step by step
    model: Model, plan: Plan, sketches: Mapping[TensorRef, Sketch], unwatchable: Mapping[TensorRef, str] | None = None
) -> Solution:
    """Scale and zero point of every site.

    A site with a scale keeps it; one with a range gets that; one with a twin has its twin's; a parameter's range comes
    from its value; all else from `sketches`; where one is missing, `unwatchable` may tell why. Sites that are tied get
    the union of their ranges, so that they share one scale and zero point.

    Raises:
        ModelError: A weight holds NaN or infinity.
        UsageError: The plan does not fit the model.
    """
    check_plan(model, plan)
    parameters = Parameters(model)
    skips: dict[int, Skip] = {}
    notes: dict[int, str] = {}
    ranges: dict[int, Range] = {}
    params: dict[int, QParams] = {}
    feeding = {use: index for index, site in enumerate(plan.sites) for use in site.uses}
    for index, site in enumerate(plan.sites):
        if site.scheme.range == "dynamic":
            continue
        if site.scale is not None:
            params[index] = _dictated(site, site.scale)
        elif not _follows(site) and (site.scheme.observe.name != "bias" or site.range is not None):
            try:
                ranges[index] = _range(model, parameters, site, sketches, notes, index)
                _check_zero(site, ranges[index])
            except DataError as error:
                skips[index] = _skip(site, (unwatchable or {}).get(site.tensor, str(error)))
    for members in _groups(plan, feeding):
        _settle(plan, members, ranges, params, notes)
    for index in params:
        skips.pop(index, None)
    _as_written(plan, skips, params)
    _follow_skips(plan, feeding, skips, params)
    _biases(model, plan, feeding, params, skips, parameters)
    _follow_twins(plan, feeding, params, skips)
    for index in params:
        if plan.sites[index].scheme.range == "learned" and not FAMILIES[plan.sites[index].scheme.family or ""].learns:
            _note(notes, index, UNTAUGHT)
    _remark_float8(model, plan, params, feeding, notes)
    dynamic = {index: _dynamic(site) for index, site in enumerate(plan.sites) if site.scheme.range == "dynamic"}
    return Solution(
        params={**params, **dynamic}, skips=skips, notes={index: notes[index] for index in notes if index in params}
    )


def _biases(
    model: Model,
    plan: Plan,
    feeding: Mapping[Use, int],
    params: dict[int, QParams],
    skips: dict[int, Skip],
    parameters: Parameters,
) -> None:
    """Gives what is left its consumer's scales: biases."""
    for index, site in enumerate(plan.sites):
        if index not in params and index not in skips and not _follows(site) and site.scheme.range != "dynamic":
            try:
                params[index] = _bias(model, site, feeding, params, parameters)
            except DataError as error:
                skips[index] = _skip(site, str(error))


def _remark_float8(
    model: Model, plan: Plan, params: Mapping[int, QParams], feeding: Mapping[Use, int], notes: dict[int, str]
) -> None:
    """Says of float8 activations, and of weights beside quantized inputs, where the model runs."""
    for index in params:
        site = plan.sites[index]
        if isinstance(site.scheme.type, FloatType):
            others = (
                Use(use.graph, use.op, slot)
                for use in site.uses
                for slot in range(len(model.graphs[use.graph].slots(use.op)))
                if slot != use.slot
            )
            if not site.parameter or any(feeding.get(other) in params for other in others):
                _note(notes, index, FLOAT8_BETWEEN)


def _as_written(plan: Plan, skips: dict[int, Skip], params: dict[int, QParams]) -> None:
    """Makes each scale that which the family's ops will have; skips sites for which they have none."""
    for index in list(params):
        try:
            params[index] = FAMILIES[plan.sites[index].scheme.family or ""].settle(params[index])
        except UsageError as error:
            skips[index] = _skip(plan.sites[index], str(error))
            del params[index]


def _dynamic(site: Site) -> Dynamic:
    return Dynamic(type=site.scheme.type, narrow=site.scheme.narrow, axis=site.axis)


def _from_zero(site: Site) -> bool:
    """Whether the ops count from 0.0 upward: unsigned integers without a zero point."""
    return not FAMILIES[site.scheme.family or ""].zero_points and not site.scheme.type.signed


def _check_zero(site: Site, found: Range) -> None:
    """Refuses negative values where only a zero point could hold them and the scheme asks for one."""
    if _from_zero(site) and site.scheme.zero == "asymmetric" and (found.low < 0).any():
        raise DataError(
            f"it has negative values, and {site.scheme.family} has no zero point; take signed integers with"
            ' zero = "symmetric", or the family fake-quant'
        )


def _follow_twins(plan: Plan, feeding: Mapping[Use, int], params: dict[int, QParams], skips: dict[int, Skip]) -> None:
    """Gives sites in copies the scales of their twins."""
    for index, site in enumerate(plan.sites):
        if not _follows(site) or site.twin is None:
            continue
        twin = feeding.get(site.twin)
        if twin is not None and twin in params:
            params[index] = params[twin]
        else:
            skips[index] = _skip(site, f"its twin {site.twin} is not quantized")


def _follows(site: Site) -> bool:
    """Whether the site has its twin's scale; one of its own wins."""
    own = site.scale is not None or site.range is not None or site.scheme.range == "dynamic"
    return site.twin is not None and not own


def _skip(site: Site, reason: str) -> Skip:
    return Skip(tensor=site.tensor, uses=site.uses, rule=site.rule, reason=reason)


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
    model: Model,
    parameters: Parameters,
    site: Site,
    sketches: Mapping[TensorRef, Sketch],
    notes: dict[int, str],
    index: int,
) -> Range:
    """The range that the plan, the rule, the weight or the data gives the site: of the shape that its scales have."""
    if site.range is not None:
        found = Range(np.asarray(site.range[0]), np.asarray(site.range[1]))
    else:
        stats = _statistics(parameters, site, sketches)
        if any(one.nan for one in stats):
            _note(notes, index, f"{sum(one.nan for one in stats)} NaN values were left out of the range")
        found = _observed(site, stats)
    if site.axis is not None and (found.low.ndim == 0 or site.scheme.block_size is not None):
        shape = _scales(model, parameters, site, site.axis)
        spread = np.broadcast_to if found.low.ndim == 0 else np.reshape
        return Range(spread(found.low, shape), spread(found.high, shape))
    if site.axis is None and found.low.ndim:
        return Range(found.low.min(), found.high.max())
    return found


def _observed(site: Site, stats: Sequence[Sketch]) -> Range:
    """What the scheme's observer makes of one sketch, or of one per channel."""
    scheme = site.scheme
    pick, arguments = OBSERVERS[scheme.observe.name].pick, scheme.observe.arguments
    ranges = [pick(one, scheme.grid, arguments) for one in stats]
    if len(ranges) == 1:
        return ranges[0]
    return Range(np.array([one.low for one in ranges]), np.array([one.high for one in ranges]))


def _statistics(parameters: Parameters, site: Site, sketches: Mapping[TensorRef, Sketch]) -> list[Sketch]:
    """The sketch of the site's values; of a parameter one per channel where the observer needs a histogram of each."""
    observer = OBSERVERS[site.scheme.observe.name]
    if not observer.needs_values:
        return [EMPTY]
    if site.parameter:
        value, bits = _weight(parameters, site), observer.bits(site.scheme.type)
        if site.axis is not None and site.scheme.block_size is not None:
            return [sketch(in_blocks(value, site.axis, site.scheme.block_size), 0)]
        if site.axis is None or not bits:
            return [sketch(value, site.axis, bits=bits)]
        return [sketch(channel, bits=bits) for channel in np.moveaxis(value, site.axis, 0)]
    if site.tensor in sketches and sketches[site.tensor].blank and not sketches[site.tensor].count:
        raise DataError("it was empty whenever a sample of the calibration data reached it")
    if site.tensor not in sketches or not sketches[site.tensor].count:
        raise DataError("no sample of the calibration data reached it")
    if sketches[site.tensor].inf:
        raise DataError(INFINITE)
    return [sketches[site.tensor]]


def _weight(parameters: Parameters, site: Site) -> Array:
    """The value of the parameter, if one can quantize it."""
    value = parameters.value(site.tensor)
    if value is None:
        raise DataError(
            "it has no one value in the model's files (no checkpoint, ops that are not evaluated, or calls of its"
            " function that pass different weights)"
        )
    if value.dtype.name not in FLOAT_TYPES:
        raise DataError(f"its value is of {value.dtype.name}, not of a float type")
    if value.size == 0:
        raise DataError("it has no elements")
    if site.view is not None:
        if value.size != math.prod(site.view):
            raise DataError(f"its value has the shape {value.shape}, and the plan views it as {site.view}")
        value = value.reshape(site.view)
    if site.axis is not None and site.axis >= value.ndim:
        raise DataError(f"its value has {value.ndim} axes, and none is {site.axis}")
    if np.isinf(value).any() and not np.isnan(value).any():
        raise DataError(INFINITE)
    readable(value, site.tensor)
    largest = float(max(value.max(), -value.min()))  # not of abs(value), which is as large again
    if 0 < largest < SMALLEST_SCALE:
        raise DataError(f"its values, {largest:.3g} at most, are denormals, which kernels flush to zero")
    return value


def _scales(model: Model, parameters: Parameters, site: Site, axis: int) -> tuple[int, ...]:
    """The shape of the scales of a site with an axis: (C,), or that of its blocks."""
    shape, block = site.view or model.output(site.tensor).shape, site.scheme.block_size
    if shape is None or shape[axis] is None or (block is not None and None in shape):
        value = parameters.value(site.tensor)
        if value is None or axis >= value.ndim:
            raise DataError("the number of its channels is not known")
        shape = value.shape
    sizes = tuple(size or 0 for size in shape)
    return (sizes[axis],) if block is None else blocks_of(sizes, axis, block)


def _dictated(site: Site, given: tuple[float, ...]) -> QParams:
    """The scale and zero point that the plan gives; a symmetric scheme needs no zero point."""
    scale = np.asarray(given, np.float32)
    default = site.scheme.type.middle if site.scheme.zero == "symmetric" and not _from_zero(site) else 0
    zero = np.asarray(site.zero_point if site.zero_point is not None else np.full(scale.shape, default), np.int32)
    if site.axis is None:
        scale, zero = scale.reshape(()), zero.reshape(())
    return from_scale(scale, zero, site.scheme.type, narrow=site.scheme.narrow, axis=site.axis)


def _settle(
    plan: Plan, members: list[int], ranges: Mapping[int, Range], params: dict[int, QParams], notes: dict[int, str]
) -> None:
    """Gives one group its scales: per kind of scheme one member's dictated one, or that of all ranges together.

    Members whose schemes cannot have one scale keep their own, since a tie overrides no rule, and say so.
    """
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index in members:
        kinds.setdefault(_kind(plan.sites[index], index), []).append(index)
    for alike in kinds.values():
        _share(plan, alike, ranges, params, notes)
        if len(kinds) > 1:
            first = plan.sites[members[0]]
            for index in alike if members[0] not in alike else ():
                _note(notes, index, f"is tied to {first.tensor}, whose scheme differs, so each has its own scale")


def _kind(site: Site, index: int) -> tuple[object, ...]:
    """What sites must have in common to share scale and zero point; one per channel shares with none."""
    alone = None if site.axis is None else index
    scheme = site.scheme
    return scheme.type, scheme.zero, scheme.narrow, scheme.scale, scheme.range, _from_zero(site), alone


def _share(
    plan: Plan, members: list[int], ranges: Mapping[int, Range], params: dict[int, QParams], notes: dict[int, str]
) -> None:
    """Gives sites of one kind of scheme the same scale and zero point."""
    dictated = [index for index in members if index in params]
    if dictated:
        given = params[dictated[0]]
        source = plan.sites[dictated[0]].tensor
        for index in members:
            if index not in params and (index in ranges or plan.sites[index].tie):
                params[index] = given
                _note(notes, index, f"shares the scale that the plan gives {source}")
            elif index in params and _differ(params[index], given):
                _note(notes, index, f"is tied to {source}, for which the plan gives another scale")
        return
    known = [index for index in members if index in ranges]
    if not known:
        return
    shared = ranges[known[0]]
    for index in known[1:]:
        shared = shared.union(ranges[index])
    first, told = plan.sites[known[0]], shared
    shared = _widened(shared, first.scheme.smallest_range)
    from_zero = _from_zero(first)
    if from_zero:
        shared = Range(np.zeros_like(shared.low), np.maximum(shared.high, 0.0))
    chosen = choose(
        shared,
        first.scheme.type,
        symmetric=first.scheme.zero == "symmetric" and not from_zero,
        narrow=first.scheme.narrow,
        power_of_two=first.scheme.scale == "power-of-two",
        axis=first.axis,
        block=first.scheme.block_size,
    )
    chosen = replace(chosen, given=told if first.scheme.range == "given" else None)
    for index in known:
        params[index] = chosen
        if index != known[0]:
            _note(notes, index, f"shares scale and zero point with {first.tensor}")


def _widened(found: Range, least: float | None) -> Range:
    """`found`, its upper end raised where less than `least` lies between the ends once 0.0 is inside."""
    if least is None:
        return found
    low = np.minimum(found.low, 0.0)
    return Range(low, np.maximum(np.maximum(found.high, 0.0), low + least))


def _differ(one: QParams, other: QParams) -> bool:
    same = np.array_equal(one.scale, other.scale) and np.array_equal(one.zero_point, other.zero_point)
    return not same


def _note(notes: dict[int, str], index: int, text: str) -> None:
    notes[index] = f"{notes[index]}; {text}" if index in notes else text


def _bias(
    model: Model, site: Site, feeding: Mapping[Use, int], params: Mapping[int, QParams], parameters: Parameters
) -> QParams:
    """int32 with input scale times weight scale, per channel where the weight is.

    Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html .
    """
    use = site.uses[0]
    graph = model.graphs[use.graph]
    reader = graph.op(use.op)
    scales = []
    for slot in range(len(graph.slots(use.op))):
        index = feeding.get(Use(use.graph, use.op, slot))
        if reader.role(slot) in {"input", "weight"} and index is not None and index in params:
            scales.append(params[index].scale.astype(np.float64))
    value = parameters.value(site.tensor)
    if len(scales) != 2 or value is None:  # noqa: PLR2004  # one input and one weight
        raise DataError("a bias has the scales of its consumer's input and weight, and those are not both quantized")
    readable(value, site.tensor)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.asarray(scales[0] * scales[1]).astype(np.float32)
    axis = site.axis if scale.ndim else None
    if scale.ndim and (axis is None or axis >= value.ndim or value.shape[axis] != scale.size):
        raise DataError(f"a bias of shape {value.shape} does not go with {scale.size} weight scales")
    if not (np.isfinite(scale).all() and (scale >= SMALLEST_SCALE).all()):
        raise DataError("its scale, input scale times weight scale, is no normal float32")
    wide = along(scale.astype(np.float64), axis, value.ndim)
    largest = float(np.max(np.abs(value) / wide, initial=0.0))
    if largest > site.scheme.type.limits()[1]:
        raise DataError(
            f"its values are up to {largest:.3g} steps of input scale times weight scale, more than"
            f" {site.scheme.type.name} holds"
        )
    return from_scale(scale, np.zeros(scale.shape, np.int32), site.scheme.type, axis=axis)


def _follow_skips(plan: Plan, feeding: Mapping[Use, int], skips: dict[int, Skip], params: dict[int, QParams]) -> None:
    """Tied sites that no living site leads to, however long the chain or ring of ties, are skipped."""
    tied: dict[int, list[int]] = {}
    queue: list[int] = []
    for index in params:
        site = plan.sites[index]
        if not site.tie or site.scale is not None or site.range is not None:
            queue.append(index)
        for use in site.tie:
            if use in feeding:
                tied.setdefault(feeding[use], []).append(index)
    alive = set(queue)
    for source in queue:
        for index in tied.pop(source, ()):
            if index not in alive:
                alive.add(index)
                queue.append(index)
    for index in [index for index in params if index not in alive]:
        skips[index] = _skip(plan.sites[index], "what it is tied to is not quantized")
        del params[index]
