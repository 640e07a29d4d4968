"""What a tensor is computed from, as a digest: op types, attributes, constants and inputs, all the way up.

Two tensors with the same digest hold the same values, whatever the rest of their models does. ONNX ops that hand their
input on unchanged are seen through, since preparations take them out. Statistics are kept under digests, so they serve
every rule file whose preparation leaves the tensor's cone as it was, and no other model.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

from graphquant.errors import ModelError
from graphquant.ir import Model, Op, Parameters, TensorRef, Use, bulk
from graphquant.prepare import seen_through

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from graphquant.ir import Graph

_Node = tuple[str, str, str]
"""("op", graph, name) or ("entry", graph, ""), which stands for when and with what a graph is run."""

LENGTH = 32
"""Characters of a digest, in hexadecimal."""

REPEATING = frozenset({"loop", "scan", "while"})
"""Kinds that feed what their body gives back to it."""


@bulk()
def cones(
    model: Model, tensors: Iterable[TensorRef], same: Mapping[TensorRef, str] | None = None
) -> dict[TensorRef, str]:
    """The digest of each of `tensors`, which graphs that run must hold; a tensor of `same` has the one given there."""
    wanted, known = list(tensors), same or {}
    if not wanted:
        return {}
    work = _Work(model, known)
    return {tensor: known.get(tensor) or work.tensor(tensor) for tensor in wanted}


@bulk()
def kept(source: Model, prepared: Model) -> dict[TensorRef, str]:
    """Tensors of `prepared` that hold what one of `source` holds though another op computes it, with its digest there.

    They are what the readers of a folded BatchNorm read now, and, after an opset upgrade, the values that kept op type
    and name. Both are equal but for rounding.
    """
    pairs: dict[TensorRef, TensorRef] = {}
    for name in source.live():
        if name in prepared.graphs:
            if source.opset != prepared.opset:
                pairs.update(_renamed(source.graphs[name], prepared.graphs[name]))
            pairs.update(_folded(source.graphs[name], prepared))
    known = cones(source, dict.fromkeys(pairs.values()))
    return {tensor: known[other] for tensor, other in pairs.items()}


def _folded(source: Graph, prepared: Model) -> dict[TensorRef, TensorRef]:
    pairs = {}
    graph = prepared.graphs[source.name]
    for op in source.ops():
        if op.kind not in {"batchnorm", "add"} or (op.name in graph and graph.op(op.name).kind == op.kind):
            continue
        tensor = TensorRef(source.name, op.name)
        for use in source.consumers(tensor):
            reader = prepared.graphs.get(use.graph)
            now = reader.producer(use) if reader is not None and use.op in reader else None
            if now is not None:
                pairs[now] = tensor
    return pairs


def _renamed(source: Graph, upgraded: Graph) -> dict[TensorRef, TensorRef]:
    pairs = {}
    for op in upgraded.ops():
        old = source.op(op.name) if op.name in source else None
        if old is None or old.type != op.type or op.kind in {"input", "constant", "output"}:
            continue
        read = (tensor for tensor in upgraded.slots(op.name) if tensor is not None)
        if any(upgraded.graphs[tensor.graph].op(tensor.op).rule for tensor in read):
            continue  # it was given other weights
        for port, (one, other) in enumerate(zip(old.outputs, op.outputs, strict=False)):
            if one.name and one.name == other.name:
                pairs[TensorRef(source.name, op.name, port)] = TensorRef(source.name, op.name, port)
    return pairs


class _Work:
    """The digests of all ops of a model that can run."""

    def __init__(self, model: Model, same: Mapping[TensorRef, str]) -> None:
        self._model = model
        self._same = same
        self._parameters = Parameters(model)
        self._live = set(model.live())
        self._callers: dict[str, list[tuple[Use, Any]]] = {
            name: [(use, call) for use, call in calls if use.graph in self._live]
            for name, calls in model.callers().items()
        }
        self._digests: dict[_Node, bytes] = {}
        graph: nx.DiGraph[_Node] = nx.DiGraph()
        for name in model.live():
            nodes: list[_Node] = [("op", name, op.name) for op in model.graphs[name].ops()]
            for node in [*nodes, *([("entry", name, "")] if name else [])]:
                graph.add_node(node)
                graph.add_edges_from((node, other) for other in self._reads(node))
        for part in nx.strongly_connected_components(graph):  # by Tarjan's algorithm: what a part reads comes before it
            self._settle(sorted(part), graph)

    def tensor(self, tensor: TensorRef) -> str:
        """The digest of a tensor."""
        return self._tensor(tensor).hex()

    def _tensor(self, tensor: TensorRef | None) -> bytes:
        if tensor is None:
            return b""
        seen = seen_through(self._model, tensor, self._parameters)
        for one in (tensor, seen):
            if one in self._same:
                return bytes.fromhex(self._same[one])
        return _digest(self._digests["op", seen.graph, seen.op], str(seen.port).encode())

    def _settle(self, nodes: Sequence[_Node], graph: nx.DiGraph[_Node]) -> None:
        """Digests of nodes that wait for each other, in a loop, or of one that waits for none that is not settled."""
        if len(nodes) == 1 and not graph.has_edge(nodes[0], nodes[0]):
            self._digests[nodes[0]] = self._node(nodes[0])
            return
        for node in nodes:  # within a ring, others are told by their names
            self._digests[node] = _digest(*(part.encode() for part in node))
        whole = _digest(*map(self._node, nodes))
        self._digests.update((node, _digest(whole, *(part.encode() for part in node))) for node in nodes)

    def _reads(self, node: _Node) -> list[_Node]:
        """The nodes whose digests that of `node` is made from."""
        kind, name, label = node
        graph = self._model.graphs[name]
        if kind == "entry":
            return self._entry(name)
        op = graph.op(label)
        found: list[_Node] = [
            ("op", read.graph, read.op) for read in graph.slots(label) if read is not None and read not in self._same
        ]
        found += [("op", name, other) for other in graph.control_inputs(label)]
        if name and not _given(op):
            found.append(("entry", name, ""))
        for call in op.calls:
            if call.graph in self._live:
                found += [("op", call.graph, output) for output in self._model.graphs[call.graph].outputs]
        return found

    def _entry(self, name: str) -> list[_Node]:
        found: list[_Node] = []
        for use, call in self._callers.get(name, ()):
            caller = self._model.graphs[use.graph]
            found += [
                ("op", read.graph, read.op)
                for read in caller.slots(use.op)
                if read is not None and read not in self._same
            ]
            if use.graph:
                found.append(("entry", use.graph, ""))
            if call.loop or caller.op(use.op).kind in REPEATING:
                found += [("op", name, output) for output in self._model.graphs[name].outputs]
        return found

    def _node(self, node: _Node) -> bytes:
        kind, name, label = node
        graph = self._model.graphs[name]
        if kind == "entry":
            callers = []
            for use, _ in self._callers.get(name, ()):
                caller = self._model.graphs[use.graph]
                callers += [_content(caller.op(use.op)), *map(self._tensor, caller.slots(use.op))]
            return _digest(b"entry", *callers, *(self._digests[other] for other in self._entry(name)))
        op = graph.op(label)
        if _given(op):
            return _value(op)
        parts = [_content(op), *map(self._tensor, graph.slots(label))]
        if op.kind == "input":
            parts.append(label.encode())
        others = [*(("op", name, other) for other in graph.control_inputs(label)), *self._run_by(op)]
        if name:
            others.append(("entry", name, ""))
        return _digest(*parts, *(self._digests[other] for other in others))

    def _run_by(self, op: Op) -> list[_Node]:
        graphs = self._model.graphs
        return [("op", c.graph, end) for c in op.calls if c.graph in self._live for end in graphs[c.graph].outputs]


def _given(op: Op) -> bool:
    """Whether the op is a value of the model's own."""
    return op.value is not None and op.kind in {"constant", "variable", "input"}


