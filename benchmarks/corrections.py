"""What each correction is worth: SQNR in dB on samples that neither calibration nor correction saw.

Run: python benchmarks/corrections.py [--only NAME] [--draws N]

Bias correction with the int8 rules, and rounding with the same rules where weights have 4 bits; each as `insert` makes
it, so that one which is left out shows as no gain. Samples are drawn anew for each of the draws; the median is shown.
Of the keyword net neither calibration nor measure takes anything of `eval.npz`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from calibration_contestants import feeds
from oracle import ROOT
from peers import outputs, worst_sqnr
from peers_models import cases

import graphquant as gq
from graphquant.corrections import CORRECTIONS
from graphquant.ruleset import find

if TYPE_CHECKING:
    from peers_models import Case

OFF = tuple(f"not {name}" for name in CORRECTIONS)


def four_bits() -> str:
    """The rules for onnxruntime with weights of 4 bits."""
    head, _, rest = find("onnxruntime").read_text("utf-8").partition("[scheme.weight]")
    body, mark, tail = rest.partition("[scheme.stacked-weight]")
    return f"{head}[scheme.weight]{body.replace('int8', 'int4')}{mark}{tail}"


def ways() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each column its rules and corrections."""
    rules, found = four_bits(), {"int8": ("onnxruntime", OFF)}
    found["int8 bias-correction"] = ("onnxruntime", _alone("bias-correction"))
    found["int4"] = (rules, OFF)
    found |= {f"int4 {name}": (rules, _alone(name)) for name in CORRECTIONS}
    return found


def _alone(name: str) -> tuple[str, ...]:
    return (name, *(other for other in OFF if other != f"not {name}"))


def parted(case: Case) -> Case:
    """The case; of the keyword net a third of the calibration data is held out, for eval.npz is for the end."""
    if case.name != "keyword_net":
        return case
    (key,) = case.pool
    order = np.random.default_rng(5).permutation(len(case.pool[key]))
    third = len(order) // 3
    pool, held_out = ({key: case.pool[key][part]} for part in (order[third:], order[:third]))
    return replace(case, pool=pool, held_out=held_out, samples=min(case.samples, len(order) - third))


def examine(case: Case, folder: Path, draws: int) -> dict[str, float]:
    """The median SQNR of each way."""
    np.savez(folder / "held_out.npz", **case.held_out)
    samples = list(feeds(case.model, folder / "held_out.npz"))
    expected = outputs(case.model, samples)
    found: dict[str, list[float]] = {}
    for draw in range(draws):
        data = str(case.draw(draw, folder / "draw.npz"))
        for name, (rules, correct) in ways().items():
            result = gq.insert(case.model, rules=[rules], data=data, correct=correct, check=False)
            result.save(folder / "made.onnx", force=True)
            found.setdefault(name, []).append(worst_sqnr(expected, outputs(folder / "made.onnx", samples)))
    return {name: statistics.median(figures) for name, figures in found.items()}


def main() -> int:
    """Prints the table; 1 if a correction loses more than 0.5 dB."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the real models")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one of the architectures")
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    lost = False
    print(f"| model | {' | '.join(ways())} |", flush=True)
    print(f"| --- |{' --- |' * len(ways())}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases(options.models, Path(scratch), options.only, []):
            found = examine(parted(case), Path(scratch), options.draws)
            shown = []
            for name, figure in found.items():
                base = found[name.split()[0]]
                lost |= figure < base - 0.5
                shown.append(f"{figure:.1f}" + (f" ({figure - base:+.1f})" if " " in name else ""))
            print(f"| {case.name} | {' | '.join(shown)} |", flush=True)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
