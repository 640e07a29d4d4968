"""Plan and scales to a new graph: QDQ ops are added and exactly the planned uses are rerouted to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphquant.errors import UsageError
from graphquant.ir import Graph, Model, Parameters, TensorRef, bulk, check
from graphquant.numerics import Array, QParams
from graphquant.plans import Plan, Site
from graphquant.qdq import FAMILIES, Lowering

FRAMES = frozenset({"enter", "switch"})
"""Kinds that only TF1 loop and cond frames have; a constant without inputs would sit outside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inserted:
    """What one site became.

    Attributes:
        site: The site.
        params: Its scale and zero point.
        output: The dequantized tensor that its uses read now.
        folded: Whether the weight was stored as integers.
    """

    site: Site
    params: QParams
    output: TensorRef
    folded: bool


def rewrite(
    model: Model, plan: Plan, params: Mapping[int, QParams], *, float_weights: bool = False
) -> tuple[Model, list[Inserted]]:
    """A copy of `model` in which every site of `plan` that has params is quantized and dequantized.

    Args:
        model: The prepared model that the plan names.
        plan: The sites.
        params: Scale and zero point by the site's position.
        float_weights: Keep weights as they are, with a whole QDQ pair, instead of storing integers.

    Raises:
        UsageError: The plan names an op or a use that the model does not have.
    """
    changed = model.copy()
    _check_sites(changed, plan)
    parameters = Parameters(model)
    names = _names(plan, params)
    framed = {name for name, graph in changed.graphs.items() if any(op.kind in FRAMES for op in graph.ops())}
    inserted = []
    with bulk():
        for index, site in enumerate(plan.sites):
            if index not in params:
                continue
            graph = changed.graphs[site.graph]
            value = None if float_weights or not site.parameter else _foldable(parameters, site)
            known = parameters.value(site.tensor) if site.axis is not None and value is None else value
            lowering = Lowering(
                tensor=site.tensor,
                name=graph.fresh(names[index]),
                params=params[index],
                rule=site.rule,
                value=value,
                shape=None if known is None else known.shape,
                in_frame=site.graph in framed,
            )
            output = FAMILIES[site.scheme.family or ""].lower(graph, lowering)
            changed.graphs[site.tensor.graph].reroute(site.tensor, site.uses, output)
            inserted.append(Inserted(site=site, params=params[index], output=output, folded=value is not None))
        _drop_unread(changed, (done.site.tensor for done in inserted if done.folded))
    check(changed, "rewrite")
    return changed, inserted


def _drop_unread(model: Model, tensors: Iterable[TensorRef]) -> None:
    """Takes out constants, and what was computed from them alone, that nobody reads any more."""
    todo = list(dict.fromkeys(tensors))
    while todo:
        tensor = todo.pop()
        graph = model.graphs[tensor.graph]
        if tensor.op not in graph:
            continue
        op = graph.op(tensor.op)
        if op.kind in {"input", "output"} or op.calls or graph.readers(tensor.op):
            continue
        todo.extend(read for read in graph.slots(tensor.op) if read is not None)
        graph.remove(tensor.op)


def _foldable(parameters: Parameters, site: Site) -> Array | None:
    """The weight's value, if its family can store it as integers."""
    return parameters.value(site.tensor) if site.scheme.family == "onnx-qdq" else None


def _names(plan: Plan, params: Mapping[int, QParams]) -> dict[int, str]:
    """`<op>/quant`, `_<port>` where the port is not 0, `/<rule>` where a tensor has several sites."""
    sites = {index: plan.sites[index] for index in range(len(plan.sites)) if index in params}
    count = Counter((site.tensor, site.graph) for site in sites.values())
    names = {}
    for index, site in sites.items():
        name = f"{site.tensor.op}/quant" + (f"_{site.tensor.port}" if site.tensor.port else "")
        names[index] = f"{name}/{site.rule}" if count[site.tensor, site.graph] > 1 else name
    return names


def _check_sites(model: Model, plan: Plan) -> None:
    for site in plan.sites:
        graph: Graph | None = model.graphs.get(site.tensor.graph)
        if graph is None or site.tensor.op not in graph or site.tensor.port >= len(graph.op(site.tensor.op).outputs):
            raise UsageError(f"The plan names the tensor {site.tensor}, which the model does not have. Make the plan anew for this model.")
        if site.graph not in model.graphs:
            raise UsageError(f"The plan names the graph {site.graph!r}, which the model does not have. Make the plan anew for this model.")
        for use in site.uses:
            if use.graph not in model.graphs or use.op not in model.graphs[use.graph]:
                raise UsageError(f"The plan names the use {use}, which the model does not have. Make the plan anew for this model.")
