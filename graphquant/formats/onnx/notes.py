"""What an ONNX model says of where it came from: `metadata_props` of its nodes and of the model."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from graphquant.errors import ModelError
from graphquant.formats.onnx.nodes import ANCHOR_KEY, RULE_KEY
from graphquant.provenance import OPS, PREFIX, RECORD, make, restore, said_of_ops

if TYPE_CHECKING:
    from graphquant.ir import Model

IR_METADATA = 10
"""First IR version whose nodes have metadata_props."""

Noted = dict[str, dict[str, tuple[str, str]]]
"""Rule and anchor of ops, by graph and name."""


def annotate(message: Any, model: Model, *, record: bool = True) -> None:
    """Writes into `message`, which `model` was emitted as, what the model is to say of itself."""
    if model.provenance is None:
        return
    clear(message)
    said = dict(model.provenance)
    if message.ir_version < IR_METADATA and (ops := said_of_ops(model)):
        said[OPS] = ops
    if record and model.origin is not None:
        said[RECORD] = base64.b64encode(make(model.origin.source.message, message)).decode()
    for key in sorted(said):
        message.metadata_props.add(key=PREFIX + key, value=said[key])


def clear(message: Any) -> None:
    """Takes out what the model says of itself."""
    kept = [entry for entry in message.metadata_props if not entry.key.startswith(PREFIX)]
    copies = [type(entry)(key=entry.key, value=entry.value) for entry in kept]
    del message.metadata_props[:]
    message.metadata_props.extend(copies)


def said(message: Any) -> dict[str, str]:
    """What a model says of itself, by key."""
    entries = message.metadata_props
    return {entry.key.removeprefix(PREFIX): entry.value for entry in entries if entry.key.startswith(PREFIX)}


def restored(message: Any) -> tuple[Any, bool] | None:
    """What the record in a model gives back, and whether the model is as it was written; None if it has none.

    Raises:
        ModelError: The record is damaged, or weights were changed.
    """
    text = said(message).get(RECORD)
    if text is None:
        return None
    bare = ModelProto()
    bare.CopyFrom(message)
    clear(bare)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ModelError(f"The record in the model is no base64 ({error}). Start from the float model.") from error
    return restore(data, bare, ModelProto)


def noted_ops(message: Any) -> Noted:
    """Rule and anchor of the ops of a model whose nodes cannot say it; nothing where that is damaged."""
    try:
        found = json.loads(said(message).get(OPS, "{}"))
        return {
            graph: {op: (str(rule), str(anchor)) for op, (rule, anchor) in ops.items()} for graph, ops in found.items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def noted(node: Any) -> tuple[str, str]:
    """Rule and anchor of a node, "" where it says none."""
    found = {entry.key: entry.value for entry in node.metadata_props} if node.metadata_props else {}
    return found.get(RULE_KEY, ""), found.get(ANCHOR_KEY, "")
