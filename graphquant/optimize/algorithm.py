"""What a correction is, and what it says of what it did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import numpy as np

from graphquant.ir import check_invariants
from graphquant.quantize.rewrite import rewrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from graphquant.formats import Feeds, Runner
    from graphquant.ir import Model, Use
    from graphquant.numerics import Array
    from graphquant.quantize import Solution
    from graphquant.quantize.rewrite import IntegerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmResult:
    """One op whose weights or bias a correction changed, or left.

    Attributes:
        algorithm: The correction's name.
        target: The op, with its graph where that is not the main one.
        detail: What was done, or why nothing was.
        applied: Whether it was changed.
    """

    algorithm: str
    target: str
    detail: str
    applied: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmData:
    """Data to correct by, and what runs it.

    Attributes:
        feeds: What corrections are made by, one sample each; few, so that it costs little.
        validation_feeds: What they are checked with.
        create_runner: Makes what runs a model.
    """

    feeds: Sequence[Feeds]
    validation_feeds: Sequence[Feeds]
    create_runner: Callable[[Model], Runner]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEdits:
    """A solved plan and its model, as far as they are corrected.

    Attributes:
        prepared_model: The prepared model.
        model: The same, perhaps with other weights.
        solution: Scales and zero points of its plan.
        edited_weights: Weights that are others now, float32, by where they are read.
        integer_cache: Keeps the integers of weights while the model is quantized time and again; None where it is not.
        results: What was done.
    """

    prepared_model: Model
    model: Model
    solution: Solution
    edited_weights: Mapping[Use, Array] = field(default_factory=dict)
    integer_cache: IntegerCache | None = None
    results: tuple[AlgorithmResult, ...] = ()

    def with_results(self, results: tuple[AlgorithmResult, ...]) -> WeightEdits:
        """The same, having told this."""
        return replace(self, results=results)

    def quantized_model(self) -> Model:
        """The model with all of its quantization.

        Raises:
            UsageError: The plan does not fit the model.
        """
        return rewrite(self.model, self.solution.plan, self.solution.params, integer_cache=self.integer_cache)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PostCalibrationAlgorithm:
    """One kind of correction.

    Attributes:
        purpose: What it is good for, for people.
        apply: Corrects a draft.
        min_standard_errors: Standard errors that the gain of some output must be above 0.
    """

    purpose: str
    apply: Callable[[WeightEdits, AlgorithmData], WeightEdits]
    min_standard_errors: float


# Corrections made one after the other, each kept only where samples that it was not made by show that it gains.
#
# Sums of squares over a few samples are mostly those of the worst one to three. So no output may lose, neither with all
# samples nor, unless most samples gain, without the three that gain most; and the roots of some output's errors must fall
# by more than chance.

MIN_VALIDATION_SAMPLES: Final = 3
"""Samples that say anything."""

MIN_GAIN_STANDARD_ERRORS: Final = 2.5
"""Standard errors that the mean fall of an output's errors must be above 0."""

MIN_TARGETED_GAIN_STANDARD_ERRORS: Final = 1.0
"""The same where the correction lowers errors of single ops that it can see, so that a gain is what is expected."""

MAX_LOSS_STANDARD_ERRORS: Final = 1.0
"""Standard errors that the mean fall of no output's errors may be below 0."""

MAX_LOSS_DB: Final = 0.5
"""dB that no output may lose over all samples."""

MIN_OUTPUT_GAIN_DB: Final = 0.5
"""dB that some output must gain."""

MAX_OUTLIERS: Final = 3
"""Samples that may not decide by themselves, or a quarter of few."""

NEGLIGIBLE_ERROR: Final = 1e-20
"""Of an output's power, the error that is taken for none."""

SampleOutputs = list[dict[str, "Array"]]
"""What a model gives, sample by sample, by name."""


class AlgorithmState(Protocol):
    """A model as far as it is corrected."""

    @property
    def model(self) -> Model:
        """The model."""

    @property
    def results(self) -> tuple[AlgorithmResult, ...]:
        """What was done."""

    def with_results(self, results: tuple[AlgorithmResult, ...]) -> Self:
        """The same, having told this."""


StateT = TypeVar("StateT", bound=AlgorithmState)


