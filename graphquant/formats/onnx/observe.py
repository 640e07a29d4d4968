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

A value inside a body needs an output of each enclosing body:

1. A branch of If returns the value. The other branch returns an empty tensor of shape [0].
2. The body of Scan returns it as a scan output. A Scan around an If or Loop is first converted to a Loop.
3. The body of Loop collects it in a carried value, because scan outputs must have a constant shape. From opset 13 on
   that is a sequence, before that three vectors of all elements, sizes and ranks. Branches around or inside the Loop
   return what it carries.

A Scan is converted to the Loop that computes the same, because only a Loop can carry a sequence out of its body:

    states, outs = Scan(states, xs)    becomes    states, outs = Loop(length of xs, , states), where x = Gather(xs, i)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from onnx import TensorProto, ValueInfoProto, inliner
from onnx.helper import make_graph, make_node, make_tensor_sequence_value_info, make_tensor_value_info

from graphquant.errors import UnobservableTensorError
from graphquant.formats.onnx.emitter import Emission, node_bodies
from graphquant.formats.onnx.shape_inference import INFERENCE_ERRORS, infer_types
from graphquant.formats.onnx.tensors import DEFAULT_DOMAINS, DTYPE_CODES, first_line
from graphquant.ir import Model, Op, TensorRef, Use

if TYPE_CHECKING:
    from graphquant.formats import Feeds
    from graphquant.numerics import Array

SEQUENCE_LOOP_OPSET = 13  # first opset whose Loop carries sequences
SCAN_WITHOUT_BATCH_OPSET = 9  # first opset whose Scan has no batch axis
WATCH_MARK = "graphquant.seen "  # start of the doc_string of nodes whose output is watched
SLICE_STEPS_OPSET = 10  # first opset whose Slice has steps, which reverse the values that a Scan collects


def convert_scan_to_loop(graph: Any, node: Any, body: Any, opset: int, new_name: Callable[[], str]) -> None:
    """Convert the Scan `node` (opset 9 or later) of `graph` to a Loop with the same `body`, in place.

    Raises an UnobservableTensorError if a Loop cannot express the layout of its outputs.
    """
    attributes = {attr.name: list(attr.ints) for attr in node.attribute}
    states = len(node.input) - next(attr.i for attr in node.attribute if attr.name == "num_scan_inputs")
    scanned, slices = list(node.input[states:]), [info.name for info in body.input[states:]]
    axes, input_reversals = (
        attributes.get(f"scan_input_{name}", [0] * len(scanned)) for name in ("axes", "directions")
    )
    out_axes, output_reversals = (
        attributes.get(f"scan_output_{name}", [0] * (len(body.output) - states)) for name in ("axes", "directions")
    )
    nodes_after: list[Any] = []
    for position, info in enumerate(body.output[states : len(node.output)], states):
        axis, is_reversed = out_axes[position - states], bool(output_reversals[position - states])
        if (result := node.output[position]) and (axis or is_reversed):
            node.output[position] = new_name()
            nodes_after += _rearrangement_nodes(
                node.output[position], result, info.type.tensor_type, axis, is_reversed, opset, new_name
            )
    axis_name, one, shape, length, last_index = (new_name() for _ in range(5))
    nodes_before = [
        _int64_node(axis_name, axes[0]),
        _int64_node(one, 1),
        make_node("Shape", [scanned[0]], [shape]),
        make_node("Gather", [shape, axis_name], [length], axis=0),
        make_node("Sub", [length, one], [last_index]),
    ]
    iteration, condition, condition_out = new_name(), new_name(), new_name()
    body_head = [make_node("Identity", [condition], [condition_out])]
    for source, value, axis, is_reversed in zip(scanned, slices, axes, input_reversals, strict=True):
        index = new_name() if is_reversed else iteration
        body_head += [make_node("Sub", [last_index, iteration], [index])] if is_reversed else []
        body_head.append(make_node("Gather", [source, index], [value], axis=axis))
    del body.input[states:]
    int64, boolean = TensorProto.INT64, TensorProto.BOOL
    node_position = next(k for k, candidate in enumerate(graph.node) if candidate is node)
    for repeated, position, entries in (
        (body.node, 0, body_head),
        (body.input, 0, [make_tensor_value_info(iteration, int64, []), make_tensor_value_info(condition, boolean, [])]),
        (body.output, 0, [make_tensor_value_info(condition_out, boolean, [])]),
        (graph.node, node_position + 1, nodes_after),
        (graph.node, node_position, nodes_before),
    ):
        for offset, entry in enumerate(entries):
            repeated.insert(position + offset, entry)
    for attr in [attr for attr in node.attribute if attr.name != "body"]:
        node.attribute.remove(attr)
    node.op_type = "Loop"
    node.input[:] = [length, "", *node.input[:states]]


