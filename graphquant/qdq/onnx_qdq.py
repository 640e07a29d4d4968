"""ONNX QuantizeLinear and DequantizeLinear: https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html .

docs/decisions/0031-onnx-types.md has the types, granularities and opsets that onnxruntime was measured to run. Below
the opset that has 4 and 16 bits in the default domain, onnxruntime supports these in its own domain, in models of any
opset. Therefore only blocks and float8 require a higher opset.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from graphquant.ir import Graph, Op, Output, TensorRef
from graphquant.numerics import (
    Array,
    FloatType,
    IntType,
    QParams,
    QType,
    broadcast_to_tensor,
    parse_type,
    qparams_from_scale,
    quantize_to_dtype,
)
from graphquant.qdq.family import FamilyRequest, QDQFamily, QDQSite, add_constant, require_static_params

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.ir import Parameters
    from graphquant.qdq.family import RoundingMode


def read_onnx_qdq(graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
    """Return scale and zero point of a QuantizeLinear or DequantizeLinear of either domain; None if not constant."""
    slots = [*graph.slots(op.name), None, None, None][:3]
    scale = None if slots[1] is None else parameters.value(slots[1])
    zero_point = None if slots[2] is None else parameters.value(slots[2])
    if scale is None or (slots[2] is not None and zero_point is None):
        return None
    dtype = _quantized_type(graph, op, slots[0], zero_point)
    with np.errstate(over="ignore", under="ignore"):
        scale32 = scale.astype(np.float32)
    if dtype is None or not (np.isfinite(scale32).all() and (scale32 > 0).all()):
        return None
    if scale32.size == 0 or (zero_point is not None and zero_point.size != scale32.size):
        return None
    zero_points = (
        np.zeros(scale32.shape) if zero_point is None else zero_point.astype(np.float64).reshape(scale32.shape)
    )
    if isinstance(dtype, FloatType) and zero_points.any():  # ONNX defines no zero point for float8
        return None
    return _onnx_qparams(graph, op, slots[0], scale32, zero_points.astype(np.int32), dtype)


def _onnx_qparams(
    graph: Graph, op: Op, data: TensorRef | None, scale: Array, zero_point: Array, dtype: QType
) -> QParams | None:
    """Assign scale and zero point to the tensor, its channels or blocks; None if their shapes do not fit."""
    block = int(op.numeric_attr("block_size", 0))
    if scale.size == 1 and block <= 0:
        return qparams_from_scale(scale.reshape(()), zero_point.reshape(()), dtype)
    axis = int(op.numeric_attr("axis", 1))
    shape = graph.output(data).shape if data is not None else None
    rank = len(shape) if shape else scale.ndim if block > 0 else 0
    axis = axis + rank if axis < 0 else axis
    if block <= 0:
        return qparams_from_scale(scale, zero_point, dtype, axis=axis) if scale.ndim == 1 else None
    if scale.ndim != rank or not 0 <= axis < rank:
        return None
    return qparams_from_scale(scale, zero_point, dtype, axis=axis, block=block)


def _quantized_type(graph: Graph, op: Op, data: TensorRef | None, zero_point: Array | None) -> QType | None:
    """Return the quantized type, or None if it is unknown or not supported."""
    name = None if zero_point is None else str(zero_point.dtype)
    if name is None and op.kind == "dequantize" and data is not None:
        name = graph.output(data).dtype
    if name is None and op.kind == "quantize":
        name = op.outputs[0].dtype if op.outputs else None  # the attribute "output_dtype" can set it
    try:
        return parse_type(name or "uint8")
    except ValueError:
        return None


def onnx_qdq_rounding(_op: Op) -> RoundingMode:
    """Return "half-even", the only rounding of QuantizeLinear."""
    return "half-even"


OPSET_PER_TENSOR, OPSET_PER_CHANNEL = 10, 13
"""Opsets of 8-bit types and of int32 biases."""

OPSET_ACTIVATIONS = 11
"""onnxruntime adds a Round to float biases if activations are quantized. Opset 10 does not have that op."""

OPSET_FLOAT8, OPSET_BLOCKS = 19, 21
"""Opset 19 also has float16 tensors, opset 21 float16 tensors of 4 and 16 bits."""

OPSET_4_AND_16_BITS = 21
"""First opset with 4 and 16 bits in the default domain."""

MICROSOFT_DOMAIN = "com.microsoft"
"""onnxruntime's domain, which has 4 and 16 bits in models of any opset."""

OPSET_BROADCAST = 8
"""First opset whose Max and Min broadcast, which clipping needs for widths without a container."""

