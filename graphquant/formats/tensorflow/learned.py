"""The variables of learned ranges: their first values, in whatever holds a model's values.

A frozen graph has no checkpoint: it gets operations that assign the values, and one that runs them all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.values import Stored, encode_attr, encode_tensor
from graphquant.ir import DataType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphquant.formats.tensorflow.values import Array
    from graphquant.ir import Model

__all__ = [
    "INITIALIZER",
    "MARK",
    "NO_NODE_NAME",
    "Learned",
    "add_initializers",
    "by_name",
    "first_values",
    "fresh",
    "handle_node",
    "learned",
]

MARK: Final = "_graphquant_learned"
"""The attribute of such a variable: whether gradients reach it."""

INITIALIZER: Final = "init_learned_ranges"
"""The operation of a frozen graph that assigns all first values."""


NO_NODE_NAME: Final = re.compile(r"[^A-Za-z0-9_./-]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Learned:
    """One variable of a learned range.

    Attributes:
        graph: The graph that it is in, "" for the main one.
        node: Its VarHandleOp there.
        outside: Whether that runs where a session can fetch it: not in a function, nor in a TF1 frame.
        shared: The name by which sessions know it.
        value: Its first value.
        trainable: Whether gradients reach it.
    """

    graph: str
    node: str
    outside: bool
    shared: str
    value: Array
    trainable: bool


def learned(model: Model) -> list[Learned]:
    """The variables of learned ranges that `model` got since it was read, graph by graph; copies share some."""
    return [
        Learned(
            graph=name,
            node=op.name,
            outside=not name and not graph.control_inputs(op.name),
            shared=str(op.attrs["shared_name"]),
            value=op.value(),
            trainable=bool(op.attrs[MARK]),
        )
        for name, graph in model.graphs.items()
        for op in graph.ops()
        if op.source is None and op.value is not None and op.type == "VarHandleOp" and MARK in op.attrs
    ]


def first_values(graph_def: Any) -> dict[str, Stored]:
    """By shared name what reads the first value of each variable of a learned range that a GraphDef brings."""
    nodes = {node.name: node for node in graph_def.node}
    found = {}
    for node in graph_def.node:
        if node.op == "AssignVariableOp" and len(node.input) > 1:
            handle, value = nodes.get(node.input[0]), nodes.get(node.input[1])
            if handle is not None and MARK in handle.attr and value is not None and "value" in value.attr:
                found[handle.attr["shared_name"].s.decode(errors="replace")] = Stored(value)
    return found


def by_name(variables: Iterable[Learned]) -> dict[str, Learned]:
    """The variables by the name that copies share, each as it was found first."""
    found: dict[str, Learned] = {}
    for one in variables:
        found.setdefault(one.shared, one)
    return found


def add_initializers(
    graph_def: Any, variables: Iterable[Learned], handles: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Adds to a GraphDef what assigns the first values, and `init_learned_ranges`, which runs all of that.

    Args:
        graph_def: The GraphDef, which is changed.
        variables: The variables.
        handles: Nodes of the main graph that make them, by shared name.
    """
    taken = {node.name for node in graph_def.node}
    done = []
    for variable in by_name(variables).values():
        handle = handles.get(variable.shared, variable.node)
        if not variable.outside and variable.shared not in handles:
            handle = fresh(taken, f"learned_ranges/{NO_NODE_NAME.sub('_', variable.shared)}")
            graph_def.node.append(handle_node(handle, variable))
        value = proto.NodeDef(name=fresh(taken, f"{handle}/initial_value"), op="Const")
        tensor = encode_tensor(variable.value)
        value.attr["dtype"].type = tensor.dtype
        value.attr["value"].tensor.CopyFrom(tensor)
        assign = proto.NodeDef(name=fresh(taken, f"{handle}/Assign"), op="AssignVariableOp")
        assign.input.extend([handle, value.name])
        assign.attr["dtype"].type = tensor.dtype
        graph_def.node.extend([value, assign])
        done.append(f"^{assign.name}")
    if done:
        graph_def.node.append(proto.NodeDef(name=fresh(taken, INITIALIZER), op="NoOp", input=done))


def handle_node(name: str, variable: Learned) -> Any:
    """A VarHandleOp for a variable that a function holds."""
    node = proto.NodeDef(name=name, op="VarHandleOp")
    attrs = {
        "dtype": DataType(str(variable.value.dtype)),
        "shape": variable.value.shape,
        "shared_name": variable.shared,
        MARK: variable.trainable,
    }
    for key, value in attrs.items():
        node.attr[key].CopyFrom(encode_attr(value))
    return node


def fresh(taken: set[str], name: str) -> str:
    """`name`, or with the smallest free number if a node is called so."""
    label, k = name, 0
    while label in taken:
        k += 1
        label = f"{name}_{k}"
    taken.add(label)
    return label
