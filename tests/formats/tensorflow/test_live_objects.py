"""TensorFlow objects round-trip: graphs, sessions, functions and Keras models, also during training."""

from __future__ import annotations

import re
import sys
from typing import Any

import numpy as np
import pytest

import graphquant as gq
from graphquant.api import graph_editor as ge
from graphquant.errors import ModelError, NeedsDataError, UsageError

pytestmark = pytest.mark.slow

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1

Array = np.ndarray[Any, Any]
Q8 = gq.FixedPoint(bits=8, exponent=-4)
rng = np.random.default_rng(7)
X = rng.normal(size=(4, 6)).astype(np.float32)
IMAGES = rng.normal(size=(4, 8, 8, 1)).astype(np.float32)
LABELS = np.array([0, 1, 2, 0])
KERNEL = rng.normal(size=(6, 3)).astype(np.float32)


def quantize_by_hand(x: Any) -> Any:
    """Quantize a tensor like Q8, with TensorFlow's own op."""
    return tf.quantization.fake_quant_with_min_max_vars(x, Q8.min, Q8.max, num_bits=8, narrow_range=True)


def pass_through(x: Any) -> Any:
    """Quantize a tensor like Q8 with QuantizeAndDequantizeV2, whose gradient is the identity's."""
    return tf.raw_ops.QuantizeAndDequantizeV2(
        input=x, input_min=Q8.min, input_max=Q8.max, range_given=True, narrow_range=True
    )


def clip_by_v4(x: Any) -> Any:
    """Quantize a tensor like Q8 with V4, whose gradient is 0 outside the range."""
    return tf.quantization.quantize_and_dequantize_v2(
        x, Q8.min, Q8.max, range_given=True, narrow_range=True, round_mode="HALF_TO_EVEN"
    )


def dense(*, scale: float = 1.0, resource: bool = True, labels: bool = False) -> Any:
    """Return a tf.Graph with a matrix product whose kernel is a variable, and a loss if it has `labels`."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        kernel = v1.get_variable("kernel", initializer=KERNEL * np.float32(scale), use_resource=resource)
        logits = tf.identity(tf.matmul(x, kernel, name="product"), name="logits")
        if labels:
            y = v1.placeholder(tf.int64, [None], name="y")
            tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits), name="loss")
        v1.global_variables_initializer()
    return graph


def started(graph: Any) -> Any:
    """Return a session with initialized variables."""
    session = v1.Session(graph=graph)
    session.run("init")
    return session


# -- graphs ----------------------------------------------------------------------------------------


def test_graph_comes_back_as_a_graph() -> None:
    """Nodes, control edges, devices and collections are preserved, and the original is unchanged."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 6], name="x")
        kernel = tf.constant(KERNEL, name="kernel")
        with tf.device("/cpu:0"), tf.control_dependencies([tf.no_op(name="before")]):
            product = tf.matmul(x, kernel, name="product")
        tf.nn.relu(product, name="out")
        tf.identity(x, name="skip")
        v1.add_to_collection("mine", product)
        v1.add_to_collection("numbers", 3)
    before = graph.as_graph_def(add_shapes=True)
    model = gq.load(graph)
    assert gq.insert_quant_op(model, "x:0", "product", Q8) == 1
    quantized_graph = gq.to_tf(model)
    assert graph.as_graph_def(add_shapes=True) == before
    ours = {node.name: node for node in quantized_graph.as_graph_def(add_shapes=True).node}
    for node in before.node:
        if node.name != "product":
            assert ours[node.name] == node
    assert ours["product"].input[0] == "product/SlimQuant/quant"
    assert list(ours["product"].input[1:]) == ["kernel", "^before"]
    assert ours["product"].device == "/device:CPU:0"
    assert quantized_graph.get_collection("mine") == [quantized_graph.get_tensor_by_name("product:0")]
    assert quantized_graph.get_collection("numbers") == [3]
    assert quantized_graph.get_tensor_by_name("out:0").shape == [None, 3]
    with v1.Session(graph=quantized_graph) as session:
        out, skip = session.run(["out:0", "skip:0"], {"x:0": X * 10})
    assert np.array_equal(out, tf.nn.relu(tf.matmul(quantize_by_hand(X * 10), KERNEL)).numpy())
    assert np.array_equal(skip, X * 10)


