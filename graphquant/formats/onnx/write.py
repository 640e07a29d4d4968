"""Models back to ModelProtos: a copy of the source message with the changed ops patched and the new ones added."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from onnx import GraphProto, ModelProto, NodeProto, helper

from graphquant import __version__
from graphquant.errors import ModelError
from graphquant.formats.onnx.apart import BULKY, copied, later, size_of
from graphquant.formats.onnx.nodes import constant_node, new_node, patch_node, stamp, tensor_of
from graphquant.formats.onnx.notes import IR_METADATA
from graphquant.formats.onnx.rename import Ends, ends_of
from graphquant.formats.onnx.tensors import CODES
from graphquant.ir import Graph, Model, Op, TensorRef, bulk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from graphquant.formats.onnx.apart import Left
    from graphquant.formats.onnx.source import GraphSource, Source

VERSION_KEY = "graphquant.version"

IR_FREE_INITIALIZERS = 4
"""First IR version whose initializers need not be graph inputs."""

IR_TYPES = {"float8_e4m3fn": 9, "float8_e5m2": 9, "int4": 10, "uint4": 10}
"""First IR version of newer types that constants have."""

DEFAULT_OPSET = 13
"""Opset of the default domain for a model that had no op of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emission:
    """A model as a message, and the names that its tensors have there.

    Attributes:
        message: The ModelProto.
        renamed: Names of the tensors that are called otherwise than their `Output` says.
        later: Constants whose values are still missing in the message, see `formats.onnx.apart`.
    """

    message: Any
    renamed: dict[TensorRef, str]
    later: tuple[Left, ...] = ()

    def name(self, model: Model, tensor: TensorRef) -> str:
        """The value name of `tensor` of `model` in the message."""
        name: str = self.renamed.get(tensor) or model.output(tensor).name
        return name


@bulk()
def emit(model: Model, *, bare: bool = False) -> Emission:
    """The changed copy of the source message; with `bare` the values of bulky constants are left for later.

    Raises:
        ModelError: A change cannot be said in ONNX.
    """
    message = ModelProto()
    if bare:
        left = copied(model.source.message, message)
    else:
        message.CopyFrom(model.source.message)
    return _Emitter(model, message, left if bare else None).run()


