"""Models raised to a newer opset: by onnx's converter, without the weights' data, and checked afterwards."""

from __future__ import annotations

import base64
import math
import zlib
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError
from onnx import ModelProto, checker, helper, shape_inference, version_converter

from graphquant.errors import ModelError
from graphquant.formats.onnx.files import external_tensors
from graphquant.formats.onnx.read import index
from graphquant.formats.onnx.run import OnnxRunner
from graphquant.formats.onnx.tensors import first_line, is_external

if TYPE_CHECKING:
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
    light, weights, added = _lightened(source)
    if any(True for _ in external_tensors(light)):
        raise _failed(model, opset, "external data inside its bodies cannot be converted")
    try:
        converted = version_converter.convert_version(light, opset)
    except CONVERTER_ERRORS as error:
        raise _failed(model, opset, f"onnx's converter says: {first_line(error)}") from error
    for field in ("functions", "training_info"):
        if not getattr(converted, field):
            getattr(converted, field).extend(getattr(source, field))
    least = helper.find_min_ir_version_for(converted.opset_import, ignore_unknown=True)
    converted.ir_version = max(source.ir_version, least)
    try:
        checker.check_model(converted)
    except CONVERTER_ERRORS as error:
        raise _failed(model, opset, f"the result is not valid: {first_line(error)}") from error
    _restore(source, converted, weights, added)
    result = index(converted, path=model.path)
    _compare(model, result, opset)
    return result


def skeleton(model: Model) -> str:
    """The source message without its larger weights, compressed, in base64: an upgrade keeps the weights by name."""
    light = _lightened(model.source.message)[0]
    return base64.b64encode(zlib.compress(light.SerializeToString(deterministic=True), 9)).decode()


def _lightened(source: Any) -> tuple[Any, dict[str, Any], set[str]]:
    """A copy for the converter, the initializers it has as mere inputs instead, and which of these inputs are new."""
    light = ModelProto()
    light.CopyFrom(source)
    inputs = {info.name for info in light.graph.input}
    weights = {t.name: t for t in source.graph.initializer if is_external(t) or math.prod(t.dims) > SMALL}
    kept = [tensor for tensor in light.graph.initializer if tensor.name not in weights]
    del light.graph.initializer[:]
    light.graph.initializer.extend(kept)
    added = {name for name in weights if name not in inputs}
    light.graph.input.extend(
        helper.make_tensor_value_info(name, tensor.data_type, tensor.dims)
        for name, tensor in weights.items()
        if name in added
    )
    return light, weights, added


def _restore(source: Any, converted: Any, weights: dict[str, Any], added: set[str]) -> None:
    """Gives `converted` back what the converter does not carry: initializers in their order, sparse ones, notes."""
    graph = converted.graph
    now = {tensor.name: tensor for tensor in graph.initializer}
    order = [weights.get(tensor.name) or now.get(tensor.name) for tensor in source.graph.initializer]
    old = {tensor.name for tensor in source.graph.initializer}
    initializers = [tensor for tensor in order if tensor is not None] + [t for t in now.values() if t.name not in old]
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
