"""Random data, for tests only and only when asked for by name."""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant.data.base import MAX_FEED_BYTES, Batches, kind_of, numpy_dtype, shape_text
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphquant.data.base import Feed, Input

MAX_DIGITS = 10


def random_batches(spec: str, inputs: Sequence[Input], samples: int | None) -> Batches:
    """As many random feeds as `spec` says, "random:8".

    Raises:
        DataError: `spec` has no number, or an input's shape or dtype leaves it open what to make.
    """
    text = spec.removeprefix("random:")
    if not (text.isascii() and text.isdigit() and len(text) < MAX_DIGITS and int(text) > 0):
        raise DataError(f"{spec!r} does not say how many samples. Write random:8.")
    count = int(text) if samples is None else min(int(text), samples)
    shapes = {wanted.name: _random_shape(wanted) for wanted in inputs}
    dtypes = {wanted.name: wanted.dtype for wanted in inputs}
    for name, dtype in dtypes.items():
        if kind_of(numpy_dtype(dtype)) not in {"int", "float", "bool"}:
            raise DataError(f"There is no random data for input {name!r} of {dtype}. Give an .npz file.")
    digest = hashlib.sha256(f"random {count} {shapes} {dtypes}".encode()).hexdigest()
    return Batches(count=count, digest=digest, random=True, feeds=partial(_random_feeds, shapes, dtypes, count))


def _random_shape(wanted: Input) -> tuple[int, ...]:
    if wanted.shape is None or None in wanted.shape[1:]:
        known = "no known rank" if wanted.shape is None else f"the shape {shape_text(wanted.shape)}"
        raise DataError(f"There is no random data for input {wanted.name!r}, which has {known}. Give an .npz file.")
    shape = tuple(1 if size is None else size for size in wanted.shape)
    if math.prod(shape) * 8 > MAX_FEED_BYTES:
        raise DataError(
            f"Input {wanted.name!r} of {shape_text(shape)} is too large for random data. Give an .npz file."
        )
    return shape


def _random_feeds(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], count: int) -> Iterator[Feed]:
    """Normal floats, full-range 8-bit integers, other integers (often indices) 0 or 1; seeded by the input's name."""
    makers = {name: np.random.default_rng(list(name.encode())) for name in shapes}
    for _ in range(count):
        feed = {}
        for name, shape in shapes.items():
            dtype = numpy_dtype(dtypes[name])
            if kind_of(dtype) == "float":
                feed[name] = makers[name].standard_normal(shape).astype(dtype)
            else:
                byte = kind_of(dtype) == "int" and dtype.itemsize == 1
                low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if byte else (0, 1)
                feed[name] = makers[name].integers(low, high, shape, np.int64, endpoint=True).astype(dtype)
        yield feed
