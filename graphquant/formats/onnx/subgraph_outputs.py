"""Outputs for values inside the bodies of a message: each enclosing body gains an output.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, ValueInfoProto
from onnx.helper import make_node, make_tensor_sequence_value_info, make_tensor_value_info

from graphquant.errors import UnobservableTensorError
from graphquant.formats.onnx.emitter import node_bodies
from graphquant.formats.onnx.tensors import DEFAULT_DOMAINS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


Array = np.ndarray[Any, Any]

SEQUENCE_LOOP_OPSET = 13
"""First opset whose Loop carries sequences."""

SCAN_WITHOUT_BATCH_OPSET = 9
"""First opset whose Scan has no batch axis."""

SLICE_STEPS_OPSET = 10
"""First opset whose Slice has steps, which reverse the values that a Scan collects."""

SLICE_END_BEFORE_FIRST = -(1 << 63)
"""End of a Slice that runs backwards to the first element."""


def convert_scan_to_loop(graph: Any, node: Any, body: Any, opset: int, new_name: Callable[[], str]) -> None:
    """Convert the Scan `node` (opset 9 or later) of `graph` to a Loop with the same `body`, in place.

    Raises:
        UnobservableTensorError: A Loop cannot express the layout of its outputs.
    """
    attributes = {attr.name: list(attr.ints) for attr in node.attribute}
    states = len(node.input) - next(attr.i for attr in node.attribute if attr.name == "num_scan_inputs")
    scanned, slices = list(node.input[states:]), [info.name for info in body.input[states:]]
    outputs = len(body.output) - states
    axes, input_reversals = (
        attributes.get(f"scan_input_{name}", [0] * len(scanned)) for name in ("axes", "directions")
    )
    out_axes, output_reversals = (
        attributes.get(f"scan_output_{name}", [0] * outputs) for name in ("axes", "directions")
    )
    nodes_after: list[Any] = []
    loop_outputs: dict[int, str] = {}
    for position, info in enumerate(body.output[states : len(node.output)], states):
        axis, is_reversed = out_axes[position - states], bool(output_reversals[position - states])
        if node.output[position] and (axis or is_reversed):
            loop_outputs[position] = new_name()
            nodes_after += _rearrangement_nodes(
                loop_outputs[position], node.output[position], info.type.tensor_type, axis, is_reversed, opset, new_name
            )
    for position, loop_output in loop_outputs.items():
        node.output[position] = loop_output
    nodes_before, length, last_index = _length_nodes(scanned[0], axes[0], new_name)
    iteration, condition, condition_out = new_name(), new_name(), new_name()
    body_head = [make_node("Identity", [condition], [condition_out])]
    for source, value, axis, is_reversed in zip(scanned, slices, axes, input_reversals, strict=True):
        index = new_name() if is_reversed else iteration
        body_head += [make_node("Sub", [last_index, iteration], [index])] if is_reversed else []
        body_head.append(make_node("Gather", [source, index], [value], axis=axis))
    _insert_at(body.node, 0, body_head)
    del body.input[states:]
    iteration_infos = [make_tensor_value_info(iteration, TensorProto.INT64, [])]
    _insert_at(body.input, 0, [*iteration_infos, make_tensor_value_info(condition, TensorProto.BOOL, [])])
    _insert_at(body.output, 0, [make_tensor_value_info(condition_out, TensorProto.BOOL, [])])
    for attr in [attr for attr in node.attribute if attr.name != "body"]:
        node.attribute.remove(attr)
    node.op_type = "Loop"
    node.input[:] = [length, "", *node.input[:states]]
    node_position = next(k for k, candidate in enumerate(graph.node) if candidate is node)
    _insert_at(graph.node, node_position + 1, nodes_after)
    _insert_at(graph.node, node_position, nodes_before)


def _length_nodes(value: str, axis: int, new_name: Callable[[], str]) -> tuple[list[Any], str, str]:
    """Return nodes that compute the size of `value` along `axis`, its name, and the name of that size minus one."""
    axis_name, one_name, shape, length, last_index = (new_name() for _ in range(5))
    nodes = [
        _int64_constant_node(axis_name, axis),
        _int64_constant_node(one_name, 1),
        make_node("Shape", [value], [shape]),
        make_node("Gather", [shape, axis_name], [length], axis=0),
        make_node("Sub", [length, one_name], [last_index]),
    ]
    return nodes, length, last_index


def _rearrangement_nodes(
    stacked: str, result: str, type_: Any, axis: int, is_reversed: bool, opset: int, new_name: Callable[[], str]
) -> list[Any]:
    """Return nodes that convert the stacked values of a Loop to those of the Scan: reversed, and along another axis."""
    nodes = []
    if is_reversed:
        if opset < SLICE_STEPS_OPSET:
            raise UnobservableTensorError("it is inside a Scan that collects in reverse order")
        start, end, slice_axis, reversed_values = (new_name() for _ in range(4))
        nodes += [
            _int64_constant_node(start, -1, dims=[1]),
            _int64_constant_node(end, SLICE_END_BEFORE_FIRST, dims=[1]),
            _int64_constant_node(slice_axis, 0, dims=[1]),
            make_node("Slice", [stacked, start, end, slice_axis, start], [reversed_values if axis else result]),
        ]
        stacked = reversed_values
    if axis:
        if not type_.HasField("shape"):
            raise UnobservableTensorError("it is inside a Scan that collects along an axis of a tensor of unknown rank")
        rank = len(type_.shape.dim) + 1
        perm = list(range(1, rank))
        perm.insert(axis % rank, 0)
        nodes.append(make_node("Transpose", [stacked], [result], perm=perm))
    return nodes


def _int64_constant_node(name: str, value: int, dims: Sequence[int] = ()) -> Any:
    tensor = TensorProto(data_type=TensorProto.INT64, dims=dims, int64_data=[value])
    return make_node("Constant", [], [name], value=tensor)


def _insert_at(repeated: Any, position: int, entries: Sequence[Any]) -> None:
    for offset, entry in enumerate(entries):
        repeated.insert(position + offset, entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOutputs:
    """Graph outputs from which the values of a watched tensor are read.

    Attributes:
        outputs: The graph outputs to fetch: one, or three that hold the elements, sizes and ranks of all values.
        lifted: True if the value comes from a body, so that shape [0] means "not reached".
        stacked_axes: Number of leading axes that count iterations.
    """

    outputs: tuple[str, ...]
    lifted: bool = False
    stacked_axes: int = 0

    def values(self, fetched: Mapping[str, Any]) -> list[Array]:
        """Return the values of the tensor, given the fetched outputs."""
        result = fetched[self.outputs[0]]
        if not self.lifted:
            return [np.asarray(result)]
        if len(self.outputs) > 1:
            arrays = _split_packed_values(*(fetched[name] for name in self.outputs))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedNode:
    """A node whose first output is to become a graph output.

    Attributes:
        key: Text after the prefix in the node's doc_string.
        node: The node.
        dtype: ONNX element type of that output, 0 if unknown.
        levels: The bodies around it, the innermost first.
    """

    key: str
    node: Any
    dtype: int
    levels: tuple[BodyLevel, ...]


def find_marked_nodes(message: Any, typed_message: Any, prefix: str) -> list[MarkedNode]:
    """Return the nodes whose doc_string starts with `prefix`, those of outer graphs first.

    `typed_message` has the same nodes as `message`, with types in the graphs' value_info; it may be `message` itself.
    """
    marked_nodes: list[MarkedNode] = []
    pending: list[tuple[Any, Any, tuple[BodyLevel, ...]]] = [(message.graph, typed_message.graph, ())]
    for graph, typed_graph, levels in pending:  # grows while bodies are visited
        types: dict[str, int] | None = None
        for node, typed_node in zip(graph.node, typed_graph.node, strict=True):
            if node.doc_string.startswith(prefix):
                if types is None:
                    types = {info.name: info.type.tensor_type.elem_type for info in typed_graph.value_info}
                key = node.doc_string.removeprefix(prefix)
                marked_nodes.append(MarkedNode(key=key, node=node, dtype=types.get(node.output[0], 0), levels=levels))
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
        for sibling in _sibling_bodies(level):
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
                for sibling in _sibling_bodies(level):
                    sibling.output.extend(self._carry_infos(self._pass_carry_through(sibling, carried, dtype), dtype))
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
            graph = self._message.graph
            if self._opset >= SEQUENCE_LOOP_OPSET:
                names: tuple[str, ...] = (self._new_name(),)
                graph.node.insert(0, make_node("SequenceEmpty", [], list(names), dtype=dtype))
            else:
                names = (self._new_name(), self._new_name(), self._new_name())
                for name, element_type in zip(names, (dtype, TensorProto.INT64, TensorProto.INT64), strict=True):
                    constant = TensorProto(data_type=element_type, dims=[0])
                    graph.node.insert(0, make_node("Constant", [], [name], value=constant))
            self._initial_carries[dtype] = names
        return self._initial_carries[dtype]

    def _carry_infos(self, names: Sequence[str], dtype: int) -> list[Any]:
        if len(names) == 1:
            return [make_tensor_sequence_value_info(names[0], dtype, None)]
        return [
            make_tensor_value_info(name, kind, None)
            for name, kind in zip(names, (dtype, *[TensorProto.INT64] * 2), strict=True)
        ]

    def _append_to_carry(self, body: Any, carried: tuple[str, ...], value: str) -> tuple[str, ...]:
        """Return the carried values of `body` after `value` is appended."""
        extended = tuple(self._new_name() for _ in carried)
        if len(carried) == 1:
            body.node.append(make_node("SequenceInsert", [carried[0], value], list(extended)))
            return extended
        flat_shape, elements, sizes, rank = (self._new_name() for _ in range(4))
        minus_one = TensorProto(data_type=TensorProto.INT64, dims=[1], int64_data=[-1])
        body.node.extend(
            [
                make_node("Constant", [], [flat_shape], value=minus_one),
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

    def _pass_carry_through(self, body: Any, carried: tuple[str, ...], dtype: int) -> tuple[str, ...]:
        """Return the carried values of a branch without the value; Identity takes no sequence before opset 14."""
        if len(carried) == 1:
            return self._append_to_carry(body, carried, self._add_empty_constant(body, dtype))
        passed = tuple(self._new_name() for _ in carried)
        body.node.extend(make_node("Identity", [old], [new]) for old, new in zip(carried, passed, strict=True))
        return passed

    def _add_empty_constant(self, body: Any, dtype: int) -> str:
        name = self._new_name()
        body.node.append(make_node("Constant", [], [name], value=TensorProto(data_type=dtype, dims=[0])))
        return name


def _split_packed_values(elements: Array, sizes: Array, ranks: Array) -> list[Array]:
    """Return the values whose elements, sizes and ranks are concatenated."""
    values, element_offset, size_offset = [], 0, 0
    for rank in ranks.tolist():
        shape = sizes[size_offset : size_offset + rank].tolist()
        size_offset += rank
        values.append(elements[element_offset : element_offset + math.prod(shape)].reshape(shape))
        element_offset += math.prod(shape)
    return values


def _sibling_bodies(level: BodyLevel) -> list[Any]:
    return [body for body in node_bodies(level.node).values() if body is not level.body]
