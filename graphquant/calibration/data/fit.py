"""Fit of arrays to the inputs of a model (key, stacking layout and dtype), and datasets of single samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

from graphquant.calibration.data.dataset import LABEL_KEYS, DataRequest, Dataset, Feed
from graphquant.calibration.data.files import MAX_FEED_BYTES, DataFile, hash_files
from graphquant.errors import DataError, did_you_mean
from graphquant.formats import ANY_DTYPE
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from graphquant.formats import InputSpec
    from graphquant.ir import Shape
    from graphquant.numerics import Array

Item = TypeVar("Item")


class MissingArrayError(DataError):
    """The data has no array for an input."""


STRING_DTYPES = frozenset({"string", "str", "object"})


class ArrayFit(NamedTuple):
    """Fit of an array to a model input."""

    input_name: str  # name of the input
    label: str  # name of the array in messages
    stored_dtype: np.dtype[Any]  # dtype of the array, in native byte order
    feed_dtype: np.dtype[Any]  # dtype of the input
    shape: tuple[int, ...]  # Shape of the array. A single sample without a sample axis gets a first axis of 1.
    # Number of entries along the first axis that form one feed; 0 if every feed gets the whole array.
    rows_per_feed: int = 0
    whole_feeds: bool = False  # whether each entry is a whole feed, so that the first axis is dropped

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
    """Return the key of each input: the requested key, its name, or an alias that is not the name of another input."""
    names, input_keys = request.input_names, request.source.input_keys
    # A key that is the name of another input stands for that input.
    keys = [model_input.name if model_input.key in names else model_input.key for model_input in request.inputs]
    keys = keys if len({*keys}) == len(keys) else names
    for name in input_keys:
        if name not in names and name not in keys:
            raise DataError(
                f"inputs.{name}={input_keys[name]} does not match an input of the model, which takes"
                f" {', '.join(map(repr, sorted(keys)))}.{did_you_mean(name, keys)} Use one of these names."
            )
    matched_keys: list[str] = []
    for model_input, input_key in zip(request.inputs, keys, strict=True):
        requested = {input_keys[name] for name in (input_key, model_input.name) if name in input_keys}
        if len(requested) > 1:
            raise DataError(
                f"inputs.{input_key} and inputs.{model_input.name} stand for the same input. Remove one of them."
            )
        requested_key = next(iter(requested), None)
        accepted_names = [model_input.name, *(alias for alias in model_input.aliases if alias not in names)]
        candidates = [requested_key] if requested_key else accepted_names
        key = next((candidate for candidate in candidates if candidate in available_keys), None)
        if key is None:
            used = {*names, *matched_keys, *input_keys.values(), *LABEL_KEYS}
            unused_keys = [available for available in available_keys if available not in used]
            other_key = unused_keys[0] if len(unused_keys) == 1 else "NAME"
            advice = (
                f"Save each array under the name of its input, or add ',inputs.{input_key}={other_key}' to the spec."
                if request.source.memory is None
                else "Use the name of its input as the key of each array."
            )
            available_text = ", ".join(map(repr, available_keys)) or "no arrays"
            raise MissingArrayError(
                f"{label} has no array {requested_key!r} for input {input_key!r}. It contains {available_text}."
                if requested_key
                else f"{label} has no array for input {input_key!r}. It contains {available_text}; the model"
                f" takes {', '.join(map(repr, keys))}.{did_you_mean(input_key, available_keys)} {advice}"
            )
        matched_keys.append(key)
    return matched_keys


def fit_array(label: str, model_input: InputSpec, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArrayFit:
    """Fit an array of `shape` and `dtype` to an input: a stack of samples, a stack of whole feeds, or one sample."""
    input_dtype, stored_dtype = numpy_dtype(model_input.dtype), dtype.newbyteorder("=")
    # NumPy saves bfloat16 and other small types as raw bytes, "V2" and "V1".
    is_raw_bytes = stored_dtype.kind == "V" and stored_dtype.names is None and stored_dtype.subdtype is None
    if is_raw_bytes and not input_dtype.hasobject and stored_dtype.itemsize == input_dtype.itemsize:
        stored_dtype = input_dtype
    input_shape = model_input.shape
    if input_shape and input_shape[0] in {1, None} and _fits_input_shape(shape, input_shape[1:]):
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
    """Return the number of samples, which must be the same for all stacked arrays."""
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
    """Check that values fit the dtype of the input and, if `require_finite`, are finite; raise a DataError if not."""
    non_finite = non_finite_mask(values)
    if non_finite.any():
        if require_finite:
            raise non_finite_error(array_fit.label, int(non_finite.sum()), int(non_finite.argmax()), values.shape)
        values = values[~non_finite]
    check_dtype_range(array_fit, values)


def non_finite_error(label: str, count: int, first: int, shape: tuple[int, ...]) -> DataError:
    """Return the error for `count` NaN and infinite values, of which the first has the flat index `first`."""
    index = [int(axis) for axis in np.unravel_index(first, shape)]
    return DataError(
        f"{label} has {count} NaN or infinite values, the first at index {index}. Fix the data; its range is undefined."
    )


def check_dtype_range(array_fit: ArrayFit, values: Array) -> None:
    """Raise a DataError if finite values are outside the range of the dtype of the input."""
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
            f" {array_fit.input_name!r} of {array_fit.feed_dtype}. Use values in its range."
        )


def _stacking_layout(label: str, model_input: InputSpec, shape: tuple[int, ...]) -> tuple[int, bool]:
    """Return `rows_per_feed` and `whole_feeds` of an `ArrayFit` for an array of `shape`."""
    input_shape = model_input.shape
    if model_input.dtype == ANY_DTYPE:
        return (1, False) if shape else (0, False)
    if input_shape is None:
        return (1, True) if shape else (0, False)
    if _fits_input_shape(shape[1:], input_shape) and len(shape) > len(input_shape):
        return 1, True
    if len(shape) == len(input_shape):
        rows_per_feed = (input_shape[0] if input_shape else None) or 1
        if not shape or (rows_per_feed > 1 and _fits_input_shape(shape, input_shape)):
            return 0, False
        if _fits_input_shape((rows_per_feed, *shape[1:]), input_shape):
            if shape[0] % rows_per_feed:
                raise DataError(
                    f"{label} has {shape[0]} entries, but input {model_input.name!r} takes {rows_per_feed} at a time:"
                    f" {shape[0] % rows_per_feed} are left over. Provide a multiple of {rows_per_feed}."
                )
            return rows_per_feed, False
    raise DataError(
        f"{label} is {format_shape(shape)}, but input {model_input.name!r} takes {format_shape(input_shape)}, samples"
        f" stacked along the first axis. {_suggest_shape_fix(shape, input_shape)}"
    )


def _fits_input_shape(shape: Sequence[int], input_shape: Shape) -> bool:
    return len(shape) == len(input_shape) and all(
        expected in {None, size} for size, expected in zip(shape, input_shape, strict=True)
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


def _feed_dtype(label: str, model_input: InputSpec, stored_dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the fed values. Raises a DataError if values of `stored_dtype` are of another kind."""
    if stored_dtype.hasobject and model_input.dtype not in STRING_DTYPES:
        raise DataError(f"{label} contains Python objects, which are never loaded. Save numbers instead.")
    if model_input.dtype == ANY_DTYPE:
        return stored_dtype
    if model_input.dtype in STRING_DTYPES and stored_dtype.kind in "SUO":
        return np.dtype(object)  # runners take strings as objects
    dtype = numpy_dtype(model_input.dtype)
    kinds = (dtype_kind(stored_dtype), dtype_kind(dtype))
    if stored_dtype == dtype or kinds in {("float", "float"), ("int", "int")}:
        return dtype
    advice = f"Save the array as {model_input.dtype}."
    if kinds == ("int", "float"):
        advice = f"Convert it, and scale it as in training: (array / 255).astype('{model_input.dtype}')."
    raise DataError(f"{label} is {stored_dtype}, but input {model_input.name!r} takes {model_input.dtype}. {advice}")


