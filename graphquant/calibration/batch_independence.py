"""Batch independence: measure that a run of several samples gives the values of one run for each sample."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.calibration.memory import RunFootprint, estimate_footprint, group_observed_tensors, observation_budget
from graphquant.errors import ModelError
from graphquant.ir import FLOAT_TYPES, LOOP_KINDS, TensorRef

if TYPE_CHECKING:
    from graphquant.calibration.data import Dataset
    from graphquant.formats import Feeds, Runner
    from graphquant.numerics import Array

PROBE_SCALES = (1, -1, 4, 0.25)
"""Factors of the samples that are compared, as far as they are floats. Samples of one data set may have one maximum,
with which a range or a branch that depends on the whole batch would not show."""

ROUNDING_ERROR = 1e-4  # relative error up to which values differ only by float rounding in another order

MAX_JOINED_VALUES = 1 << 16  # maximum number of values of tensors that are compared at once

DEPENDENT_KINDS = LOOP_KINDS | {"enter", "exit", "if", "loop_cond", "merge", "next_iteration", "random", "switch"}
"""Kinds that rule batches out, because other samples may take another path than those that are compared."""


def measure_footprint(
    runner: Runner, dataset: Dataset, tensors: Sequence[TensorRef] = (), *, max_memory: int | None = None
) -> RunFootprint:
    """Return the footprint of calibrating `tensors`, or of the outputs; samples are joined if they are independent.

    The first samples of `dataset` are run, so all shards of a data set must get the same ones.
    """
    footprint = estimate_footprint(runner.model, batch_independent=True)
    elements, batch_size = footprint.elements_per_sample, footprint.block_size
    independent = is_batch_independent(
        runner,
        dataset,
        batch_size,
        tensors,
        max_elements=None if elements is None else 2 * elements * batch_size,
        max_memory=max_memory,
    )
    return footprint if independent else estimate_footprint(runner.model, batch_independent=False)


def is_batch_independent(
    runner: Runner,
    dataset: Dataset,
    batch_size: int,
    tensors: Sequence[TensorRef] = (),
    *,
    inputs: Mapping[str, str] | None = None,
    max_elements: int | None = None,
    max_memory: int | None = None,
) -> bool:
    """Run the first samples as a full batch and one by one; return True if all values agree, except for rounding.

    An observed tensor may also have the same value in all runs. Each output must have one row or more for each sample.
    The answer is False if a kind of op or a fixed size rules batches out, or if the runtime rejects the batch.

    The outputs are compared if there are no `tensors`; those that cannot be observed are ignored. `inputs` are the keys
    in the samples by input of the model, the same name by default. `max_elements` is an upper bound of the elements of
    all tensors in a run of the batch, None to measure it. `max_memory` bytes, half of the free memory by default, may
    hold observed values.
    """
    model = runner.model
    if not runner.inputs or any(not spec.shape or spec.shape[0] is not None for spec in runner.inputs):
        return False
    if not model.op_kinds().isdisjoint(DEPENDENT_KINDS):
        return False
    keys = {spec.name: spec.name for spec in runner.inputs} | dict(inputs or {})
    samples = _probe_samples(dataset, keys)
    if not samples or batch_size == 1:
        return bool(samples)
    batch = {name: np.concatenate([samples[i % len(samples)][name] for i in range(batch_size)]) for name in keys}
    hidden = runner.unobservable(tensors)
    observed = [tensor for tensor in tensors if tensor not in hidden]
    try:
        if not observed:
            results = runner.run_each([batch, *samples])
            outputs = next(results)
            return all(
                outputs.keys() == values.keys()
                and all(
                    (rows := _paired_rows(outputs[name][None], value[None], batch_size, first, len(samples)))
                    is not None
                    and equal_within_rounding(*rows, batched=True)
                    for name, value in values.items()
                )
                for first, values in enumerate(results)
            )
        budget = observation_budget(max_memory, ())
        groups, _ = group_observed_tensors(runner, observed, batch, max_elements, budget)
        return all(
            _observed_tensors_agree(runner, group, set(observed).difference(group), [batch, *samples], batch_size)
            for group in groups
        )
    except ModelError:
        return False


def _probe_samples(dataset: Dataset, keys: Mapping[str, str]) -> list[Feeds]:
    """Return scaled samples of equal shapes, one for each scale; none if the first sample has no rows."""
    feeds = [
        {name: np.asarray(feed[key]) for name, key in keys.items()}
        for feed in islice(dataset.feeds_between(0, len(PROBE_SCALES)), len(PROBE_SCALES))
    ]
    shapes = [{name: value.shape for name, value in feed.items()} for feed in feeds]
    row_counts = {shape[:1] for shape in shapes[0].values()} if shapes else set()
    if len(row_counts) != 1 or row_counts & {(), (0,)}:
        return []
    feeds = [feed for feed, feed_shapes in zip(feeds, shapes, strict=True) if feed_shapes == shapes[0]]
    with np.errstate(over="ignore"):
        return [
            {
                name: value * value.dtype.type(scale) if value.dtype.name in FLOAT_TYPES else value
                for name, value in feeds[index % len(feeds)].items()
            }
            for index, scale in enumerate(PROBE_SCALES)
        ]


def _observed_tensors_agree(
    runner: Runner, group: Sequence[TensorRef], others: Collection[TensorRef], feeds: Sequence[Feeds], batch_size: int
) -> bool:
    """Return True if the values of the tensors in `group` in the first of `feeds`, a batch, are those of all others."""
    with closing(runner.observe(group, feeds, other_tensors=sorted(others))) as observations:
        batch = next(observations)
        for first, values in enumerate(observations):
            # Small tensors of equal shapes are compared at once, because numpy's overhead dominates them.
            pairs: dict[tuple[Any, ...], list[tuple[Array, Array]]] = {}
            for position, tensor in enumerate(group):
                if len(batch[tensor]) != 1 or len(values[tensor]) != 1:
                    return False
                (joined,), (value,) = batch[tensor], values[tensor]
                chunk = position // max(MAX_JOINED_VALUES // max(joined.size, 1), 1)
                pairs.setdefault((joined.shape, value.shape, value.dtype, chunk), []).append((joined, value))
            for same_shape in pairs.values():
                joined, value = map(np.stack, zip(*same_shape, strict=True))
                rows = _paired_rows(joined, value, batch_size, first, len(feeds) - 1)
                if not equal_within_rounding(*((value, joined) if rows is None else rows), batched=True):
                    return False
    return True


def _paired_rows(joined: Array, value: Array, count: int, first: int, step: int) -> tuple[Array, Array] | None:
    """Return stacked values for the samples `first`, `first` + `step` ... of stacked batches of `count`, and theirs."""
    rows = value.shape[1:]
    if not rows or not value.size or joined.shape[1:] != (count * rows[0], *rows[1:]):
        return None
    parts = joined.reshape(len(value), count, *rows)[:, first::step]
    return np.broadcast_to(value[:, None], parts.shape).reshape(-1, *rows), parts.reshape(-1, *rows)


def equal_within_rounding(expected: Array, actual: Array, *, batched: bool = False) -> bool:
    """Return True if two arrays are equal or, if they contain floats, differ only by rounding in another order.

    With `batched`, that must hold for each entry of the first axis.
    """
    if expected.dtype.name not in FLOAT_TYPES or expected.shape != actual.shape or not expected.size:
        return bool(np.array_equal(expected, actual))
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True):
        return False
    reference: Any = np.where(finite, expected, 0).astype(np.float64)
    error = np.where(finite, actual, 0) - reference
    rows = len(expected) if batched else 1
    error_norm, norm = (np.linalg.norm(values.reshape(rows, -1), axis=1) for values in (error, reference))
    return bool(np.all(error_norm <= ROUNDING_ERROR * norm))
