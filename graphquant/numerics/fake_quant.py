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
from graphquant.numerics.affine import QParams, Range, from_scale

if TYPE_CHECKING:
    from graphquant.numerics.types import Array, QType

MIN_BITS, MAX_BITS = 2, 16


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steps:
    """What FakeQuant makes of a range; float32 arrays, () or (C,).

    Attributes:
        size: One step: the scale.
        per_unit: Steps per 1.0, computed from the range and not from `size`.
        zero_point: The integer that stands for 0.0, from 0 (narrow: 1) to 2^num_bits - 1.
        low: What the smallest integer stands for: the nudged minimum.
        high: What the largest integer stands for.
    """

    size: Array
    per_unit: Array
    zero_point: Array
    low: Array
    high: Array


def steps(low: Any, high: Any, *, num_bits: int, narrow_range: bool) -> Steps:
    """The steps and the zero point that FakeQuant takes for the range `low` to `high`.

    Args:
        low: Lower ends, () or (C,); used as float32.
        high: Upper ends, likewise.
        num_bits: 2 to 16.
        narrow_range: Whether the smallest integer is left out.

    Raises:
        UsageError: Bits that the kernels refuse.
    """
    _check_bits(num_bits)
    bottom, top = _float32(low), _float32(high)
    qmin, qmax = np.float32(narrow_range), np.float32((1 << num_bits) - 1)
    with np.errstate(all="ignore"):
        width = eigen.flush(top - bottom)
        size = eigen.flush(width / (qmax - qmin))
        exact = qmin - eigen.flush(bottom / size)
        zero = np.where(exact < qmin, qmin, np.where(exact > qmax, qmax, _half_away(exact)))
        zero = np.where(np.isnan(exact), np.float32(0), zero)  # what x86 makes of NaN as an integer
        return Steps(
            size=size,
            per_unit=eigen.flush((qmax - qmin) / width),
            zero_point=zero,
            low=eigen.flush((qmin - zero) * size),
            high=eigen.flush((qmax - zero) * size),
        )


def with_args(x: Any, *, low: float = -6.0, high: float = 6.0, num_bits: int = 8, narrow_range: bool = False) -> Array:
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
    values = _values(x)
    _check_attributes(low, high)
    found = steps(low, high, num_bits=num_bits, narrow_range=narrow_range)
    return _rounded(values, found, divide=False)


def with_args_gradient(
    gradients: Any, x: Any, *, low: float = -6.0, high: float = 6.0, num_bits: int = 8, narrow_range: bool = False
) -> Array:
    """What FakeQuantWithMinMaxArgsGradient gives: gradients pass where `x` is within the nudged range.

    Args:
        gradients: float32 gradients of the result, of the shape of `x`.
        x: float32, any shape.
        low: As in `with_args`.
        high: Likewise.
        num_bits: Likewise.
        narrow_range: Likewise.

    Returns:
        Gradients of `x`, in its shape.

    Raises:
        UsageError: As `with_args`, and for two shapes.
    """
    values, upstream = _values(x), _gradients(gradients, x)
    _check_attributes(low, high)
    found = steps(low, high, num_bits=num_bits, narrow_range=narrow_range)
    return _masked(upstream, (values >= found.low) & (values <= found.high))


