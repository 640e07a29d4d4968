"""Ties: sites that share scale and zero point get the union of their ranges, or the plan's scale."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphquant.ir import (
    CONCATENATING_KINDS,
    CONVOLUTION_KINDS,
    DATA_MOVEMENT_KINDS,
    WEIGHTED_KINDS,
    Model,
    Op,
    Parameters,
    TensorRef,
    Use,
    connected_groups,
    follow_to_end,
    reachable,
)
from graphquant.numerics import QParams, Range
from graphquant.quantize.plan import Site, Skip, SkipCode
from graphquant.quantize.solver_state import Conflict, SolverState, format_range, format_values, starts_at_zero

if TYPE_CHECKING:
    from collections.abc import Sequence

# Relu and Clip: limit ranges to theirs, and add Q/DQ pairs before those that no backend can fuse.
#
# A backend fuses a Relu into the op before it by integer saturation: the smallest integer stands for 0. A tie can rule
# that out, as in a Concat of a branch with a Relu and one without. The Relu then runs as an op of its own, and the op
# before it needs a quantized output. That output gets the parameters of the pair after the Relu. No value changes:
# quantizing both before and after a Relu or Clip equals quantizing after it, because both functions are monotone and
# rounding to the same steps twice changes nothing. So this needs no statistics.

RELU_LIMITS = {"relu": (0.0, np.inf), "relu6": (0.0, 6.0)}

CLIP_TOLERANCE = float(np.finfo(np.float32).eps)
"""Excess of the integer range over a Clip's range that onnxruntime still fuses."""

ROUNDING_SHARE = 1e-6  # share of a range by which rounding a scale to float32 may widen it


def clip_limits(model: Model, parameters: Parameters, tensor: TensorRef) -> tuple[float, float] | None:
    """Return the limits of the Relu or Clip that produces `tensor`, None for another op or unknown limits."""
    op = model.op(tensor)
    if op.kind != "clip":
        return RELU_LIMITS.get(op.kind)
    low, high = (
        _clip_limit(model, parameters, Use(tensor.graph, op.name, slot), attr, default)
        for slot, attr, default in ((1, "min", -np.inf), (2, "max", np.inf))
    )
    return None if low is None or high is None or not low <= high else (low, high)


def _clip_limit(model: Model, parameters: Parameters, use: Use, attr: str, default: float) -> float | None:
    """Return one limit of a Clip: an attribute, or the constant that it reads at `use`."""
    graph = model.graphs[use.graph]
    op, read = graph.op(use.op), graph.source_of(use)
    if read is None:
        return op.numeric_attr(attr, default) if attr in op.attrs else default
    value = parameters.value(read)
    return float(value.item()) if value is not None and value.size == 1 and value.dtype.kind == "f" else None


def saturates_like_clip(params: QParams, limits: tuple[float, float]) -> bool:
    """Return True if the integers saturate at the limits of a Relu or Clip, or inside them."""
    qmin, qmax = params.type.limits(narrow=params.narrow)
    scale, zero_point = float(params.scale), float(params.zero_point)
    if limits == (0.0, np.inf):
        return zero_point == qmin
    low, high = (qmin - zero_point) * scale, (qmax - zero_point) * scale
    return limits[0] - low <= CLIP_TOLERANCE and high - limits[1] <= CLIP_TOLERANCE


def insert_pairs_before_clips(state: SolverState) -> None:
    """Add the pair after a Relu or Clip also before it, if the preceding op cannot fuse it."""
    sites_by_tensor: dict[TensorRef, list[int]] = {}
    for index, site in enumerate(state.sites):
        sites_by_tensor.setdefault(site.tensor, []).append(index)
    for skip in state.plan.skips:
        for use in skip.uses if skip.fused else ():
            clip_output = TensorRef(use.graph, use.op)
            output_sites = [index for index in sites_by_tensor.get(clip_output, ()) if index in state.params]
            # A stored plan may name unknown ops in its skips; those of its sites exist.
            limits = clip_limits(state.model, state.parameters, clip_output) if output_sites else None
            if limits is not None and use not in state.index_by_use:
                _insert_pair_before_clip(state, skip, use, output_sites, limits)


