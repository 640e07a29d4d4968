"""Run two models on the same data and measure the difference of their outputs, in constant memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphquant import formats
from graphquant.analysis.comparison import (
    MIN_SAMPLES,
    Comparison,
    ErrorSums,
    MetricFigures,
    OutputFigures,
    SqnrConfidence,
    ignore_overflow,
    lost_share_upper_bound,
    student_quantile,
)
from graphquant.analysis.measured_outputs import compared_outputs, has_classes, match_inputs, match_outputs
from graphquant.calibration.batch_independence import equal_within_rounding, is_batch_independent
from graphquant.calibration.calibrate import block_feeds, tee_items
from graphquant.calibration.memory import RunFootprint, concurrent_run_count, observation_budget, return_freed_memory

if TYPE_CHECKING:
    from graphquant.analysis.site_errors import ComparedSites
    from graphquant.calibration.data import Dataset
    from graphquant.calibration.data.function import Metric
    from graphquant.formats import Feeds, Runner
    from graphquant.ir import TensorRef
    from graphquant.numerics import Array

    ObservedTensors = Mapping[TensorRef, list[Array]]

# Inputs and outputs of the two models are matched by name, then by order.

CLASS_SCORE_AXES = 2  # number of axes of class scores: samples and classes, or classes alone without a batch axis
MAX_MEAN_LOSS = 700.0  # above this, the perplexity is no finite number
TOKEN_SCORE_AXES = 3  # number of axes of scores of the next token: samples, tokens and the vocabulary


class OutputTally:
    """Running figures of one output."""

    def __init__(
        self, name: str, quantized_name: str, *, batched: bool, vocabulary: int | None = None, has_classes: bool = True
    ) -> None:
        """Create an empty tally; with `batched`, the first axis counts samples.

        `vocabulary` is the number of ids that an input of the model may have, None if it is unknown. Without
        `has_classes`, no largest value is compared.
        """
        self.name, self.quantized_name, self._has_classes = name, quantized_name, has_classes
        self._axes = {CLASS_SCORE_AXES} if batched else {CLASS_SCORE_AXES - 1, CLASS_SCORE_AXES}
        self._batched, self._vocabulary = batched, vocabulary
        self._errors, self._confidence = ErrorSums(), SqnrConfidence()
        self._fused_errors, self._observed_errors = ErrorSums(), ErrorSums()
        self._has_floats = False
        self._rows = self._agreements = 0
        self._labelled: int | None = None
        self._correct = [0, 0]
        self._changed_correct = [0, 0]
        self._token_losses: list[float] | None = None  # sums over all labels, of both models

    def add(
        self, expected: Array | None, actual: Array | None, labels: Array | None, observed: Array | None = None
    ) -> None:
        """Add the arrays of one run; None if the model gave no output. `observed` is `actual` with observed tensors."""
        if expected is None or actual is None:
            if expected is not actual:
                problem = f"only {'the quantized' if expected is None else 'the float'} model gives it for some sample"
                self._errors.problem = self._errors.problem or problem
            return
        if expected.dtype.kind in "OSU" and expected.shape == actual.shape:  # text, such as the name of a class
            self._errors.count += expected.size
        else:
            self._errors.add(expected, actual, full=True)
        if self._errors.problem:
            return
        if expected.dtype.kind in "iubOSU":
            self._rows += expected.size
            self._agreements += int((expected == actual).sum())
            return
        if expected.size:
            self._has_floats = True
            self._confidence.add(*_sums_of_squares(expected, actual, batched=self._batched))
            if observed is not None:
                self._fused_errors.add(expected, actual)
                self._observed_errors.add(expected, observed)
        # Three axes have another meaning in other models: features of tokens, or boxes. They are scores of tokens if
        # the labels are, or if the model reads ids of as many tokens.
        is_tokens = expected.ndim == TOKEN_SCORE_AXES and (
            expected.shape[-1] == self._vocabulary
            or (labels is not None and labels.size * expected.shape[-1] == expected.size)
        )
        is_scores = self._has_classes and (is_tokens or expected.ndim in self._axes)
        if not is_scores or expected.shape[-1] <= 1:
            return
        top_classes = [np.asarray(values.argmax(-1)).reshape(-1) for values in (expected, actual)]
        self._rows += top_classes[0].size
        self._agreements += int((top_classes[0] == top_classes[1]).sum())
        if labels is not None and labels.size == top_classes[0].size:
            self._add_labels(labels, top_classes, (expected, actual))

    def _add_labels(self, labels: Array, top_classes: list[Array], scores: tuple[Array, Array]) -> None:
        if not labels.size or (labels.min() >= 0 and labels.max() < scores[0].shape[-1]):  # they are class indices
            self._labelled = (self._labelled or 0) + labels.size
            if scores[0].ndim == TOKEN_SCORE_AXES:
                totals = self._token_losses or [0.0, 0.0]
                self._token_losses = [
                    total + _token_loss(side, labels) for total, side in zip(totals, scores, strict=True)
                ]
            correct = [top == labels.reshape(-1) for top in top_classes]
            for side, opposite in ((0, 1), (1, 0)):
                self._correct[side] += int(correct[side].sum())
                self._changed_correct[side] += int((correct[side] & ~correct[opposite]).sum())

    def sample_errors(self) -> list[float]:
        """Return the squared errors of the added samples."""
        return self._confidence.sample_errors

    def figures(self) -> OutputFigures:
        """Return the figures over all samples."""
        errors, rows, comparable = self._errors, self._rows, not self._errors.problem
        has_sqnr, has_rows = self._has_floats and comparable, bool(rows) and comparable
        labelled = self._labelled if self._labelled == rows and comparable else None
        finite = not errors.nonfinite
        lost, gained = self._changed_correct
        return OutputFigures(
            name=self.name,
            quantized_name=self.quantized_name,
            sqnr=errors.sqnr if has_sqnr else None,
            cosine=errors.cosine if has_sqnr else None,
            max_error=errors.max_error,
            agreement=self._agreements / rows if has_rows else None,
            rows=rows,
            values=errors.count,
            accuracy=(self._correct[0] / labelled, self._correct[1] / labelled) if labelled else None,
            perplexity=_perplexities(self._token_losses, labelled) if labelled and finite else None,
            problem=errors.problem or ("" if finite else f"{errors.nonfinite} values are NaN or infinite"),
            sqnr_lower_bound=self._confidence.lower_bound if has_sqnr and finite else None,
            sqnr_standard_error=self._confidence.standard_error if has_sqnr and finite else 0.0,
            half_error_samples=self._confidence.half_error_samples if comparable and finite else 0,
            agreement_lower_bound=1 - lost_share_upper_bound(rows - self._agreements, 0, rows) if has_rows else None,
            lost_share_upper_bound=lost_share_upper_bound(lost, gained, labelled) if labelled else None,
            broken=errors.broken,
            fusion_loss=max(0.0, self._observed_errors.sqnr - self._fused_errors.sqnr),
        )


def _token_loss(scores: Array, labels: Array) -> float:
    """Return the sum of the negative logarithms of the probabilities of `labels`.

    `scores` (samples, tokens, vocabulary) are logits, or probabilities of sum 1.
    """
    rows = scores.reshape(-1, scores.shape[-1]).astype(np.float64)
    if rows.size and rows.min() >= 0 and np.allclose(rows.sum(-1), 1, atol=1e-3):
        rows = np.log(np.maximum(rows, np.finfo(np.float64).tiny))
    peaks = rows.max(-1, initial=-np.inf)
    totals = peaks + np.log(np.exp(rows - peaks[:, None]).sum(-1))
    return float((totals - rows[np.arange(len(rows)), labels.reshape(-1)]).sum())


def _perplexities(losses: Sequence[float] | None, count: int) -> tuple[float, float] | None:
    """Return exp(mean loss) of both models: as many equally likely tokens would be as hard to predict."""
    if losses is None or max(losses) / count > MAX_MEAN_LOSS:
        return None
    return math.exp(losses[0] / count), math.exp(losses[1] / count)


class MetricTally:
    """Scores of both models over all samples."""

    def __init__(self, metric: Metric, inputs: Sequence[str], output_names: Mapping[str, str]) -> None:
        """Create an empty tally. `output_names` has the quantized output by float output."""
        self._metric, self._inputs, self._output_names = metric, frozenset(inputs), output_names
        self._scores: list[tuple[int, float, float]] = []

    def add(self, feed: Mapping[str, Array], expected: Mapping[str, Array], actual: Mapping[str, Array]) -> None:
        """Add the outputs of one run of both models."""
        labels = {name: value for name, value in feed.items() if name not in self._inputs}
        rows = max((len(value) for value in (labels or feed).values() if np.ndim(value)), default=1)
        renamed = {name: actual[other] for name, other in self._output_names.items() if other in actual}
        before, after = (self._metric.score(outputs, labels) for outputs in (expected, renamed))
        self._scores.append((rows, before, after))

    def figures(self) -> MetricFigures | None:
        """Return the mean scores, None without samples."""
        if not self._scores:
            return None
        rows, *scores = np.array(self._scores, np.float64).T
        before, after = (float(np.average(values, weights=rows)) for values in scores)
        drops, count = scores[0] - scores[1], len(rows)
        bound = math.inf
        if count >= MIN_SAMPLES:
            shares = rows / rows.sum() * (drops - (before - after))
            deviation = math.sqrt(float(shares @ shares) * count / (count - 1))
            bound = before - after + student_quantile(count - 1) * deviation
        return MetricFigures(name=self._metric.name, scores=(before, after), drop_upper_bound=bound)


def _sums_of_squares(expected: Array, actual: Array, *, batched: bool) -> tuple[Array, Array]:
    """Sums of squares of an output and of its errors by sample (first axis), float64 (N,)."""
    rows = len(expected) if batched and expected.ndim else 1
    flat_expected = expected.reshape(rows, -1).astype(np.float64)
    errors = actual.reshape(rows, -1) - flat_expected
    return np.einsum("ij,ij->i", flat_expected, flat_expected), np.einsum("ij,ij->i", errors, errors)


def model_inputs(runner: Runner, feed: Feeds) -> dict[str, Any]:
    """Return the entries of a feed that the model takes, without labels."""
    return {spec.name: feed[spec.name] for spec in runner.inputs}


COMPARE_THREADS = 2  # threads: without sites one per model, and otherwise threads that measure
MAX_PREFETCHED_RUNS = 2  # maximum number of prefetched runs of an observed model, memory permitting
MAX_PREFETCHED_BYTES = 1 << 26  # memory for them, so that a comparison needs no more than calibration

MEASURE_BATCH_VALUES = 1 << 16
"""Number of values that is worth a thread. Smaller arrays are collected until they reach it."""


class ComparisonSamples(NamedTuple):
    """Samples on which two models are compared."""

    dataset: Dataset
    footprint: RunFootprint  # footprint of a run of the float model
    labels: str = ""  # key of the labels in the dataset, or ""
    max_site_samples: int | None = None  # number of samples on which quantized tensors are measured, or None for all
    metric: Metric | None = None  # the user's metric
    # Receives the inputs and outputs of each run of the float model, so that nobody needs to run it again.
    on_float_outputs: Callable[[Feeds, Mapping[str, Array]], object] = lambda _feed, _outputs: None


def compare_runners(
    float_runner: Runner,
    quantized_runner: Runner,
    samples: ComparisonSamples,
    sites: ComparedSites | None,
    outputs: Mapping[str, str],
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run both models on all samples.

    Each model runs as it is for its outputs, and once more with observed tensors, because a runtime may use integer
    kernels only where no tensor is observed. Once the observed float model has given the same outputs, it no longer
    runs unobserved. `sites` is None for the outputs alone. `outputs` has the quantized output by float output; the rest
    is matched. Raises a ModelError if a model cannot be run, and a UsageError if the inputs or outputs of the models do
    not match.
    """
    batches, load, labels = samples.dataset, samples.footprint, samples.labels
    site_runner = None if sites is None else float_runner
    if sites is not None and sites.float_model is not float_runner.model:  # they refer to a prepared copy
        site_runner = formats.create_runner(sites.float_model)
    inputs = match_inputs(float_runner.inputs, quantized_runner.inputs)
    model_outputs = match_outputs(float_runner.outputs, quantized_runner.outputs, outputs)
    batched = _can_join_samples(quantized_runner, samples, inputs, sites, site_runner)
    tallies = create_tallies(float_runner, quantized_runner, model_outputs, batched=batched)
    input_names = [spec.name for spec in float_runner.inputs]
    scores = None if samples.metric is None else MetricTally(samples.metric, input_names, model_outputs)
    blocks = -(-batches.count // load.block_size)
    site_samples = batches.count if samples.max_site_samples is None else samples.max_site_samples
    all_feeds = block_feeds(batches, [(0, blocks)], load.block_size, join_samples=batched)
    branches = 2 if sites is None or site_runner is None else 2 + COMPARE_THREADS
    feeds, quantized_feeds, *site_feeds = tee_items(all_feeds, branches)
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(COMPARE_THREADS))
        stack.enter_context(closing(quantized_feeds))
        model_pair = ModelPairRunner(float_runner, quantized_runner, inputs)
        model_pair.has_more_samples = site_samples < batches.count
        float_runner.start_sequence()
        quantized_outputs = quantized_runner.run_each(model_pair.quantized_feed(feed) for feed, _ in quantized_feeds)
        if sites is not None and site_runner is not None:
            for site_feed in site_feeds:
                stack.enter_context(closing(site_feed))
            prefetch_limit = concurrent_run_count(
                2 * (load.elements_per_sample or MAX_PREFETCHED_BYTES) * (load.block_size if batched else 1),
                min(observation_budget(None, ()), MAX_PREFETCHED_BYTES),
                MAX_PREFETCHED_RUNS,
            )
            model_pair.start_observing(
                sites,
                site_runner,
                [_feeds_until(site_samples, load.block_size, copy) for copy in site_feeds],
                prefetch_limit,
                stack,
            )
        completed = 0
        for feed, block in feeds:
            expected, actual, observed = model_pair.run(
                feed, quantized_outputs, pool, measure_sites=completed < site_samples
            )
            samples.on_float_outputs(model_inputs(float_runner, feed), expected)
            with ignore_overflow():
                for tally in tallies:
                    name = tally.quantized_name
                    tally.add(expected.get(tally.name), actual.get(name), feed.get(labels), observed.get(name))
            if scores is not None:
                scores.add(feed, expected, actual)
            del expected, actual, observed
            if block is not None:
                completed = min((block + 1) * load.block_size, batches.count)
                for site_feed in site_feeds if completed >= site_samples else ():
                    site_feed.close()  # else what is left would be kept for them
                if progress is not None:
                    progress(completed, batches.count)
        model_pair.measure_pending(pool)
    return Comparison(
        samples=batches.count,
        random=batches.random,
        outputs=tuple(tally.figures() for tally in tallies),
        sites=() if sites is None else sites.figures(),
        labels=labels,
        metric=None if scores is None else scores.figures(),
    )


