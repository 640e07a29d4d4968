"""How many multiply-adds each op of a model takes for one sample, from sizes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from graphquant.ir import Parameters, TensorRef, output_channels

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from graphquant.ir import Graph, Model, Op, Shape

PRODUCTS = frozenset({"matmul", "gemm"})
CONVOLUTIONS = frozenset({"conv", "depthwise_conv"})
RECURRENT = frozenset({"lstm", "gru", "rnn"})

COUNTED = PRODUCTS | CONVOLUTIONS | RECURRENT | {"conv_transpose"}
"""Kinds that are counted: what others multiply is little beside these."""


def multiply_adds(model: Model, sizes: Mapping[TensorRef, int] | None = None) -> dict[tuple[str, str], int]:
    """Graph and name of each op that is counted, with its multiply-adds; ops of unknown sizes are left out.

    Args:
        model: The model.
        sizes: How many elements the tensors of `unsized` have, where that was measured.
    """
    parameters, known = Parameters(model), sizes or {}
    found = {}
    for graph, op in _counted(model):
        elements = _elements(graph, _driving(graph, op), known)
        each = _each(graph, op, parameters)
        if elements is not None and each is not None:
            found[graph.name, op.name] = round(elements * each)
    return found


def unsized(model: Model) -> list[TensorRef]:
    """The tensors whose number of elements only a run can tell."""
    tensors = (
        _driving(graph, op) for graph, op in _counted(model) if _elements(graph, _driving(graph, op), {}) is None
    )
    return [tensor for tensor in dict.fromkeys(tensors) if tensor is not None]


def _counted(model: Model) -> Iterator[tuple[Graph, Op]]:
    """The ops that are counted, of graphs that a run can reach."""
    for name in model.live():
        graph = model.graphs[name]
        yield from ((graph, op) for op in graph.ops() if op.kind in COUNTED)


def _driving(graph: Graph, op: Op) -> TensorRef | None:
    """The tensor each of whose elements takes equally many multiply-adds: the output, or what is spread out."""
    if op.kind in CONVOLUTIONS | PRODUCTS:
        return TensorRef(graph.name, op.name)
    return _read(graph, op, "input")


def _read(graph: Graph, op: Op, role: str) -> TensorRef | None:
    return next((tensor for slot, tensor in enumerate(graph.slots(op.name)) if op.role(slot) == role), None)


def _elements(graph: Graph, tensor: TensorRef | None, sizes: Mapping[TensorRef, int]) -> int | None:
    """The elements of a tensor for one sample; a first axis of unknown size counts samples."""
    if tensor is None or tensor in sizes:
        return None if tensor is None else sizes[tensor]
    shape: Shape | None = graph.output(tensor).shape
    others = [size for size in (shape or ())[1:] if size is not None]
    if shape is None or len(others) < len(shape[1:]):
        return None
    return math.prod(others) * ((shape[0] or 1) if shape else 1)


def _each(graph: Graph, op: Op, parameters: Parameters) -> float | None:
    """The multiply-adds of `op` for each element of the tensor that drives it."""
    weight = _shape(graph, _read(graph, op, "weight"), parameters)
    if op.kind in PRODUCTS:
        return _summed(graph, op, weight)
    if weight is None or not math.prod(weight):
        return None
    if op.kind in CONVOLUTIONS:
        channels = output_channels(op, weight)
        return math.prod(weight) / channels if channels else None
    if op.kind in RECURRENT:
        again = _shape(graph, _read(graph, op, "recurrent_weight"), parameters)
        return None if again is None else (math.prod(weight) + math.prod(again)) / weight[-1]
    return math.prod(weight) / (weight[0] if op.channel_axis == 1 else weight[-1])


def _summed(graph: Graph, op: Op, weight: tuple[int, ...] | None) -> float | None:
    """Over how many products each element of a matrix product is a sum."""
    left, right = (_static(graph, _read(graph, op, role)) for role in ("input", "weight"))
    turned = [bool(op.number(name, 0)) for name in ("transA", "transpose_a", "adj_x")]
    size = None if not left else left[-2 if any(turned) and len(left) > 1 else -1]
    if size is None:
        turned = [bool(op.number(name, 0)) for name in ("transB", "transpose_b", "adj_y")]
        shape = weight or right
        size = None if not shape else shape[-1 if any(turned) or len(shape) == 1 else -2]
    return size


def _static(graph: Graph, tensor: TensorRef | None) -> Shape | None:
    shape: Shape | None = None if tensor is None else graph.output(tensor).shape
    return shape


def _shape(graph: Graph, tensor: TensorRef | None, parameters: Parameters) -> tuple[int, ...] | None:
    """The shape of a weight; None where it is not known."""
    shape = _static(graph, tensor)
    if tensor is not None and shape is None and parameters.is_parameter(tensor):
        origin = parameters.origin(tensor)
        shape = _static(graph.graphs[origin.graph], origin)
    known = None if shape is None else tuple(size for size in shape if size is not None)
    return known if shape is not None and known is not None and len(known) == len(shape) else None


__all__ = ["COUNTED", "multiply_adds", "unsized"]
