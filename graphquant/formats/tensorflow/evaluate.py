"""The few pure operations that make weights out of weights, in numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.ir import Op

__all__ = ["evaluate"]

Array = npt.NDArray[Any]
Arrays = list[Array]

MAX_ELEMENTS: Final = 1 << 26
"""Largest result: broadcasting may make much out of little, and a hostile model must not fill memory."""


def evaluate(op: Op, inputs: Arrays) -> Arrays | None:
    """The outputs of `op` for `inputs`; None if the operation is not in the table or does not take such inputs."""
    function = _TABLE.get(op.type)
    if function is None:
        return None
    try:
        with np.errstate(all="ignore"):
            outputs = function(op, inputs)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, np.exceptions.AxisError):
        return None  # a damaged node; TensorFlow would refuse it too
    return None if any(output.size > MAX_ELEMENTS for output in outputs) else outputs


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[Op, Arrays], Arrays]:
    def run(_op: Op, inputs: Arrays) -> Arrays:
        one, other = inputs
        if one.dtype != other.dtype or int(np.prod(np.broadcast_shapes(one.shape, other.shape))) > MAX_ELEMENTS:
            raise ValueError
        return [np.asarray(function(one, other)).astype(one.dtype, copy=False)]

    return run


def _unary(function: Callable[[Array], Array]) -> Callable[[Op, Arrays], Arrays]:
    return lambda _op, inputs: [np.asarray(function(inputs[0])).astype(inputs[0].dtype, copy=False)]


def _divide(one: Array, other: Array) -> Array:
    if one.dtype.kind in "iu":
        raise TypeError
    return np.divide(one, other)


def _rsqrt(x: Array) -> Array:
    return np.divide(np.ones((), x.dtype), np.sqrt(x))


def _cast(op: Op, inputs: Arrays) -> Arrays:
    name = str(op.attrs["DstT"])
    return [inputs[0].astype(np.dtype(getattr(ml_dtypes, name, name)))]


def _reshape(_op: Op, inputs: Arrays) -> Arrays:
    return [inputs[0].reshape(_ints(inputs[1]))]


def _squeeze(op: Op, inputs: Arrays) -> Arrays:
    axes = tuple(op.attrs.get("squeeze_dims") or ())
    return [np.squeeze(inputs[0], axes or None)]


def _strided_slice(op: Op, inputs: Arrays) -> Arrays:
    x, begin, end, strides = inputs[0], *(_ints(value) for value in inputs[1:4])
    masks = {
        name: int(op.attrs.get(f"{name}_mask", 0)) for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    index: list[Any] = []
    for i, (first, last, step) in enumerate(zip(begin, end, strides, strict=True)):
        bit = 1 << i
        if masks["ellipsis"] & bit:
            index.append(Ellipsis)
        elif masks["new_axis"] & bit:
            index.append(np.newaxis)
        elif masks["shrink_axis"] & bit:
            index.append(first)
        else:
            index.append(slice(None if masks["begin"] & bit else first, None if masks["end"] & bit else last, step))
    return [x[tuple(index)]]


def _slice(_op: Op, inputs: Arrays) -> Arrays:
    x, begin, size = inputs[0], _ints(inputs[1]), _ints(inputs[2])
    return [x[tuple(slice(b, None if s == -1 else b + s) for b, s in zip(begin, size, strict=True))]]


def _split(op: Op, inputs: Arrays) -> Arrays:
    parts = int(op.attrs["num_split"])
    if not 0 < parts <= inputs[1].size:
        raise ValueError
    return np.split(inputs[1], parts, axis=int(inputs[0]))


def _split_v(_op: Op, inputs: Arrays) -> Arrays:
    x, sizes, axis = inputs[0], _ints(inputs[1]), int(inputs[2])
    known = sum(size for size in sizes if size >= 0)
    whole = [size if size >= 0 else x.shape[axis] - known for size in sizes]
    return np.split(x, np.cumsum(whole)[:-1], axis=axis)


def _ints(value: Array) -> list[int]:
    return [int(item) for item in value.reshape(-1)]


_TABLE: Final[dict[str, Callable[[Op, Arrays], Arrays]]] = {
    "Add": _binary(np.add),
    "AddV2": _binary(np.add),
    "Sub": _binary(np.subtract),
    "Mul": _binary(np.multiply),
    "RealDiv": _binary(_divide),
    "Maximum": _binary(np.maximum),
    "Minimum": _binary(np.minimum),
    "Neg": _unary(np.negative),
    "Sqrt": _unary(np.sqrt),
    "Rsqrt": _unary(_rsqrt),
    "Square": _unary(np.square),
    "Cast": _cast,
    "Reshape": _reshape,
    "Transpose": lambda _op, inputs: [np.transpose(inputs[0], _ints(inputs[1]))],
    "Squeeze": _squeeze,
    "ExpandDims": lambda _op, inputs: [np.expand_dims(inputs[0], int(inputs[1]))],
    "Slice": _slice,
    "StridedSlice": _strided_slice,
    "ConcatV2": lambda _op, inputs: [np.concatenate(inputs[:-1], axis=int(inputs[-1]))],
    "Pack": lambda op, inputs: [np.stack(inputs, axis=int(op.attrs.get("axis", 0)))],
    "Split": _split,
    "SplitV": _split_v,
}
