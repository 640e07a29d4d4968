"""The values of the intermediate representation: references to tensors and their uses, and the description of an op.

Walks over graphs of any values are here too. Each is bounded: a damaged model may hold a ring where a valid one cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from graphquant.errors import ModelError

Shape = tuple[int | None, ...]
"""Static sizes, outermost first. None is a size that is known only when the model runs."""

OpKey = tuple[str, str]
"""The name of a graph and the name of an op in it."""

Node = TypeVar("Node", bound=Hashable)

MAX_HOPS = 256  # default limit of nodes on one path

FLOAT_TYPES = frozenset({"float16", "bfloat16", "float32", "float64"})

NO_ATTRS: Mapping[str, Any] = MappingProxyType({})


class DataType(str):
    """A dtype as the value of an op's attribute, by its numpy-like name."""

    __slots__ = ()


class TensorRef(NamedTuple):
    """Output `port` of op `op` in graph `graph`, which is "" for the main graph."""

    graph: str
    op: str
    port: int = 0

    def __str__(self) -> str:
        return f"{self.graph}/{self.op}:{self.port}" if self.graph else f"{self.op}:{self.port}"


class Use(NamedTuple):
    """Input `slot` of op `op` in graph `graph`: one use of a tensor."""

    graph: str
    op: str
    slot: int

    def __str__(self) -> str:
        return f"{self.graph}/{self.op}[{self.slot}]" if self.graph else f"{self.op}[{self.slot}]"


class OpInfo(NamedTuple):
    """Kind, roles of the input slots (the last one repeats), and channel axis of the "weight" slot.

    The axis counts from the end if negative. `defaults` are the values of attributes that a file may omit.
    """

    kind: str
    roles: tuple[str, ...] = ("input",)
    channel_axis: int | None = None
    defaults: Mapping[str, Any] = NO_ATTRS


def qualified_op_name(graph: str, op: str) -> str:
    """Return the name of an op for messages, with its graph unless that is the main graph."""
    return f"{graph}/{op}" if graph else op


def fully_known_shape(shape: Shape | None) -> tuple[int, ...] | None:
    """Return `shape` if every size is known, else None."""
    sizes = tuple(size for size in shape or () if size is not None)
    return sizes if shape is not None and len(sizes) == len(shape) else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredQuantization:
    """The quantization that a file stores with a tensor itself, as TFLite does, and not in Q/DQ ops."""

    index: int  # position in the graph's list of tensors
    sizes: tuple[int, ...]  # Sizes stored in the file. `Output.shape` has None for those that may change.
    # Real units per step, float32 (C,); (0,) if the tensor is not quantized. With `block`, float16 or float32 of the
    # tensor's rank, and so are zero points.
    scale: np.ndarray[Any, Any] = field(default_factory=partial(np.empty, 0, np.float32))
    zero_point: np.ndarray[Any, Any] = field(default_factory=partial(np.empty, 0, np.int64))  # int64 (C,), steps
    axis: int = 0  # axis of the scales or blocks if there are several
    block: int = 0  # number of elements along `axis` that share one scale; 0 without blocks
    # float32 (C,), smallest value during training or calibration; usually (0,).
    low: np.ndarray[Any, Any] = field(default_factory=partial(np.empty, 0, np.float32))
    high: np.ndarray[Any, Any] = field(default_factory=partial(np.empty, 0, np.float32))  # float32 (C,), largest value
    details: str = ""  # name of a quantization that is not one scale and zero point per tensor or channel, else ""


@dataclass(frozen=True, slots=True)
class Output:
    """One output of an op: its name in the file, numpy-like dtype name and static shape.

    `name` is "" for an optional output that the op does not have. `quantization` is None in formats with Q/DQ ops.
    """

    name: str
    dtype: str | None = None
    shape: Shape | None = None
    quantization: StoredQuantization | None = None

    @property
    def elements_per_sample(self) -> int | None:
        """Number of elements, counting a first axis of unknown size as 1; None if another axis has an unknown size."""
        if self.shape is None or None in self.shape[1:]:
            return None
        return ((self.shape[0] if self.shape else None) or 1) * math.prod(size or 0 for size in self.shape[1:])


