"""TensorFlow's FakeQuantWithMinMaxArgs, FakeQuantWithMinMaxVars and FakeQuantWithMinMaxVarsPerChannel.

https://www.tensorflow.org/api_docs/python/tf/quantization/fake_quant_with_min_max_vars : affine, with a zero point that
is nudged to an integer. The range written here is that of an integer zero point already, so nothing is nudged.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from graphquant.errors import InternalError
from graphquant.ir import Graph, Op, Output, Parameters, TensorRef
from graphquant.numerics import Array, IntType, QParams, fake_quant, from_scale
from graphquant.qdq.base import Family, Lowering, Request, Round, only_integers, static_params
from graphquant.qdq.nodes import held, reshape, static, within

MIN_BITS, MAX_BITS = fake_quant.MIN_BITS, fake_quant.MAX_BITS


def lower(graph: Graph, site: Lowering) -> TensorRef:
    """Adds the FakeQuant op with its two constants; per channel of an inner axis between two reshapes."""
    return within(graph, site, _lower)


def _lower(graph: Graph, site: Lowering) -> TensorRef:
    params = static_params(site)
    given = params.given or fake_quant.range_to_write(params)
    low, high = given.low.astype(np.float32), given.high.astype(np.float32)
    tensor, shape = site.tensor, static(site.shape)
    flat = None
    if params.axis is not None:
        if shape is None:
            raise InternalError(f"FakeQuant per channel on {site.tensor} without its shape; why_not must refuse it.")
        trailing = math.prod(shape[params.axis + 1 :])
        if params.axis != len(shape) - 1:
            low, high = np.repeat(low, trailing), np.repeat(high, trailing)
            flat = (*shape[: params.axis], shape[params.axis] * trailing)
    if flat is not None:
        tensor = reshape(graph, site, tensor, flat, "flat")
    result = _quantized(graph, site, tensor, low, high)
    if flat is not None and shape is not None:
        result = reshape(graph, site, result, shape, "shaped")
    return result


def _quantized(graph: Graph, site: Lowering, tensor: TensorRef, low: Array, high: Array) -> TensorRef:
    """Adds the op itself, of the form that is asked for."""
    params, known = site.params, graph.output(tensor)
    attrs: dict[str, object] = {"num_bits": params.type.bits, "narrow_range": params.narrow and params.type.signed}
    label = graph.fresh(site.name)
    roles: tuple[str, ...] = ("input",)
    inputs = [tensor]
    if site.args.form == "args":
        attrs |= {"min": float(low), "max": float(high)}
        type_ = "FakeQuantWithMinMaxArgs"
    else:
        type_ = "FakeQuantWithMinMaxVars" if params.axis is None else "FakeQuantWithMinMaxVarsPerChannel"
        roles = ("input", "min", "max")
        inputs += [held(graph, site, "min", low, trainable=True), held(graph, site, "max", high, trainable=True)]
    made = Output(label, known.dtype, known.shape)
    op = Op(name=label, kind="qdq", type=type_, roles=roles, outputs=(made,), attrs=attrs, rule=site.rule)
    return graph.add(op, inputs)


def why_not(asked: Request) -> str | None:  # noqa: PLR0911  # one for each thing it cannot do
    """The reason why TensorFlow cannot run these ops, or None."""
    if (reason := only_integers(asked, "FakeQuant")) is not None:
        return reason
    if asked.dtype != "float32":
        return f"FakeQuant takes float32, and this tensor is {asked.dtype}"
    if not MIN_BITS <= asked.type.bits <= MAX_BITS:
        return f"FakeQuant has {MIN_BITS} to {MAX_BITS} bits, and the scheme wants {asked.type.bits}"
    if asked.dynamic:
        return "FakeQuant needs a range; for a dynamic one take the family quantize-and-dequantize-v2, -v3 or -v4"
    if asked.range == "given" and asked.symmetric:
        return 'FakeQuant picks the zero point for a range that is given; take zero = "asymmetric"'
    if asked.range == "learned" and asked.args.form == "args":
        return 'FakeQuantWithMinMaxArgs has its range in attributes; take form = "vars" for one that is learned'
    if asked.round == "half-even":
        return "FakeQuant always rounds half up; leave 'round' out, or take the family quantize-and-dequantize-v2"
    return _why_not_per_channel(asked, asked.axis) if asked.axis is not None else None


def _why_not_per_channel(asked: Request, axis: int) -> str | None:
    shape = static(asked.shape)
    if asked.args.form == "args":
        return 'FakeQuantWithMinMaxArgs has one range for the whole tensor; take form = "vars" per channel'
    if shape is None:
        return "FakeQuant per channel needs the tensor's static shape"
    if asked.range == "learned" and math.prod(shape[axis + 1 :]) != 1:
        return 'FakeQuant learns ranges along the last axis, and the channels are on another; take per = "tensor"'
    return None


def opset(_asked: Request) -> int:
    """TensorFlow has no opsets."""
    return 0


def settle(params: QParams) -> QParams:
    """The scale that the op has when it is to have that of `params`: FakeQuant computes it from a float32 range."""
    told = params.given or fake_quant.range_to_write(params)
    found = fake_quant.params_of(told, params.type, narrow=params.narrow, axis=params.axis)
    return replace(found, given=params.given)


def read(graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
    """Scale and zero point that a FakeQuant op stands for, as a signed type; None where its range is not constant.

    The range is nudged as TensorFlow does it: the zero point is rounded to an integer and the ends follow.
    """
    ends = _ends(graph, op, parameters)
    bits = int(op.number("num_bits", 8))
    if ends is None or not MIN_BITS <= bits <= MAX_BITS:
        return None
    integer = IntType(bits, signed=True)
    narrow = bool(op.attrs.get("narrow_range", False))
    found = fake_quant.steps(*ends, num_bits=bits, narrow_range=narrow)
    if not (np.isfinite(found.size).all() and (found.size > 0).all()):
        return None
    qmin, _ = integer.limits(narrow=narrow)
    shape = graph.output(TensorRef(graph.name, op.name)).shape
    axis = None if found.size.ndim == 0 else (len(shape) - 1 if shape else 0)
    return from_scale(found.size, found.zero_point - narrow + qmin, integer, narrow=narrow, axis=axis)


def _ends(graph: Graph, op: Op, parameters: Parameters) -> tuple[Array, Array] | None:
    """The constant range of a FakeQuant op as float64, () or (C,); None where it is not constant or is damaged."""
    if op.type == "FakeQuantWithMinMaxArgs":
        return np.asarray(op.number("min", -6.0)), np.asarray(op.number("max", 6.0))
    values = [None if slot is None else parameters.value(slot) for slot in graph.slots(op.name)[1:3]]
    if len(values) != 2 or values[0] is None or values[1] is None:  # noqa: PLR2004  # min and max
        return None
    if values[0].dtype != np.float32 or values[1].dtype != np.float32:
        return None
    low, high = values[0], values[1]
    return (low, high) if low.shape == high.shape and low.ndim <= 1 else None


def rounding(_op: Op) -> Round:
    """FakeQuant rounds half up."""
    return "half-up"


FAKE_QUANT = Family(
    name="fake-quant",
    format="tensorflow",
    lower=lower,
    why_not=why_not,
    opset=opset,
    settle=settle,
    types=frozenset({"FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel"}),
    folds=False,
    zero_points=True,
    arguments=frozenset({"form"}),
    read=read,
    rounding=rounding,
    learns=True,
)
