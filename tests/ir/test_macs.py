"""Multiply-adds of ops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser
import pytest

import graphquant as gq
from graphquant.formats import format_module
from graphquant.ir import count_macs, unsized_tensors

if TYPE_CHECKING:
    from pathlib import Path

NETS = {
    "conv": ("float[N, 4, 10, 10] x", "y = Conv<pads = [1, 1, 1, 1]>(x, w)", (8, 4, 3, 3), 8 * 100 * 4 * 9),
    "grouped": ("float[N, 4, 10, 10] x", "y = Conv<group = 2>(x, w)", (8, 2, 3, 3), 8 * 64 * 2 * 9),
    "depthwise": ("float[N, 4, 10, 10] x", "y = Conv<group = 4>(x, w)", (4, 1, 3, 3), 4 * 64 * 9),
    "transpose": ("float[N, 4, 5, 5] x", "y = ConvTranspose<strides = [2, 2]>(x, w)", (4, 6, 3, 3), 4 * 25 * 6 * 9),
    "matmul": ("float[N, 7, 5] x", "y = MatMul(x, w)", (5, 3), 7 * 5 * 3),
    "gemm": ("float[1, 5] x", "y = Gemm<transB = 1>(x, w)", (3, 5), 5 * 3),
    "turned": ("float[5, 2] x", "y = Gemm<transA = 1>(x, w)", (5, 3), 2 * 5 * 3),
    "unknown input": ("float[N, 7, K] x", "y = MatMul(x, w)", (5, 3), 7 * 5 * 3),
    "unknown input, turned weight": ("float[1, K] x", "y = Gemm<transB = 1>(x, w)", (3, 5), 5 * 3),
    "unknown input, vector": ("float[N, 7, K] x", "y = MatMul(x, w)", (5,), 7 * 5),
    "einsum": ("float[N, 7, 5] x", 'y = Einsum<equation = "bik,kj->bij">(x, w)', (5, 3), 7 * 5 * 3),
    "einsum, two sums": (
        "float[N, 7, 5] x",
        'y = Einsum<equation = "...ik, ikj->...j">(x, w)',
        (7, 5, 3),
        7 * 5 * 3,
    ),
    "einsum, empty sum": ("float[N, 0] x", 'y = Einsum<equation = "ik,kj->ij">(x, w)', (0, 3), 0),
    "einsum without result": ("float[N, 7, 5] x", 'y = Einsum<equation = "bik,kj">(x, w)', (5, 3), 7 * 5 * 3),
    "unknown right": ("float[N, 7, 5] x, float[K, 3] v", "y = MatMul(x, v)", (1,), 7 * 3 * 5),
    "unknown left": ("float[N, 7, K] x, float[5, 3] v", "y = MatMul(x, v)", (1,), 7 * 3 * 5),
    "itself": ("float[N, 6, 5] x", "t = Transpose<perm = [0, 2, 1]>(x) y = MatMul(x, t)", (1,), 6 * 6 * 5),
}


@pytest.mark.parametrize("name", NETS)
def test_counts(name: str, tmp_path: Path) -> None:
    """Counts follow the definition of each op, for one sample."""
    inputs, body, shape, expected = NETS[name]
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> net ({inputs}) => (y) {{ {body} }}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), "w"))
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "m.onnx")
    loaded = gq.load(tmp_path / "m.onnx")
    assert unsized_tensors(loaded) == []
    assert list(count_macs(loaded).values()) == [expected]


def load_text(text: str, folder: Path, shape: tuple[int, ...]) -> gq.Model:
    """Load a graph with a weight `w` of ones, without inferred shapes."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> net {text}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), "w"))
    onnx.save(model, folder / "m.onnx")
    return gq.load(folder / "m.onnx")


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("(float[N, 4, 9, 9] x, float[A, B, C, D] v) => (float[N, 8, 7, 7] y) { y = Conv(x, v) }", (1,)),
        ("(float[N, 0, 5, 5] x) => (float[N, 6, 7, 7] y) { y = ConvTranspose(x, w) }", (0, 6, 3, 3)),
        ('(float x) => (float[2, 3] y) { y = Einsum<equation = "i...k,kj->ij">(x, w) }', (5, 3)),
        ('(float[2] x) => (float[2, 3] y) { y = Einsum<equation = "i...k,kj->ij">(x, w) }', (5, 3)),
        ("(float[N, 4] x) => (float[N, 6] y) { y = LSTM<hidden_size = 6>(, w, w) }", (1, 24, 6)),
        ("(float[N, 4] x, float[N, 2] r) => (float[N, 4] y) { y = com.microsoft.MoE<k = 1>(x, r, w, , w) }", ()),
        ("(float[N, 4] x, float[N, 2] r) => (float[N, 4] y) { y = com.microsoft.MoE<k = 1>(x, r, w, , w) }", (0, 8, 4)),
    ],
    ids=[
        *("weight of unknown sizes", "empty weight", "unknown rank", "rank below the equation's", "no input"),
        *("experts without axes", "no experts"),
    ],
)
def test_ops_without_a_count(text: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """An op whose sizes are unknown, empty or contradictory is omitted."""
    loaded = load_text(text, tmp_path, shape)
    assert count_macs(loaded) == {}
    assert all(tensor.op for tensor in unsized_tensors(loaded))


def test_einsum_with_fewer_operands_than_terms(tmp_path: Path) -> None:
    """The sizes of a missing operand are not needed if others have them."""
    text = '(float[2, 5] x) => (float[2, 3] y) { y = Einsum<equation = "ik,kj->ij">(x) }'
    assert list(count_macs(load_text(text, tmp_path, (1,))).values()) == [2 * 3 * 5]


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_ops(op: str, gates: int, tmp_path: Path) -> None:
    """A recurrent op multiplies its input and its state in each of 6 time steps: 5 features, 3 hidden units."""
    text = f"net (float[6, 1, 5] x) => (y) {{ y = {op}<hidden_size = 3>(x, w, r) }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]> {text}')
    for name, columns in (("w", 5), ("r", 3)):
        weight = np.ones((1, gates * 3, columns), np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "m.onnx")
    assert list(count_macs(gq.load(tmp_path / "m.onnx")).values()) == [6 * gates * 3 * (5 + 3)]


def test_unknown_sizes_are_measured(samples: Path) -> None:
    """Measured sizes replace unknown static shapes. Without them the op is omitted."""
    model = gq.load(samples / "digits_rnn.onnx")
    tensors = unsized_tensors(model)
    assert {"query/matmul", "scores", "attended"} < {tensor.op for tensor in tensors}
    few = count_macs(model)
    assert not {("", tensor.op) for tensor in tensors} & few.keys()
    feed = {"image": np.load(samples / "digits_rnn_calib.npz")["image"][:1]}
    sizes = format_module("onnx").create_runner(model).element_counts(tensors, feed)
    macs = count_macs(model, sizes)
    steps = 8
    width = sizes[gq.TensorRef("", "query/matmul")] // steps
    assert macs["", "scores"] == steps * steps * width


def test_tensorflow_counts_as_onnx_does(samples: Path) -> None:
    """A SavedModel and the same model in ONNX have the same number of multiply-adds."""
    onnx_macs, tensorflow_macs = (
        count_macs(gq.load(samples / f"digits_cnn{end}")) for end in (".onnx", "_saved_model")
    )
    assert sum(onnx_macs.values()) == sum(tensorflow_macs.values()) == 113_984


TRANSPOSED_CONVOLUTION = """
node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } attr { key: "shape" value { shape {
    dim { size: -1 } dim { size: 5 } dim { size: 5 } dim { size: 4 } } } } }
node { name: "w" op: "Const" attr { key: "dtype" value { type: DT_FLOAT } } attr { key: "value" value { tensor {
    dtype: DT_FLOAT float_val: 1
    tensor_shape { dim { size: 3 } dim { size: 3 } dim { size: 6 } dim { size: 4 } } } } } }
node { name: "s" op: "Const" attr { key: "dtype" value { type: DT_INT32 } } attr { key: "value" value { tensor {
    dtype: DT_INT32 int_val: [1, 7, 7, 6] tensor_shape { dim { size: 4 } } } } } }
node { name: "y" op: "Conv2DBackpropInput" input: "s" input: "w" input: "x" attr { key: "T" value { type: DT_FLOAT } }
    attr { key: "strides" value { list { i: [1, 1, 1, 1] } } } attr { key: "padding" value { s: "VALID" } } }
"""


def test_transposed_convolution_in_tensorflow(tmp_path: Path) -> None:
    """Each of 5x5x4 elements of the input is multiplied by 3x3x6 weights, whose input channels are the last axis."""
    (tmp_path / "model.pbtxt").write_text(TRANSPOSED_CONVOLUTION, "utf-8")
    assert count_macs(gq.load(tmp_path / "model.pbtxt")) == {("", "y"): 5 * 5 * 4 * 3 * 3 * 6}


def test_partly_known_operand(tmp_path: Path) -> None:
    """The known axis of an operand is enough if the size of the result was measured."""
    text = "(float[N, 7, K] x, float[5, M] v) => (float[N, 7, M] y) { y = MatMul(x, v) }"
    loaded = load_text(text, tmp_path, (1,))
    assert count_macs(loaded, {gq.TensorRef("", "y"): 7 * 3}) == {("", "y"): 7 * 3 * 5}
