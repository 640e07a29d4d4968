"""Types of quantized values: integers of any width, and types of ONNX with 4 or 8 bits that are floats."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt

from graphquant.errors import InternalError, ModelError, UsageError

Array = npt.NDArray[Any]
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

MIN_BITS, MAX_BITS = 2, 32


@dataclass(frozen=True, slots=True)
class IntType:
    """An integer type of `bits` bits."""

    bits: int
    signed: bool

    @property
    def name(self) -> str:
        """The numpy-like name, `int8`."""
        return f"{'int' if self.signed else 'uint'}{self.bits}"

    def limits(self, *, narrow: bool = False) -> tuple[int, int]:
        """Return the smallest and largest quantized value; `narrow` excludes the most negative one of a signed type."""
        if self.signed:
            return -(1 << (self.bits - 1)) + narrow, (1 << (self.bits - 1)) - 1
        return 0, (1 << self.bits) - 1

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point of a symmetric type: 0, or the middle of an unsigned type."""
        return 0 if self.signed else 1 << (self.bits - 1)

    @property
    def container(self) -> str:
        """The smallest type of 4, 8, 16 or 32 bits that contains it."""
        bits = max(4, 1 << (self.bits - 1).bit_length())
        return f"{'int' if self.signed else 'uint'}{bits}"

    @classmethod
    def parse(cls, name: str) -> IntType:
        """Return the type called `name`. Raises a ValueError that lists the possible names."""
        match = re.fullmatch(r"(u?)int(\d+)", name)
        max_bits = MAX_BITS - 1 if match and match[1] else MAX_BITS  # quantized values are stored as int32
        if not match or not MIN_BITS <= int(match[2]) <= max_bits:
            raise ValueError(f"{name!r} is not an integer type; use int2 to int32 or uint2 to uint31")
        return cls(int(match[2]), not match[1])


@dataclass(frozen=True, slots=True)
class FloatType:
    """A float type of 4 or 8 bits. Its steps grow with the values, and 0.0 is always exact.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", Rouhani et al. 2023, "OCP Microscaling Formats
    (MX) Specification", and the ONNX pages on float8 and float4.
    """

    name: str
    signed: ClassVar[bool] = True
    symmetric_zero_point: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Check the name. Raises a ValueError that lists the possible names."""
        if self.name not in FLOAT_NAMES:
            raise ValueError(f"{self.name!r} is not a float type of few bits; use {' or '.join(FLOAT_NAMES)}")

    @property
    def bits(self) -> int:
        """Width in bits."""
        return int(ml_dtypes.finfo(self.name).bits)

    def limits(self, *, narrow: bool = False) -> tuple[float, float]:  # noqa: ARG002  # as of IntType
        """Return the smallest and largest finite value."""
        largest = float(ml_dtypes.finfo(self.name).max)
        return -largest, largest

    @property
    def container(self) -> str:
        """The type itself."""
        return self.name

    def round_values(self, x: Array) -> Array:
        """Round `x` (float32) to the nearest values of the type, ties to even, as float32 of the same shape.

        Larger values and infinity become the largest value, as with `saturate = 1` in ONNX. NaN stays NaN, except that
        4 bits have none.
        """
        low, high = self.limits()
        return np.clip(x, low, high).astype(getattr(ml_dtypes, self.name)).astype(np.float32)


FLOAT8_NAMES = ("float8_e4m3fn", "float8_e5m2")
"""The float types of 8 bits: 4 exponent bits and 3 of the mantissa up to 448, or 5 and 2 up to 57344."""

FLOAT4_NAME = "float4_e2m1fn"
"""The float type of 4 bits: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""

FLOAT_NAMES = (*FLOAT8_NAMES, FLOAT4_NAME)

QType = IntType | FloatType


