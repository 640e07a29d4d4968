"""`Graph` and `Model`: networkx graphs of ops, the few edits that all passes use, and the invariants after each stage.

Ops are nodes. A filled input slot is an edge keyed by the slot's number. A control edge is keyed `CONTROL_EDGE`. A
tensor that is read inside the body of an op (ONNX If, Loop, Scan) is a capture: an edge in the producer's graph, from
the producer to the op that owns the body, keyed `("capture", use)`. Each node also has a list of its slots, so that
both questions, the source of a slot and the consumers of a tensor, cost only their own edges
(docs/decisions/0007-input-slots.md).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from graphquant.errors import InternalError, ModelError, UsageError
from graphquant.ir.kinds import CONCATENATING_KINDS, RESHAPING_KINDS, TRANSPARENT_KINDS
from graphquant.ir.types import (
    FORMAT_TRAITS,
    Call,
    FormatTraits,
    Op,
    Output,
    Shape,
    TensorRef,
    Use,
    reachable,
    unique_name,
)
from graphquant.utils import HtmlRepresentation
from graphquant.utils.text import join_limited

if TYPE_CHECKING:
    import networkx as nx

Edges = dict[str, dict[Any, dict[str, int]]]
"""Edges of one op with each other op: data of each edge by its key."""

CONTROL_EDGE = "control"
_BUILD_LOCK = RLock()


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while many ops are created. Else the cost per op grows with the graph."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Graph:
    """One graph of a model: the main one, a body or a function."""

    def __init__(
        self,
        name: str,
        graphs: dict[str, Graph],
        *,
        parent: tuple[str, str] | None = None,
        reserved_names: set[str] | None = None,
    ) -> None:
        self.name = name  # "" for the main graph
        self.graphs = graphs  # the graphs of the model by name, shared by all of them
        self.parent = parent  # graph and op that own this body; None for the main graph and for functions
        self._ops: dict[str, Op] = {}
        self._slots: dict[str, list[TensorRef | None]] = {}  # source tensor of each slot of each op
        self._successors: dict[str, Edges] = {}
        self._predecessors: dict[str, Edges] = {}
        self.inputs: list[str] = []  # names of the ops of kind "input", in the order of the graph's signature
        self.outputs: list[str] = []  # names of the ops of kind "output", in the same order
        self.rerouted_uses: set[Use] = set()  # uses whose source changed since load
        self.removed_ops: set[str] = set()  # names of ops that were removed since load
        self.anchor = ""  # recorded as `Op.anchor` of ops that are added; "" records nothing
        # Names that new ops must not get. Graphs whose values share one name space share the set.
        self.reserved_names: set[str] = set() if reserved_names is None else reserved_names
        self._single_edges: dict[tuple[Any, int | None], dict[Any, dict[str, int]]] = {}  # of pairs, by slot and port

    @classmethod
    def deferred(cls, name: str, graphs: dict[str, Graph], build: Callable[[dict[str, Graph]], Graph]) -> Graph:
        """Return a function that `build` makes for the model with `graphs` when its ops are first read."""
        graph = cls.__new__(cls)
        vars(graph).update(name=name, graphs=graphs, parent=None, _build=build)
        return graph

    if not TYPE_CHECKING:  # else mypy would accept any attribute

        def __getattr__(self, attribute: str) -> Any:
            with _BUILD_LOCK:
                if not self.is_built:
                    # All at once, so that another thread never reads a part of the graph.
                    vars(self).update(vars(self._build(self.graphs)))
                    del self._build
            return object.__getattribute__(self, attribute)

    @cached_property
    def nx(self) -> nx.MultiDiGraph[str]:
        """The ops and edges for the algorithms of networkx, whose import takes as long as a plan of a small model.

        The data of a node is its op and no dictionary, so that networkx cannot copy the graph.
        """
        import networkx as nx

        graph: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        successors, predecessors = self._successors, self._predecessors
        vars(graph).update(_node=self._ops, _adj=successors, _succ=successors, _pred=predecessors)
        return graph

    @property
    def is_built(self) -> bool:
        """False for a deferred graph whose ops were not read yet."""
        return "_build" not in vars(self)

    @property
    def is_function(self) -> bool:
        """True for a function of the model: neither the main graph nor the body of an op."""
        return bool(self.name) and self.parent is None

    def __contains__(self, name: object) -> bool:
        return name in self._ops

    def __len__(self) -> int:
        return len(self._ops)

    def ops(self) -> Iterator[Op]:
        """Return all ops, in the order they were added."""
        return iter(self._ops.values())

    def calls(self) -> Iterator[tuple[Op, Call]]:
        """Yield the calls of all ops, each with its op."""
        for op in self._ops.values():
            for call in op.calls:
                yield op, call

    def topological_order(self, *, with_loops: bool = False) -> list[str]:
        """Return the names of the ops, each after its sources. Ops in a cycle, or after one, are omitted.

        `networkx.topological_sort` raises for a graph with a cycle; TF1 loops are cycles. With `with_loops`, the ops of
        a loop are in the order of its first iteration.
        """
        pending_inputs = dict.fromkeys(self._successors, 0)
        for name, targets in self._successors.items():
            ends_iteration = with_loops and self.op(name).kind == "next_iteration"
            for target in () if ends_iteration else targets:
                pending_inputs[target] += 1
        ready = [name for name, count in pending_inputs.items() if not count]
        for name in ready:  # grows during the loop
            ends_iteration = with_loops and self.op(name).kind == "next_iteration"
            for target in () if ends_iteration else self._successors[name]:
                pending_inputs[target] -= 1
                if not pending_inputs[target]:
                    ready.append(target)
        return ready

    def op(self, name: str) -> Op:
        """Return the op called `name`. Raises a KeyError if there is none."""
        return self._ops[name]

    def slots(self, name: str) -> list[TensorRef | None]:
        """Return the source tensor of each input slot of op `name`, None for an empty slot. Do not change the list."""
        return self._slots[name]

    def successors(self, name: str) -> Edges:
        """Return the edges from op `name`, by the op that they lead to. Do not change them."""
        return self._successors[name]

    def predecessors(self, name: str) -> Edges:
        """Return the edges to op `name`, by the op that they come from. Do not change them."""
        return self._predecessors[name]

    def source_of(self, use: Use) -> TensorRef | None:
        """Return the tensor read at `use`, which must be in this graph."""
        slots = self.slots(use.op)
        return slots[use.slot] if 0 <= use.slot < len(slots) else None

    def consumers(self, tensor: TensorRef) -> list[Use]:
        """Return all uses of `tensor`, including those in bodies, in the order in which their ops were connected."""
        return self.graphs[tensor.graph].consumers_by_port(tensor.op).get(tensor.port, [])

    def executed_ops(self) -> Container[str]:
        """Return the ops that a call of this TensorFlow function runs: those that outputs or side effects need."""
        effects = (op.name for op in self.ops() if op.kind == "stateful")
        return dict.fromkeys(reachable((*self.outputs, *effects), self.predecessors))

    def switched_ops(self) -> Container[str]:
        """Return the ops in branches of TensorFlow 1: those after a Switch that is no loop's, up to the next Merge."""

        def successors(name: str) -> list[str]:
            return [target for target in self.successors(name) if self.op(target).kind != "merge"]

        switches = ((op.name, self.source_of(Use(self.name, op.name, 1))) for op in self.ops() if op.kind == "switch")
        branches = [name for name, condition in switches if condition and self.op(condition.op).kind != "loop_cond"]
        return frozenset(reachable(branches, successors))

    def consumers_by_port(self, name: str) -> dict[int, list[Use]]:
        """Return the consumers of each output port of op `name`."""
        by_port: dict[int, list[Use]] = {}
        for target, edges in self._successors[name].items():
            for key, data in edges.items():  # the key is a slot, CONTROL_EDGE or ("capture", use)
                if key != CONTROL_EDGE:
                    use = Use(self.name, target, key) if isinstance(key, int) else key[1]
                    by_port.setdefault(data["port"], []).append(use)
        return by_port

    def control_inputs(self, name: str) -> list[str]:
        """Return the ops that must run before op `name` because of a control edge."""
        return [source for source, edges in self._predecessors[name].items() if CONTROL_EDGE in edges]

    def output(self, tensor: TensorRef) -> Any:
        """Return the `Output` of `tensor`, which may belong to an enclosing graph."""
        return self.graphs[tensor.graph]._ops[tensor.op].outputs[tensor.port]  # noqa: SLF001  # very many calls

    def unique_name(self, name: str) -> str:
        """Return `name`, or `name` with the smallest unused suffix `_k`."""
        return unique_name(name, self.reserved_names, self)

    def add_op(
        self, op: Op, inputs: Sequence[TensorRef | None] = (), *, control_sources: Iterable[str] = ()
    ) -> TensorRef:
        """Add `op` reading `inputs`, with control edges from the ops `control_sources`. Returns its first output."""
        if op.name in self._ops:
            raise InternalError(f"Op {op.name!r} already exists in graph {self.name!r}.")
        op = op if self.anchor in {"", op.anchor} else replace(op, anchor=self.anchor)
        self._ops[op.name], self._slots[op.name] = op, []
        self._successors[op.name], self._predecessors[op.name] = {}, {}
        self.reserved_names.add(op.name)
        self.reserved_names.update([output.name for output in op.outputs if output.name])
        if inputs or control_sources:
            self.connect_inputs(op.name, inputs, control_sources=control_sources)
        return TensorRef(self.name, op.name, 0)

    def connect_inputs(
        self, name: str, inputs: Sequence[TensorRef | None], *, control_sources: Iterable[str] = ()
    ) -> None:
        """Connect the inputs of an op that was added without them. Loops need their ops before their edges."""
        self._slots[name] = list(inputs) or self._slots[name]
        for slot, tensor in enumerate(inputs):
            if tensor is not None and tensor.graph == self.name and tensor.op in self._ops:  # nearly all
                self._add_edge(tensor.op, name, slot, tensor.port)
            elif tensor is not None:
                self._add_data_edge(Use(self.name, name, slot), tensor)
        for source in control_sources:
            if source not in self._ops:
                raise InternalError(f"Op {name!r} must run after {source!r}, which does not exist in {self.name!r}.")
            self._add_edge(source, name, CONTROL_EDGE)

    def set_source(self, use: Use, tensor: TensorRef | None) -> None:
        """Set the source of `use` to `tensor`, or empty the slot if it is None."""
        if tensor is not None:
            self._checked_edge_key(use, tensor)  # raises before the first change
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
        """Change the source of exactly `uses` from `tensor` to `target`. Returns the number of uses.

        Raises:
            UsageError: A tensor does not exist, a use does not read `tensor`, or `target` has another dtype or shape
                or is out of scope. Nothing is changed then.
        """
        old_output, new_output = self._require_output(tensor), self._require_output(target)
        if old_output.dtype is not None and new_output.dtype is not None and old_output.dtype != new_output.dtype:
            raise UsageError(
                f"{target} is {new_output.dtype} and {tensor} is {old_output.dtype}. Choose a target of the same dtype."
            )
        if not are_shapes_compatible(old_output.shape, new_output.shape):
            raise UsageError(
                f"{target} has shape {new_output.shape} and {tensor} has {old_output.shape}. Choose a target of the"
                " same shape."
            )
        unique_uses = list(dict.fromkeys(uses))
        for use in unique_uses:
            reader_graph = self.graphs.get(use.graph)
            if reader_graph is None or use.op not in reader_graph or reader_graph.source_of(use) != tensor:
                valid_uses = join_limited(self.consumers(tensor)) or "none"
                raise UsageError(f"{use} does not read {tensor}. Choose a use that does: {valid_uses}.")
            if not reader_graph.can_read(target.graph):
                raise UsageError(f"{use} cannot read {target}: graph {target.graph!r} does not enclose {use.graph!r}.")
        for use in unique_uses:
            self.graphs[use.graph].set_source(use, target)
        return len(unique_uses)

    def replace_op(self, op: Op, inputs: Sequence[TensorRef | None] | None = None) -> None:
        """Replace the op of the same name, and its inputs if some are given. Its consumers stay connected."""
        self._ops[op.name] = op
        self.reserved_names.update(output.name for output in op.outputs if output.name)
        if inputs is None:
            return
        uses = [Use(self.name, op.name, slot) for slot in range(max(len(inputs), len(self.slots(op.name))))]
        for use, tensor in zip_longest(uses, inputs):
            self.set_source(use, tensor)
        del self.slots(op.name)[len(inputs) :]
        self.rerouted_uses.difference_update(uses[len(inputs) :])

    def remove_op(self, name: str) -> None:
        """Remove op `name`, which must not have consumers."""
        remaining_uses = [use for uses in self.consumers_by_port(name).values() for use in uses]
        if remaining_uses:
            raise InternalError(
                f"Op {name!r} is still read by {join_limited(remaining_uses)}. Reroute these uses before removing it."
            )
        owned_bodies = [
            call.graph
            for call in self.op(name).calls
            if call.graph in self.graphs and self.graphs[call.graph].parent == (self.name, name)
        ]
        if owned_bodies:
            raise InternalError(f"Op {name!r} still owns the body {owned_bodies[0]!r}. Remove the body before the op.")
        for slot, tensor in enumerate(self.slots(name)):
            use = Use(self.name, name, slot)
            self.rerouted_uses.discard(use)
            if tensor is not None and tensor.graph != self.name:
                self._remove_data_edge(use, tensor)
        for target in self._successors.pop(name):
            del self._predecessors[target][name]
        for source in self._predecessors.pop(name):
            del self._successors[source][name]
        del self._ops[name], self._slots[name]
        self.removed_ops.add(name)

    def can_read(self, graph: str) -> bool:
        """Return True if ops of this graph may read tensors of `graph`: the graph itself or one that encloses it."""
        enclosing: Graph = self
        while enclosing.name != graph:
            if enclosing.parent is None:
                return False
            enclosing = self.graphs[enclosing.parent[0]]
        return True

    def has_tensor(self, tensor: TensorRef) -> bool:
        """Return True if a graph of the model has `tensor`."""
        source_graph = self.graphs.get(tensor.graph)
        has_op = source_graph is not None and tensor.op in source_graph
        return has_op and 0 <= tensor.port < len(self.graphs[tensor.graph].op(tensor.op).outputs)

    def _require_output(self, tensor: TensorRef) -> Output:
        if not self.has_tensor(tensor):
            raise UsageError(f"The model has no tensor {tensor}. `graphquant inspect` lists its tensors.")
        return self.graphs[tensor.graph].op(tensor.op).outputs[tensor.port]

    def _add_data_edge(self, use: Use, tensor: TensorRef) -> None:
        source_graph, target, key = self._checked_edge_key(use, tensor)
        source_graph._add_edge(tensor.op, target, key, tensor.port)  # noqa: SLF001

    def _add_edge(self, source: str, target: str, key: Any, port: int | None = None) -> None:
        """Add an edge. A dictionary of edges never changes, so that equal ones are one object, also in copies."""
        targets = self._successors[source]
        edges = None if target in targets else self._single_edges.get((key, port))
        if edges is None:
            edges = {**targets.get(target, {}), key: {} if port is None else {"port": port}}
            if len(edges) == 1 and isinstance(key, int):
                self._single_edges[key, port] = edges
        targets[target] = self._predecessors[target][source] = edges

    def _remove_data_edge(self, use: Use, tensor: TensorRef) -> None:
        graph, target, key = self.edge_key(use, tensor)
        successors, predecessors = graph._successors[tensor.op], graph._predecessors[target]  # noqa: SLF001
        edges = {edge: data for edge, data in successors[target].items() if edge != key}
        if edges:
            successors[target] = predecessors[tensor.op] = edges
        else:
            del successors[target], predecessors[tensor.op]

    def copy(self, graphs: dict[str, Graph], reserved_names: set[str]) -> Graph:
        """Return a copy of the graph for the model with `graphs`."""
        copied = Graph(self.name, graphs, parent=self.parent, reserved_names=reserved_names)
        copied._ops.update(self._ops)
        copied._slots.update((name, list(slots)) for name, slots in self._slots.items())
        copied._successors.update((name, dict(edges)) for name, edges in self._successors.items())
        copied._predecessors.update((name, dict(edges)) for name, edges in self._predecessors.items())
        copied.inputs, copied.outputs, copied._single_edges = list(self.inputs), list(self.outputs), self._single_edges
        copied.rerouted_uses, copied.removed_ops = set(self.rerouted_uses), set(self.removed_ops)
        return copied

    def _checked_edge_key(self, use: Use, tensor: TensorRef) -> tuple[Graph, str, Any]:
        """Return `edge_key` of an edge between existing ops."""
        source_graph, target, key = self.edge_key(use, tensor)
        if use.slot < 0 or tensor.op not in source_graph or target not in source_graph:
            raise InternalError(f"{use} reads {tensor}, but the tensor or its reader does not exist.")
        return source_graph, target, key

    def edge_key(self, use: Use, tensor: TensorRef) -> tuple[Graph, str, Any]:
        """Return graph, target op and key of the edge for `use` reading `tensor`."""
        if tensor.graph == self.name:
            return self, use.op, use.slot
        enclosing, target = self, use.op
        while enclosing.name != tensor.graph:
            if enclosing.parent is None:
                raise InternalError(f"{use} cannot read {tensor}, which is not in an enclosing graph.")
            parent, target = enclosing.parent
            enclosing = self.graphs[parent]
        return enclosing, target, ("capture", use)


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Model(HtmlRepresentation):
    """A loaded model: its graphs, and the source message. Emitting patches a copy of the message."""

    format: str  # key of the format table ("onnx", "tensorflow", "tflite")
    graphs: dict[str, Graph] = field(default_factory=dict)  # graphs by name, the main one ("") first
    source: Any = None  # the message or object that the format read; only the format knows its type
    path: Path | None = None  # file or folder of the model, None for a model in memory
    digest: str = ""  # hex SHA-256 of the source, without external data and variables
    opset: int = 0  # opset of the ONNX default domain; 0 in other formats
    # The graphs that a run may start with; a TFLite file has one for each signature.
    entry_graphs: tuple[str, ...] = ("",)
    # Graphs that declare the functions, with their variables, that Python code may call after loading a SavedModel.
    # No run starts with them.
    saved_functions: tuple[str, ...] = ()
    # Metadata for a written model, by key; None keeps the metadata of the source.
    provenance: dict[str, str] | None = None
    # The model that `strip` restores from the record in a written model; None writes no record.
    original_model: Model | None = None

    @property
    def traits(self) -> FormatTraits:
        """Properties of the model's format."""
        return FORMAT_TRAITS[self.format]

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the model to `path` atomically. Returns the path.

        Raises a UsageError if `path` exists and `force` is not set, or it cannot be written. Raises a ModelError if the
        model cannot be written in the format of `path`.
        """
        # Imported by name: this method belongs to the public interface, whose functions are in a package above.
        saved: Path = import_module("graphquant.api.models").save(self, path, force=force)
        return saved

    @property
    def main(self) -> Graph:
        """The main graph."""
        return self.graphs[""]

    def op(self, tensor: TensorRef) -> Op:
        """Return the op that produces `tensor`."""
        return self.graphs[tensor.graph]._ops[tensor.op]  # noqa: SLF001  # very many calls

    def output(self, tensor: TensorRef) -> Any:
        """Return the `Output` of `tensor`."""
        return self.op(tensor).outputs[tensor.port]

    def build_graphs(self) -> None:
        """Build all deferred graphs, which raises the ModelErrors of damaged ones."""
        for graph in self.graphs.values():
            len(graph)

    def callers(self, names: Container[str] | None = None) -> dict[str, list[tuple[Use, Call]]]:
        """Return the ops of the graphs `names`, or of all, that run each graph: (`Use` with slot 0, `Call`)."""
        callers_of: dict[str, list[tuple[Use, Call]]] = {}
        for graph in self.graphs.values():
            for op, call in graph.calls() if names is None or graph.name in names else ():
                callers_of.setdefault(call.graph, []).append((Use(graph.name, op.name, 0), call))
        return callers_of

    def passed_operand(self, caller: Use, call: Call, position: int) -> TensorRef | None:
        """Return the tensor that an op passes to a graph as input `position`; None if there is none."""
        graph = self.graphs[caller.graph]
        return None if call.offset is None else graph.source_of(Use(caller.graph, caller.op, position + call.offset))

    def reachable_graphs(self) -> list[str]:
        """Return the graphs that a run can reach, the main one first."""
        return self.graphs_reachable_from(self.entry_graphs)

    def reachable_ops(self) -> Iterator[tuple[Graph, Op]]:
        """Yield the ops that a run can reach, each with its graph."""
        for graph in map(self.graphs.__getitem__, self.reachable_graphs()):
            for op in graph.ops():
                yield graph, op

    def needed_ops(self) -> Mapping[str, Container[str]]:
        """Return the ops that the outputs need, by reachable graph.

        A TensorFlow graph may still contain gradients, losses and savers, which a run for the outputs skips. Functions
        also run their ops with side effects, but no others, such as those that Keras traced only for their shapes.
        """
        if self.traits.runtime != "TensorFlow" or not self.main.outputs:
            return {name: self.graphs[name] for name in self.reachable_graphs()}
        needed = dict.fromkeys(reachable(self.main.outputs, self.main.predecessors))
        called = dict.fromkeys(call.graph for name in needed for call in self.main.op(name).calls)
        callees = self.graphs_reachable_from([name for name in called if name in self.graphs])
        return {"": needed, **{name: self.graphs[name].executed_ops() for name in callees}}

    def op_kinds(self) -> set[str]:
        """Return the kinds of the ops that a run can reach."""
        return {op.kind for _, op in self.reachable_ops()}

    def graphs_reachable_from(self, starts: Iterable[str], ignored_kind: str = "") -> list[str]:
        """Return the graphs `starts` and all graphs that they call, but not by ops of `ignored_kind`."""

        def callees(name: str) -> list[str]:
            calls = self.graphs[name].calls()
            return [call.graph for op, call in calls if op.kind != ignored_kind and call.graph in self.graphs]

        return reachable(starts, callees)

    def branch_ops(self) -> dict[str, Container[str]]:
        """Return the ops of branches, which no run may need, by reachable graph."""
        certain = frozenset(self.graphs_reachable_from(self.entry_graphs, "if"))
        graphs = map(self.graphs.__getitem__, self.reachable_graphs())
        return {graph.name: graph.switched_ops() if graph.name in certain else graph for graph in graphs}

    def copy(self) -> Model:
        """Return a model whose graphs can be edited without changing this one. Ops and the source are shared."""
        graphs: dict[str, Graph] = {}
        name_spaces: dict[int, set[str]] = {}
        with paused_gc():
            for name, graph in self.graphs.items():
                if not graph.is_built:
                    graphs[name] = Graph.deferred(name, graphs, vars(graph)["_build"])
                    continue
                reserved_names = name_spaces.setdefault(id(graph.reserved_names), set(graph.reserved_names))
                graphs[name] = graph.copy(graphs, reserved_names)
        return replace(self, graphs=graphs, provenance=None, original_model=None)


def are_shapes_compatible(first: Shape | None, second: Shape | None) -> bool:
    """Return True if two shapes have the same rank and sizes, as far as both are known."""
    if first is None or second is None:
        return True
    return len(first) == len(second) and all(
        None in pair or pair[0] == pair[1] for pair in zip(first, second, strict=True)
    )


MAX_TENSOR_BYTES = 1 << 28
"""Maximum bytes of a tensor that is `MAX_GROWTH` times as large as all weights and inputs of its model."""

MAX_GROWTH = 1000
BYTES_PER_ELEMENT = 4  # of most activations and weights
SIZE_KEEPING_KINDS = CONCATENATING_KINDS | RESHAPING_KINDS | TRANSPARENT_KINDS | {"abs", "cast", "neg", "relu"}
"""Kinds whose output has at least as many elements as each input, also where sizes are not known."""


def check_tensor_sizes(model: Model, max_memory: int | None = None, remedy: str = "") -> None:
    """Reject a small model whose tensors would fill memory, such as one that doubles a tensor again and again.

    `max_memory` raises the limit of a tensor; the message suggests that, or the `remedy`. Axes of unknown size count
    as 1, also where tensors are joined along it. Raises a ModelError if a tensor is too large.
    """
    sizes: dict[TensorRef, int] = {}
    stored = 0
    for graph, op in model.reachable_ops():
        for port, output in enumerate(op.outputs):
            elements = output.elements_per_sample
            if elements is None:
                elements = math.prod(size or 1 for size in output.shape or ())
            size = BYTES_PER_ELEMENT * elements
            if output.elements_per_sample is None and op.kind in SIZE_KEEPING_KINDS:
                operands = [sizes.get(slot, 0) for slot in graph.slots(op.name) if slot is not None]
                size = max(size, sum(operands) if op.kind in CONCATENATING_KINDS else max(operands, default=0))
            sizes[TensorRef(graph.name, op.name, port)] = size
            stored += size if op.kind in {"constant", "variable", "input"} else 0
    tensor, largest = max(sizes.items(), key=itemgetter(1), default=(None, 0))
    if largest > max(MAX_TENSOR_BYTES, MAX_GROWTH * stored, max_memory or 0):
        remedy = remedy or f"If the model is trusted, raise the limit: --max-memory {-(-largest >> 20)}MiB"
        raise ModelError(
            f"The tensor {tensor} of {model.path or 'the model'} has {largest >> 20:,} MiB, and all weights and inputs"
            f" have {-(-stored >> 10):,} KiB. {remedy}"
        )


def check_invariants(model: Model, stage: str) -> None:
    """Check that slots, edges and lists of `model` agree.

    1. Each node has the op of its name, and the owner of each body exists.
    2. Each slot reads an existing port of an existing op in scope, by exactly one edge. A capture's edge ends at the op
       that owns the body.
    3. There are no other data edges.
    4. The listed inputs and outputs exist and have that kind.
    5. An ONNX graph has no cycle.

    The message of an error names `stage`, the stage that just ended. Raises an InternalError if an invariant is broken.
    """
    for graph in (graph for graph in model.graphs.values() if graph.is_built):
        _check_graph_ends(graph, stage)
        _check_slots(graph, stage)
        if model.traits.acyclic and len(graph.topological_order()) < len(graph):
            import networkx as nx  # imported for the message only; find_cycle is slow

            cycle = " -> ".join(edge[0] for edge in nx.find_cycle(graph.nx))
            raise _invariant_error(stage, graph, f"The ops {cycle} form a cycle.")


def _check_slots(graph: Graph, stage: str) -> None:
    unmatched_edges = 0
    for name, op in graph._ops.items():  # noqa: SLF001  # the names are checked
        # Case 1: the op has its name.
        if not isinstance(op, Op) or op.name != name:
            raise _invariant_error(stage, graph, f"Node {name!r} does not have the op of that name.")
        # Case 2: every slot is one edge.
        for slot, tensor in enumerate(graph.slots(name)):
            if tensor is not None:
                _check_slot(graph, name, slot, tensor, stage)
                unmatched_edges += tensor.graph == graph.name
    # Case 3: every data edge is a slot, every capture a slot of its body.
    targets = ((source, *target) for source, targets in graph._successors.items() for target in targets.items())  # noqa: SLF001
    for source, target, edges in targets:
        unmatched_edges -= sum([isinstance(key, int) for key in edges])
        for use in [key[1] for key in edges if isinstance(key, tuple)]:
            reader_graph = graph.graphs.get(use.graph)
            source_tensor = reader_graph.source_of(use) if reader_graph is not None and use.op in reader_graph else None
            if source_tensor != TensorRef(graph.name, source, edges["capture", use]["port"]):
                raise _invariant_error(
                    stage, graph, f"The capture edge {source} -> {target} is for {use}, which reads another tensor."
                )
    if unmatched_edges:
        raise _invariant_error(stage, graph, f"{-unmatched_edges} data edges belong to no slot.")


def _check_slot(graph: Graph, name: str, slot: int, tensor: TensorRef, stage: str) -> None:
    is_own = tensor.graph == graph.name  # True for nearly all, whose edge then needs no search for its graph
    source_graph = graph if is_own else graph.graphs.get(tensor.graph)
    if source_graph is None or tensor.op not in source_graph or not (is_own or graph.can_read(tensor.graph)):
        problem = "which does not exist or is out of scope."
    elif not 0 <= tensor.port < len(source_graph.op(tensor.op).outputs):
        problem = f"but that op has {len(source_graph.op(tensor.op).outputs)} outputs."
    else:
        target, key = (name, slot) if is_own else graph.edge_key(Use(graph.name, name, slot), tensor)[1:]
        edge = source_graph.successors(tensor.op).get(target, {}).get(key)
        if edge is not None and edge["port"] == tensor.port:
            return
        problem = "but its edge is missing."
    raise _invariant_error(stage, graph, f"{Use(graph.name, name, slot)} reads {tensor}, {problem}")


def _check_graph_ends(graph: Graph, stage: str) -> None:
    # Case 4: inputs and outputs.
    for kind, names in (("input", graph.inputs), ("output", graph.outputs)):
        for name in names:
            if name not in graph or (kind == "output" and graph.op(name).kind != kind):
                raise _invariant_error(stage, graph, f"The {kind} {name!r} does not exist, or is not an {kind}.")
    if graph.parent is not None:
        owner_graph, owner = graph.parent
        if owner_graph not in graph.graphs or owner not in graph.graphs[owner_graph]:
            raise _invariant_error(stage, graph, f"Its owner {owner!r} does not exist.")


def _invariant_error(stage: str, graph: Graph, problem: str) -> InternalError:
    graph_label = f"graph {graph.name!r}" if graph.name else "the main graph"
    return InternalError(
        f"After {stage}, {graph_label} is invalid: {problem} This is an error in graphquant; please report it."
    )
