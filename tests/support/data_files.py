"""Write each kind of calibration data, and check feeds, independently of graphquant's readers."""

from __future__ import annotations

import gzip
import struct
import wave
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np
import onnx
from PIL import Image

from graphquant.formats import InputSpec

if TYPE_CHECKING:
    from pathlib import Path


SAMPLE_DATA = {
    "digits_cnn.onnx": "digits_cnn_calib.npz",
    "digits_cnn_bn.onnx": "digits_cnn_calib.npz",
    "digits_nested.onnx": "digits_nested_calib.npz",
    "digits_rnn.onnx": "digits_rnn_calib.npz",
    "digits_cnn.pbtxt": "digits_cnn_calib.npz",
    "digits_cnn.pb": "digits_cnn_calib.npz",
    "digits_rnn.pb": "digits_rnn_calib.npz",
    "digits_cnn_saved_model": "digits_cnn_calib.npz",
    "digits_rnn_saved_model": "digits_rnn_calib.npz",
}
"""The data of each sample model."""


def mask_crc(data: bytes) -> int:
    """Return the masked checksum that TFRecord files and checkpoints store."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def frame_record(record: bytes) -> bytes:
    """Return a record with its TFRecord framing."""
    length = struct.pack("<Q", len(record))
    return length + struct.pack("<I", mask_crc(length)) + record + struct.pack("<I", mask_crc(record))


def encode_varint(number: int) -> bytes:
    """Encode a number as in a protocol buffer."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def encode_field(number: int, content: bytes) -> bytes:
    """Encode a bytes field of a protocol buffer."""
    return encode_varint(number << 3 | 2) + encode_varint(len(content)) + content


def encode_example(**features) -> bytes:
    """Encode a tf.train.Example with bytes, float arrays and integer arrays by name."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, bytes):
            feature = encode_field(1, encode_field(1, value))
        elif np.asarray(value).dtype.kind == "f":
            feature = encode_field(2, encode_field(1, np.asarray(value, "<f4").tobytes()))
        else:
            feature = encode_field(
                3, encode_field(1, b"".join(encode_varint(int(one)) for one in np.asarray(value).ravel()))
            )
        entries += encode_field(1, encode_field(1, name.encode()) + encode_field(2, feature))
    return encode_field(1, entries)


def write_tfrecord(path: Path, examples: list[bytes]) -> Path:
    """Write a TFRecord file, compressed if its name ends in .gz."""
    content = b"".join(map(frame_record, examples))
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_onnx_set(folder: Path, *arrays, name: str = "") -> Path:
    """Write a folder with one TensorProto per array."""
    folder.mkdir(parents=True)
    for index, array in enumerate(arrays):
        tensor = onnx.numpy_helper.from_array(array, name)
        folder.joinpath(f"input_{index}.pb").write_bytes(tensor.SerializeToString())
    return folder


def write_wav(path: Path, values, rate: int = 16000, width: int = 2) -> Path:
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


def write_png(path: Path, pixels) -> Path:
    """Write an image, uint8 (height, width) or (height, width, channels)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, np.uint8).squeeze()).save(path)
    return path


def assert_feed(feed, **expected) -> None:
    """Assert that a feed has exactly these arrays, including dtypes and shapes."""
    assert sorted(feed) == sorted(expected)
    for name, values in expected.items():
        assert feed[name].dtype == values.dtype
        assert feed[name].shape == values.shape
        np.testing.assert_array_equal(feed[name], values)


def float_input(*shape: int | None, dtype: str = "float32", name: str = "x") -> InputSpec:
    """Return an input of a shape, float32 unless said otherwise."""
    return InputSpec(name=name, dtype=dtype, shape=shape)