def with_vars(x: Any, low: Any, high: Any, *, num_bits: int = 8, narrow_range: bool = False) -> Array:
    """What FakeQuantWithMinMaxVars gives; zeros for a range of (0, 0).

    Unlike `with_args` it divides by the step, and takes a range with min >= max, NaN or infinity without complaint:
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
    values = _values(x)
    bottom, top = _ends(low, high, ())
    found = steps(bottom, top, num_bits=num_bits, narrow_range=narrow_range)
    if bottom == 0 and top == 0:
        return np.zeros_like(values)
    return _rounded(values, found, divide=True)


def with_vars_gradient(
    gradients: Any, x: Any, low: Any, high: Any, *, num_bits: int = 8, narrow_range: bool = False
) -> tuple[Array, Array, Array]:
    """What FakeQuantWithMinMaxVarsGradient gives.

    Gradients pass where `x` is within the nudged range; those below it are summed for `low`, those above for `high`.
    For a range of (0, 0) all pass, and `low` and `high` get 0. The order of the sums is TensorFlow's on one thread;
    see `graphquant.numerics.eigen`.

    Args:
        gradients: float32 gradients of the result, of the shape of `x`.
        x: float32, any shape.
        low: As in `with_vars`.
        high: Likewise.
        num_bits: Likewise.
        narrow_range: Likewise.

    Returns:
        Gradients of `x`, in its shape, of `low` and of `high`, ().

    Raises:
        UsageError: As `with_vars`, and for two shapes.
    """
    values, upstream = _values(x), _gradients(gradients, x)
    bottom, top = _ends(low, high, ())
    passed, below, above = _columns(
        upstream.reshape(-1, 1),
        values.reshape(-1, 1),
        bottom.reshape(1),
        top.reshape(1),
        num_bits=num_bits,
        narrow_range=narrow_range,
    )
    return passed.reshape(values.shape), below[0], above[0]


def with_vars_per_channel(x: Any, low: Any, high: Any, *, num_bits: int = 8, narrow_range: bool = False) -> Array:
    """What FakeQuantWithMinMaxVarsPerChannel gives: one range per channel of the last axis.

    It multiplies by the steps per unit, as `with_args` does, so its bits can differ from those of `with_vars`.

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
    values = _values(x)
    bottom, top = _ends(low, high, _channels(values))
    found = steps(bottom, top, num_bits=num_bits, narrow_range=narrow_range)
    return np.where((bottom == 0) & (top == 0), np.float32(0), _rounded(values, found, divide=False))


