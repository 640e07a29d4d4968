"""Qualcomm's HTP through QNN: every op between quantizations, per tensor but for convolutions, ties on Concat."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from graphquant.backends.requirements import (
    Row,
    Table,
    activations_per_tensor,
    fixed_range,
    inputs_quantized,
    judge,
    output_quantized,
    tied,
    types,
    weight_axis,
)
from graphquant.backends.types import Backend, Broken

if TYPE_CHECKING:
    from graphquant.backends.requirements import Seen
    from graphquant.ir import Op

ACTIVATIONS = frozenset({"uint8", "uint16"})

WEIGHTS = frozenset({"uint8", "int8", "int4"})

MOVES = frozenset(
    {
        *("reshape", "transpose", "squeeze", "unsqueeze", "split", "gather", "tile", "flatten", "expand", "pad"),
        *("slice", "max_pool", "depth_to_space", "space_to_depth"),
    }
)
"""Kinds that need no quantization of their own behind them."""


def _axis(op: Op) -> int | None:
    """Only convolutions have several scales: along axis 0, transposed ones along 1."""
    return {"conv": 0, "depthwise_conv": 0, "conv_transpose": 1}.get(op.kind)


def _signed_symmetric(seen: Seen) -> Broken | None:
    """A signed weight has zero point 0, and one with several scales is signed."""
    side = seen.by_role("weight")
    params = None if side is None or not side.parameter else side.params
    if side is None or params is None:
        return None
    if params.type.name.startswith("int") and params.zero_point.any():
        says = f"its signed weight {side.source} has a zero point"
        return Broken(rule="zero-point", says=says, fix="quantize it symmetrically, or to uint8")
    if params.scale.size > 1 and not params.type.name.startswith("int"):
        says = f"its weight {side.source} has {params.scale.size} scales and is {params.type.name}"
        return Broken(rule="type", says=says, fix="quantize it to int8, or per tensor")
    return None


_COMMON = (inputs_quantized, output_quantized, types(ACTIVATIONS, WEIGHTS), activations_per_tensor)

_WEIGHTED = Row(requires=(*_COMMON, weight_axis(_axis), _signed_symmetric))

_PLAIN = Row(requires=_COMMON)

TABLE = Table(
    name="QNN",
    rows={
        **dict.fromkeys(("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"), _WEIGHTED),
        **dict.fromkeys(
            (
                *("add", "sub", "mul", "div", "max", "min", "avg_pool", "global_avg_pool", "softmax", "relu", "relu6"),
                *("clip", "leaky_relu", "prelu", "elu", "gelu", "hard_swish", "resize", "layernorm", "instancenorm"),
                *("batchnorm", "reduce_mean", "reduce_sum", "reduce_max", "reduce_min", "where", "exp", "log"),
                *("sqrt", "neg", "abs", "hard_sigmoid", "pow"),
            ),
            _PLAIN,
        ),
        "sigmoid": Row(requires=(*_COMMON, fixed_range(1 / 65536, 0))),
        "tanh": Row(requires=(*_COMMON, fixed_range(1 / 32768, 32768))),
        "concat": Row(requires=(*_COMMON, tied)),
        **dict.fromkeys(sorted(MOVES), Row(requires=(inputs_quantized, types(ACTIVATIONS, WEIGHTS), tied))),
    },
    fuses={
        **dict.fromkeys(("conv", "depthwise_conv"), frozenset({"relu", "relu6", "clip"})),
        **dict.fromkeys(("conv_transpose", "gemm", "add"), frozenset({"relu"})),
    },
    moves=MOVES,
)

QNN = Backend(
    name="qnn",
    explains="Qualcomm's HTP through QNN",
    predict=partial(judge, table=TABLE),
    ties_concat=True,
    fuses=TABLE.fuses,
)
