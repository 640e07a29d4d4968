"""ModelProtos as graphs of ops, and the provenance in their metadata. Nothing is copied or decoded.

The index of a ModelProto has names, kinds, roles, types, bodies and functions. Provenance is in the `metadata_props` of
the model and of its nodes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from onnx import AttributeProto

from graphquant.errors import ModelError
from graphquant.formats import InputSpec
from graphquant.formats.onnx.ops import NodeFacts, classify_node
from graphquant.formats.onnx.shape_inference import infer_types
from graphquant.formats.onnx.tensors import (
    ANCHOR_KEY,
    DTYPE_NAMES,
    GRAPH_ATTRIBUTES,
    RULE_KEY,
    OnnxAttributes,
    constant_value,
    initializer_reader,
    sparse_value,
    tensor_shape,
    type_and_shape,
)
from graphquant.ir import NO_ATTRS, Call, Graph, Model, Op, OpInfo, OpKey, Output, Shape, TensorRef
from graphquant.quantize import METADATA_PREFIX, OPS_KEY, RECORD_KEY, make_record, op_provenance_json
from graphquant.quantize.integer_io import integer_tensors

if TYPE_CHECKING:
    from graphquant.formats.onnx.fused_ops import LiftedOp
    from graphquant.numerics import Array


class OnnxGraphSource(NamedTuple):
    """One graph as it was loaded."""

    proto: Any  # the GraphProto, or the FunctionProto of a function
    node_names: list[str]  # names of the ops in the order of `proto.node`
    loaded_ops: dict[str, Op]  # the ops as they were loaded, by name
    values: dict[str, TensorRef]  # tensor of each value name of this graph


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxSource:
    """The ModelProto of a loaded model, which is never changed. Emission compares the model with it."""

    message: Any  # the ModelProto
    graphs: dict[str, OnnxGraphSource]  # source of each graph, by its name in the model
    folder: Path | None  # Folder of its external data; None for a model built in memory.
    # Returns the outputs of a pure op for the arrays in its input slots, None if it cannot.
    evaluate_op: Callable[[Op, list[Array]], list[Array] | None]
    # Fused ops that standard ops replace in the model, by graph and name.
    lifted: dict[OpKey, LiftedOp] = field(default_factory=dict)


def output_value_name(op: Op) -> str:
    """Return the value name in the source of an op of kind "output"."""
    name: str = op.source if isinstance(op.source, str) else op.source.name
    return name


METADATA_IR_VERSION = 10  # first IR version whose nodes have metadata_props


def read_metadata(model: Model) -> dict[str, str]:
    """Return the provenance entries in the model's metadata; none if the model was not loaded from a file."""
    return {} if model.source is None else metadata_entries(model.source.message)


def input_specs(model: Model) -> Sequence[InputSpec]:
    """Return the graph's inputs without a default value."""
    required = [op for op in map(model.main.op, model.main.inputs) if op.read_value is None]
    return [
        InputSpec(name=op.name, dtype=op.outputs[0].dtype or "unknown", shape=op.outputs[0].shape) for op in required
    ]


def write_onnx_metadata(message: Any, model: Model, *, record: bool = True) -> None:
    """Write the provenance of `model` to `message`, which was emitted from it."""
    if model.provenance is None:
        return
    entries, annotations = dict(model.provenance), message.graph.quantization_annotation
    previous = {tensor.name for tensor in integer_tensors(metadata_entries(message))}
    retain_entries(annotations, lambda annotation: annotation.tensor_name not in previous)
    for tensor in integer_tensors(entries):
        annotation = annotations.add(tensor_name=tensor.name)
        for key, constant in zip(("SCALE_TENSOR", "ZERO_POINT_TENSOR"), tensor.constants, strict=False):
            annotation.quant_parameter_tensor_names.add(key=key, value=constant)
    clear_metadata(message)
    if message.ir_version < METADATA_IR_VERSION and (ops := op_provenance_json(model)):
        entries[OPS_KEY] = ops
    if record and model.original_model is not None:
        entries[RECORD_KEY] = base64.b64encode(make_record(model.original_model.source.message, message)).decode()
    for key in sorted(entries):
        message.metadata_props.add(key=METADATA_PREFIX + key, value=entries[key])


def clear_metadata(message: Any) -> None:
    """Remove graphquant's entries from a model's metadata."""
    retain_entries(message.metadata_props, lambda entry: not entry.key.startswith(METADATA_PREFIX))


def retain_entries(repeated: Any, predicate: Callable[[Any], bool]) -> None:
    """Drop the entries of a repeated field that do not satisfy `predicate`."""
    retained = [entry for entry in repeated if predicate(entry)]
    if len(retained) < len(repeated):
        del repeated[:]
        repeated.extend(retained)


