"""The story of a solution: ranges, ties, limits, biases, Relus, copies, each step on what the ones before it found.

Each step goes over the sites once, and only one looks at anything again: `worklist`, which says why it ends. No
step undoes another's work: what ties share stays shared, scales only grow, and biases, which follow scales, come after.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import DataError, UsageError
from graphquant.ir import FLOAT_TYPES, Model, TensorRef, Use, paused_gc, require_finite_weight
from graphquant.numerics import (
    SMALLEST_SCALE,
    DynamicQParams,
    FloatType,
    QParams,
    broadcast_along_axis,
    qparams_from_scale,
    round_scale_to_float16,
)
from graphquant.qdq import FAMILIES
from graphquant.quantize.limits import meet_limits
from graphquant.quantize.plan import Plan, Site, Skip
from graphquant.quantize.plan_json import check_plan
from graphquant.quantize.site_ranges import find_site_ranges, has_explicit_range
from graphquant.quantize.solver_state import Solution, SolverState, format_range, format_values, takes_original_scale
from graphquant.quantize.ties import insert_pairs_before_clips, share_scales, skip_unfed_ties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.ir import Graph, Op
    from graphquant.numerics import Array
    from graphquant.observers import Sketch


# int32 biases: their scale is input scale times weight scale of the op that adds them, so each op has its own.


def solve_biases(state: SolverState) -> None:
    """Gives what is left its consumers' scales; a bias whose consumers need different ones is copied.

    Raises:
        ModelError: A bias holds NaN or infinity.
    """
    for index, site in enumerate(state.plan.sites):
        if (
            index in state.params
            or index in state.skips
            or takes_original_scale(site)
            or site.scheme.range == "dynamic"
        ):
            continue
        groups: dict[object, tuple[QParams, list[Use]]] = {}
        refused_uses: dict[str, list[Use]] = {}
        for use in site.uses:
            try:
                params = _bias_params(state, index, use)
            except DataError as error:
                refused_uses.setdefault(str(error), []).append(use)
            else:
                groups.setdefault(params.scale.tobytes(), (params, []))[1].append(use)
        _split_bias_site(state, index, list(groups.values()), refused_uses)


def _split_bias_site(
    state: SolverState, index: int, groups: list[tuple[QParams, list[Use]]], refused_uses: dict[str, list[Use]]
) -> None:
    """Keeps a site for the first of its scales; each other one, and each refusal, gets a copy of it."""
    use_groups = [uses for _, uses in groups] + list(refused_uses.values())
    positions = state.divide_site(index, use_groups)
    if len(groups) > 1:
        state.record_change(index, f"it has {len(groups)} copies, as its consumers need different scales")
    for position, (params, uses) in zip(positions, groups, strict=False):
        state.params[position] = params
        if len(groups) > 1:
            uses_text = ", ".join(map(str, uses))
            state.add_note(
                position,
                f"is one of {len(groups)} copies, as its consumers need different scales: that for {uses_text}",
            )
    for position, reason in zip(positions[len(groups) :], refused_uses, strict=True):
        state.skip_site(position, reason)


def _bias_consumer(graph: Graph, use: Use) -> Op:
    """The op whose bias is read at `use`: the reader, or the one whose product it adds the bias to."""
    reader = graph.op(use.op)
    if reader.kind not in {"add", "bias_add"} or len(graph.slots(use.op)) != 2:  # noqa: PLR2004  # product and bias
        return reader
    product = graph.slots(use.op)[1 - use.slot]
    return graph.op(product.op) if product is not None and product.graph == graph.name else reader


def _bias_params(state: SolverState, index: int, use: Use) -> QParams:
    """int32 with input scale times weight scale, per channel where the weight is.

    Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html .
    """
    site = state.sites[index]
    graph = state.model.graphs[use.graph]
    reader = _bias_consumer(graph, use)
    scales = []
    for slot in range(len(graph.slots(reader.name))):
        params = state.params_at(Use(use.graph, reader.name, slot))
        if reader.role(slot) in {"input", "weight"} and params is not None:
            scales.append(params.scale.astype(np.float64))
    value = state.bias_value(site.tensor)
    if len(scales) != 2 or value is None:  # noqa: PLR2004  # one input and one weight
        raise DataError("a bias has the scales of its consumer's input and weight, and those are not both quantized")
    require_finite_weight(value, site.tensor)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.asarray(scales[0] * scales[1]).astype(np.float32)
    axis = site.axis if scale.ndim else None
    if scale.ndim and (axis is None or axis >= value.ndim or value.shape[axis] != scale.size):
        raise DataError(f"a bias of shape {value.shape} does not go with {scale.size} weight scales")
    if not (np.isfinite(scale).all() and (scale >= SMALLEST_SCALE).all()):
        raise DataError("its scale, input scale times weight scale, is no normal float32")
    step_sizes = broadcast_along_axis(scale.astype(np.float64), axis, value.ndim)
    largest = float(np.max(np.abs(value) / step_sizes, initial=0.0))
    if largest > site.scheme.type.limits()[1]:
        raise DataError(
            f"its values are up to {largest:.3g} steps of input scale times weight scale, more than"
            f" {site.scheme.type.name} holds"
        )
    return qparams_from_scale(scale, np.zeros(scale.shape, np.int32), site.scheme.type, axis=axis)


# What is told of weights that do not fit into the range that a rule or the plan gives them.


def note_clipped_weights(state: SolverState) -> None:
    """Says of each weight whose range or scale is given how many of its values lie outside: what no rounding explains.

    It comes after all that may still widen a range. One weight is held at a time.
    """
    for index, params in state.params.items():
        site = state.sites[index]
        plan_gives_range = site.scale is not None or site.range is not None
        if (
            not site.parameter
            or not has_explicit_range(site)
            or (site.scheme.observe.name == "bias" and not plan_gives_range)
        ):
            continue
        value = state.parameters.value(site.tensor)
        if value is None or value.dtype.name not in FLOAT_TYPES:
            continue
        outside = _count_clipped_values(value if site.view is None else value.reshape(site.view), params)
        if outside:
            range_source = f"rule {site.rule!r} fixes" if site.rule and not plan_gives_range else "the plan gives"
            verb = "lies" if outside == 1 else "lie"
            message = f"{outside} of {value.size} values {verb} outside {format_range(params.range)}, the range that {range_source}"
            channels = " (of all channels; each has its own)" if params.scale.size > 1 and plan_gives_range else ""
            state.record_change(index, f"{message}{channels}, and {'is' if outside == 1 else 'are'} clipped")


def _count_clipped_values(value: Array, params: QParams) -> int:
    """How many values are farther than half a step, by which any value may be rounded, from what stands for them."""
    represented = params.range
    low, high = represented.low - params.scale / 2, represented.high + params.scale / 2
    if params.block is not None:  # given ranges are one for all blocks
        low, high = low.min(), high.max()
    low, high = (broadcast_along_axis(np.asarray(end), params.axis, value.ndim) for end in (low, high))
    return int(np.count_nonzero((value < low) | (value > high)))


FLOAT8_NOT_RUNNABLE = (
    "onnxruntime's optimizer makes integer ops of float8 between quantized tensors, which it then refuses; load the"
    " model with its optimizations off, or quantize weights alone"
)

RANGE_NOT_TRAINED = "its range is in variables that no gradient reaches; FakeQuant alone has one"


@paused_gc()
def solve_scales(
    model: Model, plan: Plan, sketches: Mapping[TensorRef, Sketch], unobservable: Mapping[TensorRef, str] | None = None
) -> Solution:
    """Scale and zero point of every site.

    A site with a scale keeps it; one with a range gets that; one with a twin has its twin's; a parameter's range comes
    from its value; all else from `sketches`; where one is missing, `unobservable` may tell why. Sites that are tied get
    the union of their ranges, so that they share one scale and zero point; scales are raised as far as biases and
    shifts need; what consumers need with different scales is copied.

    Raises:
        ModelError: A weight holds NaN or infinity.
        UsageError: The plan does not fit the model.
    """
    check_plan(model, plan)
    state = SolverState(model, plan)
    find_site_ranges(state, sketches, unobservable or {})
    share_scales(state)
    _round_scales_like_family(state)
    skip_unfed_ties(state)
    meet_limits(state)
    state.merge_equal_copies()
    solve_biases(state)
    insert_pairs_before_clips(state)
    note_clipped_weights(state)
    _copy_original_scales(state)
    _add_family_notes(state)
    dynamic = {index: _dynamic_params(site) for index, site in enumerate(state.sites) if site.scheme.range == "dynamic"}
    return Solution(
        plan=replace(plan, sites=tuple(state.sites), skips=tuple(_remaining_skips(state, plan.skips))),
        params={**state.params, **dynamic},
        skips=state.skips,
        notes={index: tuple(state.notes[index]) for index in sorted(state.notes) if index in state.params},
        changes=tuple(state.changes),
        conflicts=tuple(state.conflicts),
        ranges=state.ranges,
    )


def _round_scales_like_family(state: SolverState) -> None:
    """Makes each scale that which the family's ops will have; skips sites for which they have none."""
    for index in list(state.params):
        try:
            site = state.sites[index]
            settled = FAMILIES[site.scheme.family or ""].effective_params(state.params[index])
            is_float16 = state.model.output(site.tensor).dtype == "float16"
            state.params[index] = round_scale_to_float16(settled) if is_float16 else settled
        except UsageError as error:
            state.skip_site(index, str(error))


