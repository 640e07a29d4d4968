"""Small models with the structure of real ones and seeded weights, for machines without the folder of shared models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    from pathlib import Path

FACE_DETECTOR = """<ir_version: 3, opset_import: ["" : 9]>
detector (float[1,3,24,32] input) => (float[1,96,2] scores, float[1,96,4] boxes) {
    c1 = Conv <pads = [1,1,1,1], strides = [2,2]> (input, w1)
    n1 = BatchNormalization (c1, g1, b1, m1, v1)
    r1 = Relu (n1)
    c2 = Conv <pads = [1,1,1,1], strides = [2,2], group = 8> (r1, w2)
    n2 = BatchNormalization (c2, g2, b2, m2, v2)
    r2 = Relu (n2)
    c3 = Conv (r2, w3, b3)
    r3 = Relu (c3)
    class_map = Conv <pads = [1,1,1,1]> (r3, w4, b4)
    class_rows = Transpose <perm = [0,2,3,1]> (class_map)
    logits = Reshape (class_rows, pairs)
    scores = Softmax <axis = 2> (logits)
    box_map = Conv <pads = [1,1,1,1]> (r3, w5, b5)
    box_rows = Transpose <perm = [0,2,3,1]> (box_map)
    offsets = Reshape (box_rows, fours)
    centers = Slice <axes = [2], starts = [0], ends = [2]> (offsets)
    sizes = Slice <axes = [2], starts = [2], ends = [4]> (offsets)
    moved = Mul (centers, variance)
    grown = Exp (sizes)
    boxes = Concat <axis = 2> (moved, grown)
}"""
"""A detector of opset 9 with BatchNorms, a depthwise convolution and decoded boxes."""

SPEECH_DETECTOR = """<ir_version: 8, opset_import: ["" : 15]>
speech (float[N,64] input, float[1,N,8] state, int64 sr) => (float[N,1] output, float[1,N,8] next) {
    rate = Constant <value = int64 {16000}> ()
    fast = Equal (sr, rate)
    features = If (fast) <
        then_branch = wide () => (float[N,8,M] wide_out) {
            wide_in = Unsqueeze (input, one)
            wide_conv = Conv <strides = [4]> (wide_in, wide_w, wide_b)
            wide_out = Relu (wide_conv)
        },
        else_branch = narrow () => (float[N,8,M] narrow_out) {
            narrow_in = Unsqueeze (input, one)
            narrow_conv = Conv <strides = [2]> (narrow_in, narrow_w, narrow_b)
            narrow_out = Relu (narrow_conv)
        }
    >
    steps = Transpose <perm = [2,0,1]> (features)
    hidden, next, cell = LSTM <hidden_size = 8> (steps, lstm_w, lstm_r, lstm_b, no_lengths, state)
    last = Squeeze (next, zero)
    active = Relu (last)
    logit = Gemm <transB = 1> (active, head_w, head_b)
    output = Sigmoid (logit)
}"""
"""A detector with one branch for each sample rate, convolutions of one axis and an LSTM."""


def _weights(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {
        name: (rng.standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))).astype(np.float32)
        for name, shape in shapes.items()
    }


def write_face_detector(path: Path) -> Path:
    """Write `FACE_DETECTOR` with initializers that are also inputs, as before IR version 4."""
    rng = np.random.default_rng(5)
    message = onnx.parser.parse_model(FACE_DETECTOR)
    shapes: dict[str, tuple[int, ...]] = {
        "w1": (8, 3, 3, 3), "w2": (8, 1, 3, 3), "w3": (16, 8, 1, 1), "b3": (16,), "w4": (4, 16, 3, 3), "b4": (4,),
        "w5": (8, 16, 3, 3), "b5": (8,), "b1": (8,), "m1": (8,), "b2": (8,), "m2": (8,),
    }  # fmt: skip
    values = _weights(rng, shapes)
    values |= {name: rng.uniform(0.5, 2, 8).astype(np.float32) for name in ("g1", "v1", "g2", "v2")}
    values |= {"pairs": np.array([1, -1, 2]), "fours": np.array([1, -1, 4]), "variance": np.float32(0.1)}
    for name, value in values.items():
        tensor = numpy_helper.from_array(np.asarray(value), name)
        message.graph.initializer.append(tensor)
        message.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    onnx.checker.check_model(message, full_check=True)
    onnx.save(message, path)
    return path


def write_speech_detector(path: Path) -> Path:
    """Write `SPEECH_DETECTOR`."""
    message = onnx.parser.parse_model(SPEECH_DETECTOR)
    shapes: dict[str, tuple[int, ...]] = {
        "wide_w": (8, 1, 8), "wide_b": (8,), "narrow_w": (8, 1, 4), "narrow_b": (8,), "lstm_w": (1, 32, 8),
        "lstm_r": (1, 32, 8), "lstm_b": (1, 64), "head_w": (1, 8), "head_b": (1,),
    }  # fmt: skip
    values = _weights(np.random.default_rng(6), shapes) | {"one": np.array([1]), "zero": np.array([0])}
    message.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    for node in message.graph.node:
        node.input[:] = ["" if name == "no_lengths" else name for name in node.input]
    onnx.save(message, path)
    return path
