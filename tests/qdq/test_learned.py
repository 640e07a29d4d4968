"""Learned ranges: variables with the observed range as initial value, which gradients change and files store."""

import numpy as np
import pytest
from reference import fake_quant
from reference import quantize_and_dequantize as qad
from support.rule_files import write_rules

import graphquant as gq
from graphquant import formats
from graphquant.analysis.model_summary import summarize_model
from graphquant.api.convert import convert_to_tflite
from graphquant.errors import UsageError
from graphquant.numerics import tf_ranges
from graphquant.quantize.solver import RANGE_NOT_TRAINED

pytestmark = pytest.mark.slow

RULES = """
[scheme.s]
family = "{family}"
range = "learned"
{more}
[[rule]]
name = "all"
consumer = {{ kind = "{kind}", input = "{role}" }}
quantize = "s"
"""
INITIALIZER = "init_learned_ranges"
FIXED = 'observe = {name = "fixed", low = -0.5, high = 0.25}\n'
rng = np.random.default_rng(0)
X, WEIGHT = rng.normal(size=(4, 3)).astype(np.float32), rng.normal(size=(3, 2)).astype(np.float32)


def learned_rules(tmp_path, *, family="fake-quant", more=FIXED, kind="matmul", role="input"):
    """Write a rule file."""
    return write_rules(tmp_path, RULES.format(family=family, more=more, kind=kind, role=role))


def read_frozen_graph(path, *, nested=False):
    """Write a frozen graph of one matrix product, in a function if it is nested."""
    tf = pytest.importorskip("tensorflow")
    if nested:
        inner = tf.function(lambda x: tf.matmul(x, tf.constant(WEIGHT, name="w"), name="product"))
        outer = tf.function(lambda x: tf.identity(inner(x), name="out"))
        graph = outer.get_concrete_function(tf.TensorSpec([4, 3], tf.float32, name="x")).graph
    else:
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, [4, 3], name="x")
            tf.identity(tf.matmul(x, tf.constant(WEIGHT, name="w"), name="product"), name="out")
    path.write_bytes(graph.as_graph_def().SerializeToString())
    return path


def open_session(path):
    """Open a session of the written graph with initialized variables."""
    import tensorflow as tf

    v1, graph = tf.compat.v1, tf.Graph()
    with graph.as_default():
        v1.import_graph_def(v1.GraphDef.FromString(path.read_bytes()), name="")
    session = v1.Session(graph=graph)
    session.run(INITIALIZER)
    return session


def test_gradients_reach_the_range(tmp_path) -> None:
    """A gradient step on the range changes the op's output as the reference predicts."""
    import tensorflow as tf

    result = gq.insert(read_frozen_graph(tmp_path / "net.pb"), rules=learned_rules(tmp_path))
    assert not result.site_notes
    session = open_session(result.save(tmp_path / "made.pb"))
    low, high = (float(session.run(f"x/quant/{end}/Read/ReadVariableOp:0")) for end in ("min", "max"))
    ends = tf_ranges.range_for_fake_quant(result.inserted[0].params)
    assert (low, high) == (ends.low, ends.high)
    with session.graph.as_default():
        out = session.graph.get_tensor_by_name("x/quant:0")
        reads = [session.graph.get_tensor_by_name(f"x/quant/{end}/Read/ReadVariableOp:0") for end in ("min", "max")]
        gradients = tf.compat.v1.gradients(tf.reduce_sum(out), reads)
        step = [
            tf.raw_ops.AssignSubVariableOp(resource=read.op.inputs[0], value=0.25 * gradient)
            for read, gradient in zip(reads, gradients, strict=True)
        ]
    expected = fake_quant.fake_quant_with_vars_gradient(np.ones_like(X), X, low, high)[1:]
    assert all(expected)
    assert [float(gradient) for gradient in session.run(gradients, {"x:0": X})] == [
        float(expected_gradient) for expected_gradient in expected
    ]
    session.run(step, {"x:0": X})
    moved = [
        np.float32(end) - np.float32(0.25) * expected_gradient
        for end, expected_gradient in zip((low, high), expected, strict=True)
    ]
    assert [float(gradient) for gradient in session.run(reads)] == [
        float(expected_gradient) for expected_gradient in moved
    ]
    np.testing.assert_array_equal(session.run(out, {"x:0": X}), fake_quant.fake_quant_with_vars(X, *moved))


