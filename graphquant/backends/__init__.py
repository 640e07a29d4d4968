"""Backends: the predicted execution of each op in low precision, and lint findings about a quantized model.

`BACKENDS` lists the backends. A new backend is a table and a `Backend` in `tables.py`, plus its entry here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from graphquant.backends.findings import ONLY_WEIGHTS, Backend, CheckReport, RejectedModelError, Verdict
from graphquant.backends.lint import LINT_CODES, lint_model
from graphquant.backends.onnxruntime import ONNXRUNTIME, ONNXRUNTIME_ARM, load_in_onnxruntime
from graphquant.backends.tables import OPENVINO, QNN, TENSORRT, VITIS_AI
from graphquant.errors import UsageError, did_you_mean
from graphquant.ir import QUANTIZATION_KINDS, Model

if TYPE_CHECKING:
    from graphquant.calibration.stats import Stats

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (ONNXRUNTIME, ONNXRUNTIME_ARM, TENSORRT, QNN, OPENVINO, VITIS_AI)
}
"""All backends by name."""


def check_quantized_model(model: Model, backend: str | None = None, stats: Stats | None = None) -> CheckReport:
    """Predict the execution of each op of `model` by a backend, and report likely mistakes in the model.

    `stats` are those of the model before it was quantized, if available. Raises a DataError if the statistics contain
    none of the quantized tensors, a ModelError if a weight cannot be read, and a UsageError if the backend is unknown,
    or it does not run models of this format.
    """
    chosen_backend = None if backend is None else _find_backend(model, backend)
    if not model.traits.rewritable:
        raise UsageError(
            f"{model.path or 'The model'} is a TFLite model with scales in its tensors. `graphquant inspect`"
            " shows them."
        )
    verdicts, findings = lint_model(model, chosen_backend, partial(_judge, chosen_backend), stats)
    return CheckReport(
        path=str(model.path or ""),
        backend="" if chosen_backend is None else chosen_backend.name,
        quantization_ops=sum(op.kind in QUANTIZATION_KINDS for _, op in model.reachable_ops()),
        verdicts=verdicts,
        findings=findings,
    )


def judge_ops(model: Model, backend: str) -> tuple[Verdict, ...]:
    """Return how a backend runs each op: as the installed ONNX Runtime does, or as the table of the backend predicts.

    Raises a RejectedModelError if the backend cannot load the model, and a UsageError if the backend is unknown, or it
    does not run models of this format.
    """
    return _judge(_find_backend(model, backend), model)


def _judge(backend: Backend | None, model: Model) -> tuple[Verdict, ...]:
    """Return the verdicts of the backend; none without a backend."""
    verdicts = () if backend is None else _judge_inlined(backend, model)
    # In a model with float activations, advice to quantize the tensors around an op would be wrong.
    if {op.kind for _, op in model.reachable_ops()} & QUANTIZATION_KINDS == {"dequantize"}:
        return tuple(replace(each, broken_rule=each.broken_rule and ONLY_WEIGHTS) for each in verdicts)
    return verdicts


def _judge_inlined(backend: Backend, model: Model) -> tuple[Verdict, ...]:
    """Return the verdicts with functions inlined. An op of a function is "float" if it is so in at least one call."""
    if not any(name and graph.parent is None for name, graph in model.graphs.items()):
        return backend.judge(model)
    from graphquant.formats.onnx import inline_functions

    flat, origins = inline_functions(model)
    by_op: dict[tuple[str, str], Verdict] = {}
    for verdict in backend.judge(flat):
        origin = origins.get((verdict.graph, verdict.op), (verdict.graph, verdict.op))
        if origin not in by_op or (verdict.status == "float" and by_op[origin].status != "float"):
            by_op[origin] = replace(verdict, graph=origin[0], op=origin[1])
    op_keys = ((graph.name, op.name) for graph, op in model.reachable_ops())
    return tuple(by_op[op_key] for op_key in op_keys if op_key in by_op)


def _find_backend(model: Model, name: str) -> Backend:
    if name not in BACKENDS:
        raise UsageError(
            f"The backend {name!r} is unknown. Use one of {', '.join(BACKENDS)}.{did_you_mean(name, BACKENDS)}"
        )
    if model.traits.rewritable and not model.traits.judgeable:
        raise UsageError(
            f"{model.path or 'The model'} is a {model.format} model, but {name} is predicted for ONNX models only."
            " Remove --for to check only the quantization."
        )
    return BACKENDS[name]
