"""AMD Vitis AI with power-of-two scales: quantized inputs and outputs, and shifts within the limits of the hardware."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant.backends.findings import Backend, BrokenRule
from graphquant.backends.requirements import (
    KindRequirements,
    RequirementTable,
    predict_from_table,
    require_one_scale,
    require_quantized_inputs,
    require_quantized_output,
    require_symmetric,
    require_types,
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
    from graphquant.backends.requirements import OpContext


VITIS_AI_DTYPES = frozenset({"int8"})


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
    return (
        None
        if not inputs or output is None
        else _require_shift_within("shift of its product", sum(inputs) - output, DPU_MUL_WRITE_LIMITS)
    )


_VITIS_AI_COMMON = (
    require_quantized_inputs,
    require_quantized_output,
    require_types(VITIS_AI_DTYPES, VITIS_AI_DTYPES),
    require_symmetric,
    require_power_of_two,
)

_VITIS_AI_ONE_SCALE = KindRequirements(requires=(*_VITIS_AI_COMMON, require_one_scale))

VITIS_AI_TABLE = RequirementTable(
    name="Vitis AI",
    rows={
        **dict.fromkeys(
            ("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"),
            KindRequirements(requires=(*_VITIS_AI_COMMON, _require_quantized_bias, _require_weighted_shift)),
        ),
        "add": KindRequirements(requires=(*_VITIS_AI_COMMON, _require_add_shift)),
        "mul": KindRequirements(requires=(*_VITIS_AI_COMMON, _require_mul_shift)),
        **dict.fromkeys(("relu", "relu6", "leaky_relu", "prelu", "clip"), KindRequirements(requires=_VITIS_AI_COMMON)),
        **dict.fromkeys(
            ("concat", "max_pool", "avg_pool", "global_avg_pool", "pad", "slice", "reshape", "flatten", "transpose"),
            _VITIS_AI_ONE_SCALE,
        ),
    },
    fuses=dict.fromkeys(
        (
            *("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm", "add"),
            *("max_pool", "avg_pool", "global_avg_pool"),
        ),
        frozenset({"relu", "relu6", "leaky_relu", "prelu"}),
    ),
)

VITIS_AI = Backend(
    name="vitis_ai",
    description="AMD's Vitis AI, power-of-two scales",
    predict=partial(predict_from_table, table=VITIS_AI_TABLE),
    symmetric=True,
    ties_concat=True,
    bias_type="int8",
    fuses=VITIS_AI_TABLE.fuses,
)
