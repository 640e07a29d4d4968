"""Count the multiply-adds of each op of a model for one sample, from tensor sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from graphquant.ir.kinds import CONVOLUTION_KINDS, MATRIX_PRODUCT_KINDS, RECURRENT_KINDS, WEIGHTED_KINDS
from graphquant.ir.parameters import Parameters
from graphquant.ir.types import TensorRef, fully_known_shape
from graphquant.ir.weight_layout import output_channels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from graphquant.ir.graph import Graph, Model
    from graphquant.ir.types import Op, OpKey, Shape

MAC_KINDS = WEIGHTED_KINDS | RECURRENT_KINDS
"""Kinds that are counted. The multiplications of all other kinds are negligible."""


def count_macs(model: Model, sizes: Mapping[TensorRef, int] | None = None) -> dict[OpKey, int]:
    """Count the multiply-adds of each op of `MAC_KINDS`. Ops of unknown sizes are omitted.

    Args:
        model: The model.
        sizes: Measured numbers of elements of the tensors that `unsized_tensors` lists.
    """
    parameters, known_sizes = Parameters(model), sizes or {}
    macs = {}
    for graph, op in _ops_with_macs(model):
        elements = _elements_per_sample(graph, _driving_tensor(graph, op), known_sizes)
        macs_per_element = _macs_per_element(graph, op, parameters)
        if elements is not None and macs_per_element is not None:
            macs[graph.name, op.name] = round(elements * macs_per_element)
    return macs


def unsized_tensors(model: Model) -> list[TensorRef]:
    """Return the tensors that `count_macs` needs and whose number of elements is known only when the model runs."""
    tensors = (
        _driving_tensor(graph, op)
        for graph, op in _ops_with_macs(model)
        if _elements_per_sample(graph, _driving_tensor(graph, op), {}) is None
    )
    return [tensor for tensor in dict.fromkeys(tensors) if tensor is not None]


def _ops_with_macs(model: Model) -> Iterator[tuple[Graph, Op]]:
    """Yield the counted ops of all graphs that a run can reach."""
    for name in model.reachable_graphs():
        graph = model.graphs[name]
        yield from ((graph, op) for op in graph.ops() if op.kind in MAC_KINDS)


def _driving_tensor(graph: Graph, op: Op) -> TensorRef | None:
    """Return the tensor whose elements each cost the same number of multiply-adds.

    That is the output of convolutions and products. A transposed convolution or a recurrent op uses each element of its
    input equally often.
    """
    if op.kind in CONVOLUTION_KINDS | MATRIX_PRODUCT_KINDS:
        return TensorRef(graph.name, op.name)
    return _operand_with_role(graph, op, "input")


def _operand_with_role(graph: Graph, op: Op, role: str) -> TensorRef | None:
    return next((tensor for slot, tensor in enumerate(graph.slots(op.name)) if op.role(slot) == role), None)


def _elements_per_sample(graph: Graph, tensor: TensorRef | None, sizes: Mapping[TensorRef, int]) -> int | None:
    """Return the elements of a tensor for one sample. A first axis of unknown size is taken to count samples."""
    if tensor is None or tensor in sizes:
        return None if tensor is None else sizes[tensor]
    shape: Shape | None = graph.output(tensor).shape
    trailing_sizes = fully_known_shape(None if shape is None else shape[1:])
    if shape is None or trailing_sizes is None:
        return None
    return math.prod(trailing_sizes) * ((shape[0] or 1) if shape else 1)


def _macs_per_element(graph: Graph, op: Op, parameters: Parameters) -> float | None:
    """Return the multiply-adds of `op` for each element of its driving tensor."""
    weight = _weight_shape(_operand_with_role(graph, op, "weight"), parameters)
    if op.kind in MATRIX_PRODUCT_KINDS:
        return _inner_size(graph, op, weight)
    if weight is None or not math.prod(weight):
        return None
    if op.kind in CONVOLUTION_KINDS:
        channels = output_channels(op, weight)
        return math.prod(weight) / channels if channels else None
    if op.kind in RECURRENT_KINDS:
        recurrent_weight = _weight_shape(_operand_with_role(graph, op, "recurrent_weight"), parameters)
        # The weights [directions, gates x hidden, features] are applied once per time step, which has `features`
        # elements.
        return None if recurrent_weight is None else (math.prod(weight) + math.prod(recurrent_weight)) / weight[-1]
    return math.prod(weight) / (weight[0] if op.channel_axis == 1 else weight[-1])


def _inner_size(graph: Graph, op: Op, weight: tuple[int, ...] | None) -> float | None:
    """Return the number of products that each element of a matrix product is the sum of."""
    left_shape, right_shape = (
        _output_shape(graph, _operand_with_role(graph, op, role)) for role in ("input", "weight")
    )
    size = None
    if left_shape:
        transposed = any(op.numeric_attr(name, 0) for name in ("transA", "transpose_a", "adj_x"))
        size = left_shape[-2 if transposed and len(left_shape) > 1 else -1]
    shape = weight or right_shape
    if size is None and shape:
        transposed = any(op.numeric_attr(name, 0) for name in ("transB", "transpose_b", "adj_y"))
        size = shape[-1 if transposed or len(shape) == 1 else -2]
    return size


def _output_shape(graph: Graph, tensor: TensorRef | None) -> Shape | None:
    shape: Shape | None = None if tensor is None else graph.output(tensor).shape
    return shape


def _weight_shape(tensor: TensorRef | None, parameters: Parameters) -> tuple[int, ...] | None:
    """Return the shape of a weight, or None if it is unknown."""
    return None if tensor is None else fully_known_shape(parameters.shape(tensor))
