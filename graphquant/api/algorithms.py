"""Corrections before calibration and once scales are known, on a few of the samples that give the scales."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from graphquant import formats
from graphquant.calibration import estimate_footprint
from graphquant.errors import ModelError, UsageError, did_you_mean
from graphquant.optimize import (
    PRE_CALIBRATION_ALGORITHMS,
    WEIGHT_CLIPPING,
    AlgorithmData,
    AlgorithmResult,
    PreCalibrationState,
    WeightEdits,
    run_post_calibration,
    run_pre_calibration,
)
from graphquant.rules import ALGORITHM_NAMES, NEGATION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds, Runner
    from graphquant.ir import Model
    from graphquant.quantize import Plan, Solution


ALGORITHM_SAMPLES, MAX_ALGORITHM_SAMPLES = 32, 128
"""Samples that are looked at, every second one to correct by, the others to check with: more of them in small models,
where they cost little."""

MAX_WEIGHT_ELEMENTS = 1 << 28
"""Elements of weights, of which corrections hold a second copy: 1 GB."""

MAX_ACTIVATION_ELEMENTS = 1 << 24
"""Elements that the activations of all samples may have where there are more than `ALGORITHM_SAMPLES`."""

WEIGHTS_TOO_LARGE = "the weights are so many that a second copy of them takes too much memory"

SAMPLE_SPANS = 8
"""Places in the data that they are taken from."""


def run_precalibration_algorithms(
    prepared: Model, plan: Plan, calibration_data: Dataset | None, *, has_stats: bool
) -> PreCalibrationState:
    """The prepared model and its plan after the corrections that change what calibration sees.

    Args:
        prepared: The prepared model, which stays as it is.
        plan: The plan.
        calibration_data: The samples that will give the scales, None where there are none.
        has_stats: Whether statistics are given, which are of the model as it is.

    Raises:
        DataError: A sample cannot be read.
    """
    algorithms = [name for name in plan.algorithms if name in PRE_CALIBRATION_ALGORITHMS]
    unchanged = PreCalibrationState(model=prepared, plan=plan)
    if not algorithms or not plan.sites:
        return unchanged
    reason = "the statistics are of the model as it is" if has_stats else ""
    if calibration_data is not None and calibration_data.random:
        reason = "made-up data says nothing of ranges"
    if _quantized_weight_elements(prepared, plan) > MAX_WEIGHT_ELEMENTS:
        reason = WEIGHTS_TOO_LARGE
    if reason:  # clipping looks at weights alone
        unchanged = replace(
            unchanged, results=_skipped_results((name for name in algorithms if name != WEIGHT_CLIPPING), reason)
        )
        return (
            unchanged
            if WEIGHT_CLIPPING not in algorithms
            else _with_earlier_results(unchanged, run_pre_calibration(prepared, plan, [WEIGHT_CLIPPING], None))
        )
    try:
        return run_pre_calibration(
            prepared,
            plan,
            algorithms,
            None if calibration_data is None else _algorithm_samples(prepared, plan, calibration_data),
        )
    except ModelError as error:
        return replace(unchanged, results=_skipped_results(algorithms, str(error)))


def _with_earlier_results(earlier: PreCalibrationState, later: PreCalibrationState) -> PreCalibrationState:
    return replace(later, results=(*earlier.results, *later.results))


def run_postcalibration_algorithms(
    prepared: Model, solution: Solution, plan: Plan, calibration_data: Dataset | None
) -> WeightEdits:
    """The model and its solution after the corrections of the plan, and what they did.

    Args:
        prepared: The prepared model, which stays as it is.
        solution: Scales and zero points of its plan.
        plan: The plan.
        calibration_data: The samples that gave the scales, None where there are none.

    Raises:
        DataError: A sample cannot be read.
    """
    edits = WeightEdits(prepared_model=prepared, model=prepared, solution=solution)
    algorithms = [name for name in plan.algorithms if name not in PRE_CALIBRATION_ALGORITHMS]
    if not algorithms or not solution.params:
        return edits
    if calibration_data is None:
        return _skip_algorithms(edits, algorithms, "it needs samples, and statistics keep none")
    if calibration_data.random:
        return _skip_algorithms(edits, algorithms, "made-up data says nothing of means")
    if _quantized_weight_elements(prepared, plan) > MAX_WEIGHT_ELEMENTS:
        return _skip_algorithms(edits, algorithms, WEIGHTS_TOO_LARGE)
    try:
        return run_post_calibration(
            prepared, solution, algorithms, _algorithm_samples(prepared, plan, calibration_data)
        )
    except ModelError as error:  # what the check of the result tells too, if it is not the corrections' alone
        return _skip_algorithms(edits, algorithms, str(error))


def _algorithm_samples(prepared: Model, plan: Plan, calibration_data: Dataset) -> AlgorithmData:
    """Every second one of some samples to correct by, the others to check with."""
    make_runner = formats.format_module(prepared.format).create_runner
    elements = estimate_footprint(prepared, batch_independent=False).elements_per_sample
    if elements is None and calibration_data.count > ALGORITHM_SAMPLES:
        elements = _measure_activation_elements(
            make_runner(prepared), plan, next(iter(calibration_data.feeds_between(0, 1)))
        )
    count = (
        ALGORITHM_SAMPLES
        if elements is None
        else min(max(MAX_ACTIVATION_ELEMENTS // max(elements, 1), ALGORITHM_SAMPLES), MAX_ALGORITHM_SAMPLES)
    )
    feeds = list(_spread_samples(calibration_data, count))
    return AlgorithmData(feeds=feeds[::2], validation_feeds=feeds[1::2], create_runner=make_runner)


def _measure_activation_elements(runner: Runner, plan: Plan, feed: Feeds) -> int:
    """Elements that quantized activations have in one run, where shapes do not tell."""
    tensors = list(dict.fromkeys(site.tensor for site in plan.sites if not site.parameter))
    hidden = runner.unobservable(tensors)
    return sum(runner.element_counts([tensor for tensor in tensors if tensor not in hidden], feed).values())


def _skip_algorithms(edits: WeightEdits, algorithms: Iterable[str], reason: str) -> WeightEdits:
    """The draft as it is, and why."""
    return replace(edits, results=_skipped_results(algorithms, reason))


def _skipped_results(algorithms: Iterable[str], reason: str) -> tuple[AlgorithmResult, ...]:
    return tuple(
        AlgorithmResult(algorithm=name, target="model", detail=f"left out: {reason}", applied=False)
        for name in algorithms
    )


def _quantized_weight_elements(prepared: Model, plan: Plan) -> int:
    """Elements of the weights that are quantized, as far as they are told."""
    shapes = (prepared.output(site.tensor).shape for site in plan.sites if site.parameter)
    return sum(math.prod(dim or 1 for dim in shape) for shape in shapes if shape is not None)


def choose_algorithms(rule_algorithms: Sequence[str], requested: Sequence[str]) -> tuple[str, ...]:
    """The corrections that rules want, with what a caller wants beside them or does not want.

    Raises:
        UsageError: There is no such correction.
    """
    for name in requested:
        algorithm = name.removeprefix(NEGATION)
        if algorithm not in ALGORITHM_NAMES:
            hint = did_you_mean(algorithm, ALGORITHM_NAMES) or f" Known are {', '.join(ALGORITHM_NAMES)}."
            raise UsageError(f"There is no correction {algorithm[:60]!r}.{hint}")
    enabled = {*rule_algorithms, *(name for name in requested if not name.startswith(NEGATION))}
    return tuple(name for name in ALGORITHM_NAMES if name in enabled and NEGATION + name not in requested)


def _spread_samples(batches: Dataset, count: int) -> Iterator[Feeds]:
    """`count` of the samples, from all over the data."""
    if batches.count <= count:
        yield from batches
        return
    span_count = count // SAMPLE_SPANS
    for span in range(SAMPLE_SPANS):
        start = span * (batches.count - span_count) // (SAMPLE_SPANS - 1)
        yield from batches.feeds_between(start, start + span_count)
