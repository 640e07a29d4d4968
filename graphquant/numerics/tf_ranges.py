"""Scales and zero points that TensorFlow's quantization ops compute from a range, bit for bit as its CPU kernels.

FakeQuantWithMinMax is affine. Its integers go from 0 (`narrow_range`: from 1) to 2^num_bits - 1. The zero point is
rounded ("nudged") to one of them, so that 0.0 is exact. Source: tensorflow/core/kernels/fake_quant_ops_functor.h,
which the TensorFlow wheel contains.

QuantizeAndDequantize only scales values, so 0.0 stays 0.0. Signed b bits represent the integers -2^(b-1) to 2^(b-1) - 1
(`narrow_range`: from -2^(b-1) + 1), unsigned ones 0 to 2^b - 1. Source:
tensorflow/core/kernels/quantize_and_dequantize_op.h, which the wheel contains too.

The ops themselves are in tests/reference, which checks this module against TensorFlow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from graphquant.errors import InternalError, UsageError
from graphquant.numerics.affine import Array, IntType, QParams, QType, Range, qparams_from_scale

FAKE_QUANT_MIN_BITS, FAKE_QUANT_MAX_BITS = 2, 16

MAX_SIGNED_BITS, MAX_UNSIGNED_BITS = 61, 62
"""The largest bit widths of the QuantizeAndDequantize kernels."""

WHOLE_TENSOR_AXIS = -1
"""The attribute `axis` of QuantizeAndDequantize for one range for the whole tensor. It is not the last axis."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NudgedRange:
    """The scale and zero point that FakeQuant computes from a range; float32 arrays, () or (C,).

    `inverse_scale`, the steps per 1.0, is computed from the range and not from `scale`. The integer for 0.0 is from 0
    (narrow: 1) to 2^num_bits - 1. `low` and `high` are the values of the smallest and largest integer.
    """

    scale: Array
    inverse_scale: Array
    zero_point: Array
    low: Array
    high: Array


def flush_denormals(x: Array) -> Array:
    """Replace each denormal by a zero of its sign, as TensorFlow's kernels do for all operands and results."""
    is_small = np.abs(x) < np.finfo(x.dtype).smallest_normal
    return np.where(is_small, np.copysign(np.zeros((), x.dtype), x), x) if is_small.any() else np.asarray(x)


def flushed_float32(end: Any) -> Array:
    """Round the end of a range to float32 without denormals."""
    with np.errstate(over="ignore", under="ignore"):
        return flush_denormals(np.asarray(end).astype(np.float32))


def nudge_range(low: Any, high: Any, *, num_bits: int, narrow_range: bool) -> NudgedRange:
    """Compute scale and zero point of FakeQuant for the range `low` to `high`.

    The ends, () or (C,), are used as float32. `narrow_range` excludes the smallest integer. Raises a UsageError unless
    `num_bits` is 2 to 16, as the kernels require.
    """
    if not FAKE_QUANT_MIN_BITS <= num_bits <= FAKE_QUANT_MAX_BITS:
        raise UsageError(
            f"num_bits is {num_bits}. FakeQuant takes {FAKE_QUANT_MIN_BITS} to {FAKE_QUANT_MAX_BITS} bits."
        )
    low32, high32 = flushed_float32(low), flushed_float32(high)
    qmin, qmax = np.float32(narrow_range), np.float32((1 << num_bits) - 1)
    with np.errstate(all="ignore"):
        width = flush_denormals(high32 - low32)
        scale = flush_denormals(width / (qmax - qmin))
        exact_zero_point = qmin - flush_denormals(low32 / scale)
        # Round half up, like C's `round` for x >= 0. Unlike floor(x + 0.5), this is correct for 0.49999997.
        whole = np.floor(exact_zero_point)
        zero_point = np.clip(whole + (exact_zero_point - whole >= np.float32(0.5)), qmin, qmax)
        zero_point = np.where(np.isnan(exact_zero_point), np.float32(0), zero_point)  # as x86 converts NaN to integers
        return NudgedRange(
            scale=scale,
            inverse_scale=flush_denormals((qmax - qmin) / width),
            zero_point=zero_point,
            low=flush_denormals((qmin - zero_point) * scale),
            high=flush_denormals((qmax - zero_point) * scale),
        )


def fake_quant_params(op_range: Range, dtype: QType, *, narrow: bool = False, axis: int | None = None) -> QParams:
    """Return the params with which FakeQuant quantizes if its range is `op_range`: its float32 `min` and `max`.

    `dtype` are the integers in the order of FakeQuant's own, which are unsigned. `narrow` has no effect on unsigned
    ones. `axis` is the channel axis if the range is per channel.

    Raises a UsageError if the kernels do not support the bits, or the range has no step, such as (0, 0).
    """
    narrow = narrow and dtype.signed
    nudged = nudge_range(op_range.low, op_range.high, num_bits=dtype.bits, narrow_range=narrow)
    if not (np.isfinite(nudged.scale) & (nudged.scale > 0)).all():
        raise UsageError(f"FakeQuant has no step in the range {op_range.low} to {op_range.high}. Choose a wider range.")
    qmin, _ = dtype.limits(narrow=narrow)
    return qparams_from_scale(nudged.scale, nudged.zero_point - narrow + qmin, dtype, narrow=narrow, axis=axis)


