"""Save a model atomically, as a file or as a SavedModel folder.

Variables of learned ranges are added to models that have variables: to checkpoint, object graph, collections and saver.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from graphquant.errors import ModelError, UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.checkpoint import extend_checkpoint
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.learned_ranges import (
    INITIALIZER_OP,
    LearnedRange,
    add_initializers,
    add_to_object_graph,
    add_variable_op,
    by_shared_name,
    capture_in_functions,
    learned_ranges,
    unique_node_name,
)
from graphquant.formats.tensorflow.object_graph import VARIABLE_VALUE
from graphquant.formats.tensorflow.source import SAVED_MODEL_FILES, TensorFlowSource, write_metadata
from graphquant.formats.tensorflow.values import decode_tensor, set_constant, type_number
from graphquant.utils.atomic_files import atomic_file, make_staging_folder, replace_folder

if TYPE_CHECKING:
    from graphquant.ir import Model
    from graphquant.numerics import Array
    from graphquant.utils import Progress

_VARIABLE_COLLECTIONS: Final = ("variables", "trainable_variables")

_FINGERPRINT_FILE: Final = "fingerprint.pb"
"""Holds hashes of saved_model.pb. It is optional for readers, and a stale one would be wrong."""


class CheckpointAdditions(NamedTuple):
    """Initial values by their keys, and the object graph that replaces that of the checkpoint (None in TF1)."""

    values: Mapping[str, Array]
    object_graph: Any | None


def _add_learned_ranges(
    source: TensorFlowSource, message: Any, learned: Sequence[LearnedRange]
) -> CheckpointAdditions | None:
    """Add the variables of learned ranges to `message` and return their checkpoint additions; None if there are none.

    In a TF2 SavedModel they become objects. In a TF1 SavedModel or a MetaGraph they become members of the variable
    collections. In both, the saver restores them.
    """
    meta = source.meta_graph(message)
    if meta is None or not learned:
        return None
    captures = capture_in_functions(meta.graph_def, learned)
    by_shared = by_shared_name(learned)
    if len(meta.object_graph_def.nodes):
        label = add_to_object_graph(meta.object_graph_def, learned, captures)
        keys = {name: f"{label}/{index}/.ATTRIBUTES/{VARIABLE_VALUE}" for index, name in enumerate(by_shared)}
        object_graph = _extend_object_graph(source, label, keys)
    else:
        keys, object_graph = dict(zip(by_shared, by_shared, strict=True)), None
    handles = _handle_nodes(meta.graph_def, by_shared)
    values = {keys[name]: variable.value for name, variable in by_shared.items()}
    if object_graph is None:
        _register_in_collections(meta, by_shared, handles)
    if meta.saver_def.restore_op_name:
        types = {name: type_number(variable.value.dtype.name) for name, variable in by_shared.items()}
        _extend_saver(meta, {keys[name]: (handle, types[name]) for name, handle in handles.items()})
    return CheckpointAdditions(values, object_graph)


def _handle_nodes(
    graph_def: Any, by_shared: Mapping[str, LearnedRange], candidates: Container[str] | None = None
) -> dict[str, str]:
    """Return the nodes of the main graph that make the variables, by shared name, limited to `candidates` if given."""
    handles: dict[str, str] = {}
    for node in graph_def.node:
        if node.op == "VarHandleOp" and "shared_name" in node.attr:
            shared_name = node.attr["shared_name"].s.decode(errors="replace")
            if shared_name in by_shared and (candidates is None or node.name in candidates):
                handles.setdefault(shared_name, node.name)
    return handles


def _extend_object_graph(source: TensorFlowSource, label: str, keys: Mapping[str, str]) -> Any:
    """Return the checkpoint's object graph, extended by the list of the variables."""
    checkpoint = source.checkpoint().checkpoint
    object_graph = checkpoint.object_graph() if checkpoint is not None else None
    if object_graph is None or not object_graph.nodes:
        object_graph = proto.TrackableObjectGraph()
        object_graph.nodes.add()
    object_graph.nodes[0].children.add(node_id=len(object_graph.nodes), local_name=label)
    list_node = object_graph.nodes.add()
    for position, (shared_name, key) in enumerate(keys.items()):
        list_node.children.add(node_id=len(object_graph.nodes), local_name=str(position))
        object_graph.nodes.add().attributes.add(name=VARIABLE_VALUE, full_name=shared_name, checkpoint_key=key)
    return object_graph


