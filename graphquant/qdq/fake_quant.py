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
from graphquant.numerics import Array, IntType, QParams, fake_quant, qparams_from_scale
from graphquant.qdq.family import (
    FamilyRequest,
    QDQFamily,
    QDQSite,
    RoundingMode,
    integer_only_reason,
    require_static_params,
)
from graphquant.qdq.tf_nodes import add_argument, add_in_merged_shape, add_reshape, fully_known_shape

MIN_BITS, MAX_BITS = fake_quant.FAKE_QUANT_MIN_BITS, fake_quant.FAKE_QUANT_MAX_BITS


def add_fake_quant(graph: Graph, site: QDQSite) -> TensorRef:
    """Adds the FakeQuant op with its two constants; per channel of an inner axis between two reshapes."""
    return add_in_merged_shape(graph, site, _add_reshaped_fake_quant)


def _add_reshaped_fake_quant(graph: Graph, site: QDQSite) -> TensorRef:
    params = require_static_params(site)
    op_range = params.op_range or fake_quant.range_for_fake_quant(params)
    low, high = op_range.low.astype(np.float32), op_range.high.astype(np.float32)
    tensor, shape = site.tensor, fully_known_shape(site.shape)
    flat_shape = None
    if params.axis is not None:
        if shape is None:
            raise InternalError(f"FakeQuant per channel on {site.tensor} without its shape; why_not must refuse it.")
        trailing = math.prod(shape[params.axis + 1 :])
        if params.axis != len(shape) - 1:
            low, high = np.repeat(low, trailing), np.repeat(high, trailing)
            flat_shape = (*shape[: params.axis], shape[params.axis] * trailing)
    if flat_shape is not None:
        tensor = add_reshape(graph, site, tensor, flat_shape, "flat")
    result = _add_fake_quant_op(graph, site, tensor, low, high)
    if flat_shape is not None and shape is not None:
        result = add_reshape(graph, site, result, shape, "shaped")
    return result


def _add_fake_quant_op(graph: Graph, site: QDQSite, tensor: TensorRef, low: Array, high: Array) -> TensorRef:
    """Adds the op itself, of the form that is asked for."""
    params, source_output = site.params, graph.output(tensor)
    attrs: dict[str, object] = {"num_bits": params.type.bits, "narrow_range": params.narrow and params.type.signed}
    op_name = graph.unique_name(site.name)
    roles: tuple[str, ...] = ("input",)
    inputs = [tensor]
    if site.args.form == "args":
        attrs |= {"min": float(low), "max": float(high)}
        op_type = "FakeQuantWithMinMaxArgs"
    else:
        op_type = "FakeQuantWithMinMaxVars" if params.axis is None else "FakeQuantWithMinMaxVarsPerChannel"
        roles = ("input", "min", "max")
        inputs += [
            add_argument(graph, site, "min", low, trainable=True),
            add_argument(graph, site, "max", high, trainable=True),
        ]
    output = Output(op_name, source_output.dtype, source_output.shape)
    op = Op(name=op_name, kind="qdq", type=op_type, roles=roles, outputs=(output,), attrs=attrs, rule=site.rule)
    return graph.add_op(op, inputs)


def fake_quant_unsupported_reason(request: FamilyRequest) -> str | None:  # noqa: PLR0911  # one for each thing it cannot do
    """The reason why TensorFlow cannot run these ops, or None."""
    if (reason := integer_only_reason(request, "FakeQuant")) is not None:
        return reason
    if request.dtype != "float32":
        return f"FakeQuant takes float32, and this tensor is {request.dtype}"
    if not MIN_BITS <= request.type.bits <= MAX_BITS:
        return f"FakeQuant has {MIN_BITS} to {MAX_BITS} bits, and the scheme wants {request.type.bits}"
    if request.is_dynamic:
        return "FakeQuant needs a range; for a dynamic one take the family quantize-and-dequantize-v2, -v3 or -v4"
    if request.range_source == "given" and request.symmetric:
        return 'FakeQuant picks the zero point for a range that is given; take zero = "asymmetric"'
    if request.range_source == "learned" and request.args.form == "args":
        return 'FakeQuantWithMinMaxArgs has its range in attributes; take form = "vars" for one that is learned'
    if request.rounding_mode == "half-even":
        return "FakeQuant always rounds half up; leave 'round' out, or take the family quantize-and-dequantize-v2"
    return _per_channel_unsupported_reason(request, request.axis) if request.axis is not None else None


