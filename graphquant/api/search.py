"""The cheapest plan that meets bounds: blame, choice and measurement put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant import formats
from graphquant.analysis import match_sites
from graphquant.analysis.compare import with_sensitivity
from graphquant.analysis.validation import measure_tensor_sizes
from graphquant.calibration import estimate_footprint
from graphquant.errors import UsageError
from graphquant.ir import Model, TensorRef
from graphquant.numerics import DynamicQParams
from graphquant.optimize import (
    FLOAT_CANDIDATE,
    RULE_CANDIDATE,
    WIDE_ACTIVATION_BITS,
    PlanQuality,
    SelectionResult,
    Sensitivity,
    byte_costs,
    mac_costs,
    make_candidate_plans,
    make_scale_groups,
    measure_sensitivity,
    search_cheapest_plan,
)
from graphquant.quantize import Plan, Skip
from graphquant.quantize.rewrite import InsertedPair
from graphquant.utils.progress import stage_progress

if TYPE_CHECKING:
    from graphquant.analysis.validation import Bounds, Validation
    from graphquant.calibration.holdout import HoldOut
    from graphquant.ir import Use
    from graphquant.numerics import QParams
    from graphquant.optimize import ScaleGroup
    from graphquant.quantize import Site
    from graphquant.utils.progress import Progress

    ValidateModel = Callable[[Model], Validation]
    OpId = tuple[str, str]


# Plans drawn anew in part, and what became of their sites.


def replace_sites(
    plan: Plan, replacements: Mapping[int, Site | None], rule: str, reason_at: Callable[[int], str]
) -> Plan:
    """The plan with other sites at these positions, or none: what is left float there is a skip.

    Args:
        plan: The plan.
        replacements: By position what is there now, None for float.
        rule: The rule that did that.
        reason_at: Gives the reason, by position.
    """
    sites, skips = [], list(plan.skips)
    for index, site in enumerate(plan.sites):
        if index not in replacements:
            sites.append(site)
            continue
        replacement = replacements[index]
        if replacement is None:
            skips.append(Skip(tensor=site.tensor, uses=site.uses, rule=rule, reason=reason_at(index)))
        else:
            sites.append(replace(replacement, rule=rule, why=reason_at(index)))
    return replace(plan, sites=tuple(sites), skips=tuple(skips))


def insertions_by_site(plan: Plan, insertions: Sequence[InsertedPair]) -> dict[int, InsertedPair]:
    """What was inserted for each site of the plan, by position; not the copies that the solver made."""
    site_indices = {(site.tensor, site.uses): index for index, site in enumerate(plan.sites)}
    indexed_insertions = (
        (site_indices.get((insertion.site.tensor, insertion.site.uses)), insertion) for insertion in insertions
    )
    return dict(sorted((index, insertion) for index, insertion in indexed_insertions if index is not None))


# What each tensor of a plan adds to the outputs in each of the ways that it may be quantized.

MakeModel = Callable[[Plan], tuple[Model, Sequence[InsertedPair]]]
CandidateErrors = dict[int, dict[str, float]]
"""By position of a site and by way what it adds alone to the outputs, as a share of these."""

UNKNOWN_ERROR = 1.0
"""What a site adds of which no run tells it: so much that it is the first to be left float."""

MAX_ERROR_RATIO = 0.95
"""A way that is not another's must leave less of the error than that."""


