"""Random data, for tests only and only when asked for by name."""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graphquant.data.base import MAX_FEED_BYTES, Batches
from graphquant.data.fit import kind_of, numpy_dtype, shape_text
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from graphquant.data.base import Feed, Input, Wanted
    from graphquant.data.spec import Source
    from graphquant.numerics import Array

MAX_DIGITS = 10


def batches(source: Source, wanted: Wanted) -> Batches:
    """As many random feeds as the spec says, "random:8".

    Raises:
        DataError: The spec has no number, or an input's shape or dtype leaves it open what to make.
    """
    text = source.spec.removeprefix("random:")
    if not (text.isascii() and text.isdigit() and len(text) < MAX_DIGITS and int(text) > 0):
        raise DataError(f"{source.spec!r} does not say how many samples. Write random:8.")
    count = wanted.limit(int(text))
    shapes = {taker.name: _random_shape(taker) for taker in wanted.inputs}
    dtypes = {taker.name: taker.dtype for taker in wanted.inputs}
    for name, dtype in dtypes.items():
        if kind_of(numpy_dtype(dtype)) not in {"int", "float", "bool"}:
            raise DataError(f"There is no random data for input {name!r} of {dtype}. Give an .npz file.")
    digest = hashlib.sha256(f"random {count} {shapes} {dtypes}".encode()).hexdigest()
    return Batches(count=count, digest=digest, random=True, feeds=partial(_random_feeds, shapes, dtypes))


def _random_shape(taker: Input) -> tuple[int, ...]:
    if taker.shape is None or None in taker.shape[1:]:
        known = "no known rank" if taker.shape is None else f"the shape {shape_text(taker.shape)}"
        raise DataError(f"There is no random data for input {taker.name!r}, which has {known}. Give an .npz file.")
    shape = tuple(1 if size is None else size for size in taker.shape)
    if math.prod(shape) * 8 > MAX_FEED_BYTES:
        raise DataError(f"Input {taker.name!r} of {shape_text(shape)} is too large for random data. Give an .npz file.")
    return shape


def _random_feeds(
    shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], start: int, stop: int
) -> Iterator[Feed]:
    """The samples from `start` up to `stop`, each seeded by its index and the input's name."""
    for index in range(start, stop):
        yield {name: _values(name, index, shape, dtypes[name]) for name, shape in shapes.items()}


def _values(name: str, index: int, shape: tuple[int, ...], called: str) -> Array:
    """Normal floats, full-range 8-bit integers, other integers (often indices) 0 or 1."""
    make = np.random.default_rng([index, *name.encode()])
    dtype = numpy_dtype(called)
    if kind_of(dtype) == "float":
        return np.asarray(make.standard_normal(shape)).astype(dtype)
    byte = kind_of(dtype) == "int" and dtype.itemsize == 1
    low, high = (np.iinfo(dtype).min, np.iinfo(dtype).max) if byte else (0, 1)
    return np.asarray(make.integers(low, high, shape, np.int64, endpoint=True)).astype(dtype)
