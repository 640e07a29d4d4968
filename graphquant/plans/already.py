"""What is quantized already: it is left as it is, so that nothing is quantized twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphquant.ir import LIMITING_KINDS, QUANTIZATION_KINDS, Graph, TensorRef, Use

if TYPE_CHECKING:
    from graphquant.match import Matcher

PAIR = "it is quantized already"

INTEGER = "its consumer computes on integers already"

LIMITED = "its consumer limits what is quantized already behind it"

SUMMED = "it is a sum that was made of integers, or a scale of such"

HANDED = "its producer hands on what is quantized already"

MOST_LIMITS = 2
"""Such ops in a row."""

MOST_ADDED = 2
"""What a sum or product of integers and scales reads; a sum of thousands is not looked through for each of them."""


def quantized_already(matcher: Matcher, tensor: TensorRef, use: Use) -> str:
    """Why nothing needs be done for `use` reading `tensor`; "" if it is float."""
    model = matcher.model
    graph = model.graphs[use.graph]
    producer, consumer = model.op(tensor), graph.op(use.op)
    if producer.kind in QUANTIZATION_KINDS or consumer.kind in QUANTIZATION_KINDS or _shaped_back(matcher, tensor):
        return PAIR
    if consumer.kind == "integer":
        return INTEGER
    if _limits(matcher, graph, use.op):
        return LIMITED
    slots = graph.slots(use.op)
    read = [one for one in slots if one] if consumer.kind in {"mul", "add"} and len(slots) == MOST_ADDED else []
    if consumer.kind == "add":
        sums = [one for one in read if _is_rescaled(matcher, one)]
        return SUMMED if sums and all(one in sums or matcher.parameters.is_parameter(one) for one in read) else ""
    return SUMMED if any(_of_integers(matcher, one) for one in (tensor, *read)) else ""


def _is_rescaled(matcher: Matcher, tensor: TensorRef) -> bool:
    """Whether `tensor` is a sum of integers times its scale: a product that was quantized while the model runs."""
    read = [one for one in matcher.model.graphs[tensor.graph].slots(tensor.op) if one is not None]
    return matcher.model.op(tensor).kind == "mul" and bool(read) and all(_of_integers(matcher, one) for one in read)


def reads_quantized(matcher: Matcher, use: Use) -> bool:
    """Whether `use` reads a tensor that is quantized and dequantized already."""
    tensor = matcher.model.graphs[use.graph].producer(use)
    return tensor is not None and matcher.model.op(tensor).kind in QUANTIZATION_KINDS


def _shaped_back(matcher: Matcher, tensor: TensorRef) -> bool:
    """Whether `tensor` was reshaped for its channels to be one axis, quantized, and reshaped back."""
    kinds = []
    here: TensorRef | None = tensor
    for _ in range(4):
        if here is None:
            break
        kinds.append(matcher.model.op(here).kind)
        here = matcher.model.graphs[here.graph].producer(Use(here.graph, here.op, 0))
    return kinds[:3] == ["reshape", "qdq", "reshape"] or kinds == ["reshape", "dequantize", "quantize", "reshape"]


def _limits(matcher: Matcher, graph: Graph, name: str) -> bool:
    """Whether all that op `name` does is to limit, by constants, what the op behind it quantizes."""
    for _ in range(MOST_LIMITS):
        if graph.op(name).kind not in LIMITING_KINDS:
            return False
        data = [tensor for tensor in graph.slots(name) if tensor and not matcher.parameters.is_parameter(tensor)]
        readers = graph.readers(name).get(0, [])
        if len(data) > 1 or len(readers) != 1 or readers[0].graph != graph.name:
            return False
        name = readers[0].op
        if graph.op(name).kind in QUANTIZATION_KINDS:
            return True
    return False


def _of_integers(matcher: Matcher, tensor: TensorRef) -> bool:
    """Whether `tensor` is a sum of integers in floats, a scale that was computed for such, or a product of scales."""
    model = matcher.model
    op = model.op(tensor)
    if op.kind == "integer":
        return tensor.port > 0
    if op.kind not in {"cast", "mul"}:
        return False
    read = [one for one in model.graphs[tensor.graph].slots(tensor.op) if one is not None]
    if op.kind == "cast":
        return bool(read) and model.op(read[0]).kind == "integer"
    scales = [one for one in read if model.op(one).kind == "integer" and one.port > 0]
    return bool(scales) and all(one in scales or matcher.parameters.is_parameter(one) for one in read)
