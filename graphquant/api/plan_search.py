"""Phases of `insert` that measure plans on samples: calibration, the search for a plan, validation, and repair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from graphquant import formats
from graphquant.analysis.compare import with_sensitivity
from graphquant.analysis.measured_outputs import OutputMeter
from graphquant.analysis.validation import (
    DEFAULT_MIN_SQNR,
    MAX_UNBOUNDED_SAMPLES,
    Bounds,
    Validation,
    has_few_sites,
    record_float_outputs,
    validate_model,
)
from graphquant.api.calibrate import calibrate_command_line
from graphquant.api.result import Result, make_result
from graphquant.calibration.calibrate import CalibrationRun, calibrate_folds, calibrate_model
from graphquant.calibration.memory import return_freed_memory
from graphquant.calibration.stats import Stats, combine_stats, select_stats
from graphquant.calibration.targets import plan_targets
from graphquant.optimize.algorithms import BuiltModel, build_model, rebuild_model, run_precalibration_algorithms
from graphquant.optimize.candidates import RANGE_CANDIDATES, SearchFold, make_candidate_plans
from graphquant.optimize.repair import (
    RANGES,
    REPAIR_SAMPLES,
    RepairedPlan,
    RepairRequest,
    RepairStep,
    RepairTrace,
    Workspace,
    repair_plan,
)
from graphquant.optimize.search import Objective, SearchTrace, search_plan
from graphquant.optimize.search_budget import SearchBudget, predict_costs, search_clock
from graphquant.optimize.size_budget import model_constant_bytes
from graphquant.rules import NEGATION
from graphquant.utils import Progress, stage_progress
from graphquant.utils.options import NO_TARGET, InsertOptions

if TYPE_CHECKING:
    from graphquant.calibration.data.check import DataFinding, ModelRun
    from graphquant.calibration.holdout import CalibrationData
    from graphquant.ir import Model
    from graphquant.optimize.algorithm import PreCalibrationState
    from graphquant.quantize import Plan, RangeTransfer

    FindMistakes = Callable[[Sequence[ModelRun]], tuple[DataFinding, ...]]

CLOSE_DB = 6.0  # dB above the target up to which calibration samples are measured too
UNCLIPPED, MAX_CLIPPED_DB, MIN_UNCLIPPED_GAIN_DB = RANGE_CANDIDATES[0], 40.0, 1.0
"""Candidate that clips nothing, the SQNR in dB of the worst output below which it is tried, and the required gain."""


class InsertInputs(NamedTuple):
    """The model, the plan of the rules and the data of one `insert`. No phase changes them."""

    source: Model
    prepared: Model
    plan: Plan  # the plan of the rules
    data: CalibrationData
    settings: InsertOptions
    objective: Objective
    transfer: RangeTransfer | None  # use of given ranges
    with_integer_types: Callable[[Result], Result]  # adds the integer inputs, outputs and caches of the options
    progress: Progress | None


class ChosenPlan(NamedTuple):
    """The plan of the search with its quantized model, before the validation."""

    workspace: Workspace
    built: BuiltModel
    result: Result


def calibrate_plan(inputs: InsertInputs) -> tuple[PlanSearch, Workspace, FindMistakes]:
    """Run the algorithms that precede calibration, and calibrate.

    Returns:
        The search, whose time starts with the calibration, the calibrated model, and a function that returns likely
        mistakes in the data, also by runs of the float model.
    """
    data = inputs.data
    check = data.start_check(inputs.source) if inputs.plan.sites else None
    state = run_precalibration_algorithms(
        inputs.prepared, inputs.plan, data.calibration, has_stats=data.stats is not None
    )
    search = PlanSearch(inputs, search_clock(inputs.settings.search_time)())
    workspace = search.calibrate(state)
    find_mistakes: FindMistakes = (lambda _runs: ()) if check is None else check.finish
    if not has_few_sites(len(inputs.plan.sites)):
        has_session = workspace.stats is not None and data.stats is None
        output_runner = formats.create_runner(state.model) if has_session else None
        findings = () if check is None else check.finish((), output_runner)
        find_mistakes, check, output_runner = (lambda _runs: findings), None, None  # without the runners
        runner = formats.find_shared_runner(inputs.source) if data.validation_set is not None else None
        formats.release_runners("source", "prepared")  # one that observes all activations needs much memory
        if runner is not None and data.validation_set is not None:  # it may have a session already
            record_float_outputs(runner, data.validation_set)
        return_freed_memory()  # from now on, only outputs are measured
    return search, workspace, find_mistakes


@dataclass(frozen=True)
class PlanSearch:
    """The search of one `insert`. All its parts share a budget of work."""

    inputs: InsertInputs
    start: float  # time of the search clock at which calibration started, in seconds

    @cached_property
    def _budget(self) -> SearchBudget:
        """The work of all searches, which starts after the calibration."""
        inputs, data = self.inputs, self.inputs.data
        search_time, samples = inputs.settings.search_time, data.calibration or data.dataset
        elapsed = search_clock(search_time)() - self.start
        costs = predict_costs(inputs.prepared, inputs.plan, samples, model_constant_bytes(inputs.prepared))
        return SearchBudget(search_time, costs, samples.count, len(inputs.plan.algorithms), elapsed)

    @property
    def _allows_repair(self) -> bool:
        """True if a repair may change the plan.

        A given plan, a size budget and another objective than multiply-adds are requests that a repair would break.
        Errors on random data mean nothing.
        """
        settings = self.inputs.settings
        is_fixed = settings.plan is not None or settings.size_budget is not None or settings.optimize != "macs"
        return not (is_fixed or self.inputs.data.dataset.random)

    def calibrate(self, state: PreCalibrationState, *, full_histograms: bool = False) -> Workspace:
        """Return the workspace of a state, with the folds in which a search with bounds measures plans."""
        inputs, data = self.inputs, self.inputs.data
        if data.fold_count:
            stats, folds = self._provide_folds(state)
        else:
            stats, folds = self._provide_stats(state, full_histograms=full_histograms), ()
        build = partial(
            build_model,
            state.model,
            stats=stats,
            calibration_data=data.calibration,
            float_weights=inputs.settings.float_weights,
            # Searches show their own progress. Without data, the ranges of the weights are all the work.
            progress=inputs.progress if stats is None else None,
        )
        return Workspace(state=state, stats=stats, build=build, folds=folds)

    @property
    def _calibration_run(self) -> CalibrationRun:
        inputs = self.inputs
        return CalibrationRun(
            model_digest=inputs.source.digest,
            max_memory=inputs.settings.max_memory,
            progress=stage_progress(inputs.progress, "calibrating"),
        )

    def _provide_stats(self, state: PreCalibrationState, *, full_histograms: bool) -> Stats | None:
        """Return the statistics of the plan, selected from given ones or collected from data; None if it needs none."""
        inputs, data = self.inputs, self.inputs.data
        # A search tries other observers, which need histograms even if those of the rules do not.
        targets = plan_targets(
            inputs.source,
            state.model,
            state.plan,
            full_histograms=(full_histograms or data.has_bounds) and data.stats is None,
            rescaled=state.rescaled_tensors,
        )
        if data.stats is not None:
            command = calibrate_command_line(inputs.source, state.plan, inputs.settings.plan)
            selected = select_stats(data.stats, targets, inputs.source.digest, command)
            return selected if targets else None
        if data.calibration is None or not targets:
            return None
        return calibrate_model(state.model, targets, data.calibration, self._calibration_run)

    def _provide_folds(self, state: PreCalibrationState) -> tuple[Stats | None, tuple[SearchFold, ...]]:
        """Return the statistics of the plan and the folds of the data."""
        inputs, data = self.inputs, self.inputs.data
        targets = plan_targets(
            inputs.source, state.model, state.plan, full_histograms=True, rescaled=state.rescaled_tensors
        )
        parts: list[tuple[Stats | None, tuple[int, int]]] = []
        if targets and data.stats is None:
            parts += calibrate_folds(state.model, targets, data.dataset, self._calibration_run, data.fold_count)
        else:  # only algorithms need samples
            ends = [data.dataset.count * index // data.fold_count for index in range(data.fold_count + 1)]
            parts += [(None, span) for span in pairwise(ends)]

        def combine(selected: Sequence[Stats | None]) -> Stats | None:
            known = [stats for stats in selected if stats is not None]
            return combine_stats(known) if known else None

        folds = []
        for index, (_, (start, stop)) in enumerate(parts):
            held_out, others = data.make_fold(start, stop)
            fold_stats = combine([stats for other, (stats, _) in enumerate(parts) if other != index])
            float_weights = inputs.settings.float_weights
            build = partial(
                build_model, state.model, stats=fold_stats, calibration_data=others, float_weights=float_weights
            )
            folds.append(SearchFold(held_out=held_out, build=build, stats=fold_stats))
        return combine([stats for stats, _ in parts]), tuple(folds)

    def choose_plan(self, workspace: Workspace) -> ChosenPlan:
        """Search the plan that the objective asks for; the plan of the rules if there is nothing to search.

        For a bound on the SQNR, algorithms are chosen first. If Ctrl-C ends this, the bounds are not searched for.
        """
        inputs, data, objective, repair = self.inputs, self.inputs.data, self.inputs.objective, None
        if objective.bounds.min_sqnr is not None and data.search_set is not None and self._allows_repair:
            workspace, repair = self._choose_algorithms(workspace, objective.bounds.min_sqnr)
            if repair.stop_reason == "interrupt":
                objective = replace(objective, bounds=Bounds())
        state, stats = workspace.state, workspace.stats
        budget = self._budget if data.search_set is not None and objective.bounds else None
        built, trace = search_plan(
            inputs.source, state, workspace.build, stats, objective, data, workspace.folds, inputs.progress, budget
        )
        if repair is not None and repair.steps:
            base = trace or SearchTrace(minimize=objective.minimize, plan=state.plan)
            trace = replace(base, repair=repair, interrupted=base.interrupted or repair.stop_reason == "interrupt")
        result = inputs.with_integer_types(make_result(inputs.source, inputs.prepared, state, built, trace, stats))
        return ChosenPlan(workspace=workspace, built=built, result=result)

    def validate(self, chosen: ChosenPlan) -> Result:
        """Return the validated result of a plan, or of its repair if outputs miss the default target."""
        result = self._validated(chosen.result, chosen.workspace.state)
        # The plans of a repair would take many times as long as the rest for so many quantized tensors.
        is_repairable = result.validation is not None and has_few_sites(len(result.inserted)) and self._allows_repair
        if result.validation is None or not is_repairable:
            return result
        if not self._misses_target(chosen.built, result.validation):
            return self._unclipped(chosen, result, result.validation)
        default_sqnr = -math.inf if result.validation.worst_sqnr is None else result.validation.worst_sqnr
        request = self._request(chosen.workspace, chosen.built, DEFAULT_MIN_SQNR, default_sqnr)
        return self._repaired_result(*repair_plan(request))  # the cheapest plan that reaches the target, or the best

    def _unclipped(self, chosen: ChosenPlan, clipped: Result, validation: Validation) -> Result:
        """Return the result of the plan without clipping if its error on the hold-out is much smaller, else `clipped`.

        Ranges that clip fit the calibration samples. If new samples exceed them often, some exceed them by far.
        """
        state, sqnr = chosen.workspace.state, validation.worst_sqnr
        is_requested = bool(validation.bounds or self.inputs.settings.method or validation.target_sqnr is None)
        is_tried = sqnr is not None and sqnr < MAX_CLIPPED_DB and not is_requested
        plan = make_candidate_plans(state.model, state.plan).get(UNCLIPPED) if is_tried else None
        if plan is None or sqnr is None:
            return clipped
        meter = self._holdout_meter
        # Algorithms, which run again only for a plan that gains enough, change little of it.
        for build in (partial(rebuild_model, chosen.built, stats=chosen.workspace.stats), chosen.workspace.build):
            built = build(plan)
            new_sqnr = meter.worst_sqnr(built.model)
            if not meter.sample_errors or new_sqnr < sqnr + MIN_UNCLIPPED_GAIN_DB:
                return clipped
        new_errors, _ = meter.sample_errors, meter.worst_sqnr(chosen.built.model)
        name, errors = next(iter(meter.sample_errors.items()))
        if _change_without_best(errors, new_errors.get(name, errors)) > new_sqnr - sqnr:
            return clipped
        changed = {new.tensor: UNCLIPPED for old, new in zip(state.plan.sites, plan.sites, strict=True) if old != new}
        step = RepairStep(change=RANGES, targets=tuple(map(str, changed)), sqnr=new_sqnr, kept=True)
        repair = RepairTrace(
            target_sqnr=DEFAULT_MIN_SQNR, requested=False, default_sqnr=sqnr, sqnr=new_sqnr, steps=(step,), plans=1
        )
        repaired = RepairedPlan(workspace=chosen.workspace, plan=plan, built=built, changed_tensors=changed, cost=0.0)
        return self._repaired_result(repaired, repair)

    def _validated(self, result: Result, state: PreCalibrationState) -> Result:
        """Return the result with its errors on the hold-out; without them if there is no data."""
        inputs = self.inputs
        # Scaled channels would differ from those of the source.
        prepared = None if state.rescaled_tensors else state.model
        # An unchanged model needs no data, which may not even fit it.
        holdout = inputs.data.validation_set if result.is_changed else None
        if holdout is None:
            return result
        target = None if inputs.settings.min_sqnr == NO_TARGET else DEFAULT_MIN_SQNR
        bounds, progress = inputs.objective.bounds, inputs.progress
        validation = validate_model(
            result.source, result.model, holdout, bounds, progress, target_sqnr=target, prepared=prepared
        )
        trace = result.search
        if trace is not None and trace.sensitivity is not None and validation.comparison is not None:
            validation = replace(validation, comparison=with_sensitivity(validation.comparison, trace.sensitivity.sqnr))
        if trace is not None and trace.search_validation is not None:
            validation = _with_fold_outputs(validation, trace.search_validation)
        names = frozenset(map(str, result.saturated_tensors))
        return replace(result, validation=replace(validation, saturated_tensors=names))

    def _misses_target(self, built: BuiltModel, validation: Validation) -> bool:
        """Return True if an output misses the target on the hold-out, or nearly does and misses it in the calibration.

        A small hold-out may have none of the samples with large errors, and ranges fit the calibration samples. An
        output below the target on these is therefore below it on others too.
        """
        target, worst, calibration = validation.target_sqnr, validation.worst_sqnr, self.inputs.data.calibration
        if validation.misses_target:
            return True
        if validation.bounds or target is None or worst is None or calibration is None or worst >= target + CLOSE_DB:
            return False
        meter = OutputMeter(self.inputs.source, calibration.spread_feeds(REPAIR_SAMPLES), target)
        return meter.worst_sqnr(built.model) < target

    def _choose_algorithms(self, workspace: Workspace, min_sqnr: float) -> tuple[Workspace, RepairTrace]:
        """Return the workspace with the algorithms that bring its plan closer to a bound, before a search for it."""
        workspace = _keep_default_build(workspace)  # the search starts with the same plan
        repaired, trace = repair_plan(self._request(workspace, workspace.build(workspace.state.plan), min_sqnr, None))
        if not any(step.kept for step in trace.steps):
            return workspace, trace
        improved = replace(repaired.workspace, state=replace(repaired.workspace.state, plan=repaired.plan))
        return _keep_default_build(improved, repaired.built), trace

    def _repaired_result(self, repaired: RepairedPlan, repair: RepairTrace) -> Result:
        workspace, is_interrupted = repaired.workspace, repair.stop_reason == "interrupt"
        trace = SearchTrace(
            minimize="macs",
            plan=repaired.plan,
            interrupted=is_interrupted,
            plans=repair.plans,
            cost=repaired.cost,
            repair=repair,
        ).with_candidates(repaired.changed_tensors)
        result = make_result(
            self.inputs.source, self.inputs.prepared, workspace.state, repaired.built, trace, workspace.stats
        )
        result = self._validated(self.inputs.with_integer_types(result), workspace.state)
        if repair.used_holdout and result.validation is not None:
            result = replace(result, validation=replace(result.validation, reuses_samples=True))
        return result

    def _request(
        self, workspace: Workspace, built: BuiltModel, target_sqnr: float, default_sqnr: float | None
    ) -> RepairRequest:
        inputs, data = self.inputs, self.inputs.data
        names = inputs.settings.algorithms
        return RepairRequest(
            source=inputs.source,
            prepared=inputs.prepared,
            workspace=workspace,
            built=built,
            target_sqnr=target_sqnr,
            default_sqnr=default_sqnr,
            holdout_meter=lambda: self._holdout_meter,
            calibration=data.calibration,
            search_samples=data.dataset if data.calibration is None else data.calibration,
            has_stats=data.stats is not None,
            calibrate=partial(self.calibrate, full_histograms=True),
            disabled_algorithms=frozenset(name.removeprefix(NEGATION) for name in names if name.startswith(NEGATION)),
            budget=self._budget,
            folds=data.fold_count,
            progress=inputs.progress,
        )

    @cached_property
    def _holdout_meter(self) -> OutputMeter:
        """Meter of the samples that a validation without bounds measures."""
        formats.shared_runner(self.inputs.source, "source").free_session(observing=True, only_large=False)
        formats.release_runners("prepared")  # the weights need not be in two sessions
        holdout, limit = self.inputs.data.validation_set, MAX_UNBOUNDED_SAMPLES
        samples = self.inputs.data.dataset if holdout is None else holdout.samples(limit)
        return OutputMeter(self.inputs.source, samples.spread_feeds(limit), DEFAULT_MIN_SQNR)


def _change_without_best(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the change of a squared error in dB without the sample that gains most, infinite without errors of others.

    One uncertain sample may cause a gain. The others must not lose more than that without it.
    """
    pairs = [*zip(before, after, strict=True)]
    most = max(old - new for old, new in pairs)
    others = [(old, new) for old, new in pairs if old - new < most]
    old_error, new_error = (sum(errors) for errors in zip(*others, strict=True)) if others else (0.0, 0.0)
    if old_error > 0 < new_error:
        return 10 * math.log10(new_error / old_error)
    return -math.inf if new_error < old_error else math.inf


def _keep_default_build(workspace: Workspace, built: BuiltModel | None = None) -> Workspace:
    """Return the workspace with a function that builds the model of its plan only once, or never if it is `built`."""
    default, build = workspace.state.plan, workspace.build
    kept = [] if built is None else [built]

    def build_or_reuse(plan: Plan) -> BuiltModel:
        if plan is not default:  # plans of TensorFlow models are not hashable
            return build(plan)
        if not kept:
            kept.append(build(plan))
        return kept[0]

    return replace(workspace, build=build_or_reuse)


def _with_fold_outputs(validation: Validation, by_folds: Validation) -> Validation:
    """Return the validation with the outputs that were measured by folds.

    The ranges of the final model come from all samples, so that its own figures on them are too good. They count only
    if the model cannot be measured or is worse than its folds.
    """
    measured = validation.comparison
    if by_folds.folds <= 1 or measured is None or by_folds.comparison is None or validation.failures:
        return validation
    outputs = by_folds.comparison.outputs
    comparison = replace(measured, outputs=outputs, samples=by_folds.comparison.samples)
    return replace(validation, comparison=comparison, reuses_samples=by_folds.reuses_samples, folds=by_folds.folds)
