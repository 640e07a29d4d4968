"""A comparison of graphquant with other quantizers on the same models and data, as an HTML page and JSON.

Run: python benchmarks/report.py [--python PYTHON]... [--only NAME]... [--quick] [--keep FOLDER] [--out FOLDER]

Each tool runs as a whole process with its documented defaults, by `report_tools.py`: ONNX Runtime with its
pre-processing, weights per channel and three methods; NNCF; onnxsim, which only simplifies the float model; of
SavedModels also TFLite's converter and ai-edge-quantizer. graphquant is `graphquant insert` with defaults, which holds
out samples, validates and repairs. A tool that this interpreter lacks runs in the first of the others that has it
(`--python`, repeatable); a tool that none has is skipped, and the report names it. Wanted: sympy for ONNX Runtime's
pre-processing, tf2onnx for the keyword net, TensorFlow. All models with all tools take about an hour on two cores;
`--quick` takes four small models and short timings, which are not judged, in less than three minutes.

* SQNR in dB of the worst output and top-1 agreement, on samples that no calibration used. TFLite files are compared
  with TensorFlow's float outputs.
* Processor time of a run relative to the given float model, on one thread, paired in new sessions: the median session
  and the fastest. TFLite files: relative to the float TFLite file.
* Processor time and peak memory of the tool's process. Runs of several tools are not concurrent.
* Multiply-adds on integers in the model that ONNX Runtime optimized, and the reasons of the others.

Bars: 20 dB; at most 0.5 dB below the best other quantizer of the same format; 85% of multiply-adds on integers, or a
reason; at most 1.05 of float's time in the fastest session, or a warning of `insert`, which it prints for each model in
TensorFlow's own format. The exit code is 1 if one is missed.

`--keep` stores the figures of each model in a folder and skips the models that it has, so a run can be continued.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from latency import timed
from oracle import ROOT, truth
from peers import int8, measure_process, worst_sqnr
from report_models import NAMES, models
from report_page import render_page
from report_tools import read_samples

import graphquant as gq
from graphquant import formats
from graphquant.analysis.validation import measure_tensor_sizes
from graphquant.api import convert
from graphquant.calibration.data import open_data
from graphquant.errors import GraphQuantError
from graphquant.ir import count_macs
from graphquant.visualize.text import MAX_TIME_RATIO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peers_models import Case

    from graphquant.analysis.comparison import Comparison

MIN_SQNR, MAX_DEFICIT, MIN_SHARE, MAX_TIME = 20.0, 0.5, 0.85, 1.05
"""Bars: decibels, decibels below the best other quantizer, share of multiply-adds, time relative to float."""

OURS, OURS_TENSORFLOW, OURS_TFLITE = "graphquant", "graphquant TensorFlow", "graphquant TFLite"
FLOAT_TFLITE = "TFLite float"

PACKAGES = {
    **dict.fromkeys(("onnxruntime MinMax", "onnxruntime Percentile", "onnxruntime Entropy"), ("onnxruntime",)),
    "NNCF": ("nncf",),
    "onnxsim": ("onnxsim",),
    FLOAT_TFLITE: ("tensorflow",),
    "TFLite converter": ("tensorflow",),
    "ai-edge-quantizer": ("ai_edge_quantizer",),
}
"""The package that each tool needs."""

ONNX_TOOLS = (OURS, "onnxruntime MinMax", "onnxruntime Percentile", "onnxruntime Entropy", "NNCF", "onnxsim")
TENSORFLOW_TOOLS = (OURS_TENSORFLOW, FLOAT_TFLITE, OURS_TFLITE, "TFLite converter", "ai-edge-quantizer")
TOOLS = tuple(dict.fromkeys((*ONNX_TOOLS, *TENSORFLOW_TOOLS)))
QUANTIZERS = {
    OURS: ("onnxruntime MinMax", "onnxruntime Percentile", "onnxruntime Entropy", "NNCF"),
    OURS_TFLITE: ("TFLite converter", "ai-edge-quantizer"),
    OURS_TENSORFLOW: (),
}
"""The other quantizers that write the format of each of graphquant's results."""

QUICK = ("digits_cnn", "lstm", "ssd", "digits_cnn_saved_model")

