"""Affine quantization in numpy: ranges, scales and zero points, and what QuantizeLinear and DequantizeLinear compute.

    x ~ (q - zero_point) * scale,    q = clamp(round(x / scale) + zero_point, low, high)

with round to nearest, ties to even, and x / scale in float32: the definition of ONNX QuantizeLinear (opset 13 and
above) and of TFLite's quantized tensors (Jacob et al. 2018, "Quantization and Training of Neural Networks for
Efficient Integer-Arithmetic-Only Inference", section 2.1). With a float8 type there is no zero point, and rounding is
to its values instead of whole numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.errors import InternalError, UsageError
from graphquant.numerics.blocks import rows_at_a_time, spread
from graphquant.numerics.types import Array, FloatType, QType

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""Scales below the smallest normal float32 are flushed to zero by kernels, so none is ever chosen."""

LARGEST_VALUE = float(np.finfo(np.float32).max)
"""No scale is chosen with which a quantized value would stand for more: kernels would make it infinite."""


EXACT_BITS = 16
"""Widest type whose quantized values and zero points float32 and int32 hold, with all their sums and differences."""


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """Real numbers from `low` to `high`: float64 scalars, (C,) for one range per channel, or one per block."""

    low: Array
    high: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", np.asarray(self.low, np.float64))
        object.__setattr__(self, "high", np.asarray(self.high, np.float64))
        if self.low.shape != self.high.shape:
            raise InternalError(f"a Range of shapes {self.low.shape} and {self.high.shape} was made; they must agree.")
        if not (np.isfinite(self.low).all() and np.isfinite(self.high).all() and (self.low <= self.high).all()):
            raise InternalError("a Range with low > high or without finite ends was made; its maker must refuse it.")

    def union(self, other: Range) -> Range:
        """The smallest range that holds both."""
        return Range(np.minimum(self.low, other.low), np.maximum(self.high, other.high))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Range):
            return NotImplemented
        return np.array_equal(self.low, other.low) and np.array_equal(self.high, other.high)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QParams:
    """How a tensor is quantized.

    Attributes:
        scale: float32, () or (C,), or with `block` of the tensor's rank; positive.
        zero_point: int32, the shape of `scale`.
        type: The type of the quantized values.
        narrow: Whether the most negative value is left out.
        axis: The channel axis if `scale` is (C,), the axis of the blocks if there are any, else None.
        block: How many elements along `axis` have one scale; None where there are no blocks.
        given: The range that an op is told as it stands, of which it makes `scale` and `zero_point` itself; else None.
    """

    scale: Array
    zero_point: Array
    type: QType
    narrow: bool = False
    axis: int | None = None
    block: int | None = None
    given: Range | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", np.asarray(self.scale, np.float32))
        object.__setattr__(self, "zero_point", np.asarray(self.zero_point, np.int32))
        fits = self.axis is not None if self.scale.ndim else self.axis is None
        if self.scale.shape != self.zero_point.shape or not fits or (self.scale.ndim > 1 and self.block is None):
            raise InternalError("QParams whose scale, zero point, axis and block do not fit each other were made.")
        if not (np.isfinite(self.scale).all() and (self.scale > 0).all()):
            raise InternalError("QParams with a scale that is not positive and finite were made.")

    @property
    def range(self) -> Range:
        """The float64 range that `scale` and `zero_point` stand for. It is made when asked for: blocks are many."""
        low, high = self.type.limits(narrow=self.narrow)
        wide, zero = self.scale.astype(np.float64), self.zero_point.astype(np.float64)
        return Range((low - zero) * wide, (high - zero) * wide)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """How a tensor is quantized whose range is that of the values in each run, so that there is no scale to tell.

    Attributes:
        type: The type of the quantized values.
        narrow: Whether the most negative value is left out.
        axis: The channel axis if each channel has its own range, else None.
    """

    type: QType
    narrow: bool = False
    axis: int | None = None


