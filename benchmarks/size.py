"""Memory that each command needs for a model of 6 GB with external data, and a check of its weights.

Run: python benchmarks/size.py [--gigabytes 6] [--folder DIR] [--keep]
It needs about 8 GB of disk for 6 GB, which it gives back, and some minutes. Each command is a process of its own, with
two peaks: `anonymous` memory, which nothing but the process can free, and `all` with the pages of files that are
mapped, which the system takes back whenever it wants. Weights of the result are compared with those of the source.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

import graphquant as gq

if TYPE_CHECKING:
    from collections.abc import Sequence

GIGABYTE, MEGABYTE = 10**9, 10**6
VOCABULARY, WIDTH, INNER = 50_000, 2048, 8192
LIMIT = GIGABYTE
"""Bytes that a command on weights alone may take."""

ROWS = 64
"""Rows of each weight that are looked at."""

HALF = 0.501
"""Steps that rounding may be off; the bound is a division in float32."""

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Weight:
    """Position of a weight in the file, and the size of its values."""

    shape: tuple[int, ...]
    offset: int
    size: float


def make(folder: Path, count: int, opset: int, *, nodes: bool) -> dict[str, Weight]:
    """Writes `big.onnx`: a table, blocks of two products, a head; of some `count` bytes, all of them external.

    Args:
        folder: Where to.
        count: Bytes of the weights, about.
        opset: Of the model.
        nodes: Whether the weights are in Constant nodes instead of initializers.
    """
    layers = max(round((count / 4 - 2 * VOCABULARY * WIDTH) / (2 * WIDTH * INNER + WIDTH + INNER)), 1)
    shapes: dict[str, tuple[int, ...]] = {"table": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    graph = [helper.make_node("Gather", ["table", "tokens"], ["x0"])]
    for k in range(layers):
        shapes |= {f"up{k}": (WIDTH, INNER), f"upb{k}": (INNER,), f"down{k}": (INNER, WIDTH), f"downb{k}": (WIDTH,)}
        graph += [
            helper.make_node("MatMul", [f"x{k}", f"up{k}"], [f"m{k}"]),
            helper.make_node("Add", [f"m{k}", f"upb{k}"], [f"a{k}"]),
            helper.make_node("Relu", [f"a{k}"], [f"r{k}"]),
            helper.make_node("MatMul", [f"r{k}", f"down{k}"], [f"d{k}"]),
            helper.make_node("Add", [f"d{k}", f"downb{k}"], [f"b{k}"]),
            helper.make_node("Add", [f"x{k}", f"b{k}"], [f"x{k + 1}"]),
        ]
    graph.append(helper.make_node("MatMul", [f"x{layers}", "head"], ["y"]))
    ends = (
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, VOCABULARY])],
    )
    weights, tensors = _write(folder / "big.data", shapes), []
    for name, weight in weights.items():
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=weight.shape)
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "big.data"), ("offset", weight.offset), ("length", 4 * np.prod(weight.shape))):
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
    if nodes:
        graph = [helper.make_node("Constant", [], [t.name], t.name, value=t) for t in tensors] + graph
    model = helper.make_graph(graph, "big", *ends, [] if nodes else tensors)
    message = helper.make_model(model, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    folder.joinpath("big.onnx").write_bytes(message.SerializeToString())
    return weights


def _write(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Weight]:
    """Random values, the same ones over and over, of another size in each weight and from another place on."""
    noise = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    weights: dict[str, Weight] = {}
    with path.open("wb") as file:
        for k, (name, shape) in enumerate(shapes.items()):
            size, count = (1 + k % 7) * 0.1 * shape[0] ** -0.5, int(np.prod(shape))
            weights[name] = Weight(shape, file.tell(), size)
            here = np.roll(noise, 1009 * k) * np.float32(size)
            for start in range(0, count, here.size):
                here[: count - start].tofile(file)
    return weights


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of a process, and its peak of memory in bytes."""

    seconds: float
    anonymous: int
    all: int