def create_tallies(
    float_runner: Runner, quantized_runner: Runner, outputs: Mapping[str, str], *, batched: bool
) -> list[OutputTally]:
    """Return an empty tally for each compared tensor. `outputs` has the quantized output by float output."""
    vocabulary = vocabulary_size(float_runner)
    return [
        OutputTally(name, other, batched=batched, vocabulary=vocabulary, has_classes=has_classes(float_runner, name))
        for name, other in compared_outputs(float_runner, quantized_runner, outputs).items()
    ]


def _can_join_samples(
    quantized_runner: Runner,
    samples: ComparisonSamples,
    inputs: Mapping[str, str],
    sites: ComparedSites | None,
    site_runner: Runner | None,
) -> bool:
    """Return True if a run of several samples gives the values of one run for each, in all models that run."""
    batches, load = samples.dataset, samples.footprint
    if load.elements_per_sample is None or not load.join_samples:
        return False
    if not is_batch_independent(quantized_runner, batches, load.block_size, inputs=inputs):
        return False
    if sites is None or site_runner is None:
        return True
    quantized_tensors, float_tensors = sites.tensors_to_observe(quantized_runner.output_tensors.values())
    elements = 2 * load.elements_per_sample * load.block_size
    return is_batch_independent(
        quantized_runner, batches, load.block_size, quantized_tensors, inputs=inputs, max_elements=elements
    ) and is_batch_independent(site_runner, batches, load.block_size, float_tensors, max_elements=elements)


