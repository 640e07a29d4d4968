"""How many multiply-adds each op of a model takes for one sample, from sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from graphquant.ir.parameters import Parameters
from graphquant.ir.types import TensorRef
from graphquant.ir.weight_layout import output_channels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from graphquant.ir.graph import Graph, Model
    from graphquant.ir.types import Op, Shape


MATRIX_PRODUCT_KINDS = frozenset({"matmul", "gemm"})
CONVOLUTION_KINDS = frozenset({"conv", "depthwise_conv"})
RECURRENT_KINDS = frozenset({"lstm", "gru", "rnn"})

MAC_KINDS = MATRIX_PRODUCT_KINDS | CONVOLUTION_KINDS | RECURRENT_KINDS | {"conv_transpose"}
"""Kinds that are counted: what others multiply is little beside these."""


def count_macs(model: Model, sizes: Mapping[TensorRef, int] | None = None) -> dict[tuple[str, str], int]:
    """Graph and name of each op that is counted, with its multiply-adds; ops of unknown sizes are left out.

    Args:
        model: The model.
        sizes: How many elements the tensors of `unsized_tensors` have, where that was measured.
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
    """The tensors whose number of elements only a run can tell."""
    tensors = (
        _driving_tensor(graph, op)
        for graph, op in _ops_with_macs(model)
        if _elements_per_sample(graph, _driving_tensor(graph, op), {}) is None
    )
    return [tensor for tensor in dict.fromkeys(tensors) if tensor is not None]


def _ops_with_macs(model: Model) -> Iterator[tuple[Graph, Op]]:
    """The ops that are counted, of graphs that a run can reach."""
    for name in model.reachable_graphs():
        graph = model.graphs[name]
        yield from ((graph, op) for op in graph.ops() if op.kind in MAC_KINDS)


def _driving_tensor(graph: Graph, op: Op) -> TensorRef | None:
    """The tensor each of whose elements takes equally many multiply-adds: the output, or what is spread out."""
    if op.kind in CONVOLUTION_KINDS | MATRIX_PRODUCT_KINDS:
        return TensorRef(graph.name, op.name)
    return _operand_with_role(graph, op, "input")


def _operand_with_role(graph: Graph, op: Op, role: str) -> TensorRef | None:
    return next((tensor for slot, tensor in enumerate(graph.slots(op.name)) if op.role(slot) == role), None)


def _elements_per_sample(graph: Graph, tensor: TensorRef | None, sizes: Mapping[TensorRef, int]) -> int | None:
    """The elements of a tensor for one sample; a first axis of unknown size counts samples."""
    if tensor is None or tensor in sizes:
        return None if tensor is None else sizes[tensor]
    shape: Shape | None = graph.output(tensor).shape
    trailing_sizes = [size for size in (shape or ())[1:] if size is not None]
    if shape is None or len(trailing_sizes) < len(shape[1:]):
        return None
    return math.prod(trailing_sizes) * ((shape[0] or 1) if shape else 1)


def _macs_per_element(graph: Graph, op: Op, parameters: Parameters) -> float | None:
    """The multiply-adds of `op` for each element of the tensor that drives it."""
    weight = _weight_shape(graph, _operand_with_role(graph, op, "weight"), parameters)
    if op.kind in MATRIX_PRODUCT_KINDS:
        return _summed_products(graph, op, weight)
    if weight is None or not math.prod(weight):
        return None
    if op.kind in CONVOLUTION_KINDS:
        channels = output_channels(op, weight)
        return math.prod(weight) / channels if channels else None
    if op.kind in RECURRENT_KINDS:
        recurrent_weight = _weight_shape(graph, _operand_with_role(graph, op, "recurrent_weight"), parameters)
        return None if recurrent_weight is None else (math.prod(weight) + math.prod(recurrent_weight)) / weight[-1]
    return math.prod(weight) / (weight[0] if op.channel_axis == 1 else weight[-1])


def _summed_products(graph: Graph, op: Op, weight: tuple[int, ...] | None) -> float | None:
    """Over how many products each element of a matrix product is a sum."""
    left_shape, right_shape = (
        _output_shape(graph, _operand_with_role(graph, op, role)) for role in ("input", "weight")
    )
    transposed = [bool(op.numeric_attr(name, 0)) for name in ("transA", "transpose_a", "adj_x")]
    size = None if not left_shape else left_shape[-2 if any(transposed) and len(left_shape) > 1 else -1]
    if size is None:
        transposed = [bool(op.numeric_attr(name, 0)) for name in ("transB", "transpose_b", "adj_y")]
        shape = weight or right_shape
        size = None if not shape else shape[-1 if any(transposed) or len(shape) == 1 else -2]
    return size


def _output_shape(graph: Graph, tensor: TensorRef | None) -> Shape | None:
    shape: Shape | None = None if tensor is None else graph.output(tensor).shape
    return shape


def _weight_shape(graph: Graph, tensor: TensorRef | None, parameters: Parameters) -> tuple[int, ...] | None:
    """The shape of a weight; None where it is not known."""
    shape = _output_shape(graph, tensor)
    if tensor is not None and shape is None and parameters.is_parameter(tensor):
        root = parameters.root_tensor(tensor)
        shape = _output_shape(graph.graphs[root.graph], root)
    known_sizes = None if shape is None else tuple(size for size in shape if size is not None)
    return known_sizes if shape is not None and known_sizes is not None and len(known_sizes) == len(shape) else None
