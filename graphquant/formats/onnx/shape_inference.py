"""Static types and shapes: onnx's shape inference on a copy of the model without weight data.

Some nodes crash the process in onnx's shape inference, or make it run forever. They were found by passing malformed
nodes to onnx 1.23. Such nodes are hidden first: they get a domain that onnx does not know, and untyped outputs.
"""

from __future__ import annotations

import math
from collections import ChainMap, Counter
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    TensorProto,
    ValueInfoProto,
    checker,
    defs,
    helper,
    inliner,
    numpy_helper,
    shape_inference,
)

from graphquant.errors import ModelError
from graphquant.formats.onnx.tensors import (
    DEFAULT_DOMAINS,
    DTYPE_CODES,
    DTYPE_NAMES,
    TypeAndShape,
    is_external,
    tensor_value,
    type_and_shape,
)
from graphquant.ir import fully_known_shape, reachable

if TYPE_CHECKING:
    from graphquant.numerics import Array

HIDDEN_DOMAIN = "graphquant.hidden"

MAX_VECTOR_ELEMENTS = 1 << 20
"""Maximum total length of a graph's integer vectors for which onnx may propagate values: it creates an object per
element."""

SHORT_VECTOR_ELEMENTS = 1 << 10  # length of a vector that any number of nodes may read while values are propagated

MAX_READ_ELEMENTS = 1 << 26
"""Maximum total length of longer vectors, counted once per reader: onnx creates an object for each element it reads."""

INT32_LIMIT = 1 << 31
"""Numbers from here on change when onnx truncates them to 32 bits, which it does after checking them."""

INTEGER_TYPES = (TensorProto.INT32, TensorProto.INT64)

_BULKY_TYPES = (AttributeProto.TENSOR, AttributeProto.GRAPH)  # types of attributes that may hold weights

_GROWING_OPS = frozenset(
    {"Concat", "ConstantOfShape", "Expand", "OneHot", "Pad", "Range", "Resize", "Tile", "Upsample"}
)
"""Ops that create vectors of any length from a few numbers."""

_VALUE_PROPAGATED_OPS = frozenset(
    {"Add", "Cast", "Concat", "Gather", "Mul", "Size", "Slice", "Squeeze", "Sub", "Unsqueeze"}
)
"""Ops for which onnx propagates the values of vectors, and so creates an object for each element they read."""

_SHAPE_ARITHMETIC = _VALUE_PROPAGATED_OPS | {
    *("Ceil", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor", "Max", "Min", "Mod", "Neg", "Pow"),
    *("Range", "ReduceProd", "Reshape", "Shape", "Sqrt", "Tile", "Transpose", "Where"),
}
"""Ops that exporters compute shapes with. They are evaluated if all their inputs are known."""

_GUARDED_INPUT_SLOTS = {"EyeLike": 0, "RegexFullMatch": 0, "GatherND": 1, "Expand": 1, "MeanVarianceNormalization": 0}
"""Ops that crash onnx, or make it run forever, if one of their inputs has no type or is a vector of any length, with
the slot of that input."""

_ALWAYS_HIDDEN_OPS = frozenset({"LabelEncoder", "DictVectorizer", "TreeEnsemble"})
"""Ops of ai.onnx.ml that are never revealed: they crash the process if attributes are missing or have a wrong type."""


def hide_crashing_nodes(message: Any) -> None:
    """Hide the nodes of a ModelProto that may crash onnx, and import the domain of hidden nodes."""
    for root, imports in [(message.graph, message), *((function, function) for function in message.functions)]:
        if all(entry.domain != HIDDEN_DOMAIN for entry in imports.opset_import):
            imports.opset_import.add(domain=HIDDEN_DOMAIN, version=1)
        for graph in nested_graphs(root):
            for node in graph.node:
                if node.domain in DEFAULT_DOMAINS:
                    hidden = node.op_type in _GUARDED_INPUT_SLOTS or _may_crash_inference(node)
                else:
                    hidden = node.domain == "ai.onnx.ml" and node.op_type in _ALWAYS_HIDDEN_OPS
                if hidden:
                    node.domain = HIDDEN_DOMAIN


def _may_crash_inference(node: Any) -> bool:
    # onnx trusts num_outputs and writes past the end of the outputs.
    return any(
        (attr.type == AttributeProto.INT and not -INT32_LIMIT <= attr.i < INT32_LIMIT)
        or (
            node.op_type == "Split"
            and attr.name == "num_outputs"
            and bool(attr.ref_attr_name or attr.i != len(node.output))
        )
        for attr in node.attribute
    )


def reveal_safe_nodes(typed_message: Any) -> bool:
    """Reveal hidden nodes of the main graph and its bodies with known inputs; return True if there were any."""
    revealed = False
    pending: list[tuple[Any, ChainMap[str, Any]]] = [(typed_message.graph, ChainMap())]
    for graph, outer_types in pending:  # grows while bodies are visited
        guarded = [n for n in graph.node if n.domain == HIDDEN_DOMAIN and n.op_type in _GUARDED_INPUT_SLOTS]
        nested_bodies = [(node, attr.g) for node in graph.node for attr in node.attribute if attr.HasField("g")]
        if not guarded and not nested_bodies:
            continue
        graph_types = dict(_declared_types(graph))
        graph_types.update(
            (tensor.name, helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)))
            for tensor in graph.initializer
        )
        types = outer_types.new_child(graph_types)
        pending += [(body, types) for _, body in nested_bodies]
        for node in guarded:
            if _is_safe_to_reveal(node, types):
                node.domain = ""
                revealed = True
    return revealed


