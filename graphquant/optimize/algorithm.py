"""The interface of optimization algorithms, and the validation that accepts or rejects each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np

from graphquant.analysis.measured_outputs import compared_outputs, with_selections
from graphquant.analysis.validation import DEFAULT_MIN_SQNR
from graphquant.formats import run_outputs, share_runner
from graphquant.ir import FLOAT_TYPES, Model, TensorRef, Use, check_invariants
from graphquant.quantize.rewrite import InsertedPair, IntegerCache, rewrite

if TYPE_CHECKING:
    from graphquant.formats import Feeds, Runner
    from graphquant.numerics import Array
    from graphquant.quantize import Plan, Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmResult:
    """Result of one optimization algorithm for one op."""

    algorithm: str  # name of the algorithm
    target: str  # the op, with its graph unless that is the main graph
    detail: str  # the change, or the reason why nothing changed
    applied: bool = True  # True if the op was changed


def skipped_target(algorithm: str, target: str, reason: str) -> AlgorithmResult:
    """Return the result of an algorithm that does not change `target`."""
    return AlgorithmResult(algorithm=algorithm, target=target, detail=reason, applied=False)


def skipped_algorithm(name: str, reason: str) -> AlgorithmResult:
    """Return the result of an algorithm that does not run, or whose changes are undone."""
    return skipped_target(name, "model", f"skipped: {reason}")


class AlgorithmData(NamedTuple):
    """Samples for the optimization algorithms."""

    feeds: Sequence[Feeds]  # samples that the algorithms fit to, one feed each. There are few, to limit the cost.
    validation_feeds: Sequence[Feeds]  # samples that accept or reject each algorithm
    create_runner: Callable[[Model], Runner]  # create a runner for a model

    def observe(
        self, model: Model, tensors: Iterable[TensorRef], max_in_flight: int = 1, *, ancestors_only: bool = False
    ) -> Iterator[dict[TensorRef, list[Array]]]:
        """Yield for each of `feeds` the values of those `tensors` that can be observed."""
        runner, distinct_tensors = self.create_runner(model), list(dict.fromkeys(tensors))
        refused = runner.unobservable(distinct_tensors)
        if observable := [tensor for tensor in distinct_tensors if tensor not in refused]:
            yield from runner.observe(
                observable, self.feeds, max_in_flight=max_in_flight, ancestors_only=ancestors_only
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightEdits:
    """Solved plan and model with the weight changes so far."""

    prepared_model: Model  # the prepared model
    model: Model  # the prepared model with changed weights
    solution: Solution  # scales and zero points of the plan
    # Changed float32 weights by the use that reads them.
    edited_weights: Mapping[Use, Array] = field(default_factory=dict)
    # Float values of corrected biases before, by the use that reads them; of missing ones zeros.
    original_biases: Mapping[Use, Array] = field(default_factory=dict)
    # Cache of quantized weights, because the model is quantized many times. None disables it.
    integer_cache: IntegerCache | None = None
    results: tuple[AlgorithmResult, ...] = ()  # results so far

    def quantized_model(self) -> Model:
        """Rewrite the model with all its Q/DQ pairs. Raises a UsageError if the plan does not fit the model."""
        return self.rewritten()[0]

    def rewritten(self) -> tuple[Model, list[InsertedPair]]:
        """Return the quantized model and its Q/DQ pairs. The last rewrite is kept, because it is often the result."""
        cache = self.integer_cache
        if cache is not None and cache.last_rewrite is not None:
            model, solution, last_result = cache.last_rewrite
            if model is self.model and solution is self.solution:
                return last_result
        result = rewrite(self.model, self.solution.plan, self.solution.params, integer_cache=cache)
        if cache is not None:
            cache.last_rewrite = self.model, self.solution, result
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class PreCalibrationState:
    """Prepared model and plan before calibration, with the changes so far."""

    model: Model  # the model with changed weights
    plan: Plan  # its plan
    # Tensors with scaled channels, and the constants that changed with them.
    rescaled_tensors: frozenset[TensorRef] = frozenset()
    # Inserted products, each with the tensor it multiplies.
    factor_products: Mapping[TensorRef, TensorRef] = field(default_factory=dict)
    results: tuple[AlgorithmResult, ...] = ()  # results so far

    def plan_without_factors(self, plan: Plan) -> Plan:
        """Convert `plan` to a plan for the model without inserted products."""
        sites = (replace(site, tensor=self.factor_products.get(site.tensor, site.tensor)) for site in plan.sites)
        return replace(plan, sites=tuple(sites)) if self.factor_products else plan


# An algorithm is kept only if the validation samples show a gain: those of `AlgorithmData`, not the hold-out.
#
# A few samples dominate a sum of squared errors. Therefore no output may lose over all samples, nor without the three
# samples that gain most (unless most samples gain). In addition, the root mean square error of at least one output must
# fall by more than chance explains.

MIN_VALIDATION_SAMPLES: Final = 3  # fewest samples that allow a decision
MIN_GAIN_STANDARD_ERRORS: Final = 2.5  # standard errors by which the mean error reduction must exceed 0
MIN_TARGETED_GAIN_STANDARD_ERRORS: Final = 1.0
"""The same for algorithms that minimize the error of single ops directly, for which a gain is expected."""

MAX_LOSS_STANDARD_ERRORS: Final = 1.0
"""Standard errors by which the mean error reduction of any output may fall below 0."""

MAX_LOSS_DB: Final = 0.5  # largest loss of any output over all samples, in dB
MIN_OUTPUT_GAIN_DB: Final = 0.5  # smallest gain of the best output, in dB
MAX_OUTLIERS: Final = 3  # number of samples that must not decide alone; at most a quarter of all samples
NEGLIGIBLE_ERROR: Final = 1e-20  # squared error, as a share of an output's power, that counts as zero
SampleOutputs = list[dict[str, "Array"]]  # outputs of a model by name, one dictionary per sample

StateT = TypeVar("StateT", WeightEdits, PreCalibrationState)


def apply_validated(
    state: StateT,
    algorithms: Sequence[tuple[str, Callable[[StateT, AlgorithmData], StateT], float]],
    solve_state: Callable[[StateT], WeightEdits],
    samples: AlgorithmData,
) -> StateT:
    """Apply algorithms in order, and undo each one that does not bring the outputs closer to the float model.

    Each algorithm has a name, a function and required standard errors. The model of `state` is not modified. Raises a
    ModelError if the model cannot be run.
    """
    count = len(samples.validation_feeds)
    if count < MIN_VALIDATION_SAMPLES:
        too_few = f"there are {count} validation samples, and it needs at least {MIN_VALIDATION_SAMPLES}"
        all_skipped: list[AlgorithmResult] = [skipped_algorithm(name, too_few) for name, *_ in algorithms]
        return replace(state, results=(*state.results, *all_skipped))
    float_runner: Runner
    float_outputs: SampleOutputs = []
    measured: _MeasuredEdits | None = None
    for name, apply, min_standard_errors in algorithms:
        candidate = apply(state, samples)
        if candidate.model is not state.model:
            check_invariants(candidate.model, name)
        if not any(result.applied for result in candidate.results[len(state.results) :]):
            state = replace(state, results=candidate.results)
            continue
        if measured is None:
            edits = solve_state(state)
            plain_runner = samples.create_runner(edits.model)
            float_runner = with_selections(plain_runner)
            # Only the plain runner may have a session that observes tensors, which saves a second one.
            run_float = partial(run_outputs, plain_runner) if float_runner is plain_runner else float_runner.run_each
            float_outputs = list(run_float(samples.validation_feeds))
            measured = _measure_output_errors(edits, float_runner, float_outputs, samples)
            measured.runner.free_session()
        candidate_measured = _measure_output_errors(solve_state(candidate), float_runner, float_outputs, samples)
        reason = rejection_reason(measured.errors, candidate_measured.errors, min_standard_errors)
        if reason:
            skipped = skipped_algorithm(name, f"{reason}, measured on {count} validation samples")
            state = replace(state, results=(*state.results, skipped))
        else:
            state, measured = candidate, candidate_measured
        measured.reuse()
    return state


class _MeasuredEdits(NamedTuple):
    """Errors of edits, with their quantized model and its runner, which are often those of the result."""

    errors: Array  # squared error of each float output relative to its power: float64 (samples, outputs)
    runner: Runner
    edits: WeightEdits
    rewritten: tuple[Model, list[InsertedPair]]

    def reuse(self) -> None:
        """Let later steps use the quantized model and its runner again."""
        share_runner(self.runner, "quantized")
        if self.edits.integer_cache is not None:
            self.edits.integer_cache.last_rewrite = self.edits.model, self.edits.solution, self.rewritten


def _measure_output_errors(
    edits: WeightEdits, float_runner: Runner, float_outputs: SampleOutputs, samples: AlgorithmData
) -> _MeasuredEdits:
    """Measure the error of the quantized model of edits on the validation samples."""
    rewritten = edits.rewritten()
    plain_runner = share_runner(samples.create_runner(rewritten[0]), "quantized")
    runner = with_selections(plain_runner, float_runner)
    names = [
        name
        for name in compared_outputs(float_runner, runner, {name: name for name in float_outputs[0]})
        if float_outputs[0][name].dtype.name in FLOAT_TYPES and all(name in outputs for outputs in float_outputs)
    ]
    values = {name: [outputs[name] for outputs in float_outputs] for name in names}
    powers = [np.mean([_squared_error(each, np.zeros_like(each)) for each in values[name]]) or 1.0 for name in names]
    rows = []
    for outputs, quantized in zip(float_outputs, runner.run_each(samples.validation_feeds), strict=True):
        rows.append([_squared_error(outputs[name], quantized.get(name)) for name in names])
    errors = np.array(rows).reshape(len(rows), len(names)) / powers
    return _MeasuredEdits(errors, plain_runner, edits, rewritten)


MIN_COMPARABLE_SAMPLES = 2  # the least with a standard error


def _squared_error(expected: Array, actual: Array | None) -> float:
    """Squared error of an output's values that are finite in float; infinite if it is missing or has another shape."""
    if actual is None or actual.shape != expected.shape:
        return float("inf")
    finite = np.isfinite(expected)
    return float(np.square(np.subtract(actual[finite], expected[finite], dtype=np.float64)).sum())


