"""Constants as every backend expects them: initializers that nobody can override, and no nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from graphquant.ir import NO_ATTRS, Graph, Model, Op, TensorRef, named
from graphquant.prepare.steps import Left, Step, makes_output
from graphquant.prepare.undo import Edits, encoded

if TYPE_CHECKING:
    from collections.abc import Iterator

INITIALIZERS: Final = "initializer-inputs"

NODES: Final = "constant-nodes"


def initializer_inputs(model: Model) -> Iterator[Step]:
    """Initializers that are graph inputs too (IR version 3) become constants: nobody may override them any more."""
    graph = model.main
    for position, name in enumerate(graph.inputs):
        op = graph.op(name)
        if op.value is None:
            continue
        graph.replace(replace(op, kind="constant", roles=()))
        yield Step(
            step=INITIALIZERS,
            target=name,
            detail="initializer is no graph input any more",
            undo={"position": position, "input": encoded(op)},
        )
    graph.inputs = [name for name in graph.inputs if graph.op(name).kind == "input"]


def constant_nodes(model: Model) -> Iterator[Step]:
    """ONNX's Constant nodes become initializers of their graphs. Functions have no initializers, and keep them."""
    for graph, op in _nodes(model):
        if _reason(graph, op) is not None:
            continue
        edits = Edits(model)
        made = replace(op, type="Initializer", roles=(), attrs=NO_ATTRS, outputs=op.outputs[:1], source=None)
        edits.replace(graph, made)
        yield Step(step=NODES, target=named(graph.name, op.name), detail="is an initializer", undo=edits.undo())


def nodes_left(model: Model) -> Iterator[Left]:
    """The Constant nodes that are still there."""
    for graph, op in _nodes(model):
        reason = _reason(graph, op)
        if reason is not None:
            yield Left(step=NODES, tensor=TensorRef(graph.name, op.name), reason=reason)


def _nodes(model: Model) -> Iterator[tuple[Graph, Op]]:
    """ONNX's Constant nodes in graphs that run and can have initializers."""
    for name in model.live() if model.format == "onnx" else ():
        graph = model.graphs[name]
        if not name or graph.parent is not None:
            yield from [(graph, op) for op in graph.ops() if op.type == "Constant" and op.kind == "constant"]


def _reason(graph: Graph, op: Op) -> str | None:
    """Why a Constant node must stay one."""
    if op.value is None:
        return "its value is an argument of the function around it, so it stays a node"
    if "sparse_value" in op.attrs:
        return "it is sparse, and would be larger as an initializer"
    if makes_output(graph, op.name):
        return "it makes an output of its graph, which an initializer does not everywhere"
    return None
