"""Variables of learned ranges: their initial values, and their capture by functions and the object graph.

A frozen graph has no checkpoint, so it receives operations that assign the values, and one that runs them all.

Inside a function such a variable becomes an argument. Each caller passes it from an argument of its own, up to the main
graph. For functions that users call after loading, the object graph binds it. So `tf.saved_model.load` creates
variables that tapes and optimizers can use: `loaded.learned_ranges`.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.object_graph import get_shared_name
from graphquant.formats.tensorflow.ops import FUNCTION_ATTRS
from graphquant.formats.tensorflow.values import ConstValue, encode_attr, encode_shape, set_constant, type_number
from graphquant.ir import DataType, Model, unique_name
from graphquant.qdq import LEARNED_ATTR

if TYPE_CHECKING:
    from graphquant.numerics import Array

INITIALIZER_OP: Final = "init_learned_ranges"  # the operation of a frozen graph that assigns all initial values
_INVALID_NAME_CHARS: Final = re.compile(r"[^A-Za-z0-9_./-]")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LearnedRange:
    """One variable of a learned range."""

    graph: str  # the name of its graph, "" for the main graph
    node: str  # its VarHandleOp in that graph
    is_fetchable: bool  # True if a session can fetch the node: it is neither in a function nor in a TF1 frame
    shared_name: str  # its name in sessions
    value: Array  # its initial value
    trainable: bool  # True if gradients reach it


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
                values[get_shared_name(handle)] = ConstValue(value)
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
    """Add ops to a GraphDef that assign the initial values, and `init_learned_ranges`, which runs them all."""
    used_names = {node.name for node in graph_def.node}
    control_inputs = []
    for variable in by_shared_name(variables).values():
        handle = handles.get(variable.shared_name, variable.node)
        if not variable.is_fetchable and variable.shared_name not in handles:
            handle = _add_handle_node(graph_def, used_names, variable)
        value_node = graph_def.node.add(name=unique_node_name(used_names, f"{handle}/initial_value"), op="Const")
        set_constant(value_node, variable.value)
        inputs, dtype = [handle, value_node.name], value_node.attr["dtype"].type
        assign = add_variable_op(graph_def, used_names, f"{handle}/Assign", "AssignVariableOp", inputs, dtype)
        control_inputs.append(f"^{assign}")
    if control_inputs:
        graph_def.node.add(name=unique_node_name(used_names, INITIALIZER_OP), op="NoOp", input=control_inputs)


def add_variable_op(
    graph_def: Any, used_names: set[str], name: str, op_type: str, inputs: Sequence[str], dtype: int
) -> str:
    """Add an op that reads or assigns a variable to the main graph; return its name."""
    node = graph_def.node.add(name=unique_node_name(used_names, name), op=op_type, input=inputs)
    node.attr["dtype"].type = dtype
    return str(node.name)


def _add_handle_node(graph_def: Any, used_names: set[str], variable: LearnedRange) -> str:
    """Add a VarHandleOp to the main graph for a variable inside a function; return its name."""
    name = unique_node_name(used_names, f"learned_ranges/{_INVALID_NAME_CHARS.sub('_', variable.shared_name)}")
    node = graph_def.node.add(name=name, op="VarHandleOp")
    attrs = {
        "dtype": DataType(str(variable.value.dtype)),
        "shape": variable.value.shape,
        "shared_name": variable.shared_name,
        LEARNED_ATTR: variable.trainable,
    }
    for key, value in attrs.items():
        node.attr[key].CopyFrom(encode_attr(value))
    return name


def unique_node_name(used_names: set[str], name: str) -> str:
    """Return `name` or, if it is used, `name` with the smallest free number. The result counts as used then."""
    candidate = unique_name(name, used_names)
    used_names.add(candidate)
    return candidate


_LOOP_TYPES: Final = frozenset({"While", "StatelessWhile"})
_STATEFUL_TYPES: Final = {
    "PartitionedCall": "StatefulPartitionedCall",
    "StatelessIf": "If",
    "StatelessCase": "Case",
    "StatelessWhile": "While",
}
"""The stateful version of each op type, which an op becomes when its functions read variables."""

_OUTPUT_COUNT_ATTR: Final = "_num_original_outputs"
"""The number of a loop's own outputs, without those added for a gradient. Gradients are computed from these."""


