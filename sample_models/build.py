"""Train the sample models on scikit-learn's digits and write them as GraphDef, SavedModel and ONNX files.

Run ``python build.py`` to rebuild everything next to this script, or ``python build.py --output DIR`` to write
elsewhere.  The README beside this script lists the files and the packages needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import tensorflow as tf
import tf2onnx
from google.protobuf import text_format
from nested import BRIGHTNESS_THRESHOLD, CLASSES, DigitsNested, build_nested_onnx
from onnx import TensorProto, helper, numpy_helper
from resnet import DigitsResNet, build_resnet_onnx, upscale
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SEED = 20240
INPUT_NAME = "image"
OUTPUT_NAME = "probabilities"
LABELS_NAME = "labels"
ROWS = 8
TEST_SAMPLES = 300
VALIDATION_SAMPLES = 150
CALIBRATION_SAMPLES = 100
BATCH_SIZE = 32
BATCH_NORM_EPSILON = 1e-3
BATCH_NORM_MOMENTUM = 0.95
HIDDEN_SIZE = 24
ONNX_OPSET = 13
OLD_ONNX_OPSET = 9
OLD_ONNX_IR_VERSION = 3
TOLERANCE = 1e-5
BATCH_NORM_KEYS = ("gamma", "beta", "mean", "variance")
LOGITS_KEYS = ("logits/kernel", "logits/bias")
COSINES = np.sqrt(2.0 / 8.0) * np.cos(np.pi / 8.0 * np.outer(np.arange(8) + 0.5, np.arange(8)))

Array = np.ndarray[Any, Any]
Split = tuple[Array, Array]


class DigitsCnn(tf.Module):
    """A small convolutional network with batch norms, a depthwise step, a residual sum and two joined branches."""

    def __init__(self) -> None:
        """Create the weights with the generator seeded by the caller."""
        super().__init__(name="digits_cnn")
        self.weights: dict[str, tf.Variable] = {}
        self._add_conv("stem", (3, 3, 1, 8), batch_norm=True)
        self._add_conv("depthwise", (3, 3, 8, 1), batch_norm=True, channels=8)
        self._add_conv("pointwise", (1, 1, 8, 16), batch_norm=True)
        self._add_conv("residual_1", (3, 3, 16, 16), batch_norm=True)
        self._add_conv("residual_2", (3, 3, 16, 16), batch_norm=True)
        self._add_conv("branch_narrow", (1, 1, 16, 8), batch_norm=False)
        self._add_conv("branch_wide", (3, 3, 16, 8), batch_norm=False)
        add_dense(self.weights, "hidden", 64, 32)
        add_dense(self.weights, "logits", 32, CLASSES)

    def _add_conv(self, name: str, shape: tuple[int, ...], batch_norm: bool, channels: int | None = None) -> None:
        """Add a kernel of the given shape with either batch-norm statistics or a bias."""
        channels = shape[-1] if channels is None else channels
        fan_in = shape[0] * shape[1] * (1 if name == "depthwise" else shape[2])
        self.weights[f"{name}/kernel"] = tf.Variable(tf.random.normal(shape, stddev=(2.0 / fan_in) ** 0.5))
        if not batch_norm:
            self.weights[f"{name}/bias"] = tf.Variable(tf.zeros(channels))
            return
        self.weights[f"{name}/gamma"] = tf.Variable(tf.ones(channels))
        self.weights[f"{name}/beta"] = tf.Variable(tf.zeros(channels))
        self.weights[f"{name}/mean"] = tf.Variable(tf.zeros(channels), trainable=False)
        self.weights[f"{name}/variance"] = tf.Variable(tf.ones(channels), trainable=False)

    def _batch_norm(self, x: tf.Tensor, name: str, training: bool) -> tf.Tensor:
        """Normalize with the batch's statistics (moving the stored ones) or with the stored statistics."""
        gamma, beta = self.weights[f"{name}/gamma"], self.weights[f"{name}/beta"]
        mean, variance = self.weights[f"{name}/mean"], self.weights[f"{name}/variance"]
        scope = f"{name}/batch_norm"
        if not training:
            return tf.compat.v1.nn.fused_batch_norm(
                x, gamma, beta, mean, variance, epsilon=BATCH_NORM_EPSILON, is_training=False, name=scope
            )[0]
        y, batch_mean, batch_variance = tf.compat.v1.nn.fused_batch_norm(
            x, gamma, beta, epsilon=BATCH_NORM_EPSILON, is_training=True, name=scope
        )
        mean.assign(BATCH_NORM_MOMENTUM * mean + (1.0 - BATCH_NORM_MOMENTUM) * batch_mean)
        variance.assign(BATCH_NORM_MOMENTUM * variance + (1.0 - BATCH_NORM_MOMENTUM) * batch_variance)
        return y

    def _conv(self, x: tf.Tensor, name: str, training: bool) -> tf.Tensor:
        """Convolve, then normalize or add the bias, whichever the layer holds."""
        x = tf.nn.conv2d(x, self.weights[f"{name}/kernel"], strides=1, padding="SAME", name=f"{name}/conv")
        if f"{name}/gamma" in self.weights:
            return self._batch_norm(x, name, training)
        return tf.nn.bias_add(x, self.weights[f"{name}/bias"], name=f"{name}/bias_add")

    def logits(self, image: tf.Tensor, training: bool) -> tf.Tensor:
        """Return the class scores of a [N, 8, 8, 1] batch."""
        x = tf.nn.relu(self._conv(image, "stem", training), name="stem/relu")
        x = tf.nn.depthwise_conv2d(
            x, self.weights["depthwise/kernel"], strides=[1, 1, 1, 1], padding="SAME", name="depthwise/conv"
        )
        x = tf.nn.relu6(self._batch_norm(x, "depthwise", training), name="depthwise/relu6")
        x = tf.nn.relu(self._conv(x, "pointwise", training), name="pointwise/relu")
        x = tf.nn.max_pool2d(x, 2, 2, "VALID", name="max_pool")
        y = tf.nn.relu(self._conv(x, "residual_1", training), name="residual_1/relu")
        x = tf.nn.relu(tf.add(x, self._conv(y, "residual_2", training), name="residual/add"), name="residual/relu")
        narrow = tf.nn.relu(self._conv(x, "branch_narrow", training), name="branch_narrow/relu")
        wide = tf.nn.relu(self._conv(x, "branch_wide", training), name="branch_wide/relu")
        x = tf.concat([narrow, wide], axis=-1, name="branches/concat")
        x = tf.nn.avg_pool2d(x, 2, 2, "VALID", name="average_pool")
        x = tf.reshape(x, [-1, 64], name="flatten")
        return dense(self.weights, "logits", tf.nn.relu(dense(self.weights, "hidden", x), name="hidden/relu"))

    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 1], tf.float32, name=INPUT_NAME)])
    def serve(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the class probabilities of a [N, 8, 8, 1] batch."""
        return {OUTPUT_NAME: tf.nn.softmax(self.logits(image, training=False), name=OUTPUT_NAME)}


class DigitsRnn(tf.Module):
    """A gated recurrent loop over the rows, self-attention over its states and a branch chosen by brightness."""

    def __init__(self) -> None:
        """Create the weights with the generator seeded by the caller."""
        super().__init__(name="digits_rnn")
        self.weights: dict[str, tf.Variable] = {}
        add_dense(self.weights, "gates", 8 + HIDDEN_SIZE, 2 * HIDDEN_SIZE)
        add_dense(self.weights, "candidate", 8, HIDDEN_SIZE)
        for name in ("candidate_state", "query", "key", "value"):
            add_dense(self.weights, name, HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
        add_dense(self.weights, "attention", HIDDEN_SIZE, HIDDEN_SIZE)
        add_dense(self.weights, "bright", 2 * HIDDEN_SIZE, HIDDEN_SIZE)
        add_dense(self.weights, "dark", 2 * HIDDEN_SIZE, HIDDEN_SIZE)
        add_dense(self.weights, "logits", HIDDEN_SIZE, CLASSES)
        self.weights["norm/gamma"] = tf.Variable(tf.ones(HIDDEN_SIZE))
        self.weights["norm/beta"] = tf.Variable(tf.zeros(HIDDEN_SIZE))

    def _recurrence(self, image: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Run the gated cell over the eight rows; return the last state and all of them as [N, 8, hidden].

        The cosine transform is a constant made inside the loop's body; the trained weights come from outside it.
        """
        rows = tf.TensorArray(tf.float32, size=ROWS, element_shape=[None, 8]).unstack(tf.transpose(image, [1, 0, 2]))
        states = tf.TensorArray(tf.float32, size=ROWS, element_shape=[None, HIDDEN_SIZE])
        initial = tf.zeros([tf.shape(image)[0], HIDDEN_SIZE])

        def step(
            index: tf.Tensor, state: tf.Tensor, states: tf.TensorArray
        ) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray]:
            row = rows.read(index)
            spectrum = tf.matmul(row, COSINES.astype(np.float32), name="spectrum/matmul")
            gates = tf.sigmoid(dense(self.weights, "gates", tf.concat([row, state], axis=1)))
            update, reset = tf.split(gates, 2, axis=1)
            recalled = tf.matmul(reset * state, self.weights["candidate_state/kernel"], name="candidate_state/matmul")
            candidate = tf.tanh(dense(self.weights, "candidate", spectrum) + recalled)
            state = update * state + (1.0 - update) * candidate
            return index + 1, state, states.write(index, state)

        _, last, states = tf.while_loop(
            lambda index, *_: index < ROWS,
            step,
            (tf.constant(0), initial, states),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, HIDDEN_SIZE]), None),
            name="recurrence",
        )
        return last, tf.transpose(states.stack(), [1, 0, 2])

    def _attention(self, states: tf.Tensor) -> tf.Tensor:
        """Attend over the states with one head, add the states back and normalize each result."""
        query, key, value = (
            tf.matmul(states, self.weights[f"{name}/kernel"], name=f"{name}/matmul")
            for name in ("query", "key", "value")
        )
        scores = tf.matmul(query, key, transpose_b=True, name="scores") * (HIDDEN_SIZE**-0.5)
        attended = tf.matmul(tf.nn.softmax(scores), value, name="attended")
        x = states + dense(self.weights, "attention", attended)
        centered = x - tf.reduce_mean(x, axis=-1, keepdims=True)
        variance = tf.reduce_mean(tf.square(centered), axis=-1, keepdims=True)
        normalized = centered * tf.math.rsqrt(variance + BATCH_NORM_EPSILON)
        return normalized * self.weights["norm/gamma"] + self.weights["norm/beta"]

    def logits(self, image: tf.Tensor, training: bool) -> tf.Tensor:
        """Return the class scores of a [N, 8, 8] batch (training changes nothing here)."""
        del training
        last, states = self._recurrence(image)
        pooled = tf.concat([last, tf.reduce_mean(self._attention(states), axis=1)], axis=1)
        features = tf.cond(
            tf.reduce_mean(image) > BRIGHTNESS_THRESHOLD,
            lambda: tf.nn.relu(dense(self.weights, "bright", pooled)),
            lambda: tf.tanh(dense(self.weights, "dark", pooled)),
            name="brightness",
        )
        return dense(self.weights, "logits", features)

    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8], tf.float32, name=INPUT_NAME)])
    def serve(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
        """Return the class probabilities of a [N, 8, 8] batch."""
        return {OUTPUT_NAME: tf.nn.softmax(self.logits(image, training=False), name=OUTPUT_NAME)}


Model = DigitsCnn | DigitsRnn


def add_dense(weights: dict[str, tf.Variable], name: str, inputs: int, outputs: int, bias: bool = True) -> None:
    """Add the Glorot-initialized kernel and the optional zero bias of a dense layer to the weights."""
    limit = (6.0 / (inputs + outputs)) ** 0.5
    weights[f"{name}/kernel"] = tf.Variable(tf.random.uniform((inputs, outputs), -limit, limit))
    if bias:
        weights[f"{name}/bias"] = tf.Variable(tf.zeros(outputs))


def dense(weights: dict[str, tf.Variable], name: str, x: tf.Tensor) -> tf.Tensor:
    """Multiply by the named kernel and add the named bias."""
    product = tf.matmul(x, weights[f"{name}/kernel"], name=f"{name}/matmul")
    return tf.nn.bias_add(product, weights[f"{name}/bias"], name=f"{name}/bias_add")


def load_splits() -> tuple[Split, Split, Split]:
    """Return the seeded, stratified train, validation and test parts of the digits, scaled to [0, 1]."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)
    labels = digits.target.astype(np.int64)
    rest, test, rest_labels, test_labels = train_test_split(
        images, labels, test_size=TEST_SAMPLES, random_state=SEED, stratify=labels
    )
    train, validation, train_labels, validation_labels = train_test_split(
        rest, rest_labels, test_size=VALIDATION_SAMPLES, random_state=SEED, stratify=rest_labels
    )
    return (train, train_labels), (validation, validation_labels), (test, test_labels)


def batches(images: Array, epochs: int) -> Iterator[Array]:
    """Yield index batches; every other epoch groups images of like brightness so that both branches are trained."""
    generator = np.random.default_rng(SEED)
    brightness = images.reshape(len(images), -1).mean(axis=1)
    for epoch in range(epochs):
        order = generator.permutation(len(images))
        if epoch % 2 == 1:
            order = np.argsort(brightness + generator.normal(0.0, 0.02, len(images)), kind="stable")
        groups = [order[start : start + BATCH_SIZE] for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE)]
        for group in generator.permutation(len(groups)):
            yield groups[group]


def train_model(
    model: Model | DigitsNested | DigitsResNet, images: Array, labels: Array, epochs: int, learning_rate: float
) -> None:
    """Fit the model with Adam under a cosine learning-rate schedule."""
    variables = model.trainable_variables
    firsts = [tf.Variable(tf.zeros_like(variable)) for variable in variables]
    seconds = [tf.Variable(tf.zeros_like(variable)) for variable in variables]

    @tf.function
    def update(x: tf.Tensor, y: tf.Tensor, count: tf.Tensor, rate: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            scores = model.logits(x, training=True)
            targets = tf.one_hot(y, CLASSES) * 0.95 + 0.05 / CLASSES
            loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(targets, scores))
        gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        for variable, gradient, first, second in zip(variables, gradients, firsts, seconds, strict=True):
            first.assign(0.9 * first + 0.1 * gradient)
            second.assign(0.99 * second + 0.01 * tf.square(gradient))
            scaled = first / (1.0 - tf.pow(0.9, count))
            variable.assign_sub(rate * scaled / (tf.sqrt(second / (1.0 - tf.pow(0.99, count))) + 1e-7))

    steps = epochs * (len(images) // BATCH_SIZE)
    for count, indices in enumerate(batches(images, epochs), start=1):
        rate = learning_rate * 0.5 * (1.0 + np.cos(np.pi * count / steps))
        update(
            tf.constant(images[indices]),
            tf.constant(labels[indices]),
            tf.constant(count, tf.float32),
            tf.constant(rate, tf.float32),
        )


def freeze(model: Model) -> tf.compat.v1.GraphDef:
    """Return the serving function as a GraphDef of constants that keeps its functional control flow."""
    frozen = convert_variables_to_constants_v2(model.serve.get_concrete_function(), lower_control_flow=False)
    graph_def = tf.compat.v1.graph_util.extract_sub_graph(frozen.graph.as_graph_def(), [OUTPUT_NAME])
    for node in [*graph_def.node, *(node for function in graph_def.library.function for node in function.node_def)]:
        node.device = ""
    return graph_def


def drop_loop_invariants(loop: onnx.NodeProto) -> None:
    """Let the loop's body read the values it only passes on from the outer graph, as it may in ONNX."""
    body = next(attribute.g for attribute in loop.attribute if attribute.name == "body")
    for index in reversed(range(len(loop.input) - 2)):
        name = body.input[index + 2].name
        if body.output[index + 1].name != name:
            continue
        for node in body.node:
            node.input[:] = [loop.input[index + 2] if item == name else item for item in node.input]
        del loop.input[index + 2], loop.output[index], body.input[index + 2], body.output[index + 1]


def convert_to_onnx(model: Model, name: str) -> onnx.ModelProto:
    """Convert the serving function with tf2onnx, naming the free dimension of the input and output `batch`."""
    proto, _ = tf2onnx.convert.from_function(model.serve, input_signature=model.serve.input_signature, opset=ONNX_OPSET)
    proto.graph.name = name
    for node in proto.graph.node:
        if node.op_type == "Loop":
            drop_loop_invariants(node)
    for value in [*proto.graph.input, *proto.graph.output]:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return proto


def build_old_onnx(model: DigitsCnn) -> onnx.ModelProto:
    """Write the CNN by hand as an old-style NCHW model with unfolded batch norms and initializers among its inputs."""
    weights = {name: variable.numpy() for name, variable in model.weights.items()}
    nodes: list[onnx.NodeProto] = []
    initializers: list[onnx.TensorProto] = []

    def constant(name: str, value: Array) -> str:
        initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def add(op_type: str, name: str, inputs: Sequence[str], **attributes: float | list[int]) -> str:
        nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def conv(x: str, name: str, activation: str | None = "Relu") -> str:
        kernel = weights[f"{name}/kernel"]
        depthwise = name == "depthwise"
        size = kernel.shape[0]
        inputs = [x, constant(f"{name}/kernel", kernel.transpose((2, 3, 0, 1) if depthwise else (3, 2, 0, 1)))]
        normalized = f"{name}/gamma" in weights
        if not normalized:
            inputs.append(constant(f"{name}/bias", weights[f"{name}/bias"]))
        y = add(
            "Conv",
            f"{name}/conv",
            inputs,
            kernel_shape=[size, size],
            pads=[size // 2] * 4,
            strides=[1, 1],
            group=kernel.shape[2] if depthwise else 1,
        )
        if normalized:
            statistics = [constant(f"{name}/{key}", weights[f"{name}/{key}"]) for key in BATCH_NORM_KEYS]
            y = add("BatchNormalization", f"{name}/batch_norm", [y, *statistics], epsilon=BATCH_NORM_EPSILON)
        if activation == "Clip":
            return add("Clip", f"{name}/relu6", [y], min=0.0, max=6.0)
        return add(activation, f"{name}/{activation.lower()}", [y]) if activation else y

    x = add("Transpose", "to_nchw", [INPUT_NAME], perm=[0, 3, 1, 2])
    x = conv(conv(conv(x, "stem"), "depthwise", "Clip"), "pointwise")
    x = add("MaxPool", "max_pool", [x], kernel_shape=[2, 2], strides=[2, 2])
    y = conv(conv(x, "residual_1"), "residual_2", None)
    x = add("Relu", "residual/relu", [add("Add", "residual/add", [x, y])])
    x = add("Concat", "branches/concat", [conv(x, "branch_narrow"), conv(x, "branch_wide")], axis=1)
    x = add("Flatten", "flatten", [add("AveragePool", "average_pool", [x], kernel_shape=[2, 2], strides=[2, 2])])
    hidden = weights["hidden/kernel"].reshape(2, 2, 16, -1).transpose(2, 0, 1, 3).reshape(64, -1)
    hidden_inputs = [constant("hidden/kernel", hidden), constant("hidden/bias", weights["hidden/bias"])]
    x = add("Relu", "hidden/relu", [add("Gemm", "hidden/gemm", [x, *hidden_inputs])])
    logits_inputs = [constant(key, weights[key].T if key.endswith("kernel") else weights[key]) for key in LOGITS_KEYS]
    x = add("Gemm", "logits/gemm", [x, *logits_inputs], transB=1)
    add("Softmax", OUTPUT_NAME, [x], axis=1)
    inputs = [helper.make_tensor_value_info(INPUT_NAME, TensorProto.FLOAT, ["batch", 8, 8, 1])]
    inputs += [helper.make_tensor_value_info(item.name, item.data_type, list(item.dims)) for item in initializers]
    outputs = [helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, ["batch", CLASSES])]
    graph = helper.make_graph(nodes, "digits_cnn_bn", inputs, outputs, initializers)
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", OLD_ONNX_OPSET)],
        ir_version=OLD_ONNX_IR_VERSION,
        producer_name="sample_models",
    )


