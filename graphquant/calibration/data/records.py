"""Calibration data in records: Parquet rows, TFRecord files of tf.train.Example, and ONNX test data sets.

The messages of TFRecord files are declared by field numbers, so that TensorFlow is not needed.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from graphquant.calibration.data.files import DATA_EXTRA_INSTALL, DataFile, hash_files, wrap_read_errors
from graphquant.calibration.data.fit import (
    STRING_DTYPES,
    dataset_of_samples,
    fixed_batch_size,
    match_input_keys,
    numpy_dtype,
    split_range,
)
from graphquant.calibration.data.images import Pixels, pixel_settings
from graphquant.errors import DataError, MissingDependencyError
from graphquant.utils.text import format_shape

if TYPE_CHECKING:
    from graphquant.calibration.data.dataset import DataRequest, Dataset, DataSource, Feed
    from graphquant.formats import InputSpec
    from graphquant.numerics import Array


IMAGE_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8")  # first bytes of encoded images


def _feed_converter(source: DataSource, model_input: InputSpec) -> Callable[[str, Any], Array]:
    """Return a function that converts a labeled value to a feed with a first axis of 1."""

    @cache
    def image_settings() -> Pixels:
        return pixel_settings(source.spec, model_input, source.keys)

    def convert_value(label: str, value: Any) -> Array:
        if isinstance(value, bytes) and model_input.dtype in STRING_DTYPES:
            try:
                value = [value.decode()]
            except UnicodeDecodeError:
                value = [value]
            value = np.array(value, object)
        if not isinstance(value, bytes):
            return _reshape_to_input(label, model_input, np.asarray(value))
        if value.startswith(IMAGE_SIGNATURES):
            return image_settings().decode(label, value)
        if source.keys:
            return image_settings().to_feed(_raw_pixels(label, value, image_settings()))
        dtype = numpy_dtype(model_input.dtype)
        if dtype.hasobject or len(value) % dtype.itemsize:
            raise DataError(
                f"{label} has {len(value)} bytes, which are not numbers of {model_input.dtype}. Store the numbers of"
                f" input {model_input.name!r} themselves, or their bytes."
            )
        return _reshape_to_input(label, model_input, np.frombuffer(value, dtype.newbyteorder("<")).astype(dtype))

    return convert_value


def _raw_pixels(label: str, value: bytes, settings: Pixels) -> Array:
    """Return an image stored as bare pixels, uint8 (height, width, channels)."""
    width, height = settings.size or (0, 0)
    if len(value) != width * height * settings.channels:
        raise DataError(
            f"{label} is not a JPEG, PNG or GIF image, and its {len(value)} bytes are not {width}x{height} pixels of"
            f" {settings.channels} channels. Use encoded images, or pixels in the size of the input."
        )
    return np.frombuffer(value, np.uint8).reshape(height, width, settings.channels)


def _reshape_to_input(label: str, model_input: InputSpec, values: Array) -> Array:
    """Reshape `values` to one sample. Records contain lists, which have no shape."""
    input_shape = model_input.shape
    if input_shape is None or values.shape == input_shape:
        return values
    static_sizes = [size for size in input_shape if size is not None]
    if len(static_sizes) == len(input_shape) and math.prod(static_sizes) == values.size:
        return values.reshape(static_sizes)
    target_shape = [1, *(-1 if size is None else size for size in input_shape[1:])]
    sizes = [size for size in target_shape if size > 0]
    if target_shape.count(-1) > 1:
        raise DataError(
            f"{label} is a list of {values.size} values, but input {model_input.name!r} takes"
            f" {format_shape(input_shape)}, which leaves its shape open. Use an .npz file, which stores shapes."
        )
    fits = values.size == math.prod(sizes) if -1 not in target_shape else not values.size % max(math.prod(sizes), 1)
    if not input_shape or not fits:
        raise DataError(
            f"{label} has {values.size} values, but input {model_input.name!r} takes"
            f" {format_shape(input_shape)}. Provide as many."
        )
    return values.reshape(target_shape)


ROWS_PER_BATCH = 16  # rows that are decoded at a time
PARQUET_ADVICE = "Check that the Parquet file is complete."


def open_parquet(request: DataRequest) -> Dataset:
    """Open Parquet files: columns are inputs, and each row is one sample. The digest covers the files."""
    source = request.source
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"{source.spec} needs the package pyarrow. Install it: {DATA_EXTRA_INSTALL}"
        ) from error
    counts: list[int] = []
    unused_columns: dict[str, None] = {}
    for file in source.files:
        with wrap_read_errors(file, PARQUET_ADVICE), file.open() as stream, parquet.ParquetFile(stream) as table:
            counts.append(table.metadata.num_rows)
            columns = table.schema_arrow.names
        used_keys = match_input_keys(file.name, columns, request)
        unused_columns |= dict.fromkeys(name for name in columns if name not in used_keys)
    converters = {model_input.name: _feed_converter(source, model_input) for model_input in request.inputs}

    def read_samples(start: int, stop: int) -> Iterator[tuple[str, Feed]]:
        for file, first, last in split_range(source.files, counts, start, stop):
            for index, row in enumerate(_read_rows(file, request, first, last), first):
                label = f"{file.name}: row {index}"
                yield label, {name: converters[name](f"{label}: {name!r}", value) for name, value in row.items()}

    digest = hash_files(f"{source.keys} {source.input_keys} {request.samples}", source.files)
    return dataset_of_samples(request, read_samples, count=sum(counts), digest=digest, unused_keys=unused_columns)


def _read_rows(file: DataFile, request: DataRequest, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """Yield the rows from `start` up to `stop`, with a value for each input. Earlier row groups are skipped."""
    from pyarrow import parquet

    with wrap_read_errors(file, PARQUET_ADVICE), file.open() as stream, parquet.ParquetFile(stream) as table:
        keys = match_input_keys(file.name, table.schema_arrow.names, request)
        row_groups: list[int] = []
        first_row = 0
        for group in range(table.metadata.num_row_groups):
            size = table.metadata.row_group(group).num_rows
            if first_row + size > start or row_groups:
                row_groups.append(group)
            else:
                first_row += size
        for batch in table.iter_batches(batch_size=ROWS_PER_BATCH, row_groups=row_groups, columns=keys):
            for row in range(max(start - first_row, 0), min(stop - first_row, batch.num_rows)):
                yield {
                    model_input.name: _parquet_cell_value(
                        f"{file.name}: row {first_row + row}: {key!r}", batch.column(key)[row]
                    )
                    for model_input, key in zip(request.inputs, keys, strict=True)
                }
            first_row += batch.num_rows
            if first_row >= stop:
                return


def _parquet_cell_value(label: str, cell: Any) -> Any:
    """Return numbers, or the bytes of an image, either bare or in the field "bytes" of a struct."""
    import pyarrow as pa

    if isinstance(cell, pa.ExtensionScalar):
        cell = cell.value
    if isinstance(cell, pa.StructScalar) and cell.is_valid and "bytes" in cell:
        cell = cell["bytes"]
    if not cell.is_valid:
        raise DataError(f"{label} is null. Every row needs a value for each input.")
    if isinstance(cell, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        values = cell.values
        while isinstance(values, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
            values = values.flatten()
        if values.null_count:
            raise DataError(f"{label} contains null. Use numbers.")
        return values.to_numpy(zero_copy_only=False)
    if isinstance(cell, pa.StructScalar):
        raise DataError(f"{label} is a struct without image bytes. Use numbers, lists of numbers, or bytes.")
    if isinstance(cell, pa.BinaryScalar | pa.LargeBinaryScalar):
        return cell.as_py()
    # Numbers keep their dtype.
    return np.asarray(pa.array([cell.as_py()], cell.type).to_numpy(zero_copy_only=False))


_FIELD_DESCRIPTOR: Final[Any] = descriptor_pb2.FieldDescriptorProto

_MESSAGES: Final[dict[str, tuple[tuple[int, str, str, bool], ...]]] = {
    # number, name, type (a scalar's or a message's), repeated
    "BytesList": ((1, "value", "bytes", True),),
    "FloatList": ((1, "value", "float", True),),
    "Int64List": ((1, "value", "int64", True),),
    "Feature": (
        (1, "bytes_list", "BytesList", False),
        (2, "float_list", "FloatList", False),
        (3, "int64_list", "Int64List", False),
    ),
    # The wire format of a map. Keys are bytes, because they are decoded and checked by the reader.
    "Entry": ((1, "key", "bytes", False), (2, "value", "Feature", False)),
    "Features": ((1, "feature", "Entry", True),),
    "Example": ((1, "features", "Features", False),),
}


def _build_descriptor_pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="graphquant/data.proto", package="data", syntax="proto2")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, field, kind, repeated in fields:
            added = message.field.add(name=field, number=number)
            added.label = _FIELD_DESCRIPTOR.LABEL_REPEATED if repeated else _FIELD_DESCRIPTOR.LABEL_OPTIONAL
            if kind in _MESSAGES:
                added.type, added.type_name = _FIELD_DESCRIPTOR.TYPE_MESSAGE, f".data.{kind}"
            else:
                added.type = _FIELD_DESCRIPTOR.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


Example: Final[Any] = message_factory.GetMessageClass(_build_descriptor_pool().FindMessageTypeByName("data.Example"))


MAX_RECORD_BYTES = 1 << 28  # maximum size of a record; a compressed record may claim any size
_CRC_MASK_DELTA = 0xA282EAD8
_GZIP_MAGIC = b"\x1f\x8b"


def open_tfrecord(request: DataRequest) -> Dataset:
    """Open TFRecord files of tf.train.Example. One pass over the records counts and hashes them."""
    source = request.source
    digest = hashlib.sha256(f"{source.keys} {source.input_keys} {request.input_names}\n".encode())
    # If the model has a fixed batch size k, one feed consists of k records.
    batch_size = max(map(fixed_batch_size, request.inputs), default=1)
    counts: list[int] = []
    for file in source.files:
        remaining = None if request.samples is None else request.samples * batch_size - sum(counts)
        counts.append(0)
        for record in _read_records(file, 0, remaining):
            digest.update(hashlib.sha256(record).digest())
            counts[-1] += 1
    converters = {model_input.name: _feed_converter(source, model_input) for model_input in request.inputs}
    takes_records = _takes_records(request)

    def read_samples(start: int, stop: int) -> Iterator[tuple[str, Feed]]:
        for file, first, last in split_range(source.files, counts, start, stop):
            for index, record in enumerate(_read_records(file, first, last), first):
                label = f"{file.name}: record {index}"
                if takes_records:
                    model_input = request.inputs[0]
                    yield label, {model_input.name: _reshape_to_input(label, model_input, np.array([record], object))}
                    continue
                features = _parse_features(label, record)
                keys = match_input_keys(label, list(features), request)
                yield (
                    label,
                    {
                        name: converters[name](f"{label}: {key!r}", _feature_value(f"{label}: {key!r}", features[key]))
                        for name, key in zip(request.input_names, keys, strict=True)
                    },
                )

    unused_features: list[str] = []
    for record in () if takes_records else _read_records(source.files[0], 0, 1):
        label = f"{source.files[0].name}: record 0"
        features = list(_parse_features(label, record))
        used_features = match_input_keys(label, features, request)
        unused_features = [name for name in features if name not in used_features]
    return dataset_of_samples(
        request, read_samples, count=sum(counts), digest=digest.hexdigest(), unused_keys=unused_features
    )


def _takes_records(request: DataRequest) -> bool:
    """Return True if the only input takes whole records, which the model parses itself.

    It is a string, the spec assigns no feature to it, and the first record has no feature of its name.
    """
    source, model_input = request.source, request.inputs[0]
    if len(request.inputs) != 1 or model_input.dtype not in STRING_DTYPES or source.input_keys or source.keys:
        return False
    for record in _read_records(source.files[0], 0, 1):
        with suppress(DataError):  # the records may be of another type than tf.train.Example
            return _parse_features("", record).keys().isdisjoint((model_input.name, *model_input.aliases))
    return True


def _read_records(file: DataFile, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the records from `start` up to `stop` and verify their checksums. Earlier records are skipped by length."""
    with wrap_read_errors(file, "Check that the TFRecord file is complete."), ExitStack() as stack:
        stream: Any = stack.enter_context(file.open())
        compressed = stream.read(2) == _GZIP_MAGIC
        stream.seek(0)
        if compressed:
            stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
        index = 0
        while (stop is None or index < stop) and (header := stream.read(12)):
            (length,) = struct.unpack("<Q", _verify_checksum(header, 8))
            if length > MAX_RECORD_BYTES:
                raise ValueError(f"a record claims to have {length} bytes")
            if index < start:
                stream.seek(length + 4, 1)
            else:
                yield _verify_checksum(stream.read(length + 4), length)
            index += 1


