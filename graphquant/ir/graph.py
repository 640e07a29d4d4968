"""`Graph` and `Model`: networkx graphs of ops, and the few edits that everything is made of.

Ops are nodes. A filled input slot is an edge keyed by the slot's number; a control edge is keyed `CONTROL_EDGE`. A tensor
that is read inside the body of an op (ONNX If, Loop, Scan) is a capture: in the producer's graph an edge from the
producer to the op that owns the body, keyed `("capture", use)`. Each node also keeps its slots in order, so that
"what feeds this slot" and "who reads this tensor" both cost only their own edges.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphquant.errors import InternalError, UsageError
from graphquant.ir.types import Op, Output, TensorRef, Use
from graphquant.utils.notebook_html import HtmlRepresentation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np


CONTROL_EDGE = "control"


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pauses Python's cyclic collector while many ops are made; without it the cost per op grows with the graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graph:
    """One graph of a model: the main one, a body or a function.

    Attributes:
        name: "" for the main graph.
        nx: The `networkx.MultiDiGraph`; node data `op` is the `Op`, `slots` the list of what each input slot reads.
        graphs: The graphs of the model by name, shared by all of them.
        parent: Graph and op that own this body; None for the main graph and for functions.
        inputs: Names of the ops of kind "input", in the order of the graph's signature.
        outputs: Names of the ops of kind "output", in the same order.
        rerouted_uses: Uses whose source changed since load.
        anchor: What ops that are added are for, "" if that is not to be noted.
    """

    def __init__(
        self,
        name: str,
        graphs: dict[str, Graph],
        *,
        parent: tuple[str, str] | None = None,
        reserved_names: set[str] | None = None,
    ) -> None:
        """`reserved_names` holds names that new ops must not get; graphs whose values share one name space share the set."""
        import networkx as nx  # here, so that rule files can be read without it

        self.name = name
        self.graphs = graphs
        self.parent = parent
        self.nx: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.rerouted_uses: set[Use] = set()
        self.removed_ops: set[str] = set()
        self.anchor = ""
        self.reserved_names: set[str] = set() if reserved_names is None else reserved_names

    # -- reading ---------------------------------------------------------------------------------

    @property
    def is_function(self) -> bool:
        """Whether it is a function of the model: not the main graph, and no body of an op."""
        return bool(self.name) and self.parent is None

    def __contains__(self, name: str) -> bool:
        return name in self.nx

    def __len__(self) -> int:
        return len(self.nx)

    def ops(self) -> Iterator[Op]:
        """All ops, in the order they were added."""
        for _, data in self.nx.nodes(data=True):
            yield data["op"]

    def topological_order(self) -> list[str]:
        """The names of the ops, each after those it has edges from; those in a ring, or behind one, are left out."""
        successors = {name: list(targets) for name, targets in self.nx.adjacency()}
        pending_inputs = dict.fromkeys(successors, 0)
        for targets in successors.values():
            for target in targets:
                pending_inputs[target] += 1
        ready = [name for name, count in pending_inputs.items() if not count]
        for name in ready:  # grows meanwhile
            for target in successors[name]:
                pending_inputs[target] -= 1
                if not pending_inputs[target]:
                    ready.append(target)
        return ready

    def op(self, name: str) -> Op:
        """The op called `name`; a KeyError if there is none."""
        return self.nx.nodes[name]["op"]  # type: ignore[no-any-return]  # node data is untyped

    def slots(self, name: str) -> list[TensorRef | None]:
        """What each input slot of op `name` reads, None for an empty slot. Not to be changed by the caller."""
        return self.nx.nodes[name]["slots"]  # type: ignore[no-any-return]  # node data is untyped

    def source_of(self, use: Use) -> TensorRef | None:
        """The tensor read at `use`, which must be in this graph."""
        slots = self.slots(use.op)
        return slots[use.slot] if 0 <= use.slot < len(slots) else None

    def consumers(self, tensor: TensorRef) -> list[Use]:
        """Every place that reads `tensor`, in bodies too, in the order in which their ops were first wired to it."""
        return self.graphs[tensor.graph].consumers_by_port(tensor.op).get(tensor.port, [])

    def consumers_by_port(self, name: str) -> dict[int, list[Use]]:
        """The consumers of each output port of op `name`."""
        by_port: dict[int, list[Use]] = {}
        for target, edges in self.nx.adj[name].items():
            key: Any  # a slot, CONTROL or ("capture", use)
            for key, data in edges.items():
                if isinstance(key, int):
                    by_port.setdefault(data["port"], []).append(Use(self.name, target, key))
                elif key != CONTROL_EDGE:
                    by_port.setdefault(data["port"], []).append(key[1])
        return by_port

    def control_inputs(self, name: str) -> list[str]:
        """Ops that must run before op `name` by a control edge."""
        return [source for source, edges in self.nx.pred[name].items() if CONTROL_EDGE in edges]

    def output(self, tensor: TensorRef) -> Any:
        """What is known of `tensor`, an `Output`; the tensor may live in an enclosing graph."""
        return self.graphs[tensor.graph].op(tensor.op).outputs[tensor.port]

    def edge_data(self, use: Use, tensor: TensorRef) -> dict[str, Any] | None:
        """The data of the edge that stands for `use`, of this graph, reading `tensor`; None if it is missing."""
        source_graph, target, key = self._edge_key(use, tensor)
        data: dict[str, Any] | None = source_graph.nx.get_edge_data(tensor.op, target, key=key)
        return data

    # -- building and editing --------------------------------------------------------------------

    def unique_name(self, name: str) -> str:
        """`name`, or with the smallest free `_k` behind it."""
        if name not in self.reserved_names and name not in self.nx:
            return name
        suffix = 1
        while f"{name}_{suffix}" in self.reserved_names or f"{name}_{suffix}" in self.nx:
            suffix += 1
        return f"{name}_{suffix}"

    def add_op(
        self, op: Op, inputs: Sequence[TensorRef | None] = (), *, control_sources: Iterable[str] = ()
    ) -> TensorRef:
        """Adds `op` reading `inputs`, with control edges from the ops `control_sources`; returns its first output."""
        if op.name in self.nx:
            raise InternalError(f"op {op.name!r} is already in graph {self.name!r}.")
        self.nx.add_node(op.name, op=replace(op, anchor=self.anchor) if self.anchor else op, slots=[])
        self.reserved_names.add(op.name)
        self.reserved_names.update(output.name for output in op.outputs if output.name)
        self.connect_inputs(op.name, inputs, control_sources=control_sources)
        return TensorRef(self.name, op.name, 0)

    def connect_inputs(
        self, name: str, inputs: Sequence[TensorRef | None], *, control_sources: Iterable[str] = ()
    ) -> None:
        """Gives an op that was added without inputs its inputs; loops need their ops before their edges."""
        slots = self.slots(name)
        slots.extend([None] * len(inputs))
        for slot, tensor in enumerate(inputs):
            if tensor is not None:
                slots[slot] = tensor
                self._add_data_edge(Use(self.name, name, slot), tensor)
        for source in control_sources:
            if source not in self.nx:
                raise InternalError(f"op {name!r} is to run after {source!r}, which graph {self.name!r} does not hold.")
            self.nx.add_edge(source, name, key=CONTROL_EDGE)

    def set_source(self, use: Use, tensor: TensorRef | None) -> None:
        """Makes `use` read `tensor` (None empties the slot), whatever it read before."""
        if tensor is not None:
            self._checked_edge_key(use, tensor)  # refuses before anything is changed
        slots = self.slots(use.op)
        slots.extend([None] * (use.slot + 1 - len(slots)))
        old_source = slots[use.slot]
        if old_source is not None:
            self._remove_data_edge(use, old_source)
        slots[use.slot] = tensor
        if tensor is not None:
            self._add_data_edge(use, tensor)
        self.rerouted_uses.add(use)

    def reroute(self, tensor: TensorRef, uses: Iterable[Use], target: TensorRef) -> int:
        """Makes exactly `uses`, which read `tensor` now, read `target`; returns how many there were.

        Raises:
            UsageError: A tensor does not exist, a use does not read `tensor`, or `target` has another dtype or shape, or is
                out of the use's sight. Nothing is changed then.
        """
        old_output, new_output = self._require_output(tensor), self._require_output(target)
        if old_output.dtype is not None and new_output.dtype is not None and old_output.dtype != new_output.dtype:
            raise UsageError(
                f"{target} is {new_output.dtype} and {tensor} is {old_output.dtype}. Only tensors of one dtype can be swapped."
            )
        if not _shapes_compatible(old_output.shape, new_output.shape):
            raise UsageError(
                f"{target} has shape {new_output.shape} and {tensor} has {old_output.shape}. Their shapes must agree."
            )
        unique_uses = list(dict.fromkeys(uses))
        for use in unique_uses:
            reader_graph = self.graphs.get(use.graph)
            if reader_graph is None or use.op not in reader_graph or reader_graph.source_of(use) != tensor:
                valid_uses = _format_uses(self.consumers(tensor))
                raise UsageError(f"{use} does not read {tensor}. Name a use that does: {valid_uses}.")
            if not reader_graph.can_read(target.graph):
                raise UsageError(f"{use} cannot read {target}: graph {target.graph!r} does not enclose {use.graph!r}.")
        for use in unique_uses:
            self.graphs[use.graph].set_source(use, target)
        return len(unique_uses)

    def replace_op(self, op: Op) -> None:
        """Puts `op` in the place of the op of the same name; its inputs stay wired."""
        self.nx.nodes[op.name]["op"] = op
        self.reserved_names.update(output.name for output in op.outputs if output.name)

    def remove_op(self, name: str) -> None:
        """Takes out op `name`, which nothing may read any more."""
        remaining_uses = [use for uses in self.consumers_by_port(name).values() for use in uses]
        if remaining_uses:
            raise InternalError(
                f"op {name!r} is still read by {_format_uses(remaining_uses)}; reroute its consumers before removing it."
            )
        owned_bodies = [call.graph for call in self.op(name).calls if self._owns_body(name, call.graph)]
        if owned_bodies:
            raise InternalError(
                f"op {name!r} still owns the body {owned_bodies[0]!r}; it cannot be removed without it."
            )
        for slot, tensor in enumerate(self.slots(name)):
            use = Use(self.name, name, slot)
            self.rerouted_uses.discard(use)
            if tensor is not None and tensor.graph != self.name:
                self._remove_data_edge(use, tensor)
        self.nx.remove_node(name)
        self.removed_ops.add(name)

    def _owns_body(self, name: str, body: str) -> bool:
        return body in self.graphs and self.graphs[body].parent == (self.name, name)

    def can_read(self, graph: str) -> bool:
        """Whether ops of this graph may read tensors of `graph`: the graph itself or one that encloses it."""
        enclosing: Graph = self
        while enclosing.name != graph:
            if enclosing.parent is None:
                return False
            enclosing = self.graphs[enclosing.parent[0]]
        return True

    def _require_output(self, tensor: TensorRef) -> Output:
        source_graph = self.graphs.get(tensor.graph)
        if (
            source_graph is None
            or tensor.op not in source_graph
            or not 0 <= tensor.port < len(source_graph.op(tensor.op).outputs)
        ):
            raise UsageError(f"The model has no tensor {tensor}. `graphquant inspect` lists those it has.")
        return source_graph.op(tensor.op).outputs[tensor.port]

    def _add_data_edge(self, use: Use, tensor: TensorRef) -> None:
        source_graph, target, key = self._checked_edge_key(use, tensor)
        source_graph.nx.add_edge(tensor.op, target, key=key, port=tensor.port)

    def _remove_data_edge(self, use: Use, tensor: TensorRef) -> None:
        source_graph, target, key = self._edge_key(use, tensor)
        source_graph.nx.remove_edge(tensor.op, target, key=key)

    def _checked_edge_key(self, use: Use, tensor: TensorRef) -> tuple[Graph, str, Any]:
        """`_edge_key`, which must be one between ops that are there."""
        source_graph, target, key = self._edge_key(use, tensor)
        if use.slot < 0 or tensor.op not in source_graph.nx or target not in source_graph.nx:
            raise InternalError(f"{use} reads {tensor}, which graph {tensor.graph!r} does not hold.")
        return source_graph, target, key

    def _edge_key(self, use: Use, tensor: TensorRef) -> tuple[Graph, str, Any]:
        """Graph, target op and key of the edge that stands for `use` reading `tensor`."""
        if tensor.graph == self.name:
            return self, use.op, use.slot
        enclosing, target = self, use.op
        while enclosing.name != tensor.graph:
            if enclosing.parent is None:
                raise InternalError(f"{use} cannot read {tensor}: it is in no enclosing graph.")
            parent, target = enclosing.parent
            enclosing = self.graphs[parent]
        return enclosing, target, ("capture", use)


@dataclass(slots=True, kw_only=True, eq=False)
class Model(HtmlRepresentation):
    """A loaded model: its graphs, and the source message that emit patches a copy of.

    Attributes:
        format: Key of the format table ("onnx", "tensorflow", "tflite").
        graphs: Graphs by name, the main one ("") first.
        source: What the format read; only the format knows its type.
        path: Where the model came from, None for one built in memory.
        digest: Hex SHA-256 of the source, external data and variables not included.
        evaluate_op: Gives the outputs of one pure op for input arrays, or None if it cannot; None where the format cannot.
        opset: The ONNX default domain's opset; 0 for the others.
        entry_graphs: The graphs that a run may start with; a TFLite file has one for each signature.
        saved_functions: Graphs that no run starts with and that say what whoever loads the model may call, and with which
            variables: the saved functions of a SavedModel.
        live_object: The object in memory that the model was made of ("the session"), "" for a file. Its variables go on
            training, so that none may become a constant.
        save_model: Writes the model, set by whoever loaded it.
        provenance: What a written model is to say of where it came from, by key; None leaves what it says.
        original_model: The model that the record in a written one is to give back; None where there is to be none.
    """

    format: str
    graphs: dict[str, Graph] = field(default_factory=dict)
    source: Any = None
    path: Path | None = None
    digest: str = ""
    evaluate_op: Callable[[Op, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]] | None] | None = None
    opset: int = 0
    entry_graphs: tuple[str, ...] = ("",)
    saved_functions: tuple[str, ...] = ()
    live_object: str = ""
    save_model: Callable[[Model, Path, bool], Path] | None = None
    provenance: dict[str, str] | None = None
    original_model: Model | None = None

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the model to `path`, whole or not at all; returns the path.

        Raises:
            UsageError: There is something at `path` and `force` is not given, or it cannot be written.
            ModelError: The model has no such form.
        """
        if self.save_model is None:
            raise InternalError("this model was built without a loader; use graphquant.save(model, path).")
        return self.save_model(self, Path(path), force)

    @property
    def main(self) -> Graph:
        """The main graph."""
        return self.graphs[""]

    def op(self, tensor: TensorRef) -> Op:
        """The op that produces `tensor`."""
        return self.graphs[tensor.graph].op(tensor.op)

    def output(self, tensor: TensorRef) -> Any:
        """What is known of `tensor`, an `Output`."""
        return self.op(tensor).outputs[tensor.port]

    def callers(self) -> dict[str, list[tuple[Use, Any]]]:
        """For each graph the ops that run it: (`Use` of the op with slot 0, `Call`)."""
        callers_of: dict[str, list[tuple[Use, Any]]] = {}
        for graph in self.graphs.values():
            for op in graph.ops():
                for call in op.calls:
                    callers_of.setdefault(call.graph, []).append((Use(graph.name, op.name, 0), call))
        return callers_of

    def reachable_graphs(self) -> list[str]:
        """Graphs that a run can reach, the main one first."""
        return self.graphs_reachable_from(self.entry_graphs)

    def graphs_reachable_from(self, starts: Iterable[str]) -> list[str]:
        """The graphs `starts` and all that they call."""
        queue = list(starts)
        visited = set(queue)
        for name in queue:
            for op in self.graphs[name].ops():
                for call in op.calls:
                    if call.graph not in visited and call.graph in self.graphs:
                        visited.add(call.graph)
                        queue.append(call.graph)
        return queue

    def copy(self) -> Model:
        """A model whose graphs can be edited without touching this one; ops and the source are shared."""
        graphs: dict[str, Graph] = {}
        name_spaces: dict[int, set[str]] = {}
        with paused_gc():
            for name, graph in self.graphs.items():
                reserved_names = name_spaces.setdefault(id(graph.reserved_names), set(graph.reserved_names))
                copied_graph = Graph(name, graphs, parent=graph.parent, reserved_names=reserved_names)
                copied_graph.nx = graph.nx.copy()
                for _, data in copied_graph.nx.nodes(data=True):
                    data["slots"] = list(data["slots"])
                copied_graph.inputs, copied_graph.outputs = list(graph.inputs), list(graph.outputs)
                copied_graph.rerouted_uses, copied_graph.removed_ops = set(graph.rerouted_uses), set(graph.removed_ops)
                graphs[name] = copied_graph
        return Model(
            format=self.format,
            graphs=graphs,
            source=self.source,
            path=self.path,
            digest=self.digest,
            evaluate_op=self.evaluate_op,
            opset=self.opset,
            entry_graphs=self.entry_graphs,
            saved_functions=self.saved_functions,
            live_object=self.live_object,
            save_model=self.save_model,
        )


def _shapes_compatible(first_shape: tuple[int | None, ...] | None, second_shape: tuple[int | None, ...] | None) -> bool:
    if first_shape is None or second_shape is None:
        return True
    return len(first_shape) == len(second_shape) and all(
        a is None or b is None or a == b for a, b in zip(first_shape, second_shape, strict=True)
    )


def _format_uses(uses: Sequence[Use], limit: int = 5) -> str:
    text = ", ".join(str(use) for use in uses[:limit])
    return (text + (", ..." if len(uses) > limit else "")) or "none"
