"""Estimates of memory, and the peak memory of calibration compared with its budget, measured in separate processes."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import load_onnx

import graphquant as gq
from graphquant.calibration.memory import (
    _machine_memory,
    available_memory,
    estimate_footprint,
    group_observed_tensors,
    observation_budget,
)
from graphquant.errors import ModelError
from graphquant.ir import TensorRef
from graphquant.ir.graph import check_tensor_sizes

BLOCKS = 12
CHANNELS, SIZE = 32, 160
TENSOR = CHANNELS * SIZE * SIZE * 4
"""Bytes of each of the five activations of a block."""

WORKER = """
import re, sys
from pathlib import Path
import numpy as np
from graphquant import formats
from graphquant.calibration.batch_independence import measure_footprint
from graphquant.calibration.calibrate import CalibrationRun
from graphquant.calibration.targets import all_float_targets
from graphquant.calibration.calibrate import collect_stats
from graphquant.calibration.data import Dataset

onnx_format = formats.format_module("onnx")
model = onnx_format.load(Path(sys.argv[1]))
runner = onnx_format.create_runner(model)
shape = (1, *runner.inputs[0].shape[1:])

def feeds(start, stop):
    return ({"x": np.random.default_rng(i).normal(size=shape).astype(np.float32)} for i in range(start, stop))

if sys.argv[2] == "plain":
    for feed in feeds(0, 2):
        runner.run(feed)
