"""`Graph` and `Model`: networkx graphs of ops, and the few edits that everything is made of.

Ops are nodes. A filled input slot is an edge keyed by the slot's number; a control edge is keyed `CONTROL`. A tensor
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

from graphquant.drawn import Drawn
from graphquant.errors import InternalError, UsageError
from graphquant.ir.types import Op, Output, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np

CONTROL = "control"


@contextmanager
def bulk() -> Iterator[None]:
    """Pauses Python's cyclic collector while many ops are made; without it the cost per op grows with the graph."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
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
        edited: Uses whose source changed since load.
        anchor: What ops that are added are for, "" if that is not to be noted.
    """

    def __init__(
        self,
        name: str,
        graphs: dict[str, Graph],
        *,
        parent: tuple[str, str] | None = None,
        taken: set[str] | None = None,
    ) -> None:
        """`taken` holds names that new ops must not get; graphs whose values share one name space share the set."""
        import networkx as nx  # here, so that rule files can be read without it

        self.name = name
        self.graphs = graphs
        self.parent = parent
        self.nx: nx.MultiDiGraph[str] = nx.MultiDiGraph()
        self.inputs: list[str] = []
        self.outputs: list[str] = []
        self.edited: set[Use] = set()
        self.removed: set[str] = set()
        self.anchor = ""
        self.taken: set[str] = set() if taken is None else taken

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

    def in_order(self) -> list[str]:
        """The names of the ops, each after those it has edges from; those in a ring, or behind one, are left out."""
        behind = {name: list(targets) for name, targets in self.nx.adjacency()}
        waiting = dict.fromkeys(behind, 0)
        for targets in behind.values():
            for target in targets:
                waiting[target] += 1
        ready = [name for name, count in waiting.items() if not count]
        for name in ready:  # grows meanwhile
            for target in behind[name]:
                waiting[target] -= 1
                if not waiting[target]:
                    ready.append(target)
        return ready

    def op(self, name: str) -> Op:
        """The op called `name`; a KeyError if there is none."""
        return self.nx.nodes[name]["op"]  # type: ignore[no-any-return]  # node data is untyped

    def slots(self, name: str) -> list[TensorRef | None]:
        """What each input slot of op `name` reads, None for an empty slot. Not to be changed by the caller."""
        return self.nx.nodes[name]["slots"]  # type: ignore[no-any-return]  # node data is untyped

    def producer(self, use: Use) -> TensorRef | None:
        """The tensor read at `use`, which must be in this graph."""
        slots = self.slots(use.op)
        return slots[use.slot] if 0 <= use.slot < len(slots) else None

    def consumers(self, tensor: TensorRef) -> list[Use]:
        """Every place that reads `tensor`, in bodies too, in the order in which their ops were first wired to it."""
        return self.graphs[tensor.graph].readers(tensor.op).get(tensor.port, [])

    def readers(self, name: str) -> dict[int, list[Use]]:
        """The consumers of each output port of op `name`."""
        found: dict[int, list[Use]] = {}
        for target, edges in self.nx.adj[name].items():
            key: Any  # a slot, CONTROL or ("capture", use)
            for key, data in edges.items():
                if isinstance(key, int):
                    found.setdefault(data["port"], []).append(Use(self.name, target, key))
                elif key != CONTROL:
                    found.setdefault(data["port"], []).append(key[1])
        return found

    def control_inputs(self, name: str) -> list[str]:
        """Ops that must run before op `name` by a control edge."""
        return [source for source, edges in self.nx.pred[name].items() if CONTROL in edges]

    def output(self, tensor: TensorRef) -> Any:
        """What is known of `tensor`, an `Output`; the tensor may live in an enclosing graph."""
        return self.graphs[tensor.graph].op(tensor.op).outputs[tensor.port]

    def edge(self, use: Use, tensor: TensorRef) -> dict[str, Any] | None:
        """The data of the edge that stands for `use`, of this graph, reading `tensor`; None if it is missing."""
        home, owner, key = self._edge(use, tensor)
        data: dict[str, Any] | None = home.nx.get_edge_data(tensor.op, owner, key=key)
        return data

    # -- building and editing --------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        """`name`, or with the smallest free `_k` behind it."""
        if name not in self.taken and name not in self.nx:
            return name
        k = 1
        while f"{name}_{k}" in self.taken or f"{name}_{k}" in self.nx:
            k += 1
        return f"{name}_{k}"

    def add(self, op: Op, inputs: Sequence[TensorRef | None] = (), *, after: Iterable[str] = ()) -> TensorRef:
        """Adds `op` reading `inputs`, with control edges from the ops `after`; returns its first output."""
        if op.name in self.nx:
            raise InternalError(f"op {op.name!r} is already in graph {self.name!r}.")
        self.nx.add_node(op.name, op=replace(op, anchor=self.anchor) if self.anchor else op, slots=[])
        self.taken.add(op.name)
        self.taken.update(output.name for output in op.outputs if output.name)
        self.wire(op.name, inputs, after=after)
        return TensorRef(self.name, op.name, 0)

    def wire(self, name: str, inputs: Sequence[TensorRef | None], *, after: Iterable[str] = ()) -> None:
        """Gives an op that was added without inputs its inputs; loops need their ops before their edges."""
        slots = self.slots(name)
        slots.extend([None] * len(inputs))
        for slot, tensor in enumerate(inputs):
            if tensor is not None:
                slots[slot] = tensor
                self._link(Use(self.name, name, slot), tensor)
        for source in after:
            if source not in self.nx:
                raise InternalError(f"op {name!r} is to run after {source!r}, which graph {self.name!r} does not hold.")
            self.nx.add_edge(source, name, key=CONTROL)

    def connect(self, use: Use, tensor: TensorRef | None) -> None:
        """Makes `use` read `tensor` (None empties the slot), whatever it read before."""
        if tensor is not None:
            self._end(use, tensor)  # refuses before anything is changed
        slots = self.slots(use.op)
        slots.extend([None] * (use.slot + 1 - len(slots)))
        before = slots[use.slot]
        if before is not None:
            self._unlink(use, before)
        slots[use.slot] = tensor
        if tensor is not None:
            self._link(use, tensor)
        self.edited.add(use)

    def reroute(self, tensor: TensorRef, uses: Iterable[Use], to: TensorRef) -> int:
        """Makes exactly `uses`, which read `tensor` now, read `to`; returns how many there were.

        Raises:
            UsageError: A tensor does not exist, a use does not read `tensor`, or `to` has another dtype or shape, or is
                out of the use's sight. Nothing is changed then.
        """
        old, new = self._known(tensor), self._known(to)
        if old.dtype is not None and new.dtype is not None and old.dtype != new.dtype:
            raise UsageError(
                f"{to} is {new.dtype} and {tensor} is {old.dtype}. Only tensors of one dtype can be swapped."
            )
        if not _shapes_agree(old.shape, new.shape):
            raise UsageError(f"{to} has shape {new.shape} and {tensor} has {old.shape}. Their shapes must agree.")
        listed = list(dict.fromkeys(uses))
        for use in listed:
            reader = self.graphs.get(use.graph)
            if reader is None or use.op not in reader or reader.producer(use) != tensor:
                some = _some(self.consumers(tensor))
                raise UsageError(f"{use} does not read {tensor}. Name a use that does: {some}.")
            if not reader.sees(to.graph):
                raise UsageError(f"{use} cannot read {to}: graph {to.graph!r} does not enclose {use.graph!r}.")
        for use in listed:
            self.graphs[use.graph].connect(use, to)
        return len(listed)

    def replace(self, op: Op) -> None:
        """Puts `op` in the place of the op of the same name; its inputs stay wired."""
        self.nx.nodes[op.name]["op"] = op
        self.taken.update(output.name for output in op.outputs if output.name)

    def remove(self, name: str) -> None:
        """Takes out op `name`, which nothing may read any more."""
        left = [use for uses in self.readers(name).values() for use in uses]
        if left:
            raise InternalError(
                f"op {name!r} is still read by {_some(left)}; reroute its consumers before removing it."
            )
        owned = [call.graph for call in self.op(name).calls if self._owns(name, call.graph)]
        if owned:
            raise InternalError(f"op {name!r} still owns the body {owned[0]!r}; it cannot be removed without it.")
        for slot, tensor in enumerate(self.slots(name)):
            use = Use(self.name, name, slot)
            self.edited.discard(use)
            if tensor is not None and tensor.graph != self.name:
                self._unlink(use, tensor)
        self.nx.remove_node(name)
        self.removed.add(name)

    def _owns(self, name: str, body: str) -> bool:
        return body in self.graphs and self.graphs[body].parent == (self.name, name)

    def sees(self, graph: str) -> bool:
        """Whether ops of this graph may read tensors of `graph`: the graph itself or one that encloses it."""
        here: Graph = self
        while here.name != graph:
            if here.parent is None:
                return False
            here = self.graphs[here.parent[0]]
        return True

    def _known(self, tensor: TensorRef) -> Output:
        home = self.graphs.get(tensor.graph)
        if home is None or tensor.op not in home or not 0 <= tensor.port < len(home.op(tensor.op).outputs):
            raise UsageError(f"The model has no tensor {tensor}. `graphquant inspect` lists those it has.")
        return home.op(tensor.op).outputs[tensor.port]

    def _link(self, use: Use, tensor: TensorRef) -> None:
        home, owner, key = self._end(use, tensor)
        home.nx.add_edge(tensor.op, owner, key=key, port=tensor.port)

    def _unlink(self, use: Use, tensor: TensorRef) -> None:
        home, owner, key = self._edge(use, tensor)
        home.nx.remove_edge(tensor.op, owner, key=key)

    def _end(self, use: Use, tensor: TensorRef) -> tuple[Graph, str, Any]:
        """`_edge`, which must be one between ops that are there."""
        home, owner, key = self._edge(use, tensor)
        if use.slot < 0 or tensor.op not in home.nx or owner not in home.nx:
            raise InternalError(f"{use} reads {tensor}, which graph {tensor.graph!r} does not hold.")
        return home, owner, key

    def _edge(self, use: Use, tensor: TensorRef) -> tuple[Graph, str, Any]:
        """Graph, target op and key of the edge that stands for `use` reading `tensor`."""
        if tensor.graph == self.name:
            return self, use.op, use.slot
        here, owner = self, use.op
        while here.name != tensor.graph:
            if here.parent is None:
                raise InternalError(f"{use} cannot read {tensor}: it is in no enclosing graph.")
            parent, owner = here.parent
            here = self.graphs[parent]
        return here, owner, ("capture", use)


@dataclass(slots=True, kw_only=True, eq=False)
class Model(Drawn):
    """A loaded model: its graphs, and the source message that emit patches a copy of.

    Attributes:
        format: Key of the format table ("onnx", "tensorflow", "tflite").
        graphs: Graphs by name, the main one ("") first.
        source: What the format read; only the format knows its type.
        path: Where the model came from, None for one built in memory.
        digest: Hex SHA-256 of the source, external data and variables not included.
        evaluate: Gives the outputs of one pure op for input arrays, or None if it cannot; None where the format cannot.
        opset: The ONNX default domain's opset; 0 for the others.
        entries: The graphs that a run may start with; a TFLite file has one for each signature.
        saved: Graphs that no run starts with and that say what whoever loads the model may call, and with which
            variables: the saved functions of a SavedModel.
        alive: The object in memory that the model was made of ("the session"), "" for a file. Its variables go on
            training, so that none may become a constant.
        saver: Writes the model, set by whoever loaded it.
        provenance: What a written model is to say of where it came from, by key; None leaves what it says.
        origin: The model that the record in a written one is to give back; None where there is to be none.
    """

    format: str
    graphs: dict[str, Graph] = field(default_factory=dict)
    source: Any = None
    path: Path | None = None
    digest: str = ""
    evaluate: Callable[[Op, list[np.ndarray[Any, Any]]], list[np.ndarray[Any, Any]] | None] | None = None
    opset: int = 0
    entries: tuple[str, ...] = ("",)
    saved: tuple[str, ...] = ()
    alive: str = ""
    saver: Callable[[Model, Path, bool], Path] | None = None
    provenance: dict[str, str] | None = None
    origin: Model | None = None

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Writes the model to `path`, whole or not at all; returns the path.

        Raises:
            UsageError: There is something at `path` and `force` is not given, or it cannot be written.
            ModelError: The model has no such form.
        """
        if self.saver is None:
            raise InternalError("this model was built without a loader; use graphquant.save(model, path).")
        return self.saver(self, Path(path), force)

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
        found: dict[str, list[tuple[Use, Any]]] = {}
        for graph in self.graphs.values():
            for op in graph.ops():
                for call in op.calls:
                    found.setdefault(call.graph, []).append((Use(graph.name, op.name, 0), call))
        return found

    def live(self) -> list[str]:
        """Graphs that a run can reach, the main one first."""
        return self.reached(self.entries)

    def reached(self, starts: Iterable[str]) -> list[str]:
        """The graphs `starts` and all that they call."""
        queue = list(starts)
        seen = set(queue)
        for name in queue:
            for op in self.graphs[name].ops():
                for call in op.calls:
                    if call.graph not in seen and call.graph in self.graphs:
                        seen.add(call.graph)
                        queue.append(call.graph)
        return queue

    def copy(self) -> Model:
        """A model whose graphs can be edited without touching this one; ops and the source are shared."""
        graphs: dict[str, Graph] = {}
        shared: dict[int, set[str]] = {}
        with bulk():
            for name, graph in self.graphs.items():
                taken = shared.setdefault(id(graph.taken), set(graph.taken))
                twin = Graph(name, graphs, parent=graph.parent, taken=taken)
                twin.nx = graph.nx.copy()
                for _, data in twin.nx.nodes(data=True):
                    data["slots"] = list(data["slots"])
                twin.inputs, twin.outputs = list(graph.inputs), list(graph.outputs)
                twin.edited, twin.removed = set(graph.edited), set(graph.removed)
                graphs[name] = twin
        return Model(
            format=self.format,
            graphs=graphs,
            source=self.source,
            path=self.path,
            digest=self.digest,
            evaluate=self.evaluate,
            opset=self.opset,
            entries=self.entries,
            saved=self.saved,
            alive=self.alive,
            saver=self.saver,
        )


def _shapes_agree(one: tuple[int | None, ...] | None, other: tuple[int | None, ...] | None) -> bool:
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))


def _some(uses: Sequence[Use], limit: int = 5) -> str:
    listed = ", ".join(str(use) for use in uses[:limit])
    return (listed + (", ..." if len(uses) > limit else "")) or "none"
