"""Validation of a quantized model against its float model, and the bounds that it must meet."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, tee
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from graphquant import formats
from graphquant.analysis.compare import (
    ComparisonSamples,
    MetricTally,
    OutputTally,
    compare_runners,
    create_tallies,
    model_inputs,
)
from graphquant.analysis.comparison import (
    Comparison,
    MetricFigures,
    OutputFigures,
    SiteFigures,
    ignore_overflow,
    rows_to_show_share,
)
from graphquant.analysis.measured_outputs import (
    SelectionRunner,
    match_inputs,
    match_outputs,
    read_scores,
    scores_sqnr,
    with_selections,
)
from graphquant.analysis.model_summary import weighted_op_coverage
from graphquant.analysis.site_errors import match_sites
from graphquant.backends import RejectedModelError, load_in_onnxruntime
from graphquant.calibration.batch_independence import is_batch_independent, measure_footprint
from graphquant.calibration.calibrate import block_feeds
from graphquant.calibration.holdout import HoldOut, open_labels, sample_range
from graphquant.calibration.memory import estimate_footprint
from graphquant.errors import FindingsError, InvalidModelError, MissingDependencyError, ModelError, UsageError
from graphquant.ir import Model, TensorRef, count_macs, qualified_op_name, unsized_tensors
from graphquant.utils import Progress, stage_progress
from graphquant.utils.text import format_distinct

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds, Runner
    from graphquant.numerics import Array

DEFAULT_MIN_SQNR = 20.0  # SQNR in dB that each output should reach if no bound is set; 8 bits usually give 25 to 45
MAX_UNBOUNDED_SAMPLES = 32
"""Maximum number of validation samples without a bound: enough to detect a ruined model quickly."""

CONCENTRATED_ERROR_DIVISOR = 8  # an error is concentrated if fewer than one in this many samples cause half of it
SITE_SAMPLES = 4  # number of samples on which each quantized tensor is measured
MAX_MEASURED_SITES = 10_000
"""Maximum number of quantized tensors that are measured, all outputs of one session. The time that onnxruntime takes to
create a session grows with the square of their number, so there is one session of a larger model, for its outputs."""
CONFIDENCE = "with 95% confidence"

OPTIMIZER_LOSS = 6.0  # loss of SQNR in dB by the optimizations of a runtime that is reported: twice the error
NO_SQNR = "no output contains floats, so there is no SQNR"
NO_AGREEMENT = "no output contains class scores or integers, so there is no agreement"
NO_ACCURACY = "the data has no 'labels' that match an output with one class per row, so there is no accuracy"
NO_METRIC = "no metric was measured"
TOO_FEW = "was measured on too few samples for a confident statement"


BoundStatus = Literal["met", "met-not-proven", "missed"]
"""Status of bounds: met with confidence, met as measured on too few samples for confidence, or missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Accuracy bounds of a quantized model, relative to its float model. None means no bound."""

    min_sqnr: float | None = None  # minimum SQNR of each output, in dB
    min_agreement: float | None = None  # minimum share of rows of each output whose top-1 class does not change, 0 to 1
    max_accuracy_drop: float | None = None  # maximum loss of accuracy of each output, as a share of rows, 0 to 1
    max_metric_drop: float | None = None  # maximum loss of the user's metric, in its unit

    def __post_init__(self) -> None:
        """Reject bounds that are NaN or infinite, which every or no model would meet."""
        for bound in filter(None, (self.min_sqnr, self.min_agreement, self.max_accuracy_drop, self.max_metric_drop)):
            if not math.isfinite(bound):
                raise UsageError(f"The bound {bound} is not a finite number. Use a finite number.")

    def __bool__(self) -> bool:
        return self != Bounds()

    def __str__(self) -> str:
        texts = [
            f"{self.min_sqnr:g} dB" if self.min_sqnr is not None else "",
            f"{100 * self.min_agreement:g}% agreement" if self.min_agreement is not None else "",
            f"at most {_points(self.max_accuracy_drop)} accuracy drop" if self.max_accuracy_drop is not None else "",
            f"at most {self.max_metric_drop:g} metric drop" if self.max_metric_drop is not None else "",
        ]
        return ", ".join(filter(None, texts)) or f"{DEFAULT_MIN_SQNR:g} dB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Result of the validation at the end of `insert`."""

    # Errors of each output and each quantized tensor, or None if they could not be measured.
    comparison: Comparison | None
    problem: str = ""  # reason for a missing comparison, or ""
    float_failed: bool = False  # True if the float model cannot be run, so that the comparison is missing
    reuses_samples: bool  # True if calibration, an optimization algorithm or a search used the validation samples
    bounds: Bounds  # the requested bounds
    # SQNR in dB that each output should reach without bounds, or None. A miss is a warning.
    target_sqnr: float | None = DEFAULT_MIN_SQNR
    # SQNR in dB of the scores before a softmax, by output; measured for outputs below the target.
    score_sqnr: Mapping[str, float] = field(default_factory=dict)
    quantized_macs: int = 0  # multiply-adds per sample of ops whose inputs are all quantized
    total_macs: int = 0  # multiply-adds per sample of all ops with known sizes
    calibrated_on_other_data: bool = False  # True if the statistics are from other data
    # Number of parts of the samples, each measured with the ranges of the others; 0 for a single hold-out.
    folds: int = 0
    saturated_tensors: frozenset[str] = frozenset()  # tensors whose ranges end where their readers saturate
    # SQNR in dB, without the optimizations of ONNX Runtime, of the outputs that they make worse.
    unoptimized_sqnr: Mapping[str, float] = field(default_factory=dict)

    @property
    def quantized_share(self) -> float | None:
        """Share of multiply-adds with quantized inputs, or None if there are none."""
        return self.quantized_macs / self.total_macs if self.total_macs else None

    @property
    def worst_sites(self) -> tuple[SiteFigures, ...]:
        """Quantized tensors with the largest error first: by sensitivity if it was measured, else by local error.

        Biases and saturated tensors are omitted without sensitivities. The local error of a small bias is large, but
        negligible in the sum to which the bias is added, and readers remove the error of values beyond their limits.
        """
        sites = () if self.comparison is None else self.comparison.sites
        if self.has_sensitivity:
            return tuple(site for site in sites if site.sensitivity is not None and site.sensitivity < math.inf)
        sites = tuple(site for site in sites if not site.bias and site.tensor not in self.saturated_tensors)
        return tuple(site for site in sites if site.local is not None and site.local < math.inf)

    @property
    def has_sensitivity(self) -> bool:
        """True if the sensitivity of the tensors was measured, which also sorts them."""
        return self.comparison is not None and any(site.sensitivity is not None for site in self.comparison.sites)

    @property
    def worst_sqnr(self) -> float | None:
        """SQNR in dB of the worst output, without bounds of its scores if those are better; None without float outputs.

        It is minus infinity with new NaN or infinite values. Outputs that cannot be compared otherwise do not count.
        """
        outputs = () if self.comparison is None else self.comparison.outputs
        return min((sqnr for output in outputs if (sqnr := self._judged_sqnr(output)) is not None), default=None)

    def _judged_sqnr(self, output: OutputFigures) -> float | None:
        if output.broken:
            return -math.inf
        if output.sqnr is None or output.problem or self.bounds:
            return output.sqnr
        return max(output.sqnr, self.score_sqnr.get(output.name, -math.inf))

    @property
    def misses_target(self) -> bool:
        """True if no bound is set, and an output is below the target."""
        worst = self.worst_sqnr
        return not self.bounds and self.target_sqnr is not None and worst is not None and worst < self.target_sqnr

    @property
    def failures(self) -> tuple[str, ...]:
        """Messages about missed bounds. Without bounds, each output must reach `target_sqnr`."""
        if self.comparison is None:
            return (f"the model could not be measured: {self.problem.rstrip('.')}",)
        comparison, bounds = self.comparison, self.bounds or Bounds(min_sqnr=self.target_sqnr)
        problems = [
            f"output {output.name!r} cannot be compared: {output.problem}"
            for output in comparison.outputs
            if output.problem
        ]
        if comparison.all_empty:
            problems.append(_empty_outputs_message(comparison))
        outputs = [replace(output, sqnr=self._judged_sqnr(output)) for output in comparison.outputs]
        return tuple(problems) or (*self.unmeasurable_bounds, *_missed_bounds(outputs, comparison.metric, bounds))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages about outputs that the optimizations of ONNX Runtime make worse, whatever the bounds are."""
        return tuple(
            f"the graph optimizations of onnxruntime change output {name!r}, which has {sqnr:.2f} dB without them;"
            " run the model with ORT_DISABLE_ALL, change float8 types to int8, or keep the ops before it in float with"
            " --exclude"
            for name, sqnr in self.unoptimized_sqnr.items()
        )

    @property
    def unmeasurable_bounds(self) -> tuple[str, ...]:
        """Messages about bounds that apply to no output, so that no model could meet them."""
        if self.comparison is None:
            return ()
        if self.comparison.all_empty:
            return (_empty_outputs_message(self.comparison),)
        outputs, bounds = self.comparison.outputs, self.bounds
        measurable = (
            (bounds.min_sqnr, any(output.sqnr is not None for output in outputs), NO_SQNR),
            (bounds.min_agreement, any(output.agreement is not None for output in outputs), NO_AGREEMENT),
            (bounds.max_accuracy_drop, any(output.accuracy is not None for output in outputs), NO_ACCURACY),
            (bounds.max_metric_drop, self.comparison.metric is not None, NO_METRIC),
        )
        return tuple(message for bound, is_measurable, message in measurable if bound is not None and not is_measurable)

    @property
    def status(self) -> BoundStatus | None:
        """Status of the bounds; None without bounds."""
        if not self.bounds:
            return None
        if self.failures:
            return "missed"
        return "met-not-proven" if self.caveats else "met"

    @property
    def caveats(self) -> tuple[str, ...]:
        """Messages about bounds that the samples meet, but do not confirm with 95% confidence."""
        if self.comparison is None:
            return ()
        samples = self.comparison.samples
        caveats = [
            caveat for output in self.comparison.outputs for caveat in _output_caveats(output, self.bounds, samples)
        ]
        metric, bound = self.comparison.metric, self.bounds.max_metric_drop
        if metric is not None and bound is not None and metric.drop_upper_bound > bound:
            measurable = math.isfinite(metric.drop_upper_bound)
            text = f"drops by at most {metric.drop_upper_bound:.4g} {CONFIDENCE}" if measurable else TOO_FEW
            caveats.append(f"the metric {metric.name} {text}")
        if self.reuses_samples and self.bounds:
            reuse = "calibration, an optimization algorithm or a search used these samples"
            caveats.append(f"{reuse}, so the error on other samples may be larger")
        return tuple(caveats)


def _points(share: float) -> str:
    """Format a difference of two shares as percentage points."""
    return f"{100 * share:g} points"


def _output_caveats(output: OutputFigures, bounds: Bounds, samples: int) -> Iterator[str]:
    """Yield the bounds of an output that may be met by chance."""
    if output.empty and bounds:
        yield f"output {output.name!r} was empty for all {samples} samples, so it was not measured"
    sqnr, agreement, lost = output.sqnr_lower_bound, output.agreement_lower_bound, output.lost_share_upper_bound or 0
    if bounds.min_sqnr is not None and sqnr is not None and sqnr < bounds.min_sqnr:
        measurable = sqnr > -math.inf
        message = f"has at least {sqnr:.2f} dB {CONFIDENCE}" if measurable else TOO_FEW
        if measurable and CONCENTRATED_ERROR_DIVISOR * output.half_error_samples < samples:
            message += f", because {output.half_error_samples} of {samples} samples cause half of its error"
        yield f"output {output.name!r} {message}"
    if bounds.min_agreement is not None and agreement is not None and agreement < bounds.min_agreement:
        message = f"at least {100 * agreement:.2f}% of output {output.name!r} agree {CONFIDENCE}"
        yield f"{message}{_rows_needed_note(output.rows, 1 - bounds.min_agreement)}"
    if bounds.max_accuracy_drop is not None and output.accuracy is not None and lost > bounds.max_accuracy_drop:
        message = f"the accuracy of output {output.name!r} drops by at most {100 * lost:.2f} points {CONFIDENCE}"
        note = _rows_needed_note(output.rows, bounds.max_accuracy_drop)
        yield f"{message}{note}"


def _rows_needed_note(count: int, share: float) -> str:
    """Return a note about the number of rows that the bound needs, if there are fewer."""
    needed = rows_to_show_share(share)
    return f"; to confirm the bound takes {needed:,} rows, and there are {count:,}" if count < needed else ""


def _empty_outputs_message(comparison: Comparison) -> str:
    return f"nothing was compared, because every output was empty for all {comparison.samples} samples"


def _missed_bounds(outputs: Sequence[OutputFigures], metric: MetricFigures | None, bounds: Bounds) -> Iterator[str]:
    """Yield a message for each output that misses a bound, and for the metric."""
    sqnr, agreement, drop = bounds.min_sqnr, bounds.min_agreement, bounds.max_accuracy_drop
    for output in outputs:
        if sqnr is not None and output.sqnr is not None and not output.sqnr >= sqnr:
            measured, bound = format_distinct(output.sqnr, sqnr, unit="dB")
            yield f"output {output.name!r} has {measured}, and the bound is {bound}"
    for output in outputs:
        if agreement is not None and output.agreement is not None and output.agreement < agreement:
            measured, bound = format_distinct(output.agreement, agreement)
            yield f"{measured} of output {output.name!r} agree, and the bound is {bound}"
    for output in outputs:
        if drop is not None and output.accuracy is not None and output.accuracy[0] - output.accuracy[1] > drop:
            shares = " to ".join(f"{100 * share:.2f}%" for share in output.accuracy)
            yield f"the accuracy of output {output.name!r} drops from {shares}, and the bound is {_points(drop)}"
    if bounds.max_metric_drop is not None and metric is not None and metric.drop > bounds.max_metric_drop:
        scores = " to ".join(f"{score:.4g}" for score in metric.scores)
        yield f"the metric {metric.name} drops from {scores}, and the bound is {bounds.max_metric_drop:g}"


def validate_model(
    source: Model,
    quantized: Model,
    holdout: HoldOut,
    bounds: Bounds,
    progress: Progress | None,
    *,
    target_sqnr: float | None = DEFAULT_MIN_SQNR,
    prepared: Model | None = None,
    quantized_runner: Runner | None = None,
    outputs: Mapping[str, str] | None = None,
) -> Validation:
    """Compare a quantized model with its float model on a hold-out; on few samples if there is no bound.

    `target_sqnr` applies without bounds. `prepared` is the source as it was prepared for quantization, if it is known.
    `quantized_runner` runs a model that no format module runs, whose tensors are not measured, and `outputs` has its
    outputs by those of the source. Raises a DataError if a sample does not fit.
    """
    reuse = holdout.reuses_samples
    validation = Validation(comparison=None, reuses_samples=reuse, bounds=bounds, target_sqnr=target_sqnr)
    try:
        runner = with_selections(formats.shared_runner(source, "source"))
        is_small = has_few_sites(sum(op.kind in {"dequantize", "qdq"} for _, op in quantized.reachable_ops()))
        samples = _comparison_samples(source, runner, holdout, None if bounds else MAX_UNBOUNDED_SAMPLES, join=is_small)
        if (recorder := None if bounds else _create_recorder(runner)) is not None:
            samples = samples._replace(on_float_outputs=recorder.record)
        report = stage_progress(progress, "validating")
        sites = match_sites(source, quantized, prepared) if quantized_runner is None and is_small else None
        # No variable refers to a runner of the quantized model, so that its sessions are freed after the comparison.
        # That of a large model has sessions only during runs, and `optimize_model` reads what they wrote.
        share = formats.create_runner if is_small else partial(formats.shared_runner, role="quantized")
        comparison = compare_runners(
            runner, quantized_runner or with_selections(share(quantized), runner), samples, sites, outputs or {}, report
        )
        quantized_macs, total_macs = (
            count_quantized_macs(source, quantized, measure_tensor_sizes(source, samples.dataset, runner))
            if quantized_runner is None
            else (0, 0)
        )
    except (MissingDependencyError, ModelError) as error:
        return replace(validation, problem=str(error), float_failed=not _can_run(source, holdout.dataset))
    validation = replace(
        validation,
        comparison=comparison,
        quantized_macs=quantized_macs,
        total_macs=total_macs,
        calibrated_on_other_data=holdout.calibrated_on_other_data,
    )
    if validation.misses_target and quantized_runner is None:
        low_outputs = [figures for figures in comparison.outputs if (figures.sqnr or 0.0) < (target_sqnr or 0.0)]
        score_sqnr = _measure_scores(runner, quantized, low_outputs, samples.dataset)
        validation = replace(validation, score_sqnr=score_sqnr)
    is_suspect = validation.failures or any(output.fusion_loss > OPTIMIZER_LOSS for output in comparison.outputs)
    if sites is None or quantized.format != "onnx" or not is_suspect:
        return validation
    from graphquant.formats.onnx import create_runner  # imported when needed, because onnxruntime is slow to import

    unoptimized = compare_runners(
        runner, with_selections(create_runner(quantized, optimizes=False), runner), samples, None, {}, report
    )
    unoptimized_sqnr = {
        before.name: before.sqnr
        for before, after in zip(unoptimized.outputs, comparison.outputs, strict=True)
        if before.sqnr is not None and after.sqnr is not None and before.sqnr > after.sqnr + OPTIMIZER_LOSS
    }
    return replace(validation, unoptimized_sqnr=unoptimized_sqnr)


def _comparison_samples(
    source: Model, runner: Runner, holdout: HoldOut, max_samples: int | None, *, join: bool
) -> ComparisonSamples:
    """Return at most `max_samples` samples of a hold-out, with its labels. With `join`, a run may have several samples.

    Samples of a large model are not joined, because a comparison with a batch would create its sessions again.
    """
    batches, labels = open_labels(holdout, runner.inputs)
    # Data that was opened again with labels is not cut off where the hold-out ends.
    batches = sample_range(replace(batches, count=holdout.dataset.count), holdout.start, max_samples)
    footprint = measure_footprint(runner, batches) if join else estimate_footprint(source, batch_independent=False)
    return ComparisonSamples(
        dataset=batches,
        footprint=footprint._replace(block_size=min(footprint.block_size, SITE_SAMPLES)),
        labels=labels,
        max_site_samples=SITE_SAMPLES,
        metric=holdout.metric,
    )


def _measure_scores(
    runner: Runner, quantized: Model, outputs: Sequence[OutputFigures], batches: Dataset
) -> dict[str, float]:
    """Measure the SQNR in dB of the scores from which a softmax makes each of `outputs`; others are omitted."""
    quantized_runner = formats.create_runner(quantized)
    inputs = match_inputs(runner.inputs, quantized_runner.inputs)
    feeds = [model_inputs(runner, feed) for feed in batches]
    quantized_feeds = [{name: feed[other] for name, other in inputs.items()} for feed in feeds]
    sqnr = {
        figures.name: scores_sqnr(
            read_scores(runner, figures.name, feeds),
            read_scores(quantized_runner, figures.quantized_name, quantized_feeds),
        )
        for figures in outputs
    }
    return {name: value for name, value in sqnr.items() if value > -math.inf}


MAX_CACHED_BYTES = 1 << 28  # maximum size of samples and float outputs that stay in memory between validations


class RecordedRunner:
    """A runner that knows the outputs of some feeds, so that it does not run them."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._bytes = runner, 0
        self.records: list[tuple[Feeds, dict[str, Array]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def is_complete(self) -> bool:
        """True if all outputs were kept."""
        return self._bytes <= MAX_CACHED_BYTES

    def record(self, feeds: Feeds, outputs: Mapping[str, Array]) -> None:
        """Keep the outputs of one feed, as long as all of them need little memory."""
        values = [*feeds.values(), *outputs.values()]
        self._bytes += sum(getattr(value, "nbytes", MAX_CACHED_BYTES) for value in values)  # a sequence has no size
        if self.is_complete:
            self.records.append((feeds, dict(outputs)))

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Return the outputs of one feed, which is run if they are not known."""
        for known, outputs in self.records:
            if known.keys() == feeds.keys() and all(np.array_equal(known[name], feeds[name]) for name in known):
                return outputs
        return self._runner.run(feeds)


def _create_recorder(runner: Runner) -> RecordedRunner | None:
    """Share a runner of the float model that knows recorded outputs; None if they depend on more than one feed.

    `runner` comes from `with_selections`.
    """
    if isinstance(runner, RecordedRunner | SelectionRunner) or runner.start_sequence():
        return None
    recorder = RecordedRunner(runner)
    formats.share_runner(cast("Runner", recorder), "source")
    return recorder


def recorded_runs(source: Model, validation: Validation | None) -> Sequence[tuple[Feeds, Mapping[str, Array]]]:
    """Return the inputs and outputs of the float model in its validation, by sample."""
    runner, comparison = formats.find_shared_runner(source), None if validation is None else validation.comparison
    # Nothing tells whether some of the runs had joined samples if others were not kept.
    records = runner.records if isinstance(runner, RecordedRunner) and runner.is_complete else []
    if comparison is None or comparison.samples <= len(records):
        return records
    return [  # joined samples are independent rows
        (
            {name: value[row : row + 1] for name, value in feeds.items()},
            {name: value[row : row + 1] for name, value in outputs.items()},
        )
        for feeds, outputs in records
        for row in range(min((len(value) if value.ndim else 0 for value in feeds.values()), default=0))
    ]


def record_float_outputs(runner: Runner, holdout: HoldOut) -> None:
    """Run the float model on the samples of `validate_model`, which needs no session of it then.

    Raises a DataError if a sample does not fit.
    """
    with suppress(MissingDependencyError, ModelError):  # the validation reports it
        if (recorder := _create_recorder(with_selections(runner))) is not None:
            feeds = [model_inputs(runner, feed) for feed in holdout.samples(MAX_UNBOUNDED_SAMPLES)]
            for feed, outputs in zip(feeds, formats.run_outputs(runner, feeds), strict=True):
                recorder.record(feed, outputs)
            for observing in (True, False):
                runner.free_session(observing=observing, only_large=False)


class FoldValidator:
    """Validates plans on the folds of the data, each fold on a model whose ranges come from the other folds.

    The float model runs once, unless its outputs need too much memory.
    """

    def __init__(self, source: Model, folds: Sequence[HoldOut], bounds: Bounds) -> None:
        """Validate against `source`. Raises a DataError if the labels are unusable, and a ModelError for the model."""
        self._source, self._folds, self._bounds = source, folds, bounds
        self._runner = with_selections(formats.format_module(source.format).create_runner(source))
        first = folds[0]
        data, self._labels = open_labels(first, self._runner.inputs)
        self._parts = [sample_range(replace(data, count=fold.dataset.count), fold.start, None) for fold in folds]
        self._footprint = measure_footprint(self._runner, self._parts[0])
        self._joins_samples: bool | None = None  # known once a quantized model was run
        self._cache: list[list[tuple[Feeds, dict[str, Array]]]] | None = None
        self._cached_bytes = 0
        self.sample_errors: list[list[float]] = []  # squared errors of the worst output by fold, in the last validation

    @property
    def samples(self) -> int:
        """Number of samples of all folds."""
        return sum(part.count for part in self._parts)

    def validate(self, models: Sequence[Model]) -> Validation:
        """Compare the model of each fold with the float model. Raises a DataError if a sample does not fit."""
        reuses_samples = any(fold.reuses_samples for fold in self._folds)
        try:
            comparison = self._compare(models)
        except (MissingDependencyError, ModelError) as error:
            return Validation(
                comparison=None,
                problem=str(error),
                float_failed=not _can_run(self._source, self._folds[0].dataset),
                reuses_samples=reuses_samples,
                bounds=self._bounds,
            )
        return Validation(
            comparison=comparison, reuses_samples=reuses_samples, bounds=self._bounds, folds=len(self._folds)
        )

    def _compare(self, models: Sequence[Model]) -> Comparison:
        tallies: list[OutputTally] = []
        scores: MetricTally | None = None
        for fold, model in enumerate(models):
            runner = with_selections(formats.format_module(model.format).create_runner(model), self._runner)
            inputs = match_inputs(self._runner.inputs, runner.inputs)
            if self._joins_samples is None:
                self._joins_samples = self._footprint.join_samples and is_batch_independent(
                    runner, self._parts[0], self._footprint.block_size, inputs=inputs
                )
            if not tallies:
                names = match_outputs(self._runner.outputs, runner.outputs, {})
                tallies = create_tallies(self._runner, runner, names, batched=self._joins_samples)
                metric, input_names = self._folds[0].metric, [spec.name for spec in self._runner.inputs]
                scores = None if metric is None else MetricTally(metric, input_names, names)
            pairs, copies = tee(self._expected_outputs(fold))
            feeds = ({name: feed[other] for name, other in inputs.items()} for feed, _ in copies)
            for (feed, expected), actual in zip(pairs, runner.run_each(feeds), strict=True):
                with ignore_overflow():
                    for tally in tallies:
                        values = expected.get(tally.name), actual.get(tally.quantized_name)
                        tally.add(*values, feed.get(self._labels))
                if scores is not None:
                    scores.add(feed, expected, actual)
        outputs = tuple(tally.figures() for tally in tallies)
        known = [(figures.sqnr, index) for index, figures in enumerate(outputs) if figures.sqnr is not None]
        errors = iter(tallies[min(known)[1]].sample_errors() if known else ())
        self.sample_errors = [list(islice(errors, part.count)) for part in self._parts]
        return Comparison(
            samples=self.samples,
            random=self._parts[0].random,
            outputs=outputs,
            sites=(),
            labels=self._labels,
            metric=None if scores is None else scores.figures(),
        )

    def _expected_outputs(self, fold: int) -> Iterator[tuple[Feeds, dict[str, Array]]]:
        """Yield the samples of a fold and the outputs of the float model."""
        if self._cache is not None and len(self._cache) > fold:
            yield from self._cache[fold]
            return
        pairs: list[tuple[Feeds, dict[str, Array]]] = []
        part, block_size = self._parts[fold], self._footprint.block_size
        blocks = [(0, -(-part.count // block_size))]
        for feed, _ in block_feeds(part, blocks, block_size, join_samples=bool(self._joins_samples)):
            expected = self._runner.run(model_inputs(self._runner, feed))
            self._cached_bytes += sum(value.nbytes for value in (*feed.values(), *expected.values()))
            pairs.append((feed, expected))
            if self._cached_bytes > MAX_CACHED_BYTES:
                pairs.clear()
            yield feed, expected
        if self._cache is None:
            self._cache = []
        if self._cached_bytes <= MAX_CACHED_BYTES and len(self._cache) == fold:
            self._cache.append(pairs)


def has_few_sites(count: int) -> bool:
    """Return True if a model with `count` quantized tensors is examined in further sessions, beyond its outputs."""
    return count <= MAX_MEASURED_SITES


def _can_run(model: Model, dataset: Dataset) -> bool:
    """Return True if the model runs on the first sample. Raises an InvalidModelError if no runtime would load it."""
    try:
        formats.format_module(model.format).create_runner(model).run(next(dataset.feeds_between(0, 1)))
    except InvalidModelError:
        raise
    except (MissingDependencyError, ModelError):
        return False
    return True


def check_runtime_accepts(
    source: Model, quantized: Model, validation: Validation | None, *, other_backend: bool
) -> str:
    """Return the reason why the quantized model cannot be judged, "" if its runtime accepts it.

    A validation has loaded and run the model already. Otherwise ONNX Runtime loads an ONNX model here. `other_backend`
    is true if the rules are for another backend, which may accept pairs that the optimizer of ONNX Runtime rejects.
    ONNX Runtime then does not decide. Raises a FindingsError if the runtime cannot load or run the quantized model, or
    an output has NaN or infinite values that the float model does not have, and a ModelError if the quantized model
    cannot be emitted.
    """
    if validation is not None and validation.float_failed:
        return f"the float model cannot be run: {validation.problem}"
    if validation is not None and validation.comparison is not None:
        broken_outputs = [output for output in validation.comparison.outputs if output.broken]
        if broken_outputs:
            raise FindingsError(_broken_outputs_message(broken_outputs, validation.comparison))
        return ""
    if quantized.format == "onnx":
        try:
            load_in_onnxruntime(quantized)
        except RejectedModelError as error:
            try:
                load_in_onnxruntime(source)
            except ModelError as float_error:
                return f"onnxruntime cannot load the float model: {float_error}"
            if other_backend:
                return f"onnxruntime cannot load it, and the backend of its rules may: {error}"
            raise FindingsError(_rejection_message(quantized, error)) from error
    if validation is not None and other_backend:
        return f"onnxruntime cannot run it, and the backend of its rules may: {validation.problem}"
    if validation is not None:
        # ONNX Runtime derives the names of ops that it inserts: "conv_bias_dq".
        failed = re.search("[nN]ame:? ?'([^']+)'", validation.problem)
        name = failed[1] if failed else ""
        names = [op.name for _, op in source.reachable_ops() if re.match(rf"{re.escape(op.name)}(?![^\W_])", name)]
        excluded = shlex.quote(max(names, key=len)) if any(names) else "OP"
        raise FindingsError(
            f"The quantized model cannot be measured, and the float model can: {validation.problem} Nothing was"
            f" written. Exclude the op that fails: --exclude {excluded}."
        )
    return ""


def _rejection_message(quantized: Model, error: RejectedModelError) -> str:
    """Return the message for a quantized model that ONNX Runtime cannot load, although it loads the float model."""
    graph_name, op_name = error.op_key
    graph = quantized.graphs[graph_name]
    while op_name and op_name not in graph:  # an op that the file has as part of another one: "x/dequant/cast"
        op_name = op_name.rpartition("/")[0]
    op = graph.op(op_name) if op_name else None
    place = "" if op is None else f" at {qualified_op_name(graph_name, op_name)} ({op.type})"
    excluded = op_name if op is None or not op.anchor else op.anchor.partition(":")[0]
    remedy = f"--exclude {shlex.quote(excluded)} keeps it in float" if excluded else error.fix
    return (
        f"ONNX Runtime loads the float model, but cannot load the quantized model{place}: {error}. Nothing was written."
        f" To get a model that it loads: {remedy}."
    )


def _broken_outputs_message(outputs: Sequence[OutputFigures], comparison: Comparison) -> str:
    """Return the message for NaN or infinite values that only the quantized model has."""
    counts = ", ".join(f"{output.broken} of {output.values} values of output {output.name!r}" for output in outputs)
    first = next((site for site in comparison.sites if site.accumulated == -math.inf), None)
    remedy = "Keep the ops before a division, root or logarithm in float with --exclude"
    if first is not None:
        remedy += f"; the first quantized tensor with such values is {first.tensor}"
    return (
        f"The quantized model gives NaN or infinite values where those of the float model are finite: {counts}, on"
        f" {comparison.samples} samples. Nothing was written. {remedy}."
    )


def count_quantized_macs(
    source: Model, quantized: Model, sizes: Mapping[TensorRef, int] | None = None
) -> tuple[int, int]:
    """Return the multiply-adds per sample with quantized inputs, and all; zeros if `sizes` lacks unknown sizes."""
    if sizes is None and unsized_tensors(source):
        return 0, 0
    counts = count_macs(source, sizes)
    quantized_ops = {(covered.graph, covered.op) for covered in weighted_op_coverage(quantized) if covered.quantized}
    return sum(count for op_id, count in counts.items() if op_id in quantized_ops), sum(counts.values())


def measure_tensor_sizes(model: Model, batches: Dataset, runner: Runner | None = None) -> dict[TensorRef, int]:
    """Measure on the first sample the element counts that multiply-adds depend on and shapes do not give.

    The `runner` of the model is created if needed.
    """
    sample = next(batches.feeds_between(0, 1))
    specs = formats.format_module(model.format).input_specs(model)
    leading = [sample[spec.name] for spec in specs if spec.name in sample and spec.shape and spec.shape[0] is None]
    batched = all(len(value) == 1 for value in leading)
    tensors_to_measure = unsized_tensors(model, batched=batched)
    if not tensors_to_measure:
        return {}
    runner = runner or formats.format_module(model.format).create_runner(model)
    hidden = runner.unobservable(tensors_to_measure)
    feed = model_inputs(runner, sample)
    return runner.element_counts([tensor for tensor in tensors_to_measure if tensor not in hidden], feed)