def hide_costly_nodes(typed_message: Any) -> bool:
    """Hide nodes for which onnx must not propagate values.

    Return True if nodes compute integers that onnx can propagate, and all vectors are short enough.
    """
    total_length = read_elements = 0
    computes_integers = False
    long_readers: list[Any] = []
    for graph in (graph for root in [typed_message.graph, *typed_message.functions] for graph in nested_graphs(root)):
        types = dict(_declared_types(graph))
        vectors = {name: _vector_length(type_) for name, type_ in types.items()}
        codes = {name: type_.tensor_type.elem_type for name, type_ in types.items()}
        may_be_integers = {name for name, code in codes.items() if not code or code in INTEGER_TYPES}
        total_length += sum(vectors[name] or 0 for name in may_be_integers)
        for node in graph.node:
            output_name = next(iter(node.output), "")
            writes_integers = output_name not in types or output_name in may_be_integers
            computes_integers |= writes_integers and node.op_type in _SHAPE_ARITHMETIC
            if node.op_type in _GROWING_OPS and vectors.get(output_name) is None and writes_integers:
                node.domain = HIDDEN_DOMAIN
            elif node.op_type in _VALUE_PROPAGATED_OPS:
                sizes = [vectors.get(name) or 0 for name in node.input]
                if max(sizes, default=0) > SHORT_VECTOR_ELEMENTS:
                    read_elements += sum(sizes)
                    long_readers.append(node)
    for node in long_readers if read_elements > MAX_READ_ELEMENTS else ():
        node.domain = HIDDEN_DOMAIN
    return computes_integers and total_length <= MAX_VECTOR_ELEMENTS


def _declared_types(graph: Any) -> Iterator[tuple[str, Any]]:
    """Return the names and types of the values that the graph itself declares."""
    interface_infos = [*graph.input, *graph.output] if isinstance(graph, GraphProto) else []
    return ((info.name, info.type) for info in [*graph.value_info, *interface_infos])


def _vector_length(type_: Any) -> int | None:
    """Return the length of a possible vector, 0 if the type is certainly none, None if that is unknown."""
    dims = type_.tensor_type.shape.dim
    if len(dims) > 1:
        return 0
    if not type_.tensor_type.HasField("shape"):
        return None
    if not dims:
        return 1
    return max(dims[0].dim_value, 0) if dims[0].HasField("dim_value") else None


