"""Repair of a plan whose outputs miss a target: the cheapest changes first, float blocks last.

The steps, in the order of their price:

1. Other ranges: candidate observers for the whole plan.
2. Bias correction.
3. Cross-layer equalization and SmoothQuant, which may insert products.
4. AdaRound and GPTQ, which round the weights in another way.
5. Weights of 8 bits in place of fewer, as few as the target needs, those with the largest errors first.
6. Float ops whose values select rows of an output, such as those before a TopK.
7. Float blocks, chosen by their error and their multiply-adds.

Each step starts with the best plan of the previous one. Once the target is met, changes that it does not need are taken
back, the most expensive first. Work is predicted before it starts, so that the result does not depend on the machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from graphquant.analysis.measured_outputs import OutputMeter
from graphquant.analysis.range_report import activation_sqnr
from graphquant.analysis.validation import measure_tensor_sizes
from graphquant.calibration.data.dataset import SAMPLE_SPANS
from graphquant.errors import ModelError, UsageError
from graphquant.optimize.algorithms import (
    MAX_ALGORITHM_SAMPLES,
    POST_CALIBRATION_ALGORITHMS,
    PRE_CALIBRATION_ALGORITHMS,
    run_precalibration_algorithms,
)
from graphquant.optimize.bias_correction import BIAS_CORRECTION
from graphquant.optimize.blocks import Block, find_blocks, find_selecting_sites
from graphquant.optimize.candidates import (
    FLOAT_CANDIDATE,
    HIGH_PRECISION_CANDIDATES,
    MIN_LIMITED_SAMPLES,
    RULE_CANDIDATE,
    SENSITIVITY_SHARE,
    WIDER_WEIGHTS,
    Candidate,
    ScaleGroup,
    group_shared_scales,
    insertions_by_site,
    mac_costs,
    make_candidate_plans,
    make_scale_groups,
    replace_sites,
    switch_groups,
)
from graphquant.optimize.channel_scaling import CROSS_LAYER_EQUALIZATION, SMOOTHQUANT
from graphquant.optimize.search_budget import SearchBudget, SearchLimitError, StopReason
from graphquant.optimize.selection import (
    PlanQuality,
    Selection,
    choose_selection,
    high_precision_ops,
    search_cheapest_plan,
)
from graphquant.optimize.sensitivity import bisect_errors, error_to_db, share_errors
from graphquant.optimize.weight_rounding import ADAROUND, GPTQ, predict_rounding_work
from graphquant.rules import choose_algorithms

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.calibration.stats import Stats
    from graphquant.ir import Model, OpKey, TensorRef
    from graphquant.optimize.algorithm import PreCalibrationState
    from graphquant.optimize.algorithms import BuiltModel
    from graphquant.optimize.candidates import BuildModel, SearchFold
    from graphquant.quantize import Plan, Site
    from graphquant.utils import Progress

REPAIR_RULE = "repair"  # rule of the sites and skips that a repair changes

RANGES, FLOAT_BLOCKS = "ranges", "float"  # names of the steps that are no optimization algorithms

SCALING_ALGORITHMS = (CROSS_LAYER_EQUALIZATION, SMOOTHQUANT)  # they run together, because both need new statistics
ROUNDING_ALGORITHMS = (ADAROUND, GPTQ)

MIN_GAIN_DB = 0.5  # smallest gain of a change that is kept although the target is still missed
MIN_WEIGHT_SHARE_DB = 1.5  # smallest gain by float weights for which their rounding is optimized; it keeps a part of it
AIM_MARGIN_DB = 1.0  # dB above the target to aim at, because other samples have other errors
MAX_HOLDOUT_GAP_DB = 6.0  # more error in dB of the hold-out from which plans are measured on it
MAX_EXCESS_DB = 0.5  # dB above the aim from which a cheaper plan is searched for
MIN_SEARCH_PLANS = 4  # number of plans whose work must be left for that
MAX_ROUNDS = 3  # maximum number of searches, each with a higher aim, until the hold-out meets the target
MAX_BUILT_PLANS = 6  # maximum number of plans that a search builds, each with other estimates of the errors
REPAIR_SAMPLES = 16  # maximum number of samples on which plans are measured
MIN_PLANS = 30  # number of plans that can be measured, if need be on fewer samples
MAX_PLANS = 60  # number of plans at which the progress bar is full
MAX_SHIFT_DB = 3.0  # largest difference in dB of two ways to measure that is assumed to be the same for other plans

ALGORITHM_SHARE = 0.5  # share of the work for algorithms and ranges, so that float blocks can follow
MIN_SWITCHED_SHARE = 0.25  # share of the samples on which groups are measured if runs take longer than building a plan


class MeasurementLimits(NamedTuple):
    """Limits of the measurements with switched groups."""

    measurements: int  # maximum number
    samples: int  # minimum number of samples of each


BISECTION_LIMITS = MeasurementLimits(measurements=48, samples=2)  # for tensors with large errors
SEARCH_LIMITS = MeasurementLimits(measurements=24, samples=MIN_LIMITED_SAMPLES)  # for sets of float blocks
NOTABLE_ERROR_SHARE = 0.1  # share of the error of all blocks from which a block is split into its ops
UNMASKED_GAIN_DB = 3.0  # gain by float blocks from which other ranges are tried again, because they may help now
MAX_BLOCK_ERROR = 1e6  # error of a block that makes outputs NaN or infinite, as a share of the outputs' power


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairStep:
    """One kind of change that a repair tried."""

    change: str  # "ranges", "8-bit weights", "float", or the names of optimization algorithms
    targets: tuple[str, ...] = ()  # changed tensors, or float blocks
    sqnr: float  # SQNR in dB of the worst output with this change and those before it, on the search samples
    kept: bool  # True if the final plan has the change


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairTrace:
    """Result of a repair."""

    target_sqnr: float  # target in dB
    requested: bool  # True for a bound: algorithms were tried before the search for it
    # SQNR in dB of the worst output with the default plan: on the hold-out or the search samples, whichever is lower,
    # or for a bound on the search samples.
    default_sqnr: float
    sqnr: float  # the same with the final plan
    steps: tuple[RepairStep, ...] = ()
    float_blocks: tuple[str, ...] = ()  # first and last weighted op of each block that stays float
    blocks: int = 0  # number of blocks
    plans: int = 0  # number of measured plans
    stop_reason: StopReason | None = None  # limit or error that ended the search early, or None
    problem: str = ""  # the error, or ""
    used_holdout: bool = False  # True if plans were measured on samples of the hold-out, and not only the best of them

    @property
    def met(self) -> bool:
        """True if the hold-out and the search samples meet the target."""
        return self.sqnr >= self.target_sqnr


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A prepared model with its statistics, and the function that builds the quantized model of a plan."""

    state: PreCalibrationState
    stats: Stats | None
    build: BuildModel
    folds: tuple[SearchFold, ...] = ()  # folds of the data; none without a bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Changes of the default plan. Sites are indices in it, and workspaces keep them."""

    candidates: tuple[tuple[int, str], ...] = ()  # sites with other ranges or weight scales, and their candidate
    algorithms: tuple[str, ...] = ()  # optimization algorithms in addition to those of the rules
    float_sites: frozenset[int] = frozenset()
    float_blocks: tuple[str, ...] = ()  # names of the blocks of `float_sites`
    cost: float = 0.0  # multiply-adds of the float blocks as a share of all


