"""What `insert` made beside its float model, on samples that calibration did not use."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.api.compare import open_optional_labels, reference_runner
from graphquant.api.options import stage_progress
from graphquant.calibration import estimate_footprint
from graphquant.errors import MissingDependencyError, ModelError, UsageError
from graphquant.ir.macs import count_macs, unsized_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphquant.analysis import ComparedSites, Comparison, OutputFigures, SiteFigures
    from graphquant.api.options import Progress
    from graphquant.calibration import Stats
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Runner
    from graphquant.ir import Model, TensorRef


DEFAULT_MIN_SQNR = 20.0
"""Signal to noise in decibels that an output is expected to have; 8 bits mostly leave 25 to 45."""

MIN_HOLDOUT_SAMPLES = 4
"""Samples that are kept from calibration, if there are twice as many."""

HOLDOUT_DIVISOR = 5
"""One in so many samples is kept from calibration."""

MAX_UNBOUNDED_SAMPLES = 32
"""Samples of a check that no bound asks for: it is to say whether a model is ruined, in little time."""

CONCENTRATED_ERROR_DIVISOR = 8
"""Where less than one in so many samples make half of an output's error, that is told."""

SITE_SAMPLES = 4
"""Samples on which each quantized tensor is measured."""


CONFIDENCE = "with 95% confidence"

NO_SQNR = "no output holds floats, which alone have a signal to noise"
NO_AGREEMENT = "no output has class scores or integers, which alone agree or not"
NO_ACCURACY = "the data has no 'labels' that fit an output, one of its classes for each row"
"""What is said of bounds where there is nothing to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a quantized model must keep of its float model; None where nothing is asked.

    Attributes:
        min_sqnr: Signal to noise of each output, dB.
        min_agreement: Share of rows of each output whose largest value stays where it is, 0 to 1.
        max_accuracy_drop: Points of accuracy that may be lost, 0 to 100.
    """

    min_sqnr: float | None = None
    min_agreement: float | None = None
    max_accuracy_drop: float | None = None

    def __post_init__(self) -> None:
        """A UsageError if one is no number."""
        for bound in filter(None, (self.min_sqnr, self.min_agreement, self.max_accuracy_drop)):
            if not math.isfinite(bound):
                raise UsageError(f"{bound} is no bound. Give a number.")

    def __bool__(self) -> bool:
        return (self.min_sqnr, self.min_agreement, self.max_accuracy_drop) != (None, None, None)

    def __str__(self) -> str:
        texts = [
            f"{self.min_sqnr:g} dB" if self.min_sqnr is not None else "",
            f"{100 * self.min_agreement:g}% agreement" if self.min_agreement is not None else "",
            f"at most {self.max_accuracy_drop:g} points of accuracy lost" if self.max_accuracy_drop is not None else "",
        ]
        return ", ".join(filter(None, texts)) or f"{DEFAULT_MIN_SQNR:g} dB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What the check at the end of `insert` found.

    Attributes:
        comparison: Figures of each output and of each quantized tensor; None where they could not be had.
        problem: Why not, "" if they are there.
        reuses_samples: Whether ranges, corrections or a search were made with samples that are measured here.
        calibrated_on_other_data: Whether calibration was of other data, as its statistics say.
        bounds: What was asked for.
        quantized_macs: Multiply-adds for one sample of ops whose inputs are all quantized.
        total_macs: Of all ops whose sizes are known.
    """

    comparison: Comparison | None
    problem: str = ""
    reuses_samples: bool
    bounds: Bounds
    quantized_macs: int = 0
    total_macs: int = 0
    calibrated_on_other_data: bool = False

    @property
    def quantized_share(self) -> float | None:
        """The share of multiply-adds in low precision; None where there are none."""
        return self.quantized_macs / self.total_macs if self.total_macs else None

    @property
    def worst_sites(self) -> tuple[SiteFigures, ...]:
        """The quantized tensors that cost most first: by their blame where it was measured, else by their own figure.

        Biases are left out where there is no blame: by themselves small ones lose much, and the sums nothing.
        """
        sites = () if self.comparison is None else self.comparison.sites
        if self.has_sensitivity:
            return tuple(site for site in sites if site.sensitivity is not None and site.sensitivity < math.inf)
        return tuple(site for site in sites if site.local is not None and site.local < math.inf and not site.bias)

    @property
    def has_sensitivity(self) -> bool:
        """Whether it was measured what tensors cost the outputs; then these are in that order."""
        return self.comparison is not None and any(site.sensitivity is not None for site in self.comparison.sites)

    @property
    def failures(self) -> tuple[str, ...]:
        """What is not as it should be, a sentence's part each; the usual bound holds where none is given."""
        if self.comparison is None:
            return (f"it could not be measured: {self.problem}",)
        comparison, bounds = self.comparison, self.bounds or Bounds(min_sqnr=DEFAULT_MIN_SQNR)
        problems = [
            f"output {output.name!r} cannot be compared: {output.problem}"
            for output in comparison.outputs
            if output.problem
        ]
        if comparison.all_empty:
            problems.append(_empty_outputs_message(comparison))
        return tuple(problems) or (
            *_sqnr_failures(comparison, bounds, requested=bool(self.bounds)),
            *_agreement_failures(comparison, bounds),
            *_accuracy_failures(comparison, bounds),
        )

    @property
    def unmeasurable_bounds(self) -> tuple[str, ...]:
        """What the bounds are on and no output has, so that no model could meet them, a sentence's part each."""
        if self.comparison is None:
            return ()
        if self.comparison.all_empty:
            return (_empty_outputs_message(self.comparison),)
        outputs, bounds = self.comparison.outputs, self.bounds
        measurable = (
            (bounds.min_sqnr, any(output.sqnr is not None for output in outputs), NO_SQNR),
            (bounds.min_agreement, any(output.agreement is not None for output in outputs), NO_AGREEMENT),
            (bounds.max_accuracy_drop, any(output.accuracy is not None for output in outputs), NO_ACCURACY),
        )
        return tuple(message for bound, is_measurable, message in measurable if bound is not None and not is_measurable)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What these samples meet of the bounds and do not show with 95% confidence, a sentence's part each."""
        return tuple(caveat for caveat, _ in self._caveats())

    @property
    def confirmed(self) -> bool:
        """Whether the bounds are met, and shown, but for what these samples could not show of any model."""
        return not self.failures and not any(avoidable for _, avoidable in self._caveats())

    def _caveats(self) -> list[tuple[str, bool]]:
        """The doubts, each with whether a better model would have none."""
        if self.comparison is None:
            return []
        samples = self.comparison.samples
        caveats = [
            caveat for output in self.comparison.outputs for caveat in _output_caveats(output, self.bounds, samples)
        ]
        reuse_caveat = (
            "these samples were used before, for ranges, corrections or a search, which fit no others as well",
            False,
        )
        return [*caveats, reuse_caveat] if self.reuses_samples and self.bounds else caveats


