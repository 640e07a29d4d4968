"""float16 models: their weights are stored as integers with float16 scales, their activations are left."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import UsageError
from graphquant.formats import onnx as onnx_format
from graphquant.ir import Parameters, Use
from graphquant.numerics import IntType, dequantize, qparams_from_scale, quantize, round_scale_to_float16

TEXT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float16[1,4,8,8] x, int64[2] i) => (float16[1,4,8,32] y, float16[2,32] e)
{ c = Conv<pads = [1,1,1,1]>(x, k) y = MatMul(c, w) e = Gather(t, i) }
"""


@pytest.fixture
def path(tmp_path):
    """The path of a float16 model with a convolution, a product and a table."""
    rng = np.random.default_rng(0)
    message = onnx.parser.parse_model(TEXT)
    for name, shape in (("k", (4, 4, 3, 3)), ("w", (8, 32)), ("t", (64, 32))):
        message.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float16), name))
    onnx.save(message, tmp_path / "half.onnx")
    return tmp_path / "half.onnx"


def run(message, level="ORT_ENABLE_ALL"):
    """The outputs of a ModelProto for one input."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(message.SerializeToString(), options)
    x = np.random.default_rng(1).normal(size=(1, 4, 8, 8)).astype(np.float16)
    return session.run(None, {"x": x, "i": np.array([1, 5])})


@pytest.mark.parametrize("float_weights", [False, True])
@pytest.mark.parametrize(
    ("rules", "opset", "names"),
    [
        ("weight_only", 19, "kw"),
        ("weight_only_int8", 21, "kw"),
        ("weight_only_int4", 21, "kw"),
        ("tables_int4", 21, "t"),
        ("onnxruntime", 19, "kw"),
    ],
)
def test_weights(path, rules, opset, names, float_weights):
    """The model is raised as far as needed and computes what it does with weights rounded by hand."""
    result = gq.insert(path, rules=rules, data="random:2", float_weights=float_weights)
    assert sorted(done.site.tensor.op for done in result.inserted) == sorted(names)
    message = onnx_format.emit(result.model)
    onnx.checker.check_model(message, full_check=True)
    assert message.opset_import[0].version == opset
    by_hand = onnx.load(path)
    parameters = Parameters(result.source)
    rounded = {}
    for done in result.inserted:
        assert np.array_equal(done.params.scale, done.params.scale.astype(np.float16))
        value = parameters.value(done.site.tensor)
        rounded[done.site.tensor.op] = dequantize(quantize(value, done.params), done.params).astype(np.float16)
    for tensor in by_hand.graph.initializer:
        if tensor.name in rounded:
            tensor.CopyFrom(numpy_helper.from_array(rounded[tensor.name], tensor.name))
    for level, least in (("ORT_DISABLE_ALL", 55), ("ORT_ENABLE_ALL", 40)):  # MatMulNBits rounds more
        for one, other in zip(run(message, level), run(by_hand, level), strict=True):
            noise = np.square(one.astype(np.float64) - other).mean()
            assert 10 * np.log10(np.square(other.astype(np.float64)).mean() / max(noise, 1e-12)) > least
    held = {
        reading.op: reading.params
        for reading in summarize_model(gq.load(result.save(path.with_name("out.onnx")))).quantization_ops
    }
    for done in result.inserted:
        assert np.array_equal(held[done.output.op].scale, done.params.scale)


def test_activations_are_left(path):
    """With the reason and the way out."""
    result = gq.insert(path, data="random:2")
    reasons = {skip.reason for skip in result.skips if Use("", "c", 0) in skip.uses}
    assert reasons == {"onnxruntime runs ops between float16 pairs in float; convert the model to float32 first"}


def test_taken_out_again(path, tmp_path):
    """Weights that were stored come back as float16, and are stored again the same."""
    first = gq.insert(path, rules="weight_only")
    saved = first.save(tmp_path / "once.onnx")
    assert gq.insert(saved, rules="weight_only").inserted == ()
    again = gq.insert(saved, rules="weight_only", requantize=True)
    assert [done.site.tensor for done in again.inserted] == [done.site.tensor for done in first.inserted]
    for one, other in zip(first.inserted, again.inserted, strict=True):
        assert np.array_equal(one.params.scale, other.params.scale)


@pytest.mark.parametrize("scale", [1e-6, 7e4])
def test_scales_beyond_float16(scale):
    """What float16 cannot hold is refused with the way out; all else is the nearest that it can."""
    with pytest.raises(UsageError, match=r"its scale does not fit float16.*convert the model to float32"):
        round_scale_to_float16(
            qparams_from_scale(np.float32([1.0, scale]), np.zeros(2, np.int32), IntType(8, signed=True), axis=0)
        )
    kept = round_scale_to_float16(
        qparams_from_scale(np.float32([1.0, 0.1]), np.zeros(2, np.int32), IntType(8, signed=True), axis=0)
    )
    assert kept.scale.tolist() == [1.0, float(np.float16(0.1))]


def test_weights_too_small(tmp_path):
    """A weight whose scale float16 cannot hold is left with the reason."""
    message = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 19]> g (float16[2,4] x) => (float16[2,4] y) { y = MatMul(x, w) }'
    )
    message.graph.initializer.append(numpy_helper.from_array(np.full((4, 4), 1e-4, np.float16), "w"))
    onnx.save(message, tmp_path / "small.onnx")
    result = gq.insert(tmp_path / "small.onnx", rules="weight_only")
    assert result.inserted == ()
    assert [skip.reason[:34] for skip in result.skips] == ["its scale does not fit float16, th"]
