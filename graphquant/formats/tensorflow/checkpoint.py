"""Read and extend a TensorFlow checkpoint (a tensor bundle) without TensorFlow.

A bundle `variables` consists of an index, `variables.index`, and data files `variables.data-00000-of-0000N`. The index
is a sorted table from a variable's name to the position of its bytes; the empty name holds a header. A variable that
was saved in slices has an entry that lists them, and one more entry for each slice, whose key contains name and slice.

The table has LevelDB's format: a sequence of blocks and a footer. The footer points at an index block, whose values
point at the data blocks. Inside a block a key is stored as the length of the prefix it shares with the previous key,
and the rest of its bytes. Files may be hostile: lengths are checked before they are used, and allocations are bounded
by the file's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import google_crc32c
import numpy as np

from graphquant.errors import ModelError, did_you_mean
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.values import encode_shape, storage_dtype, type_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

_OBJECT_GRAPH_KEY: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
_HEADER_KEY: Final = b""
_SLICE_PREFIX: Final = b"\0"  # the first byte of a key made of name and slice; no name starts with it
_FULL_EXTENT: Final = -1
_READER_VERSION: Final = 1
_MAX_SHARDS: Final = 100_000  # file names have five digits
_MAX_RANK: Final = 64  # what numpy can hold
_MAX_ELEMENTS: Final = 1 << 59  # the same; empty dimensions do not count
_MAGIC: Final = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER_SIZE: Final = 48
_TRAILER_SIZE: Final = 5
_NO_COMPRESSION: Final = 0
_SNAPPY: Final = 1
_MASK_DELTA: Final = 0xA282EAD8
_MAX_VARINT_BYTES: Final = 10
# A Snappy element of 3 bytes copies at most 64 bytes, so a larger declared length is invalid.
_MAX_SNAPPY_RATIO: Final = 64
# Keys share prefixes, so they may be larger than the file; real files are far below this ratio.
_MAX_KEY_RATIO: Final = 32
_FREE_KEY_BYTES: Final = 1 << 24
_BLOCK_SIZE: Final = 1 << 16  # a block is closed at that many bytes
_RESTART_INTERVAL: Final = 16  # entries between two restarts


class Checkpoint:
    """The variables of one checkpoint. The index is in memory; values are read from the data files on request.

    Raises a ModelError if there is no such checkpoint, or its index is damaged.
    """

    def __init__(self, prefix: Path) -> None:
        """Read the index of the checkpoint with that path prefix, for instance `model/variables/variables`."""
        self._prefix = prefix
        self._index_name = f"{prefix}.index"
        try:
            data = _index_path(prefix).read_bytes()
        except OSError as error:
            raise ModelError(f"{self._index_name} cannot be read: {error.strerror or error}.") from error
        self._index = read_table(data, source=self._index_name)
        if _HEADER_KEY not in self._index:
            raise ModelError(f"{self._index_name} is not a checkpoint index: it has no header.")
        header = _parse_header(self._index, self._index_name)
        if header.version.min_consumer > _READER_VERSION:
            raise ModelError(
                f"{self._index_name} was written for version {header.version.min_consumer} of the checkpoint format;"
                f" version {_READER_VERSION} is supported."
            )
        if not 0 < header.num_shards <= _MAX_SHARDS:
            raise ModelError(f"{self._index_name} has an impossible number of data files, {header.num_shards}.")
        self._shard_count: int = header.num_shards
        self._byte_order: Literal["big", "little"] = "big" if header.endianness == header.BIG else "little"
        keys = [key for key in self._index if key != _HEADER_KEY and not key.startswith(_SLICE_PREFIX)]
        try:
            # The names of all variables, sorted, with their keys in the index.
            self.names = {key.decode(): key for key in keys}
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._index_name} is damaged: a variable's name is not text.") from error

    def read(self, name: str) -> NDArray[Any]:
        """Return a variable's value as a read-only array.

        Quantized types are returned as the integers that store them, bfloat16 and smaller types as types of ml_dtypes.
        """
        if name not in self.names:
            raise ModelError(f"{self._index_name} has no variable {name!r}.{did_you_mean(name, self.names)}")
        entry = self._parse_entry(name, self.names[name])
        value = self._assemble(name, entry) if entry.slices else self._read_array(name, entry)
        value.flags.writeable = False
        return value

    def object_graph(self) -> Any | None:
        """Return the graph of Python objects (`TrackableObjectGraph`) of a TF2 checkpoint, None for TF1."""
        if _OBJECT_GRAPH_KEY not in self.names:
            return None
        entry = self._parse_entry(_OBJECT_GRAPH_KEY, self.names[_OBJECT_GRAPH_KEY])
        source = f"The object graph of {self._index_name}"
        if entry.dtype != proto.DataType["DT_STRING"] or entry.shape.dim or entry.slices:
            raise ModelError(f"{source} is not a single string.")
        return proto.parse_binary(
            self._read_string(_OBJECT_GRAPH_KEY, entry), proto.TrackableObjectGraph(), source=source
        )

    def _error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self._index_name}: variable {name!r} {problem}.")

    def _parse_entry(self, name: str, key: bytes) -> Any:
        source = f"The entry of {name!r} in {self._index_name}"
        return proto.parse_binary(self._index[key], proto.BundleEntryProto(), source=source)

    def _array_layout(self, name: str, entry: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
        if (type_name := proto.dtype_name(entry.dtype)) is None:
            raise self._error(name, f"has an unknown type, number {entry.dtype}")
        if (dtype := storage_dtype(type_name)) is None:
            raise self._error(name, f"is of type {type_name}, which cannot be read as numbers")
        shape = tuple(dim.size for dim in entry.shape.dim)
        elements = math.prod(max(size, 1) for size in shape[:_MAX_RANK])
        if entry.shape.unknown_rank or len(shape) > _MAX_RANK or min(shape, default=0) < 0 or elements > _MAX_ELEMENTS:
            raise self._error(name, "has an impossible shape")
        return dtype, shape

    def _read_array(self, name: str, entry: Any) -> NDArray[Any]:
        dtype, shape = self._array_layout(name, entry)
        expected = math.prod(shape) * dtype.itemsize
        if entry.size != expected:
            raise self._error(name, f"has {entry.size} bytes, but its shape and dtype need {expected}")
        data = self._read_bytes(name, entry)
        if mask_crc(google_crc32c.value(data)) != entry.crc32c:
            path = _shard_path(self._prefix, entry.shard_id, self._shard_count)
            raise ModelError(f"{path}: the checksum of variable {name!r} does not match, it is damaged.")
        if self._byte_order == "big" and dtype.itemsize > 1:
            width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
            data = np.frombuffer(data, dtype=f">u{width}").astype(f"<u{width}").tobytes()
        array = np.frombuffer(data, dtype=dtype)
        if dtype == np.bool_:  # files may store True as any nonzero byte, numpy requires 1
            array = array.view(np.uint8) != 0
        return array.reshape(shape)

    def _read_bytes(self, name: str, entry: Any) -> bytes:
        """Read the bytes of an entry. Memory is allocated only after the range was checked against the file size."""
        if not 0 <= entry.shard_id < self._shard_count:
            raise self._error(name, f"claims to be in data file {entry.shard_id} of {self._shard_count}")
        path = _shard_path(self._prefix, entry.shard_id, self._shard_count)
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

    def _read_string(self, name: str, entry: Any) -> bytes:
        """Read a scalar string: its length, a checksum of the length, and its bytes."""
        data = self._read_bytes(name, entry)
        path = _shard_path(self._prefix, entry.shard_id, self._shard_count)
        try:
            length, position = read_varint(data, 0)
        except ModelError as error:
            raise ModelError(f"{path}: the length of {name} cannot be read: {error}.") from error
        payload = data[position + 4 :]
        if len(payload) != length:
            raise ModelError(f"{path}: {name} does not have the length that it claims.")
        stored = data[position : position + 4]
        length_crc = _length_crc(length, self._byte_order)
        checksum = google_crc32c.extend(google_crc32c.extend(length_crc, stored), payload)
        if int.from_bytes(stored, self._byte_order) != mask_crc(length_crc) or entry.crc32c != mask_crc(checksum):
            raise ModelError(f"{path}: the checksum of {name} does not match, it is damaged.")
        return payload

    def _assemble(self, name: str, entry: Any) -> NDArray[Any]:
        """Assemble a variable from its saved slices, which must cover all of it."""
        dtype, shape = self._array_layout(name, entry)
        paths = self._prefix.parent.glob(f"*.data-*-of-{self._shard_count:05d}")
        stored_size = sum(path.stat().st_size for path in paths if path.name.startswith(f"{self._prefix.name}.data-"))
        if math.prod(shape) * dtype.itemsize > stored_size:
            raise self._error(name, "is larger than the data files")
        array = np.zeros(shape, dtype)
        covered = np.zeros(shape, np.bool_)
        for saved_slice in entry.slices:
            extents = [
                (extent.start, int(extent.length) if extent.HasField("length") else _FULL_EXTENT)
                for extent in saved_slice.extent
            ]
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
        key = _slice_key(name, extents)
        if key not in self._index:
            raise ModelError(f"{self._index_name}: a slice of variable {name!r} is missing.")
        entry = self._parse_entry(name, key)
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
    """
    index_path = _index_path(prefix)
    entries = read_table(index_path.read_bytes(), source=str(index_path)) if index_path.is_file() else {}
    if _HEADER_KEY in entries:
        header = _parse_header(entries, str(index_path))
    else:
        header = proto.BundleHeaderProto(num_shards=0, version={"producer": 1})
    if header.endianness == header.BIG:
        raise ModelError(
            f"{index_path} contains big-endian numbers, and values cannot be added to it. Save the model again first."
        )
    old_shards, header.num_shards = header.num_shards, header.num_shards + 1
    data = bytearray()

    def append_value(name: str, dtype: str, shape: tuple[int, ...], payload: bytes, checksum: int) -> None:
        entry = proto.BundleEntryProto(dtype=type_number(dtype), shape=encode_shape(shape), shard_id=old_shards)
        entry.offset, entry.size, entry.crc32c = len(data), len(payload), mask_crc(checksum)
        data.extend(payload)
        entries[name.encode()] = proto.to_binary(entry)

    for name in sorted(values):
        value = np.asarray(values[name], order="C")
        payload = value.tobytes()
        append_value(name, value.dtype.name, value.shape, payload, google_crc32c.value(payload))
    if object_graph is not None:
        text = proto.to_binary(object_graph)
        length_crc = _length_crc(len(text), "little")
        stored = mask_crc(length_crc).to_bytes(4, "little")
        checksum = google_crc32c.extend(google_crc32c.extend(length_crc, stored), text)
        append_value(_OBJECT_GRAPH_KEY, "string", (), encode_varint(len(text)) + stored + text, checksum)
    entries[_HEADER_KEY] = proto.to_binary(header)
    table = write_table(entries)
    prefix.parent.mkdir(exist_ok=True)
    for shard in range(old_shards):
        _shard_path(prefix, shard, old_shards).replace(_shard_path(prefix, shard, old_shards + 1))
    for path, content in ((_shard_path(prefix, old_shards, old_shards + 1), bytes(data)), (index_path, table)):
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def _length_crc(length: int, order: Literal["big", "little"]) -> int:
    """Return the checksum of a string's length: as a number of fixed width, not as the stored varint."""
    crc: int = google_crc32c.value(length.to_bytes(4 if length < 1 << 32 else 8, order))
    return crc


