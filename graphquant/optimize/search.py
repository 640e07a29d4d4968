"""The search for the plan of the lowest cost: float MACs, weight bytes, or latency on this machine.

One search serves all objectives. It has up to three stages, each of which starts with the plan of the previous one:

1. Weight bit widths, if there is a size budget, or if size is minimized within bounds (`optimize.size_budget`).
2. Sites that are faster in float, if latency is minimized (`optimize.latency`).
3. Candidates of all other sites, if there are bounds that the plan does not meet (`optimize.selection`).

Latency needs no bound. Without any gain in latency, the search returns a plan in which all sites stay float.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, NamedTuple

from graphquant.analysis.site_errors import match_sites
from graphquant.analysis.validation import Bounds, FoldValidator, Validation, measure_tensor_sizes
from graphquant.backends import judge_ops
from graphquant.errors import ModelError, UsageError
from graphquant.optimize.algorithms import rebuild_model
from graphquant.optimize.candidates import (
    FLOAT_CANDIDATE,
    HIGH_PRECISION_CANDIDATES,
    RULE_CANDIDATE,
    BuildModel,
    CandidateErrors,
    GroupTrials,
    ScaleGroup,
    SearchFold,
    byte_costs,
    insertions_by_site,
    mac_costs,
    make_candidate_plans,
    make_scale_groups,
    quantizing_op,
    quantizing_ops_by_site,
    replace_sites,
)
from graphquant.optimize.latency import LatencyTimer, PlanProfiler, TimeRatio, make_latency_groups, minimize_latency
from graphquant.optimize.search_budget import SearchBudget, SearchLimitError, StopReason
from graphquant.optimize.selection import (
    PlanQuality,
    Selection,
    choose_selection,
    high_precision_ops,
    search_cheapest_plan,
    selection_cost,
    total_error,
)
from graphquant.optimize.sensitivity import Sensitivity, SiteBypass, error_to_db
from graphquant.optimize.size_budget import (
    SizedPlan,
    WeightBitsChooser,
    families_with_float_weights,
    model_constant_bytes,
    parse_size_budget,
)
from graphquant.optimize.weight_rounding import ADAROUND, GPTQ
from graphquant.quantize.rewrite import needs_barriers
from graphquant.utils import Progress, stage_progress

if TYPE_CHECKING:
    from graphquant.analysis.validation import BoundStatus
    from graphquant.calibration.data import Dataset
    from graphquant.calibration.holdout import CalibrationData, HoldOut
    from graphquant.calibration.stats import Stats
    from graphquant.ir import Model, OpKey, TensorRef, Use
    from graphquant.optimize.algorithm import PreCalibrationState
    from graphquant.optimize.algorithms import BuiltModel
    from graphquant.optimize.repair import RepairTrace
    from graphquant.quantize import Plan

SEARCH_RULE, LATENCY_RULE = "search", "latency"
"""Rules of the sites and skips that the search changes for bounds and for latency."""

MAX_BISECTIONS = 7  # maximum number of plans to validate for the smallest size within bounds
CONFIRMATION_PAIRS = 3  # pairs of new sessions in which the fastest plan is compared with the plan of the rules
OUTCOME_PAIRS = 5  # pairs of new sessions in which the quantized model is compared with the float model
MAX_RELATIVE_TIME = 0.95
"""Largest time of the quantized model relative to float. The memory layout changes times by as much as the rest, and a
smaller gain is not worth any accuracy."""

FLOAT_IS_FASTER = "on this machine float is faster"
GAIN_TOO_SMALL = "on this machine the gain would be below 5%, which is within the variation between runs"
GAIN_UNCERTAIN = "on this machine the gain is uncertain"
BOUNDS_NOT_MET = "the fastest plan does not meet the bounds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Cost to minimize, and limits that the plan must keep."""

    # "macs" for float multiply-adds, "size" for bytes of weights, or "latency" on this machine.
    minimize: Literal["macs", "size", "latency"] = "macs"
    bounds: Bounds = field(default_factory=Bounds)  # bounds on the outputs
    # Maximum bytes of all constants, as "2MB", or their share of the float model's, as "25%"; None for no limit.
    size_budget: str | None = None
    as_tflite: bool = False  # True to time models as TFLite files

    @property
    def uses_search_set(self) -> bool:
        """True if plans are measured on samples of their own."""
        return bool(self.bounds) or self.size_budget is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTrace:
    """Result of a search. Fields of stages that did not run have their defaults."""

    minimize: str  # the minimized cost; see `Objective`
    plan: Plan  # The chosen plan. Changed sites and skips state the reason.
    # Tensors that stay float, with the SQNR in dB that each alone would cause if it was measured.
    float_tensors: Mapping[TensorRef, float | None] = field(default_factory=dict)
    # Tensors that differ from the rules, with their candidate.
    changed_tensors: Mapping[TensorRef, str] = field(default_factory=dict)
    interrupted: bool = False  # True if Ctrl-C ended the search early
    stop_reason: StopReason | None = None  # limit that ended the search for bounds, or None
    plans: int = 0  # number of validated plans
    cost: float = 0.0  # cost of the float ops as a share of all ops in float
    runs_per_site: float = 0.0  # number of runs per site, for sensitivities and for validations
    search_validation: Validation | None = None  # validation of the plan on the search samples; None without bounds
    # Error that each site adds at the outputs, as a share of their power, by index in `plan`; omitted if it is unknown.
    site_errors: Mapping[int, float] = field(default_factory=dict)
    # The same by the op that quantizes the tensor, or None. If several ops quantize it, each has that of all.
    sensitivity: Sensitivity | None = None
    size: int | None = None  # bytes of all constants; None if no bit widths were chosen
    max_size: int | None = None  # maximum of `size`; None if it was minimized
    float_size: int = 0  # bytes of the constants of the float model
    sized_weights: frozenset[Use] = frozenset()  # first use of each weight whose bit width was chosen
    estimated_weights: tuple[TensorRef, ...] = ()  # weights whose error was estimated from the bit width alone
    runtime: str = ""  # runtime of the timed models; "" if latency was not measured
    timed_samples: int = 0  # number of samples per timed run
    timed_plans: int = 0  # number of timed plans
    rules_ratio: TimeRatio | None = None  # time of the plan of the rules relative to float
    outcome_ratio: TimeRatio | None = None  # time of the quantized model relative to float
    float_reason: str = ""  # reason why nothing is quantized, or ""
    # If the chosen plan quantizes nothing, the bounds that the best other plan misses.
    missed_bounds: tuple[str, ...] = ()
    repair: RepairTrace | None = None  # changes for the default target; None if the default plan met it

    @property
    def failures(self) -> tuple[str, ...]:
        """Messages about bounds that the plan misses on the search samples."""
        return () if self.search_validation is None else self.search_validation.failures

    @property
    def caveats(self) -> tuple[str, ...]:
        """Messages about bounds that the search samples do not confirm."""
        return () if self.search_validation is None else self.search_validation.caveats

    @property
    def status(self) -> BoundStatus | None:
        """Status of the bounds on the search samples; None without bounds."""
        return None if self.search_validation is None else self.search_validation.status

    @property
    def bounds_met(self) -> bool:
        """True if the search samples meet all bounds with confidence, or there are none."""
        return self.status in {None, "met"}

    @property
    def all_float(self) -> bool:
        """True if nothing is quantized because float is as fast."""
        return bool(self.runtime) and not self.plan.sites

    def with_candidates(self, candidates: Mapping[TensorRef, str]) -> SearchTrace:
        """Return the trace with the candidates of further tensors."""
        in_float = {tensor: None for tensor, name in candidates.items() if name == FLOAT_CANDIDATE}
        changed = {tensor: name for tensor, name in candidates.items() if name != FLOAT_CANDIDATE}
        return replace(
            self, float_tensors={**self.float_tensors, **in_float}, changed_tensors={**self.changed_tensors, **changed}
        )


