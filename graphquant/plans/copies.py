"""The sites of a plan again in copies: saved functions that compute the same as the graphs that run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.ir import QUANTIZATION_KINDS, Model, Parameters, TensorRef, Twins, Use
from graphquant.qdq import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.plans.types import Site

PASSING = frozenset({"call", "if", "while", "output", "switch", "enter", "merge", "exit", "next_iteration"})
"""Kinds that hand a tensor on, to where it is quantized if it has to be."""


def copied(model: Model, parameters: Parameters, sites: Sequence[Site]) -> Iterator[Site]:
    """A site in a copy for each of `sites` whose uses have twins there; its scale is the twin's.

    A use is quantized as its twin is. One without a twin, as in a branch for training, is if all uses of the tensor's
    twin are. The tensors must agree in dtype and shape; twins must have made them, and a weight must be the same
    variable or have the same value.
    """
    if not model.saved:
        return
    twins = Twins(model, parameters)
    by_use = {use: site for site in sites for use in site.uses}
    whole = {
        site.tensor: site
        for site in sites
        if len(model.graphs[site.tensor.graph].consumers(site.tensor)) == len(site.uses)
    }
    found: dict[tuple[int, TensorRef], tuple[Site, Use, list[Use]]] = {}
    for name in twins.copies:
        graph = model.graphs[name]
        for op in graph.ops():
            twin = twins.of(name, op.name)
            for slot, tensor in enumerate(graph.slots(op.name)):
                if tensor is None or op.kind in QUANTIZATION_KINDS:
                    continue
                if twin is not None:
                    site = by_use.get(Use(*twin, slot))
                else:
                    source = None if op.kind in PASSING else twins.of(tensor.graph, tensor.op)
                    site = None if source is None else whole.get(TensorRef(*source, tensor.port))
                if site is not None and _agree(model, parameters, twins, site, tensor):
                    first = Use(*twin, slot) if twin is not None else site.uses[0]
                    found.setdefault((id(site), tensor), (site, first, []))[2].append(Use(name, op.name, slot))
    for (_, tensor), (site, first, uses) in found.items():
        home = tensor.graph if site.graph == site.tensor.graph else uses[0].graph
        yield replace(site, tensor=tensor, uses=tuple(uses), graph=home, tie=(), twin=first)


def _agree(model: Model, parameters: Parameters, twins: Twins, site: Site, tensor: TensorRef) -> bool:
    """Whether what is done to the site's tensor can be done to `tensor`, and means the same."""
    known, own = model.output(tensor), model.output(site.tensor)
    if known.dtype != own.dtype or parameters.is_parameter(tensor) != site.parameter:
        return False
    shape = known.shape
    if site.parameter:
        shape = model.output(parameters.origin(tensor)).shape if shape is None else shape
        if not _same_value(parameters, twins, site.tensor, tensor):
            return False
    elif not (_compatible(known.shape, own.shape) and twins.alike(tensor, site.tensor)):
        return False
    seen = site.view or shape
    asked = site.scheme.request(axis=site.axis, dtype=known.dtype or "", shape=seen, parameter=site.parameter)
    return FAMILIES[site.scheme.family or ""].why_not(asked) is None


def _same_value(parameters: Parameters, twins: Twins, one: TensorRef, other: TensorRef) -> bool:
    """Whether two weights are one variable, or have one value."""
    variable = twins.variable(one)
    if variable is not None:
        return variable == twins.variable(other)
    value, copy = parameters.value(one), parameters.value(other)
    return value is not None and copy is not None and np.array_equal(value, copy)


def _compatible(one: tuple[int | None, ...] | None, other: tuple[int | None, ...] | None) -> bool:
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(a is None or b is None or a == b for a, b in zip(one, other, strict=True))
