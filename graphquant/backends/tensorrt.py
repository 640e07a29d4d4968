"""TensorRT's explicit quantization: symmetric, on the inputs of weighted ops, and on both sides of all others."""

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
    output_quantized,
    symmetric,
    tied,
    types,
    weight_axis,
)
from graphquant.backends.types import Backend

if TYPE_CHECKING:
    from graphquant.backends.requirements import Seen
    from graphquant.ir import Op, Shape

SMALLEST = 16
"""Channels of a convolution, or rows and columns summed over of a matrix product, from which on integers pay."""

FIRST_STEP = 8
"""Multiple of channels that a convolution of the graph's input, or a depthwise one, may have instead."""

LONGEST_ATTENTION = 512

INT8 = frozenset({"int8"})

_WEIGHTS = INT8 | {"int4"}

_ACTIVATIONS = frozenset(
    {"relu", "relu6", "clip", "leaky_relu", "sigmoid", "tanh", "elu", "hard_sigmoid", "hard_swish"}
)


def _axis(op: Op) -> int | None:
    """Where a weight's scales may lie: convolutions 0, transposed ones 1, matrix products their columns."""
    return op.channel_axis


def _shape(seen: Seen, role: str) -> Shape | None:
    side = seen.by_role(role)
    shape: Shape | None = None if side is None else seen.graph.output(side.tensor).shape
    return shape


def _small_conv(seen: Seen) -> str:
    """Few channels: the integer kernels pad them."""
    weight = _shape(seen, "weight")
    if weight is None or len(weight) < 2 or None in weight[:2]:  # noqa: PLR2004  # channels out and in
        return ""
    out, into = int(weight[0] or 0), int(weight[1] or 0)
    if seen.op.kind == "depthwise_conv":
        wide = [int(size or 0) >= 3 for size in weight[2:]]  # noqa: PLR2004  # kernels of 3x3 and larger
        return "" if out % FIRST_STEP == 0 and all(wide) else "a depthwise kernel this small runs faster in float"
    into *= int(seen.op.number("group", 1))
    if min(out, into) >= SMALLEST:
        return ""
    side = seen.by_role("input")
    first = side is not None and seen.sides.model.op(side.source).kind == "input"
    if first and into % FIRST_STEP == 0 and seen.op.number("group", 1) == 1:
        return ""
    return f"a convolution of {into} to {out} channels runs faster in float; integers pay from {SMALLEST} on"


def _small_product(seen: Seen) -> str:
    """Vectors, and few rows and columns."""
    left, right = _shape(seen, "input"), _shape(seen, "weight")
    if left is None or right is None or len(left) < 2 or len(right) < 2:  # noqa: PLR2004  # matrices
        return ""
    if seen.op.number("transB", 0):
        right = (*right[:-2], right[-1], right[-2])
    rows, summed, columns = left[-2], right[-2], right[-1]
    if rows == 1 or columns == 1:
        return "a product with a vector runs faster in float"
    if any(size is not None and size < SMALLEST for size in (summed, columns)):
        return f"a product of {summed} by {columns} runs faster in float; integers pay from {SMALLEST} on"
    weight = seen.by_role("weight")
    if weight is not None and not weight.parameter and rows is not None and rows > LONGEST_ATTENTION:
        return f"attention over {rows} places runs faster in float; integers pay up to {LONGEST_ATTENTION}"
    return ""


_WEIGHTED = (
    inputs_quantized,
    types(INT8, _WEIGHTS),
    symmetric,
    activations_per_tensor,
    weight_axis(_axis),
    bias_float,
)

_BOTH_SIDES = (inputs_quantized, output_quantized, types(INT8, INT8), symmetric, activations_per_tensor)

_FUSED = _ACTIVATIONS | {"batchnorm", "bias_add"}

TABLE = Table(
    name="TensorRT",
    rows={
        **dict.fromkeys(("conv", "depthwise_conv", "conv_transpose"), Row(requires=_WEIGHTED, notes=(_small_conv,))),
        **dict.fromkeys(("matmul", "gemm"), Row(requires=_WEIGHTED, notes=(_small_product,))),
        **dict.fromkeys(
            (
                *("add", "sub", "mul", "div", "max", "min", "avg_pool", "global_avg_pool", "max_pool", "resize"),
                *("reshape", "flatten", "transpose", "squeeze", "unsqueeze", "slice", "pad", "gather"),
                *("depth_to_space", "space_to_depth", "split", *sorted(_ACTIVATIONS)),
            ),
            Row(requires=_BOTH_SIDES),
        ),
        "concat": Row(requires=(*_BOTH_SIDES, tied)),
    },
    fuses=dict.fromkeys(("conv", "depthwise_conv", "conv_transpose", "matmul", "gemm"), _FUSED),
    joins=frozenset({"add"}),
)

TENSORRT = Backend(
    name="tensorrt",
    explains="TensorRT's explicit quantization",
    predict=partial(judge, table=TABLE),
    symmetric=True,
    ties_concat=True,
    bias="float",
    fuses=TABLE.fuses,
)
