"""The message of a loaded model, and the provenance in its metadata: `metadata_props` of the model and of its nodes."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from graphquant.errors import ModelError
from graphquant.formats.onnx.tensors import ANCHOR_KEY, RULE_KEY
from graphquant.quantize import METADATA_PREFIX, OPS_KEY, RECORD_KEY, make_record, op_provenance_json, restore_source

if TYPE_CHECKING:
    from pathlib import Path

    from graphquant.ir import Model, Op, TensorRef


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxGraphSource:
    """One graph as it was loaded.

    Attributes:
        proto: The GraphProto, or the FunctionProto of a function.
        node_names: Names of the ops in the order of `proto.node`.
        loaded_ops: The ops as they were loaded, by name.
        values: Tensor of each value name of this graph.
        dimension_names: Symbolic dimension names by axis for values that have some, "" for an axis without.
    """

    proto: Any
    node_names: list[str]
    loaded_ops: dict[str, Op]
    values: dict[str, TensorRef]
    dimension_names: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSource:
    """The ModelProto of a loaded model, which is never changed. Emission compares the model with it.

    Attributes:
        message: The ModelProto.
        graphs: Source of each graph, by its name in the model.
        folder: Folder of its external data; None for a model built in memory.
    """

    message: Any
    graphs: dict[str, OnnxGraphSource]
    folder: Path | None


def output_value_name(op: Op) -> str:
    """Return the value name in the source of an op of kind "output"."""
    name: str = op.source if isinstance(op.source, str) else op.source.name
    return name


METADATA_IR_VERSION = 10
"""First IR version whose nodes have metadata_props."""

RuleNotes = dict[str, dict[str, tuple[str, str]]]
"""Rule and anchor of ops, by graph and name."""


def read_metadata(model: Model) -> dict[str, str]:
    """Return the provenance entries in the model's metadata."""
    return metadata_entries(model.source.message)


def write_onnx_metadata(message: Any, model: Model, *, record: bool = True) -> None:
    """Write the provenance of `model` to `message`, which was emitted from it."""
    if model.provenance is None:
        return
    clear_metadata(message)
    entries = dict(model.provenance)
    if message.ir_version < METADATA_IR_VERSION and (ops := op_provenance_json(model)):
        entries[OPS_KEY] = ops
    if record and model.original_model is not None:
        entries[RECORD_KEY] = base64.b64encode(make_record(model.original_model.source.message, message)).decode()
    for key in sorted(entries):
        message.metadata_props.add(key=METADATA_PREFIX + key, value=entries[key])


def clear_metadata(message: Any) -> None:
    """Remove graphquant's entries from a model's metadata."""
    remaining = [entry for entry in message.metadata_props if not entry.key.startswith(METADATA_PREFIX)]
    # The entries are part of the list that is cleared, so they must be copied first.
    copies = [type(entry)(key=entry.key, value=entry.value) for entry in remaining]
    del message.metadata_props[:]
    message.metadata_props.extend(copies)


def metadata_entries(message: Any) -> dict[str, str]:
    """Return graphquant's entries in a model's metadata by key."""
    entries = message.metadata_props
    prefix = METADATA_PREFIX
    return {entry.key.removeprefix(prefix): entry.value for entry in entries if entry.key.startswith(prefix)}


def restore_source_message(message: Any) -> tuple[Any, bool] | None:
    """Restore the message that a model's provenance record describes, None if it has no record.

    The second value is True if the model is unchanged since it was written.

    Raises:
        ModelError: The record is damaged, or weights were changed.
    """
    text = metadata_entries(message).get(RECORD_KEY)
    if text is None:
        return None
    clean_message = ModelProto()
    clean_message.CopyFrom(message)
    clear_metadata(clean_message)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ModelError(
            f"The record in the model is not valid base64 ({error}). Start from the float model."
        ) from error
    return restore_source(data, clean_message, ModelProto)


def read_rule_notes(message: Any) -> RuleNotes:
    """Return rule and anchor of ops from the model's metadata, for nodes without metadata; {} if damaged."""
    try:
        notes = json.loads(metadata_entries(message).get(OPS_KEY, "{}"))
        return {g: {op: (str(rule), str(anchor)) for op, (rule, anchor) in ops.items()} for g, ops in notes.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def node_rule_note(node: Any) -> tuple[str, str]:
    """Return rule and anchor from a node's metadata, "" for each that is missing."""
    properties = {entry.key: entry.value for entry in node.metadata_props} if node.metadata_props else {}
    return properties.get(RULE_KEY, ""), properties.get(ANCHOR_KEY, "")
