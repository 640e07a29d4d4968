"""A classifier of digits whose layers are in a Loop, a function, a Scan and both branches of an If, for ONNX.

`build.py` trains `DigitsNested`, in which rounds and calls stand one behind the other, and writes `build_nested_onnx`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import tensorflow as tf
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

CHANNELS = 8
STATE_SIZE = 16
CLASSES = 10
ROUNDS = 2
SLOPE = 0.125
OPSET = 17
IR_VERSION = 8
DOMAIN = "sample_models"
BRIGHTNESS_THRESHOLD = 0.29
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL

Array = np.ndarray[Any, Any]


class DigitsNested(tf.Module):
    """Rounds of one block, calls of another, a recurrence over rows with a convolution, and a branch by brightness."""

    def __init__(self) -> None:
        """Create the weights with the generator seeded by the caller."""
        super().__init__(name="digits_nested")
        self.weights: dict[str, tf.Variable] = {}
        self._add_conv("stem", (3, 3, 1, CHANNELS))
        for name in ("round", "call", "bright", "dark"):
            self._add_conv(name, (3, 3, CHANNELS, CHANNELS))
        self._add_conv("row", (3, CHANNELS, CHANNELS))
        for name in ("round", "call"):
            self._add_matrix(name, CHANNELS, CHANNELS)
        self._add_matrix("row", 8 * CHANNELS, STATE_SIZE)
        self._add_matrix("state", STATE_SIZE, STATE_SIZE)
        self._add_matrix("start", CHANNELS, STATE_SIZE)
        for name in ("bright", "dark"):
            self._add_matrix(name, CHANNELS + STATE_SIZE, STATE_SIZE)
            self.weights[f"{name}/offset"] = tf.Variable(tf.zeros(STATE_SIZE))
        self._add_matrix("logits", STATE_SIZE, CLASSES)
        self.weights["logits/offset"] = tf.Variable(tf.zeros(CLASSES))

    def _add_conv(self, name: str, shape: tuple[int, ...]) -> None:
        """Add a kernel of the given shape and a bias."""
        deviation = (2.0 / np.prod(shape[:-1])) ** 0.5
        self.weights[f"{name}/kernel"] = tf.Variable(tf.random.normal(shape, stddev=deviation))
        self.weights[f"{name}/bias"] = tf.Variable(tf.zeros(shape[-1]))

    def _add_matrix(self, name: str, rows: int, columns: int) -> None:
        """Add a Glorot-initialized matrix."""
        limit = (6.0 / (rows + columns)) ** 0.5
        self.weights[f"{name}/matrix"] = tf.Variable(tf.random.uniform((rows, columns), -limit, limit))

    def _conv(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Convolve an image, add the bias and rectify."""
        y = tf.nn.conv2d(x, self.weights[f"{name}/kernel"], strides=1, padding="SAME")
        return tf.nn.relu(y + self.weights[f"{name}/bias"])

    def _block(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Take from the features what a convolution and a mixture of their columns make of them."""
        y = self._conv(tf.nn.leaky_relu(x, SLOPE), name)
        return x - tf.einsum("nhwc,wv->nhvc", y, self.weights[f"{name}/matrix"])

    def _row(self, row: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        """Return the next state from a row of features, [N, 8, channels], and the state."""
        y = tf.nn.conv1d(tf.nn.leaky_relu(row, SLOPE), self.weights["row/kernel"], stride=1, padding="SAME")
        y = tf.nn.relu(y + self.weights["row/bias"])
        seen = tf.matmul(tf.reshape(tf.transpose(y, [0, 2, 1]), [-1, 8 * CHANNELS]), self.weights["row/matrix"])
        return tf.tanh(seen + tf.matmul(state, self.weights["state/matrix"]))

    def logits(self, image: tf.Tensor, training: bool) -> tf.Tensor:
        """Return the class scores of a [N, 8, 8, 1] batch (training changes nothing here)."""
        del training
        stem = self._conv(image, "stem")
        x = stem
        for name in ["round"] * ROUNDS + ["call"] * 2:
            x = self._block(x, name)
        state = tf.tanh(tf.matmul(tf.reduce_mean(x, axis=[1, 2]), self.weights["start/matrix"]))
        for row in tf.unstack(x, axis=1):
            state = self._row(row, state)

        def branch(name: str) -> tf.Tensor:
            pooled = tf.reduce_mean(self._conv(stem, name), axis=[1, 2])
            scores = tf.matmul(tf.concat([pooled, state], axis=1), self.weights[f"{name}/matrix"])
            scores += self.weights[f"{name}/offset"]
            return tf.nn.relu(scores) if name == "bright" else tf.tanh(scores)

        bright = tf.reduce_mean(image) > BRIGHTNESS_THRESHOLD
        features = tf.cond(bright, lambda: branch("bright"), lambda: branch("dark"))
        return tf.matmul(features, self.weights["logits/matrix"]) + self.weights["logits/offset"]


def _value(name: str, element: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    """The name, element type and shape of a value."""
    return helper.make_tensor_value_info(name, element, shape)


def _tensor(name: str, value: Array) -> onnx.TensorProto:
    """A weight as TensorFlow keeps it, as the one that ONNX wants."""
    axes = {4: (3, 2, 0, 1), 3: (2, 1, 0)}.get(value.ndim) if name.endswith("kernel") else None
    return numpy_helper.from_array(np.ascontiguousarray(value.transpose(axes) if axes else value), name)


class _Body:
    """The nodes and weights of one graph while they are collected."""

    def __init__(self, weights: dict[str, Array]) -> None:
        self.weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.own: list[onnx.TensorProto] = []

    def add(self, op_type: str, name: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node with one output, called as the node."""
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def weight(self, name: str) -> str:
        """Add a trained weight to this graph."""
        self.own.append(_tensor(name, self.weights[name]))
        return name

    def conv(self, x: str, name: str) -> str:
        """Convolve with weights of this graph and rectify."""
        kernel = self.weight(f"{name}/kernel")
        inputs = [x, kernel, self.weight(f"{name}/bias")]
        y = self.add("Conv", f"{name}/conv", inputs, pads=[1] * (4 if name != "row" else 2))
        return self.add("Relu", f"{name}/relu", [y])

    def block(self, x: str, name: str, matrix: str, out: str) -> None:
        """Take from the features what a convolution and a mixture of their columns make of them."""
        y = self.conv(self.add("LeakyRelu", f"{name}/leaky", [x], alpha=SLOPE), name)
        self.add("Sub", out, [x, self.add("MatMul", f"{name}/matmul", [y, matrix])])

    def graph(
        self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
    ) -> onnx.GraphProto:
        """What was collected, as a graph."""
        return helper.make_graph(self.nodes, name, inputs, outputs, self.own)


def _loop(weights: dict[str, Array]) -> onnx.GraphProto:
    """One round: its convolution's weights are its own, its matrix is read from outside."""
    body = _Body(weights)
    body.add("Identity", "round/go_on", ["round/go"])
    body.block("round/x", "round", "round/matrix", "round/y")
    features = ["batch", CHANNELS, 8, 8]
    inputs = [_value("round/number", INT64, []), _value("round/go", BOOL, []), _value("round/x", FLOAT, features)]
    return body.graph("round", inputs, [_value("round/go_on", BOOL, []), _value("round/y", FLOAT, features)])


def _function(weights: dict[str, Array]) -> onnx.FunctionProto:
    """The block that is called: its convolution's weights are constants in it, its matrix is handed over."""
    body = _Body(weights)
    body.block("x", "call", "matrix", "y")
    constants = [
        helper.make_node("Constant", [], [tensor.name], name=f"{tensor.name}/constant", value=tensor)
        for tensor in body.own
    ]
    nodes = [*constants, *body.nodes]
    return helper.make_function(DOMAIN, "Block", ["x", "matrix"], ["y"], nodes, [helper.make_opsetid("", OPSET)])


def _scan(weights: dict[str, Array]) -> onnx.GraphProto:
    """One row: its convolution's and state's weights are its own, the row's matrix is read from outside."""
    body = _Body(weights)
    leaky = body.add("LeakyRelu", "row/leaky", ["row/x"], alpha=SLOPE)
    flat = body.add("Flatten", "row/flat", [body.conv(leaky, "row")])
    seen = body.add("MatMul", "row/matmul", [flat, "row/matrix"])
    recalled = body.add("MatMul", "state/matmul", ["row/state", body.weight("state/matrix")])
    body.add("Tanh", "row/next", [body.add("Add", "row/add", [seen, recalled])])
    inputs = [_value("row/state", FLOAT, ["batch", STATE_SIZE]), _value("row/x", FLOAT, ["batch", CHANNELS, 8])]
    return body.graph("row", inputs, [_value("row/next", FLOAT, ["batch", STATE_SIZE])])


def _branch(weights: dict[str, Array], name: str) -> onnx.GraphProto:
    """A branch, which reads the stem's features and the state from outside, and its matrix too."""
    body = _Body(weights)
    pooled = body.add("GlobalAveragePool", f"{name}/pool", [body.conv("stem/relu", name)])
    both = body.add("Concat", f"{name}/both", [body.add("Flatten", f"{name}/flat", [pooled]), "state"], axis=1)
    product = body.add("MatMul", f"{name}/matmul", [both, f"{name}/matrix"])
    scores = body.add("Add", f"{name}/scores", [product, body.weight(f"{name}/offset")])
    made = body.add("Relu" if name == "bright" else "Tanh", f"{name}/features", [scores])
    return body.graph(name, [], [_value(made, FLOAT, ["batch", STATE_SIZE])])


def build_nested_onnx(model: DigitsNested) -> onnx.ModelProto:
    """Write the network with its layers in bodies and in a function."""
    weights = {name: variable.numpy() for name, variable in model.weights.items()}
    main = _Body(weights)
    for name in ("round", "call", "row", "start", "bright", "dark", "logits"):
        main.weight(f"{name}/matrix")
    main.own.append(numpy_helper.from_array(np.int64(ROUNDS), "rounds"))
    main.own.append(numpy_helper.from_array(np.float32(BRIGHTNESS_THRESHOLD), "threshold"))
    x = main.conv(main.add("Transpose", "to_nchw", ["image"], perm=[0, 3, 1, 2]), "stem")
    main.add("Loop", "rounds/features", ["rounds", "", x], body=_loop(weights))
    main.add("Block", "called/once", ["rounds/features", "call/matrix"], domain=DOMAIN)
    x = main.add("Block", "called/twice", ["called/once", "call/matrix"], domain=DOMAIN)
    means = main.add("ReduceMean", "means", [x], axes=[2, 3], keepdims=0)
    start = main.add("Tanh", "start", [main.add("MatMul", "start/matmul", [means, "start/matrix"])])
    main.add("Scan", "state", [start, x], body=_scan(weights), num_scan_inputs=1, scan_input_axes=[2])
    bright = main.add(
        "Greater", "is_bright", [main.add("ReduceMean", "brightness", ["image"], keepdims=0), "threshold"]
    )
    branches = {key: _branch(weights, name) for key, name in (("then_branch", "bright"), ("else_branch", "dark"))}
    main.add("If", "features", [bright], **branches)
    product = main.add("MatMul", "logits/matmul", ["features", "logits/matrix"])
    main.add("Softmax", "probabilities", [main.add("Add", "logits", [product, main.weight("logits/offset")])], axis=1)
    image = _value("image", FLOAT, ["batch", 8, 8, 1])
    graph = main.graph("digits_nested", [image], [_value("probabilities", FLOAT, ["batch", CLASSES])])
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        functions=[_function(weights)],
        ir_version=IR_VERSION,
        producer_name="sample_models",
    )
