"""Writers of each kind of calibration data, independent of graphquant's readers."""

from __future__ import annotations

import gzip
import struct
import sys
import wave
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import onnx
import pytest
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def stored():
    """Return this module with its writers."""
    return sys.modules[__name__]


def masked(data: bytes) -> bytes:
    """Return the masked checksum of a TFRecord."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def framed(record: bytes) -> bytes:
    """Return a record with its TFRecord framing."""
    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)


def varint(number: int) -> bytes:
    """Encode a number as in a protocol buffer."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def message(number: int, content: bytes) -> bytes:
    """Encode a bytes field of a protocol buffer."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(**features) -> bytes:
    """Encode a tf.train.Example with bytes, float arrays and integer arrays by name."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = message(1, message(1, value))
        elif np.asarray(value).dtype.kind == "f":
            feature = message(2, message(1, np.asarray(value, "<f4").tobytes()))
        else:
            feature = message(3, message(1, b"".join(varint(int(one)) for one in np.asarray(value).ravel())))
        entries += message(1, message(1, name.encode()) + message(2, feature))
    return message(1, entries)


def tfrecord(path: Path, examples: list[bytes]) -> Path:
    """Write a TFRecord file, compressed if its name ends in .gz."""
    content = b"".join(map(framed, examples))
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def onnx_set(folder: Path, *arrays, name: str = "") -> Path:
    """Write a folder with one TensorProto per array."""
    folder.mkdir(parents=True)
    for index, array in enumerate(arrays):
        tensor = onnx.numpy_helper.from_array(array, name)
        folder.joinpath(f"input_{index}.pb").write_bytes(tensor.SerializeToString())
    return folder


def wav(path: Path, values, rate: int = 16000, width: int = 2) -> Path:
    """Write a PCM wav file of integers, (time,) or (time, channels)."""
    array = np.asarray(values)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if array.ndim == 1 else array.shape[1])
        file.setsampwidth(width)
        file.setframerate(rate)
        if width == 1:
            file.writeframes((array + 128).astype(np.uint8).tobytes())
        else:
            wide = array.astype("<i4").reshape(-1, 1).view(np.uint8).reshape(-1, 4)
            file.writeframes(wide[:, :width].tobytes())
    return path


def png(path: Path, pixels) -> Path:
    """Write an image, uint8 (height, width) or (height, width, channels)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8).squeeze()).save(path)
    return path


def same(feed, **expected) -> None:
    """Assert that a feed has exactly these arrays, including dtypes and shapes."""
    assert sorted(feed) == sorted(expected)
    for name, values in expected.items():
        assert feed[name].dtype == values.dtype
        assert feed[name].shape == values.shape
        np.testing.assert_array_equal(feed[name], values)