class Call(NamedTuple):
    """A graph that an op runs: a branch, a loop body or a function."""

    attr: str  # the op's attribute that names or holds the graph
    graph: str  # the graph's name in the model
    # Operand `i + offset` of the op becomes input `i` of the graph; None if they do not correspond.
    offset: int | None = None
    # The graph's outputs become its inputs in the next iteration. An input is then a parameter only if the body
    # passes it through.
    loop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """A node of a graph: an operation, a graph input ("input"), a constant, a variable or a graph output ("output")."""

    name: str  # unique in its graph
    kind: str  # the framework-neutral kind ("conv", "matmul", ...) or "other"
    type: str  # the framework's own op type
    domain: str = ""  # the ONNX domain, "" for the default one and for TensorFlow
    # Role of each input slot ("input", "weight", "bias", ...); the last one applies to all further slots.
    roles: tuple[str, ...] = ("input",)
    channel_axis: int | None = None  # the output channel axis of the "weight" slot's tensor, None if there is none
    outputs: tuple[Output, ...] = ()  # one entry per output port
    # The op's attributes, decoded when they are read.
    attrs: Mapping[str, Any] = field(default_factory=lambda: NO_ATTRS)
    # Function that returns the value of a constant or variable; None for other ops and unreadable values.
    read_value: Callable[[], np.ndarray[Any, Any]] | None = None
    calls: tuple[Call, ...] = ()  # the graphs that the op runs
    source: Any = None  # The node of the source message; None for an op that graphquant added.
    rule: str = ""  # the rule or step that added the op, "" for one of the source
    anchor: str = ""  # the tensor that a rule added the op for, "" for one of the source
    notes: Mapping[str, str] = field(default_factory=lambda: NO_ATTRS)  # metadata of a new node, doc string under ""
    # Further attributes of the fused op that a file has in place of a "dequantize" op and each of its readers that
    # has such a form; None if the file has the ops themselves.
    fused_attrs: Mapping[str, Any] | None = None

    def role(self, slot: int) -> str:
        """Return the role of input `slot`."""
        return self.roles[min(slot, len(self.roles) - 1)] if self.roles else "input"

    @property
    def main_slot(self) -> int:
        """The first slot with the role "input"; 0 if there is none."""
        return self.roles.index("input") if "input" in self.roles else 0

    def numeric_attr(self, attr: str, default: float) -> float:
        """Return the attribute `attr` as a number, or `default` if the op does not have it.

        Raises a ModelError if the attribute is not a finite number.
        """
        value = self.attrs.get(attr, default)
        if isinstance(value, Real) and math.isfinite(value):
            return float(value)
        raise ModelError(
            f"Op {self.name!r} has the attribute {attr} = {str(value)[:60]!r}, which is not a number."
            " Export the model again."
        )

    def text_attr(self, attr: str, default: str) -> str:
        """Return the attribute `attr` as text, or `default` if the op does not have it."""
        value = self.attrs.get(attr, default)
        return value.decode() if isinstance(value, bytes) else str(value)


class FormatTraits(NamedTuple):
    """Properties of one model format. Outside `formats`, code asks for these instead of the name of a format."""

    runtime: str  # framework that runs the models
    rewritable: bool = True  # true if models can be changed, written and run
    judgeable: bool = False  # true if backends judge the ops of the models, as `check` shows
    acyclic: bool = False  # True if no graph has cycles. The loop frames of TensorFlow 1 are cycles.
    # True if values have names of their own, so that removing an op keeps the name of an output.
    named_values: bool = False
    removable_arguments: bool = False  # true if unused arguments of functions can be removed
    stacked_matmul: bool = False  # true if matrix products also multiply stacks of matrices, along any axis
    type_attrs: bool = False  # true if ops store their data types in attributes
    constant_type: str = ""  # op type of a constant
    select_type: str = ""  # op type that selects one of two tensors by a condition
    data_format: str = "NHWC"  # default data format of convolutions


