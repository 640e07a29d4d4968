"""Datasets of formats whose samples are read one by one: images, audio, records and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from graphquant.calibration.data.base import Dataset, Feed
from graphquant.calibration.data.fit import make_feed
from graphquant.errors import DataError

if TYPE_CHECKING:
    from graphquant.calibration.data.base import DataRequest, ModelInput
    from graphquant.calibration.data.spec import DataSource


SampleReader = Callable[[int, int], Iterator[tuple[str, Feed]]]
"""Function that yields the samples from one index up to another, each with a label and a first axis of 1 for the batch.
"""


def dataset_of_samples(
    source: DataSource,
    request: DataRequest,
    read_samples: SampleReader,
    *,
    count: int,
    digest: str,
    unused_keys: Iterable[str] = (),
) -> Dataset:
    """Create feeds of one sample each, or of as many as the fixed batch size of the model requires.

    Args:
        source: Source of the samples.
        request: Requirements on the data.
        read_samples: Function that reads samples.
        count: Number of samples.
        digest: Digest of the samples.
        unused_keys: Fields of the samples that no input takes.

    Raises:
        DataError: There are no samples, the first one does not fit, or some are left over.
    """
    if not count:
        raise DataError(f"{source.spec} contains no samples. Provide at least one.")
    labeled_sample = next(read_samples(0, 1), None)
    if labeled_sample is None:  # damaged metadata may declare samples that are not there
        raise DataError(f"{source.spec} has fewer samples than it declares. Replace the file.")
    first_sample = labeled_sample[1]
    samples_per_feed = max(
        (_samples_per_feed(model_input, first_sample[model_input.name].shape) for model_input in request.inputs),
        default=1,
    )
    if count % samples_per_feed and request.samples is None:
        raise DataError(
            f"{source.spec} has {count} samples, but the model takes {samples_per_feed} at a time:"
            f" {count % samples_per_feed} are left over."
            f" Provide a multiple of {samples_per_feed}, or limit the number of feeds of {samples_per_feed} with"
            " --samples."
        )
    open_feeds = partial(_group_sample_feeds, read_samples, samples_per_feed, request)
    next(open_feeds(0, 1))
    return Dataset(
        count=request.limit_count(count // samples_per_feed),
        digest=digest,
        ignored=(*unused_keys, *source.ignored),
        open_feeds=open_feeds,
    )


def sole_input(source: DataSource, request: DataRequest) -> ModelInput:
    """Return the only input of the model, which each file feeds.

    Raises:
        DataError: The model has more inputs, or none.
    """
    if len(request.inputs) != 1:
        names = ", ".join(repr(model_input.name) for model_input in request.inputs) or "no inputs"
        raise DataError(
            f"{source.spec} contains {source.kind}, which feed one input, but the model takes {names}."
            " Use an .npz file with all inputs, or module:function."
        )
    return request.inputs[0]


def fixed_batch_size(model_input: ModelInput) -> int:
    """Return the fixed size of the first axis of `model_input`, or 1."""
    return (model_input.shape[0] if model_input.shape else None) or 1


def _samples_per_feed(model_input: ModelInput, shape: tuple[int, ...]) -> int:
    """Return the number of samples of `shape` that form one feed."""
    return fixed_batch_size(model_input) if shape[:1] == (1,) else 1


def _group_sample_feeds(
    read_samples: SampleReader, samples_per_feed: int, request: DataRequest, start: int, stop: int
) -> Iterator[Feed]:
    samples = read_samples(start * samples_per_feed, stop * samples_per_feed)
    while sample_group := list(islice(samples, samples_per_feed)):
        label = sample_group[0][0]
        feed = {}
        for model_input in request.inputs:
            arrays = [sample[model_input.name] for _, sample in sample_group]
            values = arrays[0] if samples_per_feed == 1 else np.concatenate(arrays)
            feed[model_input.name] = make_feed(label, model_input, values, require_finite=request.require_finite)
        yield feed
