"""Time of calibration relative to plain forward passes, and the quality of its ranges, with peers in the same run.

Run with `python benchmarks/calibration.py` (about ten minutes). `--models FOLDER` holds the face detector and the
keyword net, `--nncf PYTHON` is an interpreter that has NNCF, `--quick` takes fewer samples and no repeats.

Each contestant runs in a process of its own, on the same prepared model, one after the other in rounds; figures are
medians over rounds, and each run is told as it ends. Nothing is warm but the files. Imports and planning are not
counted, sessions and data are.

1. time: plain passes (f), passes that fetch every planned tensor (o), graphquant's min-max and its whole sketch,
   onnxruntime's three calibration methods, and NNCF's.
2. memory: the peak above the plain passes, at 100 and 1,000 samples.
3. worth: SQNR of the outputs of the quantized model against the float one, on samples that calibration did not see.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from calibration_contestants import CONTESTANTS, METHODS
from calibration_models import models, prepared
from calibration_worth import worth

ROOT = Path(__file__).resolve().parents[1]
OURS = ("graphquant minmax", "graphquant sketch")


class Runs:
    """Measurements of contestants with one model and its data."""

    def __init__(self, model: Path, nncf: str | None) -> None:
        """`nncf` is an interpreter that has NNCF."""
        self._model = model
        self._nncf = nncf
        self._found: dict[tuple[str, Path], list[dict[str, float]]] = {}

    def measure(self, kind: str, data: Path) -> None:
        """Runs a contestant once more."""
        python = self._nncf if kind == "NNCF" and self._nncf else sys.executable
        command = [python, str(ROOT / "benchmarks/calibration_contestants.py"), kind, str(self._model), str(data)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # ourselves
        if done.returncode:
            raise SystemExit(f"{kind} failed on {self._model.name}:\n{done.stderr[-2000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        self._found.setdefault((kind, data), []).append(found)
        print(f"  . {kind:24} {data.stem:8} {found['seconds']:7.2f} s {found['peak']:6.0f} MB", flush=True)

    def all(self, kind: str, data: Path, what: str) -> list[float]:
        """The "seconds" or the "peak" in MB of each run."""
        return [run[what] for run in self._found[kind, data]]

    def median(self, kind: str, data: Path, what: str) -> float:
        """Of all its runs."""
        return statistics.median(self.all(kind, data, what))

    def beyond(self, kind: str, data: Path, what: str, base: str) -> float:
        """The median over rounds of what it took beyond `base` in the same round."""
        pairs = zip(self.all(kind, data, what), self.all(base, data, what), strict=True)
        return statistics.median(one - other for one, other in pairs)


missed: list[str] = []
"""The bars that were not held."""


def verdict(what: str, found: float, bar: float) -> None:
    """Prints a figure beside the most that it may be."""
    if not found <= bar:
        missed.append(what)
    print(f"  {'holds ' if found <= bar else 'MISSED'} {what}: {found:.3f}, at most {bar:.3f}", flush=True)


def times(name: str, runs: Runs, data: Path, kinds: list[str], rounds: int) -> None:
    """The first table."""
    for _ in range(rounds):
        for kind in kinds:
            runs.measure(kind, data)
    f, o = (runs.median(kind, data, "seconds") for kind in "fo")
    title = f"{name}, {rounds} rounds"
    print(
        f"\n{title:34} {'seconds':>8} {'(min to max)':>16} {'of f':>6} {'of o':>6} {'beyond o':>9} {'peak above f':>13}"
    )
    for kind in kinds:
        seconds = runs.all(kind, data, "seconds")
        middle, span = statistics.median(seconds), f"({min(seconds):.2f} to {max(seconds):.2f})"
        beyond, peak = runs.beyond(kind, data, "seconds", "o"), runs.beyond(kind, data, "peak", "f")
        print(f"{kind:34} {middle:8.2f} {span:>16} {middle / f:6.2f} {middle / o:6.2f} {beyond:9.2f} {peak:10.0f} MB")
    minmax, sketch = (runs.median(kind, data, "seconds") for kind in OURS)
    verdict("min-max alone, of o", minmax / o, 1.5)
    verdict("the whole sketch, of o", sketch / o, 2.5)
    ours = runs.beyond("graphquant sketch", data, "seconds", "o")
    for method, bar in zip(METHODS, (1 / 3, 1 / 15, 1 / 15), strict=True):
        theirs = runs.beyond(f"onnxruntime {method}", data, "seconds", "o")
        verdict(f"the sketch's time beyond o, of onnxruntime {method}'s", ours / theirs, bar)
    if "NNCF" in kinds:
        verdict("the whole sketch, of NNCF's calibration", sketch / runs.median("NNCF", data, "seconds"), 1.0)


def memory(name: str, runs: Runs, small: Path, large: Path, rounds: int) -> None:
    """The second table."""
    for _ in range(rounds):
        for kind in ("f", *OURS):
            for data in (small, large):
                runs.measure(kind, data)
    runs.measure("onnxruntime Percentile", small)
    title = f"{name}, {rounds} rounds"
    print(f"\n{title:34} peak in MB: 100 samples, 1000; above the plain passes: 100, 1000")
    peer = runs.median("onnxruntime Percentile", small, "peak") - runs.median("f", small, "peak")
    above = {}
    for kind in OURS:
        peaks = [runs.median(kind, data, "peak") for data in (small, large)]
        above[kind] = [peak - runs.median("f", data, "peak") for peak, data in zip(peaks, (small, large), strict=True)]
        print(f"{kind:34} {' '.join(f'{figure:11.0f}' for figure in [*peaks, *above[kind]])}")
    print(f"{'onnxruntime Percentile':34} {peer + runs.median('f', small, 'peak'):11.0f} {'':11} {peer:11.0f}")
    for kind in OURS:
        verdict(f"{kind}, 1000 samples of 100", above[kind][1] / above[kind][0], 1.05)
        verdict(f"{kind}, of onnxruntime Percentile", max(above[kind]) / peer, 0.25)


def main() -> int:
    """Prints the tables; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared/models", help="the real models")
    parser.add_argument("--nncf", help="an interpreter that has NNCF")
    parser.add_argument("--quick", action="store_true", help="few samples, one round")
    parser.add_argument("--only", choices=["time", "memory", "worth"], help="one of the tables")
    options = parser.parse_args()
    if not options.nncf:
        print("Without --nncf, nothing is compared with NNCF.")
    if not options.models.is_dir():
        print(f"There is no folder {options.models}: the face detector and the keyword net are left out.")
    samples = 10 if options.quick else 100
    kinds = [kind for kind in CONTESTANTS if kind != "NNCF" or options.nncf]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        made = itertools.islice(models(options.models, folder, samples), 1 if options.only == "memory" else None)
        cases = [(name, prepared(model), *data) for name, model, *data in made]
        for name, model, data, _ in cases:
            if options.only in {None, "time"} and name != "keyword net":
                rounds = 1 if options.quick else 3 if name == "ResNet-50" else 5
                times(name, Runs(model, options.nncf), data, kinds, rounds)
        if options.only in {None, "memory"}:
            name, model, data, _ = cases[0]
            large = folder / "large.npz"
            np.savez(large, **{key: np.concatenate([value] * 10) for key, value in np.load(data).items()})
            memory(name, Runs(model, None), data, large, 1 if options.quick else 5)
        for name, model, data, held_out in cases:
            if options.only in {None, "worth"} and held_out is not None:
                found = worth(name, model, data, held_out, options.nncf, folder)
                best = max(figure for kind, figure in found.items() if not kind.startswith("graphquant"))
                verdict("dB by which the best of the others is above auto", best - found["graphquant auto"], 0.0)
    print(f"\n{len(missed)} bars missed." if missed else "\nEvery bar holds.")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