def apply_validated(
    state: StateT,
    algorithms: Sequence[tuple[str, Callable[[StateT, AlgorithmData], StateT], float]],
    solve_state: Callable[[StateT], WeightEdits],
    samples: AlgorithmData,
) -> StateT:
    """What is left of `state` after these corrections, those taken back after which outputs are not nearer.

    Args:
        state: The model before them, which stays as it is.
        algorithms: Names of corrections, what makes them, and how sure each gain must be, in standard errors.
        solve_state: Gives a model its scales.
        samples: What to correct by, and to check with.

    Raises:
        ModelError: The model cannot be run.
    """
    count = len(samples.validation_feeds)
    if count < MIN_VALIDATION_SAMPLES:
        too_few = f"there are {count} samples to check it with, and {MIN_VALIDATION_SAMPLES} are the least"
        return state.with_results((*state.results, *(rejected_algorithm(name, too_few) for name, *_ in algorithms)))
    float_outputs: SampleOutputs = []
    errors_before = None
    for name, apply, min_standard_errors in algorithms:
        candidate = apply(state, samples)
        check_invariants(candidate.model, name)
        if not any(result.applied for result in candidate.results[len(state.results) :]):
            state = state.with_results(candidate.results)
            continue
        if errors_before is None:
            edits = solve_state(state)
            float_outputs = run_float_model(edits, samples)
            errors_before = measure_output_errors(edits, float_outputs, samples)
        errors_after = measure_output_errors(solve_state(candidate), float_outputs, samples)
        reason = rejection_reason(errors_before, errors_after, min_standard_errors)
        if reason:
            detail = f"{reason}, measured on {count} samples that it was not made by"
            state = state.with_results((*state.results, rejected_algorithm(name, detail)))
        else:
            state, errors_before = candidate, errors_after
    return state


def rejected_algorithm(name: str, reason: str) -> AlgorithmResult:
    """What is told of a correction that was not made."""
    return AlgorithmResult(algorithm=name, target="model", detail=f"left out: {reason}", applied=False)


def run_float_model(edits: WeightEdits, samples: AlgorithmData) -> SampleOutputs:
    """What the float model gives for the samples that corrections are checked with.

    Raises:
        ModelError: The model cannot be run.
    """
    runner = samples.create_runner(edits.model)
    return [runner.run(feed) for feed in samples.validation_feeds]


def measure_output_errors(edits: WeightEdits, float_outputs: SampleOutputs, samples: AlgorithmData) -> Array:
    """Squared errors of the quantized model's float outputs, of each output's power: float64 (samples, outputs).

    Raises:
        ModelError: The model cannot be run.
    """
    runner = samples.create_runner(edits.quantized_model())
    names = [
        name
        for name, value in float_outputs[0].items()
        if value.dtype.kind == "f" and all(name in sample_outputs for sample_outputs in float_outputs)
    ]
    power = {
        name: float(np.mean([_signal_power(sample_outputs[name]) for sample_outputs in float_outputs])) or 1.0
        for name in names
    }
    rows = []
    for sample_outputs, feed in zip(float_outputs, samples.validation_feeds, strict=True):
        quantized_outputs = runner.run(feed)
        rows.append([_squared_error(sample_outputs[name], quantized_outputs.get(name)) / power[name] for name in names])
    return np.array(rows).reshape(len(rows), len(names))


def rejection_reason(before: Array, after: Array, min_standard_errors: float = MIN_GAIN_STANDARD_ERRORS) -> str:
    """Why a correction is not kept, given outputs' `measure_output_errors` before and after it; "" if it is.

    Args:
        before: float64 (samples, outputs).
        after: Likewise.
        min_standard_errors: Standard errors that the mean fall of some output's errors must be above 0.
    """
    gains = np.sqrt(before) - np.sqrt(after)
    standard_error = gains.std(0, ddof=1) / np.sqrt(len(gains))
    mean_gain = gains.mean(0)
    total_gain = _error_reduction_db(before.sum(0), after.sum(0))
    if np.any(total_gain < -MAX_LOSS_DB) or np.any(mean_gain < -MAX_LOSS_STANDARD_ERRORS * standard_error):
        return f"an output is off by {10 ** (max(-total_gain.min(), 0) / 20):.2f} times as much"
    outlier_count = max(min(MAX_OUTLIERS, len(gains) // 4), 1)
    typical_samples = np.argsort(before - after, axis=0)[:-outlier_count]
    typical_gain = _error_reduction_db(
        *(np.take_along_axis(sample_errors, typical_samples, 0).sum(0) for sample_errors in (before, after))
    )
    typical_gain[2 * (after < before).sum(0) - len(gains) > MIN_GAIN_STANDARD_ERRORS * np.sqrt(len(gains))] = (
        0  # most samples gain
    )
    if np.any(typical_gain < 0):
        factor = 10 ** (-typical_gain.min() / 20)
        return f"without the {outlier_count} samples that gain most an output is off by {factor:.2f} times as much"
    if not np.any(mean_gain > min_standard_errors * standard_error):
        return f"no output is nearer to the float model's by more than chance explains ({total_gain.max(initial=0):.1f} dB)"
    best_gain = total_gain.max(initial=0)
    return (
        ""
        if best_gain >= MIN_OUTPUT_GAIN_DB
        else f"no output gains {MIN_OUTPUT_GAIN_DB:g} dB (the most is {best_gain:.1f} dB)"
    )


def _error_reduction_db(before: Array, after: Array) -> Array:
    """How far squared errors fell, in dB."""
    return np.asarray(10 * np.log10((before + NEGLIGIBLE_ERROR) / (after + NEGLIGIBLE_ERROR)))


def _signal_power(values: Array) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _squared_error(expected: Array, actual: Array | None) -> float:
    """The squared error of an output; infinite where it is not there, or of another shape."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    return float(np.square(np.subtract(actual, expected, dtype=np.float64)).sum())