def graph_def_runner(path: Path) -> Callable[[Array], Array]:
    """Return a function running the frozen GraphDef at the path (text form when it ends in pbtxt)."""
    graph_def = tf.compat.v1.GraphDef()
    if path.suffix == ".pbtxt":
        text_format.Parse(path.read_text(encoding="utf-8"), graph_def)
    else:
        graph_def.ParseFromString(path.read_bytes())
    pruned = tf.compat.v1.wrap_function(lambda: tf.import_graph_def(graph_def, name=""), []).prune(
        f"{INPUT_NAME}:0", f"{OUTPUT_NAME}:0"
    )
    return lambda image: pruned(tf.constant(image)).numpy()


def saved_model_runner(path: Path) -> Callable[[Array], Array]:
    """Return a function running the default signature of the SavedModel at the path."""
    loaded = tf.saved_model.load(str(path))

    def run(image: Array) -> Array:
        result = loaded.signatures["serving_default"](**{INPUT_NAME: tf.constant(image)})
        return np.asarray(result[OUTPUT_NAME])

    return run


def onnx_runner(path: Path) -> Callable[[Array], Array]:
    """Check the ONNX model at the path and return a function running it."""
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda image: session.run([OUTPUT_NAME], {INPUT_NAME: image})[0]


def accuracy(run: Callable[[Array], Array], images: Array, labels: Array) -> float:
    """Return the share of images whose most probable class is the label."""
    return float(np.mean(run(images).argmax(axis=1) == labels))


