"""Differences of two models or two plans: ops, wiring, attributes, weights and quantization."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from graphquant.analysis.model_summary import QuantizationOp, summarize_model
from graphquant.errors import UsageError
from graphquant.ir import BOUNDARY_KINDS, STORED_KINDS, Model, TensorRef, Use
from graphquant.ir.op_matching import (
    OpMatching,
    consumers_through_qdq,
    is_inserted,
    match_ops,
    unclipped_source,
    unquantized_source,
)
from graphquant.numerics import DynamicQParams
from graphquant.quantize.prepare import PREPARATION_STEPS
from graphquant.utils.text import format_shape, join_limited

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.ir import Graph, Op
    from graphquant.numerics import Array, QParams
    from graphquant.quantize import Plan, Site

    QuantizationOps = list[QuantizationOp]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChange:
    """One difference.

    Attributes:
        kind: Kind of the difference.
        location: The op or tensor, by its name in the second model if it exists there.
        message: The old and the new state.
        size: Largest relative change of scales, or largest absolute change of a weight.
    """

    kind: ModelChangeKind
    location: str
    message: str
    size: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """All differences, in graph order.

    Attributes:
        changes: The differences.
        rerouted: Number of uses that read a quantized tensor in only one of the two.
    """

    changes: tuple[ModelChange, ...]
    rerouted: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """Number of differences by kind."""
        counter = Counter(change.kind for change in self.changes)
        return {kind: counter[kind] for kind in MODEL_CHANGE_KINDS if counter[kind]}

    def __bool__(self) -> bool:
        return bool(self.changes)


MODEL_CHANGE_KINDS: tuple[ModelChangeKind, ...] = get_args(ModelChangeKind)


# Quantization ops are compared by the uses that read through them, because their names and structure may differ.


def diff_sites(first: Model, second: Model, op_pairs: OpMatching) -> tuple[list[ModelChange], int]:
    """Compare the quantization of two models; also count the uses that are quantized in only one."""
    before, after = _quantization_by_use(first), _quantization_by_use(second)
    translated = {_translate_use(use, op_pairs): quantization_ops for use, quantization_ops in before.items()}
    rerouted = sum(
        len(quantization_ops) != len(after.get(use, ()))
        for use, quantization_ops in translated.items()
        if use is not None
    )
    rerouted += sum(use not in translated for use in after)
    matches: dict[str, tuple[QuantizationOp, QuantizationOp | None]] = {}
    matched_keys: set[str] = set()
    for use, quantization_ops in after.items():
        first_ops = translated.get(use, [])
        for position, second_op in enumerate(quantization_ops):
            first_match = first_ops[position] if position < len(first_ops) else None
            key = _site_key(second, second_op)
            if key not in matches or matches[key][1] is None:
                matches[key] = second_op, first_match
            if first_match is not None:
                matched_keys.add(_site_key(first, first_match))
    changes: list[ModelChange] = []
    for second_op, first_match in matches.values():
        location = _site_location(second, second_op)
        if first_match is None:
            changes.append(ModelChange(kind="site-added", location=location, message=_describe_quantization(second_op)))
        else:
            changes += _quantization_changes(location, first_match, second_op)
    first_by_key = {
        _site_key(first, first_op): first_op for quantization_ops in before.values() for first_op in quantization_ops
    }
    changes += [
        ModelChange(
            kind="site-removed", location=_site_location(first, first_op), message=_describe_quantization(first_op)
        )
        for key, first_op in first_by_key.items()
        if key not in matched_keys
    ]
    return changes, rerouted


def _site_location(model: Model, quantization_op: QuantizationOp) -> str:
    """The quantized tensor as recorded by graphquant, because the op may read integers."""
    return model.graphs[quantization_op.graph].op(quantization_op.op).anchor or str(
        unclipped_source(model, quantization_op.tensor)
    )


def _site_key(model: Model, quantization_op: QuantizationOp) -> str:
    """Identity of a quantization; one Q op can have several DQ ops in other graphs."""
    op = model.graphs[quantization_op.graph].op(quantization_op.op)
    return (
        f"{op.rule} {op.anchor} {_describe_quantization(quantization_op)}"
        if op.anchor
        else f"{quantization_op.graph}/{quantization_op.op}"
    )


def _quantization_by_use(model: Model) -> dict[Use, QuantizationOps]:
    """Quantization ops that each use reads through, in graph order."""
    by_use: dict[Use, QuantizationOps] = defaultdict(list)
    for quantization_op in summarize_model(model).quantization_ops:
        for use in consumers_through_qdq(model, TensorRef(quantization_op.graph, quantization_op.op)):
            by_use[use].append(quantization_op)
    return by_use


def _translate_use(use: Use, op_pairs: OpMatching) -> Use | None:
    """The corresponding use of the other model; None if its op does not exist there."""
    op = op_pairs.forward.get((use.graph, use.op))
    return None if op is None else Use(*op, use.slot)


def _describe_quantization(quantization_op: QuantizationOp) -> str:
    params = quantization_op.params
    if params is None:
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
        yield ModelChange(kind="site-changed", location=location, message=f"{first_op.type} became {second_op.type}")
    if (
        first_params is None
        or second_params is None
        or isinstance(first_params, DynamicQParams)
        or isinstance(second_params, DynamicQParams)
    ):
        if _describe_quantization(first_op) != _describe_quantization(second_op):
            yield ModelChange(
                kind="site-changed",
                location=location,
                message=f"{_describe_quantization(first_op)} became {_describe_quantization(second_op)}",
            )
        return
    yield from _params_changes(location, first_params, second_params)


def _params_changes(location: str, first_params: QParams, second_params: QParams) -> Iterator[ModelChange]:
    messages = [
        f"{label} {first_value} became {second_value}"
        for label, first_value, second_value in (
            ("type", first_params.type.name, second_params.type.name),
            ("axis", first_params.axis, second_params.axis),
            ("block", first_params.block, second_params.block),
            ("narrow", first_params.narrow, second_params.narrow),
        )
        if first_value != second_value
    ]
    if first_params.scale.shape != second_params.scale.shape:
        messages.append(f"{first_params.scale.size} scales became {second_params.scale.size}")
    elif not np.array_equal(first_params.zero_point, second_params.zero_point):
        messages.append(
            f"zero point {_format_span(first_params.zero_point)} became {_format_span(second_params.zero_point)}"
        )
    if messages:
        yield ModelChange(kind="site-changed", location=location, message=", ".join(messages))
    if first_params.scale.shape == second_params.scale.shape and not np.array_equal(
        first_params.scale, second_params.scale
    ):
        relative_change = float(np.abs(second_params.scale.astype(float) / first_params.scale.astype(float) - 1).max())
        yield ModelChange(
            kind="scale",
            location=location,
            message=f"{_format_span(first_params.scale)} became {_format_span(second_params.scale)}"
            f" ({100 * relative_change:.3g}%)",
            size=relative_change,
        )


SCALE_SOURCE_KINDS = STORED_KINDS | {"read_variable", "identity", "enter"}
"""Kinds of the ops that compute the scale of a quantization op."""


def diff_models(first: Model, second: Model, *, quantization: bool = True) -> Differences:
    """Compare two models of one format.

    Args:
        first: The first model.
        second: The second model.
        quantization: True to compare quantization too.

    Raises:
        ModelError: A weight cannot be read.
        UsageError: The models have different formats.
    """
    if first.format != second.format:
        raise UsageError(
            f"The models have the formats {first.format} and {second.format}, but diff compares models of one format."
            " `graphquant compare` runs both on the same data."
        )
    op_pairs = match_ops(first, second)
    changes = list(_model_changes(first, second, op_pairs))
    helper_ops = _quantization_helper_ops(first) | _quantization_helper_ops(second)
    for name, graph in second.graphs.items():
        for op in graph.ops():
            op_id = op_pairs.backward.get((name, op.name))
            if is_inserted(op) or (op.kind in STORED_KINDS and op_id is None) or (name, op.name) in helper_ops:
                continue
            if op_id is None:
                changes.append(ModelChange(kind="op-added", location=_op_location(name, op.name), message=op.type))
            else:
                changes += _op_changes(first, second, op_pairs, first.graphs[op_id[0]], graph, op_id[1], op)
    for name, graph in first.graphs.items():
        changes += [
            ModelChange(kind="op-removed", location=_op_location(name, op.name), message=op.type)
            for op in graph.ops()
            if (name, op.name) not in op_pairs.forward
            and not is_inserted(op)
            and op.kind not in STORED_KINDS
            and (name, op.name) not in helper_ops
        ]
    rerouted = 0
    if quantization:
        site_changes, rerouted = diff_sites(first, second, op_pairs)
        changes += site_changes
        changes += _stored_scale_changes(first, second, op_pairs)
    return Differences(changes=tuple(changes), rerouted=rerouted)


def _op_location(graph: str, op: str) -> str:
    return f"{graph}/{op}" if graph else op


def _model_changes(first: Model, second: Model, op_pairs: OpMatching) -> Iterator[ModelChange]:
    """Changes of the whole model."""
    if first.opset != second.opset:
        yield ModelChange(kind="model", location="opset", message=f"{first.opset} became {second.opset}")
    matched_graphs = set(op_pairs.graphs.values())
    for name in second.graphs:
        if name not in matched_graphs:
            yield ModelChange(kind="model", location=name, message="this graph is new")
    for name in first.graphs:
        if name not in op_pairs.graphs:
            yield ModelChange(kind="model", location=name, message="this graph is gone")


def _quantization_helper_ops(model: Model) -> set[tuple[str, str]]:
    """Constants and other ops that only quantization ops read: scales, zero points and ranges."""
    helper_ops = set()
    for name, graph in model.graphs.items():
        for op in graph.ops():
            uses = [use for users in graph.consumers_by_port(op.name).values() for use in users]
            if (op.kind in SCALE_SOURCE_KINDS and uses and all(_is_scale_use(model, use) for use in uses)) or (
                op.rule and op.rule not in PREPARATION_STEPS and op.kind not in BOUNDARY_KINDS and not is_inserted(op)
            ):
                helper_ops.add((name, op.name))
    return helper_ops


def _is_scale_use(model: Model, use: Use) -> bool:
    """Return True if the use reads a scale, zero point or range."""
    op = model.graphs[use.graph].op(use.op)
    return (is_inserted(op) and use.slot > 0) or (op.kind in SCALE_SOURCE_KINDS and bool(op.rule))


def _op_changes(
    first: Model, second: Model, op_pairs: OpMatching, first_graph: Graph, second_graph: Graph, name: str, second_op: Op
) -> Iterator[ModelChange]:
    """Changes of an op that both models have."""
    first_op, location = first_graph.op(name), _op_location(second_graph.name, second_op.name)
    same_value = (
        first_op.kind in STORED_KINDS
        and second_op.kind in STORED_KINDS
        and first_op.outputs[:1]
        and first_op.outputs[0].name == second_op.outputs[0].name
    )
    if name != second_op.name and not same_value:  # a Constant node may have become an initializer
        yield ModelChange(kind="op-renamed", location=location, message=f"was {_op_location(first_graph.name, name)}")
    yield from _weight_changes(location, first_op, second_op)
    if first_op.kind in STORED_KINDS and second_op.kind in STORED_KINDS:
        return
    if (first_op.domain, first_op.type) != (second_op.domain, second_op.type):
        yield ModelChange(kind="op-changed", location=location, message=f"{first_op.type} became {second_op.type}")
    if first_op.kind in BOUNDARY_KINDS and first_op.outputs and second_op.outputs:
        before, after = first_op.outputs[0], second_op.outputs[0]
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            message = f"{before.dtype} {format_shape(before.shape)} became {after.dtype} {format_shape(after.shape)}"
            yield ModelChange(kind="op-changed", location=location, message=message)
    if first_op.kind not in BOUNDARY_KINDS:
        yield from _attribute_changes(location, first_op, second_op)
    yield from _wiring_changes(
        first, second, op_pairs, first_graph.slots(name), second_graph.slots(second_op.name), location
    )


def _attribute_changes(location: str, first_op: Op, second_op: Op) -> Iterator[ModelChange]:
    """Added, removed and changed attributes."""
    body_attributes = {call.attr for call in (*first_op.calls, *second_op.calls)}
    for name in sorted({*first_op.attrs, *second_op.attrs}):
        if name.startswith("_") or name in body_attributes:
            continue
        before, after = first_op.attrs.get(name), second_op.attrs.get(name)
        if not _attributes_equal(before, after):
            yield ModelChange(
                kind="attribute",
                location=location,
                message=f"{name}: {_shorten_value(before)} became {_shorten_value(after)}",
            )


def _attributes_equal(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        same_type = isinstance(first, np.ndarray) and isinstance(second, np.ndarray) and first.dtype == second.dtype
        return same_type and first.shape == second.shape and first.tobytes() == second.tobytes()
    return type(first) is type(second) and bool(first == second)


def _shorten_value(value: Any) -> str:
    if value is None:
        return "nothing"
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else f"{text[:60]}..."  # noqa: PLR2004  # it is to fit a line


def _weight_changes(location: str, first_op: Op, second_op: Op) -> Iterator[ModelChange]:
    """Change of a weight's values."""
    if first_op.read_value is None or second_op.read_value is None:
        return
    before, after = first_op.read_value(), second_op.read_value()
    if before.dtype != after.dtype or before.shape != after.shape:
        message = f"{before.dtype} {format_shape(before.shape)} became {after.dtype} {format_shape(after.shape)}"
        yield ModelChange(kind="weight", location=location, message=message)
    elif before.dtype.kind in "OSUV":
        if before.tolist() != after.tolist():
            yield ModelChange(kind="weight", location=location, message="has different values")
    elif before.tobytes() != after.tobytes():
        errors = np.abs(after.astype(np.float64) - before.astype(np.float64))
        largest = float(np.nan_to_num(errors, nan=np.inf).max())
        message = f"{int((errors != 0).sum())} of {errors.size} values differ, by up to {largest:.4g}"
        yield ModelChange(kind="weight", location=location, message=message, size=largest)