def _per_channel_unsupported_reason(request: FamilyRequest, axis: int) -> str | None:
    shape = fully_known_shape(request.shape)
    if request.args.form == "args":
        return 'FakeQuantWithMinMaxArgs has one range for the whole tensor; take form = "vars" per channel'
    if shape is None:
        return "FakeQuant per channel needs the tensor's static shape"
    if request.range_source == "learned" and math.prod(shape[axis + 1 :]) != 1:
        return 'FakeQuant learns ranges along the last axis, and the channels are on another; take per = "tensor"'
    return None


def no_minimum_opset(_request: FamilyRequest) -> int:
    """TensorFlow has no opsets."""
    return 0


def effective_fake_quant_params(params: QParams) -> QParams:
    """The scale that the op has when it is to have that of `params`: FakeQuant computes it from a float32 range."""
    op_range = params.op_range or fake_quant.range_for_fake_quant(params)
    effective = fake_quant.fake_quant_params(op_range, params.type, narrow=params.narrow, axis=params.axis)
    return replace(effective, op_range=params.op_range)


def read_fake_quant(graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
    """Scale and zero point that a FakeQuant op stands for, as a signed type; None where its range is not constant.

    The range is nudged as TensorFlow does it: the zero point is rounded to an integer and the ends follow.
    """
    limits = _constant_limits(graph, op, parameters)
    bits = int(op.numeric_attr("num_bits", 8))
    if limits is None or not MIN_BITS <= bits <= MAX_BITS:
        return None
    dtype = IntType(bits, signed=True)
    narrow = bool(op.attrs.get("narrow_range", False))
    nudged = fake_quant.nudge_range(*limits, num_bits=bits, narrow_range=narrow)
    if not (np.isfinite(nudged.scale).all() and (nudged.scale > 0).all()):
        return None
    qmin, _ = dtype.limits(narrow=narrow)
    shape = graph.output(TensorRef(graph.name, op.name)).shape
    axis = None if nudged.scale.ndim == 0 else (len(shape) - 1 if shape else 0)
    return qparams_from_scale(nudged.scale, nudged.zero_point - narrow + qmin, dtype, narrow=narrow, axis=axis)


def _constant_limits(graph: Graph, op: Op, parameters: Parameters) -> tuple[Array, Array] | None:
    """The constant range of a FakeQuant op as float64, () or (C,); None where it is not constant or is damaged."""
    if op.type == "FakeQuantWithMinMaxArgs":
        return np.asarray(op.numeric_attr("min", -6.0)), np.asarray(op.numeric_attr("max", 6.0))
    values = [None if slot is None else parameters.value(slot) for slot in graph.slots(op.name)[1:3]]
    if len(values) != 2 or values[0] is None or values[1] is None:  # noqa: PLR2004  # min and max
        return None
    if values[0].dtype != np.float32 or values[1].dtype != np.float32:
        return None
    low, high = values[0], values[1]
    return (low, high) if low.shape == high.shape and low.ndim <= 1 else None


def fake_quant_rounding(_op: Op) -> RoundingMode:
    """FakeQuant rounds half up."""
    return "half-up"


FAKE_QUANT = QDQFamily(
    name="fake-quant",
    format="tensorflow",
    add_ops=add_fake_quant,
    unsupported_reason=fake_quant_unsupported_reason,
    minimum_opset=no_minimum_opset,
    effective_params=effective_fake_quant_params,
    op_types=frozenset({"FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel"}),
    stores_integer_weights=False,
    has_zero_points=True,
    argument_names=frozenset({"form"}),
    read_params=read_fake_quant,
    rounding_mode_of=fake_quant_rounding,
    supports_learned_range=True,
)
