"""Checks of calibration data: a summary of each input, and likely mistakes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from graphquant.calibration.data.fit import dtype_kind, non_finite_mask, numpy_dtype
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.calibration.data.dataset import Dataset
    from graphquant.calibration.data.fit import Shape
    from graphquant.formats import InputSpec
    from graphquant.numerics import Array

FEW_SAMPLES = 32
"""Below this number of samples, ranges depend on the choice of samples."""

MIN_UNSCALED_PIXEL = 128
"""A maximum from here to 255, without negative values, looks like pixels that were not scaled."""

LABEL_KEYS = frozenset({"label", "labels", "target", "targets", "y", "class", "position 1"})
"""Keys that no input is expected to take."""

COLOUR_CHANNELS = 3
IMAGE_AXES = 4

LAYOUT_CHECK_SAMPLES = 32
"""Number of samples whose neighboring values are compared."""

SWAPPED_LAYOUT_RATIO = 0.8
"""Neighbors in the other layout must differ by less than this ratio before a swapped layout is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSummary:
    """Values that an input is fed, over all samples.

    An axis of `data_shape` is None if its size differs between samples; the shape is None if the rank does. `low`,
    `high` and `mean` are those of the finite values; None if there are none.
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


@dataclass(frozen=True, slots=True)
class DataFinding:
    """A likely mistake in the data: its kind, the affected input if it is about one, and a description with advice."""

    kind: str
    input: str | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Summary of calibration data and the inputs that it feeds; `ignored` are keys and files that no input takes."""

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

    def add(self, values: Array) -> None:
        """Add the values of one feed."""
        if not self.value_count:
            self.shape = values.shape
        elif self.shape is not None:
            sizes = zip(self.shape, values.shape, strict=False)
            same_rank = len(self.shape) == values.ndim
            self.shape = tuple(size if size == new else None for size, new in sizes) if same_rank else None
        self.value_count += values.size
        if len(self.digests) <= 1:  # two digests suffice to know that samples differ
            is_text = values.dtype.hasobject
            content = repr(values.tolist()).encode() if is_text else np.ascontiguousarray(values).tobytes()
            self.digests.add(hashlib.sha256(f"{values.shape}".encode() + content).digest())
        if dtype_kind(values.dtype) not in {"int", "float"}:
            return
        non_finite = non_finite_mask(values)
        nan = int(np.isnan(values[non_finite].astype(np.float64)).sum())
        self.nan += nan
        self.inf += int(non_finite.sum()) - nan
        numbers = values[~non_finite].astype(np.float64)
        if numbers.size:
            self.low = min(self.low, float(numbers.min()))
            self.high = max(self.high, float(numbers.max()))
            self.total += float(numbers.sum())
            self.finite_count += numbers.size
            self.integral = self.integral and bool((numbers == np.rint(numbers)).all())

    def compare_layouts(self, model_input: InputSpec, values: Array) -> None:
        """Add the differences of values one row apart, for the declared layout and for the other one.

        The pixel below is usually similar to the pixel above. In NCHW it lies one width further, in NHWC one width
        times the number of channels.
        """
        layout = _image_layout(model_input, values.shape)
        if layout is None or dtype_kind(values.dtype) not in {"int", "float"}:
            return
        width = values.shape[3] if layout == "NCHW" else values.shape[2]
        for image in values.reshape(len(values), -1).astype(np.float64):
            planar, interleaved = (
                float(np.abs(image[distance:] - image[:-distance]).mean())
                for distance in (width, width * COLOUR_CHANNELS)
            )
            self.layout_difference += planar if layout == "NCHW" else interleaved
            self.swapped_difference += interleaved if layout == "NCHW" else planar

    def summarize(self, model_input: InputSpec) -> InputSummary:
        """Return the summary of the input."""
        has_values = self.finite_count > 0
        return InputSummary(
            name=model_input.name,
            dtype=model_input.dtype,
            shape=model_input.shape,
            data_shape=self.shape,
            low=self.low if has_values else None,
            high=self.high if has_values else None,
            mean=self.total / self.finite_count if has_values else None,
            nan=self.nan,
            inf=self.inf,
        )


def check_dataset(dataset: Dataset, inputs: Sequence[InputSpec]) -> DataReport:
    """Read all data once and report likely mistakes. Open it with `require_finite=False` to count NaN."""
    stats_of_inputs = [(model_input, _InputStats()) for model_input in inputs]
    for index, feed in enumerate(dataset):
        for model_input, stats in stats_of_inputs:
            stats.add(feed[model_input.name])
            if index < LAYOUT_CHECK_SAMPLES:
                stats.compare_layouts(model_input, feed[model_input.name])
    findings = [DataFinding(kind, None, message) for kind, message in _dataset_findings(dataset).items()]
    for model_input, stats in stats_of_inputs:
        for check in (_value_findings, _layout_findings, _stacked_findings):
            for kind, message in check(model_input, stats, dataset).items():
                findings.append(DataFinding(kind, model_input.name, f"{model_input.name} {message}"))
    return DataReport(
        samples=dataset.count,
        digest=dataset.final_digest(),
        inputs=tuple(stats.summarize(model_input) for model_input, stats in stats_of_inputs),
        ignored=dataset.ignored,
        findings=tuple(findings),
    )


