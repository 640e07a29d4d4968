"""Build ONNX models from text, and run them in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser
import onnxruntime
from onnx import numpy_helper

from graphquant.formats import onnx as onnx_format
from graphquant.ir import Model

if TYPE_CHECKING:
    from collections.abc import Mapping

    Source = Path | onnx.ModelProto | Model


WRONG_PRODUCTS = "this onnxruntime multiplies integers wrong on this CPU"
"""Reason to skip a test."""

CAPTURED_TENSOR = """
g (bool p, float[2] x) => (float[2] y)
{
    t = Tanh (x)
    y = If (p) <
        then_branch = th () => (float[2] a) { a = Relu (t) },
        else_branch = el () => (float[2] b) { b = Neg (t) }
    >
}
"""
"""The text of a graph whose op `t` is read by both branches of an If."""


def onnx_model(
    text: str, initializers: Mapping[str, np.ndarray] | None = None, *, opset: int = 13, infer_shapes: bool = True
) -> onnx.ModelProto:
    """Parse a graph such as `net (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }`, and add initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {text}')
    for name, value in (initializers or {}).items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    return onnx.shape_inference.infer_shapes(model) if infer_shapes else model


def load_onnx(
    folder: Path, text: str, initializers: Mapping[str, np.ndarray] | None = None, *, opset: int = 13
) -> Model:
    """Write a graph that is given as text, with initializers, to `model.onnx` in `folder`, and load it."""
    path = folder / "model.onnx"
    onnx.save(onnx_model(text, initializers, opset=opset, infer_shapes=False), path)
    return onnx_format.load(path)


def load_with_constants(folder: Path, text: str, constants: Mapping[str, np.ndarray]) -> Model:
    """Load a model of opset 21 that is given as text, with those of the constants that its ops read.

    Each op has the name of its first output, and the model's outputs have no declared shape.
    """
    model = onnx_model(text, opset=21, infer_shapes=False)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    reads = {name for node in model.graph.node for name in node.input}
    for name, value in constants.items():
        if name in reads:
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    for node in model.graph.node:
        node.name = node.output[0]
    onnx.save(model, folder / "model.onnx")
    return onnx_format.load(folder / "model.onnx")


def qdq_text(source: str, target: str, scale: str = "s", zero: str = "z") -> str:
    """Return the text of a QuantizeLinear of `source` and a DequantizeLinear to `target`."""
    quantized = f"{target}_q = QuantizeLinear({source}, {scale}, {zero})"
    return f"{quantized} {target} = DequantizeLinear({target}_q, {scale}, {zero})\n"


def onnx_session(source: Source, level: str = "ORT_ENABLE_ALL", *, check: bool = False) -> onnxruntime.InferenceSession:
    """Create a session on one thread for a file, a message or a loaded model.

    Args:
        source: The model.
        level: Name of a `GraphOptimizationLevel`; "ORT_DISABLE_ALL" runs the model as it is.
        check: Runs ONNX's checker first.
    """
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    message = onnx_format.emit(source) if isinstance(source, Model) else source
    if check:
        onnx.checker.check_model(onnx.load(message) if isinstance(message, Path) else message, full_check=True)
    content = str(message) if isinstance(message, Path) else message.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run_onnx(
    source: Source, feeds: Mapping[str, np.ndarray], level: str = "ORT_ENABLE_ALL", *, check: bool = False
) -> list[np.ndarray]:
    """Return all outputs of a model; see `onnx_session`."""
    outputs: list[np.ndarray] = onnx_session(source, level, check=check).run(None, dict(feeds))
    return outputs


def run_unoptimized(source: Source, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return all outputs of a valid model, computed without ONNX Runtime's optimizations."""
    return run_onnx(source, feeds, "ORT_DISABLE_ALL", check=True)


OUTLIERS = [3, 11, 19]  # channels of the hidden layer that are much larger than the others


def save_outlier_net(folder: Path) -> None:
    """Write net.onnx, whose first layer has outlier channels, and data.npz, its data."""
    rng = np.random.default_rng(7)
    scale = np.ones(32)
    scale[OUTLIERS] = 300
    weights = {
        "w0": rng.standard_normal((16, 32)) * scale / 4,
        "w1": rng.standard_normal((32, 32)) / scale[:, None] / 5,
        "w2": rng.standard_normal((32, 32)) / 5,
        "w3": rng.standard_normal((32, 8)) / 5,
    }
    nodes = []
    tensor = "x"
    for index in range(4):
        nodes.append(onnx.helper.make_node("MatMul", [tensor, f"w{index}"], [f"m{index}"], name=f"layer{index}"))
        tensor = f"m{index}"
        if index < 3:
            nodes.append(onnx.helper.make_node("Relu", [tensor], [f"r{index}"], name=f"relu{index}"))
            tensor = f"r{index}"
    graph = onnx.helper.make_graph(
        nodes,
        "outliers",
        [onnx.helper.make_tensor_value_info("x", 1, ["N", 16])],
        [onnx.helper.make_tensor_value_info(tensor, 1, ["N", 8])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "net.onnx")
    np.savez(folder / "data.npz", x=rng.standard_normal((80, 16)).astype(np.float32))
