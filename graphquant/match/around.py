"""What is around an op: who reads it, what it computes on, and what is known of both; found out once each."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from graphquant.ir import Graph, Model, Parameters, Shape, TensorRef, Use

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

PASSES = frozenset({"identity", "dropout"})
"""Kinds that a chain looks through unless it names them, since they compute nothing."""


class Around:
    """The neighbours of the ops of `model`, which must not be edited meanwhile."""

    def __init__(self, model: Model) -> None:
        """Nothing is looked at before it is asked for."""
        self.model = model
        self.parameters = Parameters(model)
        self._readers: dict[tuple[str, str], dict[int, list[Use]]] = {}
        self._shapes: dict[TensorRef, Shape | None] = {}
        self._mains: dict[tuple[str, str], TensorRef | None] = {}
        self._ups: dict[TensorRef, TensorRef | None] = {}
        self._downs: dict[tuple[str, str], str | None] = {}

    @cached_property
    def results(self) -> list[tuple[TensorRef, str]]:
        """The first output of each op that can run, with the op's kind."""
        graphs = [self.model.graphs[name] for name in self.model.live()]
        return [(TensorRef(graph.name, op.name), op.kind) for graph in graphs for op in graph.ops() if op.outputs]

    def shape(self, tensor: TensorRef) -> Shape | None:
        """The static shape of `tensor`; a parameter's also from the variable or argument behind it."""
        if tensor not in self._shapes:
            shape: Shape | None = self.model.output(tensor).shape
            if shape is None and self.parameters.is_parameter(tensor):
                shape = self.model.output(self.parameters.origin(tensor)).shape
            self._shapes[tensor] = shape
        return self._shapes[tensor]

    def is_kind(self, kinds: AbstractSet[str], tensor: TensorRef) -> bool:
        """Whether `kinds` name the op of `tensor`."""
        if "*" in kinds or self.model.op(tensor).kind in kinds:
            return True
        return "parameter" in kinds and self.parameters.is_parameter(tensor)

    def readers(self, graph: Graph, op: str) -> dict[int, list[Use]]:
        """The consumers of each output of an op."""
        key = (graph.name, op)
        if key not in self._readers:
            self._readers[key] = graph.readers(op)
        return self._readers[key]

    def uses(self, tensor: TensorRef) -> list[Use]:
        """The consumers of `tensor`."""
        return self.readers(self.model.graphs[tensor.graph], tensor.op).get(tensor.port, [])

    def inputs(self, use: Use) -> list[tuple[TensorRef, Use]]:
        """What the op of `use` reads, with the place where it does."""
        slots = enumerate(self.model.graphs[use.graph].slots(use.op))
        return [(read, Use(use.graph, use.op, slot)) for slot, read in slots if read is not None]

    def above(self, tensor: TensorRef, *, literal: bool) -> TensorRef | None:
        """What the op of `tensor` computes on, if that has no other reader; beyond ops that pass it on."""
        source = self.main(tensor)
        if source is None or literal:
            return source if source is not None and len(self.uses(source)) == 1 else None
        path: list[TensorRef] = []
        while source is not None and source not in self._ups:
            self._ups[source] = None  # also ends a ring of identities
            path.append(source)
            if len(self.uses(source)) != 1:
                source = None
            elif self.model.op(source).kind not in PASSES:
                break
            else:
                source = self.main(source)
        found = source if path and source == path[-1] else None if source is None else self._ups[source]
        self._ups.update(dict.fromkeys(path, found))
        return found

    def below(self, graph: Graph, name: str, *, literal: bool) -> str | None:
        """The op of this graph that alone reads output 0 of op `name`; beyond ops that pass it on."""
        if literal:
            return self._sole_reader(graph, name)
        path: list[str] = []
        here: str | None = name
        while here is not None and (graph.name, here) not in self._downs:
            self._downs[graph.name, here] = None
            path.append(here)
            here = self._sole_reader(graph, here)
            if here is not None and graph.op(here).kind not in PASSES:
                break
        else:
            here = None if here is None else self._downs[graph.name, here]
        self._downs.update({(graph.name, step): here for step in path})
        return here

    def _sole_reader(self, graph: Graph, name: str) -> str | None:
        readers = self.uses(TensorRef(graph.name, name))
        return readers[0].op if len(readers) == 1 and readers[0].graph == graph.name else None

    def main(self, tensor: TensorRef) -> TensorRef | None:
        """What the op of `tensor` computes on: its first input that is no parameter, else its first."""
        key = (tensor.graph, tensor.op)
        if key not in self._mains:
            filled = [slot for slot in self.model.graphs[tensor.graph].slots(tensor.op) if slot is not None]
            computed = (slot for slot in filled if not self.parameters.is_parameter(slot))
            self._mains[key] = next(computed, filled[0] if filled else None)
        return self._mains[key]
