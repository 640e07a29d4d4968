"""Differences of two models or two plans: ops, wiring, attributes, weights and quantization."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from graphquant.analysis.model_summary import QuantizationOp, summarize_model
from graphquant.errors import UsageError
from graphquant.ir import (
    BOUNDARY_KINDS,
    STORED_KINDS,
    Call,
    Graph,
    Model,
    Op,
    OpKey,
    Output,
    TensorRef,
    Use,
    qualified_op_name,
)
from graphquant.ir.op_matching import (
    OpMatching,
    consumers_through_qdq,
    is_inserted,
    match_ops,
    unclipped_source,
    unquantized_source,
)
from graphquant.ir.types import reachable
from graphquant.numerics import Array, DynamicQParams, QParams
from graphquant.utils import HtmlRepresentation
from graphquant.utils.text import format_shape, join_limited

if TYPE_CHECKING:
    from graphquant.quantize import Plan, Site

ModelChangeKind = Literal[
    "model",
    "op-added",
    "op-removed",
    "op-renamed",
    "op-changed",
    "attribute",
    "wiring",
    "weight",
    "site-added",
    "site-removed",
    "site-changed",
    "scale",
    "plan",
]
"""Kind of a difference: of the whole model or plan, an op, the wiring, a weight, or a quantization."""

SCALE_SOURCE_KINDS = STORED_KINDS | {"read_variable", "identity", "enter"}
"""Kinds of the ops that compute the scale of a quantization op."""

ASSIGNMENT_TYPES = frozenset({"Assign", "AssignVariableOp"})
CHECKPOINT_WRITER_TYPES = frozenset({"Save", "SaveSlices", "SaveV2"})


@dataclass(frozen=True, slots=True)
class ModelChange:
    """One difference."""

    kind: ModelChangeKind
    location: str  # the op or tensor, by its name in the second model if it exists there
    message: str  # the old and the new state
    size: float = 0.0  # largest relative change of scales, or largest absolute change of a weight


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Differences(HtmlRepresentation):
    """All differences, in graph order."""

    changes: tuple[ModelChange, ...]
    rerouted: int = 0  # number of uses that read a quantized tensor in only one of the two

    @property
    def counts(self) -> dict[str, int]:
        """Number of differences by kind."""
        counter = Counter(change.kind for change in self.changes)
        return {kind: counter[kind] for kind in get_args(ModelChangeKind) if counter[kind]}

    def __bool__(self) -> bool:
        return bool(self.changes)


def diff_models(first: Model, second: Model, *, quantization: bool = True) -> Differences:
    """Compare two models of one format.

    Raises a ModelError if a weight cannot be read, and a UsageError if the models have different formats.
    """
    if first.format != second.format:
        raise UsageError(
            f"The models have the formats {first.format} and {second.format}, but diff compares models of one format."
            " `graphquant compare` runs both on the same data."
        )
    op_pairs = match_ops(first, second)
    changes = list(_model_changes(first, second, op_pairs))
    first_helpers, second_helpers = map(_quantization_helper_ops, (first, second))
    helper_ops = first_helpers | second_helpers
    for graph in second.graphs.values():
        for op in graph.ops():
            op_id = op_pairs.backward.get((graph.name, op.name))
            if is_inserted(op) or (op.kind in STORED_KINDS and op_id is None) or (graph.name, op.name) in helper_ops:
                continue
            if op_id is None:
                changes.append(ModelChange("op-added", qualified_op_name(graph.name, op.name), op.type))
            else:
                changes += _op_changes(first, second, op_pairs, helper_ops, first.graphs[op_id[0]], graph, op_id[1], op)
    changes += [
        ModelChange("op-removed", qualified_op_name(graph.name, op.name), op.type)
        for graph in first.graphs.values()
        for op in graph.ops()
        if not (is_inserted(op) or op.kind in STORED_KINDS)
        and (graph.name, op.name) not in helper_ops | op_pairs.forward.keys()
    ]
    rerouted = 0
    if quantization:
        site_changes, rerouted = diff_sites(first, second, op_pairs)
        changes += site_changes
        changes += _stored_scale_changes(first, second, op_pairs)
    return Differences(changes=tuple(changes), rerouted=rerouted)


def _model_changes(first: Model, second: Model, op_pairs: OpMatching) -> Iterator[ModelChange]:
    """Changes of the whole model."""
    if first.opset != second.opset:
        yield ModelChange("model", "opset", f"{first.opset} became {second.opset}")
    matched = set(op_pairs.graphs.values())
    yield from (ModelChange("model", name, "this graph is new") for name in second.graphs if name not in matched)
    yield from (
        ModelChange("model", name, "this graph is gone") for name in first.graphs if name not in op_pairs.graphs
    )


def _quantization_helper_ops(model: Model) -> set[OpKey]:
    """Ops whose values only quantization ops read: scales, zero points and ranges.

    Also the arguments that pass such values to functions, and the ops that initialize and restore their variables.
    """
    callers = model.callers()
    targets: dict[TensorRef, list[TensorRef]] = defaultdict(list)
    sources: dict[TensorRef, list[TensorRef]] = defaultdict(list)
    scales, others = list[TensorRef](), list[TensorRef]()
    for graph in model.graphs.values():
        for op in graph.ops():
            is_passed = op.kind in SCALE_SOURCE_KINDS or op.calls or (op.kind == "input" and graph.name)
            for port, uses in graph.consumers_by_port(op.name).items() if is_passed else ():
                tensor = TensorRef(graph.name, op.name, port)
                for use in uses:
                    reader = model.graphs[use.graph].op(use.op)
                    passed = _passed_tensors(model, callers, use, reader)
                    targets[tensor] += passed
                    for target in passed:
                        sources[target].append(tensor)
                    if is_inserted(reader) and use.slot > 0:
                        scales.append(tensor)
                    elif not passed and reader.type not in CHECKPOINT_WRITER_TYPES:
                        others.append(tensor)
    feeds_scales, feeds_others = (set(reachable(ends, sources.__getitem__)) for ends in (scales, others))
    passed_on = reachable(feeds_scales - feeds_others, targets.__getitem__)  # also arguments that a function ignores
    helper_ops = {(tensor.graph, tensor.op) for tensor in passed_on if not model.op(tensor).calls}
    return helper_ops | set(_initialization_ops(model, helper_ops))


def _initialization_ops(model: Model, helper_ops: set[OpKey]) -> Iterator[OpKey]:
    """Yield the ops that read the values of assignments in `helper_ops` from a checkpoint, or run them all."""
    for name in {graph for graph, op in helper_ops if model.graphs[graph].op(op).type in ASSIGNMENT_TYPES}:
        graph = model.graphs[name]
        for op in graph.ops():
            readers = [use.op for users in graph.consumers_by_port(op.name).values() for use in users]
            dependents = readers if op.outputs else graph.control_inputs(op.name)
            if dependents and not op.calls and helper_ops.issuperset((name, dependent) for dependent in dependents):
                yield name, op.name


def _passed_tensors(model: Model, callers: dict[str, list[tuple[Use, Call]]], use: Use, reader: Op) -> list[TensorRef]:
    """Tensors as which `reader` passes its operand on. An op without outputs counts as its own first output."""
    if reader.kind in SCALE_SOURCE_KINDS or (reader.type in ASSIGNMENT_TYPES and use.slot == 0):
        return [TensorRef(use.graph, use.op)]
    if reader.kind == "output":
        position = model.graphs[use.graph].outputs.index(use.op)
        calls = [caller for caller, call in callers.get(use.graph, []) if call.offset is not None]
        results = [TensorRef(caller.graph, caller.op, position) for caller in calls]
        is_returned = results and all(position < len(model.op(result).outputs) for result in results)
        return [TensorRef(use.graph, use.op), *results] if is_returned else []
    if (offset := _call_offset(reader)) is None:
        return []
    inputs = [(call.graph, model.graphs[call.graph].inputs) for call in reader.calls]
    is_passed = all(0 <= use.slot - offset < len(names) for _, names in inputs)
    return [TensorRef(graph, names[use.slot - offset]) for graph, names in inputs] if is_passed else []


def _call_offset(op: Op) -> int | None:
    """The slot of an op's first argument. The condition of a loop receives the same arguments as the body."""
    return next((call.offset for call in op.calls if call.offset is not None), None)