def rejection_reason(before: Array, after: Array, min_standard_errors: float = MIN_GAIN_STANDARD_ERRORS) -> str:
    """Return the reason to reject an algorithm, or "".

    `before` and `after` are the squared error of each output relative to its power, float64 (samples, outputs). The
    mean error reduction of some output must exceed 0 by `min_standard_errors`. If an output misses the default target
    of `insert`, a gain of the worst output suffices. Samples do not count if the model before
    gives one of their outputs another shape, as a decoder does that chooses another token, or infinite values.
    """
    comparable = np.isfinite(before).all(axis=1)
    if not np.isfinite(after[comparable]).all():
        return "an output gets another shape or infinite values"
    before, after = before[comparable], after[comparable]
    if len(before) < MIN_COMPARABLE_SAMPLES:
        return f"only {len(before)} samples have outputs of the same shape as in float, with finite values"
    reason = _gain_rejection(before, after, min_standard_errors)
    misses, misses_after = (errors.mean(0) > 10 ** (-DEFAULT_MIN_SQNR / 10) for errors in (before, after))
    may_lose = misses.any() and misses[misses_after].all()  # an output that meets the target goes on to meet it
    return "" if reason and may_lose and _worst_output_gains(before, after, min_standard_errors) else reason


def _worst_output_gains(before: Array, after: Array, min_standard_errors: float) -> bool:
    """Return True if the worst output of each sample gains enough, and no output loses more dB than the worst gains."""
    worst_gain = _error_reduction_db(before.sum(0).max(), after.sum(0).max())
    worst_errors = before.max(1, keepdims=True), after.max(1, keepdims=True)
    limits_losses = bool(np.all(_error_reduction_db(before.sum(0), after.sum(0)) >= -worst_gain))
    return limits_losses and not _gain_rejection(*worst_errors, min_standard_errors)