def _parse_header(entries: Mapping[bytes, bytes], index_name: str) -> Any:
    return proto.parse_binary(entries[_HEADER_KEY], proto.BundleHeaderProto(), source=f"The header of {index_name}")


def _index_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}.index")


def _shard_path(prefix: Path, shard: int, shards: int) -> Path:
    return prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")


def mask_crc(crc: int) -> int:
    """Return a CRC-32C as it is stored: rotated and shifted, as files may be checksummed again."""
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def encode_varint(value: int) -> bytes:
    """Encode a number in base 128, the lowest digit first."""
    digits = bytearray()
    while value >= 0x80:  # noqa: PLR2004 - the continuation bit
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*digits, value))


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the base-128 number at `position` and the position after it."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(data):
            raise ModelError("a number is cut off")
        byte = data[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit
            if value >= 1 << 64:
                break
            return value, position + index + 1
    raise ModelError("a number does not fit in 64 bits")


def read_table(data: bytes, *, source: str) -> dict[bytes, bytes]:
    """Return all keys and values of a table, in the order of the keys; `source` names the file in errors."""
    try:
        return dict(_iter_entries(data))
    except ModelError as error:
        raise ModelError(f"{source} is not a readable checkpoint index: {error}.") from error


def write_table(entries: Mapping[bytes, bytes]) -> bytes:
    """Return the uncompressed table file of these keys and values."""
    data = bytearray()
    handles: dict[bytes, bytes] = {}
    block: dict[bytes, bytes] = {}
    size = 0
    for key in sorted(entries):
        block[key] = entries[key]
        size += len(key) + len(entries[key])
        if size >= _BLOCK_SIZE:
            handles[key] = _append_block(data, block)
            block, size = {}, 0
    if block:
        handles[next(reversed(block))] = _append_block(data, block)
    footer = _append_block(data, {}) + _append_block(data, handles)
    return bytes(data + footer.ljust(_FOOTER_SIZE - len(_MAGIC), b"\0") + _MAGIC)


def _append_block(data: bytearray, entries: Mapping[bytes, bytes]) -> bytes:
    """Append a block with its trailer and return its handle."""
    block = bytearray()
    restarts = [] if entries else [0]
    for number, (key, value) in enumerate(entries.items()):
        if number % _RESTART_INTERVAL == 0:
            restarts.append(len(block))
        block += encode_varint(0) + encode_varint(len(key)) + encode_varint(len(value)) + key + value
    block += np.array([*restarts, len(restarts)], "<u4").tobytes()
    handle = encode_varint(len(data)) + encode_varint(len(block))
    trailer = mask_crc(google_crc32c.value(bytes((*block, _NO_COMPRESSION))))
    data += block + bytes([_NO_COMPRESSION]) + trailer.to_bytes(4, "little")
    return handle


def _iter_entries(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(data) < _FOOTER_SIZE or not data.endswith(_MAGIC):
        raise ModelError("it does not end like a table file, it may be cut off")
    footer = data[-_FOOTER_SIZE:]
    position = 0
    for _ in range(2):  # offset and size of the metadata block, which is empty in checkpoints
        _, position = read_varint(footer, position)
    key_budget = _FREE_KEY_BYTES + _MAX_KEY_RATIO * len(data)
    previous_key: bytes | None = None
    for _, handle in _iter_block_entries(_read_block(data, footer[position:])):
        for key, value in _iter_block_entries(_read_block(data, handle)):
            if previous_key is not None and key <= previous_key:
                raise ModelError("its keys are out of order")
            key_budget -= len(key)
            if key_budget < 0:
                raise ModelError("its keys are larger than a file of its size can need")
            yield key, value
            previous_key = key


def _read_block(data: bytes, handle: bytes) -> bytes:
    """Return the contents of a block, given by its offset and size, checked against its trailer and decompressed."""
    offset, position = read_varint(handle, 0)
    end = offset + read_varint(handle, position)[0]
    if end + _TRAILER_SIZE > len(data) - _FOOTER_SIZE:
        raise ModelError("a block lies outside the file")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER_SIZE], "little")
    if mask_crc(google_crc32c.value(data[offset : end + 1])) != stored:
        raise ModelError(f"the checksum of the block at byte {offset} does not match, the file is damaged")
    compression = data[end]
    if compression == _NO_COMPRESSION:
        return data[offset:end]
    if compression == _SNAPPY:
        return _decompress_snappy(data[offset:end])
    raise ModelError(f"compression {compression} is not supported")


