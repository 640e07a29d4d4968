"""Fit the table of ONNX Runtime's kernel costs that plans use, on this machine.

Run: python benchmarks/kernel_costs.py --out FILE.toml [--threads N] [--seed N] [--nets N]

Small nets of all kinds of ops are drawn and timed in float, quantized, and quantized in part. The time of each model is
the sum of the work of its ops and conversions (`graphquant.backends.onnxruntime_costs`) times unknown costs, which are
fitted with least squares of the relative errors. No cost is negative.

Times are the processor time of one run with `--threads` threads: the least of several sessions. With several threads,
it is the elapsed time. The program takes about ten minutes and wants a quiet machine. It prints how well the table
predicts a fifth of the nets that took no part in the fit.

`--kernels 'conv.*line' --families line_convs pointwise_lines` fits the costs of these kernels only.

A rule file uses a table with the key `costs = "FILE.toml"`.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
from accuracy_models import Net

import graphquant as gq
from graphquant.api.plan import plan_with_rules, resolve_ruleset, select_sites
from graphquant.backends.integer_placement import (
    DEQUANTIZE,
    PLANAR_POOL,
    QUANTIZE,
    Activation,
    Placement,
    without_float_ops,
)
from graphquant.backends.onnxruntime_costs import SHIPPED_COSTS, CostTable, read_cost_table
from graphquant.errors import GraphQuantError
from graphquant.optimize.latency import choose_clock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.cost_tables import write_cost_table  # its folder was added above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import onnx

    Generator = np.random.Generator

SESSIONS, BLOCK_SECONDS, BLOCKS = 4, 0.006, 8
TESTED = 5  # of each family, every fifth net tests the fit
WIDTHS = (6, 8, 12, 16, 20, 24, 32, 40, 48, 64, 72, 96, 128, 192, 256)  # blocks of channels are full or in part
MAX_MAP_VALUES = 500_000  # of one feature map
USUAL_COSTS = {"ops": (1000.0, 0.3), "values": (0.2, 0.03)}
"""Usual nanoseconds of an op without any work and of a value, and how much each counts beside a measured net."""

RUN = ("run", "ops")
"""Work of each run as a whole."""


def limit_width(width: int, size: int) -> int:
    """Return a number of channels with which a map of `size` rows and columns is not too large to measure."""
    return min(width, MAX_MAP_VALUES // size**2 // 8 * 8)


def conv_chain(net: Net, rng: Generator, kernel: int) -> str:
    """Convolutions over a feature map, each with a Relu."""
    width, size = int(rng.choice(WIDTHS)), int(rng.choice([3, 5, 7, 14, 28, 56, 112]))
    width = limit_width(width, size)
    x, previous = "x", width
    net.shape = [1, width, size, size]
    for _ in range(int(rng.integers(2, 5))):
        following = max(int(width * rng.choice([0.5, 1, 1, 2])), 4)
        x, previous = net.op("Relu", net.conv(x, (previous, following, kernel))), following
    return x


def dense_convs(net: Net, rng: Generator) -> str:
    """3x3 and 5x5 convolutions."""
    return conv_chain(net, rng, int(rng.choice([3, 3, 5])))


def pointwise_convs(net: Net, rng: Generator) -> str:
    """1x1 convolutions."""
    return conv_chain(net, rng, 1)


def inverted_residuals(net: Net, rng: Generator) -> str:
    """The blocks of a MobileNet."""
    width, size = int(rng.choice([6, 8, 10, 16, 24, 36, 48, 96])), int(rng.choice([4, 7, 14, 28, 56]))
    net.shape, x = [1, width, size, size], "x"
    limits = net.constant(0), net.constant(6)
    for _ in range(2):
        inner, kernel = width * int(rng.choice([1, 4, 6])), int(rng.choice([3, 3, 5]))
        y = net.op("Clip", net.conv(x, (width, inner, 1)), *limits)
        y = net.op("Clip", net.conv(y, (inner, inner, kernel), group=inner), *limits)
        x = net.op("Add", x, net.conv(y, (inner, width, 1)))
    return x


def depthwise_separable(net: Net, rng: Generator) -> str:
    """Depthwise and 1x1 convolutions in turn."""
    width, size = int(rng.choice(WIDTHS)), int(rng.choice([3, 5, 10, 20, 40, 80, 128]))
    width = limit_width(width, size)
    net.shape, x = [1, width, size, size], "x"
    for _ in range(3):
        x = net.op("Relu", net.conv(x, (width, width, 3), group=width, stride=int(rng.choice([1, 1, 2]))))
        x = net.op("Relu", net.conv(x, (width, width, 1)))
    return x


def residual_blocks(net: Net, rng: Generator) -> str:
    """Depthwise and 1x1 convolutions with skip connections, and an activation after the sum."""
    width, size = int(rng.choice(WIDTHS)), int(rng.choice([4, 8, 16, 32, 64, 128]))
    width, kernel = limit_width(width, size), int(rng.choice([3, 3, 5]))
    net.shape, x = [1, width, size, size], "x"
    for _ in range(3):
        y = net.conv(x, (width, width, kernel), group=width)
        x = net.op("Relu", net.op("Add", x, net.conv(y, (width, width, 1))))
    return x


def image_stem(net: Net, rng: Generator) -> str:
    """The first convolutions on an image."""
    channels, size = int(rng.choice([1, 3, 3])), int(rng.choice([16, 28, 64, 96, 160]))
    width, stride = int(rng.choice([8, 16, 32, 64])), int(rng.choice([1, 2]))
    net.shape = [1, channels, size, size]
    x = net.op("Relu", net.conv("x", (channels, width, int(rng.choice([3, 3, 5, 7]))), stride=stride))
    return net.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])


def grouped_convs(net: Net, rng: Generator) -> str:
    """Convolutions in groups of 8 and more channels."""
    groups, inputs, size = int(rng.choice([2, 4, 8, 16])), int(rng.choice([8, 16, 32])), int(rng.choice([7, 14, 28]))
    width = groups * inputs
    net.shape, x = [1, width, size, size], "x"
    for _ in range(2):
        x = net.op("Relu", net.conv(x, (width, width, 3), group=groups))
    return net.conv(x, (width, width, 1))


def line_convs(net: Net, rng: Generator) -> str:
    """Convolutions over a sequence, depthwise ones among them."""
    width, length = int(rng.choice([8, 12, 16, 32, 40, 64, 128, 256])), int(rng.choice([1, 8, 32, 64, 128, 512]))
    before, x = int(rng.choice([1, 2, width, width])), "x"
    net.shape = [1, before, length]
    for _ in range(3):
        kernel = int(rng.choice([1, 3, 5, 9, 31] if before < width else [1, 3, 5, 9]))
        groups = int(rng.choice([1, 1, width])) if before == width else 1
        weight = net.drawn(width, before // groups, kernel, fan=before // groups * kernel)
        before = width
        bias = net.constant(rng.normal(0, 0.1, width))
        x = net.op("Relu", net.op("Conv", x, weight, bias, pads=[kernel // 2] * 2, group=groups))
    return x


def pointwise_lines(net: Net, rng: Generator) -> str:
    """Convolutions of one position over short and long sequences, as in speech separation."""
    width, length = int(rng.choice(WIDTHS)), int(rng.choice([8, 50, 200, 500, 1000, 4000]))
    width = min(width, MAX_MAP_VALUES // length // 8 * 8)
    net.shape, x = [1, width, length], "x"
    for _ in range(3):
        following = max(int(width * rng.choice([0.5, 1, 2])), 4)
        weight, bias = net.drawn(following, width, 1, fan=width), net.constant(rng.normal(0, 0.1, following))
        x, width = net.op("Relu", net.op("Conv", x, weight, bias)), following
    return x


def volume_convs(net: Net, rng: Generator) -> str:
    """Convolutions over volumes, depthwise and factorized ones among them, with a pool or a skip connection."""
    width, depth = int(rng.choice([4, 8, 12, 16, 24, 32, 48, 64])), int(rng.choice([2, 4, 8, 16]))
    size, before, x = int(rng.choice([4, 7, 14, 28])), int(rng.choice([1, 3, width, width])), "x"
    net.shape = [1, before, depth, size, size]
    for _ in range(3):
        kernel = [(1, 1, 1), (3, 3, 3), (3, 3, 3), (1, 3, 3), (3, 1, 1)][int(rng.integers(5))]
        groups = int(rng.choice([1, 1, 1, width])) if before == width else 1
        weight = net.drawn(width, before // groups, *kernel, fan=before // groups * int(np.prod(kernel)))
        pads = [size // 2 for size in kernel] * 2
        y = net.op("Conv", x, weight, net.constant(rng.normal(0, 0.1, width)), pads=pads, group=groups)
        x = net.op("Relu", net.op("Add", x, y) if before == width and rng.integers(2) else y)
        before = width
    return net.op("MaxPool", x, kernel_shape=[2] * 3, strides=[2] * 3) if rng.integers(2) else x


def float_ops(net: Net, rng: Generator) -> str:
    """Ops without int8 kernels between convolutions."""
    width, size = int(rng.choice([8, 16, 32, 64, 128])), int(rng.choice([4, 7, 14, 28]))
    net.shape, x = [1, width, size, size], "x"
    for _ in range(3):
        y = net.conv(x, (width, width, 1))
        kinds = (
            "HardSwish",
            "HardSwish",
            "Resize",
            "Elu",
            "Softplus",
            "Abs",
            "Erf",
            "LayerNormalization",
            "ReduceMean",
        )
        kind = str(rng.choice(kinds))
        more = ["", net.constant([1, 1, 2, 2])] if kind == "Resize" else []
        if kind == "LayerNormalization":
            y = net.op("Transpose", y, perm=[0, 2, 3, 1])
            y = net.op(kind, y, net.constant(np.ones(width)), net.constant(np.zeros(width)))
            x = net.op("Transpose", y, perm=[0, 3, 1, 2])
        elif kind == "ReduceMean":
            gate = net.op("HardSigmoid", net.conv(net.op(kind, y, axes=[2, 3]), (width, width, 1)))
            x = net.op("Mul", y, gate)
        else:
            x = net.op(kind, y, *more, **({"mode": "linear"} if kind == "Resize" else {}))
    return net.conv(x, (width, width, 1))


def layers(net: Net, rng: Generator) -> str:
    """A multi-layer perceptron, for one row and for many."""
    rows, width = int(rng.choice([1, 1, 1, 1, 4, 16, 64, 128])), int(rng.choice([8, 16, 32, 64, 128, 256, 512]))
    net.shape, x = [rows, width], "x"
    as_gemm, following_op = bool(rng.integers(2)), str(rng.choice(["Relu", "Relu", "Tanh", "Sigmoid"]))
    for _ in range(int(rng.integers(2, 5))):
        following = max(int(width * rng.choice([0.25, 0.5, 1, 1, 2, 4])), 2)
        if as_gemm:
            weight, bias = net.drawn(width, following, fan=width), net.constant(rng.normal(0, 0.1, following))
            x = net.op(following_op, net.op("Gemm", x, weight, bias))
        else:
            x = net.op(following_op, net.linear(x, width, following))
        width = following
    return x


def attention(net: Net, rng: Generator) -> str:
    """Self-attention and a feed-forward layer."""
    rows, heads, width = (
        int(rng.choice([1, 8, 32, 64, 128])),
        int(rng.choice([2, 4, 8])),
        int(rng.choice([64, 128, 256])),
    )
    net.shape = [1, rows, width]
    split = net.constant([1, rows, heads, width // heads], np.int64)
    joined = net.constant([1, rows, width], np.int64)
    query, key, value = (net.op("Reshape", net.linear("x", width, width), split) for _ in range(3))
    query, value = (net.op("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, value))
    scores = net.op("MatMul", query, net.op("Transpose", key, perm=[0, 2, 3, 1]))
    scores = net.op("Softmax", net.op("Mul", scores, net.constant((width / heads) ** -0.5)), axis=-1)
    mixed = net.op("Transpose", net.op("MatMul", scores, value), perm=[0, 2, 1, 3])
    x = net.op("Add", "x", net.linear(net.op("Reshape", mixed, joined), width, width))
    return net.op("Add", x, net.linear(net.op("Relu", net.linear(x, width, 2 * width)), 2 * width, width))


def squeeze_excite(net: Net, rng: Generator) -> str:
    """Convolutions whose channels are scaled by a gate."""
    width, size = int(rng.choice([16, 32, 64, 128])), int(rng.choice([4, 7, 14, 28]))
    net.shape, x = [1, width, size, size], "x"
    for _ in range(2):
        y = net.op("Relu", net.conv(x, (width, width, int(rng.choice([1, 3])))))
        gate = net.op("Relu", net.conv(net.op("GlobalAveragePool", y), (width, width // 4, 1)))
        gate = net.op("Sigmoid", net.conv(gate, (width // 4, width, 1)))
        x = net.op("Mul", y, gate)
    return x


def silu_convs(net: Net, rng: Generator) -> str:
    """Convolutions with SiLU, in the branches of a detector."""
    width, size = int(rng.choice([8, 16, 32, 64, 128])), int(rng.choice([7, 13, 26, 52]))
    net.shape, x = [1, width, size, size], "x"

    def block(x: str, before: int, after: int, kernel: int, group: int = 1) -> str:
        y = net.conv(x, (before, after, kernel), group=group)
        return net.op("Mul", y, net.op("Sigmoid", y))

    for _ in range(2):
        first, second = block(x, width, width // 2, 1), block(x, width, width // 2, 1)
        second = block(block(second, width // 2, width // 2, 3, width // 2), width // 2, width // 2, 1)
        x = net.op("Concat", first, second, axis=1)
    return x


def hard_swish_convs(net: Net, rng: Generator) -> str:
    """Pointwise and depthwise convolutions with hard-swish, which ONNX Runtime runs as four float ops."""
    width, size = int(rng.choice([8, 12, 16, 24, 40, 64, 104, 128])), int(rng.choice([4, 7, 14, 28]))
    net.shape, x = [1, width, size, size], "x"
    three, six, zero = (net.constant(value) for value in (3, 6, 0))

    def activate(y: str) -> str:
        return net.op("Div", net.op("Mul", y, net.op("Clip", net.op("Add", y, three), zero, six)), six)

    for _ in range(2):
        y = activate(net.conv(x, (width, 2 * width, 1)))
        y = activate(net.conv(y, (2 * width, 2 * width, int(rng.choice([3, 5]))), group=2 * width))
        x = net.op("Add", x, net.conv(y, (2 * width, width, 1)))
    return x


def gated_convs(net: Net, rng: Generator) -> str:
    """Convolutions that are multiplied by the sigmoid of others, and added."""
    width, size = int(rng.choice([8, 16, 32, 64, 128])), int(rng.choice([5, 10, 20, 40]))
    net.shape, x = [1, width, size, size], "x"
    for _ in range(2):
        gate = net.op("Sigmoid", net.conv(x, (width, width, 1)))
        x = net.op("Add", x, net.op("Mul", net.conv(x, (width, width, int(rng.choice([1, 3])))), gate))
    return x


def unet(net: Net, rng: Generator) -> str:
    """Convolutions at two resolutions, joined."""
    width, size = int(rng.choice([8, 16, 32, 64])), 2 * int(rng.choice([4, 8, 16, 32]))
    net.shape = [1, width, size, size]
    top = net.op("Relu", net.conv("x", (width, width, 3)))
    low = net.op("MaxPool", top, kernel_shape=[2, 2], strides=[2, 2])
    low = net.op("Relu", net.conv(low, (width, 2 * width, 3)))
    scales = net.constant([1, 1, 2, 2])
    up = net.op(
        "Resize", low, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    return net.conv(net.op("Concat", top, up, axis=1), (3 * width, width, 3))


def activation(net: Net, rng: Generator, x: str) -> str:
    """A Relu, which int8 convolutions fuse, or a LeakyRelu, which they do not."""
    return net.op("Relu", x) if rng.integers(2) else net.op("LeakyRelu", x, alpha=0.1)


def heads(net: Net, rng: Generator) -> str:
    """Convolutions whose outputs are reordered for rows of values, as in detectors and vision transformers."""
    width, size = int(rng.choice([8, 16, 32, 64, 128])), int(rng.choice([4, 8, 16, 32]))
    net.shape, parts = [1, width, size, size], []
    x = net.op("Relu", net.conv("x", (width, width, int(rng.choice([1, 3])))))
    for _ in range(2):
        part = net.op("Transpose", net.op("Relu", net.conv(x, (width, width, 1))), perm=[0, 2, 3, 1])
        parts.append(net.op("Reshape", part, net.constant([1, -1, width], np.int64)))
    x = net.op("Concat", *parts, axis=1)
    return net.linear(x, width, width) if rng.integers(2) else x


def pools(net: Net, rng: Generator) -> str:
    """Pools, leaky activations, slices and transpositions between convolutions."""
    width, size = int(rng.choice([8, 16, 32, 64, 128])), int(rng.choice([6, 12, 24, 48]))
    net.shape = [1, width, size, size]
    x = activation(net, rng, net.conv("x", (width, width, int(rng.choice([1, 3])))))
    kind = int(rng.integers(4))
    if kind == 0:
        x = net.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])
    elif kind == 1:
        x = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2])
    elif kind == 2:  # noqa: PLR2004  # one of four kinds
        parts = [net.constant([value], np.int64) for value in (0, width // 2, 1)]
        x = net.op("Concat", net.op("Slice", x, parts[0], parts[1], parts[2]), x, axis=1)
        width += width // 2
    x = activation(net, rng, net.conv(x, (width, width, int(rng.choice([1, 3])))))
    if kind == 3:  # noqa: PLR2004  # one of four kinds
        return net.op("Reshape", net.op("Transpose", x, perm=[0, 2, 3, 1]), net.constant([1, -1, width], np.int64))
    return net.op("GlobalAveragePool", x)


def recurrent(net: Net, rng: Generator) -> str:
    """An LSTM or a GRU, and a layer."""
    steps, width, hidden = int(rng.choice([1, 8, 32, 100])), int(rng.choice([16, 64])), int(rng.choice([16, 64, 128]))
    net.shape = [steps, 1, width]
    kind, gates = (("LSTM", 4), ("GRU", 3))[int(rng.integers(2))]
    weights = net.drawn(1, gates * hidden, width, fan=width), net.drawn(1, gates * hidden, hidden, fan=hidden)
    x = net.op(kind, "x", *weights, hidden_size=hidden)
    x = net.op("Squeeze", x, net.constant([1], np.int64))
    return net.linear(x, hidden, width)


def upsampling(net: Net, rng: Generator) -> str:
    """Transposed convolutions after convolutions."""
    width, size = int(rng.choice([8, 16, 32, 64])), int(rng.choice([4, 8, 16, 32]))
    net.shape = [1, width, size, size]
    x = net.op("Relu", net.conv("x", (width, width, 3)))
    x = net.op("ConvTranspose", x, net.drawn(width, width, 2, 2, fan=width), strides=[2, 2])
    return net.conv(net.op("Relu", x), (width, width, 1))


FAMILIES: tuple[Callable[[Net, Generator], str], ...] = (
    *(dense_convs, pointwise_convs, inverted_residuals, depthwise_separable, residual_blocks, image_stem),
    *(grouped_convs, line_convs, pointwise_lines, volume_convs, float_ops),
    *(
        layers,
        layers,
        layers,
        attention,
        squeeze_excite,
        silu_convs,
        hard_swish_convs,
        gated_convs,
        unet,
        pools,
        heads,
        recurrent,
        upsampling,
    ),
)


def drawn_nets(
    count: int, seed: int, names: Sequence[str] = ()
) -> Iterator[tuple[str, onnx.ModelProto, dict[str, np.ndarray]]]:
    """Yield the name of a family, a net of it, and samples; only families of these names, if there are any."""
    families = [family for family in FAMILIES if not names or family.__name__ in names]
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        family = families[number % len(families)]
        net = Net(number, x=("float32", [1]))
        result = family(net, rng)
        shape = net.shape  # type: ignore[attr-defined]  # the family has set it
        for size in shape:
            net.inputs[0].type.tensor_type.shape.dim.add().dim_value = size
        del net.inputs[0].type.tensor_type.shape.dim[0]
        data = rng.normal(0, 1, (4, *shape)).astype(np.float32)
        yield family.__name__, net.model(result), {"x": data}


def measure_nanoseconds(message: bytes, feed: dict[str, np.ndarray], threads: int) -> float:
    """Return the least time of a run."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 4
    clock = choose_clock() if threads == 1 else time.perf_counter
    least = float("inf")
    for _ in range(SESSIONS):
        session = onnxruntime.InferenceSession(message, options, providers=["CPUExecutionProvider"])
        session.run(None, feed)
        start = clock()
        session.run(None, feed)
        runs = max(int(BLOCK_SECONDS / max(clock() - start, 1e-6)), 1)
        for _ in range(BLOCKS):
            start = clock()
            for _ in range(runs):
                session.run(None, feed)
            least = min(least, (clock() - start) / runs)
    return 1e9 * least


