"""BatchNorms of TensorFlow folded and run by TensorFlow itself; large weights that stay in their file."""

import numpy as np
import onnx
import onnx.parser
import pytest
from support.original_weights import original_weights

import graphquant as gq
from graphquant.formats.tensorflow import emit as tf_emit
from graphquant.formats.tensorflow import proto
from graphquant.ir import Parameters, TensorRef
from graphquant.quantize import prepare

FOLD = ("fold-batchnorm",)


def batchnorm_graph(tf):
    """Convolutions of each kind and a matrix product, each with a BatchNorm behind it, in their two spellings."""
    rng = np.random.default_rng(5)

    def draw(*shape):
        return tf.constant(rng.normal(size=shape), tf.float32)

    def fused(x, channels, bias):
        x = tf.nn.bias_add(x, draw(channels)) if bias else x
        variance = tf.constant(rng.uniform(0.5, 2, channels), tf.float32)
        normalized = tf.compat.v1.nn.fused_batch_norm(
            x, draw(channels), draw(channels), draw(channels), variance, epsilon=0.01, is_training=False
        )
        return tf.nn.relu(normalized[0])

    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2, 9, 9, 3], name="x")
        y = fused(tf.nn.conv2d(x, draw(3, 3, 3, 4), 1, "SAME"), 4, bias=False)
        y = fused(tf.nn.depthwise_conv2d(y, draw(3, 3, 4, 2), [1, 1, 1, 1], "SAME"), 8, bias=True)
        y = fused(tf.nn.conv2d_transpose(y, draw(2, 2, 5, 8), [2, 18, 18, 5], 2), 5, bias=False)
        y = tf.reduce_mean(y, [1, 2])
        y = tf.matmul(y, draw(6, 5), transpose_b=True)
        y = tf.nn.bias_add(y, draw(6))
        factor = tf.math.rsqrt(tf.constant(rng.uniform(0.5, 2, 6), tf.float32) + 0.001) * draw(6)
        y = tf.nn.relu(y * factor + (draw(6) - draw(6) * factor))
        y = tf.matmul(y, draw(6, 7)) * draw(7) + draw(7)
        tf.identity(y, name="y")
    return graph.as_graph_def()


@pytest.mark.slow
def test_tensorflow_computes_the_same(tmp_path):
    """Five foldings change no output by more than rounding; each weight comes back from the record to the bit."""
    tf = pytest.importorskip("tensorflow")
    source = batchnorm_graph(tf)
    (tmp_path / "model.pb").write_bytes(source.SerializeToString())
    model = gq.load(tmp_path / "model.pb")
    folded, steps = prepare(model, FOLD)
    assert len(steps) == 5
    types = [op.type for op in folded.main.ops()]
    assert not {"FusedBatchNormV3", "Mul", "AddV2", "Rsqrt", "Sub"} & set(types)

    def run(message):
        graph = tf.Graph()
        with graph.as_default():
            tf.import_graph_def(message, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            return session.run("y:0", {"x:0": np.random.default_rng(6).normal(size=(2, 9, 9, 3))})

    written = tf.compat.v1.GraphDef.FromString(proto.to_binary(tf_emit(folded)))
    np.testing.assert_allclose(run(written), run(source), rtol=1e-4, atol=1e-5)
    before, after = Parameters(model), Parameters(folded)
    restored = 0
    for step in steps:
        for (graph, name), (value, exact) in original_weights(step, lambda op: after.value(TensorRef("", op))).items():
            assert exact
            assert value.tobytes() == before.value(TensorRef(graph, name)).tobytes()
            restored += 1
    assert restored == 5


def test_external_weights_are_read_when_they_are_needed(tmp_path):
    """The folded weight of a file beside the model is not kept, but made of it each time."""
    text = """<ir_version: 8, opset_import: ["": 13]> g (float[1,32,5,5] x) => (float[1,64,3,3] y) {
        c = Conv (x, w)
        y = BatchNormalization (c, s, o, m, v)
    }"""
    message = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for name, shape in {"w": (64, 32, 3, 3), **dict.fromkeys("somv", (64,))}.items():
        value = np.abs(rng.normal(size=shape)).astype(np.float32)
        message.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    onnx.save(message, tmp_path / "inside.onnx")
    onnx.save(message, tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=4096)
    folded, (step,) = prepare(gq.load(tmp_path / "model.onnx"), FOLD)
    read = folded.main.op("c/weight_folded").read_value
    assert read() is not read()
    inside, _ = prepare(gq.load(tmp_path / "inside.onnx"), FOLD)
    assert np.array_equal(read(), inside.main.op("c/weight_folded").read_value())
    ((weight, exact),) = original_weights(step, lambda _: read()).values()
    assert exact
    assert isinstance(weight, np.ndarray)