@lru_cache(maxsize=256)
def parse_type(name: str) -> QType:
    """Return the type called `name`. Raises a ValueError that lists the possible names."""
    return FloatType(name) if name.startswith("float") else IntType.parse(name)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype called `name`, also of the small types of ml_dtypes. Raises a TypeError if there is none."""
    return np.dtype(getattr(ml_dtypes, name, name))


SLAB_ELEMENTS = 1 << 20  # elements of a weight that are processed at a time, which limits the size of temporary arrays
MIN_PARALLEL_ELEMENTS = 1 << 22  # number of elements from which threads process the slabs of a weight
SLAB_THREADS = min(4, os.cpu_count() or 1)


def block_scale_shape(shape: tuple[int, ...], axis: int, block: int) -> tuple[int, ...]:
    """Return the shape of the scales: the number of blocks at `axis`, of which the last may be partial."""
    return (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])


def split_blocks(value: Array, axis: int, block: int) -> Array:
    """Return the elements of each block, (number of blocks, block), in the order of the scales. Pads with zeros."""
    padding = -value.shape[axis] % block
    if padding:
        value = np.pad(value, [(0, padding if dim == axis else 0) for dim in range(value.ndim)])
    blocks = value.reshape(*value.shape[:axis], -1, block, *value.shape[axis + 1 :])
    return np.moveaxis(blocks, axis + 1, -1).reshape(-1, block)


def row_slices(shape: tuple[int, ...], multiple: int = 1, elements: int = 0) -> list[slice]:
    """Divide the rows of a tensor into slabs of about `elements` elements and a multiple of `multiple` rows."""
    rows = max((elements or SLAB_ELEMENTS) * shape[0] // max(math.prod(shape), 1), 1)
    step = -(-rows // multiple) * multiple
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
"""The smallest scale that is ever chosen. Kernels flush scales below the smallest normal float32 to zero."""

LARGEST_VALUE = float(np.finfo(np.float32).max)
"""The largest real value of a quantized value. Kernels would make a larger one infinite."""

EXACT_BITS = 16
"""Widest type for which float32 and int32 hold quantized values, zero points, and their sums and differences."""

SMALL_BITS = 4
"""Widest type for which int8 holds zero points, and their sums and differences with limits of the type."""


def _holds_everywhere(condition: Array | bool) -> bool:
    """Return True if a condition is true everywhere. That of a scalar is not reduced, which is slow."""
    return bool(condition.all() if isinstance(condition, np.ndarray) else condition)


@dataclass(frozen=True, slots=True, eq=False)
class Range:
    """Real numbers from `low` to `high`: float64 scalars, (C,) for one range per channel, or one range per block."""

    low: Array
    high: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "low", np.asarray(self.low, np.float64))
        object.__setattr__(self, "high", np.asarray(self.high, np.float64))
        if self.low.shape != self.high.shape:
            raise InternalError(f"A Range has ends of the shapes {self.low.shape} and {self.high.shape}.")
        # Python compares floats faster than numpy compares arrays without axes.
        low, high = (self.low, self.high) if self.low.ndim else (float(self.low), float(self.high))
        if not _holds_everywhere((-np.inf < low) & (low <= high) & (high < np.inf)):
            raise InternalError("A Range has low > high or infinite ends. Its creator must check them.")

    def union(self, second: Range) -> Range:
        """Return the smallest range that contains both."""
        return Range(np.minimum(self.low, second.low), np.maximum(self.high, second.high))

    def __eq__(self, value: object) -> bool:
        if not isinstance(value, Range):
            return NotImplemented
        return np.array_equal(self.low, value.low) and np.array_equal(self.high, value.high)

    __hash__ = None  # type: ignore[assignment]  # arrays have no hash


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QParams:
    """Scale, zero point and type of a quantized tensor."""

    scale: Array  # float32, () or (C,), or with `block` of the tensor's rank; positive
    zero_point: Array  # int32, or int8 for blocks of few bits, of which there can be many; the shape of `scale`
    type: QType  # the type of the quantized values
    narrow: bool = False  # excludes the most negative value
    axis: int | None = None  # the channel axis if `scale` is (C,), the axis of the blocks if there are any, else None
    block: int | None = None  # Number of elements along `axis` that share one scale; None without blocks.
    # A range that is passed to an op unchanged, which computes `scale` and `zero_point` from it; else None.
    op_range: Range | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", np.asarray(self.scale, np.float32))
        zero_point = np.asarray(self.zero_point)
        is_small = self.block is not None and self.type.bits <= SMALL_BITS and zero_point.dtype == np.int8
        object.__setattr__(self, "zero_point", zero_point if is_small else zero_point.astype(np.int32, copy=False))
        same_shape = self.scale.shape == self.zero_point.shape
        if not same_shape or bool(self.scale.ndim) == (self.axis is None) or (self.scale.ndim > 1 and not self.block):
            raise InternalError("Scale, zero point, axis and block of QParams do not agree.")
        if not _holds_everywhere((self.scale > 0) & (self.scale < np.inf)):
            raise InternalError("QParams have a scale that is not positive and finite.")

    @property
    def range(self) -> Range:
        """The float64 range of `scale` and `zero_point`. It is not stored, since there can be many blocks."""
        low, high = self.type.limits(narrow=self.narrow)
        scale64, zero = self.scale.astype(np.float64), self.zero_point.astype(np.float64)
        return Range((low - zero) * scale64, (high - zero) * scale64)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicQParams:
    """Type of a tensor whose range is that of its values in each run, so that its scale is not known in advance.

    `axis` is the channel axis if each channel has its own range; `narrow` excludes the most negative value.
    """

    type: QType
    narrow: bool = False
    axis: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationGrid:
    """The quantized values that a scheme can represent, up to the scale. Observers choose a range for a grid.

    `symmetric` fixes the zero point; `narrow` excludes the most negative value of the type. Scales are powers of two if
    `power_of_two`, or products of one of the tensor and a float8_e4m3fn number if `float8_scales`.
    """

    type: QType
    symmetric: bool
    narrow: bool = False
    power_of_two: bool = False
    float8_scales: bool = False

    def qparams(self, observed: Range, *, axis: int | None = None, block: int | None = None) -> QParams:
        """Choose scale and zero point for values in `observed`.

        The range is widened to contain 0, so that 0.0 is exact. A symmetric type has zero point 0 (signed) or the
        middle (unsigned) and covers the larger magnitude. An asymmetric type covers [low, high] up to the half step by
        which its zero point is rounded. The scale is computed in float64 and rounded to float32 once. A power-of-two
        scale is the smallest that covers the range. A float8 type is always symmetric. For any range, each quantized
        value represents a finite float32.
        """
        qmin, qmax = self.type.limits(narrow=self.narrow)
        low, high = np.minimum(observed.low, 0.0), np.maximum(observed.high, 0.0)
        symmetric_zero = self.type.symmetric_zero_point
        symmetric = self.symmetric or isinstance(self.type, FloatType)
        if symmetric:
            scale = np.maximum(high / (qmax - symmetric_zero), low / (qmin - symmetric_zero))
        else:
            scale = high / (qmax - qmin) - low / (qmax - qmin)  # not high - low, which can overflow
        scale = np.where(scale > 0, np.maximum(scale, SMALLEST_SCALE), 1.0)
        scale = _round_scale(scale, power_of_two=self.power_of_two)
        if symmetric:
            zero_point = np.broadcast_to(np.int32(symmetric_zero), low.shape)  # needs no memory for many blocks
            farthest_step = np.array(max(symmetric_zero - qmin, qmax - symmetric_zero), np.float64)
        else:
            zero_point = np.clip(np.rint(qmin - low / scale), qmin, qmax)
            farthest_step = np.maximum(zero_point - qmin, qmax - zero_point)
        largest_scale = LARGEST_VALUE / farthest_step
        if (scale > largest_scale).any():
            scale = np.minimum(scale, _round_scale(largest_scale, power_of_two=self.power_of_two, round_down=True))
        if self.float8_scales:
            numbers, tensor_scale = split_block_scales(scale)
            scale = numbers.astype(np.float32) * tensor_scale
        return qparams_from_scale(scale, zero_point, self.type, narrow=self.narrow, axis=axis, block=block)


def split_block_scales(scale: Array) -> tuple[Array, np.float32]:
    """Return scales as float8_e4m3fn numbers and a power of two for the tensor, so that their product is nearest.

    The largest number is at least half of the largest float8_e4m3fn, so that the products of the result are exact, and
    split into equal products again.
    """
    number_type = FloatType("float8_e4m3fn")
    exponent = np.ceil(np.log2(np.float64(scale.max()) / number_type.limits()[1]))
    tensor_scale = np.float32(max(np.ldexp(1.0, int(exponent)), SMALLEST_SCALE))
    numbers = number_type.round_values((scale / np.float64(tensor_scale)).astype(np.float32))
    smallest = np.float32(ml_dtypes.finfo(number_type.name).smallest_subnormal)
    return np.maximum(numbers, smallest).astype(getattr(ml_dtypes, number_type.name)), tensor_scale


def _round_scale(scale: Array, *, power_of_two: bool, round_down: bool = False) -> Array:
    """Round a float64 scale to the nearest float32, or up to a power of two; `round_down` rounds down."""
    if power_of_two:
        mantissa, exponent = np.frexp(scale)
        return np.asarray(np.ldexp(1.0, exponent - (round_down | (mantissa == 0.5))))  # noqa: PLR2004  # frexp's smallest mantissa
    with np.errstate(over="ignore"):
        nearest = scale.astype(np.float32).astype(np.float64)
    if not round_down:
        return nearest
    return np.where(nearest > scale, np.nextafter(nearest.astype(np.float32), np.float32(0)), nearest)


def round_scale_to_float16(params: QParams) -> QParams:
    """Return the nearest params whose scales float16 can represent.

    Raises a UsageError if a scale is too large or too small for float16.
    """
    with np.errstate(over="ignore"):
        scale = params.scale.astype(np.float16)
    if not (np.isfinite(scale).all() and (scale >= np.finfo(np.float16).smallest_normal).all()):
        raise UsageError("its scale does not fit into float16, the tensor's type; convert the model to float32 first")
    return replace(params, scale=scale, op_range=None)


def qparams_from_scale(
    scale: Array,
    zero_point: Array,
    dtype: QType,
    *,
    narrow: bool = False,
    axis: int | None = None,
    block: int | None = None,
) -> QParams:
    """Return the QParams of a known scale and zero point."""
    return QParams(scale=scale, zero_point=zero_point, type=dtype, narrow=narrow, axis=axis, block=block)


def broadcast_to_tensor(values: Array, params: QParams, shape: tuple[int, ...]) -> Array:
    """Reshape scales, zero points or bounds of `params` to broadcast over a tensor of `shape`."""
    if params.block is not None and params.axis is not None and values.ndim:
        repeated = np.repeat(values, params.block, params.axis)
        return repeated[(slice(None),) * params.axis + (slice(shape[params.axis]),)]  # the last block may be partial
    return broadcast_along_axis(values, params.axis, len(shape))


def broadcast_along_axis(values: Array, axis: int | None, ndim: int) -> Array:
    """Reshape per-channel `values` (C,) to broadcast along `axis` of `ndim` axes. A scalar is unchanged."""
    if axis is None or values.ndim == 0:
        return values
    shape = [1] * ndim
    shape[axis] = -1
    return values.reshape(shape)


def quantize(x: Array, params: QParams) -> Array:
    """Quantize `x` (float, any shape) to int32 of the same shape, as ONNX QuantizeLinear does.

    NaN becomes the smallest value, as in onnxruntime on x86. For a float8 type, the result has float8 values as
    float32, and NaN stays NaN.
    """
    steps = _quantize_as_float(x, params)
    return steps if isinstance(params.type, FloatType) else steps.astype(np.int32)


def _quantize_as_float(x: Array, params: QParams) -> Array:
    """Return the values of `quantize` as floats."""
    blocked_shape = _blocked_shape(x.shape, params)
    scale = _broadcast_to_blocked_shape(params.scale, params, x.shape)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        steps = np.asarray(np.asarray(x, np.float32).reshape(blocked_shape) / scale)
    if isinstance(params.type, FloatType):
        return params.type.round_values(steps).reshape(x.shape)
    np.rint(steps, out=steps)
    # A sum in float32 is exact, or so large that it is clipped anyway.
    steps = steps.astype(np.float32 if params.type.bits <= EXACT_BITS else np.float64, copy=False)
    steps += _broadcast_to_blocked_shape(params.zero_point, params, x.shape).astype(steps.dtype)
    qmin, qmax = params.type.limits(narrow=params.narrow)
    np.fmax(steps, qmin, out=steps)  # unlike np.maximum, returns the number if the other operand is NaN
    np.minimum(steps, qmax, out=steps)
    return steps.reshape(x.shape)


def quantize_to_dtype(
    read_rows: Callable[[Any], Array], shape: tuple[int, ...], params: QParams, dtype: np.dtype[Any]
) -> Array:
    """Quantize a tensor of `shape` to values of `dtype`, some rows at a time; `read_rows` returns those of a slice."""
    result = np.empty(shape, dtype)
    # Integers of ml_dtypes cannot be cast from floats directly.
    is_small = dtype.kind == "V" and isinstance(params.type, IntType)

    def quantize_slab(slab: tuple[Any, QParams]) -> None:
        rows, row_params = slab
        steps = _quantize_as_float(read_rows(rows), row_params)
        result[rows] = steps.astype(np.int8 if params.type.signed else np.uint8) if is_small else steps

    map_slabs(quantize_slab, iter_slabs(shape, params), result.size)
    return result


def map_slabs(compute: Callable[[ItemT], ResultT], slabs: Iterable[ItemT], elements: int) -> list[ResultT]:
    """Return the results for slabs of a tensor, in threads if it has many `elements`, because numpy holds no lock."""
    from concurrent.futures import ThreadPoolExecutor

    if elements < MIN_PARALLEL_ELEMENTS:
        return [*map(compute, slabs)]
    with ThreadPoolExecutor(SLAB_THREADS) as pool:
        return [*pool.map(compute, slabs)]


def iter_slabs(shape: tuple[int, ...], params: QParams) -> Iterator[tuple[Any, QParams]]:
    """Yield indices and params of the slabs of a tensor that are processed at a time."""
    if not shape:
        yield ..., params
        return
    # Scales lie along the first axis if there is one for each channel or block of it, or one for each block of a row.
    has_row_scales = params.axis is not None and (params.block is not None or params.axis == 0)
    rows_per_scale = params.block if params.block is not None and params.axis == 0 else 1
    for slab in row_slices(shape, params.block or 1):
        row_params = params
        if has_row_scales:
            rows = slice(slab.start // rows_per_scale, -(-slab.stop // rows_per_scale))
            row_params = replace(params, scale=params.scale[rows], zero_point=params.zero_point[rows], op_range=None)
        yield slab, row_params


def dequantize(q: Array, params: QParams) -> Array:
    """Dequantize integers or float8 values `q` to float32 of the same shape, as ONNX DequantizeLinear does.

    Raises a ModelError if the scales do not fit the shape, as in a damaged model.
    """
    if params.axis is not None and params.scale.ndim:
        sizes, shapes = list(q.shape), set[tuple[int, ...]]()
        if -q.ndim <= params.axis < q.ndim:
            sizes[params.axis] = -(-sizes[params.axis] // (params.block or 1))
            shapes = {tuple(sizes), (sizes[params.axis],), (1,)}
        if params.scale.shape not in shapes:
            mismatch = f"axis {params.axis} do not fit a tensor of shape {list(q.shape)}"
            raise ModelError(f"Scales of shape {list(params.scale.shape)} along {mismatch}. Export the model again.")
    blocked_shape, scale = _blocked_shape(q.shape, params), _broadcast_to_blocked_shape(params.scale, params, q.shape)
    if isinstance(params.type, FloatType):
        return np.asarray(np.asarray(q, np.float32).reshape(blocked_shape) * scale).reshape(q.shape)
    zero_point = _broadcast_to_blocked_shape(params.zero_point, params, q.shape)
    if params.type.bits <= EXACT_BITS:  # the difference is exact in float32
        steps = q.astype(np.float32).reshape(blocked_shape)
        steps -= zero_point.astype(np.float32)
    else:
        steps = (q.astype(np.int64).reshape(blocked_shape) - zero_point).astype(np.float32)
    return np.asarray(steps * scale).astype(np.float32, copy=False).reshape(q.shape)


def _blocked_shape(shape: tuple[int, ...], params: QParams) -> tuple[int, ...]:
    """Return the shape with a separate axis for whole blocks, or the shape itself if there are none."""
    if params.block is None or params.axis is None or shape[params.axis] % params.block:
        return shape
    return (*shape[: params.axis], shape[params.axis] // params.block, params.block, *shape[params.axis + 1 :])


def _broadcast_to_blocked_shape(values: Array, params: QParams, shape: tuple[int, ...]) -> Array:
    """Reshape scales or zero points to broadcast over a tensor of `shape` in its `_blocked_shape`."""
    if params.block is not None and params.axis is not None and values.ndim and not shape[params.axis] % params.block:
        return np.expand_dims(values, params.axis + 1)
    return broadcast_to_tensor(values, params, shape)
