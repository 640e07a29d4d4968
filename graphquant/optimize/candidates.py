"""Candidate configurations of the tensors of a plan, their errors at the outputs, and the cost of float ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from graphquant import formats
from graphquant.analysis.model_summary import COPYING_KINDS
from graphquant.analysis.site_errors import match_sites
from graphquant.backends.onnxruntime_costs import with_assumed_sizes
from graphquant.calibration.batch_independence import is_batch_independent
from graphquant.calibration.memory import estimate_footprint
from graphquant.calibration.targets import sites_needing_data
from graphquant.ir import (
    CONVOLUTION_KINDS,
    MAC_KINDS,
    RESHAPING_KINDS,
    Model,
    Op,
    OpKey,
    Parameters,
    TensorRef,
    Use,
    channel_axis,
    connected_groups,
    count_macs,
    find_states,
    follow,
    follow_to_end,
    merged_channel_shape,
)
from graphquant.numerics import IntType
from graphquant.optimize.algorithms import activation_elements
from graphquant.optimize.blocks import find_blocks
from graphquant.optimize.sensitivity import (
    BATCH_SIZE,
    GroupSwitches,
    bisect_errors,
    chunk_sample_feeds,
    error_to_db,
    measure_sensitivity,
    share_errors,
)
from graphquant.qdq import FAMILIES, FamilyArguments
from graphquant.quantize import Plan, Site, Skip, SkipCode
from graphquant.rules import ObserverConfig
from graphquant.utils import Progress, stage_progress

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.calibration.data.dataset import Feed
    from graphquant.calibration.holdout import HoldOut
    from graphquant.calibration.stats import Stats
    from graphquant.optimize.algorithms import BuiltModel
    from graphquant.optimize.search_budget import SearchBudget
    from graphquant.qdq import FamilyRequest
    from graphquant.quantize.rewrite import InsertedPair

BuildModel = Callable[[Plan], "BuiltModel"]

RULE_CANDIDATE, FLOAT_CANDIDATE = "as the rules say", "float"  # candidates that every tensor has
RANGE_OBSERVERS = ("minmax", "mse")
"""Observers to try: one that clips nothing, and one that clips where the squared error falls."""

RANGE_CANDIDATES = tuple(f"{name} range" for name in RANGE_OBSERVERS)

WEIGHT_BITS, SMALL_WEIGHT_BITS, WIDE_ACTIVATION_BITS = 8, 4, 16
"""Bit widths: of small weights, of the smallest weights, and of activations that need more than 8 bits."""

WIDER_WEIGHTS = f"{WEIGHT_BITS}-bit weights"  # candidate of weights that have fewer bits by their rule

HIGH_PRECISION_CANDIDATES = frozenset({f"{WIDE_ACTIVATION_BITS} bits", FLOAT_CANDIDATE})
"""Candidates whose ops run in high precision, because kernels for 16 bits are rare."""

FLOAT_EMULATION_FAMILY = "quantize-and-dequantize"
"""Prefix of families that emulate unknown hardware. Ops with 16-bit activations of other families run in float."""


class SearchFold(NamedTuple):
    """A part of the samples on which a search measures plans, and the ranges and algorithms of all other samples."""

    held_out: HoldOut  # the samples of the part
    build: BuildModel  # builds the quantized model of a plan without these samples
    stats: Stats | None  # statistics without these samples; None if no range depends on data


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Candidate configuration of a group of tensors."""

    name: str  # name for reports: "minmax range", "8-bit weights", "float"
    error: float  # error at the outputs that the group adds, as a share of the outputs' power
    high_precision: bool = False  # True if the ops that multiply on the group run in high precision
    size: float = 0.0  # bytes of its weights


