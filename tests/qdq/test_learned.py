"""Learned ranges: variables that start with what was observed, that gradients change and that files keep."""

import numpy as np
import pytest

import graphquant as gq
from graphquant import formats
from graphquant.errors import UsageError
from graphquant.numerics import fake_quant
from graphquant.numerics import quantize_and_dequantize as qad
from graphquant.survey import survey
from graphquant.tflite import convert

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


def rules(tmp_path, *, family="fake-quant", more=FIXED, kind="matmul", role="input"):
    """A rule file."""
    path = tmp_path / "r.toml"
    path.write_text(RULES.format(family=family, more=more, kind=kind, role=role))
    return [str(path)]


def frozen(path, *, nested=False):
    """A frozen graph of one matrix product, in a function of its own if it is to be nested."""
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


def opened(path):
    """A session of the written graph, its variables initialized."""
    import tensorflow as tf

    v1, graph = tf.compat.v1, tf.Graph()
    with graph.as_default():
        v1.import_graph_def(v1.GraphDef.FromString(path.read_bytes()), name="")
    session = v1.Session(graph=graph)
    session.run(INITIALIZER)
    return session


def test_gradients_reach_the_range(tmp_path) -> None:
    """A step against the gradient of the range changes what the op makes as the reference predicts."""
    import tensorflow as tf

    result = gq.insert(frozen(tmp_path / "net.pb"), rules=rules(tmp_path))
    assert not result.notes
    session = opened(result.save(tmp_path / "made.pb"))
    low, high = (float(session.run(f"x/quant/{end}/Read/ReadVariableOp:0")) for end in ("min", "max"))
    ends = fake_quant.range_to_write(result.inserted[0].params)
    assert (low, high) == (ends.low, ends.high)
    with session.graph.as_default():
        out = session.graph.get_tensor_by_name("x/quant:0")
        reads = [session.graph.get_tensor_by_name(f"x/quant/{end}/Read/ReadVariableOp:0") for end in ("min", "max")]
        gradients = tf.compat.v1.gradients(tf.reduce_sum(out), reads)
        step = [
            tf.raw_ops.AssignSubVariableOp(resource=read.op.inputs[0], value=0.25 * gradient)
            for read, gradient in zip(reads, gradients, strict=True)
        ]
    expected = fake_quant.with_vars_gradient(np.ones_like(X), X, low, high)[1:]
    assert all(expected)
    assert [float(found) for found in session.run(gradients, {"x:0": X})] == [float(each) for each in expected]
    session.run(step, {"x:0": X})
    moved = [np.float32(end) - np.float32(0.25) * each for end, each in zip((low, high), expected, strict=True)]
    assert [float(found) for found in session.run(reads)] == [float(each) for each in moved]
    np.testing.assert_array_equal(session.run(out, {"x:0": X}), fake_quant.with_vars(X, *moved))


def test_bits_of_v3_are_a_variable(tmp_path) -> None:
    """V3's bits and range can be changed in the running model; that no gradient reaches them is told."""
    import tensorflow as tf

    result = gq.insert(frozen(tmp_path / "net.pb"), rules=rules(tmp_path, family="quantize-and-dequantize-v3"))
    assert list(result.notes.values()) == [
        "its range is in variables that no gradient reaches; FakeQuant alone has one"
    ]
    session = opened(result.save(tmp_path / "made.pb"))
    ends = qad.range_to_write(result.inserted[0].params)
    for bits in (8, 4):
        with session.graph.as_default():
            handle = session.graph.get_tensor_by_name("x/quant/num_bits:0")
            session.run(tf.raw_ops.AssignVariableOp(resource=handle, value=np.int32(bits)))
        found = session.run("x/quant:0", {"x:0": X})
        np.testing.assert_array_equal(found, qad.v3(X, ends.low, ends.high, bits))


def test_a_range_per_channel(tmp_path) -> None:
    """Each channel has a variable element and a gradient of its own."""
    import tensorflow as tf

    made = rules(tmp_path, more='per = "channel"\nobserve = "absmax"\n', role="weight")
    result = gq.insert(frozen(tmp_path / "net.pb"), rules=made)
    session = opened(result.save(tmp_path / "made.pb"))
    low, high = session.run(["w/quant/min/Read/ReadVariableOp:0", "w/quant/max/Read/ReadVariableOp:0"])
    assert low.shape == high.shape == (2,)
    with session.graph.as_default():
        reads = [session.graph.get_tensor_by_name(f"w/quant/{end}/Read/ReadVariableOp:0") for end in ("min", "max")]
        out = session.graph.get_tensor_by_name("w/quant:0")
        found = session.run(tf.compat.v1.gradients(tf.reduce_sum(out), reads))
    expected = fake_quant.with_vars_per_channel_gradient(np.ones_like(WEIGHT), WEIGHT, low, high)[1:]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("nested", [False, True])
