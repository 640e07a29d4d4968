"""Graph outputs keep their names: which values are called otherwise once an output reads another tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from onnx import NodeProto

from graphquant.errors import ModelError
from graphquant.ir import Graph, Model, Op, TensorRef, Use

if TYPE_CHECKING:
    from graphquant.formats.onnx.source import GraphSource


@dataclass(slots=True, kw_only=True)
class Ends:
    """What one graph's changed outputs ask for.

    Attributes:
        renamed: New names of values.
        copies: Identity nodes to add: output value to (node name, tensor read).
        titles: New names for outputs of bodies and functions, by position; there the order counts, not the name.
    """

    renamed: dict[TensorRef, str] = field(default_factory=dict)
    copies: dict[str, tuple[str, TensorRef]] = field(default_factory=dict)
    titles: dict[int, str] = field(default_factory=dict)


def ends_of(model: Model, graph: Graph, source: GraphSource) -> Ends:
    """The names with which the outputs of `graph` are called as in its source.

    1. The tensor that an output reads now takes the output's name.
    2. One that cannot (an input, an initializer, one of an outer graph, another output's) is copied by an Identity.
    3. An output of a body whose name belongs to an input or an outer value takes the name of what it reads.
    4. Whatever had the output's name before gets a new one.

    Raises:
        ModelError: The main graph's output is one of its inputs, so both would need the same name.
    """
    ends = Ends()
    fresh = _Names(graph)
    reads = {name: graph.slots(name)[0] for name in graph.outputs}
    edited = [name for name in graph.outputs if Use(graph.name, name, 0) in graph.edited]
    changed = {name: None for name in edited if not _is_same(graph, source, name)}
    busy = {tensor for name, tensor in reads.items() if name not in changed}
    freed: list[str] = []
    for name in changed:
        tensor, value = reads[name], value_of(graph.op(name))
        if tensor is None:
            raise ModelError(f"The graph output {value!r} reads nothing. Reroute it to a tensor.")
        own = tensor.graph == graph.name and tensor not in busy and _is_node(model.op(tensor))
        busy.add(tensor)
        title = value
        if value not in source.values or source.loaded[source.values[value].op].kind == "input":
            # Case 3.
            if not graph.name:
                raise ModelError(
                    f"The graph output {value!r} is the graph input of that name, so nothing fits between. "
                    "Leave it out with --exclude."
                )
            title = model.output(tensor).name if own else fresh(f"{value}/output")
            ends.titles[graph.outputs.index(name)] = title
        else:
            freed.append(value)
        if not own:
            ends.copies[title] = (fresh(f"{value}/identity"), tensor)  # Case 2.
        elif title == value:
            ends.renamed[tensor] = value  # Case 1.
    for value in freed:
        before = source.values[value]
        if before not in ends.renamed and before.op in graph and graph.op(before.op).source is not None:
            ends.renamed[before] = fresh(f"{value}/float")  # Case 4.
    return ends


def value_of(op: Op) -> str:
    """The value name in the source of an op of kind "output"."""
    name: str = op.source if isinstance(op.source, str) else op.source.name
    return name


class _Names:
    """Gives names that are free in a graph, each once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._given: set[str] = set()

    def __call__(self, wanted: str) -> str:
        label, k = self._graph.fresh(wanted), 1
        while label in self._given:
            label, k = self._graph.fresh(f"{wanted}_{k}"), k + 1
        self._given.add(label)
        return label


def _is_same(graph: Graph, source: GraphSource, name: str) -> bool:
    """Whether output `name` reads what it read at load."""
    tensor = graph.slots(name)[0]
    before = source.values.get(value_of(graph.op(name)))
    return tensor is not None and tensor == before and graph.op(tensor.op) is source.loaded[tensor.op]


def _is_node(op: Op) -> bool:
    return isinstance(op.source, NodeProto) or (op.source is None and op.kind != "constant")