def with_vars_per_channel_gradient(
    gradients: Any, x: Any, low: Any, high: Any, *, num_bits: int = 8, narrow_range: bool = False
) -> tuple[Array, Array, Array]:
    """What FakeQuantWithMinMaxVarsPerChannelGradient gives: `with_vars_gradient` for each channel of the last axis.

    Args:
        gradients: float32 gradients of the result, of the shape of `x`.
        x: float32, (..., C).
        low: As in `with_vars_per_channel`.
        high: Likewise.
        num_bits: Likewise.
        narrow_range: Likewise.

    Returns:
        Gradients of `x`, in its shape, of `low` and of `high`, (C,).

    Raises:
        UsageError: As `with_vars_per_channel`, and for two shapes.
    """
    values, upstream = _values(x), _gradients(gradients, x)
    channels = _channels(values)
    bottom, top = _ends(low, high, channels)
    rows = (values.size // max(channels[0], 1), *channels)
    passed, below, above = _columns(
        upstream.reshape(rows), values.reshape(rows), bottom, top, num_bits=num_bits, narrow_range=narrow_range
    )
    return passed.reshape(values.shape), below, above


def params_of(given: Range, kind: QType, *, narrow: bool = False, axis: int | None = None) -> QParams:
    """How tensors are quantized by this op if its range is `given`.

    Args:
        given: What `min` and `max` are, as float32 once they are written.
        kind: The integers, 2 to 16 bits; those of `kind` stand in the order of FakeQuant's own, which are unsigned.
        narrow: Whether the most negative one is left out; means nothing for unsigned ones.
        axis: The channel axis if the range is per channel.

    Raises:
        UsageError: Bits that the kernels refuse, or a range in which there is no step: (0, 0), say.
    """
    narrow = narrow and kind.signed
    found = steps(given.low, given.high, num_bits=kind.bits, narrow_range=narrow)
    if not (np.isfinite(found.size) & (found.size > 0)).all():
        raise UsageError(f"FakeQuant has no step in the range {given.low} to {given.high}. Give one that holds more.")
    qmin, _ = kind.limits(narrow=narrow)
    return from_scale(found.size, found.zero_point - narrow + qmin, kind, narrow=narrow, axis=axis)


def range_to_write(params: QParams) -> Range:
    """The `min` and `max` with which FakeQuant has the scale and zero point of `params`.

    Of the ranges that are off by at most one place of float32 at either end, it is the one whose scale is nearest: the
    scale itself for powers of two and most others, off in the last place for the rest; `steps` tells. Its zero point is
    that of `params` counted from the smallest integer of FakeQuant, 0 or, if narrow, 1.
    """
    qmin, qmax = params.type.limits(narrow=params.narrow)
    narrow = params.narrow and params.type.signed
    zero = params.zero_point.astype(np.float64)
    wanted = params.scale.astype(np.float64)
    ends = [_nearby(((end - zero) * wanted).astype(np.float32)) for end in (qmin, qmax)]
    pairs = list(itertools.product(*ends))
    found = [steps(*pair, num_bits=params.type.bits, narrow_range=narrow) for pair in pairs]
    size = np.stack([each.size for each in found]).astype(np.float64)
    moved = np.stack([each.zero_point != zero - qmin + narrow for each in found])
    best = np.argmin(np.where(moved, np.inf, np.abs(size - wanted)), axis=0)
    return Range(*(np.choose(best, [pair[side] for pair in pairs]) for side in (0, 1)))


def _nearby(end: Array) -> list[Array]:
    """`end` and the float32 before and after it; 0.0 stays what it is."""
    steps_away = (np.nextafter(end, np.float32(way * np.inf)) for way in (-1, 1))
    return [end, *(np.where(end == 0, end, each) for each in steps_away)]


def _columns(
    upstream: Array, values: Array, low: Array, high: Array, *, num_bits: int, narrow_range: bool
) -> tuple[Array, Array, Array]:
    """Gradients of (n, C) values and of their ranges (C,)."""
    found = steps(low, high, num_bits=num_bits, narrow_range=narrow_range)
    empty = (low == 0) & (high == 0)
    passed = _masked(upstream, (values >= found.low) & (values <= found.high))
    below, above = (
        eigen.reduce(_masked(upstream, outside), eigen.plus, 0.0)
        for outside in (values < found.low, values > found.high)
    )
    none = np.float32(0)
    return np.where(empty, upstream, passed), np.where(empty, none, below), np.where(empty, none, above)


def _rounded(values: Array, found: Steps, *, divide: bool) -> Array:
    """`values` at the nearest steps within the nudged range."""
    half = np.float32(0.5)
    with np.errstate(all="ignore"):
        zero = np.floor(eigen.flush(-found.low * found.per_unit) + half)
        kept = eigen.larger(eigen.smaller(values, found.high), found.low)
        shifted = eigen.flush(kept - found.low)
        position = eigen.flush(shifted / found.size if divide else shifted * found.per_unit)
        return np.asarray(eigen.flush(np.floor(eigen.flush(position - zero) + half) * found.size))


def _masked(upstream: Array, mask: Array) -> Array:
    """Gradients times 1 or 0: an infinite one becomes NaN where it does not pass."""
    with np.errstate(all="ignore"):
        return np.asarray(eigen.flush(eigen.flush(upstream) * mask.astype(np.float32)))


def _half_away(x: Array) -> Array:
    """C's round for x >= 0: half goes up. Unlike floor(x + 0.5) it is right for 0.49999997."""
    whole = np.floor(x)
    return whole + (x - whole >= np.float32(0.5))


def _float32(end: Any) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return eigen.flush(np.asarray(end).astype(np.float32))


def _values(x: Any) -> Array:
    """`x` without denormals."""
    values = np.asarray(x)
    if values.dtype != np.float32:
        raise UsageError(f"FakeQuant takes float32, and this tensor is {values.dtype}. Cast it to float32.")
    return eigen.flush(values)


def _gradients(gradients: Any, x: Any) -> Array:
    upstream = np.asarray(gradients, np.float32)
    if upstream.shape != np.shape(x):
        raise UsageError(f"The gradients are {upstream.shape} and the values {np.shape(x)}. Give both one shape.")
    return upstream


def _ends(low: Any, high: Any, shape: tuple[int, ...]) -> tuple[Array, Array]:
    bottom, top = _float32(low), _float32(high)
    if bottom.shape != shape or top.shape != shape:
        raise UsageError(f"The range has the shapes {bottom.shape} and {top.shape}. Both must be {shape}.")
    return bottom, top


def _channels(values: Array) -> tuple[int]:
    if values.ndim == 0:
        raise UsageError(
            "FakeQuantWithMinMaxVarsPerChannel was given a scalar. It needs a last axis: reshape it to [1]."
        )
    return (values.shape[-1],)


def _check_bits(num_bits: int) -> None:
    if not MIN_BITS <= num_bits <= MAX_BITS:
        raise UsageError(f"num_bits is {num_bits}. FakeQuant takes {MIN_BITS} to {MAX_BITS} bits.")


def _check_attributes(low: float, high: float) -> None:
    if not _float32(low) < _float32(high):
        raise UsageError(f"The range is {low} to {high}. FakeQuantWithMinMaxArgs needs a minimum below its maximum.")
