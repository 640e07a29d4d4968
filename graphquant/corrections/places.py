"""Where the ops are whose weights are quantized, and what adds a bias to what they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import networkx as nx

from graphquant.corrections.means import Axes, axes_of
from graphquant.ir import FORWARDING, WEIGHTED_KINDS, Graph, Model, Op, Parameters, TensorRef, Use, named

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.ir import Shape
    from graphquant.solve import Solution

SHAPELESS: Final = "its number of axes is not known before the model runs"

FIXED: Final = frozenset({"Const", "Initializer"})
"""Types of constants whose value is not the attribute of a node."""

ADDERS: Final = frozenset({"add", "bias_add"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An op that multiplies by a quantized weight.

    Attributes:
        graph: Its graph.
        op: The op.
        weight: Where it reads the weight.
        bias: Where its bias is read, or would be; None where nothing can add one.
        axes: The axes of what it makes; None where they are not known.
        why_not: Why nothing can add a bias, "" if something does.
    """

    graph: str
    op: Op
    weight: Use
    bias: Use | None = None
    axes: Axes | None = None
    why_not: str = ""

    @property
    def output(self) -> TensorRef:
        """What it makes."""
        return TensorRef(self.graph, self.op.name)

    @property
    def name(self) -> str:
        """The op as people read it."""
        return named(self.graph, self.op.name)


def places(model: Model, solution: Solution) -> Iterator[Place]:
    """The ops of the graphs that run whose weight has a scale, in the order of their graphs."""
    quantized = {
        use
        for index, site in enumerate(solution.plan.sites)
        if index in solution.params and site.parameter
        for use in site.uses
    }
    parameters = Parameters(model)
    for name in model.live():
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind not in WEIGHTED_KINDS or "weight" not in op.roles:
                continue
            weight = Use(name, op.name, op.roles.index("weight"))
            if weight in quantized:
                bias, axes = _bias(graph, op, parameters), axes_of(model, op, _shape(model, parameters, weight))
                if op.outputs[0].dtype not in {None, "float32"}:
                    bias = f"it computes in {op.outputs[0].dtype}"
                if axes is None:
                    bias = SHAPELESS
                if isinstance(bias, Use):
                    yield Place(graph=name, op=op, weight=weight, bias=bias, axes=axes)
                else:
                    yield Place(graph=name, op=op, weight=weight, axes=axes, why_not=bias)


def _shape(model: Model, parameters: Parameters, weight: Use) -> Shape:
    """The shape of a weight."""
    held = model.graphs[weight.graph].producer(weight)
    if held is None:
        return ()
    known: Shape | None = model.output(held).shape or model.output(parameters.origin(held)).shape
    value = parameters.value(held) if known is None else None
    return known or (() if value is None else value.shape)


def _bias(graph: Graph, op: Op, parameters: Parameters) -> Use | str:
    """Where the bias of an op is read, or could be; else why not."""
    if op.type.startswith("_Fused"):
        return "the op is fused with others"
    if op.kind == "gemm" and op.number("beta", 1.0) != 1.0:
        return "it multiplies its bias by a number"
    if "bias" in op.roles:
        use = Use(graph.name, op.name, op.roles.index("bias"))
        held = graph.producer(use)
        return use if held is None or parameters.is_parameter(held) else "its bias is computed"
    readers = graph.consumers(TensorRef(graph.name, op.name))
    adder = graph.op(readers[0].op) if len(readers) == 1 and readers[0].graph == graph.name else None
    if adder is None or adder.kind not in ADDERS or len(graph.slots(adder.name)) != len(("product", "bias")):
        return "it has no bias, and no op that adds one follows"
    use = Use(graph.name, adder.name, 1 - readers[0].slot)
    held = graph.producer(use)
    if held is None or not parameters.is_parameter(held):
        return "what is added to it is computed"
    return use


def own_constant(model: Model, use: Use, shape: Sequence[int]) -> TensorRef | None:
    """The constant of `shape` that is read at `use` and nowhere else; None if there is none."""
    here = model.graphs[use.graph].producer(use)
    while here is not None and len(model.graphs[here.graph].consumers(here)) == 1:
        op = model.op(here)
        if op.kind == "constant":
            return here if op.type in FIXED and op.outputs[0].shape == tuple(shape) else None
        slots = model.graphs[here.graph].slots(here.op)
        here = slots[0] if op.kind in FORWARDING and slots else None
    return None


def levels(graph: Graph, ops: Sequence[str]) -> dict[str, int]:
    """For each of `ops` how many of them the longest way to it leads through; empty where ops run in a ring.

    No op leads to another one of its own level.
    """
    chosen = set(ops)
    if not nx.is_directed_acyclic_graph(graph.nx):
        return {}
    deep: dict[str, int] = {}
    for name in nx.topological_sort(graph.nx):
        before = max((deep[source] for source in graph.nx.pred[name]), default=0)
        deep[name] = before + (name in chosen)
    return {name: deep[name] for name in ops}


def ends(graph: Graph, ops: Sequence[str]) -> list[str]:
    """Those of `ops` that lead to no other one of them."""
    seen: set[str] = set()
    todo = list(ops)
    while todo:
        for source in graph.nx.pred[todo.pop()]:
            if source not in seen:
                seen.add(source)
                todo.append(source)
    return [name for name in ops if name not in seen]


__all__ = ["Place", "ends", "levels", "own_constant", "places"]
