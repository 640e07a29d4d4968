"""BatchNorms that a convolution or matrix product before them can take up, found by the structure of the graph.

Keras 3 spells a BatchNorm out: what is folded of it is a Mul and an Add that read one value per channel each. Nets made
with Caffe have such a pair behind each BatchNorm, which takes it up where no convolution can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from graphquant.ir import CONTROL, Graph, Model, Op, Parameters, Use

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDABLE: Final = frozenset({"conv", "depthwise_conv", "conv_transpose", "gemm", "matmul"})
"""Kinds whose weight can take up a BatchNorm that reads them."""

MATRIX_RANK: Final = 2

LIVES_ON: Final = "it is not folded: its values are variables, with which training goes on; freeze the model to fold it"


@dataclass(frozen=True, slots=True)
class Place:
    """A BatchNorm that may be folded.

    Attributes:
        norm: The BatchNorm, or the Add at the end of one that is spelled out.
        mul: The Mul before that Add.
        values: Where scale, offset, mean and variance are read, or what is multiplied by and what is added.
        weighted: The convolution or matrix product before it; for a Mul and an Add perhaps a BatchNorm.
        adder: What adds a bias between them: TensorFlow's BiasAdd, or an Add behind a matrix product.
        weight: Where the weight is read.
        bias: Where the bias is read, or would be; None if it needs an op of its own.
    """

    norm: Op
    mul: Op | None
    values: tuple[Use, ...]
    weighted: Op
    adder: Op | None
    weight: Use
    bias: Use | None


def places(model: Model, parameters: Parameters) -> Iterator[tuple[Graph, Op, Place | str]]:
    """Each BatchNorm of the graphs that run outside of training, with its place, or the reason why it has none."""
    for name in model.live():
        graph = model.graphs[name]
        for op in list(graph.ops()):
            place = place_of(model, graph, op, parameters)
            if place is not None:
                yield graph, op, place


def place_of(model: Model, graph: Graph, norm: Op, parameters: Parameters) -> Place | str | None:
    """The ops that a folding would change, or why there is none; None if the op is no BatchNorm, or trains."""
    place: Place | str | None
    if norm.type in {"Add", "AddV2"} and norm.kind == "add":
        place = _spelled_out(model, graph, norm, parameters)
    elif norm.kind == "batchnorm" and not trains(norm):
        values = tuple(Use(graph.name, norm.name, slot) for slot in range(1, 5))
        place = _behind(model, graph, norm, None, values, Use(graph.name, norm.name, 0), parameters)
        if set(graph.readers(norm.name)) - {0}:
            place = "its other outputs are read"
        elif _ordered(graph, norm.name):
            place = "other ops wait for it to run, or it for them"
    else:
        return None
    return LIVES_ON if isinstance(place, Place) and _is_variable(graph, place, parameters) else place


def _spelled_out(model: Model, graph: Graph, add: Op, parameters: Parameters) -> Place | None:
    """The place of a Mul and an Add by values that are known."""
    data = _data_slot(graph, add, parameters)
    mul = _alone(graph, Use(graph.name, add.name, data))
    if isinstance(mul, str) or mul.kind != "mul" or mul.type != "Mul":
        return None
    if set(graph.readers(add.name)) - {0} or _ordered(graph, add.name) or _ordered(graph, mul.name):
        return None
    inner = _data_slot(graph, mul, parameters)
    values = (Use(graph.name, mul.name, 1 - inner), Use(graph.name, add.name, 1 - data))
    if not all(_is_known(graph, use, parameters) for use in values):
        return None
    place = _behind(model, graph, add, mul, values, Use(graph.name, mul.name, inner), parameters)
    return place if isinstance(place, Place) else None


def _behind(
    model: Model, graph: Graph, norm: Op, mul: Op | None, values: tuple[Use, ...], start: Use, parameters: Parameters
) -> Place | str:
    """The place of what begins where `start` reads a product, or the sum of one and a bias."""
    source, adder, bias = _alone(graph, start), None, None
    if not isinstance(source, str):
        bias = _bias_of(graph, source, parameters)
        if bias is not None:
            adder, data = source, 0 if source.kind == "bias_add" else 1 - bias.slot
            source = _alone(graph, Use(graph.name, source.name, data))
    if isinstance(source, str):
        return source
    reason = None if mul is not None and _is_norm(source) else _unfit(model, source, adder)
    if reason is not None or (mul is not None and model.format != "tensorflow" and source.kind in {"matmul", "gemm"}):
        return reason or "its values need not lie along the channels"
    first = {_channels_first(op) for op in (norm if mul is None else None, adder, source) if op is not None} - {None}
    if len(first) > 1 or (mul is not None and True in first):
        return f"its channels lie along another axis than those of {source.name}"
    role = ("scale", "offset") if _is_norm(source) else ("weight", "bias")
    if bias is None and role[1] in source.roles:
        bias = Use(graph.name, source.name, source.roles.index(role[1]))
    weight = Use(graph.name, source.name, source.roles.index(role[0]))
    if not all(_is_known(graph, use, parameters) for use in (weight, *values)):
        return f"its values, or the weight of {source.name}, are not known before the model runs"
    return Place(norm, mul, values, source, adder, weight, bias)


def _bias_of(graph: Graph, op: Op, parameters: Parameters) -> Use | None:
    """Where an op that adds a bias reads it: a BiasAdd, or the sum of a matrix product and what is known."""
    if op.kind == "bias_add":
        return Use(graph.name, op.name, 1)
    if op.kind != "add" or len(graph.slots(op.name)) != len(("product", "bias")) or _ordered(graph, op.name):
        return None
    data = _data_slot(graph, op, parameters)
    product, bias = graph.producer(Use(graph.name, op.name, data)), Use(graph.name, op.name, 1 - data)
    if product is None or product.graph != graph.name or not _is_known(graph, bias, parameters):
        return None
    return bias if graph.op(product.op).kind == "matmul" else None


def _unfit(model: Model, op: Op, adder: Op | None) -> str | None:
    """Why the op is not linear in one weight per output channel, with nothing fused behind it."""
    if op.kind not in FOLDABLE or "weight" not in op.roles:
        return f"{op.name} makes what it reads, a {op.type}, and has no weight to fold it into"
    if op.channel_axis is None or op.type.startswith("_Fused"):
        return f"{op.name} makes what it reads, and its output channels are not known"
    if op.kind == "gemm" and (op.attrs.get("alpha", 1.0), op.attrs.get("beta", 1.0)) != (1.0, 1.0):
        return f"{op.name} multiplies its product or its bias by a number"
    if op.kind == "matmul":
        shapes = [one.outputs[0].shape for one in (op, adder) if one is not None and one.outputs]
        if op.type != "MatMul" or any(shape is not None and len(shape) != MATRIX_RANK for shape in shapes):
            return f"{op.name} multiplies stacks of matrices, whose channels lie along another axis"
        if model.format != "tensorflow" and None in shapes:
            return f"{op.name} multiplies matrices whose number of axes is not known"
    return None


def _channels_first(op: Op) -> bool | None:
    """Whether the op's channels lie behind the batch axis, where the op says so itself, as TensorFlow's do."""
    layout = op.attrs.get("data_format", "NHWC" if op.kind == "bias_add" else None)
    return None if layout is None else str(plain_text(layout)).startswith("NC")


def trains(op: Op) -> bool:
    """Whether a BatchNorm takes mean and variance of what it reads."""
    return bool(op.attrs.get("training_mode") or op.attrs.get("is_training"))


def _is_norm(op: Op) -> bool:
    """Whether it is a BatchNorm of ONNX, whose scale and offset can take up a factor and a summand per channel."""
    return op.type == "BatchNormalization" and not trains(op)


def _data_slot(graph: Graph, op: Op, parameters: Parameters) -> int:
    """Which operand of a Mul or Add is no parameter; the first of two."""
    return int(_is_known(graph, Use(graph.name, op.name, 0), parameters))


def _is_known(graph: Graph, use: Use, parameters: Parameters) -> bool:
    tensor = graph.producer(use)
    return tensor is not None and parameters.is_parameter(tensor)


def _is_variable(graph: Graph, place: Place, parameters: Parameters) -> bool:
    """Whether a value that a folding would replace comes from a variable."""
    uses = [place.weight, *place.values]
    read = [graph.producer(use) for use in (*uses, *([place.bias] if place.bias is not None else []))]
    return any(parameters.is_variable(tensor) for tensor in read if tensor is not None)


def _alone(graph: Graph, use: Use) -> Op | str:
    """The op of this graph whose output 0 `use` alone reads, or why there is none."""
    source = graph.producer(use)
    if source is None or source.graph != graph.name:
        return "what it reads is made in another graph"
    op = graph.op(source.op)
    if source.port or op.kind in {"input", "constant", "variable"}:
        return f"it reads {source}, which no convolution or matrix product makes"
    others = len(graph.consumers(source)) - 1
    if others and (op.kind in FOLDABLE or op.kind in {"bias_add", "add", "mul", "batchnorm"}):
        return f"{source} is read elsewhere too, or is an output of the model"
    return op


def _ordered(graph: Graph, name: str) -> bool:
    """Whether other ops run before or after the op by control edges, which would be lost with it."""
    return bool(graph.control_inputs(name)) or any(CONTROL in edges for edges in graph.nx.adj[name].values())


def plain_text(value: Any) -> Any:
    """An attribute's text, whichever way it was kept."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