def search_plan(
    source: Model,
    rules_state: PreCalibrationState,
    build: BuildModel,
    stats: Stats | None,
    objective: Objective,
    data: CalibrationData,
    folds: Sequence[SearchFold] = (),
    progress: Progress | None = None,
    budget: SearchBudget | None = None,
) -> tuple[BuiltModel, SearchTrace | None]:
    """Search the plan of the lowest cost that keeps the limits of an objective.

    `rules_state` has the prepared model and the plan of the rules, and `build` builds the quantized model of a plan
    with the ranges `stats`. Plans are measured on `folds`, by default on one that consists of the search samples.
    `budget` limits the search for bounds; None is no limit.

    Returns:
        The quantized model of the chosen plan, and the trace of the search; None if there was nothing to search.

    Raises:
        DataError: A sample does not fit the model.
        ModelError: A model cannot be run.
        UsageError: A bound applies to no output, or the size budget is invalid or cannot be met.
    """
    search_set = data.search_set
    if search_set is not None and not folds:
        folds = (SearchFold(held_out=search_set, build=build, stats=stats),)
    stages = _SearchStages(
        source, rules_state.model, build, stats, objective, search_set, tuple(folds), progress, budget
    )
    unchanged = trace = SearchTrace(minimize=objective.minimize, plan=rules_state.plan)
    trace = stages.choose_weight_bits(trace)
    timer, float_costs, built = None, None, None
    if objective.minimize == "latency":
        timer = LatencyTimer.for_data(source, data.dataset, as_tflite=objective.as_tflite)
        trace, float_costs = stages.choose_fastest_sites(trace, timer)
    if search_set is not None and objective.bounds and trace.plan.sites:
        trace, built = stages.meet_bounds(trace, float_costs)
    built = built or build(trace.plan)
    if timer is not None:
        confirmed = stages.confirm_gain(trace, timer, built.model)
        if confirmed.plan is not trace.plan:
            built = build(confirmed.plan)
        trace = confirmed
    if trace.site_errors:
        trace = replace(trace, sensitivity=_sensitivity_of_ops(trace, built))
    return built, None if trace is unchanged else trace


