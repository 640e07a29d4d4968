"""Splits of calibration data: samples for calibration, for a search and for validation, and labels of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from graphquant import formats
from graphquant.calibration.data.dataset import MIN_SPLIT_SAMPLES
from graphquant.errors import DataError
from graphquant.formats import ANY_DTYPE, InputSpec

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset, MemoryData
    from graphquant.calibration.data.check import SampleCheck
    from graphquant.calibration.data.dataset import Feed
    from graphquant.calibration.data.function import Metric
    from graphquant.calibration.stats import Stats
    from graphquant.ir import Model

MIN_HOLDOUT_SAMPLES = MIN_SPLIT_SAMPLES // 2  # minimum size of the hold-out
HOLDOUT_DIVISOR = 5  # the hold-out is one in this many samples
MIN_FOLDS, MAX_FOLDS = 2, 4  # number of folds for many and for few samples
MANY_SAMPLES = 32  # number of samples from which half of them give good ranges
CLASS_KEYS = ("labels", "label")  # keys under which data may store the class of each sample


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOut:
    """Samples that are reserved for validation or for a search."""

    spec: str | MemoryData
    max_samples: int | None
    dataset: Dataset  # the opened data: at most `max_samples` samples of the data spec `spec`
    start: int  # index of the first reserved sample
    reuses_samples: bool  # true if calibration uses the reserved samples too
    # True if the ranges come from statistics of other data, which may contain some of these samples.
    calibrated_on_other_data: bool = False
    metric: Metric | None = None  # the user's metric, which needs all arrays of the data

    def samples(self, max_count: int | None = None) -> Dataset:
        """Return the reserved samples, at most `max_count` of them."""
        return sample_range(self.dataset, self.start, max_count)


def sample_range(dataset: Dataset, start: int, max_count: int | None) -> Dataset:
    """Return the samples from `start` on, at most `max_count` of them."""
    count = dataset.count - start
    feeds = dataset.open_feeds
    return replace(
        dataset,
        count=count if max_count is None else min(count, max_count),
        open_feeds=lambda first, last: feeds(start + first, start + last),
    )


def split_holdout(
    spec: str | MemoryData, max_samples: int | None, dataset: Dataset, metric: Metric | None = None
) -> tuple[Dataset, HoldOut]:
    """Split data into calibration samples and a hold-out: the last fifth, but at least 4 of 8 or more samples."""
    start = max(dataset.count - max(MIN_HOLDOUT_SAMPLES, dataset.count // HOLDOUT_DIVISOR), 0)
    too_few = dataset.count < MIN_SPLIT_SAMPLES
    holdout = HoldOut(
        spec=spec, max_samples=max_samples, dataset=dataset, start=start, reuses_samples=too_few, metric=metric
    )
    return dataset if too_few else replace(dataset, count=start), holdout


def open_labels(holdout: HoldOut, inputs: Sequence[InputSpec]) -> tuple[Dataset, str]:
    """Open the data of a hold-out with its class labels, and for a metric with all arrays that no input takes."""
    return open_labelled_data(holdout.dataset, holdout.spec, inputs, holdout.max_samples, holdout.metric)


def open_labelled_data(
    dataset: Dataset, data: str | MemoryData, inputs: Sequence[InputSpec], samples: int | None, metric: Metric | None
) -> tuple[Dataset, str]:
    """Open the data with its class labels, if there are any, and for a metric with all arrays that no input takes.

    Return the data and the key of the class labels, or "". Raises a DataError if an array does not fit the samples.
    """
    opened, labels = open_optional_labels(dataset, data, inputs, samples)
    other_keys = [key for key in dataset.ignored if key != labels and not key.startswith("files with ")]
    if metric is None or not other_keys:
        return opened, labels
    from graphquant.calibration.data import open_data

    specs = [*inputs, *([_class_labels(labels)] if labels else [])]
    specs += [InputSpec(name=key, dtype=ANY_DTYPE, shape=None) for key in other_keys]
    return open_data(data, specs, samples=samples, require_finite=False), labels


def _class_labels(name: str) -> InputSpec:
    """Return the class indices of samples, or of the rows of each sample, as an input."""
    return InputSpec(name=name, dtype="int64", shape=(None,))


def open_optional_labels(
    dataset: Dataset, data: str | MemoryData, inputs: Sequence[InputSpec], samples: int | None
) -> tuple[Dataset, str]:
    """Open the data with its labels if it has class labels; return the data and the key of the labels, or ""."""
    try:
        has_labels = any(key in dataset.ignored for key in CLASS_KEYS)
        return open_required_labels(dataset, data, inputs, samples) if has_labels else (dataset, "")
    except DataError:  # the array has no class indices
        return dataset, ""


def open_required_labels(
    dataset: Dataset, data: str | MemoryData, inputs: Sequence[InputSpec], samples: int | None
) -> tuple[Dataset, str]:
    """Open the data with its labels; return it and the key of the labels. Raises a DataError if these are missing."""
    from graphquant.calibration.data import open_data

    if (name := next((name for name in CLASS_KEYS if name in dataset.ignored), None)) is None:
        raise DataError(
            f"{data} has no 'labels', which an accuracy bound needs. Add an integer array with the class index of each"
            " sample."
        )
    input_specs = [*inputs, _class_labels(name)]
    try:
        return open_data(data, input_specs, samples=samples, require_finite=False), name
    except DataError as error:
        raise DataError(f"{error} Labels are integers: the class index of each sample, or of each token.") from error


@dataclass(frozen=True, kw_only=True)
class CalibrationData:
    """The data of one `insert`, and its split into samples for calibration, a search and validation.

    The fields decide the split. The data is opened on first use, because a plan may need no data at all.
    """

    spec: str | MemoryData | None  # data spec, data in memory, or None without data
    max_samples: int | None  # number of samples to use, or None for all
    open_samples: Callable[[int | None], Dataset]  # opens the given number of leading samples, or all for None
    validates: bool  # true if a hold-out is reserved for validation
    stats: Stats | None = None  # given statistics, or None
    needs_ranges: bool  # true if the range of a site depends on data
    runs_algorithms: bool  # true if the plan has optimization algorithms
    has_bounds: bool  # true if a search measures plans against bounds
    has_search: bool  # true if a search measures plans
    metric: Metric | None = None  # the user's metric, or None

    @cached_property
    def dataset(self) -> Dataset:
        """All samples."""
        return self.open_samples(self.max_samples)

    @cached_property
    def _split(self) -> tuple[Dataset, HoldOut]:
        return split_holdout(self.spec or "", self.max_samples, self.dataset, self.metric)

    @cached_property
    def calibration(self) -> Dataset | None:
        """Samples for calibration and optimization algorithms, or None if neither needs data.

        With given statistics, algorithms use the samples from which these were computed, without the hold-out.
        """
        calibrates = self.needs_ranges and self.stats is None
        if self.spec is None or not (calibrates or self.runs_algorithms):
            return None
        samples = self._split[0] if self.validates else self.dataset
        if self._range_stats is not None:
            count = min(samples.count, self._samples_of_stats)
            return replace(samples, count=count) if count else None
        return self.dataset if self.fold_count else samples

    @property
    def fold_count(self) -> int:
        """Number of folds in which a search with bounds measures plans; 0 for a set of samples of its own.

        All samples serve for ranges and for measurements: the plan of each fold has ranges of the other folds. The
        final ranges come from all samples. More folds leave each more samples for ranges, and take more time.
        """
        calibrates = self.needs_ranges and self.stats is None
        if self.spec is None or not (self.validates and self.has_bounds and (calibrates or self.runs_algorithms)):
            return 0
        if self._range_stats is not None or self.dataset.count < MIN_SPLIT_SAMPLES:
            return 0
        return MIN_FOLDS if self.dataset.count >= MANY_SAMPLES else MAX_FOLDS

    def make_fold(self, start: int, stop: int) -> tuple[HoldOut, Dataset]:
        """Return the samples [start, stop) to measure, and all others, which give the ranges."""
        data = self.dataset
        held_out = HoldOut(
            spec=self.spec or "",
            max_samples=self.max_samples,
            dataset=replace(data, count=stop),
            start=start,
            reuses_samples=False,
            metric=self.metric,
        )

        def open_others(first: int, last: int) -> Iterator[Feed]:
            yield from data.feeds_between(first, min(last, start))
            yield from data.feeds_between(max(first, start) + stop - start, last + stop - start)

        return held_out, replace(data, count=data.count - (stop - start), open_feeds=open_others)

    @property
    def lacks_samples(self) -> bool:
        """True if there is neither data nor statistics, and the plan needs ranges."""
        return self.needs_ranges and self.spec is None and self.stats is None

    @property
    def _range_stats(self) -> Stats | None:
        """The given statistics, or None if they provide no range."""
        return self.stats if self.needs_ranges else None

    @cached_property
    def _samples_of_stats(self) -> int:
        """Number of leading samples from which the given statistics were computed."""
        runs = () if self.stats is None else self.stats.runs
        # Some kinds of data have another digest for fewer samples.
        return max(
            (
                run.samples
                for run in runs
                if run.data_digest in {self.dataset.final_digest(), self.open_samples(run.samples).final_digest()}
            ),
            default=0,
        )

    def _calibration_count(self) -> int:
        """Return the number of leading samples from which the ranges are computed, now or in given statistics."""
        if self._range_stats is not None:
            return self._samples_of_stats
        return 0 if self.calibration is None else self.calibration.count

    def start_check(self, model: Model) -> SampleCheck | None:
        """Check the values of the samples if a float model runs on them; see `SampleCheck`."""
        if self.spec is None or not (self.validates or self.calibration is not None):
            return None
        from graphquant.calibration.data.check import start_check

        return start_check(self.dataset, model)

    @cached_property
    def search_set(self) -> HoldOut | None:
        """Samples on which a search measures plans, or None without a search, data or validation.

        With folds, these are all samples. Otherwise they are neither calibrated on nor part of the hold-out, because
        ranges fit their own calibration samples better than any others. If fewer than 4 such samples remain, the search
        uses the calibration samples nevertheless.
        """
        if self.spec is None or not (self.validates and self.has_search):
            return None
        # Without bounds a search only ranks the candidates, for which calibration samples are good enough.
        calibration_count = self._calibration_count() if self.has_bounds else 0
        remaining, holdout = self._split
        if self.fold_count:
            return replace(holdout, dataset=self.dataset, start=0, reuses_samples=False)
        reuses_samples = calibration_count > remaining.count - MIN_HOLDOUT_SAMPLES
        start = 0 if reuses_samples else calibration_count
        return replace(holdout, dataset=remaining, start=start, reuses_samples=reuses_samples)

    @cached_property
    def validation_set(self) -> HoldOut | None:
        """Samples for validation, or None without data or validation.

        With folds, these are all samples. The same holds if the data was not split for calibration, unless statistics
        or a search used it; then these are the last fifth.
        """
        if self.spec is None or not self.validates:
            return None
        holdout, calibration_count = self._split[1], self._calibration_count()
        if self.fold_count:
            return replace(holdout, start=0, reuses_samples=True)
        if calibration_count:
            return replace(holdout, reuses_samples=holdout.reuses_samples or calibration_count > holdout.start)
        holdout = replace(holdout, calibrated_on_other_data=self._range_stats is not None)
        return holdout if self.has_search else replace(holdout, start=0, reuses_samples=False)


def open_model_data(model: Model, spec: str | MemoryData, samples: int | None) -> Dataset:
    """Open the data of a spec for the inputs of a model, at most `samples` samples."""
    from graphquant.calibration.data import open_data
    from graphquant.calibration.data.model_inputs import replaces_nan

    inputs = formats.format_module(model.format).input_specs(model)
    return open_data(spec, inputs, samples=samples, require_finite=not replaces_nan(model), check_in_background=True)


DataT = TypeVar("DataT", "str | MemoryData", "str | MemoryData | None")


def complete_model_data(model: Model, spec: DataT) -> DataT:
    """Return data for all inputs of a model, if it is a decoder and `spec` has token ids without past states."""
    if spec is None:
        return spec
    from graphquant.calibration.data.decoder import complete_decoder_data

    return complete_decoder_data(model, spec)
