"""Candidate configurations of the tensors of a plan, each as a complete plan, and the cost of float ops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.analysis.model_summary import COPYING_KINDS
from graphquant.calibration import sites_needing_data
from graphquant.ir import (
    CONVOLUTION_KINDS,
    MAC_KINDS,
    Parameters,
    TensorRef,
    Use,
    channel_axis,
    connected_groups,
    count_macs,
    merged_channel_shape,
)
from graphquant.numerics import IntType
from graphquant.qdq import FAMILIES
from graphquant.rules import ObserverConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Mapping, Sequence

    from graphquant.ir import Model, OpKey
    from graphquant.quantize import Plan, Site


RULE_CANDIDATE, FLOAT_CANDIDATE = "as the rules say", "float"
"""Candidates that every tensor has."""

RANGE_OBSERVERS = ("minmax", "mse")
"""Observers to try: one that clips nothing, and one that clips where the squared error falls."""

WEIGHT_BITS, SMALL_WEIGHT_BITS, WIDE_ACTIVATION_BITS = 8, 4, 16
"""Bit widths: of small weights, of the smallest weights, and of activations that need more than 8 bits."""

HIGH_PRECISION_CANDIDATES = frozenset({f"{WIDE_ACTIVATION_BITS} bits", FLOAT_CANDIDATE})
"""Candidates whose ops run in high precision, because kernels for 16 bits are rare."""

FLOAT_EMULATION_FAMILY = "quantize-and-dequantize"
"""Prefix of families that emulate unknown hardware. Ops with 16-bit activations of other families run in float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Candidate configuration of a group of tensors.

    Attributes:
        name: Name for reports: "minmax range", "8-bit weights", "float".
        error: Error at the outputs that the group adds, as a share of the outputs' power.
        high_precision: True if the ops that multiply on the group run in high precision.
        size: Bytes of its weights.
    """

    name: str
    error: float
    high_precision: bool = False
    size: float = 0.0


def make_candidate_plans(model: Model, plan: Plan, *, small: bool = False) -> dict[str, Plan]:
    """Make one plan per candidate, in which every site that supports the candidate uses it.

    Args:
        model: The prepared model.
        plan: The plan of the rules.
        small: True to offer weights of few bits.
    """
    if small:
        small_weights = {
            index: _with_weight_bits(model, site, SMALL_WEIGHT_BITS) for index, site in enumerate(plan.sites)
        }
        return _make_changed_plans(plan, {f"{SMALL_WEIGHT_BITS}-bit weights": small_weights})
    needs_range = set(map(id, sites_needing_data(plan)))
    parameters = Parameters(model)
    sites = list(enumerate(plan.sites))
    sites_by_name = {
        f"{name} range": {position: _with_observer(site, name) for position, site in sites if id(site) in needs_range}
        for name in RANGE_OBSERVERS
    }
    sites_by_name[f"{WEIGHT_BITS}-bit weights"] = {
        position: _with_weight_bits(model, site, WEIGHT_BITS) for position, site in sites
    }
    sites_by_name["weights per channel"] = {
        position: _with_channel_scales(model, parameters, site) for position, site in sites
    }
    sites_by_name[f"{WIDE_ACTIVATION_BITS} bits"] = {
        position: _with_wide_activation(model, site) for position, site in sites if id(site) in needs_range
    }
    return _make_changed_plans(plan, sites_by_name)


def _make_changed_plans(plan: Plan, sites_by_name: Mapping[str, Mapping[int, Site | None]]) -> dict[str, Plan]:
    """Yield the plans that differ from `plan`."""
    index_by_use = {use: index for index, site in enumerate(plan.sites) if site.clone_of is None for use in site.uses}
    plans = {}
    for name, sites in sites_by_name.items():
        new_sites = [sites.get(index) or site for index, site in enumerate(plan.sites)]
        for index, site in enumerate(plan.sites):
            if site.clone_of in index_by_use and plan.sites[index_by_use[site.clone_of]].scheme == site.scheme:
                original = new_sites[index_by_use[site.clone_of]]
                new_sites[index] = replace(site, scheme=original.scheme, axis=original.axis, view=original.view)
        if tuple(new_sites) != plan.sites:
            plans[name] = replace(plan, sites=tuple(new_sites))
    return plans


def _with_observer(site: Site, observer: str) -> Site | None:
    """Return the site with another observer."""
    return replace(site, scheme=replace(site.scheme, observe=ObserverConfig(name=observer)))


def _with_weight_bits(model: Model, site: Site, bits: int) -> Site | None:
    """Return a weight with the given bits if that reduces (few bits) or increases (many bits) its width."""
    dtype = site.scheme.type
    if (
        not _is_observed_weight(site)
        or not isinstance(dtype, IntType)
        or not (dtype.bits > bits if bits < WEIGHT_BITS else dtype.bits < bits)
    ):
        return None
    clips_range = bits < WEIGHT_BITS and site.scheme.block_size is None
    changed = _with_dtype_bits(site, dtype, bits)
    return _if_supported(
        model,
        replace(changed, scheme=replace(changed.scheme, observe=ObserverConfig(name="mse")))
        if clips_range
        else changed,
    )


def _with_dtype_bits(site: Site, dtype: IntType, bits: int) -> Site:
    name = IntType(bits, signed=dtype.signed).name
    return replace(site, scheme=replace(site.scheme, dtype=name, bits=None, signed=None))


def _is_observed_weight(site: Site) -> bool:
    """Return True for a weight whose scale comes from its own values. The scale of a bias does not."""
    return site.parameter and site.clone_of is None and site.scale is None and site.scheme.observe.name != "bias"


def _with_channel_scales(model: Model, parameters: Parameters, site: Site) -> Site | None:
    """Return a convolution weight with per-channel scales, which all backends with symmetric weights support."""
    readers = [model.graphs[use.graph].op(use.op) for use in site.uses]
    is_changeable = site.scheme.per == "tensor" and site.scheme.zero == "symmetric" and site.scheme.scale == "any"
    shape = model.output(site.tensor).shape or model.output(parameters.root_tensor(site.tensor)).shape
    if (
        not (_is_observed_weight(site) and is_changeable and not site.tie and shape)
        or {op.kind for op in readers} - CONVOLUTION_KINDS
    ):
        return None
    axes = {(channel_axis(op, shape), merged_channel_shape(op, shape)) for op in readers}
    axis, view = next(iter(axes))
    if len(axes) > 1 or axis is None or None in (view or shape):
        return None
    fixed_view = None if view is None else tuple(size or 0 for size in view)
    return _if_supported(model, replace(site, axis=axis, view=fixed_view, scheme=replace(site.scheme, per="channel")))


def _with_wide_activation(model: Model, site: Site) -> Site | None:
    """Return an activation with more bits, unless ONNX Runtime would then run the op in float."""
    dtype, family = site.scheme.type, site.scheme.family or ""
    if (
        not isinstance(dtype, IntType)
        or dtype.bits >= WIDE_ACTIVATION_BITS
        or not family.startswith(FLOAT_EMULATION_FAMILY)
    ):
        return None
    return _if_supported(model, _with_dtype_bits(site, dtype, WIDE_ACTIVATION_BITS))


def _if_supported(model: Model, site: Site) -> Site | None:
    """Return the site if its family supports it at the model's opset."""
    family, output = FAMILIES[site.scheme.family or ""], model.output(site.tensor)
    request = site.scheme.family_request(
        axis=site.axis,
        dtype=output.dtype or "",
        shape=site.view or output.shape,
        is_parameter=site.parameter,
        in_function=model.graphs[site.tensor.graph].is_function,
    )
    return (
        site
        if family.unsupported_reason(request) is None and not 0 < model.opset < family.minimum_opset(request)
        else None
    )