SampleReader = Callable[[int, int], Iterator[tuple[str, Feed]]]
"""Function that yields the samples from one index up to another, each with a label and a first axis of 1 for the batch.
"""


def dataset_of_samples(
    request: DataRequest, read_samples: SampleReader, *, count: int, digest: str, unused_keys: Iterable[str] = ()
) -> Dataset:
    """Create feeds of one sample each, or of as many as the fixed batch size of the model requires."""
    spec = request.source.spec
    if not count:
        raise DataError(f"{spec} contains no samples. Provide at least one.")
    _, first_sample = next(read_samples(0, 1), ("", None))
    if first_sample is None:  # damaged metadata may declare samples that are not there
        raise DataError(f"{spec} has fewer samples than it declares. Replace the file.")
    # A sample without a first axis of 1 is a whole feed.
    batched_inputs = [model_input for model_input in request.inputs if first_sample[model_input.name].shape[:1] == (1,)]
    per_feed = max(map(fixed_batch_size, batched_inputs), default=1)
    if count % per_feed and request.samples is None:
        raise DataError(
            f"{spec} has {count} samples, but the model takes {per_feed} at a time: {count % per_feed} are left over."
            f" Provide a multiple of {per_feed}, or limit the number of feeds of {per_feed} with --samples."
        )

    def open_feeds(start: int, stop: int) -> Iterator[Feed]:
        samples = read_samples(start * per_feed, stop * per_feed)
        while group := list(islice(samples, per_feed)):
            feed = {}
            for model_input in request.inputs:
                arrays = [sample[model_input.name] for _, sample in group]
                values = arrays[0] if per_feed == 1 else np.concatenate(arrays)
                feed[model_input.name] = _make_feed(group[0][0], model_input, values, request)
            yield feed

    next(open_feeds(0, 1))
    ignored = (*unused_keys, *request.source.ignored)
    return Dataset(count=request.limit_count(count // per_feed), digest=digest, ignored=ignored, open_feeds=open_feeds)


def dataset_of_files(request: DataRequest, settings: str, read_file: Callable[[DataFile], Array]) -> Dataset:
    """Create samples for the only input from one file each, in the order of their names.

    `settings` describe the conversion, which enters the digest.
    """
    model_input = sole_input(request)
    files = request.source.files
    if request.samples is not None:
        files = files[: request.samples * fixed_batch_size(model_input)]

    def read_samples(start: int, stop: int) -> Iterator[tuple[str, Feed]]:
        for file in files[start:stop]:
            yield file.name, {model_input.name: read_file(file)}

    return dataset_of_samples(request, read_samples, count=len(files), digest=hash_files(settings, files))


def sole_input(request: DataRequest) -> InputSpec:
    """Return the only input of the model, which each file feeds."""
    if len(request.inputs) != 1:
        names = ", ".join(map(repr, request.input_names)) or "no inputs"
        raise DataError(
            f"{request.source.spec} contains {request.source.kind}, which feed one input, but the model takes {names}."
            " Use an .npz file with all inputs, or module:function."
        )
    return request.inputs[0]


def fixed_batch_size(model_input: InputSpec) -> int:
    """Return the fixed size of the first axis of `model_input`, or 1."""
    return (model_input.shape[0] if model_input.shape else None) or 1


def split_range(items: Iterable[Item], counts: Iterable[int], start: int, stop: int) -> Iterator[tuple[Item, int, int]]:
    """Divide the samples from `start` up to `stop` among items that contain `counts` samples each.

    Yields each item that contains some of them, with the range of its own samples.
    """
    for item, count in zip(items, counts, strict=False):
        first, last = max(start, 0), min(stop, count)
        if first < last:
            yield item, first, last
        start, stop = start - count, stop - count
        if stop <= 0:
            return


def _make_feed(label: str, model_input: InputSpec, values: Array, request: DataRequest) -> Array:
    """Convert `values`, which must have the shape of the input, to its feed."""
    if model_input.shape is not None and not _fits_input_shape(values.shape, model_input.shape):
        raise DataError(
            f"{label} is {format_shape(values.shape)}, but input {model_input.name!r} takes"
            f" {format_shape(model_input.shape)}. Give each sample this shape."
        )
    array_fit = ArrayFit(
        input_name=model_input.name,
        label=label,
        stored_dtype=values.dtype,
        feed_dtype=_feed_dtype(label, model_input, values.dtype),
        shape=values.shape,
    )
    check_feed_values(array_fit, values, require_finite=request.require_finite)
    return array_fit.feed(values)
