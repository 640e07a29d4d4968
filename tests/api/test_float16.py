"""float16 models: weights are stored as integers with float16 scales, or stay float where activations do."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.onnx_models import run_onnx

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import EmptyResultError, UsageError
from graphquant.formats import onnx as onnx_format
from graphquant.ir import Parameters
from graphquant.numerics import IntType, dequantize, qparams_from_scale, quantize, round_scale_to_float16
from graphquant.quantize import SkipCode

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float16[1,4,8,8] x, int64[2] i) => (float16[1,4,8,32] y, float16[2,32] e)
{ c = Conv<pads = [1,1,1,1]>(x, k) y = MatMul(c, w) e = Gather(t, i) }
"""


@pytest.fixture
def float16_path(tmp_path):
    """Return the path of a float16 model with a convolution, a MatMul and a Gather."""
    rng = np.random.default_rng(0)
    message = onnx.parser.parse_model(TEXT)
    for name, shape in (("k", (4, 4, 3, 3)), ("w", (8, 32)), ("t", (64, 32))):
        message.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float16), name))
    onnx.save(message, tmp_path / "half.onnx")
    return tmp_path / "half.onnx"


@pytest.mark.parametrize("float_weights", [False, True])
@pytest.mark.parametrize(
    ("rules", "opset", "names"),
    [
        ("weight_only", 19, "kw"),
        ("weight_only_int8", 21, "kw"),
        ("weight_only_int4", 21, "kw"),
        ("tables_int4", 21, "t"),
    ],
)
def test_weights(float16_path, rules, opset, names, float_weights):
    """The opset is raised as needed, and the outputs match those of a model with rounded weights."""
    result = gq.insert(float16_path, rules=rules, data="random:2", float_weights=float_weights)
    assert sorted(insertion.site.tensor.op for insertion in result.inserted) == sorted(names)
    message = onnx_format.emit(result.model)
    onnx.checker.check_model(message, full_check=True)
    assert message.opset_import[0].version == opset
    reference = onnx.load(float16_path)
    parameters = Parameters(result.source)
    rounded = {}
    for insertion in result.inserted:
        params, tensor = insertion.params, insertion.site.tensor
        assert np.array_equal(params.scale, params.scale.astype(np.float16))
        rounded[tensor.op] = dequantize(quantize(parameters.value(tensor), params), params).astype(np.float16)
    for tensor in reference.graph.initializer:
        if tensor.name in rounded:
            tensor.CopyFrom(numpy_helper.from_array(rounded[tensor.name], tensor.name))
    x = np.random.default_rng(1).normal(size=(1, 4, 8, 8)).astype(np.float16)
    feeds = {"x": x, "i": np.array([1, 5])}
    # MatMulNBits rounds activations to int8. The optimizer creates it from pairs.
    unoptimized_sqnr = 40 if any(node.op_type == "MatMulNBits" for node in message.graph.node) else 55
    for level, min_sqnr in (("ORT_DISABLE_ALL", unoptimized_sqnr), ("ORT_ENABLE_ALL", 40)):
        for actual, expected in zip(run_onnx(message, feeds, level), run_onnx(reference, feeds, level), strict=True):
            noise = np.square(actual.astype(np.float64) - expected).mean()
            assert 10 * np.log10(np.square(expected.astype(np.float64)).mean() / max(noise, 1e-12)) > min_sqnr
    stored_params = {
        reading.op: reading.params
        for reading in summarize_model(gq.load(result.save(float16_path.with_name("out.onnx")))).quantization_ops
    }
    for insertion in result.inserted:
        assert np.array_equal(stored_params[insertion.output.op].scale, insertion.params.scale)


def test_ops_stay_float(float16_path):
    """Activations are skipped because the family does not support them, and the weights next to them with them."""
    result = gq.insert(float16_path, data="random:2", allow_empty=True)
    assert result.inserted == ()
    codes = {use: skip.code for skip in result.skips for use in skip.uses}
    assert {codes["", "c", 0], codes["", "c", 1], codes["", "y", 1]} == {SkipCode.SCHEME}
    with pytest.raises(EmptyResultError, match="float32"):
        gq.insert(float16_path, data="random:2")


@pytest.mark.parametrize(("target", "weights"), [("", 0), ("openvino", 2)])
def test_weights_for_other_backends(float16_path, target, weights):
    """Weights are quantized for a backend that computes on float16 itself."""
    rules = f"""target = "{target}"
[scheme.s]
dtype = "int8"
[[rule]]
name = "input"
consumer = {{ kind = "conv|matmul", input = "input|weight" }}
quantize = "s"
"""
    assert len(gq.plan(float16_path, rules=[rules]).sites) == weights


@pytest.mark.parametrize("float_weights", [False, True])
def test_requantized_weights_are_equal(float16_path, tmp_path, float_weights):
    """Stored weights are dequantized to float16, and quantized again to the same values; float weights are found."""
    first = gq.insert(float16_path, rules="weight_only", float_weights=float_weights)
    saved = first.save(tmp_path / "once.onnx")
    assert gq.insert(saved, rules="weight_only").inserted == ()
    again = gq.insert(saved, rules="weight_only", requantize=True, float_weights=float_weights)
    assert [new.site.tensor for new in again.inserted] == [old.site.tensor for old in first.inserted]
    for old, new in zip(first.inserted, again.inserted, strict=True):
        assert np.array_equal(old.params.scale, new.params.scale)
    if float_weights:
        assert onnx_format.emit(gq.strip(saved).model).graph == onnx.load(float16_path).graph


@pytest.mark.parametrize("scale", [1e-6, 7e4])
def test_scales_beyond_float16(scale):
    """Scales outside the range of float16 are rejected; others are rounded."""
    with pytest.raises(UsageError, match="float16"):
        round_scale_to_float16(
            qparams_from_scale(np.float32([1.0, scale]), np.zeros(2, np.int32), IntType(8, signed=True), axis=0)
        )
    rounded = round_scale_to_float16(
        qparams_from_scale(np.float32([1.0, 0.1]), np.zeros(2, np.int32), IntType(8, signed=True), axis=0)
    )
    assert rounded.scale.tolist() == [1.0, float(np.float16(0.1))]


def test_weights_too_small(tmp_path):
    """A weight with a scale below the range of float16 is skipped."""
    message = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 19]> g (float16[2,4] x) => (float16[2,4] y) { y = MatMul(x, w) }'
    )
    message.graph.initializer.append(numpy_helper.from_array(np.full((4, 4), 1e-4, np.float16), "w"))
    onnx.save(message, tmp_path / "small.onnx")
    result = gq.insert(tmp_path / "small.onnx", rules="weight_only", allow_empty=True)
    assert result.inserted == ()
    assert [skip.code for skip in result.skips] == [SkipCode.SCHEME]
