"""Calibration data in `.npz` files.

An array of the file is read from its start to its end, a sample at a time, so memory does not grow with the number of
samples (Fortran-ordered arrays are the exception: one is held whole). Nothing in the file is ever unpickled.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import tokenize
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from graphquant.data.base import MAX_FEED_BYTES, Batches, kind_of, numpy_dtype, shape_text
from graphquant.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from graphquant.data.base import Feed, Input, Shape
    from graphquant.numerics import Array

CHECKED_BYTES = 1 << 22
"""About how much of an array is looked at in one go before calibration starts."""

STRINGS = frozenset({"string", "str", "object"})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """An array of the file, and how an input takes it.

    Attributes:
        input: Name of the input.
        key: Its key in the file.
        member: Name of the zip member.
        given: The array's dtype, native byte order.
        stored: The array's dtype as it lies in the file.
        wanted: The input's dtype.
        shape: The array's shape.
        fortran: Whether the first axis runs fastest.
        rows: How many entries along the first axis make one feed; 0: every feed gets the whole array.
        whole: Each entry is one whole feed, so the first axis is dropped.
    """

    input: str
    key: str
    member: str
    given: np.dtype[Any]
    stored: np.dtype[Any]
    wanted: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    rows: int = 0
    whole: bool = False

    @property
    def samples(self) -> int:
        """Number of feeds that it makes."""
        return self.shape[0] // self.rows

    def feed_shape(self) -> tuple[int, ...]:
        """Shape of one feed."""
        if self.rows == 0:
            return self.shape
        return self.shape[1:] if self.whole else (self.rows, *self.shape[1:])


def npz_batches(path: Path, inputs: Sequence[Input], samples: int | None) -> Batches:
    """The feeds that the file at `path` holds, each value checked before the first is given.

    Raises:
        DataError: The file cannot be read, or does not fit the inputs.
    """
    with _reading(path), zipfile.ZipFile(path) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        keys = _keys(path, list(members), inputs)
        parts = [_part(path, archive, wanted, key, members[key]) for wanted, key in zip(inputs, keys, strict=True)]
        count = _count(path, parts, samples)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(f"{part.input} {part.given.str} {part.feed_shape()} {count if part.rows else 0}\n".encode())
            _scan(path, archive, part, count, digest.update)
    used = set(keys)
    return Batches(
        count=count,
        digest=digest.hexdigest(),
        ignored=tuple(key for key in members if key not in used),
        feeds=partial(_feeds, path, tuple(parts), count),
    )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what zip and npy files can go wrong with into a DataError."""
    try:
        yield
    except (
        OSError,
        EOFError,
        ValueError,  # numpy: a header that is none, object arrays
        TypeError,  # numpy: a header of other types
        SyntaxError,  # numpy: a header that is no Python literal
        tokenize.TokenError,
        RuntimeError,  # zipfile: encrypted; Python: nested too deeply
        MemoryError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(f"{path} cannot be read: {error}. Write it again with numpy.savez.") from error


def _keys(path: Path, keys: Sequence[str], inputs: Sequence[Input]) -> list[str]:
    """For each input the key that holds it: its name, else an alias that is no other input's name."""
    names = {wanted.name for wanted in inputs}
    found = []
    for wanted in inputs:
        candidates = [wanted.name, *(alias for alias in wanted.aliases if alias not in names)]
        key = next((candidate for candidate in candidates if candidate in keys), None)
        if key is None:
            held = ", ".join(repr(key) for key in keys) or "nothing"
            needed = ", ".join(repr(other.name) for other in inputs)
            raise DataError(
                f"{path} has no array for input {wanted.name!r}: it holds {held}, and the model takes {needed}."
                f"{did_you_mean(wanted.name, keys)} Save each array under the name of its input."
            )
        found.append(key)
    return found


def _part(path: Path, archive: zipfile.ZipFile, wanted: Input, key: str, member: str) -> _Part:
    """What the header of an array says, checked against its input."""
    with archive.open(member) as stream:
        shape, fortran, stored = _header(stream)
        size = archive.getinfo(member).file_size - stream.tell()
    where = f"{path}: array {key!r}"
    if stored.hasobject:
        raise DataError(f"{where} holds Python objects, which are never loaded. Save it as numbers.")
    if any(axis < 0 for axis in shape) or math.prod(shape) * stored.itemsize != size:
        raise DataError(
            f"{where} says that it is {stored} {shape_text(shape)}, but {size} bytes follow. Save it again."
        )
    rows, whole = _layout(where, wanted, shape)
    part = _Part(
        input=wanted.name,
        key=key,
        member=member,
        given=stored.newbyteorder("="),
        stored=stored,
        wanted=_wanted(where, wanted, stored.newbyteorder("=")),
        shape=shape,
        fortran=fortran,
        rows=rows,
        whole=whole,
    )
    held = size if fortran or not part.rows else part.rows * size // max(shape[0], 1)
    if held > MAX_FEED_BYTES:
        raise DataError(f"{where} has {held} bytes for one sample. Save smaller samples, in C order.")
    return part


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of the npy format is not supported")


def _layout(where: str, wanted: Input, shape: tuple[int, ...]) -> tuple[int, bool]:
    """`rows` and `whole` of a `_Part`: how `wanted` takes an array of `shape`."""
    static = wanted.shape
    if static is None:
        return (1, True) if shape else (0, False)
    fixed = static[0] if static else 1
    if len(shape) == len(static) + 1 and _fits(shape[1:], static):
        return 1, True
    if len(shape) == len(static):
        if not shape or (fixed is not None and fixed > 1 and _fits(shape, static)):
            return 0, False
        rows = fixed or 1
        if _fits((rows, *shape[1:]), static):
            if shape[0] % rows:
                raise DataError(
                    f"{where} has {shape[0]} entries, and input {wanted.name!r} takes {rows} at a time:"
                    f" {shape[0] % rows} are left over. Give a multiple of {rows}."
                )
            return rows, False
    raise DataError(
        f"{where} is {shape_text(shape)}, and input {wanted.name!r} takes {shape_text(static)}, samples stacked along"
        " the first axis."
        f" {_fix(shape, static)}"
    )


def _fits(shape: Sequence[int], static: Shape) -> bool:
    return len(shape) == len(static) and all(b is None or a == b for a, b in zip(shape, static, strict=True))


def _fix(shape: tuple[int, ...], static: Shape) -> str:
    """What would make an array of `shape` fit."""
    rest = static[1:]
    if len(shape) == len(static) and len(shape) > 2:  # noqa: PLR2004  # two axes have no layout
        for source, target, name in ((-1, 1, "channels first (NCHW)"), (1, -1, "channels last (NHWC)")):
            axes = list(shape)
            axes.insert(target % len(shape), axes.pop(source))
            if _fits(axes[1:], rest):
                return f"The model wants {name}: numpy.moveaxis(array, {source}, {target}) fits."
    sizes = [size for size in rest if size is not None]
    if shape and len(sizes) == len(rest) and math.prod(shape[1:]) == math.prod(sizes):
        return f"array.reshape({', '.join(map(str, (-1, *sizes)))}) fits."
    return "Give each sample that shape."


def _wanted(where: str, wanted: Input, given: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype that values are fed as.

    Raises:
        DataError: `given` values are of another kind.
    """
    if wanted.dtype in STRINGS and given.kind in "SU":
        return np.dtype(object)  # what runners take for strings
    dtype = numpy_dtype(wanted.dtype)
    kinds = (kind_of(given), kind_of(dtype))
    if given == dtype or kinds in {("float", "float"), ("int", "int")}:
        return dtype
    clash = f"{where} is {given}, and input {wanted.name!r} takes {wanted.dtype}."
    if kinds == ("int", "float"):
        raise DataError(f"{clash} Convert it, and scale it as in training: (array / 255).astype('{wanted.dtype}').")
    raise DataError(f"{clash} Save the array as {wanted.dtype}.")


def _count(path: Path, parts: Sequence[_Part], samples: int | None) -> int:
    """The number of samples, which all stacked arrays must agree on."""
    stacked = [part for part in parts if part.rows]
    first = stacked[0] if stacked else None
    for part in stacked:
        if first is not None and part.samples != first.samples:
            raise DataError(
                f"{path}: array {first.key!r} has {first.samples} samples and {part.key!r} has {part.samples}."
                " Give every input the same number."
            )
    count = first.samples if first is not None else 1
    if count == 0:
        raise DataError(f"{path} holds no samples. Give at least one.")
    return count if samples is None else min(count, samples)


def _blocks(archive: zipfile.ZipFile, part: _Part, feeds: int, count: int) -> Iterator[Array]:
    """The array of `part` in blocks of `feeds` feeds, of the file's dtype, until `count` feeds are read."""
    rows = (part.rows * count) if part.rows else 1
    shape = part.shape if part.rows else (1, *part.shape)
    if part.fortran and part.rows:
        with archive.open(part.member) as stream:
            _header(stream)
            whole = np.frombuffer(_exactly(stream, math.prod(shape) * part.stored.itemsize), part.stored)
        whole = whole.reshape(shape, order="F")
        for start in range(0, rows, part.rows * feeds):
            yield whole[start : min(start + part.rows * feeds, rows)]
        return
    entry = math.prod(shape[1:]) * part.stored.itemsize
    with archive.open(part.member) as stream:
        _header(stream)
        step = max(part.rows, 1) * feeds
        for start in range(0, rows, step):
            here = min(step, rows - start)
            block = np.frombuffer(_exactly(stream, here * entry), part.stored)
            yield block.reshape((here, *shape[1:]), order="F" if part.fortran else "C")


def _exactly(stream: IO[bytes], size: int) -> bytearray:
    data = bytearray(stream.read(size))
    if len(data) != size:
        raise EOFError("the file ends inside an array")
    return data


def _scan(
    path: Path, archive: zipfile.ZipFile, part: _Part, count: int, update: Callable[[bytes | memoryview], None]
) -> None:
    """Reads what will be fed once: every value must be finite and fit the input's dtype."""
    size = math.prod(part.feed_shape())
    feeds = max(1, CHECKED_BYTES // max(size * part.stored.itemsize, 1)) if part.rows else 1
    bad, first, seen = 0, 0, 0
    for block in _blocks(archive, part, feeds, count):
        values = np.ascontiguousarray(block, part.given)
        update(values.reshape(-1).view(np.uint8).data)
        if kind_of(part.given) == "float":
            wrong = ~np.isfinite(values)
            if not bad and wrong.any():
                first = seen + int(wrong.argmax())
            bad += int(wrong.sum())
        seen += values.size
        if not bad:
            _check_convertible(path, part, values)
    if bad:
        index = tuple(int(axis) for axis in np.unravel_index(first, part.shape))
        raise DataError(
            f"{path}: array {part.key!r} has {bad} NaN or infinite values, the first at index {list(index)}."
            " Mend the data; no range can be taken from it."
        )


def _check_convertible(path: Path, part: _Part, values: Array) -> None:
    if values.size == 0 or part.given == part.wanted or part.wanted.hasobject:
        return
    low, high = values.min(), values.max()
    if kind_of(part.given) == "int":
        limits = np.iinfo(part.wanted)
        fits = limits.min <= int(low) and int(high) <= limits.max
    else:
        with np.errstate(over="ignore"):
            fits = bool(np.isfinite(np.array([low, high]).astype(part.wanted).astype(np.float64)).all())
    if not fits:
        raise DataError(
            f"{path}: array {part.key!r} holds values from {low} to {high}, which input {part.input!r} of"
            f" {part.wanted} cannot hold. Give values in its range."
        )


def _feeds(path: Path, parts: Sequence[_Part], count: int) -> Iterator[Feed]:
    with _reading(path), zipfile.ZipFile(path) as archive:
        streams = [_values(archive, part, count) for part in parts]
        for _ in range(count):
            yield {part.input: next(stream) for part, stream in zip(parts, streams, strict=True)}


def _values(archive: zipfile.ZipFile, part: _Part, count: int) -> Iterator[Array]:
    """The feeds of one input."""
    for block in _blocks(archive, part, 1, count):
        feed = np.asarray(block[0] if part.whole or not part.rows else block)
        values = feed.astype(part.wanted, order="C", copy=False)
        if not part.rows:
            yield from itertools.repeat(values, count)
        else:
            yield values
