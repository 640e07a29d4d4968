"""Explanation of each quantization decision: the rules in order, each with the condition that failed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphquant.analysis.model_summary import QuantizationOp, summarize_model
from graphquant.backends import judge_ops
from graphquant.backends.findings import BrokenRule, RejectedModelError, Verdict, make_verdict
from graphquant.calibration.targets import sites_needing_data
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import BOUNDARY_KINDS, STORED_KINDS, Model, Parameters, TensorRef, Use
from graphquant.ir.op_matching import is_inserted, unclipped_source, unquantized_source
from graphquant.numerics import QParams
from graphquant.quantize import TIED_INPUT_NOT_QUANTIZED, Plan, Solution, clip_limits, explain_scale, solve_scales
from graphquant.quantize.rewrite import rewrite
from graphquant.quantize.solver_state import format_values
from graphquant.rules import (
    LIST_NAMES_HINT,
    RuleMatcher,
    RuleMiss,
    RuleSet,
    name_matches,
    op_selector_names,
    removed_name_hint,
)
from graphquant.utils import HtmlRepresentation
from graphquant.utils.text import join_limited


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Explanation of one use of one tensor."""

    tensor: TensorRef
    use: Use  # the consumer
    quantized: bool  # True if the consumer reads it quantized
    winner: str  # rule that claimed the use, or ""
    outcome: str  # the outcome in words
    scale_reasons: tuple[str, ...] = ()  # reasons for its scale, in sentences
    # The other rules in order, each with the condition that failed; "" after the rule that claimed the use. Empty for
    # a quantized model.
    misses: tuple[RuleMiss, ...]
    requested_op: tuple[str, str]  # the requested op of this use, which produces or reads the tensor
    fused: bool = False  # True if the plan's backend fuses the producer with the consumer

    def miss_reason(self, miss: RuleMiss) -> str:
        """Return the reason why a rule did not claim the use, also if it matches."""
        if miss.reason:
            return miss.reason
        return f"also matches, but {self.winner} has priority" if self.winner else "matches and inserts nothing"

    @property
    def other_rules(self) -> tuple[RuleMiss, ...]:
        """The other rules in order, each with the reason why it did not claim the use."""
        return tuple(miss._replace(reason=self.miss_reason(miss)) for miss in self.misses)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ExplanationReport(HtmlRepresentation):
    """Explanations of the requested tensor or op."""

    uses: tuple[Explanation, ...]  # uses of its outputs and of its inputs
    verdicts: tuple[Verdict, ...] = ()  # predictions of the backend for the requested ops
    backend: str = ""  # the backend, or ""
    placeholder_ranges: bool = False  # True if predictions rest on placeholder ranges, because there is no data
    already_quantized: bool = False  # True if the model was already quantized, and its contents are explained
    omitted_reason: str = ""  # reason why rules are not explained, or ""


def explain_uses(
    matcher: RuleMatcher, plan: Plan, name: str, solution: Solution | None = None, source: Model | None = None
) -> tuple[Explanation, ...]:
    """Explain every use of the tensor `name`, or of the inputs and outputs of the op `name`.

    `solution` has scales to explain too, and `source` is the model before preparation, if that differs. Raises a
    UsageError if no float tensor or op has this name.
    """
    outcomes: dict[tuple[TensorRef, Use], tuple[str, str]] = {}
    site_indices: dict[tuple[TensorRef, Use], int] = {}
    fused = {(skip.tensor, use) for skip in plan.skips if skip.fused for use in skip.uses}
    plan = plan if solution is None else solution.plan
    for skip in plan.skips:
        outcomes.update({(skip.tensor, use): (skip.rule, f"not quantized: {skip.reason}") for use in skip.uses})
    for index, site in enumerate(plan.sites):
        site_indices.update({(site.tensor, use): index for use in site.uses})
        tie_note = f", with the scale at {', '.join(map(str, site.tie))}" if site.tie else ""
        outcome_text = f"quantized to {site.scheme.type.name} {site.scheme.zero} per {site.scheme.per}{tie_note}"
        outcomes.update({(site.tensor, use): (site.rule, outcome_text) for use in site.uses})
    explanations = []
    for tensor, use, requested_op in uses_by_name(matcher, name, matcher.labels, source):
        site_index = site_indices.get((tensor, use))
        plan_outcome = outcomes.get((tensor, use))
        winner, outcome = plan_outcome or _outcome_without_plan(matcher, tensor, use)
        explanations.append(
            Explanation(
                tensor=tensor,
                use=use,
                quantized=site_index is not None or (plan_outcome is None and bool(winner)),
                winner=winner,
                outcome=outcome,
                scale_reasons=() if site_index is None else explain_scale(matcher.model, plan, site_index, solution),
                misses=_rule_misses(matcher, tensor, use, winner),
                requested_op=requested_op,
                fused=(tensor, use) in fused,
            )
        )
    return tuple(explanations)


