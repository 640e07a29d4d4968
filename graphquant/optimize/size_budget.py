"""Choice of weight bit widths that minimize the error within a size, and the size of a model's constants."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from graphquant.analysis.site_errors import match_sites
from graphquant.errors import UsageError
from graphquant.numerics import DynamicQParams, IntType
from graphquant.optimize.candidates import (
    FLOAT_CANDIDATE,
    RULE_CANDIDATE,
    BuildModel,
    Candidate,
    CandidateTrials,
    ScaleGroup,
    group_shared_scales,
    insertions_by_site,
    make_candidate_plans,
    make_scale_groups,
    quantizing_op,
    replace_sites,
)
from graphquant.optimize.selection import allocate_weight_bits
from graphquant.qdq import FAMILIES, FOLDED_FORM
from graphquant.utils.text import parse_size

if TYPE_CHECKING:
    from graphquant.calibration.holdout import HoldOut
    from graphquant.ir import Model, TensorRef, Use
    from graphquant.quantize import Plan
    from graphquant.quantize.rewrite import InsertedPair
    from graphquant.utils import Progress

MAX_EXAMINED_BYTES = 1 << 28  # size of all constants; onnxruntime makes up to four copies to tell how it runs each op
SIZE_BUDGET_RULE = "size-budget"  # rule of weights with a chosen bit width


class SizedPlan(NamedTuple):
    """Plan with chosen weight bit widths, bytes of all constants, and candidates of weights unlike the rules."""

    plan: Plan
    size: int
    candidates: Mapping[TensorRef, str]


class WeightBitsChooser:
    """Weights of a plan with the size and error of each of their candidates."""

    def __init__(
        self, prepared: Model, plan: Plan, build: BuildModel, search_set: HoldOut | None, progress: Progress | None
    ) -> None:
        """Measure the candidates on `search_set`; without samples, the error of the weight itself counts.

        Raises:
            KeyboardInterrupt: Ctrl-C. Without all errors no choice is possible.
            ModelError: A model cannot be run.
        """
        self._plan, self._build = plan, build
        samples = None if search_set is None else search_set.dataset
        self._candidate_plans = {RULE_CANDIDATE: plan, **make_candidate_plans(prepared, plan, samples, small=True)}
        models = {name: build(candidate_plan) for name, candidate_plan in self._candidate_plans.items()}
        plans = self._candidate_plans
        pairs = {name: insertions_by_site(plans[name], built.insertions) for name, built in models.items()}
        rules_pairs = pairs[RULE_CANDIDATE]
        sites = [i for i, pair in rules_pairs.items() if pair.folded and plan.sites[i].scheme.observe.name != "bias"]
        errors, estimated = dict[str, dict[int, float]](), set[int]()
        for name, built in models.items():
            measured = _measure_weight_errors(prepared, built.model, pairs[name], sites, search_set, progress)
            # Errors are estimated from the bits, and rather too high, so that other weights lose bits first.
            estimates = {
                i: 1.0 if isinstance(params, DynamicQParams) else 4.0 ** (2 - _element_bits(params.type.container))
                for i, params in ((i, pairs[name][i].params) for i in sites if i in pairs[name] and i not in measured)
            }
            errors[name] = {**measured, **estimates}
            estimated |= estimates.keys()
        groups = make_scale_groups(prepared, plan, sorted(rules_pairs), {})
        ops = {op for group in groups for i in group.sites if not plan.sites[i].parameter for op in group.ops}
        # A float weight would make an op that reads a quantized activation float.
        integer_ops_sites = {index for group in groups if group.ops & ops for index in group.sites}
        self._groups = []
        for group in group_shared_scales(plan, sites):
            candidates = [
                Candidate(
                    name=name,
                    error=sum(errors[name][i] for i in group),
                    size=sum(_weight_bytes(prepared, plan, i, candidate_pairs[i]) for i in group),
                )
                for name, candidate_pairs in pairs.items()
                if all(i in candidate_pairs for i in group)
            ]
            if integer_ops_sites.isdisjoint(group):
                float_size = sum(_weight_bytes(prepared, plan, i, None) for i in group)
                candidates.append(Candidate(name=FLOAT_CANDIDATE, error=0.0, size=float_size))
            self._groups.append(ScaleGroup(sites=tuple(group), ops=frozenset(), candidates=tuple(candidates)))
        self._fixed_size = model_constant_bytes(models[RULE_CANDIDATE].model) - sum(
            group.candidates[0].size for group in self._groups
        )
        # First use of each weight that can change.
        self.weights: frozenset[Use] = frozenset(plan.sites[i].uses[0] for i in sites)
        # Weights whose error is estimated from the bit width alone.
        self.estimated = tuple(plan.sites[i].tensor for i in sorted(estimated))

    def best_plan_within(self, max_size: float, goal: str) -> SizedPlan:
        """Return the plan with the least error of those of at most `max_size` bytes, or the smallest one.

        `goal` describes the limit in the reasons of the plan.
        """
        smallest, weight_budget = allocate_weight_bits(self._groups, -math.inf), max_size - self._fixed_size
        while True:
            selection = allocate_weight_bits(self._groups, weight_budget)
            chosen = [(group, group.candidates[index]) for group, index in zip(self._groups, selection, strict=True)]
            names = {index: candidate.name for group, candidate in chosen for index in group.sites}
            plan = self._plan_with_candidates(names, goal)
            size = model_constant_bytes(self._build(plan).model)
            if size <= max_size or selection == smallest:
                break
            # Constants that several ops share are counted for each of them or for none. Correct by the difference.
            weight_budget = sum(candidate.size for _, candidate in chosen) - (size - max_size)
        sites = self._plan.sites
        candidates = {sites[index].tensor: name for index, name in names.items() if name != RULE_CANDIDATE}
        return SizedPlan(plan, size, candidates)

    def _plan_with_candidates(self, names: Mapping[int, str], goal: str) -> Plan:
        replacements = {
            index: None if name == FLOAT_CANDIDATE else self._candidate_plans[name].sites[index]
            for index, name in names.items()
            if name != RULE_CANDIDATE
        }

        def reason_at(index: int) -> str:
            if (site := replacements[index]) is None:
                return f"float weights fit {goal}"
            dtype = site.scheme.type
            bits = f"{dtype.bits} bits" if isinstance(dtype, IntType) else dtype.name
            return f"{bits} cost the least accuracy for {goal}"

        return replace_sites(self._plan, replacements, SIZE_BUDGET_RULE, reason_at)


def model_constant_bytes(model: Model) -> int:
    """Return the bytes of all constants of a model's file, including those of subgraphs and functions."""
    total = 0
    if model.format == "onnx":  # packed weights of 2 bits, and those without zero points, are smaller than their pairs
        from graphquant.formats.onnx.fused_ops_writer import lower_fused_ops

        model = lower_fused_ops(model)
    for _, op in model.reachable_ops():
        # Old ONNX lists initializers as inputs too.
        is_constant = op.kind == "constant" or (op.kind == "input" and op.read_value is not None)
        output = op.outputs[0] if is_constant and op.outputs else None
        if output is not None and output.shape is not None and output.dtype is not None:
            total += math.ceil(math.prod(dim or 0 for dim in output.shape) * _element_bits(output.dtype) / 8)
    return total