def capture_in_functions(graph_def: Any, variables: Iterable[LearnedRange]) -> dict[str, list[str]]:
    """Turn variables inside functions into arguments, with one VarHandleOp each in the main graph.

    Returns:
        The shared names of the variables that are now the last arguments of each function.

    Raises a UsageError if an operation that cannot take more arguments calls a function.
    """
    learned = list(variables)
    by_shared = by_shared_name(learned)
    order = {shared_name: position for position, shared_name in enumerate(by_shared)}
    bodies = {function.signature.name: function for function in graph_def.library.function}
    nodes_by_graph: dict[str, dict[str, str]] = defaultdict(dict)
    for variable in learned:
        nodes_by_graph[variable.graph][variable.node] = variable.shared_name
    calls = _CallSites(graph_def, bodies)
    propagated = calls.propagate({name: set(nodes_by_graph[name].values()) for name in bodies})
    needed = {name: sorted(shared, key=order.__getitem__) for name, shared in propagated.items() if shared}
    arguments = {name: _add_arguments(bodies[name], [by_shared[key] for key in needed[name]]) for name in needed}
    main_handles = {variable.shared_name: variable.node for variable in learned if variable.is_fetchable}
    used_names = {node.name for node in graph_def.node}
    for shared_name in sorted(set().union(*needed.values()) - main_handles.keys(), key=order.__getitem__):
        main_handles[shared_name] = _add_handle_node(graph_def, used_names, by_shared[shared_name])
    arguments[""] = main_handles
    for name, shared in needed.items():
        for caller, node in calls.callers[name]:
            if calls.callees[id(node)][0] == name:  # each node is changed once
                _add_call_inputs(node, [arguments[caller][key] for key in shared])
        if any(node.op in _LOOP_TYPES and node.attr["body"].func.name == name for _, node in calls.callers[name]):
            # A loop's body returns the variables that it takes as arguments.
            result_names = {arg.name for arg in bodies[name].signature.output_arg}
            for key in shared:
                result_name = unique_node_name(result_names, arguments[name][key])
                _add_resource_arg(bodies[name].signature.output_arg, result_name, by_shared[key])
                bodies[name].ret[result_name] = arguments[name][key]
    for name in needed:  # last, because it replaces the remaining nodes by copies
        nodes = nodes_by_graph[name]
        _replace_by_arguments(bodies[name], {node: arguments[name][key] for node, key in nodes.items()})
    return needed


class _CallSites:
    """The nodes that call each function, with their graphs, and the functions that each node calls, by its id."""

    def __init__(self, graph_def: Any, bodies: Mapping[str, Any]) -> None:
        self.callers: dict[str, list[tuple[str, Any]]] = {name: [] for name in bodies}
        self.callees: dict[int, list[str]] = {}
        for caller, nodes in [("", graph_def.node), *((name, body.node_def) for name, body in bodies.items())]:
            for node in nodes:
                names = dict.fromkeys([node.op, *(function.name for _, function in proto.function_attrs(node))])
                if callees := [name for name in names if name in bodies]:
                    self.callees[id(node)] = callees
                for name in callees:
                    self.callers[name].append((caller, node))

    def propagate(self, direct_captures: Mapping[str, set[str]]) -> dict[str, set[str]]:
        """Return the variables of each function: its own, its callees', and those of functions in the same call."""
        captures = {name: set(shared_names) for name, shared_names in direct_captures.items()}
        pending = deque(name for name, shared_names in captures.items() if shared_names)
        while pending:
            name = pending.popleft()
            for caller, node in self.callers[name]:
                if node.op not in FUNCTION_ATTRS and node.op != name:
                    raise UsageError(
                        f"The range in the function {name!r} is to be learned, but {node.name!r} ({node.op}), which"
                        " calls it, cannot pass variables. Exclude the tensor with --exclude, or use range ="
                        ' "observed".'
                    )
                for related in (*self.callees[id(node)], caller):
                    if related and not captures[name] <= captures[related]:
                        captures[related] |= captures[name]
                        pending.append(related)
        return captures


