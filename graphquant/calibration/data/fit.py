"""How an input takes an array: under which key, in which layout, as which dtype."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from graphquant.calibration.data.base import MAX_FEED_BYTES
from graphquant.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.calibration.data.base import DataRequest, ModelInput, Shape
    from graphquant.numerics import Array


STRING_DTYPES = frozenset({"string", "str", "object"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayFit:
    """How an input takes an array.

    Attributes:
        input_name: Name of the input.
        label: What the array is called in messages.
        stored_dtype: The array's dtype, native byte order.
        feed_dtype: The input's dtype.
        shape: The array's shape; with a first axis of 1 if it is a sample without one.
        rows_per_feed: How many entries along the first axis make one feed; 0: every feed gets the whole array.
        whole_feeds: Each entry is one whole feed, so the first axis is dropped.
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
        """Number of feeds that it makes."""
        return self.shape[0] // self.rows_per_feed

    def feed_shape(self) -> tuple[int, ...]:
        """Shape of one feed."""
        if self.rows_per_feed == 0:
            return self.shape
        return self.shape[1:] if self.whole_feeds else (self.rows_per_feed, *self.shape[1:])

    def feed(self, block: Array) -> Array:
        """The feed that `block` is: (rows, ...) of the given dtype, or the whole array."""
        values = np.asarray(block[0] if self.whole_feeds else block)
        return values.astype(self.feed_dtype, order="C", copy=False)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype called `name`; that of Python objects for strings and whatever numpy does not have."""
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        return np.dtype(object)


def dtype_kind(dtype: np.dtype[Any]) -> str:
    """What can be converted losslessly in kind: "int", "float", or the dtype's own name."""
    if dtype.kind in "iu":
        return "int"
    return "float" if dtype.kind == "f" or dtype == ml_dtypes.bfloat16 else dtype.name


def format_input_shape(shape: Shape) -> str:
    """`shape` for people, "?" for what is not known."""
    return "[" + ", ".join("?" if size is None else str(size) for size in shape) + "]"