def test_default_graph() -> None:
    """The default graph is supported."""
    with tf.Graph().as_default():
        tf.matmul(v1.placeholder(tf.float32, [None, 6], name="x"), KERNEL, name="product")
        model = gq.load(v1.get_default_graph())
        gq.insert_quant_op(model, "x:0", "product", Q8)
        quantized_graph = gq.to_tf(model)
        assert quantized_graph is not v1.get_default_graph()
        assert len(v1.get_default_graph().get_operations()) == 3
    assert quantized_graph.get_operation_by_name("product").inputs[0].op.type == "FakeQuantWithMinMaxVars"


def test_graphs_of_one_name_do_not_mix() -> None:
    """Two alternating graphs and sessions with equal names have their own values, ops and ranges."""
    scales = (1.0, 5.0)
    sessions = [started(dense(scale=scale)) for scale in scales]
    models = [gq.load(session) for session in sessions]
    results = [gq.insert(model, rules=["weight_only"]) for model in models]
    scales_found = [result.inserted[0].params.scale for result in reversed(results)][::-1]
    for scale, step, result, session in zip(scales, scales_found, results, sessions, strict=True):
        np.testing.assert_allclose(step, np.abs(KERNEL).max(0) * scale / 127, rtol=1e-6)
        quantized_session = gq.to_tf(result)
        values = quantized_session.run("logits:0", {"x:0": X})
        expected = X @ (np.round(KERNEL * scale / step) * step)
        np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(session.run("logits:0", {"x:0": X}), X @ (KERNEL * scale), rtol=1e-4, atol=1e-4)


def test_functions_of_a_graph_have_their_new_gradients() -> None:
    """Called functions and branches are quantized; gradients match the edited function."""
    graph = tf.Graph()
    with graph.as_default():
        x = v1.placeholder(tf.float32, [None, 6], name="x")

        @tf.function
        def layer(z: Any) -> Any:
            return tf.matmul(z, KERNEL, name="product")

        called = layer(x)
        branch = tf.cond(tf.reduce_sum(x) > 0, lambda: layer(x) * 2.0, lambda: layer(x))
        tf.reduce_sum(called + branch, name="out")
    model = gq.load(graph)
    gq.insert_quant_op(model, "z:0", "product", gq.FixedPoint(8, -4, family="quantize-and-dequantize-v4"))
    quantized_graph = gq.to_tf(model)
    with quantized_graph.as_default():
        gradient = tf.gradients(quantized_graph.get_tensor_by_name("out:0"), quantized_graph.get_tensor_by_name("x:0"))[
            0
        ]
    large_inputs = np.abs(X) * 20
    with v1.Session(graph=quantized_graph) as session:
        values = session.run([gradient, "out:0"], {"x:0": large_inputs})
    inside = large_inputs <= Q8.max
    assert 0 < inside.sum() < large_inputs.size
    assert np.array_equal(values[0], np.where(inside, 3 * KERNEL.sum(1), 0).astype(np.float32))
    np.testing.assert_allclose(values[1], 3 * (clip_by_v4(large_inputs).numpy() @ KERNEL).sum(), rtol=1e-5)


def test_loop_of_tensorflow_1_trains() -> None:
    """An op inserted into a while loop's frame has a gradient in each iteration."""
    graph = tf.Graph()
    v1.disable_control_flow_v2()
    try:
        with graph.as_default():
            x = v1.placeholder(tf.float32, [], name="x")
            v1.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, tf.multiply(y, x, name="step")), [0, 1.0], name="loop"
            )
    finally:
        v1.enable_control_flow_v2()
    model = gq.load(graph, outputs=["loop/Exit_1:0"])
    assert gq.insert_quant_op(model, "loop/step:0", "NextIteration", gq.FixedPoint(16, -8)) == 1
    quantized_graph = gq.to_tf(model)
    with quantized_graph.as_default():
        gradient = tf.gradients(
            quantized_graph.get_tensor_by_name("loop/Exit_1:0"), quantized_graph.get_tensor_by_name("x:0")
        )[0]
    with v1.Session(graph=quantized_graph) as session:
        value, slope = session.run(["loop/Exit_1:0", gradient], {"x:0": 1.5})
    assert value == pytest.approx(1.5**3, abs=1 / 128)
    assert slope == pytest.approx(3 * 1.5**2, rel=0.01)