def _outcome_without_plan(matcher: RuleMatcher, tensor: TensorRef, use: Use) -> tuple[str, str]:
    """Rule and outcome of a use that is neither in a site nor skipped."""
    first = next((rule for rule in matcher.ruleset.rules if not matcher.miss_reason(rule, tensor, use)), None)
    if first is not None and first.rule.quantize == "passthrough":
        return first.rule.name, "quantized already: the producer passes quantized values through"
    return "", "not quantized: no rule matches"


def uses_by_name(
    matcher: RuleMatcher, name: str, tensor_names: Callable[[TensorRef], tuple[str, ...]], source: Model | None = None
) -> Iterator[tuple[TensorRef, Use, tuple[str, str]]]:
    """Uses of the tensor or op `name`, each with the requested op, which produces or reads it.

    `name` is a name, a glob, or a regex between slashes; `source` is the model before preparation, if that differs.
    """
    no_match = True
    for tensor, uses in matcher.tensors():
        names_producer = name_matches(name, *tensor_names(tensor), *op_selector_names(tensor.graph, tensor.op))
        for use in uses:
            if names_producer or name_matches(name, *op_selector_names(use.graph, use.op), str(use)):
                no_match = False
                yield tensor, use, (tensor.graph, tensor.op) if names_producer else (use.graph, use.op)
    if no_match:
        labels = matcher.all_labels()
        hint = " It has no float tensors." if name_matches(name, *labels) else ""
        hint = hint or ("" if source is None else removed_name_hint(source, matcher.model, name))
        hint = hint or did_you_mean(name, labels) or f"{LIST_NAMES_HINT} A tensor is OP:0."
        raise UsageError(f"No float tensor or op is called {name!r}.{hint}")


def _rule_misses(matcher: RuleMatcher, tensor: TensorRef, use: Use, winner: str) -> tuple[RuleMiss, ...]:
    """Rules that did not claim the use, in order."""
    rule_results = [matcher.evaluate_rule(rule, tensor, use) for rule in matcher.ruleset.rules]
    winning_result = next((miss for miss in rule_results if miss.rule.rule.name == winner and not miss.reason), None)
    misses, precedes_winner = [], winning_result is not None
    for miss in rule_results:
        if miss is winning_result:
            precedes_winner = False
        else:
            misses.append(miss._replace(reason=miss.reason or (TIED_INPUT_NOT_QUANTIZED if precedes_winner else "")))
    return tuple(misses)


# A quantized model records its rules, so it can be explained without rule files.

NO_RULES = RuleSet(files=(), descriptions=(), digest="", prepare=(), rules=())

FLOAT_OUTCOME = "stays float: no op quantizes it in this model. To see the reason, explain the float model"

MAX_LISTED = 4  # maximum number of listed tensors that share a scale


def explain_quantized(model: Model, name: str) -> tuple[Explanation, ...]:
    """Explain every use of the tensor `name`, or of the inputs and outputs of the op `name`, through its quantization.

    Raises a UsageError if no float tensor or op has this name.
    """
    quantization_ops = {(op.graph, op.op): op for op in summarize_model(model).quantization_ops}
    tensors_by_scale: dict[object, list[str]] = {}
    for op in quantization_ops.values():
        tensors_by_scale.setdefault(_scale_key(op), []).append(str(unquantized_source(model, op.tensor)))
    matcher = RuleMatcher(model, NO_RULES)

    def tensor_names(tensor: TensorRef) -> tuple[str, ...]:
        """Names of a tensor: its own, and that of the quantized float tensor."""
        source = unquantized_source(model, tensor)
        return matcher.labels(tensor) if source == tensor else (*matcher.labels(tensor), *matcher.labels(source))

    explanations = []
    for tensor, use, requested_op in uses_by_name(matcher, name, tensor_names):
        if is_inserted(model.graphs[use.graph].op(use.op)):
            continue  # its consumers are explained instead
        reading_op = quantization_ops.get(unclipped_source(model, tensor)[:2])
        source = unquantized_source(model, tensor)
        winner, outcome, reasons = "", FLOAT_OUTCOME, tuple[str, ...]()
        if reading_op is not None:
            winner, outcome = reading_op.rule, f"quantized {_describe_params(reading_op)}, by {reading_op.op}"
            others = [name for name in dict.fromkeys(tensors_by_scale[_scale_key(reading_op)]) if name != str(source)]
            if others:
                reasons = (f"one scale and zero point with {join_limited(others, MAX_LISTED)}",)
        explanations.append(
            Explanation(
                tensor=source,
                use=use,
                quantized=reading_op is not None,
                winner=winner,
                outcome=outcome,
                scale_reasons=reasons,
                misses=(),
                requested_op=(source.graph, source.op) if requested_op == (tensor.graph, tensor.op) else requested_op,
            )
        )
    return tuple(explanations)