else:
    data = Dataset(count=2, digest="da", open_feeds=feeds)
    budget, targets = int(sys.argv[2]) or None, all_float_targets(model)
    footprint = measure_footprint(runner, data, tuple(targets), max_memory=budget)
    stats = collect_stats(runner, targets, data, footprint, CalibrationRun(model_digest="ab", max_memory=budget))
    stats.save(sys.argv[3])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def write_residual_network(path: Path) -> None:
    """Write a network of residual blocks whose activations have one size."""
    rng = np.random.default_rng(0)
    weights, nodes = [], []

    def conv(source: str, name: str, channels: int, size: int) -> str:
        scale = np.sqrt(1.6 / (channels * size * size))
        weight = rng.normal(0, scale, (CHANNELS, channels, size, size)).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"{name}.weight"))
        nodes.append(helper.make_node("Conv", [source, f"{name}.weight"], [name], pads=[size // 2] * 4))
        return name

    def op(kind: str, name: str, *sources: str, **attributes: object) -> str:
        nodes.append(helper.make_node(kind, list(sources), [name], **attributes))
        return name

    x = conv("x", "stem", 3, 3)
    for block in range(BLOCKS):
        y = conv(op("Relu", f"{block}/r", x), f"{block}/c", CHANNELS, 3)
        y = conv(op("Relu", f"{block}/s", y), f"{block}/d", CHANNELS, 1)
        x = op("Add", f"{block}/a", x, y)
    op("GlobalAveragePool", "y", op("AveragePool", "p", x, kernel_shape=[3, 3]))
    ends = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", ["n", 3, SIZE, SIZE]), ("y", ["n", CHANNELS, 1, 1]))
    ]
    graph = helper.make_graph(nodes, "g", *ends, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def peak(*arguments: object) -> int:
    """Return the peak memory of `WORKER` in bytes."""
    command = [sys.executable, "-c", WORKER, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout) << 10


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak of a process is read there")
def test_peak_memory(tmp_path: Path) -> None:
    """With 200 MB of activations, a budget bounds the additional memory, and the statistics are the same."""
    model, budget = tmp_path / "net.onnx", 50 * 10**6
    write_residual_network(model)
    plain = peak(model, "plain")
    much, little = (peak(model, allowed, tmp_path / f"{allowed}.gqs") - plain for allowed in (0, budget))
    assert much > BLOCKS * 5 * TENSOR
    assert little < budget
    assert (tmp_path / "0.gqs").read_bytes() == (tmp_path / f"{budget}.gqs").read_bytes()


def write_doubling_model(path: Path, doublings: int, features: int = 16, *, constant: bool = False) -> Path:
    """Write a model that repeats its input, or a constant, by one Concat after the other."""
    names = ["c" if constant else "x", *(f"t{index}" for index in range(doublings))]
    nodes = [helper.make_node("Concat", [name] * 2, [double], axis=0) for name, double in pairwise(names)]
    nodes += [
        helper.make_node("ReduceSum", [names[-1]], ["s"], keepdims=0),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "s"], ["y"]),
    ]
    weights = {"w": np.ones((features, 1), np.float32), "c": np.ones((1, features), np.float32)}
    shapes = {"x": [1, features], "y": [1, 1]}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(
        nodes, "g", infos[:1], infos[1:], [numpy_helper.from_array(value, name) for name, value in weights.items()]
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("constant", [False, True])
def test_small_model_with_huge_tensors(tmp_path: Path, *, constant: bool) -> None:
    """A model that would fill memory is refused before it runs; `max_memory` raises the limit."""
    path = write_doubling_model(tmp_path / "a.onnx", 30, constant=constant)
    assert path.stat().st_size < 18 << 10
    with pytest.raises(ModelError, match="t29:0"):
        gq.insert(path, data="random:8")
    with pytest.raises(ModelError, match="t29:0"):
        gq.calibrate(path, data="random:8", max_memory="65535MiB")
    with pytest.raises(ModelError, match="t29:0"):
        gq.compare(path, path, "random:8")
    with pytest.raises(ModelError, match="t29:0"):
        gq.check(path, backend="onnxruntime")
    assert not gq.check(path).findings
    check_tensor_sizes(gq.load(path), 64 << 30)


def test_models_with_large_tensors_are_accepted(tmp_path: Path) -> None:
    """Tensors below the limit, and tensors that are large like the model's inputs and weights, are accepted."""
    check_tensor_sizes(gq.load(write_doubling_model(tmp_path / "a.onnx", 22)))
    check_tensor_sizes(gq.load(write_doubling_model(tmp_path / "b.onnx", 8, 1 << 19)))
    with pytest.raises(ModelError):
        check_tensor_sizes(gq.load(write_doubling_model(tmp_path / "c.onnx", 23)))


def test_huge_tensors_of_unknown_size(tmp_path: Path) -> None:
    """A tensor that is joined with itself again and again is refused, also along an axis of unknown size."""
    names = ["x", *(f"t{index}" for index in range(60))]
    nodes = []
    for name, double in pairwise(names):
        nodes += [f"{double}c = Concat <axis = 1> ({name}, {name})", f"{double} = Relu ({double}c)"]
    for number, is_refused in ((20, False), (60, True)):
        text = f"{' '.join(nodes[: 2 * number])} y = ReduceSum <keepdims = 0> ({names[number]})"
        graph = f'<ir_version: 8, opset_import: ["": 17]> g (float[1, n, 4] x) => (float y) {{ {text} }}'
        onnx.save(onnx.parser.parse_model(graph), tmp_path / "net.onnx")
        with pytest.raises(ModelError) if is_refused else nullcontext():
            check_tensor_sizes(gq.load(tmp_path / "net.onnx"))


BODY = "body = body (float[4] e) => (float[4] f) { f = Relu(e) }"


@pytest.mark.parametrize(
    ("graph", "elements", "batch"),
    [
        ("(float[N, 16] x) => (float[N, 16] y) { a = Relu(x) y = Relu(a) }", 48, 32),
        ("(float[N, 524288] x) => (float[N, 524288] y) { y = Relu(x) }", 1 << 20, 16),
        ("(float[N, 524289] x) => (float[N, 524289] y) { y = Relu(x) }", (1 << 20) + 2, 8),
        ("(float[N, 16777216] x) => (float[N, 16777216] y) { y = Relu(x) }", 1 << 25, 1),
        ("(float[N, M] x) => (float[N, M] y) { y = Relu(x) }", None, 8),
        ("(int64[N, 16] x) => (float[N, 16] y) { y = Cast <to = 1> (x) }", 16, 32),
        ("(int64[N, 16] x) => (int64[N, 16] y) { y = Neg(x) }", 0, 32),
        ("(float[N, 16] x) => (float[N, 8] y) { y, unread = Split <axis = 1> (x) }", 24, 32),
        ("(float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { y = Add(x, w) }", 4, 32),
        (f"(float[3, 4] x) => (float[3, 4] y) {{ y = Scan <num_scan_inputs = 1, {BODY}> (x) }}", None, 8),
    ],
)
def test_footprint(tmp_path: Path, graph: str, elements: int | None, batch: int) -> None:
    """Float activations that an op reads are counted, unless a body repeats them; blocks are batches of up to 2**24."""
    model = load_onnx(tmp_path, f"net {graph}")
    for batch_independent, block_size in ((True, batch), (False, 8)):
        footprint = estimate_footprint(model, batch_independent=batch_independent)
        found = footprint.block_size, footprint.elements_per_sample, footprint.join_samples
        assert found == (block_size, elements, batch_independent)


@pytest.mark.parametrize(
    ("limit", "used", "free"), [("1000", "400", 600), ("1000", "1400", 0), ("9000", "0", 5000), ("max", "400", 5000)]
)
def test_available_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, used: str, free: int) -> None:
    """The free memory is that of the machine or, if less, of the container; half of it is the default budget."""
    monkeypatch.setattr("graphquant.calibration.memory._machine_memory", lambda: 5000)
    monkeypatch.setattr("graphquant.calibration.memory.Path", lambda _, name: tmp_path / name)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert available_memory() == free
    assert observation_budget(None, []) == max(free // 2, 1)


def test_machine_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free memory of the machine is that of psutil, whether the system has a file with it or not."""
    measured = _machine_memory()
    assert measured == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    monkeypatch.setattr("graphquant.calibration.memory.Path", lambda *_: Path("missing"))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=5000))
    assert _machine_memory() == 5000


def test_observation_budget() -> None:
    """Histograms take a part of the budget by their bits; at least one byte remains."""
    budgets = [observation_budget(1 << 20, bits) for bits in ([0, 0], [7], [10], [7, 10], [10, 10, 10])]
    assert [(1 << 20) - budget >> 10 for budget in budgets] == [0, 64, 512, 576, 1023]
    assert budgets[0] == 1 << 20
    assert budgets[-1] == 1


@pytest.mark.parametrize(
    ("sizes", "budget", "lengths"),
    [
        ([100, 100], 3200, [2]),
        ([100, 100], 3199, [1, 1]),
        ([50] * 12, 250 * 8 + 50 * 8, [4, 4, 4]),  # groups of similar size
        ([60, 60, 60, 20], 60 * 8 + 120 * 8, [2, 2]),
        ([61, 60, 60], 61 * 8 + 120 * 8, [1, 2]),
        ([60, 61, 60, 20], 61 * 8 + 120 * 8, [1, 1, 2]),  # the first two exceed the rest of the budget by one element
        ([10, 10, 300], 300 * 8 + 20 * 8, [2, 1]),  # one tensor of any size is computed beside a group
        ([300, 10, 10], 1, [1, 1, 1]),
        ([300, 0, 10], 1, [2, 1]),  # an empty tensor needs no group of its own
    ],
)
def test_groups_by_size(sizes: list[int], budget: int, lengths: list[int]) -> None:
    """Tensors are observed in order, in groups that fit beside the largest tensor."""
    counts = {TensorRef("", f"t{index}"): size for index, size in enumerate(sizes)}
    runner = SimpleNamespace(element_counts=lambda tensors, feed: counts)
    for known_elements in (None, 1 << 20):
        groups, elements = group_observed_tensors(runner, list(counts), {}, known_elements, budget)
        assert [tensor for group in groups for tensor in group] == list(counts)
        assert ([len(group) for group in groups], elements) == (lengths, sum(sizes))


def test_known_sizes_that_fit() -> None:
    """Tensors whose known number of elements fits are not measured."""
    tensors = (TensorRef("", "a"), TensorRef("", "b"))
    assert group_observed_tensors(SimpleNamespace(), tensors, {}, 100, 1600) == ([tensors], 100)
    measured = SimpleNamespace(element_counts=lambda tensors, feed: dict.fromkeys(tensors, 5))
    assert group_observed_tensors(measured, tensors, {}, 100, 1599) == ([tensors], 10)
