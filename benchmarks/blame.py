"""Blame beside models of one quantized tensor each: rank correlation, runs for each tensor, time.

    python benchmarks/blame.py [MODEL=DATA ...]

Without arguments it takes the sample models; MODEL=DATA adds others, as `net.onnx=data.npz`. A model that is slow to
load takes minutes: the honest side makes a model and a session for each tensor, and runs all samples.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import graphquant as gq
from graphquant import formats
from graphquant.analysis.site_errors import match_sites
from graphquant.api.plan import prepare_for_plan
from graphquant.calibration.batch_independence import is_batch_independent
from graphquant.calibration.data import open_data
from graphquant.optimize.sensitivity import BATCH_SIZE, measure_sensitivity
from graphquant.quantize.rewrite import rewrite

MODELS = Path(__file__).resolve().parents[1] / "sample_models"
PAIRS = [
    f"{MODELS / name}={MODELS / data}_calib.npz"
    for name, data in (("digits_cnn.onnx", "digits_cnn"), ("digits_rnn.onnx", "digits_rnn"))
]


def ranks(values: Any) -> Any:
    """The place of each value."""
    return np.argsort(np.argsort(values)).astype(float)


def alone(result: gq.Result, feeds: list[Any]) -> dict[tuple[str, str], float]:
    """For each quantization the error of a model that has it alone, as a share of the worst output."""
    prepared = prepare_for_plan(result.source, result.plan)
    format_ = formats.format_module(prepared.format)
    runner = format_.create_runner(prepared)
    plain = [runner.run(feed) for feed in feeds]
    floats = [name for name, value in plain[0].items() if value.dtype.kind == "f"]
    found = {}
    for done in result.inserted:
        model, _ = rewrite(prepared, result.plan, {result.plan.sites.index(done.site): done.params})
        here = format_.create_runner(model)
        ran = [here.run(feed) for feed in feeds]
        shares = []
        for name in floats:
            power = sum(float((one[name].astype(np.float64) ** 2).sum()) for one in plain)
            off = [float(((a[name].astype(np.float64) - b[name]) ** 2).sum()) for a, b in zip(ran, plain, strict=True)]
            shares.append(sum(off) / power)
        found.update({(output.graph, output.op): max(shares) for output in done.outputs})
    return found


def measure(model: str, data: str) -> None:
    """One line of the table."""
    result = gq.insert(model, data=data, validate=False)
    runner = formats.format_module(result.source.format).create_runner(result.source)
    batches = open_data(data, runner.inputs)
    sites = match_sites(result.source, result.model)
    inputs = {one.name: one.name for one in runner.inputs}
    start = time.perf_counter()
    independent = is_batch_independent(runner, batches, BATCH_SIZE)
    found = measure_sensitivity(result.model, sites, batches, inputs=inputs, batch_independent=independent)
    middle = time.perf_counter()
    honest = alone(result, list(batches))
    end = time.perf_counter()
    places = [place for place in found.errors if place in honest]
    mine, theirs = ([of[place] for place in places] for of in (found.errors, honest))
    rank = float(np.corrcoef(ranks(mine), ranks(theirs))[0, 1])
    runs = found.runs / max(len(found.errors), 1)
    print(
        f"{Path(model).name:30} {len(places):4} tensors  rank correlation {rank:.3f}  {runs:4.1f} runs"
        f" each on {found.samples} samples  {middle - start:6.1f} s, one by one {end - middle:6.1f} s"
    )


if __name__ == "__main__":
    for pair in [*PAIRS, *sys.argv[1:]]:
        measure(*pair.rsplit("=", 1))
