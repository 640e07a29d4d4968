"""SmoothQuant is applied only for a gain that is worth it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser

import graphquant as gq
from graphquant.optimize.smoothquant import MIN_GAIN_DB, SMALL_GAIN

if TYPE_CHECKING:
    from pathlib import Path

RULES = """
[scheme.weight]
dtype = "int8"
zero = "symmetric"
per = "channel"
observe = "absmax"
[scheme.activation]
dtype = "uint8"
observe = "minmax"
[[rule]]
name = "weight"
producer = { kind = "parameter" }
consumer = { kind = "matmul", input = "weight" }
quantize = "weight"
[[rule]]
name = "input"
consumer = { kind = "matmul", input = "input" }
quantize = "activation"
"""


def test_a_small_predicted_gain_is_not_taken(tmp_path: Path) -> None:
    """Nearly even channels stay as they are, with the required gain as the reason."""
    rng = np.random.default_rng(3)
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,16,8] x) => (float[N,16,6] y)'
        " { l = LayerNormalization <axis = -1> (x, g, o) y = MatMul (l, u) }"
    )
    model = onnx.parser.parse_model(text)
    values = {"g": np.linspace(0.9, 1.2, 8), "o": np.zeros(8), "u": rng.normal(size=(8, 6))}
    for name, value in values.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), name))
    onnx.save(onnx.shape_inference.infer_shapes(model), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(32, 16, 8)).astype(np.float32))
    result = gq.insert(
        tmp_path / "model.onnx", rules=RULES, data=str(tmp_path / "data.npz"), algorithms=["smoothquant"]
    )
    (entry,) = [entry for entry in result.algorithm_results if entry.algorithm == "smoothquant"]
    assert (entry.target, entry.applied) == ("l", False)
    assert entry.detail == SMALL_GAIN.format(f"{MIN_GAIN_DB:.0f}") == SMALL_GAIN.format("1")