def _is_safe_to_reveal(node: Any, types: Mapping[str, Any]) -> bool:
    """Return True if enough is known about the inputs of the node."""
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
"""Exceptions of onnx's shape inference, which have no common base class."""

EVALUATION_ERRORS: tuple[type[Exception], ...] = (
    *INFERENCE_ERRORS,
    *(TypeError, LookupError, ArithmeticError, AttributeError, MemoryError),
)
"""Exceptions of onnx's reference implementation, which damaged nodes and tensors cause."""

MAX_SHAPE_ELEMENTS = 1 << 10
"""Maximum number of elements of an integer constant that keeps its data, as it may be a shape, axes or slices."""

MAX_SCALE_ELEMENTS = 8
"""Maximum number of elements of a float constant that keeps its data, as it may hold the scales of Resize."""

MAX_RESULT_ELEMENTS = 1 << 24
"""Maximum number of elements that one op may create from smaller constants: a hostile Expand or Tile must not fill
memory."""

MAX_REVEAL_ROUNDS = 4  # Maximum number of times that hidden nodes are revealed. Each time all types are inferred again.
MIN_PART_IR_VERSION = 4  # first IR version whose initializers need not be graph inputs, for parts of a model
MAX_INLINED_NODES = 1 << 18  # maximum number of nodes after inlining the functions, as onnx and onnxruntime do
_VISIBLE_ELEMENTS = {TensorProto.FLOAT: MAX_SCALE_ELEMENTS, **dict.fromkeys(INTEGER_TYPES, MAX_SHAPE_ELEMENTS)}


def infer_types(message: Any, folder: Path | None = None) -> Any:
    """Return a ModelProto with the nodes of `message` and all value types that could be inferred, without weight data.

    External data in `folder` that may be a shape is read. Raise ModelError if a function calls itself, or if inlining
    would give too many nodes.
    """
    _check_function_calls(message)
    weightless = ModelProto(
        ir_version=message.ir_version, opset_import=message.opset_import, functions=message.functions
    )
    _copy_graph_stripped(message.graph, weightless.graph, folder)
    _clear_negative_sizes(weightless)
    typed_message = _infer_message_types(weightless)
    if weightless.functions:
        with suppress(*INFERENCE_ERRORS):  # otherwise values in functions have no types
            inlined_message, origins = _inline_marked_functions(weightless)
            _add_function_types(typed_message.functions, _infer_message_types(inlined_message), origins)
    return typed_message


def resolve_computed_shapes(typed_message: Any) -> None:
    """Add to the graphs of a ModelProto the shapes that depend on computed values, such as those of `x.view(...)`.

    onnx propagates values through a few ops only. Nodes of the main graph and of branches are visited once, in order.
    """
    part = ModelProto(ir_version=MIN_PART_IR_VERSION)
    part.opset_import.extend(entry for entry in typed_message.opset_import if entry.domain in DEFAULT_DOMAINS)
    if part.opset_import:
        _resolve_graph(typed_message.graph, {}, {}, part)


def _resolve_graph(graph: Any, types: MutableMapping[str, Any], values: MutableMapping[str, Any], part: Any) -> None:
    """Add shapes to a graph, and its types and the values of short vectors to those of the graphs around it."""
    types.update(_declared_types(graph))
    for tensor in graph.initializer:
        types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        if _has_data(tensor) and math.prod(tensor.dims) <= MAX_SHAPE_ELEMENTS:
            values[tensor.name] = tensor
    infos = {info.name: info for info in (*graph.value_info, *graph.output)}
    for node in graph.node:
        names = [name for name in node.input if name]
        if node.domain not in {*DEFAULT_DOMAINS, HIDDEN_DOMAIN} or not all(name in types for name in names):
            continue
        if node.op_type == "If":
            inferred = _resolve_branches(node, types, values, part)
        else:
            inferred = _infer_with_values(node, {name: types[name] for name in names}, values, part)
        for name, type_ in inferred.items():
            types[name] = type_
            if type_.tensor_type.HasField("shape"):
                (infos[name] if name in infos else graph.value_info.add(name=name)).type.CopyFrom(type_)
        sizes = _known_sizes(inferred.get(next(iter(node.output), "")))  # a declared size may be wrong
        if node.op_type in _SHAPE_ARITHMETIC and sizes is not None and math.prod(sizes) <= MAX_SHAPE_ELEMENTS:
            values.update(_evaluated_output(node, types, values, part.opset_import))


