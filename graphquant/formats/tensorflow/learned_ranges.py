"""Variables of learned ranges: their initial values, and their capture by functions and the object graph.

A frozen graph has no checkpoint, so it receives operations that assign the values, and one that runs them all.

Inside a function such a variable becomes an argument. Each caller passes it from an argument of its own, up to the main
graph. For functions that users call after loading, the object graph binds it. So `tf.saved_model.load` creates
variables that tapes and optimizers can use: `loaded.learned_ranges`.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.ops import FUNCTION_ATTRS
from graphquant.formats.tensorflow.values import ConstValue, encode_attr, encode_tensor, type_number
from graphquant.ir import DataType, unique_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from graphquant.formats.tensorflow.values import Array
    from graphquant.ir import Model


LEARNED_ATTR: Final = "_graphquant_learned"
"""The attribute that marks such a variable. Its value is True if gradients reach the variable."""

INITIALIZER_OP: Final = "init_learned_ranges"
"""The operation of a frozen graph that assigns all initial values."""


_INVALID_NAME_CHARS: Final = re.compile(r"[^A-Za-z0-9_./-]")


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
    """Add ops to a GraphDef that assign the initial values, and `init_learned_ranges`, which runs them all."""
    used_names = {node.name for node in graph_def.node}
    control_inputs = []
    for variable in by_shared_name(variables).values():
        handle = handles.get(variable.shared_name, variable.node)
        if not variable.is_fetchable and variable.shared_name not in handles:
            handle = _add_handle_node(graph_def, used_names, variable)
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

_TYPE_ATTRS: Final = ("Tin", "T")
_SHAPE_ATTRS: Final = ("output_shapes", "_output_shapes")
_OUTPUT_COUNT_ATTR: Final = "_num_original_outputs"
"""The number of a loop's own outputs, without those added for a gradient. Gradients are computed from these."""


def capture_in_functions(graph_def: Any, variables: Iterable[LearnedRange]) -> dict[str, list[str]]:
    """Turn variables inside functions into arguments, with one VarHandleOp each in the main graph.

    Returns:
        The shared names of the variables that are now the last arguments of each function.

    Raises:
        UsageError: An operation that cannot take more arguments calls a function.
    """
    learned = list(variables)
    bodies = {function.signature.name: function for function in graph_def.library.function}
    calls = _CallSites(graph_def, bodies)
    nodes_by_graph: dict[str, dict[str, str]] = {}
    for variable in learned:
        nodes_by_graph.setdefault(variable.graph, {})[variable.node] = variable.shared_name
    by_shared = by_shared_name(learned)
    order = {shared_name: position for position, shared_name in enumerate(by_shared)}
    propagated = calls.propagate({name: set(nodes_by_graph.get(name, {}).values()) for name in bodies})
    needed = {name: sorted(shared, key=order.__getitem__) for name, shared in propagated.items() if shared}
    arguments = {name: _add_arguments(bodies[name], needed[name], by_shared) for name in needed}
    arguments[""] = _add_main_handles(graph_def, learned, {key for shared in needed.values() for key in shared})
    for name, shared in needed.items():
        for caller, node in calls.callers[name]:
            if calls.is_first_callee(node, name):
                _add_call_inputs(node, [arguments[caller][key] for key in shared])
        if any(node.op in _LOOP_TYPES and node.attr["body"].func.name == name for _, node in calls.callers[name]):
            _return_captures(bodies[name], {arguments[name][key]: by_shared[key] for key in shared})
    for name in needed:  # last, because it replaces the remaining nodes by copies
        nodes = nodes_by_graph.get(name, {})
        _replace_by_arguments(bodies[name], {node: arguments[name][key] for node, key in nodes.items()})
    return needed


class _CallSites:
    """The nodes that call each function."""

    def __init__(self, graph_def: Any, bodies: Mapping[str, Any]) -> None:
        self.callers: dict[str, list[tuple[str, Any]]] = {name: [] for name in bodies}
        self._callees: dict[int, list[str]] = {}
        graphs = [("", graph_def.node), *((name, body.node_def) for name, body in bodies.items())]
        for caller, nodes in graphs:
            for node in nodes:
                callees = [name for name in dict.fromkeys(_callee_names(node)) if name in bodies]
                if callees:
                    self._callees[id(node)] = callees
                for name in callees:
                    self.callers[name].append((caller, node))

    def is_first_callee(self, node: Any, function: str) -> bool:
        """Return True if `function` is the first one that the node calls. So each node is changed once."""
        return self._callees[id(node)][0] == function

    def propagate(self, direct_captures: Mapping[str, set[str]]) -> dict[str, set[str]]:
        """Return the variables of each function: its own, its callees', and those of functions in the same call."""
        captures = {name: set(shared_names) for name, shared_names in direct_captures.items()}
        pending = deque(name for name, shared_names in captures.items() if shared_names)
        while pending:
            name = pending.popleft()
            for caller, node in self.callers[name]:
                _require_capturable(node, name)
                for related in (*self._callees[id(node)], caller):
                    if related and not captures[name] <= captures[related]:
                        captures[related] |= captures[name]
                        pending.append(related)
        return captures


