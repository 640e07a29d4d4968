"""Depthwise kernels [h, w, channels, multiplier] have a scale per output channel."""

import numpy as np
import pytest
from reference import fake_quant
from reference import quantize_and_dequantize as qad
from support.tensorflow_models import run_graph

import graphquant as gq
from graphquant.errors import RuleError, UsageError
from graphquant.ir import Op, channel_axis, merged_channel_shape
from graphquant.numerics import DynamicQParams, tf_ranges
from graphquant.quantize import plan_to_json
from graphquant.quantize.plan import plan_from_json

RULES = """
[scheme.s]
{scheme}
per = "channel"
observe = "absmax"

[[rule]]
name = "kernel"
consumer = {{ kind = "depthwise_conv", input = "weight", min_channels = {channels}, max_channels = {channels} }}
quantize = "s"
"""
CHANNELS = 4


def depthwise_kernel(multiplier: int) -> np.ndarray:
    """Return a kernel whose output channels differ in magnitude."""
    rng = np.random.default_rng(multiplier)
    sizes = 2.0 ** rng.permutation(np.arange(CHANNELS * multiplier)).reshape(CHANNELS, multiplier)
    return (rng.normal(size=(3, 3, CHANNELS, multiplier)) * sizes).astype(np.float32)


def write_depthwise_graph(tmp_path, multiplier: int):
    """Write a frozen graph of one depthwise convolution."""
    tf = pytest.importorskip("tensorflow").compat.v1
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [1, 6, 6, CHANNELS], name="x")
        weight = tf.constant(depthwise_kernel(multiplier), name="w")
        tf.identity(tf.nn.depthwise_conv2d_native(x, weight, [1, 1, 1, 1], "SAME", name="depthwise"), name="out")
    path = tmp_path / "net.pb"
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return path


def quantize_depthwise(tmp_path, multiplier: int, scheme: str, **more):
    """Quantize that graph with one rule."""
    rules = tmp_path / "r.toml"
    rules.write_text(RULES.format(scheme=scheme, channels=CHANNELS * multiplier))
    return gq.insert(write_depthwise_graph(tmp_path, multiplier), rules=[str(rules)], allow_empty=True, **more)


def run_written(result, tmp_path, names: list[str]) -> list[np.ndarray]:
    """Return TensorFlow's values of tensors of the written model."""
    path = result.save(tmp_path / "made.pb", force=True)
    return run_graph(path, names, {"x:0": np.ones((1, 6, 6, CHANNELS), np.float32)})


def expected(family: str, weight: np.ndarray, params) -> np.ndarray:
    """Quantize each output channel separately with the family's reference."""
    flat = weight.reshape(3, 3, -1)
    if isinstance(params, DynamicQParams):
        channels = [
            qad.quantize_and_dequantize_v2(flat[..., channel], num_bits=8, narrow_range=params.narrow)
            for channel in range(flat.shape[2])
        ]
    elif family == "fake-quant":
        ends = tf_ranges.range_for_fake_quant(params)
        channels = [
            fake_quant.fake_quant_with_vars_per_channel(flat, ends.low, ends.high, narrow_range=True)[..., channel]
            for channel in range(flat.shape[2])
        ]
    else:
        ends = tf_ranges.range_for_quantize_and_dequantize(params)
        pairs = zip(ends.low, ends.high, strict=True)
        channels = [
            qad.quantize_and_dequantize_v3(flat[..., channel], *pair, 8, narrow_range=True)
            for channel, pair in enumerate(pairs)
        ]
    return np.stack(channels, axis=2).reshape(weight.shape)