def _output_caveats(output: OutputFigures, bounds: Bounds, samples: int) -> Iterator[tuple[str, bool]]:
    """What of an output's figures may be chance."""
    if output.empty and bounds:
        yield f"output {output.name!r} was empty for all {samples} samples, which tell nothing of it", False
    if (
        bounds.min_sqnr is not None
        and output.sqnr_lower_bound is not None
        and output.sqnr_lower_bound < bounds.min_sqnr
    ):
        measurable = output.sqnr_lower_bound > -math.inf
        message = (
            f"has {output.sqnr_lower_bound:.2f} dB at least {CONFIDENCE}"
            if measurable
            else "was measured on too few samples to say"
        )
        is_concentrated = measurable and CONCENTRATED_ERROR_DIVISOR * output.half_error_samples < samples
        concentration = (
            f", as {output.half_error_samples} of {samples} samples make half of its error" if is_concentrated else ""
        )
        yield f"output {output.name!r} {message}{concentration}", measurable
    if (
        bounds.min_agreement is not None
        and output.agreement_lower_bound is not None
        and output.agreement_lower_bound < bounds.min_agreement
    ):
        message = f"{100 * output.agreement_lower_bound:.2f}% of output {output.name!r} agree at least {CONFIDENCE}"
        yield f"{message}{_rows_needed_note(output.rows, 1 - bounds.min_agreement)}", output.agreement != 1
    if (
        bounds.max_accuracy_drop is not None
        and output.accuracy is not None
        and 100 * (output.lost_share_upper_bound or 0) > bounds.max_accuracy_drop
    ):
        message = f"accuracy of output {output.name!r} falls by {100 * (output.lost_share_upper_bound or 0):.2f} points at most {CONFIDENCE}"
        yield (
            f"{message}{_rows_needed_note(output.rows, bounds.max_accuracy_drop / 100)}",
            output.accuracy[1] < output.accuracy[0],
        )


def _rows_needed_note(count: int, share: float) -> str:
    """How many rows it takes, where there are too few."""
    from graphquant.analysis.comparison import rows_to_show_share

    needed = rows_to_show_share(share)
    return f"; it takes {needed:,} rows to show more, and there are {count:,}" if count < needed else ""


