"""Models raised to a newer opset: by onnx's converter, without the weights' data, and checked afterwards."""

from __future__ import annotations

import base64
import math
import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto, checker, defs, helper, shape_inference, version_converter

from graphquant.errors import ModelError
from graphquant.formats.onnx.calls import graphs
from graphquant.formats.onnx.files import external_tensors
from graphquant.formats.onnx.read import index
from graphquant.formats.onnx.run import OnnxRunner
from graphquant.formats.onnx.tensors import first_line, is_external
from graphquant.formats.onnx.write import IR_FREE_INITIALIZERS, bodies, keep

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphquant.formats import InputSpec
    from graphquant.ir import Model

Array = np.ndarray[Any, Any]

SMALL = 1 << 10
"""Elements up to which the converter sees the value of an initializer: it may be a shape, axes or scales."""

MAX_FEED = 1 << 26
"""Elements of the largest input that is made up."""

CONVERTER_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    IndexError,
    DecodeError,
    checker.ValidationError,
    shape_inference.InferenceError,
    version_converter.ConvertError,
)
"""What onnx's converter and checker raise; their own kinds have no common base."""

RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""How far float outputs may differ; fusions of another opset round otherwise."""


def upgrade(model: Model, opset: int) -> Model:
    """The model at `opset` of the default domain: the model itself if it is there already.

    Raises:
        ModelError: onnx cannot convert it, or the result does not check, does not run, or gives other outputs.
    """
    if model.opset >= opset:
        return model
    source = model.source.message
    light, hoisted = _lightened(source)
    light.ir_version = max(light.ir_version, IR_FREE_INITIALIZERS)  # before, the converter does not see initializers
    if any(True for _ in external_tensors(light)):
        raise _failed(
            model, opset, "external data inside its functions, or of one name in two bodies, is not converted"
        )
    try:
        converted = version_converter.convert_version(light, opset)
    except CONVERTER_ERRORS as error:
        raise _failed(model, opset, f"onnx's converter says: {first_line(error)}") from error
    for field in ("functions", "training_info"):
        if not getattr(converted, field):
            getattr(converted, field).extend(getattr(source, field))
    for function in converted.functions:
        other = _raised(function, opset)
        if other:
            raise _failed(model, opset, f"{other} in its function {function.name!r} is another op there")
    least = helper.find_min_ir_version_for(converted.opset_import, ignore_unknown=True)
    converted.ir_version = max(source.ir_version, least)
    try:
        checker.check_model(converted)
    except CONVERTER_ERRORS as error:
        raise _failed(model, opset, f"the result is not valid: {first_line(error)}") from error
    try:
        _restore(source, converted, hoisted)
    except KeyError as error:
        raise _failed(model, opset, f"onnx's converter changed the node {error} around a weight") from error
    result = index(converted, path=model.path)
    _compare(model, result, opset)
    return result


def _raised(function: Any, opset: int) -> str:
    """Raises a function, which onnx's converter leaves as it is; gives an op that means something else then, or ""."""
    entries = [entry for entry in function.opset_import if entry.domain in {"", "ai.onnx"} and entry.version < opset]
    for entry in entries:
        for node in (node for graph in graphs(function) for node in graph.node if node.domain in {"", "ai.onnx"}):
            try:
                forms = [_form(node.op_type, version) for version in (entry.version, opset)]
            except defs.SchemaError:
                return str(node.op_type)
            if forms[0] != forms[1]:
                return str(node.op_type)
        entry.version = opset
    return ""


def _form(op_type: str, opset: int) -> tuple[Any, ...]:
    """What an op takes; of what it gives, newer opsets change nothing but the types, which only become more."""
    schema = defs.get_schema(op_type, opset, "")
    attributes = {name: (attr.required, str(attr.default_value)) for name, attr in schema.attributes.items()}
    return attributes, [(one.name, one.option) for one in schema.inputs], len(schema.outputs)


def skeleton(model: Model) -> str:
    """The source message without its larger weights, compressed, in base64: an upgrade keeps the weights by name."""
    light, _ = _lightened(model.source.message)
    return base64.b64encode(zlib.compress(light.SerializeToString(deterministic=True), 9)).decode()


