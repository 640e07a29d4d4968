"""Turn rule matches into a plan.

Uses of one tensor with the same scheme become one site, ties are followed, and impossible uses are skipped with
a reason. Sites are repeated in function clones, the saved functions that compute the same as the graphs that run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import (
    CLAMPING_KINDS,
    CONCATENATING_KINDS,
    DATA_MOVEMENT_KINDS,
    FORWARDING_KINDS,
    QUANTIZATION_KINDS,
    TABLE_KINDS,
    VALUE_MOVING_KINDS,
    FunctionClones,
    Graph,
    Model,
    OpKey,
    Parameters,
    Shape,
    TensorRef,
    Use,
    are_shapes_compatible,
    channel_axis,
    find_states,
    follow,
    fully_known_shape,
    merged_channel_shape,
    paused_gc,
    reduction_axis,
)
from graphquant.numerics import IntType
from graphquant.qdq import (
    FAMILIES,
    FOLDED_FORM,
    FamilyArguments,
    FamilyRequest,
    FusedForm,
    QDQFamily,
    count_product_weights,
)
from graphquant.qdq.onnx_fused import MIN_BYTE_BLOCK_SIZE, is_matrix_transpose
from graphquant.quantize.plan import Plan, Site, Skip, SkipCode
from graphquant.rules import (
    LIST_NAMES_HINT,
    RuleMatch,
    RuleMatcher,
    RuleSet,
    Scheme,
    change_scheme,
    name_matches,
    op_selector_names,
    removed_name_hint,
)

if TYPE_CHECKING:
    from graphquant.quantize.preparation_undo import Step
    from graphquant.utils.option_types import RangeSource

# Sites in function clones: saved functions that compute the same as the graphs that run.

PASSTHROUGH_CONTROL_KINDS = frozenset(
    {"call", "if", "while", "output", "switch", "enter", "merge", "exit", "next_iteration"}
)
"""Kinds that forward a tensor to another graph or op, where it is quantized if needed."""


def make_clone_sites(model: Model, parameters: Parameters, sites: Sequence[Site]) -> Iterator[Site]:
    """Yield a site in a function clone, with the original's scale, for each of `sites` with counterparts of its uses.

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
    for graph in (model.graphs[name] for name in clones.clone_graphs):
        for op in graph.ops():
            original_op = clones.original_op(graph.name, op.name)
            for slot, tensor in enumerate(graph.slots(op.name)) if op.kind not in QUANTIZATION_KINDS else ():
                site = None
                if tensor is not None and original_op is not None:
                    site = site_by_use.get(Use(*original_op, slot))
                elif tensor is not None and op.kind not in PASSTHROUGH_CONTROL_KINDS:
                    producer = clones.original_op(tensor.graph, tensor.op)
                    site = None if producer is None else fully_quantized.get(TensorRef(*producer, tensor.port))
                if tensor is not None and site is not None and _can_clone_site(model, parameters, clones, site, tensor):
                    original_use = site.uses[0] if original_op is None else Use(*original_op, slot)
                    uses = clone_uses.setdefault((id(site), tensor), (site, original_use, []))[2]
                    uses.append(Use(graph.name, op.name, slot))
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
    if site.parameter:
        variable = clones.variable_name(site.tensor)
        is_same = variable == clones.variable_name(tensor)
        if variable is None:  # then the values are compared
            values = parameters.value(site.tensor), parameters.value(tensor)
            is_same = values[0] is not None and values[1] is not None and np.array_equal(values[0], values[1])
    else:
        has_same_shape = are_shapes_compatible(clone_output.shape, original_output.shape)
        is_same = has_same_shape and clones.may_be_same_value(tensor, site.tensor)
    request = site.scheme.family_request(
        axis=site.axis,
        dtype=clone_output.dtype or "",
        shape=site.view or parameters.shape(tensor),
        is_parameter=site.parameter,
    )
    return is_same and site.family.unsupported_reason(request) is None


# Detect tensors that are quantized already, so that nothing is quantized twice.

ALREADY_QUANTIZED = "it is quantized already"
INTEGER_CONSUMER = "its consumer is an integer op"
INTEGER_SUM = "it is an integer sum, or the scale of one"
LIMITS_QUANTIZED = "its consumer only limits or moves values that are quantized already"

MAX_LIMITING_OPS = 2  # longest run of such ops that is followed to a quantization op


