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
from graphquant.numerics.affine import QParams, Range, along, from_scale
from graphquant.numerics.types import Array, IntType, QType

RoundMode = Literal["HALF_TO_EVEN", "HALF_UP"]
ROUND_MODES = get_args(RoundMode)

SIGNED_BITS, UNSIGNED_BITS = 61, 62
"""The most bits that the kernels take."""

WHOLE = -1
"""The axis that means one range for the whole tensor."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steps:
    """What QuantizeAndDequantize makes of a range; arrays of the tensor's type, () or (C,).

    Attributes:
        per_unit: Steps per 1.0: values are multiplied by it and rounded.
        size: One step, which the rounded values are multiplied by: the scale. 1 / per_unit up to rounding.
        low: Smallest value that is kept, if the range was given.
        high: Largest value that is kept, likewise.
    """

    per_unit: Array
    size: Array
    low: Array
    high: Array


def v1(
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
    low, high = (eigen.flush(np.asarray(end, np.float32)) for end in (input_min, input_max))
    return v2(x, low, high, signed_input=signed_input, num_bits=num_bits, range_given=range_given)


def v2(
    x: Any,
    input_min: Any = 0.0,
    input_max: Any = 0.0,
    *,
    signed_input: bool = True,
    num_bits: int = 8,
    range_given: bool = False,
    round_mode: RoundMode = "HALF_TO_EVEN",
    narrow_range: bool = False,
    axis: int = WHOLE,
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
    values = _values(x)
    if round_mode not in ROUND_MODES:
        raise UsageError(f"round_mode is {round_mode!r}. It must be HALF_TO_EVEN or HALF_UP.")
    _check_bits(num_bits, signed_input)
    _check_axis(axis, values.ndim)
    ends = _given(values, input_min, input_max, axis) if range_given else _observed(values, axis)
    found = steps(*ends, num_bits=num_bits, signed=signed_input, narrow=narrow_range)
    at = None if axis == WHOLE else axis
    per_unit, size, low, high = (
        along(each, at, values.ndim) for each in (found.per_unit, found.size, found.low, found.high)
    )
    with np.errstate(all="ignore"):
        kept = eigen.flush(values)
        if range_given:
            kept = eigen.larger(eigen.smaller(kept, high), low)
        scaled = eigen.flush(kept * per_unit)
        whole = np.rint(scaled) if round_mode == "HALF_TO_EVEN" else np.floor(scaled + scaled.dtype.type(0.5))
        return np.asarray(eigen.flush(whole * size))


def v3(
    x: Any,
    input_min: Any,
    input_max: Any,
    num_bits: int,
    *,
    signed_input: bool = True,
    range_given: bool = True,
    narrow_range: bool = False,
    axis: int = WHOLE,
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
    return v2(
        x,
        input_min,
        input_max,
        signed_input=signed_input,
        num_bits=num_bits,
        range_given=range_given,
        narrow_range=narrow_range,
        axis=axis,
    )


v4 = v2
"""V4 computes what V2 does, and differs by its gradient alone."""


def straight_through_gradient(gradients: Any) -> Array:
    """The gradient of V1, V2 and V3 with respect to their tensor: what comes in. Their range has none."""
    return np.asarray(gradients)


def v4_gradient(
    gradients: Any, x: Any, input_min: Any, input_max: Any, *, axis: int = WHOLE
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
    values = _values(x)
    upstream = np.asarray(gradients, values.dtype)
    if upstream.shape != values.shape:
        raise UsageError(f"The gradients are {upstream.shape} and the values {values.shape}. Give both one shape.")
    _check_axis(axis, values.ndim)
    low, high = _ends(values, input_min, input_max, axis)
    at = None if axis == WHOLE else axis
    kept = eigen.flush(values)
    inside = (kept >= along(low, at, values.ndim)) & (kept <= along(high, at, values.ndim))
    with np.errstate(all="ignore"):
        passed = eigen.flush(eigen.flush(upstream) * inside.astype(values.dtype))
    return np.asarray(passed), np.zeros_like(low), np.zeros_like(high)


def steps(low: Any, high: Any, *, num_bits: int, signed: bool, narrow: bool) -> Steps:
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
    _check_bits(num_bits, signed)
    bottom, top = eigen.flush(np.asarray(low)), eigen.flush(np.asarray(high))
    number = bottom.dtype.type
    qmin, qmax = (number(end) for end in IntType(num_bits, signed).limits(narrow=narrow))
    largest = np.finfo(number).max
    with np.errstate(all="ignore"):
        from_low = eigen.flush(np.where(qmin * bottom > 0, qmin / bottom, largest))
        from_high = eigen.flush(np.where(qmax * top > 0, qmax / top, largest))
        by_low = from_low < from_high
        size = eigen.flush(np.where(by_low, bottom / qmin, top / qmax))
        return Steps(
            per_unit=np.where(by_low, from_low, from_high),
            size=size,
            low=np.where(by_low, bottom, eigen.flush(qmin * size)),
            high=np.where(by_low, eigen.flush(qmax * size), top),
        )


def params_of(given: Range, kind: QType, *, narrow: bool = False, axis: int | None = None) -> QParams:
    """How float32 tensors are quantized by this op if its range is `given`, whichever way it rounds.

    Args:
        given: What `input_min` and `input_max` are, as float32 once they are written.
        kind: The integers, of 2 bits and more.
        narrow: Whether the most negative one is left out.
        axis: The channel axis if the range is per channel.

    Raises:
        UsageError: Bits that the kernels refuse, or a range in which there is no step: (0, 0), say.
    """
    low, high = (end.astype(np.float32) for end in (given.low, given.high))
    size = steps(low, high, num_bits=kind.bits, signed=kind.signed, narrow=narrow).size
    if not (np.isfinite(size) & (size > 0)).all():
        raise UsageError(f"QuantizeAndDequantize has no step in the range {low} to {high}. Give one that holds more.")
    return from_scale(size, np.zeros(size.shape), kind, narrow=narrow, axis=axis)


def range_to_write(params: QParams) -> Range:
    """The `input_min` and `input_max` with which a float32 QuantizeAndDequantize steps by the scale of `params`.

    For signed integers with the most negative one that is any scale. Else it is the nearest that a float32 range can
    give, which `steps` tells: the scale itself for powers of two and most others, off in the last place for the rest.

    Raises:
        InternalError: A zero point that is not 0, which this op does not have.
    """
    if (params.zero_point != 0).any():
        raise InternalError("QuantizeAndDequantize was asked for a zero point; its family must refuse it.")
    qmin, qmax = params.type.limits(narrow=params.narrow)
    wanted = params.scale.astype(np.float64)
    low, high = (qmin * wanted).astype(np.float32), (qmax * wanted).astype(np.float32)
    tried = [high]
    while len(tried) <= 3:  # noqa: PLR2004  # places down from there the lower end decides the scale
        tried.append(np.nextafter(tried[-1], np.float32(0)))
    tried.append(np.nextafter(high, np.float32(np.inf)))
    ends = [(-end if qmin == -qmax else low, end) for end in tried]
    bits, signed = params.type.bits, params.type.signed
    found = [steps(*pair, num_bits=bits, signed=signed, narrow=params.narrow) for pair in ends]
    sizes = np.stack([each.size for each in found]).astype(np.float64)
    best = np.argmin(np.abs(sizes - wanted), axis=0)
    return Range(*(np.choose(best, [pair[side] for pair in ends]) for side in (0, 1)))


def _values(x: Any) -> Array:
    """`x` as an array of a type that the kernels take."""
    values = np.asarray(x)
    if values.dtype not in {np.dtype(np.float32), np.dtype(np.float64)}:
        raise UsageError(
            f"QuantizeAndDequantize has no CPU kernel for {values.dtype}. Cast the tensor to float32 or float64."
        )
    return values


def _check_bits(num_bits: int, signed: bool) -> None:
    most = SIGNED_BITS if signed else UNSIGNED_BITS
    if not 1 <= num_bits <= most:
        kind = "signed" if signed else "unsigned"
        raise UsageError(f"num_bits is {num_bits}. QuantizeAndDequantize takes 1 to {most} bits for {kind} integers.")


def _check_axis(axis: int, ndim: int) -> None:
    if not (axis == WHOLE or 0 <= axis < ndim):
        raise UsageError(
            f"axis is {axis} for a tensor of {ndim} axes. Count from 0; -1 is the whole tensor and not the last axis."
        )


def _ends(values: Array, input_min: Any, input_max: Any, axis: int) -> tuple[Array, Array]:
    """The given range in the type of `values`, in the shape that the kernels want."""
    low, high = (eigen.flush(np.asarray(end).astype(values.dtype)) for end in (input_min, input_max))
    shape = () if axis == WHOLE else (values.shape[axis],)
    if low.shape != shape or high.shape != shape:
        raise UsageError(
            f"The range has the shapes {low.shape} and {high.shape}. With axis {axis} both must be {shape}."
        )
    return low, high


def _given(values: Array, input_min: Any, input_max: Any, axis: int) -> tuple[Array, Array]:
    """The given range, refused as the kernels refuse it."""
    low, high = _ends(values, input_min, input_max, axis)
    if axis == WHOLE and not low <= high:
        raise UsageError(f"The range is {low} to {high}. Give a minimum that is not above the maximum, and no NaN.")
    return low, high


def _observed(values: Array, axis: int) -> tuple[Array, Array]:
    """Smallest and largest value, of each channel or of all, in the kernels' order (see `eigen`)."""
    shape = values.shape or (1,)
    before, channels = (1, 1) if axis == WHOLE else (math.prod(shape[:axis]), shape[axis])
    after = values.size if axis == WHOLE else math.prod(shape[axis + 1 :])
    rows = eigen.flush(values).reshape(before, channels, after).transpose(2, 0, 1).reshape(before * after, channels)
    if not (np.isnan(rows) | (np.signbit(rows) & (rows == 0))).any():  # else the order of the values matters
        low, high = rows.min(axis=0, initial=np.inf), rows.max(axis=0, initial=-np.inf)
    else:
        order = eigen.reduce if axis == WHOLE else eigen.in_a_row
        low, high = order(rows, eigen.smaller, np.inf), order(rows, eigen.larger, -np.inf)
    return (low[0], high[0]) if axis == WHOLE else (low, high)
