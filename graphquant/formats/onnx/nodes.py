"""Ops as NodeProtos and TensorProtos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import AttributeProto, NodeProto, helper, numpy_helper

from graphquant.errors import ModelError
from graphquant.formats.onnx.tensors import CODES
from graphquant.ir import DataType, Op

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RULE_KEY = "graphquant.rule"
ANCHOR_KEY = "graphquant.anchor"

_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


def new_node(op: Op, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """The NodeProto of an op that is in no source.

    Raises:
        ModelError: An attribute cannot be written.
    """
    node = NodeProto(name=op.name, op_type=op.type, domain=op.domain, input=inputs, output=outputs)
    _set_attributes(node, op, {})
    return node


def constant_node(op: Op, output: str) -> Any:
    """The Constant node that stands for the constant `op` where there are no initializers."""
    node = NodeProto(name=op.name, op_type="Constant", output=[output])
    node.attribute.append(helper.make_attribute("value", tensor_of(op, output)))
    return node


def patch_node(node: Any, op: Op, loaded: Op) -> None:
    """Changes `node`, the copy of the source of `loaded`, to the type, attributes, outputs and value of `op`.

    Raises:
        ModelError: An attribute cannot be written.
    """
    node.op_type, node.domain = op.type, op.domain or ("ai.onnx" if node.domain == "ai.onnx" else "")
    for port, output in enumerate(op.outputs):
        if port < len(node.output):
            node.output[port] = output.name
        else:
            node.output.append(output.name)
    if op.value is not None and op.value is not loaded.value:
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("value", tensor_of(op, "")))
    elif op.attrs is not loaded.attrs:
        kept = [attr for attr in node.attribute if attr.type in _GRAPHS or attr.ref_attr_name]
        types = {attr.name: attr.type for attr in node.attribute}
        del node.attribute[:]
        node.attribute.extend(kept)
        _set_attributes(node, op, types)


def tensor_of(op: Op, name: str) -> Any:
    """The TensorProto of the value of the constant `op`.

    Raises:
        ModelError: There is no such tensor in ONNX.
    """
    try:
        return numpy_helper.from_array(value_of(op), name)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ModelError(
            f"The constant {op.name!r} cannot be written to ONNX ({error}). Give it a dtype that ONNX has."
        ) from error


def value_of(op: Op) -> Any:
    """The value of a constant.

    Raises:
        ModelError: It has none.
    """
    if op.value is None:
        raise ModelError(f"The constant {op.name!r} has no value. Give it one.")
    return op.value()


def stamp(node: Any, op: Op) -> None:
    """Notes in `node` which rule made it, and what for."""
    for key, value in ((RULE_KEY, op.rule), (ANCHOR_KEY, op.anchor)):
        if value:
            node.metadata_props.add(key=key, value=value)


def _set_attributes(node: Any, op: Op, types: Mapping[str, int]) -> None:
    for name, value in op.attrs.items():
        plain = CODES[value] if isinstance(value, DataType) else value
        if isinstance(plain, np.ndarray):
            plain = numpy_helper.from_array(plain)
        try:
            node.attribute.append(helper.make_attribute(name, plain, attr_type=types.get(name)))
        except (ValueError, TypeError) as error:
            raise ModelError(
                f"Attribute {name!r} of {op.name!r} cannot be written to ONNX ({error}). Give it another value."
            ) from error
