"""TensorFlow's QuantizeAndDequantize, versions 1 to 4, and its gradients in numpy, bit for bit as its CPU kernels.

A tensor and its range have one type, float32 or float64; the op's other types have no CPU kernel. As in TensorFlow,
`axis=-1` is the whole tensor, not the last axis. Source: tensorflow/core/kernels/quantize_and_dequantize_op.h, which
the TensorFlow wheel contains, and the public quantize_and_dequantize_op.cc.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from reference import eigen

from graphquant.errors import UsageError
from graphquant.numerics import IntType, broadcast_along_axis
from graphquant.numerics.tf_ranges import WHOLE_TENSOR_AXIS, check_kernel_bits, flush_denormals

if TYPE_CHECKING:
    from graphquant.numerics import Array

TFRoundMode = Literal["HALF_TO_EVEN", "HALF_UP"]
TF_ROUND_MODES = get_args(TFRoundMode)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScaledRange:
    """The scale that QuantizeAndDequantize computes from a range; arrays of the tensor's type, () or (C,).

    Attributes:
        inverse_scale: Steps per 1.0. Values are multiplied by it and rounded.
        scale: One step, by which rounded values are multiplied: 1 / inverse_scale up to rounding.
        low: Smallest value after clamping, if the range is given to the op.
        high: Largest value after clamping.
    """

    inverse_scale: Array
    scale: Array
    low: Array
    high: Array


def adjust_range(low: Any, high: Any, *, num_bits: int, signed: bool, narrow: bool) -> ScaledRange:
    """Compute the scale of a range and the ends of the adjusted range; see `scale_range` for the arguments.

    The scale is computed here too: this module is the reference for `scale_range`.
    """
    check_kernel_bits(num_bits, signed=signed)
    flushed_low, flushed_high = flush_denormals(np.asarray(low)), flush_denormals(np.asarray(high))
    float_type = flushed_low.dtype.type
    qmin, qmax = (float_type(end) for end in IntType(num_bits, signed).limits(narrow=narrow))
    largest = np.finfo(float_type).max
    with np.errstate(all="ignore"):
        from_low = flush_denormals(np.where(qmin * flushed_low > 0, qmin / flushed_low, largest))
        from_high = flush_denormals(np.where(qmax * flushed_high > 0, qmax / flushed_high, largest))
        by_low = from_low < from_high
        scale = flush_denormals(np.where(by_low, flushed_low / qmin, flushed_high / qmax))
        return ScaledRange(
            inverse_scale=np.where(by_low, from_low, from_high),
            scale=scale,
            low=np.where(by_low, flushed_low, flush_denormals(qmin * scale)),
            high=np.where(by_low, flush_denormals(qmax * scale), flushed_high),
        )


def quantize_and_dequantize_v1(
    x: Any,
    *,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    input_min: float = 0.0,
    input_max: float = 0.0,
) -> Array:
    """Compute QuantizeAndDequantize, whose range is in attributes (float32, even for a float64 tensor).

    Args:
        x: float32 or float64, any shape.
        signed_input: Whether the integers are signed.
        num_bits: 1 to 61, unsigned to 62.
        range_given: Whether `input_min` and `input_max` are used; else the smallest and largest value of `x` are.
        input_min: Lower end, in the unit of `x`.
        input_max: Upper end.

    Returns:
        The type, shape and unit of `x`.

    Raises:
        UsageError: A type or number of bits that the kernel refuses, or min > max, or a NaN as an end.
    """
    low, high = (flush_denormals(np.asarray(end, np.float32)) for end in (input_min, input_max))
    return quantize_and_dequantize_v2(
        x, low, high, signed_input=signed_input, num_bits=num_bits, range_given=range_given
    )


def quantize_and_dequantize_v2(
    x: Any,
    input_min: Any = 0.0,
    input_max: Any = 0.0,
    *,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: TFRoundMode = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: int = WHOLE_TENSOR_AXIS,
) -> Array:
    """Compute QuantizeAndDequantizeV2 and QuantizeAndDequantizeV4.

    TensorFlow has no working CPU kernel for a given range with an axis ("input_min must be a scalar"); the result here
    is then that of V3.

    Args:
        x: float32 or float64, any shape.
        input_min: Lower end in the unit of `x`, (); (C,) with an axis.
        input_max: Upper end.
        signed_input: Whether the integers are signed.
        num_bits: 1 to 61, unsigned to 62.
        range_given: Whether the range is used and `x` clamped to it; else it is that of the values, per channel.
        round_mode: HALF_UP rounds 7.5 to 8 and -7.5 to -7.
        narrow_range: Whether the most negative integer is left out; means nothing for unsigned ones.
        axis: The channel axis, of length C, or -1.

    Returns:
        The type, shape and unit of `x`.

    Raises:
        UsageError: What the kernel refuses: a type, bits, a round mode, an axis, the shape of a range, and for the
            whole tensor min > max or a NaN as an end. Ends per channel are not checked.
    """
    values = _require_kernel_float(x)
    if round_mode not in TF_ROUND_MODES:
        raise UsageError(f"round_mode is {round_mode!r}. It must be HALF_TO_EVEN or HALF_UP.")
    check_kernel_bits(num_bits, signed=signed_input)
    _check_channel_axis(axis, values.ndim)
    ends = _checked_range(values, input_min, input_max, axis) if range_given else _observed_limits(values, axis)
    scaled_range = adjust_range(*ends, num_bits=num_bits, signed=signed_input, narrow=narrow_range)
    channel_axis = None if axis == WHOLE_TENSOR_AXIS else axis
    inverse_scale, scale, low, high = (
        broadcast_along_axis(limits, channel_axis, values.ndim)
        for limits in (scaled_range.inverse_scale, scaled_range.scale, scaled_range.low, scaled_range.high)
    )
    with np.errstate(all="ignore"):
        clipped = flush_denormals(values)
        if range_given:
            clipped = eigen.eigen_max(eigen.eigen_min(clipped, high), low)
        scaled = flush_denormals(clipped * inverse_scale)
        rounded = np.rint(scaled) if round_mode == "HALF_TO_EVEN" else np.floor(scaled + scaled.dtype.type(0.5))
        return np.asarray(flush_denormals(rounded * scale))


def quantize_and_dequantize_v3(
    x: Any,
    input_min: Any,
    input_max: Any,
    num_bits: int,
    *,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: int = WHOLE_TENSOR_AXIS,
) -> Array:
    """Compute QuantizeAndDequantizeV3, whose bits are a tensor too and which always rounds half to even.

    Args:
        x: float32 or float64; any shape but ().
        input_min: Lower end in the unit of `x`, (); (C,) with an axis.
        input_max: Upper end.
        num_bits: 1 to 61, unsigned to 62.
        signed_input: Whether the integers are signed.
        range_given: As in `v2`.
        narrow_range: Likewise.
        axis: Likewise; TensorFlow 2.21 ends the whole process for an axis below -1.

    Returns:
        The type, shape and unit of `x`.

    Raises:
        UsageError: As `v2`, and for a scalar.
    """
    if np.ndim(x) == 0:
        raise UsageError("QuantizeAndDequantizeV3 takes no scalar. Reshape it to [1], or use V2 or V4.")
    return quantize_and_dequantize_v2(
        x,
        input_min,
        input_max,
        signed_input=signed_input,
        num_bits=num_bits,
        range_given=range_given,
        narrow_range=narrow_range,
        axis=axis,
    )


quantize_and_dequantize_v4 = quantize_and_dequantize_v2
"""V4 computes the same as V2, and differs only in its gradient."""


def straight_through_gradient(gradients: Any) -> Array:
    """Return the gradient of V1, V2 and V3 for their tensor, unchanged. Their range has no gradient."""
    return np.asarray(gradients)


def quantize_and_dequantize_v4_gradient(
    gradients: Any, x: Any, input_min: Any, input_max: Any, *, axis: int = WHOLE_TENSOR_AXIS
) -> tuple[Array, Array, Array]:
    """Compute QuantizeAndDequantizeV4Grad: gradients pass where `x` is within the range. Those of the range are 0.

    The range counts as it was given, not as it was adjusted, and even where `range_given` is False.

    Args:
        gradients: Gradients of the result, of the type and shape of `x`.
        x: float32 or float64, any shape.
        input_min: Lower end in the unit of `x`, (); (C,) with an axis.
        input_max: Upper end.
        axis: The channel axis, or -1.

    Returns:
        Gradients of `x`, of `input_min` and of `input_max`, in their shapes.

    Raises:
        UsageError: A type, shape or axis that the kernel refuses.
    """
    values = _require_kernel_float(x)
    upstream = np.asarray(gradients, values.dtype)
    if upstream.shape != values.shape:
        raise UsageError(f"The gradients are {upstream.shape} and the values {values.shape}. Give both one shape.")
    _check_channel_axis(axis, values.ndim)
    low, high = _cast_range(values, input_min, input_max, axis)
    channel_axis = None if axis == WHOLE_TENSOR_AXIS else axis
    flushed = flush_denormals(values)
    inside = (flushed >= broadcast_along_axis(low, channel_axis, values.ndim)) & (
        flushed <= broadcast_along_axis(high, channel_axis, values.ndim)
    )
    with np.errstate(all="ignore"):
        passed = flush_denormals(flush_denormals(upstream) * inside.astype(values.dtype))
    return np.asarray(passed), np.zeros_like(low), np.zeros_like(high)


def _require_kernel_float(x: Any) -> Array:
    """Return `x` as an array of a type that the kernels support."""
    values = np.asarray(x)
    if values.dtype not in {np.dtype(np.float32), np.dtype(np.float64)}:
        raise UsageError(
            f"QuantizeAndDequantize has no CPU kernel for {values.dtype}. Cast the tensor to float32 or float64."
        )
    return values


def _check_channel_axis(axis: int, ndim: int) -> None:
    if not (axis == WHOLE_TENSOR_AXIS or 0 <= axis < ndim):
        raise UsageError(
            f"axis is {axis} for a tensor of {ndim} axes. Count from 0; -1 is the whole tensor and not the last axis."
        )


def _cast_range(values: Array, input_min: Any, input_max: Any, axis: int) -> tuple[Array, Array]:
    """Return the range in the type of `values`, in the shape that the kernels require."""
    low, high = (flush_denormals(np.asarray(end).astype(values.dtype)) for end in (input_min, input_max))
    shape = () if axis == WHOLE_TENSOR_AXIS else (values.shape[axis],)
    if low.shape != shape or high.shape != shape:
        raise UsageError(
            f"The range has the shapes {low.shape} and {high.shape}. With axis {axis} both must be {shape}."
        )
    return low, high


def _checked_range(values: Array, input_min: Any, input_max: Any, axis: int) -> tuple[Array, Array]:
    """Return the range, or raise an error where the kernels do."""
    low, high = _cast_range(values, input_min, input_max, axis)
    if axis == WHOLE_TENSOR_AXIS and not low <= high:
        raise UsageError(f"The range is {low} to {high}. Give a minimum that is not above the maximum, and no NaN.")
    return low, high


def _observed_limits(values: Array, axis: int) -> tuple[Array, Array]:
    """Return the smallest and largest value, of each channel or of all, in the kernels' order (see `eigen`)."""
    shape = values.shape or (1,)
    leading, channels = (1, 1) if axis == WHOLE_TENSOR_AXIS else (math.prod(shape[:axis]), shape[axis])
    trailing = values.size if axis == WHOLE_TENSOR_AXIS else math.prod(shape[axis + 1 :])
    rows = (
        flush_denormals(values)
        .reshape(leading, channels, trailing)
        .transpose(2, 0, 1)
        .reshape(leading * trailing, channels)
    )
    if not (np.isnan(rows) | (np.signbit(rows) & (rows == 0))).any():  # else the order of the values matters
        low, high = rows.min(axis=0, initial=np.inf), rows.max(axis=0, initial=-np.inf)
    else:
        reduce_rows = eigen.tree_reduce if axis == WHOLE_TENSOR_AXIS else eigen.sequential_reduce
        low, high = reduce_rows(rows, eigen.eigen_min, np.inf), reduce_rows(rows, eigen.eigen_max, -np.inf)
    return (low[0], high[0]) if axis == WHOLE_TENSOR_AXIS else (low, high)