SAMPLES_TIMED = 4

GATED = 256
"""Status of a process that ended with exit code 1."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """Figures of one tool and one model.

    Attributes:
        failure: The reason for a missing result.
        seconds: Processor time of the tool's process.
        megabytes: Peak memory of the tool's process.
        size: Bytes of the result.
        sqnr: dB of the worst float output; None without one. Infinity is `1e9`, NaN is `-1e9`.
        agreement: Share of rows with the same largest value, of the worst output.
        ratio: Time relative to float in the median session.
        least_ratio: Time relative to float in the fastest session.
        milliseconds: Processor time of a run.
        int8_ops: Ops that ONNX Runtime runs on integers, and ops that could.
        int8_macs: Share of multiply-adds on integers.
        float_macs: Share of multiply-adds in float, by reason.
        warned: True if `insert` warned that the result is slower than float.
        repair: What the search or repair changed.
        gated: True if `insert` wrote the result and ended with exit code 1.
        missed: Bars that the result misses.
    """

    failure: str = ""
    seconds: float | None = None
    megabytes: float | None = None
    size: int | None = None
    sqnr: float | None = None
    agreement: float | None = None
    ratio: float | None = None
    least_ratio: float | None = None
    milliseconds: float | None = None
    int8_ops: tuple[int, int] | None = None
    int8_macs: float | None = None
    float_macs: dict[str, float] = field(default_factory=dict)
    warned: bool = False
    repair: str = ""
    gated: bool = False
    missed: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Job:
    """A model and everything that its measurements need."""

    case: Case
    folder: Path  # for results
    data: Path  # calibration samples
    held_out: Path  # unseen samples
    interpreters: dict[str, str]  # interpreter of each tool that can run
    sessions: dict[str, Any]  # arguments of `timed`; empty for its defaults

    def output(self, tool: str) -> Path:
        """Return the path of a tool's result."""
        suffix = (
            ".tflite" if tool in TENSORFLOW_TOOLS and tool != OURS_TENSORFLOW else "".join(self.case.model.suffixes)
        )
        return self.folder / f"{tool.replace(' ', '_')}{suffix}"


def run_tool(job: Job, tool: str) -> Figures:
    """Run a tool as a process."""
    figures, out = Figures(), job.output(tool)
    model = job.output(FLOAT_TFLITE) if tool == "ai-edge-quantizer" else job.case.model
    if tool in QUANTIZERS:
        insert = ["insert", str(model), "--data", str(job.data), "-o", str(out), "--force"]
        command = ["-m", "graphquant", *insert, "--report", str(out.with_suffix(".json"))]
    else:
        command = [str(ROOT / "benchmarks/report_tools.py"), tool, str(model), str(job.data), str(out)]
    log = job.folder / "log.txt"
    status, figures.seconds, figures.megabytes = measure_process([job.interpreters[tool], *command], log)
    figures.gated = tool in QUANTIZERS and status == GATED and out.exists()
    if (status and not figures.gated) or not out.exists():
        figures.failure = f"signal {status % 256}" if status % 256 else last_line(log)
    elif out.suffix == ".onnx":
        load = [sys.executable, str(ROOT / "benchmarks/report_tools.py"), "load", str(out)]
        if measure_process(load, log)[0]:
            figures.failure = f"onnxruntime rejects its model: {last_line(log)}"
    if not figures.failure:
        figures.size = sum(
            file.stat().st_size for file in ([out] if out.is_file() else out.rglob("*")) if file.is_file()
        )
    return figures


