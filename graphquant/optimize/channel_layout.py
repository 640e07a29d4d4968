"""Positions of the channels in tensors and weights, and their propagation through data-movement ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from graphquant.ir import Op, Shape
    from graphquant.numerics import Array

MATRIX_RANK = 2


class ChannelLayout(NamedTuple):
    """Position of a tensor's channels."""

    axis: int  # the axis, counted from the end: -1 is the last
    # Number of adjacent elements that belong to one channel. The sequence of channels may repeat along the axis.
    block: int = 1

    def axis_size(self, shape: Shape | None) -> int | None:
        """Size of `shape` along the axis; None if unknown."""
        return shape[self.axis] if shape is not None and len(shape) >= -self.axis else None

    def vector_channels(self, shape: Sequence[int], channels: int) -> Array | None:
        """Channel of each element of an added value of `shape`; None if it has no channels."""
        if len(shape) < -self.axis or shape[self.axis] != channels or math.prod(shape) != channels or self.block > 1:
            return None
        return np.arange(channels).reshape(tuple(shape))


def find_weight_channels(op: Op, shape: Sequence[int], *, reads: bool) -> tuple[Array, ChannelLayout] | None:
    """Find the channel of each element of a weight, int64, and the channel layout of the op's tensor; None if unknown.

    With `reads` these are the channels that the op reads, else those that it produces.
    """
    rank, groups = len(shape), int(op.numeric_attr("group", 1))
    match op.type:
        case "Conv" if rank >= MATRIX_RANK and groups > 0 and shape[0] % groups == 0:
            # The kernel is [output, input of a group, kernel...].
            index = _index_along_axis(shape, 0)
            if reads:
                group = np.arange(shape[0] if groups > 1 else 1) // (shape[0] // groups)
                index = group[:, None] * shape[1] + np.arange(shape[1])
                index = index.reshape(-1, shape[1], *[1] * (rank - MATRIX_RANK))
            return index, ChannelLayout(1 - rank)
        case "Conv2D" | "DepthwiseConv2dNative" if rank == MATRIX_RANK + 2:
            # The kernel is [height, width, input, output], or [..., multiplier] if depthwise.
            layout = ChannelLayout(-3 if op.text_attr("data_format", "NHWC").startswith("NC") else -1)
            if reads or op.type == "Conv2D":
                return _index_along_axis(shape, 2 if reads else 3), layout
            return np.arange(shape[2] * shape[3]).reshape(1, 1, *shape[2:]), layout
        case "Gemm" | "MatMul" | "BatchMatMulV2" | "BatchMatMulV3" if rank >= MATRIX_RANK:
            if any(op.numeric_attr(name, 0) for name in ("transA", "transpose_a", "adj_x")):
                return None
            transposed = any(op.numeric_attr(name, 0) for name in ("transB", "transpose_b", "adj_y"))
            axis = -1 if reads == transposed else -2
            return _index_along_axis(shape, axis), ChannelLayout(-1)
    return None


def normalization_layout(op: Op, rank: int | None) -> ChannelLayout | None:
    """Channel layout of an op with one value per channel for a tensor of `rank` axes; None if unknown."""
    if op.kind in {"layernorm", "rmsnorm"}:
        return ChannelLayout(-1) if op.numeric_attr("axis", -1) in {-1, (rank or 0) - 1} else None
    default_format = "NCHW" if op.type.endswith("Normalization") else "NHWC"
    if not op.text_attr("data_format", default_format).startswith("NC"):
        return ChannelLayout(-1)
    return None if rank is None else ChannelLayout(1 - rank)


def _index_along_axis(shape: Sequence[int], axis: int) -> Array:
    """Index along an axis of each element of `shape`, broadcast."""
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    return np.arange(shape[axis]).reshape(sizes)


def propagate_layout(
    op: Op,
    layout: ChannelLayout,
    shapes: tuple[Shape | None, Shape | None],
    values: Sequence[Array | None],
    channels: int,
    *,
    forward: bool,
) -> ChannelLayout | None:
    """Propagate a channel layout through an op that moves or averages values; None if unknown.

    `layout` is on the input if `forward`, else on the output. `shapes` are those of input and output, `values` the
    known values of the other inputs.
    """
    match op.kind:
        case "clip":
            return layout if _is_relu_clip(op, values) else None
        case "pad":
            keeps_size = layout.axis_size(shapes[0]) == layout.axis_size(shapes[1])
            return layout if keeps_size and _pad_preserves_factors(op, values) else None
        case "transpose":
            return _transpose_layout(op, layout, values, forward=forward)
        case "reshape" | "flatten" | "squeeze" | "unsqueeze":
            return _reshape_layout(layout, shapes, channels, forward=forward)
        case "reduce_mean":
            return _reduce_mean_layout(op, layout, shapes[0], values, forward=forward)
    return None