def _int64_node(name: str, value: int, dims: Sequence[int] = ()) -> Any:
    tensor = TensorProto(data_type=TensorProto.INT64, dims=dims, int64_data=[value])
    return make_node("Constant", [], [name], value=tensor)


def _rearrangement_nodes(
    stacked: str, result: str, type_: Any, axis: int, is_reversed: bool, opset: int, new_name: Callable[[], str]
) -> list[Any]:
    """Return nodes that convert the stacked values of a Loop to those of the Scan: reversed, and along another axis."""
    nodes = []
    if is_reversed:
        if opset < SLICE_STEPS_OPSET:
            raise UnobservableTensorError("it is inside a Scan that collects in reverse order")
        start, end, slice_axis, reversed_values = (new_name() for _ in range(4))
        # A Slice that runs backwards to the first element ends before all indices.
        bounds = {start: -1, end: -(1 << 63), slice_axis: 0}
        nodes = [_int64_node(name, value, dims=[1]) for name, value in bounds.items()]
        target = reversed_values if axis else result
        nodes.append(make_node("Slice", [stacked, start, end, slice_axis, start], [target]))
        stacked = reversed_values
    if axis:
        if not type_.HasField("shape"):
            raise UnobservableTensorError("it is inside a Scan that collects along an axis of a tensor of unknown rank")
        rank = len(type_.shape.dim) + 1
        perm = list(range(1, rank))
        perm.insert(axis % rank, 0)
        nodes.append(make_node("Transpose", [stacked], [result], perm=perm))
    return nodes


class ValueOutputs(NamedTuple):
    """Graph outputs from which the values of a watched tensor are read."""

    # The graph outputs to fetch: one, or three that hold the elements, sizes and ranks of all values.
    outputs: tuple[str, ...]
    lifted: bool = False  # true if the value comes from a body, so that shape [0] means "not reached"
    stacked_axes: int = 0  # number of leading axes that count iterations

    def values(self, fetched: Mapping[str, Any]) -> list[Array]:
        """Return the values of the tensor, given the fetched outputs."""
        result = fetched[self.outputs[0]]
        if not self.lifted:
            return [np.asarray(result)]
        if len(self.outputs) > 1:
            elements, sizes, ranks = (fetched[name] for name in self.outputs)  # of all values, concatenated
            shapes = [tuple(shape.tolist()) for shape in np.split(sizes, np.cumsum(ranks))[:-1]]
            parts = np.split(elements, np.cumsum([math.prod(shape) for shape in shapes], dtype=np.int64))[:-1]
            arrays = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        else:
            arrays = result if isinstance(result, list) else [result]
            arrays = [value for value in arrays if value.shape != (0,)]
        for _ in range(self.stacked_axes):
            arrays = [element for value in arrays for element in value]
        return [np.asarray(value) for value in arrays]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BodyLevel:
    """One step out of a body: the node that owns it, and the graph that holds the node."""

    graph: Any
    node: Any
    body: Any

    @property
    def op_type(self) -> str:
        """Type of the node, with its domain if that is not ONNX's own."""
        foreign = self.node.domain not in DEFAULT_DOMAINS
        return f"{self.node.domain}:{self.node.op_type}" if foreign else str(self.node.op_type)

    @property
    def siblings(self) -> list[Any]:
        """The other bodies of the node."""
        return [body for body in node_bodies(self.node).values() if body is not self.body]


class MarkedNode(NamedTuple):
    """A node whose first output is to become a graph output."""

    number: int  # position of the watched tensor, which follows the mark
    node: Any  # the node
    dtype: int  # ONNX element type of that output, 0 if unknown
    levels: tuple[BodyLevel, ...]  # the bodies around it, the innermost first