def runner(path: Path) -> Callable[[Array], Array]:
    """Return a function running the model at the path, whatever its format."""
    if path.is_dir():
        return saved_model_runner(path)
    return onnx_runner(path) if path.suffix == ".onnx" else graph_def_runner(path)


def check_agreement(runs: dict[str, Callable[[Array], Array]], images: Array) -> None:
    """Raise unless all give the same probabilities on the whole batch, its dark part and its bright part."""
    first = next(iter(runs))
    order = np.argsort(images.reshape(len(images), -1).mean(axis=1), kind="stable")
    for part in (images, images[order[:50]], images[order[-50:]], images[:1]):
        expected = runs[first](part)
        for name, run in runs.items():
            difference = float(np.abs(run(part) - expected).max())
            if difference > TOLERANCE:
                raise RuntimeError(f"{name} differs from {first} by {difference:.2e}")


def write_data(output: Path, name: str, calibration: Array, test: Split) -> None:
    """Write the calibration and the labelled evaluation arrays of one model."""
    calibration_arrays: dict[str, Any] = {INPUT_NAME: calibration}
    test_arrays: dict[str, Any] = {INPUT_NAME: test[0], LABELS_NAME: test[1]}
    np.savez_compressed(output / f"{name}_calib.npz", **calibration_arrays)
    np.savez_compressed(output / f"{name}_eval.npz", **test_arrays)


