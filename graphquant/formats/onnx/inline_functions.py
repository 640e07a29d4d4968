"""A model with its functions put in place of their calls, as onnxruntime does before it optimizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import NodeProto, inliner

from graphquant.formats.onnx.emitter import emit_message
from graphquant.formats.onnx.functions import NODE_MARK
from graphquant.formats.onnx.reader import model_from_message
from graphquant.formats.onnx.shape_inference import INFERENCE_ERRORS

if TYPE_CHECKING:
    from graphquant.ir import Model


OpKey = tuple[str, str]
"""Graph and op."""


def inline_model_functions(model: Model) -> tuple[Model, dict[OpKey, OpKey]]:
    """The model without functions, and for each of its ops that of `model` of which it is a copy.

    Where onnx cannot put a function in place, the calls of all remain.

    Raises:
        ModelError: The model cannot be emitted.
    """
    message = emit_message(model).message
    op_keys: list[OpKey] = []
    for graph in model_from_message(message, path=model.path).graphs.values():
        for op in graph.ops():
            if isinstance(op.source, NodeProto):
                op.source.doc_string = f"{NODE_MARK}{len(op_keys)}"
                op_keys.append((graph.name, op.name))
    try:
        inlined_model = model_from_message(inliner.inline_local_functions(message), path=model.path)
    except INFERENCE_ERRORS:
        return model, {}
    originals = {}
    for graph in inlined_model.graphs.values():
        for op in graph.ops():
            if isinstance(op.source, NodeProto) and op.source.doc_string.startswith(NODE_MARK):
                originals[graph.name, op.name] = op_keys[int(op.source.doc_string.removeprefix(NODE_MARK))]
    return inlined_model, originals
