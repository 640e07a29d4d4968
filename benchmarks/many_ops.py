"""Time and memory of the commands for models of many small ops, beside ONNX Runtime's load and one run of the model.

Run with `python benchmarks/many_ops.py [--ops 10000] [--nets chain wide conv]`. Each command is a process of its own,
with the processor time and the peak memory that the system reports. `result` is the load and run of the quantized
model by ONNX Runtime, which `insert` cannot avoid, because it validates the result.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH, SAMPLES = 8, 40

RUN = """
import sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
session.run(None, {"x": numpy.load(sys.argv[2])["x"][:8]})
"""


def build(net: str, ops: int) -> onnx.ModelProto:
    """Return a net of about `ops` ops: a chain of MatMuls with one weight, parallel branches, or Conv, Relu and Add."""
    rng = np.random.default_rng(0)
    orthogonal = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0].astype(np.float32)
    shape: list[int | str] = ["N", WIDTH, 4, 4] if net == "conv" else ["N", WIDTH]
    nodes, weights, last = [], {"w": orthogonal}, "x"
    if net == "chain":
        for index in range(ops):
            nodes.append(helper.make_node("MatMul", [last, "w"], [f"t{index}"], name=f"m{index}"))
            last = f"t{index}"
    elif net == "wide":
        for index in range(ops // 2):
            nodes.append(helper.make_node("MatMul", ["x", "w"], [f"t{index}"], name=f"m{index}"))
            nodes.append(helper.make_node("Relu", [f"t{index}"], [f"r{index}"], name=f"r{index}"))
        nodes.append(helper.make_node("Sum", [f"r{index}" for index in range(ops // 2)], [last := "y"], name="sum"))
    else:
        for index in range(ops // 3):
            weights[f"w{index}"] = orthogonal[..., None, None] * np.float32(1 + index / ops)
            nodes.append(helper.make_node("Conv", [last, f"w{index}"], [f"c{index}"], name=f"c{index}"))
            nodes.append(helper.make_node("Relu", [f"c{index}"], [f"r{index}"], name=f"r{index}"))
            nodes.append(helper.make_node("Add", [f"r{index}", "x"], [f"a{index}"], name=f"a{index}"))
            last = f"a{index}"
    inputs, outputs = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)] for name in ("x", last))
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, net, inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def measure(*arguments: str | Path) -> tuple[float, float]:
    """Run Python with `arguments`, and return its seconds of processor time and its peak memory in MB."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    usage = os.wait4(process.pid, 0)[2]
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    """Print a table for each net."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", type=int, default=10_000)
    parser.add_argument("--nets", nargs="+", default=["chain", "wide", "conv"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, result, data = (Path(folder, name) for name in ("m.onnx", "q.onnx", "data.npz"))
        for net in arguments.nets:
            onnx.save(build(net, arguments.ops), model)
            shape = (SAMPLES, WIDTH, 4, 4) if net == "conv" else (SAMPLES, WIDTH)
            np.savez(data, x=np.random.default_rng(1).normal(size=shape).astype(np.float32))
            stats, stripped = f"{result}.gqs", f"{result}.onnx"
            program = ("-m", "graphquant")
            commands: dict[str, tuple[str | Path, ...]] = {
                "onnxruntime": ("-c", RUN, model, data),
                "insert": (*program, "insert", model, "--data", data, "-o", result),
                "result": ("-c", RUN, result, data),
                "calibrate": (*program, "calibrate", model, "--data", data, "-o", stats),
                "inspect": (*program, "inspect", result),
                "explain": (*program, "explain", model, "x"),
                "check": (*program, "check", result),
                "strip": (*program, "strip", result, "-o", stripped),
                "compare": (*program, "compare", model, result, "--data", data, "--outputs-only"),
            }
            figures: dict[str, tuple[float, float]] = {}
            for name, command in commands.items():
                figures[name] = measure(*command)
                (seconds, megabytes), (run_seconds, run_megabytes) = figures[name], figures["onnxruntime"]
                print(
                    f"{net:6} {arguments.ops:7} {name:12} {seconds:8.2f} s {megabytes:7.0f} MB"
                    f"  {seconds / run_seconds:6.1f} times the time, {megabytes / run_megabytes:5.1f} times the memory",
                    flush=True,
                )
            for path in (result, stats, stripped):
                Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
