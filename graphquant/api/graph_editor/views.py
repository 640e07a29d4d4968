"""Tensors and operations that hold their graph, as in TensorFlow: arguments and results of this package's functions.

They are references, not copies: they stay valid while the graph is edited, and two with the same name are equal.
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
    """One op of `graph`. Graph inputs, constants and outputs are ops too; an output's name starts with `@`."""

    graph: Graph
    name: str

    def __str__(self) -> str:
        return f"{self.graph.name}/{self.name}" if self.graph.name else self.name

    def __repr__(self) -> str:
        return f"<Operation {str(self)!r}>"

    @property
    def node(self) -> Op:
        """The op in the model, with attributes, roles and value."""
        if self.name not in self.graph:
            raise UsageError(f"There is no op {self} any more. Select it again after removing ops.")
        return self.graph.op(self.name)

    @property
    def type(self) -> str:
        """The framework's own op type, "Conv2D"."""
        return self.node.type

    @property
    def kind(self) -> str:
        """The kind shared by both frameworks, "conv"."""
        return self.node.kind

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors in its connected input slots, in order."""
        self.node  # noqa: B018  # raises if the op was removed
        filled = [slot for slot in self.graph.slots(self.name) if slot is not None]
        return [Tensor(self.graph.graphs[slot.graph], slot) for slot in filled]

    @property
    def outputs(self) -> list[Tensor]:
        """Its output tensors."""
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
        """The op that produces it."""
        return Operation(self.graph, self.ref.op)

    @property
    def dtype(self) -> str | None:
        """Numpy-like name, None if it is unknown before a run."""
        return self.op.node.outputs[self.ref.port].dtype

    @property
    def shape(self) -> Shape | None:
        """Static sizes: None for an unknown size, None instead of all if the rank is unknown."""
        return self.op.node.outputs[self.ref.port].shape

    def uses(self) -> list[Use]:
        """Return every input slot that reads the tensor, also in bodies of its readers."""
        self.op.node  # noqa: B018  # raises if the op was removed
        return self.graph.consumers(self.ref)

    def consumers(self) -> list[Operation]:
        """Return the ops that read the tensor, each once."""
        return list(dict.fromkeys(Operation(self.graph.graphs[use.graph], use.op) for use in self.uses()))


def searched_graphs(graph: Graph | Model) -> list[Graph]:
    """Return the graph itself, or a model's main graph and all graphs reachable from it."""
    if isinstance(graph, Model):
        return [graph.graphs[name] for name in graph.reachable_graphs()]
    if isinstance(graph, Graph):
        return [graph]
    raise UsageError(
        f"A model or one of its graphs is required, but this is a {type(graph).__name__}. Use graphquant.load."
    )


def all_operations(graph: Graph | Model) -> Iterator[Operation]:
    """Yield all ops, in the order of the model."""
    return (Operation(graph_of_op, op.name) for graph_of_op in searched_graphs(graph) for op in graph_of_op.ops())


def all_tensors(graph: Graph | Model) -> Iterator[Tensor]:
    """Yield all outputs of all ops, in the order of the model."""
    return (tensor for op in all_operations(graph) for tensor in op.outputs)


def as_operations(selection: object, *, ignore_ts: bool = False) -> list[Operation]:
    """Return the ops of a selection: one op, an iterable of ops, a graph or a model.

    Raises:
        UsageError: The selection contains something else. With `ignore_ts`, tensors are allowed.
    """
    if isinstance(selection, Graph | Model):
        return list(all_operations(selection))
    members = list(_as_iterable(selection))
    for member in members:
        if not (isinstance(member, Operation) or (ignore_ts and isinstance(member, Tensor))):
            raise UsageError(f"{_describe_object(member)} is not an op. Select ops with graph_editor.select_ops.")
    return [member for member in members if isinstance(member, Operation)]


def as_tensors(selection: object, *, ignore_ops: bool = False) -> list[Tensor]:
    """Return the tensors of a selection: one tensor, an iterable of tensors, a graph or a model.

    Raises:
        UsageError: The selection contains something else. With `ignore_ops`, ops are allowed.
    """
    if isinstance(selection, Graph | Model):
        return list(all_tensors(selection))
    members = list(_as_iterable(selection))
    for member in members:
        if not (isinstance(member, Tensor) or (ignore_ops and isinstance(member, Operation))):
            raise UsageError(f"{_describe_object(member)} is not a tensor. Select tensors with graph_editor.select_ts.")
    return [member for member in members if isinstance(member, Tensor)]


def _as_iterable(selection: object) -> Iterable[object]:
    return selection if isinstance(selection, Iterable) and not isinstance(selection, str) else [selection]


def _describe_object(member: object) -> str:
    return f"The {type(member).__name__} {str(member)[:60]!r}"
