"""Find the fastest plan by timing: sites that are slower on integers stay float (see docs/decisions)."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from graphquant import formats
from graphquant.ir import Model, OpKey, Parameters, Use, follow_to_end
from graphquant.ir.types import FORMAT_TRAITS
from graphquant.optimize.candidates import (
    FUSED_OUTPUT_KINDS,
    MAX_HOPS,
    PASSTHROUGH_KINDS,
    ScaleGroup,
    find_reading_ops,
    group_shared_scales,
    insertions_by_site,
    mac_costs,
)

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds
    from graphquant.optimize.algorithms import BuiltModel
    from graphquant.quantize import Plan
    from graphquant.quantize.rewrite import InsertedPair

FloatSites = tuple[int, ...]
TimedRun = Callable[[], object]
Clock = Callable[[], float]

MAX_TIMED_PLANS = 16  # maximum number of timed plans
MAX_TIME_RATIO = 0.995  # time of a plan relative to the previous one, below which it is accepted
MIN_TIME_SHARE = 0.002  # smallest share of a run's time that is worth a trial
UNTIMED_KINDS = frozenset({"input", "constant", "variable", "read_variable"})


class LatencyProfile(NamedTuple):
    """Seconds of one run by op, including the ops fused into it, and of the conversions of each site, by its index."""

    op_seconds: Mapping[OpKey, float]
    site_seconds: Mapping[int, float]

    @property
    def total_seconds(self) -> float:
        """Total in seconds."""
        return sum(self.op_seconds.values()) + sum(self.site_seconds.values())


class FloatSitesResult(NamedTuple):
    """Indices of the sites that stay float, number of timed plans, and True if Ctrl-C ended the search early."""

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

    `compare_plans` times the plan with the first sites in float relative to the plan with the second.
    """
    return _LatencySearch(groups, profile_plan, compare_plans, progress).run()


