"""Write a changed `Model` to a message: copy the source, patch its changed nodes, add new nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, Final

from graphquant.errors import InternalError
from graphquant.formats.tensorflow import ops, proto
from graphquant.formats.tensorflow.learned_ranges import add_initializers, learned_ranges
from graphquant.formats.tensorflow.load import ARGUMENT_TYPE, RESULT_TYPE
from graphquant.formats.tensorflow.source import ANCHOR_ATTR, RULE_ATTR, TensorFlowSource
from graphquant.formats.tensorflow.values import ConstValue, NodeAttrs, encode_attr, set_constant, type_number
from graphquant.ir import Graph, Model, Op, TensorRef, Use, paused_gc, reachable

_ATTR_TYPES: Final = {"s": "string", "i": "int", "f": "float", "b": "bool", "func": "func", "placeholder": "string"}
_BOUNDARY_TYPES: Final = frozenset({ARGUMENT_TYPE, RESULT_TYPE})


@paused_gc()
def emit(model: Model, *, to_run: bool = False) -> Any:
    """Return the source message with the model's changes. Without changes it equals the source.

    With `to_run`, the functions are omitted that only Python code calls, such as the clones for training.

    Raises an InternalError if the model contains something that a TensorFlow graph cannot express.
    """
    source: TensorFlowSource = model.source
    message = deepcopy(source.message)
    graph_def, meta = source.graph_def(message), source.meta_graph(message)
    if to_run:
        _remove_uncalled_functions(graph_def)
    table = ops.model_op_table(graph_def, meta)
    new_nodes = _GraphPatch(model.main, table).apply(graph_def.node)
    for function in graph_def.library.function:
        graph_patch = _GraphPatch(model.graphs[function.signature.name], table)
        new_nodes += graph_patch.apply(function.node_def)
        graph_patch.apply_results(function)
    if meta is None:
        add_initializers(graph_def, learned_ranges(model))
        return message
    _patch_signatures(model.main, meta.signature_def)
    if meta.meta_info_def.stripped_op_list.op:
        _add_op_defs(meta.meta_info_def.stripped_op_list, new_nodes, table)
    return message


def _remove_uncalled_functions(graph_def: Any) -> None:
    """Remove the functions that no node of the main graph calls, directly or in a function."""
    functions = {function.signature.name: function for function in graph_def.library.function}

    def called_by(nodes: Any) -> Iterator[str]:
        for node in nodes:
            names = (node.op, *(call.name for _, call in proto.function_attrs(node)))
            yield from (name for name in names if name in functions)

    starts = [*called_by(graph_def.node)]
    for gradient in graph_def.library.gradient:
        starts += [name for name in (gradient.function_name, gradient.gradient_func) if name in functions]
    called = set(reachable(starts, lambda name: called_by(functions[name].node_def)))
    for index in reversed(range(len(functions))):
        if graph_def.library.function[index].signature.name not in called:
            del graph_def.library.function[index]


class _GraphPatch:
    """Writes the changes of one graph into its nodes."""

    def __init__(self, graph: Graph, table: ops.OpTable) -> None:
        self._graph, self._table = graph, table
        self._ports: dict[str, list[tuple[str, int, str]]] = {}

    def apply(self, nodes: Any) -> list[Any]:
        """Patch `nodes`, a repeated field, and return the new nodes."""
        graph = self._graph
        new_ops = {op.name: op for op in graph.ops() if op.source is None and op.type not in _BOUNDARY_TYPES}
        patched = [
            node for node in nodes if node.name in graph and node.name not in new_ops and self._node_changed(node)
        ]
        if not (new_ops or patched or graph.removed_ops):
            return []
        new_nodes = {op.name: self._make_node(op) for op in new_ops.values()}
        if self._graph.name:
            # Inputs refer to the output names of the new nodes, which follow from their attributes.
            self._ports = {name: ops.output_ports(node, self._table) for name, node in new_nodes.items()}
        for name, node in new_nodes.items():
            node.input.extend(self._input_name(tensor) for tensor in self._connected_inputs(new_ops[name]))
            node.input.extend(f"^{control}" for control in graph.control_inputs(name))
            node.device = self._source_device(new_ops[name])
        for node in patched:
            self._patch_node(node)
        appended = dict(new_nodes)
        if any(node.name in new_ops or node.name not in graph for node in nodes):
            # Deleted nodes are removed, and replaced ones keep their positions.
            proto.replace_nodes(nodes, [appended.pop(node.name, node) for node in nodes if node.name in graph])
        nodes.extend(appended.values())
        return list(new_nodes.values())

    def apply_results(self, function: Any) -> None:
        """Point the function's results at the tensors now read, and drop control outputs of removed nodes."""
        graph = self._graph
        for label, tensor in _rerouted_outputs(graph):
            function.ret[label.removeprefix("@")] = self._input_name(tensor)
        for key in sorted(function.control_ret) if graph.removed_ops else ():
            if function.control_ret[key] not in graph:
                del function.control_ret[key]
                if key in function.signature.control_output:
                    function.signature.control_output.remove(key)

    def _input_name(self, tensor: TensorRef) -> str:
        """Return the text that names `tensor` as an input of a node of this graph."""
        op = self._graph.op(tensor.op)
        if op.source is not None:
            name = op.outputs[tensor.port].name
            return name if self._graph.name else name.removesuffix(":0")
        if self._graph.name:
            arg, index, _ = self._ports[tensor.op][tensor.port]
            return f"{tensor.op}:{arg}:{index}"
        return f"{tensor.op}:{tensor.port}" if tensor.port else tensor.op

    def _node_changed(self, node: Any) -> bool:
        graph, op = self._graph, self._graph.op(node.name)
        uses = (Use(graph.name, op.name, slot) for slot in range(len(graph.slots(op.name))))
        return (
            any(use in graph.rerouted_uses for use in uses)
            or {text[1:] for text in proto.split_inputs(node)[1]} != set(graph.control_inputs(op.name))
            or op.type != node.op
            or not isinstance(op.attrs, NodeAttrs)
            or _new_value(op) is not None
        )

    def _patch_node(self, node: Any) -> None:
        op = self._graph.op(node.name)
        old_inputs, old_controls = proto.split_inputs(node)
        data = [
            self._input_name(tensor)
            if slot >= len(old_inputs) or Use(self._graph.name, op.name, slot) in self._graph.rerouted_uses
            else old_inputs[slot]
            for slot, tensor in enumerate(self._connected_inputs(op))
        ]
        control_inputs = self._graph.control_inputs(op.name)
        old_controls = [text for text in old_controls if text[1:] in control_inputs]
        new_controls = [f"^{name}" for name in control_inputs if f"^{name}" not in old_controls]
        del node.input[:]
        node.input.extend([*data, *old_controls, *new_controls])
        node.op = op.type
        if not isinstance(op.attrs, NodeAttrs):
            source_attrs = NodeAttrs(op.source.attr, {})
            for name, value in op.attrs.items():
                old = source_attrs.get(name)
                if name not in source_attrs or type(old) is not type(value) or encode_attr(old) != encode_attr(value):
                    node.attr[name].CopyFrom(encode_attr(value))
        if (read_value := _new_value(op)) is not None:
            set_constant(node, read_value())

    def _connected_inputs(self, op: Op) -> list[TensorRef]:
        slots = self._graph.slots(op.name)
        connected = [slot for slot in slots if slot is not None]
        if len(connected) != len(slots):
            raise InternalError(f"op {op.name!r} has an empty input slot, which TensorFlow does not support.")
        return connected

    def _make_node(self, op: Op) -> Any:
        """Make the node of a new op, without its inputs."""
        node = proto.NodeDef(name=op.name, op=op.type)
        for name, value in op.attrs.items():
            node.attr[name].CopyFrom(encode_attr(value))
        if op.kind == "constant":
            if op.read_value is None:
                raise InternalError(f"the constant {op.name!r} has no value.")
            set_constant(node, op.read_value())
        self._infer_type_attrs(op, node)
        if op.rule:
            node.attr[RULE_ATTR].s = op.rule.encode()
        if op.anchor:
            node.attr[ANCHOR_ATTR].s = op.anchor.encode()
        return node

    def _infer_type_attrs(self, op: Op, node: Any) -> None:
        """Fill in the type attributes that follow from the op's inputs."""
        if (spec := self._table.find_spec(op.type)) is None:
            raise InternalError(f"op {op.name!r} has the type {op.type!r}, which is not registered in TensorFlow.")
        for tensor, arg in zip(self._graph.slots(op.name), spec.inputs, strict=False):
            if arg.number_attr or arg.type_list_attr:
                return  # slots after a list have no fixed position
            if arg.type_attr and arg.type_attr not in node.attr and tensor is not None:
                dtype = self._graph.output(tensor).dtype
                if dtype is not None:
                    node.attr[arg.type_attr].type = type_number(dtype)

    def _source_device(self, op: Op) -> str:
        """Return the device of the op that produces the input of `op` or, past new ops, of its first reader."""
        visited: set[str] = set()
        current = op
        while current.source is None and current.name not in visited:
            visited.add(current.name)
            slots = self._graph.slots(current.name)
            if slots and slots[0] is not None:
                current = self._graph.op(slots[0].op)
            else:
                current = self._graph.op(next(iter(self._graph.successors(current.name)), current.name))
        return str(current.source.device) if current.source is not None and current.type not in _BOUNDARY_TYPES else ""


