"""The variables of a SavedModel with their checkpoint keys, and the functions of its object graph.

A user may call these functions although no signature calls them.
`tf.saved_model.load` passes each of them the variables that the object graph binds to its last arguments. In a `Model`
the ops of an extra graph, "@saved", call them. That graph is never written. A variable has the same name there as in
the main graph, and an argument from the caller is an empty slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from graphquant.errors import ModelError
from graphquant.formats.tensorflow.ops import VARIABLE_OP_TYPES
from graphquant.formats.tensorflow.proto import dtype_name
from graphquant.formats.tensorflow.values import decode_shape
from graphquant.ir import Call, Graph, Model, Op, Output, TensorRef

if TYPE_CHECKING:
    from graphquant.formats.tensorflow.checkpoint import Checkpoint

SAVED_GRAPH: Final = "@saved"  # the graph that calls the saved functions. No function's name contains "@".
VARIABLE_VALUE: Final = "VARIABLE_VALUE"  # the attribute of an object with the variable's value


def add_saved_functions(model: Model, saved_objects: Any, variables: CheckpointVariables) -> None:
    """Add a graph that calls the functions of `saved_objects`, a SavedObjectGraph, if there are any."""
    function_names = [name for name in sorted(saved_objects.concrete_functions) if name in model.graphs]
    if not function_names:
        return
    if SAVED_GRAPH in model.graphs:
        raise ModelError(
            f"A function is called {SAVED_GRAPH!r}, which no function may be named. The model file is damaged."
        )
    graph = model.graphs[SAVED_GRAPH] = Graph(SAVED_GRAPH, model.graphs)
    model.saved_functions = (SAVED_GRAPH,)
    bound_inputs = _BoundInputs(model, graph, saved_objects, variables)
    for name in function_names:
        arguments = model.graphs[name].inputs
        captures = [bound_inputs.resolve(node) for node in saved_objects.concrete_functions[name].bound_inputs]
        argument_count = max(len(arguments) - len(captures), 0)
        op = Op(name=f"@{name}", kind="call", type="_SavedFunction", calls=(Call("f", name, 0),))
        graph.add_op(op, [None] * argument_count + captures)


class _BoundInputs:
    """The variables and constants that the object graph binds to function arguments."""

    def __init__(self, model: Model, graph: Graph, saved_objects: Any, variables: CheckpointVariables) -> None:
        self._main = model.main
        self._graph = graph
        self._objects = saved_objects.nodes
        self._variables = variables
        self._keys = _checkpoint_keys(saved_objects.nodes, variables)
        self._names_by_key: dict[str, str] = {}
        self._names_by_shared_name: dict[str, list[str]] = defaultdict(list)
        # The variables that the main graph passes for an object. Keras may save a variable twice.
        self._main_bindings: dict[int, str] = {}
        for op in model.main.ops():
            if op.kind == "variable":
                key = variables.checkpoint_key(op.source)
                if key is not None:
                    self._names_by_key.setdefault(key, op.name)
                self._names_by_shared_name[str(op.attrs.get("shared_name") or op.name)].append(op.name)
            for call in op.calls:
                if call.graph in saved_objects.concrete_functions:
                    node_ids = saved_objects.concrete_functions[call.graph].bound_inputs
                    for node_id, slot in zip(reversed(node_ids), reversed(model.main.slots(op.name)), strict=False):
                        if slot is not None and model.op(slot).kind == "variable":
                            self._main_bindings[node_id] = slot.op

    def resolve(self, node_id: int) -> TensorRef | None:
        """Return the variable or constant of object `node_id`, None for other objects."""
        if not 0 <= node_id < len(self._objects):
            return None
        saved_object = self._objects[node_id]
        match saved_object.WhichOneof("kind"):
            case "variable":
                return self._resolve_variable(node_id, saved_object.variable)
            case "constant":
                name = saved_object.constant.operation
                if name in self._main and self._main.op(name).kind == "constant":
                    if name not in self._graph:
                        self._graph.add_op(self._main.op(name))
                    return TensorRef(SAVED_GRAPH, name)
        return None

    def _resolve_variable(self, node_id: int, saved_variable: Any) -> TensorRef:
        key = self._keys.get(node_id)
        candidates = self._names_by_shared_name.get(saved_variable.name, [])
        name = self._main_bindings.get(node_id) or self._names_by_key.get(key or "")
        name = name or (candidates[0] if key is None and len(candidates) == 1 else f"@{node_id}")
        if name in self._graph:
            return TensorRef(SAVED_GRAPH, name)
        output = Output(name, dtype_name(saved_variable.dtype), decode_shape(saved_variable.shape))
        value = self._variables.key_reader(key)
        op = Op(name=name, kind="variable", type="VarHandleOp", roles=(), outputs=(output,), read_value=value)
        return self._graph.add_op(op)


def _checkpoint_keys(nodes: Any, variables: CheckpointVariables) -> Mapping[int, str]:
    """Return checkpoint keys by position in the object graph: the same path of children leads to the same variable."""
    saved_graph = variables.checkpoint.object_graph() if variables.checkpoint is not None else None
    keys: dict[int, str] = {}
    if saved_graph is None or not len(nodes) or not len(saved_graph.nodes):
        return keys
    pending, visited = [(0, 0)], {0}
    for node_id, saved_id in pending:
        for attribute in saved_graph.nodes[saved_id].attributes:
            if attribute.name == VARIABLE_VALUE:
                keys[node_id] = attribute.checkpoint_key
        children = {child.local_name: child.node_id for child in saved_graph.nodes[saved_id].children}
        for child in nodes[node_id].children:
            saved_child = children.get(child.local_name, -1)
            exists = 0 <= child.node_id < len(nodes) and 0 <= saved_child < len(saved_graph.nodes)
            if exists and child.node_id not in visited:
                visited.add(child.node_id)
                pending.append((child.node_id, saved_child))
    return keys


_ASSIGN_OPS: Final = frozenset({"AssignVariableOp", "Assign"})
_MAX_HOPS: Final = 16  # a damaged graph may contain a cycle


class CheckpointVariables(NamedTuple):
    """The values of a model's variables."""

    checkpoint: Checkpoint | None  # the checkpoint with the values, None if there is none
    keys: Mapping[str, str]  # keys of the checkpoint by node name or shared name of a variable

    def checkpoint_key(self, node: Any) -> str | None:
        """Return the key of the variable that `node` makes, None if it has no value."""
        return self.keys.get(node.name) or self.keys.get(get_shared_name(node))

    def key_reader(self, key: str | None) -> Callable[[], Any] | None:
        """Return a reader of the value under `key`, None if there is none."""
        return None if self.checkpoint is None or key is None else partial(self.checkpoint.read, key)


