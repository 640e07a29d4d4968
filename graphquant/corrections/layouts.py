"""Where the channels of tensors and weights lie, and what ops that move values make of that."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.ir import Op, Shape
    from graphquant.numerics import Array

PAIR = 2


class Layout(NamedTuple):
    """Where a tensor's channels lie.

    Attributes:
        axis: The axis, counted from the end: -1 is the last.
        block: How many neighbours along it belong to one channel; the channels may follow each other several times.
    """

    axis: int
    block: int = 1

    def size(self, shape: Shape | None) -> int | None:
        """The size of `shape` along the axis; None where it is not known."""
        return shape[self.axis] if shape is not None and len(shape) >= -self.axis else None

    def vector(self, shape: Sequence[int], channels: int) -> Array | None:
        """The channel of each element of a value of `shape` that is added to such a tensor; None if it has none."""
        if len(shape) < -self.axis or shape[self.axis] != channels or math.prod(shape) != channels or self.block > 1:
            return None
        return np.arange(channels).reshape(tuple(shape))


def held_along(op: Op, shape: Sequence[int], *, reads: bool) -> tuple[Array, Layout] | None:
    """The channel of each element of a weight of `shape`, int64, and where the op's tensor has it; None if not known.

    Args:
        op: The op that multiplies by the weight.
        shape: The weight's.
        reads: Whether channels are those that the op reads; else those that it makes.
    """
    count = len(shape)
    match op.type:
        case "Conv":
            return _conv(op, shape, reads=reads)
        case "Conv2D" | "DepthwiseConv2dNative" if count == PAIR + 2:
            return _conv2d(op, shape, reads=reads)
        case "Gemm" | "MatMul" | "BatchMatMulV2" | "BatchMatMulV3" if count >= PAIR:
            if any(op.number(name, 0) for name in ("transA", "transpose_a", "adj_x")):
                return None
            turned = any(op.number(name, 0) for name in ("transB", "transpose_b", "adj_y"))
            axis = -1 if reads == turned else -2
            return _along(shape, axis), Layout(-1)
    return None


def channel_layout(op: Op, rank: int | None) -> Layout | None:
    """Where an op that has one value per channel has the channels of a tensor of `rank` axes; None if not known."""
    if op.kind == "layernorm":
        return Layout(-1) if op.number("axis", -1) in {-1, (rank or 0) - 1} else None
    known = op.attrs.get("data_format", "NCHW" if op.type.endswith("Normalization") else "NHWC")
    text = known.decode() if isinstance(known, bytes) else str(known)
    if not text.startswith("NC"):
        return Layout(-1)
    return None if rank is None else Layout(1 - rank)


def _along(shape: Sequence[int], axis: int) -> Array:
    """The place of each element of `shape` along an axis, broadcast."""
    sizes = [1] * len(shape)
    sizes[axis] = shape[axis]
    return np.arange(shape[axis]).reshape(sizes)


def _conv(op: Op, shape: Sequence[int], *, reads: bool) -> tuple[Array, Layout] | None:
    """[output, input of a group, kernel...]."""
    groups, layout = int(op.number("group", 1)), Layout(1 - len(shape))
    if len(shape) < PAIR or groups < 1 or shape[0] % groups:
        return None
    if not reads:
        return _along(shape, 0), layout
    group = np.arange(shape[0]) // (shape[0] // groups)
    index = group[:, None] * shape[1] + np.arange(shape[1])
    return (index[:1] if groups == 1 else index).reshape(-1, shape[1], *[1] * (len(shape) - PAIR)), layout


def _conv2d(op: Op, shape: Sequence[int], *, reads: bool) -> tuple[Array, Layout] | None:
    """TensorFlow's [height, width, input, output], or of depthwise ones [height, width, input, multiplier]."""
    known = op.attrs.get("data_format", "NHWC")
    text = known.decode() if isinstance(known, bytes) else str(known)
    layout = Layout(-3 if text.startswith("NC") else -1)
    if op.type == "Conv2D":
        return _along(shape, 2 if reads else 3), layout
    if reads:
        return _along(shape, 2), layout
    return np.arange(shape[2] * shape[3]).reshape(1, 1, *shape[2:]), layout