def vocabulary_size(runner: Runner) -> int | None:
    """Return the rows of the largest table that an input indexes first, such as embeddings of tokens; None if none."""
    from graphquant.calibration.data.model_inputs import find_input_uses

    ids = [spec for spec in runner.inputs if spec.dtype in {"int32", "int64"}]
    uses = find_input_uses(runner.model, ids).values() if ids else ()
    return max((use.table_rows for use in uses if use.table_rows), default=None)


def _feeds_until(max_samples: int, block_size: int, feeds: Iterable[tuple[Feeds, int | None]]) -> Iterator[Feeds]:
    """Yield `feeds`, in blocks of `block_size`, until `max_samples` samples are reached."""
    for feed, block in feeds:
        yield feed
        if block is not None and (block + 1) * block_size >= max_samples:
            return


def outputs_equal(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> bool:
    """Return True if outputs differ only by float rounding."""
    return expected.keys() == actual.keys() and all(
        equal_within_rounding(value, actual[name]) for name, value in expected.items()
    )


class ModelPairRunner:
    """Run both models side by side, unobserved and observed."""

    def __init__(self, float_runner: Runner, quantized_runner: Runner, inputs: Mapping[str, str]) -> None:
        self._float_runner, self._quantized_runner = float_runner, quantized_runner
        self._inputs = inputs
        self._sites: ComparedSites | None = None
        self._site_runner: Runner | None = None
        self._observations: list[Iterator[ObservedTensors]] = []
        self._output_tensors: Mapping[str, TensorRef] = {}
        self._observed_outputs_equal = False
        self.has_more_samples = False  # True if samples follow those whose tensors are measured
        self._has_state = float_runner.start_sequence()
        self._pending: list[tuple[ObservedTensors, ObservedTensors]] = []
        self._pending_values = 0

    def start_observing(
        self,
        sites: ComparedSites,
        site_runner: Runner,
        site_feeds: Sequence[Iterator[Feeds]],
        prefetch_limit: int,
        stack: ExitStack,
    ) -> None:
        """Start observing both models on their copies of the feeds, up to `prefetch_limit` runs ahead of `run`."""
        outputs = self._quantized_runner.output_tensors.values()
        quantized_tensors, float_tensors = sites.tensors_to_observe(outputs)
        hidden = self._quantized_runner.unobservable(quantized_tensors)
        sites.drop_hidden(hidden, site_runner.unobservable(float_tensors))
        quantized_tensors, float_tensors = sites.tensors_to_observe(outputs)
        if (
            float_tensors
            and not self._has_state  # its unobserved runs must not miss a sample
            and not sites.float_has_quantization
            and site_runner.output_tensors.keys() >= set(self._float_runner.outputs)
        ):
            self._output_tensors = site_runner.output_tensors
        self._sites, self._site_runner = sites, site_runner
        float_tensors = list(dict.fromkeys([*float_tensors, *self._output_tensors.values()]))
        quantized_tensors = [tensor for tensor in quantized_tensors if tensor not in hidden]
        observations = (
            (site_runner, float_tensors, (model_inputs(self._float_runner, feed) for feed in site_feeds[0])),
            (self._quantized_runner, quantized_tensors, map(self.quantized_feed, site_feeds[1])),
        )
        self._observations = [
            stack.enter_context(closing(runner.observe(tensors, feeds, max_in_flight=prefetch_limit)))
            if tensors
            else ({} for _ in feeds)
            for runner, tensors, feeds in observations
        ]

    def quantized_feed(self, feed: Feeds) -> dict[str, Any]:
        """Rename the inputs of a feed for the quantized model."""
        return {name: feed[source] for name, source in self._inputs.items()}

    def run(
        self, feed: Feeds, outputs: Iterator[Mapping[str, Array]], pool: Executor, *, measure_sites: bool
    ) -> tuple[Mapping[str, Array], Mapping[str, Array], Mapping[str, Array]]:
        """Return the next outputs of both models, and of the observed quantized one, whose tensors are measured."""
        if not self._observations or not measure_sites:
            float_outputs = pool.submit(self._float_runner.run, model_inputs(self._float_runner, feed))
            actual = next(outputs)
            return float_outputs.result(), actual, {}
        actual = next(outputs)
        if self._site_runner is not None and self._output_tensors and not self._observed_outputs_equal:
            self._site_runner.free_session(observing=True)  # the weights need not be in two sessions at a time
            return_freed_memory()
        expected = (
            {} if self._observed_outputs_equal else self._float_runner.run(model_inputs(self._float_runner, feed))
        )
        if self._output_tensors and not self._observed_outputs_equal:
            self._float_runner.free_session(only_large=self.has_more_samples)
            return_freed_memory()
        float_values, quantized_values = map(next, self._observations)
        observed_outputs = _last_values(self._output_tensors, float_values)
        if self._output_tensors and not self._observed_outputs_equal:
            self._observed_outputs_equal = outputs_equal(expected, observed_outputs)
            self._output_tensors = self._output_tensors if self._observed_outputs_equal else {}
        elif self._observed_outputs_equal:
            expected = observed_outputs
        self._pending.append((quantized_values, float_values))
        self._pending_values += sum(value.size for values in quantized_values.values() for value in values)
        if self._pending_values > MEASURE_BATCH_VALUES:
            self.measure_pending(pool)
        return expected, actual, _last_values(self._quantized_runner.output_tensors, quantized_values)

    def measure_pending(self, pool: Executor) -> None:
        """Measure the observed tensors that are still pending."""
        remaining_sites = iter(self._sites.sites if self._sites is not None else ())

        def measure_sites(_thread: int) -> None:
            with ignore_overflow():
                for site in remaining_sites:
                    site.add(self._pending)

        if self._pending_values > MEASURE_BATCH_VALUES:
            list(pool.map(measure_sites, range(COMPARE_THREADS)))
        else:
            measure_sites(0)
        self._pending.clear()
        self._pending_values = 0


def _last_values(tensors: Mapping[str, TensorRef], observed: ObservedTensors) -> dict[str, Array]:
    return {name: observed[tensor][-1] for name, tensor in tensors.items() if observed.get(tensor)}


def with_sensitivity(comparison: Comparison, sqnr_of: Callable[[str, str], float | None]) -> Comparison:
    """Return the comparison with the sensitivity of each quantized tensor, the most sensitive first.

    `sqnr_of` returns the SQNR in dB of the worst output if only one op, given by graph and name, quantizes.
    """
    sites = [replace(site, sensitivity=sqnr_of(site.graph, site.op)) for site in comparison.sites]
    sites.sort(key=lambda site: (site.sensitivity is None, site.sensitivity or 0.0))
    return replace(comparison, sites=tuple(sites))
