"""Calibration data from Python: `module:function`, which is executed, data in memory, and random data for tests.

The function may return any iterable of arrays, dictionaries or tuples, a `tf.data.Dataset`, or an ONNX Runtime
`CalibrationDataReader`. It is called again for each pass over the data. An item has the layout of an array in an `.npz`
file: it is one sample or a stack of samples.

A user's own metric scores the outputs of a batch, higher is better. The function gets the outputs by name, and the
labels: all arrays of the data that no input takes. The first axis of an array counts samples. The score of a model is
the mean over the samples.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import graphquant
from graphquant.calibration.data.dataset import DataRequest, Dataset, Feed
from graphquant.calibration.data.files import MAX_FEED_BYTES
from graphquant.calibration.data.fit import (
    ArrayFit,
    MissingArrayError,
    check_feed_values,
    common_sample_count,
    dtype_kind,
    fit_array,
    match_input_keys,
    numpy_dtype,
    split_range,
)
from graphquant.calibration.memory import available_memory
from graphquant.errors import DataError, GraphQuantError, UsageError
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from graphquant.formats import InputSpec
    from graphquant.numerics import Array


PAIR_SIZE = 2  # size of an item of features and labels
MAX_ITEMS = 1_000_000  # number of items after which an iterable is considered endless


def open_function(request: DataRequest) -> Dataset:
    """Open the data of a function. One pass over all items counts and hashes them, so that all shards agree on them."""
    spec = request.source.spec
    memory = request.source.memory
    create_iterable = _import_factory(spec) if memory is None else partial(iter, memory)
    digest = hashlib.sha256()
    counts: list[int] = []
    unused_keys: dict[str, None] = {}
    stacked: dict[str, tuple[int, ...]] = {}
    total_bytes, max_bytes = 0, available_memory() // 2
    for label, arrays in _iterate_items(create_iterable, request):
        fitted_arrays, item_unused_keys = _fit_item(label, arrays, request)
        for array_fit, values in fitted_arrays:
            total_bytes += values.nbytes
            digest.update(f"{array_fit.input_name} {array_fit.stored_dtype.str} {values.shape}\n".encode())
            digest.update(repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes())
            if array_fit.rows_per_feed and array_fit.samples > 1:
                stacked.setdefault(array_fit.input_name, values.shape)
        counts.append(common_sample_count([array_fit for array_fit, _ in fitted_arrays]))
        unused_keys |= dict.fromkeys(item_unused_keys)
        if request.samples is not None and sum(counts) >= request.samples:
            break
        if memory is not None and memory.keeps_items and total_bytes > max_bytes:
            raise DataError(
                f"The {len(counts)} items read from {spec} so far fill half of the free memory. Limit their number with"
                " samples, or name a function that creates the data, module:function, which keeps no items."
            )
        if len(counts) == MAX_ITEMS:
            raise DataError(f"{spec} returned {MAX_ITEMS} items without ending. Limit the number with --samples.")
    if not sum(counts):
        repeated = ", each time it is called" if memory is None else ""
        raise DataError(f"{spec} returned no samples. It must return at least one{repeated}.")
    return Dataset(
        count=request.limit_count(sum(counts)),
        digest=digest.hexdigest(),
        ignored=tuple(unused_keys),
        stacked_shapes=stacked,
        open_feeds=partial(_function_feeds, create_iterable, request, counts),
    )


def import_object(spec: str, advice: str) -> Any:
    """Import the object `module:name`. Raises a DataError with the advice if the module has no such object."""
    name, _, path = spec.partition(":")
    if os.getcwd() not in sys.path:  # noqa: PTH109  # a string, as sys.path holds
        sys.path.append(os.getcwd())  # noqa: PTH109  # the same
    with wrap_user_errors(spec, "cannot be imported"):
        resolved: Any = importlib.import_module(name)
    for attribute in path.split("."):
        if not hasattr(resolved, attribute):
            raise DataError(f"The module {name} has no {path!r}. {advice}")
        resolved = getattr(resolved, attribute)
    return resolved


def _import_factory(spec: str) -> Callable[[], Any]:
    """Import the function that creates the iterable."""
    resolved = import_object(spec, "Name a function that returns the data.")
    if isinstance(resolved, Iterator):
        raise DataError(
            f"{spec} can be read only once, but calibration makes several passes. Name a function that creates it."
        )
    if isinstance(resolved, Iterable) and not isinstance(resolved, type):
        return lambda: resolved
    if not callable(resolved):
        raise DataError(f"{spec} is neither a function nor an iterable. Name a function that returns the data.")
    factory: Callable[[], Any] = resolved
    return factory


@contextmanager
def wrap_user_errors(spec: str, failure: str) -> Iterator[None]:
    """Turn any exception of the user's code into a DataError with the line that raised it."""
    try:
        yield
    except GraphQuantError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(
            f"{spec} {failure}: {reason}{_error_line(error)}. Run it separately to find the cause."
        ) from error


