"""A residual classifier of digits of 32 x 32 pixels, large enough to be faster, smaller and as accurate in int8.

`build.py` trains `DigitsResNet` and writes `build_resnet_onnx`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import tensorflow as tf
from nested import CLASSES
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

SIDE = 32
OPSET = 17
IR_VERSION = 8
# Layer: channels of its input and output, size of its kernel, stride.
CONVOLUTIONS = {
    "stem": (1, 32, 3, 2),
    "block1/conv1": (32, 32, 3, 1),
    "block1/conv2": (32, 32, 3, 1),
    "block2/conv1": (32, 64, 3, 2),
    "block2/conv2": (64, 64, 3, 1),
    "block2/shortcut": (32, 64, 1, 2),
}

Array = np.ndarray[Any, Any]


class DigitsResNet(tf.Module):
    """A convolution, two residual blocks, a global average and a dense layer."""

    def __init__(self) -> None:
        """Create the weights with the generator seeded by the caller."""
        super().__init__(name="digits_resnet")
        self.weights: dict[str, tf.Variable] = {}
        for name, (inputs, outputs, size, _) in CONVOLUTIONS.items():
            deviation = (2.0 / (size * size * inputs)) ** 0.5
            kernel = tf.random.normal((size, size, inputs, outputs), stddev=deviation)
            self.weights[f"{name}/kernel"] = tf.Variable(kernel)
            self.weights[f"{name}/bias"] = tf.Variable(tf.zeros(outputs))
        self.weights["logits/kernel"] = tf.Variable(tf.random.normal((64, CLASSES), stddev=0.1))
        self.weights["logits/bias"] = tf.Variable(tf.zeros(CLASSES))

    def _conv(self, x: tf.Tensor, name: str) -> tf.Tensor:
        """Convolve with the padding that PyTorch uses, and add the bias."""
        _, _, size, stride = CONVOLUTIONS[name]
        border = [size // 2] * 2
        x = tf.nn.conv2d(x, self.weights[f"{name}/kernel"], stride, [[0, 0], border, border, [0, 0]])
        return x + self.weights[f"{name}/bias"]

    def logits(self, image: tf.Tensor, training: bool) -> tf.Tensor:
        """Return the class scores of a [N, 1, 32, 32] batch (training changes nothing here)."""
        del training
        x = tf.nn.relu(self._conv(tf.transpose(image, [0, 2, 3, 1]), "stem"))
        y = tf.nn.relu(self._conv(x, "block1/conv1"))
        x = tf.nn.relu(self._conv(y, "block1/conv2") + x)
        y = tf.nn.relu(self._conv(x, "block2/conv1"))
        x = tf.nn.relu(self._conv(y, "block2/conv2") + self._conv(x, "block2/shortcut"))
        return tf.reduce_mean(x, [1, 2]) @ self.weights["logits/kernel"] + self.weights["logits/bias"]


def upscale(images: Array) -> Array:
    """Return 8 x 8 images as [N, 1, 32, 32], interpolated and rounded to the 16 gray levels of the originals."""
    resized = tf.image.resize(images[..., None], (SIDE, SIDE)).numpy()
    return np.round(resized.transpose(0, 3, 1, 2) * 16.0) / np.float32(16.0)


def build_resnet_onnx(model: DigitsResNet) -> onnx.ModelProto:
    """Write the network in NCHW layout, as an export from PyTorch would be."""
    weights = {name: variable.numpy() for name, variable in model.weights.items()}
    nodes: list[onnx.NodeProto] = []

    def add(op_type: str, name: str, inputs: Sequence[str], **attributes: int | list[int]) -> str:
        nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def conv(x: str, name: str) -> str:
        _, _, size, stride = CONVOLUTIONS[name]
        inputs = [x, f"{name}/kernel", f"{name}/bias"]
        pads, strides = [size // 2] * 4, [stride] * 2
        return add("Conv", f"{name}/conv", inputs, kernel_shape=[size, size], pads=pads, strides=strides)

    def relu(x: str) -> str:
        return add("Relu", x.rsplit("/", 1)[0] + "/relu", [x])

    x = relu(conv("image", "stem"))
    for block in ("block1", "block2"):
        shortcut = conv(x, f"{block}/shortcut") if f"{block}/shortcut" in CONVOLUTIONS else x
        y = conv(relu(conv(x, f"{block}/conv1")), f"{block}/conv2")
        x = relu(add("Add", f"{block}/add", [y, shortcut]))
    x = add("Flatten", "flatten", [add("GlobalAveragePool", "average", [x])])
    x = add("Gemm", "logits", [x, "logits/kernel", "logits/bias"])
    add("Softmax", "probabilities", [x], axis=1)
    # Convolutions of ONNX take their kernels as output channels, input channels, height, width.
    layer_kernels = {f"{name}/kernel" for name in CONVOLUTIONS}
    arrays = {name: value.transpose(3, 2, 0, 1) if name in layer_kernels else value for name, value in weights.items()}
    initializers = [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in arrays.items()]
    inputs = [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, SIDE, SIDE])]
    outputs = [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", CLASSES])]
    graph = helper.make_graph(nodes, "digits_resnet", inputs, outputs, initializers)
    opset = helper.make_opsetid("", OPSET)
    return helper.make_model(graph, opset_imports=[opset], ir_version=IR_VERSION, producer_name="sample_models")
