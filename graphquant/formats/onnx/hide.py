"""Nodes that onnx's shape inference must not see: it ends the process on them, or comes to no end.

They were found by feeding it odd nodes (onnx 1.23). A hidden node is in a domain of which onnx knows nothing, and what
it makes has no type.
"""

from __future__ import annotations

from collections import ChainMap
from typing import TYPE_CHECKING, Any

from onnx import AttributeProto, GraphProto, TensorProto, helper

from graphquant.formats.onnx.calls import graphs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DOMAIN = "graphquant.hidden"

LONGEST = 1 << 20
"""Elements of all integer vectors of a graph up to which onnx may compute their values: it keeps an object for each."""

SHORT = 1 << 10
"""Elements of a vector that any number of nodes may read while values are computed."""

MOST = 1 << 26
"""Elements of all longer ones, counted for each time they are read: onnx makes an object for each."""

FARTHEST = 1 << 31
"""Numbers from here on are other ones once onnx has put them into 32 bits, which it does after it has checked them."""

INTEGERS = (TensorProto.INT32, TensorProto.INT64)

_GROWING = frozenset({"Concat", "ConstantOfShape", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"})
"""Ops that make vectors of any length out of few numbers."""

_COMPUTED = frozenset({"Add", "Cast", "Concat", "Gather", "Mul", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze"})
"""Ops of which onnx computes the values of vectors, so that it makes an object for each element that they read."""

_WARY = {"EyeLike": 0, "RegexFullMatch": 0, "GatherND": 1, "Expand": 1, "MeanVarianceNormalization": 0}
"""Ops on which onnx ends the process, or comes to no end, if one of their inputs has no type or is a vector of any
length; and the slot of that input."""

_NEVER = frozenset({"LabelEncoder", "DictVectorizer", "TreeEnsemble"})
"""Ops of ai.onnx.ml that are never shown: with attributes missing, or of the wrong kind, they end the process."""


def hide_crashing(light: Any) -> None:
    """Hides the nodes of a ModelProto on which onnx may end the process, and makes the domain of hidden ones known."""
    for holder, imports in [(light.graph, light), *((function, function) for function in light.functions)]:
        if all(entry.domain != DOMAIN for entry in imports.opset_import):
            imports.opset_import.add(domain=DOMAIN, version=1)
        for graph in graphs(holder):
            for node in graph.node:
                if node.domain in {"", "ai.onnx"}:
                    hidden = node.op_type in _WARY or _crashing(node)
                else:
                    hidden = node.domain == "ai.onnx.ml" and node.op_type in _NEVER
                if hidden:
                    node.domain = DOMAIN


def _crashing(node: Any) -> bool:
    for attr in node.attribute:
        if attr.type == AttributeProto.INT and not -FARTHEST <= attr.i < FARTHEST:
            return True
        # onnx takes its word for how many there are, and has no place for the others.
        if (
            node.op_type == "Split"
            and attr.name == "num_outputs"
            and (attr.ref_attr_name or attr.i != len(node.output))
        ):
            return True
    return False


def show_safe(known: Any) -> bool:
    """Shows those of the hidden nodes of the main graph and its bodies again of which enough is known now.

    Args:
        known: A ModelProto with types. It is changed.

    Returns:
        Whether there were any.
    """
    shown = False
    todo: list[tuple[Any, ChainMap[str, Any]]] = [(known.graph, ChainMap())]
    for graph, around in todo:  # grows while bodies are found
        wary = [node for node in graph.node if node.domain == DOMAIN and node.op_type in _WARY]
        within = [(node, attr.g) for node in graph.node for attr in node.attribute if attr.HasField("g")]
        if not wary and not within:
            continue
        own = dict(_types(graph))
        own.update((tensor.name, _type_of(tensor)) for tensor in graph.initializer)
        types = around.new_child(own)
        todo += [(body, types) for _, body in within]
        for node in wary:
            if _safe(node, types):
                node.domain = ""
                shown = True
    return shown


def hide_endless(known: Any) -> bool:
    """Hides nodes whose values must not be computed.

    Args:
        known: A ModelProto with types. It is changed.

    Returns:
        Whether its vectors are small enough for values to be computed at all.
    """
    length = read = 0
    long: list[Any] = []
    for holder in [known.graph, *known.functions]:
        for graph in graphs(holder):
            types = dict(_types(graph))
            vectors = {name: _vector(type_) for name, type_ in types.items()}
            length += sum(size or 0 for name, size in vectors.items() if _whole(types[name]))
            for node in graph.node:
                made = next(iter(node.output), "")
                if (
                    node.op_type in _GROWING
                    and vectors.get(made) is None
                    and (made not in types or _whole(types[made]))
                ):
                    node.domain = DOMAIN
                elif node.op_type in _COMPUTED:
                    sizes = [vectors.get(name) or 0 for name in node.input]
                    if max(sizes, default=0) > SHORT:
                        read += sum(sizes)
                        long.append(node)
    for node in long if read > MOST else ():
        node.domain = DOMAIN
    return length <= LONGEST


def _types(graph: Any) -> Iterator[tuple[str, Any]]:
    """The types that the graph itself tells, of its values by name."""
    ends = [*graph.input, *graph.output] if isinstance(graph, GraphProto) else []
    return ((info.name, info.type) for info in [*graph.value_info, *ends])


def _whole(type_: Any) -> bool:
    """Whether the elements may be whole numbers."""
    return not type_.tensor_type.elem_type or type_.tensor_type.elem_type in INTEGERS


def _vector(type_: Any) -> int | None:
    """Elements of what may be a vector; 0 if it is known to be none, None if that is not known."""
    tensor = type_.tensor_type
    if len(tensor.shape.dim) > 1:
        return 0
    if not tensor.HasField("shape"):
        return None
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    return max(sizes[0] or 0, 0) if sizes and sizes[0] is not None else (None if sizes else 1)


def _type_of(tensor: Any) -> Any:
    """The TypeProto of a TensorProto."""
    return helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))


def _safe(node: Any, types: Mapping[str, Any]) -> bool:
    """Whether enough is known of what the node reads."""
    slot = _WARY[node.op_type]
    type_ = types.get(node.input[slot]) if slot < len(node.input) and node.input[slot] else None
    if type_ is None or not type_.HasField("tensor_type") or _crashing(node):
        return False
    dims = type_.tensor_type.shape.dim
    if node.op_type == "GatherND":
        batch = sum(attr.i if attr.name == "batch_dims" else 0 for attr in node.attribute)
        return batch >= 0 and bool(dims) and dims[-1].HasField("dim_value") and dims[-1].dim_value >= 0
    size = _vector(type_)
    return node.op_type in {"EyeLike", "RegexFullMatch"} or (size is not None and size <= SHORT)