def measured(arguments: Sequence[str]) -> Cost:
    """Runs `graphquant` with `arguments` and looks at it every 2 ms."""
    start, peak, whole = time.perf_counter(), 0, 0
    command = [sys.executable, "-m", "graphquant", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            told = dict(re.findall(r"(RssAnon|VmHWM):\s+(\d+) kB", status.read_text()))
            peak, whole = max(peak, int(told.get("RssAnon", 0)) << 10), max(whole, int(told.get("VmHWM", 0)) << 10)
            time.sleep(0.002)
    if process.returncode not in {0, 1}:
        raise SystemExit(f"graphquant {' '.join(arguments)} ended with {process.returncode}")
    return Cost(time.perf_counter() - start, peak, whole)


def worst(folder: Path, weights: dict[str, Weight], out: Path) -> tuple[float, int]:
    """Compare weights of the result with the source's, in steps of their scale, and count the compared values.

    Raises:
        SystemExit: A weight is not there, or its scale is not its channel's largest magnitude by 127.
    """
    model = gq.load(out)
    farthest, looked = 0.0, 0
    for name, weight in weights.items():
        if not name.startswith(("up", "down", "head")) or "b" in name:
            continue
        source = np.memmap(folder / "big.data", np.float32, "r", weight.offset, weight.shape)
        integers = [op for op in model.main.ops() if op.name.startswith(f"{name}/quant/int8")]
        scales = [op for op in model.main.ops() if op.name == f"{name}/quant/scale"]
        if len(integers) != 1 or integers[0].read_value is None or scales[0].read_value is None:
            raise SystemExit(f"{name} has {len(integers)} twins of int8 in the result")
        held, scale = integers[0].read_value(), scales[0].read_value()
        channels = [0, weight.shape[1] // 3, weight.shape[1] - 1]
        if not np.array_equal(scale[channels], (np.abs(source[:, channels]).max(axis=0) / 127).astype(np.float32)):
            raise SystemExit(f"the scales of {name} are others than its channels' largest magnitudes by 127")
        rows = slice(0, None, weight.shape[0] // ROWS)
        steps = np.abs(source[rows] / scale - held[rows].astype(np.float32))
        farthest, looked = max(farthest, float(steps.max())), looked + steps.size
    return farthest, looked


def sqnr(folder: Path, out: Path) -> float:
    """Signal to noise of the result's output in decibels; both models run with their weights mapped, not copied."""
    results = []
    for path in (folder / "big.onnx", out):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.add_session_config_entry("session.disable_prepacking", "1")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        results.append(session.run(None, {"tokens": np.array([[1, 30_000, 7, 49_999]])})[0].astype(np.float64))
        del session
    return float(10 * np.log10((results[0] ** 2).sum() / ((results[0] - results[1]) ** 2).sum()))


def show(arguments: Sequence[str], cost: Cost) -> None:
    """Prints a line."""
    names = " ".join(Path(each).name if "/" in each else each for each in arguments)
    peaks = f"{cost.anonymous / MEGABYTE:7.0f} MB {cost.all / MEGABYTE:7.0f} MB"
    print(f"{names:66} {cost.seconds:8.1f} {peaks}", flush=True)


def main() -> int:
    """Prints a line for each command; 1 if one on weights alone takes too much, or a weight is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--folder", type=Path, help="where there is room, by default where temporary files go")
    parser.add_argument("--nodes", action="store_true", help="weights in Constant nodes")
    parser.add_argument("--quick", action="store_true", help="nothing that makes onnxruntime read the whole model")
    options = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        weights = make(folder, int(options.gigabytes * GIGABYTE), 21, nodes=options.nodes)
        big, out = str(folder / "big.onnx"), str(folder / "q.onnx")
        total = folder.joinpath("big.data").stat().st_size
        print(
            f"{len(weights)} weights, {total / GIGABYTE:.2f} GB; the largest {4 * VOCABULARY * WIDTH / MEGABYTE:.0f} MB"
        )
        start = time.perf_counter()
        shutil.copyfile(folder / "big.data", folder / "copy")
        folder.joinpath("copy").unlink()
        print(f"copying the weights takes {time.perf_counter() - start:.1f} s")
        print(f"{'command':66} {'seconds':>8} {'anonymous':>10} {'all':>10}", flush=True)
        for arguments in (
            ["inspect", big],
            ["plan", big, "--rules", "weight_only"],
            ["check", big, "--for", "onnxruntime"],
            ["insert", big, "-o", out, "--rules", "weight_only_int4"],
            ["insert", big, "-o", out, "--rules", "dynamic", "--force"],
            ["insert", big, "-o", out, "--rules", "weight_only", "--force"],
            ["inspect", out],
            ["check", out, "--for", "onnxruntime"],
        ):
            cost = measured(arguments)
            show(arguments, cost)
            failed |= cost.anonymous > LIMIT or cost.all > LIMIT
        sizes = [path.stat().st_size / MEGABYTE for path in (Path(out), *folder.glob(f"{Path(out).name}.*.data"))]
        farthest, looked = worst(folder, weights, Path(out))
        written = " and ".join(f"{size:.1f} MB" for size in sizes)
        print(f"result: {written}; {looked} weights, {farthest:.4f} steps off at most")
        failed |= farthest > HALF
        if not options.quick:
            print(f"output: {sqnr(folder, Path(out)):.1f} dB")
            for arguments in (
                ["insert", big, "-o", out, "--rules", "weight_only_int8", "--force"],
                ["insert", big, "-o", out, "--rules", "onnxruntime", "--data", "random:1", "--force"],
            ):
                show(arguments, measured(arguments))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