@dataclass(frozen=True, slots=True)
class _SearchStages:
    """The stages of a search. Each returns the trace with its plan."""

    source: Model
    prepared: Model
    build: BuildModel
    stats: Stats | None
    objective: Objective
    search_set: HoldOut | None
    folds: tuple[SearchFold, ...]
    progress: Progress | None
    budget: SearchBudget | None

    def _validate(self, plan: Plan) -> Validation:
        """Validate a plan, with its algorithms, on the folds."""
        if not self.folds:
            raise ValueError("a validation needs search samples")
        validator = FoldValidator(self.source, [fold.held_out for fold in self.folds], self.objective.bounds)
        return validator.validate([fold.build(plan).model for fold in self.folds])

    def choose_weight_bits(self, trace: SearchTrace) -> SearchTrace:
        """Choose the weight bit widths of least error within the budget, or of least size within the bounds."""
        if (budget := self.objective.size_budget) is None:
            minimizes_size = self.objective.minimize == "size" and self.objective.bounds and self.search_set is not None
            return self._minimize_size(trace) if minimizes_size else trace
        max_size = parse_size_budget(budget, model_constant_bytes(self.source))
        if float_families := families_with_float_weights(trace.plan):
            raise UsageError(
                f"{float_families[0]} keeps float weights in the file, so fewer bits do not make it smaller. Remove"
                " --size-budget, or quantize the model as ONNX."
            )
        chooser = self._weight_chooser(trace.plan)
        sized = chooser.best_plan_within(max_size, f"a budget of {budget}")
        if sized.size > max_size:
            raise UsageError(
                f"The constants take at least {sized.size:,} bytes, and the budget is {max_size:,}. Use"
                f" --size-budget {sized.size} or more, or rules that quantize more weights."
            )
        return self._with_sized_plan(trace, sized, chooser, max_size)

    def _minimize_size(self, trace: SearchTrace) -> SearchTrace:
        """Bisect the size of the smallest plan that meets the bounds. Keep the plan of the rules if none is smaller."""
        plan = trace.plan
        if families_with_float_weights(plan) or not make_candidate_plans(self.prepared, plan, small=True):
            return trace
        rules_model = self.build(plan).model
        if self._validate(plan).failures:
            return trace
        report = stage_progress(self.progress, "searching")
        failing_size, passing_size = -math.inf, model_constant_bytes(rules_model)
        try:
            chooser = self._weight_chooser(plan)
            for bisection in range(MAX_BISECTIONS):
                limit = failing_size if math.isinf(failing_size) else (failing_size + passing_size) / 2
                sized = chooser.best_plan_within(limit, f"{self.objective.bounds}")
                if sized.size >= passing_size:
                    break
                if sized.size <= failing_size:
                    failing_size = limit  # No plan has a size between the two.
                elif not self._validate(sized.plan).failures:
                    trace, passing_size = self._with_sized_plan(trace, sized, chooser, None), sized.size
                else:
                    failing_size = sized.size
                if report is not None:
                    report(bisection + 1, MAX_BISECTIONS)
                if math.isinf(failing_size):
                    break  # The smallest plan of all meets the bounds.
        except KeyboardInterrupt:
            return trace
        return trace

    def _weight_chooser(self, plan: Plan) -> WeightBitsChooser:
        return WeightBitsChooser(self.prepared, plan, self.build, self.search_set, self.progress)

    def _with_sized_plan(
        self, trace: SearchTrace, sized: SizedPlan, chooser: WeightBitsChooser, max_size: int | None
    ) -> SearchTrace:
        # The stage replaces its own earlier result, since no other stage ran before it.
        trace = replace(
            trace,
            plan=sized.plan,
            size=sized.size,
            max_size=max_size,
            float_size=model_constant_bytes(self.source),
            sized_weights=chooser.weights,
            estimated_weights=chooser.estimated,
            float_tensors={},
            changed_tensors={},
        )
        return trace.with_candidates(sized.candidates)

    def choose_fastest_sites(
        self, trace: SearchTrace, timer: LatencyTimer
    ) -> tuple[SearchTrace, Mapping[OpKey, float] | None]:
        """Keep sites in float that are faster so. Return also the additional seconds of each op in float, if known."""
        plan, trace = trace.plan, replace(trace, runtime=timer.runtime, timed_samples=timer.samples)
        untuned_plan = replace(plan, algorithms=())  # Algorithms change numbers, which take as long as before.
        build = lru_cache(2)(lambda sites: self.build(_with_float_sites(untuned_plan, sites, "")))
        make_run = lru_cache(2)(lambda sites: timer.make_run(build(sites).model))
        if not build(()).insertions:
            return trace, None
        trace = replace(trace, rules_ratio=timer.time_ratio(make_run(()), timer.make_run(self.source)), timed_plans=1)
        profiler = None if timer.as_tflite else PlanProfiler(self.prepared, plan, build, timer.feeds)
        if profiler is None or not profiler.available:
            return trace, None
        float_sites, timed_plans, interrupted = minimize_latency(
            make_latency_groups(self.prepared, plan, profiler.quantized_sites),
            profiler.profile,
            lambda candidate, baseline: timer.time_ratio(make_run(candidate), make_run(baseline)),
            progress=stage_progress(self.progress, "timing"),
        )
        if float_sites:
            # In new sessions, because the gain may come from the memory layout of the sessions so far.
            ratio = timer.median_ratio(build(float_sites).model, build(()).model, CONFIRMATION_PAIRS)
            float_sites = () if ratio.median >= 1 else float_sites
        reason = f"it is faster in float, in {timer.runtime} on this machine"
        trace = replace(
            trace,
            plan=_with_float_sites(plan, float_sites, reason),
            timed_plans=timed_plans + 1,
            interrupted=trace.interrupted or interrupted,
        )
        trace = trace.with_candidates(dict.fromkeys((plan.sites[i].tensor for i in float_sites), FLOAT_CANDIDATE))
        return trace, profiler.float_costs() or None

    def confirm_gain(self, trace: SearchTrace, timer: LatencyTimer, quantized_model: Model) -> SearchTrace:
        """Return a trace whose plan quantizes nothing unless the quantized model is faster than the float model."""
        if trace.rules_ratio is None:
            return trace
        if not trace.plan.sites:
            reason = BOUNDS_NOT_MET if trace.search_validation is not None else FLOAT_IS_FASTER
            return replace(trace, outcome_ratio=trace.rules_ratio, float_reason=reason)
        ratio = timer.median_ratio(quantized_model, self.source, OUTCOME_PAIRS)
        trace = replace(trace, outcome_ratio=ratio, timed_plans=trace.timed_plans + 1)
        if ratio.median <= MAX_RELATIVE_TIME and ratio.high < 1:
            return trace
        reason = GAIN_UNCERTAIN
        if ratio.median > MAX_RELATIVE_TIME:
            reason = FLOAT_IS_FASTER if ratio.median >= 1 else GAIN_TOO_SMALL
        message = f"{reason}; in {timer.runtime} a run takes {ratio.median:.2f} times as long if this is quantized"
        # The validation and the sensitivities belong to the plan that is rejected here.
        return replace(
            trace.with_candidates(dict.fromkeys((site.tensor for site in trace.plan.sites), FLOAT_CANDIDATE)),
            plan=_with_float_sites(trace.plan, range(len(trace.plan.sites)), message),
            changed_tensors={},
            plans=0,
            cost=0.0,
            runs_per_site=0.0,
            search_validation=None,
            site_errors={},
            float_reason=reason,
        )

    def meet_bounds(self, trace: SearchTrace, costs: Mapping[OpKey, float] | None) -> tuple[SearchTrace, BuiltModel]:
        """Choose the candidates of the lowest cost that meet the bounds; weights with a chosen bit width stay.

        Return also the quantized model of the plan.
        """
        plan, bounds = trace.plan, self.objective.bounds
        rules_build = self.build(plan)
        measurer = PlanMeasurer(self.source, self.prepared, plan, rules_build, self.folds, bounds, self.budget)
        rules_validation = measurer.validate(plan)
        if rules_validation.unmeasurable_bounds:
            raise UsageError(
                f"Some bounds cannot be measured: {'; '.join(rules_validation.unmeasurable_bounds)}. Remove them."
            )
        final_validation = measurer.validate_final(plan, rules_validation, self.build, self.stats)
        unchanged = replace(trace, plans=1, search_validation=final_validation)
        if not final_validation.failures or rules_validation.comparison is None or not rules_build.insertions:
            return unchanged, rules_build
        report = stage_progress(self.progress, "sensitivity")
        if not costs:
            # Latency falls back to MACs if the runtime reports no times of ops.
            costs = self._costs(measurer.samples)
        float_ops = _ops_in_float_anyway(plan, rules_build.model) & costs.keys()
        added_costs = {op: 0.0 if op in float_ops else cost for op, cost in costs.items()}
        try:
            measurer.charge_plan()  # for the plan that the search ends with
            trials = GroupTrials(self.prepared, plan, *measurer.select_worst_fold(), report, self.budget, added_costs)
            missing = 0.0 if bounds.min_sqnr is None else bounds.min_sqnr - _worst_sqnr(rules_validation)
            errors, candidate_plans = trials.measure_candidates(measurer.rebuild_worst_fold, missing)
        except SearchLimitError as limit:
            return replace(unchanged, stop_reason=limit.reason), rules_build
        if trials.interrupted:
            return replace(unchanged, interrupted=True), rules_build
        fixed_sites = [index for index, site in enumerate(plan.sites) if site.uses[0] in trace.sized_weights]
        groups = make_scale_groups(self.prepared, plan, sorted(errors), errors, fixed_sites)
        try:
            search = _BoundSearch(plan, candidate_plans, groups, errors, bounds, measurer, rules_validation)
            search.predict_by(trials)
        except SearchLimitError as limit:
            return replace(unchanged, stop_reason=limit.reason), rules_build
        except KeyboardInterrupt:
            return replace(unchanged, interrupted=True), rules_build
        result = search.run(
            added_costs,
            [block.ops for block in trials.blocks],
            stage_progress(self.progress, "searching"),
            lambda plan, validation: measurer.validate_final(plan, validation, self.build, self.stats),
            _worst_sqnr(rules_validation) - _worst_sqnr(final_validation),
        )
        trace = _bound_trace(trace, result, trials, errors, costs, float_ops | result.float_ops, measurer.samples.count)
        return trace, measurer.build_final(trace.plan, self.build, self.stats)

    def _costs(self, samples: Dataset) -> dict[OpKey, float]:
        """Return the cost of each op in float: bytes of its weights, or multiply-adds."""
        if self.objective.minimize == "size":
            return byte_costs(self.prepared)
        return mac_costs(self.prepared, measure_tensor_sizes(self.prepared, samples))