def make_candidate_plans(
    model: Model, plan: Plan, samples: Dataset | None = None, *, small: bool = False
) -> dict[str, Plan]:
    """Make one plan per candidate, in which every site that supports the candidate uses it.

    Candidates that change no site are omitted. `small` offers weights of 8 and of few bits instead. Sizes that the
    model does not tell are those of the first of the `samples`.
    """
    if any(FAMILIES[site.scheme.family or ""].variant_of for site in plan.sites) and not find_states(model):
        # The form of a weight depends on the rows of its product.
        model = with_assumed_sizes(model, dict if samples is None else samples.first_shapes)
    parameters, needs_range = Parameters(model), set(map(id, sites_needing_data(plan)))
    ranged = [site if id(site) in needs_range else None for site in plan.sites]
    changed = {}
    if not small:
        for candidate, name in zip(RANGE_CANDIDATES, RANGE_OBSERVERS, strict=True):
            changed[candidate] = [site and _with_observer(site, name) for site in ranged]
    for bits in (WEIGHT_BITS, SMALL_WEIGHT_BITS) if small else (WEIGHT_BITS,):
        changed[WIDER_WEIGHTS if bits == WEIGHT_BITS else f"{bits}-bit weights"] = [
            _with_weight_bits(model, site, bits) for site in plan.sites
        ]
    if not small:
        changed["weights per channel"] = [_with_channel_scales(model, parameters, site) for site in plan.sites]
        changed[f"{WIDE_ACTIVATION_BITS} bits"] = [site and _with_wide_activation(model, site) for site in ranged]
    index_by_use = {use: index for index, site in enumerate(plan.sites) if site.clone_of is None for use in site.uses}
    plans = {}
    for name, changed_sites in changed.items():
        sites = [new_site or site for new_site, site in zip(changed_sites, plan.sites, strict=True)]
        for index, site in enumerate(plan.sites):
            if site.clone_of in index_by_use and plan.sites[index_by_use[site.clone_of]].scheme == site.scheme:
                original = sites[index_by_use[site.clone_of]]
                sites[index] = replace(site, scheme=original.scheme, axis=original.axis, view=original.view)
        if tuple(sites) != plan.sites:
            plans[name] = replace(plan, sites=tuple(sites))
    return plans


def _with_observer(site: Site, observer: str) -> Site:
    return replace(site, scheme=replace(site.scheme, observe=ObserverConfig(name=observer)))


def _with_weight_bits(model: Model, site: Site, bits: int) -> Site | None:
    """Return a weight with the given bits if that reduces (few bits) or increases (many bits) its width."""
    dtype, few_bits = site.scheme.type, bits < WEIGHT_BITS
    if not _is_observed_weight(site) or not isinstance(dtype, IntType):
        return None
    if dtype.bits == bits or few_bits != (dtype.bits > bits):
        return None
    # With few bits, clipping reduces the error.
    observed = _with_observer(site, "mse") if few_bits and site.scheme.smallest_range is None else site
    return _with_supported_bits(model, observed, dtype, bits)


def _with_supported_bits(model: Model, site: Site, dtype: IntType, bits: int) -> Site | None:
    name = IntType(bits, signed=dtype.signed).name
    changed_site = replace(site, scheme=replace(site.scheme, dtype=name, bits=None, signed=None))
    return _if_supported(model, _with_fused_form(model, changed_site))


def _with_fused_form(model: Model, site: Site) -> Site:
    """Return the site in the form that the installed runtime computes fastest with, which depends on the bits."""
    from graphquant.formats.onnx import supports_fused_form  # imported when needed, for its packages

    family = FAMILIES[site.scheme.family or ""]
    if not family.variant_of:
        return site
    scheme = replace(site.scheme, args=FamilyArguments())
    request = _family_request(model, replace(site, scheme=scheme))
    for form in family.fused_forms(model.graphs[site.uses[0].graph], site.uses[0], request):
        if supports_fused_form(form):
            return replace(site, scheme=replace(scheme, args=form.args))
    return replace(site, scheme=replace(scheme, family=family.variant_of))


def _is_observed_weight(site: Site) -> bool:
    """Return True for a weight whose scale comes from its own values. The scale of a bias does not."""
    return site.parameter and site.clone_of is None and site.scale is None and site.scheme.observe.name != "bias"


