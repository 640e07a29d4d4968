"""Conversions of models: upgrade to a newer opset, and inlining of functions.

An upgrade uses onnx's converter on a message without weight data, and checks the result.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from onnx import NodeProto, checker, defs, helper, inliner, version_converter

from graphquant.errors import ModelError
from graphquant.formats.onnx.emitter import FREE_INITIALIZERS_IR_VERSION, emit_message, node_bodies, topological_order
from graphquant.formats.onnx.file_writer import external_tensors
from graphquant.formats.onnx.index import retain_entries
from graphquant.formats.onnx.reader import model_from_message
from graphquant.formats.onnx.runner import OnnxRunner
from graphquant.formats.onnx.shape_inference import (
    HIDDEN_DOMAIN,
    INFERENCE_ERRORS,
    NODE_MARK,
    infer_types,
    nested_graphs,
    resolve_computed_shapes,
)
from graphquant.formats.onnx.tensors import (
    DEFAULT_DOMAINS,
    first_line,
    is_external,
    runtime_reason,
    tensor_bytes,
    type_and_shape,
)
from graphquant.ir import TensorRef, fully_known_shape
from graphquant.qdq.onnx_qdq import MICROSOFT_DOMAIN

if TYPE_CHECKING:
    from graphquant.formats import InputSpec
    from graphquant.ir import Model, OpKey, Shape
    from graphquant.numerics import Array

MAX_VISIBLE_ELEMENTS = 1 << 10
"""Maximum number of elements of an initializer that the converter sees, as it may be a shape, axes or scales."""

MAX_INPUT_ELEMENTS = 1 << 26  # maximum number of elements of a synthetic input

MAX_CHECKED_WEIGHT_BYTES = 1 << 28
"""Maximum size of external weights that the check of an upgrade reads, once for each of two sessions. Larger models get
synthetic weights as inputs."""

SYNTHETIC_WEIGHT_PERIOD = 1_000_003  # number of values after which they repeat; no usual size divides it
SYNTHETIC_WEIGHT_STD = 0.02
"""Standard deviation of synthetic weights, with which products of a few thousand values keep their size."""

CONVERTER_ERRORS: tuple[type[Exception], ...] = (*INFERENCE_ERRORS, version_converter.ConvertError)
"""Exceptions of onnx's converter and checker, which have no common base class."""

RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-3, 1e-4
"""Tolerances for float outputs; fusions in another opset round differently."""


def upgrade_opset(model: Model, opset: int) -> Model:
    """Return the model at `opset` of the default domain, or the model itself if it has that opset or a newer one.

    Raises:
        ModelError: onnx cannot convert the model, or the result is invalid, does not run, or computes other outputs.
    """
    if model.opset >= opset:
        return model
    fail = partial(_upgrade_error, model, opset)
    source = model.source.message
    light, hoisted = _hoist_weights(source)
    _sort_nodes(model, light.graph.node)
    # With an older IR version, the converter ignores initializers.
    light.ir_version = max(light.ir_version, FREE_INITIALIZERS_IR_VERSION)
    if any(True for _ in external_tensors(light)):
        raise fail("external data inside its functions, or of one name in two bodies, is not converted")
    _hide_runtime_ops(light)
    try:
        converted = _convert(light, opset)
    except CONVERTER_ERRORS as error:
        raise fail(f"onnx reports: {first_line(error)}") from error
    for function in converted.functions:
        if changed_op := _raise_function_opset(function, opset):
            raise fail(f"{changed_op} in its function {function.name!r} has another meaning there")
    min_ir_version = helper.find_min_ir_version_for(converted.opset_import, ignore_unknown=True)
    converted.ir_version = max(source.ir_version, min_ir_version)
    try:
        checker.check_model(converted)
    except CONVERTER_ERRORS as error:
        raise fail(f"the result is not valid: {first_line(error)}") from error
    _show_runtime_ops(light)
    _show_runtime_ops(converted)
    is_large = sum(map(tensor_bytes, external_tensors(source))) > MAX_CHECKED_WEIGHT_BYTES
    is_checked = is_large and _passes_check_without_weights(light, converted, opset, {entry.name for entry in hoisted})
    try:
        _restore_weights(source, converted, hoisted)
    except KeyError as error:
        raise fail(f"onnx's converter changed the node {error} around a weight") from error
    result = model_from_message(converted, path=model.path, folder=model.source.folder)
    if not is_checked:
        _check_upgrade(model, result, opset)
    return result


