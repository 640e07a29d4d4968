"""The scale solver: ranges, ties, limits, biases, Relus and function clones, in this order.

Each step visits the sites once, except `meet_limits`, whose docstring proves that it terminates. No step undoes the
work of another: tied sites stay tied, scales only grow, and biases, which depend on scales, come last.
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
from graphquant.quantize.plan import SkipCode
from graphquant.quantize.plan_json import check_plan
from graphquant.quantize.site_ranges import find_site_ranges, has_explicit_range
from graphquant.quantize.solver_state import Solution, SolverState, format_range, format_values, takes_original_scale
from graphquant.quantize.ties import insert_pairs_before_clips, share_scales, skip_unfed_ties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphquant.ir import Graph, Op
    from graphquant.numerics import Array
    from graphquant.observers import Sketch
    from graphquant.quantize.plan import Plan, Site, Skip


# Scales of int32 biases: input scale times weight scale of the op that adds the bias.


def solve_biases(state: SolverState) -> None:
    """Solve the remaining bias sites. A bias whose consumers need different scales is copied.

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
    """Keep the site for the first scale; give each other scale, and each refusal, a copy of the site."""
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
                f"it is one of {len(groups)} copies, as its consumers need different scales: the copy for {uses_text}",
            )
    for position, reason in zip(positions[len(groups) :], refused_uses, strict=True):
        state.skip_site(position, SkipCode.BIAS, reason)


def _bias_consumer(graph: Graph, use: Use) -> Op:
    """Return the op that the bias at `use` belongs to: the reader, or the op whose product it adds the bias to."""
    reader = graph.op(use.op)
    if reader.kind not in {"add", "bias_add"} or len(graph.slots(use.op)) != 2:  # noqa: PLR2004  # product and bias
        return reader
    product = graph.slots(use.op)[1 - use.slot]
    return graph.op(product.op) if product is not None and product.graph == graph.name else reader


def _bias_params(state: SolverState, index: int, use: Use) -> QParams:
    """Return int32 parameters with input scale times weight scale, per channel if the weight is.

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
        raise DataError("its scale depends on its consumer's input and weight, which are not both quantized")
    require_finite_weight(value, site.tensor)
    with np.errstate(over="ignore", under="ignore"):
        scale = np.asarray(scales[0] * scales[1]).astype(np.float32)
    axis = site.axis if scale.ndim else None
    if scale.ndim and (axis is None or axis >= value.ndim or value.shape[axis] != scale.size):
        raise DataError(f"its shape {value.shape} does not match {scale.size} weight scales")
    if not (np.isfinite(scale).all() and (scale >= SMALLEST_SCALE).all()):
        raise DataError("its scale, input scale times weight scale, is not a normal float32")
    step_sizes = broadcast_along_axis(scale.astype(np.float64), axis, value.ndim)
    largest = float(np.max(np.abs(value) / step_sizes, initial=0.0))
    if largest > site.scheme.type.limits()[1]:
        raise DataError(
            f"its values reach {largest:.3g} steps of input scale times weight scale, beyond {site.scheme.type.name}"
        )
    return qparams_from_scale(scale, np.zeros(scale.shape, np.int32), site.scheme.type, axis=axis)


# Report weights that exceed the range that a rule or the plan gives them.


def note_clipped_weights(state: SolverState) -> None:
    """Note for each weight with a given range or scale how many values lie outside by more than rounding explains.

    It runs after everything that may widen a range. One weight is in memory at a time.
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
            limits = format_range(params.range)
            message = f"{outside} of {value.size} values {verb} outside {limits}, the range that {range_source}"
            channels = (
                " (over all channels; each has its own range)" if params.scale.size > 1 and plan_gives_range else ""
            )
            state.record_change(index, f"{message}{channels}, and {'is' if outside == 1 else 'are'} clipped")


def _count_clipped_values(value: Array, params: QParams) -> int:
    """Count the values that are farther than half a step, the largest rounding error, from a representable value."""
    represented = params.range
    low, high = represented.low - params.scale / 2, represented.high + params.scale / 2
    if params.block is not None:  # given ranges are one for all blocks
        low, high = low.min(), high.max()
    low, high = (broadcast_along_axis(np.asarray(end), params.axis, value.ndim) for end in (low, high))
    return int(np.count_nonzero((value < low) | (value > high)))


FLOAT8_NOT_RUNNABLE = (
    "onnxruntime's optimizer fuses float8 between quantized tensors into integer ops, which it then rejects; load the"
    " model with optimizations disabled, or quantize only weights"
)

RANGE_NOT_TRAINED = "its range is in variables without a gradient; only FakeQuant ops have one"


