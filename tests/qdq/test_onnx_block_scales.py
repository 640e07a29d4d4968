"""Blocks with scales of few bits, floats of 4 bits and integers of 2, as ONNX and OpenVINO compute with them."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import graphquant as gq
from graphquant.errors import EmptyResultError
from graphquant.formats import onnx as onnx_format
from graphquant.formats.onnx.runtime import RUNTIME_ERRORS
from graphquant.ir import Parameters
from graphquant.numerics import QParams, dequantize, quantize, split_block_scales
from graphquant.qdq import read_qparams
from graphquant.quantize import SkipCode

RULES = """description = "Weights of products"
{target}
[scheme.block]
dtype = "{dtype}"
family = "onnx-qdq"
per = "block"
block_size = {block}
{more}
[[rule]]
name = "product"
producer = {{ kind = "parameter" }}
consumer = {{ kind = "matmul", input = "weight" }}
quantize = "block"
"""

FORMATS = {
    "MXFP4": ("float4_e2m1fn", 32, "float8_e8m0fnu", "openvino", 24),
    "MXFP8": ("float8_e4m3fn", 32, "float8_e8m0fnu", "openvino", 24),
    "MXFP8 of larger range": ("float8_e5m2", 32, "float8_e8m0fnu", "tensorrt", 24),
    "NVFP4": ("float4_e2m1fn", 16, "float8_e4m3fn", "tensorrt", 23),
    "float4": ("float4_e2m1fn", 32, "", "openvino", 23),
    "int4 with float8 scales": ("int4", 16, "float8_e4m3fn", "", 21),
}
"""Type, block, type of the scales, target, and opset of the result."""

ROWS, COLUMNS = 96, 6


def write_product(path: Path, weights: np.ndarray, opset: int = 21) -> Path:
    """Write a product with a matrix."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", weights.shape[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", weights.shape[1]])],
        [numpy_helper.from_array(weights, "w")],
    )
    known_versions = helper.OP_SET_ID_VERSION_MAP
    opsets = [helper.make_opsetid("", opset)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=known_versions["ai.onnx", opset]), path)
    return path


def write_format_rules(path: Path, dtype: str, block: int, scale_type: str = "", target: str = "") -> Path:
    """Write a rule file for one format."""
    more = f'args = {{ scale_type = "{scale_type}" }}' if scale_type else ""
    target = f'target = "{target}"' if target else ""
    path.write_text(RULES.format(dtype=dtype, block=block, more=more, target=target))
    return path


def extreme_weights(seed: int) -> np.ndarray:
    """Noise of very different magnitudes, with zeros of both signs, denormals, and a block of zeros."""
    rng = np.random.default_rng(seed)
    weights = rng.normal(size=(ROWS, COLUMNS)) * np.exp(rng.normal(size=(ROWS, COLUMNS)) * 4 * (seed % 3))
    weights[:32, 0] = 0
    weights[3, 1:5] = [1e30, -1e30, 1e-40, -0.0]
    weights[64:, 2] *= 1e-30
    return weights.astype(np.float32)


def dequantized(model: gq.Model) -> QParams:
    """Parameters of the DequantizeLinear that a product reads."""
    graph = model.graphs[""]
    (product,) = (op for op in graph.ops() if op.kind == "matmul")
    weight = graph.slots(product.name)[1]
    assert weight is not None
    params = read_qparams(graph, model.op(weight), Parameters(model))
    assert isinstance(params, QParams)
    return params