def write_saved_model(model: Model, path: Path) -> None:
    """Replace the SavedModel directory at the path with the model and its serving signature."""
    shutil.rmtree(path, ignore_errors=True)
    tf.saved_model.save(model, str(path), signatures={"serving_default": model.serve})
    (path / "assets").rmdir()


def splits(shape: tuple[int, ...]) -> tuple[Split, Split, Split]:
    """Return the parts of the digits with images of the given shape."""
    train, validation, test = ((images.reshape(-1, *shape), labels) for images, labels in load_splits())
    return train, validation, test


def accuracies(run: Callable[[Array], Array], train: Split, validation: Split, test: Split) -> dict[str, float]:
    """Return the accuracy on each part of the data."""
    bright = test[0].reshape(len(test[0]), -1).mean(axis=1) > BRIGHTNESS_THRESHOLD
    parts = {
        "train": train,
        "validation": validation,
        "test": test,
        "test_dark": (test[0][~bright], test[1][~bright]),
        "test_bright": (test[0][bright], test[1][bright]),
    }
    return {part: round(accuracy(run, *data), 4) for part, data in parts.items()}


def build(output: Path, name: str, shape: tuple[int, ...], epochs: int, learning_rate: float) -> dict[str, float]:
    """Train one model, write and cross-check all its files, and return its accuracies by data part."""
    tf.random.set_seed(SEED)
    train, validation, test = splits(shape)
    model: Model = DigitsCnn() if name == "digits_cnn" else DigitsRnn()
    train_model(model, *train, epochs=epochs, learning_rate=learning_rate)
    graph_def = freeze(model)
    paths = [output / f"{name}.pb", output / f"{name}_saved_model", output / f"{name}.onnx"]
    paths[0].write_bytes(graph_def.SerializeToString(deterministic=True))
    write_saved_model(model, paths[1])
    onnx.save(convert_to_onnx(model, name), paths[2])
    if isinstance(model, DigitsCnn):
        paths += [output / f"{name}.pbtxt", output / f"{name}_bn.onnx"]
        paths[-2].write_text(text_format.MessageToString(graph_def), encoding="utf-8")
        onnx.save(build_old_onnx(model), paths[-1])
    write_data(output, name, train[0][:CALIBRATION_SAMPLES], test)
    check_agreement({path.name: runner(path) for path in paths}, test[0])
    return accuracies(runner(paths[2]), train, validation, test)