def _gain_rejection(before: Array, after: Array, min_standard_errors: float) -> str:
    """Return the reason to reject an algorithm by what its outputs gain and lose, or ""."""
    gains = np.sqrt(before) - np.sqrt(after)
    standard_error = gains.std(0, ddof=1) / np.sqrt(len(gains))
    mean_gain = gains.mean(0)
    total_gain = _error_reduction_db(before.sum(0), after.sum(0))
    if np.any(total_gain < -MAX_LOSS_DB) or np.any(mean_gain < -MAX_LOSS_STANDARD_ERRORS * standard_error):
        return f"the error of an output grows by a factor of {10 ** (max(-total_gain.min(), 0) / 20):.2f}"
    outlier_count = max(min(MAX_OUTLIERS, len(gains) // 4), 1)
    typical_samples = np.argsort(before - after, axis=0)[:-outlier_count]
    typical_gain = _error_reduction_db(
        *(np.take_along_axis(sample_errors, typical_samples, 0).sum(0) for sample_errors in (before, after))
    )
    most_samples_gain = 2 * (after < before).sum(0) - len(gains) > MIN_GAIN_STANDARD_ERRORS * np.sqrt(len(gains))
    typical_gain[most_samples_gain] = 0
    if np.any(typical_gain < 0):
        factor = 10 ** (-typical_gain.min() / 20)
        return f"without the {outlier_count} samples that gain most, an output has {factor:.2f} times the error"
    best_gain = total_gain.max(initial=0)
    if not np.any(mean_gain > min_standard_errors * standard_error):
        return f"no output gains more than chance explains ({best_gain:.1f} dB)"
    if best_gain < MIN_OUTPUT_GAIN_DB:
        return f"no output gains {MIN_OUTPUT_GAIN_DB:g} dB (the most is {best_gain:.1f} dB)"
    return ""


def _error_reduction_db(before: Array, after: Array) -> Array:
    """Reduction of the squared error in dB."""
    return np.asarray(10 * np.log10((before + NEGLIGIBLE_ERROR) / (after + NEGLIGIBLE_ERROR)))