@paused_gc()
def solve_scales(
    model: Model, plan: Plan, sketches: Mapping[TensorRef, Sketch], unobservable: Mapping[TensorRef, str] | None = None
) -> Solution:
    """Solve for scale and zero point of every site.

    A site with a scale keeps it. A site with a range uses it. A site in a function clone takes its original's scale.
    The range of a parameter comes from its value, all others from `sketches`; `unobservable` may give the reason why
    one is missing. Tied sites get the union of their ranges, so that they share one scale and zero point. Scales are
    raised as far as biases and shifts need. A tensor whose consumers need different scales is copied.

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
    """Round each scale as the family's ops will; skip sites that the family cannot represent."""
    for index in list(state.params):
        try:
            site = state.sites[index]
            settled = FAMILIES[site.scheme.family or ""].effective_params(state.params[index])
            is_float16 = state.model.output(site.tensor).dtype == "float16"
            state.params[index] = round_scale_to_float16(settled) if is_float16 else settled
        except UsageError as error:
            state.skip_site(index, SkipCode.SCHEME, str(error))


def _copy_original_scales(state: SolverState) -> None:
    """Give sites in function clones the scales of their originals."""
    for index, site in enumerate(state.sites):
        if not takes_original_scale(site) or site.clone_of is None:
            continue
        params = state.params_at(site.clone_of)
        if params is not None:
            state.params[index] = params
        else:
            state.skip_site(index, SkipCode.TIE, f"its original {site.clone_of} is not quantized")


def _add_family_notes(state: SolverState) -> None:
    """Note ranges that no gradient trains, and float8 between quantized tensors, which does not run."""
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
    """Return the plan's skips without the uses that the solver quantized after all."""
    remaining = []
    for skip in skips:
        uses = tuple(use for use in skip.uses if use not in state.explicit_uses)
        if uses or not skip.uses:
            remaining.append(skip if uses == skip.uses else replace(skip, uses=uses))
    return remaining


def _dynamic_params(site: Site) -> DynamicQParams:
    return DynamicQParams(type=site.scheme.type, narrow=site.scheme.narrow, axis=site.axis)


# Explain a site's scale in sentences: the source of its range, and what changed it.

MAX_SHOWN_RANGE_BITS = 16
"""Widest type whose range is shown. The range of an int32 bias is not informative."""

OUTPUT_LIMITS = {"sigmoid": "[0, 1]", "softmax": "[0, 1]", "hard_sigmoid": "[0, 1]", "tanh": "[-1, 1]"}
"""Output limits of kinds that never exceed them."""


def explain_scale(model: Model, plan: Plan, index: int, solution: Solution | None = None) -> tuple[str, ...]:
    """Explain one site of a plan, or of a solution's own plan.

    Args:
        model: The prepared model.
        plan: The plan.
        index: The site's position.
        solution: The solution; without it, only the facts in the plan are explained.
    """
    site = plan.sites[index]
    sentences = [_explain_origin(model, site, solution, index)]
    if solution is None:
        tie_text = f"rule {site.rule!r} ties it to" if site.rule else "it is tied to"
        sentences += (
            [f"{tie_text} the input of {', '.join(map(str, site.tie))}: both share one scale"] if site.tie else []
        )
    elif index in solution.skips:
        sentences = [f"stays float: {solution.skips[index].reason}"]
    else:
        params = solution.params.get(index)
        sentences += solution.notes.get(index, ())
        if isinstance(params, QParams):
            range_text = f", range {format_range(params.range)}" if params.type.bits <= MAX_SHOWN_RANGE_BITS else ""
            sentences.append(f"scale {format_values(params.scale)}{range_text}")
    return tuple(sentence for sentence in sentences if sentence)


def _explain_origin(model: Model, site: Site, solution: Solution | None, index: int) -> str:
    """Explain the source of the range or scale, before ties and limits."""
    own_range = solution.ranges.get(index) if solution is not None else None
    if site.scale is not None:
        return "the plan gives its scale"
    if site.range is not None:
        return f"the plan gives its range [{site.range[0]:.6g}, {site.range[1]:.6g}]"
    if site.clone_of is not None:
        return f"it takes the scale of {site.clone_of}, of which it is a function clone"
    if site.scheme.range == "dynamic":
        return "its range is computed in each run"
    return _explain_scheme(
        model, site, "" if own_range is None else format_range(own_range), has_solution=solution is not None
    )


def _explain_scheme(model: Model, site: Site, own_range_text: str, *, has_solution: bool) -> str:
    """Explain the range from the scheme's observer; return "" if the observer was not used."""
    name, rule = site.scheme.observe.name, f"rule {site.rule!r}" if site.rule else "its scheme"
    if name == "fixed":
        arguments = site.scheme.observe.arguments
        op = model.op(site.tensor)
        limits_text = f"; {op.type} outputs stay in {OUTPUT_LIMITS[op.kind]}" if op.kind in OUTPUT_LIMITS else ""
        return f"its range is fixed by {rule}: [{arguments['low']:.6g}, {arguments['high']:.6g}]{limits_text}"
    if name == "fixed-point":
        return f"its scale is fixed by {rule}: 2**{int(site.scheme.observe.arguments['exponent'])}"
    if name == "bias":
        return f"{rule} gives it the product of its consumer's input scale and weight scale"
    if has_solution and not own_range_text:
        return ""
    values_text = "from its values" if site.parameter else "from the calibration data"
    return (
        f"its range {own_range_text} is computed by {name} {values_text}"
        if own_range_text
        else f"its range will be computed by {name} {values_text}"
    )
