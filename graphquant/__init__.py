"""A tool that rewrites trained TensorFlow and ONNX graphs into low precision, and shows what it did.

import graphquant as gq

model = gq.load("model.onnx")
result = gq.insert(model, data="calibration.npz")
result.save("model.quant.onnx")
"""

from importlib import import_module
from inspect import isfunction
from typing import Any

from graphquant.utils.options import checks_types

__version__ = "0.1.0"

_PUBLIC = {
    "load": "graphquant.api",
    "plan": "graphquant.api",
    "calibrate": "graphquant.api",
    "check": "graphquant.api",
    "check_data": "graphquant.api",
    "compare": "graphquant.api",
    "diff": "graphquant.api",
    "explain": "graphquant.api",
    "insert": "graphquant.api",
    "save": "graphquant.api",
    "strip": "graphquant.api",
    "to_tf": "graphquant.api",
    "freeze": "graphquant.api.convert",
    "convert_to_tflite": "graphquant.api.convert",
    "load_stats": "graphquant.calibration.stats",
    "merge_stats": "graphquant.api",
    "Result": "graphquant.api",
    "Stats": "graphquant.calibration.stats",
    "Model": "graphquant.ir",
    "TensorRef": "graphquant.ir",
    "Use": "graphquant.ir",
    "Plan": "graphquant.quantize",
    "GraphQuantError": "graphquant.errors",
    "graph_editor": "graphquant.api.graph_editor",
    "FixedPoint": "graphquant.api.graph_editor",
    "insert_quant_op": "graphquant.api.graph_editor",
}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604  # the keys are strings


def __dir__() -> list[str]:
    """Completion offers the public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that importing graphquant costs nothing."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_PUBLIC[name])
    value = module if module.__name__.endswith(f".{name}") else getattr(module, name)
    return checks_types(value) if isfunction(value) else value