def _op_changes(
    first: Model,
    second: Model,
    op_pairs: OpMatching,
    helper_ops: set[OpKey],
    first_graph: Graph,
    second_graph: Graph,
    name: str,
    second_op: Op,
) -> Iterator[ModelChange]:
    """Changes of an op that both models have."""
    first_op, location = first_graph.op(name), qualified_op_name(second_graph.name, second_op.name)
    slots = first_graph.slots(name), second_graph.slots(second_op.name)
    helper_slots = [
        {slot for slot, tensor in enumerate(op_slots) if tensor is not None and (tensor.graph, tensor.op) in helper_ops}
        for op_slots in slots
    ]
    if any(helper_slots) and second_op.type in CHECKPOINT_WRITER_TYPES:
        return  # it also saves the variables of learned ranges
    stored = first_op.kind in STORED_KINDS  # matched ops are both stored, or have the same type
    same_value = stored and {output.name for output in first_op.outputs} & {output.name for output in second_op.outputs}
    has_position = first_op.kind in BOUNDARY_KINDS and first_graph.parent is not None  # which counts, not its name
    if name != second_op.name and not same_value and not has_position:  # a Constant may have become an initializer
        yield ModelChange("op-renamed", location, f"was {qualified_op_name(first_graph.name, name)}")
    yield from _weight_changes(location, first_op, second_op)
    if stored:
        return
    if first_op.type != second_op.type and not any(helper_slots):  # a function that reads variables is stateful
        yield ModelChange("op-changed", location, f"{first_op.type} became {second_op.type}")
    if first_op.kind not in BOUNDARY_KINDS:
        yield from _attribute_changes(location, first_op, second_op, slots, helper_slots)
    else:
        before, after = map(_describe_boundary, (first_op, second_op))
        if before != after:
            yield ModelChange("op-changed", location, f"{before} became {after}")
    first_slots, second_slots = (
        [slot for position, slot in enumerate(each) if position not in helpers]
        for each, helpers in zip(slots, helper_slots, strict=True)
    )
    yield from _wiring_changes(first, second, op_pairs, first_slots, second_slots, location)


