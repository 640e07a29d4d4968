"""Types of the values in functions of a model: what they are in the calls of them, as far as all calls agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnx import GraphProto, ModelProto, helper, inliner

from graphquant.formats.onnx.tensors import CODES, NAMES, type_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from graphquant.ir import Shape

Known = tuple[str | None, "Shape | None"]
"""Data type and shape, each None where it is not known."""

MARK = "graphquant.node "


def graphs(holder: Any) -> Iterator[Any]:
    """The GraphProto or FunctionProto and all bodies in it."""
    todo = [holder]
    while todo:
        graph = todo.pop()
        yield graph
        for node in graph.node:
            for attr in node.attribute:
                todo += [attr.g] if attr.HasField("g") else []
                todo += attr.graphs


def inlined(message: Any) -> tuple[Any, list[tuple[int, int]]]:
    """A copy of a ModelProto with functions put in place of their calls; their nodes are marked in their doc_string.

    Returns:
        The copy, and for each number behind `MARK` the function's place and that of the node, counted through the
        bodies in the order of `graphs`.

    Raises:
        Exception: One of onnx's own, as `infer.ERRORS` lists them: a function cannot be put in place.
    """
    marked = ModelProto()
    marked.CopyFrom(message)
    places: list[tuple[int, int]] = []
    for number, function in enumerate(marked.functions):
        for place, node in enumerate(node for graph in graphs(function) for node in graph.node):
            node.doc_string = f"{MARK}{len(places)}"
            places.append((number, place))
    return inliner.inline_local_functions(marked), places


def add_types(functions: Sequence[Any], flat: Any, places: Sequence[tuple[int, int]]) -> None:
    """Adds to `functions` and the bodies in them the types that their values have in `flat`.

    Args:
        functions: The FunctionProtos.
        flat: What `inlined` made of their model, with types in it.
        places: What its marks mean.
    """
    nodes = [[(graph, node) for graph in graphs(function) for node in graph.node] for function in functions]
    given = [set(function.input) for function in functions]
    found: dict[tuple[int, str], tuple[Any, Known]] = {}
    for node, type_in_call in _marked(flat):
        number, place = places[int(node.doc_string.removeprefix(MARK))]
        graph, twin = nodes[number][place]
        read = [pair for pair in zip(twin.input, node.input, strict=False) if pair[0] in given[number]]
        for name, name_in_call in [*read, *zip(twin.output, node.output, strict=False)]:
            if not name:
                continue
            home = functions[number] if name in given[number] else graph
            here = type_in_call(name_in_call)
            before = found.get((number, name))
            found[number, name] = home, here if before is None else _common(before[1], here)
    for (_, name), (home, (dtype, shape)) in found.items():
        if dtype is not None:
            home.value_info.append(helper.make_tensor_value_info(name, CODES[dtype], shape))
    for body in (graph for function in functions for graph in graphs(function) if isinstance(graph, GraphProto)):
        types = {info.name: info.type for info in body.value_info}
        for end in body.output:
            if end.name in types and not end.type.tensor_type.elem_type:
                end.type.CopyFrom(types[end.name])


def _marked(flat: Any) -> Iterator[tuple[Any, Callable[[str], Known]]]:
    """The marked nodes of a ModelProto, each with what tells the types of the values that it sees."""
    todo: list[tuple[Any, tuple[dict[str, Known], ...]]] = [(flat.graph, ())]
    for graph, around in todo:  # grows while bodies are found
        scopes = (_types(graph), *around)

        def find(name: str, scopes: tuple[dict[str, Known], ...] = scopes) -> Known:
            return next((scope[name] for scope in scopes if name in scope), (None, None))

        for node in graph.node:
            if node.doc_string.startswith(MARK):
                yield node, find
            for attr in node.attribute:
                todo += [(attr.g, scopes)] if attr.HasField("g") else []
                todo += [(body, scopes) for body in attr.graphs]


def _types(graph: Any) -> dict[str, Known]:
    """The types of the values that a GraphProto itself holds."""
    infos = (*graph.value_info, *graph.output, *graph.input)
    types: dict[str, Known] = {info.name: type_of(info.type) for info in infos}
    types.update((one.name, (NAMES.get(one.data_type), tuple(one.dims))) for one in graph.initializer)
    return types


def _common(one: Known, other: Known) -> Known:
    """What two calls agree on."""
    if one[0] != other[0]:
        return None, None
    if one[1] is None or other[1] is None or len(one[1]) != len(other[1]):
        return one[0], None
    return one[0], tuple(a if a == b else None for a, b in zip(one[1], other[1], strict=True))