TYPES_OF_4_AND_16_BITS = frozenset({"int4", "uint4", "int16", "uint16"})

TYPES_WITHOUT_CONSTANT = frozenset({"int4", "uint4"})
"""Types that initializers can have but Constants cannot, below `OPSET_4_AND_16_BITS`."""

_ROLES = ("input", "scale", "zero_point")
_QUANTIZE = ("quantize", "QuantizeLinear", _ROLES)
_DEQUANTIZE = ("dequantize", "DequantizeLinear", _ROLES)
_MAX = ("max", "Max", ("input",))
_MIN = ("min", "Min", ("input",))


def _container_type(dtype: QType, *, parameter: bool) -> str:
    """Return the container of the values. It has 8 bits for activations of up to 4 bits.

    onnxruntime's optimizer moves 4-bit activations past a MaxPool or into a convolution, whose kernels do not support
    the type, and then rejects the model. It does not move weights.
    """
    narrow = isinstance(dtype, IntType) and dtype.container in {"int4", "uint4"}
    return dtype.container.replace("4", "8") if narrow and not parameter else dtype.container


def add_onnx_qdq(graph: Graph, site: QDQSite) -> TensorRef:
    """Add QuantizeLinear and DequantizeLinear. For a weight with a value, an integer constant replaces the former."""
    params = require_static_params(site)
    source_output = graph.output(site.tensor)
    container = _container_type(params.type, parameter=site.is_parameter)
    integer_dtype = np.dtype(getattr(ml_dtypes, container, container))
    shape = () if _is_single_block(params) else params.scale.shape
    zero_points = params.zero_point.astype(integer_dtype).reshape(shape)
    float_dtype = np.dtype(source_output.dtype)  # the scale's type is the tensor's
    scales = params.scale.astype(float_dtype).reshape(shape)
    scale = add_constant(graph, f"{site.name}/scale", scales, op_type="Constant", rule=site.rule)
    zero_point = add_constant(graph, f"{site.name}/zero_point", zero_points, op_type="Constant", rule=site.rule)
    if site.read_value is not None:
        op_name = graph.unique_name(f"{site.name}/{integer_dtype.name}")
        read_integers = partial(_quantized_weight, site.read_value, params, integer_dtype)
        read_integers = read_integers if site.reuse_integers is None else partial(site.reuse_integers, read_integers)
        output = Output(op_name, integer_dtype.name, site.shape)
        op = Op(
            name=op_name,
            kind="constant",
            type="Constant",
            roles=(),
            outputs=(output,),
            read_value=read_integers,
            rule=site.rule,
        )
        source = graph.add_op(op)
    else:
        output = Output("", integer_dtype.name, source_output.shape)
        data = _add_clip(graph, site)
        source = _add_op(graph, site, site.name, _QUANTIZE, output, [data, scale, zero_point])
    output = Output("", source_output.dtype, source_output.shape)
    return _add_op(graph, site, f"{site.name}/dequant", _DEQUANTIZE, output, [source, scale, zero_point])


def _quantized_weight(read_value: Callable[[], Array], params: QParams, integer_dtype: np.dtype[Any]) -> Array:
    return quantize_to_dtype(read_value(), params, integer_dtype)


def _is_single_block(params: QParams) -> bool:
    """Return True if a vector is one block. onnxruntime then requires one scale per tensor and no block size."""
    return params.block is not None and params.scale.shape == (1,)


def _add_clip(graph: Graph, site: QDQSite) -> TensorRef:
    """Add Max and Min, which limit values to those of the type if its container has more.

    onnxruntime's QuantizeLinear to 4 bits per channel wraps around for values of 2**31 steps. Therefore a weight that
    stays float is always limited on both sides.
    """
    params, source_output = require_static_params(site), graph.output(site.tensor)
    result = site.tensor
    if isinstance(params.type, FloatType) or not site.needs_clip:
        return result
    type_limits = params.type.limits(narrow=params.narrow)
    container_type = IntType.parse(_container_type(params.type, parameter=site.is_parameter))
    container_limits, wraps = container_type.limits(), container_type.container in {"int4", "uint4"}
    bounds = ((_MAX, "low", params.range.low), (_MIN, "high", params.range.high))
    for end_index, (op_form, end_name, limit) in enumerate(bounds):
        if wraps or type_limits[end_index] != container_limits[end_index]:
            bound_value = _broadcast_bound(limit.astype(np.dtype(source_output.dtype)), site)
            bound = add_constant(graph, f"{site.name}/{end_name}", bound_value, op_type="Constant", rule=site.rule)
            output = Output("", source_output.dtype, source_output.shape)
            result = _add_op(graph, site, f"{site.name}/clip_{end_name}", op_form, output, [result, bound])
    return result