def _bound_trace(
    trace: SearchTrace,
    result: _BoundResult,
    trials: GroupTrials,
    errors: CandidateErrors,
    costs: Mapping[OpKey, float],
    in_float: Collection[OpKey],
    samples: int,
) -> SearchTrace:
    """Return the trace of a search for bounds, of which `trace` has the plan before. `in_float` are all float ops."""
    plan, changed = trace.plan, result.changed
    quantized = [i for i in range(len(plan.sites)) if changed.get(i) != FLOAT_CANDIDATE]
    known = {i: error_to_db(errors[i][RULE_CANDIDATE]) for i in trials.measured_sites if errors[i][RULE_CANDIDATE]}
    sensitivities = {plan.sites[i].tensor: known.get(i) for i, name in changed.items() if name == FLOAT_CANDIDATE}
    trace = trace.with_candidates({plan.sites[i].tensor: name for i, name in changed.items()})
    return replace(
        trace,
        plan=result.plan,
        missed_bounds=result.missed_bounds,
        float_tensors={**trace.float_tensors, **sensitivities},
        interrupted=trace.interrupted or result.stop_reason == "interrupt",
        stop_reason=result.stop_reason,
        plans=result.validations,
        cost=math.fsum(costs[op] for op in in_float) / (math.fsum(costs.values()) or 1.0),
        runs_per_site=(trials.runs + (result.validations + 1) * samples) / len(errors),
        search_validation=result.validation,
        site_errors={
            new_index: errors[i][changed.get(i, RULE_CANDIDATE)]
            for new_index, i in enumerate(quantized)
            if i in trials.measured_sites
        },
    )


