"""Static types and shapes: onnx's shape inference on a copy of the model without its weights' data."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import networkx as nx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, ModelProto, TensorProto, checker, shape_inference

from graphquant.errors import ModelError
from graphquant.formats.onnx.calls import add_types, graphs, inlined
from graphquant.formats.onnx.hide import INTEGERS, hide_crashing, hide_endless, show_safe
from graphquant.formats.onnx.tensors import is_external, tensor_value

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ERRORS: tuple[type[Exception], ...] = (
    shape_inference.InferenceError,
    checker.ValidationError,
    DecodeError,
    RuntimeError,
    ValueError,
    IndexError,
)
"""What onnx's shape inference raises; its own kinds have no common base."""

SMALL = 1 << 10
"""Elements up to which integer constants keep their data: they may be shapes, axes or slices."""

SCALES = 8
"""Elements up to which float constants keep their data: they may be what Resize multiplies each axis by."""

ROUNDS = 4
"""How often nodes are shown again of which more is known than before; each time all types are found anew."""

MAX_CALLED = 1 << 18
"""Nodes that a model may have once its functions are put in place of their calls, as onnx and onnxruntime do."""

_KEPT = {TensorProto.FLOAT: SCALES, **dict.fromkeys(INTEGERS, SMALL)}


def inferred(message: Any, folder: Path | None = None) -> Any:
    """A ModelProto with the nodes of `message` and all value types that could be found; weights have no data in it.

    Args:
        message: The ModelProto.
        folder: Where its external data is, None if it has none. What may be shapes is read and kept in the result.

    Raises:
        ModelError: A function calls itself, or the calls come to too many nodes.
    """
    return typed(lightened(message, folder))


def lightened(message: Any, folder: Path | None = None) -> Any:
    """A ModelProto with the nodes of `message` and without the data of what is surely no shape, for `typed`.

    Raises:
        ModelError: A function calls itself, or the calls come to too many nodes.
    """
    _check_calls(message)
    light = ModelProto(ir_version=message.ir_version, opset_import=message.opset_import, functions=message.functions)
    _graph(message.graph, light.graph, folder)
    return light


def typed(light: Any) -> Any:
    """The model, which may be changed, with all value types that could be found."""
    known = _inferred(light)
    if light.functions:
        with suppress(*ERRORS):  # their values have no types then
            flat, places = inlined(light)
            add_types(known.functions, _inferred(flat), places)
    return known


def _inferred(light: Any) -> Any:
    """The model with types, as far as onnx finds them."""
    hide_crashing(light)
    try:
        known = shape_inference.infer_shapes(light)
        for _ in range(ROUNDS):
            if not show_safe(known):
                break
            known = shape_inference.infer_shapes(known)
    except ERRORS:
        # An op unknown to onnx, or a model that is wrong in some place: the types that the file states remain.
        return light
    if not hide_endless(known):
        return known
    try:
        return shape_inference.infer_shapes(known, data_prop=True)
    except ERRORS:
        return known


def _check_calls(message: Any) -> None:
    """Refuses functions that call themselves, or each other so often that putting them in place would fill memory."""
    if not message.functions:
        return
    main = ("", "", "")
    holders = {main: message.graph, **{(f.domain, f.name, f.overload): f for f in message.functions}}
    calls: nx.DiGraph[Any] = nx.DiGraph()
    sizes: dict[Any, Counter[Any]] = {}
    for key, holder in holders.items():
        sizes[key] = Counter((node.domain, node.op_type, node.overload) for node in _nodes(holder))
        calls.add_node(key)
        calls.add_edges_from((key, called) for called in sizes[key] if called in holders and called != main)
    try:
        order = list(nx.topological_sort(calls))
    except nx.NetworkXUnfeasible as error:
        raise ModelError(
            "A function of the model calls itself, which ONNX does not allow. Export the model again."
        ) from error
    total: dict[Any, int] = {}
    for key in reversed(order):
        total[key] = sum(count * total.get(called, 1) for called, count in sizes[key].items())
    if total[main] > MAX_CALLED:
        raise ModelError(
            f"With its functions put in place, the model has {total[main]} nodes. At most {MAX_CALLED} are read: export"
            " the model without functions."
        )


def _nodes(holder: Any) -> Iterator[Any]:
    """The nodes of a GraphProto or FunctionProto and of all bodies in it."""
    return (node for graph in graphs(holder) for node in graph.node)


def _graph(source: Any, target: Any, folder: Path | None) -> None:
    """Copies a GraphProto without the data of what is surely no shape."""
    target.name = source.name
    target.input.extend(source.input)
    target.output.extend(source.output)
    target.value_info.extend(source.value_info)
    target.sparse_initializer.extend(source.sparse_initializer)
    for node in source.node:
        _node(node, target.node.add(), folder)
    for tensor in source.initializer:
        _tensor(tensor, target.initializer.add(), folder)


def _node(source: Any, target: Any, folder: Path | None) -> None:
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
                _tensor(attr.t, twin.t, folder)
            else:
                _graph(attr.g, twin.g, folder)
        else:
            twin.CopyFrom(attr)


def _tensor(source: Any, target: Any, folder: Path | None) -> None:
    kept = math.prod(source.dims) <= _KEPT.get(source.data_type, -1)
    if kept and not is_external(source):
        target.CopyFrom(source)
        return
    target.name, target.data_type = source.name, source.data_type
    target.dims.extend(source.dims)
    if kept:
        with suppress(ModelError, OSError):  # whoever needs the value says so
            target.raw_data = tensor_value(source, folder).tobytes()
