"""Checks of calibration data: a summary of each input, and likely mistakes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from graphquant.calibration.data.fit import dtype_kind, non_finite_mask, numpy_dtype
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphquant.calibration.data.base import Dataset, ModelInput, Shape
    from graphquant.numerics import Array


FEW_SAMPLES = 32
"""Below this number of samples, ranges depend on the choice of samples."""

MIN_UNSCALED_PIXEL = 128
"""A maximum from here to 255, without negative values, looks like pixels that were not scaled."""

LABEL_KEYS = frozenset({"label", "labels", "target", "targets", "y", "class", "position 1"})
"""Keys that no input is expected to take."""

COLOUR_CHANNELS = 3

LAYOUT_CHECK_SAMPLES = 32
"""Number of samples whose neighboring values are compared."""

SWAPPED_LAYOUT_RATIO = 0.8
"""Neighbors in the other layout must differ by less than this ratio before a swapped layout is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSummary:
    """Values that an input is fed, over all samples.

    Attributes:
        name: The input.
        dtype: Its dtype.
        shape: Its shape in the model.
        data_shape: The shape of a feed. An axis is None if its size differs between samples; the shape is None if the
            rank does.
        low: Smallest finite value; None if there is none.
        high: Largest finite value.
        mean: Mean of the finite values.
        nan: Number of NaN.
        inf: Number of infinite values.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...] | None
    data_shape: tuple[int | None, ...] | None
    low: float | None
    high: float | None
    mean: float | None
    nan: int
    inf: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFinding:
    """A likely mistake in the data.

    Attributes:
        kind: Identifier of the kind of mistake.
        input: The affected input, if it is about one.
        message: Description of the mistake and advice.
    """

    kind: str
    input: str | None = None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Summary of calibration data and the inputs that it feeds.

    Attributes:
        samples: Number of samples.
        digest: Digest of the data.
        inputs: Summary of each input.
        ignored: Keys and files that no input takes.
        findings: Likely mistakes.
    """

    samples: int
    digest: str
    inputs: tuple[InputSummary, ...]
    ignored: tuple[str, ...]
    findings: tuple[DataFinding, ...]


@dataclass(slots=True)
class _InputStats:
    """Running statistics of the values of an input."""

    shape: Shape | None = None
    low: float = np.inf
    high: float = -np.inf
    total: float = 0.0
    finite_count: int = 0
    nan: int = 0
    inf: int = 0
    integral: bool = True
    digests: set[bytes] = field(default_factory=set)
    value_count: int = 0
    layout_difference: float = 0.0
    swapped_difference: float = 0.0


def check_dataset(dataset: Dataset, inputs: Sequence[ModelInput]) -> DataReport:
    """Read all data once and report likely mistakes. Open it with `require_finite=False` to count NaN.

    Raises:
        DataError: A sample cannot be read or does not fit.
    """
    input_stats = {model_input.name: _InputStats() for model_input in inputs}
    for index, feed in enumerate(dataset):
        for model_input in inputs:
            _add_feed_values(input_stats[model_input.name], feed[model_input.name])
            if index < LAYOUT_CHECK_SAMPLES:
                _compare_layouts(input_stats[model_input.name], model_input, feed[model_input.name])
    return DataReport(
        samples=dataset.count,
        digest=dataset.final_digest(),
        inputs=tuple(_summarize_input(model_input, input_stats[model_input.name]) for model_input in inputs),
        ignored=dataset.ignored,
        findings=(
            *_dataset_findings(dataset),
            *(
                finding
                for model_input in inputs
                for finding in _input_findings(model_input, input_stats[model_input.name], dataset)
            ),
        ),
    )


