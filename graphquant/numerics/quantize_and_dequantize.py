"""TensorFlow's QuantizeAndDequantize, versions 1 to 4, and its gradients in numpy: bit for bit its CPU kernels.

Values are only scaled, so 0.0 stays 0.0. Signed b bits stand for the integers -2^(b-1) to 2^(b-1) - 1 (`narrow_range`:
from -2^(b-1) + 1), unsigned ones for 0 to 2^b - 1. Source: tensorflow/core/kernels/quantize_and_dequantize_op.h, which
the TensorFlow wheel carries, and the public quantize_and_dequantize_op.cc beside it.

A tensor and its range share one type, float32 or float64; the op's other types have no CPU kernel. As in TensorFlow,
`axis=-1` is the whole tensor, not the last axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from graphquant.errors import InternalError, UsageError
from graphquant.numerics import eigen
from graphquant.numerics.affine import QParams, Range, broadcast_along_axis, qparams_from_scale
from graphquant.numerics.data_types import Array, IntType, QType

TFRoundMode = Literal["HALF_TO_EVEN", "HALF_UP"]
TF_ROUND_MODES = get_args(TFRoundMode)

MAX_SIGNED_BITS, MAX_UNSIGNED_BITS = 61, 62
"""The most bits that the kernels take."""

WHOLE_TENSOR_AXIS = -1
"""The axis that means one range for the whole tensor."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScaledRange:
    """What QuantizeAndDequantize makes of a range; arrays of the tensor's type, () or (C,).

    Attributes:
        inverse_scale: Steps per 1.0: values are multiplied by it and rounded.
        scale: One step, which the rounded values are multiplied by: the scale. 1 / per_unit up to rounding.
        low: Smallest value that is kept, if the range was given.
        high: Largest value that is kept, likewise.
    """

    inverse_scale: Array
    scale: Array
    low: Array
    high: Array


def quantize_and_dequantize_v1(
    x: Any,
    *,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    input_min: float = 0.0,
    input_max: float = 0.0,
) -> Array:
    """What the op QuantizeAndDequantize gives, whose range is attributes (float32, even for a float64 tensor).

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
    low, high = (eigen.flush_denormals(np.asarray(end, np.float32)) for end in (input_min, input_max))
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
    """What QuantizeAndDequantizeV2 and QuantizeAndDequantizeV4 give.

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
    _check_kernel_bits(num_bits, signed_input)
    _check_channel_axis(axis, values.ndim)
    ends = _checked_range(values, input_min, input_max, axis) if range_given else _observed_limits(values, axis)
    scaled_range = scale_range(*ends, num_bits=num_bits, signed=signed_input, narrow=narrow_range)
    channel_axis = None if axis == WHOLE_TENSOR_AXIS else axis
    inverse_scale, scale, low, high = (
        broadcast_along_axis(limits, channel_axis, values.ndim)
        for limits in (scaled_range.inverse_scale, scaled_range.scale, scaled_range.low, scaled_range.high)
    )
    with np.errstate(all="ignore"):
        clipped = eigen.flush_denormals(values)
        if range_given:
            clipped = eigen.eigen_max(eigen.eigen_min(clipped, high), low)
        scaled = eigen.flush_denormals(clipped * inverse_scale)
        rounded = np.rint(scaled) if round_mode == "HALF_TO_EVEN" else np.floor(scaled + scaled.dtype.type(0.5))
        return np.asarray(eigen.flush_denormals(rounded * scale))


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
    """What QuantizeAndDequantizeV3 gives, whose bits are a tensor too and which always rounds half to even.

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
"""V4 computes what V2 does, and differs by its gradient alone."""


def straight_through_gradient(gradients: Any) -> Array:
    """The gradient of V1, V2 and V3 with respect to their tensor: what comes in. Their range has none."""
    return np.asarray(gradients)


def quantize_and_dequantize_v4_gradient(
    gradients: Any, x: Any, input_min: Any, input_max: Any, *, axis: int = WHOLE_TENSOR_AXIS
) -> tuple[Array, Array, Array]:
    """What QuantizeAndDequantizeV4Grad gives: gradients pass where `x` is within the range, which itself has zeros.

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
    flushed = eigen.flush_denormals(values)
    inside = (flushed >= broadcast_along_axis(low, channel_axis, values.ndim)) & (
        flushed <= broadcast_along_axis(high, channel_axis, values.ndim)
    )
    with np.errstate(all="ignore"):
        passed = eigen.flush_denormals(eigen.flush_denormals(upstream) * inside.astype(values.dtype))
    return np.asarray(passed), np.zeros_like(low), np.zeros_like(high)


