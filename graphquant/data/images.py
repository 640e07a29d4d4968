"""Calibration data as pictures, each one sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.data.base import MAX_FEED_BYTES
from graphquant.data.files import hashed, reading
from graphquant.data.pixels import pixels_for
from graphquant.data.samples import batch_of, one_each, sole_input
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.data.base import Batches, Feed, Wanted
    from graphquant.data.spec import Source


def batches(source: Source, wanted: Wanted) -> Batches:
    """The pictures in the order of their names; the digest is over their files and how they are read.

    Raises:
        DataError: The spec leaves something open, or a picture cannot be read.
        MissingDependencyError: Pillow is not installed.
    """
    taker = sole_input(source, wanted)
    pixels = pixels_for(source.spec, taker, source.keys)
    files = source.files
    if wanted.samples is not None:
        files = files[: wanted.samples * batch_of(taker)]

    def read(start: int, stop: int) -> Iterator[tuple[str, Feed]]:
        for file in files[start:stop]:
            with reading(file):
                content = file.read(MAX_FEED_BYTES)
            try:
                values = pixels.of(content)
            except DataError as error:
                raise DataError(f"{file.name}: {error}") from error
            yield file.name, {taker.name: values}

    digest = hashed(f"{pixels} {taker.name} {taker.shape}", files)
    return one_each(source, wanted, read, count=len(files), digest=digest)