def find_marked_nodes(message: Any, typed_message: Any) -> list[MarkedNode]:
    """Return the nodes with a mark in their doc_string, those of outer graphs first.

    `typed_message` has the same nodes as `message`, with types in the graphs' value_info; it may be `message` itself.
    """
    marked_nodes: list[MarkedNode] = []
    pending: list[tuple[Any, Any, tuple[BodyLevel, ...]]] = [(message.graph, typed_message.graph, ())]
    for graph, typed_graph, levels in pending:  # grows while bodies are visited
        types: dict[str, int] | None = None
        for node, typed_node in zip(graph.node, typed_graph.node, strict=True):
            if node.doc_string.startswith(WATCH_MARK):
                if types is None:
                    types = {info.name: info.type.tensor_type.elem_type for info in typed_graph.value_info}
                number = int(node.doc_string.removeprefix(WATCH_MARK))
                dtype = types.get(node.output[0], 0)
                marked_nodes.append(MarkedNode(number=number, node=node, dtype=dtype, levels=levels))
            typed_bodies = node_bodies(typed_node)
            for name, body in node_bodies(node).items():
                level = BodyLevel(graph=graph, node=node, body=body)
                pending.append((body, typed_bodies[name], (level, *levels)))
    return marked_nodes


class SubgraphLifter:
    """Adds outputs to `message`, in place."""

    def __init__(self, message: Any, opset: int, new_name: Callable[[], str]) -> None:
        """Prepare a message; `opset` is that of the default domain, and `new_name` returns a new value name."""
        self._message = message
        self._opset = opset
        self._new_name = new_name
        self._outputs = {info.name for info in message.graph.output}
        self._initial_carries: dict[int, tuple[str, ...]] = {}

    def publish(self, name: str) -> None:
        """Make a value of the main graph an output."""
        if name not in self._outputs:
            self._outputs.add(name)
            self._message.graph.output.append(ValueInfoProto(name=name))

    def convert_scans(self, levels: Iterable[BodyLevel]) -> None:
        """Convert each Scan that does not just stack the value to a Loop; `levels` has the innermost first."""
        only_scans = True
        for level in levels:
            only_scans = only_scans and level.op_type == "Scan"
            if level.op_type == "Scan" and not only_scans and self._opset >= SCAN_WITHOUT_BATCH_OPSET:
                convert_scan_to_loop(level.graph, level.node, level.body, self._opset, self._new_name)

    def lift_value(self, mark: MarkedNode, dtype: int) -> ValueOutputs:
        """Make the marked value a graph output; raise UnobservableTensorError if its body cannot return it."""
        levels, value, stacked_axes = list(mark.levels), mark.node.output[0], 0
        while levels and levels[0].op_type == "Scan" and self._opset >= SCAN_WITHOUT_BATCH_OPSET:
            value = self._add_scan_output(levels.pop(0), value, dtype)
            stacked_axes += 1
        unsupported = [level for level in levels if level.op_type not in {"If", "Loop"}]
        if unsupported:
            raise UnobservableTensorError(f"it is inside {unsupported[0].op_type} {unsupported[0].node.output[0]!r}")
        if levels and not dtype:
            raise UnobservableTensorError("its type is unknown before the model runs")
        outputs: tuple[str, ...] = (value,)
        if any(level.op_type == "Loop" for level in levels):
            outputs = self._add_carried_values(levels, value, dtype)
        else:
            for level in levels:
                outputs = self._add_branch_output(level, outputs[0], dtype)
        for name in outputs:
            self.publish(name)
        return ValueOutputs(outputs=outputs, lifted=bool(mark.levels), stacked_axes=stacked_axes)

    def _add_scan_output(self, level: BodyLevel, value: str, dtype: int) -> str:
        """Handle case 2: return the name of the stacked values outside."""
        level.body.output.append(make_tensor_value_info(value, dtype, None))
        for attr in level.node.attribute:
            if attr.name in {"scan_output_axes", "scan_output_directions"}:
                attr.ints.append(0)
        return self._add_node_output(level, len(level.body.output) - 1)

    def _add_branch_output(self, level: BodyLevel, value: str, dtype: int) -> tuple[str]:
        """Handle case 1: return the value's name outside."""
        level.body.output.append(make_tensor_value_info(value, dtype, None))
        for sibling in level.siblings:
            sibling.output.append(make_tensor_value_info(self._add_empty_constant(sibling, dtype), dtype, None))
        return (self._add_node_output(level, len(level.body.output) - 1),)

    def _add_carried_values(self, levels: Sequence[BodyLevel], value: str, dtype: int) -> tuple[str, ...]:
        """Handle case 3: carry the collected values through all bodies, and return their names outside."""
        initial = carried = self._initial_carry(dtype)
        for level in reversed(levels):
            if level.op_type == "Loop":
                level.node.input.extend([""] * (2 - len(level.node.input)))
                level.node.input.extend(carried)
                carried = tuple(self._new_name() for _ in carried)
                level.body.input.extend(self._carry_infos(carried, dtype))
            else:
                for sibling in level.siblings:
                    if len(carried) == 1:  # Identity takes no sequence before opset 14
                        passed = self._append_to_carry(sibling, carried, self._add_empty_constant(sibling, dtype))
                    else:
                        passed = tuple(self._new_name() for _ in carried)
                        sibling.node.extend(
                            make_node("Identity", [old], [new]) for old, new in zip(carried, passed, strict=True)
                        )
                    sibling.output.extend(self._carry_infos(passed, dtype))
        carried = self._append_to_carry(levels[0].body, carried, value)
        for level in levels:
            is_loop = level.op_type == "Loop"
            position = len(level.body.input) - 1 - len(initial) if is_loop else len(level.body.output)
            for offset, info in enumerate(self._carry_infos(carried, dtype)):
                level.body.output.insert(position + offset, info)
            carried = tuple(self._add_node_output(level, position + offset - is_loop) for offset in range(len(carried)))
        return carried

    def _add_node_output(self, level: BodyLevel, position: int) -> str:
        """Give the node of `level` a new output at that position."""
        name = self._new_name()
        level.node.output.extend([""] * (position - len(level.node.output)))
        level.node.output.insert(position, name)
        return name

    def _initial_carry(self, dtype: int) -> tuple[str, ...]:
        """Return the values that a Loop carries before its first iteration."""
        if dtype not in self._initial_carries:
            nodes = self._message.graph.node
            if self._opset >= SEQUENCE_LOOP_OPSET:
                names: tuple[str, ...] = (self._new_name(),)
                nodes.insert(0, make_node("SequenceEmpty", [], list(names), dtype=dtype))
            else:
                names = (self._new_name(), self._new_name(), self._new_name())
                for name, code in zip(names, (dtype, TensorProto.INT64, TensorProto.INT64), strict=True):
                    nodes.insert(0, make_node("Constant", [], [name], value=TensorProto(data_type=code, dims=[0])))
            self._initial_carries[dtype] = names
        return self._initial_carries[dtype]

    @staticmethod
    def _carry_infos(names: Sequence[str], dtype: int) -> list[Any]:
        if len(names) == 1:
            return [make_tensor_sequence_value_info(names[0], dtype, None)]
        codes = (dtype, TensorProto.INT64, TensorProto.INT64)
        return [make_tensor_value_info(name, code, None) for name, code in zip(names, codes, strict=True)]

    def _append_to_carry(self, body: Any, carried: tuple[str, ...], value: str) -> tuple[str, ...]:
        """Return the carried values of `body` after `value` is appended."""
        extended = tuple(self._new_name() for _ in carried)
        if len(carried) == 1:
            body.node.append(make_node("SequenceInsert", [carried[0], value], list(extended)))
            return extended
        flat_shape, elements, sizes, rank = (self._new_name() for _ in range(4))
        body.node.extend(
            [
                _int64_node(flat_shape, -1, dims=[1]),
                make_node("Reshape", [value, flat_shape], [elements]),
                make_node("Shape", [value], [sizes]),
                make_node("Shape", [sizes], [rank]),
                *(
                    make_node("Concat", [old, addition], [new], axis=0)
                    for old, addition, new in zip(carried, (elements, sizes, rank), extended, strict=True)
                ),
            ]
        )
        return extended

    def _add_empty_constant(self, body: Any, dtype: int) -> str:
        name = self._new_name()
        body.node.append(make_node("Constant", [], [name], value=TensorProto(data_type=dtype, dims=[0])))
        return name