FORMAT_TRAITS: dict[str, FormatTraits] = {
    "onnx": FormatTraits(
        runtime="onnxruntime",
        judgeable=True,
        acyclic=True,
        named_values=True,
        removable_arguments=True,
        stacked_matmul=True,
        constant_type="Constant",
        select_type="Where",
        data_format="NCHW",
    ),
    "tensorflow": FormatTraits(runtime="TensorFlow", type_attrs=True, constant_type="Const", select_type="SelectV2"),
    "tflite": FormatTraits(runtime="TFLite", rewritable=False, stacked_matmul=True, data_format="NCHW"),
}
"""Traits by the keys of the format table."""


def follow(start: Node, step: Callable[[Node], Node | None], limit: int = MAX_HOPS) -> Iterator[Node]:
    """Yield `start` and the nodes that `step` leads to one by one, until it returns None or after `limit` steps."""
    current: Node | None = start
    for _ in range(limit + 1):
        if current is None:
            return
        yield current
        current = step(current)


def follow_to_end(start: Node, step: Callable[[Node], Node | None], limit: int = MAX_HOPS) -> Node:
    """Return the last node of `follow`."""
    *_, last = follow(start, step, limit)
    return last


def reachable(starts: Iterable[Node], successors: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return `starts` and all nodes that `successors` lead to, breadth first, each once."""
    visited = dict.fromkeys(starts)
    queue = list(visited)
    for node in queue:  # grows
        for successor in successors(node):
            if successor not in visited:
                visited[successor] = None
                queue.append(successor)
    return queue


def connected_groups(nodes: Iterable[Node], edges: Iterable[tuple[Node, Node]]) -> list[list[Node]]:
    """Group `nodes` that `edges` connect. Groups and their members are in the order of `nodes`."""
    neighbors: dict[Node, list[Node]] = {node: [] for node in nodes}
    for first, second in edges:
        neighbors[first].append(second)
        neighbors[second].append(first)
    positions = {node: position for position, node in enumerate(neighbors)}
    groups: list[list[Node]] = []
    grouped: set[Node] = set()
    for node in neighbors:
        if node not in grouped:
            group = reachable([node], neighbors.__getitem__)
            grouped.update(group)
            groups.append(sorted(group, key=positions.__getitem__))
    return groups


def dependency_components(dependencies: Mapping[Node, Iterable[Node]]) -> list[list[Node]]:
    """Return the strongly connected components of a graph, each after those that it depends on: Tarjan's algorithm."""
    components: list[list[Node]] = []
    lowest: dict[Node, float] = {}  # smallest number that a node leads to; numbers count visits
    stack: list[Node] = []  # visited nodes without a component; the others have infinity for their number
    for start in dependencies:
        path = [] if start in lowest else [(start, iter(dependencies[start]), len(lowest))]
        while path:
            node, targets, number = path[-1]
            if node not in lowest:
                lowest[node] = number
                stack.append(node)
            for target in targets:
                if target not in lowest:
                    path.append((target, iter(dependencies.get(target, ())), len(lowest)))
                    break
                lowest[node] = min(lowest[node], lowest[target])
            else:
                path.pop()
                for parent, _, _ in path[-1:]:
                    lowest[parent] = min(lowest[parent], lowest[node])
                if lowest[node] == number:
                    components.append([stack.pop()])
                    while components[-1][-1] != node:
                        components[-1].append(stack.pop())
                    lowest |= dict.fromkeys(components[-1], math.inf)
    return components


def unique_name(name: str, *used: Container[str]) -> str:
    """Return `name`, or `name` with the smallest suffix `_1`, `_2`, ... that is in none of `used`."""
    candidate, suffix = name, 0
    while any(candidate in names for names in used):
        suffix += 1
        candidate = f"{name}_{suffix}"
    return candidate