def _error_line(error: BaseException) -> str:
    """Return the file and line of the user's code that raised an error, "" if there is none."""
    libraries = (os.path.dirname(os.__file__), str(Path(graphquant.__file__).parent), "<")  # noqa: PTH120  # a prefix
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)]
    frames = [frame for frame in frames if "site-packages" not in frame.filename]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _iterate_items(create_iterable: Callable[[], Any], request: DataRequest) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield the label of each item and its arrays by name."""
    spec = request.source.spec
    with wrap_user_errors(spec, "failed"):
        iterable = create_iterable()
        get_next = getattr(iterable, "get_next", None)  # of ONNX Runtime's CalibrationDataReader, which ends with None
        items = iterable if get_next is None else (get_next() for _ in itertools.count())
        iterator = itertools.takewhile(lambda item: get_next is None or item is not None, items)
    for index in itertools.count():
        label = f"{spec}, item {index}"
        with wrap_user_errors(spec, f"failed at item {index}"):
            try:
                item = next(iterator)
            except StopIteration:
                return
            arrays = [_item_arrays(label, part, request.input_names) for part in _split_ragged(item)]
        yield from ((label, each) for each in arrays)


def _split_ragged(item: Any) -> list[Any]:
    """Return an item with a `tf.RaggedTensor` as one item for each row, because rows of other lengths have no array."""
    values = item.values() if isinstance(item, Mapping) else ()
    counts = [len(value.row_lengths()) for value in values if hasattr(value, "row_lengths")]
    if not counts:
        return [item]
    return [{key: value[row][None] for key, value in item.items()} for row in range(counts[0])]


def _item_arrays(label: str, item: Any, names: list[str]) -> dict[str, Array]:
    """Return the arrays of an item: by name, by position, or the only one. A pair may be (features, labels)."""
    if isinstance(item, tuple | list) and item and isinstance(item[0], Mapping):
        item = {**({"labels": item[1]} if len(item) == PAIR_SIZE else {}), **item[0]}
    if isinstance(item, Mapping):
        return {str(key): _as_array(value) for key, value in item.items()}
    if not isinstance(item, tuple | list):
        item = (item,)
    if len(item) < len(names):
        raise MissingArrayError(
            f"{label} has {len(item)} arrays, but the model takes {', '.join(map(repr, names))}."
            " Return a dict of input names and arrays, or a tuple in this order."
        )
    extra_names = [f"position {index}" for index in range(len(names), len(item))]
    if len(extra_names) == 1:
        extra_names = ["labels"]
    return {name: _as_array(value) for name, value in zip([*names, *extra_names], item, strict=True)}


def _as_array(value: Any) -> Array:
    """Return a value as an array: PyTorch converts only tensors on the CPU that need no gradient."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _fit_item(
    label: str, arrays: Mapping[str, Array], request: DataRequest, *, check_values: bool = True
) -> tuple[list[tuple[ArrayFit, Array]], list[str]]:
    """Fit the arrays of an item to the inputs, and check every value. Also return the keys that no input takes."""
    fitted_arrays = []
    keys = match_input_keys(label, list(arrays), request)
    for model_input, key in zip(request.inputs, keys, strict=True):
        values = arrays[key]
        array_fit = fit_array(f"{label}: array {key!r}", model_input, values.shape, values.dtype)
        values = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("="), copy=False)
        values = (values.view(array_fit.stored_dtype) if values.dtype.kind == "V" else values).reshape(array_fit.shape)
        if check_values:
            check_feed_values(array_fit, values, require_finite=request.require_finite)
        fitted_arrays.append((array_fit, values))
    return fitted_arrays, [key for key in arrays if key not in keys]