class SensitivityTrials:
    """Blame of plans in which all sites have one way each.

    Attributes:
        interrupted: Whether Ctrl-C ended it.
        measured_sites: The sites, by position, of which runs told what they add.
    """

    def __init__(self, prepared: Model, search_set: HoldOut, progress: Progress | None) -> None:
        """`prepared` has the float weights as the plans quantize them; `search_set` are the samples of the search."""
        self._prepared, self._search_set, self._progress = prepared, search_set, progress
        self._runner = formats.format_module(prepared.format).create_runner(prepared)
        self._runs = 0.0
        self.interrupted = False
        self.measured_sites: frozenset[int] = frozenset()

    def runs_per_site(self, errors: CandidateErrors) -> float:
        """How many runs there were for each site."""
        return self._runs / max(len(errors), 1)

    def measure_candidates(
        self, plan: Plan, rules_model: Model, insertions: Sequence[InsertedPair], make_model: MakeModel
    ) -> tuple[CandidateErrors, dict[str, Plan]]:
        """What each site adds in each of its ways, and the plan of each way; until Ctrl-C, which `interrupted` tells.

        Args:
            plan: What the rules make.
            rules_model: The model of that plan.
            insertions: What it has of it.
            make_model: Makes the model of a plan, with what was inserted.

        Raises:
            ModelError: A model cannot be run.
        """
        rules_insertions = insertions_by_site(plan, insertions)
        measured_errors = self.measure_errors(rules_model, rules_insertions, rules_insertions)
        self.measured_sites = frozenset(measured_errors)
        errors: CandidateErrors = {
            index: {RULE_CANDIDATE: measured_errors.get(index, UNKNOWN_ERROR)} for index in rules_insertions
        }
        candidate_plans = make_candidate_plans(self._prepared, plan)
        earlier_insertions = [rules_insertions]
        for name, candidate_plan in candidate_plans.items():
            if self.interrupted:
                break
            changed_sites = [index for index in rules_insertions if candidate_plan.sites[index] != plan.sites[index]]
            if name == f"{WIDE_ACTIVATION_BITS} bits":
                measured_errors = {
                    i: errors[i][RULE_CANDIDATE] * 4.0 ** (plan.sites[i].scheme.type.bits - WIDE_ACTIVATION_BITS)
                    for i in changed_sites
                }
            else:
                model, candidate_insertions = make_model(candidate_plan)
                insertions_at = insertions_by_site(candidate_plan, candidate_insertions)
                untried = [
                    i
                    for i in changed_sites
                    if i in insertions_at
                    and not any(_have_equal_params(insertions_at[i], earlier.get(i)) for earlier in earlier_insertions)
                ]
                measured_errors = self.measure_errors(model, insertions_at, untried) if untried else {}
                earlier_insertions.append(insertions_at)
            for index, error in measured_errors.items():
                if error < MAX_ERROR_RATIO * errors[index][RULE_CANDIDATE]:
                    errors[index][name] = error
        return errors, candidate_plans

    def measure_errors(
        self, quantized_model: Model, sites: Mapping[int, InsertedPair], indices: Collection[int]
    ) -> dict[int, float]:
        """What each of the sites `indices` adds to the outputs of `quantized_model`, by position, of those where that is known.

        What is in a graph that nothing runs, as the copies in a SavedModel, adds nothing.

        Raises:
            ModelError: A model cannot be run.
        """
        ops_by_site = {
            index: [quantizing_op(quantized_model, output) for output in sites[index].outputs] for index in indices
        }
        sensitivity = measure_sensitivity(
            quantized_model,
            match_sites(self._prepared, quantized_model),
            self._search_set.samples(),
            inputs={input_spec.name: input_spec.name for input_spec in self._runner.inputs},
            batch_independent=self._runner.batch_independent
            and estimate_footprint(self._prepared, batch_independent=True).elements_per_sample is not None,
            only={op_id for op_ids in ops_by_site.values() for op_id in op_ids},
            progress=stage_progress(self._progress, "blaming"),
        )
        self._runs += sensitivity.runs
        self.interrupted |= sensitivity.interrupted
        errors = {op_id: error for op_id, error in sensitivity.errors.items() if math.isfinite(error)}
        live_graphs = {*quantized_model.reachable_graphs()}
        errors |= {op_id: 0.0 for op_ids in ops_by_site.values() for op_id in op_ids if op_id[0] not in live_graphs}
        return {
            index: sum(errors[op_id] for op_id in op_ids)
            for index, op_ids in ops_by_site.items()
            if errors.keys() >= set(op_ids)
        }


def quantizing_op(quantized_model: Model, output: TensorRef) -> tuple[str, str]:
    """The op that quantizes, whose result `output` is, perhaps in another view."""
    graph = quantized_model.graphs[output.graph]
    if graph.op(output.op).kind == "reshape":
        output = graph.slots(output.op)[0] or output
    return output.graph, output.op


def _have_equal_params(first: InsertedPair, second: InsertedPair | None) -> bool:
    """Whether two were given the same scales."""
    return second is not None and _params_key(first.params) == _params_key(second.params)


def _params_key(params: QParams | DynamicQParams) -> object:
    if isinstance(params, DynamicQParams):
        return params
    return params.type, params.axis, np.asarray(params.scale).tobytes(), np.asarray(params.zero_point).tobytes()


