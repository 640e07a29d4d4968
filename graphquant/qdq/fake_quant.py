"""TensorFlow's FakeQuantWithMinMaxVars and FakeQuantWithMinMaxVarsPerChannel.

https://www.tensorflow.org/api_docs/python/tf/quantization/fake_quant_with_min_max_vars : affine, with a zero point that
is nudged to an integer. The range written here is that of an integer zero point already, so nothing is nudged.
"""

from __future__ import annotations

import math

import numpy as np

from graphquant.errors import InternalError
from graphquant.ir import DataType, Graph, Op, Output, Parameters, TensorRef
from graphquant.numerics import Array, IntType, QParams, from_scale
from graphquant.qdq.base import Family, Lowering, Request, constant

MIN_BITS, MAX_BITS = 2, 16


def lower(graph: Graph, site: Lowering) -> TensorRef:
    """Adds the FakeQuant op with its two constants; per channel of an inner axis between two reshapes."""
    params = site.params
    after = (site.tensor.op,) if site.in_frame and site.tensor.graph == graph.name else ()
    known = graph.output(site.tensor)
    low, high = params.range.low.astype(np.float32), params.range.high.astype(np.float32)
    tensor, reshaped = site.tensor, False
    shape = tuple(side for side in site.shape or () if side is not None)
    if params.axis is not None:
        if site.shape is None or len(shape) != len(site.shape):
            raise InternalError(f"FakeQuant per channel on {site.tensor} without its shape; why_not must refuse it.")
        trailing = math.prod(shape[params.axis + 1 :])
        if trailing != 1 or params.axis != len(shape) - 1:
            reshaped = True
            low, high = np.repeat(low, trailing), np.repeat(high, trailing)
            flat = (*shape[: params.axis], shape[params.axis] * trailing)
            tensor = _reshape(graph, site, tensor, flat, "flat", after)
    label = graph.fresh(site.name)
    quant = Op(
        name=label,
        kind="qdq",
        type="FakeQuantWithMinMaxVars" if params.axis is None else "FakeQuantWithMinMaxVarsPerChannel",
        roles=("input", "min", "max"),
        outputs=(Output(label, known.dtype, known.shape),),
        attrs={"num_bits": params.type.bits, "narrow_range": params.narrow and params.type.signed},
        rule=site.rule,
    )
    minimum = constant(graph, f"{site.name}/min", low, type_="Const", rule=site.rule, after=after)
    maximum = constant(graph, f"{site.name}/max", high, type_="Const", rule=site.rule, after=after)
    result = graph.add(quant, [tensor, minimum, maximum])
    if reshaped:
        result = _reshape(graph, site, result, shape, "shaped", after)
    return result


def _reshape(
    graph: Graph, site: Lowering, tensor: TensorRef, shape: tuple[int, ...], suffix: str, after: tuple[str, ...]
) -> TensorRef:
    sizes = constant(
        graph, f"{site.name}/{suffix}/shape", np.array(shape, np.int32), type_="Const", rule=site.rule, after=after
    )
    label = graph.fresh(f"{site.name}/{suffix}")
    op = Op(
        name=label,
        kind="reshape",
        type="Reshape",
        roles=("input", "shape"),
        outputs=(Output(label, "float32", shape),),
        attrs={"T": DataType("float32"), "Tshape": DataType("int32")},
        rule=site.rule,
    )
    return graph.add(op, [tensor, sizes])


def why_not(asked: Request) -> str | None:
    """The reason why TensorFlow cannot run these ops, or None."""
    if asked.dtype != "float32":
        return f"FakeQuant takes float32, and this tensor is {asked.dtype}"
    if not MIN_BITS <= asked.type.bits <= MAX_BITS:
        return f"FakeQuant has {MIN_BITS} to {MAX_BITS} bits, and the scheme wants {asked.type.bits}"
    if asked.axis is not None and (asked.shape is None or None in asked.shape):
        return "FakeQuant per channel needs the tensor's static shape"
    return None


def opset(_asked: Request) -> int:
    """TensorFlow has no opsets."""
    return 0


def read(graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
    """Scale and zero point that a FakeQuant op stands for, as a signed type; None where its range is not constant.

    The range is nudged as TensorFlow does it: the zero point is rounded to an integer and the ends follow.
    """
    ends = _ends(graph, op, parameters)
    bits = int(op.number("num_bits", 8))
    if ends is None or not MIN_BITS <= bits <= MAX_BITS:
        return None
    low, high = ends
    integer = IntType(bits, signed=True)
    narrow = bool(op.attrs.get("narrow_range", False))
    qmin, qmax = integer.limits(narrow=narrow)
    scale = np.asarray((high - low) / (qmax - qmin)).astype(np.float32)
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        return None
    zero = np.clip(np.floor(qmin - low / scale.astype(np.float64) + 0.5), qmin, qmax)
    shape = graph.output(TensorRef(graph.name, op.name)).shape
    axis = None if scale.ndim == 0 else (len(shape) - 1 if shape else 0)
    return from_scale(scale, np.asarray(zero), integer, narrow=narrow, axis=axis)


def _ends(graph: Graph, op: Op, parameters: Parameters) -> tuple[Array, Array] | None:
    """The constant range of a FakeQuant op as float64, () or (C,); None where it is not constant or is damaged."""
    if op.type == "FakeQuantWithMinMaxArgs":
        return np.asarray(op.number("min", -6.0)), np.asarray(op.number("max", 6.0))
    values = [None if slot is None else parameters.value(slot) for slot in graph.slots(op.name)[1:3]]
    if len(values) != 2 or values[0] is None or values[1] is None:  # noqa: PLR2004  # min and max
        return None
    if values[0].dtype != np.float32 or values[1].dtype != np.float32:
        return None
    low, high = values[0].astype(np.float64), values[1].astype(np.float64)
    return (low, high) if low.shape == high.shape and low.ndim <= 1 else None


FAKE_QUANT = Family(
    name="fake-quant",
    format="tensorflow",
    lower=lower,
    why_not=why_not,
    opset=opset,
    types=frozenset({"FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel"}),
    folds=False,
    read=read,
)
