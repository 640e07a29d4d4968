"""Models of `insert --optimize latency` beside float, the default, and ONNX Runtime's own tool.

Run: python benchmarks/latency.py [--models FOLDER] [--only NAME]... [--keep FOLDER] [--out FILE.md]

The models are those of `report_models.py`, with the samples that calibration has there. Each is quantized by default,
by `--optimize latency`, and by onnxruntime's `quantize_static` (weights per channel, MinMax, all op types or
convolutions and products alone, whichever is the faster here). Then all run in turn, in new sessions on one thread, by
the processor's clock: ratios to float are medians over rounds, the middle one of some pairs of sessions, with the least
and the most of these. A bar is missed where the optimized model takes longer in each.

TensorFlow's models run in TensorFlow, and once more as TFLite files, which are another row; onnxruntime's tool knows
nothing of these. What cannot be written so says why.

It wants a quiet machine: what is optimized while it is busy may gain less than there is to gain. All models take some
eight minutes. `--keep` keeps what was found of each model in a folder, and leaves out what is there already, so that it
may be run in pieces, also after it was stopped; the table at the end is of all that is there.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from calibration_contestants import Reader, feeds
from oracle import ROOT
from report_models import NAMES, models

import graphquant as gq
from graphquant import formats
from graphquant.api import convert
from graphquant.calibration.data import open_data
from graphquant.errors import GraphQuantError
from graphquant.optimize.latency import measure_time_ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from peers_models import Case

    from graphquant.optimize.latency import TimeRatio

    Start = Callable[[], Callable[[], object]]

SECONDS, PAIRS = 1.5, 5

NARROW = {"every op": None, "products": ["Conv", "MatMul", "Gemm"]}
"""Op types that ONNX Runtime's tool quantizes."""

KINDS = ("default", "optimized", "onnxruntime")

COLUMNS = ("model", "float ms", *KINDS, "quantized sites", "")

NONE = "—"


@dataclass(slots=True, kw_only=True)
class Row:
    """Figures of one model in one runtime.

    Attributes:
        name: What the table calls it.
        milliseconds: Of float, for a sample.
        cells: By kind how many times as long it takes, or why that is not known.
        sites: What is quantized of all that the rules quantize.
        missed: Whether the optimized model is slower than float.
        seconds: What all of the model took, its other row included.
    """

    name: str
    milliseconds: float = 0.0
    cells: dict[str, str] = field(default_factory=lambda: dict.fromkeys(KINDS, NONE))
    sites: str = ""
    missed: bool = False
    seconds: float = 0.0

    def shown(self) -> list[str]:
        """The line of the table."""
        verdict, took = "MISSED" if self.missed else "", f"{self.milliseconds:.3f}" if self.milliseconds else NONE
        return [self.name, took, *(self.cells[kind] for kind in KINDS), self.sites, verdict]

    def judge(self, kind: str, start: Start, plain: Start, samples: int = 1) -> None:
        """Times what `start` starts beside what `plain` does."""
        found = timed(start, plain)
        self.cells[kind] = f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})"
        self.milliseconds = 1000 * found.second_seconds / samples
        self.missed |= kind == "optimized" and found.low > 1

    def optimized(self, made: gq.Result, start: Callable[[], Start], plain: Start, samples: int = 1) -> None:
        """Times what was optimized, unless it is the float model itself."""
        left = len(made.search.float_tensors) if made.search else 0
        self.sites = f"{len(made.inserted)} of {len(made.inserted) + left}"
        if made.inserted:
            self.judge("optimized", start(), plain, samples)
        else:
            self.cells["optimized"] = "1, all float"