def _callee_names(node: Any) -> Iterator[str]:
    """Yield the names of the functions that a node refers to."""
    yield node.op
    for _, function in proto.function_attrs(node):
        yield function.name


def _require_capturable(node: Any, function: str) -> None:
    if node.op not in FUNCTION_ATTRS and node.op != function:
        raise UsageError(
            f"The range in the function {function!r} is to be learned, but {node.name!r} ({node.op}), which calls it,"
            ' cannot pass variables. Exclude the tensor with --exclude, or use range = "observed".'
        )


def _add_arguments(body: Any, shared_names: list[str], named: Mapping[str, LearnedRange]) -> dict[str, str]:
    """Add an argument for each variable to a function; return the argument names by shared name."""
    used_names = {arg.name for arg in body.signature.input_arg} | {node.name for node in body.node_def}
    arguments = {}
    for shared_name in shared_names:
        arguments[shared_name] = unique_node_name(used_names, "learned_range")
        _add_resource_arg(body.signature.input_arg, arguments[shared_name], named[shared_name])
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
            if tensor.partition(":")[0] in replacements:
                node.input[slot] = replacements[tensor.partition(":")[0]]
    proto.replace_nodes(body.node_def, remaining)


def _add_main_handles(graph_def: Any, variables: list[LearnedRange], needed: set[str]) -> dict[str, str]:
    """Return the nodes of the main graph that make the variables; missing ones are added."""
    handles = {variable.shared_name: variable.node for variable in variables if variable.is_fetchable}
    used_names = {node.name for node in graph_def.node}
    for shared_name, variable in by_shared_name(variables).items():
        if shared_name in needed and shared_name not in handles:
            handles[shared_name] = _add_handle_node(graph_def, used_names, variable)
    return handles


def _add_call_inputs(node: Any, names: list[str]) -> None:
    """Add inputs to a call."""
    data, control_inputs = proto.split_inputs(node)
    if "_read_only_resource_inputs" in node.attr:
        node.attr["_read_only_resource_inputs"].list.i.extend(range(len(data), len(data) + len(names)))
    del node.input[:]
    node.input.extend([*data, *names, *control_inputs])
    for key in _TYPE_ATTRS:
        if key in node.attr and node.op in FUNCTION_ATTRS:
            node.attr[key].list.type.extend([type_number("resource")] * len(names))
    for key in _SHAPE_ATTRS if node.op in _LOOP_TYPES else ():
        if key in node.attr and node.attr[key].list.shape:
            for _ in names:
                node.attr[key].list.shape.add()
    if node.op in _LOOP_TYPES and _OUTPUT_COUNT_ATTR in node.attr:
        node.attr[_OUTPUT_COUNT_ATTR].i += len(names)
    node.op = _STATEFUL_TYPES.get(node.op, node.op)


def _add_resource_arg(args: Any, name: str, variable: LearnedRange) -> None:
    """Add an argument that is a variable's handle."""
    argument = args.add(name=name, type=type_number("resource"))
    handle_data = argument.handle_data.add(dtype=type_number(variable.value.dtype.name))
    handle_data.shape.SetInParent()
    for size in variable.value.shape:
        handle_data.shape.dim.add(size=size)


def _return_captures(body: Any, variables: Mapping[str, LearnedRange]) -> None:
    """Let a loop's body return the variables that it takes as arguments."""
    used_names = {arg.name for arg in body.signature.output_arg}
    for name, variable in variables.items():
        result_name = unique_node_name(used_names, name)
        _add_resource_arg(body.signature.output_arg, result_name, variable)
        body.ret[result_name] = name


def add_to_object_graph(objects: Any, variables: Iterable[LearnedRange], needed: Mapping[str, list[str]]) -> str:
    """Add the variables to a SavedObjectGraph as a list of its root, and bind them to functions.

    Returns:
        The name of the list: `learned_ranges`.
    """
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
        variable_proto.shape.SetInParent()
        for size in variable.value.shape:
            variable_proto.shape.dim.add(size=size)
    for function, shared_names in needed.items():
        if function in objects.concrete_functions:
            objects.concrete_functions[function].bound_inputs.extend(map(node_ids.__getitem__, shared_names))
    return label