def range_for_fake_quant(params: QParams) -> Range:
    """Return the `min` and `max` for which FakeQuant computes the scale and zero point of `params`.

    Among ranges whose ends differ by at most one float32 value, the one with the nearest scale is chosen. That is the
    scale itself for powers of two and most others, else it differs in the last place; `nudge_range` computes it. The
    zero point is that of `params`, counted from FakeQuant's smallest integer, 0 or, if narrow, 1.
    """
    qmin, qmax = params.type.limits(narrow=params.narrow)
    narrow = params.narrow and params.type.signed
    zero_point = params.zero_point.astype(np.float64)
    target_scale = params.scale.astype(np.float64)
    lows, highs = (_adjacent_floats(((end - zero_point) * target_scale).astype(np.float32)) for end in (qmin, qmax))
    # One call of the kernel's arithmetic for all pairs of ends, as most ranges are single numbers.
    lows, highs = np.repeat(lows, len(highs), axis=0), np.concatenate([highs] * len(lows))
    nudged = nudge_range(lows, highs, num_bits=params.type.bits, narrow_range=narrow)
    zero_point_moved = nudged.zero_point != zero_point - qmin + narrow
    distances = np.where(zero_point_moved, np.inf, np.abs(nudged.scale.astype(np.float64) - target_scale))
    best = np.argmin(distances, axis=0)
    return Range(np.choose(best, lows), np.choose(best, highs))


def _adjacent_floats(end: Array) -> Array:
    """Return `end` and the float32 below and above it, stacked. 0.0 has no neighbors here, so that it stays 0.0."""
    directions = np.array([0, -np.inf, np.inf], np.float32).reshape(3, *[1] * end.ndim)
    return np.where((directions == 0) | (end == 0), end, np.nextafter(end, directions))


def check_kernel_bits(num_bits: int, *, signed: bool) -> None:
    """Raise a UsageError if the QuantizeAndDequantize kernels do not support `num_bits`."""
    max_bits, kind = (MAX_SIGNED_BITS, "signed") if signed else (MAX_UNSIGNED_BITS, "unsigned")
    if not 1 <= num_bits <= max_bits:
        raise UsageError(
            f"num_bits is {num_bits}. QuantizeAndDequantize takes 1 to {max_bits} bits for {kind} integers."
        )


def scale_range(low: Any, high: Any, *, num_bits: int, signed: bool, narrow: bool) -> Array:
    """Return the scale, one step, of QuantizeAndDequantize for the range `low` to `high`, for any rounding mode.

    The ends, () or (C,), have the type of the tensor, float32 or float64. `narrow` excludes the most negative integer.
    Raises a UsageError if the kernels do not support `num_bits`.
    """
    check_kernel_bits(num_bits, signed=signed)
    flushed_low, flushed_high = flush_denormals(np.asarray(low)), flush_denormals(np.asarray(high))
    float_type = flushed_low.dtype.type
    qmin, qmax = (float_type(end) for end in IntType(num_bits, signed).limits(narrow=narrow))
    largest = np.finfo(float_type).max
    with np.errstate(all="ignore"):
        from_low = flush_denormals(np.where(qmin * flushed_low > 0, qmin / flushed_low, largest))
        from_high = flush_denormals(np.where(qmax * flushed_high > 0, qmax / flushed_high, largest))
        return flush_denormals(np.where(from_low < from_high, flushed_low / qmin, flushed_high / qmax))


def quantize_and_dequantize_params(
    op_range: Range, dtype: QType, *, narrow: bool = False, axis: int | None = None
) -> QParams:
    """Return the params with which QuantizeAndDequantize quantizes float32 tensors, for any rounding mode.

    `op_range` are its float32 `input_min` and `input_max`. `axis` is the channel axis if they are per channel. Raises a
    UsageError if the kernels do not support the bits, or the range has no step, such as (0, 0).
    """
    low, high = (end.astype(np.float32) for end in (op_range.low, op_range.high))
    scale = scale_range(low, high, num_bits=dtype.bits, signed=dtype.signed, narrow=narrow)
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise UsageError(f"QuantizeAndDequantize has no step in the range {low} to {high}. Choose a wider range.")
    return qparams_from_scale(scale, np.zeros(scale.shape), dtype, narrow=narrow, axis=axis)


def range_for_quantize_and_dequantize(params: QParams) -> Range:
    """Return the `input_min` and `input_max` for which float32 QuantizeAndDequantize computes the scale of `params`.

    Signed integers that are not narrow can have any scale. Otherwise the nearest scale that a float32 range can give is
    chosen, which `scale_range` computes: the scale itself for powers of two and most others, else it differs in the
    last place. Raises an InternalError if a zero point is not 0, which this op does not support.
    """
    if (params.zero_point != 0).any():
        raise InternalError("QuantizeAndDequantize has no zero point. Its family must reject the scheme.")
    qmin, qmax = params.type.limits(narrow=params.narrow)
    target_scale = params.scale.astype(np.float64)
    low, high = (qmin * target_scale).astype(np.float32), (qmax * target_scale).astype(np.float32)
    candidates = [high, np.nextafter(high, np.float32(np.inf))]
    end = high
    for _ in range(3):  # three values below `high`, where the lower end decides the scale
        end = np.nextafter(end, np.float32(0))
        candidates.insert(-1, end)
    highs = np.stack(candidates)
    lows = -highs if qmin == -qmax else np.broadcast_to(low, highs.shape)
    bits, signed = params.type.bits, params.type.signed
    scales = scale_range(lows, highs, num_bits=bits, signed=signed, narrow=params.narrow)
    best = np.argmin(np.abs(scales.astype(np.float64) - target_scale), axis=0)
    return Range(np.choose(best, lows), np.choose(best, highs))
