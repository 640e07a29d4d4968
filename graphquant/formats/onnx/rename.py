"""Graph outputs keep their names: which values are called otherwise once an output reads another tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnx import NodeProto

from graphquant.errors import ModelError
from graphquant.formats.onnx.source import GraphSource
from graphquant.ir import Graph, Model, Op, TensorRef, Use


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
    """The names that make the outputs of `graph` be called as in its source.

    1. The tensor that an output reads now takes the output's name.
    2. A tensor that cannot (an input, an initializer, one of an outer graph, another output's) is copied by an Identity.
    3. An output of a body whose name belongs to an input or an outer value takes the name of what it reads.
    4. Whatever had the output's name before gets a new one.

    Raises:
        ModelError: The main graph's output is one of its inputs, so both would need the same name.
    """
    ends = Ends()
    reads = {name: graph.slots(name)[0] for name in graph.outputs}
    changed = [name for name in graph.outputs if Use(graph.name, name, 0) in graph.edited]
    busy = {reads[name] for name in graph.outputs if name not in changed}
    names: set[str] = set()

    def fresh(wanted: str) -> str:
        label, k = graph.fresh(wanted), 1
        while label in names:
            label, k = graph.fresh(f"{wanted}_{k}"), k + 1
        names.add(label)
        return label

    freed: list[str] = []
    for name in changed:
        end, tensor = graph.op(name).source, reads[name]
        value = end if isinstance(end, str) else end.name
        if tensor is None:
            raise ModelError(f"The graph output {value!r} reads nothing. Reroute it to a tensor.")
        if tensor == source.values.get(value) and model.output(tensor).name == value:
            busy.add(tensor)
            continue
        own = tensor.graph == graph.name and tensor not in busy and _is_node(model.op(tensor))
        busy.add(tensor)
        if value not in source.values or source.loaded[source.values[value].op].kind == "input":
            # Case 3.
            if not graph.name:
                raise ModelError(
                    f"The graph output {value!r} is the graph input of that name, so nothing fits between. Leave it out with --exclude."
                )
            title = model.output(tensor).name if own else fresh(f"{value}/output")
            ends.titles[graph.outputs.index(name)] = title
            if not own:
                ends.copies[title] = (fresh(f"{value}/identity"), tensor)
            continue
        freed.append(value)
        if own:
            ends.renamed[tensor] = value  # Case 1.
        else:
            ends.copies[value] = (fresh(f"{value}/identity"), tensor)  # Case 2.
    for value in freed:
        before = source.values[value]
        if before not in ends.renamed and before.op in graph and graph.op(before.op).source is not None:
            ends.renamed[before] = fresh(f"{value}/float")  # Case 4.
    return ends


def _is_node(op: Op) -> bool:
    return isinstance(op.source, NodeProto) or (op.source is None and op.kind != "constant")
