"""Find the fastest plan by timing: sites that are slower on integers stay float (see docs/decisions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from graphquant import formats
from graphquant.ir import Parameters, TensorRef, Use, follow_to_end
from graphquant.optimize.candidate_errors import insertions_by_site
from graphquant.optimize.candidates import (
    FUSED_OUTPUT_KINDS,
    MAX_HOPS,
    PASSTHROUGH_KINDS,
    ScaleGroup,
    find_site_read,
    group_shared_scales,
    mac_costs,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from graphquant.formats import Feeds
    from graphquant.ir import Model, OpKey
    from graphquant.optimize.algorithms import BuiltModel
    from graphquant.optimize.timing import TimeRatio
    from graphquant.quantize import Plan
    from graphquant.quantize.rewrite import InsertedPair

    FloatSites = tuple[int, ...]


MAX_TIMED_PLANS = 16
"""Maximum number of timed plans."""

MAX_TIME_RATIO = 0.995
"""Time of a plan relative to the previous one, below which it is accepted."""

MIN_TIME_SHARE = 0.002
"""Smallest share of a run's time that is worth a trial."""

UNTIMED_KINDS = frozenset({"input", "constant", "variable", "read_variable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyProfile:
    """Distribution of one plan's run time.

    Attributes:
        op_seconds: Seconds of each op, including the ops fused into it.
        site_seconds: Seconds of the conversions of each site.
    """

    op_seconds: Mapping[OpKey, float]
    site_seconds: Mapping[int, float]

    @property
    def total_seconds(self) -> float:
        """Total in seconds."""
        return sum(self.op_seconds.values()) + sum(self.site_seconds.values())


class FloatSitesResult(NamedTuple):
    """Result of `minimize_latency`.

    Attributes:
        float_sites: Indices of the sites that stay float.
        plans: Number of timed plans.
        interrupted: True if Ctrl-C ended the search early.
    """

    float_sites: FloatSites
    plans: int
    interrupted: bool


def minimize_latency(
    groups: Sequence[ScaleGroup],
    profile_plan: Callable[[FloatSites], LatencyProfile],
    compare_plans: Callable[[FloatSites, FloatSites], TimeRatio],
    progress: Callable[[int, int], None] | None = None,
) -> FloatSitesResult:
    """Find the sites that make the model faster in float.

    Profiles predict the gain and give the order of trials. A trial is accepted if it is faster than the best plan when
    the two are timed side by side. If several groups together bring no gain, halves of them are tried.

    Args:
        groups: The sites.
        profile_plan: Profile the plan with these sites in float.
        compare_plans: Time the plan with the first sites in float relative to the plan with the second.
        progress: Callback with the number of timed plans and its maximum.
    """
    return _LatencySearch(groups, profile_plan, compare_plans, progress).run()


class _LatencySearch:
    """State of the latency search: the best plan, and the trials without gain."""

    def __init__(
        self,
        groups: Sequence[ScaleGroup],
        profile_plan: Callable[[FloatSites], LatencyProfile],
        compare_plans: Callable[[FloatSites, FloatSites], TimeRatio],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._groups, self._progress = groups, progress
        self._profile_plan, self._compare_plans = profile_plan, compare_plans
        self._best: frozenset[int] = frozenset()
        self._rejected: set[frozenset[int]] = set()
        self._plans = 0

    def run(self) -> FloatSitesResult:
        """Accept trials until none promises a gain."""
        interrupted = False
        try:
            float_profile = self._profile_plan(self._float_sites(frozenset(range(len(self._groups)))))
            while self._plans < MAX_TIMED_PLANS and self._try_step(float_profile):
                pass
        except KeyboardInterrupt:
            interrupted = True
        return FloatSitesResult(self._float_sites(self._best), self._plans, interrupted)

    def _try_step(self, float_profile: LatencyProfile) -> bool:
        """Try the groups that the profile of the best plan suggests, then halves of them. Return True if one helped."""
        best_profile = self._profile_plan(self._float_sites(self._best))
        gains = {
            op: best_profile.op_seconds.get(op, 0.0) - float_profile.op_seconds.get(op, 0.0)
            for op in {*best_profile.op_seconds, *float_profile.op_seconds}
        }
        chosen = self._promising_groups(gains, best_profile.site_seconds, MIN_TIME_SHARE * best_profile.total_seconds)
        while chosen and self._plans < MAX_TIMED_PLANS:
            candidate = self._close_over_ops({*self._best, *chosen})
            if candidate != self._best and candidate not in self._rejected:
                if self._is_faster(candidate):
                    self._best = candidate
                    return True
                self._rejected.add(candidate)
            chosen = chosen[: len(chosen) // 2]
        return False

    def _promising_groups(
        self, gains: Mapping[OpKey, float], site_seconds: Mapping[int, float], min_gain: float
    ) -> list[int]:
        """Groups whose float form is faster, with everything that becomes float with them, by gain."""
        float_ops = {op for index in self._best for op in self._groups[index].ops}

        def group_gain(index: int) -> float:
            group = self._groups[index]
            freed = sum(gains.get(op, 0.0) for op in sorted(group.ops - float_ops))
            return freed + sum(site_seconds.get(site, 0.0) for site in group.sites)

        remaining = [index for index, group in enumerate(self._groups) if group.ops and index not in self._best]
        chosen = []
        for index in sorted(remaining, key=lambda group_index: (-group_gain(group_index), group_index)):
            if group_gain(index) > min_gain:  # what was chosen before may have made it worth more or less
                chosen.append(index)
                float_ops |= self._groups[index].ops
        return chosen

    def _close_over_ops(self, chosen: Collection[int]) -> frozenset[int]:
        """Add the groups that no quantized op uses any more."""
        float_ops = {op for index in chosen for op in self._groups[index].ops}
        freed = {index for index, group in enumerate(self._groups) if group.ops and group.ops <= float_ops}
        computing = {index for index, group in enumerate(self._groups) if group.ops}
        return frozenset(range(len(self._groups))) if computing <= freed else frozenset({*chosen, *freed})

    def _is_faster(self, candidate: frozenset[int]) -> bool:
        ratio = self._compare_plans(self._float_sites(candidate), self._float_sites(self._best))
        self._plans += 1
        if self._progress is not None:
            self._progress(self._plans, MAX_TIMED_PLANS)
        return ratio.median < MAX_TIME_RATIO and ratio.high < 1

    def _float_sites(self, chosen: Collection[int]) -> FloatSites:
        return tuple(sorted(site for index in chosen for site in self._groups[index].sites))


def make_latency_groups(model: Model, plan: Plan, site_indices: Collection[int]) -> list[ScaleGroup]:
    """Group the sites `site_indices` of a plan, in order.

    Args:
        model: The prepared model.
        plan: The plan.
        site_indices: Indices of the quantized sites.
    """
    index_by_use = {use: index for index in site_indices for use in plan.sites[index].uses}
    fusion = FusionMap(model)
    ops: dict[int, set[OpKey]] = {index: set() for index in site_indices}
    for name in model.reachable_graphs():
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind not in PASSTHROUGH_KINDS:
                for slot in range(len(graph.slots(op.name))):
                    index = find_site_read(model, Use(name, op.name, slot), index_by_use)
                    if index is not None:
                        ops[index].add(fusion.fusion_target((name, op.name)))
    for index in site_indices:
        tensor = plan.sites[index].tensor
        if not plan.sites[index].parameter:
            ops[index].add(fusion.fusion_target((tensor.graph, tensor.op)))
    idle = {
        op_key
        for op_keys in ops.values()
        for op_key in op_keys
        if model.graphs[op_key[0]].op(op_key[1]).kind in UNTIMED_KINDS
    }
    return [
        ScaleGroup(sites=tuple(sites), ops=frozenset(op_key for index in sites for op_key in ops[index]) - idle)
        for sites in group_shared_scales(plan, site_indices)
    ]


class FusionMap:
    """Ops that runtimes fuse into a preceding op."""

    def __init__(self, model: Model) -> None:
        """Map the ops of `model`."""
        self._model, self._parameters = model, Parameters(model)

    def fusion_target(self, op_key: OpKey) -> OpKey:
        """Op into which `op_key` is fused as a bias, clamp or passthrough; `op_key` itself if it is not fused."""
        return follow_to_end(op_key, self._fused_source, MAX_HOPS)

    def _fused_source(self, op_key: OpKey) -> OpKey | None:
        source = self._source_of_fused_input(op_key)
        return None if source is None else (source.graph, source.op)

    def _source_of_fused_input(self, op_key: OpKey) -> TensorRef | None:
        graph = self._model.graphs[op_key[0]]
        op = graph.op(op_key[1])
        if op.kind in FUSED_OUTPUT_KINDS:
            return graph.source_of(Use(*op_key, 0))
        if op.kind in {"add", "mul"}:
            operands = [tensor for tensor in graph.slots(op.name) if tensor is not None]
            activations = [tensor for tensor in operands if not self._parameters.is_parameter(tensor)]
            return activations[0] if len(activations) < len(operands) and len(activations) == 1 else None
        return None


class PlanProfiler:
    """Profiles of plans by op and site of the prepared model.

    Attributes:
        quantized_sites: Indices of the sites that are quantized in the plan of the rules.
    """

    def __init__(
        self, prepared: Model, plan: Plan, build: Callable[[FloatSites], BuiltModel], feeds: Sequence[Feeds]
    ) -> None:
        """Profile the float model on `feeds`. `build` makes the model with some sites in float."""
        self._prepared, self._plan, self._build, self._feeds = prepared, plan, build, feeds
        self._fused = FusionMap(prepared)
        self._module = formats.format_module(prepared.format)
        self._profile_cache: dict[FloatSites, LatencyProfile] = {}
        self._float_profile = self._module.profile_ops(prepared, feeds)
        self.quantized_sites = sorted(insertions_by_site(plan, build(()).insertions))

    @property
    def available(self) -> bool:
        """True if the runtime reports the time of ops."""
        return self._float_profile is not None

    def profile(self, float_sites: FloatSites) -> LatencyProfile:
        """Return the profile of the plan with these sites in float, measured once."""
        if float_sites not in self._profile_cache:
            self._profile_cache[float_sites] = self._measure(float_sites)
        return self._profile_cache[float_sites]

    def float_costs(self) -> dict[OpKey, float]:
        """Return the additional seconds of each weighted op in float, compared with integers."""
        quantized, in_float = (self.profile(sites).op_seconds for sites in ((), tuple(self.quantized_sites)))
        saved = {op: in_float.get(op, 0.0) - quantized.get(op, 0.0) for op in mac_costs(self._prepared, {})}
        # An op that is faster in float still costs a little, so that the bounds are met with few float ops.
        min_cost = 1e-3 * max([*saved.values(), 1e-6])
        return {op: max(value, min_cost) for op, value in saved.items()}

    def _measure(self, float_sites: FloatSites) -> LatencyProfile:
        if {*float_sites} >= {*self.quantized_sites}:
            model, insertions, times = self._prepared, [], self._float_profile
        else:
            built = self._build(float_sites)
            model, insertions = built.model, built.insertions
            times = self._module.profile_ops(model, self._feeds)
        ops: dict[OpKey, float] = {}
        sites: dict[int, float] = {}
        if times is not None:
            site_by_op = self._site_by_op(model, insertions)
            for op_key, seconds in times.seconds.items():
                if self._is_prepared_op(op_key):
                    target = self._fused.fusion_target(op_key)
                    ops[target] = ops.get(target, 0.0) + seconds
            for op_key, seconds in times.conversion_seconds.items():
                if op_key in site_by_op:
                    sites[site_by_op[op_key]] = sites.get(site_by_op[op_key], 0.0) + seconds
        return LatencyProfile(op_seconds=ops, site_seconds=sites)

    def _is_prepared_op(self, op_key: OpKey) -> bool:
        return op_key[0] in self._prepared.graphs and op_key[1] in self._prepared.graphs[op_key[0]]

    def _site_by_op(self, model: Model, insertions: Sequence[InsertedPair]) -> dict[OpKey, int]:
        """Map the ops of each Q/DQ pair, and the op whose output it quantizes, to the index of the site."""
        site_by_op: dict[OpKey, int] = {}
        for index, pair in insertions_by_site(self._plan, insertions).items():
            if not pair.site.parameter:
                site_by_op.setdefault((pair.site.tensor.graph, pair.site.tensor.op), index)
            for output in pair.outputs:
                site_by_op[output.graph, output.op] = index
                inputs = model.graphs[output.graph].slots(output.op)
                source = inputs[0] if inputs else None
                if source is not None and not self._is_prepared_op((source.graph, source.op)):
                    site_by_op[source.graph, source.op] = index
        return site_by_op
