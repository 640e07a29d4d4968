"""Time of `compare` relative to one forward pass of both models over the same samples, model by model.

Run: python benchmarks/comparing.py [--models DIR] [--repeat 5]
DIR has the models that tests use if they are there. A pass and a comparison take turns; of each the fastest counts, for
whatever else the machine does makes both slower. The comparison's time is that after its first block, for all samples:
reading both graphs, and starting and ending sessions, takes as long for ten samples as for ten thousand, and has
a column of its own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import graphquant as gq
from graphquant import formats
from graphquant.calibration.batch_independence import is_batch_independent, measure_footprint
from graphquant.calibration.calibrate import block_feeds
from graphquant.calibration.data import open_data

MODELS = {
    "face detector": ("ultraface/version-RFB-320.onnx", "ultraface/images.npz"),
    "voice detector": ("silero_vad_16k_op15.onnx", "silero_vad.npz"),
    "keyword spotting": ("kws/saved_model", "kws/eval.npz"),
}


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=Path(__file__).parents[2] / "shared" / "models")
    parser.add_argument("--repeat", type=int, default=5)
    asked = parser.parse_args()
    print("model             samples  float pass  int8 pass  compare  ratio   start")
    with tempfile.TemporaryDirectory() as folder:
        for name, (path, data) in MODELS.items():
            spec = fitting(asked.models / data, Path(folder))
            source = gq.load(asked.models / path)
            quantized = gq.load(gq.insert(source, data=spec, samples=10).save(Path(folder) / Path(path).name))
            print(f"{name:17}{line(source, quantized, spec, asked.repeat)}", flush=True)


def fitting(data: Path, folder: Path) -> str:
    """The data as the model takes it: the face detector's photographs are pixels."""
    if data.name != "images.npz":
        return str(data)
    pixels = np.load(data)["rgb"].astype(np.float32).transpose(0, 3, 1, 2)[:, None]
    np.savez(folder / "images.npz", input=(pixels - 127) / 128)
    return str(folder / "images.npz")


def line(source: gq.Model, quantized: gq.Model, data: str, repeat: int) -> str:
    """The figures of one model."""
    runners = [formats.format_module(model.format).create_runner(model) for model in (source, quantized)]
    batches = open_data(data, runners[0].inputs)
    footprint = measure_footprint(runners[0], batches)
    block = footprint.block_size
    batched = footprint.join_samples and is_batch_independent(runners[1], batches, block)
    feeds = [feed for feed, _ in block_feeds(batches, [(0, -(-batches.count // block))], block, join_samples=batched)]
    for runner in runners:
        passed(runner, feeds)  # sessions are started
    passes, compared = [], []
    for _ in range(repeat):
        passes.append([passed(runner, feeds) for runner in runners])
        compared.append(comparison(source, quantized, data))
    plain, quant = np.min(passes, 0)
    took, start = np.min(compared, 0)
    ratio = took / (plain + quant)
    return f"{batches.count:8}{plain:11.3f}s{quant:10.3f}s{took:8.3f}s{ratio:7.2f}{start:7.2f}s"


def passed(runner: Any, feeds: list[Any]) -> float:
    """Seconds of one pass over all feeds."""
    start = time.perf_counter()
    for feed in feeds:
        runner.run(feed)
    return time.perf_counter() - start


def comparison(source: gq.Model, quantized: gq.Model, data: str) -> tuple[float, float]:
    """Seconds that a comparison takes for all samples, and before the first."""
    marks: list[tuple[float, int]] = []
    start = time.perf_counter()
    found = gq.compare(source, quantized, data, progress=lambda _, done, __: marks.append((time.perf_counter(), done)))
    ended, (first, done) = time.perf_counter(), marks[0]
    of_all = (marks[-1][0] - first) * found.samples / (found.samples - done)
    return of_all, ended - start - of_all


if __name__ == "__main__":
    main()
