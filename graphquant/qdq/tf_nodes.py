"""The TensorFlow nodes that quantization ops need beside them: constants, variables and reshapes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import InternalError
from graphquant.ir import DataType, Graph, Op, Output, TensorRef
from graphquant.qdq.family import QDQSite, add_constant

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array


LEARNED_ATTR = "_graphquant_learned"
"""The attribute of the variables of learned ranges: whether gradients reach them."""


def control_sources(graph: Graph, site: QDQSite) -> tuple[str, ...]:
    """What new constants must wait for: in a frame the op that makes the tensor, so that they run inside of it."""
    return (site.tensor.op,) if site.in_frame and site.tensor.graph == graph.name else ()


def add_site_constant(graph: Graph, site: QDQSite, suffix: str, value: Array) -> TensorRef:
    """Adds a Const called after the site and `suffix`."""
    return add_constant(
        graph,
        f"{site.name}/{suffix}",
        value,
        op_type="Const",
        rule=site.rule,
        control_sources=control_sources(graph, site),
    )


def add_argument(graph: Graph, site: QDQSite, suffix: str, value: Array, *, trainable: bool = False) -> TensorRef:
    """Adds what holds an argument of the op: a constant, or a variable that starts with `value` if it is learned."""
    if not site.variable_prefix:
        return add_site_constant(graph, site, suffix, value)
    return _add_variable(graph, site, suffix, value, trainable=trainable)


def _add_variable(graph: Graph, site: QDQSite, suffix: str, value: Array, *, trainable: bool) -> TensorRef:
    """Adds a variable called after the site and `suffix`, and what reads it; the format gives it its first value."""
    handle_name = graph.unique_name(f"{site.name}/{suffix}")
    shared_name = f"{site.variable_prefix}/{suffix}"  # by which copies of a site know one variable
    handle = Op(
        name=handle_name,
        kind="variable",
        type="VarHandleOp",
        roles=(),
        outputs=(Output(handle_name, "resource", ()),),
        attrs={
            "dtype": DataType(str(value.dtype)),
            "shape": value.shape,
            "shared_name": shared_name,
            LEARNED_ATTR: trainable,
        },
        read_value=lambda: value,
        rule=site.rule,
    )
    read_name = graph.unique_name(
        f"{handle_name}/Read/ReadVariableOp"
    )  # under which TensorFlow's freezing looks for it
    read_op = Op(
        name=read_name,
        kind="read_variable",
        type="ReadVariableOp",
        roles=("input",),
        outputs=(Output(read_name, str(value.dtype), value.shape),),
        attrs={"dtype": DataType(str(value.dtype))},
        rule=site.rule,
    )
    return graph.add_op(read_op, [graph.add_op(handle, control_sources=control_sources(graph, site))])


def add_reshape(graph: Graph, site: QDQSite, tensor: TensorRef, shape: tuple[int, ...], suffix: str) -> TensorRef:
    """Adds a Reshape of `tensor`, called after the site and `suffix`."""
    dtype = graph.output(site.tensor).dtype
    sizes = add_site_constant(graph, site, f"{suffix}/shape", np.array(shape, np.int32))
    op_name = graph.unique_name(f"{site.name}/{suffix}")
    op = Op(
        name=op_name,
        kind="reshape",
        type="Reshape",
        roles=("input", "shape"),
        outputs=(Output(op_name, dtype, shape),),
        attrs={"T": DataType(dtype or "float32"), "Tshape": DataType("int32")},
        rule=site.rule,
    )
    return graph.add_op(op, [tensor, sizes])


def add_in_merged_shape(graph: Graph, site: QDQSite, add_ops: Callable[[Graph, QDQSite], TensorRef]) -> TensorRef:
    """What `add_ops` adds, between two reshapes where the site has a view of its tensor."""
    shape = fully_known_shape(site.shape)
    if site.merged_shape is None:
        return add_ops(graph, site)
    if shape is None:
        raise InternalError(
            f"A view of {site.tensor}, whose shape is not known, was asked for; the plan must refuse it."
        )
    reshaped = add_reshape(graph, site, site.tensor, site.merged_shape, "flat")
    quantized = add_ops(graph, replace(site, tensor=reshaped, shape=site.merged_shape, merged_shape=None))
    return add_reshape(graph, site, quantized, shape, "shaped")


def fully_known_shape(shape: tuple[int | None, ...] | None) -> tuple[int, ...] | None:
    """`shape` if every size is known."""
    sizes = tuple(size for size in shape or () if size is not None)
    return sizes if shape is not None and len(sizes) == len(shape) else None
