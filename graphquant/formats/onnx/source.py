"""What a loaded ONNX model remembers of its message, so that emit can tell what changed."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from onnx import ModelProto, NodeProto

from graphquant.errors import ModelError
from graphquant.formats.onnx.tensors import ANCHOR_KEY, RULE_KEY
from graphquant.ir import Graph, Model, Op, TensorRef, Use
from graphquant.quantize import METADATA_PREFIX, OPS_KEY, RECORD_KEY, make_record, op_provenance_json, restore_source

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxGraphSource:
    """One graph as it was read.

    Attributes:
        proto: The GraphProto, or the FunctionProto of a function.
        node_names: Names of the ops in the order of `proto.node`.
        loaded_ops: The ops as they were read, by name.
        values: What each value name of this graph stands for.
        dimension_names: Of each value with sizes that are no numbers, their names by axis, "" where there is none.
    """

    proto: Any
    node_names: list[str]
    loaded_ops: dict[str, Op]
    values: dict[str, TensorRef]
    dimension_names: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSource:
    """A ModelProto, which is never changed.

    Attributes:
        message: The ModelProto.
        graphs: What each graph was, by its name in the model.
        folder: Where its external data is; None for a model built in memory.
    """

    message: Any
    graphs: dict[str, OnnxGraphSource]
    folder: Path | None


# Graph outputs keep their names: which values are called otherwise once an output reads another tensor.


@dataclass(slots=True, kw_only=True)
class OutputRenames:
    """What one graph's changed outputs ask for.

    Attributes:
        renamed_tensors: New names of values.
        identity_copies: Identity nodes to add: output value to (node name, tensor read).
        output_names: New names for outputs of bodies and functions, by position; there the order counts, not the name.
    """

    renamed_tensors: dict[TensorRef, str] = field(default_factory=dict)
    identity_copies: dict[str, tuple[str, TensorRef]] = field(default_factory=dict)
    output_names: dict[int, str] = field(default_factory=dict)


def plan_output_names(model: Model, graph: Graph, source: OnnxGraphSource) -> OutputRenames:
    """The names with which the outputs of `graph` are called as in its source.

    1. The tensor that an output reads now takes the output's name.
    2. One that cannot (an input, an initializer, one of an outer graph, another output's) is copied by an Identity.
    3. An output of a body whose name belongs to an input or an outer value takes the name of what it reads.
    4. Whatever had the output's name before gets a new one.

    Raises:
        ModelError: The main graph's output is one of its inputs, so both would need the same name.
    """
    renames = OutputRenames()
    free_name = _FreeNames(graph)
    read_tensors = {name: graph.slots(name)[0] for name in graph.outputs}
    edited = [name for name in graph.outputs if Use(graph.name, name, 0) in graph.rerouted_uses]
    changed = {name: None for name in edited if not _reads_loaded_tensor(graph, source, name)}
    claimed = {tensor for name, tensor in read_tensors.items() if name not in changed}
    freed_names: list[str] = []
    for name in changed:
        tensor, value = read_tensors[name], output_value_name(graph.op(name))
        if tensor is None:
            raise ModelError(f"The graph output {value!r} reads nothing. Reroute it to a tensor.")
        can_rename = tensor.graph == graph.name and tensor not in claimed and _is_node_output(model.op(tensor))
        claimed.add(tensor)
        new_name = value
        if value not in source.values or source.loaded_ops[source.values[value].op].kind == "input":
            # Case 3.
            if not graph.name:
                raise ModelError(
                    f"The graph output {value!r} is the graph input of that name, so nothing fits between. "
                    "Leave it out with --exclude."
                )
            new_name = model.output(tensor).name if can_rename else free_name(f"{value}/output")
            renames.output_names[graph.outputs.index(name)] = new_name
        else:
            freed_names.append(value)
        if not can_rename:
            renames.identity_copies[new_name] = (free_name(f"{value}/identity"), tensor)  # Case 2.
        elif new_name == value:
            renames.renamed_tensors[tensor] = value  # Case 1.
    for value in freed_names:
        previous = source.values[value]
        if (
            previous not in renames.renamed_tensors
            and previous.op in graph
            and graph.op(previous.op).source is not None
        ):
            renames.renamed_tensors[previous] = free_name(f"{value}/float")  # Case 4.
    return renames


def output_value_name(op: Op) -> str:
    """The value name in the source of an op of kind "output"."""
    name: str = op.source if isinstance(op.source, str) else op.source.name
    return name


class _FreeNames:
    """Gives names that are free in a graph, each once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._issued: set[str] = set()

    def __call__(self, base: str) -> str:
        name, suffix = self._graph.unique_name(base), 1
        while name in self._issued:
            name, suffix = self._graph.unique_name(f"{base}_{suffix}"), suffix + 1
        self._issued.add(name)
        return name


def _reads_loaded_tensor(graph: Graph, source: OnnxGraphSource, name: str) -> bool:
    """Whether output `name` reads what it read at load."""
    tensor = graph.slots(name)[0]
    loaded_tensor = source.values.get(output_value_name(graph.op(name)))
    return tensor is not None and tensor == loaded_tensor and graph.op(tensor.op) is source.loaded_ops[tensor.op]


def _is_node_output(op: Op) -> bool:
    return isinstance(op.source, NodeProto) or (op.source is None and op.kind != "constant")


# What an ONNX model says of where it came from: `metadata_props` of its nodes and of the model.

METADATA_IR_VERSION = 10
"""First IR version whose nodes have metadata_props."""

RuleNotes = dict[str, dict[str, tuple[str, str]]]
"""Rule and anchor of ops, by graph and name."""


def write_onnx_metadata(message: Any, model: Model, *, record: bool = True) -> None:
    """Writes into `message`, which `model` was emitted as, what the model is to say of itself."""
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
    """Takes out what the model says of itself."""
    remaining = [entry for entry in message.metadata_props if not entry.key.startswith(METADATA_PREFIX)]
    copies = [type(entry)(key=entry.key, value=entry.value) for entry in remaining]
    del message.metadata_props[:]
    message.metadata_props.extend(copies)


def metadata_entries(message: Any) -> dict[str, str]:
    """What a model says of itself, by key."""
    entries = message.metadata_props
    return {
        entry.key.removeprefix(METADATA_PREFIX): entry.value
        for entry in entries
        if entry.key.startswith(METADATA_PREFIX)
    }


def restore_source_message(message: Any) -> tuple[Any, bool] | None:
    """What the record in a model gives back, and whether the model is as it was written; None if it has none.

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
        raise ModelError(f"The record in the model is no base64 ({error}). Start from the float model.") from error
    return restore_source(data, clean_message, ModelProto)


def read_rule_notes(message: Any) -> RuleNotes:
    """Rule and anchor of the ops of a model whose nodes cannot say it; nothing where that is damaged."""
    try:
        notes_by_graph = json.loads(metadata_entries(message).get(OPS_KEY, "{}"))
        return {
            graph: {op: (str(rule), str(anchor)) for op, (rule, anchor) in ops.items()}
            for graph, ops in notes_by_graph.items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def node_rule_note(node: Any) -> tuple[str, str]:
    """Rule and anchor of a node, "" where it says none."""
    properties = {entry.key: entry.value for entry in node.metadata_props} if node.metadata_props else {}
    return properties.get(RULE_KEY, ""), properties.get(ANCHOR_KEY, "")