def measure_net(
    message: onnx.ModelProto, data: dict[str, np.ndarray], folder: Path, rng: Generator, threads: int
) -> Iterator[tuple[dict[tuple[str, str], float], float]]:
    """Yield work and time of a net in float, on integers, and on integers in part."""
    model_path, data_path = folder / "net.onnx", folder / "data.npz"
    prepared_path, quantized_path = folder / "prepared.onnx", folder / "quantized.onnx"
    model_path.write_bytes(message.SerializeToString())
    np.savez(data_path, **data)
    feed = {name: array[0] for name, array in data.items()}
    source = gq.load(model_path)
    ruleset = replace(resolve_ruleset(source, "onnxruntime"), algorithms=(), costs="")
    prepared, plan = plan_with_rules(source, ruleset, select_sites(source))
    placement = Placement(prepared, plan)
    decidable = placement.decidable
    parts = [decidable, *([i for i in decidable if rng.random() < share] for share in (0.5, 0.75))]
    prepared.save(prepared_path, force=True)
    yield {**total_work(placement, ()), RUN: 1.0}, measure_nanoseconds(prepared_path.read_bytes(), feed, threads)
    for number, groups in enumerate(parts):
        if not groups or (number and groups in parts[:number]):
            continue
        part = without_float_ops(placement, plan, {*groups}, {})
        if part.sites:
            result = gq.insert(source, plan=part, data=str(data_path), validate=False)
            result.save(quantized_path, force=True)
            yield (
                {**total_work(placement, groups), RUN: 1.0},
                measure_nanoseconds(quantized_path.read_bytes(), feed, threads),
            )


