"""Accuracy, latency, ops in int8 and time of graphquant's models beside those of ONNX Runtime and NNCF.

Run: python benchmarks/peers.py --nncf PYTHON
PYTHON is an interpreter that has NNCF. onnxruntime's preprocessing wants sympy. On two cores it takes about an hour.

Each tool quantizes each architecture in a process of its own, on the same samples, in three draws of samples; the files
are judged here. All get models of opset 13 or later: of an older one onnxruntime's tool writes a file that onnxruntime
refuses, and NNCF refuses it. onnxruntime: quant_pre_process, without symbolic shapes where it fails with them, then
quantize_static with weights per channel, by each of three methods; its best has the highest SQNR. NNCF: its defaults.

1. SQNR in dB of the worst output against the float model on samples that no calibration saw, median over draws. Bar:
   no less than onnxruntime's best method and NNCF. By chance it differs by about 0.8 dB from draw to draw.
2. Latency in onnxruntime, all optimizations, one thread: medians over rounds in which each model ran in turn; the ratio
   is the median over rounds of ours to theirs. Bar: at most 1.02 of the faster of onnxruntime's best method and NNCF.
3. int8: of the ops of onnxruntime's optimized model that have a form on integers and compute, those that run in it. Ops
   that only move values are not counted. Bar: no less than onnxruntime's best method and NNCF.
4. Time from file to file, imports before: seconds of the processor outside the passes over data, and seconds in all.
   Medians over draws. Bars: outside, a fifth of the least of onnxruntime's methods; in all, the least of them.
5. Whole processes in turn, medians: processor time and peak memory of `graphquant insert` with defaults, validation and
   bias correction included, beside `report_tools.py`: onnxruntime's preprocessing and min-max. Bars: 1.0 and 1.1 times.
   `--whole` measures nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from calibration_contestants import METHODS, feeds
from oracle import ROOT, truth
from peers_models import cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from peers_models import Case

OURS = "graphquant"
THEIRS = tuple(f"onnxruntime {method}" for method in METHODS)
COLUMNS = ("SQNR dB", "ms", "of best", "int8", "outside s", "in all s", "whole s", "whole MB")

SLOWER, FIFTH = 1.02, 0.2
"""The most that latency may be of the fastest of the others, and time outside the passes of onnxruntime's."""

WHOLE, WHOLE_TIME, WHOLE_MEMORY = "onnxruntime MinMax", 1.0, 1.1
"""The tool whose whole process is measured, and the most of its processor time and peak memory."""

SLICE = 0.01
"""Seconds that a model runs in each round at least."""

COMPUTE = {
    *("Conv", "FusedConv", "MatMul", "FusedMatMul", "Gemm", "FusedGemm", "TransposeMatMul", "Add", "Mul", "Concat"),
    *("Sigmoid", "QuickGelu", "Softmax", "LeakyRelu", "AveragePool", "GlobalAveragePool", "MaxPool", "Where"),
}
"""Op types of optimized models, in float, that have a form on integers and compute."""


