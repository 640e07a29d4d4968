"""The search beside a slow one, and its bounds on data that it never saw.

Run: python benchmarks/search.py [--only every|bounds] [--cases NAME ...] [--models FOLDER] [--write-references]

`every`: small nets of up to 12 sites with seeded weights, each at several bounds. Every choice of candidates that costs
less than the result of the search is measured as the search measures; the best that meets the bound is the least.
`bounds`: twelve models at 25, 30 and 40 dB. The best known plans are those of a greedy search that measures each of its
moves on all samples; `search_references.json` has their share of multiply-adds in int8. A bound that the search calls
met, proven or not, must hold on samples that it never saw. The times are the processor time of `insert` relative to
that of `calibrate`: as whole processes, as the limit of the search counts them, and without their start, which is most
of the process for a small model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import accuracy_models
import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
from calibration_models import photographs
from peers import measure_process

import graphquant as gq
from graphquant.optimize.search_budget import SearchBudget
from graphquant.optimize.selection import (
    SelectionResult,
    search_cheapest_plan,
    selection_cost,
    settle_selection,
    total_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
REFERENCES = Path(__file__).with_name("search_references.json")
BOUNDS = (25, 30, 40)  # bounds in dB
MIN_SHARE = 0.9  # least share of the best known plan's multiply-adds in int8
MAX_RATIO = 1.2  # largest cost relative to the least of all choices

NETS = {
    "two layers": ("a = Gemm(x, w0, b0) r = Relu(a) y = Gemm(r, w1, b1)", [(8, 24), (24,), (24, 6), (6,)]),
    "three layers": (
        "a = Gemm(x, w0, b0) r = Relu(a) c = Gemm(r, w1, b1) s = Relu(c) y = MatMul(s, w2)",
        [(8, 16), (16,), (16, 32), (32,), (32, 6)],
    ),
    "two branches": (
        "a = MatMul(x, w0) r = Relu(a) c = MatMul(r, w1) d = MatMul(r, w2) s = Add(c, d) y = MatMul(s, w3)",
        [(8, 16), (16, 12), (16, 12), (12, 4)],
    ),
}


def small(name: str, path: Path) -> Path:
    """A net with seeded weights, some channels of which are larger."""
    text, shapes = NETS[name]
    head = '<ir_version: 8, opset_import: ["" : 13]>\nnet (float[N, 8] x) => (float[N, K] y)\n'
    model, rng = onnx.parser.parse_model(f"{head}{{ {text} }}"), np.random.default_rng(1)
    names = [word for layer in range(4) for word in (f"w{layer}", f"b{layer}") if word in text]
    for word, shape in zip(names, shapes, strict=True):
        value = rng.normal(size=shape) * np.exp(rng.normal(size=shape[-1])) / np.sqrt(shape[0])
        model.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.float32), word))
    onnx.save(model, path)
    return path


class Every:
    """In the place of the search: the search, and then every choice that costs less than its result."""

    def __init__(self) -> None:
        self.least = self.cost = 0.0
        self.sites = self.tried = 0

    def __call__(self, groups: Any, costs: Any, measure: Any, **options: Any) -> Any:
        """Return the result of the search."""
        result = search_cheapest_plan(groups, costs, measure, **options)
        if not groups:
            return result
        self.sites = sum(len(group.sites) for group in groups)
        self.cost = self.least = selection_cost(groups, result.selection, costs)
        cheaper = list(product(*(range(len(group.candidates)) for group in groups)))
        cheaper = [selection for selection in cheaper if selection_cost(groups, selection, costs) < self.cost]
        self.tried = len(cheaper)
        with mock.patch.object(SearchBudget, "charge"):  # no limit of work here
            for selection in sorted(cheaper, key=lambda entry: selection_cost(groups, entry, costs)):
                if measure(selection).met:
                    self.least = selection_cost(groups, selection, costs)
                    break
        return result


def every(folder: Path) -> float:
    """Print the first table, and return the worst ratio."""
    print("| net | sites | bound | float multiply-adds, search | least of all | plans that cost less | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    worst = 1.0
    x = np.random.default_rng(2).normal(size=(100, 8)) * np.exp(np.random.default_rng(3).normal(size=(100, 1)))
    np.savez(folder / "data.npz", x=x.astype(np.float32))
    for name in NETS:
        path = small(name, folder / "net.onnx")
        first = gq.insert(path, data=str(folder / "data.npz"), min_sqnr=0.1).search.search_validation
        plain = min(output.sqnr for output in first.comparison.outputs)
        for more in (1, 2, 3, 5, 8):
            tried = Every()
            with mock.patch("graphquant.optimize.search.search_cheapest_plan", tried):
                gq.insert(path, data=str(folder / "data.npz"), min_sqnr=plain + more, allow_empty=True)
            ratio = tried.cost / tried.least if tried.least else (1.0 if not tried.cost else np.inf)
            worst = max(worst, ratio)
            figures = f"{tried.cost:g} | {tried.least:g} | {tried.tried} | {ratio:.2f}"
            print(f"| {name} | {tried.sites} | {plain + more:.1f} dB | {figures} |", flush=True)
    return worst


FIRST_SHORTLIST, SHORTLIST = 24, 8
"""Number of moves that the slow search measures in its first and in each later step, by the gain that is known."""


class SlowGreedy:
    """In the place of the search: a greedy search that measures each move on all samples.

    In each step, the moves with the largest error reduction per multiply-add, as estimated or last measured, are
    measured again, and the best one is made. Once the bound is met, each op that still meets it on integers goes back,
    the largest first.
    """

    def __init__(self) -> None:
        self.measured = 0

    def __call__(
        self, groups: Any, costs: Any, measure: Any, *, target_sqnr: float, blocks: Any = (), **_: Any
    ) -> SelectionResult:
        """Return the cheapest selection of float ops that meets the bound as measured."""
        ops = frozenset(op for group in groups for op in group.ops)
        moves = list(dict.fromkeys([*(frozenset([op]) for op in sorted(ops)), *(block & ops for block in blocks)]))
        errors: dict[frozenset[Any], float] = {}

        def error(float_ops: frozenset[Any]) -> float:
            if float_ops not in errors:
                self.measured += 1
                errors[float_ops] = 10 ** (-measure(settle_selection(groups, float_ops, 0.0)).sqnr / 10)
            return errors[float_ops]

        def price(float_ops: frozenset[Any]) -> float:
            return sum(costs[op] for op in float_ops)

        limit, chosen = 10 ** (-target_sqnr / 10), frozenset[Any]()

        def added_price(move: frozenset[Any]) -> float:
            return max(price(chosen | move) - price(chosen), 1e-9 * price(ops))

        rules_error = total_error(groups, (0,) * len(groups))
        gains = {
            move: (rules_error - total_error(groups, settle_selection(groups, move, 0.0))) / added_price(move)
            for move in moves
            if move
        }
        while error(chosen) > limit and gains:
            count = SHORTLIST if chosen else FIRST_SHORTLIST
            for move in sorted(gains, key=lambda entry: -gains[entry])[:count]:
                gains[move] = (error(chosen) - error(chosen | move)) / added_price(move)
            best = max(gains, key=gains.__getitem__)
            if gains[best] <= 0:
                best = max(gains, key=lambda entry: len(entry - chosen))
            chosen |= best
            gains = {move: gain for move, gain in gains.items() if not move <= chosen}
        for op in sorted(chosen, key=lambda entry: (-costs[entry], entry)):
            if error(chosen - {op}) <= limit:
                chosen -= {op}
        selection = settle_selection(groups, chosen, 0.0)
        cost = price(chosen) / (price(ops) or 1.0)
        quality = measure(selection)
        return SelectionResult(selection=selection, quality=quality, cost=cost, plans=self.measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and data of which the search gets a part."""

    name: str  # name in the table
    path: Path  # the model
    data: dict[str, np.ndarray]  # samples by input, along the first axis; without axes if all samples share a value
    size: int  # number of samples that the search gets
    views: int = 1  # number of consecutive samples that are of one photograph, and stay together

    def draw(self, number: int, folder: Path) -> tuple[Path, Path]:
        """Write the samples that the search gets, and all others."""
        count = max(len(value) for value in self.data.values() if value.ndim)
        order = np.random.default_rng(number).permutation(count // self.views)
        order = (order[:, None] * self.views + np.arange(self.views)).ravel()
        paths = folder / "seen.npz", folder / "unseen.npz"
        for path, some in zip(paths, (order[: self.size], order[self.size :]), strict=True):
            np.savez(path, **{key: value[some] if value.ndim else value for key, value in self.data.items()})
        return paths


def read_arrays(*paths: Path) -> dict[str, np.ndarray]:
    """Read the arrays of some files, joined along the first axis."""
    parts = [dict(np.load(path)) for path in paths]
    return {
        key: np.concatenate([part[key] for part in parts]) if parts[0][key].ndim else parts[0][key] for key in parts[0]
    }


def trained_cases(models: Path) -> Iterator[Case]:
    """Yield trained models."""
    for name in ("digits_cnn", "digits_rnn"):
        data = dict(np.load(ROOT / f"sample_models/{name}_eval.npz"))
        yield Case(name=name, path=ROOT / f"sample_models/{name}.onnx", data=data, size=64)
    path = models / "silero_vad_16k_op15.onnx"
    yield Case(name="voice_detector", path=path, data=dict(np.load(models / "silero_vad.npz")), size=64)
    data = {"input": np.concatenate(list(photographs(models, 60, start=1)))}
    yield Case(name="face_detector", path=models / "ultraface/version-RFB-320.onnx", data=data, size=40, views=5)
    crops = np.load(models / "osf/crops.npz")["rgb"].astype(np.float32)
    data = {"input": ((crops / 255 - 0.45) / 0.225).transpose(0, 3, 1, 2)}
    for name in ("lm_model0_opt", "mnv3_detection_opt"):
        yield Case(name=name, path=models / f"osf/{name}.onnx", data=data, size=40)
    for name in ("model_1", "model_2"):
        data = read_arrays(models / f"dtln/{name}_calib.npz", models / f"dtln/{name}_eval.npz")
        yield Case(name=f"dtln_{name}", path=models / f"dtln/{name}.onnx", data=data, size=100)
    data = read_arrays(models / "basic_pitch/calib.npz", models / "basic_pitch/eval.npz")
    yield Case(name="basic_pitch", path=models / "basic_pitch/nmp.onnx", data=data, size=26)


def seeded_cases(folder: Path) -> Iterator[Case]:
    """Yield nets with seeded weights."""
    accuracy_models.SAMPLES = 120
    for name in ("mobilenet_v2", "bert", "ssd"):
        net, data = accuracy_models.SEEDED[name]()
        onnx.save(net, folder / f"{name}.onnx")
        yield Case(name=name, path=folder / f"{name}.onnx", data=data, size=64)


def insert_slowly(case: Case, seen: Path, bound: float) -> tuple[float, int]:
    """Return the int8 share of the best plan that the slow search finds, and the number of its measurements."""
    slow = SlowGreedy()
    with (
        mock.patch("graphquant.optimize.search.search_cheapest_plan", slow),
        mock.patch("graphquant.optimize.search.MAX_MARGIN_DB", 0.0),
        mock.patch("graphquant.optimize.search.MAX_SEARCHES", 1),
    ):
        result = gq.insert(case.path, data=str(seen), min_sqnr=bound, allow_empty=True)
    return 1 - result.search.cost, slow.measured


def bounds_table(cases: Iterator[Case], folder: Path, only: list[str], *, write: bool) -> bool:
    """Print the second table. Return True if each bound that is called met holds, and enough ops are on integers."""
    references = json.loads(REFERENCES.read_text()) if REFERENCES.exists() else {}
    print("| model | bound | status | in int8 | best known | seen | unseen | plans | time | without start |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    passed = True
    for case in cases:
        if only and case.name not in only:
            continue
        seen, unseen = case.draw(0, folder)
        gq.calibrate(case.path, data=str(seen), samples=1)  # imports, and the files of the model
        start = time.process_time()
        gq.calibrate(case.path, data=str(seen))
        calibration_time = time.process_time() - start
        command = ["-m", "graphquant", "calibrate", str(case.path), "--data", str(seen), "-o", str(folder / "s.gqs")]
        status, process_time, _ = measure_process([sys.executable, *command, "--force"], folder / "log.txt")
        if status:
            raise RuntimeError((folder / "log.txt").read_text())
        for bound in BOUNDS:
            key = f"{case.name} {bound}"
            if write:
                share, measured = insert_slowly(case, seen, bound)
                references[key] = round(share, 4)
                print(f"reference of {key}: {share:.4f} after {measured} plans", file=sys.stderr, flush=True)
                REFERENCES.write_text(json.dumps(references, indent=1, sort_keys=True) + "\n")
            start = time.process_time()
            result = gq.insert(case.path, data=str(seen), min_sqnr=bound, allow_empty=True)
            insert_time, search = time.process_time() - start, result.search
            ratio = (insert_time + process_time - calibration_time) / process_time
            seen_sqnr = search.search_validation.comparison.sqnr
            unseen_sqnr = gq.compare(case.path, result.model, str(unseen), sites=False).sqnr
            share, best = 1 - search.cost, references.get(key)
            holds = search.status == "missed" or unseen_sqnr >= bound
            passed &= holds and (best is None or share >= MIN_SHARE * best)
            cells = f"{share:.1%} | {'' if best is None else f'{best:.1%}'} | {seen_sqnr:.1f} | {unseen_sqnr:.1f}"
            times = f"{ratio:.1f} | {insert_time / calibration_time:.1f}"
            print(f"| {case.name} | {bound} | {search.status} | {cells} | {search.plans} | {times} |", flush=True)
    return passed


def main() -> int:
    """Print both tables. Return 1 if a figure misses its goal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the real models")
    parser.add_argument("--only", choices=["every", "bounds"])
    parser.add_argument("--cases", nargs="+", default=[], help="models of the second table, by name; all by default")
    parser.add_argument("--write-references", action="store_true", help="find the best known plans again, slowly")
    options = parser.parse_args()
    worst, passed = 1.0, True
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.only != "bounds":
            worst = every(folder)
        if options.only != "every":
            cases = chain(trained_cases(options.models), seeded_cases(folder))
            passed = bounds_table(cases, folder, options.cases, write=options.write_references)
    return int(worst > MAX_RATIO or not passed)


if __name__ == "__main__":
    sys.exit(main())