def _broadcast_bound(values: Array, site: QDQSite) -> Array:
    """Reshape bounds to broadcast over the tensor, whose shape is known if there are blocks."""
    shape = tuple(size or 0 for size in site.shape or ())
    return broadcast_to_tensor(values, require_static_params(site), shape)


def _add_op(
    graph: Graph,
    site: QDQSite,
    name: str,
    op_form: tuple[str, str, tuple[str, ...]],
    output: Output,
    inputs: list[TensorRef],
) -> TensorRef:
    op_name = graph.unique_name(name)
    named_output = Output(op_name, output.dtype, output.shape)
    domain, attrs = _domain_and_attrs(site) if op_form in {_QUANTIZE, _DEQUANTIZE} else ("", {})
    op = Op(
        name=op_name,
        kind=op_form[0],
        type=op_form[1],
        domain=domain,
        roles=op_form[2],
        outputs=(named_output,),
        attrs=attrs,
        rule=site.rule,
    )
    return graph.add_op(op, inputs)


def _domain_and_attrs(site: QDQSite) -> tuple[str, dict[str, int]]:
    """Return the domain of the ops, and their attributes."""
    params = require_static_params(site)
    attrs = {} if _is_single_block(params) else {"axis": params.axis, "block_size": params.block}
    container = _container_type(params.type, parameter=site.is_parameter)
    in_microsoft_domain = site.opset < OPSET_4_AND_16_BITS and container in TYPES_OF_4_AND_16_BITS
    return MICROSOFT_DOMAIN if in_microsoft_domain else "", {
        name: value for name, value in attrs.items() if value is not None
    }


def onnx_qdq_unsupported_reason(request: FamilyRequest) -> str | None:  # noqa: PLR0911  # one per reason
    """Return the reason why onnxruntime does not support a request, or None."""
    if request.dtype == "float16" and not (request.is_parameter and isinstance(request.type, IntType)):
        return "onnxruntime runs ops between float16 pairs in float; convert the model to float32 first"
    if request.dtype not in {"float16", "float32"}:
        return f"QuantizeLinear with a float32 scale takes no {request.dtype} tensor"
    if request.range_source != "observed":
        return "QuantizeLinear needs a known scale; omit 'range'"
    if request.rounding_mode == "half-up":
        return "QuantizeLinear always rounds half to even; omit 'round'"
    if request.block is not None and not request.is_parameter:
        return (
            "only weights can have blocks, since calibration does not collect statistics for blocks of activations;"
            ' use per = "tensor" or per = "channel"'
        )
    if request.type.name == "int32" and request.is_parameter:
        return None
    if isinstance(request.type, FloatType) or request.type.container in {"int8", "uint8", *TYPES_OF_4_AND_16_BITS}:
        return None
    return f"onnxruntime does not support {request.type.name}, which is wider than 16 bits; use 2 to 16 bits"


def onnx_qdq_minimum_opset(request: FamilyRequest) -> int:
    """Return the lowest opset of the default domain that supports a request, with onnxruntime's ops if needed."""
    container = _container_type(request.type, parameter=request.is_parameter)
    has_4_or_16_bits = container in TYPES_OF_4_AND_16_BITS
    if request.in_function and request.is_parameter and container in TYPES_WITHOUT_CONSTANT:
        return OPSET_4_AND_16_BITS
    if request.block is not None or (request.dtype == "float16" and has_4_or_16_bits):
        return OPSET_BLOCKS
    if isinstance(request.type, FloatType) or request.dtype == "float16":
        return OPSET_FLOAT8
    if has_4_or_16_bits:
        return OPSET_BROADCAST if request.is_parameter else OPSET_ACTIVATIONS
    if request.axis is not None:
        return OPSET_PER_CHANNEL
    return OPSET_PER_TENSOR if request.is_parameter else OPSET_ACTIVATIONS


def exact_params(params: QParams) -> QParams:
    """Return `params` unchanged, since the ops store scale and zero point."""
    return params


ONNX_QDQ = QDQFamily(
    name="onnx-qdq",
    format="onnx",
    add_ops=add_onnx_qdq,
    unsupported_reason=onnx_qdq_unsupported_reason,
    minimum_opset=onnx_qdq_minimum_opset,
    effective_params=exact_params,
    op_types=frozenset({"QuantizeLinear", "DequantizeLinear"}),
    stores_integer_weights=True,
    has_zero_points=True,
    argument_names=frozenset(),
    read_params=read_onnx_qdq,
    rounding_mode_of=onnx_qdq_rounding,
)
