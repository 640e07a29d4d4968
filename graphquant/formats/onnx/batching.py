"""Whether samples may be joined along axis 0 of every input of an ONNX model: shapes for `graphquant.formats.rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from onnx import ModelProto

from graphquant.formats.onnx.infer import lightened, typed
from graphquant.formats.onnx.rows import TABLE
from graphquant.formats.onnx.tensors import type_of
from graphquant.formats.rows import COUNTS, Shown, kept_apart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphquant.formats.onnx.write import Emission
    from graphquant.ir import Model, Shape, TensorRef

OPSET_NUMPY: Final = 7
"""First opset whose ops broadcast as numpy does, and normalise as in inference unless they say otherwise."""


def batchable(model: Model, emission: Emission, inputs: Sequence[str]) -> bool:
    """Whether samples may be joined along axis 0 of all `inputs` and each result is still that of its sample."""
    own = [info for info in emission.message.graph.input if info.name in set(inputs)]
    if len(model.graphs) > 1 or not own or model.opset < OPSET_NUMPY or not all(map(_free, own)):
        return False
    if len(own) > 1 and (len(set(map(_batch, own))) > 1 or not _batch(own[0])):
        return False  # they may have different numbers of rows
    light = lightened(emission.message, model.source.folder)
    shapes = [_shapes(light, frozenset(inputs), count) for count in COUNTS]

    def shape(tensor: TensorRef, index: int) -> Shape | None:
        found = shapes[index].get(emission.name(model, tensor))
        known: Shape | None = model.output(tensor).shape if model.op(tensor).kind == "constant" else None
        return known if found is None else found

    shown = Shown(inputs=frozenset(inputs), shape=shape, value=lambda tensor: model.op(tensor).value, opset=model.opset)
    return kept_apart(model.main, shown, TABLE)


def _free(info: Any) -> bool:
    """Whether the first dimension of an input is left open."""
    shape = type_of(info.type)[1]
    return bool(shape) and shape is not None and shape[0] is None


def _batch(info: Any) -> str:
    """What the first dimension of an input is called."""
    return str(info.type.tensor_type.shape.dim[0].dim_param)


def _shapes(light: Any, inputs: frozenset[str], count: int) -> dict[str, Shape | None]:
    """Static shapes by value name, for that number of rows in each of `inputs`; `light` has no weights' data."""
    message = ModelProto()
    message.CopyFrom(light)
    del message.graph.value_info[:]
    for info in message.graph.output:
        info.type.tensor_type.ClearField("shape")
    for info in message.graph.input:
        if info.name in inputs:
            info.type.tensor_type.shape.dim[0].dim_value = count
    graph = typed(message).graph
    return {info.name: type_of(info.type)[1] for info in (*graph.input, *graph.value_info, *graph.output)}