def _with_channel_scales(model: Model, parameters: Parameters, site: Site) -> Site | None:
    """Return a convolution weight with per-channel scales, which all backends with symmetric weights support."""
    readers = [model.graphs[use.graph].op(use.op) for use in site.uses]
    is_changeable = site.scheme.per == "tensor" and site.scheme.zero == "symmetric" and site.scheme.scale == "any"
    shape = model.output(site.tensor).shape or model.output(parameters.root_tensor(site.tensor)).shape
    is_convolution = {op.kind for op in readers} <= CONVOLUTION_KINDS
    if not (_is_observed_weight(site) and is_changeable and is_convolution and not site.tie and shape):
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
    if isinstance(dtype, IntType) and dtype.bits < WIDE_ACTIVATION_BITS and family.startswith(FLOAT_EMULATION_FAMILY):
        return _with_supported_bits(model, site, dtype, WIDE_ACTIVATION_BITS)
    return None


def _if_supported(model: Model, site: Site) -> Site | None:
    """Return the site if its family supports it at the model's opset."""
    family, request = FAMILIES[site.scheme.family or ""], _family_request(model, site)
    is_supported = family.unsupported_reason(request) is None
    return None if not is_supported or 0 < model.opset < family.minimum_opset(request) else site


def _family_request(model: Model, site: Site) -> FamilyRequest:
    output = model.output(site.tensor)
    return site.scheme.family_request(
        axis=site.axis,
        dtype=output.dtype or "",
        shape=site.view or output.shape,
        is_parameter=site.parameter,
        in_function=model.graphs[site.tensor.graph].is_function,
        opset=model.opset,
    )


# The next part finds the weighted ops that read each site, and the cost of running them in float.

PASSTHROUGH_KINDS = RESHAPING_KINDS | {"identity"}  # kinds between a site and the weighted op that reads it
FUSED_OUTPUT_KINDS = PASSTHROUGH_KINDS | {"bias_add", "batchnorm", "relu", "relu6", "clip", "leaky_relu", "hard_swish"}
"""Kinds between a weighted op and the site of its output."""

