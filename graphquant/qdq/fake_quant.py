"""TensorFlow's FakeQuantWithMinMaxArgs, FakeQuantWithMinMaxVars and FakeQuantWithMinMaxVarsPerChannel.

https://www.tensorflow.org/api_docs/python/tf/quantization/fake_quant_with_min_max_vars : affine, with a zero point that
is nudged to an integer. The range that is written here already has an integer zero point, so nothing is nudged.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from graphquant.errors import InternalError
from graphquant.ir import Graph, Op, Output, Parameters, TensorRef, fully_known_shape
from graphquant.numerics import Array, IntType, QParams, qparams_from_scale, tf_ranges
from graphquant.qdq.family import (
    FamilyRequest,
    QDQFamily,
    QDQSite,
    RoundingMode,
    integer_only_reason,
    no_minimum_opset,
    require_static_params,
)
from graphquant.qdq.tf_nodes import add_argument, add_in_merged_shape, add_reshape

MIN_BITS, MAX_BITS = tf_ranges.FAKE_QUANT_MIN_BITS, tf_ranges.FAKE_QUANT_MAX_BITS


def add_fake_quant(graph: Graph, site: QDQSite) -> TensorRef:
    """Add the FakeQuant op with its two constants. Channels on an inner axis need a reshape before and after it."""
    return add_in_merged_shape(graph, site, _add_reshaped_fake_quant)


def _add_reshaped_fake_quant(graph: Graph, site: QDQSite) -> TensorRef:
    params = require_static_params(site)
    op_range = params.op_range or tf_ranges.range_for_fake_quant(params)
    low, high = op_range.low.astype(np.float32), op_range.high.astype(np.float32)
    tensor, shape = site.tensor, fully_known_shape(site.shape)
    flat_shape = None
    if params.axis is not None:
        if shape is None:
            raise InternalError(f"{site.tensor} has no static shape. `unsupported_reason` must reject it per channel.")
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
    """Add the op, with its range in constants or in attributes."""
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


def fake_quant_unsupported_reason(request: FamilyRequest) -> str | None:  # noqa: PLR0911  # one per reason
    """Return the reason why TensorFlow does not support a request, or None."""
    if (reason := integer_only_reason(request, "FakeQuant")) is not None:
        return reason
    if request.dtype != "float32":
        return f"FakeQuant takes float32, and this tensor is {request.dtype}"
    if not MIN_BITS <= request.type.bits <= MAX_BITS:
        return f"FakeQuant has {MIN_BITS} to {MAX_BITS} bits, and the scheme has {request.type.bits}"
    if request.is_dynamic:
        return "FakeQuant needs a range; for a dynamic one use the family quantize-and-dequantize-v2, -v3 or -v4"
    if request.range_source == "given" and request.symmetric:
        return 'FakeQuant chooses the zero point of a given range; use zero = "asymmetric"'
    if request.range_source == "learned" and request.args.form == "args":
        return 'FakeQuantWithMinMaxArgs has its range in attributes; use form = "vars" for a learned range'
    if request.rounding_mode == "half-even":
        return "FakeQuant always rounds half up; omit 'round', or use the family quantize-and-dequantize-v2"
    return _per_channel_unsupported_reason(request, request.axis) if request.axis is not None else None


def _per_channel_unsupported_reason(request: FamilyRequest, axis: int) -> str | None:
    shape = fully_known_shape(request.shape)
    if request.args.form == "args":
        return 'FakeQuantWithMinMaxArgs has one range for the whole tensor; use form = "vars" per channel'
    if shape is None:
        return "FakeQuant per channel needs the tensor's static shape"
    if request.range_source == "learned" and math.prod(shape[axis + 1 :]) != 1:
        return (
            'FakeQuant learns ranges only along the last axis, and the channels are on another one; use per = "tensor"'
        )
    return None


def effective_fake_quant_params(params: QParams) -> QParams:
    """Return the params that FakeQuant computes from the float32 range of `params`."""
    op_range = params.op_range or tf_ranges.range_for_fake_quant(params)
    effective = tf_ranges.fake_quant_params(op_range, params.type, narrow=params.narrow, axis=params.axis)
    return replace(effective, op_range=params.op_range)


def read_fake_quant(graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
    """Return scale and zero point of a FakeQuant op, as a signed type; None if its range is not constant.

    The range is nudged as in TensorFlow: the zero point is rounded to an integer, which moves both ends.
    """
    limits = _constant_limits(graph, op, parameters)
    bits = int(op.numeric_attr("num_bits", 8))
    if limits is None or not MIN_BITS <= bits <= MAX_BITS:
        return None
    dtype = IntType(bits, signed=True)
    narrow = bool(op.attrs.get("narrow_range", False))
    nudged = tf_ranges.nudge_range(*limits, num_bits=bits, narrow_range=narrow)
    if not (np.isfinite(nudged.scale).all() and (nudged.scale > 0).all()):
        return None
    qmin, _ = dtype.limits(narrow=narrow)
    shape = graph.output(TensorRef(graph.name, op.name)).shape
    axis = None if nudged.scale.ndim == 0 else (len(shape) - 1 if shape else 0)
    return qparams_from_scale(nudged.scale, nudged.zero_point - narrow + qmin, dtype, narrow=narrow, axis=axis)


def _constant_limits(graph: Graph, op: Op, parameters: Parameters) -> tuple[Array, Array] | None:
    """Return the constant range of a FakeQuant op, () or (C,); None if it is not constant or is damaged."""
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
    """Return "half-up", the only rounding of FakeQuant."""
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
