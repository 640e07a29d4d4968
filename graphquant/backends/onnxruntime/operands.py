"""Float weights, biases and scalars that the optimizer quantizes itself, where all around them is quantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.backends.onnxruntime.work import is_dq, is_q, names
from graphquant.ir import Op, Output, TensorRef, Use

if TYPE_CHECKING:
    from graphquant.backends.onnxruntime.work import Gone, Work
    from graphquant.ir import Graph

STAND_IN = "quantized on the way"
"""The mark of quantizations that the optimizer itself makes of float weights and biases."""

TAKES_BIAS = {"Conv": 0, "ConvTranspose": 0, "Gemm": 1}
"""Ops whose float bias is quantized on the way."""


def quantize_bias(work: Work, graph: Graph, _gone: Gone) -> bool:
    """A float bias, and a float weight, of an op between DQ and Q are quantized, to int32 and to int8."""
    changed = False
    for name in names(graph, lambda op: op.type in TAKES_BIAS and not op.domain):
        first = work.producer(graph, name, 0)
        if (
            first is None
            or not is_dq(first)
            or not _is_scalar(work, graph, first.name)
            or not _leads_to_q(work, graph, name)
        ):
            continue
        slots = [*graph.slots(name), None, None, None][:3]
        weight, bias = work.producer(graph, name, 1), slots[2]
        known = graph.output(bias).shape if bias is not None else None
        if bias is not None and (not _initializer(work, graph, bias) or known is None or len(known) != 1):
            continue
        quantized = weight is not None and is_dq(weight)
        if quantized and weight is not None:
            if bias is None or not _weight_axis(work, graph, name, weight, known):
                continue
        elif slots[1] is None or not (_initializer(work, graph, slots[1]) and work.own(graph, slots[1])):
            continue
        else:
            _stand_in_dq(work, graph, Use(graph.name, name, 1), slots[1], "int8")
        if bias is not None:
            _stand_in_dq(work, graph, Use(graph.name, name, 2), bias, "int32")
        changed = True
    return changed


def _initializer(work: Work, graph: Graph, tensor: TensorRef) -> bool:
    return graph.output(tensor).dtype == "float32" and work.constant(tensor)


def _is_scalar(work: Work, graph: Graph, name: str) -> bool:
    """Whether a DQ has one scale."""
    scale = work.slot(graph, name, 1)
    return scale is not None and graph.output(scale).shape in {(), (1,)}


def _leads_to_q(work: Work, graph: Graph, name: str) -> bool:
    here = name
    for _ in range(len(graph)):
        use = work.only(graph, here)
        if use is None:
            return False
        op = graph.op(use.op)
        if is_q(op):
            return True
        if op.type not in {"Relu", "Clip"}:
            return False
        here = op.name
    return False


def _weight_axis(work: Work, graph: Graph, name: str, weight: Op, bias: tuple[int | None, ...] | None) -> bool:
    """Whether the weight has one scale, or one for each value of the bias."""
    scale = work.slot(graph, weight.name, 1)
    sizes = graph.output(scale).shape if scale is not None else None
    if sizes in {(), (1,)}:
        return True
    if sizes is None or bias is None or len(sizes) != 1 or sizes[0] != bias[0] or weight.number("block_size", 0):
        return False
    data = work.slot(graph, weight.name, 0)
    shape = graph.output(data).shape if data is not None else None
    axis = int(weight.number("axis", 1))
    axis += len(shape) if axis < 0 and shape is not None else 0
    op = graph.op(name)
    return axis == (1 - int(op.number("transB", 0)) if op.type == "Gemm" else 0)


def _stand_in_dq(work: Work, graph: Graph, use: Use, tensor: TensorRef, dtype: str) -> None:
    """A DQ of a constant of type `dtype` in place of the float constant `tensor`."""
    known = graph.output(tensor)
    data = work.stand_in(graph, f"{use.op}/{dtype}", dtype, known)
    scale = work.stand_in(graph, f"{use.op}/scale", "float32", known, 1.0)
    zero = work.stand_in(graph, f"{use.op}/zero", dtype, known, 0)
    like = Op(
        name="",
        kind="dequantize",
        type="DequantizeLinear",
        roles=("input", "scale", "zero_point"),
        outputs=(Output("", "float32", known.shape),),
        rule=STAND_IN,
    )
    graph.connect(use, work.add(graph, like, f"{use.op}/dq", [data, scale, zero]))


def where_scalar(work: Work, graph: Graph, _gone: Gone) -> bool:
    """A scalar constant beside the quantized input of a Where before a Q is quantized too."""
    changed = False
    for name in names(graph, lambda op: op.type == "Where" and not op.domain):
        use = work.only(graph, name)
        if use is None or not is_q(graph.op(use.op)):
            continue
        for slot, other in ((1, 2), (2, 1)):
            tensor, source = work.slot(graph, name, slot), work.producer(graph, name, other)
            if tensor is None or source is None or not is_dq(source) or not _initializer(work, graph, tensor):
                continue
            dtype = work.dtype(graph, source.name)
            own = all(work.own(graph, one) for one in (tensor, *work.inputs(graph, source.name)[1:]))
            if own and graph.output(tensor).shape == () and dtype == work.dtype(graph, use.op):
                _stand_in_dq(work, graph, Use(graph.name, name, slot), tensor, dtype)
                changed = True
    return changed