def test_the_written_graph_is_read_and_run_again(tmp_path, nested: bool) -> None:
    """In the main graph and in functions the variables are initialized, for TensorFlow and for graphquant."""
    result = gq.insert(frozen(tmp_path / "net.pb", nested=nested), rules=rules(tmp_path))
    path = result.save(tmp_path / "made.pb")
    ends = fake_quant.range_to_write(result.inserted[0].params)
    expected = fake_quant.with_vars(X, ends.low, ends.high) @ WEIGHT
    again = gq.load(path)
    (reading,) = survey(again).readings
    assert reading.learned
    assert reading.params.scale == result.inserted[0].params.scale
    for model in (result.model, again):
        found = formats.module("tensorflow").runner(model).run({"x": X})
        np.testing.assert_allclose(next(iter(found.values())), expected, rtol=1e-6)
    (name,) = (output.name for output in opened(path).graph.get_operation_by_name("out").outputs)
    np.testing.assert_allclose(opened(path).run(name, {"x:0": X}), expected, rtol=1e-6)


def live(tf):
    """A tf.Graph of one matrix product with a weight in a variable."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [4, 3], name="x")
        weight = tf.compat.v1.get_variable("w", initializer=WEIGHT, use_resource=True)
        tf.identity(tf.matmul(x, weight, name="product"), name="out")
    return graph


@pytest.mark.filterwarnings("ignore")
def test_graphs_and_sessions_that_live(tmp_path) -> None:
    """A tf.Graph that is given back has the ranges among its trainable variables; in a session they have values."""
    tf = pytest.importorskip("tensorflow")
    v1, graph = tf.compat.v1, live(tf)
    made = gq.to_tf(gq.insert(gq.load(graph), rules=rules(tmp_path)).model)
    with made.as_default(), v1.Session(graph=made) as session:
        session.run(v1.global_variables_initializer())
        trained = v1.trainable_variables()
        assert [one.name for one in trained] == ["w:0", "x/quant/min:0", "x/quant/max:0"]
        loss = tf.reduce_mean(tf.square(made.get_tensor_by_name("out:0")))
        step = v1.train.GradientDescentOptimizer(0.05).minimize(loss, var_list=trained[1:])
        losses = [session.run([loss, step], {"x:0": X})[0] for _ in range(5)]
        assert losses == sorted(losses, reverse=True)
        assert losses[0] > losses[-1]
    with v1.Session(graph=graph) as given:
        with graph.as_default():
            given.run(v1.global_variables_initializer())
        result = gq.insert(gq.load(given), rules=rules(tmp_path))
        ends = fake_quant.range_to_write(result.inserted[0].params)
        found = gq.to_tf(result.model).run("out:0", {"x:0": X})
    np.testing.assert_allclose(found, fake_quant.with_vars(X, ends.low, ends.high) @ WEIGHT, rtol=1e-6)


@pytest.mark.parametrize("branch", [False, True])
def test_functions_that_live(tmp_path, branch: bool) -> None:
    """A function that is given back has new variables for the ranges, and trains them with its own."""
    tf = pytest.importorskip("tensorflow")
    weight = tf.Variable(WEIGHT, name="w")

    @tf.function(input_signature=[tf.TensorSpec([4, 3], tf.float32, name="x")])
    def call(x):
        if branch:
            return tf.cond(tf.reduce_sum(x) > 1e9, lambda: tf.matmul(2.0 * x, weight), lambda: tf.matmul(x, weight))
        return tf.matmul(x, weight)

    result = gq.insert(gq.load(call), rules=rules(tmp_path))
    made = gq.to_tf(result.model)
    ends = fake_quant.range_to_write(result.inserted[0].params)
    expected = fake_quant.with_vars(X, ends.low, ends.high) @ WEIGHT
    np.testing.assert_allclose(made(tf.constant(X)), expected, rtol=1e-6)
    found = formats.module("tensorflow").runner(result.model).run({"x": X})
    np.testing.assert_allclose(next(iter(found.values())), expected, rtol=1e-6)
    assert len(made.trainable_variables) == 1 + len(made.learned_ranges) == (5 if branch else 3)
    losses = []
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(made(tf.constant(X)) - 1.0))
        gradients = tape.gradient(loss, made.trainable_variables, unconnected_gradients="zero")
        for variable, gradient in zip(made.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        losses.append(float(loss))
    assert losses[0] > losses[-1]
    assert any(float(one) not in {float(ends.low), float(ends.high)} for one in made.learned_ranges)
    assert not np.array_equal(weight, WEIGHT)


@pytest.mark.filterwarnings("ignore")
def test_frozen_they_are_constants(tmp_path) -> None:
    """Freezing makes constants of the ranges; TFLite, which has no variables, is refused them otherwise."""
    result = gq.insert(frozen(tmp_path / "net.pb"), rules=rules(tmp_path))
    for model in (result.model, gq.load(result.save(tmp_path / "made.pb"))):
        plain = gq.freeze(model)
        assert not [op.name for op in plain.main.ops() if op.kind in {"variable", "read_variable"}]
        (reading,) = survey(plain).readings
        assert (reading.params.scale, reading.learned) == (result.inserted[0].params.scale, False)
    with pytest.raises(UsageError, match=r"which TFLite has not; take range = \"observed\""):
        convert(result, tmp_path / "made.tflite")


def test_loop_frames(tmp_path) -> None:
    """In a TF1 loop the variables are read inside of its frame."""
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
    result = gq.insert(tmp_path / "net.pb", rules=rules(tmp_path))
    assert len(result.inserted) == 1
    ends = fake_quant.range_to_write(result.inserted[0].params)
    found = opened(result.save(tmp_path / "made.pb")).run("out:0", {"x:0": X})
    np.testing.assert_array_equal(found, fake_quant.with_vars(X, ends.low, ends.high))