def last_line(log: Path) -> str:
    """Return the last line of a log that names an error, shortened and without folders."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line.partition(":")[0]]
    return re.sub(r"/\S*/", "", (errors or lines or ["it ended without a message"])[-1])[:200]


def worst(comparison: Comparison) -> float:
    """SQNR in dB of the worst output that can be compared; NaN or infinite outputs count as -1e9."""
    if any(output.broken for output in comparison.outputs):
        return -1e9
    figures = [output.sqnr for output in comparison.outputs if output.sqnr is not None and not output.problem]
    return float(np.clip(min(figures, default=-1e9), -1e9, 1e9))


def measure_accuracy(job: Job, tool: str, figures: Figures) -> None:
    """Compare the outputs of a result with those of the float model on unseen samples."""
    out = job.output(tool)
    if out.suffix == ".tflite":
        names, actual = tflite_outputs(job, out)
        expected = float_outputs(job, names)
        if any(not np.isfinite(value).all() for sample in actual for value in sample):
            figures.sqnr = -1e9
            return
        figures.sqnr = min(worst_sqnr(expected, actual), 1e9)
        figures.agreement = agreement(expected, actual)
        return
    comparison = gq.compare(job.case.model, out, str(job.held_out), sites=False)
    rates = [output.agreement for output in comparison.outputs if output.agreement is not None]
    figures.sqnr, figures.agreement = worst(comparison), min(rates, default=None)


def agreement(expected: list[list[np.ndarray]], actual: list[list[np.ndarray]]) -> float | None:
    """Share of samples with the same largest value, of the worst output that is one row; None without one."""
    rates = []
    for index, first in enumerate(expected[0]):
        if first.size == first.shape[-1] > 1:
            same = [one[index].argmax() == other[index].argmax() for one, other in zip(expected, actual, strict=True)]
            rates.append(float(np.mean(same)))
    return min(rates, default=None)


def float_outputs(job: Job, names: list[str]) -> list[list[np.ndarray]]:
    """Run the float TensorFlow model on the unseen samples; outputs in the order of `names`."""
    source = gq.load(job.case.model)
    runner = formats.format_module("tensorflow").create_runner(source)
    batches = open_data(str(job.held_out), runner.inputs)
    outputs = [runner.run(next(batches.feeds_between(index, index + 1))) for index in range(batches.count)]
    return [[np.asarray(sample[name]) for name in names] for sample in outputs]


def tflite_outputs(job: Job, out: Path) -> tuple[list[str], list[list[np.ndarray]]]:
    """Run the default signature of a TFLite file on the unseen samples; return the names of its outputs, and these."""
    import tensorflow as tf

    interpreter = tf.lite.Interpreter(model_path=str(out))
    signatures = interpreter.get_signature_list()
    run = interpreter.get_signature_runner("serving_default" if "serving_default" in signatures else min(signatures))
    inputs, outputs = run.get_input_details(), run.get_output_details()
    samples = read_samples(str(job.held_out), {key: len(detail["shape"]) for key, detail in inputs.items()})
    results = []
    for sample in samples:
        result = run(**{key: to_integers(sample[key], inputs[key]) for key in inputs})
        results.append([to_floats(result[key], outputs[key]) for key in sorted(outputs)])
    return sorted(outputs), results


def to_integers(value: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """Quantize an input as its detail says."""
    if detail["dtype"] == value.dtype:
        return value
    scale, zero = detail["quantization"]
    limits = np.iinfo(detail["dtype"])
    return np.clip(np.rint(value / scale) + zero, limits.min, limits.max).astype(detail["dtype"])


def to_floats(value: np.ndarray, detail: dict[str, Any]) -> np.ndarray:
    """Dequantize an output as its detail says."""
    if value.dtype.kind == "f":
        return value
    scale, zero = detail["quantization"]
    return ((value.astype(np.float32) - zero) * scale).astype(np.float32)


def measure_latency(job: Job, tool: str, figures: Figures) -> None:
    """Time the result beside float."""
    from graphquant.formats.tensorflow.tflite_converter import (
        convert_signatures,
        join_tflite_files,
        prepare_interpreter,
    )

    out = job.output(tool)
    starts: list[Callable[[], Callable[[], object]]] = []
    if out.suffix == ".tflite":
        plain = job.output(FLOAT_TFLITE)
        if not plain.exists():  # TensorFlow's converter rejects the SavedModel as it is
            plain.write_bytes(join_tflite_files(convert_signatures(convert.freeze(gq.load(job.case.model)))))
        files = [path.read_bytes() for path in (out, plain)]
        starts = [lambda data=data: prepare_interpreter(data) for data in files]  # type: ignore[misc]  # bound now
        count = 1
    else:
        source, result = gq.load(job.case.model), gq.load(out)
        module = formats.format_module(source.format)
        batches = open_data(str(job.data), module.input_specs(source))
        depends_on_data = len(source.reachable_graphs()) > 1
        chosen = [index * batches.count // SAMPLES_TIMED for index in range(SAMPLES_TIMED)] if depends_on_data else [0]
        feeds = [next(batches.feeds_between(index, index + 1)) for index in chosen]
        starts = [lambda model=model: module.prepare_timed_run(model, feeds) for model in (result, source)]  # type: ignore[misc]  # bound now
        count = len(feeds)
    ratio = timed(*starts, **job.sessions)
    figures.ratio, figures.least_ratio = ratio.median, ratio.low
    figures.milliseconds = 1000 * ratio.first_seconds / count


def read_report(job: Job, tool: str, figures: Figures) -> None:
    """Read what `insert` reported, and count the multiply-adds on integers of an ONNX result."""
    out = job.output(tool)
    report = json.loads(out.with_suffix(".json").read_text("utf-8"))
    latency = (report.get("latency") or {}).get("ratio") or (report.get("conversion") or {}).get("time_ratio") or 0
    figures.warned = latency > MAX_TIME_RATIO or out.suffix not in {".onnx", ".tflite"}
    search = report.get("search")
    if search:
        figures.repair = f"{search['status']}, {len(search.get('float_tensors', ()))} tensors in float"
    if out.suffix == ".onnx":
        figures.int8_macs, reasons = integer_macs(job, out, report["skips"])
        figures.float_macs = {reason: share for reason, share in reasons.most_common() if share >= 0.005}  # noqa: PLR2004  # what rounds to 0%


SHORT_REASONS = {
    "cost": "float is estimated to be faster",
    "optimization": "the repair leaves it float",
}
"""Reasons that have a choice of their own for each op, by code. They take precedence over rules."""


def integer_macs(job: Job, out: Path, skips: list[dict[str, Any]]) -> tuple[float, Counter[str]]:
    """Return the share of multiply-adds on integers in ONNX Runtime's optimized model, and the others by reason."""
    source = gq.load(job.case.model)
    runner = formats.format_module("onnx").create_runner(source)
    sizes = measure_tensor_sizes(source, open_data(str(job.held_out), runner.inputs), runner)
    message = onnx.load(out, load_external_data=False)
    for node in truth.all_nodes(message.graph):  # without a name, the optimized model does not tell which op it was
        node.name = node.name or node.output[0]
    named = out.with_name(f"named_{out.name}")  # in the same folder as its weights
    onnx.save(message, named)
    functions = [function.name for function in message.functions]
    kinds = truth.of_functions(truth.runs_as(truth.optimized(named)), functions)
    named.unlink()
    counts = count_macs(source, sizes)
    skipped: dict[tuple[str, str], str] = {}
    for skip in sorted(skips, key=lambda entry: entry["code"] not in SHORT_REASONS):
        for use in skip["uses"]:
            skipped.setdefault((use["graph"], use["op"]), SHORT_REASONS.get(skip["code"], skip["reason"]))
    total, reasons = sum(counts.values()) or 1, Counter[str]()
    for (graph, op), count in counts.items():
        if not truth.is_low(kinds.get(op, "")):
            kind = source.graphs[graph].op(op).kind
            reasons[skipped.get((graph, op), f"{kind} has no rule or no integer kernel")] += count / total
    return 1 - sum(reasons.values()), reasons