def _wiring_changes(
    first: Model,
    second: Model,
    op_pairs: OpMatching,
    first_slots: list[TensorRef | None],
    second_slots: list[TensorRef | None],
    location: str,
) -> Iterator[ModelChange]:
    """Inputs that read another tensor."""
    for slot in range(max(len(first_slots), len(second_slots))):
        before = first_slots[slot] if slot < len(first_slots) else None
        after = second_slots[slot] if slot < len(second_slots) else None
        unquantized_before = None if before is None else unquantized_source(first, before)
        unquantized_after = None if after is None else unquantized_source(second, after)
        if unquantized_before is not None and unquantized_after is not None:
            reads_folded_value = {
                model.op(tensor).kind for model, tensor in ((first, unquantized_before), (second, unquantized_after))
            } <= STORED_KINDS
            if op_pairs.matching_tensor(unquantized_before) == unquantized_after or (
                reads_folded_value and (unquantized_before != before or unquantized_after != after)
            ):
                continue
        if unquantized_before is not None or unquantized_after is not None:
            yield ModelChange(
                kind="wiring",
                location=f"{location}[{slot}]",
                message=f"{unquantized_before or 'nothing'} became {unquantized_after or 'nothing'}",
            )


def _stored_scale_changes(first: Model, second: Model, op_pairs: OpMatching) -> Iterator[ModelChange]:
    """Changes of scales that are stored in tensors (TFLite)."""
    for first_key, second_key in op_pairs.forward.items():
        first_op, second_op = (
            first.graphs[first_key[0]].op(first_key[1]),
            second.graphs[second_key[0]].op(second_key[1]),
        )
        for first_output, second_output in zip(first_op.outputs, second_op.outputs, strict=False):
            old_stored, new_stored = first_output.quantization, second_output.quantization
            if old_stored is None or new_stored is None:
                continue
            if old_stored.scale.shape != new_stored.scale.shape or not np.array_equal(
                old_stored.zero_point, new_stored.zero_point
            ):
                yield ModelChange(
                    kind="site-changed",
                    location=second_output.name,
                    message="other zero points, or another number of scales",
                )
            elif not np.array_equal(old_stored.scale, new_stored.scale):
                relative_change = float(
                    np.abs(
                        new_stored.scale.astype(float) / np.where(old_stored.scale == 0, 1, old_stored.scale) - 1
                    ).max()
                )
                message = (
                    f"{old_stored.scale.min():.6g} became {new_stored.scale.min():.6g} ({100 * relative_change:.3g}%)"
                )
                yield ModelChange(kind="scale", location=second_output.name, message=message, size=relative_change)