def _describe_boundary(op: Op) -> str:
    default = "" if op.read_value is None else " with a default value"
    return ", ".join(_describe_type(output) + default for output in op.outputs)


def _describe_type(array: Output | Array) -> str:
    return f"{array.dtype} {format_shape(array.shape)}"


def _attribute_changes(
    location: str,
    first_op: Op,
    second_op: Op,
    slots: tuple[list[TensorRef | None], list[TensorRef | None]],
    helper_slots: list[set[int]],
) -> Iterator[ModelChange]:
    """Added, removed and changed attributes. A list with one entry for each argument is compared without helpers."""

    def compared_value(position: int, op: Op, name: str) -> Any:
        value, call_slots = op.attrs.get(name), range(_call_offset(op) or 0, len(slots[position]))
        if not op.calls or not isinstance(value, list) or len(value) != len(call_slots):
            return value
        return [entry for entry, slot in zip(value, call_slots, strict=True) if slot not in helper_slots[position]]

    body_attributes = {call.attr for call in (*first_op.calls, *second_op.calls)}
    for name in sorted({*first_op.attrs, *second_op.attrs} - body_attributes):
        before, after = compared_value(0, first_op, name), compared_value(1, second_op, name)
        if not name.startswith("_") and not _attributes_equal(before, after):
            yield ModelChange("attribute", location, f"{name}: {_shorten_value(before)} became {_shorten_value(after)}")


