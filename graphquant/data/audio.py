"""Calibration data as wav files, each one sample: its wave, in one channel. Windows and features are the user's."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphquant.data.files import File, hashed, reading
from graphquant.data.fit import kind_of, numpy_dtype, shape_text
from graphquant.data.pixels import number
from graphquant.data.samples import batch_of, one_each, sole_input
from graphquant.errors import DataError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.data.base import Batches, Feed, Input, Shape, Wanted
    from graphquant.data.spec import Source
    from graphquant.numerics import Array

MAX_WAV_BYTES = 1 << 28
"""Largest wav file: over two hours of 16-bit mono at 16 kHz."""

PADS = ("end", "repeat", "none")

ADVICE = "Convert it with: ffmpeg -i FILE -c:a pcm_s16le OUT.wav"

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_TO_THE_END = 0xFFFFFFFF  # the size of a chunk whose writer could not go back


@dataclass(frozen=True, slots=True, kw_only=True)
class Waves:
    """How a wav file becomes an input: value = wave * scale, where wave is -1 to 1.

    Attributes:
        shape: Shape of a feed; -1 on the axis of time if it is open.
        length: Values of a feed; None to take waves as long as they are.
        pad: What is done where a wave is shorter: zeros at its "end", "repeat" it, or "none": refuse.
        rate: Samples per second that every file must have; None for any, the same in all.
        scale: Factor.
        dtype: dtype of the input.
    """

    shape: tuple[int, ...]
    length: int | None
    pad: str
    rate: int | None
    scale: float
    dtype: str


def batches(source: Source, wanted: Wanted) -> Batches:
    """The wav files in the order of their names; the digest is over their bytes and how they are read.

    Raises:
        DataError: The spec does not fit the input, or a file cannot be read or has another rate.
    """
    taker = sole_input(source, wanted)
    how = _waves_for(source, taker)
    files = source.files
    if wanted.samples is not None:
        files = files[: wanted.samples * batch_of(taker)]
    expected = how.rate, "is asked for"
    if how.rate is None and files:
        expected = _wave(files[0])[0], f"is that of {files[0].name}"

    def read(start: int, stop: int) -> Iterator[tuple[str, Feed]]:
        for file in files[start:stop]:
            rate, wave = _wave(file)
            if rate != expected[0]:
                raise DataError(
                    f"{file.name} has {rate} samples a second, and {expected[0]} {expected[1]}."
                    f" Convert it with: ffmpeg -i FILE -ar {expected[0]} OUT.wav"
                )
            yield file.name, {taker.name: _numbers(file, wave, how)}

    digest = hashed(f"{how} {taker.name}", files)
    return one_each(source, wanted, read, count=len(files), digest=digest)


def _waves_for(source: Source, taker: Input) -> Waves:
    where, keys = source.spec, source.keys
    shape, fixed = _time_axis(where, taker.name, taker.shape)
    dtype = numpy_dtype(taker.dtype)
    if kind_of(dtype) not in {"int", "float"} or dtype.kind == "u":
        raise DataError(f"{where}: input {taker.name!r} takes {taker.dtype}, which holds no wave. Give an .npz file.")
    length = _count(where, "length", keys["length"]) if "length" in keys else fixed
    if fixed is not None and length != fixed:
        raise DataError(f"{where}: length={length}, and input {taker.name!r} takes {fixed}. Leave length out.")
    pad = keys.get("pad", "end")
    if pad not in PADS:
        raise DataError(f"{where}: pad={pad} is unknown. Known are {', '.join(PADS)}.{did_you_mean(pad, PADS)}")
    full = 1.0 if kind_of(dtype) == "float" else 2.0 ** (dtype.itemsize * 8 - 1)
    return Waves(
        shape=shape,
        length=length,
        pad=pad,
        rate=_count(where, "rate", keys["rate"]) if "rate" in keys else None,
        scale=number(where, "scale", keys["scale"]) if "scale" in keys else full,
        dtype=taker.dtype,
    )


def _time_axis(where: str, name: str, static: Shape | None) -> tuple[tuple[int, ...], int | None]:
    """Shape of a feed with -1 on the one axis that is time, and the size of that axis if it is fixed."""
    if static is not None:
        inner = static if len(static) == 1 else static[1:]
        long = [axis for axis, size in enumerate(inner) if size != 1]
        if len(long) == 1:
            shape = [-1 if axis == long[0] else 1 for axis in range(len(inner))]
            return (tuple(shape) if len(static) == 1 else (1, *shape)), inner[long[0]]
    takes = "any shape" if static is None else shape_text(static)
    raise DataError(f"{where}: input {name!r} takes {takes}, and a wave has one axis, its time. Give an .npz file.")


def _count(where: str, key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):  # noqa: PLR2004  # a billion
        raise DataError(f"{where}: {key}={text} is no whole number. Write it as {key}=16000.")
    return int(text)


def _numbers(file: File, wave: Array, how: Waves) -> Array:
    """The feed that `wave`, float64 (time,) of -1 to 1, makes."""
    if how.length is not None and wave.size < how.length:
        if how.pad == "none" or not wave.size:
            raise DataError(
                f"{file.name} has {wave.size} values, and {how.length} are wanted. Leave it out, or add pad=end."
            )
        missing = (0, how.length - wave.size)
        wave = np.pad(wave, missing) if how.pad == "end" else np.pad(wave, missing, mode="wrap")
    values = wave[: how.length] * how.scale
    dtype = numpy_dtype(how.dtype)
    if kind_of(dtype) == "int":
        limits = np.iinfo(dtype)
        values = np.clip(np.rint(values), limits.min, limits.max)
    return values.astype(dtype).reshape(how.shape)


def _wave(file: File) -> tuple[int, Array]:
    """Samples per second, and the mean of the channels, float64 (time,) from -1 up to 1."""
    with reading(file, ADVICE):
        content = file.read(MAX_WAV_BYTES)
        if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
            raise ValueError("it is no wav file")
        chunks = _chunks(content)
        if "fmt " not in chunks or "data" not in chunks:
            raise ValueError("it has no format or no data")
        form, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", chunks["fmt "])
        if form == _EXTENSIBLE:
            (form,) = struct.unpack_from("<H", chunks["fmt "], 24)
        if not channels or not rate or frame * 8 != channels * bits:
            raise ValueError(f"it says that {channels} channels of {bits} bits are {frame} bytes at {rate} a second")
        values = _values(chunks["data"][: len(chunks["data"]) // frame * frame], form, bits)
    return rate, values.reshape(-1, channels).mean(axis=1)


def _chunks(content: bytes) -> dict[str, memoryview]:
    """The first chunk of each name."""
    view = memoryview(content)
    chunks: dict[str, memoryview] = {}
    at = 12
    while at + 8 <= len(content) and "data" not in chunks:
        name, size = struct.unpack_from("<4sI", content, at)
        if size == _TO_THE_END:
            size = len(content) - at - 8
        if at + 8 + size > len(content):
            raise EOFError("the file ends early")
        chunks.setdefault(name.decode("latin-1"), view[at + 8 : at + 8 + size])
        at += 8 + size + size % 2
    return chunks


def _values(data: memoryview, form: int, bits: int) -> Array:
    """The numbers in `data`, float64 from -1 up to 1."""
    if form == _FLOAT and bits in {32, 64}:
        return np.frombuffer(data, f"<f{bits // 8}").astype(np.float64)
    if form != _PCM or bits not in {8, 16, 24, 32}:
        raise ValueError(f"its format {form} with {bits} bits is not supported")
    if bits == 8:  # noqa: PLR2004  # the only width that has no sign
        return (np.frombuffer(data, np.uint8).astype(np.float64) - 128) / 128
    if bits == 24:  # noqa: PLR2004  # no dtype has it: the upper three bytes of four
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0].astype(np.float64) / 2**31
    return np.frombuffer(data, f"<i{bits // 8}").astype(np.float64) / 2.0 ** (bits - 1)