MAX_HOPS = 6  # largest number of passthrough ops in a row
FLOAT_GROUP_COST = 1e-6
"""Cost, as a share of the total, of a float group that no weighted op reads; it avoids useless ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleGroup:
    """Sites that share a scale, and are therefore quantized together."""

    sites: tuple[int, ...]  # indices of the sites in the plan
    ops: frozenset[OpKey]  # weighted ops that read or produce the sites. A group can be float only if all its ops are.
    candidates: tuple[Candidate, ...] = ()  # candidates; the first is that of the rules, high-precision ones come last


def make_scale_groups(
    model: Model,
    plan: Plan,
    site_indices: Collection[int],
    errors: Mapping[int, Mapping[str, float]],
    fixed: Collection[int] = (),
) -> list[ScaleGroup]:
    """Group the sites `site_indices` of a plan, in order.

    Unknown `errors` count as 0. The sites `fixed` must not change. If only some sites of a group have a candidate, the
    others keep their rule.
    """
    ops_by_site = find_reading_ops(model, plan, site_indices, lambda op: op.kind in MAC_KINDS, COPYING_KINDS)
    live_graphs = set(model.reachable_graphs())  # a SavedModel keeps copies of functions that nothing here calls
    for index in site_indices:
        producer = _find_weighted_producer(model, plan.sites[index].tensor)
        if producer is not None and producer[0] in live_graphs:
            ops_by_site[index].add(producer)
    groups = []
    for sites in group_shared_scales(plan, site_indices):
        site_errors = [errors.get(index, {}) for index in sites]
        candidates = []
        for name in dict.fromkeys((RULE_CANDIDATE, *(name for names in site_errors for name in names))):
            error = sum(known.get(name, known.get(RULE_CANDIDATE, 0.0)) for known in site_errors)
            candidates.append(Candidate(name=name, error=error, high_precision=name in HIGH_PRECISION_CANDIDATES))
        candidates.append(Candidate(name=FLOAT_CANDIDATE, error=0.0, high_precision=True))
        candidates.sort(key=lambda candidate: candidate.high_precision)
        ops = frozenset(op for index in sites for op in ops_by_site[index])
        choices = candidates if set(fixed).isdisjoint(sites) else candidates[:1]
        groups.append(ScaleGroup(sites=tuple(sites), ops=ops, candidates=tuple(choices)))
    return groups


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


def find_reading_ops(
    model: Model,
    plan: Plan,
    site_indices: Collection[int],
    is_reader: Callable[[Op], bool],
    kinds: Collection[str] = PASSTHROUGH_KINDS,
) -> dict[int, set[OpKey]]:
    """Find the ops with `is_reader` that read each of the sites `site_indices`, directly or through ops of `kinds`."""
    index_by_use = {use: index for index in site_indices for use in plan.sites[index].uses}

    def source_use(use: Use) -> Use | None:
        tensor = model.graphs[use.graph].source_of(use)
        if use in index_by_use or tensor is None or model.op(tensor).kind not in kinds:
            return None
        return Use(tensor.graph, tensor.op, model.op(tensor).main_slot)

    ops_by_site: dict[int, set[OpKey]] = {index: set() for index in site_indices}
    for graph, op in model.reachable_ops():
        for slot in range(len(graph.slots(op.name))) if is_reader(op) else ():
            index = index_by_use.get(follow_to_end(Use(graph.name, op.name, slot), source_use, MAX_HOPS))
            if index is not None:
                ops_by_site[index].add((graph.name, op.name))
    return ops_by_site


def _find_weighted_producer(model: Model, tensor: TensorRef) -> OpKey | None:
    """Find the weighted op that produces `tensor`, through bias and clamping ops."""

    def source(current: TensorRef) -> TensorRef | None:
        use = Use(current.graph, current.op, 0)
        return model.graphs[use.graph].source_of(use) if model.op(current).kind in FUSED_OUTPUT_KINDS else None

    path = follow(tensor, source, MAX_HOPS - 1)
    return next(((current.graph, current.op) for current in path if model.op(current).kind in MAC_KINDS), None)


def mac_costs(model: Model, sizes: Mapping[TensorRef, int]) -> dict[OpKey, float]:
    """Cost of each weighted op in multiply-adds. An op of unknown size costs as much as the largest."""
    macs = count_macs(model, sizes)
    largest = max(macs.values(), default=1)
    return {op_key: float(macs.get(op_key, largest)) for op_key in byte_costs(model)}


def byte_costs(model: Model) -> dict[OpKey, float]:
    """Cost of each weighted op: additional bytes of its weights in float, compared with 8 bits."""
    parameters = Parameters(model)
    costs: dict[OpKey, float] = {}
    for graph, op in model.reachable_ops():
        if op.kind in MAC_KINDS:
            weights = (tensor for tensor in graph.slots(op.name) if tensor and parameters.is_parameter(tensor))
            elements = sum(math.prod(size or 1 for size in model.output(tensor).shape or ()) for tensor in weights)
            costs[graph.name, op.name] = 3.0 * elements
    return costs


# The last part measures the errors of candidates, and makes plans with some sites replaced.

CandidateErrors = dict[int, dict[str, float]]
"""Error that each candidate of a site adds at the outputs, as a share of their power, by index of the site and name."""

UNKNOWN_ERROR = 1.0  # error of a site that no run measures: so large that the site is the first to become float
MAX_ERROR_RATIO = 0.95  # error of a candidate relative to the rules' candidate, below which it is worth choosing


def replace_sites(
    plan: Plan, replacements: Mapping[int, Site | None], rule: str, reason_at: Callable[[int], str]
) -> Plan:
    """Return the plan with the sites `replacements` by index. A site that is replaced by None becomes a skip.

    The new sites and skips record `rule`, and as the reason the result of `reason_at` for their index.
    """
    sites, skips = [], list(plan.skips)
    for index, site in enumerate(plan.sites):
        replacement = replacements.get(index, site)
        if replacement is None:
            reason, code = reason_at(index), SkipCode.OPTIMIZATION
            skips.append(Skip(tensor=site.tensor, uses=site.uses, rule=rule, reason=reason, code=code))
        else:
            sites.append(replace(replacement, rule=rule, why=reason_at(index)) if index in replacements else site)
    return replace(plan, sites=tuple(sites), skips=tuple(skips))


def insertions_by_site(plan: Plan, insertions: Sequence[InsertedPair]) -> dict[int, InsertedPair]:
    """Return the inserted pairs by index of their site in the plan, without the copies that the solver adds."""
    site_indices = {(site.tensor, site.uses): index for index, site in enumerate(plan.sites)}
    indexed = ((site_indices.get((pair.site.tensor, pair.site.uses)), pair) for pair in insertions)
    return dict(sorted((index, pair) for index, pair in indexed if index is not None))


def quantizing_op(quantized_model: Model, output: TensorRef) -> OpKey:
    """Return the op that quantizes into `output`, looking through a reshape."""
    graph = quantized_model.graphs[output.graph]
    if graph.op(output.op).kind == "reshape":
        output = graph.slots(output.op)[0] or output
    return output.graph, output.op


MIN_GROUP_SAMPLES, MAX_GROUP_SAMPLES = 8, 64
"""Number of samples on which the errors of groups of sites are measured: few, but more in small models."""

MAX_GROUP_ELEMENTS = 1 << 21  # maximum number of elements of all activations if there are more samples than the minimum
MIN_LIMITED_SAMPLES = 4  # the same if there is not enough work left for more
MAX_SINGLE_SAMPLES = 32  # maximum number of samples that run one by one


def quantizing_ops_by_site(plan: Plan, built: BuiltModel) -> dict[int, list[OpKey]]:
    """Return the ops that quantize each site of a plan, including copies that the solver or an algorithm added."""
    index_by_use = {use: index for index, site in enumerate(plan.sites) for use in site.uses}
    index_by_op = {(use.graph, use.op): index for use, index in index_by_use.items() if plan.sites[index].parameter}
    ops: dict[int, list[OpKey]] = {}
    for pair in built.insertions:
        uses = pair.site.uses
        known = (index_by_use[use] for use in uses if use in index_by_use)
        # A bias that an algorithm added to an op belongs to a parameter of the op.
        owners = (index_by_op[use.graph, use.op] for use in uses if (use.graph, use.op) in index_by_op)
        index = next(known, next(owners, None) if pair.site.parameter else None)
        if index is not None:
            ops.setdefault(index, []).extend(quantizing_op(built.model, output) for output in pair.outputs)
    return ops


def switch_groups(
    prepared: Model,
    plan: Plan,
    built: BuiltModel,
    groups: Sequence[Collection[int]],
    samples: Dataset,
    sample_order: Sequence[int] = (),
    max_samples: int | None = None,
    *,
    counts_scores: bool = False,
) -> GroupSwitches:
    """Make a session in which each group of sites of a plan can be bypassed; it runs on a few of the samples.

    `built` is the quantized model of the plan. The samples are the first ones of `sample_order`, by default a few from
    all over the data. See `GroupSwitches` for `counts_scores`. Raises a ModelError if the model cannot be run.
    """
    ops = quantizing_ops_by_site(plan, built)
    op_groups = [[op_key for index in group for op_key in ops.get(index, ())] for group in groups]
    runner = formats.format_module(prepared.format).create_runner(prepared)
    batch_independent = estimate_footprint(
        prepared, batch_independent=True
    ).elements_per_sample is not None and is_batch_independent(runner, samples, MIN_GROUP_SAMPLES)
    inputs = {input_spec.name: input_spec.name for input_spec in runner.inputs}
    max_count = MAX_GROUP_SAMPLES if batch_independent else MAX_SINGLE_SAMPLES
    elements = activation_elements(runner, plan, samples)
    count = min(max(MAX_GROUP_ELEMENTS // max(elements, 1), MIN_GROUP_SAMPLES), max_count, samples.count)
    count = count if max_samples is None else min(count, max_samples)
    if sample_order:
        chosen = sorted(sample_order[:count])
        feeds_between = samples.feeds_between

        def open_chosen(start: int, stop: int) -> Iterator[Feed]:
            return (feed for index in chosen[start:stop] for feed in feeds_between(index, index + 1))

        samples = replace(samples, count=len(chosen), open_feeds=open_chosen)
    # All samples run at once, because each run quantizes the weights again.
    feeds = chunk_sample_feeds(
        samples, inputs, batch_independent=batch_independent, max_samples=count, batch_size=count
    )
    sites = match_sites(prepared, built.model)
    return GroupSwitches(built.model, sites, op_groups, list(feeds), count, counts_scores=counts_scores)


MIN_SET_MEASUREMENTS, MAX_SET_MEASUREMENTS = 32, 96  # measured sets of groups with little and with much work
SENSITIVITY_SHARE, CANDIDATE_SHARE = 0.4, 0.25  # share of the remaining work for errors of groups, and for a candidate
MAX_RANGE_GAIN_DB = 6.0  # gain in dB that other ranges rarely exceed
MAX_TRIED_BLOCKS = 4  # number of blocks, largest errors first, for which other candidates are tried


class GroupTrials:
    """Measurements of the groups of sites of a plan with one scale, by blocks first."""

    def __init__(
        self,
        prepared: Model,
        plan: Plan,
        built: BuiltModel,
        samples: Dataset,
        sample_order: Sequence[int] = (),
        progress: Callable[[int, int], None] | None = None,
        budget: SearchBudget | None = None,
        costs: Mapping[OpKey, float] | None = None,
    ) -> None:
        """Measure sites of `plan`, whose model is `built`, on the first samples of an order. Float ops have `costs`."""
        self._budget = budget
        self._prepared, self._plan, self._built, self._samples = prepared, plan, built, samples
        self._sample_order, self._progress = sample_order, progress
        indices = sorted(insertions_by_site(plan, built.insertions))
        self._groups = group_shared_scales(plan, indices)
        self._costs, self._total_cost = costs or {}, math.fsum((costs or {}).values())
        self._ops = [group.ops for group in make_scale_groups(prepared, plan, indices, {})] if costs else []
        self.blocks = find_blocks(prepared, plan, indices)  # blocks of the model, in graph order
        self._block_of_site = {index: number for number, block in enumerate(self.blocks) for index in block.sites}
        # Groups by block. Tied sites in several blocks count for the first one. An unreachable graph adds no error.
        self._members: list[list[int]] = [[] for _ in self.blocks]
        for number, group in enumerate(self._groups):
            if blocks := [self._block_of_site[index] for index in group if index in self._block_of_site]:
                self._members[min(blocks)].append(number)
        self.measured_sites: frozenset[int] = frozenset()  # sites whose error was measured alone
        self.interrupted = False  # True if Ctrl-C ended the measurements
        self.runs = 0  # number of runs
        self._measured_sets = 0
        self._max_samples: int | None = None
        self._switches: GroupSwitches | None = None  # those of the plan, once the errors are measured

    def measure_candidates(self, rebuild: BuildModel, missing: float = 0.0) -> tuple[CandidateErrors, dict[str, Plan]]:
        """Measure the error of each candidate of each site until `interrupted`. Return the errors and the plans.

        If more dB are `missing` than other ranges gain, limited work is kept for plans with float ops.

        Sites of one group share its error. `rebuild` builds the quantized model of a candidate plan. The errors of
        candidates are measured for whole blocks, and only for those with the largest errors. Raises a ModelError if a
        model cannot be run, and a SearchLimitError if there is no work left for the first measurement.
        """
        group_errors = dict.fromkeys(range(len(self._groups)), 0.0)
        candidate_plans: dict[str, Plan] = {}
        ratios: dict[tuple[int, str], float] = {}
        try:
            switches, limit = self._limit_work()
            group_errors |= self._measure_groups(switches, limit)
            self._switches = switches
            candidate_plans = make_candidate_plans(self._prepared, self._plan, self._samples)
            is_limited = self._budget is not None and math.isfinite(self._budget.limit)
            for name, candidate_plan in candidate_plans.items():
                is_promising = name not in RANGE_CANDIDATES or missing <= MAX_RANGE_GAIN_DB or not is_limited
                if name != f"{WIDE_ACTIVATION_BITS} bits" and is_promising and self._charge_candidate(switches):
                    built = rebuild(candidate_plan)
                    ratios |= self._measure_ratios(name, candidate_plan, built, switches, group_errors)
            self.runs += switches.runs
        except KeyboardInterrupt:
            self.interrupted = True
        errors = {
            index: self._site_errors(index, group_errors[number] / len(group), candidate_plans, ratios)
            for number, group in enumerate(self._groups)
            for index in group
        }
        return errors, candidate_plans

    def make_predictor(self, plan: Plan, built: BuiltModel) -> Callable[[Collection[int]], float] | None:
        """Return a function that measures the SQNR in dB of a plan with some sites in float, on a few samples.

        `built` is the quantized model of the plan. Return None if each measurement takes a session of its own, which is
        as much work as a measurement on all samples. Raises a SearchLimitError if there is no work left.
        """
        switches = self._switches
        if switches is None or switches.size[2]:
            return None
        if plan is not self._plan:
            if self._budget is not None:
                self._budget.charge(self._budget.costs.plan(switches.size[0]))
            switches = self._switch_groups(plan, built)

        def predict(float_sites: Collection[int]) -> float:
            on = [number for number, group in enumerate(self._groups) if not set(group) <= set(float_sites)]
            return error_to_db(self._measure_set(switches, [number for number in on if number in switches.groups]))

        return predict

    def _measure_set(self, switches: GroupSwitches, on: Collection[int]) -> float:
        """Measure the error with only some groups quantized. Raises a SearchLimitError if there is no work left."""
        if self._budget is not None and not switches.is_measured(on):
            self._budget.charge(self._set_work(switches))
        return switches.error(on)

    def _set_work(self, switches: GroupSwitches) -> float:
        """Predict the work of one measurement of a set of groups."""
        return 0.0 if self._budget is None else self._budget.costs.switched(*switches.size)

    def _charge_candidate(self, switches: GroupSwitches) -> bool:
        """Charge the work of measuring a candidate. Return False if it would leave too little for plans."""
        if self._budget is None:
            return True
        work = self._budget.costs.plan(switches.size[0]) + MAX_TRIED_BLOCKS * self._set_work(switches)
        is_affordable = work <= CANDIDATE_SHARE * self._budget.remaining
        if is_affordable:
            self._budget.charge(work)
        return is_affordable

    def _switch_groups(self, plan: Plan, built: BuiltModel) -> GroupSwitches:
        samples = self._samples, self._sample_order, self._max_samples
        return switch_groups(self._prepared, plan, built, self._groups, *samples)

    def _float_cost(self, groups: Collection[int]) -> float:
        """Return the cost of some groups in float; without costs, it is the same for all."""
        if not self._ops:
            return 1.0
        ops = {op for number in groups for op in self._ops[number]}
        return math.fsum(self._costs[op] for op in ops) + FLOAT_GROUP_COST * len(groups) * self._total_cost

    def _limit_work(self) -> tuple[GroupSwitches, int]:
        """Return the switches of the plan and the maximum number of measured sets, for the work that is left."""
        switches, count = self._switch_groups(self._plan, self._built), 2 * len(self._groups) + 1
        least, most = min(count, MIN_SET_MEASUREMENTS), min(count, MAX_SET_MEASUREMENTS)
        if self._budget is None:
            return switches, least
        self._budget.charge(self._budget.costs.plan(switches.size[0]))
        work = SENSITIVITY_SHARE * self._budget.remaining
        affordable = work / (least * self._set_work(switches))
        if affordable < 1:
            self._max_samples = max(int(affordable * switches.size[0]), MIN_LIMITED_SAMPLES)
            switches = self._switch_groups(self._plan, self._built)
        return switches, max(int(min(work / self._set_work(switches), most)), 1)

    def _measure_groups(self, switches: GroupSwitches, limit: int) -> dict[int, float]:
        """Measure the error of each group with the candidate of the rules."""

        def measure(on: Collection[int]) -> float:
            error = self._measure_set(switches, on)
            self._measured_sets += 1
            if self._progress is not None:
                self._progress(self._measured_sets, limit)
            return error

        known = [[number for number in block if number in switches.groups] for block in self._members]
        parts = bisect_errors(measure, known, limit, float_cost=self._float_cost)
        self.measured_sites = frozenset(
            index for numbers, _ in parts if len(numbers) == 1 for index in self._groups[numbers[0]]
        )
        unknown = {number for block in self._members for number in block} - switches.groups
        return {**share_errors(parts), **dict.fromkeys(unknown, UNKNOWN_ERROR)}

    def _measure_ratios(
        self,
        name: str,
        candidate_plan: Plan,
        built: BuiltModel,
        switches: GroupSwitches,
        group_errors: Mapping[int, float],
    ) -> dict[tuple[int, str], float]:
        """Measure the error of a candidate relative to the rules, for the blocks with the largest errors."""
        ratios: dict[tuple[int, str], float] = {}
        candidate = self._switch_groups(candidate_plan, built)
        block_errors = [math.fsum(group_errors[group] for group in members) for members in self._members]
        worst = sorted(range(len(self.blocks)), key=lambda number: -block_errors[number])
        for number in worst[:MAX_TRIED_BLOCKS]:
            sites = [index for group in self._members[number] for index in self._groups[group]]
            rules_error = switches.error(self._members[number])
            if rules_error and any(candidate_plan.sites[index] != self._plan.sites[index] for index in sites):
                ratios[number, name] = candidate.error(self._members[number]) / rules_error
        self.runs += candidate.runs
        return ratios

    def _site_errors(
        self,
        index: int,
        rules_error: float,
        candidate_plans: Mapping[str, Plan],
        ratios: Mapping[tuple[int, str], float],
    ) -> dict[str, float]:
        """Return the error of each candidate of a site that is worth choosing."""
        site, errors = self._plan.sites[index], {RULE_CANDIDATE: rules_error}
        for name, candidate_plan in candidate_plans.items():
            ratio = ratios.get((self._block_of_site.get(index, -1), name), math.inf)
            if name == f"{WIDE_ACTIVATION_BITS} bits":
                # Each bit halves the step, which divides the squared error by 4. A run would not tell more.
                ratio = 4.0 ** (site.scheme.type.bits - WIDE_ACTIVATION_BITS)
            if candidate_plan.sites[index] != site and ratio < MAX_ERROR_RATIO:
                errors[name] = rules_error * ratio
        return errors


class CandidateTrials:
    """Sensitivity analyses of plans in which all sites use one candidate each."""

    def __init__(self, prepared: Model, search_set: HoldOut, progress: Progress | None) -> None:
        """Analyze on `search_set`. `prepared` has the float weights that the plans quantize."""
        self._prepared, self._search_set, self._progress = prepared, search_set, progress
        self._runner = formats.format_module(prepared.format).create_runner(prepared)
        self._batch_independent = estimate_footprint(
            prepared, batch_independent=True
        ).elements_per_sample is not None and is_batch_independent(self._runner, search_set.samples(), BATCH_SIZE)
        self.interrupted = False  # True if Ctrl-C ended an analysis

    def measure_errors(
        self, quantized_model: Model, pairs: Mapping[int, InsertedPair], indices: Collection[int]
    ) -> dict[int, float]:
        """Measure the error that each of the sites `indices` adds; sites whose error is unknown are omitted.

        A site in an unreachable graph, such as a copy of a function in a SavedModel, adds nothing. Raises a ModelError
        if a model cannot be run.
        """
        ops_by_site = {i: [quantizing_op(quantized_model, output) for output in pairs[i].outputs] for i in indices}
        all_ops = {op_key for op_keys in ops_by_site.values() for op_key in op_keys}
        sensitivity = measure_sensitivity(
            quantized_model,
            match_sites(self._prepared, quantized_model),
            self._search_set.samples(),
            inputs={input_spec.name: input_spec.name for input_spec in self._runner.inputs},
            batch_independent=self._batch_independent,
            only=all_ops,
            progress=stage_progress(self._progress, "sensitivity"),
        )
        self.interrupted |= sensitivity.interrupted
        errors = {op_key: error for op_key, error in sensitivity.errors.items() if math.isfinite(error)}
        live_graphs = {*quantized_model.reachable_graphs()}
        errors |= {op_key: 0.0 for op_key in all_ops if op_key[0] not in live_graphs}
        return {
            index: sum(errors[op_key] for op_key in op_keys)
            for index, op_keys in ops_by_site.items()
            if errors.keys() >= set(op_keys)
        }
