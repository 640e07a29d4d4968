"""A script of a few lines that quantizes as onnxruntime documents it: `python peers_static.py MODEL DATA OUT`.

`peers.py` measures it as a whole process beside `graphquant insert`. Pre-processing infers symbolic shapes if sympy is
installed and can. Arrays of the data without axes have the same value in each sample; others are split.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process


class Reader(CalibrationDataReader):
    """The samples of an .npz file, one at a time."""

    def __init__(self, data: str, ranks: dict[str, int]) -> None:
        """Split the arrays into samples. One without the batch axis of the model is a whole sample."""
        arrays = dict(np.load(data))
        count = max(len(array) for array in arrays.values() if array.ndim)

        def sample(index: int) -> dict[str, Any]:
            return {
                name: array
                if not array.ndim
                else array[index]
                if array.ndim > ranks[name]
                else array[index : index + 1]
                for name, array in arrays.items()
            }

        self._samples = iter([sample(index) for index in range(count)])

    def get_next(self) -> dict[str, Any] | None:
        """Return the next sample, None at the end."""
        return next(self._samples, None)


def main(model: str, data: str, out: str) -> None:
    """Pre-process and quantize with min-max and weights per channel."""
    inputs = onnx.load(model, load_external_data=False).graph.input
    ranks = {info.name: len(info.type.tensor_type.shape.dim) for info in inputs}
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready.onnx")
        with contextlib.redirect_stdout(sys.stderr):
            try:
                quant_pre_process(model, ready)
            except Exception:  # noqa: BLE001  # of any kind: without sympy, or a shape that it cannot infer
                quant_pre_process(model, ready, skip_symbolic_shape=True)
            reader = Reader(data, ranks)
            quantize_static(ready, out, reader, per_channel=True, calibrate_method=CalibrationMethod.MinMax)


if __name__ == "__main__":
    main(*sys.argv[1:])