def already_quantized_reason(matcher: RuleMatcher, tensor: TensorRef, use: Use) -> str:
    """Return the reason why `use` of `tensor` needs no quantization, or "" if the tensor is float."""
    model, graph = matcher.model, matcher.model.graphs[use.graph]
    consumer = graph.op(use.op)
    kind = model.op(tensor).kind
    if {kind, consumer.kind} & QUANTIZATION_KINDS or (kind == "reshape" and _is_between_reshapes(model, tensor)):
        return ALREADY_QUANTIZED
    if consumer.kind == "integer":
        return INTEGER_CONSUMER
    if _only_forwards_quantized(matcher, graph, use.op):
        return LIMITS_QUANTIZED
    # Larger sums and products are not examined, to bound the cost.
    operands = [operand for operand in graph.slots(use.op) if operand] if len(graph.slots(use.op)) == 2 else []  # noqa: PLR2004
    if consumer.kind == "add":
        rescaled_sums = [operand for operand in operands if _is_rescaled_integer_sum(matcher, operand)]
        is_integer_sum = bool(rescaled_sums) and all(
            operand in rescaled_sums or matcher.parameters.is_parameter(operand) for operand in operands
        )
    else:
        candidates = (tensor, *operands) if consumer.kind == "mul" else (tensor,)
        is_integer_sum = any(_is_integer_sum_or_scale(matcher, candidate) for candidate in candidates)
    return INTEGER_SUM if is_integer_sum else ""


def is_implied_output(model: Model, use: Use) -> bool:
    """Return True if the op of `use` is an output only because nothing reads the tensor in a TensorFlow graph."""
    op = model.graphs[use.graph].op(use.op)
    return model.traits.runtime == "TensorFlow" and not use.graph and op.kind == "output" and "tensor" not in op.attrs


def _connected_inputs(model: Model, tensor: TensorRef) -> list[TensorRef]:
    return [operand for operand in model.graphs[tensor.graph].slots(tensor.op) if operand is not None]


def _is_rescaled_integer_sum(matcher: RuleMatcher, tensor: TensorRef) -> bool:
    """Return True if `tensor` is an integer sum times its scale: a product that was quantized dynamically."""
    operands = _connected_inputs(matcher.model, tensor) if matcher.model.op(tensor).kind == "mul" else []
    return bool(operands) and all(_is_integer_sum_or_scale(matcher, operand) for operand in operands)


def _is_between_reshapes(model: Model, tensor: TensorRef) -> bool:
    """Return True if `tensor` was reshaped to put its channels on one axis, quantized, and reshaped back."""
    first_operands = follow(tensor, lambda ref: model.graphs[ref.graph].source_of(Use(ref.graph, ref.op, 0)), 3)
    kinds = [model.op(ancestor).kind for ancestor in first_operands]
    return kinds[:3] == ["reshape", "qdq", "reshape"] or kinds == ["reshape", "dequantize", "quantize", "reshape"]


def _only_forwards_quantized(matcher: RuleMatcher, graph: Graph, op_name: str) -> bool:
    """Return True if op `op_name` only moves, or limits by constants, a tensor that the op after it quantizes."""
    for _ in range(MAX_LIMITING_OPS):
        if graph.op(op_name).kind not in CLAMPING_KINDS | DATA_MOVEMENT_KINDS:
            return False
        operands = [operand for operand in graph.slots(op_name) if operand]
        readers = graph.consumers_by_port(op_name).get(0, [])
        if sum(not matcher.parameters.is_parameter(operand) for operand in operands) > 1 or len(readers) != 1:
            return False
        if readers[0].graph != graph.name:
            return False
        op_name = readers[0].op
        if graph.op(op_name).kind in QUANTIZATION_KINDS:
            return True
    return False


def _is_integer_sum_or_scale(matcher: RuleMatcher, tensor: TensorRef) -> bool:
    """Return True if `tensor` is an integer sum cast to float, a scale computed for one, or a product of scales."""
    model, op = matcher.model, matcher.model.op(tensor)
    if op.kind == "integer":
        return tensor.port > 0
    operands = _connected_inputs(model, tensor) if op.kind in {"cast", "mul"} else []
    if op.kind == "cast":
        return bool(operands) and model.op(operands[0]).kind == "integer"
    scales = [operand for operand in operands if model.op(operand).kind == "integer" and operand.port > 0]
    return bool(scales) and all(operand in scales or matcher.parameters.is_parameter(operand) for operand in operands)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSelection:
    """Options of the caller, in addition to the rules."""

    family: str  # QDQ family for schemes that name none
    range_source: RangeSource = "observed"  # source of ranges for schemes that name none
    # If not empty, quantize only uses whose consumer or tensor matches one of these patterns.
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()  # leave uses in float whose consumer or tensor matches one of these patterns
    # Returns True for forms of weights that the runtime has.
    supports_fused_form: Callable[[FusedForm], bool] = lambda _form: False
    # Returns the model with usual sizes of its tensors where the model does not tell them.
    assume_sizes: Callable[[Model], Model] = lambda model: model