def resolve_variables(meta_graphs: Iterable[Any], checkpoint: Checkpoint) -> dict[str, str]:
    """Map the variables of MetaGraphDefs to keys of their checkpoint.

    The model's restore operations decide. A variable without one is looked up by its name, first in the checkpoint's
    object graph and then among its keys, as TF1 uses them. Names alone are not enough: a TF2 model may have two
    variables of the same name, of which only the node names differ.

    An ambiguous name gets no key. Nor do the slices of a partitioned TF1 variable, which are read under the name of the
    complete variable.

    Returns:
        Keys of the checkpoint by node name of a variable operation, and by its `shared_name` if that is unambiguous and
        not the name of another node. Look a variable up by node name first.

    Raises a ModelError if the checkpoint's object graph is damaged.
    """
    by_full_name: dict[str, set[str]] = defaultdict(set)
    objects = checkpoint.object_graph()
    for saved_object in objects.nodes if objects is not None else ():
        for attribute in saved_object.attributes:
            if attribute.name == VARIABLE_VALUE and attribute.full_name:
                by_full_name[attribute.full_name].add(attribute.checkpoint_key)
    by_node: dict[str, set[str]] = defaultdict(set)
    by_shared_name: dict[str, set[str]] = defaultdict(set)
    for meta_graph in meta_graphs:
        graph = meta_graph.graph_def
        restored = _restored_keys(graph)
        for node in graph.node:
            if node.op in VARIABLE_OP_TYPES:
                shared_name = get_shared_name(node)
                keys = restored.get(node.name) or by_full_name.get(shared_name) or {shared_name}
                by_node[node.name] |= keys
                by_shared_name[shared_name] |= keys
        for function in graph.library.function:
            for shared_name in (get_shared_name(node) for node in function.node_def if node.op in VARIABLE_OP_TYPES):
                by_shared_name.setdefault(shared_name, set(by_full_name.get(shared_name) or {shared_name}))
    for shared_name, keys in by_shared_name.items():
        by_node.setdefault(shared_name, keys)
    return {name: key for name, keys in by_node.items() if len(keys) == 1 for key in keys if key in checkpoint.names}