def _register_in_collections(meta: Any, by_shared: Mapping[str, LearnedRange], handles: Mapping[str, str]) -> None:
    """Register the variables in TF1's collections, each with the op that assigns its initial value."""
    nodes = {node.name: node for node in meta.graph_def.node}
    add_initializers(meta.graph_def, [by_shared[shared_name] for shared_name in handles], handles)
    add_to_collections(meta, by_shared.values())
    if not meta.saver_def.restore_op_name:
        names = meta.collection_def["saved_model_main_op"].node_list.value
        if names and names[0] in nodes:
            nodes[names[0]].input.append(f"^{INITIALIZER_OP}")
        else:
            names.append(INITIALIZER_OP)


def add_to_collections(meta: Any, variables: Iterable[LearnedRange]) -> None:
    """Add the variables to a MetaGraphDef's collections, and add the ops that read them."""
    by_shared = by_shared_name(variables)
    used_names: set[str] = set()
    reads: dict[str, str] = {}
    assigns: dict[str, tuple[str, str]] = {}
    for node in meta.graph_def.node:
        used_names.add(node.name)
        if node.op == "ReadVariableOp" and node.input:
            reads.setdefault(node.input[0], node.name)
        elif node.op == "AssignVariableOp" and len(node.input) > 1:
            assigns.setdefault(node.input[0], (node.name, node.input[1]))
    for shared_name, handle in _handle_nodes(meta.graph_def, by_shared, assigns).items():
        if handle not in reads:
            name, dtype = f"{handle}/Read/ReadVariableOp", type_number(by_shared[shared_name].value.dtype.name)
            reads[handle] = add_variable_op(meta.graph_def, used_names, name, "ReadVariableOp", [handle], dtype)
        definition = proto.VariableDef(
            variable_name=f"{handle}:0",
            initial_value_name=f"{assigns[handle][1]}:0",
            initializer_name=assigns[handle][0],
            snapshot_name=f"{reads[handle]}:0",
            is_resource=True,
            trainable=by_shared[shared_name].trainable,
        )
        for collection in _VARIABLE_COLLECTIONS if by_shared[shared_name].trainable else _VARIABLE_COLLECTIONS[:1]:
            meta.collection_def[collection].bytes_list.value.append(proto.to_binary(definition))


def update_control_flow_contexts(meta: Any, source_graph_def: Any) -> None:
    """Make the loop and branch contexts of TensorFlow 1 those of the edited graph.

    Gradients are built from these collections: an op of a loop that its context does not list counts as one outside of
    it. `source_graph_def` is the graph before the edits. Its nodes may be messages of another pool.
    """
    contexts = [
        (serialized, index, proto.parse_binary(data, kind(), source=f"The collection {key}"))
        for key, kind in (("while_context", proto.WhileContextDef), ("cond_context", proto.CondContextDef))
        if key in meta.collection_def
        for serialized in [meta.collection_def[key].bytes_list.value]
        for index, data in enumerate(serialized)
    ]
    if not contexts:
        return
    old_nodes = {node.name: node for node in source_graph_def.node}
    nodes = {node.name: node for node in meta.graph_def.node}
    for serialized, index, context in contexts:
        for nested in _nested_contexts(context):
            _update_context_values(nested, nodes, old_nodes)
        serialized[index] = proto.to_binary(context)


def _nested_contexts(context: Any) -> Iterable[Any]:
    yield context
    for nested in context.nested_contexts:
        yield from _nested_contexts(getattr(nested, nested.WhichOneof("ctxt")))


