"""TensorFlow's QuantizeAndDequantizeV2, V3 and V4. Version 1 is only read; TensorFlow no longer imports it.

https://www.tensorflow.org/api_docs/python/tf/quantization/quantize_and_dequantize_v2 : values are only scaled, so there
is no zero point. V2 and V3 pass gradients on as they come, V4 those inside the given range. V3's bits are a tensor.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from graphquant.errors import InternalError, UsageError
from graphquant.ir import DataType, Graph, Op, Output, Parameters, TensorRef
from graphquant.numerics import Array, DynamicQParams, IntType, QParams, Range, tf_ranges
from graphquant.qdq.family import FamilyRequest, QDQFamily, QDQSite, RoundingMode, integer_only_reason, no_minimum_opset
from graphquant.qdq.tf_nodes import add_argument, add_in_merged_shape

TF_ROUND_MODE_NAMES: dict[RoundingMode, str] = {"half-even": "HALF_TO_EVEN", "half-up": "HALF_UP"}

KERNEL_FLOAT_TYPES = frozenset({"float32", "float64"})
"""The types that have a CPU kernel."""

MAX_READABLE_BITS = 62


def add_quantize_and_dequantize(graph: Graph, site: QDQSite, *, version: int) -> TensorRef:
    """Add the op with the constants of its range, and of its bits for V3."""
    return add_in_merged_shape(graph, site, partial(_add_quantize_and_dequantize_op, version=version))


def _add_quantize_and_dequantize_op(graph: Graph, site: QDQSite, *, version: int) -> TensorRef:
    params, source_output = site.params, graph.output(site.tensor)
    attrs: dict[str, Any] = {
        "signed_input": params.type.signed,
        "range_given": not isinstance(params, DynamicQParams),
        "narrow_range": params.narrow and params.type.signed,
    }
    if params.axis is not None:
        attrs["axis"] = params.axis
    if version != 3:  # noqa: PLR2004  # whose bits are a tensor, and which rounds half to even
        attrs |= {"num_bits": params.type.bits, "round_mode": TF_ROUND_MODE_NAMES[site.rounding_mode or "half-even"]}
    low, high = (end.astype(source_output.dtype) for end in _range_inputs(site, version, source_output.dtype))
    op_name = graph.unique_name(site.name)
    inputs = [site.tensor, add_argument(graph, site, "min", low), add_argument(graph, site, "max", high)]
    roles: tuple[str, ...] = ("input", "min", "max")
    if version == 3:  # noqa: PLR2004  # its bits are a tensor
        inputs.append(add_argument(graph, site, "num_bits", np.array(params.type.bits, np.int32)))
        roles = (*roles, "other")
    op = Op(
        name=op_name,
        kind="qdq",
        type=f"QuantizeAndDequantizeV{version}",
        roles=roles,
        outputs=(Output(op_name, source_output.dtype, source_output.shape),),
        attrs={"T": DataType(source_output.dtype or "float32"), **attrs},
        rule=site.rule,
    )
    return graph.add_op(op, inputs)


def _range_inputs(site: QDQSite, version: int, dtype: str | None) -> tuple[Array, Array]:
    """Return `input_min` and `input_max`, () or (C,); float64, to be written in the tensor's type."""
    params = site.params
    if isinstance(params, QParams):
        op_range = params.op_range or (
            params.range if dtype == "float64" else tf_ranges.range_for_quantize_and_dequantize(params)
        )
        return op_range.low, op_range.high
    # V4 alone looks at a range that is not given: its gradients pass inside of it.
    largest = float(np.finfo(np.float32).max) if version == 4 else 0.0  # noqa: PLR2004
    argument_defaults = (site.args.input_min, -largest), (site.args.input_max, largest)
    low, high = (default if limit is None else limit for limit, default in argument_defaults)
    if params.axis is None:
        return np.asarray(low, np.float64), np.asarray(high, np.float64)
    channels = None if site.shape is None else site.shape[params.axis]
    if channels is None:
        raise InternalError(f"{site.tensor} has an unknown number of channels. `unsupported_reason` must reject it.")
    return np.full(channels, low, np.float64), np.full(channels, high, np.float64)


def quantize_and_dequantize_unsupported_reason(request: FamilyRequest, *, version: int) -> str | None:
    """Return the reason why TensorFlow does not support a request in this version, or None."""
    op_type, max_bits = (
        f"QuantizeAndDequantizeV{version}",
        tf_ranges.MAX_SIGNED_BITS if request.type.signed else tf_ranges.MAX_UNSIGNED_BITS,
    )
    if (reason := integer_only_reason(request, op_type)) is not None:
        return reason
    if request.dtype not in KERNEL_FLOAT_TYPES:
        return f"{op_type} has no CPU kernel for {request.dtype}; cast the tensor to float32"
    if not (2 if request.type.signed else 1) <= request.type.bits <= max_bits:
        signedness = "signed" if request.type.signed else "unsigned"
        return (
            f"{op_type} takes {2 if request.type.signed else 1} to {max_bits} {signedness} bits, and the scheme has"
            f" {request.type.bits}"
        )
    if not request.symmetric and request.type.signed:
        return 'QuantizeAndDequantize has no zero point; use zero = "symmetric", or the family fake-quant'
    if request.axis is not None and _channel_count(request) is None:
        return f'{op_type} per channel needs a known number of channels; use per = "tensor"'
    return _version_unsupported_reason(request, op_type, version)