def _attributes_equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes())
    return bool(first == second)


def _shorten_value(value: Any) -> str:
    text = "nothing" if value is None else " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."  # noqa: PLR2004  # it is to fit a line


def _weight_changes(location: str, first_op: Op, second_op: Op) -> Iterator[ModelChange]:
    """Change of a weight's values."""
    if first_op.read_value is None or second_op.read_value is None:
        return
    before, after = first_op.read_value(), second_op.read_value()
    if before.dtype != after.dtype or before.shape != after.shape:
        yield ModelChange("weight", location, f"{_describe_type(before)} became {_describe_type(after)}")
    elif before.dtype.kind in "OSU":
        if before.tolist() != after.tolist():
            yield ModelChange("weight", location, "has different values")
    elif before.tobytes() != after.tobytes():
        raw_before, raw_after = (np.frombuffer(value.tobytes(), f"V{value.itemsize}") for value in (before, after))
        changed = (raw_before != raw_after).reshape(before.shape)
        wide = np.result_type(before.dtype, np.float64)  # complex values stay complex
        with np.errstate(invalid="ignore"):  # an infinite value may change its sign
            errors = np.abs(after[changed].astype(wide) - before[changed].astype(wide))
        largest = float(np.nan_to_num(errors, nan=np.inf, posinf=np.inf).max())
        message = f"{errors.size} of {before.size} values differ, by up to {largest:.4g}"
        yield ModelChange("weight", location, message, largest)


def _wiring_changes(
    first: Model,
    second: Model,
    op_pairs: OpMatching,
    first_slots: list[TensorRef | None],
    second_slots: list[TensorRef | None],
    location: str,
) -> Iterator[ModelChange]:
    """Inputs that read another tensor."""
    for slot, (before, after) in enumerate(zip_longest(first_slots, second_slots)):
        unquantized_before = None if before is None else unquantized_source(first, before)
        unquantized_after = None if after is None else unquantized_source(second, after)
        if unquantized_before is not None and unquantized_after is not None:
            kinds = first.op(unquantized_before).kind, second.op(unquantized_after).kind
            reads_folded_value = STORED_KINDS.issuperset(kinds)
            if op_pairs.matching_tensor(unquantized_before) == unquantized_after or (
                reads_folded_value and (unquantized_before != before or unquantized_after != after)
            ):
                continue
        if unquantized_before is not None or unquantized_after is not None:
            message = f"{unquantized_before or 'nothing'} became {unquantized_after or 'nothing'}"
            yield ModelChange("wiring", f"{location}[{slot}]", message)


# Quantization ops are compared by the uses that read through them, because their names and structure may differ.


def diff_sites(first: Model, second: Model, op_pairs: OpMatching) -> tuple[list[ModelChange], int]:
    """Compare the quantization of two models; also count the uses that are quantized in only one."""
    before, after = _quantization_by_use(first), _quantization_by_use(second)
    translated = {
        Use(*op, use.slot): quantization_ops
        for use, quantization_ops in before.items()
        if (op := op_pairs.forward.get((use.graph, use.op))) is not None
    }
    rerouted = sum(len(translated.get(use, ())) != len(after.get(use, ())) for use in {*translated, *after})
    matches: dict[str, tuple[QuantizationOp, QuantizationOp | None]] = {}
    matched_keys: set[str] = set()
    for use, quantization_ops in after.items():
        for second_op, first_op in zip_longest(quantization_ops, translated.get(use, [])[: len(quantization_ops)]):
            key = _site_key(second, second_op)
            if key not in matches or matches[key][1] is None:
                matches[key] = second_op, first_op
            if first_op is not None:
                matched_keys.add(_site_key(first, first_op))
    changes: list[ModelChange] = []
    for second_op, first_op in matches.values():
        location = _site_location(second, second_op)
        if first_op is None:
            changes.append(ModelChange("site-added", location, _describe_quantization(second_op)))
        else:
            changes += _quantization_changes(location, first_op, second_op)
    first_by_key = {_site_key(first, first_op): first_op for ops in before.values() for first_op in ops}
    changes += [
        ModelChange("site-removed", _site_location(first, first_op), _describe_quantization(first_op))
        for key, first_op in first_by_key.items()
        if key not in matched_keys
    ]
    return changes, rerouted


