"""What a model of 6 GB with external data costs in memory, command by command, and whether its weights come out right.

Run: python benchmarks/size.py [--gigabytes 6] [--folder DIR] [--keep]
It needs about 8 GB of disk for 6 GB, which it gives back, and some minutes. Each command is a process of its own, with
two peaks: `anonymous` memory, which nothing but the process can free, and `all` with the pages of files that are
mapped, which the system takes back whenever it wants. Weights of the result are compared with those of the source.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, helper

if TYPE_CHECKING:
    from collections.abc import Sequence

GIGABYTE, MEGABYTE = 10**9, 10**6
VOCABULARY, WIDTH, INNER = 50_000, 2048, 8192
LIMIT = GIGABYTE
"""Bytes that a command on weights alone may take."""

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Weight:
    """Where a weight is in the file, and how large its values are."""

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
        graph = [helper.make_node("Constant", [], [t.name], f"make_{t.name}", value=t) for t in tensors] + graph
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
            size, count = (1 + k % 7) * shape[0] ** -0.5, int(np.prod(shape))
            weights[name] = Weight(shape, file.tell(), size)
            here = np.roll(noise, 1009 * k) * np.float32(size)
            for start in range(0, count, here.size):
                here[: count - start].tofile(file)
    return weights


@dataclass(frozen=True, slots=True)
class Cost:
    """What a process took: seconds, and bytes at its peak."""

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


def main() -> int:
    """Prints a line for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as made:
        folder = Path(made)
        weights = make(folder, int(options.gigabytes * GIGABYTE), 13, nodes=False)
        big, out = str(folder / "big.onnx"), str(folder / "q.onnx")
        total = folder.joinpath("big.data").stat().st_size
        print(f"{len(weights)} weights, {total / GIGABYTE:.2f} GB", flush=True)
        print(f"{'command':50} {'seconds':>8} {'anonymous':>10} {'all':>10}")
        for arguments in (
            ["inspect", big],
            ["plan", big, "--rules", "weight_only"],
            ["insert", big, "-o", out, "--rules", "weight_only"],
        ):
            cost = measured(arguments)
            shown = " ".join(Path(each).name if "/" in each else each for each in arguments)
            print(
                f"{shown:50} {cost.seconds:8.1f} {cost.anonymous / MEGABYTE:7.0f} MB {cost.all / MEGABYTE:7.0f} MB",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