def test_graph_imported_next_to_its_session() -> None:
    """The quantized graph, imported into its original graph, shares and trains the session's variables."""
    graph = dense(labels=True)
    session = started(graph)
    model = gq.load(graph)
    gq.insert_quant_op(model, "x:0", "product", Q8)
    quantized = gq.to_tf(model).as_graph_def()
    with graph.as_default():
        (shared,) = tf.import_graph_def(quantized, return_elements=["logits:0"], name="shared")
        handle = graph.get_tensor_by_name("kernel:0")
        (loss,) = tf.import_graph_def(quantized, {"kernel:0": handle}, ["loss:0"], name="trained")
        step = v1.train.GradientDescentOptimizer(0.5).minimize(loss, var_list=v1.trainable_variables())
    fed = {"x:0": X, "shared/x:0": X, "trained/x:0": X, "trained/y:0": LABELS}
    losses = [session.run([loss, step], fed)[0] for _ in range(5)]
    assert losses[-1] < losses[0]
    kernel = session.run("kernel/Read/ReadVariableOp:0")
    assert not np.allclose(kernel, KERNEL)
    np.testing.assert_allclose(session.run(shared, fed), quantize_by_hand(X).numpy() @ kernel, rtol=1e-5, atol=1e-5)


def test_training_graph() -> None:
    """With named outputs, a graph needs no labels, and its training ops are unchanged."""
    graph = dense(labels=True)
    with graph.as_default():
        v1.train.AdamOptimizer(0.1).minimize(graph.get_tensor_by_name("loss:0"))
        v1.global_variables_initializer()
    session = v1.Session(graph=graph)
    session.run("init_1")
    model = gq.load(session, outputs=[graph.get_tensor_by_name("logits:0")])
    result = gq.insert(model, rules=["tflite"], data="random:4", validate=False)
    touched = {use.op for insertion in result.inserted for use in insertion.site.uses}
    assert "product" in touched
    assert not [name for name in touched if name.startswith("gradients")]
    quantized_session = gq.to_tf(result)
    losses = [quantized_session.run(["loss:0", "Adam"], {"x:0": X, "y:0": LABELS})[0] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert np.array_equal(session.run("kernel/Read/ReadVariableOp:0"), KERNEL)


# -- sessions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("resource", [True, False])
def test_session(resource: bool) -> None:
    """Ranges come from the session's values, its graph gains nothing, and a new session can be trained."""
    graph = dense(labels=True, resource=resource)
    session = started(graph)
    with graph.as_default():
        variable = v1.global_variables()[0]
        session.run(variable.initializer, {variable.initializer.inputs[1]: KERNEL * 2})
    graph.finalize()
    result = gq.insert(session, rules=["weight_only"])
    np.testing.assert_allclose(result.inserted[0].params.scale, np.abs(KERNEL).max(0) * 2 / 127, rtol=1e-6)
    quantized_session = gq.to_tf(result)
    with quantized_session.graph.as_default():
        (mine,) = v1.trainable_variables()
        loss = quantized_session.graph.get_tensor_by_name("loss:0")
        step = v1.train.GradientDescentOptimizer(0.5).minimize(loss)
    assert np.array_equal(quantized_session.run(mine), KERNEL * 2)
    fed = {"x:0": X, "y:0": LABELS}
    losses = [quantized_session.run([loss, step], fed)[0] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert not np.allclose(quantized_session.run(mine), KERNEL * 2)
    assert np.array_equal(session.run(variable), KERNEL * 2)


def test_calibrated_session(tmp_path: Any) -> None:
    """Calibration uses the session's values; a graph without a session is refused if values are needed."""
    graph = dense()
    np.savez(tmp_path / "x.npz", x=X)
    result = gq.insert(started(graph), rules=["tflite"], data=str(tmp_path / "x.npz"), method="minmax", validate=False)
    (site,) = [insertion for insertion in result.inserted if insertion.site.tensor.op == "x"]
    assert site.params.scale == pytest.approx((X.max() - X.min()) / 255, rel=1e-2)
    frozen = gq.freeze(gq.load(started(graph)))
    assert not [op for op in frozen.main.ops() if op.kind == "variable"]
    with pytest.raises(ModelError, match=r"'kernel'.*gq\.load"):
        gq.insert(graph, rules=["tflite"], data=str(tmp_path / "x.npz"), validate=False)


def test_session_without_values() -> None:
    """An uninitialized variable is named in the error; a closed session has its own error."""
    session = v1.Session(graph=dense())
    with pytest.raises(ModelError, match=r"'kernel' .*initializer"):
        gq.insert(session, rules=["weight_only"])
    session = started(dense())
    model = gq.load(session)
    session.close()
    with pytest.raises(ModelError, match=r"session .*closed"):
        gq.insert(model, rules=["weight_only"])


# -- functions -------------------------------------------------------------------------------------


class Net(tf.Module):
    """A model with nested functions, a branch, a loop, a captured constant and structured results."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(KERNEL, name="kernel")
        self.bias = tf.Variable(np.zeros(3, np.float32), name="bias")
        self.shift = tf.constant([0.5, -0.25, 0.125])
        self.quantize: Any = lambda z: z

    @tf.function
    def layer(self, z: Any) -> Any:
        """A matrix product."""
        return tf.matmul(self.quantize(z), self.kernel, name="product") + self.bias

    @tf.function
    def __call__(self, pair: dict[str, Any], flag: Any, *, gain: float = 2.0) -> Any:
        """Return two logits for `pair`, and the number of loop iterations."""
        scaled = self.layer(pair["one"])
        branched = tf.cond(flag, lambda: self.layer(pair["two"]) + self.shift, lambda: scaled * gain)
        i, looped = tf.while_loop(
            lambda i, _: i < 2, lambda i, y: (i + 1, y + self.layer(pair["two"])), [0, tf.zeros_like(scaled)]
        )
        return {"one": scaled, "more": [branched, (looped, i), None]}

    def concrete(self) -> Any:
        """Return the function for batches of any size."""
        spec = tf.TensorSpec([None, 6])
        return self.__call__.get_concrete_function({"one": spec, "two": spec}, tf.TensorSpec([], tf.bool), gain=3.0)


PAIR = {"one": tf.constant(X), "two": tf.constant(X[::-1] * 3)}


def quantize_products(concrete: Any, family: str | None = None) -> Any:
    """Return the function with Q8 before each matrix product."""
    model = gq.load(concrete)
    assert gq.insert_quant_op(model, "z:0", "product", gq.FixedPoint(8, -4, family=family)) == 1
    return gq.to_tf(model)


@pytest.mark.parametrize("flag", [True, False])
def test_function_comes_back_as_a_callable(flag: bool) -> None:
    """Signature and structure are preserved, and every body equals code with the op added."""
    net, reference = Net(), Net()
    concrete = net.concrete()
    before = concrete(PAIR, tf.constant(flag), gain=3.0)
    quantized_function = quantize_products(concrete)
    reference.quantize = quantize_by_hand
    expected = reference.concrete()(PAIR, tf.constant(flag), gain=3.0)
    outputs = quantized_function(PAIR, tf.constant(flag), gain=3.0)
    tf.nest.assert_same_structure(outputs, expected)
    assert outputs["more"][2] is None
    for output, expected_output in zip(tf.nest.flatten(outputs), tf.nest.flatten(expected), strict=True):
        assert output is expected_output is None or np.array_equal(output, expected_output)
    assert quantized_function.structured_input_signature == concrete.structured_input_signature
    assert [variable is net.kernel or variable is net.bias for variable in quantized_function.trainable_variables] == [
        True,
        True,
    ]
    after = concrete(PAIR, tf.constant(flag), gain=3.0)
    assert all(
        np.array_equal(a, b) for a, b in zip(tf.nest.flatten(before)[:3], tf.nest.flatten(after)[:3], strict=True)
    )


def test_variables_are_shared() -> None:
    """The callable reads and trains the user's variables."""
    net = Net()
    quantized_function = quantize_products(net.concrete())
    net.bias.assign([10.0, 20.0, 30.0])
    outputs = quantized_function(PAIR, tf.constant(True), gain=3.0)["one"]
    np.testing.assert_allclose(outputs, quantize_by_hand(X).numpy() @ KERNEL + [10, 20, 30], rtol=1e-5)
    net.bias.assign(np.zeros(3))
    losses = []
    for _ in range(5):
        with tf.GradientTape() as tape:
            logits = quantized_function(PAIR, tf.constant(True), gain=3.0)["more"][0]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, logits))
        losses.append(float(loss))
        for variable, gradient in zip(
            quantized_function.trainable_variables,
            tape.gradient(loss, quantized_function.trainable_variables),
            strict=True,
        ):
            variable.assign_sub(0.05 * gradient)
    assert losses[-1] < losses[0]
    assert not np.allclose(net.kernel, KERNEL)