def _sort_nodes(model: Model, nodes: Any) -> None:
    """Move each of the main graph's `nodes` after those that it reads, as onnx requires and ONNX Runtime does not."""
    order = topological_order(model.main, model.source.graphs[""].node_names)
    ranks = {output.name: rank for rank, name in enumerate(order) for output in model.main.op(name).outputs}
    # A node without outputs has no readers, so it may be last.
    ordered = sorted(nodes, key=lambda node: ranks.get(next(filter(None, node.output), ""), len(order)))
    if any(node is not moved for node, moved in zip(nodes, ordered, strict=True)):
        copies = [NodeProto.FromString(node.SerializeToString()) for node in ordered]
        del nodes[:]
        nodes.extend(copies)


def _convert(message: Any, opset: int) -> Any:
    """Return the message as onnx converts it to `opset`, with the parts that its converter drops."""
    complete = type(message).FromString(message.SerializeToString())
    for value in (*complete.graph.input, *complete.graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.shape.SetInParent()  # only the checker requires a shape
    checker.check_model(complete)  # attributes of a wrong type crash the converter
    converted = version_converter.convert_version(message, opset)
    # With inferred types, ONNX Runtime joins an Add and a LayerNormalization, which takes longer than both.
    for graph, source in zip(nested_graphs(converted.graph), nested_graphs(message.graph), strict=True):
        del graph.value_info[:]
        graph.value_info.extend(source.value_info)
    for field in ("functions", "training_info"):
        if not getattr(converted, field):
            getattr(converted, field).extend(getattr(message, field))
    return converted


def _hide_runtime_ops(message: Any) -> None:
    """Move ops of the default domain that only ONNX Runtime knows to a domain that onnx ignores.

    Those are SimplifiedLayerNormalization, and LayerNormalization before opset 17.
    """
    opset = max((entry.version for entry in message.opset_import if entry.domain in DEFAULT_DOMAINS), default=1)
    nodes = [node for graph in nested_graphs(message.graph) for node in graph.node if node.domain in DEFAULT_DOMAINS]
    hidden = {node.op_type for node in nodes if not defs.has(node.op_type, opset, "")}
    for node in nodes:
        node.domain = HIDDEN_DOMAIN if node.op_type in hidden else node.domain
    if hidden:
        message.opset_import.add(domain=HIDDEN_DOMAIN, version=1)


def _show_runtime_ops(message: Any) -> None:
    """Restore the domain of ops that were hidden."""
    for node in (node for graph in nested_graphs(message.graph) for node in graph.node):
        node.domain = "" if node.domain == HIDDEN_DOMAIN else node.domain
    retain_entries(message.opset_import, lambda entry: entry.domain != HIDDEN_DOMAIN)


def _raise_function_opset(function: Any, opset: int) -> str:
    """Raise the opset of a function, which onnx's converter ignores; return an op whose meaning changes, or ""."""
    nodes = [node for graph in nested_graphs(function) for node in graph.node if node.domain in DEFAULT_DOMAINS]
    for entry in function.opset_import:
        if entry.domain not in DEFAULT_DOMAINS or entry.version >= opset:
            continue
        if changed := next((node for node in nodes if _has_changed(node.op_type, entry.version, opset)), None):
            return str(changed.op_type)
        entry.version = opset
    return ""


def _has_changed(op_type: str, old_opset: int, opset: int) -> bool:
    """Return True if an op has other inputs or attributes in another opset, or is missing in one of them."""
    try:
        return _op_signature(op_type, old_opset) != _op_signature(op_type, opset)
    except defs.SchemaError:
        return True


def _op_signature(op_type: str, opset: int) -> tuple[Any, ...]:
    """Return the inputs and attributes of an op. For its outputs, newer opsets only add types."""
    schema = defs.get_schema(op_type, opset, "")
    attributes = {name: (attr.required, str(attr.default_value)) for name, attr in schema.attributes.items()}
    return attributes, [(parameter.name, parameter.option) for parameter in schema.inputs], len(schema.outputs)


def encode_skeleton(model: Model) -> str:
    """Return the source message without its larger weights, as base64. An upgrade keeps the weights by name."""
    light, _ = _hoist_weights(model.source.message)
    return base64.b64encode(zlib.compress(light.SerializeToString(deterministic=True), 9)).decode()


BodyPath = tuple[tuple[str, str], ...]
"""Path of a body from outside in: the first output of the node that owns each body, and the attribute."""


class _HoistedWeight(NamedTuple):
    """A weight that the converter sees as an input of the model."""

    path: BodyPath  # the body that contains the weight; () is the main graph
    name: str  # name of its value
    proto: Any  # the TensorProto of an initializer, or the NodeProto of a Constant
    adds_input: bool  # true if the input is new; initializers may already be inputs


def _hoist_weights(source: Any) -> tuple[Any, list[_HoistedWeight]]:
    """Return a copy for the converter with inputs in place of the larger weights, and these weights."""
    light = deepcopy(source)
    inputs = {info.name for info in light.graph.input}
    nested = _graphs_with_paths(light.graph)
    name_counts = Counter(tensor.name for graph, _ in nested for tensor in graph.initializer)
    name_counts.update(name for graph, _ in nested for node in graph.node for name in node.output)
    hoisted: list[_HoistedWeight] = []
    for graph, path in reversed(nested):  # inner bodies first: rebuilding a list of nodes copies their bodies
        large_constants = [
            (proto, name, tensor)
            for proto, name, tensor in _constant_tensors(graph)
            if (is_external(tensor) or math.prod(tensor.dims) > MAX_VISIBLE_ELEMENTS)
            and (not path or name_counts[name] == 1)
        ]
        for proto, name, tensor in large_constants:
            copy = deepcopy(proto)
            hoisted.append(
                _HoistedWeight(path=path, name=name, proto=copy, adds_input=bool(path) or name not in inputs)
            )
            if hoisted[-1].adds_input:
                light.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        hoisted_names = {name for _, name, _ in large_constants}
        retain_entries(graph.initializer, lambda tensor, hoisted_names=hoisted_names: tensor.name not in hoisted_names)  # type: ignore[misc]  # the default
        retain_entries(
            graph.node,
            lambda node, hoisted_names=hoisted_names: (  # type: ignore[misc]  # the same
                node.op_type != "Constant" or not hoisted_names.intersection(node.output)
            ),
        )
    return light, hoisted


def _graphs_with_paths(main: Any) -> list[tuple[Any, BodyPath]]:
    """Return the graph and all bodies in it, outer ones first."""
    entries: list[tuple[Any, BodyPath]] = [(main, ())]
    for graph, path in entries:  # grows while bodies are visited
        for node in graph.node:
            first_output = next(iter(node.output), "")
            entries += [(body, (*path, (first_output, attr))) for attr, body in node_bodies(node).items()]
    return entries


def _constant_tensors(graph: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield initializers and Constant nodes: the message, the name of its value, and its tensor."""
    yield from ((tensor, tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in DEFAULT_DOMAINS and len(node.output) == 1:
            yield from ((node, node.output[0], attr.t) for attr in node.attribute if attr.name == "value")


def _restore_weights(source: Any, converted: Any, hoisted: Sequence[_HoistedWeight]) -> None:
    """Restore the parts that the converter drops: weights in their order, sparse initializers and annotations.

    Raises a KeyError if the body of a weight does not exist any more.
    """
    graphs_by_path = {path: graph for graph, path in _graphs_with_paths(converted.graph)}
    for weight in reversed(hoisted):  # Constants come before all nodes that may read them
        if isinstance(weight.proto, NodeProto):
            graphs_by_path[weight.path].node.insert(0, weight.proto)
        elif weight.path:
            graphs_by_path[weight.path].initializer.insert(0, weight.proto)
    graph = converted.graph
    main_weights = {w.name: w.proto for w in hoisted if not w.path and not isinstance(w.proto, NodeProto)}
    remaining = {tensor.name: tensor for tensor in graph.initializer}
    names = [tensor.name for tensor in source.graph.initializer]
    restored = [main_weights.get(name) or remaining.get(name) for name in names]
    initializers = [tensor for tensor in restored if tensor is not None]
    initializers += [tensor for name, tensor in remaining.items() if name not in set(names)]
    added_names = {weight.name for weight in hoisted if weight.adds_input}
    inputs = [info for info in graph.input if info.name not in added_names]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(initializers)
    graph.input.extend(inputs)
    for field in ("sparse_initializer", "quantization_annotation"):
        if not getattr(graph, field):
            getattr(graph, field).extend(getattr(source.graph, field))


def _passes_check_without_weights(source: Any, converted: Any, opset: int, weights: Container[str]) -> bool:
    """Check ModelProtos with weights as inputs; return False on any error, because an op may accept only constants."""
    source_model, upgraded_model = (model_from_message(deepcopy(message)) for message in (source, converted))
    old_nodes, new_nodes = (
        [node for graph in nested_graphs(message.graph) for node in graph.node] for message in (source, converted)
    )
    op_types = {node.op_type for node in old_nodes if node.domain in DEFAULT_DOMAINS and defs.has(node.op_type, opset)}
    try:
        if old_nodes == new_nodes and not any(_has_changed(name, source_model.opset, opset) for name in op_types):
            OnnxRunner(upgraded_model).start()  # the same ops with the same meaning have the same outputs
        else:
            _check_upgrade(source_model, upgraded_model, opset, weights)
    except ModelError:
        return False
    return True


def _check_upgrade(source_model: Model, upgraded_model: Model, opset: int, weights: Container[str] = ()) -> None:
    """Start both models in onnxruntime, and compare their outputs if the source accepts synthetic inputs.

    The inputs that `weights` names get synthetic weights. Raises a ModelError if the models differ.
    """
    fail = partial(_upgrade_error, source_model, opset)
    old_runner, new_runner = OnnxRunner(source_model), OnnxRunner(upgraded_model)
    old_runner.start()
    try:
        new_runner.start()
    except ModelError as error:
        raise fail(f"onnxruntime rejects the result: {runtime_reason(error)}") from error
    rng = np.random.default_rng(0)
    input_values = {spec.name: _synthetic_input(spec, rng) for spec in new_runner.inputs if spec.name not in weights}
    input_values |= _synthetic_weights([spec for spec in new_runner.inputs if spec.name in weights], rng)
    feeds = {name: value for name, value in input_values.items() if value is not None}
    # Random ops and inputs without suitable values allow no comparison.
    is_random = any(op.kind == "random" for graph in source_model.graphs.values() for op in graph.ops())
    if is_random or len(feeds) < len(input_values):
        return
    try:
        expected = old_runner.run(feeds)
    except ModelError:
        return  # The source rejects sizes of 1 or these values, so the comparison is impossible.
    try:
        results = new_runner.run(feeds)
    except ModelError as error:
        raise fail(f"the result does not run: {runtime_reason(error)}") from error
    for name, value in expected.items():
        actual, is_float = results[name], value.dtype.kind == "f"
        close = partial(np.allclose, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE, equal_nan=True)
        same_type = (value.shape, value.dtype) == (actual.shape, actual.dtype)
        if not same_type or not (close(value, actual) if is_float else np.array_equal(value, actual)):
            raise fail(f"its output {name!r} differs afterwards")


def _synthetic_input(spec: InputSpec, rng: np.random.Generator) -> Array | None:
    """Return a seeded input with unknown sizes set to 1, None if suitable values are unknown."""
    if spec.shape is None:
        return None
    shape = tuple(size if size is not None else 1 for size in spec.shape)
    if math.prod(shape) > MAX_INPUT_ELEMENTS:
        return None
    if spec.dtype.startswith("float") and hasattr(np, spec.dtype):
        return np.asarray(rng.standard_normal(shape)).astype(spec.dtype)
    if spec.dtype == "bool" or spec.dtype.startswith(("int", "uint")):
        return None if hasattr(ml_dtypes, spec.dtype) else np.ones(shape, spec.dtype)
    return None


def _synthetic_weights(specs: Iterable[InputSpec], rng: np.random.Generator) -> dict[str, Array | None]:
    """Return values by name, None if suitable ones are unknown; all of one type share the memory of the largest."""
    largest_by_type: dict[str, Array | None] = {}
    values: dict[str, Array | None] = {}
    shapes = {spec: fully_known_shape(spec.shape) or () for spec in specs}
    for spec in sorted(shapes, key=lambda spec: math.prod(shapes[spec]), reverse=True):
        size = math.prod(shapes[spec])
        if spec.dtype not in largest_by_type:
            period = _synthetic_input(replace(spec, shape=(SYNTHETIC_WEIGHT_PERIOD,)), rng)
            if period is not None and period.dtype.kind == "f":
                period *= period.dtype.type(SYNTHETIC_WEIGHT_STD)
            largest_by_type[spec.dtype] = None if period is None else np.resize(period, size)
        largest = largest_by_type[spec.dtype]
        values[spec.name] = None if largest is None else largest[:size].reshape(shapes[spec])
    return values


def _upgrade_error(model: Model, opset: int, reason: str) -> ModelError:
    return ModelError(
        f"The model cannot be upgraded from opset {model.opset} to {opset}: {reason}. Use a rule that needs no newer "
        "opset (one scale per tensor instead of per channel, or per channel instead of per block), or export the model "
        f"at opset {opset}."
    )


def inline_functions(model: Model) -> tuple[Model, dict[OpKey, OpKey]]:
    """Return the model without functions, and for each of its ops the op of `model` of which it is a copy.

    If onnx cannot inline a function, all functions stay. Raises a ModelError if the model cannot be emitted.
    """
    message = emit_message(model).message
    op_keys: list[OpKey] = []
    for graph in model_from_message(message, path=model.path, folder=model.source.folder).graphs.values():
        for op in graph.ops():
            if isinstance(op.source, NodeProto):
                op.source.doc_string = f"{NODE_MARK}{len(op_keys)}"
                op_keys.append((graph.name, op.name))
    try:
        inlined_model = model_from_message(
            inliner.inline_local_functions(message), path=model.path, folder=model.source.folder
        )
    except INFERENCE_ERRORS:
        return model, {}
    originals = {}
    for graph in inlined_model.graphs.values():
        for op in graph.ops():
            if isinstance(op.source, NodeProto) and op.source.doc_string.startswith(NODE_MARK):
                originals[graph.name, op.name] = op_keys[int(op.source.doc_string.removeprefix(NODE_MARK))]
    return inlined_model, originals


def _drop_partial_types(graph: Any) -> None:
    """Remove types without known sizes of the outputs of com.microsoft's ops, which onnxruntime infers if absent."""
    inferred = {name for node in graph.node if node.domain == MICROSOFT_DOMAIN for name in node.output}

    def is_kept(info: Any) -> bool:
        return info.name not in inferred or fully_known_shape(type_and_shape(info.type)[1]) is not None

    retain_entries(graph.value_info, is_kept)


def bind_input_shapes(model: Model, shapes: Mapping[str, Shape]) -> Model:
    """Return a copy of the model whose tensors have the shapes that follow from the given shapes of its inputs.

    Only the known shapes change. Tensors of functions keep theirs. Raises a ModelError if the model cannot be emitted.
    """
    emission = emit_message(model, defer_weights=True)
    message = emission.message
    for graph in nested_graphs(message.graph):
        # Declared sizes without a number would keep the inferred ones from being known.
        _drop_partial_types(graph)
        for info in (*graph.value_info, *graph.output, *(graph.input if graph is not message.graph else ())):
            if None in (type_and_shape(info.type)[1] or ()):
                info.type.tensor_type.ClearField("shape")
    for info in message.graph.input:
        if info.name in shapes and info.type.HasField("tensor_type"):
            del info.type.tensor_type.shape.dim[:]
            for size in shapes[info.name]:
                info.type.tensor_type.shape.dim.add(dim_value=size)
    bound, typed_message = model.copy(), infer_types(message, model.source.folder)
    resolve_computed_shapes(typed_message)
    pending = [("", typed_message.graph)]
    for name, proto in pending:  # grows while bodies are visited
        types = {info.name: type_and_shape(info.type)[1] for info in (*proto.value_info, *proto.output, *proto.input)}
        nodes = {value: node for node in proto.node for value in node.output if value}
        graph = bound.graphs[name]
        for op in list(graph.ops()):
            values = [emission.value_name(model, TensorRef(name, op.name, port)) for port in range(len(op.outputs))]
            outputs = tuple(
                replace(output, shape=types.get(value) or output.shape)
                for value, output in zip(values, op.outputs, strict=True)
            )
            if outputs != op.outputs:
                graph.replace_op(replace(op, outputs=outputs))
            node = next((nodes[value] for value in values if value in nodes), None)
            bodies = {} if node is None else node_bodies(node)
            pending += [(call.graph, bodies[call.attr]) for call in op.calls if call.attr in bodies]
    return bound