def examine(case: Case, interpreters: dict[str, str], folder: Path, sessions: dict[str, Any]) -> dict[str, Figures]:
    """Run all tools on one model, and measure their results."""
    job = Job(
        case=case,
        folder=folder,
        data=folder / "calibration.npz",
        held_out=folder / "held_out.npz",
        interpreters=interpreters,
        sessions=sessions,
    )
    np.savez(job.data, **{name: array[: case.samples] if array.ndim else array for name, array in case.pool.items()})
    np.savez(job.held_out, **case.held_out)
    results: dict[str, Figures] = {}
    for tool in tools_for(case):
        if tool not in interpreters:
            continue
        if tool == "ai-edge-quantizer" and results[FLOAT_TFLITE].failure:
            results[tool] = Figures(failure="TensorFlow's converter writes no float file to quantize")
            continue
        figures = results[tool] = run_tool(job, tool)
        print(f"  {case.name}, {tool}: {figures.failure or f'{figures.seconds:.1f} s'}", file=sys.stderr, flush=True)
        if figures.failure:
            continue
        try:
            measure_accuracy(job, tool, figures)
            measure_latency(job, tool, figures)
            if tool in QUANTIZERS:
                read_report(job, tool, figures)
            if job.output(tool).suffix == ".onnx":
                figures.int8_ops = int8(job.output(tool))
        except (GraphQuantError, ValueError, RuntimeError) as error:
            figures.failure = f"its result cannot be measured: {str(error).splitlines()[0][:200]}"
    judge(results, with_time=not sessions)
    return results