Path = tuple[tuple[str, str], ...]
"""Where a body is: from outside in, the first output of the node that owns it, and the attribute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hoisted:
    """A weight that the converter has as a mere input of the model.

    Attributes:
        path: The body that it is from; () is the main graph.
        name: The name of its value.
        held: The TensorProto of an initializer, or the NodeProto of a Constant.
        added: Whether the input is new: initializers may be inputs too.
    """

    path: Path
    name: str
    held: Any
    added: bool


def _lightened(source: Any) -> tuple[Any, list[_Hoisted]]:
    """A copy for the converter with inputs in place of the larger weights, and these weights."""
    light = ModelProto()
    light.CopyFrom(source)
    inputs = {info.name for info in light.graph.input}
    nested = _graphs(light.graph)
    times = Counter(name for graph, _ in nested for name in _made(graph))
    hoisted: list[_Hoisted] = []
    for graph, path in reversed(nested):  # a list of nodes that is written anew has copies of their bodies
        heavy = [
            (held, name, tensor)
            for held, name, tensor in _constants(graph)
            if (is_external(tensor) or math.prod(tensor.dims) > SMALL) and (not path or times[name] == 1)
        ]
        for held, name, tensor in heavy:
            kept = type(held)()
            kept.CopyFrom(held)
            hoisted.append(_Hoisted(path=path, name=name, held=kept, added=bool(path) or name not in inputs))
            if hoisted[-1].added:
                light.graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
        gone = {name for _, name, _ in heavy}
        keep(graph.initializer, lambda tensor, gone=gone: tensor.name not in gone)  # type: ignore[misc]  # the default
        keep(graph.node, lambda node, gone=gone: node.op_type != "Constant" or not gone.intersection(node.output))  # type: ignore[misc]  # the same
    return light, hoisted


def _graphs(main: Any) -> list[tuple[Any, Path]]:
    """The graph and all bodies in it, outer ones first."""
    found: list[tuple[Any, Path]] = [(main, ())]
    for graph, path in found:  # grows while bodies are found
        for node in graph.node:
            first = next(iter(node.output), "")
            found += [(body, (*path, (first, attr))) for attr, body in bodies(node).items()]
    return found


def _made(graph: Any) -> Iterator[str]:
    """The names that are given to values in a graph."""
    yield from (tensor.name for tensor in graph.initializer)
    yield from (name for node in graph.node for name in node.output)


def _constants(graph: Any) -> Iterator[tuple[Any, str, Any]]:
    """Initializers and Constant nodes: the message, the name of its value, and its tensor."""
    yield from ((tensor, tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in {"", "ai.onnx"} and len(node.output) == 1:
            yield from ((node, node.output[0], attr.t) for attr in node.attribute if attr.name == "value")


def _restore(source: Any, converted: Any, hoisted: Sequence[_Hoisted]) -> None:
    """Gives `converted` back what the converter does not carry: weights in their order, sparse ones, notes.

    Raises:
        KeyError: The body that a weight is from is gone.
    """
    held = {path: graph for graph, path in _graphs(converted.graph)}
    for one in reversed(hoisted):  # Constants stand before all that could read them
        if isinstance(one.held, NodeProto):
            held[one.path].node.insert(0, one.held)
        elif one.path:
            held[one.path].initializer.insert(0, one.held)
    graph = converted.graph
    weights = {one.name: one.held for one in hoisted if not one.path and not isinstance(one.held, NodeProto)}
    now = {tensor.name: tensor for tensor in graph.initializer}
    order = [weights.get(tensor.name) or now.get(tensor.name) for tensor in source.graph.initializer]
    old = {tensor.name for tensor in source.graph.initializer}
    initializers = [tensor for tensor in order if tensor is not None] + [t for t in now.values() if t.name not in old]
    added = {one.name for one in hoisted if one.added}
    inputs = [info for info in graph.input if info.name not in added]
    del graph.initializer[:], graph.input[:]
    graph.initializer.extend(initializers)
    graph.input.extend(inputs)
    for field in ("sparse_initializer", "quantization_annotation"):
        if not getattr(graph, field):
            getattr(graph, field).extend(getattr(source.graph, field))


def _compare(before: Model, after: Model, opset: int) -> None:
    """Starts both in onnxruntime, and runs them where inputs can be made up that the source takes."""
    old, new = OnnxRunner(before), OnnxRunner(after)
    old.start()
    try:
        new.start()
    except ModelError as error:
        raise _failed(before, opset, f"onnxruntime does not take the result: {_reason(error)}") from error
    rng = np.random.default_rng(0)
    made = {spec.name: _made_up(spec, rng) for spec in new.inputs}
    feeds = {name: value for name, value in made.items() if value is not None}
    random = any(op.kind == "random" for graph in before.graphs.values() for op in graph.ops())
    if random or len(feeds) < len(made):
        return
    try:
        expected = old.run(feeds)
    except ModelError:
        return  # The source does not take sizes of 1 or these values, so they prove nothing.
    try:
        results = new.run(feeds)
    except ModelError as error:
        raise _failed(before, opset, f"the result does not run: {_reason(error)}") from error
    for name, value in expected.items():
        if not _agree(value, results[name]):
            raise _failed(before, opset, f"its output {name!r} is another one afterwards")


def _made_up(spec: InputSpec, rng: np.random.Generator) -> Array | None:
    """A seeded input with unknown sizes 1, None if there is no telling what it must be."""
    if spec.shape is None:
        return None
    shape = tuple(size if size is not None else 1 for size in spec.shape)
    if math.prod(shape) > MAX_FEED:
        return None
    if spec.dtype.startswith("float") and hasattr(np, spec.dtype):
        return np.asarray(rng.standard_normal(shape)).astype(spec.dtype)
    if spec.dtype == "bool" or spec.dtype.startswith(("int", "uint")):
        return None if hasattr(ml_dtypes, spec.dtype) else np.ones(shape, spec.dtype)
    return None


def _agree(one: Array, other: Array) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    return bool(np.allclose(one, other, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True))


def _failed(model: Model, opset: int, why: str) -> ModelError:
    return ModelError(
        f"The model cannot be raised from opset {model.opset} to {opset}: {why}. Use a rule that needs no newer opset "
        "(one scale per tensor instead of per channel, or per channel instead of per block), or export the model at"
        f" opset {opset}."
    )


def _reason(error: ModelError) -> str:
    """What onnxruntime said, without the advice around it."""
    return first_line(error.__cause__ or error)
