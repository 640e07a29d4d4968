"""Find the fastest plan by timing: sites that are slower on integers stay float (see docs/decisions)."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from graphquant.ir import Parameters, TensorRef, Use
from graphquant.optimize.candidates import (
    FUSED_OUTPUT_KINDS,
    MAX_HOPS,
    PASSTHROUGH_KINDS,
    find_site_read,
    group_shared_scales,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from graphquant.ir import Model
    from graphquant.quantize import Plan

    OpKey = tuple[str, str]
    FloatSites = tuple[int, ...]
    TimedRun = Callable[[], object]
    Clock = Callable[[], float]


MAX_TIMED_PLANS = 16
"""Maximum number of timed plans."""

MAX_TIME_RATIO = 0.995
"""Time of a plan relative to the previous one, below which it is accepted."""

MIN_TIME_SHARE = 0.002
"""Smallest share of a run's time that is worth a trial."""

UNTIMED_KINDS = frozenset({"input", "constant", "variable", "read_variable"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyGroup:
    """Sites that are quantized together.

    Attributes:
        sites: Indices of the sites in the plan.
        ops: Ops that read or produce the sites.
    """

    sites: tuple[int, ...]
    ops: frozenset[OpKey]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatSitesResult:
    """Result of the latency search.

    Attributes:
        float_sites: Indices of the sites that stay float.
        plans: Number of timed plans.
        interrupted: True if Ctrl-C ended the search early.
    """

    float_sites: FloatSites
    plans: int
    interrupted: bool


def minimize_latency(
    groups: Sequence[LatencyGroup],
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
        groups: Sequence[LatencyGroup],
        profile_plan: Callable[[FloatSites], LatencyProfile],
        compare_plans: Callable[[FloatSites, FloatSites], TimeRatio],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._groups, self._profile_plan, self._compare_plans, self._progress = (
            groups,
            profile_plan,
            compare_plans,
            progress,
        )
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
        return FloatSitesResult(float_sites=self._float_sites(self._best), plans=self._plans, interrupted=interrupted)

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


def make_latency_groups(model: Model, plan: Plan, site_indices: Collection[int]) -> list[LatencyGroup]:
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
        LatencyGroup(sites=tuple(sites), ops=frozenset(op_key for index in sites for op_key in ops[index]) - idle)
        for sites in group_shared_scales(plan, site_indices)
    ]


class FusionMap:
    """Ops that runtimes fuse into a preceding op."""

    def __init__(self, model: Model) -> None:
        """Map the ops of `model`."""
        self._model, self._parameters = model, Parameters(model)

    def fusion_target(self, op_key: OpKey) -> OpKey:
        """Op into which `op_key` is fused as a bias, clamp or passthrough; `op_key` itself if it is not fused."""
        for _ in range(MAX_HOPS):
            source = self._fused_source(op_key)
            if source is None:
                break
            op_key = source.graph, source.op
        return op_key

    def _fused_source(self, op_key: OpKey) -> TensorRef | None:
        graph = self._model.graphs[op_key[0]]
        op = graph.op(op_key[1])
        if op.kind in FUSED_OUTPUT_KINDS:
            return graph.source_of(Use(*op_key, 0))
        if op.kind in {"add", "mul"}:
            operands = [tensor for tensor in graph.slots(op.name) if tensor is not None]
            activations = [tensor for tensor in operands if not self._parameters.is_parameter(tensor)]
            return activations[0] if len(activations) < len(operands) and len(activations) == 1 else None
        return None


# Two models are timed in alternation, because the load of the machine then affects both.

SLICE_SECONDS = 0.005
"""Seconds of each slice, at least one run; the shortest block of the slice counts."""

BLOCK_SECONDS = 0.0003
"""Seconds of a block, at least one run. Reading the clock takes a fraction of a microsecond."""

MIN_ROUNDS = 9
"""Minimum number of rounds."""

MAX_RATIO_WIDTH = 0.02
"""Width of the confidence interval at which timing ends."""

CONFIDENCE_DEVIATIONS = 1.96
"""Standard deviations of the number of rounds below the true median, for 95% confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRatio:
    """Median ratio of two run times over all rounds, with a 95% confidence interval.

    Attributes:
        median: The ratio.
        low: Lower end of the interval.
        high: Upper end of the interval.
        first_seconds: Median seconds of one run of the first model.
        second_seconds: Median seconds of one run of the second model.
    """

    median: float
    low: float
    high: float
    first_seconds: float
    second_seconds: float


def measure_time_ratio(
    first_run: TimedRun, second_run: TimedRun, *, seconds: float, clock: Clock = time.process_time
) -> TimeRatio:
    """Time two functions in alternating slices of a few runs; the order alternates too.

    The clock counts processor time, so other programs do not lengthen the runs of one thread. Other load of the machine
    in a round affects both functions, so ratios are more reliable than times.

    Args:
        first_run: Function to time.
        second_run: Function to compare with.
        seconds: Time limit, unless the ratio is known precisely before.
        clock: Clock in seconds.
    """
    block_runs = [_count_block_runs(run, clock) for run in (first_run, second_run)]
    end, pairs = clock() + seconds, list[tuple[float, float]]()
    while True:
        if len(pairs) % 2:
            second_seconds = _shortest_block_seconds(second_run, block_runs[1], clock)
            pairs.append((_shortest_block_seconds(first_run, block_runs[0], clock), second_seconds))
        else:
            first_seconds = _shortest_block_seconds(first_run, block_runs[0], clock)
            pairs.append((first_seconds, _shortest_block_seconds(second_run, block_runs[1], clock)))
        if len(pairs) >= MIN_ROUNDS:
            result = _median_with_bounds(pairs)
            if clock() >= end or result.high - result.low < MAX_RATIO_WIDTH:
                return result


def _count_block_runs(run: TimedRun, clock: Clock) -> int:
    """Number of runs in a block. The first run ever is not timed."""
    run()
    start = clock()
    run()
    return math.ceil(BLOCK_SECONDS / max(clock() - start, BLOCK_SECONDS / 1000))


def _shortest_block_seconds(run: TimedRun, count: int, clock: Clock) -> float:
    """Seconds of a run in the shortest block of a slice."""
    shortest, end = math.inf, clock() + SLICE_SECONDS
    while True:
        start = clock()
        for _ in range(count):
            run()
        now = clock()
        shortest = min(shortest, (now - start) / count)
        if now >= end:
            return shortest


def _median_with_bounds(pairs: Sequence[tuple[float, float]]) -> TimeRatio:
    """Median with its confidence interval from order statistics."""
    ratios = sorted(first / max(second, 1e-12) for first, second in pairs)
    trimmed = max(math.floor((len(ratios) - CONFIDENCE_DEVIATIONS * math.sqrt(len(ratios))) / 2), 0)
    return TimeRatio(
        median=median(ratios),
        low=ratios[trimmed],
        high=ratios[-1 - trimmed],
        first_seconds=median(first for first, _ in pairs),
        second_seconds=median(second for _, second in pairs),
    )
