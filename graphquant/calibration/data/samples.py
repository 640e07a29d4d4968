"""Kinds of data whose samples come one by one: pictures, records, rows."""

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
"""The samples from one index up to another, each with what it is called; a first axis of 1 stands for the batch."""


def dataset_of_samples(
    source: DataSource,
    request: DataRequest,
    read_samples: SampleReader,
    *,
    count: int,
    digest: str,
    unused_keys: Iterable[str] = (),
) -> Dataset:
    """Feeds of one sample each, or of as many as the model's fixed first size asks for.

    Args:
        source: Where the samples come from.
        request: What is asked for.
        read_samples: Reads samples.
        count: How many there are.
        digest: What tells them from others.
        unused_keys: Their fields that no input takes.

    Raises:
        DataError: There is none, the first does not fit, or some are left over.
    """
    if not count:
        raise DataError(f"{source.spec} holds no samples. Give at least one.")
    _, first_sample = next(read_samples(0, 1))
    samples_per_feed = max(
        (_samples_per_feed(model_input, first_sample[model_input.name].shape) for model_input in request.inputs),
        default=1,
    )
    if count % samples_per_feed and request.samples is None:
        raise DataError(
            f"{source.spec} has {count} samples, and the model takes {samples_per_feed} at a time: {count % samples_per_feed} are left over."
            f" Give a multiple of {samples_per_feed}, or say with --samples how many feeds of {samples_per_feed} to use."
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
    """The model's one input, which each file feeds.

    Raises:
        DataError: It has more, or none.
    """
    if len(request.inputs) != 1:
        names = ", ".join(repr(model_input.name) for model_input in request.inputs) or "no input"
        raise DataError(
            f"{source.spec} holds {source.kind}, which feed one input, and the model takes {names}."
            " Give an .npz file with all of them, or module:function."
        )
    return request.inputs[0]


def fixed_batch_size(model_input: ModelInput) -> int:
    """How many samples the first axis of `model_input` holds: its fixed size, or 1."""
    return (model_input.shape[0] if model_input.shape else None) or 1


def _samples_per_feed(model_input: ModelInput, shape: tuple[int, ...]) -> int:
    """How many samples of `shape` make one feed."""
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