@pytest.mark.parametrize(
    ("family", "written"), [("quantize-and-dequantize-v2", pass_through), ("quantize-and-dequantize-v4", clip_by_v4)]
)
def test_gradients(family: str, written: Any) -> None:
    """V2 passes gradients through, V4 clips them, like code with the op added."""
    net, reference = Net(), Net()
    quantized_function = quantize_products(net.concrete(), family)
    reference.quantize = written
    wide = {"one": tf.constant(X), "two": tf.constant(X * 20)}
    slopes = []
    for function in (quantized_function, reference.concrete()):
        with tf.GradientTape() as tape:
            tape.watch(wide["two"])
            out = function(wide, tf.constant(True), gain=3.0)["more"]
            loss = tf.reduce_sum(out[0]) + tf.reduce_sum(out[1][0])
        slopes.append(tape.gradient(loss, [wide["two"], *function.trainable_variables]))
    for slope, expected_slope in zip(*slopes, strict=True):
        assert np.array_equal(slope, expected_slope)
    clips = family.endswith("4")
    assert np.any(slopes[0][0].numpy()[np.abs(X * 20) > Q8.max + 0.1] != 0) != clips


def test_custom_gradients() -> None:
    """The edited function uses a user's custom gradient, also in a nested function."""

    @tf.custom_gradient
    def steep(z: Any) -> Any:
        return tf.identity(z), lambda upstream: upstream * 7.0

    inner = tf.function(lambda z: steep(tf.matmul(z, KERNEL, name="product")))
    concrete = tf.function(lambda x: inner(x) * 1.0).get_concrete_function(tf.TensorSpec([None, 6]))
    quantized_function = quantize_products(concrete)
    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(quantized_function(x))
    np.testing.assert_allclose(tape.gradient(total, x), np.tile(7 * KERNEL.sum(1), (4, 1)), rtol=1e-5)


