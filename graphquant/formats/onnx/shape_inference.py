"""Static types and shapes: onnx's shape inference on a copy of the model without its weights' data."""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import networkx as nx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, checker, helper, shape_inference

from graphquant.errors import ModelError
from graphquant.formats.onnx.functions import add_function_types, inline_marked_functions, nested_graphs
from graphquant.formats.onnx.tensors import is_external, tensor_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


# Nodes that onnx's shape inference must not see: it ends the process on them, or comes to no end.
#
# They were found by feeding it odd nodes (onnx 1.23). A hidden node is in a domain of which onnx knows nothing, and what
# it makes has no type.

HIDDEN_DOMAIN = "graphquant.hidden"

MAX_VECTOR_ELEMENTS = 1 << 20
"""Elements of all integer vectors of a graph up to which onnx may compute their values: it keeps an object for each."""

SHORT_VECTOR_ELEMENTS = 1 << 10
"""Elements of a vector that any number of nodes may read while values are computed."""

MAX_READ_ELEMENTS = 1 << 26
"""Elements of all longer ones, counted for each time they are read: onnx makes an object for each."""

INT32_LIMIT = 1 << 31
"""Numbers from here on are other ones once onnx has put them into 32 bits, which it does after it has checked them."""

INTEGER_TYPES = (TensorProto.INT32, TensorProto.INT64)

_GROWING_OPS = frozenset(
    {"Concat", "ConstantOfShape", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"}
)
"""Ops that make vectors of any length out of few numbers."""

_VALUE_PROPAGATED_OPS = frozenset(
    {"Add", "Cast", "Concat", "Gather", "Mul", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze"}
)
"""Ops of which onnx computes the values of vectors, so that it makes an object for each element that they read."""

_GUARDED_INPUT_SLOTS = {"EyeLike": 0, "RegexFullMatch": 0, "GatherND": 1, "Expand": 1, "MeanVarianceNormalization": 0}
"""Ops on which onnx ends the process, or comes to no end, if one of their inputs has no type or is a vector of any
length; and the slot of that input."""

_ALWAYS_HIDDEN_OPS = frozenset({"LabelEncoder", "DictVectorizer", "TreeEnsemble"})
"""Ops of ai.onnx.ml that are never shown: with attributes missing, or of the wrong kind, they end the process."""


def hide_crashing_nodes(message: Any) -> None:
    """Hides the nodes of a ModelProto on which onnx may end the process, and makes the domain of hidden ones known."""
    for root, imports in [(message.graph, message), *((function, function) for function in message.functions)]:
        if all(entry.domain != HIDDEN_DOMAIN for entry in imports.opset_import):
            imports.opset_import.add(domain=HIDDEN_DOMAIN, version=1)
        for graph in nested_graphs(root):
            for node in graph.node:
                if node.domain in {"", "ai.onnx"}:
                    hidden = node.op_type in _GUARDED_INPUT_SLOTS or _may_crash_inference(node)
                else:
                    hidden = node.domain == "ai.onnx.ml" and node.op_type in _ALWAYS_HIDDEN_OPS
                if hidden:
                    node.domain = HIDDEN_DOMAIN


def _may_crash_inference(node: Any) -> bool:
    for attr in node.attribute:
        if attr.type == AttributeProto.INT and not -INT32_LIMIT <= attr.i < INT32_LIMIT:
            return True
        # onnx takes its word for how many there are, and has no place for the others.
        if (
            node.op_type == "Split"
            and attr.name == "num_outputs"
            and (attr.ref_attr_name or attr.i != len(node.output))
        ):
            return True
    return False


def reveal_safe_nodes(typed_message: Any) -> bool:
    """Shows those of the hidden nodes of the main graph and its bodies again of which enough is known now.

    Args:
        typed_message: A ModelProto with types. It is changed.

    Returns:
        Whether there were any.
    """
    revealed = False
    pending: list[tuple[Any, ChainMap[str, Any]]] = [(typed_message.graph, ChainMap())]
    for graph, outer_types in pending:  # grows while bodies are found
        guarded_nodes = [
            node for node in graph.node if node.domain == HIDDEN_DOMAIN and node.op_type in _GUARDED_INPUT_SLOTS
        ]
        nested_bodies = [(node, attr.g) for node in graph.node for attr in node.attribute if attr.HasField("g")]
        if not guarded_nodes and not nested_bodies:
            continue
        graph_types = dict(_declared_types(graph))
        graph_types.update((tensor.name, _tensor_type(tensor)) for tensor in graph.initializer)
        types = outer_types.new_child(graph_types)
        pending += [(body, types) for _, body in nested_bodies]
        for node in guarded_nodes:
            if _is_safe_to_reveal(node, types):
                node.domain = ""
                revealed = True
    return revealed


def hide_costly_nodes(typed_message: Any) -> bool:
    """Hides nodes whose values must not be computed.

    Args:
        typed_message: A ModelProto with types. It is changed.

    Returns:
        Whether its vectors are small enough for values to be computed at all.
    """
    total_length = read_elements = 0
    long_readers: list[Any] = []
    for root in [typed_message.graph, *typed_message.functions]:
        for graph in nested_graphs(root):
            types = dict(_declared_types(graph))
            vectors = {name: _vector_length(type_) for name, type_ in types.items()}
            total_length += sum(size or 0 for name, size in vectors.items() if _may_be_integers(types[name]))
            for node in graph.node:
                output_name = next(iter(node.output), "")
                if (
                    node.op_type in _GROWING_OPS
                    and vectors.get(output_name) is None
                    and (output_name not in types or _may_be_integers(types[output_name]))
                ):
                    node.domain = HIDDEN_DOMAIN
                elif node.op_type in _VALUE_PROPAGATED_OPS:
                    sizes = [vectors.get(name) or 0 for name in node.input]
                    if max(sizes, default=0) > SHORT_VECTOR_ELEMENTS:
                        read_elements += sum(sizes)
                        long_readers.append(node)
    for node in long_readers if read_elements > MAX_READ_ELEMENTS else ():
        node.domain = HIDDEN_DOMAIN
    return total_length <= MAX_VECTOR_ELEMENTS


def _declared_types(graph: Any) -> Iterator[tuple[str, Any]]:
    """The types that the graph itself tells, of its values by name."""
    interface_infos = [*graph.input, *graph.output] if isinstance(graph, GraphProto) else []
    return ((info.name, info.type) for info in [*graph.value_info, *interface_infos])


def _may_be_integers(type_: Any) -> bool:
    """Whether the elements may be whole numbers."""
    return not type_.tensor_type.elem_type or type_.tensor_type.elem_type in INTEGER_TYPES


def _vector_length(type_: Any) -> int | None:
    """Elements of what may be a vector; 0 if it is known to be none, None if that is not known."""
    tensor = type_.tensor_type
    if len(tensor.shape.dim) > 1:
        return 0
    if not tensor.HasField("shape"):
        return None
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    return max(sizes[0] or 0, 0) if sizes and sizes[0] is not None else (None if sizes else 1)


def _tensor_type(tensor: Any) -> Any:
    """The TypeProto of a TensorProto."""
    return helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))


