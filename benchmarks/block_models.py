"""Nets of further classes for `report.py`: blocks of recent architectures with seeded weights, and a trained Keras net.

The rules were fixed before these nets were built. Their convolutions have the weights and BatchNorm statistics that
`accuracy_models.py` explains; the Keras net is trained for a few seconds on the digits of the sample models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from accuracy_models import SAMPLES, Arrays, Net, pictures
from oracle import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from accuracy_models import Made


def silu(net: Net, x: str) -> str:
    """SiLU as two ops."""
    return net.op("Mul", x, net.op("Sigmoid", x))


def layer_norm(net: Net, x: str, width: int) -> str:
    """LayerNormalization with gains that differ."""
    gain, shift = net.rng.lognormal(0, 0.2, width), net.rng.normal(0, 0.1, width)
    return net.op("LayerNormalization", x, net.constant(gain), net.constant(shift))


def split_op(net: Net, x: str, sizes: list[int], axis: int) -> list[str]:
    """Split along an axis."""
    starts = np.cumsum([0, *sizes])
    at = net.constant([axis], np.int64)
    return [
        net.op("Slice", x, net.constant([start], np.int64), net.constant([start + size], np.int64), at)
        for start, size in zip(starts, sizes, strict=False)
    ]


def heads_of(net: Net, x: str, shape: list[int], perm: list[int]) -> str:
    """Split the channels into heads."""
    return net.op("Transpose", net.op("Reshape", x, net.constant(shape, np.int64)), perm=perm)


def attention(net: Net, x: str, places: int, width: int, heads: int, batch: int = 1) -> str:
    """Self-attention of `batch` rows of `places`, with biases."""
    size = width // heads
    shape = [batch, places, heads, size]
    q, k = (heads_of(net, net.linear(x, width, width, 3), shape, perm) for perm in ([0, 2, 1, 3], [0, 2, 3, 1]))
    v = heads_of(net, net.linear(x, width, width), shape, [0, 2, 1, 3])
    scores = net.op("Mul", net.op("MatMul", q, k), net.constant(size**-0.5))
    mixed = net.op("Transpose", net.op("MatMul", net.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
    return net.linear(net.op("Reshape", mixed, net.constant([batch, places, width], np.int64)), width, width)


def mobilevit() -> Made:
    """A MobileViT block: inverted residuals, patches unfolded for two transformer layers, folded, and fused."""
    data = {"image": pictures(3, 64, 20) * 2 - 1}
    few = {"image": data["image"][:16]}
    net = Net(21, image=("float32", [1, 3, 64, 64]))
    single = [{"image": few["image"][place : place + 1]} for place in range(16)]

    def norm(x: str, channels: int) -> str:
        values = np.concatenate([net.run([x], sample)[0] for sample in single])
        gain, shift = net.rng.lognormal(0, 0.4, channels), net.rng.normal(0, 0.3, channels)
        numbers = (gain, shift, values.mean((0, 2, 3)), values.var((0, 2, 3)) + 1e-3)
        return net.op("BatchNormalization", x, *(net.constant(each) for each in numbers))

    def block(x: str, sizes: tuple[int, int, int], *, stride: int = 1, group: int = 1, act: bool = True) -> str:
        y = norm(net.conv(x, sizes, stride=stride, group=group, bias=False), sizes[1])
        return silu(net, y) if act else y

    x = block("image", (3, 16, 3), stride=2)
    y = block(block(x, (16, 64, 1)), (64, 64, 3), stride=2, group=64)
    x = block(y, (64, 32, 1), act=False)
    width, places = 64, 64
    y = net.conv(block(x, (32, 32, 3)), (32, width, 1), bias=False)
    y = net.op("Reshape", y, net.constant([width * 8, 2, 8, 2], np.int64))
    y = net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1, 3]), net.constant([1, width, places, 4], np.int64))
    y = net.op("Reshape", net.op("Transpose", y, perm=[0, 3, 2, 1]), net.constant([4, places, width], np.int64))
    for _ in range(2):
        y = net.op("Add", y, attention(net, layer_norm(net, y, width), places, width, 4, batch=4))
        inner = silu(net, net.linear(layer_norm(net, y, width), width, 2 * width))
        y = net.op("Add", y, net.linear(inner, 2 * width, width))
    y = net.op("Reshape", layer_norm(net, y, width), net.constant([1, 4, places, width], np.int64))
    y = net.op("Reshape", net.op("Transpose", y, perm=[0, 3, 2, 1]), net.constant([width * 8, 8, 2, 2], np.int64))
    y = net.op("Reshape", net.op("Transpose", y, perm=[0, 2, 1, 3]), net.constant([1, width, 16, 16], np.int64))
    x = block(net.op("Concat", x, block(y, (width, 32, 1)), axis=1), (64, 48, 3))
    pooled = net.op("Flatten", net.op("GlobalAveragePool", block(x, (48, 160, 1))))
    weight, bias = net.drawn(20, 160, fan=160), net.constant(net.rng.normal(0, 0.1, 20))
    return net.model(net.op("Gemm", pooled, weight, bias, transB=1)), data


def voices(length: int, seed: int) -> np.ndarray:
    """Seeded harmonic sounds with some noise, float32 (SAMPLES, 1, length)."""
    rng = np.random.default_rng(seed)
    pitch, loudness = rng.uniform(80, 400, (SAMPLES, 1)), 10 ** rng.uniform(-1.5, 0, (SAMPLES, 1))
    phase = 2 * np.pi * np.cumsum(pitch * (1 + 0.1 * np.sin(np.linspace(0, 9, length))), axis=1) / 8000
    tone = sum(np.sin(order * phase + order) / order for order in range(1, 8))
    waves = loudness * (tone * np.hanning(length) + 0.05 * rng.standard_normal((SAMPLES, length)))
    return waves.astype(np.float32)[:, None]


def conformer() -> Made:
    """A Conformer block behind a log-mel spectrogram that the graph computes from the waveform."""
    length, size, step, bands, width = 4096, 256, 128, 40, 96
    net, data = Net(23, wave=("float32", [1, 1, length])), {"wave": voices(length, 22)}
    angle = 2 * np.pi * np.outer(np.arange(size // 2 + 1), np.arange(size)) / size
    window, bins = np.hanning(size), size // 2 + 1
    filters = np.concatenate([np.cos(angle), -np.sin(angle)]) * window
    spectrum = net.op("Conv", "wave", net.constant(filters[:, None]), strides=[step])
    real, imaginary = split_op(net, spectrum, [bins, bins], 1)
    power = net.op("Add", net.op("Mul", real, real), net.op("Mul", imaginary, imaginary))
    places = (length - size) // step + 1
    centres = np.linspace(1, (bins - 2) ** 0.5, bands) ** 2
    mel = np.maximum(0, 1 - np.abs(np.arange(bins)[:, None] - centres) / np.maximum(2, centres / 6))
    x = net.op("MatMul", net.op("Transpose", power, perm=[0, 2, 1]), net.constant(mel))
    x = net.op("Log", net.op("Add", x, net.constant(1e-5)))
    x = net.op("Mul", net.op("Add", x, net.constant(3)), net.constant(0.25))
    x = net.linear(x, bands, width)

    def half_step(x: str) -> str:
        inner = silu(net, net.linear(layer_norm(net, x, width), width, 4 * width))
        return net.op("Add", x, net.op("Mul", net.linear(inner, 4 * width, width), net.constant(0.5)))

    for _ in range(2):
        x = half_step(x)
        x = net.op("Add", x, attention(net, layer_norm(net, x, width), places, width, 4))
        y = net.op("Transpose", layer_norm(net, x, width), perm=[0, 2, 1])
        y = net.op("Conv", y, net.drawn(2 * width, width, 1, fan=width, gain=1.0))
        value, gate = split_op(net, y, [width, width], 1)
        y = net.op("Mul", value, net.op("Sigmoid", gate))
        y = net.op("Conv", y, net.drawn(width, 1, 15, fan=15, gain=4.0), pads=[7, 7], group=width)
        numbers = (net.rng.lognormal(0, 0.3, width), net.rng.normal(0, 0.2, width), np.zeros(width), np.ones(width))
        y = silu(net, net.op("BatchNormalization", y, *(net.constant(each) for each in numbers)))
        y = net.op("Conv", y, net.drawn(width, width, 1, fan=width, gain=1.0))
        x = layer_norm(net, half_step(net.op("Add", x, net.op("Transpose", y, perm=[0, 2, 1]))), width)
    return net.model(net.linear(x, width, 32)), data


def two_stage_detector() -> Made:
    """The second stage of a detector: features at two scales, RoiAlign of given boxes, classes and decoded boxes.

    The boxes are inputs, because a selection by score would order them differently for rounded scores.
    """
    boxes, classes = 8, 10
    net = Net(25, image=("float32", [1, 3, 96, 96]), boxes=("float32", [boxes, 4]))
    rng = np.random.default_rng(24)
    low = rng.uniform(0, 60, (SAMPLES, boxes, 2))
    high = np.minimum(low + rng.uniform(12, 60, (SAMPLES, boxes, 2)), 96)
    data = {"image": pictures(3, 96, 26) * 2 - 1, "boxes": np.concatenate([low, high], 2).astype(np.float32)}
    x = net.op("Relu", net.conv("image", (3, 24, 3), stride=2))
    x = net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    for before, after in ((24, 48), (48, 48)):
        y = net.conv(net.op("Relu", net.conv(x, (before, after, 3))), (after, after, 3))
        x = net.op("Relu", net.op("Add", y, net.conv(x, (before, after, 1))))
    deep = net.op("Relu", net.conv(x, (48, 96, 3), stride=2))
    lateral = net.conv(deep, (96, 48, 1))
    empty, scales = net.constant([]), net.constant([1, 1, 2, 2])
    merged = net.op("Add", net.conv(x, (48, 48, 1)), net.op("Resize", lateral, empty, scales, mode="nearest"))
    merged = net.conv(merged, (48, 48, 3))
    index = net.constant(np.zeros(boxes), np.int64)
    attributes: dict[str, Any] = {"output_height": 5, "output_width": 5, "sampling_ratio": 2, "spatial_scale": 0.25}
    regions = net.op("RoiAlign", merged, "boxes", index, **attributes)
    x, before = net.op("Flatten", regions), 48 * 25
    for _ in range(2):
        weight, bias = net.drawn(256, before, fan=before), net.constant(net.rng.normal(0, 0.1, 256))
        x, before = net.op("Relu", net.op("Gemm", x, weight, bias, transB=1)), 256
    scores = net.op("Softmax", net.linear(x, 256, classes), axis=-1)
    moved = net.op("Mul", net.linear(x, 256, 4), net.constant([0.1, 0.1, 0.2, 0.2]))
    shift, grown = split_op(net, moved, [2, 2], 1)
    first, last = split_op(net, "boxes", [2, 2], 1)
    sizes = net.op("Sub", last, first)
    middle = net.op("Add", net.op("Add", first, net.op("Mul", sizes, net.constant(0.5))), net.op("Mul", shift, sizes))
    half = net.op("Mul", net.op("Mul", net.op("Exp", grown), sizes), net.constant(0.5))
    corners = net.op("Concat", net.op("Sub", middle, half), net.op("Add", middle, half), axis=1)
    return net.model(scores, corners), data


def t5() -> Made:
    """A T5-like encoder and decoder: RMSNorm, relative positions, gated GELU, cross-attention, no biases."""
    length, answer, width, heads, words = 24, 12, 96, 4, 400
    size = width // heads
    net = Net(27, ids=("int64", [1, length]), answer=("int64", [1, answer]))
    rng = np.random.default_rng(28)
    data: Arrays = {
        "ids": rng.integers(0, words, (SAMPLES, length)),
        "answer": rng.integers(0, words, (SAMPLES, answer)),
    }
    table = net.drawn(words, width, fan=1, gain=1.0)

    def norm(x: str) -> str:
        power = net.op("ReduceMean", net.op("Pow", x, net.constant(2)), axes=[-1])
        root = net.op("Sqrt", net.op("Add", power, net.constant(1e-6)))
        return net.op("Mul", net.op("Div", x, root), net.constant(net.rng.lognormal(0, 0.25, width)))

    def product(x: str, before: int, after: int, gain: float = 1.0) -> str:
        return net.op("MatMul", x, net.drawn(before, after, fan=before, gain=gain))

    def attend(x: str, memory: str, sizes: tuple[int, int], bias: str | None) -> str:
        q = heads_of(net, product(x, width, width, 1.5 / size**0.5), [1, sizes[0], heads, size], [0, 2, 1, 3])
        k = heads_of(net, product(memory, width, width, 1.5 / size**0.5), [1, sizes[1], heads, size], [0, 2, 3, 1])
        v = heads_of(net, product(memory, width, width), [1, sizes[1], heads, size], [0, 2, 1, 3])
        scores = net.op("MatMul", q, k)
        scores = net.op("Add", scores, bias) if bias else scores
        mixed = net.op("Transpose", net.op("MatMul", net.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return product(net.op("Reshape", mixed, net.constant([1, sizes[0], width], np.int64)), width, width)

    def gated(x: str) -> str:
        inner = product(x, width, 2 * width, 2.0)
        cube = net.op("Mul", net.op("Pow", inner, net.constant(3)), net.constant(0.044715))
        bent = net.op("Tanh", net.op("Mul", net.op("Add", inner, cube), net.constant((2 / np.pi) ** 0.5)))
        gelu = net.op("Mul", net.op("Mul", inner, net.constant(0.5)), net.op("Add", bent, net.constant(1)))
        return product(net.op("Mul", gelu, product(x, width, 2 * width)), 2 * width, width)

    def positions(count: int, *, causal: bool) -> str:
        distance = np.arange(count)[None] - np.arange(count)[:, None]
        bias = net.rng.normal(0, 1, (heads, 2 * count))[:, distance + count][None]
        return net.constant(np.where(causal & (distance > 0), np.finfo(np.float32).min, bias))

    x, bias = net.op("Gather", table, "ids"), positions(length, causal=False)
    for _ in range(2):
        y = norm(x)
        x = net.op("Add", x, attend(y, y, (length, length), bias))
        x = net.op("Add", x, gated(norm(x)))
    memory, bias = norm(x), positions(answer, causal=True)
    x = net.op("Gather", table, "answer")
    for _ in range(2):
        y = norm(x)
        x = net.op("Add", x, attend(y, y, (answer, answer), bias))
        x = net.op("Add", x, attend(norm(x), memory, (answer, length), None))
        x = net.op("Add", x, gated(norm(x)))
    return net.model(product(norm(x), width, words)), data


def keras_swish(folder: Path) -> Arrays:
    """Train a Keras 3 net with swish and squeeze-excite on digits, and export it as a SavedModel."""
    import keras

    keras.utils.set_random_seed(29)
    data = [dict(np.load(ROOT / f"sample_models/digits_cnn_{part}.npz")) for part in ("calib", "eval")]
    images, labels = np.concatenate([part["image"] for part in data]), data[1]["labels"]
    inputs = keras.Input(images.shape[1:], name="image")
    x = keras.layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    x = keras.layers.Activation("swish")(keras.layers.BatchNormalization()(x))
    for width, stride in ((24, 2), (24, 1), (40, 1)):
        y = keras.layers.Conv2D(3 * width, 1, use_bias=False)(x)
        y = keras.layers.Activation("swish")(keras.layers.BatchNormalization()(y))
        y = keras.layers.DepthwiseConv2D(3, strides=stride, padding="same", use_bias=False)(y)
        y = keras.layers.Activation("swish")(keras.layers.BatchNormalization()(y))
        squeezed = keras.layers.GlobalAveragePooling2D(keepdims=True)(y)
        squeezed = keras.layers.Conv2D(8, 1, activation="swish")(squeezed)
        y = keras.layers.Multiply()([y, keras.layers.Conv2D(3 * width, 1, activation="sigmoid")(squeezed)])
        y = keras.layers.BatchNormalization()(keras.layers.Conv2D(width, 1, use_bias=False)(y))
        x = keras.layers.Add()([x, y]) if x.shape[-1] == width and stride == 1 else y
    x = keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x))
    net = keras.Model(inputs, x)
    net.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    net.fit(data[1]["image"], labels, batch_size=32, epochs=12, verbose=0)
    net.export(folder, verbose=False)
    return {"image": images[: 100 + SAMPLES]}


BLOCKS: dict[str, Callable[[], Made]] = {
    "mobilevit": mobilevit,
    "conformer": conformer,
    "two_stage_detector": two_stage_detector,
    "t5": t5,
}
"""Functions that create each ONNX net and its samples, by name."""

SAVED_MODELS: dict[str, Callable[[Path], Arrays]] = {"keras_swish": keras_swish}
"""Functions that write a SavedModel into a folder and return its samples, by name."""