def _is_relu_clip(op: Op, values: Sequence[Array | None]) -> bool:
    """Return True if a Clip is a Relu: lower limit 0, no upper limit."""
    if "min" in op.attrs or "max" in op.attrs:
        return op.numeric_attr("min", -math.inf) == 0 and "max" not in op.attrs
    low = values[0] if values else None
    return low is not None and len(values) == 1 and low.size == 1 and float(low.reshape(-1)[0]) == 0


def _pad_preserves_factors(op: Op, values: Sequence[Array | None]) -> bool:
    if op.type == "Pad" and "mode" not in op.attrs and len(values) <= 1 and "value" not in op.attrs:
        return True
    if op.type == "MirrorPad" or op.text_attr("mode", "constant") in {"reflect", "edge", "wrap"}:
        return True
    pad_value = values[1] if len(values) > 1 else None
    return op.numeric_attr("value", 0) == 0 and (len(values) <= 1 or (pad_value is not None and not np.any(pad_value)))


def _transpose_layout(
    op: Op, layout: ChannelLayout, values: Sequence[Array | None], *, forward: bool
) -> ChannelLayout | None:
    permutation = op.attrs.get("perm", values[0] if values else None)
    order = [] if permutation is None else [int(index) for index in np.asarray(permutation).reshape(-1)]
    if sorted(order) != list(range(len(order))) or len(order) < -layout.axis:
        return None
    position = layout.axis + len(order)
    return layout._replace(axis=(order.index(position) if forward else order[position]) - len(order))


def _reshape_layout(
    layout: ChannelLayout, shapes: tuple[Shape | None, Shape | None], channels: int, *, forward: bool
) -> ChannelLayout | None:
    """Propagate through a reshape that keeps the last axis, or merges all axes but the first."""
    before, after = shapes if forward else shapes[::-1]
    if before is None or after is None or not before or not after or layout.axis_size(before) is None:
        return None
    if layout.axis == -1 and before[-1] == after[-1]:
        return layout
    if layout.block > 1 or layout.axis_size(before) != channels:
        return None
    if sum(size == channels for size in before) == 1 and sum(size == channels for size in after) == 1:
        inner, position = before[layout.axis :][1:], after.index(channels)
        trailing = after[position + 1 :]
        if None not in (*inner, *trailing) and math.prod(inner) == math.prod(trailing):  # type: ignore[arg-type]
            return ChannelLayout(position - len(after))
    inner = before[len(before) + layout.axis + 1 :]
    if forward and len(after) == MATRIX_RANK and None not in inner and after[-1] is not None:
        sample_shape = before[1:]
        if layout.axis > -len(before) and None not in sample_shape and math.prod(sample_shape) == after[-1]:  # type: ignore[arg-type]
            return ChannelLayout(-1, math.prod(inner))  # type: ignore[arg-type]  # none is None
    return None


def _reduce_mean_layout(
    op: Op, layout: ChannelLayout, shape: Shape | None, values: Sequence[Array | None], *, forward: bool
) -> ChannelLayout | None:
    """Propagate through a mean over other axes. `shape` is that of the input."""
    axes = op.attrs.get("axes", values[0] if values else None)
    if shape is None or axes is None or layout.block > 1:
        return None
    rank = len(shape)
    reduced_axes = {int(axis) % rank for axis in np.asarray(axes).reshape(-1)}
    keep_dims = op.numeric_attr("keepdims", 1) if op.type == "ReduceMean" else op.numeric_attr("keep_dims", 0)
    remaining_axes = [axis for axis in range(rank) if axis not in reduced_axes]
    if forward or keep_dims:
        position = layout.axis + rank
        if position not in remaining_axes:
            return None
        return layout if keep_dims else ChannelLayout(remaining_axes.index(position) - len(remaining_axes))
    return ChannelLayout(remaining_axes[layout.axis] - rank) if len(remaining_axes) >= -layout.axis else None