def _ops_in_float_anyway(plan: Plan, quantized_model: Model) -> frozenset[OpKey]:
    """Return the ops that ONNX Runtime runs in float although they are quantized, so that float costs nothing."""
    if not (quantized_model.traits.judgeable and plan.for_onnxruntime):
        return frozenset()
    try:
        verdicts = judge_ops(quantized_model, "onnxruntime")
    except (ModelError, OSError):  # the validation reports a model that cannot be loaded
        return frozenset()
    return frozenset((verdict.graph, verdict.op) for verdict in verdicts if verdict.status == "float")


MAX_MARGIN_DB = 1.0
"""Largest margin in dB by which a changed plan should exceed its bound. The margin is the standard error between
samples, so that the plan more likely than not meets the bound on other samples. A larger one would cost int8 ops."""

MIN_INT8_RATIO = 0.95  # least share of int8 ops that a plan with the margin must have, relative to one without

MAX_SEARCHES = 3  # maximum number of searches, each of which aims higher by the miss of the previous plan

MAX_FINAL_LOSS_DB = 3.0  # dB by which a model with ranges from all samples is rarely worse than those of the folds


class PlanMeasurer:
    """Validations of plans on folds, with the weight edits that the algorithms made for the plan of the rules.

    A plan that keeps more sites in float is measured on the model of the rules with these sites bypassed.
    """

    def __init__(
        self,
        source: Model,
        prepared: Model,
        plan: Plan,
        built: BuiltModel,
        folds: Sequence[SearchFold],
        bounds: Bounds,
        budget: SearchBudget | None,
    ) -> None:
        """Measure variants of `plan`, whose model with ranges from all samples is `built`."""
        self._budget, self._min_sqnr = budget, bounds.min_sqnr
        self._prepared, self._plan, self._built, self._folds = prepared, plan, built, folds
        self._validator = FoldValidator(source, [fold.held_out for fold in folds], bounds)
        self._worst_fold = 0
        self._edited_builds: dict[int, BuiltModel] = {}
        self._recent_builds: list[tuple[Plan, list[BuiltModel]]] = []  # of the last plans, the newest last
        self._bypasses: tuple[Plan, list[SiteBypass]] | None = None
        self._final: tuple[Plan, BuiltModel] = plan, built  # the last built plan with ranges from all samples

    @property
    def samples(self) -> Dataset:
        """The samples of all folds."""
        first, last = self._folds[0].held_out, self._folds[-1].held_out
        return replace(first, dataset=last.dataset).samples()

    def select_worst_fold(self) -> tuple[BuiltModel, Dataset, list[int]]:
        """Return the model of the rules of the fold with the largest error, its samples, and these by importance.

        A few samples may cause most of the error, and sites that are measured without them would seem exact. Therefore
        the sample with the largest error comes first, then one from all over the data, and so on alternately.
        """
        totals = [math.fsum(errors) for errors in self._validator.sample_errors]
        self._worst_fold = max(range(len(totals)), key=totals.__getitem__, default=0)
        samples = self._folds[self._worst_fold].held_out.samples()
        errors = self._validator.sample_errors[self._worst_fold] if totals else []
        worst = sorted(range(len(errors)), key=lambda index: -errors[index])
        spread = sorted(range(samples.count), key=lambda index: f"{index:b}"[::-1])
        pairs = zip_longest(worst, spread)
        order = list(dict.fromkeys(index for pair in pairs for index in pair if index is not None))
        return self.build_worst_fold(self._plan), samples, order

    def build_worst_fold(self, plan: Plan) -> BuiltModel:
        """Return the model of a plan for that fold. It is built only once if all folds were validated."""
        return self._builds(plan)[self._worst_fold]

    def rebuild_worst_fold(self, plan: Plan) -> BuiltModel:
        """Return the model of a plan for that fold, without those of the other folds."""
        return self._build_fold(self._folds[self._worst_fold], plan)

    def charge_plan(self, *, bypassed: bool = False) -> None:
        """Charge the work of a measurement. Raises a SearchLimitError if there is no work or time left."""
        if self._budget is not None:
            costs, samples, folds = self._budget.costs, self._validator.samples, len(self._folds)
            self._budget.charge(costs.bypassed_plan(samples, folds) if bypassed else costs.plan(samples, folds=folds))

    def extend_for_plan(self) -> None:
        """Allow one more measurement."""
        if self._budget is not None:
            self._budget.extend(self._budget.costs.plan(self._validator.samples, folds=len(self._folds)))

    def validate(self, plan: Plan) -> Validation:
        """Validate a plan on all folds."""
        return self._validator.validate([built.model for built in self._builds(plan)])

    def validate_bypassed(self, plan: Plan, float_sites: Collection[int]) -> Validation:
        """Validate a plan with further sites in float, by index in `plan`."""
        if self._bypasses is None or self._bypasses[0] is not plan:
            bypasses = [
                SiteBypass(
                    built.model,
                    match_sites(self._prepared, built.model),
                    quantizing_ops_by_site(plan, built),
                    with_barriers=needs_barriers(plan),
                )
                for built in self._builds(plan)
            ]
            self._bypasses = plan, bypasses
        return self._validator.validate([bypass.make_model(float_sites) for bypass in self._bypasses[1]])

    def build_final(self, plan: Plan, build: BuildModel, stats: Stats | None) -> BuiltModel:
        """Return the model of a plan with ranges from all samples."""
        if plan is not self._final[0]:
            fits = self._fits_edits(plan)
            self._final = plan, rebuild_model(self._built, plan, stats) if fits else build(plan)
        return self._final[1]

    def validate_final(self, plan: Plan, validation: Validation, build: BuildModel, stats: Stats | None) -> Validation:
        """Return the validation of the model with ranges from all samples if its status is worse than `validation`'s.

        Its ranges are wider than those of the folds, so that it may be worse. It is measured only if the folds exceed
        the bound by little.
        """
        bound = self._min_sqnr
        is_far = bound is None or _worst_sqnr(validation) >= bound + MAX_FINAL_LOSS_DB
        if validation.failures or validation.comparison is None or is_far or len(self._folds) == 1:
            return validation
        model = self.build_final(plan, build, stats).model
        final = self._validator.validate([model] * len(self._folds))
        is_worse = final.failures or (final.caveats and not validation.caveats)
        return replace(final, folds=1) if is_worse else validation

    def _builds(self, plan: Plan) -> list[BuiltModel]:
        known = next((builds for recent, builds in self._recent_builds if recent is plan), None)
        if known is None:
            known = [self._build_fold(fold, plan) for fold in self._folds]
            self._recent_builds = [*self._recent_builds[-1:], (plan, known)]
        return known

    def _build_fold(self, fold: SearchFold, plan: Plan) -> BuiltModel:
        if not self._fits_edits(plan):
            return fold.build(plan)
        return rebuild_model(self._edited_build(fold), plan, fold.stats)

    def _edited_build(self, fold: SearchFold) -> BuiltModel:
        """Return the model of the rules whose weight edits serve for a fold.

        Rounding algorithms fit the weights so closely to their samples that they run again without those of the fold.
        """
        if {GPTQ, ADAROUND}.isdisjoint(self._plan.algorithms):
            return self._built
        number = self._folds.index(fold)
        if number not in self._edited_builds:
            self._edited_builds[number] = fold.build(self._plan)
        return self._edited_builds[number]

    def _fits_edits(self, plan: Plan) -> bool:
        """Return True if the weight edits for the plan of the rules fit `plan`, because weights have the same types."""
        schemes = {use: site.scheme for site in self._plan.sites if site.parameter for use in site.uses}
        return all(schemes.get(use) == site.scheme for site in plan.sites if site.parameter for use in site.uses)


