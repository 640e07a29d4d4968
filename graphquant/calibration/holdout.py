"""Splits of calibration data: samples for calibration, for a search and for validation, and labels of samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from graphquant.errors import DataError
from graphquant.formats import InputSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from graphquant.calibration.data import Dataset
    from graphquant.calibration.stats import Stats

MIN_HOLDOUT_SAMPLES = 4
"""Minimum size of the hold-out. Data with fewer than twice as many samples is not split."""

HOLDOUT_DIVISOR = 5
"""The hold-out is one in this many samples."""

LABEL_KEYS = ("labels", "label")
"""Keys under which data may store the class of each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOut:
    """Samples that are reserved for validation or for a search.

    Attributes:
        spec: Data spec of the samples.
        max_samples: Maximum number of samples of the spec, or None for all.
        batches: The opened data.
        start: Index of the first reserved sample.
        reuses_samples: True if calibration uses the reserved samples too.
        calibrated_on_other_data: True if the ranges come from statistics of other data, which may contain some of
            these samples.
    """

    spec: str
    max_samples: int | None
    batches: Dataset
    start: int
    reuses_samples: bool
    calibrated_on_other_data: bool = False

    def samples(self) -> Dataset:
        """Return the reserved samples."""
        return sample_range(self.batches, self.start, None)


def sample_range(batches: Dataset, start: int, max_count: int | None) -> Dataset:
    """Return the samples from `start` on, at most `max_count` of them."""
    count = batches.count - start
    feeds = batches.open_feeds
    return replace(
        batches,
        count=count if max_count is None else min(count, max_count),
        open_feeds=lambda first, last: feeds(start + first, start + last),
    )


