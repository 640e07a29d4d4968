"""The fastest plan on this machine, and whether what was made is faster than float at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.api.search import insertions_by_site, replace_sites
from graphquant.utils.progress import stage_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds
    from graphquant.ir import Model, TensorRef
    from graphquant.optimize import LatencyProfile, TimeRatio
    from graphquant.quantize import Plan
    from graphquant.quantize.rewrite import InsertedPair
    from graphquant.utils.progress import Progress

    FloatSites = tuple[int, ...]
    MakeModel = Callable[[Plan], tuple[Model, Sequence[InsertedPair]]]
    OpId = tuple[str, str]


LATENCY_RULE = "latency"
"""The rule that sites are left by."""

TIMING_SECONDS = 0.6
"""How long two plans are timed beside each other."""

CONFIRMATION_PAIRS = 3
"""In how many pairs of new sessions the fastest plan is held against that of the rules."""

OUTCOME_PAIRS = 5
"""How often the outcome is timed beside float, in new sessions: where these lie in memory makes some percent."""

MAX_TIMED_SAMPLES = 8
"""Samples that models with branches, loops or functions are run on."""

MAX_RELATIVE_TIME = 0.95
"""What the outcome takes of float's time at most, in the middle of these: as much comes and goes with what
else is in memory, and for less nobody gives accuracy away."""

FLOAT_IS_FASTER = "on this machine float is faster"
GAIN_TOO_SMALL = "on this machine it would hardly be faster, and a gain below 5% comes and goes"
GAIN_UNCERTAIN = "on this machine it would not surely be faster"

RUNTIMES = {"onnx": "onnxruntime", "tensorflow": "TensorFlow"}
TFLITE_RUNTIME = "TFLite"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult:
    """What was found about time; no two runs find the same figures.

    Attributes:
        runtime: What ran the models, on one thread.
        samples: On how many samples a run is.
        plan: The plan, in which sites that are left float are skips with their reason.
        rules_ratio: What the rules make, beside float.
        outcome_ratio: What was made in the end, beside float; that of `rules_ratio` or of the plan where nothing was faster.
        float_tensors: What is left float.
        plans_timed: How many plans were timed.
        interrupted: Whether that was stopped before its end.
        float_costs: Seconds that each op takes more in float than on integers.
        float_reason: Why nothing is quantized, a sentence's part; "" if something is.
    """

    runtime: str
    samples: int
    plan: Plan
    rules_ratio: TimeRatio | None
    outcome_ratio: TimeRatio | None = None
    float_tensors: tuple[TensorRef, ...] = ()
    plans_timed: int = 0
    interrupted: bool = False
    float_costs: Mapping[OpId, float]
    float_reason: str = ""

    @property
    def all_float(self) -> bool:
        """Whether nothing is quantized, since float is faster."""
        return not self.plan.sites


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTimer:
    """How models are timed.

    Attributes:
        source: The float model.
        feeds: Samples, on all of which a run is.
        as_tflite: Whether as TFLite files, which are run on zeros.
    """

    source: Model
    feeds: Sequence[Feeds]
    as_tflite: bool

    @property
    def runtime(self) -> str:
        """What runs them."""
        return TFLITE_RUNTIME if self.as_tflite else RUNTIMES[self.source.format]

    @property
    def samples(self) -> int:
        """On how many samples a run is."""
        return 1 if self.as_tflite else len(self.feeds)

    def make_run(self, model: Model) -> Callable[[], object]:
        """What runs `model` once."""
        if self.as_tflite:
            from graphquant.formats.tensorflow import prepare_timed_tflite_run

            return prepare_timed_tflite_run(model)
        return formats.format_module(model.format).prepare_timed_run(model, self.feeds)

    @classmethod
    def for_data(cls, source: Model, batches: Dataset, *, as_tflite: bool) -> LatencyTimer:
        """On one sample, or on some spread over the data where samples may take other ways through the model.

        Raises:
            DataError: A sample is not what it should be.
        """
        count = min(batches.count, MAX_TIMED_SAMPLES if len(source.reachable_graphs()) > 1 else 1)
        indices = [index * batches.count // count for index in range(count)]
        return cls(
            source=source,
            feeds=[next(batches.feeds_between(index, index + 1)) for index in indices],
            as_tflite=as_tflite,
        )

    def median_ratio(self, model: Model, baseline: Model, pairs: int) -> TimeRatio:
        """How long `model` takes as a share of `baseline`, in the middle of some pairs of new sessions."""
        from graphquant.optimize import measure_time_ratio

        ratios = [
            measure_time_ratio(self.make_run(model), self.make_run(baseline), seconds=TIMING_SECONDS)
            for _ in range(pairs)
        ]
        return sorted(ratios, key=lambda timing: timing.median)[pairs // 2]

    def find_fastest_plan(
        self, prepared: Model, plan: Plan, make_model: MakeModel, progress: Progress | None
    ) -> LatencyResult:
        """Leaves float what makes the model faster.

        Args:
            prepared: The float model as the plan names it.
            plan: What the rules make.
            make_model: Makes the model of a plan, with what was inserted.
            progress: Is told how far the work is.

        Raises:
            ModelError: A model cannot be run.
        """
        from graphquant.optimize import make_latency_groups, measure_time_ratio, minimize_latency

        uncorrected_plan = replace(plan, algorithms=())  # which change numbers, not how long they take
        build = lru_cache(2)(lambda float_sites: make_model(_with_float_sites(uncorrected_plan, float_sites, "")))
        make_run = lru_cache(2)(lambda float_sites: self.make_run(build(float_sites)[0]))
        if not build(())[1]:
            return LatencyResult(
                runtime=self.runtime, samples=self.samples, plan=plan, rules_ratio=None, float_costs={}
            )
        rules_ratio = measure_time_ratio(make_run(()), self.make_run(self.source), seconds=TIMING_SECONDS)
        profiles = None if self.as_tflite else _Profiles(prepared, plan, build, self.feeds)
        if profiles is None or not profiles.available:
            return LatencyResult(
                runtime=self.runtime,
                samples=self.samples,
                plan=plan,
                rules_ratio=rules_ratio,
                plans_timed=1,
                float_costs={},
            )
        trace = minimize_latency(
            make_latency_groups(prepared, plan, profiles.quantized_sites),
            profiles.for_float_sites,
            lambda candidate, baseline: measure_time_ratio(
                make_run(candidate), make_run(baseline), seconds=TIMING_SECONDS
            ),
            progress=stage_progress(progress, "timing"),
        )
        float_sites = trace.float_sites
        if float_sites and self.median_ratio(build(float_sites)[0], build(())[0], CONFIRMATION_PAIRS).median >= 1:
            float_sites = ()  # where the memory of those sessions lies was what was faster
        return LatencyResult(
            runtime=self.runtime,
            samples=self.samples,
            plan=_with_float_sites(plan, float_sites, f"it was faster in float, in {self.runtime} on this machine"),
            rules_ratio=rules_ratio,
            float_tensors=tuple(plan.sites[index].tensor for index in float_sites),
            plans_timed=trace.plans + 1,
            interrupted=trace.interrupted,
            float_costs=profiles.float_costs(),
        )

    def confirm_gain(self, latency: LatencyResult, plan: Plan, quantized_model: Model) -> LatencyResult:
        """`plan` if the model that was `quantized_model` of it is faster than the source, else one that leaves all float.

        Raises:
            ModelError: A model cannot be run.
        """
        if latency.rules_ratio is None:
            return replace(latency, plan=plan)
        if not plan.sites:
            reason = "what is fastest does not meet the bounds" if latency.plan.sites else FLOAT_IS_FASTER
            return replace(latency, plan=plan, outcome_ratio=latency.rules_ratio, float_reason=reason)
        outcome_ratio = self.median_ratio(quantized_model, self.source, OUTCOME_PAIRS)
        latency = replace(latency, plan=plan, outcome_ratio=outcome_ratio, plans_timed=latency.plans_timed + 1)
        return (
            latency
            if outcome_ratio.median <= MAX_RELATIVE_TIME and outcome_ratio.high < 1
            else _keep_all_float(latency, outcome_ratio)
        )


def _keep_all_float(latency: LatencyResult, outcome_ratio: TimeRatio) -> LatencyResult:
    """The same with nothing quantized."""
    reason = (
        FLOAT_IS_FASTER
        if outcome_ratio.median >= 1
        else GAIN_TOO_SMALL
        if outcome_ratio.median > MAX_RELATIVE_TIME
        else GAIN_UNCERTAIN
    )
    message = (
        f"{reason}; in {latency.runtime} a run takes {outcome_ratio.median:.2f} times as long if this is quantized"
    )
    remaining_tensors = tuple(site.tensor for site in latency.plan.sites)
    plan = _with_float_sites(latency.plan, range(len(remaining_tensors)), message)
    return replace(latency, plan=plan, float_tensors=(*latency.float_tensors, *remaining_tensors), float_reason=reason)


class _Profiles:
    """Where the time of plans goes, by the names of the prepared model."""

    def __init__(
        self,
        prepared: Model,
        plan: Plan,
        build: Callable[[FloatSites], tuple[Model, Sequence[InsertedPair]]],
        feeds: Sequence[Feeds],
    ) -> None:
        from graphquant.optimize import FusionMap

        self._prepared, self._plan, self._build, self._feeds = prepared, plan, build, feeds
        self._fused = FusionMap(prepared)
        self._module = formats.format_module(prepared.format)
        self._profile_cache: dict[FloatSites, LatencyProfile] = {}
        self._float_profile = self._module.profile_ops(prepared, feeds)
        self.quantized_sites = sorted(insertions_by_site(plan, build(())[1]))

    @property
    def available(self) -> bool:
        """Whether the runtime tells what ops take."""
        return self._float_profile is not None

    def for_float_sites(self, float_sites: FloatSites) -> LatencyProfile:
        """That of the plan that leaves these sites float."""
        if float_sites not in self._profile_cache:
            self._profile_cache[float_sites] = self._profile(float_sites)
        return self._profile_cache[float_sites]

    def float_costs(self) -> dict[OpId, float]:
        """Seconds that each op that multiplies takes more in float."""
        from graphquant.optimize import mac_costs

        quantized_profile, float_profile = self.for_float_sites(()), self.for_float_sites(tuple(self.quantized_sites))
        saved = {
            op: float_profile.op_seconds.get(op, 0.0) - quantized_profile.op_seconds.get(op, 0.0)
            for op in mac_costs(self._prepared, {})
        }
        min_cost = 1e-3 * max([*saved.values(), 1e-6])
        return {op: max(value, min_cost) for op, value in saved.items()}

    def _profile(self, float_sites: FloatSites) -> LatencyProfile:
        from graphquant.optimize import LatencyProfile

        model, insertions = (
            (self._prepared, ()) if {*float_sites} >= {*self.quantized_sites} else self._build(float_sites)
        )
        measured_times = (
            self._float_profile if model is self._prepared else self._module.profile_ops(model, self._feeds)
        )
        if measured_times is None:
            return LatencyProfile(op_seconds={}, site_seconds={})
        site_by_op = self._site_by_op(model, insertions)
        ops: dict[OpId, float] = {}
        sites: dict[int, float] = {}
        for op_id, seconds in measured_times.seconds.items():
            if self._contains_op(op_id):
                fused_key = self._fused.fusion_target(op_id)
                ops[fused_key] = ops.get(fused_key, 0.0) + seconds
        for op_id, seconds in measured_times.conversion_seconds.items():
            if op_id in site_by_op:
                sites[site_by_op[op_id]] = sites.get(site_by_op[op_id], 0.0) + seconds
        return LatencyProfile(op_seconds=ops, site_seconds=sites)

    def _contains_op(self, op_id: OpId) -> bool:
        return op_id[0] in self._prepared.graphs and op_id[1] in self._prepared.graphs[op_id[0]]

    def _site_by_op(self, model: Model, insertions: Sequence[InsertedPair]) -> dict[OpId, int]:
        """The ops that each site's pair consists of, and the one whose result it quantizes, with the site."""
        site_by_op: dict[OpId, int] = {}
        for index, insertion in insertions_by_site(self._plan, insertions).items():
            if not insertion.site.parameter:
                site_by_op.setdefault((insertion.site.tensor.graph, insertion.site.tensor.op), index)
            for output in insertion.outputs:
                site_by_op[output.graph, output.op] = index
                input_tensors = model.graphs[output.graph].slots(output.op)
                if (
                    input_tensors
                    and input_tensors[0] is not None
                    and not self._contains_op((input_tensors[0].graph, input_tensors[0].op))
                ):
                    site_by_op[input_tensors[0].graph, input_tensors[0].op] = index
        return site_by_op


def _with_float_sites(plan: Plan, float_sites: Sequence[int], reason: str) -> Plan:
    """The plan with the sites `float_sites` as skips."""
    return replace_sites(plan, dict.fromkeys(float_sites), LATENCY_RULE, lambda _index: reason)
