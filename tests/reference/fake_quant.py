"""TensorFlow's FakeQuantWithMinMax ops and their gradients in numpy, bit for bit as its CPU kernels.

Values halfway between two steps round up. float32 only. Source: tensorflow/core/kernels/fake_quant_ops_functor.h,
which the TensorFlow wheel contains, and the public fake_quant_ops.cc.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from reference import eigen

from graphquant.errors import UsageError
from graphquant.numerics.tf_ranges import NudgedRange, flush_denormals, flushed_float32, nudge_range

if TYPE_CHECKING:
    from graphquant.numerics import Array


def fake_quant_with_args(
    x: Any, *, low: float = -6.0, high: float = 6.0, num_bits: int = 8, narrow_range: bool = False
) -> Array:
    """Compute FakeQuantWithMinMaxArgs, whose range is in attributes.

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
    """Compute FakeQuantWithMinMaxArgsGradient: gradients pass where `x` is within the nudged range.

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
    """Compute FakeQuantWithMinMaxVars; zeros for a range of (0, 0).

    Unlike `fake_quant_with_args` it divides by the step, and takes a range with min >= max, NaN or infinity without
    complaint: what comes out then is of no use, but the same here.

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
    """Compute FakeQuantWithMinMaxVarsGradient.

    Gradients pass where `x` is within the nudged range; those below it are summed for `low`, those above for `high`.
    For a range of (0, 0) all pass, and `low` and `high` get 0. The order of the sums is TensorFlow's on one thread;
    see `reference.eigen`.

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
    """Compute FakeQuantWithMinMaxVarsPerChannel: one range per channel of the last axis.

    It multiplies by the steps per unit, as `fake_quant_with_args` does, so its bits can differ from those of
    `fake_quant_with_vars`.

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
    """Compute FakeQuantWithMinMaxVarsPerChannelGradient: `fake_quant_with_vars_gradient` for each last-axis channel.

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


def _columnwise_gradients(
    upstream: Array, values: Array, low: Array, high: Array, *, num_bits: int, narrow_range: bool
) -> tuple[Array, Array, Array]:
    """Return the gradients of (n, C) values and of their ranges (C,)."""
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
    """Round `values` to the nearest steps within the nudged range."""
    half = np.float32(0.5)
    with np.errstate(all="ignore"):
        zero_step = np.floor(flush_denormals(-nudged.low * nudged.inverse_scale) + half)
        clipped = eigen.eigen_max(eigen.eigen_min(values, nudged.high), nudged.low)
        shifted = flush_denormals(clipped - nudged.low)
        position = flush_denormals(shifted / nudged.scale if divide else shifted * nudged.inverse_scale)
        return np.asarray(flush_denormals(np.floor(flush_denormals(position - zero_step) + half) * nudged.scale))


def _mask_gradients(upstream: Array, mask: Array) -> Array:
    """Multiply gradients by 1 or 0. An infinite gradient that does not pass becomes NaN."""
    with np.errstate(all="ignore"):
        return np.asarray(flush_denormals(flush_denormals(upstream) * mask.astype(np.float32)))


def _require_float32(x: Any) -> Array:
    """Return `x` without denormals."""
    values = np.asarray(x)
    if values.dtype != np.float32:
        raise UsageError(f"FakeQuant takes float32, and this tensor is {values.dtype}. Cast it to float32.")
    return flush_denormals(values)


def _matching_gradients(gradients: Any, x: Any) -> Array:
    upstream = np.asarray(gradients, np.float32)
    if upstream.shape != np.shape(x):
        raise UsageError(f"The gradients are {upstream.shape} and the values {np.shape(x)}. Give both one shape.")
    return upstream


def _require_range_shape(low: Any, high: Any, shape: tuple[int, ...]) -> tuple[Array, Array]:
    low32, high32 = flushed_float32(low), flushed_float32(high)
    if low32.shape != shape or high32.shape != shape:
        raise UsageError(f"The range has the shapes {low32.shape} and {high32.shape}. Both must be {shape}.")
    return low32, high32


def _last_axis_shape(values: Array) -> tuple[int]:
    if values.ndim == 0:
        raise UsageError(
            "FakeQuantWithMinMaxVarsPerChannel was given a scalar. It needs a last axis: reshape it to [1]."
        )
    return (values.shape[-1],)


def _check_range_attributes(low: float, high: float) -> None:
    if not flushed_float32(low) < flushed_float32(high):
        raise UsageError(f"The range is {low} to {high}. FakeQuantWithMinMaxArgs needs a minimum below its maximum.")