def test_bits_of_v3_are_a_variable(tmp_path) -> None:
    """V3's bits and range can be assigned in the running model. A note says that no gradient reaches them."""
    import tensorflow as tf

    result = gq.insert(
        read_frozen_graph(tmp_path / "net.pb"), rules=learned_rules(tmp_path, family="quantize-and-dequantize-v3")
    )
    assert list(result.site_notes.values()) == [RANGE_NOT_TRAINED]
    session = open_session(result.save(tmp_path / "made.pb"))
    ends = tf_ranges.range_for_quantize_and_dequantize(result.inserted[0].params)
    for bits in (8, 4):
        with session.graph.as_default():
            handle = session.graph.get_tensor_by_name("x/quant/num_bits:0")
            session.run(tf.raw_ops.AssignVariableOp(resource=handle, value=np.int32(bits)))
        actual = session.run("x/quant:0", {"x:0": X})
        np.testing.assert_array_equal(actual, qad.quantize_and_dequantize_v3(X, ends.low, ends.high, bits))


def test_a_range_per_channel(tmp_path) -> None:
    """Each channel has its own variable element and gradient."""
    import tensorflow as tf

    rule_file = learned_rules(tmp_path, more='per = "channel"\nobserve = "absmax"\n', role="weight")
    result = gq.insert(read_frozen_graph(tmp_path / "net.pb"), rules=rule_file)
    session = open_session(result.save(tmp_path / "made.pb"))
    low, high = session.run(["w/quant/min/Read/ReadVariableOp:0", "w/quant/max/Read/ReadVariableOp:0"])
    assert low.shape == high.shape == (2,)
    with session.graph.as_default():
        reads = [session.graph.get_tensor_by_name(f"w/quant/{end}/Read/ReadVariableOp:0") for end in ("min", "max")]
        out = session.graph.get_tensor_by_name("w/quant:0")
        gradients = session.run(tf.compat.v1.gradients(tf.reduce_sum(out), reads))
    expected = fake_quant.fake_quant_with_vars_per_channel_gradient(np.ones_like(WEIGHT), WEIGHT, low, high)[1:]
    np.testing.assert_array_equal(gradients, expected)


@pytest.mark.parametrize("nested", [False, True])
def test_the_written_graph_is_read_and_run_again(tmp_path, nested: bool) -> None:
    """Variables in the main graph and in functions are initialized, in TensorFlow and in graphquant."""
    result = gq.insert(read_frozen_graph(tmp_path / "net.pb", nested=nested), rules=learned_rules(tmp_path))
    path = result.save(tmp_path / "made.pb")
    ends = tf_ranges.range_for_fake_quant(result.inserted[0].params)
    expected = fake_quant.fake_quant_with_vars(X, ends.low, ends.high) @ WEIGHT
    again = gq.load(path)
    (reading,) = summarize_model(again).quantization_ops
    assert reading.learned
    assert reading.params.scale == result.inserted[0].params.scale
    for model in (result.model, again):
        actual = formats.format_module("tensorflow").create_runner(model).run({"x": X})
        np.testing.assert_allclose(next(iter(actual.values())), expected, rtol=1e-6)
    (name,) = (output.name for output in open_session(path).graph.get_operation_by_name("out").outputs)
    np.testing.assert_allclose(open_session(path).run(name, {"x:0": X}), expected, rtol=1e-6)


