"""The plan that loses least within so many bytes of weights."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant.analysis import match_sites
from graphquant.api.search import SensitivityTrials, insertions_by_site, quantizing_op, replace_sites
from graphquant.errors import UsageError
from graphquant.numerics import DynamicQParams, IntType
from graphquant.optimize import (
    FLOAT_CANDIDATE,
    RULE_CANDIDATE,
    Candidate,
    ScaleGroup,
    allocate_weight_bits,
    group_shared_scales,
    make_candidate_plans,
    make_scale_groups,
)
from graphquant.qdq import FAMILIES
from graphquant.utils.progress import stage_progress
from graphquant.utils.sizes import parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from graphquant.analysis.validation import Bounds, Validation
    from graphquant.api.search import MakeModel
    from graphquant.calibration.holdout import HoldOut
    from graphquant.ir import Model, TensorRef, Use
    from graphquant.quantize import Plan
    from graphquant.quantize.rewrite import InsertedPair
    from graphquant.utils.progress import Progress


MAX_BISECTIONS = 7
"""Plans that are measured at most to find the smallest that meets a bound."""

SIZE_BUDGET_RULE = "size-budget"
"""The rule that weights are left by, or changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeBudgetResult:
    """A plan that fits into so many bytes.

    Attributes:
        plan: The plan; weights that differ from what rules want say so.
        size: Bytes that all constants of the written model take.
        max_size: Bytes that they may take; None where they are to be as few as a bound allows.
        float_size: Bytes that they take in the float model.
        weights: The first use of each weight that was chosen for.
        candidates: What is other than rules want, with the way.
        estimated: Weights of which nothing tells what they lose; they count as much as their bits may lose at most.
    """

    plan: Plan
    size: int
    max_size: int | None
    float_size: int
    weights: frozenset[Use]
    candidates: Mapping[TensorRef, str]
    estimated: tuple[TensorRef, ...] = ()


def fit_size_budget(
    source: Model,
    prepared: Model,
    plan: Plan,
    make_model: MakeModel,
    search_set: HoldOut | None,
    budget: str,
    progress: Progress | None,
) -> SizeBudgetResult:
    """Chooses bits for each weight of `plan` so that all constants fit into `budget`.

    Args:
        source: The float model.
        prepared: The same as the plan names it.
        plan: What the rules make.
        make_model: Makes the model of a plan, with what was inserted.
        search_set: Samples on which to measure what each weight adds to the outputs; without them the error of the weight
            by itself is what counts.
        budget: Bytes, as "2MB", or a share of the float model's, as "25%".
        progress: Is told how far the work is.

    Raises:
        DataError: A sample is not what it should be.
        ModelError: A model cannot be run.
        UsageError: The budget is no size, or less than what weights take with the fewest bits; or the format keeps
            weights float.
    """
    max_size = _parse_size_budget(budget, model_constant_bytes(source))
    _check_families_store_integers(plan)
    chooser = _WeightBitsChooser(source, prepared, plan, make_model, search_set, progress)
    result = chooser.best_plan_within(max_size, f"a budget of {budget}")
    if result.size > max_size:
        raise UsageError(
            f"The constants of the model take {result.size:,} bytes with the fewest bits, and the budget is {max_size:,}."
            f" Give --size-budget {result.size} or more, or rules that quantize more of the weights."
        )
    return result


def minimize_size(
    source: Model,
    prepared: Model,
    plan: Plan,
    make_model: MakeModel,
    validate: Callable[[Model], Validation],
    search_set: HoldOut,
    bounds: Bounds,
    progress: Progress | None,
) -> SizeBudgetResult | None:
    """Chooses bits for each weight of `plan` so that constants take the fewest bytes with which `bounds` are met.

    Args:
        source: The float model.
        prepared: The same as the plan names it.
        plan: What the rules make.
        make_model: Makes the model of a plan, with what was inserted.
        validate: Checks such a model on the samples of the search.
        search_set: These samples.
        bounds: What is to be met.
        progress: Is told how far the work is.

    Returns:
        None where nothing smaller than what the rules make meets the bounds, or the format keeps weights float.

    Raises:
        DataError: A sample is not what it should be.
        ModelError: A model cannot be run.
    """
    if _families_with_float_weights(plan) or not make_candidate_plans(prepared, plan, small=True):
        return None
    rules_model = make_model(plan)[0]
    if not validate(rules_model).confirmed:
        return None
    report_stage = stage_progress(progress, "searching")
    best_result, failing_size, passing_size = None, -math.inf, model_constant_bytes(rules_model)
    try:
        chooser = _WeightBitsChooser(source, prepared, plan, make_model, search_set, progress)
        for bisection in range(MAX_BISECTIONS):
            size_limit = failing_size if math.isinf(failing_size) else (failing_size + passing_size) / 2
            result = chooser.best_plan_within(size_limit, f"{bounds}")
            if result.size >= passing_size:
                break
            if result.size <= failing_size:  # there is nothing between
                failing_size = size_limit
            elif validate(make_model(result.plan)[0]).confirmed:
                best_result, passing_size = replace(result, max_size=None), result.size
            else:
                failing_size = result.size
            if report_stage is not None:
                report_stage(bisection + 1, MAX_BISECTIONS)
            if math.isinf(failing_size):  # the fewest bits will do
                break
    except KeyboardInterrupt:
        return best_result
    return best_result


