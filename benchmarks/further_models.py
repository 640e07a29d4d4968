"""Nets of classes that no rule was made for, with seeded weights, for `report.py`; see `accuracy_models.py`.

The rules were fixed before these nets were built.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from accuracy_models import SAMPLES, Net, pictures
from block_models import layer_norm, silu, voices

if TYPE_CHECKING:
    from collections.abc import Callable

    from accuracy_models import Arrays, Made


def relu_conv(net: Net, x: str, sizes: tuple[int, int, int], stride: int = 1) -> str:
    """Convolution and Relu."""
    return net.op("Relu", net.conv(x, sizes, stride=stride))


def mean_of(net: Net, x: str, axes: list[int], *, keep: bool = False) -> str:
    """Mean over axes."""
    return net.op("ReduceMean", x, axes=axes, keepdims=int(keep))


def part(net: Net, x: str, start: int, end: int, axis: int) -> str:
    """Slice of one axis."""
    return net.op("Slice", x, *(net.constant([value], np.int64) for value in (start, end, axis)))


def efficientnet() -> Made:
    """Inverted residuals with BatchNorm, SiLU and squeeze-and-excitation."""
    data = {"image": pictures(3, 64, 40) * 2 - 1}
    few = {"image": data["image"][:16]}
    net = Net(41, image=("float32", ["batch", 3, 64, 64]))  # type: ignore[list-item]  # a free size has a name

    def block(x: str, sizes: tuple[int, int, int], *, stride: int = 1, group: int = 1, act: bool = True) -> str:
        y = net.batchnorm(net.learned(x, sizes, few, stride=stride, group=group), sizes[1], few)
        return silu(net, y) if act else y

    x, width = block("image", (3, 16, 3), stride=2), 16
    for after, stride, kernel in ((24, 2, 3), (24, 1, 3), (40, 2, 5), (40, 1, 5)):
        inner = 4 * width
        y = block(x, (width, inner, 1))
        y = block(y, (inner, inner, kernel), stride=stride, group=inner)
        squeezed = silu(net, net.conv(net.op("GlobalAveragePool", y), (inner, width // 4, 1)))
        y = net.op("Mul", y, net.op("Sigmoid", net.conv(squeezed, (width // 4, inner, 1))))
        y = block(y, (inner, after, 1), act=False)
        x, width = (net.op("Add", x, y) if after == width else y), after
    x = net.op("Flatten", net.op("GlobalAveragePool", block(x, (width, 160, 1))))
    return net.model(net.linear(x, 160, 20)), data


def gru_seq2seq() -> Made:
    """GRU encoder and decoder over embeddings, with attention to the encoder's states."""
    length, answer, width, words = 20, 12, 64, 300
    rng = np.random.default_rng(42)
    data: Arrays = {
        "ids": rng.integers(0, words, (SAMPLES, length)),
        "answer": rng.integers(0, words, (SAMPLES, answer)),
    }
    net = Net(43, ids=("int64", [1, length]), answer=("int64", [1, answer]))
    table = net.drawn(words, width, fan=1, gain=1.0)

    def gru(ids: str, first: str) -> tuple[str, str]:
        x = net.op("Transpose", net.op("Gather", table, ids), perm=[1, 0, 2])
        weight, again = (net.drawn(1, 3 * width, width, fan=width, gain=1.0) for _ in range(2))
        bias = net.constant(net.rng.normal(0, 0.1, (1, 6 * width)))
        y = net.op("GRU", x, weight, again, bias, "", first, hidden_size=width, linear_before_reset=1)
        states = net.op("Transpose", net.op("Squeeze", y, net.constant([1], np.int64)), perm=[1, 0, 2])
        last = net.op("Transpose", part(net, states, -1, 2**31, 1), perm=[1, 0, 2])
        return states, last

    memory, last = gru("ids", "")
    states, _ = gru("answer", last)
    query = net.linear(states, width, width, 3)
    scores = net.op("MatMul", query, net.op("Transpose", memory, perm=[0, 2, 1]))
    context = net.op("MatMul", net.op("Softmax", scores, axis=-1), memory)
    x = net.op("Tanh", net.linear(net.op("Concat", states, context, axis=-1), 2 * width, width))
    return net.model(net.linear(x, width, words)), data


def unet() -> Made:
    """U-Net: convolutions down, transposed convolutions up, skip connections by Concat."""
    net, data = Net(45, image=("float32", [1, 3, 64, 64])), {"image": pictures(3, 64, 44) * 2 - 1}
    x, skips = relu_conv(net, "image", (3, 16, 3)), []
    for width in (16, 32):
        skips.append(relu_conv(net, x, (width, width, 3)))
        x = net.op("MaxPool", skips[-1], kernel_shape=[2, 2], strides=[2, 2])
        x = relu_conv(net, x, (width, 2 * width, 3))
    for width in (32, 16):
        weight = net.drawn(2 * width, width, 2, 2, fan=2 * width)
        x = net.op("ConvTranspose", x, weight, net.constant(net.rng.normal(0, 0.1, width)), strides=[2, 2])
        x = relu_conv(net, net.op("Concat", x, skips.pop(), axis=1), (2 * width, width, 3))
    return net.model(net.op("Sigmoid", net.conv(x, (16, 1, 1)))), data


