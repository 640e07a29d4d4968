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
    "einsum without result": ("float[N, 7, 5] x", 'y = Einsum<equation = "bik,kj">(x, w)', (5, 3), 7 * 5 * 3),
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
