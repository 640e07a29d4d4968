"""The graph_editor recipe with each TensorFlow family: scales of exactly 2^d, and the bits of the reference."""

import numpy as np
import pytest
from reference import fake_quant
from reference import quantize_and_dequantize as qad

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import UsageError

CASES = [
    (family, round_)
    for family, rounds in (
        ("fake-quant", (None, "half-up")),
        ("quantize-and-dequantize-v2", (None, "half-even", "half-up")),
        ("quantize-and-dequantize-v3", (None, "half-even")),
        ("quantize-and-dequantize-v4", (None, "half-even", "half-up")),
    )
    for round_ in rounds
]
rng = np.random.default_rng(7)
WEIGHT = rng.normal(size=(3, 3, 2, 4)).astype(np.float32)
X = rng.normal(size=(1, 5, 5, 2)).astype(np.float32)
X.reshape(-1)[:40] = (np.arange(-20, 20) + 0.5) / 16  # halfway between two steps


def reference_of_recipe(family, round_, quantizer, x):
    """Return the result of the family's reference for the recipe's range."""
    low, high, bits = quantizer.min, quantizer.max, quantizer.bits
    if family == "fake-quant":
        return fake_quant.fake_quant_with_vars(x, low, high, num_bits=bits, narrow_range=True)
    mode = "HALF_UP" if round_ == "half-up" else "HALF_TO_EVEN"
    return qad.quantize_and_dequantize_v2(
        x, low, high, num_bits=bits, range_given=True, narrow_range=True, round_mode=mode
    )


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "exponent"), [(8, -4), (16, -8), (5, -2)])
@pytest.mark.parametrize(("family", "round_"), CASES)
def test_kernels_and_activations(tmp_path, family, round_, bits, exponent) -> None:
    """Only the named consumer reads the quantized kernel and activation."""
    v1 = pytest.importorskip("tensorflow").compat.v1
    tf = pytest.importorskip("tensorflow")
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, X.shape, name="x")
        weight = tf.constant(WEIGHT, name="w")
        for layer in ("block1", "block2"):
            tf.nn.conv2d(x, weight, 1, "SAME", name=f"{layer}/conv")
    (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    model = gq.load(tmp_path / "net.pb")
    quantizer = gq.FixedPoint(bits, exponent, family=family, round=round_)
    assert gq.insert_quant_op(model, "x", "block2", quantizer) == 1
    assert gq.insert_quant_op(model, "w", "block2", quantizer) == 1
    readings = summarize_model(model).quantization_ops
    assert [(float(reading.params.scale), int(reading.params.zero_point)) for reading in readings] == [
        (2.0**exponent, 0)
    ] * 2
    path = model.save(tmp_path / "made.pb")
    with tf.Graph().as_default() as source_graph, v1.Session(graph=source_graph) as session:
        v1.import_graph_def(v1.GraphDef.FromString(path.read_bytes()), name="")
        first, second = (source_graph.get_operation_by_name(f"{layer}/conv") for layer in ("block1", "block2"))
        assert [tensor.name for tensor in first.inputs] == ["x:0", "w:0"]
        assert all("block2/SlimQuant" in tensor.name for tensor in second.inputs)
        actual = session.run(list(second.inputs), {"x:0": X})
    for value, before in zip(actual, (X, WEIGHT), strict=True):
        expected = reference_of_recipe(family, round_, quantizer, before)
        np.testing.assert_array_equal(value.view(np.int32), expected.view(np.int32))


def test_unsupported_rounding_modes(samples) -> None:
    """An unsupported or unknown rounding mode raises an error."""
    model = gq.load(samples / "digits_cnn.pb")
    with pytest.raises(UsageError, match=r"half up.*quantize-and-dequantize-v2"):
        gq.insert_quant_op(
            model, "max_pool:0", "residual_1", gq.FixedPoint(8, -4, family="fake-quant", round="half-even")
        )
    with pytest.raises(UsageError, match="'half-down'"):
        gq.FixedPoint(8, -4, round="half-down")