def match_input_keys(label: str, available_keys: Sequence[str], request: DataRequest) -> list[str]:
    """For each input the key that holds it: the one asked for, its name, else an alias that is no other input's name.

    Raises:
        DataError: There is none.
    """
    names = {model_input.name for model_input in request.inputs}
    for name in request.input_keys:
        if name not in names:
            raise DataError(
                f"inputs.{name}={request.input_keys[name]} is for no input of the model, which takes"
                f" {', '.join(map(repr, sorted(names)))}.{did_you_mean(name, names)} Name one of them."
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
            available_text = ", ".join(repr(key) for key in available_keys) or "nothing"
            needed_text = ", ".join(repr(model_input.name) for model_input in request.inputs)
            raise DataError(
                f"{label} has no array {requested_key!r} for input {model_input.name!r}: it holds {available_text}."
                if requested_key
                else f"{label} has no array for input {model_input.name!r}: it holds {available_text}, and the model takes {needed_text}."
                f"{did_you_mean(model_input.name, available_keys)} Save each array under the name of its input."
            )
        matched_keys.append(key)
    return matched_keys


def fit_array(label: str, model_input: ModelInput, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayFit:
    """How `model_input` takes an array of `shape` and `dtype`: a stack of samples, of whole feeds, or one sample.

    Raises:
        DataError: It does not.
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
    """The number of samples, which all stacked arrays must agree on.

    Raises:
        DataError: They do not.
    """
    stacked = [array_fit for array_fit in array_fits if array_fit.rows_per_feed]
    for array_fit in stacked:
        if array_fit.samples != stacked[0].samples:
            raise DataError(
                f"{stacked[0].label} has {stacked[0].samples} samples and {array_fit.label.rpartition(': ')[2]} has"
                f" {array_fit.samples}. Give every input the same number."
            )
    return stacked[0].samples if stacked else 1


def non_finite_mask(values: Array) -> Array:
    """Where `values` are NaN or infinite: bool, of the same shape; nowhere unless they are floats."""
    if dtype_kind(values.dtype) != "float":
        return np.zeros(values.shape, bool)
    return np.asarray(~np.isfinite(values))


def check_feed_values(array_fit: ArrayFit, values: Array, *, require_finite: bool) -> None:
    """Values must fit the input's dtype, and be finite if that is asked for.

    Raises:
        DataError: They do not, or are not.
    """
    non_finite = non_finite_mask(values)
    if non_finite.any():
        if require_finite:
            index = [int(axis) for axis in np.unravel_index(int(non_finite.argmax()), values.shape)]
            raise DataError(non_finite_message(array_fit.label, int(non_finite.sum()), index))
        values = values[~non_finite]
    check_dtype_range(array_fit, values)


def non_finite_message(label: str, count: int, index: list[int]) -> str:
    """What is said of NaN and infinite values."""
    return (
        f"{label} has {count} NaN or infinite values, the first at index {index}."
        " Mend the data; no range can be taken from it."
    )


def check_dtype_range(array_fit: ArrayFit, values: Array) -> None:
    """Finite values must fit the input's dtype.

    Raises:
        DataError: They do not.
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
            f"{array_fit.label} holds values from {low} to {high}, which input {array_fit.input_name!r} of {array_fit.feed_dtype} cannot hold."
            " Give values in its range."
        )


def _resolve_stored_dtype(model_input: ModelInput, stored_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """`stored_dtype`, or what its nameless bytes are: numpy saves bfloat16 and other small types as "V2" and "V1"."""
    dtype = numpy_dtype(model_input.dtype)
    is_raw_bytes = stored_dtype.kind == "V" and stored_dtype.names is None and stored_dtype.subdtype is None
    return dtype if is_raw_bytes and not dtype.hasobject and stored_dtype.itemsize == dtype.itemsize else stored_dtype


def _stacking_layout(label: str, model_input: ModelInput, shape: tuple[int, ...]) -> tuple[int, bool]:
    """`rows` and `whole_feeds` of a `Fit`: how `model_input` takes an array of `shape`."""
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
                    f"{label} has {shape[0]} entries, and input {model_input.name!r} takes {rows_per_feed} at a time:"
                    f" {shape[0] % rows_per_feed} are left over. Give a multiple of {rows_per_feed}."
                )
            return rows_per_feed, False
    raise DataError(
        f"{label} is {format_input_shape(shape)}, and input {model_input.name!r} takes {format_input_shape(input_shape)}, samples stacked along"
        " the first axis."
        f" {_suggest_shape_fix(shape, input_shape)}"
    )


def _fits_input_shape(shape: Sequence[int], input_shape: Shape) -> bool:
    return len(shape) == len(input_shape) and all(
        expected is None or size == expected for size, expected in zip(shape, input_shape, strict=True)
    )


def _suggest_shape_fix(shape: tuple[int, ...], input_shape: Shape) -> str:
    """What would make an array of `shape` fit."""
    sample_shape = input_shape[1:]
    if len(shape) == len(input_shape) and len(shape) > 2:  # noqa: PLR2004  # two axes have no layout
        for from_axis, to_axis, name in ((-1, 1, "channels first (NCHW)"), (1, -1, "channels last (NHWC)")):
            axes = list(shape)
            axes.insert(to_axis % len(shape), axes.pop(from_axis))
            if _fits_input_shape(axes[1:], sample_shape):
                return f"The model wants {name}: numpy.moveaxis(array, {from_axis}, {to_axis}) fits."
    sizes = [size for size in sample_shape if size is not None]
    if shape and len(sizes) == len(sample_shape) and math.prod(shape[1:]) == math.prod(sizes):
        return f"array.reshape({', '.join(map(str, (-1, *sizes)))}) fits."
    return "Give each sample that shape."


def _feed_dtype(label: str, model_input: ModelInput, stored_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that values are fed as.

    Raises:
        DataError: `stored_dtype` values are of another kind.
    """
    if stored_dtype.hasobject and model_input.dtype not in STRING_DTYPES:
        raise DataError(f"{label} holds Python objects, which are never loaded. Save it as numbers.")
    if model_input.dtype in STRING_DTYPES and stored_dtype.kind in "SUO":
        return np.dtype(object)  # what runners take for strings
    dtype = numpy_dtype(model_input.dtype)
    kinds = (dtype_kind(stored_dtype), dtype_kind(dtype))
    if stored_dtype == dtype or kinds in {("float", "float"), ("int", "int")}:
        return dtype
    mismatch = f"{label} is {stored_dtype}, and input {model_input.name!r} takes {model_input.dtype}."
    if kinds == ("int", "float"):
        raise DataError(
            f"{mismatch} Convert it, and scale it as in training: (array / 255).astype('{model_input.dtype}')."
        )
    raise DataError(f"{mismatch} Save the array as {model_input.dtype}.")


def make_feed(label: str, model_input: ModelInput, values: Array, *, require_finite: bool) -> Array:
    """`values` as the feed of `model_input`, whose shape they must have already.

    Raises:
        DataError: They have another shape, are of another kind, or are out of its range.
    """
    input_shape = model_input.shape
    if input_shape is not None and not _fits_input_shape(values.shape, input_shape):
        raise DataError(
            f"{label} is {format_input_shape(values.shape)}, and input {model_input.name!r} takes {format_input_shape(input_shape)}."
            " Give each sample that shape."
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
