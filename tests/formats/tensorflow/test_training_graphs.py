"""Graphs of TensorFlow 1 that still train, frozen graphs that end in Identity, assets, and errors of the runtime."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.cli import run_cli
from support.tensorflow_models import write_training_graph

import graphquant as gq
from graphquant.analysis.model_summary import summarize_model
from graphquant.errors import GraphQuantError, InvalidModelError, ModelError
from graphquant.formats.tensorflow.runner import create_runner
from graphquant.formats.tensorflow.session import last_error_line
from graphquant.ir import count_macs, unsized_tensors

if TYPE_CHECKING:
    from pathlib import Path

TRAINING_STEPS = 5


@pytest.fixture
def training_model(tmp_path: Path) -> Path:
    """A SavedModel with the input `x` and the output `pred` that still has its loss, label and gradients."""
    pytest.importorskip("tensorflow")
    write_training_graph(tmp_path / "net")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32))
    return tmp_path / "net"


@pytest.mark.slow
def test_a_plan_has_only_the_ops_that_outputs_need(training_model: Path, tmp_path: Path) -> None:
    """The loss and the gradients get no pairs, the label needs no data, and the result still trains."""
    tf = pytest.importorskip("tensorflow")
    result = gq.insert(training_model, data=str(tmp_path / "data.npz"))
    tensors = {str(pair.site.tensor) for pair in result.inserted}
    assert tensors == {"x:0", "W/read:0", "pred:0"}
    assert {use.op for pair in result.inserted for use in pair.site.uses} == {"product", "@serving_default/pred"}
    path, v1 = result.save(tmp_path / "quantized"), tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        v1.saved_model.load(session, ["serve"], str(path))
        feed = {"x:0": np.load(tmp_path / "data.npz")["x"], "label:0": np.ones((40, 3), np.float32)}
        losses = [session.run(["loss:0", "train"], feed)[0] for _ in range(TRAINING_STEPS)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_multiply_adds_are_those_that_outputs_need(training_model: Path) -> None:
    """The products of the gradients are not counted: a run for the outputs skips them."""
    pytest.importorskip("tensorflow")
    model = gq.load(training_model)
    assert {op.name for op in model.main.ops() if op.type == "MatMul"} > {"product"}
    measured = dict.fromkeys(unsized_tensors(model), 3)
    assert count_macs(model, measured) == {("", "product"): 24}


@pytest.mark.slow
def test_a_checkpoint_of_a_training_graph_has_the_outputs_of_inference(tmp_path: Path) -> None:
    """The loss, gradients, slots and conditions are no outputs. Stale shapes of gradients are no error."""
    tf = pytest.importorskip("tensorflow")
    v1, path = tf.compat.v1, tmp_path / "net.meta"
    with v1.Graph().as_default(), v1.Session() as session:
        x, label = (v1.placeholder(tf.float32, [None, size], name=name) for name, size in (("x", 8), ("label", 3)))
        is_training = v1.placeholder(tf.bool, [], name="is_training")
        hidden = tf.nn.relu(tf.matmul(x, v1.get_variable("w", [8, 16], use_resource=False)), name="hidden")
        hidden = v1.cond(is_training, lambda: tf.nn.dropout(hidden, rate=0.5), lambda: tf.identity(hidden))
        logits = tf.matmul(hidden, v1.get_variable("v", [16, 3], use_resource=False), name="logits")
        tf.nn.sigmoid(logits, name="scores")
        loss = tf.reduce_mean(tf.square(logits - label), name="loss")
        step = v1.train.get_or_create_global_step()
        v1.train.AdamOptimizer(0.01).minimize(loss, step, name="train")
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(path.with_suffix("")))
    meta = v1.MetaGraphDef.FromString(path.read_bytes())
    gradient = next(node for node in meta.graph_def.node if node.name == "gradients/logits_grad/MatMul")
    gradient.attr["_output_shapes"].list.shape.add().dim.add(size=5)  # as an older TensorFlow inferred it
    stale = tmp_path / "stale.meta"
    stale.write_bytes(meta.SerializeToString())
    for suffix in (".index", ".data-00000-of-00001"):
        shutil.copy(path.with_suffix(suffix), stale.with_suffix(suffix))
    data = {"x": np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32), "is_training": np.array(False)}
    assert gq.load(stale).main.outputs == ["@scores"]
    frozen = gq.freeze(gq.load(stale))
    assert (frozen.main.inputs, frozen.main.outputs) == (["x", "is_training"], ["@scores"])
    result = gq.insert(stale, data=data)
    assert result.validation.worst_sqnr > 20
    coverage = summarize_model(result.model).coverage
    assert [(each.op, each.quantized) for each in coverage] == [("MatMul", True), ("logits", True)]
    quantized = gq.insert(path, data=data).save(tmp_path / "quantized.meta")
    assert gq.strip(quantized).exact
    with v1.Graph().as_default(), v1.Session() as session:
        v1.train.import_meta_graph(str(quantized)).restore(session, str(quantized.with_suffix("")))
        feed = {"x:0": data["x"], "label:0": np.ones((40, 3), np.float32), "is_training:0": False}
        losses = [session.run(["loss:0", "train"], feed)[0] for _ in range(TRAINING_STEPS)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_final_identity_keeps_the_name_of_the_output(tmp_path: Path) -> None:
    """The pair is before the Identity, which is still the output of the file, also of several Identities."""
    tf = pytest.importorskip("tensorflow")
    v1, random = tf.compat.v1, np.random.default_rng(0)
    with v1.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 8], name="x")
        product = tf.matmul(x, tf.constant(random.normal(0, 0.3, (8, 3)).astype(np.float32)), name="product")
        tf.identity(tf.identity(product, name="inner"), name="Identity")
        (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    np.savez(tmp_path / "data.npz", x=random.normal(size=(40, 8)).astype(np.float32))
    result = gq.insert(tmp_path / "net.pb", data=str(tmp_path / "data.npz"))
    again = gq.load(result.save(tmp_path / "quantized.pb"))
    assert again.main.outputs == gq.load(tmp_path / "net.pb").main.outputs == ["@Identity"]
    assert str(again.main.slots("inner")[0]) == "product/quant:0"
    assert all(again.main.consumers_by_port(op.name) for op in again.main.ops() if op.kind == "qdq")


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.slow
def test_variables_without_values_are_named(use_resource: bool, tmp_path: Path) -> None:  # a parameter
    """A GraphDef with variables cannot run or be frozen. Its initializers are no outputs."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    with v1.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 8], name="x")
        tf.matmul(x, v1.get_variable("layer/kernel", [8, 3], use_resource=use_resource), name="y")
        (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    np.savez(tmp_path / "data.npz", x=np.ones((40, 8), np.float32))
    model = gq.load(tmp_path / "net.pb")
    assert model.main.outputs == ["@y"]
    for run in (
        lambda: gq.insert(model, data=str(tmp_path / "data.npz")),
        lambda: gq.insert(model, data={"label": np.ones(40, np.float32)}),  # the variables come before missing inputs
        lambda: gq.insert(model, rules=["weight_only"]),
        lambda: gq.freeze(model),
    ):
        with pytest.raises(GraphQuantError, match=r"'layer/kernel'.*graphquant freeze .*net_frozen\.pb"):
            run()
    assert "'layer/kernel'" in run_cli("plan", tmp_path / "net.pb").stderr


@pytest.mark.slow
def test_assets_in_a_collection_are_initialized(tmp_path: Path) -> None:
    """A table that is read from an asset has its values in a model of TensorFlow 1, which lists it in a collection."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    (tmp_path / "words.txt").write_text("zero\none\ntwo\n")
    with v1.Graph().as_default(), v1.Session() as session:
        asset = tf.constant(str(tmp_path / "words.txt"), name="asset")
        v1.add_to_collection(v1.GraphKeys.ASSET_FILEPATHS, asset)
        words = v1.placeholder(tf.string, [None], name="words")
        initializer = tf.lookup.TextFileInitializer(
            asset, tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
        )
        indices = tf.lookup.StaticHashTable(initializer, -1).lookup(words)
        builder = v1.saved_model.builder.SavedModelBuilder(str(tmp_path / "net"))
        info = v1.saved_model.utils.build_tensor_info
        signature = v1.saved_model.signature_def_utils.build_signature_def(
            {"words": info(words)}, {"indices": info(indices)}, "lookup"
        )
        builder.add_meta_graph_and_variables(
            session,
            ["serve"],
            {"serving_default": signature},
            assets_collection=v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=v1.tables_initializer(),
        )
        builder.save()
    (tmp_path / "words.txt").unlink()
    model = gq.load(tmp_path / "net")
    meta = model.source.meta_graph(model.source.message)
    del meta.asset_file_def[:]  # estimators before TensorFlow 1.13 wrote the collection alone
    outputs = create_runner(model).run({"words": np.array([b"two", b"other"], object)})
    assert outputs["indices"].tolist() == [2, -1]


def test_errors_of_the_runtime_have_op_and_reason() -> None:
    """The reason is the last line before the name of the op, whatever Python code made it."""
    message = (
        "Graph execution error:\n\nDetected at node 'a/mm' defined at (most recent call last):\n  File 'x.py', line 1\n"
        "Node: 'a/mm'\nMatrix size-incompatible: In[0]: [2,3], In[1]: [4,5]\n\t [[{{node a/mm}}]]\n\n"
        "Original stack trace for 'a/mm':\n  File 'x.py', line 1, in f\n    return tf.matmul(x, y)\n"
    )
    expected = "op 'a/mm': Matrix size-incompatible: In[0]: [2,3], In[1]: [4,5]"
    assert last_error_line(message) == expected
    assert last_error_line("Graph execution error:\n\nno kernel\n") == "no kernel"
    assert last_error_line("") == "no reason given"
    assert (
        last_error_line('A function has two definitions: \nsignature {\n  name: "f"\n}\n')
        == "A function has two definitions:"
    )
    missing = (
        "No OpKernel was registered to support Op 'Bucketize' used by {{node a/b}} with these attrs: []\n"
        "Registered devices: [CPU]\nRegistered kernels:\n  <no registered kernels>\n\n\t [[a/b]]"
    )
    assert last_error_line(missing) == "op 'a/b': this version of TensorFlow has no kernel for Bucketize"


@pytest.mark.slow
def test_a_failing_run_names_the_op_and_its_shapes(tmp_path: Path) -> None:
    """An error of the installed TensorFlow has the op and the shapes."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    with v1.Graph().as_default() as graph:
        x: Any = v1.placeholder(tf.float32, [None, None], name="x")
        tf.matmul(x, tf.ones([4, 5]), name="scope/product")
        (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    with pytest.raises(ModelError, match=r"op 'scope/product': .*\[2,3\].*\[4,5\]"):
        create_runner(gq.load(tmp_path / "net.pb")).run({"x": np.ones((2, 3), np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize("inner", ["none", "loop", "cond"])
def test_a_rewritten_loop_of_a_meta_graph_trains(tmp_path: Path, inner: str, *, use_resource: bool) -> None:
    """The contexts of the loop, and of a loop or branch in it, contain the new ops, so that gradients are built."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    was_enabled = v1.control_flow_v2_enabled()
    v1.disable_control_flow_v2()
    try:
        with v1.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(1)
            x = v1.placeholder(tf.float32, [None, 6], name="x")
            weight = v1.get_variable("weight", [6, 6], use_resource=use_resource)
            head = v1.get_variable("head", [6, 3], use_resource=use_resource)

            def product(hidden: Any) -> Any:
                return tf.nn.tanh(tf.matmul(hidden, weight, name="product") + hidden)

            def body(step: Any, hidden: Any) -> Any:
                if inner == "loop":
                    hidden = v1.while_loop(lambda i, _: i < 2, lambda i, h: (i + 1, product(h)), [0, hidden])[1]
                elif inner == "cond":
                    hidden = v1.cond(step < 2, lambda: product(hidden), lambda: hidden)
                return step + 1, product(hidden)

            hidden = v1.while_loop(lambda step, _: step < 3, body, [0, x])[1]
            tf.reduce_mean(tf.square(tf.matmul(hidden, head) - 1.0), name="loss")
            session.run(v1.global_variables_initializer())
            v1.train.Saver().save(session, str(tmp_path / "net"))
        values = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32) * 0.3
        result = gq.insert(tmp_path / "net.meta", data={"x": values}, rules="generic", validate=False)
        assert any(pair.site.parameter and "while" in pair.site.tensor.op for pair in result.inserted)
        gq.save(result.model, tmp_path / "quantized.meta")
        losses = {}
        for name in ("net", "quantized"):
            with v1.Graph().as_default() as graph, v1.Session() as session:
                saver = v1.train.import_meta_graph(str(tmp_path / f"{name}.meta"))
                loss = graph.get_tensor_by_name("loss:0")
                train = v1.train.GradientDescentOptimizer(0.002).minimize(loss)
                saver.restore(session, str(tmp_path / name))
                losses[name] = [float(session.run([loss, train], {"x:0": values})[0]) for _ in range(TRAINING_STEPS)]
    finally:
        (v1.enable_control_flow_v2 if was_enabled else v1.disable_control_flow_v2)()
    assert losses["quantized"][-1] < losses["quantized"][0]
    np.testing.assert_allclose(losses["quantized"], losses["net"], rtol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["LSTM", "GRU"])
def test_recurrent_layers_of_keras(tmp_path: Path, layer: str) -> None:
    """The state and the body of a Keras LSTM or GRU stay float by the rule, and the rest has an SQNR of 20 dB."""
    keras = pytest.importorskip("keras")
    tf = pytest.importorskip("tensorflow")
    keras.utils.set_random_seed(2)
    sequence = keras.Input((12, 8), name="sequence")
    hidden = getattr(keras.layers, layer)(16)(sequence)
    network = keras.Model(sequence, keras.layers.Dense(5)(hidden))
    network.export(tmp_path / "net", verbose=False)
    values = np.random.default_rng(0).normal(size=(64, 12, 8)).astype(np.float32)
    result = gq.insert(tmp_path / "net", data={"sequence": values})
    assert result.inserted
    frozen_plan = gq.plan(gq.freeze(gq.load(tmp_path / "net")))
    assert not [site.tensor for site in frozen_plan.sites if "/while/" in site.tensor.op]
    gq.save(result.model, tmp_path / "quantized")
    loaded = tf.saved_model.load(str(tmp_path / "quantized"))
    expected, actual = network.predict(values, verbose=0), loaded.serve(values).numpy()
    assert 10 * np.log10(np.sum(expected**2) / np.sum((expected - actual) ** 2)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("is_functional", [False, True])
def test_conditions_on_training_are_resolved_when_a_model_is_frozen(tmp_path: Path, is_functional: bool) -> None:
    """A frozen model has the branch of inference alone, so its BatchNorm is folded and the TFLite file is integer."""
    tf = pytest.importorskip("tensorflow")
    v1, rng = tf.compat.v1, np.random.default_rng(3)
    kernel, other = rng.normal(size=(2, 3, 3, 4, 4)).astype(np.float32)
    scale, offset, mean = rng.normal(size=(3, 4)).astype(np.float32)
    (v1.enable_control_flow_v2 if is_functional else v1.disable_control_flow_v2)()
    try:
        with v1.Graph().as_default() as graph, v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, 8, 8, 4], name="x")
            training = v1.placeholder_with_default(False, [], name="is_training")

            def normalized(value: Any, is_training: bool) -> Any:
                moments = {} if is_training else {"mean": mean, "variance": np.float32([1, 2, 0.5, 1])}
                return v1.nn.fused_batch_norm(value, scale, offset, is_training=is_training, **moments)[0]

            y = tf.nn.conv2d(x, v1.get_variable("kernel", initializer=kernel), 1, "SAME")
            y = tf.nn.relu(v1.cond(training, lambda: normalized(y, True), lambda: normalized(y, False)))
            is_trained_on = tf.logical_and(tf.logical_not(tf.logical_not(training)), True)
            y = v1.cond(is_trained_on, lambda: v1.nn.dropout(y, rate=0.5), lambda: tf.identity(y))
            y = v1.cond(training, lambda: y, lambda: v1.cond(training, lambda: -y, lambda: tf.identity(y)))
            tf.identity(tf.nn.conv2d(y, other, 1, "SAME"), name="y")
            session.run(v1.global_variables_initializer())
            v1.saved_model.simple_save(session, str(tmp_path / "net"), {"x": x}, {"y": graph.get_tensor_by_name("y:0")})
            definition = v1.graph_util.convert_variables_to_constants(session, graph.as_graph_def(), ["y"])
    finally:
        v1.enable_control_flow_v2()
    (tmp_path / "net.pb").write_bytes(definition.SerializeToString())
    feeds = {"x": rng.normal(size=(24, 8, 8, 4)).astype(np.float32)}
    for path in (tmp_path / "net", tmp_path / "net.pb"):
        model = gq.load(path)
        frozen = gq.freeze(model)
        assert not {"Switch", "Merge", "RandomUniform", "If", "StatelessIf"} & {op.type for op in frozen.main.ops()}
        assert [op.name for op in frozen.main.ops() if op.kind == "input"] == ["x"]
        (expected,), (actual,) = (create_runner(each).run(feeds).values() for each in (model, frozen))
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        result = gq.insert(frozen, data=feeds, rules="tflite", validate=False)
        assert {step.step for step in result.plan.steps} >= {"fold-batchnorm"}
        conversion = gq.convert_to_tflite(result, None)
        assert conversion.agrees
        assert conversion.float_ops == ()


def while_loop(value: Any, step: Any = lambda v: v * 1.5 + 1) -> Any:
    """Return a value after three rounds of a loop."""
    import tensorflow as tf

    return tf.compat.v1.while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, step(v)), [0, value])[1]


CONDITIONS: dict[str, Any] = {
    "a loop in the dead branch": lambda cond, training, x: cond(training, lambda: while_loop(x), lambda: x * 2),
    "a loop in the branch that runs": lambda cond, training, x: cond(training, lambda: x, lambda: while_loop(x)),
    "in an unknown condition": lambda cond, training, x: cond(
        x[0, 0] > 0, lambda: cond(training, lambda: x * 2, lambda: x + 1), lambda: x - 1
    ),
    "in a loop": lambda cond, training, x: while_loop(x, lambda v: cond(training, lambda: -v, lambda: v * 2)),
    "around an unknown condition": lambda cond, training, x: cond(
        training, lambda: -x, lambda: cond(x[0, 0] > 0, lambda: x * 2, lambda: x + 1)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_around_other_control_flow(tmp_path: Path, name: str) -> None:
    """A frozen graph returns the same, has its outputs in the same order, and keeps no branch that never runs."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    v1.disable_control_flow_v2()
    try:
        with v1.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None, 4], name="x")
            mask = v1.placeholder_with_default(np.ones((1, 4), bool), [None, 4], name="mask")
            training = v1.placeholder_with_default(False, [], name="is_training")
            tf.add(CONDITIONS[name](v1.cond, training, x), 1.0, name="b")
            tf.where(tf.broadcast_to(mask, tf.shape(x)), x, -x, name="a")
    finally:
        v1.enable_control_flow_v2()
    (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    model = gq.load(tmp_path / "net.pb")
    frozen = gq.freeze(model)
    assert frozen.main.outputs == model.main.outputs
    assert {op.name for op in frozen.main.ops() if op.kind == "input"} == {"x", "mask"}
    for sign in (1, -1):
        values = np.random.default_rng(0).uniform(0.5, 1, (3, 4)).astype(np.float32)
        feeds = {"x": sign * values, "mask": values > 0.7}
        expected = create_runner(model).run({**feeds, "is_training": np.array(False)})
        actual = create_runner(frozen).run(feeds)
        for key, value in expected.items():
            np.testing.assert_allclose(actual[key], value, rtol=1e-6)
    switches = sum(op.type == "Switch" for op in frozen.main.ops())
    assert switches < sum(op.type == "Switch" for op in model.main.ops())


@pytest.mark.slow
def test_a_condition_that_a_loop_passes_on_is_resolved(tmp_path: Path) -> None:
    """A loop of TensorFlow 2 has what its body reads as a variable that no iteration changes."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    v1.enable_control_flow_v2()
    with v1.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        training = v1.placeholder_with_default(False, [], name="is_training")

        def step(value: Any) -> Any:
            return v1.cond(training, lambda: value * 9, lambda: tf.tanh(value))

        tf.identity(while_loop(x, step), name="y")
    (tmp_path / "net.pb").write_bytes(graph.as_graph_def().SerializeToString())
    frozen = gq.freeze(gq.load(tmp_path / "net.pb"))
    types = [op.type for op in frozen.main.ops()]
    assert "Tanh" in types
    assert "Mul" not in types
    values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    (actual,) = create_runner(frozen).run({"x": values}).values()
    np.testing.assert_allclose(actual, np.tanh(np.tanh(np.tanh(values))), rtol=1e-5)


@pytest.mark.slow
def test_a_default_that_a_signature_names_stays(tmp_path: Path) -> None:
    """Other programs may feed it in the frozen graph."""
    tf = pytest.importorskip("tensorflow")
    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        factor, offset = (v1.placeholder_with_default(np.float32(3), [], name=name) for name in ("factor", "offset"))
        weight = v1.get_variable("w", initializer=np.eye(4, dtype=np.float32))
        y = tf.identity(tf.matmul(x, weight) * factor + offset, name="y")
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(tmp_path / "net"), {"x": x, "factor": factor}, {"y": y})
    frozen = gq.freeze(gq.load(tmp_path / "net"))
    assert {op.name for op in frozen.main.ops() if op.type.startswith("Placeholder")} == {"x", "factor"}


@pytest.mark.slow
@pytest.mark.parametrize(("node", "rules"), [("stem/relu", "fixed_point"), ("ReadVariableOp", "tflite")])
def test_a_model_that_tensorflow_refuses_is_not_quantized(samples: Path, tmp_path: Path, node: str, rules: str) -> None:
    """A wrong shape in the float model is its error, also if the preparation removes the op, or nothing is observed."""
    tf = pytest.importorskip("tensorflow")
    graph = tf.compat.v1.GraphDef.FromString((samples / "digits_cnn.pb").read_bytes())
    changed = next(entry for entry in graph.node if entry.name == node)
    changed.attr["_output_shapes"].list.shape.add().dim.add(size=5)
    (tmp_path / "net.pb").write_bytes(graph.SerializeToString())
    with pytest.raises(InvalidModelError):
        gq.insert(tmp_path / "net.pb", data=str(samples / "digits_cnn_calib.npz"), rules=rules)