def _insert_pair_before_clip(
    state: SolverState, skip: Skip, use: Use, output_sites: list[int], limits: tuple[float, float]
) -> None:
    """Add the pair before the Relu or Clip that reads at `use`; `output_sites` are the sites of its output."""
    site, params = state.sites[output_sites[0]], state.params[output_sites[0]]
    covered = sum(len(state.sites[index].uses) for index in output_sites)
    has_one_scale = params.scale.ndim == 0 and all(state.params[index] is params for index in output_sites)
    if not has_one_scale or site.scheme.range != "observed" or saturates_like_clip(params, limits):
        return
    reason = f"scale {float(params.scale):.6g} and zero point {int(params.zero_point)} do not end at its limits"
    if covered != len(state.model.graphs[use.graph].consumers(site.tensor)):
        state.add_note(output_sites[0], f"{use.op} is not fused: {reason}")
        return
    index = len(state.sites)
    state.sites.append(
        replace(
            site,
            tensor=skip.tensor,
            uses=(use,),
            graph=skip.tensor.graph,
            rule=skip.rule,
            why=skip.reason,
            tie=(site.uses[0],),
            clone_of=None,
            range=None,
            scale=None,
            zero_point=None,
        )
    )
    state.index_by_use[use] = index
    state.params[index] = params
    state.explicit_uses.add(use)
    state.add_note(output_sites[0], f"{use.op} is not fused and gets the same pair before it: {reason}")
    why = f"it has the pair of {site.tensor}, because {use.op} cannot be fused: {reason}; no value changes"
    state.add_note(index, why)
    state.record_change(index, why)


FLOAT_RESULT_TARGETS = frozenset({"openvino", "tensorrt"})  # their integer kernels may write floats
MIN_SHARED_STEPS = 16  # minimum number of integers that a range must span if it shares a scale


def skip_uneven_concats(state: SolverState) -> None:
    """Skip each Concat of which one input would span few integers, unless a product runs on its output."""
    for index, site in enumerate(state.plan.sites):
        graph, has_own_range = state.model.graphs[site.tensor.graph], index in state.ranges and site.range is None
        if graph.op(site.tensor.op).kind not in CONCATENATING_KINDS or not has_own_range:
            continue
        uses = [Use(graph.name, site.tensor.op, slot) for slot in range(len(graph.slots(site.tensor.op)))]
        input_indices = {use: state.index_by_use[use] for use in uses if use in state.index_by_use}
        ranges = {use: state.ranges[index] for use, index in input_indices.items() if index in state.ranges}
        spans = {use: np.max(np.maximum(own.high, 0.0) - np.minimum(own.low, 0.0)) for use, own in ranges.items()}
        step = float(site.scheme.grid.qparams(state.ranges[index]).scale)
        narrow_use = min(spans, key=spans.__getitem__, default=None)
        if narrow_use is None or not 0 < spans[narrow_use] < MIN_SHARED_STEPS * step:
            continue
        if _feeds_product(state, site.tensor):
            continue
        steps = spans[narrow_use] / step
        reason = f"{graph.source_of(narrow_use)} would span {steps:.1f} integers behind {site.tensor.op}"
        state.sites[index] = replace(site, tie=())
        input_sites = [
            input_index if len(state.sites[input_index].uses) == 1 else state.split_use(input_index, use)
            for use, input_index in input_indices.items()
        ]
        # Results of weighted ops keep a scale of their own.
        float_sites = [site for site in input_sites if not _needs_quantized_output(state, state.sites[site].tensor)]
        # TFLite's converter makes a layer float whose output has no range, with the values of its weight.
        is_for_tflite = state.model.format == "tensorflow" and not state.plan.targets
        weights = _weights_behind(state, float_sites) if is_for_tflite else []
        for skipped in (index, *float_sites, *weights):
            state.skip_site(skipped, SkipCode.RANGE, reason)
            state.ranges.pop(skipped, None)