def diff_plans(first: Plan, second: Plan) -> Differences:
    """Compare two plans. Sites correspond if they share the tensor and a use."""
    changes: list[ModelChange] = []
    for name in ("format", "model", "prepared"):
        before, after = getattr(first, name), getattr(second, name)
        if before != after:
            changes.append(ModelChange(kind="plan", location=name, message=f"{before[:12]} became {after[:12]}"))
    steps = [{(step.step, step.target): step for step in plan.steps} for plan in (first, second)]
    changes += [
        ModelChange(kind="plan", location=f"{step_name} {target}", message="is prepared")
        for step_name, target in steps[1]
        if (step_name, target) not in steps[0]
    ]
    changes += [
        ModelChange(kind="plan", location=f"{step_name} {target}", message="is not prepared")
        for step_name, target in steps[0]
        if (step_name, target) not in steps[1]
    ]
    changes += [
        ModelChange(
            kind="plan",
            location=f"algorithm {name}",
            message="is added" if name in second.algorithms else "is removed",
        )
        for name in dict.fromkeys([*first.algorithms, *second.algorithms])
        if (name in first.algorithms) != (name in second.algorithms)
    ]
    first_site_by_use = {use: site for site in first.sites for use in site.uses}
    second_site_by_use = {use: site for site in second.sites for use in site.uses}
    for site in second.sites:
        matching_site = next(
            (
                first_site_by_use[use]
                for use in site.uses
                if use in first_site_by_use and first_site_by_use[use].tensor == site.tensor
            ),
            None,
        )
        if matching_site is None:
            changes.append(
                ModelChange(kind="site-added", location=str(site.tensor), message=_describe_planned_site(site))
            )
        else:
            changes += _planned_site_changes(matching_site, site)
    for site in first.sites:
        if not any(use in second_site_by_use and second_site_by_use[use].tensor == site.tensor for use in site.uses):
            changes.append(
                ModelChange(kind="site-removed", location=str(site.tensor), message=_describe_planned_site(site))
            )
    return Differences(changes=tuple(changes), rerouted=len(first_site_by_use.keys() ^ second_site_by_use.keys()))


def _describe_planned_site(site: Site) -> str:
    scheme = site.scheme
    return f"{scheme.type.name}, rule {site.rule}, read by {join_limited(site.uses, 3)}"


def _planned_site_changes(first_site: Site, second_site: Site) -> Iterator[ModelChange]:
    """Changes of a site that both plans have."""
    location = str(second_site.tensor)
    messages = [
        f"{field.name}: {getattr(first_site.scheme, field.name)} became {getattr(second_site.scheme, field.name)}"
        for field in fields(second_site.scheme)
        if field.name != "name" and getattr(first_site.scheme, field.name) != getattr(second_site.scheme, field.name)
    ]
    messages += [
        f"{name}: {getattr(first_site, name)} became {getattr(second_site, name)}"
        for name in ("rule", "axis", "range", "scale", "zero_point", "tie")
        if getattr(first_site, name) != getattr(second_site, name)
    ]
    if set(first_site.uses) != set(second_site.uses):
        messages.append(f"read by {join_limited(first_site.uses, 3)} became {join_limited(second_site.uses, 3)}")
    if messages:
        yield ModelChange(kind="site-changed", location=location, message="; ".join(messages))