class _BoundResult(NamedTuple):
    """Result of a search for bounds."""

    plan: Plan
    validation: Validation  # validation of the plan
    changed: dict[int, str]  # candidates of the sites that differ from the rules, by index
    float_ops: frozenset[OpKey]  # ops that the plan keeps in float
    validations: int  # number of validated plans
    missed_bounds: tuple[str, ...]  # if the plan quantizes nothing, the bounds that the best other plan misses
    stop_reason: StopReason | None  # limit that ended the search early


class _BoundSearch:
    """The search for the cheapest plan within bounds, once the errors of the candidates are known."""

    def __init__(
        self,
        plan: Plan,
        candidate_plans: Mapping[str, Plan],
        groups: Sequence[ScaleGroup],
        errors: CandidateErrors,
        bounds: Bounds,
        measurer: PlanMeasurer,
        rules_validation: Validation,
    ) -> None:
        self._plan, self._bounds, self._measurer, self._errors = plan, bounds, measurer, errors
        self._candidate_plans = candidate_plans
        self._validations: dict[tuple[tuple[int, str], ...], Validation] = {(): rules_validation}
        self._measured: dict[Selection, Validation] = {}  # of the current groups
        self._predict: Callable[[Selection], float] | None = None  # predicts the SQNR in dB
        self._raise = 0.0  # dB above the bound that a plan must have on the folds
        # Better ranges cost no multiply-adds, so they come first, if they bring a gain together.
        self._groups = [_choose_quantized_candidate(group, best=True) for group in groups]
        self._drafts = self._make_drafts()
        self._base_plan = self._drafts.build_plan((0,) * len(groups))
        if self._base_plan != plan:
            measurer.charge_plan()
            better = measurer.validate(self._base_plan)
            if _worst_sqnr(better) <= _worst_sqnr(rules_validation) and better.failures:
                self._groups = [_choose_quantized_candidate(group, best=False) for group in groups]
                self._drafts, self._base_plan = self._make_drafts(), plan
            else:
                self._validations[self._key((0,) * len(groups))] = better
        else:
            self._base_plan = plan

    def predict_by(self, trials: GroupTrials) -> None:
        """Predict plans by switches, if there is work left for them."""
        names = {candidate.name for group in self._groups for candidate in group.candidates[1:]}
        if names <= {FLOAT_CANDIDATE}:
            with suppress(SearchLimitError):
                built = self._measurer.build_worst_fold(self._base_plan)
                predict_sites = trials.make_predictor(self._base_plan, built)
                if predict_sites is not None:
                    self._predict = lambda selection: predict_sites(self._float_sites(selection))

    def _float_sites(self, selection: Selection) -> list[int]:
        return [index for index, name in self._key(selection) if name == FLOAT_CANDIDATE]

    def _make_drafts(self) -> _CandidatePlans:
        return _CandidatePlans(self._plan, self._candidate_plans, self._groups, self._errors, self._bounds)

    def _key(self, selection: Selection) -> tuple[tuple[int, str], ...]:
        return tuple(sorted(self._drafts.changed_candidates(selection).items()))

    def run(
        self,
        costs: Mapping[OpKey, float],
        blocks: Sequence[frozenset[OpKey]],
        progress: Callable[[int, int], None] | None,
        validate_final: Callable[[Plan, Validation], Validation],
        final_loss: float,
    ) -> _BoundResult:
        """Search until the chosen plan, built as it will be, meets the bounds, or cannot.

        `validate_final` is `PlanMeasurer.validate_final`. `final_loss` is the difference in dB that it found for the
        plan of the rules.
        """
        self._raise, target = max(final_loss, 0.0), self._bounds.min_sqnr
        for attempt in range(MAX_SEARCHES):
            result = search_cheapest_plan(
                self._groups,
                costs,
                self._measure,
                target_sqnr=None if target is None else target + self._raise,
                blocks=blocks,
                progress=progress,
                predict=self._predict,
            )
            stop_reason = result.stop_reason
            selection = self._prefer_int8(result.selection, costs)
            if result.stop_reason in {"work", "time"} and not self._meets(self._measured[selection]):
                selection = self._reach_bound(costs, blocks)
            plan, validation = self._drafts.build_plan(selection), self._measured[selection]
            folds_sqnr, is_last = _worst_sqnr(validation), attempt == MAX_SEARCHES - 1
            try:
                if any(self._groups[i].candidates[index].high_precision for i, index in enumerate(selection)):
                    # The bypassed model of a fold differs slightly from the built one.
                    validation = self._measurer.validate(plan)
                    folds_sqnr = _worst_sqnr(validation)
                if plan.sites and stop_reason != "interrupt":
                    validation = validate_final(plan, validation)
            except KeyboardInterrupt:
                stop_reason = "interrupt"
            if target is None or stop_reason == "interrupt" or not validation.failures or is_last:
                break
            if not plan.sites or not self._meets(self._measured[selection]):
                break
            if folds_sqnr < target:  # the built folds are worse than the measured ones
                self._measured[selection] = validation
            self._raise += max(target - _worst_sqnr(validation), 0.0) + MIN_RAISE_DB
        self._validations[self._key(selection)] = validation
        quantizing = {key: known for key, known in self._validations.items() if not self._is_all_float(key)}
        best = max(quantizing.values(), key=_worst_sqnr)
        return _BoundResult(
            plan=plan,
            validation=validation,
            changed=dict(self._key(selection)),
            float_ops=high_precision_ops(self._groups, selection),
            validations=len(self._validations),
            missed_bounds=best.failures or best.caveats if self._is_all_float(self._key(selection)) else (),
            stop_reason=stop_reason,
        )

    def _reach_bound(self, costs: Mapping[OpKey, float], blocks: Sequence[frozenset[OpKey]]) -> Selection:
        """Return a plan that meets the bound with a margin where the search ended before it: at worst, all in float."""
        all_float = tuple(len(group.candidates) - 1 for group in self._groups)
        selections = [all_float]
        if self._bounds.min_sqnr is not None:
            nearest = max(self._measured, key=lambda selection: self._measure(selection).sqnr)
            missing = self._bounds.min_sqnr + self._raise - self._measure(nearest).sqnr
            missing += min(max(missing, MIN_RAISE_DB), REACHING_MARGIN_DB)
            max_error = total_error(self._groups, nearest) * 10 ** (-missing / 10)
            selections.insert(0, choose_selection(self._groups, costs, max_error, blocks))
        for selection in selections:
            self._measurer.extend_for_plan()
            if self._measure(selection).met:
                return selection
        return all_float

    def _meets(self, validation: Validation) -> bool:
        """Return True if a plan meets the bounds on the folds, as far above them as the final model needs."""
        target = self._bounds.min_sqnr
        return not validation.failures and (target is None or _worst_sqnr(validation) >= target + self._raise)

    def _prefer_int8(self, selection: Selection, costs: Mapping[OpKey, float]) -> Selection:
        """Return the cheapest measured selection that meets the bounds if the margin costs too many int8 ops."""
        met = [other for other, validation in self._measured.items() if self._meets(validation)]
        cheapest = min(met, key=lambda other: selection_cost(self._groups, other, costs), default=selection)
        total = math.fsum(costs.values())
        int8_costs = [total - selection_cost(self._groups, other, costs) for other in (selection, cheapest)]
        misses = bool(met) and selection not in met
        return cheapest if misses or int8_costs[0] < MIN_INT8_RATIO * int8_costs[1] else selection

    def _is_all_float(self, key: tuple[tuple[int, str], ...]) -> bool:
        float_sites = {index for index, name in key if name == FLOAT_CANDIDATE}
        return {index for group in self._groups for index in group.sites} <= float_sites

    def _measure(self, selection: Selection) -> PlanQuality:
        """Return the quality of a selection, with a margin for other samples."""
        key = self._key(selection)
        if key not in self._validations:
            names = dict(key)
            high_precision = {
                index for index, name in names.items() if name in HIGH_PRECISION_CANDIDATES and name != FLOAT_CANDIDATE
            }
            self._measurer.charge_plan(bypassed=not high_precision)
            if high_precision:
                validation = self._measurer.validate(self._drafts.build_plan(selection))
            else:
                validation = self._measurer.validate_bypassed(self._base_plan, self._float_sites(selection))
            self._validations[key] = validation
        self._measured.setdefault(selection, self._validations[key])
        validation = self._measured[selection]
        worst_sqnr, standard_error = _worst_output(validation)
        sqnr = worst_sqnr - min(standard_error, MAX_MARGIN_DB)
        target = self._bounds.min_sqnr
        is_above = target is None or sqnr >= target + self._raise
        return PlanQuality(met=not validation.failures and is_above, sqnr=sqnr)


