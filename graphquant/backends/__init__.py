"""What each backend will run in low precision, and what is probably wrong with a quantized model.

`BACKENDS` is the table of backends; a new one is a module with its row here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from graphquant.backends.lint import CODES, lint
from graphquant.backends.onnxruntime import ONNXRUNTIME, ONNXRUNTIME_ARM
from graphquant.backends.openvino import OPENVINO
from graphquant.backends.qnn import QNN
from graphquant.backends.tensorrt import TENSORRT
from graphquant.backends.types import Backend, Broken, Finding, Report, Verdict
from graphquant.backends.vitis_ai import VITIS_AI
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import QUANTIZATION_KINDS

if TYPE_CHECKING:
    from graphquant.calibration import Stats
    from graphquant.ir import Model

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (ONNXRUNTIME, ONNXRUNTIME_ARM, TENSORRT, QNN, OPENVINO, VITIS_AI)
}


def check(model: Model, backend: str | None = None, stats: Stats | None = None) -> Report:
    """How the backend called `backend` will run each op of `model`, and what is probably wrong with the model.

    Args:
        model: The model.
        backend: A key of `BACKENDS`, or None.
        stats: What calibration saw of the model before it was quantized, if that is known.

    Raises:
        DataError: The statistics are of none of the tensors that are quantized.
        ModelError: A weight cannot be read.
        UsageError: There is no such backend, or it does not run models of this format.
    """
    chosen = None if backend is None else _backend(backend)
    if model.format == "tflite":
        raise UsageError(
            f"{model.path or 'The model'} is a TFLite model, whose scales are in its tensors. `graphquant inspect`"
            " shows them."
        )
    if chosen is not None and model.format != "onnx":
        raise UsageError(
            f"{model.path or 'The model'} is a {model.format} model, and {chosen.name} is foretold for ONNX models"
            " only. Leave --for out to check the quantization alone."
        )
    verdicts, findings = lint(model, chosen, partial(_verdicts, chosen), stats)
    return Report(
        path=str(model.path or ""),
        backend="" if chosen is None else chosen.name,
        pairs=sum(op.kind in QUANTIZATION_KINDS for name in model.live() for op in model.graphs[name].ops()),
        verdicts=verdicts,
        findings=findings,
    )


def _verdicts(backend: Backend | None, model: Model) -> tuple[Verdict, ...]:
    """What the backend makes of each op; nothing without one. It sees functions in place of their calls.

    An op of a function that stays float in one call of it is told to.
    """
    if backend is None:
        return ()
    if not any(name and graph.parent is None for name, graph in model.graphs.items()):
        return backend.predict(model)
    from graphquant.formats.onnx import flattened

    flat, homes = flattened(model)
    found: dict[tuple[str, str], Verdict] = {}
    for verdict in backend.predict(flat):
        home = homes.get((verdict.graph, verdict.op), (verdict.graph, verdict.op))
        if home not in found or (verdict.status == "float" and found[home].status != "float"):
            found[home] = replace(verdict, graph=home[0], op=home[1])
    places = ((name, op.name) for name in model.live() for op in model.graphs[name].ops())
    return tuple(found[place] for place in places if place in found)


def _backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise UsageError(
            f"There is no backend {name!r}. Known are {', '.join(BACKENDS)}.{did_you_mean(name, BACKENDS)}"
        )
    return BACKENDS[name]


__all__ = ["BACKENDS", "CODES", "Backend", "Broken", "Finding", "Report", "Verdict", "check", "lint"]