def _version_unsupported_reason(request: FamilyRequest, op_type: str, version: int) -> str | None:
    """Return the reason why this version does not support a request that another version does, or None."""
    if version == 3:  # noqa: PLR2004  # V3 differs from V2 and V4 in each of these
        if request.rounding_mode == "half-up":
            return f"{op_type} always rounds half to even; omit 'round', or use quantize-and-dequantize-v2 or -v4"
        if request.shape == ():
            return f"{op_type} takes no scalar; use quantize-and-dequantize-v2 or -v4"
        return None
    if request.axis is not None and not request.is_dynamic:
        return (
            f'{op_type} has no CPU kernel for a range per channel; use per = "tensor", or the family'
            " quantize-and-dequantize-v3 or fake-quant"
        )
    if request.args.specified() and not request.is_dynamic:
        return "'input_min' and 'input_max' bound the gradients of a dynamic range; use observe = \"fixed\""
    return None


def _channel_count(request: FamilyRequest) -> int | None:
    return None if request.shape is None or request.axis is None else request.shape[request.axis]


def effective_quantize_and_dequantize_params(params: QParams) -> QParams:
    """Return the params that the op computes from the float32 range of `params`."""
    op_range = params.op_range or tf_ranges.range_for_quantize_and_dequantize(params)
    effective = tf_ranges.quantize_and_dequantize_params(op_range, params.type, narrow=params.narrow, axis=params.axis)
    return replace(effective, op_range=params.op_range)


def read_quantize_and_dequantize(graph: Graph, op: Op, parameters: Parameters) -> QParams | DynamicQParams | None:
    """Return the params of an op of any version; None if its range or bits are not constant."""
    bits = _constant_bits(graph, op, parameters)
    if bits is None or not 1 <= bits <= MAX_READABLE_BITS:
        return None
    dtype = IntType(bits, signed=bool(op.attrs.get("signed_input", True)))
    narrow = bool(op.attrs.get("narrow_range", False)) and dtype.signed
    axis = int(op.numeric_attr("axis", tf_ranges.WHOLE_TENSOR_AXIS))
    channel_axis = None if axis < 0 else axis
    if not op.attrs.get("range_given", op.type.endswith("V3")):
        return DynamicQParams(type=dtype, narrow=narrow, axis=channel_axis)
    limits = _constant_range(graph, op, parameters)
    if limits is None or (limits.low.ndim == 0) != (channel_axis is None):
        return None
    try:
        return tf_ranges.quantize_and_dequantize_params(limits, dtype, narrow=narrow, axis=channel_axis)
    except UsageError:  # there is no step in it
        return None


def _constant_bits(graph: Graph, op: Op, parameters: Parameters) -> int | None:
    if not op.type.endswith("V3"):
        return int(op.numeric_attr("num_bits", 8))
    slot = [*graph.slots(op.name), None, None, None, None][3]
    value = None if slot is None else parameters.value(slot)
    return int(value) if value is not None and value.shape == () and value.dtype.kind == "i" else None


def _constant_range(graph: Graph, op: Op, parameters: Parameters) -> Range | None:
    """Return the constant range of the op; None if it is not constant or not valid."""
    if op.type == "QuantizeAndDequantize":
        low, high = np.asarray(op.numeric_attr("input_min", 0.0)), np.asarray(op.numeric_attr("input_max", 0.0))
    else:
        values = [None if slot is None else parameters.value(slot) for slot in graph.slots(op.name)[1:3]]
        if len(values) != 2 or values[0] is None or values[1] is None:  # noqa: PLR2004  # min and max
            return None
        low, high = values[0], values[1]
    if low.dtype.name not in KERNEL_FLOAT_TYPES or low.dtype != high.dtype or low.shape != high.shape or low.ndim > 1:
        return None
    is_valid = np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()
    return Range(low, high) if is_valid else None


def quantize_and_dequantize_rounding(op: Op) -> RoundingMode:
    """Return the op's rounding mode, half to even by default."""
    return "half-up" if op.attrs.get("round_mode") == "HALF_UP" else "half-even"


def _quantize_and_dequantize_family(version: int, arguments: frozenset[str] = frozenset()) -> QDQFamily:
    types = {f"QuantizeAndDequantizeV{version}"} | ({"QuantizeAndDequantize"} if version == 2 else set())  # noqa: PLR2004  # V2 replaced the first version
    return QDQFamily(
        name=f"quantize-and-dequantize-v{version}",
        format="tensorflow",
        add_ops=partial(add_quantize_and_dequantize, version=version),
        unsupported_reason=partial(quantize_and_dequantize_unsupported_reason, version=version),
        minimum_opset=no_minimum_opset,
        effective_params=effective_quantize_and_dequantize_params,
        op_types=frozenset(types),
        stores_integer_weights=False,
        has_zero_points=False,
        argument_names=arguments,
        read_params=read_quantize_and_dequantize,
        rounding_mode_of=quantize_and_dequantize_rounding,
    )


QUANTIZE_AND_DEQUANTIZE_V2, QUANTIZE_AND_DEQUANTIZE_V3 = (
    _quantize_and_dequantize_family(2),
    _quantize_and_dequantize_family(3),
)
QUANTIZE_AND_DEQUANTIZE_V4 = _quantize_and_dequantize_family(4, frozenset({"input_min", "input_max"}))
