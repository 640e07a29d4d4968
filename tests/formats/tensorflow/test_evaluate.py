"""The numpy versions of operations on weights agree with TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from graphquant.formats.tensorflow import load, proto
from graphquant.formats.tensorflow.values import encode_attr, encode_tensor, evaluate_tf_op
from graphquant.ir import DataType, Op, Parameters, TensorRef

if TYPE_CHECKING:
    from pathlib import Path

X = np.arange(-12, 12, dtype=np.float32).reshape(2, 3, 4) / 5
I32 = np.int32
F32 = DataType("float32")
CASES: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("Reshape", {}, [X, I32([4, -1])]),
    ("Transpose", {}, [X, I32([2, 0, 1])]),
    ("ExpandDims", {}, [X, I32(-2)]),
    ("Squeeze", {"squeeze_dims": [0, 2]}, [X.reshape(1, 24, 1)]),
    ("Squeeze", {}, [X.reshape(1, 24, 1)]),
    ("Cast", {"SrcT": F32, "DstT": DataType("int32")}, [X * 5]),
    ("Cast", {"SrcT": F32, "DstT": DataType("bfloat16")}, [X]),
    ("Mul", {}, [X, X[:1]]),
    ("Add", {}, [X, X[0]]),
    ("AddV2", {}, [X, np.float32(0.3)]),
    ("Sub", {}, [X, X[:, :1]]),
    ("RealDiv", {}, [X, X + np.float32(9)]),
    ("Maximum", {}, [X, -X]),
    ("Minimum", {}, [X, -X]),
    ("Neg", {}, [X]),
    ("Square", {}, [X]),
    ("Sqrt", {}, [X + np.float32(4)]),
    ("Rsqrt", {}, [X + np.float32(4)]),
    ("Slice", {}, [X, I32([0, 1, 1]), I32([1, -1, 2])]),
    (
        "StridedSlice",
        {"begin_mask": 1, "end_mask": 3, "shrink_axis_mask": 4},
        [X, I32([0, 1, -1]), I32([0, 0, 9]), I32([1, 1, 1])],
    ),
    ("StridedSlice", {"ellipsis_mask": 1, "new_axis_mask": 2}, [X, I32([0, 0, 3]), I32([0, 0, 0]), I32([1, 1, -2])]),
    ("ConcatV2", {"N": 2}, [X, X[:, :1], I32(1)]),
    ("Pack", {"N": 2, "axis": 1}, [X, -X]),
    ("Split", {"num_split": 3}, [I32(1), X]),
    ("SplitV", {"num_split": 2}, [X, I32([1, -1]), I32(2)]),
]


def make_tf_op(op_type: str, attrs: dict[str, Any]) -> Op:
    """Return an op of that type."""
    return Op(name="op", kind="other", type=op_type, attrs=attrs)


@pytest.mark.slow
@pytest.mark.parametrize(("op_type", "attrs", "inputs"), CASES)
def test_as_tensorflow_computes(op_type: str, attrs: dict[str, Any], inputs: list[Any], tmp_path: Path) -> None:
    """A chain of constants has the same value as in a session."""
    tf = pytest.importorskip("tensorflow")
    graph = proto.GraphDef()
    graph.versions.producer = 1200
    result = graph.node.add(name="result", op=op_type)
    for index, value in enumerate(inputs):
        tensor = encode_tensor(np.asarray(value))
        node = graph.node.add(name=f"c{index}", op="Const")
        node.attr["dtype"].type = tensor.dtype
        node.attr["value"].tensor.CopyFrom(tensor)
        result.input.append(node.name)
    for name, value in attrs.items():
        result.attr[name].CopyFrom(encode_attr(value))
    if op_type != "Cast":
        result.attr["T"].type = proto.DataType["DT_FLOAT"]
    if op_type in {"Slice", "StridedSlice"}:
        result.attr["Index"].type = proto.DataType["DT_INT32"]
    if op_type == "SplitV":
        result.attr["Tlen"].type = proto.DataType["DT_INT32"]
    (tmp_path / "m.pb").write_bytes(proto.to_binary(graph))
    model = load(tmp_path / "m.pb")
    ports = [TensorRef("", "result", port) for port in range(len(model.main.op("result").outputs))]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.import_graph_def(tf.compat.v1.GraphDef.FromString(proto.to_binary(graph)), name="")
        expected = session.run([str(port) for port in ports])
    parameters = Parameters(model)
    for port, reference in zip(ports, expected, strict=True):
        got = parameters.value(port)
        assert (got.dtype, got.shape) == (reference.dtype, reference.shape)
        tolerance = 1e-6 if op_type == "Rsqrt" else 0
        np.testing.assert_allclose(got.astype(np.float64), reference.astype(np.float64), rtol=tolerance)


@pytest.mark.parametrize(
    ("op_type", "attrs", "inputs"),
    [
        ("Conv2D", {}, [X, X]),
        ("Reshape", {}, [X, I32([7, 7])]),
        ("Mul", {}, [X, X.astype(np.float64)]),
        ("Mul", {}, [np.broadcast_to(np.float32(1), (1 << 15, 1)), np.broadcast_to(np.float32(1), (1, 1 << 15))]),
        ("ExpandDims", {}, [X, I32(9)]),
        ("Split", {"num_split": 1 << 40}, [I32(1), X]),
        ("RealDiv", {}, [I32(4), I32(0)]),
        ("StridedSlice", {}, [X, I32([5]), I32([6]), I32([0])]),
        ("Pack", {}, []),
        ("Cast", {}, [X]),
    ],
)
def test_not_evaluated(op_type: str, attrs: dict[str, Any], inputs: list[Any]) -> None:
    """Other operations, invalid inputs and results of impossible size have no value and do no harm."""
    assert evaluate_tf_op(make_tf_op(op_type, attrs), [np.asarray(value) for value in inputs]) is None


def test_unknown_value_of_a_chain(tmp_path: Path) -> None:
    """A parameter with an unsupported operation in its chain has no value."""
    (tmp_path / "m.pbtxt").write_text(
        'node { name: "c" op: "Const" attr { key: "dtype" value { type: DT_FLOAT } }'
        ' attr { key: "value" value { tensor { dtype: DT_FLOAT tensor_shape { } float_val: 2 } } } }'
        ' node { name: "e" op: "Exp" input: "c" attr { key: "T" value { type: DT_FLOAT } } }'
    )
    parameters = Parameters(load(tmp_path / "m.pbtxt"))
    assert parameters.is_parameter(TensorRef("", "e"))
    assert parameters.value(TensorRef("", "e")) is None
