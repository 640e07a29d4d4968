"""A copy of a message with further outputs, through which tensors anywhere in the model, or their sizes, are watched.

A tensor of the main graph becomes a graph output. Behind one in a body or function stands a node that is marked in its
doc_string; functions are put in place of their calls, so that each call has a mark of its own, and each marked value is
lifted out of the bodies around it.

onnxruntime keeps graph outputs to the end of a run, whether they are fetched or not. Where there is no memory for that,
each tensor is read by a Loop of its own that makes as many rounds as an input of the graph says, its flag: 1 gives the
value with an axis for rounds in front, 0 gives nothing. That keeps the tensor from being fused away just as an output
would, so values are the same bits, but it may be dropped once the Loop has run. Of the nodes that nobody reads,
onnxruntime runs the last first, after what leads to it. So the Loops stand behind all nodes, those of the first tensors
last. The model's own outputs, which would be kept too, get such readers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from onnx import ModelProto, TensorProto, helper, inliner

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
"""What is shown of tensors: all values in each run, those whose flag is set, or how many elements each value has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Where the values of a watched tensor come from.

    Attributes:
        sources: Where they come out of a run; a function gives one for each of its calls.
        flag: The graph input that must be 1 for that, "" if there is none.
        input_name: The graph input that it is, "" if it is none.
        value: Gives its value if it is constant or not fed.
    """

    sources: tuple[ValueOutputs, ...] = ()
    flag: str = ""
    input_name: str = ""
    value: Callable[[], Array] | None = None

    def values(self, fetched: Mapping[str, Any], feed: Feeds) -> list[Array]:
        """The values that the tensor took, given the fetched outputs and the feed."""
        if self.input_name in feed:
            return [feed[self.input_name]]
        if self.value is not None:
            return [self.value()]
        return [value for source in self.sources for value in source.values(fetched)]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedMessage:
    """A message that shows tensors.

    Attributes:
        message: The ModelProto.
        probes: Where to find each tensor.
        flags: All inputs that say what is shown; they must be fed.
        rejected: The tensors that cannot be watched, with the reason.
    """

    message: Any
    probes: Mapping[TensorRef, Probe]
    flags: tuple[str, ...]
    rejected: Mapping[TensorRef, UnobservableTensorError]


def outputs_to_fetch(probes: Iterable[Probe]) -> list[str]:
    """The outputs to fetch for `probes`."""
    return list(dict.fromkeys(name for probe in probes for source in probe.sources for name in source.outputs))


def watch_tensors(
    model: Model, emission: Emission, tensors: Iterable[TensorRef], mode: WatchMode = "values"
) -> WatchedMessage:
    """A copy of the emitted `model` that shows `tensors`."""
    return _WatchBuilder(model, emission, mode).build(list(dict.fromkeys(tensors)))


class _WatchBuilder:
    """Builds one copy."""

    def __init__(self, model: Model, emission: Emission, mode: WatchMode) -> None:
        self._model = model
        self._emission = emission
        self._mode = mode
        self._counter = count(1)
        self._message = ModelProto()
        self._message.CopyFrom(emission.message)
        functions = [name for name, graph in model.graphs.items() if name and graph.parent is None]
        self._protos: dict[str, Any] = {
            "": self._message.graph,
            **dict(zip(functions, self._message.functions, strict=True)),
        }
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
            marked_tensors = self._last_produced_first(
                [*marked_tensors, *(output for output in self._detach_outputs() if output not in probes)]
            )
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
        """The tensors that are outputs of the model, which they cease to be; those that are no tensors remain."""
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
        """Tensors in the order in which a graph makes them, backwards; those of a graph it is given come last."""
        return sorted(tensors, key=self._producer_position, reverse=True)

    def _producer_position(self, tensor: TensorRef) -> int:
        """The place of the node that makes `tensor` in its graph, -1 if none does."""
        try:
            self._graph_proto(tensor.graph)
        except UnobservableTensorError:  # refused later
            return -1
        return self._positions(tensor.graph).get(self._emission.value_name(self._model, tensor), -1)

    def _published_value(self, tensor: TensorRef) -> str:
        """The value of the main graph that shows `tensor`."""
        nodes = self._watch_nodes(tensor, "")
        self._message.graph.node.extend(nodes)
        return str(nodes[-1].output[0]) if nodes else self._emission.value_name(self._model, tensor)

    def _watch_nodes(self, tensor: TensorRef, mark: str) -> list[Any]:
        """Nodes of which the last gives what is to be seen of `tensor`; with a `mark` there is at least one."""
        op_types = ["Size"] if self._mode == "sizes" else ["Identity"] if mark else []
        if self._model.output(tensor).dtype == "bfloat16":
            op_types.insert(0, "Cast")
        nodes, value = [], self._emission.value_name(self._model, tensor)
        for op_type in op_types:
            result_name = self._model.graphs[tensor.graph].unique_name(f"graphquant/shown/{next(self._counter)}")
            nodes.append(
                _cast_to_float(value, result_name)
                if op_type == "Cast"
                else helper.make_node(op_type, [value], [result_name])
            )
            value = result_name
        if mark:
            nodes[-1].doc_string = mark
        return nodes

    def _mark_tensors(self, tensors: Sequence[TensorRef]) -> list[tuple[TensorRef, MarkedNode]]:
        """Marks `tensors`, which are in bodies and functions; one in a function has a mark for each call of it."""
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
            # What has no type is always shown.
            return [
                (tensor, self._gate_by_flag(tensor, mark) if self._element_type(tensor, mark) else mark)
                for tensor, mark in marked_tensors
            ]
        return marked_tensors

    def _gate_by_flag(self, tensor: TensorRef, mark: MarkedNode) -> MarkedNode:
        """Makes the marked node a Loop that gives its input once if the tensor's flag is 1, and never if it is 0."""
        if tensor not in self._flags:
            self._flags[tensor] = self._new_name()
            self._message.graph.input.append(_tensor_info(self._flags[tensor], TensorProto.INT64, []))
        flag = self._flags[tensor]
        iteration, condition, condition_out, carried, carried_out, value, final_carried, values = (
            self._new_name() for _ in range(8)
        )
        copies = {condition: condition_out, carried: carried_out, mark.node.input[0]: value}
        body = helper.make_graph(
            [helper.make_node("Identity", [source], [target]) for source, target in copies.items()],
            value,
            [
                _tensor_info(iteration, TensorProto.INT64, []),
                _tensor_info(condition, TensorProto.BOOL, []),
                _tensor_info(carried, TensorProto.INT64, []),
            ],
            [
                _tensor_info(condition_out, TensorProto.BOOL, []),
                _tensor_info(carried_out, TensorProto.INT64, []),
                _tensor_info(value, self._element_type(tensor, mark), None),
            ],
        )
        publish_node = helper.make_node("Identity", [values], list(mark.node.output))
        # Before opset 11 a Loop must carry something.
        mark.node.CopyFrom(helper.make_node("Loop", [flag, "", flag], [final_carried, values], body=body))
        nodes = (mark.levels[0].body if mark.levels else self._message.graph).node
        nodes.append(publish_node)
        return replace(mark, node=nodes[-1])

    def _inline_calls(self, inline: Callable[[Any], Any], tensors: Sequence[TensorRef]) -> None:
        """Puts functions in place of their calls; refuses what remains inside one."""
        with_functions = self._message
        try:
            self._message = inline(with_functions)
        except INFERENCE_ERRORS as error:
            for tensor in filter(self._in_function, tensors):
                self._reject(tensor, f"its function cannot be put in place of the call: {first_line(error)}")
            return
        remaining = {function.name for function in self._message.functions}
        for tensor in filter(self._in_function, tensors):
            name = self._root_graph(tensor.graph)
            if name in remaining:
                self._reject(tensor, f"the function {name!r} is of another opset than the model")

    def _lift_marked(
        self, lifter: SubgraphLifter, marked: Sequence[tuple[TensorRef, MarkedNode]]
    ) -> dict[TensorRef, list[ValueOutputs]]:
        """Lifts all marked values."""
        sources: dict[TensorRef, list[ValueOutputs]] = {}
        for lifting in (False, True):  # what is around one tensor is made ready for all before any of them is lifted
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
        """ONNX element type of what the mark's node gives."""
        if self._mode == "sizes":
            return int(TensorProto.INT64)
        dtype = DTYPE_CODES.get(self._model.output(tensor).dtype or "", mark.dtype)
        return int(TensorProto.FLOAT) if dtype == TensorProto.BFLOAT16 else dtype

    def _graph_proto(self, graph: str) -> Any:
        """The copy of the GraphProto or FunctionProto of a graph."""
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
        """The node of `op` in the message; found by the name of its outputs as they were emitted."""
        port = next((k for k, output in enumerate(op.outputs) if output.name), None)
        if port is None:
            raise UnobservableTensorError(f"{op.type} {op.name!r} around it has no output")
        name = self._emission.value_name(self._model, TensorRef(graph, op.name, port))
        return self._protos[graph].node[self._positions(graph)[name]]

    def _positions(self, graph: str) -> Mapping[str, int]:
        """Where in its graph each value is made; what stands behind the nodes that were loaded does not change that."""
        if graph not in self._value_positions:
            nodes = self._protos[graph].node
            self._value_positions[graph] = {
                name: index for index, node in enumerate(nodes) for name in node.output if name
            }
        return self._value_positions[graph]

    def _parent_of(self, graph: str) -> tuple[str, str]:
        return self._model.graphs[graph].parent or ("", "")

    def _root_graph(self, graph: str) -> str:
        """The main graph or the function around a graph."""
        while (parent := self._model.graphs[graph].parent) is not None:
            graph = parent[0]
        return graph

    def _in_function(self, tensor: TensorRef) -> bool:
        return bool(self._root_graph(tensor.graph))

    def _reject(self, tensor: TensorRef, reason: str) -> None:
        message = f"The tensor {tensor} cannot be watched: {reason}. Leave it out with --exclude."
        self._rejected.setdefault(tensor, UnobservableTensorError(message))

    def _new_name(self) -> str:
        return self._model.main.unique_name(f"graphquant/observed/{next(self._counter)}")


def _tensor_info(name: str, dtype: int, shape: list[int] | None) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def _cast_to_float(value: str, name: str) -> Any:
    """The node that makes `value` float32, which holds all of bfloat16; that onnxruntime hands out to nobody."""
    return helper.make_node("Cast", [value], [name], to=TensorProto.FLOAT)


def _expand_sequence_maps(message: Any) -> Any:
    """`message` with each SequenceMap written as the Loop that it stands for."""
    return inliner.inline_selected_functions(message, [("", "SequenceMap")], inline_schema_functions=True)
