"""One pure op on numpy arrays, by onnx's reference implementation: so constants behind chains of ops are read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError
from onnx import NodeProto, checker, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

if TYPE_CHECKING:
    from graphquant.ir import Op

Array = np.ndarray[Any, Any]

MAX_RESULT = 1 << 24
"""Elements that one op may make of smaller constants: a hostile Expand or Tile must not fill memory."""

_SMALL = 1 << 10
_FAILURES = (
    shape_inference.InferenceError,
    checker.ValidationError,
    DecodeError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    MemoryError,
)


def evaluate(opset_import: Any, op: Op, inputs: list[Array]) -> list[Array] | None:
    """The outputs of `op`, a node of a source message, for the arrays in its input slots.

    None if the reference implementation does not know the op, fails on these inputs, or would make too much of them.
    """
    if not isinstance(op.source, NodeProto):
        return None
    node = NodeProto()
    node.CopyFrom(op.source)
    del node.input[:], node.output[:]
    node.input.extend(f"i{k}" for k in range(len(inputs)))
    node.output.extend(f"o{k}" for k in range(len(op.source.output)))
    try:
        model = _model_of(node, inputs, opset_import)
        if _elements(model) > max(MAX_RESULT, sum(value.size for value in inputs)):
            return None
        results = ReferenceEvaluator(model).run(None, {f"i{k}": value for k, value in enumerate(inputs)})
        return [np.asarray(result) for result in results]
    except _FAILURES:
        return None


def _model_of(node: NodeProto, inputs: list[Array], opset_import: Any) -> Any:
    """A model of one node; small inputs are initializers too, so that shape inference knows their values."""
    infos = [
        helper.make_tensor_value_info(f"i{k}", helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for k, value in enumerate(inputs)
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    small = [numpy_helper.from_array(value, f"i{k}") for k, value in enumerate(inputs) if value.size <= _SMALL]
    return helper.make_model(helper.make_graph([node], "one", infos, outputs, small), opset_imports=list(opset_import))


def _elements(model: Any) -> int:
    """Number of elements of the largest output, as far as shape inference tells."""
    outputs = shape_inference.infer_shapes(model, data_prop=True).graph.output
    counts = [math.prod(max(d.dim_value, 1) for d in output.type.tensor_type.shape.dim) for output in outputs]
    return max(counts, default=0)