def _layer_of(state: SolverState, tensor: TensorRef) -> Op:
    """Return the op that computes a tensor, before a bias or limit, which are part of it."""
    graph = state.model.graphs[tensor.graph]

    def fused_source(output: TensorRef) -> TensorRef | None:
        is_fused = graph.op(output.op).kind in {*RELU_LIMITS, "clip", "bias_add"}
        return graph.slots(output.op)[0] if is_fused else None

    return state.model.op(follow_to_end(tensor, fused_source))


def _weights_behind(state: SolverState, indices: Sequence[int]) -> list[int]:
    """Return the sites of the weights of layers whose outputs are these sites."""
    weights = []
    for tensor in (state.sites[index].tensor for index in indices):
        layer = _layer_of(state, tensor)
        for slot in range(len(layer.roles)) if layer.kind in WEIGHTED_KINDS else ():
            index = state.index_by_use.get(use := Use(tensor.graph, layer.name, slot))
            if index is not None and state.sites[index].parameter:
                weights.append(index if len(state.sites[index].uses) == 1 else state.split_use(index, use))
    return weights


def _needs_quantized_output(state: SolverState, tensor: TensorRef) -> bool:
    """Return True if the targets run the weighted op of `tensor` on integers only with a quantized output."""
    targets = state.plan.targets
    if not targets or FLOAT_RESULT_TARGETS.issuperset(targets):
        return False
    return _layer_of(state, tensor).kind in (CONVOLUTION_KINDS if state.plan.for_onnxruntime else WEIGHTED_KINDS)


def _feeds_product(state: SolverState, tensor: TensorRef) -> bool:
    """Return True if a weighted op reads a tensor, or its values behind ops that only move them."""
    graph = state.model.graphs[tensor.graph]

    def moved_outputs(name: str) -> list[str]:
        readers = [use.op for uses in graph.consumers_by_port(name).values() for use in uses if use.graph == graph.name]
        return readers if name == tensor.op or graph.op(name).kind in DATA_MOVEMENT_KINDS else []

    return any(graph.op(name).kind in WEIGHTED_KINDS for name in reachable([tensor.op], moved_outputs))


MAX_EXCESS_STEPS = 0.5  # steps by which a range may exceed a fixed one that still holds: rounding reaches that far


class _TieEdge(NamedTuple):
    """The rule that ties a site to another one, or another one to it."""

    tied_index: int
    rule: str


def share_scales(state: SolverState) -> None:
    """Give each site with a range its scale; tied sites get one in common."""
    equal: list[tuple[int, int]] = []
    differing: list[tuple[int, int]] = []
    for index, site in enumerate(state.sites):
        for source in (state.index_by_use[use] for use in site.tie if use in state.index_by_use):
            is_equal = _sharing_key(site) == _sharing_key(state.sites[source])
            (equal if is_equal else differing).append((index, source))
    # A tie between equal schemes explains a shared scale better than one between different schemes.
    edges = _tie_edges(state, differing) | _tie_edges(state, equal)
    for members in connected_groups(range(len(state.sites)), differing + equal):
        members_by_key: dict[tuple[object, ...], list[int]] = {}
        for index in members:
            # A per-channel site shares its scales with no other.
            unshared_index = None if state.sites[index].axis is None else index
            key = (*_sharing_key(state.sites[index]), unshared_index)
            members_by_key.setdefault(key, []).append(index)
        for sharing in members_by_key.values():
            _share_scale(state, sharing, edges)
    _note_differing_schemes(state, differing)
    for index in state.params:
        state.skips.pop(index, None)


def _tie_edges(state: SolverState, pairs: list[tuple[int, int]]) -> dict[int, _TieEdge]:
    """Return one tie of each site; `pairs` have a site and the site that it is tied to."""
    edges: dict[int, _TieEdge] = {}
    for index, source in pairs:
        edges[index] = _TieEdge(source, state.sites[index].rule)
        edges.setdefault(source, _TieEdge(index, state.sites[index].rule))
    return edges


