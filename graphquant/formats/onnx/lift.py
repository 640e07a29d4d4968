"""Values out of the bodies of a message: every body on the way gains an output.

1. A branch of If hands the value on; the other branch gives an empty tensor of shape [0].
2. The body of Scan has it as a scan output. A Scan around an If or Loop is written as a Loop.
3. The body of Loop collects it in what the Loop carries, as its scan outputs must not change their shape: in a sequence
   from opset 13 on, before that in one long vector beside all sizes and ranks. Branches around or inside that Loop hand
   on what it carries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import TensorProto, ValueInfoProto, helper

from graphquant.errors import UnwatchableError
from graphquant.formats.onnx.scan import as_loop
from graphquant.formats.onnx.write import bodies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Array = np.ndarray[Any, Any]

OPSET_SEQUENCE = 13
"""First opset whose Loop carries sequences."""

OPSET_SCAN = 9
"""First opset whose Scan has no batch axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the values of a watched tensor come out.

    Attributes:
        outputs: The graph outputs to fetch: one, or three that hold the elements, sizes and ranks of all values.
        lifted: Whether it comes out of a body, where shape [0] says "not reached".
        stacked: How many leading axes count iterations.
    """

    outputs: tuple[str, ...]
    lifted: bool = False
    stacked: int = 0

    def values(self, found: Mapping[str, Any]) -> list[Array]:
        """The values that the tensor took, given the fetched outputs."""
        result = found[self.outputs[0]]
        if not self.lifted:
            return [np.asarray(result)]
        if len(self.outputs) > 1:
            listed = _split(*(found[name] for name in self.outputs))
        else:
            listed = result if isinstance(result, list) else [result]
            listed = [value for value in listed if value.shape != (0,)]
        for _ in range(self.stacked):
            listed = [part for value in listed for part in value]
        return [np.asarray(value) for value in listed]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Level:
    """One step out of a body: the node that owns it, and the graph that holds the node."""

    graph: Any
    node: Any
    body: Any

    @property
    def type(self) -> str:
        """The type of the node, with the domain of one that is not ONNX's own."""
        foreign = self.node.domain not in {"", "ai.onnx"}
        return f"{self.node.domain}:{self.node.op_type}" if foreign else str(self.node.op_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A node whose first output is to be lifted.

    Attributes:
        key: What the node's doc_string says behind the prefix.
        node: The node.
        dtype: ONNX element type of that output, 0 if it is not known.
        levels: The bodies around it, the innermost first.
    """

    key: str
    node: Any
    dtype: int
    levels: tuple[Level, ...]


def marks(message: Any, typed: Any, prefix: str) -> list[Mark]:
    """The nodes whose doc_string starts with `prefix`, outer graphs first.

    Args:
        message: A ModelProto.
        typed: The same nodes with types in the graphs' value_info; may be `message` itself.
        prefix: The start of the doc_string.
    """
    found: list[Mark] = []
    todo: list[tuple[Any, Any, tuple[Level, ...]]] = [(message.graph, typed.graph, ())]
    for graph, twin, levels in todo:  # grows while bodies are found
        types: dict[str, int] | None = None
        for node, other in zip(graph.node, twin.node, strict=True):
            if node.doc_string.startswith(prefix):
                if types is None:
                    types = {info.name: info.type.tensor_type.elem_type for info in twin.value_info}
                key = node.doc_string.removeprefix(prefix)
                found.append(Mark(key=key, node=node, dtype=types.get(node.output[0], 0), levels=levels))
            typed_bodies = bodies(other)
            for name, body in bodies(node).items():
                level = Level(graph=graph, node=node, body=body)
                todo.append((body, typed_bodies[name], (level, *levels)))
    return found


class Lifter:
    """Adds outputs to `message`, in place."""

    def __init__(self, message: Any, opset: int, fresh: Callable[[], str]) -> None:
        """`opset` is that of the default domain, `fresh` gives a new value name."""
        self._message = message
        self._opset = opset
        self._fresh = fresh
        self._outputs = {info.name for info in message.graph.output}
        self._starts: dict[int, tuple[str, ...]] = {}

    def publish(self, name: str) -> None:
        """Makes a value of the main graph an output."""
        if name not in self._outputs:
            self._outputs.add(name)
            self._message.graph.output.append(ValueInfoProto(name=name))

    def loosen(self, levels: Iterable[Level]) -> None:
        """Writes each Scan that does not just stack the value as a Loop; `levels` has the innermost first.

        Raises:
            UnwatchableError: That cannot be done.
        """
        inner = True
        for level in levels:
            inner = inner and level.type == "Scan"
            if level.type == "Scan" and not inner and self._opset >= OPSET_SCAN:
                as_loop(level.graph, level.node, level.body, self._opset, self._fresh)

    def lift(self, mark: Mark, dtype: int) -> Place:
        """Makes the marked value an output.

        Raises:
            UnwatchableError: It is where onnxruntime cannot watch it.
        """
        levels, value, stacked = list(mark.levels), mark.node.output[0], 0
        while levels and levels[0].type == "Scan" and self._opset >= OPSET_SCAN:
            value = self._scan(levels.pop(0), value, dtype)
            stacked += 1
        strange = [level for level in levels if level.type not in {"If", "Loop"}]
        if strange:
            raise UnwatchableError(f"it is inside {strange[0].type} {strange[0].node.output[0]!r}")
        if levels and not dtype:
            raise UnwatchableError("its type is not known before the model runs")
        outputs: tuple[str, ...] = (value,)
        if any(level.type == "Loop" for level in levels):
            outputs = self._carry(levels, value, dtype)
        else:
            for level in levels:
                outputs = self._branch(level, outputs[0], dtype)
        for name in outputs:
            self.publish(name)
        return Place(outputs=outputs, lifted=bool(mark.levels), stacked=stacked)

    def _scan(self, level: Level, value: str, dtype: int) -> str:
        """Case 2: the name of the stacked values outside."""
        level.body.output.append(_info(value, dtype))
        for attr in level.node.attribute:
            if attr.name in {"scan_output_axes", "scan_output_directions"}:
                attr.ints.append(0)
        return self._output(level, len(level.body.output) - 1)

    def _branch(self, level: Level, value: str, dtype: int) -> tuple[str]:
        """Case 1: the value's name outside."""
        level.body.output.append(_info(value, dtype))
        for other in _others(level):
            other.output.append(_info(self._empty(other, dtype), dtype))
        return (self._output(level, len(level.body.output) - 1),)

    def _carry(self, levels: Sequence[Level], value: str, dtype: int) -> tuple[str, ...]:
        """Case 3: threads what grows by each value through all bodies; its names at the end."""
        start = held = self._start(dtype)
        for level in reversed(levels):
            if level.type == "Loop":
                level.node.input.extend([""] * (2 - len(level.node.input)))
                level.node.input.extend(held)
                held = tuple(self._fresh() for _ in held)
                level.body.input.extend(self._infos(held, dtype))
            else:
                for other in _others(level):
                    other.output.extend(self._infos(self._unchanged(other, held, dtype), dtype))
        held = self._longer(levels[0].body, held, value)
        for level in levels:
            loop = level.type == "Loop"
            place = len(level.body.input) - 1 - len(start) if loop else len(level.body.output)
            for offset, info in enumerate(self._infos(held, dtype)):
                level.body.output.insert(place + offset, info)
            held = tuple(self._output(level, place + offset - loop) for offset in range(len(held)))
        return held

    def _output(self, level: Level, place: int) -> str:
        """Gives the node of `level` a new output at that place."""
        name = self._fresh()
        level.node.output.extend([""] * (place - len(level.node.output)))
        level.node.output.insert(place, name)
        return name

    def _start(self, dtype: int) -> tuple[str, ...]:
        """What a Loop carries before its first round."""
        if dtype not in self._starts:
            graph = self._message.graph
            if self._opset >= OPSET_SEQUENCE:
                names: tuple[str, ...] = (self._fresh(),)
                graph.node.insert(0, helper.make_node("SequenceEmpty", [], list(names), dtype=dtype))
            else:
                names = (self._fresh(), self._fresh(), self._fresh())
                for name, kind in zip(names, (dtype, TensorProto.INT64, TensorProto.INT64), strict=True):
                    constant = TensorProto(data_type=kind, dims=[0])
                    graph.node.insert(0, helper.make_node("Constant", [], [name], value=constant))
            self._starts[dtype] = names
        return self._starts[dtype]

    def _infos(self, held: Sequence[str], dtype: int) -> list[Any]:
        if len(held) == 1:
            return [helper.make_tensor_sequence_value_info(held[0], dtype, None)]
        return [_info(name, kind) for name, kind in zip(held, (dtype, *[TensorProto.INT64] * 2), strict=True)]

    def _longer(self, body: Any, held: tuple[str, ...], value: str) -> tuple[str, ...]:
        """What `body` carries once `value` is in it."""
        made = tuple(self._fresh() for _ in held)
        if len(held) == 1:
            body.node.append(helper.make_node("SequenceInsert", [held[0], value], list(made)))
            return made
        row, flat, sizes, rank = (self._fresh() for _ in range(4))
        minus = TensorProto(data_type=TensorProto.INT64, dims=[1], int64_data=[-1])
        body.node.extend(
            [
                helper.make_node("Constant", [], [row], value=minus),
                helper.make_node("Reshape", [value, row], [flat]),
                helper.make_node("Shape", [value], [sizes]),
                helper.make_node("Shape", [sizes], [rank]),
                *(
                    helper.make_node("Concat", [old, more], [new], axis=0)
                    for old, more, new in zip(held, (flat, sizes, rank), made, strict=True)
                ),
            ]
        )
        return made

    def _unchanged(self, body: Any, held: tuple[str, ...], dtype: int) -> tuple[str, ...]:
        """What `body`, a branch without the value, carries on; Identity takes no sequence before opset 14."""
        if len(held) == 1:
            return self._longer(body, held, self._empty(body, dtype))
        made = tuple(self._fresh() for _ in held)
        body.node.extend(helper.make_node("Identity", [old], [new]) for old, new in zip(held, made, strict=True))
        return made

    def _empty(self, body: Any, dtype: int) -> str:
        name = self._fresh()
        body.node.append(helper.make_node("Constant", [], [name], value=TensorProto(data_type=dtype, dims=[0])))
        return name


def _split(elements: Array, sizes: Array, ranks: Array) -> list[Array]:
    """The values whose elements, sizes and ranks lie one behind the other."""
    values, at, place = [], 0, 0
    for rank in ranks.tolist():
        shape = sizes[place : place + rank].tolist()
        place += rank
        values.append(elements[at : at + math.prod(shape)].reshape(shape))
        at += math.prod(shape)
    return values


def _info(name: str, dtype: int) -> Any:
    return helper.make_tensor_value_info(name, dtype, None)


def _others(level: Level) -> list[Any]:
    return [body for body in bodies(level.node).values() if body is not level.body]
