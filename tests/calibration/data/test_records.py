"""TFRecord, Parquet and ONNX test sets: supported values, and errors."""

from __future__ import annotations

import gzip
import re
import struct

import ml_dtypes
import numpy as np
import onnx
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from support.data_files import (
    assert_feed,
    encode_example,
    float_input,
    frame_record,
    mask_crc,
    write_onnx_set,
    write_tfrecord,
)

from graphquant.calibration.data import open_data
from graphquant.calibration.data import records as tfrecord
from graphquant.calibration.data.records import Example
from graphquant.errors import DataError, MissingDependencyError

X = float_input(None, 2)


def test_features(tmp_path) -> None:
    """Floats, integers, bytes of numbers and strings are read. An unused label is listed."""
    records = [
        encode_example(
            x=np.array([i, 2.5]), n=np.array([-i, 7]), raw=np.array([i, 1], "<f8").tobytes(), s=b"caf\xc3\xa9", y=[1]
        )
        for i in range(3)
    ]
    path = write_tfrecord(tmp_path / "a.tfrecord", records)
    takers = [X, float_input(1, 2, dtype="int32", name="n"), float_input(2, dtype="float64", name="raw")]
    takers.append(float_input(None, dtype="string", name="s"))
    batches = open_data(str(path), takers)
    assert (batches.count, batches.ignored) == (3, ("y",))
    assert next(batches.feeds_between(2, 3))["s"].tolist() == ["café"]
    feed = next(batches.feeds_between(2, 3))
    assert {key: feed[key].tolist() for key in ("x", "n", "raw")} == {"x": [[2, 2.5]], "n": [[-2, 7]], "raw": [2, 1]}
    assert [feed[key].dtype.name for key in ("x", "n", "raw")] == ["float32", "int32", "float64"]


@pytest.mark.parametrize(
    ("features", "one", "message"),
    [
        ({"x": [1.0]}, X, r"record 0: 'x' has 1 values,.*'x' takes \[\?, 2\]"),
        ({"x": [1, 2]}, X, "record 0 is int64,.*'x'.* float32"),
        ({"x": [np.nan, 1.0]}, X, "record 0 has 1 NaN"),
        ({"y": [1.0]}, X, r"record 0 .*'x'\..* 'y'"),
        ({"x": b"abc"}, X, "record 0: 'x' has 3 bytes,.* float32"),
        (
            {"x": [1.0, 2.0]},
            float_input(None, None, None),
            r"2 values,.*'x' takes \[\?, \?, \?\]",
        ),
        ({"x": b"\x89PNG"}, float_input(1, 3, 5, 5), "preset=imagenet"),
    ],
)
def test_invalid_features(tmp_path, features, one, message: str) -> None:
    """The error names the record, the feature and a fix."""
    path = write_tfrecord(tmp_path / "a.tfrecord", [encode_example(**features)])
    with pytest.raises(DataError, match=message):
        open_data(str(path), [one])


def test_invalid_records(tmp_path, monkeypatch) -> None:
    """Wrong checksums, invalid lengths, other messages and empty files are rejected."""
    good = frame_record(encode_example(x=[1.0, 2.0]))
    huge = struct.pack("<Q", 1 << 40)
    for content, message in (
        (good[:12] + b"\0" + good[13:], "a checksum is wrong"),
        (good[:8] + b"\0\0\0\0" + good[12:], "a checksum is wrong"),
        (huge + mask_crc(huge).to_bytes(4, "little"), "claims to have 1099511627776 bytes"),
        (gzip.compress(huge + mask_crc(huge).to_bytes(4, "little")), "claims to have 1099511627776 bytes"),
        (gzip.compress(good)[:-12], "cannot be read"),
        (good[:-2], "it ends inside a record"),
        (good + good[:5], "it ends inside a record"),
        (frame_record(b"\xff\xff"), "record 0 .*tf.train.Example"),
        (b"", "contains no samples"),
    ):
        (tmp_path / "a.tfrecord").write_bytes(content)
        with pytest.raises(DataError, match=message):
            list(open_data(str(tmp_path / "a.tfrecord"), [X]))
    monkeypatch.setattr(tfrecord, "MAX_RECORD_BYTES", 4)
    (tmp_path / "a.tfrecord").write_bytes(gzip.compress(good))
    with pytest.raises(DataError, match=r"a\.tfrecord.*record claims.* bytes"):
        open_data(str(tmp_path / "a.tfrecord"), [X])


@given(st.binary(max_size=60))
def test_any_bytes_as_example(content: bytes) -> None:
    """Arbitrary bytes as an Example raise at most a DataError."""
    try:
        tfrecord._parse_features("here", content)
    except DataError as error:
        assert re.match("here .*tf.train.Example", str(error))  # noqa: PT017  # either end is right


@pytest.mark.slow
def test_files_of_tensorflow(tmp_path) -> None:
    """Files of TensorFlow's writer are read, compressed or not."""
    import tensorflow as tf

    example = tf.train.Example()
    example.features.feature["x"].float_list.value.extend([1.0, 2.5])
    example.features.feature["n"].int64_list.value.extend([-3])
    for name, kind in (("a.tfrecord", ""), ("b.tfrecord", "GZIP")):
        with tf.io.TFRecordWriter(str(tmp_path / name), kind) as writer:
            writer.write(example.SerializeToString())
        (feed,) = open_data(str(tmp_path / name), [X, float_input(1, dtype="int64", name="n")])
        assert (feed["x"].tolist(), feed["n"].tolist()) == ([[1.0, 2.5]], [-3])
    assert Example.FromString(example.SerializeToString()).features.feature[0].key in {b"x", b"n"}


