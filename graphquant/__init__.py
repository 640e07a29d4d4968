"""A tool that rewrites trained TensorFlow and ONNX graphs into low precision, and shows what it did.

import graphquant as gq

model = gq.load("model.onnx")
result = gq.insert(model, data="calibration.npz")
result.save("model.quant.onnx")
"""

from importlib import import_module
from typing import Any

from graphquant.drawn import draw_with

__version__ = "0.1.0"

_PUBLIC = {
    "load": "graphquant.pipeline",
    "plan": "graphquant.pipeline",
    "calibrate": "graphquant.pipeline",
    "check": "graphquant.pipeline",
    "check_data": "graphquant.pipeline",
    "compare": "graphquant.pipeline",
    "diff": "graphquant.pipeline",
    "insert": "graphquant.pipeline",
    "save": "graphquant.pipeline",
    "strip": "graphquant.pipeline",
    "to_tf": "graphquant.pipeline",
    "freeze": "graphquant.tflite",
    "convert": "graphquant.tflite",
    "load_stats": "graphquant.calibration",
    "merge_stats": "graphquant.pipeline",
    "Result": "graphquant.pipeline",
    "Stats": "graphquant.calibration",
    "Model": "graphquant.ir",
    "TensorRef": "graphquant.ir",
    "Use": "graphquant.ir",
    "Plan": "graphquant.plans",
    "GraphQuantError": "graphquant.errors",
    "graph_editor": "graphquant.graph_editor",
    "FixedPoint": "graphquant.graph_editor",
    "insert_quant_op": "graphquant.graph_editor",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604  # the keys are strings


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that importing graphquant costs nothing."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_PUBLIC[name])
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)


def _html(what: object) -> str:
    """What a notebook shows of it."""
    drawn: str = import_module("graphquant.view.notebook").html(what)
    return drawn


draw_with(_html)