def total_work(placement: Placement, int8_groups: Iterable[int]) -> dict[tuple[str, str], float]:
    """Return the work of all ops and conversions if the groups `int8_groups` run on integers.

    The keys are kernels ("conv.dense int8") with the names of their work.
    """
    labels = {*int8_groups}
    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    for index, group in enumerate(placement.groups):
        if group.work is not None:
            is_int8, kernels = index in labels, [group.work.kernel]
            if is_int8 and group.is_max_pool and not labels >= {*placement.producers(group)}:
                kernels = [PLANAR_POOL]
            elif not is_int8 and group.work.split_kernels and labels & {*placement.producers(group)}:
                kernels = list(group.work.split_kernels)
            for kernel in kernels:
                for name, amount in (group.work.int8_work if is_int8 else group.work.float_work).items():
                    total[f"{kernel} {'int8' if is_int8 else 'float'}", name] += amount
    for tensor in placement.tensors:
        for conversion in needed_conversions(placement, tensor, labels):
            total[conversion, "ops"] += 1
            total[conversion, "values"] += tensor.values
    return total


def needed_conversions(placement: Placement, tensor: Activation, int8_groups: set[int]) -> list[str]:
    """Return the kernels of the conversions that a tensor needs."""
    groups = placement.groups
    if tensor.producer in int8_groups and groups[tensor.producer].quantized_output:
        readers = (groups[reader] for reader in tensor.readers if reader not in int8_groups)
        return [tensor.conversion(DEQUANTIZE, is_blocked=reader.reads_blocks) for reader in readers]
    is_needed = any(reader in int8_groups for reader in tensor.readers)
    return [tensor.conversion(QUANTIZE, is_blocked=groups[tensor.producer].writes_blocks)] if is_needed else []


