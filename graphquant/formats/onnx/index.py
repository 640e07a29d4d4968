"""Index of a ModelProto as graphs of ops: names, kinds, roles, types, bodies and functions.

Nothing is copied or decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from onnx import AttributeProto

from graphquant.errors import ModelError
from graphquant.formats.onnx.ops import NodeFacts, OnnxOpInfo, classify_node
from graphquant.formats.onnx.shape_inference import infer_types
from graphquant.formats.onnx.source import (
    OnnxGraphSource,
    OnnxSource,
    node_rule_note,
    output_value_name,
    read_rule_notes,
)
from graphquant.formats.onnx.tensors import (
    DTYPE_NAMES,
    GRAPH_ATTRIBUTES,
    Array,
    OnnxAttributes,
    constant_value,
    sparse_value,
    tensor_shape,
    tensor_value,
    type_and_shape,
)
from graphquant.ir import Call, Graph, Model, Op, Output, Shape, TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


MAX_NESTING = 30
"""Maximum nesting depth of bodies. The binary form of a message cannot hold more."""

KnownTypes = dict[str, tuple[str | None, Shape | None]]


@dataclass(slots=True, kw_only=True, eq=False)
class _GraphScope:
    """A graph that is being indexed: the tensors of its value names, and the scope around it."""

    graph: Graph
    proto: Any
    types: Any
    outer: _GraphScope | None = None
    depth: int = 0
    known_types: KnownTypes = field(default_factory=dict)
    values: dict[str, TensorRef] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    counters: dict[str, int] = field(default_factory=dict)  # last suffixes, so that n equal names take O(n) time

    def resolve(self, value: str) -> TensorRef | None:
        """Return the tensor that `value` names in this scope, None if there is none."""
        scope: _GraphScope | None = self
        while scope is not None:
            if value in scope.values:
                return scope.values[value]
            scope = scope.outer
        return None

    def unique_name(self, *candidates: str) -> str:
        """Return the first free name of `candidates`, else the last one with the smallest free suffix `_k`."""
        name = next((candidate for candidate in candidates if candidate and candidate not in self.names), None)
        if name is None:
            base = candidates[-1]
            suffix = self.counters.get(base, 1)
            while f"{base}_{suffix}" in self.names:
                suffix += 1
            self.counters[base] = suffix + 1
            name = f"{base}_{suffix}"
        self.names.add(name)
        return _utf8_name(name)

    def define(self, value: str, tensor: TensorRef) -> None:
        """Let `value` name `tensor`."""
        if _utf8_name(value) in self.values:
            raise ModelError(
                f"Several ops define the value {value!r}. Names must be unique in a graph: export the model again."
            )
        self.values[value] = tensor

    def add(self, op: Op) -> None:
        """Add an op whose name came from `unique_name`, and define its outputs."""
        tensor = self.graph.add_op(op)
        for port, output in enumerate(op.outputs):
            if output.name:
                self.define(output.name, TensorRef(tensor.graph, tensor.op, port))

    def known_output(self, value: str) -> Output:
        """Return the output of `value` with its known type and shape."""
        return Output(value, *self.known_types.get(value, (None, None)))


class GraphIndexer:
    """Fills `model` with the graphs of `source`."""

    def __init__(self, model: Model, source: OnnxSource) -> None:
        self._model = model
        self._source = source
        self._functions: dict[tuple[str, str, str], str] = {}
        self._scopes: list[_GraphScope] = []
        self._unsorted: dict[str, Graph] = {}
        self._rule_notes = read_rule_notes(source.message)

    def run(self) -> None:
        """Index the main graph, the functions and all bodies, then connect them."""
        message = self._source.message
        types = infer_types(message, self._source.folder)
        self._open_graph("", message.graph, types.graph, taken_names=set())
        for function, typed_function in zip(message.functions, types.functions, strict=True):
            key = (_normalized_domain(function.domain), function.name, function.overload)
            if key in self._functions:
                raise ModelError(f"The function {function.name!r} is defined twice. Export the model again.")
            name = ":".join(component for component in (function.domain, function.name, function.overload) if component)
            self._functions[key] = self._open_graph(name, function, typed_function, taken_names=set()).graph.name
        for scope in self._scopes:  # grows while bodies are visited
            self._read_graph(scope)
        for scope in self._scopes:
            self._wire_graph(scope)
        for name, graph in self._unsorted.items():
            if len(graph.topological_order()) < len(graph):
                raise ModelError(
                    f"The nodes of graph {name or message.graph.name!r} depend on each other in a cycle. "
                    "Export the model again."
                )

    def _open_graph(
        self,
        name: str,
        proto: Any,
        types: Any,
        *,
        taken_names: set[str],
        outer: _GraphScope | None = None,
        parent: tuple[str, str] | None = None,
    ) -> _GraphScope:
        graphs, graph_name, suffix = self._model.graphs, name, 1
        while graph_name in graphs:
            graph_name, suffix = f"{name}_{suffix}", suffix + 1
        graphs[graph_name] = Graph(graph_name, graphs, parent=parent, reserved_names=taken_names)
        depth = outer.depth + 1 if outer else 0
        if depth > MAX_NESTING:
            raise ModelError(
                f"Bodies are nested {depth} levels deep. At most {MAX_NESTING} levels are supported: flatten the model."
            )
        scope = _GraphScope(graph=graphs[graph_name], proto=proto, types=types, outer=outer, depth=depth)
        self._source.graphs[graph_name] = OnnxGraphSource(
            proto=proto,
            node_names=scope.nodes,
            loaded_ops={},
            values=scope.values,
            dimension_names=_dimension_names(types),
        )
        self._scopes.append(scope)
        return scope

    def _read_graph(self, scope: _GraphScope) -> None:
        is_function = not hasattr(scope.proto, "initializer")
        scope.known_types = _value_types(scope.types, is_function)
        if is_function:
            self._read_inputs(scope, [(name, name) for name in scope.proto.input], {})
            graph_outputs = [(name, name) for name in scope.proto.output]
        else:
            initializers = self._read_initializers(scope)
            self._read_inputs(scope, [(info.name, info) for info in scope.proto.input], initializers)
            for name, op in initializers.items():
                if name not in scope.values:
                    scope.unique_name(name)
                    scope.add(op)
            graph_outputs = [(info.name, info) for info in scope.proto.output]
        labels = [scope.unique_name(f"@{name}") for name, _ in graph_outputs]
        for node, typed_node in zip(scope.proto.node, scope.types.node, strict=True):
            self._read_node(scope, node, typed_node)
        for label, (_, source) in zip(labels, graph_outputs, strict=True):
            scope.graph.add_op(Op(name=label, kind="output", type="Output", source=source))
        scope.graph.outputs.extend(labels)
        self._source.graphs[scope.graph.name].loaded_ops.update((op.name, op) for op in scope.graph.ops())

    def _read_inputs(self, scope: _GraphScope, inputs: list[tuple[str, Any]], initializers: dict[str, Op]) -> None:
        for name, source in inputs:
            if not name:
                raise ModelError("A graph input has no name. Export the model again.")
            default = initializers.get(name)
            op = Op(
                name=name,
                kind="input",
                type="Input",
                roles=(),
                outputs=default.outputs if default else (scope.known_output(name),),
                read_value=default.read_value if default else None,
                source=source,
            )
            scope.define(name, TensorRef(scope.graph.name, name))
            scope.unique_name(name)
            scope.graph.add_op(op)
            scope.graph.inputs.append(name)

    def _read_initializers(self, scope: _GraphScope) -> dict[str, Op]:
        ops: dict[str, Op] = {}
        folder = self._source.folder

        def add_initializer(tensor: Any, source: Any, shape: Shape, value: Callable[[], Array]) -> None:
            if not tensor.name or tensor.name in ops:
                raise ModelError(
                    f"Two initializers are named {tensor.name!r}, or one has no name. Export the model again."
                )
            output = Output(tensor.name, DTYPE_NAMES.get(tensor.data_type), shape)
            ops[tensor.name] = Op(
                name=tensor.name,
                kind="constant",
                type="Initializer",
                roles=(),
                outputs=(output,),
                read_value=value,
                source=source,
            )

        for tensor in scope.proto.initializer:
            add_initializer(tensor, tensor, tensor_shape(tensor), partial(tensor_value, tensor, folder))
        for sparse in scope.proto.sparse_initializer:
            add_initializer(sparse.values, sparse, tuple(sparse.dims), partial(sparse_value, sparse, folder))
        return ops

    def _read_node(self, scope: _GraphScope, node: Any, typed_node: Any) -> None:
        first_output = next((name for name in node.output if name), "")
        name = scope.unique_name(node.name, first_output, first_output or node.op_type)
        folder = self._source.folder
        domain = _normalized_domain(node.domain)
        attrs = OnnxAttributes(node, folder)
        key = (domain, node.op_type, node.overload)
        callee = self._functions.get(key)
        node_facts = NodeFacts(
            attrs, partial(self._input_shape, scope, node.input), partial(self._input_scalar, scope, node.input)
        )
        info = OnnxOpInfo("call") if callee is not None else classify_node(node.op_type, domain, node_facts)
        calls = self._open_bodies(scope, node, typed_node, name)
        if callee is not None:
            calls = (Call(node.op_type, callee, 0), *calls)
        rule, anchor = self._rule_notes.get(scope.graph.name, {}).get(name) or node_rule_note(node)
        scope.positions[name] = len(scope.nodes)
        scope.nodes.append(name)
        scope.add(
            Op(
                name=name,
                kind=info.kind,
                type=_utf8_name(node.op_type),
                domain=domain,
                roles=info.roles,
                channel_axis=info.channel_axis,
                outputs=tuple(scope.known_output(value) for value in node.output),
                attrs=attrs,
                read_value=partial(constant_value, node, folder) if info.kind == "constant" and attrs else None,
                calls=calls,
                source=node,
                rule=rule,
                anchor=anchor,
            )
        )

    def _open_bodies(self, scope: _GraphScope, node: Any, typed_node: Any, name: str) -> tuple[Call, ...]:
        """Open the graphs that a node holds.

        Their `Call` has no offset, so no body input counts as a parameter: branches have no inputs, Loop returns its
        carried values one slot earlier than it takes them, and Scan passes slices. Bodies capture weights from outer
        graphs anyway.
        """
        calls: list[Call] = []
        labels: set[str] = set()
        prefix = f"{scope.graph.name}/{name}" if scope.graph.name else name
        for attr, typed_attr in zip(node.attribute, typed_node.attribute, strict=True):
            if attr.type not in GRAPH_ATTRIBUTES or attr.ref_attr_name:
                continue
            bodies = [(attr.name, attr.g, typed_attr.g)] if attr.type == AttributeProto.GRAPH else []
            bodies += [
                (f"{attr.name}[{i}]", graph, typed_graph)
                for i, (graph, typed_graph) in enumerate(zip(attr.graphs, typed_attr.graphs, strict=True))
            ]
            for label, body, types in bodies:
                if label in labels:
                    raise ModelError(f"{name} has two graphs called {label!r}. Export the model again.")
                labels.add(label)
                parent = (scope.graph.name, name)
                names = scope.graph.reserved_names
                inner = self._open_graph(
                    f"{prefix}/{label}", body, types, taken_names=names, outer=scope, parent=parent
                )
                calls.append(Call(label, inner.graph.name))
        return tuple(calls)

    def _wire_graph(self, scope: _GraphScope) -> None:
        graph = scope.graph
        for name, node in zip(scope.nodes, scope.proto.node, strict=True):
            graph.connect_inputs(
                name, [self._resolve_use(scope, value, name) if value else None for value in node.input]
            )
        for name in graph.outputs:
            graph.connect_inputs(name, [self._resolve_use(scope, output_value_name(graph.op(name)), name)])

    def _resolve_use(self, scope: _GraphScope, value: str, reader: str) -> TensorRef:
        tensor = scope.resolve(_utf8_name(value))
        if tensor is None:
            raise ModelError(
                f"{reader!r} reads {value!r}, which no op defines. The model is incomplete: export it again."
            )
        enclosing, owner = scope, reader
        while (
            enclosing.graph.name != tensor.graph and enclosing.outer is not None and enclosing.graph.parent is not None
        ):
            owner, enclosing = enclosing.graph.parent[1], enclosing.outer
        if enclosing.positions.get(tensor.op, -1) >= enclosing.positions.get(owner, len(enclosing.positions)):
            self._unsorted[tensor.graph] = enclosing.graph
        return tensor

    def _input_shape(self, scope: _GraphScope, inputs: Sequence[str], slot: int) -> Shape | None:
        tensor = scope.resolve(inputs[slot]) if slot < len(inputs) else None
        shape: Shape | None = self._model.output(tensor).shape if tensor is not None else None
        return shape

    def _input_scalar(self, scope: _GraphScope, inputs: Sequence[str], slot: int) -> float | None:
        """Return the value of a constant of one element."""
        tensor = scope.resolve(inputs[slot]) if slot < len(inputs) else None
        op = self._model.op(tensor) if tensor is not None else None
        if op is None or op.kind != "constant" or op.read_value is None or op.outputs[0].shape not in {(), (1,)}:
            return None
        value = op.read_value()
        return float(value.reshape(-1)[0]) if value.size == 1 and value.dtype.kind in "fiu" else None


def _value_types(types: Any, is_function: bool) -> KnownTypes:
    value_types: KnownTypes = {}
    info_lists = [types.value_info] if is_function else [types.value_info, types.output, types.input]
    for infos in info_lists:
        value_types.update((info.name, type_and_shape(info.type)) for info in infos)
    return value_types


def _dimension_names(types: Any) -> dict[str, tuple[str, ...]]:
    infos = [*types.value_info, *(types.output if hasattr(types, "initializer") else ())]
    infos += types.input if hasattr(types, "initializer") else ()
    names_by_value = {info.name: tuple(dim.dim_param for dim in info.type.tensor_type.shape.dim) for info in infos}
    return {name: symbols for name, symbols in names_by_value.items() if any(symbols)}


def _normalized_domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else _utf8_name(domain)


def _utf8_name(name: str | bytes) -> str:
    """Return `name`, or reject it if it is not UTF-8, in which case protocol buffers return bytes."""
    if isinstance(name, bytes):
        raise ModelError(f"The name {name!r} in the model is not valid UTF-8. The file is damaged: copy it again.")
    return name