class _Emitter:
    """Patches `message`, a copy of the source of `model`; to `left` it adds what it leaves for later."""

    def __init__(self, model: Model, message: Any, left: list[Left] | None) -> None:
        self._model = model
        self._source: Source = model.source
        self._message = message
        self._ends: dict[str, Ends] = {}
        self._renamed: dict[TensorRef, str] = {}
        self._patches: dict[str, dict[str, set[int]]] = {}
        self._grown = False
        self._left = left

    def run(self) -> Emission:
        graphs = self._model.graphs
        for name, graph in graphs.items():
            self._ends[name] = ends_of(self._model, graph, self._source.graphs[name])
            self._renamed.update(self._ends[name].renamed)
        uses = [use for graph in graphs.values() for use in graph.edited]
        for tensor in self._renamed:
            uses += graphs[tensor.graph].consumers(tensor)
        for use in uses:
            self._patches.setdefault(use.graph, {}).setdefault(use.op, set()).add(use.slot)
        self._graph(graphs[""], self._message.graph, self._message)
        functions = [graph for name, graph in graphs.items() if name and graph.parent is None]
        for graph, target in zip(functions, self._message.functions, strict=True):
            self._graph(graph, target, target)
        if self._grown:
            keep(self._message.metadata_props, lambda entry: entry.key != VERSION_KEY)
            self._message.metadata_props.add(key=VERSION_KEY, value=__version__)
        return Emission(message=self._message, renamed=self._renamed, later=tuple(self._left or ()))

    def _name(self, tensor: TensorRef | None) -> str:
        if tensor is None:
            return ""
        name: str = self._renamed.get(tensor) or self._model.output(tensor).name
        if not name:
            raise ModelError(f"{tensor} is read, but its op leaves that output out. Reroute its readers.")
        return name

    def _graph(self, graph: Graph, target: Any, imports: Any) -> None:
        """Patches `target`, the copy of the graph's proto; `imports` is the message that lists its opsets."""
        source = self._source.graphs[graph.name]
        patches = self._patches.get(graph.name, {})
        for name, node in zip(source.nodes, target.node, strict=True):
            op = _live(graph, name)
            if op is not None:
                self._bodies(op, node, imports)
                if op is not source.loaded[name]:
                    patch_node(node, op, source.loaded[name])
                self._wire(graph, name, node, patches.get(name, set()))
        ends = self._ends[graph.name]
        fresh = [op for op in graph.ops() if op.source is None]
        same = not fresh and all(_live(graph, name) is op for name, op in source.loaded.items())
        if same and not patches and not ends.renamed:
            return
        self._grown = self._grown or bool(fresh)
        self._nodes(graph, source, target, imports)
        for position, title in ends.titles.items():
            if isinstance(target, GraphProto):
                target.output[position].name = title
            else:
                target.output[position] = title
        if isinstance(target, GraphProto):
            self._inputs(graph, source, target, fresh)
            self._initializers(graph, source, target, fresh)
            self._infos(graph, source, target, fresh)

    def _bodies(self, op: Op, node: Any, imports: Any) -> None:
        if op.calls:
            held = bodies(node)
            for call in op.calls:
                if call.attr in held:
                    self._graph(self._model.graphs[call.graph], held[call.attr], imports)

    def _wire(self, graph: Graph, name: str, node: Any, slots: set[int]) -> None:
        """Patches the inputs in `slots` and the renamed outputs of the copy of a source node."""
        tensors = graph.slots(name) if slots else []
        for slot in sorted(slots):
            node.input.extend([""] * (slot + 1 - len(node.input)))
            node.input[slot] = self._name(tensors[slot])
        while node.input and not node.input[-1] and len(node.input) - 1 in slots:
            del node.input[-1]
        for tensor in (TensorRef(graph.name, name, port) for port in range(len(node.output))) if self._renamed else ():
            if tensor in self._renamed:
                node.output[tensor.port] = self._renamed[tensor]

    def _nodes(self, graph: Graph, source: GraphSource, target: Any, imports: Any) -> None:
        """Lists the nodes anew: those of the source in their order, each new one right before its first reader."""
        with_constants = not isinstance(target, GraphProto)
        known = dict(zip(source.nodes, target.node, strict=True))
        listed = []
        for name in _order(graph, source.nodes):
            op = graph.op(name)
            if isinstance(op.source, NodeProto):
                listed.append(known[name])
            elif op.source is None and op.kind != "input" and (op.kind != "constant" or with_constants):
                listed.append(self._new(graph, op, imports))
        for value, (name, tensor) in self._ends[graph.name].copies.items():
            listed.append(helper.make_node("Identity", [self._name(tensor)], [value], name=name))
            self._import(imports, "")
        if len(listed) != len(target.node) or any(a is not b for a, b in zip(listed, known.values(), strict=True)):
            del target.node[:]
            target.node.extend(listed)

    def _new(self, graph: Graph, op: Op, imports: Any) -> Any:
        outputs = [
            self._renamed.get(TensorRef(graph.name, op.name, port), out.name) for port, out in enumerate(op.outputs)
        ]
        if op.kind == "constant":
            node = constant_node(op, outputs[0])
        else:
            node = new_node(op, [self._name(tensor) for tensor in graph.slots(op.name)], outputs)
        if self._message.ir_version >= IR_METADATA:
            stamp(node, op)
        self._import(imports, node.domain)
        return node

    def _import(self, imports: Any, domain: str) -> None:
        same = {"", "ai.onnx"} if domain in {"", "ai.onnx"} else {domain}
        for holder in (imports, self._message):
            if all(entry.domain not in same for entry in holder.opset_import):
                holder.opset_import.append(
                    helper.make_opsetid(domain, 1 if domain else self._model.opset or DEFAULT_OPSET)
                )

    def _inputs(self, graph: Graph, source: GraphSource, target: Any, fresh: list[Op]) -> None:
        """Drops inputs that are gone or are constants now, and adds new ones."""
        listed = set(graph.inputs)
        keep(target.input, lambda info: info.name in listed)
        freed = any(
            op.kind == "input" and _live(graph, name) is not None and name not in listed
            for name, op in source.loaded.items()
        )
        if freed:
            self._message.ir_version = max(self._message.ir_version, IR_FREE_INITIALIZERS)
        for op in fresh:
            if op.kind == "input":
                known = op.outputs[0]
                target.input.append(
                    helper.make_tensor_value_info(op.name, CODES[known.dtype or "float32"], known.shape)
                )

    def _initializers(self, graph: Graph, source: GraphSource, target: Any, fresh: list[Op]) -> None:
        """Drops, replaces, renames and adds initializers."""
        added = [op for op in fresh if op.kind == "constant"]
        for sparse in target.sparse_initializer:
            op = _live(graph, sparse.values.name)
            if op is not None and op.value is not source.loaded[op.name].value:
                added.append(op)
        written = {op.name for op in added}
        keep(
            target.sparse_initializer,
            lambda item: _live(graph, item.values.name) is not None and item.values.name not in written,
        )
        keep(target.initializer, lambda item: _live(graph, item.name) is not None)
        for tensor in chain(target.initializer, (sparse.values for sparse in target.sparse_initializer)):
            op = graph.op(tensor.name)
            if op.value is not source.loaded[op.name].value:
                tensor.CopyFrom(self._tensor(op, op.name))
            if op.outputs[0].name != (name := self._name(TensorRef(graph.name, op.name))):
                tensor.name = name
        target.initializer.extend(self._tensor(op, self._name(TensorRef(graph.name, op.name))) for op in added)
        for op in added:
            least = IR_TYPES.get(op.outputs[0].dtype or "", IR_FREE_INITIALIZERS)
            self._message.ir_version = max(self._message.ir_version, least)

    def _tensor(self, op: Op, name: str) -> Any:
        if self._left is None or size_of(op) < BULKY:
            return tensor_of(op, name)
        self._left.append(op)
        return later(op, name, len(self._left) - 1)

    def _infos(self, graph: Graph, source: GraphSource, target: Any, fresh: list[Op]) -> None:
        """value_info: without what is gone or renamed, with what is known of new and renamed tensors."""
        renamed = [tensor for tensor in self._ends[graph.name].renamed if tensor.op in source.loaded]
        lost = {source.loaded[tensor.op].outputs[tensor.port].name for tensor in renamed}
        lost.update(out.name for name, op in source.loaded.items() if _live(graph, name) is None for out in op.outputs)
        keep(target.value_info, lambda info: info.name not in lost)
        taken = {info.name for info in target.output}
        made = [
            TensorRef(graph.name, op.name, k)
            for op in fresh
            if op.kind not in {"constant", "input"}
            for k in range(len(op.outputs))
        ]
        for tensor in chain(renamed, made):
            known, name = self._model.output(tensor), self._name(tensor)
            if name not in taken and known.dtype in CODES and known.shape is not None:
                target.value_info.append(helper.make_tensor_value_info(name, CODES[known.dtype], known.shape))