def _verify_checksum(data: bytes, size: int) -> bytes:
    """Return the first `size` bytes of `data` after verifying the masked CRC-32C that follows them."""
    if len(data) != size + 4:
        raise EOFError("it ends inside a record")
    crc = google_crc32c.value(data[:size])
    masked = ((crc >> 15 | crc << 17) + _CRC_MASK_DELTA) & 0xFFFFFFFF
    if struct.pack("<I", masked) != data[size:]:
        raise ValueError("a checksum is wrong")
    return data[:size]


def _parse_features(label: str, record: bytes) -> dict[str, Any]:
    try:
        example = Example.FromString(record)
        return {entry.key.decode(): entry.value for entry in example.features.feature}
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{label} is not a tf.train.Example: {error}. Use records of this type.") from error


def _feature_value(label: str, feature: Any) -> Any:
    """Return numbers or bytes. Several byte strings form a string tensor."""
    if feature.HasField("float_list"):
        return np.array(feature.float_list.value, np.float32)
    if feature.HasField("int64_list"):
        return np.array(feature.int64_list.value, np.int64)
    values: Sequence[bytes] = feature.bytes_list.value
    if len(values) == 1:
        return values[0]
    if not values:
        raise DataError(f"{label} is empty. Every record needs a value for each input.")
    return np.array([value.decode("utf-8", "surrogateescape") for value in values], object)