def _update_context_values(context: Any, nodes: Mapping[str, Any], old_nodes: Mapping[str, Any]) -> None:
    """Add the new ops that read tensors of a context, and rename the outer tensors that it reads if they changed."""
    definition = context.values_def
    for outer, inner in list(definition.external_values.items()):
        node, old_node = nodes.get(proto.input_node(inner)), old_nodes.get(proto.input_node(inner))
        if node is None or old_node is None or not old_node.input or _tensor_name(old_node.input[0]) != outer:
            continue
        if (new_outer := _tensor_name(node.input[0])) != outer:
            definition.external_values[new_outer] = inner
            definition.values.append(new_outer)
    # The values of a context include the outer tensors that it reads, and its exits belong to the context around it.
    outside = {*definition.external_values, *getattr(context, "loop_exit_names", ())}
    values = {name for name in definition.values if proto.input_node(name) in nodes}
    members = values - outside
    member_ops = {proto.input_node(name) for name in members}
    pending = {name: node for name, node in nodes.items() if name not in old_nodes}

    def is_inside(text: str) -> bool:
        return proto.input_node(text) in member_ops if text.startswith("^") else _tensor_name(text) in members

    while inside := [name for name, node in pending.items() if any(map(is_inside, node.input))]:
        for name in inside:
            del pending[name]
        tensors = {_tensor_name(name) for name in inside}  # each op that edits add has one output
        values |= tensors
        members |= tensors
        member_ops |= {*inside}
    del definition.values[:]
    definition.values.extend(sorted(values))


def _tensor_name(text: str) -> str:
    return text if ":" in text else f"{text}:0"


def _extend_saver(meta: Any, variables: Mapping[str, tuple[str, int]]) -> None:
    """Extend the saver, so that it restores the variables and, if it saves in the main graph, saves them too.

    `variables` are the nodes and types of the variables, by their keys in the checkpoint.
    """
    graph_def, saver = meta.graph_def, meta.saver_def
    nodes = {node.name: node for node in graph_def.node}
    used_names = set(nodes)
    prefix, restore_op = saver.filename_tensor_name, nodes.get(saver.restore_op_name.partition(":")[0])
    if restore_op is None or prefix.partition(":")[0] not in nodes:
        return
    types = [dtype for _, dtype in variables.values()]
    encoded_keys = [key.encode() for key in variables]
    keys = _add_string_constant(graph_def, used_names, "keys", encoded_keys)
    slices = _add_string_constant(graph_def, used_names, "slices", [b""] * len(types))
    restore_read = graph_def.node.add(name=unique_node_name(used_names, "learned_ranges/restore"), op="RestoreV2")
    restore_read.input.extend([prefix.removesuffix(":0"), keys, slices])
    restore_read.attr["dtypes"].list.type.extend(types)
    for position, (handle, dtype) in enumerate(variables.values()):
        inputs = [handle, f"{restore_read.name}:{position}" if position else restore_read.name]
        assign = add_variable_op(graph_def, used_names, f"{handle}/restore", "AssignVariableOp", inputs, dtype)
        restore_op.input.append(f"^{assign}")
    save_op = next((node for node in graph_def.node if node.op == "SaveV2" and len(node.input) > 2), None)  # noqa: PLR2004  # prefix, names, slices
    if save_op is None:
        return
    constants = [nodes.get(tensor, proto.NodeDef()) for tensor in save_op.input[1:3]]
    if any(node.op != "Const" for node in constants):
        return
    saved_keys, saved_slices = (
        decode_tensor(node.attr["value"].tensor, "names").reshape(-1).tolist() for node in constants
    )
    data, control_inputs = proto.split_inputs(save_op)
    data[1] = _add_string_constant(graph_def, used_names, "save_keys", [*saved_keys, *encoded_keys])
    data[2] = _add_string_constant(graph_def, used_names, "save_slices", [*saved_slices, *[b""] * len(types)])
    data += [
        add_variable_op(graph_def, used_names, f"{handle}/save", "ReadVariableOp", [handle], dtype)
        for handle, dtype in variables.values()
    ]
    save_op.input[:] = [*data, *control_inputs]
    save_op.attr["dtypes"].list.type.extend(types)


def _add_string_constant(graph_def: Any, used_names: set[str], suffix: str, values: list[bytes]) -> str:
    node = graph_def.node.add(name=unique_node_name(used_names, f"learned_ranges/{suffix}"), op="Const")
    set_constant(node, np.array(values, object))
    return str(node.name)


