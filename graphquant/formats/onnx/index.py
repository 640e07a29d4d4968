"""A ModelProto as graphs of ops: names, kinds, roles, types, bodies and functions. Nothing is copied or decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from onnx import AttributeProto

from graphquant.errors import ModelError
from graphquant.formats.onnx.infer import inferred
from graphquant.formats.onnx.notes import noted, noted_ops
from graphquant.formats.onnx.ops import Facts, OpInfo, classify
from graphquant.formats.onnx.rename import value_of
from graphquant.formats.onnx.source import GraphSource, Source
from graphquant.formats.onnx.tensors import (
    NAMES,
    Array,
    Attrs,
    constant_value,
    size_of,
    sparse_value,
    tensor_value,
    type_of,
)
from graphquant.ir import Call, Graph, Model, Op, Output, Shape, TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_NESTING = 30
"""Depth to which bodies may lie in each other: the binary form of a message cannot hold more."""

_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)

Known = dict[str, tuple[str | None, Shape | None]]


@dataclass(slots=True, kw_only=True, eq=False)
class _Scope:
    """A graph that is being read: what its value names stand for, and what is around it."""

    graph: Graph
    proto: Any
    types: Any
    around: _Scope | None = None
    depth: int = 0
    known: Known = field(default_factory=dict)
    values: dict[str, TensorRef] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    position: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    counters: dict[str, int] = field(default_factory=dict)

    def find(self, value: str) -> TensorRef | None:
        """The tensor that `value` stands for here."""
        scope: _Scope | None = self
        while scope is not None:
            if value in scope.values:
                return scope.values[value]
            scope = scope.around
        return None

    def label(self, *wanted: str) -> str:
        """The first of the names `wanted` that is free in the graph, else the last with the smallest free `_k`."""
        name = next((w for w in wanted if w and w not in self.names), None)
        if name is None:
            last = wanted[-1]
            k = self.counters.get(last, 1)
            while f"{last}_{k}" in self.names:
                k += 1
            self.counters[last] = k + 1
            name = f"{last}_{k}"
        self.names.add(name)
        return _text(name)

    def define(self, value: str, tensor: TensorRef) -> None:
        """Lets `value` stand for `tensor`."""
        if _text(value) in self.values:
            raise ModelError(
                f"Two things make the value {value!r}. Names must be unique in a graph: export the model again."
            )
        self.values[value] = tensor

    def add(self, op: Op) -> None:
        """Adds an op whose name came from `label`, and defines its outputs."""
        tensor = self.graph.add(op)
        for port, output in enumerate(op.outputs):
            if output.name:
                self.define(output.name, TensorRef(tensor.graph, tensor.op, port))

    def output(self, value: str) -> Output:
        """What is known of `value`."""
        return Output(value, *self.known.get(value, (None, None)))


class Indexer:
    """Fills `model` with the graphs of `source`."""

    def __init__(self, model: Model, source: Source) -> None:
        self._model = model
        self._source = source
        self._functions: dict[tuple[str, str, str], str] = {}
        self._scopes: list[_Scope] = []
        self._unsorted: dict[str, Graph] = {}
        self._noted = noted_ops(source.message)

    def run(self) -> None:
        """Indexes the main graph, the functions and all bodies, then wires them."""
        message = self._source.message
        types = inferred(message, self._source.folder)
        self._open("", message.graph, types.graph, taken=set())
        for function, twin in zip(message.functions, types.functions, strict=True):
            key = (_domain(function.domain), function.name, function.overload)
            if key in self._functions:
                raise ModelError(f"The function {function.name!r} is defined twice. Export the model again.")
            name = ":".join(part for part in (function.domain, function.name, function.overload) if part)
            self._functions[key] = self._open(name, function, twin, taken=set()).graph.name
        for scope in self._scopes:  # grows while bodies are found
            self._fill(scope)
        for scope in self._scopes:
            self._wire(scope)
        for name, graph in self._unsorted.items():
            if len(graph.in_order()) < len(graph):
                raise ModelError(
                    f"The nodes of graph {name or message.graph.name!r} depend on each other in a circle. "
                    "Export the model again."
                )

    def _open(
        self,
        name: str,
        proto: Any,
        types: Any,
        *,
        taken: set[str],
        around: _Scope | None = None,
        parent: tuple[str, str] | None = None,
    ) -> _Scope:
        graphs, label, k = self._model.graphs, name, 1
        while label in graphs:
            label, k = f"{name}_{k}", k + 1
        graphs[label] = Graph(label, graphs, parent=parent, taken=taken)
        depth = around.depth + 1 if around else 0
        if depth > MAX_NESTING:
            raise ModelError(
                f"Bodies lie in each other {depth} deep. At most {MAX_NESTING} are read: flatten the model."
            )
        scope = _Scope(graph=graphs[label], proto=proto, types=types, around=around, depth=depth)
        self._source.graphs[label] = GraphSource(
            proto=proto, nodes=scope.nodes, loaded={}, values=scope.values, symbols=_symbols(types)
        )
        self._scopes.append(scope)
        return scope

    def _fill(self, scope: _Scope) -> None:
        is_function = not hasattr(scope.proto, "initializer")
        scope.known = _known(scope.types, is_function)
        if is_function:
            self._inputs(scope, [(name, name) for name in scope.proto.input], {})
            ends = [(name, name) for name in scope.proto.output]
        else:
            initializers = self._initializers(scope)
            self._inputs(scope, [(info.name, info) for info in scope.proto.input], initializers)
            for name, op in initializers.items():
                if name not in scope.values:
                    scope.label(name)
                    scope.add(op)
            ends = [(info.name, info) for info in scope.proto.output]
        labels = [scope.label(f"@{name}") for name, _ in ends]
        for node, twin in zip(scope.proto.node, scope.types.node, strict=True):
            self._node(scope, node, twin)
        for label, (_, source) in zip(labels, ends, strict=True):
            scope.graph.add(Op(name=label, kind="output", type="Output", source=source))
        scope.graph.outputs.extend(labels)
        self._source.graphs[scope.graph.name].loaded.update((op.name, op) for op in scope.graph.ops())

    def _inputs(self, scope: _Scope, inputs: list[tuple[str, Any]], initializers: dict[str, Op]) -> None:
        for name, source in inputs:
            if not name:
                raise ModelError("A graph input has no name. Export the model again.")
            given = initializers.get(name)
            op = Op(
                name=name,
                kind="input",
                type="Input",
                roles=(),
                outputs=given.outputs if given else (scope.output(name),),
                value=given.value if given else None,
                source=source,
            )
            scope.define(name, TensorRef(scope.graph.name, name))
            scope.label(name)
            scope.graph.add(op)
            scope.graph.inputs.append(name)

    def _initializers(self, scope: _Scope) -> dict[str, Op]:
        ops: dict[str, Op] = {}
        folder = self._source.folder

        def put(tensor: Any, source: Any, sizes: Shape, value: Callable[[], Array]) -> None:
            if not tensor.name or tensor.name in ops:
                raise ModelError(
                    f"Two initializers are named {tensor.name!r}, or one has no name. Export the model again."
                )
            known = Output(tensor.name, NAMES.get(tensor.data_type), sizes)
            ops[tensor.name] = Op(
                name=tensor.name,
                kind="constant",
                type="Initializer",
                roles=(),
                outputs=(known,),
                value=value,
                source=source,
            )

        for tensor in scope.proto.initializer:
            put(tensor, tensor, size_of(tensor), partial(tensor_value, tensor, folder))
        for sparse in scope.proto.sparse_initializer:
            put(sparse.values, sparse, tuple(sparse.dims), partial(sparse_value, sparse, folder))
        return ops

    def _node(self, scope: _Scope, node: Any, twin: Any) -> None:
        first = next((name for name in node.output if name), "")
        name = scope.label(node.name, first, first or node.op_type)
        folder = self._source.folder
        domain = _domain(node.domain)
        attrs = Attrs(node, folder)
        key = (domain, node.op_type, node.overload)
        called = self._functions.get(key)
        facts = Facts(attrs, partial(self._shape, scope, node.input), partial(self._scalar, scope, node.input))
        info = OpInfo("call") if called is not None else classify(node.op_type, domain, facts)
        calls = self._bodies(scope, node, twin, name)
        if called is not None:
            calls = (Call(node.op_type, called, 0), *calls)
        rule, anchor = self._noted.get(scope.graph.name, {}).get(name) or noted(node)
        scope.position[name] = len(scope.nodes)
        scope.nodes.append(name)
        scope.add(
            Op(
                name=name,
                kind=info.kind,
                type=_text(node.op_type),
                domain=domain,
                roles=info.roles,
                channel_axis=info.channel_axis,
                outputs=tuple(scope.output(value) for value in node.output),
                attrs=attrs,
                value=partial(constant_value, node, folder) if info.kind == "constant" and attrs else None,
                calls=calls,
                source=node,
                rule=rule,
                anchor=anchor,
            )
        )

    def _bodies(self, scope: _Scope, node: Any, twin: Any, name: str) -> tuple[Call, ...]:
        """Opens the graphs that a node holds.

        Their `Call` has no offset: branches have no inputs, Loop gives its carried values back one place earlier than
        it takes them, and Scan passes slices; so no body input counts as a parameter. Weights are captured anyway.
        """
        calls: list[Call] = []
        seen: set[str] = set()
        prefix = f"{scope.graph.name}/{name}" if scope.graph.name else name
        for attr, other in zip(node.attribute, twin.attribute, strict=True):
            if attr.type not in _GRAPHS or attr.ref_attr_name:
                continue
            bodies = [(attr.name, attr.g, other.g)] if attr.type == AttributeProto.GRAPH else []
            bodies += [
                (f"{attr.name}[{i}]", g, o) for i, (g, o) in enumerate(zip(attr.graphs, other.graphs, strict=True))
            ]
            for label, body, types in bodies:
                if label in seen:
                    raise ModelError(f"{name} has two graphs called {label!r}. Export the model again.")
                seen.add(label)
                parent = (scope.graph.name, name)
                inner = self._open(
                    f"{prefix}/{label}", body, types, taken=scope.graph.taken, around=scope, parent=parent
                )
                calls.append(Call(label, inner.graph.name))
        return tuple(calls)

    def _wire(self, scope: _Scope) -> None:
        graph = scope.graph
        for name, node in zip(scope.nodes, scope.proto.node, strict=True):
            graph.wire(name, [self._read(scope, value, name) if value else None for value in node.input])
        for name in graph.outputs:
            graph.wire(name, [self._read(scope, value_of(graph.op(name)), name)])

    def _read(self, scope: _Scope, value: str, reader: str) -> TensorRef:
        tensor = scope.find(_text(value))
        if tensor is None:
            raise ModelError(
                f"{reader!r} reads {value!r}, which nothing makes. The model is incomplete: export it again."
            )
        home, owner = scope, reader
        while home.graph.name != tensor.graph and home.around is not None and home.graph.parent is not None:
            owner, home = home.graph.parent[1], home.around
        if home.position.get(tensor.op, -1) >= home.position.get(owner, len(home.position)):
            self._unsorted[tensor.graph] = home.graph
        return tensor

    def _shape(self, scope: _Scope, inputs: Sequence[str], slot: int) -> Shape | None:
        tensor = scope.find(inputs[slot]) if slot < len(inputs) else None
        shape: Shape | None = self._model.output(tensor).shape if tensor is not None else None
        return shape

    def _scalar(self, scope: _Scope, inputs: Sequence[str], slot: int) -> float | None:
        """The value of a constant of one element."""
        tensor = scope.find(inputs[slot]) if slot < len(inputs) else None
        op = self._model.op(tensor) if tensor is not None else None
        if op is None or op.kind != "constant" or op.value is None or op.outputs[0].shape not in {(), (1,)}:
            return None
        value = op.value()
        return float(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind in "fiu" else None


def _known(types: Any, is_function: bool) -> Known:
    found: Known = {}
    listed = [types.value_info] if is_function else [types.value_info, types.output, types.input]
    for infos in listed:
        found.update((info.name, type_of(info.type)) for info in infos)
    return found


def _symbols(types: Any) -> dict[str, tuple[str, ...]]:
    infos = [*types.value_info, *(types.output if hasattr(types, "initializer") else ())]
    infos += types.input if hasattr(types, "initializer") else ()
    named = {info.name: tuple(dim.dim_param for dim in info.type.tensor_type.shape.dim) for info in infos}
    return {name: symbols for name, symbols in named.items() if any(symbols)}


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else _text(domain)


def _text(name: str | bytes) -> str:
    """`name`, which protocol buffers give as bytes if it is no UTF-8."""
    if isinstance(name, bytes):
        raise ModelError(f"The name {name!r} in the model is no UTF-8 text. The file is damaged: copy it again.")
    return name