def open_onnx_sets(request: DataRequest) -> Dataset:
    """Open folders of ONNX test data, each one feed with a TensorProto per input. The digest covers the files."""
    by_folder: dict[PurePosixPath, list[DataFile]] = {}
    for file in request.source.files:
        by_folder.setdefault(PurePosixPath(file.name).parent, []).append(file)
    # In numeric order, input_2.pb before input_10.pb.
    test_sets = [sorted(files, key=_number_and_name) for files in by_folder.values()][: request.samples]

    def read_test_sets(start: int, stop: int) -> Iterator[tuple[str, Feed]]:
        for files in test_sets[start:stop]:
            label = str(PurePosixPath(files[0].name).parent)
            yield label, _test_set_feed(label, files, request.input_names)

    digest = hash_files(f"{request.input_names}", itertools.chain.from_iterable(test_sets))
    return dataset_of_samples(request, read_test_sets, count=len(test_sets), digest=digest)


def _number_and_name(file: DataFile) -> tuple[int, str]:
    matched = re.search(r"(\d{1,9})\.pb$", file.name)
    return int(matched[1]) if matched else 0, file.name


def _test_set_feed(label: str, files: list[DataFile], names: list[str]) -> Feed:
    """Assign each tensor to the input of its name, or all by their numbers if a name is missing or unknown."""
    tensors = [_read_test_tensor(file) for file in files]
    if len(tensors) != len(names):
        raise DataError(
            f"{label} contains {len(tensors)} inputs, but the model takes {', '.join(map(repr, names))}."
            " Provide one file for each."
        )
    by_name = dict(tensors)
    return by_name if by_name.keys() == set(names) else dict(zip(names, (values for _, values in tensors), strict=True))


def _read_test_tensor(file: DataFile) -> tuple[str, Array]:
    """Return the name and values of the TensorProto in `file`."""
    from graphquant.formats.onnx.tensors import parse_test_tensor

    with wrap_read_errors(file, "Use a TensorProto, as in ONNX test data."):
        return parse_test_tensor(file.read())
