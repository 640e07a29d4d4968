"""Kinds of data whose samples come one by one: pictures, records, rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from graphquant.data.base import Batches, Feed
from graphquant.data.fit import as_feed
from graphquant.errors import DataError

if TYPE_CHECKING:
    from graphquant.data.base import Input, Wanted
    from graphquant.data.spec import Source

Read = Callable[[int, int], Iterator[tuple[str, Feed]]]
"""The samples from one index up to another, each with what it is called; a first axis of 1 stands for the batch."""


def one_each(
    source: Source, wanted: Wanted, read: Read, *, count: int, digest: str, unused: Iterable[str] = ()
) -> Batches:
    """Feeds of one sample each, or of as many as the model's fixed first size asks for.

    Args:
        source: Where the samples come from.
        wanted: What is asked for.
        read: Reads samples.
        count: How many there are.
        digest: What tells them from others.
        unused: Their fields that no input takes.

    Raises:
        DataError: There is none, the first does not fit, or some are left over.
    """
    if not count:
        raise DataError(f"{source.spec} holds no samples. Give at least one.")
    _, first = next(read(0, 1))
    rows = max((_rows(taker, first[taker.name].shape) for taker in wanted.inputs), default=1)
    if count % rows and wanted.samples is None:
        raise DataError(
            f"{source.spec} has {count} samples, and the model takes {rows} at a time: {count % rows} are left over."
            f" Give a multiple of {rows}, or say with --samples how many feeds of {rows} to use."
        )
    feeds = partial(_feeds, read, rows, wanted)
    next(feeds(0, 1))
    return Batches(count=wanted.limit(count // rows), digest=digest, ignored=(*unused, *source.ignored), feeds=feeds)


def sole_input(source: Source, wanted: Wanted) -> Input:
    """The model's one input, which each file feeds.

    Raises:
        DataError: It has more, or none.
    """
    if len(wanted.inputs) != 1:
        names = ", ".join(repr(taker.name) for taker in wanted.inputs) or "no input"
        raise DataError(
            f"{source.spec} holds {source.kind}, which feed one input, and the model takes {names}."
            " Give an .npz file with all of them, or module:function."
        )
    return wanted.inputs[0]


def batch_of(taker: Input) -> int:
    """How many samples the first axis of `taker` holds: its fixed size, or 1."""
    return (taker.shape[0] if taker.shape else None) or 1


def _rows(taker: Input, shape: tuple[int, ...]) -> int:
    """How many samples of `shape` make one feed."""
    return batch_of(taker) if shape[:1] == (1,) else 1


def _feeds(read: Read, rows: int, wanted: Wanted, start: int, stop: int) -> Iterator[Feed]:
    samples = read(start * rows, stop * rows)
    while group := list(islice(samples, rows)):
        where = group[0][0]
        feed = {}
        for taker in wanted.inputs:
            parts = [sample[taker.name] for _, sample in group]
            values = parts[0] if rows == 1 else np.concatenate(parts)
            feed[taker.name] = as_feed(where, taker, values, finite=wanted.finite)
        yield feed
