"""Quantized models after saving: loaded like the original, trained, saved again, used as Keras layers.

Each answer is compared with a graph that is written by hand, with the ops of `quantized` where the plan has sites.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from support.rule_files import input_rule, weight_rule
from support.shared_models import SHARED_MODELS
from support.tensorflow_models import write_gate, write_tensorflow_1_net

import graphquant as gq
from graphquant import formats
from graphquant.analysis.model_summary import summarize_model
from graphquant.numerics import tf_ranges

if TYPE_CHECKING:
    from collections.abc import Callable

Array = np.ndarray[Any, Any]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KWS = SHARED_MODELS / "kws"


@pytest.fixture(scope="module")
def unoptimized_tf() -> Any:
    """TensorFlow without graph optimizations, because fused ops round differently."""
    tensorflow = pytest.importorskip("tensorflow")
    before = tensorflow.config.optimizer.get_experimental_options()
    tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield tensorflow
    tensorflow.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})


class ByHand:
    """FakeQuant ops with the ranges of a result's sites."""

    def __init__(self, result: gq.Result) -> None:
        self.by_use = {
            (use.op, use.slot): insertion
            for insertion in result.inserted
            if insertion.site.clone_of is None
            for use in insertion.site.uses
        }
        self.taken: set[tuple[str, int]] = set()

    def quantized(self, tensor: Any, consumer: str, slot: int = 0) -> Any:
        """Return `tensor` as the op `consumer` reads it."""
        import tensorflow as tf

        params = self.by_use[consumer, slot].params
        self.taken.add((consumer, slot))
        limits = tf_ranges.range_for_fake_quant(params)
        low, high = limits.low.astype(np.float32), limits.high.astype(np.float32)
        narrow = params.narrow and params.type.signed
        if params.axis is None:
            return tf.quantization.fake_quant_with_min_max_vars(tensor, low, high, 8, narrow_range=narrow)
        call = tf.quantization.fake_quant_with_min_max_vars_per_channel
        if params.axis == len(tensor.shape) - 1:
            return call(tensor, low, high, 8, narrow_range=narrow)
        return tf.reshape(
            call(tf.squeeze(tensor, -1), low, high, 8, narrow_range=narrow), tensor.shape
        )  # a depthwise kernel [h, w, c, 1]


def descend(tf: Any, loss: Callable[[], Any], variables: list[Any], rate: float) -> list[float]:
    """Return the losses before and after each of five SGD steps."""
    losses = []
    for _ in range(6):
        with tf.GradientTape() as tape:
            value = loss()
        losses.append(float(value))
        for variable, gradient in zip(variables, tape.gradient(value, variables), strict=True):
            if len(losses) < 6:
                variable.assign_sub(rate * gradient)
    return losses


# -- KWS: tf.saved_model.load fails on its optimizer; the TF1 loader and load_partial do not ---------