@dataclass(slots=True)
class _LatencySearch:
    """State of the latency search: the groups that are float in the best plan, and the trials without gain."""

    groups: Sequence[ScaleGroup]
    profile_plan: Callable[[FloatSites], LatencyProfile]
    compare_plans: Callable[[FloatSites, FloatSites], TimeRatio]
    progress: Callable[[int, int], None] | None
    best: frozenset[int] = frozenset()
    rejected: set[frozenset[int]] = field(default_factory=set)
    plans: int = 0

    def run(self) -> FloatSitesResult:
        """Accept trials until none promises a gain."""
        interrupted = False
        try:
            float_profile = self.profile_plan(self._float_sites(frozenset(range(len(self.groups)))))
            while self.plans < MAX_TIMED_PLANS and self._try_step(float_profile):
                pass
        except KeyboardInterrupt:
            interrupted = True
        return FloatSitesResult(self._float_sites(self.best), self.plans, interrupted)

    def _try_step(self, float_profile: LatencyProfile) -> bool:
        """Try the groups that the profile of the best plan suggests, then halves of them. Return True if one helped."""
        best_profile = self.profile_plan(self._float_sites(self.best))
        gains = {
            op: best_profile.op_seconds.get(op, 0.0) - float_profile.op_seconds.get(op, 0.0)
            for op in {*best_profile.op_seconds, *float_profile.op_seconds}
        }
        chosen = self._promising_groups(gains, best_profile.site_seconds, MIN_TIME_SHARE * best_profile.total_seconds)
        while chosen and self.plans < MAX_TIMED_PLANS:
            candidate = self._close_over_ops({*self.best, *chosen})
            if candidate != self.best and candidate not in self.rejected:
                ratio = self.compare_plans(self._float_sites(candidate), self._float_sites(self.best))
                self.plans += 1
                if self.progress is not None:
                    self.progress(self.plans, MAX_TIMED_PLANS)
                if ratio.median < MAX_TIME_RATIO and ratio.high < 1:
                    self.best = candidate
                    return True
                self.rejected.add(candidate)
            chosen = chosen[: len(chosen) // 2]
        return False

    def _promising_groups(
        self, gains: Mapping[OpKey, float], site_seconds: Mapping[int, float], min_gain: float
    ) -> list[int]:
        """Groups whose float form is faster, with everything that becomes float with them, by gain."""
        float_ops = {op for index in self.best for op in self.groups[index].ops}

        def group_gain(index: int) -> float:
            group = self.groups[index]
            freed = sum(gains.get(op, 0.0) for op in sorted(group.ops - float_ops))
            return freed + sum(site_seconds.get(site, 0.0) for site in group.sites)

        remaining = [index for index, group in enumerate(self.groups) if group.ops and index not in self.best]
        chosen = []
        for index in sorted(remaining, key=lambda group_index: (-group_gain(group_index), group_index)):
            if group_gain(index) > min_gain:  # what was chosen before may have made it worth more or less
                chosen.append(index)
                float_ops |= self.groups[index].ops
        return chosen

    def _close_over_ops(self, chosen: Collection[int]) -> frozenset[int]:
        """Add the groups that no quantized op uses any more."""
        float_ops = {op for index in chosen for op in self.groups[index].ops}
        freed = {index for index, group in enumerate(self.groups) if group.ops and group.ops <= float_ops}
        computing = {index for index, group in enumerate(self.groups) if group.ops}
        return frozenset(range(len(self.groups))) if computing <= freed else frozenset({*chosen, *freed})

    def _float_sites(self, chosen: Collection[int]) -> FloatSites:
        return tuple(sorted(site for index in chosen for site in self.groups[index].sites))


def make_latency_groups(model: Model, plan: Plan, site_indices: Collection[int]) -> list[ScaleGroup]:
    """Group the sites `site_indices` of a plan for the prepared model, with the ops that read or produce them."""
    fusion = FusionMap(model)
    readers = find_reading_ops(model, plan, site_indices, lambda op: op.kind not in PASSTHROUGH_KINDS)
    for index in site_indices:
        tensor = plan.sites[index].tensor
        if not plan.sites[index].parameter:
            readers[index].add((tensor.graph, tensor.op))
    targets = {index: {fusion.fusion_target(op_key) for op_key in op_keys} for index, op_keys in readers.items()}
    graphs = model.graphs.values()
    timed_ops = {(graph.name, op.name) for graph in graphs for op in graph.ops() if op.kind not in UNTIMED_KINDS}
    return [
        ScaleGroup(
            sites=tuple(sites),
            ops=frozenset(op_key for index in sites for op_key in targets[index] if op_key in timed_ops),
        )
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
        graph = self._model.graphs[op_key[0]]
        op, source = graph.op(op_key[1]), None
        if op.kind in FUSED_OUTPUT_KINDS:
            source = graph.source_of(Use(*op_key, 0))
        elif op.kind in {"add", "mul"}:
            operands = [tensor for tensor in graph.slots(op.name) if tensor is not None]
            activations = [tensor for tensor in operands if not self._parameters.is_parameter(tensor)]
            source = activations[0] if len(activations) == 1 and len(operands) > 1 else None
        return None if source is None else (source.graph, source.op)


class PlanProfiler:
    """Profiles of plans by op and site of the prepared model."""

    def __init__(
        self, prepared: Model, plan: Plan, build: Callable[[FloatSites], BuiltModel], feeds: Sequence[Feeds]
    ) -> None:
        """Profile the float model on `feeds`. `build` makes the model with some sites in float."""
        self._prepared, self._plan, self._build, self._feeds = prepared, plan, build, feeds
        self._fused = FusionMap(prepared)
        self._prepared_ops = {(graph.name, op.name) for graph in prepared.graphs.values() for op in graph.ops()}
        self._module = formats.format_module(prepared.format)
        self._profile_cache: dict[FloatSites, LatencyProfile] = {}
        self._float_profile = self._module.profile_ops(prepared, feeds)
        # Indices of the sites that are quantized in the plan of the rules.
        self.quantized_sites = sorted(insertions_by_site(plan, build(()).insertions))

    @property
    def available(self) -> bool:
        """True if the runtime reports the time of ops."""
        return self._float_profile is not None

    def profile(self, float_sites: FloatSites) -> LatencyProfile:
        """Return the profile of the plan with these sites in float, measured once."""
        if float_sites not in self._profile_cache:
            times, site_by_op = self._float_profile, dict[tuple[str, str], int]()
            if not {*float_sites} >= {*self.quantized_sites}:
                built = self._build(float_sites)
                site_by_op = self._site_by_op(built.model, built.insertions)
                times = self._module.profile_ops(built.model, self._feeds)
            op_seconds: defaultdict[OpKey, float] = defaultdict(float)
            site_seconds: defaultdict[int, float] = defaultdict(float)
            for op_key, seconds in times.seconds.items() if times is not None else ():
                if op_key in self._prepared_ops:
                    op_seconds[self._fused.fusion_target(op_key)] += seconds
            for op_key, seconds in times.conversion_seconds.items() if times is not None else ():
                if op_key in site_by_op:
                    site_seconds[site_by_op[op_key]] += seconds
            self._profile_cache[float_sites] = LatencyProfile(op_seconds=op_seconds, site_seconds=site_seconds)
        return self._profile_cache[float_sites]

    def float_costs(self) -> dict[OpKey, float]:
        """Return the additional seconds of each weighted op in float, compared with integers."""
        quantized, in_float = (self.profile(sites).op_seconds for sites in ((), tuple(self.quantized_sites)))
        saved = {op: in_float.get(op, 0.0) - quantized.get(op, 0.0) for op in mac_costs(self._prepared, {})}
        # An op that is faster in float still costs a little, so that the bounds are met with few float ops.
        min_cost = 1e-3 * max([*saved.values(), 1e-6])
        return {op: max(value, min_cost) for op, value in saved.items()}

    def _site_by_op(self, model: Model, insertions: Sequence[InsertedPair]) -> dict[OpKey, int]:
        """Map the ops of each Q/DQ pair, and the op whose output it quantizes, to the index of the site."""
        site_by_op: dict[OpKey, int] = {}
        for index, pair in insertions_by_site(self._plan, insertions).items():
            if not pair.site.parameter:
                site_by_op.setdefault((pair.site.tensor.graph, pair.site.tensor.op), index)
            for output in pair.outputs:
                site_by_op[output.graph, output.op] = index
                source = next(iter(model.graphs[output.graph].slots(output.op)), None)
                if source is not None and (source.graph, source.op) not in self._prepared_ops:
                    site_by_op[source.graph, source.op] = index
        return site_by_op


# Two models are timed in alternation, because the load of the machine then affects both.

SLICE_SECONDS = 0.005  # seconds of each slice, at least one run; the shortest block of the slice counts
BLOCK_SECONDS = 0.0003  # seconds of a block, at least one run. Reading the clock takes a fraction of a microsecond.
MIN_ROUNDS = 9  # minimum number of rounds
MAX_RATIO_WIDTH = 0.02  # width of the confidence interval at which timing ends
CONFIDENCE_DEVIATIONS = 1.96  # standard deviations of the number of rounds below the true median, for 95% confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRatio:
    """Median ratio of two run times over all rounds, with a 95% confidence interval."""

    median: float  # the ratio
    low: float  # lower end of the interval
    high: float  # upper end of the interval
    first_seconds: float  # median seconds of one run of the first model
    second_seconds: float  # median seconds of one run of the second model


def measure_time_ratio(
    first_run: TimedRun,
    second_run: TimedRun,
    *,
    seconds: float,
    clock: Clock | None = None,
    min_rounds: int = MIN_ROUNDS,
    slice_seconds: float = SLICE_SECONDS,
) -> TimeRatio:
    """Time two functions, which have run before, in alternating slices of a few runs; the order alternates too.

    The clock counts processor time, so other programs do not lengthen the runs of one thread. Other load of the machine
    in a round affects both functions, so ratios are more reliable than times. The limit of `seconds` applies after
    `min_rounds`, unless the ratio is known precisely before.
    """
    clock, runs, first_times = clock or choose_clock(), [], []
    end = clock() + seconds
    for run in (first_run, second_run):
        start = clock()
        run()
        first_times.append(clock() - start)
        runs.append((run, math.ceil(BLOCK_SECONDS / max(first_times[-1], BLOCK_SECONDS / 1000))))
    # Runs as long as a slice are the first round.
    pairs = [(first_times[0], first_times[1])] if min(first_times) >= slice_seconds else []
    while True:
        is_over = clock() >= end
        if len(pairs) >= (min_rounds if is_over else MIN_ROUNDS):
            result = _median_with_bounds(pairs)
            if is_over or result.high - result.low < MAX_RATIO_WIDTH:
                return result
        order = (1, 0) if len(pairs) % 2 else (0, 1)
        slices = {index: _shortest_block_seconds(*runs[index], clock, slice_seconds) for index in order}
        pairs.append((slices[0], slices[1]))


@cache
def choose_clock(clock: Clock = time.process_time) -> Clock:
    """Return `clock`, or the time of day if its steps are too long for blocks, as those of Windows are with 1/64 s."""
    steps = []
    for _ in range(3):
        start = now = clock()
        while now == start:
            now = clock()
        steps.append(now - start)
    return clock if min(steps) < BLOCK_SECONDS / 10 else time.perf_counter


def _shortest_block_seconds(run: TimedRun, count: int, clock: Clock, slice_seconds: float) -> float:
    """Seconds of a run in the shortest block of a slice."""
    shortest, end = math.inf, clock() + slice_seconds
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


TIMING_SECONDS = 0.6  # seconds of one comparison of two models
MAX_TIMED_SAMPLES = 8
"""Number of samples per run for models with branches, loops or functions, whose time depends on the sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTimer:
    """Timing of the models of one search on some samples. TFLite files run on zeros."""

    source: Model
    feeds: Sequence[Feeds]
    as_tflite: bool

    @property
    def runtime(self) -> str:
        """Name of the runtime, which uses one thread."""
        return FORMAT_TRAITS["tflite"].runtime if self.as_tflite else self.source.traits.runtime

    @property
    def samples(self) -> int:
        """Number of samples per run."""
        return 1 if self.as_tflite else len(self.feeds)

    @classmethod
    def for_data(cls, source: Model, batches: Dataset, *, as_tflite: bool) -> LatencyTimer:
        """Make a timer with one sample, or with several from all over the data if the time depends on the sample.

        Raises a DataError if a sample does not fit the model.
        """
        count = min(batches.count, MAX_TIMED_SAMPLES if len(source.reachable_graphs()) > 1 else 1)
        indices = [index * batches.count // count for index in range(count)]
        feeds = [next(batches.feeds_between(index, index + 1)) for index in indices]
        return cls(source=source, feeds=feeds, as_tflite=as_tflite)

    def make_run(self, model: Model) -> TimedRun:
        """Return a function that runs `model` once in a new session."""
        if self.as_tflite:
            from graphquant.formats.tensorflow import prepare_timed_tflite_run

            return prepare_timed_tflite_run(model)
        return formats.format_module(model.format).prepare_timed_run(model, self.feeds)

    def time_ratio(self, run: TimedRun, baseline: TimedRun) -> TimeRatio:
        """Return the time of `run` relative to `baseline`."""
        return measure_time_ratio(run, baseline, seconds=TIMING_SECONDS)

    def median_ratio(self, model: Model, baseline: Model, pairs: int) -> TimeRatio:
        """Return the median ratio of several pairs of new sessions. Memory layout changes times by some percent."""
        ratios = [self.time_ratio(self.make_run(model), self.make_run(baseline)) for _ in range(pairs)]
        return sorted(ratios, key=lambda ratio: ratio.median)[pairs // 2]


REPORT_SECONDS, REPORT_SLICE_SECONDS = 0.01, 0.002  # processor seconds of the report's comparison, and of its slices
UNCLEAR_RATIOS, REPORT_ROUNDS = (0.95, 1.25), 3  # when new sessions are timed too, and their minimum of rounds
MAX_REPORT_DIFFERENCE = 0.03  # difference of two ratios up to which no third pair of sessions is timed
MAX_TIMED_BYTES = 1 << 28  # bytes of constants up to which `insert` opens the float model again to time it


def time_beside_float(float_model: Model, quantized: Model, batches: Dataset) -> TimeRatio:
    """Return the time of a quantized model relative to a float one, as `time_in_turn` measures it.

    Raises a ModelError if a model cannot be run, and a DataError if a sample does not fit the model.
    """
    timer = LatencyTimer.for_data(float_model, batches, as_tflite=False)
    return time_in_turn(partial(timer.make_run, quantized), partial(timer.make_run, float_model))


def time_in_turn(start: Callable[[], TimedRun], start_baseline: Callable[[], TimedRun]) -> TimeRatio:
    """Return the ratio of two run times, from runs in turn within about a second. The functions open new sessions."""
    measure = partial(measure_time_ratio, seconds=REPORT_SECONDS, slice_seconds=REPORT_SLICE_SECONDS)
    first = measure(start(), start_baseline(), min_rounds=1)
    if not UNCLEAR_RATIOS[0] <= first.median < UNCLEAR_RATIOS[1]:
        return first
    second = measure(start(), start_baseline(), min_rounds=REPORT_ROUNDS)
    if abs(second.median - first.median) <= MAX_REPORT_DIFFERENCE:
        return second
    third = measure(start(), start_baseline(), min_rounds=REPORT_ROUNDS)
    return sorted([first, second, third], key=lambda ratio: ratio.median)[1]
