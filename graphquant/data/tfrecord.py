"""Calibration data in TFRecord files of tf.train.Example, compressed with gzip or not, read without TensorFlow."""

from __future__ import annotations

import gzip
import hashlib
import struct
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

import google_crc32c
import numpy as np
from google.protobuf.message import DecodeError

from graphquant.data.cells import filler
from graphquant.data.files import File, reading
from graphquant.data.fit import find_keys
from graphquant.data.messages import Example
from graphquant.data.samples import batch_of, one_each
from graphquant.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.data.base import Batches, Feed, Wanted
    from graphquant.data.spec import Source

MAX_RECORD_BYTES = 1 << 28
"""Largest record; a compressed one may claim any size."""

ADVICE = "See that it is a whole TFRecord file."

_MASK = 0xA282EAD8
_GZIP = b"\x1f\x8b"


def batches(source: Source, wanted: Wanted) -> Batches:
    """The examples of all files, in order. They are counted and hashed in one pass over the files' records.

    Raises:
        DataError: A file is broken, a record is no Example, or its features do not fit the inputs.
    """
    # Where the model takes k at a time, k records make a feed.
    limit = None if wanted.samples is None else wanted.samples * max(map(batch_of, wanted.inputs), default=1)
    digest = hashlib.sha256(f"{source.keys} {source.inputs} {[taker.name for taker in wanted.inputs]}\n".encode())
    counts: list[int] = []
    for file in source.files:
        left = None if limit is None else limit - sum(counts)
        counts.append(0)
        for record in _records(file, 0, left):
            digest.update(hashlib.sha256(record).digest())
            counts[-1] += 1
    fillers = {taker.name: filler(source, taker) for taker in wanted.inputs}

    def read(start: int, stop: int) -> Iterator[tuple[str, Feed]]:
        before = 0
        for file, count in zip(source.files, counts, strict=True):
            first, last = max(start - before, 0), min(stop - before, count)
            before += count
            records = _records(file, first, last) if first < last else iter(())
            for index, record in enumerate(records, first):
                where = f"{file.name}: record {index}"
                features = _features(where, record)
                keys = find_keys(where, list(features), wanted)
                feed = {}
                for taker, key in zip(wanted.inputs, keys, strict=True):
                    value = _value(f"{where}: {key!r}", features[key])
                    feed[taker.name] = fillers[taker.name](f"{where}: {key!r}", value)
                yield where, feed

    unused: list[str] = []
    for file in source.files[:1]:
        for record in _records(file, 0, 1):
            held = list(_features(f"{file.name}: record 0", record))
            unused = [name for name in held if name not in find_keys(f"{file.name}: record 0", held, wanted)]
    return one_each(source, wanted, read, count=sum(counts), digest=digest.hexdigest(), unused=unused)


def _records(file: File, start: int, stop: int | None) -> Iterator[bytes]:
    """The records from `start` up to `stop`, checksums checked; of those before only the lengths are read."""
    with reading(file, ADVICE), ExitStack() as stack:
        stream: Any = stack.enter_context(file.open())
        packed = stream.read(2) == _GZIP
        stream.seek(0)
        if packed:
            stream = stack.enter_context(gzip.GzipFile(fileobj=stream))
        index = 0
        while (stop is None or index < stop) and (head := stream.read(12)):
            length = _length(head)
            if index < start:
                stream.seek(length + 4, 1)
            else:
                record = _exactly(stream, length)
                _checked(record, _exactly(stream, 4))
                yield record
            index += 1


def _length(head: bytes) -> int:
    if len(head) < 12:  # noqa: PLR2004  # a length of 8 bytes and its checksum of 4
        raise EOFError("it ends inside a record")
    _checked(head[:8], head[8:])
    (length,) = struct.unpack("<Q", head[:8])
    if length > MAX_RECORD_BYTES:
        raise ValueError(f"a record says that it has {length} bytes")
    return int(length)


def _exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise EOFError("it ends inside a record")
    return data


def _checked(data: bytes, checksum: bytes) -> None:
    """Compares with the masked CRC-32C that a TFRecord stores."""
    crc = google_crc32c.value(data)
    masked = ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF
    if struct.pack("<I", masked) != checksum:
        raise ValueError("a checksum is wrong")


def _features(where: str, record: bytes) -> dict[str, Any]:
    try:
        example = Example.FromString(record)
        return {entry.key.decode(): entry.value for entry in example.features.feature}
    except (DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where} is no tf.train.Example: {error}. Give records of it.") from error


def _value(where: str, feature: Any) -> Any:
    """Numbers, or bytes; several byte strings are those of a string tensor."""
    if feature.HasField("float_list"):
        return np.array(feature.float_list.value, np.float32)
    if feature.HasField("int64_list"):
        return np.array(feature.int64_list.value, np.int64)
    values: Sequence[bytes] = feature.bytes_list.value
    if len(values) == 1:
        return values[0]
    if not values:
        raise DataError(f"{where} is empty. Give each record a value for each input.")
    return np.array([value.decode("utf-8", "surrogateescape") for value in values], object)