@pytest.fixture(scope="module")
def quantized_kws(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[gq.Result, Path]:
    """The quantized keyword spotter, and its folder."""
    result = gq.insert(KWS / "saved_model", data=str(KWS / "calib.npz"), validate=False)
    return result, result.save(tmp_path_factory.mktemp("kws") / "kws")


def spoken() -> tuple[Array, Array]:
    """Return 64 labeled samples."""
    data = np.load(KWS / "eval.npz")
    return data["input_1"][:64], data["label"][:64]


def kws_by_hand(tf: Any, result: gq.Result, x: Array) -> Any:
    """Compute the depthwise-separable net layer by layer, from the values of its checkpoint."""
    checkpoint, keys = result.source.source.checkpoint()
    hand, f = ByHand(result), "functional_1/"

    def value(name: str) -> Any:
        return tf.constant(checkpoint.read(keys[name]))

    def normalised(y: Any, number: int) -> Any:
        name = f"batch_normalization{f'_{number}' if number else ''}"
        gamma, beta, mean, variance = (
            value(f"{name}/{suffix}") for suffix in ("gamma", "beta", "moving_mean", "moving_variance")
        )
        y, *_ = tf.compat.v1.nn.fused_batch_norm(y, gamma, beta, mean, variance, 0.001, is_training=False)
        return tf.nn.relu(y)

    y = tf.nn.conv2d(
        hand.quantized(x, f"{f}conv2d/Conv2D"),
        hand.quantized(value("conv2d/kernel"), f"{f}conv2d/Conv2D", 1),
        [1, 2, 2, 1],
        "SAME",
    )
    y = normalised(tf.nn.bias_add(y, value("conv2d/bias")), 0)
    y = hand.quantized(y, f"{f}dropout/Identity")
    for block in range(4):
        tail = f"_{block}" if block else ""
        op = f"{f}depthwise_conv2d{tail}/depthwise"
        kernel = hand.quantized(value(f"depthwise_conv2d{tail}/depthwise_kernel"), op, 1)
        y = tf.nn.depthwise_conv2d(hand.quantized(y, op), kernel, [1, 1, 1, 1], "SAME")
        y = normalised(tf.nn.bias_add(y, value(f"depthwise_conv2d{tail}/bias")), 2 * block + 1)
        op = f"{f}conv2d_{block + 1}/Conv2D"
        kernel = hand.quantized(value(f"conv2d_{block + 1}/kernel"), op, 1)
        y = tf.nn.conv2d(hand.quantized(y, op), kernel, 1, "SAME")
        y = normalised(tf.nn.bias_add(y, value(f"conv2d_{block + 1}/bias")), 2 * block + 2)
    y = hand.quantized(y, f"{f}dropout_1/Identity")
    y = tf.nn.avg_pool2d(hand.quantized(y, f"{f}average_pooling2d/AvgPool"), [25, 5], [25, 5], "VALID")
    y = tf.reshape(hand.quantized(y, f"{f}flatten/Reshape"), [-1, 64])
    kernel = hand.quantized(value("dense/kernel"), f"{f}dense/MatMul", 1)
    y = tf.nn.bias_add(hand.quantized(y, f"{f}dense/MatMul") @ kernel, value("dense/bias"))
    y = tf.nn.softmax(hand.quantized(y, f"{f}dense/Softmax"))
    if ("Identity", 0) in hand.by_use:
        y = hand.quantized(y, "Identity")
    if ("@identity", 0) in hand.by_use:
        y = hand.quantized(y, "@identity")
    assert hand.taken == set(hand.by_use)
    return np.asarray(y)


def test_kws_in_the_tf1_loader(unoptimized_tf: Any, quantized_kws: tuple[gq.Result, Path]) -> None:
    """The signature equals the hand-written net bit for bit."""
    result, path = quantized_kws
    x, _ = spoken()
    v1 = unoptimized_tf.compat.v1
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with v1.Session(graph=unoptimized_tf.Graph(), config=config) as session:
        signature = v1.saved_model.load(session, ["serve"], str(path)).signature_def["serving_default"]
        got = session.run(signature.outputs["dense"].name, {signature.inputs["input_1"].name: x})
    np.testing.assert_array_equal(got, kws_by_hand(unoptimized_tf, result, x))


def test_kws_trains_and_is_saved_again(
    unoptimized_tf: Any, quantized_kws: tuple[gq.Result, Path], tmp_path: Path
) -> None:
    """Five SGD steps through signature and `__call__`, then saving and use as a layer.

    They are loaded by `load_partial`, which does without the optimizer.
    """
    from tensorflow.python.saved_model.load import load_partial

    result, path = quantized_kws
    names = [
        child.local_name for child in result.model.source.message.meta_graphs[0].object_graph_def.nodes[0].children
    ]
    loaded = load_partial(str(path), [f"root.{name}" for name in names if name != "optimizer"])
    signatures, call = loaded["root.signatures"], loaded["root.__call__"]
    x, labels = spoken()
    start = np.asarray(signatures["serving_default"](input_1=unoptimized_tf.constant(x))["dense"])
    np.testing.assert_array_equal(start, kws_by_hand(unoptimized_tf, result, x))
    np.testing.assert_array_equal(call(x, training=False), start)

    def through_signature() -> Any:
        return signatures["serving_default"](input_1=unoptimized_tf.constant(x))["dense"]

    def through_call() -> Any:
        return call(x, training=False)

    variables = list(signatures["serving_default"].trainable_variables)
    assert len(variables) == 38
    for function in (through_signature, through_call):

        def loss(function: Callable[[], Any] = function) -> Any:
            return -unoptimized_tf.reduce_mean(
                unoptimized_tf.math.log(unoptimized_tf.gather(function(), labels, axis=1, batch_dims=1) + 1e-7)
            )

        losses = descend(unoptimized_tf, loss, variables, 1e-4)
        assert losses[-1] < losses[0], function.__name__
    after = np.asarray(signatures["serving_default"](input_1=unoptimized_tf.constant(x))["dense"])
    assert np.abs(after - start).max() > 0
    module = unoptimized_tf.Module()
    module.layers = [loaded[f"root.{name}"] for name in names if name.startswith("layer_with_weights")]
    unoptimized_tf.saved_model.save(module, str(tmp_path / "again"), signatures=signatures)
    again = unoptimized_tf.saved_model.load(str(tmp_path / "again"))
    np.testing.assert_array_equal(
        again.signatures["serving_default"](input_1=unoptimized_tf.constant(x))["dense"], after
    )
    layer = unoptimized_tf.keras.layers.TFSMLayer(str(tmp_path / "again"), call_endpoint="serving_default")
    np.testing.assert_array_equal(layer(x)["dense"], after)


# -- Keras 3: nested functions and tf.cond -----------------------------------------------------------


@pytest.fixture(scope="module")
def gate(unoptimized_tf: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[gq.Result, Path]:
    """A Keras 3 model with a branch in a tf.function, exported, quantized and saved."""
    folder = tmp_path_factory.mktemp("gate")
    write_gate(folder / "gate")
    loaded = gq.load(folder / "gate")
    (spec,) = formats.format_module("tensorflow").create_runner(loaded).inputs
    # Samples of which the Gate's input is above and below its threshold, so that both branches are calibrated.
    np.savez(folder / "data.npz", **{spec.name: np.concatenate([pictures(8), 0.05 * pictures(8)])})
    result = gq.insert(loaded, data=str(folder / "data.npz"), validate=False)
    return result, result.save(folder / "quantized")


def pictures(count: int) -> Array:
    """Return inputs [count, 8, 8, 3]."""
    return np.random.default_rng(0).normal(0.7, 1, (count, 8, 8, 3)).astype(np.float32)


def gate_by_hand(tf: Any, result: gq.Result, loaded: Any, x: Array) -> tuple[Array, str]:
    """Compute the model's result and the branch that it runs."""
    hand = ByHand(result)
    variables = {variable.name.partition(":")[0]: variable for variable in loaded.variables}

    def op(end: str) -> str:
        return next(op for op, _ in hand.by_use if op.endswith(end))

    conv, dense = op("c_1/convolution"), op("d_1/MatMul")
    y = tf.nn.conv2d(hand.quantized(x, conv), hand.quantized(variables["c/kernel"], conv, 1), 1, "SAME")
    y = tf.nn.relu(tf.nn.bias_add(y, variables["c/bias"]))
    y = tf.reduce_mean(hand.quantized(y, op("mean_1/Mean")), [1, 2])
    y = hand.quantized(y, op("gate_1/StatefulPartitionedCall"))
    branches = {
        insertion.site.uses[0].graph: insertion
        for insertion in result.inserted
        if "cond_" in insertion.site.uses[0].graph
    }
    mean = tf.reduce_mean(hand.quantized(y, "Mean"))
    branch = "true" if mean > 0.1 else "false"
    name = next(name for name in branches if name.startswith(f"cond_{branch}"))
    inside = ByHand(result)
    inside.by_use = {
        (use.op, use.slot): insertion
        for insertion in result.inserted
        for use in insertion.site.uses
        if use.graph == name and insertion.site.clone_of is None
    }
    weight = inside.quantized(variables["gate/a" if branch == "true" else "gate/b"], "cond/MatMul", 1)
    y = inside.quantized(y, "cond/MatMul") @ weight
    y = tf.nn.relu(y) if branch == "true" else y
    for consumer, slot in [use for use in inside.by_use if use[0] != "cond/MatMul"]:
        y = inside.quantized(y, consumer, slot)
    y = hand.quantized(y, dense) @ hand.quantized(variables["d/kernel"], dense, 1)
    y = hand.quantized(tf.nn.bias_add(y, variables["d/bias"]), "Identity")
    return np.asarray(hand.quantized(y, "@identity") if ("@identity", 0) in hand.by_use else y), branch


def test_keras_export_answers_as_written_by_hand(unoptimized_tf: Any, gate: tuple[gq.Result, Path]) -> None:
    """`serve` and the signature equal the hand-written model bit for bit, in both branches."""
    result, path = gate
    loaded = unoptimized_tf.saved_model.load(str(path))
    assert summarize_model(result.model).float_clone_ops == ()
    branches = []
    for x in (pictures(4), 0.05 * pictures(4)):
        expected, branch = gate_by_hand(unoptimized_tf, result, loaded, x)
        branches.append(branch)
        np.testing.assert_array_equal(loaded.serve(x), expected)
        ((name, _),) = loaded.signatures["serving_default"].structured_input_signature[1].items()
        np.testing.assert_array_equal(
            loaded.signatures["serving_default"](**{name: unoptimized_tf.constant(x)})["output_0"], expected
        )
    assert branches == ["true", "false"]


def test_keras_export_trains_and_is_saved_again(
    unoptimized_tf: Any, gate: tuple[gq.Result, Path], tmp_path: Path
) -> None:
    """Five SGD steps through `serve` lower the loss in both branches; then saving and use as a layer."""
    _, path = gate
    loaded = unoptimized_tf.saved_model.load(str(path))
    for x in (pictures(4), 0.05 * pictures(4)):
        target = 0.5 * loaded.serve(x)

        def loss(x: Array = x, target: Any = target) -> Any:
            return unoptimized_tf.reduce_mean((loaded.serve(x) - target) ** 2)

        variables = [
            variable
            for variable in loaded.trainable_variables
            if variable.name[:6] != ("gate/b" if x.mean() > 0.5 else "gate/a")
        ]
        losses = descend(unoptimized_tf, loss, variables, 0.02)
        assert losses[-1] < losses[0]
    x = pictures(4)
    unoptimized_tf.saved_model.save(loaded, str(tmp_path / "again"), signatures=loaded.signatures)
    again = unoptimized_tf.saved_model.load(str(tmp_path / "again"))
    np.testing.assert_array_equal(again.serve(x), loaded.serve(x))
    layer = unoptimized_tf.keras.layers.TFSMLayer(str(tmp_path / "again"), call_endpoint="serve")
    np.testing.assert_array_equal(layer(x), loaded.serve(x))


def test_keras_export_frozen(unoptimized_tf: Any, gate: tuple[gq.Result, Path]) -> None:
    """The frozen graph gives the same results, and ops have their names in the layers."""
    result, _ = gate
    frozen = gq.freeze(result.source)
    names = {re.sub(r"^net(_\d+)*/", "", op.name) for op in frozen.main.ops()}
    assert {"c_1/convolution", "d_1/MatMul"} <= names, sorted(names)
    before, after = (formats.format_module("tensorflow").create_runner(model) for model in (result.source, frozen))
    for x in (pictures(4), 0.05 * pictures(4)):
        expected = before.run({before.inputs[0].name: x})["output_0"]
        np.testing.assert_allclose(after.run({after.inputs[0].name: x})["output_0"], expected, rtol=1e-5, atol=1e-6)


# -- TensorFlow 1: SavedModels of its builder, MetaGraphs with checkpoints ---------------------------


@pytest.fixture(scope="module")
def old(unoptimized_tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a TensorFlow 1 net, as "saved_model" and as "net.meta" with its checkpoint, and data."""
    folder = tmp_path_factory.mktemp("old")
    write_tensorflow_1_net(folder)
    np.savez(folder / "data.npz", image=pictures(8))
    return folder


def old_by_hand(tf: Any, result: gq.Result, values: dict[str, Array], x: Array) -> Array:
    """Compute the net's result with these kernels."""
    hand = ByHand(result)
    kernel = hand.quantized(values["conv/kernel"], "conv/Conv2D", 1)
    y = tf.nn.relu(tf.nn.conv2d(hand.quantized(x, "conv/Conv2D"), kernel, 1, "SAME"))
    y = tf.reduce_mean(hand.quantized(y, "mean"), [1, 2])
    y = hand.quantized(y, "logits") @ hand.quantized(values["dense/kernel"], "logits", 1)
    (end,) = set(hand.by_use) - hand.taken
    return np.asarray(hand.quantized(y, end[0]))


@pytest.mark.parametrize("form", ["saved_model", "net.meta"])
def test_tf1_models_still_train(unoptimized_tf: Any, old: Path, tmp_path: Path, form: str) -> None:
    """TensorFlow 1 models: loading, results equal to hand-written ones, five SGD steps, saving, loading again.

    The steps go through the graph itself, by `tf.gradients` of the signature's output.
    """
    v1 = unoptimized_tf.compat.v1
    result = gq.insert(old / form, data=str(old / "data.npz"), validate=False)
    path = result.save(tmp_path / form)
    config = v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True

    def load(session: Any, path: Path) -> None:
        if form == "saved_model":
            v1.saved_model.load(session, ["serve"], str(path))
        else:
            v1.train.import_meta_graph(str(path)).restore(session, str(path.with_suffix("")))

    x, target, losses = pictures(4), np.zeros((4, 2), np.float32), []
    checkpoint, keys = result.source.source.checkpoint()
    values = {name: checkpoint.read(keys[name]) for name in ("conv/kernel", "dense/kernel")}
    expected = old_by_hand(unoptimized_tf, result, values, x)
    with v1.Session(graph=unoptimized_tf.Graph(), config=config) as session, session.graph.as_default():
        load(session, path)
        logits = session.graph.get_tensor_by_name("logits:0")
        (end,) = [insertion.output for insertion in result.inserted if insertion.site.tensor.op == "logits"]
        answer = session.graph.get_tensor_by_name(f"{end.op}:0")
        variables = v1.trainable_variables()
        assert [variable.op.name for variable in variables] == ["conv/kernel", "dense/kernel"]
        np.testing.assert_array_equal(session.run(answer, {"image:0": x}), expected)
        assert np.abs(session.run(logits, {"image:0": x}) - expected).max() > 0
        loss = unoptimized_tf.reduce_mean((answer - target) ** 2)
        gradients = unoptimized_tf.gradients(loss, variables)
        step = [
            v1.assign_sub(variable, 0.05 * gradient) for variable, gradient in zip(variables, gradients, strict=True)
        ]
        for _ in range(5):
            losses.append(session.run(loss, {"image:0": x}))
            session.run(step, {"image:0": x})
        losses.append(session.run(loss, {"image:0": x}))
        assert losses[-1] < losses[0]
        after = session.run(answer, {"image:0": x})
        again = tmp_path / "again"
        if form == "saved_model":
            signature = v1.saved_model.predict_signature_def(
                {"image": session.graph.get_tensor_by_name("image:0")}, {"logits": answer}
            )
            builder = v1.saved_model.builder.SavedModelBuilder(str(again))
            builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
            builder.save()
        else:
            v1.train.Saver().save(session, str(again / "net"))
            again /= "net.meta"
    with v1.Session(graph=unoptimized_tf.Graph(), config=config) as session, session.graph.as_default():
        load(session, again)
        np.testing.assert_array_equal(session.run(f"{end.op}:0", {"image:0": x}), after)
    if form == "saved_model":
        layer = unoptimized_tf.keras.layers.TFSMLayer(str(again), call_endpoint="serving_default")
        np.testing.assert_array_equal(layer(x)["logits"], after)


@pytest.mark.parametrize("form", ["saved_model", "net.meta"])
def test_weights_in_variables_have_the_checkpoints_ranges(old: Path, form: str) -> None:
    """A weight's scale is its largest magnitude in the checkpoint divided by 127."""
    result = gq.insert(old / form, rules=["weight_only"])
    checkpoint, keys = result.source.source.checkpoint()
    by_consumer = {insertion.site.uses[0].op: insertion for insertion in result.inserted}
    for consumer, name, axes in (("conv/Conv2D", "conv/kernel", (0, 1, 2)), ("logits", "dense/kernel", (0,))):
        insertion = by_consumer[consumer]
        largest = np.abs(checkpoint.read(keys[name])).max(axes if insertion.params.axis is not None else None)
        np.testing.assert_allclose(insertion.params.scale, largest / 127, rtol=1e-6)


# -- gradients of QuantizeAndDequantize ---------------------------------------------------------------

CLIPPED_SCHEMES = """
[scheme.weight]
bits = 8
zero = "symmetric"
observe = "absmax"

[scheme.input]
bits = 8
zero = "symmetric"
observe = { name = "fixed", low = -0.5, high = 0.5 }
"""
CLIPPED = CLIPPED_SCHEMES + weight_rule("matmul") + input_rule("matmul", "input")


@pytest.mark.parametrize("family", ["quantize-and-dequantize-v2", "quantize-and-dequantize-v4"])
def test_gradients_through_the_loaded_model(unoptimized_tf: Any, tmp_path: Path, family: str) -> None:
    """V2 passes gradients through, V4 only within the range; five steps lower the loss."""

    class Dense(unoptimized_tf.Module):  # type: ignore[misc]  # TensorFlow has no types
        def __init__(self) -> None:
            super().__init__()
            self.w = unoptimized_tf.Variable(
                np.random.default_rng(2).normal(0, 0.3, (5, 3)).astype(np.float32), name="w"
            )

        @unoptimized_tf.function(input_signature=[unoptimized_tf.TensorSpec([None, 5])])  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return x @ self.w

    module = Dense()
    unoptimized_tf.saved_model.save(module, str(tmp_path / "net"), signatures=module.__call__)
    (tmp_path / "rules.toml").write_text(CLIPPED)
    result = gq.insert(tmp_path / "net", rules=[str(tmp_path / "rules.toml")], family=family)
    loaded = unoptimized_tf.saved_model.load(str(result.save(tmp_path / "quantized")))
    x = unoptimized_tf.constant(np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5))
    largest = float(np.abs(module.w.numpy()).max())
    call = unoptimized_tf.quantization.quantize_and_dequantize_v2
    quantized_x = call(x, -0.5, 0.5, range_given=True)
    quantized_w = call(module.w, -largest, largest, range_given=True)
    with unoptimized_tf.GradientTape() as tape:
        tape.watch(x)
        y = loaded(x)
    seed = unoptimized_tf.constant(np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32))
    by_x, by_w = tape.gradient(y, [x, loaded.w], seed)
    np.testing.assert_allclose(y, quantized_x @ quantized_w, rtol=1e-6, atol=1e-6)
    inside = (np.abs(x) <= 0.5).astype(np.float32) if family.endswith("v4") else 1.0
    np.testing.assert_allclose(by_x, (seed @ unoptimized_tf.transpose(quantized_w)) * inside, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(by_w, unoptimized_tf.transpose(quantized_x) @ seed, rtol=1e-6, atol=1e-6)
    losses = descend(unoptimized_tf, lambda: unoptimized_tf.reduce_mean((loaded(x) - 0.1) ** 2), [loaded.w], 0.1)
    assert losses[-1] < losses[0]
