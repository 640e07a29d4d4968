"""Models to ModelProtos: a copy of the source message with changed ops patched and new ops added.

Graph outputs keep their names, so other values are renamed if an output reads another tensor than before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from onnx import GraphProto, ModelProto, NodeProto, helper

from graphquant import __version__
from graphquant.errors import ModelError
from graphquant.formats.onnx.external_data import (
    EXTERNAL_MIN_BYTES,
    DeferredWeight,
    constant_bytes,
    copy_without_weights,
    deferred_tensor,
)
from graphquant.formats.onnx.fused_ops_writer import lower_fused_ops
from graphquant.formats.onnx.index import (
    METADATA_IR_VERSION,
    OnnxGraphSource,
    OnnxSource,
    output_value_name,
    retain_entries,
    write_onnx_metadata,
)
from graphquant.formats.onnx.tensors import (
    DEFAULT_DOMAINS,
    DTYPE_CODES,
    constant_tensor,
    patch_node,
    write_constant_node,
    write_node,
    write_rule_metadata,
)
from graphquant.ir import Graph, Model, Op, Shape, TensorRef, Use, paused_gc

VERSION_KEY = "graphquant.version"

FREE_INITIALIZERS_IR_VERSION = 4  # first IR version whose initializers need not be graph inputs

DTYPE_IR_VERSIONS = {"float8_e4m3fn": 9, "float8_e5m2": 9, "int4": 10, "uint4": 10}
"""First IR version of newer constant types."""

IO_DTYPES = frozenset({"float32", "int8", "uint8", "int16", "uint16"})
"""Types that the inputs and outputs of a model are converted between."""

DEFAULT_OPSET = 13  # opset of the default domain for a model that had no op of it


class Emission(NamedTuple):
    """A model as a message, and the names of its tensors there."""

    message: Any  # the ModelProto
    renamed_tensors: dict[TensorRef, str]  # names of the tensors whose names differ from their `Output`
    model: Model  # the model with fused ops as the message has them
    # Constants whose values are still missing in the message, see `external_data`.
    deferred: tuple[DeferredWeight, ...] = ()

    def value_name(self, model: Model, tensor: TensorRef) -> str:
        """Return the value name of `tensor` of `model` in the message."""
        name: str = self.renamed_tensors.get(tensor) or model.output(tensor).name
        return name


def emit(model: Model) -> Any:
    """Return the changed copy of the source, an `onnx.ModelProto`, with the provenance of the model.

    Raises a ModelError if a change cannot be expressed in ONNX.
    """
    emission = emit_message(model)
    write_onnx_metadata(emission.message, emission.model)
    return emission.message


@paused_gc()
def emit_message(model: Model, *, defer_weights: bool = False) -> Emission:
    """Return the changed copy of the source message; with `defer_weights`, without the values of large constants."""
    model, message = lower_fused_ops(model), ModelProto()
    if defer_weights:
        deferred = copy_without_weights(model.source.message, message)
    else:
        message.CopyFrom(model.source.message)
    return _MessageEmitter(model, message, deferred if defer_weights else None).emit()


class _MessageEmitter:
    """Patches `message`, a copy of the source of `model`, and appends the weights that it defers to `deferred`."""

    def __init__(self, model: Model, message: Any, deferred: list[DeferredWeight] | None) -> None:
        self._model = model
        self._source: OnnxSource = model.source
        self._message = message
        self._output_renames: dict[str, OutputRenames] = {}
        self._renamed_tensors: dict[TensorRef, str] = {}
        self._patches: dict[str, dict[str, set[int]]] = {}
        self._imported_domains: set[str] = set()  # domains that the message imports
        self._deferred = deferred

    def emit(self) -> Emission:
        graphs = self._model.graphs
        for name, graph in graphs.items():
            self._output_renames[name] = plan_output_names(self._model, graph, self._source.graphs[name])
        free_name = self._output_renames[""].free_name  # bodies within each other need different names
        for argument in dict.fromkeys(hiding_arguments(self._model)):
            new_name = free_name(graphs[argument.graph], f"{argument.op}/inner")
            self._output_renames[argument.graph].renamed_tensors[argument] = new_name
        for renames in self._output_renames.values():
            self._renamed_tensors.update(renames.renamed_tensors)
        uses = [use for graph in graphs.values() for use in graph.rerouted_uses]
        for tensor in self._renamed_tensors:
            uses += graphs[tensor.graph].consumers(tensor)
        for use in uses:
            self._patches.setdefault(use.graph, {}).setdefault(use.op, set()).add(use.slot)
        new_ops = [op for graph in graphs.values() for op in graph.ops() if op.source is None]
        for op in new_ops:  # before nodes are written, because later versions have metadata for each
            if op.kind == "constant":
                min_ir_version = DTYPE_IR_VERSIONS.get(op.outputs[0].dtype or "", FREE_INITIALIZERS_IR_VERSION)
                self._message.ir_version = max(self._message.ir_version, min_ir_version)
        self._patch_graph(graphs[""], self._message.graph, self._message)
        functions = [graph for name, graph in graphs.items() if name and graph.parent is None]
        for graph, target in zip(functions, self._message.functions, strict=True):
            self._patch_graph(graph, target, target)
        if new_ops:
            retain_entries(self._message.metadata_props, lambda entry: entry.key != VERSION_KEY)
            self._message.metadata_props.add(key=VERSION_KEY, value=__version__)
        return Emission(
            message=self._message,
            renamed_tensors=self._renamed_tensors,
            model=self._model,
            deferred=tuple(self._deferred or ()),
        )

    def _value_name(self, tensor: TensorRef | None) -> str:
        if tensor is None:
            return ""
        name: str = self._renamed_tensors.get(tensor) or self._model.output(tensor).name
        if not name:
            raise ModelError(f"{tensor} is read, but its op omits that output. Reroute its readers.")
        return name

    def _patch_graph(self, graph: Graph, target: Any, imports: Any) -> None:
        """Patch `target`, the copy of the graph's proto; `imports` is the message that lists its opsets."""
        source = self._source.graphs[graph.name]
        patches = self._patches.get(graph.name, {})
        for name, node in zip(source.node_names, target.node, strict=True):
            op = _loaded_op(graph, name)
            if op is not None:
                body_graphs = node_bodies(node) if op.calls else {}
                for call in op.calls:
                    if call.attr in body_graphs:
                        self._patch_graph(self._model.graphs[call.graph], body_graphs[call.attr], imports)
                if op is not source.loaded_ops[name]:
                    patch_node(node, op, source.loaded_ops[name])
                self._patch_connections(graph, name, node, patches.get(name, set()))
        renames = self._output_renames[graph.name]
        new_ops = [op for op in graph.ops() if op.source is None]
        unchanged = not new_ops and all(_loaded_op(graph, name) is op for name, op in source.loaded_ops.items())
        if unchanged and not patches and not renames.renamed_tensors:
            return
        self._relist_nodes(graph, source, target, imports)
        for position, output_name in renames.output_names.items():
            if isinstance(target, GraphProto):
                target.output[position].name = output_name
            else:
                target.output[position] = output_name
        if isinstance(target, GraphProto):
            self._patch_inputs(graph, source, target, new_ops)
            self._patch_initializers(graph, source, target, new_ops)
            self._patch_value_infos(graph, source, target, new_ops)

    def _patch_connections(self, graph: Graph, name: str, node: Any, slots: set[int]) -> None:
        """Patch the inputs in `slots` and the renamed outputs of the copy of a source node."""
        tensors = graph.slots(name) if slots else []
        for slot in sorted(slots):
            node.input.extend([""] * (slot + 1 - len(node.input)))
            node.input[slot] = self._value_name(tensors[slot])
        while node.input and not node.input[-1] and len(node.input) - 1 in slots:
            del node.input[-1]
        for port in range(len(node.output) if self._renamed_tensors else 0):
            new_name = self._renamed_tensors.get(TensorRef(graph.name, name, port), node.output[port])
            if new_name != node.output[port] and not node.name:
                node.name = name  # which a reader would derive from the output
            node.output[port] = new_name

    def _relist_nodes(self, graph: Graph, source: OnnxGraphSource, target: Any, imports: Any) -> None:
        """Rebuild the list of nodes: source nodes in their order, each new node before its first reader."""
        with_constants = not isinstance(target, GraphProto)
        ops = [
            op
            for op in map(graph.op, topological_order(graph, source.node_names))
            if isinstance(op.source, NodeProto)
            or (op.source is None and op.kind != "input" and (op.kind != "constant" or with_constants))
        ]
        identity_copies = self._output_renames[graph.name].identity_copies
        # Replacing the list copies every node, so unchanged lists stay.
        has_new_nodes = bool(identity_copies) or any(op.source is None for op in ops)
        if not has_new_nodes and [op.name for op in ops] == source.node_names:
            return
        copied_nodes = dict(zip(source.node_names, target.node, strict=True))
        del target.node[:]
        for op in ops:
            if op.source is None:  # created in its message, because a node of its own needs more time and memory
                self._write_node(graph, op, target.node.add(), imports)
            else:
                target.node.append(copied_nodes[op.name])
        for value, (name, tensor) in identity_copies.items():
            target.node.append(helper.make_node("Identity", [self._value_name(tensor)], [value], name=name))
            self._ensure_opset_import(imports, "")

    def _write_node(self, graph: Graph, op: Op, node: Any, imports: Any) -> None:
        outputs = [
            self._renamed_tensors.get(TensorRef(graph.name, op.name, port), output.name)
            for port, output in enumerate(op.outputs)
        ]
        if op.kind == "constant":
            write_constant_node(node, op, outputs[0])
        else:
            write_node(node, op, [self._value_name(tensor) for tensor in graph.slots(op.name)], outputs)
        if self._message.ir_version >= METADATA_IR_VERSION:
            write_rule_metadata(node, op)
        self._ensure_opset_import(imports, node.domain)

    def _ensure_opset_import(self, imports: Any, domain: str) -> None:
        if imports is self._message and domain in self._imported_domains:
            return
        equivalent_domains = DEFAULT_DOMAINS if domain in DEFAULT_DOMAINS else {domain}
        for owner in (imports, self._message):
            if all(entry.domain not in equivalent_domains for entry in owner.opset_import):
                version = 1 if domain else self._model.opset or DEFAULT_OPSET
                owner.opset_import.append(helper.make_opsetid(domain, version))
        self._imported_domains.add(domain)

    def _patch_inputs(self, graph: Graph, source: OnnxGraphSource, target: Any, new_ops: list[Op]) -> None:
        """Drop inputs that were removed or became constants, change types, add new inputs, and rename arguments."""
        input_names = set(graph.inputs)
        retain_entries(target.input, lambda info: info.name in input_names)
        ends = [(info, graph.op(info.name).outputs[0]) for info in target.input]
        ends += [
            (info, self._model.output(tensor))
            for info, name in zip(target.output, graph.outputs, strict=True)
            if (tensor := graph.source_of(Use(graph.name, name, 0))) is not None
        ]
        for info, output in ends:
            if info.type.HasField("tensor_type") and output.dtype in IO_DTYPES:
                info.type.tensor_type.elem_type = DTYPE_CODES[output.dtype]
        has_freed_input = any(
            op.kind == "input" and _loaded_op(graph, name) is not None and name not in input_names
            for name, op in source.loaded_ops.items()
        )
        if has_freed_input:
            self._message.ir_version = max(self._message.ir_version, FREE_INITIALIZERS_IR_VERSION)
        for op in new_ops:
            if op.kind == "input":
                output = op.outputs[0]
                info = helper.make_tensor_value_info(op.name, DTYPE_CODES[output.dtype or "float32"], output.shape)
                target.input.append(info)
        renamed = {tensor.op: name for tensor, name in self._output_renames[graph.name].renamed_tensors.items()}
        for info in chain(target.input, target.output):
            if info.name in input_names:  # an output that is an argument has its name
                info.name = renamed.get(info.name, info.name)

    def _patch_initializers(self, graph: Graph, source: OnnxGraphSource, target: Any, new_ops: list[Op]) -> None:
        """Drop, replace, rename and add initializers."""
        added = [op for op in new_ops if op.kind == "constant"]
        for sparse in target.sparse_initializer:
            op = _loaded_op(graph, sparse.values.name)
            if op is not None and op.read_value is not source.loaded_ops[op.name].read_value:
                added.append(op)
        added_names = {op.name for op in added}
        retain_entries(
            target.sparse_initializer,
            lambda initializer: (
                _loaded_op(graph, initializer.values.name) is not None and initializer.values.name not in added_names
            ),
        )
        retain_entries(target.initializer, lambda initializer: _loaded_op(graph, initializer.name) is not None)
        for tensor in chain(target.initializer, (sparse.values for sparse in target.sparse_initializer)):
            op = graph.op(tensor.name)
            if op.read_value is not source.loaded_ops[op.name].read_value:
                tensor.CopyFrom(self._create_tensor(op, op.name))
            if op.outputs[0].name != (name := self._value_name(TensorRef(graph.name, op.name))):
                tensor.name = name
        target.initializer.extend(
            self._create_tensor(op, self._value_name(TensorRef(graph.name, op.name))) for op in added
        )

    def _create_tensor(self, op: Op, name: str) -> Any:
        if self._deferred is None or constant_bytes(op) < EXTERNAL_MIN_BYTES:
            return constant_tensor(op, name)
        self._deferred.append(op)
        return deferred_tensor(op, name, len(self._deferred) - 1)

    def _patch_value_infos(self, graph: Graph, source: OnnxGraphSource, target: Any, new_ops: list[Op]) -> None:
        """Update value_info: drop removed and renamed values, and add the types of new and renamed tensors."""
        renamed = [t for t in self._output_renames[graph.name].renamed_tensors if t.op in source.loaded_ops]
        stale_names = {source.loaded_ops[tensor.op].outputs[tensor.port].name for tensor in renamed}
        removed = [op for name, op in source.loaded_ops.items() if _loaded_op(graph, name) is None]
        stale_names.update(output.name for op in removed for output in op.outputs)
        loaded = [(op, _loaded_op(graph, name)) for name, op in source.loaded_ops.items() if op.outputs]
        stale_names.update(
            op.outputs[0].name for op, new in loaded if new is not None and new.outputs[0].dtype != op.outputs[0].dtype
        )
        retain_entries(target.value_info, lambda info: info.name not in stale_names)
        output_names = {info.name for info in target.output}
        new_outputs = (
            (TensorRef(graph.name, op.name, port), output)
            for op in new_ops
            if op.kind not in {"constant", "input"}
            for port, output in enumerate(op.outputs)
        )
        types: dict[tuple[str, Shape], Any] = {}
        values = (tensor for tensor in renamed if graph.op(tensor.op).kind != "input")
        for tensor, output in chain(((tensor, self._model.output(tensor)) for tensor in values), new_outputs):
            name = self._renamed_tensors.get(tensor) or output.name
            if name not in output_names and output.dtype in DTYPE_CODES and output.shape is not None:
                key = output.dtype, output.shape
                if key not in types:
                    types[key] = helper.make_tensor_type_proto(DTYPE_CODES[output.dtype], output.shape)
                target.value_info.add(name=name, type=types[key])