def scale_range(low: Any, high: Any, *, num_bits: int, signed: bool, narrow: bool) -> ScaledRange:
    """The steps that QuantizeAndDequantize takes in the range `low` to `high`, whatever it rounds by.

    Args:
        low: Lower ends, () or (C,): float32 or float64, the type of the tensor.
        high: Upper ends, likewise.
        num_bits: 1 to 61, unsigned to 62.
        signed: Whether the integers are signed.
        narrow: Whether the most negative one is left out.

    Raises:
        UsageError: Bits that the kernels refuse.
    """
    _check_kernel_bits(num_bits, signed)
    flushed_low, flushed_high = eigen.flush_denormals(np.asarray(low)), eigen.flush_denormals(np.asarray(high))
    float_type = flushed_low.dtype.type
    qmin, qmax = (float_type(end) for end in IntType(num_bits, signed).limits(narrow=narrow))
    largest = np.finfo(float_type).max
    with np.errstate(all="ignore"):
        from_low = eigen.flush_denormals(np.where(qmin * flushed_low > 0, qmin / flushed_low, largest))
        from_high = eigen.flush_denormals(np.where(qmax * flushed_high > 0, qmax / flushed_high, largest))
        by_low = from_low < from_high
        scale = eigen.flush_denormals(np.where(by_low, flushed_low / qmin, flushed_high / qmax))
        return ScaledRange(
            inverse_scale=np.where(by_low, from_low, from_high),
            scale=scale,
            low=np.where(by_low, flushed_low, eigen.flush_denormals(qmin * scale)),
            high=np.where(by_low, eigen.flush_denormals(qmax * scale), flushed_high),
        )


def quantize_and_dequantize_params(
    op_range: Range, dtype: QType, *, narrow: bool = False, axis: int | None = None
) -> QParams:
    """How float32 tensors are quantized by this op if its range is `op_range`, whichever way it rounds.

    Args:
        op_range: What `input_min` and `input_max` are, as float32 once they are written.
        dtype: The integers, of 2 bits and more.
        narrow: Whether the most negative one is left out.
        axis: The channel axis if the range is per channel.

    Raises:
        UsageError: Bits that the kernels refuse, or a range in which there is no step: (0, 0), say.
    """
    low, high = (end.astype(np.float32) for end in (op_range.low, op_range.high))
    scale = scale_range(low, high, num_bits=dtype.bits, signed=dtype.signed, narrow=narrow).scale
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise UsageError(f"QuantizeAndDequantize has no step in the range {low} to {high}. Give one that holds more.")
    return qparams_from_scale(scale, np.zeros(scale.shape), dtype, narrow=narrow, axis=axis)


