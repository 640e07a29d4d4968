"""Qualcomm HTP through QNN: quantized inputs and outputs, per-tensor scales except for convolutions, tied Concat."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from graphquant.backends.findings import Backend, BrokenRule
from graphquant.backends.requirements import (
    KindRequirements,
    RequirementTable,
    predict_from_table,
    require_fixed_range,
    require_one_scale,
    require_per_tensor_activations,
    require_quantized_inputs,
    require_quantized_output,
    require_types,
    require_weight_axis,
)

if TYPE_CHECKING:
    from graphquant.backends.requirements import OpContext
    from graphquant.ir import Op


QNN_ACTIVATION_DTYPES = frozenset({"uint8", "uint16"})

QNN_WEIGHT_DTYPES = frozenset({"uint8", "int8", "int4"})

QNN_PASSTHROUGH_KINDS = frozenset(
    {
        *("reshape", "transpose", "squeeze", "unsqueeze", "split", "gather", "tile", "flatten", "expand", "pad"),
        *("slice", "max_pool", "depth_to_space", "space_to_depth"),
    }
)
"""Kinds that need no quantization after them."""


def _qnn_weight_axis(op: Op) -> int | None:
    """Return the axis of weight scales: 0 for convolutions, 1 for transposed ones. Other ops have one scale."""
    return {"conv": 0, "depthwise_conv": 0, "conv_transpose": 1}.get(op.kind)


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


_QNN_COMMON = (
    require_quantized_inputs,
    require_quantized_output,
    require_types(QNN_ACTIVATION_DTYPES, QNN_WEIGHT_DTYPES),
    require_per_tensor_activations,
)

_QNN_WEIGHTED = KindRequirements(
    requires=(*_QNN_COMMON, require_weight_axis(_qnn_weight_axis), _require_symmetric_signed_weight)
)

_QNN_DEFAULT = KindRequirements(requires=_QNN_COMMON)

QNN_TABLE = RequirementTable(
    name="QNN",
    rows={
        **dict.fromkeys(("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"), _QNN_WEIGHTED),
        **dict.fromkeys(
            (
                *("add", "sub", "mul", "div", "max", "min", "avg_pool", "global_avg_pool", "softmax", "relu", "relu6"),
                *("clip", "leaky_relu", "prelu", "elu", "gelu", "hard_swish", "resize", "layernorm", "instancenorm"),
                *("batchnorm", "reduce_mean", "reduce_sum", "reduce_max", "reduce_min", "where", "exp", "log"),
                *("sqrt", "neg", "abs", "hard_sigmoid", "pow"),
            ),
            _QNN_DEFAULT,
        ),
        "sigmoid": KindRequirements(requires=(*_QNN_COMMON, require_fixed_range(1 / 65536, 0))),
        "tanh": KindRequirements(requires=(*_QNN_COMMON, require_fixed_range(1 / 32768, 32768))),
        "concat": KindRequirements(requires=(*_QNN_COMMON, require_one_scale)),
        **dict.fromkeys(
            sorted(QNN_PASSTHROUGH_KINDS),
            KindRequirements(
                requires=(
                    require_quantized_inputs,
                    require_types(QNN_ACTIVATION_DTYPES, QNN_WEIGHT_DTYPES),
                    require_one_scale,
                )
            ),
        ),
    },
    fuses={
        **dict.fromkeys(("conv", "depthwise_conv"), frozenset({"relu", "relu6", "clip"})),
        **dict.fromkeys(("conv_transpose", "gemm", "add"), frozenset({"relu"})),
    },
    passthrough_kinds=QNN_PASSTHROUGH_KINDS,
)

QNN = Backend(
    name="qnn",
    description="Qualcomm's HTP through QNN",
    predict=partial(predict_from_table, table=QNN_TABLE),
    ties_concat=True,
    fuses=QNN_TABLE.fuses,
)