def _loaded_op(graph: Graph, name: str) -> Op | None:
    """Return the op of the source called `name`, None if it was removed or a new op has its name."""
    op = graph.op(name) if name in graph else None
    return op if op is not None and op.source is not None else None


def topological_order(graph: Graph, preferred: Iterable[str]) -> list[str]:
    """Return all ops in topological order, those of `preferred` in that order as far as possible."""
    # The sorting of networkx would not keep the order of the source, and a model would not be saved byte for byte.
    visited: set[str] = set()
    ordered: list[str] = []
    for root in chain((name for name in preferred if name in graph), (op.name for op in graph.ops())):
        if root in visited:
            continue
        visited.add(root)
        stack = [(root, iter(graph.predecessors(root)))]
        while stack:
            name, sources = stack[-1]
            for source in sources:
                if source not in visited:
                    visited.add(source)
                    stack.append((source, iter(graph.predecessors(source))))
                    break
            else:
                ordered.append(name)
                stack.pop()
    return ordered


def node_bodies(node: Any) -> dict[str, Any]:
    """Return the graphs that a node holds, by `Call.attr`."""
    graphs: dict[str, Any] = {}
    for attr in node.attribute:
        if attr.HasField("g"):
            graphs[attr.name] = attr.g
        graphs.update((f"{attr.name}[{k}]", graph) for k, graph in enumerate(attr.graphs))
    return graphs