def audio_net() -> Made:
    """Depthwise separable 1-D convolutions over log-mel features that the graph computes from waves."""
    length, size, step, bands, width = 4096, 256, 128, 40, 64
    net, data = Net(47, wave=("float32", [1, 1, length])), {"wave": voices(length, 46)}
    bins = size // 2 + 1
    angle = 2 * np.pi * np.outer(np.arange(bins), np.arange(size)) / size
    real, imaginary = (
        net.op("Pow", net.op("Conv", "wave", net.constant((wave * np.hanning(size))[:, None]), strides=[step]), two)
        for wave, two in ((np.cos(angle), net.constant(2)), (np.sin(angle), net.constant(2)))
    )
    centres = np.linspace(1, (bins - 2) ** 0.5, bands) ** 2
    mel = np.maximum(0, 1 - np.abs(np.arange(bins)[:, None] - centres) / np.maximum(2, centres / 6)).T
    x = net.op("MatMul", net.constant(mel), net.op("Sqrt", net.op("Add", real, imaginary)))
    x = net.op("Log", net.op("Clip", x, net.constant(1e-3)))
    before = bands
    for _ in range(3):
        kernel = net.drawn(before, 1, 9, fan=9)
        x = net.op("Relu", net.op("Conv", x, kernel, pads=[4, 4], group=before))
        bias = net.constant(net.rng.normal(0, 0.1, width))
        x = net.op("Relu", net.op("Conv", x, net.drawn(width, before, 1, fan=before), bias))
        before = width
    return net.model(net.linear(mean_of(net, x, [2]), width, 12)), data


def pointnet() -> Made:
    """PointNet with a learned alignment: shared layers over points, a maximum, a product of matrices."""
    points = 128
    rng = np.random.default_rng(48)
    cloud = rng.normal(0, 1, (SAMPLES, points, 3)) * rng.uniform(0.2, 1, (SAMPLES, 1, 3))
    net = Net(49, points=("float32", [1, points, 3]))

    def shared(x: str, widths: tuple[int, ...]) -> str:
        for before, after in pairwise(widths):
            x = net.op("Relu", net.linear(x, before, after, 2.0))
        return net.op("ReduceMax", x, axes=[1], keepdims=0)

    turn = net.linear(net.op("Relu", net.linear(shared("points", (3, 32, 64, 128)), 128, 64, 2.0)), 64, 9, 0.1)
    turn = net.op("Add", net.op("Reshape", turn, net.constant([1, 3, 3], np.int64)), net.constant(np.eye(3)[None]))
    x = shared(net.op("MatMul", "points", turn), (3, 64, 64, 128, 256))
    x = net.op("Relu", net.linear(x, 256, 128, 2.0))
    return net.model(net.linear(x, 128, 10)), {"points": cloud.astype(np.float32)}


def convnext() -> Made:
    """ConvNeXt: depthwise 7x7, LayerNorm and an inverted bottleneck with GELU over channels, LayerScale."""
    net, data = Net(51, image=("float32", [1, 3, 64, 64])), {"image": pictures(3, 64, 50) * 2 - 1}
    x, width = net.op("Conv", "image", net.drawn(32, 3, 4, 4, fan=48), strides=[4, 4]), 32
    for after in (32, 32, 64, 64):
        if after != width:
            y = net.op(
                "Transpose", layer_norm(net, net.op("Transpose", x, perm=[0, 2, 3, 1]), width), perm=[0, 3, 1, 2]
            )
            x, width = net.op("Conv", y, net.drawn(after, width, 2, 2, fan=4 * width), strides=[2, 2]), after
        y = net.op("Transpose", net.conv(x, (width, width, 7), group=width), perm=[0, 2, 3, 1])
        y = net.linear(layer_norm(net, y, width), width, 4 * width, 2.0)
        erf = net.op("Erf", net.op("Div", y, net.constant(2**0.5)))
        y = net.op("Mul", net.op("Mul", y, net.op("Add", erf, net.constant(1))), net.constant(0.5))
        y = net.op("Mul", net.linear(y, 4 * width, width), net.constant(net.rng.lognormal(-1, 0.5, width)))
        x = net.op("Add", x, net.op("Transpose", y, perm=[0, 3, 1, 2]))
    return net.model(net.linear(layer_norm(net, mean_of(net, x, [2, 3]), width), width, 20)), data


