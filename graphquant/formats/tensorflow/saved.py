"""The functions of a SavedModel's object graph, which no signature needs to call and whoever loads the model may.

`tf.saved_model.load` gives each of them the variables that the object graph binds to its last arguments. Here they are
called by the ops of a graph of their own, "@saved", which is never written: a variable there is called as in the main
graph, and an argument that the caller gives is an empty slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import ModelError
from graphquant.formats.tensorflow.proto import dtype_name
from graphquant.formats.tensorflow.values import decode_shape
from graphquant.ir import Call, Graph, Model, Op, Output, TensorRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from graphquant.formats.tensorflow.variables import Variables

__all__ = ["SAVED", "add_saved"]

SAVED: Final = "@saved"
"""The graph that calls the saved functions; the name of a function has no "@"."""

_VALUE: Final = "VARIABLE_VALUE"


def add_saved(model: Model, objects: Any, variables: Variables) -> None:
    """Adds the graph that calls the functions of `objects`, a SavedObjectGraph, if there are any.

    Raises:
        ModelError: A function of the model has the name of that graph.
    """
    called = [name for name in sorted(objects.concrete_functions) if name in model.graphs]
    if not called:
        return
    if SAVED in model.graphs:
        raise ModelError(f"A function is called {SAVED!r}, which is no name of a function. The model file is damaged.")
    graph = model.graphs[SAVED] = Graph(SAVED, model.graphs)
    model.saved = (SAVED,)
    bound = _Bound(model, graph, objects, variables)
    for name in called:
        arguments = model.graphs[name].inputs
        captured = [bound.tensor(node) for node in objects.concrete_functions[name].bound_inputs]
        given = max(len(arguments) - len(captured), 0)
        op = Op(name=f"@{name}", kind="call", type="_SavedFunction", calls=(Call("f", name, 0),))
        graph.add(op, [None] * given + captured)


class _Bound:
    """What the object graph binds to the arguments of functions."""

    def __init__(self, model: Model, graph: Graph, objects: Any, variables: Variables) -> None:
        self._model = model
        self._graph = graph
        self._objects = objects.nodes
        self._variables = variables
        self._keys = _keys(objects.nodes, variables)
        self._names: dict[str, str] = {}
        self._by_shared: dict[str, list[str]] = {}
        for op in model.main.ops():
            if op.kind == "variable":
                key = variables.key(op.source)
                if key is not None:
                    self._names.setdefault(key, op.name)
                self._by_shared.setdefault(str(op.attrs.get("shared_name") or op.name), []).append(op.name)
        self._passed = dict(_passed(model, objects))
        self._found: dict[int, TensorRef | None] = {}

    def tensor(self, number: int) -> TensorRef | None:
        """The variable or constant that is object `number`, None for other objects."""
        if number not in self._found:
            known = self._objects[number] if 0 <= number < len(self._objects) else None
            kind = None if known is None else known.WhichOneof("kind")
            if known is not None and kind == "variable":
                self._found[number] = self._variable(number, known.variable)
            elif known is not None and kind == "constant":
                self._found[number] = self._constant(known.constant.operation)
            else:
                self._found[number] = None
        return self._found[number]

    def _variable(self, number: int, known: Any) -> TensorRef:
        key = self._keys.get(number)
        shared = self._by_shared.get(known.name, [])
        name = self._passed.get(number) or self._names.get(key or "")
        name = name or (shared[0] if key is None and len(shared) == 1 else f"@{number}")
        if name in self._graph:
            return TensorRef(SAVED, name)
        output = Output(name, dtype_name(known.dtype), decode_shape(known.shape))
        value = self._variables.read(key)
        return self._graph.add(
            Op(name=name, kind="variable", type="VarHandleOp", roles=(), outputs=(output,), value=value)
        )

    def _constant(self, name: str) -> TensorRef | None:
        if name not in self._model.main or self._model.main.op(name).kind != "constant":
            return None
        if name not in self._graph:
            self._graph.add(self._model.main.op(name))
        return TensorRef(SAVED, name)


def _passed(model: Model, objects: Any) -> Iterator[tuple[int, str]]:
    """Objects and the variables that the main graph passes for them to functions; Keras may have two of each."""
    for op in model.main.ops():
        for call in op.calls:
            if call.graph in objects.concrete_functions:
                numbers = objects.concrete_functions[call.graph].bound_inputs
                slots = model.main.slots(op.name)
                for number, slot in zip(reversed(numbers), reversed(slots), strict=False):
                    if slot is not None and model.op(slot).kind == "variable":
                        yield number, slot.op


def _keys(nodes: Any, variables: Variables) -> Mapping[int, str]:
    """Keys of the checkpoint by position in the object graph: the same children lead to the same variable."""
    saved = variables.checkpoint.object_graph() if variables.checkpoint is not None else None
    found: dict[int, str] = {}
    if saved is None or not len(nodes) or not len(saved.nodes):
        return found
    todo, seen = [(0, 0)], {0}
    for here, there in todo:
        for attribute in saved.nodes[there].attributes:
            if attribute.name == _VALUE:
                found[here] = attribute.checkpoint_key
        children = {child.local_name: child.node_id for child in saved.nodes[there].children}
        for child in nodes[here].children:
            twin = children.get(child.local_name, -1)
            if child.node_id not in seen and 0 <= child.node_id < len(nodes) and 0 <= twin < len(saved.nodes):
                seen.add(child.node_id)
                todo.append((child.node_id, twin))
    return found