def _new_value(op: Op) -> Callable[[], Any] | None:
    """Return the reader of a source constant's changed value, None for other ops."""
    return None if op.kind != "constant" or isinstance(op.read_value, ConstValue) else op.read_value


def _rerouted_outputs(graph: Graph) -> Iterator[tuple[str, TensorRef]]:
    """Yield the rerouted outputs of a graph with their tensors."""
    for label in graph.outputs:
        if Use(graph.name, label, 0) in graph.rerouted_uses:
            if (tensor := graph.source_of(Use(graph.name, label, 0))) is None:
                raise InternalError(f"the output {label!r} of {graph.name or 'the main graph'} reads nothing.")
            yield label, tensor


def _patch_signatures(main: Graph, signatures: Any) -> None:
    """Point the signatures' outputs at the tensors that the model's outputs now read."""
    rerouted = {main.op(label).attrs.get("tensor"): str(tensor) for label, tensor in _rerouted_outputs(main)}
    for signature in signatures.values():
        for output in signature.outputs.values():
            new_name = rerouted.get(output.name if ":" in output.name else f"{output.name}:0")
            if new_name is not None:  # writing a name discards a composite tensor
                output.name = new_name


def _add_op_defs(op_list: Any, new_nodes: list[Any], table: ops.OpTable) -> None:
    """Add the definition of each operation that the new nodes use and the list lacks."""
    listed = {op_def.name for op_def in op_list.op}
    node_by_type = {node.op: node for node in reversed(new_nodes)}
    for name in sorted(node_by_type.keys() - listed):
        spec = table.find_spec(name)
        if spec is not None:
            _fill_op_def(op_list.op.add(), spec, node_by_type[name])


def _fill_op_def(op_def: Any, spec: ops.OpSpec, node: Any) -> None:
    """Define an operation by its arguments and the node's attributes."""
    op_def.name, op_def.is_stateful = spec.name, spec.is_stateful
    types: dict[str, str] = {}
    for field, args in ((op_def.input_arg, spec.inputs), (op_def.output_arg, spec.outputs)):
        for arg in args:
            field.add(
                name=arg.name,
                type=type_number(arg.dtype) if arg.dtype else 0,
                type_attr=arg.type_attr,
                number_attr=arg.number_attr,
                type_list_attr=arg.type_list_attr,
                is_ref=arg.is_ref,
            )
            types |= {arg.type_list_attr: "list(type)", arg.number_attr: "int", arg.type_attr: "type"}
    types.pop("", None)  # the attributes that arguments do not have
    for name in sorted(node.attr):
        kind = node.attr[name].WhichOneof("value")
        if not name.startswith("_") and kind not in {None, "list"}:
            types.setdefault(name, _ATTR_TYPES.get(kind, kind))
    for name in sorted(types):
        op_def.attr.add(name=name, type=types[name])