def _live(graph: Graph, name: str) -> Op | None:
    """The op of the source called `name`, None if it is gone, or if one that graphquant made has its name."""
    op = graph.op(name) if name in graph else None
    return op if op is not None and op.source is not None else None


def _order(graph: Graph, first: Iterable[str]) -> list[str]:
    """All ops, each after what it reads; those in `first` in that order as far as possible, then the rest."""
    done: set[str] = set()
    listed: list[str] = []
    for root in chain((name for name in first if name in graph), graph.nx):
        if root in done:
            continue
        done.add(root)
        stack = [(root, iter(graph.nx.pred[root]))]
        while stack:
            name, sources = stack[-1]
            following = next((source for source in sources if source not in done), None)
            if following is None:
                listed.append(name)
                stack.pop()
            else:
                done.add(following)
                stack.append((following, iter(graph.nx.pred[following])))
    return listed


def keep(repeated: Any, wanted: Callable[[Any], bool]) -> None:
    """Leaves in a repeated field what is `wanted`."""
    kept = [item for item in repeated if wanted(item)]
    if len(kept) < len(repeated):
        del repeated[:]
        repeated.extend(kept)


def bodies(node: Any) -> dict[str, Any]:
    """The graphs that a node holds, by what `Call.attr` calls them."""
    found: dict[str, Any] = {}
    for attr in node.attribute:
        if attr.HasField("g"):
            found[attr.name] = attr.g
        found.update((f"{attr.name}[{k}]", graph) for k, graph in enumerate(attr.graphs))
    return found
