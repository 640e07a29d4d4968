"""Difference of default int8 models from their float models, beside those of ONNX Runtime and NNCF.

Run: python benchmarks/accuracy.py --nncf PYTHON
PYTHON is an interpreter that has NNCF. TensorFlow and tf2onnx are wanted; on two cores it takes about ten minutes.

Every model with data of `shared/models`, every sample model, the seeded ones of `accuracy_models.py`, a transformer and
an LSTM. Each tool has its default settings and the same 100 samples, or as many as there are; graphquant keeps none of
them back for its check. onnxruntime is called as in `peers.py`, with each of three methods. Of TensorFlow models the
others know nothing. All figures are taken on samples that calibration did not see: those of `eval.npz`, too, were seen
by no calibration, and nothing was chosen by them.

The bars: every output whose shape does not hang on values has 20 dB and more, no other tool has more, and at most a
tenth of the multiply-adds is left float. Where more is, the table says which and why; where 20 dB are missed, what
`--min-sqnr 20` leaves float for them. Of the keyword net accuracy falls by at most half a point in int8, with 98.5% of
answers the same, and by at most two with weights of 4 bits, ranges of least squared error and adaptive rounding. These
ranges were chosen on the calibration data: over nine draws of 75 samples for calibration and 25 to measure on they gave
20.8 dB and 96.4% of answers the same on average, largest magnitudes 19.3 dB and 94.7%.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from accuracy_models import SEEDED
from corrections import four_bits
from oracle import ROOT, truth
from peers import THEIRS, quantize
from peers_models import Case, cases

import graphquant as gq
from graphquant import formats
from graphquant.analysis import match_sites
from graphquant.analysis.validation import measure_tensor_sizes
from graphquant.calibration.data import open_data
from graphquant.ir import count_macs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from graphquant.analysis import Comparison

WANTED, FLOAT, SAMPLES = 20.0, 0.1, 100
"""The decibels that are wanted, the share of multiply-adds that may be float, samples of a calibration."""

ONNX = (
    "digits_cnn",
    "digits_cnn_bn",
    "digits_rnn",
    "face_detector",
    "silero_vad",
    "keyword_net",
    "transformer",
    "lstm",
)
TENSORFLOW = (
    *("digits_cnn.pb", "digits_cnn.pbtxt", "digits_cnn_saved_model", "digits_rnn.pb", "digits_rnn_saved_model"),
)
NAMES = (*ONNX, "digits_nested", *SEEDED, *TENSORFLOW, "keyword_saved_model")
"""All models, in the order of the table."""

KEYWORDS = {"int8": (0.5, 0.985), "int4": (2.0, 0.0)}
"""For each number of bits the points of accuracy that may be lost, and the share of answers that has to stay."""

COLUMNS = ("model", "SQNR dB", "agree", "in int8", *(tool.removeprefix("onnxruntime ") for tool in THEIRS), "NNCF")


@dataclass(slots=True, kw_only=True)
class Row:
    """Figures of one model.

    Attributes:
        name: What tables call it.
        sqnr: dB of the worst output, by tool.
        agreement: The share of rows whose largest value stays where it is, of the worst output that has such.
        share: Multiply-adds with quantized inputs, as a share of all.
        refused: Why a tool made nothing, by tool.
        notes: What else is to be told.
        seconds: What all of it took.
    """

    name: str
    sqnr: dict[str, float] = field(default_factory=dict)
    agreement: float | None = None
    share: float = 1.0
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def missed(self) -> list[str]:
        """The bars that are not held."""
        ours = self.sqnr["graphquant"]
        better = [tool for tool, figure in self.sqnr.items() if figure > ours]
        return [f"below {WANTED:g} dB"] * (ours < WANTED) + [f"below {tool}" for tool in better]

    def cells(self) -> list[str]:
        """The line of the table."""
        agree = "" if self.agreement is None else f"{self.agreement:.1%}"
        mine = [self.name, f"{self.sqnr['graphquant']:.1f}", agree, f"{self.share:.0%}"]
        others = [f"{self.sqnr[tool]:.1f}" if tool in self.sqnr else "—" for tool in (*THEIRS, "NNCF")]
        return [*mine, *others, ", ".join(self.missed) or "holds"]


def models(given: Path, folder: Path, only: Collection[str]) -> Iterator[Case]:
    """All models, each with its samples."""

    def wanted(name: str) -> bool:
        return not only or name in only

    names = [name for name in ONNX if wanted(name)]
    yield from (hundred(case) for case in cases(given, folder, names, []) if names)
    if wanted("digits_nested"):
        yield digits(ROOT / "sample_models/digits_nested.onnx")
    for name, make in SEEDED.items():
        if wanted(name):
            message, data = make()
            truth.name_ops(message)
            onnx.save(message, folder / f"{name}.onnx")
            parts = [
                {key: array[part] for key, array in data.items()} for part in (slice(SAMPLES), slice(SAMPLES, None))
            ]
            pool, held_out = parts
            yield Case(name=name, model=folder / f"{name}.onnx", pool=pool, held_out=held_out, samples=SAMPLES)
    for name in filter(wanted, TENSORFLOW):
        yield digits(ROOT / "sample_models" / name)
    if wanted("keyword_saved_model") and given.is_dir():
        pool, held_out = (dict(np.load(given / f"kws/{part}.npz")) for part in ("calib", "eval"))
        model = given / "kws/saved_model"
        yield Case(name="keyword_saved_model", model=model, pool=pool, held_out=held_out, samples=SAMPLES)


def hundred(case: Case) -> Case:
    """The case with as many samples for calibration as there may be, the others held out."""
    count, others = (max(len(array) for array in part.values() if array.ndim) for part in (case.pool, case.held_out))
    more = min(max(SAMPLES - count, 0), others // 4)  # a few stay
    pool, held_out = {}, {}
    for name, array in case.pool.items():
        other = case.held_out[name]
        pool[name] = np.concatenate([array[:SAMPLES], other[:more]]) if array.ndim else array
        held_out[name] = other[more:] if array.ndim else other
    return Case(name=case.name, model=case.model, pool=pool, held_out=held_out, samples=min(count + more, SAMPLES))


def digits(model: Path) -> Case:
    """A sample model."""
    stem = model.with_name("_".join(model.name.split(".")[0].split("_")[:2]))
    pool, held_out = (dict(np.load(f"{stem}_{part}.npz")) for part in ("calib", "eval"))
    return Case(name=model.name.removesuffix(".onnx"), model=model, pool=pool, held_out=held_out, samples=SAMPLES)


def examine(case: Case, nncf: str | None, folder: Path) -> Row:
    """All tools on one model."""
    start, row = time.perf_counter(), Row(name=case.name)
    data, held_out = folder / "calibration.npz", folder / "held_out.npz"
    np.savez(data, **case.pool)
    np.savez(held_out, **case.held_out)
    result = gq.insert(case.model, data=str(data), validate=False)
    made = result.save(folder / f"ours{''.join(case.model.suffixes)}", force=True)
    found = gq.compare(case.model, made, str(held_out), sites=False)
    row.sqnr["graphquant"], row.agreement = worst(found), agreement(found)
    row.notes += [f"{one.name} is not judged: {one.problem}" for one in found.outputs if one.problem]
    row.share, reasons = in_float(result, made, held_out)
    if row.share < 1 - FLOAT:
        row.notes += [f"{share:.0%} of multiply-adds float: {why}" for why, share in reasons.most_common()]
    if row.sqnr["graphquant"] < WANTED:
        row.notes += searched(case.model, data, held_out, folder)
    if result.model.format == "onnx":
        beside(row, case.model, data, held_out, nncf, folder)
    row.seconds = time.perf_counter() - start
    return row


def beside(row: Row, model: Path, data: Path, held_out: Path, nncf: str | None, folder: Path) -> None:
    """Results of the other tools."""
    for tool in (*THEIRS, *(["NNCF"] if nncf else [])):
        out = folder / f"{tool}.onnx"
        told = quantize(tool, model, data, out, nncf)
        if isinstance(told, str):
            row.refused[tool] = told
            continue
        row.sqnr[tool] = worst(gq.compare(model, out, str(held_out), sites=False))


def worst(found: Comparison) -> float:
    """SQNR in dB of the worst output that can be compared."""
    return min((one.sqnr for one in found.outputs if one.sqnr is not None and not one.problem), default=float("nan"))


def agreement(found: Comparison) -> float | None:
    """Of the worst output that has classes."""
    return min((one.agreement for one in found.outputs if one.agreement is not None), default=None)


def in_float(result: gq.Result, made: Path, data: Path) -> tuple[float, Counter[str]]:
    """The share of multiply-adds with quantized inputs, and that of the others by the reason that they have not."""
    runner = formats.format_module(result.source.format).create_runner(result.source)
    counts = count_macs(result.source, measure_tensor_sizes(result.source, open_data(str(data), runner.inputs), runner))
    low = {(one.graph, one.op) for one in match_sites(result.source, gq.load(made)).coverage if one.quantized}
    told = {(use.graph, use.op): f"{skip.reason} ({skip.rule})" for skip in result.skips for use in skip.uses}
    whole, reasons = sum(counts.values()) or 1, Counter[str]()
    for place, count in counts.items():
        if place not in low:
            kind = result.source.graphs[place[0]].op(place[1]).kind
            reasons[told.get(place, f"no rule quantizes what this {kind} reads")] += count / whole
    return 1 - sum(reasons.values()), reasons


def searched(model: Path, data: Path, held_out: Path, folder: Path) -> list[str]:
    """Result of `--min-sqnr 20`."""
    result = gq.insert(model, data=str(data), min_sqnr=WANTED)
    made = result.save(folder / f"searched{''.join(model.suffixes)}", force=True)
    figure = worst(gq.compare(model, made, str(held_out), sites=False))
    left = [] if result.search is None else [str(tensor) for tensor in result.search.float_tensors]
    share = in_float(result, made, held_out)[0]
    return [
        f"--min-sqnr {WANTED:g}: {figure:.1f} dB with {share:.0%} in int8; left float: {', '.join(left) or 'nothing'}"
    ]


def keywords(given: Path, folder: Path) -> tuple[list[str], bool]:
    """The keyword net on labelled samples, with weights of 8 and of 4 bits; whether a bar is missed."""
    case = next(cases(given, folder, ["keyword_net"], []))
    data, held_out = folder / "words.npz", folder / "labelled.npz"
    np.savez(data, **case.pool)
    np.savez(held_out, **case.held_out, labels=np.load(given / "kws/eval.npz")["label"])
    int4 = four_bits().replace('per = "channel"\nobserve = "absmax"', 'per = "channel"\nobserve = "mse"', 1)
    ways: dict[str, dict[str, Any]] = {"int8": {}, "int4": {"rules": [int4], "algorithms": ("adaround",)}}
    told, missed = [], False
    for name, options in ways.items():
        made = gq.insert(case.model, data=str(data), validate=False, **options).save(
            folder / f"{name}.onnx", force=True
        )
        (found,) = gq.compare(case.model, made, str(held_out), sites=False).outputs
        before, after = found.accuracy or (0.0, 0.0)
        points, same = KEYWORDS[name]
        broken = 100 * (before - after) > points + 1e-9 or (found.agreement or 0) < same
        missed |= broken
        told.append(
            f"keyword net, {name}: accuracy {after:.1%} (float {before:.1%}), {found.agreement:.1%} agree: "
            + ("MISSED" if broken else "holds")
        )
    return told, missed


def line(cells: list[str]) -> str:
    """Cells in columns."""
    return f"{cells[0]:22}" + "".join(f"{cell:>12}" for cell in cells[1:-1]) + f"  {cells[-1]}"


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the real models")
    parser.add_argument("--nncf", help="an interpreter that has NNCF")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one of the models")
    parser.add_argument("--out", type=Path, help="a .md file for the table")
    return parser.parse_args()


def main() -> int:
    """Prints the table; 1 if a bar is missed."""
    options = parsed()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows, told = [], []
    print(line([*COLUMNS, "verdict"]), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for case in models(options.models, Path(scratch), options.only):
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                rows.append(examine(case, options.nncf, Path(folder)))
            print(line(rows[-1].cells()), flush=True)
            notes = rows[-1].notes + [f"{tool} made nothing: {why}" for tool, why in rows[-1].refused.items()]
            print(*(f"    {note}" for note in notes), sep="\n", end="\n" * bool(notes), flush=True)
            told += [f"{case.name}: {note}" for note in notes]
        words, missed = keywords(options.models, Path(scratch)) if wants_keywords(options) else ([], False)
    print("", *words, f"{len(rows)} models, {sum(bool(row.missed) for row in rows)} with a bar missed.", sep="\n")
    if options.out:
        body = [[*COLUMNS, "verdict"], ["---"] * (len(COLUMNS) + 1), *(row.cells() for row in rows)]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in body)
        options.out.write_text(f"{table}\n\n" + "\n".join(f"* {one}" for one in [*told, *words]) + "\n", "utf-8")
    return int(missed or any(row.missed for row in rows))


def wants_keywords(options: argparse.Namespace) -> bool:
    """Return True if the labelled samples exist and are requested."""
    return options.models.is_dir() and (not options.only or "keyword_net" in options.only)


if __name__ == "__main__":
    sys.exit(main())
