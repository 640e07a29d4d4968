"""Read and extend a TensorFlow checkpoint (a tensor bundle) without TensorFlow.

A bundle `variables` consists of an index, `variables.index`, and data files `variables.data-00000-of-0000N`. The index
is a table (see `table`) from a variable's name to the position of its bytes; the empty name holds a header. A variable
that was saved in slices has an entry that lists them, and one more entry for each slice, whose key contains name and
slice.
"""

from __future__ import annotations

import math
from pathlib import Path  # noqa: TC003  # part of the public signatures, needed by tools that resolve annotations
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import google_crc32c
import ml_dtypes
import numpy as np

from graphquant.errors import ModelError, did_you_mean
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.leveldb_table import (
    encode_varint,
    mask_crc,
    read_table,
    read_varint,
    unmask_crc,
    write_table,
)
from graphquant.formats.tensorflow.values import STORAGE_DTYPES, type_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


_OBJECT_GRAPH_KEY: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
_HEADER_KEY: Final = b""
_SLICE_PREFIX: Final = b"\0"  # the first byte of a key made of name and slice; no name starts with it
_FULL_EXTENT: Final = -1
_READER_VERSION: Final = 1
_MAX_SHARDS: Final = 100_000  # file names have five digits
_MAX_RANK: Final = 64  # what numpy can hold
_MAX_ELEMENTS: Final = 1 << 59  # the same; empty dimensions do not count

_NUMPY: Final = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }
)


