"""Finds out which key of a checkpoint holds which variable of a SavedModel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from graphquant.formats.tensorflow.checkpoint import Checkpoint

__all__ = ["Variables", "resolve_variables"]

_VALUE_ATTRIBUTE: Final = "VARIABLE_VALUE"
_VARIABLE_OPS: Final = frozenset({"VarHandleOp", "VariableV2", "Variable"})
_ASSIGN_OPS: Final = frozenset({"AssignVariableOp", "Assign"})
_MAX_HOPS: Final = 16  # a graph may be a ring


@dataclass(frozen=True, slots=True)
class Variables:
    """The values of a model's variables.

    Attributes:
        checkpoint: Where they are, None if there is no checkpoint.
        keys: Keys of the checkpoint by node name or shared name of a variable.
    """

    checkpoint: Checkpoint | None
    keys: Mapping[str, str]

    @classmethod
    def of(cls, found: tuple[Checkpoint, Mapping[str, str]] | None) -> Self:
        """The variables of a checkpoint and its keys, if there is one."""
        return cls(None, {}) if found is None else cls(*found)

    def key(self, node: Any) -> str | None:
        """The key of the variable that `node` makes, None if it has no value."""
        return self.keys.get(node.name) or self.keys.get(_shared_name(node))

    def reader(self, node: Any) -> Callable[[], Any] | None:
        """What reads the value of the variable that `node` makes, None if it has none."""
        return self.read(self.key(node))

    def read(self, key: str | None) -> Callable[[], Any] | None:
        """What reads the value under `key`, None if there is none."""
        return None if self.checkpoint is None or key is None else partial(self.checkpoint.read, key)


def resolve_variables(saved_model: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Maps the variables of a SavedModel to keys of its checkpoint.

    What the model's own restore operations do decides; a variable they leave out is looked up by its name, first in
    the checkpoint's object graph and then among its keys, as TF1 uses them. Names alone would not do: a TF2 model may
    hold two variables of one name, of which only the node names differ.

    A name that could mean two keys is left out, and so are the parts of a partitioned TF1 variable, which are read
    with the name of the whole.

    Args:
        saved_model: A `SavedModel` message.
        checkpoint: The checkpoint in its `variables` folder.

    Returns:
        Keys of the checkpoint by node name of a variable operation, and by its `shared_name` where that is clear and
        not the name of another node. Look a variable up by node name first.

    Raises:
        ModelError: The checkpoint's object graph is damaged.
    """
    by_full_name = _full_names(checkpoint)
    by_node: dict[str, set[str]] = {}
    by_shared_name: dict[str, set[str]] = {}
    for meta_graph in saved_model.meta_graphs:
        graph = meta_graph.graph_def
        restored = _restored_keys(graph)
        for node in graph.node:
            if node.op in _VARIABLE_OPS:
                shared = _shared_name(node)
                keys = restored.get(node.name) or by_full_name.get(shared) or {shared}
                by_node.setdefault(node.name, set()).update(keys)
                by_shared_name.setdefault(shared, set()).update(keys)
        for function in graph.library.function:
            for shared in (_shared_name(node) for node in function.node_def if node.op in _VARIABLE_OPS):
                by_shared_name.setdefault(shared, set(by_full_name.get(shared) or {shared}))
    for shared, keys in by_shared_name.items():
        by_node.setdefault(shared, keys)
    return {name: key for name, keys in by_node.items() if len(keys) == 1 for key in keys if key in checkpoint}


def _shared_name(node: Any) -> str:
    # Looking an absent attribute up would add it to the message.
    shared = node.attr["shared_name"].s if "shared_name" in node.attr else b""
    return shared.decode(errors="replace") or str(node.name)


def _full_names(checkpoint: Checkpoint) -> dict[str, set[str]]:
    """The keys of every variable name in the object graph; names need not be unique there."""
    names: dict[str, set[str]] = {}
    graph = checkpoint.object_graph()
    for node in graph.nodes if graph is not None else ():
        for attribute in node.attributes:
            if attribute.name == _VALUE_ATTRIBUTE and attribute.full_name:
                names.setdefault(attribute.full_name, set()).add(attribute.checkpoint_key)
    return names


def _restored_keys(graph: Any) -> dict[str, set[str]]:
    """The keys that variables are restored from, by node name: in the graph itself (TF1) and in functions (TF2)."""
    found: dict[str, set[str]] = {}
    for name, key in _restores(graph.node):
        found.setdefault(name, set()).add(key)
    bodies = {function.signature.name: function for function in graph.library.function}
    for call in graph.node:
        body = bodies.get(call.attr["f"].func.name) if "f" in call.attr else None
        if body is None:
            continue
        arguments = dict(zip((arg.name for arg in body.signature.input_arg), call.input, strict=False))
        for argument, key in _restores(body.node_def):
            if argument in arguments:
                found.setdefault(_producer(arguments[argument]), set()).add(key)
    return found


def _restores(nodes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Variable (node or argument) and key of every assignment of a restored value."""
    by_name = {node.name: node for node in nodes}
    for node in by_name.values():
        if node.op not in _ASSIGN_OPS or len(node.input) < 2:  # noqa: PLR2004 - variable and value
            continue
        value = node.input[1]
        hops = 0
        while (source := by_name.get(_producer(value))) is not None and source.op == "Identity" and hops < _MAX_HOPS:
            value = source.input[0] if source.input else ""
            hops += 1
        if source is None or source.op != "RestoreV2" or len(source.input) < 3:  # noqa: PLR2004 - prefix, names, slices
            continue
        index = _output_index(value)
        part = _string_at(by_name.get(_producer(source.input[2])), index)
        # A part of a partitioned variable maps to no key; "" keeps the variable from being looked up by name.
        key = _string_at(by_name.get(_producer(source.input[1])), index) if not part else ""
        if key is not None:
            yield _producer(node.input[0]), key


def _producer(tensor: str) -> str:
    return tensor.partition(":")[0]


def _output_index(tensor: str) -> int:
    """The 1 of `node:1` in a graph and of `node:output:1` in a function."""
    digits = tensor.rpartition(":")[2] if ":" in tensor else "0"
    return int(digits) if digits.isdecimal() and len(digits) < 10 else 0  # noqa: PLR2004 - no op has more outputs


def _string_at(node: Any, index: int) -> str | None:
    """An element of a constant of strings; a constant that is shorter than its shape repeats its last element."""
    if node is None or node.op != "Const" or "value" not in node.attr:
        return None
    values = node.attr["value"].tensor.string_val
    return values[min(index, len(values) - 1)].decode(errors="replace") if values else None
