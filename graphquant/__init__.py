"""A tool that rewrites trained TensorFlow and ONNX graphs into low precision, and shows what it did.

import graphquant as gq

model = gq.load("model.onnx")
result = gq.insert(model, data="calibration.npz")
result.save("model.quant.onnx")
"""

from __future__ import annotations

# Python itself handles Ctrl-C until `__main__.run` has started, with a traceback, so nothing is imported before. Type
# checkers take this name as true, wherever it comes from; `typing` takes 2 ms.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_NAMES_BY_MODULE = {
    "api.calibrate": ("calibrate", "merge_stats"),
    "api.compare": ("compare", "diff"),
    "api.convert": ("convert_to_tflite", "freeze", "to_tf"),
    "api.graph_editor": ("FixedPoint", "graph_editor", "insert_quant_op"),
    "api.insert": ("insert",),
    "api.inspect": ("check", "check_data", "explain"),
    "api.models": ("load", "save"),
    "api.plan": ("plan",),
    "api.result": ("Result",),
    "api.strip": ("strip",),
    "calibration.stats": ("Stats", "load_stats"),
    "errors": ("GraphQuantError",),
    "ir": ("Model", "TensorRef", "Use"),
    "quantize": ("Plan",),
}
_PUBLIC = {name: f"graphquant.{module}" for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604  # the keys are strings


def __dir__() -> list[str]:
    """Completion offers the public names."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first used, so that importing graphquant costs nothing."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    from inspect import isfunction

    from graphquant.utils.options import checks_types

    module = import_module(_PUBLIC[name])
    value = module if name == "graph_editor" else getattr(module, name)
    return checks_types(value) if isfunction(value) else value
