"""ONNX QuantizeLinear and DequantizeLinear: https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html ."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from graphquant.ir import Graph, Op, Output, TensorRef
from graphquant.numerics import QParams, quantize
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


ONNX_QDQ = Family(name="onnx-qdq", format="onnx", lower=lower, why_not=why_not, opset=opset)