REACHING_MARGIN_DB = 6.0
"""Largest margin in dB of the estimates with which a search without further measurements ends: as large as the miss."""

MIN_RAISE_DB = 0.3  # smallest step in dB by which the aim of a search is raised


def _choose_quantized_candidate(group: ScaleGroup, *, best: bool) -> ScaleGroup:
    """Return the group with one candidate that costs nothing: the best, or that of the rules, and the others."""
    quantized = [candidate for candidate in group.candidates if not candidate.high_precision]
    high = [candidate for candidate in group.candidates if candidate.high_precision]
    chosen = min(quantized, key=lambda candidate: candidate.error) if best else quantized[0]
    return replace(group, candidates=(chosen, *high))


def _with_float_sites(plan: Plan, float_sites: Iterable[int], reason: str) -> Plan:
    """Return the plan with these sites as skips."""
    return replace_sites(plan, dict.fromkeys(float_sites), LATENCY_RULE, lambda _index: reason)


def _worst_sqnr(validation: Validation) -> float:
    """Return the SQNR in dB of the worst output; -1 if none was measured."""
    return _worst_output(validation)[0]


def _worst_output(validation: Validation) -> tuple[float, float]:
    """Return the SQNR in dB of the worst output and its standard error; -1 and 0 if none was measured."""
    outputs = () if validation.comparison is None else validation.comparison.outputs
    return min(((o.sqnr, o.sqnr_standard_error) for o in outputs if o.sqnr is not None), default=(-1.0, 0.0))


