"""Static types and shapes: onnx's shape inference on a copy of the model without its weights' data."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.message import DecodeError
from onnx import AttributeProto, ModelProto, TensorProto, checker, shape_inference

SMALL = 1 << 10
"""Elements up to which integer constants keep their data: they may be shapes, axes or slices."""

_INTEGERS = (TensorProto.INT32, TensorProto.INT64)


def inferred(message: Any) -> Any:
    """A ModelProto with the nodes of `message` and all value types that could be found; weights have no data in it."""
    light = ModelProto(ir_version=message.ir_version, opset_import=message.opset_import, functions=message.functions)
    _graph(message.graph, light.graph)
    try:
        return shape_inference.infer_shapes(light, data_prop=True)
    except (shape_inference.InferenceError, checker.ValidationError, DecodeError, RuntimeError, ValueError, IndexError):
        # An op unknown to onnx, or a model that is wrong in some place: the types that the file states remain.
        return light


def _graph(source: Any, target: Any) -> None:
    """Copies a GraphProto without the data of what is surely no shape."""
    target.name = source.name
    target.input.extend(source.input)
    target.output.extend(source.output)
    target.value_info.extend(source.value_info)
    target.sparse_initializer.extend(source.sparse_initializer)
    for node in source.node:
        _node(node, target.node.add())
    for tensor in source.initializer:
        _tensor(tensor, target.initializer.add())


def _node(source: Any, target: Any) -> None:
    bulky = (AttributeProto.TENSOR, AttributeProto.GRAPH)
    if not any(attr.type in bulky for attr in source.attribute):
        target.CopyFrom(source)
        return
    target.op_type, target.domain, target.name = source.op_type, source.domain, source.name
    target.input.extend(source.input)
    target.output.extend(source.output)
    for attr in source.attribute:
        twin = target.attribute.add()
        if attr.type in bulky and not attr.ref_attr_name:
            twin.name, twin.type = attr.name, attr.type
            if attr.type == AttributeProto.TENSOR:
                _tensor(attr.t, twin.t)
            else:
                _graph(attr.g, twin.g)
        else:
            twin.CopyFrom(attr)


def _tensor(source: Any, target: Any) -> None:
    if source.data_type in _INTEGERS and math.prod(source.dims) <= SMALL:
        target.CopyFrom(source)
    else:
        target.name, target.data_type = source.name, source.data_type
        target.dims.extend(source.dims)