def save(model: Model, path: Path, progress: Progress | None = None) -> None:  # noqa: ARG001  # weights are linked
    """Emit the model and write it to `path` in its original form: a file, a MetaGraph with checkpoint, or a folder.

    A file is text if its suffix is `.pbtxt`; `.meta` uses the source's form. Raises a UsageError if `path` cannot be
    written, or is not the kind of file or folder that would be replaced, and a ModelError if the message is too large
    for its format.
    """
    source: TensorFlowSource = model.source
    message = emit(model)
    if (meta := source.meta_graph(message)) is not None:
        update_control_flow_contexts(meta, source.graph_def(source.message))
    write_metadata(message, model)
    additions = _add_learned_ranges(source, message, learned_ranges(model))
    try:
        if source.folder is not None:
            _save_folder(source, source.folder, message, path, additions)
            return
        if path.is_dir():
            raise UsageError(f"{path} is a folder, but the model is a single file. Give the path of a file.")
        text = source.text if path.suffix == ".meta" else path.suffix == ".pbtxt"
        data = _serialize_message(source, message, text=text)
        if source.message_type == "MetaGraphDef":
            _copy_checkpoint(source, path.with_suffix(""))
        if additions is not None:
            extend_checkpoint(path.with_suffix(""), *additions)
        with atomic_file(path) as file:
            file.write(data)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}. Choose another path.") from error


def _serialize_message(source: TensorFlowSource, message: Any, *, text: bool) -> bytes:
    if text == source.text and message == source.message and source.file.is_file():
        data = source.file.read_bytes()  # a message may have several binary forms, so an unchanged one is copied
        if hashlib.sha256(data).hexdigest() == source.digest:
            return data
    return proto.to_text(message).encode() if text else proto.to_binary(message)


def _copy_checkpoint(source: TensorFlowSource, prefix: Path) -> None:
    """Copy the checkpoint of a MetaGraph next to the new one, under its name."""
    source.require_links_inside()
    source_prefix = source.checkpoint_prefix()
    if source_prefix is None or source_prefix.resolve() == prefix.resolve():
        return
    for file in sorted(source_prefix.parent.iterdir()):
        suffix = file.name.removeprefix(source_prefix.name)
        if suffix != file.name and (suffix == ".index" or suffix.startswith(".data-")):
            target = prefix.with_name(prefix.name + suffix)
            target.unlink(missing_ok=True)
            _link_or_copy(file, target)


def _link_or_copy(source: str | Path, target: str | Path) -> str:
    """Create a hard link where the file system supports it, else a copy. Refuse devices and pipes: they may not end."""
    if Path(source).exists() and not Path(source).is_file():
        raise ModelError(f"{source} is not a regular file, so it cannot be copied. Remove it from the model.")
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copy2(source, target)
    return str(target)


def _save_folder(
    source: TensorFlowSource, folder: Path, message: Any, path: Path, additions: CheckpointAdditions | None
) -> None:
    """Write a SavedModel to a temporary folder and move it to `path`. Unchanged files are linked or copied."""
    if path.exists() and not (
        path.is_dir() and (any((path / name).is_file() for name in SAVED_MODEL_FILES) or not any(path.iterdir()))
    ):
        raise UsageError(
            f"{path} exists and is not a SavedModel. A SavedModel is written as a folder; choose another path."
        )
    data = _serialize_message(source, message, text=source.text)
    stale = set(SAVED_MODEL_FILES) if message == source.message else {*SAVED_MODEL_FILES, _FINGERPRINT_FILE}
    visited: set[str] = set()

    def ignored_names(subfolder: str, _names: list[str]) -> set[str]:
        if os.path.realpath(subfolder) in visited:
            raise ModelError(f"{subfolder} is part of a cycle of links. Copy the model without links.")
        visited.add(os.path.realpath(subfolder))
        return stale if subfolder == str(folder) else set()

    source.require_links_inside()
    staging = make_staging_folder(path)
    try:
        new_folder = staging / "new"
        shutil.copytree(folder, new_folder, copy_function=_link_or_copy, ignore=ignored_names)
        with atomic_file(new_folder / source.file.name) as file:
            file.write(data)
        if additions is not None:
            extend_checkpoint(new_folder / "variables" / "variables", *additions)
        replace_folder(new_folder, path, staging)
    except shutil.Error as error:
        name, _, reason = error.args[0][0]
        raise UsageError(
            f"{path} cannot be written: {name} cannot be copied: {reason}. Choose another path."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
