"""Tools that `calibration.py` compares: `python calibration_contestants.py KIND MODEL DATA` runs one, with its cost.

Imports, and reading and planning the model, come before the clock starts; sessions, data and everything else after.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Feed = dict[str, np.ndarray]

METHODS = ("MinMax", "Percentile", "Entropy")
THREADS = 2


def feeds(model: Path, data: Path) -> Iterator[Feed]:
    """The samples of `data`, read as calibration reads them."""
    import graphquant as gq
    from graphquant import formats
    from graphquant.calibration.data import open_data

    runner = formats.format_module("onnx").create_runner(gq.load(model))
    yield from open_data(str(data), runner.inputs)


def imported(model: Path, data: Path) -> None:
    """Imports what reading a model and data imports, which is not to be timed."""
    next(feeds(model, data))


def session(model: Path | bytes) -> Any:
    """A session of onnxruntime's defaults on two threads, as graphquant and others run models."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = THREADS, 1
    made = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(made, options, providers=["CPUExecutionProvider"])


def planned(model: Path) -> list[str]:
    """The values of a prepared model that calibration looks at."""
    import graphquant as gq
    from graphquant.calibration.targets import sites_needing_data

    loaded = gq.load(model)
    sites = sites_needing_data(gq.plan(loaded))
    return list(dict.fromkeys(loaded.output(site.tensor).name or str(site.tensor) for site in sites))


def plain(model: Path, data: Path) -> Callable[[], object]:
    """(f): the forward passes alone."""
    imported(model, data)

    def run() -> None:
        started = session(model)
        for feed in feeds(model, data):
            started.run(None, feed)

    return run


def fetching(model: Path, data: Path) -> Callable[[], object]:
    """(o): the forward passes, every planned tensor fetched."""
    imported(model, data)
    message = onnx.load(model)
    inputs = {info.name for info in message.graph.input}
    have = {info.name for info in message.graph.output}
    wanted = [name for name in planned(model) if name not in inputs]
    message.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted if name not in have)
    made = message.SerializeToString()

    def run() -> None:
        started = session(made)
        for feed in feeds(model, data):
            started.run(wanted, feed)

    return run


def graphquant(model: Path, data: Path, method: str) -> Callable[[], object]:
    """Calibration by graphquant: min-max alone, or the whole sketch."""
    import graphquant as gq
    from graphquant.calibration.targets import with_observer

    imported(model, data)
    loaded = gq.load(model)
    plan = with_observer(gq.plan(loaded), method)
    return lambda: gq.calibrate(loaded, plan, str(data), full=method != "minmax")


def onnxruntime_static(model: Path, data: Path, method: str) -> Callable[[], object]:
    """Calibration by onnxruntime, without the insertion that follows."""
    from onnxruntime.quantization import CalibrationMethod, create_calibrator

    imported(model, data)

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
            calibrator = create_calibrator(
                str(model),
                augmented_model_path=str(Path(folder, "augmented.onnx")),
                calibrate_method=CalibrationMethod[method],
            )
            calibrator.collect_data(Reader(feeds(model, data)))
            calibrator.compute_data()

    return run


class Reader:
    """Samples as onnxruntime wants them."""

    def __init__(self, samples: Iterator[Feed]) -> None:
        self.samples = samples

    def get_next(self) -> Feed | None:
        """The next sample."""
        return next(self.samples, None)


def nncf_statistics(model: Path, data: Path) -> Callable[[], object]:
    """Calibration by NNCF: its statistics collection, which it runs within `nncf.quantize`."""
    from nncf.common.tensor_statistics.aggregator import StatisticsAggregator

    spent = [0.0]
    original = StatisticsAggregator.collect_statistics

    def timed(self: Any, *arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(self, *arguments)
        finally:
            spent[0] += time.perf_counter() - start

    StatisticsAggregator.collect_statistics = timed

    def run() -> float:
        nncf_quantize(model, data)
        return spent[0]

    return run


def nncf_quantize(model: Path, data: Path) -> Any:
    """NNCF's quantized model, its defaults."""
    import nncf

    message = onnx.load(model)
    ranks = {info.name: len(info.type.tensor_type.shape.dim) for info in message.graph.input}
    with np.load(data) as arrays:
        samples = {name: arrays[name] for name in arrays.files}
    count = max(len(array) for array in samples.values() if array.ndim)

    def one(name: str, index: int) -> np.ndarray:
        array = samples[name]
        if not array.ndim:
            return array
        return array[index] if array.ndim > ranks[name] else array[index : index + 1]

    made = [{name: one(name, index) for name in samples} for index in range(count)]
    nncf.set_log_level("ERROR")
    return nncf.quantize(message, nncf.Dataset(made), subset_size=count)


CONTESTANTS: dict[str, Callable[[Path, Path], Callable[[], object]]] = {
    "f": plain,
    "o": fetching,
    "graphquant minmax": lambda model, data: graphquant(model, data, "minmax"),
    "graphquant sketch": lambda model, data: graphquant(model, data, "auto"),
    **{
        f"onnxruntime {method}": lambda model, data, method=method: onnxruntime_static(model, data, method)  # type: ignore[misc]
        for method in METHODS
    },
    "NNCF": nncf_statistics,
}


def measure(kind: str, model: Path, data: Path) -> dict[str, float]:
    """Seconds of one run, and the process's peak memory in MB."""
    run = CONTESTANTS[kind](model, data)
    gc.collect()
    start = time.perf_counter()
    told = run()
    seconds = told if isinstance(told, float) else time.perf_counter() - start
    return {"seconds": seconds, "peak": peak()}


def peak() -> float:
    """The most memory that this process had, in MB; what the system says of it may count its parent's, if larger."""
    status = Path("/proc/self/status")
    if status.is_file():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text("ascii"))[1]) / 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))))