# The next part finds the weighted ops that read each site, and the cost of running them in float.

PASSTHROUGH_KINDS = frozenset({"reshape", "identity", "transpose", "squeeze", "unsqueeze"})
"""Kinds between a site and the weighted op that reads it."""

FUSED_OUTPUT_KINDS = PASSTHROUGH_KINDS | {"bias_add", "batchnorm", "relu", "relu6", "clip", "leaky_relu", "hard_swish"}
"""Kinds between a weighted op and the site of its output."""

MAX_HOPS = 6
"""Largest number of such ops in a row."""

FLOAT_GROUP_COST = 1e-6
"""Cost, as a share of the total, of a float group that no weighted op reads; it avoids useless ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleGroup:
    """Sites that share a scale, and are therefore quantized together.

    Attributes:
        sites: Indices of the sites in the plan.
        ops: Weighted ops that read or produce the sites. A group can be float only if all its ops are.
        candidates: Candidates; the first is that of the rules, high-precision ones come last.
    """

    sites: tuple[int, ...]
    ops: frozenset[OpKey]
    candidates: tuple[Candidate, ...] = ()


def make_scale_groups(
    model: Model,
    plan: Plan,
    site_indices: Collection[int],
    errors: Mapping[int, Mapping[str, float]],
    fixed: Collection[int] = (),
) -> list[ScaleGroup]:
    """Group the sites `site_indices` of a plan, in order.

    Args:
        model: The prepared model.
        plan: The plan.
        site_indices: Indices of the quantized sites.
        errors: Error of each site by candidate. Unknown errors count as 0.
        fixed: Indices of sites that must not change.
    """
    index_by_use = {use: index for index in site_indices for use in plan.sites[index].uses}
    ops_by_site = _find_ops_by_site(model, plan, site_indices, index_by_use)
    return [
        ScaleGroup(
            sites=tuple(sites),
            ops=frozenset(op for index in sites for op in ops_by_site[index]),
            candidates=_group_candidates([errors.get(index, {}) for index in sites])[
                : 1 if set(sites) & set(fixed) else None
            ],
        )
        for sites in group_shared_scales(plan, site_indices)
    ]


def group_shared_scales(plan: Plan, site_indices: Collection[int]) -> list[list[int]]:
    """Group the sites that must share one scale."""
    index_by_use = {use: index for index in site_indices for use in plan.sites[index].uses}
    ties = [
        (index, index_by_use[use])
        for index in site_indices
        for use in (*plan.sites[index].tie, *filter(None, (plan.sites[index].clone_of,)))
        if use in index_by_use
    ]
    return connected_groups(sorted(site_indices), ties)


def _group_candidates(errors: Sequence[Mapping[str, float]]) -> tuple[Candidate, ...]:
    """Candidates of a group. If only some of its sites have a candidate, the others keep their rule."""
    names = dict.fromkeys(name for site_errors in errors for name in site_errors if name != RULE_CANDIDATE)
    candidates = [
        Candidate(name=RULE_CANDIDATE, error=sum(site_errors.get(RULE_CANDIDATE, 0.0) for site_errors in errors))
    ]
    for name in names:
        error = sum(site_errors.get(name, site_errors.get(RULE_CANDIDATE, 0.0)) for site_errors in errors)
        candidates.append(Candidate(name=name, error=error, high_precision=name in HIGH_PRECISION_CANDIDATES))
    candidates.append(Candidate(name=FLOAT_CANDIDATE, error=0.0, high_precision=True))
    return tuple(sorted(candidates, key=lambda candidate: candidate.high_precision))


def _find_ops_by_site(
    model: Model, plan: Plan, site_indices: Collection[int], index_by_use: Mapping[Use, int]
) -> dict[int, set[OpKey]]:
    """Find the weighted ops that read or produce each site."""
    ops_by_site: dict[int, set[OpKey]] = {index: set() for index in site_indices}
    live = dict.fromkeys(model.reachable_graphs())  # a SavedModel keeps copies of functions that nothing here calls
    for name in live:
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind in MAC_KINDS:
                for slot in range(len(graph.slots(op.name))):
                    index = find_site_read(model, Use(name, op.name, slot), index_by_use, COPYING_KINDS)
                    if index is not None:
                        ops_by_site[index].add((name, op.name))
    for index in site_indices:
        producer = _find_weighted_producer(model, plan.sites[index].tensor)
        if producer is not None and producer[0] in live:
            ops_by_site[index].add(producer)
    return ops_by_site


def find_site_read(
    model: Model, use: Use, index_by_use: Mapping[Use, int], kinds: Container[str] = PASSTHROUGH_KINDS
) -> int | None:
    """Find the site that `use` reads, through passthrough kinds."""
    for _ in range(MAX_HOPS):
        tensor = model.graphs[use.graph].source_of(use)
        if use in index_by_use or tensor is None or model.op(tensor).kind not in kinds:
            break
        use = Use(tensor.graph, tensor.op, model.op(tensor).main_slot)
    return index_by_use.get(use)


def _find_weighted_producer(model: Model, tensor: TensorRef) -> OpKey | None:
    """Find the weighted op that produces `tensor`, through bias and clamping ops."""
    current: TensorRef | None = tensor
    for _ in range(MAX_HOPS):
        if current is None:
            break
        op = model.op(current)
        if op.kind in MAC_KINDS:
            return current.graph, current.op
        if op.kind not in FUSED_OUTPUT_KINDS:
            break
        current = model.graphs[current.graph].source_of(Use(current.graph, current.op, 0))
    return None


def mac_costs(model: Model, sizes: Mapping[TensorRef, int]) -> dict[OpKey, float]:
    """Cost of each weighted op in multiply-adds. An op of unknown size costs as much as the largest."""
    costs = {op_key: float(count) for op_key, count in count_macs(model, sizes).items()}
    return _fill_unknown_costs(model, costs)


def byte_costs(model: Model) -> dict[OpKey, float]:
    """Cost of each weighted op: additional bytes of its weights in float, compared with 8 bits."""
    parameters = Parameters(model)
    costs: dict[OpKey, float] = {}
    for name in model.reachable_graphs():
        graph = model.graphs[name]
        for op in graph.ops():
            weights = [
                tensor for tensor in graph.slots(op.name) if tensor is not None and parameters.is_parameter(tensor)
            ]
            if op.kind in MAC_KINDS:
                costs[name, op.name] = float(sum(_element_count(model, tensor) for tensor in weights) * 3)
    return costs


def _element_count(model: Model, tensor: TensorRef) -> int:
    shape: Sequence[int | None] | None = model.output(tensor).shape
    return math.prod(size or 1 for size in shape or ())


def _fill_unknown_costs(model: Model, costs: dict[OpKey, float]) -> dict[OpKey, float]:
    dearest = max(costs.values(), default=1.0)
    all_ops = [
        (name, op.name) for name in model.reachable_graphs() for op in model.graphs[name].ops() if op.kind in MAC_KINDS
    ]
    return {op_key: costs.get(op_key, dearest) for op_key in all_ops}