class _WeightBitsChooser:
    """The weights of a plan, with what each takes and loses in each of its ways."""

    def __init__(
        self,
        source: Model,
        prepared: Model,
        plan: Plan,
        make_model: MakeModel,
        search_set: HoldOut | None,
        progress: Progress | None,
    ) -> None:
        """As for `fit_size_budget`."""
        self._plan, self._make_model, self._float_size = plan, make_model, model_constant_bytes(source)
        candidates = {RULE_CANDIDATE: (plan, *make_model(plan))}
        candidates |= {
            name: (candidate_plan, *make_model(candidate_plan))
            for name, candidate_plan in make_candidate_plans(prepared, plan, small=True).items()
        }
        insertions = {
            name: insertions_by_site(candidate_plan, insertion)
            for name, (candidate_plan, _, insertion) in candidates.items()
        }
        rules_insertions = insertions[RULE_CANDIDATE]
        self._sites = [
            i
            for i, insertion in rules_insertions.items()
            if insertion.folded and plan.sites[i].scheme.observe.name != "bias"
        ]
        errors, self._estimated = dict[str, dict[int, float]](), set[int]()
        for name, (_, model, _) in candidates.items():
            errors[name], estimated = _weight_errors(
                prepared, model, insertions[name], self._sites, search_set, progress
            )
            self._estimated |= estimated
        on_integers = _weights_beside_quantized_inputs(prepared, plan, rules_insertions)
        self._groups = [
            _weight_group(prepared, plan, sites, insertions, errors, on_integers)
            for sites in group_shared_scales(plan, self._sites)
        ]
        self._candidate_plans = {name: candidate_plan for name, (candidate_plan, _, _) in candidates.items()}
        self._fixed_size = model_constant_bytes(candidates[RULE_CANDIDATE][1]) - sum(
            group.candidates[0].size for group in self._groups
        )

    def best_plan_within(self, max_size: float, reason: str) -> SizeBudgetResult:
        """The plan that loses least of those of `max_size` bytes, for `reason`, or if none is so small the smallest."""
        smallest_choice, weight_budget = allocate_weight_bits(self._groups, -math.inf), max_size - self._fixed_size
        while True:
            chosen = allocate_weight_bits(self._groups, weight_budget)
            chosen_by_group = list(zip(self._groups, chosen, strict=True))
            candidate_names = {
                i: group.candidates[candidate].name for group, candidate in chosen_by_group for i in group.sites
            }
            plan = _plan_with_candidates(self._plan, self._candidate_plans, candidate_names, reason)
            size = model_constant_bytes(self._make_model(plan)[0])
            if size <= max_size or chosen == smallest_choice:
                break
            weight_size = sum(group.candidates[candidate].size for group, candidate in chosen_by_group)
            weight_budget = weight_size - (size - max_size)  # what several share is counted for each, or for none
        sites = self._plan.sites
        return SizeBudgetResult(
            plan=plan,
            size=size,
            max_size=None if math.isinf(max_size) else int(max_size),
            float_size=self._float_size,
            weights=frozenset(sites[index].uses[0] for index in self._sites),
            candidates={sites[index].tensor: name for index, name in candidate_names.items() if name != RULE_CANDIDATE},
            estimated=tuple(sites[index].tensor for index in sorted(self._estimated)),
        )


def model_constant_bytes(model: Model) -> int:
    """Bytes that the constants of a model take, those of its bodies and functions too."""
    total = 0
    for name in model.reachable_graphs():
        for op in model.graphs[name].ops():
            is_constant = op.kind == "constant" or (
                op.kind == "input" and op.read_value is not None
            )  # old ONNX names both
            output = op.outputs[0] if is_constant and op.outputs else None
            if output is not None and output.shape is not None and output.dtype is not None:
                total += math.ceil(math.prod(dim or 0 for dim in output.shape) * _element_bits(output.dtype) / 8)
    return total


def _element_bits(dtype: str) -> int:
    """Bits of an element; of texts none, which are no weights."""
    digits = re.search(r"(\d+)", dtype)
    return 8 if dtype == "bool" else int(digits[1]) if digits else 0


def _parse_size_budget(budget: str, float_size: int) -> int:
    """What `budget` says in bytes."""
    percent = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*%\s*", budget)
    if percent:
        return int(float(percent[1]) / 100 * float_size)
    try:
        return parse_size(budget)
    except UsageError:
        raise UsageError(
            f"{budget[:40]!r} is no size budget. Write it in bytes, 2MB, or as a share of the float model's, 25%."
        ) from None


