"""Variables of learned ranges in models that have variables of their own: handed to functions, owned, saved.

In a function such a variable becomes an argument, which each caller hands on from its own, up to the main graph; the
object graph binds it where a function is called by whoever loads the model. So `tf.saved_model.load` makes variables of
them that tapes and optimizers see: `loaded.learned_ranges`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import UsageError
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.learned import NO_NODE_NAME, by_name, fresh, handle_node
from graphquant.formats.tensorflow.ops import CALLS
from graphquant.formats.tensorflow.values import type_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from graphquant.formats.tensorflow.learned import Learned

__all__ = ["hand_over", "own"]

_LOOPS: Final = frozenset({"While", "StatelessWhile"})
_STATEFUL: Final = {
    "PartitionedCall": "StatefulPartitionedCall",
    "StatelessIf": "If",
    "StatelessCase": "Case",
    "StatelessWhile": "While",
}
"""What an op becomes whose functions read variables."""

_TYPES: Final = ("Tin", "T")
_SHAPES: Final = ("output_shapes", "_output_shapes")
_OUTPUTS: Final = "_num_original_outputs"
"""How many outputs of a loop are its own and not those that a gradient was given; gradients are made of these."""


def hand_over(graph_def: Any, variables: Iterable[Learned]) -> dict[str, list[str]]:
    """Makes the variables that are in functions arguments of these, with one VarHandleOp for each in the main graph.

    Args:
        graph_def: The GraphDef, which is changed.
        variables: The variables of learned ranges, wherever they are.

    Returns:
        By function the shared names of the variables that are its last arguments now.

    Raises:
        UsageError: A function is called by an operation that cannot be given more arguments.
    """
    found = list(variables)
    bodies = {function.signature.name: function for function in graph_def.library.function}
    calls = _Calls(graph_def, bodies)
    made: dict[str, dict[str, str]] = {}
    for one in found:
        made.setdefault(one.graph, {})[one.node] = one.shared
    named = by_name(found)
    place = {shared: at for at, shared in enumerate(named)}
    spread = calls.spread({name: set(made.get(name, {}).values()) for name in bodies})
    needed = {name: sorted(some, key=place.__getitem__) for name, some in spread.items() if some}
    arguments = {name: _add_arguments(bodies[name], needed[name], named) for name in needed}
    arguments[""] = _main_handles(graph_def, found, {shared for some in needed.values() for shared in some})
    for name, some in needed.items():
        for holder, node in calls.of[name]:
            if calls.first(node, name):
                _hand_on(node, [arguments[holder][shared] for shared in some])
        if any(node.op in _LOOPS and node.attr["body"].func.name == name for _, node in calls.of[name]):
            _return(bodies[name], {arguments[name][shared]: named[shared] for shared in some})
    for name in needed:  # last, as the nodes that are left are copies
        _drop(bodies[name], {node: arguments[name][shared] for node, shared in made.get(name, {}).items()})
    return needed


class _Calls:
    """Which nodes call which functions."""

    def __init__(self, graph_def: Any, bodies: Mapping[str, Any]) -> None:
        self.of: dict[str, list[tuple[str, Any]]] = {name: [] for name in bodies}
        self._beside: dict[int, list[str]] = {}
        graphs = [("", graph_def.node), *((name, body.node_def) for name, body in bodies.items())]
        for holder, nodes in graphs:
            for node in nodes:
                called = [name for name in dict.fromkeys(_called(node)) if name in bodies]
                if called:
                    self._beside[id(node)] = called
                for name in called:
                    self.of[name].append((holder, node))

    def first(self, node: Any, function: str) -> bool:
        """Whether `function` is the first of those that the node calls, so that each node is changed once."""
        return self._beside[id(node)][0] == function

    def spread(self, direct: Mapping[str, set[str]]) -> dict[str, set[str]]:
        """The variables that each function needs for itself, for those it calls and for those called beside it."""
        needed = {name: set(some) for name, some in direct.items()}
        todo = deque(name for name, some in needed.items() if some)
        while todo:
            name = todo.popleft()
            for holder, node in self.of[name]:
                _check(node, name)
                for other in (*self._beside[id(node)], holder):
                    if other and not needed[name] <= needed[other]:
                        needed[other] |= needed[name]
                        todo.append(other)
        return needed


def _called(node: Any) -> Iterator[str]:
    """The functions that a node names."""
    yield node.op
    for key in sorted(node.attr):
        value = node.attr[key]
        kind = value.WhichOneof("value")
        for function in (value.func,) if kind == "func" else value.list.func if kind == "list" else ():
            yield function.name


def _check(node: Any, function: str) -> None:
    if node.op not in CALLS and node.op != function:
        raise UsageError(
            f"A range in the function {function!r} is to be learned, and {node.name!r} ({node.op}), which calls it,"
            ' cannot be given variables. Leave it out with --exclude, or take range = "observed" there.'
        )


def _add_arguments(body: Any, shared: list[str], named: Mapping[str, Learned]) -> dict[str, str]:
    """Adds an argument to a function for each variable; their names by those of the variables."""
    taken = {arg.name for arg in body.signature.input_arg} | {node.name for node in body.node_def}
    arguments = {}
    for one in shared:
        arguments[one] = fresh(taken, "learned_range")
        _argument(body.signature.input_arg, arguments[one], named[one])
        if "_input_shapes" in body.attr:
            body.attr["_input_shapes"].list.shape.add()
    body.signature.is_stateful = True
    return arguments


def _drop(body: Any, gone: Mapping[str, str]) -> None:
    """Takes nodes out of a function; who reads them reads arguments instead."""
    if not gone:
        return
    kept = [node for node in body.node_def if node.name not in gone]
    for node in kept:
        for slot, text in enumerate(node.input):
            if text.partition(":")[0] in gone:
                node.input[slot] = gone[text.partition(":")[0]]
    copies = [proto.NodeDef.FromString(proto.to_binary(node)) for node in kept]
    del body.node_def[:]
    body.node_def.extend(copies)


def _main_handles(graph_def: Any, variables: list[Learned], needed: set[str]) -> dict[str, str]:
    """The nodes of the main graph that make the variables, added where there are none."""
    handles = {one.shared: one.node for one in variables if one.outside}
    taken = {node.name for node in graph_def.node}
    for shared, one in by_name(variables).items():
        if shared in needed and shared not in handles:
            handles[shared] = fresh(taken, f"learned_ranges/{NO_NODE_NAME.sub('_', shared)}")
            graph_def.node.append(handle_node(handles[shared], one))
    return handles


def _hand_on(node: Any, names: list[str]) -> None:
    """Gives a call more arguments."""
    data = [text for text in node.input if not text.startswith("^")]
    after = [text for text in node.input if text.startswith("^")]
    if "_read_only_resource_inputs" in node.attr:
        node.attr["_read_only_resource_inputs"].list.i.extend(range(len(data), len(data) + len(names)))
    del node.input[:]
    node.input.extend([*data, *names, *after])
    for key in _TYPES:
        if key in node.attr and node.op in CALLS:
            node.attr[key].list.type.extend([type_number("resource")] * len(names))
    for key in _SHAPES if node.op in _LOOPS else ():
        if key in node.attr and node.attr[key].list.shape:
            for _ in names:
                node.attr[key].list.shape.add()
    if node.op in _LOOPS and _OUTPUTS in node.attr:
        node.attr[_OUTPUTS].i += len(names)
    node.op = _STATEFUL.get(node.op, node.op)


def _argument(args: Any, name: str, one: Learned) -> None:
    """Adds an argument that is the handle of a variable."""
    made = args.add(name=name, type=type_number("resource"))
    known = made.handle_data.add(dtype=type_number(one.value.dtype.name))
    known.shape.SetInParent()
    for size in one.value.shape:
        known.shape.dim.add(size=size)


def _return(body: Any, variables: Mapping[str, Learned]) -> None:
    """Makes the body of a loop return the variables that it is given, by the names of its arguments."""
    taken = {arg.name for arg in body.signature.output_arg}
    for name, one in variables.items():
        label = fresh(taken, name)
        _argument(body.signature.output_arg, label, one)
        body.ret[label] = name


def own(objects: Any, variables: Iterable[Learned], needed: Mapping[str, list[str]]) -> str:
    """Adds the variables to a SavedObjectGraph as a list of its root, and binds them to functions.

    Args:
        objects: The SavedObjectGraph, which is changed.
        variables: The variables.
        needed: Those that are the last arguments of functions, by their shared names.

    Returns:
        What the list is called: `learned_ranges`.
    """
    root, named = objects.nodes[0], by_name(variables)
    label = fresh({child.local_name for child in root.children}, "learned_ranges")
    root.children.add(node_id=len(objects.nodes), local_name=label)
    held = objects.nodes.add()
    held.user_object.identifier = "trackable_list_wrapper"
    held.user_object.version.producer = held.user_object.version.min_consumer = 1
    numbers = {}
    for at, (shared, one) in enumerate(named.items()):
        numbers[shared] = len(objects.nodes)
        held.children.add(node_id=numbers[shared], local_name=str(at))
        known = objects.nodes.add().variable
        known.dtype, known.trainable, known.name = type_number(one.value.dtype.name), one.trainable, shared
        known.shape.SetInParent()
        for size in one.value.shape:
            known.shape.dim.add(size=size)
    for function, some in needed.items():
        if function in objects.concrete_functions:
            objects.concrete_functions[function].bound_inputs.extend(numbers[shared] for shared in some)
    return label
