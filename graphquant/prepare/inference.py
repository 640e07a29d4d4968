"""Normalisation by each batch's own statistics, as in training, turned into that by the moving ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from graphquant.ir import Graph, Model, Op, Parameters, TensorRef, Use, named
from graphquant.prepare.steps import Left, Step
from graphquant.prepare.undo import Edits

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "inference-batchnorm"

WAY_OUT: Final = f'; a rule file with prepare = ["{NAME}"] makes it take its moving mean and variance'

ONNX_TRAINS: Final = (
    "it normalises by the mean and variance of each batch (training_mode); export the model for inference"
)

NO_STATISTICS: Final = "; its moving mean and variance are not in the graph, so it cannot be made to take them"


def inference_batchnorm(model: Model) -> Iterator[Step]:
    """BatchNorms in training mode take their moving mean and variance, so that an answer hangs on its sample alone."""
    parameters = Parameters(model)  # no value changes by this
    for graph, op in _training(model):
        found = _statistics(graph, op, parameters)
        if found is None:
            continue
        edits = Edits(model)
        edits.replace(graph, replace(op, attrs={**op.attrs, "is_training": False}))
        for slot, tensor in zip((3, 4), found, strict=True):
            if graph.producer(Use(graph.name, op.name, slot)) != tensor:
                edits.connect(Use(graph.name, op.name, slot), tensor)
        detail = f"takes {found[0]} and {found[1]}"
        yield Step(step=NAME, target=named(graph.name, op.name), detail=detail, undo=edits.undo())


def training(model: Model, *, asked: bool) -> Iterator[Left]:
    """The BatchNorms in training mode, with what can be done if `inference_batchnorm` was not asked for."""
    parameters = Parameters(model)
    for graph, op in _training(model):
        way_out = NO_STATISTICS if asked or _statistics(graph, op, parameters) is None else WAY_OUT
        reason = f"it normalises by the mean and variance of each batch (is_training){way_out}"
        yield Left(step=NAME, tensor=TensorRef(graph.name, op.name), reason=reason)
    for name in model.live():
        graph = model.graphs[name]
        for op in graph.ops():
            if op.kind == "batchnorm" and op.attrs.get("training_mode"):
                yield Left(step=NAME, tensor=TensorRef(name, op.name), reason=ONNX_TRAINS)


def _training(model: Model) -> list[tuple[Graph, Op]]:
    """TensorFlow's BatchNorms in training mode, in the graphs that run."""
    graphs = [model.graphs[name] for name in model.live()]
    return [(graph, op) for graph in graphs for op in graph.ops() if op.kind == "batchnorm" and _trains(op)]


def _trains(op: Op) -> bool:
    return op.type.startswith("FusedBatchNorm") and bool(op.attrs.get("is_training"))


def _statistics(graph: Graph, op: Op, parameters: Parameters) -> tuple[TensorRef, TensorRef] | None:
    """The moving mean and variance: what the op itself reads, or else what its batches' statistics are added to."""
    found = []
    for slot, port in ((3, 1), (4, 2)):
        read = graph.producer(Use(graph.name, op.name, slot))
        updated = [_moving(graph, use) for use in graph.consumers(TensorRef(graph.name, op.name, port))]
        known = [one for one in (read, *updated) if one is not None and _is_filled(parameters, one)]
        if not known:
            return None
        found.append(known[0])
    return found[0], found[1]


def _moving(graph: Graph, use: Use) -> TensorRef | None:
    """The average that the value at `use` is subtracted from to update it, as `assign_moving_average` does."""
    if use.graph != graph.name or graph.op(use.op).kind != "sub" or use.slot != 1:
        return None
    average = graph.producer(Use(graph.name, use.op, 0))
    waits = average is None or graph.control_inputs(average.op)  # perhaps for what is to read it
    return None if waits else average


def _is_filled(parameters: Parameters, tensor: TensorRef) -> bool:
    """Whether it is a parameter of one value per channel; training alone may pass an empty one."""
    value = parameters.value(tensor)
    return value is not None and value.ndim == 1 and value.size > 0