def _check_families_store_integers(plan: Plan) -> None:
    """Refuses families that store weights as floats."""
    float_families = _families_with_float_weights(plan)
    if float_families:
        raise UsageError(
            f"The ops of {float_families[0]} round weights that stay float in the file, which gets no smaller. Leave"
            " --size-budget out, or quantize the model as ONNX."
        )


def _families_with_float_weights(plan: Plan) -> list[str]:
    families = {site.scheme.family or "" for site in plan.sites if site.parameter}
    return sorted(name for name in families if not FAMILIES[name].stores_integer_weights)


def _weight_errors(
    prepared: Model,
    model: Model,
    insertions: Mapping[int, InsertedPair],
    weights: Sequence[int],
    search_set: HoldOut | None,
    progress: Progress | None,
) -> tuple[dict[int, float], set[int]]:
    """What each weight adds to the outputs, or to itself where there are no samples; and of which neither is known.

    Raises:
        KeyboardInterrupt: Not all are known.
    """
    quantized = [index for index in weights if index in insertions]
    if search_set is not None:
        trials = SensitivityTrials(prepared, search_set, progress)
        errors = trials.measure_errors(model, insertions, quantized)
        if trials.interrupted:
            raise KeyboardInterrupt
    else:
        local_sqnr = {(site.graph, site.op): site.local for site in match_sites(prepared, model).figures()}
        sqnr_by_site = {index: local_sqnr.get(quantizing_op(model, insertions[index].output)) for index in quantized}
        errors = {index: 10 ** (-sqnr / 10) for index, sqnr in sqnr_by_site.items() if sqnr is not None}
    estimated = {index: _estimate_weight_error(insertions[index]) for index in quantized if index not in errors}
    return {**errors, **estimated}, {*estimated}


def _estimate_weight_error(insertion: InsertedPair) -> float:
    """What a weight loses of itself by its bits alone, rather more than less: it is to keep them, if another can."""
    return (
        1.0
        if isinstance(insertion.params, DynamicQParams)
        else 4.0 ** (2 - _element_bits(insertion.params.type.container))
    )


def _weight_group(
    prepared: Model,
    plan: Plan,
    sites: Sequence[int],
    insertions: Mapping[str, Mapping[int, InsertedPair]],
    errors: Mapping[str, Mapping[int, float]],
    on_integers: Collection[int],
) -> ScaleGroup:
    """Weights of one scale, with the ways that all of them have; none that multiplies `on_integers` becomes float."""
    candidates = [
        Candidate(
            name=name,
            error=sum(errors[name][index] for index in sites),
            size=sum(_weight_bytes(prepared, plan, index, insertion[index]) for index in sites),
        )
        for name, insertion in insertions.items()
        if all(index in insertion for index in sites)
    ]
    if not set(sites) & set(on_integers):
        candidates.append(
            Candidate(
                name=FLOAT_CANDIDATE, error=0.0, size=sum(_weight_bytes(prepared, plan, index, None) for index in sites)
            )
        )
    return ScaleGroup(sites=tuple(sites), ops=frozenset(), candidates=tuple(candidates))


def _weights_beside_quantized_inputs(prepared: Model, plan: Plan, quantized: Collection[int]) -> set[int]:
    """Positions of sites beside an op that multiplies on a quantized activation."""
    op_groups = make_scale_groups(prepared, plan, sorted(quantized), {})
    ops = {op for group in op_groups for index in group.sites if not plan.sites[index].parameter for op in group.ops}
    return {index for group in op_groups if group.ops & ops for index in group.sites}


def _weight_bytes(prepared: Model, plan: Plan, index: int, insertion: InsertedPair | None) -> int:
    """Bytes of a weight, with its scales and zero points; in float for None."""
    output = prepared.output(plan.sites[index].tensor)
    count: int = math.prod(dim or 0 for dim in output.shape or ())
    float_bits = _element_bits(output.dtype or "")
    if insertion is None or isinstance(insertion.params, DynamicQParams):
        return count * float_bits // 8
    container_bits, scale_count = _element_bits(insertion.params.type.container), int(insertion.params.scale.size)
    return -(-count * container_bits // 8) - (-scale_count * container_bits // 8) + scale_count * float_bits // 8


def _plan_with_candidates(
    plan: Plan, candidate_plans: Mapping[str, Plan], candidate_names: Mapping[int, str], goal: str
) -> Plan:
    """The plan of the ways that were chosen."""
    replacements = {
        index: None if name == FLOAT_CANDIDATE else candidate_plans[name].sites[index]
        for index, name in candidate_names.items()
        if name != RULE_CANDIDATE
    }

    def reason_at(index: int) -> str:
        replacement = replacements[index]
        if replacement is None:
            return f"there is room for it in {goal}"
        dtype = replacement.scheme.type
        bits = f"{dtype.bits} bits" if isinstance(dtype, IntType) else dtype.name
        return f"of all weights it loses least with {bits} for {goal}"

    return replace_sites(plan, replacements, SIZE_BUDGET_RULE, reason_at)
