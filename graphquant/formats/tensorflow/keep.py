"""Learned ranges in models with variables of their own: the checkpoint holds their values, and loaders restore them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.bundle import extend
from graphquant.formats.tensorflow.captures import hand_over, own
from graphquant.formats.tensorflow.learned import INITIALIZER, add_initializers, by_name, fresh
from graphquant.formats.tensorflow.values import decode_tensor, encode_tensor, type_number

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping
    from pathlib import Path

    from graphquant.formats.tensorflow.learned import Learned
    from graphquant.formats.tensorflow.source import Source
    from graphquant.formats.tensorflow.values import Array

__all__ = ["Kept", "keep", "tell"]

VALUE: Final = "VARIABLE_VALUE"
COLLECTIONS: Final = ("variables", "trainable_variables")
MAIN_OP: Final = "saved_model_main_op"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a checkpoint is to hold besides.

    Attributes:
        values: First values by their keys.
        objects: The graph of objects that is to stand for the checkpoint's, None in a model of TF1.
    """

    values: Mapping[str, Array]
    objects: Any | None

    def add_to(self, prefix: Path) -> None:
        """Adds it to the checkpoint with that path prefix.

        Raises:
            ModelError: The checkpoint is damaged.
        """
        extend(prefix, self.values, self.objects)


def keep(source: Source, message: Any, variables: Iterable[Learned]) -> Kept | None:
    """Makes the variables of learned ranges the model's own, in `message`; None if there are none.

    In a SavedModel of TF2 they are objects, in one of TF1 and in a MetaGraph they are in its collections of variables;
    in either the saver restores them.

    Raises:
        ModelError: The checkpoint is damaged.
        UsageError: A function is called by an operation that cannot be given more arguments.
    """
    found, meta = list(variables), source.meta_graph(message)
    if not found:
        return None
    needed = hand_over(meta.graph_def, found)
    named = by_name(found)
    if len(meta.object_graph_def.nodes):
        label = own(meta.object_graph_def, found, needed)
        keys = {shared: f"{label}/{at}/.ATTRIBUTES/{VALUE}" for at, shared in enumerate(named)}
        objects = _objects(source, label, keys)
    else:
        keys, objects = {shared: shared for shared in named}, None
    handles = _handles(meta.graph_def, named)
    kept = {keys[shared]: named[shared].value for shared in named}
    if objects is None:
        _collect(meta, named, handles)
    if meta.saver_def.restore_op_name:
        _restore(meta, {keys[shared]: (handles[shared], named[shared].value) for shared in handles})
    return Kept(values=kept, objects=objects)


def _handles(graph_def: Any, named: Mapping[str, Learned], among: Container[str] | None = None) -> dict[str, str]:
    """The nodes of the main graph that make the variables, by shared name; only those `among` others, if given."""
    found: dict[str, str] = {}
    for node in graph_def.node:
        if node.op == "VarHandleOp" and "shared_name" in node.attr:
            shared = node.attr["shared_name"].s.decode(errors="replace")
            if shared in named and (among is None or node.name in among):
                found.setdefault(shared, node.name)
    return found


def _objects(source: Source, label: str, keys: Mapping[str, str]) -> Any:
    """The checkpoint's graph of objects with the list of the variables."""
    opened = source.checkpoint()
    objects = opened[0].object_graph() if opened is not None else None
    if objects is None or not objects.nodes:
        objects = proto.TrackableObjectGraph()
        objects.nodes.add()
    objects.nodes[0].children.add(node_id=len(objects.nodes), local_name=label)
    held = objects.nodes.add()
    for at, (shared, key) in enumerate(keys.items()):
        held.children.add(node_id=len(objects.nodes), local_name=str(at))
        objects.nodes.add().attributes.add(name=VALUE, full_name=shared, checkpoint_key=key)
    return objects


def _collect(meta: Any, named: Mapping[str, Learned], handles: Mapping[str, str]) -> None:
    """Tells TF1 of the variables: as parts of its collections, each with what assigns its first value."""
    nodes = {node.name: node for node in meta.graph_def.node}
    add_initializers(meta.graph_def, [named[shared] for shared in handles], handles)
    tell(meta, meta.graph_def, named.values())
    if not meta.saver_def.restore_op_name:
        names = meta.collection_def[MAIN_OP].node_list.value
        if names and names[0] in nodes:
            nodes[names[0]].input.append(f"^{INITIALIZER}")
        else:
            names.append(INITIALIZER)