def test_two_traces_of_one_function_do_not_mix() -> None:
    """Two modules of one class, or two results of one callable, have their own variables and ops."""
    nets = [Net(), Net()]
    nets[1].kernel.assign(KERNEL * 2)
    quantized_functions = [quantize_products(net.concrete()) for net in nets]
    again = quantize_products(nets[0].concrete(), "quantize-and-dequantize-v2")
    for factor, quantized_function in ((1, quantized_functions[0]), (2, quantized_functions[1]), (1, again)):
        outputs = quantized_function(PAIR, tf.constant(True), gain=3.0)["one"]
        np.testing.assert_allclose(outputs, quantize_by_hand(X).numpy() @ KERNEL * factor, rtol=1e-5, atol=1e-5)


def test_same_code_gives_the_same_model() -> None:
    """Function names and digest do not depend on earlier traces."""
    nets = Net(), Net()
    first, second = (gq.load(net.concrete()) for net in nets)
    assert first.digest == second.digest
    assert list(first.graphs) == list(second.graphs)
    assert "layer" in first.graphs
    stats = gq.calibrate(first, data="random:2")
    assert gq.insert(second, stats=stats).inserted


def test_calibrated_with_present_values() -> None:
    """Observing uses the present variable values, also while a graph is being built."""
    net = Net()
    net.kernel.assign(KERNEL * 4)
    concrete = net.concrete()
    with tf.Graph().as_default() as graph:
        stats = gq.calibrate(concrete, data="random:4", rules=["tflite"])
        quantized_function = quantize_products(concrete)
        assert not graph.get_operations()
    assert stats.samples == 4
    np.testing.assert_allclose(
        quantized_function(PAIR, tf.constant(True), gain=3.0)["one"],
        quantize_by_hand(X).numpy() @ KERNEL * 4,
        rtol=1e-5,
    )
    weight = gq.insert(net.concrete(), rules=["weight_only"]).inserted[0]
    np.testing.assert_allclose(weight.params.scale, np.abs(KERNEL).max(0) * 4 / 127, rtol=1e-6)


