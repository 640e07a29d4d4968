"""A model with its functions put in place of their calls, as onnxruntime does before it optimizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnx import NodeProto, inliner

from graphquant.formats.onnx.calls import MARK
from graphquant.formats.onnx.infer import ERRORS
from graphquant.formats.onnx.read import index
from graphquant.formats.onnx.write import emit

if TYPE_CHECKING:
    from graphquant.ir import Model

Place = tuple[str, str]
"""Graph and op."""


def flattened(model: Model) -> tuple[Model, dict[Place, Place]]:
    """The model without functions, and for each of its ops that of `model` of which it is a copy.

    Where onnx cannot put a function in place, the calls of all remain.

    Raises:
        ModelError: The model cannot be emitted.
    """
    message = emit(model).message
    homes: list[Place] = []
    for graph in index(message, path=model.path).graphs.values():
        for op in graph.ops():
            if isinstance(op.source, NodeProto):
                op.source.doc_string = f"{MARK}{len(homes)}"
                homes.append((graph.name, op.name))
    try:
        flat = index(inliner.inline_local_functions(message), path=model.path)
    except ERRORS:
        return model, {}
    copies = {}
    for graph in flat.graphs.values():
        for op in graph.ops():
            if isinstance(op.source, NodeProto) and op.source.doc_string.startswith(MARK):
                copies[graph.name, op.name] = homes[int(op.source.doc_string.removeprefix(MARK))]
    return flat, copies
