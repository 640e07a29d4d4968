"""OpenVINO's CPU plugin: quantization on the inputs of ops, weights signed and symmetric, biases float."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from graphquant.backends.requirements import (
    Row,
    Table,
    activations_per_tensor,
    bias_float,
    inputs_quantized,
    judge,
    tied,
    types,
    weight_axis,
)
from graphquant.backends.types import Backend, Broken

if TYPE_CHECKING:
    from graphquant.backends.requirements import Seen
    from graphquant.ir import Op

BYTES = frozenset({"int8", "uint8"})

MOVES = frozenset(
    {
        *("max_pool", "reduce_max", "reshape", "flatten", "squeeze", "unsqueeze", "split", "transpose", "tile"),
        *("slice", "expand", "pad"),
    }
)
"""Kinds that hand integers on."""


def _axis(op: Op) -> int | None:
    """Along the output channels."""
    return op.channel_axis


def _symmetric_weight(seen: Seen) -> Broken | None:
    """Weights have zero point 0."""
    for side in seen.inputs:
        weight = side.role in {"weight", "recurrent_weight"} and side.parameter
        if weight and side.params is not None and side.params.zero_point.any():
            says = f"its weight {side.source} has a zero point"
            return Broken(rule="zero-point", says=says, fix="quantize weights symmetrically")
    return None


def _inputs_tied(seen: Seen) -> Broken | None:
    """The inputs of a Concat have one scale; what is behind it does not matter."""
    return tied(type(seen)(op=seen.op, graph=seen.graph, sides=seen.sides, inputs=seen.inputs, pairs=(), readers=()))


def _joined(seen: Seen) -> Broken | None:
    """Zero points of a Concat's parts lie along the axis that a convolution or product behind it sums over.

    Measured with OpenVINO 2026.4, which keeps them apart, each for its part, and takes constants to be float.
    """
    for side in seen.inputs:
        concat = seen.sides.model.op(side.source)
        if concat.kind != "concat" or side.params is None or side.role != "input":
            continue
        parts = seen.sides.inputs(seen.sides.model.graphs[side.source.graph], concat)
        if side.params.type.signed and any(part.parameter for part in parts):
            says = f"a part of the Concat {concat.name} before it is constant, which is int8 to nobody"
            return Broken(rule="constant-part", says=says, fix="leave the parts of that Concat float")
        rank = len(concat.outputs[0].shape or ())
        axis, product = int(concat.number("axis", 0)), seen.op.kind in {"matmul", "gemm"}
        place = axis + rank if axis < 0 else axis
        if rank and side.params.zero_point.any() and place != (rank - 1 if product else 1):
            says = f"its input is a Concat along axis {axis}, and has a zero point"
            fix = "quantize the parts of that Concat symmetrically, and what is behind it"
            return Broken(rule="refused" if product else "zero-point", says=says, fix=fix)
    return None


def _signed_constant(seen: Seen) -> Broken | None:
    """No part of a Concat is an int8 constant."""
    for side in seen.inputs:
        if side.parameter and side.params is not None and side.params.type.signed:
            says = f"its part {side.source} is a constant, and the others are int8"
            return Broken(rule="constant-part", says=says, fix="quantize the parts to uint8, or leave them float")
    return None


def _nearest(op: Op) -> bool:
    return op.attrs.get("mode", "nearest") in {"nearest", b"nearest"}


def _linear_or_nearest(seen: Seen) -> Broken | None:
    """A Resize interpolates linearly, or copies."""
    mode = seen.op.attrs.get("mode", "nearest")
    if _nearest(seen.op) or mode in {"linear", b"linear"}:
        return None
    return Broken(rule="mode", says=f"its mode is {mode!r}", fix="use a linear or nearest Resize")


_COMMON = (inputs_quantized, types(BYTES, BYTES), activations_per_tensor)

_WEIGHTED = Row(
    requires=(
        inputs_quantized,
        types(BYTES, frozenset({"int8"})),
        activations_per_tensor,
        _joined,
        weight_axis(_axis),
        _symmetric_weight,
        bias_float,
    )
)

TABLE = Table(
    name="OpenVINO",
    rows={
        **dict.fromkeys(("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"), _WEIGHTED),
        **dict.fromkeys(
            (
                *("add", "sub", "mul", "div", "max", "min", "pow", "avg_pool", "global_avg_pool"),
                *("reduce_mean", "reduce_sum", "layernorm", "instancenorm"),
            ),
            Row(requires=_COMMON),
        ),
        "resize": Row(requires=(*_COMMON, _linear_or_nearest)),
        "concat": Row(requires=(*_COMMON, _inputs_tied, _signed_constant)),
        **dict.fromkeys(sorted(MOVES), Row(requires=_COMMON)),
    },
    fuses=dict.fromkeys(
        ("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"),
        frozenset({"relu", "relu6", "clip", "leaky_relu", "prelu", "sigmoid", "tanh", "elu", "hard_swish", "bias_add"}),
    ),
    moves=MOVES,
    moves_if={"resize": _nearest},
)

OPENVINO = Backend(
    name="openvino",
    explains="OpenVINO's CPU plugin",
    predict=partial(judge, table=TABLE),
    ties_concat=True,
    bias="float",
)