@dataclass(slots=True, kw_only=True)
class OutputRenames:
    """Renames that keep the names of one graph's outputs."""

    renamed_tensors: dict[TensorRef, str] = field(default_factory=dict)  # new names of values
    # Identity nodes to add: output value to (node name, tensor read).
    identity_copies: dict[str, tuple[str, TensorRef]] = field(default_factory=dict)
    # New names for outputs of bodies and functions, by position; there the order counts, not the name.
    output_names: dict[int, str] = field(default_factory=dict)
    issued_names: set[str] = field(default_factory=set)  # the names that `free_name` returned

    def free_name(self, graph: Graph, base: str) -> str:
        """Return a name that is free in the graph and that was not returned before."""
        name, suffix = graph.unique_name(base), 1
        while name in self.issued_names:
            name, suffix = graph.unique_name(f"{base}_{suffix}"), suffix + 1
        self.issued_names.add(name)
        return name


def plan_output_names(model: Model, graph: Graph, source: OnnxGraphSource) -> OutputRenames:
    """Return the renames with which the outputs of `graph` have the same names as in its source.

    1. The tensor that an output reads takes the output's name.
    2. A tensor that cannot (an input, an initializer, a tensor of an outer graph or of another output) is copied by an
       Identity.
    3. An output of a body whose name belongs to an input or an outer value takes the name of the tensor it reads.
    4. The value that had the output's name before gets a new one.
    """
    renames = OutputRenames()
    free_name = partial(renames.free_name, graph)
    read_tensors = {name: graph.slots(name)[0] for name in graph.outputs}
    changed = {name: tensor for name, tensor in read_tensors.items() if _is_changed_output(graph, source, name, tensor)}
    claimed = {tensor for name, tensor in read_tensors.items() if name not in changed}
    freed_names: list[str] = []
    for name, tensor in changed.items():
        value = output_value_name(graph.op(name))
        if tensor is None:
            raise ModelError(f"The graph output {value!r} reads nothing. Reroute it to a tensor.")
        op = model.op(tensor)
        is_node_output = isinstance(op.source, NodeProto) or (op.source is None and op.kind != "constant")
        can_rename = tensor.graph == graph.name and tensor not in claimed and is_node_output
        claimed.add(tensor)
        new_name = value
        if value not in source.values or source.loaded_ops[source.values[value].op].kind == "input":
            # Case 3.
            if not graph.name:
                raise ModelError(
                    f"The graph output {value!r} is the graph input of that name, so no op can be inserted between "
                    "them. Exclude it with --exclude."
                )
            new_name = model.output(tensor).name if can_rename else free_name(f"{value}/output")
            renames.output_names[graph.outputs.index(name)] = new_name
        else:
            freed_names.append(value)
        if not can_rename:
            renames.identity_copies[new_name] = (free_name(f"{value}/identity"), tensor)  # Case 2.
        elif new_name == value:
            renames.renamed_tensors[tensor] = value  # Case 1.
    for value in freed_names:
        previous = source.values[value]
        if previous not in renames.renamed_tensors and _loaded_op(graph, previous.op) is not None:
            renames.renamed_tensors[previous] = free_name(f"{value}/float")  # Case 4.
    return renames


def hiding_arguments(model: Model) -> Iterator[TensorRef]:
    """Yield the arguments of bodies that have the name of a tensor of an outer graph that the body reads.

    Exporters repeat names in bodies, which is harmless until an edit lets the body read the outer tensor. The position
    of an argument counts, not its name.
    """
    for graph in model.graphs.values():
        if graph.parent is None:
            continue
        for tensor in (tensor for op in graph.ops() for tensor in graph.slots(op.name)):
            inner = graph
            while tensor is not None and inner.name != tensor.graph and inner.parent is not None:
                if (name := model.output(tensor).name) in inner.inputs:
                    yield TensorRef(inner.name, name)
                inner = model.graphs[inner.parent[0]]


def _is_changed_output(graph: Graph, source: OnnxGraphSource, name: str, tensor: TensorRef | None) -> bool:
    """Return True if output `name`, which reads `tensor`, read another tensor at load."""
    if Use(graph.name, name, 0) not in graph.rerouted_uses:
        return False
    loaded_tensor = source.values.get(output_value_name(graph.op(name)))
    return tensor is None or tensor != loaded_tensor or graph.op(tensor.op) is not source.loaded_ops[tensor.op]