def _resolve_branches(
    node: Any, types: MutableMapping[str, Any], values: MutableMapping[str, Any], part: Any
) -> dict[str, Any]:
    """Add shapes to both branches of an If, and return the types of its outputs if its condition is known.

    Exporters write a Squeeze of an axis whose size they do not know as an If of two ranks.
    """
    outputs = {}
    for attr in node.attribute:
        inner_types = ChainMap[str, Any]({}, types)
        _resolve_graph(attr.g, inner_types, ChainMap({}, values), part)
        outputs[attr.name] = [inner_types.get(info.name) for info in attr.g.output]
    if next(iter(node.input), "") not in values:
        return {}
    is_then = bool(numpy_helper.to_array(values[node.input[0]]).any())
    chosen = outputs.get("then_branch" if is_then else "else_branch", ())
    return {name: type_ for name, type_ in zip(node.output, chosen, strict=False) if type_ is not None}


def _evaluated_output(node: Any, types: Mapping[str, Any], values: Mapping[str, Any], imports: Any) -> dict[str, Any]:
    """Return the output of a node by its name, or nothing if its inputs are unknown or onnx cannot compute it."""
    names = [name for name in node.input if name]
    with suppress(*EVALUATION_ERRORS):  # values may be damaged
        if node.op_type == "Shape":  # it does not read values
            inputs = [np.broadcast_to(0, sizes) for name in names if (sizes := _known_sizes(types[name])) is not None]
        else:
            inputs = [numpy_helper.to_array(values[name]) for name in names if name in values]
        if outputs := evaluate_node(imports, node, inputs):
            return {node.output[0]: numpy_helper.from_array(outputs[0])}
    return {}


def _infer_with_values(node: Any, types: dict[str, Any], values: Mapping[str, Any], part: Any) -> dict[str, Any]:
    """Return the types of the outputs of a node, as far as they follow from the types and values of its inputs."""
    visible = deepcopy(node)
    if node.op_type == "SimplifiedLayerNormalization" and node.input[0]:  # onnx does not know it
        return {node.output[0]: types[node.input[0]]}
    if node.domain == HIDDEN_DOMAIN and not _may_crash_inference(node):
        # Nodes that create long vectors do no harm here, because only short values are kept.
        is_guarded = node.op_type in _GUARDED_INPUT_SLOTS
        if _is_safe_to_reveal(node, types) if is_guarded else node.op_type in _GROWING_OPS:
            visible.domain = ""
    if visible.domain in DEFAULT_DOMAINS and not any(attr.HasField("g") for attr in node.attribute):
        with suppress(*INFERENCE_ERRORS, defs.SchemaError):
            schema = defs.get_schema(node.op_type, part.opset_import[0].version)
            imports = part.opset_import
            known = {name: values[name] for name in types if name in values}
            return dict(shape_inference.infer_node_outputs(schema, visible, types, known, opset_imports=imports))
    return {}


def _known_sizes(type_: Any) -> tuple[int, ...] | None:
    return None if type_ is None else fully_known_shape(type_and_shape(type_)[1])


