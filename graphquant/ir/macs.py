"""Multiply-adds (MACs) of ops for one sample: the cost that reports and the search count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from graphquant.ir.kinds import CONVOLUTION_KINDS, FUSED_PREFIX, MAC_KINDS, MATRIX_PRODUCT_KINDS, RECURRENT_KINDS
from graphquant.ir.parameters import Parameters
from graphquant.ir.types import Op, OpKey, TensorRef, fully_known_shape
from graphquant.ir.weight_layout import output_channels

if TYPE_CHECKING:
    from graphquant.ir.graph import Graph, Model


def count_macs(model: Model, sizes: Mapping[TensorRef, int] | None = None) -> dict[OpKey, int]:
    """Count the multiply-adds of each op of `MAC_KINDS` for one sample. Ops of unknown sizes are omitted.

    `sizes` are the measured numbers of elements of the tensors that `unsized_tensors` lists.
    """
    parameters, macs = Parameters(model), {}
    for graph, op, elements in _driving_elements(model, sizes or {}):
        macs_per_element = _macs_per_element(graph, op, parameters)
        if elements is not None and macs_per_element is not None:
            macs[graph.name, op.name] = round(elements * macs_per_element)
    return macs


def unsized_tensors(model: Model) -> list[TensorRef]:
    """Return the tensors that `count_macs` needs and whose number of elements is known only when the model runs."""
    tensors = (_driving_tensor(graph, op) for graph, op, elements in _driving_elements(model, {}) if elements is None)
    return [tensor for tensor in dict.fromkeys(tensors) if tensor is not None]


def _driving_elements(model: Model, sizes: Mapping[TensorRef, int]) -> Iterator[tuple[Graph, Op, int | None]]:
    """Yield the counted ops that the outputs need with the elements of their driving tensor for one sample.

    A first axis of unknown size is taken to count samples.
    """
    needed_ops = model.needed_ops()
    for graph, counted_op in model.reachable_ops():
        if counted_op.kind in MAC_KINDS and counted_op.name in needed_ops.get(graph.name, ()):
            op = replace(counted_op, kind=counted_op.kind.removeprefix(FUSED_PREFIX))
            tensor = _driving_tensor(graph, op)
            known = None if tensor is None else graph.output(tensor).elements_per_sample
            yield graph, op, known if tensor is None else sizes.get(tensor, known)


def _driving_tensor(graph: Graph, op: Op) -> TensorRef | None:
    """Return the tensor whose elements each cost the same number of multiply-adds.

    That is the output of convolutions and products. A transposed convolution or a recurrent op uses each element of its
    input equally often.
    """
    if op.kind in CONVOLUTION_KINDS | MATRIX_PRODUCT_KINDS | {"einsum"}:
        return TensorRef(graph.name, op.name)
    return _operand_with_role(graph, op, "input")


def _operand_with_role(graph: Graph, op: Op, role: str) -> TensorRef | None:
    return next((tensor for slot, tensor in enumerate(graph.slots(op.name)) if op.role(slot) == role), None)


def _macs_per_element(graph: Graph, op: Op, parameters: Parameters) -> float | None:
    """Return the multiply-adds of `op` for each element of its driving tensor."""

    def weight_shape(role: str) -> tuple[int, ...] | None:
        tensor = _operand_with_role(graph, op, role)
        return None if tensor is None else fully_known_shape(parameters.shape(tensor))

    weight = weight_shape("weight")
    if op.kind in MATRIX_PRODUCT_KINDS:
        return _inner_size(graph, op, weight)
    if op.kind == "einsum":
        return _contracted_size(graph, op)
    if weight is None or not prod(weight):
        return None
    if op.kind in CONVOLUTION_KINDS:
        channels = output_channels(op, weight)
        return prod(weight) / channels if channels else None
    if op.kind in RECURRENT_KINDS:
        recurrent_weight = weight_shape("recurrent_weight")
        # The weights [directions, gates x hidden, features] are applied once per time step, which has `features`
        # elements.
        return None if recurrent_weight is None else (prod(weight) + prod(recurrent_weight)) / weight[-1]
    return prod(weight) / (weight[0] if op.channel_axis == 1 else weight[-1])


def _contracted_size(graph: Graph, op: Op) -> float | None:
    """Return the number of products that each element of an Einsum is the sum of; None if a size is unknown."""
    terms, arrow, result = op.text_attr("equation", "").replace(" ", "").partition("->")
    if not arrow:
        result = "".join(label for label in terms if terms.count(label) == 1)
    sizes: dict[str, int | None] = {}
    for term, tensor in zip(terms.split(","), graph.slots(op.name), strict=False):
        shape = None if tensor is None else graph.output(tensor).shape
        # Axes that an ellipsis stands for are in the result, so only the labels after it count from the end.
        labels = term.partition("...")
        if shape is None or len(labels[0]) + len(labels[2]) > len(shape):
            return None
        sizes |= zip(labels[0], shape, strict=False)
        sizes |= zip(reversed(labels[2]), reversed(shape), strict=False)
    contracted = [size for label, size in sizes.items() if label not in result]
    return None if None in contracted else prod(size or 0 for size in contracted)


def _inner_size(graph: Graph, op: Op, weight: tuple[int, ...] | None) -> float | None:
    """Return the number of products that each element of a matrix product is the sum of."""
    operands = (_operand_with_role(graph, op, role) for role in ("input", "weight"))
    left, right = (None if tensor is None else graph.output(tensor).shape for tensor in operands)
    size = None
    if left:
        transposed = any(op.numeric_attr(name, 0) for name in ("transA", "transpose_a", "adj_x"))
        size = left[-2 if transposed and len(left) > 1 else -1]
    right = weight or right
    if size is None and right:
        transposed = any(op.numeric_attr(name, 0) for name in ("transB", "transpose_b", "adj_y"))
        size = right[-1 if transposed or len(right) == 1 else -2]
    return size