def _is_safe_to_reveal(node: Any, types: Mapping[str, Any]) -> bool:
    """Whether enough is known of what the node reads."""
    slot = _GUARDED_INPUT_SLOTS[node.op_type]
    type_ = types.get(node.input[slot]) if slot < len(node.input) and node.input[slot] else None
    if type_ is None or not type_.HasField("tensor_type") or _may_crash_inference(node):
        return False
    dims = type_.tensor_type.shape.dim
    if node.op_type == "GatherND":
        batch = sum(attr.i if attr.name == "batch_dims" else 0 for attr in node.attribute)
        return batch >= 0 and bool(dims) and dims[-1].HasField("dim_value") and dims[-1].dim_value >= 0
    size = _vector_length(type_)
    return node.op_type in {"EyeLike", "RegexFullMatch"} or (size is not None and size <= SHORT_VECTOR_ELEMENTS)


INFERENCE_ERRORS: tuple[type[Exception], ...] = (
    shape_inference.InferenceError,
    checker.ValidationError,
    DecodeError,
    RuntimeError,
    ValueError,
    IndexError,
)
"""What onnx's shape inference raises; its own kinds have no common base."""

MAX_SHAPE_ELEMENTS = 1 << 10
"""Elements up to which integer constants keep their data: they may be shapes, axes or slices."""

MAX_SCALE_ELEMENTS = 8
"""Elements up to which float constants keep their data: they may be what Resize multiplies each axis by."""

MAX_REVEAL_ROUNDS = 4
"""How often nodes are shown again of which more is known than before; each time all types are found anew."""

MAX_INLINED_NODES = 1 << 18
"""Nodes that a model may have once its functions are put in place of their calls, as onnx and onnxruntime do."""

_VISIBLE_ELEMENTS = {TensorProto.FLOAT: MAX_SCALE_ELEMENTS, **dict.fromkeys(INTEGER_TYPES, MAX_SHAPE_ELEMENTS)}


def infer_types(message: Any, folder: Path | None = None) -> Any:
    """A ModelProto with the nodes of `message` and all value types that could be found; weights have no data in it.

    Args:
        message: The ModelProto.
        folder: Where its external data is, None if it has none. What may be shapes is read and kept in the result.

    Raises:
        ModelError: A function calls itself, or the calls come to too many nodes.
    """
    return add_inferred_types(strip_weight_data(message, folder))


def strip_weight_data(message: Any, folder: Path | None = None) -> Any:
    """A ModelProto with the nodes of `message` and without the data of what is surely no shape, for `add_inferred_types`.

    Raises:
        ModelError: A function calls itself, or the calls come to too many nodes.
    """
    _check_function_calls(message)
    weightless = ModelProto(
        ir_version=message.ir_version, opset_import=message.opset_import, functions=message.functions
    )
    _copy_graph_stripped(message.graph, weightless.graph, folder)
    return weightless


