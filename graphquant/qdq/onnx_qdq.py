"""ONNX QuantizeLinear and DequantizeLinear: https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html ."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from graphquant.ir import Graph, Op, Output, Parameters, TensorRef
from graphquant.numerics import Array, IntType, QParams, along, from_scale, quantize
from graphquant.qdq.base import Family, Lowering, Request, Round, constant, static_params

OPSET_PER_TENSOR, OPSET_PER_CHANNEL = 10, 13

_ROLES = ("input", "scale", "zero_point")
_QUANTIZE = ("quantize", "QuantizeLinear", _ROLES)
_DEQUANTIZE = ("dequantize", "DequantizeLinear", _ROLES)
_MAX = ("max", "Max", ("input",))
_MIN = ("min", "Min", ("input",))


def _dtype(params: QParams) -> np.dtype[np.generic]:
    container = params.type.container
    return np.dtype(getattr(ml_dtypes, container) if container.endswith("int4") else container)


def lower(graph: Graph, site: Lowering) -> TensorRef:
    """Adds QuantizeLinear and DequantizeLinear; where there is a value to fold, an integer constant for the former."""
    params = static_params(site)
    known = graph.output(site.tensor)
    integer = _dtype(params)
    axis = {"axis": params.axis} if params.axis is not None else {}
    zeros = params.zero_point.astype(integer)
    scale = constant(graph, f"{site.name}/scale", params.scale, type_="Constant", rule=site.rule)
    zero = constant(graph, f"{site.name}/zero_point", zeros, type_="Constant", rule=site.rule)
    if site.value is not None:
        folded = quantize(site.value, params).astype(integer)
        source = constant(graph, f"{site.name}/{integer.name}", folded, type_="Constant", rule=site.rule)
    else:
        made = Output("", integer.name, known.shape)
        data = _clipped(graph, site)
        source = _add(graph, site, site.name, _QUANTIZE, made, axis, [data, scale, zero])
    made = Output("", known.dtype, known.shape)
    return _add(graph, site, f"{site.name}/dequant", _DEQUANTIZE, made, axis, [source, scale, zero])


def _clipped(graph: Graph, site: Lowering) -> TensorRef:
    """The tensor without what the type's container has and the type has not, by Max and Min, which broadcast."""
    params, known = static_params(site), graph.output(site.tensor)
    ends = params.type.limits(narrow=params.narrow)
    container = IntType.parse(params.type.container).limits()
    result = site.tensor
    bounds = ((_MAX, "low", params.range.low), (_MIN, "high", params.range.high))
    for place, (op, word, values) in enumerate(bounds):
        if site.clip and ends[place] != container[place]:
            shaped = along(values.astype(np.float32), params.axis, len(site.shape or ()))
            bound = constant(graph, f"{site.name}/{word}", shaped, type_="Constant", rule=site.rule)
            made = Output("", known.dtype, known.shape)
            result = _add(graph, site, f"{site.name}/clip_{word}", op, made, {}, [result, bound])
    return result


def _add(
    graph: Graph,
    site: Lowering,
    name: str,
    kind: tuple[str, str, tuple[str, ...]],
    made: Output,
    attrs: dict[str, int],
    inputs: list[TensorRef],
) -> TensorRef:
    label = graph.fresh(name)
    known = Output(label, made.dtype, made.shape)
    op = Op(name=label, kind=kind[0], type=kind[1], roles=kind[2], outputs=(known,), attrs=attrs, rule=site.rule)
    return graph.add(op, inputs)


def why_not(asked: Request) -> str | None:
    """The reason why onnxruntime cannot run these ops, or None."""
    if asked.dtype != "float32":
        return f"QuantizeLinear with a float32 scale takes no {asked.dtype} tensor"
    if asked.range != "observed":
        return "QuantizeLinear needs a scale that is known; leave 'range' out"
    if asked.round == "half-up":
        return "QuantizeLinear always rounds half to even; leave 'round' out"
    if asked.type.name == "int32" and asked.parameter:
        return None
    if asked.type.container not in {"int8", "uint8"}:
        return f"{asked.type.name} does not fit the 8-bit types that opset 10 has"
    return None


def opset(asked: Request) -> int:
    """The lowest opset of the default domain that has these ops."""
    return OPSET_PER_TENSOR if asked.axis is None else OPSET_PER_CHANNEL


def settle(params: QParams) -> QParams:
    """What is asked for: scale and zero point are written as they are."""
    return params


def rounding(_op: Op) -> Round:
    """QuantizeLinear rounds half to even."""
    return "half-even"


def read(graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
    """Scale and zero point of a QuantizeLinear or DequantizeLinear, None where they are computed at run time."""
    slots = [*graph.slots(op.name), None, None, None][:3]
    scale = None if slots[1] is None else parameters.value(slots[1])
    zero = None if slots[2] is None else parameters.value(slots[2])
    if scale is None or (slots[2] is not None and zero is None):
        return None
    integer = _integer(graph, op, slots[0], zero)
    with np.errstate(over="ignore", under="ignore"):
        wide = scale.astype(np.float32)
    if integer is None or wide.ndim > 1 or not (np.isfinite(wide).all() and (wide > 0).all()):
        return None
    if wide.size == 0 or (zero is not None and zero.size != wide.size):
        return None
    zero_point = np.zeros(wide.size, np.int32) if zero is None else zero.astype(np.int32).reshape(-1)
    if wide.size == 1:
        return from_scale(wide.reshape(()), zero_point.reshape(()), integer)
    axis = int(op.number("axis", 1))
    shape = graph.output(slots[0]).shape if slots[0] is not None else None
    return from_scale(wide, zero_point, integer, axis=axis + len(shape) if axis < 0 and shape else axis)


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
    settle=settle,
    types=frozenset({"QuantizeLinear", "DequantizeLinear"}),
    folds=True,
    zero_points=True,
    arguments=frozenset(),
    read=read,
    rounding=rounding,
)