@paused_gc()
def make_plan(
    model: Model, ruleset: RuleSet, options: SiteSelection, *, steps: Sequence[Step] = (), source: Model | None = None
) -> Plan:
    """Make the plan of `ruleset` for `model`.

    The first matching rule wins. `source` is the model before preparation, if that differs. Raises a UsageError if a
    name selector, include or exclude pattern matches nothing.
    """
    matcher = RuleMatcher(model, ruleset)
    _check_name_patterns(matcher, options, source)
    builder = _PlanBuilder(matcher, options)
    for match in matcher.matches():
        builder.add_match(match)
    builder.follow_ties()
    builder.skip_captured_uses()
    builder.skip_final_identities()
    builder.skip_weights_of_float16_ops()
    builder.join_tied_weights()
    sites = builder.build_sites()
    return Plan(
        format=model.format,
        model=(source or model).digest,
        prepared=model.digest,
        rules=ruleset.files,
        targets=ruleset.targets,
        steps=tuple(steps),
        sites=(*sites, *make_clone_sites(model, matcher.parameters, sites)),
        skips=builder.build_skips(),
        unused=tuple(
            rule.rule.name for rule in ruleset.rules if not rule.inherited and id(rule) not in builder.used_rules
        ),
        digest=ruleset.digest,
        algorithms=ruleset.algorithms,
        warnings=_find_weight_warnings(model, sites),
    )


MIN_BLOCK_SIZE = 2  # of a scheme
NARROW_BITS = 4
NARROW_WARNING = (
    "with weights of 4 bits or less, outputs usually have 10 to 25 dB. Samples in --data measure them, and the weights"
    " that lose most get 8 bits until all outputs have 20 dB"
)
PACKED_WARNING = (
    "weights of 4 bits are packed for one row or token at a time. With 2 to 64 rows, products take up to three times"
    " float's time, and less than float's with weight_only_int8"
)


def _find_weight_warnings(model: Model, sites: Sequence[Site]) -> tuple[str, ...]:
    """Return warnings on the error of 4-bit weights, and on packed ones that are slow for several rows."""
    narrow = [site for site in sites if site.parameter and site.scheme.type.bits <= NARROW_BITS]
    packed = [site for site in narrow if (site.scheme.args.form, site.scheme.args.accuracy_level) == ("packed", 0)]
    inputs = [model.graphs[use.graph].slots(use.op)[0] for site in packed for use in site.uses]
    shapes = [model.output(tensor).shape for tensor in inputs if tensor is not None]
    has_unknown_rows = any(shape is None or None in shape[:-1] for shape in shapes)
    warnings = {NARROW_WARNING: bool(narrow), PACKED_WARNING: has_unknown_rows and 2 * len(packed) > len(narrow)}
    return tuple(message for message, applies in warnings.items() if applies)


def _is_read_once(model: Model, weight: TensorRef) -> bool:
    """Return True if a weight, and the table of which it is the transpose, have one reader each."""
    graph, op = model.graphs[weight.graph], model.op(weight)
    table = graph.slots(op.name)[0] if is_matrix_transpose(op) else None
    tensors = [tensor for tensor in (weight, table) if tensor is not None]
    return all(len(model.graphs[tensor.graph].consumers(tensor)) == 1 for tensor in tensors)


def _fitting_block(sizes: tuple[int, ...], request: FamilyRequest, form: FusedForm) -> int | None:
    """Return the size of blocks with few zeros in the last one: nearly equal if folded, half of it for some bytes."""
    if request.block is None or request.axis is None:
        return request.block
    size, half = max(sizes[request.axis], 1), request.block // 2
    count = math.ceil(size / request.block)
    if form.args.form == FOLDED_FORM:
        return max(math.ceil(size / count), MIN_BLOCK_SIZE)
    may_halve = form.op_type == "MatMulNBits" and form.bits > NARROW_BITS and half >= MIN_BYTE_BLOCK_SIZE
    return half if may_halve and math.ceil(size / half) < 2 * count else request.block


SAME_AS_INPUT = "same-as-input"
PASSTHROUGH = "passthrough"
FUSED = "fused"
INPUT_DEPENDENT = frozenset({SAME_AS_INPUT, PASSTHROUGH})
"""Outcomes that depend on whether the producer's input is quantized."""

