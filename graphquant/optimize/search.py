"""The search for the plan of the lowest cost: float MACs, weight bytes, or latency on this machine.

One search serves all objectives. It has up to three stages, each of which starts with the plan of the previous one:

1. Weight bit widths, if there is a size budget, or if size is minimized within bounds (`optimize.size_budget`).
2. Sites that are faster in float, if latency is minimized (`optimize.latency`).
3. Candidates of all other sites, if there are bounds that the plan does not meet (`optimize.selection`).

Latency needs no bound. Without any gain in latency, the search returns a plan in which all sites stay float.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from graphquant.analysis.validation import Bounds, Validation, measure_tensor_sizes, validate_model
from graphquant.errors import UsageError
from graphquant.optimize.candidates import (
    FLOAT_CANDIDATE,
    RULE_CANDIDATE,
    BuildModel,
    CandidateErrors,
    CandidateTrials,
    ScaleGroup,
    byte_costs,
    insertions_by_site,
    mac_costs,
    make_candidate_plans,
    make_scale_groups,
    quantizing_op,
    replace_sites,
)
from graphquant.optimize.latency import LatencyTimer, PlanProfiler, TimeRatio, make_latency_groups, minimize_latency
from graphquant.optimize.selection import PlanQuality, Selection, search_cheapest_plan
from graphquant.optimize.sensitivity import Sensitivity
from graphquant.optimize.size_budget import (
    SizedPlan,
    WeightBitsChooser,
    families_with_float_weights,
    model_constant_bytes,
    parse_size_budget,
)
from graphquant.utils import Progress, stage_progress

if TYPE_CHECKING:
    from graphquant.calibration.holdout import CalibrationData, HoldOut
    from graphquant.ir import Model, OpKey, TensorRef, Use
    from graphquant.optimize.algorithm import PreCalibrationState
    from graphquant.optimize.algorithms import BuiltModel
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

    @property
    def failures(self) -> tuple[str, ...]:
        """Messages about bounds that the plan misses on the search samples."""
        return () if self.search_validation is None else self.search_validation.failures

    @property
    def caveats(self) -> tuple[str, ...]:
        """Messages about bounds that the search samples do not confirm."""
        return () if self.search_validation is None else self.search_validation.caveats

    @property
    def bounds_met(self) -> bool:
        """True if the search samples confirm all bounds, or there are none."""
        return not self.failures and not self.caveats

    @property
    def confirmed(self) -> bool:
        """True if the bounds are confirmed as well as these samples allow, or there are none."""
        return self.search_validation is None or self.search_validation.confirmed

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
    objective: Objective,
    data: CalibrationData,
    progress: Progress | None = None,
) -> tuple[BuiltModel, SearchTrace | None]:
    """Search the plan of the lowest cost that keeps the limits of an objective.

    `rules_state` has the prepared model and the plan of the rules, and `build` builds the quantized model of a plan.

    Returns:
        The quantized model of the chosen plan, and the trace of the search; None if there was nothing to search.

    Raises:
        DataError: A sample does not fit the model.
        ModelError: A model cannot be run.
        UsageError: A bound applies to no output, or the size budget is invalid or cannot be met.
    """
    search_set = data.search_set
    stages = _SearchStages(source, rules_state.model, build, objective, search_set, progress)
    unchanged = trace = SearchTrace(minimize=objective.minimize, plan=rules_state.plan)
    trace = stages.choose_weight_bits(trace)
    timer, float_costs = None, None
    if objective.minimize == "latency":
        timer = LatencyTimer.for_data(source, data.dataset, as_tflite=objective.as_tflite)
        trace, float_costs = stages.choose_fastest_sites(trace, timer)
    if search_set is not None and objective.bounds and trace.plan.sites:
        trace = stages.meet_bounds(trace, search_set, float_costs)
    built = build(trace.plan)
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
    objective: Objective
    search_set: HoldOut | None
    progress: Progress | None

    def _validate(self, model: Model) -> Validation:
        if self.search_set is None:
            raise ValueError("a validation needs search samples")
        return validate_model(self.source, model, self.search_set, self.objective.bounds, None, include_sites=False)

    def choose_weight_bits(self, trace: SearchTrace) -> SearchTrace:
        """Choose the weight bit widths of least error within the budget, or of least size within the bounds."""
        budget = self.objective.size_budget
        if budget is None:
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
        if not self._validate(rules_model).confirmed:
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
                elif self._validate(self.build(sized.plan).model).confirmed:
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

    def meet_bounds(self, trace: SearchTrace, search_set: HoldOut, costs: Mapping[OpKey, float] | None) -> SearchTrace:
        """Choose the candidates of the lowest cost that meet the bounds; weights with a chosen bit width stay."""
        plan, bounds = trace.plan, self.objective.bounds
        rules_build = self.build(plan)
        rules_validation = self._validate(rules_build.model)
        if rules_validation.unmeasurable_bounds:
            raise UsageError(
                f"Some bounds cannot be measured: {'; '.join(rules_validation.unmeasurable_bounds)}. Remove them."
            )
        unchanged = replace(trace, plans=1, search_validation=rules_validation)
        if rules_validation.confirmed or rules_validation.comparison is None or not rules_build.insertions:
            return unchanged
        trials = CandidateTrials(self.prepared, search_set, self.progress)
        errors, candidate_plans = trials.measure_candidates(plan, rules_build, self.build)
        if trials.interrupted:
            return replace(unchanged, interrupted=True, runs_per_site=trials.runs_per_site(errors))
        fixed_sites = [index for index, site in enumerate(plan.sites) if site.uses[0] in trace.sized_weights]
        groups = make_scale_groups(self.prepared, plan, sorted(errors), errors, fixed_sites)
        drafts = _CandidatePlans(plan, candidate_plans, groups, errors, bounds)
        rules_selection: Selection = (0,) * len(groups)
        validations, quantizing = {rules_selection: rules_validation}, {rules_selection}

        def measure(selection: Selection) -> PlanQuality:
            if selection not in validations:
                built = self.build(drafts.build_plan(selection))
                validations[selection] = self._validate(built.model)
                quantizing.update([selection] if built.insertions else [])
            validation = validations[selection]
            return PlanQuality(met=validation.confirmed, sqnr=_worst_confirmed_sqnr(validation))

        if not costs:
            # Latency falls back to MACs if the runtime reports no times of ops.
            if self.objective.minimize == "size":
                costs = byte_costs(self.prepared)
            else:
                costs = mac_costs(self.prepared, measure_tensor_sizes(self.prepared, search_set.samples()))
        result = search_cheapest_plan(
            groups, costs, measure, target_sqnr=bounds.min_sqnr, progress=stage_progress(self.progress, "searching")
        )
        changed = drafts.changed_candidates(result.selection)
        best = max((validations[selection] for selection in quantizing), key=_worst_confirmed_sqnr)
        quantized = [i for i in range(len(plan.sites)) if changed.get(i) != FLOAT_CANDIDATE]
        validation_runs = 2 * len(validations) * search_set.samples().count / len(errors)
        trace = trace.with_candidates({plan.sites[i].tensor: name for i, name in changed.items()})
        sensitivities = {
            plan.sites[i].tensor: _error_to_db(errors[i][RULE_CANDIDATE])
            for i, name in changed.items()
            if name == FLOAT_CANDIDATE
        }
        return replace(
            trace,
            plan=drafts.build_plan(result.selection),
            missed_bounds=() if result.selection in quantizing else best.failures or best.caveats,
            float_tensors={**trace.float_tensors, **sensitivities},
            interrupted=trace.interrupted or result.interrupted,
            plans=result.plans,
            cost=result.cost,
            runs_per_site=trials.runs_per_site(errors) + validation_runs,
            search_validation=validations[result.selection],
            site_errors={
                new_index: errors[i][changed.get(i, RULE_CANDIDATE)]
                for new_index, i in enumerate(quantized)
                if i in trials.measured_sites
            },
        )


def _with_float_sites(plan: Plan, float_sites: Iterable[int], reason: str) -> Plan:
    """Return the plan with these sites as skips."""
    return replace_sites(plan, dict.fromkeys(float_sites), LATENCY_RULE, lambda _index: reason)


def _worst_confirmed_sqnr(validation: Validation) -> float:
    """Return the SQNR in dB that the worst output has with confidence; -1 if none was measured."""
    outputs = () if validation.comparison is None else validation.comparison.outputs
    sqnrs = [output.sqnr if output.sqnr_lower_bound is None else output.sqnr_lower_bound for output in outputs]
    return min((sqnr for sqnr in sqnrs if sqnr is not None), default=-1.0)


@dataclass(frozen=True, slots=True)
class _CandidatePlans:
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
        errors, is_float = self.errors[index], candidate == FLOAT_CANDIDATE
        rules_db, candidate_db = _error_to_db(errors[RULE_CANDIDATE]), _error_to_db(errors.get(candidate, 0.0))
        reason = f"the search {'keeps it float' if is_float else f'chose {candidate}'} for {self.bounds}"
        if rules_db is not None:
            reason += f"; quantized alone by the rules, it leaves {rules_db:.1f} dB at the outputs"
            if not is_float and candidate_db is not None:
                reason += f", and {candidate_db:.1f} dB with this candidate"
        return reason


def _error_to_db(error: float) -> float | None:
    return -10 * math.log10(error) if error else None


def _sensitivity_of_ops(trace: SearchTrace, built: BuiltModel) -> Sensitivity:
    """Return the sensitivities of the sites by the ops of the quantized model, which has the plan of `trace`."""
    errors = {
        quantizing_op(built.model, output): trace.site_errors[index]
        for index, pair in insertions_by_site(trace.plan, built.insertions).items()
        if index in trace.site_errors
        for output in pair.outputs
    }
    return Sensitivity(errors=errors, runs=0, samples=0)
