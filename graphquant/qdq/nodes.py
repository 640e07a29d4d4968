"""The TensorFlow nodes that quantization ops need beside them: constants, variables and reshapes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import InternalError
from graphquant.ir import DataType, Graph, Op, Output, TensorRef
from graphquant.qdq.base import Lowering, constant

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array


LEARNED = "_graphquant_learned"
"""The attribute of the variables of learned ranges: whether gradients reach them."""


def after(graph: Graph, site: Lowering) -> tuple[str, ...]:
    """What new constants must wait for: in a frame the op that makes the tensor, so that they run inside of it."""
    return (site.tensor.op,) if site.in_frame and site.tensor.graph == graph.name else ()


def const(graph: Graph, site: Lowering, word: str, value: Array) -> TensorRef:
    """Adds a Const called after the site and `word`."""
    return constant(graph, f"{site.name}/{word}", value, type_="Const", rule=site.rule, after=after(graph, site))


def held(graph: Graph, site: Lowering, word: str, value: Array, *, trainable: bool = False) -> TensorRef:
    """Adds what holds an argument of the op: a constant, or a variable that starts with `value` if it is learned."""
    if not site.learned:
        return const(graph, site, word, value)
    return _variable(graph, site, word, value, trainable=trainable)


def _variable(graph: Graph, site: Lowering, word: str, value: Array, *, trainable: bool) -> TensorRef:
    """Adds a variable called after the site and `word`, and what reads it; the format gives it its first value."""
    label = graph.fresh(f"{site.name}/{word}")
    shared = f"{site.learned}/{word}"  # by which copies of a site know one variable
    handle = Op(
        name=label,
        kind="variable",
        type="VarHandleOp",
        roles=(),
        outputs=(Output(label, "resource", ()),),
        attrs={"dtype": DataType(str(value.dtype)), "shape": value.shape, "shared_name": shared, LEARNED: trainable},
        value=lambda: value,
        rule=site.rule,
    )
    name = graph.fresh(f"{label}/Read/ReadVariableOp")  # under which TensorFlow's freezing looks for it
    read = Op(
        name=name,
        kind="read_variable",
        type="ReadVariableOp",
        roles=("input",),
        outputs=(Output(name, str(value.dtype), value.shape),),
        attrs={"dtype": DataType(str(value.dtype))},
        rule=site.rule,
    )
    return graph.add(read, [graph.add(handle, after=after(graph, site))])


def reshape(graph: Graph, site: Lowering, tensor: TensorRef, shape: tuple[int, ...], word: str) -> TensorRef:
    """Adds a Reshape of `tensor`, called after the site and `word`."""
    dtype = graph.output(site.tensor).dtype
    sizes = const(graph, site, f"{word}/shape", np.array(shape, np.int32))
    label = graph.fresh(f"{site.name}/{word}")
    op = Op(
        name=label,
        kind="reshape",
        type="Reshape",
        roles=("input", "shape"),
        outputs=(Output(label, dtype, shape),),
        attrs={"T": DataType(dtype or "float32"), "Tshape": DataType("int32")},
        rule=site.rule,
    )
    return graph.add(op, [tensor, sizes])


def within(graph: Graph, site: Lowering, lower: Callable[[Graph, Lowering], TensorRef]) -> TensorRef:
    """What `lower` adds, between two reshapes where the site has a view of its tensor."""
    shape = static(site.shape)
    if site.view is None:
        return lower(graph, site)
    if shape is None:
        raise InternalError(
            f"A view of {site.tensor}, whose shape is not known, was asked for; the plan must refuse it."
        )
    viewed = reshape(graph, site, site.tensor, site.view, "flat")
    made = lower(graph, replace(site, tensor=viewed, shape=site.view, view=None))
    return reshape(graph, site, made, shape, "shaped")


def static(shape: tuple[int | None, ...] | None) -> tuple[int, ...] | None:
    """`shape` if every size is known."""
    known = tuple(side for side in shape or () if side is not None)
    return known if shape is not None and len(known) == len(shape) else None