def live_object(tf):
    """Build a tf.Graph of one matrix product with a variable weight."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [4, 3], name="x")
        weight = tf.compat.v1.get_variable("w", initializer=WEIGHT, use_resource=True)
        tf.identity(tf.matmul(x, weight, name="product"), name="out")
    return graph


@pytest.mark.filterwarnings("ignore")
def test_learned_ranges_of_graphs_and_sessions_in_memory(tmp_path) -> None:
    """A converted tf.Graph has the ranges among its trainable variables; in a session they have values."""
    tf = pytest.importorskip("tensorflow")
    v1, graph = tf.compat.v1, live_object(tf)
    converted = gq.to_tf(gq.insert(gq.load(graph), rules=learned_rules(tmp_path)).model)
    with converted.as_default(), v1.Session(graph=converted) as session:
        session.run(v1.global_variables_initializer())
        trained = v1.trainable_variables()
        assert [variable.name for variable in trained] == ["w:0", "x/quant/min:0", "x/quant/max:0"]
        loss = tf.reduce_mean(tf.square(converted.get_tensor_by_name("out:0")))
        step = v1.train.GradientDescentOptimizer(0.05).minimize(loss, var_list=trained[1:])
        losses = [session.run([loss, step], {"x:0": X})[0] for _ in range(5)]
        assert losses == sorted(losses, reverse=True)
        assert losses[0] > losses[-1]
    with v1.Session(graph=graph) as live_session:
        with graph.as_default():
            live_session.run(v1.global_variables_initializer())
        result = gq.insert(gq.load(live_session), rules=learned_rules(tmp_path))
        ends = tf_ranges.range_for_fake_quant(result.inserted[0].params)
        actual = gq.to_tf(result.model).run("out:0", {"x:0": X})
    np.testing.assert_allclose(actual, fake_quant.fake_quant_with_vars(X, ends.low, ends.high) @ WEIGHT, rtol=1e-6)


@pytest.mark.parametrize("branch", [False, True])
def test_learned_ranges_of_functions_in_memory(tmp_path, branch: bool) -> None:
    """A converted function has new variables for the ranges, and trains them with its own."""
    tf = pytest.importorskip("tensorflow")
    weight = tf.Variable(WEIGHT, name="w")

    @tf.function(input_signature=[tf.TensorSpec([4, 3], tf.float32, name="x")])
    def call(x):
        if branch:
            return tf.cond(tf.reduce_sum(x) > 1e9, lambda: tf.matmul(2.0 * x, weight), lambda: tf.matmul(x, weight))
        return tf.matmul(x, weight)

    result = gq.insert(gq.load(call), rules=learned_rules(tmp_path))
    converted = gq.to_tf(result.model)
    ends = tf_ranges.range_for_fake_quant(result.inserted[0].params)
    expected = fake_quant.fake_quant_with_vars(X, ends.low, ends.high) @ WEIGHT
    np.testing.assert_allclose(converted(tf.constant(X)), expected, rtol=1e-6)
    actual = formats.format_module("tensorflow").create_runner(result.model).run({"x": X})
    np.testing.assert_allclose(next(iter(actual.values())), expected, rtol=1e-6)
    assert len(converted.trainable_variables) == 1 + len(converted.learned_ranges) == (5 if branch else 3)
    losses = []
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(converted(tf.constant(X)) - 1.0))
        gradients = tape.gradient(loss, converted.trainable_variables, unconnected_gradients="zero")
        for variable, gradient in zip(converted.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        losses.append(float(loss))
    assert losses[0] > losses[-1]
    assert any(float(variable) not in {float(ends.low), float(ends.high)} for variable in converted.learned_ranges)
    assert not np.array_equal(weight, WEIGHT)


@pytest.mark.filterwarnings("ignore")
def test_learned_ranges_freeze_to_constants(tmp_path) -> None:
    """Freezing converts the ranges to constants. TFLite has no variables, so it requires freezing."""
    result = gq.insert(read_frozen_graph(tmp_path / "net.pb"), rules=learned_rules(tmp_path))
    for model in (result.model, gq.load(result.save(tmp_path / "made.pb"))):
        plain = gq.freeze(model)
        assert not [op.name for op in plain.main.ops() if op.kind in {"variable", "read_variable"}]
        (reading,) = summarize_model(plain).quantization_ops
        assert (reading.params.scale, reading.learned) == (result.inserted[0].params.scale, False)
    with pytest.raises(UsageError, match=r"range = \"observed\""):
        convert_to_tflite(result, tmp_path / "made.tflite")


def test_loop_frames(tmp_path) -> None:
    """In a TF1 loop the variables are read inside its frame."""
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.disable_control_flow_v2()
    try:
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [4, 3], name="x")
            square = tf.constant(np.eye(3, dtype=np.float32))
            _, y = v1.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, tf.matmul(y, square)), [0, x])
            tf.identity(y, name="out")
    finally:
        v1.enable_control_flow_v2()
    (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    result = gq.insert(tmp_path / "net.pb", rules=learned_rules(tmp_path))
    assert len(result.inserted) == 1
    ends = tf_ranges.range_for_fake_quant(result.inserted[0].params)
    actual = open_session(result.save(tmp_path / "made.pb")).run("out:0", {"x:0": X})
    np.testing.assert_array_equal(actual, fake_quant.fake_quant_with_vars(X, ends.low, ends.high))