def tell(meta: Any, graph_def: Any, variables: Iterable[Learned]) -> None:
    """Adds the variables of a GraphDef to the collections of a MetaGraphDef, and to the GraphDef what reads them.

    Args:
        meta: The MetaGraphDef, this package's or TensorFlow's own.
        graph_def: The GraphDef, which brings what assigns their first values.
        variables: The variables.
    """
    named = by_name(variables)
    taken: set[str] = set()
    reads: dict[str, str] = {}
    assigns: dict[str, tuple[str, str]] = {}
    for node in graph_def.node:
        taken.add(node.name)
        if node.op == "ReadVariableOp" and node.input:
            reads.setdefault(node.input[0], node.name)
        elif node.op == "AssignVariableOp" and len(node.input) > 1:
            assigns.setdefault(node.input[0], (node.name, node.input[1]))
    for shared, handle in _handles(graph_def, named, assigns).items():
        if handle not in reads:
            read = graph_def.node.add(
                name=fresh(taken, f"{handle}/Read/ReadVariableOp"), op="ReadVariableOp", input=[handle]
            )
            read.attr["dtype"].type = type_number(named[shared].value.dtype.name)
            reads[handle] = read.name
        told = proto.VariableDef(
            variable_name=f"{handle}:0",
            initial_value_name=f"{assigns[handle][1]}:0",
            initializer_name=assigns[handle][0],
            snapshot_name=f"{reads[handle]}:0",
            is_resource=True,
            trainable=named[shared].trainable,
        )
        for collection in COLLECTIONS if named[shared].trainable else COLLECTIONS[:1]:
            meta.collection_def[collection].bytes_list.value.append(proto.to_binary(told))


def _restore(meta: Any, variables: Mapping[str, tuple[str, Array]]) -> None:
    """Makes the saver restore the variables too; and save them, where it does so in the main graph."""
    graph_def, saver = meta.graph_def, meta.saver_def
    nodes = {node.name: node for node in graph_def.node}
    taken = set(nodes)
    prefix, restore = saver.filename_tensor_name, nodes.get(saver.restore_op_name.partition(":")[0])
    if restore is None or prefix.partition(":")[0] not in nodes:
        return
    types = [type_number(value.dtype.name) for _, value in variables.values()]
    keys, slices = (
        _strings(graph_def, taken, "keys", [key.encode() for key in variables]),
        _strings(graph_def, taken, "slices", [b""] * len(types)),
    )
    read = graph_def.node.add(name=fresh(taken, "learned_ranges/restore"), op="RestoreV2")
    read.input.extend([prefix.removesuffix(":0"), keys, slices])
    read.attr["dtypes"].list.type.extend(types)
    for at, (handle, _) in enumerate(variables.values()):
        assign = graph_def.node.add(name=fresh(taken, f"{handle}/restore"), op="AssignVariableOp")
        assign.input.extend([handle, f"{read.name}:{at}" if at else read.name])
        assign.attr["dtype"].type = types[at]
        restore.input.append(f"^{assign.name}")
    _save(graph_def, taken, variables, types)


def _save(graph_def: Any, taken: set[str], variables: Mapping[str, tuple[str, Array]], types: list[int]) -> None:
    """Adds the variables to what the first SaveV2 of the main graph writes."""
    nodes = {node.name: node for node in graph_def.node}
    save = next((node for node in graph_def.node if node.op == "SaveV2" and len(node.input) > 2), None)  # noqa: PLR2004  # prefix, names, slices
    if save is None or any(nodes.get(text) is None or nodes[text].op != "Const" for text in save.input[1:3]):
        return
    listed = [
        [bytes(item) for item in decode_tensor(nodes[text].attr["value"].tensor, "names").reshape(-1)]
        for text in save.input[1:3]
    ]
    save.input[1] = _strings(graph_def, taken, "save_keys", [*listed[0], *(key.encode() for key in variables)])
    save.input[2] = _strings(graph_def, taken, "save_slices", [*listed[1], *[b""] * len(types)])
    after = [text for text in save.input if text.startswith("^")]
    data = [text for text in save.input if not text.startswith("^")]
    for (handle, _), dtype in zip(variables.values(), types, strict=True):
        read = graph_def.node.add(name=fresh(taken, f"{handle}/save"), op="ReadVariableOp", input=[handle])
        read.attr["dtype"].type = dtype
        data.append(read.name)
    del save.input[:]
    save.input.extend([*data, *after])
    save.attr["dtypes"].list.type.extend(types)


def _strings(graph_def: Any, taken: set[str], word: str, values: list[bytes]) -> str:
    """Adds a constant of strings; returns its name."""
    node = graph_def.node.add(name=fresh(taken, f"learned_ranges/{word}"), op="Const")
    node.attr["dtype"].type = type_number("string")
    node.attr["value"].tensor.CopyFrom(encode_tensor(np.array(values, object)))
    return str(node.name)
