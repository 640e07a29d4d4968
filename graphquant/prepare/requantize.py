"""The quantization that a model has already, taken out so that rules place their own: pairs, FakeQuant and its like.

A weight that is stored as integers becomes the float values that these stand for; what it was before is not known.
Other tools drop a Relu or Clip whose limits a pair has anyway, so it is put back where the pair goes.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from graphquant.errors import InternalError
from graphquant.ir import (
    LIMITING_KINDS,
    QUANTIZATION_KINDS,
    Graph,
    Model,
    Op,
    Output,
    Parameters,
    TensorRef,
    Use,
    named,
)
from graphquant.numerics import Array, FloatType, QParams, dequantize
from graphquant.prepare.steps import Left, Step, drop_unread
from graphquant.prepare.undo import Edits
from graphquant.qdq import params_of

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "requantize"

_KEEPING: Final = frozenset(
    {"max_pool", "avg_pool", "global_avg_pool", "reshape", "flatten", "transpose", "squeeze", "unsqueeze", "slice"}
    | {"identity", "dropout", "concat"}
)
"""Kinds that make nothing negative of what is not."""

_POSITIVE: Final = frozenset({"relu", "relu6", "clip", "sigmoid", "softmax", "hard_sigmoid", "exp", "sqrt", "abs"}) | {
    *("input", "constant", "softplus", "dequantize", "integer")
}
"""Kinds whose results are not negative, or should not be as the model is used."""

_MOST: Final = 32
"""How many tensors are looked at for that."""

_OURS: Final = re.compile(r"(.+)/quant(?:_[0-9]+)?(?:/[^/]+)?/dequant(?:_[0-9]+)?")
"""What `rewrite` calls a dequantization of what is called by the first part."""

_SIX: Final = 6.0

_CLIP_INPUTS: Final = 11
"""The opset from which on Clip reads its limits."""

_CONSTANTS: Final = {"onnx": "Constant", "tensorflow": "Const"}


def requantize(model: Model) -> Iterator[Step]:
    """What read a dequantized tensor reads the float tensor that was quantized, or the float values of the integers."""
    parameters = Parameters(model)  # scales and zero points stay what they are
    rectified: dict[TensorRef, TensorRef] = {}
    stored: dict[tuple[TensorRef, ...], TensorRef] = {}
    for graph, op in _found(model, {"dequantize", "qdq"}):
        floats, params = _floats(model, graph, op), _params(graph, op, parameters)
        read = [tensor for tensor in graph.slots(op.name) if tensor is not None]
        edits = Edits(model)
        if floats is None and params is not None and _is_stored(model, graph, op):
            if tuple(read) not in stored:
                home = model.graphs[read[0].graph]
                value = partial(_value, model.op(read[0]), params, op.outputs[0].dtype)
                stored[tuple(read)] = edits.add(home, _constant(model, home, op, value))
            floats = stored[tuple(read)]
        elif floats is not None and params is not None and _rectifies(model, floats, params):
            if floats not in rectified:
                rectified[floats] = _rectified(model, edits, floats, params)
            floats = rectified[floats]
        if floats is None:
            continue
        for use in graph.consumers(TensorRef(graph.name, op.name)):
            edits.connect(use, floats)
        edits.remove(graph, op.name)
        _drop(model, edits, read)
        _unshape(model, edits, floats)
        yield Step(step=NAME, target=named(graph.name, op.name), detail=f"its readers read {floats}", undo=edits.undo())


def left(model: Model) -> Iterator[Left]:
    """The ops that quantize or compute on integers and are still there."""
    for graph, op in _found(model, QUANTIZATION_KINDS | {"integer"}):
        reason = "it computes on integers by itself; take the float model" if op.kind == "integer" else ""
        if op.kind == "dequantize":
            reason = "its integers are computed, or its scale is"
        if op.kind == "quantize":
            reason = "something else than a dequantization reads its integers"
        yield Left(step=NAME, tensor=TensorRef(graph.name, op.name), reason=reason or "what it reads is not known")


def _found(model: Model, kinds: frozenset[str] | set[str]) -> list[tuple[Graph, Op]]:
    graphs = [model.graphs[name] for name in model.live()]
    return [(graph, op) for graph in graphs for op in list(graph.ops()) if op.kind in kinds]


def _floats(model: Model, graph: Graph, op: Op) -> TensorRef | None:
    """The float tensor of which an op makes the dequantized one; None if it reads integers that are no such."""
    read = graph.producer(Use(graph.name, op.name, 0))
    if op.kind == "qdq" or read is None:
        return read
    home = model.graphs[read.graph]
    if home.op(read.op).kind != "quantize":
        return None
    floats = home.producer(Use(home.name, read.op, 0))
    for _ in LIMITING_KINDS:
        if floats is None or floats.graph != home.name or home.op(floats.op).kind not in LIMITING_KINDS:
            break
        data = [one for one in home.slots(floats.op) if one is not None and model.op(one).kind != "constant"]
        if len(home.consumers(floats)) != 1 or len(data) != 1:
            break
        floats = data[0]
    return floats


def _params(graph: Graph, op: Op, parameters: Parameters) -> QParams | None:
    """Scale and zero point of a quantization op, None where they are not known."""
    params = params_of(graph, op, parameters)
    return params if isinstance(params, QParams) else None


def _is_stored(model: Model, graph: Graph, op: Op) -> bool:
    """Whether an op makes floats of stored integers."""
    read = graph.producer(Use(graph.name, op.name, 0))
    held = None if read is None else model.op(read)
    known = held is not None and held.kind == "constant" and held.value is not None
    return known and model.format in _CONSTANTS and op.outputs[0].dtype in {"float16", "float32"}


def _rectifies(model: Model, floats: TensorRef, params: QParams) -> bool:
    """Whether a pair cuts off what is negative, and the tensor may be."""
    if model.format != "onnx" or params.axis is not None or isinstance(params.type, FloatType):
        return False
    least = params.type.limits(narrow=params.narrow)[0]
    return int(params.zero_point) == least and not _is_positive(model, floats)


def _is_positive(model: Model, tensor: TensorRef) -> bool:
    """Whether the ops that make `tensor`, as far as they are looked at, make nothing negative."""
    todo = [tensor]
    for here in todo:
        op = model.op(here)
        if op.kind in _POSITIVE:
            continue
        read = model.graphs[here.graph].slots(here.op)
        floats = [one for slot, one in enumerate(read) if one is not None and op.role(slot) == "input"]
        if op.kind not in _KEEPING or not floats or len(todo) > _MOST:
            return False
        todo += floats
    return True


def _rectified(model: Model, edits: Edits, floats: TensorRef, params: QParams) -> TensorRef:
    """Adds a Relu behind a tensor, or a Clip where the pair ends at 6."""
    graph, known = model.graphs[floats.graph], model.output(floats)
    step = float(params.scale)
    six = abs((params.type.limits()[1] - int(params.zero_point)) * step - _SIX) <= step / 2
    inputs: list[TensorRef | None] = [floats]
    for word, bound in (("min", 0.0), ("max", _SIX)) if six and model.opset >= _CLIP_INPUTS else ():
        label = graph.fresh(f"{floats.op}/{word}")
        held = Output(label, "float32", ())
        value = partial(np.array, bound, np.float32)
        inputs.append(
            edits.add(graph, Op(name=label, kind="constant", type="Constant", roles=(), outputs=(held,), value=value))
        )
    label = graph.fresh(f"{floats.op}/relu")
    made = (Output(label, known.dtype, known.shape),)
    clip = len(inputs) > 1
    roles = ("input", "min", "max") if clip else ("input",)
    op = Op(name=label, kind="relu6" if clip else "relu", type="Clip" if clip else "Relu", roles=roles, outputs=made)
    return edits.add(graph, op, inputs)


def _constant(model: Model, graph: Graph, op: Op, value: Any) -> Op:
    """A constant in the place of what `op` makes."""
    named_by_us = _OURS.fullmatch(op.name)
    label = graph.fresh(named_by_us[1] if named_by_us else f"{op.name}/float")
    known = op.outputs[0]
    made = Output(label, known.dtype, known.shape)
    return Op(name=label, kind="constant", type=_CONSTANTS[model.format], roles=(), outputs=(made,), value=value)


def _value(integers: Op, params: QParams, dtype: str | None) -> Array:
    """The floats that the integers of a constant stand for, float32 or float16."""
    if integers.value is None:
        raise InternalError(f"the constant {integers.name!r} has no value.")
    return dequantize(integers.value(), params).astype(dtype)


def _unshape(model: Model, edits: Edits, floats: TensorRef) -> None:
    """Takes out two Reshapes around a pair that is gone, which were there so that channels were one axis."""
    graph = model.graphs[floats.graph]
    before = graph.producer(Use(graph.name, floats.op, 0))
    if before is None or graph.op(floats.op).kind != "reshape":
        return
    for use in graph.consumers(floats):
        back = TensorRef(use.graph, use.op)
        home = model.graphs[use.graph]
        sizes = home.producer(Use(use.graph, use.op, 1))
        value = None if sizes is None else model.op(sizes).value
        if home.op(use.op).kind != "reshape" or value is None or tuple(value().tolist()) != model.output(before).shape:
            continue
        for reader in home.consumers(back):
            edits.connect(reader, before)
        drop_unread(model, [back], None, edits)


def _drop(model: Model, edits: Edits, tensors: list[TensorRef]) -> None:
    """Takes out what made the tensors of an op that is gone, unless something else reads it."""
    constants = list(tensors)
    for tensor in tensors:
        here: TensorRef | None = tensor
        while here is not None and model.op(here).kind in {"quantize", *LIMITING_KINDS}:
            graph = model.graphs[here.graph]
            if graph.nx.adj[here.op]:
                break
            read = [one for one in graph.slots(here.op) if one is not None]
            edits.remove(graph, here.op)
            constants = [one for one in constants if one != here] + read
            here = next((one for one in read if model.op(one).kind in LIMITING_KINDS), None)
    drop_unread(model, constants, frozenset({"constant"}), edits)