def _scale_key(quantization_op: QuantizationOp) -> object:
    """Key that tensors with a shared scale and zero point have in common. A weight shares with no other tensor."""
    params = quantization_op.params
    if not isinstance(params, QParams) or params.scale.size > 1:
        return quantization_op.graph, quantization_op.op
    return params.type, params.scale.item(), params.zero_point.item()


def _describe_params(quantization_op: QuantizationOp) -> str:
    if (params := quantization_op.params) is None:
        return "with a scale that is computed at run time"
    if not isinstance(params, QParams):
        return f"to {params.type.name} with the range of each run"
    zero = f", zero point {params.zero_point.item()}" if params.scale.size == 1 else ""
    return f"to {params.type.name}, scale {format_values(params.scale)}{zero}"


# Predictions for a plan need a scale per site. Without data, placeholder ranges stand for them.

NONNEGATIVE_KINDS = frozenset({"sigmoid", "hard_sigmoid", "softmax", "exp", "abs", "sqrt"})
"""Kinds with outputs of at least 0, where that decides about fusion."""

EMULATED_NOTE = "its quantization ops round floats. insert -o MODEL.tflite writes a model whose ops run on integers"

MAX_TIES = 8  # maximum number of ties to follow to the origin of a scale


def judge_explained_ops(
    model: Model,
    backend: str,
    explanations: Sequence[Explanation],
    plan: Plan | None = None,
    solution: Solution | None = None,
) -> tuple[Verdict, ...]:
    """Return the execution of the requested ops in `backend`: predicted, or as the installed ONNX Runtime runs them.

    `backend` is a key of `BACKENDS` or "tensorflow". A `plan` is applied to the model, with placeholders for missing
    scales. Raises a UsageError if the backend does not exist or does not support the model's format.
    """
    requested_ops = dict.fromkeys(explanation.requested_op for explanation in explanations)

    def judge_as_float(**fields: Any) -> tuple[Verdict, ...]:
        ops = [(model.graphs[graph], model.graphs[graph].op(name)) for graph, name in requested_ops]
        ops = [(graph, op) for graph, op in ops if op.kind not in BOUNDARY_KINDS | STORED_KINDS]
        return tuple(make_verdict(graph, op, "float", op.type, **fields) for graph, op in ops)

    if backend == model.format and not model.traits.judgeable:
        return judge_as_float(note=EMULATED_NOTE)
    if plan is not None:
        solution = solution or solve_scales(model, _with_placeholder_ranges(model, plan), {})
        model = rewrite(model, solution.plan, solution.params)[0]
    try:
        verdicts = judge_ops(model, backend)
    except RejectedModelError as error:
        return judge_as_float(broken_rule=BrokenRule("refused", str(error), error.fix))
    return tuple(verdict for verdict in verdicts if (verdict.graph, verdict.op) in requested_ops)


def _with_placeholder_ranges(model: Model, plan: Plan) -> Plan:
    """Give placeholder ranges to the sites that need data."""
    unranged_sites, parameters = set(map(id, sites_needing_data(plan))), Parameters(model)
    site_by_use = {use: site for site in plan.sites for use in site.uses}
    sites = []
    for site in plan.sites:
        range_source = site
        for _ in range(MAX_TIES):
            range_source = site_by_use.get(range_source.tie[0], range_source) if range_source.tie else range_source
        needs_range = id(site) in unranged_sites
        placeholder = _placeholder_range(model, parameters, range_source.tensor) if needs_range else site.range
        sites.append(replace(site, range=placeholder))
    return replace(plan, sites=tuple(sites))


def _placeholder_range(model: Model, parameters: Parameters, tensor: TensorRef) -> tuple[float, float]:
    """Placeholder range: the range of a Relu or Clip, slightly narrowed, else symmetric or nonnegative."""
    if (ends := clip_limits(model, parameters, tensor)) is None:
        return (0.0, 1.0) if model.op(tensor).kind in NONNEGATIVE_KINDS else (-1.0, 1.0)
    low = ends[0] if math.isfinite(ends[0]) else min(ends[1], 0.0) - 1
    return low, (low + ends[1]) / 2 if math.isfinite(ends[1]) else max(low, 0.0) + 1