WatchMode = Literal["values", "values by flag", "sizes"]
"""Watched data: all values in each run, only the values whose flag is set, or the number of elements of each value."""


class Probe(NamedTuple):
    """Source of the values of a watched tensor."""

    # Graph outputs of the values; a function has one entry for each of its calls.
    sources: tuple[ValueOutputs, ...] = ()
    flag: str = ""  # graph input that must be 1 to get values, "" if there is none
    input_name: str = ""  # the graph input that the tensor is, "" if it is none
    value: Callable[[], Array] | None = None  # returns the value if the tensor is constant or not fed

    def values(self, fetched: Mapping[str, Any], feed: Feeds) -> list[Array]:
        """Return the values of the tensor, given the fetched outputs and the feed."""
        if self.input_name in feed:
            return [feed[self.input_name]]
        if self.value is not None:
            return [self.value()]
        return [value for source in self.sources for value in source.values(fetched)]


class WatchedMessage(NamedTuple):
    """A message that returns watched tensors."""

    message: Any  # the ModelProto
    probes: Mapping[TensorRef, Probe]  # source of each tensor's values
    flags: tuple[str, ...]  # all flag inputs; they must be fed
    rejected: Mapping[TensorRef, UnobservableTensorError]  # the tensors that cannot be watched, with the reason


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
        self._message = deepcopy(emission.message)
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
                nodes = self._watch_nodes(tensor, "")
                self._message.graph.node.extend(nodes)
                outputs[tensor] = nodes[-1].output[0] if nodes else self._emission.value_name(self._model, tensor)
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
            if tensor not in probes:
                continue
            flag = self._flags.get(tensor, "")
            gated = (source._replace(lifted=True, stacked_axes=source.stacked_axes + 1) for source in sources)
            probes[tensor] = Probe(sources=tuple(gated if flag else sources), flag=flag)
        return WatchedMessage(
            message=self._message,
            probes={tensor: probe for tensor, probe in probes.items() if tensor not in self._rejected},
            flags=tuple(self._flags.values()),
            rejected=self._rejected,
        )

    def _last_produced_first(self, tensors: Sequence[TensorRef]) -> list[TensorRef]:
        """Sort tensors by the position of their producers, last first; tensors that a graph receives come last."""

        def producer_position(tensor: TensorRef) -> int:
            try:
                self._graph_proto(tensor.graph)
            except UnobservableTensorError:  # rejected by `_mark_tensors`
                return -1
            return self._positions(tensor.graph).get(self._emission.value_name(self._model, tensor), -1)

        return sorted(tensors, key=producer_position, reverse=True)

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

    def _watch_nodes(self, tensor: TensorRef, mark: str) -> list[Any]:
        """Return nodes, the last of which computes the watched data of `tensor`; at least one for a `mark`."""
        op_types = ["Size"] if self._mode == "sizes" else ["Identity"] if mark else []
        if self._model.output(tensor).dtype == "bfloat16":  # onnxruntime does not return it
            op_types.insert(0, "Cast")
        nodes, value = [], self._emission.value_name(self._model, tensor)
        for op_type in op_types:
            target = self._model.graphs[tensor.graph].unique_name(f"graphquant/shown/{next(self._counter)}")
            attrs = {"to": TensorProto.FLOAT} if op_type == "Cast" else {}
            nodes.append(make_node(op_type, [value], [target], **attrs))
            value = target
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
        marked_nodes = find_marked_nodes(self._message, self._message) if tensors else []
        if any(level.op_type == "SequenceMap" for mark in marked_nodes for level in mark.levels):
            expand = partial(
                inliner.inline_selected_functions, function_ids=[("", "SequenceMap")], inline_schema_functions=True
            )
            self._inline_calls(expand, tensors)
        types_known = self._mode == "sizes" or all(self._model.output(tensor).dtype for tensor in tensors)
        typed_message = self._message if types_known else infer_types(self._message, self._model.source.folder)
        marked_nodes = find_marked_nodes(self._message, typed_message) if tensors else []
        marked_tensors = [(tensors[mark.number], mark) for mark in marked_nodes]
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
        return mark._replace(node=nodes[-1])

    def _inline_calls(self, inline: Callable[[Any], Any], tensors: Sequence[TensorRef]) -> None:
        """Inline functions, and reject the tensors of functions that remain."""
        with_functions = self._message
        try:
            self._message = inline(with_functions)
        except INFERENCE_ERRORS as error:
            for tensor in filter(self._in_function, tensors):
                self._reject(tensor, f"its function cannot be inlined: {first_line(error)}")
            return
        remaining = {(function.domain, function.name, function.overload) for function in self._message.functions}
        for tensor in filter(self._in_function, tensors):
            name = self._root_graph(tensor.graph)
            function = self._protos[name]
            if (function.domain, function.name, function.overload) in remaining:
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
        if graph not in self._protos:
            outer, owner = self._model.graphs[graph].parent or ("", "")
            self._graph_proto(outer)  # bodies are nested at most `index.MAX_NESTING` levels deep
            op = self._model.graphs[outer].op(owner)
            attr = next(call.attr for call in op.calls if call.graph == graph)
            self._protos[graph] = node_bodies(self._owner_node(outer, op))[attr]
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