def _empty_outputs_message(comparison: Comparison) -> str:
    """What is said where there is nothing to compare."""
    return f"nothing was compared, since every output was empty for all {comparison.samples} samples"


def _sqnr_failures(comparison: Comparison, bounds: Bounds, *, requested: bool) -> list[str]:
    if bounds.min_sqnr is None:
        return []
    measured_outputs = [output for output in comparison.outputs if output.sqnr is not None]
    failures = [
        f"output {output.name!r} has {output.sqnr:.2f} dB, and {bounds.min_sqnr:g} are wanted"
        for output in measured_outputs
        if output.sqnr is not None and not output.sqnr >= bounds.min_sqnr
    ]
    return failures if measured_outputs or not requested else [NO_SQNR]


def _agreement_failures(comparison: Comparison, bounds: Bounds) -> list[str]:
    if bounds.min_agreement is None:
        return []
    measured_outputs = [output for output in comparison.outputs if output.agreement is not None]
    failures = [
        f"{100 * (output.agreement or 0):.2f}% of output {output.name!r} agree, and {100 * bounds.min_agreement:g}% are wanted"
        for output in measured_outputs
        if output.agreement is not None and output.agreement < bounds.min_agreement
    ]
    return failures if measured_outputs else [NO_AGREEMENT]


def _accuracy_failures(comparison: Comparison, bounds: Bounds) -> list[str]:
    if bounds.max_accuracy_drop is None:
        return []
    accuracies = [(output.name, output.accuracy) for output in comparison.outputs if output.accuracy is not None]
    failures = [
        f"accuracy of output {name!r} falls from {100 * float_accuracy:.2f}% to {100 * quantized_accuracy:.2f}%, and"
        f" {bounds.max_accuracy_drop:g} points are allowed"
        for name, (float_accuracy, quantized_accuracy) in accuracies
        if 100 * (float_accuracy - quantized_accuracy) > bounds.max_accuracy_drop
    ]
    return failures if accuracies else [NO_ACCURACY]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldOut:
    """Samples that are kept for the check.

    Attributes:
        spec: The data spec that the samples are of.
        max_samples: How many of its samples are used at all, None for all.
        batches: These, as they were opened.
        start: The first that is kept.
        reuses_samples: Whether calibration uses what is kept too.
        calibrated_on_other_data: Whether the ranges come from statistics of other data, which may hold some of these samples too.
    """

    spec: str
    max_samples: int | None
    batches: Dataset
    start: int
    reuses_samples: bool
    calibrated_on_other_data: bool = False

    def samples(self) -> Dataset:
        """What is kept, alone."""
        return _sample_range(self.batches, self.start, None)