def _site_location(model: Model, quantization_op: QuantizationOp) -> str:
    """The quantized tensor as recorded by graphquant, because the op may read integers."""
    anchor = model.graphs[quantization_op.graph].op(quantization_op.op).anchor
    return anchor or str(unclipped_source(model, quantization_op.tensor))


def _site_key(model: Model, quantization_op: QuantizationOp) -> str:
    """Identity of a quantization; one Q op can have several DQ ops in other graphs."""
    op = model.graphs[quantization_op.graph].op(quantization_op.op)
    if op.anchor:
        return f"{op.rule} {op.anchor} {_describe_quantization(quantization_op)}"
    return f"{quantization_op.graph}/{quantization_op.op}"


def _quantization_by_use(model: Model) -> dict[Use, list[QuantizationOp]]:
    """Quantization ops that each use reads through, in graph order."""
    by_use: dict[Use, list[QuantizationOp]] = defaultdict(list)
    for quantization_op in summarize_model(model).quantization_ops:
        for use in consumers_through_qdq(model, TensorRef(quantization_op.graph, quantization_op.op)):
            by_use[use].append(quantization_op)
    return by_use


def _describe_quantization(quantization_op: QuantizationOp) -> str:
    if (params := quantization_op.params) is None:
        return f"{quantization_op.type}, its scale is computed"
    if isinstance(params, DynamicQParams):
        return f"{params.type.name}, the range of each run"
    return f"{params.type.name}, scale {_format_span(params.scale)}, zero point {_format_span(params.zero_point)}"


def _format_span(values: Array) -> str:
    low, high = values.min(), values.max()
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


def _quantization_changes(location: str, first_op: QuantizationOp, second_op: QuantizationOp) -> Iterator[ModelChange]:
    """Changes of a quantization that both models have."""
    first_params, second_params = first_op.params, second_op.params
    if first_op.type != second_op.type:
        yield ModelChange("site-changed", location, f"{first_op.type} became {second_op.type}")
    if not isinstance(first_params, QParams) or not isinstance(second_params, QParams):
        before, after = _describe_quantization(first_op), _describe_quantization(second_op)
        if before != after:
            yield ModelChange("site-changed", location, f"{before} became {after}")
    else:
        yield from _params_changes(location, first_params, second_params)


def _params_changes(location: str, first: QParams, second: QParams) -> Iterator[ModelChange]:
    messages = [
        f"{label} {before} became {after}"
        for label, before, after in (
            ("type", first.type.name, second.type.name),
            ("axis", first.axis, second.axis),
            ("block", first.block, second.block),
            ("narrow", first.narrow, second.narrow),
        )
        if before != after
    ]
    same_shape = first.scale.shape == second.scale.shape
    if not same_shape:
        messages.append(f"{first.scale.size} scales became {second.scale.size}")
    elif not np.array_equal(first.zero_point, second.zero_point):
        messages.append(f"zero point {_format_span(first.zero_point)} became {_format_span(second.zero_point)}")
    if messages:
        yield ModelChange("site-changed", location, ", ".join(messages))
    if same_shape and not np.array_equal(first.scale, second.scale):
        yield _scale_change(location, first.scale, second.scale)


