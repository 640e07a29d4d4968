"""A changed `Model` back to a message: the source is copied, its changed nodes are patched, new nodes are added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from graphquant.errors import InternalError
from graphquant.formats.tensorflow import opdefs, proto
from graphquant.formats.tensorflow.learned import add_initializers, learned
from graphquant.formats.tensorflow.load import ARGUMENT, RESULT
from graphquant.formats.tensorflow.notes import ANCHOR_ATTR, RULE_ATTR
from graphquant.formats.tensorflow.values import Attrs, Stored, encode_attr, encode_tensor, type_number
from graphquant.ir import Graph, Model, Op, TensorRef, Use, bulk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from graphquant.formats.tensorflow.source import Source

__all__ = ["emit"]

_ATTR_TYPES: Final = {"s": "string", "i": "int", "f": "float", "b": "bool", "func": "func", "placeholder": "string"}
_ENDS: Final = frozenset({ARGUMENT, RESULT})


@bulk()
def emit(model: Model) -> Any:
    """The source message with the model's changes: equal to the source if there are none.

    Raises:
        InternalError: The model holds what a TensorFlow graph cannot say.
    """
    source: Source = model.source
    message = type(source.message)()
    message.CopyFrom(source.message)
    graph_def, meta = source.graph_def(message), source.meta_graph(message)
    brought = meta.meta_info_def.stripped_op_list.op if meta is not None else ()
    table = opdefs.extend(brought).extend(function.signature for function in graph_def.library.function)
    written: list[Any] = []
    patch = _Patch(model.main, table, in_function=False)
    written += patch.apply(graph_def.node)
    if meta is not None:
        _patch_signatures(model.main, meta.signature_def, source.meta_graph(source.message).signature_def)
    for function in graph_def.library.function:
        graph = model.graphs[function.signature.name]
        patch = _Patch(graph, table, in_function=True)
        written += patch.apply(function.node_def)
        _patch_results(patch, function)
    if meta is None:
        add_initializers(graph_def, learned(model))
    if meta is not None and meta.meta_info_def.stripped_op_list.op:
        _add_op_defs(meta.meta_info_def.stripped_op_list, written, table)
    return message


class _Patch:
    """Writes the changes of one graph into its nodes."""

    def __init__(self, graph: Graph, table: opdefs.OpTable, *, in_function: bool) -> None:
        self._graph = graph
        self._table = table
        self._in_function = in_function
        self._ports: dict[str, list[tuple[str, int, str]]] = {}

    def apply(self, nodes: Any) -> list[Any]:
        """Patches `nodes`, a repeated field; returns the nodes that are new."""
        graph = self._graph
        fresh = {op.name: op for op in graph.ops() if op.source is None and op.type not in _ENDS}
        patched = [node for node in nodes if node.name in graph and node.name not in fresh and self._is_changed(node)]
        if not (fresh or patched or graph.removed):
            return []
        written = [self._attributes(op) for op in fresh.values()]
        for node in written:
            # Inputs need the names of the new nodes' outputs, which follow from their attributes.
            if self._in_function:
                self._ports[node.name] = opdefs.output_ports(node, self._table)
        for node in written:
            op = fresh[node.name]
            node.input.extend(self.spell(tensor) for tensor in self._filled(op))
            node.input.extend(f"^{name}" for name in graph.control_inputs(op.name))
            node.device = self._device(op)
        for node in patched:
            self._patch(node)
        self._put(nodes, written, fresh)
        return written

    def spell(self, tensor: TensorRef) -> str:
        """`tensor` as an input of a node of this graph names it."""
        op = self._graph.op(tensor.op)
        if op.source is not None:
            name = op.outputs[tensor.port].name
            return name if self._in_function else name.removesuffix(":0")
        if self._in_function:
            arg, index, _ = self._ports[tensor.op][tensor.port]
            return f"{tensor.op}:{arg}:{index}"
        return f"{tensor.op}:{tensor.port}" if tensor.port else tensor.op

    def _put(self, nodes: Any, written: list[Any], fresh: Mapping[str, Op]) -> None:
        """Takes removed and replaced nodes out and puts new ones at the end, replaced ones in their place."""
        by_name = {node.name: node for node in written}
        if any(node.name in fresh or node.name not in self._graph for node in nodes):
            kept = [by_name.pop(node.name, node) for node in nodes if node.name in self._graph]
            copies = [_copy(node) for node in kept]
            del nodes[:]
            nodes.extend(copies)
        nodes.extend(by_name.values())

    def _is_changed(self, node: Any) -> bool:
        op = self._graph.op(node.name)
        return (
            any(
                Use(self._graph.name, op.name, slot) in self._graph.edited
                for slot in range(len(self._graph.slots(op.name)))
            )
            or {text[1:] for text in node.input if text.startswith("^")} != set(self._graph.control_inputs(op.name))
            or op.type != node.op
            or not isinstance(op.attrs, Attrs)
            or (op.kind == "constant" and op.value is not None and not isinstance(op.value, Stored))
        )

    def _patch(self, node: Any) -> None:
        """Writes what changed of an op of the source into its node."""
        op = self._graph.op(node.name)
        before = [text for text in node.input if not text.startswith("^")]
        data = [
            self.spell(tensor)
            if slot >= len(before) or Use(self._graph.name, op.name, slot) in self._graph.edited
            else before[slot]
            for slot, tensor in enumerate(self._filled(op))
        ]
        wanted = self._graph.control_inputs(op.name)
        kept = [text for text in node.input if text.startswith("^") and text[1:] in wanted]
        added = [f"^{name}" for name in wanted if f"^{name}" not in kept]
        del node.input[:]
        node.input.extend([*data, *kept, *added])
        node.op = op.type
        if not isinstance(op.attrs, Attrs):
            loaded = Attrs(op.source.attr, {})
            for name, value in op.attrs.items():
                if name not in loaded or not _equal(loaded[name], value):
                    node.attr[name].CopyFrom(encode_attr(value))
        if op.kind == "constant" and op.value is not None and not isinstance(op.value, Stored):
            _set_value(node, op)

    def _filled(self, op: Op) -> list[TensorRef]:
        slots = self._graph.slots(op.name)
        found = [slot for slot in slots if slot is not None]
        if len(found) != len(slots):
            raise InternalError(f"op {op.name!r} has an empty input slot; TensorFlow has none.")
        return found

    def _attributes(self, op: Op) -> Any:
        """The node of a new op, without its inputs."""
        node = proto.NodeDef(name=op.name, op=op.type)
        for name, value in op.attrs.items():
            node.attr[name].CopyFrom(encode_attr(value))
        if op.kind == "constant":
            _set_value(node, op)
        self._infer_types(op, node)
        if op.rule:
            node.attr[RULE_ATTR].s = op.rule.encode()
        if op.anchor:
            node.attr[ANCHOR_ATTR].s = op.anchor.encode()
        return node

    def _infer_types(self, op: Op, node: Any) -> None:
        """Fills in the type attributes that follow from what the op reads."""
        spec = self._table.find(op.type)
        if spec is None:
            raise InternalError(f"op {op.name!r} has the type {op.type!r}, which TensorFlow does not have.")
        for slot, arg in enumerate(spec.inputs):
            slots = self._graph.slots(op.name)
            if arg.number_attr or arg.type_list_attr:
                return  # what follows has no fixed place
            if arg.type_attr and arg.type_attr not in node.attr and slot < len(slots):
                tensor = slots[slot]
                dtype = None if tensor is None else self._graph.output(tensor).dtype
                if dtype is not None:
                    node.attr[arg.type_attr].type = type_number(dtype)

    def _device(self, op: Op) -> str:
        """The device of what produces the tensor that the new op, or the first new op to read it, works on."""
        seen: set[str] = set()
        here = op
        while here.source is None and here.name not in seen:
            seen.add(here.name)
            slots = self._graph.slots(here.name)
            if slots and slots[0] is not None:
                here = self._graph.op(slots[0].op)
            else:
                here = self._graph.op(next(iter(self._graph.nx.adj[here.name]), here.name))
        return str(here.source.device) if here.source is not None and here.type not in _ENDS else ""


def _copy(node: Any) -> Any:
    twin = proto.NodeDef()
    twin.CopyFrom(node)
    return twin


def _set_value(node: Any, op: Op) -> None:
    if op.value is None:
        raise InternalError(f"the constant {op.name!r} has no value.")
    tensor = encode_tensor(op.value())
    node.attr["dtype"].type = tensor.dtype
    node.attr["value"].tensor.CopyFrom(tensor)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and encode_attr(one) == encode_attr(other)


def _patch_signatures(main: Graph, signatures: Any, before: Any) -> None:
    """Points the signatures' outputs at the tensors that the model's outputs read now."""
    moved = {}
    for label in main.outputs:
        if Use("", label, 0) in main.edited:
            tensor = main.producer(Use("", label, 0))
            if tensor is None:
                raise InternalError(f"the output {label!r} reads nothing.")
            moved[main.op(label).attrs.get("tensor")] = str(tensor)
    for key in sorted(before) if moved else ():
        for name in sorted(before[key].outputs):
            old = before[key].outputs[name].name
            new = moved.get(old if ":" in old else f"{old}:0")
            if new is not None:
                signatures[key].outputs[name].name = new


def _patch_results(patch: _Patch, function: Any) -> None:
    """Points a function's results at the tensors that are read now, and forgets control outputs of removed nodes."""
    graph = patch._graph  # noqa: SLF001  # the same room
    for label in graph.outputs:
        if Use(graph.name, label, 0) in graph.edited:
            tensor = graph.producer(Use(graph.name, label, 0))
            if tensor is None:
                raise InternalError(f"the output {label!r} of {graph.name!r} reads nothing.")
            function.ret[label.removeprefix("@")] = patch.spell(tensor)
    if graph.removed:
        gone = [key for key in sorted(function.control_ret) if function.control_ret[key] not in graph]
        for key in gone:
            del function.control_ret[key]
            if key in function.signature.control_output:
                function.signature.control_output.remove(key)


