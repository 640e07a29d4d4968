"""Turn rule matches into a plan.

Uses of one tensor with the same scheme become one site, ties are followed, and impossible uses are skipped with
a reason. Sites are repeated in function clones, the saved functions that compute the same as the graphs that run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import (
    FORWARDING_KINDS,
    QUANTIZATION_KINDS,
    FunctionClones,
    Graph,
    Model,
    Op,
    Parameters,
    TensorRef,
    Use,
    channel_axis,
    merged_channel_shape,
    paused_gc,
    reduction_axis,
)
from graphquant.qdq import FAMILIES, QDQFamily
from graphquant.quantize.plan import (
    PASSES_QUANTIZED_TENSOR,
    Plan,
    Site,
    Skip,
    SkipCode,
    already_quantized_reason,
    reads_quantized_tensor,
)
from graphquant.rules import RuleMatch, RuleMatcher, Scheme, name_matches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from graphquant.ir import Shape
    from graphquant.quantize.preparation_undo import Step
    from graphquant.rules import RuleSet


# Sites in function clones: saved functions that compute the same as the graphs that run.

PASSTHROUGH_CONTROL_KINDS = frozenset(
    {"call", "if", "while", "output", "switch", "enter", "merge", "exit", "next_iteration"}
)
"""Kinds that forward a tensor to another graph or op, where it is quantized if needed."""


def make_clone_sites(model: Model, parameters: Parameters, sites: Sequence[Site]) -> Iterator[Site]:
    """Yield a site in a function clone for each of `sites` whose uses have counterparts there.

    It takes the original's scale.

    A use in a clone is quantized if its original is. A use without an original, such as one in a training branch, is
    quantized if all uses of the original tensor are. The tensors must agree in dtype and shape and have corresponding
    producers; a weight must be the same variable or have the same value.
    """
    if not model.saved_functions:
        return
    clones = FunctionClones(model, parameters)
    site_by_use = {use: site for site in sites for use in site.uses}
    fully_quantized = {
        site.tensor: site
        for site in sites
        if len(model.graphs[site.tensor.graph].consumers(site.tensor)) == len(site.uses)
    }
    clone_uses: dict[tuple[int, TensorRef], tuple[Site, Use, list[Use]]] = {}
    for graph_name in clones.clone_graphs:
        graph = model.graphs[graph_name]
        for op in graph.ops():
            original_op = clones.original_op(graph_name, op.name)
            for slot, tensor in enumerate(graph.slots(op.name)):
                if tensor is None or op.kind in QUANTIZATION_KINDS:
                    continue
                if original_op is not None:
                    site = site_by_use.get(Use(*original_op, slot))
                else:
                    original_producer = (
                        None if op.kind in PASSTHROUGH_CONTROL_KINDS else clones.original_op(tensor.graph, tensor.op)
                    )
                    site = (
                        None
                        if original_producer is None
                        else fully_quantized.get(TensorRef(*original_producer, tensor.port))
                    )
                if site is not None and _can_clone_site(model, parameters, clones, site, tensor):
                    original_use = Use(*original_op, slot) if original_op is not None else site.uses[0]
                    clone_uses.setdefault((id(site), tensor), (site, original_use, []))[2].append(
                        Use(graph_name, op.name, slot)
                    )
    for (_, tensor), (site, original_use, uses) in clone_uses.items():
        target_graph = tensor.graph if site.graph == site.tensor.graph else uses[0].graph
        yield replace(site, tensor=tensor, uses=tuple(uses), graph=target_graph, tie=(), clone_of=original_use)


def _can_clone_site(
    model: Model, parameters: Parameters, clones: FunctionClones, site: Site, tensor: TensorRef
) -> bool:
    """Return True if the site's quantization is valid for `tensor` and means the same there."""
    clone_output, original_output = model.output(tensor), model.output(site.tensor)
    if clone_output.dtype != original_output.dtype or parameters.is_parameter(tensor) != site.parameter:
        return False
    shape = clone_output.shape
    if site.parameter:
        shape = model.output(parameters.root_tensor(tensor)).shape if shape is None else shape
        if not _is_same_weight(parameters, clones, site.tensor, tensor):
            return False
    elif not (
        _are_shapes_compatible(clone_output.shape, original_output.shape)
        and clones.may_be_same_value(tensor, site.tensor)
    ):
        return False
    viewed_shape = site.view or shape
    request = site.scheme.family_request(
        axis=site.axis, dtype=clone_output.dtype or "", shape=viewed_shape, is_parameter=site.parameter
    )
    return FAMILIES[site.scheme.family or ""].unsupported_reason(request) is None


