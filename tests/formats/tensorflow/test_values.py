"""TensorProto and AttrValue round-trip arrays and attributes, as TensorFlow reads and writes them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from graphquant.errors import ModelError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.values import (
    FunctionName,
    NodeAttrs,
    decode_attr,
    decode_tensor,
    encode_attr,
    encode_tensor,
)
from graphquant.ir import DataType

DTYPES = [
    *(
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
    ),
    *("complex64", "complex128"),
]
LISTED = [
    ("DT_FLOAT", "float_val: 1.5 float_val: -2", [1.5, -2, -2]),
    ("DT_DOUBLE", "double_val: 0.25", [0.25, 0.25, 0.25]),
    ("DT_INT8", "int_val: 3 int_val: -4 int_val: 5", [3, -4, 5]),
    ("DT_UINT16", "int_val: 65535 int_val: 0", [65535, 0, 0]),
    ("DT_INT64", "int64_val: -9", [-9, -9, -9]),
    ("DT_UINT64", "uint64_val: 18446744073709551615", [2**64 - 1] * 3),
    ("DT_BOOL", "bool_val: true bool_val: false", [True, False, False]),
    ("DT_HALF", "half_val: 15360 half_val: 49152", [1, -2, -2]),
    ("DT_BFLOAT16", "half_val: 16256 half_val: 49152", [1, -2, -2]),
    ("DT_COMPLEX64", "scomplex_val: 1 scomplex_val: 2", [1 + 2j] * 3),
    ("DT_STRING", 'string_val: "a" string_val: "b"', [b"a", b"b", b"b"]),
    ("DT_INT32", "", [0, 0, 0]),
    ("DT_STRING", "", [b"", b"", b""]),
]
attributes = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(width=32, allow_nan=False),
    st.booleans(),
    st.text(),
    st.sampled_from([DataType("float32"), DataType("string"), FunctionName("f"), None]),
    st.lists(st.none() | st.integers(0, 2**40), max_size=3).map(tuple),
)


@given(st.sampled_from(DTYPES).flatmap(lambda name: npst.arrays(name, npst.array_shapes(min_dims=0, min_side=0))))
def test_tensor_round_trip(value: np.ndarray[Any, Any]) -> None:
    """An array of any dtype and shape round-trips bit for bit."""
    decoded = decode_tensor(encode_tensor(value), "it")
    assert (decoded.dtype, decoded.shape) == (value.dtype, value.shape)
    assert decoded.tobytes() == value.tobytes()


def test_other_layouts() -> None:
    """Big-endian, strided and string arrays are stored by value."""
    big = np.arange(6, dtype=">i4").reshape(2, 3).T
    np.testing.assert_array_equal(decode_tensor(encode_tensor(big), "it"), [[0, 3], [1, 4], [2, 5]])
    words = np.array(["ä", "b"])
    assert decode_tensor(encode_tensor(words), "it").tolist() == ["ä".encode(), b"b"]
    small = np.array([1, -3], ml_dtypes.bfloat16)
    assert decode_tensor(encode_tensor(small), "it").tolist() == [1, -3]


@pytest.mark.parametrize(("dtype", "values", "expected"), LISTED)
def test_listed_values(dtype: str, values: str, expected: list[Any]) -> None:
    """Values may be listed in a field; the last one repeats, and an empty list means zeros."""
    text = f"dtype: {dtype} tensor_shape {{ dim {{ size: 3 }} }} {values}"
    got = decode_tensor(proto.parse_text(text, proto.TensorProto()), "it")
    assert got.tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "values", "expected"), LISTED)
def test_as_tensorflow_reads(dtype: str, values: str, expected: list[Any]) -> None:
    """TensorFlow reads the same values from the same message."""
    tf = pytest.importorskip("tensorflow")
    text = f"dtype: {dtype} tensor_shape {{ dim {{ size: 3 }} }} {values}"
    message = proto.parse_text(text, proto.TensorProto())
    theirs = tf.make_ndarray(type(tf.make_tensor_proto(0)).FromString(message.SerializeToString()))
    # Its numpy form of missing strings is text.
    assert [item.encode() if isinstance(item, str) else item for item in theirs.tolist()] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtype: DT_FLOAT tensor_shape { dim { size: 3 } } float_val: [1, 2, 3, 4]", r"'c' .* 4 values .*\(3,\)"),
        ("dtype: DT_FLOAT tensor_shape { dim { size: 3 } } tensor_content: 'abc'", "3 bytes"),
        ("dtype: DT_FLOAT tensor_shape { unknown_rank: true }", "'c' .*usable shape"),
        ("dtype: DT_FLOAT tensor_shape { dim { size: -1 } }", "'c' .*usable shape"),
        ("dtype: DT_RESOURCE tensor_shape { }", "resource"),
        ("tensor_shape { }", "unknown type"),
        ("dtype: DT_INT8 tensor_shape { dim { size: 1099511627776 } } int_val: 1", "claims 1099511627776 elements"),
    ],
)
def test_damaged_tensor(text: str, message: str) -> None:
    """An invalid TensorProto is refused without allocating the claimed array."""
    with pytest.raises(ModelError, match=message):
        decode_tensor(proto.parse_text(text, proto.TensorProto()), "the constant 'c'")


@pytest.mark.slow
@given(attributes | st.lists(st.integers(0, 9), min_size=1) | st.lists(st.text(), min_size=1))
def test_attribute_round_trip(value: Any) -> None:
    """An attribute of any kind round-trips with value and type."""
    decoded = decode_attr(encode_attr(value))
    assert decoded == value
    assert type(decoded) is type(value)


def test_attrs() -> None:
    """A node's attributes behave like a mapping with defaults, and reading does not change the node."""
    node = proto.parse_text('attr { key: "b" value { s: "\\377" } } attr { key: "a" value { i: 2 } }', proto.NodeDef())
    attrs = NodeAttrs(node.attr, {"a": 1, "c": 3})
    assert dict(attrs) == {"a": 2, "b": b"\xff", "c": 3}
    assert attrs.get("none") is None
    assert len(attrs) == 3
    assert sorted(node.attr) == ["a", "b"]