def add_inferred_types(weightless: Any) -> Any:
    """The model, which may be changed, with all value types that could be found."""
    typed_message = _infer_message_types(weightless)
    if weightless.functions:
        with suppress(*INFERENCE_ERRORS):  # their values have no types then
            inlined_message, origins = inline_marked_functions(weightless)
            add_function_types(typed_message.functions, _infer_message_types(inlined_message), origins)
    return typed_message


def _infer_message_types(weightless: Any) -> Any:
    """The model with types, as far as onnx finds them."""
    hide_crashing_nodes(weightless)
    try:
        typed_message = shape_inference.infer_shapes(weightless)
        for _ in range(MAX_REVEAL_ROUNDS):
            if not reveal_safe_nodes(typed_message):
                break
            typed_message = shape_inference.infer_shapes(typed_message)
    except INFERENCE_ERRORS:
        # An op unknown to onnx, or a model that is wrong in some place: the types that the file states remain.
        return weightless
    if not hide_costly_nodes(typed_message):
        return typed_message
    try:
        return shape_inference.infer_shapes(typed_message, data_prop=True)
    except INFERENCE_ERRORS:
        return typed_message


def _check_function_calls(message: Any) -> None:
    """Refuses functions that call themselves, or each other so often that putting them in place would fill memory."""
    if not message.functions:
        return
    main = ("", "", "")
    callables = {
        main: message.graph,
        **{(function.domain, function.name, function.overload): function for function in message.functions},
    }
    calls: nx.DiGraph[Any] = nx.DiGraph()
    node_counts: dict[Any, Counter[Any]] = {}
    for key, callable_proto in callables.items():
        node_counts[key] = Counter((node.domain, node.op_type, node.overload) for node in _all_nodes(callable_proto))
        calls.add_node(key)
        calls.add_edges_from((key, callee) for callee in node_counts[key] if callee in callables and callee != main)
    try:
        order = list(nx.topological_sort(calls))
    except nx.NetworkXUnfeasible as error:
        raise ModelError(
            "A function of the model calls itself, which ONNX does not allow. Export the model again."
        ) from error
    inlined_counts: dict[Any, int] = {}
    for key in reversed(order):
        inlined_counts[key] = sum(count * inlined_counts.get(callee, 1) for callee, count in node_counts[key].items())
    if inlined_counts[main] > MAX_INLINED_NODES:
        raise ModelError(
            f"With its functions put in place, the model has {inlined_counts[main]} nodes. At most {MAX_INLINED_NODES} are read: export"
            " the model without functions."
        )


def _all_nodes(root: Any) -> Iterator[Any]:
    """The nodes of a GraphProto or FunctionProto and of all bodies in it."""
    return (node for graph in nested_graphs(root) for node in graph.node)


def _copy_graph_stripped(source: Any, target: Any, folder: Path | None) -> None:
    """Copies a GraphProto without the data of what is surely no shape."""
    target.name = source.name
    target.input.extend(source.input)
    target.output.extend(source.output)
    target.value_info.extend(source.value_info)
    target.sparse_initializer.extend(source.sparse_initializer)
    for node in source.node:
        _copy_node_stripped(node, target.node.add(), folder)
    for tensor in source.initializer:
        _copy_tensor_stripped(tensor, target.initializer.add(), folder)


def _copy_node_stripped(source: Any, target: Any, folder: Path | None) -> None:
    bulky_types = (AttributeProto.TENSOR, AttributeProto.GRAPH)
    if not any(attr.type in bulky_types for attr in source.attribute):
        target.CopyFrom(source)
        return
    target.op_type, target.domain, target.name = source.op_type, source.domain, source.name
    target.input.extend(source.input)
    target.output.extend(source.output)
    for attr in source.attribute:
        attr_copy = target.attribute.add()
        if attr.type in bulky_types and not attr.ref_attr_name:
            attr_copy.name, attr_copy.type = attr.name, attr.type
            if attr.type == AttributeProto.TENSOR:
                _copy_tensor_stripped(attr.t, attr_copy.t, folder)
            else:
                _copy_graph_stripped(attr.g, attr_copy.g, folder)
        else:
            attr_copy.CopyFrom(attr)


def _copy_tensor_stripped(source: Any, target: Any, folder: Path | None) -> None:
    keeps_data = math.prod(source.dims) <= _VISIBLE_ELEMENTS.get(source.data_type, -1)
    if keeps_data and not is_external(source):
        target.CopyFrom(source)
        return
    target.name, target.data_type = source.name, source.data_type
    target.dims.extend(source.dims)
    if keeps_data:
        with suppress(ModelError, OSError):  # whoever needs the value says so
            target.raw_data = tensor_value(source, folder).tobytes()