def tools_for(case: Case) -> tuple[str, ...]:
    """Return the tools for a model. Other tools than graphquant read TensorFlow models only as SavedModels."""
    if formats.detect_format(case.model) == "onnx":
        return ONNX_TOOLS
    return TENSORFLOW_TOOLS if case.model.is_dir() else (OURS_TENSORFLOW,)


def judge(results: dict[str, Figures], *, with_time: bool) -> None:
    """Add the bars that graphquant's results miss, with that of the time if `with_time` is True."""
    for tool, others in QUANTIZERS.items():
        figures = results.get(tool)
        if figures is None:
            continue
        if figures.failure:
            if tool != OURS_TFLITE or any(other in results and not results[other].failure for other in others):
                figures.missed.append("failed")
            continue
        if figures.sqnr is not None:
            if figures.sqnr < MIN_SQNR:
                figures.missed.append(f"below {MIN_SQNR:g} dB")
            better = [
                other
                for other in others
                if other in results and (results[other].sqnr or -math.inf) > figures.sqnr + MAX_DEFICIT
            ]
            figures.missed += [f"below {other}" for other in better]
        if figures.int8_macs is not None and figures.int8_macs < MIN_SHARE and not figures.float_macs:
            figures.missed.append("float without a reason")
        is_slow = with_time and figures.least_ratio is not None and figures.least_ratio > MAX_TIME
        if is_slow and not figures.warned:
            figures.missed.append("slower without a warning")


VERSION_SCRIPT = """
import importlib.metadata, importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name):
        print(name, importlib.metadata.version(importlib.metadata.packages_distributions()[name][0]))
"""