def _copy_original_scales(state: SolverState) -> None:
    """Gives sites in copies the scales of their twins."""
    for index, site in enumerate(state.sites):
        if not takes_original_scale(site) or site.clone_of is None:
            continue
        params = state.params_at(site.clone_of)
        if params is not None:
            state.params[index] = params
        else:
            state.skip_site(index, f"its twin {site.clone_of} is not quantized")


def _add_family_notes(state: SolverState) -> None:
    """Says where learned ranges are not taught, and where float8 between quantized tensors runs."""
    for index in state.params:
        site = state.sites[index]
        if site.scheme.range == "learned" and not FAMILIES[site.scheme.family or ""].supports_learned_range:
            state.add_note(index, RANGE_NOT_TRAINED)
        if isinstance(site.scheme.type, FloatType):
            other_uses = (
                Use(use.graph, use.op, slot)
                for use in site.uses
                for slot in range(len(state.model.graphs[use.graph].slots(use.op)))
                if slot != use.slot
            )
            if not site.parameter or any(state.params_at(other_use) is not None for other_use in other_uses):
                state.add_note(index, FLOAT8_NOT_RUNNABLE)


def _remaining_skips(state: SolverState, skips: tuple[Skip, ...]) -> list[Skip]:
    """The plan's skips without the uses that were quantized after all."""
    remaining = []
    for skip in skips:
        uses = tuple(use for use in skip.uses if use not in state.explicit_uses)
        if uses or not skip.uses:
            remaining.append(skip if uses == skip.uses else replace(skip, uses=uses))
    return remaining


