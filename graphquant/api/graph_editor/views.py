"""Tensors and operations that know their graph, as TensorFlow's do: what the verbs of this package take and give.

They are names, not copies: they stay valid while the graph is edited, and two of the same name are equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphquant.errors import UsageError
from graphquant.ir import Graph, Model, Op, Shape, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, repr=False)
class Operation:
    """One op of `graph`; a graph input, constant or output is one too, an output's name starts with `@`."""

    graph: Graph
    name: str

    def __str__(self) -> str:
        return f"{self.graph.name}/{self.name}" if self.graph.name else self.name

    def __repr__(self) -> str:
        return f"<Operation {str(self)!r}>"

    @property
    def node(self) -> Op:
        """What the model knows of it: attributes, roles, value."""
        if self.name not in self.graph:
            raise UsageError(f"There is no op {self} any more. Select it again after removing ops.")
        return self.graph.op(self.name)

    @property
    def type(self) -> str:
        """The framework's own op type, "Conv2D"."""
        return self.node.type

    @property
    def kind(self) -> str:
        """The kind that both frameworks share, "conv"."""
        return self.node.kind

    @property
    def inputs(self) -> list[Tensor]:
        """What its filled input slots read, in their order."""
        self.node  # noqa: B018  # tells that the op is gone
        filled = [slot for slot in self.graph.slots(self.name) if slot is not None]
        return [Tensor(self.graph.graphs[slot.graph], slot) for slot in filled]

    @property
    def outputs(self) -> list[Tensor]:
        """What it makes."""
        return [
            Tensor(self.graph, TensorRef(self.graph.name, self.name, port)) for port in range(len(self.node.outputs))
        ]


@dataclass(frozen=True, slots=True, repr=False)
class Tensor:
    """One output of an op of `graph`."""

    graph: Graph
    ref: TensorRef

    def __str__(self) -> str:
        return str(self.ref)

    def __repr__(self) -> str:
        return f"<Tensor {str(self)!r}>"

    @property
    def name(self) -> str:
        """`op:port`, without the graph."""
        return f"{self.ref.op}:{self.ref.port}"

    @property
    def op(self) -> Operation:
        """The op that makes it."""
        return Operation(self.graph, self.ref.op)

    @property
    def dtype(self) -> str | None:
        """Numpy-like name, None if it is not known without running the model."""
        return self.op.node.outputs[self.ref.port].dtype

    @property
    def shape(self) -> Shape | None:
        """Static sizes, None for each that is not known, None for all if their number is not."""
        return self.op.node.outputs[self.ref.port].shape

    def uses(self) -> list[Use]:
        """Every input slot that reads it, in bodies of its readers too."""
        self.op.node  # noqa: B018  # tells that the op is gone
        return self.graph.consumers(self.ref)

    def consumers(self) -> list[Operation]:
        """The ops that read it, each once."""
        return list(dict.fromkeys(Operation(self.graph.graphs[use.graph], use.op) for use in self.uses()))


def searched_graphs(graph: Graph | Model) -> list[Graph]:
    """The graph itself; of a model the main graph and all that it can reach."""
    if isinstance(graph, Model):
        return [graph.graphs[name] for name in graph.reachable_graphs()]
    if isinstance(graph, Graph):
        return [graph]
    raise UsageError(
        f"A model or one of its graphs is wanted, and this is a {type(graph).__name__}. Use graphquant.load."
    )


def all_operations(graph: Graph | Model) -> Iterator[Operation]:
    """All ops, in the order of the model."""
    return (Operation(graph_of_op, op.name) for graph_of_op in searched_graphs(graph) for op in graph_of_op.ops())


def all_tensors(graph: Graph | Model) -> Iterator[Tensor]:
    """All outputs of all ops, in the order of the model."""
    return (tensor for op in all_operations(graph) for tensor in op.outputs)


def as_operations(selection: object, *, ignore_ts: bool = False) -> list[Operation]:
    """The ops that one op, an iterable of ops, a graph or a model stands for.

    Raises:
        UsageError: There is something else among them; tensors only if they are not to be ignored.
    """
    if isinstance(selection, Graph | Model):
        return list(all_operations(selection))
    members = list(_as_iterable(selection))
    for member in members:
        if not (isinstance(member, Operation) or (ignore_ts and isinstance(member, Tensor))):
            raise UsageError(f"{_describe_object(member)} is no op. Select ops with graph_editor.select_ops.")
    return [member for member in members if isinstance(member, Operation)]


def as_tensors(selection: object, *, ignore_ops: bool = False) -> list[Tensor]:
    """The tensors that one tensor, an iterable of tensors, a graph or a model stands for.

    Raises:
        UsageError: There is something else among them; ops only if they are not to be ignored.
    """
    if isinstance(selection, Graph | Model):
        return list(all_tensors(selection))
    members = list(_as_iterable(selection))
    for member in members:
        if not (isinstance(member, Tensor) or (ignore_ops and isinstance(member, Operation))):
            raise UsageError(f"{_describe_object(member)} is no tensor. Select tensors with graph_editor.select_ts.")
    return [member for member in members if isinstance(member, Tensor)]


def _as_iterable(selection: object) -> Iterable[object]:
    return selection if isinstance(selection, Iterable) and not isinstance(selection, str) else [selection]


def _describe_object(member: object) -> str:
    return f"The {type(member).__name__} {str(member)[:60]!r}"