def _value(op: Op) -> bytes:
    try:
        value = op.value() if op.value is not None else None
    except ModelError:  # whoever needs the value says so
        value = None
    if value is None:
        return _digest(b"unread", op.name.encode())
    return _digest(b"value", _plain(value))


def _content(op: Op) -> bytes:
    """What the op computes, its inputs aside."""
    attrs = (f"{name}={_plain(op.attrs[name])!r}".encode() for name in sorted(op.attrs) if not name.startswith("_"))
    return _digest(op.type.encode(), op.domain.encode(), *attrs)


def _plain(value: Any) -> bytes:
    """An attribute's value, or a constant's, as bytes that equal values share."""
    if isinstance(value, np.ndarray):
        flat = np.ascontiguousarray(value).reshape(-1)
        held = repr(value.tolist()).encode() if value.dtype.hasobject else flat.view(np.uint8).data
        return _digest(b"array", value.dtype.name.encode(), repr(value.shape).encode(), held)
    if isinstance(value, list | tuple):
        return _digest(b"list", *map(_plain, value))
    if hasattr(value, "SerializeToString"):
        return _digest(b"message", value.SerializeToString(deterministic=True))
    return repr(value).encode()


def _digest(*parts: bytes | memoryview) -> bytes:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()[: LENGTH // 2]
