"""TensorFlow's FakeQuantWithMinMax ops and their gradients in numpy: bit for bit what its CPU kernels give.

Affine, with integers from 0 (`narrow_range`: from 1) to 2^num_bits - 1 and a zero point that is rounded ("nudged") to
one of them, so that 0.0 is exact; values halfway between two steps always go up. float32 only. Source:
tensorflow/core/kernels/fake_quant_ops_functor.h, which the TensorFlow wheel carries, and fake_quant_ops.cc beside it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import UsageError
from graphquant.numerics import eigen
from graphquant.numerics.affine import QParams, Range, qparams_from_scale

if TYPE_CHECKING:
    from graphquant.numerics.data_types import Array, QType


FAKE_QUANT_MIN_BITS, FAKE_QUANT_MAX_BITS = 2, 16


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class NudgedRange:
    """What FakeQuant makes of a range; float32 arrays, () or (C,).

    Attributes:
        scale: One step: the scale.
        inverse_scale: Steps per 1.0, computed from the range and not from `size`.
        zero_point: The integer that stands for 0.0, from 0 (narrow: 1) to 2^num_bits - 1.
        low: What the smallest integer stands for: the nudged minimum.
        high: What the largest integer stands for.
    """

    scale: Array
    inverse_scale: Array
    zero_point: Array
    low: Array
    high: Array


def nudge_range(low: Any, high: Any, *, num_bits: int, narrow_range: bool) -> NudgedRange:
    """The steps and the zero point that FakeQuant takes for the range `low` to `high`.

    Args:
        low: Lower ends, () or (C,); used as float32.
        high: Upper ends, likewise.
        num_bits: 2 to 16.
        narrow_range: Whether the smallest integer is left out.

    Raises:
        UsageError: Bits that the kernels refuse.
    """
    _check_fake_quant_bits(num_bits)
    low32, high32 = _flushed_float32(low), _flushed_float32(high)
    qmin, qmax = np.float32(narrow_range), np.float32((1 << num_bits) - 1)
    with np.errstate(all="ignore"):
        width = eigen.flush_denormals(high32 - low32)
        scale = eigen.flush_denormals(width / (qmax - qmin))
        exact_zero_point = qmin - eigen.flush_denormals(low32 / scale)
        zero_point = np.where(
            exact_zero_point < qmin, qmin, np.where(exact_zero_point > qmax, qmax, _round_half_up(exact_zero_point))
        )
        zero_point = np.where(
            np.isnan(exact_zero_point), np.float32(0), zero_point
        )  # what x86 makes of NaN as an integer
        return NudgedRange(
            scale=scale,
            inverse_scale=eigen.flush_denormals((qmax - qmin) / width),
            zero_point=zero_point,
            low=eigen.flush_denormals((qmin - zero_point) * scale),
            high=eigen.flush_denormals((qmax - zero_point) * scale),
        )


def fake_quant_with_args(
    x: Any, *, low: float = -6.0, high: float = 6.0, num_bits: int = 8, narrow_range: bool = False
) -> Array:
    """What FakeQuantWithMinMaxArgs gives, whose range is attributes.

    Args:
        x: float32, any shape.
        low: The attribute `min`, in the unit of `x`.
        high: The attribute `max`.
        num_bits: 2 to 16.
        narrow_range: Whether the smallest integer is left out.

    Returns:
        float32 of the shape and unit of `x`.

    Raises:
        UsageError: Another type, bits that the kernel refuses, or a minimum that is not below the maximum.
    """
    values = _require_float32(x)
    _check_range_attributes(low, high)
    nudged = nudge_range(low, high, num_bits=num_bits, narrow_range=narrow_range)
    return _round_to_nudged_range(values, nudged, divide=False)


def fake_quant_with_args_gradient(
    gradients: Any, x: Any, *, low: float = -6.0, high: float = 6.0, num_bits: int = 8, narrow_range: bool = False
) -> Array:
    """What FakeQuantWithMinMaxArgsGradient gives: gradients pass where `x` is within the nudged range.

    Args:
        gradients: float32 gradients of the result, of the shape of `x`.
        x: float32, any shape.
        low: As in `fake_quant_with_args`.
        high: Likewise.
        num_bits: Likewise.
        narrow_range: Likewise.

    Returns:
        Gradients of `x`, in its shape.

    Raises:
        UsageError: As `fake_quant_with_args`, and for two shapes.
    """
    values, upstream = _require_float32(x), _matching_gradients(gradients, x)
    _check_range_attributes(low, high)
    nudged = nudge_range(low, high, num_bits=num_bits, narrow_range=narrow_range)
    return _mask_gradients(upstream, (values >= nudged.low) & (values <= nudged.high))


def fake_quant_with_vars(x: Any, low: Any, high: Any, *, num_bits: int = 8, narrow_range: bool = False) -> Array:
    """What FakeQuantWithMinMaxVars gives; zeros for a range of (0, 0).

    Unlike `fake_quant_with_args` it divides by the step, and takes a range with min >= max, NaN or infinity without complaint:
    what comes out then is of no use, but the same here.

    Args:
        x: float32, any shape.
        low: The input `min`, (), in the unit of `x`.
        high: The input `max`, ().
        num_bits: 2 to 16.
        narrow_range: Whether the smallest integer is left out.

    Returns:
        float32 of the shape and unit of `x`.

    Raises:
        UsageError: Another type, bits that the kernel refuses, or a range that is no scalar.
    """
    values = _require_float32(x)
    low32, high32 = _require_range_shape(low, high, ())
    nudged = nudge_range(low32, high32, num_bits=num_bits, narrow_range=narrow_range)
    if low32 == 0 and high32 == 0:
        return np.zeros_like(values)
    return _round_to_nudged_range(values, nudged, divide=True)


def fake_quant_with_vars_gradient(
    gradients: Any, x: Any, low: Any, high: Any, *, num_bits: int = 8, narrow_range: bool = False
) -> tuple[Array, Array, Array]:
    """What FakeQuantWithMinMaxVarsGradient gives.

    Gradients pass where `x` is within the nudged range; those below it are summed for `low`, those above for `high`.
    For a range of (0, 0) all pass, and `low` and `high` get 0. The order of the sums is TensorFlow's on one thread;
    see `graphquant.numerics.eigen`.

    Args:
        gradients: float32 gradients of the result, of the shape of `x`.
        x: float32, any shape.
        low: As in `fake_quant_with_vars`.
        high: Likewise.
        num_bits: Likewise.
        narrow_range: Likewise.

    Returns:
        Gradients of `x`, in its shape, of `low` and of `high`, ().

    Raises:
        UsageError: As `fake_quant_with_vars`, and for two shapes.
    """
    values, upstream = _require_float32(x), _matching_gradients(gradients, x)
    low32, high32 = _require_range_shape(low, high, ())
    passed, below, above = _columnwise_gradients(
        upstream.reshape(-1, 1),
        values.reshape(-1, 1),
        low32.reshape(1),
        high32.reshape(1),
        num_bits=num_bits,
        narrow_range=narrow_range,
    )
    return passed.reshape(values.shape), below[0], above[0]


def fake_quant_with_vars_per_channel(
    x: Any, low: Any, high: Any, *, num_bits: int = 8, narrow_range: bool = False
) -> Array:
    """What FakeQuantWithMinMaxVarsPerChannel gives: one range per channel of the last axis.

    It multiplies by the steps per unit, as `fake_quant_with_args` does, so its bits can differ from those of `fake_quant_with_vars`.

    Args:
        x: float32, (..., C).
        low: The input `min`, (C,), in the unit of `x`.
        high: The input `max`, (C,).
        num_bits: 2 to 16.
        narrow_range: Whether the smallest integer is left out.

    Returns:
        float32 of the shape and unit of `x`.

    Raises:
        UsageError: Another type, a scalar (with which TensorFlow 2.21 ends the whole process), bits that the kernel
            refuses, or a range of another shape.
    """
    values = _require_float32(x)
    low32, high32 = _require_range_shape(low, high, _last_axis_shape(values))
    nudged = nudge_range(low32, high32, num_bits=num_bits, narrow_range=narrow_range)
    return np.where((low32 == 0) & (high32 == 0), np.float32(0), _round_to_nudged_range(values, nudged, divide=False))


def fake_quant_with_vars_per_channel_gradient(
    gradients: Any, x: Any, low: Any, high: Any, *, num_bits: int = 8, narrow_range: bool = False
) -> tuple[Array, Array, Array]:
    """What FakeQuantWithMinMaxVarsPerChannelGradient gives: `fake_quant_with_vars_gradient` for each channel of the last axis.

    Args:
        gradients: float32 gradients of the result, of the shape of `x`.
        x: float32, (..., C).
        low: As in `fake_quant_with_vars_per_channel`.
        high: Likewise.
        num_bits: Likewise.
        narrow_range: Likewise.

    Returns:
        Gradients of `x`, in its shape, of `low` and of `high`, (C,).

    Raises:
        UsageError: As `fake_quant_with_vars_per_channel`, and for two shapes.
    """
    values, upstream = _require_float32(x), _matching_gradients(gradients, x)
    channels = _last_axis_shape(values)
    low32, high32 = _require_range_shape(low, high, channels)
    rows = (values.size // max(channels[0], 1), *channels)
    passed, below, above = _columnwise_gradients(
        upstream.reshape(rows), values.reshape(rows), low32, high32, num_bits=num_bits, narrow_range=narrow_range
    )
    return passed.reshape(values.shape), below, above


def fake_quant_params(op_range: Range, dtype: QType, *, narrow: bool = False, axis: int | None = None) -> QParams:
    """How tensors are quantized by this op if its range is `op_range`.

    Args:
        op_range: What `min` and `max` are, as float32 once they are written.
        dtype: The integers, 2 to 16 bits; those of `dtype` stand in the order of FakeQuant's own, which are unsigned.
        narrow: Whether the most negative one is left out; means nothing for unsigned ones.
        axis: The channel axis if the range is per channel.

    Raises:
        UsageError: Bits that the kernels refuse, or a range in which there is no step: (0, 0), say.
    """
    narrow = narrow and dtype.signed
    nudged = nudge_range(op_range.low, op_range.high, num_bits=dtype.bits, narrow_range=narrow)
    if not (np.isfinite(nudged.scale) & (nudged.scale > 0)).all():
        raise UsageError(
            f"FakeQuant has no step in the range {op_range.low} to {op_range.high}. Give one that holds more."
        )
    qmin, _ = dtype.limits(narrow=narrow)
    return qparams_from_scale(nudged.scale, nudged.zero_point - narrow + qmin, dtype, narrow=narrow, axis=axis)


def range_for_fake_quant(params: QParams) -> Range:
    """The `min` and `max` with which FakeQuant has the scale and zero point of `params`.

    Of the ranges that are off by at most one place of float32 at either end, it is the one whose scale is nearest: the
    scale itself for powers of two and most others, off in the last place for the rest; `nudge_range` tells. Its zero point is
    that of `params` counted from the smallest integer of FakeQuant, 0 or, if narrow, 1.
    """
    qmin, qmax = params.type.limits(narrow=params.narrow)
    narrow = params.narrow and params.type.signed
    zero_point = params.zero_point.astype(np.float64)
    target_scale = params.scale.astype(np.float64)
    candidate_ends = [_adjacent_floats(((end - zero_point) * target_scale).astype(np.float32)) for end in (qmin, qmax)]
    candidate_ranges = list(itertools.product(*candidate_ends))
    nudged = [nudge_range(*candidate, num_bits=params.type.bits, narrow_range=narrow) for candidate in candidate_ranges]
    scales = np.stack([candidate_range.scale for candidate_range in nudged]).astype(np.float64)
    zero_point_moved = np.stack(
        [candidate_range.zero_point != zero_point - qmin + narrow for candidate_range in nudged]
    )
    best = np.argmin(np.where(zero_point_moved, np.inf, np.abs(scales - target_scale)), axis=0)
    return Range(*(np.choose(best, [candidate[side] for candidate in candidate_ranges]) for side in (0, 1)))


def _adjacent_floats(end: Array) -> list[Array]:
    """`end` and the float32 before and after it; 0.0 stays what it is."""
    neighbors = (np.nextafter(end, np.float32(direction * np.inf)) for direction in (-1, 1))
    return [end, *(np.where(end == 0, end, neighbor) for neighbor in neighbors)]


def _columnwise_gradients(
    upstream: Array, values: Array, low: Array, high: Array, *, num_bits: int, narrow_range: bool
) -> tuple[Array, Array, Array]:
    """Gradients of (n, C) values and of their ranges (C,)."""
    nudged = nudge_range(low, high, num_bits=num_bits, narrow_range=narrow_range)
    is_empty = (low == 0) & (high == 0)
    passed = _mask_gradients(upstream, (values >= nudged.low) & (values <= nudged.high))
    below, above = (
        eigen.tree_reduce(_mask_gradients(upstream, outside), eigen.eigen_add, 0.0)
        for outside in (values < nudged.low, values > nudged.high)
    )
    zero = np.float32(0)
    return np.where(is_empty, upstream, passed), np.where(is_empty, zero, below), np.where(is_empty, zero, above)


def _round_to_nudged_range(values: Array, nudged: NudgedRange, *, divide: bool) -> Array:
    """`values` at the nearest steps within the nudged range."""
    half = np.float32(0.5)
    with np.errstate(all="ignore"):
        zero_step = np.floor(eigen.flush_denormals(-nudged.low * nudged.inverse_scale) + half)
        clipped = eigen.eigen_max(eigen.eigen_min(values, nudged.high), nudged.low)
        shifted = eigen.flush_denormals(clipped - nudged.low)
        position = eigen.flush_denormals(shifted / nudged.scale if divide else shifted * nudged.inverse_scale)
        return np.asarray(
            eigen.flush_denormals(np.floor(eigen.flush_denormals(position - zero_step) + half) * nudged.scale)
        )


def _mask_gradients(upstream: Array, mask: Array) -> Array:
    """Gradients times 1 or 0: an infinite one becomes NaN where it does not pass."""
    with np.errstate(all="ignore"):
        return np.asarray(eigen.flush_denormals(eigen.flush_denormals(upstream) * mask.astype(np.float32)))


def _round_half_up(x: Array) -> Array:
    """C's round for x >= 0: half goes up. Unlike floor(x + 0.5) it is right for 0.49999997."""
    whole = np.floor(x)
    return whole + (x - whole >= np.float32(0.5))


