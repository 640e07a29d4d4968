"""Channels of streams divided by powers of two, and the constants beside them made to fit: an exact change."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from graphquant.ir import DataType, Op, Output, TensorRef, Use
from graphquant.qdq.base import constant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from graphquant.corrections.streams import Held, Stream
    from graphquant.ir import Graph, Model
    from graphquant.numerics import Array
    from graphquant.plans import Plan

MOST: Final = 12
"""The largest power of two of a factor; real ones are below 8."""

RULE: Final = "correction"


def powers(factors: Array) -> Array:
    """Powers of two near to `factors`, which are positive: float64, likewise; their mean exponent is about 0."""
    exponents = np.log2(factors)
    return np.asarray(2.0 ** np.clip(np.rint(exponents - exponents.mean()), -MOST, MOST))


def rescale(model: Model, stream: Stream, by: Array) -> bool:
    """Divides the channels of a stream by `by`, (C,) powers of two; False, and nothing done, if that is not exact."""
    changed: dict[TensorRef, tuple[Array, Callable[[], Array]]] = {}
    for held in stream.held:
        read = changed[held.home][1] if held.home in changed else model.op(held.home).value
        if read is None:
            return False
        made = partial(_multiplied, read, _factor(held, by))
        value = made()
        old = read()
        if not np.isfinite(value).all() or not np.array_equal(
            _multiplied(partial(_same, value), 1 / _factor(held, by)), old
        ):
            return False
        mapped = isinstance(old, np.memmap)
        changed[held.home] = value, made if mapped else partial(_same, value)
    for home, (_, read) in changed.items():
        graph = model.graphs[home.graph]
        graph.replace(replace(graph.op(home.op), value=read))
    return True


def add_factor(model: Model, plan: Plan, part: Stream, by: Array) -> tuple[Plan, TensorRef]:
    """Puts a product with 1 / `by` between a tensor and what multiplies it, and what quantized it for that behind it.

    Args:
        model: The model, which is changed.
        plan: Its plan.
        part: The tensor as a part of a stream, its weights scaled already.
        by: float64 (C,), powers of two.

    Returns:
        The plan for the changed model, and the product.
    """
    tensor = part.start
    graph = model.graphs[tensor.graph]
    uses = [Use(use.graph, use.op, graph.op(use.op).roles.index("input")) for use in part.multiplied[tensor]]
    layout = part.tensors[tensor]
    spread = np.repeat(1 / by, layout.block)
    size = layout.size(model.output(tensor).shape)
    value = np.tile(spread, 1 if size is None else size // len(spread)).astype(np.float32)
    value = value.reshape(-1, *[1] * (-layout.axis - 1))
    factor = constant(graph, f"{tensor.op}/factor", value, type_="Const", rule=RULE)
    made = graph.add(_product(model, graph, tensor), [tensor, factor])
    for use in uses:
        model.graphs[use.graph].connect(use, made)
    sites, moved = [], set(uses)
    for site in plan.sites:
        here = tuple(use for use in site.uses if use in moved) if site.tensor == tensor else ()
        if here:
            sites.append(replace(site, tensor=made, uses=here))
        left = tuple(use for use in site.uses if use not in here)
        if left:
            sites.append(replace(site, uses=left) if here else site)
    return replace(plan, sites=tuple(sites)), made


def _product(model: Model, graph: Graph, tensor: TensorRef) -> Op:
    name, known = graph.fresh(f"{tensor.op}/scaled"), model.output(tensor)
    attrs: Mapping[str, DataType] = {"T": DataType("float32")} if model.format == "tensorflow" else {}
    outputs = (Output(name, known.dtype, known.shape),)
    return Op(name=name, kind="mul", type="Mul", outputs=outputs, attrs=attrs, rule=RULE)


def _factor(held: Held, by: Array) -> Array:
    wide = by[held.places]
    return np.asarray(wide if held.reads else 1 / wide, np.float32)


def _multiplied(read: Callable[[], Array], factor: Array) -> Array:
    value = read()
    return np.asarray(value * (factor if factor.ndim == value.ndim else factor.reshape(value.shape)))


def _same(value: Array) -> Array:
    return value


__all__ = ["add_factor", "powers", "rescale"]
