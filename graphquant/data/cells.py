"""A value of a record or a row as the feed of an input: numbers, raw bytes, or an encoded picture."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from graphquant.data.fit import STRINGS, numpy_dtype, shape_text
from graphquant.data.pixels import Pixels, pixels_for
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.data.base import Input
    from graphquant.data.spec import Source
    from graphquant.numerics import Array

PICTURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8")
"""How encoded pictures start."""


def filler(source: Source, taker: Input) -> Callable[[str, Any], Array]:
    """A function that turns a value, called something, into a feed of `taker` with a first axis of 1 for the batch."""

    @cache
    def pixels() -> Pixels:
        return pixels_for(source.spec, taker, source.keys)

    def fill(where: str, value: Any) -> Array:
        if not isinstance(value, bytes):
            return _shaped(where, taker, np.asarray(value))
        if taker.dtype in STRINGS:
            return _shaped(where, taker, np.array([_text(value)], object))
        if value.startswith(PICTURES):
            how = pixels()
            try:
                return how.of(value)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        if source.keys:
            return pixels().numbers(_raw_picture(where, value, pixels()))
        return _raw(where, taker, value)

    return fill


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _raw_picture(where: str, value: bytes, pixels: Pixels) -> Array:
    """A picture as its bare pixels, uint8 (height, width, channels)."""
    width, height = pixels.size or (0, 0)
    if len(value) != width * height * pixels.channels:
        raise DataError(
            f"{where} is no JPEG, PNG or GIF picture, and its {len(value)} bytes are not {width}x{height} pixels of"
            f" {pixels.channels} channels. Give encoded pictures, or pixels of the input's size."
        )
    return np.frombuffer(value, np.uint8).reshape(height, width, pixels.channels)


def _raw(where: str, taker: Input, value: bytes) -> Array:
    """Numbers of the input's dtype as they lie in memory, little-endian."""
    dtype = numpy_dtype(taker.dtype)
    if dtype.hasobject or len(value) % dtype.itemsize:
        raise DataError(
            f"{where} has {len(value)} bytes, which are no numbers of {taker.dtype}. Store the numbers of input"
            f" {taker.name!r} themselves, or their bytes."
        )
    return _shaped(where, taker, np.frombuffer(value, dtype.newbyteorder("<")).astype(dtype))


def _shaped(where: str, taker: Input, values: Array) -> Array:
    """`values` in the shape of one sample: records hold lists, which have none."""
    static = taker.shape
    if static is None or values.shape == static:
        return values
    known = [size for size in static if size is not None]
    if len(known) == len(static) and math.prod(known) == values.size:
        return values.reshape(known)
    target = [1, *(-1 if size is None else size for size in static[1:])]
    sizes = [size for size in target if size > 0]
    if target.count(-1) > 1:
        raise DataError(
            f"{where} is a list of {values.size}, and input {taker.name!r} takes {shape_text(static)}, which leaves its"
            " shape open. Give an .npz file, which keeps shapes."
        )
    fits = values.size == math.prod(sizes) if -1 not in target else not values.size % max(math.prod(sizes), 1)
    if not static or not fits:
        raise DataError(
            f"{where} has {values.size} values, and input {taker.name!r} takes {shape_text(static)}. Give as many."
        )
    return values.reshape(target)