def _image_layout(model_input: InputSpec, shape: Sequence[int]) -> str | None:
    """Return the layout of color images that the input takes, or None if its shape does not determine it."""
    input_shape = model_input.shape
    if input_shape is None or len(input_shape) != IMAGE_AXES or len(shape) != IMAGE_AXES or min(shape[1:]) <= 1:
        return None
    channels_first, channels_last = shape[1] == COLOUR_CHANNELS, shape[3] == COLOUR_CHANNELS
    if channels_first == channels_last or (COLOUR_CHANNELS not in {input_shape[1], input_shape[3]}):
        return None
    return "NCHW" if channels_first else "NHWC"


def _dataset_findings(dataset: Dataset) -> dict[str, str]:
    """Return the messages about likely mistakes of the whole data, by kind."""
    findings = {}
    if dataset.random:
        findings["random"] = "The data is random. Use samples that are similar to real inputs."
    if dataset.count < FEW_SAMPLES:
        findings["few-samples"] = (
            f"There are only {dataset.count} samples. Below {FEW_SAMPLES}, ranges depend on the choice of samples."
            " Add more."
        )
    unused_keys = [
        name for name in dataset.ignored if name.lower() not in LABEL_KEYS and not name.startswith("files with ")
    ]
    if unused_keys:
        keys = ", ".join(map(repr, unused_keys))
        findings["ignored"] = f"No input takes {keys}. Remove the data, or rename it to an input."
    return findings


def _value_findings(model_input: InputSpec, stats: _InputStats, dataset: Dataset) -> dict[str, str]:
    """Return the messages, after the name of the input, about likely mistakes in its values, by kind."""
    findings = {}
    if stats.nan or stats.inf:
        findings["not-finite"] = (
            f"receives {stats.nan} NaN and {stats.inf} infinite values, which calibration rejects. Fix the data, or"
            " remove these samples."
        )
    is_float = dtype_kind(numpy_dtype(model_input.dtype)) == "float"
    maybe_pixels = stats.integral or (model_input.shape is not None and len(model_input.shape) == IMAGE_AXES)
    if is_float and maybe_pixels and stats.low >= 0 and MIN_UNSCALED_PIXEL <= stats.high <= 255:  # noqa: PLR2004  # the largest pixel
        findings["unscaled"] = (
            f"of {model_input.dtype} receives {stats.low:g} to {stats.high:g}, which look like unscaled pixels. Scale"
            " them as in training, unless the model does it."
        )
    values_per_sample = stats.value_count // max(dataset.count, 1)
    if stats.finite_count and stats.low == stats.high and values_per_sample > 1:
        findings["constant"] = f"is always {stats.low:g}, which does not give a range. Use real values."
    elif dataset.count > 1 and len(stats.digests) == 1 and values_per_sample > 1:
        findings["same-samples"] = f"is the same in all {dataset.count} samples. Use different samples."
    return findings


def _layout_findings(model_input: InputSpec, stats: _InputStats, _dataset: Dataset) -> dict[str, str]:
    """Return messages about channels on the wrong axis."""
    findings = {}
    if stats.layout_difference and stats.swapped_difference < SWAPPED_LAYOUT_RATIO * stats.layout_difference:
        channels_first = stats.shape is not None and stats.shape[1] == COLOUR_CHANNELS
        declared, apparent, axes = ("NCHW", "NHWC", "0, 3, 1, 2") if channels_first else ("NHWC", "NCHW", "0, 2, 3, 1")
        findings["layout"] = (
            f"has the shape of {declared}, but its values look like reshaped {apparent}. Transpose it instead:"
            f" array.transpose({axes})."
        )
    shape = stats.shape
    if model_input.shape is None or shape is None or not len(model_input.shape) == len(shape) == IMAGE_AXES:
        return findings
    channels_first, channels_last = (shape[axis] in {1, COLOUR_CHANNELS} for axis in (1, 3))
    if model_input.shape[1] is None and model_input.shape[3] is None and channels_first != channels_last:
        findings["layout-open"] = (
            f"has only open axes, and the data has its channels {'last' if channels_last else 'first'}. Check that the"
            " model expects them there."
        )
    return findings


def _stacked_findings(model_input: InputSpec, _stats: _InputStats, dataset: Dataset) -> dict[str, str]:
    """Return a message if an item was perhaps one sample and not a stack of samples."""
    item_shape, input_shape = dataset.stacked_shapes.get(model_input.name), model_input.shape
    if item_shape is None or input_shape is None or len(item_shape) != len(input_shape) or None not in input_shape[1:]:
        return {}
    rows = input_shape[0] or 1
    message = (
        f"has open axes, and an item of {format_shape(item_shape)} was split into {item_shape[0] // rows} samples of"
        f" {format_shape((rows, *item_shape[1:]))}. If it is one sample, return array[None]."
    )
    return {"stacked": message}