def fit_costs(
    rows: list[tuple[dict[tuple[str, str], float], float]], known: dict[tuple[str, str], float], pattern: str
) -> dict[tuple[str, str], float]:
    """Return the nonnegative costs with the least squared relative errors, by coordinate descent.

    Only kernels that the regular expression `pattern` matches are fitted; others keep their `known` costs.
    """
    known = {key: cost for key, cost in known.items() if not re.search(pattern, key[0])}
    keys = sorted({key for work, _ in rows for key in work if re.search(pattern, key[0])})
    targets = [1 - predicted_time(known, work) / taken for work, taken in rows]
    matrix = np.array([[work.get(key, 0.0) / taken for key in keys] for work, taken in rows])
    # Each op and value costs something, even if few nets tell how much.
    expected = [(key, *USUAL_COSTS[key[1]]) for key in keys if key[1] in USUAL_COSTS]
    usual = np.array([[weight / cost * (key == other) for other in keys] for key, cost, weight in expected])
    target_rows = np.concatenate([targets, [weight for _, _, weight in expected]])
    matrix = np.concatenate([matrix, usual])
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    matrix = matrix / scale
    gram, target = matrix.T @ matrix + 1e-4 * np.eye(len(keys)), matrix.T @ target_rows
    solution = np.zeros(len(keys))
    for _ in range(20_000):
        before = solution.copy()
        for index in range(len(keys)):
            gradient = target[index] - gram[index] @ solution + gram[index, index] * solution[index]
            solution[index] = max(gradient / gram[index, index], 0.0)
        if np.abs(solution - before).max() < 1e-9:  # noqa: PLR2004  # far below the errors of measurement
            break
    fitted = {key: float(value / size) for key, value, size in zip(keys, solution, scale, strict=True) if value > 0}
    return known | fitted


