"""OpenVINO CPU plugin: quantized inputs, signed symmetric weights, float biases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from graphquant.backends.findings import Backend, BrokenRule
from graphquant.backends.requirements import (
    KindRequirements,
    RequirementTable,
    predict_from_table,
    require_float_bias,
    require_one_scale,
    require_per_tensor_activations,
    require_quantized_inputs,
    require_types,
    require_weight_axis,
)

if TYPE_CHECKING:
    from graphquant.backends.requirements import OpContext
    from graphquant.ir import Op


OPENVINO_DTYPES = frozenset({"int8", "uint8"})

OPENVINO_PASSTHROUGH_KINDS = frozenset(
    {
        *("max_pool", "reduce_max", "reshape", "flatten", "squeeze", "unsqueeze", "split", "transpose", "tile"),
        *("slice", "expand", "pad"),
    }
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

    Measured with OpenVINO 2026.4, which keeps one zero point for each input of the Concat and treats constants as
    float.
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
    """Require a Resize with linear or nearest interpolation."""
    mode = context.op.attrs.get("mode", "nearest")
    if _is_nearest_resize(context.op) or mode in {"linear", b"linear"}:
        return None
    return BrokenRule("mode", f"its mode is {mode!r}", "use a linear or nearest Resize")


_OPENVINO_COMMON = (
    require_quantized_inputs,
    require_types(OPENVINO_DTYPES, OPENVINO_DTYPES),
    require_per_tensor_activations,
)

_OPENVINO_WEIGHTED = KindRequirements(
    requires=(
        require_quantized_inputs,
        require_types(OPENVINO_DTYPES, frozenset({"int8"})),
        require_per_tensor_activations,
        _require_compatible_concat,
        require_weight_axis(attrgetter("channel_axis")),
        _require_symmetric_weight,
        require_float_bias,
    )
)

OPENVINO_TABLE = RequirementTable(
    name="OpenVINO",
    rows={
        **dict.fromkeys(("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"), _OPENVINO_WEIGHTED),
        **dict.fromkeys(
            (
                *("add", "sub", "mul", "div", "max", "min", "pow", "avg_pool", "global_avg_pool"),
                *("reduce_mean", "reduce_sum", "layernorm", "instancenorm"),
            ),
            KindRequirements(requires=_OPENVINO_COMMON),
        ),
        "resize": KindRequirements(requires=(*_OPENVINO_COMMON, _require_linear_or_nearest)),
        "concat": KindRequirements(requires=(*_OPENVINO_COMMON, _require_one_input_scale, _forbid_signed_constant)),
        **dict.fromkeys(sorted(OPENVINO_PASSTHROUGH_KINDS), KindRequirements(requires=_OPENVINO_COMMON)),
    },
    fuses=dict.fromkeys(
        ("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"),
        frozenset({"relu", "relu6", "clip", "leaky_relu", "prelu", "sigmoid", "tanh", "elu", "hard_swish", "bias_add"}),
    ),
    passthrough_kinds=OPENVINO_PASSTHROUGH_KINDS,
    passthrough_if={"resize": _is_nearest_resize},
)

OPENVINO = Backend(
    name="openvino",
    description="OpenVINO's CPU plugin",
    predict=partial(predict_from_table, table=OPENVINO_TABLE),
    ties_concat=True,
    bias_type="float",
)
