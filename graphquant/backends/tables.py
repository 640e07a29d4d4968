"""Backends that are known from their documentation: the requirements of each kind of op as a table.

TensorRT: symmetric, on the inputs of weighted ops, and on inputs and outputs of other ops. QNN (Qualcomm HTP):
quantized inputs and outputs, per-tensor scales except for convolutions, tied Concat. OpenVINO's CPU plugin: quantized
inputs, signed symmetric weights, float biases. AMD Vitis AI: quantized inputs and outputs with power-of-two scales, and
shifts within the limits of the hardware.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.backends.findings import Backend, BrokenRule
from graphquant.backends.requirements import (
    OpContext,
    RequirementTable,
    judge_from_table,
    require_fixed_range,
    require_float_bias,
    require_one_scale,
    require_per_tensor_activations,
    require_quantized_inputs,
    require_quantized_output,
    require_symmetric,
    require_types,
    require_weight_axis,
)
from graphquant.quantize import (
    DPU_ADD_READ_LIMITS,
    DPU_ADD_WRITE_LIMITS,
    DPU_CUT_LIMITS,
    DPU_MAX_BIAS_CUT,
    DPU_MUL_WRITE_LIMITS,
    power_of_two_position,
)

if TYPE_CHECKING:
    from graphquant.ir import Op, Shape


CONVOLUTION_KINDS = ("conv", "depthwise_conv", "conv_transpose")
PRODUCT_KINDS = (*CONVOLUTION_KINDS, "matmul", "gemm")


def _table_backend(table: RequirementTable, **fields: Any) -> Backend:
    """Return the backend of a table; `fuses` is that of the table by default."""
    defaults: dict[str, Any] = {"judge": partial(judge_from_table, table=table), "fuses": table.fuses}
    return Backend(by_tables=True, **(defaults | fields))


MIN_INTEGER_CHANNELS = 16
"""Minimum channels of a convolution, or rows and columns of a summed matrix, for which integers are faster."""

CHANNEL_MULTIPLE = 8
"""Required multiple of channels of a depthwise convolution, or of one that reads a graph input, instead."""

MAX_ATTENTION_LENGTH = 512

INT8 = frozenset({"int8"})

_TENSORRT_ACTIVATION_KINDS = frozenset(
    {"relu", "relu6", "clip", "leaky_relu", "sigmoid", "tanh", "elu", "hard_sigmoid", "hard_swish"}
)


def _input_shape_by_role(context: OpContext, role: str) -> Shape | None:
    side = context.input_by_role(role)
    return None if side is None else context.graph.output(side.tensor).shape


def _small_conv_note(context: OpContext) -> str:
    """Return a note about convolutions with few channels, which the integer kernels pad."""
    weight = _input_shape_by_role(context, "weight")
    if weight is None or len(weight) < 2 or None in weight[:2]:  # noqa: PLR2004  # channels out and in
        return ""
    output_channels, input_channels = int(weight[0] or 0), int(weight[1] or 0)
    if context.op.kind == "depthwise_conv":
        large_kernel = [int(size or 0) >= 3 for size in weight[2:]]  # noqa: PLR2004  # kernels of 3x3 and larger
        is_fast = output_channels % CHANNEL_MULTIPLE == 0 and all(large_kernel)
        return "" if is_fast else "a small depthwise kernel is faster in float"
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
    *(require_quantized_inputs, require_types(INT8, INT8 | {"int4"}), require_symmetric),
    *(require_per_tensor_activations, require_weight_axis(attrgetter("channel_axis")), require_float_bias),
)

_TENSORRT_BOTH_SIDES = (
    *(require_quantized_inputs, require_quantized_output, require_types(INT8, INT8), require_symmetric),
    require_per_tensor_activations,
)

_TENSORRT_FUSABLE_KINDS = _TENSORRT_ACTIVATION_KINDS | {"batchnorm", "bias_add"}

TENSORRT_TABLE = RequirementTable(
    name="TensorRT",
    rows={
        **dict.fromkeys(PRODUCT_KINDS, _TENSORRT_WEIGHTED),
        **dict.fromkeys(
            (
                *("add", "sub", "mul", "div", "max", "min", "avg_pool", "global_avg_pool", "max_pool", "resize"),
                *("reshape", "flatten", "transpose", "squeeze", "unsqueeze", "slice", "pad", "gather"),
                *("depth_to_space", "space_to_depth", "split", *sorted(_TENSORRT_ACTIVATION_KINDS)),
            ),
            _TENSORRT_BOTH_SIDES,
        ),
        "concat": (*_TENSORRT_BOTH_SIDES, require_one_scale),
    },
    fuses=dict.fromkeys(PRODUCT_KINDS, _TENSORRT_FUSABLE_KINDS),
    absorbable_sums=frozenset({"add"}),
    notes={
        **dict.fromkeys(CONVOLUTION_KINDS, _small_conv_note),
        **dict.fromkeys(("matmul", "gemm"), _small_product_note),
    },
)

TENSORRT = _table_backend(
    TENSORRT_TABLE,
    name="tensorrt",
    description="TensorRT's explicit quantization",
    symmetric=True,
    ties_concat=True,
    bias_type="float",
)


QNN_PASSTHROUGH_KINDS = frozenset(
    {"reshape", "transpose", "squeeze", "unsqueeze", "split", "gather", "tile", "flatten", "expand", "pad"}
    | {"slice", "max_pool", "depth_to_space", "space_to_depth"}
)
"""Kinds that need no quantization after them."""


_QNN_WEIGHT_AXES = {"conv": 0, "depthwise_conv": 0, "conv_transpose": 1}  # other ops have one scale


def _require_symmetric_signed_weight(context: OpContext) -> BrokenRule | None:
    """Require that a signed weight has zero point 0, and that a weight with several scales is signed."""
    side = context.input_by_role("weight")
    params = None if side is None or not side.parameter else side.params
    if side is None or params is None:
        return None
    if params.type.name.startswith("int") and params.zero_point.any():
        message = f"its signed weight {side.source} has a zero point"
        return BrokenRule("zero-point", message, "quantize it symmetrically, or to uint8")
    if params.scale.size > 1 and not params.type.name.startswith("int"):
        message = f"its weight {side.source} has {params.scale.size} scales and is {params.type.name}"
        return BrokenRule("type", message, "quantize it to int8, or per tensor")
    return None


_QNN_TYPES = require_types(frozenset({"uint8", "uint16"}), frozenset({"uint8", "int8", "int4"}))
_QNN_COMMON = (require_quantized_inputs, require_quantized_output, _QNN_TYPES, require_per_tensor_activations)

QNN_TABLE = RequirementTable(
    name="QNN",
    rows={
        **dict.fromkeys(
            PRODUCT_KINDS,
            (
                *_QNN_COMMON,
                require_weight_axis(lambda op: _QNN_WEIGHT_AXES.get(op.kind)),
                _require_symmetric_signed_weight,
            ),
        ),
        **dict.fromkeys(
            (
                *("add", "sub", "mul", "div", "max", "min", "avg_pool", "global_avg_pool", "softmax", "relu", "relu6"),
                *("clip", "leaky_relu", "prelu", "elu", "gelu", "hard_swish", "resize", "layernorm", "instancenorm"),
                *("batchnorm", "reduce_mean", "reduce_sum", "reduce_max", "reduce_min", "where", "exp", "log"),
                *("sqrt", "neg", "abs", "hard_sigmoid", "pow"),
            ),
            _QNN_COMMON,
        ),
        "sigmoid": (*_QNN_COMMON, require_fixed_range(1 / 65536, 0)),
        "tanh": (*_QNN_COMMON, require_fixed_range(1 / 32768, 32768)),
        "concat": (*_QNN_COMMON, require_one_scale),
        **dict.fromkeys(sorted(QNN_PASSTHROUGH_KINDS), (require_quantized_inputs, _QNN_TYPES, require_one_scale)),
    },
    fuses={
        **dict.fromkeys(("conv", "depthwise_conv"), frozenset({"relu", "relu6", "clip"})),
        **dict.fromkeys(("conv_transpose", "gemm", "add"), frozenset({"relu"})),
    },
    passthrough_kinds=QNN_PASSTHROUGH_KINDS,
)

QNN = _table_backend(
    QNN_TABLE,
    name="qnn",
    description="Qualcomm's HTP through QNN",
    ties_concat=True,
    per_tensor_kinds=frozenset({"matmul", "gemm"}),
)


OPENVINO_DTYPES = frozenset({"int8", "uint8"})

OPENVINO_PASSTHROUGH_KINDS = frozenset(
    {"max_pool", "reduce_max", "reshape", "flatten", "squeeze", "unsqueeze", "split", "transpose"}
    | {"tile", "slice", "expand", "pad"}
)
"""Kinds that pass integers through."""


def _require_symmetric_weight(context: OpContext) -> BrokenRule | None:
    """Require weights with zero point 0."""
    for side in context.inputs:
        is_weight = side.role in {"weight", "recurrent_weight"} and side.parameter
        if is_weight and side.params is not None and side.params.zero_point.any():
            message = f"its weight {side.source} has a zero point"
            return BrokenRule("zero-point", message, "quantize weights symmetrically")
    return None


def _require_one_input_scale(context: OpContext) -> BrokenRule | None:
    """Require one scale for the inputs of a Concat. Its output does not matter."""
    return require_one_scale(replace(context, output_params=()))


def _require_compatible_concat(context: OpContext) -> BrokenRule | None:
    """Require that zero points of a Concat before a convolution or product do not vary along the summed axis.

    Measured with OpenVINO 2026.4, which keeps one zero point for each input of the Concat and constants in float.
    """
    for side in context.inputs:
        concat = context.quantizations.model.op(side.source)
        if concat.kind != "concat" or side.params is None or side.role != "input":
            continue
        concat_inputs = context.quantizations.inputs(context.quantizations.model.graphs[side.source.graph], concat)
        if side.params.type.signed and any(concat_input.parameter for concat_input in concat_inputs):
            message = f"an input of the preceding Concat {concat.name} is constant, which OpenVINO treats as float"
            return BrokenRule("constant-part", message, "keep the inputs of that Concat in float")
        rank = len(concat.outputs[0].shape or ())
        axis, product = int(concat.numeric_attr("axis", 0)), context.op.kind in {"matmul", "gemm"}
        positive_axis = axis + rank if axis < 0 else axis
        if rank and side.params.zero_point.any() and positive_axis != (rank - 1 if product else 1):
            message = f"its input is a Concat along axis {axis} with a zero point"
            fix = "quantize the inputs and the output of that Concat symmetrically"
            return BrokenRule("refused" if product else "zero-point", message, fix)
    return None


def _forbid_signed_constant(context: OpContext) -> BrokenRule | None:
    """Require that no input of a Concat is an int8 constant."""
    for side in context.inputs:
        if side.parameter and side.params is not None and side.params.type.signed:
            message = f"its input {side.source} is a constant, and the other inputs are int8"
            return BrokenRule("constant-part", message, "quantize the inputs to uint8, or keep them in float")
    return None


def _is_nearest_resize(op: Op) -> bool:
    return op.attrs.get("mode", "nearest") in {"nearest", b"nearest"}


def _require_linear_or_nearest(context: OpContext) -> BrokenRule | None:
    mode = context.op.attrs.get("mode", "nearest")
    if _is_nearest_resize(context.op) or mode in {"linear", b"linear"}:
        return None
    return BrokenRule("mode", f"its mode is {mode!r}", "use a linear or nearest Resize")


_OPENVINO_COMMON = (
    *(require_quantized_inputs, require_types(OPENVINO_DTYPES, OPENVINO_DTYPES), require_per_tensor_activations),
)

_OPENVINO_WEIGHTED = (
    *(require_quantized_inputs, require_types(OPENVINO_DTYPES, INT8), require_per_tensor_activations),
    *(_require_compatible_concat, require_weight_axis(attrgetter("channel_axis")), _require_symmetric_weight),
    require_float_bias,
)

OPENVINO_TABLE = RequirementTable(
    name="OpenVINO",
    rows={
        **dict.fromkeys(PRODUCT_KINDS, _OPENVINO_WEIGHTED),
        **dict.fromkeys(
            (
                *("add", "sub", "mul", "div", "max", "min", "pow", "avg_pool", "global_avg_pool"),
                *("reduce_mean", "reduce_sum", "layernorm", "instancenorm"),
            ),
            _OPENVINO_COMMON,
        ),
        "resize": (*_OPENVINO_COMMON, _require_linear_or_nearest),
        "concat": (*_OPENVINO_COMMON, _require_one_input_scale, _forbid_signed_constant),
        **dict.fromkeys(sorted(OPENVINO_PASSTHROUGH_KINDS), _OPENVINO_COMMON),
    },
    fuses=dict.fromkeys(
        PRODUCT_KINDS,
        frozenset({"relu", "relu6", "clip", "leaky_relu", "prelu", "sigmoid", "tanh", "elu", "hard_swish", "bias_add"}),
    ),
    passthrough_kinds=OPENVINO_PASSTHROUGH_KINDS,
    passthrough_if={"resize": _is_nearest_resize},
)

OPENVINO = _table_backend(
    OPENVINO_TABLE, name="openvino", description="OpenVINO's CPU plugin", ties_concat=True, bias_type="float", fuses={}
)


def require_power_of_two(context: OpContext) -> BrokenRule | None:
    """Require that every scale is a single power of two."""
    for name, params in context.named_params:
        if power_of_two_position(params) is None:
            scale_text = (
                f"{params.scale.size} scales" if params.scale.size > 1 else f"the scale {float(np.max(params.scale)):g}"
            )
            message = f"{name} has {scale_text}, which is not a single power of two"
            return BrokenRule("power-of-two", message, 'quantize per tensor with scale = "power-of-two"')
    return None


def _require_quantized_bias(context: OpContext) -> BrokenRule | None:
    side = context.input_by_role("bias")
    if side is None or side.dequantize_op:
        return None
    return BrokenRule("float-bias", f"its bias {side.source} is float", "quantize the bias to int8")


def _scale_positions(context: OpContext) -> tuple[list[int], int | None]:
    """Return the positions of the input scales and of the output scale."""
    inputs, outputs = (
        [position for params in side if params and (position := power_of_two_position(params)) is not None]
        for side in ([side.params for side in context.inputs], context.output_params)
    )
    return inputs, outputs[0] if outputs else None


def _require_shift_within(name: str, value: int, limits: tuple[int, int]) -> BrokenRule | None:
    low, high = limits
    if low <= value <= high:
        return None
    message = f"its {name} is {value}, outside the range {low} to {high}"
    return BrokenRule("shift", message, "change the scale of its output or of an input by that many powers of two")


def _require_weighted_shift(context: OpContext) -> BrokenRule | None:
    """Require valid shifts of the sum of products and of the bias."""
    positions = {side.role: power_of_two_position(side.params) for side in context.inputs if side.params is not None}
    data, weight, output = positions.get("input"), positions.get("weight"), _scale_positions(context)[1]
    if data is None or weight is None or output is None:
        return None
    bias = positions.get("bias")
    broken_rule = _require_shift_within(
        "shift of weight plus input minus output", weight + data - output, DPU_CUT_LIMITS
    )
    if broken_rule is None and bias is not None and weight + data - bias > DPU_MAX_BIAS_CUT:
        message = f"its shift of weight plus input minus bias is {weight + data - bias}, above {DPU_MAX_BIAS_CUT}"
        return BrokenRule("shift", message, "use a smaller scale for the bias")
    return broken_rule


def _require_add_shift(context: OpContext) -> BrokenRule | None:
    inputs, output = _scale_positions(context)
    if not inputs or output is None:
        return None
    broken_rule = _require_shift_within("shift between its inputs", max(inputs) - min(inputs), DPU_ADD_READ_LIMITS)
    return broken_rule or _require_shift_within(
        "shift of its inputs to its output", min(inputs) - output, DPU_ADD_WRITE_LIMITS
    )


def _require_mul_shift(context: OpContext) -> BrokenRule | None:
    inputs, output = _scale_positions(context)
    if not inputs or output is None:
        return None
    return _require_shift_within("shift of its product", sum(inputs) - output, DPU_MUL_WRITE_LIMITS)


_VITIS_AI_COMMON = (
    *(require_quantized_inputs, require_quantized_output, require_types(INT8, INT8), require_symmetric),
    require_power_of_two,
)

VITIS_AI_TABLE = RequirementTable(
    name="Vitis AI",
    rows={
        **dict.fromkeys(PRODUCT_KINDS, (*_VITIS_AI_COMMON, _require_quantized_bias, _require_weighted_shift)),
        "add": (*_VITIS_AI_COMMON, _require_add_shift),
        "mul": (*_VITIS_AI_COMMON, _require_mul_shift),
        **dict.fromkeys(("relu", "relu6", "leaky_relu", "prelu", "clip"), _VITIS_AI_COMMON),
        **dict.fromkeys(
            ("concat", "max_pool", "avg_pool", "global_avg_pool", "pad", "slice", "reshape", "flatten", "transpose"),
            (*_VITIS_AI_COMMON, require_one_scale),
        ),
    },
    fuses=dict.fromkeys(
        (*PRODUCT_KINDS, *("add", "max_pool", "avg_pool", "global_avg_pool")),
        frozenset({"relu", "relu6", "leaky_relu", "prelu"}),
    ),
)

VITIS_AI = _table_backend(
    VITIS_AI_TABLE,
    name="vitis_ai",
    description="AMD's Vitis AI, power-of-two scales",
    symmetric=True,
    ties_concat=True,
    bias_type="int8",
    per_tensor_kinds=frozenset(PRODUCT_KINDS),
)
