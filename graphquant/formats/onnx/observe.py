"""A copy of a message with additional outputs for tensors anywhere in the model, or for their sizes.

A tensor of the main graph becomes a graph output. A tensor in a body or function is read by a node that is marked in
its doc_string. Functions are inlined, so that each call has a mark of its own, and each marked value becomes an output
of the bodies around it.

onnxruntime keeps all graph outputs in memory until a run ends, even if they are not fetched. If memory does not
suffice, a Loop reads each tensor. An input of the graph, its flag, is the number of iterations: 1 returns the value
with an additional leading axis, 0 returns nothing. As with an output, onnxruntime does not fuse the tensor away, so
values have the same bits, but the tensor can be freed after its Loop has run. onnxruntime runs the last of the nodes
without readers first, after its inputs. Therefore the Loops come after all other nodes, with those of the first tensors
last. The model's own outputs would also stay in memory, so Loops read them too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from onnx import ModelProto, TensorProto, inliner
from onnx.helper import make_graph, make_node, make_tensor_value_info

from graphquant.errors import UnobservableTensorError
from graphquant.formats.onnx.emitter import node_bodies
from graphquant.formats.onnx.shape_inference import INFERENCE_ERRORS, infer_types
from graphquant.formats.onnx.subgraph_outputs import MarkedNode, SubgraphLifter, ValueOutputs, find_marked_nodes
from graphquant.formats.onnx.tensors import DTYPE_CODES, first_line
from graphquant.ir import TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from graphquant.formats import Feeds
    from graphquant.formats.onnx.emitter import Emission
    from graphquant.ir import Model, Op


Array = np.ndarray[Any, Any]

WATCH_MARK = "graphquant.seen "

WatchMode = Literal["values", "values by flag", "sizes"]
"""Watched data: all values in each run, only the values whose flag is set, or the number of elements of each value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Source of the values of a watched tensor.

    Attributes:
        sources: Graph outputs of the values; a function has one entry for each of its calls.
        flag: Graph input that must be 1 to get values, "" if there is none.
        input_name: The graph input that the tensor is, "" if it is none.
        value: Returns the value if the tensor is constant or not fed.
    """

    sources: tuple[ValueOutputs, ...] = ()
    flag: str = ""
    input_name: str = ""
    value: Callable[[], Array] | None = None

    def values(self, fetched: Mapping[str, Any], feed: Feeds) -> list[Array]:
        """Return the values of the tensor, given the fetched outputs and the feed."""
        if self.input_name in feed:
            return [feed[self.input_name]]
        if self.value is not None:
            return [self.value()]
        return [value for source in self.sources for value in source.values(fetched)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedMessage:
    """A message that returns watched tensors.

    Attributes:
        message: The ModelProto.
        probes: Source of each tensor's values.
        flags: All flag inputs; they must be fed.
        rejected: The tensors that cannot be watched, with the reason.
    """

    message: Any
    probes: Mapping[TensorRef, Probe]
    flags: tuple[str, ...]
    rejected: Mapping[TensorRef, UnobservableTensorError]


def outputs_to_fetch(probes: Iterable[Probe]) -> list[str]:
    """Return the graph outputs to fetch for `probes`."""
    return list(dict.fromkeys(name for probe in probes for source in probe.sources for name in source.outputs))


def watch_tensors(
    model: Model, emission: Emission, tensors: Iterable[TensorRef], mode: WatchMode = "values"
) -> WatchedMessage:
    """Return a copy of the emitted `model` that returns `tensors`."""
    return _WatchBuilder(model, emission, mode).build(list(dict.fromkeys(tensors)))


class _WatchBuilder:
    """Builds one watched message."""

    def __init__(self, model: Model, emission: Emission, mode: WatchMode) -> None:
        self._model = model
        self._emission = emission
        self._mode = mode
        self._counter = count(1)
        self._message = ModelProto()
        self._message.CopyFrom(emission.message)
        functions = [name for name, graph in model.graphs.items() if name and graph.parent is None]
        self._protos: dict[str, Any] = {"": self._message.graph}
        self._protos.update(zip(functions, self._message.functions, strict=True))
        self._value_positions: dict[str, dict[str, int]] = {}
        self._flags: dict[TensorRef, str] = {}
        self._rejected: dict[TensorRef, UnobservableTensorError] = {}

    def build(self, tensors: Sequence[TensorRef]) -> WatchedMessage:
        probes = {tensor: Probe() for tensor in tensors}
        outputs: dict[TensorRef, str] = {}
        marked_tensors: list[TensorRef] = []
        for tensor in tensors:
            op = self._model.op(tensor)
            if op.kind == "constant":
                probes[tensor] = Probe(value=op.read_value)
            elif not tensor.graph and op.kind == "input":
                probes[tensor] = Probe(input_name=op.name, value=op.read_value)
            elif not tensor.graph and self._mode == "values":
                outputs[tensor] = self._published_value(tensor)
            else:
                marked_tensors.append(tensor)
        if self._mode != "values":
            detached = [tensor for tensor in self._detach_outputs() if tensor not in probes]
            marked_tensors = self._last_produced_first([*marked_tensors, *detached])
        marked = self._mark_tensors(marked_tensors)
        lifter = SubgraphLifter(self._message, self._model.opset, self._new_name)
        for tensor, name in outputs.items():
            lifter.publish(name)
            probes[tensor] = Probe(sources=(ValueOutputs(outputs=(name,)),))
        for tensor, sources in self._lift_marked(lifter, marked).items():
            flag = self._flags.get(tensor, "")
            if tensor in probes:
                gated = (
                    replace(source, lifted=True, stacked_axes=source.stacked_axes + 1) if flag else source
                    for source in sources
                )
                probes[tensor] = Probe(sources=tuple(gated), flag=flag)
        return WatchedMessage(
            message=self._message,
            probes={tensor: probe for tensor, probe in probes.items() if tensor not in self._rejected},
            flags=tuple(self._flags.values()),
            rejected=self._rejected,
        )

    def _detach_outputs(self) -> list[TensorRef]:
        """Remove the graph's outputs and return their tensors; outputs that are no tensors stay."""
        infos = self._message.graph.output
        output_tensors = []
        for index, label in reversed(list(enumerate(self._model.main.outputs))):
            tensor = self._model.main.source_of(Use("", label, 0))
            if tensor is None or not infos[index].type.HasField("tensor_type"):
                continue
            if self._model.op(tensor).kind not in {"constant", "input"}:
                output_tensors.append(tensor)
                del infos[index]
        return list(dict.fromkeys(output_tensors))

    def _last_produced_first(self, tensors: Sequence[TensorRef]) -> list[TensorRef]:
        """Sort tensors by the position of their producers, last first; tensors that a graph receives come last."""
        return sorted(tensors, key=self._producer_position, reverse=True)

    def _producer_position(self, tensor: TensorRef) -> int:
        """Return the position of the node that produces `tensor` in its graph, -1 if there is none."""
        try:
            self._graph_proto(tensor.graph)
        except UnobservableTensorError:  # rejected by `_mark_tensors`
            return -1
        return self._positions(tensor.graph).get(self._emission.value_name(self._model, tensor), -1)

    def _published_value(self, tensor: TensorRef) -> str:
        """Return the value of the main graph that holds the watched data of `tensor`."""
        nodes = self._watch_nodes(tensor, "")
        self._message.graph.node.extend(nodes)
        return str(nodes[-1].output[0]) if nodes else self._emission.value_name(self._model, tensor)

    def _watch_nodes(self, tensor: TensorRef, mark: str) -> list[Any]:
        """Return nodes, the last of which computes the watched data of `tensor`; at least one for a `mark`."""
        op_types = ["Size"] if self._mode == "sizes" else ["Identity"] if mark else []
        if self._model.output(tensor).dtype == "bfloat16":
            op_types.insert(0, "Cast")
        nodes, value = [], self._emission.value_name(self._model, tensor)
        for op_type in op_types:
            made_name = self._model.graphs[tensor.graph].unique_name(f"graphquant/shown/{next(self._counter)}")
            nodes.append(
                _cast_to_float(value, made_name) if op_type == "Cast" else make_node(op_type, [value], [made_name])
            )
            value = made_name
        if mark:
            nodes[-1].doc_string = mark
        return nodes

    def _mark_tensors(self, tensors: Sequence[TensorRef]) -> list[tuple[TensorRef, MarkedNode]]:
        """Mark `tensors`, which are in bodies and functions; a tensor in a function has a mark for each call."""
        for number, tensor in enumerate(tensors):
            try:
                proto = self._graph_proto(tensor.graph)
            except UnobservableTensorError as error:
                self._reject(tensor, str(error))
                continue
            proto.node.extend(self._watch_nodes(tensor, f"{WATCH_MARK}{number}"))
        if any(self._in_function(tensor) for tensor in tensors):
            self._inline_calls(inliner.inline_local_functions, tensors)
        marked_nodes = find_marked_nodes(self._message, self._message, WATCH_MARK) if tensors else []
        if any(level.op_type == "SequenceMap" for mark in marked_nodes for level in mark.levels):
            self._inline_calls(_expand_sequence_maps, tensors)
        types_known = self._mode == "sizes" or all(self._model.output(tensor).dtype for tensor in tensors)
        typed_message = self._message if types_known else infer_types(self._message, self._model.source.folder)
        marked_nodes = find_marked_nodes(self._message, typed_message, WATCH_MARK) if tensors else []
        marked_tensors = [(tensors[int(mark.key)], mark) for mark in marked_nodes]
        if self._mode == "values by flag":
            # A flag needs a Loop, whose outputs need a type. Values without a type are always returned.
            return [
                (tensor, self._gate_by_flag(tensor, mark) if self._element_type(tensor, mark) else mark)
                for tensor, mark in marked_tensors
            ]
        return marked_tensors

    def _gate_by_flag(self, tensor: TensorRef, mark: MarkedNode) -> MarkedNode:
        """Replace the marked node by a Loop that returns its input once if the flag is 1, and never if 0."""
        if tensor not in self._flags:
            self._flags[tensor] = self._new_name()
            self._message.graph.input.append(make_tensor_value_info(self._flags[tensor], TensorProto.INT64, []))
        flag = self._flags[tensor]
        iteration, condition, condition_out, carried, carried_out, value, final_carried, values = (
            self._new_name() for _ in range(8)
        )
        copies = {condition: condition_out, carried: carried_out, mark.node.input[0]: value}
        body = make_graph(
            [make_node("Identity", [source], [target]) for source, target in copies.items()],
            value,
            [
                make_tensor_value_info(iteration, TensorProto.INT64, []),
                make_tensor_value_info(condition, TensorProto.BOOL, []),
                make_tensor_value_info(carried, TensorProto.INT64, []),
            ],
            [
                make_tensor_value_info(condition_out, TensorProto.BOOL, []),
                make_tensor_value_info(carried_out, TensorProto.INT64, []),
                make_tensor_value_info(value, self._element_type(tensor, mark), None),
            ],
        )
        publish_node = make_node("Identity", [values], list(mark.node.output))
        # Before opset 11 a Loop must carry something.
        mark.node.CopyFrom(make_node("Loop", [flag, "", flag], [final_carried, values], body=body))
        nodes = (mark.levels[0].body if mark.levels else self._message.graph).node
        nodes.append(publish_node)
        return replace(mark, node=nodes[-1])

    def _inline_calls(self, inline: Callable[[Any], Any], tensors: Sequence[TensorRef]) -> None:
        """Inline functions, and reject the tensors of functions that remain."""
        with_functions = self._message
        try:
            self._message = inline(with_functions)
        except INFERENCE_ERRORS as error:
            for tensor in filter(self._in_function, tensors):
                self._reject(tensor, f"its function cannot be inlined: {first_line(error)}")
            return
        remaining = {function.name for function in self._message.functions}
        for tensor in filter(self._in_function, tensors):
            name = self._root_graph(tensor.graph)
            if name in remaining:
                self._reject(tensor, f"the function {name!r} has another opset than the model")

    def _lift_marked(
        self, lifter: SubgraphLifter, marked: Sequence[tuple[TensorRef, MarkedNode]]
    ) -> dict[TensorRef, list[ValueOutputs]]:
        """Make all marked values graph outputs."""
        sources: dict[TensorRef, list[ValueOutputs]] = {}
        for lifting in (False, True):  # convert all Scans first: a conversion would lose outputs that were added before
            for tensor, mark in marked:
                try:
                    if lifting:
                        sources.setdefault(tensor, []).append(lifter.lift_value(mark, self._element_type(tensor, mark)))
                    else:
                        lifter.convert_scans(mark.levels)
                except UnobservableTensorError as error:
                    self._reject(tensor, str(error))
        return sources

    def _element_type(self, tensor: TensorRef, mark: MarkedNode) -> int:
        """Return the ONNX element type of the output of the marked node."""
        if self._mode == "sizes":
            return int(TensorProto.INT64)
        dtype = DTYPE_CODES.get(self._model.output(tensor).dtype or "", mark.dtype)
        return int(TensorProto.FLOAT) if dtype == TensorProto.BFLOAT16 else dtype

    def _graph_proto(self, graph: str) -> Any:
        """Return the copy of the GraphProto or FunctionProto of a graph."""
        names = [graph]
        while names[-1] not in self._protos:
            names.append(self._parent_of(names[-1])[0])
        for name in reversed(names[:-1]):
            outer, owner = self._parent_of(name)
            op = self._model.graphs[outer].op(owner)
            attr = next(call.attr for call in op.calls if call.graph == name)
            self._protos[name] = node_bodies(self._owner_node(outer, op))[attr]
        return self._protos[graph]

    def _owner_node(self, graph: str, op: Op) -> Any:
        """Return the node of `op` in the message, found by the emitted name of its outputs."""
        port = next((k for k, output in enumerate(op.outputs) if output.name), None)
        if port is None:
            raise UnobservableTensorError(f"{op.type} {op.name!r} around it has no output")
        name = self._emission.value_name(self._model, TensorRef(graph, op.name, port))
        return self._protos[graph].node[self._positions(graph)[name]]

    def _positions(self, graph: str) -> Mapping[str, int]:
        """Return the position of the producer of each value of a graph; nodes appended later do not change it."""
        if graph not in self._value_positions:
            nodes = self._protos[graph].node
            self._value_positions[graph] = {name: k for k, node in enumerate(nodes) for name in node.output if name}
        return self._value_positions[graph]

    def _parent_of(self, graph: str) -> tuple[str, str]:
        return self._model.graphs[graph].parent or ("", "")

    def _root_graph(self, graph: str) -> str:
        """Return the name of the main graph or function that contains a graph."""
        while (parent := self._model.graphs[graph].parent) is not None:
            graph = parent[0]
        return graph

    def _in_function(self, tensor: TensorRef) -> bool:
        return bool(self._root_graph(tensor.graph))

    def _reject(self, tensor: TensorRef, reason: str) -> None:
        message = f"The tensor {tensor} cannot be observed: {reason}. Exclude it with --exclude."
        self._rejected.setdefault(tensor, UnobservableTensorError(message))

    def _new_name(self) -> str:
        return self._model.main.unique_name(f"graphquant/observed/{next(self._counter)}")


def _cast_to_float(value: str, name: str) -> Any:
    """Return a node that casts bfloat16, which onnxruntime does not return, to float32."""
    return make_node("Cast", [value], [name], to=TensorProto.FLOAT)


def _expand_sequence_maps(message: Any) -> Any:
    """Return `message` with each SequenceMap expanded to the Loop that defines it."""
    return inliner.inline_selected_functions(message, [("", "SequenceMap")], inline_schema_functions=True)