def split_holdout(spec: str, max_samples: int | None, batches: Dataset) -> tuple[Dataset, HoldOut]:
    """Split data into calibration samples and a hold-out: the last fifth, but at least 4 of 8 or more samples."""
    start = max(batches.count - max(MIN_HOLDOUT_SAMPLES, batches.count // HOLDOUT_DIVISOR), 0)
    too_few = batches.count < 2 * MIN_HOLDOUT_SAMPLES
    holdout = HoldOut(spec=spec, max_samples=max_samples, batches=batches, start=start, reuses_samples=too_few)
    return batches if too_few else replace(batches, count=start), holdout


def first_half(batches: Dataset) -> Dataset:
    """Return the first half of the samples, so that a search can use the rest; all samples if there are under 8."""
    half = batches.count // 2
    return replace(batches, count=half) if half >= MIN_HOLDOUT_SAMPLES else batches


def split_search_set(spec: str, max_samples: int | None, batches: Dataset, calibration_count: int) -> HoldOut:
    """Return the samples on which a search measures plans: neither calibrated on nor part of the hold-out.

    Ranges fit their own calibration samples better than any others, so errors on these samples are too optimistic.
    If fewer than 4 other samples remain, the search uses the calibration samples nevertheless.

    Args:
        spec: Data spec.
        max_samples: Maximum number of samples of the spec, or None for all.
        batches: The opened data.
        calibration_count: Number of leading samples from which the ranges were computed.
    """
    remaining = split_holdout(spec, max_samples, batches)[0]
    reuses_samples = calibration_count > remaining.count - MIN_HOLDOUT_SAMPLES
    return HoldOut(
        spec=spec,
        max_samples=max_samples,
        batches=remaining,
        start=0 if reuses_samples else calibration_count,
        reuses_samples=reuses_samples,
    )


def count_calibrated_samples(stats: Stats | None, batches: Dataset, open_first: Callable[[int], Dataset]) -> int:
    """Return how many leading samples of the data the statistics were computed from, or 0 for other data.

    Args:
        stats: The statistics.
        batches: The data.
        open_first: Opens the given number of leading samples. Some kinds of data have another digest for fewer samples.
    """
    runs = () if stats is None else stats.runs
    content = batches.final_digest() if runs else ""
    return max(
        (run.samples for run in runs if run.data_digest in {content, open_first(run.samples).final_digest()}), default=0
    )


def holdout_for_stats(
    spec: str,
    max_samples: int | None,
    batches: Dataset,
    calibration_count: int,
    *,
    has_search: bool,
    ranges_from_stats: bool,
) -> HoldOut:
    """Return the validation samples of data that was not split for calibration.

    These are all samples, or the last fifth if the data was used: by the statistics, or by a search.

    Args:
        spec: Data spec.
        max_samples: Maximum number of samples of the spec, or None for all.
        batches: The opened data.
        calibration_count: Number of leading samples from which the ranges were computed.
        has_search: True if a search measured plans on the data.
        ranges_from_stats: True if statistics provide the ranges.
    """
    holdout = replace(
        split_holdout(spec, max_samples, batches)[1],
        calibrated_on_other_data=ranges_from_stats and not calibration_count,
    )
    if calibration_count:
        return replace(holdout, reuses_samples=holdout.reuses_samples or calibration_count > holdout.start)
    return holdout if has_search else replace(holdout, start=0, reuses_samples=False)


def open_optional_labels(
    batches: Dataset, data: str, inputs: Sequence[InputSpec], samples: int | None
) -> tuple[Dataset, str]:
    """Open the data with its labels if it has class labels; return the data and the key of the labels, or ""."""
    if not set(LABEL_KEYS) & set(batches.ignored):
        return batches, ""
    try:
        return open_required_labels(batches, data, inputs, samples)
    except DataError:  # an array of that name which holds no class indices
        return batches, ""


def open_required_labels(
    batches: Dataset, data: str, inputs: Sequence[InputSpec], samples: int | None
) -> tuple[Dataset, str]:
    """Open the data with its labels; return the data and the key of the labels.

    Raises:
        DataError: The data has no labels, or they are not class indices.
    """
    from graphquant.calibration.data import open_data

    name = next((name for name in LABEL_KEYS if name in batches.ignored), None)
    if name is None:
        raise DataError(
            f"{data} has no 'labels', which an accuracy bound needs. Add an integer array with the class index of each"
            " sample."
        )
    input_specs = [*inputs, InputSpec(name=name, dtype="int64", shape=(None,))]
    try:
        return open_data(data, input_specs, samples=samples, require_finite=False), name
    except DataError as error:
        raise DataError(f"{error} Labels are integers: the class index of each sample.") from error


@dataclass(kw_only=True)
class CalibrationData:
    """The data of one `insert`, and its split into samples for calibration, a search and validation.

    The data is opened on first use, because a plan may need no data at all.

    Attributes:
        spec: Data spec, or None without data.
        max_samples: Number of samples to use, or None for all.
        open_samples: Opens the given number of leading samples, or all for None.
        validates: True if a hold-out is reserved for validation.
        stats: Statistics that provide the ranges, or None.
        calibration: Samples for calibration and optimization algorithms, or None if neither needs data.
        holdout: Samples for validation, or None if the data was not split.
    """

    spec: str | None
    max_samples: int | None
    open_samples: Callable[[int | None], Dataset]
    validates: bool
    stats: Stats | None = None
    calibration: Dataset | None = None
    holdout: HoldOut | None = None

    @cached_property
    def batches(self) -> Dataset:
        """All samples."""
        return self.open_samples(self.max_samples)

    @cached_property
    def calibration_count(self) -> int:
        """Number of leading samples from which the ranges are computed, now or in the statistics."""
        if self.stats is not None:
            return count_calibrated_samples(self.stats, self.batches, self.open_samples)
        return 0 if self.calibration is None else self.calibration.count

    def split(self, *, has_bounds: bool) -> None:
        """Reserve the hold-out, and with bounds also the samples on which a search measures plans."""
        if not self.validates:
            self.calibration = self.batches
            return
        calibration, self.holdout = split_holdout(self.spec or "", self.max_samples, self.batches)
        self.calibration = first_half(calibration) if has_bounds else calibration

    def samples_of_stats(self) -> Dataset | None:
        """Return the samples from which the statistics were computed, without the hold-out, or None for other data."""
        if self.spec is None or not self.calibration_count:
            return None
        samples = self.batches
        if self.validates:
            samples = split_holdout(self.spec, self.max_samples, samples)[0]
        return replace(samples, count=min(samples.count, self.calibration_count))

    def search_set(self, *, has_bounds: bool) -> HoldOut | None:
        """Return the samples on which a search measures plans, or None without data or validation."""
        if self.spec is None or not self.validates:
            return None
        # Without bounds a search only ranks the candidates, for which calibration samples are good enough.
        calibration_count = self.calibration_count if has_bounds else 0
        return split_search_set(self.spec, self.max_samples, self.batches, calibration_count)

    def validation_set(self, *, has_search: bool) -> HoldOut | None:
        """Return the samples for validation, or None without data or validation."""
        if self.spec is None or not self.validates or self.holdout is not None:
            return self.holdout
        return holdout_for_stats(
            self.spec,
            self.max_samples,
            self.batches,
            self.calibration_count,
            has_search=has_search,
            ranges_from_stats=self.stats is not None,
        )
