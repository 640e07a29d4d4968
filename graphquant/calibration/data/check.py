"""Checks of calibration data: a summary of each input, and likely mistakes.

`check_dataset` compares all values with the inputs. `SampleCheck` reads the first samples, and judges the scale of
an input by what the model itself stores: the variance of its first batch normalization or, if that was folded, the
biases of its first weighted op.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from statistics import median  # not `np.median`: it imports masked arrays, as long as the check of a small model
from typing import TYPE_CHECKING, Literal

import numpy as np

from graphquant import formats
from graphquant.calibration.data.dataset import LABEL_KEYS, MIN_SPLIT_SAMPLES
from graphquant.calibration.data.fit import dtype_kind, non_finite_mask, numpy_dtype
from graphquant.calibration.data.model_inputs import InputLayer, InputUse, channel_moments, find_input_uses, is_negated
from graphquant.errors import DataError, MissingDependencyError, ModelError
from graphquant.utils import HtmlRepresentation
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from graphquant.calibration.data.dataset import Dataset
    from graphquant.formats import Feeds, InputSpec, Runner
    from graphquant.ir import Model, Shape
    from graphquant.numerics import Array

    ModelRun = tuple[Feeds, Mapping[str, Array]]  # inputs and outputs of a run

RUN_VALUES = 16  # length of a run of values, mostly different ones, that two samples share only if they overlap
MAX_SHIFT = 0.75  # of a sample; windows further apart share few values
MIN_CUTS = 4  # number of overlapping samples of an item above which they count as cuts of it
FEW_SAMPLES = 32  # below this number of samples, ranges depend on the choice of samples
MIN_UNSCALED_PIXEL = 128  # a maximum from here to 255, without negative values, looks like pixels that were not scaled
MAX_PIXEL = 255
MAX_VALUE = float(np.sqrt(np.finfo(np.float32).max))  # a BatchNorm or LayerNorm squares values

CHECKED_SAMPLES = 32  # number of samples that `SampleCheck` reads, and whose values are compared with each other
RUN_SAMPLES = 8  # number of samples on which `SampleCheck` runs the model

MAX_BATCHNORM_RATIO = 10  # largest plausible ratio of a deviation and that which a batch normalization has stored
MAX_BIAS_RATIO = 20  # Ratio of a response and the bias above which pixels are unscaled. Trained layers have 0.5 to 10.
MIN_BIAS_RATIO = 0.05  # ratio of a response and the bias below which an input has almost no influence
UNIMPORTANT_BIAS_RATIO = 30_000  # ratio above which no layer needs its biases. Trained first layers have up to 2,100.
MAX_GATE = 50  # median input of sigmoids or tanhs that cannot be trained, as float32 has no slope there; trained have 8
MIN_TABLE_ROWS = 16  # number of rows from which a table is an embedding, and zeros and ones are no indices of it
LIMIT_DISTANCE = 1e-6  # largest distance from 0 or 1 of a saturated probability
MAX_DISTINCT = 64  # number of different samples that are remembered, so that memory does not grow

EQUAL_OUTPUTS_KINDS = {"unscaled", "saturated", "same-outputs"}  # findings that outputs of one class may cause

LARGEST_FLOAT32_PIXEL = 1e30  # differences of larger values, and their sums, are no float32
COLOUR_CHANNELS = 3
IMAGE_AXES = 4

SWAPPED_LAYOUT_RATIO = 0.8  # ratio of the differences of neighbors in the other layout below which it is reported
OUTLIER_BITS = 6  # a sample is an outlier if its largest value is this power of 2 times that of half of the samples
MAX_OUTLIERS = 0.2  # share of samples that are outliers; more of them are another class of samples
MIN_COMPARED_SAMPLES = 8  # number of samples from which their deviations are judged
MIN_COMPARED_VALUES = 16  # number of values in a sample from which the deviations of samples are judged
MAX_COMPARED_VALUES = 1 << 14  # number of neighboring values of a sample, in its middle, that are compared

SIMILAR_SAMPLES_RATIO = 0.2
"""Deviation of samples from their mean, relative to the deviation inside them, below which they are similar.

Samples of real data have 0.7 to 1.2, one item with noise has the level of the noise."""

MIN_NOISE_EVENNESS = 0.3
"""Squared mean of the variances of values, relative to the mean of the squares.

Noise gives 0.9, or 0.6 if it was clipped. Columns of different units, or objects before a fixed background, give less,
and samples of these may be similar."""

NOISE_CORRELATION = 0.3, 1.5
"""Mean squared correlation of two samples, relative to that of samples in random order, of random or shuffled values.

