"""The named steps before matching. Each does only what rules ask for, and leaves what is needed to take it back."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphquant.ir import DataType, Graph, Model, Op, Output, Parameters, TensorRef, Use, check
from graphquant.numerics import Array, along

FOLDABLE = frozenset({"conv", "depthwise_conv", "conv_transpose", "gemm"})
"""Kinds whose weight can take up a BatchNorm that reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One preparation that was done before matching.

    Attributes:
        step: Its name, "fold-batchnorm".
        target: The op, input or model it changed.
        detail: What was done, for people.
        undo: What is needed to take it back, as JSON data.
    """

    step: str
    target: str
    detail: str
    undo: dict[str, Any]


def prepare(model: Model, wanted: Sequence[str]) -> tuple[Model, tuple[Step, ...]]:
    """A copy of `model` after the steps named in `wanted`, and what they did; the model itself if they did nothing."""
    changed, done = model.copy(), []
    for name, step in STEPS.items():
        if name in wanted:
            done.extend(list(step(changed)))
            check(changed, name)
    if not done:
        return model, ()
    changed.digest = prepared_digest(model.digest, done)
    return changed, tuple(done)


def prepared_digest(source: str, steps: Sequence[Step]) -> str:
    """Hex SHA-256 that names the model `source` after `steps`."""
    if not steps:
        return source
    said = json.dumps([source, [[step.step, step.target, step.detail] for step in steps]])
    return hashlib.sha256(said.encode()).hexdigest()


def _initializer_inputs(model: Model) -> Iterator[Step]:
    """Initializers that are graph inputs too (IR version 3) become constants: nobody may override them any more."""
    graph = model.main
    for position, name in enumerate(graph.inputs):
        op = graph.op(name)
        if op.value is None:
            continue
        graph.replace(replace(op, kind="constant", roles=()))
        yield Step(
            step="initializer-inputs",
            target=name,
            detail="initializer is no graph input any more",
            undo={"position": position, "input": _encode(op)},
        )
    graph.inputs = [name for name in graph.inputs if graph.op(name).kind == "input"]


def _fold_batchnorm(model: Model) -> Iterator[Step]:
    """y = scale * (conv(x) - mean) / sqrt(variance + epsilon) + offset becomes one conv with other weights and bias.

    Source of the formula: Ioffe and Szegedy 2015, "Batch Normalization", section 3.1.
    """
    parameters = Parameters(model)  # what is folded was no parameter before and is none after
    for graph in model.graphs.values():
        for op in list(graph.ops()):
            if op.kind == "batchnorm":
                found = _foldable(graph, op, parameters)
                if found is not None:
                    yield _fold(graph, op, found, parameters)


@dataclass(frozen=True, slots=True)
class _Fold:
    """A BatchNorm that can be folded: the weighted op, the bias_add between (TensorFlow), weight and statistics."""

    weighted: Op
    bias_add: Op | None
    weight_slot: int
    weight: Array
    bias: Array | None
    factor: Array
    mean: Array
    offset: Array


def _foldable(graph: Graph, norm: Op, parameters: Parameters) -> _Fold | None:
    if norm.attrs.get("training_mode") or norm.attrs.get("is_training") or set(graph.readers(norm.name)) - {0}:
        return None
    slots = graph.slots(norm.name)
    statistics = [parameters.value(slot) if slot is not None else None for slot in slots[1:5]]
    source = slots[0] if slots else None
    if source is None or len(statistics) != 4 or any(value is None for value in statistics):  # noqa: PLR2004  # the four
        return None
    scale, offset, mean, variance = (np.asarray(value, np.float64) for value in statistics)
    bias_add, bias = None, None
    if source.graph == graph.name and graph.op(source.op).kind == "bias_add" and len(graph.consumers(source)) == 1:
        bias_add = graph.op(source.op)
        data, bias_ref = graph.slots(bias_add.name)[:2]
        bias = None if bias_ref is None else parameters.value(bias_ref)
        if data is None or bias is None:
            return None
        source = data
    if source.graph != graph.name or len(graph.consumers(source)) != 1:
        return None
    weighted = graph.op(source.op)
    if weighted.kind not in FOLDABLE or "weight" not in weighted.roles or weighted.channel_axis is None:
        return None
    if weighted.kind == "gemm" and (weighted.attrs.get("alpha", 1.0), weighted.attrs.get("beta", 1.0)) != (1.0, 1.0):
        return None
    weight_slot = weighted.roles.index("weight")
    weight_ref = graph.slots(weighted.name)[weight_slot]
    weight = parameters.value(weight_ref) if weight_ref is not None else None
    if bias_add is None and _bias(graph, weighted) is not None:
        bias = parameters.value(_bias(graph, weighted) or source)
        if bias is None:
            return None
    if weight is None or variance.ndim != 1 or weight.dtype != np.float32:
        return None
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = scale / np.sqrt(variance + float(norm.attrs.get("epsilon", 1e-5)))
    if not np.isfinite(factor).all() or _channels(weighted, weight) != factor.size:
        return None
    return _Fold(weighted, bias_add, weight_slot, weight, bias, factor, mean, offset)


def _bias(graph: Graph, weighted: Op) -> TensorRef | None:
    slots = graph.slots(weighted.name)
    slot = weighted.roles.index("bias") if "bias" in weighted.roles else len(slots)
    return slots[slot] if slot < len(slots) else None


def _channels(weighted: Op, weight: Array) -> int:
    """Number of output channels of the weighted op."""
    axis = weighted.channel_axis or 0
    if weighted.kind == "conv_transpose":
        return int(weight.shape[axis] * int(weighted.attrs.get("group", 1)))
    if weighted.kind == "depthwise_conv" and axis == weight.ndim - 2:
        return int(weight.shape[axis] * weight.shape[axis + 1])
    return int(weight.shape[axis])


def _scaled(weighted: Op, weight: Array, factor: Array) -> Array:
    """`weight` with each output channel multiplied by its factor (C,), as float32."""
    wide, axis = weight.astype(np.float64), weighted.channel_axis or 0
    group = int(weighted.attrs.get("group", 1)) if weighted.kind == "conv_transpose" else 1
    if group > 1:
        split = wide.reshape(group, wide.shape[0] // group, *wide.shape[1:])
        scaled = split * factor.reshape(group, 1, -1, *[1] * (wide.ndim - 2))
        return scaled.reshape(wide.shape).astype(np.float32)
    if weighted.kind == "depthwise_conv" and axis == weight.ndim - 2:
        return (wide * factor.reshape(wide.shape[axis:])).astype(np.float32)
    return (wide * along(factor, axis, wide.ndim)).astype(np.float32)


def _fold(graph: Graph, norm: Op, found: _Fold, parameters: Parameters) -> Step:
    weighted, before = found.weighted, graph.slots(found.weighted.name)[found.weight_slot]
    bias = found.offset - found.mean * found.factor
    if found.bias is not None:
        bias = bias + found.bias.astype(np.float64).reshape(-1) * found.factor
    undo = {
        "batchnorm": _encode(norm),
        "weight": None if before is None else str(parameters.origin(before)),
        "weight_value": _array(found.weight),
        "bias_value": None if found.bias is None else _array(found.bias),
    }
    weight = _constant(graph, f"{weighted.name}/weight_folded", _scaled(weighted, found.weight, found.factor))
    graph.connect(Use(graph.name, weighted.name, found.weight_slot), weight)
    shift = _constant(graph, f"{weighted.name}/bias_folded", bias.astype(np.float32))
    result = _attach_bias(graph, norm, found, shift)
    graph.reroute(TensorRef(graph.name, norm.name), graph.consumers(TensorRef(graph.name, norm.name)), result)
    stale = [*graph.slots(norm.name)[1:], before]
    graph.remove(norm.name)
    for tensor in stale:
        if tensor is not None and tensor.graph == graph.name and tensor.op in graph and _unread_constant(graph, tensor.op):
            graph.remove(tensor.op)
    return Step(step="fold-batchnorm", target=norm.name, detail=f"folded into {weighted.name}", undo=undo)


def _attach_bias(graph: Graph, norm: Op, found: _Fold, shift: TensorRef) -> TensorRef:
    """Makes the weighted op, or the bias_add behind it, add `shift`; returns the sum."""
    weighted = found.weighted
    if found.bias_add is not None:
        graph.connect(Use(graph.name, found.bias_add.name, 1), shift)
        return TensorRef(graph.name, found.bias_add.name)
    if "bias" in weighted.roles:
        graph.connect(Use(graph.name, weighted.name, weighted.roles.index("bias")), shift)
        return TensorRef(graph.name, weighted.name)
    label = graph.fresh(f"{norm.name}/bias_add")
    known = graph.output(TensorRef(graph.name, norm.name))
    op = Op(
        name=label,
        kind="bias_add",
        type="BiasAdd",
        roles=("input", "bias"),
        outputs=(Output(label, known.dtype, known.shape),),
        attrs={"T": DataType("float32"), "data_format": norm.attrs.get("data_format", "NHWC")},
        rule="fold-batchnorm",
    )
    return graph.add(op, [TensorRef(graph.name, weighted.name), shift])


def _constant(graph: Graph, name: str, value: Array) -> TensorRef:
    label = graph.fresh(name)
    known = Output(label, str(value.dtype), value.shape)
    op = Op(
        name=label, kind="constant", type="Const", roles=(), outputs=(known,), value=lambda: value, rule="fold-batchnorm"
    )
    return graph.add(op)


def _unread_constant(graph: Graph, name: str) -> bool:
    return graph.op(name).kind == "constant" and not graph.readers(name)


def _encode(op: Op) -> str | None:
    """The source node of `op`, serialized, in base64."""
    if op.source is None:
        return None
    return base64.b64encode(op.source.SerializeToString(deterministic=True)).decode()


def _array(value: Array) -> dict[str, Any]:
    return {
        "dtype": str(value.dtype),
        "shape": list(value.shape),
        "data": base64.b64encode(np.ascontiguousarray(value).tobytes()).decode(),
    }


STEPS: dict[str, Callable[[Model], Iterator[Step]]] = {
    "initializer-inputs": _initializer_inputs,
    "fold-batchnorm": _fold_batchnorm,
}
