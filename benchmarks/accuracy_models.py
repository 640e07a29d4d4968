"""Architectures with seeded weights for `report.py`, beside the trained models and those of `peers.py`.

Their weights are drawn, so their answers mean nothing; shapes, op types and spreads of values are those that real nets
of their kind have. What rounding does to a net hangs on these, and on how loud it makes noise, so both were held
against trained nets. Of noise at 40 dB on inputs (of an encoder: on embeddings) trained nets leave 37 dB (a MobileNetV3
that tells which way up text is), 40 dB (a MiniLM of three layers) and 36 to 63 dB (those of `peers.py`).

* The MobileNet. With normal weights alone it left 19 dB: random nets with BatchNorms make noise louder with each layer
  (Yang et al. 2019, A Mean Field Theory of Batch Normalization). Gradient descent adds to weights sums of what they
  read, and noise does not look like that. So half of the power of its weights is such sums, which gives 39 dB.
  BatchNorms have the statistics of what reaches them, and gains that differ by an order of magnitude.
* The encoder. In MiniLM the gains of a LayerNorm differ by 4 to 18%, but for a few. Behind attention one channel is 6
  to 13 times as large as most, elsewhere 3 to 6 times; scores of attention have a deviation of 1.5 to 1.9. Here they
  are drawn like that, which gives 41 dB. Before, gains differed by 30%, two channels of each LayerNorm were up to 36
  times as large, scores had a deviation of up to 4.5 and reached 35, and 35 dB were left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Callable

Arrays = dict[str, np.ndarray]

Made = tuple[onnx.ModelProto, Arrays]
"""A net, and samples for it along the first axis of each array."""

SAMPLES = 160
"""As many as are made; half of them are held out."""


class Net:
    """An ONNX graph that is written op by op."""

    def __init__(self, seed: int, **inputs: tuple[str, list[int]]) -> None:
        """A graph with these inputs: a type and a shape for each name."""
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in inputs.items()
        ]

    def op(self, kind: str, *read: str, **attributes: Any) -> str:
        """Adds an op; gives the name of its output."""
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(read), [name], name=name, **attributes))
        return name

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        """Adds a constant; gives its name."""
        name = f"value_{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def drawn(self, *shape: int, fan: int, gain: float = 2.0) -> str:
        """Adds normal weights that keep the power of what they multiply, times `gain`."""
        return self.constant(self.rng.normal(0, (gain / fan) ** 0.5, shape))

    def conv(self, x: str, sizes: tuple[int, int, int], *, stride: int = 1, group: int = 1, bias: bool = True) -> str:
        """A convolution of `sizes` (from, to, kernel)."""
        before, after, kernel = sizes
        weight = self.drawn(after, before // group, kernel, kernel, fan=before // group * kernel * kernel)
        added = [self.constant(self.rng.normal(0, 0.1, after))] if bias else []
        pads = [kernel // 2] * 4
        return self.op("Conv", x, weight, *added, strides=[stride] * 2, pads=pads, group=group)

    def learned(self, x: str, sizes: tuple[int, int, int], feeds: Arrays, *, stride: int = 1, group: int = 1) -> str:
        """A convolution without bias, half of the power of whose weights is sums of what `x` has for `feeds`."""
        before, after, kernel = sizes
        values = self.run([x], feeds)[0] if x not in feeds else feeds[x]
        border = kernel // 2
        padded = np.pad(values, ((0, 0), (0, 0), (border, border), (border, border)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), axis=(2, 3))
        picked = (self.rng.integers(windows.shape[axis], size=512) for axis in (0, 2, 3))
        number, row, column = picked
        read = windows[number, :, row, column].reshape(512, group, -1)
        drawn = self.rng.normal(0, 1, (group, after // group, 512))
        sums = np.einsum("gos,sgk->gok", drawn, read - read.mean(0)).reshape(after, -1)
        both = [_unit(sums), _unit(self.rng.normal(0, 1, sums.shape))]
        weight = self.constant(np.sqrt(0.5) * sum(both).reshape(after, before // group, kernel, kernel))
        return self.op("Conv", x, weight, strides=[stride] * 2, pads=[border] * 4, group=group)

    def linear(self, x: str, before: int, after: int, gain: float = 1.0) -> str:
        """A product and a bias, as exporters write them."""
        product = self.op("MatMul", x, self.drawn(before, after, fan=before, gain=gain))
        return self.op("Add", product, self.constant(self.rng.normal(0, 0.1, after)))

    def batchnorm(self, x: str, channels: int, feeds: Arrays) -> str:
        """A BatchNorm with the statistics that `x` has for `feeds`, and gains that differ by an order of magnitude."""
        values = self.run([x], feeds)[0]
        axes = (0, 2, 3)
        gain, shift = self.rng.lognormal(0, 0.7, channels), self.rng.normal(0, 0.5, channels)
        numbers = (gain, shift, values.mean(axes), values.var(axes) + 1e-3)
        return self.op("BatchNormalization", x, *(self.constant(number) for number in numbers))

    def run(self, outputs: list[str], feeds: Arrays) -> list[np.ndarray]:
        """Return the values of some tensors for `feeds`."""
        message = self.model(*outputs)
        session = onnxruntime.InferenceSession(message.SerializeToString(), providers=["CPUExecutionProvider"])
        return list(session.run(None, feeds))

    def model(self, *outputs: str) -> onnx.ModelProto:
        """The graph as a model."""
        results = [onnx.ValueInfoProto(name=name) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", self.inputs, results, self.weights)
        message = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        return onnx.shape_inference.infer_shapes(message)


def _unit(rows: np.ndarray) -> np.ndarray:
    """The rows at length 1; those of a channel that is always the same stay 0."""
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6))


def pictures(channels: int, size: int, seed: int) -> np.ndarray:
    """Seeded pictures in 0 to 1: smooth patches with edges and some noise, float32 (SAMPLES, channels, size, size)."""
    rng = np.random.default_rng(seed)
    coarse = rng.random((SAMPLES, channels, size // 8, size // 8))
    smooth = np.kron(coarse, np.ones((8, 8)))
    rows, columns = np.mgrid[:size, :size] / size
    waves = np.sin(rng.uniform(2, 20, (SAMPLES, 1, 1, 1)) * rows + rng.uniform(2, 20, (SAMPLES, 1, 1, 1)) * columns)
    mixed = 0.6 * smooth + 0.15 * (waves + 1) + 0.1 * rng.random((SAMPLES, channels, size, size))
    return mixed.clip(0, 1).astype(np.float32)


def mobilenet() -> Made:
    """A MobileNetV2 of half width for pictures of 96 pixels: inverted residuals, BatchNorms, ReLU6."""
    data = {"image": pictures(3, 96, 0) * 2 - 1}
    few = {"image": data["image"][:16]}
    net = Net(1, image=("float32", ["batch", 3, 96, 96]))  # type: ignore[list-item]  # a free size has a name
    limits = net.constant(0), net.constant(6)

    def block(x: str, sizes: tuple[int, int, int], *, stride: int = 1, group: int = 1, act: bool = True) -> str:
        normal = net.batchnorm(net.learned(x, sizes, few, stride=stride, group=group), sizes[1], few)
        return net.op("Clip", normal, *limits) if act else normal

    x, width = block("image", (3, 16, 3), stride=2), 16
    for expand, after, count, first in ((1, 8, 1, 1), (6, 12, 2, 2), (6, 16, 3, 2), (6, 32, 3, 2), (6, 48, 2, 1)):
        for number in range(count):
            inner, stride = width * expand, first if number == 0 else 1
            y = block(x, (width, inner, 1)) if expand > 1 else x
            y = block(y, (inner, inner, 3), stride=stride, group=inner)
            y = block(y, (inner, after, 1), act=False)
            x, width = (net.op("Add", x, y) if stride == 1 and width == after else y), after
    x = block(x, (width, 320, 1))
    pooled = net.op("Flatten", net.op("GlobalAveragePool", x))
    weight, bias = net.drawn(100, 320, fan=320), net.constant(net.rng.normal(0, 0.1, 100))
    return net.model(net.op("Gemm", pooled, weight, bias, transB=1)), data


def _norm(net: Net, x: str, width: int, loud: list[float], samples: list[Arrays]) -> str:
    """LayerNorm as single ops; its first channels are so many times as large as the others for some samples."""
    middle = net.op("Sub", x, net.op("ReduceMean", x, axes=[-1]))
    power = net.op("ReduceMean", net.op("Pow", middle, net.constant(2)), axes=[-1])
    root = net.op("Sqrt", net.op("Add", power, net.constant(1e-5)))
    normal = net.op("Div", middle, root)
    spread = np.concatenate([net.run([normal], sample)[0] for sample in samples]).std((0, 1))
    gain = 0.6 * net.rng.lognormal(0, 0.15, width)
    gain[: len(loud)] = 0.6 * np.array(loud) * np.median(spread) / spread[: len(loud)]
    scaled = net.op("Mul", normal, net.constant(gain))
    return net.op("Add", scaled, net.constant(net.rng.normal(0, 0.05, width)))


def _gelu(net: Net, x: str) -> str:
    """GELU by erf, as single ops."""
    erf = net.op("Erf", net.op("Div", x, net.constant(2**0.5)))
    return net.op("Mul", net.op("Mul", x, net.op("Add", erf, net.constant(1))), net.constant(0.5))


def _heads(net: Net, x: str, shape: str, perm: list[int]) -> str:
    return net.op("Transpose", net.op("Reshape", x, shape), perm=perm)


def bert() -> Made:
    """An encoder of four layers: embeddings, a padding mask, LayerNorm and GELU as single ops, a pooler."""
    places, width, heads, words = 32, 128, 4, 500
    net = Net(2, ids=("int64", [1, places]), mask=("int64", [1, places]))
    rng = np.random.default_rng(3)
    mask = np.arange(places) < rng.integers(places // 2, places + 1, SAMPLES)[:, None]
    data = {"ids": rng.integers(0, words, (SAMPLES, places)), "mask": mask.astype(np.int64)}
    few = [{name: array[place : place + 1] for name, array in data.items()} for place in range(8)]
    table, position = net.drawn(words, width, fan=width), net.drawn(places, width, fan=width)
    split = net.constant([1, places, heads, width // heads], np.int64)
    join = net.constant([1, places, width], np.int64)
    wide = net.op("Unsqueeze", net.op("Cast", "mask", to=1), net.constant([1, 2], np.int64))
    far = net.op("Mul", net.op("Sub", net.constant(1), wide), net.constant(-10000))
    x = _norm(net, net.op("Add", net.op("Gather", table, "ids"), position), width, [4, 2.5], few)
    for _ in range(4):
        q = _heads(net, net.linear(x, width, width, 4), split, [0, 2, 1, 3])
        k = _heads(net, net.linear(x, width, width, 4), split, [0, 2, 3, 1])
        v = _heads(net, net.linear(x, width, width), split, [0, 2, 1, 3])
        scores = net.op("Div", net.op("MatMul", q, k), net.constant((width // heads) ** 0.5))
        mixed = net.op("MatMul", net.op("Softmax", net.op("Add", scores, far), axis=-1), v)
        joined = net.op("Reshape", net.op("Transpose", mixed, perm=[0, 2, 1, 3]), join)
        x = _norm(net, net.op("Add", x, net.linear(joined, width, width)), width, [13, 4, 3], few)
        inner = _gelu(net, net.linear(x, width, 4 * width))
        x = _norm(net, net.op("Add", x, net.linear(inner, 4 * width, width)), width, [4, 2.5], few)
    first = net.op("Gather", x, net.constant(0, np.int64), axis=1)
    pooled = net.op("Tanh", net.linear(first, width, width))
    return net.model(net.linear(pooled, width, 8)), data


def gpt() -> Made:
    """A decoder of two layers that goes on from keys and values of eight earlier words: LayerNormalization, GELU."""
    places, past, width, heads, words = 8, 8, 96, 4, 300
    size = width // heads
    kept = {f"past_{what}_{layer}": ("float32", [1, heads, past, size]) for layer in range(2) for what in "kv"}
    net = Net(4, ids=("int64", [1, places]), **kept)
    split, join = net.constant([1, places, heads, size], np.int64), net.constant([1, places, width], np.int64)
    hidden = np.triu(np.ones((places, past + places)), past + 1) * np.finfo(np.float32).min
    mask, table = net.constant(hidden), net.drawn(words, width, fan=width)

    def norm(x: str) -> str:
        gain, shift = net.rng.lognormal(0, 0.3, width), net.rng.normal(0, 0.1, width)
        return net.op("LayerNormalization", x, net.constant(gain), net.constant(shift))

    x, present = net.op("Add", net.op("Gather", table, "ids"), net.drawn(places, width, fan=width)), []
    for layer in range(2):
        y = norm(x)
        three = net.linear(y, width, 3 * width)
        cuts = net.constant([width] * 3, np.int64)
        parts = [f"part_{layer}_{number}" for number in range(3)]
        net.nodes.append(helper.make_node("Split", [three, cuts], parts, name=f"split_{layer}", axis=-1))
        q, k, v = (_heads(net, part, split, [0, 2, 1, 3]) for part in parts)
        k, v = net.op("Concat", f"past_k_{layer}", k, axis=2), net.op("Concat", f"past_v_{layer}", v, axis=2)
        present += [k, v]
        turned = net.op("Transpose", k, perm=[0, 1, 3, 2])
        scores = net.op("Mul", net.op("MatMul", q, turned), net.constant(size**-0.5))
        mixed = net.op("MatMul", net.op("Softmax", net.op("Add", scores, mask), axis=-1), v)
        joined = net.op("Reshape", net.op("Transpose", mixed, perm=[0, 2, 1, 3]), join)
        x = net.op("Add", x, net.linear(joined, width, width))
        x = net.op("Add", x, net.linear(_gelu(net, net.linear(norm(x), width, 4 * width)), 4 * width, width))
    logits = net.op("MatMul", norm(x), net.drawn(width, words, fan=width, gain=1.0))
    rng = np.random.default_rng(5)
    data = {"ids": rng.integers(0, words, (SAMPLES, places))}
    for name in kept:
        data[name] = rng.normal(0, 1, (SAMPLES, heads, past, size)).astype(np.float32)
    return net.model(logits, *present), data


def super_resolution() -> Made:
    """An ESPCN that makes each pixel nine."""
    net = Net(6, image=("float32", [1, 1, 48, 48]))
    x = net.op("Tanh", net.conv("image", (1, 64, 5)))
    x = net.op("Tanh", net.conv(x, (64, 64, 3)))
    x = net.op("Relu", net.conv(x, (64, 32, 3)))
    return net.model(net.op("DepthToSpace", net.conv(x, (32, 9, 3)), blocksize=3)), {"image": pictures(1, 48, 7)}


def detector() -> Made:
    """A small SSD: two maps of features, anchors, boxes decoded in the graph, scores of a Softmax."""
    net, classes, each = Net(8, image=("float32", [1, 3, 96, 96])), 6, 3
    x, width, boxes, scores, anchors = "image", 3, [], [], []
    for number, after in enumerate((16, 32, 64, 96)):
        x = net.op("Relu", net.conv(x, (width, after, 3), stride=2))
        x, width = net.op("Relu", net.conv(x, (after, after, 3))), after
        if number < 2:  # noqa: PLR2004  # the first two have no heads
            continue
        side = 96 >> (number + 1)
        for found, count in ((boxes, 4), (scores, classes)):
            turned = net.op("Transpose", net.conv(x, (width, each * count, 3)), perm=[0, 2, 3, 1])
            found.append(net.op("Reshape", turned, net.constant([1, -1, count], np.int64)))
        rows, columns = (np.mgrid[:side, :side] + 0.5) / side
        for row, column in zip(rows.ravel(), columns.ravel(), strict=True):
            anchors += [(column, row, scale / side, scale / side) for scale in (1.5, 2.0, 3.0)]
    centre, spread = np.array(anchors)[:, :2], np.array(anchors)[:, 2:]
    moved = net.op("Concat", *boxes, axis=1)
    ends = net.constant([0], np.int64), net.constant([2], np.int64), net.constant([4], np.int64)
    axis = net.constant([2], np.int64)
    shift = net.op("Mul", net.op("Slice", moved, ends[0], ends[1], axis), net.constant(0.1 * spread[None]))
    middle = net.op("Add", shift, net.constant(centre[None]))
    grown = net.op("Exp", net.op("Mul", net.op("Slice", moved, ends[1], ends[2], axis), net.constant(0.2)))
    half = net.op("Mul", net.op("Mul", grown, net.constant(spread[None])), net.constant(0.5))
    corners = net.op("Concat", net.op("Sub", middle, half), net.op("Add", middle, half), axis=2)
    sure = net.op("Softmax", net.op("Concat", *scores, axis=1), axis=-1)
    return net.model(corners, sure), {"image": pictures(3, 96, 9) * 2 - 1}


SEEDED: dict[str, Callable[[], Made]] = {
    "mobilenet_v2": mobilenet,
    "bert": bert,
    "gpt": gpt,
    "super_resolution": super_resolution,
    "ssd": detector,
}
"""Functions that create each net, by name; the LSTM and another transformer are those of `peers.py`."""