def carried(
    op: Op,
    layout: Layout,
    shapes: tuple[Shape | None, Shape | None],
    values: Sequence[Array | None],
    channels: int,
    *,
    out: bool,
) -> Layout | None:
    """Where the channels lie on the other side of an op that only moves values, or averages them; None if not known.

    Args:
        op: The op.
        layout: Where they lie on the side that they are known of.
        shapes: Of its input and its output.
        values: What it reads beside its input, where that is known.
        channels: How many there are.
        out: Whether its input is the side that is known.
    """
    match op.kind:
        case "clip":
            return layout if _only_positive(op, values) else None
        case "pad":
            return layout if _pads_zeros(op, values) and layout.size(shapes[0]) == layout.size(shapes[1]) else None
        case "transpose":
            return _turned(op, layout, values, out=out)
        case "reshape" | "flatten" | "squeeze" | "unsqueeze":
            return _shaped(layout, shapes, channels, out=out)
        case "reduce_mean":
            return _averaged(op, layout, shapes, values, out=out)
    return None


def _only_positive(op: Op, values: Sequence[Array | None]) -> bool:
    """Whether a Clip is a Relu: from 0 up, with no upper limit."""
    if "min" in op.attrs or "max" in op.attrs:
        return op.number("min", -math.inf) == 0 and "max" not in op.attrs
    low = values[0] if values else None
    return low is not None and len(values) == 1 and low.size == 1 and float(low.reshape(-1)[0]) == 0


def _pads_zeros(op: Op, values: Sequence[Array | None]) -> bool:
    if op.type == "Pad" and "mode" not in op.attrs and len(values) <= 1 and "value" not in op.attrs:
        return True
    mode = op.attrs.get("mode", "constant")
    text = mode.decode() if isinstance(mode, bytes) else str(mode)
    if op.type == "MirrorPad" or text in {"reflect", "edge", "wrap"}:
        return True
    given = values[1] if len(values) > 1 else None
    return op.number("value", 0) == 0 and (len(values) <= 1 or (given is not None and not np.any(given)))


def _turned(op: Op, layout: Layout, values: Sequence[Array | None], *, out: bool) -> Layout | None:
    given = op.attrs.get("perm", values[0] if values else None)
    order = [] if given is None else [int(one) for one in np.asarray(given).reshape(-1)]
    if sorted(order) != list(range(len(order))) or len(order) < -layout.axis:
        return None
    place = layout.axis + len(order)
    return layout._replace(axis=(order.index(place) if out else order[place]) - len(order))


def _shaped(layout: Layout, shapes: tuple[Shape | None, Shape | None], channels: int, *, out: bool) -> Layout | None:
    """Through a reshape: the last axis stays, or all axes but the first become one."""
    before, after = shapes if out else shapes[::-1]
    if before is None or after is None or not before or not after or layout.size(before) is None:
        return None
    if layout.axis == -1 and before[-1] == after[-1]:
        return layout
    if layout.block > 1 or layout.size(before) != channels:
        return None
    if sum(size == channels for size in before) == 1 and sum(size == channels for size in after) == 1:
        inner, place = before[layout.axis :][1:], after.index(channels)
        behind = after[place + 1 :]
        if None not in (*inner, *behind) and math.prod(inner) == math.prod(behind):  # type: ignore[arg-type]
            return Layout(place - len(after))
    inner = before[len(before) + layout.axis + 1 :]
    if out and len(after) == PAIR and None not in inner and after[-1] is not None:
        whole = before[1:]
        if layout.axis > -len(before) and None not in whole and math.prod(whole) == after[-1]:  # type: ignore[arg-type]
            return Layout(-1, math.prod(inner))  # type: ignore[arg-type]  # none is None
    return None


def _averaged(
    op: Op, layout: Layout, shapes: tuple[Shape | None, Shape | None], values: Sequence[Array | None], *, out: bool
) -> Layout | None:
    """Through a mean over other axes."""
    rank = None if shapes[0] is None else len(shapes[0])
    given = op.attrs.get("axes")
    axes = given if given is not None else (values[0] if values else None)
    if rank is None or axes is None or layout.block > 1:
        return None
    gone = {int(one) % rank for one in np.asarray(axes).reshape(-1)}
    keeps = op.number("keepdims", 1) if op.type == "ReduceMean" else op.number("keep_dims", 0)
    if keeps:
        return layout if layout.axis + rank not in gone else None
    stay = [axis for axis in range(rank) if axis not in gone]
    if out:
        place = layout.axis + rank
        return Layout(stay.index(place) - len(stay)) if place in stay else None
    return Layout(stay[layout.axis] - rank) if len(stay) >= -layout.axis else None


__all__ = ["Layout", "carried", "channel_layout", "held_along"]