def _scale_change(location: str, before: Array, after: Array) -> ModelChange:
    size = float(np.abs(after.astype(float) / np.where(before == 0, 1, before) - 1).max())
    message = f"{_format_span(before)} became {_format_span(after)} ({100 * size:.3g}%)"
    return ModelChange("scale", location, message, size)


def _stored_scale_changes(first: Model, second: Model, op_pairs: OpMatching) -> Iterator[ModelChange]:
    """Changes of scales that are stored in tensors (TFLite)."""
    for (first_graph, first_name), (second_graph, second_name) in op_pairs.forward.items():
        first_outputs = first.graphs[first_graph].op(first_name).outputs
        second_outputs = second.graphs[second_graph].op(second_name).outputs
        for first_output, second_output in zip(first_outputs, second_outputs, strict=False):
            before, after, location = first_output.quantization, second_output.quantization, second_output.name
            if before is None or after is None:
                continue
            if before.scale.shape != after.scale.shape or not np.array_equal(before.zero_point, after.zero_point):
                yield ModelChange("site-changed", location, "other zero points, or another number of scales")
            elif not np.array_equal(before.scale, after.scale):
                yield _scale_change(location, before.scale, after.scale)


def diff_plans(first: Plan, second: Plan) -> Differences:
    """Compare two plans. Sites correspond if they share the tensor and a use."""
    changes: list[ModelChange] = []
    for name in ("format", "model", "prepared"):
        before, after = getattr(first, name), getattr(second, name)
        if before != after:
            changes.append(ModelChange("plan", name, f"{before[:12]} became {after[:12]}"))
    first_steps, second_steps = (
        {f"{step.step} {step.target}": None for step in plan.steps} for plan in (first, second)
    )
    changes += [ModelChange("plan", step, "is prepared") for step in second_steps if step not in first_steps]
    changes += [ModelChange("plan", step, "is not prepared") for step in first_steps if step not in second_steps]
    changes += [
        ModelChange("plan", f"algorithm {name}", "is added" if name in second.algorithms else "is removed")
        for name in dict.fromkeys([*first.algorithms, *second.algorithms])
        if (name in first.algorithms) != (name in second.algorithms)
    ]
    first_by_use = {(use, site.tensor): site for site in first.sites for use in site.uses}
    second_by_use = {(use, site.tensor): site for site in second.sites for use in site.uses}
    for site in second.sites:
        matches = [first_by_use[use, site.tensor] for use in site.uses if (use, site.tensor) in first_by_use]
        if matches:
            changes += _planned_site_changes(matches[0], site)
        else:
            changes.append(ModelChange("site-added", str(site.tensor), _describe_planned_site(site)))
    changes += [
        ModelChange("site-removed", str(site.tensor), _describe_planned_site(site))
        for site in first.sites
        if not any((use, site.tensor) in second_by_use for use in site.uses)
    ]
    rerouted = {use for use, _ in first_by_use} ^ {use for use, _ in second_by_use}
    return Differences(changes=tuple(changes), rerouted=len(rerouted))


def _describe_planned_site(site: Site) -> str:
    return f"{site.scheme.type.name}, rule {site.rule}, read by {join_limited(site.uses, 3)}"


def _planned_site_changes(first: Site, second: Site) -> Iterator[ModelChange]:
    """Changes of a site that both plans have."""
    names = [field.name for field in fields(second.scheme) if field.name != "name"]
    compared = [(name, getattr(first.scheme, name), getattr(second.scheme, name)) for name in names]
    site_names = ("rule", "axis", "range", "scale", "zero_point", "tie")
    compared += [(name, getattr(first, name), getattr(second, name)) for name in site_names]
    messages = [f"{name}: {before} became {after}" for name, before, after in compared if before != after]
    if set(first.uses) != set(second.uses):
        messages.append(f"read by {join_limited(first.uses, 3)} became {join_limited(second.uses, 3)}")
    if messages:
        yield ModelChange("site-changed", str(second.tensor), "; ".join(messages))