class RepairedPlan(NamedTuple):
    """The plan of a repair with its quantized model, and the changed tensors with their candidate."""

    workspace: Workspace
    plan: Plan
    built: BuiltModel
    changed_tensors: Mapping[TensorRef, str]
    cost: float


class RepairRequest(NamedTuple):
    """A plan that misses its target, and the data and limits of its repair."""

    source: Model
    prepared: Model  # the prepared model, without changes by optimization algorithms
    workspace: Workspace  # that of the default plan
    built: BuiltModel  # the quantized model of the default plan
    target_sqnr: float  # target in dB
    # SQNR in dB of the worst output with the default plan, on the hold-out; None if a bound is searched for afterwards.
    # Then only algorithms are tried, and the search samples measure them.
    default_sqnr: float | None
    holdout_meter: Callable[[], OutputMeter]  # return the meter of the samples of the validation
    calibration: Dataset | None  # calibration samples; None if all ranges come from statistics or are fixed
    search_samples: Dataset  # samples on which plans are measured
    has_stats: bool  # True if statistics are given, which describe only the prepared model
    # Return the workspace of a state, with statistics for each observer.
    calibrate: Callable[[PreCalibrationState], Workspace]
    disabled_algorithms: frozenset[str]  # algorithms that must not run
    budget: SearchBudget
    folds: int  # number of folds whose models run rounding algorithms again in the search for a bound
    progress: Progress | None


def repair_plan(request: RepairRequest) -> tuple[RepairedPlan, RepairTrace]:
    """Search the cheapest change of a plan that meets the target on the hold-out. Ctrl-C keeps the best plan so far.

    Raises a DataError if a sample does not fit the model, and a ModelError if the float model cannot be run.
    """
    return _Repair(request).run()


DEFAULT_RECIPE = Recipe()