@pytest.mark.slow
@pytest.mark.parametrize("multiplier", [1, 2, 3])
@pytest.mark.parametrize(
    ("family", "range_"),
    [
        ("fake-quant", "observed"),
        ("quantize-and-dequantize-v3", "observed"),
        ("quantize-and-dequantize-v2", "dynamic"),
        ("quantize-and-dequantize-v3", "dynamic"),
        ("quantize-and-dequantize-v4", "dynamic"),
    ],
)
def test_each_output_channel_has_its_scale(tmp_path, family: str, range_: str, multiplier: int) -> None:
    """The scale of an output channel is that of its own values, and the op gives the reference's values."""
    result = quantize_depthwise(tmp_path, multiplier, f'family = "{family}"\nrange = "{range_}"\nnarrow = true')
    (inserted_site,) = result.inserted
    weight = depthwise_kernel(multiplier)
    assert inserted_site.params.axis == 2
    assert inserted_site.site.view == (None if multiplier == 1 else (3, 3, CHANNELS * multiplier))
    if range_ == "observed":
        largest = np.abs(weight).reshape(9, -1).max(axis=0)
        np.testing.assert_allclose(inserted_site.params.scale, largest / 127, rtol=2e-7)
    (before, after) = run_written(result, tmp_path, [str(inserted_site.site.tensor), str(inserted_site.output)])
    np.testing.assert_array_equal(before, weight)
    np.testing.assert_array_equal(after.view(np.int32), expected(family, weight, inserted_site.params).view(np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("version", [2, 4])
def test_v2_and_v4_refuse_a_range_per_channel(tmp_path, version: int) -> None:
    """V2 and V4 have no kernel for a range per channel: the rule file is refused, with families that have one."""
    with pytest.raises(RuleError, match="quantize-and-dequantize-v3 or fake-quant"):
        quantize_depthwise(tmp_path, 2, f'family = "quantize-and-dequantize-v{version}"')


@pytest.mark.slow
def test_plan_has_the_merged_channel_shape(tmp_path) -> None:
    """A plan with a merged shape survives JSON and is applied. Another shape or number of scales raises an error."""
    result = quantize_depthwise(tmp_path, 2, 'family = "fake-quant"')
    data = plan_to_json(result.plan)
    assert data["sites"][0]["view"] == [3, 3, 8]
    again = gq.insert(result.source, plan=plan_from_json(data))
    np.testing.assert_array_equal(again.inserted[0].params.scale, result.inserted[0].params.scale)
    data["sites"][0]["scale"] = [0.5] * 4
    with pytest.raises(UsageError, match="it has 8 channels"):
        gq.insert(result.source, plan=plan_from_json(data))
    data["sites"][0]["view"] = [9, 2, 4]
    with pytest.raises(UsageError, match=r"in the view \[9, 2, 4\]"):
        gq.insert(result.source, plan=plan_from_json(data))


@pytest.mark.slow
@pytest.mark.parametrize("multiplier", [1, 2, 3])
def test_tflite_has_the_same_scales(tmp_path, multiplier: int) -> None:
    """TFLite's converter uses the scale of each output channel."""
    rules = tmp_path / "all.toml"
    rules.write_text(
        RULES.format(scheme='family = "fake-quant"\nnarrow = true', channels=CHANNELS * multiplier)
        + '[scheme.a]\nobserve = {name = "fixed", low = -4.0, high = 4.0}\nfamily = "fake-quant"\n'
        '[[rule]]\nname = "x"\nconsumer = {kind = "depthwise_conv", input = "input"}\nquantize = "a"\n'
        '[[rule]]\nname = "y"\nproducer = {kind = "depthwise_conv"}\nquantize = "a"\n'
    )
    result = gq.insert(write_depthwise_graph(tmp_path, multiplier), rules=[str(rules)])
    from graphquant.api.convert import convert_to_tflite

    receipt = convert_to_tflite(result, None)
    assert [line.problem for line in receipt.tensors] == [""] * 3
    kernels = [line for line in receipt.tensors if line.tensor.op == "w"]
    assert kernels[0].runtime is not None
    assert kernels[0].runtime[0].size == CHANNELS * multiplier


def test_views_of_other_kernels() -> None:
    """Only a depthwise kernel with a multiplier has a merged shape; unknown sizes stay unknown."""
    tensorflow = Op(name="d", kind="depthwise_conv", type="DepthwiseConv2dNative", outputs=(), channel_axis=2)
    onnx = Op(name="d", kind="depthwise_conv", type="Conv", outputs=(), channel_axis=0)
    transposed = Op(name="t", kind="conv_transpose", type="Conv2DBackpropInput", outputs=(), channel_axis=2)
    assert merged_channel_shape(tensorflow, (3, 3, 4, 2)) == (3, 3, 8)
    assert merged_channel_shape(tensorflow, (3, 3, None, 2)) == (3, 3, None)
    assert merged_channel_shape(tensorflow, (3, 3, 4, 1)) is None
    assert merged_channel_shape(onnx, (8, 1, 3, 3)) is None
    assert merged_channel_shape(transposed, (3, 3, 8, 4)) is None
    assert (channel_axis(onnx, (8, 1, 3, 3)), channel_axis(tensorflow, (3,))) == (0, None)