def swin() -> Made:
    """Two Swin layers: attention in windows with relative positions, the second with shifted windows and a mask."""
    side, window, width, heads = 16, 4, 48, 3
    net, data = Net(53, image=("float32", [1, 3, 64, 64])), {"image": pictures(3, 64, 52) * 2 - 1}
    x = net.op("Conv", "image", net.drawn(width, 3, 4, 4, fan=48), strides=[4, 4])
    x = layer_norm(net, net.op("Transpose", x, perm=[0, 2, 3, 1]), width)
    count, places, size = (side // window) ** 2, window**2, width // heads

    def reshaped(y: str, *shape: int) -> str:
        return net.op("Reshape", y, net.constant(shape, np.int64))

    def rolled(y: str, shift: int) -> str:
        for axis in (1, 2):
            y = net.op("Concat", part(net, y, shift, 2**31, axis), part(net, y, 0, shift, axis), axis=axis)
        return y

    groups = np.zeros((side, side), int)
    for row, rows in enumerate((slice(-window), slice(-window, -2), slice(-2, None))):
        for column, columns in enumerate((slice(-window), slice(-window, -2), slice(-2, None))):
            groups[rows, columns] = 3 * row + column
    groups = groups.reshape(4, window, 4, window).transpose(0, 2, 1, 3).reshape(count, places)
    mask = np.where(groups[:, None] == groups[:, :, None], 0, -100)[:, None]
    for shift in (0, 2):
        y = layer_norm(net, x, width)
        y = rolled(y, shift) if shift else y
        y = net.op("Transpose", reshaped(y, 4, window, 4, window, width), perm=[0, 2, 1, 3, 4])
        joined = net.linear(reshaped(y, count, places, width), width, 3 * width, 2.0)
        joined = net.op("Transpose", reshaped(joined, count, places, 3, heads, size), perm=[2, 0, 3, 1, 4])
        q, k, v = (net.op("Gather", joined, net.constant(index, np.int64), axis=0) for index in range(3))
        scores = net.op("MatMul", net.op("Mul", q, net.constant(size**-0.5)), net.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = net.op("Add", scores, net.constant(net.rng.normal(0, 1, (1, heads, places, places))))
        scores = net.op("Add", scores, net.constant(mask)) if shift else scores
        mixed = net.op("Transpose", net.op("MatMul", net.op("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        y = net.linear(reshaped(mixed, count, places, width), width, width)
        y = net.op("Transpose", reshaped(y, 4, 4, window, window, width), perm=[0, 2, 1, 3, 4])
        y = reshaped(y, 1, side, side, width)
        x = net.op("Add", x, rolled(y, side - shift) if shift else y)
        y = net.linear(layer_norm(net, x, width), width, 4 * width, 2.0)
        erf = net.op("Erf", net.op("Div", y, net.constant(2**0.5)))
        y = net.op("Mul", net.op("Mul", y, net.op("Add", erf, net.constant(1))), net.constant(0.5))
        x = net.op("Add", x, net.linear(y, 4 * width, width))
    return net.model(net.linear(layer_norm(net, mean_of(net, x, [1, 2]), width), width, 20)), data


def wavenet() -> Made:
    """WaveNet: dilated causal convolutions, tanh times sigmoid, residual and skip sums."""
    length, width = 1024, 32
    net, data = Net(55, wave=("float32", [1, 1, length])), {"wave": voices(length, 54)}
    x, skips = net.op("Conv", "wave", net.drawn(width, 1, 1, fan=1, gain=4.0)), ""
    for dilation in (1, 2, 4, 8, 16, 32):
        y = net.op("Pad", x, net.constant([0, 0, dilation, 0, 0, 0], np.int64))
        bias = net.constant(net.rng.normal(0, 0.1, 2 * width))
        y = net.op("Conv", y, net.drawn(2 * width, width, 2, fan=2 * width), bias, dilations=[dilation])
        y = net.op(
            "Mul", net.op("Tanh", part(net, y, 0, width, 1)), net.op("Sigmoid", part(net, y, width, 2 * width, 1))
        )
        skip = net.op("Conv", y, net.drawn(2 * width, width, 1, fan=width))
        skips = net.op("Add", skips, skip) if skips else skip
        x = net.op("Add", x, net.op("Conv", y, net.drawn(width, width, 1, fan=width)))
    x = net.op("Relu", net.op("Conv", net.op("Relu", skips), net.drawn(64, 2 * width, 1, fan=2 * width)))
    return net.model(net.op("Conv", x, net.drawn(64, 64, 1, fan=64))), data


def dlrm() -> Made:
    """DLRM: embeddings and dense features, products of all pairs, and a head with a Sigmoid."""
    tables, rows, width = 8, 500, 32
    rng = np.random.default_rng(56)
    dense = np.log1p(rng.lognormal(1, 2, (SAMPLES, 1, 13))).astype(np.float32)
    data: Arrays = {"dense": dense, "ids": rng.zipf(1.3, (SAMPLES, 1, tables)) % rows}
    net = Net(57, dense=("float32", [1, 13]), ids=("int64", [1, tables]))
    x, before = "dense", 13
    for after in (128, 64, width):
        x, before = net.op("Relu", net.linear(x, before, after, 2.0)), after
    vectors = [net.op("Unsqueeze", x, net.constant([1], np.int64))]
    vectors += [
        net.op("Gather", net.drawn(rows, width, fan=4), part(net, "ids", table, table + 1, 1))
        for table in range(tables)
    ]
    joined = net.op("Concat", *vectors, axis=1)
    pairs = net.op("MatMul", joined, net.op("Transpose", joined, perm=[0, 2, 1]))
    count = tables + 1
    flat = net.op("Reshape", pairs, net.constant([1, count**2], np.int64))
    below = [row * count + column for row in range(count) for column in range(row)]
    x = net.op("Concat", x, net.op("Gather", flat, net.constant(below, np.int64), axis=1), axis=1)
    before = width + len(below)
    for after in (256, 128):
        x, before = net.op("Relu", net.linear(x, before, after, 2.0)), after
    return net.model(net.op("Sigmoid", net.linear(x, before, 1))), data


def hrnet() -> Made:
    """HRNet: two resolutions that exchange features by strided convolutions and upsampling, for heatmaps."""
    net, data = Net(59, image=("float32", [1, 3, 64, 64])), {"image": pictures(3, 64, 58) * 2 - 1}
    high = relu_conv(net, relu_conv(net, "image", (3, 24, 3), 2), (24, 24, 3))
    low, scales = relu_conv(net, high, (24, 48, 3), 2), net.constant([1, 1, 2, 2])
    for _ in range(2):
        high = net.op("Relu", net.op("Add", high, net.conv(relu_conv(net, high, (24, 24, 3)), (24, 24, 3))))
        low = net.op("Relu", net.op("Add", low, net.conv(relu_conv(net, low, (48, 48, 3)), (48, 48, 3))))
        up = net.op("Resize", net.conv(low, (48, 24, 1)), net.constant([]), scales, mode="nearest")
        down = net.conv(high, (24, 48, 3), stride=2)
        high, low = net.op("Relu", net.op("Add", high, up)), net.op("Relu", net.op("Add", low, down))
    return net.model(net.conv(high, (24, 17, 1)), net.conv(low, (48, 17, 1))), data


def transducer() -> Made:
    """RNN-T: an LSTM over frames, an LSTM over labels, and a joiner that adds all pairs of their states."""
    frames, labels, width, words = 24, 8, 64, 100
    rng = np.random.default_rng(60)
    sound = np.cumsum(rng.normal(0, 0.3, (SAMPLES, 1, frames, 40)), axis=2).astype(np.float32)
    data: Arrays = {"frames": sound, "labels": rng.integers(0, words, (SAMPLES, 1, labels))}
    net = Net(61, frames=("float32", [1, frames, 40]), labels=("int64", [1, labels]))

    def lstm(x: str, before: int) -> str:
        x = net.op("Transpose", x, perm=[1, 0, 2])
        weight = net.drawn(1, 4 * width, before, fan=before, gain=1.0)
        again = net.drawn(1, 4 * width, width, fan=width, gain=1.0)
        y = net.op("LSTM", x, weight, again, net.constant(net.rng.normal(0, 0.1, (1, 8 * width))), hidden_size=width)
        return net.op("Transpose", net.op("Squeeze", y, net.constant([1], np.int64)), perm=[1, 0, 2])

    sounds = net.linear(lstm("frames", 40), width, 128)
    table = net.drawn(words, 32, fan=1, gain=1.0)
    spoken = net.linear(lstm(net.op("Gather", table, "labels"), 32), width, 128)
    pairs = (net.op("Unsqueeze", x, net.constant([axis], np.int64)) for x, axis in ((sounds, 2), (spoken, 1)))
    x = net.linear(net.op("Tanh", net.op("Add", *pairs)), 128, words, 4.0)
    return net.model(net.op("LogSoftmax", x, axis=-1)), data


FURTHER: dict[str, Callable[[], Made]] = {
    "efficientnet": efficientnet,
    "gru_seq2seq": gru_seq2seq,
    "unet": unet,
    "audio_net": audio_net,
    "pointnet": pointnet,
    "convnext": convnext,
    "swin": swin,
    "wavenet": wavenet,
    "dlrm": dlrm,
    "hrnet": hrnet,
    "transducer": transducer,
}
"""Functions that create each net and its samples, by name."""
