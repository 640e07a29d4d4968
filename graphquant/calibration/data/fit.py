"""Fit of an array to a model input: its key, stacking layout and dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from graphquant.calibration.data.base import MAX_FEED_BYTES
from graphquant.errors import DataError, did_you_mean
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.calibration.data.base import DataRequest, ModelInput, Shape
    from graphquant.numerics import Array


STRING_DTYPES = frozenset({"string", "str", "object"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFit:
    """Fit of an array to a model input.

    Attributes:
        input_name: Name of the input.
        label: Name of the array in messages.
        stored_dtype: dtype of the array, in native byte order.
        feed_dtype: dtype of the input.
        shape: Shape of the array. A single sample without a sample axis gets a first axis of 1.
        rows_per_feed: Number of entries along the first axis that form one feed; 0 if every feed gets the whole array.
        whole_feeds: Whether each entry is a whole feed, so that the first axis is dropped.
    """

    input_name: str
    label: str
    stored_dtype: np.dtype[Any]
    feed_dtype: np.dtype[Any]
    shape: tuple[int, ...]
    rows_per_feed: int = 0
    whole_feeds: bool = False

    @property
    def samples(self) -> int:
        """Number of feeds in the array."""
        return self.shape[0] // self.rows_per_feed

    def feed_shape(self) -> tuple[int, ...]:
        """Return the shape of one feed."""
        if self.rows_per_feed == 0:
            return self.shape
        return self.shape[1:] if self.whole_feeds else (self.rows_per_feed, *self.shape[1:])

    def feed(self, block: Array) -> Array:
        """Convert `block`, which is (rows, ...) in the stored dtype or the whole array, to a feed."""
        values = np.asarray(block[0] if self.whole_feeds else block)
        return values.astype(self.feed_dtype, order="C", copy=False)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype called `name`, or the object dtype for strings and types that NumPy lacks."""
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return np.dtype(object)


def dtype_kind(dtype: np.dtype[Any]) -> str:
    """Return the kind of a dtype for lossless conversion: "int", "float", or the name of the dtype."""
    if dtype.kind in "iu":
        return "int"
    return "float" if dtype.kind == "f" or dtype == ml_dtypes.bfloat16 else dtype.name


def match_input_keys(label: str, available_keys: Sequence[str], request: DataRequest) -> list[str]:
    """Return the key of each input: the requested key, its name, or an alias that is not the name of another input.

    Raises:
        DataError: An input has no key.
    """
    names = {model_input.name for model_input in request.inputs}
    for name in request.input_keys:
        if name not in names:
            raise DataError(
                f"inputs.{name}={request.input_keys[name]} does not match an input of the model, which takes"
                f" {', '.join(map(repr, sorted(names)))}.{did_you_mean(name, names)} Use one of these names."
            )
    matched_keys = []
    for model_input in request.inputs:
        requested_key = request.input_keys.get(model_input.name)
        accepted_names = [model_input.name, *(alias for alias in model_input.aliases if alias not in names)]
        key = next(
            (
                candidate
                for candidate in ([requested_key] if requested_key else accepted_names)
                if candidate in available_keys
            ),
            None,
        )
        if key is None:
            available_text = ", ".join(repr(key) for key in available_keys) or "no arrays"
            needed_text = ", ".join(repr(model_input.name) for model_input in request.inputs)
            raise DataError(
                f"{label} has no array {requested_key!r} for input {model_input.name!r}. It contains {available_text}."
                if requested_key
                else f"{label} has no array for input {model_input.name!r}. It contains {available_text}; the model"
                f" takes {needed_text}."
                f"{did_you_mean(model_input.name, available_keys)} Save each array under the name of its input."
            )
        matched_keys.append(key)
    return matched_keys


