"""Tools that `peers.py` compares: `python peers_contestants.py TOOL MODEL DATA OUT` quantizes and prints its cost.

TOOL is graphquant, NNCF, or onnxruntime and a method. Imports come before the clock. "seconds" are those from the
float model's file to the quantized one's, "outside" those of them that were not spent in the passes over data: the
making of onnxruntime's calibrator and its collect_data, graphquant's `calibrate`, NNCF's collect_statistics. What makes
ranges of what was collected is outside: onnxruntime's compute_data, graphquant's search. "busy" is the processor's part
of "outside", of all threads, which says more where a machine has other work to do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from calibration_contestants import Reader, feeds, imported, nncf_quantize

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """Seconds spent in the functions it watches, on the wall and of the processor."""

    def __init__(self) -> None:
        """Nothing spent yet."""
        self.spent = np.zeros(2)

    @staticmethod
    def now() -> np.ndarray:
        """Seconds on the wall and of the processor, (2,)."""
        return np.array([time.perf_counter(), time.process_time()])

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time counted."""

        def run(*arguments: Any, **options: Any) -> Any:
            start = self.now()
            try:
                return function(*arguments, **options)
            finally:
                self.spent += self.now() - start

        return run


def graphquant(model: Path, data: Path, out: Path, clock: Clock) -> Callable[[], object]:
    """Its defaults, calibrated on all samples: the others have no check to keep some for."""
    from graphquant.calibration import calibrate

    calibrate.collect_stats = clock.watched(calibrate.collect_stats)
    import graphquant as gq

    imported(model, data)
    return lambda: gq.insert(model, data=str(data), validate=False).save(out, force=True)


def onnxruntime_static(model: Path, data: Path, out: Path, clock: Clock, method: str) -> Callable[[], object]:
    """Its preprocessing, then weights per channel and otherwise its defaults."""
    from onnxruntime.quantization import CalibrationMethod
    from onnxruntime.quantization.shape_inference import quant_pre_process

    quantize: Any = importlib.import_module("onnxruntime.quantization.quantize")  # a function hides it

    logging.disable(logging.WARNING)
    imported(model, data)
    skip = not _symbolic(model)

    def timed(*arguments: Any, **options: Any) -> Any:
        made = clock.watched(create)(*arguments, **options)
        made.collect_data = clock.watched(made.collect_data)
        return made

    create, quantize.create_calibrator = quantize.create_calibrator, timed
    samples = Reader(iter(list(feeds(model, data))))

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
            ready = Path(folder, "ready.onnx")
            quant_pre_process(str(model), str(ready), skip_symbolic_shape=skip)
            quantize.quantize_static(
                str(ready),
                str(out),
                samples,
                per_channel=True,
                calibrate_method=CalibrationMethod[method],
            )

    return run


def _symbolic(model: Path) -> bool:
    """Return True if ONNX Runtime's symbolic shape inference exists and supports the model."""
    if importlib.util.find_spec("sympy") is None:
        return False
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    with contextlib.redirect_stdout(io.StringIO()):
        try:
            SymbolicShapeInference.infer_shapes(onnx.load(model))
        except Exception:  # noqa: BLE001  # of any kind: KeyError and AssertionError were seen
            return False
    return True


def nncf(model: Path, data: Path, out: Path, clock: Clock) -> Callable[[], object]:
    """Its defaults."""
    from nncf.common.tensor_statistics.aggregator import StatisticsAggregator

    StatisticsAggregator.collect_statistics = clock.watched(StatisticsAggregator.collect_statistics)
    return lambda: onnx.save(nncf_quantize(model, data), out)


def measure(tool: str, model: Path, data: Path, out: Path) -> dict[str, float]:
    """Quantizes `model` with `tool`."""
    clock = Clock()
    name, _, method = tool.partition(" ")
    if name == "onnxruntime":
        run = onnxruntime_static(model, data, out, clock, method)
    else:
        run = {"graphquant": graphquant, "NNCF": nncf}[name](model, data, out, clock)
    start = clock.now()
    run()
    seconds = clock.now() - start
    outside, busy = (seconds - clock.spent).tolist()
    return {"seconds": float(seconds[0]), "outside": outside, "busy": busy}


if __name__ == "__main__":
    told = measure(sys.argv[1], *(Path(argument) for argument in sys.argv[2:5]))
    print(json.dumps(told), flush=True)
    import onnxruntime

    # Some models make onnxruntime abort the process that loads them, which is to be this one.
    onnxruntime.InferenceSession(sys.argv[4], providers=["CPUExecutionProvider"])
