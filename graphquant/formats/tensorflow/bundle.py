"""Adds values to a TensorFlow checkpoint (a tensor bundle, see `checkpoint`) without TensorFlow.

What is there stays as it is: its data files only get other names, as these count all files, and the new values come in
one file more. The index is written anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import google_crc32c
import numpy as np

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.table import mask_crc, read_table, varint, write_table
from graphquant.formats.tensorflow.values import type_number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["OBJECT_GRAPH", "extend"]

OBJECT_GRAPH: Final = "_CHECKPOINTABLE_OBJECT_GRAPH"
_HEADER: Final = b""


def extend(prefix: Path, values: Mapping[str, NDArray[Any]], objects: Any | None) -> None:
    """Adds to the checkpoint with the path prefix `prefix`, or makes one there.

    Args:
        prefix: For instance `model/variables/variables`. Its files are replaced and not written into, as they may be
            links to those of another model.
        values: Numbers by their new keys.
        objects: The graph of objects that is to stand for the one it has, None to leave that.

    Raises:
        ModelError: The checkpoint is damaged, or its numbers are big-endian.
    """
    index = prefix.with_name(prefix.name + ".index")
    entries = read_table(index.read_bytes(), source=str(index)) if index.is_file() else {}
    header = proto.BundleHeaderProto(num_shards=0)
    header.version.producer = 1
    if _HEADER in entries:
        header = proto.parse_binary(entries[_HEADER], proto.BundleHeaderProto(), source=f"The header of {index}")
    if header.endianness == header.BIG:
        raise ModelError(f"{index} holds big-endian numbers, to which nothing is added. Save the model again first.")
    before, header.num_shards = header.num_shards, header.num_shards + 1
    data = bytearray()
    for name in sorted(values):
        value = np.asarray(values[name], order="C")
        _add(entries, name, _entry(before, value), value.tobytes(), data)
    if objects is not None:
        entry = proto.BundleEntryProto(dtype=type_number("string"), shard_id=before)
        entry.shape.SetInParent()
        text = proto.to_binary(objects)
        length = mask_crc(google_crc32c.value(len(text).to_bytes(4, "little"))).to_bytes(4, "little")
        _add(entries, OBJECT_GRAPH, entry, varint(len(text)) + length + text, data)
        # The checksum takes the length as a number of fixed width, not as the bytes that are stored.
        whole = google_crc32c.extend(google_crc32c.value(len(text).to_bytes(4, "little")), length)
        entry.crc32c = mask_crc(google_crc32c.extend(whole, text))
        entries[OBJECT_GRAPH.encode()] = proto.to_binary(entry)
    entries[_HEADER] = proto.to_binary(header)
    _write(prefix, index, before, bytes(data), write_table(entries))


def _entry(shard: int, value: NDArray[Any]) -> Any:
    entry = proto.BundleEntryProto(dtype=type_number(value.dtype.name), shard_id=shard)
    entry.shape.SetInParent()
    for size in value.shape:
        entry.shape.dim.add(size=size)
    return entry


def _add(entries: dict[bytes, bytes], name: str, entry: Any, content: bytes, data: bytearray) -> None:
    """Appends the bytes of one value to the new data file, and its entry to the index."""
    entry.offset, entry.size = len(data), len(content)
    entry.crc32c = mask_crc(google_crc32c.value(content))
    data += content
    entries[name.encode()] = proto.to_binary(entry)


def _write(prefix: Path, index: Path, before: int, data: bytes, table: bytes) -> None:
    prefix.parent.mkdir(exist_ok=True)
    for shard in range(before):
        _shard(prefix, shard, before).replace(_shard(prefix, shard, before + 1))
    new = _shard(prefix, before, before + 1)
    for path, content in ((new, data), (index, table)):
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def _shard(prefix: Path, shard: int, shards: int) -> Path:
    return prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{shards:05d}")