def split_holdout(spec: str, max_samples: int | None, batches: Dataset) -> tuple[Dataset, HoldOut]:
    """What calibration uses, and what is kept for the check: the last fifth and at least 4, of 8 or more samples."""
    start = max(batches.count - max(MIN_HOLDOUT_SAMPLES, batches.count // HOLDOUT_DIVISOR), 0)
    too_few = batches.count < 2 * MIN_HOLDOUT_SAMPLES
    holdout = HoldOut(spec=spec, max_samples=max_samples, batches=batches, start=start, reuses_samples=too_few)
    return batches if too_few else replace(batches, count=start), holdout


def first_half(batches: Dataset) -> Dataset:
    """What calibration uses where a search judges by the others: the first half, or all of less than 8 samples."""
    half = batches.count // 2
    return replace(batches, count=half) if half >= MIN_HOLDOUT_SAMPLES else batches


def split_search_set(spec: str, max_samples: int | None, batches: Dataset, calibration_count: int) -> HoldOut:
    """What a search may look at: samples that neither gave the ranges nor are kept for the check.

    Ranges fit the samples that gave them better than all others, so that these tell nothing of others. Where less
    than 4 samples are left, they are looked at all the same.

    Args:
        spec: The data spec.
        max_samples: How many of its samples are used at all, None for all.
        batches: These, as they were opened.
        calibration_count: How many of the first samples gave the ranges.
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
    """How many of the first samples of the data statistics are of; 0 where they are of other data.

    Args:
        stats: The statistics.
        batches: The data.
        open_first: Opens so many of its samples; some kinds of data have another digest for fewer.
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
    """What to check on where the ranges come from elsewhere: all samples, or the last fifth.

    It is the last fifth where the first `calibration_count` samples gave the ranges, or a search looked at them. `ranges_from_stats` tells
    whether statistics give ranges.
    """
    holdout = replace(
        split_holdout(spec, max_samples, batches)[1],
        calibrated_on_other_data=ranges_from_stats and not calibration_count,
    )
    if has_search and not calibration_count:
        return holdout
    return (
        replace(holdout, reuses_samples=holdout.reuses_samples or calibration_count > holdout.start)
        if calibration_count
        else replace(holdout, start=0, reuses_samples=False)
    )


def validate_model(
    source: Model,
    quantized: Model,
    holdout: HoldOut,
    bounds: Bounds,
    progress: Progress | None,
    *,
    include_sites: bool = True,
) -> Validation:
    """Compares the model that was `quantized` with its source on the samples that were kept, few where no bound is given.

    Args:
        source: The float model.
        quantized: The quantized one.
        holdout: The samples, with labels where their data has some.
        bounds: What is asked for.
        progress: Is told how far the work is.
        include_sites: Whether to measure quantized tensors and to count multiply-adds too.

    Raises:
        DataError: A sample is not what it should be.
    """
    from graphquant.analysis import match_sites

    try:
        runner = formats.format_module(source.format).create_runner(source)
        batches, labels = open_optional_labels(holdout.batches, holdout.spec, runner.inputs, holdout.max_samples)
        batches = replace(batches, count=holdout.batches.count)  # what comes behind is kept for something else
        batches = _sample_range(batches, holdout.start, None if bounds else MAX_UNBOUNDED_SAMPLES)
        sites = match_sites(source, quantized) if include_sites else None
        comparison = _compare_on_samples(source, quantized, sites, runner, batches, labels, progress)
        quantized_macs, total_macs = (0, 0) if sites is None else _count_macs(source, sites, runner, batches, labels)
    except (MissingDependencyError, ModelError) as error:
        return Validation(comparison=None, problem=str(error), reuses_samples=holdout.reuses_samples, bounds=bounds)
    return Validation(
        comparison=comparison,
        reuses_samples=holdout.reuses_samples,
        bounds=bounds,
        quantized_macs=quantized_macs,
        total_macs=total_macs,
        calibrated_on_other_data=holdout.calibrated_on_other_data,
    )


def _sample_range(batches: Dataset, start: int, max_count: int | None) -> Dataset:
    """The samples from `start` on, at most so many."""
    count = batches.count - start
    feeds = batches.open_feeds
    return replace(
        batches,
        count=count if max_count is None else min(count, max_count),
        open_feeds=lambda first, last: feeds(start + first, start + last),
    )


def _compare_on_samples(
    source: Model,
    quantized: Model,
    sites: ComparedSites | None,
    runner: Runner,
    batches: Dataset,
    labels: str,
    progress: Progress | None,
) -> Comparison:
    """Both models on the samples, with the quantized tensors on the first few."""
    from graphquant.analysis import compare_runners

    load = estimate_footprint(source, batch_independent=runner.batch_independent)
    return compare_runners(
        runner,
        formats.format_module(quantized.format).create_runner(quantized),
        batches,
        load=replace(load, block_size=min(load.block_size, SITE_SAMPLES)),
        sites=sites,
        site_runner=reference_runner(source, sites, runner),
        outputs={},
        labels=labels,
        max_site_samples=SITE_SAMPLES,
        progress=stage_progress(progress, "checking"),
    )


def _count_macs(source: Model, sites: ComparedSites, runner: Runner, batches: Dataset, labels: str) -> tuple[int, int]:
    """Multiply-adds in low precision and all, for one sample."""
    counts = count_macs(source, measure_tensor_sizes(source, batches, runner, labels))
    quantized_ops = {(op_coverage.graph, op_coverage.op) for op_coverage in sites.coverage if op_coverage.quantized}
    return sum(count for op_id, count in counts.items() if op_id in quantized_ops), sum(counts.values())


def measure_tensor_sizes(
    model: Model, batches: Dataset, runner: Runner | None = None, labels: str = ""
) -> dict[TensorRef, int]:
    """How many elements those tensors have for the first sample that multiply-adds want and only a run can tell.

    Args:
        model: The model.
        batches: The samples.
        runner: What runs the model, made here if it is wanted and not given.
        labels: The key of `batches` that is no input, "" if there is none.
    """
    tensors_to_measure = unsized_tensors(model)
    if not tensors_to_measure:
        return {}
    runner = runner or formats.format_module(model.format).create_runner(model)
    hidden = runner.unobservable(tensors_to_measure)
    feed = {name: value for name, value in next(batches.feeds_between(0, 1)).items() if name != labels}
    return runner.element_counts([tensor for tensor in tensors_to_measure if tensor not in hidden], feed)
