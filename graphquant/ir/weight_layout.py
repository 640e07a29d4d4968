"""Layout of weights: their channel axes, the axis of their sum, and the sizes of kernels and matrices."""

from __future__ import annotations

from math import prod

from graphquant.ir.kinds import CONVOLUTION_KINDS, MATRIX_PRODUCT_KINDS
from graphquant.ir.types import Op, Shape, fully_known_shape


def channel_axis(op: Op, shape: Shape) -> int | None:
    """Return the output channel axis of a weight of `shape` that `op` reads, counted from 0; None if it has none."""
    axis = op.channel_axis
    return None if axis is None or not -len(shape) <= axis < len(shape) else axis % len(shape)


def reduction_axis(op: Op, role: str, shape: Shape) -> int | None:
    """Return the axis of the blocks of a tensor of `shape` that `op` reads as `role`, counted from 0; None if none.

    For a weight it is the axis of the sum, that of the input channels. For the table of a Gather it is the last axis,
    along which each row lies.
    """
    if op.kind == "gather" and role == "input":
        return len(shape) - 1 if shape else None
    axis = channel_axis(op, shape) if role in {"weight", "recurrent_weight"} else None
    if axis is None or len(shape) == 1:
        return None
    if op.kind == "conv_transpose":
        return 0 if axis else 1
    return axis + 1 if axis < len(shape) - 1 else axis - 1


def merged_channel_shape(op: Op, shape: Shape) -> Shape | None:
    """Return the shape with one axis for the output channels, if they lie on two axes of a weight; else None.

    They do in TensorFlow's depthwise kernels: [h, w, channels, multiplier] becomes [h, w, channels * multiplier]. A
    multiplier of 1 needs no other shape. Unknown sizes stay unknown.
    """
    axis = channel_axis(op, shape)
    if op.kind != "depthwise_conv" or axis is None or axis != len(shape) - 2 or shape[-1] == 1:
        return None
    sizes = fully_known_shape(shape[axis:])
    return (*shape[:axis], None if sizes is None else prod(sizes))


def input_channels(op: Op, shape: Shape) -> int | None:
    """Return the number of channels that `op` reads, in all groups, for a weight of `shape`; its rows for a product."""
    axis = reduction_axis(op, "weight", shape)
    if axis is None or shape[axis] is None:
        return None
    if op.kind == "depthwise_conv" and channel_axis(op, shape) == len(shape) - 2:  # [h, w, channels, multiplier]
        return shape[-2]
    return int(shape[axis] or 0) * (int(op.numeric_attr("group", 1)) if op.kind in CONVOLUTION_KINDS else 1)


def output_channels(op: Op, shape: Shape) -> int | None:
    """Return the size of the output channel axis of a weight of `shape`."""
    axis = channel_axis(op, shape)
    return None if axis is None else (merged_channel_shape(op, shape) or shape)[axis]


def kernel_size(op: Op, shape: Shape) -> int | None:
    """Return the shortest side of the kernel in a convolution's weight of `shape`."""
    channels = {channel_axis(op, shape), reduction_axis(op, "weight", shape)}
    sides = [size for axis, size in enumerate(shape) if axis not in channels and size is not None]
    return min(sides) if sides and len(sides) == len(shape) - 2 else None


def matrix_rows(op: Op, shape: Shape) -> int | None:
    """Return the number of rows of the left matrix of a product, from its shape."""
    transposed = op.kind == "gemm" and bool(op.numeric_attr("transA", 0))
    if op.kind not in MATRIX_PRODUCT_KINDS or len(shape) < 2:  # noqa: PLR2004  # matrices
        return None
    return shape[-1 if transposed else -2]