PASSES_QUANTIZED_VALUES = "its producer passes through values that are quantized already"
FIXED_OBSERVERS = frozenset({"fixed", "fixed-point"})  # their range is a property of the op, not of the data
CHANGING_RANGES = frozenset({"dynamic", "learned"})
"""Sources of ranges that differ between runs, so that two tensors cannot share their scale."""

COMPUTES_WEIGHT = "its consumer computes a weight from weights, and that weight is quantized where it is used"


def required_opset(prepared: Model, plan: Plan) -> int:
    """Return the lowest opset that supports the inserted ops of every site; 0 without sites."""
    requests = (
        site.scheme.family_request(
            axis=site.axis,
            dtype=prepared.output(site.tensor).dtype or "float32",
            shape=None,
            is_parameter=site.parameter,
            in_function=prepared.graphs[site.tensor.graph].is_function,
        )
        for site in plan.sites
    )
    opsets = (site.family.minimum_opset(request) for site, request in zip(plan.sites, requests, strict=True))
    return max(opsets, default=0)


CAPTURED_BY_SUBGRAPH = (
    "a subgraph captures its consumer's output; onnxruntime would move the Q/DQ pair into the subgraph and crash"
)

QDQ_MOVING_KINDS = frozenset({"max_pool", "reshape", "transpose", "squeeze", "unsqueeze", "slice"})
"""Kinds past which onnxruntime moves Q/DQ pairs."""

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
    view: tuple[int, ...] | None = None
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
        self._tied_matches: dict[OpKey, list[RuleMatch]] = {}
        self._tied_inputs: dict[OpKey, tuple[Use, ...]] = {}
        self._tied_op_by_use: dict[Use, OpKey] = {}
        self._passthrough_sources: dict[Use, Use] = {}  # to where the integers come from
        self._order: dict[TensorRef, int] = {}
        self.used_rules: set[int] = set()

    def add_match(self, match: RuleMatch) -> None:
        """Add one match to a site, a tie or a skip."""
        self._order.setdefault(match.tensor, len(self._order))
        if match.rule.rule.quantize in INPUT_DEPENDENT and self._exclusion(match) is None:
            self.used_rules.add(id(match.rule))
            self._tied_matches.setdefault((match.producer.graph, match.producer.op), []).append(match)
        else:
            self._place_or_skip(match)

    def follow_ties(self) -> None:
        """Give each tied tensor the scheme of the site that feeds its producer, and propagate it downstream.

        A tie whose input stays float has no effect: the use goes to the next rule that matches it.
        """
        for op_key, matches in self._tied_matches.items():
            self._tied_inputs[op_key] = self._find_tied_inputs(*op_key, matches)
            self._tied_op_by_use.update(dict.fromkeys(self._tied_inputs[op_key], op_key))
        self._skip_quantized_passthrough()
        self._propagate_schemes([(use, site.scheme) for site in self._sites.values() for use in site.uses])
        for op_key in list(self._tied_matches):
            for match in self._tied_matches.pop(op_key, ()):
                fallback = self._next_matching_rule(match)
                scheme = None if fallback is None else self._place_or_skip(fallback)
                if fallback is not None and scheme is not None:
                    self._propagate_schemes([(fallback.use, scheme)])
                elif fallback is None and match.rule.rule.quantize == SAME_AS_INPUT:
                    reason = TIED_INPUT_NOT_QUANTIZED if self._tied_inputs[op_key] else NO_INPUT_TO_TIE
                    self._add_skip(match, SkipCode.TIE, reason)

    def _skip_quantized_passthrough(self) -> None:
        """Skip tensors that only pass through data that is quantized already."""
        model = self.matcher.model
        sources = {use: model.graphs[use.graph].source_of(use) for use in self._tied_op_by_use}
        queue = [use for use, tensor in sources.items() if tensor and model.op(tensor).kind in QUANTIZATION_KINDS]
        for quantized_use in queue:
            op_key = self._tied_op_by_use.get(quantized_use)
            matches = self._tied_matches.get(op_key, []) if op_key is not None else []
            for match in [candidate for candidate in matches if candidate.rule.rule.quantize == PASSTHROUGH]:
                matches.remove(match)
                self._add_skip(match, SkipCode.QUANTIZED, PASSES_QUANTIZED_VALUES)
                queue.append(match.use)

    def _place_or_skip(self, match: RuleMatch) -> Scheme | None:
        """Add one match to a site and return the site's scheme, or add a skip and return None."""
        self.used_rules.add(id(match.rule))
        exclusion = self._exclusion(match)
        if exclusion is not None:
            self._add_skip(match, *exclusion)
        elif match.rule.scheme is not None:
            scheme = self._supported_scheme(match, match.rule.scheme)
            return scheme if self._add_to_site(match, scheme, ()) else None
        return None

    def _propagate_schemes(self, queue: list[tuple[Use, Scheme]]) -> None:
        """Add tensors that are tied to the quantized uses in `queue`, and tensors tied to those in turn."""
        for quantized_use, scheme in queue:
            op_key = self._tied_op_by_use.get(quantized_use)
            for match in self._tied_matches.pop(op_key, ()) if op_key is not None else ():
                per_tensor = change_scheme(scheme, per="tensor", axis=None, block_size=None)
                if match.rule.rule.quantize == PASSTHROUGH and match.use.graph == match.tensor.graph:
                    self._passthrough_sources[match.use] = self._passthrough_sources.get(quantized_use, quantized_use)
                elif scheme.range in CHANGING_RANGES:
                    # No scale can be shared: moved values are on the grid of their source, and others get their own.
                    if self.matcher.model.op(match.producer).kind in VALUE_MOVING_KINDS - CONCATENATING_KINDS:
                        self._add_skip(match, SkipCode.QUANTIZED, PASSES_QUANTIZED_VALUES)
                    elif not self._add_to_site(match, per_tensor, ()):
                        continue
                else:
                    tied_inputs = self._tied_inputs[match.producer.graph, match.producer.op]
                    if not self._add_to_site(match, per_tensor, tied_inputs):
                        continue
                queue.append((match.use, per_tensor))

    def skip_captured_uses(self) -> None:
        """Remove uses whose Q/DQ pair onnxruntime would move past the consumer into a subgraph, and crash."""
        model = self.matcher.model
        planned_uses = {use for site in self._sites.values() for use in site.uses}
        for key, site in list(self._sites.items()) if model.traits.runtime == "onnxruntime" else ():
            for use in list(site.uses):
                graph = model.graphs[use.graph]
                consumer = graph.op(use.op)
                if consumer.kind not in QDQ_MOVING_KINDS or consumer.role(use.slot) != "input":
                    continue
                readers = [reader for uses in graph.consumers_by_port(use.op).values() for reader in uses]
                if any(reader.graph != use.graph and reader not in planned_uses for reader in readers):
                    self._move_to_skips(key, use, SkipCode.CAPTURE, CAPTURED_BY_SUBGRAPH)

    def skip_final_identities(self) -> None:
        """Remove pairs after an Identity that names an output, if its input is quantized.

        A frozen graph has no list of outputs, so such a pair would be a new output that nothing reads.
        """
        model = self.matcher.model
        planned_uses = {use for site in self._sites.values() for use in site.uses}
        for key, site in list(self._sites.items()):
            tensor = site.first_match.tensor
            operand = Use(tensor.graph, tensor.op, 0)
            if tensor.graph or model.op(tensor).kind != "identity" or operand not in planned_uses:
                continue
            for use in [use for use in site.uses if is_implied_output(model, use)]:
                self._move_to_skips(key, use, SkipCode.QUANTIZED, ALREADY_QUANTIZED)

    def skip_weights_of_float16_ops(self) -> None:
        """Remove the weights of ops whose float16 input onnxruntime cannot take as integers.

        The ops run in float, and each run would dequantize the weights: an int8 SqueezeNet took twice the time.
        """
        model, targets = self.matcher.model, self.matcher.ruleset.targets
        if targets and not any(target.startswith("onnxruntime") for target in targets):
            return
        reasons = {
            (use.graph, use.op): skip.reason
            for skip in self._skips.values()
            if skip.code is SkipCode.SCHEME and model.output(skip.first_match.tensor).dtype == "float16"
            for use in skip.uses
            if not self.matcher.parameters.is_parameter(skip.first_match.tensor)
        }
        for key, site in list(self._sites.items()) if reasons else ():
            for use in list(site.uses):
                reason = reasons.get((use.graph, use.op))
                if reason is not None and self.matcher.parameters.is_parameter(site.first_match.tensor):
                    self._move_to_skips(key, use, SkipCode.SCHEME, reason)

    def join_tied_weights(self) -> None:
        """Join the sites of a table of bytes that Gather and, transposed or not, a product read, to store it once."""
        graphs = self.matcher.model.graphs
        sites = {key: site for key, site in self._sites.items() if FAMILIES[site.scheme.family or ""].variant_of}

        def layout(site: _PendingSite, tensor: TensorRef, axis: int | None) -> tuple[object, ...]:
            return tensor, axis, change_scheme(site.scheme, name="", axis=None, args=FamilyArguments())

        tables = {
            layout(site, site.first_match.tensor, site.axis): key
            for key, site in sites.items()
            if graphs[site.uses[0].graph].op(site.uses[0].op).kind in TABLE_KINDS and site.scheme.type.bits == 8  # noqa: PLR2004
        }
        for key, site in sites.items() if tables else ():
            tensor, axis, uses = site.first_match.tensor, site.axis, site.uses
            graph, table = graphs[tensor.graph], graphs[tensor.graph].source_of(Use(tensor.graph, tensor.op, 0))
            is_turned = is_matrix_transpose(graph.op(tensor.op)) and graph.consumers(tensor) == uses
            if is_turned and table is not None and axis is not None:
                uses, tensor, axis = [Use(tensor.graph, tensor.op, 0)], table, 1 - axis
            table_key = tables.get(layout(site, tensor, axis), key)
            if table_key != key:
                joined = self._sites[table_key]
                joined.scheme, joined.uses = change_scheme(joined.scheme, args=site.scheme.args), [*uses, *joined.uses]
                del self._sites[key]

    def _move_to_skips(self, key: tuple[object, ...], use: Use, code: SkipCode, reason: str) -> None:
        """Skip a use of a site instead."""
        site = self._sites[key]
        site.uses.remove(use)
        if not site.uses:
            del self._sites[key]
        self._add_skip(site.first_match._replace(use=use), code, reason)

    def _next_matching_rule(self, match: RuleMatch) -> RuleMatch | None:
        """Return the match of the next rule for a use whose tie had no effect. Rules that tie are not considered."""
        rules = self.matcher.ruleset.rules
        index = next(index for index, rule in enumerate(rules) if rule is match.rule)
        for rule in rules[index + 1 :]:
            is_tie = rule.rule.quantize in INPUT_DEPENDENT
            if not is_tie and not self.matcher.miss_reason(rule, match.tensor, match.use):
                return match._replace(rule=rule)
        return None

    def build_sites(self) -> tuple[Site, ...]:
        """Return the sites in the order of the model."""
        sites = tuple(
            Site(
                tensor=pending.first_match.tensor,
                uses=tuple(pending.uses),
                graph=_insertion_graph(pending.first_match),
                scheme=pending.scheme,
                axis=pending.axis,
                view=pending.view,
                rule=pending.first_match.rule.rule.name,
                why=pending.first_match.rule.rule.why,
                parameter=self.matcher.parameters.is_parameter(pending.first_match.tensor),
                tie=tuple(self._passthrough_sources.get(use, use) for use in pending.tie),
            )
            for pending in self._in_model_order(self._sites)
        )
        # A present state is the past state of the next run, so the two are one tensor over time.
        past_by_present = {present: TensorRef("", past) for past, present in find_states(self.matcher.model).items()}
        use_by_past = {site.tensor: site.uses[0] for site in sites if site.tensor in past_by_present.values()}
        past_uses = {present: use_by_past.get(past) for present, past in past_by_present.items()}
        return tuple(
            site if past_use is None or past_use in site.tie else replace(site, tie=(*site.tie, past_use))
            for site in sites
            for past_use in (past_uses.get(site.tensor),)
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
        axis, view = self._scale_layout(match, scheme)
        reason = self._scheme_conflict(match, scheme, family, axis, view)
        if reason:
            self._add_skip(match, SkipCode.SCHEME, reason)
            return False
        scheme, known_view = change_scheme(scheme, family=family.name), fully_known_shape(view)
        key = (match.tensor, _insertion_graph(match), scheme, axis, view, bool(tie))
        pending = _PendingSite(first_match=match, uses=[], scheme=scheme, axis=axis, view=known_view, tie=tie)
        self._sites.setdefault(key, pending).uses.append(match.use)
        return True

    def _choose_fused_form(self, match: RuleMatch, scheme: Scheme) -> Scheme:
        """Return the scheme with the best form that the plan's runtimes have, without its family if there is none."""
        model, family = self.matcher.model, FAMILIES[scheme.family or ""]
        original, shape = scheme, self.matcher.shape(match.tensor)
        consumer = model.graphs[match.use.graph].op(match.use.op)
        sizes = fully_known_shape(shape) or (1,)
        if consumer.kind == "lstm" and scheme.per == "channel" and min(sizes[0], sizes[-1]) > 1:
            # A scale for each row of each direction. As channels, the directions would share scales.
            scheme = change_scheme(scheme, per="block", block_size=sizes[-1])
        request = scheme.family_request(
            axis=self._scale_layout(match, scheme)[0],
            dtype=model.output(match.tensor).dtype or "",
            shape=shape,
            is_parameter=self.matcher.parameters.is_parameter(match.tensor),
        )
        is_available = family.format == model.format and all(
            target.startswith("onnxruntime") for target in self.matcher.ruleset.targets
        )
        standard = change_scheme(original, family=None, args=FamilyArguments())
        if not is_available:
            return standard
        graph = self._sized_model.graphs[match.use.graph]
        for form in family.fused_forms(graph, match.use, request, self._product_elements):
            if self.options.supports_fused_form(form):
                # Blocks that fit need few zeros in the last one. A weight with another reader has those of the rule.
                may_fit = scheme.args.form is None and _is_read_once(model, match.tensor)
                block = _fitting_block(sizes, request, form) if may_fit else scheme.block_size
                return change_scheme(scheme, args=form.args, block_size=block)
        return standard

    @cached_property
    def _product_elements(self) -> int:
        return count_product_weights(self.matcher.model.graphs)

    @cached_property
    def _sized_model(self) -> Model:
        """The model with usual sizes. One with states mostly computes a single step, for which it needs none."""
        return self.matcher.model if find_states(self.matcher.model) else self.options.assume_sizes(self.matcher.model)

    def _scheme_conflict(
        self, match: RuleMatch, scheme: Scheme, family: QDQFamily, axis: int | None, view: Shape | None
    ) -> str:
        """Return the reason why the use cannot have this scheme, or ""."""
        model, dtype = self.matcher.model, self.matcher.model.output(match.tensor).dtype
        if scheme.per != "tensor" and axis is None:
            return _no_axis_reason(scheme, match.use)
        if view is not None and None in view:
            return f"scheme {scheme.name!r} is per channel, but the kernel's shape is unknown"
        if dtype is None:
            return "its data type is only known at run time"
        consumer, named = model.graphs[match.use.graph].op(match.use.op), match.rule.scheme
        if dtype == "float16" and consumer.kind in TABLE_KINDS and named is not None and named.args.form == FOLDED_FORM:
            return "onnxruntime would dequantize the whole float16 table in each run"
        if family.format != model.format:
            return f"family {family.name!r} is only for {family.format} models"
        request = scheme.family_request(
            axis=axis,
            dtype=dtype,
            shape=view or self.matcher.shape(match.tensor),
            is_parameter=self.matcher.parameters.is_parameter(match.tensor),
            opset=model.opset,
            targets=self.matcher.ruleset.targets,
        )
        return family.unsupported_reason(request) or ""

    def _supported_scheme(self, match: RuleMatch, scheme: Scheme) -> Scheme:
        """Return a rule's scheme as the family of the caller supports it, with the caller's source of ranges if any."""
        family, source = FAMILIES[self.options.family], self.options.range_source
        if scheme.family and FAMILIES[scheme.family].variant_of:
            scheme = self._choose_fused_form(match, scheme)
        adapted = _adapt_to_family(scheme, family, source)
        if adapted.range == scheme.range:
            return adapted
        conflict = self._scheme_conflict(match, adapted, family, *self._scale_layout(match, adapted))
        return _adapt_to_family(scheme, family, "observed") if conflict else adapted

    def _exclusion(self, match: RuleMatch) -> tuple[SkipCode, str] | None:
        """Return the reason why this match stays float for any scheme, or None."""
        rule, use, parameters = match.rule.rule, match.use, self.matcher.parameters
        if rule.quantize in {"float", FUSED}:
            return SkipCode.RULE, rule.why or f"rule {rule.name!r} keeps it in float"
        quantized_reason = already_quantized_reason(self.matcher, match.tensor, use)
        if quantized_reason:
            return SkipCode.QUANTIZED, quantized_reason
        forwards = self.matcher.model.graphs[use.graph].op(use.op).kind in FORWARDING_KINDS
        computes_weight = not forwards and parameters.is_parameter(TensorRef(use.graph, use.op))
        if computes_weight and not (rule.producer.name or rule.consumer.name):
            return SkipCode.WEIGHT, COMPUTES_WEIGHT
        if not (self.options.include or self.options.exclude):
            return None
        # The name of an op means each of its outputs.
        labels = (
            *op_selector_names(use.graph, use.op),
            *op_selector_names(match.tensor.graph, match.tensor.op),
            *self.matcher.labels(match.tensor),
        )
        if self.options.include and not any(name_matches(pattern, *labels) for pattern in self.options.include):
            return SkipCode.SELECTION, "--include matches neither it nor its consumer"
        excluded = next((pattern for pattern in self.options.exclude if name_matches(pattern, *labels)), None)
        return (SkipCode.SELECTION, f"--exclude {excluded!r}") if excluded is not None else None

    def _find_tied_inputs(self, graph_name: str, op_name: str, matches: Sequence[RuleMatch]) -> tuple[Use, ...]:
        """Return the uses of the data that an op passes through, with weights if it changes no value."""
        graph = self.matcher.model.graphs[graph_name]
        op = graph.op(op_name)
        # A Gather with a constant table returns rows of it.
        is_copy = op.kind in CONCATENATING_KINDS | {"gather"}
        weights = is_copy or any(match.rule.rule.quantize == PASSTHROUGH for match in matches)
        return tuple(
            Use(graph_name, op_name, slot)
            for slot, tensor in enumerate(graph.slots(op_name))
            if tensor is not None
            and op.role(slot) == "input"
            and (weights or not self.matcher.parameters.is_parameter(tensor))
        )

    def _scale_layout(self, match: RuleMatch, scheme: Scheme) -> tuple[int | None, Shape | None]:
        """Return the axis of channels or blocks, None per tensor, and the view that has it if that is not the shape."""
        consumer, shape = self.matcher.model.graphs[match.use.graph].op(match.use.op), self.matcher.shape(match.tensor)
        role = consumer.role(match.use.slot)
        if scheme.per == "tensor" or shape is None:
            return None, None
        if scheme.axis is not None:
            return scheme.axis if scheme.axis < len(shape) else None, None
        if scheme.per == "block":
            return reduction_axis(consumer, role, shape), None
        if role == "bias":
            return 0 if len(shape) == 1 else None, None
        axis = channel_axis(consumer, shape) if role in {"weight", "recurrent_weight"} else None
        return axis, None if axis is None else merged_channel_shape(consumer, shape)

    def _add_skip(self, match: RuleMatch, code: SkipCode, reason: str) -> None:
        key = (match.tensor, match.rule.rule.name, reason)
        pending = _PendingSite(first_match=match, uses=[], reason=reason, code=code)
        self._skips.setdefault(key, pending).uses.append(match.use)


def _adapt_to_family(scheme: Scheme, family: QDQFamily, range_source: RangeSource) -> Scheme:
    """Return the scheme with a source of ranges, and without the parts that a family, not named by it, lacks."""
    if scheme.family is not None or not isinstance(scheme.type, IntType):
        return scheme
    if scheme.range == "observed" and scheme.scale == "any" and scheme.observe.name not in FIXED_OBSERVERS:
        scheme = change_scheme(scheme, range=range_source)
    if not family.has_zero_points:
        scheme = change_scheme(scheme, zero="symmetric", dtype=None, bits=scheme.type.bits, signed=True)
        if scheme.per == "block":
            scheme = change_scheme(scheme, per="channel", axis=None, block_size=None)
    if scheme.per == "channel" and scheme.range != "dynamic" and not family.has_channel_ranges:
        scheme = change_scheme(scheme, per="tensor", axis=None)
    return scheme


def _no_axis_reason(scheme: Scheme, use: Use) -> str:
    """Return the reason why there is no axis of channels or blocks."""
    if scheme.axis is not None:
        return f"scheme {scheme.name!r} is for axis {scheme.axis}, which the tensor lacks or may lack"
    if scheme.per == "block":
        return f"scheme {scheme.name!r} is per block, but {use} sums over no axis; give 'axis'"
    return f"scheme {scheme.name!r} is per channel, but {use} has no channel axis"


def _insertion_graph(match: RuleMatch) -> str:
    """Return the name of the graph that receives the new ops."""
    return match.use.graph if match.rule.rule.insert_in == "body" else match.tensor.graph


def _check_name_patterns(matcher: RuleMatcher, options: SiteSelection, source: Model | None) -> None:
    labels = matcher.all_labels() if options.include or options.exclude else []
    for option, patterns in (("--include", options.include), ("--exclude", options.exclude)):
        for pattern in patterns:
            if not any(name_matches(pattern, label) for label in labels):
                hint = "" if source is None else removed_name_hint(source, matcher.model, pattern)
                raise UsageError(
                    f"{option} {pattern!r} matches no op or tensor of the model."
                    f"{hint or did_you_mean(pattern, labels) or LIST_NAMES_HINT}"
                )
