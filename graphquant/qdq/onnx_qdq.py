"""ONNX QuantizeLinear and DequantizeLinear: https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html ."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from graphquant.ir import Graph, Op, Output, Parameters, TensorRef
from graphquant.numerics import Array, IntType, QParams, from_scale, quantize
from graphquant.qdq.base import Family, Lowering, Request, constant

OPSET_PER_TENSOR, OPSET_PER_CHANNEL = 10, 13


def _dtype(params: QParams) -> np.dtype[np.generic]:
    container = params.type.container
    return np.dtype(getattr(ml_dtypes, container) if container.endswith("int4") else container)


def lower(graph: Graph, site: Lowering) -> TensorRef:
    """Adds QuantizeLinear and DequantizeLinear, or an integer constant and DequantizeLinear if there is a value to fold."""
    params = site.params
    known = graph.output(site.tensor)
    integer = _dtype(params)
    axis = {"axis": params.axis} if params.axis is not None else {}
    scale = constant(graph, f"{site.name}/scale", params.scale, type_="Constant", rule=site.rule)
    zero = constant(graph, f"{site.name}/zero_point", params.zero_point.astype(integer), type_="Constant", rule=site.rule)
    if site.value is not None:
        folded = quantize(site.value, params).astype(integer)
        source = constant(graph, f"{site.name}/{integer.name}", folded, type_="Constant", rule=site.rule)
    else:
        label = graph.fresh(site.name)
        quant = Op(
            name=label,
            kind="quantize",
            type="QuantizeLinear",
            roles=("input", "scale", "zero_point"),
            outputs=(Output(label, integer.name, known.shape),),
            attrs=axis,
            rule=site.rule,
        )
        source = graph.add(quant, [site.tensor, scale, zero])
    label = graph.fresh(f"{site.name}/dequant")
    dequant = Op(
        name=label,
        kind="dequantize",
        type="DequantizeLinear",
        roles=("input", "scale", "zero_point"),
        outputs=(Output(label, known.dtype, known.shape),),
        attrs=axis,
        rule=site.rule,
    )
    return graph.add(dequant, [source, scale, zero])


def why_not(asked: Request) -> str | None:
    """The reason why onnxruntime cannot run these ops, or None."""
    if asked.dtype != "float32":
        return f"QuantizeLinear with a float32 scale takes no {asked.dtype} tensor"
    if asked.type.name == "int32" and asked.parameter:
        return None
    if asked.type.container not in {"int8", "uint8"}:
        return f"{asked.type.name} does not fit the 8-bit types that opset 10 has"
    return None


def opset(asked: Request) -> int:
    """The lowest opset of the default domain that has these ops."""
    return OPSET_PER_TENSOR if asked.axis is None else OPSET_PER_CHANNEL


def read(graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
    """Scale and zero point of a QuantizeLinear or DequantizeLinear, None where they are computed at run time."""
    slots = [*graph.slots(op.name), None, None, None][:3]
    scale = None if slots[1] is None else parameters.value(slots[1])
    zero = None if slots[2] is None else parameters.value(slots[2])
    if scale is None or (slots[2] is not None and zero is None):
        return None
    integer = _integer(graph, op, slots[0], zero)
    if integer is None or scale.ndim > 1 or not (np.isfinite(scale).all() and (scale > 0).all()):
        return None
    zero_point = np.zeros(scale.shape, np.int32) if zero is None else zero.astype(np.int32)
    if scale.size == 1:
        return from_scale(scale.reshape(()), zero_point.reshape(()), integer)
    return from_scale(scale, zero_point, integer, axis=int(op.attrs.get("axis", 1)))


def _integer(graph: Graph, op: Op, data: TensorRef | None, zero: Array | None) -> IntType | None:
    """The integer type on the quantized side, None if it is no integer or not known."""
    name = None if zero is None else str(zero.dtype)
    if name is None and op.kind == "dequantize" and data is not None:
        name = graph.output(data).dtype
    try:
        return IntType.parse(name or "uint8")
    except ValueError:
        return None


ONNX_QDQ = Family(
    name="onnx-qdq",
    format="onnx",
    lower=lower,
    why_not=why_not,
    opset=opset,
    types=frozenset({"QuantizeLinear", "DequantizeLinear"}),
    read=read,
)
