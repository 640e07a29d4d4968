"""The invariants of a model, checked after each stage in time linear in its size."""

from __future__ import annotations

from graphquant.errors import InternalError
from graphquant.ir.graph import CONTROL_EDGE, Graph, Model
from graphquant.ir.types import TensorRef, Use


def check_invariants(model: Model, stage: str) -> None:
    """Checks that `model` holds together.

    1. Each node has an op of its own name, and a body's owner exists.
    2. Each slot reads an existing port of an existing op in sight, by exactly one edge, of the body's owner if it is a
       capture.
    3. There are no other data edges.
    4. The listed inputs and outputs exist and are of that kind.
    5. An ONNX graph has no cycle.

    Args:
        model: The model.
        stage: What was just done, for the message.

    Raises:
        InternalError: An invariant is broken; the message names the stage, which is where the fault is.
    """
    for graph in model.graphs.values():
        _check_graph_ends(graph, stage)
    for graph in model.graphs.values():
        _check_slots(graph, stage)
        if model.format == "onnx" and len(graph.topological_order()) < len(graph):
            import networkx as nx  # which takes a while to find the first cycle

            cycle = " -> ".join(edge[0] for edge in nx.find_cycle(graph.nx))
            raise _invariant_error(stage, graph, f"the ops {cycle} form a cycle")


def _check_slots(graph: Graph, stage: str) -> None:
    unmatched_edges = 0
    for name, data in graph.nx.nodes(data=True):
        # Case 1: the node is its op.
        if "op" not in data or data["op"].name != name:
            raise _invariant_error(stage, graph, f"node {name!r} does not hold the op of that name")
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
                    stage, graph, f"capture edge {source} -> {target} stands for {use}, which reads elsewhere"
                )
    if unmatched_edges:
        raise _invariant_error(stage, graph, f"{-unmatched_edges} data edges belong to no slot")


def _check_slot(graph: Graph, use: Use, tensor: TensorRef, stage: str) -> None:
    source_graph = graph.graphs.get(tensor.graph)
    if source_graph is None or tensor.op not in source_graph or not graph.can_read(tensor.graph):
        raise _invariant_error(stage, graph, f"{use} reads {tensor}, which does not exist or is out of sight")
    if not 0 <= tensor.port < len(source_graph.op(tensor.op).outputs):
        raise _invariant_error(
            stage, graph, f"{use} reads {tensor}, but that op has {len(source_graph.op(tensor.op).outputs)} outputs"
        )
    edge = graph.edge_data(use, tensor)
    if edge is None or edge["port"] != tensor.port:
        raise _invariant_error(stage, graph, f"{use} reads {tensor}, but the edge for it is missing")


def _check_graph_ends(graph: Graph, stage: str) -> None:
    # Case 4: inputs and outputs.
    for kind, names in (("input", graph.inputs), ("output", graph.outputs)):
        for name in names:
            if name not in graph or (kind == "output" and graph.op(name).kind != kind):
                raise _invariant_error(stage, graph, f"{name!r} is listed as {kind} but is none")
    if graph.parent is not None:
        owner_graph, owner = graph.parent
        if owner_graph not in graph.graphs or owner not in graph.graphs[owner_graph]:
            raise _invariant_error(stage, graph, f"its owner {owner!r} is gone")


def _invariant_error(stage: str, graph: Graph, problem: str) -> InternalError:
    graph_label = f"graph {graph.name!r}" if graph.name else "the main graph"
    return InternalError(
        f"After {stage}, {graph_label} is broken: {problem}. This is a fault of graphquant's {stage}; please report it."
    )