def get_shared_name(node: Any) -> str:
    """Return the name of a variable in sessions: that of its node if it has no other."""
    # Reading an absent attribute would add it to the message.
    shared = node.attr["shared_name"].s if "shared_name" in node.attr else b""
    return shared.decode(errors="replace") or str(node.name)


def _restored_keys(graph: Any) -> dict[str, set[str]]:
    """Return the restored keys by variable node: from restores in the graph (TF1) and in functions (TF2)."""
    keys_by_variable: dict[str, set[str]] = defaultdict(set)
    for name, key in _restored_variables(graph.node):
        keys_by_variable[name].add(key)
    bodies = {function.signature.name: function for function in graph.library.function}
    for call in graph.node:
        body = bodies.get(call.attr["f"].func.name) if "f" in call.attr else None
        if body is None:
            continue
        arguments = dict(zip((arg.name for arg in body.signature.input_arg), call.input, strict=False))
        for argument, key in _restored_variables(body.node_def):
            if argument in arguments:
                keys_by_variable[_producer_name(arguments[argument])].add(key)
    return keys_by_variable


def _restored_variables(nodes: Iterable[Any]) -> Iterator[tuple[str, str]]:
    """Yield variable (node or argument) and key of every assignment of a restored value."""
    by_name = {node.name: node for node in nodes}
    for node in by_name.values():
        if node.op not in _ASSIGN_OPS or len(node.input) < 2:  # noqa: PLR2004 - variable and value
            continue
        value = node.input[1]
        for _ in range(_MAX_HOPS):
            source = by_name.get(_producer_name(value))
            if source is None or source.op != "Identity":
                break
            value = source.input[0] if source.input else ""
        source = by_name.get(_producer_name(value))
        if source is None or source.op != "RestoreV2" or len(source.input) < 3:  # noqa: PLR2004 - prefix, names, slices
            continue
        # The 1 of `node:1` in a graph and of `node:output:1` in a function.
        digits = value.rpartition(":")[2] if ":" in value else "0"
        index = int(digits) if digits.isdecimal() and len(digits) < 10 else 0  # noqa: PLR2004 - no op has more outputs
        slice_spec = _string_element(by_name.get(_producer_name(source.input[2])), index)
        # A slice of a partitioned variable has no key; "" prevents a lookup of the variable by name.
        key = _string_element(by_name.get(_producer_name(source.input[1])), index) if not slice_spec else ""
        if key is not None:
            yield _producer_name(node.input[0]), key


def _producer_name(tensor: str) -> str:
    return tensor.partition(":")[0]


def _string_element(node: Any, index: int) -> str | None:
    """Return an element of a string constant. Its last element repeats if it is shorter than its shape."""
    if node is None or node.op != "Const" or "value" not in node.attr:
        return None
    values = node.attr["value"].tensor.string_val
    return values[min(index, len(values) - 1)].decode(errors="replace") if values else None
