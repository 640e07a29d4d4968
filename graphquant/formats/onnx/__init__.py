"""ONNX models: load, save, run, profile, and upgrade to a newer opset.

onnx and onnxruntime are imported when a function that needs them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphquant.formats.onnx.conversions import bind_input_shapes, encode_skeleton, inline_functions, upgrade_opset
    from graphquant.formats.onnx.emitter import emit
    from graphquant.formats.onnx.file_writer import save
    from graphquant.formats.onnx.index import input_specs, read_metadata
    from graphquant.formats.onnx.reader import from_onnx, load, restore_original
    from graphquant.formats.onnx.runner import create_runner, optimize_model, prepare_timed_run, profile_ops
    from graphquant.formats.onnx.runtime import PRODUCT_TYPES, find_wrong_product, has_int8_cache, supports_fused_form
    from graphquant.formats.onnx.session import OptimizedModel, SessionError, require_loadable

DEFAULT_RULES = "onnxruntime"
DEFAULT_FAMILY = "onnx-qdq"

_NAMES_BY_MODULE = {
    "conversions": ("bind_input_shapes", "encode_skeleton", "inline_functions", "upgrade_opset"),
    "emitter": ("emit",),
    "file_writer": ("save",),
    "index": ("input_specs", "read_metadata"),
    "reader": ("from_onnx", "load", "restore_original"),
    "runner": ("create_runner", "optimize_model", "prepare_timed_run", "profile_ops"),
    "runtime": ("PRODUCT_TYPES", "find_wrong_product", "has_int8_cache", "supports_fused_form"),
    "session": ("OptimizedModel", "SessionError", "require_loadable"),
}
"""Public names by the module that defines them."""
_MODULES_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a function of the package's interface when it is first used."""
    if (module := _MODULES_BY_NAME.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