The expectation is exactly 1 then. Speech has 6 to 34, features 35 to 126, images 17 and more."""

NOISE_DEVIATIONS = 5  # number of standard deviations by which that of random values may exceed 1
POINT_AXES, MAX_COORDINATES = 2, 6  # points, in random order, have up to three coordinates and a normal or a color
MIN_UNORDERED_SAMPLES = 16  # number of samples, except images, from which their correlations are compared
MIN_LEVELS = 8  # number of different values in a sample below which correlations say little, as in one-hot vectors


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
    """A likely mistake in the data: its kind, the affected input if it is about one, and a description with advice.

    The level is "error" if no model can use such data.
    """

    kind: str
    input: str | None
    message: str
    level: Literal["warning", "error"] = "warning"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DataReport(HtmlRepresentation):
    """Summary of calibration data and the inputs that it feeds; `ignored` are keys and files that no input takes."""

    samples: int
    digest: str
    inputs: tuple[InputSummary, ...]
    ignored: tuple[str, ...]
    findings: tuple[DataFinding, ...]


@dataclass(slots=True)
class _InputStats:
    """Running statistics of the values of an input."""

    spec: InputSpec
    use: InputUse
    shape: Shape | None = None  # that of the data
    low: float = np.inf
    high: float = -np.inf
    total: float = 0.0
    finite_count: int = 0
    nan: int = 0
    inf: int = 0
    is_float: bool = False
    integral: bool = True
    consecutive: bool | None = None  # true if integers count their positions; None without several positions
    feeds: int = 0
    blank_feeds: int = 0
    digests: set[bytes] = field(default_factory=set)
    value_count: int = 0
    layout_difference: float = 0.0
    swapped_difference: float = 0.0
    normalized: list[Array] = field(default_factory=list)  # some values of each feed, with mean 0 and norm 1
    exponents: Counter[int] = field(default_factory=Counter)  # of the largest value of each feed, to the base 2
    levels: Array = field(default_factory=lambda: np.empty(0))  # different values as long as none is positive
    previous: Array = field(default_factory=lambda: np.empty(0))  # the values of the last feed
    findings: dict[str, str] = field(default_factory=dict)  # messages about the values, by kind
    overlaps: int = 0  # number of feeds that share a run of values with the one before, at another position

    def add(self, values: Array) -> None:
        """Add the values of one feed."""
        if not self.value_count:
            self.shape = values.shape
        elif self.shape is not None:
            sizes = zip(self.shape, values.shape, strict=False)
            same_rank = len(self.shape) == values.ndim
            self.shape = tuple(size if size == new else None for size, new in sizes) if same_rank else None
        self.value_count += values.size
        self.feeds += 1
        if len(self.digests) <= MAX_DISTINCT:
            digest = hashlib.sha256(f"{values.shape}".encode())
            if values.dtype.hasobject:
                digest.update(repr(values.tolist()).encode())
            else:
                digest.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)  # without a copy
            self.digests.add(digest.digest())
        if dtype_kind(values.dtype) not in {"int", "float"}:
            return
        numbers = np.ascontiguousarray(values).reshape(-1)
        self.overlaps += _shares_run(numbers, self.previous)
        self.previous = numbers
        if (non_finite := non_finite_mask(numbers)).any():
            nan = int(np.isnan(numbers[non_finite].astype(np.float64)).sum())
            self.nan += nan
            self.inf += int(non_finite.sum()) - nan
            numbers = numbers[~non_finite]
        if numbers.dtype not in {np.dtype(np.float32), np.dtype(np.float64)}:
            numbers = numbers.astype(np.float64)
        if numbers.size:
            low, high = float(numbers.min()), float(numbers.max())
            self.low, self.high = min(self.low, low), max(self.high, high)
            self.total += float(numbers.sum(dtype=np.float64))
            self.exponents[math.frexp(max(-low, high))[1]] += 1
            self.finite_count += numbers.size
            self.is_float = dtype_kind(values.dtype) == "float"
            self.integral = self.integral and bool((numbers == np.rint(numbers)).all())
            self.blank_feeds += numbers.size > 1 and low == high
            if values.dtype.kind in "iu" and values.ndim and values.shape[-1] > 1:
                is_consecutive = bool((np.diff(values.astype(np.int64)) == 1).all())
                self.consecutive = self.consecutive is not False and is_consecutive

    @property
    def received(self) -> str:
        """Limits of the values, as the start of a message after the name of the input."""
        return f"receives {self.low:g} to {self.high:g}"

    @property
    def takes_images(self) -> bool:
        """True if the input has the axes of images."""
        return self.spec.shape is not None and len(self.spec.shape) == IMAGE_AXES

    @property
    def is_long(self) -> bool:
        """True if a sample has more values than a run."""
        return self.value_count > RUN_VALUES * self.feeds

    @property
    def are_cuts(self) -> bool:
        """True if the samples seem to be many, but are overlapping cuts of few items."""
        items = self.feeds - self.overlaps
        return self.feeds >= FEW_SAMPLES > items and MIN_CUTS * items <= self.feeds

    @property
    def compared_samples(self) -> Array | None:
        """Normalized values (samples, values) that are compared; None if they are too few."""
        size = self.normalized[0].size if self.normalized else 0
        samples = [values for values in self.normalized if values.size == size]
        return np.stack(samples) if len(samples) >= MIN_COMPARED_SAMPLES and size >= MIN_COMPARED_VALUES else None

    def are_unordered(self, samples: Array) -> bool:
        """Return True if the values of each normalized sample could as well be in random order."""
        are_floats = self.is_float and len(samples) >= MIN_UNORDERED_SAMPLES  # indices have no order
        if not (are_floats or len(self.shape or ()) == IMAGE_AXES) or _distinct_count(samples[0]) < MIN_LEVELS:
            return False
        axes = [size or math.inf for size in (self.shape or ())[1:] if size != 1]  # None if the number of points varies
        if len(axes) == POINT_AXES and min(axes) <= MAX_COORDINATES:
            return False
        # Not `samples @ samples.T`: threads of BLAS wait for each other longer than one takes.
        squares = np.square(np.einsum("ik,jk->ij", samples, samples))[np.triu_indices(len(samples), 1)]
        # A squared correlation has the variance 2 relative to its expectation. Columns of a table may have little more.
        limit = min(NOISE_CORRELATION[1], 1 + NOISE_DEVIATIONS * math.sqrt(2 / squares.size))
        return bool(NOISE_CORRELATION[0] < squares.mean() * (samples.shape[1] - 1) < limit)

    @property
    def negated_pixels(self) -> bool:
        """True if the values look like pixels with the wrong sign. Decibels from -1 to 0 have more different values."""
        has_limits = self.high == 0 and (self.low == -1 or -MAX_PIXEL <= self.low <= -MIN_UNSCALED_PIXEL)
        return has_limits and self.levels.size <= MAX_PIXEL + 1

    @property
    def unscaled_kind(self) -> tuple[str, int]:
        """The unscaled numbers that the values look like, or "", and their divisor."""
        if self.low >= 0 and MIN_UNSCALED_PIXEL <= self.high <= MAX_PIXEL:
            return "pixels", MAX_PIXEL
        if self.layout_difference and max(-self.low, self.high) > MAX_PIXEL:
            return "pixels that were scaled the wrong way", MAX_PIXEL
        for bits, least in ((8, 64), (16, MAX_PIXEL)):
            limit = 1 << (bits - 1)
            if self.integral and -limit <= self.low < -least and least < self.high <= limit:
                return f"{bits}-bit samples", limit
        return "", 1

    def compare_samples(self, values: Array) -> None:
        """Keep some normalized values of a feed, and the levels of pixels that are not positive."""
        if dtype_kind(values.dtype) in {"int", "float"} and values.size and not non_finite_mask(values).any():
            start = max(values.size - MAX_COMPARED_VALUES, 0) // 2
            numbers = values.reshape(-1)[start : start + MAX_COMPARED_VALUES].astype(np.float64)
            with np.errstate(over="ignore", invalid="ignore"):
                centered = numbers - numbers.mean()
                norm = float(np.sqrt(np.square(centered).sum()))
            if 0 < norm < np.inf:
                self.normalized.append(centered / norm)
            if self.high <= 0 and self.levels.size <= MAX_PIXEL + 1:
                self.levels = np.union1d(self.levels, numbers)

    def compare_layouts(self, values: Array) -> None:
        """Add the differences of values one row apart, for the declared layout and for the other one.

        The pixel below is usually similar to the pixel above. In NCHW it lies one width further, in NHWC one width
        times the number of channels.
        """
        layout = _image_layout(self.spec, values.shape)
        if layout is None or dtype_kind(values.dtype) not in {"int", "float"}:
            return
        width = values.shape[3] if layout == "NCHW" else values.shape[2]
        dtype = np.float32 if max(self.high, -self.low) < LARGEST_FLOAT32_PIXEL else np.float64
        images = values.reshape(len(values), -1).astype(dtype, copy=False)
        buffer = np.empty_like(images[0])  # new memory for each result takes longer than the arithmetic

        def mean_difference(image: Array, distance: int) -> float:
            difference = np.subtract(image[distance:], image[:-distance], out=buffer[distance:])
            return float(np.abs(difference, out=difference).mean())

        distances = (width, width * COLOUR_CHANNELS) if layout == "NCHW" else (width * COLOUR_CHANNELS, width)
        with np.errstate(invalid="ignore"):  # infinite values are reported by themselves
            for image in images:
                self.layout_difference += mean_difference(image, distances[0])
                self.swapped_difference += mean_difference(image, distances[1])

    def summarize(self) -> InputSummary:
        """Return the summary of the input."""
        has_values = self.finite_count > 0
        return InputSummary(
            name=self.spec.name,
            dtype=self.spec.dtype,
            shape=self.spec.shape,
            data_shape=self.shape,
            low=self.low if has_values else None,
            high=self.high if has_values else None,
            mean=self.total / self.finite_count if has_values else None,
            nan=self.nan,
            inf=self.inf,
        )


def _relative_noise(samples: Array) -> float | None:
    """Return the deviation between normalized samples relative to the one inside them if it is even, or None."""
    variances = samples.var(0)
    level, squares = float(variances.mean()), float((variances**2).mean())
    is_even = squares > 0 and level**2 > MIN_NOISE_EVENNESS * squares
    return math.sqrt(level * samples.shape[1]) if is_even else None


def check_dataset(dataset: Dataset, inputs: Sequence[InputSpec], model: Model | None = None) -> DataReport:
    """Read all data once and report likely mistakes. Open it with `require_finite=False` to count NaN."""
    uses = {} if model is None else find_input_uses(model, inputs)
    all_stats, _ = _read_samples(dataset, inputs, uses, dataset.count, 0)
    return DataReport(
        samples=dataset.count,
        digest=dataset.final_digest(),
        inputs=tuple(stats.summarize() for stats in all_stats),
        ignored=dataset.ignored,
        findings=_find_mistakes(dataset, all_stats, None),
    )


def check_samples(dataset: Dataset, model: Model) -> tuple[DataFinding, ...]:
    """Return the likely mistakes in the samples for a float model. Raises a DataError if they cannot be right."""
    check = start_check(dataset, model)
    return () if check is None else check.finish()


def start_check(dataset: Dataset, model: Model) -> SampleCheck | None:
    """Check the first samples for a float model; None if it cannot run. Raises a DataError for impossible values."""
    try:
        return SampleCheck(dataset, formats.shared_runner(model, "source"))
    except (MissingDependencyError, ModelError):  # reported where the model must run
        return None


class SampleCheck:
    """The check of some samples in two steps: their values at once, and the response of the model when it can run."""

    def __init__(self, dataset: Dataset, runner: Runner) -> None:
        """Check the values of the first samples. Raises a DataError if no model can use them."""
        self._dataset, self._runner = dataset, runner
        self._uses = find_input_uses(runner.model, runner.inputs)
        if not dataset.random:  # every report says that data is random
            count = min(dataset.count, CHECKED_SAMPLES)
            self._all_stats, self._feeds = _read_samples(dataset, runner.inputs, self._uses, count, RUN_SAMPLES)
            for stats in self._all_stats:
                for kind, message in (stats.findings | _index_findings(stats)).items():
                    if kind in ERROR_KINDS:
                        raise DataError(f"{stats.spec.name} {message}")

    def finish(self, runs: Sequence[ModelRun] = (), output_runner: Runner | None = None) -> tuple[DataFinding, ...]:
        """Return all warnings, with those about `runs` of the model; by default, it runs on a few samples.

        `output_runner` has the same outputs, and a session already.
        """
        if self._dataset.random:
            return ()
        response = None
        if len(self._all_stats) == len(self._runner.inputs):
            with suppress(MissingDependencyError, ModelError):  # the command itself reports them, if it runs the model
                if not (judged := runs):
                    feeds, runner = self._feeds, self._runner
                    outputs = formats.run_outputs(output_runner, feeds) if output_runner else runner.run_each(feeds)
                    judged = list(zip(feeds, outputs, strict=True))
                response = _ModelResponse(self._runner, self._uses, judged)
        findings = _find_mistakes(self._dataset, self._all_stats, response)
        if runs and any(finding.kind in EQUAL_OUTPUTS_KINDS for finding in findings):
            return self.finish()  # the last samples may be of one class, and those from the whole range are not
        # From there on, the figures of each command show how little a few samples say.
        is_small = self._dataset.count < MIN_SPLIT_SAMPLES
        return tuple(finding for finding in findings if is_small or finding.kind != "few-samples")


def _read_samples(
    dataset: Dataset, inputs: Sequence[InputSpec], uses: Mapping[str, InputUse], sample_count: int, max_feeds: int
) -> tuple[list[_InputStats], list[Feeds]]:
    """Read the first samples; return the statistics of each input that is no sequence, and a few samples."""
    reader = iter(dataset.feeds_between(0, sample_count))
    first = list(islice(reader, 1))
    # A sequence of tensors is not checked, and a model that reads one is not run.
    sequences = {name for feed in first for name, value in feed.items() if isinstance(value, list)}
    all_stats = [_InputStats(spec, uses.get(spec.name, InputUse())) for spec in inputs if spec.name not in sequences]
    # Samples in order of time may begin with silence, so the model runs on samples from the whole range.
    step = max(sample_count // RUN_SAMPLES, 1)
    feeds: list[Feeds] = []
    previous: Feeds = {}
    for index, feed in enumerate(chain(first, reader)):
        if index % step == 0 and len(feeds) < max_feeds:
            feeds.append(feed)
        for stats in all_stats:
            values = feed[stats.spec.name]
            if dataset.repeats_samples and values is previous.get(stats.spec.name):
                continue
            stats.add(values)
            if index < CHECKED_SAMPLES:
                stats.compare_layouts(values)
                stats.compare_samples(values)
        previous = feed
    for stats in all_stats:
        stats.findings = _value_findings(stats, dataset)
        stats.normalized.clear()
        stats.previous = np.empty(0)
    return all_stats, feeds


def _find_mistakes(
    dataset: Dataset, all_stats: Sequence[_InputStats], response: _ModelResponse | None
) -> tuple[DataFinding, ...]:
    """Return the likely mistakes, from the statistics of each input and the response of a model."""
    findings = [DataFinding(kind, None, message) for kind, message in _dataset_findings(dataset).items()]
    varying = sum(stats.low < stats.high for stats in all_stats)
    for stats in all_stats:
        input_findings = {
            **stats.findings,
            **_scale_findings(stats, response),
            **_sign_findings(stats, response),
            **_layout_findings(stats),
            **_stacked_findings(stats.spec, dataset, response),
            **_index_findings(stats),
        }
        selects_rows = (stats.use.table_rows or 0) >= MIN_TABLE_ROWS and not stats.consecutive
        # A recurrent op without an initial state starts with zeros.
        is_empty_state = stats.use.starts_states and stats.low == stats.high == 0
        is_float = dtype_kind(numpy_dtype(stats.spec.dtype)) == "float"
        is_content = (is_float and not is_empty_state) or selects_rows
        for kind, message in input_findings.items():
            # Masks, positions and lengths may be the same in all samples.
            if is_content or not varying or kind not in CONTENT_KINDS:
                level: Literal["warning", "error"] = "error" if kind in ERROR_KINDS else "warning"
                findings.append(DataFinding(kind, stats.spec.name, f"{stats.spec.name} {message}", level))
    large = [stats for stats in all_stats if not stats.use.is_state and stats.low < stats.high and stats.is_long]
    if large and all(stats.are_cuts for stats in large):
        items = max(stats.feeds - stats.overlaps for stats in large)
        message = (
            f"The samples overlap: {large[0].feeds} seem to be cut from {items} longer, like windows or crops."
            " Ranges are then those of few items. Add samples of others."
        )
        findings.append(DataFinding("overlapping-samples", None, message))
    if response is not None and varying:
        findings += [DataFinding(kind, None, message) for kind, message in response.findings().items()]
    return tuple(findings)


def _image_layout(model_input: InputSpec, shape: Sequence[int]) -> str | None:
    """Return the layout of the images of three channels that an input takes, or None if it is not known."""
    input_shape = model_input.shape
    if input_shape is None or not len(input_shape) == len(shape) == IMAGE_AXES or not shape[0] or min(shape[1:]) <= 1:
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
            f"There are too few samples ({dataset.count}). Below {FEW_SAMPLES}, ranges and errors depend on"
            " their choice. Add more."
        )
    unused_keys = [
        name for name in dataset.ignored if name.lower() not in LABEL_KEYS and not name.startswith("files with ")
    ]
    if unused_keys:
        keys = ", ".join(map(repr, unused_keys))
        findings["ignored"] = f"No input takes {keys}. Remove the data, or rename it to an input."
    return findings


def _distinct_count(values: Array) -> int:
    """Return the number of different values. `np.unique` imports masked arrays, 15 ms of a process."""
    ordered = np.sort(values, axis=None)
    return 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))


def _shares_run(values: Array, previous: Array) -> bool:
    """Return True if the first, middle or last values of a feed occur at another position in the feed before.

    Chunks of a stream may begin with the end of the chunk before, which is no overlap of windows.
    """
    if values.dtype != previous.dtype or min(values.size, previous.size) < RUN_VALUES:
        return False
    values, previous = (array.view(f"u{array.itemsize}") for array in (values, previous))
    for start in (0, values.size // 2, values.size - RUN_VALUES):
        run = values[start : start + RUN_VALUES]
        if len(run) == RUN_VALUES and _distinct_count(run) > RUN_VALUES // 2:
            positions = np.flatnonzero(previous[: 1 - RUN_VALUES] == run[0])
            for offset in range(1, RUN_VALUES):
                positions = positions[previous[positions + offset] == run[offset]]
            if positions.size and 0 < abs(int(positions[0]) - start) < MAX_SHIFT * values.size:
                return True
    return False


def _value_findings(stats: _InputStats, dataset: Dataset) -> dict[str, str]:
    """Return the messages, after the name of the input, about likely mistakes in its values, by kind."""
    findings = {}
    if stats.nan and not stats.finite_count:
        findings["all-nan"] = "receives no number, only NaN and infinite values. Fix the data."
    elif (stats.nan and not stats.use.may_be_nan) or stats.inf:
        findings["not-finite"] = (
            f"receives {stats.nan} NaN and {stats.inf} infinite values, which calibration rejects. Fix the data, or"
            " remove these samples."
        )
    values_per_sample = stats.value_count // max(stats.feeds, 1)
    if stats.finite_count and stats.low == stats.high and values_per_sample > 1:
        findings["constant"] = f"is always {stats.low:g}, which does not give a range. Use real values."
    elif stats.feeds > 1 and len(stats.digests) == 1 and values_per_sample > 1:
        is_whole = dataset.repeats_samples or stats.feeds == dataset.count
        checked = f"all {dataset.count}" if is_whole else f"the first {stats.feeds}"
        findings["same-samples"] = f"is the same in {checked} samples. Use different samples."
    elif 2 * stats.blank_feeds >= max(stats.feeds, 2):
        findings["blank"] = (
            f"is a single value throughout, like silence or an empty image, in {stats.blank_feeds} of {stats.feeds}"
            " samples. Remove these samples."
        )
    elif stats.feeds > 1 and 2 * len(stats.digests) <= min(stats.feeds, MAX_DISTINCT) and values_per_sample > 1:
        findings["same-samples"] = (
            f"has only {len(stats.digests)} different values in {stats.feeds} samples. Use different samples."
        )
    exponents = sorted(stats.exponents.elements())
    large = [exponent for exponent in exponents if exponent > exponents[len(exponents) // 2] + OUTLIER_BITS]
    if large and MIN_COMPARED_SAMPLES <= len(exponents) >= len(large) / MAX_OUTLIERS:
        findings["large-samples"] = (
            f"has values above {2**OUTLIER_BITS} times those of most samples in {len(large)} of {len(exponents)}, which"
            " determine the range. Check the scale of these samples, or remove them."
        )
    samples = None if findings else stats.compared_samples
    noise = None if samples is None else _relative_noise(samples)
    if samples is not None and stats.are_unordered(samples):
        findings["noise"] = (
            "has values without order, like random numbers or shuffled values: samples are as different as if each was"
            " shuffled. Use real data, unless the model expects noise."
        )
    elif noise is not None and noise < SIMILAR_SAMPLES_RATIO:
        findings["similar-samples"] = (
            f"is almost the same in all samples: they deviate from their mean by {noise:.2g} times the deviation of the"
            " values in a sample, like one sample with noise. Use different samples."
        )
    return findings


def _scale_findings(stats: _InputStats, response: _ModelResponse | None) -> dict[str, str]:
    """Return messages about values on another scale than the model was trained on."""
    name, use = stats.spec.name, stats.use
    if dtype_kind(numpy_dtype(stats.spec.dtype)) != "float" or not stats.low < stats.high:
        return {}
    if max(-stats.low, stats.high) > MAX_VALUE:
        return {"scale": f"{stats.received}, whose squares are infinite in float32. Scale the values as in training."}
    if response is not None and (message := response.scale_message(name, use.layer)):
        return {"scale": f"{stats.received}{message}"}
    ratio = None if response is None else response.ratios.get(name)
    is_plausible = use.rescaled or use.table_rows is not None  # a row number is no pixel
    if ratio is not None and use.layer is not None and use.layer.is_first:
        is_plausible = use.layer.has_variance or ratio <= MAX_BIAS_RATIO
    kind, divisor = stats.unscaled_kind
    if is_plausible or not kind or not (stats.integral or stats.takes_images or stats.high == MAX_PIXEL):
        return {}
    if response is not None and response.needs_large_values(name):
        return {}
    return {
        "unscaled": f"of {stats.spec.dtype} {stats.received}, which look like unscaled {kind}. If training scaled them,"
        f" do the same: array / {divisor}, or --data FOLDER,scale=1/{divisor} for a folder of files."
    }


def _sign_findings(stats: _InputStats, response: _ModelResponse | None) -> dict[str, str]:
    """Return messages about values with the opposite sign of those that the model was trained on."""
    if response is not None and stats.spec.name in response.negated:
        return {
            "negated": f"{stats.received}. The response of the model has the opposite sign of the means that it has"
            " stored in training. Negate the values."
        }
    stores_means = stats.use.layer is not None and stats.use.layer.mean is not None
    is_judged_by_layer = stats.use.rescaled or (response is not None and stores_means)
    if stats.negated_pixels and (stats.takes_images or stats.low == -MAX_PIXEL) and not is_judged_by_layer:
        return {"negated": f"{stats.received}, which look like pixels with the wrong sign. Negate the values."}
    return {}


ERROR_KINDS = frozenset({"all-nan", "index"})  # kinds of findings that no model can use
CONTENT_KINDS = frozenset({"constant", "same-samples", "similar-samples", "blank"})  # usual in other inputs


def _index_findings(stats: _InputStats) -> dict[str, str]:
    """Return messages about indices that a table does not have."""
    use = stats.use
    if use.table_rows is None or not use.selects_all or not stats.finite_count:
        return {}
    if stats.high >= use.table_rows or stats.low < -use.table_rows:
        return {
            "index": f"{stats.received}, but it selects rows of a table that has"
            f" {use.table_rows}. Use the tokenizer or vocabulary of the model."
        }
    if use.table_rows >= MIN_TABLE_ROWS and 0 <= stats.low < stats.high <= 1:
        return {
            "mask": f"receives only 0 and 1, but it selects rows of a table that has {use.table_rows}. Check that it is"
            " not another input, such as a mask."
        }
    return {}


class _ModelResponse:
    """Response of a model to a few samples."""

    def __init__(self, runner: Runner, uses: Mapping[str, InputUse], runs: Sequence[ModelRun]) -> None:
        """Observe the first layers on the inputs of `runs`."""
        self._runner = runner
        self._feeds, self._outputs = [feed for feed, _ in runs], [outputs for _, outputs in runs]
        # For inputs with a layer, its standard deviation relative to what the layer has stored.
        self.ratios: dict[str, float] = {}
        self.negated: set[str] = set()  # inputs whose sign is wrong according to their layer
        # For inputs without a layer, or with gates in a recurrent one, the median magnitude of the gates' inputs.
        self.gates: dict[str, float] = {}
        for name, use in uses.items():
            layer, tensor = use.layer, use.gate if use.layer is None else use.layer.tensor
            if tensor is None or runner.unobservable([tensor]):
                continue
            observations = runner.observe([tensor], self._feeds, ancestors_only=True)
            # A generator, because the values of all samples need more memory than a small model.
            values = (array for observed in observations for array in observed.get(tensor, ()))
            if layer is None:
                magnitudes = [np.sort(np.abs(array), axis=None) for array in values if array.size]
                self.gates[name] = median([float(ordered[ordered.size // 2]) for ordered in magnitudes] or [0.0])
            elif (moments := channel_moments(layer, values)) is not None:
                means, deviations = moments
                if layer.weight is not None:
                    self.gates[name] = median(deviations.tolist())
                if (is_stored := layer.spread > 0).any():
                    self.ratios[name] = median((deviations[is_stored] / layer.spread[is_stored]).tolist())
                if is_negated(layer, means):
                    self.negated.add(name)

    def scale_message(self, name: str, layer: InputLayer | None) -> str:
        """Return the reason why the scale of input `name` is implausible for its first layer or gates, or ""."""
        hint = "Scale the values as in training, such as pixels from 0 to 255 if the model scales them itself."
        if (gate := self.gates.get(name, 0.0)) > MAX_GATE:
            return f". Half of the sigmoids or tanhs behind them receive {gate:.2g} or more and are constant. {hint}"
        if layer is None or (ratio := self.ratios.get(name)) is None:
            return ""
        stored, least, largest = "biases", MIN_BIAS_RATIO, UNIMPORTANT_BIAS_RATIO
        if layer.has_variance:
            stored, least, largest = "deviations in training", 1 / MAX_BATCHNORM_RATIO, MAX_BATCHNORM_RATIO
        if least <= ratio <= largest:
            return ""
        return f". The response of {layer.op} is {ratio:.2g} times its {stored}. {hint}"

    def needs_large_values(self, name: str) -> bool:
        """Return True if the model tells samples apart, but not if input `name` is divided by 255."""

        def classes(results: Sequence[Mapping[str, Array]], output: str) -> set[int]:
            return {int(result[output].argmax()) for result in results}

        first, *others = self._outputs
        outputs = [key for key in first if all(first[key].shape == result[key].shape for result in others)]
        outputs = [key for key in outputs if first[key].size > 1 and len(classes(self._outputs, key)) > 1]
        if not outputs:
            return False
        divided = [
            self._runner.run({**feed, name: (feed[name] / MAX_PIXEL).astype(feed[name].dtype)}) for feed in self._feeds
        ]
        return any(len(classes(divided, key)) == 1 for key in outputs)

    def mixes_rows(self) -> bool:
        """Return True if a run with a sample twice gives outputs as large as with it once: rows may be no samples."""
        if not self._feeds or any(not spec.shape or spec.shape[0] is not None for spec in self._runner.inputs):
            return False
        joined = {name: np.concatenate([value, value]) for name, value in self._feeds[0].items()}
        with suppress(ModelError):
            outputs = self._runner.run(joined)
            return all(outputs[name].shape == value.shape for name, value in self._outputs[0].items())
        return False

    def findings(self) -> dict[str, str]:
        """Return the messages about outputs that do not depend on the samples, by kind."""
        findings: dict[str, str] = {}
        samples_differ = any(
            not np.array_equal(values, feed[name])
            for feed in self._feeds[1:]
            for name, values in self._feeds[0].items()
        )
        has_equal_outputs = samples_differ  # the outputs of equal samples are equal
        for name in self._outputs[0] if self._outputs else ():
            values = [result[name] for result in self._outputs]
            is_float = dtype_kind(values[0].dtype) == "float"
            has_equal_outputs = has_equal_outputs and all(
                np.array_equal(values[0], value, equal_nan=is_float) for value in values[1:]
            )
            if not is_float or not values[0].size:
                continue
            bad_count = sum(bool(non_finite_mask(value).any()) for value in values)
            if bad_count:
                findings["not-finite-output"] = (
                    f"Output {name!r} of the float model has NaN or infinite values for {bad_count} of"
                    f" {len(values)} samples. Scale the samples as in training."
                )
            elif all(map(_is_saturated, values)):
                findings["saturated"] = (
                    f"The probabilities in output {name!r} of the float model are exactly 0 or 1 for all samples."
                    " Scale the samples as in training."
                )
        if has_equal_outputs and any(value.size for value in self._outputs[0].values()):
            findings["same-outputs"] = (
                "The float model has the same outputs for all samples, although they differ. Check the scale and the"
                " layout of the samples."
            )
        return findings


def _is_saturated(values: Array) -> bool:
    """Return True if the last axis has probabilities, and each is 0 or 1."""
    if not values.ndim or values.shape[-1] <= 1 or values.min() < 0:
        return False
    probabilities = values.astype(np.float64)
    is_normalized = bool((np.abs(probabilities.sum(-1) - 1) < LIMIT_DISTANCE).all())
    return is_normalized and bool((np.minimum(probabilities, 1 - probabilities) < LIMIT_DISTANCE).all())


def _layout_findings(stats: _InputStats) -> dict[str, str]:
    """Return messages about channels on the wrong axis."""
    findings = {}
    if stats.layout_difference and stats.swapped_difference < SWAPPED_LAYOUT_RATIO * stats.layout_difference:
        channels_first = stats.shape is not None and stats.shape[1] == COLOUR_CHANNELS
        declared, apparent, axes = ("NCHW", "NHWC", "0, 3, 1, 2") if channels_first else ("NHWC", "NCHW", "0, 2, 3, 1")
        findings["layout"] = (
            f"has the shape of {declared}, but its values look like reshaped {apparent}. Transpose it instead:"
            f" array.transpose({axes})."
        )
    shape, input_shape = stats.shape, stats.spec.shape
    if input_shape is None or shape is None or not len(input_shape) == len(shape) == IMAGE_AXES:
        return findings
    channels_first, channels_last = (shape[axis] in {1, COLOUR_CHANNELS} for axis in (1, 3))
    if input_shape[1] is None and input_shape[3] is None and channels_first != channels_last:
        findings["layout-open"] = (
            f"has only open axes, and the data has its channels {'last' if channels_last else 'first'}. Check that the"
            " model expects them there."
        )
    return findings


def _stacked_findings(model_input: InputSpec, dataset: Dataset, response: _ModelResponse | None) -> dict[str, str]:
    """Return a message if an item was perhaps one sample and not a stack of samples."""
    item_shape, input_shape = dataset.stacked_shapes.get(model_input.name), model_input.shape
    if item_shape is None or input_shape is None or len(item_shape) != len(input_shape):
        return {}
    if None not in input_shape[1:] and (response is None or input_shape[0] is not None or not response.mixes_rows()):
        return {}
    rows = input_shape[0] or 1
    message = (
        f"has open axes, and an item of {format_shape(item_shape)} was split into {item_shape[0] // rows} samples of"
        f" {format_shape((rows, *item_shape[1:]))}. If it is one sample, return array[None]."
    )
    return {"stacked": message}