def find_tools(interpreters: Sequence[str]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return the interpreter of each tool, versions by package, and the reasons of the skipped tools."""
    packages = sorted({name for names in PACKAGES.values() for name in names} | {"onnx", "sympy"})
    found = dict.fromkeys(QUANTIZERS, sys.executable)
    versions = {"graphquant": gq.__version__, "python": sys.version.split()[0]}
    for python in (sys.executable, *interpreters):
        lines = subprocess.run([python, "-c", VERSION_SCRIPT, *packages], capture_output=True, text=True, check=True)
        present = dict(line.split() for line in lines.stdout.splitlines())
        versions = {**present, **versions}
        for tool, needed in PACKAGES.items():
            if all(name in present for name in needed):
                found.setdefault(tool, python)
    skipped = {tool: f"package {needed[0]} is not installed" for tool, needed in PACKAGES.items() if tool not in found}
    if FLOAT_TFLITE in skipped:
        for tool in (OURS_TENSORFLOW, OURS_TFLITE):
            del found[tool]
            skipped[tool] = skipped[FLOAT_TFLITE]
    return found, versions, skipped


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the trained models")
    parser.add_argument("--python", action="append", default=[], help="another interpreter that has some of the tools")
    parser.add_argument("--only", action="append", choices=NAMES, default=[], metavar="NAME", help="one of the models")
    parser.add_argument("--quick", action="store_true", help="four small models and short timings")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="folder for the figures of each model")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", default=ROOT / "build/report", help="default: build/report"
    )
    return parser.parse_args()


def main() -> int:
    """Write the page and the JSON file, and print the bars that are missed."""
    options = parsed()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    interpreters, versions, skipped = find_tools(options.python)
    names = options.only or (QUICK if options.quick else NAMES)
    sessions = {"seconds": 0.4, "pairs": 3} if options.quick else {}
    with tempfile.TemporaryDirectory() as scratch:
        kept = options.keep or Path(scratch, "kept")
        kept.mkdir(parents=True, exist_ok=True)
        wanted = [name for name in names if not (kept / f"{name}.json").exists()]
        for case in models(options.models, Path(scratch), wanted) if wanted else ():
            load = os.getloadavg()[0]
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                results = examine(case, interpreters, Path(folder), sessions)
            entry = {
                "format": formats.detect_format(case.model),
                "samples": case.samples,
                "unseen": max(len(array) for array in case.held_out.values() if array.ndim),
                "load": round((load + os.getloadavg()[0]) / 2, 1),
                "results": {tool: asdict(figures) for tool, figures in results.items()},
            }
            (kept / f"{case.name}.json").write_text(json.dumps(entry), "utf-8")
        entries = {
            name: json.loads((kept / f"{name}.json").read_text("utf-8"))
            for name in names
            if (kept / f"{name}.json").exists()
        }
    report = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": os.cpu_count(),
        "versions": dict(sorted(versions.items())),
        "skipped": skipped,
        "not_measured": [name for name in names if name not in entries],
        "summary": summarize(entries),
        "models": entries,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(rounded(report), indent=1) + "\n", "utf-8")
    (options.out / "report.html").write_text(render_page(rounded(report)), "utf-8")
    return print_verdict(report, options.out)


def rounded(value: Any) -> Any:
    """Round all floats of a JSON value to four significant digits."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def summarize(entries: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Summarize each tool over the models that it was run on, and pair it with graphquant's result of the format."""
    summary: dict[str, dict[str, Any]] = {}
    for tool in TOOLS:
        all_results = [entry["results"] for entry in entries.values() if tool in entry["results"]]
        done = [results for results in all_results if not results[tool]["failure"]]
        if not all_results:
            continue
        ours = next((name for name, others in QUANTIZERS.items() if tool in others), None)
        pairs = [
            (results[ours], results[tool])
            for results in done
            if ours and not results[ours]["failure"] and results[tool]["sqnr"] is not None
        ]
        mine = [results[tool] for results in done]
        summary[tool] = {
            "models": len(all_results),
            "failed": len(all_results) - len(done),
            "at_least_20_db": sum((figures["sqnr"] or 0) >= MIN_SQNR for figures in mine),
            "not_slower": sum((figures["ratio"] or math.inf) <= MAX_TIME for figures in mine),
            "median_sqnr": _median([figures["sqnr"] for figures in mine]),
            "median_ratio": _median([figures["ratio"] for figures in mine]),
            "graphquant_better": sum(one["sqnr"] > other["sqnr"] for one, other in pairs),
            "pairs": len(pairs),
            "median_relative_seconds": _median([other["seconds"] / one["seconds"] for one, other in pairs]),
            "median_relative_megabytes": _median([other["megabytes"] / one["megabytes"] for one, other in pairs]),
        }
    return summary


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def print_verdict(report: dict[str, Any], out: Path) -> int:
    """Print the summary and the missed bars; return 1 if there are any."""
    print(f"{'tool':24}{'models':>8}{'failed':>8}{'>= 20 dB':>10}{'median dB':>11}{'time/float':>12}")
    for tool, figures in report["summary"].items():
        sqnr, ratio = (
            figures[key] if figures[key] is not None else math.nan for key in ("median_sqnr", "median_ratio")
        )
        print(
            f"{tool:24}{figures['models']:8}{figures['failed']:8}{figures['at_least_20_db']:10}{sqnr:11.1f}{ratio:12.2f}"
        )
    for tool, reason in report["skipped"].items():
        print(f"skipped: {tool}: {reason}")
    missed = [
        f"{name}, {tool}: {', '.join(figures['missed'])}"
        for name, entry in report["models"].items()
        for tool, figures in entry["results"].items()
        if figures["missed"]
    ]
    print(
        *missed, f"{len(report['models'])} models, {len(missed)} results with a bar missed. {out}/report.html", sep="\n"
    )
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