SEARCH_RULE = "search"
"""The rule that sites are left by, or changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSearchResult:
    """A plan that was searched for.

    Attributes:
        plan: The plan, in which sites that are left float are skips with their reason, and others say theirs.
        trace: What the search did.
        search_validation: The check of the plan on the samples of the search.
        runs_per_site: How many runs each site took in all, for its blame and for measuring plans.
        float_tensors: What is left float, with the signal to noise in decibels that it alone leaves at the outputs.
        changed_tensors: What is quantized otherwise than rules want, with the way.
        site_errors: By position in `plan` what sites add alone to the outputs, as a share of these, if known.
    """

    plan: Plan
    trace: SelectionResult
    search_validation: Validation
    runs_per_site: float
    float_tensors: Mapping[TensorRef, float | None]
    changed_tensors: Mapping[TensorRef, str]
    site_errors: Mapping[int, float] = field(default_factory=dict)

    @property
    def bounds_met(self) -> bool:
        """Whether the samples of the search show that the bounds are met."""
        return not self.search_validation.failures and not self.search_validation.caveats


def search_plan(
    prepared: Model,
    plan: Plan,
    make_model: MakeModel,
    validate: ValidateModel,
    search_set: HoldOut,
    bounds: Bounds,
    *,
    optimize: str,
    costs: Mapping[OpId, float] | None = None,
    fixed_uses: Collection[Use] = (),
    progress: Progress | None,
) -> PlanSearchResult:
    """Looks for the cheapest ways of the sites of `plan` so that `bounds` are met.

    Args:
        prepared: The float model as the plan names it.
        plan: What the rules make.
        make_model: Makes the model of a plan, with what was inserted.
        validate: Checks such a model on the samples of the search.
        search_set: These samples.
        bounds: What is to be met.
        optimize: What to spend least of: "macs" or "size".
        costs: What each op that multiplies costs in float, if it is something else.
        fixed_uses: The first use of each site that stays as it is.
        progress: Is told how far the work is.

    Raises:
        DataError: A sample is not what it should be.
        ModelError: A model cannot be run.
        UsageError: A bound is on something that no output has.
    """
    rules_model, insertions = make_model(plan)
    rules_validation = validate(rules_model)
    if rules_validation.unmeasurable_bounds:
        raise UsageError(
            f"The bounds cannot be measured: {'; '.join(rules_validation.unmeasurable_bounds)}. Leave out those."
        )
    unchanged = PlanSearchResult(
        plan=plan,
        trace=_empty_trace(rules_validation),
        search_validation=rules_validation,
        runs_per_site=0.0,
        float_tensors={},
        changed_tensors={},
    )
    if rules_validation.confirmed or rules_validation.comparison is None or not insertions:
        return unchanged
    trials = SensitivityTrials(prepared, search_set, progress)
    errors, candidate_plans = trials.measure_candidates(plan, rules_model, insertions, make_model)
    if trials.interrupted:
        return replace(
            unchanged, trace=replace(unchanged.trace, interrupted=True), runs_per_site=trials.runs_per_site(errors)
        )
    fixed_sites = [index for index, site in enumerate(plan.sites) if site.uses[0] in fixed_uses]
    op_groups = make_scale_groups(prepared, plan, sorted(errors), errors, fixed_sites)
    drafts = _CandidatePlans(plan=plan, candidate_plans=candidate_plans, groups=op_groups, errors=errors, bounds=bounds)
    validations = {(0,) * len(op_groups): rules_validation}

    def validate_choice(chosen: tuple[int, ...]) -> PlanQuality:
        if chosen not in validations:
            validations[chosen] = validate(make_model(drafts.build_plan(chosen))[0])
        validation = validations[chosen]
        return PlanQuality(met=validation.confirmed, sqnr=_worst_confirmed_sqnr(validation))

    if costs is None:
        by_size = optimize == "size"
        costs = (
            byte_costs(prepared)
            if by_size
            else mac_costs(prepared, measure_tensor_sizes(prepared, search_set.samples()))
        )
    trace = search_cheapest_plan(
        op_groups, costs, validate_choice, target_sqnr=bounds.min_sqnr, progress=stage_progress(progress, "searching")
    )
    changed_candidates = drafts.changed_candidates(trace.selection)
    quantized = [i for i in range(len(plan.sites)) if changed_candidates.get(i) != FLOAT_CANDIDATE]
    validation_runs = 2 * len(validations) * search_set.samples().count / len(errors)
    return PlanSearchResult(
        plan=drafts.build_plan(trace.selection),
        trace=trace,
        search_validation=validations[trace.selection],
        runs_per_site=trials.runs_per_site(errors) + validation_runs,
        float_tensors={
            plan.sites[i].tensor: _error_to_db(errors[i][RULE_CANDIDATE])
            for i, candidate in changed_candidates.items()
            if candidate == FLOAT_CANDIDATE
        },
        changed_tensors={
            plan.sites[i].tensor: candidate
            for i, candidate in changed_candidates.items()
            if candidate != FLOAT_CANDIDATE
        },
        site_errors={
            new_index: errors[i][changed_candidates.get(i, RULE_CANDIDATE)]
            for new_index, i in enumerate(quantized)
            if i in trials.measured_sites
        },
    )


def attach_sensitivity(
    validation: Validation, search_result: PlanSearchResult, quantized_model: Model, insertions: Sequence[InsertedPair]
) -> Validation:
    """The check of the plan that was found with what each quantized tensor costs the outputs alone, most first.

    Where several ops quantize one tensor, each has what all of them cost.

    Args:
        validation: The check.
        search_result: What the search did.
        quantized_model: The model of its plan.
        insertions: What that has of it.
    """
    if validation.comparison is None or not search_result.site_errors:
        return validation
    errors = {
        quantizing_op(quantized_model, output): search_result.site_errors[index]
        for index, insertion in insertions_by_site(search_result.plan, insertions).items()
        if index in search_result.site_errors
        for output in insertion.outputs
    }
    sensitivity = Sensitivity(errors=errors, runs=0, samples=0)
    return replace(validation, comparison=with_sensitivity(validation.comparison, sensitivity.sqnr))


def _empty_trace(rules_validation: Validation) -> SelectionResult:
    """What is found without a search."""
    return search_cheapest_plan(
        [], {}, lambda _: PlanQuality(met=rules_validation.confirmed, sqnr=0.0), target_sqnr=None
    )


def _worst_confirmed_sqnr(validation: Validation) -> float:
    """The SQNR that the worst output has for sure, dB; -1 where there is none."""
    outputs = () if validation.comparison is None else validation.comparison.outputs
    sqnrs = [output.sqnr if output.sqnr_lower_bound is None else output.sqnr_lower_bound for output in outputs]
    return min((sqnr for sqnr in sqnrs if sqnr is not None), default=-1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CandidatePlans:
    """Plans in the ways that were chosen.

    Attributes:
        plan: What the rules make.
        candidate_plans: The plan of each other way.
        groups: The sites that are chosen for together.
        errors: What each site adds in each of its ways.
        bounds: What is to be met.
    """

    plan: Plan
    candidate_plans: Mapping[str, Plan]
    groups: Sequence[ScaleGroup]
    errors: CandidateErrors
    bounds: Bounds

    def changed_candidates(self, chosen: Sequence[int]) -> dict[int, str]:
        """The sites, by position, that are to be other than rules want, with their ways."""
        named_groups = (
            (group, group.candidates[candidate].name) for group, candidate in zip(self.groups, chosen, strict=True)
        )
        return {
            index: name
            for group, name in named_groups
            for index in group.sites
            if name == FLOAT_CANDIDATE or (name != RULE_CANDIDATE and name in self.errors[index])
        }

    def build_plan(self, chosen: Sequence[int]) -> Plan:
        """The plan."""
        changed = self.changed_candidates(chosen)
        replacements = {
            index: None if candidate == FLOAT_CANDIDATE else self.candidate_plans[candidate].sites[index]
            for index, candidate in changed.items()
        }
        return replace_sites(self.plan, replacements, SEARCH_RULE, lambda index: self._reason(index, changed[index]))

    def _reason(self, index: int, candidate: str) -> str:
        errors = self.errors[index]
        rules_db, candidate_db = _error_to_db(errors[RULE_CANDIDATE]), _error_to_db(errors.get(candidate, 0.0))
        sensitivity_note = "" if rules_db is None else f"; alone it leaves {rules_db:.1f} dB at the outputs"
        if candidate == FLOAT_CANDIDATE:
            return f"the search left it float for {self.bounds}{sensitivity_note}"
        improvement = "" if candidate_db is None or not sensitivity_note else f", and {candidate_db:.1f} dB so"
        return f"the search gave it {candidate} for {self.bounds}{sensitivity_note} as the rules say{improvement}"


def _error_to_db(error: float) -> float | None:
    return -10 * math.log10(error) if error else None
