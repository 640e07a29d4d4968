"""Calibration data in `.npz` and `.npy` files.

An array is read from its start to its end, a sample at a time, so memory does not grow with the number of samples; one
in Fortran order, whose samples lie scattered, is copied to a temporary file first. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
import tempfile
import zipfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from graphquant.data.base import MAX_FEED_BYTES, Batches, behind
from graphquant.data.files import reading
from graphquant.data.fit import (
    Fit,
    check_convertible,
    common_count,
    find_keys,
    fit,
    infinite,
    not_finite,
    shape_text,
)
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from graphquant.data.base import Feed, Wanted
    from graphquant.data.files import File
    from graphquant.data.spec import Source
    from graphquant.numerics import Array

CHECKED_BYTES = 1 << 17
"""About how much of an array is looked at in one go where all is read once."""

_COPIED_BYTES = 1 << 20

ADVICE = "Write it again with numpy.save or numpy.savez."

Members = dict[str, tuple[int, "Callable[[], IO[bytes]]"]]
"""Size in bytes of each array's npy form, and what opens it, by key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """An array of a file, and how an input takes it.

    Attributes:
        fit: How the input takes it.
        open: Opens its npy form.
        start: Where in there its values start.
        stored: Its dtype as it lies in the file.
        fortran: Whether the first axis runs fastest.
    """

    fit: Fit
    open: Callable[[], IO[bytes]]
    start: int
    stored: np.dtype[Any]
    fortran: bool


def batches(source: Source, wanted: Wanted) -> Batches:
    """The feeds that the files hold, one after the other; reading all that is fed once checks it and gives the digest.

    Raises:
        DataError: A file cannot be read, or does not fit the inputs.
    """
    counts: list[int] = []
    ignored: dict[str, None] = {}
    for file in source.files:
        with _opened(file, wanted) as (parts, others):
            held = common_count([part.fit for part in parts])
        counts.append(held if wanted.samples is None else min(held, wanted.samples - sum(counts)))
        ignored |= dict.fromkeys(others)
        if sum(counts) == wanted.samples:
            break
    if not sum(counts):
        raise DataError(f"{source.spec} holds no samples. Give at least one.")
    scanned = partial(_scanned, source.files, wanted, counts)
    return Batches(
        count=sum(counts),
        digest=behind(scanned) if wanted.meanwhile else scanned(),
        ignored=(*ignored, *source.ignored),
        feeds=partial(_feeds, source.files, wanted, counts),
    )


def _scanned(files: Sequence[File], wanted: Wanted, counts: Sequence[int]) -> str:
    """The digest of what is fed, of which every value must be finite and fit the input's dtype."""
    digest = hashlib.sha256()
    for file, count in zip(files, counts, strict=False):
        with _opened(file, wanted) as (parts, _):
            for part in parts:
                one = part.fit
                digest.update(f"{one.input} {one.given.str} {one.feed_shape()} {count if one.rows else 0}\n".encode())
                _scan(part, count, digest.update, finite=wanted.finite)
    return digest.hexdigest()


@contextmanager
def _opened(file: File, wanted: Wanted, *, checked: bool = True) -> Iterator[tuple[list[_Part], list[str]]]:
    """The arrays of `file` that the inputs take, and the keys that none takes.

    Unless they are to be `checked`, no checksums are made of those that lie in the file as they are.
    """
    with reading(file, ADVICE), ExitStack() as stack:
        if file.name.lower().endswith(".npy"):
            members = _single(file, wanted)
        else:
            archive = stack.enter_context(zipfile.ZipFile(stack.enter_context(file.open())))
            members = {
                info.filename.removesuffix(".npy"): (
                    info.file_size,
                    partial(archive.open, info) if checked or not _plain(info) else partial(_inside, file, info),
                )
                for info in archive.infolist()
                if info.filename.endswith(".npy")
            }
        keys = find_keys(file.name, list(members), wanted)
        parts = [
            _part(f"{file.name}: array {key!r}", *members[key], taker)
            for taker, key in zip(wanted.inputs, keys, strict=True)
        ]
        yield parts, [key for key in members if key not in keys]


LOCAL_HEADER = 30
"""Bytes of what stands before an entry of a zip, but for its name and what else is said of it."""

ENCRYPTED = 1
"""The flag of an encrypted entry."""


def _plain(info: zipfile.ZipInfo) -> bool:
    """Whether the bytes of an entry are in the file as they are."""
    return info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & ENCRYPTED


def _inside(file: File, info: zipfile.ZipInfo) -> IO[bytes]:
    """The file at the start of a plain entry; unlike zipfile's, reading it makes no checksum and no second copy."""
    stream = file.open()
    stream.seek(info.header_offset)
    header = _exactly(stream, LOCAL_HEADER)
    stream.seek(sum(struct.unpack_from("<HH", header, LOCAL_HEADER - 4)), 1)
    return stream


def _single(file: File, wanted: Wanted) -> Members:
    """The one array of an npy file, under the name of the one input."""
    if len(wanted.inputs) != 1:
        names = ", ".join(repr(taker.name) for taker in wanted.inputs)
        raise DataError(
            f"{file.name} holds one array, and the model takes {names}. Save them under these names with numpy.savez."
        )
    with file.open() as stream:
        size = stream.seek(0, 2)
    return {wanted.inputs[0].name: (size, file.open)}