def fit_array(label: str, model_input: ModelInput, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayFit:
    """Fit an array of `shape` and `dtype` to an input: a stack of samples, a stack of whole feeds, or one sample.

    Raises:
        DataError: The array does not fit.
    """
    stored_dtype = _resolve_stored_dtype(model_input, dtype.newbyteorder("="))
    input_shape = model_input.shape
    if (
        input_shape
        and len(shape) == len(input_shape) - 1
        and input_shape[0] in {1, None}
        and _fits_input_shape(shape, input_shape[1:])
    ):
        shape = (1, *shape)
    rows_per_feed, whole_feeds = _stacking_layout(label, model_input, shape)
    array_fit = ArrayFit(
        input_name=model_input.name,
        label=label,
        stored_dtype=stored_dtype,
        feed_dtype=_feed_dtype(label, model_input, stored_dtype),
        shape=shape,
        rows_per_feed=rows_per_feed,
        whole_feeds=whole_feeds,
    )
    feed_bytes = math.prod(array_fit.feed_shape()) * stored_dtype.itemsize
    if feed_bytes > MAX_FEED_BYTES:
        raise DataError(f"{label} has {feed_bytes} bytes for one sample. Save smaller samples.")
    return array_fit


def common_sample_count(array_fits: Sequence[ArrayFit]) -> int:
    """Return the number of samples, which must be the same for all stacked arrays.

    Raises:
        DataError: The numbers differ.
    """
    stacked = [array_fit for array_fit in array_fits if array_fit.rows_per_feed]
    for array_fit in stacked:
        if array_fit.samples != stacked[0].samples:
            raise DataError(
                f"{stacked[0].label} has {stacked[0].samples} samples and {array_fit.label.rpartition(': ')[2]} has"
                f" {array_fit.samples}. Provide the same number for every input."
            )
    return stacked[0].samples if stacked else 1


def non_finite_mask(values: Array) -> Array:
    """Return a Boolean mask of NaN and infinite values; all False unless the values are floats."""
    if dtype_kind(values.dtype) != "float":
        return np.zeros(values.shape, bool)
    return np.asarray(~np.isfinite(values))


def check_feed_values(array_fit: ArrayFit, values: Array, *, require_finite: bool) -> None:
    """Check that values fit the dtype of the input and, if `require_finite`, are finite.

    Raises:
        DataError: They are not.
    """
    non_finite = non_finite_mask(values)
    if non_finite.any():
        if require_finite:
            index = [int(axis) for axis in np.unravel_index(int(non_finite.argmax()), values.shape)]
            raise DataError(non_finite_message(array_fit.label, int(non_finite.sum()), index))
        values = values[~non_finite]
    check_dtype_range(array_fit, values)


def non_finite_message(label: str, count: int, index: list[int]) -> str:
    """Return the message about NaN and infinite values."""
    return (
        f"{label} has {count} NaN or infinite values, the first at index {index}. Fix the data; its range is undefined."
    )


def check_dtype_range(array_fit: ArrayFit, values: Array) -> None:
    """Check that finite values are in the range of the dtype of the input.

    Raises:
        DataError: They are not.
    """
    if values.size == 0 or array_fit.stored_dtype == array_fit.feed_dtype or array_fit.feed_dtype.hasobject:
        return
    low, high = values.min(), values.max()
    if dtype_kind(array_fit.stored_dtype) == "int":
        limits = np.iinfo(array_fit.feed_dtype)
        in_range = limits.min <= int(low) and int(high) <= limits.max
    else:
        with np.errstate(over="ignore"):
            in_range = bool(np.isfinite(np.array([low, high]).astype(array_fit.feed_dtype).astype(np.float64)).all())
    if not in_range:
        raise DataError(
            f"{array_fit.label} contains values from {low} to {high}, outside the range of input"
            f" {array_fit.input_name!r} of {array_fit.feed_dtype}."
            " Use values in its range."
        )


def _resolve_stored_dtype(model_input: ModelInput, stored_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of stored values. NumPy saves bfloat16 and other small types as raw bytes, "V2" and "V1"."""
    dtype = numpy_dtype(model_input.dtype)
    is_raw_bytes = stored_dtype.kind == "V" and stored_dtype.names is None and stored_dtype.subdtype is None
    return dtype if is_raw_bytes and not dtype.hasobject and stored_dtype.itemsize == dtype.itemsize else stored_dtype


def _stacking_layout(label: str, model_input: ModelInput, shape: tuple[int, ...]) -> tuple[int, bool]:
    """Return `rows_per_feed` and `whole_feeds` of an `ArrayFit` for an array of `shape`."""
    input_shape = model_input.shape
    if input_shape is None:
        return (1, True) if shape else (0, False)
    batch_size = input_shape[0] if input_shape else 1
    if len(shape) == len(input_shape) + 1 and _fits_input_shape(shape[1:], input_shape):
        return 1, True
    if len(shape) == len(input_shape):
        if not shape or (batch_size is not None and batch_size > 1 and _fits_input_shape(shape, input_shape)):
            return 0, False
        rows_per_feed = batch_size or 1
        if _fits_input_shape((rows_per_feed, *shape[1:]), input_shape):
            if shape[0] % rows_per_feed:
                raise DataError(
                    f"{label} has {shape[0]} entries, but input {model_input.name!r} takes {rows_per_feed} at a time:"
                    f" {shape[0] % rows_per_feed} are left over. Provide a multiple of {rows_per_feed}."
                )
            return rows_per_feed, False
    raise DataError(
        f"{label} is {format_shape(shape)}, but input {model_input.name!r} takes"
        f" {format_shape(input_shape)}, samples stacked along"
        " the first axis."
        f" {_suggest_shape_fix(shape, input_shape)}"
    )


def _fits_input_shape(shape: Sequence[int], input_shape: Shape) -> bool:
    return len(shape) == len(input_shape) and all(
        expected is None or size == expected for size, expected in zip(shape, input_shape, strict=True)
    )


def _suggest_shape_fix(shape: tuple[int, ...], input_shape: Shape) -> str:
    """Suggest a change that makes an array of `shape` fit."""
    sample_shape = input_shape[1:]
    if len(shape) == len(input_shape) and len(shape) > 2:  # noqa: PLR2004  # two axes have no layout
        for from_axis, to_axis, name in ((-1, 1, "channels first (NCHW)"), (1, -1, "channels last (NHWC)")):
            axes = list(shape)
            axes.insert(to_axis % len(shape), axes.pop(from_axis))
            if _fits_input_shape(axes[1:], sample_shape):
                return f"The model takes {name}: numpy.moveaxis(array, {from_axis}, {to_axis}) fits."
    sizes = [size for size in sample_shape if size is not None]
    if shape and len(sizes) == len(sample_shape) and math.prod(shape[1:]) == math.prod(sizes):
        return f"array.reshape({', '.join(map(str, (-1, *sizes)))}) fits."
    return "Give each sample this shape."


def _feed_dtype(label: str, model_input: ModelInput, stored_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the fed values.

    Raises:
        DataError: Values of `stored_dtype` are of another kind.
    """
    if stored_dtype.hasobject and model_input.dtype not in STRING_DTYPES:
        raise DataError(f"{label} contains Python objects, which are never loaded. Save numbers instead.")
    if model_input.dtype in STRING_DTYPES and stored_dtype.kind in "SUO":
        return np.dtype(object)  # runners take strings as objects
    dtype = numpy_dtype(model_input.dtype)
    kinds = (dtype_kind(stored_dtype), dtype_kind(dtype))
    if stored_dtype == dtype or kinds in {("float", "float"), ("int", "int")}:
        return dtype
    mismatch = f"{label} is {stored_dtype}, but input {model_input.name!r} takes {model_input.dtype}."
    if kinds == ("int", "float"):
        raise DataError(
            f"{mismatch} Convert it, and scale it as in training: (array / 255).astype('{model_input.dtype}')."
        )
    raise DataError(f"{mismatch} Save the array as {model_input.dtype}.")


def make_feed(label: str, model_input: ModelInput, values: Array, *, require_finite: bool) -> Array:
    """Convert `values`, which must have the shape of the input, to its feed.

    Raises:
        DataError: They have another shape, are of another kind, or are out of range.
    """
    input_shape = model_input.shape
    if input_shape is not None and not _fits_input_shape(values.shape, input_shape):
        raise DataError(
            f"{label} is {format_shape(values.shape)}, but input {model_input.name!r} takes"
            f" {format_shape(input_shape)}."
            " Give each sample this shape."
        )
    stored_dtype = values.dtype
    array_fit = ArrayFit(
        input_name=model_input.name,
        label=label,
        stored_dtype=stored_dtype,
        feed_dtype=_feed_dtype(label, model_input, stored_dtype),
        shape=values.shape,
    )
    check_feed_values(array_fit, values, require_finite=require_finite)
    return array_fit.feed(values)
