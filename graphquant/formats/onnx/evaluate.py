"""One pure op on numpy arrays, by onnx's reference implementation: so constants behind chains of ops are read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, checker, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from graphquant.errors import ModelError
from graphquant.formats.onnx.tensors import first_line

if TYPE_CHECKING:
    from graphquant.ir import Op

Array = np.ndarray[Any, Any]

MAX_RESULT = 1 << 28
"""Largest number of elements that one op may make of constants: a hostile Expand or Tile must not fill memory."""

_SMALL = 1 << 10
_FAILURES = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError)


def evaluate(opset_import: Any, op: Op, inputs: list[Array]) -> list[Array]:
    """The outputs of `op`, a node of a source message, for the arrays in its input slots.

    Raises:
        ModelError: The op cannot be computed, or its result would be too large.
    """
    if not isinstance(op.source, NodeProto):
        raise ModelError(
            f"The value of {op.name!r} cannot be computed: it is no node of the source. Quantize before it instead."
        )
    node = NodeProto()
    node.CopyFrom(op.source)
    del node.input[:], node.output[:]
    node.input.extend(f"i{k}" for k in range(len(inputs)))
    node.output.extend(f"o{k}" for k in range(len(op.source.output)))
    infos = [
        helper.make_tensor_value_info(f"i{k}", helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for k, v in enumerate(inputs)
    ]
    small = [numpy_helper.from_array(v, f"i{k}") for k, v in enumerate(inputs) if v.size <= _SMALL]
    graph = helper.make_graph(
        [node], "one", infos, [helper.make_empty_tensor_value_info(name) for name in node.output], small
    )
    model = helper.make_model(graph, opset_imports=list(opset_import))
    try:
        _bound(op, model)
        results = ReferenceEvaluator(model).run(None, {f"i{k}": value for k, value in enumerate(inputs)})
        return [np.asarray(result) for result in results]
    except _FAILURES as error:
        raise ModelError(
            f"{op.type} {op.name!r} on constants cannot be computed ({first_line(error)}). "
            "Fold the model's constants first."
        ) from error


def _bound(op: Op, model: Any) -> None:
    try:
        outputs = shape_inference.infer_shapes(model, data_prop=True).graph.output
    except (shape_inference.InferenceError, checker.ValidationError):
        return  # The op itself will say what is wrong.
    for output in outputs:
        count = math.prod(max(d.dim_value, 1) for d in output.type.tensor_type.shape.dim)
        if count > MAX_RESULT:
            raise ModelError(
                f"{op.type} {op.name!r} would make {count} elements of constants. At most {MAX_RESULT} are read."
            )
