"""One tool as a whole process: `python report_tools.py TOOL MODEL DATA OUT` quantizes with it as it is documented.

TOOL is a key of TOOLS. The process imports only this tool, so that its time and memory are those of the tool.
`python report_tools.py load MODEL` opens an ONNX model, because some results end the process that opens them.
Pre-processing of ONNX Runtime infers symbolic shapes if sympy is installed and supports the model. Arrays of the data
without axes have the same value in each sample; others are split. The TFLite file of a SavedModel has its default
signature.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Feed = dict[str, Any]


def read_samples(data: str, ranks: dict[str, int]) -> list[Feed]:
    """Split the arrays into samples. One without the batch axis of the model is a whole sample."""
    arrays = {name: array for name, array in np.load(data).items() if name in ranks}
    count = max(len(array) for array in arrays.values() if array.ndim)

    def sample(index: int) -> Feed:
        return {
            name: array if not array.ndim else array[index] if array.ndim > ranks[name] else array[index : index + 1]
            for name, array in arrays.items()
        }

    return [sample(index) for index in range(count)]


def onnx_samples(model: str, data: str) -> list[Feed]:
    """Read the samples of an ONNX model."""
    import onnx

    inputs = onnx.load(model, load_external_data=False).graph.input
    return read_samples(data, {info.name: len(info.type.tensor_type.shape.dim) for info in inputs})


def onnxruntime_static(method: str) -> Callable[[str, str, str], None]:
    """Return the function that pre-processes, and quantizes with a method and weights per channel."""

    def run(model: str, data: str, out: str) -> None:
        from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        class Reader(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
            def __init__(self) -> None:
                self._samples = iter(onnx_samples(model, data))

            def get_next(self) -> Feed | None:
                return next(self._samples, None)

        with tempfile.TemporaryDirectory() as folder:
            ready = Path(folder, "ready.onnx")
            with contextlib.redirect_stdout(sys.stderr):
                try:
                    quant_pre_process(model, ready)
                except Exception:  # noqa: BLE001  # of any kind: without sympy, or a shape that it cannot infer
                    quant_pre_process(model, ready, skip_symbolic_shape=True)
                quantize_static(ready, out, Reader(), per_channel=True, calibrate_method=CalibrationMethod[method])

    return run


def nncf(model: str, data: str, out: str) -> None:
    """Quantize with NNCF's defaults and all samples."""
    import nncf as package
    import onnx

    samples = onnx_samples(model, data)
    package.set_log_level("ERROR")
    onnx.save(package.quantize(onnx.load(model), package.Dataset(samples), subset_size=len(samples)), out)


def onnxsim(model: str, data: str, out: str) -> None:  # noqa: ARG001  # the signature of all tools
    """Simplify the float model."""
    import onnx
    import onnxsim as package

    simplified, valid = package.simplify(onnx.load(model))
    if not valid:
        sys.exit("onnxsim: the simplified model has other outputs")
    onnx.save(simplified, out)


def tflite_float(model: str, data: str, out: str) -> None:  # noqa: ARG001  # the signature of all tools
    """Convert a SavedModel without quantization."""
    import tensorflow as tf

    Path(out).write_bytes(tf.lite.TFLiteConverter.from_saved_model(model).convert())


def tflite_int8(model: str, data: str, out: str) -> None:
    """Convert a SavedModel, with a representative dataset and float inputs and outputs."""
    import tensorflow as tf
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    stored = SavedModel.FromString(Path(model, "saved_model.pb").read_bytes())
    inputs = stored.meta_graphs[0].signature_def["serving_default"].inputs
    samples = read_samples(data, {name: len(info.tensor_shape.dim) for name, info in inputs.items()})
    converter = tf.lite.TFLiteConverter.from_saved_model(model)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: (("serving_default", sample) for sample in samples)
    Path(out).write_bytes(converter.convert())


def ai_edge_quantizer(model: str, data: str, out: str) -> None:
    """Quantize a float TFLite file with the recipe of 8-bit weights and activations."""
    from ai_edge_litert.interpreter import Interpreter
    from ai_edge_quantizer import quantizer, recipe

    interpreter = Interpreter(model)
    (signature,) = interpreter.get_signature_list()
    inputs = interpreter.get_signature_runner(signature).get_input_details()
    samples = read_samples(data, {key: len(detail["shape"]) for key, detail in inputs.items()})
    process = quantizer.Quantizer(model, recipe.static_wi8_ai8())
    process.quantize(process.calibrate({signature: samples}), enable_progress_report=False).export_model(out)


TOOLS: dict[str, Callable[[str, str, str], None]] = {
    "onnxruntime MinMax": onnxruntime_static("MinMax"),
    "onnxruntime Percentile": onnxruntime_static("Percentile"),
    "onnxruntime Entropy": onnxruntime_static("Entropy"),
    "NNCF": nncf,
    "onnxsim": onnxsim,
    "TFLite float": tflite_float,
    "TFLite converter": tflite_int8,
    "ai-edge-quantizer": ai_edge_quantizer,
}
"""Functions that quantize a model with the samples of an .npz file, by tool."""


def load(model: str) -> None:
    """Open an ONNX model in ONNX Runtime."""
    import onnxruntime

    onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


if __name__ == "__main__":
    if sys.argv[1] == "load":
        load(sys.argv[2])
    else:
        TOOLS[sys.argv[1]](*sys.argv[2:])