def _add_feed_values(stats: _InputStats, values: Array) -> None:
    """Add the values of one feed."""
    if not stats.value_count:
        stats.shape = values.shape
    elif stats.shape is not None:
        same_rank = len(stats.shape) == len(values.shape)
        stats.shape = (
            tuple(a if a == b else None for a, b in zip(stats.shape, values.shape, strict=True)) if same_rank else None
        )
    stats.value_count += values.size
    if len(stats.digests) <= 1:  # two digests suffice to know that samples differ
        is_text = values.dtype.hasobject
        content = repr(values.tolist()).encode() if is_text else np.ascontiguousarray(values).tobytes()
        stats.digests.add(hashlib.sha256(f"{values.shape}".encode() + content).digest())
    if dtype_kind(values.dtype) not in {"int", "float"}:
        return
    non_finite = non_finite_mask(values)
    numbers = values[~non_finite].astype(np.float64) if non_finite.any() else values.astype(np.float64)
    nan = int(np.isnan(values.astype(np.float64)).sum()) if non_finite.any() else 0
    stats.nan += nan
    stats.inf += int(non_finite.sum()) - nan
    if numbers.size:
        stats.low = min(stats.low, float(numbers.min()))
        stats.high = max(stats.high, float(numbers.max()))
        stats.total += float(numbers.sum())
        stats.finite_count += numbers.size
        stats.integral = stats.integral and bool((numbers == np.rint(numbers)).all())


def _compare_layouts(stats: _InputStats, model_input: ModelInput, values: Array) -> None:
    """Add the differences of values one row apart, for the declared layout and for the other one.

    The pixel below is usually similar to the pixel above. In NCHW it lies one width further, in NHWC one width times
    the number of channels.
    """
    layout = _image_layout(model_input, values.shape)
    if layout is None or dtype_kind(values.dtype) not in {"int", "float"}:
        return
    width = values.shape[3] if layout == "NCHW" else values.shape[2]
    for image in values.reshape(len(values), -1).astype(np.float64):
        planar_difference = float(np.abs(image[width:] - image[:-width]).mean())
        interleaved_difference = float(
            np.abs(image[width * COLOUR_CHANNELS :] - image[: -width * COLOUR_CHANNELS]).mean()
        )
        stats.layout_difference += planar_difference if layout == "NCHW" else interleaved_difference
        stats.swapped_difference += interleaved_difference if layout == "NCHW" else planar_difference


def _image_layout(model_input: ModelInput, shape: Sequence[int]) -> str | None:
    """Return the layout of color images that the input takes, or None if its shape does not determine it."""
    input_shape = model_input.shape
    if input_shape is None or len(input_shape) != 4 or len(shape) != 4 or min(shape[1:]) <= 1:  # noqa: PLR2004  # N, C, H and W
        return None
    channels_first, channels_last = shape[1] == COLOUR_CHANNELS, shape[3] == COLOUR_CHANNELS
    if channels_first == channels_last or (COLOUR_CHANNELS not in {input_shape[1], input_shape[3]}):
        return None
    return "NCHW" if channels_first else "NHWC"


def _summarize_input(model_input: ModelInput, stats: _InputStats) -> InputSummary:
    has_values = stats.finite_count > 0
    return InputSummary(
        name=model_input.name,
        dtype=model_input.dtype,
        shape=model_input.shape,
        data_shape=stats.shape,
        low=stats.low if has_values else None,
        high=stats.high if has_values else None,
        mean=stats.total / stats.finite_count if has_values else None,
        nan=stats.nan,
        inf=stats.inf,
    )


def _dataset_findings(dataset: Dataset) -> Iterable[DataFinding]:
    if dataset.random:
        yield DataFinding(kind="random", message="The data is random. Use samples that are similar to real inputs.")
    if dataset.count < FEW_SAMPLES:
        yield DataFinding(
            kind="few-samples",
            message=(
                f"There are only {dataset.count} samples. Below {FEW_SAMPLES}, ranges depend on the choice of samples."
                " Add more."
            ),
        )
    unused_keys = [
        name for name in dataset.ignored if name.lower() not in LABEL_KEYS and not name.startswith("files with ")
    ]
    if unused_keys:
        yield DataFinding(
            kind="ignored",
            message=f"No input takes {', '.join(map(repr, unused_keys))}. Remove the data, or rename it to an input.",
        )