class Checkpoint:
    """The variables of one checkpoint. The index is in memory; values are read from the data files on request."""

    def __init__(self, prefix: Path, index: dict[bytes, bytes]) -> None:
        self._prefix = prefix
        self._index = index
        self._index_name = f"{prefix}.index"
        if _HEADER_KEY not in index:
            raise ModelError(f"{self._index_name} is not a checkpoint index: it has no header.")
        header = proto.parse_binary(
            index[_HEADER_KEY], proto.BundleHeaderProto(), source=f"The header of {self._index_name}"
        )
        if header.version.min_consumer > _READER_VERSION:
            raise ModelError(
                f"{self._index_name} was written for version {header.version.min_consumer} of the checkpoint format;"
                f" version {_READER_VERSION} is supported."
            )
        if not 0 < header.num_shards <= _MAX_SHARDS:
            raise ModelError(f"{self._index_name} has an impossible number of data files, {header.num_shards}.")
        self._shard_count: int = header.num_shards
        self._big_endian = header.endianness == header.BIG
        self._names = self._read_names()

    @classmethod
    def open(cls, prefix: Path) -> Self:
        """Read the index of the checkpoint with that path prefix, for instance `model/variables/variables`.

        Raises:
            ModelError: There is no such checkpoint, or its index is damaged.
        """
        path = prefix.with_name(prefix.name + ".index")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
        return cls(prefix, read_table(data, source=str(path)))

    def names(self) -> list[str]:
        """Return the keys of all variables, sorted."""
        return list(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def dtype_and_shape(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return the numpy-like dtype name of a variable, for instance "float32" or "string", and its shape.

        Raises:
            ModelError: There is no variable of that name, or its entry in the index is damaged.
        """
        entry = self._entry(name)
        return self._entry_dtype(name, entry), self._entry_shape(name, entry)

    def read(self, name: str) -> NDArray[Any]:
        """Return a variable's value as a read-only array, of the shape and dtype of `dtype_and_shape`.

        Quantized types are returned as the integers that store them, bfloat16 and smaller types as types of ml_dtypes.

        Raises:
            ModelError: There is no variable of that name, it holds strings or handles, its data file is missing or
                too short, or its checksum does not match.
        """
        entry = self._entry(name)
        value = self._assemble(name, entry) if entry.slices else self._read_array(name, entry)
        value.flags.writeable = False
        return value

    def object_graph(self) -> Any | None:
        """Return the graph of Python objects (`TrackableObjectGraph`) of a TF2 checkpoint, None for TF1.

        Raises:
            ModelError: The graph is damaged.
        """
        if _OBJECT_GRAPH_KEY not in self._names:
            return None
        entry = self._entry(_OBJECT_GRAPH_KEY)
        source = f"The object graph of {self._index_name}"
        if entry.dtype != proto.DataType["DT_STRING"] or entry.shape.dim or entry.slices:
            raise ModelError(f"{source} is not a single string.")
        return proto.parse_binary(self._read_string(entry), proto.TrackableObjectGraph(), source=source)

    def _read_names(self) -> dict[str, bytes]:
        keys = [key for key in self._index if key != _HEADER_KEY and not key.startswith(_SLICE_PREFIX)]
        try:
            return {key.decode(): key for key in keys}
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._index_name} is damaged: a variable's name is not text.") from error

    def _entry(self, name: str) -> Any:
        if name not in self._names:
            raise ModelError(f"{self._index_name} has no variable {name!r}.{did_you_mean(name, self._names)}")
        return self._parse_entry(name, self._index[self._names[name]])

    def _parse_entry(self, name: str, data: bytes) -> Any:
        return proto.parse_binary(data, proto.BundleEntryProto(), source=f"The entry of {name!r} in {self._index_name}")

    def _entry_dtype(self, name: str, entry: Any) -> str:
        dtype = proto.dtype_name(entry.dtype)
        if dtype is None:
            raise ModelError(f"{self._index_name}: variable {name!r} has an unknown type, number {entry.dtype}.")
        return dtype

    def _entry_shape(self, name: str, entry: Any) -> tuple[int, ...]:
        shape = tuple(dim.size for dim in entry.shape.dim)
        elements = math.prod(max(size, 1) for size in shape[:_MAX_RANK])
        if entry.shape.unknown_rank or len(shape) > _MAX_RANK or min(shape, default=0) < 0 or elements > _MAX_ELEMENTS:
            raise ModelError(f"{self._index_name}: variable {name!r} has an impossible shape.")
        return shape

    def _read_array(self, name: str, entry: Any) -> NDArray[Any]:
        dtype = self._array_dtype(name, entry)
        shape = self._entry_shape(name, entry)
        expected = math.prod(shape) * dtype.itemsize
        if entry.size != expected:
            raise ModelError(
                f"{self._index_name}: variable {name!r} has {entry.size} bytes, but its shape and dtype need"
                f" {expected}."
            )
        data = self._read_bytes(name, entry)
        if google_crc32c.value(data) != unmask_crc(entry.crc32c):
            raise ModelError(
                f"{self._entry_path(entry)}: the checksum of variable {name!r} does not match, it is damaged."
            )
        array = np.frombuffer(self._to_native_endian(data, dtype), dtype=dtype)
        if dtype == np.bool_:  # files may store True as any nonzero byte, numpy requires 1
            array = array.view(np.uint8) != 0
        return array.reshape(shape)

    def _array_dtype(self, name: str, entry: Any) -> np.dtype[Any]:
        dtype = self._entry_dtype(name, entry)
        storage = STORAGE_DTYPES.get(dtype, dtype)
        if storage in _NUMPY:
            return np.dtype(storage)
        if hasattr(ml_dtypes, storage):
            extended_dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, storage))
            return extended_dtype
        raise ModelError(f"{self._index_name}: variable {name!r} is of type {dtype}, which cannot be read as numbers.")

    def _to_native_endian(self, data: bytes, dtype: np.dtype[Any]) -> bytes:
        if not self._big_endian or dtype.itemsize == 1:
            return data
        width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        return np.frombuffer(data, dtype=f">u{width}").astype(f"<u{width}").tobytes()

    def _entry_path(self, entry: Any) -> Path:
        return _shard_path(self._prefix, entry.shard_id, self._shard_count)

    def _read_bytes(self, name: str, entry: Any) -> bytes:
        """Read the bytes of an entry. Memory is allocated only after the range was checked against the file size."""
        if not 0 <= entry.shard_id < self._shard_count:
            raise ModelError(
                f"{self._index_name}: variable {name!r} claims to be in data file {entry.shard_id} of"
                f" {self._shard_count}."
            )
        path = self._entry_path(entry)
        try:
            length = path.stat().st_size
            if entry.offset < 0 or entry.size < 0 or entry.offset + entry.size > length:
                raise ModelError(f"{path}: variable {name!r} lies outside the file, which may be cut off.")
            with path.open("rb") as file:
                file.seek(entry.offset)
                data = file.read(entry.size)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from error
        if len(data) != entry.size:
            raise ModelError(f"{path}: variable {name!r} lies outside the file, which was changed while it was read.")
        return data

    def _read_string(self, entry: Any) -> bytes:
        """Read a scalar string: its length, a checksum of the length, and its bytes."""
        name = _OBJECT_GRAPH_KEY
        data = self._read_bytes(name, entry)
        order: Literal["big", "little"] = "big" if self._big_endian else "little"
        try:
            length, position = read_varint(data, 0)
        except ModelError as error:
            raise ModelError(f"{self._entry_path(entry)}: the length of {name} cannot be read: {error}.") from error
        payload = data[position + 4 :]
        if len(payload) != length:
            raise ModelError(f"{self._entry_path(entry)}: {name} does not have the length that it claims.")
        # The checksum covers the length as a number of fixed width, not the stored bytes of the varint.
        crc = google_crc32c.value(length.to_bytes(4 if length < 1 << 32 else 8, order))
        stored = data[position : position + 4]
        checksum = google_crc32c.extend(google_crc32c.extend(crc, stored), payload)
        if unmask_crc(int.from_bytes(stored, order)) != crc or unmask_crc(entry.crc32c) != checksum:
            raise ModelError(f"{self._entry_path(entry)}: the checksum of {name} does not match, it is damaged.")
        return payload

    def _assemble(self, name: str, entry: Any) -> NDArray[Any]:
        """Assemble a variable from its saved slices, which must cover all of it."""
        dtype = self._array_dtype(name, entry)
        shape = self._entry_shape(name, entry)
        if math.prod(shape) * dtype.itemsize > self._data_files_size():
            raise ModelError(f"{self._index_name}: variable {name!r} is larger than the data files.")
        array = np.zeros(shape, dtype)
        covered = np.zeros(shape, np.bool_)
        for saved_slice in entry.slices:
            extents = [(extent.start, _extent_length(extent)) for extent in saved_slice.extent]
            region = self._slice_region(name, shape, extents)
            slice_value = self._read_slice(name, extents)
            if slice_value.dtype != dtype or slice_value.shape != array[region].shape:
                raise ModelError(
                    f"{self._index_name}: a slice of variable {name!r} does not have the shape and dtype of its entry."
                )
            if covered[region].any():
                raise ModelError(f"{self._index_name}: slices of variable {name!r} overlap.")
            array[region] = slice_value
            covered[region] = True
        if not covered.all():
            raise ModelError(f"{self._index_name}: the slices of variable {name!r} do not cover all of it.")
        return array

    def _read_slice(self, name: str, extents: list[tuple[int, int]]) -> NDArray[Any]:
        data = self._index.get(_slice_key(name, extents))
        if data is None:
            raise ModelError(f"{self._index_name}: a slice of variable {name!r} is missing.")
        entry = self._parse_entry(name, data)
        if entry.slices:
            raise ModelError(f"{self._index_name}: a slice of variable {name!r} has slices itself.")
        return self._read_array(name, entry)

    def _slice_region(self, name: str, shape: tuple[int, ...], extents: list[tuple[int, int]]) -> tuple[slice, ...]:
        fits = len(extents) == len(shape) and all(
            (start, length) == (0, _FULL_EXTENT) or (start >= 0 and length >= 0 and start + length <= size)
            for (start, length), size in zip(extents, shape, strict=True)
        )
        if not fits:
            raise ModelError(f"{self._index_name}: a slice of variable {name!r} lies outside of it.")
        return tuple(
            slice(None) if length == _FULL_EXTENT else slice(start, start + length) for start, length in extents
        )

    def _data_files_size(self) -> int:
        paths = self._prefix.parent.glob(f"*.data-*-of-{self._shard_count:05d}")
        return sum(path.stat().st_size for path in paths if path.name.startswith(f"{self._prefix.name}.data-"))


def _extent_length(extent: Any) -> int:
    return int(extent.length) if extent.HasField("length") else _FULL_EXTENT


def _slice_key(name: str, extents: list[tuple[int, int]]) -> bytes:
    """Return the key of a variable's slice, in an encoding that sorts like its content."""
    text = name.encode().replace(b"\0", b"\0\xff")
    rank = len(extents).to_bytes(1, "big") if extents else b""
    numbers = b"".join(_encode_ordered(number) for extent in extents for number in extent)
    return _SLICE_PREFIX + text + b"\0\1" + len(rank).to_bytes(1, "big") + rank + numbers


def _encode_ordered(value: int) -> bytes:
    """Encode a signed number in bytes that sort like numbers: one inverted leading bit for each byte."""
    magnitude = ~value if value < 0 else value
    size = magnitude.bit_length() // 7 + 1
    inverted = ((1 << size) - 1) << 7 * size
    return ((value & ((1 << 8 * size) - 1)) ^ inverted).to_bytes(size, "big")


def extend_checkpoint(prefix: Path, values: Mapping[str, NDArray[Any]], object_graph: Any | None) -> None:
    """Extend the checkpoint with the path prefix `prefix`, or create one there.

    Existing values are preserved. Their data files are renamed, because the names contain the number of files, and the
    new values are written to one more file. The index is rewritten.

    Args:
        prefix: For instance `model/variables/variables`. Its files are replaced and never written into, because
            they may be links to those of another model.
        values: Numeric values by their new keys.
        object_graph: The object graph that replaces the present one, None to preserve that.

    Raises:
        ModelError: The checkpoint is damaged, or its numbers are big-endian.
    """
    index_path = prefix.with_name(prefix.name + ".index")
    entries = read_table(index_path.read_bytes(), source=str(index_path)) if index_path.is_file() else {}
    header = proto.BundleHeaderProto(num_shards=0)
    header.version.producer = 1
    if _HEADER_KEY in entries:
        header = proto.parse_binary(
            entries[_HEADER_KEY], proto.BundleHeaderProto(), source=f"The header of {index_path}"
        )
    if header.endianness == header.BIG:
        raise ModelError(
            f"{index_path} contains big-endian numbers, and values cannot be added to it. Save the model again first."
        )
    old_shards, header.num_shards = header.num_shards, header.num_shards + 1
    data = bytearray()
    for name in sorted(values):
        value = np.asarray(values[name], order="C")
        _append_value(entries, name, _make_entry(old_shards, value), value.tobytes(), data)
    if object_graph is not None:
        entry = proto.BundleEntryProto(dtype=type_number("string"), shard_id=old_shards)
        entry.shape.SetInParent()
        text = proto.to_binary(object_graph)
        length = mask_crc(google_crc32c.value(len(text).to_bytes(4, "little"))).to_bytes(4, "little")
        _append_value(entries, _OBJECT_GRAPH_KEY, entry, encode_varint(len(text)) + length + text, data)
        # The checksum covers the length as a number of fixed width, not the stored bytes of the varint.
        checksum = google_crc32c.extend(google_crc32c.value(len(text).to_bytes(4, "little")), length)
        entry.crc32c = mask_crc(google_crc32c.extend(checksum, text))
        entries[_OBJECT_GRAPH_KEY.encode()] = proto.to_binary(entry)
    entries[_HEADER_KEY] = proto.to_binary(header)
    _write_bundle(prefix, index_path, old_shards, bytes(data), write_table(entries))


def _make_entry(shard: int, value: NDArray[Any]) -> Any:
    entry = proto.BundleEntryProto(dtype=type_number(value.dtype.name), shard_id=shard)
    entry.shape.SetInParent()
    for size in value.shape:
        entry.shape.dim.add(size=size)
    return entry


def _append_value(entries: dict[bytes, bytes], name: str, entry: Any, payload: bytes, data: bytearray) -> None:
    """Append the bytes of one value to the new data file, and its entry to the index."""
    entry.offset, entry.size = len(data), len(payload)
    entry.crc32c = mask_crc(google_crc32c.value(payload))
    data += payload
    entries[name.encode()] = proto.to_binary(entry)


def _write_bundle(prefix: Path, index_path: Path, old_shards: int, data: bytes, table: bytes) -> None:
    prefix.parent.mkdir(exist_ok=True)
    for shard in range(old_shards):
        _shard_path(prefix, shard, old_shards).replace(_shard_path(prefix, shard, old_shards + 1))
    new_shard = _shard_path(prefix, old_shards, old_shards + 1)
    for path, payload in ((new_shard, data), (index_path, table)):
        path.unlink(missing_ok=True)
        path.write_bytes(payload)


def _shard_path(prefix: Path, shard: int, shards: int) -> Path:
    return prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")