def evaluate_node(opset_import: Any, node: Any, inputs: Sequence[Array]) -> list[Array] | None:
    """Return the outputs of a node for the arrays in its input slots that have a name.

    Return None if onnx's reference implementation does not know the op, fails on these inputs, or would create too many
    elements.
    """
    slots = [slot for slot, name in enumerate(node.input) if name]
    if len(slots) != len(inputs):
        return None
    from onnx.reference import ReferenceEvaluator  # imported when needed: that takes a quarter of a second

    part = deepcopy(node)
    if node.domain == HIDDEN_DOMAIN:
        part.domain = ""
    values = {f"i{slot}": value for slot, value in zip(slots, inputs, strict=True)}
    for slot in slots:
        part.input[slot] = f"i{slot}"
    try:
        infos = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
            for name, value in values.items()
        ]
        # Small inputs are initializers too, so that shape inference knows their values.
        small = [
            numpy_helper.from_array(value, name) for name, value in values.items() if value.size <= MAX_SHAPE_ELEMENTS
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
        graph = helper.make_graph([part], "one", infos, outputs, small)
        model = helper.make_model(graph, opset_imports=list(opset_import))
        inferred = shape_inference.infer_shapes(model, data_prop=True).graph.output
        counts = [math.prod(max(d.dim_value, 1) for d in output.type.tensor_type.shape.dim) for output in inferred]
        if max(counts, default=0) > max(MAX_RESULT_ELEMENTS, sum(value.size for value in inputs)):
            return None
        return [np.asarray(result) for result in ReferenceEvaluator(model).run(None, values)]
    except EVALUATION_ERRORS:
        return None


def _infer_message_types(weightless: Any) -> Any:
    """Return the model with the types that onnx infers."""
    hide_crashing_nodes(weightless)
    try:
        try:
            typed_message = shape_inference.infer_shapes(weightless, strict_mode=True)
        except INFERENCE_ERRORS:
            _correct_declared_shapes(weightless)
            typed_message = shape_inference.infer_shapes(weightless)
        # Revealing a node, or a type from onnxruntime, may give a type to the input of another one.
        for _ in range(MAX_REVEAL_ROUNDS):
            if not (reveal_safe_nodes(typed_message) or _add_runtime_types(typed_message)):
                break
            typed_message = shape_inference.infer_shapes(typed_message)
    except INFERENCE_ERRORS:
        # The model has an unknown op or an error: keep the types that the file declares.
        return weightless
    if not hide_costly_nodes(typed_message):
        return typed_message
    try:
        # Value propagation comes last, since it may not terminate before costly nodes are hidden.
        return shape_inference.infer_shapes(typed_message, data_prop=True)
    except INFERENCE_ERRORS:
        return typed_message


def _add_runtime_types(typed_message: Any) -> bool:
    """Add the types that onnx cannot infer but onnxruntime can; return True if there are any.

    onnx knows no ops of other domains, and expects sorted nodes. onnxruntime is not given weights, and
    does not run the nodes. Weights, and other values that onnx knows alone, are inputs of known types.
    """
    functions = {(function.domain, function.name) for function in typed_message.functions}
    pending: list[tuple[Any, ChainMap[str, Any]]] = [(typed_message.graph, ChainMap())]
    added = False
    for graph, outer_types in pending:  # grows while bodies are visited
        graph_types = {name: type_ for name, type_ in _declared_types(graph) if type_.WhichOneof("value")}
        bodies = [attr.g for node in graph.node for attr in node.attribute if attr.HasField("g")]
        if not bodies and all(name in graph_types for node in graph.node for name in node.output if name):
            continue
        for tensor in graph.initializer:
            graph_types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
        types = outer_types.new_child(graph_types)
        pending += [(body, types) for body in bodies]
        part = _typable_part(typed_message, graph, types, functions)
        if part.graph.output:
            # imported when needed, because onnxruntime is slow to import, and may be missing
            with suppress(ImportError):
                from graphquant.formats.onnx.runtime import infer_output_types

                for name, (dtype, shape) in infer_output_types(part).items():
                    graph.value_info.append(helper.make_tensor_value_info(name, DTYPE_CODES[dtype or ""], shape))
                    added = True
    return added


def _typable_part(message: Any, graph: Any, types: Mapping[str, Any], functions: Container[tuple[str, str]]) -> Any:
    """Return a ModelProto of the nodes that depend only on each other and on known types; its outputs have no types."""
    part = ModelProto(ir_version=max(message.ir_version, MIN_PART_IR_VERSION))
    part.opset_import.extend(entry for entry in message.opset_import if entry.domain != HIDDEN_DOMAIN)
    part.graph.name = "typable"
    nodes = [
        node
        for node in graph.node
        if node.domain != HIDDEN_DOMAIN
        and (node.domain, node.op_type) not in functions
        and not any(
            attr.HasField("g") or attr.graphs or attr.ref_attr_name or (attr.HasField("t") and not _has_data(attr.t))
            for attr in node.attribute
        )
    ]
    producers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    edges = [(name, index) for index, node in enumerate(nodes) for name in node.input if name]
    readers: dict[int, list[int]] = {}  # by producer, which is -1 if the type is unknown
    for name, index in edges:
        if name not in types:
            readers.setdefault(producers.get(name, -1), []).append(index)
    untypable = set(reachable([-1], lambda index: readers.get(index, ())))
    part.graph.node.extend(node for index, node in enumerate(nodes) if index not in untypable)
    produced = dict.fromkeys(name for node in part.graph.node for name in node.output if name)
    constants = {tensor.name: tensor for tensor in graph.initializer if _has_data(tensor)}
    for name in dict.fromkeys(name for node in part.graph.node for name in node.input if name and name not in produced):
        if name in constants:
            part.graph.initializer.append(constants[name])
        else:
            part.graph.input.add(name=name).type.CopyFrom(types[name])
    part.graph.output.extend(ValueInfoProto(name=name) for name in produced if name not in types)
    return part


def _has_data(tensor: Any) -> bool:
    """Return True if the data of a tensor was not stripped."""
    fields = (tensor.raw_data, tensor.float_data, tensor.int32_data, tensor.int64_data)
    return 0 in tensor.dims or any(map(bool, fields))


def _correct_declared_shapes(message: Any) -> None:
    """Replace the declared shapes of a ModelProto that contradict the ops by those that onnx infers.

    onnxruntime ignores a wrong shape of one tensor, but not if a quantized copy of the tensor declares it again.
    """
    undeclared = deepcopy(message)
    for graph in nested_graphs(undeclared.graph):
        for info in (*graph.value_info, *graph.output):
            if info.type.HasField("tensor_type"):
                info.type.tensor_type.ClearField("shape")
    with suppress(*INFERENCE_ERRORS):
        undeclared = shape_inference.infer_shapes(undeclared)
        for graph, inferred_graph in zip(nested_graphs(message.graph), nested_graphs(undeclared.graph), strict=True):
            inferred = {
                info.name: info.type.tensor_type for info in (*inferred_graph.value_info, *inferred_graph.output)
            }
            for info in (*graph.value_info, *graph.output):
                declared = info.type.tensor_type
                if info.name in inferred and _shapes_contradict(declared, inferred[info.name]):
                    declared.shape.CopyFrom(inferred[info.name].shape)


def _shapes_contradict(first: Any, second: Any) -> bool:
    """Return True if no tensor can have both types: another number of axes, or another known size."""
    if not (first.HasField("shape") and second.HasField("shape")):
        return False
    dims = first.shape.dim, second.shape.dim
    return len(dims[0]) != len(dims[1]) or any(
        a.HasField("dim_value") and b.HasField("dim_value") and a.dim_value != b.dim_value
        for a, b in zip(*dims, strict=True)
    )


def _check_function_calls(message: Any) -> None:
    """Reject functions that call themselves, or that would fill memory when they are inlined."""
    if not message.functions:
        return
    import networkx as nx  # imported when needed, because that takes longer than to read a small model

    main = ("", "", "")
    callables = {main: message.graph, **{(f.domain, f.name, f.overload): f for f in message.functions}}
    calls: nx.DiGraph[Any] = nx.DiGraph()
    node_counts: dict[Any, Counter[Any]] = {}
    for key, callable_proto in callables.items():
        nodes = (node for graph in nested_graphs(callable_proto) for node in graph.node)
        node_counts[key] = Counter((node.domain, node.op_type, node.overload) for node in nodes)
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
            f"With its functions inlined, the model has {inlined_counts[main]} nodes. At most {MAX_INLINED_NODES} are "
            "supported: export the model without functions."
        )