def _input_findings(model_input: ModelInput, stats: _InputStats, dataset: Dataset) -> Iterable[DataFinding]:
    """Yield likely mistakes in the values of `model_input`."""
    if stats.nan or stats.inf:
        yield DataFinding(
            kind="not-finite",
            input=model_input.name,
            message=f"{model_input.name} receives {stats.nan} NaN and {stats.inf} infinite values, which calibration"
            " rejects."
            " Fix the data, or remove these samples.",
        )
    is_float = dtype_kind(numpy_dtype(model_input.dtype)) == "float"
    maybe_pixels = stats.integral or (model_input.shape is not None and len(model_input.shape) == 4)  # noqa: PLR2004  # a batch of images
    if is_float and maybe_pixels and stats.low >= 0 and MIN_UNSCALED_PIXEL <= stats.high <= 255:  # noqa: PLR2004  # the largest pixel
        yield DataFinding(
            kind="unscaled",
            input=model_input.name,
            message=f"{model_input.name} of {model_input.dtype} receives {stats.low:g} to {stats.high:g}, which look"
            " like unscaled pixels. Scale them as in training, unless the model does it.",
        )
    values_per_sample = stats.value_count // max(dataset.count, 1)
    if stats.finite_count and stats.low == stats.high and values_per_sample > 1:
        yield DataFinding(
            kind="constant",
            input=model_input.name,
            message=f"{model_input.name} is always {stats.low:g}, which does not give a range. Use real values.",
        )
    elif dataset.count > 1 and len(stats.digests) == 1 and values_per_sample > 1:
        yield DataFinding(
            kind="same-samples",
            input=model_input.name,
            message=f"{model_input.name} is the same in all {dataset.count} samples. Use different samples.",
        )
    yield from _layout_findings(model_input, stats)
    item_shape, input_shape = dataset.stacked_shapes.get(model_input.name), model_input.shape
    if (
        item_shape is not None
        and input_shape is not None
        and len(item_shape) == len(input_shape)
        and None in input_shape[1:]
    ):
        count = item_shape[0] // (input_shape[0] or 1)
        yield DataFinding(
            kind="stacked",
            input=model_input.name,
            message=f"{model_input.name} has open axes, and an item of {format_shape(item_shape)} was split into"
            f" {count}"
            f" samples of {format_shape((input_shape[0] or 1, *item_shape[1:]))}. If it is one sample, return"
            " array[None].",
        )


def _layout_findings(model_input: ModelInput, stats: _InputStats) -> Iterable[DataFinding]:
    """Yield findings about channels on the wrong axis."""
    if stats.layout_difference and stats.swapped_difference < SWAPPED_LAYOUT_RATIO * stats.layout_difference:
        channels_first = stats.shape is not None and stats.shape[1] == COLOUR_CHANNELS
        declared, apparent = ("NCHW", "NHWC") if channels_first else ("NHWC", "NCHW")
        axes = "0, 3, 1, 2" if channels_first else "0, 2, 3, 1"
        yield DataFinding(
            kind="layout",
            input=model_input.name,
            message=f"{model_input.name} has the shape of {declared}, but its values look like reshaped {apparent}."
            " Transpose it"
            f" instead: array.transpose({axes}).",
        )
    input_shape, data_shape = model_input.shape, stats.shape
    if input_shape is None or data_shape is None or len(input_shape) != 4 or len(data_shape) != 4:  # noqa: PLR2004  # N, C, H and W
        return
    if (
        input_shape[1] is None
        and input_shape[3] is None
        and (data_shape[1] in {1, COLOUR_CHANNELS}) != (data_shape[3] in {1, COLOUR_CHANNELS})
    ):
        channels_last = data_shape[3] in {1, COLOUR_CHANNELS}
        yield DataFinding(
            kind="layout-open",
            input=model_input.name,
            message=f"{model_input.name} has only open axes, and the data has its channels"
            f" {'last' if channels_last else 'first'}."
            " Check that the model expects them there.",
        )