def solve_block_scales(state: SolverState, index: int) -> None:
    """Solve the scales of a blockwise site at once, as no tie reaches it, and drop its range.

    The ranges of all weights together would take half the memory of their int8 values.
    """
    _share_scale(state, [index], {})
    del state.ranges[index]


def skip_unfed_ties(state: SolverState) -> None:
    """Skip tied sites that no quantized site feeds, along any chain or ring of ties."""
    dependents: dict[int, list[int]] = {}
    fed_by_themselves = []
    for index in state.params:
        site = state.sites[index]
        if not site.tie or site.has_given_range:
            fed_by_themselves.append(index)
        for use in site.tie:
            if use in state.index_by_use:
                dependents.setdefault(state.index_by_use[use], []).append(index)
    fed = set(reachable(fed_by_themselves, lambda index: dependents.get(index, ())))
    for index in [index for index in state.params if index not in fed]:
        state.skip_site(index, SkipCode.TIE, "the tensor that it is tied to is not quantized")


def _sharing_key(site: Site) -> tuple[object, ...]:
    """Return the properties that sites must agree in to share a scale."""
    scheme = site.scheme
    return scheme.type, scheme.zero, scheme.narrow, scheme.scale, scheme.range, starts_at_zero(site)


def _share_scale(state: SolverState, members: list[int], edges: dict[int, _TieEdge]) -> None:
    """Give sites with equal sharing keys the same scale and zero point."""
    state.shared_groups.update(dict.fromkeys(members, tuple(members)))
    explicit = next((index for index in members if index in state.params), None)
    if explicit is not None:
        _share_plan_scale(state, members, explicit, edges)
        return
    ranged = [index for index in members if index in state.ranges]
    if not ranged:
        return
    site, union = state.sites[ranged[0]], _union_range(state, ranged, edges)
    scheme, low, high = site.scheme, np.minimum(union.low, 0.0), np.maximum(union.high, 0.0)
    shared, raised = union, np.zeros_like(high, bool)
    if scheme.smallest_range is not None:
        shared = Range(low, np.maximum(high, low + scheme.smallest_range))
        raised = shared.high > high
    grid = scheme.grid
    if starts_at_zero(site):
        shared = Range(np.zeros_like(low), np.maximum(shared.high, 0.0))
        grid = replace(grid, symmetric=False)
    params = grid.qparams(shared, axis=site.axis, block=scheme.block_size)
    if scheme.range == "observed":
        params = _fit_inside_clip(state, ranged, params)
    if scheme.range == "given":
        params = replace(params, op_range=union)
    for index in ranged:
        state.params[index] = params
        if len(ranged) > 1:
            partner = state.sites[ranged[0] if index != ranged[0] else ranged[1]].tensor
            tie_text = _describe_tie(state, edges[index], partner)
            state.add_note(index, f"it shares scale and zero point with {partner}{tie_text}")
        if raised.any():
            channels_text = f" in {int(raised.sum())} of {raised.size} channels" if raised.ndim else ""
            smallest = f"the scheme's smallest, {scheme.smallest_range:g}{channels_text}"
            state.add_note(index, f"its range was widened to {smallest}")


def _fit_inside_clip(state: SolverState, members: list[int], params: QParams) -> QParams:
    """Return `params`, with the next smaller float32 scale if rounding alone exceeds a Clip's limit."""
    if params.scale.ndim:
        return params
    top = (params.type.limits(narrow=params.narrow)[1] - float(params.zero_point)) * float(params.scale)
    for index in members:
        limits = clip_limits(state.model, state.parameters, state.sites[index].tensor)
        if limits is not None and limits[1] < top <= limits[1] * (1 + ROUNDING_SHARE):
            return replace(params, scale=np.nextafter(params.scale, np.float32(0)))
    return params