def _is_same_weight(parameters: Parameters, clones: FunctionClones, first: TensorRef, second: TensorRef) -> bool:
    """Return True if two weights are the same variable or have the same value."""
    variable = clones.variable_name(first)
    if variable is not None:
        return variable == clones.variable_name(second)
    first_value, second_value = parameters.value(first), parameters.value(second)
    return first_value is not None and second_value is not None and np.array_equal(first_value, second_value)


def _are_shapes_compatible(first: tuple[int | None, ...] | None, second: tuple[int | None, ...] | None) -> bool:
    if first is None or second is None:
        return True
    return len(first) == len(second) and all(
        first_size is None or second_size is None or first_size == second_size
        for first_size, second_size in zip(first, second, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSelection:
    """Options of the caller, in addition to the rules.

    Attributes:
        family: QDQ family for schemes that name none.
        include: If not empty, quantize only uses whose consumer or tensor matches one of these patterns.
        exclude: Leave uses in float whose consumer or tensor matches one of these patterns.
    """

    family: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@paused_gc()
def make_plan(
    model: Model, ruleset: RuleSet, options: SiteSelection, *, steps: Sequence[Step] = (), source_digest: str = ""
) -> Plan:
    """Make the plan of `ruleset` for `model`.

    Args:
        model: The prepared model.
        ruleset: The rules. The first match wins.
        options: Options of the caller.
        steps: The preparation steps that were applied.
        source_digest: Digest of the model before preparation.

    Raises:
        UsageError: A name selector, include or exclude pattern matches nothing.
    """
    matcher = RuleMatcher(model, ruleset)
    _check_name_patterns(matcher, options)
    builder = _PlanBuilder(matcher, options)
    for match in matcher.matches():
        builder.add_match(match)
    builder.follow_ties()
    builder.skip_captured_uses()
    sites = builder.build_sites()
    return Plan(
        format=model.format,
        model=source_digest or model.digest,
        prepared=model.digest,
        rules=ruleset.files,
        steps=tuple(steps),
        sites=(*sites, *make_clone_sites(model, matcher.parameters, sites)),
        skips=builder.build_skips(),
        unused=tuple(rule.rule.name for rule in ruleset.rules if id(rule) not in builder.used_rules),
        digest=ruleset.digest,
        algorithms=ruleset.algorithms,
    )


SAME_AS_INPUT = "same-as-input"

PASSTHROUGH = "passthrough"

FUSED = "fused"

INPUT_DEPENDENT = frozenset({SAME_AS_INPUT, PASSTHROUGH})
"""Outcomes that depend on whether the producer's input is quantized."""

CONCATENATING_KINDS = frozenset({"concat", "pack"})
"""Kinds whose output contains all of their inputs, weights included."""

COMPUTES_WEIGHT = "its consumer computes a weight from weights, and that weight is quantized where it is used"

CAPTURED_BY_SUBGRAPH = (
    "a subgraph captures its consumer's output; onnxruntime would move the Q/DQ pair into the subgraph and crash"
)

NO_INPUT_TO_TIE = "the rule ties it to its producer's input, but the producer has none"

TIED_INPUT_NOT_QUANTIZED = "the rule ties it to its producer's input, which is not quantized"
"""Skip reason of a tied tensor. It is a constant so that reports can group equal reasons into one line."""


@dataclass(slots=True, kw_only=True)
class _PendingSite:
    """A site or skip that uses are still added to."""

    first_match: RuleMatch
    uses: list[Use]
    scheme: Scheme = field(default_factory=Scheme)
    axis: int | None = None
    view: Shape | None = None
    tie: tuple[Use, ...] = ()
    reason: str = ""
    code: SkipCode = SkipCode.RULE


class _PlanBuilder:
    """Collects sites and skips in the order of the model."""

    def __init__(self, matcher: RuleMatcher, options: SiteSelection) -> None:
        self.matcher = matcher
        self.options = options
        self._sites: dict[tuple[object, ...], _PendingSite] = {}
        self._skips: dict[tuple[object, ...], _PendingSite] = {}
        self._tied_matches: dict[tuple[str, str], list[RuleMatch]] = {}
        self._passthrough_sources: dict[Use, Use] = {}  # to where the integers come from
        self._order: dict[TensorRef, int] = {}
        self.used_rules: set[int] = set()

    def add_match(self, match: RuleMatch) -> None:
        """Add one match to a site, a tie or a skip."""
        self._order.setdefault(match.tensor, len(self._order))
        if match.rule.rule.quantize in INPUT_DEPENDENT and self._exclusion(match) is None:
            self.used_rules.add(id(match.rule))
            self._tied_matches.setdefault((match.tensor.graph, match.tensor.op), []).append(match)
        else:
            self._place_or_skip(match)

    def follow_ties(self) -> None:
        """Give each tied tensor the scheme of the site that feeds its producer, and propagate it downstream.

        A tie whose input stays float has no effect: the use goes to the next rule that matches it.
        """
        tied_inputs = {op_key: self._tied_inputs(*op_key, matches) for op_key, matches in self._tied_matches.items()}
        op_by_use = {use: op_key for op_key, uses in tied_inputs.items() for use in uses}
        self._skip_quantized_passthrough(tied_inputs, op_by_use)
        self._propagate_schemes(
            [(use, site.scheme) for site in self._sites.values() for use in site.uses], tied_inputs, op_by_use
        )
        for op_key in list(self._tied_matches):
            for match in self._tied_matches.pop(op_key, ()):
                fallback = self._next_matching_rule(match)
                if fallback is None:
                    if match.rule.rule.quantize == SAME_AS_INPUT:
                        reason = TIED_INPUT_NOT_QUANTIZED if tied_inputs[op_key] else NO_INPUT_TO_TIE
                        self._add_skip(match, SkipCode.TIE, reason)
                    continue
                scheme = self._place_or_skip(fallback)
                if scheme is not None:
                    self._propagate_schemes([(fallback.use, scheme)], tied_inputs, op_by_use)

    def _skip_quantized_passthrough(
        self, tied_inputs: dict[tuple[str, str], tuple[Use, ...]], op_by_use: dict[Use, tuple[str, str]]
    ) -> None:
        """Skip tensors that only pass through data that is quantized already."""
        queue = [use for uses in tied_inputs.values() for use in uses if reads_quantized_tensor(self.matcher, use)]
        for quantized_use in queue:
            op_key = op_by_use.get(quantized_use)
            matches = self._tied_matches.get(op_key, []) if op_key is not None else []
            for match in [candidate for candidate in matches if candidate.rule.rule.quantize == PASSTHROUGH]:
                matches.remove(match)
                self._add_skip(match, SkipCode.QUANTIZED, PASSES_QUANTIZED_TENSOR)
                queue.append(match.use)

    def _place_or_skip(self, match: RuleMatch) -> Scheme | None:
        """Add one match to a site and return the site's scheme, or add a skip and return None."""
        self.used_rules.add(id(match.rule))
        exclusion = self._exclusion(match)
        if exclusion is not None:
            self._add_skip(match, *exclusion)
        elif match.rule.scheme is not None and self._add_to_site(match, match.rule.scheme, ()):
            return match.rule.scheme
        return None

    def _propagate_schemes(
        self,
        queue: list[tuple[Use, Scheme]],
        tied_inputs: dict[tuple[str, str], tuple[Use, ...]],
        op_by_use: dict[Use, tuple[str, str]],
    ) -> None:
        """Add tensors that are tied to the quantized uses in `queue`, and tensors tied to those in turn."""
        for quantized_use, scheme in queue:
            op_key = op_by_use.get(quantized_use)
            for match in self._tied_matches.pop(op_key, ()) if op_key is not None else ():
                per_tensor = replace(scheme, per="tensor", axis=None, block_size=None)
                if match.rule.rule.quantize == PASSTHROUGH and match.use.graph == match.tensor.graph:
                    self._passthrough_sources[match.use] = self._passthrough_sources.get(quantized_use, quantized_use)
                elif not self._add_to_site(match, per_tensor, tied_inputs[match.tensor.graph, match.tensor.op]):
                    continue
                queue.append((match.use, per_tensor))

    def skip_captured_uses(self) -> None:
        """Remove uses whose Q/DQ pair onnxruntime would move past the consumer into a subgraph, and crash."""
        model = self.matcher.model
        planned_uses = {use for site in self._sites.values() for use in site.uses}
        for key, site in list(self._sites.items()) if model.traits.runtime == "onnxruntime" else ():
            for use in list(site.uses):
                graph = model.graphs[use.graph]
                readers = (
                    [reader for uses in graph.consumers_by_port(use.op).values() for reader in uses]
                    if _runtime_moves_pair(graph, use)
                    else []
                )
                if any(reader.graph != use.graph and reader not in planned_uses for reader in readers):
                    site.uses.remove(use)
                    self._add_skip(replace(site.first_match, use=use), SkipCode.CAPTURE, CAPTURED_BY_SUBGRAPH)
            if not site.uses:
                del self._sites[key]

    def _next_matching_rule(self, match: RuleMatch) -> RuleMatch | None:
        """Return the match of the next rule for a use whose tie had no effect. Rules that tie are not considered."""
        rules = self.matcher.ruleset.rules
        next_index = next(index for index, rule in enumerate(rules) if rule is match.rule) + 1
        for rule in rules[next_index:]:
            if rule.rule.quantize not in INPUT_DEPENDENT and not self.matcher.miss_reason(
                rule, match.tensor, match.use
            ):
                return replace(match, rule=rule)
        return None

    def build_sites(self) -> tuple[Site, ...]:
        """Return the sites in the order of the model."""
        return tuple(
            Site(
                tensor=pending.first_match.tensor,
                uses=tuple(pending.uses),
                graph=self._insertion_graph(pending.first_match),
                scheme=pending.scheme,
                axis=pending.axis,
                view=None if pending.view is None else tuple(size for size in pending.view if size is not None),
                rule=pending.first_match.rule.rule.name,
                why=pending.first_match.rule.rule.why,
                parameter=self.matcher.parameters.is_parameter(pending.first_match.tensor),
                tie=tuple(self._passthrough_sources.get(use, use) for use in pending.tie),
            )
            for pending in self._in_model_order(self._sites)
        )

    def build_skips(self) -> tuple[Skip, ...]:
        """Return the skips in the order of the model."""
        return tuple(
            Skip(
                tensor=pending.first_match.tensor,
                uses=tuple(pending.uses),
                rule=pending.first_match.rule.rule.name,
                reason=pending.reason,
                code=pending.code,
                fused=pending.first_match.rule.rule.quantize == FUSED,
            )
            for pending in self._in_model_order(self._skips)
        )

    def _in_model_order(self, pending: dict[tuple[object, ...], _PendingSite]) -> list[_PendingSite]:
        return sorted(pending.values(), key=lambda entry: self._order[entry.first_match.tensor])

    def _add_to_site(self, match: RuleMatch, scheme: Scheme, tie: tuple[Use, ...]) -> bool:
        """Add the use to the site with the same properties, or open one. Return False if the use is skipped instead."""
        family = FAMILIES[scheme.family or self.options.family]
        axis = self._scale_axis(match, scheme)
        view = self._scale_view(match) if scheme.per == "channel" and axis is not None and scheme.axis is None else None
        reason = self._scheme_conflict(match, scheme, family, axis, view)
        if tie and scheme.range == "dynamic":
            reason = reason or "it is tied to a tensor with a dynamic range, which has no fixed scale to share"
        if tie and scheme.range == "learned":
            reason = reason or "it is tied to a tensor with a learned range, whose changes it could not follow"
        if reason:
            self._add_skip(match, SkipCode.SCHEME, reason)
            return False
        scheme = replace(scheme, family=family.name)
        key = (match.tensor, self._insertion_graph(match), scheme, axis, view, bool(tie))
        if key not in self._sites:
            self._sites[key] = _PendingSite(first_match=match, uses=[], scheme=scheme, axis=axis, view=view, tie=tie)
        self._sites[key].uses.append(match.use)
        return True

    def _scheme_conflict(
        self, match: RuleMatch, scheme: Scheme, family: QDQFamily, axis: int | None, view: Shape | None
    ) -> str:
        """Return the reason why the use cannot have this scheme, or ""."""
        model, output = self.matcher.model, self.matcher.model.output(match.tensor)
        if scheme.per != "tensor" and axis is None:
            return _no_axis_reason(scheme, match.use)
        if view is not None and None in view:
            return f"scheme {scheme.name!r} is per channel, but the kernel's shape is unknown"
        if output.dtype is None:
            return "its data type is only known at run time"
        if family.format != model.format:
            return f"family {family.name!r} is only for {family.format} models"
        request = scheme.family_request(
            axis=axis,
            dtype=output.dtype,
            shape=view or self.matcher.shape(match.tensor),
            is_parameter=self.matcher.parameters.is_parameter(match.tensor),
        )
        return family.unsupported_reason(request) or ""

    @staticmethod
    def _insertion_graph(match: RuleMatch) -> str:
        """Return the name of the graph that receives the new ops."""
        return match.use.graph if match.rule.rule.insert_in == "body" else match.tensor.graph

    def _exclusion(self, match: RuleMatch) -> tuple[SkipCode, str] | None:
        """Return the reason why this match stays float for any scheme, or None."""
        model, rule = self.matcher.model, match.rule.rule
        if rule.quantize in {"float", FUSED}:
            return SkipCode.RULE, rule.why or f"rule {rule.name!r} keeps it in float"
        consumer = model.graphs[match.use.graph].op(match.use.op)
        quantized_reason = already_quantized_reason(self.matcher, match.tensor, match.use)
        if quantized_reason:
            return SkipCode.QUANTIZED, quantized_reason
        if not (rule.producer.name or rule.consumer.name) and self._computes_weight(match.use, consumer):
            return SkipCode.WEIGHT, COMPUTES_WEIGHT
        labels = (match.use.op, *self.matcher.labels(match.tensor))
        if self.options.include and not any(name_matches(pattern, *labels) for pattern in self.options.include):
            return SkipCode.SELECTION, "--include matches neither it nor its consumer"
        excluded = next((pattern for pattern in self.options.exclude if name_matches(pattern, *labels)), None)
        return (SkipCode.SELECTION, f"--exclude {excluded!r}") if excluded is not None else None

    def _computes_weight(self, use: Use, consumer: Op) -> bool:
        """Return True if `consumer`, the op of `use`, computes a weight from weights only."""
        result = TensorRef(use.graph, use.op)
        return consumer.kind not in FORWARDING_KINDS and self.matcher.parameters.is_parameter(result)

    def _tied_inputs(self, graph_name: str, op_name: str, matches: Sequence[RuleMatch]) -> tuple[Use, ...]:
        """Return the uses of the data that an op passes through, with weights if it changes no value."""
        op_graph = self.matcher.model.graphs[graph_name]
        op = op_graph.op(op_name)
        weights = op.kind in CONCATENATING_KINDS or any(match.rule.rule.quantize == PASSTHROUGH for match in matches)
        return tuple(
            Use(graph_name, op_name, slot)
            for slot, tensor in enumerate(op_graph.slots(op_name))
            if tensor is not None
            and op.role(slot) == "input"
            and (weights or not self.matcher.parameters.is_parameter(tensor))
        )

    def _scale_axis(self, match: RuleMatch, scheme: Scheme) -> int | None:
        """Return the axis of channels or blocks of the tensor as the use reads it, None for a per-tensor scheme."""
        consumer = self.matcher.model.graphs[match.use.graph].op(match.use.op)
        shape, role = self.matcher.shape(match.tensor), consumer.role(match.use.slot)
        if scheme.per == "tensor":
            return None
        if scheme.axis is not None:
            return scheme.axis if shape is not None and scheme.axis < len(shape) else None
        if scheme.per == "block":
            return reduction_axis(consumer, role, shape) if shape is not None else None
        if role == "bias":
            return 0 if shape is not None and len(shape) == 1 else None
        return channel_axis(consumer, shape) if role == "weight" and shape is not None else None

    def _scale_view(self, match: RuleMatch) -> Shape | None:
        """Return the shape in which the scale axis holds all channels, None if that is the tensor's own shape."""
        consumer = self.matcher.model.graphs[match.use.graph].op(match.use.op)
        shape, role = self.matcher.shape(match.tensor), consumer.role(match.use.slot)
        return merged_channel_shape(consumer, shape) if role == "weight" and shape is not None else None

    def _add_skip(self, match: RuleMatch, code: SkipCode, reason: str) -> None:
        key = (match.tensor, match.rule.rule.name, reason)
        if key not in self._skips:
            self._skips[key] = _PendingSite(first_match=match, uses=[], reason=reason, code=code)
        self._skips[key].uses.append(match.use)


QDQ_MOVING_KINDS = frozenset({"max_pool", "reshape", "transpose", "squeeze", "unsqueeze", "slice"})
"""Kinds past which onnxruntime moves Q/DQ pairs."""


def _runtime_moves_pair(graph: Graph, use: Use) -> bool:
    """Return True if onnxruntime would move a Q/DQ pair on `use` past its op."""
    op = graph.op(use.op)
    return op.kind in QDQ_MOVING_KINDS and op.role(use.slot) == "input"


def _no_axis_reason(scheme: Scheme, use: Use) -> str:
    """Return the reason why there is no axis of channels or blocks."""
    if scheme.axis is not None:
        return f"scheme {scheme.name!r} is for axis {scheme.axis}, which the tensor lacks or may lack"
    if scheme.per == "block":
        return f"scheme {scheme.name!r} is per block, but {use} sums over no axis; give 'axis'"
    return f"scheme {scheme.name!r} is per channel, but {use} has no channel axis"


def _check_name_patterns(matcher: RuleMatcher, options: SiteSelection) -> None:
    patterns: Iterable[tuple[str, str]] = [
        *(("--include", pattern) for pattern in options.include),
        *(("--exclude", pattern) for pattern in options.exclude),
    ]
    labels = matcher.all_labels() if options.include or options.exclude else []
    for option, pattern in patterns:
        if not any(name_matches(pattern, label) for label in labels):
            raise UsageError(
                f"{option} {pattern!r} matches no op or tensor of the model."
                f"{did_you_mean(pattern, labels) or ' List the names with: graphquant inspect MODEL.'}"
            )
