"""Check the invariants of a model after each stage, in time linear in its size."""

from __future__ import annotations

from graphquant.errors import InternalError
from graphquant.ir.graph import CONTROL_EDGE, Graph, Model
from graphquant.ir.types import TensorRef, Use


def check_invariants(model: Model, stage: str) -> None:
    """Check that slots, edges and lists of `model` agree.

    1. Each node has the op of its name, and the owner of each body exists.
    2. Each slot reads an existing port of an existing op in scope, by exactly one edge. A capture's edge ends at the op
       that owns the body.
    3. There are no other data edges.
    4. The listed inputs and outputs exist and have that kind.
    5. An ONNX graph has no cycle.

    Args:
        model: The model.
        stage: The stage that just ended, for the message.

    Raises:
        InternalError: An invariant is broken. The message names the stage, which caused it.
    """
    for graph in model.graphs.values():
        _check_graph_ends(graph, stage)
    for graph in model.graphs.values():
        _check_slots(graph, stage)
        if model.traits.acyclic and len(graph.topological_order()) < len(graph):
            import networkx as nx  # imported for the message only; find_cycle is slow

            cycle = " -> ".join(edge[0] for edge in nx.find_cycle(graph.nx))
            raise _invariant_error(stage, graph, f"The ops {cycle} form a cycle.")


def _check_slots(graph: Graph, stage: str) -> None:
    unmatched_edges = 0
    for name, data in graph.nx.nodes(data=True):
        # Case 1: the node is its op.
        if "op" not in data or data["op"].name != name:
            raise _invariant_error(stage, graph, f"Node {name!r} does not have the op of that name.")
        # Case 2: every slot is one edge.
        for slot, tensor in enumerate(data["slots"]):
            if tensor is not None:
                _check_slot(graph, Use(graph.name, name, slot), tensor, stage)
                unmatched_edges += tensor.graph == graph.name
    # Case 3: every data edge is a slot, every capture a slot of its body.
    for source, target, key, edge in graph.nx.edges(keys=True, data=True):
        if isinstance(key, int):
            unmatched_edges -= 1
        elif key != CONTROL_EDGE:
            use: Use = key[1]
            reader_graph = graph.graphs.get(use.graph)
            source_tensor = reader_graph.source_of(use) if reader_graph is not None and use.op in reader_graph else None
            if source_tensor != TensorRef(graph.name, source, edge["port"]):
                raise _invariant_error(
                    stage, graph, f"The capture edge {source} -> {target} is for {use}, which reads another tensor."
                )
    if unmatched_edges:
        raise _invariant_error(stage, graph, f"{-unmatched_edges} data edges belong to no slot.")


def _check_slot(graph: Graph, use: Use, tensor: TensorRef, stage: str) -> None:
    source_graph = graph.graphs.get(tensor.graph)
    if source_graph is None or tensor.op not in source_graph or not graph.can_read(tensor.graph):
        raise _invariant_error(stage, graph, f"{use} reads {tensor}, which does not exist or is out of scope.")
    outputs = len(source_graph.op(tensor.op).outputs)
    if not 0 <= tensor.port < outputs:
        raise _invariant_error(stage, graph, f"{use} reads {tensor}, but that op has {outputs} outputs.")
    edge = graph.edge_data(use, tensor)
    if edge is None or edge["port"] != tensor.port:
        raise _invariant_error(stage, graph, f"{use} reads {tensor}, but its edge is missing.")


def _check_graph_ends(graph: Graph, stage: str) -> None:
    # Case 4: inputs and outputs.
    for kind, names in (("input", graph.inputs), ("output", graph.outputs)):
        for name in names:
            if name not in graph or (kind == "output" and graph.op(name).kind != kind):
                raise _invariant_error(stage, graph, f"The {kind} {name!r} does not exist, or is not an {kind}.")
    if graph.parent is not None:
        owner_graph, owner = graph.parent
        if owner_graph not in graph.graphs or owner not in graph.graphs[owner_graph]:
            raise _invariant_error(stage, graph, f"Its owner {owner!r} does not exist.")


def _invariant_error(stage: str, graph: Graph, problem: str) -> InternalError:
    graph_label = f"graph {graph.name!r}" if graph.name else "the main graph"
    return InternalError(
        f"After {stage}, {graph_label} is invalid: {problem} This is an error in graphquant; please report it."
    )
