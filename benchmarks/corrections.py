"""What each correction is worth: SQNR in dB on samples that neither calibration nor correction saw.

Run: python benchmarks/corrections.py [--only NAME] [--draws N]

The int8 rules, the same with one scale for each weight, and both with weights of 4 bits; each correction as `insert`
makes it, so that one which is left out shows as no gain. Samples are drawn anew for each draw; medians are shown.
The architectures of `peers.py` and `accuracy_models.py`, and two of these made over: the MobileNet with Relu in place
of ReLU6, as the paper on equalization has it, and the decoder with three channels of each norm 24 times as large, and
the weights that multiply them as much smaller, which is the same function with the outliers that large decoders have.
Of the keyword net neither calibration nor measure takes anything of `eval.npz`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from accuracy_models import SEEDED
from calibration_contestants import feeds
from oracle import ROOT, truth
from peers import outputs, worst_sqnr
from peers_models import Case, cases

import graphquant as gq
from graphquant.corrections import BALANCINGS, CORRECTIONS
from graphquant.ruleset import find

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMES = (*BALANCINGS, *CORRECTIONS)
OFF = tuple(f"not {name}" for name in NAMES)
LOUD, TIMES = 3, 24
"""Channels of each norm that are made larger, and how many times."""

WAYS: dict[str, tuple[str, ...]] = {
    "int8": ("bias-correction", "migration"),
    "int8 per tensor": ("equalization", "weight-clipping"),
    "int4": ("bias-correction", "error-compensation", "adaptive-rounding"),
    "int4 per tensor": ("equalization", "weight-clipping"),
}
"""For each kind of weights the corrections that are looked at."""


def four_bits(rules: str = "") -> str:
    """The rules for onnxruntime, or those given, with weights of 4 bits."""
    head, mark, tail = _weights(rules)
    return f"{head}{mark.replace('int8', 'int4')}{tail}"


def per_tensor(rules: str = "") -> str:
    """The rules for onnxruntime, or those given, with one scale for each weight and each bias."""
    head, mark, tail = _weights(rules)
    alone = mark.replace('per = "channel"\n', "")
    for scheme in ("bias", "added-bias"):
        before, name, after = tail.partition(f"[scheme.{scheme}]")
        tail = before + name + after.replace('per = "channel"\n', "", 1).replace("axis = 0\n", "", scheme != "bias")
    return f"{head}{alone}{tail}"


def _weights(rules: str) -> tuple[str, str, str]:
    """The text before the scheme of weights, that scheme, and the text behind it."""
    head, name, rest = (rules or find("onnxruntime").read_text("utf-8")).partition("[scheme.weight]")
    body, mark, tail = rest.partition("[scheme.stacked-weight]")
    return head, name + body, mark + tail


def ways() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each column its rules and corrections."""
    plain = find("onnxruntime").read_text("utf-8")
    texts = {
        "int8": plain,
        "int8 per tensor": per_tensor(),
        "int4": four_bits(),
        "int4 per tensor": four_bits(per_tensor()),
    }
    found = {}
    for kind, names in WAYS.items():
        found[kind] = (texts[kind], OFF)
        found |= {f"{kind}, {name}": (texts[kind], _alone(name)) for name in names}
    return found


def _alone(name: str) -> tuple[str, ...]:
    return (name, *(other for other in OFF if other != f"not {name}"))


def made_over(only: list[str], folder: Path) -> Iterator[Case]:
    """The seeded architectures, and those made over."""
    for name, make in {**SEEDED, "mobilenet_v2_relu": SEEDED["mobilenet_v2"], "gpt_outliers": SEEDED["gpt"]}.items():
        if only and name not in only:
            continue
        message, data = make()
        if name == "mobilenet_v2_relu":
            _unlimited(message.graph)
        elif name == "gpt_outliers":
            _louder(message.graph)
        truth.name_ops(message)
        onnx.save(message, folder / f"{name}.onnx")
        pool, held_out = ({key: array[part] for key, array in data.items()} for part in (slice(100), slice(100, None)))
        yield Case(name=name, model=folder / f"{name}.onnx", pool=pool, held_out=held_out, samples=80)


def _unlimited(graph: onnx.GraphProto) -> None:
    """Makes each Clip a Relu."""
    for node in graph.node:
        if node.op_type == "Clip":
            node.op_type = "Relu"
            del node.input[1:]


def _louder(graph: onnx.GraphProto) -> None:
    """Makes a few channels of each LayerNormalization louder, and the weights that multiply them as much smaller."""
    rng, held = np.random.default_rng(12), {value.name: value for value in graph.initializer}
    for norm in [node for node in graph.node if node.op_type == "LayerNormalization"]:
        factor = np.ones(held[norm.input[1]].dims[0], np.float32)
        factor[rng.choice(len(factor), LOUD, replace=False)] = TIMES
        read = [node.input[1] for node in graph.node if node.input[0] == norm.output[0]]
        for name, by in [*((name, factor) for name in norm.input[1:]), *((name, 1 / factor[:, None]) for name in read)]:
            made = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(held[name]) * by, name)
            held[name].CopyFrom(made)


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
        known = cases(options.models, Path(scratch), options.only, [])
        for case in chain(known, made_over(options.only, Path(scratch))):
            found = examine(parted(case), Path(scratch), options.draws)
            shown = []
            for name, figure in found.items():
                base = found[name.partition(",")[0]]
                lost |= figure < base - 0.5
                shown.append(f"{figure:.1f}" + (f" ({figure - base:+.1f})" if "," in name else ""))
            print(f"| {case.name} | {' | '.join(shown)} |", flush=True)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