def _share_plan_scale(state: SolverState, members: list[int], source_index: int, edges: dict[int, _TieEdge]) -> None:
    """Give all members the scale that the plan gives one of them. Members with a scale of their own keep it."""
    source, params = state.sites[source_index].tensor, state.params[source_index]
    for index in members:
        own_params, site = state.params.get(index), state.sites[index]
        if own_params is None:
            if index in state.ranges or site.tie:
                state.params[index] = params
                tie_text = _describe_tie(state, edges[index], source)
                state.add_note(index, f"it shares the scale that the plan gives {source}{tie_text}")
        elif (own_params.scale != params.scale).any() or (own_params.zero_point != params.zero_point).any():
            state.add_note(index, f"it is tied to {source}, for which the plan gives another scale")
            conflict = Conflict(
                rules=("", edges[index].rule),
                tensors=(site.tensor, source),
                wants=(f"the scale {format_values(own_params.scale)}", f"{format_values(params.scale)} for both"),
                resolution="each keeps its scale from the plan",
            )
            state.conflicts.append(conflict)


def _union_range(state: SolverState, ranged: list[int], edges: dict[int, _TieEdge]) -> Range:
    """Return the union of all ranges, or a fixed one if the others exceed it by less than rounding does.

    Only sites per tensor share a scale, so a union of several ranges has one low and one high end.
    """
    shared = state.ranges[ranged[0]]
    for index in ranged[1:]:
        shared = shared.union(state.ranges[index])
    # A rule or the plan, not data, gives a fixed range.
    sites = ((index, state.sites[index]) for index in ranged)
    fixed = next((i for i, site in sites if site.range is not None or site.scheme.observe.name == "fixed"), None)
    if fixed is None or state.ranges[fixed] == shared:
        return shared
    fixed_range = state.ranges[fixed]
    low, high = state.sites[fixed].scheme.type.limits()
    excess = MAX_EXCESS_STEPS * (fixed_range.high - fixed_range.low) / (high - low)
    if fixed_range.low - shared.low <= excess and shared.high - fixed_range.high <= excess:
        return fixed_range
    farthest = next(index for index in ranged if state.ranges[index].union(fixed_range) != fixed_range)
    conflict = Conflict(
        rules=(state.sites[fixed].rule, edges[farthest].rule),
        tensors=(state.sites[fixed].tensor, state.sites[farthest].tensor),
        wants=(
            f"the range {format_range(fixed_range)}",
            f"one scale with it and the range {format_range(state.ranges[farthest])}",
        ),
        resolution=f"all tied tensors get {format_range(shared)}",
    )
    state.record_conflict(conflict, fixed, farthest)
    return shared


def _note_differing_schemes(state: SolverState, pairs: list[tuple[int, int]]) -> None:
    """Note that tied sites with different schemes keep their own scales, once for each scheme a site is tied to."""
    partners = {(index, _sharing_key(state.sites[source])): source for index, source in pairs}
    for (index, _), source in partners.items():
        site, partner = state.sites[index], state.sites[source]
        if index not in state.params or source not in state.params:
            continue
        state.add_note(index, f"it is tied to {partner.tensor}, whose scheme differs, so each has its own scale")
        state.conflicts.append(
            Conflict(
                rules=(partner.rule, site.rule),
                tensors=(partner.tensor, site.tensor),
                wants=(_describe_scheme(partner), f"{_describe_scheme(site)} and one scale for both"),
                resolution="each has its own scale",
            )
        )


def _describe_scheme(site: Site) -> str:
    scheme = site.scheme
    narrow = ", narrow" if scheme.narrow else ""
    power = ", powers of two" if scheme.scale == "power-of-two" else ""
    return f"{scheme.type.name} {scheme.zero}{narrow}{power} per {scheme.per}"


def _describe_tie(state: SolverState, edge: _TieEdge, mentioned: TensorRef) -> str:
    """Describe the rule that ties a site, and the tied tensor unless it is `mentioned`, to end a sentence."""
    if not edge.rule:
        return ""
    partner = state.sites[edge.tied_index].tensor
    return f", by rule {edge.rule!r}" if partner == mentioned else f", as rule {edge.rule!r} ties it to {partner}"
