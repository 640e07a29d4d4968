"""A message with further outputs, through which tensors anywhere in the model can be watched.

1. A tensor of the main graph becomes a graph output.
2. One in a branch of If becomes an output of that branch; the other branch gives an empty tensor of shape [0].
3. One in the body of Scan becomes a scan output.
4. One in the body of Loop is collected in a sequence that the loop carries: scan outputs of Loop must not change
   their shape. Branches around or inside that loop hand the sequence on; the one not taken adds an empty tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from graphquant.errors import UnwatchableError
from graphquant.formats.onnx.tensors import CODES
from graphquant.formats.onnx.write import bodies
from graphquant.ir import TensorRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphquant.formats import Feeds
    from graphquant.formats.onnx.write import Emission
    from graphquant.ir import Model, Op

Array = np.ndarray[Any, Any]

OPSET_SEQUENCE = 11
"""First opset with sequences."""

OPSET_SCAN = 9
"""First opset whose Scan has no batch axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Where the values of a watched tensor come from.

    Attributes:
        output: The graph output to fetch, "" if there is none to fetch.
        fed: The graph input that it is, "" if it is none.
        value: Gives its value if it is constant or not fed.
        lifted: Whether it comes out of a body, where shape [0] says "not reached".
        stacked: How many leading axes count iterations.
    """

    output: str = ""
    fed: str = ""
    value: Callable[[], Array] | None = None
    lifted: bool = False
    stacked: int = 0

    def values(self, found: Mapping[str, Any], feed: Feeds) -> list[Array]:
        """The values that the tensor took, given the fetched outputs and the feed."""
        if not self.output:
            return [feed[self.fed]] if self.fed in feed else [self.value()] if self.value is not None else []
        result = found[self.output]
        listed = result if isinstance(result, list) else [result]
        if self.lifted:
            listed = [value for value in listed if value.shape != (0,)]
        for _ in range(self.stacked):
            listed = [part for value in listed for part in value]
        return [np.asarray(value) for value in listed]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """One step out of a body: the op that owns it, as IR and as message."""

    body: Any
    owner: Op
    node: Any


class Instrument:
    """A copy of an emitted model that gains an output for each probed tensor."""

    def __init__(self, model: Model, emission: Emission) -> None:
        self._model = model
        self._emission = emission
        self._message = ModelProto()
        self._message.CopyFrom(emission.message)
        self._protos: dict[str, Any] = {"": self._message.graph}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._outputs = {info.name for info in self._message.graph.output}
        self._first: list[Any] = []
        self._count = 0

    def message(self) -> Any:
        """The ModelProto with all probes."""
        nodes = [*self._first, *self._message.graph.node]
        self._first = []
        del self._message.graph.node[:]
        self._message.graph.node.extend(nodes)
        return self._message

    def probe(self, tensor: TensorRef) -> Probe:
        """Makes `tensor` an output.

        Raises:
            UnwatchableError: It is where onnxruntime cannot watch it.
        """
        op = self._model.op(tensor)
        if op.kind == "constant":
            return Probe(value=op.value)
        if not tensor.graph:
            if op.kind == "input":
                return Probe(fed=op.name, value=op.value)
            name = self._emission.name(self._model, tensor)
            self._publish(ValueInfoProto(name=name))
            return Probe(output=name)
        return self._lift(tensor)

    # -- out of bodies ---------------------------------------------------------------------------

    def _lift(self, tensor: TensorRef) -> Probe:
        levels = self._levels(tensor)
        dtype = CODES.get(self._model.output(tensor).dtype or "")
        if dtype is None:
            raise _unwatchable(
                tensor, "its type is not known before the model runs", "Add its type to the body's value_info"
            )
        value = self._fresh()
        name = self._emission.name(self._model, tensor)
        levels[0].body.node.append(helper.make_node("Identity", [name], [value]))
        stacked = 0
        while levels and levels[0].owner.kind == "scan" and self._model.opset >= OPSET_SCAN:
            value = self._scan(levels.pop(0), value, dtype)
            stacked += 1
        strange = [level.owner for level in levels if level.owner.type not in {"If", "Loop"}]
        if strange:
            raise _unwatchable(
                tensor, f"it is inside {strange[0].type} {strange[0].name!r}", "Leave it out with --exclude"
            )
        if any(level.owner.type == "Loop" for level in levels):
            if self._model.opset < OPSET_SEQUENCE:
                raise _unwatchable(
                    tensor,
                    f"it is inside a Loop of opset {self._model.opset}",
                    f"Upgrade the model to opset {OPSET_SEQUENCE}",
                )
            value = self._carry(levels, value, dtype)
            self._publish(helper.make_tensor_sequence_value_info(value, dtype, None))
        else:
            for level in levels:
                value = self._branch(level, value, dtype)
            self._publish(helper.make_tensor_value_info(value, dtype, None))
        return Probe(output=value, lifted=True, stacked=stacked)

    def _levels(self, tensor: TensorRef) -> list[_Level]:
        """The bodies around `tensor`, the innermost first."""
        names = [tensor.graph]
        while (parent := self._model.graphs[names[-1]].parent) is not None and parent[0]:
            names.append(parent[0])
        if parent is None:
            raise _unwatchable(
                tensor,
                f"it is inside the function {names[-1]!r}",
                "Inline the model's functions with onnx.inliner first",
            )
        levels = []
        for name in reversed(names):
            outer, owner = self._model.graphs[name].parent or ("", "")
            op = self._model.graphs[outer].op(owner)
            node = self._node(outer, op)
            attr = next(call.attr for call in op.calls if call.graph == name)
            self._protos[name] = bodies(node)[attr]
            levels.append(_Level(body=self._protos[name], owner=op, node=node))
        return levels[::-1]

    def _node(self, graph: str, op: Op) -> Any:
        """The node of `op` in the message; found by the name of its outputs as they were emitted."""
        if graph not in self._nodes:
            self._nodes[graph] = {name: node for node in self._protos[graph].node for name in node.output if name}
        port = next((k for k, output in enumerate(op.outputs) if output.name), None)
        if port is None:
            raise UnwatchableError(
                f"{op.type} {op.name!r} has no output, so nothing inside it can be watched. "
                "Leave it out with --exclude."
            )
        return self._nodes[graph][self._emission.name(self._model, TensorRef(graph, op.name, port))]

    def _scan(self, level: _Level, value: str, dtype: int) -> str:
        """Case 3: makes `value` a scan output; returns the name of the stacked values outside."""
        level.body.output.append(helper.make_tensor_value_info(value, dtype, None))
        for attr in level.node.attribute:
            if attr.name in {"scan_output_axes", "scan_output_directions"}:
                attr.ints.append(0)
        level.node.output.append(self._fresh())
        return str(level.node.output[-1])

    def _branch(self, level: _Level, value: str, dtype: int) -> str:
        """Case 2: makes `value` an output of its branch; returns its name outside."""
        level.body.output.append(helper.make_tensor_value_info(value, dtype, None))
        for other in self._others(level):
            other.output.append(helper.make_tensor_value_info(self._empty(other, dtype), dtype, None))
        level.node.output.append(self._fresh())
        return str(level.node.output[-1])

    def _carry(self, levels: list[_Level], value: str, dtype: int) -> str:
        """Case 4: threads a sequence through the bodies that gains each `value`; returns its name at the end."""
        start = sequence = self._fresh()
        self._first.append(helper.make_node("SequenceEmpty", [], [start], dtype=dtype))
        for level in reversed(levels):
            if level.owner.type == "Loop":
                inside = self._fresh()
                level.node.input.extend([""] * (2 - len(level.node.input)))
                level.node.input.append(sequence)
                level.body.input.append(helper.make_tensor_sequence_value_info(inside, dtype, None))
                sequence = inside
            else:
                for other in self._others(level):
                    self._append(other, sequence, self._empty(other, dtype), dtype, len(other.output))
        end = self._fresh()
        levels[0].body.node.append(helper.make_node("SequenceInsert", [sequence, value], [end]))
        for level in levels:
            carried = len(level.body.input) - 2
            place = carried if level.owner.type == "Loop" else len(level.body.output)
            _insert(level.body.output, place, helper.make_tensor_sequence_value_info(end, dtype, None))
            end = self._fresh()
            outputs = list(level.node.output)
            outputs.insert(carried - 1 if level.owner.type == "Loop" else len(outputs), end)
            level.node.output[:] = outputs
        return end

    def _append(self, body: Any, sequence: str, value: str, dtype: int, place: int) -> None:
        longer = self._fresh()
        body.node.append(helper.make_node("SequenceInsert", [sequence, value], [longer]))
        _insert(body.output, place, helper.make_tensor_sequence_value_info(longer, dtype, None))

    def _empty(self, body: Any, dtype: int) -> str:
        name = self._fresh()
        value = TensorProto(data_type=dtype, dims=[0])
        body.node.append(helper.make_node("Constant", [], [name], value=value))
        return name

    def _others(self, level: _Level) -> list[Any]:
        return [body for body in bodies(level.node).values() if body is not level.body]

    def _publish(self, info: Any) -> None:
        if info.name not in self._outputs:
            self._outputs.add(info.name)
            self._message.graph.output.append(info)

    def _fresh(self) -> str:
        self._count += 1
        return self._model.main.fresh(f"graphquant/observed/{self._count}")


def _insert(repeated: Any, place: int, item: Any) -> None:
    items = [*repeated]
    items.insert(place, item)
    del repeated[:]
    repeated.extend(items)


def _unwatchable(tensor: TensorRef, why: str, what: str) -> UnwatchableError:
    return UnwatchableError(f"The tensor {tensor} cannot be watched: {why}. {what}.")
