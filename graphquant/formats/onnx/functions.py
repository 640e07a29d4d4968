"""Functions of a message: its nested graphs, inlined copies, and the types that all calls of a function agree on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnx import GraphProto, ModelProto, helper, inliner

from graphquant.formats.onnx.tensors import DTYPE_CODES, DTYPE_NAMES, type_and_shape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from graphquant.ir import Shape


TypeAndShape = tuple[str | None, "Shape | None"]
"""Data type and shape, each None if unknown."""

NODE_MARK = "graphquant.node "


def nested_graphs(root: Any) -> Iterator[Any]:
    """Yield a GraphProto or FunctionProto and all bodies in it."""
    pending = [root]
    while pending:
        graph = pending.pop()
        yield graph
        for node in graph.node:
            for attr in node.attribute:
                pending += [attr.g] if attr.HasField("g") else []
                pending += attr.graphs


def inline_marked_functions(message: Any) -> tuple[Any, list[tuple[int, int]]]:
    """Return a copy of a ModelProto with its functions inlined and their nodes marked, and the origins of the marks.

    The origin of the number after `NODE_MARK` is the index of the function and of the node in it, counted through the
    bodies in the order of `nested_graphs`. Raise one of `INFERENCE_ERRORS` if a function cannot be inlined.
    """
    marked_message = ModelProto()
    marked_message.CopyFrom(message)
    origins: list[tuple[int, int]] = []
    for index, function in enumerate(marked_message.functions):
        for node_index, node in enumerate(node for graph in nested_graphs(function) for node in graph.node):
            node.doc_string = f"{NODE_MARK}{len(origins)}"
            origins.append((index, node_index))
    return inliner.inline_local_functions(marked_message), origins


def add_function_types(functions: Sequence[Any], inlined_message: Any, origins: Sequence[tuple[int, int]]) -> None:
    """Add to `functions`, and to the bodies in them, the types that their values have in `inlined_message`.

    `inlined_message` and `origins` are the results of `inline_marked_functions`, with types added.
    """
    nodes = [[(graph, node) for graph in nested_graphs(function) for node in graph.node] for function in functions]
    input_names = [set(function.input) for function in functions]
    merged_types: dict[tuple[int, str], tuple[Any, TypeAndShape]] = {}
    for node, lookup_type in _marked_nodes(inlined_message):
        index, node_index = origins[int(node.doc_string.removeprefix(NODE_MARK))]
        graph, function_node = nodes[index][node_index]
        pairs = [p for p in zip(function_node.input, node.input, strict=False) if p[0] in input_names[index]]
        for name, call_name in [*pairs, *zip(function_node.output, node.output, strict=False)]:
            if not name:
                continue
            owner = functions[index] if name in input_names[index] else graph
            call_type = lookup_type(call_name)
            previous = merged_types.get((index, name))
            merged_types[index, name] = owner, call_type if previous is None else _common_type(previous[1], call_type)
    for (_, name), (owner, (dtype, shape)) in merged_types.items():
        if dtype is not None:
            owner.value_info.append(helper.make_tensor_value_info(name, DTYPE_CODES[dtype], shape))
    for body in (graph for function in functions for graph in nested_graphs(function) if isinstance(graph, GraphProto)):
        body_types = {info.name: info.type for info in body.value_info}
        for output in body.output:
            if output.name in body_types and not output.type.tensor_type.elem_type:
                output.type.CopyFrom(body_types[output.name])


def _marked_nodes(inlined_message: Any) -> Iterator[tuple[Any, Callable[[str], TypeAndShape]]]:
    """Yield the marked nodes of a ModelProto, each with a function that returns the type of a value in its scope."""
    pending: list[tuple[Any, tuple[dict[str, TypeAndShape], ...]]] = [(inlined_message.graph, ())]
    for graph, outer_scopes in pending:  # grows while bodies are visited
        scopes = (_graph_types(graph), *outer_scopes)

        def lookup_type(name: str, scopes: tuple[dict[str, TypeAndShape], ...] = scopes) -> TypeAndShape:
            return next((scope[name] for scope in scopes if name in scope), (None, None))

        for node in graph.node:
            if node.doc_string.startswith(NODE_MARK):
                yield node, lookup_type
            for attr in node.attribute:
                pending += [(attr.g, scopes)] if attr.HasField("g") else []
                pending += [(body, scopes) for body in attr.graphs]


def _graph_types(graph: Any) -> dict[str, TypeAndShape]:
    """Return the types of the values that a GraphProto itself declares."""
    infos = (*graph.value_info, *graph.output, *graph.input)
    types: dict[str, TypeAndShape] = {info.name: type_and_shape(info.type) for info in infos}
    types.update((tensor.name, (DTYPE_NAMES.get(tensor.data_type), tuple(tensor.dims))) for tensor in graph.initializer)
    return types


def _common_type(first: TypeAndShape, second: TypeAndShape) -> TypeAndShape:
    """Return the type and shape on which two calls agree."""
    if first[0] != second[0]:
        return None, None
    if first[1] is None or second[1] is None or len(first[1]) != len(second[1]):
        return first[0], None
    return first[0], tuple(a if a == b else None for a, b in zip(first[1], second[1], strict=True))