def _dynamic_params(site: Site) -> DynamicQParams:
    return DynamicQParams(type=site.scheme.type, narrow=site.scheme.narrow, axis=site.axis)


# Why a site has the scale that it has, in sentences: where its range comes from, and what was done to it then.

MAX_SHOWN_RANGE_BITS = 16
"""Widest type whose range says something; what an int32 bias could hold does not."""

OUTPUT_LIMITS = {"sigmoid": "[0, 1]", "softmax": "[0, 1]", "hard_sigmoid": "[0, 1]", "tanh": "[-1, 1]"}
"""What values of some kinds never leave."""


def explain_scale(model: Model, plan: Plan, index: int, solution: Solution | None = None) -> tuple[str, ...]:
    """The sentences on one site of a plan, or of a solution's own.

    Args:
        model: The prepared model.
        plan: The plan.
        index: The site's position.
        solution: What was found for it; without it only what the plan tells by itself is said.
    """
    site = plan.sites[index]
    sentences = [_explain_origin(model, site, solution, index)]
    if solution is None:
        tie_text = f"rule {site.rule!r} ties it to" if site.rule else "it is tied to"
        sentences += [f"{tie_text} what {', '.join(map(str, site.tie))} reads: one scale for both"] if site.tie else []
    elif index in solution.skips:
        sentences = [f"left float: {solution.skips[index].reason}"]
    else:
        params = solution.params.get(index)
        sentences += solution.notes.get(index, ())
        if isinstance(params, QParams):
            range_text = f", range {format_range(params.range)}" if params.type.bits <= MAX_SHOWN_RANGE_BITS else ""
            sentences.append(f"scale {format_values(params.scale)}{range_text}")
    return tuple(sentence for sentence in sentences if sentence)


def _explain_origin(model: Model, site: Site, solution: Solution | None, index: int) -> str:
    """Where its range or its scale comes from, before ties and limits."""
    own_range = solution.ranges.get(index) if solution is not None else None
    if site.scale is not None:
        return "its scale is given by the plan"
    if site.range is not None:
        return f"its range [{site.range[0]:.6g}, {site.range[1]:.6g}] is given by the plan"
    if site.clone_of is not None:
        return f"it has the scale of {site.clone_of}, of which it is a copy"
    if site.scheme.range == "dynamic":
        return "its range is that of the values of each run"
    return _explain_scheme(
        model, site, "" if own_range is None else format_range(own_range), has_solution=solution is not None
    )


def _explain_scheme(model: Model, site: Site, own_range_text: str, *, has_solution: bool) -> str:
    """What its scheme's observer says; nothing of one that was not asked."""
    name, rule = site.scheme.observe.name, f"rule {site.rule!r}" if site.rule else "its scheme"
    if name == "fixed":
        arguments = site.scheme.observe.arguments
        op = model.op(site.tensor)
        limits_text = f", and {op.type} never leaves {OUTPUT_LIMITS[op.kind]}" if op.kind in OUTPUT_LIMITS else ""
        return f"its range is fixed: {rule} says [{arguments['low']:.6g}, {arguments['high']:.6g}]{limits_text}"
    if name == "fixed-point":
        return f"its scale is fixed: {rule} says 2**{int(site.scheme.observe.arguments['exponent'])}"
    if name == "bias":
        return f"{rule} gives it the scale of its consumer's input times that of its weight"
    if has_solution and not own_range_text:
        return ""
    values_text = (
        "of its values" if site.parameter else f"of what the calibration data {'showed' if own_range_text else 'shows'}"
    )
    return (
        f"its range {own_range_text} is {name} {values_text}"
        if own_range_text
        else f"its range will be {name} {values_text}"
    )
