"""What `insert --optimize latency` makes of models, beside float, the default, and onnxruntime's own tool.

Run: python benchmarks/latency.py [--models FOLDER] [--only NAME]... [--out FILE.md] [--prepare FOLDER | --time FOLDER]

The models: those of `peers.py` that are trained or light, sample_models, and the seeded ones of `accuracy_models.py`.
Each is quantized by default, by `--optimize latency`, and by onnxruntime's `quantize_static` (weights per channel,
MinMax, all op types or convolutions and products alone, whichever is the faster here). Then all run in turn, in new
sessions on one thread, by the processor's clock: ratios to float are medians over rounds, the middle one of some pairs
of sessions, with the least and the most of these. A bar is missed where the optimized model takes longer in each.

`--prepare` makes the models, those that are there already left out, `--time` times those that there are. Both want a
quiet machine: what is optimized while it is busy may gain less than there is to gain.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from accuracy_models import SEEDED
from calibration_contestants import Reader, feeds
from oracle import ROOT, truth
from peers_models import cases

import graphquant as gq
from graphquant import formats
from graphquant.accuracy import ratio
from graphquant.data import open_data

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphquant.accuracy import Ratio

NAMES = (
    *("digits_cnn", "digits_cnn_bn", "digits_rnn", "face_detector", "silero_vad", "keyword_net", "transformer", "lstm"),
    *("light_shufflenet", "light_squeezenet", "light_inception_v1"),
)
"""Of the architectures of `peers.py` those that run in a few milliseconds, and some of the others."""

SAMPLES, SECONDS, PAIRS = 40, 1.5, 5

NARROW = {"every op": None, "products": ["Conv", "MatMul", "Gemm"]}
"""What onnxruntime's tool is told to quantize."""

KINDS = ("default", "optimized", "onnxruntime")


def models(given: Path, folder: Path, only: list[str]) -> Iterator[tuple[str, Path, Path]]:
    """The name, file and data of each model."""
    wanted = [name for name in NAMES if not only or name in only]
    for case in cases(given, folder, wanted, []) if wanted else ():
        yield case.name, case.model, _data(folder / f"{case.name}.npz", case.pool)
    for name in [name for name in ("digits_nested",) if not only or name in only]:
        shutil.copy(ROOT / f"sample_models/{name}.onnx", folder)
        with np.load(ROOT / f"sample_models/{name}_calib.npz") as data:
            yield name, folder / f"{name}.onnx", _data(folder / f"{name}.npz", dict(data))
    for name, make in SEEDED.items():
        if not only or name in only:
            message, pool = make()
            truth.name_ops(message)
            onnx.save(message, folder / f"{name}.onnx")
            yield name, folder / f"{name}.onnx", _data(folder / f"{name}.npz", pool)


def _data(path: Path, pool: dict[str, Any]) -> Path:
    np.savez(path, **{name: array[:SAMPLES] if array.ndim else array for name, array in pool.items()})
    return path


def prepare(name: str, model: Path, data: Path) -> dict[str, Any]:
    """Makes the quantized models beside `model`; what was found on the way."""
    gq.insert(model, data=str(data)).save(model.with_suffix(".default.onnx"), force=True)
    made = gq.insert(model, data=str(data), optimize="latency")
    made.save(model.with_suffix(".optimized.onnx"), force=True)
    told: dict[str, Any] = {"left": len(made.timed.left) if made.timed else 0, "sites": len(made.inserted)}
    told["plans"] = made.timed.plans if made.timed else 0
    told["theirs"] = _theirs(model, data)
    print(f"  {name}: {told}", file=sys.stderr, flush=True)
    return told


def _theirs(model: Path, data: Path) -> str:
    """What onnxruntime's tool makes, as the faster of its placements; which that is, or why there is none."""
    from onnxruntime.quantization import quantize_static

    out = model.with_suffix(".onnxruntime.onnx")
    samples, best, said = list(feeds(model, data)), None, "refused"
    for how, kinds in NARROW.items():
        tried = model.with_suffix(".tried.onnx")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                quantize_static(
                    str(model), str(tried), Reader(iter(samples)), per_channel=True, op_types_to_quantize=kinds
                )
            found = timed(tried, model, data)
        except Exception as error:  # noqa: BLE001  # of any kind; the table says it
            said = said if best is not None else f"refused: {type(error).__name__}"
            continue
        if best is None or found.median < best:
            best, said = found.median, how
            tried.replace(out)
    return said


def timed(quant: Path, model: Path, data: Path) -> Ratio:
    """How long `quant` takes as a share of `model`, over pairs of new sessions; seconds of `model` for a sample."""
    module = formats.module("onnx")
    source = gq.load(model)
    batches = open_data(str(data), module.inputs(source))
    some = [index * batches.count // 4 for index in range(4)] if len(source.live()) > 1 else [0]
    samples = [next(batches.span(index, index + 1)) for index in some]
    made = gq.load(quant)
    pairs = [
        ratio(module.timed(made, samples), module.timed(source, samples), seconds=SECONDS / PAIRS) for _ in range(PAIRS)
    ]
    pairs.sort(key=lambda one: one.median)
    middle = pairs[PAIRS // 2]
    return replace(middle, low=pairs[0].median, high=pairs[-1].median, other=middle.other / len(samples))


def lines(name: str, model: Path, data: Path, told: dict[str, Any]) -> tuple[list[str], bool]:
    """The table's cells of one model, and whether its bar is held."""
    cells, held, whole = [], True, 0.0
    for kind in KINDS:
        quant = model.with_suffix(f".{kind}.onnx")
        if not quant.exists():
            cells.append(told["theirs"])
        elif kind == "optimized" and not told["sites"]:
            cells.append("1, all float")
        else:
            found = timed(quant, model, data)
            whole = found.other
            held = held and not (kind == "optimized" and found.low > 1)
            cells.append(f"{found.median:.2f} ({found.low:.2f} to {found.high:.2f})")
    sites = f"{told['sites']} of {told['sites'] + told['left']}"
    return [name, f"{1000 * whole:.3f}", *cells, sites, "" if held else "MISSED"], held


def main() -> int:
    """Prints the table; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the real models")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one of the models")
    parser.add_argument("--out", type=Path, help="a .md file for the table")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="make the models there, and end")
    parser.add_argument("--time", type=Path, metavar="FOLDER", help="time the models that were made there")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.time or options.prepare or Path(scratch)
        folder.mkdir(exist_ok=True)
        index = folder / "made.json"
        known: dict[str, Any] = json.loads(index.read_text("utf-8")) if index.exists() else {}
        if options.time is None:
            for name, model, data in models(options.models, folder, options.only):
                known[name] = known.get(name) or prepare(name, model, data)
                index.write_text(json.dumps(known), "utf-8")
        return 0 if options.prepare else show(folder, known, options.out)


def show(folder: Path, known: dict[str, Any], out: Path | None) -> int:
    """Times all models and prints the table."""
    rows = [["model", "float ms", *KINDS, "quantized sites", ""]]
    missed = 0
    print(*rows[0], sep="  ")
    for name, told in known.items():
        row, held = lines(name, folder / f"{name}.onnx", folder / f"{name}.npz", told)
        rows.append(row)
        missed += not held
        print(*row, sep="  ", flush=True)
    print(f"{len(known)} models, {missed} with the bar missed.")
    if out is not None:
        rows.insert(1, ["---"] * len(rows[0]))
        out.write_text("\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n", "utf-8")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
