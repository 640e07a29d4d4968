"""Gain of each correction: SQNR in dB on samples that neither calibration nor correction saw.

Run: python benchmarks/corrections.py [--only NAME] [--draws N] [--keep FOLDER]

The int8 rules, the same with one scale for each weight, and both with weights of 4 bits; each correction as `insert`
makes it, so that one which is left out shows as no gain. Samples are drawn anew for each draw; medians are shown.
The architectures of `peers.py` and `accuracy_models.py`, and two of these made over: the MobileNet with Relu in place
of ReLU6, as the paper on equalization has it, and the decoder with three channels of each norm 24 times as large, and
the weights that multiply them as much smaller, which is the same function with the outliers that large decoders have.
Of the keyword net neither calibration nor measure takes anything of `eval.npz`.

At the end a line for each correction: the models where its paper says it helps, with what they gain, and the worst loss
of any model in any draw. The exit code is 1 if fewer than two such models gain 0.5 dB, or one anywhere loses more.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from accuracy_models import SEEDED
from oracle import ROOT, truth
from peers import worst_sqnr
from peers_models import Case, cases

import graphquant as gq
from graphquant import formats
from graphquant.calibration.data import open_data
from graphquant.errors import ModelError
from graphquant.optimize.algorithms import POST_CALIBRATION_ALGORITHMS, PRE_CALIBRATION_ALGORITHMS
from graphquant.rules import find_rule_file

if TYPE_CHECKING:
    from collections.abc import Iterator

OFF = tuple(f"not {name}" for name in (*PRE_CALIBRATION_ALGORITHMS, *POST_CALIBRATION_ALGORITHMS))
LOUD, TIMES = 3, 24
"""Channels of each norm that are made larger, and how many times."""

WAYS: dict[str, tuple[str, ...]] = {
    "int8": ("bias-correction", "smoothquant"),
    "int8 per tensor": ("cross-layer-equalization", "weight-clipping"),
    "int4": ("bias-correction", "gptq", "adaround"),
    "int4 per tensor": ("cross-layer-equalization", "weight-clipping"),
}
"""For each kind of weights the corrections that are looked at."""

REAL = ("digits_cnn", "digits_cnn_bn", "digits_rnn", "face_detector", "silero_vad", "keyword_net")
LIGHT = ("light_squeezenet", "light_shufflenet", "light_inception_v1")
MORE = ("digits_nested", "digits_cnn.pb", "digits_rnn.pb", "digits_cnn_saved_model", "keyword_saved_model")
MADE = ("mobilenet_v2_relu", "gpt_outliers")
NAMES = (*REAL, "transformer", "lstm", *LIGHT, *SEEDED, *MADE, *MORE)
"""All models that are looked at unless others are named."""

SEPARABLE = frozenset({"mobilenet_v2", "mobilenet_v2_relu", "keyword_net", "light_shufflenet", "digits_cnn"})
CONVOLUTIONS = frozenset({*SEPARABLE, "digits_cnn_bn", "face_detector", "super_resolution", "ssd", *LIGHT})
TRANSFORMERS = frozenset({"transformer", "bert", "gpt", "gpt_outliers"})

HELPS = {
    "cross-layer-equalization": SEPARABLE,
    "smoothquant": TRANSFORMERS,
    "weight-clipping": CONVOLUTIONS,
    "gptq": TRANSFORMERS,
    "adaround": CONVOLUTIONS,
    "bias-correction": CONVOLUTIONS,
}
"""For each correction the models of the kind that its paper measured."""

GAIN, LOSS, FEWEST = 0.5, 0.5, 2
"""dB that are a gain, dB that may be lost, and models that must gain."""

Figures = dict[str, list[float]]
"""SQNR in dB of each way, draw by draw."""


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
    head, name, rest = (rules or find_rule_file("onnxruntime").read_text("utf-8")).partition("[scheme.weight]")
    body, mark, tail = rest.partition("[scheme.stacked-weight]")
    return head, name + body, mark + tail


def ways() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each column its rules and corrections."""
    plain = find_rule_file("onnxruntime").read_text("utf-8")
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


def models(given: Path, folder: Path, only: list[str]) -> Iterator[Case]:
    """The models, each with its samples."""
    yield from map(parted, cases(given, folder, only, []))
    yield from made_over(only, folder)
    yield from (_digits(name) for name in MORE[:-1] if name in only)
    if MORE[-1] in only and given.is_dir():
        pool = {name: array for name, array in np.load(given / "kws/calib.npz").items() if array.ndim > 1}
        yield parted(Case(name=MORE[-1], model=given / "kws/saved_model", pool=pool, held_out={}, samples=80))


def _digits(name: str) -> Case:
    """A sample model that `cases` does not have."""
    folder = ROOT / "sample_models"
    stem = "_".join(name.partition(".")[0].split("_")[:2])
    pool, held_out = ({"image": np.load(folder / f"{stem}_{part}.npz")["image"]} for part in ("calib", "eval"))
    model = folder / (f"{name}.onnx" if name == "digits_nested" else name)
    return Case(name=name, model=model, pool=pool, held_out={"image": held_out["image"][:200]}, samples=80)


