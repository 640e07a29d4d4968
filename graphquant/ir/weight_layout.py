"""The channels of weights, and other sizes of the ops that read them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphquant.ir.types import Op, Shape


def channel_axis(op: Op, shape: Shape) -> int | None:
    """The output channel axis of a weight of `shape` that `op` reads, counted from 0; None if it has none."""
    axis = op.channel_axis
    return None if axis is None or not -len(shape) <= axis < len(shape) else axis % len(shape)


def reduction_axis(op: Op, role: str, shape: Shape) -> int | None:
    """The axis along which blocks of a tensor of `shape` lie that `op` reads as `role`, counted from 0; None if none.

    Of a weight it is the one that is summed over beside that of the output channels, its input channels; of a table
    the last one, along which each row lies.
    """
    if op.kind == "gather" and role == "input":
        return len(shape) - 1 if shape else None
    axis = channel_axis(op, shape) if role == "weight" else None
    if axis is None or len(shape) == 1:
        return None
    if op.kind == "conv_transpose":
        return 0 if axis else 1
    return axis + 1 if axis < len(shape) - 1 else axis - 1


def merged_channel_shape(op: Op, shape: Shape) -> Shape | None:
    """The shape in which a weight's output channels are one axis, where they lie on two; else None.

    They do in TensorFlow's depthwise kernels [h, w, channels, multiplier], seen as [h, w, channels * multiplier];
    a multiplier of 1 needs no other view. Sizes that are not known stay so.
    """
    axis = channel_axis(op, shape)
    if op.kind != "depthwise_conv" or axis is None or axis != len(shape) - 2 or shape[-1] == 1:
        return None
    merged_sizes = [size for size in shape[axis:] if size is not None]
    return (*shape[:axis], math.prod(merged_sizes) if len(merged_sizes) == len(shape) - axis else None)


def input_channels(op: Op, shape: Shape) -> int | None:
    """How many channels `op` reads, those of all groups, if its weight is of `shape`: the rows of a product's."""
    axis = reduction_axis(op, "weight", shape)
    if axis is None or shape[axis] is None:
        return None
    if op.kind == "depthwise_conv" and channel_axis(op, shape) == len(shape) - 2:  # [h, w, channels, multiplier]
        return shape[-2]
    return int(shape[axis] or 0) * (int(op.numeric_attr("group", 1)) if op.kind in {"conv", "depthwise_conv"} else 1)


def output_channels(op: Op, shape: Shape) -> int | None:
    """Size of the output channel axis of a weight of `shape`."""
    axis = channel_axis(op, shape)
    return None if axis is None else (merged_channel_shape(op, shape) or shape)[axis]


def kernel_size(op: Op, shape: Shape) -> int | None:
    """The shortest side of the kernel in a convolution's weight of `shape`."""
    channels = {channel_axis(op, shape), reduction_axis(op, "weight", shape)}
    sides = [size for axis, size in enumerate(shape) if axis not in channels and size is not None]
    return min(sides) if sides and len(sides) == len(shape) - 2 else None


def matrix_rows(op: Op, shape: Shape) -> int | None:
    """How many rows the left matrix of a product has, whose shape this is."""
    transposed = op.kind == "gemm" and bool(op.numeric_attr("transA", 0))
    if op.kind not in {"matmul", "gemm"} or len(shape) < 2:  # noqa: PLR2004  # matrices
        return None
    return shape[-1 if transposed else -2]