def range_for_quantize_and_dequantize(params: QParams) -> Range:
    """The `input_min` and `input_max` with which a float32 QuantizeAndDequantize steps by the scale of `params`.

    For signed integers with the most negative one that is any scale. Else it is the nearest that a float32 range can
    give, which `scale_range` tells: the scale itself for powers of two and most others, off in the last place for the rest.

    Raises:
        InternalError: A zero point that is not 0, which this op does not have.
    """
    if (params.zero_point != 0).any():
        raise InternalError("QuantizeAndDequantize was asked for a zero point; its family must refuse it.")
    qmin, qmax = params.type.limits(narrow=params.narrow)
    target_scale = params.scale.astype(np.float64)
    low, high = (qmin * target_scale).astype(np.float32), (qmax * target_scale).astype(np.float32)
    candidate_highs = [high]
    while len(candidate_highs) <= 3:  # noqa: PLR2004  # places down from there the lower end decides the scale
        candidate_highs.append(np.nextafter(candidate_highs[-1], np.float32(0)))
    candidate_highs.append(np.nextafter(high, np.float32(np.inf)))
    candidate_ranges = [(-end if qmin == -qmax else low, end) for end in candidate_highs]
    bits, signed = params.type.bits, params.type.signed
    scaled_ranges = [
        scale_range(*candidate, num_bits=bits, signed=signed, narrow=params.narrow) for candidate in candidate_ranges
    ]
    scales = np.stack([scaled_range.scale for scaled_range in scaled_ranges]).astype(np.float64)
    best = np.argmin(np.abs(scales - target_scale), axis=0)
    return Range(*(np.choose(best, [candidate[side] for candidate in candidate_ranges]) for side in (0, 1)))


def _require_kernel_float(x: Any) -> Array:
    """`x` as an array of a type that the kernels take."""
    values = np.asarray(x)
    if values.dtype not in {np.dtype(np.float32), np.dtype(np.float64)}:
        raise UsageError(
            f"QuantizeAndDequantize has no CPU kernel for {values.dtype}. Cast the tensor to float32 or float64."
        )
    return values


def _check_kernel_bits(num_bits: int, signed: bool) -> None:
    max_bits = MAX_SIGNED_BITS if signed else MAX_UNSIGNED_BITS
    if not 1 <= num_bits <= max_bits:
        kind = "signed" if signed else "unsigned"
        raise UsageError(
            f"num_bits is {num_bits}. QuantizeAndDequantize takes 1 to {max_bits} bits for {kind} integers."
        )


def _check_channel_axis(axis: int, ndim: int) -> None:
    if not (axis == WHOLE_TENSOR_AXIS or 0 <= axis < ndim):
        raise UsageError(
            f"axis is {axis} for a tensor of {ndim} axes. Count from 0; -1 is the whole tensor and not the last axis."
        )


def _cast_range(values: Array, input_min: Any, input_max: Any, axis: int) -> tuple[Array, Array]:
    """The given range in the type of `values`, in the shape that the kernels want."""
    low, high = (eigen.flush_denormals(np.asarray(end).astype(values.dtype)) for end in (input_min, input_max))
    shape = () if axis == WHOLE_TENSOR_AXIS else (values.shape[axis],)
    if low.shape != shape or high.shape != shape:
        raise UsageError(
            f"The range has the shapes {low.shape} and {high.shape}. With axis {axis} both must be {shape}."
        )
    return low, high


def _checked_range(values: Array, input_min: Any, input_max: Any, axis: int) -> tuple[Array, Array]:
    """The given range, refused as the kernels refuse it."""
    low, high = _cast_range(values, input_min, input_max, axis)
    if axis == WHOLE_TENSOR_AXIS and not low <= high:
        raise UsageError(f"The range is {low} to {high}. Give a minimum that is not above the maximum, and no NaN.")
    return low, high


def _observed_limits(values: Array, axis: int) -> tuple[Array, Array]:
    """Smallest and largest value, of each channel or of all, in the kernels' order (see `eigen`)."""
    shape = values.shape or (1,)
    leading, channels = (1, 1) if axis == WHOLE_TENSOR_AXIS else (math.prod(shape[:axis]), shape[axis])
    trailing = values.size if axis == WHOLE_TENSOR_AXIS else math.prod(shape[axis + 1 :])
    rows = (
        eigen.flush_denormals(values)
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
