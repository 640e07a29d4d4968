"""Whether samples may be joined along axis 0 of every input of a TensorFlow model.

`graphquant.formats.rows` shows it op by op. For that, functions are put in place of their calls, in a copy without the
data of weights and variables, of which TensorFlow infers the shapes. Loops and branches are refused.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import networkx as nx

from graphquant.errors import ModelError
from graphquant.formats.rows import COUNTS, Shown, kept_apart
from graphquant.formats.tensorflow import proto
from graphquant.formats.tensorflow.emit import emit
from graphquant.formats.tensorflow.rows import TABLE
from graphquant.formats.tensorflow.session import shapes_of
from graphquant.formats.tensorflow.values import type_number
from graphquant.ir import Graph, Op, TensorRef, bulk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy as np

    from graphquant.formats import InputSpec
    from graphquant.ir import Model, Shape

__all__ = ["batchable"]

REFUSED: Final = frozenset({"enter", "exit", "if", "loop_cond", "merge", "next_iteration", "random", "switch", "while"})
"""Kinds of which one anywhere makes the answer no, before any work is done."""

MAX_OPS: Final = 1 << 17
"""Ops that a model may have with its functions in place of their calls."""

SMALL: Final = 1 << 10
"""Elements up to which constants keep their values: they may be shapes or axes."""


@bulk()
def batchable(tensorflow: Any, model: Model, inputs: Sequence[InputSpec], outputs: Iterable[TensorRef]) -> bool:
    """Whether samples may be joined along axis 0 of all `inputs` and each of `outputs` is still that of its sample."""
    if not inputs or any(not spec.shape or spec.shape[0] is not None for spec in inputs):
        return False
    if any(op.kind in REFUSED for name in model.live() for op in model.graphs[name].ops()):
        return False
    flat = _Flat(model)
    try:
        for number, tensor in enumerate(outputs):
            flat.end(number, tensor)
    except _RefusedError:
        return False
    fed = [flat.places[TensorRef("", spec.name)].op for spec in inputs if TensorRef("", spec.name) in flat.places]
    try:
        known = [shapes_of(tensorflow, flat.message(fed, count)) for count in COUNTS]
    except ModelError:  # some number of rows does not fit
        return False
    shown = Shown(
        inputs=frozenset(fed), shape=lambda tensor, index: known[index].get((tensor.op, tensor.port)), value=flat.value
    )
    return kept_apart(flat.graph, shown, TABLE)


class _RefusedError(Exception):
    """What is said here cannot be put into one graph."""


class _Flat:
    """What some tensors of a model are made from, functions and all, as one graph of new names.

    Attributes:
        graph: The graph.
        places: Where the tensors of the main graph are in it.
    """

    def __init__(self, model: Model) -> None:
        message = emit(model)
        graph_def = model.source.graph_def(message)
        self._model = model
        self._nodes = {"": {node.name: node for node in graph_def.node}}
        for function in graph_def.library.function:
            self._nodes[function.signature.name] = {node.name: node for node in function.node_def}
        self._made = proto.GraphDef(versions=graph_def.versions)
        self.graph = Graph("", {})
        self.graph.graphs[""] = self.graph
        self.places: dict[TensorRef, TensorRef] = {}

    def end(self, number: int, tensor: TensorRef) -> None:
        """Adds an output and what leads to it."""
        (source,) = self._add("", [tensor], self.places, ())
        self.graph.add(Op(name=f"@{number}", kind="output", type="_Retval"), [source])

    def message(self, fed: Sequence[str], count: int) -> Any:
        """The GraphDef in which each of the inputs `fed` has that many rows."""
        made = proto.GraphDef()
        made.CopyFrom(self._made)
        wanted = set(fed)
        for node in made.node:
            if node.name in wanted:
                node.attr["shape"].shape.dim[0].size = count
        return made

    def value(self, tensor: TensorRef) -> Callable[[], np.ndarray[Any, Any]] | None:
        """Gives the value of a constant, also behind Identity ops; None for other tensors."""
        op = self.graph.op(tensor.op)
        while op.kind == "identity":
            (source,) = self.graph.slots(op.name)[:1]
            if source is None:
                return None
            op = self.graph.op(source.op)
        return op.value if op.kind == "constant" else None

    def _add(
        self, name: str, tensors: Iterable[TensorRef], places: dict[TensorRef, TensorRef], around: tuple[str, ...]
    ) -> list[TensorRef]:
        """Adds what `tensors` of the graph called `name` are made from; returns where they are.

        Args:
            name: The main graph or a function.
            tensors: What is wanted.
            places: Where tensors of this call of the function are already.
            around: The functions on the way to it.
        """
        if name in around:
            raise _RefusedError
        graph, wanted = self._model.graphs[name], list(tensors)
        leading = {tensor.op for tensor in wanted}
        todo = list(leading)
        while todo:
            for source in graph.slots(todo.pop()):
                if source is not None and source.op not in leading:
                    leading.add(source.op)
                    todo.append(source.op)
        for label in nx.topological_sort(graph.nx):
            if label in leading and TensorRef(name, label) not in places:
                self._op(graph, graph.op(label), places, (*around, name))
        return [places[tensor] for tensor in wanted]

    def _op(self, graph: Graph, op: Op, places: dict[TensorRef, TensorRef], around: tuple[str, ...]) -> None:
        slots = [None if slot is None else places[slot] for slot in graph.slots(op.name)]
        found = self._call(op, slots, around) if op.kind == "call" else self._copy(graph, op, slots)
        places.update((TensorRef(graph.name, op.name, port), tensor) for port, tensor in enumerate(found))

    def _call(self, op: Op, slots: Sequence[TensorRef | None], around: tuple[str, ...]) -> list[TensorRef]:
        if len(op.calls) != 1 or op.type not in {"PartitionedCall", "StatefulPartitionedCall"}:
            raise _RefusedError
        body = self._model.graphs[op.calls[0].graph]
        given = {
            TensorRef(body.name, label): slot
            for label, slot in zip(body.inputs, slots, strict=True)
            if slot is not None
        }
        results = [body.slots(label)[0] for label in body.outputs]
        return self._add(body.name, [result for result in results if result is not None], given, around)

    def _copy(self, graph: Graph, op: Op, slots: Sequence[TensorRef | None]) -> list[TensorRef]:
        if len(self.graph) >= MAX_OPS:
            raise _RefusedError
        name = f"n{len(self.graph)}"
        value = op.value if op.kind == "constant" else None
        light = op.kind in {"constant", "read_variable"} and not self._small(op)
        node = self._made.node.add(name=name)
        if light or op.kind == "variable" or (op.kind == "input" and not slots):
            _placeholder(node, op.outputs[0].dtype, op.outputs[0].shape)
        else:
            node.op = op.type
            for key, attr in _attributes(self._nodes[graph.name].get(op.name)).items():
                node.attr[key].CopyFrom(attr)
            node.input.extend(f"{slot.op}:{slot.port}" for slot in slots if slot is not None)
        kept = () if op.kind == "read_variable" else slots
        self.graph.add(replace(op, name=name, value=value, calls=(), source=None), kept)
        return [TensorRef("", name, port) for port in range(len(op.outputs))]

    def _small(self, op: Op) -> bool:
        shape = op.outputs[0].shape
        return op.kind == "constant" and (shape is None or prod(size or 0 for size in shape) <= SMALL)


def _attributes(node: Any) -> Mapping[str, Any]:
    if node is None:
        raise _RefusedError
    return {key: node.attr[key] for key in node.attr if not key.startswith("_")}


def _placeholder(node: Any, dtype: str | None, shape: Shape | None) -> None:
    """Makes `node` one that stands for a value of which only the shape is known."""
    node.op = "Placeholder"
    node.attr["dtype"].type = type_number(dtype or "float32")
    if shape is None:
        node.attr["shape"].shape.unknown_rank = True
    else:
        for size in shape:
            node.attr["shape"].shape.dim.add(size=-1 if size is None else size)
