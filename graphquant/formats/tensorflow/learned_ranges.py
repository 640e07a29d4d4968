"""Variables of learned ranges and their initial values.

A frozen graph has no checkpoint, so it receives operations that assign the values, and one that runs them all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.values import ConstValue, encode_attr, encode_tensor
from graphquant.ir import DataType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphquant.formats.tensorflow.values import Array
    from graphquant.ir import Model


LEARNED_ATTR: Final = "_graphquant_learned"
"""The attribute that marks such a variable. Its value is True if gradients reach the variable."""

INITIALIZER_OP: Final = "init_learned_ranges"
"""The operation of a frozen graph that assigns all initial values."""


INVALID_NAME_CHARS: Final = re.compile(r"[^A-Za-z0-9_./-]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedRange:
    """One variable of a learned range.

    Attributes:
        graph: The name of its graph, "" for the main graph.
        node: Its VarHandleOp in that graph.
        is_fetchable: True if a session can fetch the node: it is neither in a function nor in a TF1 frame.
        shared_name: Its name in sessions.
        value: Its initial value.
        trainable: True if gradients reach it.
    """

    graph: str
    node: str
    is_fetchable: bool
    shared_name: str
    value: Array
    trainable: bool


def learned_ranges(model: Model) -> list[LearnedRange]:
    """Return the variables of learned ranges that were added to `model`. Function clones share variables."""
    return [
        LearnedRange(
            graph=name,
            node=op.name,
            is_fetchable=not name and not graph.control_inputs(op.name),
            shared_name=str(op.attrs["shared_name"]),
            value=op.read_value(),
            trainable=bool(op.attrs[LEARNED_ATTR]),
        )
        for name, graph in model.graphs.items()
        for op in graph.ops()
        if op.source is None and op.read_value is not None and op.type == "VarHandleOp" and LEARNED_ATTR in op.attrs
    ]


def stored_initial_values(graph_def: Any) -> dict[str, ConstValue]:
    """Return readers of the initial values of a GraphDef's learned ranges, by shared name."""
    nodes = {node.name: node for node in graph_def.node}
    values = {}
    for node in graph_def.node:
        if node.op == "AssignVariableOp" and len(node.input) > 1:
            handle, value = nodes.get(node.input[0]), nodes.get(node.input[1])
            if handle is not None and LEARNED_ATTR in handle.attr and value is not None and "value" in value.attr:
                values[handle.attr["shared_name"].s.decode(errors="replace")] = ConstValue(value)
    return values


def by_shared_name(variables: Iterable[LearnedRange]) -> dict[str, LearnedRange]:
    """Index the variables by shared name. Function clones share a name; the first one counts."""
    by_shared: dict[str, LearnedRange] = {}
    for variable in variables:
        by_shared.setdefault(variable.shared_name, variable)
    return by_shared


def add_initializers(
    graph_def: Any, variables: Iterable[LearnedRange], handles: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Add ops to a GraphDef that assign the initial values, and `init_learned_ranges`, which runs them all.

    Args:
        graph_def: The GraphDef, changed in place.
        variables: The variables.
        handles: Existing nodes of the main graph that make the variables, by shared name.
    """
    used_names = {node.name for node in graph_def.node}
    control_inputs = []
    for variable in by_shared_name(variables).values():
        handle = handles.get(variable.shared_name, variable.node)
        if not variable.is_fetchable and variable.shared_name not in handles:
            handle = unique_node_name(used_names, f"learned_ranges/{INVALID_NAME_CHARS.sub('_', variable.shared_name)}")
            graph_def.node.append(make_handle_node(handle, variable))
        value_node = proto.NodeDef(name=unique_node_name(used_names, f"{handle}/initial_value"), op="Const")
        tensor = encode_tensor(variable.value)
        value_node.attr["dtype"].type = tensor.dtype
        value_node.attr["value"].tensor.CopyFrom(tensor)
        assign_node = proto.NodeDef(name=unique_node_name(used_names, f"{handle}/Assign"), op="AssignVariableOp")
        assign_node.input.extend([handle, value_node.name])
        assign_node.attr["dtype"].type = tensor.dtype
        graph_def.node.extend([value_node, assign_node])
        control_inputs.append(f"^{assign_node.name}")
    if control_inputs:
        graph_def.node.append(
            proto.NodeDef(name=unique_node_name(used_names, INITIALIZER_OP), op="NoOp", input=control_inputs)
        )


def make_handle_node(name: str, variable: LearnedRange) -> Any:
    """Make a VarHandleOp in the main graph for a variable inside a function."""
    node = proto.NodeDef(name=name, op="VarHandleOp")
    attrs = {
        "dtype": DataType(str(variable.value.dtype)),
        "shape": variable.value.shape,
        "shared_name": variable.shared_name,
        LEARNED_ATTR: variable.trainable,
    }
    for key, value in attrs.items():
        node.attr[key].CopyFrom(encode_attr(value))
    return node


def unique_node_name(used_names: set[str], name: str) -> str:
    """Return `name`, or `name` with the smallest free number if it is in use."""
    candidate, number = name, 0
    while candidate in used_names:
        number += 1
        candidate = f"{name}_{number}"
    used_names.add(candidate)
    return candidate