def made_over(only: list[str], folder: Path) -> Iterator[Case]:
    """The seeded architectures, and those made over."""
    for name, make in {**SEEDED, "mobilenet_v2_relu": SEEDED["mobilenet_v2"], "gpt_outliers": SEEDED["gpt"]}.items():
        if name not in only:
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
    if case.name not in {"keyword_net", "keyword_saved_model"}:
        return case
    (key,) = case.pool
    order = np.random.default_rng(5).permutation(len(case.pool[key]))
    third = len(order) // 3
    pool, held_out = ({key: case.pool[key][part]} for part in (order[third:], order[:third]))
    return replace(case, pool=pool, held_out=held_out, samples=min(case.samples, len(order) - third))


def examine(case: Case, folder: Path, draws: int, kept: Path | None) -> Figures:
    """The SQNR of each way, draw by draw; those that `kept` has, also of more draws, are not measured again."""
    found: Figures = json.loads(kept.read_text()) if kept is not None and kept.is_file() else {}
    np.savez(folder / "held_out.npz", **{name: array for name, array in case.held_out.items() if name != "labels"})
    expected = None
    for draw in range(draws):
        data = str(case.draw(draw, folder / "draw.npz"))
        for name, (rules, correct) in ways().items():
            if len(found.setdefault(name, [])) > draw:
                continue
            expected = expected or outputs(case.model, folder / "held_out.npz")
            result = gq.insert(case.model, rules=[rules], data=data, algorithms=correct, validate=False)
            made = result.save(folder / f"made{'' if case.model.is_dir() else case.model.suffix}", force=True)
            try:
                found[name].append(worst_sqnr(expected, outputs(made, folder / "held_out.npz")))
            except ModelError:  # integers of 4 bits in an ONNX function, which onnxruntime does not take
                found[name].append(math.nan)
            if kept is not None:
                kept.write_text(json.dumps(found))
    return found


def outputs(model: Path, data: Path) -> list[list[np.ndarray]]:
    """The outputs for each sample."""
    loaded = gq.load(model)
    runner = formats.format_module(loaded.format).create_runner(loaded)
    return [list(runner.run(feed).values()) for feed in open_data(str(data), runner.inputs)]


def gains(found: Figures, name: str) -> dict[str, list[float]]:
    """Return the gain of a correction in dB, draw by draw, for each kind of weights."""
    kinds = [kind for kind, names in WAYS.items() if name in names]
    pairs = {
        kind: zip(found[f"{kind}, {name}"], found[kind], strict=True)
        for kind in kinds
        if not math.isnan(sum(found[kind]))
    }
    return {kind: [with_it - plain for with_it, plain in pair] for kind, pair in pairs.items()}


def verdict(name: str, found: dict[str, Figures]) -> tuple[str, bool]:
    """Return the statement on a correction for the figures of each model, and True if it holds."""
    by_model = {model: gains(figures, name) for model, figures in found.items()}
    medians = {
        model: max(statistics.median(one) for one in kinds.values())
        for model, kinds in by_model.items()
        if model in HELPS[name]
    }
    helped = {model: gain for model, gain in medians.items() if gain >= GAIN}
    all_draws = [(min(one), f"{model}, {kind}") for model, kinds in by_model.items() for kind, one in kinds.items()]
    worst, where = min(all_draws)
    holds = len(helped) >= FEWEST and worst >= -LOSS
    told = (
        ", ".join(f"{model} {gain:+.1f}" for model, gain in sorted(helped.items(), key=lambda one: -one[1])) or "none"
    )
    lost = f"worst loss {worst:+.1f} ({where})" if worst < 0 else "no loss"
    return f"{name}: helps {told}; {lost}: {'holds' if holds else 'MISSED'}", holds


def main() -> int:
    """Prints the table and what is to be said of each correction; 1 if that does not hold of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the real models")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="one of the architectures")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep figures there, and take those that are there")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    found: dict[str, Figures] = {}
    print(f"| model | {' | '.join(ways())} |", flush=True)
    print(f"| --- |{' --- |' * len(ways())}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for case in models(options.models, Path(scratch), options.only or list(NAMES)):
            kept = None if options.keep is None else options.keep / f"{case.name}.json"
            found[case.name] = examine(case, Path(scratch), options.draws, kept)
            print(f"| {case.name} | {' | '.join(shown(found[case.name]))} |", flush=True)
    told = [verdict(name, found) for name in HELPS] if found else []
    print(*["", *(text for text, _ in told)], sep="\n")
    return int(not all(holds for _, holds in told))


def shown(figures: Figures) -> Iterator[str]:
    """The cells of a line: medians, and what a correction gains."""
    for name, values in figures.items():
        kind, _, correction = name.partition(", ")
        if math.isnan(sum(values)):
            yield "—"
            continue
        gained = f" ({statistics.median(gains(figures, correction)[kind]):+.1f})" if correction else ""
        yield f"{statistics.median(values):.1f}{gained}"


if __name__ == "__main__":
    sys.exit(main())