def metadata_entries(message: Any) -> dict[str, str]:
    """Return graphquant's entries in a model's metadata by key."""
    entries = [entry for entry in message.metadata_props if entry.key.startswith(METADATA_PREFIX)]
    return {entry.key.removeprefix(METADATA_PREFIX): entry.value for entry in entries}


def read_rule_notes(message: Any) -> dict[str, dict[str, dict[str, str]]]:
    """Return the entries of ops by graph and name, for models whose nodes have no metadata; {} if damaged."""
    try:
        graphs = json.loads(metadata_entries(message).get(OPS_KEY, "{}"))
        return {
            graph: {
                op: {RULE_KEY: str(rule), ANCHOR_KEY: str(anchor)}
                | {key: str(text) for notes in entries for key, text in notes.items()}
                for op, (rule, anchor, *entries) in ops.items()  # earlier versions wrote no entries
            }
            for graph, ops in graphs.items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


MAX_NESTING = 30  # Maximum nesting depth of bodies. The binary form of a message cannot hold more.


@dataclass(slots=True, kw_only=True, eq=False)
class _GraphScope:
    """A graph that is being indexed: the tensors of its value names, and the scope around it."""

    graph: Graph
    proto: Any
    types: Any
    outer: _GraphScope | None = None
    depth: int = 0
    known_types: dict[str, tuple[str | None, Shape | None]] = field(default_factory=dict)
    values: dict[str, TensorRef] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    counters: dict[str, int] = field(default_factory=dict)  # last suffixes, so that n equal names take O(n) time

    def resolve(self, value: str) -> TensorRef | None:
        """Return the tensor that `value` names in this scope, None if there is none."""
        scope: _GraphScope | None = self
        while scope is not None and value not in scope.values:
            scope = scope.outer
        return None if scope is None else scope.values[value]

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

    def add(self, op: Op) -> None:
        """Add an op whose name came from `unique_name`, and let the names of its outputs name them."""
        for port, output in enumerate(op.outputs):
            if not output.name:
                continue
            if _utf8_name(output.name) in self.values:
                raise ModelError(
                    f"Several ops define the value {output.name!r}. Names must be unique in a graph: export the model"
                    " again."
                )
            self.values[output.name] = TensorRef(self.graph.name, op.name, port)
        self.graph.add_op(op)

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
        graph = graphs[graph_name] = Graph(graph_name, graphs, parent=parent, reserved_names=taken_names)
        depth = outer.depth + 1 if outer else 0
        if depth > MAX_NESTING:
            raise ModelError(
                f"Bodies are nested {depth} levels deep. At most {MAX_NESTING} levels are supported: flatten the model."
            )
        is_function = not hasattr(types, "initializer")
        infos = [*types.value_info] if is_function else [*types.value_info, *types.output, *types.input]
        known_types = {info.name: type_and_shape(info.type) for info in infos}
        scope = _GraphScope(graph=graph, proto=proto, types=types, outer=outer, depth=depth, known_types=known_types)
        self._source.graphs[graph_name] = OnnxGraphSource(
            proto=proto, node_names=scope.nodes, loaded_ops={}, values=scope.values
        )
        self._scopes.append(scope)
        return scope

    def _read_graph(self, scope: _GraphScope) -> None:
        proto, graph = scope.proto, scope.graph
        if hasattr(proto, "initializer"):
            initializers = self._read_initializers(scope)
            inputs, graph_outputs = ([(info.name, info) for info in infos] for infos in (proto.input, proto.output))
        else:
            initializers = {}
            inputs, graph_outputs = ([(name, name) for name in names] for names in (proto.input, proto.output))
        for name, source in inputs:
            if not name:
                raise ModelError("A graph input has no name. Export the model again.")
            default = initializers.pop(name, None)
            outputs = default.outputs if default else (scope.known_output(name),)
            value = default.read_value if default else None
            scope.add(
                Op(name=name, kind="input", type="Input", roles=(), outputs=outputs, read_value=value, source=source)
            )
            scope.unique_name(name)
            graph.inputs.append(name)
        for name, op in initializers.items():
            scope.unique_name(name)
            scope.add(op)
        labels = [scope.unique_name(f"@{name}") for name, _ in graph_outputs]
        for node, typed_node in zip(proto.node, scope.types.node, strict=True):
            self._read_node(scope, node, typed_node)
        for label, (_, source) in zip(labels, graph_outputs, strict=True):
            graph.add_op(Op(name=label, kind="output", type="Output", source=source))
        graph.outputs.extend(labels)
        self._source.graphs[graph.name].loaded_ops.update((op.name, op) for op in graph.ops())

    def _read_initializers(self, scope: _GraphScope) -> dict[str, Op]:
        folder = self._source.folder
        entries: list[tuple[Any, Any, Shape, Callable[[], Array]]] = [
            (tensor, tensor, tensor_shape(tensor), initializer_reader(tensor, folder))
            for tensor in scope.proto.initializer
        ]
        entries += [
            (sparse.values, sparse, tuple(sparse.dims), partial(sparse_value, sparse, folder))
            for sparse in scope.proto.sparse_initializer
        ]
        ops: dict[str, Op] = {}
        for tensor, source, shape, value in entries:
            name = tensor.name
            if not name or name in ops:
                raise ModelError(f"Two initializers are named {name!r}, or one has no name. Export the model again.")
            outputs = (Output(name, DTYPE_NAMES.get(tensor.data_type), shape),)
            ops[name] = Op(
                name=name,
                kind="constant",
                type="Initializer",
                roles=(),
                outputs=outputs,
                read_value=value,
                source=source,
            )
        return ops

    def _read_node(self, scope: _GraphScope, node: Any, typed_node: Any) -> None:
        first_output = next((name for name in node.output if name), "")
        name = scope.unique_name(node.name, first_output, first_output or node.op_type)
        folder, domain = self._source.folder, _normalized_domain(node.domain)
        attrs = OnnxAttributes(node, folder)
        callee = self._functions.get((domain, node.op_type, node.overload))
        node_facts = NodeFacts(
            attrs, partial(self._input_shape, scope, node.input), partial(self._input_scalar, scope, node.input)
        )
        info = OpInfo("call") if callee is not None else classify_node(node.op_type, domain, node_facts)
        calls = self._open_bodies(scope, node, typed_node, name)
        if callee is not None:
            calls = (Call(node.op_type, callee, 0), *calls)
        notes = {entry.key: entry.value for entry in node.metadata_props if entry.key.startswith(METADATA_PREFIX)}
        notes = dict(self._rule_notes.get(scope.graph.name, {}).get(name, notes))
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
                rule=notes.pop(RULE_KEY, ""),
                anchor=notes.pop(ANCHOR_KEY, ""),
                notes=notes or NO_ATTRS,
            )
        )

    def _open_bodies(self, scope: _GraphScope, node: Any, typed_node: Any, name: str) -> tuple[Call, ...]:
        """Open the graphs that a node holds.

        Their `Call` has no offset, so no body input counts as a parameter: branches have no inputs, Loop returns its
        carried values one slot earlier than it takes them, and Scan passes slices. Bodies capture weights from outer
        graphs anyway.
        """
        calls: dict[str, Call] = {}
        parent = (scope.graph.name, name)
        names = scope.graph.reserved_names
        for attr, typed_attr in zip(node.attribute, typed_node.attribute, strict=True):
            if attr.type not in GRAPH_ATTRIBUTES or attr.ref_attr_name:
                continue
            bodies = [(attr.name, attr.g, typed_attr.g)] if attr.type == AttributeProto.GRAPH else []
            graph_pairs = zip(attr.graphs, typed_attr.graphs, strict=True)
            bodies += [(f"{attr.name}[{i}]", graph, typed) for i, (graph, typed) in enumerate(graph_pairs)]
            for label, body, types in bodies:
                if label in calls:
                    raise ModelError(f"{name} has two graphs called {label!r}. Export the model again.")
                path = "/".join(filter(None, (*parent, label)))
                inner = self._open_graph(path, body, types, taken_names=names, outer=scope, parent=parent)
                calls[label] = Call(label, inner.graph.name)
        return tuple(calls.values())

    def _wire_graph(self, scope: _GraphScope) -> None:
        graph = scope.graph
        for name, node in zip(scope.nodes, scope.proto.node, strict=True):
            graph.connect_inputs(
                name, [self._resolve_use(scope, value, name) if value else None for value in node.input]
            )
        for name in graph.outputs:
            graph.connect_inputs(name, [self._resolve_use(scope, output_value_name(graph.op(name)), name)])

    def _resolve_use(self, scope: _GraphScope, value: str, reader: str) -> TensorRef:
        if (tensor := scope.resolve(_utf8_name(value))) is None:
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


def _normalized_domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else _utf8_name(domain)


def _utf8_name(name: str | bytes) -> str:
    """Return `name`, or reject it if it is not UTF-8, in which case protocol buffers return bytes."""
    if isinstance(name, bytes):
        raise ModelError(f"The name {name!r} in the model is not valid UTF-8. The file is damaged: copy it again.")
    return name
