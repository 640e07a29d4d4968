"""Calibration data in `.npz` and `.npy` files.

Arrays are read from start to end, one sample at a time, so memory does not grow with the number of samples. The samples
of an array in Fortran order are scattered; it is copied to a temporary file first. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from threading import RLock, Thread
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graphquant.calibration.data.dataset import PIXEL_KEYS, DataRequest, Dataset, Feed
from graphquant.calibration.data.files import MAX_FEED_BYTES, DataFile, wrap_read_errors
from graphquant.calibration.data.fit import (
    ArrayFit,
    MissingArrayError,
    check_dtype_range,
    common_sample_count,
    dtype_kind,
    fit_array,
    match_input_keys,
    non_finite_error,
    non_finite_mask,
    numpy_dtype,
    split_range,
)
from graphquant.calibration.data.images import PIXEL_PRESETS, Pixels, pixel_settings
from graphquant.errors import DataError, UsageError
from graphquant.formats import InputSpec
from graphquant.utils.text import format_shape, parse_size

if TYPE_CHECKING:
    from graphquant.numerics import Array

SCAN_CHUNK_BYTES = 1 << 17  # approximate bytes per read while an array is checked and hashed
_COPY_CHUNK_BYTES = 1 << 20

MAX_EXPANDED_BYTES = 1 << 28
"""Maximum bytes of the decompressed arrays of a file that expands more than `MAX_EXPANSION` times."""

MAX_EXPANSION = 100  # Decompressed bytes for each byte of a file. Measured data has 1 to 20, and zeros have 1,000.
ZIP_LOCAL_HEADER_BYTES = 30  # size of the fixed part of the local header before each entry of a zip file
ZIP_ENCRYPTED_FLAG = 1


class _StoredArray(NamedTuple):
    """An array of a file, whose npy form `open_stream` opens, and its fit to a model input."""

    array_fit: ArrayFit
    open_stream: Callable[[], IO[bytes]]
    data_offset: int
    stored_dtype: np.dtype[Any]
    fortran_order: bool
    pixels: Pixels | None = None  # conversion of pictures, uint8 (N, H, W, C) or (N, H, W); None for other arrays

    def make_feed(self, values: Array) -> Array:
        """Convert the native values of one feed."""
        if self.pixels is None:
            return self.array_fit.feed(values)
        feeds = [self.pixels.convert(self.array_fit.label, picture) for picture in values]
        return np.concatenate(feeds) if "n" in self.pixels.layout else feeds[0]

    def native_values(self, block: Array) -> Array:
        """Convert a block to the byte order of the machine, and to bfloat16 if NumPy saved it as raw bytes."""
        if self.stored_dtype.kind == "V":
            return np.ascontiguousarray(block).view(self.array_fit.stored_dtype)
        return np.ascontiguousarray(block, self.array_fit.stored_dtype)


def open_arrays(request: DataRequest) -> Dataset:
    """Open npz or npy files, one after the other. All fed values are read once to check and hash them."""
    counts: list[int] = []
    ignored: dict[str, None] = {}
    for file in request.source.files:
        with _read_file_arrays(file, request) as (arrays, unused_keys):
            sample_count = common_sample_count([array.array_fit for array in arrays])
        counts.append(sample_count if request.samples is None else min(sample_count, request.samples - sum(counts)))
        ignored |= dict.fromkeys(unused_keys)
        if sum(counts) == request.samples:
            break
    if not sum(counts):
        raise DataError(f"{request.source.spec} contains no samples. Provide at least one.")
    digest: str | Future[str]
    if request.check_in_background:
        digest = Future()
        # A daemon thread, so that the program does not wait for it at exit.
        Thread(target=_resolve_digest, args=(digest, request, counts), daemon=True).start()
    else:
        digest = _scan_and_hash(request, counts)
    return Dataset(
        count=sum(counts),
        digest=digest,
        ignored=(*ignored, *request.source.ignored),
        open_feeds=partial(_array_feeds, request, counts),
    )


def _resolve_digest(digest: Future[str], request: DataRequest, counts: Sequence[int]) -> None:
    try:
        digest.set_result(_scan_and_hash(request, counts))
    except BaseException as error:  # noqa: BLE001  # raised again by Future.result
        digest.set_exception(error)


def _scan_and_hash(request: DataRequest, counts: Sequence[int]) -> str:
    """Return the digest of the fed values after checking that they are finite and fit the dtype of the input."""
    digest = hashlib.sha256()
    for file, count in zip(request.source.files, counts, strict=False):
        with _read_file_arrays(file, request) as (arrays, _):
            for array in arrays:
                array_fit = array.array_fit
                rows = count if array_fit.rows_per_feed else 0
                description = f"{array_fit.input_name} {array_fit.stored_dtype.str} {array_fit.feed_shape()} {rows}"
                description += "\n" if array.pixels is None else f" {array.pixels}\n"
                digest.update(description.encode())
                _scan_array(array, count, digest.update, finite=request.require_finite)
    return digest.hexdigest()


@contextmanager
def _read_file_arrays(
    file: DataFile, request: DataRequest, *, verify_checksums: bool = True
) -> Iterator[tuple[list[_StoredArray], list[str]]]:
    """Open the arrays of `file` that the inputs take, and list the keys that no input takes.

    Without `verify_checksums`, the checksums of uncompressed arrays are not computed.
    """
    # For each key, the size of the npy form of the array in bytes and a function that opens it.
    members: dict[str, tuple[int, Callable[[], IO[bytes]]]]
    compressed: set[str] = set()
    file_size = 0
    with wrap_read_errors(file, "Save it again with numpy.save or numpy.savez."), ExitStack() as stack:
        if file.name.lower().endswith(".npy"):
            if len(request.inputs) != 1:
                raise MissingArrayError(
                    f"{file.name} contains one array, but the model takes {', '.join(map(repr, request.input_names))}."
                    " Save arrays under these names with numpy.savez."
                )
            with file.open() as stream:
                members = {request.inputs[0].name: (stream.seek(0, 2), file.open)}
        else:
            stream = stack.enter_context(file.open())
            file_size = stream.seek(0, 2)
            archive = stack.enter_context(zipfile.ZipFile(stream))
            members = {}
            for info in archive.infolist():
                unchanged = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & ZIP_ENCRYPTED_FLAG
                is_direct = unchanged and not verify_checksums
                opener = partial(_open_uncompressed_entry, file, info) if is_direct else partial(archive.open, info)
                if info.filename.endswith(".npy"):
                    if info.compress_type != zipfile.ZIP_STORED:
                        compressed.add(info.filename.removesuffix(".npy"))
                    members[info.filename.removesuffix(".npy")] = info.file_size, opener
        keys = match_input_keys(file.name, list(members), request)
        if expanded_keys := compressed.intersection(keys):
            _check_expansion(file, file_size, sum(members[key][0] for key in expanded_keys), request)
        arrays = [
            _inspect_array(f"{file.name}: array {key!r}", *members[key], model_input, request)
            for model_input, key in zip(request.inputs, keys, strict=True)
        ]
        pixel_keys = [key for key in PIXEL_KEYS if key in request.source.keys]
        if pixel_keys and all(array.pixels is None for array in arrays):
            raise DataError(
                f"{file.name} has no pictures, which are uint8 arrays of N x height x width x channels, so"
                f" {pixel_keys[0]}= has no effect. Remove it, or save the pixels as uint8."
            )
        yield arrays, [key for key in members if key not in keys]


def _check_expansion(file: DataFile, file_size: int, size: int, request: DataRequest) -> None:
    """Raise a DataError if a file of `file_size` bytes claims to contain arrays of far more bytes, `size`."""
    text = request.source.keys.get("max_size")
    try:
        limit = MAX_EXPANDED_BYTES if text is None else parse_size(text)
    except UsageError as error:
        raise DataError(f"max_size={text} is not a size. {error}") from error
    if size > limit and (text is not None or size > MAX_EXPANSION * file_size):
        raise DataError(
            f"{file.name} has {file_size:,} bytes that claim to expand to {size:,}, and the limit is {limit:,}."
            f" If the file is trusted, raise the limit: --data {request.source.full_spec},max_size={-(-size >> 20)}MiB"
        )


def _open_uncompressed_entry(file: DataFile, info: zipfile.ZipInfo) -> IO[bytes]:
    """Open the file at an uncompressed entry. Unlike zipfile, this computes no checksum and copies once."""
    stream = file.open()
    stream.seek(info.header_offset)
    header = _read_array_bytes(stream, ZIP_LOCAL_HEADER_BYTES)
    stream.seek(sum(struct.unpack_from("<HH", header, ZIP_LOCAL_HEADER_BYTES - 4)), 1)
    return stream


# Python 3.11 may raise SystemError if two threads parse literals, as NumPy does with headers (CPython issue 106905).
_HEADER_LOCK = RLock()


def _inspect_array(
    label: str, size: int, opener: Callable[[], IO[bytes]], model_input: InputSpec, request: DataRequest
) -> _StoredArray:
    """Read the header of an array and check it against its input."""
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with opener() as stream:
        header_offset = stream.tell()
        version = np.lib.format.read_magic(stream)
        if version not in readers:
            raise ValueError(f"version {version} of the npy format is not supported")
        with _HEADER_LOCK:
            shape, fortran_order, stored_dtype = readers[version](stream)
        data_offset = stream.tell()
    if stored_dtype.hasobject:
        raise DataError(f"{label} contains Python objects, which are never loaded. Save numbers instead.")
    data_bytes = size - (data_offset - header_offset)
    if any(axis < 0 for axis in shape) or math.prod(shape) * stored_dtype.itemsize != data_bytes:
        raise DataError(
            f"{label} claims to be {stored_dtype} {format_shape(shape)}, but {data_bytes} bytes follow. Save it again."
        )
    if fortran_order and size > MAX_FEED_BYTES:
        raise DataError(f"{label} has {size} bytes in Fortran order. Save it in C order: numpy.ascontiguousarray.")
    pixels = _picture_conversion(label, model_input, shape, stored_dtype, request)
    fitted_input = model_input if pixels is None else _picture_input(model_input, pixels, shape)
    return _StoredArray(
        array_fit=fit_array(label, fitted_input, shape, stored_dtype),
        pixels=pixels,
        open_stream=opener,
        data_offset=data_offset,
        stored_dtype=stored_dtype,
        fortran_order=fortran_order,
    )


PICTURE_AXES = (3, 4)  # number of axes of an input that takes pictures, and of an array of pictures


def _picture_conversion(
    label: str, model_input: InputSpec, shape: tuple[int, ...], dtype: np.dtype[Any], request: DataRequest
) -> Pixels | None:
    """Return the conversion of an array of pictures, or None for another array.

    Raises a DataError if the pixels need a conversion that the spec does not define.
    """
    input_shape = model_input.shape
    has_pictures = dtype == np.uint8 and len(shape) in PICTURE_AXES
    if not has_pictures or (input_shape is not None and len(input_shape) not in PICTURE_AXES):
        return None
    keys = {key: text for key, text in request.source.keys.items() if key in PIXEL_KEYS}
    if keys:
        if "size" not in keys and None in (input_shape or (None,))[1:]:
            keys.setdefault("resize", "none")
        return pixel_settings(request.source.spec, model_input, keys)
    if dtype_kind(numpy_dtype(model_input.dtype)) != "float":
        return None
    raise DataError(
        f"{label} is uint8 {format_shape(shape)}, but input {model_input.name!r} takes {model_input.dtype}. If it has"
        f" pictures, add their conversion in training: {request.source.full_spec},preset=imagenet (or"
        f" {', '.join(PIXEL_PRESETS)}), or {request.source.full_spec},mean=127,std=128. Otherwise save it as"
        f" {model_input.dtype}."
    )


def _picture_input(model_input: InputSpec, pixels: Pixels, shape: tuple[int, ...]) -> InputSpec:
    """Return an input that takes pictures of any size as they are stored, in the batch size of `model_input`."""
    batch = model_input.shape[0] if "n" in pixels.layout and model_input.shape else None
    has_channel_axis = pixels.channels > 1 or shape[-1] == 1
    picture_shape = (batch, None, None, *((pixels.channels,) if has_channel_axis else ()))
    return InputSpec(name=model_input.name, dtype="uint8", shape=picture_shape)


def _array_blocks(array: _StoredArray, feeds_per_block: int, start: int, stop: int) -> Iterator[Array]:
    """Yield blocks of `feeds_per_block` feeds from feed `start` up to `stop`, in the dtype of the file."""
    array_fit = array.array_fit
    shape, rows = array_fit.shape, array_fit.rows_per_feed
    if not rows:
        shape, rows, feeds_per_block, start, stop = (1, *shape), 1, 1, 0, 1
    row_bytes = math.prod(shape[1:]) * array.stored_dtype.itemsize
    with array.open_stream() as stream, tempfile.TemporaryFile() if array.fortran_order else nullcontext() as copy:
        stream.seek(array.data_offset)
        if copy is not None:
            mapped = _map_fortran_array(copy, stream, array.stored_dtype, array_fit.shape).reshape(shape)
        else:
            stream.seek(start * rows * row_bytes, 1)
        for first_row in range(start * rows, stop * rows, rows * feeds_per_block):
            block_rows = min(rows * feeds_per_block, stop * rows - first_row)
            if copy is not None:
                yield mapped[first_row : first_row + block_rows]
            else:
                data = _read_array_bytes(stream, block_rows * row_bytes)
                yield np.frombuffer(data, array.stored_dtype).reshape((block_rows, *shape[1:]))


def _array_chunks(array: _StoredArray, count: int) -> Iterator[Array]:
    """Yield the values of `count` feeds in chunks of `SCAN_CHUNK_BYTES`, or of at least one feed in Fortran order."""
    size, item_bytes = math.prod(array.array_fit.feed_shape()), array.stored_dtype.itemsize
    if array.fortran_order:
        yield from _array_blocks(array, max(1, SCAN_CHUNK_BYTES // max(size * item_bytes, 1)), 0, count)
        return
    remaining = size * count if array.array_fit.rows_per_feed else size
    with array.open_stream() as stream:
        stream.seek(array.data_offset)
        while remaining:
            chunk_size = min(remaining, SCAN_CHUNK_BYTES // item_bytes)
            remaining -= chunk_size
            yield np.frombuffer(_read_array_bytes(stream, chunk_size * item_bytes), array.stored_dtype)


def _map_fortran_array(copy_file: IO[bytes], stream: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Copy an array in Fortran order to a temporary file and memory-map it."""
    remaining = math.prod(shape) * dtype.itemsize
    if not remaining:
        return np.empty(shape, dtype)
    while remaining:
        remaining -= copy_file.write(_read_array_bytes(stream, min(remaining, _COPY_CHUNK_BYTES)))
    copy_file.flush()
    return np.memmap(copy_file, dtype, "r", shape=shape, order="F")