def can_examine(model: Model) -> bool:
    """Return True if `insert` asks how onnxruntime runs each op, for which it copies all folded weights as float32."""
    dequantized = (op for _, op in model.reachable_ops() if (op.fused_attrs or {}).get("form") == FOLDED_FORM)
    folded = sum(math.prod(dim or 0 for dim in op.outputs[0].shape or ()) for op in dequantized)
    return model.traits.judgeable and model_constant_bytes(model) + 4 * folded <= MAX_EXAMINED_BYTES


def _element_bits(dtype: str) -> int:
    """Bits of an element; 0 for strings, which are no weights."""
    digits = re.search(r"(\d+)", dtype)
    return 8 if dtype == "bool" else int(digits[1]) if digits else 0


def parse_size_budget(budget: str, float_size: int) -> int:
    """Return a size budget in bytes. It is "2MB", or a share of the float model's size in bytes, as "25%"."""
    percent = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*%\s*", budget)
    if percent:
        return int(float(percent[1]) / 100 * float_size)
    try:
        return parse_size(budget)
    except UsageError:
        raise UsageError(
            f"{budget[:40]!r} is not a size budget. Write bytes, as 2MB, or a share of the float model's size, as 25%."
        ) from None


def families_with_float_weights(plan: Plan) -> list[str]:
    """Return the families of a plan that store weights as floats, so that fewer bits save no bytes."""
    families = {site.scheme.family or "" for site in plan.sites if site.parameter}
    return sorted(name for name in families if not FAMILIES[name].stores_integer_weights)


def _measure_weight_errors(
    prepared: Model,
    model: Model,
    pairs: Mapping[int, InsertedPair],
    weights: Sequence[int],
    search_set: HoldOut | None,
    progress: Progress | None,
) -> dict[int, float]:
    """Measure the error that each weight adds at the outputs, or without samples the error of the weight itself."""
    quantized = [index for index in weights if index in pairs]
    if search_set is not None:
        trials = CandidateTrials(prepared, search_set, progress)
        errors = trials.measure_errors(model, pairs, quantized)
        if trials.interrupted:
            raise KeyboardInterrupt
        return errors
    local_sqnr = {(site.graph, site.op): site.local for site in match_sites(prepared, model).figures()}
    sqnr_by_site = {index: local_sqnr.get(quantizing_op(model, pairs[index].output)) for index in quantized}
    return {index: 10 ** (-sqnr / 10) for index, sqnr in sqnr_by_site.items() if sqnr is not None}


def _weight_bytes(prepared: Model, plan: Plan, index: int, pair: InsertedPair | None) -> int:
    """Return the bytes of a weight with its scales and zero points; of the float weight without `pair`."""
    output = prepared.output(plan.sites[index].tensor)
    count: int = math.prod(dim or 0 for dim in output.shape or ())
    float_bits = _element_bits(output.dtype or "")
    if pair is None or isinstance(pair.params, DynamicQParams):
        return count * float_bits // 8
    bits, scale_count = _element_bits(pair.params.type.container), int(pair.params.scale.size)
    zero_point_bits, scheme = bits, pair.site.scheme
    if FAMILIES[scheme.family or ""].variant_of:  # its forms have whole blocks, and no zero points that are fixed
        is_folded, block = scheme.args.form == FOLDED_FORM, pair.params.block
        if block is not None and is_folded and output.shape is not None:
            block = min(block, output.shape[pair.params.axis or 0])  # a single partial block is stored as it is
        count = scale_count * (block or count // scale_count)
        is_float = is_folded and scheme.block_size is None
        zero_point_bits = 0 if scheme.grid.symmetric else float_bits if is_float else bits
    return -(-count * bits // 8) - (-scale_count * zero_point_bits // 8) + scale_count * float_bits // 8
