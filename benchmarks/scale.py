"""Time per op by size of the model, beside ONNX Runtime's quantize_static at the sizes that it supports.

Run with `python benchmarks/scale.py` (about six minutes; `--quick` leaves out 100,000 ops and the larger peers). Chains
of Conv and Relu, and residual nets, go through load, match and plan, solve and rewrite, emit and save; the statistics
are made up, since calibration is the model's own time. Each figure is the median of three runs, in seconds of the main
thread's processor time, so that it does not matter what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHANNELS, SIDE, REPEATS, BASE = 4, 4, 3, 10_000


def chain(ops: int) -> onnx.ModelProto:
    """Conv, Relu, Conv, Relu, ..."""
    return _model(_chain_nodes, ops)


def residual(ops: int) -> onnx.ModelProto:
    """Blocks of Conv, Relu, Conv, Add, Relu around a skip connection."""
    return _model(_residual_nodes, ops)


def _chain_nodes(ops: int) -> Iterator[tuple[str, list[str], str]]:
    for index in range(0, ops, 2):
        yield "Conv", [f"r{index - 2}" if index else "x"], f"c{index}"
        yield "Relu", [f"c{index}"], f"r{index}"


def _residual_nodes(ops: int) -> Iterator[tuple[str, list[str], str]]:
    here = "x"
    for index in range(0, ops, 5):
        yield "Conv", [here], f"a{index}"
        yield "Relu", [f"a{index}"], f"b{index}"
        yield "Conv", [f"b{index}"], f"c{index}"
        yield "Add", [f"c{index}", here], f"d{index}"
        here = f"e{index}"
        yield "Relu", [f"d{index}"], here


def _model(nodes: Callable[[int], Iterator[tuple[str, list[str], str]]], ops: int) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    made, weights, last = [], [], ""
    for op_type, inputs, last in nodes(ops):
        if op_type == "Conv":
            value = rng.normal(0, 0.3, (CHANNELS, CHANNELS, 1, 1)).astype(np.float32)
            weights.append(numpy_helper.from_array(value, f"w_{last}"))
        reads = [*inputs, f"w_{last}"] if op_type == "Conv" else inputs
        made.append(helper.make_node(op_type, reads, [last], name=f"n_{last}"))
    shape = [1, CHANNELS, SIDE, SIDE]
    graph = helper.make_graph(
        made,
        "scale",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, shape)],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def graphquant_stages(path: Path, out: Path) -> dict[str, float]:
    """Seconds of each stage."""
    from graphquant import formats
    from graphquant.ir import check_invariants
    from graphquant.numerics import Range
    from graphquant.observers import Sketch
    from graphquant.quantize import SiteSelection, make_plan, prepare, solve_scales
    from graphquant.quantize.rewrite import rewrite
    from graphquant.rules import load_ruleset

    onnx_format = formats.format_module("onnx")
    rules = load_ruleset(["onnxruntime"])
    seen = Range(np.float64(-1.0), np.float64(1.0))
    marks = [time.thread_time()]
    model = onnx_format.load(path)
    check_invariants(model, "load")
    marks.append(time.thread_time())
    prepared, steps = prepare(model, rules.prepare)
    plan = make_plan(prepared, rules, SiteSelection(family="onnx-qdq"), steps=steps)
    marks.append(time.thread_time())
    sketches = {site.tensor: Sketch(seen.low, seen.high, 1) for site in plan.sites}
    changed, inserted = rewrite(prepared, plan, solve_scales(prepared, plan, sketches).params)
    marks.append(time.thread_time())
    onnx_format.save(changed, out)
    marks.append(time.thread_time())
    if not inserted:
        raise SystemExit("no site was inserted; the benchmark measures nothing")
    names = ("load", "match+plan", "rewrite", "emit")
    return dict(zip(names, (b - a for a, b in itertools.pairwise(marks)), strict=True))


def peer(path: Path, out: Path) -> float:
    """Seconds of onnxruntime's quantize_static with one sample."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class One(CalibrationDataReader):
        """One sample of zeros."""

        def __init__(self) -> None:
            self.feeds = iter([{"x": np.zeros((1, CHANNELS, SIDE, SIDE), np.float32)}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            """The next sample."""
            return next(self.feeds, None)

    start = time.thread_time()
    with contextlib.redirect_stdout(io.StringIO()):
        quantize_static(str(path), str(out), One(), quant_format=QuantFormat.QDQ, per_channel=True)
    return time.thread_time() - start


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the largest sizes")
    quick = parser.parse_args().quick
    sizes = [1_000, 10_000] if quick else [1_000, 10_000, 100_000]
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "m.onnx"), Path(folder, "q.onnx")
        print(
            f"{'net':9} {'ops':>7} {'load':>8} {'plan':>8} {'rewrite':>8} {'emit':>8} {'all':>8}"
            "  us per op, ratio to 10,000 ops"
        )
        for name, build in (("chain", chain), ("residual", residual)):
            per_op: dict[int, float] = {}
            for ops in sizes:
                onnx.save(build(ops), source)
                runs = []
                for _ in range(REPEATS):
                    gc.collect()
                    runs.append(graphquant_stages(source, target))
                stages = [statistics.median(run[stage] for run in runs) for stage in runs[0]]
                per_op[ops] = statistics.median(sum(run.values()) for run in runs) / ops * 1e6
                ratio = per_op[ops] / per_op[BASE] if BASE in per_op else float("nan")
                shown = " ".join(f"{stage:7.2f}s" for stage in [*stages, per_op[ops] * ops / 1e6])
                print(f"{name:9} {ops:7d} {shown}  {per_op[ops]:6.0f}  {ratio:5.2f}", flush=True)
        print(
            f"\n{'net':9} {'ops':>7} {'graphquant':>11} {'quantize_static':>16} {'ratio':>7}"
            "  (theirs with one sample's run, ours with none)"
        )
        for ops in [200, 400, 800] if quick else [200, 400, 800, 1600]:
            onnx.save(chain(ops), source)
            ours = statistics.median(sum(graphquant_stages(source, target).values()) for _ in range(REPEATS))
            theirs = peer(source, target)
            print(f"{'chain':9} {ops:7d} {ours:10.3f}s {theirs:15.2f}s {theirs / ours:7.0f}", flush=True)


if __name__ == "__main__":
    main()
