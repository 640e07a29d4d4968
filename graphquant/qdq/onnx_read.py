"""QuantizeLinear and DequantizeLinear of ONNX's or onnxruntime's domain, read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.numerics import Array, FloatType, QParams, QType, from_scale, parse_type

if TYPE_CHECKING:
    from graphquant.ir import Graph, Op, Parameters, TensorRef
    from graphquant.qdq.base import Round


def read(graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
    """Scale and zero point of a QuantizeLinear or DequantizeLinear, None where they are computed at run time."""
    slots = [*graph.slots(op.name), None, None, None][:3]
    scale = None if slots[1] is None else parameters.value(slots[1])
    zero = None if slots[2] is None else parameters.value(slots[2])
    if scale is None or (slots[2] is not None and zero is None):
        return None
    kind = _type(graph, op, slots[0], zero)
    with np.errstate(over="ignore", under="ignore"):
        wide = scale.astype(np.float32)
    if kind is None or not (np.isfinite(wide).all() and (wide > 0).all()):
        return None
    if wide.size == 0 or (zero is not None and zero.size != wide.size):
        return None
    zeros = np.zeros(wide.shape) if zero is None else zero.astype(np.float64).reshape(wide.shape)
    if isinstance(kind, FloatType) and zeros.any():  # no such op is defined
        return None
    return _params(graph, op, slots[0], wide, zeros.astype(np.int32), kind)


def _params(graph: Graph, op: Op, data: TensorRef | None, scale: Array, zero: Array, kind: QType) -> QParams | None:
    """What scale and zero point mean: of the tensor, of channels or of blocks; None where they do not go with it."""
    block = int(op.number("block_size", 0))
    if scale.size == 1 and block <= 0:
        return from_scale(scale.reshape(()), zero.reshape(()), kind)
    axis = int(op.number("axis", 1))
    shape = graph.output(data).shape if data is not None else None
    rank = len(shape) if shape else scale.ndim if block > 0 else 0
    axis = axis + rank if axis < 0 else axis
    if block <= 0:
        return from_scale(scale, zero, kind, axis=axis) if scale.ndim == 1 else None
    if scale.ndim != rank or not 0 <= axis < rank:
        return None
    return from_scale(scale, zero, kind, axis=axis, block=block)


def _type(graph: Graph, op: Op, data: TensorRef | None, zero: Array | None) -> QType | None:
    """The type on the quantized side, None if it is none of those that are read or not known."""
    name = None if zero is None else str(zero.dtype)
    if name is None and op.kind == "dequantize" and data is not None:
        name = graph.output(data).dtype
    if name is None and op.kind == "quantize":
        name = op.outputs[0].dtype if op.outputs else None  # which "output_dtype" may say
    try:
        return parse_type(name or "uint8")
    except ValueError:
        return None


def rounding(_op: Op) -> Round:
    """QuantizeLinear rounds half to even."""
    return "half-even"
