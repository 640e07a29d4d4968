"""The same in TensorFlow, and what TFLite makes of it: biases are int32 there, with the scales that were found."""

import re

import numpy as np
import pytest

import graphquant as gq
from graphquant.ir import TensorRef
from graphquant.numerics import dequantize, quantize

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

RNG = np.random.default_rng(0)
X = RNG.standard_normal((8, 8, 8, 3)).astype(np.float32)
W = RNG.standard_normal((3, 3, 3, 4)).astype(np.float32)
B = np.array([0.1, 3.0, -0.2, 1.0], np.float32)


def conv_nhwc(x, w, b):
    """A convolution without padding, float64: x (N, H, W, C), w (k, k, C, M), b (M,)."""
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), w.shape[:2], axis=(1, 2))
    return np.einsum("nhwcij,ijcm->nhwm", windows, w.astype(np.float64)) + b


class Case:
    """A frozen graph, quantized on data for its one input, and as a TFLite file."""

    def __init__(self, folder, build):
        import tensorflow as tf

        with tf.Graph().as_default() as graph:
            build(tf, tf.compat.v1.placeholder(tf.float32, (1, 8, 8, 3), name="x"))
        (folder / "model.pb").write_bytes(graph.as_graph_def().SerializeToString())
        np.savez(folder / "data.npz", x=X)
        self.result = gq.insert(folder / "model.pb", data=str(folder / "data.npz"), validate=False)
        self.receipt = gq.convert_to_tflite(self.result, folder / "model.tflite")
        self.runtime = tf.lite.Interpreter(str(folder / "model.tflite"))
        self.runtime.allocate_tensors()

    def run(self):
        """Each output, in real units, for all samples, by name; and its scale."""
        [source], targets = self.runtime.get_input_details(), self.runtime.get_output_details()
        scale, zero = source["quantization"]
        outputs = {target["name"]: [] for target in targets}
        for sample in X:
            self.runtime.set_tensor(
                source["index"], np.clip(np.rint(sample[None] / scale) + zero, -128, 127).astype(np.int8)
            )
            self.runtime.invoke()
            for target in targets:
                step, middle = target["quantization"]
                outputs[target["name"]].append((self.runtime.get_tensor(target["index"]).astype(float) - middle) * step)
        steps = {target["name"]: target["quantization"][0] for target in targets}
        return [(np.concatenate(values), steps[name]) for name, values in sorted(outputs.items())]

    def note(self, name):
        """Return the notes on a tensor."""
        return self.result.site_notes.get(TensorRef("", name), "")

    def rounded(self, name, values, consumer):
        """Values as their pair leaves them for a consumer."""
        [pair] = [
            pair
            for pair in self.result.inserted
            if pair.site.tensor.op == name and consumer in {use.op for use in pair.site.uses}
        ]
        return dequantize(quantize(values, pair.params), pair.params)

    def biases(self):
        """All int32 values."""
        details = [
            entry for entry in self.runtime.get_tensor_details() if entry["dtype"] is np.int32 and entry["shape"].size
        ]
        return [self.runtime.get_tensor(entry["index"]) for entry in details]


def is_near(actual, expected, step):
    """Check that two results differ by at most a step: the runtime rounds to steps, and the reference does not."""
    return np.abs(actual - expected).max() <= 1.01 * step


def test_a_bias_that_overflows_int32(tmp_path):
    """The weight's range is raised in one channel; the runtime's bias fits, and the channel has its bias."""
    small = W.copy()
    small[..., 1] *= 1e-11

    def build(tf, x):
        c = tf.nn.conv2d(x, tf.constant(small, name="w"), 1, "VALID", name="c")
        tf.nn.bias_add(c, tf.constant(B, name="b"), name="y")

    case = Case(tmp_path, build)
    assert re.search("1 of 4 channels .*b:0 .*int32", case.note("w"))
    assert case.receipt.agrees
    largest = max(int(np.abs(values.astype(np.int64)).max()) for values in case.biases())
    assert 2**31 * (1 - 1e-4) < largest < 2**31 - 1
    [(actual, step)] = case.run()
    assert is_near(actual, conv_nhwc(case.rounded("x", X, "c"), case.rounded("w", small, "c"), B), step)
    assert np.abs(actual[..., 1] - B[1]).max() <= step


def test_shared_weights_and_biases(tmp_path):
    """Two convolutions with one weight; the bias of one needs a copy of it. Both are what numpy says."""

    def build(tf, x):
        w = tf.constant(W * np.float32(1e-6), name="w")
        small, large = (tf.constant(B * factor, name=name) for name, factor in (("small", 1e-6), ("large", 1e4)))
        tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "VALID", name="c"), small, name="y")
        tf.nn.bias_add(tf.nn.conv2d(x, w, 1, "VALID", name="d"), large, name="z")

    case = Case(tmp_path, build)
    assert re.search(r"copy for d\[1\]: .*scale .*raised", case.note("w"))
    scales = [pair.params.scale for pair in case.result.inserted if pair.site.tensor.op == "w"]
    assert len(scales) == 2
    np.testing.assert_allclose(scales[0], np.abs(W * 1e-6).max((0, 1, 2)) / 127, rtol=1e-5)
    assert (scales[1] > scales[0]).all()
    runs = zip(sorted(case.run(), key=lambda entry: entry[1]), ((1e-6, "c"), (1e4, "d")), strict=True)
    for (actual, step), (factor, op) in runs:
        x, w = case.rounded("x", X, op), case.rounded("w", W * np.float32(1e-6), op)
        assert is_near(actual, conv_nhwc(x, w, B * factor), step)


def test_a_tie_that_moves_a_relu_s_zero_point(tmp_path):
    """TFLite clamps a fused Relu apart from the scale behind it, so no pair is put before it; the values are right."""

    def build(tf, x):
        c = tf.nn.relu(
            tf.nn.bias_add(tf.nn.conv2d(x, tf.constant(W, name="w"), 1, "SAME", name="c"), tf.constant(B)), name="r"
        )
        tf.concat([c, x], 3, name="y")

    case = Case(tmp_path, build)
    params = {pair.site.tensor.op: pair.params for pair in case.result.inserted}
    assert set(params) == {"x", "w", "r", "y"}
    assert int(params["r"].zero_point) > -128
    assert (params["x"].scale, params["x"].zero_point) == (params["r"].scale, params["r"].zero_point)
    assert case.receipt.agrees
    [(actual, step)] = case.run()
    x = case.rounded("x", X, "c")
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    assert is_near(actual, np.concatenate([np.maximum(conv_nhwc(padded, case.rounded("w", W, "c"), B), 0), x], 3), step)


def test_layers_before_a_float_concat_have_float_weights(tmp_path):
    """A Concat of ranges that differ by 1,000 times stays float, and so do the convolutions before it."""

    def build(tf, x):
        branches = [tf.nn.bias_add(tf.nn.conv2d(x, W * factor, 1, "VALID"), B * factor) for factor in (1, 1e-3)]
        tf.identity(tf.concat(branches, -1), name="y")

    case = Case(tmp_path, build)
    assert not any(pair.site.parameter for pair in case.result.inserted)
    assert case.receipt.agrees