@dataclass(slots=True, kw_only=True)
class Row:
    """Figures of one tool and one architecture.

    Attributes:
        sqnr: dB by draw.
        outside: Seconds of the processor outside the passes over data, by draw.
        seconds: Seconds in all, by draw.
        latency: Median of milliseconds.
        ratio: The median over rounds of ours to this.
        int8: Ops in int8, and ops that could be.
        whole: Seconds of the processor and megabytes of each whole process.
        missed: Columns whose bars are not held.
        refused: Why there is nothing.
    """

    sqnr: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    latency: float | None = None
    ratio: float | None = None
    int8: tuple[int, int] | None = None
    whole: list[tuple[float, float]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    refused: str = ""

    @property
    def share(self) -> float:
        """Of the ops that could run in int8, those that do."""
        low, all_ = self.int8 or (0, 0)
        return low / all_ if all_ else 1.0

    def median(self, what: str) -> float:
        """Over the draws."""
        return statistics.median(getattr(self, what))


def quantize(tool: str, model: Path, data: Path, out: Path, nncf: str | None) -> dict[str, float] | str:
    """Runs a tool in a process of its own; what it took, or why it failed."""
    python = nncf if tool == "NNCF" and nncf else sys.executable
    command = [python, str(ROOT / "benchmarks/peers_contestants.py"), tool, str(model), str(data), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # ourselves
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1].replace("\t", " ")
        return f"{'onnxruntime fails on its model: ' if done.stdout.startswith('{') else ''}{said}"[:120]
    return dict(json.loads(done.stdout.splitlines()[-1]))


LAUNCHER = """
import os, sys
flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
actions = [(os.POSIX_SPAWN_OPEN, 1, sys.argv[1], flags, 0o600), (os.POSIX_SPAWN_DUP2, 1, 2)]
pid = os.posix_spawn(sys.argv[2], sys.argv[2:], os.environ, file_actions=actions)
_, status, usage = os.wait4(pid, 0)
print([status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024])
"""
"""A small process that starts another one, because the peak memory of a process is at least that of its parent."""


def measure_process(command: list[str], log: Path) -> tuple[int, float, float]:
    """Run a command; return its status, seconds of the processor and peak megabytes. `log` gets its output.

    It runs in the folder of `log`, because ONNX Runtime's pre-processing leaves files in its own.
    """
    arguments = [sys.executable, "-S", "-c", LAUNCHER, str(log), str(Path(command[0]).absolute()), *command[1:]]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    output = subprocess.run(
        arguments, env=environment, cwd=log.parent, capture_output=True, text=True, check=True
    ).stdout
    status, seconds, megabytes = json.loads(output.splitlines()[-1])
    return status, seconds, megabytes


def measure_whole(case: Case, rows: dict[str, Row], folder: Path, runs: int) -> None:
    """Run `graphquant insert` and onnxruntime's script in turn as processes; the first pair warms up."""
    data, model = str(case.draw(0, folder / "whole.npz")), str(case.model)
    out, other = str(folder / "whole.onnx"), str(folder / "other.onnx")
    commands = {
        OURS: ["-m", "graphquant", "insert", model, "--data", data, "-o", out, "--force"],
        WHOLE: [str(ROOT / "benchmarks/report_tools.py"), WHOLE, model, data, other],
    }
    for run in range(runs + 1):
        for tool, command in commands.items():
            status, seconds, megabytes = measure_process([sys.executable, *command], folder / "whole.log")
            if status:
                rows[tool].refused = rows[tool].refused or "its whole process failed"
            elif run:
                rows[tool].whole.append((seconds, megabytes))


def session(model: Path) -> Any:
    """With all optimizations, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def outputs(model: Path, samples: list[Any]) -> list[list[np.ndarray]]:
    """The outputs for each sample."""
    run = session(model).run
    return [run(None, sample) for sample in samples]


def worst_sqnr(expected: list[list[np.ndarray]], found: list[list[np.ndarray]]) -> float:
    """SQNR in dB over all samples of the worst of the float outputs."""
    figures = []
    for place in [place for place, value in enumerate(expected[0]) if value.dtype.kind == "f"]:
        power = sum(np.square(one[place], dtype=np.float64).sum() for one in expected)
        pairs = zip(expected, found, strict=True)
        wrong = sum(np.square(np.subtract(a[place], b[place], dtype=np.float64)).sum() for a, b in pairs)
        figures.append(10 * np.log10(power / max(wrong, 1e-300)))
    return float(min(figures))


def int8(model: Path) -> tuple[int, int]:
    """Ops that onnxruntime runs on integers, and those that it could."""
    message = truth.optimized(model)
    for number, node in enumerate(truth.all_nodes(message.graph)):
        node.name = str(number)
    floats = _float_ops(message.graph)
    kinds = truth.runs_as(message)
    low = [kind for kind in kinds.values() if truth.is_low(kind) and not _moves(kind)]
    return len(low), len(low) + sum(kinds[name] in COMPUTE for name in floats if name in kinds)


def _moves(kind: str) -> bool:
    """Return True if the op only moves integers."""
    return " on " in kind and kind.partition(" ")[0] not in COMPUTE


def _float_ops(graph: Any) -> list[str]:
    """The ops whose output is float, or of a type that is not told."""
    told = {value.name: value.type.tensor_type.elem_type for value in [*graph.value_info, *graph.output]}
    found = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                found += _float_ops(attribute.g)
        if told.get(node.output[0], onnx.TensorProto.FLOAT) == onnx.TensorProto.FLOAT:
            found.append(node.name)
    return found


def latencies(models: dict[str, Path], sample: Any, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds of one run of each model, in each round the least of some; no longer than `seconds` in all."""
    runs: dict[str, Callable[[], object]] = {}
    found: dict[str, list[float]] = {name: [] for name in models}
    for name, path in models.items():
        made = session(path)
        runs[name] = lambda made=made: made.run(None, sample)  # type: ignore[misc]  # bound now
        runs[name]()
    order, end = list(runs), time.perf_counter() + seconds
    for number in range(rounds):
        start = number % len(order)
        for name in order[start:] + order[:start]:
            found[name].append(_least(runs[name]))
        if time.perf_counter() > end:
            break
    return found


def _least(run: Callable[[], object]) -> float:
    """The shortest of the runs that fit into a slice, in milliseconds."""
    least, end = float("inf"), time.perf_counter() + SLICE
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        least = min(least, now - start)
        if now > end:
            return least * 1000


def examine(case: Case, tools: list[str], folder: Path, options: argparse.Namespace) -> dict[str, Row]:
    """All tools on one architecture."""
    rows = {tool: Row() for tool in ("float", *tools)}
    held_out = folder / "held_out.npz"
    np.savez(held_out, **case.held_out)
    measure_whole(case, rows, folder, options.runs)
    if options.whole:
        judge_whole(rows)
        return rows
    samples = list(feeds(case.model, held_out))
    expected = outputs(case.model, samples)
    for draw in range(options.draws):
        data = case.draw(draw, folder / "draw.npz")
        for tool in tools:
            row, out = rows[tool], folder / f"{tool} {draw}.onnx"
            told = quantize(tool, case.model, data, out, options.nncf)
            if isinstance(told, str):
                row.refused = told
                continue
            row.sqnr.append(worst_sqnr(expected, outputs(out, samples)))
            row.outside.append(told["busy"])
            row.seconds.append(told["seconds"])
            print(f"  {case.name} {draw} {tool}: {row.sqnr[-1]:.2f} dB, {row.seconds[-1]:.2f} s", file=sys.stderr)
    kept = {name: folder / f"{name} 0.onnx" for name in judged(rows) if rows[name].sqnr}
    for name, path in kept.items():
        rows[name].int8 = int8(path)
    taken = latencies({"float": case.model, **kept}, samples[0], options.rounds, options.seconds)
    for name, found in taken.items():
        rows[name].latency = statistics.median(found)
        if OURS in taken:
            pairs = zip(taken[OURS], found, strict=True)
            rows[name].ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    judge(rows)
    return rows


def judged(rows: dict[str, Row]) -> list[str]:
    """Graphquant, onnxruntime's best method, NNCF."""
    methods = [name for name in THEIRS if rows[name].sqnr]
    best = [max(methods, key=lambda name: rows[name].median("sqnr"))] if methods else []
    return [name for name in (OURS, *best, "NNCF") if name in rows]


def judge(rows: dict[str, Row]) -> None:
    """Marks what graphquant missed."""
    ours = rows[OURS]
    if not ours.sqnr:
        ours.missed.extend(COLUMNS)
        return
    others = [rows[name] for name in judged(rows)[1:] if rows[name].sqnr]
    methods = [rows[name] for name in THEIRS if rows[name].sqnr]
    bars = {
        "SQNR dB": all(ours.median("sqnr") >= other.median("sqnr") for other in others),
        "of best": all(other.ratio is None or other.ratio <= SLOWER for other in others),
        "int8": all(ours.share >= other.share for other in others),
        "outside s": all(ours.median("outside") <= FIFTH * other.median("outside") for other in methods),
        "in all s": all(ours.median("seconds") <= other.median("seconds") for other in methods),
    }
    ours.missed.extend(name for name, held in bars.items() if not held)
    judge_whole(rows)


def judge_whole(rows: dict[str, Row]) -> None:
    """Marks what graphquant missed as a whole process."""
    ours, theirs = rows[OURS].whole, rows[WHOLE].whole
    for position, (column, limit) in enumerate((("whole s", WHOLE_TIME), ("whole MB", WHOLE_MEMORY))):
        if not ours or (theirs and _median_at(ours, position) > limit * _median_at(theirs, position)):
            rows[OURS].missed.append(column)


def _median_at(runs: list[tuple[float, float]], position: int) -> float:
    return statistics.median(run[position] for run in runs)


def cells(name: str, row: Row, best: float | None) -> list[str]:
    """The figures of a row as text; `best` is the ratio of ours to the fastest of the others."""
    shown = best if name == OURS else None
    texts = {
        "SQNR dB": f"{row.median('sqnr'):.2f}" if row.sqnr else "",
        "ms": f"{row.latency:.3f}" if row.latency is not None else "",
        "of best": f"{shown:.3f}" if shown is not None else "",
        "int8": f"{row.share:.0%} ({row.int8[0]}/{row.int8[1]})" if row.int8 else "",
        "outside s": f"{row.median('outside'):.3f}" if row.outside else "",
        "in all s": f"{row.median('seconds'):.3f}" if row.seconds else "",
        "whole s": f"{_median_at(row.whole, 0):.2f}" if row.whole else "",
        "whole MB": f"{_median_at(row.whole, 1):.0f}" if row.whole else "",
    }
    return [f"{texts[column]}{' MISSED' if column in row.missed else ''}" for column in COLUMNS]


def lines(name: str, rows: dict[str, Row]) -> list[list[str]]:
    """A table's lines for one architecture."""
    ratios = [rows[other].ratio for other in judged(rows)[1:]]
    best = max((ratio for ratio in ratios if ratio is not None), default=None)
    made = []
    for tool, row in rows.items():
        figures = [row.refused, *[""] * (len(COLUMNS) - 1)] if row.refused and not row.sqnr else cells(tool, row, best)
        made.append([name if tool == "float" else "", tool, *figures])
    return made


def show(made: list[list[str]]) -> None:
    """Prints lines in columns."""
    for name, tool, *figures in made:
        refused = figures[0] and not figures[-1] and not any(figures[1:])
        shown = f"  {figures[0]}" if refused else "".join(f"{figure:>18}" for figure in figures)
        print(f"{name:20} {tool:24}{shown}".rstrip(), flush=True)


def write(path: Path, found: dict[str, dict[str, Row]], notes: list[str]) -> None:
    """The table as Markdown, or all figures as JSON, by the suffix."""
    if path.suffix == ".json":
        from dataclasses import asdict

        plain = {name: {tool: asdict(row) for tool, row in rows.items()} for name, rows in found.items()}
        path.write_text(json.dumps({"models": plain, "notes": notes}, indent=1) + "\n", "utf-8")
        return
    head = ["model", "tool", *COLUMNS]
    body = [head, ["---"] * len(head), *(line for name, rows in found.items() for line in lines(name, rows))]
    table = "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in body)
    path.write_text(f"{table}\n\n" + "\n".join(f"* {note}" for note in notes) + "\n", "utf-8")


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the real models")
    parser.add_argument("--nncf", help="an interpreter that has NNCF")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one of the architectures")
    parser.add_argument("--whole", action="store_true", help="whole processes alone")
    parser.add_argument("--runs", type=int, default=3, help="pairs of whole processes")
    parser.add_argument("--quick", action="store_true", help="one draw, a few seconds of latency")
    parser.add_argument("--out", type=Path, action="append", default=[], help="a .md or .json file for the figures")
    options = parser.parse_args()
    options.draws, options.rounds, options.seconds = (1, 41, 4) if options.quick else (3, 301, 25)
    return options


def main() -> int:
    """Prints the table; 1 if a bar is missed."""
    options = parsed()
    notes = [] if options.nncf else ["left out: NNCF, without --nncf"]
    if importlib.util.find_spec("sympy") is None:
        notes.append("left out: onnxruntime's symbolic shape inference, without sympy")
    tools = [OURS, *THEIRS, *(["NNCF"] if options.nncf else [])]
    found: dict[str, dict[str, Row]] = {}
    left_out: list[str] = []
    print(f"{'model':20} {'tool':24}{''.join(f'{column:>18}' for column in COLUMNS)}")
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases(options.models, Path(scratch), options.only, left_out):
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                found[case.name] = examine(case, tools, Path(folder), options)
            case.model.unlink()
            show(lines(case.name, found[case.name]))
    notes += [f"left out: {one}" for one in left_out]
    missed = {name: rows[OURS].missed for name, rows in found.items() if rows[OURS].missed}
    notes += [f"{name} missed: {', '.join(columns)}" for name, columns in missed.items()]
    print("", *notes, f"{len(found)} architectures, {len(missed)} with a bar missed.", sep="\n")
    for path in options.out:
        write(path, found, notes)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
