"""ONNX ops that hand their input on unchanged, taken out: Identity, and Dropout outside of training.

TensorFlow's Identity ops stay. They are what is fetched by name, what others wait for and how variables are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from graphquant.ir import Graph, Model, Op, Parameters, TensorRef, Use, named
from graphquant.prepare.steps import Left, Step, makes_output
from graphquant.prepare.undo import Edits

if TYPE_CHECKING:
    from collections.abc import Iterator

IDENTITY: Final = "drop-identity"

DROPOUT: Final = "drop-dropout"

_TYPES = {IDENTITY: "Identity", DROPOUT: "Dropout"}

_TRAINS_BELOW: Final = 7
"""Dropout of an older opset trains unless it says `is_test`."""


def drop_identity(model: Model) -> Iterator[Step]:
    """What read an Identity reads what the Identity read."""
    return _drop(model, IDENTITY)


def drop_dropout(model: Model) -> Iterator[Step]:
    """What read a Dropout that does not train reads what the Dropout read."""
    return _drop(model, DROPOUT)


def kept(model: Model, step: str) -> Iterator[Left]:
    """The ops that the step is for and that are still there."""
    parameters = Parameters(model)
    for graph, op in _found(model, step):
        reason = _reason(model, graph, op, parameters)
        if reason is not None:
            yield Left(step=step, tensor=TensorRef(graph.name, op.name), reason=reason)


def seen_through(model: Model, tensor: TensorRef, parameters: Parameters) -> TensorRef:
    """What `tensor` is, before the ops that these steps take out, or would but for a name that they give."""
    for _ in range(len(model.graphs[tensor.graph])):  # a broken model may hold a ring of them
        graph = model.graphs[tensor.graph]
        op = graph.op(tensor.op)
        before = graph.producer(Use(graph.name, op.name, 0))
        if model.format != "onnx" or op.type not in _TYPES.values() or op.domain or tensor.port or before is None:
            break
        if op.kind == "dropout" and _trains(model, graph, op, parameters):
            break
        tensor = before
    return tensor


def _drop(model: Model, step: str) -> Iterator[Step]:
    parameters = Parameters(model)  # no value changes by this
    for graph, op in [one for one in _found(model, step) if _reason(model, *one, parameters) is None]:
        source = graph.producer(Use(graph.name, op.name, 0))
        if source is None:
            continue
        edits = Edits(model)
        for use in graph.consumers(TensorRef(graph.name, op.name)):
            edits.connect(use, source)
        edits.remove(graph, op.name)
        yield Step(step=step, target=named(graph.name, op.name), detail=f"its readers read {source}", undo=edits.undo())


def _found(model: Model, step: str) -> Iterator[tuple[Graph, Op]]:
    for name in model.live() if model.format == "onnx" else ():
        graph = model.graphs[name]
        yield from [(graph, op) for op in graph.ops() if op.type == _TYPES[step] and not op.domain]


def _reason(model: Model, graph: Graph, op: Op, parameters: Parameters) -> str | None:
    """Why the op must stay."""
    if graph.producer(Use(graph.name, op.name, 0)) is None:
        return "it reads nothing"
    if makes_output(graph, op.name):
        return "it makes an output of its graph, whose name it gives"
    if set(graph.readers(op.name)) - {0}:
        return "its mask is read"
    if op.kind == "dropout" and _trains(model, graph, op, parameters):
        return "it is in training mode, or may be; export the model for inference"
    return None


def _trains(model: Model, graph: Graph, op: Op, parameters: Parameters) -> bool:
    """Whether a Dropout may change its input."""
    if model.opset < _TRAINS_BELOW:
        return not op.attrs.get("is_test")
    use = Use(graph.name, op.name, 2)
    asked = graph.producer(use)
    if asked is None:
        return False
    value = parameters.value(asked)
    return value is None or bool(value.any())