class _CandidatePlans(NamedTuple):
    """Plans for selections of candidates: the plan of the rules with the chosen sites of `candidate_plans`."""

    plan: Plan
    candidate_plans: Mapping[str, Plan]
    groups: Sequence[ScaleGroup]
    errors: CandidateErrors
    bounds: Bounds

    def changed_candidates(self, selection: Selection) -> dict[int, str]:
        """Return the candidates of the sites that differ from the rules, by index."""
        chosen = ((group, group.candidates[i].name) for group, i in zip(self.groups, selection, strict=True))
        return {
            index: name
            for group, name in chosen
            for index in group.sites
            if name == FLOAT_CANDIDATE or (name != RULE_CANDIDATE and name in self.errors[index])
        }

    def build_plan(self, selection: Selection) -> Plan:
        """Return the plan of a selection."""
        changed = self.changed_candidates(selection)
        replacements = {
            index: None if name == FLOAT_CANDIDATE else self.candidate_plans[name].sites[index]
            for index, name in changed.items()
        }
        return replace_sites(self.plan, replacements, SEARCH_RULE, lambda index: self._reason(index, changed[index]))

    def _reason(self, index: int, candidate: str) -> str:
        is_float = candidate == FLOAT_CANDIDATE
        rules_error, error = self.errors[index][RULE_CANDIDATE], self.errors[index].get(candidate, 0.0)
        reason = f"the search {'keeps it float' if is_float else f'chose {candidate}'} for {self.bounds}"
        if rules_error:
            reason += f"; quantized alone by the rules, it leaves {error_to_db(rules_error):.1f} dB at the outputs"
            if not is_float and error:
                reason += f", and {error_to_db(error):.1f} dB with this candidate"
        return reason


def _sensitivity_of_ops(trace: SearchTrace, built: BuiltModel) -> Sensitivity:
    """Return the sensitivities of the sites by the ops of the quantized model, which has the plan of `trace`."""
    errors = {
        quantizing_op(built.model, output): trace.site_errors[index]
        for index, pair in insertions_by_site(trace.plan, built.insertions).items()
        if index in trace.site_errors
        for output in pair.outputs
    }
    return Sensitivity(errors=errors, samples=0)