def knows_opset(opset: int) -> bool:
    """Return True if the installed ONNX Runtime loads models of an opset."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "one", values[:1], values[1:])
    message = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    try:
        onnxruntime.InferenceSession(message.SerializeToString(), providers=["CPUExecutionProvider"])
    except RUNTIME_ERRORS:
        return False
    return True


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", [name for name, (*_, opset) in FORMATS.items() if knows_opset(opset)])
def test_formats(tmp_path: Path, name: str, seed: int) -> None:
    """Written weights have the same bits in onnx's reference, OpenVINO and numpy, and are read back and stripped."""
    dtype, block, scale_type, target, opset = FORMATS[name]
    weights = extreme_weights(seed)
    rules = write_format_rules(tmp_path / "r.toml", dtype, block, scale_type, target)
    result = gq.insert(write_product(tmp_path / "float.onnx", weights), rules=rules, validate=False)
    (pair,) = result.inserted
    assert isinstance(pair.params, QParams)
    message = onnx_format.emit(result.model)
    onnx.checker.check_model(message, full_check=True)
    assert message.opset_import[0].version == opset
    expected = dequantize(quantize(weights, pair.params), pair.params)
    identity = np.eye(ROWS, dtype=np.float32)
    np.testing.assert_array_equal(ReferenceEvaluator(message).run(None, {"x": identity})[0], expected)
    largest = pair.params.type.limits()[1]
    in_range = pair.params.scale.repeat(block, 0)[:ROWS] * (largest * 2) > np.abs(weights)
    assert in_range.all()
    saved = result.save(tmp_path / "quantized.onnx")
    if find_spec("openvino"):  # the environments for releases of ONNX Runtime lack it
        import openvino

        compiled = openvino.Core().compile_model(saved, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        np.testing.assert_allclose(compiled({"x": identity})[0], expected, rtol=1e-6)
    written = dequantized(gq.load(saved))
    np.testing.assert_array_equal(written.scale, pair.params.scale)
    assert written.type == pair.params.type
    stripped = onnx_format.emit(gq.strip(saved).model)
    assert [node.op_type for node in stripped.graph.node] == ["MatMul"]
    assert [initializer.name for initializer in stripped.graph.initializer] == ["w"]
    np.testing.assert_array_equal(numpy_helper.to_array(stripped.graph.initializer[0]), expected)


@pytest.mark.parametrize("target", ["", "onnxruntime", "qnn"])
@pytest.mark.parametrize("name", ["MXFP4", "MXFP8", "NVFP4", "float4"])
def test_runtimes_without_kernels(tmp_path: Path, name: str, target: str) -> None:
    """A type that no kernel of the target computes with is skipped, and the reason names runtimes that have one."""
    dtype, block, scale_type, *_ = FORMATS[name]
    model = write_product(tmp_path / "float.onnx", extreme_weights(0))
    rules = write_format_rules(tmp_path / "r.toml", dtype, block, scale_type, target)
    (skip,) = gq.plan(model, rules=rules).skips
    assert skip.code is SkipCode.SCHEME
    assert "OpenVINO 2026.4 and TensorRT 10.8" in skip.reason
    with pytest.raises(EmptyResultError):
        gq.insert(model, rules=rules)


@pytest.mark.parametrize(("opset", "stored"), [(21, TensorProto.INT4), (25, TensorProto.INT2)])
def test_two_bits(tmp_path: Path, opset: int, stored: int) -> None:
    """An int2 weight takes 2 bits from opset 25 on, and 4 bits below."""
    weights = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    model = write_product(tmp_path / "float.onnx", weights, opset)
    result = gq.insert(model, rules=write_format_rules(tmp_path / "r.toml", "int2", 16))
    message = onnx_format.emit(result.model)
    (tensor,) = (each for each in message.graph.initializer if each.data_type == stored and len(each.raw_data) > 60)
    assert len(tensor.raw_data) == ROWS * COLUMNS * (2 if stored == TensorProto.INT2 else 4) // 8
    expected = dequantize(quantize(weights, params := result.inserted[0].params), params)
    identity = np.eye(ROWS, dtype=np.float32)
    np.testing.assert_array_equal(ReferenceEvaluator(message).run(None, {"x": identity})[0], expected)
    np.testing.assert_array_equal(dequantized(gq.load(result.save(tmp_path / "q.onnx"))).scale, params.scale)


@pytest.mark.parametrize("seed", range(20))
def test_split_scales(seed: int) -> None:
    """Products of split scales are split again into the same products."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(7, 5)) * 3 + rng.normal() * 20)
    numbers, tensor_scale = split_block_scales(scale)
    products = numbers.astype(np.float32) * tensor_scale
    again = split_block_scales(products.astype(np.float64))
    np.testing.assert_array_equal(again[0].astype(np.float32) * again[1], products)
    large = scale > scale.max() / 1000
    assert (np.abs(products - scale)[large] <= scale[large] / 16 * 1.001).all()