def _copy_graph_stripped(source: Any, target: Any, folder: Path | None) -> None:
    """Copy a GraphProto without data that is no shape."""
    target.name = source.name
    for field in ("input", "output", "value_info", "sparse_initializer"):
        getattr(target, field).extend(getattr(source, field))
    for node in source.node:
        copy = target.node.add()
        if not any(attr.type in _BULKY_TYPES for attr in node.attribute):
            copy.CopyFrom(node)
            continue
        copy.op_type, copy.domain, copy.name = node.op_type, node.domain, node.name
        copy.input.extend(node.input)
        copy.output.extend(node.output)
        for attr in node.attribute:
            attr_copy = copy.attribute.add()
            if attr.type not in _BULKY_TYPES or attr.ref_attr_name:
                attr_copy.CopyFrom(attr)
                continue
            attr_copy.name, attr_copy.type = attr.name, attr.type
            if attr.type == AttributeProto.TENSOR:
                _copy_tensor_stripped(attr.t, attr_copy.t, folder)
            else:
                _copy_graph_stripped(attr.g, attr_copy.g, folder)
    for tensor in source.initializer:
        _copy_tensor_stripped(tensor, target.initializer.add(), folder)


def _clear_negative_sizes(message: Any) -> None:
    """Make negative dimensions unknown in all types of a ModelProto. onnx ends the process if a Slice reads one."""
    graphs = [graph for root in (message.graph, *message.functions) for graph in nested_graphs(root)]
    types = [info.type for graph in graphs for info in graph.value_info]
    for graph in graphs:
        if isinstance(graph, GraphProto):  # inputs and outputs of a function have no types of their own
            types += [info.type for info in (*graph.input, *graph.output)]
    while types:
        value_type = types.pop()
        kind = value_type.WhichOneof("value")
        if kind in {"sequence_type", "optional_type"}:
            types.append(getattr(value_type, kind).elem_type)
        elif kind in {"tensor_type", "sparse_tensor_type"}:
            for dim in getattr(value_type, kind).shape.dim:
                if dim.dim_value < 0:
                    dim.ClearField("dim_value")


