"""TensorFlow nodes that quantization ops need: constants, variables and reshapes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphquant.errors import InternalError
from graphquant.ir import DataType, Graph, Op, Output, TensorRef, fully_known_shape
from graphquant.qdq.family import QDQSite, add_constant

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphquant.numerics import Array


LEARNED_ATTR = "_graphquant_learned"
"""Attribute of the variables of learned ranges; True if gradients reach them."""


def control_sources(graph: Graph, site: QDQSite) -> tuple[str, ...]:
    """Return the control inputs of new constants: the tensor's producer, so that they run inside its frame."""
    return (site.tensor.op,) if site.in_frame and site.tensor.graph == graph.name else ()


def add_site_constant(graph: Graph, site: QDQSite, suffix: str, value: Array) -> TensorRef:
    """Add a Const whose name is that of the site and `suffix`."""
    return add_constant(
        graph,
        f"{site.name}/{suffix}",
        value,
        op_type="Const",
        rule=site.rule,
        control_sources=control_sources(graph, site),
    )


def add_argument(graph: Graph, site: QDQSite, suffix: str, value: Array, *, trainable: bool = False) -> TensorRef:
    """Add an argument of the op: a constant, or for a learned range a variable with the initial value `value`."""
    if not site.variable_prefix:
        return add_site_constant(graph, site, suffix, value)
    return _add_variable(graph, site, suffix, value, trainable=trainable)


def _add_variable(graph: Graph, site: QDQSite, suffix: str, value: Array, *, trainable: bool) -> TensorRef:
    """Add a variable and the op that reads it. The format writes the initial value."""
    handle_name = graph.unique_name(f"{site.name}/{suffix}")
    shared_name = f"{site.variable_prefix}/{suffix}"  # function clones share the variable by this name
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
    read_name = graph.unique_name(f"{handle_name}/Read/ReadVariableOp")  # TensorFlow's freezing expects this name
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
    """Add a Reshape of `tensor` whose name is that of the site and `suffix`."""
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
    """Call `add_ops`, between two reshapes if the site has a merged shape."""
    shape = fully_known_shape(site.shape)
    if site.merged_shape is None:
        return add_ops(graph, site)
    if shape is None:
        raise InternalError(f"{site.tensor} has a merged shape but no static shape. The plan must reject it.")
    reshaped = add_reshape(graph, site, site.tensor, site.merged_shape, "flat")
    quantized = add_ops(graph, replace(site, tensor=reshaped, shape=site.merged_shape, merged_shape=None))
    return add_reshape(graph, site, quantized, shape, "shaped")