def test_tf_function() -> None:
    """A tf.function with one trace or a signature is accepted; otherwise the error shows how to select a trace."""

    @tf.function
    def double(x: Any) -> Any:
        return tf.matmul(x, KERNEL, name="product")

    with pytest.raises(UsageError, match=r"'double' .*never called.*double\.get_concrete_function\(tf\.TensorSpec"):
        gq.load(double)
    double(X)
    model = gq.load(double)
    gq.insert_quant_op(model, "x:0", "product", Q8)
    assert np.array_equal(gq.to_tf(model)(tf.constant(X)), tf.matmul(quantize_by_hand(X), KERNEL))
    double(X[:2])
    with pytest.raises(UsageError, match=r"'double' .* 2 kinds.* double\.get_concrete_function"):
        gq.load(double)
    signed = tf.function(lambda x: tf.nn.relu(x) * 2.0, input_signature=[tf.TensorSpec([None, 6], name="x")])
    assert gq.load(signed).main.inputs == ["serving_default_x"]


def test_saved_and_loaded_again(tmp_path: Any) -> None:
    """The callable can be saved, and a loaded signature can be quantized again."""
    net = Net()
    quantized_function = quantize_products(net.concrete())
    keeper = tf.Module()
    keeper.net, keeper.run = net, quantized_function
    tf.saved_model.save(keeper, str(tmp_path / "kept"))
    loaded = tf.saved_model.load(str(tmp_path / "kept"))
    expected = quantized_function(PAIR, tf.constant(True), gain=3.0)["one"]
    assert np.array_equal(loaded.run(PAIR, tf.constant(True), gain=3.0)["one"], expected)

    @tf.function(input_signature=[tf.TensorSpec([None, 6], name="x")])
    def serve(x: Any) -> Any:
        return {"logits": net.layer(x)}

    keeper.serve = serve
    tf.saved_model.save(keeper, str(tmp_path / "served"), signatures=serve)
    served = tf.saved_model.load(str(tmp_path / "served"))
    again = quantize_products(served.signatures["serving_default"])
    np.testing.assert_array_equal(again(x=tf.constant(X))["logits"], net.layer(quantize_by_hand(X)))