def _iter_block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield keys and values of a block. Its tail, the restart positions, only serves random access."""
    if len(block) < 4:  # noqa: PLR2004 - the size of the number of restarts
        raise ModelError("a block is too short")
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    if end < 0:
        raise ModelError("a block has more restarts than bytes")
    position = 0
    key = b""
    while position < end:
        shared, position = read_varint(block, position)
        unshared, position = read_varint(block, position)
        length, position = read_varint(block, position)
        if shared > len(key) or position + unshared + length > end:
            raise ModelError("an entry reaches outside its block")
        key = key[:shared] + block[position : position + unshared]
        position += unshared
        yield key, block[position : position + length]
        position += length


def _decompress_snappy(data: bytes) -> bytes:
    """Decompress Snappy's raw format: literals, and copies of earlier output."""
    size, position = read_varint(data, 0)
    if size > _MAX_SNAPPY_RATIO * len(data):
        raise ModelError("a compressed block claims an impossible size")
    output = bytearray()
    while position < len(data) and len(output) <= size:
        tag, kind, position = data[position] >> 2, data[position] & 3, position + 1
        if kind == 0:  # a literal; lengths above 60 follow in 1 to 4 bytes
            length_bytes = max(0, tag - 59)
            length = (int.from_bytes(data[position : position + length_bytes], "little") if length_bytes else tag) + 1
            position += length_bytes
            if position + length > len(data):
                raise ModelError("a compressed block is cut off")
            output += data[position : position + length]
            position += length
            continue
        width = (0, 1, 2, 4)[kind]
        distance = int.from_bytes(data[position : position + width], "little")
        position += width
        length = tag + 1
        if kind == 1:  # a short copy stores the upper bits of the distance next to its length
            distance |= tag >> 3 << 8
            length = (tag & 7) + 4
        if not 0 < distance <= len(output) or position > len(data):
            raise ModelError("a compressed block copies from outside itself")
        chunk = bytes(output[-distance:][:length])
        output += (chunk * (length // len(chunk) + 1))[:length]  # a copy longer than its distance repeats itself
    if len(output) != size:
        raise ModelError("a compressed block has another size than it claims")
    return bytes(output)