def _read_array_bytes(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError("the file ends inside an array")
    return data


def _scan_array(array: _StoredArray, count: int, update: Callable[[bytes | memoryview], None], *, finite: bool) -> None:
    """Read all fed values once and pass them to `update`."""
    bad_count, first_bad, scanned_count = 0, 0, 0
    for block in _array_chunks(array, count):
        values = array.native_values(block)
        update(values.reshape(-1).view(np.uint8).data)
        non_finite = non_finite_mask(values)
        if non_finite.any():
            first_bad = first_bad if bad_count else scanned_count + int(non_finite.argmax())
            bad_count += int(non_finite.sum())
            check_dtype_range(array.array_fit, values[~non_finite])
        else:
            check_dtype_range(array.array_fit, values)
        scanned_count += values.size
    if bad_count and finite:
        raise non_finite_error(array.array_fit.label, bad_count, first_bad, array.array_fit.shape)


def _array_feeds(request: DataRequest, counts: Sequence[int], start: int, stop: int) -> Iterator[Feed]:
    for file, first, last in split_range(request.source.files, counts, start, stop):
        # The scan for the digest verifies the checksums.
        with _read_file_arrays(file, request, verify_checksums=False) as (arrays, _):
            streams: Mapping[str, Iterator[Array]] = {
                array.array_fit.input_name: _input_stream(array, first, last) for array in arrays
            }
            for _ in range(first, last):
                yield {name: next(stream) for name, stream in streams.items()}


def _input_stream(array: _StoredArray, start: int, stop: int) -> Iterator[Array]:
    """Yield the values that one input is fed."""
    for block in _array_blocks(array, 1, start, stop):
        values = array.native_values(block)
        if array.array_fit.rows_per_feed:
            yield array.make_feed(values)
        else:
            yield from itertools.repeat(array.make_feed(values[0]), stop - start)