def as_table(costs: dict[tuple[str, str], float], threads: int) -> CostTable:
    """Return the fitted costs as a table, with four digits."""
    by_kernel: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (kernel, name), value in costs.items():
        by_kernel[kernel][name] = float(f"{value:.4g}")
    return CostTable(
        costs=dict(by_kernel),
        machine=processor_name(),
        onnxruntime=onnxruntime.__version__,
        threads=threads,
    )


def processor_name() -> str:
    """Return the name of the processor, as precise as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({platform.machine()})"


def predicted_time(costs: dict[tuple[str, str], float], work: dict[tuple[str, str], float]) -> float:
    """Return the predicted nanoseconds of a model."""
    return sum(costs.get(key, 0.0) * amount for key, amount in work.items())


def options() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="TOML file of the table")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nets", type=int, default=324)
    parser.add_argument("--families", nargs="+", default=(), help="draw only nets of these families")
    parser.add_argument("--kernels", default="", help="regular expression of kernels; others keep the shipped costs")
    return parser.parse_args()


def main() -> int:
    """Measure, fit, print the errors, and write the table."""
    settings = options()
    rng = np.random.default_rng(settings.seed)
    shipped = read_cost_table(SHIPPED_COSTS).costs if settings.kernels else {}
    known = {(kernel, name): cost for kernel, costs in shipped.items() for name, cost in costs.items()}
    measured: list[tuple[str, int, list[tuple[dict[tuple[str, str], float], float]]]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (family, message, data) in enumerate(drawn_nets(settings.nets, settings.seed, settings.families)):
            try:
                rows = list(measure_net(message, data, Path(folder), rng, settings.threads))
            except GraphQuantError as error:
                print(f"{family} {number}: {error}", flush=True)
                continue
            measured.append((family, number, rows))
            print(f"{number} {family}: {', '.join(f'{taken / 1000:.1f}' for _, taken in rows)} us", flush=True)
    count = len(settings.families or FAMILIES)
    seen = [row for _, number, rows in measured if number // count % TESTED for row in rows]
    costs = fit_costs(seen, known, settings.kernels)
    print("family: predicted and measured time of int8 relative to float, for nets without a part in the fit")
    for family, number, rows in measured:
        if not number // count % TESTED and len(rows) > 1:
            estimates = [predicted_time(costs, work) for work, _ in rows]
            ratios = [
                f"{e / estimates[0]:.2f} ({t / rows[0][1]:.2f})" for e, (_, t) in zip(estimates, rows, strict=True)
            ]
            print(f"  {family}: float {estimates[0] / 1000:.1f} ({rows[0][1] / 1000:.1f}) us; {', '.join(ratios[1:])}")
    costs = fit_costs([row for _, _, rows in measured for row in rows], known, settings.kernels)
    write_cost_table(as_table(costs, settings.threads), settings.out)
    print(f"{settings.out} was written.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
