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
    "load": "graphquant.api.models",
    "plan": "graphquant.api.plan",
    "calibrate": "graphquant.api.calibrate",
    "check": "graphquant.api.inspect",
    "check_data": "graphquant.api.inspect",
    "compare": "graphquant.api.compare",
    "diff": "graphquant.api.compare",
    "explain": "graphquant.api.inspect",
    "insert": "graphquant.api.insert",
    "save": "graphquant.api.models",
    "strip": "graphquant.api.strip",
    "to_tf": "graphquant.api.convert",
    "freeze": "graphquant.api.convert",
    "convert_to_tflite": "graphquant.api.convert",
    "load_stats": "graphquant.calibration.stats",
    "merge_stats": "graphquant.api.calibrate",
    "Result": "graphquant.api.result",
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
    value = module if name == "graph_editor" else getattr(module, name)
    return checks_types(value) if isfunction(value) else value