def choose(
    observed: Range,
    dtype: QType,
    *,
    symmetric: bool,
    narrow: bool = False,
    power_of_two: bool = False,
    axis: int | None = None,
    block: int | None = None,
) -> QParams:
    """Scale and zero point for values in `observed`.

    The range is widened to hold 0, so that 0.0 is exact. A symmetric type has zero point 0 (signed) or the middle
    (unsigned) and covers the larger magnitude; an asymmetric one covers [low, high] up to the half step by which its
    zero point is rounded. The scale is computed in float64 and rounded to float32 once. A power-of-two scale is the
    smallest that covers the range. A float8 type is always symmetric. Whatever the range, each quantized value stands
    for a finite float32.
    """
    qmin, qmax = dtype.limits(narrow=narrow)
    low, high = np.minimum(observed.low, 0.0), np.maximum(observed.high, 0.0)
    middle = dtype.middle
    symmetric = symmetric or isinstance(dtype, FloatType)
    if symmetric:
        scale = np.maximum(high / (qmax - middle), low / (qmin - middle))
    else:
        scale = high / (qmax - qmin) - low / (qmax - qmin)  # not high - low, which can overflow
    scale = _round(np.where(scale > 0, np.maximum(scale, SMALLEST_SCALE), 1.0), power_of_two=power_of_two)
    if symmetric:
        zero_point = np.broadcast_to(np.int32(middle), low.shape)  # takes no memory, however many blocks there are
        farthest = np.array(max(middle - qmin, qmax - middle), np.float64)
    else:
        zero_point = np.clip(np.rint(qmin - low / scale), qmin, qmax)
        farthest = np.maximum(zero_point - qmin, qmax - zero_point)
    largest = LARGEST_VALUE / farthest
    if (scale > largest).any():
        scale = np.minimum(scale, _round(largest, power_of_two=power_of_two, down=True))
    return from_scale(scale, zero_point, dtype, narrow=narrow, axis=axis, block=block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a scheme can represent, but for the scale: all that picking a range depends on.

    Attributes:
        type: The type of the quantized values.
        symmetric: Whether the zero point is fixed.
        narrow: Whether the type's most negative value is left out.
        power_of_two: Whether scales are powers of two.
    """

    type: QType
    symmetric: bool
    narrow: bool = False
    power_of_two: bool = False

    def choose(self, observed: Range, *, axis: int | None = None, block: int | None = None) -> QParams:
        """Scale and zero point for values in `observed`; see `choose`."""
        return choose(
            observed,
            self.type,
            symmetric=self.symmetric,
            narrow=self.narrow,
            power_of_two=self.power_of_two,
            axis=axis,
            block=block,
        )


def _round(scale: Array, *, power_of_two: bool, down: bool = False) -> Array:
    """Float64 `scale` as the nearest float32, or the next power of two that is not smaller; `down`: none larger."""
    if power_of_two:
        mantissa, exponent = np.frexp(scale)
        return np.asarray(np.ldexp(1.0, exponent - (down | (mantissa == 0.5))))  # noqa: PLR2004  # frexp's own lower end
    with np.errstate(over="ignore"):
        nearest = scale.astype(np.float32).astype(np.float64)
    if not down:
        return nearest
    return np.where(nearest > scale, np.nextafter(nearest.astype(np.float32), np.float32(0)), nearest)


def halved(params: QParams) -> QParams:
    """The nearest params with scales that float16 can hold.

    Raises:
        UsageError: One is too large or too small for that.
    """
    with np.errstate(over="ignore"):
        scale = params.scale.astype(np.float16)
    if not (np.isfinite(scale).all() and (scale >= np.finfo(np.float16).smallest_normal).all()):
        raise UsageError("its scale does not fit float16, the type of the tensor; convert the model to float32 first")
    zero = params.zero_point
    return from_scale(
        scale.astype(np.float32), zero, params.type, narrow=params.narrow, axis=params.axis, block=params.block
    )


def from_scale(
    scale: Array,
    zero_point: Array,
    dtype: QType,
    *,
    narrow: bool = False,
    axis: int | None = None,
    block: int | None = None,
) -> QParams:
    """QParams for a known scale and zero point."""
    return QParams(scale=scale, zero_point=zero_point, type=dtype, narrow=narrow, axis=axis, block=block)


def over(values: Array, params: QParams, shape: tuple[int, ...]) -> Array:
    """Scales, zero points or bounds of `params` shaped to broadcast over a tensor of `shape`."""
    if params.block is not None and params.axis is not None:
        return spread(values, params.axis, params.block, shape)
    return along(values, params.axis, len(shape))


def along(values: Array, axis: int | None, ndim: int) -> Array:
    """Per-channel `values` (C,) shaped to broadcast along `axis` of a tensor with `ndim` axes; a scalar as it is."""
    if axis is None or values.ndim == 0:
        return values
    shape = [1] * ndim
    shape[axis] = -1
    return values.reshape(shape)


def quantize(x: Array, params: QParams) -> Array:
    """`x` (float, any shape) as integers, int32, of the same shape; what ONNX QuantizeLinear computes.

    NaN becomes the smallest value, as onnxruntime makes it on x86. With a float8 type the values are of that, held as
    float32, and NaN stays.
    """
    steps = _steps(x, params)
    return steps if isinstance(params.type, FloatType) else steps.astype(np.int32)


def _steps(x: Array, params: QParams) -> Array:
    """The same as floats."""
    seen = _seen(x.shape, params)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        steps = np.asarray(np.asarray(x, np.float32).reshape(seen) / _fit(params.scale, params, x.shape))
    if isinstance(params.type, FloatType):
        return params.type.round(steps).reshape(x.shape)
    np.rint(steps, out=steps)
    # In float32 a sum is exact or far beyond 16 bits.
    steps = steps.astype(np.float32 if params.type.bits <= EXACT_BITS else np.float64, copy=False)
    steps += _fit(params.zero_point, params, x.shape).astype(steps.dtype)
    qmin, qmax = params.type.limits(narrow=params.narrow)
    np.fmax(steps, qmin, out=steps)  # which takes the number where one is NaN
    np.minimum(steps, qmax, out=steps)
    return steps.reshape(x.shape)


def stored(x: Array, params: QParams, dtype: np.dtype[Any]) -> Array:
    """`quantize(x, params)` as values of `dtype`, made some rows at a time: a weight may fill much of the memory."""
    result = np.empty(x.shape, dtype)
    plain = dtype.kind in "iu"  # of numpy's own, which floats become without a step between
    for place, part in slabs(x.shape, params):
        result[place] = _steps(x[place], part) if plain else quantize(x[place], part).astype(dtype)
    return result


def slabs(shape: tuple[int, ...], params: QParams) -> Iterator[tuple[Any, QParams]]:
    """Where the parts of a tensor are that are worked on at a time, and what each is quantized with."""
    if not shape:
        yield ..., params
        return
    step = rows_at_a_time(shape, params.block or 1)
    for start in range(0, shape[0], step):
        yield slice(start, start + step), _rows(params, start, step)


def _rows(params: QParams, start: int, count: int) -> QParams:
    """What `count` rows of a tensor are quantized with: of the scales along its first axis those that are theirs."""
    if params.axis is None or (params.block is None and params.axis):
        return params
    size = params.block if params.block is not None and params.axis == 0 else 1
    here = slice(start // size, -(-(start + count) // size))
    return from_scale(
        params.scale[here],
        params.zero_point[here],
        params.type,
        narrow=params.narrow,
        axis=params.axis,
        block=params.block,
    )


def dequantize(q: Array, params: QParams) -> Array:
    """Integers or float8 values `q` as float32, of the same shape; what ONNX DequantizeLinear computes."""
    seen, scale = _seen(q.shape, params), _fit(params.scale, params, q.shape)
    if isinstance(params.type, FloatType):
        return np.asarray(np.asarray(q, np.float32).reshape(seen) * scale).reshape(q.shape)
    wide = np.int32 if params.type.bits <= EXACT_BITS else np.int64
    steps = q.astype(wide).reshape(seen) - _fit(params.zero_point, params, q.shape)
    return np.asarray(steps.astype(np.float32) * scale).astype(np.float32, copy=False).reshape(q.shape)


def _seen(shape: tuple[int, ...], params: QParams) -> tuple[int, ...]:
    """The shape in which what `_fit` gives broadcasts: that of the tensor, or whole blocks on an axis of their own."""
    if params.block is None or params.axis is None or shape[params.axis] % params.block:
        return shape
    return (*shape[: params.axis], shape[params.axis] // params.block, params.block, *shape[params.axis + 1 :])


def _fit(values: Array, params: QParams, shape: tuple[int, ...]) -> Array:
    """Scales or zero points shaped to broadcast over a tensor of `shape` in its `_seen` form."""
    if params.block is not None and params.axis is not None and values.ndim and not shape[params.axis] % params.block:
        return np.expand_dims(values, params.axis + 1)
    return over(values, params, shape)
