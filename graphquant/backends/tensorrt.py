"""TensorRT explicit quantization: symmetric, on the inputs of weighted ops, and on inputs and outputs of other ops."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from graphquant.backends.findings import Backend
from graphquant.backends.requirements import (
    KindRequirements,
    RequirementTable,
    predict_from_table,
    require_float_bias,
    require_one_scale,
    require_per_tensor_activations,
    require_quantized_inputs,
    require_quantized_output,
    require_symmetric,
    require_types,
    require_weight_axis,
)

if TYPE_CHECKING:
    from graphquant.backends.requirements import OpContext
    from graphquant.ir import Shape


MIN_INTEGER_CHANNELS = 16
"""Minimum channels of a convolution, or rows and columns of a summed matrix, for which integers are faster."""

CHANNEL_MULTIPLE = 8
"""Required multiple of channels of a depthwise convolution, or of one that reads a graph input, instead."""

MAX_ATTENTION_LENGTH = 512

TENSORRT_ACTIVATION_DTYPES = frozenset({"int8"})

_TENSORRT_WEIGHT_DTYPES = TENSORRT_ACTIVATION_DTYPES | {"int4"}

_TENSORRT_ACTIVATION_KINDS = frozenset(
    {"relu", "relu6", "clip", "leaky_relu", "sigmoid", "tanh", "elu", "hard_sigmoid", "hard_swish"}
)


def _input_shape_by_role(context: OpContext, role: str) -> Shape | None:
    side = context.input_by_role(role)
    shape: Shape | None = None if side is None else context.graph.output(side.tensor).shape
    return shape


def _small_conv_note(context: OpContext) -> str:
    """Return a note about convolutions with few channels, which the integer kernels pad."""
    weight = _input_shape_by_role(context, "weight")
    if weight is None or len(weight) < 2 or None in weight[:2]:  # noqa: PLR2004  # channels out and in
        return ""
    output_channels, input_channels = int(weight[0] or 0), int(weight[1] or 0)
    if context.op.kind == "depthwise_conv":
        large_kernel = [int(size or 0) >= 3 for size in weight[2:]]  # noqa: PLR2004  # kernels of 3x3 and larger
        return (
            ""
            if output_channels % CHANNEL_MULTIPLE == 0 and all(large_kernel)
            else "a small depthwise kernel is faster in float"
        )
    input_channels *= int(context.op.numeric_attr("group", 1))
    if min(output_channels, input_channels) >= MIN_INTEGER_CHANNELS:
        return ""
    side = context.input_by_role("input")
    reads_graph_input = side is not None and context.quantizations.model.op(side.source).kind == "input"
    if reads_graph_input and input_channels % CHANNEL_MULTIPLE == 0 and context.op.numeric_attr("group", 1) == 1:
        return ""
    return (
        f"a convolution of {input_channels} to {output_channels} channels is faster in float; integers are faster from"
        f" {MIN_INTEGER_CHANNELS} on"
    )


def _small_product_note(context: OpContext) -> str:
    """Return a note about products with vectors or with few rows and columns."""
    left_shape, right_shape = _input_shape_by_role(context, "input"), _input_shape_by_role(context, "weight")
    if left_shape is None or right_shape is None or len(left_shape) < 2 or len(right_shape) < 2:  # noqa: PLR2004  # matrices
        return ""
    if context.op.numeric_attr("transB", 0):
        right_shape = (*right_shape[:-2], right_shape[-1], right_shape[-2])
    rows, inner_size, columns = left_shape[-2], right_shape[-2], right_shape[-1]
    if rows == 1 or columns == 1:
        return "a product with a vector is faster in float"
    if any(size is not None and size < MIN_INTEGER_CHANNELS for size in (inner_size, columns)):
        return (
            f"a product of {inner_size} by {columns} is faster in float; integers are faster from"
            f" {MIN_INTEGER_CHANNELS} on"
        )
    weight = context.input_by_role("weight")
    if weight is not None and not weight.parameter and rows is not None and rows > MAX_ATTENTION_LENGTH:
        return f"attention over {rows} positions is faster in float; integers are faster up to {MAX_ATTENTION_LENGTH}"
    return ""


_TENSORRT_WEIGHTED = (
    require_quantized_inputs,
    require_types(TENSORRT_ACTIVATION_DTYPES, _TENSORRT_WEIGHT_DTYPES),
    require_symmetric,
    require_per_tensor_activations,
    require_weight_axis(attrgetter("channel_axis")),
    require_float_bias,
)

_TENSORRT_BOTH_SIDES = (
    require_quantized_inputs,
    require_quantized_output,
    require_types(TENSORRT_ACTIVATION_DTYPES, TENSORRT_ACTIVATION_DTYPES),
    require_symmetric,
    require_per_tensor_activations,
)

_TENSORRT_FUSABLE_KINDS = _TENSORRT_ACTIVATION_KINDS | {"batchnorm", "bias_add"}

TENSORRT_TABLE = RequirementTable(
    name="TensorRT",
    rows={
        **dict.fromkeys(
            ("conv", "depthwise_conv", "conv_transpose"),
            KindRequirements(requires=_TENSORRT_WEIGHTED, notes=(_small_conv_note,)),
        ),
        **dict.fromkeys(
            ("matmul", "gemm"), KindRequirements(requires=_TENSORRT_WEIGHTED, notes=(_small_product_note,))
        ),
        **dict.fromkeys(
            (
                *("add", "sub", "mul", "div", "max", "min", "avg_pool", "global_avg_pool", "max_pool", "resize"),
                *("reshape", "flatten", "transpose", "squeeze", "unsqueeze", "slice", "pad", "gather"),
                *("depth_to_space", "space_to_depth", "split", *sorted(_TENSORRT_ACTIVATION_KINDS)),
            ),
            KindRequirements(requires=_TENSORRT_BOTH_SIDES),
        ),
        "concat": KindRequirements(requires=(*_TENSORRT_BOTH_SIDES, require_one_scale)),
    },
    fuses=dict.fromkeys(("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"), _TENSORRT_FUSABLE_KINDS),
    absorbable_sums=frozenset({"add"}),
)

TENSORRT = Backend(
    name="tensorrt",
    description="TensorRT's explicit quantization",
    predict=partial(predict_from_table, table=TENSORRT_TABLE),
    symmetric=True,
    ties_concat=True,
    bias_type="float",
    fuses=TENSORRT_TABLE.fuses,
)
