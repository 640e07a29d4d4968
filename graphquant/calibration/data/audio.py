"""Calibration data in wav files: each file is one sample, a mono wave. Windows and features are left to the user."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphquant.calibration.data.files import DataFile, wrap_read_errors
from graphquant.calibration.data.fit import dataset_of_files, dtype_kind, numpy_dtype, sole_input
from graphquant.calibration.data.images import check_choice, parse_number
from graphquant.errors import DataError
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from graphquant.calibration.data.dataset import DataRequest, Dataset
    from graphquant.formats import InputSpec
    from graphquant.ir import Shape
    from graphquant.numerics import Array

MAX_WAV_BYTES = 1 << 28  # maximum size of a wav file: more than two hours of 16-bit mono at 16 kHz
_PCM_FORMAT, _FLOAT_FORMAT, _EXTENSIBLE_FORMAT = 1, 3, 0xFFFE
_UNKNOWN_CHUNK_SIZE = 0xFFFFFFFF  # streaming writers cannot fill in the size


class Waves(NamedTuple):
    """Conversion of a wav file to an input: value = wave * scale, where wave is in [-1, 1].

    `shape` is that of a feed, with -1 on a time axis of open size. A `length` of None keeps the length of each wave;
    shorter waves are padded by zeros ("end"), repeated ("repeat"), or rejected ("none"). A `rate` of None, in samples
    per second, accepts any rate that is the same in all files.
    """

    shape: tuple[int, ...]
    length: int | None
    pad: str
    rate: int | None
    scale: float
    dtype: str


def open_audio(request: DataRequest) -> Dataset:
    """Open wav files in the order of their names. The digest covers their bytes and the settings."""
    model_input = sole_input(request)
    settings = _wave_settings(request, model_input)
    expected_rate, origin = settings.rate, "required by the key rate"
    if expected_rate is None:
        first_file = request.source.files[0]
        expected_rate, origin = _read_wave(first_file)[0], f"the rate of {first_file.name}"

    def read_file(file: DataFile) -> Array:
        rate, wave = _read_wave(file)
        if rate != expected_rate:
            raise DataError(
                f"{file.name} has a rate of {rate} Hz, but {expected_rate} Hz is {origin}."
                f" Convert it with: ffmpeg -i FILE -ar {expected_rate} OUT.wav"
            )
        return _wave_to_feed(file, wave, settings)

    return dataset_of_files(request, f"{settings} {model_input.name}", read_file)


def _wave_settings(request: DataRequest, model_input: InputSpec) -> Waves:
    label, keys = request.source.spec, request.source.keys
    shape, fixed_length = _time_axis(label, model_input.name, model_input.shape)
    dtype = numpy_dtype(model_input.dtype)
    if dtype_kind(dtype) not in {"int", "float"} or dtype.kind == "u":
        raise DataError(
            f"{label}: input {model_input.name!r} takes {model_input.dtype}, which cannot represent a wave. Use an"
            " .npz file."
        )
    length = _parse_positive_count(label, "length", keys["length"]) if "length" in keys else fixed_length
    if fixed_length is not None and length != fixed_length:
        raise DataError(f"{label}: length={length}, but input {model_input.name!r} takes {fixed_length}. Omit length.")
    pad = keys.get("pad", "end")
    check_choice(label, "pad", pad, ("end", "repeat", "none"))
    full_scale = 1.0 if dtype_kind(dtype) == "float" else 2.0 ** (dtype.itemsize * 8 - 1)
    return Waves(
        shape=shape,
        length=length,
        pad=pad,
        rate=_parse_positive_count(label, "rate", keys["rate"]) if "rate" in keys else None,
        scale=parse_number(label, "scale", keys["scale"]) if "scale" in keys else full_scale,
        dtype=model_input.dtype,
    )


def _time_axis(label: str, name: str, input_shape: Shape | None) -> tuple[tuple[int, ...], int | None]:
    """Return the shape of a feed with -1 on its only time axis, and the size of that axis if it is fixed."""
    if input_shape is not None:
        sample_shape = input_shape if len(input_shape) == 1 else input_shape[1:]
        time_axes = [axis for axis, size in enumerate(sample_shape) if size != 1]
        if len(time_axes) == 1:
            shape = [-1 if axis == time_axes[0] else 1 for axis in range(len(sample_shape))]
            return (tuple(shape) if len(input_shape) == 1 else (1, *shape)), sample_shape[time_axes[0]]
    accepted = "any shape" if input_shape is None else format_shape(input_shape)
    raise DataError(f"{label}: input {name!r} takes {accepted}, but a wave has only a time axis. Use an .npz file.")


def _parse_positive_count(label: str, key: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):  # noqa: PLR2004  # a billion
        raise DataError(f"{label}: {key}={text} is not a positive integer. Write it as {key}=16000.")
    return int(text)


def _wave_to_feed(file: DataFile, wave: Array, settings: Waves) -> Array:
    """Convert `wave`, float64 (time,) in [-1, 1], to a feed."""
    if settings.length is not None and wave.size < settings.length:
        if settings.pad == "none" or not wave.size:
            raise DataError(
                f"{file.name} has {wave.size} values, but {settings.length} are required. Remove the file, or add"
                " pad=end."
            )
        wave = np.pad(wave, (0, settings.length - wave.size), mode="constant" if settings.pad == "end" else "wrap")
    values = wave[: settings.length] * settings.scale
    dtype = numpy_dtype(settings.dtype)
    if dtype_kind(dtype) == "int":
        limits = np.iinfo(dtype)
        values = np.clip(np.rint(values), limits.min, limits.max)
    return values.astype(dtype).reshape(settings.shape)


def _read_wave(file: DataFile) -> tuple[int, Array]:
    """Return the samples per second and the mean of the channels, float64 (time,) in [-1, 1)."""
    with wrap_read_errors(file, "Convert it with: ffmpeg -i FILE -c:a pcm_s16le OUT.wav"):
        content = file.read(MAX_WAV_BYTES)
        if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
            raise ValueError("it is not a wav file")
        chunks = _riff_chunks(content)
        if "fmt " not in chunks or "data" not in chunks:
            raise ValueError("it has no format chunk or no data chunk")
        sample_format, channels, rate, _, frame_bytes, bits = struct.unpack_from("<HHIIHH", chunks["fmt "])
        if sample_format == _EXTENSIBLE_FORMAT:
            (sample_format,) = struct.unpack_from("<H", chunks["fmt "], 24)
        if not channels or not rate or frame_bytes * 8 != channels * bits:
            layout = f"{channels} channels of {bits} bits, {frame_bytes} bytes per frame"
            raise ValueError(f"its header is inconsistent: {layout}, rate {rate}")
        whole_frames = chunks["data"][: len(chunks["data"]) // frame_bytes * frame_bytes]
        values = _decode_wave_values(whole_frames, sample_format, bits)
    return rate, values.reshape(-1, channels).mean(axis=1)


def _riff_chunks(content: bytes) -> dict[str, memoryview]:
    """Return the first chunk of each name."""
    view = memoryview(content)
    chunks: dict[str, memoryview] = {}
    offset = 12
    while offset + 8 <= len(content) and "data" not in chunks:
        name, size = struct.unpack_from("<4sI", content, offset)
        if size == _UNKNOWN_CHUNK_SIZE:
            size = len(content) - offset - 8
        if offset + 8 + size > len(content):
            raise EOFError("the file ends early")
        chunks.setdefault(name.decode("latin-1"), view[offset + 8 : offset + 8 + size])
        offset += 8 + size + size % 2
    return chunks


def _decode_wave_values(data: memoryview, sample_format: int, bits: int) -> Array:
    """Decode the values in `data` as float64 in [-1, 1)."""
    if sample_format == _FLOAT_FORMAT and bits in {32, 64}:
        return np.frombuffer(data, f"<f{bits // 8}").astype(np.float64)
    if sample_format != _PCM_FORMAT or bits not in {8, 16, 24, 32}:
        raise ValueError(f"its format {sample_format} with {bits} bits is not supported")
    if bits == 8:  # noqa: PLR2004  # the only width that has no sign
        return (np.frombuffer(data, np.uint8).astype(np.float64) - 128) / 128
    if bits == 24:  # noqa: PLR2004  # no dtype has 24 bits: use the upper three bytes of four
        widened = np.zeros((len(data) // 3, 4), np.uint8)
        widened[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return widened.view("<i4")[:, 0].astype(np.float64) / 2**31
    return np.frombuffer(data, f"<i{bits // 8}").astype(np.float64) / 2.0 ** (bits - 1)