def _add_arguments(body: Any, variables: Iterable[LearnedRange]) -> dict[str, str]:
    """Add an argument for each variable to a function; return the argument names by shared name."""
    used_names = {arg.name for arg in body.signature.input_arg} | {node.name for node in body.node_def}
    arguments = {}
    for variable in variables:
        arguments[variable.shared_name] = unique_node_name(used_names, "learned_range")
        _add_resource_arg(body.signature.input_arg, arguments[variable.shared_name], variable)
        if "_input_shapes" in body.attr:
            body.attr["_input_shapes"].list.shape.add()
    body.signature.is_stateful = True
    return arguments


def _replace_by_arguments(body: Any, replacements: Mapping[str, str]) -> None:
    """Remove nodes from a function and let their readers read arguments instead."""
    if not replacements:
        return
    remaining = [node for node in body.node_def if node.name not in replacements]
    for node in remaining:
        for slot, tensor in enumerate(node.input):
            node.input[slot] = replacements.get(tensor.partition(":")[0], tensor)
    proto.replace_nodes(body.node_def, remaining)


def _add_call_inputs(node: Any, names: list[str]) -> None:
    data, control_inputs = proto.split_inputs(node)
    if "_read_only_resource_inputs" in node.attr:
        node.attr["_read_only_resource_inputs"].list.i.extend(range(len(data), len(data) + len(names)))
    node.input[:] = [*data, *names, *control_inputs]
    for key in ("Tin", "T"):
        if key in node.attr and node.op in FUNCTION_ATTRS:
            node.attr[key].list.type.extend([type_number("resource")] * len(names))
    if node.op in _LOOP_TYPES:
        for key in ("output_shapes", "_output_shapes"):
            if key in node.attr and node.attr[key].list.shape:
                node.attr[key].list.shape.extend([proto.TensorShapeProto()] * len(names))
        if _OUTPUT_COUNT_ATTR in node.attr:
            node.attr[_OUTPUT_COUNT_ATTR].i += len(names)
    node.op = _STATEFUL_TYPES.get(node.op, node.op)


def _add_resource_arg(args: Any, name: str, variable: LearnedRange) -> None:
    argument = args.add(name=name, type=type_number("resource"))
    argument.handle_data.add(dtype=type_number(variable.value.dtype.name), shape=encode_shape(variable.value.shape))


def add_to_object_graph(objects: Any, variables: Iterable[LearnedRange], needed: Mapping[str, list[str]]) -> str:
    """Add the variables to a SavedObjectGraph as a list of its root, bind them to functions; return the list's name."""
    root, by_shared = objects.nodes[0], by_shared_name(variables)
    label = unique_node_name({child.local_name for child in root.children}, "learned_ranges")
    root.children.add(node_id=len(objects.nodes), local_name=label)
    list_node = objects.nodes.add()
    list_node.user_object.identifier = "trackable_list_wrapper"
    list_node.user_object.version.producer = list_node.user_object.version.min_consumer = 1
    node_ids = {}
    for position, (shared_name, variable) in enumerate(by_shared.items()):
        node_ids[shared_name] = len(objects.nodes)
        list_node.children.add(node_id=node_ids[shared_name], local_name=str(position))
        variable_proto = objects.nodes.add().variable
        variable_proto.dtype = type_number(variable.value.dtype.name)
        variable_proto.trainable, variable_proto.name = variable.trainable, shared_name
        variable_proto.shape.CopyFrom(encode_shape(variable.value.shape))
    for function, shared_names in needed.items():
        if function in objects.concrete_functions:
            objects.concrete_functions[function].bound_inputs.extend(map(node_ids.__getitem__, shared_names))
    return label