def test_function_with_a_lookup_table(tmp_path: Any) -> None:
    """A captured table remains in the callable; calibration without it is refused with the reason."""
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a", "b"], [1.0, 2.0]), 0.0)

    @tf.function
    def scaled(word: Any, x: Any) -> Any:
        return tf.matmul(x, KERNEL, name="product") * table.lookup(word)

    concrete = scaled.get_concrete_function(tf.TensorSpec([], tf.string), tf.TensorSpec([None, 6]))
    model = gq.load(concrete)
    gq.insert_quant_op(model, "x:0", "product", Q8)
    outputs = gq.to_tf(model)(tf.constant("b"), tf.constant(X))
    assert np.array_equal(outputs, tf.matmul(quantize_by_hand(X), KERNEL) * 2)
    np.savez(tmp_path / "data.npz", word=["a"] * 4, x=X)
    with pytest.raises(ModelError, match="captured something"):
        gq.calibrate(concrete, data=str(tmp_path / "data.npz"), rules=["tflite"])


LEARNED = """
[scheme.s]
range = "learned"
zero = "asymmetric"
observe = {name = "fixed", low = -1.5, high = 0.75}
[[rule]]
name = "all"
consumer = { kind = "matmul", input = "input" }
quantize = "s"
"""


def test_learned_ranges(tmp_path: Any) -> None:
    """The callable has new variables for the ends of each range, which are trained."""
    rules = tmp_path / "learned.toml"
    rules.write_text(LEARNED)
    net = Net()
    quantized_function = gq.to_tf(gq.insert(net.concrete(), rules=[str(rules)]))
    new = [
        variable
        for variable in quantized_function.trainable_variables
        if variable is not net.kernel and variable is not net.bias
    ]
    assert len(quantized_function.trainable_variables) == 4
    assert sorted(float(variable) for variable in new) == pytest.approx([-1.5, 0.75], abs=0.02)

    low, high = sorted(new, key=float)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(quantized_function(PAIR, tf.constant(True), gain=3.0)["one"])
    gradients = tape.gradient(loss, new)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.quantization.fake_quant_with_min_max_vars(X, low, high) @ net.kernel)
    for gradient, later_gradient in zip(gradients, tape.gradient(loss, new), strict=True):
        assert float(gradient) == pytest.approx(float(later_gradient), rel=1e-5)
        assert float(gradient) != 0
    ranged = gq.to_tf(gq.insert(started(dense(labels=True)), rules=[str(rules)]))
    with ranged.graph.as_default():
        variables = v1.trainable_variables()
        assert len(variables) == 3
        step = v1.train.GradientDescentOptimizer(0.1).minimize(ranged.graph.get_tensor_by_name("loss:0"))
    before = ranged.run(variables)
    ranged.run(step, {"x:0": X, "y:0": LABELS})
    assert all(
        np.any(old_value != new_value) for old_value, new_value in zip(before, ranged.run(variables), strict=True)
    )


# -- Keras -----------------------------------------------------------------------------------------


def keras_model() -> Any:
    """Return a small convolutional network with BatchNorm and Dropout."""
    keras = tf.keras
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((8, 8, 1), name="image"),
        keras.layers.Conv2D(4, 3, use_bias=False, name="conv"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.ReLU(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(3, name="logits"),
    ]
    return keras.Sequential(layers)


def test_keras_model_trains_on() -> None:
    """Five steps of a Keras optimizer through the callable lower the loss and update the model's weights."""
    model = keras_model()
    before = [variable.numpy() for variable in model.trainable_variables]
    result = gq.insert(model, data="random:8", validate=False)
    assert any(insertion.site.parameter for insertion in result.inserted)
    quantized_function = gq.to_tf(result)
    plain, outputs = model(IMAGES).numpy(), quantized_function(IMAGES).numpy()
    assert 0 < np.abs(plain - outputs).max() < 0.1
    optimizer = tf.keras.optimizers.SGD(0.05)
    losses = []
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, quantized_function(IMAGES)))
        losses.append(float(loss))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
    assert losses[-1] < losses[0]
    assert all(np.any(variable.numpy() != old) for variable, old in zip(model.trainable_variables, before, strict=True))
    np.testing.assert_allclose(model(IMAGES), quantized_function(IMAGES), atol=0.2)