def _flushed_float32(end: Any) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return eigen.flush_denormals(np.asarray(end).astype(np.float32))


def _require_float32(x: Any) -> Array:
    """`x` without denormals."""
    values = np.asarray(x)
    if values.dtype != np.float32:
        raise UsageError(f"FakeQuant takes float32, and this tensor is {values.dtype}. Cast it to float32.")
    return eigen.flush_denormals(values)


def _matching_gradients(gradients: Any, x: Any) -> Array:
    upstream = np.asarray(gradients, np.float32)
    if upstream.shape != np.shape(x):
        raise UsageError(f"The gradients are {upstream.shape} and the values {np.shape(x)}. Give both one shape.")
    return upstream


def _require_range_shape(low: Any, high: Any, shape: tuple[int, ...]) -> tuple[Array, Array]:
    low32, high32 = _flushed_float32(low), _flushed_float32(high)
    if low32.shape != shape or high32.shape != shape:
        raise UsageError(f"The range has the shapes {low32.shape} and {high32.shape}. Both must be {shape}.")
    return low32, high32


def _last_axis_shape(values: Array) -> tuple[int]:
    if values.ndim == 0:
        raise UsageError(
            "FakeQuantWithMinMaxVarsPerChannel was given a scalar. It needs a last axis: reshape it to [1]."
        )
    return (values.shape[-1],)


def _check_fake_quant_bits(num_bits: int) -> None:
    if not FAKE_QUANT_MIN_BITS <= num_bits <= FAKE_QUANT_MAX_BITS:
        raise UsageError(
            f"num_bits is {num_bits}. FakeQuant takes {FAKE_QUANT_MIN_BITS} to {FAKE_QUANT_MAX_BITS} bits."
        )


def _check_range_attributes(low: float, high: float) -> None:
    if not _flushed_float32(low) < _flushed_float32(high):
        raise UsageError(f"The range is {low} to {high}. FakeQuantWithMinMaxArgs needs a minimum below its maximum.")