def test_columns(tmp_path) -> None:
    """Numbers, nested lists, tensors of Arrow and strings feed inputs and keep their dtypes."""
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(12, dtype=np.float32).reshape(3, 2, 2))
    table = pa.table(
        {
            "x": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)),
            "deep": pa.array([[[1.5, 2]], [[3, 4]], [[5, 6]]], pa.list_(pa.large_list(pa.float64()))),
            "n": pa.array([1, 2, 3], pa.int8()),
            "t": tensors,
            "s": ["a", "b", "c"],
            "label": [0, 1, 0],
        }
    )
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    takers = [
        X,
        float_input(1, 1, 2, name="deep"),
        float_input(None, dtype="int64", name="n"),
        float_input(1, 2, 2, name="t"),
    ]
    takers.append(float_input(1, dtype="string", name="s"))
    batches = open_data(str(tmp_path / "a.parquet"), takers)
    assert batches.ignored == ("label",)
    feed = next(batches.feeds_between(2, 3))
    wanted = {"x": [[5, 6]], "deep": [[[5, 6]]], "n": [3], "t": [[[8, 9], [10, 11]]], "s": ["c"]}
    assert {key: values.tolist() for key, values in feed.items()} == wanted
    assert [feed[key].dtype.name for key in ("x", "deep", "n")] == ["float32", "float32", "int64"]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([[1.0, 2.0], None]), "row 1: 'x' is null"),
        (pa.array([[1.0, None], [1.0, 2.0]]), "row 0: 'x' contains null"),
        (pa.array([{"a": 1}, {"a": 2}]), "row 0: 'x' .*struct"),
        (pa.array([[1, 2], [3, 4]]), "row 0 is int64, but input 'x' takes float32"),
        (pa.array([[1.0], [2.0]]), "row 0: 'x' has 1 values"),
        (pa.array(["a", "b"]), "row 0: 'x' has 1 values|is object|is <U1"),
    ],
)
def test_invalid_columns(tmp_path, column, message: str) -> None:
    """The error names the row and the column."""
    parquet.write_table(pa.table({"x": column}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=message):
        list(open_data(str(tmp_path / "a.parquet"), [X]))


def test_no_pyarrow(tmp_path, monkeypatch) -> None:
    """Without pyarrow, the error contains the install command."""
    parquet.write_table(pa.table({"x": [[1.0, 2.0]]}), tmp_path / "a.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingDependencyError, match=r"pyarrow\..*: pip install 'graphquant"):
        open_data(str(tmp_path / "a.parquet"), [X])


@pytest.mark.parametrize(
    "array",
    [np.array([[1.5, -2]], dtype) for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)]
    + [
        np.array([[1, 2]], dtype)
        for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.int32, np.int64, np.uint64, bool)
    ],
)
@pytest.mark.parametrize("raw", [True, False])
def test_tensors(tmp_path, array, raw: bool) -> None:
    """Each type of TensorProto is read, as raw data or from its field."""
    if raw:
        write_onnx_set(tmp_path / "test_data_set_0", array)
    else:
        (tmp_path / "test_data_set_0").mkdir()
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = onnx.helper.make_tensor("x", kind, array.shape, array.ravel())
        assert not tensor.raw_data
        (tmp_path / "test_data_set_0/input_0.pb").write_bytes(tensor.SerializeToString())
    (feed,) = open_data(str(tmp_path), [float_input(None, 2, dtype=array.dtype.name)])
    assert_feed(feed, x=array)


def test_names_of_tensors(tmp_path) -> None:
    """Tensors feed the inputs of their names, otherwise by number. Numbers are sorted numerically."""
    one, two = np.ones((1, 2), np.float32), np.zeros((1, 2), np.float32)
    (tmp_path / "s").mkdir()
    for index, (name, array) in enumerate([("y", two), ("x", one)]):
        tensor = onnx.numpy_helper.from_array(array, name)
        (tmp_path / f"s/input_{index}.pb").write_bytes(tensor.SerializeToString())
    (feed,) = open_data(str(tmp_path), [X, float_input(None, 2, name="y")])
    assert_feed(feed, x=one, y=two)
    takers = [float_input(1, name=f"n{index}") for index in range(11)]
    write_onnx_set(tmp_path / "many", *(np.array([float(index)], np.float32) for index in range(11)))
    (feed,) = open_data(str(tmp_path / "many"), takers)
    assert [feed[one.name].item() for one in takers] == list(range(11))


def test_invalid_sets(tmp_path) -> None:
    """Sequences, external data, missing files and wrong shapes are rejected."""
    folder = tmp_path / "test_data_set_0"
    write_onnx_set(folder, np.ones((1, 2), np.float32))
    path = folder / "input_0.pb"
    good = onnx.TensorProto.FromString(path.read_bytes())
    lying, outside = onnx.TensorProto.FromString(path.read_bytes()), onnx.TensorProto.FromString(path.read_bytes())
    lying.dims[0] = 1 << 40
    outside.data_location = onnx.TensorProto.EXTERNAL
    sequence = onnx.numpy_helper.from_list([np.ones(2, np.float32)], "x")
    for content, message in (
        (sequence.SerializeToString(), "sequence"),
        (outside.SerializeToString(), "its values are in another file"),
        (lying.SerializeToString(), "it has 2 values for the shape"),
        (b"\xff", "it is not a tensor"),
        (b"", "a tensor of the type 0"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"input_0.pb cannot be read: .*{message}.* Use a TensorProto"):
            open_data(str(tmp_path), [X])
    path.write_bytes(good.SerializeToString())
    with pytest.raises(DataError, match=r"1 inputs,.* 'x', 'y'"):
        open_data(str(tmp_path), [X, float_input(1, name="y")])