def test_keras_structures() -> None:
    """A functional model's dictionaries and lists are preserved."""
    keras = tf.keras
    first, second = keras.Input((6,), name="one"), keras.Input((6,), name="two")
    shared = keras.layers.Dense(3, name="shared")
    model = keras.Model(
        {"one": first, "two": second}, {"sum": shared(first) + shared(second), "both": [shared(first), shared(second)]}
    )
    quantized_function = gq.to_tf(gq.insert(model, rules=["fixed_point"]))
    outputs = quantized_function({"one": tf.constant(X), "two": tf.constant(X)})
    kernel = tf.quantization.fake_quant_with_min_max_vars(shared.kernel, -127 / 64, 127 / 64, 8, narrow_range=True)
    expected = tf.matmul(quantize_by_hand(X), kernel)
    assert np.array_equal(outputs["both"][1], expected)
    assert np.array_equal(outputs["sum"], expected * 2)


def test_keras_model_frozen() -> None:
    """A frozen copy has constants with folded BatchNorm; the original model has its variables."""
    model = keras_model()
    plan = gq.plan(gq.freeze(gq.load(model)))
    assert not gq.plan(model).steps
    assert plan.sites


# -- refusals --------------------------------------------------------------------------------------


def test_missing_data_is_told_in_python() -> None:
    """For a model in memory the error suggests Python calls, not commands."""
    with pytest.raises(NeedsDataError, match="Pass calibration data") as raised:
        gq.insert(keras_model())
    lines = str(raised.value).splitlines()[1:]
    assert lines[0] == '  gq.insert(model, data="calibration.npz")'
    assert len(lines) == 3
    assert gq.insert(keras_model(), rules="weight_only").inserted


def test_refusals(tmp_path: Any, samples: Any) -> None:
    """Objects that are not models, graphs of functions, and models without files are refused with advice."""
    net = Net()
    concrete = net.concrete()
    with pytest.raises(UsageError, match=r"variables .*'__call__'"):
        gq.load(Net().concrete())
    with pytest.raises(UsageError, match=r"^A dict "):
        gq.load({})
    with pytest.raises(UsageError, match="Give the ConcreteFunction"):
        gq.load(concrete.graph)
    with pytest.raises(UsageError, match="is empty"):
        gq.load(tf.Graph())
    with pytest.raises(UsageError, match=r"no tensor 'logit:0'. Did you mean 'logits'"):
        gq.load(dense(), outputs=["logit:0"])
    for name in ("logits:1", "logits:x", "^logits"):
        with pytest.raises(UsageError, match=f"no tensor {re.escape(repr(name))}"):
            gq.load(dense(), outputs=[name])
    with pytest.raises(UsageError, match="Name outputs"):
        gq.load(concrete, outputs=["x"])
    with pytest.raises(UsageError, match=r"digits_cnn\.pb .*tf\.Graph"):
        gq.load(samples / "digits_cnn.pb", outputs=["x"])
    model = gq.load(concrete)
    tensor = ge.get_tensor_by_name(model, f"{model.main.inputs[0]}:0")
    ge.reroute_ts(ge.make_quant_op(model, tensor, "outside", Q8), tensor)
    with pytest.raises(UsageError, match=r"^'StatefulPartitionedCall' .*caller"):
        gq.to_tf(model)
    with pytest.raises(UsageError, match=r"ConcreteFunction in memory.*gq\.to_tf"):
        gq.load(concrete).save(tmp_path / "x.pb")
    with pytest.raises(UsageError, match=r"onnx\. Only TensorFlow models"):
        gq.to_tf(gq.load(samples / "digits_cnn.onnx"))
    with pytest.raises(UsageError, match=r"is a SavedModel.*tf\.saved_model\.load"):
        gq.to_tf(gq.load(samples / "digits_cnn_saved_model"))


def test_graph_of_a_file(samples: Any) -> None:
    """A file's quantized graph can be converted to a tf.Graph."""
    model = gq.load(samples / "digits_cnn.pb")
    gq.insert_quant_op(model, "max_pool:0", "residual_1", Q8)
    graph = gq.to_tf(model)
    assert graph.get_operation_by_name("residual_1/conv").inputs[0].op.type == "FakeQuantWithMinMaxVars"
    assert sys.modules["tensorflow"] is tf