class _Repair:
    """State of a repair: the current recipe, and the steps so far."""

    def __init__(self, request: RepairRequest) -> None:
        self._request = request
        self._aim = request.target_sqnr + AIM_MARGIN_DB
        self._workspaces: dict[tuple[str, ...], Workspace] = {(): request.workspace}  # by the scaling algorithms
        self._measured: dict[tuple[Recipe, bool], float] = {}
        self._plans = 0  # number of plans that were measured before those, on the search samples
        self._last_built: tuple[Recipe, bool, BuiltModel] = (DEFAULT_RECIPE, False, request.built)
        many = MIN_PLANS * request.budget.costs.plan(REPAIR_SAMPLES) <= request.budget.remaining
        count = REPAIR_SAMPLES if many else SAMPLE_SPANS
        self._meter = OutputMeter(request.source, request.search_samples.spread_feeds(count), request.target_sqnr)
        self._search_meter = self._meter
        self._used_holdout = request.calibration is None  # True if the hold-out has samples that plans are measured on
        self._steps: list[RepairStep] = []
        self._blocks: tuple[Block, ...] = ()
        self._groups: list[ScaleGroup] = []
        self._costs: dict[OpKey, float] = {}
        self._algorithm_gains: dict[tuple[str, ...], float] = {}  # gain of the algorithms of recipes, in dB
        self._current, self._current_sqnr, self._start_sqnr = DEFAULT_RECIPE, -math.inf, -math.inf
        self._reserved_work = (
            (1 - ALGORITHM_SHARE) * request.budget.remaining if math.isfinite(request.budget.limit) else 0.0
        )
        self._final_work = 0.0  # work that is kept for the final plan
        self._judged: dict[Recipe, float] = {}  # SQNR in dB on the hold-out
        if request.default_sqnr is not None:
            self._judged[DEFAULT_RECIPE] = request.default_sqnr

    def run(self) -> tuple[RepairedPlan, RepairTrace]:
        """Try the steps until the hold-out meets the target, or a limit is reached."""
        stop_reason: StopReason | None = None
        problem = ""
        requested = self._request.default_sqnr is None
        try:
            try:
                self._search()
            except SearchLimitError as error:
                stop_reason = error.reason
            if not requested and stop_reason != "time":
                self._add_float_blocks()
        except (ModelError, UsageError) as error:  # such as a model with switches that the runtime rejects
            stop_reason, problem = "error", str(error)
        except KeyboardInterrupt:
            stop_reason = "interrupt"
        if requested:
            self._judged = {DEFAULT_RECIPE: self._start_sqnr, self._current: self._current_sqnr}
        elif stop_reason:
            self._judge_on_holdout(self._current)

        def rank(entry: Recipe) -> tuple[bool, float, bool]:
            """Order of recipes: those that meet the target by their cost, then the others by their SQNR."""
            is_met = self._judged[entry] >= self._request.target_sqnr
            return is_met, -entry.cost if is_met else self._judged[entry], entry == self._current

        recipe = max(self._judged, key=rank)
        changes: dict[str, Collection[object]] = {
            RANGES: [name for _, name in recipe.candidates if name != WIDER_WEIGHTS],
            WIDER_WEIGHTS: [name for _, name in recipe.candidates if name == WIDER_WEIGHTS],
        }

        def is_kept(step: RepairStep) -> bool:
            if step.change == FLOAT_BLOCKS:
                return step.targets == recipe.float_blocks
            return bool(changes.get(step.change, step.change in recipe.algorithms))

        steps = {(step.change, step.targets): step for step in self._steps}  # some are tried again with a higher aim
        trace = RepairTrace(
            target_sqnr=self._request.target_sqnr,
            requested=requested,
            default_sqnr=self._judged[DEFAULT_RECIPE],
            sqnr=self._judged[recipe],
            steps=tuple(replace(step, kept=is_kept(step)) for step in steps.values()),
            float_blocks=recipe.float_blocks,
            blocks=len(self._blocks),
            plans=self._plans + len(self._measured),
            stop_reason=stop_reason,
            problem=problem,
            used_holdout=self._used_holdout,
        )
        plan, workspace = self._plan(recipe), self._workspace(recipe)
        names = {**dict(recipe.candidates), **dict.fromkeys(recipe.float_sites, FLOAT_CANDIDATE)}
        return RepairedPlan(
            workspace=workspace,
            plan=plan,
            built=self._build(recipe, quick=False),
            changed_tensors={workspace.state.plan.sites[index].tensor: name for index, name in names.items()},
            cost=recipe.cost,
        ), trace

    def _search(self) -> None:
        request = self._request
        if request.default_sqnr is not None:  # the final plan has to be built and validated, whatever the search does
            self._final_work = self._plan_work(DEFAULT_RECIPE)
            self._request.budget.charge(self._final_work)
        self._current_sqnr = self._start_sqnr = self._measure(DEFAULT_RECIPE)
        algorithm_steps = [lambda: self._try_algorithms((BIAS_CORRECTION,)), self._try_scaling, self._try_rounding]
        if request.default_sqnr is None:
            while algorithm_steps and self._current_sqnr < self._aim:
                algorithm_steps.pop(0)()
            return
        self._judged[DEFAULT_RECIPE] = min(request.default_sqnr, self._current_sqnr)
        # Ranges fit the calibration samples, so that the hold-out has more error.
        gap = self._current_sqnr - request.default_sqnr
        self._aim += max(gap, 0.0) if math.isfinite(gap) else 0.0
        if gap > MAX_HOLDOUT_GAP_DB:
            self._measure_on_holdout()
        self._try_ranges()
        steps = [*algorithm_steps, self._widen_weights, self._float_selection]
        steps += [self._float_hopeless_blocks, self._try_rounding]
        for _ in range(MAX_ROUNDS):
            while steps and self._current_sqnr < self._aim:
                steps.pop(0)()
            if self._current_sqnr < self._aim or self._current.float_sites:
                self._search_float_blocks()
            self._take_back()
            if self._last_built[:2] != (self._current, False):
                self._request.budget.charge(self._plan_work(self._current))
            if not self._adjust_aim(self._judge_on_holdout(self._current)):
                break

    def _adjust_aim(self, holdout_sqnr: float) -> bool:
        """Adjust the aim to the SQNR in dB on the hold-out, or measure on it. Return False if no search is needed."""
        excess, gap = holdout_sqnr - self._request.target_sqnr, self._current_sqnr - holdout_sqnr
        if excess >= 0 or self._current_sqnr == -math.inf:
            excess -= 2 * AIM_MARGIN_DB  # a plan chosen on the hold-out is worse on other samples
            is_costly = bool(self._current.float_blocks) and MAX_EXCESS_DB < excess < math.inf
            self._aim -= excess if is_costly else 0.0
            return is_costly and MIN_SEARCH_PLANS * self._plan_work(self._current) <= self._request.budget.remaining
        if gap > MAX_SHIFT_DB and self._meter is self._search_meter:
            self._measure_on_holdout()
        elif math.isfinite(gap):
            self._aim = max(self._request.target_sqnr + gap, self._aim) + AIM_MARGIN_DB
        return True

    def _measure_on_holdout(self) -> None:
        """Measure plans on the hold-out from here, because the search samples do not have its largest errors."""
        request, groups = self._request, self._groups
        self._request.budget.charge(request.budget.costs.plan(REPAIR_SAMPLES))
        self._meter = request.holdout_meter()
        self._used_holdout = True
        self._plans += len(self._measured)
        self._measured.clear()
        self._current_sqnr = self._meter.worst_sqnr(self._build(self._current, quick=False).model)
        self._aim = request.target_sqnr + AIM_MARGIN_DB
        on = [number for number, group in enumerate(groups) if self._current.float_sites.isdisjoint(group.sites)]
        if on:
            measure, limit = self._measure_switched(self._quantized_recipe(), groups, BISECTION_LIMITS)
            self._groups = _with_errors(groups, share_errors(bisect_errors(measure, [on], limit), self._noise(groups)))

    def _judge_on_holdout(self, recipe: Recipe) -> float:
        """Return the SQNR in dB on the hold-out, or on the search samples if it is lower there.

        A small hold-out may have none of the samples with large errors.
        """
        if recipe not in self._judged:
            built = self._build(recipe, quick=False)
            meters = self._request.holdout_meter(), self._search_meter
            self._judged[recipe] = min(meter.worst_sqnr(built.model) for meter in meters)
        return self._judged[recipe]

    # Plans and their quality

    def _workspace(self, recipe: Recipe) -> Workspace:
        return self._workspaces[tuple(name for name in recipe.algorithms if name in PRE_CALIBRATION_ALGORITHMS)]

    def _plan(self, recipe: Recipe, *, quick: bool = False) -> Plan:
        """Return the plan of a recipe; with `quick`, without the algorithms that run after calibration."""
        workspace = self._workspace(recipe)
        plan = workspace.state.plan
        replacements: dict[int, Site | None] = {}
        names = dict(recipe.candidates)
        if recipe.candidates:
            candidate_plans = make_candidate_plans(workspace.state.model, plan, self._request.search_samples)
            replacements |= {index: candidate_plans[name].sites[index] for index, name in recipe.candidates}
        if recipe.float_sites:
            # A site that takes the scale of another cannot remain without it, also where the solver skips it.
            for shared in group_shared_scales(plan, range(len(plan.sites))):
                if not recipe.float_sites.isdisjoint(shared):
                    replacements |= dict.fromkeys(shared)

        def reason_at(index: int) -> str:
            change = "its block stays float" if replacements[index] is None else f"chosen ({names[index]})"
            return f"{change}, so that the outputs reach {self._request.target_sqnr:g} dB"

        algorithms = choose_algorithms(plan.algorithms, recipe.algorithms)
        if quick:
            algorithms = tuple(name for name in algorithms if name not in POST_CALIBRATION_ALGORITHMS)
        changed = replace_sites(plan, replacements, REPAIR_RULE, reason_at)
        return replace(changed, algorithms=algorithms)

    def _build(self, recipe: Recipe, *, quick: bool) -> BuiltModel:
        if recipe == DEFAULT_RECIPE and not quick:
            return self._request.built
        last_recipe, was_quick, built = self._last_built
        if (last_recipe, was_quick) != (recipe, quick):
            built = self._workspace(recipe).build(self._plan(recipe, quick=quick))
            self._last_built = recipe, quick, built
        return built

    def _plan_work(self, recipe: Recipe, *, quick: bool = False) -> float:
        """Predict the work of building and measuring a plan."""
        plan, costs = self._plan(recipe, quick=quick), self._request.budget.costs
        algorithms = [name for name in plan.algorithms if name in POST_CALIBRATION_ALGORITHMS]
        rounding = sum(self._rounding_work(plan, name) for name in ROUNDING_ALGORITHMS if name in algorithms)
        return costs.plan(len(self._meter.feeds), len(algorithms)) + rounding

    def _rounding_work(self, plan: Plan, name: str) -> float:
        """Predict the work of a rounding algorithm."""
        samples = min(self._request.search_samples.count, MAX_ALGORITHM_SAMPLES) // 2
        model = self._request.workspace.state.model
        return predict_rounding_work(model, plan, samples, self._request.budget.costs.macs, name)

    def _is_affordable(self, work: float) -> bool:
        """Return True if a trial of other changes leaves enough work for float blocks."""
        return work <= self._request.budget.remaining - self._reserved_work

    def _measure(self, recipe: Recipe, *, quick: bool = False) -> float:
        """Measure the SQNR in dB of the worst output; a plan that quantizes nothing has minus infinity."""
        quick = quick or not any(name in POST_CALIBRATION_ALGORITHMS for name in self._plan(recipe).algorithms)
        key = recipe, quick
        if key not in self._measured:
            is_built = recipe == DEFAULT_RECIPE and not quick
            self._request.budget.charge(self._plan_work(recipe, quick=quick or is_built))
            built = self._build(recipe, quick=quick)
            self._measured[key] = self._meter.worst_sqnr(built.model) if built.insertions else -math.inf
            if self._request.progress is not None:
                self._request.progress("repairing", min(len(self._measured), MAX_PLANS), MAX_PLANS)
        return self._measured[key]

    def _estimate(self, recipe: Recipe) -> float:
        """Return the SQNR in dB of a plan from that without the algorithms that run after calibration.

        Their gain is nearly the same with other ranges and with some blocks in float, and they take most of the time.
        """
        # For a bound, each set of algorithms has one plan. An estimate never replaces a measurement.
        if self._request.default_sqnr is None or (recipe, False) in self._measured:
            return self._measure(recipe)
        gains = self._algorithm_gains
        if recipe.algorithms not in gains:
            gain = self._measure(recipe) - self._measure(recipe, quick=True)
            gains[recipe.algorithms] = gain if math.isfinite(gain) else 0.0
        if abs(gains[recipe.algorithms]) > MAX_SHIFT_DB:
            return self._measure(recipe)
        return self._measure(recipe, quick=True) + gains[recipe.algorithms]

    def _try(self, change: str, recipe: Recipe, targets: Sequence[object] = ()) -> bool:
        """Measure a recipe, and make it the current one if it gains enough. Return True if it does."""
        sqnr = self._estimate(recipe)
        self._steps.append(RepairStep(change=change, targets=tuple(map(str, targets)), sqnr=sqnr, kept=False))
        if sqnr < self._current_sqnr + MIN_GAIN_DB and not sqnr >= self._aim > self._current_sqnr:
            return False
        self._current, self._current_sqnr = recipe, sqnr
        return True

    # Steps

    def _try_ranges(self) -> None:
        """Try each candidate for all sites at once."""
        workspace, plan_work = self._workspaces[()], self._plan_work(self._current, quick=True)
        if workspace is self._request.workspace and self._request.calibration is not None:
            # The default plan may need no histograms.
            calibration_work = self._request.budget.costs.calibration(self._request.calibration.count)
            calibration_work = 0.0 if self._request.has_stats else calibration_work
            if not self._is_affordable(calibration_work + 2 * plan_work):
                return
            self._request.budget.charge(calibration_work)
            workspace = self._workspaces[()] = self._request.calibrate(workspace.state)
        plan = workspace.state.plan
        best = self._current
        for name, candidate_plan in make_candidate_plans(
            workspace.state.model, plan, self._request.search_samples
        ).items():
            if name in {*HIGH_PRECISION_CANDIDATES, WIDER_WEIGHTS} or not self._is_affordable(plan_work):
                continue
            changed = [index for index, site in enumerate(plan.sites) if candidate_plan.sites[index] != site]
            recipe = self._with_candidates(dict.fromkeys(changed, name))
            best = max(best, recipe, key=lambda entry: self._measure(entry, quick=True))
        if self._measure(best, quick=True) >= self._measure(self._current, quick=True) + MIN_GAIN_DB:
            self._try(RANGES, best, [plan.sites[index].tensor for index, _ in best.candidates])

    def _with_candidates(self, chosen: Mapping[int, str]) -> Recipe:
        """Return the current recipe with other candidates. Weights that have 8 bits already keep them."""
        widened = {index: name for index, name in self._current.candidates if name == WIDER_WEIGHTS}
        return replace(self._current, candidates=tuple(sorted({**chosen, **widened}.items())))

    def _widen_weights(self) -> None:
        """Give the weights of fewer bits with the largest errors 8 bits: the fewest weights that reach the aim."""
        state = self._workspace(self._current).state
        wide_plan = make_candidate_plans(state.model, state.plan, self._request.search_samples).get(WIDER_WEIGHTS)
        if wide_plan is None:
            return
        groups = sorted(self._find_groups(), key=lambda group: -group.candidates[0].error)
        sites = [
            index for group in groups for index in group.sites if wide_plan.sites[index] != state.plan.sites[index]
        ]

        def widened(count: int) -> Recipe:
            return self._with_candidates(dict(self._current.candidates) | dict.fromkeys(sites[:count], WIDER_WEIGHTS))

        least, most = 1, len(sites)
        while least < most:  # the SQNR grows with the number of widened weights
            count = (least + most) // 2
            least, most = (least, count) if self._estimate(widened(count)) >= self._aim else (count + 1, most)
        if sites:
            self._try(WIDER_WEIGHTS, widened(most), [state.plan.sites[index].tensor for index in sites[:most]])

    def _float_selection(self) -> None:
        """Keep the ops in float whose values select rows, if nothing else than exchanged rows misses the aim."""
        plan = self._plan(self._current)
        sites = find_selecting_sites(self._workspace(self._current).state.model, plan)
        if not sites or self._meter.compares_selections:  # then an exchanged row adds no error
            return
        costs, readers = self._op_costs(), {use[:2] for index in sites for use in plan.sites[index].uses}
        ops = [op for op in costs if op in readers]
        share = sum(costs[op] for op in ops) / (sum(costs.values()) or 1.0)
        names = tuple(dict.fromkeys(op[1] for op in (*ops[:1], *ops[-1:])))
        recipe = replace(self._current, float_sites=sites, float_blocks=(" to ".join(names),), cost=share)
        if self._estimate(recipe) >= self._aim:
            self._try_float(recipe)

    def _float_hopeless_blocks(self) -> None:
        """Keep the tensors in float whose error alone misses the aim. Behind them, no other change shows its gain."""
        max_error = 10 ** (-self._aim / 10)
        hopeless = {key for group in self._find_groups() if group.candidates[0].error > max_error for key in group.ops}
        before = self._current_sqnr
        self._try_float(self._with_float_blocks(self._current, hopeless))
        if self._current_sqnr > before + UNMASKED_GAIN_DB:
            self._try_ranges()

    def _with_float_blocks(self, recipe: Recipe, keys: Collection[OpKey]) -> Recipe:
        """Return a recipe with these float blocks. Tensors that other blocks compute or read stay quantized."""
        groups = [group for group in self._find_groups() if group.ops <= set(keys)]
        used = sorted({key for group in groups for key in group.ops})
        costs = self._block_costs()
        return replace(
            recipe,
            float_sites=frozenset(index for group in groups for index in group.sites),
            float_blocks=tuple(self._blocks[int(number)].name for _, number in used),
            cost=sum(costs[key] for key in used) / (sum(costs.values()) or 1.0),
        )

    def _quantized_recipe(self) -> Recipe:
        """Return the current recipe without float blocks."""
        return replace(self._current, float_sites=frozenset(), float_blocks=(), cost=0.0)

    def _op_costs(self) -> dict[OpKey, float]:
        """Return the multiply-adds of each op, in graph order."""
        if not self._costs:
            model = self._request.workspace.state.model
            self._costs = mac_costs(model, measure_tensor_sizes(model, self._request.search_samples))
        return self._costs

    def _block_costs(self) -> dict[OpKey, float]:
        """Return the multiply-adds of each block."""
        costs, keys = self._op_costs(), _block_keys(self._blocks)
        return {key: sum(costs.get(op, 0.0) for op in block.ops) for key, block in zip(keys, self._blocks, strict=True)}

    def _find_groups(self) -> list[ScaleGroup]:
        """Return the sites that share a scale, with the blocks that must be float before they can, and their errors.

        A tensor between two blocks stays quantized unless both are float. The errors are those of the plan when they
        are first needed, because scaled channels change them.
        """
        if not self._groups:
            model, plan = self._request.workspace.state.model, self._plan(DEFAULT_RECIPE, quick=True)
            built = self._build(DEFAULT_RECIPE, quick=True)
            self._blocks = find_blocks(model, plan, sorted(insertions_by_site(plan, built.insertions)))
            groups = group_by_block(model, plan, self._blocks)
            members: dict[OpKey, list[int]] = defaultdict(list)
            for number, group in enumerate(groups):
                members[min(group.ops)].append(number)
            by_block = [members[key] for key in sorted(members)]
            measure, limit = self._measure_switched(self._quantized_recipe(), groups, BISECTION_LIMITS)
            max_error, noise = 10 ** (-self._aim / 10), self._noise(groups)
            parts = bisect_errors(measure, by_block, limit, max_error)
            # Errors that miss the aim alone hide the differences of the others, so these are measured without them.
            if all(error <= max_error for error in share_errors(parts, noise).values()):
                parts = bisect_errors(measure, by_block, limit)
            errors = share_errors(parts, noise)
            # A whole block in float is an expensive answer to the error of one of its tensors.
            notable = NOTABLE_ERROR_SHARE * sum(errors.values())
            worst = {key for number, group in enumerate(groups) if errors[number] >= notable for key in group.ops}
            keyed = zip(_block_keys(self._blocks), self._blocks, strict=True)
            split = (split_block(model, plan, block) if key in worst else (block,) for key, block in keyed)
            self._blocks = tuple(chain.from_iterable(split))
            groups = group_by_block(model, plan, self._blocks)
            culprits = {key for number, group in enumerate(groups) if errors[number] > max_error for key in group.ops}
            others = [number for number, group in enumerate(groups) if not group.ops <= culprits]
            remaining = limit - 2 * len(parts)  # each split took two measurements
            if culprits and remaining > limit // 4:
                errors |= share_errors(bisect_errors(measure, [others], remaining), noise)
            self._groups = _with_errors(groups, errors)
        return self._groups

    def _noise(self, groups: Sequence[ScaleGroup]) -> dict[int, float]:
        """Estimate the rounding error of each group relative to its values, by number of the group.

        Where groups were only measured together, the noisier ones cause more of their error, and an int32 bias nearly
        none. Root mean squares, not squares, because the rest of the model amplifies some groups more than others.
        """
        recipe = self._quantized_recipe()
        plan, stats = self._plan(recipe, quick=True), self._workspace(recipe).stats
        pairs = self._build(recipe, quick=True).insertions
        noise = {pair.site.tensor: 2.0 ** (1 - pair.site.scheme.type.bits) for pair in pairs}  # 8 bits: 42 dB
        losses = activation_sqnr(pairs, stats.sketches if stats else {})
        noise |= {loss.tensor: 10 ** (-loss.sqnr / 20) for loss in losses}
        return {k: max(noise[plan.sites[index].tensor] for index in group.sites) for k, group in enumerate(groups)}

    def _measure_switched(
        self, recipe: Recipe, groups: Sequence[ScaleGroup], limits: MeasurementLimits
    ) -> tuple[Callable[[Collection[int]], float], int]:
        """Return a function that measures the error with only the given groups quantized, and a limit of its calls.

        If there is too little work left for as many calls as usual, fewer samples are measured, and then fewer groups.
        """
        plan, built = self._plan(recipe, quick=True), self._build(recipe, quick=True)
        costs = self._request.budget.costs
        model, sites = self._workspace(recipe).state.model, [group.sites for group in groups]
        # Few samples if a run takes long.
        share = costs.plan(0) / costs.switched(len(self._meter.feeds), 1, creates_session=False)
        feeds = self._meter.feeds_by_error[: math.ceil(len(self._meter.feeds) * min(max(share, MIN_SWITCHED_SHARE), 1))]
        samples = replace(
            self._request.search_samples, count=len(feeds), open_feeds=lambda start, stop: map(dict, feeds[start:stop])
        )
        self._request.budget.charge(costs.plan(samples.count))
        switches = switch_groups(model, plan, built, sites, samples, counts_scores=True)
        limit = min(limits.measurements // (1 + switches.size[2]), 2 * len(groups))
        work = SENSITIVITY_SHARE * self._request.budget.remaining
        share = work / (limit * costs.switched(*switches.size))
        if share < 1:
            samples = replace(samples, count=min(max(int(share * switches.size[0]), limits.samples), samples.count))
            switches = switch_groups(model, plan, built, sites, samples, counts_scores=True)
            limit = max(min(limit, int(work / costs.switched(*switches.size))), 1)

        def measure(on: Collection[int]) -> float:
            if not switches.is_measured(on):
                self._request.budget.charge(costs.switched(*switches.size))
            return min(switches.error(on), MAX_BLOCK_ERROR)

        return measure, limit

    def _untried_algorithms(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the algorithms that the current plan does not have, and that may run."""
        excluded = {*self._request.disabled_algorithms, *self._plan(self._current).algorithms}
        return tuple(name for name in names if name not in excluded)

    def _try_algorithms(self, names: Sequence[str]) -> None:
        """Try algorithms that run after calibration in addition to those of the current recipe."""
        names = self._untried_algorithms(names)
        if not names or self._request.calibration is None:
            return
        if not self._is_affordable(self._request.budget.costs.algorithm):
            return
        recipe = replace(self._current, algorithms=(*self._current.algorithms, *names))
        self._try(names[0], recipe)

    def _try_scaling(self) -> None:
        """Try cross-layer equalization and SmoothQuant, which change the model before calibration."""
        request, names = self._request, self._untried_algorithms(SCALING_ALGORITHMS)
        if not names or request.calibration is None or request.has_stats:
            return
        costs = request.budget.costs
        work, calibration = costs.algorithm * len(names), costs.calibration(request.calibration.count)
        if not self._is_affordable(work + calibration):
            return
        self._request.budget.charge(work)
        plan = request.workspace.state.plan_without_factors(request.workspace.state.plan)
        plan = replace(plan, algorithms=choose_algorithms(plan.algorithms, names))
        # A search for a bound keeps what is chosen here, and 1 dB of a plan far below it says little about others.
        validates = request.default_sqnr is None
        state = run_precalibration_algorithms(
            request.prepared, plan, request.calibration, has_stats=False, validates=validates
        )
        applied = {result.algorithm for result in state.results if result.applied}
        if applied.isdisjoint(names):
            return
        self._request.budget.charge(calibration)
        self._workspaces[names] = request.calibrate(state)
        recipe = replace(self._current, algorithms=(*names, *self._current.algorithms))
        first, *others = (name for name in names if name in applied)
        self._try(first, recipe)
        self._steps += [replace(self._steps[-1], change=name) for name in others]

    def _try_rounding(self) -> None:
        """Try AdaRound and GPTQ, unless the rounding of weights is a small part of the error."""
        plan = self._plan(self._current)
        names = [
            name
            for name in ROUNDING_ALGORITHMS
            # Each fold rounds again, because the weights fit their samples.
            if self._is_affordable(self._rounding_work(plan, name) * (1 + self._request.folds))
        ]
        if not names:
            return
        weights = frozenset(index for index, site in enumerate(plan.sites) if site.parameter)
        exact_weights = replace(self._current, float_sites=weights)
        potential = self._measure(exact_weights, quick=True) - self._measure(self._current, quick=True)
        if potential < MIN_WEIGHT_SHARE_DB:
            return
        for name in names:
            if self._current_sqnr < self._aim:
                self._try_algorithms((name,))

    def _search_float_blocks(self) -> None:
        """Keep the blocks in float that cost the fewest multiply-adds for the missing decibels."""
        base = self._quantized_recipe()
        self._request.budget.work -= self._final_work  # from here, the final plan is among those that are built
        self._final_work = 0.0
        groups, costs = self._find_groups(), self._block_costs()
        # The rest of the gap is by algorithms and by other samples, and nearly the same with more blocks in float.
        measure_error, _ = self._measure_switched(base, groups, SEARCH_LIMITS)
        on = [number for number, group in enumerate(groups) if self._current.float_sites.isdisjoint(group.sites)]
        offset = self._current_sqnr - error_to_db(measure_error(on))
        offset = min(max(offset, -MAX_SHIFT_DB), MAX_SHIFT_DB) if math.isfinite(offset) else 0.0

        def measure(selection: Selection) -> PlanQuality:
            on = [number for number, index in enumerate(selection) if not index]
            # Without any quantization there is no error, but nothing is gained either.
            sqnr = error_to_db(measure_error(on)) + offset if on else -math.inf
            return PlanQuality(met=sqnr >= self._aim, sqnr=sqnr)

        met_offset, missed_offset = -math.inf, math.inf  # of plans that met the aim, and that missed it
        for _ in range(MAX_BUILT_PLANS):
            result = search_cheapest_plan(groups, costs, measure, target_sqnr=self._aim)
            recipe = self._with_float_blocks(base, high_precision_ops(groups, result.selection))
            # The best plan so far still has to be built: with algorithms and, to know their gain, without them.
            gain = self._algorithm_gains.get(base.algorithms, math.inf)
            work = self._plan_work(base, quick=True) + (0.0 if abs(gain) <= MAX_SHIFT_DB else self._plan_work(base))
            if result.stop_reason is not None or work > self._request.budget.remaining:
                if math.isfinite(met_offset):
                    return
                self._request.budget.extend(work)
            self._try_float(recipe)
            missing = self._aim - self._estimate(recipe)
            if -MAX_EXCESS_DB <= missing <= 0 or not math.isfinite(missing):
                return
            if missing < 0 and (result.stop_reason is not None or 2 * work > self._request.budget.remaining):
                return  # the plan meets the aim, and too little work is left for a cheaper one
            if result.stop_reason is not None:
                raise SearchLimitError(result.stop_reason)
            met_offset = offset if missing <= 0 else met_offset
            missed_offset = offset if missing > 0 else missed_offset
            offset = step_between(offset - missing, met_offset, missed_offset)

    def _add_float_blocks(self) -> None:
        """Add float blocks by their estimated errors until the hold-out meets the target, if no other plan does.

        No work is left to measure these plans before, or the samples of the search lack the errors of the hold-out.
        """
        target, groups = self._request.target_sqnr, self._groups
        recipe, sqnr = self._current, self._judge_on_holdout(self._current)
        judged = dict(self._judged)
        for _ in range(MAX_ROUNDS):
            if not groups or max(self._judged.values()) >= target or not math.isfinite(sqnr):
                break
            self._used_holdout = True
            on = [group for group in groups if recipe.float_sites.isdisjoint(group.sites)]
            error = math.fsum(group.candidates[0].error for group in on)
            max_error = error * 10 ** ((sqnr - target - AIM_MARGIN_DB) / 10)
            selection = choose_selection(groups, self._block_costs(), max_error)
            if all(selection):  # nothing would be quantized
                break
            recipe = self._with_float_blocks(recipe, high_precision_ops(groups, selection))
            self._request.budget.extend(self._plan_work(recipe))  # at most three plans
            self._request.budget.charge(self._plan_work(recipe))
            sqnr = self._judge_on_holdout(recipe)
            self._steps.append(RepairStep(change=FLOAT_BLOCKS, targets=recipe.float_blocks, sqnr=sqnr, kept=False))
            self._current = recipe if sqnr >= target else self._current
        if max(self._judged.values()) < target:  # many float blocks would be no gain then
            self._judged = judged

    def _try_float(self, recipe: Recipe) -> None:
        """Make a recipe with float blocks the current one if it is better."""
        if not recipe.float_sites:
            return
        sqnr = self._estimate(recipe)
        self._steps.append(RepairStep(change=FLOAT_BLOCKS, targets=recipe.float_blocks, sqnr=sqnr, kept=False))
        if self._is_better(recipe, sqnr):
            self._current, self._current_sqnr = recipe, sqnr

    def _is_better(self, recipe: Recipe, sqnr: float) -> bool:
        """Return True if a recipe meets the aim at a lower cost than the current one, or is closer to the aim."""
        is_met, was_met = sqnr >= self._aim, self._current_sqnr >= self._aim
        if is_met and was_met:
            return recipe.cost < self._current.cost
        return is_met or (not was_met and sqnr > self._current_sqnr)

    def _take_back(self) -> None:
        """Remove the changes that the aim does not need, the most expensive first."""
        if self._current_sqnr < self._aim:
            return
        for algorithm in (*ROUNDING_ALGORITHMS, *SCALING_ALGORITHMS, BIAS_CORRECTION, RANGES):
            recipe = self._current
            if algorithm == RANGES:
                recipe = self._with_candidates({})
            else:
                dropped = SCALING_ALGORITHMS if algorithm in SCALING_ALGORITHMS else (algorithm,)
                recipe = replace(recipe, algorithms=tuple(name for name in recipe.algorithms if name not in dropped))
            if recipe != self._current and (sqnr := self._estimate(recipe)) >= self._aim:
                self._current, self._current_sqnr = recipe, sqnr


def step_between(value: float, low: float, high: float) -> float:
    """Return `value`, or the middle of the limits if it is outside of them, where steps would alternate."""
    return value if low < value < high else (low + high) / 2


def _block_keys(blocks: Sequence[Block]) -> list[OpKey]:
    """Return a key for each block, as if the block was a single op."""
    return [(FLOAT_BLOCKS, f"{number:06d}") for number in range(len(blocks))]


def split_block(model: Model, plan: Plan, block: Block) -> tuple[Block, ...]:
    """Split a block into its weighted ops, each with the tensors that it computes or reads first."""
    ops_by_site = {
        index: group.ops for group in make_scale_groups(model, plan, block.sites, {}) for index in group.sites
    }
    split: list[Block] = []
    remaining = list(block.sites)
    for op in sorted(block.ops):
        # Tensors that only weighted ops of other blocks touch go with the first op.
        own = [k for k in remaining if ops_by_site[k] and (op in ops_by_site[k] or not ops_by_site[k] & block.ops)]
        remaining = [k for k in remaining if k not in own]
        split += [Block(sites=tuple(own), ops=frozenset({op}), name=op[1])] if own else []
    # A tensor that no weighted op touches, such as a sum or the end of a sigmoid, costs no multiply-adds in float.
    split += [Block(sites=(index,), ops=frozenset(), name=plan.sites[index].tensor.op) for index in remaining]
    return tuple(split)


def group_by_block(model: Model, plan: Plan, blocks: Sequence[Block]) -> list[ScaleGroup]:
    """Group the sites that share a scale, with the keys of the blocks that compute or read them in place of ops."""
    keys = _block_keys(blocks)
    key_by_op = {op: key for key, block in zip(keys, blocks, strict=True) for op in block.ops}
    key_by_site = {index: key for key, block in zip(keys, blocks, strict=True) for index in block.sites}
    candidates = (
        Candidate(name=RULE_CANDIDATE, error=0.0),
        Candidate(name=FLOAT_CANDIDATE, error=0.0, high_precision=True),
    )
    groups = []
    for group in make_scale_groups(model, plan, sorted(key_by_site), {}):
        # The end of a block behind a float activation is quantized for its readers alone.
        block_keys = {key_by_op[op] for op in group.ops if op in key_by_op}
        block_keys = block_keys or {key_by_site[index] for index in group.sites}
        groups.append(ScaleGroup(sites=group.sites, ops=frozenset(block_keys), candidates=candidates))
    return groups


def _with_errors(groups: Sequence[ScaleGroup], errors: Mapping[int, float]) -> list[ScaleGroup]:
    """Return the groups with the errors of quantization, by number of the group."""
    first = {number: replace(groups[number].candidates[0], error=error) for number, error in errors.items()}
    return [
        replace(group, candidates=(first.get(number, group.candidates[0]), group.candidates[1]))
        for number, group in enumerate(groups)
    ]