def _copy_tensor_stripped(source: Any, target: Any, folder: Path | None) -> None:
    keeps_data = math.prod(source.dims) <= _VISIBLE_ELEMENTS.get(source.data_type, -1)
    if keeps_data and not is_external(source):
        target.CopyFrom(source)
        return
    target.name, target.data_type = source.name, source.data_type
    target.dims.extend(source.dims)
    if keeps_data:
        with suppress(ModelError, OSError):  # the error is raised when the value is needed
            target.raw_data = tensor_value(source, folder).tobytes()


# Types in functions: on inlined copies, as far as all calls agree.

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


def _inline_marked_functions(message: Any) -> tuple[Any, list[tuple[int, int]]]:
    """Return a copy of a ModelProto with its functions inlined and their nodes marked, and the origins of the marks.

    The origin of the number after `NODE_MARK` is the index of the function and of the node in it, counted through the
    bodies in the order of `nested_graphs`. Raise one of `INFERENCE_ERRORS` if a function cannot be inlined.
    """
    marked_message = deepcopy(message)
    origins: list[tuple[int, int]] = []
    for index, function in enumerate(marked_message.functions):
        for node_index, node in enumerate(node for graph in nested_graphs(function) for node in graph.node):
            node.doc_string = f"{NODE_MARK}{len(origins)}"
            origins.append((index, node_index))
    return inliner.inline_local_functions(marked_message), origins


def _add_function_types(functions: Sequence[Any], inlined_message: Any, origins: Sequence[tuple[int, int]]) -> None:
    """Add to `functions`, and to the bodies in them, the types that their values have in `inlined_message`.

    `inlined_message` and `origins` are the results of `_inline_marked_functions`, with types added.
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