def build_onnx(output: Path, name: str, epochs: int, learning_rate: float) -> dict[str, float]:
    """Train a network that is for ONNX alone, write its file and return its accuracies by data part."""
    tf.random.set_seed(SEED)
    model: DigitsNested | DigitsResNet = DigitsNested() if name == "digits_nested" else DigitsResNet()
    train, validation, test = splits((8, 8, 1))
    if isinstance(model, DigitsResNet):
        train, validation, test = ((upscale(images[..., 0]), labels) for images, labels in (train, validation, test))
    train_model(model, *train, epochs=epochs, learning_rate=learning_rate)
    path = output / f"{name}.onnx"
    onnx.save(build_nested_onnx(model) if isinstance(model, DigitsNested) else build_resnet_onnx(model), path)
    write_data(output, name, train[0][:CALIBRATION_SAMPLES], test)
    runs = {
        "TensorFlow": lambda image: tf.nn.softmax(model.logits(tf.constant(image), training=False)).numpy(),
        path.name: onnx_runner(path),
    }
    check_agreement(runs, test[0])
    return accuracies(runs[path.name], train, validation, test)


def main() -> None:
    """Build the models and print their accuracies as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent, help="folder to write to")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    tf.config.experimental.enable_op_determinism()
    results = {
        "digits_cnn": build(output, "digits_cnn", (8, 8, 1), epochs=40, learning_rate=4e-3),
        "digits_rnn": build(output, "digits_rnn", (8, 8), epochs=80, learning_rate=6e-3),
        "digits_nested": build_onnx(output, "digits_nested", epochs=60, learning_rate=4e-3),
        "digits_resnet": build_onnx(output, "digits_resnet", epochs=20, learning_rate=2e-3),
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