def _add_op_defs(op_list: Any, written: Iterable[Any], table: opdefs.OpTable) -> None:
    """Adds the definition of each operation that the new nodes use and the list does not hold."""
    present = {op_def.name for op_def in op_list.op}
    first = {node.op: node for node in reversed(list(written))}
    for name in sorted(first):
        spec = table.find(name)
        if name not in present and spec is not None:
            op_list.op.append(_op_def(spec, first[name]))


def _op_def(spec: opdefs.OpSpec, node: Any) -> Any:
    """The definition of an operation, as far as its arguments and the node's attributes tell it."""
    op_def = proto.OpDef(name=spec.name, is_stateful=spec.is_stateful)
    types: dict[str, str] = {}
    for field, args in ((op_def.input_arg, spec.inputs), (op_def.output_arg, spec.outputs)):
        for arg in args:
            made = field.add(name=arg.name, is_ref=arg.is_ref)
            if arg.type_list_attr:
                made.type_list_attr = arg.type_list_attr
                types[arg.type_list_attr] = "list(type)"
                continue
            if arg.number_attr:
                made.number_attr = arg.number_attr
                types[arg.number_attr] = "int"
            if arg.type_attr:
                made.type_attr = arg.type_attr
                types[arg.type_attr] = "type"
            elif arg.dtype:
                made.type = type_number(arg.dtype)
    for name in sorted(node.attr):
        kind = node.attr[name].WhichOneof("value")
        if not name.startswith("_") and kind not in {None, "list"}:
            types.setdefault(name, _ATTR_TYPES.get(kind, kind))
    for name in sorted(types):
        op_def.attr.add(name=name, type=types[name])
    return op_def