def timed(one: Start, other: Start, *, seconds: float = SECONDS, pairs: int = PAIRS) -> TimeRatio:
    """Return the ratio of two times: the middle pair of new sessions, with the smallest and the largest."""
    ratios = sorted(
        (measure_time_ratio(one(), other(), seconds=seconds / pairs) for _ in range(pairs)),
        key=lambda each: each.median,
    )
    return replace(ratios[pairs // 2], low=ratios[0].median, high=ratios[-1].median)


def examine(case: Case, folder: Path) -> list[Row]:
    """The rows of one model."""
    start, data = time.perf_counter(), folder / "calibration.npz"
    np.savez(data, **case.pool)
    rows = [in_framework(case, data, folder)]
    if formats.detect_format(case.model) == "tensorflow":
        rows.append(as_lite(case, data, folder))
    for row in rows:
        row.seconds = time.perf_counter() - start
    return rows


def in_framework(case: Case, data: Path, folder: Path) -> Row:
    """As onnxruntime or TensorFlow runs it."""
    row, source = Row(name=case.name), gq.load(case.model)
    module = formats.format_module(source.format)
    batches = open_data(str(data), module.input_specs(source))
    some = [index * batches.count // 4 for index in range(4)] if len(source.reachable_graphs()) > 1 else [0]
    samples = [next(batches.feeds_between(index, index + 1)) for index in some]

    def starting(path: Path) -> Start:
        model = gq.load(path)
        return lambda: module.prepare_timed_run(model, samples)

    def written(made: gq.Result, kind: str) -> Start:
        return starting(made.save(folder / f"{kind}{case.model.suffix}", force=True))

    plain = starting(case.model)
    row.judge(
        "default", written(gq.insert(case.model, data=str(data), allow_empty=True), "default"), plain, len(samples)
    )
    made = gq.insert(case.model, data=str(data), optimize="latency", allow_empty=True)
    row.optimized(made, lambda: written(made, "optimized"), plain, len(samples))
    if source.format == "onnx":
        theirs = folder / "theirs.onnx"
        said = _theirs(case.model, data, theirs, lambda path: timed(starting(path), plain).median)
        row.cells["onnxruntime"] = said
        if theirs.exists():
            row.judge("onnxruntime", starting(theirs), plain, len(samples))
    return row


def as_lite(case: Case, data: Path, folder: Path) -> Row:
    """As TFLite runs it."""
    from graphquant.formats.tensorflow.tflite_converter import (
        convert_signatures,
        join_tflite_files,
        prepare_interpreter,
    )

    row, source = Row(name=f"{case.name}, TFLite"), convert.freeze(gq.load(case.model))

    def starting(file: bytes) -> Start:
        return lambda: prepare_interpreter(file)

    def written(made: gq.Result) -> Start:
        path = folder / "made.tflite"
        convert.convert_to_tflite(made, path, force=True)
        return starting(path.read_bytes())

    try:
        plain = starting(join_tflite_files(convert_signatures(source)))
        row.judge("default", written(gq.insert(source, data=str(data), allow_empty=True)), plain)
        made = gq.insert(source, data=str(data), optimize="latency", runtime="tflite", allow_empty=True)
        row.optimized(made, lambda: written(made), plain)
    except GraphQuantError as error:  # the table says it
        refused = next(kind for kind in KINDS if row.cells[kind] == NONE)
        row.cells[refused] = f"refused: {str(error).partition('. ')[0]}"
    return row


def _theirs(model: Path, data: Path, out: Path, takes: Callable[[Path], float]) -> str:
    """Writes what onnxruntime's tool makes, the faster of its placements; why there is none if it makes nothing."""
    from onnxruntime.quantization import quantize_static

    samples, tried, said = list(feeds(model, data)), out.with_suffix(".tried.onnx"), NONE
    best = float("inf")
    for kinds in NARROW.values():
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                quantize_static(
                    str(model), str(tried), Reader(iter(samples)), per_channel=True, op_types_to_quantize=kinds
                )
            found = takes(tried)
        except Exception as error:  # noqa: BLE001  # of any kind; the table says it
            said = f"refused: {type(error).__name__}"
            continue
        if found < best:
            best = found
            tried.replace(out)
    return said


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the real models")
    parser.add_argument("--only", action="append", choices=NAMES, default=[], metavar="NAME", help="one of the models")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where to keep what is found")
    parser.add_argument("--out", type=Path, help="a .md file for the table")
    return parser.parse_args()


def main() -> int:
    """Prints the table; 1 if a bar is missed."""
    options = parsed()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        kept = options.keep or Path(scratch)
        kept.mkdir(exist_ok=True)
        wanted = [name for name in options.only or NAMES if not (kept / f"{name}.json").exists()]
        for case in models(options.models, Path(scratch), wanted) if wanted else ():
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                rows = examine(case, Path(folder))
            for row in rows:
                print(f"  {row.seconds:.0f} s: {'  '.join(row.shown())}", file=sys.stderr, flush=True)
            (kept / f"{case.name}.json").write_text(json.dumps([_fields(row) for row in rows]), "utf-8")
        files = [kept / f"{name}.json" for name in NAMES]
        found = [Row(**row) for file in files if file.exists() for row in json.loads(file.read_text("utf-8"))]
    return show(found, options.out)


def _fields(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__slots__}


def show(rows: list[Row], out: Path | None) -> int:
    """Prints the table; 1 if a bar is missed."""
    body = [list(COLUMNS), ["---"] * len(COLUMNS), *(row.shown() for row in rows)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in body) + "\n"
    print(table)
    missed = sum(row.missed for row in rows)
    print(f"{len(rows)} rows, {missed} with the bar missed.")
    if out is not None:
        out.write_text(table, "utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