def _part(where: str, size: int, opener: Callable[[], IO[bytes]], taker: Any) -> _Part:
    """What the header of an array says, checked against its input."""
    with opener() as stream:
        begin = stream.tell()
        shape, fortran, stored = _header(stream)
        start = stream.tell()
    if stored.hasobject:
        raise DataError(f"{where} holds Python objects, which are never loaded. Save it as numbers.")
    follow = size - (start - begin)
    if any(axis < 0 for axis in shape) or math.prod(shape) * stored.itemsize != follow:
        raise DataError(
            f"{where} says that it is {stored} {shape_text(shape)}, but {follow} bytes follow. Save it again."
        )
    if fortran and size > MAX_FEED_BYTES:
        raise DataError(f"{where} has {size} bytes in Fortran order. Save it in C order: numpy.ascontiguousarray.")
    one = fit(where, taker, shape, stored)
    return _Part(fit=one, open=opener, start=start, stored=stored, fortran=fortran)


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of the npy format is not supported")


def _blocks(part: _Part, feeds: int, start: int, stop: int) -> Iterator[Array]:
    """The array in blocks of `feeds` feeds, of the file's dtype, from the feed `start` up to `stop`."""
    one = part.fit
    shape, rows = (one.shape, one.rows) if one.rows else ((1, *one.shape), 1)
    if not one.rows:
        feeds, start, stop = 1, 0, 1
    entry = math.prod(shape[1:]) * part.stored.itemsize
    with part.open() as stream, ExitStack() as stack:
        stream.seek(part.start)
        if part.fortran:
            whole = _mapped(stack.enter_context(tempfile.TemporaryFile()), stream, part.stored, one.shape)
            whole = whole.reshape(shape, copy=False)
        else:
            stream.seek(start * rows * entry, 1)
        for first in range(start * rows, stop * rows, rows * feeds):
            here = min(rows * feeds, stop * rows - first)
            if part.fortran:
                yield whole[first : first + here]
            else:
                yield np.frombuffer(_exactly(stream, here * entry), part.stored).reshape((here, *shape[1:]))


def _pieces(part: _Part, count: int) -> Iterator[Array]:
    """What is fed `count` times, in order, in pieces of `CHECKED_BYTES`, or, in Fortran order, of a feed or more."""
    size, wide = math.prod(part.fit.feed_shape()), part.stored.itemsize
    if part.fortran:
        yield from _blocks(part, max(1, CHECKED_BYTES // max(size * wide, 1)), 0, count)
        return
    left = size * count if part.fit.rows else size
    with part.open() as stream:
        stream.seek(part.start)
        while left:
            here = min(left, CHECKED_BYTES // wide)
            left -= here
            yield np.frombuffer(_exactly(stream, here * wide), part.stored)


def _mapped(copy: IO[bytes], stream: IO[bytes], stored: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """An array in Fortran order as a map of the file that it is copied to."""
    left = math.prod(shape) * stored.itemsize
    if not left:
        return np.empty(shape, stored)
    while left:
        left -= copy.write(_exactly(stream, min(left, _COPIED_BYTES)))
    copy.flush()
    return np.memmap(copy, stored, "r", shape=shape, order="F")


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError("the file ends inside an array")
    return data


def _scan(part: _Part, count: int, update: Callable[[bytes | memoryview], None], *, finite: bool) -> None:
    """Reads what will be fed once, and hands it to `update`."""
    one = part.fit
    bad, first, seen = 0, 0, 0
    for block in _pieces(part, count):
        values = _values(part, block)
        update(values.reshape(-1).view(np.uint8).data)
        wrong = not_finite(values)
        if wrong.any():
            first = first if bad else seen + int(wrong.argmax())
            bad += int(wrong.sum())
            check_convertible(one, values[~wrong])
        else:
            check_convertible(one, values)
        seen += values.size
    if bad and finite:
        index = [int(axis) for axis in np.unravel_index(first, one.shape)]
        raise DataError(infinite(one.where, bad, index))


def _values(part: _Part, block: Array) -> Array:
    """`block` as it was meant: in the machine's byte order, and bfloat16 where numpy saved nameless bytes."""
    one = part.fit
    if part.stored.kind == "V":
        return np.ascontiguousarray(block).view(one.given)
    return np.ascontiguousarray(block, one.given)


def _feeds(files: Sequence[File], wanted: Wanted, counts: Sequence[int], start: int, stop: int) -> Iterator[Feed]:
    before = 0
    for file, count in zip(files, counts, strict=False):
        first, last = max(start - before, 0), min(stop - before, count)
        before += count
        if first >= last:
            continue
        with _opened(file, wanted, checked=False) as (parts, _):  # they were, or are meanwhile, for the digest
            streams: Mapping[str, Iterator[Array]] = {part.fit.input: _stream(part, first, last) for part in parts}
            for _ in range(first, last):
                yield {name: next(stream) for name, stream in streams.items()}


def _stream(part: _Part, start: int, stop: int) -> Iterator[Array]:
    """What one input is fed."""
    for block in _blocks(part, 1, start, stop):
        values = _values(part, block)
        if part.fit.rows:
            yield part.fit.feed(values)
        else:
            yield from itertools.repeat(part.fit.feed(values[0]), stop - start)
