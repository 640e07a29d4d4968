"""Selection of integer kernels: for each op type, the required context and the resulting op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphquant.backends.findings import NOT_QUANTIZED, BrokenRule
from graphquant.backends.onnxruntime.context import (
    BYTE_DTYPES,
    PLACEHOLDER_RULE,
    REFUSED_RULE,
    OrtOpContext,
    broken_group_rule,
    broken_input_rule,
    broken_int8_rule,
    broken_output_rule,
    broken_type_rule,
    missing_kernel_rule,
    number_text,
    old_opset_rule,
    unfused_clip_rule,
)
from graphquant.backends.onnxruntime.work import is_dq

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.ir import Op


# -- convolutions and matrix products --------------------------------------------------------------

MIN_BLOCK_SIZE = 16
"""Minimum number of values that share a scale in a weight of MatMulNBits; a power of two."""

BIAS_ABSOLUTE_TOLERANCE, BIAS_RELATIVE_TOLERANCE = 1e-6, 1e-2
"""Allowed error of the scale of a bias: absolute, and relative to input times weight."""

NARROW_WEIGHT_DTYPES = frozenset({"int2", "uint2", "int4", "uint4", "int8", "uint8"})


def select_conv(context: OrtOpContext) -> str | BrokenRule:
    """Select Conv: all inputs quantized, including the bias; int8 activations only if kernels accept them."""
    broken_rule = (
        broken_group_rule(context)
        or _missing_weight_rule(context)
        or broken_int8_rule(context)
        or _mixed_types_rule(context)
        or _unsupported_type_rule(context, 2)
    )
    return broken_rule or _broken_bias_rule(context, check_scale=True) or "QLinearConv"


def _missing_weight_rule(context: OrtOpContext) -> BrokenRule | None:
    """Return the rule for an invalid model without a weight."""
    return NOT_QUANTIZED if len(context.dqs) < 2 else None  # noqa: PLR2004  # data and weight


def _mixed_types_rule(context: OrtOpContext) -> BrokenRule | None:
    """Return the rule for different types of input and output."""
    if not context.qs or context.input_dtypes[0] == context.output_dtype:
        return None
    message = f"its input is {context.input_dtypes[0]} and its output {context.output_dtype}"
    return BrokenRule("mixed-types", message, "use one integer type for both")


def _unsupported_type_rule(context: OrtOpContext, inputs: int) -> BrokenRule | None:
    unsupported_dtype = next((dtype for dtype in context.input_dtypes[:inputs] if dtype not in BYTE_DTYPES), "")
    return missing_kernel_rule(context.op, unsupported_dtype) if unsupported_dtype else None


def _broken_bias_rule(context: OrtOpContext, *, check_scale: bool = False) -> BrokenRule | None:
    if len(context.input_dtypes) < 3:  # noqa: PLR2004  # the slot of the bias
        return None
    if context.input_dtypes[2] != "int32":
        message = f"its bias is {context.input_dtypes[2]}"
        return BrokenRule("bias-type", message, "quantize the bias to int32, scale input times weight")
    if check_scale and context.dqs[2].rule != PLACEHOLDER_RULE and not _is_product_scale(context):
        message = "the scale of its bias is not input times weight, or its zero point is not 0"
        return BrokenRule("bias-scale", message, "requantize the bias with this scale, or keep it in float")
    return None


def _is_product_scale(context: OrtOpContext) -> bool:
    """Return whether the scale of the bias is input times weight within the tolerance of ONNX Runtime."""
    params_tensors = [context.work.qdq_inputs(context.graph, dq.name) for dq in context.dqs]
    scales = [context.work.small_constant_value(scale) for _, scale, _ in params_tensors]
    zero = context.work.small_constant_value(params_tensors[2][2])
    if any(scale is None for scale in scales) or (zero is not None and np.any(zero)):
        return False
    data_scale, weight_scale, bias_scale = (np.asarray(scale, np.float64).reshape(-1) for scale in scales)
    if len({1, data_scale.size, weight_scale.size, bias_scale.size}) > 2:  # noqa: PLR2004  # the sizes do not broadcast
        return False
    product = data_scale * weight_scale
    return bool(
        (np.abs(bias_scale - product) <= BIAS_ABSOLUTE_TOLERANCE + BIAS_RELATIVE_TOLERANCE * np.abs(product)).all()
    )


def select_matmul(context: OrtOpContext) -> str | BrokenRule:
    """Select MatMul: both inputs quantized, with or without a quantized output; or only a low-bit weight."""
    if len(context.dqs) == 1:
        return _select_matmul_nbits(context)
    broken_rule = broken_input_rule(context, 2) or broken_int8_rule(context) or _unsupported_type_rule(context, 2)
    if broken_rule or not context.qs:
        return broken_rule or "MatMulIntegerToFloat"
    return broken_output_rule(context) or _mixed_types_rule(context) or "QLinearMatMul"


def _select_matmul_nbits(context: OrtOpContext) -> str | BrokenRule:
    """Select float activations times a low-bit weight."""
    source = context.work.producer(context.graph, context.op.name, 1)
    if source is None or not is_dq(source) or context.qs or context.clip:
        return broken_input_rule(context, 2) or BrokenRule("float-input", "it has one quantized input", "quantize both")
    dtype = context.work.integer_dtype(context.graph, source.name)
    data, scale, zero = context.work.qdq_inputs(context.graph, source.name)
    if dtype not in NARROW_WEIGHT_DTYPES or not context.work.is_constant(data) or not context.work.is_constant(scale):
        return broken_input_rule(context, 2) or missing_kernel_rule(context.op, dtype)
    weight_tensors = [weight_tensor for weight_tensor in (data, scale, zero) if weight_tensor is not None]
    if any(weight_tensor.graph != context.graph.name for weight_tensor in weight_tensors):
        message = "its weight is a constant of another graph, so ONNX Runtime cannot load the model"
        return BrokenRule(REFUSED_RULE, message, "move the weight, its scales and zero points into the subgraph")
    if any(context.work.constant_use_count(context.graph, weight_tensor) > 1 for weight_tensor in weight_tensors):
        message = "its weight, or an equal constant of up to 8 scales, has other readers"
        return BrokenRule("shared-weight", message, "duplicate its weight and scales")
    shape = context.graph.output(data).shape if data is not None else None
    sizes = context.graph.output(scale).shape if scale is not None else None
    zeros = context.graph.output(zero).shape if zero is not None else sizes
    if shape is None or len(shape) != 2 or zeros != sizes:  # noqa: PLR2004  # a matrix
        message = "its quantized weight is not a matrix, or scales and zero points differ in shape"
        return BrokenRule("weight-shape", message, "use a weight with two axes, or quantize the activation as well")
    return _broken_block_rule(source, shape, sizes) or "MatMulNBits"


def _broken_block_rule(
    source: Op, shape: tuple[int | None, ...], sizes: tuple[int | None, ...] | None
) -> BrokenRule | None:
    block = int(source.numeric_attr("block_size", 0))
    axis = int(source.numeric_attr("axis", 1))
    if not block:
        if sizes == () or (sizes == (shape[1],) and axis == 1):
            return None
        message = "its weight has neither one scale, nor one per column, nor one per block of rows"
        return BrokenRule("weight-axis", message, "use one scale per column, axis 1")
    if axis != 0:
        message = f"the blocks of its weight are along axis {axis}"
        return BrokenRule("weight-axis", message, "use blocks along axis 0, the summed axis")
    if block < MIN_BLOCK_SIZE or block & (block - 1):
        message = f"the blocks of its weight have {block} values"
        return BrokenRule("block-size", message, "use blocks of 16, 32, 64 or another power of two")
    return None


def select_gemm(context: OrtOpContext) -> str | BrokenRule:
    """Select Gemm: all inputs quantized, including the bias, with or without a quantized output."""
    broken_rule = broken_input_rule(context) or _missing_weight_rule(context)
    if broken_rule:
        return _select_gemm_nbits(context) or broken_rule
    if context.qs or context.clip:
        broken_rule = broken_output_rule(context)
    if not broken_rule and context.input_dtypes[0] == "int8" and context.input_dtypes[1] != "int8":
        message = f"its activation is int8 and its weight {context.input_dtypes[1]}"
        broken_rule = BrokenRule("int8-activation", message, "quantize activations to uint8")
    broken_rule = broken_rule or _mixed_types_rule(context) or _unsupported_type_rule(context, 2)
    if not broken_rule and len(context.input_dtypes) > 2 and context.op.numeric_attr("beta", 1.0) != 1.0:  # noqa: PLR2004  # with a bias
        return BrokenRule("beta", "its beta is not 1", "multiply the bias by beta and set beta to 1")
    return broken_rule or _broken_bias_rule(context) or "QGemm"


def _select_gemm_nbits(context: OrtOpContext) -> str | BrokenRule | None:
    """Select a Gemm that is equivalent to a MatMul with a low-bit weight and a bias; None for other Gemms."""
    source = context.work.producer(context.graph, context.op.name, 1)
    data_producer = context.work.producer(context.graph, context.op.name, 0)
    if source is None or not is_dq(source) or (data_producer is not None and is_dq(data_producer)) or context.qs:
        return None
    is_plain_product = (
        context.op.numeric_attr("alpha", 1.0) == 1.0
        and not context.op.numeric_attr("transA", 0)
        and not context.op.numeric_attr("transB", 0)
    )
    slots = [*context.graph.slots(context.op.name), None, None, None][:3]
    if not is_plain_product or (slots[2] is not None and context.op.numeric_attr("beta", 1.0) != 1.0):
        return None
    data = context.work.slot_tensor(context.graph, source.name, 0)
    columns = context.graph.output(data).shape if data is not None else None
    if slots[2] is not None and columns is not None and context.graph.output(slots[2]).shape != columns[1:]:
        return None
    return _select_matmul_nbits(context)


HALF_WORD_DTYPES = frozenset({"int16", "uint16"})


def _select_unary(becomes: str) -> Callable[[OrtOpContext], str | BrokenRule]:
    def select(context: OrtOpContext) -> str | BrokenRule:
        return broken_group_rule(context, 1) or broken_type_rule(context) or becomes

    return select


def _select_average_pool(context: OrtOpContext) -> str | BrokenRule:
    broken_rule = broken_group_rule(context, 1) or broken_type_rule(context)
    if broken_rule is None and "dilations" in context.op.attrs:
        message = (
            "the integer kernel for AveragePool does not support 'dilations', not even of 1, and ONNX Runtime cannot"
            " load the model"
        )
        return BrokenRule(REFUSED_RULE, message, "remove the attribute if it is 1, or keep the op in float")
    return broken_rule or "QLinearAveragePool"


def _select_joint(becomes: str) -> Callable[[OrtOpContext], str | BrokenRule]:
    def select(context: OrtOpContext) -> str | BrokenRule:
        return broken_group_rule(context) or broken_type_rule(context) or becomes

    return select


def _select_where(context: OrtOpContext) -> str | BrokenRule:
    return broken_group_rule(context, 2) or broken_type_rule(context) or "QLinearWhere"


def _select_passthrough(
    allowed_dtypes: frozenset[str], *, needs_positive_scale: bool = False
) -> Callable[[OrtOpContext], str | BrokenRule]:
    """Return the selector of ops that move or compare values, which need one scale for input and output."""

    def select(context: OrtOpContext) -> str | BrokenRule:
        broken_rule = (
            old_opset_rule(context)
            or unfused_clip_rule(context)
            or broken_group_rule(context, 1)
            or broken_type_rule(context, allowed_dtypes)
        )
        if broken_rule:
            return broken_rule
        for q in context.qs:
            if not context.work.same_params(context.graph, q.name, context.dqs[0].name):
                return _different_scales_rule(context, q)
        _, scale, _ = context.work.qdq_inputs(context.graph, context.qs[0].name)
        if needs_positive_scale and not (context.work.scalar_value(scale) or 0) > 0:
            return BrokenRule("scale", "its scale is not positive", "quantize with a positive scale")
        return f"{context.op.type} on {context.input_dtypes[0]}"

    return select


def _different_scales_rule(context: OrtOpContext, q: Op) -> BrokenRule:
    params_texts = []
    for name in (context.dqs[0].name, q.name):
        _, scale, zero = context.work.qdq_inputs(context.graph, name)
        zero_text = "missing" if zero is None else number_text(context.work.scalar_value(zero))
        params_texts.append(f"scale {number_text(context.work.scalar_value(scale))}, zero point {zero_text}")
    message = f"its input has {params_texts[0]} and its output {params_texts[1]}"
    return BrokenRule("tie", message, "use one scale and one explicit zero point for input and output")


def _select_arg_max(context: OrtOpContext) -> str | BrokenRule:
    if len(context.dqs) != 1 or context.clip:
        return broken_input_rule(context, 1) or unfused_clip_rule(context) or NOT_QUANTIZED
    if context.input_dtypes[0] not in BYTE_DTYPES:
        return missing_kernel_rule(context.op, context.input_dtypes[0])
    if not context.work.has_scalar_params(context.graph, context.dqs[0].name, zero_needed=True):
        message = "the scale or zero point of its input is not a single explicit constant"
        return BrokenRule("scale", message, "quantize per tensor, with a zero point")
    return f"ArgMax on {context.input_dtypes[0]}"


ORT_SELECTORS: dict[str, Callable[[OrtOpContext], str | BrokenRule]] = {
    "Conv": select_conv,
    "MatMul": select_matmul,
    "Gemm": select_gemm,
    "Add": _select_joint("QLinearAdd"),
    "Mul": _select_joint("QLinearMul"),
    "Concat": _select_joint("QLinearConcat"),
    "Where": _select_where,
    "AveragePool": _select_average_pool,
    "GlobalAveragePool": _select_unary("QLinearGlobalAveragePool"),
    "LeakyRelu": _select_unary("QLinearLeakyRelu"),
    "Sigmoid": _select_unary("QLinearSigmoid"),
    "Softmax": _select_unary("QLinearSoftmax"),
    "Resize": _select_passthrough(BYTE_DTYPES),
    "MaxPool": _select_passthrough(BYTE_DTYPES | {"int4", "uint4"}, needs_positive_scale=True),
    "ReduceMax": _select_passthrough(BYTE_DTYPES, needs_positive_scale=True),
    "ReduceMin": _select_passthrough(BYTE_DTYPES, needs_positive_scale=True),
    "Split": _select_passthrough(BYTE_DTYPES | HALF_WORD_DTYPES),
    "ArgMax": _select_arg_max,
    **dict.fromkeys(
        (
            "DepthToSpace",
            "Expand",
            "Flatten",
            "Gather",
            "GatherElements",
            "Reshape",
            "Slice",
            "Squeeze",
            "Tile",
            "Transpose",
            "Unsqueeze",
        ),
        _select_passthrough(BYTE_DTYPES | HALF_WORD_DTYPES),
    ),
}
"""Selector of each op type that can run on integers. Every other type stays float."""