def _function_feeds(
    create_iterable: Callable[[], Any], request: DataRequest, counts: Sequence[int], start: int, stop: int
) -> Iterator[Feed]:
    items = _iterate_items(create_iterable, request)
    position = 0
    for index, first, last in split_range(range(len(counts)), counts, start, stop):
        label, arrays = next(itertools.islice(items, index - position, None), ("", None))
        position = index + 1
        if arrays is None:
            raise DataError(
                f"{request.source.spec} returned {len(counts)} items in the first pass and fewer later."
                " The function must create a new iterable each time."
            )
        # Values in memory were checked in the first pass.
        fitted_arrays, _ = _fit_item(label, arrays, request, check_values=request.source.memory is None)
        if common_sample_count([array_fit for array_fit, _ in fitted_arrays]) != counts[index]:
            raise DataError(
                f"{label} had {counts[index]} samples in the first pass and another number later. It must return the"
                " same samples each time."
            )
        for sample in range(first, last):
            feed = {}
            for array_fit, values in fitted_arrays:
                rows = array_fit.rows_per_feed
                block = values[sample * rows : (sample + 1) * rows] if rows else values
                feed[array_fit.input_name] = array_fit.feed(block)
            yield feed


MAX_DIGITS = 10


def open_random(request: DataRequest) -> Dataset:
    """Create as many random feeds as the spec requests, for example "random:8"."""
    spec = request.source.spec
    text = spec.removeprefix("random:")
    if not (text.isascii() and text.isdigit() and len(text) < MAX_DIGITS and int(text) > 0):
        raise DataError(f"{spec!r} has no number of samples. Write random:8.")
    count = request.limit_count(int(text))
    shapes = {model_input.name: _random_shape(model_input) for model_input in request.inputs}
    dtypes = {model_input.name: model_input.dtype for model_input in request.inputs}
    for name, dtype in dtypes.items():
        if dtype_kind(numpy_dtype(dtype)) not in {"int", "float", "bool"}:
            raise DataError(f"Random data is not supported for input {name!r} of {dtype}. Use an .npz file.")

    def open_feeds(start: int, stop: int) -> Iterator[Feed]:
        for index in range(start, stop):
            yield {
                name: _random_values(name, index, shape, numpy_dtype(dtypes[name])) for name, shape in shapes.items()
            }

    digest = hashlib.sha256(f"random {count} {shapes} {dtypes}".encode()).hexdigest()
    return Dataset(count=count, digest=digest, random=True, open_feeds=open_feeds)


def _random_shape(model_input: InputSpec) -> tuple[int, ...]:
    if model_input.shape is None or None in model_input.shape[1:]:
        known = "no known rank" if model_input.shape is None else f"the shape {format_shape(model_input.shape)}"
        raise DataError(
            f"Random data is not supported for input {model_input.name!r}, which has {known}. Use an .npz file."
        )
    shape = tuple(1 if size is None else size for size in model_input.shape)
    if math.prod(shape) * 8 > MAX_FEED_BYTES:
        raise DataError(
            f"Input {model_input.name!r} of {format_shape(shape)} is too large for random data. Use an .npz file."
        )
    return shape


def _random_values(name: str, index: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return normal floats, 8-bit integers of the full range, or other integers (often indices) of 0 and 1.

    The seed is the index of the sample and the name of the input.
    """
    generator = np.random.default_rng([index, *name.encode()])
    if dtype_kind(dtype) == "float":
        return np.asarray(generator.standard_normal(shape)).astype(dtype)
    is_byte = dtype_kind(dtype) == "int" and dtype.itemsize == 1
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if is_byte else (0, 1)
    return np.asarray(generator.integers(low, high, shape, np.int64, endpoint=True)).astype(dtype)


class Metric(NamedTuple):
    """A function of outputs and labels, and its name for reports."""

    name: str
    function: Callable[[dict[str, Array], dict[str, Array]], Any]

    def score(self, outputs: Mapping[str, Array], labels: Mapping[str, Array]) -> float:
        """Return the score of a batch. Raises a DataError if the function fails or returns no finite number."""
        with wrap_user_errors(f"The metric {self.name}", "failed"):
            result = self.function(dict(outputs), dict(labels))
        try:
            score = float(result)
        except (TypeError, ValueError):
            score = math.nan
        if not math.isfinite(score):
            found = f"{type(result).__name__} {str(result)[:40]}"
            raise DataError(f"The metric {self.name} returned {found}. Return one finite number; higher is better.")
        return score


def load_metric(metric: Any) -> Metric | None:
    """Return the metric of an option: `module:function`, which is imported, a function, or None."""
    if metric is None or isinstance(metric, Metric):
        return metric
    if callable(metric):
        return Metric(getattr(metric, "__qualname__", type(metric).__name__), metric)
    if not isinstance(metric, str) or not all(metric.partition(":")):
        raise UsageError(f"The metric {str(metric)[:60]!r} is not a function. Write module:function.")
    function = import_object(metric, "Name a function of outputs and labels that returns a number.")
    if not callable(function):
        raise DataError(f"{metric} is not a function. Name a function of outputs and labels that returns a number.")
    return Metric(metric, function)
