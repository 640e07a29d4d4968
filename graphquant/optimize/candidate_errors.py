"""Errors that each candidate of each site adds at the outputs, and plans with some sites replaced."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant import formats
from graphquant.analysis import match_sites
from graphquant.calibration import estimate_footprint, is_batch_independent
from graphquant.numerics import DynamicQParams
from graphquant.optimize.candidates import RULE_CANDIDATE, WIDE_ACTIVATION_BITS, make_candidate_plans
from graphquant.optimize.sensitivity import BATCH_SIZE, measure_sensitivity
from graphquant.quantize import Skip, SkipCode
from graphquant.utils.progress import stage_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from graphquant.calibration.holdout import HoldOut
    from graphquant.ir import Model, OpKey, TensorRef
    from graphquant.numerics import QParams
    from graphquant.optimize.algorithms import BuiltModel
    from graphquant.quantize import Plan, Site
    from graphquant.quantize.rewrite import InsertedPair
    from graphquant.utils.progress import Progress

    BuildModel = Callable[[Plan], BuiltModel]

CandidateErrors = dict[int, dict[str, float]]
"""Error that each candidate of a site adds at the outputs, as a share of their power, by index of the site and name."""

UNKNOWN_ERROR = 1.0
"""Error of a site that no run measures: so large that the site is the first to become float."""

MAX_ERROR_RATIO = 0.95
"""Error of a candidate relative to the rules' candidate, below which it is worth choosing."""


def replace_sites(
    plan: Plan, replacements: Mapping[int, Site | None], rule: str, reason_at: Callable[[int], str]
) -> Plan:
    """Return the plan with other sites at some indices. A site that is replaced by None becomes a skip.

    Args:
        plan: The plan.
        replacements: New sites by index.
        rule: Name to record as the rule of the new sites and skips.
        reason_at: Return the reason, by index.
    """
    sites, skips = [], list(plan.skips)
    for index, site in enumerate(plan.sites):
        replacement = replacements.get(index, site)
        if replacement is None:
            skips.append(
                Skip(tensor=site.tensor, uses=site.uses, rule=rule, reason=reason_at(index), code=SkipCode.OPTIMIZATION)
            )
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


class CandidateTrials:
    """Sensitivity analyses of plans in which all sites use one candidate each.

    Attributes:
        interrupted: True if Ctrl-C ended an analysis.
        measured_sites: Indices of the sites whose error was measured with the rules' candidate.
    """

    def __init__(self, prepared: Model, search_set: HoldOut, progress: Progress | None) -> None:
        """Analyze on `search_set`. `prepared` has the float weights that the plans quantize."""
        self._prepared, self._search_set, self._progress = prepared, search_set, progress
        self._runner = formats.format_module(prepared.format).create_runner(prepared)
        self._batch_independent = estimate_footprint(
            prepared, batch_independent=True
        ).elements_per_sample is not None and is_batch_independent(self._runner, search_set.samples(), BATCH_SIZE)
        self._runs = 0.0
        self.interrupted = False
        self.measured_sites: frozenset[int] = frozenset()

    def runs_per_site(self, errors: CandidateErrors) -> float:
        """Number of runs per site."""
        return self._runs / max(len(errors), 1)

    def measure_candidates(
        self, plan: Plan, rules_build: BuiltModel, build: BuildModel
    ) -> tuple[CandidateErrors, dict[str, Plan]]:
        """Measure the error of each candidate of each site until `interrupted`. Return the errors and the plans.

        Args:
            plan: The plan of the rules.
            rules_build: The quantized model of that plan.
            build: Build the quantized model of a plan.

        Raises:
            ModelError: A model cannot be run.
        """
        rules_pairs = insertions_by_site(plan, rules_build.insertions)
        measured = self.measure_errors(rules_build.model, rules_pairs, rules_pairs)
        self.measured_sites = frozenset(measured)
        errors: CandidateErrors = {i: {RULE_CANDIDATE: measured.get(i, UNKNOWN_ERROR)} for i in rules_pairs}
        candidate_plans = make_candidate_plans(self._prepared, plan)
        earlier_pairs = [rules_pairs]
        for name, candidate_plan in candidate_plans.items():
            if self.interrupted:
                break
            changed_sites = [i for i in rules_pairs if candidate_plan.sites[i] != plan.sites[i]]
            if name == f"{WIDE_ACTIVATION_BITS} bits":
                # Each bit halves the step, which divides the squared error by 4. A run would not tell more.
                measured = {
                    i: errors[i][RULE_CANDIDATE] * 4.0 ** (plan.sites[i].scheme.type.bits - WIDE_ACTIVATION_BITS)
                    for i in changed_sites
                }
            else:
                built = build(candidate_plan)
                pairs = insertions_by_site(candidate_plan, built.insertions)
                untried = [
                    i
                    for i in changed_sites
                    if i in pairs and not any(_have_equal_params(pairs[i], earlier.get(i)) for earlier in earlier_pairs)
                ]
                measured = self.measure_errors(built.model, pairs, untried) if untried else {}
                earlier_pairs.append(pairs)
            for index, error in measured.items():
                if error < MAX_ERROR_RATIO * errors[index][RULE_CANDIDATE]:
                    errors[index][name] = error
        return errors, candidate_plans

    def measure_errors(
        self, quantized_model: Model, pairs: Mapping[int, InsertedPair], indices: Collection[int]
    ) -> dict[int, float]:
        """Measure the error that each of the sites `indices` adds; sites whose error is unknown are omitted.

        A site in an unreachable graph, such as a copy of a function in a SavedModel, adds nothing.

        Raises:
            ModelError: A model cannot be run.
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
        self._runs += sensitivity.runs
        self.interrupted |= sensitivity.interrupted
        errors = {op_key: error for op_key, error in sensitivity.errors.items() if math.isfinite(error)}
        live_graphs = {*quantized_model.reachable_graphs()}
        errors |= {op_key: 0.0 for op_key in all_ops if op_key[0] not in live_graphs}
        return {
            index: sum(errors[op_key] for op_key in op_keys)
            for index, op_keys in ops_by_site.items()
            if errors.keys() >= set(op_keys)
        }


def _have_equal_params(first: InsertedPair, second: InsertedPair | None) -> bool:
    return second is not None and _params_key(first.params) == _params_key(second.params)


def _params_key(params: QParams | DynamicQParams) -> object:
    if isinstance(params, DynamicQParams):
        return params
    return params.type, params.axis, np.asarray(params.scale).tobytes(), np.asarray(params.zero_point).tobytes()
